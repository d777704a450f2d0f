"""What an agent sees of sections, fed by its journal: limits that follow, and files that hand it on to the next run."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from steadyrun.core.journal import Journal
from steadyrun.core.runfolder import RunFolder
from steadyrun.core.sections import CHECKPOINTING, OUT_OF_SECTION, STEP
from steadyrun.ctl.main import main
from steadyrun.detect.calibrate import SectionKey
from steadyrun.detect.calibrate.passes import read_passes
from steadyrun.node.calibration import Calibration, Timeouts, configuration_of
from steadyrun.node.machine.events import Limits

CONFIGURATION = configuration_of(["train.py", "--lr", "1"], 2)
BASE = Limits()
T0 = 1_700_000_000.0


class Run:
    """An agent's calibration and journal, without the agent."""

    def __init__(self, base: Path, number: int = 0, timeouts: Timeouts = Timeouts.AUTO, limits: Limits = BASE) -> None:
        self.start_s = 1000.0 * number
        self.folder, _ = RunFolder.create(base, f"job{number}", T0 + self.start_s)
        self.calibration = Calibration(self.folder, CONFIGURATION, limits, timeouts)
        self.journal = Journal(self.folder.journal("n0"), "n0", self.calibration.read)
        self.attempt = 0
        self.newest = 0
        self.write("run_started", 0.0, script="train.py", configuration=CONFIGURATION)

    def write(self, type_: str, at_s: float, **fields: Any) -> None:
        self.journal.write(type_, T0 + self.start_s + at_s, at_s, self.attempt, **fields)

    def begin(self, at_s: float = 0.0, attempt: int = 0, world_size: int = 2, is_leader: bool = True) -> Run:
        self.attempt = attempt
        self.calibration.begin_attempt(attempt, world_size, is_leader)
        for rank in (0, 1):
            self.write("rank_started", at_s, rank=rank, local_rank=rank, pid=1, warm=False)
            self.write("rank_first_step", at_s + 2, rank=rank, step=self.newest)
        return self

    def steps(self, at_s: float, times_s: Sequence[float], **sections: Sequence[float]) -> Run:
        self.newest += len(times_s)
        own = {n: {"n": len(d), "max_s": max(d), "durations_s": list(d)} for n, d in sections.items() if d}
        told = {"step": self.newest, "step_times_s": list(times_s), "steps": len(times_s), "sections": own, "lost": 0}
        self.write("steps", at_s, ranks={"0": told, "1": told})
        return self

    def end(self) -> Run:
        self.calibration.close()
        self.journal.close()
        return self


