"""What other limits would cost."""

from __future__ import annotations

import math

import pytest

from steadyrun.detect.calibrate import Costs, SectionKey, SectionStatistics, limits_of
from steadyrun.detect.calibrate.candidates import Candidate, Price, candidates_of, price_of


def steps(n: int = 100, stalls: int = 0) -> SectionStatistics:
    s = SectionStatistics.empty(SectionKey("step", 8))
    for i in range(n):
        s.observe(10.0 + (i % 7) / 20)
    for _ in range(stalls):
        s.observe(45.0)
    return s


def prices(statistics: SectionStatistics, current: float | None = None) -> dict[str, Price]:
    limit = limits_of(statistics)
    return {c.name: price_of(c, statistics, Costs()) for c in candidates_of(statistics, limit, current)}


def test_others_stand_beside_ours() -> None:
    found = prices(steps(), current=300.0)
    assert list(found) == ["calibrated", "current", "5 x longest", "NCCL default", "gloo default"]
    assert found["5 x longest"].candidate.hard_s == pytest.approx(51.5)
    assert found["current"].detection_s == 300.0


def test_a_candidate_given_as_current_is_taken_as_it_is() -> None:
    mine = Candidate("timeouts.json", 300.0, 40.0)
    assert mine in candidates_of(steps(), limits_of(steps()), mine)


def test_ours_is_the_cheapest_by_its_own_model() -> None:
    found = prices(steps(), current=300.0)
    ours = found.pop("calibrated")
    assert ours.lost_s_per_day < min(p.lost_s_per_day for p in found.values())


def test_a_limit_below_what_was_seen_is_priced_by_counting() -> None:
    s = steps(96, stalls=4)
    price = price_of(Candidate("30 s", 30.0), s, Costs())
    share = 5 / 101  # four, and one more that is to be expected
    assert price.needless_per_30_days == pytest.approx(30 * s.events_per_day * share, rel=0.01)
    assert price.lost_s_per_day == pytest.approx(30.0 + s.events_per_day * share * 600.0, rel=0.01)


def test_evidence_halves_the_way_to_a_verdict_and_spares_restarts() -> None:
    s, costs = steps(96), Costs(evidence_error=0.02, evidence_sensitivity=0.5)
    alone, looked = (price_of(c, s, costs) for c in (Candidate("a", 30.0), Candidate("b", 400.0, 30.0)))
    assert looked.detection_s == pytest.approx(215.0)
    assert looked.looks_per_day == pytest.approx(alone.needless_per_30_days / 30)
    assert looked.needless_per_30_days < 0.05 * alone.needless_per_30_days


def test_firing_and_looking_follow_the_two_limits() -> None:
    c = Candidate("x", 100.0, 20.0)
    assert [(c.would_look(s), c.would_fire(s)) for s in (10.0, 50.0, 150.0)] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    assert not Candidate("hard", 100.0).would_look(500.0)


def test_no_limit_never_restarts_and_never_finds() -> None:
    price = price_of(Candidate("off", math.inf), steps(), Costs())
    assert price.needless_per_30_days == 0
    assert price.lost_s_per_day == math.inf


def test_a_section_never_passed_has_no_price() -> None:
    empty = steps(0)
    found = prices(empty)
    assert "5 x longest" not in found
    assert math.isnan(found["NCCL default"].lost_s_per_day)
