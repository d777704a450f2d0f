"""What is exported is what the table says."""

from __future__ import annotations

import dataclasses

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from steadyrun.collectors.metrics.exposition import registry_of
from steadyrun.collectors.metrics.spec import SAMPLES, SPEC, MetricType, Source
from steadyrun.collectors.metrics.values import Values
from steadyrun.collectors.nic.ports import PortReading
from steadyrun.collectors.nvml.reading import GpuReading
from steadyrun.collectors.protocol import CheckResult, Health
from steadyrun.collectors.registry import CollectorState
from steadyrun.node.devicevalues import fill_collectors, fill_gpus, fill_host, fill_ports

FULL = GpuReading(
    **{
        f.name: 3
        for f in dataclasses.fields(GpuReading)
        if f.name not in ("index", "uuid", "pci", "name", "error", "nvlinks", "processes")
    },
    index=3,
    uuid="GPU-3",
    pci="0000:48:00",
    name="H100",
    nvlinks=(1, 1, 0),
)


def samples(values: Values) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = generate_latest(registry_of(lambda: list(values.copy()))).decode()
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_every_name_and_label_is_in_the_table() -> None:
    values = Values()
    fill_gpus(values, [FULL])
    fill_ports(values, [PortReading("mlx5_0", 1, "InfiniBand", "ACTIVE", counters={"link_downed": 2})])
    values.observe("section_duration_seconds", 0.2, "forward")
    for name, labels in samples(values):
        family = SAMPLES[name]
        own = {label for label, _ in labels if not (label == "le" and family.type is MetricType.HISTOGRAM)}
        assert own == set(family.label_names), name


def test_unknown_names_are_refused() -> None:
    with pytest.raises(KeyError):
        Values().set("no_such_metric", 1)


def test_closed_counters_are_there_at_0_and_open_ones_are_not() -> None:
    found = {name for name, _ in samples(Values())}
    for name, family in SPEC.items():
        is_closed = all(label.values for label in family.labels)
        if family.type is MetricType.COUNTER:
            assert (family.name in found) is is_closed, name


def test_histograms_add_up() -> None:
    values = Values()
    for seconds in (0.2, 0.2, 7.0, 1e9):
        values.observe("hang_detection_seconds", seconds)
    found = samples(values)
    assert found["steadyrun_hang_detection_seconds_bucket", (("le", "0.3"),)] == 2
    assert found["steadyrun_hang_detection_seconds_bucket", (("le", "10.0"),)] == 3
    assert found["steadyrun_hang_detection_seconds_bucket", (("le", "+Inf"),)] == 4
    assert found["steadyrun_hang_detection_seconds_count", ()] == 4


def test_openmetrics_is_complete() -> None:
    text = openmetrics.generate_latest(registry_of(lambda: list(Values().copy()))).decode()
    assert text.endswith("# EOF\n")
    assert "_created" not in text


def test_leaders_families_can_be_left_out() -> None:
    values = Values()
    names = {f.name for f, _ in values.copy(frozenset({Source.LEADER}))}
    assert "steadyrun_restarts_total" not in names
    assert "steadyrun_rank_exits_total" in names


def test_labels_from_outside_cannot_fill_the_memory() -> None:
    values = Values()
    for i in range(10_000):
        values.add("section_limits_passed_total", 1, f"section {i}", "soft")
    assert len(values.numbers["section_limits_passed_total"]) <= 256


def test_each_field_of_a_gpu_gets_to_a_metric() -> None:
    values = Values()
    fill_gpus(values, [FULL])
    assert values.get("gpu_up", "3") == 1.0
    assert values.get("gpu_power_watts", "3") == 0.003
    assert values.get("gpu_sm_clock_hertz", "3") == 3e6
    assert values.get("gpu_nvlink_active_links", "3") == 2.0
    assert values.get("gpu_xid_errors_total", "3", "reboot") == 0.0
    assert values.get("gpu_throttled_seconds_total", "3", "thermal") == 6e-9
    for name, family in SPEC.items():
        if family.source is Source.GPU and name != "gpu_xid_last_timestamp_seconds":
            assert values.numbers[name], name


def test_a_lost_gpu_says_only_that_it_is_lost() -> None:
    values = Values()
    fill_gpus(values, [FULL])
    fill_gpus(values, [dataclasses.replace(FULL, error=15)])
    assert values.get("gpu_up", "3") == 0.0
    assert values.get("gpu_temperature_celsius", "3", "gpu") is None
    assert values.get("gpu_ecc_errors_total", "3", "corrected") == 3.0


def test_plain_interfaces_are_left_to_others() -> None:
    values = Values()
    fill_ports(values, [PortReading("eth0", 0, "Ethernet", "ACTIVE"), PortReading("mlx5_0", 1, "InfiniBand", "DOWN")])
    assert values.numbers["nic_link_up"] == {("mlx5_0", "1"): 0.0}


def test_collectors_that_cannot_look_are_down_and_not_unhealthy() -> None:
    values = Values()
    well, blind = CheckResult("memory", Health.HEALTHY, ""), CheckResult("nic", Health.UNKNOWN, "")
    states = {
        "memory": CollectorState(well, 10.0, 10.0, 0.1),
        "nic": CollectorState(blind, 10.0, None, 0.1),
        "nvml": CollectorState(blind, 5.0, 5.0, 0.1, is_stuck=True),
        "space": CollectorState(blind),
    }
    fill_collectors(values, states, 1000.0)
    assert values.numbers["collector_up"] == {("memory",): 1.0, ("nic",): 0.0, ("nvml",): 0.0}
    assert values.numbers["collector_healthy"] == {("memory",): 1.0}
    assert values.get("collector_last_success_timestamp_seconds", "nvml") == 1005.0


def test_memory_is_what_the_tighter_of_host_and_group_leaves() -> None:
    values = Values()
    facts = {
        "memory_available_bytes": 100,
        "cgroup_limit_bytes": 80,
        "cgroup_used_bytes": 50,
        "oom_kills_cgroup_total": 2,
    }
    states = {"memory": CollectorState(CheckResult("memory", Health.HEALTHY, "", facts=facts), 1.0, 1.0, 0.1)}
    fill_host(values, states)
    assert values.get("host_memory_available_bytes") == 30.0
    assert values.get("host_oom_kills_total", "cgroup") == 2.0
    assert values.get("host_oom_kills_total", "host") == 0.0
