"""The limit that loses least: hangs that are waited for against healthy passes that are taken for hangs.

A limit T costs ``hangs_per_day * T`` for waiting and ``events_per_day * P(longer than T) * restart_s`` for needless
restarts. Beyond the longest of n durations, u, their tail is taken for Pareto's, ``P(> t) = (u / t)**alpha / (n + 1)``.
The loss is least at ``u * (alpha * events_per_day * restart_s / ((n + 1) * hangs_per_day * u))**(1 / (alpha + 1))``,
which falls by itself as n grows, and with a cheaper restart. A multiple of the longest duration does neither: the
passes that cause false alarms, one in thousands, are not among the first hundred.

The soft limit has the price of a look at the ranks in place of a restart: evidence is collected there, and only
evidence of a hang allows to act. It may lie below durations that were seen, where a count of them takes the tail's
place.

What a look may take for a hang is above all the kind of slowness that none has met yet. Passes that a look has spared
say nothing of how often that comes: they are left out there. Their like is known to be spared, so that it costs little
more than the look.

Passes far longer than most, *strays*, are of another kind than these, and no draw from their tail: something happened
beside the work. They are expected as often as the clock says, not as passes follow each other, and seldom until they
have come a few times: one stall in the first minute of fast steps is not thousands a day. Else one that nobody has
looked at, or that was just too short for it, made the next real hang wait for minutes.

At the hard limit time alone acts, so it lies beyond all that was seen; it has to wait only for those hangs that
evidence does not show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from steadyrun.detect.calibrate.histogram import BUCKETS_PER_OCTAVE, Histogram
from steadyrun.detect.calibrate.statistics import FORGOTTEN, Durations, SectionStatistics

__all__ = [
    "MIN_EVENTS",
    "MIN_UNMARKED_EVENTS",
    "Basis",
    "Costs",
    "Limit",
    "Looks",
    "Tail",
    "limits_of",
    "share_above",
    "tail_of",
]

MIN_EVENTS: Final = 16
MIN_UNMARKED_EVENTS: Final = 1000
_ALPHA: Final = 2.5  # taken for granted, with the weight of this many observations:
_ALPHA_OBSERVATIONS: Final = 20.0
_ALPHA_RANGE: Final = (
    1.2,
    3.5,
)  # of stalls on shared storage; beyond, what is seen is noise and tells nothing of a tail
_ALPHA_HARD: Final = 3.0  # at most, where a mistake costs a restart
_HILL_FROM: Final = 30  # events below which the tail's shape is not looked at
_SOFT_MEDIANS: Final = 2.0
_SHORTEST_S: Final = 1e-3  # soft limit
_NEVER_PER_DAY: Final = 1e-9  # hangs that looks find: so few that no look is worth its price
_MEDIANS: Final = 3.0
_MAXIMA: Final = 1.5
_FIRST_MAXIMA: Final = 3.0
_STRAY: Final = 3.0  # times the upper quartile: beyond, passes are of another kind than most
_UPPER_QUARTILE: Final = 0.75
# Taken for granted without a stray when one was seen; divided by their number, so that what comes again and again is
# soon taken for what it is.
_WATCHED_BEFORE_S: Final = 6 * 3600.0
_BUCKET: Final = 2.0 ** (1.0 / BUCKETS_PER_OCTAVE)
_DAY_S: Final = 86400.0


@dataclass(frozen=True, slots=True)
class Costs:
    """What waiting and acting in vain cost.

    Attributes:
        restart_s: a restart, from the order to the first new step, and the work it repeats.
        hangs_per_day: expected.
        evidence_error: share of healthy but slow passes that the evidence at a soft limit takes for a hang.
        evidence_sensitivity: share of hangs that it shows.
        spared_error: the first of these where an earlier look has spared passes that were as long.
        evidence_s: training time that collecting this evidence costs, s. The job stands still anyway, so it is little.
        min_events: below, ``cap_s`` is the limit. 1000 (``MIN_UNMARKED_EVENTS``) for the steps of a job that marks no
            sections: what it does now and then, a checkpoint, an evaluation, is not among its first hundred.
        cap_s: the limit until then, and the highest that cost alone may choose; durations seen may raise it.
        first_cap_s: the least for a first pass.
    """

    restart_s: float = 600.0
    hangs_per_day: float = 1.0
    evidence_error: float = 0.02
    evidence_sensitivity: float = 0.8
    spared_error: float = 0.0002
    evidence_s: float = 0.05
    min_events: int = MIN_EVENTS
    cap_s: float = 1800.0
    first_cap_s: float = 900.0

    def __post_init__(self) -> None:
        for name in ("restart_s", "hangs_per_day", "cap_s", "first_cap_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        for name in ("evidence_error", "spared_error"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be between 0 and 1, got {getattr(self, name)}")
        if not 0 <= self.evidence_sensitivity < 1:
            raise ValueError(f"evidence_sensitivity must be at least 0 and below 1, got {self.evidence_sensitivity}")
        if self.min_events < MIN_EVENTS:
            raise ValueError(f"min_events must be at least {MIN_EVENTS}, got {self.min_events}")
        if not 0 <= self.evidence_s < math.inf:
            raise ValueError(f"evidence_s must be at least 0 seconds, got {self.evidence_s}")

    @property
    def look_s(self) -> float:
        """What one healthy pass beyond the soft limit costs on average."""
        return self.evidence_s + self.evidence_error * self.restart_s

    @property
    def look_again_s(self) -> float:
        """The same where the like has been spared before."""
        return self.evidence_s + self.spared_error * self.restart_s


class Basis(str, Enum):
    """What decided about a hard limit."""

    NEVER_SEEN = "never_seen"
    TOO_FEW = "too_few"
    COST = "cost"
    MEDIAN = "median"  # three times
    MAXIMUM = "maximum"  # half as much again as the longest
    CAP = "cap"


@dataclass(frozen=True, slots=True)
class Tail:
    """How durations go on beyond the longest seen: ``P(> t) = share * (t / from_s)**-alpha``."""

    from_s: float
    share: float
    alpha: float

    def survival(self, seconds: float) -> float:
        """Share of passes longer than *seconds*, which is at least ``from_s``."""
        return self.share * math.pow(seconds / self.from_s, -self.alpha)


@dataclass(frozen=True, slots=True)
class Limit:
    """A section's limits.

    Attributes:
        soft_s: look, and act on evidence; never above ``hard_s``.
        hard_s: act.
        first_s: act, on the first pass after a start.
        n: passes they rest on, by weight.
        alpha: of the tail; NaN where there is none yet.
        why: a sentence.
    """

    soft_s: float
    hard_s: float
    first_s: float
    n: float
    alpha: float
    basis: Basis
    why: str


def limits_of(statistics: SectionStatistics, costs: Costs = Costs()) -> Limit:
    """The limits of least expected loss for a section, from what was seen of it."""
    durations, n = statistics.durations, statistics.n
    first_s = _first_limit_s(statistics, costs)
    # Passes fade: the first 1,000 weigh 967. Once next to nothing is left of them they count as too few again.
    if durations.events < costs.min_events or round(n) < MIN_EVENTS:
        hard_s = max(costs.cap_s, _FIRST_MAXIMA * durations.max_s) if n else costs.cap_s
        basis = Basis.TOO_FEW if n else Basis.NEVER_SEEN
        seen = (
            f"seen {durations.events} times, {costs.min_events} are needed" if n else "never seen after its first pass"
        )
        return Limit(hard_s, hard_s, max(first_s, hard_s), n, math.nan, basis, f"{seen}: the cap")
    tail = tail_of(durations)
    per_day = statistics.events_per_day
    hard_s, basis = _hard_limit_s(durations, tail, per_day, costs)
    soft_s = min(hard_s, _soft_limit_s(statistics, costs))
    return Limit(soft_s, hard_s, max(first_s, hard_s), n, tail.alpha, basis, _WHY[basis])


def tail_of(durations: Durations) -> Tail:
    """Pareto's tail beyond the longest of *durations*, which must not be empty.

    alpha is Hill's estimate from the ``1.5 * sqrt(n)`` longest, drawn towards 2.5 as 20 observations would.
    """
    if not durations.n > 0:
        raise ValueError("no durations, no tail")
    return _tail_of(durations.histogram, durations.n, durations.max_s)


def _tail_of(histogram: Histogram, n: float, longest_s: float) -> Tail:
    count = math.floor(1.5 * math.sqrt(n)) if n >= _HILL_FROM else 0
    excess = count * histogram.log_excess(count) + _ALPHA_OBSERVATIONS / _ALPHA
    low, high = _ALPHA_RANGE
    alpha = min(max((count + _ALPHA_OBSERVATIONS) / excess, low), high)
    return Tail(max(longest_s, 1e-9), 1.0 / (n + 1.0), alpha)


def share_above(durations: Durations, tail: Tail, seconds: float) -> float:
    """Share of passes expected to be longer than *seconds*: counted as far as any was seen, then the tail's."""
    if seconds >= tail.from_s:
        return tail.survival(seconds)
    return min(1.0, (durations.weight_above(seconds) + 1.0) / (durations.n + 1.0))


