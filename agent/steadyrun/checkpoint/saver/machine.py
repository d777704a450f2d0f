"""One node's part of the saves: what its ranks and its agent say, what its coordinator decides, what has to be done.

Pure: ``handle`` takes one event and its time and returns what to do, in order; ``next_deadline_s`` says when to come
back at the latest with a ``Tick``. It owns what is known of ranks, snapshot memory and pieces of saves; it reads no
memory and writes no file. A rank, the agent, the coordinator, or this saver itself may be gone at any moment.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from typing_extensions import assert_never

from steadyrun.checkpoint.choose import Rejected, Snapshot
from steadyrun.checkpoint.layout import Layout
from steadyrun.checkpoint.planning import Part
from steadyrun.checkpoint.saver import messages as m
from steadyrun.checkpoint.saver.events import (
    AgentLost,
    AnswerAgent,
    ArenaInfo,
    ArenaOpened,
    ArenaRefused,
    ArenaRestored,
    AttemptBegan,
    AttemptFailed,
    Bind,
    Binding,
    CancelWrites,
    CopyLocal,
    DigestSlot,
    DropArena,
    End,
    ExchangeBound,
    ExchangeLost,
    FetchPeer,
    FlushAsked,
    ForgetPeers,
    Inspect,
    Inspected,
    LeaveAsked,
    LetGo,
    ListLocal,
    LocalListed,
    MemoryShort,
    NodeCommand,
    NodeEvent,
    OpenArena,
    OrderPlaced,
    PeerFetched,
    PeerServing,
    PieceFailed,
    PieceWritten,
    Post,
    PushPiece,
    RankAgree,
    RankBye,
    RankFlush,
    RankHello,
    RankLayout,
    RankLost,
    RankRestore,
    RankSkipped,
    RankStaged,
    RankStarted,
    ReleaseSlot,
    Report,
    SaveAsked,
    SendRank,
    ServePeers,
    SetWanted,
    StepsRead,
    Tick,
    WritePiece,
)
from steadyrun.checkpoint.saver.messages import SaveKey
from steadyrun.checkpoint.saves import CheckpointOptions, SaveState, TierName
from steadyrun.checkpoint.shardfile import Written

__all__ = ["NodeLimits", "SaverMachine", "rejections"]


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Seconds.

    Attributes:
        silence: of the coordinator's saver while this node waits for its decision.
        unbound: without any connection to the other savers, until a save is given up.
        gathering: until a save that the coordinator says nothing of is given up; above its own limit.
        orphan: for everything once the agent is gone.
        beat: between signs of life.
        progress: between reports of the ranks' steps.
    """

    silence: float = 60.0
    unbound: float = 300.0
    gathering: float = 400.0
    orphan: float = 25.0
    beat: float = 5.0
    progress: float = 0.25


# -- state -------------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Rank:
    """A connected rank. *asked_layout*: it waits for ``arena`` or ``refused``."""

    connection: int
    attempt: int
    rank: int
    arena: int | None = None
    asked_layout: bool = False
    note: str = ""
    refusal: str = ""
    rounds: int = 0
    restore: RankRestore | None = None


@dataclass(slots=True)
class _ArenaState:
    info: ArenaInfo
    inspected: Inspected | None = None
    is_inspecting: bool = False


@dataclass(slots=True)
class _Piece:
    """One rank's part of a save that is not resolved."""

    key: SaveKey
    rank: int
    arena: int
    slot: int
    tiers: frozenset[TierName]
    stall_s: float
    created_unix_s: float
    since_s: float
    is_held: bool = True
    ticket: str = ""  # of the order that is being carried out, or was
    vote: m.VoteTold | None = None
    is_in_memory: bool = False


_KEPT_RESOLVED: Final = 16
_KEPT_PLANS: Final = 4
_KEPT_ATTEMPTS: Final = 4
_FOLDER_TIERS: Final = frozenset({TierName.LOCAL, TierName.SHARED, TierName.REMOTE})
_AGENT: Final = "agent"
_AGENT_SAVE: Final = "agent save"
_STAGGERED_NODES: Final = 8
_STAGGER_RATIO: Final = 0.05  # of what a save takes
_STAGGER_LIMIT_S: Final = 2.0


