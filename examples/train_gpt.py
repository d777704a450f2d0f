"""Train a small byte-level GPT on the Python standard library's own sources.

Runs the same under either launcher or alone:

    torchrun  --standalone --nproc-per-node 2 examples/train_gpt.py --out /tmp/gpt
    steadyrun --standalone --nproc-per-node 2 examples/train_gpt.py --out /tmp/gpt
    python examples/train_gpt.py --out /tmp/gpt --steps 50

gloo on the CPU, NCCL on GPUs; DDP, or FSDP2 with ``--parallel fsdp``. Started again with the same ``--out`` it goes on
from the newest checkpoint. ``watch.checkpointer`` keeps model, optimizer, data position and every random generator, so
that on the CPU the losses are bitwise those of a run that was never disturbed; under steadyrun a save is a copy into
memory and a restart loads from there, elsewhere the ranks write the same files themselves. SIGTERM saves and leaves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

from steadyrun import watch

try:
    import numpy as np
except ImportError:  # torch works without it
    np = None  # type: ignore[assignment]

VOCABULARY = 256
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


# -- data --------------------------------------------------------------------------------------------------------------
def read_corpus(limit_bytes: int) -> Tensor:
    """The standard library's sources, one after the other in the order of their paths, as a vector of bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in SKIPPED_FOLDERS and not s.startswith("config-")]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    text = bytearray()
    for file in sorted(files, key=lambda f: f.relative_to(root).as_posix()):
        text += file.read_bytes()
        if len(text) >= limit_bytes:
            break
    if len(text) < 200_000:
        raise SystemExit(f"only {len(text)} bytes of Python source under {root}: not enough text to train on")
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


class Windows(Dataset[Tensor]):
    """Windows of ``length + 1`` bytes; window *i* starts at byte ``i * length``."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.text = text
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.text[start : start + self.length + 1]


class EndlessShuffle(Sampler[int]):
    """Epoch after epoch of shuffled indices, this rank's share of them, from a position in the global stream.

    The position counts the samples that all ranks together have taken, so it is right for any number of ranks.
    """

    def __init__(self, size: int, rank: int, world_size: int, seed: int, position: int) -> None:
        self.size, self.rank, self.world_size, self.seed, self.position = size, rank, world_size, seed, position

    def __iter__(self) -> Iterator[int]:
        at = self.position + self.rank
        epoch = -1
        while True:
            if at // self.size != epoch:
                epoch = at // self.size
                order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
            yield order[at % self.size]
            at += self.world_size


# -- model -------------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).unbind(2)
        seen = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = x + self.dropout(self.project(seen.transpose(1, 2).reshape(batch, length, width)))
        changed: Tensor = x + self.dropout(self.mlp(self.norm2(x)))
        return changed


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = 0.02 / math.sqrt(2 * layers) if name.endswith(("project.weight", "mlp.2.weight")) else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.token(tokens) + self.place.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    tokens = windows.long()
    logits = model(tokens[:, :-1])
    loss: Tensor = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return loss


# -- what a resume needs beside model and optimizer --------------------------------------------------------------------
class Progress:
    """How many samples all ranks together have taken: the data position, right for any number of ranks."""

    def __init__(self) -> None:
        self.samples_seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"samples_seen": self.samples_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples_seen = int(state["samples_seen"])


def seed_generators(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if np is not None:
        np.random.seed(seed)


# -- training ----------------------------------------------------------------------------------------------------------
def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT on Python's own sources.")
    parser.add_argument("--out", type=Path, default=Path("gpt-run"), help="folder for checkpoints and the loss log")
    parser.add_argument("--steps", type=int, default=200, help="steps in all, earlier runs' included (default 200)")
    parser.add_argument("--every", default="20", help="save each N steps, or 90s, 15m, or auto (default 20)")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints to keep (default 2)")
    parser.add_argument("--log-every", type=int, default=10, help="print each N steps (default 10)")
    parser.add_argument("--eval-every", type=int, default=0, help="evaluate each N steps (default: never)")
    parser.add_argument("--loss-log", type=Path, help="file the losses are appended to (default OUT/loss.jsonl)")
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--data-workers", type=int, default=0, help="data loader processes per rank (default 0)")
    parser.add_argument("--batch", type=int, default=4, help="windows per rank and step (default 4)")
    parser.add_argument("--length", type=int, default=64, help="bytes per window (default 64)")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--corpus-bytes", type=int, default=8_000_000, help="text to use (default 8,000,000)")
    arguments = parser.parse_args()
    for name in ("steps", "log_every", "batch", "length"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    return arguments


def join_ranks() -> torch.device:
    """Join the other ranks, or make a group of one where no launcher has said who they are."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device = torch.device("cpu")
        backend = "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1)
    return device


