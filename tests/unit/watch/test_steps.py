"""Steps, beats, stop requests and the end, as a reader of the board sees them."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from steadyrun.core import layout


def test_the_hooks_steps_count_from_zero(slot: Any) -> None:
    assert slot.view().step is None
    assert slot.marks.last_step() is None
    for expected in range(3):
        slot.marks.step_seen(None)
        assert slot.view().step == expected == slot.marks.last_step()
    view = slot.view()
    assert view.steps_done == 3
    assert not view.step_is_global
    assert view.first_step_s is not None
    assert view.step_at_s is not None
    assert view.first_step_s <= view.step_at_s


def test_the_hooks_steps_go_on_from_a_number_it_was_given(slot: Any) -> None:
    slot.marks.step_seen(41)
    slot.marks.step_seen(None)
    assert slot.view().step == 42


def test_the_hooks_steps_begin_where_the_checkpointer_resumed(slot: Any) -> None:
    slot.marks.resume_at(20)
    assert slot.view().step is None, "none is done yet"
    slot.marks.step_seen(3)  # what the optimizer's own state says counts less
    slot.marks.step_seen(None)
    view = slot.view()
    assert (view.step, view.steps_done, view.step_is_global) == (21, 2, True)
    slot.marks.resume_at(50)
    slot.marks.step_seen(None)
    assert slot.view().step == 22, "too late to have a say"


def test_explicit_steps_win_over_the_hook(slot: Any) -> None:
    slot.marks.step_seen(None)
    slot.marks.step(100)
    view = slot.view()
    assert (view.step, view.steps_done, view.step_is_global) == (100, 1, True)
    slot.marks.step_seen(None)
    view = slot.view()
    assert (view.step, view.steps_done, view.beats) == (100, 1, 1)
    slot.marks.step(101)
    assert slot.view().step == 101
    assert slot.marks.has_explicit_steps()


@pytest.mark.parametrize("odd", ["x", None, -1, math.inf, math.nan, object(), 1 << 70])
def test_a_step_that_is_no_number_is_a_beat(slot: Any, odd: Any) -> None:
    slot.marks.step(odd)
    view = slot.view()
    assert (view.step, view.beats) == (None, 1)


def test_step_times_are_those_between_steps(slot: Any) -> None:
    for i in range(layout.STEP_RING + 5):
        slot.marks.step(i)
    times, count, lost = slot.board.step_times_s(1, 0)
    assert count == layout.STEP_RING + 4
    assert (len(times), lost) == (layout.STEP_RING, 4)
    assert all(0 < t < 60 for t in times)


def test_beats_are_counted_with_their_time(slot: Any) -> None:
    slot.marks.beat()
    slot.marks.beat()
    view = slot.view()
    assert view.beats == 2
    assert view.beat_at_s is not None
    assert abs(view.beat_at_s - time.monotonic()) < 60


def test_should_stop_is_true_from_the_call_that_the_agent_names(slot: Any) -> None:
    words = slot.board.words
    assert not slot.view().uses_should_stop
    assert [slot.marks.should_stop() for _ in range(3)] == [False] * 3
    words[layout.H_STOP_REQUESTED] = 1
    assert slot.marks.should_stop() is False
    words[layout.H_STOP_AT_CALL] = 6
    assert [slot.marks.should_stop() for _ in range(3)] == [False, True, True]
    view = slot.view()
    assert (view.stop_calls, view.uses_should_stop) == (7, True)


def test_observers_are_called_at_the_first_the_third_and_each_step(slot: Any) -> None:
    seen: list[object] = []
    slot.marks.observe(
        first_step=lambda: seen.append("first"), third_step=lambda: seen.append("third"), each_step=seen.append
    )
    for i in range(4):
        slot.marks.step_seen(i + 10)
    assert seen == ["first", 10, 11, "third", 12, 13]


def test_the_late_observer_says_when_it_wants_to_be_called_again(slot: Any) -> None:
    calls: list[int] = []
    hour_ns = 3600 * 10**9

    def late(now_ns: int) -> int:
        calls.append(now_ns)
        return now_ns + hour_ns

    slot.marks.observe(late=late, late_from_ns=slot.marks.now_ns() + hour_ns)
    slot.marks.beat()
    assert calls == []
    slot.marks.observe(late=late, late_from_ns=0)
    slot.marks.beat()
    slot.marks.step(0)
    assert len(calls) == 1


def test_the_end_closes_setup_and_opens_teardown_once(slot: Any) -> None:
    slot.marks.finish()
    view = slot.view()
    assert view.finished_s is not None
    assert slot.names() == ["teardown"]
    slot.marks.finish()
    assert slot.names() == ["teardown"]
    assert slot.view().finished_s == view.finished_s


def test_flags_add_up(slot: Any) -> None:
    slot.marks.set_flag(layout.F_EXCEPTION)
    slot.marks.should_stop()
    view = slot.view()
    assert view.has_exception
    assert view.uses_should_stop
