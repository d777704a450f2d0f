"""Culprits and victims from hand-made evidence, class by class."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from steadyrun.core.classes import Action, FaultClass, Mode
from steadyrun.core.records import Evidence, RankEvidence, Suspicion
from steadyrun.detect.verdict import Judgement, judge

MakeRank = Callable[..., RankEvidence]
Judged = Callable[..., Judgement]
PEER_GONE = ("RuntimeError", "[pair.cc:534] Connection closed by peer [127.0.0.1]:51234")


def only(judgement: Judgement) -> tuple[FaultClass, tuple[int, ...], tuple[int, ...]]:
    assert len(judgement.findings) == 1, judgement.findings
    return judgement.main.cls, judgement.main.ranks, judgement.victims


# -- deaths ------------------------------------------------------------------------------------------------------------
def test_exception_is_a_program_error_at_its_call_site(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "backward"), make_rank(1, raised=("ValueError", "bad batch"), code=1), trigger="exit")
    assert only(j) == (FaultClass.PROGRAM_ERROR, (1,), (0,))
    assert j.main.callsite == "model.py:31"
    assert "raised ValueError: bad batch" in j.main.summary
    assert "after step 10" in j.main.summary


def test_exception_of_a_loader_worker_is_told_by_its_last_line(make_rank: MakeRank, judged: Judged) -> None:
    message = (
        "Caught KeyError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/proj/data.py", line 31, in __getitem__\n    raise KeyError(i)\nKeyError: 7\n'
    )
    j = judged(make_rank(0, "backward"), make_rank(1, raised=("KeyError", message), code=1), trigger="exit")
    assert "raised KeyError: Caught KeyError in DataLoader worker process 0: KeyError: 7 at " in j.main.summary


@pytest.mark.parametrize("raised", [("ValueError", "bad"), None])
def test_the_teardown_that_follows_an_exception_or_an_exit_is_no_place_of_it(
    make_rank: MakeRank, judged: Judged, raised: tuple[str, str] | None
) -> None:
    j = judged(make_rank(0, "backward"), make_rank(1, raised=raised, code=1, section="teardown", finished=True))
    assert j.main.section is None
    assert "teardown" not in j.main.summary
    assert "interpreter" not in j.main.summary


def test_a_crash_in_the_teardown_says_so_once(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "backward"), make_rank(1, signal=11, section="teardown", finished=True), trigger="exit")
    assert j.main.section == "teardown"
    assert j.main.summary.endswith(", after step 10 while the interpreter was ending")


def test_several_killed_ranks_were_killed(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(*(make_rank(r, signal=9, oom=False) for r in (0, 1)), trigger="exit")
    assert j.main.summary.startswith("ranks 0 and 1 were killed by SIGKILL")


def test_rank_that_lost_its_peer_is_a_victim_even_if_it_ended_first(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(
        make_rank(0, raised=PEER_GONE, code=1, at_s=99.0),
        make_rank(1, raised=("ValueError", "bad"), code=1, at_s=100.0),
        make_rank(2, "backward"),
        trigger="exit",
    )
    assert only(j) == (FaultClass.PROGRAM_ERROR, (1,), (0, 2))


def test_rank_that_raised_and_still_ends_is_the_cause(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(
        make_rank(0, raised=PEER_GONE, code=1), make_rank(1, "shutdown", raised=("KeyError", "'x'")), trigger="exit"
    )
    assert only(j) == (FaultClass.PROGRAM_ERROR, (1,), (0,))


def test_same_exception_on_all_ranks_is_one_finding(make_rank: MakeRank, judged: Judged) -> None:
    ranks = [make_rank(r, raised=("ValueError", f"rank {r}"), code=1, at_s=100.0 + r / 100) for r in range(4)]
    j = judged(*ranks, trigger="exit")
    assert only(j) == (FaultClass.PROGRAM_ERROR, (0, 1, 2, 3), ())


def test_independent_causes_stand_apart_earliest_first(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(
        make_rank(0, raised=("ValueError", "x"), traceback_hash="h1", code=1, at_s=100.2),
        make_rank(1, raised=("KeyError", "y"), traceback_hash="h2", code=1, at_s=100.1),
        make_rank(2, "backward"),
        trigger="exit",
    )
    assert [(f.cls, f.ranks) for f in j.findings] == [
        (FaultClass.PROGRAM_ERROR, (1,)),
        (FaultClass.PROGRAM_ERROR, (0,)),
    ]
    assert j.victims == (2,)


def test_death_long_after_the_first_is_less_certain(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(
        make_rank(0, signal=9, oom=False, at_s=100.0),
        make_rank(1, raised=("RuntimeError", "something odd"), code=1, at_s=130.0),
        trigger="exit",
    )
    assert [f.ranks for f in j.findings] == [(0,), (1,)]
    assert j.findings[1].confidence < 0.5


def test_exit_without_words_beside_a_kill_is_less_certain(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, code=1, at_s=100.05), make_rank(1, signal=9, oom=None, at_s=100.0), trigger="exit")
    assert j.main.ranks == (1,)
    assert j.findings[1].confidence < j.findings[0].confidence


@pytest.mark.parametrize(
    ("oom", "cls", "words"),
    [
        (False, FaultClass.DEAD_PROCESS, "not by steadyrun; out-of-memory counter unchanged"),
        (True, FaultClass.OUT_OF_MEMORY, "out-of-memory killer"),
        (None, FaultClass.DEAD_PROCESS, "unknown"),
        ("unknown", FaultClass.DEAD_PROCESS, "unknown"),
    ],
)
def test_sigkill_is_told_from_out_of_memory(
    make_rank: MakeRank, judged: Judged, oom: Any, cls: FaultClass, words: str
) -> None:
    j = judged(make_rank(0, "backward"), make_rank(1, signal=9, oom=oom), trigger="exit")
    assert only(j) == (cls, (1,), (0,))
    assert words in j.main.summary
    assert (j.main.confidence > 0.9) == (oom in (True, False))


def test_complaints_before_a_sigkill_do_not_make_it_a_victim(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(
        make_rank(0, "backward"), make_rank(1, signal=9, oom=False, log=("connection reset by peer",)), trigger="exit"
    )
    assert only(j)[:2] == (FaultClass.DEAD_PROCESS, (1,))


@pytest.mark.parametrize(("signum", "words"), [(11, "segmentation fault"), (6, "abort"), (7, "bus error")])
def test_crash_names_the_line_that_crashed(make_rank: MakeRank, judged: Judged, signum: int, words: str) -> None:
    j = judged(make_rank(0, "backward"), make_rank(1, "own", signal=signum), trigger="exit")
    assert only(j) == (FaultClass.DEAD_PROCESS, (1,), (0,))
    assert words in j.main.summary
    assert j.main.callsite == "model.py:31"


def test_abort_of_a_rank_that_lost_its_peer_is_collateral(make_rank: MakeRank, judged: Judged) -> None:
    log = ("terminate called after throwing an instance of 'gloo::EnforceNotMet'", "Connection reset by peer")
    j = judged(make_rank(0, signal=6, log=log, at_s=99.9), make_rank(1, signal=11), trigger="exit")
    assert only(j) == (FaultClass.DEAD_PROCESS, (1,), (0,))


def test_gloo_size_mismatch_abort_is_named(make_rank: MakeRank, judged: Judged) -> None:
    log = ("terminate called", "Enforce fail: Received data size doesn't match expected size. 64 vs 128")
    j = judged(make_rank(0, raised=PEER_GONE, code=1), make_rank(1, signal=6, log=log), trigger="exit")
    assert only(j)[:2] == (FaultClass.SIZE_MISMATCH, (1,))


def test_program_made_exit_code_is_a_program_error(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "backward"), make_rank(1, code=3), trigger="exit")
    assert only(j) == (FaultClass.PROGRAM_ERROR, (1,), (0,))
    assert "exit code 3 without an exception" in j.main.summary


def test_exit_code_with_a_traceback_in_the_log_says_its_last_line(make_rank: MakeRank, judged: Judged) -> None:
    log = ("Traceback (most recent call last):", '  File "x.py", line 3, in <module>', "ValueError: no")
    j = judged(make_rank(0, code=1, log=log), trigger="exit")
    assert "last words: ValueError: no" in j.main.summary


def test_survived_warning_about_a_peer_does_not_clear_a_rank(make_rank: MakeRank, judged: Judged) -> None:
    warning = "[W socket.cpp:697] The client socket has failed to connect: Connection refused"
    j = judged(make_rank(0, code=1, log=(warning, *["fine"] * 20)), make_rank(1, "backward"), trigger="exit")
    assert only(j)[:2] == (FaultClass.PROGRAM_ERROR, (0,))


@pytest.mark.parametrize(
    ("raised", "cls"),
    [
        (("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"), FaultClass.OUT_OF_MEMORY),
        (("MemoryError", ""), FaultClass.OUT_OF_MEMORY),
        (("RuntimeError", "DataLoader worker (pid 33) is killed by signal: Bus error. shm"), FaultClass.INPUT_PIPELINE),
        (("OSError", "[Errno 28] No space left on device"), FaultClass.STORAGE_STALL),
        (("RuntimeError", "CUDA error: uncorrectable ECC error encountered"), FaultClass.DEVICE_STALL),
        (("ModuleNotFoundError", "No module named 'foo'"), FaultClass.PROGRAM_ERROR),
    ],
)
def test_known_texts_give_the_class(
    make_rank: MakeRank, judged: Judged, raised: tuple[str, str], cls: FaultClass
) -> None:
    assert only(judged(make_rank(0, raised=raised, code=1), trigger="exit"))[0] is cls


def test_port_in_use_is_start_up_only_before_the_first_step(make_rank: MakeRank, judged: Judged) -> None:
    raised = ("torch.distributed.DistNetworkError", "The server socket has failed: EADDRINUSE, address already in use")
    early = judged(make_rank(0, raised=raised, code=1, step=None), trigger="exit")
    late = judged(make_rank(0, raised=raised, code=1, step=5), trigger="exit")
    assert (early.main.cls, late.main.cls) == (FaultClass.START_UP, FaultClass.PROGRAM_ERROR)


def test_only_collateral_before_the_first_step_is_start_up(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(*[make_rank(r, raised=PEER_GONE, code=1, step=None) for r in range(2)], trigger="exit")
    assert only(j)[:2] == (FaultClass.START_UP, (0, 1))


def test_only_collateral_later_says_that_nothing_else_is_known(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, raised=PEER_GONE, code=1), make_rank(1, "all_reduce"), trigger="exit")
    assert j.main.cls is FaultClass.INSUFFICIENT_DATA
    assert j.main.confidence < 0.5


def test_only_collateral_with_an_absent_node_blames_the_absent(make_rank: MakeRank, judged: Judged) -> None:
    ranks = [make_rank(r, raised=PEER_GONE, code=1) for r in range(2)]
    j = judged(*ranks, trigger="exit", world_size=4)
    assert only(j) == (FaultClass.DEAD_NODE, (2, 3), (0, 1))


def test_collateral_timeout_with_a_stopped_peer_blames_the_peer(make_rank: MakeRank, judged: Judged) -> None:
    timed_out = ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete")
    j = judged(make_rank(0, raised=timed_out, code=1), make_rank(1, state="T"), trigger="exit")
    assert only(j) == (FaultClass.STOPPED_PROCESS, (1,), (0,))


def test_users_own_broken_connection_is_not_another_ranks(make_rank: MakeRank, judged: Judged) -> None:
    raised = ("ConnectionRefusedError", "[Errno 111] Connection refused")
    j = judged(make_rank(0, raised=raised, code=1), make_rank(1, "backward"), trigger="exit")
    assert only(j)[:2] == (FaultClass.PROGRAM_ERROR, (0,))


def test_rank_that_we_signalled_is_no_cause(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, signal=15, by_us=True), make_rank(1, signal=11), trigger="exit")
    assert only(j)[:2] == (FaultClass.DEAD_PROCESS, (1,))


def test_times_of_other_nodes_are_compared_through_their_offset(
    make_rank: MakeRank, make_evidence: Callable[..., Evidence]
) -> None:
    first = replace(make_rank(0, signal=11, at_s=900.0), node="a")
    later = replace(make_rank(1, raised=("ValueError", "x"), code=1, at_s=130.0), node="b")
    later = replace(later, exception=None)
    evidence = make_evidence(first, later, trigger="exit")
    j = judge(evidence, wall_minus_mono_s=5000.0, offsets={"a": 5000.0, "b": 5900.0})
    assert [f.ranks for f in j.findings] == [(0,), (1,)]
    assert j.findings[0].since_unix_s == pytest.approx(5900.0)


# -- hangs -------------------------------------------------------------------------------------------------------------
def test_majority_waits_and_one_rank_is_elsewhere(make_rank: MakeRank, judged: Judged) -> None:
    ranks = [make_rank(r, "all_reduce", suspicion="section", section="step") for r in (0, 2, 3)]
    j = judged(*ranks, make_rank(1, "sleep", suspicion="section", section="step", stack_unchanged=True))
    assert only(j) == (FaultClass.HOST_STALL, (1,), (0, 2, 3))
    assert j.main.confidence >= 0.9
    assert j.main.section == "step"
    assert j.main.callsite == "data.py:31"
    assert "3 of 4 ranks wait in all_reduce called at train.py:88" in j.main.summary
    assert "rank 1 is stuck at data.py:31" in j.main.summary
    assert j.main.since_unix_s == pytest.approx(5090.0)


def test_victims_wait_in_backward_under_ddp(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "backward", cpu_share=0.01), make_rank(1, "own", cpu_share=1.0, stack_unchanged=True))
    assert only(j) == (FaultClass.HOST_STALL, (1,), (0,))
    assert "busy without progress" in j.main.summary


@pytest.mark.parametrize(
    ("at", "cls"),
    [
        ("loader", FaultClass.INPUT_PIPELINE),
        ("dataset", FaultClass.INPUT_PIPELINE),
        ("save", FaultClass.STORAGE_STALL),
        ("own", FaultClass.HOST_STALL),
        ("cuda_sync", FaultClass.DEVICE_STALL),
    ],
)
def test_class_follows_what_the_culprit_does(make_rank: MakeRank, judged: Judged, at: str, cls: FaultClass) -> None:
    j = judged(make_rank(0, "all_reduce"), make_rank(1, at, suspicion="section"), make_rank(2, "all_reduce"))
    assert only(j) == (cls, (1,), (0, 2))


def test_stopped_loader_worker_is_mentioned(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "backward"), make_rank(1, "loader", children=((77, "T", "python"),)))
    assert only(j)[:2] == (FaultClass.INPUT_PIPELINE, (1,))
    assert "77 in state T" in j.main.summary


def test_checkpointing_section_makes_it_a_storage_stall(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "own", section="checkpointing", stack_unchanged=True), make_rank(1, "barrier"))
    assert only(j) == (FaultClass.STORAGE_STALL, (0,), (1,))


@pytest.mark.parametrize(
    ("state", "wchan", "cls"),
    [
        ("T", "", FaultClass.STOPPED_PROCESS),
        ("t", "", FaultClass.STOPPED_PROCESS),
        ("D", "nfs_wait_bit_killable", FaultClass.STORAGE_STALL),
        ("D", "some_driver_wait", FaultClass.HOST_STALL),
    ],
)
def test_process_state_outranks_stacks_and_needs_none(
    make_rank: MakeRank, judged: Judged, state: str, wchan: str, cls: FaultClass
) -> None:
    j = judged(make_rank(0, "backward"), make_rank(1, state=state, wchan=wchan), make_rank(2, "own"))
    assert only(j)[:2] == (cls, (1,))
    assert 0 in j.victims


def test_dead_main_thread_is_a_dead_process(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "backward"), make_rank(1, state="Z", dead_main=True))
    assert only(j) == (FaultClass.DEAD_PROCESS, (1,), (0,))


def test_moving_process_in_state_d_is_not_condemned_for_it(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "backward"), make_rank(1, "own", state="D", stack_unchanged=False))
    assert j.main.confidence <= 0.4
    assert "moving" in j.main.summary


def test_silent_rank_is_the_suspect_when_all_others_wait(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "all_reduce"), make_rank(1, missing=("stacks: no answer",)), make_rank(2, "all_reduce"))
    assert only(j) == (FaultClass.HOST_STALL, (1,), (0, 2))
    assert 0.5 <= j.main.confidence <= 0.7
    assert j.missing == ("rank 1: stacks: no answer",)


def test_rank_that_could_not_be_asked_is_suspected_weakly(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(*[make_rank(r, "all_reduce") for r in range(3)], world_size=4)
    assert only(j) == (FaultClass.HOST_STALL, (3,), (0, 1, 2))
    assert j.main.confidence <= 0.5
    assert any("rank 3: no evidence" in text for text in j.missing)


def test_minority_call_site_has_skipped_the_majoritys_collective(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(*[make_rank(r, "all_reduce") for r in (0, 2, 3)], make_rank(1, "barrier"))
    assert only(j) == (FaultClass.SKIPPED_COLLECTIVE, (1,), (0, 2, 3))
    assert j.main.op == "all_reduce"
    assert "did not come to all_reduce at train.py:88" in j.main.summary


@pytest.mark.parametrize("culprit", [0, 1])
def test_of_two_ranks_the_one_outside_backward_left(make_rank: MakeRank, judged: Judged, culprit: int) -> None:
    j = judged(make_rank(1 - culprit, "backward"), make_rank(culprit, "barrier"))
    assert only(j) == (FaultClass.SKIPPED_COLLECTIVE, (culprit,), (1 - culprit,))
    assert j.main.confidence < 0.5


@pytest.mark.parametrize("place", ["early_barrier", "barrier"])
@pytest.mark.parametrize("culprit", [0, 1])
def test_of_two_ranks_the_one_alone_in_a_barrier_left(
    make_rank: MakeRank, judged: Judged, culprit: int, place: str
) -> None:
    j = judged(make_rank(1 - culprit, "all_reduce"), make_rank(culprit, place))
    assert only(j) == (FaultClass.SKIPPED_COLLECTIVE, (culprit,), (1 - culprit,))
    assert j.main.op == "all_reduce"
    assert j.main.confidence < 0.5


@pytest.mark.parametrize(("step", "cls"), [(11, FaultClass.SKIPPED_COLLECTIVE), (9, FaultClass.EXTRA_COLLECTIVE)])
def test_rank_out_of_step_at_one_call_site(make_rank: MakeRank, judged: Judged, step: int, cls: FaultClass) -> None:
    j = judged(*[make_rank(r, "all_reduce") for r in (0, 2, 3)], make_rank(1, "all_reduce", step=step))
    assert only(j) == (cls, (1,), (0, 2, 3))


def test_all_at_one_place_blames_nobody_strongly(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(*[make_rank(r, "all_reduce") for r in range(4)])
    assert j.main.cls is FaultClass.IN_FLIGHT_NETWORK
    assert j.main.confidence <= 0.4


def test_overdue_outer_section_is_the_findings_not_the_young_inner_one(make_rank: MakeRank, judged: Judged) -> None:
    late = make_rank(1, "sleep", section="inner")
    late = replace(late, suspicion=Suspicion(1, "section", "outer", 90.0, 2.0, accepted=True))
    j = judged(make_rank(0, "all_reduce"), late)
    assert j.main.section == "outer"
    assert j.main.summary.endswith("(section outer, in it inner)")


def test_unrecognised_waits_fall_to_the_majority(make_rank: MakeRank, judged: Judged) -> None:
    ranks = [make_rank(r, "own", suspicion="no_progress", stack_unchanged=True) for r in (0, 2, 3)]
    j = judged(*ranks, make_rank(1, "sleep", suspicion="no_progress", stack_unchanged=True))
    assert j.main.ranks == (1,)


def test_of_two_unrecognised_the_lower_step_is_late(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "own", step=11, suspicion="section"), make_rank(1, "sleep", step=10, suspicion="section"))
    assert j.main.ranks == (1,)


def test_compiling_rank_is_named_as_compiling_with_low_confidence(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "all_reduce"), make_rank(1, "compile", stack_unchanged=True))
    assert j.main.ranks == (1,)
    assert "compiling" in j.main.summary
    assert j.main.confidence <= 0.3


def test_slow_rank_in_evaluation_is_late_but_moving(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "own", section="evaluation", stack_unchanged=False), make_rank(1, "barrier"))
    assert only(j) == (FaultClass.HOST_STALL, (0,), (1,))
    assert j.main.confidence <= 0.4


def test_finished_rank_that_does_not_end_is_a_teardown_hang(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, code=0), make_rank(1, "atexit", finished=True, suspicion="teardown"))
    assert only(j) == (FaultClass.TEARDOWN_HANG, (1,), ())


def test_thread_that_keeps_the_interpreter_is_a_teardown_hang(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, code=0), make_rank(1, "shutdown"))
    assert only(j)[:2] == (FaultClass.TEARDOWN_HANG, (1,))


def test_rank_still_at_work_on_its_end_is_not_blamed_beside_a_stuck_one(make_rank: MakeRank, judged: Judged) -> None:
    slow = make_rank(0, state="R", finished=True, suspicion="teardown")
    stuck = make_rank(1, "atexit", finished=True)
    assert only(judged(slow, stuck))[:2] == (FaultClass.TEARDOWN_HANG, (1,))
    alone = judged(slow, make_rank(1, code=0)).main
    assert (alone.cls, alone.ranks) == (FaultClass.TEARDOWN_HANG, (0,))
    assert alone.confidence <= 0.4
    assert "still at work" in alone.summary


def test_rank_in_teardown_is_not_blamed_while_another_is_stuck(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "shutdown", finished=True), make_rank(1, "sleep"), make_rank(2, "barrier"))
    assert only(j)[:2] == (FaultClass.HOST_STALL, (1,))


def test_rank_that_ended_early_left_the_others_waiting(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(1, code=0), *[make_rank(r, "all_reduce") for r in (0, 2, 3)])
    assert only(j) == (FaultClass.SKIPPED_COLLECTIVE, (1,), (0, 2, 3))
    assert "rank 1 has ended already" in j.main.summary


def test_last_rank_that_waits_for_those_who_ended_is_a_teardown_hang(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(1, "barrier"), *[make_rank(r, code=0) for r in (0, 2, 3)])
    assert only(j)[:2] == (FaultClass.TEARDOWN_HANG, (1,))


def test_rank_that_never_reported_is_a_start_up_fault(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(
        make_rank(0, "rendezvous", step=None),
        make_rank(1, step=None, attached=False, suspicion="never_reported"),
        trigger="start_up",
    )
    assert only(j) == (FaultClass.START_UP, (1,), (0,))


def test_all_in_rendezvous_is_a_start_up_fault(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(*[make_rank(r, "rendezvous", step=None) for r in range(2)], world_size=4, trigger="start_up")
    assert only(j) == (FaultClass.START_UP, (2, 3), (0, 1))


def test_single_rank_job_blames_its_rank(make_rank: MakeRank, judged: Judged) -> None:
    assert only(judged(make_rank(0, "own", stack_unchanged=True))) == (FaultClass.HOST_STALL, (0,), ())


# -- triggers and limits -----------------------------------------------------------------------------------------------
def test_preempted_job_has_no_culprit(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "own"), trigger="preempted")
    assert j.main.cls is FaultClass.PREEMPTED
    assert j.victims == ()


def test_lost_node_is_named_by_its_ranks(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "all_reduce"), make_rank(1, "all_reduce"), world_size=4, trigger="node_lost")
    assert only(j) == (FaultClass.DEAD_NODE, (2, 3), (0, 1))


def test_real_death_outranks_a_lost_node(make_rank: MakeRank, judged: Judged) -> None:
    j = judged(make_rank(0, "backward"), make_rank(1, signal=11), world_size=4, trigger="node_lost")
    assert j.main.cls is FaultClass.DEAD_PROCESS


def test_no_evidence_says_so(judged: Judged) -> None:
    assert judged(world_size=0).main.cls is FaultClass.INSUFFICIENT_DATA
    assert judged(world_size=2).main.ranks == (0, 1)


def test_all_ended_well_is_healthy(make_rank: MakeRank, judged: Judged) -> None:
    assert judged(make_rank(0, code=0), make_rank(1, code=0)).main.cls is FaultClass.HEALTHY


def test_verdict_record_has_the_fixed_fields(
    make_rank: MakeRank, judged: Judged, make_evidence: Callable[..., Evidence]
) -> None:
    ranks = (make_rank(0, "backward"), make_rank(1, signal=9, oom=False))
    verdict = judged(*ranks, trigger="exit").verdict(
        make_evidence(*ranks, trigger="exit"),
        incident=3,
        mode=Mode.ACT,
        action=Action.RESTART,
        reason="restart 1 of 3",
        detected_at_unix_s=5101.0,
        detection_delay_s=0.1,
    )
    data = verdict.to_json()
    assert data["schema"] == "steadyrun.verdict/1"
    assert data["findings"][0]["class"] == "dead_process"
    assert data["findings"][0]["evidence"] == ["incidents/0001/rank_1.stacks.txt"]
    assert data["victims"] == [0]
    assert data["details"]["places"].startswith("rank 0 is in backward")


def test_any_evidence_gets_a_judgement(make_rank: MakeRank, judged: Judged) -> None:
    """Random evidence never breaks the judge; nobody is both culprit and victim; no SIGKILL is overlooked."""
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    places = [None, "all_reduce", "barrier", "backward", "own", "loader", "save", "rendezvous", "shutdown", "compile"]
    for _ in range(40):
        ranks = []
        for r in range(rng.randint(1, 6)):
            kind = rng.choice(["alive", "alive", "alive", "stopped", "ended", "killed", "raised", "peer"])
            ranks.append(
                make_rank(
                    r,
                    rng.choice(places),
                    step=rng.choice([None, 3, 4]),
                    state="T" if kind == "stopped" else rng.choice("RSD"),
                    code={"ended": 0, "raised": 1, "peer": 1}.get(kind),
                    signal=9 if kind == "killed" else None,
                    raised={"raised": ("ValueError", "x"), "peer": PEER_GONE}.get(kind),
                    suspicion=rng.choice([None, "section", "teardown", "no_progress"]),
                    stack_unchanged=rng.choice([None, True, False]),
                    cpu_share=rng.choice([None, 0.0, 1.0]),
                )
            )
        j = judged(*ranks, world_size=len(ranks) + rng.randint(0, 2), trigger=rng.choice(["hang", "exit", "stopped"]))
        blamed = {r for f in j.findings for r in f.ranks}
        assert not blamed & set(j.victims)
        assert all(0.0 <= f.confidence <= 1.0 and f.summary for f in j.findings)
        dead = {r.rank for r in ranks if r.exit is not None and (r.exit.signal == 9)}
        assert dead <= blamed
