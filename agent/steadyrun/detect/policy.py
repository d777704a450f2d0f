"""What to do about a verdict: restart, stop or only report. Pure; the table is data.

Two budgets. ``--max-restarts N`` given explicitly is obeyed exactly: N restarts after faults, however the job fares;
changes of membership do not count. Not given, a restart is paid for by progress: a few without a newly reached step,
refilled by each attempt that reaches one; and a program error that comes back at the same step is not tried again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from steadyrun.core.classes import EXIT_OF_CLASS, Action, ExitClass, FaultClass, Mode
from steadyrun.core.records import Evidence, Finding

__all__ = ["TABLE", "AttemptOutcome", "History", "Policy", "PolicyLimits", "Row", "Ruling", "outcome_of"]


@dataclass(frozen=True, slots=True)
class Row:
    """The rule for one fault class.

    Attributes:
        action: RESTART, STOP or REPORT; what happens while the budget lasts.
        is_hang: the ranks still run, so that observe mode can leave them alone.
        same_fault_stops: the same traceback at the same step twice ends the job (budget by progress only).
        without_progress: at most this many restarts in a row without progress; None: the general budget.
        counts: it is charged to an explicit ``--max-restarts`` (a change of membership is not).
    """

    action: Action
    is_hang: bool = False
    same_fault_stops: bool = False
    without_progress: int | None = None
    counts: bool = True


_HANG: Final = Row(Action.RESTART, is_hang=True)
_MISMATCH: Final = Row(Action.RESTART, is_hang=True, same_fault_stops=True, without_progress=1)

TABLE: Final[Mapping[FaultClass, Row]] = {
    FaultClass.PROGRAM_ERROR: Row(Action.RESTART, same_fault_stops=True),
    FaultClass.OUT_OF_MEMORY: Row(Action.RESTART, same_fault_stops=True, without_progress=1),
    FaultClass.HOST_STALL: _HANG,
    FaultClass.DEVICE_STALL: _HANG,
    FaultClass.STOPPED_PROCESS: _HANG,
    FaultClass.DEAD_PROCESS: Row(Action.RESTART),
    FaultClass.DEAD_NODE: Row(Action.RESTART, counts=False),
    FaultClass.OP_MISMATCH: _MISMATCH,
    FaultClass.SIZE_MISMATCH: _MISMATCH,
    FaultClass.DTYPE_MISMATCH: _MISMATCH,
    FaultClass.SKIPPED_COLLECTIVE: _HANG,
    FaultClass.EXTRA_COLLECTIVE: _HANG,
    FaultClass.DEADLOCK_CYCLE: _HANG,
    FaultClass.P2P_UNMATCHED: _HANG,
    FaultClass.INPUT_PIPELINE: _HANG,
    FaultClass.STORAGE_STALL: _HANG,
    FaultClass.IN_FLIGHT_NETWORK: _HANG,
    FaultClass.TEARDOWN_HANG: _HANG,
    FaultClass.START_UP: _HANG,
    FaultClass.PREEMPTED: Row(Action.STOP),
    FaultClass.SILENT_CORRUPTION: Row(Action.RESTART, is_hang=True),
    FaultClass.STRAGGLER: Row(Action.REPORT, is_hang=True),
    FaultClass.INSUFFICIENT_DATA: _HANG,
    FaultClass.HEALTHY: Row(Action.STOP),  # all ranks have ended well in the meantime: the job is done
}


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How far one attempt came and how it ended.

    Attributes:
        highest_step: newest step of any rank, or None before the first.
        step_is_global: the number means the same in every attempt.
        checkpoints_done: checkpoints completed in the attempt, the most of any rank.
        tracebacks: (traceback hash, step) of the exceptions that caused the end.
        cls: class of the main finding; None while the attempt runs.
    """

    attempt: int
    highest_step: int | None = None
    step_is_global: bool = False
    checkpoints_done: int = 0
    tracebacks: tuple[tuple[str, int | None], ...] = ()
    cls: FaultClass | None = None


