"""What each kind of kernel event means for a training job, apart from Xid and SXid, which have a catalogue: data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from steadyrun.collectors.protocol import Health

__all__ = ["KINDS", "Kind", "Subject", "kind_of"]

DAY_S: Final = 86400.0
FOREVER_S: Final = float("inf")


class Subject(str, Enum):
    """What an event is about."""

    GPU = "gpu"
    FABRIC = "fabric"
    MEMORY = "memory"
    CPU = "cpu"
    KERNEL = "kernel"
    PROCESS = "process"
    NETWORK = "network"
    STORAGE = "storage"
    BUS = "bus"


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of event.

    Attributes:
        health: of the machine after it.
        holds_s: for how long; ``inf``: until the machine starts anew.
        ended_by: the kind that says that it is over, for the same subject (``nfs_timeout`` by ``nfs_ok``).
    """

    name: str
    subject: Subject
    health: Health
    meaning: str
    advice: tuple[str, ...] = ()
    holds_s: float = 600.0
    ended_by: str = ""


_FREE: Final = "give the job more memory, or fewer data loader workers"
_DISK: Final = "look at the device with smartctl or nvme smart-log; move checkpoints to another one"
_CABLE: Final = "look at the cable, the port and the switch"
_DRIVER: Final = "reload the NVIDIA driver or reboot"
_DIMM: Final = "have the memory modules inspected"
_SERVER: Final = "look at the file server and the network to it"

_H, _D, _U = Health.HEALTHY, Health.DEGRADED, Health.UNHEALTHY

