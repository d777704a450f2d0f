"""Two savers that agree through a real TCPStore: saves, deaths of either, of the store, and of a whole node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from savers import Agent, Job, Rank, make_layout, problems, values
from torch.distributed import TCPStore

from steadyrun.checkpoint.catalog import list_checkpoints

HOST = "127.0.0.1"


class Nodes(Job):
    """Two nodes with one rank each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.store: TCPStore | None = None
        self.by_node: dict[str, Rank] = {}

    def new_store(self) -> None:
        self.store = None
        self.store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)

    def begin(self, attempt: int = 0, order: tuple[str, ...] = ("n0", "n1"), group_order: tuple[str, ...] = ()) -> None:
        """Ranks by *order*, group ranks by *group_order* (or the same)."""
        self.new_store()
        assert self.store is not None
        for node in order:
            agent = next((a for a in self.agents if a.node == node), None) or self.agent(node)
            group_rank = (group_order or order).index(node)
            agent.begin(attempt, len(order), [order.index(node)], group_rank, len(order), HOST, self.store.port)

    def of(self, node: str) -> Agent:
        return next(a for a in self.agents if a.node == node)

    def train(self, attempt: int = 0, order: tuple[str, ...] = ("n0", "n1"), elements: int = 70_000) -> list[Rank]:
        """Ranks with memory."""
        ranks = []
        for number, node in enumerate(order):
            rank = self.rank(self.of(node), number, len(order), attempt)
            rank.send_layout(make_layout(number, len(order), {"w": elements}, {"b": 1_000}))
            self.by_node[node] = rank
            ranks.append(rank)
        self.until(lambda: all(r.arena is not None for r in ranks), "snapshot memory")
        return ranks

    def complete(self) -> list[Path]:
        return [c.path for c in list_checkpoints(self.root) if c.is_complete]

    def return_of(self, node: str) -> None:
        """A saver that was killed is started again, and its rank connects."""
        self.of(node).start()
        rank = self.by_node[node]
        rank.options = self.options
        rank.connect()
        assert rank.layout is not None
        rank.send_layout(rank.layout)


@pytest.fixture(scope="module", autouse=True)
def _pipes_of_libuv() -> None:
    """The first TCPStore of a process makes a pipe that stays."""
    TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    made.limits = {"job": {"silence": 6.0, "beat": 1.0}, "node": {"silence": 8.0, "beat": 1.0, "unbound": 20.0}}
    yield made
    made.close()
    made.store = None


def slow(job: Nodes, most_bytes_per_s: float | None) -> None:
    job.options = type(job.options)(root=str(job.root), most_bytes_per_s=most_bytes_per_s)


def test_a_save_of_two_nodes_is_one_checkpoint(job: Nodes) -> None:
    job.begin()
    ranks = job.train()
    for step in (3, 4):
        for rank in ranks:
            rank.save(step)
        job.until(lambda s=step: job.is_durable(ranks, s), f"step {step}")  # type: ignore[misc]
    newest = job.complete()[0]
    assert problems(newest) == []
    assert values(newest) == {("model.w", 0): {4.0}, ("model.w", 70_000): {1004.0}, ("model.b", 0): {4.0}}
    for rank in ranks:
        rank.send("agree", key="0.x", value=rank.rank * 10)
        rank.send("restore", digest=None, rejected=[], local=True, round=0)
    job.until(lambda: all(r.last("agreed") and r.last("choice") for r in ranks), "answers")
    assert [(r.last("agreed") or {})["values"] for r in ranks] == [[0, 10]] * 2
    assert [(r.last("choice") or {})["step"] for r in ranks] == [4, 4]
    assert [(r.last("choice") or {})["source"] for r in ranks] == ["memory", "memory"]


def test_replicas_are_compared_across_nodes(job: Nodes) -> None:
    job.begin()
    ranks = job.train()
    for rank in ranks:
        rank.save(1, value=lambda e, r=rank.rank: float(r))  # type: ignore[misc]
    job.until(lambda: all("failed" in r.saves[1].states for r in ranks), "the refusal")
    assert "rank 0 and rank 1 differ" in ranks[1].saves[1].why


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_a_saver_killed_while_it_writes_comes_back_and_the_save_is_durable(job: Nodes, node: str) -> None:
    slow(job, 60_000.0)
    job.begin()
    ranks = job.train()
    for rank in ranks:
        rank.save(1)
    job.until(lambda: job.of("n0").records("checkpoint_started"), "the writing")
    job.of(node).kill()
    slow(job, None)
    job.return_of(node)
    job.until(lambda: all("durable" in r.saves[1].states for r in ranks), "the save")
    assert problems(job.complete()[0]) == []


