"""Durations in logarithmic buckets: a few hundred numbers stand for any number of events, and merge by addition."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Final

__all__ = ["BUCKETS_PER_OCTAVE", "Histogram"]

BUCKETS_PER_OCTAVE: Final = 16  # a bucket is 4.4 % wide
SHORTEST_S: Final = 1e-5  # a section that did nothing; below, and at 0, all is one bucket
LONGEST_S: Final = 1e8
_DROPPED: Final = 1e-3  # weight at which an aged bucket is forgotten


class Histogram:
    """Weights per bucket, in fractions once they age; bucket *i* holds ``2**(i/16) <= seconds < 2**((i+1)/16)``."""

    __slots__ = ("_sums", "_total", "_weights")

    def __init__(self, weights: Mapping[int, float] | None = None) -> None:
        self._weights: dict[int, float] = dict(weights or {})
        self._total = math.fsum(self._weights.values())
        self._sums: tuple[list[int], list[float]] | None = None  # buckets, and the weight from each on

    def __repr__(self) -> str:
        return f"Histogram({self._weights!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and self._weights == other._weights

    __hash__ = None  # type: ignore[assignment]  # mutable

    @property
    def total(self) -> float:
        """Events, each by its weight."""
        return self._total

    def add(self, seconds: float, weight: float = 1.0) -> None:
        """Count one duration.

        Raises:
            ValueError: *seconds* is negative or not a number.
        """
        if not seconds >= 0:
            raise ValueError(f"a duration must be at least 0 seconds, got {seconds}")
        index = bucket_of(seconds)
        self._weights[index] = self._weights.get(index, 0.0) + weight
        self._total += weight
        self._sums = None

    def buckets(self) -> list[tuple[float, float, float]]:
        """(from seconds, to seconds, weight) of every bucket that holds something, shortest first."""
        return [(_lower_s(i), _lower_s(i + 1), self._weights[i]) for i in sorted(self._weights)]

    def quantile_s(self, share: float) -> float:
        """The duration that *share* of the events do not exceed, within a bucket's width; NaN where there are none."""
        if not 0 <= share <= 1:
            raise ValueError(f"a share must be between 0 and 1, got {share}")
        wanted = share * self._total
        seen = 0.0
        at = math.nan
        for index in sorted(self._weights):
            weight = self._weights[index]
            at = _lower_s(index + min(1.0, max(0.0, (wanted - seen) / weight)))
            seen += weight
            if seen >= wanted:
                break
        return at

    def weight_above(self, seconds: float) -> float:
        """Weight of the durations above *seconds*; within its own bucket they are taken as spread evenly."""
        if self._sums is None:
            buckets = sorted(self._weights)
            sums = [*accumulate((self._weights[i] for i in reversed(buckets)), initial=0.0)]
            self._sums = buckets, sums[::-1]
        buckets, from_on = self._sums
        own = _position(seconds)
        index = math.floor(own)
        return from_on[bisect_right(buckets, index)] + self._weights.get(index, 0.0) * (1.0 - (own - index))

    def above(self, seconds: float) -> Histogram:
        """The buckets that hold nothing but durations above *seconds*."""
        return Histogram({i: w for i, w in self._weights.items() if _lower_s(i) > seconds})

    def log_excess(self, count: float) -> float:
        """Mean of ``log(x / x0)`` over the *count* longest durations, x0 being the one before them (Hill's statistic).

        0 where there are no more than *count* events. Exact to a bucket's width.
        """
        if not 0 < count < self._total:
            return 0.0
        left = count
        taken = 0.0  # sum of weight * index
        base = 0
        for base in sorted(self._weights, reverse=True):
            weight = self._weights[base]
            if weight > left:
                break
            taken += weight * base
            left -= weight
        return (taken + left * base - count * base) / count * _LOG_WIDTH

    def merged(self, other: Histogram) -> Histogram:
        """Both together."""
        weights = dict(self._weights)
        for index, weight in other._weights.items():
            weights[index] = weights.get(index, 0.0) + weight
        return Histogram(weights)

    def without(self, part: Histogram) -> Histogram:
        """What is left when the durations of *part*, which were all counted here too, are taken out."""
        left = {i: w - part._weights.get(i, 0.0) for i, w in self._weights.items()}
        return Histogram({i: w for i, w in left.items() if w >= _DROPPED})

    def longest_s(self, weight: float) -> float:
        """The duration that no more than *weight* of the events exceed, within a bucket's width; NaN without events."""
        return self.quantile_s(1.0 - min(1.0, weight / self._total)) if self._total else math.nan

    def scaled(self, factor: float) -> Histogram:
        """Each weight times *factor*; what has become next to nothing is left out."""
        return Histogram({i: w * factor for i, w in self._weights.items() if w * factor >= _DROPPED})

    def to_json(self) -> list[list[float]]:
        """``[[bucket, weight], ...]``, shortest first."""
        return [[i, round(self._weights[i], 4)] for i in sorted(self._weights)]

    @classmethod
    def from_json(cls, data: Any) -> Histogram:
        """Back from ``to_json``.

        Raises:
            ValueError: *data* is something else, or holds a weight that is not above 0.
        """
        try:
            weights = {int(index): float(weight) for index, weight in data}
        except (TypeError, ValueError):
            raise ValueError(f"a histogram must be a list of [bucket, weight], got {str(data)[:80]}") from None
        for index, weight in weights.items():
            if not (0 < weight < math.inf and bucket_of(0.0) <= index <= bucket_of(math.inf)):
                raise ValueError(f"a histogram cannot hold weight {weight} in bucket {index}")
        return cls(weights)


_LOG_WIDTH: Final = math.log(2) / BUCKETS_PER_OCTAVE


def bucket_of(seconds: float) -> int:
    """Index of the bucket that *seconds* falls into."""
    return math.floor(_position(seconds))


def _position(seconds: float) -> float:
    return math.log2(min(max(seconds, SHORTEST_S), LONGEST_S)) * BUCKETS_PER_OCTAVE


def _lower_s(position: float) -> float:
    return float(2.0 ** (position / BUCKETS_PER_OCTAVE))