@dataclass(frozen=True, slots=True)
class History:
    """Every attempt so far in order; the last one is the one that just ended."""

    attempts: tuple[AttemptOutcome, ...] = ()

    def with_outcome(self, outcome: AttemptOutcome) -> History:
        return History((*self.attempts, outcome))

    @property
    def restarts(self) -> int:
        """Restarts after faults so far; a change of membership is none."""
        ended = self.attempts[:-1]
        return sum(1 for a in ended if a.cls is None or TABLE[a.cls].counts)

    def made_progress(self, index: int) -> bool:
        """The attempt reached a step no earlier one had, or completed a checkpoint where steps start anew each time."""
        this = self.attempts[index]
        if index == 0:
            return this.highest_step is not None or this.checkpoints_done > 0
        if not this.step_is_global:
            return this.checkpoints_done > 0
        if this.highest_step is None:
            return False
        before = [a.highest_step for a in self.attempts[:index] if a.highest_step is not None]
        return this.highest_step > max(before, default=-1)

    @property
    def restarts_since_progress(self) -> int:
        """Restarts made since the last attempt that made progress; all of them when none did."""
        for back in range(len(self.attempts)):
            if self.made_progress(len(self.attempts) - 1 - back):
                return back
        return max(len(self.attempts) - 1, 0)


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    """Numbers of the policy.

    Attributes:
        max_restarts: as given on the command line; None: not given, the budget is progress.
        without_progress: restarts in a row without a newly reached step.
        back_off_s: first delay once an attempt made no progress; doubled for each further one.
        back_off_max_s: never longer.
    """

    max_restarts: int | None = None
    without_progress: int = 3
    back_off_s: float = 1.0
    back_off_max_s: float = 30.0

    def __post_init__(self) -> None:
        if self.max_restarts is not None and self.max_restarts < 0:
            raise ValueError(f"max_restarts must be 0 or more, got {self.max_restarts}")
        if self.without_progress < 0:
            raise ValueError(f"without_progress must be 0 or more, got {self.without_progress}")
        if self.back_off_s < 0 or self.back_off_max_s < self.back_off_s:
            raise ValueError(f"back_off_s must be 0 to back_off_max_s, got {self.back_off_s} and {self.back_off_max_s}")


@dataclass(frozen=True, slots=True)
class Ruling:
    """What to do.

    Attributes:
        reason: one line for a person.
        delay_s: wait before the next start.
        exit_class: of the launcher, when the action is STOP.
        restarts_left: after this one, or None where progress pays.
        falls_back: the restart is to leave the checkpoint alone that the attempt had loaded, and take an older one.
    """

    action: Action
    reason: str
    delay_s: float = 0.0
    exit_class: ExitClass = ExitClass.OK
    restarts_left: int | None = None
    falls_back: bool = False


