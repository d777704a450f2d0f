"""What is kept of a section's durations over ranks, attempts and runs: statistics, never the limits made of them.

An *event* is one pass of a section by the job: the longest of its ranks' durations, as ranks that wait
for each other are not independent samples. First passes after a start are kept apart: they compile, connect, warm up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from steadyrun.core.sections import OUT_OF_SECTION
from steadyrun.detect.calibrate.histogram import Histogram

__all__ = [
    "FORGOTTEN",
    "HALF_LIFE_EVENTS",
    "OUT_OF_SECTION",
    "STATISTICS_SCHEMA",
    "Durations",
    "Extreme",
    "History",
    "SectionKey",
    "SectionStatistics",
]

STATISTICS_SCHEMA: Final = "steadyrun.section-statistics/1"
HALF_LIFE_EVENTS: Final = 10_000.0
HALF_LIFE_STARTS: Final = 100.0  # first passes: one per start
_EXTREMES: Final = 8  # longest durations that are kept with their rank and step
FORGOTTEN: Final = 1 / 16  # weight from which a longest duration is remembered: for four half-lives
_AGED_EVERY: Final = 64  # events, to spare the walk over all buckets
_RUNS: Final = 200  # names of runs that are remembered


@dataclass(frozen=True, slots=True, order=True)
class SectionKey:
    """What durations must share to be comparable. ``configuration``: a hash of whatever changes their length."""

    section: str
    world_size: int
    configuration: str = ""


@dataclass(frozen=True, slots=True)
class Extreme:
    """One of the longest durations. ``weight``: 1 when new, halved with each half-life."""

    seconds: float
    rank: int | None = None
    step: int | None = None
    run: str = ""
    weight: float = 1.0


class Durations:
    """Durations that fade: each weighs 1 when it comes and half as much *half_life* later ones on.

    Attributes:
        total_s: sum of the durations, by weight.
        events: ever counted, not faded.
        largest: the longest of those remembered, longest first. One without rank and step is a bucket's upper end.
    """

    __slots__ = ("_fresh", "_half_life", "_histogram", "events", "largest", "total_s")

    def __init__(self, half_life: float = HALF_LIFE_EVENTS) -> None:
        if not half_life > 0:
            raise ValueError(f"half_life must be above 0 events, got {half_life}")
        self._half_life = half_life
        self._histogram = Histogram()
        self._fresh = 0  # counted since the others were last faded
        self.largest: tuple[Extreme, ...] = ()
        self.total_s = 0.0
        self.events = 0

    @property
    def n(self) -> float:
        """Events by weight: in fractions, and at most 1.44 half-lives."""
        return self._histogram.total

    @property
    def histogram(self) -> Histogram:
        """The buckets, for reading."""
        return self._histogram

    @property
    def max_s(self) -> float:
        """The longest duration remembered; NaN where there is none."""
        return self.largest[0].seconds if self.largest else math.nan

    @property
    def mean_s(self) -> float:
        return self.total_s / self.n if self.n else math.nan

    @property
    def median_s(self) -> float:
        return self.quantile_s(0.5)

    def quantile_s(self, share: float) -> float:
        """The duration that *share* of the events do not exceed, never above ``max_s``; NaN without events."""
        return min(self._histogram.quantile_s(share), self.max_s)

    def weight_above(self, seconds: float) -> float:
        """How many events were longer, by weight."""
        return self._histogram.weight_above(seconds) if seconds < self.max_s else 0.0

    def add(self, extreme: Extreme) -> float:
        """Count one duration; answers by how much all earlier ones fade now (1: not this time).

        Raises:
            ValueError: it is negative or not a number.
        """
        self._histogram.add(extreme.seconds)
        if len(self.largest) < _EXTREMES or extreme.seconds > self.largest[-1].seconds:
            self.largest = _longest((*self.largest, extreme))
        self.total_s += extreme.seconds
        self.events += 1
        self._fresh += 1
        if self._fresh < _AGED_EVERY:
            return 1.0
        self._fresh, fresh = 0, self._fresh
        return self._fade(fresh)

    def factor_after(self, events: float, half_life: float | None = None) -> float:
        """What those counted so far weigh once *events* more have been counted, by what they weigh now."""
        return float(0.5 ** (events / (half_life or self._half_life)))

    def aged(self, events: float, half_life: float | None = None) -> Durations:
        """As they stand once *events* more have been counted elsewhere."""
        out = self.scaled(1.0)
        out._fade(events, half_life)
        return out

    def merged(self, newer: Durations) -> Durations:
        """With later ones, by whose number these fade."""
        out = self.aged(newer.events)
        out._histogram = out._histogram.merged(newer._histogram)
        out.largest = _longest((*out.largest, *newer.largest))
        out.total_s += newer.total_s
        out.events += newer.events
        return out

    def scaled(self, factor: float) -> Durations:
        """A copy in which each duration counts *factor* times; what was remembered as longest stays so."""
        out = Durations(self._half_life)
        out._histogram = self._histogram.scaled(factor)
        out.largest, out.total_s, out.events, out._fresh = self.largest, self.total_s * factor, self.events, self._fresh
        return out

    def to_json(self) -> dict[str, Any]:
        return {
            "events": self.events,
            "n": round(self.n, 1),
            "total_s": round(self.total_s, 6),
            "half_life_events": self._half_life,
            "buckets": self._histogram.to_json(),
            "largest": [
                {"s": round(e.seconds, 6), "rank": e.rank, "step": e.step, "run": e.run, "weight": round(e.weight, 4)}
                for e in self.largest
            ],
        }

    @classmethod
    def from_json(cls, data: Any) -> Durations:
        """Back from ``to_json``.

        Raises:
            ValueError: *data* is something else; the message names the field.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"durations must be an object, got {str(data)[:80]}")
        out = cls(_number(data, "half_life_events", HALF_LIFE_EVENTS))
        out._histogram = Histogram.from_json(data.get("buckets", []))
        out.largest = _longest(_extremes_of(data.get("largest", [])))
        out.total_s = _number(data, "total_s")
        out.events = int(_number(data, "events"))
        if bool(out.n) != bool(out.largest):
            raise ValueError("durations need both 'buckets' and 'largest', or neither")
        return out

    def _fade(self, events: float, half_life: float | None = None) -> float:
        factor = self.factor_after(events, half_life)
        self._histogram = self._histogram.scaled(factor)
        self.total_s *= factor
        kept = [replace(e, weight=e.weight * factor) for e in self.largest if e.weight * factor >= FORGOTTEN]
        # The longest may all be forgotten while many that are a little shorter, and were never listed, are not.
        above = 0.0
        for low_s, high_s, weight in reversed(self._histogram.buckets()):
            above += weight
            if kept and kept[0].seconds >= low_s:
                break
            if above >= FORGOTTEN:
                kept.append(Extreme(high_s, weight=min(1.0, above)))
                break
        self.largest = _longest(kept)
        if not kept:
            self._histogram, self.total_s = Histogram(), 0.0
        return factor


