"""When what was slow counts as slow no more, and what stays behind of it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from steadyrun.detect.straggler import Alarm, AlarmKind, Detector, StragglerConfig
from steadyrun.detect.straggler.chart import Chart

QUICK = StragglerConfig(warm_steps=2, learn_steps=20, least_s=0.0)
BEGIN, END, STEPS = 60, 120, 260
SLOW = 1


def paces(scatter: float, slowdown: NDArray[np.float64], ranks: int = 4, seed: int = 0) -> NDArray[np.float64]:
    """Own work, [steps, ranks], of which one rank takes longer by *slowdown*."""
    out = np.exp(np.random.default_rng(seed).normal(0.0, scatter, (len(slowdown), ranks)))
    out[:, SLOW] *= 1 + slowdown
    return out


def during(first: int, last: int, by: float, steps: int = STEPS) -> NDArray[np.float64]:
    at = np.arange(steps)
    return np.where((at >= first) & (at < last), by, 0.0)


def judged(busy: NDArray[np.float64]) -> tuple[list[Alarm], list[Alarm]]:
    """Alarms that began, and those that ended."""
    detector = Detector(QUICK, None, busy.shape[1])
    began: list[Alarm] = []
    ended: list[Alarm] = []
    for step, row in enumerate(busy):
        began += [a for a in detector.feed(step, row) if a.kind is AlarmKind.RANK]
        ended += detector.take_closed()
    return began, ended


@pytest.mark.parametrize("ranks", [2, 4, 32])
@pytest.mark.parametrize(("scatter", "by"), [(0.004, 0.06), (0.004, 0.5), (0.03, 0.2), (0.08, 0.4)])
def test_an_alarm_ends_within_as_many_steps_as_it_took_or_thirty(ranks: int, scatter: float, by: float) -> None:
    began, ended = judged(paces(scatter, during(BEGIN, END, by), ranks))
    assert [a.ranks for a in began] == [a.ranks for a in ended] == [(SLOW,)]
    over_step = ended[0].over_step
    assert over_step is not None
    assert 0 < over_step - END <= max(30, began[0].step - BEGIN)


def test_one_long_step_does_not_hold_an_alarm_open() -> None:
    slowdown = during(BEGIN, END, 0.1)
    slowdown[END + 5] = 50.0
    _, ended = judged(paces(0.004, slowdown))
    assert ended[0].over_step is not None
    assert ended[0].over_step - END <= 30


def test_a_fault_that_comes_and_goes_is_one_alarm() -> None:
    at = np.arange(400)
    slowdown = np.where((at >= BEGIN) & (at % 30 < 10), 0.3, 0.0)
    began, ended = judged(paces(0.004, slowdown))
    assert [a.ranks for a in began] == [(SLOW,)]
    assert not ended


def test_a_rank_that_is_still_slow_by_less_stays_under_alarm() -> None:
    slowdown = during(BEGIN, END, 0.5) + during(END, STEPS, 0.08)
    began, ended = judged(paces(0.004, slowdown))
    assert len(began) == 1
    assert not ended


def test_who_was_slow_can_be_named_again_and_needs_as_much_for_it() -> None:
    began, ended = judged(paces(0.004, during(BEGIN, END, 0.1) + during(160, STEPS, 0.1)))
    assert [a.ranks for a in began] == [(SLOW,), (SLOW,)]
    assert len(ended) == 1
    assert began[1].first_step == pytest.approx(160, abs=2)
    assert began[1].step - 160 >= QUICK.least_steps - 1


def test_the_other_of_a_pair_does_not_learn_that_it_is_fast() -> None:
    """Or it would look slow when the slow one recovers."""
    chart = Chart(QUICK, [range(2)])
    for step, row in enumerate(np.log(paces(0.004, during(BEGIN, STEPS, 0.3), ranks=2))):
        chart.feed(np.append(row, np.nan), step, float(step))
        if step == BEGIN + 20:
            before = chart.bias[0].copy()
    assert chart.bias[0].tolist() == before.tolist()
