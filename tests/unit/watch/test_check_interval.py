from __future__ import annotations

import pytest

from steadyrun.watch.integrity import doubled


def test_cheap_checks_stay_at_the_base() -> None:
    assert doubled(0.0001, 1.0, 50, 0.0005) == 50


@pytest.mark.parametrize(("cost_s", "interval"), [(0.026, 100), (0.06, 200), (1.0, 3200)])
def test_dear_ones_are_doubled_until_they_are_cheap(cost_s: float, interval: int) -> None:
    assert doubled(cost_s, 1.0, 50, 0.0005) == interval
    assert cost_s <= 0.0005 * interval < 2 * cost_s


def test_intervals_are_multiples_of_each_other() -> None:
    found = {doubled(cost / 1000, 0.3, 50, 0.0005) for cost in range(1, 200)}
    assert all(a % b == 0 or b % a == 0 for a in found for b in found)


def test_a_little_cheaper_does_not_lower_it_again() -> None:
    assert doubled(0.024, 1.0, 50, 0.0005) == 50
    assert doubled(0.024, 1.0, 50, 0.0005, now=100) == 100
    assert doubled(0.012, 1.0, 50, 0.0005, now=100) == 50


def test_no_interval_grows_without_end() -> None:
    assert doubled(1e9, 1e-9, 50, 0.0005) == 50 << 20