def test_a_saver_that_is_gone_fails_the_save_with_its_name(job: Nodes) -> None:
    slow(job, 60_000.0)
    job.begin()
    ranks = job.train()
    for rank in ranks:
        rank.save(1)
    job.until(lambda: job.of("n0").records("checkpoint_started"), "the writing")
    job.of("n1").kill()
    job.until(lambda: "failed" in ranks[0].saves[1].states, "the failure")
    assert "the saver of node 1 has not been heard of" in ranks[0].saves[1].why
    slow(job, None)
    job.return_of("n1")
    for rank in ranks:
        rank.saves.clear()
        rank.save(2)
    job.until(lambda: job.is_durable(ranks, 2), "the next save")


@pytest.mark.parametrize("order", [("n0", "n1"), ("n1", "n0")])
def test_a_save_is_committed_while_the_next_attempt_runs(job: Nodes, order: tuple[str, ...]) -> None:
    """Also when the first node of the next attempt is another one, which knows nothing of the save."""
    slow(job, 100_000.0)
    job.begin()
    ranks = job.train()
    for rank in ranks:
        rank.save(5)
    job.until(lambda: job.of("n0").records("checkpoint_started"), "the writing")
    for rank in ranks:
        rank.leave()
    slow(job, None)
    job.begin(1, ("n0", "n1"), order)
    job.until(lambda: any(a.records("checkpoint_committed") for a in job.agents), "the commit")
    assert values(job.complete()[0])["model.w", 70_000] == {1005.0}
    assert problems(job.complete()[0]) == []
    again = job.train(1)
    for rank in again:
        rank.send("restore", digest=None, rejected=[], local=True, round=0)
    job.until(lambda: all(r.last("choice") for r in again), "a choice")
    assert [(r.last("choice") or {})["source"] for r in again] == ["memory", "memory"]
    assert [(r.last("choice") or {})["step"] for r in again] == [5, 5]


def test_with_a_node_replaced_what_is_on_disk_is_used(job: Nodes) -> None:
    job.begin()
    ranks = job.train()
    for rank in ranks:
        rank.save(5)
    job.until(lambda: job.is_durable(ranks, 5), "step 5")
    for rank in ranks:
        rank.save(6, tiers=["memory"])
    job.until(lambda: all("in_memory" in r.saves[2].states for r in ranks), "step 6 in memory")
    job.of("n1").close()
    job.agents = [a for a in job.agents if a.node != "n1"]
    for rank in ranks:
        rank.leave()
    job.begin(1, ("n0", "n2"))
    again = job.train(1, ("n0", "n2"))
    for rank in again:
        rank.send("restore", digest=None, rejected=[], local=True, round=0)
    job.until(lambda: all(r.last("choice") for r in again), "a choice")
    choice = again[0].last("choice") or {}
    assert (choice["source"], choice["step"]) == ("folder", 5)
    assert any("rank 1: not held" in why for _, _, why in choice["rejected"])


def test_a_store_that_is_lost_costs_only_time(job: Nodes) -> None:
    job.begin()
    ranks = job.train()
    job.store = None
    for rank in ranks:
        rank.save(2)
    job.begin(1)  # the ranks of attempt 0 are dead by then
    for rank in ranks:
        rank.leave()
    job.until(lambda: any(a.records("checkpoint_committed") for a in job.agents), "the commit")
    assert problems(job.complete()[0]) == []


# -- memory of the partner ---------------------------------------------------------------------------------------------
def test_a_replaced_node_gets_its_snapshot_back_from_its_partner(job: Nodes) -> None:
    job.options = type(job.options)(root=str(job.root), peer=True)
    job.begin()
    ranks = job.train()
    for rank in ranks:
        rank.save(5, tiers=["memory", "peer"])
    job.until(lambda: all(a.records("snapshot_copied") for a in job.agents), "the copies")
    assert job.complete() == []
    for rank in ranks:
        rank.leave()
    job.of("n1").close()
    job.agents = [a for a in job.agents if a.node != "n1"]
    job.begin(1, ("n0", "n2"))
    again = [job.rank(job.of(node), number, 2, 1) for number, node in enumerate(("n0", "n2"))]
    for rank in again:
        rank.send("restore", digest=None, rejected=[], local=True, round=0)
    job.until(lambda: all(r.last("choice") for r in again), "a choice")
    choices = [r.last("choice") or {} for r in again]
    assert [(c["source"], c["step"]) for c in choices] == [("peer", 5)] * 2
    for rank in again:
        rank.send_layout(make_layout(rank.rank, 2, {"w": 70_000}, {"b": 1_000}))
    job.until(lambda: all(r.arena is not None for r in again), "snapshot memory")
    arena = again[1].arena
    assert arena is not None
    slot = arena.slots[int(choices[1]["slot"])]
    assert slot.view().step == 5
    assert set(memoryview(slot.payload(arena.layout.entries[0])).cast("f").tolist()) == {1005.0}
    for rank in again:
        rank.save(6, tiers=["memory", "peer", "shared"])
    job.until(lambda: job.is_durable(again, 6), "the next save")
