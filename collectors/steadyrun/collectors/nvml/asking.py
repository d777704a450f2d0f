"""What is asked of NVML and how often, call by call. Runs in the child process; *nvml* is the module ``pynvml``.

A call that a GPU does not support is not made again; a newer call falls back on the older one where the driver lacks
it; a GPU that is lost does not keep the others from answering.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

__all__ = ["FAST", "RARE", "SLOW", "Asker", "EventWaiter"]

FAST: Final = "fast"
SLOW: Final = "slow"
RARE: Final = "rare"

MAX_LINKS: Final = 36
# Codes of nvmlReturn_t.
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15

# Field identifiers of nvmlDeviceGetFieldValues; one call gets them all.
FIELDS: Final[dict[str, int]] = {
    "recovery_action": 230,
    "memory_temperature_c": 82,
    "energy_mj": 83,
    "pcie_replays": 94,
    "throttled_power_ns": 74,
    "throttled_sw_thermal_ns": 269,
    "throttled_hw_thermal_ns": 270,
    "throttled_power_brake_ns": 271,
    "nvlink_crc_errors": 38,
    "nvlink_replays": 52,
    "nvlink_recoveries": 59,
}
_VALUE_TYPES: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class _LostError(Exception):
    """The GPU of this call does not answer any more; ``code`` is NVML's."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Asker:
    """Asks every GPU; ``tell`` hears what is about to be called, so that a call that hangs can be named."""

    def __init__(self, nvml: Any, tell: Callable[[str], None] = lambda _: None) -> None:
        self._nvml = nvml
        self._tell = tell
        self._unsupported: set[tuple[int, str]] = set()
        self._lost: dict[int, int] = {}
        self._count = 0

    def begin(self) -> dict[str, Any]:
        """Initialise once; raises the module's NVMLError. Returns what does not change."""
        self._tell("nvmlInit")
        self._nvml.nvmlInit()
        self._tell("nvmlDeviceGetCount")
        self._count = int(self._nvml.nvmlDeviceGetCount())
        return {"driver": _text(self._nvml.nvmlSystemGetDriverVersion()), "count": self._count}

    def read(self, groups: frozenset[str]) -> list[dict[str, Any]]:
        """One object per GPU: ``index``, ``groups``, what was had, and ``error`` with NVML's code for a lost one."""
        return [self._read_one(index, groups) for index in range(self._count)]

    def _read_one(self, index: int, groups: frozenset[str]) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index}
        if index in self._lost and SLOW not in groups:  # now and then is enough: it seldom comes back
            return {**found, "error": self._lost[index]}
        self._lost.pop(index, None)
        try:
            handle = self._call(index, "nvmlDeviceGetHandleByIndex", index)
            if handle is None:
                found["error"] = NOT_FOUND
                return found
            for group, reader in ((RARE, self._rare), (FAST, self._fast), (SLOW, self._slow)):
                if group in groups:
                    found.update((k, v) for k, v in reader(index, handle) if v is not None)
        except _LostError as e:
            found["error"] = self._lost[index] = e.code
        return found

    # -- groups --------------------------------------------------------------------------------------------------------
    def _fast(self, index: int, handle: Any) -> Iterator[tuple[str, Any]]:
        memory = self._call(index, "nvmlDeviceGetMemoryInfo", handle)
        if memory is not None:
            yield "memory_used_bytes", int(memory.used)
            yield "memory_total_bytes", int(memory.total)
        yield "temperature_c", self._first(index, ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetTemperature"), handle, 0)
        yield "power_mw", self._call(index, "nvmlDeviceGetPowerUsage", handle)
        yield "sm_clock_mhz", self._call(index, "nvmlDeviceGetClockInfo", handle, 1)
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        yield "clock_events", self._first(index, names, handle)
        utilization = self._call(index, "nvmlDeviceGetUtilizationRates", handle)
        if utilization is not None:
            yield "utilization_percent", int(utilization.gpu)

    def _slow(self, index: int, handle: Any) -> Iterator[tuple[str, Any]]:
        for name, kind in (("ecc_corrected", 0), ("ecc_uncorrected", 1)):  # volatile: since the driver was loaded
            yield name, self._call(index, "nvmlDeviceGetTotalEccErrors", handle, kind, 0)
        rows = self._call(index, "nvmlDeviceGetRemappedRows", handle)
        if rows is not None:
            names = ("remapped_corrected", "remapped_uncorrected", "remap_pending", "remap_failed")
            yield from zip(names, (int(v) for v in rows), strict=True)
        yield from self._fields(index, handle)
        yield "power_limit_mw", self._call(index, "nvmlDeviceGetEnforcedPowerLimit", handle)
        yield "nvlinks", self._links(index, handle)

    def _rare(self, index: int, handle: Any) -> Iterator[tuple[str, Any]]:
        yield "name", _text(self._call(index, "nvmlDeviceGetName", handle))
        yield "uuid", _text(self._call(index, "nvmlDeviceGetUUID", handle))
        pci = self._call(index, "nvmlDeviceGetPciInfo", handle)
        yield "pci", _text(pci.busId) if pci is not None else None
        yield "minor", self._call(index, "nvmlDeviceGetMinorNumber", handle)
        yield "pcie_width", self._call(index, "nvmlDeviceGetCurrPcieLinkWidth", handle)
        yield "pcie_max_width", self._call(index, "nvmlDeviceGetMaxPcieLinkWidth", handle)
        yield "pcie_generation", self._call(index, "nvmlDeviceGetCurrPcieLinkGeneration", handle)
        yield "persistence", self._call(index, "nvmlDeviceGetPersistenceMode", handle)
        mig = self._call(index, "nvmlDeviceGetMigMode", handle)
        yield "mig", int(mig[0]) if mig is not None else None
        yield "retired_pending", self._call(index, "nvmlDeviceGetRetiredPagesPendingStatus", handle)
        yield "fabric_state", self._fabric(index, handle)
        processes = self._call(index, "nvmlDeviceGetComputeRunningProcesses", handle)
        if processes is not None:
            yield "processes", [[int(p.pid), int(p.usedGpuMemory or 0)] for p in processes]

    def _fields(self, index: int, handle: Any) -> Iterator[tuple[str, int]]:
        values = self._call(index, "nvmlDeviceGetFieldValues", handle, list(FIELDS.values()))
        for name, value in zip(FIELDS, values if values is not None else (), strict=False):
            if value.nvmlReturn == GPU_IS_LOST:
                raise _LostError(GPU_IS_LOST)
            if value.nvmlReturn == 0 and 0 <= value.valueType < len(_VALUE_TYPES):
                yield name, int(getattr(value.value, _VALUE_TYPES[value.valueType]))

    def _links(self, index: int, handle: Any) -> list[int] | None:
        """1 for each NVLink that is up, 0 for one that is down; None where the GPU has none."""
        states: list[int] = []
        for link in range(MAX_LINKS):
            state = self._call(index, "nvmlDeviceGetNvLinkState", handle, link, may_end=True)
            if state is None:
                break
            states.append(int(state))
        return states or None

    def _fabric(self, index: int, handle: Any) -> int | None:
        """3 is complete; None where there is no fabric."""
        make = getattr(self._nvml, "c_nvmlGpuFabricInfo_v2_t", None)
        if make is None:
            return None
        info = make()
        if self._call(index, "nvmlDeviceGetGpuFabricInfoV", handle, self._nvml.byref(info)) is None:
            return None
        return int(info.state)

    # -- calls ---------------------------------------------------------------------------------------------------------
    def _first(self, index: int, names: tuple[str, ...], *args: Any) -> Any:
        """The first of these calls that the driver has."""
        for name in names:
            value = self._call(index, name, *args)
            if value is not None:
                return value
        return None

    def _call(self, index: int, name: str, *args: Any, may_end: bool = False) -> Any:
        """The value, or None where there is none. A call that is not supported is remembered; *may_end*: is not."""
        if (index, name) in self._unsupported:
            return None
        function = getattr(self._nvml, name, None)
        if function is None:  # older bindings
            self._unsupported.add((index, name))
            return None
        self._tell(f"{name} of GPU {index}")
        try:
            return function(*args)
        except self._nvml.NVMLError as e:
            code = int(e.value)
            if code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND, NO_PERMISSION) or (code == INVALID_ARGUMENT and not may_end):
                self._unsupported.add((index, name))
                return None
            if code in (INVALID_ARGUMENT, NOT_FOUND):
                return None
            raise _LostError(code) from None


