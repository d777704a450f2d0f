"""Wrong bytes: this node's part in finding them, and for the leading node all that follows.

Each agent reads the roots of its ranks from shared memory and hands digests to the leader through the control store,
out of the way of training: no collective, no rank waits for it, and who says nothing is not judged. Where digests
differ, or something changed at rest, the leader asks the few ranks that it takes for roots, leaves and bytes
(``inquiry``), and tells: a line, records in the journal, an incident with its report. Where the job may be touched, it
goes back to the newest checkpoint that is known to be right.
"""

from __future__ import annotations

import base64
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final

import structlog

from steadyrun.checkpoint.commit import mark_verified
from steadyrun.checkpoint.manifest import AGREED_ROOTS, Verified
from steadyrun.checkpoint.rollback import RollbackError, data_step, skipped
from steadyrun.checkpoint.savedbytes import saved_pieces
from steadyrun.collectors.evidence import ask as ask_socket
from steadyrun.core.board import SlotView
from steadyrun.core.classes import FaultClass, Mode
from steadyrun.core.clock import Clock
from steadyrun.core.errors import SteadyrunError
from steadyrun.core.guards import WHAT, Signal
from steadyrun.core.integrity import MOMENTS, IntegrityWords
from steadyrun.core.records import Finding, RankEvidence, to_json
from steadyrun.detect.sdc import Cause
from steadyrun.detect.sdc.comparing import Compared, Comparison, Resting
from steadyrun.detect.sdc.safe import SafeSteps
from steadyrun.detect.sdc.spikes import AHEAD_STEPS, Spike, SpikeWatch
from steadyrun.integrity.coefficients import LEAF_BYTES
from steadyrun.node.control import AnswerTold, AskTold, ControlChannel, RootsTold
from steadyrun.node.inquiry import SAVED, Ask, Diverged, Found, Inquiry, inquire, inquire_at_rest
from steadyrun.node.rankroots import RankRoots
from steadyrun.node.replays import NodeReplays, found_of, pack, unpack
from steadyrun.node.reporting import Desk, RankPlace
from steadyrun.node.rootswire import RankIntegrity, RootsFacts, RootsInbox, RootsOutbox, Told, pack_roots

__all__ = ["CORRUPTION", "Case", "Integrity"]

log = structlog.get_logger()

CORRUPTION: Final = "corruption"  # the trigger of a stop
SEND_S: Final = 1.0
CHECKS_S: Final = 30.0  # a record of what the checks cost
COMPARED_S: Final = 5.0  # a record of what agreed
SOCKET_S: Final = 2.0
ORDER_S: Final = 4.0  # until an order has reached all nodes
ORDER_HERE_S: Final = 1.0
CAPTURE_LOOK_S: Final = 0.1
MOST_WAIT_S: Final = 120.0
MOST_ANSWER_BYTES: Final = 600_000  # of a value of the store
MOST_IN_VAIN: Final = 3  # inquiries into one group that find nothing
MOST_REPORTS: Final = 20  # of a run
MOST_SIGNALS: Final = 200  # records of an attempt
QUIET_STEPS: Final = 100  # without a signal, after which the next one is told again
MOST_AHEAD: Final = 1000  # steps
COMPARE_S: Final = 20.0  # until a spike or a wrong gradient is one although no check has compared anything since
MOST_REPLAYED: Final = 7  # that a node keeps telling of
_SOCKET_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """What was found, for whoever acts on it.

    Attributes:
        reason: one line.
        to: the step to go back to.
        found_at_s: CLOCK_MONOTONIC when the differing roots were seen.
    """

    attempt: int
    findings: tuple[Finding, ...]
    details: Mapping[str, Any]
    reason: str
    to: int
    found_at_s: float
    trigger: str = CORRUPTION


@dataclass(frozen=True, slots=True)
class _Held:
    """What a replay has found, until it is known whether the ranks' parameters were equal: wrong ones explain it."""

    found: Found
    since_s: float
    until_s: float


@dataclass(slots=True)
class _Turn:
    """One attempt."""

    attempt: int
    world_size: int
    channel: ControlChannel | None
    is_leader: bool
    comparison: Comparison
    inquiry: Inquiry | None = None
    inquiry_of: str = ""
    keys: tuple[int, ...] = ()  # of the groups that the inquiry is about
    began_s: float = 0.0
    ask_id: int = 0
    case: Case | None = None
    in_vain: dict[int, int] = field(default_factory=dict)
    at_rest: dict[int, tuple[str, ...]] = field(default_factory=dict)
    compared: int = 0
    agreed: int = 0
    newest: int | None = None
    most_ranks: int = 0
    signals: dict[int, int] = field(default_factory=dict)  # heard of so far, by rank
    signals_recorded: int = 0
    signal_step: int | None = None  # of the newest
    check_at: int = -1  # the newest step for which all ranks were told to check
    spike: Spike | None = None
    spike_until_s: float = inf
    is_curing: bool = False
    is_told: bool = True
    is_ending: bool = False  # nobody answers any more
    is_settled: bool = False  # the case is in other hands, or reported
    replayed: set[tuple[int, ...]] = field(default_factory=set)  # ranks that replays have found, heard of
    held: _Held | None = None


