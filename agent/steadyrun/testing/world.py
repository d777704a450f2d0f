"""A whole job on a fake clock: several node machines, a control channel between them, and ranks that train and break.

Nothing sleeps and nothing runs but a heap of due things, so an hour of a job takes milliseconds. The same seed gives
the same run. Ranks train in step with each other: each works for a while, then waits until all have come; faults are
ordered by rank and step, or by node and time.

    world = World(nodes=2, ranks_per_node=2, limits=LIMITS, faults=[Fault("kill", rank=1, step=5)], seed=7)
    world.run()
    assert world.exit_classes() == [ExitClass.OK, ExitClass.OK]
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Final

from typing_extensions import assert_never

from steadyrun.core.board import OpenSection, SlotView
from steadyrun.core.classes import Action, ExitClass, Mode
from steadyrun.core.records import Suspicion
from steadyrun.node.machine import events as ev
from steadyrun.node.machine.events import Decision, Limits, NodePhase, RankPhase, RankSlot
from steadyrun.node.machine.node import NodeMachine

__all__ = [
    "FAULT_KINDS",
    "Doing",
    "Fault",
    "GatherMade",
    "Incident",
    "KillMade",
    "Script",
    "SimRank",
    "World",
    "restart_while",
]

RANK_FAULTS: Final = (
    "kill",  # dies of SIGKILL
    "exit",  # exits with 1
    "hang",  # sits in its own work for ever
    "hang_section",  # the same in a section that the script has opened
    "skip_collective",  # waits in another collective than everybody else
    "busy",  # spins in one call
    "stop",  # SIGSTOP
    "uninterruptible",  # state D; survives SIGKILL
    "never_report",  # starts and never attaches
    "teardown_hang",  # is done and does not end
    "ignore_sigterm",  # no fault by itself
    "slow_evaluation",  # legitimate: one rank evaluates, the others wait
    "slow_checkpoint",  # legitimate: one rank saves, the others wait
    "slow_compile",  # legitimate: a long first step
)
NODE_FAULTS: Final = (
    "agent_lost",  # the agent dies, and its ranks with it
    "agent_stopped",  # SIGSTOP of the agent for ``for_s``
    "channel_cut",  # the node cannot reach the control store any more
    "channel_slow",  # each of its messages takes up to ``for_s``
    "evidence_stuck",  # collecting evidence never ends
    "sigterm",  # SIGTERM to the launcher
    "sigint",
)
FAULT_KINDS: Final = RANK_FAULTS + NODE_FAULTS


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, once: a rank's at *step*, a node's at *at_s*.

    Attributes:
        for_s: how long, where that makes sense.
        attempt: only in this attempt; None: in the first one that gets there.
        node: None with ``sigterm`` and ``sigint``: all nodes.
    """

    kind: str
    rank: int | None = None
    step: int = 0
    node: int | None = None
    at_s: float = 0.0
    for_s: float = 0.0
    attempt: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS:
            raise ValueError(f"unknown fault {self.kind!r}; known are {', '.join(FAULT_KINDS)}")


@dataclass(frozen=True, slots=True)
class Script:
    """What every rank does.

    Attributes:
        steps: optimizer steps until it is done.
        own_sections: it opens a section ``step`` itself.
        uses_should_stop: it asks each step, and leaves with 0 when told.
        victims_raise: a rank that waits for a dead one raises (gloo); False: it waits on (NCCL).
        saves_every: steps between checkpoints; a restart goes on from the last one.
        saves_on_sigterm_s: it catches SIGTERM, saves for so long, and leaves; 0: SIGTERM kills it.
    """

    steps: int = 12
    start_s: float = 0.5
    setup_s: float = 2.0
    step_s: float = 1.0
    save_s: float = 0.2
    saves_every: int = 4
    own_sections: bool = False
    uses_should_stop: bool = False
    victims_raise: bool = True
    saves_on_sigterm_s: float = 0.0


class Doing(Enum):
    STARTING = "starting"
    SETUP = "setup"
    WORKING = "working"
    COMPILING = "compiling"
    WAITING = "waiting"
    EVALUATING = "evaluating"
    SAVING = "saving"
    HUNG = "hung"
    BUSY = "busy"
    ENDING = "ending"
    GONE = "gone"


