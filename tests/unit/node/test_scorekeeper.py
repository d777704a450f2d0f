"""Scores of nodes in a run: what earlier runs left, what the leader tells, what an incident does to them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from steadyrun.core.classes import Action, FaultClass, Mode
from steadyrun.core.records import ExitRecord, Finding, OomRecord, RankEvidence, to_json
from steadyrun.core.runfolder import RunFolder
from steadyrun.detect.policy import History, PolicyLimits
from steadyrun.node.incident import Incident, IncidentDesk, Judged
from steadyrun.node.scorekeeper import ScoreKeeper, read_scores

NOW_UNIX_S = 1_800_000_000.0
MACHINES = [["n0", "host0"], ["n1", "host1"]]


class Clock:
    def __init__(self) -> None:
        self.mono_s = 1000.0

    def now_s(self) -> float:
        return self.mono_s

    def unix_s(self) -> float:
        return NOW_UNIX_S + self.mono_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def run_folder(base: Path, name: str = "20270115T080000Z-r") -> RunFolder:
    folder = RunFolder(base / name)
    folder.journal_dir.mkdir(parents=True)
    return folder


@pytest.fixture
def desk(tmp_path: Path, clock: Clock) -> Iterator[IncidentDesk]:
    desk = IncidentDesk(
        run_folder(tmp_path), "r", "n0", Mode.ACT, "train.py", clock, lambda call: call(), PolicyLimits(None)
    )
    desk.scores.begin(None, MACHINES)
    yield desk
    desk.close()


def told(node: int, step: int, killed: bool, **more: Any) -> dict[str, Any]:
    """One node's evidence with one rank."""
    exit_ = ExitRecord(None, int(signal.SIGKILL), 999.0, by_us=not killed)
    oom = OomRecord(False, "cgroup memory.events", "unchanged")
    rank = RankEvidence(node, 0, f"n{node}", 10 + node, 0, step=step, attached=True, exit=exit_, oom=oom)
    return {
        "node": f"n{node}",
        "host": f"host{node}",
        "unix_minus_mono_s": NOW_UNIX_S,
        "sent_at_unix_s": NOW_UNIX_S + 1000.0,
        "ranks": [to_json(rank)],
        "progress": {"highest_step": step, "step_is_global": True, "checkpoints_done": 0},
        **more,
    }


def fail(
    desk: IncidentDesk, number: int, history: History, spares: int = 0, absent: bool = False, **more: Any
) -> tuple[Incident, Judged]:
    """Node 1 loses its rank, or itself."""
    incident = desk.open(number, number, {"trigger": "exit", "detected_at_unix_s": NOW_UNIX_S})
    desk.expect(incident, 2, 2000.0)
    desk.add_evidence(number, 0, told(0, 10 * number, killed=False))
    if not absent:
        desk.add_evidence(number, 1, told(1, 10 * number, killed=True, **more))
    return desk.judge_all(2, history, False, spares)


# -- incidents ---------------------------------------------------------------------------------------------------------
def test_the_second_failure_of_a_node_is_told_and_written_down(desk: IncidentDesk, tmp_path: Path) -> None:
    _, first = fail(desk, 1, History())
    assert "offender" not in first.text
    incident, second = fail(desk, 2, first.history)
    assert "node n1 (2 times crash) has score" in second.text
    assert "should be left out (a repeat offender), but no spare is there" in second.decision.reason
    assert second.decision.action is Action.RESTART
    assert second.decision.excluded_nodes == ()
    page = (incident.folder / "report.html").read_text()
    assert "a repeat offender, test it before it is used again" in page
    kept = read_scores(tmp_path / "20270115T080000Z-r" / "state" / "node_scores.json")
    assert [(n["node"], n["is_over"]) for n in kept["nodes"]] == [("n1", True), ("n0", False)]
    _, third = fail(desk, 3, second.history)
    assert "test it before" not in third.text, "it is said when the threshold is passed, not each time"


def test_a_repeat_offender_is_left_out_where_a_spare_is_there(desk: IncidentDesk) -> None:
    _, first = fail(desk, 1, History(), spares=1)
    assert first.decision.action is Action.RESTART
    _, second = fail(desk, 2, first.history, spares=1)
    assert second.decision.action is Action.RESTART_WITHOUT_NODE
    assert second.decision.excluded_nodes == (1,)
    assert second.history.attempts[-1].without == ("n1",)
    assert second.verdict.details["without"] == ["n1"]
    assert "restarting as attempt 3 without n1" in second.text
    assert [m.why.value for m in desk.scores.scores.marks] == ["blamed", "blamed", "excluded"]


def test_the_node_that_hosts_the_rendezvous_stays(desk: IncidentDesk) -> None:
    _, first = fail(desk, 1, History(), spares=1, hosts_store=True)
    _, second = fail(desk, 2, first.history, spares=1, hosts_store=True)
    assert second.decision.action is Action.RESTART
    assert "n1 hosts the rendezvous" in second.decision.reason


def test_a_lost_node_is_named_by_its_absence_and_marked(desk: IncidentDesk) -> None:
    _, judged = fail(desk, 1, History(), absent=True)
    (main, *_) = judged.verdict.findings
    assert (main.cls.value, main.nodes) == ("dead_node", ("n1",))
    assert [(m.node, m.kind.value) for m in desk.scores.scores.marks] == [("n1", "agent_lost")]