class SaverMachine:
    """For one thread.

    Attributes:
        last_durable: of the job, as far as this node has heard.
        counts: saves by final state.
    """

    def __init__(self, node: str, limits: NodeLimits | None = None, remembered: m.Remembered | None = None) -> None:
        known = remembered or m.Remembered()
        self._node = node
        self._limits = limits or NodeLimits()
        self._binding: Binding | None = None
        self._is_bound = False
        self._call = ""  # the newest that was heard
        self._unbound_s = 0.0
        self._ranks: dict[tuple[int, int], _Rank] = {}
        self._arenas: dict[int, _ArenaState] = {}
        self._pieces: dict[tuple[SaveKey, int], _Piece] = {}
        self._options: dict[int, tuple[CheckpointOptions, str]] = dict(known.options)
        self._ranks_of: dict[int, tuple[int, ...]] = dict(known.ranks)
        self._tiers: dict[SaveKey, frozenset[TierName]] = dict(known.tiers)
        self._resolved: OrderedDict[SaveKey, m.Resolved] = OrderedDict((r.key, r) for r in known.resolved)
        self._plans: OrderedDict[str, tuple[Part, ...]] = OrderedDict()
        self._orders: dict[SaveKey, m.WriteOrdered] = {}
        self._granted: m.Granted | None = None
        self._refusals: dict[int, tuple[Layout, str]] = {}  # by rank of the attempt
        self._gone: set[int] = set()
        self._started: set[int] = set()
        self._agrees: dict[tuple[int, str], RankAgree] = {}
        self._asked: dict[int, m.RestoreTold] = {}
        self._flushes: dict[str, tuple[m.FlushTold, float]] = {}
        self._failed: AttemptFailed | None = None
        self._local: LocalListed | None = None
        self._is_listing_local = False
        self._serving: PeerServing | None = None
        self._is_serving_asked = False
        self._partner: m.Address | None = None
        self._expected: tuple[int, ...] = ()
        self._fetching: dict[int, m.Chosen] = {}
        self._checking: dict[int, m.Chosen] = {}
        self._step_told = -1
        self._step_told_s = -inf
        self._heard_s = 0.0
        self._beat_s = -inf
        self._leave_s: float | None = None
        self._is_ended = False
        self._out: list[NodeCommand] = []
        self._story: deque[str] = deque(maxlen=64)
        self.last_durable: m.Resolved | None = None
        self.counts: dict[SaveState, int] = dict.fromkeys(SaveState, 0)
        for resolved in known.resolved:
            self._note_durable(resolved)

    # -- the outside ---------------------------------------------------------------------------------------------------
    def handle(self, event: NodeEvent, now_s: float) -> list[NodeCommand]:
        """What to do about *event*; nothing after ``End``."""
        if self._is_ended:
            return []
        if not isinstance(event, (Tick, StepsRead)):
            self._story.append(f"{now_s:.3f} {type(event).__name__}")
        self._react(event, now_s)
        self._look_at_clock(event, now_s)
        out, self._out = self._out, []
        return out

    def next_deadline_s(self) -> float:
        if self._is_ended:
            return inf
        at_s = [until_s for _, until_s in self._flushes.values()]
        if self._leave_s is not None:
            at_s.append(self._leave_s)
        if self._has_other_nodes and self._is_waiting:
            at_s.append(self._beat_s + self._limits.beat)
            at_s.append(self._heard_s + self._limits.silence)
        if not self._is_bound and self._pieces and self._binding is not None:
            at_s.append(self._unbound_s + self._limits.unbound)
        at_s += [p.since_s + self._limits.gathering for p in self._pieces.values() if not p.is_in_memory]
        return min(at_s, default=inf)

    def remember(self) -> m.Remembered:
        unresolved = {key for key, _ in self._pieces}
        return m.Remembered(
            dict(list(self._options.items())[-_KEPT_ATTEMPTS:]),
            dict(list(self._ranks_of.items())[-_KEPT_ATTEMPTS:]),
            {key: tiers for key, tiers in self._tiers.items() if key in unresolved},
            tuple(self._resolved.values()),
        )

    @property
    def arenas(self) -> Mapping[int, ArenaInfo]:
        return {number: a.info for number, a in self._arenas.items()}

    @property
    def binding(self) -> Binding | None:
        return self._binding

    def arena_of(self, attempt: int, rank: int) -> int | None:
        """The memory that this rank stages into."""
        found = self._ranks.get((attempt, rank))
        return None if found is None else found.arena

    def is_unresolved(self, key: SaveKey) -> bool:
        return any(k == key for k, _ in self._pieces)

    @property
    def story(self) -> str:
        return "\n".join(self._story)

    # -- reacting ------------------------------------------------------------------------------------------------------
    def _react(self, event: NodeEvent, now_s: float) -> None:  # one case an event
        match event:
            case RankHello():
                self._on_hello(event)
            case RankLayout():
                self._on_layout(event)
            case RankStaged():
                self._on_staged(event, now_s)
            case RankSkipped():
                if event.key not in self._resolved:
                    self._post(m.SkippedTold(event.key, event.rank, event.why))
            case RankRestore():
                self._on_restore(event)
            case RankAgree():
                self._agrees[event.rank, event.key] = event
                self._post(m.AgreeTold(event.attempt, event.rank, event.key, event.value))
            case RankStarted():
                self._on_started(event)
            case RankFlush():
                name = f"{self._node}/{event.attempt}/{event.rank}"
                self._flush(name, event.attempt, True, event.limit_s, now_s)
            case RankBye():
                if self._ranks.pop((event.attempt, event.rank), None) is not None:
                    self._post(m.RankGoneTold(event.attempt, event.rank))  # no save has to wait for it
            case RankLost():
                self._on_lost(event)
            case AttemptBegan():
                self._on_attempt(event.binding, now_s)
            case AttemptFailed():
                self._failed = event
                self._post(m.FailedTold(event.attempt, event.step, event.signature, event.falls_back))
            case FlushAsked():
                attempt = self._binding.attempt if self._binding is not None else -1
                self._flush(f"{self._node}/{_AGENT}", attempt, False, event.limit_s, now_s)
            case SaveAsked():
                attempt = self._binding.attempt if self._binding is not None else -1
                self._flush(f"{self._node}/{_AGENT_SAVE}", attempt, False, event.limit_s, now_s, saves=True)
            case LeaveAsked():
                self._leave_s = now_s + event.limit_s
            case AgentLost():
                self._on_orphaned(now_s)
            case ArenaOpened():
                self._on_opened(event)
            case ArenaRefused():
                self._on_refused(event)
            case ArenaRestored():
                self._on_restored(event, now_s)
            case Inspected():
                self._on_inspected(event)
            case PeerServing():
                self._serving = event
                self._post_peer()
                self._forget_peers()
            case PeerFetched():
                self._on_fetched(event)
            case LocalListed():
                if self._binding is not None and event.attempt == self._binding.attempt:
                    self._local = event
                    for rank in self._current():
                        if rank.restore is not None and rank.rank not in self._asked:
                            self._ask(rank)
            case MemoryShort():
                self._out.append(Report("memory_short", {"rank": event.rank, "why": event.why}, event.why))
            case PieceWritten():
                self._vote(event.key, event.rank, event.ticket, event.written, "", "")
            case PieceFailed():
                self._vote(event.key, event.rank, event.ticket, None, event.reason, event.why)
            case StepsRead():
                self._on_steps(event, now_s)
            case OrderPlaced():
                if any(step >= event.step for step in event.steps.values()):
                    self._post(m.LateTold(event.attempt, event.step))
            case ExchangeBound():
                self._on_bound(event, now_s)
            case ExchangeLost():
                self._is_bound, self._unbound_s = False, now_s
            case Tick():
                pass
            case _:
                self._heard_s = now_s
                self._hear(event, now_s)

    def _hear(self, message: m.ToAll, now_s: float) -> None:
        match message:
            case m.WhoIsThere():
                self._on_called(message)
            case m.Granted():
                self._on_granted(message)
            case m.PlanTold():
                self._plans[message.plan_id] = message.parts
                self._plans.move_to_end(message.plan_id)
                while len(self._plans) > _KEPT_PLANS:
                    self._plans.popitem(last=False)
                for order in list(self._orders.values()):
                    if order.plan_id == message.plan_id:
                        self._write(order)
            case m.InMemory():
                self._on_in_memory(message.key)
            case m.WriteOrdered():
                self._orders[message.key] = message
                self._write(message)
            case m.Resolved():
                self._resolve(message)
            case m.Chosen():
                self._on_chosen(message)
            case m.PeersTold():
                if self._binding is not None and message.attempt == self._binding.attempt:
                    self._partner = message.partners.get(self._binding.group_rank)
                    self._expected = message.holds.get(self._binding.group_rank, ())
                    self._forget_peers()
            case m.Agreed():
                for rank in self._current():
                    if self._agrees.pop((rank.rank, message.key), None) is not None:
                        fields = {"key": message.key, "values": list(message.values)}
                        self._out.append(SendRank(rank.connection, "agreed", fields))
            case m.SaveOrdered():
                self._on_ordered(message)
            case m.Flushed():
                self._on_flushed(message)
            case _:
                assert_never(message)

    def _on_called(self, message: m.WhoIsThere) -> None:
        if message.is_beat or self._binding is None or message.node not in (None, self._binding.group_rank):
            return
        self._call = message.call
        if self._is_bound:
            self._republish()

    def _post(self, message: m.FromNode) -> None:
        """To the coordinator; what is lost while there is none is said again once there is."""
        if self._is_bound:
            self._out.append(Post(message))

    def _current(self) -> list[_Rank]:
        if self._binding is None:
            return []
        return [r for r in self._ranks.values() if r.attempt == self._binding.attempt]

    @property
    def _has_other_nodes(self) -> bool:
        return self._binding is not None and self._binding.group_world_size > 1

    @property
    def _is_waiting(self) -> bool:
        """For a decision of the coordinator about something on disk."""
        return any(p.is_in_memory and p.tiers & _FOLDER_TIERS for p in self._pieces.values())

    # -- ranks ---------------------------------------------------------------------------------------------------------
    def _on_hello(self, event: RankHello) -> None:
        known = self._ranks.get((event.attempt, event.rank))
        rank = _Rank(event.connection, event.attempt, event.rank)
        if known is not None:
            rank.arena, rank.rounds = known.arena, known.rounds
        self._ranks[event.attempt, event.rank] = rank
        self._gone.discard(event.rank)
        self._options.pop(event.attempt, None)
        self._options[event.attempt] = (event.options, event.run_id)
        self._out.append(SendRank(event.connection, "welcome", {"version": 1, "root": event.options.root}))
        self._serve_peers()
        for resolved in self._resolved.values():
            if resolved.key.attempt == event.attempt:
                self._tell_rank(rank, resolved)
        for piece in self._pieces.values():
            if piece.rank == event.rank and piece.key.attempt == event.attempt and piece.is_in_memory:
                self._tell_state(rank, piece.key, SaveState.IN_MEMORY)

    def _tell_rank(self, rank: _Rank, resolved: m.Resolved) -> None:
        self._tell_state(rank, resolved.key, resolved.state, resolved.why, resolved.seconds)

    def _tell_state(
        self, rank: _Rank, key: SaveKey, state: SaveState, why: str = "", seconds: float | None = None
    ) -> None:
        fields: dict[str, Any] = {"step": key.step, "generation": key.generation, "state": state.value, "why": why}
        fields["seconds"] = None if seconds is None else round(seconds, 6)
        self._out.append(SendRank(rank.connection, "save", fields))

    def _on_layout(self, event: RankLayout) -> None:
        rank = self._ranks.get((event.attempt, event.rank))
        if rank is None:
            return
        rank.asked_layout, rank.refusal, rank.arena = True, "", None
        options, _ = self._options[event.attempt]
        local = len(self._ranks_of.get(event.attempt, ())) or 1
        known = tuple(n for n, a in self._arenas.items() if a.info.rank == event.rank)
        self._out.append(
            OpenArena(event.attempt, event.rank, event.text, event.blob_bytes, options.slots, local, known)
        )

    def _on_opened(self, event: ArenaOpened) -> None:
        state = self._arenas.get(event.info.id)
        if state is None:
            self._arenas[event.info.id] = _ArenaState(event.info)
        self._refusals.pop(event.info.rank, None)
        rank = self._ranks.get((event.attempt, event.info.rank))
        if rank is None:
            self._drop_unused()
            return
        rank.arena, rank.note = event.info.id, event.note
        self._post_layout(event.attempt, event.info, "")
        self._answer_layout(rank)

    def _on_refused(self, event: ArenaRefused) -> None:
        rank = self._ranks.get((event.attempt, event.rank))
        if rank is None:
            return
        if event.layout is None:
            rank.asked_layout = False
            self._out.append(SendRank(rank.connection, "refused", {"why": event.why, "direct": False}))
            return
        rank.refusal = event.why
        self._refusals[event.rank] = (event.layout, event.why)
        self._post_refusal(event.attempt, event.layout, event.why)
        self._answer_layout(rank)

    def _post_layout(self, attempt: int, info: ArenaInfo, why: str) -> None:
        # Options of an attempt long ago are forgotten; those of a later one are as good.
        known = self._options.get(attempt) or next(reversed(self._options.values()), None)
        if known is not None:
            options, run_id = known
            self._post(m.LayoutTold(attempt, info.rank, info.layout, info.slots, why, run_id, options))

    def _post_refusal(self, attempt: int, layout: Layout, why: str) -> None:
        options, run_id = self._options[attempt]
        self._post(m.LayoutTold(attempt, layout.rank, layout, 0, why, run_id, options))

    def _on_granted(self, message: m.Granted) -> None:
        if self._binding is None or message.attempt != self._binding.attempt:
            return
        self._granted = message
        for rank in self._current():
            self._answer_layout(rank)

    def _answer_layout(self, rank: _Rank) -> None:
        """Once all ranks are known to have memory, or one not to: they have to do the same."""
        granted = self._granted
        if not rank.asked_layout or granted is None or granted.attempt != rank.attempt:
            return
        if granted.why:
            rank.asked_layout = False
            self._out.append(SendRank(rank.connection, "refused", {"why": granted.why, "direct": True}))
        elif rank.refusal:
            # The others go on with theirs: this rank alone takes no part.
            rank.asked_layout = False
            self._out.append(SendRank(rank.connection, "refused", {"why": rank.refusal, "direct": False}))
        elif rank.arena is not None:
            rank.asked_layout = False
            slots = self._arenas[rank.arena].info.slots
            self._out.append(SendRank(rank.connection, "arena", {"slots": slots, "note": rank.note}, rank.arena))

    def _on_staged(self, event: RankStaged, now_s: float) -> None:
        rank = self._ranks.get((event.key.attempt, event.rank))
        resolved = self._resolved.get(event.key)
        name = (event.key, event.rank)
        if resolved is not None or name in self._pieces:
            # A rank says it again to a saver that was started again.
            if event.is_held:
                self._out.append(LetGo(event.arena, event.slot))
            if resolved is not None and rank is not None:
                self._tell_rank(rank, resolved)
            return
        if not event.is_held:
            why = "its snapshot was overwritten or damaged before the saver saw it"
            self._post(m.SkippedTold(event.key, event.rank, why))
            return
        state = self._arenas.get(event.arena)
        if state is None:
            return
        state.inspected = None
        for old in [p for p in self._pieces.values() if (p.arena, p.slot) == (event.arena, event.slot)]:
            del self._pieces[old.key, old.rank]  # it was for memory alone, and is overwritten
        self._tiers[event.key] = event.tiers
        self._pieces[name] = piece = _Piece(
            event.key,
            event.rank,
            event.arena,
            event.slot,
            event.tiers,
            event.stall_s,
            event.created_unix_s,
            now_s,
        )
        self._post_staged(piece)

    def _post_staged(self, piece: _Piece) -> None:
        info = self._arenas[piece.arena].info
        self._post(
            m.StagedTold(
                piece.key,
                piece.rank,
                info.world_size,
                info.digest,
                piece.tiers,
                piece.stall_s,
                piece.created_unix_s,
            )
        )

    def _on_started(self, event: RankStarted) -> None:
        if self._binding is None or event.attempt != self._binding.attempt:
            return
        self._started.add(event.rank)
        self._asked.pop(event.rank, None)
        self._post(m.StartedTold(event.attempt, event.rank, event.step))
        self._drop_unused()

    def _on_lost(self, event: RankLost) -> None:
        rank = self._ranks.get((event.attempt, event.rank))
        if rank is None or rank.connection != event.connection:
            return  # it said goodbye, or has connected again
        del self._ranks[event.attempt, event.rank]
        for name in [n for n in self._agrees if n[0] == event.rank]:
            del self._agrees[name]
        self._asked.pop(event.rank, None)
        if self._binding is not None and event.attempt == self._binding.attempt:
            self._gone.add(event.rank)
        self._post(m.RankGoneTold(event.attempt, event.rank))

    def _on_steps(self, event: StepsRead, now_s: float) -> None:
        if self._binding is None or not event.steps:
            return
        step = max(event.steps.values())
        if step != self._step_told and now_s >= self._step_told_s + self._limits.progress:
            self._step_told, self._step_told_s = step, now_s
            self._post(m.SteppedTold(self._binding.attempt, self._binding.group_rank, step))

    def _on_ordered(self, message: m.SaveOrdered) -> None:
        if self._binding is None or message.attempt != self._binding.attempt:
            return
        arenas = tuple(r.arena for r in self._current() if r.arena is not None)
        if arenas:
            self._out.append(SetWanted(message.attempt, arenas, message.step, message.tiers))

    # -- other nodes' memory -------------------------------------------------------------------------------------------
    def _serve_peers(self) -> None:
        """Once it is known that the job wants it, and that there are other nodes."""
        binding = self._binding
        if binding is None or binding.group_world_size < 2 or self._is_serving_asked:
            return
        known = self._options.get(binding.attempt)
        if known is not None and known[0].peer:
            self._is_serving_asked = True
            self._out.append(ServePeers(binding))

    def _post_peer(self) -> None:
        if self._serving is not None and self._binding is not None:
            told = m.PeerTold(
                self._binding.attempt, self._binding.group_rank, self._serving.address, self._serving.held
            )
            self._post(told)

    def _forget_peers(self) -> None:
        """What other nodes hold by now: once those whose partner this node is have all brought something new."""
        if self._serving is None or self._binding is None or not self._expected:
            return
        held = self._serving.held
        new = {h.rank for h in held if h.snapshot.attempt == self._binding.attempt}
        old = tuple(sorted({h.rank for h in held} - set(self._expected)))
        if old and set(self._expected) <= new:
            self._out.append(ForgetPeers(old))

    def _push(self, piece: _Piece) -> None:
        known = self._options.get(piece.key.attempt)
        if TierName.PEER in piece.tiers and self._partner is not None and known is not None:
            self._out.append(PushPiece(piece.key, piece.arena, piece.slot, self._partner, known[0]))

    def _on_fetched(self, event: PeerFetched) -> None:
        message = self._fetching.pop(event.rank, None)
        rank = self._ranks.get((event.attempt, event.rank))
        if event.info is not None and event.info.id not in self._arenas:
            self._arenas[event.info.id] = _ArenaState(event.info)
        if event.found is None:
            fields = {"rank": event.rank, "why": event.why}
            self._out.append(Report("snapshot_not_fetched", fields, event.why))
        if message is not None and rank is not None:
            self._send_choice(rank, message, -1 if event.found is None else event.found.slot)

    # -- memory that outlives somebody ---------------------------------------------------------------------------------
    def _on_restored(self, event: ArenaRestored, now_s: float) -> None:
        self._arenas[event.info.id] = _ArenaState(event.info)
        newest = max((f.key for f in event.found), default=None)
        for found in event.found:
            known = self._tiers.get(found.key)
            tiers = known or frozenset({TierName.MEMORY})
            if found.key == newest:
                tiers |= {TierName.SHARED}  # one saver has died: bring it to safety
            is_wanted = found.key not in self._resolved and (known is not None or found.key == newest)
            if not is_wanted or (found.key, event.info.rank) in self._pieces:
                self._out.append(LetGo(event.info.id, found.slot))
                continue
            self._tiers[found.key] = tiers
            self._pieces[found.key, event.info.rank] = piece = _Piece(
                found.key, event.info.rank, event.info.id, found.slot, tiers, 0.0, found.created_unix_s, now_s
            )
            self._post_staged(piece)

    def _drop_unused(self) -> None:
        """Arenas of layouts that no rank has any more, once the ranks of the attempt train."""
        if self._binding is None or not set(self._binding.ranks) <= self._started:
            return
        used = {r.arena for r in self._ranks.values()} | {p.arena for p in self._pieces.values()}
        current = set(self._binding.ranks)
        for number, state in list(self._arenas.items()):
            rank = self._ranks.get((self._binding.attempt, state.info.rank))
            replaced = rank is not None and rank.arena is not None
            foreign = state.info.rank not in current or state.info.world_size != self._binding.world_size
            if number not in used and (replaced or foreign):
                del self._arenas[number]
                self._out.append(DropArena(number))

    # -- saves ---------------------------------------------------------------------------------------------------------
    def _on_in_memory(self, key: SaveKey) -> None:
        for old in [p for p in self._pieces.values() if p.key < key and p.is_in_memory]:
            if not old.tiers & _FOLDER_TIERS:
                del self._pieces[old.key, old.rank]  # the newer one takes its place
        for piece in self._of(key):
            if piece.is_in_memory:
                continue
            piece.is_in_memory = True
            self._push(piece)
            rank = self._ranks.get((key.attempt, piece.rank))
            if rank is not None:
                self._tell_state(rank, key, SaveState.IN_MEMORY)
            if not piece.tiers & _FOLDER_TIERS:
                # Nothing is going to be written: its checksums are taken now, and the rank may use the slot again
                # once there is a newer one.
                self._out.append(DigestSlot(piece.arena, piece.slot, key.generation))
                self._let_go(piece)

    def _of(self, key: SaveKey) -> list[_Piece]:
        return [p for p in self._pieces.values() if p.key == key]

    def _let_go(self, piece: _Piece) -> None:
        if piece.is_held:
            piece.is_held = False
            self._out.append(LetGo(piece.arena, piece.slot))

    def _write(self, order: m.WriteOrdered) -> None:
        parts = self._plans.get(order.plan_id)
        if parts is None:
            self._post(m.PlanAskedTold(order.plan_id))
            return
        pieces = self._of(order.key)
        for piece in pieces:
            if piece.ticket == order.ticket:
                if piece.vote is not None:
                    self._post(piece.vote)
                continue
            if piece.ticket and piece.vote is None:
                self._out.append(CancelWrites(piece.ticket))  # into a folder that is not there any more
            piece.ticket, piece.vote = order.ticket, None
            self._out.append(
                WritePiece(
                    piece.key,
                    order.ticket,
                    piece.rank,
                    piece.arena,
                    piece.slot,
                    parts[piece.rank],
                    order.folder,
                    order.options,
                    self._delay_s(),
                )
            )
        here = set(self._ranks_of.get(order.key.attempt, ()))
        for rank in sorted(here - {p.rank for p in pieces}):
            why = "its snapshot is not in memory any more"
            self._post(m.VoteTold(order.key, rank, order.ticket, None, "lost", why))

    def _delay_s(self) -> float:
        """Many nodes that begin to write at once get in each other's way at the servers of a shared file system."""
        binding, last = self._binding, self.last_durable
        if binding is None or last is None or binding.group_world_size < _STAGGERED_NODES:
            return 0.0
        return min(_STAGGER_RATIO * last.seconds, _STAGGER_LIMIT_S) * binding.group_rank / binding.group_world_size

    def _vote(self, key: SaveKey, rank: int, ticket: str, written: Written | None, reason: str, why: str) -> None:
        piece = self._pieces.get((key, rank))
        if piece is None or piece.ticket != ticket:
            return  # resolved, or ordered anew meanwhile
        piece.vote = m.VoteTold(key, rank, ticket, written, reason, why)
        self._post(piece.vote)

    def _resolve(self, result: m.Resolved) -> None:
        is_new = result.key not in self._resolved
        if is_new:
            self._resolved[result.key] = result
            while len(self._resolved) > _KEPT_RESOLVED:
                self._resolved.popitem(last=False)
            self.counts[result.state] += 1
            self._note_durable(result)
            self._orders.pop(result.key, None)
            self._tiers.pop(result.key, None)
        pieces = self._of(result.key)
        for ticket in sorted({p.ticket for p in pieces if p.ticket and p.vote is None}):
            self._out.append(CancelWrites(ticket))
        for piece in pieces:
            self._let_go(piece)
            if result.state is SaveState.SKIPPED:
                self._out.append(ReleaseSlot(piece.arena, piece.slot, piece.key))
            elif result.state is SaveState.FAILED:
                self._out.append(DigestSlot(piece.arena, piece.slot, piece.key.generation))
            del self._pieces[result.key, piece.rank]
        if is_new:
            self._copy_to_local(result)
            for rank in list(self._ranks.values()):
                if rank.attempt == result.key.attempt:
                    self._tell_rank(rank, result)
            self._drop_unused()

    def _copy_to_local(self, result: m.Resolved) -> None:
        known = self._options.get(result.key.attempt)
        if result.state is SaveState.DURABLE and TierName.LOCAL in result.tiers and known is not None:
            self._out.append(CopyLocal(result.path, known[0]))

    def _note_durable(self, result: m.Resolved) -> None:
        if result.state is SaveState.DURABLE and (self.last_durable is None or result.key > self.last_durable.key):
            self.last_durable = result

    # -- resuming ------------------------------------------------------------------------------------------------------
    def _on_restore(self, event: RankRestore) -> None:
        rank = self._ranks.get((event.attempt, event.rank))
        if rank is None:
            return
        rank.restore = event
        if event.number is not None:
            rank.rounds = event.number
        if self._binding is not None and event.attempt == self._binding.attempt:
            self._ask(rank)  # else once the agent has told of the attempt: the rank may be faster

    def _ask(self, rank: _Rank) -> None:
        """Tell the coordinator what this rank could load, once its memory was looked through."""
        event = rank.restore
        if event is None:
            return
        options, run_id = self._options[event.attempt]
        if options.local is not None and self._local is None:
            if not self._is_listing_local and self._binding is not None:
                self._is_listing_local = True
                self._out.append(ListLocal(event.attempt, options, frozenset(self._binding.ranks)))
            return
        snapshots: list[Snapshot] = []
        digest = event.digest or ""
        if event.may_use_memory:
            arenas = [a for a in self._arenas.values() if a.info.rank == rank.rank]
            unknown = [a for a in arenas if a.inspected is None]
            for arena in unknown:
                self._inspect(arena)
            if unknown:
                return
            for arena in sorted(arenas, key=lambda a: a.info.id):
                if event.digest is None and self._binding is not None:
                    if arena.info.world_size != self._binding.world_size:
                        continue
                    digest = arena.info.digest
                assert arena.inspected is not None
                snapshots += [
                    Snapshot(
                        f.key.step,
                        f.key.attempt,
                        f.key.generation,
                        arena.info.digest,
                        TierName.MEMORY,
                        f.created_unix_s,
                    )
                    for f in (*arena.inspected.good, *arena.inspected.unchecked)
                ]
        told = m.RestoreTold(
            event.attempt,
            rank.rounds,
            rank.rank,
            digest,
            tuple(snapshots),
            self._local.folders if self._local is not None else (),
            event.rejected,
            run_id,
            options,
        )
        self._asked[rank.rank] = told
        self._post(told)

    def _inspect(self, arena: _ArenaState) -> None:
        if not arena.is_inspecting:
            arena.is_inspecting = True
            self._out.append(Inspect(arena.info.id))

    def _on_inspected(self, event: Inspected) -> None:
        arena = self._arenas.get(event.arena)
        if arena is None:
            return
        if event.slot is not None:
            self._note_checked(arena, event)
            return
        arena.is_inspecting, arena.inspected = False, event
        self._report_damage(arena, event)
        for rank in self._current():
            if rank.rank == arena.info.rank and rank.restore is not None and rank.rank not in self._asked:
                self._ask(rank)

    def _report_damage(self, arena: _ArenaState, event: Inspected) -> None:
        for key, why in event.damaged:
            fields = {"rank": arena.info.rank, "step": key.step, "attempt": key.attempt, "why": why}
            text = f"the snapshot of step {key.step} in the memory of rank {arena.info.rank} is not used: {why}"
            self._out.append(Report("snapshot_damaged", fields, text))

    def _note_checked(self, arena: _ArenaState, event: Inspected) -> None:
        """The slot that was chosen, and that nobody had looked through yet."""
        self._report_damage(arena, event)
        before = arena.inspected
        if before is not None:
            unchecked = tuple(f for f in before.unchecked if f.slot != event.slot)
            arena.inspected = before._replace(good=(*before.good, *event.good), unchecked=unchecked)
        message = self._checking.pop(arena.info.rank, None)
        binding = self._binding
        rank = None if binding is None else self._ranks.get((binding.attempt, arena.info.rank))
        if message is not None and rank is not None:
            self._send_choice(rank, message, event.good[0].slot if event.good else -1)

    def _on_chosen(self, message: m.Chosen) -> None:
        if self._binding is None or message.attempt != self._binding.attempt:
            return
        for rank in self._current():
            if rank.restore is None or rank.rounds != message.round:
                continue
            rank.restore = None
            rank.rounds += 1
            self._asked.pop(rank.rank, None)
            away = message.away.get(rank.rank)
            if away is None:
                choice = message.choice
                holder = self._holder(rank.rank, choice.attempt, choice.generation, choice.step)
                if holder is not None and not holder[2]:
                    self._checking[rank.rank] = message
                    self._out.append(Inspect(holder[0].info.id, holder[1]))
                else:
                    self._send_choice(rank, message, -1 if holder is None else holder[1])
                continue
            address, held = away
            key = SaveKey(message.choice.attempt, message.choice.generation, message.choice.step)
            known = tuple(n for n, a in self._arenas.items() if a.info.rank == rank.rank)
            self._fetching[rank.rank] = message
            self._out.append(FetchPeer(message.attempt, rank.rank, key, held.layout, held.blob_bytes, address, known))

    def _send_choice(self, rank: _Rank, message: m.Chosen, slot: int) -> None:
        choice = message.choice
        fields: dict[str, Any] = {
            "source": choice.source.value,
            "step": choice.step,
            "attempt": choice.attempt,
            "slot": slot,
            "path": choice.path,
            "skip_batches": [list(s) for s in message.skip_batches],
            "rejected": [[r.path or r.tier.value, r.step, r.why] for r in choice.refused],
            "why": choice.why,
        }
        if slot >= 0:
            # The rank has not stepped yet, so that it does not know the structure that its state had.
            own = [a for a in self._arenas.values() if a.info.rank == rank.rank]
            holder = self._holder(rank.rank, choice.attempt, choice.generation, choice.step)
            arena = holder[0] if holder is not None else max(own, key=lambda a: a.info.id, default=None)
            fields["layout"] = arena.info.layout.to_json() if arena is not None else None
        self._out.append(SendRank(rank.connection, "choice", fields))

    def _holder(self, rank: int, attempt: int, generation: int, step: int) -> tuple[_ArenaState, int, bool] | None:
        """The memory and the slot of that snapshot, and whether it was compared with its checksums."""
        key = SaveKey(attempt, generation, step)
        for arena in self._arenas.values():
            if arena.info.rank == rank and arena.inspected is not None:
                for found in (*arena.inspected.good, *arena.inspected.unchecked):
                    if found.key == key:
                        return arena, found.slot, found in arena.inspected.good
        return None

    # -- flushing and leaving ------------------------------------------------------------------------------------------
    def _flush(self, name: str, attempt: int, waits: bool, limit_s: float, now_s: float, saves: bool = False) -> None:
        told = m.FlushTold(name, attempt, waits, limit_s, saves)
        self._flushes[name] = (told, now_s + limit_s + 1.0)  # the coordinator answers in time, if it is there
        self._post(told)

    def _on_flushed(self, message: m.Flushed) -> None:
        if self._flushes.pop(message.id, None) is not None:
            self._answer_flush(message.id, message.step, message.why)

    def _answer_flush(self, name: str, step: int | None, why: str) -> None:
        node, _, rest = name.rpartition(f"{self._node}/")
        assert not node
        if rest in (_AGENT, _AGENT_SAVE):
            self._out.append(AnswerAgent("flushed" if rest == _AGENT else "saved", {"step": step, "why": why}))
            return
        attempt, _, number = rest.partition("/")
        rank = self._ranks.get((int(attempt), int(number)))
        if rank is not None:
            self._out.append(SendRank(rank.connection, "flushed", {"step": step, "why": why}))

    def _on_orphaned(self, now_s: float) -> None:
        """The agent is gone, and with it the ranks: what is whole in memory is brought to disk, then this ends."""
        if self._leave_s is not None:
            return
        self._leave_s = now_s + self._limits.orphan
        attempt = self._binding.attempt if self._binding is not None else -1
        self._flush(f"{self._node}/{_AGENT}", attempt, False, self._limits.orphan - 2.0, now_s)

    def _look_at_clock(self, event: NodeEvent, now_s: float) -> None:
        for name, (_, until_s) in list(self._flushes.items()):
            if now_s >= until_s:
                del self._flushes[name]
                step = None if self.last_durable is None else self.last_durable.key.step
                self._answer_flush(name, step, "the saver of the first node has not answered")
        if self._has_other_nodes and self._is_waiting:
            if now_s >= self._beat_s + self._limits.beat and self._is_bound and self._binding is not None:
                self._beat_s = now_s
                self._out.append(Post(m.BeatTold(self._binding.attempt, self._binding.group_rank)))
            if self._is_bound and now_s >= self._heard_s + self._limits.silence:
                why = f"the saver of the first node has not been heard of for {self._limits.silence:.0f} s"
                self._give_up(why, (p.key for p in self._pieces.values() if p.is_in_memory and p.tiers & _FOLDER_TIERS))
        is_cut_off = not self._is_bound and bool(self._pieces) and self._binding is not None
        if is_cut_off and now_s >= self._unbound_s + self._limits.unbound:
            why = f"the savers of the other nodes could not be reached for {self._limits.unbound:.0f} s"
            self._give_up(why, (p.key for p in self._pieces.values()))
        late = [
            p.key for p in self._pieces.values() if not p.is_in_memory and now_s >= p.since_s + self._limits.gathering
        ]
        if late:
            self._give_up("the saver of the first node has not said what becomes of it", late)
        if self._leave_s is not None:
            is_done = isinstance(event, Tick) and not event.is_coordinator_busy and not self._flushes
            is_done = is_done and not any(p.tiers & _FOLDER_TIERS for p in self._pieces.values())
            if is_done or now_s >= self._leave_s:
                self._is_ended = True
                self._out.append(End())

    def _give_up(self, why: str, keys: Iterable[SaveKey]) -> None:
        """Without the coordinator: for this node alone."""
        for key in sorted(set(keys)):
            self._resolve(m.Resolved(key, SaveState.FAILED, why, "coordinator_silent"))
            self._out.append(Report("checkpoint_failed", {"step": key.step, "attempt": key.attempt, "why": why}))

    # -- attempts ------------------------------------------------------------------------------------------------------
    def _on_attempt(self, binding: Binding, now_s: float) -> None:
        is_same = self._binding is not None and self._binding.attempt == binding.attempt
        self._binding = binding
        self._ranks_of.pop(binding.attempt, None)
        self._ranks_of[binding.attempt] = binding.ranks
        if not is_same:
            self._granted = None
            self._refusals.clear()
            self._gone.clear()
            self._started.clear()
            self._agrees.clear()
            self._asked.clear()
            self._step_told = -1
            self._local, self._is_listing_local, self._partner = None, False, None
            self._fetching.clear()
            self._checking.clear()
        self._is_bound, self._unbound_s, self._call = False, now_s, ""
        self._out.append(Bind(binding))
        self._serve_peers()
        for arena in self._arenas.values():
            # While the ranks start: they find the result when they ask.
            if arena.info.rank in binding.ranks and arena.info.world_size == binding.world_size:
                arena.inspected = None
                self._inspect(arena)
        for rank in self._current():
            self._ask(rank)

    def _on_bound(self, event: ExchangeBound, now_s: float) -> None:
        if self._binding is None or event.attempt != self._binding.attempt:
            return
        self._is_bound, self._heard_s = True, now_s
        self._republish()

    def _republish(self) -> None:
        """Everything that is not resolved, for a coordinator that may know nothing."""
        binding = self._binding
        assert binding is not None
        if self._failed is not None:
            self._post(
                m.FailedTold(self._failed.attempt, self._failed.step, self._failed.signature, self._failed.falls_back)
            )
        for resolved in self._resolved.values():
            self._post(m.ResolvedTold(resolved))
        told: set[tuple[int, int]] = set()
        for piece in self._pieces.values():
            if (piece.key.attempt, piece.arena) not in told:
                told.add((piece.key.attempt, piece.arena))
                self._post_layout(piece.key.attempt, self._arenas[piece.arena].info, "")
            self._post_staged(piece)
            if piece.vote is not None:
                self._post(piece.vote)
        for rank in self._current():
            if rank.arena is not None and (rank.attempt, rank.arena) not in told:
                self._post_layout(rank.attempt, self._arenas[rank.arena].info, "")
            elif rank.refusal and rank.rank in self._refusals:
                self._post_refusal(rank.attempt, *self._refusals[rank.rank])
        self._post_peer()
        for rank_number in sorted(self._gone):
            self._post(m.RankGoneTold(binding.attempt, rank_number))
        for agree in self._agrees.values():
            self._post(m.AgreeTold(agree.attempt, agree.rank, agree.key, agree.value))
        for asked in self._asked.values():
            self._post(asked)
        for flush, _ in self._flushes.values():
            self._post(flush)
        for rank_number in sorted(self._started):
            self._post(m.StartedTold(binding.attempt, rank_number, -1))
        self._post(m.RepublishedTold(binding.attempt, binding.group_rank, binding.ranks, self._call))


def rejections(raw: Sequence[Any]) -> tuple[Rejected, ...]:
    """What a rank could not load, as it says so: [source, step, why] each; what is not of that form is left out."""
    return tuple(
        Rejected(str(item[0]), item[1], str(item[2]))
        for item in raw
        if isinstance(item, (list, tuple)) and len(item) >= 3 and isinstance(item[1], int)
    )
