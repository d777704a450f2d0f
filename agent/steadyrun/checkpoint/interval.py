"""How often to save: the interval at which faults and saves together cost a job least, and what they cost it there.

A save costs its stall, once per interval; a failure costs the work since the last durable save (half an interval in the
mean), the time until it is noticed, and the restart. Short intervals pay for saves, long ones for work done twice.
Pure functions; all times are seconds, all shares of time are ratios from 0 (nothing) to 1 (all of it).

Sources: J. W. Young, *A first order approximation to the optimum checkpoint interval*, CACM 17(9), 1974; J. T. Daly, *A
higher order estimate of the optimum checkpoint interval for restart dumps*, FGCS 22(3), 2006; the prior is the failure
rate in *The Llama 3 Herd of Models* (419 unexpected interruptions in 54 days on 16,384 H100).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = [
    "PRIOR_GPU_HOURS",
    "Costs",
    "Formula",
    "Overhead",
    "Recommendation",
    "TwoTiers",
    "complete_ettr_ratio",
    "daly_interval_s",
    "estimated_mtbf_s",
    "explain",
    "explain_tiers",
    "interval_words",
    "intervals_around_s",
    "mtbf_words",
    "overhead_at",
    "prior_mtbf_s",
    "recommend",
    "scaled_mtbf_s",
    "two_tiers",
    "young_interval_s",
]

# 54 days x 16,384 GPUs / 419 failures are 50,677 GPU-hours.
PRIOR_GPU_HOURS: Final = 50_000.0
# Young's interval stands until it costs this share of the time against Daly's; that is near a stall of MTBF / 20.
_YOUNG_MAY_LOSE_RATIO: Final = 1e-3
# Beyond it the terms that a first-order sum leaves out (faults while redoing work) are worth a warning.
_FIRST_ORDER_HOLDS_RATIO: Final = 0.15
_LARGEST_EXPONENT: Final = 700.0  # math.exp overflows at 709.8


class Formula(enum.Enum):
    """Where a recommended interval comes from."""

    YOUNG = "young"
    DALY = "daly"


@dataclass(frozen=True, slots=True)
class Costs:
    """What saves and failures cost a job.

    Attributes:
        stall_s: training stands still for this long at each save.
        mtbf_s: mean time between failures of the whole job.
        persist_s: from the end of the stall until the save is durable; 0 when the stall includes the writing. A new
            save does not begin before the last one is durable, so this bounds the interval from below.
        restart_s: from the notice of a failure until training goes on.
        detect_s: from a failure until it is noticed.
        slowdown_ratio: how much longer steps take while a save becomes durable (0.05: 5 % longer).

    Raises:
        ValueError: a value is not finite, or out of its range.
    """

    stall_s: float
    mtbf_s: float
    persist_s: float = 0.0
    restart_s: float = 0.0
    detect_s: float = 0.0
    slowdown_ratio: float = 0.0

    def __post_init__(self) -> None:
        _above_zero("stall", self.stall_s, "s")
        _above_zero("MTBF", self.mtbf_s, "s")
        for name, value, unit in (
            ("persist time", self.persist_s, "s"),
            ("restart time", self.restart_s, "s"),
            ("detection time", self.detect_s, "s"),
            ("slowdown", self.slowdown_ratio, ""),
        ):
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"the {name} must be 0 or above and finite, not {_with_unit(value, unit)}")

    @property
    def whole_stall_s(self) -> float:
        """Training time that one save costs: the stall, and what is lost to slower steps while it is written."""
        return self.stall_s + self.slowdown_ratio * self.persist_s


@dataclass(frozen=True, slots=True)
class Overhead:
    """Shares of the time that are not training, to first order.

    Attributes:
        saving_ratio: the stalls of saves.
        redone_ratio: work done again after failures.
        restart_ratio: noticing failures and restarting.
    """

    saving_ratio: float
    redone_ratio: float
    restart_ratio: float

    @property
    def total_ratio(self) -> float:
        """Their sum; above 1 where the first order means nothing any more."""
        return self.saving_ratio + self.redone_ratio + self.restart_ratio

    @property
    def ettr_ratio(self) -> float:
        """Effective training time ratio, productive time by wall time: 1 - w/T - (T/2 + t_detect + t_restart)/M."""
        return max(0.0, 1.0 - self.total_ratio)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """An interval, how it was found, and its alternatives.

    Attributes:
        interval_s: training time between two saves.
        formula: whose optimum it is, before the bound.
        is_bound: the optimum was below the persist time, which the interval therefore is.
        young_s, daly_s: both optima, before the bound.
        overhead: first-order overhead at ``interval_s``.
        complete_ettr_ratio: effective training time by Daly's complete model at ``interval_s``.
    """

    costs: Costs
    interval_s: float
    formula: Formula
    is_bound: bool
    young_s: float
    daly_s: float
    overhead: Overhead
    complete_ettr_ratio: float


@dataclass(frozen=True, slots=True)
class TwoTiers:
    """Snapshots in memory, which most failures leave alone, beside durable saves for the others.

    Attributes:
        memory_stall_s: training stands still for this long at each snapshot.
        memory_share: failures after which the snapshot in memory is still there, as a share of all.
        memory_interval_s, durable_interval_s: training time between two saves of the tier.
        is_bound: the durable interval is the persist time, its optimum being shorter.
        overhead: of both tiers together, to first order.
    """

    costs: Costs
    memory_stall_s: float
    memory_share: float
    memory_interval_s: float
    durable_interval_s: float
    is_bound: bool
    overhead: Overhead


# -- optima ----------------------------------------------------------------------------------------------------------
def young_interval_s(stall_s: float, mtbf_s: float) -> float:
    """The interval with the least first-order overhead: ``sqrt(2 d M)`` (Young 1974).

    Raises:
        ValueError: an argument is not above 0 and finite.
    """
    _above_zero("stall", stall_s, "s")
    _above_zero("MTBF", mtbf_s, "s")
    return math.sqrt(2.0 * stall_s * mtbf_s)


def daly_interval_s(stall_s: float, mtbf_s: float) -> float:
    """The interval with the least overhead when failures also hit saves, restarts and work done again.

    ``sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d``, and M itself from ``d = 2M`` on (Daly 2006, eq. 37).
    Within 0.04 % of the complete model's optimum up to a stall of M / 10, so there is nothing to iterate.

    Raises:
        ValueError: an argument is not above 0 and finite.
    """
    young_s = young_interval_s(stall_s, mtbf_s)
    if stall_s >= 2.0 * mtbf_s:
        return mtbf_s
    x = stall_s / (2.0 * mtbf_s)
    return young_s * (1.0 + math.sqrt(x) / 3.0 + x / 9.0) - stall_s


def overhead_at(costs: Costs, interval_s: float) -> Overhead:
    """First-order overhead: ``(d + s L)/T + (T/2 + L)/M + (R + D)/M``.

    T interval, M MTBF, d stall, L persist time, s slowdown, R restart, D detection. A failure costs L beside half an
    interval, since a save that is not yet durable does not count.

    Raises:
        ValueError: *interval_s* is not above 0, or is below the persist time: a save would begin before the last ended.
    """
    _above_zero("interval", interval_s, "s")
    if interval_s < costs.persist_s:
        raise ValueError(
            f"the interval must be at least the persist time of {costs.persist_s:g} s, not {interval_s:g} s: "
            "a save would begin before the last one is durable"
        )
    return Overhead(
        saving_ratio=costs.whole_stall_s / interval_s,
        redone_ratio=(interval_s / 2.0 + costs.persist_s) / costs.mtbf_s,
        restart_ratio=(costs.restart_s + costs.detect_s) / costs.mtbf_s,
    )


def complete_ettr_ratio(costs: Costs, interval_s: float) -> float:
    """Effective training time by Daly's complete model, in which failures also strike while work is done again.

    ``T / (M exp(R/M) (exp((T + d)/M) - 1))`` (Daly 2006) with exponential times between failures. What an asynchronous
    save loses beyond that, its persist time, is counted with the restart, as is detection.

    Raises:
        ValueError: *interval_s* is not above 0 and finite.
    """
    _above_zero("interval", interval_s, "s")
    mtbf_s = costs.mtbf_s
    pause = (costs.restart_s + costs.detect_s + costs.persist_s) / mtbf_s
    stretch = (interval_s + costs.whole_stall_s) / mtbf_s
    if pause + stretch > _LARGEST_EXPONENT:
        return 0.0
    return interval_s / (mtbf_s * math.exp(pause) * math.expm1(stretch))


def recommend(costs: Costs, formula: Formula | None = None) -> Recommendation:
    """The interval to use.

    Args:
        formula: whose optimum; None: Young's, unless by the complete model it costs 0.1 % of the time against Daly's.
    """
    young_s = young_interval_s(costs.whole_stall_s, costs.mtbf_s)
    daly_s = daly_interval_s(costs.whole_stall_s, costs.mtbf_s)
    if formula is None:
        loss = _daly_gain_ratio(costs, young_s, daly_s)
        formula = Formula.DALY if loss > _YOUNG_MAY_LOSE_RATIO else Formula.YOUNG
    optimum_s = young_s if formula is Formula.YOUNG else daly_s
    interval_s = max(optimum_s, costs.persist_s)
    return Recommendation(
        costs=costs,
        interval_s=interval_s,
        formula=formula,
        is_bound=interval_s > optimum_s,
        young_s=young_s,
        daly_s=daly_s,
        overhead=overhead_at(costs, interval_s),
        complete_ettr_ratio=complete_ettr_ratio(costs, interval_s),
    )


def _daly_gain_ratio(costs: Costs, young_s: float, daly_s: float) -> float:
    return complete_ettr_ratio(costs, daly_s) - complete_ettr_ratio(costs, young_s)


def two_tiers(costs: Costs, memory_stall_s: float, memory_share: float) -> TwoTiers:
    """Young's optimum for each tier, the failures divided between them: ``sqrt(2 d M / share)``.

    A failure that memory survives costs half a memory interval, another one half a durable interval.

    Args:
        costs: of the durable tier.
        memory_share: above 0 and below 1; 0.75 is what DLRover reports.

    Raises:
        ValueError: an argument is out of its range.
    """
    _above_zero("stall of the memory tier", memory_stall_s, "s")
    if not 0.0 < memory_share < 1.0:
        raise ValueError(
            f"the share of failures that memory survives must be above 0 and below 1, not {memory_share:g}"
        )
    durable_share = 1.0 - memory_share
    memory_s = young_interval_s(memory_stall_s, costs.mtbf_s / memory_share)
    optimum_s = young_interval_s(costs.whole_stall_s, costs.mtbf_s / durable_share)
    durable_s = max(optimum_s, costs.persist_s)
    redone_s = memory_share * memory_s / 2.0 + durable_share * (durable_s / 2.0 + costs.persist_s)
    return TwoTiers(
        costs=costs,
        memory_stall_s=memory_stall_s,
        memory_share=memory_share,
        memory_interval_s=memory_s,
        durable_interval_s=durable_s,
        is_bound=durable_s > optimum_s,
        overhead=Overhead(
            saving_ratio=memory_stall_s / memory_s + costs.whole_stall_s / durable_s,
            redone_ratio=redone_s / costs.mtbf_s,
            restart_ratio=(costs.restart_s + costs.detect_s) / costs.mtbf_s,
        ),
    )


def intervals_around_s(recommendation: Recommendation, factors: Sequence[float]) -> tuple[float, ...]:
    """The interval times each of *factors*, and both optima; sorted, those that are possible (not below the bound)."""
    wanted = {recommendation.interval_s * factor for factor in factors}
    wanted |= {recommendation.interval_s, recommendation.young_s, recommendation.daly_s}
    return tuple(sorted(value for value in wanted if value >= recommendation.costs.persist_s))


# -- failure rates ---------------------------------------------------------------------------------------------------
def prior_mtbf_s(gpus: int) -> float:
    """MTBF of a job about which nothing is known but its size: one failure per 50,000 GPU-hours.

    Raises:
        ValueError: *gpus* is below 1.
    """
    _at_least_one_gpu(gpus)
    return PRIOR_GPU_HOURS * 3600.0 / gpus


def scaled_mtbf_s(mtbf_s: float, from_gpus: int, to_gpus: int) -> float:
    """MTBF with another number of GPUs that fail as often, each by itself: ``M from / to``.

    Raises:
        ValueError: an argument is out of its range.
    """
    _above_zero("MTBF", mtbf_s, "s")
    _at_least_one_gpu(from_gpus)
    _at_least_one_gpu(to_gpus)
    return mtbf_s * from_gpus / to_gpus


def estimated_mtbf_s(seen_s: float, failures: int, prior_s: float | None = None) -> float:
    """MTBF from what was seen: ``(prior + seen) / (1 + failures)``, the mean of a Gamma-Poisson estimate.

    The prior weighs as much as one failure: ten times wrong, it costs 3 to 11 % more overhead than the truth after five
    failures (simulated); right, it never costs more than 3 %.

    Args:
        seen_s: running time over which *failures* were counted.
        prior_s: MTBF believed before; None: only what was seen counts.

    Raises:
        ValueError: an argument is out of its range, or no failure was seen and there is no prior.
    """
    if failures < 0:
        raise ValueError(f"the number of failures must be 0 or above, not {failures}")
    if prior_s is not None:
        _above_zero("prior MTBF", prior_s, "s")
        if not (math.isfinite(seen_s) and seen_s >= 0):
            raise ValueError(f"the time seen must be 0 or above and finite, not {_with_unit(seen_s, 's')}")
        return (prior_s + seen_s) / (1 + failures)
    _above_zero("time seen", seen_s, "s")
    if failures == 0:
        raise ValueError("no failure was seen: an MTBF follows from that only with a prior (the number of GPUs)")
    return seen_s / failures


# -- in words --------------------------------------------------------------------------------------------------------
def explain(recommendation: Recommendation) -> tuple[str, ...]:
    """Sentences for a person: the interval with what it costs, where it comes from, and what to beware of."""
    r, costs, overhead = recommendation, recommendation.costs, recommendation.overhead
    parts = [f"{_percent(overhead.saving_ratio)} for saves", f"{_percent(overhead.redone_ratio)} for work done again"]
    if overhead.restart_ratio:
        parts.append(f"{_percent(overhead.restart_ratio)} for restarts")
    told = [
        f"Save every {interval_words(r.interval_s)}: overhead {_percent(overhead.total_ratio)} "
        f"({', '.join(parts)}), effective training time {_percent(overhead.ettr_ratio)}."
    ]
    stall = f"{costs.stall_s:g} s"
    if costs.whole_stall_s > costs.stall_s:
        stall = f"{costs.whole_stall_s:g} s ({stall} and {costs.slowdown_ratio:g} of {costs.persist_s:g} s)"
    young, daly = interval_words(r.young_s), interval_words(r.daly_s)
    points = 100 * _daly_gain_ratio(costs, r.young_s, r.daly_s)
    gain = f"{points:.2f} points of effective time" if points >= 0.01 else "less than 0.01 points of effective time"
    basis = f"a stall of {stall} and an MTBF of {mtbf_words(costs.mtbf_s)}"
    if r.formula is Formula.YOUNG:
        told.append(
            f"Young's sqrt(2 x stall x MTBF) gives {young} for {basis}; Daly's higher-order form gives {daly}, "
            f"which gains {gain}."
        )
    else:
        told.append(
            f"Daly's higher-order form gives {daly} for {basis}; Young's sqrt(2 x stall x MTBF) gives {young}, "
            f"which costs {gain}."
        )
    if r.is_bound:
        told.append(
            f"A save takes {costs.persist_s:g} s to become durable, and the next one does not begin before: "
            "the interval is that time, not the shorter optimum."
        )
    else:
        told.append(
            "The optimum is flat: an MTBF wrong by a factor of 2 adds 6 % to what saves and work done again cost."
        )
    if overhead.total_ratio > _FIRST_ORDER_HOLDS_RATIO:
        told.append(
            f"The figures above are first order, which is too dark at this failure rate: by Daly's complete model the "
            f"effective training time is {_percent(r.complete_ettr_ratio)}."
        )
    return tuple(told)


def explain_tiers(tiers: TwoTiers) -> tuple[str, ...]:
    """The same for two tiers, compared with the durable one alone."""
    alone = recommend(tiers.costs, Formula.YOUNG).overhead.total_ratio
    total = tiers.overhead.total_ratio
    told = [
        f"With snapshots in memory (stall {tiers.memory_stall_s:g} s, there after {_percent(tiers.memory_share)} of "
        f"failures): one every {interval_words(tiers.memory_interval_s)}, a durable save every "
        f"{interval_words(tiers.durable_interval_s)}; overhead {_percent(total)} instead of {_percent(alone)}."
    ]
    if tiers.is_bound:
        told.append(
            f"The durable interval is the persist time of {tiers.costs.persist_s:g} s, its optimum being shorter."
        )
    if total >= alone:
        told.append("That is no gain: leave the snapshots out.")
    return tuple(told)


def interval_words(seconds: float) -> str:
    """``0.5 s``, ``334 s (5.6 min)``, ``1,156 s (19 min)``, ``46,800 s (13.0 h)``."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = seconds / 60.0
    if minutes < 9.95:
        return f"{seconds:,.0f} s ({minutes:.1f} min)"
    return f"{seconds:,.0f} s ({minutes:.0f} min)" if minutes < 600 else f"{seconds:,.0f} s ({minutes / 60:.1f} h)"


def mtbf_words(seconds: float) -> str:
    """``45 s``, ``30.4 min``, ``3.09 h``, ``50,000 h``."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{seconds / 60:.3g} min"
    hours = seconds / 3600.0
    return f"{hours:.3g} h" if hours < 999.5 else f"{hours:,.0f} h"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


# -- checks ----------------------------------------------------------------------------------------------------------
def _above_zero(name: str, value: float, unit: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"the {name} must be above 0 and finite, not {_with_unit(value, unit)}")


def _at_least_one_gpu(gpus: int) -> None:
    if gpus < 1:
        raise ValueError(f"the number of GPUs must be 1 or above, not {gpus}")


def _with_unit(value: float, unit: str) -> str:
    return f"{value:g} {unit}".rstrip()
