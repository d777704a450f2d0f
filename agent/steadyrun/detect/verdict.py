"""The judgement: what happened, whose fault it is and who only suffers from it, from one incident's evidence.

Two questions, in this order. Did somebody die of their own? Then the first such death (or several independent ones) is
the cause and everyone else a victim; ranks whose last words tell of a broken connection never count as a cause while
another one is known. Otherwise: who do the others wait for?
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from steadyrun.core.causes import Cause, decode_cause, decode_causes
from steadyrun.core.classes import Action, FaultClass, Mode
from steadyrun.core.flight import FlightDetails
from steadyrun.core.frames import Doing, activity_of, callsite, main_stack, user_frame
from steadyrun.core.records import Evidence, ExceptionRecord, Finding, RankEvidence, Verdict
from steadyrun.detect.collectives import (
    DeadByLargerMessage,
    joined,
    mismatch_of_death,
    with_operation,
    without_doubt,
)
from steadyrun.detect.devices import with_devices
from steadyrun.detect.exits import CRASH_SIGNALS, describe_exit
from steadyrun.detect.grouping import Place, group_ranks, name_ranks, place_of, places_sentence
from steadyrun.detect.waits import judge_flights
from steadyrun.detect.waits.records import FlightJudgement, RankState

__all__ = ["Judgement", "judge"]

SAME_MOMENT_S: Final = 1.0  # deaths this close count as independent; a later one is more likely a reaction
BUSY_CPU_SHARE: Final = 0.5
IDLE_CPU_SHARE: Final = 0.3
MAX_MISSING: Final = 40
TEARDOWN: Final = "teardown"  # the section that the in-rank side opens when the script has ended
LAST_WORDS_LINES: Final = 12
RECEIVING: Final = frozenset({"recv", "irecv", "recv_object_list"})
SENDING: Final = frozenset({"send", "isend", "send_object_list"})

_OWN_CONNECTION_ERRORS: Final = (
    "ConnectionError", "ConnectionRefusedError", "ConnectionResetError", "ConnectionAbortedError", "BrokenPipeError",
    "TimeoutError", "OSError", "Timeout", "HTTPError", "URLError",
)  # fmt: skip

_FILE_WAITS: Final = (
    "nfs", "rpc_wait", "io_schedule", "jbd2", "ext4", "xfs", "btrfs", "fuse", "ceph", "lustre", "ll_", "ptlrpc", "cifs",
    "blk_", "wait_on_page", "folio_wait", "balance_dirty", "gpfs", "beegfs", "d_alloc", "fsync",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Judgement:
    """Root causes in order of importance, who suffers from them, and what was not known.

    ``sentence`` says where all ranks were: ``3 of 4 ranks wait in all_reduce called at train.py:88; rank 1 is ...``.
    ``flight`` is what the flight records alone say, None where there are none.
    """

    findings: tuple[Finding, ...]
    victims: tuple[int, ...] = ()
    missing: tuple[str, ...] = ()
    sentence: str = ""
    flight: FlightJudgement | None = None

    @property
    def main(self) -> Finding:
        return self.findings[0]

    def verdict(
        self,
        evidence: Evidence,
        *,
        incident: int,
        mode: Mode,
        action: Action,
        reason: str,
        detected_at_unix_s: float,
        detection_delay_s: float,
        details: Mapping[str, object] | None = None,
    ) -> Verdict:
        """The record that is written as verdict.json, once the policy has chosen the action."""
        return Verdict(
            run_id=evidence.run_id,
            incident=incident,
            attempt=evidence.attempt,
            detected_at_unix_s=detected_at_unix_s,
            detection_delay_s=detection_delay_s,
            mode=mode,
            action=action,
            findings=self.findings,
            victims=self.victims,
            missing=self.missing,
            reason=reason,
            details={"places": self.sentence, **(details or {})},
        )


class _Life(Enum):
    ALIVE = "alive"
    FINISHED = "finished"  # ended with 0
    DIED = "died"


@dataclass(frozen=True, slots=True)
class _Case:
    """One rank as the judge sees it."""

    evidence: RankEvidence
    life: _Life
    place: Place
    at_unix_s: float = 0.0  # of the death
    causes: tuple[tuple[Cause, str], ...] = ()

    @property
    def rank(self) -> int:
        return self.evidence.rank

    @property
    def doing(self) -> Doing:
        return self.place.activity.doing

    @property
    def cpu(self) -> float | None:
        return self.evidence.cpu_share

    @property
    def state(self) -> str:
        return self.evidence.process.state if self.evidence.process is not None else ""

    @property
    def is_collateral(self) -> bool:
        """Its last words tell of another rank's end."""
        return bool(self.causes) and self.causes[0][0].collateral

    @property
    def is_waiting(self) -> bool:
        if self.doing in (Doing.COLLECTIVE, Doing.JOINING):
            return True
        return self.doing is Doing.BACKWARD and (self.cpu is None or self.cpu < IDLE_CPU_SHARE)


