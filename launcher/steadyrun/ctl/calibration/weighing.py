"""What rules for limits would have done in the runs that are known, and what they cost on an average day."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from steadyrun.ctl.calibration.replay import Rule, fired, fired_as_it_grew, limit_s
from steadyrun.detect.calibrate import Basis, Costs, Limit, SectionStatistics, limits_of
from steadyrun.detect.calibrate.candidates import Candidate, candidates_of, price_of
from steadyrun.detect.calibrate.following import costs_for, is_marked, not_too_short
from steadyrun.detect.calibrate.passes import RunPasses
from steadyrun.detect.calibrate.rule import MIN_EVENTS
from steadyrun.node.machine.events import Limits

__all__ = ["Section", "Weight", "proposed", "sections_of", "weigh"]

_MULTIPLE: Final = "5 x longest"


@dataclass(frozen=True, slots=True)
class Section:
    """What was seen of a section, and its limits.

    Attributes:
        doubled: the limits if as much again were seen.
        runs: in how many of the runs it was seen.
    """

    statistics: SectionStatistics
    costs: Costs
    limit: Limit
    doubled: Limit
    runs: int

    @property
    def name(self) -> str:
        return self.statistics.key.section

    @property
    def has_too_few(self) -> bool:
        return self.limit.basis in (Basis.TOO_FEW, Basis.NEVER_SEEN)

    @property
    def is_unmarked(self) -> bool:
        return self.costs.min_events > MIN_EVENTS


@dataclass(frozen=True, slots=True)
class Weight:
    """What a candidate makes of one section.

    Attributes:
        first_s: its limit for the first pass after a start.
        fired: passes of the known runs that would have been late, each a restart in vain.
        looked: those in which evidence would have been collected and time alone would not have acted.
        fired_live: late ones, had the rule followed the runs from the first pass on; None: it does not learn.
        cost_s: of all three, and of waiting for the hangs that the runs had in this section.
        needless_per_30_days, lost_s_per_day: expected; None where too little was seen, or nothing would end a hang.
    """

    candidate: Candidate
    first_s: float
    fired: int
    looked: int
    fired_live: int | None
    cost_s: float | None
    needless_per_30_days: float | None
    lost_s_per_day: float | None


def sections_of(
    statistics: Sequence[SectionStatistics], runs: Sequence[RunPasses], costs: Costs, is_of_logs: bool
) -> list[Section]:
    """*is_of_logs*: each section is what its pattern says, and nothing else."""
    out = []
    names = [s.key.section for s in statistics]
    has_own_step = any(run.has_own_step for run in runs)
    for s in statistics:
        name = s.key.section
        own = costs_for(costs, is_of_logs or is_marked(name, names, has_own_step))
        remembered = {e.run for e in (*s.durations.largest, *s.first.largest) if e.run}
        given = {run.name for run in runs if any(p.section == name for p in run.passes)}
        limit, doubled = not_too_short(limits_of(s, own)), not_too_short(limits_of(_doubled(s), own))
        out.append(Section(s, own, limit, doubled, len(remembered | given)))
    return out


def _doubled(s: SectionStatistics) -> SectionStatistics:
    out = s.scaled(2.0)
    out.durations.events, out.first.events = 2 * s.durations.events, 2 * s.first.events
    return out


def proposed(sections: Sequence[Section]) -> Limits:
    """Our hard limits, as the watchdog would have them from the file."""
    named = {s.name: s.limit.hard_s for s in sections}
    first = {s.name: s.limit.first_s for s in sections if s.statistics.first.n}
    return _table(named, first)


def _table(named: Mapping[str, float], first: Mapping[str, float]) -> Limits:
    return Limits(sections=named, first=first, accepted=frozenset({*named, *first}), calibrated=frozenset(named))


def weigh(sections: Sequence[Section], runs: Sequence[RunPasses], current: Limits) -> dict[str, list[Weight]]:
    """By section, ours first. *current*: the limits that the newest run had."""
    found = {
        s.name: {c.name: c for c in candidates_of(s.statistics, s.limit, limit_s(current, s.name))} for s in sections
    }
    out: dict[str, list[Weight]] = {s.name: [] for s in sections}
    for name in dict.fromkeys(name for candidates in found.values() for name in candidates):
        mine = {section: candidates[name] for section, candidates in found.items() if name in candidates}
        limits = _limits_of(name, mine, sections, current)
        late = fired(runs, limits)
        soft = {section: c.soft_s for section, c in mine.items() if c.soft_s is not None}
        looked = fired(runs, replace(limits, sections={**limits.sections, **soft})) - late
        rule = _rule(name, sections)
        live = None if rule is None else fired_as_it_grew(runs, rule)
        for section in sections:
            if section.name not in mine:
                continue
            candidate, n = mine[section.name], late[section.name]
            price = price_of(candidate, section.statistics, section.costs)
            hangs = sum(h.section == section.name for run in runs for h in run.hangs)
            waited_s = hangs * price.detection_s if hangs else 0.0
            cost_s = n * section.costs.restart_s + looked[section.name] * section.costs.look_s + waited_s
            is_known = not section.has_too_few
            out[section.name].append(
                Weight(
                    candidate,
                    limit_s(limits, section.name, is_first=True),
                    n,
                    looked[section.name],
                    None if live is None else live[section.name],
                    _finite(cost_s),
                    _finite(price.needless_per_30_days) if is_known else None,
                    _finite(price.lost_s_per_day) if is_known else None,
                )
            )
    return out


def _limits_of(name: str, mine: Mapping[str, Candidate], sections: Sequence[Section], current: Limits) -> Limits:
    if name == "current":
        return current
    hard = {section: c.hard_s for section, c in mine.items()}
    if name == "calibrated":
        return proposed(sections)
    if name == _MULTIPLE:
        first = {s.name: _multiple(s.statistics)[1] for s in sections if s.statistics.first.n}
        return _table({s.name: hard.get(s.name, math.inf) for s in sections}, first)
    return _table(hard, {})


def _rule(name: str, sections: Sequence[Section]) -> Rule | None:
    if name == _MULTIPLE:
        return _multiple
    if name != "calibrated":
        return None
    costs = {s.name: s.costs for s in sections}

    def calibrated(seen: SectionStatistics) -> tuple[float, float]:
        limit = not_too_short(limits_of(seen, costs.get(seen.key.section, Costs())))
        return limit.hard_s, limit.first_s

    return calibrated


def _multiple(seen: SectionStatistics) -> tuple[float, float]:
    """As other tools have it: no limit before 16 passes, then 5 times the longest of them."""
    durations, first = seen.durations, seen.first
    hard_s = 5 * durations.max_s if durations.events >= MIN_EVENTS else math.inf
    return hard_s, 5 * first.max_s if first.events else math.inf


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
