"""What single messages say. The forms are those of the kernel's and the drivers' own printf calls."""

from __future__ import annotations

from typing import Any

import pytest

from steadyrun.collectors.kernel.events import KernelEvent, read_text
from steadyrun.collectors.kernel.kinds import KINDS
from steadyrun.collectors.kernel.reading import normal_pci, read_message
from steadyrun.collectors.kernel.xids import SXIDS, XIDS, XidClass, sxid_entry, xid_entry
from steadyrun.collectors.protocol import Health


def event_of(line: str) -> KernelEvent:
    (event,) = read_text([line])
    return event


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("NVRM: Xid (PCI:0000:cb:00 GPU-I:03): 94, pid=7, name=a, Contained", {"xid": 94, "gi": 3}),
        ("NVRM: Xid (PCI:0000:cb:00 GPU-I:03 GPU-CI:01): 31, pid=7, name=a, x", {"xid": 31, "gi": 3, "ci": 1}),
        ("NVRM: Xid (PCI:00000000:CB:00.0): 31, x", {"xid": 31, "pci": "0000:cb:00"}),
        ("NVRM: Xid (PCI:0001:cb:1f): 31", {"xid": 31, "pci": "0001:cb:1f"}),
        ("NVRM: Xid (03:00): 8, Channel 1", {"xid": 8, "pci": "0000:03:00"}),
        ("NVRM: Xid (PCI:0000:cb:00): 13, pid=7, name=Web Content, x", {"pid": 7, "comm": "Web Content"}),
        ("NVRM: Xid (PCI:0000:cb:00): 13, pid=7, name=a,b:c, Ch 1", {"pid": 7, "comm": "a,b:c"}),
        ("NVRM: Xid (PCI:0000:cb:00): 13, pid=7", {"pid": 7}),
        ("NVRM: Xid (PCI:0000:cb:00): 13, pid=99999999999999, name=a, x", {"xid": 13, "comm": "a"}),
        ("NVRM: Xid (PCI:0000:cb:00): 74, pid=7, name=a, NVLink: error on link 2 (0x0)", {"link": 2}),
        ("NVRM: Xid (PCI:0000:cb:00): 999, something new", {"xid": 999}),
    ],
)
def test_xid_forms(line: str, fields: dict[str, Any]) -> None:
    event = event_of(line)
    assert event.event == "xid"
    assert {k: event.fields.get(k) for k in fields} == fields


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0000:cb:00): garbled",
        "NVRM: Xid (PCI:0000:cb:00): 123456789, x",
        "NVRM: Xid (PCI:zzzz:cb:00): 79, x",
        "NVRM: Xid (PCI:0000:cb:00) 79, x",
        "NVRM: GPU at PCI:0000:cb:00: GPU-5d1e",
        "NVRM: GPU 0000:29:00.0: is fine",
        "nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 22013, Severity 0 Engine instance 60 Sub-engine instance 00",
        "nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 22013, Data {0x0000003c, 0x00000000}",
        "nvidia-nvswitch3: using MSI",
        "EXT4-fs (sda1): mounted filesystem with ordered data mode. Opts: (null)",
        "XFS (nvme0n1): Mounting V5 Filesystem",
        "nfs: Deprecated parameter 'intr'",
        "Lustre: Lustre: Build Version: 2.15.5",
        "libceph: loaded (mon/osd proto 15/24)",
        "IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready",
        "CPU3: Core temperature/speed normal",
        "rcu: Hierarchical RCU implementation.",
        "Memory cgroup stats for /a:",
        "oom_reaper: reaped process 63214 (uwsgi), now anon-rss:0kB, file-rss:0kB, shmem-rss:0kB",
        "EDAC MC: Ver: 3.0.0",
        "EDAC MC0: Giving out device to module skx_edac",
        "mce: CPU0: Thermal monitoring enabled (TM1)",
        "nvme nvme0: 64/0/0 default/read/poll queues",
        "python3[1]: not a segfault",
        "",
        " ",
        "\0",
    ],
)
def test_what_is_no_event(line: str) -> None:
    assert list(read_text([line])) == []