class Looks:
    """How often the ranks of a healthy job would be looked at because of a soft limit. *statistics* must hold passes.

    Attributes:
        tail: of the passes that no look has spared, strays left out.
    """

    def __init__(self, statistics: SectionStatistics) -> None:
        self._n, self._events_per_day = statistics.n, statistics.events_per_day
        unmet = statistics.not_spared
        strays = unmet.above(_STRAY * unmet.quantile_s(_UPPER_QUARTILE)) if unmet.total else Histogram()
        self._usual = unmet.without(strays)
        longest_s = statistics.longest_not_spared_s
        # Without any, all were spared.
        usual_s = (
            min(self._usual.longest_s(FORGOTTEN), longest_s) if self._usual.total else statistics.durations.median_s
        )
        self.tail = _tail_of(self._usual, self._n, usual_s)
        self._strays = _Strays.of(strays, longest_s, statistics.watched_s)
        self._spared = _Strays.of(statistics.spared, statistics.longest_spared_s, statistics.watched_s)

    def new_per_day(self, seconds: float) -> float:
        """Passes longer than *seconds* of a kind that no look has met."""
        strays = 0.0 if self._strays is None else self._strays.per_day(seconds)
        if seconds >= self.tail.from_s:
            return self._events_per_day * self.tail.survival(seconds) + strays
        usual = min(1.0, (self._usual.weight_above(seconds) + 1.0) / (self._n + 1.0))
        return self._events_per_day * usual + strays

    def again_per_day(self, seconds: float) -> float:
        """Passes longer than *seconds* of a kind that a look has spared."""
        return 0.0 if self._spared is None else self._spared.per_day(seconds)

    def lost_s_per_day(self, seconds: float, costs: Costs) -> float:
        """What they cost."""
        return costs.look_s * self.new_per_day(seconds) + costs.look_again_s * self.again_per_day(seconds)

    @property
    def longest_s(self) -> list[float]:
        """The longest of each kind that was seen: what is expected falls by a jump there, from counts to a tail."""
        kinds = (self._strays, self._spared)
        return [self.tail.from_s, *(k.tail.from_s for k in kinds if k is not None)]

    def until_s(self, costs: Costs) -> float:
        """A limit that is certainly not below the best.

        Each kind for itself would be best off at some limit; the sum of the three is best off at less than twice the
        highest of these, as each falls with a power of the limit.
        """
        found = costs.evidence_sensitivity * costs.hangs_per_day
        at_s = [_cheapest_s(self.tail, self._events_per_day, costs.look_s, found)]
        if self._strays is not None:
            at_s.append(_cheapest_s(self._strays.tail, 1.0, costs.look_s, found))
        if self._spared is not None:
            at_s.append(_cheapest_s(self._spared.tail, 1.0, costs.look_again_s, found))
        return 2.0 * max(at_s)


