"""One rank of the test of what checks add: collectives of DDP with and without, and the peak of memory of a check.

Arguments: file of the store, rank, world size, folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from mmap import mmap
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steadyrun.core import layout
from steadyrun.core.board import Board
from steadyrun.watch.integrity import Integrity
from steadyrun.watch.marks import make_marks

STEPS = 10
MIB = 1 << 20
WIDTH = 1536


def checks_of(optimizer: torch.optim.Optimizer, rank: int, folder: Path) -> tuple[Integrity, Board]:
    """Checks after each step of *optimizer*."""
    buffer = bytearray((layout.HEADER_WORDS + layout.SLOT_WORDS) * 8)
    header = memoryview(buffer).cast("Q")
    header[layout.H_SLOTS] = 1
    header[layout.H_BASE_NS] = time.monotonic_ns() - 1_000_000
    board = Board(folder / "none", cast(mmap, buffer))
    base = board.slot_base(0)
    marks = make_marks(board.words, base, board.base_ns, os.getpid(), rank, 0)
    folder.mkdir(parents=True, exist_ok=True)
    checks = Integrity(board.words, base, marks, rank, 0, str(folder), 1, lambda text: print(text, file=sys.stderr))
    optimizer.register_step_post_hook(lambda *_: marks.step_seen(None))
    optimizer.register_step_pre_hook(checks.update_begins)
    optimizer.register_step_post_hook(checks.update_ends)
    return checks, board


def collectives(rank: int, folder: Path | None) -> tuple[int, int]:
    """How many a short training makes, and how many checks were made within."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)))
    optimizer = torch.optim.AdamW(model.parameters())
    checked = None if folder is None else checks_of(optimizer, rank, folder)
    group = dist.group.WORLD
    assert group is not None
    before = group._get_sequence_number_for_group()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        if checked is not None:
            checked[0].loss(1.0)
    made = group._get_sequence_number_for_group() - before
    if checked is None:
        return made, 0
    assert checked[0].watched[0].ranks == tuple(range(dist.get_world_size()))
    return made, checked[1].integrity(0).checks


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def memory(folder: Path, dtype: torch.dtype) -> tuple[int, int]:
    """By how much a step with a check and a norm of gradients raises the peak above one without, and what it reads."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(6)))
    for p in model.parameters():
        nn.init.constant_(p, 0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    checks, board = checks_of(optimizer, 0, folder)
    for _ in range(2):
        model(torch.randn(1, WIDTH, dtype=dtype)).sum().backward()
        optimizer.step()
    made, norms = board.integrity(0).checks, checks._guards.norms
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before = peak_bytes()
    checks.update_begins(optimizer, (), {})  # the norm of gradients, and the check before the update
    checks._check(2, 2)  # as after an update
    grown = peak_bytes() - before
    assert board.integrity(0).checks == made + 2
    assert checks._guards.norms == norms + 1
    return grown, sum(p.numel() * p.element_size() for p in model.parameters())


def main() -> None:
    store, rank, world, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]) / sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    without, _ = collectives(rank, None)
    with_checks, checks = collectives(rank, folder / "counted")
    told = {"without": without, "with": with_checks, "checks": checks}
    dist.destroy_process_group()
    if rank == 0:
        told["memory"] = {str(d): memory(folder / str(d), d) for d in (torch.float32, torch.bfloat16)}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