MESSAGES = {
    "Out of memory: Killed process 77 (python3) total-vm:1kB, anon-rss:2kB, file-rss:3kB, shmem-rss:0kB, UID:0": (
        "oom_killed",
        {"pid": 77, "comm": "python3", "anon_kb": 2, "scope": "Out of memory"},
    ),
    "Memory cgroup out of memory: Killed process 77 (a (b) c) total-vm:1kB, anon-rss:2kB": (
        "oom_killed",
        {"pid": 77, "comm": "a (b) c"},
    ),
    "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/a.slice,"
    "task=x,y=z,pid=5,uid=1000": ("oom_kill", {"comm": "x,y=z", "pid": 5, "task_memcg": "/a.slice"}),
    "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/job,task_memcg=/job/r0,"
    "task=x,pid=5,uid=0": ("oom_kill", {"memcg": "/job", "task_memcg": "/job/r0"}),
    "INFO: task kworker/u8:3:77 blocked for more than 122 seconds.": (
        "hung_task",
        {"comm": "kworker/u8:3", "pid": 77, "seconds": 122},
    ),
    "NMI watchdog: Watchdog detected hard LOCKUP on cpu 3": ("hard_lockup", {"cpu": 3}),
    "rcu: INFO: rcu_sched self-detected stall on CPU": ("rcu_stall", {}),
    "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:": ("rcu_stall", {}),
    "INFO: rcu_sched detected expedited stalls on CPUs/tasks: { 3-... }": ("rcu_stall", {}),
    "kernel BUG at mm/slub.c:4023!": ("kernel_bug", {"why": "mm/slub.c:4023!"}),
    "BUG: unable to handle page fault for address: ffff8": ("kernel_bug", {}),
    "Oops: 0002 [#1] SMP NOPTI": ("kernel_bug", {}),
    "Kernel panic - not syncing: Fatal machine check": ("mce_fatal", {}),
    "Kernel panic - not syncing: Attempted to kill init!": ("panic", {}),
    "EDAC MC0: 1 UE memory read error on CPU_SrcID#0": ("edac_uncorrected", {"mc": 0, "n": 1}),
    "mce: [Hardware Error]: CPU 7: Machine Check: 0 Bank 5: be00000000800400": ("mce_bank", {"cpu": 7, "bank": 5}),
    "Memory failure: 0x1a2b3: recovery action for dirty LRU page: Recovered": ("memory_failure", {"page": "1a2b3"}),
    "{1}[Hardware Error]: event severity: fatal": ("hardware_error", {"severity": "fatal"}),
    "mce: CPU12: Core temperature is above threshold, cpu clock is throttled (total events = 1)": (
        "cpu_throttled",
        {"cpu": 12, "what": "Core"},
    ),
    "CPU12: Package temperature above threshold, cpu clock throttled (total events = 1)": (
        "cpu_throttled",
        {"cpu": 12},
    ),
    "pcieport 0000:00:03.0: AER: Uncorrected (Fatal) error received: 0000:03:00.0": (
        "pcie_aer",
        {"dev": "0000:00:03.0", "sev": "Uncorrected (Fatal)"},
    ),
    "pcieport 0000:00:03.0: AER: Multiple Corrected error received: 0000:03:00.0": ("pcie_aer", {"sev": "Corrected"}),
    "pcieport 0000:00:1d.0: DPC: containment event, status:0x1f01 source:0x0000": ("pcie_dpc", {"dev": "0000:00:1d.0"}),
    "pcieport 0000:00:1d.0: pciehp: Slot(12): Link Down": ("pcie_slot", {"slot": "12", "what": "Link Down"}),
    "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0xffff:2015)": ("gpu_init_failed", {"pci": "0000:3b:00"}),
    "NVRM: API mismatch: the client has the version 570.1, but\nNVRM: this kernel module has the version 560.2.": (
        "driver_mismatch",
        {},
    ),
    "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further processing": (
        "peermem",
        {},
    ),
    "mlx5_core 0000:0d:00.0: mlx5_pcie_event:299:(pid 268): Detected insufficient power on the PCIe slot (27W).": (
        "nic_power",
        {"dev": "0000:0d:00.0", "watts": 27},
    ),
    "mlx5_core 0000:0d:00.0: mlx5_cmd_out_err:808:(pid 9): ACCESS_REG(0x805) op_mod(0x1) failed, status bad": (
        "nic_register_denied",
        {"dev": "0000:0d:00.0"},
    ),
    "mlx5_core 0000:12:00.0: 63.008 Gb/s available PCIe bandwidth, limited by 8.0 GT/s PCIe x8 link at 0000:00:02.0 "
    "(capable of 252.048 Gb/s)": ("nic_pcie_limited", {"gbps": "63.008", "link": "8.0 GT/s PCIe x8 link"}),
    "mlx5_core 0000:53:00.0 enp83s0f0np0: Link down": ("nic_link_down", {"ifname": "enp83s0f0np0"}),
    "mlx5_core 0000:53:00.0 enp83s0f0np0: Link up": ("nic_link_up", {"ifname": "enp83s0f0np0"}),
    "mlx5_core 0000:53:00.0 mlx5_3: Port: 1 Link DOWN": ("nic_ib_port", {"ib": "mlx5_3", "port": 1, "state": "DOWN"}),
    "bond0: (slave enp83s0f0np0): link status definitely down, disabling slave": (
        "nic_link_down",
        {"ifname": "enp83s0f0np0", "bond": "bond0"},
    ),
    "ixgbe 0000:01:00.0 eno1: NIC Link is Up 10 Gbps, Flow Control: RX/TX": ("nic_link_up", {"ifname": "eno1"}),
    "NETDEV WATCHDOG: eth0 (ena): transmit queue 3 timed out": ("nic_tx_timeout", {"ifname": "eth0", "queue": 3}),
    "NETDEV WATCHDOG: eth0 (ena): CPU: 4: transmit queue 3 timed out 5012 ms": ("nic_tx_timeout", {"driver": "ena"}),
    "EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm ls: reading directory": ("fs_error", {}),
    "Aborting journal on device sda1-8.": ("fs_error", {}),
    'XFS (nvme1n1): metadata I/O error in "xfs_da_read_buf+0xd9" at daddr 0x0 len 8 error 5': ("fs_error", {}),
    "XFS (dm-3): Corruption of in-memory data (0x8) detected at x (fs/xfs/x.c:1). Shutting down filesystem.": (
        "fs_error",
        {},
    ),
    "BTRFS error (device sdb): bdev /dev/sdb errs: wr 1, rd 0": ("fs_error", {}),
    "BTRFS info (device sdb: state E): forced readonly": ("fs_readonly", {"fs": "BTRFS"}),
    "blk_update_request: I/O error, dev sda, sector 12345 op 0x0:(READ)": ("io_error", {"dev": "sda", "block": 12345}),
    "critical medium error, dev nvme0n1, sector 77 op 0x0:(READ) flags 0x0": ("io_error", {"dev": "nvme0n1"}),
    "nvme nvme1: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10": ("nvme_disabled", {"dev": "nvme1"}),
    "nfs: server 10.0.0.1 not responding, still trying": ("nfs_timeout", {"server": "10.0.0.1"}),
    "nfs: server nas.example not responding, timed out": ("nfs_timeout", {"server": "nas.example"}),
    "Lustre: scratch-OST0003-osc-ffff8: Connection to scratch-OST0003 (at 10.0.0.1@o2ib) was lost; in progress "
    "operations using this service will wait for recovery to complete": ("lustre_lost", {"target": "scratch-OST0003"}),
    "Lustre: scratch-OST0003-osc-ffff8: Connection restored to scratch-OST0003 (at 10.0.0.1@o2ib)": (
        "lustre_ok",
        {"target": "scratch-OST0003"},
    ),
    "LustreError: 167-0: scratch-MDT0000-mdc-ffff8: This client was evicted by scratch-MDT0000; in progress operations "
    "using this service will fail.": ("lustre_evicted", {"target": "scratch-MDT0000"}),
    "LustreError: 11-0: scratch-OST0001-osc-ffff8: operation ost_write to node 10.0.0.1@tcp failed: rc = -107": (
        "lustre_error",
        {"what": "ost_write"},
    ),
    "libceph: mon0 (1)10.0.0.1:6789 session lost, hunting for new mon": ("ceph_lost", {"server": "mon0"}),
    "libceph: osd12 down": ("ceph_lost", {"server": "osd12"}),
    "libceph: osd12 up": ("ceph_ok", {"server": "osd12"}),
    "ceph: mds0 hung": ("ceph_lost", {"server": "mds0"}),
    "CIFS: VFS: \\\\nas.example has not responded in 180 seconds. Reconnecting...": (
        "cifs_timeout",
        {"server": "nas.example"},
    ),
    "python3[4222]: segfault at 0 ip 00007f sp 00007f error 4 in libnccl.so.2.21.5[7f0+1000]": (
        "nccl_segfault",
        {"pid": 4222, "library": "libnccl.so.2.21.5"},
    ),
    "python3[4222]: segfault at 0 ip 00007f0 sp 00007f1 error 4 in libtorch_cpu.so[7f0+1000] likely on CPU 1": (
        "segfault",
        {"comm": "python3", "pid": 4222, "library": "libtorch_cpu.so"},
    ),
    "my prog[4222]: segfault at 8 ip 00007f0 sp 00007f1 error 6": ("segfault", {"comm": "my prog", "pid": 4222}),
    "traps: python3[9] general protection fault ip:7f sp:7f error:0 in libcuda.so[7f+1]": (
        "trap",
        {"comm": "python3", "library": "libcuda.so"},
    ),
    "traps: python3[9] trap invalid opcode ip:7f sp:7f error:0 in a.so[7f+1]": (
        "trap",
        {"what": "trap invalid opcode"},
    ),
}