@dataclass(frozen=True, slots=True)
class _Strays:
    """Passes that are expected by the clock.

    Attributes:
        weights: of those that were seen; each_per_day: how many a day one of them stands for.
        tail: beyond the longest, in passes a day.
    """

    weights: Histogram
    each_per_day: float
    tail: Tail

    @classmethod
    def of(cls, weights: Histogram, longest_s: float, watched_s: float) -> _Strays | None:
        """Of those seen in *watched_s*; None: there are none."""
        if not weights.total:
            return None
        each_per_day = _DAY_S / (watched_s + _WATCHED_BEFORE_S / weights.total)
        alpha = _tail_of(weights, weights.total, 1.0).alpha
        return cls(weights, each_per_day, Tail(longest_s, each_per_day * min(1.0, weights.total), alpha))

    def per_day(self, seconds: float) -> float:
        if seconds >= self.tail.from_s:
            return self.tail.survival(seconds)
        return max(self.tail.share, self.each_per_day * self.weights.weight_above(seconds))


def _cheapest_s(tail: Tail, events_per_day: float, price_s: float, hangs_per_day: float) -> float:
    """Where ``hangs_per_day * T + events_per_day * P(> T) * price_s`` is least, T at or beyond the tail's start."""
    ratio = tail.alpha * events_per_day * price_s * tail.share / (hangs_per_day * tail.from_s)
    return tail.from_s * math.pow(max(1.0, ratio), 1.0 / (tail.alpha + 1.0))


