"""Checkpoints that torch itself wrote, once per session; tests damage copies of them."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from steadyctl_calls import Told, ckpt

from steadyrun.checkpoint.kinds import find_checkpoints, read_contents
from steadyrun.checkpoint.verify import Report, verify


@pytest.fixture(name="ckpt")
def call_ckpt() -> Callable[..., Told]:
    return ckpt


@pytest.fixture(scope="session")
def check() -> Callable[[Path], Report]:
    def call(path: Path) -> Report:
        (found,) = find_checkpoints(path).checkpoints
        return verify(read_contents(found), threads=2)

    return call


def _save_dcp(folder: Path, seed: int) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(seed)
    state = {
        "model": {"weight": torch.randn(64, 96), "bias": torch.randn(96).bfloat16()},
        "optim": {"exp_avg": torch.randn(64, 96), "step": torch.tensor(float(seed)), "groups": [{"lr": 0.1}]},
        "epoch": 3,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.distributed not being initialised, which is meant
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def _save_sharded(folder: Path, seed: int) -> None:
    """What two ranks of a job with DTensors write, made by one process that plays both."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.manual_seed(seed)
    full = torch.randn(64, 32)
    plans, ranks = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rank in (0, 1):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
            try:
                mesh = init_device_mesh("cpu", (2,))
                state = {"weight": DTensor.from_local(full.chunk(2)[rank].clone(), mesh, [Shard(0)]), "step": seed}
                planner, writer = DefaultSavePlanner(), FileSystemWriter(folder)
                planner.set_up_planner(state, writer.storage_meta(), rank == 0)
                writer.set_up_storage_writer(rank == 0)
                plans.append(writer.prepare_local_plan(planner.create_local_plan()))
            finally:
                dist.destroy_process_group()
            ranks.append((planner, writer))
        global_plans, metadata = ranks[0][0].create_global_plan(plans)
        global_plans = ranks[0][1].prepare_global_plan(global_plans)
        results = []
        for (planner, writer), plan in zip(ranks, global_plans, strict=True):
            results.append(writer.write_data(planner.finish_plan(plan), planner).wait())
        ranks[0][1].finish(metadata, results)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of each kind that torch writes."""
    import torch

    root = tmp_path_factory.mktemp("written")
    _save_dcp(root / "step-1", 1)
    _save_dcp(root / "step-2", 2)
    _save_sharded(root / "sharded-1", 1)
    _save_sharded(root / "sharded-2", 2)
    state = {"model": {"weight": torch.randn(64, 96)}, "note": "text", "parameter": torch.nn.Parameter(torch.ones(8))}
    torch.save(state, root / "plain.pt")
    torch.save(state, root / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, root / "unsummed.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    return root


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Callable[[str], Path]:
    """``copy("step-1")``: one of them, to be damaged."""

    def call(name: str, to: str | None = None) -> Path:
        source, target = written / name, tmp_path / (to or name)
        if source.is_dir():
            shutil.copytree(source, target)
        else:
            shutil.copy2(source, target)
        return target

    return call