def parallelize(model: GPT, arguments: argparse.Namespace, device: torch.device) -> nn.Module:
    if arguments.parallel == "ddp":
        return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@torch.no_grad()
def evaluate(model: nn.Module, held_out: Windows, batch: int, device: torch.device) -> float:
    """Mean loss on held-out text; each rank looks at its own part."""
    model.eval()
    first = dist.get_rank() * batch
    windows = torch.stack([held_out[(first + i) % len(held_out)] for i in range(batch)]).to(device)
    total = loss_of(model, windows)
    dist.all_reduce(total)
    model.train()
    return float(total) / dist.get_world_size()


def main() -> None:
    arguments = parse_arguments()
    device = join_ranks()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stop_asked = False

    def on_terminate(signum: int, frame: object) -> None:
        nonlocal stop_asked
        stop_asked = True

    signal.signal(signal.SIGTERM, on_terminate)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    torch.manual_seed(arguments.seed)  # the same first weights on all ranks
    model = GPT(arguments.layers, arguments.width, arguments.heads, arguments.length, arguments.dropout).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    training = parallelize(model, arguments, device)
    optimizer = torch.optim.AdamW(training.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.1)
    seed_generators(1000 * arguments.seed + rank)  # different dropout on each rank

    text = read_corpus(arguments.corpus_bytes)
    train_bytes = len(text) * 19 // 20
    windows, held_out = Windows(text[:train_bytes], arguments.length), Windows(text[train_bytes:], arguments.length)

    arguments.out.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    checkpointer = watch.checkpointer(
        arguments.out / "checkpoints",
        model=training,
        optimizer=optimizer,
        progress=progress,
        every=arguments.every,
        keep=arguments.keep,
    )
    start = checkpointer.resume()
    say(f"{parameters / 1e6:.2f} M parameters, {world_size} ranks, {arguments.parallel} on {device.type}")
    say(checkpointer.resumed_from)

    sampler = EndlessShuffle(len(windows), rank, world_size, arguments.seed, progress.samples_seen)
    loader = DataLoader(
        windows,
        batch_size=arguments.batch,
        sampler=sampler,
        num_workers=arguments.data_workers,
        generator=torch.Generator(),  # or the loader would take a number from the generator that dropout uses
        pin_memory=device.type == "cuda",
    )
    batches = iter(loader)
    loss_log = (arguments.loss_log or arguments.out / "loss.jsonl").open("a") if rank == 0 else None
    began = time.perf_counter()
    steps_timed = 0
    for step in range(start, arguments.steps):
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * min(1.0, (step + 1) / 20)
        loss = loss_of(training, next(batches).to(device, non_blocking=True))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(training.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.samples_seen += arguments.batch * world_size

        # One small collective for both: the mean loss, and whether any rank was asked to stop (then all leave).
        shared = torch.stack([loss.detach(), torch.tensor(float(stop_asked), device=device)])
        dist.all_reduce(shared)
        mean_loss = float(shared[0]) / world_size
        leave = bool(shared[1])

        steps_timed += 1
        if loss_log:
            loss_log.write(json.dumps({"step": step, "loss": mean_loss, "at_unix_s": round(time.time(), 6)}) + "\n")
            loss_log.flush()
        if step % arguments.log_every == 0 or step + 1 == arguments.steps:
            step_ms = (time.perf_counter() - began) / steps_timed * 1e3
            say(f"step {step:5d}   loss {mean_loss:.4f}   {step_ms:.0f} ms/step")
            began, steps_timed = time.perf_counter(), 0
        if arguments.eval_every and (step + 1) % arguments.eval_every == 0:
            say(f"step {step:5d}   held-out loss {evaluate(training, held_out, 4 * arguments.batch, device):.4f}")
        saved = checkpointer.step(step)
        if leave or step + 1 == arguments.steps:
            if saved is None:
                checkpointer.save(step)
            if leave:
                say(f"asked to stop: saving after step {step}")
            break
    checkpointer.close()
    if loss_log:
        loss_log.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
