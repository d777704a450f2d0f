"""Where a job's wall time goes: each second to one phase, once it is certain to which, and to no other afterwards.

Counters cannot take back what they have counted, so time is credited when its phase is known: while ranks come up or
are stopped as it passes, in training when the step that it was spent on ends, in a hang when that is found. What has
passed since is *open*; the phases and the open time add up to the wall time at every moment. Pure.

The phases follow the badput types of public goodput libraries; see ``TIME_PHASES``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Final

from steadyrun.collectors.metrics.spec import TIME_PHASES
from steadyrun.core.timing import TAG_COMPILE, TAG_FIRST

__all__ = ["Goodput", "StepSpan"]

# A step that takes this much longer than usual, and by this much at least, was held up; the rest of it was work.
STALL_FACTOR: Final = 5.0
STALL_LEAST_S: Final = 1.0
FEWEST_STEPS: Final = 10
KEPT_STEPS: Final = 100


@dataclass(frozen=True, slots=True)
class StepSpan:
    """A step that has ended.

    Attributes:
        at_s: its end, CLOCK_MONOTONIC; it began where the one before ended.
        data_s, checkpoint_s, evaluation_s: in it, time in which training waited for these.
        flags: TAG_* of core.timing.
    """

    step: int
    at_s: float
    data_s: float = 0.0
    checkpoint_s: float = 0.0
    evaluation_s: float = 0.0
    flags: int = 0


class _State(Enum):
    """What time goes to while no step ends."""

    INITIALIZATION = "initialization"
    STARTUP = "startup"
    RESTORE = "checkpoint_restore"
    TRAINING = "open"
    HUNG = "hang"
    RECOVERY = "recovery"
    OVER = "over"


_PASSING: Final = frozenset({_State.INITIALIZATION, _State.STARTUP, _State.RESTORE, _State.HUNG, _State.RECOVERY})


class Goodput:
    """One job's time, as the agent of one node sees it. All times are CLOCK_MONOTONIC; late news count as of now."""

    def __init__(self, begun_s: float) -> None:
        self.begun_s = begun_s
        self.seconds: dict[str, float] = dict.fromkeys(TIME_PHASES, 0.0)
        self.steps_lost = 0
        self._until_s = begun_s  # everything before is credited
        self._state = _State.INITIALIZATION
        self._usual: deque[float] = deque(maxlen=KEPT_STEPS)
        self._highest: int | None = None  # of all attempts
        self._redo_to = -1  # steps up to here have been done before

    # -- what happens --------------------------------------------------------------------------------------------------
    def attempt_started(self, at_s: float) -> None:
        """The first process of an attempt is there."""
        self._pass(at_s)
        self._state = _State.STARTUP

    def restore_began(self, at_s: float) -> None:
        """Ranks were told which checkpoint to load."""
        if self._state is _State.STARTUP:
            self._pass(at_s)
            self._state = _State.RESTORE

    def restore_ended(self, at_s: float) -> None:
        """All ranks have loaded it."""
        if self._state is _State.RESTORE:
            self._pass(at_s)
            self._state = _State.STARTUP

    def first_step(self, at_s: float, step: int, is_global: bool) -> None:
        """The first step of the attempt has ended; *is_global*: numbers go on from one attempt to the next."""
        self._pass(at_s)
        self._state = _State.TRAINING
        self._redo_to = self._highest if is_global and self._highest is not None else -1
        self.steps_lost += max(self._redo_to - step + 1, 0)
        self._reached(step)

    def step(self, span: StepSpan) -> None:
        """A further step of the attempt has ended."""
        if self._state is _State.HUNG:
            self._pass(span.at_s)  # it goes on after all
            self._state = _State.TRAINING
        if self._state is not _State.TRAINING:
            return
        left_s = max(span.at_s - self._until_s, 0.0)
        self._until_s = max(self._until_s, span.at_s)
        for phase, wanted_s in (
            ("checkpoint_save", span.checkpoint_s),
            ("evaluation", span.evaluation_s),
            ("data_loading", span.data_s),
        ):
            part_s = min(max(wanted_s, 0.0), left_s)
            self.seconds[phase] += part_s
            left_s -= part_s
        held_up_s = 0.0 if span.flags & (TAG_FIRST | TAG_COMPILE) else self._beyond_usual_s(left_s)
        self.seconds["hang"] += held_up_s
        left_s -= held_up_s
        self._usual.append(left_s)
        self.seconds["rework" if span.step <= self._redo_to else "productive"] += left_s
        self._reached(span.step)

    def hang_found(self, at_s: float) -> None:
        """A rank is taken for hung: what is open was lost, and so is what follows until a step ends."""
        if self._state is _State.TRAINING:
            self._credit("hang", at_s)
            self._state = _State.HUNG

    def attempt_over(self, at_s: float, by_hang: bool) -> None:
        """The attempt is to end, for a restart or for good."""
        if self._state is _State.TRAINING:
            self._credit("hang" if by_hang else "recovery", at_s)
        else:
            self._pass(at_s)
        if self._state is not _State.OVER:
            self._state = _State.RECOVERY

    def ended(self, at_s: float) -> None:
        """The job is over; what is still open is nobody's."""
        if self._state is _State.TRAINING:
            self._credit("other", at_s)
        self._pass(at_s)
        self._state = _State.OVER

    def tick(self, now_s: float) -> None:
        """Credit what can be credited by the time alone."""
        self._pass(now_s)

    # -- sums ----------------------------------------------------------------------------------------------------------
    def open_s(self, now_s: float) -> float:
        """Time whose phase is not certain yet."""
        return 0.0 if self._state is _State.OVER else max(now_s - self._until_s, 0.0)

    def wall_s(self, now_s: float) -> float:
        """Since the job began; what the phases and the open time add up to."""
        return self._until_s - self.begun_s + self.open_s(now_s)

    def ratio(self, now_s: float) -> float:
        """Productive share of the wall time."""
        wall_s = self.wall_s(now_s)
        return self.seconds["productive"] / wall_s if wall_s > 0 else 0.0

    # -- inside --------------------------------------------------------------------------------------------------------
    def _pass(self, at_s: float) -> None:
        if self._state in _PASSING:
            self._credit(self._state.value, at_s)

    def _credit(self, phase: str, at_s: float) -> None:
        self.seconds[phase] += max(at_s - self._until_s, 0.0)
        self._until_s = max(self._until_s, at_s)

    def _beyond_usual_s(self, seconds: float) -> float:
        if seconds <= STALL_LEAST_S or len(self._usual) < FEWEST_STEPS:
            return 0.0
        usual_s = median(self._usual)
        return seconds - usual_s if seconds > max(STALL_FACTOR * usual_s, usual_s + STALL_LEAST_S) else 0.0

    def _reached(self, step: int) -> None:
        self._highest = step if self._highest is None else max(self._highest, step)
