"""The collected cases: real dumps of gloo and NCCL, whole and damaged, loaded and judged by their collectives alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steadyrun.collectors.flight.folder import load_folder
from steadyrun.detect.waits import judge_flights
from steadyrun.detect.waits.records import FlightJudgement, RankState

FOLDER = next(
    (p for up in Path(__file__).parents if (p := up / "shared" / "cases" / "flight_recorder").exists()),
    Path("shared/cases/flight_recorder"),
)
STATES = {"S": RankState.ALIVE, "T": RankState.STOPPED, "Z": RankState.DEAD}
FORMS = ("raw", "fixed", "json")
SURE = 0.7

pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="the collected cases are not beside the checkout")

GLOO = {
    "op_mismatch": ("op_mismatch", (1,), 4),
    "missing_rank": ("host_stall", (1,), 4),
    "missing_rank0": ("host_stall", (0,), 4),
    "never_joined": ("host_stall", (2,), 1),
    "chain": ("host_stall", (3,), 1),
    "async_missing": ("host_stall", (1,), 6),
    "skipped_one": ("host_stall", (1,), 24),
    "two_groups_order": ("deadlock_cycle", (0, 1), 1),
}
DEGRADED = ("truncated", "empty_file", "no_entries", "hostnames", "suffix_pkl", "extra_file", "malicious")


def judged(folder: Path, with_states: bool = False) -> FlightJudgement:
    loaded = load_folder([folder], workers=1)
    meta_file = folder.parent / "meta.json"
    meta = json.loads(meta_file.read_text()) if meta_file.exists() else {}
    states = {r: STATES[s] for r, s in enumerate(meta.get("proc_state", ()))} if with_states else {}
    return judge_flights(loaded.flights, meta.get("world_size", 0), states, loaded.details)


def blamed(judgement: FlightJudgement) -> set[int]:
    """Whom it would act on."""
    return {r for f in judgement.findings if f.finding.confidence >= SURE for r in f.finding.ranks}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GLOO)
def test_a_hang_on_gloo_is_explained(name: str, form: str) -> None:
    cls, ranks, seq = GLOO[name]
    judgement = judged(FOLDER / f"gloo_{name}" / form)
    first = judgement.findings[0].finding
    assert (first.cls.value, first.ranks, first.seq) == (cls, ranks, seq)
    assert blamed(judgement) <= set(ranks)
    assert len(judgement.findings) == 1


@pytest.mark.parametrize("form", FORMS)
def test_nothing_in_flight_is_healthy(form: str) -> None:
    judgement = judged(FOLDER / "gloo_ok" / form)
    assert judgement.is_healthy
    assert judgement.findings[0].finding.cls.value == "healthy"


@pytest.mark.parametrize("form", FORMS)
def test_what_gloo_does_not_record_is_said(form: str) -> None:
    judgement = judged(FOLDER / "gloo_p2p_deadlock" / form)
    assert judgement.findings[0].finding.cls.value == "healthy"
    assert judgement.findings[0].finding.confidence < SURE
    assert any("gloo does not record send, recv" in m for m in judgement.missing)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "cls", "rank"),
    [
        ("sigstop", "stopped_process", 1),
        ("sigkill", "dead_process", 1),
        ("size_mismatch", "dead_process", 2),
        ("size_mismatch_rank0", "dead_process", 0),
    ],
)
def test_who_left_no_dump_is_known_with_the_process_states_and_suspected_without(
    name: str, cls: str, rank: int, form: str
) -> None:
    folder = FOLDER / f"gloo_{name}" / form
    known, guessed = judged(folder, with_states=True), judged(folder)
    assert (known.findings[0].finding.cls.value, known.findings[0].finding.ranks) == (cls, (rank,))
    assert blamed(known) == {rank}
    assert guessed.findings[0].finding.ranks == (rank,)
    assert not blamed(guessed)


def test_who_left_no_dump_is_suspected_by_the_others_alone() -> None:
    loaded = load_folder([FOLDER / "gloo_size_mismatch" / "raw"], workers=1)
    first = judge_flights(loaded.flights, 0, {}, loaded.details).findings[0].finding
    assert (first.cls.value, first.ranks) == ("dead_process", (2,))
    assert first.confidence < SURE


@pytest.mark.parametrize("form", FORMS)
def test_types_that_differ_outweigh_the_rank_that_gloo_ended_for_it(form: str) -> None:
    judgement = judged(FOLDER / "gloo_dtype_mismatch" / form, with_states=True)
    assert [(f.finding.cls.value, f.finding.ranks) for f in judgement.findings] == [
        ("dtype_mismatch", (0, 2)),
        ("dead_process", (1,)),
    ]
    assert not blamed(judgement)


@pytest.mark.parametrize("name", DEGRADED)
def test_damaged_dumps_hide_neither_the_stall_nor_that_they_are_damaged(name: str) -> None:
    judgement = judged(FOLDER / f"degraded_{name}")
    first = judgement.findings[0].finding
    assert (first.cls.value, first.ranks, first.seq) == ("host_stall", (1,), 4)
    assert blamed(judgement) == {1}
    if name in ("empty_file", "malicious"):
        assert judgement.unknown == (2,)
    if name == "truncated":
        assert any("rank 2" in m and "cut" in m for m in judgement.missing)


@pytest.mark.parametrize(
    ("name", "cls", "seq"),
    [("nccl_gpu_error_2nd", "device_stall", 87749), ("nccl_lock_gil_1st", "host_stall", 45265)],
)
def test_sixteen_ranks_of_a_real_job_with_two_injected_faults(name: str, cls: str, seq: int) -> None:
    judgement = judged(FOLDER / name)
    first = judgement.findings[0].finding
    assert (first.cls.value, first.ranks, first.seq) == (cls, (9, 14), seq)
    assert blamed(judgement) == {9, 14}
    assert judgement.findings[0].waiters == 14
    assert set(judgement.victims) == set(range(16)) - {9, 14}
