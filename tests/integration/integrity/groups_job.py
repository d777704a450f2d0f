"""One rank of the tests of groups: wraps a model in the ways of argv[1], steps twice, prints its plans as JSON."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from steadyrun.integrity.fingerprint import Hasher
from steadyrun.integrity.groups import plan


def wrapped(kind: str, model: nn.Sequential, world: int) -> nn.Module:
    match kind:
        case "ddp" | "zero":
            return DistributedDataParallel(model)
        case "replicate":
            from torch.distributed._composable.replicate import replicate

            replicate(model)
        case "hsdp":
            fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
        case "fsdp2":
            fully_shard(model)
        case "fsdp1":
            strategy = ShardingStrategy.NO_SHARD
            return FullyShardedDataParallel(
                model, use_orig_params=True, sharding_strategy=strategy, device_id=torch.device("cpu")
            )
        case "alone":
            pass
    return model


def rows_of(kind: str, rank: int, world: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model.register_buffer("table", torch.arange(4.0))
    module = wrapped(kind, model, world)
    optimizer: torch.optim.Optimizer
    if kind == "zero":
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    inputs = torch.Generator().manual_seed(rank)
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.randn(4, 8, generator=inputs)).sum().backward()
        optimizer.step()
    hasher = Hasher()
    rows: list[dict[str, Any]] = []
    for c in plan(module, optimizer, buffers=["table"]):
        tensor = c.read()
        assert tensor is not None
        root = hasher.fingerprint(tensor).root
        rows.append({"name": c.name, "kind": c.kind.value, "ranks": c.ranks, "owner": c.owner, "root": root})
    return rows


def main() -> None:
    kinds, store, rank, world = sys.argv[1].split(","), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    print(json.dumps({kind: rows_of(kind, rank, world) for kind in kinds}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
