"""Incident folders and journals, as files of a few lines."""

import json
from pathlib import Path

import pytest

from steadyrun.core.records import Evidence, ExitRecord, RankEvidence, to_json
from steadyrun.postmortem.case import InputStatus
from steadyrun.postmortem.runfolder import (
    is_incident_folder,
    is_run_folder,
    newest_incident,
    read_incident,
    read_last_attempt,
    read_timeline,
)

T0 = 1_800_000_000.0  # wall time of the incident
MONO = 5_000.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "20270115T080000Z-abc"
    (folder / "journal").mkdir(parents=True)
    (folder / "incidents").mkdir()
    return folder


def write_journal(run: Path, *records: dict[str, object], node: str = "n0") -> None:
    with (run / "journal" / f"{node}.jsonl").open("a") as f:
        for record in records:
            at = record.pop("at")
            full = {"v": 1, "at_unix_s": T0 + at, "at_s": MONO + at, "node": node, "attempt": 0, **record}
            f.write(json.dumps(full) + "\n")


def write_incident(run: Path, number: int, ranks: tuple[RankEvidence, ...] = (), **verdict: object) -> Path:
    folder = run / "incidents" / f"{number:04d}"
    folder.mkdir()
    evidence = Evidence("abc", 0, 4, "hang", MONO + 2.0, ranks, "/home/me/train.py")
    (folder / "evidence.json").write_text(json.dumps(to_json(evidence)))
    (folder / "verdict.json").write_text(json.dumps({"detected_at_unix_s": T0, **verdict}))
    return folder


def rank_row(rank: int) -> RankEvidence:
    return RankEvidence(rank, rank, "n0", 100 + rank, 0, step=7, exit=ExitRecord(None, 9, MONO))


def test_incident_is_read_as_it_was_written(run: Path) -> None:
    folder = write_incident(run, 3, (rank_row(1), rank_row(0)))
    incident = read_incident(folder)
    assert incident.evidence is not None
    assert [r.rank for r in incident.evidence.ranks] == [0, 1]
    assert incident.evidence.ranks[0] == rank_row(0)
    assert incident.detected_at_unix_s == T0
    assert incident.run == run
    assert incident.unix_minus_mono_s == pytest.approx(T0 - MONO - 2.0)
    assert {i.path.name: i.status for i in incident.inputs} == {
        "verdict.json": InputStatus.USED,
        "evidence.json": InputStatus.USED,
    }


def test_incident_copied_out_of_its_run_is_read_alone(tmp_path: Path, run: Path) -> None:
    folder = write_incident(run, 1, (rank_row(0),))
    copy = tmp_path / "mail"
    folder.rename(copy)
    assert read_incident(copy).run is None


def test_rank_that_cannot_be_read_does_not_cost_the_others(run: Path) -> None:
    folder = write_incident(run, 1, (rank_row(0), rank_row(1)))
    data = json.loads((folder / "evidence.json").read_text())
    del data["ranks"][0]["pid"]
    data["ranks"][1]["flight"] = {"rank": "x"}
    data["ranks"].append(to_json(rank_row(2)))
    (folder / "evidence.json").write_text(json.dumps(data))
    incident = read_incident(folder)
    assert incident.evidence is not None
    assert [r.rank for r in incident.evidence.ranks] == [2]
    entry = next(i for i in incident.inputs if i.path.name == "evidence.json")
    assert entry.status is InputStatus.CUT
    assert "pid" in entry.detail


@pytest.mark.parametrize(
    ("text", "status"),
    [("", InputStatus.EMPTY), ('{"ranks": [', InputStatus.UNREADABLE), ("[1]", InputStatus.UNREADABLE), ("{}", None)],
)
def test_evidence_that_is_no_use_is_said_to_be(run: Path, text: str, status: InputStatus | None) -> None:
    folder = write_incident(run, 1)
    (folder / "evidence.json").write_text(text)
    incident = read_incident(folder)
    assert incident.evidence is None
    if status is not None:
        assert [i.status for i in incident.inputs if i.path.name == "evidence.json"] == [status]


def test_newest_incident_is_the_highest_complete_one(run: Path) -> None:
    write_incident(run, 2)
    write_incident(run, 10)
    (run / "incidents" / "0011").mkdir()
    newest = newest_incident(run)
    assert newest is not None
    assert newest.name == "0010"
    assert is_incident_folder(newest)
    assert is_run_folder(run)
    assert not is_run_folder(newest)


# -- journals ----------------------------------------------------------------------------------------------------------
def steps(at: float, **ranks: tuple[int, int]) -> dict[str, object]:
    rows = {
        name[1:]: {"step": step, "step_times_s": [0.5] * n, "steps": n, "sections": {}, "lost": 0}
        for name, (step, n) in ranks.items()
    }
    return {"type": "steps", "at": at, "ranks": rows}