@pytest.mark.parametrize(("line", "expected"), MESSAGES.items(), ids=[m[:60] for m in MESSAGES])
def test_messages(line: str, expected: tuple[str, dict[str, Any]]) -> None:
    event, fields = expected
    found = read_message(line)
    assert found is not None
    assert found[0] == event
    assert {k: found[1].get(k) for k in fields} == fields


def test_every_kind_is_in_the_table_and_every_row_can_be_read() -> None:
    seen = {expected[0] for expected in MESSAGES.values()}
    assert seen <= set(KINDS)
    elsewhere = {
        "soft_lockup",
        "edac_corrected",
        "mce",
        "nic_health",
        "nic_hot",
        "raid_failed",
        "nvme_timeout",
        "nfs_ok",
    }
    assert set(KINDS) - seen == elsewhere  # those are in the collected cases


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_kind_that_is_not_healthy_says_so_in_words(kind: Any) -> None:
    assert kind.meaning
    assert not kind.meaning.endswith(".")
    if kind.health is Health.UNHEALTHY:
        assert kind.advice
    if kind.ended_by:
        assert KINDS[kind.ended_by].health is Health.HEALTHY


def test_the_catalogue_is_whole() -> None:
    assert len(XIDS) == 124
    assert all(code == x.code and x.name and x.meaning and not x.meaning.endswith(".") for code, x in XIDS.items())
    assert {79, 151, 167} == {c for c, x in XIDS.items() if x.cls is XidClass.REBOOT}
    assert all(code == s.code and s.meaning for code, s in SXIDS.items())


