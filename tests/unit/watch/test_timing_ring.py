from __future__ import annotations

import dataclasses
import math
import struct
from typing import Any

import pytest

from steadyrun.core import layout
from steadyrun.core.timing import TAG_FORWARD_SEEN, StepTiming
from steadyrun.watch.slot import timing_writer

TIMING = StepTiming(
    12, 3.5, 0.5, 0.4, 0.1, 0.2, 0.05, 0.05, 0.01, 0.09, 0.45, 0.005, 4096.0, TAG_FORWARD_SEEN, 0.02, 0.04
)


def values(timing: StepTiming) -> tuple[float, ...]:
    return tuple(math.nan if v is None else v for v in dataclasses.astuple(timing))


def test_the_order_on_the_board_is_that_of_the_record() -> None:
    assert tuple(f.name for f in dataclasses.fields(StepTiming)) == layout.TIMING_FIELDS


def test_a_timing_is_read_as_it_was_written(slot: Any) -> None:
    put = timing_writer(slot.board.words, slot.base)
    bare = dataclasses.replace(TIMING, step=13, probe_s=None, work=None, group_wait_s=None)
    put(*values(TIMING))
    put(*values(bare))
    assert slot.board.timings(1, 0) == ([TIMING, bare], 2, 0)
    assert slot.board.timings(1, 1) == ([bare], 2, 0)
    assert slot.board.timings(1, 2) == ([], 2, 0)


def test_what_was_overwritten_unread_is_counted(slot: Any) -> None:
    put = timing_writer(slot.board.words, slot.base)
    for step in range(layout.TIMING_RING + 10):
        put(*values(dataclasses.replace(TIMING, step=step)))
    timings, seen, lost = slot.board.timings(1, 0)
    assert seen == layout.TIMING_RING + 10
    assert lost == 11, "the oldest of a full ring may be being overwritten"
    assert [t.step for t in timings] == list(range(11, layout.TIMING_RING + 10))


def test_a_ring_beside_leaves_the_rest_of_the_slot_alone(slot: Any) -> None:
    with slot.marks.section("load"):
        pass
    before = slot.board.words[slot.base : slot.base + layout.S_TIMING].tolist()
    put = timing_writer(slot.board.words, slot.base)
    for step in range(3 * layout.TIMING_RING):
        put(*values(dataclasses.replace(TIMING, step=step)))
    after = slot.board.words[slot.base : slot.base + layout.S_TIMING].tolist()
    before[layout.S_TIMING_COUNT] = after[layout.S_TIMING_COUNT]
    assert after == before
    assert slot.board.view(0) is None, "the slot beside is as it was"


def test_words_that_are_no_timing_are_left_out(slot: Any) -> None:
    put = timing_writer(slot.board.words, slot.base)
    put(*values(dataclasses.replace(TIMING, wall_s=math.inf)))
    put(*values(dataclasses.replace(TIMING, step=2)))
    timings, seen, lost = slot.board.timings(1, 0)
    assert ([t.step for t in timings], seen, lost) == ([2], 2, 0)


def test_too_few_values_are_an_error_of_ours(slot: Any) -> None:
    put = timing_writer(slot.board.words, slot.base)
    with pytest.raises(struct.error):
        put(1.0, 2.0)
    assert slot.board.timings(1, 0) == ([], 0, 0)
