"""Stacks and flight records together: whose word counts for what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from steadyrun.core.classes import FaultClass
from steadyrun.core.flight import FlightGroup, FlightOp, OpState, RankFlight
from steadyrun.core.records import Finding, RankEvidence
from steadyrun.detect.collectives import DeadByLargerMessage, joined, mismatch_of_death, with_operation
from steadyrun.detect.verdict import Judgement
from steadyrun.detect.waits.records import FlightFinding, FlightJudgement


def told(
    cls: FaultClass,
    *ranks: int,
    confidence: float = 0.8,
    hard: bool = True,
    victims: tuple[int, ...] = (),
    summary: str = "called",
) -> FlightJudgement:
    finding = Finding(
        cls, ranks, summary, confidence, group="mesh_tp", seq=7, op="all_reduce", callsite="train.py:9 in f"
    )
    return FlightJudgement((FlightFinding(finding, len(victims), is_hard=hard),), victims=victims, blocked=victims)


def stall(cls: FaultClass, *ranks: int, confidence: float = 0.75, summary: str = "is stuck") -> Finding:
    return Finding(cls, ranks, summary, confidence, section="step", callsite="data.py:31", evidence=("stacks.txt",))


def test_where_both_name_a_rank_the_kind_is_the_stacks_and_the_operation_the_collectives() -> None:
    found = joined([stall(FaultClass.INPUT_PIPELINE, 1)], told(FaultClass.HOST_STALL, 1, victims=(0, 2)))
    assert [(f.cls, f.ranks, f.group, f.seq, f.op, f.callsite) for f in found] == [
        (FaultClass.INPUT_PIPELINE, (1,), "mesh_tp", 7, "all_reduce", "data.py:31")
    ]
    assert found[0].confidence > 0.8


def test_a_mismatch_that_was_recorded_wins_over_what_places_suggest() -> None:
    guess = stall(FaultClass.SKIPPED_COLLECTIVE, 0, confidence=0.8)
    found = joined([guess], told(FaultClass.OP_MISMATCH, 2, confidence=0.7, victims=(0, 1)))
    assert [(f.cls, f.ranks) for f in found] == [(FaultClass.OP_MISMATCH, (2,))]


def test_a_stopped_process_stays_one_and_gets_the_operation_it_is_missed_in() -> None:
    stopped = stall(FaultClass.STOPPED_PROCESS, 1, confidence=0.97)
    found = joined([stopped], told(FaultClass.HOST_STALL, 1, victims=(0,)))
    assert (found[0].cls, found[0].seq, found[0].summary) == (FaultClass.STOPPED_PROCESS, 7, "is stuck")


def test_ranks_that_wait_are_not_accused_by_their_stacks() -> None:
    found = joined([stall(FaultClass.HOST_STALL, 0)], told(FaultClass.DEVICE_STALL, 3, victims=(0, 1, 2)))
    assert [(f.cls, f.ranks) for f in found] == [(FaultClass.DEVICE_STALL, (3,))]


def test_a_second_cause_that_only_stacks_see_is_kept_with_less_weight() -> None:
    found = joined([stall(FaultClass.STORAGE_STALL, 5)], told(FaultClass.HOST_STALL, 1, victims=(0,)))
    assert [(f.cls, f.ranks) for f in found] == [(FaultClass.HOST_STALL, (1,)), (FaultClass.STORAGE_STALL, (5,))]
    assert found[1].confidence == 0.45


def test_without_flight_records_or_with_nothing_in_them_stacks_decide() -> None:
    finding = stall(FaultClass.HOST_STALL, 1)
    assert joined([finding], None) == [finding]
    assert joined([finding], told(FaultClass.HEALTHY)) == [finding]
    assert joined([], told(FaultClass.IN_FLIGHT_NETWORK, 0, 1))[0].cls is FaultClass.IN_FLIGHT_NETWORK


def few_against_many() -> FlightJudgement:
    """Rank 0 waits in a call of its own; ranks 1 and 2 are in none."""
    extra, idle = told(FaultClass.EXTRA_COLLECTIVE, 0, confidence=0.55), told(FaultClass.HOST_STALL, 1, 2)
    return FlightJudgement((*idle.findings, *extra.findings), idle=(1, 2), blocked=(0,))


def test_few_in_a_call_that_many_do_not_make_have_made_one_too_many() -> None:
    for suspected in ((1,), (1, 2)):
        found = joined([stall(FaultClass.HOST_STALL, *suspected, confidence=0.9)], few_against_many())
        assert [(f.cls, f.ranks) for f in found] == [(FaultClass.EXTRA_COLLECTIVE, (0,))]
        assert found[0].confidence >= 0.7


def test_many_that_stall_in_the_data_loader_are_not_excused_by_one_call() -> None:
    found = joined([stall(FaultClass.INPUT_PIPELINE, 1, 2, confidence=0.9)], few_against_many())
    assert (found[0].cls, found[0].ranks) == (FaultClass.INPUT_PIPELINE, (1, 2))


def test_a_rank_in_a_collective_that_no_recorder_sees_is_part_of_the_ring() -> None:
    found = joined(
        [],
        told(FaultClass.HOST_STALL, 1, confidence=0.85, victims=(0,)),
        {0: "all_reduce at a.py:1", 1: "all_reduce at a.py:2"},
    )
    assert (found[0].cls, found[0].ranks) == (FaultClass.DEADLOCK_CYCLE, (0, 1))
    assert found[0].confidence <= 0.6
    assert "all_reduce at a.py:2, which no recorder sees" in found[0].summary
    guess = stall(FaultClass.SKIPPED_COLLECTIVE, 1)
    again = joined([guess], told(FaultClass.HOST_STALL, 1, victims=(0,)), {0: "all_reduce at a.py:1", 1: "b at a.py:2"})
    assert [f.cls for f in again] == [FaultClass.DEADLOCK_CYCLE]


def test_doubt_about_receives_is_left_out_once_the_stack_shows_where_the_rank_is() -> None:
    text = "rank 1 has not called it (gloo does not record send and recv: it may stand in one)"
    found = joined([stall(FaultClass.HOST_STALL, 1)], told(FaultClass.HOST_STALL, 1, victims=(0,), summary=text))
    assert found[0].summary == "is stuck; rank 1 has not called it"


def test_a_death_tells_in_which_operation_the_others_wait_for_it() -> None:
    death = Finding(FaultClass.DEAD_PROCESS, (1,), "was killed", 0.9)
    assert with_operation([death], told(FaultClass.DEAD_PROCESS, 1, victims=(0,)))[0].seq == 7
    assert with_operation([death], None) == [death]


def test_of_two_sides_of_equal_size_the_one_that_stands_apart_by_its_place_is_named() -> None:
    finding = Finding(FaultClass.OP_MISMATCH, (0, 1), "0 called a, 1 called b; which of them is wrong", 0.6, seq=7)
    sides = (((0,), "all_reduce [9] Float"), ((1,), "barrier"))
    flight = FlightJudgement((FlightFinding(finding, 0, sides),))
    found = joined([stall(FaultClass.SKIPPED_COLLECTIVE, 1, confidence=0.45)], flight)
    assert [(f.cls, f.ranks, f.callsite) for f in found] == [(FaultClass.OP_MISMATCH, (1,), "data.py:31")]
    assert found[0].summary == "0 called a, 1 called b; by where it stands rank 1 is the odd one"
    uneven = FlightJudgement((FlightFinding(finding, 0, (((0, 2), "a"), ((1,), "b"))),))
    assert joined([stall(FaultClass.SKIPPED_COLLECTIVE, 1)], uneven)[0].ranks == (0, 1)


def test_a_missing_dump_proves_nothing_of_a_rank_that_was_seen_alive_or_has_ended_well() -> None:
    hang = stall(FaultClass.TEARDOWN_HANG, 1, confidence=0.65)
    assert joined([hang], told(FaultClass.DEAD_PROCESS, 0, confidence=0.45), living={0, 1}) == [hang]
    found = joined([hang], told(FaultClass.DEAD_PROCESS, 0, confidence=0.45), living={1})
    assert [f.cls for f in found] == [FaultClass.DEAD_PROCESS, FaultClass.TEARDOWN_HANG]


# -- gloo's aborts -----------------------------------------------------------------------------------------------------
def survivor(rank: int, numel: int, dtype: str = "Float", seq: int = 4) -> RankFlight:
    group = FlightGroup("0", "default_pg", (0, 1, 2), "gloo", 1, seq, seq - 1)
    op = FlightOp(0, seq, "all_reduce", OpState.FAILED, in_sizes=((numel,),), in_dtypes=(dtype,), site=f"t.py:{rank}")
    return RankFlight(rank, (group,), (op,))


def test_survivors_that_agree_make_the_dead_rank_the_odd_one() -> None:
    found = mismatch_of_death(DeadByLargerMessage(2), {0: survivor(0, 4096), 1: survivor(1, 4096)})
    assert found is not None
    assert (found.cls, found.ranks, found.confidence) == (FaultClass.SIZE_MISMATCH, (2,), 0.85)


def test_the_dead_rank_counts_with_the_smaller_messages() -> None:
    flights = {0: survivor(0, 4096, "Float"), 2: survivor(2, 4096, "Double")}
    found = mismatch_of_death(DeadByLargerMessage(1), flights)
    assert found is not None
    assert (found.cls, found.ranks, found.seq, found.callsite) == (FaultClass.DTYPE_MISMATCH, (2,), 4, "t.py:2")
    assert "rank 0: all_reduce [4096] Float" in found.summary
    assert "gloo aborted rank 1" in found.summary


def test_an_unheard_abort_is_a_mismatch_only_where_survivors_differ() -> None:
    same = {0: survivor(0, 8), 1: survivor(1, 8)}
    assert mismatch_of_death(DeadByLargerMessage(2, is_told=False), same) is None
    differing = {0: survivor(0, 8), 1: survivor(1, 16)}
    assert mismatch_of_death(DeadByLargerMessage(2, is_told=False), differing) is not None
    assert mismatch_of_death(DeadByLargerMessage(2), {}) is None


# -- through the judge -------------------------------------------------------------------------------------------------
def recorded(rank: int, issued: int) -> RankFlight:
    """What rank *rank* of three has called on gloo: all but the newest is done, rank 1's all of it."""
    group = FlightGroup("0", "default_pg", (0, 1, 2), "gloo", 1, issued, min(issued, 5))
    op = FlightOp(0, 6, "all_reduce", in_sizes=((8,),), in_dtypes=("Float",), site="train.py:70 in main", created_ns=9)
    return RankFlight(rank, (group,), (op,) if issued > 5 else (), recorders=("gloo",), entries=6, has_frames=True)


