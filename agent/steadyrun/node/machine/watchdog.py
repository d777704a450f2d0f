"""Which deadlines a rank is under, which have passed, and whether a second signal agrees that it hangs.

Pure judgement of one rank's board view (``watched``, ``overdue``) and of one node's suspicions against a probe of all
its ranks (``judge``). What is watched:

=================  ========================================  ==========================================================
kind               from                                      until
=================  ========================================  ==========================================================
never_reported     the spawn                                 the in-rank side has attached (``start_s``)
section            its entry                                 it is closed; each open section for itself, in every lane
no_progress        newest step, beat or closed section       next step (``step_s``), or next section where the script
                                                             opens sections named ``step``, or others and the limit was
                                                             given (``out_of_section_s``)
teardown           the end of the script, or the first rank  the process has ended (``teardown_s``)
                   of the node that ended with 0
raised             the end of the script by an exception     the same (``raised_s``; that it failed is certain)
=================  ========================================  ==========================================================

A section that nobody gave a limit for (not the user, not a known name) may be the loop around everything, so steps and
beats inside it count as its progress. A section left open by mistake never switches anything off: the time between
steps is suspended only by a section of the main thread that was entered after the newest step.

Limits that durations chose come in two stages. At the soft one all ranks of the node are looked at (``judge_soft``),
and only what shows a hang allows to act; that look begins before the limit, so that it ends soon after. At the hard
one time alone acts, unless the rank compiles. Neither holds where nothing like it was seen: in the first pass of a
section (which has a limit of its own) and between the first steps after a start.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from steadyrun.core.board import SlotView
from steadyrun.core.frames import Doing
from steadyrun.core.records import Suspicion
from steadyrun.core.sections import CHECKPOINTING, EVALUATION, MAIN_LANE, SETUP, STEP
from steadyrun.core.sections import OUT_OF_SECTION as OUTSIDE
from steadyrun.node.machine.events import Limits, ProbeResult

__all__ = [
    "Incarnation",
    "Judgement",
    "Watched",
    "judge",
    "judge_soft",
    "next_deadline_s",
    "overdue",
    "quiet_s",
    "view_of",
    "watched",
]

IDLE_CPU_SHARE: Final = 0.02  # below: the process does nothing
STILL_CPU_SHARE: Final = 0.1  # below, with an unchanged stack: nothing but threads that look after the process
BUSY_CPU_SHARE: Final = 0.5  # above: the process computes
BUSY_CHILDREN_SHARE: Final = 0.2  # above: descendants work for it


@dataclass(frozen=True, slots=True)
class Incarnation:
    """The process that is asked about, and what is remembered of it between two views.

    Attributes:
        pid: None while the spawn is not confirmed.
        observed: it is expected to attach under this very pid; False for entry points that may never attach, or do so
            in a descendant (a shell around Python).
        own_step: a section named ``step`` has been seen.
        own_sections: any section of the script's own has been seen.
        others_done_s: when the first other rank of the node ended with 0; None: none has.
    """

    rank: int
    attempt: int
    pid: int | None
    spawned_s: float
    observed: bool = True
    own_step: bool = False
    own_sections: bool = False
    others_done_s: float | None = None


@dataclass(frozen=True, slots=True)
class Watched:
    """One deadline a rank is under.

    Attributes:
        suspicion: what to say once it has passed.
        due_s: when it passes.
        compile_until_s: until then a rank that compiles is not hung.
        ask_compiling: an accepted limit on a first pass of ``step`` or ``setup``, or a calibrated one: look for
            compilation before acting.
        key: what the limit is for, as ``Limits`` has it.
        looks_from_s: of a soft limit, when the look at the ranks begins.
    """

    suspicion: Suspicion
    due_s: float
    compile_until_s: float
    ask_compiling: bool = False
    key: str = ""
    looks_from_s: float = inf

    @property
    def is_soft(self) -> bool:
        return self.suspicion.is_soft


def view_of(who: Incarnation, view: SlotView | None) -> SlotView | None:
    """The view if this incarnation wrote it; what another one left counts as absent."""
    if view is None or view.attempt != who.attempt:
        return None
    if who.observed and who.pid is not None and view.pid != who.pid:
        return None
    return view


def watched(who: Incarnation, view: SlotView | None, limits: Limits) -> list[Watched]:
    """Every deadline the rank is under now, passed or not; those without a limit are left out."""
    view = view_of(who, view)
    if view is None or view.attached_s is None:
        if not who.observed:
            return []
        return _listed(_watch(who, limits, "never_reported", None, "start", limits.start_s, who.spawned_s))
    if view.finished_s is not None and view.has_exception and limits.raised_s < limits.teardown_s:
        suspicion = Suspicion(who.rank, "raised", None, view.finished_s, limits.raised_s, accepted=True)
        due_s = view.finished_s + limits.raised_s
        return [Watched(suspicion, due_s, due_s)]
    if view.finished_s is not None:
        return _listed(_watch(who, limits, "teardown", None, "teardown", limits.teardown_s, view.finished_s))
    found = [w for i in range(len(view.sections)) for w in _watch_section(who, view, limits, i)]
    found += _watch_progress(who, view, limits)
    return [*found, *_listed(_watch_end(who, view, limits))]


def overdue(who: Incarnation, view: SlotView | None, limits: Limits, now_s: float) -> list[Suspicion]:
    """What the rank is suspected of now, soft limits left out."""
    return [w.suspicion for w in watched(who, view, limits) if w.due_s <= now_s and not w.is_soft]


def next_deadline_s(who: Incarnation, view: SlotView | None, limits: Limits, now_s: float) -> float:
    """When the next deadline passes that has not passed yet, soft ones left out; ``inf``: none."""
    return min((w.due_s for w in watched(who, view, limits) if w.due_s > now_s and not w.is_soft), default=inf)


# -- the single deadlines --------------------------------------------------------------------------------------------
def _listed(*found: Watched | None) -> list[Watched]:
    return [w for w in found if w is not None]


def _given(values: Mapping[str, float | None], name: str, default: float) -> float:
    value = values.get(name, default)
    return inf if value is None else value


def _watch(
    who: Incarnation,
    limits: Limits,
    kind: str,
    section: str | None,
    key: str,
    default_s: float,
    since_s: float,
) -> Watched | None:
    limit_s = _given(limits.sections, key, default_s)
    if limit_s == inf:
        return None
    suspicion = Suspicion(who.rank, kind, section, since_s, limit_s, key in limits.accepted)
    patience_s = since_s + max(limit_s, limits.first_step_s)
    return Watched(suspicion, since_s + limit_s, patience_s, key in limits.calibrated, key)


def _with_soft(hard: Watched, limits: Limits) -> list[Watched]:
    """The deadline and, before it, the soft one that its key has."""
    soft_s = limits.soft.get(hard.key, inf)
    if soft_s >= hard.suspicion.limit_s:
        return [hard]
    due_s = hard.suspicion.since_s + soft_s
    ahead_s = max(0.0, min(limits.soft_window_s - limits.soft_rest_s, soft_s / 2))
    s = hard.suspicion
    soft = Suspicion(s.rank, s.kind, s.section, s.since_s, soft_s, accepted=False, is_soft=True)
    return [hard, Watched(soft, due_s, hard.due_s, False, hard.key, due_s - ahead_s)]


def _endless(who: Incarnation, limits: Limits, key: str, section: str | None, since_s: float) -> Watched | None:
    """Stands for a hard limit that is switched off where the soft one is not."""
    if key not in limits.soft:
        return None
    kind = "no_progress" if section is None else "section"
    return Watched(Suspicion(who.rank, kind, section, since_s, inf), inf, inf, False, key)


def _known_limit_s(name: str, limits: Limits) -> float | None:
    """The limit of a section by its name, or None: nobody has said anything about it."""
    if name in limits.sections:
        return _given(limits.sections, name, inf)
    if name == SETUP:
        return limits.setup_s
    if name == STEP:
        return limits.step_s
    if name == CHECKPOINTING:
        return limits.checkpointing_s
    if name.lower() in EVALUATION:
        return limits.evaluation_s
    return None


def _watch_section(who: Incarnation, view: SlotView, limits: Limits, index: int) -> list[Watched]:
    section = view.sections[index]
    name, since_s = section.name, section.since_s
    accepted = name in limits.accepted
    known_s = _known_limit_s(name, limits)
    limit_s = limits.default_section_s if known_s is None else known_s
    first = section.first or name == SETUP
    first_limit_s = max(limit_s, _given(limits.first, name, limits.first_step_s))
    # A limit that was given holds from the first pass on, unless the first pass was given one too; the default for
    # first passes then only bounds how long a compilation may take.
    given_first = name in limits.first
    if first and name != SETUP and (given_first or not accepted):
        limit_s = first_limit_s
    if name == SETUP:
        if given_first:
            limit_s = first_limit_s
        if not accepted:  # a script that only beats, or whose set-up is a loop of its own sections
            since_s = _newest(since_s, view.beat_at_s, view.last_change_s if who.own_sections else None)
    elif known_s is None:
        since_s = _newest(since_s, view.beat_at_s, view.step_at_s)
    patience_s = max(limit_s, limits.first_step_s, first_limit_s if first else 0.0)
    ask = accepted and ((first and name in (SETUP, STEP)) or name in limits.calibrated)
    suspicion = Suspicion(who.rank, "section", name, since_s, limit_s, accepted)
    found = Watched(suspicion, since_s + limit_s, since_s + patience_s, ask, name)
    both = [found] if first else _with_soft(found, limits)
    return [w for w in both if w.due_s != inf]


def _watch_progress(who: Incarnation, view: SlotView, limits: Limits) -> list[Watched]:
    assert view.attached_s is not None
    since_s = _newest(view.attached_s, view.step_at_s, view.beat_at_s, view.last_change_s)
    last_step_s = view.step_at_s if view.step_at_s is not None else -inf
    inside = [s for s in view.sections if s.lane == MAIN_LANE]
    if view.step_at_s is None and any(s.name == SETUP for s in inside):
        return []  # before the first step, section setup is the judge
    if any(s.since_s > last_step_s and s.name != SETUP for s in inside):
        return []  # that section's own limit is the judge
    if view.steps_done <= limits.warm_up_steps:
        limits = _without_calibrated(limits)
    outside = _watch(who, limits, "no_progress", None, OUTSIDE, limits.out_of_section_s, since_s)
    if view.step_at_s is None or who.own_step:
        return _both_stages(who, limits, OUTSIDE, outside, since_s)
    between_steps = _watch(who, limits, "no_progress", None, STEP, limits.step_s, since_s)
    # Calibrated together with sections that this script does not have, the limit may be below the time of a step.
    is_meant = OUTSIDE in limits.accepted and (who.own_sections or STEP not in limits.accepted)
    found = [w for w in (between_steps, outside if is_meant else None) if w is not None]
    first = min(found, key=lambda w: w.due_s, default=None)
    return _both_stages(who, limits, STEP if first is None else first.key, first, since_s)


def _both_stages(who: Incarnation, limits: Limits, key: str, hard: Watched | None, since_s: float) -> list[Watched]:
    hard = _endless(who, limits, key, None, since_s) if hard is None else hard
    return [] if hard is None else [w for w in _with_soft(hard, limits) if w.due_s != inf]


def _without_calibrated(limits: Limits) -> Limits:
    """What held before the time between steps was calibrated."""
    names = {STEP, OUTSIDE}
    if names.isdisjoint(limits.calibrated) and names.isdisjoint(limits.soft):
        return limits
    gone = names & limits.calibrated
    return replace(
        limits,
        sections={name: s for name, s in limits.sections.items() if name not in gone},
        accepted=limits.accepted - gone,
        calibrated=limits.calibrated - gone,
        soft={name: s for name, s in limits.soft.items() if name not in names},
    )


def _watch_end(who: Incarnation, view: SlotView, limits: Limits) -> Watched | None:
    """The rank goes on although another one has ended well: the job is over and this one does not end."""
    if who.others_done_s is None or any(s.name != SETUP and s.lane == MAIN_LANE for s in view.sections):
        return None
    since_s = _newest(who.others_done_s, view.step_at_s, view.beat_at_s, view.last_change_s)
    return _watch(who, limits, "teardown", None, "teardown", limits.teardown_s, since_s)


def _newest(first_s: float, *others_s: float | None) -> float:
    return max([first_s, *(t for t in others_s if t is not None)])


# -- the second signal -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Judgement:
    """What two signals together say about a node.

    Attributes:
        guilty: passed deadlines that may be acted on; empty: nobody may be touched.
        spared: rank -> why it is left alone although it is late.
        wait_until_s: rank -> earliest time at which looking again can change anything (only where it is known).
    """

    guilty: tuple[Suspicion, ...]
    spared: Mapping[int, str]
    wait_until_s: Mapping[int, float]


def quiet_s(limits: Limits) -> float:
    """How long ranks on several nodes may all wait in collectives before this node acts on waiting alone.

    Whoever moves on another node (rank 0 evaluates or saves, say) is under a limit of its own there and is accused by
    its own node when that passes, so waiting longer than the longest finite limit of all means that nobody moves.
    """
    named = [
        limits.first_step_s,
        limits.setup_s,
        limits.checkpointing_s,
        limits.evaluation_s,
        limits.default_section_s,
        limits.out_of_section_s,
        *(v for v in limits.sections.values() if v is not None),
        *(v for v in limits.first.values() if v is not None),
    ]
    return max(v for v in (*named, 0.0) if v != inf)


def judge(
    late: Sequence[Watched],
    probes: Mapping[int, ProbeResult],
    alive: Collection[int],
    several_nodes: bool,
    limits: Limits,
    now_s: float,
) -> Judgement:
    """Who of the *late* may be acted on. *alive*: all ranks of this node that live; *probes* of as many as answered.

    A late rank is guilty when its limit was accepted; when it is stopped, dead, or in an uninterruptible wait that
    moves nothing; when its stack does not change outside of a collective. Ranks that all wait for others are guilty
    only when no rank moves: on one node all have been looked at; on several, ``quiet_s`` must have passed as well.
    """
    spared: dict[int, str] = {}
    until_s: dict[int, float] = {}
    guilty: list[Suspicion] = []
    waiting: list[Watched] = []
    for w in late:
        s = w.suspicion
        reason, again_s = _excuse(w, probes.get(s.rank), limits, now_s)
        if reason is None:
            guilty.append(s)
        elif reason == WAITS:
            waiting.append(w)
        else:
            spared[s.rank] = reason
            if again_s is not None:
                until_s[s.rank] = again_s
    if waiting and not guilty:
        suspects = {w.suspicion.rank for w in late}
        movers = sorted(set(spared) | {r for r in alive if r not in suspects and not _waits(probes.get(r))})
        act_s = min(w.due_s for w in waiting) + (quiet_s(limits) if several_nodes else 0.0)
        if not movers and now_s >= act_s:
            guilty = [w.suspicion for w in waiting]
        else:
            who = f"rank {', '.join(map(str, movers))} is at work" if movers else "the mover may be on another node"
            for w in waiting:
                spared[w.suspicion.rank] = f"waits for other ranks; {who}"
                if not movers:
                    until_s[w.suspicion.rank] = act_s
    else:
        for w in waiting:
            spared[w.suspicion.rank] = "waits for other ranks"
    return Judgement(tuple(guilty), spared, until_s)


def judge_soft(
    late: Sequence[Watched],
    probes: Mapping[int, ProbeResult],
    alive: Collection[int],
    world_size: int,
    advanced: Collection[int],
) -> Judgement:
    """Who of the *late* shows a hang at a soft limit; what is only slow, or may be, is spared until the hard one.

    Guilty is a rank that is dead or stopped, and one that stands still outside of collectives, without using the CPU or
    moving data, while all others of the node wait in collectives. When all ranks of the job wait, in different
    collectives, all are. Nobody is when a rank has *advanced* since the look began.

    Standing still is no evidence in waits for training data, for storage or for a compiler: so does a healthy rank, and
    only its peers and time can tell.
    """
    spared: dict[int, str] = {}
    guilty: list[Suspicion] = []
    idle: list[Suspicion] = []
    waiting: list[Suspicion] = []
    for s in (w.suspicion for w in late):
        p = probes.get(s.rank)
        if p is not None and p.state in ("T", "Z", "X"):
            guilty.append(s)
        elif s.rank in advanced:
            spared[s.rank] = "has advanced"
        elif (why := _healthy(p, s.section)) is not None:
            spared[s.rank] = why
        else:
            (waiting if p is not None and p.in_collective else idle).append(s)
    if guilty:
        spared.update((s.rank, "waits for other ranks") for s in (*waiting, *idle))
        return Judgement(tuple(guilty), spared, {})
    doubted = {s.rank for s in (*waiting, *idle)}
    movers = sorted(set(advanced) | {r for r in alive if r not in doubted and not _waits(probes.get(r))})
    has_peers = not {s.rank for s in idle}.issuperset(alive)
    places = {probes[r].place for r in alive if r in probes and probes[r].doing == Doing.COLLECTIVE.value}
    if movers:
        why = f"rank {', '.join(map(str, movers))} is at work"
    elif idle and has_peers:
        guilty, why = idle, "waits for other ranks"
    elif idle:
        why = "stands still, but no rank of this node waits for it"
    elif world_size > len(alive):
        why = "waits for other ranks; the mover may be on another node"
    elif len(places) > 1 and all(r in probes and probes[r].doing == Doing.COLLECTIVE.value for r in alive):
        guilty, why = waiting, ""
    else:
        why = "waits for other ranks, as all do in the same place"
    spared.update((s.rank, why) for s in (*waiting, *idle) if s not in guilty)
    return Judgement(tuple(guilty), spared, {})


def _healthy(p: ProbeResult | None, section: str | None) -> str | None:
    """Why a late rank may be healthy; None: it waits for others, or stands still for no reason that could be seen."""
    if p is None or p.stack_unchanged is None:
        return "could not be examined"
    if p.state == "t":
        return "is held by a debugger"
    if p.compiling:
        return "is compiling"
    if not p.stack_unchanged:
        return "is late, but moves"
    if p.in_collective:
        return None
    if p.doing == Doing.INPUT.value:
        return "waits for training data"
    if p.doing == Doing.STORAGE.value or section == CHECKPOINTING or p.state == "D":
        return "waits for storage"
    if p.io_moved:
        return "reads or writes"
    if p.children_cpu_share > STILL_CPU_SHARE:
        return "waits for its own child processes, which work"
    return "computes" if p.cpu_share > STILL_CPU_SHARE else None


WAITS: Final = "waits"


def _excuse(w: Watched, p: ProbeResult | None, limits: Limits, now_s: float) -> tuple[str | None, float | None]:
    """(why the rank is not to blame, when to look again), or (None, None): it is."""
    s = w.suspicion
    if p is not None and p.compiling and now_s < w.compile_until_s and (not s.accepted or w.ask_compiling):
        return "is compiling", w.compile_until_s
    if s.accepted:
        return None, None
    if p is None:
        return "could not be examined", None
    if p.state in ("T", "Z", "X"):
        return None, None
    if p.state == "t":
        return "is held by a debugger", None
    if p.stack_unchanged is False:
        return "is late, but moves", None
    if p.in_collective:
        return WAITS, None
    # A silent write, a pool that works for it, or one long call that computes is allowed as long as a checkpoint: so
    # look saving 100 GB, preparing a data set, building an index on one rank. An endless loop does too.
    patience_s = s.since_s + max(2 * s.limit_s, limits.checkpointing_s)
    if now_s < patience_s:
        if p.io_moved:
            return "reads or writes", patience_s
        if p.children_cpu_share > BUSY_CHILDREN_SHARE:
            return "waits for its own child processes, which work", patience_s
        if p.cpu_share > BUSY_CPU_SHARE:
            return "computes in one place, which may be one long call", patience_s
    if p.state == "D" or p.stack_unchanged:
        return None, None
    # No stack could be had: whether it waits for others is unknown.
    if p.cpu_share > IDLE_CPU_SHARE:
        return "is late, but uses the CPU; its stack could not be read", None
    return (None, None) if s.kind == "never_reported" else (WAITS, None)


def _waits(p: ProbeResult | None) -> bool:
    """This rank is not late itself; it counts as moving unless it is seen waiting for others."""
    return p is not None and p.in_collective and p.stack_unchanged is not False and not p.io_moved