@dataclass(slots=True)
class _Court:
    """The evidence in a form that is easy to ask, shared by the rules below."""

    evidence: Evidence
    wall_minus_mono_s: float
    offsets: Mapping[str, float]
    cases: list[_Case] = field(default_factory=list)

    @property
    def script(self) -> str:
        return self.evidence.script

    def unix_s(self, node: str, at_s: float | None) -> float | None:
        if at_s is None:
            return None
        return at_s + self.offsets.get(node, self.wall_minus_mono_s)

    def absent(self) -> tuple[int, ...]:
        known = {c.rank for c in self.cases}
        return tuple(r for r in range(self.evidence.world_size) if r not in known)


def judge(
    evidence: Evidence,
    *,
    wall_minus_mono_s: float,
    offsets: Mapping[str, float] | None = None,
    details: FlightDetails | None = None,
) -> Judgement:
    """Name the causes and the victims.

    Args:
        wall_minus_mono_s: wall time minus CLOCK_MONOTONIC on the deciding node.
        offsets: the same per node name where it is known; times of other nodes are compared through it.
        details: single flight-recorder entries on request, where they can be had.
    """
    court = _Court(evidence, wall_minus_mono_s, offsets or {})
    court.cases = [_case(court, r) for r in sorted(evidence.ranks, key=lambda r: r.rank)]
    flight = _flight(court, details)
    findings = (
        _by_trigger(court)
        or with_operation(_explained_deaths(court), flight)
        or [_known_of(court, f) for f in joined(_hang(court), flight, _in_collectives(court), _living(court))]
        or _last_resort(court, flight)
    )
    findings = with_devices(findings, evidence, evidence.now_s + wall_minus_mono_s)
    ordered = sorted(findings, key=lambda f: (-f.confidence, f.since_unix_s or float("inf"), f.ranks))
    culprits = {r for f in ordered for r in f.ranks}
    seen = (c.evidence for c in court.cases if c.evidence.stacks or c.life is _Life.ALIVE)
    groups = group_ranks(seen, court.script)
    victims = {*_victims(court, ordered, culprits), *(flight.victims if flight is not None else ())} - culprits
    return Judgement(
        findings=tuple(ordered),
        victims=tuple(sorted(victims)) if ordered[0].cls is not FaultClass.HEALTHY else (),
        missing=_missing(court, flight),
        sentence=places_sentence(groups, evidence.world_size),
        flight=flight,
    )


def _in_collectives(court: _Court) -> dict[int, str]:
    """What the stacks of ranks that stand in a collective call it, and where it was called."""
    return {
        c.rank: f"{c.place.activity.op} at {c.place.site}"
        for c in court.cases
        if c.life is _Life.ALIVE and c.doing is Doing.COLLECTIVE
    }


def _living(court: _Court) -> set[int]:
    """Ranks that were looked at and have not died: they live, or have ended well."""
    return {c.rank for c in court.cases if c.life is not _Life.DIED and (c.state or c.life is _Life.FINISHED)}


def _flight(court: _Court, details: FlightDetails | None) -> FlightJudgement | None:
    flights = {c.rank: c.evidence.flight for c in court.cases if c.evidence.flight is not None}
    if not flights:
        return None
    states = {c.rank: _rank_state(c) for c in court.cases}
    return judge_flights(flights, court.evidence.world_size, states, details)


def _rank_state(case: _Case) -> RankState:
    if case.life is _Life.DIED:
        return RankState.DEAD
    if case.life is _Life.FINISHED:
        return RankState.FINISHED
    if case.evidence.exit is not None:
        return RankState.UNKNOWN  # ended by us: what it did before is what counts
    if not case.state:
        return RankState.UNKNOWN
    return RankState.STOPPED if case.state in "Tt" else RankState.DEAD if case.state in "ZX" else RankState.ALIVE


def _known_of(court: _Court, finding: Finding) -> Finding:
    """With the nodes, GPUs, section and files of its ranks, where the finding does not have them.

    Of a rank that is in no call the place is where its stack stands; recorders only know where the others called.
    """
    cases = [c for c in court.cases if c.rank in finding.ranks]
    if not cases:
        return finding
    # recorders add the function; a verdict's places are all written as those from stacks
    site = finding.callsite.partition(" in ")[0] if finding.callsite else None
    stands = cases[0].place.site
    summary = finding.summary
    if finding.cls is FaultClass.HOST_STALL and stands is not None and stands != site:
        site, summary = stands, f"{without_doubt(summary)}; {name_ranks([cases[0].rank])} is at {stands}"
    return replace(
        finding,
        summary=summary,
        nodes=finding.nodes or tuple(dict.fromkeys(c.evidence.node for c in cases if c.evidence.node)),
        gpus=finding.gpus or tuple(dict.fromkeys(c.evidence.gpu for c in cases if c.evidence.gpu)),
        section=finding.section or cases[0].place.section,
        callsite=site or stands,
        evidence=finding.evidence or tuple(dict.fromkeys(f for c in cases for f in c.evidence.files)),
    )


