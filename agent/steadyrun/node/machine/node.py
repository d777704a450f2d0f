"""One node's life: joins, starts its ranks, doubts them, gathers evidence, stops them, and starts again or leaves.

``handle`` takes one event and the time it happened and returns what to do, in order; ``next_deadline_s`` says when to
come back at the latest, with a fresh BoardRead and a Tick. Ranks are judged only on a BoardRead, never on an old view.
What an event means depends on the phase; one that means nothing in a phase is listed in ``IGNORED`` with the reason,
and any other is an InvalidTransition that carries the story.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from typing_extensions import assert_never

from steadyrun.core.board import SlotView
from steadyrun.core.classes import Action, ExitClass, Mode
from steadyrun.core.records import Suspicion
from steadyrun.core.sections import CHECKPOINTING, SETUP, STEP
from steadyrun.node.machine import watchdog
from steadyrun.node.machine.events import (
    PLANNED,
    Alarm,
    AllArrived,
    AllFinished,
    Arrive,
    AskToStop,
    BoardRead,
    ChannelLost,
    Command,
    Decided,
    Decision,
    DropStandbys,
    Event,
    EvidenceDone,
    Finish,
    Gather,
    Join,
    Joined,
    JoinFailed,
    Kill,
    Leave,
    Limits,
    LimitsMade,
    NodePhase,
    NodesWaiting,
    OpenStore,
    PeerStop,
    Probe,
    ProbeResult,
    ProbesDone,
    PublishStop,
    RankExited,
    RankIdle,
    RankPhase,
    RankSlot,
    RankSpawned,
    Spawn,
    SpawnFailed,
    StartStandbys,
    StatesRead,
    StopAsked,
    StoreReady,
    Suspect,
    Sweep,
    SweepDone,
    Terminate,
    Tick,
)
from steadyrun.node.machine.rank import InvalidTransition, RankMachine, Story
from steadyrun.node.machine.watchdog import Incarnation, Watched

__all__ = ["ALLOWED", "IGNORED", "NodeMachine"]

P = NodePhase

ALLOWED: Final[Mapping[NodePhase, frozenset[NodePhase]]] = {
    P.JOINING: frozenset({P.STARTING, P.LEFT}),
    P.STARTING: frozenset({P.RUNNING, P.GATHERING, P.STOPPING, P.DRAINING}),
    P.RUNNING: frozenset({P.GATHERING, P.STOPPING, P.DRAINING, P.LEFT}),
    P.GATHERING: frozenset({P.STOPPING, P.DRAINING}),
    P.STOPPING: frozenset({P.COOLING, P.DRAINING}),
    P.COOLING: frozenset({P.STARTING, P.JOINING, P.LEFT, P.EXCLUDED}),
    P.DRAINING: frozenset({P.LEFT}),
    P.LEFT: frozenset(),
    P.EXCLUDED: frozenset(),
}

LIVE: Final = frozenset({P.STARTING, P.RUNNING})
OVER: Final = frozenset({P.LEFT, P.EXCLUDED})
FAULTS: Final = frozenset({"exit", "hang", "stopped", "start_up"})

_LATE = "it came after this node had moved on"

IGNORED: Final[Mapping[tuple[NodePhase, type], str]] = {
    (P.JOINING, BoardRead): "there are no ranks",
    (P.JOINING, StatesRead): "there are no ranks",
    (P.JOINING, ProbesDone): _LATE,
    (P.JOINING, EvidenceDone): _LATE,
    (P.JOINING, Decided): _LATE,
    (P.JOINING, AllArrived): _LATE,
    (P.JOINING, AllFinished): _LATE,
    (P.JOINING, StoreReady): "Joined says it",
    (P.JOINING, NodesWaiting): "they join together with this node",
    (P.JOINING, SweepDone): _LATE,
    (P.STARTING, AllFinished): "this node's ranks have not ended",
    (P.STARTING, StoreReady): "the attempt has begun",
    (P.RUNNING, StoreReady): "the attempt has begun",
    (P.STARTING, SweepDone): _LATE,
    (P.RUNNING, SweepDone): _LATE,
    (P.GATHERING, SweepDone): _LATE,
    (P.STOPPING, SweepDone): _LATE,
    (P.GATHERING, StatesRead): "ranks are not doubted any more",
    (P.STOPPING, StatesRead): "ranks are not doubted any more",
    (P.COOLING, StatesRead): "ranks are gone",
    (P.DRAINING, StatesRead): "ranks are not doubted any more",
    (P.COOLING, BoardRead): "ranks are gone",
    (P.GATHERING, ProbesDone): "the stop came first",
    (P.STOPPING, ProbesDone): "the stop came first",
    (P.COOLING, ProbesDone): "the stop came first",
    (P.DRAINING, ProbesDone): "the stop came first",
    (P.GATHERING, NodesWaiting): "the attempt is ending; they join with the next one",
    (P.STOPPING, NodesWaiting): "the attempt is ending; they join with the next one",
    (P.COOLING, NodesWaiting): "asked again once the ranks run",
    (P.DRAINING, NodesWaiting): "this node is leaving",
    (P.GATHERING, AllFinished): "the attempt is being stopped",
    (P.STOPPING, AllFinished): "the attempt is being stopped",
    (P.COOLING, AllFinished): "the attempt was stopped",
    (P.GATHERING, StoreReady): "the attempt is being stopped",
    (P.STOPPING, StoreReady): "the attempt is being stopped",
    (P.DRAINING, StoreReady): "this node is leaving",
    (P.DRAINING, Decided): "this node is leaving",
    (P.DRAINING, AllArrived): "this node is leaving",
    (P.DRAINING, AllFinished): "this node is leaving",
    (P.DRAINING, ChannelLost): "this node is leaving",
}

PROBE_SLACK_S: Final = 10.0  # beyond its window a probe counts as failed
ASK_COMPILING_S: Final = 0.1  # window of the look at an accepted limit; with it the delay stays under 0.3 s
ANNOUNCE_S: Final = 2.0  # for PeerStop after PublishStop (0.3 ms on a healthy store)
GATHER_SLACK_S: Final = 2.0  # Gather ends by itself within its limit; this is for a loop that cannot keep it
LAST_WORDS_S: Final = 5.0  # for evidence before a SIGKILL that no incident preceded
SWEEP_S: Final = 30.0  # a sweep takes about a second
AWAKE_S: Final = 5.0  # later than promised by this: the agent itself was stopped
FRESH_S: Final = 1.0  # a view this old may still be judged with a probe
RECHECK_MOST_S: Final = 900.0
LOOK_AGAIN_LEAST_S: Final = 1.0  # between two looks at ranks beyond a soft limit
SHORTEST_LOOK_S: Final = 0.5


@dataclass(slots=True)
class _RankWatch:
    """What is known about one rank beside its phase."""

    view: SlotView | None = None
    own_step: bool = False
    own_sections: bool = False
    state: str = ""
    state_since_s: float = inf
    state_told: bool = False

    def see(self, view: SlotView | None) -> None:
        self.view = view
        for section in view.sections if view is not None else ():
            if section.name not in (SETUP, CHECKPOINTING):  # those two open by themselves
                self.own_sections = True
                self.own_step = self.own_step or section.name == STEP

    def is_in(self, name: str) -> bool:
        return self.view is not None and any(s.name == name for s in self.view.sections)

    def mark(self) -> tuple[object, ...]:
        """Changes when the rank makes progress of any kind."""
        v = self.view
        return () if v is None else (v.pid, v.steps_done, v.step, v.beats, v.last_change_s, v.finished_s)


@dataclass(slots=True)
class _ProbeAsked:
    ranks: tuple[int, ...]
    until_s: float
    only_accepted: bool  # too short to be a second signal: it only looks for compilation
    results: Mapping[int, ProbeResult] | None = None
    is_soft: bool = False  # for soft limits: it begins before they have passed
    marks: Mapping[int, tuple[object, ...]] = field(default_factory=dict)  # of the ranks when it began


@dataclass(frozen=True, slots=True)
class _Cause:
    """Why the attempt ends, as this node sees it."""

    trigger: str
    reason: str
    suspicions: tuple[Suspicion, ...] = ()


@dataclass(slots=True)
class _Attempt:
    """Everything that is forgotten when the next attempt begins."""

    number: int
    ranks: dict[int, RankMachine] = field(default_factory=dict)
    watches: dict[int, _RankWatch] = field(default_factory=dict)
    views_s: float = -inf
    judge_from_s: float = -inf
    others_done_s: dict[int, float] = field(default_factory=dict)  # when a rank of this node ended with 0
    probe: _ProbeAsked | None = None
    holds: dict[Suspicion, float] = field(default_factory=dict)  # passed, but left alone until then
    looks: dict[tuple[int, str, str | None], int] = field(default_factory=dict)
    soft_looks: dict[Suspicion, int] = field(default_factory=dict)
    alarmed: dict[str, set[Suspicion]] = field(default_factory=dict)  # key of a soft limit -> told of the pass there is
    reported: dict[int, tuple[object, ...]] = field(default_factory=dict)
    cause: _Cause | None = None
    agreed: str | None = None  # trigger of the stop that won over all nodes
    announced_until_s: float = inf
    gathers: int = 0
    evidence_taken: bool = False
    last_words_until_s: float = inf
    stopping_since_s: float = inf
    grace_s: float = inf
    asked_until_s: float = inf
    finished_told: bool = False
    finish_until_s: float = inf
    standbys_asked: bool = False
    sweep_until_s: float = inf
    swept: bool = False
    stuck: tuple[int, ...] = ()
    decision: Decision | None = None
    arrived: bool = False
    decide_until_s: float = inf
    arrive_until_s: float = inf
    store_until_s: float = inf
    store_ready: bool = False
    start_from_s: float = -inf


class NodeMachine:
    """The machine of one node. Not thread-safe: one loop feeds it.

    Args:
        local_ranks: how many ranks run here.
        limits: see ``Limits``.
        mode: ``OBSERVE`` reports hangs and touches nobody for them; processes that end by themselves are dealt with in
            both modes.
        observed: False where ranks may never attach (``--no-python``): nobody is accused of not reporting.
    """

    def __init__(self, local_ranks: int, limits: Limits, mode: Mode = Mode.ACT, observed: bool = True) -> None:
        # To observe means to wait for what a failed process does by itself, as torchrun would.
        self.limits = limits if mode is Mode.ACT else replace(limits, raised_s=inf)
        self.mode, self.observed = mode, observed
        self.local_ranks = local_ranks
        self.phase = NodePhase.JOINING
        self.group_rank = 0
        self.group_world_size = 1
        self.world_size = 0
        self.story = Story()
        self._slots: tuple[RankSlot, ...] = ()
        self._now = _Attempt(0)
        self._early_stop: PeerStop | None = None
        self._waiting_nodes = 0
        self._stop_signal: int | None = None
        self._interrupts = 0
        self._lost: str | None = None
        self._standbys_started = False
        self._due_s: float | None = None
        self._watched_now: list[Watched] | None = None
        self._coming_limits: Limits | None = None  # until nobody is late by them alone

    # -- what others may ask -----------------------------------------------------------------------------------------
    @property
    def attempt(self) -> int:
        """Number of the attempt whose ranks run, or ran last."""
        return self._now.number

    @property
    def ranks(self) -> Mapping[int, RankMachine]:
        """This attempt's local ranks, by rank."""
        return self._now.ranks

    def rank_phase(self, rank: int) -> RankPhase:
        """STANDBY for a rank that this node has no process of."""
        found = self._now.ranks.get(rank)
        return RankPhase.STANDBY if found is None else found.phase

    def start(self, now_s: float) -> list[Command]:
        """The first commands; call it once."""
        self.story.add(now_s, "start")
        return [Join()]

    def next_deadline_s(self) -> float:
        """When this machine must hear a BoardRead and a Tick at the latest; ``inf``: only events change anything."""
        if self._due_s is None:  # loops ask far more often than anything happens
            self._due_s = self._earliest_s()
        return self._due_s

    def _earliest_s(self) -> float:
        a = self._now
        due_s = [r.deadline_s for r in a.ranks.values()]
        match self.phase:
            case P.STARTING | P.RUNNING:
                due_s += [a.announced_until_s, a.finish_until_s]
                due_s.append(self._next_judgement_s())
            case P.GATHERING:
                due_s.append(a.last_words_until_s)
            case P.STOPPING | P.DRAINING:
                due_s += [a.last_words_until_s, a.asked_until_s, a.sweep_until_s]
            case P.COOLING:
                due_s += [a.sweep_until_s, a.decide_until_s, a.arrive_until_s, a.store_until_s]
                if a.store_ready and a.store_until_s != inf:  # it may be up before this node has swept
                    due_s.append(a.start_from_s)
            case P.JOINING | P.LEFT | P.EXCLUDED:
                return inf
            case _:
                assert_never(self.phase)
        return min(due_s)

    # -- events ------------------------------------------------------------------------------------------------------
    def handle(self, event: Event, now_s: float) -> list[Command]:
        """What to do about *event*, which happened at *now_s* (CLOCK_MONOTONIC seconds).

        Raises:
            InvalidTransition: the event cannot come in this phase.
        """
        expected_s = self.next_deadline_s()
        if not isinstance(event, StatesRead):  # says itself when it changes a deadline: it comes with every look
            self._due_s = None
        if not isinstance(event, (StatesRead, Tick)):
            self._watched_now = None
        if not isinstance(event, (BoardRead, StatesRead, Tick)):
            self.story.add(now_s, f"{self.phase.value}: {event}")
        out: list[Command] = []
        if self.phase in OVER:
            return out  # whatever still comes, this agent's part has ended
        match event:
            case Joined():
                self._on_joined(event, now_s, out)
            case JoinFailed(reason=reason, exit_class=exit_class):
                self._only_in(event, P.JOINING)
                self._leave(exit_class, reason, now_s, out)
            case RankSpawned(rank=rank, pid=pid):
                self._on_spawned(self._rank(rank, event), pid, now_s)
            case SpawnFailed(rank=rank, reason=reason):
                self._on_spawn_failed(self._rank(rank, event), reason, now_s, out)
            case BoardRead(views=views):
                self._on_board(event, views, now_s, expected_s, out)
            case StatesRead(states=states):
                self._on_states(event, states, now_s, out)
            case RankIdle(rank=rank):
                self._on_idle(rank, now_s, out)
            case RankExited(rank=rank, code=code):
                self._on_exited(self._rank(rank, event), code, now_s, out)
            case ProbesDone(results=results):
                self._on_probes(event, results, now_s, out)
            case EvidenceDone(attempt=attempt):
                self._on_evidence(event, attempt, now_s, out)
            case PeerStop():
                self._on_peer_stop(event, now_s, out)
            case Decided(decision=decision):
                self._on_decided(event, decision)
            case AllArrived(attempt=attempt):
                if not self._is_ignored(event) and attempt == self._now.number:
                    self._now.arrived = True
            case AllFinished(attempt=attempt):
                self._on_all_finished(event, attempt, now_s, out)
            case StoreReady(attempt=attempt):
                self._on_store_ready(event, attempt)
            case ChannelLost(reason=reason):
                self._on_channel_lost(event, reason, now_s, out)
            case NodesWaiting(count=count):
                if not self._is_ignored(event):
                    self._waiting_nodes = count
            case StopAsked(signal=signum):
                self._on_stop_asked(signum, now_s, out)
            case SweepDone(attempt=attempt, stuck=stuck):
                self._on_swept(event, attempt, stuck, now_s, out)
            case LimitsMade(limits=limits):
                self._coming_limits = limits
                self._take_limits(now_s)
            case Tick():
                pass
            case _:
                assert_never(event)
        if isinstance(event, (Tick, BoardRead)):
            self._expire(now_s, out)
        self._settle(now_s, out)
        if out:
            self._due_s = None
        return out

    def _invalid(self, event: Event) -> InvalidTransition:
        return InvalidTransition("node", self.phase.value, f"whatever {event} asks for", self.story.lines())

    def _is_ignored(self, event: Event) -> bool:
        return (self.phase, type(event)) in IGNORED

    def _only_in(self, event: Event, *phases: NodePhase) -> None:
        if self.phase not in phases:
            raise self._invalid(event)

    def _rank(self, rank: int, event: Event) -> RankMachine:
        if rank not in self._now.ranks:
            raise self._invalid(event)
        return self._now.ranks[rank]

    def _move(self, phase: NodePhase, now_s: float) -> None:
        if phase not in ALLOWED[self.phase]:
            raise InvalidTransition("node", self.phase.value, phase.value, self.story.lines())
        self.story.add(now_s, f"node: {self.phase.value} -> {phase.value}")
        self.phase = phase

    # -- beginning of an attempt -------------------------------------------------------------------------------------
    def _on_joined(self, event: Joined, now_s: float, out: list[Command]) -> None:
        self._only_in(event, P.JOINING)
        if len(event.slots) != self.local_ranks:
            raise ValueError(f"joined with {len(event.slots)} ranks for this node, but it has {self.local_ranks}")
        self.group_rank, self.group_world_size = event.group_rank, event.group_world_size
        self.world_size, self._slots = event.world_size, event.slots
        self._waiting_nodes = 0
        self._begin(event.attempt, now_s, out)

    def _begin(self, attempt: int, now_s: float, out: list[Command]) -> None:
        self._now = a = _Attempt(attempt)
        self._watched_now = None
        self._move(P.STARTING, now_s)
        for slot in self._slots:
            a.ranks[slot.rank] = rank = RankMachine(slot.rank, slot.local_rank, attempt, self.story)
            a.watches[slot.rank] = _RankWatch()
            rank.move(RankPhase.STARTING, now_s)
            out.append(Spawn(slot.rank, slot.local_rank, attempt))
        early, self._early_stop = self._early_stop, None
        if early is not None and early.attempt == attempt:
            a.agreed = early.trigger
            self._end_attempt(_Cause(early.trigger, early.reason), now_s, out)

    def _on_spawned(self, rank: RankMachine, pid: int, now_s: float) -> None:
        rank.pid = pid
        if rank.phase is RankPhase.STARTING:
            rank.spawned_s = now_s
            if not self.observed:
                rank.move(RankPhase.RUNNING, now_s)

    def _on_spawn_failed(self, rank: RankMachine, reason: str, now_s: float, out: list[Command]) -> None:
        rank.move(RankPhase.EXITED, now_s)
        if self.phase in LIVE:
            self._announce(_Cause("start_up", f"rank {rank.rank} could not be started: {reason}"), now_s, out)

    # -- watching ----------------------------------------------------------------------------------------------------
    def _on_board(
        self,
        event: BoardRead,
        views: Mapping[int, SlotView | None],
        now_s: float,
        expected_s: float,
        out: list[Command],
    ) -> None:
        if self._is_ignored(event):
            return
        a = self._now
        if self.phase in LIVE and now_s > expected_s + AWAKE_S:
            # The agent was stopped, or the whole machine was: the ranks' clocks ran on while they could not. One
            # confirm window is enough for a living rank to show itself.
            a.judge_from_s = now_s + self.limits.confirm_s
            self.story.add(now_s, "agent was asleep: nobody is judged for a moment")
        a.views_s = now_s
        for rank in a.ranks.values():
            who = self._incarnation(rank)
            a.watches[rank.rank].see(watchdog.view_of(who, views.get(rank.rank)))
            view = a.watches[rank.rank].view
            if rank.phase is RankPhase.STARTING and view is not None and view.attached_s is not None:
                rank.move(RankPhase.RUNNING, now_s)
            if rank.phase is RankPhase.TERMINATING:
                self._watch_grace(rank, now_s)
        self._take_limits(now_s)
        if self.phase in LIVE:
            self._ask_for_standbys(now_s, out)
            self._tell_stopped(now_s, out)
            self._look(now_s, out)

    def _incarnation(self, rank: RankMachine) -> Incarnation:
        a, w = self._now, self._now.watches[rank.rank]
        done_s = min((t for r, t in a.others_done_s.items() if r != rank.rank), default=None)
        return Incarnation(
            rank.rank, a.number, rank.pid, rank.spawned_s, self.observed, w.own_step, w.own_sections, done_s
        )

    def _watched(self) -> list[Watched]:
        """Every deadline of every rank that may be doubted."""
        a = self._now
        if self._watched_now is None:
            self._watched_now = [
                w
                for rank in a.ranks.values()
                if rank.phase in (RankPhase.STARTING, RankPhase.RUNNING)
                for w in watchdog.watched(self._incarnation(rank), a.watches[rank.rank].view, self.limits)
            ]
        return self._watched_now

    def _take_limits(self, now_s: float) -> None:
        """A limit that shrinks under a pass that has long begun would accuse it of what nobody had asked of it."""
        new = self._coming_limits
        if new is None:
            return
        if self.mode is not Mode.ACT:
            new = replace(new, raised_s=inf)
        if self.phase in LIVE:
            old, before = self.limits, {w.key for w in self._watched() if w.due_s <= now_s}
            self.limits, self._watched_now = new, None
            if any(w.due_s <= now_s and w.key not in before for w in self._watched()):
                self.limits, self._watched_now = old, None
                return
        self.limits, self._coming_limits, self._watched_now, self._due_s = new, None, None, None

    def _judged_from_s(self, w: Watched) -> float:
        return max(w.looks_from_s if w.is_soft else w.due_s, self._now.holds.get(_pass_of(w), -inf))

    def _is_alarmed(self, w: Watched) -> bool:
        return _pass_of(w) in self._now.alarmed.get(w.key, ())

    def _next_judgement_s(self) -> float:
        a = self._now
        if a.cause is not None or self._lost is not None:
            return inf
        due_s = [self._stopped_due_s(w) for r, w in a.watches.items() if a.ranks[r].is_alive]
        if a.probe is not None:
            due_s.append(a.probe.until_s if a.probe.results is None else a.views_s + FRESH_S)
        if not a.reported:
            watched = self._watched()
            next_s = [w.due_s for w in watched if w.is_soft and not self._is_alarmed(w)]
            if a.probe is not None:
                watched = [w for w in watched if _acts_alone(w)]
            next_s += [self._judged_from_s(w) for w in watched]
            due_s.append(max(min(next_s, default=inf), a.judge_from_s))
        return min(due_s, default=inf)

    def _stopped_due_s(self, w: _RankWatch) -> float:
        return inf if w.state_told else w.state_since_s + self.limits.stopped_s

    def _on_states(self, event: StatesRead, states: Mapping[int, str], now_s: float, out: list[Command]) -> None:
        if self._is_ignored(event):
            return
        for r, rank in self._now.ranks.items():
            w, state = self._now.watches[r], states.get(r, "")
            if state == w.state:
                continue
            is_held = state in ("T", "D") and rank.is_alive
            if is_held or w.state_since_s != inf:
                self._due_s = None
            w.state, w.state_since_s, w.state_told = state, now_s if is_held else inf, False
        self._tell_stopped(now_s, out)

    def _tell_stopped(self, now_s: float, out: list[Command]) -> None:
        """Once per stop; acting on it is a matter of the rank's own limits."""
        for r, w in self._now.watches.items():
            if not self._now.ranks[r].is_alive or now_s < self._stopped_due_s(w):
                continue
            w.state_told = True
            suspicion = Suspicion(r, "stopped", None, w.state_since_s, self.limits.stopped_s)
            what = "is stopped" if w.state == "T" else "is in an uninterruptible wait"
            out.append(Suspect(suspicion, f"rank {r} {what} since {now_s - w.state_since_s:.0f} s"))

    def _look(self, now_s: float, out: list[Command]) -> None:
        """Judge fresh views: act, ask for a second signal, or leave it."""
        a = self._now
        if a.cause is not None or now_s < a.judge_from_s:
            return
        watched = self._watched()
        known = {_pass_of(w) for w in watched}
        for gone in [s for s in a.holds if s not in known]:
            del a.holds[gone]
        a.reported = {r: mark for r, mark in a.reported.items() if a.ranks[r].is_alive and a.watches[r].mark() == mark}
        if a.reported:
            return  # observe mode: that incident is told, and its victims say nothing new
        self._tell_alarms(watched, now_s, out)
        soft = [w for w in watched if w.is_soft]
        watched = [w for w in watched if not w.is_soft]
        if a.probe is not None:
            if not a.probe.is_soft or any(_acts_alone(w) and self._judged_from_s(w) <= now_s for w in watched):
                self._use_probe(a.probe, watched, now_s, out)
            else:
                self._use_soft_probe(a.probe, soft, now_s, out)
            return
        late = [w for w in watched if self._judged_from_s(w) <= now_s]
        if not late:
            self._look_softly(soft, now_s, out)
            return
        alone = [w for w in late if _acts_alone(w)]
        if alone:
            self._act([w.suspicion for w in alone], watched, now_s, out)
            return
        only_accepted = any(w.suspicion.accepted for w in late)
        window_s = min(self.limits.confirm_s, ASK_COMPILING_S) if only_accepted else self.limits.confirm_s
        ranks = tuple(r for r, rank in a.ranks.items() if rank.is_alive)
        a.probe = _ProbeAsked(ranks, now_s + window_s + PROBE_SLACK_S, only_accepted)
        out.append(Probe(ranks, window_s))

    def _on_probes(self, event: ProbesDone, results: tuple[ProbeResult, ...], now_s: float, out: list[Command]) -> None:
        if self._is_ignored(event):
            return
        probe = self._now.probe
        if probe is None or probe.results is not None:
            self.story.add(now_s, "a probe that nobody waits for any more")
            return
        probe.results = {p.rank: p for p in results}
        if now_s - self._now.views_s < FRESH_S:
            self._look(now_s, out)  # else the next BoardRead judges; next_deadline_s asks for it

    def _tell_alarms(self, watched: list[Watched], now_s: float, out: list[Command]) -> None:
        """Of soft limits that have passed, once per pass of the job's: the ranks are late in it one after the other."""
        alarmed = self._now.alarmed
        late: dict[str, list[Watched]] = {}
        for w in watched:
            if w.is_soft and w.due_s <= now_s:
                late.setdefault(w.key, []).append(w)
        for key in [k for k in alarmed if k not in late]:
            del alarmed[key]
        for key, found in late.items():
            passes = {_pass_of(w) for w in found}
            if alarmed.get(key, set()).isdisjoint(passes):
                out.append(Alarm("soft", key, min((w.suspicion for w in found), key=lambda s: s.since_s)))
            alarmed[key] = passes

    def _look_softly(self, soft: list[Watched], now_s: float, out: list[Command]) -> None:
        """Begin the look at all ranks that is to end a moment after the soft limit has passed."""
        a = self._now
        for gone in a.soft_looks.keys() - {_pass_of(w) for w in soft}:
            del a.soft_looks[gone]
        due = [w for w in soft if self._judged_from_s(w) <= now_s]
        if not due:
            return
        until_s = min(w.due_s for w in due) + self.limits.soft_rest_s
        window_s = max(SHORTEST_LOOK_S, min(until_s - now_s, self.limits.soft_window_s))
        ranks = tuple(r for r, rank in a.ranks.items() if rank.is_alive)
        marks = {r: a.watches[r].mark() for r in ranks}
        a.probe = _ProbeAsked(ranks, now_s + window_s + PROBE_SLACK_S, False, is_soft=True, marks=marks)
        out.append(Probe(ranks, window_s))

    def _use_soft_probe(self, probe: _ProbeAsked, soft: list[Watched], now_s: float, out: list[Command]) -> None:
        a = self._now
        if probe.results is None and now_s < probe.until_s:
            return
        a.probe = None
        asked = [w for w in soft if self._judged_from_s(w) <= now_s]
        for w in asked:
            if w.due_s > now_s:  # the look was cut short: it has to be taken again
                a.holds[_pass_of(w)] = w.due_s
        late = [w for w in asked if w.due_s <= now_s]
        if not late:
            return
        alive = [r for r, rank in a.ranks.items() if rank.is_alive]
        advanced = [r for r in alive if a.watches[r].mark() != probe.marks.get(r)]
        verdict = watchdog.judge_soft(late, probe.results or {}, alive, self.world_size, advanced)
        if verdict.guilty:
            self._act(verdict.guilty, late, now_s, out, probe.results)
            return
        for w in late:
            s, times = w.suspicion, a.soft_looks.get(_pass_of(w), 0)
            a.soft_looks[_pass_of(w)] = times + 1
            a.holds[_pass_of(w)] = now_s + max(LOOK_AGAIN_LEAST_S, s.limit_s / 2) * 2**times
            out.append(Alarm("spared", w.key, s, verdict.spared[s.rank]))

    def _use_probe(self, probe: _ProbeAsked, watched: list[Watched], now_s: float, out: list[Command]) -> None:
        a = self._now
        alone = [w for w in watched if _acts_alone(w) and self._judged_from_s(w) <= now_s]
        if alone:  # passed while the probe of another one is still on its way
            a.probe = None
            self._act([w.suspicion for w in alone], watched, now_s, out)
            return
        if probe.results is None and now_s < probe.until_s:
            return
        results = probe.results or {}
        a.probe = None
        late = [
            w for w in watched if self._judged_from_s(w) <= now_s and (w.suspicion.accepted or not probe.only_accepted)
        ]
        alive = [r for r, rank in a.ranks.items() if rank.is_alive]
        verdict = watchdog.judge(late, results, alive, self.group_world_size > 1, self.limits, now_s)
        if verdict.guilty:
            self._act(verdict.guilty, watched, now_s, out, results)
            return
        for w in late:
            self._spare(w, verdict.spared[w.suspicion.rank], verdict.wait_until_s.get(w.suspicion.rank), now_s, out)

    def _spare(self, w: Watched, why: str, again_s: float | None, now_s: float, out: list[Command]) -> None:
        a, s = self._now, w.suspicion
        times = a.looks.get((s.rank, s.kind, s.section), 0)
        a.looks[s.rank, s.kind, s.section] = times + 1
        recheck_s = now_s + min(self.limits.recheck_s * 2**times, max(self.limits.recheck_s, RECHECK_MOST_S))
        a.holds[_pass_of(w)] = recheck_s if again_s is None else max(min(again_s, recheck_s), now_s + 1.0)
        out.append(Suspect(s, f"{_said(s, now_s)}: {why}; left alone"))

    def _act(
        self,
        guilty: Iterable[Suspicion],
        watched: list[Watched],
        now_s: float,
        out: list[Command],
        probes: Mapping[int, ProbeResult] | None = None,
    ) -> None:
        a = self._now
        first = list(guilty)
        late = [w.suspicion for w in watched if w.due_s <= now_s]
        suspicions = (*first, *(s for s in late if s not in first))
        stopped = {r for r, w in a.watches.items() if w.state == "T"}
        stopped |= {r for r, p in (probes or {}).items() if p.state == "T"}
        if all(s.kind == "never_reported" for s in first):
            trigger = "start_up"
        elif any(s.rank in stopped for s in first):
            trigger = "stopped"
        else:
            trigger = "hang"
        worst = next((s for s in first if s.rank in stopped), min(first, key=lambda s: s.since_s))
        cause = _Cause(trigger, _said(worst, now_s), suspicions)
        keys = {w.suspicion: w.key for w in watched if w.key in self.limits.calibrated}
        out.extend(Alarm("hard", keys[s], s) for s in first[:1] if s in keys and not s.is_soft)
        out.extend(
            Suspect(s, _said(s, now_s) if s.accepted else f"{_said(s, now_s)}: {_evidence_of(s)}", acts=True)
            for s in first
        )
        if self.mode is Mode.OBSERVE:
            a.reported = {s.rank: a.watches[s.rank].mark() for s in suspicions}
            self._gather(cause, now_s, out, only_report=True)
            return
        self._announce(cause, now_s, out, worst.since_s, worst.since_s + worst.limit_s)

    def _ask_for_standbys(self, now_s: float, out: list[Command]) -> None:
        a = self._now
        if a.standbys_asked:
            return
        for watch in a.watches.values():
            v = watch.view
            if v is None or v.first_step_s is None:
                return
            if v.steps_done < self.limits.standby_after_steps and now_s - v.first_step_s < self.limits.standby_after_s:
                return
        a.standbys_asked = self._standbys_started = True
        out.append(StartStandbys())

    # -- exits -------------------------------------------------------------------------------------------------------
    def _on_exited(self, rank: RankMachine, code: int, now_s: float, out: list[Command]) -> None:
        rank.code = code
        rank.move(RankPhase.EXITED, now_s)
        if self.phase not in LIVE:
            return  # it was being stopped
        if code == 0:
            self._now.others_done_s[rank.rank] = now_s
        else:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
            self._announce(_Cause("exit", f"rank {rank.rank} {how}"), now_s, out)

    # -- the end of an attempt ---------------------------------------------------------------------------------------
    def _announce(
        self, cause: _Cause, now_s: float, out: list[Command], since_s: float | None = None, due_s: float | None = None
    ) -> None:
        """Tell all nodes; the attempt ends here when the word comes back, or soon after if it does not."""
        a = self._now
        if a.cause is not None or self._lost is not None:
            return
        a.cause, a.probe = cause, None
        a.announced_until_s = now_s + ANNOUNCE_S
        out.append(PublishStop(a.number, cause.reason, cause.trigger, now_s if since_s is None else since_s, due_s))

    def _on_peer_stop(self, event: PeerStop, now_s: float, out: list[Command]) -> None:
        if event.attempt < self._now.number:
            return
        if event.attempt > self._now.number or self.phase is P.JOINING:
            self._early_stop = event  # another node was faster; it counts once this one has begun
            return
        if self._now.agreed is None:
            self._now.agreed = event.trigger
        if self.phase in LIVE:
            self._end_attempt(_Cause(event.trigger, event.reason), now_s, out)

    def _end_attempt(self, cause: _Cause, now_s: float, out: list[Command]) -> None:
        """*cause* is what all nodes agreed on; a fault that this node has seen itself is evidence in any case."""
        a = self._now
        own, a.cause, a.announced_until_s, a.probe = a.cause, cause, inf, None
        if cause.trigger not in PLANNED:
            late = () if own is None else own.suspicions
            if not late:
                late = tuple(w.suspicion for w in self._watched() if w.due_s <= now_s and not w.is_soft)
            self._gather(_Cause(cause.trigger, cause.reason, late), now_s, out)
        elif own is not None and own.trigger not in PLANNED:
            self._gather(own, now_s, out, only_report=True)
        else:
            self._stop_ranks(now_s, out)
            return
        self._dump_all(now_s)

    def _dump_all(self, now_s: float) -> None:
        self._move(P.GATHERING, now_s)
        for rank in self._now.ranks.values():
            if rank.is_alive:
                rank.move(RankPhase.DUMPING, now_s)

    def _gather(
        self, cause: _Cause, now_s: float, out: list[Command], only_report: bool = False, limit_s: float | None = None
    ) -> None:
        a = self._now
        limit_s = self.limits.gather_s if limit_s is None else min(limit_s, self.limits.gather_s)
        a.gathers += 1
        a.last_words_until_s = now_s + limit_s + GATHER_SLACK_S
        out.append(Gather(a.number, cause.trigger, cause.reason, cause.suspicions, limit_s, only_report))

    def _on_evidence(self, event: EvidenceDone, attempt: int, now_s: float, out: list[Command]) -> None:
        a = self._now
        if self._is_ignored(event) or attempt != a.number:
            return
        a.gathers = max(a.gathers - 1, 0)
        if a.gathers == 0:
            self._evidence_is_in(now_s, out)

    def _evidence_is_in(self, now_s: float, out: list[Command]) -> None:
        a = self._now
        a.gathers, a.last_words_until_s = 0, inf
        match self.phase:
            case P.GATHERING:
                a.evidence_taken = True
                if self._stop_signal is not None:
                    self._drain(now_s, out)
                else:
                    self._stop_ranks(now_s, out)
            case P.STOPPING | P.DRAINING:
                a.evidence_taken = True
                for rank in a.ranks.values():
                    if rank.phase is RankPhase.TERMINATING and rank.deadline_s <= now_s:
                        self._kill(rank, now_s, out)
            case P.STARTING | P.RUNNING | P.COOLING | P.JOINING | P.LEFT | P.EXCLUDED:
                pass  # a report of observe mode
            case _:
                assert_never(self.phase)

    def _stop_ranks(self, now_s: float, out: list[Command]) -> None:
        a = self._now
        self._move(P.STOPPING, now_s)
        a.stopping_since_s, a.grace_s = now_s, self.limits.restart_grace_s
        for rank in a.ranks.values():
            if rank.is_alive:
                self._terminate(rank, now_s, out)

    def _terminate(self, rank: RankMachine, now_s: float, out: list[Command]) -> None:
        a = self._now
        if rank.phase is not RankPhase.TERMINATING:
            rank.move(RankPhase.TERMINATING, now_s, now_s + a.grace_s)
        rank.terminated = True
        out.append(Terminate(rank.rank))
        self._watch_grace(rank, now_s)

    def _watch_grace(self, rank: RankMachine, now_s: float) -> None:
        """While a rank saves it has the long grace; once the save is done, the short one again."""
        a = self._now
        long_s = a.stopping_since_s + self.limits.checkpoint_grace_s
        if a.grace_s == 0:
            return
        if a.watches[rank.rank].is_in(CHECKPOINTING):
            if rank.deadline_s < long_s:
                rank.postpone(long_s)
        elif rank.deadline_s == long_s and long_s > a.stopping_since_s + a.grace_s:
            rank.postpone(min(max(a.stopping_since_s + a.grace_s, now_s + self.limits.restart_grace_s), long_s))

    def _on_idle(self, rank: int, now_s: float, out: list[Command]) -> None:
        """After a fault the grace is wasted on a rank that is blocked: its handler, if it has one, will never run."""
        a, found = self._now, self._now.ranks.get(rank)
        if self.phase is not P.STOPPING or found is None or a.cause is None or a.cause.trigger not in FAULTS:
            return
        is_blocked = found.phase is RankPhase.TERMINATING and found.terminated and a.evidence_taken
        if is_blocked and not a.watches[rank].is_in(CHECKPOINTING):
            self._kill(found, now_s, out)

    def _kill(self, rank: RankMachine, now_s: float, out: list[Command]) -> None:
        rank.move(RankPhase.KILLING, now_s, now_s + self.limits.kill_s)
        out.append(Kill(rank.rank))

    # -- being told to leave -----------------------------------------------------------------------------------------
    def _on_stop_asked(self, signum: int, now_s: float, out: list[Command]) -> None:
        self._interrupts += signum == signal.SIGINT
        again = self._stop_signal is not None
        if not again:
            self._stop_signal = signum
        a = self._now
        match self.phase:
            case P.JOINING:
                self._leave(*self._stopped_because(), now_s, out)
            case P.STARTING | P.RUNNING:
                if a.cause is not None and a.cause.trigger not in PLANNED:
                    self._end_attempt(a.cause, now_s, out)  # a fault is on record: its evidence comes first
                else:
                    self._drain(now_s, out)
            case P.GATHERING | P.COOLING:
                pass  # the evidence, or the sweep, is completed first; both are short
            case P.STOPPING:
                self._move(P.DRAINING, now_s)
                a.stopping_since_s, a.grace_s = now_s, self.limits.final_grace_s  # a save may now take the long grace
                for rank in a.ranks.values():
                    if rank.phase is RankPhase.TERMINATING:
                        rank.postpone(max(rank.deadline_s, now_s + a.grace_s))
            case P.DRAINING:
                pass
            case P.LEFT | P.EXCLUDED:
                raise AssertionError("handled before")
            case _:
                assert_never(self.phase)
        if self.phase is P.DRAINING and again and signum == signal.SIGINT and self._interrupts >= 2:
            a.grace_s, a.asked_until_s = 0.0, inf
            a.evidence_taken = True  # the person at the keyboard has decided
            for rank in a.ranks.values():
                if rank.phase is RankPhase.TERMINATING:
                    self._kill(rank, now_s, out)

    def _drain(self, now_s: float, out: list[Command]) -> None:
        a = self._now
        polite = self.phase in LIVE and any(
            w.view is not None and w.view.uses_should_stop and a.ranks[r].is_alive for r, w in a.watches.items()
        )
        broken = self.phase not in LIVE
        self._move(P.DRAINING, now_s)
        a.probe, a.announced_until_s = None, inf
        a.stopping_since_s, a.grace_s = now_s, self.limits.final_grace_s if self._interrupts < 2 else 0.0
        out.append(DropStandbys())
        if not broken:
            out.append(AskToStop())
            if not polite:
                self._tell_others_of_leaving(now_s, out)
        for rank in a.ranks.values():
            if not rank.is_alive:
                continue
            if polite:
                rank.move(RankPhase.TERMINATING, now_s, now_s + a.grace_s)
                self._watch_grace(rank, now_s)
            else:
                self._terminate(rank, now_s, out)
        if polite:
            a.asked_until_s = now_s + max(a.grace_s - self.limits.restart_grace_s, a.grace_s / 2)

    def _stopped_because(self) -> tuple[ExitClass, str]:
        assert self._stop_signal is not None
        name = signal.Signals(self._stop_signal).name
        exit_class = ExitClass.PREEMPTED if self._stop_signal == signal.SIGTERM else ExitClass.INTERNAL
        return exit_class, f"told to stop by {name}"

    # -- the store and the other nodes -------------------------------------------------------------------------------
    def _on_decided(self, event: Decided, decision: Decision) -> None:
        if self._is_ignored(event) or decision.attempt != self._now.number:
            return
        if self._now.decision is None and not (decision.action is Action.REPORT and self.phase in LIVE):
            self._now.decision = decision

    def _on_all_finished(self, event: AllFinished, attempt: int, now_s: float, out: list[Command]) -> None:
        if self._is_ignored(event) or attempt != self._now.number:
            return
        if not self._now.finished_told:
            raise self._invalid(event)
        self._leave(ExitClass.OK, "all ranks ended with 0", now_s, out)

    def _on_store_ready(self, event: StoreReady, attempt: int) -> None:
        if self._is_ignored(event):
            return
        a = self._now
        if a.decision is not None and attempt == a.decision.next_attempt:
            a.store_ready = True

    def _on_channel_lost(self, event: ChannelLost, reason: str, now_s: float, out: list[Command]) -> None:
        if self._is_ignored(event) or self._lost is not None:
            return
        self._lost = reason
        a = self._now
        match self.phase:
            case P.JOINING:
                self._leave(ExitClass.START_UP, f"lost the other nodes while joining: {reason}", now_s, out)
            case P.STARTING | P.RUNNING:
                if a.finished_told:
                    self._leave(ExitClass.OK, f"all local ranks had ended with 0; then {reason}", now_s, out)
                    return
                cause = a.cause or _Cause("node_lost", f"lost the other nodes: {reason}")
                a.announced_until_s, a.probe, a.cause = inf, None, cause
                self._gather(cause, now_s, out, only_report=True)  # nobody is left to judge it together with
                self._dump_all(now_s)
            case P.GATHERING | P.STOPPING | P.COOLING:
                pass  # the ranks are stopped first; then ``_settle`` leaves
            case P.DRAINING | P.LEFT | P.EXCLUDED:
                raise AssertionError("handled before")
            case _:
                assert_never(self.phase)

    def _on_swept(
        self, event: SweepDone, attempt: int, stuck: tuple[int, ...], now_s: float, out: list[Command]
    ) -> None:
        a = self._now
        if self._is_ignored(event) or attempt != a.number or a.swept or a.sweep_until_s == inf:
            return
        self._swept(stuck, now_s, out)

    def _swept(self, stuck: tuple[int, ...], now_s: float, out: list[Command]) -> None:
        a = self._now
        a.swept, a.stuck, a.sweep_until_s = True, stuck, inf
        if self.phase is P.COOLING and not self._is_blocked() and self._lost is None:
            a.decide_until_s, a.arrive_until_s = now_s + self.limits.decide_s, now_s + self.limits.arrive_s
            out.append(Arrive(a.number))

    def _is_blocked(self) -> bool:
        return bool(self._now.stuck) or any(r.phase is RankPhase.STUCK for r in self._now.ranks.values())

    # -- time and consequences ---------------------------------------------------------------------------------------
    def _expire(self, now_s: float, out: list[Command]) -> None:
        """Everything whose time has come, apart from judging ranks."""
        a = self._now
        if self.phase in LIVE and a.announced_until_s <= now_s and a.cause is not None:
            self.story.add(now_s, "nobody confirmed the stop")
            self._end_attempt(a.cause, now_s, out)
        if a.last_words_until_s <= now_s:
            self.story.add(now_s, "evidence is not complete in time")
            self._evidence_is_in(now_s, out)
        if a.asked_until_s <= now_s and self.phase is P.DRAINING:
            a.asked_until_s = inf
            self._tell_others_of_leaving(now_s, out)
            for rank in a.ranks.values():
                if rank.phase is RankPhase.TERMINATING and not a.watches[rank.rank].is_in(CHECKPOINTING):
                    self._terminate(rank, now_s, out)
        for rank in a.ranks.values():
            if rank.deadline_s <= now_s:
                self._rank_is_due(rank, now_s, out)
        if a.sweep_until_s <= now_s:
            self.story.add(now_s, "the sweep did not end in time")
            self._swept((), now_s, out)

    def _rank_is_due(self, rank: RankMachine, now_s: float, out: list[Command]) -> None:
        a = self._now
        match rank.phase:
            case RankPhase.TERMINATING:
                if not rank.terminated:  # it was saving when the others got SIGTERM
                    rank.postpone(now_s + self.limits.restart_grace_s)
                    self._terminate(rank, now_s, out)
                elif a.evidence_taken:
                    self._kill(rank, now_s, out)
                elif a.gathers == 0:
                    trigger = "preempted" if self.phase is P.DRAINING else "hang"
                    cause = _Cause(trigger, f"rank {rank.rank} did not leave after SIGTERM")
                    self._gather(cause, now_s, out, only_report=True, limit_s=LAST_WORDS_S)
                    rank.postpone(a.last_words_until_s)
                else:
                    rank.postpone(a.last_words_until_s)
            case RankPhase.KILLING:
                rank.move(RankPhase.STUCK, now_s)
            case RankPhase.STANDBY | RankPhase.STARTING | RankPhase.RUNNING | RankPhase.DUMPING:
                raise AssertionError(f"{rank.phase} has no deadline of its own")
            case RankPhase.STUCK | RankPhase.EXITED:
                raise AssertionError(f"{rank.phase} has no deadline of its own")
            case _:
                assert_never(rank.phase)

    def _settle(self, now_s: float, out: list[Command]) -> None:
        """What follows from the state as it is, whichever event brought it about."""
        a = self._now
        match self.phase:
            case P.STARTING | P.RUNNING:
                self._settle_live(now_s, out)
            case P.STOPPING | P.DRAINING:
                if not any(r.is_alive for r in a.ranks.values()):
                    if self.phase is P.STOPPING:
                        self._move(P.COOLING, now_s)
                    if not a.swept and a.sweep_until_s == inf:
                        a.sweep_until_s = now_s + SWEEP_S
                        out.append(Sweep(a.number))
                    elif a.swept and self.phase is P.DRAINING:
                        self._leave_drained(now_s, out)
            case P.COOLING:
                self._settle_cooling(now_s, out)
            case P.JOINING | P.GATHERING | P.LEFT | P.EXCLUDED:
                pass
            case _:
                assert_never(self.phase)

    def _settle_live(self, now_s: float, out: list[Command]) -> None:
        a = self._now
        if a.cause is not None or self._lost is not None:
            return
        if self.phase is P.STARTING and all(r.phase is RankPhase.RUNNING or r.ended_well for r in a.ranks.values()):
            self._move(P.RUNNING, now_s)
        if all(r.ended_well for r in a.ranks.values()):
            if not a.finished_told:
                a.finished_told = True
                # A node that was lost in the meantime never finishes, and nobody is left to be hurt by it. Another one
                # may be busy with a last evaluation, but not for longer than every limit; unless it only observes.
                if self.mode is Mode.ACT:
                    a.finish_until_s = now_s + watchdog.quiet_s(self.limits) + self.limits.teardown_s
                out.append(Finish(a.number))
            elif now_s >= a.finish_until_s:
                self._leave(ExitClass.OK, "all local ranks ended with 0; other nodes have not said so", now_s, out)
        elif self.phase is P.RUNNING and self._waiting_nodes > 0:
            waiting, self._waiting_nodes = self._waiting_nodes, 0
            self._announce(_Cause("membership", f"membership: {waiting} node(s) wait to join"), now_s, out)

    def _settle_cooling(self, now_s: float, out: list[Command]) -> None:
        a, d = self._now, self._now.decision
        if not a.swept:
            return
        if self._is_blocked():
            ranks = [r.rank for r in a.ranks.values() if r.phase is RankPhase.STUCK]
            who = f"ranks {ranks}" if ranks else f"processes {list(a.stuck)}"
            self._leave(ExitClass.NODE_FAULT, f"{who} survived SIGKILL: this machine needs a reboot", now_s, out)
        elif d is not None and d.action is Action.STOP:
            if a.arrived or self._lost is not None or self._stop_signal is not None or now_s >= a.arrive_until_s:
                self._leave(d.exit_class, d.reason, now_s, out)
        elif self._stop_signal is not None:
            self._leave(*self._stopped_because(), now_s, out)
        elif self._lost is not None:
            self._leave(ExitClass.NODE_FAULT, f"lost the other nodes: {self._lost}", now_s, out)
        elif d is None:
            if now_s >= a.decide_until_s:
                self._go_on_without("nobody decided what to do about the stop", now_s, out)
        elif self.group_rank in d.excluded_nodes:
            self._move(P.EXCLUDED, now_s)
            self._say_leave(ExitClass.NODE_FAULT, f"this node is excluded: {d.reason}", now_s, out)
        elif not a.arrived:
            a.decide_until_s = inf
            if now_s >= a.arrive_until_s:
                self._go_on_without("not all nodes ended their ranks", now_s, out)
        elif d.rejoin or d.excluded_nodes or a.agreed == "preempted":
            self._rejoin(now_s, out)
        elif a.store_until_s == inf:
            a.decide_until_s = a.arrive_until_s = inf
            a.start_from_s = now_s + d.delay_s
            a.store_until_s = now_s + d.delay_s + self.limits.decide_s
            out.append(OpenStore(d.next_attempt))
        elif a.store_ready:
            if now_s >= a.start_from_s:
                self._begin(d.next_attempt, now_s, out)
        elif now_s >= a.store_until_s:
            self._go_on_without(f"the store of attempt {d.next_attempt} did not come up", now_s, out)

    def _go_on_without(self, why: str, now_s: float, out: list[Command]) -> None:
        """A node that is needed does not answer: find those that are left, or give up when there is nobody else."""
        if self.group_world_size > 1:
            self.story.add(now_s, f"{why}: joining again")
            self._rejoin(now_s, out)
        else:
            self._leave(ExitClass.INTERNAL, why, now_s, out)

    def _rejoin(self, now_s: float, out: list[Command]) -> None:
        self._move(P.JOINING, now_s)
        out.append(Join())

    def _leave_drained(self, now_s: float, out: list[Command]) -> None:
        a = self._now
        if self._is_blocked():
            self._leave(ExitClass.NODE_FAULT, "a process survived SIGKILL: this machine needs a reboot", now_s, out)
            return
        if self._lost is None and self.group_world_size > 1:
            if not a.finished_told and a.cause is None and all(r.ended_well for r in a.ranks.values()):
                out.append(Finish(a.number))
            elif a.agreed == "preempted":
                out.append(Arrive(a.number))  # the others go on without this node
            # Else they believe that it takes part in the next attempt: without its arrival they join anew.
        self._leave(*self._stopped_because(), now_s, out)

    def _tell_others_of_leaving(self, now_s: float, out: list[Command]) -> None:
        """Before this node's ranks go, so that what follows on other nodes is not taken for a fault of theirs."""
        a = self._now
        if (
            self.group_world_size > 1
            and self._lost is None
            and a.cause is None
            and any(r.is_alive for r in a.ranks.values())
        ):
            reason = f"node {self.group_rank} was {self._stopped_because()[1]}"
            a.cause = _Cause("preempted", reason)
            out.append(PublishStop(a.number, reason, "preempted", now_s))

    def _leave(self, exit_class: ExitClass, reason: str, now_s: float, out: list[Command]) -> None:
        self._move(P.LEFT, now_s)
        self._say_leave(exit_class, reason, now_s, out)

    def _say_leave(self, exit_class: ExitClass, reason: str, now_s: float, out: list[Command]) -> None:
        if self._standbys_started:
            out.append(DropStandbys())
        out.append(Leave(exit_class, reason))
        self.story.add(now_s, f"left: {exit_class.name}: {reason}")


def _acts_alone(w: Watched) -> bool:
    return w.suspicion.accepted and not w.ask_compiling


def _pass_of(w: Watched) -> Suspicion:
    """The same for one pass, though limits change while it goes on."""
    return replace(w.suspicion, limit_s=0.0, accepted=False)


def _evidence_of(s: Suspicion) -> str:
    return "a look at the ranks shows a hang" if s.is_soft else "two signals agree"


def _said(s: Suspicion, now_s: float) -> str:
    """A suspicion as one line for a person."""
    for_s = f"{now_s - s.since_s:.1f} s ({'soft ' * s.is_soft}limit {s.limit_s:g} s)"
    match s.kind:
        case "never_reported":
            return f"rank {s.rank} has not reported since its start, for {for_s}"
        case "section":
            return f"rank {s.rank} is in section {s.section} for {for_s}"
        case "teardown":
            return f"rank {s.rank} does not end, for {for_s}"
        case "raised":
            return f"rank {s.rank} raised an exception, and its process does not end for {for_s}"
        case _:
            return f"rank {s.rank} makes no progress for {for_s}"
