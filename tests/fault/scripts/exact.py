"""A training loop that uses everything that a resume must bring back, in one of several parallel forms.

Arguments: parallel form (ddp, fsdp2, hsdp, tpdp), steps, steps between saves, folder for checkpoints.

Dropout draws from torch's generator, augmentation from Python's and NumPy's, the data come from torchdata's
StatefulDataLoader; AdamW, a scheduler. ``EXACT_WORLD_FREE=1`` leaves out what depends on the number of ranks (dropout,
augmentation, per-rank data): then losses are comparable between numbers of ranks.
"""

import gc
import json
import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from steadyrun import watch

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
EVENTS = Path(os.environ["EVENTS"])
FREE = bool(os.environ.get("EXACT_WORLD_FREE"))
BATCH = 12


def tell(kind, **fields):
    record = {"kind": kind, "rank": RANK, "attempt": ATTEMPT, "pid": os.getpid(), "at_s": time.monotonic(), **fields}
    with open(EVENTS / f"rank_{RANK}.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.drop = nn.Dropout(0.0 if FREE else 0.2)
        self.second = nn.Linear(24, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return self.head(self.norm(self.second(self.drop(torch.relu(self.first(x))))))


def parallel(form, net):
    """(module, size of its data-parallel group, place in it)."""
    if form == "ddp":
        return DistributedDataParallel(net), WORLD, RANK
    if form == "fsdp2":
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in (net.first, net.second):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net, WORLD, RANK
    if form == "hsdp":
        mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
        for layer in (net.first, net.second):
            fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        return net, WORLD, RANK
    mesh = init_device_mesh("cpu", (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    if WORLD > 2:
        fully_shard(net, mesh=mesh["dp"])
    return net, WORLD // 2, RANK // 2


class Rows(torch.utils.data.Dataset):
    def __init__(self, place, size):
        generator = torch.Generator().manual_seed(7)
        rows = torch.randn(240, 16, generator=generator)
        self.rows = rows if FREE else rows[place::size]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def endless(loader):
    while True:
        yield from loader


def main():
    form, steps, every, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    tell("start")
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    torch.manual_seed(0)
    net = Net()
    model, size, place = parallel(form, net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    total_steps = int(os.environ.get("EXACT_TOTAL", steps)) + 1
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=total_steps)
    rows = Rows(place, size)
    loader = None if FREE else StatefulDataLoader(rows, batch_size=BATCH, shuffle=False, num_workers=0)
    torch.manual_seed(100 + place)
    random.seed(200 + place)
    np.random.seed(300 + place)
    ckpt = watch.checkpointer(
        folder, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, every=every, keep=100
    )
    start = ckpt.resume()
    tell("resumed", start=start, source=ckpt.resumed_from, active=watch.is_active())
    batches = None if FREE else endless(loader)
    for step in range(start, steps):
        first = step * BATCH % len(rows)
        x = rows.rows[first : first + BATCH] if FREE else next(batches)
        if not FREE:
            x = x * (1 + 0.01 * random.random()) + 0.01 * float(np.random.rand())
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        net.seen += 1
        total = loss.detach().clone()
        dist.all_reduce(total)
        tell("step", step=step, loss=(total / WORLD).item(), own=loss.item(), seen=int(net.seen))
        time.sleep(float(os.environ.get("EXACT_PACE_S", "0.01")))
        ckpt.step(step)
    if os.environ.get("EXACT_SAVE_LAST"):
        ckpt.save(steps - 1)
    ckpt.close()
    tell("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # DDP lies in reference cycles and keeps gloo's threads; one that still drops a tensor when the interpreter ends
    # aborts the process ("terminate called without an active exception", torch pull request 179291), and one that does
    # so while a collection destroys its group waits for the GIL for ever. So: first let them drop it, then collect.
    time.sleep(0.2)
    gc.collect()
