"""A training state whose every element follows from the step, so that a checkpoint can be checked to the last bit.

Used by scripts/checkpointed.py in the job and by the tests, which read the folders with plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

COLUMNS = 256


@dataclass(frozen=True)
class Part:
    """One tensor: split over the ranks along its first dimension, or the same on all of them."""

    name: str
    dtype: torch.dtype
    rows: int
    is_split: bool


def parts(rows: int, world_size: int) -> list[Part]:
    """*rows* per rank of the large ones."""
    return [
        *(Part(f"large{i}", torch.float32, rows * world_size, True) for i in range(4)),
        Part("brief", torch.bfloat16, rows * world_size, True),
        Part("whole", torch.int64, 8, False),
        Part("mask", torch.bool, 4, False),
    ]


def content(part: Part, number: int, step: int, first_row: int, rows: int) -> Tensor:
    """What *rows* of the *number*-th part are once *step* is done; -1 before the first."""
    at = torch.arange(first_row * COLUMNS, (first_row + rows) * COLUMNS, dtype=torch.int64)
    value = (at * 3 + number * 1009 + (step + 1) * 7919) % 65_521
    if part.dtype is torch.bfloat16:
        value = value % 251  # exact up to 256
    elif part.dtype is torch.bool:
        value = value % 3
    return value.to(part.dtype).view(rows, COLUMNS)


def wrong_elements(folder: Path, step: int, rows: int, world_size: int) -> dict[str, int]:
    """Read the folder with plain ``dcp.load`` as one process: what differs from the state after *step*."""
    import torch.distributed.checkpoint as dcp

    known = parts(rows, world_size)
    model: dict[str, Any] = {p.name: torch.zeros(p.rows, COLUMNS, dtype=p.dtype) for p in known}
    dcp.load({"model": model}, checkpoint_id=folder, no_dist=True)
    wrong = {}
    for number, part in enumerate(known):
        different = int((model[part.name] != content(part, number, step, 0, part.rows)).sum())
        if different:
            wrong[part.name] = different
    return wrong
