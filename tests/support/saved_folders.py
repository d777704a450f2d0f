"""Checkpoint folders for the tests of reading: plain ``dcp.save`` in a job of real ranks, and ours from one process.

Run as a script, it is one rank of the job: ``python saved_folders.py ROOT`` with torchrun's environment names set.
"""

from __future__ import annotations

import ctypes
import io
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from steadyrun.checkpoint import commit
from steadyrun.checkpoint.dcpfile import metadata_bytes
from steadyrun.checkpoint.layout import Entry, Layout, ObjectEntry, place
from steadyrun.checkpoint.manifest import Manifest
from steadyrun.checkpoint.planning import plan
from steadyrun.checkpoint.shardfile import WriteOptions, write_rank_files

RANKS = 4
DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128),
)


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits, also those of NaNs, that the dtype can have."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, tuple(shape), generator=generator).bool()
    count = dtype.itemsize * torch.Size(shape).numel()
    bits = torch.randint(0, 256, (max(count, 1),), generator=generator, dtype=torch.uint8)[:count]
    return bits.view(dtype).reshape(tuple(shape)) if count else torch.empty(tuple(shape), dtype=dtype)


def every_dtype(seed: int) -> dict[str, Any]:
    """A nested state with a tensor of each dtype and each odd shape, and objects."""
    by_name = {str(d).removeprefix("torch."): d for d in DTYPES}
    parameter = torch.nn.Parameter(random_bits((13, 5), torch.bfloat16, seed))
    complex_values = random_bits((4, 6), torch.complex64, seed + 1)
    return {
        "dtypes": {name: random_bits((7, 11), dtype, seed + i) for i, (name, dtype) in enumerate(by_name.items())},
        "scalars": {name: random_bits((), dtype, seed + i) for i, (name, dtype) in enumerate(by_name.items())},
        "empty": {"one": torch.empty(0), "two": torch.empty(3, 0, 2, dtype=torch.int64)},
        "odd": {
            "transposed": random_bits((40, 9), torch.float32, seed).t(),
            "sliced": random_bits((12, 12), torch.int16, seed)[2:9:2, 1:10],
            "parameter": parameter,
            "conjugated": complex_values.conj(),
            "large": random_bits((301, 1003), torch.float32, seed),
        },
        "list": [random_bits((3,), torch.int64, seed), {"deep": random_bits((2, 2), torch.float32, seed)}, seed],
        "objects": {"text": f"seed {seed}", "numbers": {"lr": 0.1 * seed, "betas": (0.9, 0.95)}, "nothing": None},
    }


# -- plain dcp.save ----------------------------------------------------------------------------------------------------
SHARDED = ("shard0", "shard1", "grid", "hsdp", "whole")
FULL_SHAPE = (37, 26)


def sharded_full(seed: int) -> dict[str, torch.Tensor]:
    """The global tensors of ``sharded_state``."""
    return {name: random_bits(FULL_SHAPE, torch.float32, seed + i) for i, name in enumerate(SHARDED)} | {
        "short": random_bits((3, 5), torch.bfloat16, seed + 9),
        "line": random_bits((29,), torch.int64, seed + 10),
    }


def sharded_state(seed: int, world_size: int, rank: int) -> dict[str, Any]:
    """``sharded_full`` as DTensors over *world_size* ranks, each divided in its own way; also unevenly."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    line = init_device_mesh("cpu", (world_size,))
    grid = init_device_mesh("cpu", (2, world_size // 2) if world_size % 2 == 0 else (1, world_size))
    full = sharded_full(seed)
    ways = {
        "shard0": (line, [Shard(0)]),
        "shard1": (line, [Shard(1)]),
        "grid": (grid, [Shard(0), Shard(1)]),
        "hsdp": (grid, [Replicate(), Shard(0)]),
        "short": (line, [Shard(0)]),
        "line": (line, [Shard(0)]),
    }
    state: dict[str, Any] = {"model": {k: distributed(full[k], *way) for k, way in ways.items()}}
    state["model"]["whole"] = full["whole"].clone()
    state["step"] = seed
    return state


def distributed(full: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> Any:
    """The DTensor of *full*, made without any collective."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(full.shape, mesh, placements)
    local = full
    for d, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        local = local.narrow(d, min(offset, full.shape[d]), size)
    return DTensor.from_local(
        local.contiguous().clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )


