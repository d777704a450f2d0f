"""Wall time by phase: every second once, to the right phase, and never taken back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.core.timing import TAG_COMPILE
from steadyrun.node.goodput import Goodput, StepSpan


def running(steps: int = 20, step_s: float = 0.5) -> tuple[Goodput, float]:
    """A job that began at 100 s, took 10 s to its first step at 110 s and has done *steps* more."""
    goodput = Goodput(100.0)
    goodput.attempt_started(104.0)
    goodput.first_step(110.0, 1, True)
    for i in range(1, steps + 1):
        goodput.step(StepSpan(1 + i, 110.0 + i * step_s))
    return goodput, 110.0 + steps * step_s


def test_start_and_training_go_to_their_phases() -> None:
    goodput, now_s = running()
    assert now_s == 120.0
    assert goodput.seconds["initialization"] == 4.0
    assert goodput.seconds["startup"] == 6.0
    assert goodput.seconds["productive"] == pytest.approx(10.0)
    assert goodput.open_s(120.3) == pytest.approx(0.3)
    assert goodput.ratio(125.0) == pytest.approx(10.0 / 25.0)


def test_what_a_step_waited_for_is_not_productive() -> None:
    goodput, now_s = running()
    goodput.step(StepSpan(22, now_s + 4.0, data_s=0.2, checkpoint_s=1.0, evaluation_s=2.5))
    assert goodput.seconds["checkpoint_save"] == 1.0
    assert goodput.seconds["evaluation"] == 2.5
    assert goodput.seconds["data_loading"] == 0.2
    assert goodput.seconds["productive"] == pytest.approx(10.3)


def test_goodput_falls_during_a_hang_and_the_hang_is_credited_when_it_is_found() -> None:
    goodput, now_s = running()
    before = goodput.ratio(now_s)
    goodput.tick(now_s + 30.0)
    assert goodput.ratio(now_s + 30.0) < before / 2
    assert goodput.seconds["hang"] == 0.0
    goodput.hang_found(now_s + 30.0)
    goodput.tick(now_s + 32.0)
    goodput.attempt_over(now_s + 33.0, by_hang=True)
    goodput.attempt_started(now_s + 35.0)
    goodput.first_step(now_s + 36.0, 15, True)
    assert goodput.seconds["hang"] == 33.0
    assert goodput.seconds["recovery"] == 2.0
    assert goodput.seconds["startup"] == 7.0
    assert goodput.steps_lost == 7  # 15 to 21


def test_steps_that_were_done_before_are_rework() -> None:
    goodput, now_s = running()
    goodput.attempt_over(now_s + 0.4, by_hang=False)
    goodput.attempt_started(now_s + 1.0)
    goodput.first_step(now_s + 2.0, 19, True)
    for i, step in enumerate((20, 21, 22), start=1):
        goodput.step(StepSpan(step, now_s + 2.0 + i))
    assert goodput.seconds["rework"] == 2.0
    assert goodput.seconds["productive"] == pytest.approx(11.0)
    assert goodput.seconds["recovery"] == pytest.approx(1.0)


def test_steps_without_global_numbers_are_never_rework() -> None:
    goodput, now_s = running()
    goodput.attempt_over(now_s, by_hang=False)
    goodput.attempt_started(now_s)
    goodput.first_step(now_s, 1, False)
    goodput.step(StepSpan(2, now_s + 1.0))
    assert (goodput.seconds["rework"], goodput.steps_lost) == (0.0, 0)


def test_a_stall_that_was_survived_is_no_work_but_a_compilation_is() -> None:
    goodput, now_s = running()
    goodput.step(StepSpan(22, now_s + 30.5))
    assert goodput.seconds["hang"] == pytest.approx(30.0)
    goodput.step(StepSpan(23, now_s + 60.5, flags=TAG_COMPILE))
    assert goodput.seconds["hang"] == pytest.approx(30.0)


def test_a_hang_that_ends_by_itself_goes_on_with_training() -> None:
    goodput, now_s = running()
    goodput.hang_found(now_s + 10.0)
    goodput.step(StepSpan(22, now_s + 12.0))
    goodput.step(StepSpan(23, now_s + 12.5))
    assert goodput.seconds["hang"] == 12.0
    assert goodput.seconds["productive"] == pytest.approx(10.5)


def test_loading_a_checkpoint_is_its_own_phase() -> None:
    goodput = Goodput(0.0)
    goodput.attempt_started(1.0)
    goodput.restore_began(3.0)
    goodput.restore_ended(5.0)
    goodput.first_step(6.0, 100, True)
    assert (goodput.seconds["startup"], goodput.seconds["checkpoint_restore"]) == (3.0, 2.0)


MOVES = st.lists(
    st.tuples(
        st.sampled_from(
            ["start", "restore", "loaded", "first", "step", "hang", "over", "tick", "ended"],
        ),
        st.floats(-2.0, 30.0),
    ),
    max_size=60,
)


@given(MOVES)
@settings(max_examples=150, deadline=None)
def test_phases_only_grow_and_add_up_to_the_wall_time(moves: list[tuple[str, float]]) -> None:
    goodput, now_s = Goodput(50.0), 50.0
    before = dict(goodput.seconds)
    for step, (move, by_s) in enumerate(moves, start=1):
        at_s = now_s + by_s  # news may come late
        now_s = max(now_s, at_s)
        match move:
            case "start":
                goodput.attempt_started(at_s)
            case "restore":
                goodput.restore_began(at_s)
            case "loaded":
                goodput.restore_ended(at_s)
            case "first":
                goodput.first_step(at_s, step // 2, True)
            case "step":
                goodput.step(StepSpan(step, at_s, 0.1, 0.2, 0.3))
            case "hang":
                goodput.hang_found(at_s)
            case "over":
                goodput.attempt_over(at_s, by_hang=step % 2 == 0)
            case "ended":
                goodput.ended(at_s)
            case _:
                goodput.tick(at_s)
        assert all(goodput.seconds[p] >= before[p] - 1e-9 for p in before)
        before = dict(goodput.seconds)
        total = sum(goodput.seconds.values()) + goodput.open_s(now_s)
        assert total == pytest.approx(goodput.wall_s(now_s))
        if move != "ended" and "ended" not in {m for m, _ in moves}:
            assert goodput.wall_s(now_s) == pytest.approx(now_s - 50.0)
