"""What collectors know, as values of the metrics' table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from steadyrun.collectors.metrics.values import Values
from steadyrun.collectors.nic.ports import PortReading
from steadyrun.collectors.nvml.reading import THROTTLE_REASONS, GpuReading
from steadyrun.collectors.protocol import Fact, Health
from steadyrun.collectors.registry import CollectorState

__all__ = ["fill_collectors", "fill_gpus", "fill_host", "fill_ports"]

# Metric, field of the reading, factor.
_GAUGES: Final[tuple[tuple[str, str, float], ...]] = (
    ("gpu_recovery_action", "recovery_action", 1.0),
    ("gpu_power_watts", "power_mw", 1e-3),
    ("gpu_power_limit_watts", "power_limit_mw", 1e-3),
    ("gpu_energy_joules_total", "energy_mj", 1e-3),
    ("gpu_sm_clock_hertz", "sm_clock_mhz", 1e6),
    ("gpu_utilization_ratio", "utilization_percent", 1e-2),
    ("gpu_memory_used_bytes", "memory_used_bytes", 1.0),
    ("gpu_memory_total_bytes", "memory_total_bytes", 1.0),
    ("gpu_row_remap_pending", "remap_pending", 1.0),
    ("gpu_row_remap_failed", "remap_failed", 1.0),
    ("gpu_pcie_replays_total", "pcie_replays", 1.0),
    ("gpu_pcie_link_width", "pcie_width", 1.0),
    ("gpu_pcie_link_width_max", "pcie_max_width", 1.0),
    ("gpu_nvlink_active_links", "links_up", 1.0),
)
_LABELLED: Final[tuple[tuple[str, str, str, float], ...]] = (
    ("gpu_temperature_celsius", "gpu", "temperature_c", 1.0),
    ("gpu_temperature_celsius", "memory", "memory_temperature_c", 1.0),
    ("gpu_ecc_errors_total", "corrected", "ecc_corrected", 1.0),
    ("gpu_ecc_errors_total", "uncorrected", "ecc_uncorrected", 1.0),
    ("gpu_remapped_rows", "corrected", "remapped_corrected", 1.0),
    ("gpu_remapped_rows", "uncorrected", "remapped_uncorrected", 1.0),
    ("gpu_nvlink_errors_total", "replay", "nvlink_replays", 1.0),
    ("gpu_nvlink_errors_total", "recovery", "nvlink_recoveries", 1.0),
    ("gpu_nvlink_errors_total", "crc", "nvlink_crc_errors", 1.0),
)
_THROTTLED: Final[Mapping[str, tuple[str, ...]]] = {
    "power": ("throttled_power_ns", "throttled_power_brake_ns"),
    "thermal": ("throttled_sw_thermal_ns", "throttled_hw_thermal_ns"),
}
# What says nothing once a GPU does not answer. Its counters stay as they were: they have not begun anew.
_GONE_WITH_GPU: Final = tuple(
    dict.fromkeys(
        name
        for name in (*(g[0] for g in _GAUGES), *(g[0] for g in _LABELLED), "gpu_clock_event_active")
        if not name.endswith("_total")
    )
)


def fill_collectors(values: Values, states: Mapping[str, CollectorState], unix_less_mono_s: float) -> None:
    """Whether each could look, and what it thinks of its part."""
    healthy: dict[tuple[str, ...], float] = {}
    for name, state in states.items():
        health = state.result.health
        if state.checked_at_s is None and not state.is_stuck:
            continue  # it has not looked yet
        values.set("collector_up", float(health is not Health.UNKNOWN and not state.is_stuck), name)
        if health is not Health.UNKNOWN:
            healthy[name,] = float(health is Health.HEALTHY)
        if state.duration_s is not None:
            values.set("collector_duration_seconds", state.duration_s, name)
        if state.succeeded_at_s is not None:
            at_s = state.succeeded_at_s + unix_less_mono_s
            values.set("collector_last_success_timestamp_seconds", at_s, name)
    values.replace("collector_healthy", healthy)


def fill_gpus(values: Values, gpus: Iterable[GpuReading]) -> None:
    """Each GPU's newest reading."""
    for gpu in gpus:
        index = str(gpu.index)
        values.set("gpu_info", 1, index, gpu.uuid, gpu.pci, gpu.name)
        values.set("gpu_up", float(gpu.error is None), index)
        values.prepare("gpu_xid_errors_total", gpu=index)
        if gpu.error is not None:
            for name in _GONE_WITH_GPU:
                for labels in [k for k in values.numbers[name] if k[0] == index]:
                    values.drop(name, *labels)
            continue
        for name, field, factor in _GAUGES:
            if (value := getattr(gpu, field)) is not None:
                values.set(name, value * factor, index)
        for name, label, field, factor in _LABELLED:
            if (value := getattr(gpu, field)) is not None:
                values.set(name, value * factor, index, label)
        if gpu.clock_events is not None:
            for reason in THROTTLE_REASONS.values():
                values.set("gpu_clock_event_active", float(reason in gpu.throttled_by), index, reason)
        for reason, fields in _THROTTLED.items():
            known = [ns for f in fields if (ns := getattr(gpu, f)) is not None]
            if known:
                values.set("gpu_throttled_seconds_total", sum(known) / 1e9, index, reason)


def fill_ports(values: Values, ports: Iterable[PortReading]) -> None:
    """RDMA ports; plain interfaces are the host's, and node_exporter has them."""
    for port in ports:
        if port.port == 0:
            continue
        labels = (port.device, str(port.port))
        values.set("nic_link_up", float(port.is_up), *labels)
        values.set("nic_errors_total", port.errors, *labels)
        if port.link_downed is not None:
            values.set("nic_link_downed_total", port.link_downed, *labels)


def fill_host(values: Values, states: Mapping[str, CollectorState]) -> None:
    """Memory, kills for want of it, and room in folders."""
    memory = _facts(states, "memory")
    free = [_number(memory.get("memory_available_bytes"))]
    limit, used = _number(memory.get("cgroup_limit_bytes")), _number(memory.get("cgroup_used_bytes"))
    if limit is not None and used is not None:
        free.append(max(limit - used, 0.0))
    known = [f for f in free if f is not None]
    if known:
        values.set("host_memory_available_bytes", min(known))
    for scope in ("cgroup", "host"):
        kills = _number(memory.get(f"oom_kills_{scope}_total"))
        if kills is not None:
            values.raise_to("host_oom_kills_total", kills, scope)
    for name, value in _facts(states, "space").items():
        size = _number(value)
        if name.endswith("_free_bytes") and size is not None:
            values.set("host_space_available_bytes", size, name.removesuffix("_free_bytes"))


def _facts(states: Mapping[str, CollectorState], name: str) -> Mapping[str, Fact]:
    return states[name].result.facts if name in states else {}


def _number(value: Fact) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
