"""Training under DDP in one process, in the ways of argv[1], with replays and without; prints what came of it as JSON.

One rank is its own neighbour: all of a replay happens here, except that another rank makes it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from mmap import mmap
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steadyrun.core import layout
from steadyrun.core.board import Board
from steadyrun.core.replay import ReplayReport, report_path, why_off_path
from steadyrun.testing.flipping import flip_gradient
from steadyrun.watch.integrity import Integrity
from steadyrun.watch.marks import make_marks
from steadyrun.watch.replay import Replay

EVERY = 5


class Watched:
    """What the bootstrap puts in place, on the optimizer given."""

    def __init__(self, folder: Path, optimizer: torch.optim.Optimizer, every: int | None, is_on: bool) -> None:
        self.folder = folder
        buffer = bytearray((layout.HEADER_WORDS + layout.SLOT_WORDS) * 8)
        header = memoryview(buffer).cast("Q")
        header[layout.H_SLOTS] = 1
        header[layout.H_BASE_NS] = time.monotonic_ns() - 1_000_000
        self.board = Board(folder / "none", cast(mmap, buffer))
        words, base = self.board.words, self.board.slot_base(0)
        self.marks = make_marks(words, base, self.board.base_ns, os.getpid(), 0, 0)
        self.checks = Integrity(words, base, self.marks, 0, 0, str(folder), 50, print)
        self.replay = Replay(words, base, self.checks, 0, 0, str(folder), every)

        def marked(step: int) -> None:
            self.checks.step_marked(step)
            self.replay.step_marked(step)

        self.marks.observe(timed=marked)
        optimizer.register_step_post_hook(lambda *_: self.marks.step_seen(None))
        optimizer.register_step_pre_hook(self.checks.update_begins)
        if is_on:
            optimizer.register_step_pre_hook(self.replay.update_begins)
        else:
            self.marks.observe(timed=self.checks.step_marked)
        optimizer.register_step_post_hook(self.checks.update_ends)

    def told(self) -> dict[str, Any]:
        words = self.board.integrity(0).replay
        assert words is not None
        off = why_off_path(self.folder)
        reports = [ReplayReport.load(self.folder, n + 1) for n in range(words.reports)]
        assert not report_path(self.folder, words.reports + 1).exists()
        return {
            "state": words.state,
            "clean": words.clean,
            "clean_step": words.clean_step,
            "interval": words.interval,
            "cost_s": words.cost_s,
            "why": off.read_text() if off.exists() else "",
            "reports": [json.loads(r.to_json()) for r in reports],
        }


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.seen, self.second = nn.Linear(16, 48), nn.BatchNorm1d(48), nn.Linear(48, 16)
        self.unused = nn.Linear(2, 2)
        self.drop = nn.Dropout(0.2)
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(torch.relu(self.seen(self.first(x))))
        if self.kind == "generator":
            x = x * torch.rand(48, generator=self.own)
        if self.kind == "random":
            x = x * (1 + time.perf_counter_ns() % 1000 / 1000)
        if self.kind == "collective":
            dist.all_reduce(torch.ones(1))
        out: torch.Tensor = self.second(x)
        return out


def train(kind: str, steps: int, every: int | None, is_on: bool) -> dict[str, Any]:
    torch.manual_seed(11)
    random.seed(11)
    net = Net(kind)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    if kind == "hook":
        net.first.weight.register_hook(lambda g: g * 0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        watched = Watched(Path(folder), optimizer, every, is_on)
        for step in range(steps):
            optimizer.zero_grad()
            if kind == "flip" and step == 14:
                flip_gradient("second.weight", 5, 9, "seed", lambda _: None, watched.checks.watched)
            losses.append(one_step(kind, model))
            optimizer.step()
        told = watched.told() if is_on else {}
        state = [p.detach().double().sum().item() for p in model.parameters()]
        state += [b.double().sum().item() for b in model.buffers()]
        grads = [None if p.grad is None else p.grad.double().sum().item() for p in model.parameters()]
        numbers = [torch.rand(1).item(), random.random()]
        hooks = [len(p._backward_hooks or ()) for p in model.parameters()]
        slots = [type(m.__dict__.get("_compiled_call_impl")).__name__ for m in model.modules()]
    return {"losses": losses, "after": [state, grads, numbers, hooks, slots], **told}


@contextmanager
def syncing(model: DistributedDataParallel, is_last: bool) -> Iterator[None]:
    with nullcontext() if is_last else model.no_sync():
        yield


def one_step(kind: str, model: DistributedDataParallel) -> float:
    def batch() -> torch.Tensor:
        return torch.randn(12, 16)

    if kind == "accumulate":
        total = 0.0
        for micro in range(3):
            with syncing(model, micro == 2):
                loss = model(batch()).square().mean()
                loss.backward()
            total += loss.item()
        return total
    if kind == "twice":
        loss = model(batch()).square().mean() + model(batch()).mean()
    elif kind == "decay":
        loss = model(batch()).square().mean() + 0.01 * model.module.first.weight.square().sum()
    elif kind == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch()).float().square().mean()
    else:
        loss = model(batch()).square().mean()
    loss.backward()
    return loss.item()


def main() -> None:
    kinds, store = sys.argv[1].split(","), sys.argv[2]
    dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
    out: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        steps = 50 if kind in ("plain", "accumulate", "autocast") else 22
        with_replays = train(kind, steps, None if kind == "auto" else EVERY, is_on=True)
        without = train(kind, steps, EVERY, is_on=False)
        same = {f"same_{what}": with_replays[what] == without[what] for what in ("losses", "after")}
        out[kind] = {**with_replays, **same}
    print(json.dumps(out))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