def _case(court: _Court, r: RankEvidence) -> _Case:
    place = place_of(r, court.script)
    exit_ = r.exit
    raised = r.exception is not None and r.exception.type not in ("KeyboardInterrupt", "SystemExit")
    if raised and r.exception is not None:
        life, at = _Life.DIED, r.exception.at_unix_s
    elif exit_ is None and r.process is not None and r.process.state in "ZX" and not r.process.dead_main:
        life, at = _Life.DIED, 0.0  # nobody saw how; only notes of a state say that it has ended
    elif exit_ is None or exit_.by_us:
        return _Case(r, _Life.ALIVE, place)
    elif exit_.signal is None and exit_.code == 0:
        return _Case(r, _Life.FINISHED, place)
    else:
        life, at = _Life.DIED, court.unix_s(r.node, exit_.at_s) or 0.0
    return _Case(r, life, place, at, _causes_of(court, r, raised))


def _causes_of(court: _Court, r: RankEvidence, raised: bool) -> tuple[tuple[Cause, str], ...]:
    """What the last words mean, heaviest first."""
    if raised and r.exception is not None:
        cause = decode_cause(f"{r.exception.type}: {r.exception.message}")
        if cause is None or (cause.collateral and not _speaks_of_peers(court, r.exception)):
            return ()
        return ((cause, r.exception.message),)
    signum = r.exit.signal if r.exit is not None else None
    causes = decode_causes(_last_words(r.log_tail))
    if signum is None or signum == signal.SIGABRT:
        return tuple(causes)
    # Any other signal ended it in the middle of something: complaints about peers before that were not the end.
    return tuple(c for c in causes if not c[0].collateral) if signum in CRASH_SIGNALS else ()


def _speaks_of_peers(court: _Court, exception: ExceptionRecord) -> bool:
    """A broken connection counts as another rank's only where torch raised it, not some client of the user's."""
    if not exception.type.endswith(_OWN_CONNECTION_ERRORS):
        return True
    doing = activity_of(exception.frames, court.script).doing
    return doing in (Doing.COLLECTIVE, Doing.JOINING, Doing.BACKWARD, Doing.UNKNOWN)


def _last_words(lines: Sequence[str]) -> Sequence[str]:
    """From the last traceback or C++ termination on; else the last lines. Survived warnings are left out."""
    start = max(len(lines) - LAST_WORDS_LINES, 0)
    for i, line in enumerate(lines):
        if "Traceback (most recent call last)" in line or line.startswith(("terminate called", "Fatal Python error")):
            start = i
    return [line for line in lines[start:] if not line.startswith("[W")]


# -- what the trigger itself says ------------------------------------------------------------------------------------
def _by_trigger(court: _Court) -> list[Finding]:
    trigger = court.evidence.trigger
    if trigger == "preempted":
        ranks = tuple(c.rank for c in court.cases)
        return [Finding(FaultClass.PREEMPTED, ranks, "the job was told to leave", 1.0)]
    if trigger == "node_lost":
        absent = court.absent()
        dead = [f for f in _deaths(court) if f.confidence >= 0.6]
        if dead:
            return dead
        who = name_ranks(absent) if absent else "a node"
        text = f"{who} cannot be reached: the node's agent ended or the network to it is cut"
        return [Finding(FaultClass.DEAD_NODE, absent, text, 0.85 if absent else 0.6)]
    return []


# -- deaths ----------------------------------------------------------------------------------------------------------
def _deaths(court: _Court) -> list[Finding]:
    died = sorted((c for c in court.cases if c.life is _Life.DIED), key=lambda c: (c.at_unix_s, c.rank))
    roots = [c for c in died if not c.is_collateral]
    if not roots:
        return []
    first = roots[0].at_unix_s
    merged: dict[tuple[FaultClass, str], list[_Case]] = {}
    for case in roots:
        merged.setdefault((_death_class(court, case), _same_fault_key(case)), []).append(case)
    findings = []
    for (cls, _), cases in merged.items():
        finding = _death_finding(court, cls, cases)
        speechless = not cases[0].causes and cases[0].evidence.exception is None and _code(cases[0]) is not None
        if cases[0].at_unix_s - first > SAME_MOMENT_S or (speechless and cases[0] is not roots[0]):
            finding = _weaker(finding, 0.5, "after another rank had died already")
        findings.append(finding)
    return findings


def _code(case: _Case) -> int | None:
    return case.evidence.exit.code if case.evidence.exit is not None else None


def _same_fault_key(case: _Case) -> str:
    if case.evidence.exception is not None:
        return case.evidence.exception.traceback_hash
    exit_ = case.evidence.exit
    return f"{exit_.code}/{exit_.signal}" if exit_ is not None else ""


def _death_class(court: _Court, case: _Case) -> FaultClass:
    r = case.evidence
    if r.oom is not None and r.oom.killed:
        return FaultClass.OUT_OF_MEMORY
    cause = case.causes[0][0] if case.causes else None
    if cause is not None and cause.cls is not None and not (cause.cls is FaultClass.START_UP and r.step is not None):
        return cause.cls
    if r.exception is not None or (r.exit is not None and r.exit.signal is None):
        return FaultClass.PROGRAM_ERROR
    return FaultClass.DEAD_PROCESS


