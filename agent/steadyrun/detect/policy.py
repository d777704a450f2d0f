"""What to do about a verdict: restart, leave a node out, stop or only report. Pure; the table is data (``faulttable``).

Two budgets. ``--max-restarts N`` given explicitly is obeyed exactly: N restarts after faults, however the job fares;
changes of membership do not count. Not given, a restart is paid for by progress: a few in a row without any, refilled
by each attempt that makes some; and a program error that comes back at the same step is not tried again.

Progress is what the next attempt need not do again: a checkpoint of a step that none had before. Where nothing is known
of checkpoints it is a newly reached step.

A node is left out where its fault asks for it, where it is a repeat offender, or where it alone is blamed for all
restarts that brought nothing; always only if enough nodes remain, else it is said.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from typing_extensions import assert_never

from steadyrun.core.classes import EXIT_OF_CLASS, Action, ExitClass, FaultClass, Mode
from steadyrun.core.records import Evidence, Finding
from steadyrun.detect.faulttable import (
    ADVICE,
    ESCALATION,
    KIND_OF_CLASS,
    ROWS,
    TABLE,
    CountedBy,
    FaultKind,
    Measure,
    Row,
    Rung,
)
from steadyrun.detect.nodescore import Mark

__all__ = ["TABLE", "AttemptOutcome", "History", "Policy", "PolicyLimits", "Row", "Ruling", "Situation", "outcome_of"]

CONFIGURATION_S: Final = 600.0  # 73 % of failures come within 10 minutes, and most of those are a configuration's


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """How far one attempt came and how it ended.

    Attributes:
        highest_step: newest step of any rank, or None before the first.
        step_is_global: the number means the same in every attempt.
        checkpoints_done: checkpoints completed in the attempt, the most of any rank.
        tracebacks: (traceback hash, step) of the exceptions that caused the end.
        cls: class of the main finding; None while the attempt runs.
        kind: its row in the fault table; None: that of the class.
        checkpoint_step: newest step that was saved so that the next attempt can start from it; None: not known.
        ranks, nodes: those that the main finding names.
        lived_s: from the start of its ranks to the fault; None: not known.
        without: nodes that were left out for it: the next attempt runs on others.
    """

    attempt: int
    highest_step: int | None = None
    step_is_global: bool = False
    checkpoints_done: int = 0
    tracebacks: tuple[tuple[str, int | None], ...] = ()
    cls: FaultClass | None = None
    kind: FaultKind | None = None
    checkpoint_step: int | None = None
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    lived_s: float | None = None
    without: tuple[str, ...] = ()

    @property
    def row(self) -> Row | None:
        """The rule for what ended it."""
        if self.kind is not None:
            return ROWS[self.kind]
        return TABLE[self.cls] if self.cls is not None else None


@dataclass(frozen=True, slots=True)
class History:
    """Every attempt so far in order; the last one is the one that just ended."""

    attempts: tuple[AttemptOutcome, ...] = ()

    def with_outcome(self, outcome: AttemptOutcome) -> History:
        return History((*self.attempts, outcome))

    def leaving_out(self, nodes: Sequence[str]) -> History:
        """The same, and the last attempt's end was that these nodes were left out."""
        *earlier, last = self.attempts
        return History((*earlier, replace(last, without=tuple(nodes))))

    @property
    def restarts(self) -> int:
        """Restarts after faults so far; a change of membership is none."""
        return sum(1 for a in self.attempts[:-1] if a.row is None or a.row.counts)

    def made_progress(self, index: int) -> bool:
        """The attempt left something that no earlier one had: a checkpoint; else, as far as is known, a step."""
        this, before = self.attempts[index], self.attempts[:index]
        saved = [a.checkpoint_step for a in before if a.checkpoint_step is not None]
        if this.checkpoint_step is not None:
            return this.checkpoint_step > max(saved, default=-1)
        if saved:
            return False  # whatever it computed has been lost again
        if index == 0:
            return this.highest_step is not None or this.checkpoints_done > 0
        if not this.step_is_global:
            return this.checkpoints_done > 0
        if this.highest_step is None:
            return False
        return this.highest_step > max((a.highest_step for a in before if a.highest_step is not None), default=-1)

    @property
    def restarts_since_progress(self) -> int:
        """Restarts since the last attempt that made progress, or since a node was left out; all when there is none."""
        for back, index in enumerate(range(len(self.attempts) - 1, -1, -1)):
            if self.made_progress(index) or (index > 0 and self.attempts[index - 1].without):
                return back
        return max(len(self.attempts) - 1, 0)

    @property
    def fruitless(self) -> tuple[AttemptOutcome, ...]:
        """The attempts that brought nothing more, up to the last one; the one that made progress last comes first."""
        return self.attempts[-1 - self.restarts_since_progress :]

    @property
    def never_ran_long(self) -> bool:
        """Each attempt failed soon after its start and saved nothing: a configuration's failures look like this."""
        return all(
            a.checkpoint_step is None and a.lived_s is not None and a.lived_s < CONFIGURATION_S for a in self.attempts
        )


