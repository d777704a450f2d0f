"""Paths in, a case out: dumps, sidecars, logs and run folders together."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from steadyrun.collectors.flight.sidecar import DumpFile, LiveGroup, Sidecar
from steadyrun.core.classes import FaultClass
from steadyrun.core.flight import FlightGroup, FlightOp, RankFlight
from steadyrun.core.records import Evidence, ExitRecord, RankEvidence, to_json
from steadyrun.postmortem.case import InputStatus
from steadyrun.postmortem.judging import Outcome, judge_case, outcome_of_report
from steadyrun.postmortem.opening import UnusableError, open_case

T0 = 1_800_000_000.0
CASES = Path(__file__).resolve().parents[4] / "shared" / "cases" / "flight_recorder"


def dump(rank: int, seqs: int, backend: str = "gloo") -> str:
    """A dump in torch's JSON of one group of two ranks, whose newest operation is open."""
    entries = [
        {
            "record_id": i,
            "pg_id": 0,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": i + 1,
            "p2p_seq_id": 0,
            "op_id": i + 1,
            "profiling_name": f"{backend}:all_reduce",
            "time_created_ns": int((T0 + i) * 1e9),
            "input_sizes": [[8]],
            "input_dtypes": ["Float"],
            "output_sizes": [[8]],
            "output_dtypes": ["Float"],
            "state": "completed" if i < 2 and backend == "nccl" else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": None,
            "retired": i < 2,
            "timeout_ms": 600_000,
            "is_p2p": False,
            "frames": [],
        }
        for i in range(seqs)
    ]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return json.dumps({"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries, "rank": rank})


def sidecar(rank: int, **fields: object) -> Sidecar:
    return Sidecar(
        rank=rank,
        local_rank=rank,
        world_size=2,
        host=f"n{rank}",
        pid=100 + rank,
        attempt=3,
        run_id="abc",
        step=17,
        groups=(LiveGroup("0", "default_pg", (0, 1), "gloo"),),
        recorder_state="on",
        gpu="GPU-1234",
        dumps=(DumpFile(f"rank_{rank}.flight.gloo.json", "gloo", "full", T0 + 60),),
        **fields,  # type: ignore[arg-type]
    )


def write_rank(folder: Path, rank: int, seqs: int, side: Sidecar) -> None:
    (folder / f"rank_{rank}.flight.gloo.json").write_text(dump(rank, seqs))
    (folder / f"rank_{rank}.flight.json").write_text(json.dumps(side.to_json()))


def rank_of(case, rank: int) -> RankEvidence:
    return next(r for r in case.evidence.ranks if r.rank == rank)


def test_sidecars_tell_what_dumps_do_not(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, 3, sidecar(0))
    write_rank(tmp_path, 1, 2, sidecar(1, process_state="T", section="step", section_age_s=40.0))
    case = open_case([tmp_path])
    stopped = rank_of(case, 1)
    assert case.evidence.world_size == 2
    assert (stopped.node, stopped.gpu, stopped.step, stopped.pid) == ("n1", "GPU-1234", 17, 101)
    assert stopped.process is not None
    assert stopped.process.state == "T"
    assert stopped.sections[0].since_s == T0 + 20
    finding = judge_case(case).findings[0]
    assert (finding.cls, finding.ranks) == (FaultClass.STOPPED_PROCESS, (1,))


def test_exit_and_exception_of_a_sidecar_count(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, 3, sidecar(0))
    write_rank(tmp_path, 1, 2, sidecar(1, exit_code=1, exception="ValueError: bad: batch"))
    dead = rank_of(open_case([tmp_path]), 1)
    assert dead.exit == ExitRecord(1, None, T0 + 60)
    assert dead.exception is not None
    assert (dead.exception.type, dead.exception.message) == ("ValueError", "bad: batch")


def test_log_fills_in_the_rank_that_left_no_dump(tmp_path: Path, torch_log) -> None:
    (tmp_path / "fr_rank_0.json").write_text(dump(0, 3, "nccl"))
    (tmp_path / "rank_1.log").write_text("\n".join(torch_log.signalled(1, 0, 2, 2).lines))
    case = open_case([tmp_path])
    assert rank_of(case, 1).flight is not None
    finding = judge_case(case).findings[0]
    assert (finding.cls, finding.ranks, finding.seq) == (FaultClass.HOST_STALL, (1,), 3)


def test_log_does_not_replace_a_dump(tmp_path: Path, torch_log) -> None:
    (tmp_path / "fr_rank_0.json").write_text(dump(0, 3, "nccl"))
    (tmp_path / "fr_rank_1.json").write_text(dump(1, 2, "nccl"))
    (tmp_path / "job.log").write_text("\n".join(torch_log.caught(0, 99, "BARRIER", 1).lines))
    flight = rank_of(open_case([tmp_path]), 0).flight
    assert flight is not None
    assert [op.seq for op in flight.ops] == [3]


def test_log_adds_what_only_nccl_knows_to_a_dump_of_gloo(tmp_path: Path, torch_log) -> None:
    (tmp_path / "fr_rank_0.json").write_text(dump(0, 2))
    (tmp_path / "job.log").write_text("\n".join(torch_log.caught(0, 99, "BARRIER", 1).lines))
    flight = rank_of(open_case([tmp_path], world_size=2), 0).flight
    assert flight is not None
    assert [(flight.groups[op.group].backend, op.name) for op in flight.ops] == [("nccl", "barrier")]
    assert "log" in flight.recorders


def test_folder_of_torchrun_logs_has_local_ranks(tmp_path: Path, torch_log) -> None:
    folder = tmp_path / "none_abc" / "attempt_0"
    for local in (0, 1):
        (folder / str(local)).mkdir(parents=True)
    (folder / "0" / "stderr.log").write_text("\n".join(torch_log.caught(8, 5, "ALLREDUCE", 1).lines) + "\nbye\n")
    (folder / "1" / "stderr.log").write_text("nothing but this\n")
    case = open_case([tmp_path])
    assert [r.rank for r in case.evidence.ranks] == [1, 8]
    assert rank_of(case, 8).log_tail[-1] == "bye"
    statuses = {i.path.parent.name: (i.rank, i.status) for i in case.inputs}
    assert statuses == {"0": (8, InputStatus.USED), "1": (1, InputStatus.USED)}


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path, torch_log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadyrun.postmortem.opening.LOG_BYTES", 1 << 20)
    early, late = torch_log.caught(0, 1, "ALLREDUCE", 1).lines[-1], torch_log.caught(0, 2, "ALLREDUCE", 1).lines[-1]
    (tmp_path / "job.log").write_text(early + "\n" + "chatter\n" * 200_000 + late + "\n")
    case = open_case([tmp_path])
    flight = rank_of(case, 0).flight
    assert flight is not None
    assert [op.seq for op in flight.ops] == [2]
    assert case.inputs[0].status is InputStatus.CUT


def test_progress_counts_all_files(tmp_path: Path, torch_log) -> None:
    for rank in range(2):
        (tmp_path / f"fr_rank_{rank}.json").write_text(dump(rank, 2))
    (tmp_path / "job.log").write_text("\n".join(torch_log.caught(0, 1, "ALLREDUCE", 1).lines))
    told: list[tuple[int, int]] = []
    open_case([tmp_path], progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (3, 3)
    assert all(done <= total == 3 for done, total in told)


# -- run folders -------------------------------------------------------------------------------------------------------
@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one incident of two ranks, whose flight records are in the evidence."""
    folder = tmp_path / "20270115T080000Z-abc"
    incident = folder / "incidents" / "0001"
    incident.mkdir(parents=True)
    (folder / "journal").mkdir()
    group = FlightGroup("0", "default_pg", (0, 1), "gloo", issued_seq=3, done_seq=2)
    op = FlightOp(0, 3, "all_reduce", site="train.py:88 in step")
    waiting = RankFlight(0, (group,), (op,), recorders=("gloo",))
    idle = RankFlight(1, (replace(group, issued_seq=2),), recorders=("gloo",))
    ranks = tuple(RankEvidence(r, r, "n0", 50 + r, 0, flight=f) for r, f in ((0, waiting), (1, idle)))
    evidence = Evidence("abc", 0, 2, "hang", 5000.0, ranks, "/home/me/train.py")
    (incident / "evidence.json").write_text(json.dumps(to_json(evidence)))
    (incident / "verdict.json").write_text(json.dumps({"detected_at_unix_s": T0}))
    record = {"v": 1, "type": "stop", "at_unix_s": T0, "at_s": 4990.0, "node": "n0", "attempt": 0, "reason": "a hang"}
    (folder / "journal" / "n0.jsonl").write_text(json.dumps(record) + "\n")
    return folder


def test_run_folder_gives_its_incident_with_what_happened_around_it(run: Path) -> None:
    case = open_case([run])
    assert case.title == f"incident 0001 of {run.name}"
    assert case.unix_minus_mono_s == {"n0": T0 - 4990.0}
    assert [m.text for m in case.moments] == ["stop: a hang"]
    finding = judge_case(case).findings[0]
    assert (finding.cls, finding.ranks, finding.seq) == (FaultClass.HOST_STALL, (1,), 3)


def test_incident_alone_gives_the_same_verdict(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "mailed"
    (run / "incidents" / "0001").rename(copy)
    finding = judge_case(open_case([copy])).findings[0]
    assert (finding.cls, finding.ranks) == (FaultClass.HOST_STALL, (1,))


def test_dumps_in_an_incident_folder_go_before_the_summary_and_give_details(run: Path) -> None:
    folder = run / "incidents" / "0001"
    write_rank(folder, 0, 5, sidecar(0))
    case = open_case([run])
    flight = rank_of(case, 0).flight
    assert flight is not None
    assert flight.groups[0].issued_seq == 5
    assert case.details is not None
    assert [op.seq for op in case.details.ops(0, "0", 1, 2)] == [1, 2]
    assert rank_of(case, 0).node == "n0"


def test_log_lines_that_the_agent_kept_are_read_too(run: Path, torch_log) -> None:
    path = run / "incidents" / "0001" / "evidence.json"
    data = json.loads(path.read_text())
    tails = (torch_log.caught(0, 7, "ALLREDUCE", 8).lines[-1:], torch_log.signalled(1, 0, 6, 6).lines[-1:])
    for row, lines in zip(data["ranks"], tails, strict=True):
        del row["flight"]
        row["log_tail"] = lines
    path.write_text(json.dumps(data))
    finding = judge_case(open_case([run])).findings[0]
    assert (finding.cls, finding.ranks, finding.seq) == (FaultClass.HOST_STALL, (1,), 7)


# -- what is no use ----------------------------------------------------------------------------------------------------
def test_nothing_usable_is_an_error_that_says_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello\n")
    (tmp_path / "fr_rank_0").write_bytes(b"")
    with pytest.raises(UnusableError, match=r"cannot use anything in .*2 file\(s\), .*give flight-recorder dumps"):
        open_case([tmp_path])


@pytest.mark.parametrize("name", ["absent", "."])
def test_no_files_at_all(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnusableError, match="cannot"):
        open_case([tmp_path / name])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_that_may_not_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "fr_rank_0.json").write_text(dump(0, 2))
    secret = tmp_path / "fr_rank_1.json"
    secret.write_text(dump(1, 2))
    secret.chmod(0)
    case = open_case([tmp_path])
    assert InputStatus.UNREADABLE in {i.status for i in case.inputs if i.path == secret}


# -- the shared cases --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "cls", "ranks"),
    [
        ("degraded_extra_file", FaultClass.HOST_STALL, (1,)),
        ("degraded_malicious", FaultClass.HOST_STALL, (1,)),
        ("degraded_empty_file", FaultClass.HOST_STALL, (1,)),
        ("gloo_chain", FaultClass.HOST_STALL, (3,)),
        ("gloo_sigstop", FaultClass.STOPPED_PROCESS, (1,)),
        ("gloo_two_groups_order", FaultClass.DEADLOCK_CYCLE, (0, 1)),
        ("nccl_lock_gil_1st", FaultClass.HOST_STALL, (9, 14)),
        ("nccl_gpu_error_2nd", FaultClass.DEVICE_STALL, (9, 14)),
    ],
)
def test_whole_folders_of_the_shared_cases(
    name: str, cls: FaultClass, ranks: tuple[int, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    if not (CASES / name).is_dir():
        pytest.skip("the shared cases are not beside this checkout")
    report = judge_case(open_case([CASES / name]))
    assert (report.findings[0].cls, report.findings[0].ranks) == (cls, ranks)
    assert outcome_of_report(report) is Outcome.VERDICT
    assert capsys.readouterr().out == ""  # the malicious dump prints when it is unpickled without care
