"""The savers' machines against a simulated cluster: messages late, ranks, savers and nodes dead, in any order."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.checkpoint.layout import Entry, Layout, ObjectEntry
from steadyrun.checkpoint.manifest import Fragment
from steadyrun.checkpoint.planning import plan
from steadyrun.checkpoint.saver import coordinator as c
from steadyrun.checkpoint.saver import events as e
from steadyrun.checkpoint.saver import messages as m
from steadyrun.checkpoint.saver import orders as o
from steadyrun.checkpoint.saver.coordinator import Coordinator, Phase
from steadyrun.checkpoint.saver.machine import NodeLimits, SaverMachine
from steadyrun.checkpoint.saver.messages import SaveKey
from steadyrun.checkpoint.saves import CheckpointOptions, SaveState, TierName
from steadyrun.checkpoint.shardfile import Written

OPTIONS = CheckpointOptions("/root")
DISK = frozenset({TierName.MEMORY, TierName.SHARED})
MEMORY = frozenset({TierName.MEMORY})
STAGED = "staged"


def layout_of(rank: int, world_size: int) -> Layout:
    entry = Entry("w", ("w",), "float32", (4 * world_size,), (4 * rank,), (4,), 0, 16)
    return Layout(rank, world_size, (entry,), (ObjectEntry("step", ("step",)),))


@dataclasses.dataclass
class Slot:
    key: SaveKey | None = None
    holds: int = 0


@dataclasses.dataclass
class RankState:
    """A rank's process and its memory; the memory outlives it."""

    rank: int
    arena: int = -1
    slots: list[Slot] = dataclasses.field(default_factory=lambda: [Slot(), Slot()])
    connection: int = 0
    attempt: int = -1
    is_alive: bool = False
    has_memory: bool = False
    generation: int = 0
    heard: dict[SaveKey, str] = dataclasses.field(default_factory=dict)


