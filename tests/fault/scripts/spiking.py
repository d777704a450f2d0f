"""A plain DDP loop that tells its losses; some batches are poison: their targets are far off.

Arguments: steps, steps between saves, folder for checkpoints, first and end of the bad batches, ``nan`` or a factor.
Environment: ``PACE_S``: sleep between steps.
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
from torch.nn.parallel import DistributedDataParallel

from steadyrun import watch

RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
EVENTS = Path(os.environ["EVENTS"])
PACE_S = float(os.environ.get("PACE_S", "0.02"))


def tell(kind, **fields):
    record = {"kind": kind, "rank": RANK, "attempt": ATTEMPT, "pid": os.getpid(), "at_s": time.monotonic(), **fields}
    with open(EVENTS / f"rank_{RANK}.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


def main():
    steps, every, folder, first, end, poison = sys.argv[1:]
    tell("start")
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    ckpt = watch.checkpointer(folder, model=model, optimizer=optimizer, every=every, keep=100)
    start = ckpt.resume()
    tell("resumed", start=start, skipped=ckpt.skipped)
    for step in range(start, int(steps)):
        batch = ckpt.data_step(step)
        generator = torch.Generator().manual_seed(1000 * batch + RANK)
        x = torch.randn(16, 16, generator=generator)
        wanted = x.sum(1, keepdim=True)
        if int(first) <= batch < int(end):
            wanted = wanted * float(poison)
        loss = nn.functional.mse_loss(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.loss(loss)
        tell("step", step=step, batch=batch, loss=loss.item())
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