class Integrity:
    """For the loop's thread; nothing here blocks. The leader is group rank 0.

    Args:
        record: writes a journal record: type, then fields.
        post: runs something in the loop, from any thread.
        act: called with a case on which the job is to be stopped, never in observe mode; False: it cannot be.
        order: tells this node's ranks to check after a step.
        replan: restarts the ranks, for the reason given, so that they begin where ``rollback`` says; None: a loss
            spike is only reported.
    """

    def __init__(
        self,
        node: str,
        clock: Clock,
        desk: Desk,
        record: Callable[..., None],
        say: Callable[[str], None],
        in_thread: Callable[[str, Callable[[], None]], None],
        post: Callable[[Callable[[], None]], None],
        mode: Mode,
        act: Callable[[Case], bool],
        order: Callable[[int], None] = lambda step: None,
        replan: Callable[[str], None] | None = None,
    ) -> None:
        self._node, self._clock, self._desk = node, clock, desk
        self._record, self._say = record, say
        self._in_thread, self._post, self._mode, self._act = in_thread, post, mode, act
        self._order, self._replan = order, replan
        self._spikes = SpikeWatch()
        self._turn: _Turn | None = None
        self._ranks: dict[int, RankRoots] = {}
        self._places: dict[int, RankPlace] = {}
        self._words: dict[int, IntegrityWords] = {}
        self._steps: dict[int, int] = {}
        self._trained_s: dict[int, float] = {}  # by rank: from its first step to its newest
        self._cost_line = ""
        self._replays = NodeReplays()
        self._replayed: tuple[Mapping[str, Any], ...] = ()  # what they have found here
        self._outbox, self._inbox = RootsOutbox(), RootsInbox()
        self._untold: list[Told] = []
        self._facts = RootsFacts(node)
        self._facts_bytes = b""
        self._nodes: dict[int, RootsFacts] = {}  # by group rank
        self._known: dict[int, tuple[str, RankIntegrity]] = {}  # by rank: its node, and what that says of it
        self._safe = SafeSteps()
        self._rollback: dict[str, Any] | None = None
        self._reports = 0
        self._has_acted_unproven = False
        self._heard_ask = 0
        self._next_send_s = self._next_checks_s = self._next_compared_s = -inf
        self._notes: deque[str] = deque(maxlen=64)

    # -- attempts ------------------------------------------------------------------------------------------------------
    def begin_attempt(self, attempt: int, world_size: int, channel: ControlChannel | None) -> None:
        """Ranks of an attempt are being started. *channel* None: this node is alone."""
        self.end_attempt()
        is_leader = channel is None or channel.is_leader
        self._turn = _Turn(attempt, world_size, channel, is_leader, Comparison())
        self._outbox, self._inbox, self._untold = RootsOutbox(), RootsInbox(), []
        self._facts, self._facts_bytes = RootsFacts(self._node), b""
        self._replays, self._replayed = NodeReplays(), ()
        self._nodes.clear()
        self._known.clear()
        self._heard_ask = 0
        self._spikes.begin_attempt()
        now_s = self._clock.now_s()
        self._next_send_s = -inf
        self._next_checks_s, self._next_compared_s = now_s + CHECKS_S, now_s + COMPARED_S
        if channel is not None and channel.group_world_size > 1:
            channel.expect_roots(attempt, SEND_S)

    def end_attempt(self) -> None:
        """Its ranks are gone, or about to: say what is left to say."""
        turn, self._turn = self._turn, None
        if turn is not None:
            if turn.is_leader:
                self._end(turn)
                self._record_compared(turn)
            if any(r.checks for r in self._ranks.values()):
                self._record_checks()
                self._cost_line = self._cost_words()
        for rank in self._ranks.values():
            rank.close()
        self._ranks.clear()
        self._places.clear()
        self._words.clear()
        self._steps.clear()
        self._trained_s.clear()

    def close(self) -> None:
        """The run is over."""
        self.end_attempt()
        if self._cost_line:
            self._say(f"steadyrun: {self._cost_line}")

    # -- what the loop tells -------------------------------------------------------------------------------------------
    def sample(
        self,
        now_s: float,
        places: Iterable[RankPlace],
        words: Mapping[int, IntegrityWords],
        views: Mapping[int, SlotView | None],
    ) -> None:
        """Look at this node's ranks; called with the board, every half second.

        Args:
            words: by rank; only of ranks whose slot is their own.
        """
        turn = self._turn
        if turn is None:
            return
        for place in places:
            here = words.get(place.rank)
            if here is None:
                continue
            self._look(place, here, now_s)
            view = views.get(place.rank)
            if view is not None and view.step is not None:
                self._steps[place.rank] = view.step
            if view is not None and view.step_at_s is not None and view.first_step_s is not None:
                self._trained_s[place.rank] = view.step_at_s - view.first_step_s
        self._look_at_replays(turn, now_s)
        self._look_at_facts(turn)
        if turn.is_leader:
            untold, self._untold = self._untold, []
            self._add(turn, untold, now_s)
            self._judge(turn, now_s)
            self._judge_spike(turn, now_s)
            if now_s >= self._next_compared_s:
                self._next_compared_s = now_s + COMPARED_S
                self._record_compared(turn)
        elif turn.channel is not None and now_s >= self._next_send_s and (self._untold or not turn.is_told):
            self._next_send_s = now_s + SEND_S
            self._outbox.put(self._untold)
            self._untold, turn.is_told = [], True
            turn.channel.tell_roots(turn.attempt, self._outbox.message(self._facts_bytes))
        if now_s >= self._next_checks_s:
            self._next_checks_s = now_s + CHECKS_S
            if any(r.checks for r in self._ranks.values()):
                self._record_checks()

    def hear(self, message: RootsTold | AskTold | AnswerTold) -> None:
        """What another node told."""
        turn = self._turn
        if turn is None or message.attempt != turn.attempt:
            return
        try:
            self._hear(turn, message)
        except (KeyError, TypeError, ValueError) as e:
            log.warning("integrity_message_unreadable", kind=type(message).__name__, error=repr(e))

    def _hear(self, turn: _Turn, message: RootsTold | AskTold | AnswerTold) -> None:
        match message:
            case RootsTold(group_rank=group_rank, payload=payload):
                self._hear_roots(turn, group_rank, payload)
            case AskTold(payload=payload):
                if not turn.is_leader and int(payload.get("id", 0)) > self._heard_ask:
                    self._heard_ask = int(payload["id"])
                    self._answer(turn, payload)
            case AnswerTold(payload=payload):
                if turn.is_leader:
                    self._hear_answers(turn, payload)

    def on_checkpoint(self, type_: str, step: int | None, folder: str) -> None:
        """A record of this node's saver: a checkpoint can be loaded, is durable in *folder*, or is there no more."""
        if type_ == "checkpoint_removed":
            self._safe.removed(folder)
        if type_ == "checkpoint_removed" or not isinstance(step, int):
            return
        self._safe.saved(step, folder if type_ == "checkpoint_committed" else "")
        self._mark_verified()

    def case_of(self, attempt: int) -> Case | None:
        """What was found in an attempt that is being judged; an inquiry under way ends with what it has."""
        turn = self._turn
        if turn is None or turn.attempt != attempt or not turn.is_leader:
            return None
        self._hurry(turn)
        turn.is_settled = turn.case is not None
        return turn.case

    # -- going back ----------------------------------------------------------------------------------------------------
    @property
    def period_s(self) -> float:
        """Between two checks of a rank of this node; ``inf`` where there are none, or nothing is known yet."""
        words = [w for w in self._words.values() if w.interval > 0 and w.step_s > 0]
        return min((w.interval * w.step_s for w in words), default=inf)

    @property
    def rollback(self) -> Mapping[str, Any] | None:
        """What the savers are to go back to, as ``--ft-rollback`` would have it; carried out once per id."""
        return self._rollback

    def go_back(self, case: Case, incident: int, run_id: str) -> None:
        """The next attempt begins at ``case.to``."""
        name = f"corruption-{run_id}-{case.attempt}-{incident}"
        self._rollback = {"to": case.to, "skip_batches": [], "id": name}
        self._safe.went_back(case.to)
        self._record(
            "integrity",
            event="rolled_back",
            to=case.to,
            is_verified=self._safe.is_target_verified(case.to),
            incident=incident,
        )

    def pack(self) -> dict[str, Any]:
        """For the other nodes, and the next leader."""
        return {"rollback": self._rollback}

    def adopt(self, data: Any) -> None:
        """What the job knows, from another node; nonsense changes nothing."""
        told = data.get("rollback") if isinstance(data, Mapping) else None
        if not isinstance(told, Mapping):
            return
        try:
            to, name = int(told["to"]), str(told["id"])
            ranges = [[int(first), int(end)] for first, end in told.get("skip_batches", ())]
        except (KeyError, TypeError, ValueError):
            return
        if self._rollback is None or self._rollback["id"] != name:
            self._rollback = {"to": to, "skip_batches": ranges, "id": name}
            self._safe.went_back(to)

    # -- this node's ranks ---------------------------------------------------------------------------------------------
    def _look(self, place: RankPlace, words: IntegrityWords, now_s: float) -> None:
        known = self._ranks.get(place.rank)
        if known is None or known.pid != place.pid:
            if known is not None:
                known.close()
            known = self._ranks[place.rank] = RankRoots(place.rank, place.pid, place.folder)
            self._places[place.rank] = place
        self._words[place.rank] = words
        self._untold += known.look(words, now_s)
        if words.replay is not None:
            self._replays.look(place.rank, place.pid, place.folder, words.replay, now_s)

    def _look_at_replays(self, turn: _Turn, now_s: float) -> None:
        for found in self._replays.ready(now_s):
            self._replayed = (*self._replayed[-MOST_REPLAYED:], pack(found))
            if turn.is_leader:
                self._on_replayed(turn, self._replayed[-1])

    def _look_at_facts(self, turn: _Turn) -> None:
        groups: dict[int, tuple[int, ...]] = {}
        changed: dict[tuple[int, int], tuple[str, ...]] = {}
        ranks = []
        notes: list[str] = []
        for rank, roots in sorted(self._ranks.items()):
            place, words = self._places[rank], self._words[rank]
            own = roots.groups
            groups.update((key, g.ranks) for key, g in own.items())
            changed.update(((rank, step), names) for step, names in roots.changed.items())
            notes += [n for n in roots.notes if n not in notes]
            ranks.append(
                RankIntegrity(
                    rank, place.local_rank, place.pid, words.state, words.interval, roots.gpu, tuple(sorted(own))
                )
            )
        signals = {rank: words.signals for rank, words in sorted(self._words.items()) if words.signals}
        notes += self._replays.notes
        facts = RootsFacts(self._node, tuple(ranks), groups, changed, tuple(notes[:8]), signals, self._replayed)
        if facts == self._facts:
            return
        self._facts, self._facts_bytes = facts, facts.to_bytes()
        turn.is_told = False
        for note in notes:
            if note not in self._notes:
                self._notes.append(note)
                self._record("integrity", event="note", text=note)
                if note in self._replays.notes and turn.is_leader:
                    self._say(f"steadyrun: {note}")
        if turn.is_leader:
            self._introduce(turn, 0, facts)

    # -- the leader ----------------------------------------------------------------------------------------------------
    def _hear_roots(self, turn: _Turn, group_rank: int, payload: bytes) -> None:
        try:
            records, facts = self._inbox.take(group_rank, payload)
        except ValueError as e:
            log.warning("roots_unreadable", group_rank=group_rank, error=str(e))
            return
        if facts is not None:
            self._introduce(turn, group_rank, facts)
        self._add(turn, records, self._clock.now_s())

    def _introduce(self, turn: _Turn, group_rank: int, facts: RootsFacts) -> None:
        self._nodes[group_rank] = facts
        for rank in facts.ranks:
            self._known[rank.rank] = (facts.node, rank)
        turn.comparison.introduce(facts.groups, [r.rank for r in facts.ranks if r.state == "on"])
        if facts.groups:
            self._safe.has_replicas = True
        for number, signals in facts.signals.items():
            self._on_signals(turn, number, signals)
        if group_rank != 0:
            for told in facts.replayed:
                self._on_replayed(turn, told)

    # -- losses and norms of gradients (leader) ------------------------------------------------------------------------
    def _on_signals(self, turn: _Turn, rank: int, signals: Sequence[Signal]) -> None:
        new = [s for s in signals if s.number >= turn.signals.get(rank, 0)]
        for s in new:
            turn.signals[rank] = s.number + 1
            self._spikes.heard(rank, s)
            if turn.signals_recorded < MOST_SIGNALS:
                turn.signals_recorded += 1
                told = {"rank": rank, "step": s.step, "value": s.value, "usual": s.usual, "z": s.z}
                self._record("integrity", event="out_of_line", what=WHAT[s.what], **told)
            if turn.signal_step is None or s.step >= turn.signal_step + QUIET_STEPS:
                self._say(f"steadyrun: {s.words()} on rank {rank} after step {s.step}: the ranks' bytes are checked")
            turn.signal_step = s.step if turn.signal_step is None else max(turn.signal_step, s.step)
        if new:
            self._order_check(turn, new[-1].step)

    def _order_check(self, turn: _Turn, step: int) -> float:
        """All ranks check after the same step: the first one that none has begun when they hear of it.

        Returns:
            how many seconds it takes them to get there.
        """
        if turn.inquiry is not None or turn.case is not None:
            return 0.0
        newest = max([step, *self._steps.values()])
        is_alone = turn.channel is None or turn.channel.group_world_size == 1
        order_s = ORDER_HERE_S if is_alone else ORDER_S
        step_s = max((w.step_s for w in self._words.values()), default=0.0)
        if newest < turn.check_at:
            return (turn.check_at - newest) * step_s  # that check is to come
        turn.check_at = newest + 2 + (min(int(order_s / step_s), MOST_AHEAD) if step_s > 0 else 0)
        turn.ask_id += 1
        payload = {"id": turn.ask_id, "what": "check", "step": turn.check_at, "ranks": []}
        if turn.channel is not None and not is_alone:
            turn.channel.tell_ask(turn.attempt, payload)
        self._answer(turn, payload)
        return (turn.check_at - newest) * step_s

    def _judge_spike(self, turn: _Turn, now_s: float) -> None:
        if turn.is_ending or turn.case is not None or turn.inquiry is not None:
            return
        if turn.spike is None:
            turn.spike = self._spikes.spike()
            turn.spike_until_s = now_s + COMPARE_S
            if turn.spike is None:
                return
            self._record("integrity", event="spike", first=turn.spike.first, last=turn.spike.last, text=turn.spike.text)
            if self._replan is None:
                self._say(f"steadyrun: loss spike: {turn.spike.text}; training goes on (--ft-loss-spike)")
                return
        has_compared = turn.newest is not None and turn.newest > turn.spike.first
        if self._replan is None or turn.is_curing or not (has_compared or now_s >= turn.spike_until_s):
            return
        turn.is_curing = True
        spike = self._spikes.spike() or turn.spike
        to = self._spikes.target(spike, self._safe.verified_saved())
        if to is None:
            self._say(f"steadyrun: loss spike: {spike.text}; no verified checkpoint to go back to: training goes on")
            return
        if self._mode is Mode.OBSERVE:
            self._say(f"steadyrun: loss spike: {spike.text}; step {to} would be gone back to (mode observe)")
            return
        folder = self._safe.folder_of(to)

        def work() -> None:
            try:
                left_out = skipped(Path(folder).parent, ()) if folder else ()
            except RollbackError as e:
                log.warning("rollbacks_unreadable", error=str(e))
                left_out = ()
            self._post(lambda: self._cure(turn, spike, to, left_out))

        self._in_thread("integrity", work)

    def _cure(self, turn: _Turn, spike: Spike, to: int, left_out: Sequence[tuple[int, int]]) -> None:
        if turn is not self._turn or turn.is_ending or turn.case is not None or self._replan is None:
            return
        first, end = data_step(to + 1, left_out), data_step(spike.last + AHEAD_STEPS, left_out) + 1
        self._spikes.went_back()
        name = f"spike-{turn.attempt}-{spike.first}-{int(self._clock.unix_s())}"
        self._rollback = {"to": to, "skip_batches": [[first, end]], "id": name}
        self._safe.went_back(to)
        self._record("integrity", event="cured", to=to, first_batch=first, end_batch=end, text=spike.text)
        self._replan(f"loss spike: {spike.text}; back to step {to}, batches {first} to {end - 1} are left out")

    def _add(self, turn: _Turn, records: Sequence[Told], now_s: float) -> None:
        for r in records:
            turn.comparison.add(r.rank, r.step, r.moment, r.key, r.digest, now_s)

    def _look_at_moments(self, turn: _Turn, now_s: float) -> None:
        for seen in turn.comparison.ready(inf if turn.is_ending else now_s):
            if isinstance(seen, Resting):
                self._on_resting(turn, seen, now_s)
            else:
                self._on_compared(turn, seen, now_s)
        self._mark_verified()

    def _judge(self, turn: _Turn, now_s: float) -> None:
        self._look_at_moments(turn, now_s)
        while turn.inquiry is not None and turn.inquiry.look(now_s):
            self._go_on(turn, now_s)
        self._judge_replay(turn, now_s)

    def _on_compared(self, turn: _Turn, seen: Compared, now_s: float) -> None:
        turn.compared += 1
        turn.most_ranks = max(turn.most_ranks, seen.ranks)
        turn.newest = seen.step if turn.newest is None else max(turn.newest, seen.step)
        if seen.agreed:
            turn.agreed += 1
            if seen.is_whole and turn.case is None:
                self._safe.agreed(seen.step)
            return
        told = {key: len(set(digests.values())) for key, digests in seen.differing.items()}
        self._record("integrity", event="differing", step=seen.step, moment=seen.moment, groups=len(told))
        if turn.case is not None or turn.inquiry is not None:
            return
        is_alone = turn.channel is None or turn.channel.group_world_size == 1
        order_s = ORDER_HERE_S if is_alone else ORDER_S
        case = Diverged(seen.step, seen.moment, seen.differing, self._last_good(seen.step), turn.at_rest, order_s)
        turn.keys = tuple(seen.differing)
        self._inquire(turn, Inquiry(inquire(case)), "replicas", now_s)

    def _last_good(self, before: int) -> int | None:
        good = self._safe.last_good
        return good if good is not None and good < before else None

    def _on_resting(self, turn: _Turn, seen: Resting, now_s: float) -> None:
        if not seen.changed:
            if seen.is_whole and turn.case is None:
                self._safe.still(seen.step - 1)
            return
        names = {r: self._changed_of(r, seen.step) for r in seen.changed}
        names = {r: own for r, own in names.items() if own}
        if len(seen.changed) > max(len(seen.still), 1):
            # The script does so itself, on all ranks, as when averaged weights are put in for an evaluation.
            self._record("integrity", event="rewritten", step=seen.step, ranks=list(seen.changed))
            return
        turn.at_rest.update(names)
        self._record("integrity", event="at_rest", step=seen.step, ranks=list(seen.changed), tensors=names)
        if turn.case is not None or turn.inquiry is not None or not names:
            return
        turn.keys = ()
        self._inquire(turn, Inquiry(inquire_at_rest(seen.step, names, len(seen.still))), "at rest", now_s)

    def _changed_of(self, rank: int, step: int) -> tuple[str, ...]:
        for facts in self._nodes.values():
            if (rank, step) in facts.changed:
                return facts.changed[rank, step]
        return ()

    def _hurry(self, turn: _Turn) -> None:
        """Judge what there is; nobody is waited for any more, and nobody stopped."""
        now_s = self._clock.now_s()
        turn.is_ending = True
        self._look_at_replays(turn, inf)
        self._look_at_moments(turn, now_s)
        if turn.inquiry is not None:
            turn.inquiry.hurry(now_s)
            self._conclude(turn, now_s)
        self._judge_replay(turn, now_s)

    def _end(self, turn: _Turn) -> None:
        self._hurry(turn)
        if turn.case is not None and not turn.is_settled:
            self._report(turn, turn.case)

    # -- inquiries (leader) --------------------------------------------------------------------------------------------
    def _inquire(self, turn: _Turn, inquiry: Inquiry, of: str, now_s: float) -> None:
        turn.inquiry, turn.inquiry_of, turn.began_s = inquiry, of, now_s
        inquiry.begin(now_s)
        self._go_on(turn, now_s)

    def _go_on(self, turn: _Turn, now_s: float) -> None:
        """Put the next question, or take the answer to the last one."""
        inquiry = turn.inquiry
        assert inquiry is not None
        if inquiry.ask is None:
            self._conclude(turn, now_s)
            return
        turn.ask_id += 1
        payload = _packed(turn.ask_id, inquiry.ask)
        if turn.channel is not None and any(r not in self._ranks for r in inquiry.ask.ranks if r != SAVED):
            turn.channel.tell_ask(turn.attempt, payload)
        self._answer(turn, payload)

    def _hear_answers(self, turn: _Turn, payload: Mapping[str, Any]) -> None:
        answers = payload.get("answers")
        if payload.get("id") != turn.ask_id or turn.inquiry is None or not isinstance(answers, Mapping):
            return
        for rank, answer in answers.items():
            if str(rank).removeprefix("-").isdecimal() and isinstance(answer, Mapping):
                turn.inquiry.hear(int(rank), answer)
        now_s = self._clock.now_s()
        while turn.inquiry is not None and turn.inquiry.look(now_s):
            self._go_on(turn, now_s)

    def _conclude(self, turn: _Turn, now_s: float) -> None:
        inquiry, turn.inquiry = turn.inquiry, None
        assert inquiry is not None
        found = inquiry.found
        assert found is not None
        judgement = found.judgement
        for note in found.notes:
            self._record("integrity", event="note", text=note)
        if judgement.cause is Cause.NONE:
            self._record("integrity", event="in_vain", text=judgement.sentence)
            for key in turn.keys:
                turn.in_vain[key] = turn.in_vain.get(key, 0) + 1
            turn.comparison.mute(k for k, n in turn.in_vain.items() if n >= MOST_IN_VAIN)
            return
        self._settle(turn, found, now_s)

    def _on_replayed(self, turn: _Turn, told: Mapping[str, Any]) -> None:
        """A microbatch gives other gradients when it is computed again; of the same ranks the first one counts.

        A rank with wrong parameters computes other gradients, too. So all compare their bytes first.
        """
        found = found_of(unpack(told))
        judgement = found.judgement
        if judgement.ranks in turn.replayed:
            return
        turn.replayed.add(judgement.ranks)
        step = judgement.first_bad_step
        assert step is not None
        self._record("integrity", event="replay_differed", step=step, ranks=list(judgement.ranks))
        if turn.case is None and turn.held is None:
            now_s = self._clock.now_s()
            turn.held = _Held(found, now_s, now_s + COMPARE_S + 2 * self._order_check(turn, step))

    def _judge_replay(self, turn: _Turn, now_s: float) -> None:
        held = turn.held
        if held is None or turn.inquiry is not None:
            return
        step = held.found.judgement.first_bad_step
        assert step is not None
        has_compared = turn.newest is not None and turn.newest >= step
        if turn.case is None and not (has_compared or turn.is_ending or now_s >= held.until_s):
            return
        turn.held = None
        if turn.case is None:
            turn.began_s, turn.keys = held.since_s, ()
            self._settle(turn, held.found, now_s)

    def _settle(self, turn: _Turn, found: Found, now_s: float) -> None:
        """Tell what was found, and have it acted on."""
        judgement = found.judgement
        case = self._case(turn, found)
        details = case.details["sdc"]
        self._record("integrity", event="found", took_s=round(now_s - turn.began_s, 3), **details)
        turn.comparison.mute(turn.keys)
        if judgement.cause is Cause.SOFTWARE or not self._may_act(found):
            self._report(turn, case)
            return
        turn.case = case
        if turn.is_ending:
            return
        if self._mode is Mode.OBSERVE:
            self._report(turn, case)
            turn.is_settled = True
        else:
            turn.is_settled = self._act(case)  # else it waits for whoever judges what stops the ranks now

    def _may_act(self, found: Found) -> bool:
        """Replicas that have never agreed may differ on purpose: one restart is all that they are worth."""
        judgement = found.judgement
        if judgement.last_good_step is not None:
            return True
        if judgement.cause is Cause.UNDECIDED or self._has_acted_unproven:
            return False
        self._has_acted_unproven = True
        return True

    def _case(self, turn: _Turn, found: Found) -> Case:
        j = found.judgement
        assert j.first_bad_step is not None
        is_device = j.cause is Cause.DEVICE
        # What changed at rest after a step may be in the checkpoint of that step, which is copied once roots are made.
        first_bad = j.first_bad_step - 1 if found.moment == "before_step" else j.first_bad_step
        since = first_bad if found.since is None else found.since
        notes = found.notes
        if since < first_bad and not self._safe.has_saved_before(since) and self._safe.has_saved_before(first_bad):
            notes += (f"no checkpoint from before step {since} is left; a later one may hold wrong gradients, too",)
            since = first_bad
        to = self._safe.target(since)
        nodes = tuple(dict.fromkeys(self._known[r][0] for r in j.ranks if r in self._known)) if is_device else ()
        gpus = tuple(g for r in j.ranks if r in self._known and (g := self._known[r][1].gpu)) if is_device else ()
        places = [f"rank {s.rank}: {s.words()}" for s in found.spots]
        summary = j.sentence + (f"; {found.spots[0].words()}" if found.spots and found.spots[0].elements else "")
        finding = Finding(
            FaultClass.SILENT_CORRUPTION,
            j.ranks,
            summary,
            j.confidence,
            nodes=nodes,
            gpus=gpus,
            evidence=(*places, *notes),
        )
        details = {
            "sdc": {
                "cause": j.cause.value,
                "ranks": list(j.ranks),
                "nodes": list(nodes),
                "gpus": list(gpus),
                "tensors": list(j.names[:64]),
                "places": [to_json(s) for s in found.spots],
                "moment": found.moment,
                "first_bad_step": j.first_bad_step,
                "last_good_step": j.last_good_step,
                "witness": j.witness,
                "confidence": j.confidence,
                "sentence": j.sentence,
                "back_to": to,
                "back_to_is_verified": self._safe.is_target_verified(to),
                "notes": list(notes),
            }
        }
        return Case(turn.attempt, (finding,), details, summary, to, turn.began_s)

    def _report(self, turn: _Turn, case: Case) -> None:
        """An incident for which nobody is stopped."""
        self._say(f"steadyrun: wrong bytes: {case.reason}")
        if self._reports >= MOST_REPORTS:
            return
        self._reports += 1
        number = self._desk.next_number()
        payload = {
            "reason": case.reason,
            "trigger": CORRUPTION,
            "detected_at_unix_s": self._clock.unix_s(),
            "delay_s": self._clock.now_s() - case.found_at_s,
        }
        incident = self._desk.open(number, turn.attempt, payload)
        verdict, problem = self._desk.report(
            incident, case.findings, self._evidence_of(turn, case), turn.world_size, case.details
        )
        if problem:
            self._say(f"steadyrun: incident {number} cannot be looked up later: {incident.folder}: {problem}")
        self._record("incident", number=number, verdict=verdict)
        for note in verdict.details.get("notes", ()):
            self._say(f"steadyrun: {note}")

    def _evidence_of(self, turn: _Turn, case: Case) -> list[RankEvidence]:
        out = []
        for rank in sorted({r for f in case.findings for r in f.ranks}):
            if rank in self._known:
                node, known = self._known[rank]
                out.append(
                    RankEvidence(rank, known.local_rank, node, known.pid, turn.attempt, attached=True, gpu=known.gpu)
                )
        return out

    def _mark_verified(self) -> None:
        for step, folder in self._safe.take_verified().items():
            self._record("integrity", event="verified", step=step, path=folder)
            verified = Verified(self._clock.unix_s(), "replicas")
            world_size = self._turn.world_size if self._turn is not None else 0
            roots = next((known for r in self._ranks.values() if (known := r.agreed_at(step, world_size))), {})
            details = {AGREED_ROOTS: roots} if roots and self._safe.has_replicas else {}
            self._in_thread("verified", partial(_mark, Path(folder), verified, details))

    # -- answering (every node) ----------------------------------------------------------------------------------------
    def _answer(self, turn: _Turn, payload: Mapping[str, Any]) -> None:
        asked = [int(r) for r in payload.get("ranks", ()) if int(r) in self._ranks]
        what, number = str(payload.get("what", "")), int(payload.get("id", 0))
        if what == "saved" and turn.is_leader:
            folder = self._safe.newest_folder()
            self._in_thread("integrity", lambda: self._answer_later(turn, number, {SAVED: _saved(folder, payload)}))
        if what == "check":
            self._order(int(payload["step"]))
        if not asked:
            return
        if what == "roots":
            step, moment, key = int(payload["step"]), str(payload["moment"]), int(payload["key"])
            answers = {r: self._ranks[r].roots_of(step, moment, key) for r in asked}
            self._tell_answers(turn, number, answers)
        elif what == "newest":
            answers = {r: {"step": self._steps[r], "step_s": self._words[r].step_s} for r in asked if r in self._steps}
            self._tell_answers(turn, number, answers)
        elif what in ("leaves", "capture"):
            sockets = {r: self._places[r].folder / "evidence.sock" for r in asked}
            limit_s = min(max(float(payload.get("limit_s", SOCKET_S)) - SEND_S, SEND_S), MOST_WAIT_S)

            def work() -> None:
                get = _leaves if what == "leaves" else _capture
                self._answer_later(turn, number, {r: get(path, payload, limit_s) for r, path in sockets.items()})

            self._in_thread("integrity", work)

    def _answer_later(self, turn: _Turn, number: int, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """From a worker thread."""
        self._post(lambda: self._tell_answers(turn, number, answers))

    def _tell_answers(self, turn: _Turn, number: int, answers: Mapping[int, Mapping[str, Any]]) -> None:
        if turn is not self._turn:
            return
        payload = {"id": number, "answers": {str(r): a for r, a in answers.items()}}
        if turn.is_leader:
            self._hear_answers(turn, payload)
        elif turn.channel is not None:
            turn.channel.tell_answer(turn.attempt, payload, MOST_ANSWER_BYTES)

    # -- records -------------------------------------------------------------------------------------------------------
    def _record_compared(self, turn: _Turn) -> None:
        if turn.compared:
            self._record(
                "integrity",
                event="compared",
                checks=turn.compared,
                agreed=turn.agreed,
                newest_step=turn.newest,
                last_good=self._safe.last_good,
                ranks=turn.most_ranks,
            )
            turn.compared = turn.agreed = 0

    def _record_checks(self) -> None:
        ranks: dict[str, dict[str, Any]] = {
            str(rank): {
                "state": self._words[rank].state,
                "checks": roots.checks,
                "lost": roots.lost,
                "interval": self._words[rank].interval,
                "cost_s": round(self._words[rank].cost_s, 6),
                "step_s": round(self._words[rank].step_s, 6),
                "trained_s": round(self._trained_s.get(rank, 0.0), 3),
                "tensors": roots.tensors,
                "size_bytes": roots.size_bytes,
            }
            for rank, roots in sorted(self._ranks.items())
        }
        for rank in self._ranks:
            replay = self._replays.to_record(rank)
            if replay is not None:
                ranks[str(rank)]["replay"] = replay
        self._record("integrity", event="checks", ranks=ranks)

    def _cost_words(self) -> str:
        """What checks took of the training of the attempt, on the rank of this node that they took most of."""
        replay_s = {rank: words.cost_s for rank, words in self._replays.words.items()}
        shares = {
            rank: (self._words[rank].cost_s + replay_s.get(rank, 0.0)) / trained_s
            for rank, trained_s in self._trained_s.items()
            if trained_s > 0 and self._ranks[rank].checks
        }
        if not shares:
            return ""
        rank = max(shares, key=shares.__getitem__)
        roots = self._ranks[rank]
        each_ms = 1000 * self._words[rank].cost_s / roots.checks
        size = f"{roots.tensors} tensors, {roots.size_bytes / 2**20:.1f} MiB"
        replays = self._replays.cost_words(rank, self._trained_s[rank])
        return (
            f"checks of bytes took {100 * shares[rank]:.3f} % of training on rank {rank} "
            f"({roots.checks} checks of {size}, {each_ms:.2f} ms each; --ft-sdc){replays}"
        )


def _packed(number: int, ask: Ask) -> dict[str, Any]:
    return {"id": number, "what": ask.what, "ranks": list(ask.ranks), "limit_s": ask.limit_s, **ask.fields}


def _mark(folder: Path, verified: Verified, details: Mapping[str, Any]) -> None:
    """In a worker thread. One that was removed meanwhile, or cannot be written, stays without the mark."""
    try:
        mark_verified(folder, verified, details)
    except (SteadyrunError, OSError) as e:
        log.info("checkpoint_not_marked", folder=str(folder), error=str(e))


def _saved(folder: str, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Pieces of a tensor as the newest verified checkpoint holds them. In a worker thread."""
    tensor, leaves = str(payload["tensor"]), [int(leaf) for leaf in payload["leaves"]]
    try:
        pieces = [(leaf * LEAF_BYTES, LEAF_BYTES) for leaf in leaves]
        found = saved_pieces(Path(folder), tensor, int(payload["size_bytes"]), pieces) if folder else []
    except (SteadyrunError, OSError) as e:
        return {"error": str(e)}
    packed = [base64.b64encode(data).decode() for data in found]
    return {"captures": [{"tensor": tensor, "leaf": n, "bytes": data} for n, data in zip(leaves, packed, strict=False)]}


# -- questions to ranks (worker threads) -------------------------------------------------------------------------------
def _leaves(path: Path, payload: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """What a rank says of the leaves of some tensors at some checks."""
    until_s = time.monotonic() + limit_s
    places = []
    for tensor, step, moment in payload.get("places", ()):
        left_s = until_s - time.monotonic()
        if left_s <= 0 or moment not in MOMENTS:
            break
        request = {"cmd": "leaves", "tensor": tensor, "step": step, "moment": moment}
        answer, why = ask_socket(path, request, min(left_s, SOCKET_S), _SOCKET_BYTES)
        place = {"tensor": tensor, "step": step, "moment": moment}
        try:
            if answer is None or "error" in answer:
                raise ValueError(why if answer is None else str(answer["error"]))
            leaves = pack_roots([int(text, 16) for text in answer["leaves"]])
            place.update(
                leaves=leaves,
                size_bytes=answer["size_bytes"],
                element_bytes=answer["element_bytes"],
                dtype=answer["dtype"],
            )
        except (KeyError, TypeError, ValueError, OverflowError) as e:
            place["error"] = str(e)
        places.append(place)
    return {"places": places}


def _capture(path: Path, payload: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """The bytes of some leaves after a step that is to come."""
    until_s = time.monotonic() + limit_s
    step, leaves = payload.get("step"), payload.get("leaves")
    order = {"cmd": "capture", "tensor": payload.get("tensor"), "leaves": leaves, "step": step}
    answer, why = ask_socket(path, order, min(limit_s, SOCKET_S))
    if answer is None or "error" in answer:
        return {"error": why if answer is None else str(answer["error"])}
    while time.monotonic() < until_s:
        answer, why = ask_socket(path, {"cmd": "captured"}, SOCKET_S, _SOCKET_BYTES)
        captures = answer.get("captures") if answer is not None else None
        if isinstance(captures, list):
            wanted = [c for c in captures if isinstance(c, dict) and c.get("step") == step]
            if wanted:
                return {"captures": wanted}
        time.sleep(CAPTURE_LOOK_S)
    return {"error": why or f"step {step} did not come in time"}
