"""Limits that follow what is seen: of which sections, when they are made anew, and how short they may become."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steadyrun.core.sections import CHECKPOINTING, OUT_OF_SECTION, SETUP, STEP
from steadyrun.detect.calibrate import Costs, SectionKey, SectionStatistics, limits_of
from steadyrun.detect.calibrate.following import (
    LEAST_HARD_S,
    LEAST_SOFT_S,
    ONCE_A_START,
    Follower,
    costs_for,
    has_grown,
    is_marked,
    not_too_short,
)
from steadyrun.detect.calibrate.rule import MIN_EVENTS, MIN_UNMARKED_EVENTS


def seen(section: str, n: int, seconds: float = 1.0) -> SectionStatistics:
    s = SectionStatistics.empty(SectionKey(section, 2))
    for i in range(n):
        s.observe(seconds * (1 + i % 3 / 100))
    return s


@pytest.mark.parametrize(
    ("section", "others", "has_own_step", "expected"),
    [
        (STEP, set(), False, False),
        (OUT_OF_SECTION, {CHECKPOINTING}, False, False),  # saves are known without the script's help
        (STEP, {"Validate"}, False, True),
        (OUT_OF_SECTION, {"evaluation"}, True, True),
        (STEP, set(), True, True),
        (OUT_OF_SECTION, set(), True, False),
        ("load", set(), False, True),
    ],
)
def test_gaps_are_marked_where_evaluations_are(
    section: str, others: set[str], has_own_step: bool, expected: bool
) -> None:
    assert is_marked(section, others | {section}, has_own_step) is expected


def test_what_is_not_marked_needs_a_thousand_passes() -> None:
    assert costs_for(Costs(), True) == Costs()
    assert costs_for(Costs(), False).min_events == MIN_UNMARKED_EVENTS
    assert costs_for(Costs(min_events=5000), False).min_events == 5000


def test_no_limit_is_too_short_to_be_applied() -> None:
    short = limits_of(seen("load", 1000, 0.001))
    assert short.soft_s < LEAST_SOFT_S
    assert short.hard_s < LEAST_HARD_S
    applied = not_too_short(short)
    assert (applied.soft_s, applied.hard_s) == (LEAST_SOFT_S, LEAST_HARD_S)
    assert applied.first_s >= applied.hard_s
    without_soft = replace(short, soft_s=short.hard_s)
    assert not_too_short(without_soft).soft_s <= LEAST_HARD_S
    long = limits_of(seen("load", 100, 60.0))
    assert not_too_short(long) == long


@pytest.mark.parametrize(
    ("n", "longest_s", "expected"), [(100, 2.0, False), (104, 2.0, False), (105, 2.0, True), (101, 2.1, True)]
)
def test_limits_are_made_anew_with_a_twentieth_more_or_a_longer_pass(
    n: float, longest_s: float, expected: bool
) -> None:
    assert has_grown(n, longest_s, 100, 2.0) is expected


def test_what_was_seen_too_seldom_has_no_limit() -> None:
    follower = Follower(Costs())
    assert follower.limits([seen("load", MIN_EVENTS - 1)], False) == {}
    (followed,) = follower.limits([seen("load", MIN_EVENTS)], False).values()
    assert followed.acts_on_time
    assert followed.limit.hard_s >= LEAST_HARD_S


def test_what_is_passed_once_a_start_may_have_none_for_long() -> None:
    statistics = SectionStatistics.empty(SectionKey(SETUP, 2))
    for _ in range(100):
        statistics.observe(30.0, is_first=True)
    assert SETUP in ONCE_A_START
    assert Follower(Costs()).limits([statistics], False) == {}


def test_the_time_between_steps_has_one_name() -> None:
    both = [seen(STEP, 2000), seen(OUT_OF_SECTION, 2000), seen("evaluation", 20)]
    assert set(Follower(Costs()).limits(both, False)) == {STEP, "evaluation"}
    assert set(Follower(Costs()).limits(both, True)) == {STEP, OUT_OF_SECTION, "evaluation"}


def test_time_alone_does_not_act_where_evaluations_are_not_marked() -> None:
    follower = Follower(Costs())
    assert not follower.limits([seen(STEP, 2000)], False)[STEP].acts_on_time
    marked = follower.limits([seen(STEP, 2000), seen("evaluation", 20)], False)
    assert marked[STEP].acts_on_time


def test_limits_stay_until_there_is_news() -> None:
    follower, statistics = Follower(Costs()), seen("load", 100)
    first = follower.limits([statistics], False)["load"]
    statistics.observe(1.0)
    assert follower.limits([statistics], False)["load"] is first
    statistics.observe(40.0)
    second = follower.limits([statistics], False)["load"]
    assert second.limit.hard_s > first.limit.hard_s
    follower.costs = Costs(restart_s=5.0)
    assert follower.limits([statistics], False)["load"].limit.soft_s < second.limit.soft_s


def test_a_longer_pass_that_a_look_has_spared_is_news_that_leaves_the_soft_limit() -> None:
    follower, statistics = Follower(Costs()), seen("load", 100)
    first = follower.limits([statistics], False)["load"].limit
    statistics.observe(40.0, was_spared=True)
    second = follower.limits([statistics], False)["load"].limit
    assert second.soft_s <= first.soft_s * 1.1
    assert second.hard_s > first.hard_s
