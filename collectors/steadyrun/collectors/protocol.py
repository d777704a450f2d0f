"""What a collector is: one small interface that the agent's polling and a one-shot check share.

A collector looks at one part of the machine. Its :meth:`Collector.check` says how that part is, why, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

__all__ = ["CheckResult", "Collector", "Health", "Trouble", "combine", "unknown"]

Fact = float | int | str | bool | None


class Health(str, Enum):
    """``degraded``: works, with less or not for long; ``unknown``: could not be looked at, which is not healthy."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNHEALTHY = "unhealthy"
    UNKNOWN = "unknown"

    @property
    def weight(self) -> int:
        """For comparing: what is known to be bad outweighs what is not known."""
        return _WEIGHT[self]


_WEIGHT: Mapping[Health, int] = {Health.HEALTHY: 0, Health.UNKNOWN: 1, Health.DEGRADED: 2, Health.UNHEALTHY: 3}


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is not as it should be.

    Attributes:
        reason: a sentence without its full stop, with the numbers.
        actions: what to do, most useful first; empty when nothing is to be done.
        subject: what it is about in the machine's own words (``gpu 0000:cb:00``, ``/scratch``), or empty.
    """

    health: Health
    reason: str
    actions: tuple[str, ...] = ()
    subject: str = ""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How the part is that a collector looks at. ``steadyrun.core.records.to_json`` makes plain data of it.

    Attributes:
        collector: its name.
        health: the worst of the troubles; healthy when there are none.
        reason: one line for a person, also when all is well.
        actions: suggestions, each once.
        troubles: what is behind it.
        facts: the numbers, by stable names with their units; what metrics and the start gate read.
    """

    collector: str
    health: Health
    reason: str
    actions: tuple[str, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict)


class Collector(Protocol):
    """One part of the machine.

    ``check`` may block as long as what it asks does; the registry gives each collector a thread of its own. It is never
    called twice at a time. It may raise: the caller then says *unknown*.
    """

    @property
    def name(self) -> str:
        """Stable, snake_case: a label of metrics."""
        ...

    @property
    def every_s(self) -> float:
        """Seconds between two checks in the agent."""
        ...

    @property
    def limit_s(self) -> float:
        """Longer than this, and it is taken for stuck."""
        ...

    def check(self) -> CheckResult:
        """Look now."""
        ...

    def close(self) -> None:
        """Give back what it holds; may be called twice, and while a check hangs."""
        ...


def combine(
    collector: str, troubles: Iterable[Trouble], all_well: str, facts: Mapping[str, Fact] | None = None
) -> CheckResult:
    """The result out of troubles: worst first, *all_well* is the reason where there are none."""
    ordered = tuple(sorted(troubles, key=lambda f: -f.health.weight))
    actions = tuple(dict.fromkeys(a for f in ordered for a in f.actions))
    if not ordered:
        return CheckResult(collector, Health.HEALTHY, all_well, facts=dict(facts or {}))
    reason = ordered[0].reason if len(ordered) == 1 else f"{ordered[0].reason} (and {len(ordered) - 1} more)"
    return CheckResult(collector, ordered[0].health, reason, actions, ordered, dict(facts or {}))


def unknown(collector: str, reason: str, *actions: str) -> CheckResult:
    """The result of a collector that could not look."""
    return CheckResult(collector, Health.UNKNOWN, reason, actions, (Trouble(Health.UNKNOWN, reason, actions),))
