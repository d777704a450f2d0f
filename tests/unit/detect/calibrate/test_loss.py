"""The loss by the shipped rule against the best fixed limit, on durations whose distribution is known by formula."""

from __future__ import annotations

import random

import pytest

from steadyrun.detect.calibrate import Costs, SectionKey, SectionStatistics, limits_of

TRIES = 12
STALL_ONE_OF, STALL_SHAPE = 300, 2.0


def survival(seconds: float, step_s: float) -> float:
    """Of steps of length *step_s*, one of 300 of which has a Lomax stall of the same scale."""
    return 1.0 if seconds <= step_s else (seconds / step_s) ** -STALL_SHAPE / STALL_ONE_OF


def drawn(draw: random.Random, step_s: float) -> float:
    return step_s * (draw.paretovariate(STALL_SHAPE) if draw.random() < 1 / STALL_ONE_OF else 1.0)


@pytest.mark.parametrize("step_s", [0.5, 10.0, 60.0])
def test_loss_after_a_hundred_passes_is_within_twice_the_oracles(step_s: float) -> None:
    costs = Costs(restart_s=600.0, hangs_per_day=1.0)
    per_day = 86400.0 / (step_s * (1 + 1 / STALL_ONE_OF))
    draw = random.Random(11)

    def lost_s(soft_s: float, hard_s: float) -> float:
        soft, hard = survival(soft_s, step_s), survival(hard_s, step_s)
        looks = soft * (costs.evidence_s + costs.evidence_error * costs.restart_s)
        needless = (1 - costs.evidence_error) * hard * costs.restart_s
        return 0.9 * soft_s + 0.1 * hard_s + per_day * (looks + needless)

    def lost_by_one_s(limit_s: float) -> float:
        return limit_s + per_day * survival(limit_s, step_s) * costs.restart_s

    total_s = 0.0
    for _ in range(TRIES):
        s = SectionStatistics.empty(SectionKey("step", 8))
        for _ in range(100):
            s.observe(drawn(draw, step_s))
        limit = limits_of(s, costs)
        total_s += lost_s(limit.soft_s, limit.hard_s)
    oracle_s = min(lost_by_one_s(1.01 * step_s * 1.03**i) for i in range(300))
    assert total_s / TRIES < 2.0 * oracle_s