class Node:
    """One node: its machine, and everything around it, as the server would do it."""

    def __init__(self, cluster: Cluster, name: str, rank: int) -> None:
        self.cluster, self.name = cluster, name
        self.rank = RankState(rank)
        self.machine = SaverMachine(name, cluster.node_limits)
        self.is_up = True
        self.binding: e.Binding | None = None
        self.jobs: list[Callable[[], None]] = []
        self.is_ended = False
        self.notes: list[e.Report] = []
        self.cancelled: set[str] = set()
        self.life = 0

    def feed(self, event: Any) -> None:
        if not self.is_up or self.is_ended:
            return
        for command in self.machine.handle(event, self.cluster.now_s):
            self.perform(command)

    def later(self, event: Any) -> None:
        """A job of a worker thread: it may end at any time, or never when this saver dies."""
        life = self.life

        def done() -> None:
            if life == self.life:
                self.feed(event() if callable(event) else event)

        self.jobs.append(done)

    def slot(self, number: int) -> Slot:
        return self.rank.slots[number]

    def perform(self, command: e.NodeCommand) -> None:
        rank = self.rank
        match command:
            case e.Post(message):
                self.cluster.to_coordinator(self, message)
            case e.Bind(binding):
                self.cluster.bind(self, binding)
            case e.OpenArena():
                info = e.ArenaInfo(
                    rank.arena,
                    rank.rank,
                    self.cluster.world_size,
                    "",
                    2,
                    1,
                    layout_of(rank.rank, self.cluster.world_size),
                )
                info = info._replace(digest=info.layout.digest())
                self.later(e.ArenaOpened(command.attempt, info, ""))
            case e.WritePiece():
                assert self.slot(command.slot).key is not None

                def written() -> Any:
                    if command.ticket in self.cancelled:
                        return e.PieceFailed(command.key, command.rank, command.ticket, "cancelled", "")
                    if self.slot(command.slot).key != command.key:
                        return e.PieceFailed(command.key, command.rank, command.ticket, "lost", "overwritten")
                    if self.cluster.is_disk_full:
                        return e.PieceFailed(command.key, command.rank, command.ticket, "full", "no space")
                    self.cluster.files.setdefault(command.ticket, {})[command.rank] = command.key
                    return e.PieceWritten(command.key, command.rank, command.ticket, a_written(command.rank))

                self.later(written)
            case e.CancelWrites(ticket):
                self.cancelled.add(ticket)
            case e.LetGo():
                self.slot(command.slot).holds -= 1
                assert self.slot(command.slot).holds >= 0
            case e.ReleaseSlot():
                if self.slot(command.slot).key == command.key:
                    self.slot(command.slot).key = None
            case e.SendRank():
                if command.connection == rank.connection and rank.is_alive:
                    if command.op == "arena":
                        rank.has_memory = True
                    if command.op == "save":
                        key = SaveKey(rank.attempt, command.fields["generation"], command.fields["step"])
                        if rank.heard.get(key) not in ("durable", "failed", "skipped"):
                            rank.heard[key] = command.fields["state"]
            case e.Report():
                self.notes.append(command)
            case e.End():
                self.is_ended = True
            case e.Inspect():
                found = [e.Found(i, s.key, 0.0) for i, s in enumerate(rank.slots) if s.key is not None]
                found.sort(key=lambda f: f.key, reverse=True)
                if command.slot is None:
                    self.later(e.Inspected(command.arena, tuple(found[:1]), (), tuple(found[1:])))
                else:
                    checked = tuple(f for f in found if f.slot == command.slot)
                    self.later(e.Inspected(command.arena, checked, (), (), command.slot))
            case e.DigestSlot() | e.DropArena() | e.SetWanted() | e.AnswerAgent():
                pass

    # -- what may happen -----------------------------------------------------------------------------------------------
    def start_rank(self) -> None:
        rank = self.rank
        assert self.binding is not None
        rank.attempt, rank.is_alive, rank.has_memory, rank.generation = self.binding.attempt, True, False, 0
        rank.heard = {}
        rank.arena = 1
        self.connect()

    def connect(self) -> None:
        rank = self.rank
        self.cluster.connections += 1
        rank.connection = self.cluster.connections
        self.feed(e.RankHello(rank.connection, rank.rank, rank.attempt, "run", OPTIONS))
        self.feed(e.RankLayout(rank.attempt, rank.rank, "", 0))

    def kill_rank(self) -> None:
        rank = self.rank
        rank.is_alive = False
        self.feed(e.RankLost(rank.attempt, rank.rank, rank.connection))

    def save(self, step: int, tiers: frozenset[TierName]) -> None:
        rank = self.rank
        rank.generation += 1
        key = SaveKey(rank.attempt, rank.generation, step)
        rank.heard[key] = "accepted"
        if not self.is_up:
            return  # the client tells the next saver; here the memory has to be enough
        newest = max((s.key for s in rank.slots if s.key is not None), default=None)
        free = [i for i, s in enumerate(rank.slots) if not s.holds and (s.key is None or s.key != newest)]
        if not free:
            self.feed(e.RankSkipped(key, rank.rank, "no slot is free"))
            return
        slot = self.slot(free[0])
        slot.key = key
        slot.holds += 1
        self.feed(e.RankStaged(key, rank.rank, rank.arena, free[0], tiers, 0.01, True, 0.0))

    def kill(self) -> None:
        self.is_up = False
        self.life += 1
        self.jobs.clear()
        self.kept = self.machine.remember()
        for slot in self.rank.slots:
            slot.holds = 0

    def restart(self) -> None:
        self.is_up, self.is_ended = True, False
        self.machine = SaverMachine(self.name, self.cluster.node_limits, self.kept)
        self.cancelled.clear()
        rank = self.rank
        if rank.arena > 0:
            found = []
            for i, slot in enumerate(rank.slots):
                if slot.key is not None:
                    slot.holds += 1
                    found.append(e.Found(i, slot.key, 0.0))
            layout = layout_of(rank.rank, self.cluster.world_size)
            info = e.ArenaInfo(rank.arena, rank.rank, layout.world_size, layout.digest(), 2, 1, layout)
            self.feed(e.ArenaRestored(info, tuple(found)))
        if self.binding is not None:
            self.feed(e.AttemptBegan(self.binding))
        if rank.is_alive:
            self.connect()


