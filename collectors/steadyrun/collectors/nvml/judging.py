"""What the readings of a node's GPUs say: each by itself, and against the others of its kind. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

from steadyrun.collectors.nvml.asking import GPU_IS_LOST
from steadyrun.collectors.nvml.reading import GpuReading
from steadyrun.collectors.protocol import Health, Trouble

__all__ = ["gpu_troubles"]

RESET_REQUIRED: Final = 16
VERY_HOT_C: Final = 90  # public DCGM alert rules agree on more than 90 as critical
CLOCK_RATIO: Final = 0.8
BUSY_PERCENT: Final = 50
FEWEST_TO_COMPARE: Final = 3
_FABRIC_WORKS: Final = (0, 3)  # not supported, completed

_RESET: Final = ("stop the ranks of this GPU, then nvidia-smi --gpu-reset",)
_REBOOT: Final = ("leave out the node and reboot it",)
_INSPECT: Final = ("leave out the node and have the GPU inspected or replaced",)

# NVML's recovery action: name and advice.
_RECOVERY: Final[Mapping[int, tuple[str, tuple[str, ...]]]] = {
    1: ("a reset", _RESET),
    2: ("a reboot of the node", _REBOOT),
    3: ("that its peers stop using it", ("leave out the node; its NVLink fabric has to be drained",)),
    4: ("to be drained and reset", _RESET),
    6: ("a reset of its bus", _REBOOT),
    7: ("a reboot of the system", _REBOOT),
}
_THROTTLED: Final[Mapping[str, str]] = {
    "hw_slowdown": "by its hardware",
    "sw_thermal": "by the driver, for heat",
    "hw_thermal": "by its hardware, for heat",
    "hw_power_brake": "by its power supply",
}


def gpu_troubles(readings: Sequence[GpuReading], first: Mapping[int, GpuReading]) -> list[Trouble]:
    """*first*: the earliest complete reading of each GPU by its index, for what counts only when it has grown."""
    out: list[Trouble] = []
    for gpu in readings:
        if gpu.error is not None:
            out.append(_silent(gpu))
            continue
        alike = [g for g in readings if g.error is None and g.name == gpu.name and g.index != gpu.index]
        out += [*_needs(gpu), *_memory(gpu, first.get(gpu.index)), *_slow(gpu, alike), *_links(gpu, alike)]
    gone = sorted(set(first) - {g.index for g in readings})
    if gone:
        text = f"{len(gone)} of {len(first)} GPUs are not there any more: {', '.join(map(str, gone))}"
        out.append(Trouble(Health.UNHEALTHY, text, _REBOOT))
    return out


def _trouble(gpu: GpuReading, health: Health, text: str, actions: tuple[str, ...]) -> Trouble:
    return Trouble(health, f"{gpu.label} {text}", actions, f"gpu {gpu.pci or gpu.index}")


def _silent(gpu: GpuReading) -> Trouble:
    if gpu.error == GPU_IS_LOST:
        return _trouble(gpu, Health.UNHEALTHY, "is lost: it does not answer on its bus", _REBOOT)
    if gpu.error == RESET_REQUIRED:
        return _trouble(gpu, Health.UNHEALTHY, "needs a reset", _RESET)
    return _trouble(gpu, Health.UNHEALTHY, f"does not answer: NVML error {gpu.error}", ("nvidia-smi shows more",))


def _needs(gpu: GpuReading) -> list[Trouble]:
    action = gpu.recovery_action or 0
    if action == 0:
        return []
    what, advice = _RECOVERY.get(action, (f"recovery action {action}", _REBOOT))
    return [_trouble(gpu, Health.UNHEALTHY, f"needs {what}, says its driver", advice)]


def _memory(gpu: GpuReading, first: GpuReading | None) -> list[Trouble]:
    out = []
    if gpu.remap_failed:
        out.append(_trouble(gpu, Health.UNHEALTHY, "could not replace a bad row of its memory", _INSPECT))
    if gpu.remap_pending or gpu.retired_pending:
        out.append(_trouble(gpu, Health.DEGRADED, "waits for a reset to replace bad memory", _RESET))
    errors, before = gpu.ecc_uncorrected or 0, (first.ecc_uncorrected or 0) if first is not None else 0
    if errors > before:
        text = f"had {errors - before} uncorrectable memory error(s) since the job began"
        out.append(_trouble(gpu, Health.UNHEALTHY, text, _RESET))
    elif errors:
        text = f"had {errors} uncorrectable memory error(s) before the job began"
        out.append(_trouble(gpu, Health.DEGRADED, text, _RESET))
    return out


def _slow(gpu: GpuReading, alike: Sequence[GpuReading]) -> list[Trouble]:
    out = []
    cool = ("look at fans, air flow and the power supply; nvidia-smi -q -d PERFORMANCE,TEMPERATURE",)
    if gpu.throttled_by:
        whys = ", ".join(_THROTTLED[name] for name in gpu.throttled_by)
        out.append(_trouble(gpu, Health.DEGRADED, f"is slowed down {whys}", cool))
    if (temperature := gpu.temperature_c) is not None and temperature > VERY_HOT_C:
        out.append(_trouble(gpu, Health.DEGRADED, f"is at {temperature} °C", cool))
    clocks = [g.sm_clock_mhz for g in alike if g.sm_clock_mhz is not None and _is_busy(g)]
    if gpu.sm_clock_mhz is not None and _is_busy(gpu) and len(clocks) >= FEWEST_TO_COMPARE:
        usual = median(clocks)
        if gpu.sm_clock_mhz < CLOCK_RATIO * usual:
            text = f"runs at {gpu.sm_clock_mhz} MHz, the others at {usual:.0f}"
            out.append(_trouble(gpu, Health.DEGRADED, text, cool))
    return out


def _is_busy(gpu: GpuReading) -> bool:
    return (gpu.utilization_percent or 0) >= BUSY_PERCENT


def _links(gpu: GpuReading, alike: Sequence[GpuReading]) -> list[Trouble]:
    out = []
    others = [g.links_up for g in alike if g.links_up is not None]
    if gpu.links_up is not None and others and gpu.links_up < max(others):
        down = [i for i, up in enumerate(gpu.nvlinks or ()) if not up]
        which = f" (down: {', '.join(map(str, down))})" if down else ""
        text = f"has {gpu.links_up} NVLinks up, others have {max(others)}{which}"
        out.append(_trouble(gpu, Health.UNHEALTHY, text, ("reset the GPU and look at its peer and the switch",)))
    widths = [g.pcie_width for g in alike if g.pcie_width is not None]
    usual = max(widths, default=gpu.pcie_max_width or 0)
    if gpu.pcie_width is not None and gpu.pcie_width < min(usual, gpu.pcie_max_width or usual):
        text = f"uses {gpu.pcie_width} PCIe lanes of {usual}"
        out.append(_trouble(gpu, Health.DEGRADED, text, ("reseat the card or its riser",)))
    if gpu.fabric_state is not None and gpu.fabric_state not in _FABRIC_WORKS:
        advice = ("look at nvidia-fabricmanager: systemctl status nvidia-fabricmanager",)
        out.append(_trouble(gpu, Health.UNHEALTHY, "has not joined the NVLink fabric", advice))
    return out