def write_foreign(root: Path) -> None:
    """What a job of 4 ranks writes with plain ``dcp.save``: sharded-1, sharded-2, threads-1, dtypes-1."""
    from jobs import free_port

    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(root)],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(RANKS)
    ]
    try:
        limit_s = time.monotonic() + 150
        for rank in ranks:
            assert rank.wait(max(limit_s - time.monotonic(), 1)) == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _be_a_rank(root: Path) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for seed in (1, 2):
        dcp.save(sharded_state(seed, RANKS, rank), checkpoint_id=root / f"sharded-{seed}")
    writer = dcp.FileSystemWriter(root / "threads-1", thread_count=3)
    dcp.save({**sharded_state(1, RANKS, rank), **every_dtype(1)}, storage_writer=writer)
    dcp.save(every_dtype(1), checkpoint_id=root / "dtypes-1")
    dist.destroy_process_group()


# -- ours --------------------------------------------------------------------------------------------------------------
def write_ours(
    root: Path, step: int, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, Any], ranks: int = 2
) -> Path:
    """A committed folder of ours: tensors with rows enough are divided along the first dimension, others replicated."""
    layouts, payloads, blobs = [], [], []
    for rank in range(ranks):
        entries, views = _entries(tensors, rank, ranks)
        layouts.append(Layout(rank, ranks, entries, tuple(ObjectEntry(k, (k,)) for k in objects)))
        payloads.append(views)
        blobs.append([_saved(value) for value in objects.values()])
    planned = plan(layouts)
    partial = commit.begin(root, step, 0)
    written = [
        write_rank_files(
            partial,
            layout,
            part,
            lambda e, views=views: memoryview(_bytes_of(views[e.key])),
            blob,
            WriteOptions(direct=False, sync=False),
        )
        for layout, part, views, blob in zip(layouts, planned.parts, payloads, blobs, strict=True)
    ]
    manifest = Manifest(
        step=step,
        attempt=0,
        run_id="test",
        world_size=ranks,
        created_unix_s=1e9,
        torch=torch.__version__,
        steadyrun="0",
        files=tuple(f for w in written for f in w.files),
    )
    return commit.commit(root, partial, manifest, metadata_bytes(planned, layouts, written))


def _entries(
    tensors: Mapping[str, torch.Tensor], rank: int, ranks: int
) -> tuple[tuple[Entry, ...], dict[str, torch.Tensor]]:
    views: dict[str, torch.Tensor] = {}
    offsets: dict[str, tuple[int, ...]] = {}
    for key, tensor in tensors.items():
        views[key], offsets[key] = tensor.detach().contiguous(), (0,) * tensor.dim()
        if tensor.dim() and tensor.shape[0] >= ranks:
            parts = tensor.detach().tensor_split(ranks)
            views[key] = parts[rank].contiguous()
            offsets[key] = (sum(len(p) for p in parts[:rank]), *offsets[key][1:])
    ats = place([v.numel() * v.element_size() for v in views.values()])
    entries = tuple(
        Entry(
            key,
            (key,),
            str(view.dtype).removeprefix("torch."),
            tuple(tensors[key].shape),
            offsets[key],
            tuple(view.shape),
            at,
            view.numel() * view.element_size(),
        )
        for (key, view), at in zip(views.items(), ats, strict=True)
    )
    return entries, views


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


if __name__ == "__main__":
    _be_a_rank(Path(sys.argv[1]))
