"""One rank of a small training job, for the tests of exact resume. Started by test_state_ranks.py.

Modes: ``train`` runs each kind undisturbed, then once more with captures, stores the state after ``SAVED_AFTER`` and
kills itself some steps later; ``resume`` continues from the store; ``reshape`` does so from another number of ranks.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from steadyrun.checkpoint.layout import Layout
from steadyrun.checkpoint.state import PerRank, Saved, State

SAMPLES, GLOBAL_BATCH = 96, 12  # eight steps make an epoch; the batch divides by 2, 3 and 4 ranks
SAVED_AFTER, KILLED_AFTER, STEPS = 4, 6, 11
WIDTH = 16


class Points(Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.y = torch.randn(SAMPLES, WIDTH, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        return i, self.x[i], self.y[i]


class Block(nn.Module):
    def __init__(self, hidden: int, norm: type[nn.Module], dropout: float) -> None:
        super().__init__()
        self.norm = norm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def make_net(hidden: int, norm: type[nn.Module], dropout: float) -> nn.Module:
    net = nn.Sequential(Block(hidden, norm, dropout), Block(hidden, norm, dropout), nn.Linear(WIDTH, WIDTH))
    net.register_buffer("scale", torch.ones(()))
    net[2].weight.requires_grad_(False)
    return net


class Counting(torch.optim.Optimizer):
    """Keeps numbers, text and None beside tensors, a count on itself, and says so in its ``state_dict``."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "mode": "slow"})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                n = state["n"] = state.get("n", 0) + 1
                state["note"] = None if n % 2 else f"even {n}"
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(p)
                    state["inner"] = {"weight": torch.zeros(())}
                state["mean"].lerp_(p.grad, 0.5)
                state["inner"]["weight"] += 1.0 / n
                p.add_(state["mean"], alpha=-group["lr"] / (1 + 0.01 * self.calls + 0.001 * n))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls = state_dict["calls"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "calls"})


class Average:
    """An average of the parameters as its users write it: a list of plain tensors and a number."""

    def __init__(self, module: nn.Module) -> None:
        self.shadow: list[torch.Tensor] = []
        self.updates = 0
        self.seen: dict[int, float] = {}

    def update(self, module: nn.Module, loss: float) -> None:
        values = [p.detach().to_local() if hasattr(p, "to_local") else p.detach() for p in module.parameters()]
        means = [v.double().mean() if v.numel() else torch.zeros((), dtype=torch.float64) for v in values]
        self.shadow = [0.9 * s + 0.1 * m for s, m in zip(self.shadow or means, means, strict=True)]
        self.updates += 1
        self.seen[self.updates] = loss

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates, "seen": (dict(self.seen), [])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates, self.seen = state["shadow"], state["updates"], dict(state["seen"][0])


