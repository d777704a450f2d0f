"""What a rank tells of the bytes it holds, in one process: the hooks of real optimizers, a real board and ring."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from steadyrun.core import layout
from steadyrun.core.board import Board
from steadyrun.core.integrity import RankPlan, RingReader, Roots
from steadyrun.integrity.fingerprint import fingerprint
from steadyrun.integrity.location import differing_leaves, locate_word
from steadyrun.testing.flipping import CannotFlipError, Flipped, flip, flip_gradient
from steadyrun.watch.integrity import Integrity
from steadyrun.watch.marks import make_marks


class Rank:
    """One rank's checks on a board of its own; hooks are on the optimizers given, not on all of this process."""

    def __init__(self, folder: Path, every: int | None) -> None:
        self.folder = folder
        buffer = bytearray((layout.HEADER_WORDS + layout.SLOT_WORDS) * 8)
        header = memoryview(buffer).cast("Q")
        header[layout.H_SLOTS] = 1
        header[layout.H_BASE_NS] = time.monotonic_ns() - 1_000_000
        self.board = Board(folder / "none", cast(mmap, buffer))  # all that is asked of a mapping is to be a buffer
        base = self.board.slot_base(0)
        self.marks = make_marks(self.board.words, base, self.board.base_ns, os.getpid(), 3, 1)
        self.said: list[str] = []
        self.checks = Integrity(self.board.words, base, self.marks, 3, 1, str(folder), every, self.said.append)
        self.reader: RingReader | None = None
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.watch(self.optimizer, marks=True)

    def watch(self, optimizer: torch.optim.Optimizer, marks: bool) -> None:
        if marks:
            optimizer.register_step_post_hook(lambda *_: self.marks.step_seen(None))
        optimizer.register_step_pre_hook(self.checks.update_begins)
        optimizer.register_step_post_hook(self.checks.update_ends)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.randn(4, 6)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def told(self) -> list[Roots]:
        words = self.board.integrity(0)
        assert words.ring_fd is not None
        if self.reader is None:
            self.reader = RingReader.open(os.getpid(), words.ring_fd)
        found, _, lost = self.reader.read(0)
        assert not lost
        return found

    def moments(self) -> list[tuple[str, int]]:
        return [(r.moment, r.step) for r in self.told()]

    def roots(self, moment: str, step: int) -> dict[str, int]:
        (found,) = (r for r in self.told() if (r.moment, r.step) == (moment, step))
        return RankPlan.load(self.folder, found.generation).by_name(found.roots)

    def ask(self, **request: Any) -> dict[str, Any]:
        answer = self.checks.answer(request)
        assert answer is not None
        return answer

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
        ring = self.checks._ring
        if ring is not None:
            ring.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def begin(every: int | None = 5) -> Rank:
        made.append(Rank(tmp_path, every))
        return made[-1]

    yield begin
    for rank in made:
        rank.close()


def test_checks_come_after_load_after_the_first_step_and_then_each_interval(start: Callable[..., Rank]) -> None:
    rank = start()
    rank.train(11)
    pairs = [("after_step", 0), ("before_step", 1), ("after_step", 4), ("before_step", 5), ("after_step", 9)]
    assert rank.moments() == [("loaded", -1), *pairs, ("before_step", 10)]
    words = rank.board.integrity(0)
    assert (words.state, words.interval, words.checks, words.generation, words.ring) == ("on", 5, 7, 2, 1)
    assert words.cost_s > 0
    assert words.step_s > 0
    assert rank.said == []


def test_roots_are_those_of_parameters_and_state(start: Callable[..., Rank]) -> None:
    rank = start()
    rank.train(5)
    told = rank.roots("after_step", 4)
    weight = rank.model[0].weight
    assert told["0.weight"] == fingerprint(weight).root
    assert told["optimizer.0.weight.exp_avg"] == fingerprint(rank.optimizer.state[weight]["exp_avg"]).root
    assert not [name for name in told if "running" in name], "buffers differ by design unless they are named"
    loaded = rank.roots("loaded", -1)
    assert set(loaded) == {n for n, _ in rank.model.named_parameters()}
    assert loaded["0.weight"] != told["0.weight"]


def test_nothing_changes_between_updates_of_a_healthy_rank(start: Callable[..., Rank]) -> None:
    rank = start(1)
    rank.train(6)
    for step in range(5):
        assert rank.roots("after_step", step) == rank.roots("before_step", step + 1)


@pytest.mark.parametrize("target", ["param", "optim"])
def test_a_flipped_bit_is_seen_before_the_next_update_and_found_from_sums(
    start: Callable[..., Rank], target: str
) -> None:
    rank = start()
    rank.train(5)
    done = flip(target, None, None, None, "seed", rank.checks.watched)
    rank.train(1)
    left, found = rank.roots("after_step", 4), rank.roots("before_step", 5)
    assert [name for name in left if left[name] != found[name]] == [done.tensor]
    own, other = (
        [int(leaf, 16) for leaf in rank.ask(cmd="leaves", tensor=done.tensor, step=step, moment=moment)["leaves"]]
        for step, moment in ((5, "before_step"), (4, "after_step"))
    )
    (leaf,) = differing_leaves(own, other)
    word = locate_word(own[leaf], other[leaf])
    assert word is not None
    assert (word.elements(leaf, 4), word.element_bit(4)) == ((done.element,), done.bit)


def test_bytes_after_a_later_step_can_be_had(start: Callable[..., Rank]) -> None:
    rank = start()
    rank.train(3)
    assert rank.ask(cmd="capture", tensor="0.weight", leaves=[0], step=4) == {"newest_step": 2}
    assert rank.ask(cmd="captured") == {"captures": []}
    rank.train(2)
    held = rank.model[0].weight.detach().numpy().tobytes()
    rank.train(2)
    (captured,) = rank.ask(cmd="captured")["captures"]
    assert (captured["tensor"], captured["step"], captured["leaf"]) == ("0.weight", 4, 0)
    assert base64.b64decode(captured["bytes"]) == held