@dataclass(slots=True)
class Policy:
    """Decides; ``rng`` only spreads the back-off of many jobs that failed together."""

    limits: PolicyLimits = field(default_factory=PolicyLimits)
    rng: random.Random = field(default_factory=random.Random)

    def decide(
        self,
        findings: Sequence[Finding],
        history: History,
        mode: Mode,
        trigger: str = "exit",
        scripts_ended: bool = False,
        has_older: bool = False,
    ) -> Ruling:
        """The ruling on an incident whose attempt is the last of *history*.

        In observe mode a hang is only reported, and the reason says what act would have done.

        Args:
            scripts_ended: the script of every rank has ended without an exception; only processes are left. The first
                time the job restarts all the same, because what hangs may be the upload of the last checkpoint; when a
                second attempt, which found everything done, ends in the same way, the job counts as done.
            has_older: the attempt failed soon after it had loaded a checkpoint, and an older one is there. Then the
                same traceback at the same step is tried once more, from that: the state may be what is wrong.
        """
        cls = findings[0].cls if findings else FaultClass.INSUFFICIENT_DATA
        row = TABLE[cls]
        again = len(history.attempts) > 1 and history.attempts[-2].cls is cls
        if scripts_ended and cls is FaultClass.TEARDOWN_HANG and again:
            reason = "every script ended well twice and its process did not: the job is done"
            ruling = Ruling(Action.STOP, reason, exit_class=ExitClass.OK)
        else:
            ruling = self._rule(cls, row, history, has_older)
        left_alone = mode is Mode.OBSERVE and trigger not in ("exit", "node_lost", "preempted")
        if left_alone and ruling.action is not Action.REPORT:
            would = "restart the job" if ruling.action is Action.RESTART else f"stop the job ({ruling.reason})"
            return Ruling(Action.REPORT, f"observe mode: act would {would}")
        return ruling

    def _rule(self, cls: FaultClass, row: Row, history: History, has_older: bool) -> Ruling:
        exit_class = EXIT_OF_CLASS[cls]
        if row.action is Action.REPORT:
            return Ruling(Action.REPORT, f"{cls.value}: reported only")
        if row.action is Action.STOP:
            what = "all ranks have ended well" if cls is FaultClass.HEALTHY else f"{cls.value}: the job leaves"
            return Ruling(Action.STOP, what, exit_class=exit_class)
        if self.limits.max_restarts is not None:
            return self._by_number(self.limits.max_restarts, row, history, exit_class)
        return self._by_progress(cls, row, history, exit_class, has_older)

    def _by_number(self, allowed: int, row: Row, history: History, exit_class: ExitClass) -> Ruling:
        left = allowed - history.restarts
        if not row.counts:
            return Ruling(Action.RESTART, "membership changed", restarts_left=max(left, 0))
        if left <= 0:
            used = "no restart is allowed" if allowed == 0 else f"all {allowed} restarts are used"
            return Ruling(Action.STOP, f"{used} (--max-restarts {allowed})", exit_class=exit_class, restarts_left=0)
        reason = f"restart {history.restarts + 1} of {allowed}"
        return Ruling(Action.RESTART, reason, self._back_off_s(history), restarts_left=left - 1)

    def _by_progress(
        self, cls: FaultClass, row: Row, history: History, exit_class: ExitClass, has_older: bool
    ) -> Ruling:
        twice = _same_fault_twice(history) if row.same_fault_stops else None
        if twice is not None:
            step = "before the first step" if twice[1] is None else f"after step {twice[1]}"
            times = sum(any(traceback == twice[0] for traceback, _ in a.tracebacks) for a in history.attempts)
            if has_older and times == 2:
                text = f"{cls.value}: same traceback {step} twice: once more, from an older checkpoint"
                return Ruling(Action.RESTART, text, self._back_off_s(history), falls_back=True)
            return Ruling(Action.STOP, f"{cls.value}: same traceback {step} twice", exit_class=exit_class)
        used = history.restarts_since_progress
        allowed = self.limits.without_progress
        if row.without_progress is not None and history.attempts[-2:-1] and history.attempts[-2].cls is cls:
            allowed = min(allowed, row.without_progress)
        if used >= allowed:
            text = f"{cls.value}: {used} restart{'s' if used != 1 else ''} without progress"
            return Ruling(Action.STOP, text, exit_class=exit_class)
        text = "restart" if used == 0 else f"restart {used + 1} of {allowed} without progress"
        return Ruling(Action.RESTART, text, self._back_off_s(history))

    def _back_off_s(self, history: History) -> float:
        """0 after progress and for the first restart; then doubling, from half of it to all of it by chance."""
        used = history.restarts_since_progress
        if used == 0:
            return 0.0
        full_s = min(self.limits.back_off_s * 2.0 ** min(used - 1, 32), self.limits.back_off_max_s)
        return full_s * (0.5 + self.rng.random() / 2)


def _same_fault_twice(history: History) -> tuple[str, int | None] | None:
    """A (traceback hash, step) that ended the last attempt and an earlier one.

    An attempt that resumed at the failing step has no step of its own when it fails: the same traceback before its
    first step counts as the same fault.
    """
    if not history.attempts:
        return None
    earlier: dict[str, set[int | None]] = {}
    for attempt in history.attempts[:-1]:
        for traceback, step in attempt.tracebacks:
            earlier.setdefault(traceback, set()).add(step)
    for traceback, step in history.attempts[-1].tracebacks:
        if traceback in earlier and (step is None or step in earlier[traceback]):
            return traceback, step
    return None


def outcome_of(
    evidence: Evidence,
    findings: Sequence[Finding],
    *,
    highest_step: int | None,
    step_is_global: bool,
    checkpoints_done: int,
) -> AttemptOutcome:
    """The line of history an ended attempt leaves; steps and checkpoints come from the boards of all nodes."""
    blamed = {r for f in findings for r in f.ranks}
    raised = [(r.exception, r.step) for r in evidence.ranks if r.exception is not None and r.rank in blamed]
    tracebacks = {(e.traceback_hash, e.step if e.step is not None else step) for e, step in raised}
    return AttemptOutcome(
        attempt=evidence.attempt,
        highest_step=highest_step,
        step_is_global=step_is_global,
        checkpoints_done=checkpoints_done,
        tracebacks=tuple(sorted(tracebacks, key=lambda t: (t[0], -1 if t[1] is None else t[1]))),
        cls=findings[0].cls if findings else FaultClass.INSUFFICIENT_DATA,
    )
