"""Faults that last: how they are read, what they measure, and that they end. No torch here, so nothing is slowed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from steadyrun.core.classes import FaultClass
from steadyrun.core.errors import ConfigError
from steadyrun.testing import faults
from steadyrun.testing.faults import FaultPlan, expected_class, parse_faults
from steadyrun.testing.slowness import CannotSlowError, Pace, Throttle


def work(cpu_s: float) -> None:
    until_s = time.thread_time() + cpu_s
    while time.thread_time() < until_s:
        pass


def test_a_slow_rank_is_read_with_its_defaults() -> None:
    (fault,) = parse_faults("slow rank=2 step=90 where=data percent=10 until=300")
    assert (fault.kind, fault.rank, fault.step, fault.until) == ("slow", 2, 90, 300)
    assert fault.options == {"where": "data", "percent": "10", "until": "300", "how": "work"}
    assert expected_class(fault) is FaultClass.STRAGGLER
    assert parse_faults("neighbour rank=0 step=9")[0].until is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slow where=loader", "known: forward, backward, optimizer, data"),
        ("slow percent=0", "from 1 on"),
        ("slow percent=x", "whole number"),
        ("slow until=soon", "whole number"),
        ("slow how=rest", "known: work, sleep"),
        ("slow step=start", "cannot strike before the script"),
        ("neighbour tasks=0", "from 1 on"),
        ("throttle cores=1", "no key 'cores'"),
    ],
)
def test_what_cannot_be_used_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot use the fault") as caught:
        parse_faults(text)
    assert says in str(caught.value)


def test_a_pace_leaves_out_what_was_added() -> None:
    pace = Pace()
    for _ in range(4):
        pace.on_step()
        work(0.003)
        pace.add(0.001)
    pace.on_step()
    assert pace.step_s == pytest.approx(0.002, rel=0.5)


def test_a_pace_knows_nothing_before_there_were_steps() -> None:
    pace = Pace()
    pace.on_step()
    pace.on_step()
    assert pace.step_s is None
    assert pace.cores is None


def test_a_quota_follows_from_what_the_rank_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace()
    monkeypatch.setattr(Pace, "cores", property(lambda self: 0.5))
    throttle = Throttle(pace, 0.25, tmp_path / "own", 2)
    assert (tmp_path / "own" / "cpu.max").read_text() == "8000 20000", "0.4 of a core instead of 0.5"
    assert throttle.quota_us == 8000


def test_no_quota_before_there_were_steps(tmp_path: Path) -> None:
    with pytest.raises(CannotSlowError, match="steps must be done"):
        Throttle(Pace(), 0.25, tmp_path / "own", 1)
    assert not (tmp_path / "own").exists()


def test_without_torch_there_are_no_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    plan = FaultPlan.parse("slow rank=1 step=3 where=backward", 1, 0, 2, tmp_path)
    for step in range(5):
        plan.on_step(step)
    notes = [json.loads(line) for line in (tmp_path / faults.MARKER).read_text().splitlines()]
    assert [n["name"] for n in notes] == ["slow where=backward"] * 2
    assert "does not use torch" in notes[1]["refused"]


def test_a_lasting_fault_begins_and_ends_after_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def begin(strike: object, pace: object) -> object:
        events.append("begins")
        return lambda: events.append("ends")

    monkeypatch.setattr(faults, "_LASTING", {"neighbour": begin})
    plan = FaultPlan.parse("neighbour step=2 until=4", 0, 0, 1, tmp_path)
    seen = []
    for step in range(6):
        plan.on_step(step)
        seen.append(len(events))
    assert seen == [0, 0, 1, 1, 2, 2]
    assert events == ["begins", "ends"]