def _death_finding(court: _Court, cls: FaultClass, cases: Sequence[_Case]) -> Finding:
    case = cases[0]
    ranks = tuple(sorted(c.rank for c in cases))
    who = name_ranks(ranks)
    text, confidence = _death_words(case)
    if len(cases) > 1 and text.startswith("was "):
        text = f"were {text[4:]}"
    site = _death_site(court, case)
    where = f" at {site}" if site else ""
    cause = case.causes[0][0] if case.causes else None
    meaning = f": {cause.words}" if cause is not None and cause.cls is cls else ""
    hint = f" ({cause.hint})" if cause is not None and cause.cls is cls and cause.hint else ""
    summary = f"{who} {text}{where}{_when(case)}{meaning}{hint}"
    finding = _finding(court, cls, cases, summary, confidence, site, since_unix_s=case.at_unix_s or None)
    return replace(finding, section=_death_section(case))


def _death_words(case: _Case) -> tuple[str, float]:
    r = case.evidence
    if r.exception is not None:
        message = " ".join(_own_words(r.exception).split())
        return f"raised {r.exception.type}" + (f": {message[:200]}" if message else ""), 0.95
    if r.exit is None:
        return "has ended; how was not seen", 0.7
    words = describe_exit(r.exit, r.oom)
    if r.exit.signal == signal.SIGKILL:
        return words, 0.6 if r.oom is None or r.oom.killed is None else 0.95
    if r.exit.signal is None:
        said = _last_error_line(r.log_tail)
        return (f"{words}; last words: {said}" if said else f"{words} without an exception"), 0.85
    return words, 0.9 if r.exit.signal in CRASH_SIGNALS else 0.8


def _own_words(exception: ExceptionRecord) -> str:
    """The message; where torch put a data loader worker's whole traceback into it, where that was and its last line."""
    head, found, original = exception.message.partition("\nOriginal Traceback (most recent call last):")
    last = original.rstrip().rpartition("\n")[2].strip()
    return f"{head.rstrip('.')}: {last}" if found and last else exception.message


def _last_error_line(lines: Sequence[str]) -> str:
    """The line that names a Python exception after a traceback, the last one of the tail."""
    seen_traceback = False
    found = ""
    for line in lines:
        if "Traceback (most recent call last)" in line:
            seen_traceback = True
        elif seen_traceback and line[:1].strip() and ":" in line and "Error" in line.split(":", 1)[0]:
            found = line.strip()[:200]
    return found


def _death_site(court: _Court, case: _Case) -> str | None:
    r = case.evidence
    if r.exception is not None:
        return callsite(user_frame(r.exception.frames, court.script), court.script)
    crashed = next((s for s in r.stacks if "current" in s.thread), None) or main_stack(r.stacks)
    if r.exit is not None and r.exit.signal in CRASH_SIGNALS and crashed is not None:
        return callsite(user_frame(crashed.frames, court.script), court.script)
    return None


def _when(case: _Case) -> str:
    r = case.evidence
    parts = [f"after step {r.step}"] if r.step is not None else []
    section = _death_section(case)
    if section == TEARDOWN:
        parts.append("while the interpreter was ending")
    elif section:
        parts.append(f"in section {section}")
    return f", {' '.join(parts)}" if parts else ""


def _death_section(case: _Case) -> str | None:
    """Where it died; the teardown that follows an exception or sys.exit() is no place of it."""
    r = case.evidence
    chose_to_end = r.exception is not None or (r.exit is not None and r.exit.signal is None)
    if r.finished:
        return None if chose_to_end else TEARDOWN
    return case.place.section


def _explained_deaths(court: _Court) -> list[Finding]:
    """Deaths; one for which gloo blames a message's size becomes the mismatch that it comes from.

    Also where its last words are lost, if what the survivors had called differs.
    """
    flights = {c.rank: c.evidence.flight for c in court.cases if c.evidence.flight is not None}
    out = []
    for death in _deaths(court):
        is_told = death.cls is FaultClass.SIZE_MISMATCH
        if len(death.ranks) == 1 and flights and (is_told or _died_unheard(court, death)):
            found = mismatch_of_death(DeadByLargerMessage(death.ranks[0], is_told), flights)
            if found is not None:
                death = _known_of(court, found)
        out.append(death)
    return out


def _died_unheard(court: _Court, death: Finding) -> bool:
    """By abort(), or nobody knows how; and without words of its own."""
    case = next(c for c in court.cases if c.rank == death.ranks[0])
    exit_ = case.evidence.exit
    aborted = exit_ is None or exit_.signal == signal.SIGABRT
    return death.cls is FaultClass.DEAD_PROCESS and aborted and not case.causes


