"""What is known of one GPU, out of the child's answers; whatever stands in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from steadyrun.collectors.kernel.reading import normal_pci

__all__ = ["THROTTLE_REASONS", "GpuReading", "merged"]

# Bits of nvmlDeviceGetCurrentClocksEventReasons that hold a GPU back against its user's will.
THROTTLE_REASONS: Final[Mapping[int, str]] = {
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}
_MAX_NUMBER: Final = 1 << 63


@dataclass(frozen=True, slots=True)
class GpuReading:
    """None where the GPU, its driver or this user's rights do not give it.

    Attributes:
        pci: ``dddd:bb:dd``, as the kernel log writes it.
        error: NVML's code when the GPU did not answer at all.
        clock_events: bits why the clock is what it is.
        recovery_action: what the driver says is needed: 0 nothing, 1 reset, 2 reboot, 3 drain, 4 drain and reset.
        nvlinks: 1 for each link that is up.
        processes: (pid, bytes) of each that computes on it.
    """

    index: int
    uuid: str = ""
    pci: str = ""
    name: str = ""
    minor: int | None = None
    error: int | None = None
    temperature_c: int | None = None
    memory_temperature_c: int | None = None
    power_mw: int | None = None
    power_limit_mw: int | None = None
    energy_mj: int | None = None
    sm_clock_mhz: int | None = None
    clock_events: int | None = None
    throttled_power_ns: int | None = None
    throttled_sw_thermal_ns: int | None = None
    throttled_hw_thermal_ns: int | None = None
    throttled_power_brake_ns: int | None = None
    utilization_percent: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_corrected: int | None = None
    remapped_uncorrected: int | None = None
    remap_pending: int | None = None
    remap_failed: int | None = None
    retired_pending: int | None = None
    recovery_action: int | None = None
    nvlinks: tuple[int, ...] | None = None
    nvlink_crc_errors: int | None = None
    nvlink_replays: int | None = None
    nvlink_recoveries: int | None = None
    pcie_replays: int | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    pcie_generation: int | None = None
    persistence: int | None = None
    mig: int | None = None
    fabric_state: int | None = None
    processes: tuple[tuple[int, int], ...] | None = None

    @property
    def throttled_by(self) -> tuple[str, ...]:
        """Names of the reasons that hold it back."""
        bits = self.clock_events or 0
        return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)

    @property
    def links_up(self) -> int | None:
        return sum(self.nvlinks) if self.nvlinks is not None else None

    @property
    def label(self) -> str:
        """``GPU 3 (0000:cb:00)``."""
        return f"GPU {self.index} ({self.pci})" if self.pci else f"GPU {self.index}"


_TEXTS: Final = frozenset({"uuid", "name"})
_NUMBERS: Final = frozenset(
    f.name for f in dataclasses.fields(GpuReading) if f.name not in {*_TEXTS, "pci", "nvlinks", "processes", "index"}
)


def merged(before: GpuReading | None, answer: Mapping[str, Any]) -> GpuReading | None:
    """*before* with what the answer has; None when the answer names no GPU. An answer without an error clears it."""
    index = answer.get("index")
    if not isinstance(index, int) or not _is_number(index):
        return None
    changes: dict[str, Any] = {"error": None}
    for name, value in answer.items():
        if name in _NUMBERS and _is_number(value):
            changes[name] = value
        elif name in _TEXTS and isinstance(value, str):
            changes[name] = value[:100]
        elif name == "pci" and isinstance(value, str):
            changes[name] = normal_pci(value[:40])
        elif name == "nvlinks" and isinstance(value, list):
            changes[name] = tuple(1 if v == 1 else 0 for v in value[:64])
        elif name == "processes" and isinstance(value, list):
            changes[name] = tuple((p[0], p[1]) for p in value[:1024] if _is_process(p))
    return dataclasses.replace(before if before is not None else GpuReading(index), **changes)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_NUMBER


def _is_process(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_number(v) for v in value)
