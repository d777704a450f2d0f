"""Charts of paces: thresholds, groups with missing ranks, bias, scale, state."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from steadyrun.detect.straggler.chart import Chart, medians
from steadyrun.detect.straggler.config import StragglerConfig
from steadyrun.detect.straggler.threshold import ThresholdTable, run_length, threshold

QUICK = StragglerConfig(warm_steps=2, learn_steps=12, least_s=0.0)


def paces(steps: int, ranks: int, scatter: float = 0.01, seed: int = 0) -> NDArray[np.float64]:
    """Logarithms, [steps, ranks + 1], the last column NaN as charts want it."""
    rng = np.random.default_rng(seed)
    logs = rng.normal(0.0, scatter, (steps, ranks)) + rng.normal(0.0, 0.02, (steps, 1))
    return np.concatenate([logs, np.full((steps, 1), np.nan)], axis=1)


def run(chart: Chart, logs: NDArray[np.float64], first: int = 0) -> dict[int, int]:
    """Step of the first complete evidence of each rank."""
    found: dict[int, int] = {}
    for step, row in enumerate(logs, start=first):
        chart.feed(row, step, float(step))
        for rank in chart.members[chart.over(float(step))]:
            found.setdefault(int(rank), step)
    return found


def test_threshold_has_the_run_length_asked_for() -> None:
    for reference in (0.25, 0.5, 1.0, 3.0):
        assert run_length(reference, threshold(reference, 1e7)) == pytest.approx(1e7, rel=1e-6)


def test_run_length_agrees_with_a_simulated_cusum() -> None:
    rng = np.random.default_rng(5)
    height, total, alarms = threshold(0.5, 200.0), np.zeros(400), 0
    for _ in range(3000):
        total = np.maximum(0.0, total + rng.normal(size=400) - 0.5)
        alarms += int((total > height).sum())
        total[total > height] = 0.0
    assert 400 * 3000 / alarms == pytest.approx(200.0, rel=0.05)


def test_table_follows_the_threshold_between_its_points() -> None:
    table = ThresholdTable(1e7)
    references = np.array([0.25, 0.333, 0.9, 2.2, 7.0])
    assert table(references) == pytest.approx([threshold(float(k), 1e7) for k in references], abs=0.01)


def test_medians_leave_missing_values_out() -> None:
    rows = np.array([[3.0, np.nan, 1.0, 2.0], [np.nan, np.nan, 5.0, 7.0], [1.0, 2.0, 3.0, 10.0]])
    assert medians(rows, (~np.isnan(rows)).sum(axis=1)).tolist() == [2.0, 6.0, 2.5]
    assert medians(rows[2:], None).tolist() == [2.5]
    assert medians(rows[2:, :3], None).tolist() == [2.0]


def test_slow_rank_is_found_and_its_peers_are_not() -> None:
    logs = paces(120, 8)
    logs[60:, 3] += math.log(1.1)
    chart = Chart(QUICK, [range(8)])
    found = run(chart, logs)
    assert list(found) == [3]
    assert 60 + QUICK.least_steps - 1 <= found[3] <= 60 + QUICK.least_steps + 4
    assert 58 <= chart.first_step[0, 3] <= 60
    assert math.expm1(chart.mean_excess[0, 3]) == pytest.approx(0.1, abs=0.02)


def test_a_common_slowdown_is_nobodys() -> None:
    logs = paces(150, 8)
    logs[60:, :8] += math.log(2.0)
    assert run(Chart(QUICK, [range(8)]), logs) == {}


def test_a_certain_but_small_difference_is_left_alone() -> None:
    logs = paces(400, 16, scatter=0.001)
    logs[60:, 5] += math.log(1.01)
    assert run(Chart(QUICK, [range(16)]), logs) == {}


def test_one_spike_of_any_height_is_one_step() -> None:
    logs = paces(200, 8)
    logs[60:200:12, 2] += math.log(50.0)
    assert run(Chart(QUICK, [range(8)]), logs) == {}


def test_an_intermittent_fault_adds_up() -> None:
    logs = paces(300, 16, scatter=0.004)
    slow = np.arange(300) % 30 < 10
    logs[slow & (np.arange(300) >= 90), 7] += math.log(1.3)
    assert list(run(Chart(QUICK, [range(16)]), logs)) == [7]


def test_a_rank_that_is_slower_by_nature_within_bounds_is_left_alone() -> None:
    logs = paces(300, 16, scatter=0.004)
    logs[:, 4] += 0.025
    chart = Chart(QUICK, [range(16)])
    assert run(chart, logs) == {}
    assert chart.bias[0, 4] == pytest.approx(0.025, abs=0.006)


def test_a_rank_that_was_slow_from_the_start_is_found_all_the_same() -> None:
    logs = paces(120, 16)
    logs[:, 4] += math.log(1.15)
    chart = Chart(QUICK, [range(16)])
    assert list(run(chart, logs)) == [4]
    assert chart.bias[0, 4] <= QUICK.own_bias


def test_of_a_pair_the_slow_one_is_found() -> None:
    logs = paces(120, 2, scatter=0.005)
    logs[60:, 1] += math.log(1.08)
    chart = Chart(QUICK, [range(2)])
    assert list(run(chart, logs)) == [1]
    assert math.expm1(chart.mean_excess[0, 1]) == pytest.approx(0.08, abs=0.015)


def test_groups_of_unequal_size_are_compared_within() -> None:
    logs = paces(150, 9)
    logs[:, 5:9] += math.log(3.0)
    logs[60:, 7] += math.log(1.2)
    assert list(run(Chart(QUICK, [range(5), range(5, 9)]), logs)) == [7]


def test_missing_steps_neither_hide_nor_make_a_slow_rank() -> None:
    rng = np.random.default_rng(3)
    logs = paces(200, 8)
    logs[60:, 3] += math.log(1.15)
    logs[:, :8][rng.random((200, 8)) < 0.2] = np.nan
    assert list(run(Chart(QUICK, [range(8)]), logs)) == [3]


def test_a_step_told_by_two_of_eight_compares_nobody() -> None:
    logs = paces(100, 8)
    logs[40:, 2:8] = np.nan
    logs[40:, 1] += 1.0
    chart = Chart(QUICK, [range(8)])
    assert run(chart, logs) == {}
    assert chart.fed == 40


def test_slowing_beyond_peers_scale_keeps_the_scale_of_few() -> None:
    logs = paces(200, 4, scatter=0.01)
    logs[60:, 0] += math.log(1.5)
    chart = Chart(QUICK, [range(4)])
    run(chart, logs[:60])
    before = float(chart.scale[0, 0])
    run(chart, logs[60:], first=60)
    assert float(chart.scale[0, 0]) < 1.3 * before


def test_autocorrelation_widens_the_scale() -> None:
    rng = np.random.default_rng(1)
    steps, ranks, share = 800, 32, 0.7
    logs = np.full((steps, ranks + 1), np.nan)
    last = np.zeros(ranks)
    for step in range(steps):
        last = share * last + rng.normal(0.0, 0.01, ranks)
        logs[step, :ranks] = last
    chart = Chart(QUICK, [range(ranks)])
    run(chart, logs)
    marginal = 0.01 / math.sqrt(1 - share**2)
    assert float(chart.scale[0, 0]) == pytest.approx(1.1 * marginal * math.sqrt((1 + share) / (1 - share)), rel=0.15)


def test_work_explains_unequal_times() -> None:
    rng = np.random.default_rng(2)
    work = np.full((300, 17), np.nan)
    work[:, :16] = np.log(rng.uniform(0.3, 3.0, (300, 16)))
    logs = paces(300, 16)
    logs[:, :16] += 0.8 * work[:, :16]
    logs[200:, 6] += math.log(1.1)
    chart = Chart(QUICK, [range(16)])
    found: dict[int, int] = {}
    for step in range(300):
        chart.feed(logs[step], step, float(step), work[step])
        for rank in chart.members[chart.over(float(step))]:
            found.setdefault(int(rank), step)
    assert list(found) == [6]
    assert found[6] < 230


def test_evidence_needs_its_time() -> None:
    logs = paces(200, 8)
    logs[60:, 3] += math.log(1.2)
    slow_to_judge = StragglerConfig(warm_steps=2, learn_steps=12, least_s=60.0, enough_steps=1000)
    found = run(Chart(slow_to_judge, [range(8)]), logs)
    assert 118 <= found[3] <= 122


def test_a_rank_alone_is_compared_with_its_past() -> None:
    logs = paces(150, 1)
    logs[:, 0] += 5.0
    logs[80:, 0] += math.log(1.3)
    assert list(run(Chart(QUICK, [[0]], is_alone=True), logs)) == [0]


def test_state_goes_through_json_and_evidence_goes_on() -> None:
    logs = paces(120, 8)
    logs[60:, 3] += math.log(1.1)
    whole, first, second = (Chart(QUICK, [range(8)]) for _ in range(3))
    expected = run(whole, logs)
    run(first, logs[:70])
    second.restore(json.loads(json.dumps(first.state())))
    assert run(second, logs[70:], first=70) == expected
    with pytest.raises(ValueError, match="other groups"):
        Chart(QUICK, [range(4)]).restore(first.state())


@pytest.mark.parametrize(
    ("name", "value"), [("least_slowdown", 0.0), ("own_bias", 2.0), ("learn_steps", 1), ("false_alarm_steps", 1.0)]
)
def test_numbers_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        StragglerConfig(**{name: value})


def test_a_large_job_asks_for_more() -> None:
    config = StragglerConfig()
    assert config.for_run(8, 1.0).false_alarm_steps == config.false_alarm_steps
    assert config.for_run(16_384, 5.0).false_alarm_steps == pytest.approx(16_384 * 7 * 86400 / 5)
