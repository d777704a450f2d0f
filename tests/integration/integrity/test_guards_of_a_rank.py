"""What a rank sees of its losses and gradients in passing: real optimizers, a real board."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from torch import nn

from steadyrun.core import layout
from steadyrun.core.board import Board
from steadyrun.core.guards import LEAST, LOSS, NORM, Signal
from steadyrun.watch.integrity import Integrity
from steadyrun.watch.marks import make_marks
from steadyrun.watch.torchhooks import wrap_clipping


class Asked(Integrity):
    """Notes the checks out of turn that it is asked for."""

    asked: list[int]

    def request(self, step: int) -> None:
        before = self._requested
        super().request(step)
        if self._requested != before:
            self.asked.append(step)


class Rank:
    """A training loop with hooks on its one optimizer."""

    def __init__(self, folder: Path, every: int) -> None:
        buffer = bytearray((layout.HEADER_WORDS + layout.SLOT_WORDS) * 8)
        header = memoryview(buffer).cast("Q")
        header[layout.H_SLOTS] = 1
        header[layout.H_BASE_NS] = time.monotonic_ns() - 1_000_000
        self.board = Board(folder / "none", cast(mmap, buffer))
        base = self.board.slot_base(0)
        self.marks = make_marks(self.board.words, base, self.board.base_ns, os.getpid(), 0, 0)
        self.said: list[str] = []
        self.asked: list[int] = []
        self.checks = Asked(self.board.words, base, self.marks, 0, 0, str(folder), every, self.said.append)
        self.checks.asked = self.asked
        torch.manual_seed(3)
        self.model = nn.Linear(6, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.optimizer.register_step_post_hook(lambda *_: self.marks.step_seen(None))
        self.optimizer.register_step_pre_hook(self.checks.update_begins)
        self.optimizer.register_step_post_hook(self.checks.update_ends)
        self.clip: Any = None

    def step(self, scale: float = 1.0) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(4, 6)).sum().mul(scale).backward()
        if self.clip is not None:
            self.clip(self.model.parameters(), 1.0)
        self.optimizer.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @property
    def signals(self) -> tuple[Signal, ...]:
        return self.board.integrity(0).signals

    @property
    def count(self) -> int:
        return self.board.integrity(0).checks

    def close(self) -> None:
        if self.checks._ring is not None:
            self.checks._ring.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[Rank] = []

    def begin(every: int = 1000) -> Rank:
        made.append(Rank(tmp_path, every))
        return made[-1]

    yield begin
    for rank in made:
        rank.close()


def test_a_loss_that_spikes_asks_for_a_check_after_the_next_update(make: Any) -> None:
    rank = make()
    rank.train(3)
    for _ in range(LEAST):
        rank.checks.loss(1.0)
    assert rank.count == 2 + 1, "after load, after the first step, before the second"
    rank.checks.loss(torch.tensor([5.0]))
    assert rank.asked == [3]
    (signal,) = rank.signals
    assert (signal.step, signal.what, signal.value, signal.usual) == (2, LOSS, 5.0, 1.0)
    rank.train(4)
    assert rank.count == 3 + 2, "after step 3, and before the update of step 4"
    assert rank.said == []


def test_a_loss_that_is_not_finite_is_told_at_once(make: Any) -> None:
    rank = make()
    rank.step()
    rank.checks.loss(float("nan"))
    rank.checks.loss("nonsense")
    assert [s.value for s in rank.signals] == [None]
    assert rank.asked == [1]


def test_gradients_are_measured_at_checks_only(make: Any) -> None:
    rank = make(10)
    rank.train(LEAST * 10)
    assert rank.checks._guards.norms == LEAST
    rank.step(50.0)
    assert rank.signals == (), "no check was due"
    rank.train(8)
    rank.step(50.0)
    (signal,) = rank.signals
    exact = torch.cat([p.grad.flatten() for p in rank.model.parameters() if p.grad is not None]).norm().item()
    assert (signal.what, signal.step) == (NORM, LEAST * 10 + 8)
    assert signal.value == pytest.approx(exact)
    assert signal.usual == pytest.approx(exact / 50)


def test_a_gradient_that_is_not_finite_is_named_and_looked_at_again(make: Any) -> None:
    rank = make(5)
    rank.train(4)
    rank.step(float("inf"))
    assert rank.said == ["the gradient of 2 of 2 tensors is not finite: weight, bias"]
    rank.step(float("inf"))
    assert [s.step for s in rank.signals] == [3, 4], "after one the next gradients are measured, too"
    assert rank.asked == [4, 5]
    assert len(rank.said) == 1


def test_the_norm_that_clipping_computes_is_seen_at_each_step_and_costs_no_pass(make: Any) -> None:
    module: Any = type(torch.nn.utils.clip_grad)("torch.nn.utils.clip_grad")
    module.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_
    rank = make(10)
    wrap_clipping(rank.checks.clipped)(module)
    rank.clip = module.clip_grad_norm_
    assert rank.clip.__name__ == "clip_grad_norm_"
    rank.train(LEAST + 1)  # of the first update it is not looked at
    rank.step(50.0)
    (signal,) = rank.signals
    assert (signal.what, signal.step) == (NORM, LEAST)
    assert signal.value is not None
    assert signal.value > 100, "of the gradient before it is clipped"
    assert rank.checks._guards.norms == 0


@pytest.mark.slow
def test_a_compiled_call_of_clipping_does_not_break_the_graph(make: Any) -> None:
    module: Any = type(torch.nn.utils.clip_grad)("torch.nn.utils.clip_grad")
    module.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_
    told: list[Any] = []
    wrap_clipping(told.append)(module)
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.full((3,), 2.0)
    compiled = torch.compile(lambda: module.clip_grad_norm_([weight], 1.0), backend="eager", fullgraph=True)
    assert compiled().item() == pytest.approx(12**0.5)
    assert told == []
    module.clip_grad_norm_([weight], 1.0)
    assert len(told) == 1


def test_a_check_that_the_agent_orders_is_made_at_that_step(make: Any) -> None:
    rank = make()
    rank.train(3)
    before = rank.count
    rank.board.words[layout.H_CHECK_AT] = 6 + 1
    rank.train(3)
    assert rank.count == before
    rank.train(2)
    assert rank.count == before + 2, "after step 6, and before the update of step 7"


def test_scaled_gradients_are_left_alone(make: Any) -> None:
    rank = make(1)
    rank.train(3)
    rank.optimizer.grad_scale = torch.tensor(65536.0)
    rank.checks.update_begins(rank.optimizer, (), {})
    assert rank.checks._guards.norms == 2
    rank.optimizer.grad_scale = None
    rank.checks.update_begins(rank.optimizer, (), {})
    assert rank.checks._guards.norms == 3


def test_a_norm_whose_update_is_left_out_counts_for_nothing(make: Any) -> None:
    rank = make()
    rank.train(3)
    rank.checks.clipped(torch.tensor(float("inf")))  # a GradScaler then skips the optimizer's step
    rank.checks.clipped(torch.tensor(1.0))
    rank.step()
    assert rank.signals == ()
    rank.checks.clipped(torch.tensor(float("inf")))
    rank.optimizer.found_inf = torch.tensor(1.0)  # or has the optimizer itself skip it
    rank.checks.update_begins(rank.optimizer, (), {})
    assert rank.signals == ()
    rank.optimizer.found_inf = None
    rank.checks.clipped(torch.tensor(float("inf")))
    rank.step()
    assert [s.what for s in rank.signals] == [NORM]


def test_numbers_of_any_kind_are_losses(make: Any) -> None:
    rank = make()
    rank.train(1)
    for value in (numpy.float32("inf"), torch.tensor(float("inf")), float("inf"), torch.full((1, 1), float("nan"))):
        rank.checks.loss(value)
    assert len(rank.signals) == 4
    rank.checks.loss(torch.ones(3))
    rank.checks.loss("nonsense")
    assert len(rank.signals) == 4
    assert rank.checks.is_on


def test_what_norms_cost_is_in_what_checks_cost(make: Any) -> None:
    rank = make(2)
    rank.train(20)
    guards = rank.checks._guards
    assert guards.cost_ns > 0
    words = rank.board.words
    told = int(words[rank.board.slot_base(0) + layout.S_HASH_COST])
    assert told > rank.checks._cost_ns
