"""Passes far longer than most that no look has met: one of them does not make the next hang wait for minutes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.detect.calibrate import Costs, SectionKey, SectionStatistics, limits_of
from steadyrun.detect.calibrate.histogram import Histogram
from steadyrun.detect.calibrate.rule import Looks

KEY = SectionKey("step", 2)
DAY_S = 86400.0


def seen(steps: int, step_s: float, strays_s: tuple[float, ...] = (), spread: float = 0.1) -> SectionStatistics:
    """Steps with noise, the strays evenly among them."""
    draw = random.Random(3)
    s = SectionStatistics.empty(KEY)
    left = list(strays_s)
    every = steps // (len(left) + 1)
    for i in range(1, steps + 1):
        s.observe(step_s * draw.lognormvariate(0, spread))
        if left and i % every == 0:
            s.observe(left.pop())
    return s


def soft_s(statistics: SectionStatistics) -> float:
    return limits_of(statistics).soft_s


@pytest.mark.parametrize("step_s", [0.03, 0.5, 1.0, 10.0])
@pytest.mark.parametrize("steps", [60, 250, 1000])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
def test_a_stall_just_too_short_for_a_look_does_not_price_the_next_hang_out(
    step_s: float, steps: int, share: float
) -> None:
    before_s = soft_s(seen(steps, step_s))
    assert soft_s(seen(steps, step_s, (share * before_s,))) <= 4 * before_s
    assert limits_of(seen(steps, step_s, (share * before_s,))).hard_s >= 1.5 * share * before_s


@pytest.mark.parametrize("stall_s", [2.0, 8.0, 30.0])
def test_a_stall_that_no_limit_was_there_for_does_not_either(stall_s: float) -> None:
    statistics = seen(100, 0.03, (stall_s,))
    assert soft_s(statistics) <= max(4 * stall_s, 2 * soft_s(seen(100, 0.03)))


def test_stalls_that_come_again_and_again_lengthen() -> None:
    """As soon as there are some: what is not rare must not be taken for a hang day after day."""
    limits_s = [soft_s(seen(1000, 0.5, (10.0,) * k)) for k in (0, 1, 4, 16)]
    assert limits_s == sorted(limits_s)
    assert limits_s[3] > 2 * limits_s[1] > 4 * limits_s[0]


def test_one_is_expected_a_few_times_a_day_and_many_as_they_came() -> None:
    few, many = Looks(seen(1000, 0.5, (10.0,))), Looks(seen(1000, 0.5, (10.0,) * 50))
    assert few.new_per_day(9.0) == pytest.approx(4.0, rel=0.2)
    observed = 50 * DAY_S / (1000 * 0.5 + 50 * 10.0)
    assert 0.5 * observed < many.new_per_day(9.0) < observed


def test_what_many_passes_are_is_no_stray() -> None:
    """Sequences of many lengths: their tail goes on as that of all."""
    statistics = seen(1000, 1.0, spread=0.4)
    looks = Looks(statistics)
    assert looks.tail.from_s == pytest.approx(statistics.durations.max_s, rel=0.05)


def test_strays_are_beyond_what_the_others_show() -> None:
    looks = Looks(seen(250, 1.0, (12.0,)))
    assert looks.tail.from_s < 1.5


def test_a_stray_that_has_faded_counts_less() -> None:
    s = SectionStatistics.empty(KEY, half_life_events=200.0)
    s.observe(20.0)
    at_n: list[float] = []
    for i in range(1, 601):
        s.observe(1.0 + (i % 10) / 50)
        if i in (100, 600):
            at_n.append(Looks(s).new_per_day(15.0))
    assert at_n[1] < 0.5 * at_n[0]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 1e3), st.booleans()), min_size=16, max_size=40),
    st.floats(1.0, 1e4),
)
def test_no_limit_costs_less_than_ours(passes: list[tuple[float, bool]], restart_s: float) -> None:
    s = SectionStatistics.empty(KEY)
    for seconds, was_spared in passes:
        s.observe(seconds, was_spared=was_spared)
    costs, looks = Costs(restart_s=restart_s), Looks(s)
    limit = limits_of(s, costs)

    def loss_s(at_s: float) -> float:
        return costs.evidence_sensitivity * costs.hangs_per_day * at_s + looks.lost_s_per_day(at_s, costs)

    least_s = max(2 * s.durations.median_s, 1e-3)
    others_s = [least_s * 1.1**i for i in range(180)]
    if limit.soft_s < limit.hard_s:
        assert loss_s(limit.soft_s) <= 1.05 * min(map(loss_s, others_s))
    else:
        assert loss_s(limit.hard_s) <= loss_s(0.9 * limit.hard_s) or limit.hard_s < 1.1 * least_s


def test_above_takes_whole_buckets() -> None:
    h = Histogram()
    for seconds in (1.0, 2.5, 9.0):
        h.add(seconds)
    assert h.above(2.0).total == 2
    assert h.above(9.0).total == 0
    assert h.above(0.5) == h
