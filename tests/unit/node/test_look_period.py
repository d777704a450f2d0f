"""How long the agent may leave the board alone: long steps need few looks, short ones more, rings that fill most."""

from __future__ import annotations

import pytest

from steadyrun.node.sampling import look_period_s


@pytest.mark.parametrize(
    ("rings_per_s", "steps_per_s", "period_s"),
    [
        (0.0, 0.0, 500.0),
        (0.0, 0.5, 32.0),
        (0.1, 20.0, 0.8),  # of steps of 50 ms at most 16 are unseen: who is slow is to be named within 60
        (0.1, 100.0, 0.16),
        (2.0, 20.0, 0.25),
    ],
)
def test_neither_steps_nor_rings_pile_up(rings_per_s: float, steps_per_s: float, period_s: float) -> None:
    assert look_period_s(rings_per_s, steps_per_s) == pytest.approx(period_s)
