"""The node check on eight GPUs of a stand-in for the driver's library: real bindings, real child process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from nvml_library import compile_library

from steadyrun.collectors.nvml.collector import NvmlCollector
from steadyrun.collectors.nvml.prober import NvmlProber
from steadyrun.collectors.protocol import Health
from steadyrun.node.devicetest import DeviceTestError, measure_devices
from steadyrun.node.gate import NodeGate
from steadyrun.node.gatejudge import NodeReport, judge_nodes

pytest.importorskip("pynvml", reason="the bindings of NVML are not installed")
TOTAL = 80 << 30


@pytest.fixture(scope="session")
def library(shared_cases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(shared_cases, tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def check(library: Path, tmp_path: Path) -> Callable[..., NodeReport]:
    """``check("gpu.3.lost = 1", ranks=8)``: the report of a node whose GPUs are like that."""

    def run(*lines: str, ranks: int = 8, name: str = "n0", answer_limit_s: float = 5.0) -> NodeReport:
        state = tmp_path / f"{name}.gpus"
        state.write_text(
            "\n".join(("count = 8", "gpu.*.clock_events = 0", "gpu.*.mem_used = 500000000", *lines)) + "\n"
        )
        env = {**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_STUB_STATE": str(state)}
        env.pop("NVML_STUB_EVENTS", None)

        nvml = NvmlCollector(NvmlProber(env=env, with_events=False), tmp_path, answer_limit_s)
        try:
            return NodeGate(name, "quick", ranks, (), tmp_path, lambda: nvml).check()
        finally:
            nvml.close()

    return run


def test_a_healthy_node_is_checked_within_two_seconds(check: Callable[..., NodeReport]) -> None:
    reports = [check() for _ in range(3)]
    assert not any(r.is_unfit for r in reports), reports[0].troubles
    assert min(r.took_s for r in reports) < 2.0
    assert reports[0].facts == {"model": "NVIDIA H100 80GB HBM3", "gpus": 8, "pcie_width": 16, "nvlinks": 18}


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("gpu.3.lost = 1",), "GPU 3 is lost"),
        (("gpu.2.field.230 = 1",), "needs a reset, says its driver"),
        (("gpu.6.remap.failure = 1",), "could not replace"),
        (("gpu.6.nvlink.9.state = 0",), "has 17 NVLinks up, others have 18 (down: 9)"),
        ((f"gpu.4.mem_used = {60 << 30}", f"gpu.4.proc.1 = {60 << 30}"), "GiB in use by process 1"),
        ((f"gpu.5.mem_used = {60 << 30}",), "GiB in use, though no rank runs"),
        (("count = 7",), "8 ranks are to run here, but 7 GPUs answer"),
    ],
)
def test_each_fault_makes_the_node_unfit(check: Callable[..., NodeReport], lines: tuple[str, ...], words: str) -> None:
    report = check(*lines)
    assert report.is_unfit, report
    reasons = [t.reason for t in report.troubles if t.health is Health.UNHEALTHY]
    assert any(words in r for r in reasons), reasons


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("gpu.0.clock_events = 0x40",), "is slowed down"),
        (("gpu.0.pcie_width = 8",), "uses 8 PCIe lanes"),
        (("gpu.0.remap.pending = 1",), "waits for a reset"),
        (("gpu.0.ecc.vol.unc = 2",), "uncorrectable memory error"),
    ],
)
def test_what_works_with_less_is_told_and_stays(
    check: Callable[..., NodeReport], lines: tuple[str, ...], words: str
) -> None:
    report = check(*lines)
    assert report.health is Health.DEGRADED, report
    assert any(words in t.reason for t in report.troubles), report.troubles


def test_the_process_that_the_gate_has_started_serves_on(library: Path, tmp_path: Path) -> None:
    state = tmp_path / "gpus"
    state.write_text("count = 8\n")
    env = {**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_STUB_STATE": str(state)}
    nvml = NvmlCollector(NvmlProber(env=env), tmp_path)
    try:
        gate = NodeGate("n0", "quick", 8, (), tmp_path, lambda: nvml)
        checking = threading.Thread(target=gate.check)
        checking.start()
        checking.join(30)
        pid = nvml.pid()
        assert pid is not None
        for _ in range(2):  # its parent is this process, and not the thread that was the first to ask
            assert nvml.check().health is Health.HEALTHY
            assert not gate.check().is_unfit
        assert nvml.pid() == pid
    finally:
        nvml.close()


def test_a_driver_that_hangs_is_told(check: Callable[..., NodeReport]) -> None:
    report = check("gpu.1.delay_ms.nvmlDeviceGetPowerUsage = 60000", answer_limit_s=1.0)
    assert report.is_unfit
    assert "the driver does not answer" in report.troubles[0].reason
    assert report.facts == {}


def test_a_node_whose_link_is_narrower_than_the_others_differs(check: Callable[..., NodeReport]) -> None:
    narrow = check("gpu.*.pcie_width = 8", name="n1")
    assert narrow.facts["pcie_width"] == 8
    verdict = judge_nodes([check(), narrow, check(name="n2")], 1)
    assert verdict.excluded == (1,)
    assert "has a GPU on 8 PCIe lanes, on the others it is 16" in verdict.notes[0]


# -- the device test ---------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.deadline(200)
def test_this_machines_devices_can_be_measured() -> None:
    pytest.importorskip("torch")
    found = measure_devices(120.0)
    assert found
    assert all(d.tflops > 0 and d.copy_gbps > 0 and d.is_exact for d in found), found


def test_a_device_test_that_hangs_is_ended() -> None:
    with pytest.raises(DeviceTestError, match=r"did not end within 0\.5 s") as caught:
        measure_devices(0.5, command=[sys.executable, "-c", "import time; time.sleep(1000)"])
    assert caught.value.hung


def test_a_device_test_that_fails_says_why() -> None:
    with pytest.raises(DeviceTestError, match="CUDA error: no such device") as caught:
        measure_devices(30, command=[sys.executable, "-c", "raise RuntimeError('CUDA error: no such device')"])
    assert not caught.value.hung
    with pytest.raises(DeviceTestError, match="cannot start the device test"):
        measure_devices(30, command=["/no/such/program"])