def a_written(rank: int) -> Written:
    return Written((), Fragment(rank, (), ()), {}, {}, (), (), 0.0, 0.0)


class Cluster:
    """Nodes with one rank each. A message to or from another node may be late; the coordinator's own are not."""

    def __init__(self, nodes: int) -> None:
        self.now_s = 1000.0
        self.world_size = nodes
        self.node_limits = NodeLimits()
        self.limits = c.Limits()
        self.connections = 0
        self.coordinator: Coordinator | None = None
        self.coordinator_node: Node | None = None
        self.names = 0
        self.to_one: deque[m.FromNode] = deque()
        self.to_all: dict[str, deque[m.ToAll]] = {}
        self.jobs: list[Callable[[], None]] = []
        self.files: dict[str, dict[int, SaveKey]] = {}
        self.tickets: dict[SaveKey, str] = {}
        self.committed: dict[SaveKey, int] = {}
        self.is_disk_full = False
        self.nodes = [Node(self, f"n{i}", i) for i in range(nodes)]

    # -- attempts ------------------------------------------------------------------------------------------------------
    def begin(self, attempt: int, first: int = 0, unheard: int = 0) -> None:
        """A new attempt, with node *first* as group rank 0, which hears the others late; its ranks start."""
        self.to_one.clear()
        self.to_all.clear()
        count = len(self.nodes)
        order = [(first + i) % count for i in range(count)]
        for group_rank, i in enumerate(order):
            node = self.nodes[i]
            if node.rank.is_alive:
                node.kill_rank()
            node.binding = e.Binding(attempt, count, group_rank, count, (node.rank.rank,), "h", 1)
        for i in order:
            self.nodes[i].feed(e.AttemptBegan(self.nodes[i].binding))  # type: ignore[arg-type]
        if unheard:
            for _ in range(min(unheard, len(self.to_one))):
                self.to_one.popleft()
            self.coordinate(o.ExchangeBack())
        for node in self.nodes:
            node.start_rank()

    def bind(self, node: Node, binding: e.Binding) -> None:
        if binding.group_rank == 0:
            if self.coordinator is None or self.coordinator_node is not node or node.life != self.coordinator_life:
                self.names += 1
                self.coordinator = Coordinator(self.limits, f"c{self.names}")
                self.coordinator_node, self.coordinator_life = node, node.life
                self.jobs.clear()
            self.coordinate(o.Began(binding.attempt, binding.world_size, binding.group_world_size))
        self.to_all[node.name] = deque()
        node.feed(e.ExchangeBound(binding.attempt))

    # -- the exchange --------------------------------------------------------------------------------------------------
    def to_coordinator(self, node: Node, message: m.FromNode) -> None:
        message = m.decode(m.encode(message))  # type: ignore[assignment]
        if node is self.coordinator_node:
            self.coordinate(message)
        else:
            self.to_one.append(message)

    def coordinate(self, event: Any) -> None:
        node = self.coordinator_node
        if self.coordinator is None or node is None or not node.is_up or node.life != self.coordinator_life:
            return
        for command in self.coordinator.handle(event, self.now_s):
            self.perform(command)

    def later(self, event: Any) -> None:
        coordinator = self.coordinator
        self.jobs.append(lambda: self.coordinate(event) if self.coordinator is coordinator else None)

    def perform(self, command: o.CoordinatorCommand) -> None:
        match command:
            case o.Tell(message):
                assert self.coordinator_node is not None
                if isinstance(message, m.WriteOrdered):
                    self.tickets[message.key] = message.ticket
                for node in self.nodes:
                    if node is not self.coordinator_node:
                        self.to_all.setdefault(node.name, deque()).append(message)
                self.coordinator_node.feed(message)
            case o.MakePlan():
                self.later(o.PlanMade(command.plan_id, plan(command.layouts)))
            case o.OpenFolder(key):
                done = f"/root/{key.step}" if key in self.committed else ""
                self.later(o.FolderOpened(key, f"/root/{key.step}.partial", done))
            case o.CommitFolder(key):
                assert key not in self.committed, "it was committed before"
                files = self.files.get(self.tickets[key], {})  # those in the folder that is there now
                assert files == dict.fromkeys(range(self.world_size), key)
                self.committed[key] = len(command.written)
                self.later(o.FolderCommitted(key, f"/root/{key.step}", 1))
            case o.ListFolders():
                self.later(o.FoldersListed(command.attempt, command.round, ()))
            case _:
                pass

    def lose(self) -> None:
        """The store is away for a moment, and every message with it."""
        self.to_one.clear()
        for node in self.nodes:
            if node is not self.coordinator_node and node.binding is not None:
                self.to_all[node.name] = deque()
                node.feed(e.ExchangeLost("gone"))
                node.feed(e.ExchangeBound(node.binding.attempt))
        self.coordinate(o.ExchangeBack())

    # -- time ----------------------------------------------------------------------------------------------------------
    def deliver_all(self) -> None:
        for _ in range(10_000):
            if self.to_one:
                self.coordinate(self.to_one.popleft())
                continue
            waiting = [n for n in self.nodes if self.to_all.get(n.name)]
            if waiting:
                waiting[0].feed(self.to_all[waiting[0].name].popleft())
                continue
            jobs = self.jobs or next((n.jobs for n in self.nodes if n.jobs), None)
            if not jobs:
                return
            jobs.pop(0)()
        raise AssertionError("messages without end")

    def pass_time(self, seconds: float) -> None:
        """As the loop would: to the next time at which something is due, and on."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.deliver_all()
            due_s = [n.machine.next_deadline_s() for n in self.nodes if n.is_up]
            if self.coordinator is not None:
                due_s.append(self.coordinator.next_deadline_s())
            self.now_s = min(max(min(due_s, default=end_s), self.now_s + 0.25), end_s)
            self.coordinate(o.Tick())
            is_busy = self.coordinator is not None and self.coordinator.is_busy
            for node in self.nodes:
                node.feed(e.Tick(is_busy))
        self.deliver_all()

    def holds(self) -> int:
        return sum(s.holds for n in self.nodes for s in n.rank.slots)


def ready(nodes: int = 2) -> Cluster:
    cluster = Cluster(nodes)
    cluster.begin(0)
    cluster.pass_time(1.0)
    assert all(n.rank.has_memory for n in cluster.nodes)
    return cluster


def save(cluster: Cluster, step: int, tiers: frozenset[TierName] = DISK) -> SaveKey:
    for node in cluster.nodes:
        node.save(step, tiers)
    rank = cluster.nodes[0].rank
    return SaveKey(rank.attempt, rank.generation, step)


# -- single stories ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_save_is_committed_once_and_every_rank_hears_of_it(nodes: int) -> None:
    cluster = ready(nodes)
    key = save(cluster, 5)
    cluster.pass_time(1.0)
    assert cluster.committed == {key: nodes}
    assert [n.rank.heard[key] for n in cluster.nodes] == ["durable"] * nodes
    assert cluster.holds() == 0


def test_a_snapshot_for_memory_alone_is_not_written_and_its_slots_are_free() -> None:
    cluster = ready()
    key = save(cluster, 5, MEMORY)
    cluster.pass_time(400.0)
    assert cluster.committed == {}
    assert [n.rank.heard[key] for n in cluster.nodes] == ["in_memory"] * 2
    assert cluster.holds() == 0


def test_a_failed_attempt_brings_the_snapshot_in_memory_to_disk() -> None:
    cluster = ready()
    key = save(cluster, 5, MEMORY)
    cluster.pass_time(1.0)
    for node in cluster.nodes:
        node.kill_rank()
        node.feed(e.AttemptFailed(0, 5, "x"))
    cluster.pass_time(1.0)
    assert key in cluster.committed


def test_a_rank_that_never_stages_skips_the_save_after_a_limit_with_its_number() -> None:
    cluster = ready(3)
    for node in cluster.nodes[:2]:
        node.save(5, DISK)
    cluster.pass_time(cluster.limits.staging - 2.0)
    assert cluster.coordinator is not None
    key = SaveKey(0, 1, 5)
    assert cluster.coordinator.phase_of(key) is Phase.GATHERING
    cluster.pass_time(3.0)
    assert [n.rank.heard[key] for n in cluster.nodes[:2]] == ["skipped"] * 2
    result = next(r for r in cluster.nodes[0].machine.remember().resolved if r.key == key)
    assert "rank 2 did not take part" in result.why
    assert all(slot.key is None for n in cluster.nodes[:2] for slot in n.rank.slots), "such a snapshot is of no use"
    assert cluster.holds() == 0


def test_an_error_on_one_rank_fails_the_save_everywhere_and_the_next_one_succeeds() -> None:
    cluster = ready()
    cluster.is_disk_full = True
    first = save(cluster, 1)
    cluster.pass_time(1.0)
    assert [n.rank.heard[first] for n in cluster.nodes] == ["failed"] * 2
    cluster.is_disk_full = False
    second = save(cluster, 2)
    cluster.pass_time(1.0)
    assert set(cluster.committed) == {second}


def test_a_vote_for_a_folder_that_was_replaced_does_not_count() -> None:
    cluster = ready()
    key = save(cluster, 1)
    while cluster.coordinator is None or cluster.coordinator.phase_of(key) is not Phase.WRITING:
        if cluster.to_one:
            cluster.coordinate(cluster.to_one.popleft())
        else:
            cluster.jobs.pop(0)()
    cluster.coordinate(m.VoteTold(key, 1, "of another folder", a_written(1)))
    cluster.nodes[0].jobs.pop(0)()
    assert cluster.coordinator.phase_of(key) is Phase.WRITING
    cluster.pass_time(1.0)
    assert key in cluster.committed


def test_saves_wait_for_each_other_and_are_written_in_their_order() -> None:
    cluster = ready()
    first, second = save(cluster, 1), save(cluster, 2)
    third = save(cluster, 3)
    cluster.pass_time(1.0)
    assert list(cluster.committed) == [first, second]
    assert [n.rank.heard[third] for n in cluster.nodes] == ["skipped"] * 2


def test_the_silence_of_a_node_fails_what_waits_for_it() -> None:
    cluster = ready()
    key = save(cluster, 1)
    cluster.nodes[1].kill()
    cluster.pass_time(cluster.limits.silence + 2.0)
    assert cluster.nodes[0].rank.heard[key] == "failed"
    cluster.nodes[1].restart()
    cluster.pass_time(1.0)
    assert cluster.holds() == 0


def test_the_silence_of_the_coordinator_is_noticed_by_the_others() -> None:
    cluster = ready()
    key = save(cluster, 1)
    while cluster.to_one:
        cluster.coordinate(cluster.to_one.popleft())
    while cluster.to_all["n1"]:
        cluster.nodes[1].feed(cluster.to_all["n1"].popleft())
    cluster.nodes[0].kill()
    cluster.pass_time(cluster.node_limits.silence + 5.0)
    assert cluster.nodes[1].rank.heard[key] == "failed"
    assert sum(s.holds for s in cluster.nodes[1].rank.slots) == 0


def test_leaving_waits_for_what_is_being_written() -> None:
    cluster = ready(1)
    (node,) = cluster.nodes
    key = save(cluster, 1)
    node.feed(e.LeaveAsked(60.0))
    assert not node.is_ended
    cluster.pass_time(2.0)
    assert key in cluster.committed
    assert node.is_ended


def test_without_its_agent_a_saver_writes_what_is_in_memory_and_ends_in_time() -> None:
    cluster = ready(1)
    (node,) = cluster.nodes
    key = save(cluster, 1, MEMORY)
    cluster.pass_time(1.0)
    node.kill_rank()
    node.feed(e.AgentLost())
    cluster.pass_time(3.0)
    assert key in cluster.committed
    assert node.is_ended


def test_without_its_agent_and_without_the_others_a_saver_still_ends() -> None:
    cluster = ready(2)
    save(cluster, 1, MEMORY)
    cluster.pass_time(1.0)
    cluster.nodes[0].kill()
    cluster.nodes[1].feed(e.AgentLost())
    cluster.pass_time(30.0)
    assert cluster.nodes[1].is_ended


def test_all_ranks_hear_the_same_choice_and_agreement() -> None:
    cluster = ready()
    key = save(cluster, 7)
    cluster.pass_time(1.0)
    cluster.begin(1)
    told: dict[str, list[Any]] = {}
    for node in cluster.nodes:
        node.perform = spy(node, told)  # type: ignore[method-assign]
        node.feed(e.RankRestore(1, node.rank.rank, None, True, (), 0))
        node.feed(e.RankAgree(1, node.rank.rank, "k", node.rank.rank))
    cluster.pass_time(1.0)
    for node in cluster.nodes:
        sent = {command.op: command.fields for command in told[node.name] if isinstance(command, e.SendRank)}
        assert (sent["choice"]["source"], sent["choice"]["step"]) == ("memory", key.step)
        assert sent["agreed"]["values"] == [0, 1]


def test_an_older_snapshot_is_looked_through_only_when_it_is_chosen() -> None:
    cluster = ready()
    first = save(cluster, 7)
    cluster.pass_time(1.0)
    save(cluster, 8)
    cluster.pass_time(1.0)
    cluster.nodes[1].rank.slots = [s if s.key == first else Slot() for s in cluster.nodes[1].rank.slots]
    cluster.begin(1)
    told: dict[str, list[Any]] = {}
    for node in cluster.nodes:
        node.perform = spy(node, told)  # type: ignore[method-assign]
        node.feed(e.RankRestore(1, node.rank.rank, None, True, (), 0))
    cluster.pass_time(1.0)
    for node in cluster.nodes:
        sent = {command.op: command.fields for command in told[node.name] if isinstance(command, e.SendRank)}
        assert (sent["choice"]["source"], sent["choice"]["step"]) == ("memory", 7)
        slot = node.rank.slots[sent["choice"]["slot"]]
        assert slot.key == first
    first_slot = [s.key for s in cluster.nodes[0].rank.slots].index(first)
    assert e.Inspect(1, first_slot) in told["n0"]


def spy(node: Node, told: dict[str, list[Any]]) -> Callable[[Any], None]:
    before = node.perform

    def perform(command: Any) -> None:
        told.setdefault(node.name, []).append(command)
        before(command)

    return perform


# -- any order ---------------------------------------------------------------------------------------------------------
ACTIONS = (
    *("deliver", "deliver", "deliver", "deliver", "job", "job", "job", "save", "save", "memory"),
    *("rank", "saver", "lose", "attempt", "time"),
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_order_of_events_ends_with_every_save_resolved_and_nothing_held(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 3), "nodes")
    cluster = ready(nodes)
    step, attempt = 0, 0
    for _ in range(data.draw(st.integers(1, 25), "length")):
        action = data.draw(st.sampled_from(ACTIONS), "action")
        which = cluster.nodes[data.draw(st.integers(0, nodes - 1), "node")]
        if action == "deliver":
            if cluster.to_one and data.draw(st.booleans(), "inward"):
                cluster.coordinate(cluster.to_one.popleft())
            elif cluster.to_all.get(which.name):
                which.feed(cluster.to_all[which.name].popleft())
        elif action == "job":
            jobs = cluster.jobs if data.draw(st.booleans(), "coordinator's") else which.jobs
            if jobs:
                jobs.pop(data.draw(st.integers(0, len(jobs) - 1), "which"))()
        elif action in ("save", "memory"):
            step += 1
            for node in cluster.nodes:
                if node.rank.is_alive and node.rank.has_memory:
                    node.save(step, DISK if action == "save" else MEMORY)
        elif action == "rank":
            if which.rank.is_alive:
                which.kill_rank()
        elif action == "saver":
            if which.is_up:
                which.kill()
            else:
                which.restart()
        elif action == "lose":
            cluster.lose()
        elif action == "attempt":
            attempt += 1
            first, unheard = data.draw(st.integers(0, nodes - 1), "first"), data.draw(st.integers(0, 6), "unheard")
            cluster.begin(attempt, first, unheard)
        else:
            cluster.pass_time(data.draw(st.sampled_from([0.1, 7.0, 70.0]), "seconds"))
    for node in cluster.nodes:
        if not node.is_up:
            node.restart()
    cluster.pass_time(700.0)
    for node in cluster.nodes:
        for key, state in node.rank.heard.items():
            if node.rank.is_alive and state == "durable":
                assert key in cluster.committed
    assert cluster.holds() == 0, "a slot is kept for ever"
    # And it still works.
    attempt += 1
    cluster.begin(attempt)
    cluster.pass_time(2.0)
    key = save(cluster, step + 1)
    cluster.pass_time(2.0)
    assert key in cluster.committed
    assert [n.rank.heard[key] for n in cluster.nodes] == ["durable"] * nodes


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_save_that_all_ranks_finished_is_durable_although_everybody_dies_once(data: st.DataObject) -> None:
    """Ranks, savers, messages and the coordinator's place change at any moment after the copy; the memory stays."""
    nodes = data.draw(st.integers(1, 3), "nodes")
    cluster = ready(nodes)
    key = save(cluster, 1)
    for _ in range(data.draw(st.integers(0, 12), "before")):
        which = cluster.nodes[data.draw(st.integers(0, nodes - 1), "node")]
        if cluster.to_one and data.draw(st.booleans(), "inward"):
            cluster.coordinate(cluster.to_one.popleft())
        elif cluster.to_all.get(which.name):
            which.feed(cluster.to_all[which.name].popleft())
        elif cluster.jobs:
            cluster.jobs.pop(0)()
        elif which.jobs:
            which.jobs.pop(0)()
        if not data.draw(st.integers(0, 7), "loses"):
            cluster.lose()
    if data.draw(st.booleans(), "nobody dies"):
        cluster.pass_time(2.0)
        assert key in cluster.committed
        assert [n.rank.heard[key] for n in cluster.nodes] == ["durable"] * nodes
        return
    for node in cluster.nodes:
        if data.draw(st.booleans(), "dies"):
            node.kill()
    for node in cluster.nodes:
        node.kill_rank()
    for node in cluster.nodes:
        if not node.is_up:
            node.restart()
    cluster.begin(1, data.draw(st.integers(0, nodes - 1), "first"), data.draw(st.integers(0, 6), "unheard"))
    cluster.pass_time(60.0)
    assert key in cluster.committed
    assert cluster.holds() == 0


@given(st.sampled_from([SaveState.DURABLE, SaveState.FAILED]), st.text(max_size=20), st.integers(0, 9))
def test_messages_survive_the_wire(state: SaveState, why: str, step: int) -> None:
    key = SaveKey(1, 2, step)
    for message in (
        m.Resolved(key, state, why, "full", "/p", 0.5, 7),
        m.LayoutTold(0, 0, layout_of(0, 2), 2, why, "run", OPTIONS),
        m.PlanTold("id", plan([layout_of(0, 2), layout_of(1, 2)]).parts),
        m.VoteTold(key, 1, "t", a_written(1)),
        m.Agreed(0, why, (None, {"a": [1, 2.5]}, [why])),
        m.SaveOrdered(0, 1, step, DISK),
        m.Remembered({1: (OPTIONS, "run")}, {1: (0, 1)}, {key: DISK}, (m.Resolved(key, state),)),
    ):
        assert m.decode(m.encode(message)) == message


@given(st.binary(max_size=200))
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(m.MessageError):
        m.decode(data)