def marked(at_s: float, run: Run, steps: int = 30) -> Run:
    """Steps of 1 s, of which every second is followed by a save and an evaluation, which the record tells of first."""
    run.steps(at_s, [1.0] * steps, evaluation=[0.5] * (steps // 2), checkpointing=[0.2] * (steps // 2))
    return run


@pytest.fixture
def a_run(tmp_path: Path) -> Callable[..., Run]:
    return lambda number=0, **how: Run(tmp_path, number, **how)


def test_limits_follow_once_enough_was_seen(a_run: Callable[..., Run]) -> None:
    run = a_run().begin()
    assert run.calibration.limits() is None
    marked(15.0, run, 10)
    assert run.calibration.limits() is None  # 9 steps are known to have ended for good
    marked(60.0, run, 40)
    limits = run.calibration.limits()
    assert limits is not None
    assert {STEP, "evaluation", CHECKPOINTING} == set(limits.calibrated) == set(limits.soft)
    assert limits.accepted == limits.calibrated
    assert 1.0 <= limits.soft[STEP] < (limits.sections[STEP] or 0) < 300
    assert limits.first == {}  # a first pass has not been seen to need more than the usual limit
    assert limits.step_s == BASE.step_s
    assert run.calibration.limits() is None  # nothing new
    told = run.calibration.told()[STEP]
    assert (told["soft_s"], told["hard_s"]) == (limits.soft[STEP], limits.sections[STEP])
    run.end()


def test_a_script_that_marks_no_evaluation_gets_soft_limits_alone(a_run: Callable[..., Run]) -> None:
    run = a_run().begin()
    for i in range(60):
        run.steps(20.0 * i, [1.0] * 20)
        if i < 49:
            assert run.calibration.limits() is None  # below a thousand steps
    limits = run.calibration.limits()
    assert limits is not None
    assert list(limits.soft) == [STEP]
    assert (limits.calibrated, limits.sections) == (frozenset(), {})
    assert run.calibration.told()[STEP]["hard_s"] is None
    run.end()


def test_what_the_user_gave_stays(a_run: Callable[..., Run]) -> None:
    given = Limits(step_s=77.0, sections={"evaluation": 5.0}, accepted=frozenset({"step", "evaluation"}))
    run = marked(60.0, a_run(limits=given).begin(), 40)
    limits = run.calibration.limits()
    assert limits is not None
    assert limits.step_s == 77.0
    assert limits.sections["evaluation"] == 5.0
    assert set(limits.soft) == {CHECKPOINTING}
    run.end()


@pytest.mark.parametrize("timeouts", [Timeouts.FILE, Timeouts.OFF])
def test_without_auto_statistics_are_kept_and_limits_stay(a_run: Callable[..., Run], timeouts: Timeouts) -> None:
    run = marked(60.0, a_run(timeouts=timeouts).begin(), 40)
    assert run.calibration.limits() is None
    run.end()
    assert kept(run)["sections"]


def kept(run: Run) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(run.folder.calibration(CONFIGURATION).read_text())
    return data


def test_the_next_run_begins_with_what_the_last_one_saw(a_run: Callable[..., Run]) -> None:
    first = marked(60.0, a_run().begin(), 40)
    before = first.calibration.limits()
    first.end()
    second = a_run(1).begin()
    limits = second.calibration.limits()
    assert limits is not None
    assert before is not None
    assert limits.soft.keys() == before.soft.keys()
    marked(60.0, second, 40).end()
    data = kept(second)
    assert data["runs"] == [first.folder.root.name, second.folder.root.name]
    events = {s["section"]: s["durations"]["events"] for s in data["sections"]}
    assert events[STEP] == 80
    assert events["evaluation"] == 2 * (20 - 1)


def test_another_world_size_begins_anew_and_the_old_one_is_known_when_it_comes_back(a_run: Callable[..., Run]) -> None:
    run = marked(60.0, a_run().begin(), 40)
    first = run.calibration.limits()
    assert first is not None
    run.write("stop", 61.0, reason="", trigger="membership", origin=0, incident=0, delay_s=0.0)
    run.begin(62.0, attempt=1, world_size=3)
    other = run.calibration.limits()
    assert other is not None
    assert (other.soft, other.calibrated) == ({}, frozenset())
    run.begin(90.0, attempt=2, world_size=2)
    again = run.calibration.limits()
    assert again is not None
    assert again.soft == first.soft
    run.end()


def test_a_run_whose_agent_was_killed_is_counted_by_the_next(a_run: Callable[..., Run]) -> None:
    killed = marked(60.0, a_run().begin(), 40)
    killed.calibration.write(60.0)
    killed.journal.close()
    assert not killed.folder.calibration(CONFIGURATION).exists()
    second = a_run(1).begin()
    assert second.calibration.limits() is not None
    marked(60.0, second, 20).end()
    assert kept(second)["runs"] == [killed.folder.root.name, second.folder.root.name]
    third = a_run(2).begin()
    third.end()
    assert kept(second)["runs"] == [killed.folder.root.name, second.folder.root.name]  # it has seen nothing


def test_only_the_leading_node_writes(a_run: Callable[..., Run]) -> None:
    run = marked(60.0, a_run().begin(is_leader=False), 40)
    assert run.calibration.limits() is not None
    run.calibration.write(60.0)
    run.end()
    assert not run.folder.section_statistics.exists()
    assert not run.folder.calibration(CONFIGURATION).exists()


@pytest.mark.parametrize("text", ["", "{", '{"schema": "other"}', "[]", '{"schema": "steadyrun.section-statistics/1"}'])
def test_a_damaged_file_is_made_anew(a_run: Callable[..., Run], tmp_path: Path, text: str) -> None:
    path = tmp_path / "calibration" / f"{CONFIGURATION}.json"
    path.parent.mkdir()
    path.write_text(text)
    run = marked(60.0, a_run().begin(), 40).end()
    assert kept(run)["runs"] == [run.folder.root.name]


def test_a_stopped_attempts_last_passes_are_not_counted(a_run: Callable[..., Run]) -> None:
    run = marked(60.0, a_run().begin(), 20)
    run.write("stop", 70.0, reason="", trigger="hang", origin=0, incident=1, delay_s=5.0)
    run.begin(80.0, attempt=1)
    marked(120.0, run, 20).end()
    data = {s["section"]: s for s in kept(run)["sections"]}
    assert data["evaluation"]["durations"]["events"] == 8 + 9  # of 10 each: the first is apart, and one was cut
    assert data["evaluation"]["first"]["events"] == 2


def test_what_is_counted_live_is_what_the_journal_tells_later(a_run: Callable[..., Run]) -> None:
    run = a_run().begin()
    for i in range(12):
        run.steps(15.0 * i, [1.0, 1.5, 0.5 + i], load=[0.1] * 3, checkpointing=[0.2] * (i % 3))
    run.end()
    found = read_passes("r", [[json.loads(line) for line in run.folder.journal("n0").read_text().splitlines()]])
    later: dict[str, list[float]] = {}
    for p in found.passes:
        if not p.is_first:
            later.setdefault(p.section, []).append(p.seconds)
    live = {s["section"]: s["durations"] for s in kept(run)["sections"]}
    assert {n: d["events"] for n, d in live.items()} == {n: len(d) for n, d in later.items()}
    assert {n: d["largest"][0]["s"] for n, d in live.items()} == {n: max(d) for n, d in later.items()}
    assert set(live) == {STEP, OUT_OF_SECTION, "load", CHECKPOINTING}


def test_calibration_by_hand_goes_on_from_what_runs_have_left(a_run: Callable[..., Run]) -> None:
    first = marked(60.0, a_run().begin(), 40).end()
    (first.folder.journal("n0")).unlink()  # cleaned up
    second = marked(60.0, a_run(1).begin(), 40).end()
    out, err = io.StringIO(), io.StringIO()
    argv = ["calibrate-timeouts", "--json", "--dry-run", str(second.folder.root)]
    assert main(argv, out, err, {}, 80) == 0, err.getvalue()
    found = json.loads(out.getvalue())
    assert found["runs_counted"] == [first.folder.root.name, second.folder.root.name]
    assert next(s["n"] for s in found["sections"] if s["section"] == STEP) == 80
    assert found["configuration"] == CONFIGURATION


def test_the_configuration_is_the_command_line_on_as_many_ranks() -> None:
    assert configuration_of(["a", "b"], 2) == configuration_of(("a", "b"), 2)
    others = [(["a b"], 2), (["a", "b"], 3), (["b", "a"], 2), (["a", "b", ""], 2)]
    assert len({configuration_of(words, n) for words, n in [(["a", "b"], 2), *others]}) == 5
    assert len(CONFIGURATION) == 16
    assert SectionKey(STEP, 2, CONFIGURATION).configuration == CONFIGURATION