def test_a_rank_in_no_call_is_placed_where_its_stack_stands_though_others_were_suspected(
    judged: Callable[..., Judgement], make_rank: Callable[..., RankEvidence]
) -> None:
    # waiting for the work of an asynchronous call is C++ code: by their stacks all three are in the user's own code
    ranks = [
        replace(make_rank(rank, "sleep" if rank == 1 else "own", suspicion="no_progress" if rank == 2 else None),
                flight=recorded(rank, 5 if rank == 1 else 6))
        for rank in range(3)
    ]  # fmt: skip
    judgement = judged(*ranks)
    assert [(f.cls, f.ranks, f.seq, f.callsite) for f in judgement.findings] == [
        (FaultClass.HOST_STALL, (1,), 6, "data.py:31")
    ]
    assert judgement.victims == (0, 2)
    assert "rank 1 is at data.py:31" in judgement.main.summary
    assert "may stand in one" not in judgement.main.summary


def test_an_ended_process_that_nobody_saw_end_is_dead(
    judged: Callable[..., Judgement], make_rank: Callable[..., RankEvidence]
) -> None:
    gone = make_rank(1, None, state="Z")
    judgement = judged(make_rank(0, "all_reduce"), gone)
    assert (judgement.main.cls, judgement.main.ranks) == (FaultClass.DEAD_PROCESS, (1,))
    assert "how was not seen" in judgement.main.summary