def test_unknown_codes_are_taken_seriously() -> None:
    event = event_of("NVRM: Xid (PCI:0000:cb:00): 999, something new")
    assert event.cls is XidClass.UNKNOWN
    assert event.health is Health.UNHEALTHY
    assert event.actions
    assert xid_entry(999).name == ""
    assert "line says" in sxid_entry(4711).meaning


@pytest.mark.parametrize(
    ("text", "cls", "health"),
    [
        ("from 0x0 (None) to 0x1 (GPU Reset Required)", XidClass.RESET, Health.UNHEALTHY),
        ("from 0x0 (None) to 0x2 (Node Reboot Required)", XidClass.REBOOT, Health.UNHEALTHY),
        ("from 0x1 (GPU Reset Required) to 0x0 (None)", XidClass.INFO, Health.HEALTHY),
        ("from 0x0 (None) to 0x3 (Drain P2P)", XidClass.FABRIC, Health.UNHEALTHY),
        ("from 0x0 (None) to 0x9 (Something)", XidClass.UNKNOWN, Health.UNHEALTHY),
    ],
)
def test_xid_154_means_what_its_text_says(text: str, cls: XidClass, health: Health) -> None:
    event = event_of(f"NVRM: Xid (PCI:0000:cb:00): 154, GPU recovery action changed {text}")
    assert event.cls is XidClass.FOLLOW
    assert event.effective_class is cls
    assert event.health is health


