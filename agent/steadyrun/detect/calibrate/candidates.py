"""What other limits for the same section would cost: the one in force, and those that other tools would choose."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from steadyrun.detect.calibrate.rule import Costs, Limit, Looks, share_above, tail_of
from steadyrun.detect.calibrate.statistics import SectionStatistics

__all__ = ["Candidate", "Price", "candidates_of", "price_of"]

_NVRX_MAXIMA: Final = 5.0  # safety_factor of nvidia-resiliency-ext
_NCCL_S: Final = 600.0  # torch's default for NCCL process groups
_GLOO_S: Final = 1800.0  # and for all others


@dataclass(frozen=True, slots=True)
class Candidate:
    """A limit with the name of the rule it comes from; without ``soft_s`` time alone acts."""

    name: str
    hard_s: float
    soft_s: float | None = None

    def would_fire(self, seconds: float) -> bool:
        """Whether a healthy pass of this length would have been stopped by time alone."""
        return seconds > self.hard_s

    def would_look(self, seconds: float) -> bool:
        """Whether evidence would have been collected in a pass of this length."""
        return self.soft_s is not None and seconds > self.soft_s


@dataclass(frozen=True, slots=True)
class Price:
    """What a candidate is expected to cost.

    Attributes:
        detection_s: from the beginning of a pass that hangs until the order to act, on average.
        needless_per_30_days: restarts of healthy passes.
        looks_per_day: collections of evidence in healthy passes.
        lost_s_per_day: waiting, needless restarts and looks together.
    """

    candidate: Candidate
    detection_s: float
    needless_per_30_days: float
    looks_per_day: float
    lost_s_per_day: float


def candidates_of(
    statistics: SectionStatistics, limit: Limit, current: Candidate | float | None = None
) -> list[Candidate]:
    """Ours (*limit*), the *current* one where there is one, 5 times the longest pass, and torch's two defaults."""
    out = [Candidate("calibrated", limit.hard_s, limit.soft_s if limit.soft_s < limit.hard_s else None)]
    if isinstance(current, Candidate):
        out.append(current)
    elif current is not None:
        out.append(Candidate("current", current))
    if statistics.n:
        out.append(Candidate("5 x longest", _NVRX_MAXIMA * statistics.durations.max_s))
    return [*out, Candidate("NCCL default", _NCCL_S), Candidate("gloo default", _GLOO_S)]


def price_of(candidate: Candidate, statistics: SectionStatistics, costs: Costs) -> Price:
    """Expected cost by the same model as ``limits_of``; NaN for a section that was never passed.

    A limit of ``inf`` costs infinitely much: a hang is never found.
    """
    if not statistics.n:
        return Price(candidate, candidate.hard_s, math.nan, math.nan, math.nan)
    above = share_above(statistics.durations, tail_of(statistics.durations), candidate.hard_s)
    hard = statistics.events_per_day * above
    if candidate.soft_s is None:
        looked, detection_s, needless = 0.0, candidate.hard_s, hard
    else:
        shown, looks = costs.evidence_sensitivity, Looks(statistics)
        new, again = looks.new_per_day(candidate.soft_s), looks.again_per_day(candidate.soft_s)
        looked = new + again
        detection_s = shown * candidate.soft_s + (1.0 - shown) * candidate.hard_s
        needless = costs.evidence_error * new + costs.spared_error * again + (1.0 - costs.evidence_error) * hard
    lost_s = costs.hangs_per_day * detection_s + needless * costs.restart_s + looked * costs.evidence_s
    return Price(candidate, detection_s, 30.0 * needless, looked, lost_s)
