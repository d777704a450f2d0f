"""Snapshots of ranks, made from state dicts by torch's own planner, and whole checkpoints written from them.

One process plays all ranks: what is sharded lives on a fake process group while its rank's snapshot is taken.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

from steadyrun.checkpoint.commit import begin, commit
from steadyrun.checkpoint.dcpfile import metadata_bytes
from steadyrun.checkpoint.layout import Entry, Layout, ObjectEntry, place
from steadyrun.checkpoint.manifest import Manifest
from steadyrun.checkpoint.planning import plan
from steadyrun.checkpoint.shardfile import WriteOptions, Written, write_rank_files


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """This process is that rank of a job, as far as DTensors can tell. There are no collectives."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()


def distributed(full: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> torch.Tensor:
    """The DTensor of this rank; ``distribute_tensor`` would ask the other ranks, which are not there."""
    sizes, offsets = compute_local_shape_and_global_offset(full.shape, mesh, placements)
    local = full[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Its elements in C order, whatever the dtype."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit, NaNs included."""
    return a.dtype == b.dtype and a.shape == b.shape and raw_bytes(a) == raw_bytes(b)


@dataclass(frozen=True)
class Snapshot:
    """One rank's state, as it lies in memory: *payload* is writable and begins on a page."""

    layout: Layout
    payload: memoryview
    blobs: list[bytes]

    def bytes_of(self, entry: Entry) -> memoryview:
        return self.payload[entry.at_bytes : entry.at_bytes + entry.size_bytes]


def take(state: dict[str, Any], rank: int = 0, world_size: int = 1) -> Snapshot:
    """The snapshot of a state dict whose DTensors, if any, are those of ``fake_rank(rank, world_size)``."""
    import mmap

    flat, paths = flatten_state_dict(state)
    items = [item for key, value in flat.items() for item in _create_write_items(key, value)]
    shards, objects, blobs = [], [], []
    for item in items:
        key = item.index.fqn
        found = find_state_dict_object(flat, item.index)
        if item.type is WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(found, buffer)
            objects.append(ObjectEntry(key, tuple(paths[key])))
            blobs.append(buffer.getvalue())
        else:
            shards.append((item, found))
    at = place([tensor.nbytes for _, tensor in shards])
    entries = tuple(
        Entry(
            item.index.fqn,
            tuple(paths[item.index.fqn]),
            str(tensor.dtype).removeprefix("torch."),
            tuple(item.tensor_data.size),
            tuple(item.tensor_data.chunk.offsets),
            tuple(item.tensor_data.chunk.sizes),
            at_bytes,
            tensor.nbytes,
            item.tensor_data.properties.requires_grad,
        )
        for (item, tensor), at_bytes in zip(shards, at, strict=True)
    )
    layout = Layout(rank, world_size, entries, tuple(objects))
    payload = memoryview(mmap.mmap(-1, max(layout.payload_bytes, 4096)))
    for entry, (_, tensor) in zip(entries, shards, strict=True):
        payload[entry.at_bytes : entry.at_bytes + entry.size_bytes] = raw_bytes(tensor)
    return Snapshot(layout, payload, blobs)


def take_all(state_of: Callable[[int], dict[str, Any]], world_size: int) -> list[Snapshot]:
    """The snapshots of all ranks; *state_of* is called with each rank while this process plays it."""
    out = []
    for rank in range(world_size):
        with fake_rank(rank, world_size):
            out.append(take(state_of(rank), rank, world_size))
    return out


def write_files(
    folder: Path,
    snapshots: Sequence[Snapshot],
    options: WriteOptions = WriteOptions(),  # noqa: B008 - frozen
) -> tuple[list[Written], bytes]:
    """The files of all ranks in *folder*, and the content of ``.metadata``."""
    layouts = [s.layout for s in snapshots]
    made = plan(layouts)
    written = [
        write_rank_files(folder, s.layout, part, s.bytes_of, s.blobs, options)
        for s, part in zip(snapshots, made.parts, strict=True)
    ]
    return written, metadata_bytes(made, layouts, written)


def manifest_of(written: Sequence[Written], step: int, attempt: int = 0) -> Manifest:
    files = tuple(file for w in written for file in w.files)
    return Manifest(step, attempt, "test", len(written), time.time(), torch.__version__, "0", files, ("model",))


def write_checkpoint(
    root: Path,
    step: int,
    snapshots: Sequence[Snapshot],
    attempt: int = 0,
    options: WriteOptions = WriteOptions(),  # noqa: B008 - frozen
) -> Path:
    """A committed checkpoint; returns its folder."""
    partial = begin(root, step, attempt)
    written, metadata = write_files(partial, snapshots, options)
    return commit(root, partial, manifest_of(written, step, attempt), metadata)
