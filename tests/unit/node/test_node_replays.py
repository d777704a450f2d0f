"""What a node makes of its ranks' reports of replays, and hands to the leader."""

from __future__ import annotations

from pathlib import Path

from steadyrun.core.replay import NEXT, STATES, THIRD, ReplayPlace, ReplayReport, ReplayWords, report_path, why_off_path
from steadyrun.detect.sdc.records import Cause
from steadyrun.node.replays import GRADIENT, NodeReplays, found_of, pack, unpack
from steadyrun.node.rootswire import RootsFacts

PLACE = ReplayPlace("first.weight", "float32", 4, 281_600, 1, ((70_000, (20,)),), True)
RANKS = (0, 1, 2)


def words(reports: int, state: str = "on", clean: int = 4) -> ReplayWords:
    return ReplayWords(state, 200, 0.25, clean, 19, reports, 2)


def write(folder: Path, number: int, by: int, kind: str) -> Path:
    folder.mkdir(exist_ok=True)
    report = ReplayReport(24, 2, by, kind, RANKS, 7, 8, 8, 19, 1, (PLACE,))
    report_path(folder, number).write_text(report.to_json())
    return folder


def test_reports_of_several_ranks_become_one_finding(tmp_path: Path) -> None:
    node = NodeReplays()
    node.look(1, 11, write(tmp_path / "1", 1, 1, NEXT), words(1), 50.0)
    node.look(1, 11, tmp_path / "1", words(1), 50.5)
    assert node.ready(50.5) == [], "the third has not spoken"
    node.look(0, 10, write(tmp_path / "0", 1, 0, THIRD), words(1), 51.0)
    (replayed,) = node.ready(51.0)
    found = found_of(replayed)
    assert (found.judgement.cause, found.judgement.ranks, found.moment) == (Cause.DEVICE, (2,), GRADIENT)
    assert found.since == 20
    assert [s.words() for s in found.spots] == ["first.weight (float32): element 70000, bit 20"]


def test_a_finding_reaches_the_leader_as_it_was(tmp_path: Path) -> None:
    node = NodeReplays()
    node.look(1, 11, write(tmp_path / "1", 1, 1, NEXT), words(1), 50.0)
    node.look(0, 10, write(tmp_path / "0", 1, 0, THIRD), words(1), 50.0)
    (replayed,) = node.ready(50.0)
    facts = RootsFacts("n1", replayed=(pack(replayed),))
    (told,) = RootsFacts.from_bytes(facts.to_bytes()).replayed
    assert unpack(told) == replayed


def test_a_new_process_begins_with_its_first_report(tmp_path: Path) -> None:
    node = NodeReplays()
    node.look(1, 11, write(tmp_path / "old", 1, 1, NEXT), words(1), 50.0)
    node.look(1, 12, tmp_path / "new", words(0), 51.0)
    node.look(1, 12, write(tmp_path / "new", 1, 1, THIRD), words(1), 52.0)
    assert len(node.ready(52.0)) == 1


def test_why_replays_are_off_is_told_once(tmp_path: Path) -> None:
    node = NodeReplays()
    off = ReplayWords("off", 0, 0.0, 0, None, 0, None)
    for rank in range(3):
        folder = tmp_path / str(rank)
        folder.mkdir()
        if rank:
            why_off_path(folder).write_text("the kernels are not deterministic")
        for now_s in (1.0, 2.0):
            node.look(rank, rank, folder, off, now_s)
    assert node.notes == ["no microbatches are replayed (--ft-sdc-replay): the kernels are not deterministic"]


def test_a_report_that_cannot_be_read_is_a_note(tmp_path: Path) -> None:
    node = NodeReplays()
    report_path(tmp_path, 1).write_text('{"kind": "next"}')
    node.look(1, 11, tmp_path, words(2), 50.0)
    assert node.ready(99.0) == []
    assert all(n.startswith("cannot read") for n in node.notes)
    assert len(node.notes) == 2


def test_what_is_recorded_and_said_of_the_cost() -> None:
    node = NodeReplays()
    assert node.to_record(1) is None
    node.look(0, 10, Path("/nowhere"), ReplayWords(STATES[0], 0, 0.0, 0, None, 0, None), 1.0)
    assert node.to_record(0) is None, "a rank that has nothing to do with replays"
    node.look(1, 11, Path("/nowhere"), words(0), 1.0)
    assert node.to_record(1) == {
        "state": "on",
        "of": 2,
        "clean": 4,
        "newest_step": 19,
        "differed": 0,
        "interval": 200,
        "cost_s": 0.25,
    }
    assert node.cost_words(1, 500.0) == "; 0.050 % of it for 4 replays (--ft-sdc-replay)"
    assert node.cost_words(0, 500.0) == ""
