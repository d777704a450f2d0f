"""Logarithmic buckets: quantiles, tails, merging."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.detect.calibrate.histogram import BUCKETS_PER_OCTAVE, Histogram

WIDTH = 2 ** (1 / BUCKETS_PER_OCTAVE)
seconds = st.floats(min_value=1e-4, max_value=1e6)


def filled(durations: Sequence[float]) -> Histogram:
    h = Histogram()
    for d in durations:
        h.add(d)
    return h


@settings(max_examples=30, deadline=None)
@given(st.lists(seconds, min_size=1, max_size=60), st.floats(0, 1))
def test_quantile_is_within_a_bucket_of_the_true_one(durations: list[float], share: float) -> None:
    ordered = sorted(durations)
    true_s = ordered[max(0, math.ceil(share * len(ordered)) - 1)]
    assert true_s / WIDTH / 1.0001 <= filled(durations).quantile_s(share) <= true_s * WIDTH * 1.0001


@settings(max_examples=30, deadline=None)
@given(st.lists(seconds, max_size=40), st.lists(seconds, max_size=40))
def test_merging_is_counting_both(one: list[float], other: list[float]) -> None:
    assert filled(one).merged(filled(other)) == filled(one + other)


@settings(max_examples=30, deadline=None)
@given(st.lists(seconds, min_size=1, max_size=60), seconds)
def test_weight_above_counts_all_but_the_own_bucket_exactly(durations: list[float], limit_s: float) -> None:
    above = filled(durations).weight_above(limit_s)
    assert sum(d > limit_s * WIDTH for d in durations) - 1e-6 <= above
    assert above <= sum(d >= limit_s / WIDTH for d in durations) + 1e-6


@settings(max_examples=30, deadline=None)
@given(st.lists(seconds, max_size=40))
def test_json_gives_the_same_back(durations: list[float]) -> None:
    assert Histogram.from_json(filled(durations).to_json()) == filled(durations)


def test_log_excess_finds_the_exponent_of_a_pareto_tail() -> None:
    draw = random.Random(4)
    h = filled([draw.paretovariate(2.0) for _ in range(5000)])
    assert 1 / h.log_excess(300) == pytest.approx(2.0, rel=0.2)


def test_log_excess_is_that_of_the_single_values_where_buckets_are_far_apart() -> None:
    h = filled([1.0, 8.0, 64.0])
    expected = (math.log(8.0) + math.log(64.0)) / 2
    assert h.log_excess(2) == pytest.approx(expected, abs=math.log(WIDTH))


@pytest.mark.parametrize("count", [0, 3, 4])
def test_log_excess_needs_a_duration_before_those_it_looks_at(count: int) -> None:
    assert filled([1.0, 2.0, 4.0]).log_excess(count) == 0.0


def test_empty_has_no_quantile() -> None:
    assert math.isnan(Histogram().quantile_s(0.5))


def test_scaling_forgets_what_is_next_to_nothing() -> None:
    h = filled([1.0] * 1000 + [50.0])
    faded = h.scaled(1e-4)
    assert len(faded.buckets()) == 1
    assert faded.total == pytest.approx(0.1)


@pytest.mark.parametrize("duration", [-1.0, math.nan])
def test_what_is_no_duration_is_refused(duration: float) -> None:
    with pytest.raises(ValueError, match="at least 0 seconds"):
        Histogram().add(duration)


def test_no_time_and_endless_time_have_their_buckets() -> None:
    assert filled([0.0, math.inf]).total == 2


@pytest.mark.parametrize("data", [5, [[1]], [["a", 1]], [[1, -1.0]], [[1, math.inf]], [[10**9, 1.0]], None])
def test_foreign_json_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="histogram"):
        Histogram.from_json(data)