def test_timeline_holds_what_is_near_the_incident(run: Path) -> None:
    write_journal(
        run,
        {"type": "stop", "at": -500.0, "reason": "long ago"},
        {"type": "suspicion", "at": -1.0, "suspicion": {"rank": 3}, "note": "rank 3 makes no progress"},
        {"type": "rank_exited", "at": 0.5, "rank": 3, "pid": 9, "code": -9, "by_us": True},
        {"type": "stop", "at": 400.0, "reason": "much later"},
    )
    timeline = read_timeline(run, T0)
    assert [(m.kind, m.rank) for m in timeline.moments] == [("agent", 3), ("exit", 3)]
    assert timeline.moments[1].text == "rank 3 was ended by signal 9 (from the agent)"
    assert timeline.unix_minus_mono_s == {"n0": T0 - MONO}


def test_ranks_that_made_the_same_steps_are_one_moment(run: Path) -> None:
    write_journal(run, steps(-10.0, r0=(12, 4), r1=(12, 4), r2=(9, 1)))
    behind, together = sorted(read_timeline(run, T0).moments, key=lambda m: m.text)
    assert together.text == "steps 9 to 12 on ranks 0 and 1, 0.5 s each"
    assert (together.rank, together.until_unix_s) == (None, T0 - 10.0)
    assert together.at_unix_s == T0 - 12.0
    assert (behind.text, behind.rank) == ("step 9 on rank 2, 0.5 s each", 2)


def test_long_journal_is_entered_in_the_middle(run: Path) -> None:
    write_journal(run, *({"type": "stop", "at": i - 9000.0, "reason": f"number {i}"} for i in range(9500)))
    timeline = read_timeline(run, T0 - 4000.0)
    texts = [m.text for m in timeline.moments]
    assert texts[0] == "stop: number 4880"
    assert texts[-1] == "stop: number 5030"
    assert len(texts) == 151


def test_without_a_time_the_end_of_the_journal_counts(run: Path) -> None:
    write_journal(
        run,
        {"type": "signal", "at": -1000.0, "signal": "SIGUSR1"},
        {"type": "run_ended", "at": 0.0, "reason": "a rank died"},
    )
    assert [m.text for m in read_timeline(run, None).moments] == ["the run ended: a rank died"]


def test_cut_foreign_and_newer_records_are_left_out(run: Path) -> None:
    write_journal(
        run,
        {"type": "steps", "at": 0.0, "ranks": [1]},
        {"type": "rank_exited", "at": 0.0},
        {"type": "of_tomorrow", "at": 0.0},
        {"type": "decision", "at": 0.0, "action": "restart"},
    )
    with (run / "journal" / "n0.jsonl").open("a") as f:
        f.write('not json\n[1]\n{"type": "stop", "at_unix_s": "x"}\n{"type": "stop"')
    assert [m.text for m in read_timeline(run, T0).moments] == ["decided: restart"]


def test_journals_of_all_nodes_are_merged_in_time(run: Path) -> None:
    write_journal(run, {"type": "stop", "at": 1.0, "reason": "b"}, node="n0")
    write_journal(run, {"type": "stop", "at": 0.0, "reason": "a"}, node="n1")
    timeline = read_timeline(run, T0)
    assert [(m.text, m.node) for m in timeline.moments] == [("stop: a", "n1"), ("stop: b", "n0")]


# -- a run without an incident -----------------------------------------------------------------------------------------
def test_newest_attempt_of_a_run_without_incidents(run: Path) -> None:
    write_journal(
        run,
        {"type": "run_started", "at": -60.0, "local_world_size": 2},
        {"type": "rank_exited", "at": -50.0, "rank": 0, "pid": 1, "code": 1, "by_us": False},
        {"type": "rank_started", "at": -40.0, "attempt": 1, "rank": 0, "local_rank": 0, "pid": 11},
        {"type": "rank_exited", "at": -1.0, "attempt": 1, "rank": 0, "pid": 11, "code": -9, "by_us": False},
    )
    for attempt in (0, 1):
        for rank in (0, 1):
            (run / "attempts" / str(attempt) / f"rank_{rank}").mkdir(parents=True)
    evidence, folders, _ = read_last_attempt(run)
    assert evidence is not None
    assert (evidence.attempt, evidence.world_size) == (1, 2)
    assert [f.name for f in folders] == ["rank_0", "rank_1"]
    first, second = evidence.ranks
    assert first.exit == ExitRecord(None, 9, T0 - 1.0, False)
    assert (first.node, first.pid, second.exit) == ("n0", 11, None)