@dataclass(slots=True)
class SimRank:
    """One simulated process; ``token`` changes with each turn of its life, so that planned things become void."""

    rank: int
    node: int
    pid: int
    attempt: int
    doing: Doing = Doing.STARTING
    state: str = "S"
    token: int = 0
    code: int | None = None
    attached_s: float | None = None
    finished_s: float | None = None
    first_step_s: float | None = None
    step_at_s: float | None = None
    last_change_s: float | None = None
    step: int | None = None
    next_step: int = 0
    steps_done: int = 0
    stop_calls: int = 0
    sections: list[OpenSection] = field(default_factory=list)
    ignores_sigterm: bool = False
    unkillable: bool = False
    in_collective: int | None = None
    faults: list[Fault] = field(default_factory=list)

    def view(self) -> SlotView | None:
        """What the board would show."""
        if self.attached_s is None:
            return None
        return SlotView(
            pid=self.pid,
            attempt=self.attempt,
            rank=self.rank,
            attached_s=self.attached_s,
            finished_s=self.finished_s,
            step=self.step,
            step_at_s=self.step_at_s,
            steps_done=self.steps_done,
            step_is_global=True,
            first_step_s=self.first_step_s,
            beats=0,
            beat_at_s=None,
            last_change_s=self.last_change_s,
            stop_calls=self.stop_calls,
            uses_should_stop=self.stop_calls > 0,
            checkpoints_done=0,
            has_exception=False,
            dropped=0,
            sections=tuple(self.sections),
        )


@dataclass(frozen=True, slots=True)
class GatherMade:
    """One collection of evidence, with what it would have seen.

    Attributes:
        exits: rank -> code of the local ranks that were gone.
        doing: rank -> what each local rank really did.
        at_s, done_s: when it was asked for, and when it was complete (``inf``: never).
    """

    node: int
    at_s: float
    done_s: float
    command: ev.Gather
    exits: Mapping[int, int]
    doing: Mapping[int, Doing]
    states: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class KillMade:
    """One SIGTERM, or SIGKILL (``is_hard``), that a machine asked for."""

    at_s: float
    node: int
    attempt: int
    rank: int
    is_hard: bool


@dataclass(frozen=True, slots=True)
class Incident:
    """What a leader knows when it decides."""

    attempt: int
    reason: str
    trigger: str
    gathers: tuple[GatherMade, ...]
    missing_nodes: tuple[int, ...]


Decide = Callable[[Incident], Decision]


def restart_while(budget: int) -> Decide:
    """Restart so many times, then stop."""
    spent = itertools.count()

    def decide(incident: Incident) -> Decision:
        n = incident.attempt
        if next(spent) < budget:
            return Decision(n, Action.RESTART, n + 1, incident.reason)
        exit_class = ExitClass.HANG if incident.trigger in ("hang", "stopped") else ExitClass.DEAD_PROCESS
        return Decision(n, Action.STOP, n, f"budget is spent: {incident.reason}", exit_class=exit_class)

    return decide


@dataclass(slots=True)
class _Epoch:
    """One membership: who is in, and what the control store holds."""

    number: int
    members: list[int]  # node ids, in order of group rank
    stops: dict[int, ev.PeerStop] = field(default_factory=dict)
    evidence: dict[int, dict[int, GatherMade]] = field(default_factory=dict)
    decided: set[int] = field(default_factory=set)
    arrived: dict[int, set[int]] = field(default_factory=dict)
    finished: dict[int, set[int]] = field(default_factory=dict)
    opened: dict[int, list[int]] = field(default_factory=dict)
    stop_at_call: int | None = None


@dataclass(slots=True)
class _Node:
    id: int
    machine: NodeMachine
    epoch: _Epoch | None = None
    has_started: bool = False
    is_lost: bool = False
    left: ev.Leave | None = None
    frozen_until_s: float = -inf
    slow_s: float = 0.0
    is_cut: bool = False
    evidence_stuck: bool = False
    wake: int = 0
    last_delivery_s: float = 0.0

    @property
    def is_here(self) -> bool:
        return self.has_started and not self.is_lost and self.left is None