@pytest.mark.parametrize(
    ("line", "health"),
    [
        ("nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 22013, Non-fatal, Link 60 Minion Link DLREQ interrupt", "healthy"),
        ("nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 12028, Non-fatal, Link 60 egress", "degraded"),
        ("nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", "unhealthy"),
        ("nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 4711, Fatal, Link 30 new", "unhealthy"),
        ("nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 4711, Unknown error", "unhealthy"),
        ("nvidia-nvswitch3: SXid (PCI:0000:08:00.0): 23010, Non-fatal, Link 1 overflow", "unhealthy"),
        (
            "NVRM: Xid (PCI:0008:01:00): 145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0x1 0x2 0x0 0x0 0x0 0x0)",
            "degraded",
        ),
        ("NVRM: Xid (PCI:0008:01:00): 149, NETIR Fatal XC0 i0 Link -1 (0x1 0x2 0x0 0x0 0x0 0x0)", "unhealthy"),
        ("pcieport 0000:00:03.0: AER: Corrected error received: 0000:00:03.0", "healthy"),
        ("pcieport 0000:00:03.0: AER: Uncorrected (Fatal) error received: 0000:00:03.0", "degraded"),
        ("mlx5_core 0000:53:00.0 mlx5_3: Port: 1 Link DOWN", "degraded"),
        ("mlx5_core 0000:53:00.0 mlx5_3: Port: 1 Link ACTIVE", "healthy"),
    ],
)
def test_what_the_message_says_of_its_severity_counts(line: str, health: str) -> None:
    assert event_of(line).health.value == health


@pytest.mark.parametrize(
    ("address", "normal"),
    [
        ("00000000:CB:00.0", "0000:cb:00"),
        ("0000:cb:00.0", "0000:cb:00"),
        ("PCI:0000:cb:00", "0000:cb:00"),
        ("cb:00.0", "0000:cb:00"),
        ("10000:e1:00.0", "10000:e1:00"),
        ("nonsense", "nonsense"),
    ],
)
def test_pci_addresses_are_spelled_one_way(address: str, normal: str) -> None:
    assert normal_pci(address) == normal


def test_an_event_is_one_flat_object() -> None:
    value = event_of("3,812,680111646286,-;NVRM: Xid (PCI:0000:cb:00): 79, pid=7, name=a, GPU has fallen").to_json()
    assert value == {
        "schema": "steadyrun.kernel-event/1",
        "line_number": 1,
        "event": "xid",
        "xid": 79,
        "pci": "0000:cb:00",
        "pid": 7,
        "comm": "a",
        "class": "reboot",
        "effective_class": "reboot",
        "name": "ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS",
        "at_s": 680111.646286,
        "sequence": 812,
        "level": 3,
        "subject": "gpu",
        "health": "unhealthy",
        "meaning": "the GPU does not answer on the PCIe bus any more",
        "actions": ["leave out the node and reboot it"],
        "count": 1,
        "text": "NVRM: Xid (PCI:0000:cb:00): 79, pid=7, name=a, GPU has fallen",
    }