class EventWaiter:
    """NVML's own events: Xids and double-bit errors, for machines whose kernel log cannot be read."""

    def __init__(self, nvml: Any, count: int) -> None:
        self._nvml = nvml
        self._set = nvml.nvmlEventSetCreate()
        self.registered = 0
        wanted = 0
        for name in ("XidCriticalError", "DoubleBitEccError", "GpuUnavailableError", "GpuRecoveryAction"):
            wanted |= int(getattr(nvml, f"nvmlEventType{name}", 0))
        for index in range(count):
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                mask = wanted & int(nvml.nvmlDeviceGetSupportedEventTypes(handle))
                if mask:
                    nvml.nvmlDeviceRegisterEvents(handle, mask, self._set)
                    self.registered += 1

    def wait(self, limit_ms: int) -> dict[str, int] | None:
        """The next event, or None when none came in time. Releases the interpreter's lock while it waits."""
        try:
            data = self._nvml.nvmlEventSetWait(self._set, limit_ms)
        except self._nvml.NVMLError as e:
            if int(e.value) == self._nvml.NVML_ERROR_TIMEOUT:
                return None
            return {"error": int(e.value)}
        event = {"type": int(data.eventType), "data": int(data.eventData)}
        with contextlib.suppress(self._nvml.NVMLError):
            event["index"] = int(self._nvml.nvmlDeviceGetIndex(data.device))
        return event


def _text(value: Any) -> Any:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
