"""The values of the metrics of the table, in memory. Not safe for threads: whoever owns it has the lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from steadyrun.collectors.metrics.spec import SPEC, Family, MetricType, Source

__all__ = ["Histogram", "Values"]

MOST_SERIES: Final = 256  # of one family: label values come from scripts and kernels


@dataclass(slots=True)
class Histogram:
    """``counts`` per bucket and, last, beyond all of them; not added up."""

    counts: list[int]
    total: float = 0.0


@dataclass(slots=True)
class Values:
    """By name without ``steadyrun_``, then by label values in the order of the table. Unknown names raise KeyError.

    Counters and histograms whose label values are all listed are there from the start, at 0.
    """

    numbers: dict[str, dict[tuple[str, ...], float]] = field(default_factory=dict)
    histograms: dict[str, dict[tuple[str, ...], Histogram]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, family in SPEC.items():
            if family.type is MetricType.HISTOGRAM:
                self.histograms[name] = {}
            else:
                self.numbers[name] = {}
            if family.type in (MetricType.COUNTER, MetricType.HISTOGRAM) and all(b.values for b in family.labels):
                self.prepare(name)

    def prepare(self, name: str, **known: str) -> None:
        """Have the series for each listed label value, at 0 where it is new; *known* gives values of open labels."""
        family = SPEC[name]
        for labels in family.label_sets(**known):
            if family.type is MetricType.HISTOGRAM:
                self._histogram(name, labels)
            else:
                self.numbers[name].setdefault(labels, 0.0)

    def set(self, name: str, value: float, *labels: str) -> None:
        """A gauge, or an info with value 1."""
        series = self.numbers[name]
        if labels in series or len(series) < MOST_SERIES:
            series[labels] = float(value)

    def add(self, name: str, amount: float, *labels: str) -> None:
        """To a counter; a negative amount is left out."""
        series = self.numbers[name]
        if labels in series or len(series) < MOST_SERIES:
            series[labels] = series.get(labels, 0.0) + max(amount, 0.0)

    def raise_to(self, name: str, value: float, *labels: str) -> None:
        """A counter that somebody else counts; never lets it fall."""
        series = self.numbers[name]
        if labels in series or len(series) < MOST_SERIES:
            series[labels] = max(series.get(labels, 0.0), float(value))

    def get(self, name: str, *labels: str) -> float | None:
        return self.numbers[name].get(labels)

    def drop(self, name: str, *labels: str) -> None:
        """A series that says nothing any more."""
        self.numbers[name].pop(labels, None)

    def replace(self, name: str, series: Mapping[tuple[str, ...], float]) -> None:
        """All series of a gauge anew."""
        own = self.numbers[name]
        own.clear()
        own.update(list(series.items())[:MOST_SERIES])

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Into a histogram."""
        histogram = self._histogram(name, labels)
        if histogram is not None:
            histogram.counts[bisect_left(SPEC[name].buckets, value)] += 1
            histogram.total += value

    def _histogram(self, name: str, labels: tuple[str, ...]) -> Histogram | None:
        series = self.histograms[name]
        if labels not in series and len(series) < MOST_SERIES:
            series[labels] = Histogram([0] * (len(SPEC[name].buckets) + 1))
        return series.get(labels)

    def copy(
        self, leaves_out: frozenset[Source] = frozenset()
    ) -> Iterator[tuple[Family, Mapping[tuple[str, ...], float | Histogram]]]:
        """Families that have series, in the order of the table, apart from what whoever asks does with them."""
        for name, family in SPEC.items():
            if family.source in leaves_out:
                continue
            if family.type is MetricType.HISTOGRAM:
                histograms = self.histograms[name]
                if histograms:
                    yield family, {k: Histogram(h.counts.copy(), h.total) for k, h in histograms.items()}
            elif numbers := self.numbers[name]:
                yield family, dict(numbers)
