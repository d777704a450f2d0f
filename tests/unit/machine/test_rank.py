"""The life of one rank."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest

from steadyrun.node.machine.events import RankPhase
from steadyrun.node.machine.rank import ALLOWED, STORY_LENGTH, InvalidTransition, RankMachine, Story


def rank_in(phase: RankPhase) -> RankMachine:
    rank = RankMachine(3, 1, 0, Story())
    rank.phase = phase
    return rank


@pytest.mark.parametrize(("old", "new"), list(product(RankPhase, RankPhase)))
def test_only_the_moves_of_the_table_are_possible(old: RankPhase, new: RankPhase) -> None:
    rank = rank_in(old)
    if new in ALLOWED[old]:
        rank.move(new, 1.0)
        assert rank.phase is new
    else:
        with pytest.raises(InvalidTransition):
            rank.move(new, 1.0)
        assert rank.phase is old


def test_every_phase_can_be_reached_from_standby_and_leads_to_the_end() -> None:
    reached, todo = {RankPhase.STANDBY}, [RankPhase.STANDBY]
    while todo:
        new = ALLOWED[todo.pop()] - reached
        reached |= new
        todo += new
    assert reached == set(RankPhase)
    assert [p for p, followers in ALLOWED.items() if not followers] == [RankPhase.EXITED]


def test_a_forbidden_move_tells_the_story() -> None:
    story = Story()
    story.add(1.0, "node: RankExited(rank=3, code=1)")
    rank = RankMachine(3, 1, 0, story)
    with pytest.raises(InvalidTransition, match="rank 3 cannot go from standby to running") as e:
        rank.move(RankPhase.RUNNING, 2.0)
    assert "RankExited(rank=3, code=1)" in str(e.value)


def test_the_story_is_bounded_and_keeps_the_newest() -> None:
    story = Story()
    for i in range(3 * STORY_LENGTH):
        story.add(float(i), f"event {i}")
    lines = story.lines()
    assert len(lines) == STORY_LENGTH
    assert lines[-1].endswith(f"event {3 * STORY_LENGTH - 1}")


def test_a_move_sets_the_deadline_of_the_new_phase_and_drops_the_old_one() -> None:
    rank = rank_in(RankPhase.RUNNING)
    rank.move(RankPhase.TERMINATING, 1.0, 6.0)
    assert rank.deadline_s == 6.0
    rank.move(RankPhase.EXITED, 2.0)
    assert rank.deadline_s == inf


def test_exit_zero_is_the_only_good_end() -> None:
    rank = rank_in(RankPhase.RUNNING)
    assert not rank.ended_well
    rank.code = 0
    rank.move(RankPhase.EXITED, 1.0)
    assert rank.ended_well
    assert not rank.is_alive