@dataclass(frozen=True, slots=True)
class PolicyLimits:
    """Numbers of the policy.

    Attributes:
        max_restarts: as given on the command line; None: not given, the budget is progress.
        without_progress: restarts in a row without progress.
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
class Situation:
    """What is known beside the attempts of this job.

    Attributes:
        marks: per blamed node its faults within the last weeks, this one's included.
        offenders: nodes whose score is over the threshold.
        spares: how many nodes could be left out now without leaving the job too small.
        needed: nodes that cannot be left out: without them the others would not find each other.
    """

    now_unix_s: float = 0.0
    marks: Mapping[str, Sequence[Mark]] = field(default_factory=dict)
    offenders: frozenset[str] = frozenset()
    spares: int = 0
    needed: frozenset[str] = frozenset()

    def why_not(self, nodes: Sequence[str]) -> str:
        """What is against leaving these nodes out; empty: nothing is."""
        if hosts := [n for n in nodes if n in self.needed]:
            return f"{', '.join(hosts)} hosts the rendezvous"
        if len(nodes) > self.spares:
            return "no spare is there" if self.spares == 0 else "too few spares are there"
        return ""


@dataclass(frozen=True, slots=True)
class Ruling:
    """What to do.

    Attributes:
        reason: one line for a person.
        delay_s: wait before the next start.
        exit_class: of the launcher, when the action is STOP.
        restarts_left: after this one, or None where progress pays.
        falls_back: the restart is to leave the checkpoint alone that the attempt had loaded, and take an older one.
        without: nodes to leave out, when the action is RESTART_WITHOUT_NODE.
        advice: what people should do about it: nothing here can.
    """

    action: Action
    reason: str
    delay_s: float = 0.0
    exit_class: ExitClass = ExitClass.OK
    restarts_left: int | None = None
    falls_back: bool = False
    without: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


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
        kind: FaultKind | None = None,
        situation: Situation | None = None,
    ) -> Ruling:
        """The ruling on an incident whose attempt is the last of *history*.

        In observe mode a hang is only reported, and the reason says what act would have done.

        Args:
            scripts_ended: the script of every rank has ended without an exception; only processes are left. The first
                time the job restarts all the same, because what hangs may be the upload of the last checkpoint; when a
                second attempt, which found everything done, ends in the same way, the job counts as done.
            has_older: the attempt failed soon after it had loaded a checkpoint, and an older one is there. Then the
                same traceback at the same step is tried once more, from that: the state may be what is wrong.
            kind: the fault's row in the table; None: that of the main finding's class.
        """
        main = findings[0] if findings else Finding(FaultClass.INSUFFICIENT_DATA, (), "nothing is known", 0.0)
        kind = kind if kind is not None else KIND_OF_CLASS[main.cls]
        case = _Case(main, kind, history, situation or Situation(), has_older)
        again = len(history.attempts) > 1 and history.attempts[-2].cls is main.cls
        if scripts_ended and main.cls is FaultClass.TEARDOWN_HANG and again:
            reason = "every script ended well twice and its process did not: the job is done"
            ruling = Ruling(Action.STOP, reason, exit_class=ExitClass.OK)
        else:
            ruling = self._rule(case)
        left_alone = mode is Mode.OBSERVE and trigger not in ("exit", "node_lost", "preempted")
        if left_alone and ruling.action is not Action.REPORT:
            would = f"stop the job ({ruling.reason})"
            if ruling.action is not Action.STOP:
                would = "restart the job" + (f" without {', '.join(ruling.without)}" if ruling.without else "")
            return Ruling(Action.REPORT, f"observe mode: act would {would}", advice=ruling.advice)
        return ruling

    def _rule(self, case: _Case) -> Ruling:
        cls = case.main.cls
        action = case.row.action
        # A restart of a job that goes on is worth it only where it gets rid of the node.
        nodes = case.main.nodes
        is_worth_it = case.is_due(Measure.EXCLUDE_NODE) and bool(nodes) and not case.situation.why_not(nodes)
        if action is Action.REPORT and not is_worth_it:
            ruling = Ruling(Action.REPORT, f"{cls.value}: reported only")
        elif action is Action.STOP:
            what = "all ranks have ended well" if cls is FaultClass.HEALTHY else f"{cls.value}: the job leaves"
            ruling = Ruling(Action.STOP, what, exit_class=case.exit_class)
        elif self.limits.max_restarts is not None:
            ruling = self._by_number(self.limits.max_restarts, case)
        else:
            ruling = self._by_progress(case)
        if ruling.action is Action.RESTART:
            ruling = _leave_out(ruling, case)
        advice = (ADVICE[r.measure] for r in case.due() if r.measure in ADVICE)
        return replace(ruling, advice=tuple(dict.fromkeys((*ruling.advice, *advice))))

    def _by_number(self, allowed: int, case: _Case) -> Ruling:
        history = case.history
        left = allowed - history.restarts
        if not case.row.counts:
            return Ruling(Action.RESTART, "membership changed", restarts_left=max(left, 0))
        if left <= 0:
            used = "no restart is allowed" if allowed == 0 else f"all {allowed} restarts are used"
            reason = f"{used} (--max-restarts {allowed})"
            return Ruling(Action.STOP, reason, exit_class=case.exit_class, restarts_left=0)
        reason = f"restart {history.restarts + 1} of {allowed}"
        return Ruling(Action.RESTART, reason, self._back_off_s(history), restarts_left=left - 1)

    def _by_progress(self, case: _Case) -> Ruling:
        history, row, cls = case.history, case.row, case.main.cls
        twice = _same_fault_twice(history) if row.same_fault_stops else None
        if twice is not None:
            step = "before the first step" if twice[1] is None else f"after step {twice[1]}"
            times = sum(any(traceback == twice[0] for traceback, _ in a.tracebacks) for a in history.attempts)
            if case.has_older and times == 2:
                text = f"{cls.value}: same traceback {step} twice: once more, from an older checkpoint"
                return Ruling(Action.RESTART, text, self._back_off_s(history), falls_back=True)
            return Ruling(Action.STOP, f"{cls.value}: same traceback {step} twice", exit_class=case.exit_class)
        used = history.restarts_since_progress
        allowed = self.limits.without_progress
        if row.without_progress is not None and history.attempts[-2:-1] and history.attempts[-2].cls is cls:
            allowed = min(allowed, row.without_progress)
        if used >= allowed:
            return self._escalate(f"{cls.value}: {used} restart{'s' if used != 1 else ''} without progress", case)
        text = "restart" if used == 0 else f"restart {used + 1} of {allowed} without progress"
        falls_back = case.has_older and case.is_due(Measure.ROLL_BACK)
        return Ruling(Action.RESTART, text, self._back_off_s(history), falls_back=falls_back)

    def _escalate(self, text: str, case: _Case) -> Ruling:
        """The budget is used up; what comes after restarts in place, in the order of ``ESCALATION``."""
        if case.history.never_ran_long:
            text += f", each attempt within {CONFIGURATION_S / 60:.0f} minutes of its start: look at the configuration"
            suspect = None
        else:
            suspect = _blamed_throughout(case.history)
        advice: tuple[str, ...] = ()
        for measure in ESCALATION:
            if measure is Measure.EXCLUDE_NODE and suspect is not None and not case.situation.why_not((suspect,)):
                reason = f"{text}, each time blamed on node {suspect}: once more without it"
                return Ruling(Action.RESTART_WITHOUT_NODE, reason, self._back_off_s(case.history), without=(suspect,))
            if measure is Measure.PREFLIGHT and suspect is not None:
                text += f", each time blamed on node {suspect}"
                advice = (ADVICE[measure],)
        return Ruling(Action.STOP, text, exit_class=case.exit_class, advice=advice)

    def _back_off_s(self, history: History) -> float:
        """0 after progress and for the first restart; then doubling, from half of it to all of it by chance."""
        used = history.restarts_since_progress
        if used == 0:
            return 0.0
        full_s = min(self.limits.back_off_s * 2.0 ** min(used - 1, 32), self.limits.back_off_max_s)
        return full_s * (0.5 + self.rng.random() / 2)


@dataclass(frozen=True, slots=True)
class _Case:
    """One incident before the policy."""

    main: Finding
    kind: FaultKind
    history: History
    situation: Situation
    has_older: bool

    @property
    def row(self) -> Row:
        return ROWS[self.kind]

    @property
    def exit_class(self) -> ExitClass:
        return EXIT_OF_CLASS[self.main.cls]

    def due(self) -> list[Rung]:
        """The rungs of the row that have been reached."""
        return [r for r in self.row.rungs if self._count(r) >= r.nth and not (r.only_unnamed and self._is_named())]

    def is_due(self, measure: Measure) -> bool:
        return any(r.measure is measure for r in self.due())

    def _count(self, rung: Rung) -> int:
        """Faults of this kind that count together, this one among them."""
        if rung.nth == 1:
            return 1
        match rung.of:
            case CountedBy.JOB:
                return sum(1 for a in self.history.attempts if self._is_alike(a))
            case CountedBy.NODE:
                return max((len(self._incidents(rung, node)) for node in self.main.nodes), default=0)
            case CountedBy.DEVICE:
                if len(self.main.nodes) != 1:
                    return 0  # whose device it is is not known
                node = self.main.nodes[0]
                return max((len(self._incidents(rung, node, gpu)) for gpu in self.main.gpus), default=0)
            case _:
                assert_never(rung.of)

    def _incidents(self, rung: Rung, node: str, device: str | None = None) -> set[tuple[str, int]]:
        since_unix_s = self.situation.now_unix_s - rung.within_s
        return {
            (m.run, m.incident)
            for m in self.situation.marks.get(node, ())
            if m.kind is self.kind and device in (None, m.device) and m.at_unix_s >= since_unix_s
        }

    def _is_alike(self, attempt: AttemptOutcome) -> bool:
        return attempt.row is self.row

    def _is_named(self) -> bool:
        named = [set(a.ranks) for a in self.history.attempts if self._is_alike(a)]
        return any(rank in other for i, ranks in enumerate(named) for rank in ranks for other in named[:i])


def _leave_out(ruling: Ruling, case: _Case) -> Ruling:
    """The restart without the nodes that are to be left out; with a word on why they are not, where they are not."""
    blamed = case.main.nodes
    if case.is_due(Measure.EXCLUDE_NODE):
        nodes, why = blamed, case.kind.value.replace("_", " ")
    else:
        nodes, why = tuple(n for n in blamed if n in case.situation.offenders), "a repeat offender"
    if not nodes:
        return ruling
    names = ", ".join(nodes)
    if against := case.situation.why_not(nodes):
        return replace(ruling, reason=f"{ruling.reason}; {names} should be left out ({why}), but {against}")
    reason = f"{ruling.reason}; {names} left out: {why}"
    return replace(ruling, action=Action.RESTART_WITHOUT_NODE, reason=reason, without=nodes)


def _blamed_throughout(history: History) -> str | None:
    """The one node that every attempt without progress was blamed on, if faults of their kinds can be a machine's."""
    attempts = history.fruitless
    if not all(a.row is not None and a.row.blames_node > 0 for a in attempts):
        return None
    common = set.intersection(*(set(a.nodes) for a in attempts))
    return common.pop() if len(common) == 1 else None


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
    checkpoint_step: int | None = None,
    kind: FaultKind | None = None,
    lived_s: float | None = None,
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
        kind=kind,
        checkpoint_step=checkpoint_step,
        ranks=findings[0].ranks if findings else (),
        nodes=findings[0].nodes if findings else (),
        lived_s=lived_s,
    )
