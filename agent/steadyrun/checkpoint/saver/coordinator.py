"""The job's saves as one saver sees them for all: who has staged, who writes what, when a checkpoint is committed.

Pure: ``handle`` takes what the nodes tell or what was done for it, and the time, and returns what to do, in order. It
runs in the saver of group rank 0 of the newest attempt and outlives attempts: a save of attempt 3 is committed although
its ranks are dead and attempt 4 trains. Every event may come twice, late, or never; what never comes has a limit.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from typing_extensions import assert_never

from steadyrun.checkpoint.choose import Choice, Offer, Refused, Rejected, Source, choose
from steadyrun.checkpoint.layout import Layout
from steadyrun.checkpoint.planning import unequal_replicas
from steadyrun.checkpoint.quarantine import Loaded
from steadyrun.checkpoint.rollback import is_superseded, merged
from steadyrun.checkpoint.saver import messages as m
from steadyrun.checkpoint.saver.messages import SaveKey
from steadyrun.checkpoint.saver.orders import (
    AbandonFolder,
    AskRestart,
    Began,
    CommitFolder,
    CommitRefused,
    CoordinatorCommand,
    CoordinatorEvent,
    CopyRemote,
    ExchangeBack,
    FetchRemote,
    FolderCommitted,
    FolderOpened,
    FolderRefused,
    FoldersListed,
    ListFolders,
    ListRemote,
    LookForRollback,
    MakePlan,
    NoteFailure,
    NoteLoaded,
    OpenFolder,
    PlanMade,
    Prune,
    Record,
    RemoteFetched,
    RollbackLooked,
    Say,
    Tell,
    Tick,
)
from steadyrun.checkpoint.saves import CheckpointOptions, SaveState, TierName, rank_words
from steadyrun.checkpoint.schedule import Experience, Schedule
from steadyrun.checkpoint.shardfile import Written

__all__ = ["Coordinator", "Limits", "Phase"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds.

    Attributes:
        staging: from the first rank of a save to the last.
        silence: of another node's saver while something waits for it.
        restore_wait: for saves that are still being written when the ranks ask where to resume.
        republish: for the other nodes to tell what they hold, after an attempt has begun.
        beat: between signs of life.
        rollback: between looks for a request of ``steadyctl ckpt rollback``.
        repeat: from a node's coming until what it may have missed is said again, once for all that come meanwhile.
    """

    staging: float = 300.0
    silence: float = 30.0
    restore_wait: float = 120.0
    republish: float = 30.0
    beat: float = 5.0
    repeat: float = 0.1
    rollback: float = 2.0


# -- state -------------------------------------------------------------------------------------------------------------
class Phase(enum.Enum):
    """Of one save."""

    GATHERING = "gathering"  # ranks are staging
    HELD = "held"  # whole in memory, and nothing else is wanted
    QUEUED = "queued"  # to be written, after another one or once the plan is made
    OPENING = "opening"
    WRITING = "writing"
    COMMITTING = "committing"
    RESOLVED = "resolved"


_FOLDER_TIERS: Final = frozenset({TierName.LOCAL, TierName.SHARED, TierName.REMOTE})
_UNDER_WAY: Final = frozenset({Phase.OPENING, Phase.WRITING, Phase.COMMITTING})
_KEPT_RESOLVED: Final = 16
_KEPT_AGREED: Final = 64
_KEPT_PLANS: Final = 4


@dataclass(slots=True)
class _Save:
    key: SaveKey
    since_s: float
    phase: Phase = Phase.GATHERING
    world_size: int = 0
    tiers: set[TierName] = field(default_factory=set)
    digests: dict[int, str] = field(default_factory=dict)  # by rank that has staged
    stalls_s: dict[int, float] = field(default_factory=dict)
    created_unix_s: float = inf
    staged_s: float = inf  # when the last rank had
    plan_id: str = ""
    folder: str = ""
    ticket: str = ""
    written: dict[int, Written] = field(default_factory=dict)
    result: m.Resolved | None = None

    @property
    def is_complete(self) -> bool:
        """Every rank has its part in memory."""
        return self.phase not in (Phase.GATHERING, Phase.RESOLVED)

    def missing(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self.digests]


@dataclass(slots=True)
class _Attempt:
    """What is known of one attempt's ranks."""

    number: int
    world_size: int = 0
    options: CheckpointOptions | None = None
    run_id: str = ""
    layouts: dict[int, m.LayoutTold] = field(default_factory=dict)
    granted: m.Granted | None = None
    gone: set[int] = field(default_factory=set)
    started: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Question:
    """Where to resume, of one attempt and round."""

    since_s: float
    asked: dict[int, m.RestoreTold] = field(default_factory=dict)
    is_listing: bool = False
    listed: FoldersListed | None = None
    fetching: Choice | None = None
    rejected: list[Rejected] = field(default_factory=list)  # beside what the ranks reject
    answer: m.Chosen | None = None


@dataclass(slots=True)
class _Flush:
    """*after*: newest step when a save was demanded, that one of a later step is waited for; None: it was not."""

    id: str
    waits: bool
    until_s: float
    after: int | None = None

    @classmethod
    def of(cls, told: m.FlushTold, now_s: float) -> _Flush:
        return cls(told.id, told.waits, now_s + told.limit_s)