@dataclass
class Run:
    """All that one training run consists of."""

    kind: str
    net: nn.Module
    optimizer: Any
    scheduler: Any
    scaler: Any
    loader: StatefulDataLoader[Any]
    average: Average
    replicas: int
    group: Any
    step: int = 0
    losses: list[str] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)

    def state(self, rank: int, world: int) -> State:
        return State(
            self.net,
            self.optimizer,
            self.scheduler,
            self.loader,
            self.scaler,
            {"average": PerRank(self.average)},
            rank,
            world,
        )

    def train(self, until: int, after: Callable[[int], None] = lambda step: None) -> None:
        """The loop of a script: epochs of the loader until step *until* is done."""
        while self.step <= until:
            self.loader.sampler.set_epoch(self.step // len(self.loader))
            for index, x, y in self.loader:
                self.samples.append(index.tolist())
                self._one(x, y)
                after(self.step)
                self.step += 1
                if self.step > until:
                    break

    def _one(self, x: torch.Tensor, y: torch.Tensor) -> None:
        noise = random.random() * 1e-3 + float(np.random.rand()) * 1e-3 if self.kind.endswith("drop") else 0.0
        out = self.net(x)
        loss = (out - y).square().mean() * (1.0 + noise)
        loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
        self.optimizer.zero_grad()
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        self.scheduler.step()
        self.average.update(self.net, loss.item())
        self.losses.append(loss.item().hex())
        total = loss.detach().clone().double()
        dist.all_reduce(total)
        self.means.append(total.item() / dist.get_world_size())


def make(kind: str, rank: int, world: int) -> Run:
    """*kind* is ``parallelism.optimizer.drop|plain``."""
    parallel, optimizer, drop = kind.split(".")
    torch.manual_seed(7)  # equal parameters on all ranks
    is_tp = parallel == "tp"
    norm = nn.BatchNorm1d if parallel == "ddp" and drop == "drop" else nn.LayerNorm
    net: Any = make_net(36 if is_tp else 33, norm, 0.2 if drop == "drop" else 0.0)
    group, replicas, replica = None, world, rank
    match parallel:
        case "ddp":
            # Buckets are laid out anew after a first pass, which sums in another order: with more than two ranks that
            # alone moves the last bit after any restart. Not so when unused parameters are looked for.
            net = DistributedDataParallel(net, find_unused_parameters=True)
        case "fsdp1" | "fsdp1flat":
            net[2].weight.requires_grad_(True)
            policy = ModuleWrapPolicy({Block})
            device = torch.device("cpu")
            net = FullyShardedDataParallel(
                net, auto_wrap_policy=policy, device_id=device, use_orig_params=parallel == "fsdp1"
            )
        case "fsdp1hybrid":
            net[2].weight.requires_grad_(True)
            mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))
            net = FullyShardedDataParallel(
                net,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                device_mesh=mesh,
                sharding_strategy=ShardingStrategy.HYBRID_SHARD,
                device_id=torch.device("cpu"),
                use_orig_params=True,
            )
        case "fsdp2" | "hsdp":
            shape = (2, world // 2) if parallel == "hsdp" and world % 2 == 0 else (world,)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
            for block in (net[0], net[1]):
                fully_shard(block, mesh=mesh)
            fully_shard(net, mesh=mesh)
        case "tp":
            across = 2 if world % 2 == 0 else 1
            replicas, replica = world // across, rank // across
            mesh = init_device_mesh("cpu", (replicas, across), mesh_dim_names=("dp", "tp"))
            for block in (net[0], net[1]):
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(net, mesh=mesh["dp"])
    parameters = [p for p in net.parameters() if p.requires_grad]
    if parallel == "fsdp1flat":
        groups: Any = parameters
    else:
        half = len(parameters) // 2
        groups = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": 3e-3}]
    match optimizer:
        case "adamw":
            made: Any = torch.optim.AdamW(groups, lr=5e-3, weight_decay=0.1)
        case "sgd":
            made = torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
        case "counting":
            made = Counting(groups, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3) if parallel == "ddp" else None
    sampler = DistributedSampler(Points(), replicas, replica, shuffle=True, seed=3)
    loader = StatefulDataLoader(Points(), batch_size=GLOBAL_BATCH // replicas, sampler=sampler, drop_last=True)
    torch.manual_seed(100 + replica)  # for dropout
    random.seed(rank)
    np.random.seed(rank)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, STEPS)
    return Run(kind, net, made, scheduler, scaler, loader, Average(net), replicas, group)


# -- the store ---------------------------------------------------------------------------------------------------------
def store(state: State, path: Path) -> None:
    captured = state.capture()
    blob = io.BytesIO()
    tensors = [t.clone() for t in captured.tensors]
    torch.save({"layout": captured.layout.to_json(), "tensors": tensors, "objects": captured.objects}, blob)
    path.write_bytes(blob.getvalue())


def restore_own(state: State, path: Path, step: int) -> list[str]:
    data = torch.load(path, weights_only=True)
    layout = Layout.from_json(data["layout"])
    state.prepare_to_load(Saved.from_layout(layout))
    assert state.capture().layout.digest() == layout.digest()
    for target, tensor in zip(state.targets(), data["tensors"], strict=True):
        target.copy_(tensor)
    objects = {o.key: v for o, v in zip(layout.objects, data["objects"], strict=True)}
    return state.apply(objects, layout.world_size, step)


def gathered(paths: list[Path]) -> tuple[dict[str, torch.Tensor], dict[str, Any], Metadata, int]:
    """Whole tensors and all objects from the files of all ranks, and DCP's metadata of them."""
    whole: dict[str, torch.Tensor] = {}
    covered: dict[str, torch.Tensor] = {}
    objects: dict[str, Any] = {}
    data: dict[str, Any] = {}
    ways: dict[str, Any] = {}
    for path in paths:
        one = torch.load(path, weights_only=True)
        layout = Layout.from_json(one["layout"])
        for entry, tensor in zip(layout.entries, one["tensors"], strict=True):
            box = tuple(slice(o, o + n) for o, n in zip(entry.offsets, entry.sizes, strict=True))
            if entry.key not in whole:
                whole[entry.key] = torch.zeros(entry.shape, dtype=tensor.dtype)
                covered[entry.key] = torch.zeros(entry.shape, dtype=torch.bool)
            if bool(covered[entry.key][box].all()) and tensor.numel():
                assert torch.equal(whole[entry.key][box], tensor), f"replicas of {entry.key} differ"
            whole[entry.key][box] = tensor
            covered[entry.key][box] = True
            ways[entry.key] = entry.path
        for o, value in zip(layout.objects, one["objects"], strict=True):
            objects.setdefault(o.key, value)
            ways[o.key] = o.path
    for key, mask in covered.items():
        assert bool(mask.all()), f"{key} is not covered"
    for key, tensor in whole.items():
        chunk = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())
        data[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.size(), [chunk])
    data.update({key: BytesStorageMetadata() for key in objects})
    return whole, objects, Metadata(data, ways, {}), len(paths)