# -- hangs -----------------------------------------------------------------------------------------------------------
def _hang(court: _Court) -> list[Finding]:
    alive = [c for c in court.cases if c.life is _Life.ALIVE and not _is_only_recorded(c)]
    if not alive:
        return []
    hard = [c for c in alive if _hard_state(c)]
    if hard:
        return [_hard_finding(court, c) for c in hard]
    waiting = [c for c in alive if c.is_waiting]
    others = [c for c in alive if not c.is_waiting]
    left = [c for c in court.cases if c.life is _Life.FINISHED]
    some_lost_a_peer = any(c.life is _Life.DIED for c in court.cases)
    if others:
        found = _not_waiting(court, others, waiting)
        return [_weaker(f, 0.7, "other ranks have lost a connection") for f in found] if some_lost_a_peer else found
    if some_lost_a_peer:
        return []  # who waits now has not noticed yet
    if left:
        return _left_early(court, left, waiting)
    return _all_wait(court, waiting)


def _is_only_recorded(case: _Case) -> bool:
    """Nothing but its flight record is known: whether it waits is for that to say."""
    r = case.evidence
    if r.stacks or r.suspicion is not None or r.sections or _hard_state(case):
        return False
    return r.flight is not None or (r.process is None and not r.attached and not r.pid)


def _hard_state(case: _Case) -> bool:
    p = case.evidence.process
    if p is None:
        return False
    if p.state in "Tt" or p.dead_main:
        return True
    return p.state == "D" and case.evidence.stack_unchanged is not False and not _moves(case)


def _moves(case: _Case) -> bool:
    return case.evidence.stack_unchanged is False or (case.cpu is not None and case.cpu > BUSY_CPU_SHARE)


def _hard_finding(court: _Court, case: _Case) -> Finding:
    p = case.evidence.process
    assert p is not None
    who = name_ranks([case.rank])
    site = f" at {case.place.site}" if case.place.site else ""
    if p.state == "T":
        text = f"{who} is stopped (state T; SIGSTOP or SIGTSTP, or a frozen container){site}"
        return _finding(court, FaultClass.STOPPED_PROCESS, [case], text, 0.97, case.place.site)
    if p.state == "t":
        text = f"{who} is held by a debugger (state t){site}"
        return _finding(court, FaultClass.STOPPED_PROCESS, [case], text, 0.9, case.place.site)
    if p.dead_main:
        text = f"the main thread of {who} has ended while {p.threads} threads of it live on"
        return _finding(court, FaultClass.DEAD_PROCESS, [case], text, 0.85, case.place.site)
    where = f" (in {p.wchan})" if p.wchan else ""
    text = f"{who} is in an uninterruptible system call (state D{where}){site}"
    if _in_storage(case):
        return _finding(court, FaultClass.STORAGE_STALL, [case], text, 0.9, case.place.site)
    return _finding(court, FaultClass.HOST_STALL, [case], text, 0.8, case.place.site)


def _in_storage(case: _Case) -> bool:
    p = case.evidence.process
    in_file_system = p is not None and p.state == "D" and any(w in p.wchan for w in _FILE_WAITS)
    return in_file_system or case.doing is Doing.STORAGE or case.place.section == "checkpointing"


def _not_waiting(court: _Court, others: list[_Case], waiting: list[_Case]) -> list[Finding]:
    """Somebody does something else than wait for the other ranks: the waiting ones wait for them."""
    calm = [c for c in others if not _is_busy_ending(c)]
    if len(calm) < len(others):  # the end of an interpreter takes its time on a crowded machine
        others = calm or others
    suspected = [c for c in others if c.evidence.suspicion is not None]
    if suspected and not waiting:
        others = suspected if len(suspected) < len(others) else _minority(court, others)
    elif not waiting and len(others) > 1:
        others = _minority(court, others)
    elif waiting:
        # Teardown and device waits are most often waits for others too: blame them only when nobody does anything else.
        real = [c for c in others if c.doing not in (Doing.TEARDOWN, Doing.DEVICE) and not c.evidence.finished]
        others = [c for c in real if c.evidence.suspicion is not None] or real or others
    classes: dict[tuple[FaultClass, str | None], list[_Case]] = {}
    for case in others:
        classes.setdefault((_stall_class(case), case.place.site), []).append(case)
    return [_stall_finding(court, cls, cases, waiting) for (cls, _), cases in classes.items()]


def _is_busy_ending(case: _Case) -> bool:
    """After its script, so late that no stack can be taken, and at work: slow rather than stuck."""
    at_work = case.state == "R" or (case.cpu is not None and case.cpu > BUSY_CPU_SHARE)
    return case.evidence.finished and case.doing is Doing.UNKNOWN and at_work


def _minority(court: _Court, cases: list[_Case]) -> list[_Case]:
    """Those that stand elsewhere than most; those of the lowest step where steps differ; all where nothing tells."""
    groups = group_ranks((c.evidence for c in cases), court.script)
    if len(groups) > 1 and len(groups[0].ranks) * 2 > len(cases):
        most = set(groups[0].ranks)
        return [c for c in cases if c.rank not in most]
    steps = [c.evidence.step for c in cases if c.evidence.step is not None]
    if len(steps) == len(cases) and min(steps) != max(steps):
        return [c for c in cases if c.evidence.step == min(steps)]
    busy = [c for c in cases if c.cpu is not None and c.cpu > BUSY_CPU_SHARE]
    return busy if 0 < len(busy) < len(cases) else cases


