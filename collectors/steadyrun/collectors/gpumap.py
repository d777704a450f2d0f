"""Which GPU each rank of a node uses, without touching CUDA: from its environment, /proc and what the driver lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steadyrun.collectors.kernel.reading import normal_pci
from steadyrun.collectors.nvml.mapping import gpu_of_rank, numa_node_of
from steadyrun.collectors.nvml.reading import GpuReading

__all__ = ["RankDevice", "RankProcess", "devices_of_ranks", "gpus_of_driver", "read_environment"]

_MOST_BYTES: Final = 1 << 20
_KEPT: Final = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LOCAL_RANK")


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank's process. ``environ``: what it was started with, where that is known; else /proc is asked."""

    pid: int
    local_rank: int
    environ: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class RankDevice:
    """A rank's GPU.

    Attributes:
        index: as NVML counts; None where it cannot be told, and ``why`` says so.
        pci: ``dddd:bb:dd``.
        numa: of the machine, None where it has but one or does not tell.
        mig: name of the instance, where the GPU is split.
        is_seen: the driver lists the process on it; else it follows from the environment.
        others: indices of further GPUs that the driver lists the process on.
    """

    index: int | None
    uuid: str = ""
    pci: str = ""
    numa: int | None = None
    mig: str = ""
    is_seen: bool = False
    others: tuple[int, ...] = ()
    why: str = ""

    @property
    def label(self) -> str:
        """``GPU 3 (0000:cb:00)``, or empty."""
        if self.index is None:
            return ""
        return f"GPU {self.index}" + (f" ({self.pci})" if self.pci else "")


def devices_of_ranks(
    ranks: Mapping[int, RankProcess], gpus: Sequence[GpuReading], root: Path = Path("/")
) -> dict[int, RankDevice]:
    """The GPU of each rank.

    What the driver lists goes first: a script may choose its device in any way. It lists a process once that has a
    context, and in a container perhaps never, as it may count processes otherwise; then the environment is read.

    Args:
        ranks: this node's, by rank.
        gpus: this node's; empty where there are none.
        root: of the machine's files.
    """
    return {rank: _device_of(process, gpus, root) for rank, process in ranks.items()}


def _device_of(process: RankProcess, gpus: Sequence[GpuReading], root: Path) -> RankDevice:
    if not gpus:
        return RankDevice(None, why="no GPU is known on this node")
    environ = process.environ if process.environ is not None else read_environment(process.pid, root)
    by_name = None
    if environ is not None:
        by_name = gpu_of_rank(environ, _device_number(environ, process.local_rank), gpus)
    listed = [g for g in gpus if any(pid == process.pid for pid, _ in g.processes or ())]
    if listed:
        # A process that talks to its peers has a small context on each; its own GPU is the one that it fills.
        gpu = max(listed, key=lambda g: (_used_bytes(g, process.pid), by_name is not None and g == by_name.gpu))
        mig = by_name.mig if by_name is not None and by_name.gpu == gpu else ""
        others = tuple(g.index for g in listed if g is not gpu)
        return _found(gpu, root, mig, is_seen=True, others=others)
    if by_name is None:
        return RankDevice(None, why=f"the environment of process {process.pid} cannot be read")
    if by_name.gpu is None:
        return RankDevice(None, mig=by_name.mig, why=by_name.why)
    return _found(by_name.gpu, root, by_name.mig)


def _found(gpu: GpuReading, root: Path, mig: str, is_seen: bool = False, others: tuple[int, ...] = ()) -> RankDevice:
    numa = numa_node_of(gpu.pci, root / "sys") if gpu.pci else None
    return RankDevice(gpu.index, gpu.uuid, gpu.pci, numa, mig, is_seen, others)


def _used_bytes(gpu: GpuReading, pid: int) -> int:
    return sum(used for p, used in gpu.processes or () if p == pid)


def _device_number(environ: Mapping[str, str], local_rank: int) -> int:
    """``cuda:N`` by custom: N is LOCAL_RANK, which is 0 in each rank where each is shown one device only."""
    told = environ.get("LOCAL_RANK", "")
    return int(told) if told.isascii() and told.isdecimal() and len(told) < 6 else local_rank


def read_environment(pid: int, root: Path = Path("/")) -> dict[str, str] | None:
    """What of a process's environment decides over its device; None where it cannot be read.

    It is what the process was started with: what it has set itself since cannot be seen from outside.
    """
    try:
        with (root / "proc" / str(pid) / "environ").open("rb") as f:
            data = f.read(_MOST_BYTES)
    except OSError:
        return None
    pairs = (entry.decode(errors="replace").partition("=") for entry in data.split(b"\0"))
    return {name: value for name, _, value in pairs if name in _KEPT}


def gpus_of_driver(root: Path = Path("/")) -> tuple[GpuReading, ...]:
    """The GPUs as the kernel module lists them: names and places only, for when NVML does not answer."""
    folder = root / "proc/driver/nvidia/gpus"
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return ()
    found: list[GpuReading] = []
    for entry in entries:
        try:
            text = (entry / "information").read_text(errors="replace")
        except OSError:
            text = ""
        told = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in text.splitlines())}
        minor = told.get("Device Minor", "")
        found.append(
            GpuReading(
                index=len(found),
                uuid=told.get("GPU UUID", ""),
                pci=normal_pci(told.get("Bus Location", entry.name)),
                name=told.get("Model", ""),
                minor=int(minor) if minor.isdecimal() else None,
            )
        )
    return tuple(found)
