"""The real bindings on a stand-in for the driver's library, in the real child process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nvml_library import compile_library

from steadyrun.collectors.nvml.asking import FAST, RARE, SLOW
from steadyrun.collectors.nvml.collector import NvmlCollector
from steadyrun.collectors.nvml.prober import NvmlProber, ProbeError
from steadyrun.collectors.protocol import CheckResult, Health
from steadyrun.collectors.registry import Registry

pytest.importorskip("pynvml", reason="the bindings of NVML are not installed")
ALL = frozenset({FAST, SLOW, RARE})
LATE_S = 20.0


@pytest.fixture(scope="session")
def library(shared_cases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_library(shared_cases, tmp_path_factory.mktemp("nvml"))


class Gpus:
    """The state file of the stand-in: eight GPUs, whatever the test adds."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.state = folder / "state"
        self.events = folder / "events"
        self.state.write_text("count = 8\ngpu.*.util = 98\ngpu.*.clock_events = 0\n")
        self.events.write_text("")
        self.env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(library),
            "NVML_STUB_STATE": str(self.state),
            "NVML_STUB_EVENTS": str(self.events),
        }

    def set(self, *lines: str) -> None:
        with self.state.open("a") as f:
            f.write("\n".join(lines) + "\n")


@pytest.fixture
def gpus(tmp_path: Path, library: Path) -> Gpus:
    return Gpus(tmp_path, library)


@pytest.fixture
def collector(gpus: Gpus, tmp_path: Path) -> Iterator[Callable[..., NvmlCollector]]:
    made: list[NvmlCollector] = []

    def make(limit_s: float = 5.0, **clock: Callable[[], float]) -> NvmlCollector:
        prober = NvmlProber(env=gpus.env, back_off_s=(0.0,))
        made.append(NvmlCollector(prober, tmp_path, limit_s, **clock))
        return made[-1]

    yield make
    for each in made:
        each.close()


FAULTS = {
    "lost": (("gpu.3.lost = 1",), Health.UNHEALTHY, "GPU 3 (0000:48:00) is lost"),
    "reset pending": (("gpu.3.field.230 = 1",), Health.UNHEALTHY, "needs a reset, says its driver"),
    "reset required": (("gpu.3.err.nvmlDeviceGetMemoryInfo = 16",), Health.UNHEALTHY, "needs a reset"),
    "ECC": (("gpu.3.ecc.vol.unc = 2",), Health.UNHEALTHY, "2 uncorrectable memory error(s) since"),
    "remap": (("gpu.3.remap.failure = 1",), Health.UNHEALTHY, "could not replace"),
    "throttle": (("gpu.3.clock_events = 0x48",), Health.DEGRADED, "slowed down by its hardware"),
    "slow clock": (("gpu.3.clock.1 = 900",), Health.DEGRADED, "runs at 900 MHz, the others at 1980"),
    "NVLink": (("gpu.3.nvlink.9.state = 0",), Health.UNHEALTHY, "17 NVLinks up, others have 18 (down: 9)"),
    "PCIe width": (("gpu.3.pcie_width = 8",), Health.DEGRADED, "uses 8 PCIe lanes of 16"),
    "fabric": (("gpu.3.fabric = 2",), Health.UNHEALTHY, "has not joined the NVLink fabric"),
}


@pytest.mark.parametrize(("lines", "health", "words"), FAULTS.values(), ids=FAULTS.keys())
def test_each_fault_is_told_and_the_other_gpus_go_on(
    collector: Callable[..., NvmlCollector],
    gpus: Gpus,
    lines: tuple[str, ...],
    health: Health,
    words: str,
) -> None:
    now_s = [0.0]
    nvml = collector(clock=lambda: now_s[0])
    assert nvml.check().health is Health.HEALTHY
    gpus.set(*lines)
    now_s[0] = 100.0  # the seldom facts are due again
    result = nvml.check()
    assert result.health is health
    assert words in result.reason
    readings, at_s = nvml.readings()
    assert at_s == 100.0
    assert len(readings) == 8
    assert all(r.error is None and r.temperature_c == 40 for r in readings if r.index != 3)


def test_a_lost_gpu_that_comes_back_is_well(collector: Callable[..., NvmlCollector], gpus: Gpus) -> None:
    now_s = [0.0]
    nvml = collector(clock=lambda: now_s[0])
    gpus.set("gpu.3.lost = 1")
    assert nvml.check().health is Health.UNHEALTHY
    gpus.set("gpu.3.lost = 0")
    now_s[0] = 100.0
    assert nvml.check().health is Health.HEALTHY


def test_what_is_not_supported_is_asked_once_and_left_out(
    collector: Callable[..., NvmlCollector], gpus: Gpus, tmp_path: Path
) -> None:
    calls = tmp_path / "calls"
    gpus.env["NVML_STUB_CALLS"] = str(calls)
    gpus.set("gpu.*.ecc = n/a", "gpu.*.remap = n/a", "gpu.*.nvlinks = n/a", "gpu.*.fabric = n/a", "gpu.*.retired = n/a")
    now_s = [0.0]
    nvml = collector(clock=lambda: now_s[0])
    for _ in range(3):
        assert nvml.check().health is Health.HEALTHY
        now_s[0] += 100.0
    (first, *_), _ = nvml.readings()
    assert (first.ecc_uncorrected, first.remap_pending, first.nvlinks) == (None, None, None)
    assert calls.read_text().splitlines().count("nvmlDeviceGetRemappedRows 0") == 1
    assert calls.read_text().splitlines().count("nvmlDeviceGetMemoryInfo 0") == 3