def test_what_cannot_be_told_is_an_error_with_a_reason(start: Callable[..., Rank]) -> None:
    rank = start()
    rank.train(2)
    with pytest.raises(ValueError, match="only the newest checks"):
        rank.ask(cmd="leaves", tensor="0.weight", step=1, moment="after_step")
    with pytest.raises(ValueError, match="no such tensor"):
        rank.ask(cmd="leaves", tensor="9.weight", step=0, moment="after_step")
    with pytest.raises(ValueError, match="step 1 is done"):
        rank.ask(cmd="capture", tensor="0.weight", leaves=[0], step=1)
    assert rank.checks.answer({"cmd": "stacks"}) is None


def test_saves_are_checked_once(start: Callable[..., Rank]) -> None:
    rank = start(50)
    rank.train(3)
    rank.checks.aside_begins("checkpointing")
    rank.checks.aside_begins("checkpointing")
    rank.checks.aside_begins("evaluation")
    rank.train(1)
    assert rank.moments()[-2:] == [("checkpoint", 2), ("before_step", 3)]


def test_steps_that_the_script_marks_count(start: Callable[..., Rank]) -> None:
    rank = start(4)
    rank.marks.observe(timed=rank.checks.step_marked)
    for step in range(100, 108):
        rank.train(1)
        rank.marks.step(step)
    assert rank.moments()[-3:] == [("after_step", 103), ("before_step", 104), ("after_step", 107)]


def test_an_update_inside_another_is_no_update_yet(start: Callable[..., Rank]) -> None:
    rank = start(1)
    rank.train(1)
    outer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    rank.checks.update_begins(outer, (), {})
    rank.train(1)
    assert rank.moments()[-1] == ("before_step", 1), "checked when the outer one begins, not when the inner one ends"
    rank.checks.update_ends(outer, (), {})
    assert rank.moments()[-1] == ("after_step", 1)


def test_an_update_that_raised_does_not_end_the_checks(start: Callable[..., Rank]) -> None:
    rank = start(1)
    rank.train(1)
    rank.checks.update_begins(rank.optimizer, (), {})  # whose end never comes
    rank.train(2)
    assert rank.moments()[-1] == ("after_step", 2)


def test_a_second_optimizer_has_its_own_tensors_and_its_update_is_no_change_at_rest(
    start: Callable[..., Rank],
) -> None:
    rank = start(1)
    critic = nn.Linear(3, 1)
    second = torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9)
    rank.watch(second, marks=False)
    for _ in range(4):
        rank.train(1)
        critic(torch.randn(2, 3)).sum().backward()
        second.step()
    newest = rank.told()[-1]
    plan = RankPlan.load(rank.folder, newest.generation)
    assert {"model0.0.weight", "model1.weight", "optimizer1.model1.weight.momentum_buffer"} <= {
        t.name for t in plan.tensors
    }
    assert rank.roots("after_step", 2) == rank.roots("before_step", 3)
    assert rank.said == []


def test_what_the_script_declares_is_in_the_plan(start: Callable[..., Rank]) -> None:
    rank = start()
    rank.checks.declare({"2.*": range(2, 6)}, ["*.running_mean"])
    rank.train(1)
    plan = RankPlan.load(rank.folder, rank.board.integrity(0).generation)
    (group,) = (g for g in plan.groups if g.has_replicas)
    assert group.ranks == (2, 3, 4, 5)
    assert {t.name for t in plan.tensors[group.first : group.first + group.count]} == {"2.weight", "2.bias"}
    assert plan.tensor("1.running_mean") is not None


def test_an_error_of_ours_ends_the_checks_and_not_the_training(
    start: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = start(1)
    rank.train(2)

    def broken(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Integrity, "_hash", broken)
    rank.train(3)
    assert rank.said == ["the bytes of this rank are no longer checked: RuntimeError: no memory"]
    assert rank.board.integrity(0).state == "failed"
    assert rank.marks.last_step() == 4


def test_dear_checks_come_less_often(start: Callable[..., Rank]) -> None:
    rank = start(None)
    rank.train(250)
    words = rank.board.integrity(0)
    assert words.interval > 50
    assert words.interval % 50 == 0
    assert (words.interval // 50) & (words.interval // 50 - 1) == 0


def test_a_gradient_is_flipped_once_before_anybody_takes_it(start: Callable[..., Rank]) -> None:
    rank = start()
    rank.train(1)
    seen: list[Flipped] = []
    name = flip_gradient("2.bias", 1, 30, "seed", seen.append, rank.checks.watched)
    assert (name, seen) == ("2.bias", [])
    rank.model(torch.ones(4, 6)).sum().backward()
    wrong = rank.model[2].bias.grad
    assert wrong is not None
    assert [(f.element, f.bit, f.before ^ f.after) for f in seen] == [(1, 30, 1 << 30)]
    assert wrong.view(torch.int32)[1].item() == seen[0].after
    rank.optimizer.zero_grad()
    rank.model(torch.ones(4, 6)).sum().backward()
    assert len(seen) == 1


def test_a_bit_that_is_not_there_cannot_be_flipped(start: Callable[..., Rank]) -> None:
    rank = start()
    rank.train(1)
    for tensor, element, bit, why in (
        ("x", 0, 0, "no tensor 'x'"),
        ("2.bias", 2, 0, "element"),
        ("2.bias", 0, 32, "bit"),
    ):
        with pytest.raises(CannotFlipError, match=why):
            flip("param", tensor, element, bit, "seed", rank.checks.watched)
