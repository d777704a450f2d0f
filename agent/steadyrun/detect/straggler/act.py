"""When acting on a slow rank pays: ski rental between what it costs to go on and what it costs to act.

Whoever acts as soon as the loss so far reaches the cost of acting loses at most twice what somebody would who knew how
long the slowness lasts. Most pass: compute in about 10 minutes, communication in 24; acting at once is usually wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from steadyrun.detect.straggler.records import Alarm, AlarmKind

__all__ = ["ActAdvice", "ActCosts", "Timing", "advise"]

FAULTS = (AlarmKind.RANK, AlarmKind.NODE, AlarmKind.GROUP)


class Timing(str, Enum):
    """When to act: not yet, at the next checkpoint (the recomputation is then saved), or now."""

    WAIT = "wait"
    AT_CHECKPOINT = "at_checkpoint"
    NOW = "now"


@dataclass(frozen=True, slots=True)
class ActCosts:
    """What it costs to act, measured in this run where that was possible.

    Attributes:
        restart_s: from stopping to the first new step.
        since_checkpoint_s: training since the last checkpoint, to be done again.
    """

    restart_s: float
    since_checkpoint_s: float = 0.0

    def __post_init__(self) -> None:
        if self.restart_s < 0 or self.since_checkpoint_s < 0:
            raise ValueError(f"costs must be 0 or more, got {self.restart_s} and {self.since_checkpoint_s}")

    @property
    def now_s(self) -> float:
        """The price of acting at once."""
        return self.restart_s + self.since_checkpoint_s


@dataclass(frozen=True, slots=True)
class ActAdvice:
    """What to do about *alarm*, why, and from when on if the present impact lasts (None: never)."""

    alarm: Alarm
    timing: Timing
    reason: str
    in_s: float | None = None


def advise(alarms: Iterable[Alarm], costs: ActCosts, share_at_checkpoint: float = 0.5) -> list[ActAdvice]:
    """Advice for each open alarm that is a fault and sure enough; those that have cost most first.

    Args:
        alarms: with present figures (``Detector.open_alarms``).
        share_at_checkpoint: of the cost, from which on the next checkpoint is the moment.
    """
    if not 0 < share_at_checkpoint <= 1:
        raise ValueError(f"share_at_checkpoint must be above 0, at most 1, got {share_at_checkpoint}")
    found = [a for a in alarms if a.is_actionable and a.kind in FAULTS and a.over_step is None]
    found.sort(key=lambda a: -a.lost_s)
    return [_advice(alarm, costs, share_at_checkpoint) for alarm in found]


def _advice(alarm: Alarm, costs: ActCosts, share: float) -> ActAdvice:
    lost = f"{alarm.lost_s:.0f} s lost"
    if alarm.lost_s >= costs.now_s:
        return ActAdvice(alarm, Timing.NOW, f"{lost}, acting costs {costs.now_s:.0f} s", 0.0)
    in_s = (costs.now_s - alarm.lost_s) / alarm.impact if alarm.impact > 0 else None
    if alarm.lost_s > 0 and alarm.lost_s >= share * costs.now_s:
        reason = f"{lost}, right after a checkpoint acting costs {costs.restart_s:.0f} s"
        return ActAdvice(alarm, Timing.AT_CHECKPOINT, reason, in_s)
    return ActAdvice(alarm, Timing.WAIT, f"{lost}, acting costs {costs.now_s:.0f} s: not yet worth it", in_s)
