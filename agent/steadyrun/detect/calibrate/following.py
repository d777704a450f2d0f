"""Limits that follow what is seen: when they are made anew, of which sections, and how short they may become.

The same rules make the limits of a live run and those that ``steadyctl calibrate-timeouts`` shows and writes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from steadyrun.core.sections import EVALUATION, OUT_OF_SECTION, SETUP, STEP, TEARDOWN
from steadyrun.detect.calibrate.rule import MIN_UNMARKED_EVENTS, Basis, Costs, Limit, limits_of
from steadyrun.detect.calibrate.statistics import SectionStatistics

__all__ = [
    "LEAST_HARD_S",
    "LEAST_SOFT_S",
    "ONCE_A_START",
    "Followed",
    "Follower",
    "costs_for",
    "has_grown",
    "is_marked",
    "not_too_short",
]

LEAST_SOFT_S: Final = 1.0  # a look takes about as long
# A machine holds a process up for seconds now and then, whatever it does: short sections know nothing of that.
LEAST_HARD_S: Final = 30.0
ONCE_A_START: Final = frozenset({SETUP, TEARDOWN})
_GROWTH: Final = 1.05  # limits follow when this much more was seen, or the longest pass is longer


def is_marked(section: str, seen: Collection[str], has_own_step: bool) -> bool:
    """Whether the passes of *section* are all of one kind, to judge by the sections that were *seen*.

    The time between steps of a script that does not say where it evaluates holds evaluations, unseen among the first
    hundreds of steps. A section of its own for the step keeps them out of that, though not out of the gaps.
    """
    if section == STEP and has_own_step:
        return True
    return section not in (STEP, OUT_OF_SECTION) or any(name.lower() in EVALUATION for name in seen)


def costs_for(costs: Costs, marked: bool) -> Costs:
    """What a section's limits are to be made with."""
    return costs if marked else replace(costs, min_events=max(costs.min_events, MIN_UNMARKED_EVENTS))


def not_too_short(limit: Limit) -> Limit:
    """As it may be applied."""
    hard_s = max(limit.hard_s, LEAST_HARD_S)
    soft_s = min(max(limit.soft_s, LEAST_SOFT_S), hard_s)
    return replace(limit, hard_s=hard_s, soft_s=soft_s, first_s=max(limit.first_s, hard_s))


@dataclass(frozen=True, slots=True)
class Followed:
    """A section's limits as a run goes by them. Without *acts_on_time* only the soft one is applied."""

    limit: Limit
    acts_on_time: bool


def has_grown(n: float, longest_s: float, then_n: float, then_longest_s: float) -> bool:
    """So much more was seen, or something so much longer, that limits should be made anew."""
    return n >= then_n * _GROWTH or longest_s > then_longest_s


class Follower:
    """The limits of all sections that have some, made anew as their statistics grow."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._made: dict[str, tuple[float, float, bool, Costs, Followed | None]] = {}

    def limits(self, statistics: Iterable[SectionStatistics], has_own_step: bool) -> dict[str, Followed]:
        """By section. What was seen too seldom has none, nor has what is passed once a start, as long as that is so.

        The time between steps has one name: ``step``, or ``out_of_section`` for scripts with a section named ``step``.
        """
        known = {s.key.section: s for s in statistics}
        known.pop(OUT_OF_SECTION if not has_own_step else "", None)
        out = {}
        for name, s in known.items():
            followed = self._of(name, s, is_marked(name, known, has_own_step))
            if followed is not None:
                out[name] = followed
        return out

    def _of(self, name: str, s: SectionStatistics, marked: bool) -> Followed | None:
        n, longest_s = float(s.durations.events + s.first.events), s.durations.max_s
        made = self._made.get(name)
        if made is None or (made[2], made[3]) != (marked, self.costs) or has_grown(n, longest_s, made[0], made[1]):
            limit = not_too_short(limits_of(s, costs_for(self.costs, marked)))
            is_known = limit.basis not in (Basis.TOO_FEW, Basis.NEVER_SEEN)
            longest_s = longest_s if longest_s == longest_s else 0.0
            made = (n, longest_s, marked, self.costs, Followed(limit, marked) if is_known else None)
            self._made[name] = made
        return made[4]