@dataclass(slots=True)
class SectionStatistics:
    """Of one section at one world size and configuration.

    Attributes:
        durations: all passes but the first after each start; first: those.
        spared: of ``durations``, the passes in which the ranks were looked at and left alone, and which ended well.
        observed_s: wall time of the job in which they were seen, faded with them; 0 where it is not known.
    """

    key: SectionKey
    durations: Durations
    first: Durations
    observed_s: float = 0.0
    spared: Histogram = field(default_factory=Histogram)

    @classmethod
    def empty(cls, key: SectionKey, half_life_events: float = HALF_LIFE_EVENTS) -> SectionStatistics:
        return cls(key, Durations(half_life_events), Durations(HALF_LIFE_STARTS))

    @property
    def n(self) -> float:
        """Passes that count, by weight, first ones apart."""
        return self.durations.n

    @property
    def events_per_day(self) -> float:
        """How often the section is passed in a day of the job; NaN without passes."""
        return 86400.0 * self.n / self.watched_s if self.n else math.nan

    @property
    def watched_s(self) -> float:
        """The time that these passes stand for, faded with them."""
        return max(self.observed_s, self.durations.total_s, 1e-9)

    @property
    def longest_spared_s(self) -> float:
        """The longest of the spared passes that is remembered, within a bucket's width; NaN without any."""
        return min(self.spared.longest_s(FORGOTTEN), self.durations.max_s)

    @property
    def not_spared(self) -> Histogram:
        """Of ``durations``, the passes that no look has spared."""
        return self.durations.histogram.without(self.spared) if self.spared.total else self.durations.histogram

    @property
    def longest_not_spared_s(self) -> float:
        """The longest of those; NaN without any."""
        if not self.spared.total:
            return self.durations.max_s
        return min(self.not_spared.longest_s(FORGOTTEN), self.durations.max_s)

    def observe(
        self,
        seconds: float,
        rank: int | None = None,
        step: int | None = None,
        run: str = "",
        is_first: bool = False,
        was_spared: bool = False,
    ) -> None:
        """Count one pass of the section by the job: the duration of its slowest rank, and which it was.

        Raises:
            ValueError: *seconds* is negative or not a number.
        """
        extreme = Extreme(seconds, rank, step, run)
        if is_first:
            self.first.add(extreme)
            return
        factor = self.durations.add(extreme)
        if was_spared:
            self.spared.add(seconds)
        if factor != 1.0:
            self.observed_s *= factor
            self.spared = self.spared.scaled(factor)

    def observe_wall(self, seconds: float) -> None:
        """The job ran for *seconds* more in which this section could have been passed."""
        self.observed_s += max(0.0, seconds)

    def aged(self, events: float, half_life_events: float = HALF_LIFE_EVENTS) -> SectionStatistics:
        """As these stand once *events* more passes have been counted elsewhere."""
        factor = 0.5 ** (events / half_life_events)
        durations = self.durations.aged(events, half_life_events)
        return replace(
            self,
            durations=durations,
            first=self.first.scaled(1.0),
            observed_s=self.observed_s * factor,
            spared=self.spared.scaled(factor) if durations.n else Histogram(),
        )

    def merged(self, newer: SectionStatistics) -> SectionStatistics:
        """With those of a later run, by whose passes these fade.

        Raises:
            ValueError: they are of another section, world size or configuration.
        """
        if newer.key != self.key:
            raise ValueError(f"cannot merge statistics of {newer.key} into those of {self.key}")
        durations = self.durations.merged(newer.durations)
        left = self.durations.aged(newer.durations.events)
        observed_s = self.observed_s * (left.n / self.n if self.n else 1.0) + newer.observed_s
        spared = self.spared.scaled(self.durations.factor_after(newer.durations.events)) if left.n else Histogram()
        return SectionStatistics(
            self.key, durations, self.first.merged(newer.first), observed_s, spared.merged(newer.spared)
        )

    def scaled(self, factor: float) -> SectionStatistics:
        """As if the same had been seen *factor* times: what a limit becomes with that many more events."""
        return SectionStatistics(
            self.key,
            self.durations.scaled(factor),
            self.first.scaled(factor),
            self.observed_s * factor,
            self.spared.scaled(factor),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "section": self.key.section,
            "world_size": self.key.world_size,
            "configuration": self.key.configuration,
            "observed_s": round(self.observed_s, 3),
            "durations": self.durations.to_json(),
            "first": self.first.to_json(),
            "spared": self.spared.to_json(),
        }

    @classmethod
    def from_json(cls, data: Any) -> SectionStatistics:
        """Back from ``to_json``.

        Raises:
            ValueError: *data* is something else; the message names the field.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("section"), str):
            raise ValueError(f"statistics of a section must be an object with a 'section', got {str(data)[:80]}")
        key = SectionKey(data["section"], int(_number(data, "world_size")), str(data.get("configuration", "")))
        durations, first = Durations.from_json(data.get("durations")), Durations.from_json(data.get("first"))
        spared = Histogram.from_json(data.get("spared", []))
        return cls(key, durations, first, _number(data, "observed_s"), spared)


class History:
    """Statistics of several sections, with the names of the runs they come from, so that none is counted twice."""

    def __init__(self, sections: Iterable[SectionStatistics] = (), runs: Iterable[str] = ()) -> None:
        self._sections = {s.key: s for s in sections}
        self._runs = list(runs)[-_RUNS:]

    @property
    def runs(self) -> Sequence[str]:
        """Names of the runs that were counted, oldest first, the newest 200."""
        return tuple(self._runs)

    def __iter__(self) -> Iterator[SectionStatistics]:
        return iter([self._sections[k] for k in sorted(self._sections)])

    def __len__(self) -> int:
        return len(self._sections)

    def get(self, key: SectionKey) -> SectionStatistics | None:
        return self._sections.get(key)

    def of(self, key: SectionKey) -> SectionStatistics:
        """The statistics under *key*, made empty where there are none yet."""
        found = self._sections.get(key)
        if found is None:
            found = self._sections[key] = SectionStatistics.empty(key)
        return found

    def forget(self, section: str) -> None:
        """All that is known of *section*, at any world size."""
        self._sections = {k: s for k, s in self._sections.items() if k.section != section}

    def of_world(self, world_size: int, configuration: str = "") -> list[SectionStatistics]:
        """Those of one world size and configuration, by name."""
        return [s for s in self if (s.key.world_size, s.key.configuration) == (world_size, configuration)]

    def note_run(self, run: str) -> None:
        """*run* has been counted."""
        if run not in self._runs:
            self._runs = [*self._runs, run][-_RUNS:]

    def merged(self, newer: History) -> History:
        """With a later history. A run that both know is counted twice: look at ``runs`` before."""
        sections = dict(self._sections)
        for s in newer:
            old = sections.get(s.key)
            sections[s.key] = s if old is None else old.merged(s)
        out = History(sections.values(), self._runs)
        for run in newer.runs:
            out.note_run(run)
        return out

    def to_json(self) -> dict[str, Any]:
        return {"schema": STATISTICS_SCHEMA, "runs": list(self._runs), "sections": [s.to_json() for s in self]}

    @classmethod
    def from_json(cls, data: Any) -> History:
        """Back from ``to_json``.

        Raises:
            ValueError: *data* has another schema or does not hold what it should.
        """
        if not isinstance(data, Mapping) or data.get("schema") != STATISTICS_SCHEMA:
            raise ValueError(f"not statistics of sections: the schema is not {STATISTICS_SCHEMA!r}")
        sections, runs = data.get("sections", []), data.get("runs", [])
        if not isinstance(sections, list) or not isinstance(runs, list):
            raise ValueError("'sections' and 'runs' must be lists")
        return cls((SectionStatistics.from_json(s) for s in sections), (str(r) for r in runs))


def _longest(extremes: Iterable[Extreme]) -> tuple[Extreme, ...]:
    return tuple(sorted(extremes, key=lambda e: -e.seconds)[:_EXTREMES])


def _extremes_of(data: Any) -> list[Extreme]:
    try:
        found = [
            Extreme(float(e["s"]), e.get("rank"), e.get("step"), str(e.get("run", "")), float(e.get("weight", 1.0)))
            for e in data
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"'largest' must be a list of objects with 's', got {str(data)[:80]}") from None
    if not all(0 <= e.seconds < math.inf for e in found):
        raise ValueError(f"'largest' holds a duration that is none: {str(data)[:80]}")
    return found


def _number(data: Mapping[str, Any], name: str, default: float = 0.0) -> float:
    value = data.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name!r} must be a number of at least 0, got {value!r}")
    return float(value)
