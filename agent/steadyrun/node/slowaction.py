"""When a slow rank is worth a restart. Pure; what it costs and what it has cost so far are told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from steadyrun.detect.straggler import ActAdvice, ActCosts, Alarm, Timing, advise

__all__ = ["CostMeter", "SlowAction"]

UNMEASURED_S: Final = 300.0  # what a restart costs, until this run has shown it


@dataclass(slots=True)
class CostMeter:
    """What acting would cost now: the longest start of this run, and the training since the last checkpoint.

    A run that writes no checkpoint would lose everything since its start, so that acting never pays there.
    """

    _began_s: float | None = None
    _start_s: float | None = None  # the longest
    _is_open: bool = False
    _saved_s: float | None = None  # when the last checkpoint, or else the first step, was
    _done: int = 0

    def begin_attempt(self, now_s: float) -> None:
        self._began_s, self._is_open, self._saved_s, self._done = now_s, True, None, 0

    def see(self, has_steps: bool, checkpoints_done: int, now_s: float) -> None:
        """*has_steps*: all ranks have done one; *checkpoints_done* in this attempt."""
        if has_steps and self._is_open and self._began_s is not None:
            self._is_open = False
            self._start_s = max(self._start_s or 0.0, now_s - self._began_s)
            self._saved_s = now_s
        if checkpoints_done > self._done:
            self._done, self._saved_s = checkpoints_done, now_s

    @property
    def checkpoints_done(self) -> int:
        return self._done

    def costs(self, now_s: float) -> ActCosts:
        restart_s = UNMEASURED_S if self._start_s is None else self._start_s
        return ActCosts(restart_s, max(now_s - self._saved_s, 0.0) if self._saved_s is not None else 0.0)


@dataclass(slots=True)
class SlowAction:
    """Which slow rank or node to act on, if any; on each once."""

    _waiting: dict[tuple[str, Sequence[int] | str], int] = field(default_factory=dict)  # who -> checkpoints then
    _done: set[tuple[str, Sequence[int] | str]] = field(default_factory=set)

    def choose(self, alarms: Iterable[Alarm], costs: ActCosts, checkpoints_done: int) -> ActAdvice | None:
        """The first whose time has come: the loss has reached the cost, or half of it and a checkpoint is fresh."""
        for advice in advise(alarms, costs):
            who = who_of(advice.alarm)
            if who in self._done or advice.timing is Timing.WAIT:
                continue
            before = self._waiting.setdefault(who, checkpoints_done)
            if advice.timing is Timing.NOW or checkpoints_done > before:
                return advice
        return None

    def acted(self, alarm: Alarm) -> None:
        """Never again for the same."""
        self._done.add(who_of(alarm))

    def begin_attempt(self) -> None:
        self._waiting.clear()  # it counts its checkpoints anew


def who_of(alarm: Alarm) -> tuple[str, Sequence[int] | str]:
    """The same node or ranks, whatever their figures."""
    return (alarm.kind.value, alarm.node if alarm.kind.value == "node" and alarm.node else alarm.ranks)
