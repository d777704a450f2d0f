"""The node check beside the loop: results come by mail, a restart waits for them, but not for long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steadyrun.collectors.host.space import Folder
from steadyrun.collectors.nvml.reading import GpuReading
from steadyrun.collectors.protocol import Health, Trouble
from steadyrun.node.devicetest import DeviceSpeed, DeviceTestError
from steadyrun.node.gate import NodeGate, memory_in_use
from steadyrun.node.gatejudge import NodeReport
from steadyrun.node.gatekeeper import ARRIVAL_LIMIT_S, Gatekeeper
from steadyrun.testing.store import ManualClock

UNFIT = NodeReport("n1", Health.UNHEALTHY, (Trouble(Health.UNHEALTHY, "GPU 3 is lost"),))
WELL = NodeReport("n1", Health.HEALTHY)


class ScriptedGate:
    """A check that takes until it is let go."""

    def __init__(self, *reports: NodeReport | Exception) -> None:
        self.reports = list(reports)
        self.go = threading.Event()
        self.calls: list[tuple[Collection[int], bool]] = []

    def check(self, own: Collection[int] = (), with_speeds: bool = True) -> NodeReport:
        self.calls.append((own, with_speeds))
        assert self.go.wait(10)
        report = self.reports.pop(0)
        if isinstance(report, Exception):
            raise report
        return report


class Loop:
    """What the gatekeeper sees of the loop: mail, a clock, a journal, a mouth."""

    def __init__(self, gate: Any) -> None:
        self.clock = ManualClock()
        self.mail: list[Callable[[], None]] = []
        self.has_mail = threading.Condition()
        self.records: list[tuple[str, dict[str, Any]]] = []
        self.said: list[str] = []
        self.keeper = Gatekeeper("n1", gate, self.clock, self.record, self.said.append, self.post)

    def record(self, type_: str, **fields: Any) -> None:
        self.records.append((type_, fields))

    def post(self, then: Callable[[], None]) -> None:
        with self.has_mail:
            self.mail.append(then)
            self.has_mail.notify()

    def take_mail(self, count: int = 1) -> None:
        """As the loop does, after *count* messages have come."""
        with self.has_mail:
            assert self.has_mail.wait_for(lambda: len(self.mail) >= count, 10)
            mail, self.mail = self.mail, []
        for then in mail:
            then()

    def look(self, gate: ScriptedGate, messages: int = 1) -> None:
        """One whole check."""
        self.keeper.begin((7, 8))
        gate.go.set()
        self.keeper.wait()
        self.take_mail(messages)
        gate.go.clear()
        self.clock.advance(60)


def test_nothing_is_checked_without_a_gate() -> None:
    loop = Loop(None)
    loop.keeper.begin()
    loop.keeper.wait()
    arrived: list[Any] = []
    loop.keeper.before_arrival(arrived.append)
    assert (arrived, loop.keeper.told(True), loop.keeper.status(), loop.records) == ([None], None, None, [])


def test_a_check_is_recorded_and_told() -> None:
    gate = ScriptedGate(UNFIT)
    loop = Loop(gate)
    loop.keeper.begin((7, 8))
    assert loop.keeper.told(False) is None, "it has not ended"
    gate.go.set()
    loop.keeper.wait()
    loop.take_mail()
    assert gate.calls == [((7, 8), True)]
    told = loop.keeper.told(True)
    assert told is not None
    assert (told["health"], told["hosts_store"]) == ("unhealthy", True)
    ((type_, fields),) = loop.records
    assert (type_, fields["health"], fields["troubles"]) == ("node_check", Health.UNHEALTHY, UNFIT.troubles)


def test_devices_are_measured_once() -> None:
    gate = ScriptedGate(WELL, WELL)
    loop = Loop(gate)
    loop.look(gate)
    loop.look(gate)
    assert [with_speeds for _, with_speeds in gate.calls] == [True, False]


def test_two_checks_never_run_at_once_and_a_fresh_one_serves_twice() -> None:
    gate = ScriptedGate(WELL, WELL, WELL)
    loop = Loop(gate)
    loop.keeper.begin()
    loop.keeper.begin()
    gate.go.set()
    loop.take_mail()
    loop.keeper.begin()
    assert len(gate.calls) == 1
    loop.clock.advance(60)
    loop.keeper.begin()
    loop.take_mail()
    assert len(gate.calls) == 2
    loop.keeper.begin(afresh=True)
    loop.take_mail()
    assert len(gate.calls) == 3


def test_a_check_that_fails_does_not_keep_the_job_from_starting() -> None:
    gate = ScriptedGate(RuntimeError("no such thing"))
    loop = Loop(gate)
    loop.look(gate, messages=2)
    assert loop.said == ["steadyrun: the node check failed: RuntimeError: no such thing"]
    assert (loop.keeper.told(False), loop.records) == (None, [])


def test_a_restart_waits_for_the_check_that_is_under_way() -> None:
    gate = ScriptedGate(UNFIT)
    loop = Loop(gate)
    arrived: list[NodeReport | None] = []
    loop.keeper.begin()
    loop.keeper.before_arrival(arrived.append)
    loop.keeper.tick()
    assert arrived == []
    gate.go.set()
    loop.take_mail()
    assert arrived == [UNFIT]


def test_a_node_that_leaves_arrives_without_its_report() -> None:
    gate = ScriptedGate(UNFIT)
    loop = Loop(gate)
    arrived: list[NodeReport | None] = []
    loop.keeper.hurry()
    loop.keeper.begin()
    loop.keeper.before_arrival(arrived.append)
    loop.keeper.hurry()
    assert arrived == [None]
    gate.go.set()
    loop.take_mail()
    assert arrived == [None]


def test_a_restart_waits_no_longer_than_its_limit() -> None:
    gate = ScriptedGate(UNFIT)
    loop = Loop(gate)
    arrived: list[NodeReport | None] = []
    loop.keeper.begin()
    loop.keeper.before_arrival(arrived.append)
    loop.clock.advance(ARRIVAL_LIMIT_S)
    loop.keeper.tick()
    loop.keeper.tick()
    assert arrived == [None]
    assert "does not wait for it" in loop.said[0]
    gate.go.set()
    loop.take_mail()
    assert arrived == [None]


def test_the_leader_says_each_thing_once() -> None:
    loop = Loop(ScriptedGate())
    for _ in range(2):
        verdict = loop.keeper.judge([WELL.to_wire(), UNFIT.to_wire(), None, {"not": "a report"}], 1)
        assert verdict.excluded == (1,)
    assert loop.said == ["steadyrun: node check: n1: GPU 3 is lost: the node is left out"]


def test_another_node_says_what_it_found_and_how_its_clock_is() -> None:
    gate = ScriptedGate(UNFIT)
    loop = Loop(gate)
    loop.look(gate)
    loop.keeper.hear_leader("n0", loop.clock.unix_s() - 0.01)
    assert loop.said == ["steadyrun: node check: n1: GPU 3 is lost"]
    loop.keeper.hear_leader("n0", loop.clock.unix_s() - 7.5)
    assert "its clock is 7.5 s ahead of that of n0" in loop.said[1]
    assert [t for t, _ in loop.records] == ["node_check", "clock_skew"]


# -- the check itself --------------------------------------------------------------------------------------------------
GPU = GpuReading(0, pci="0000:18:00", memory_total_bytes=80 << 30, memory_used_bytes=1 << 30)


@pytest.mark.parametrize(
    ("used_gib", "processes", "own", "is_told"),
    [
        (1.0, (), (), False),
        (60.0, (), (), True),  # a container may not be shown whose it is
        (60.0, ((9, 60 << 30),), (), True),
        (60.0, ((9, 60 << 30),), (9,), False),
    ],
)
def test_memory_of_others_is_told(
    tmp_path: Path, used_gib: float, processes: tuple[tuple[int, int], ...], own: tuple[int, ...], is_told: bool
) -> None:
    (tmp_path / "proc/9").mkdir(parents=True)
    (tmp_path / "proc/9/comm").write_text("python3\n")
    gpu = replace(GPU, memory_used_bytes=int(used_gib * (1 << 30)), processes=processes)
    found = memory_in_use([gpu], own, tmp_path)
    assert bool(found) == is_told
    if is_told:
        by = " by process 9 (python3)" if processes else ""
        assert found[0].reason == f"GPU 0 (0000:18:00) has 60.0 of 80 GiB in use{by}, though no rank runs"


def test_a_machine_without_gpus_is_checked_without_any_process(tmp_path: Path) -> None:
    gate = NodeGate("n0", "quick", 8, [Folder("run", tmp_path)], tmp_path)
    report = gate.check()
    assert report.node == "n0"
    assert not report.is_unfit, report
    assert report.facts == {}
    assert report.took_s < 2.0


def test_full_measures_devices_and_believes_no_device_that_differs_from_itself(tmp_path: Path) -> None:
    speeds = [DeviceSpeed("cpu", "", 0.1, 10.0, True), DeviceSpeed("cuda:1", "", 0.1, 10.0, False)]
    gate = NodeGate("n0", "full", 1, (), tmp_path, speeds=lambda limit_s: speeds)
    report = gate.check()
    assert report.speeds == (("cpu", 0.1, 10.0), ("cuda:1", 0.1, 10.0))
    assert report.is_unfit
    assert report.troubles[0].reason == "cuda:1 gave two different results for the same product"
    assert gate.check(with_speeds=False).speeds == ()


@pytest.mark.parametrize("hung", [True, False])
def test_a_device_test_that_gives_nothing_is_told(tmp_path: Path, hung: bool) -> None:
    def fail(limit_s: float) -> list[DeviceSpeed]:
        raise DeviceTestError("the device test gave nothing", hung)

    report = NodeGate("n0", "full", 1, (), tmp_path, speeds=fail).check()
    (told,) = [t for t in report.troubles if t.reason == "the device test gave nothing"]
    assert told.health is (Health.UNHEALTHY if hung else Health.UNKNOWN)


def test_levels_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="off, quick, full, got 'fast'"):
        NodeGate("n0", "fast", 1, (), tmp_path)
