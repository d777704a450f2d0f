"""Steps that come whole, in any order, twice, or with ranks missing: the same frame."""

from __future__ import annotations

import numpy as np
import pytest

from steadyrun.core.timing import StepTiming
from steadyrun.detect.straggler import StepAlignment, StepFrame, TimingBlock

RANKS = 4


def block(step: int, busy_s: dict[int, float]) -> TimingBlock:
    return TimingBlock.of_rows({r: [StepTiming(step, 0.0, 2.0, s, s, 0, 0, 0, 0, 0, s)] for r, s in busy_s.items()})


def frames(*blocks: TimingBlock, at_s: float = 0.0) -> list[StepFrame]:
    alignment = StepAlignment(RANKS)
    for one in blocks:
        alignment.add(one, 0.0)
    return alignment.ready(at_s)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_the_order_of_ranks_in_a_block_does_not_matter(order: tuple[int, ...]) -> None:
    [frame] = frames(block(7, {r: 1.0 + r for r in order}))
    assert frame.step == 7
    assert frame.busy_s.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert frame.details.group_wait_s is None, "nobody has told any"


@pytest.mark.parametrize("first", [(0, 1, 2, 3), (1, 0, 2, 3)])
def test_what_a_rank_tells_last_counts(first: tuple[int, ...]) -> None:
    [frame] = frames(block(7, dict.fromkeys(first, 1.0)), block(7, {2: 5.0}))
    assert frame.busy_s.tolist() == [1.0, 1.0, 5.0, 1.0]


def test_who_tells_nothing_is_missing_after_the_patience() -> None:
    parts = block(7, {0: 1.0, 3: 4.0}), block(7, {1: 2.0})
    assert frames(*parts) == []
    [frame] = frames(*parts, at_s=5.0)
    assert np.isnan(frame.busy_s).tolist() == [False, False, True, False]
    assert frame.details.wall_s is not None
    assert np.isnan(frame.details.wall_s[2])


@pytest.mark.parametrize("gap", [1, 5000])  # near to each other as a rule; far apart, no table of all between fits
def test_one_block_of_several_steps_and_nodes_gives_each_step_once_and_in_order(gap: int) -> None:
    told = {
        rank: [StepTiming(at * gap, 0.0, 2.0, 10.0 * at + rank, 0, 0, 0, 0, 0, 0, 0) for at in steps]
        for rank, steps in {2: (3, 4, 3), 0: (3, 4, 5), 3: (4, 3, 5), 1: (3, 4, 5)}.items()
    }
    found = frames(TimingBlock.of_rows(told), at_s=5.0)
    assert [f.step for f in found] == [3 * gap, 4 * gap, 5 * gap]
    assert [f.busy_s.tolist() for f in found[:2]] == [[30.0, 31.0, 32.0, 33.0], [40.0, 41.0, 42.0, 43.0]]
    assert np.isnan(found[2].busy_s).tolist() == [False, False, True, False]
