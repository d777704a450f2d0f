"""When acting on somebody slow is worth what it costs: the costs as a run shows them, and each one only once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steadyrun.detect.straggler import ActCosts, Alarm, AlarmKind, Timing
from steadyrun.node.slowaction import UNMEASURED_S, CostMeter, SlowAction

RANK = Alarm(AlarmKind.RANK, (3,), step=117, first_step=100, slowdown=0.2, impact=0.1, node="b", peers=7)
NODE = Alarm(AlarmKind.NODE, (2, 3), step=120, first_step=100, slowdown=0.3, impact=0.2, node="b", peers=7)
COSTS = ActCosts(restart_s=20.0, since_checkpoint_s=80.0)


def lost(alarm: Alarm, lost_s: float) -> Alarm:
    return replace(alarm, lost_s=lost_s)


# -- costs -------------------------------------------------------------------------------------------------------------
def test_a_restart_costs_what_the_start_took() -> None:
    meter = CostMeter()
    meter.begin_attempt(100.0)
    assert meter.costs(103.0) == ActCosts(UNMEASURED_S, 0.0), "until this run has shown it"
    meter.see(False, 0, 110.0)
    meter.see(True, 0, 112.0)
    meter.see(True, 0, 200.0)
    assert meter.costs(200.0).restart_s == 12.0


def test_the_longest_start_of_a_run_counts() -> None:
    meter = CostMeter()
    for began_s, first_step_s in ((0.0, 30.0), (100.0, 105.0), (200.0, 240.0), (300.0, 301.0)):
        meter.begin_attempt(began_s)
        meter.see(True, 0, first_step_s)
    assert meter.costs(400.0).restart_s == 40.0


def test_without_a_checkpoint_all_since_the_first_step_would_be_lost() -> None:
    meter = CostMeter()
    meter.begin_attempt(0.0)
    meter.see(True, 0, 10.0)
    assert [meter.costs(t).since_checkpoint_s for t in (10.0, 70.0, 1000.0)] == [0.0, 60.0, 990.0]


def test_a_checkpoint_makes_acting_cheap_again() -> None:
    meter = CostMeter()
    meter.begin_attempt(0.0)
    meter.see(True, 0, 10.0)
    meter.see(True, 1, 300.0)
    meter.see(True, 1, 340.0)
    assert meter.costs(350.0) == ActCosts(10.0, 50.0)
    assert meter.checkpoints_done == 1


def test_an_attempt_counts_its_checkpoints_anew() -> None:
    meter = CostMeter()
    meter.begin_attempt(0.0)
    meter.see(True, 5, 100.0)
    meter.begin_attempt(200.0)
    assert meter.checkpoints_done == 0
    assert meter.costs(230.0).since_checkpoint_s == 0.0, "no step is done that could be lost"
    meter.see(True, 0, 240.0)
    meter.see(True, 1, 250.0)
    assert (meter.checkpoints_done, meter.costs(260.0).since_checkpoint_s) == (1, 10.0)


def test_steps_before_any_attempt_tell_nothing_of_a_start() -> None:
    meter = CostMeter()
    meter.see(True, 0, 50.0)
    assert meter.costs(60.0) == ActCosts(UNMEASURED_S, 0.0)


# -- choice ------------------------------------------------------------------------------------------------------------
def test_nothing_is_done_before_it_pays() -> None:
    choice = SlowAction()
    assert choice.choose([], COSTS, 0) is None
    assert choice.choose([lost(RANK, 49.0)], COSTS, 0) is None


def test_it_pays_once_the_loss_has_reached_the_cost() -> None:
    advice = SlowAction().choose([lost(RANK, 100.0)], COSTS, 0)
    assert advice is not None
    assert (advice.timing, advice.alarm.ranks) == (Timing.NOW, (3,))
    assert "100 s lost" in advice.reason


def test_at_half_the_cost_it_waits_for_the_next_checkpoint() -> None:
    choice = SlowAction()
    assert choice.choose([lost(RANK, 60.0)], COSTS, 4) is None
    assert choice.choose([lost(RANK, 62.0)], COSTS, 4) is None
    advice = choice.choose([lost(RANK, 64.0)], COSTS, 5)
    assert advice is not None
    assert advice.timing is Timing.AT_CHECKPOINT
    assert "right after a checkpoint acting costs 20 s" in advice.reason


def test_checkpoints_before_it_begins_to_pay_do_not_count() -> None:
    choice = SlowAction()
    assert choice.choose([lost(RANK, 10.0)], COSTS, 4) is None
    assert choice.choose([lost(RANK, 60.0)], COSTS, 5) is None
    assert choice.choose([lost(RANK, 70.0)], COSTS, 6) is not None


def test_the_same_is_acted_on_once_whatever_its_figures() -> None:
    choice = SlowAction()
    advice = choice.choose([lost(RANK, 500.0)], COSTS, 0)
    assert advice is not None
    choice.acted(advice.alarm)
    later = replace(RANK, lost_s=900.0, step=400, first_step=380, slowdown=0.5)
    assert choice.choose([later], COSTS, 0) is None
    choice.begin_attempt()
    assert choice.choose([later], COSTS, 0) is None
    assert choice.choose([replace(later, ranks=(4,))], COSTS, 0) is not None


def test_a_node_stays_the_same_node_when_more_of_its_ranks_are_slow() -> None:
    choice = SlowAction()
    choice.acted(NODE)
    assert choice.choose([lost(replace(NODE, ranks=(2, 3, 4)), 500.0)], COSTS, 0) is None
    assert choice.choose([lost(replace(NODE, node="c"), 500.0)], COSTS, 0) is not None


def test_who_was_acted_on_does_not_hide_who_is_slow_beside() -> None:
    choice = SlowAction()
    choice.acted(RANK)
    advice = choice.choose([lost(RANK, 500.0), lost(replace(RANK, ranks=(5,)), 200.0)], COSTS, 0)
    assert advice is not None
    assert advice.alarm.ranks == (5,)


@pytest.mark.parametrize("alarm", [replace(RANK, kind=AlarmKind.STAGE_IMBALANCE), replace(RANK, is_actionable=False)])
def test_what_no_restart_would_cure_is_left_alone(alarm: Alarm) -> None:
    assert SlowAction().choose([lost(alarm, 1e6)], COSTS, 0) is None