class World:
    """See the module. All attributes may be read by tests.

    Args:
        late: node -> when its agent starts; the others start at 0.

    Attributes:
        suspects, gathers, stops, kills: what the machines asked for, in order, with the time.
        fired: the faults that have happened, with the time.
    """

    def __init__(
        self,
        nodes: int,
        ranks_per_node: int,
        limits: Limits,
        script: Script | None = None,
        faults: Sequence[Fault] = (),
        seed: int = 0,
        mode: Mode = Mode.ACT,
        decide: Decide | None = None,
        min_nodes: int = 1,
        poll_s: float = 1.0,
        store_host: int = 0,
        late: Mapping[int, float] | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.limits, self.mode = limits, mode
        self.script = script or Script()
        self.decide = decide or restart_while(3)
        self.ranks_per_node, self.min_nodes, self.poll_s, self.store_host = (
            ranks_per_node,
            min_nodes,
            poll_s,
            store_host,
        )
        self._late = dict(late or {})
        self.nodes = [_Node(i, NodeMachine(ranks_per_node, limits, mode)) for i in range(nodes)]
        self.ranks: dict[int, SimRank] = {}
        self.processes: list[SimRank] = []
        self.checkpoint = 0  # the step a restart begins with
        self.pending: list[Fault] = [f for f in faults if f.kind in RANK_FAULTS]
        self.fired: list[tuple[float, Fault]] = []
        self.suspects: list[tuple[float, int, Suspicion, str]] = []
        self.gathers: list[GatherMade] = []
        self.stops: list[tuple[float, int, ev.PublishStop]] = []
        self.kills: list[KillMade] = []
        self.commands: list[tuple[float, int, ev.Command]] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._pids = itertools.count(1000)
        self._epochs = itertools.count()
        self._waiting: list[int] = []
        self._next_attempt = 0
        self._is_closed = False
        self._forming = 0
        self._arrivals: dict[tuple[int, int], set[int]] = {}
        for fault in faults:
            if fault.kind in NODE_FAULTS:
                self._at(fault.at_s, lambda f=fault: self._break_node(f))  # type: ignore[misc]

    # -- running ---------------------------------------------------------------------------------------------------
    def run(self, until_s: float = 1e6) -> World:
        """Until every agent has left or died, or *until_s*; returns itself."""
        for node in self.nodes:
            self._at(self._late.get(node.id, 0.0), lambda n=node: self._start(n))  # type: ignore[misc]
        while self._heap and any(not n.has_started or n.is_here for n in self.nodes):
            if self._heap[0][0] > until_s:
                break
            self.now_s, _, then = heapq.heappop(self._heap)
            then()
        return self

    def _start(self, node: _Node) -> None:
        node.has_started = True
        self._do(node, node.machine.start(self.now_s))
        self._poll(node)

    def exit_classes(self) -> list[ExitClass | None]:
        """Per node; None: it has not left (or its agent was lost)."""
        return [n.left.exit_class if n.left else None for n in self.nodes]

    def story(self) -> str:
        """Everything each machine remembers, for a failed assertion."""
        parts = [f"-- node {n.id}: {n.machine.phase.value}\n" + "\n".join(n.machine.story.lines()) for n in self.nodes]
        return "\n".join([f"faults: {self.fired}", *parts])

    def _at(self, at_s: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(at_s, self.now_s), next(self._order), then))

    def _after(self, delay_s: float, then: Callable[[], None]) -> None:
        self._at(self.now_s + delay_s, then)

    # -- a node's loop -----------------------------------------------------------------------------------------------
    def _poll(self, node: _Node) -> None:
        if node.is_here:
            self._wake(node)
            self._after(self.poll_s, lambda: self._poll(node))

    def _wake(self, node: _Node) -> None:
        """The loop looks at its board and its timers."""
        if not node.is_here or self.now_s < node.frozen_until_s:
            return
        mine = [self.ranks[r] for r in node.machine.ranks if r in self.ranks]
        self._feed(node, ev.BoardRead({p.rank: p.view() if p.code is None else None for p in mine}))
        self._feed(node, ev.StatesRead({p.rank: p.state for p in mine if p.code is None}))
        self._feed(node, ev.Tick())

    def _post(self, node: _Node, delay_s: float, event: ev.Event, epoch: _Epoch | None = None) -> None:
        """Deliver *event* later; one of a control channel only while the node listens to that epoch and is not cut off.

        Deliveries to one node keep their order, as one socket does.
        """
        if epoch is not None:
            delay_s += self.rng.uniform(0.0003, 0.003) + self.rng.uniform(0.0, node.slow_s)
        at_s = max(self.now_s + delay_s, node.last_delivery_s if epoch is not None else 0.0)
        if epoch is not None:
            node.last_delivery_s = at_s

        def deliver() -> None:
            if not node.is_here or (epoch is not None and (node.epoch is not epoch or node.is_cut)):
                return
            if self.now_s < node.frozen_until_s:
                self._at(node.frozen_until_s, deliver)
                return
            self._feed(node, event)

        self._at(at_s, deliver)

    def _feed(self, node: _Node, event: ev.Event) -> None:
        if not node.is_here:
            return
        self._do(node, node.machine.handle(event, self.now_s))
        due_s = node.machine.next_deadline_s()
        node.wake += 1
        if due_s < inf and node.is_here:
            mine = node.wake
            self._at(
                max(due_s, self.now_s + 1e-6, node.frozen_until_s),
                lambda: self._wake(node) if node.wake == mine else None,
            )

    def _do(self, node: _Node, commands: Sequence[ev.Command]) -> None:
        for command in commands:
            if not node.is_here:
                return
            self.commands.append((self.now_s, node.id, command))
            self._carry_out(node, command)

    def _carry_out(self, node: _Node, command: ev.Command) -> None:
        epoch = node.epoch
        match command:
            case ev.Join():
                node.epoch = None
                self._waiting.append(node.id)
                self._try_to_form()
            case ev.Spawn(rank=rank, attempt=attempt):
                self._spawn(node, rank, attempt)
            case ev.Probe(ranks=ranks, window_s=window_s):
                self._probe(node, ranks, window_s)
            case ev.Suspect(suspicion=suspicion, note=note):
                self.suspects.append((self.now_s, node.id, suspicion, note))
            case ev.Alarm():
                pass  # among ``commands``
            case ev.PublishStop():
                self.stops.append((self.now_s, node.id, command))
                if epoch is not None and not node.is_cut:
                    self._after(self._latency_s(node), lambda: self._stop_is_told(epoch, node, command))
            case ev.Gather():
                self._gather(node, command)
            case ev.Terminate(rank=rank):
                self.kills.append(KillMade(self.now_s, node.id, node.machine.attempt, rank, is_hard=False))
                self._terminate(self.ranks[rank])
            case ev.Kill(rank=rank):
                self.kills.append(KillMade(self.now_s, node.id, node.machine.attempt, rank, is_hard=True))
                self._kill(self.ranks[rank])
            case ev.AskToStop():
                if epoch is not None:
                    epoch.stop_at_call = 2 + max((p.stop_calls for p in self.ranks.values()), default=0)
            case ev.Sweep(attempt=attempt):
                stuck = [p for p in self.processes if p.node == node.id and p.code is None and not p.unkillable]
                assert not stuck, f"swept while {stuck} still live"
                self._post(node, 0.05, ev.SweepDone(attempt))
            case ev.Arrive(attempt=attempt):
                if epoch is not None and not node.is_cut:
                    self._count(epoch, epoch.arrived, node, attempt, ev.AllArrived(attempt))
            case ev.Finish(attempt=attempt):
                if epoch is not None and not node.is_cut:
                    self._count(epoch, epoch.finished, node, attempt, ev.AllFinished(attempt))
            case ev.OpenStore(attempt=attempt):
                if epoch is not None and not node.is_cut:
                    self._open_store(epoch, node, attempt)
            case ev.StartStandbys() | ev.DropStandbys():
                pass
            case ev.Leave():
                node.left = command
                self._node_is_gone(node)
            case _:
                assert_never(command)

    # -- the control channel -------------------------------------------------------------------------------------------
    def _latency_s(self, node: _Node) -> float:
        return self.rng.uniform(0.0003, 0.003) + self.rng.uniform(0.0, node.slow_s)

    def _tell(self, epoch: _Epoch, event: ev.Event) -> None:
        for member in epoch.members:
            self._post(self.nodes[member], 0.0, event, epoch)

    def _stop_is_told(self, epoch: _Epoch, node: _Node, command: ev.PublishStop) -> None:
        attempt = command.attempt
        if attempt in epoch.stops:
            return
        origin = epoch.members.index(node.id)
        epoch.stops[attempt] = stop = ev.PeerStop(attempt, command.reason, origin, command.trigger)
        self._tell(epoch, stop)
        if command.trigger == "membership":
            self._decide(epoch, attempt)
        else:
            self._after(self.limits.gather_s + 5.0, lambda: self._decide(epoch, attempt))

    def _decide(self, epoch: _Epoch, attempt: int) -> None:
        leader = self.nodes[epoch.members[0]]
        if attempt in epoch.decided or not leader.is_here or leader.is_cut or leader.epoch is not epoch:
            return
        epoch.decided.add(attempt)
        stop = epoch.stops[attempt]
        if stop.trigger == "membership":
            decision = Decision(attempt, Action.RESTART, attempt + 1, stop.reason, rejoin=True)
        else:
            made = epoch.evidence.get(attempt, {})
            missing = tuple(m for m in epoch.members if m not in made)
            decision = self.decide(Incident(attempt, stop.reason, stop.trigger, tuple(made.values()), missing))
        self._next_attempt = max(self._next_attempt, decision.next_attempt)
        self._tell(epoch, ev.Decided(decision))

    def _count(
        self, epoch: _Epoch, counters: dict[int, set[int]], node: _Node, attempt: int, when_all: ev.Event
    ) -> None:
        counter = counters.setdefault(attempt, set())
        assert node.id not in counter, f"node {node.id} counted twice for {when_all}"
        counter.add(node.id)
        if len(counter) == len(epoch.members):
            self._is_closed = self._is_closed or isinstance(when_all, ev.AllFinished)
            self._tell(epoch, when_all)

    def _open_store(self, epoch: _Epoch, node: _Node, attempt: int) -> None:
        """The leader brings it up; whoever asks hears of it once it is there."""
        asked = epoch.opened.setdefault(attempt, [])
        asked.append(node.id)
        if epoch.members[0] in asked:
            told = [node.id] if node.id != epoch.members[0] else asked
            for member in told:
                self._post(self.nodes[member], 0.005, ev.StoreReady(attempt), epoch)

    # -- rendezvous --------------------------------------------------------------------------------------------------
    def _try_to_form(self) -> None:
        self._forming += 1
        mine = self._forming
        self._waiting = [n for n in self._waiting if self.nodes[n].is_here]
        if self._is_closed:
            for n in self._waiting:
                self._post(self.nodes[n], 0.1, ev.JoinFailed("the job has ended", ExitClass.OK))
            self._waiting = []
            return
        if len(self._waiting) < self.min_nodes:
            if not any(n.is_here and n.id not in self._waiting for n in self.nodes):
                for n in self._waiting:
                    self._post(self.nodes[n], 30.0, ev.JoinFailed("too few nodes", ExitClass.START_UP))
                self._waiting = []
            return
        busy = [n for n in self.nodes if n.is_here and n.id not in self._waiting]
        if not busy:
            self._after(0.05, lambda: self._form() if self._forming == mine else None)
            return
        for node in busy:
            self._post(node, 0.01, ev.NodesWaiting(len(self._waiting)), node.epoch)
        self._after(5.0, lambda: self._try_to_form() if self._forming == mine and self._waiting else None)

    def _form(self) -> None:
        members = sorted(n for n in self._waiting if self.nodes[n].is_here)
        self._waiting = []
        epoch = _Epoch(next(self._epochs), members)
        attempt = self._next_attempt
        self._next_attempt += 1
        k = self.ranks_per_node
        for group_rank, member in enumerate(members):
            node = self.nodes[member]
            node.epoch = epoch
            slots = tuple(RankSlot(group_rank * k + i, i) for i in range(k))
            self._post(node, 0.0, ev.Joined(attempt, group_rank, len(members), len(members) * k, slots), epoch)

    def _node_is_gone(self, node: _Node) -> None:
        for process in [p for p in self.processes if p.node == node.id and p.code is None]:
            self._exit(process, -9)  # PDEATHSIG
        if node.id == self.store_host:
            for other in self.nodes:
                if other.is_here and other.epoch is not None:
                    self._post(other, 1.0, ev.ChannelLost("its host is gone"), other.epoch)
        self._try_to_form()

    # -- faults of nodes ---------------------------------------------------------------------------------------------
    def _break_node(self, fault: Fault) -> None:
        targets = self.nodes if fault.node is None else [self.nodes[fault.node]]
        if not any(n.is_here for n in targets):
            return
        self.fired.append((self.now_s, fault))
        for node in targets:
            if not node.is_here:
                continue
            match fault.kind:
                case "agent_lost":
                    node.is_lost = True
                    self._node_is_gone(node)
                case "agent_stopped":
                    node.frozen_until_s = self.now_s + fault.for_s
                    self._at(node.frozen_until_s, lambda n=node: self._wake(n))  # type: ignore[misc]
                case "channel_cut":
                    if node.epoch is not None:
                        self._post(node, 0.5, ev.ChannelLost("connection reset"))
                    node.is_cut = True
                case "channel_slow":
                    node.slow_s = fault.for_s
                case "evidence_stuck":
                    node.evidence_stuck = True
                case "sigterm":
                    self._post(node, self.rng.uniform(0.0, 0.01), ev.StopAsked(15))
                case "sigint":
                    self._post(node, self.rng.uniform(0.0, 0.01), ev.StopAsked(2))
                case _:
                    raise AssertionError(fault.kind)

    # -- evidence and probes -----------------------------------------------------------------------------------------
    def _probe(self, node: _Node, ranks: Sequence[int], window_s: float) -> None:
        before = {r: (self.ranks[r].token, self.ranks[r].doing) for r in ranks}

        def done() -> None:
            results = []
            for r in ranks:
                p = self.ranks[r]
                if p.code is not None:
                    continue
                same = before[r] == (p.token, p.doing)
                still = (
                    p.doing in (Doing.WAITING, Doing.HUNG, Doing.BUSY, Doing.ENDING, Doing.STARTING) or p.state == "T"
                )
                results.append(
                    ev.ProbeResult(
                        rank=r,
                        window_s=window_s,
                        state=p.state,
                        cpu_share=1.0 if p.doing is Doing.BUSY else 0.0 if still else 0.9,
                        stack_unchanged=same and still,
                        in_collective=p.doing is Doing.WAITING,
                        doing="collective" if p.doing is Doing.WAITING else "own_work",
                        place=f"all_reduce at train.py:{p.in_collective}" if p.doing is Doing.WAITING else "",
                        compiling=p.doing is Doing.COMPILING,
                        io_moved=p.doing is Doing.SAVING,
                    )
                )
            self._post(node, 0.0, ev.ProbesDone(tuple(results)))

        self._after(window_s, done)

    def _gather(self, node: _Node, command: ev.Gather) -> None:
        epoch, attempt = node.epoch, command.attempt
        mine = [p for p in self.ranks.values() if p.node == node.id and p.attempt == attempt]
        takes_s = inf if node.evidence_stuck else self.rng.uniform(0.05, min(2.0, command.limit_s))
        made = GatherMade(
            node.id,
            self.now_s,
            self.now_s + takes_s,
            command,
            {p.rank: p.code for p in mine if p.code is not None},
            {p.rank: p.doing for p in mine},
            {p.rank: p.state for p in mine},
        )
        self.gathers.append(made)
        if takes_s == inf:
            return
        self._post(node, takes_s, ev.EvidenceDone(attempt))
        if command.only_report or epoch is None or node.is_cut:
            return

        def publish() -> None:
            if not node.is_here:
                return
            told = epoch.evidence.setdefault(attempt, {})
            told[node.id] = made
            if len(told) == len(epoch.members) and attempt in epoch.stops:
                self._decide(epoch, attempt)

        self._after(takes_s + self._latency_s(node), publish)

    # -- ranks -------------------------------------------------------------------------------------------------------
    def _spawn(self, node: _Node, rank: int, attempt: int) -> None:
        old = self.ranks.get(rank)
        assert old is None or old.code is not None, f"rank {rank} is started while {old} still lives"
        p = SimRank(rank, node.id, next(self._pids), attempt, next_step=self.checkpoint)
        self.ranks[rank] = p
        self.processes.append(p)
        self._post(node, 0.002, ev.RankSpawned(rank, p.pid))
        if self._fires(p, "never_report"):
            p.doing = Doing.HUNG
            return
        self._turn(p, Doing.STARTING, self.script.start_s * self.rng.uniform(0.5, 1.5), self._attach)

    def _turn(self, p: SimRank, doing: Doing, for_s: float, then: Callable[[SimRank], None]) -> None:
        """The rank does something for a while; whatever was planned before is void."""
        p.token += 1
        p.doing = doing
        mine = p.token

        def go() -> None:
            if p.token == mine and p.code is None:
                then(p)

        if for_s < inf:
            self._after(for_s, go)

    def _fires(self, p: SimRank, *kinds: str) -> Fault | None:
        for fault in self.pending:
            if fault.rank != p.rank or fault.kind not in kinds or fault.attempt not in (None, p.attempt):
                continue
            if fault.kind not in ("never_report", "teardown_hang") and fault.step != p.next_step:
                continue
            self.pending.remove(fault)
            self.fired.append((self.now_s, fault))
            p.faults.append(fault)
            return fault
        return None

    def _attach(self, p: SimRank) -> None:
        p.attached_s = self.now_s
        p.sections.append(OpenSection("setup", self.now_s, True))
        self._turn(p, Doing.SETUP, self.script.setup_s * self.rng.uniform(0.8, 1.2), self._begin_step)

    def _open(self, p: SimRank, name: str) -> None:
        p.sections.append(OpenSection(name, self.now_s, p.steps_done == 0))

    def _shut(self, p: SimRank, name: str) -> None:
        kept = [s for s in p.sections if s.name != name]
        if len(kept) != len(p.sections):
            p.sections = kept
            p.last_change_s = self.now_s

    def _begin_step(self, p: SimRank) -> None:
        if p.next_step >= self.script.steps:
            self._end(p)
            return
        if self.script.uses_should_stop:
            p.stop_calls += 1
            epoch = self.nodes[p.node].epoch
            if epoch is not None and epoch.stop_at_call is not None and p.stop_calls >= epoch.stop_at_call:
                self._end(p)
                return
        if self.script.own_sections:
            self._open(p, "step")
        if self._fires(p, "ignore_sigterm"):
            p.ignores_sigterm = True
        fault = self._fires(
            p,
            "kill",
            "exit",
            "hang",
            "hang_section",
            "skip_collective",
            "busy",
            "stop",
            "uninterruptible",
            "slow_evaluation",
            "slow_checkpoint",
            "slow_compile",
        )
        if fault is None:
            self._turn(p, Doing.WORKING, self.script.step_s * self.rng.uniform(0.7, 1.0), self._enter_collective)
        else:
            self._break_rank(p, fault)

    def _break_rank(self, p: SimRank, fault: Fault) -> None:
        never: Callable[[SimRank], None] = self._enter_collective
        match fault.kind:
            case "kill":
                self._exit(p, -9)
            case "exit":
                self._exit(p, 1)
            case "hang":
                self._turn(p, Doing.HUNG, inf, never)
            case "hang_section":
                self._open(p, "load_batch")
                self._turn(p, Doing.HUNG, inf, never)
            case "skip_collective":
                self._turn(p, Doing.WAITING, inf, never)
            case "busy":
                p.state = "R"
                self._turn(p, Doing.BUSY, inf, never)
            case "stop":
                p.state = "T"
                self._turn(p, Doing.HUNG, inf, never)
            case "uninterruptible":
                p.state, p.unkillable = "D", True
                self._turn(p, Doing.HUNG, inf, never)
            case "slow_evaluation":
                self._open(p, "evaluation")
                self._turn(p, Doing.EVALUATING, fault.for_s, self._enter_collective)
            case "slow_checkpoint":
                self._open(p, "checkpointing")
                self._turn(p, Doing.SAVING, fault.for_s, self._enter_collective)
            case "slow_compile":
                self._turn(p, Doing.COMPILING, fault.for_s, self._enter_collective)
            case _:
                raise AssertionError(fault.kind)

    def _enter_collective(self, p: SimRank) -> None:
        self._shut(p, "evaluation")
        self._shut(p, "checkpointing")
        p.in_collective = p.next_step
        self._turn(p, Doing.WAITING, inf, self._enter_collective)
        here = self._arrivals.setdefault((p.attempt, p.next_step), set())
        here.add(p.rank)
        world = [q for q in self.ranks.values() if q.attempt == p.attempt]
        if self.script.victims_raise and any(q.code not in (None, 0) for q in world):
            self._after(self.rng.uniform(0.02, 0.5), lambda: self._raise(p))
        elif len(here) == self._world_size(p):
            for q in world:
                self._turn(q, Doing.WORKING, 0.001, self._step_done)

    def _world_size(self, p: SimRank) -> int:
        epoch = self.nodes[p.node].epoch
        return len(epoch.members) * self.ranks_per_node if epoch is not None else 0

    def _step_done(self, p: SimRank) -> None:
        p.in_collective = None
        self._shut(p, "setup")
        self._shut(p, "step")
        p.step, p.step_at_s, p.steps_done = p.next_step, self.now_s, p.steps_done + 1
        p.first_step_s = self.now_s if p.first_step_s is None else p.first_step_s
        p.next_step += 1
        if p.next_step % self.script.saves_every == 0:
            self._open(p, "checkpointing")
            self._turn(p, Doing.SAVING, self.script.save_s * self.rng.uniform(0.8, 1.2), self._saved)
        else:
            self._begin_step(p)

    def _saved(self, p: SimRank) -> None:
        self._shut(p, "checkpointing")
        if p.rank == 0:
            self.checkpoint = p.next_step
        self._begin_step(p)

    def _end(self, p: SimRank) -> None:
        p.finished_s = self.now_s
        hangs = self._fires(p, "teardown_hang")
        self._turn(p, Doing.ENDING, inf if hangs else self.rng.uniform(0.1, 0.5), lambda q: self._exit(q, 0))

    def _raise(self, p: SimRank) -> None:
        if p.code is None and p.doing is Doing.WAITING and p.state != "T":
            self._exit(p, 1)

    def _terminate(self, p: SimRank) -> None:
        deaf = p.ignores_sigterm or p.state in ("T", "D") or p.code is not None
        if deaf:
            return
        if self.script.saves_on_sigterm_s and p.doing not in (Doing.HUNG, Doing.BUSY, Doing.STARTING):
            self._open(p, "checkpointing")
            self._turn(p, Doing.SAVING, self.script.saves_on_sigterm_s, lambda q: self._exit(q, 0))
            return
        self._after(self.rng.uniform(0.005, 0.1), lambda: self._exit(p, -15))

    def _kill(self, p: SimRank) -> None:
        if not p.unkillable and p.code is None:
            self._after(self.rng.uniform(0.001, 0.05), lambda: self._exit(p, -9))

    def _exit(self, p: SimRank, code: int) -> None:
        if p.code is not None:
            return
        p.code, p.doing, p.token, p.state = code, Doing.GONE, p.token + 1, ""
        node = self.nodes[p.node]
        self._post(node, 0.001, ev.RankExited(p.rank, code))
        if self.script.victims_raise and code != 0:
            for q in self.ranks.values():
                if q.attempt == p.attempt and q.code is None and q.doing is Doing.WAITING:
                    self._after(self.rng.uniform(0.02, 0.5), lambda q=q: self._raise(q))  # type: ignore[misc]

    # -- what every run must satisfy -----------------------------------------------------------------------------------
    def check_ended(self) -> None:
        """Every agent has left, every rank is gone or known as stuck, no process of a healthy node lives on."""
        for node in self.nodes:
            if node.is_lost:
                continue
            assert node.machine.phase in (NodePhase.LEFT, NodePhase.EXCLUDED), self.story()
            for rank in node.machine.ranks.values():
                assert rank.phase in (RankPhase.EXITED, RankPhase.STUCK), self.story()
        alive = [p for p in self.processes if p.code is None and not p.unkillable]
        assert not alive, f"{alive}\n{self.story()}"

    def check_evidence_before_kill(self) -> None:
        """Each SIGKILL came after evidence of that attempt on that node was complete, or its time was up."""
        for kill in self.kills:
            ready_s = [
                min(g.done_s, g.at_s + g.command.limit_s)
                for g in self.gathers
                if (g.node, g.command.attempt) == (kill.node, kill.attempt)
            ]
            assert not kill.is_hard or min(ready_s, default=inf) <= kill.at_s, (
                f"{kill} without evidence\n{self.story()}"
            )