def restore_moved(state: State, paths: list[Path], step: int) -> list[str]:
    """Through torch's own load planner, as a reader of folders does."""
    whole, objects, metadata, world = gathered(paths)
    state.prepare_to_load(Saved.from_metadata(metadata, world))
    wanted = state.load_plan_state_dict()
    planner = DefaultLoadPlanner()
    planner.set_up_planner(wanted, metadata, True)
    for item in planner.create_local_plan().items:
        if item.type is LoadItemType.BYTE_IO:
            blob = io.BytesIO()
            torch.save(objects[item.storage_index.fqn], blob)
            blob.seek(0)
            planner.load_bytes(item, blob)
        else:
            box = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
            target = planner.resolve_tensor(item).detach()
            assert target.numel() == whole[item.storage_index.fqn][box].numel()
            target.copy_(whole[item.storage_index.fqn][box])
            planner.commit_tensor(item, target)
    return state.apply_loaded(wanted, world, step)


# -- looking closely ---------------------------------------------------------------------------------------------------
class Ops(TorchDispatchMode):
    """All operators that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def sequence_numbers() -> list[int]:
    """How many collectives each process group has made."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return [g._get_sequence_number_for_group() for g in groups]


def digest_of(run: Run) -> str:
    out = hashlib.blake2b()
    for value in [*run.net.state_dict().values()] if "fsdp1" not in run.kind else list(run.net.parameters()):
        local = value.to_local() if hasattr(value, "to_local") else value
        out.update(local.detach().contiguous().numpy().tobytes())
    for state in run.optimizer.state.values():
        for v in state.values():
            if isinstance(v, torch.Tensor):
                v = v.to_local() if hasattr(v, "to_local") else v
                out.update(v.detach().contiguous().numpy().tobytes())
    return out.hexdigest()


def spied(run: Run, state: State, steps: list[int]) -> dict[str, Any]:
    """What capture, and asking for the targets, do besides."""
    before, numbers, steps_before = digest_of(run), sequence_numbers(), steps[0]
    drawn = torch.get_rng_state()
    with Ops() as ops:
        state.capture()
        state.targets()
    return {
        "collectives": [b - a for a, b in zip(numbers, sequence_numbers(), strict=True)],
        "operators": sorted(set(ops.names)),
        "same": digest_of(run) == before and torch.equal(drawn, torch.get_rng_state()),
        "steps": steps[0] - steps_before,
    }


def main() -> None:
    mode, folder, kinds = sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(",")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous.{mode}.{world}", rank=rank, world_size=world
    )
    steps = [0]
    register_optimizer_step_post_hook(lambda *_: steps.__setitem__(0, steps[0] + 1))
    results: dict[str, Any] = {}
    for kind in kinds:
        results[kind] = one(mode, folder, kind, rank, world, steps)
    (folder / f"{mode}.{world}.{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    if mode == "train":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def one(mode: str, folder: Path, kind: str, rank: int, world: int, steps: list[int]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if mode == "train":
        run = make(kind, rank, world)
        run.train(STEPS)
        out.update(losses=run.losses, means=run.means, samples=run.samples, digest=digest_of(run))
    run = make(kind, rank, world)
    state = run.state(rank, world)
    if mode == "train":
        out["first"] = spied(run, state, steps)

        def after(step: int) -> None:
            if step in (1, SAVED_AFTER):
                store(state, folder / f"{kind}.{world}.{rank}.pt")
            if step == SAVED_AFTER:
                out["steady"] = spied(run, state, steps)

        run.train(KILLED_AFTER, after)
        out.update(captured_losses=run.losses)
        return out
    before = {"resume": world, "reshape": {2: 4, 3: 2}.get(world, 0)}[mode]
    at = SAVED_AFTER + (3 if mode == "reshape" and before == 2 else 0)
    steps_before = steps[0]
    if mode == "resume":
        notes = restore_own(state, folder / f"{kind}.{world}.{rank}.pt", at)
    else:
        notes = restore_moved(state, [folder / f"{kind}.{before}.{r}.pt" for r in range(before)], at)
    out.update(notes=notes, steps=steps[0] - steps_before, covered=state.covered, not_covered=state.not_covered)
    run.step = at + 1
    until = STEPS if mode == "resume" or world == 3 else at + 3
    run.train(until)
    if mode == "reshape":
        store(state, folder / f"{kind}.{world}.{rank}.pt")
    out.update(losses=run.losses, means=run.means, samples=run.samples, digest=digest_of(run))
    return out


if __name__ == "__main__":
    main()
