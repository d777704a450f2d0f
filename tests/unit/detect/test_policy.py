"""Every row of the policy's table, and the two budgets."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrun.core.classes import EXIT_OF_CLASS, Action, ExitClass, FaultClass, Mode
from steadyrun.core.records import Evidence, Finding, RankEvidence
from steadyrun.detect.faulttable import FaultKind
from steadyrun.detect.policy import (
    TABLE,
    AttemptOutcome,
    History,
    Policy,
    PolicyLimits,
    Ruling,
    Situation,
    outcome_of,
)

F = FaultClass
HANGS = sorted(
    {f for f in F if f not in (F.PROGRAM_ERROR, F.OUT_OF_MEMORY, F.DEAD_PROCESS, F.DEAD_NODE, F.PREEMPTED, F.HEALTHY)}
)


def finding(cls: FaultClass) -> Finding:
    return Finding(cls, (1,), "made", 0.9)


def history(*steps: int | None, cls: FaultClass = F.DEAD_PROCESS, same: bool = False) -> History:
    """Attempts that came to these (global) steps."""
    tracebacks = [(("h", 7),) if same else () for _ in steps]
    return History(
        tuple(AttemptOutcome(i, s, True, 0, t, cls) for i, (s, t) in enumerate(zip(steps, tracebacks, strict=True)))
    )


def decide(
    cls: FaultClass,
    attempts: History,
    mode: Mode = Mode.ACT,
    trigger: str = "exit",
    max_restarts: int | None = None,
    **limits: float,
) -> Ruling:
    policy = Policy(PolicyLimits(max_restarts=max_restarts, **limits), random.Random(1))  # type: ignore[arg-type]
    return policy.decide([finding(cls)], attempts, mode, trigger)


def test_table_has_a_row_for_every_class() -> None:
    assert set(TABLE) == set(F)


@pytest.mark.parametrize("cls", list(F))
def test_first_incident_of_each_class_follows_its_row(cls: FaultClass) -> None:
    ruling = decide(cls, history(5, cls=cls), trigger="hang" if TABLE[cls].is_hang else "exit")
    assert ruling.action is TABLE[cls].action
    assert ruling.delay_s == 0.0
    assert ruling.exit_class is (EXIT_OF_CLASS[cls] if ruling.action is Action.STOP else ExitClass.OK)


@pytest.mark.parametrize("cls", HANGS)
def test_observe_mode_only_reports_a_hang(cls: FaultClass) -> None:
    ruling = decide(cls, history(5, cls=cls), Mode.OBSERVE, "hang")
    assert ruling.action is Action.REPORT
    if TABLE[cls].action is Action.RESTART:
        assert "act would restart the job" in ruling.reason


@pytest.mark.parametrize("cls", [F.PROGRAM_ERROR, F.DEAD_PROCESS, F.OUT_OF_MEMORY])
def test_observe_mode_restarts_after_a_death(cls: FaultClass) -> None:
    assert decide(cls, history(5, cls=cls), Mode.OBSERVE, "exit").action is Action.RESTART


def test_observe_mode_says_when_act_would_have_stopped() -> None:
    ruling = decide(F.HOST_STALL, history(5, cls=F.HOST_STALL), Mode.OBSERVE, "hang", max_restarts=0)
    assert ruling.action is Action.REPORT
    assert "act would stop the job" in ruling.reason


@pytest.mark.parametrize(
    ("earlier", "scripts_ended", "action"),
    [
        ((), True, Action.RESTART),
        ((F.TEARDOWN_HANG,), True, Action.STOP),
        ((F.TEARDOWN_HANG,), False, Action.RESTART),
        ((F.DEAD_PROCESS,), True, Action.RESTART),
    ],
)
def test_a_job_whose_scripts_ended_well_twice_is_done(
    earlier: tuple[FaultClass, ...], scripts_ended: bool, action: Action
) -> None:
    attempts = [AttemptOutcome(i, 9, True, 0, (), cls) for i, cls in enumerate((*earlier, F.TEARDOWN_HANG))]
    ruling = Policy().decide([finding(F.TEARDOWN_HANG)], History(tuple(attempts)), Mode.ACT, "hang", scripts_ended)
    assert ruling.action is action
    assert ruling.exit_class is ExitClass.OK


def test_no_findings_count_as_insufficient_data() -> None:
    assert Policy().decide([], history(5), Mode.ACT).action is TABLE[F.INSUFFICIENT_DATA].action


# -- an explicit number ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_explicit_number_is_obeyed_exactly(allowed: int) -> None:
    attempts = History()
    restarts = 0
    for attempt in range(10):
        attempts = attempts.with_outcome(AttemptOutcome(attempt, 100 * (attempt + 1), True, 0, (), F.DEAD_PROCESS))
        ruling = decide(F.DEAD_PROCESS, attempts, max_restarts=allowed)
        if ruling.action is Action.STOP:
            break
        restarts += 1
        assert ruling.restarts_left == allowed - restarts
    assert restarts == allowed
    assert ruling.exit_class is ExitClass.DEAD_PROCESS
    assert f"--max-restarts {allowed}" in ruling.reason


def test_explicit_number_is_not_cut_short_by_the_same_fault() -> None:
    attempts = history(7, 7, cls=F.PROGRAM_ERROR, same=True)
    assert decide(F.PROGRAM_ERROR, attempts, max_restarts=5).action is Action.RESTART


def test_change_of_membership_is_not_charged() -> None:
    attempts = history(5, 6, 7, cls=F.DEAD_NODE)
    assert attempts.restarts == 0
    assert decide(F.DEAD_NODE, attempts, max_restarts=1).action is Action.RESTART
    assert decide(F.DEAD_NODE, attempts, max_restarts=0).action is Action.RESTART
    charged = attempts.with_outcome(AttemptOutcome(3, 8, True, 0, (), F.DEAD_PROCESS))
    ruling = decide(F.DEAD_PROCESS, charged, max_restarts=1)
    assert (ruling.action, ruling.restarts_left) == (Action.RESTART, 0)


# -- progress ----------------------------------------------------------------------------------------------------------
def test_three_restarts_without_progress_then_stop() -> None:
    assert [decide(F.DEAD_PROCESS, history(*[5] * n)).action for n in (1, 2, 3, 4)] == [Action.RESTART] * 3 + [
        Action.STOP
    ]


def test_job_that_never_makes_a_step_gets_three_restarts_too() -> None:
    actions = [decide(F.START_UP, history(*[None] * n, cls=F.START_UP)).action for n in (1, 2, 3, 4)]
    assert actions == [Action.RESTART] * 3 + [Action.STOP]
    stop = decide(F.START_UP, history(*[None] * 4, cls=F.START_UP))
    assert stop.exit_class is ExitClass.START_UP
    assert "3 restarts without progress" in stop.reason


def test_a_newly_reached_step_refills_the_budget() -> None:
    assert history(5, 5, 5, 6).restarts_since_progress == 0
    assert decide(F.DEAD_PROCESS, history(5, 5, 5, 6, 6, 6)).action is Action.RESTART
    assert decide(F.DEAD_PROCESS, history(5, 5, 5, 6, 6, 6, 6)).action is Action.STOP


def test_a_lower_step_than_before_is_no_progress() -> None:
    assert history(9, 5).restarts_since_progress == 1
    assert history(9, 5, 8).restarts_since_progress == 2


def test_local_step_numbers_need_a_checkpoint_to_count() -> None:
    def local(checkpoints: int) -> History:
        return History(tuple(AttemptOutcome(i, 50, False, checkpoints if i else 0) for i in range(5)))

    assert local(0).restarts_since_progress == 4
    assert local(1).restarts_since_progress == 0


def test_same_traceback_at_the_same_step_twice_stops() -> None:
    ruling = decide(F.PROGRAM_ERROR, history(7, 9, cls=F.PROGRAM_ERROR, same=True))
    assert ruling.action is Action.STOP
    assert ruling.exit_class is ExitClass.PROGRAM_ERROR
    assert ruling.reason == "program_error: same traceback after step 7 twice"


def test_same_traceback_right_after_resuming_at_the_failing_step_stops() -> None:
    failed = [AttemptOutcome(0, 7, True, 1, (("h", 7),), F.PROGRAM_ERROR)]
    failed.append(AttemptOutcome(1, None, False, 0, (("h", None),), F.PROGRAM_ERROR))
    assert decide(F.PROGRAM_ERROR, History(tuple(failed))).action is Action.STOP


def test_same_traceback_at_another_step_is_tried_again() -> None:
    attempts = History(
        (
            AttemptOutcome(0, 7, True, 0, (("h", 7),), F.PROGRAM_ERROR),
            AttemptOutcome(1, 9, True, 0, (("h", 9),), F.PROGRAM_ERROR),
        )
    )
    assert decide(F.PROGRAM_ERROR, attempts).action is Action.RESTART


def test_same_traceback_does_not_stop_what_it_does_not_cause() -> None:
    assert decide(F.DEAD_PROCESS, history(7, 7, same=True)).action is Action.RESTART


def test_out_of_memory_again_without_progress_stops() -> None:
    assert decide(F.OUT_OF_MEMORY, history(5, cls=F.OUT_OF_MEMORY)).action is Action.RESTART
    assert decide(F.OUT_OF_MEMORY, history(5, 5, cls=F.OUT_OF_MEMORY)).action is Action.STOP
    assert decide(F.OUT_OF_MEMORY, history(5, 6, cls=F.OUT_OF_MEMORY)).action is Action.RESTART


# -- back-off ----------------------------------------------------------------------------------------------------------
def test_back_off_is_zero_after_progress_and_doubles_without() -> None:
    limits = PolicyLimits(without_progress=10, back_off_s=1.0, back_off_max_s=5.0)
    for used, full_s in ((0, 0.0), (1, 1.0), (2, 2.0), (3, 4.0), (4, 5.0), (9, 5.0)):
        policy = Policy(limits, random.Random(used))
        delay_s = policy.decide([finding(F.DEAD_PROCESS)], history(*[5] * (used + 1)), Mode.ACT).delay_s
        assert full_s / 2 <= delay_s <= full_s


def test_back_off_spreads_jobs() -> None:
    delays = {
        Policy(PolicyLimits(), random.Random(s)).decide([finding(F.DEAD_PROCESS)], history(5, 5), Mode.ACT).delay_s
        for s in range(20)
    }
    assert len(delays) > 10


@pytest.mark.parametrize(
    "wrong",
    [{"max_restarts": -1}, {"without_progress": -1}, {"back_off_s": -1.0}, {"back_off_s": 5.0, "back_off_max_s": 1.0}],
)
def test_wrong_limits_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PolicyLimits(**wrong)  # type: ignore[arg-type]


# -- the outcome of an attempt -----------------------------------------------------------------------------------------
def test_outcome_keeps_tracebacks_of_the_blamed_only(
    make_rank: Callable[..., RankEvidence], make_evidence: Callable[..., Evidence]
) -> None:
    evidence = make_evidence(
        make_rank(0, raised=("RuntimeError", "Connection closed by peer"), traceback_hash="victim", code=1),
        make_rank(1, raised=("ValueError", "x"), traceback_hash="culprit", code=1, step=12),
        trigger="exit",
    )
    outcome = outcome_of(
        evidence,
        [Finding(F.PROGRAM_ERROR, (1,), "made", 0.9)],
        highest_step=12,
        step_is_global=True,
        checkpoints_done=2,
    )
    assert outcome == AttemptOutcome(0, 12, True, 2, (("culprit", 12),), F.PROGRAM_ERROR, ranks=(1,))


# -- an older checkpoint -----------------------------------------------------------------------------------------------
def decide_with_older(attempts: History, max_restarts: int | None = None) -> Ruling:
    policy = Policy(PolicyLimits(max_restarts=max_restarts), random.Random(1))
    return policy.decide([finding(F.PROGRAM_ERROR)], attempts, Mode.ACT, has_older=True)


def test_the_same_fault_twice_is_tried_once_more_from_an_older_checkpoint() -> None:
    ruling = decide_with_older(history(7, 7, cls=F.PROGRAM_ERROR, same=True))
    assert (ruling.action, ruling.falls_back) == (Action.RESTART, True)
    assert "older checkpoint" in ruling.reason


def test_the_same_fault_from_an_older_checkpoint_too_is_the_program() -> None:
    ruling = decide_with_older(history(7, 7, 7, cls=F.PROGRAM_ERROR, same=True))
    assert (ruling.action, ruling.falls_back) == (Action.STOP, False)


def test_a_first_fault_takes_no_older_checkpoint() -> None:
    ruling = decide_with_older(history(7, cls=F.PROGRAM_ERROR, same=True))
    assert (ruling.action, ruling.falls_back) == (Action.RESTART, False)


def test_a_number_of_restarts_is_obeyed_whatever_checkpoints_there_are() -> None:
    ruling = decide_with_older(history(7, 7, cls=F.PROGRAM_ERROR, same=True), max_restarts=1)
    assert (ruling.action, ruling.falls_back) == (Action.STOP, False)


# -- progress is what a checkpoint keeps -------------------------------------------------------------------------------
def saving(*reached: tuple[int, int | None], lived_s: float = 3600.0) -> History:
    """Attempts that came to a step and saved one (None: saved nothing), all failing by the same kind of fault."""
    return History(
        tuple(
            AttemptOutcome(i, step, True, int(saved is not None), (), F.DEAD_PROCESS, None, saved, lived_s=lived_s)
            for i, (step, saved) in enumerate(reached)
        )
    )


def test_new_steps_without_a_new_checkpoint_are_no_progress_once_checkpoints_are_known() -> None:
    lost = saving((55, 50), (58, None), (61, None), (64, None))
    assert lost.restarts_since_progress == 3
    ruling = decide(F.DEAD_PROCESS, lost)
    assert (ruling.action, ruling.reason) == (Action.STOP, "dead_process: 3 restarts without progress")


def test_a_newer_checkpoint_refills_the_budget_whatever_step_was_reached_before() -> None:
    attempts = saving((99, 50), (80, None), (80, None), (70, 60))
    assert attempts.restarts_since_progress == 0
    assert decide(F.DEAD_PROCESS, attempts).action is Action.RESTART


def test_the_same_checkpoint_again_is_no_progress() -> None:
    assert saving((55, 50), (55, 50), (60, 40)).restarts_since_progress == 2


def test_before_the_first_checkpoint_steps_count() -> None:
    assert saving((5, None), (6, None), (6, None)).restarts_since_progress == 1
    assert saving((5, None), (6, None), (6, 4)).restarts_since_progress == 0


@st.composite
def runs(draw: st.DrawFn) -> History:
    """Any sequence of attempts: with and without steps, checkpoints and nodes that were left out."""
    number = st.one_of(st.none(), st.integers(0, 9))
    attempts = [
        AttemptOutcome(
            attempt=i,
            highest_step=draw(number),
            step_is_global=draw(st.booleans()),
            checkpoints_done=draw(st.integers(0, 2)),
            cls=F.DEAD_PROCESS,
            checkpoint_step=draw(number),
            nodes=draw(st.sampled_from([(), ("a",), ("a", "b"), ("b",)])),
            lived_s=draw(st.sampled_from([None, 5.0, 5000.0])),
            without=draw(st.sampled_from([(), (), ("c",)])),
        )
        for i in range(draw(st.integers(1, 12)))
    ]
    return History(tuple(attempts))


@given(attempts=runs(), budget=st.integers(0, 4), spares=st.integers(0, 2))
def test_the_budget_is_exactly_the_restarts_in_a_row_without_progress(
    attempts: History, budget: int, spares: int
) -> None:
    used = attempts.restarts_since_progress
    assert 0 <= used < len(attempts.attempts)
    newest = max((a.checkpoint_step for a in attempts.attempts if a.checkpoint_step is not None), default=None)
    if newest is not None and attempts.attempts[-1].checkpoint_step != newest:
        saved_last = max(i for i, a in enumerate(attempts.attempts) if a.checkpoint_step == newest)
        assert not any(attempts.made_progress(i) for i in range(saved_last + 1, len(attempts.attempts)))
    policy = Policy(PolicyLimits(without_progress=budget), random.Random(1))
    ruling = policy.decide([finding(F.DEAD_PROCESS)], attempts, Mode.ACT, situation=Situation(spares=spares))
    if used < budget:
        assert ruling.action is Action.RESTART
    else:
        assert ruling.action in (Action.STOP, Action.RESTART_WITHOUT_NODE)
        assert spares or ruling.action is Action.STOP


@given(attempts=runs(), step=st.integers(10, 20))
def test_a_checkpoint_beyond_all_others_always_refills_the_budget(attempts: History, step: int) -> None:
    after = attempts.with_outcome(AttemptOutcome(99, None, True, 1, (), F.DEAD_PROCESS, None, step))
    assert after.restarts_since_progress == 0


# -- when the budget is used up ----------------------------------------------------------------------------------------
def blaming(*nodes: str, cls: FaultClass = F.DEAD_PROCESS, lived_s: float = 3600.0) -> History:
    return History(
        tuple(AttemptOutcome(i, 5, True, 0, (), cls, nodes=(n,), lived_s=lived_s) for i, n in enumerate(nodes))
    )


def decide_with(attempts: History, spares: int, cls: FaultClass = F.DEAD_PROCESS) -> Ruling:
    return Policy().decide([finding(cls)], attempts, Mode.ACT, situation=Situation(spares=spares))


def test_a_node_blamed_for_every_fruitless_attempt_is_left_out_before_the_job_is_given_up() -> None:
    ruling = decide_with(blaming("a", "a", "a", "a"), spares=1)
    assert (ruling.action, ruling.without) == (Action.RESTART_WITHOUT_NODE, ("a",))
    assert "each time blamed on node a" in ruling.reason


def test_the_job_without_the_node_has_a_budget_of_its_own() -> None:
    attempts = blaming("a", "a", "a", "a").leaving_out(["a"])
    for used in range(3):
        attempts = attempts.with_outcome(AttemptOutcome(4 + used, 5, True, 0, (), F.DEAD_PROCESS, nodes=("b",)))
        assert attempts.restarts_since_progress == used
        assert decide_with(attempts, spares=0).action is Action.RESTART
    attempts = attempts.with_outcome(AttemptOutcome(7, 5, True, 0, (), F.DEAD_PROCESS, nodes=("b",), lived_s=3600.0))
    assert decide_with(attempts, spares=0).action is Action.STOP


def test_without_a_spare_the_job_stops_and_the_node_is_to_be_tested() -> None:
    ruling = decide_with(blaming("a", "a", "a", "a"), spares=0)
    assert ruling.action is Action.STOP
    assert ruling.exit_class is ExitClass.DEAD_PROCESS
    assert "each time blamed on node a" in ruling.reason
    assert ["pairs" in text for text in ruling.advice] == [True]


@pytest.mark.parametrize(
    ("attempts", "cls"),
    [
        (blaming("a", "b", "a", "a"), F.DEAD_PROCESS),
        (blaming("a", "a", "a", "a", cls=F.PROGRAM_ERROR), F.PROGRAM_ERROR),
        (blaming("a", "a", "a", "a", lived_s=599.0), F.DEAD_PROCESS),
    ],
    ids=["other nodes too", "program", "soon after each start"],
)
def test_no_node_is_left_out_for_what_is_not_its_own(attempts: History, cls: FaultClass) -> None:
    ruling = decide_with(attempts, 2, cls)
    assert (ruling.action, ruling.without, ruling.advice) == (Action.STOP, (), ())


def test_a_crash_loop_right_after_the_start_is_a_configuration() -> None:
    ruling = decide_with(blaming("a", "a", "a", "a", lived_s=599.0), 2)
    assert "within 10 minutes of its start: look at the configuration" in ruling.reason
    assert "configuration" not in decide_with(blaming("a", "b", "a", "a"), 2).reason


def test_observe_mode_says_that_act_would_leave_a_node_out() -> None:
    attempts = blaming("a", "a", "a", "a", cls=F.HOST_STALL)
    ruling = Policy().decide([finding(F.HOST_STALL)], attempts, Mode.OBSERVE, "hang", situation=Situation(spares=1))
    assert (ruling.action, ruling.reason) == (Action.REPORT, "observe mode: act would restart the job without a")


def test_an_explicit_number_of_restarts_is_no_reason_not_to_leave_a_node_out() -> None:
    attempts = History((AttemptOutcome(0, 5, True, 0, (), F.DEVICE_STALL, nodes=("a",)),))
    main = Finding(F.DEVICE_STALL, (1,), "made", 0.9, nodes=("a",))
    for allowed, action in ((1, Action.RESTART_WITHOUT_NODE), (0, Action.STOP)):
        policy = Policy(PolicyLimits(max_restarts=allowed))
        ruling = policy.decide([main], attempts, Mode.ACT, kind=FaultKind.DEVICE_LOST, situation=Situation(spares=1))
        assert ruling.action is action
