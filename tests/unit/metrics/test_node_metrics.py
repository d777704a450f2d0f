"""The board and the journal as one node's series."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from steadyrun.collectors.metrics.spec import SAMPLES, SPEC
from steadyrun.collectors.metrics.values import Histogram
from steadyrun.collectors.process import ProcessReader
from steadyrun.core import layout
from steadyrun.core.board import Board
from steadyrun.core.journal import Journal
from steadyrun.node.metrics import MOST_SECTIONS, NodeFacts, NodeMetrics, RankLook
from steadyrun.node.sampling import Sampler
from steadyrun.testing.store import ManualClock

FACTS = NodeFacts("run", "n0", "1.0", 2, group_rank=0, nodes=1, world_size=2)


class Node:
    """Two ranks on a board; the clock says what the test sets."""

    def __init__(self, board: Board, journal: Journal, root: Path, facts: NodeFacts = FACTS) -> None:
        self.board, self.now_s = board, 100.0
        self.sampler = Sampler(board, journal, ManualClock(), "n0")
        self.metrics = NodeMetrics(facts, 90.0, 5090.0, lambda: 5000.0, lambda: self.now_s, process=ProcessReader(root))
        for slot in range(2):
            base = board.slot_base(slot)
            board.words[base + layout.S_OWNER_PID] = 1000 + slot
            board.words[base + layout.S_RANK] = slot

    def look(self, **states: str) -> None:
        looks = [RankLook(r, r, 1000 + r, states.get(f"r{r}", "S"), self.board.view(r)) for r in range(2)]
        read = self.sampler.sample(self.now_s, {k.local_rank: (k.rank, k.view) for k in looks})
        self.metrics.take_ranks(self.now_s, looks, read)

    def step(self, slot: int, step: int, seconds: float) -> None:
        base, words = self.board.slot_base(slot), self.board.words
        done = int(words[base + layout.S_STEPS_DONE])
        words[base + layout.S_STEP] = step + 1
        words[base + layout.S_STEP_AT] = int(self.now_s * 1e9) - self.board.base_ns
        words[base + layout.S_STEPS_DONE] = done + 1
        words[base + layout.S_STEP_RING + done % layout.STEP_RING] = int(seconds * 1e9)
        words[base + layout.S_STEP_RING_COUNT] = done + 1

    def get(self, name: str, *labels: str) -> float | None:
        for family, series in self.metrics.series():
            if family.name == f"steadyrun_{name}":
                value = series.get(labels)
                assert not isinstance(value, Histogram)
                return value
        return None


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board.create_anonymous(2)
    board.base_ns = 0
    yield board
    board.close()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.jsonl", "n0")
    yield journal
    journal.close()


@pytest.fixture
def node(board: Board, journal: Journal, tmp_path: Path) -> Node:
    return Node(board, journal, tmp_path)


def test_ranks_as_they_are_now(node: Node) -> None:
    node.step(0, 7, 0.5)
    node.look(r1="Z")
    assert node.get("rank_alive", "0") == 1.0
    assert node.get("rank_alive", "1") == 0.0
    assert node.get("rank_step", "0") == 7.0
    assert node.get("rank_step_time_seconds", "0") == 0.5
    assert node.get("rank_progress_timestamp_seconds", "0") == pytest.approx(5100.0)


def test_state_d_is_timed_from_its_first_look(node: Node) -> None:
    node.look(r0="D")
    node.now_s = 130.0
    node.look(r0="D")
    assert node.get("rank_uninterruptible_seconds", "0") == 30.0
    node.look(r0="R")
    assert node.get("rank_uninterruptible_seconds", "0") == 0.0


def test_steps_become_productive_time(node: Node) -> None:
    node.metrics.read({"type": "rank_started", "attempt": 0, "at_s": 92.0, "at_unix_s": 5092.0})
    first = {"type": "rank_first_step", "attempt": 0, "at_s": 100.0, "at_unix_s": 5100.0, "step": 0, "is_global": True}
    node.metrics.read(first)
    node.step(0, 0, 0.0)
    node.look()
    for i in range(1, 5):
        node.now_s += 0.5
        node.step(0, i, 0.5)
        node.look()
    assert node.get("time_seconds_total", "productive") == pytest.approx(2.0)
    assert node.get("time_seconds_total", "startup") == pytest.approx(8.0)
    node.now_s += 3.0
    total = sum(node.get("time_seconds_total", p) or 0.0 for p in ("productive", "startup", "initialization"))
    assert total + (node.get("time_open_seconds") or 0.0) == pytest.approx(node.get("job_wall_seconds_total"))
    assert node.get("goodput_ratio") == pytest.approx(2.0 / 15.0)


def test_a_hung_rank_is_hung_until_it_moves(node: Node) -> None:
    node.step(1, 3, 0.5)
    node.look()
    suspicion = {"rank": 1, "kind": "no_progress", "since_s": 100.0}
    record = {"type": "suspicion", "attempt": 0, "at_s": 110.0, "at_unix_s": 5110.0, "suspicion": suspicion}
    node.metrics.read({**record, "acts": True})
    node.now_s = 111.0
    node.look()
    assert (node.get("rank_hung", "0"), node.get("rank_hung", "1")) == (0.0, 1.0)
    node.step(1, 4, 11.0)
    node.look()
    assert node.get("rank_hung", "1") == 0.0


def test_only_the_leader_tells_of_the_job(board: Board, journal: Journal, tmp_path: Path) -> None:
    follower = Node(board, journal, tmp_path, replace(FACTS, group_rank=1))
    follower.look()
    names = {f.name for f, _ in follower.metrics.series()}
    assert "steadyrun_time_seconds_total" not in names
    assert "steadyrun_rank_alive" in names
    follower.metrics.begin_attempt(FACTS)
    assert "steadyrun_time_seconds_total" in {f.name for f, _ in follower.metrics.series()}


def test_lag_is_the_worst_of_the_last_minute(node: Node) -> None:
    node.metrics.lagged(100.0, 0.4)
    node.metrics.lagged(110.0, 0.01)
    assert node.get("agent_loop_lag_seconds") == 0.4
    node.metrics.lagged(165.0, 0.02)
    assert node.get("agent_loop_lag_seconds") == 0.02


def test_scripts_cannot_make_histograms_without_end(node: Node) -> None:
    names = {node.metrics._section(f"s{i}") for i in range(100)}
    assert len(names) == MOST_SECTIONS + 1


def test_cpu_time_goes_on_over_attempts(board: Board, journal: Journal, tmp_path: Path) -> None:
    def live(pid: int, ticks: int) -> None:
        folder = tmp_path / str(pid) / "task" / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "children").write_text("")
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (p) S 1 " + "0 " * 9 + f"{ticks} 0 0 0 20 0 1 0 5 0 100 0\n")

    node = Node(board, journal, tmp_path)
    live(1000, 500)
    node.look()
    assert node.get("rank_cpu_seconds_total", "0") == 5.0
    live(2000, 100)
    node.now_s += 10.0
    node.metrics.take_ranks(node.now_s, [RankLook(0, 0, 2000, "S", None)], {})
    assert node.get("rank_cpu_seconds_total", "0") == 6.0
    assert (node.get("rank_resident_memory_bytes", "0") or 0) > 0


def test_limits_are_told_by_stage(node: Node) -> None:
    told = {
        "sections": {"forward": 30.0}, "soft": {"forward": 2.0}, "calibrated": {"forward": {"hard_s": 30.0}},
        "step_s": 300.0, "setup_s": None, "checkpointing_s": 1800.0, "out_of_section_s": None,
    }  # fmt: skip
    node.metrics.take_limits(told)
    assert node.get("section_limit_seconds", "forward", "soft") == 2.0
    assert node.get("section_limit_seconds", "step", "hard") == 300.0
    assert node.get("section_limit_seconds", "setup", "hard") is None
    assert node.get("section_limits_passed_total", "forward", "spared") == 0.0


def test_everything_that_a_node_tells_is_in_the_table(node: Node) -> None:
    node.step(0, 1, 0.1)
    node.look()
    for family, series in node.metrics.series():
        assert family is SPEC[family.name.removeprefix("steadyrun_")]
        assert all(len(labels) == len(family.label_names) for labels in series)
        assert set(family.samples) <= SAMPLES.keys()