def _stall_class(case: _Case) -> FaultClass:
    suspicion = case.evidence.suspicion
    if suspicion is not None and suspicion.kind == "never_reported":
        return FaultClass.START_UP
    if case.evidence.finished or (suspicion is not None and suspicion.kind == "teardown"):
        return FaultClass.TEARDOWN_HANG
    match case.doing:
        case Doing.INPUT:
            return FaultClass.INPUT_PIPELINE
        case Doing.STORAGE:
            return FaultClass.STORAGE_STALL
        case Doing.DEVICE:
            return FaultClass.DEVICE_STALL
        case Doing.TEARDOWN:
            return FaultClass.TEARDOWN_HANG
        case Doing.UNKNOWN if not case.evidence.attached and case.evidence.step is None:
            return FaultClass.START_UP
        case _:
            return FaultClass.STORAGE_STALL if _in_storage(case) else FaultClass.HOST_STALL


def _stall_finding(court: _Court, cls: FaultClass, cases: list[_Case], waiting: list[_Case]) -> Finding:
    case = cases[0]
    who = name_ranks([c.rank for c in cases])
    is_ = "is" if len(cases) == 1 else "are"
    site = case.place.site
    text = f"{who} {is_} {_stall_words(case)}" + (f" at {site}" if site else "")
    overdue = _overdue_section(case)
    if overdue and overdue != case.place.section:
        text += f" (section {overdue}, in it {case.place.section})" if case.place.section else f" (section {overdue})"
    elif case.place.section:
        text += f" (section {case.place.section})"
    if waiting:
        groups = group_ranks((c.evidence for c in waiting), court.script)
        text = f"{places_sentence(groups, court.evidence.world_size)}; {text}"
    confidence = _stall_confidence(case, waiting)
    op = case.place.activity.op or None
    finding = _finding(court, cls, cases, text, confidence, site, op=op)
    return replace(finding, section=overdue or finding.section)


def _overdue_section(case: _Case) -> str | None:
    """The section whose limit has passed: not always the innermost one."""
    suspicion = case.evidence.suspicion
    return suspicion.section if suspicion is not None and suspicion.kind == "section" else None


def _stall_words(case: _Case) -> str:
    r = case.evidence
    if case.doing is Doing.COMPILING:
        return "compiling (torch.compile or triton), which may take minutes"
    if _is_busy_ending(case):
        return "still at work on ending its interpreter"
    if case.doing is Doing.UNKNOWN:
        if not r.attached:
            return "silent since its start"
        return f"silent: no stack could be taken (process state {case.state or 'unknown'})"
    if case.doing is Doing.INPUT:
        return f"in the data loader ({case.place.activity.op})" + _children_words(case)
    if case.doing is Doing.STORAGE:
        return f"in a checkpoint ({case.place.activity.op})"
    if case.doing is Doing.DEVICE:
        return f"waiting for its device ({case.place.activity.op})"
    if case.doing is Doing.TEARDOWN or r.finished:
        return "still there after the end of the script" if r.finished else "in teardown"
    if r.stack_unchanged is False:
        return "late but moving"
    if case.cpu is not None and case.cpu > BUSY_CPU_SHARE:
        return "busy without progress"
    return "stuck"


def _children_words(case: _Case) -> str:
    p = case.evidence.process
    if p is None:
        return ""
    odd = [f"{pid} in state {state}" for pid, state, _ in p.children if state in "TtDZ"]
    if odd:
        return f"; its child process {', '.join(odd[:4])}"
    return ""


def _stall_confidence(case: _Case, waiting: list[_Case]) -> float:
    r = case.evidence
    confidence = 0.75 if waiting else 0.6
    if r.stack_unchanged:
        confidence += 0.15
    if r.suspicion is not None and r.suspicion.accepted:
        confidence += 0.05
    if case.doing is Doing.COMPILING:
        confidence = 0.3
    elif r.stack_unchanged is False:
        confidence = 0.55 if r.suspicion is not None and r.suspicion.accepted else 0.4
    elif _is_busy_ending(case):
        confidence = 0.4
    elif case.doing is Doing.UNKNOWN:
        confidence = min(confidence, 0.7 if waiting else 0.5)
    return round(confidence, 2)


def _left_early(court: _Court, left: list[_Case], waiting: list[_Case]) -> list[Finding]:
    """Some ended well while others still wait for somebody."""
    groups = group_ranks((c.evidence for c in waiting), court.script)
    where = places_sentence(groups, court.evidence.world_size)
    gone = [c.rank for c in left]
    has = "has" if len(gone) == 1 else "have"
    text = f"{where}; {name_ranks(gone)} {has} ended already"
    if len(left) < len(waiting) or (len(left) == len(waiting) and not any(c.evidence.finished for c in waiting)):
        first = waiting[0]
        return [
            _finding(
                court, FaultClass.SKIPPED_COLLECTIVE, left, text, 0.75, first.place.site, op=first.place.activity.op
            )
        ]
    return [_finding(court, FaultClass.TEARDOWN_HANG, waiting, text, 0.7, waiting[0].place.site)]