def _soft_limit_s(statistics: SectionStatistics, costs: Costs) -> float:
    least_s = max(_SOFT_MEDIANS * statistics.durations.median_s, _SHORTEST_S)
    found = costs.evidence_sensitivity * costs.hangs_per_day
    if found < _NEVER_PER_DAY:
        return math.inf
    looks = Looks(statistics)
    count = math.ceil(math.log(max(1.0, looks.until_s(costs) / least_s), _BUCKET))
    tried: list[float] = [least_s * _BUCKET**i for i in range(count + 1)]
    # A little beyond them, as their like are not all shorter.
    tried += [s * _BUCKET for s in looks.longest_s if s > least_s]
    return min(tried, key=lambda at_s: found * at_s + looks.lost_s_per_day(at_s, costs))


def _hard_limit_s(durations: Durations, tail: Tail, events_per_day: float, costs: Costs) -> tuple[float, Basis]:
    missed = (1.0 - costs.evidence_sensitivity) * costs.hangs_per_day
    cautious = replace(tail, alpha=min(tail.alpha, _ALPHA_HARD))
    cost_s = _cheapest_s(cautious, events_per_day, costs.restart_s, missed)
    best_s, basis = (cost_s, Basis.COST) if cost_s < costs.cap_s else (costs.cap_s, Basis.CAP)
    for least_s, why in (
        (_MEDIANS * durations.median_s, Basis.MEDIAN),
        (_MAXIMA * durations.max_s, Basis.MAXIMUM),
    ):
        if least_s > best_s:
            best_s, basis = least_s, why
    return best_s, basis


def _first_limit_s(statistics: SectionStatistics, costs: Costs) -> float:
    """Three times the longest first pass, never under the cap; by cost like any other once 16 starts were seen."""
    first = statistics.first
    if not first.n:
        return costs.first_cap_s
    seen_s = _FIRST_MAXIMA * first.max_s
    if round(first.n) < MIN_EVENTS or not statistics.observed_s:
        return max(seen_s, costs.first_cap_s)
    per_day = _DAY_S * first.n / statistics.observed_s
    cost_s = _cheapest_s(tail_of(first), per_day, costs.restart_s, costs.hangs_per_day)
    return max(seen_s, min(cost_s, costs.first_cap_s))


_WHY: Final = {
    Basis.COST: "waiting for a hang and restarting in vain cost least together",
    Basis.MEDIAN: "three times the median; cost alone would choose less",
    Basis.MAXIMUM: "half as much again as the longest seen; cost alone would choose less",
    Basis.CAP: "the cap; cost alone would choose more",
}