_ROWS: Final[tuple[Kind, ...]] = (
    # memory and processes
    Kind("oom_kill", Subject.MEMORY, _D, "the kernel ended a process for want of memory", (_FREE,)),
    Kind("oom_killed", Subject.MEMORY, _D, "the kernel ended a process for want of memory", (_FREE,)),
    Kind("segfault", Subject.PROCESS, _H, "a process touched memory that is not its own"),
    Kind("nccl_segfault", Subject.PROCESS, _H, "a process crashed inside NCCL", ("look at the versions of NCCL",)),
    Kind("trap", Subject.PROCESS, _H, "a process crashed on an instruction or a protected address"),
    # the kernel itself
    Kind("panic", Subject.KERNEL, _U, "the kernel gave up", ("leave out the node; look at its console",), FOREVER_S),
    Kind("kernel_bug", Subject.KERNEL, _U, "the kernel hit a bug of its own", ("reboot the node",), FOREVER_S),
    Kind("hung_task", Subject.KERNEL, _D, "a process is stuck in the kernel", ("look at its stack and its storage",)),
    Kind("soft_lockup", Subject.CPU, _D, "a CPU did not get out of the kernel", ("reboot the node when it repeats",)),
    Kind(
        "hard_lockup",
        Subject.CPU,
        _U,
        "a CPU takes no interrupts any more",
        ("leave out the node and reboot it",),
        DAY_S,
    ),
    Kind("rcu_stall", Subject.CPU, _D, "a CPU does not take part in the kernel's bookkeeping"),
    # machine checks
    Kind("mce", Subject.CPU, _H, "the CPU reported a hardware error; corrected ones are written like this too"),
    Kind(
        "mce_bank",
        Subject.CPU,
        _D,
        "the CPU reported a hardware error",
        ("run rasdaemon or mcelog for details",),
        DAY_S,
    ),
    Kind("mce_fatal", Subject.CPU, _U, "a hardware error of the CPU or memory cannot be survived", (_DIMM,), FOREVER_S),
    Kind("edac_corrected", Subject.MEMORY, _H, "main memory errors were corrected"),
    Kind(
        "edac_uncorrected", Subject.MEMORY, _U, "main memory has an error that cannot be corrected", (_DIMM,), FOREVER_S
    ),
    Kind("memory_failure", Subject.MEMORY, _U, "the kernel took a broken page of main memory away", (_DIMM,), DAY_S),
    Kind("hardware_error", Subject.CPU, _D, "the firmware reported a hardware error", ("look at the BMC's event log",)),
    Kind("cpu_throttled", Subject.CPU, _D, "a CPU is too hot and was slowed down", ("look at fans and air flow",)),
    # buses
    Kind("pcie_aer", Subject.BUS, _D, "a PCIe device reported errors", ("reseat the card; look at the riser",)),
    Kind("pcie_dpc", Subject.BUS, _U, "a PCIe port was shut after a fatal error", ("reboot the node",), DAY_S),
    Kind("pcie_slot", Subject.BUS, _U, "a PCIe slot lost its link or its card", ("reboot the node",), DAY_S),
    # GPUs, beside Xid
    Kind("gpu_init_failed", Subject.GPU, _U, "the driver could not start a GPU", (_DRIVER,), DAY_S),
    Kind("driver_mismatch", Subject.GPU, _U, "the driver's library and module differ in version", (_DRIVER,), DAY_S),
    Kind("peermem", Subject.NETWORK, _D, "GPUDirect RDMA lost a context; usually a process that died", ()),
    # network
    Kind(
        "nic_health",
        Subject.NETWORK,
        _U,
        "a network card's firmware does not answer",
        ("reset the card or reboot",),
        DAY_S,
    ),
    Kind("nic_power", Subject.NETWORK, _D, "a network card gets too little power", ("use another slot",), FOREVER_S),
    Kind("nic_hot", Subject.NETWORK, _D, "an optical module is too hot", ("look at the module and the air flow",)),
    Kind(
        "nic_register_denied",
        Subject.NETWORK,
        _H,
        "a counter of a card may not be read; harmless, and its reader's fault",
    ),
    Kind(
        "nic_pcie_limited",
        Subject.NETWORK,
        _D,
        "a network card has less PCIe bandwidth than it could use",
        ("use another slot; look at the width with lspci -vv",),
        FOREVER_S,
    ),
    Kind("nic_ib_port", Subject.NETWORK, _H, "an InfiniBand port changed its state"),
    Kind("nic_link_down", Subject.NETWORK, _D, "a network link went down", (_CABLE,), ended_by="nic_link_up"),
    Kind("nic_link_up", Subject.NETWORK, _H, "a network link came up"),
    Kind("nic_tx_timeout", Subject.NETWORK, _D, "a network card does not send", ("look at its driver and firmware",)),
    # storage
    Kind("fs_readonly", Subject.STORAGE, _U, "a file system can only be read any more", (_DISK,), FOREVER_S),
    Kind("fs_error", Subject.STORAGE, _U, "a file system is damaged or cannot be written", (_DISK,), DAY_S),
    Kind("io_error", Subject.STORAGE, _D, "a block device failed to read or write", (_DISK,), DAY_S),
    Kind("raid_failed", Subject.STORAGE, _U, "a disk of an array failed", (_DISK,), FOREVER_S),
    Kind("nvme_timeout", Subject.STORAGE, _D, "an NVMe device did not answer in time", (_DISK,)),
    Kind("nvme_disabled", Subject.STORAGE, _U, "an NVMe device was given up", (_DISK,), FOREVER_S),
    Kind("nfs_timeout", Subject.STORAGE, _D, "an NFS server does not answer", (_SERVER,), 3600.0, "nfs_ok"),
    Kind("nfs_ok", Subject.STORAGE, _H, "an NFS server answers again"),
    Kind(
        "lustre_lost",
        Subject.STORAGE,
        _D,
        "the connection to a Lustre server was lost",
        (_SERVER,),
        3600.0,
        "lustre_ok",
    ),
    Kind(
        "lustre_evicted", Subject.STORAGE, _D, "a Lustre server threw this client out: open files are lost", (_SERVER,)
    ),
    Kind("lustre_error", Subject.STORAGE, _D, "an operation on Lustre failed", (_SERVER,)),
    Kind("lustre_ok", Subject.STORAGE, _H, "the connection to a Lustre server is back"),
    Kind("ceph_lost", Subject.STORAGE, _D, "a Ceph server is lost or does not answer", (_SERVER,), 3600.0, "ceph_ok"),
    Kind("ceph_ok", Subject.STORAGE, _H, "a Ceph server answers again"),
    Kind("cifs_timeout", Subject.STORAGE, _D, "a CIFS server does not answer", (_SERVER,)),
)

KINDS: Final[Mapping[str, Kind]] = {kind.name: kind for kind in _ROWS}


def kind_of(event: str) -> Kind:
    """The row; one that says little for a kind that is not in the table."""
    return KINDS.get(event) or Kind(event, Subject.KERNEL, Health.HEALTHY, "a message of the kernel")
