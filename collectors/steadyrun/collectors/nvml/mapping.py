"""Which GPU a rank uses, without touching CUDA: from CUDA_VISIBLE_DEVICES and what NVML lists. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from steadyrun.collectors.nvml.reading import GpuReading

__all__ = ["RankGpu", "gpu_of_rank", "numa_node_of"]


@dataclass(frozen=True, slots=True)
class RankGpu:
    """``gpu`` is None where it cannot be told, and ``why`` says so. ``mig``: the instance's name, where it is one."""

    gpu: GpuReading | None
    why: str = ""
    mig: str = ""


def gpu_of_rank(environ: Mapping[str, str], device: int, gpus: Sequence[GpuReading]) -> RankGpu:
    """The GPU behind ``cuda:<device>`` of a process with *environ*; by custom *device* is the rank's LOCAL_RANK.

    CUDA reads the list up to the first entry that is none, numbers devices by their place in it, and takes any
    beginning of a UUID that is unique. MIG instances: ``MIG-<uuid>``, or ``MIG-GPU-<uuid>/gi/ci`` of old drivers.
    """
    if device < 0:
        return RankGpu(None, f"{device} is no device")
    listed = environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        if device >= len(gpus):
            return RankGpu(None, f"cuda:{device} is beyond the {len(gpus)} GPUs of this node")
        return _by_order(device, gpus, environ)
    visible = _visible(listed, gpus, environ)
    if device >= len(visible):
        return RankGpu(None, f"cuda:{device} is beyond CUDA_VISIBLE_DEVICES={listed}")
    return visible[device]


def _visible(listed: str, gpus: Sequence[GpuReading], environ: Mapping[str, str]) -> list[RankGpu]:
    out: list[RankGpu] = []
    for entry in (e.strip() for e in listed.split(",")):
        found = _by_name(entry, gpus) if entry[:4] in ("GPU-", "MIG-") else _by_index(entry, gpus, environ)
        if found is None:
            break
        if any(f.gpu == found.gpu and f.mig == found.mig and found.gpu is not None for f in out):
            return []  # named twice: CUDA then sees none at all
        out.append(found)
    return out


def _by_index(entry: str, gpus: Sequence[GpuReading], environ: Mapping[str, str]) -> RankGpu | None:
    if not (entry.isascii() and entry.isdecimal() and len(entry) < 5 and int(entry) < len(gpus)):
        return None
    return _by_order(int(entry), gpus, environ)


def _by_order(number: int, gpus: Sequence[GpuReading], environ: Mapping[str, str]) -> RankGpu:
    """CUDA numbers by speed unless told otherwise; among equal models that is NVML's order, by PCI address."""
    ordered = sorted(gpus, key=lambda g: g.index)
    if environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({g.name for g in gpus}) == 1:
        return RankGpu(ordered[number])
    return RankGpu(None, "GPUs of different models are numbered by speed; set CUDA_DEVICE_ORDER=PCI_BUS_ID")


def _by_name(entry: str, gpus: Sequence[GpuReading]) -> RankGpu | None:
    if entry.startswith("MIG-GPU-"):
        uuid = entry.removeprefix("MIG-").partition("/")[0]
        found = [g for g in gpus if g.uuid == uuid]
        return RankGpu(found[0], mig=entry) if len(found) == 1 else None
    if entry.startswith("MIG-"):
        split = [g for g in gpus if g.mig == 1]
        if len(split) == 1:
            return RankGpu(split[0], mig=entry)
        return RankGpu(None, f"{entry} is a part of one of {len(split)} GPUs in MIG mode", entry)
    found = [g for g in gpus if g.uuid.startswith(entry)]
    return RankGpu(found[0]) if len(found) == 1 else None


def numa_node_of(pci: str, sys: Path = Path("/sys")) -> int | None:
    """The NUMA node of the device at ``dddd:bb:dd``; None where the machine has but one, or does not tell."""
    try:
        node = int((sys / "bus/pci/devices" / f"{pci}.0" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