class Coordinator:
    """All saves of a job. For one thread.

    Attributes:
        schedule: None until a rank has told its options.
        totals: saves by their final state, since the saver started.
        failures: failed saves by reason.
        last: the newest durable save.
    """

    def __init__(self, limits: Limits | None = None, name: str = "") -> None:
        """*name*: another one for every coordinator of a job."""
        self._limits = limits or Limits()
        self._name = name
        self._tickets = 0
        self._attempt = _Attempt(-1)
        self._attempts: dict[int, _Attempt] = {}
        self._nodes = 1
        self._republished: set[int] = set()
        self._rank_nodes: dict[int, int] = {}
        self._heard_s: dict[int, float] = {}
        self._began_s = self._called_s = 0.0
        self._call, self._calls = "", 0
        self._beat_s = -inf
        self._repeat_s = inf
        self._looked_s = -inf
        self._is_looking = False
        self._asked_restart = ""
        self._rollback: Mapping[str, Any] | None = None
        self._layouts: dict[tuple[int, str], Layout] = {}
        self._plans: dict[str, PlanMade | None] = {}
        self._planned: dict[str, tuple[Layout, ...]] = {}
        self._saves: dict[SaveKey, _Save] = {}
        self._questions: dict[tuple[int, int], _Question] = {}
        self._values: dict[tuple[int, str], dict[int, Any]] = {}
        self._agreed: dict[tuple[int, str], m.Agreed] = {}
        self._flushes: list[_Flush] = []
        self._steps: dict[int, int] = {}
        self._peers: dict[int, m.PeerTold] = {}
        self._serial = 0
        self._complaint = ""
        self._out: list[CoordinatorCommand] = []
        self._story: deque[str] = deque(maxlen=64)
        self._failed_attempts: set[int] = set()
        self.schedule: Schedule | None = None
        self.totals: dict[SaveState, int] = dict.fromkeys(SaveState, 0)
        self.failures: dict[str, int] = {}
        self.last: m.Resolved | None = None
        self.experience: Experience | None = None

    # -- the outside ---------------------------------------------------------------------------------------------------
    def handle(self, event: CoordinatorEvent, now_s: float) -> list[CoordinatorCommand]:
        """What to do about *event*."""
        if not isinstance(event, (Tick, m.SteppedTold, m.BeatTold)):
            self._story.append(f"{now_s:.3f} {type(event).__name__}")
        self._react(event, now_s)
        self._look_at_clock(now_s)
        self._start_next(now_s)
        self._answer_questions(now_s)
        self._answer_flushes(now_s)
        out, self._out = self._out, []
        return out

    def next_deadline_s(self) -> float:
        """When to come back with a Tick at the latest; ``inf`` when nothing has a limit."""
        at_s = [s.since_s + self._limits.staging for s in self._saves.values() if s.phase is Phase.GATHERING]
        at_s += [f.until_s for f in self._flushes]
        waiting = (s for s in self._saves.values() if s.phase is Phase.QUEUED and not s.plan_id)
        at_s += [s.staged_s + self._limits.staging for s in waiting]
        at_s.append(self._repeat_s)
        if self._is_training and not self._is_looking:
            at_s.append(self._looked_s + self._limits.rollback)
        if self._waiting_for_nodes():
            at_s += [self._heard_s.get(n, self._began_s) + self._limits.silence for n in self._other_nodes()]
            at_s.append(self._beat_s + self._limits.beat)
        if self._is_republishing:
            at_s.append(self._called_s + self._limits.republish)
        at_s += [
            q.since_s + self._limits.restore_wait
            for q in self._questions.values()
            if q.answer is None and self._has_all_asked(q) and not q.is_listing
        ]
        return min(at_s, default=inf)

    @property
    def is_busy(self) -> bool:
        """Something is being written that nobody should interrupt."""
        return any(s.phase in _UNDER_WAY or s.phase is Phase.QUEUED for s in self._saves.values())

    def phase_of(self, key: SaveKey) -> Phase | None:
        save = self._saves.get(key)
        return None if save is None else save.phase

    def order_save(self, now_s: float) -> list[CoordinatorCommand]:
        """Ask the schedule whether a save is to be ordered; called now and then."""
        schedule, attempt = self.schedule, self._attempt
        if schedule is None or attempt.granted is None or attempt.granted.why:
            return []
        order = schedule.order(now_s)
        if order is None:
            return []
        self._serial += 1
        return [Tell(m.SaveOrdered(attempt.number, self._serial, order.step, order.tiers))]

    # -- reacting ------------------------------------------------------------------------------------------------------
    def _react(self, event: CoordinatorEvent, now_s: float) -> None:
        match event:
            case Began():
                self._begin(event, now_s)
            case m.LayoutTold():
                self._on_layout(event)
            case m.StagedTold():
                self._on_staged(event, now_s)
            case m.SkippedTold():
                save = self._save(event.key, now_s)
                if save.phase is Phase.GATHERING and event.rank not in save.digests:
                    self._resolve(save, SaveState.SKIPPED, now_s, f"rank {event.rank}: {event.why}")
            case m.VoteTold():
                self._on_vote(event, now_s)
            case m.PlanAskedTold():
                self._tell_plan(event.plan_id)
            case m.RankGoneTold():
                self._on_gone(event)
            case m.RestoreTold():
                self._on_restore(event, now_s)
            case m.PeerTold():
                self._on_peer(event)
            case m.StartedTold():
                self._of(event.attempt).started.add(event.rank)
            case m.AgreeTold():
                self._on_agree(event)
            case m.FlushTold():
                self._flushes = [f for f in self._flushes if f.id != event.id]
                self._flushes.append(self._demanded(event, now_s) if event.saves else _Flush.of(event, now_s))
            case m.SteppedTold():
                if event.attempt == self._attempt.number and self.schedule is not None:
                    self._steps[event.node] = event.step
                    self.schedule.stepped(max(self._steps.values()), now_s)
            case m.LateTold():
                if event.attempt == self._attempt.number and self.schedule is not None:
                    self.schedule.late(event.step)
            case m.FailedTold():
                self._on_failed(event, now_s)
            case m.ResolvedTold():
                self._adopt(event.resolved, now_s)
            case m.RepublishedTold():
                if event.attempt == self._attempt.number:
                    self._on_republished(event, now_s)
            case ExchangeBack():
                self._call_all(now_s)
            case m.BeatTold():
                self._heard_s[event.node] = now_s
            case PlanMade():
                self._on_plan(event, now_s)
            case FolderOpened():
                self._on_opened(event, now_s)
            case FolderRefused() | CommitRefused():
                self._fail(event.key, event.reason, event.why, now_s)
            case FolderCommitted():
                self._on_committed(event, now_s)
            case FoldersListed():
                self._on_listed(event)
            case RemoteFetched():
                self._on_fetched(event)
            case RollbackLooked():
                self._is_looking = False
                if event.id and event.id != self._asked_restart and self._is_training:
                    self._asked_restart = event.id
                    self._out.append(AskRestart(f"rollback to step {event.to} was requested"))
            case Tick():
                pass
            case _:
                assert_never(event)

    def _of(self, number: int) -> _Attempt:
        return self._attempts.setdefault(number, _Attempt(number))

    def _begin(self, event: Began, now_s: float) -> None:
        self._attempt = attempt = self._of(event.attempt)
        attempt.world_size = event.world_size
        for old in [n for n in self._attempts if n < event.attempt - 3]:
            del self._attempts[old]
        self._nodes, self._rollback = event.nodes, event.rollback
        self._began_s = now_s
        self._rank_nodes.clear()
        self._heard_s.clear()
        self._steps.clear()
        self._peers.clear()
        self._questions = {k: q for k, q in self._questions.items() if k[0] >= event.attempt}
        self._values = {k: v for k, v in self._values.items() if k[0] >= event.attempt}
        self._agreed = {k: v for k, v in self._agreed.items() if k[0] >= event.attempt}
        if self.schedule is not None:
            self.schedule.attempt_started(now_s)
        self._call_all(now_s)

    def _call_all(self, now_s: float) -> None:
        """Ask all nodes for what is not resolved: what was said before may be lost, or be heard in part."""
        self._calls += 1
        self._call, self._called_s = f"{self._name}.{self._calls}", now_s
        self._republished.clear()
        self._out.append(Tell(m.WhoIsThere(self._call)))

    def _on_republished(self, event: m.RepublishedTold, now_s: float) -> None:
        self._rank_nodes.update(dict.fromkeys(event.ranks, event.node))
        self._heard_s[event.node] = now_s
        self._repeat_s = min(self._repeat_s, now_s + self._limits.repeat)
        if event.call == self._call:
            self._republished.add(event.node)
        else:
            # It has come, or come again, by itself: the beginning of what it said may have been missed.
            self._republished.discard(event.node)
            self._out.append(Tell(m.WhoIsThere(self._call, event.node)))

    # -- layouts -------------------------------------------------------------------------------------------------------
    def _on_layout(self, event: m.LayoutTold) -> None:
        attempt = self._of(event.attempt)
        attempt.layouts[event.rank] = event
        attempt.gone.discard(event.rank)  # it has connected again
        attempt.options, attempt.run_id = event.options, event.run_id
        self._layouts[event.rank, event.layout.digest()] = event.layout
        self._forget_layouts()
        if self.schedule is None:
            self.schedule = Schedule(
                event.options.every,
                event.options,
                self._began_s,
                gpus=event.layout.world_size,
                experience=self.experience,
            )
        if attempt.granted is not None:
            self._out.append(Tell(attempt.granted))
            return
        if len(attempt.layouts) < event.layout.world_size:
            return
        told = [attempt.layouts[r] for r in sorted(attempt.layouts)]
        refused = [t for t in told if t.slots < 1]
        if refused:
            self._grant(attempt, f"rank {refused[0].rank}: {refused[0].why}")
            return
        if self.schedule is not None:
            self.schedule.sized(max(t.layout.state_bytes for t in told), event.layout.world_size)
        plan_id = self._want_plan(tuple(t.layout for t in told))
        made = self._plans.get(plan_id)
        if made is not None:
            self._grant(attempt, made.why)

    def _grant(self, attempt: _Attempt, why: str) -> None:
        attempt.granted = m.Granted(attempt.number, why)
        self._out.append(Tell(attempt.granted))
        if why:
            self._out.append(Say(f"no snapshots in memory: {why}; the ranks write checkpoints themselves"))

    def _forget_layouts(self) -> None:
        """Only what the newest attempts or a save still need."""
        if len(self._layouts) <= 4 * max((a.world_size for a in self._attempts.values()), default=1) + 8:
            return
        needed = {(r, t.layout.digest()) for a in self._attempts.values() for r, t in a.layouts.items()}
        needed |= {(r, d) for s in self._saves.values() if s.phase is not Phase.RESOLVED for r, d in s.digests.items()}
        self._layouts = {k: v for k, v in self._layouts.items() if k in needed}

    def _want_plan(self, layouts: tuple[Layout, ...]) -> str:
        """The number of the plan for these layouts; it is ordered when there is none yet."""
        digests = "".join(layout.digest() for layout in layouts)
        plan_id = hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()
        if plan_id not in self._plans:
            used = {s.plan_id for s in self._saves.values() if s.phase is not Phase.RESOLVED}
            for old in [p for p in self._plans if p not in used][: max(len(self._plans) - _KEPT_PLANS, 0)]:
                del self._plans[old], self._planned[old]
            self._plans[plan_id] = None
            self._planned[plan_id] = layouts
            self._out.append(MakePlan(plan_id, layouts))
        return plan_id

    def _on_plan(self, event: PlanMade, now_s: float) -> None:
        if event.plan_id not in self._plans:
            return
        self._plans[event.plan_id] = event
        self._tell_plan(event.plan_id)
        attempt = self._attempt
        if attempt.granted is None and len(attempt.layouts) == attempt.world_size:
            told = tuple(attempt.layouts[r].layout for r in sorted(attempt.layouts))
            if self._want_plan(told) == event.plan_id:
                self._grant(attempt, event.why)
        for save in list(self._saves.values()):
            if save.plan_id == event.plan_id and save.phase is Phase.QUEUED and event.plan is None:
                self._fail(save.key, "plan", event.why, now_s)

    def _tell_plan(self, plan_id: str) -> None:
        made = self._plans.get(plan_id)
        if made is not None and made.plan is not None:
            self._out.append(Tell(m.PlanTold(plan_id, made.plan.parts)))

    # -- staging -------------------------------------------------------------------------------------------------------
    def _save(self, key: SaveKey, now_s: float) -> _Save:
        save = self._saves.get(key)
        if save is None:
            save = self._saves[key] = _Save(key, now_s)
            resolved = [s.key for s in self._saves.values() if s.phase is Phase.RESOLVED]
            for old in sorted(resolved)[: max(len(resolved) - _KEPT_RESOLVED, 0)]:
                del self._saves[old]
        return save

    def _on_staged(self, event: m.StagedTold, now_s: float) -> None:
        save = self._save(event.key, now_s)
        if save.result is not None:
            self._out.append(Tell(save.result))  # its node has missed the end
            return
        save.world_size = event.world_size
        is_new = event.rank not in save.digests
        save.digests[event.rank] = event.digest
        save.tiers |= event.tiers
        save.stalls_s[event.rank] = event.stall_s
        save.created_unix_s = min(save.created_unix_s, event.created_unix_s)
        if save.phase is not Phase.GATHERING:
            if not is_new:
                self._repeat_save(save)
            if save.phase is Phase.HELD and save.tiers & _FOLDER_TIERS:
                save.phase = Phase.QUEUED  # a saver that was started again wants it on disk
            return
        if save.missing():
            return
        save.staged_s = now_s
        self._out.append(Tell(m.InMemory(event.key)))
        save.phase = Phase.QUEUED if save.tiers & _FOLDER_TIERS else Phase.HELD
        stall_s = max(save.stalls_s.values())
        if self.schedule is not None:
            self.schedule.began(event.key.step, save.tiers, now_s)
            self.schedule.stalled(stall_s)
        fields = {"step": event.key.step, "attempt": event.key.attempt, "stall_s": round(stall_s, 6)}
        self._out.append(Record("checkpoint_in_memory", {**fields, "tiers": sorted(t.value for t in save.tiers)}))
        self._pass_older(save, now_s)

    def _pass_older(self, newer: _Save, now_s: float) -> None:
        """A newer save is whole: an older one that is not never will be, and older ones in memory are not needed."""
        for save in list(self._saves.values()):
            if save.key >= newer.key:
                continue
            if save.phase is Phase.GATHERING and save.key.attempt == newer.key.attempt:
                self._skip_without(save, save.missing(), now_s)
            elif save.phase is Phase.HELD:
                del self._saves[save.key]

    def _skip_without(self, save: _Save, ranks: Sequence[int], now_s: float) -> None:
        who = rank_words(ranks) if ranks else "a rank"
        self._resolve(save, SaveState.SKIPPED, now_s, f"{who} did not take part")

    def _on_gone(self, event: m.RankGoneTold) -> None:
        self._of(event.attempt).gone.add(event.rank)

    def _skip_dead(self, save: _Save, now_s: float) -> None:
        """A save that will never be whole, because ranks are dead whose part would have been told by now."""
        missing = save.missing()
        if save.key.attempt < self._attempt.number:
            is_told = self._has_all_told or now_s >= self._called_s + self._limits.republish
            dead = missing if is_told else []
        else:
            gone = self._of(save.key.attempt).gone
            dead = [r for r in missing if r in gone and self._rank_nodes.get(r) in self._republished]
        if dead:
            self._resolve(save, SaveState.SKIPPED, now_s, f"{rank_words(dead)} ended before its part was in memory")

    @property
    def _has_all_told(self) -> bool:
        return self._republished >= set(range(self._nodes))

    # -- writing -------------------------------------------------------------------------------------------------------
    def _start_next(self, now_s: float) -> None:
        """One save is written at a time, the oldest first: the disk is the same."""
        if any(s.phase in _UNDER_WAY for s in self._saves.values()):
            return
        for save in sorted((s for s in self._saves.values() if s.phase is Phase.QUEUED), key=lambda s: s.key):
            if not save.plan_id:
                layouts = [self._layouts.get((r, d)) for r, d in sorted(save.digests.items())]
                known = tuple(layout for layout in layouts if layout is not None)
                if len(known) < save.world_size:
                    continue  # the layouts are told before and after every change of the store
                save.plan_id = self._want_plan(known)
            made = self._plans.get(save.plan_id)
            if made is None:
                continue
            if made.plan is None:
                self._fail(save.key, "plan", made.why, now_s)
                continue
            attempt = self._options_for(save)
            if attempt is None or attempt.options is None:
                continue
            save.phase = Phase.OPENING
            self._out.append(OpenFolder(save.key, attempt.options, attempt.run_id, self.last is not None))
            return

    def _options_for(self, save: _Save) -> _Attempt | None:
        """The save's own attempt, or the newest that has told its options."""
        own = self._attempts.get(save.key.attempt)
        if own is not None and own.options is not None:
            return own
        return next((a for _, a in sorted(self._attempts.items(), reverse=True) if a.options is not None), None)

    def _on_opened(self, event: FolderOpened, now_s: float) -> None:
        save = self._saves.get(event.key)
        if save is None or save.phase is not Phase.OPENING:
            if not event.committed:
                self._out.append(AbandonFolder(event.folder))
            return
        if event.committed:
            self._resolve(save, SaveState.DURABLE, now_s, path=event.committed)
            return
        self._tickets += 1
        save.phase, save.folder, save.ticket = Phase.WRITING, event.folder, f"{self._name}.{self._tickets}"
        for node in self._other_nodes():
            self._heard_s[node] = now_s
        fields = {"step": event.key.step, "attempt": event.key.attempt, "path": event.folder}
        self._out.append(Record("checkpoint_started", fields))
        self._order_write(save)

    def _order_write(self, save: _Save) -> None:
        attempt = self._options_for(save)
        if attempt is not None and attempt.options is not None:
            self._out.append(Tell(m.WriteOrdered(save.key, save.ticket, save.plan_id, save.folder, attempt.options)))

    def _on_vote(self, event: m.VoteTold, now_s: float) -> None:
        save = self._saves.get(event.key)
        if save is None or save.result is not None:
            if save is not None and save.result is not None:
                self._out.append(Tell(save.result))
            return
        if save.phase is not Phase.WRITING or event.ticket != save.ticket:
            return
        if event.written is None:
            self._fail(save.key, event.reason, f"rank {event.rank}: {event.why}", now_s)
            return
        save.written[event.rank] = event.written
        made = self._plans.get(save.plan_id)
        if len(save.written) < save.world_size or made is None or made.plan is None:
            return
        attempt = self._options_for(save)
        assert attempt is not None  # the write was ordered with its options
        assert attempt.options is not None
        problem = unequal_replicas(made.plan, {r: w.replica_digests for r, w in save.written.items()})
        if problem:
            fields = {"step": save.key.step, "attempt": save.key.attempt, "why": problem}
            self._out.append(Record("replicas_differ", fields))
            if attempt.options.refuse_unequal_replicas:
                self._fail(save.key, "replicas_differ", problem, now_s)
                return
            self._out.append(Say(f"step {save.key.step}: {problem}"))
        save.phase = Phase.COMMITTING
        written = tuple(save.written[r] for r in range(save.world_size))
        layouts = self._planned[save.plan_id]
        self._out.append(
            CommitFolder(
                save.key, save.folder, made.plan, layouts, written, attempt.options, attempt.run_id, save.created_unix_s
            )
        )

    def _on_committed(self, event: FolderCommitted, now_s: float) -> None:
        save = self._saves.get(event.key)
        if save is None or save.result is not None:
            return
        self._resolve(save, SaveState.DURABLE, now_s, path=event.path, size_bytes=event.size_bytes)

    def _fail(self, key: SaveKey, reason: str, why: str, now_s: float) -> None:
        save = self._saves.get(key)
        if save is None or save.result is not None:
            return
        if save.folder:
            self._out.append(AbandonFolder(save.folder))
        self._resolve(save, SaveState.FAILED, now_s, why, reason)

    def _resolve(
        self,
        save: _Save,
        state: SaveState,
        now_s: float,
        why: str = "",
        reason: str = "",
        path: str = "",
        size_bytes: int = 0,
    ) -> None:
        seconds = now_s - save.staged_s if save.staged_s < inf else 0.0
        # Wall time is only told to people: the snapshot's own, and what has passed since.
        now_unix_s = save.created_unix_s + seconds if save.created_unix_s < inf else 0.0
        result = m.Resolved(save.key, state, why, reason, path, seconds, size_bytes, now_unix_s, frozenset(save.tiers))
        self._settle(save, result, now_s)
        step, attempt = save.key.step, save.key.attempt
        stall_s = round(max(save.stalls_s.values(), default=0.0), 6)
        if state is SaveState.DURABLE:
            interval_s = self.schedule.durable_interval_s if self.schedule is not None else None
            fields = {"seconds": round(seconds, 3), "bytes": size_bytes, "path": path, "stall_s": stall_s}
            fields["interval_s"] = interval_s
            self._out.append(Record("checkpoint_committed", {"step": step, "attempt": attempt, **fields}))
            options = self._options_for(save)
            if options is not None and options.options is not None:
                experience = self.schedule.experience() if self.schedule is not None else None
                self._out.append(Prune(options.options, self._in_use(), experience))
                if TierName.REMOTE in save.tiers and options.options.remote is not None:
                    self._out.append(CopyRemote(path, options.options))
        elif state is SaveState.FAILED:
            fields = {"step": step, "attempt": attempt, "why": why, "reason": reason}
            self._out.append(Record("checkpoint_failed", fields))
        else:
            self._out.append(Record("checkpoint_skipped", {"step": step, "attempt": attempt, "why": why}))
        self._complain(save.key, state, why, reason)

    def _settle(self, save: _Save, result: m.Resolved, now_s: float) -> None:
        save.phase, save.result = Phase.RESOLVED, result
        self.totals[result.state] += 1
        if result.state is SaveState.FAILED:
            self.failures[result.reason] = self.failures.get(result.reason, 0) + 1
        if result.state is SaveState.DURABLE and (self.last is None or result.key > self.last.key):
            self.last = result
        if self.schedule is not None:
            persist_s = result.seconds if result.state is SaveState.DURABLE else None
            self.schedule.ended(save.key.step, result.state, now_s, persist_s)
        self._out.append(Tell(result))

    def _complain(self, key: SaveKey, state: SaveState, why: str, reason: str) -> None:
        """A reason is said once, until it changes or a save is durable again."""
        if state is SaveState.FAILED:
            if reason != self._complaint:
                self._out.append(Say(f"step {key.step} could not be saved: {why}"))
            self._complaint = reason
        elif state is SaveState.DURABLE and self._complaint:
            self._complaint = ""
            self._out.append(Say(f"step {key.step} is saved: checkpoints are durable again"))

    def _adopt(self, resolved: m.Resolved, now_s: float) -> None:
        """What the coordinator before this one has decided."""
        save = self._save(resolved.key, now_s)
        if save.result is None and save.phase not in _UNDER_WAY:
            self._settle(save, resolved, now_s)

    def _in_use(self) -> tuple[str, ...]:
        paths = [s.folder for s in self._saves.values() if s.folder and s.phase is not Phase.RESOLVED]
        for (number, _), question in self._questions.items():
            attempt = self._of(number)
            if question.answer is not None and len(attempt.started) < attempt.world_size:
                paths.append(question.answer.choice.path)
        return tuple(p for p in paths if p)

    # -- other savers --------------------------------------------------------------------------------------------------
    def _other_nodes(self) -> Iterable[int]:
        return range(1, self._nodes)

    @property
    def _is_republishing(self) -> bool:
        return not self._has_all_told and any(
            s.phase is Phase.GATHERING and s.key.attempt < self._attempt.number for s in self._saves.values()
        )

    def _waiting_for_nodes(self) -> bool:
        """Something is under way for which this node and the others wait for each other."""
        return self._nodes > 1 and any(s.phase in _UNDER_WAY for s in self._saves.values())

    def _repeat(self) -> None:
        """For a node that has just come: what it may have missed."""
        if self._attempt.granted is not None:
            self._out.append(Tell(self._attempt.granted))
        for save in self._saves.values():
            self._repeat_save(save)

    def _repeat_save(self, save: _Save) -> None:
        if save.is_complete:
            self._out.append(Tell(m.InMemory(save.key)))
        if save.phase is Phase.WRITING:
            self._order_write(save)
        elif save.result is not None and save.key.attempt >= self._attempt.number - 1:
            self._out.append(Tell(save.result))

    def _look_at_clock(self, now_s: float) -> None:
        options = self._attempt.options
        is_due = self._is_training and not self._is_looking and now_s >= self._looked_s + self._limits.rollback
        if is_due and options is not None:
            self._looked_s, self._is_looking = now_s, True
            self._out.append(LookForRollback(options))
        if now_s >= self._repeat_s:
            self._repeat_s = inf
            self._repeat()
        for save in [s for s in self._saves.values() if s.phase is Phase.GATHERING]:
            if now_s >= save.since_s + self._limits.staging:
                who = rank_words(save.missing()) if save.world_size else "every rank"
                why = f"{who} did not take part within {self._limits.staging:.0f} s"
                self._resolve(save, SaveState.SKIPPED, now_s, why)
        for save in [s for s in self._saves.values() if s.phase is Phase.QUEUED and not s.plan_id]:
            if now_s >= save.staged_s + self._limits.staging:
                self._fail(save.key, "plan", "the layouts of its ranks are not known", now_s)
        for save in [s for s in self._saves.values() if s.phase is Phase.GATHERING and s.world_size]:
            self._skip_dead(save, now_s)
        if not self._waiting_for_nodes():
            return
        if now_s >= self._beat_s + self._limits.beat:
            self._beat_s = now_s
            self._out.append(Tell(m.WhoIsThere(is_beat=True)))
        for save in [s for s in self._saves.values() if s.phase is Phase.WRITING]:
            for node in self._other_nodes():
                silent_s = now_s - self._heard_s.get(node, self._began_s)
                waited = [r for r, n in self._rank_nodes.items() if n == node and r not in save.written]
                if silent_s >= self._limits.silence and (waited or node not in self._republished):
                    why = f"the saver of node {node} has not been heard of for {silent_s:.0f} s"
                    self._fail(save.key, "node_silent", why, now_s)
                    break

    # -- resuming ------------------------------------------------------------------------------------------------------
    def _on_restore(self, event: m.RestoreTold, now_s: float) -> None:
        if event.attempt != self._attempt.number:
            return
        # The first question of a job comes before any layout.
        self._attempt.options, self._attempt.run_id = event.options, event.run_id
        question = self._questions.setdefault((event.attempt, event.round), _Question(now_s))
        if question.answer is not None:
            self._out.append(Tell(question.answer))
            return
        question.asked[event.rank] = event
        question.since_s = now_s

    def _on_peer(self, event: m.PeerTold) -> None:
        if event.attempt != self._attempt.number:
            return
        self._peers[event.node] = event
        options = self._options_of_restore()
        if options is None or self._nodes < 2:
            return
        from steadyrun.checkpoint.peer import partner  # not needed by most jobs, and 10 ms of every start

        partners: dict[int, m.Address] = {}
        for node in range(self._nodes):
            to = partner(node, self._nodes, options.peer_jump)
            if to is not None and to in self._peers:
                partners[node] = self._peers[to].address
        holds: dict[int, list[int]] = {}
        for rank, node in self._rank_nodes.items():
            to = partner(node, self._nodes, options.peer_jump)
            if to is not None:
                holds.setdefault(to, []).append(rank)
        self._out.append(Tell(m.PeersTold(event.attempt, partners, {n: tuple(r) for n, r in holds.items()})))

    def _away(self, rank: int) -> Iterable[tuple[m.Away, m.Address]]:
        """What other nodes hold of *rank*."""
        for told in self._peers.values():
            for away in told.held:
                if away.rank == rank and away.layout.world_size == self._attempt.world_size:
                    yield away, told.address

    def _offer(self, asked: m.RestoreTold, listed: FoldersListed) -> Offer:
        """What a rank could load from memory, its own node's or another's."""
        snapshots = [*asked.snapshots, *(away.snapshot for away, _ in self._away(asked.rank))]
        valid = [s for s in snapshots if not is_superseded(listed.rollbacks, s.step, s.saved_unix_s)]
        newest = max(valid, key=lambda s: (s.step, s.attempt), default=None)
        # A rank that does not know its layout yet takes whatever is there, and looks at it then.
        return Offer(asked.digest or (newest.digest if newest is not None else ""), tuple(valid))

    def _has_all_asked(self, question: _Question) -> bool:
        return 0 < self._attempt.world_size <= len(question.asked)

    def _answer_questions(self, now_s: float) -> None:
        for (attempt, number), question in self._questions.items():
            if question.answer is not None or question.is_listing or not self._has_all_asked(question):
                continue
            if self._is_worth_waiting(question, now_s):
                continue
            options = self._options_of_restore()
            question.is_listing = True
            if options is None:
                self._on_listed(FoldersListed(attempt, number, ()))
            else:
                self._out.append(ListFolders(attempt, number, options, self._rollback))

    def _options_of_restore(self) -> CheckpointOptions | None:
        known = [a.options for _, a in sorted(self._attempts.items(), reverse=True) if a.options is not None]
        return known[0] if known else None

    def _is_worth_waiting(self, question: _Question, now_s: float) -> bool:
        """A save is being written, or could be, that is newer than what is in memory of all ranks."""
        if now_s >= question.since_s + self._limits.restore_wait:
            return False
        best = self._choose(question, FoldersListed(self._attempt.number, 0, ()))
        have = (best.attempt, best.generation) if best.source is not Source.NONE else (-1, -1)
        newer = [s for s in self._saves.values() if s.is_complete and (s.key.attempt, s.key.generation) > have]
        for save in newer:
            if save.phase is Phase.HELD:
                save.phase = Phase.QUEUED
                self._start_next(now_s)
        return bool(newer)

    def _choose(self, question: _Question, listed: FoldersListed) -> Choice:
        offers = {r: self._offer(a, listed) for r, a in question.asked.items()}
        rejected = [*question.rejected, *(r for a in question.asked.values() for r in a.rejected)]
        folders = [*listed.folders, *(f for a in question.asked.values() for f in a.folders)]
        return choose(offers, folders, rejected, listed.quarantined, listed.rollback_to)

    def _on_listed(self, event: FoldersListed) -> None:
        self.experience = self.experience or event.experience
        question = self._questions.get((event.attempt, event.round))
        if question is None or question.answer is not None:
            return
        question.listed = event
        self._decide(question, event)

    def _decide(self, question: _Question, event: FoldersListed) -> None:
        """Answer, once the chosen checkpoint is where the ranks can read it."""
        choice = self._choose(question, event)
        options = self._options_of_restore()
        if options is not None and options.remote is not None:
            if choice.source is Source.NONE and not event.has_remote:
                self._out.append(ListRemote(event, options))
                return
            if choice.tier is TierName.REMOTE:
                question.fetching = choice
                self._out.append(FetchRemote(event.attempt, event.round, choice.path, options))
                return
        self._answer(question, event, choice)

    def _on_fetched(self, event: RemoteFetched) -> None:
        question = self._questions.get((event.attempt, event.round))
        if question is None or question.answer is not None or question.listed is None or question.fetching is None:
            return
        choice, question.fetching = question.fetching, None
        if event.path:
            self._answer(question, question.listed, dataclasses.replace(choice, path=event.path))
        else:
            question.rejected.append(Rejected(choice.path, choice.step, event.why))
            self._decide(question, question.listed)

    def _answer(self, question: _Question, event: FoldersListed, choice: Choice) -> None:
        if choice.source is Source.NONE and event.why:
            # Not to know what there is differs from knowing that there is nothing.
            unknown = Refused(TierName.SHARED, -1, -1, event.why)
            choice = dataclasses.replace(choice, why=event.why, refused=(*choice.refused, unknown))
        skips = [*event.skipped_by_path.get(choice.path, ()), *(r for b in event.rollbacks for r in b.skip_batches)]
        away: dict[int, tuple[m.Address, m.Away]] = {}
        for rank, tier in choice.tiers.items():
            if tier is TierName.PEER:
                order = (choice.attempt, choice.generation)
                for held, address in self._away(rank):
                    if (held.snapshot.attempt, held.snapshot.generation) == order:
                        away[rank] = (address, held)
        question.answer = m.Chosen(event.attempt, event.round, choice, tuple(merged(skips)), away)
        self._out.append(Tell(question.answer))
        fields: dict[str, Any] = {"attempt": event.attempt, "source": choice.source.value, "why": choice.why}
        if choice.source is not Source.NONE:
            fields.update(step=choice.step, from_attempt=choice.attempt, path=choice.path)
            options = self._options_of_restore()
            if options is not None and choice.tier is not None:
                loaded = Loaded(choice.step, choice.attempt, choice.tier, event.attempt, 0.0)
                self._out.append(NoteLoaded(options, loaded))
        fields["refused"] = [str(r) for r in choice.refused[:20]]
        self._out.append(Record("checkpoint_restored", fields))
        if event.why:
            self._out.append(Say(event.why))

    @property
    def _is_training(self) -> bool:
        return 0 < self._attempt.world_size <= len(self._attempt.started)

    # -- agreeing and flushing -----------------------------------------------------------------------------------------
    def _on_agree(self, event: m.AgreeTold) -> None:
        if event.attempt != self._attempt.number:
            return
        name = (event.attempt, event.key)
        known = self._agreed.get(name)
        if known is not None:
            self._out.append(Tell(known))
            return
        values = self._values.setdefault(name, {})
        values[event.rank] = event.value
        if len(values) == self._attempt.world_size:
            del self._values[name]
            agreed = m.Agreed(event.attempt, event.key, tuple(values[r] for r in sorted(values)))
            self._agreed[name] = agreed
            for old in list(self._agreed)[: max(len(self._agreed) - _KEPT_AGREED, 0)]:
                del self._agreed[old]
            self._out.append(Tell(agreed))

    def _answer_flushes(self, now_s: float) -> None:
        for flush in list(self._flushes):
            answer = self._flushed(flush, now_s)
            if answer is not None:
                self._flushes.remove(flush)
                self._out.append(Tell(answer))

    def _demanded(self, event: m.FlushTold, now_s: float) -> _Flush:
        """Ranks are to save; waits for no longer than that can take, and not at all where none would hear of it."""
        schedule, granted = self.schedule, self._attempt.granted
        if schedule is None or not self._steps or granted is None or granted.why:
            return _Flush(event.id, event.waits, now_s, after=-1 if not self._steps else max(self._steps.values()))
        schedule.demand()
        until_s = now_s + min(event.limit_s, schedule.demand_limit_s)
        return _Flush(event.id, event.waits, until_s, after=max(self._steps.values()))

    def _flushed(self, flush: _Flush, now_s: float) -> m.Flushed | None:
        """The answer, or None while it is being worked on."""
        durable = self.last.key.step if self.last is not None else None
        late = now_s >= flush.until_s
        if flush.after is not None:
            mine = self._attempt.number
            staged = (s.key for s in self._saves.values() if s.staged_s < inf and s.key.attempt == mine)
            newer = max((k.step for k in staged if k.step > flush.after), default=None)
            if newer is None and not late:
                return None
            return m.Flushed(flush.id, newer, "" if newer is not None else "the ranks did not save in time")
        if (
            flush.waits
            and not late
            and any(s.phase is Phase.GATHERING and s.key.attempt == self._attempt.number for s in self._saves.values())
        ):
            return None
        complete = sorted((s for s in self._saves.values() if s.staged_s < inf), key=lambda s: s.key)
        if not complete:
            why = "" if durable is not None else "there is no snapshot that all ranks have finished"
            return m.Flushed(flush.id, durable, why)
        newest = complete[-1]
        if newest.result is not None:
            why = "" if newest.result.state is SaveState.DURABLE else newest.result.why
            return m.Flushed(flush.id, durable, why)
        if late:
            return m.Flushed(flush.id, durable, f"step {newest.key.step} was not durable in time")
        if newest.phase is Phase.HELD:
            newest.phase = Phase.QUEUED
            self._start_next(now_s)
        return None

    def _on_failed(self, event: m.FailedTold, now_s: float) -> None:
        if event.attempt in self._failed_attempts:
            return
        self._failed_attempts.add(event.attempt)
        if self.schedule is not None:
            survived = any(s.is_complete for s in self._saves.values())
            self.schedule.failed(survived)
        options = self._of(event.attempt).options
        if options is not None:
            experience = self.schedule.experience() if self.schedule is not None else None
            self._out.append(
                NoteFailure(options, event.attempt, event.step, event.signature, event.falls_back, experience)
            )
        # The state of training is nowhere else now: bring the newest snapshot to safety.
        self._flushes.append(_Flush(f"failed/{event.attempt}", False, now_s + self._limits.restore_wait))