def test_a_report_blames_nobody(desk: IncidentDesk) -> None:
    incident = desk.open(1, 0, {"trigger": "hang"})
    judged = desk.judge_own(incident, 2, History())
    assert judged.decision.action is Action.REPORT
    assert desk.scores.scores.marks == ()


def test_a_slow_node_is_marked_once_for_each_report_and_when_it_is_left_out(desk: IncidentDesk) -> None:
    slow = Finding(FaultClass.STRAGGLER, (1,), "rank 1 is 30 % slower", 0.9, nodes=("n1",))
    for number in (1, 1, 2):
        verdict, problem = desk.report(desk.open(number, 0, {"trigger": "straggler"}), [slow], [], 2, {})
        assert (problem, verdict.action) == ("", Action.REPORT)
    desk.leaves_out_slow("n1")
    marks = [(m.incident, m.kind.value, m.why.value) for m in desk.scores.scores.marks]
    assert sorted(marks) == [(1, "slow", "blamed"), (2, "slow", "blamed"), (2, "slow", "excluded")]
    assert desk.scores.offenders == {"n1"}


def test_history_comes_back_from_json_as_it_was(desk: IncidentDesk) -> None:
    desk.saved(7)
    _, first = fail(desk, 1, History(), spares=1)
    _, second = fail(desk, 2, first.history, spares=1)
    packed = json.loads(json.dumps(desk.pack_history(second.history)))
    assert desk.unpack_history(packed, History()) == second.history
    assert second.history.attempts[-1].kind is not None
    assert desk.unpack_history([{"attempt": 1}], first.history) == first.history


# -- checkpoints -------------------------------------------------------------------------------------------------------
def test_the_newest_saved_step_is_told_until_the_next_attempt(desk: IncidentDesk) -> None:
    for step in (5, 9, 7):
        desk.saved(step)
    incident = desk.open(1, 0, {})
    desk.collect(incident, [], [], signal.SIGUSR1, 1.0, lambda: None, lambda rank: None)
    assert desk.packed_evidence(incident)["progress"]["checkpoint_step"] == 9
    desk.begin_attempt(1)
    desk.collect(incident, [], [], signal.SIGUSR1, 1.0, lambda: None, lambda rank: None)
    assert desk.packed_evidence(incident)["progress"]["checkpoint_step"] is None


# -- other runs and other nodes ----------------------------------------------------------------------------------------
def test_a_run_begins_with_what_earlier_ones_have_left(desk: IncidentDesk, clock: Clock, tmp_path: Path) -> None:
    history = History()
    for number in (1, 2):
        _, judged = fail(desk, number, history)
        history = judged.history
    later = ScoreKeeper(run_folder(tmp_path, "20270115T090000Z-other"), "other", clock)
    notes = later.begin(later.pack(), [["n1-again", "host1"], ["n2", "host2"]])
    assert [note.startswith("node n1-again (2 times crash)") for note in notes] == [True]
    elsewhere = ScoreKeeper(run_folder(tmp_path, "20270115T090001Z-third"), "third", clock)
    assert elsewhere.begin(elsewhere.pack(), [["n3", "host3"], ["n4", "host4"]]) == []


def test_nodes_agree_on_what_the_leader_knows(desk: IncidentDesk, clock: Clock, tmp_path: Path) -> None:
    _, judged = fail(desk, 1, History())
    _, judged = fail(desk, 2, judged.history)
    other = ScoreKeeper(run_folder(tmp_path / "elsewhere"), "r", clock)
    other.begin(None, MACHINES)
    other.adopt(json.loads(json.dumps(desk.scores.pack())))
    other.adopt(json.loads(json.dumps(desk.scores.pack())))
    assert other.scores == desk.scores.scores
    assert other.offenders == {"n1"}
    assert read_scores(tmp_path / "elsewhere" / "20270115T080000Z-r" / "state" / "node_scores.json")["marks"]


@pytest.mark.parametrize("data", [None, 7, [], {}, {"run": 3}, {"run": "x", "marks": 5}, {"run": "x", "marks": [{}]}])
def test_nonsense_from_another_node_changes_no_mark(desk: IncidentDesk, data: Any) -> None:
    fail(desk, 1, History())
    before = desk.scores.scores.marks
    desk.scores.adopt(data)
    assert desk.scores.begin(data, data) == []
    assert desk.scores.scores.marks == before


@pytest.mark.parametrize("text", ["", "[]", "{", '{"marks": 3}', "[" * 100_000])
def test_a_damaged_file_of_an_earlier_run_is_no_hindrance(tmp_path: Path, clock: Clock, text: str) -> None:
    earlier = run_folder(tmp_path, "20270114T000000Z-a")
    earlier.node_scores.parent.mkdir()
    earlier.node_scores.write_text(text)
    assert ScoreKeeper(run_folder(tmp_path), "r", clock).scores.marks == ()


def test_a_folder_that_cannot_be_written_is_no_hindrance(clock: Clock, tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    (folder.root / "state").write_text("a file")
    desk = IncidentDesk(folder, "r", "n0", Mode.ACT, "t.py", clock, lambda call: call(), PolicyLimits(None))
    desk.scores.begin(None, MACHINES)
    fail(desk, 1, History())
    assert len(desk.scores.scores.marks) == 1
    desk.close()
