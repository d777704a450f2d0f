"""A plain training loop in one of several parallel forms, whose state is the same in each run.

Arguments: parallel form (ddp, fsdp2, hsdp, zero), steps, steps between saves, folder for checkpoints.

Environment: ``PACE_S``: sleep between steps. ``PERTURB_STEP``: after this step of the first attempt all ranks
but the first change each of their parameters, as a program does that forgets to synchronise.
"""

import gc
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from steadyrun import watch

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
EVENTS = Path(os.environ["EVENTS"])
PACE_S = float(os.environ.get("PACE_S", "0.05"))
PERTURB_STEP = int(os.environ.get("PERTURB_STEP", "-1"))
BATCH = 8


def tell(kind, **fields):
    record = {"kind": kind, "rank": RANK, "attempt": ATTEMPT, "pid": os.getpid(), "at_s": time.monotonic(), **fields}
    with open(EVENTS / f"rank_{RANK}.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


class Net(nn.Module):
    """One weight is larger than a leaf of 256 KiB; the running statistics differ between ranks by design."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 1100)
        self.seen = nn.BatchNorm1d(1100)
        self.second = nn.Linear(1100, 64)
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        return self.head(torch.relu(self.second(torch.relu(self.seen(self.first(x))))))


def parallel(form, net):
    if form in ("ddp", "zero"):
        # After its first iteration DDP orders its buckets anew, except where parameters may be unused; gloo then adds
        # up the gradients of three ranks in another order: the first step of an attempt would be another one.
        return DistributedDataParallel(net, broadcast_buffers=False, find_unused_parameters=True)
    if form == "fsdp2":
        mesh = init_device_mesh("cpu", (WORLD,))
    else:
        mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("replicate", "shard"))
    for layer in (net.first, net.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def main():
    form, steps, every, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    tell("start")
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    torch.manual_seed(0)
    model = parallel(form, Net())
    if form == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    saved = None if form == "zero" else optimizer
    ckpt = watch.checkpointer(folder, model=model, optimizer=saved, every=every, keep=100)
    start = ckpt.resume()
    tell("resumed", start=start, source=ckpt.resumed_from)
    for step in range(start, steps):
        generator = torch.Generator().manual_seed(1000 * step + RANK)
        x = torch.randn(BATCH, 64, generator=generator)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == PERTURB_STEP and ATTEMPT == 0 and RANK > 0:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 + 0.01 * RANK)
        total = loss.detach().clone()
        dist.all_reduce(total)
        tell("step", step=step, loss=(total / WORLD).item(), own=loss.item())
        ckpt.step(step)
        # Not up to a moment: a rank that once began late would then stay late, and rightly be called slow.
        time.sleep(PACE_S)
    ckpt.close()
    tell("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # DDP lies in reference cycles and keeps gloo's threads; see exact.py.
    time.sleep(0.2)
    gc.collect()