def _all_wait(court: _Court, waiting: list[_Case]) -> list[Finding]:
    """Everybody waits for somebody: somebody is missing, or they do not wait for the same thing."""
    groups = group_ranks((c.evidence for c in waiting), court.script)
    where = places_sentence(groups, court.evidence.world_size)
    absent = court.absent()
    if all(c.doing is Doing.JOINING for c in waiting):
        late = f"; {name_ranks(absent)} did not join" if absent else ""
        cases_or_absent = absent or tuple(c.rank for c in waiting)
        return [Finding(FaultClass.START_UP, cases_or_absent, where + late, 0.7, callsite=waiting[0].place.site)]
    if absent:
        text = f"{where}; {name_ranks(absent)} could not be asked"
        return [Finding(FaultClass.HOST_STALL, absent, text, 0.4, op=waiting[0].place.activity.op or None)]
    ops = {c.place.activity.op for c in waiting}
    for sided, other in ((RECEIVING, "sends"), (SENDING, "receives")):
        if ops and ops <= sided:
            sites = ", ".join(dict.fromkeys(c.place.site or "?" for c in waiting))
            text = f"{where}; nobody {other} ({sites})"
            op, site = waiting[0].place.activity.op, waiting[0].place.site
            return [_finding(court, FaultClass.P2P_UNMATCHED, waiting, text, 0.75, site, op=op)]
    by_site: dict[tuple[str | None, str], list[_Case]] = {}
    for case in waiting:
        by_site.setdefault((case.place.site, case.place.activity.op), []).append(case)
    if len(by_site) > 1:
        return [_apart(court, list(by_site.values()), where)]
    by_step: dict[int, list[_Case]] = {}
    for case in waiting:
        if case.evidence.step is not None:
            by_step.setdefault(case.evidence.step, []).append(case)
    if len(by_step) > 1 and sum(map(len, by_step.values())) == len(waiting):
        return [_out_of_step(court, by_step, where)]
    if len(waiting) == 1:
        return [_finding(court, FaultClass.HOST_STALL, waiting, where, 0.5, waiting[0].place.site)]
    text = f"{where}; all arrived and nothing moves: the network, the collective library, or a call skipped earlier"
    return [_finding(court, FaultClass.IN_FLIGHT_NETWORK, waiting, text, 0.4, waiting[0].place.site)]


def _apart(court: _Court, sides: list[list[_Case]], where: str) -> Finding:
    """Ranks wait at different call sites: the smaller side left out (or went past) what the larger side waits in."""
    sides = sorted(sides, key=lambda s: (-len(s), -_step(s[0]), s[0].rank))
    even = len(sides[0]) == len(sides[1])
    if even:  # nothing but a guess; where neither is nearer to training, the side that is further went on alone
        sides = sorted(sides[:2], key=lambda s: (_distance_from_training(s[0]), _step(s[0]), _line(s[0])))
    culprits = [c for side in sides[1:] for c in side]
    scene = sides[0][0].place
    return _finding(
        court,
        FaultClass.SKIPPED_COLLECTIVE,
        culprits,
        f"{where}; {name_ranks([c.rank for c in culprits])} did not come to {scene.activity.op} at {scene.site}",
        0.45 if even else 0.8,
        sides[1][0].place.site,
        op=scene.activity.op or None,
    )


def _distance_from_training(case: _Case) -> int:
    """Training waits in backward, then in collectives that carry data; a barrier belongs to what is done beside it.

    So a rank that is alone in one has most often saved or evaluated on its own.
    """
    if case.doing is Doing.BACKWARD:
        return 0
    return 2 if "barrier" in case.place.activity.op else 1


def _out_of_step(court: _Court, by_step: Mapping[int, list[_Case]], where: str) -> Finding:
    """One call site, different steps: the minority made a collective less (it is ahead) or one more (it is behind)."""
    most = max(by_step.items(), key=lambda kv: (len(kv[1]), -kv[0]))[0]
    culprits = [c for step, cases in by_step.items() if step != most for c in cases]
    even = len(culprits) * 2 >= sum(map(len, by_step.values()))
    ahead = _step(culprits[0]) > most
    cls = FaultClass.SKIPPED_COLLECTIVE if ahead else FaultClass.EXTRA_COLLECTIVE
    steps = f"{name_ranks([c.rank for c in culprits])} after step {_step(culprits[0])}, the others after step {most}"
    return _finding(court, cls, culprits, f"{where}; {steps}", 0.45 if even else 0.75, culprits[0].place.site)


def _step(case: _Case) -> int:
    return case.evidence.step if case.evidence.step is not None else -1


