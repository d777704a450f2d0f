"""Passes that a look at the ranks has spared: how they are kept, and that soft limits stay useful after them."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.detect.calibrate import Costs, SectionKey, SectionStatistics, limits_of
from steadyrun.detect.calibrate.candidates import Candidate, price_of
from steadyrun.detect.calibrate.histogram import Histogram
from steadyrun.detect.calibrate.rule import Looks

KEY = SectionKey("step", 2)


def seen(
    steps: int, step_s: float = 1.0, stalls: int = 0, stall_s: float = 12.0, spared: bool = True
) -> SectionStatistics:
    """Steps with noise, the stalls evenly among them."""
    draw = random.Random(3)
    s = SectionStatistics.empty(KEY)
    every = steps // (stalls + 1)
    for i in range(1, steps + 1):
        s.observe(step_s * draw.lognormvariate(0, 0.1))
        if stalls and i % every == 0 and i // every <= stalls:
            s.observe(stall_s, was_spared=spared)
    return s


# -- what is kept ------------------------------------------------------------------------------------------------------
def test_without_takes_out_what_was_counted_in_both() -> None:
    one, part = Histogram(), Histogram()
    for seconds in (1.0, 1.0, 9.0, 50.0):
        one.add(seconds)
    part.add(50.0)
    left = one.without(part)
    assert left.total == 3
    assert left.weight_above(20.0) == 0
    assert one.without(one).total == 0
    assert one.longest_s(0.5) == pytest.approx(50.0, rel=0.05)
    assert left.longest_s(0.5) == pytest.approx(9.0, rel=0.05)


def test_spared_passes_count_as_passes_too_and_are_told_apart() -> None:
    s = seen(60, stalls=2)
    assert (s.n, s.spared.total) == (62, 2)
    assert s.durations.max_s == 12.0
    assert s.longest_spared_s == pytest.approx(12.0, rel=0.05)
    assert s.longest_not_spared_s < 2.0


def test_a_first_pass_is_never_one_of_them() -> None:
    s = SectionStatistics.empty(KEY)
    s.observe(90.0, is_first=True, was_spared=True)
    assert s.spared.total == 0


def test_spared_passes_fade_with_the_others() -> None:
    """Whatever the number, none is left over as one that was not spared."""
    s = SectionStatistics.empty(KEY, half_life_events=1000.0)
    for i in range(5000):
        s.observe(30.0 if i % 10 == 0 else 1.0, was_spared=i % 10 == 0)
    assert s.spared.total == pytest.approx(0.1 * s.n, rel=0.05)
    assert s.longest_not_spared_s < 2.0
    older = s.aged(1000.0, 1000.0)
    assert older.spared.total == pytest.approx(s.spared.total / 2)
    assert older.longest_not_spared_s < 2.0
    assert s.aged(1e6, 1000.0).spared.total == 0


def test_merging_and_the_file_keep_them() -> None:
    one, two = seen(300, stalls=1), seen(300, stalls=2, stall_s=40.0)
    both = one.merged(two)
    assert both.spared.total == pytest.approx(3.0, rel=0.03)
    assert both.longest_not_spared_s < 2.0
    again = SectionStatistics.from_json(json.loads(json.dumps(both.to_json())))
    assert again.to_json() == both.to_json()
    assert again.longest_spared_s == pytest.approx(40.0, rel=0.05)


def test_a_file_from_before_they_were_kept_is_read() -> None:
    data = seen(100, stalls=1, spared=False).to_json()
    del data["spared"]
    assert SectionStatistics.from_json(data).spared.total == 0


# -- limits ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step_s", [0.03, 0.5, 1.0])
@pytest.mark.parametrize("steps", [100, 250, 1000])
def test_a_stall_that_was_spared_keeps_the_soft_limit_about_where_it_was(step_s: float, steps: int) -> None:
    before = limits_of(seen(steps, step_s)).soft_s
    after = limits_of(seen(steps, step_s, stalls=1)).soft_s
    unknown = limits_of(seen(steps, step_s, stalls=1, spared=False)).soft_s
    assert after <= 1.25 * max(before, 12.0)
    assert after < 0.6 * unknown


def test_time_alone_never_acts_within_what_was_spared() -> None:
    assert limits_of(seen(250, stalls=1)).hard_s >= 18.0


def test_stalls_that_come_again_and_again_are_not_looked_at_each_time() -> None:
    few, many = seen(1000, stalls=1, stall_s=40.0), seen(1000, stalls=100, stall_s=40.0)
    assert limits_of(few).soft_s < 20.0 < 40.0 < limits_of(many).soft_s


def test_an_evidence_that_errs_where_it_has_not_erred_lengthens() -> None:
    statistics = seen(250, stalls=1)
    trusting, wary = limits_of(statistics), limits_of(statistics, Costs(spared_error=0.02))
    assert wary.soft_s > trusting.soft_s


def test_looks_at_the_like_are_expected_by_the_clock() -> None:
    """One stall in the first seconds of fast steps is not thousands a day; one in an hour of them is what it was."""
    early, late = Looks(seen(250, 0.03, stalls=1)), Looks(seen(250, 60.0, stalls=1, stall_s=600.0))
    assert early.again_per_day(12.5) < 25.0
    assert late.again_per_day(620.0) < 86400.0 / (250 * 60.0)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.01, 1e3), st.booleans()), min_size=16, max_size=40),
    st.floats(1.0, 1e4),
)
def test_bounds_hold_whatever_was_spared(passes: list[tuple[float, bool]], restart_s: float) -> None:
    s = SectionStatistics.empty(KEY)
    for seconds, was_spared in passes:
        s.observe(seconds, was_spared=was_spared)
    limit = limits_of(s, Costs(restart_s=restart_s))
    assert 0 < limit.soft_s <= limit.hard_s
    assert limit.hard_s >= 1.5 * s.durations.max_s
    looks = Looks(s)
    at_s = [limit.soft_s * f for f in (0.5, 1.0, 1.01, 2.0, 20.0)]
    for rates in ([looks.new_per_day(t) for t in at_s], [looks.again_per_day(t) for t in at_s]):
        assert rates == sorted(rates, reverse=True)


def test_ours_is_the_cheapest_soft_limit_by_its_own_model() -> None:
    s = seen(250, stalls=3)
    limit = limits_of(s)
    ours = price_of(Candidate("ours", limit.hard_s, limit.soft_s), s, Costs())
    for factor in (0.6, 0.8, 1.25, 2.0, 5.0):
        other_s = max(2 * s.durations.median_s, factor * limit.soft_s)
        other = price_of(Candidate("other", limit.hard_s, other_s), s, Costs())
        assert ours.lost_s_per_day <= other.lost_s_per_day * 1.001
    assert ours.looks_per_day == pytest.approx(
        Looks(s).new_per_day(limit.soft_s) + Looks(s).again_per_day(limit.soft_s)
    )
