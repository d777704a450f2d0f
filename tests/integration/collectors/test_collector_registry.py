"""Collectors in their threads: late ones, failing ones, and the time it takes to ask for results."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from steadyrun.collectors.host.space import Folder, Room, SpaceCollector
from steadyrun.collectors.protocol import CheckResult, Health, combine
from steadyrun.collectors.registry import Registry

LATE_S = 5.0


@dataclass
class Fake:
    """Does what the test says; ``gate`` holds a check until it is set."""

    name: str = "fake"
    every_s: float = 0.01
    limit_s: float = 0.2
    fails: bool = False
    gate: threading.Event = field(default_factory=threading.Event)
    checks: int = 0
    closed: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    def check(self) -> CheckResult:
        self.checks += 1
        self.gate.wait(60)
        if self.fails:
            raise RuntimeError("no such device")
        return combine(self.name, [], "all well")

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def start() -> Iterator[Callable[..., Registry]]:
    made: list[tuple[Registry, tuple[Fake, ...]]] = []

    def make(*fakes: Fake, polling: bool = True) -> Registry:
        registry = Registry(fakes)
        made.append((registry, fakes))
        if polling:
            registry.start()
        return registry

    yield make
    for registry, fakes in made:
        for fake in fakes:
            if isinstance(fake, Fake):
                fake.gate.set()
        registry.close()


def test_results_come_in_and_stay_fresh(start: Callable[..., Registry], wait_until: Callable[..., object]) -> None:
    fake = Fake()
    registry = start(fake)
    wait_until(lambda: fake.checks >= 3, LATE_S, "not polled")
    state = registry.results()["fake"]
    assert state.result.health is Health.HEALTHY
    assert state.succeeded_at_s is not None
    assert not state.is_stuck


def test_before_the_first_result_the_health_is_unknown(start: Callable[..., Registry]) -> None:
    registry = start(Fake(), polling=False)
    assert registry.results()["fake"].result.health is Health.UNKNOWN


def test_a_collector_that_fails_is_unknown_and_goes_on(
    start: Callable[..., Registry], wait_until: Callable[..., object]
) -> None:
    fake = Fake(fails=True)
    registry = start(fake)
    wait_until(lambda: fake.checks >= 3, LATE_S, "not polled")
    state = registry.results()["fake"]
    assert state.result.health is Health.UNKNOWN
    assert "RuntimeError: no such device" in state.result.reason
    assert state.succeeded_at_s is None
    fake.fails = False
    wait_until(lambda: registry.results()["fake"].result.health is Health.HEALTHY, LATE_S, "did not recover")


def test_a_collector_that_hangs_is_told_and_delays_nobody(
    start: Callable[..., Registry], wait_until: Callable[..., object]
) -> None:
    hung, well = Fake("hung"), Fake("well")
    registry = start(hung, well)
    wait_until(lambda: hung.checks >= 1 and well.checks >= 1, LATE_S, "not polled")
    hung.gate.clear()
    wait_until(lambda: registry.results()["hung"].is_stuck, LATE_S, "not noticed")
    state = registry.results()["hung"]
    assert state.result.health is Health.UNKNOWN
    assert "has not answered" in state.result.reason
    before = well.checks
    wait_until(lambda: well.checks > before + 3, LATE_S, "the other one was held up")
    slowest_s = 0.0
    for _ in range(200):  # what the agent's loop does
        begun_s = time.monotonic()
        registry.results()
        slowest_s = max(slowest_s, time.monotonic() - begun_s)
    assert slowest_s < 0.05
    hung.gate.set()
    wait_until(lambda: registry.results()["hung"].result.health is Health.HEALTHY, LATE_S, "did not recover")


def test_a_one_shot_check_waits_for_no_hung_one(start: Callable[..., Registry]) -> None:
    hung, well = Fake("hung"), Fake("well")
    hung.gate.clear()
    registry = start(hung, well, polling=False)
    begun_s = time.monotonic()
    results = registry.check_all(0.3)
    assert time.monotonic() - begun_s < 3.0
    assert results["hung"].health is Health.UNKNOWN
    assert "no answer within 0.3 s" in results["hung"].reason
    assert results["well"].health is Health.HEALTHY


def test_closing_ends_the_threads_and_closes_each_collector(start: Callable[..., Registry]) -> None:
    fake = Fake(every_s=1000.0)
    registry = start(fake)
    begun_s = time.monotonic()
    registry.close()
    assert time.monotonic() - begun_s < 2.0
    assert fake.closed == 1


def test_names_must_differ() -> None:
    with pytest.raises(ValueError, match="two collectors are called 'fake'"):
        Registry([Fake(), Fake()])


def test_a_dead_file_server_is_told_and_asked_once(tmp_path: Path, wait_until: Callable[..., object]) -> None:
    gate, asked = threading.Event(), []

    def read(path: Path) -> Room:
        asked.append(path)
        if path.name == "dead":
            gate.wait(60)
        return Room(1 << 40, 1 << 39, 0, 0, False, True)

    folders = [Folder("checkpoints", tmp_path / "dead"), Folder("logs", tmp_path / "well")]
    collector = SpaceCollector(folders, shm=None, answer_limit_s=0.1, read=read)
    try:
        for _ in range(3):
            result = collector.check()
            assert result.health is Health.UNHEALTHY
            assert "has not answered" in result.reason
            assert result.facts["logs_answers"] is True
        assert asked.count(tmp_path / "dead") == 1
    finally:
        gate.set()
    wait_until(lambda: collector.check().health is Health.HEALTHY, LATE_S, "did not recover")