def _line(case: _Case) -> int:
    site = case.place.site or ":0"
    tail = site.rpartition(":")[2]
    return int(tail) if tail.isdigit() else 0


# -- nothing of the above --------------------------------------------------------------------------------------------
def _last_resort(court: _Court, flight: FlightJudgement | None) -> list[Finding]:
    died = sorted((c for c in court.cases if c.life is _Life.DIED), key=lambda c: (c.at_unix_s, c.rank))
    if died:
        first = died[0]
        cause = first.causes[0][0]
        absent = court.absent()
        tell = f"{name_ranks([c.rank for c in died])} died telling that {cause.words}"
        if all(c.evidence.step is None for c in court.cases):
            text = f"{tell}, before the first step, and no other fault is known"
            return [_finding(court, FaultClass.START_UP, died, text, 0.5, _death_site(court, first))]
        if absent:
            text = f"{tell}; {name_ranks(absent)} could not be asked"
            return [Finding(FaultClass.DEAD_NODE, absent, text, 0.5)]
        text = f"{tell}, and no other fault is known"
        return [_finding(court, FaultClass.INSUFFICIENT_DATA, died, text, 0.3, _death_site(court, first))]
    finished = [c for c in court.cases if c.life is _Life.FINISHED]
    if finished and len(finished) == court.evidence.world_size:
        return [Finding(FaultClass.HEALTHY, (), "all ranks ended with exit code 0", 1.0)]
    if flight is not None and all(_is_only_recorded(c) for c in court.cases):
        nothing = Finding(FaultClass.HEALTHY, (), "no collective is in flight on any rank", 0.8)
        found = [_known_of(court, f.finding) for f in flight.findings] or [nothing] * flight.is_healthy
        if found:
            return found
    if court.absent():
        text = f"{name_ranks(court.absent())} could not be asked"
        return [Finding(FaultClass.INSUFFICIENT_DATA, court.absent(), text, 0.2)]
    return [Finding(FaultClass.INSUFFICIENT_DATA, (), "no evidence was collected", 0.0)]


# -- common ----------------------------------------------------------------------------------------------------------
def _finding(
    court: _Court,
    cls: FaultClass,
    cases: Sequence[_Case],
    summary: str,
    confidence: float,
    site: str | None,
    op: str | None = None,
    since_unix_s: float | None = None,
) -> Finding:
    if since_unix_s is None:
        times = [t for c in cases if (t := _quiet_since(court, c)) is not None]
        since_unix_s = min(times, default=None)
    return Finding(
        cls=cls,
        ranks=tuple(sorted(c.rank for c in cases)),
        summary=summary,
        confidence=confidence,
        nodes=tuple(dict.fromkeys(c.evidence.node for c in cases)),
        gpus=tuple(dict.fromkeys(c.evidence.gpu for c in cases if c.evidence.gpu)),
        section=cases[0].place.section,
        op=op,
        callsite=site,
        since_unix_s=since_unix_s,
        evidence=tuple(dict.fromkeys(f for c in cases for f in c.evidence.files)),
    )


def _quiet_since(court: _Court, case: _Case) -> float | None:
    r = case.evidence
    if r.suspicion is not None:
        return court.unix_s(r.node, r.suspicion.since_s)
    signs = [s.since_s for s in r.sections] + ([r.step_at_s] if r.step_at_s is not None else [])
    return court.unix_s(r.node, max(signs, default=None))


def _weaker(finding: Finding, factor: float, why: str) -> Finding:
    return replace(finding, confidence=round(finding.confidence * factor, 2), summary=f"{finding.summary}; {why}")


def _victims(court: _Court, findings: Sequence[Finding], culprits: set[int]) -> tuple[int, ...]:
    """Hang: who waits. Death: everyone else, for the attempt ends for all of them."""
    main = findings[0].cls
    if main in (FaultClass.HEALTHY, FaultClass.INSUFFICIENT_DATA, FaultClass.PREEMPTED):
        return tuple(c.rank for c in court.cases if c.life is _Life.DIED and c.is_collateral and c.rank not in culprits)
    by_death = any(c.life is _Life.DIED for c in court.cases) or main is FaultClass.DEAD_NODE
    return tuple(
        c.rank
        for c in court.cases
        if c.rank not in culprits
        and (
            c.is_waiting
            or c.doing in (Doing.DEVICE, Doing.BACKWARD, Doing.TEARDOWN)
            or (by_death and c.life is not _Life.FINISHED)
        )
    )


def _missing(court: _Court, flight: FlightJudgement | None) -> tuple[str, ...]:
    texts = [*court.evidence.missing, *(flight.missing if flight is not None else ())]
    per_text: dict[str, list[int]] = {}
    for case in court.cases:
        for text in case.evidence.missing:
            per_text.setdefault(text, []).append(case.rank)
    texts += [f"{name_ranks(ranks)}: {text}" for text, ranks in per_text.items()]
    if court.absent():
        texts.append(f"{name_ranks(court.absent())}: no evidence at all")
    return tuple(texts[:MAX_MISSING])
