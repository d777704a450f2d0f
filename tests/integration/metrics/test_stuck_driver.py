"""The loop waits for nothing that waits for the driver: shown by a driver that never comes back, not by a stop watch.

Whatever of the loop's calls waited for it would never return, and the test would pass its deadline.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from steadyrun.collectors.gpumap import RankProcess
from steadyrun.collectors.nvml.asking import FAST, RARE, SLOW
from steadyrun.collectors.nvml.collector import NvmlCollector
from steadyrun.collectors.nvml.prober import NvmlProber, ProbeError
from steadyrun.collectors.protocol import Health
from steadyrun.core.clock import SystemClock
from steadyrun.node.devices import DevicesPlan
from steadyrun.node.driver import DriverReader
from steadyrun.node.gate import NodeGate
from steadyrun.node.gatekeeper import Gatekeeper

GPUS = [{"index": i, "groups": [], "uuid": f"GPU-{i}", "pci": f"0000:{i:02x}:00"} for i in range(2)]
WAITS = ("ask", "poll_events")
EVERYTHING = {FAST, SLOW, RARE}


class StuckProber(NvmlProber):
    """Answers until it is told where to stop; from then on that call waits until the test is over."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck_in = ""
        self.is_stuck, self.over = threading.Event(), threading.Event()
        self.threads: set[str] = set()
        self.asked: list[frozenset[str]] = []

    def _pass(self, name: str) -> None:
        self.threads.add(threading.current_thread().name)
        if self.stuck_in == name:
            self.is_stuck.set()
            self.over.wait()
            raise ProbeError("over")

    def ask(self, groups: frozenset[str], limit_s: float, start_limit_s: float | None = None) -> list[dict[str, Any]]:
        self._pass("ask")
        self.asked.append(groups)
        return [dict(g) for g in GPUS]

    def poll_events(self) -> list[Mapping[str, int]]:
        self._pass("poll_events")
        return []

    def call(self) -> str:
        return "nvmlDeviceGetPowerUsage of GPU 1"


@pytest.fixture
def prober() -> Iterator[StuckProber]:
    prober = StuckProber()
    yield prober
    prober.over.set()


@pytest.fixture
def driver(prober: StuckProber, tmp_path: Path) -> DriverReader:
    nvml = NvmlCollector(prober, tmp_path)
    return DriverReader(make=lambda: nvml)


@pytest.mark.deadline(60)
@pytest.mark.parametrize("where", WAITS)
def test_no_call_of_the_loop_waits_for_the_driver(
    start_loop: Callable[..., Any], prober: StuckProber, driver: DriverReader, tmp_path: Path, where: str
) -> None:
    loop = start_loop(DevicesPlan(None, root=tmp_path), driver)
    loop.devices.take_ranks({3: RankProcess(os.getpid(), 0, {"LOCAL_RANK": "0"})})
    loop.until(lambda: loop.devices.gpu_of(3), "the GPU of rank 3")
    prober.stuck_in = where
    loop.devices.look_again()
    assert prober.is_stuck.wait(20)
    arrived: list[Any] = []
    gate = NodeGate("n0", "quick", 1, (), tmp_path, driver.get)
    keeper = Gatekeeper("n0", gate, SystemClock(), lambda *_, **__: None, loop.said.append, loop.post)
    for _ in range(20):  # all that the loop does with devices and the node check
        loop.turn()
        keeper.begin(())
        keeper.tick()
        loop.devices.look_again()
        loop.devices.take_ranks({3: RankProcess(os.getpid(), 0, {"LOCAL_RANK": "0"})})
        assert [g.index for g in loop.devices.gpus()] == [0, 1], "what was read last stays"
        assert loop.devices.gpu_of(3) == "GPU 0 (0000:00:00)" or loop.devices.gpu_of(3) is None
        assert set(loop.devices.told()["collectors"]) > {"nvml"}
        loop.devices.gpu_indices()
        loop.devices.evidence(0.0)
        driver.pid()
        keeper.told(True)
        keeper.status()
    keeper.before_arrival(arrived.append)
    keeper.hurry()
    assert arrived == [None], "a restart does not wait for it either"
    assert threading.current_thread().name not in prober.threads
    prober.over.set()
    keeper.wait()
    driver.close()


def test_the_gate_tells_a_look_of_the_collector_that_hangs(
    prober: StuckProber, driver: DriverReader, tmp_path: Path
) -> None:
    nvml = driver.get()
    assert nvml is not None
    prober.stuck_in = "ask"
    polling = threading.Thread(target=nvml.check)
    polling.start()
    assert prober.is_stuck.wait(20)
    begun_s = time.monotonic()
    result = nvml.look_now(0.05)
    assert time.monotonic() - begun_s < 20
    assert result.health is Health.UNHEALTHY
    assert result.reason == "the driver does not answer (nvmlDeviceGetPowerUsage of GPU 1)"
    prober.over.set()
    polling.join()


def test_gate_and_collector_share_one_process_and_its_looks(
    prober: StuckProber, driver: DriverReader, tmp_path: Path
) -> None:
    nvml = driver.get()
    assert nvml is not None
    assert driver.get() is nvml
    nvml.check()
    gate = NodeGate("n0", "quick", 2, (), tmp_path, driver.get)
    assert gate.check().facts["gpus"] == 2
    assert prober.asked == [EVERYTHING, {FAST}], "the gate wants to know how it is now, but not all that was just asked"
    nvml.look_wholly()
    nvml.check()
    nvml.look_now(1.0)
    nvml.check()
    assert prober.asked[2:] == [EVERYTHING, EVERYTHING, {FAST}]
    prober.stuck_in = "ask"
    polling = threading.Thread(target=nvml.check)
    polling.start()
    assert prober.is_stuck.wait(20)
    asking = threading.Thread(target=gate.check)
    asking.start()
    prober.stuck_in = ""
    prober.over.set()
    polling.join()
    asking.join(20)
    assert not asking.is_alive()


def test_a_closed_reader_starts_no_process_any_more(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    prober = NvmlProber(command=("/no/such/program",))
    driver = DriverReader(make=lambda: NvmlCollector(prober, tmp_path))
    nvml = driver.get()
    assert nvml is not None
    driver.close()
    result = nvml.look_now(1.0)
    assert (result.health, result.reason) == (Health.UNKNOWN, "the driver is not asked any more")
    late = DriverReader(make=lambda: pytest.fail("made after the end"))
    late.close()
    assert (late.get(), late.pid()) == (None, None)
