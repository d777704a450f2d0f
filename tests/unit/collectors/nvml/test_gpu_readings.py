"""What readings of GPUs mean, and which GPU a rank uses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrun.collectors.nvml.judging import gpu_troubles
from steadyrun.collectors.nvml.mapping import gpu_of_rank, numa_node_of
from steadyrun.collectors.nvml.reading import GpuReading, merged
from steadyrun.collectors.protocol import Health, Trouble

WELL = GpuReading(
    index=0,
    name="H100",
    temperature_c=60,
    sm_clock_mhz=1980,
    clock_events=0,
    utilization_percent=99,
    ecc_uncorrected=0,
    remap_pending=0,
    remap_failed=0,
    recovery_action=0,
    nvlinks=(1,) * 18,
    pcie_width=16,
    pcie_max_width=16,
    fabric_state=3,
)


def node(**changes: Any) -> list[GpuReading]:
    """Eight equal GPUs, of which number 3 has *changes*."""
    gpus = [
        dataclasses.replace(WELL, index=i, pci=f"0000:{0x18 + i:02x}:00", uuid=f"GPU-{i}aaa", minor=i) for i in range(8)
    ]
    gpus[3] = dataclasses.replace(gpus[3], **changes)
    return gpus


def troubles(gpus: list[GpuReading], first: list[GpuReading] | None = None) -> list[Trouble]:
    return gpu_troubles(gpus, {g.index: g for g in (first if first is not None else gpus)})


def test_a_well_node_has_no_troubles() -> None:
    assert troubles(node()) == []


@pytest.mark.parametrize(
    ("changes", "health", "words"),
    [
        ({"error": 15}, Health.UNHEALTHY, "is lost"),
        ({"error": 16}, Health.UNHEALTHY, "needs a reset"),
        ({"error": 999}, Health.UNHEALTHY, "NVML error 999"),
        ({"recovery_action": 1}, Health.UNHEALTHY, "needs a reset, says its driver"),
        ({"recovery_action": 2}, Health.UNHEALTHY, "needs a reboot of the node"),
        ({"recovery_action": 42}, Health.UNHEALTHY, "recovery action 42"),
        ({"remap_failed": 1}, Health.UNHEALTHY, "could not replace"),
        ({"remap_pending": 1}, Health.DEGRADED, "waits for a reset"),
        ({"retired_pending": 1}, Health.DEGRADED, "waits for a reset"),
        ({"ecc_uncorrected": 2}, Health.UNHEALTHY, "2 uncorrectable memory error(s) since the job began"),
        ({"clock_events": 0x40}, Health.DEGRADED, "by its hardware, for heat"),
        ({"clock_events": 0x80}, Health.DEGRADED, "by its power supply"),
        ({"temperature_c": 91}, Health.DEGRADED, "is at 91 °C"),
        ({"sm_clock_mhz": 1500}, Health.DEGRADED, "runs at 1500 MHz, the others at 1980"),
        ({"nvlinks": (1,) * 9 + (0,) + (1,) * 8}, Health.UNHEALTHY, "17 NVLinks up, others have 18 (down: 9)"),
        ({"pcie_width": 8}, Health.DEGRADED, "uses 8 PCIe lanes of 16"),
        ({"fabric_state": 2}, Health.UNHEALTHY, "has not joined the NVLink fabric"),
    ],
)
def test_each_fault_names_its_gpu(changes: dict[str, Any], health: Health, words: str) -> None:
    (trouble,) = troubles(node(**changes), node())
    assert trouble.health is health
    assert trouble.reason.startswith("GPU 3 (0000:1b:00) ")
    assert words in trouble.reason
    assert trouble.subject == "gpu 0000:1b:00"
    assert trouble.actions


@pytest.mark.parametrize(
    "changes",
    [
        {"clock_events": 0x04},  # its power limit: as configured
        {"clock_events": 0x01},  # idle
        {"sm_clock_mhz": 300, "utilization_percent": 0},
        {"sm_clock_mhz": 1600},
        {"temperature_c": 90},
        {"nvlinks": None, "pcie_width": None, "fabric_state": None, "ecc_uncorrected": None, "clock_events": None},
        {"name": "A10", "nvlinks": (1,) * 4},
    ],
)
def test_what_is_no_fault(changes: dict[str, Any]) -> None:
    assert troubles(node(**changes)) == []


def test_errors_from_before_the_job_count_less() -> None:
    (trouble,) = troubles(node(ecc_uncorrected=2))
    assert trouble.health is Health.DEGRADED
    assert "before the job began" in trouble.reason


def test_a_gpu_that_vanished_from_the_list_is_told() -> None:
    gpus = node()
    (trouble,) = troubles(gpus[:7], gpus)
    assert "1 of 8 GPUs are not there any more: 7" in trouble.reason


def test_links_that_all_gpus_lack_are_the_machines_design() -> None:
    assert troubles([dataclasses.replace(g, nvlinks=(1,) * 8 + (0,) * 10) for g in node()]) == []


def test_an_answer_updates_what_it_has_and_clears_the_error() -> None:
    before = merged(None, {"index": 3, "uuid": "GPU-3", "pci": "00000000:CB:00.0", "error": 15})
    assert before is not None
    assert (before.pci, before.error) == ("0000:cb:00", 15)
    after = merged(before, {"index": 3, "temperature_c": 50, "processes": [[7, 100], "x", [1]]})
    assert after is not None
    assert (after.uuid, after.error, after.temperature_c, after.processes) == ("GPU-3", None, 50, ((7, 100),))


NAMES = [f.name for f in dataclasses.fields(GpuReading)]
VALUES = st.integers() | st.text(max_size=5) | st.none() | st.booleans() | st.lists(st.integers() | st.text(max_size=2))


@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_any_answer_is_taken_or_left(answer: dict[str, Any]) -> None:
    reading = merged(None, {**answer, "index": 0})
    assert reading is not None
    troubles([reading])


def test_an_answer_without_a_gpu_is_none() -> None:
    assert merged(None, {}) is None
    assert merged(None, {"index": "0"}) is None
    assert merged(None, {"index": -1}) is None


# -- mapping -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("visible", "device", "index"),
    [
        (None, 0, 0),
        (None, 7, 7),
        (None, 8, None),
        ("4,5,6,7", 1, 5),
        (" 4 , 5", 1, 5),
        ("GPU-3aaa", 0, 3),
        ("GPU-3", 0, 3),
        ("GPU-", 0, None),  # not unique
        ("4,99,5", 0, 4),
        ("4,99,5", 1, None),  # CUDA stops at the first that is none
        ("-1", 0, None),
        ("", 0, None),
        ("NoDevFiles", 0, None),
        ("4,4", 0, None),  # twice: none at all
        ("0", -1, None),
    ],
)
def test_the_gpu_of_a_rank(visible: str | None, device: int, index: int | None) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = gpu_of_rank(environ, device, node())
    assert (found.gpu.index if found.gpu else None) == index
    assert bool(found.why) == (index is None)


def test_mig_instances_lead_to_their_gpu_where_it_can_be_told() -> None:
    old = gpu_of_rank({"CUDA_VISIBLE_DEVICES": "MIG-GPU-3aaa/1/0"}, 0, node())
    assert old.gpu is not None
    assert (old.gpu.index, old.mig) == (3, "MIG-GPU-3aaa/1/0")
    one = gpu_of_rank({"CUDA_VISIBLE_DEVICES": "MIG-5d1e"}, 0, node(mig=1))
    assert one.gpu is not None
    assert one.gpu.index == 3
    assert "of 0 GPUs in MIG mode" in gpu_of_rank({"CUDA_VISIBLE_DEVICES": "MIG-5d1e"}, 0, node()).why


def test_different_models_are_told_apart_only_by_the_bus() -> None:
    gpus = node(name="A10")
    assert "CUDA_DEVICE_ORDER" in gpu_of_rank({}, 3, gpus).why
    found = gpu_of_rank({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 3, gpus)
    assert found.gpu is not None
    assert found.gpu.index == 3


def test_the_numa_node_comes_from_sysfs(tmp_path: Path) -> None:
    folder = tmp_path / "bus/pci/devices/0000:cb:00.0"
    folder.mkdir(parents=True)
    assert numa_node_of("0000:cb:00", tmp_path) is None
    for text, node_number in (("1\n", 1), ("-1\n", None), ("x", None)):
        (folder / "numa_node").write_text(text)
        assert numa_node_of("0000:cb:00", tmp_path) == node_number