def test_an_old_driver_is_asked_by_the_old_calls(collector: Callable[..., NvmlCollector], gpus: Gpus) -> None:
    gpus.set("gpu.*.err.nvmlDeviceGetTemperatureV = 13", "gpu.*.err.nvmlDeviceGetCurrentClocksEventReasons = 13")
    gpus.set("gpu.3.clock_events = 0x40", "gpu.3.temp = 77")
    nvml = collector()
    assert "for heat" in nvml.check().reason
    assert nvml.readings()[0][3].temperature_c == 77


def test_mig_mode_is_seen(collector: Callable[..., NvmlCollector], gpus: Gpus) -> None:
    gpus.set("gpu.3.mig = 1", "gpu.3.util = n/a")
    nvml = collector()
    assert nvml.check().facts["gpus_in_mig_mode"] == 1
    assert nvml.readings()[0][3].utilization_percent is None


@pytest.mark.parametrize(
    ("code", "driver", "health", "words"),
    [
        (9, False, Health.HEALTHY, "trains on its CPUs"),
        (12, False, Health.HEALTHY, "trains on its CPUs"),
        (9, True, Health.DEGRADED, "there are GPUs, but NVML cannot be used"),
        (18, True, Health.UNHEALTHY, "the driver was updated"),
        (999, True, Health.UNKNOWN, "NVML cannot be used"),
    ],
)
def test_no_driver_is_told_for_what_it_is(
    collector: Callable[..., NvmlCollector],
    gpus: Gpus,
    tmp_path: Path,
    code: int,
    driver: bool,
    health: Health,
    words: str,
) -> None:
    if driver:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidiactl").touch()
    gpus.set(f"err.nvmlInitWithFlags = {code}")
    result = collector().check()
    assert result.health is health
    assert words in result.reason


def test_a_call_that_hangs_is_named_and_the_agent_goes_on(
    collector: Callable[..., NvmlCollector], gpus: Gpus, wait_until: Callable[..., object]
) -> None:
    nvml = collector(limit_s=1.0)
    registry = Registry([nvml])
    registry.start()

    def result() -> CheckResult:
        return registry.results()["nvml"].result

    try:
        wait_until(lambda: result().health is Health.HEALTHY, LATE_S, lambda: result().reason)
        gpus.set("gpu.2.delay_ms.nvmlDeviceGetPowerUsage = 30000")
        slowest_s = 0.0
        deadline_s = time.monotonic() + LATE_S
        while result().health is not Health.UNHEALTHY and time.monotonic() < deadline_s:
            begun_s = time.monotonic()
            registry.results()
            nvml.readings()
            nvml.take_events()
            slowest_s = max(slowest_s, time.monotonic() - begun_s)
        assert "nvmlDeviceGetPowerUsage of GPU 2" in result().reason
        assert slowest_s < 0.05, f"the loop was late by {slowest_s * 1e3:.1f} ms"
        assert len(nvml.readings()[0]) == 8  # the newest facts stay
        gpus.set("gpu.2.delay_ms.nvmlDeviceGetPowerUsage = 0")
        wait_until(lambda: result().health is Health.HEALTHY, LATE_S, lambda: result().reason)
    finally:
        registry.close()


def test_events_come_in_between(gpus: Gpus, wait_until: Callable[..., object]) -> None:
    prober = NvmlProber(env=gpus.env)
    try:
        prober.ask(frozenset({FAST}), LATE_S)
        seen: list[object] = []

        def arrives() -> bool:  # written until the child has registered for events
            with gpus.events.open("a") as f:
                f.write("3 8 79\n")
            seen.extend(prober.poll_events())
            return bool(seen)

        wait_until(arrives, LATE_S, "no event")
        assert seen[0] == {"type": 8, "data": 79, "index": 3}
        assert len(prober.ask(ALL, LATE_S)) == 8
    finally:
        prober.close()


def test_a_child_that_dies_is_told_and_replaced_after_a_while(gpus: Gpus) -> None:
    prober = NvmlProber(env=gpus.env, back_off_s=(0.0,))
    try:
        prober.ask(frozenset({FAST}), LATE_S)
        assert prober._child is not None
        prober._child.process.kill()
        with pytest.raises(ProbeError, match=r"has died \(signal 9") as caught:
            prober.ask(frozenset({FAST}), LATE_S)
        assert not caught.value.hung
        assert len(prober.ask(frozenset({FAST}), LATE_S)) == 8
    finally:
        prober.close()


def test_between_two_tries_nothing_is_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = f"open({str(started)!r}, 'a').write('x')"
    prober = NvmlProber(command=(sys.executable, "-c", code), back_off_s=(1000.0,))
    for _ in range(3):
        with pytest.raises(ProbeError, match="has died"):
            prober.ask(frozenset({FAST}), LATE_S)
    assert started.read_text() == "x"
    prober.close()


def test_the_child_ends_with_its_parent(gpus: Gpus, wait_until: Callable[..., object]) -> None:
    program = (
        "import os, signal; from steadyrun.collectors.nvml.prober import NvmlProber\n"
        "p = NvmlProber(); p.ask(frozenset({'fast'}), 20.0)\n"
        "print(p._child.process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=gpus.env, capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), LATE_S, f"{pid} is still there")


def test_closing_does_not_wait_for_a_call_that_hangs(gpus: Gpus) -> None:
    prober = NvmlProber(env=gpus.env)
    prober.ask(frozenset({FAST}), LATE_S)
    gpus.set("delay_ms.nvmlDeviceGetPowerUsage = 30000")
    errors: list[ProbeError] = []

    def ask() -> None:
        try:
            prober.ask(frozenset({FAST}), 0.5)
        except ProbeError as e:
            errors.append(e)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(LATE_S)
    begun_s = time.monotonic()
    prober.close()
    assert time.monotonic() - begun_s < 3.0
    assert errors[0].hung
