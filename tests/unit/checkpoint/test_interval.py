"""The formulas of the checkpoint interval: against published figures, against a simulation, and at their limits."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.checkpoint.interval import (
    Costs,
    Formula,
    complete_ettr_ratio,
    daly_interval_s,
    estimated_mtbf_s,
    explain,
    explain_tiers,
    interval_words,
    intervals_around_s,
    mtbf_words,
    overhead_at,
    prior_mtbf_s,
    recommend,
    scaled_mtbf_s,
    two_tiers,
    young_interval_s,
)

HOUR_S = 3600.0
LLAMA3_MTBF_S = 54 * 24 * HOUR_S / 419  # 16,384 H100, 419 failures in 54 days


# -- published figures -----------------------------------------------------------------------------------------------
def test_mtbf_of_the_published_run_is_three_hours() -> None:
    assert estimated_mtbf_s(54 * 24 * HOUR_S, 419) / HOUR_S == pytest.approx(3.09, abs=0.005)
    assert scaled_mtbf_s(LLAMA3_MTBF_S, 16_384, 1) / HOUR_S == pytest.approx(50_677, abs=1)


@pytest.mark.parametrize(("stall_s", "interval_s", "overhead"), [(60, 1156, "10.4"), (5, 334, "3.0")])
def test_interval_and_overhead_of_the_published_run(stall_s: float, interval_s: int, overhead: str) -> None:
    best = recommend(Costs(stall_s, LLAMA3_MTBF_S))
    assert round(best.interval_s) == interval_s
    assert f"{100 * best.overhead.total_ratio:.1f}" == overhead
    assert best.overhead.saving_ratio == pytest.approx(best.overhead.redone_ratio)


@pytest.mark.parametrize(("interval_s", "overhead"), [(3600, "17.83"), (300, "21.35")])
def test_overhead_of_the_published_run_at_other_intervals(interval_s: float, overhead: str) -> None:
    assert f"{100 * overhead_at(Costs(60, LLAMA3_MTBF_S), interval_s).total_ratio:.2f}" == overhead


def test_mtbf_and_interval_at_1024_gpus() -> None:
    mtbf_s = scaled_mtbf_s(LLAMA3_MTBF_S, 16_384, 1024)
    best = recommend(Costs(60, mtbf_s))
    assert f"{mtbf_s / HOUR_S:.1f}" == "49.5"
    assert f"{best.interval_s / 60:.1f}" == "77.1"
    assert f"{100 * best.overhead.total_ratio:.2f}" == "2.60"


def test_effective_time_with_a_restart_of_ten_minutes() -> None:
    best = recommend(Costs(5, LLAMA3_MTBF_S, restart_s=600))
    assert f"{100 * best.overhead.restart_ratio:.2f}" == "5.39"
    assert f"{100 * best.overhead.ettr_ratio:.1f}" == "91.6"


@pytest.mark.parametrize(("mtbf_h", "published_min"), [(24, "117"), (6, "57"), (0.25, "9.1")])
def test_dalys_own_optima(mtbf_h: float, published_min: str) -> None:
    minutes = daly_interval_s(300, mtbf_h * HOUR_S) / 60
    assert f"{minutes:.{1 if minutes < 10 else 0}f}" == published_min


@pytest.mark.parametrize(
    ("gpus", "first_order", "complete"),
    [(1024, "97.07", "97.10"), (16_384, "84.23", "85.25"), (100_000, "41.47", "55.01")],
)
def test_the_first_order_is_too_dark_for_large_jobs(gpus: int, first_order: str, complete: str) -> None:
    best = recommend(Costs(60, scaled_mtbf_s(LLAMA3_MTBF_S, 16_384, gpus), restart_s=600), Formula.YOUNG)
    assert f"{100 * best.overhead.ettr_ratio:.2f}" == first_order
    assert f"{100 * best.complete_ettr_ratio:.2f}" == complete


@pytest.mark.parametrize(
    ("persist_s", "slowdown_ratio", "interval_s"),
    # d + s L is the stall that counts; L is the least interval: max(L, sqrt(2 (d + s L) M))
    [(0, 0, 334), (60, 0, 334), (300, 0, 334), (300, 0.05, 667), (600, 0.05, 883), (600, 0, 600)],
)
def test_asynchronous_saves(persist_s: float, slowdown_ratio: float, interval_s: int) -> None:
    costs = Costs(5, LLAMA3_MTBF_S, persist_s, 600, 30, slowdown_ratio)
    best = recommend(costs)
    assert round(best.interval_s) == interval_s
    assert best.is_bound == (interval_s == persist_s)
    t, m = best.interval_s, LLAMA3_MTBF_S
    by_hand = (5 + slowdown_ratio * persist_s) / t + (t / 2 + persist_s + 600 + 30) / m
    assert best.overhead.total_ratio == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("share", "stall_s", "memory_s", "durable_s", "overhead"),
    [
        (0.5, 5, 149, 472, "2.79"),
        (0.5, 60, 149, 1635, "8.01"),
        (0.75, 5, 122, 667, "2.32"),
        (0.75, 60, 122, 2312, "6.01"),
        (0.9, 5, 111, 1055, "1.85"),
        (0.9, 60, 111, 3655, "4.18"),
    ],
)
def test_two_tiers(share: float, stall_s: float, memory_s: int, durable_s: int, overhead: str) -> None:
    tiers = two_tiers(Costs(stall_s, LLAMA3_MTBF_S), 0.5, share)
    assert (round(tiers.memory_interval_s), round(tiers.durable_interval_s)) == (memory_s, durable_s)
    assert f"{100 * tiers.overhead.total_ratio:.2f}" == overhead


def test_the_durable_tier_waits_for_its_own_saves_and_restarts_count_once() -> None:
    tiers = two_tiers(Costs(5, LLAMA3_MTBF_S, persist_s=900, restart_s=600), 0.5, 0.75)
    assert tiers.is_bound
    assert tiers.durable_interval_s == 900
    by_hand = 0.5 / tiers.memory_interval_s + 5 / 900
    by_hand += (0.75 * tiers.memory_interval_s / 2 + 0.25 * (450 + 900) + 600) / LLAMA3_MTBF_S
    assert tiers.overhead.total_ratio == pytest.approx(by_hand)


# -- against a simulation --------------------------------------------------------------------------------------------
def simulated_ettr_ratio(costs: Costs, interval_s: float, failures: int, seed: int) -> float:
    """Failures at random times; what a save has not reached is lost; restarts can fail, too."""
    rng, cycle_s = random.Random(seed), interval_s + costs.whole_stall_s
    saved_s = wall_s = 0.0
    for _ in range(failures):
        alive_s = rng.expovariate(1 / costs.mtbf_s)
        wall_s += alive_s
        saves = math.floor(max(alive_s - costs.restart_s - costs.detect_s, 0.0) / cycle_s)
        saved_s += saves * interval_s
    return saved_s / wall_s


@pytest.mark.parametrize("interval_s", [200.0, 400.0, 1000.0])
def test_the_complete_model_is_what_a_simulation_finds(interval_s: float) -> None:
    costs = Costs(60, 1800, restart_s=300)
    simulated = simulated_ettr_ratio(costs, interval_s, 20_000, seed=1)
    assert complete_ettr_ratio(costs, interval_s) == pytest.approx(simulated, rel=0.03)


# -- properties ------------------------------------------------------------------------------------------------------
positive_s = st.floats(1e-3, 1e7)


@settings(max_examples=50)
@given(stall_s=positive_s, mtbf_s=positive_s, factor=st.floats(0.05, 20))
def test_no_interval_beats_youngs_and_the_optimum_is_as_flat_as_claimed(
    stall_s: float, mtbf_s: float, factor: float
) -> None:
    costs = Costs(stall_s, mtbf_s)
    best_s = young_interval_s(stall_s, mtbf_s)
    ratio = overhead_at(costs, best_s * factor).total_ratio / overhead_at(costs, best_s).total_ratio
    assert ratio == pytest.approx((factor + 1 / factor) / 2)
    assert ratio >= 1 - 1e-9


@settings(max_examples=50)
@given(share=st.floats(1e-4, 0.1), factor=st.floats(0.05, 20))
def test_no_interval_beats_dalys_in_the_complete_model(share: float, factor: float) -> None:
    costs = Costs(1000 * share, 1000)
    best_s = daly_interval_s(costs.stall_s, costs.mtbf_s)
    assert complete_ettr_ratio(costs, best_s * factor) <= complete_ettr_ratio(costs, best_s) + 1e-6


@settings(max_examples=50)
@given(
    stall_s=positive_s,
    mtbf_s=positive_s,
    persist_s=st.floats(0, 1e6),
    restart_s=st.floats(0, 1e6),
    slow=st.floats(0, 2),
)
def test_a_recommendation_is_never_below_the_persist_time_nor_out_of_range(
    stall_s: float, mtbf_s: float, persist_s: float, restart_s: float, slow: float
) -> None:
    best = recommend(Costs(stall_s, mtbf_s, persist_s, restart_s, slowdown_ratio=slow))
    assert best.interval_s >= persist_s
    assert 0 <= best.overhead.ettr_ratio <= 1
    assert 0 <= best.complete_ettr_ratio <= 1
    assert all(value >= persist_s for value in intervals_around_s(best, (0.25, 4)))
    assert best.interval_s in intervals_around_s(best, (0.25, 4))


# -- which formula, which bound --------------------------------------------------------------------------------------
def test_young_is_recommended_until_daly_gains_a_thousandth_of_the_time() -> None:
    assert recommend(Costs(60, 3000)).formula is Formula.YOUNG
    short = recommend(Costs(300, 900))
    assert (short.formula, short.interval_s) == (Formula.DALY, short.daly_s)
    assert recommend(Costs(300, 900), Formula.YOUNG).interval_s == short.young_s
    assert recommend(Costs(60, LLAMA3_MTBF_S), Formula.DALY).interval_s == pytest.approx(1116, abs=1)


@pytest.mark.parametrize("stall_s", [200.0, 1e6])
def test_daly_saves_once_per_mtbf_when_a_save_takes_longer_than_two(stall_s: float) -> None:
    assert daly_interval_s(stall_s, 100.0) == 100.0


def test_a_job_that_fails_faster_than_it_restarts_makes_no_progress() -> None:
    best = recommend(Costs(5, 1, restart_s=1e6))
    assert best.overhead.ettr_ratio == 0
    assert best.complete_ettr_ratio == 0


# -- failure rates ---------------------------------------------------------------------------------------------------
def test_the_prior_is_one_failure_per_50000_gpu_hours() -> None:
    assert prior_mtbf_s(1) == 50_000 * HOUR_S
    assert prior_mtbf_s(16_384) / HOUR_S == pytest.approx(3.05, abs=0.005)


def test_the_prior_weighs_as_much_as_one_failure() -> None:
    assert estimated_mtbf_s(0, 0, prior_s=100) == 100
    assert estimated_mtbf_s(900, 9, prior_s=100) == 100
    assert estimated_mtbf_s(1000, 10, prior_s=1e4) == pytest.approx(1000)


# -- words -----------------------------------------------------------------------------------------------------------
def test_the_explanation_holds_figures_origin_and_flatness() -> None:
    first, second, third = explain(recommend(Costs(60, LLAMA3_MTBF_S)))
    assert first.startswith("Save every 1,156 s (19 min): overhead 10.4 % (5.2 % for saves, 5.2 % for work done again)")
    assert "1,116 s" in second
    assert "MTBF of 3.09 h" in second
    assert "6 %" in third


def test_the_explanation_says_when_the_bound_the_slowdown_or_the_complete_model_matter() -> None:
    bound = " ".join(explain(recommend(Costs(5, LLAMA3_MTBF_S, persist_s=600))))
    assert "600 s to become durable" in bound
    assert "flat" not in bound
    assert "35 s (5 s and 0.05 of 600 s)" in explain(recommend(Costs(5, 1e5, 600, slowdown_ratio=0.05)))[1]
    dark = explain(recommend(Costs(300, 900)))
    assert dark[1].startswith("Daly's higher-order form gives 548 s (9.1 min)")
    assert "complete model the effective training time is 38.9 %" in dark[-1]


def test_the_explanation_of_tiers_says_when_memory_gains_nothing() -> None:
    good = explain_tiers(two_tiers(Costs(60, LLAMA3_MTBF_S), 0.5, 0.75))
    assert len(good) == 1
    assert "overhead 6.0 % instead of 10.4 %" in good[0]
    assert explain_tiers(two_tiers(Costs(0.5, LLAMA3_MTBF_S), 60, 0.75))[-1].startswith("That is no gain")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.5, "0.5 s"),
        (119.4, "119 s"),
        (333.7, "334 s (5.6 min)"),
        (1155.9, "1,156 s (19 min)"),
        (46_800, "46,800 s (13.0 h)"),
    ],
)
def test_intervals_in_words(seconds: float, text: str) -> None:
    assert interval_words(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45, "45 s"), (1824.4, "30.4 min"), (11_135, "3.09 h"), (49.49 * 3600, "49.5 h"), (50_000 * 3600, "50,000 h")],
)
def test_mtbf_in_words(seconds: float, text: str) -> None:
    assert mtbf_words(seconds) == text


# -- input -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stall_s": 0}, "stall must be above 0 and finite, not 0 s"),
        ({"stall_s": math.nan}, "stall"),
        ({"mtbf_s": -1}, "MTBF must be above 0 and finite, not -1 s"),
        ({"mtbf_s": math.inf}, "MTBF"),
        ({"persist_s": -1}, "persist time must be 0 or above"),
        ({"restart_s": math.inf}, "restart time"),
        ({"detect_s": -2}, "detection time"),
        ({"slowdown_ratio": -0.1}, "slowdown must be 0 or above and finite, not -0.1"),
    ],
)
def test_costs_out_of_range_are_named(changes: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Costs(**{"stall_s": 60.0, "mtbf_s": 1e4, **changes})


def test_an_interval_below_the_persist_time_is_refused() -> None:
    with pytest.raises(ValueError, match="at least the persist time of 300 s, not 60 s"):
        overhead_at(Costs(5, 1e4, persist_s=300), 60)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, math.nan])
def test_a_share_of_all_or_nothing_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="above 0 and below 1"):
        two_tiers(Costs(60, 1e4), 0.5, share)


def test_numbers_that_give_no_failure_rate_are_refused() -> None:
    with pytest.raises(ValueError, match="only with a prior"):
        estimated_mtbf_s(100, 0)
    with pytest.raises(ValueError, match="not -1"):
        estimated_mtbf_s(100, -1)
    with pytest.raises(ValueError, match="time seen"):
        estimated_mtbf_s(-1, 1, prior_s=10)
    with pytest.raises(ValueError, match="number of GPUs must be 1 or above, not 0"):
        prior_mtbf_s(0)
    with pytest.raises(ValueError, match="number of GPUs"):
        scaled_mtbf_s(100, 8, 0)
