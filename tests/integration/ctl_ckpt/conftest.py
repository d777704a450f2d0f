"""Checkpoints of torch and of steadyrun's own writer, and steadyctl called on them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from steadyctl_calls import Told, ckpt

from steadyrun.checkpoint import commit
from steadyrun.checkpoint.dcpfile import metadata_bytes
from steadyrun.checkpoint.layout import Entry, Layout, ObjectEntry, place, rank_key
from steadyrun.checkpoint.manifest import Manifest
from steadyrun.checkpoint.planning import plan
from steadyrun.checkpoint.shardfile import write_rank_files


@pytest.fixture(name="ckpt")
def call_ckpt() -> Callable[..., Told]:
    return ckpt


def _state(seed: int) -> dict[str, Any]:
    """Every kind of dtype that matters, a scalar, something empty, an optimizer, and objects."""
    import torch

    torch.manual_seed(seed)
    return {
        "model": {
            "layers.0.weight": torch.randn(48, 32),
            "layers.0.bias": torch.randn(32).bfloat16(),
            "half": torch.randn(5, 3).half(),
            "double": torch.randn(7, dtype=torch.float64),
            "e4m3": torch.randn(16).to(torch.float8_e4m3fn),
            "e5m2": torch.randn(16).to(torch.float8_e5m2),
            "complex": torch.randn(3, dtype=torch.complex64),
            "counts": torch.arange(6) + seed,
            "mask": torch.arange(6) % 2 == seed % 2,
            "scalar": torch.tensor(float(seed)),
            "empty": torch.empty(0, 4),
        },
        "optimizer": {
            "state": {"layers.0.weight": {"exp_avg": torch.randn(48, 32), "step": torch.tensor(float(100 * seed))}},
            "lr": 0.1 * seed,
        },
        "epoch": seed,
    }


@pytest.fixture
def state() -> Callable[[int], dict[str, Any]]:
    return _state


@pytest.fixture
def dcp_folder(tmp_path: Path) -> Callable[..., Path]:
    """``dcp_folder(1)``: what ``dcp.save`` writes of ``state(1)``, in step-1; or of another state, elsewhere."""

    def write(seed: int, state: Mapping[str, Any] | None = None, name: str | None = None) -> Path:
        import torch.distributed.checkpoint as dcp

        folder = tmp_path / (name or f"step-{seed}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch.distributed not being initialised, which is meant
            dcp.save(dict(state or _state(seed)), checkpoint_id=folder, no_dist=True)
        return folder

    return write


@pytest.fixture
def load() -> Callable[[Path, dict[str, Any]], dict[str, Any]]:
    """What plain ``dcp.load`` makes of a folder."""

    def call(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=folder, no_dist=True)
        return state

    return call


@pytest.fixture
def own_folder() -> Callable[..., Path]:
    """``own_folder(root, 12)``: a committed checkpoint of two ranks in steadyrun's own format.

    Rank 0 holds the upper, rank 1 the lower half of ``model.weight``, of zeros plus the step.
    """

    def write(root: Path, step: int, attempt: int = 0, created_unix_s: float | None = None) -> Path:
        import torch

        half = torch.full((512, 64), float(step))
        layouts = []
        for rank in (0, 1):
            shard = Entry(
                "model.weight", ("model", "weight"), "float32", (1024, 64), (512 * rank, 0), (512, 64), 0, half.nbytes
            )
            bias_at = place([half.nbytes, 256])[1]
            bias = Entry("model.bias", ("model", "bias"), "float32", (64,), (0,), (64,), bias_at, 256)
            rng = rank_key(rank, "rng")
            layouts.append(Layout(rank, 2, (shard, bias), (ObjectEntry(rng, (rng,)), ObjectEntry("epoch", ("epoch",)))))
        planned = plan(layouts)
        partial = commit.begin(root, step, attempt)
        blob = io.BytesIO()
        torch.save({"step": step}, blob)
        written = []
        for rank, layout in enumerate(layouts):
            payloads = {"model.weight": half, "model.bias": half[0]}
            written.append(
                write_rank_files(
                    partial,
                    layout,
                    planned.parts[rank],
                    lambda e, payloads=payloads: memoryview(payloads[e.key].numpy()).cast("B"),
                    [blob.getvalue(), blob.getvalue()],
                )
            )
        manifest = Manifest(
            step=step,
            attempt=attempt,
            run_id="demo",
            world_size=2,
            created_unix_s=created_unix_s or 1_700_000_000.0 + step,
            torch="2.13.0",
            steadyrun="0.1.0",
            files=tuple(f for w in written for f in w.files),
            covered=("model", "rng"),
            not_covered=("no loader was given",),
            mesh={"dp": 2},
            samples=step * 32,
            replicas_compared=1,
        )
        return commit.commit(root, partial, manifest, metadata_bytes(planned, layouts, written))

    return write
