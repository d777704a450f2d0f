"""The limits of least loss: what they rest on, their bounds, how they move."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.detect.calibrate import Basis, Costs, SectionKey, SectionStatistics, limits_of
from steadyrun.detect.calibrate.rule import MIN_UNMARKED_EVENTS, share_above, tail_of


def seen(durations: list[float], observed_s: float = 0.0) -> SectionStatistics:
    s = SectionStatistics.empty(SectionKey("step", 8))
    for d in durations:
        s.observe(d)
    s.observe_wall(observed_s)
    return s


def steps(n: int, step_s: float = 10.0, seed: int = 1) -> list[float]:
    """Noise of 3 %, one of a hundred 30 % longer."""
    draw = random.Random(seed)
    return [step_s * draw.lognormvariate(0, 0.03) * (1.3 if draw.random() < 0.01 else 1.0) for _ in range(n)]


def test_never_seen_is_the_cap() -> None:
    limit = limits_of(seen([]), Costs(cap_s=1234.0))
    assert (limit.soft_s, limit.hard_s, limit.basis) == (1234.0, 1234.0, Basis.NEVER_SEEN)


def test_fifteen_passes_are_too_few_and_sixteen_are_not() -> None:
    assert limits_of(seen(steps(15))).basis is Basis.TOO_FEW
    assert limits_of(seen(steps(15))).hard_s == Costs().cap_s
    assert limits_of(seen(steps(16))).basis is Basis.COST
    assert limits_of(seen(steps(16))).hard_s < Costs().cap_s


def test_sixteen_passes_over_two_runs_are_enough() -> None:
    both = seen(steps(8, seed=1)).merged(seen(steps(8, seed=2)))
    assert limits_of(both).basis is Basis.COST


def test_steps_without_sections_keep_the_cap_for_a_thousand_passes() -> None:
    costs = Costs(min_events=MIN_UNMARKED_EVENTS)
    assert limits_of(seen(steps(999)), costs).basis is Basis.TOO_FEW
    assert limits_of(seen(steps(1000)), costs).basis is Basis.COST


def test_passes_that_have_faded_count_as_too_few() -> None:
    assert limits_of(seen(steps(100)).aged(40_000)).basis is Basis.TOO_FEW


def test_the_cap_is_never_below_three_times_what_was_seen() -> None:
    assert limits_of(seen([900.0])).hard_s == pytest.approx(2700.0)


def test_hard_limit_is_where_the_model_loses_least() -> None:
    statistics, costs = seen(steps(100)), Costs(evidence_sensitivity=0.0)
    limit = limits_of(statistics, costs)
    tail = tail_of(statistics.durations)

    def lost_s(at_s: float) -> float:
        above = tail.share * math.pow(at_s / tail.from_s, -min(tail.alpha, 3.0))
        return at_s + statistics.events_per_day * costs.restart_s * above

    assert limit.basis is Basis.COST
    assert lost_s(limit.hard_s) < min(lost_s(0.95 * limit.hard_s), lost_s(1.05 * limit.hard_s))


def test_soft_limit_may_lie_below_what_was_seen_when_looks_are_rare_enough() -> None:
    limit = limits_of(seen([*steps(3000), 400.0]))
    assert limit.soft_s < 400.0
    assert limit.hard_s >= 600.0


def test_soft_limit_lies_above_what_is_often_seen() -> None:
    durations = steps(200)
    durations[::5] = [25.0] * 40
    assert limits_of(seen(durations)).soft_s > 25.0


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.floats(1e-3, 1e4), min_size=16, max_size=60),
    st.floats(0.01, 1e4),
    st.floats(0.001, 100),
    st.floats(0, 0.99),
)
def test_bounds_hold_whatever_was_seen(durations: list[float], restart_s: float, hangs: float, shown: float) -> None:
    statistics = seen(durations)
    limit = limits_of(statistics, Costs(restart_s=restart_s, hangs_per_day=hangs, evidence_sensitivity=shown))
    assert limit.hard_s >= 1.5 * max(durations)
    assert limit.hard_s >= 3 * statistics.durations.median_s
    assert 0 < limit.soft_s <= limit.hard_s <= limit.first_s
    if limit.soft_s < limit.hard_s:
        assert limit.soft_s >= 2 * statistics.durations.median_s * 0.999


def test_limits_shrink_with_experience_and_with_a_cheaper_restart() -> None:
    by_n = [limits_of(seen(steps(n))) for n in (16, 100, 1000)]
    assert by_n[0].hard_s > by_n[1].hard_s > by_n[2].hard_s
    assert by_n[0].soft_s > by_n[1].soft_s > by_n[2].soft_s
    cheap, dear = (limits_of(seen(steps(100)), Costs(restart_s=r)) for r in (5.0, 2000.0))
    assert cheap.soft_s < by_n[1].soft_s < dear.soft_s
    assert cheap.hard_s < by_n[1].hard_s < dear.hard_s


def test_frequent_hangs_shorten_and_rare_ones_lengthen() -> None:
    rare, often = (limits_of(seen(steps(100)), Costs(hangs_per_day=h)) for h in (0.1, 10.0))
    assert often.hard_s < rare.hard_s
    assert often.soft_s < rare.soft_s


def test_a_section_passed_rarely_is_judged_by_its_own_rate() -> None:
    often, rarely = seen(steps(100)), seen(steps(100), observed_s=100_000.0)
    assert limits_of(rarely).hard_s < limits_of(often).hard_s


def test_a_long_stall_lengthens_at_once() -> None:
    before, after = limits_of(seen(steps(100))), limits_of(seen([*steps(100), 300.0]))
    assert after.hard_s >= 450.0 > before.hard_s


def test_without_trust_in_evidence_there_is_no_soft_limit() -> None:
    limit = limits_of(seen(steps(100)), Costs(evidence_sensitivity=0.0))
    assert limit.soft_s == limit.hard_s


def test_cap_bounds_what_cost_chooses_but_not_what_was_seen() -> None:
    assert limits_of(seen(steps(100)), Costs(cap_s=60.0)).basis is Basis.CAP
    assert limits_of(seen(steps(100)), Costs(cap_s=60.0)).hard_s == 60.0
    assert limits_of(seen(steps(100)), Costs(cap_s=5.0)).hard_s > 10.0


def test_tail_is_drawn_to_its_prior_until_much_was_seen() -> None:
    draw = random.Random(6)
    few = tail_of(seen([draw.paretovariate(1.3) for _ in range(20)]).durations)
    many = tail_of(seen([draw.paretovariate(1.3) for _ in range(4000)]).durations)
    assert few.alpha == pytest.approx(2.5)
    assert many.alpha == pytest.approx(1.4, abs=0.25)


def test_share_above_never_rises_and_at_most_halves_where_the_tail_begins() -> None:
    durations = seen([*steps(300), 44.0]).durations
    tail = tail_of(durations)
    shares = [share_above(durations, tail, 44.0 * f) for f in (0.1, 0.5, 0.99, 0.9999, 1.0, 1.0001, 2.0, 10.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[3] < 2 * shares[5]


def test_first_pass_keeps_its_own_limit() -> None:
    s = seen(steps(100))
    assert limits_of(s).first_s == 900.0
    s.observe(400.0, is_first=True)
    assert limits_of(s).first_s == 1200.0


def test_first_passes_of_many_starts_get_a_limit_of_their_own() -> None:
    s = seen(steps(100), observed_s=50_000.0)
    for _ in range(16):
        s.observe(20.0, is_first=True)
    limit = limits_of(s)
    assert limit.hard_s <= limit.first_s < 900.0
    assert limit.first_s >= 60.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("restart_s", 0.0),
        ("hangs_per_day", math.inf),
        ("cap_s", -1.0),
        ("evidence_error", 1.5),
        ("evidence_sensitivity", 1.0),
        ("evidence_s", math.nan),
        ("min_events", 3),
    ],
)
def test_costs_name_what_is_wrong(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        Costs(**{field: value})  # type: ignore[arg-type]
