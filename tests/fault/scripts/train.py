"""A small DDP training loop as a user of torchrun writes it; it knows nothing of steadyrun.

Arguments: number of steps, seconds per step. Goes on from the newest checkpoint after a restart.
"""

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
from torch.utils.data import DataLoader, TensorDataset

RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
EVENTS = Path(os.environ["EVENTS"])
CHECKPOINT = EVENTS / "checkpoint.pt"


def tell(kind, **fields):
    record = {"kind": kind, "rank": RANK, "attempt": ATTEMPT, "pid": os.getpid(), "at_s": time.monotonic(), **fields}
    with open(EVENTS / f"rank_{RANK}.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


def batches(workers):
    data = TensorDataset(torch.randn(64, 8, generator=torch.Generator().manual_seed(RANK)), torch.zeros(64, 1))
    while True:
        yield from DataLoader(data, batch_size=4, num_workers=workers, persistent_workers=False)


def main():
    steps, pace_s = int(sys.argv[1]), float(sys.argv[2])
    workers = int(os.environ.get("LOADER_WORKERS", "0"))
    tell("start")
    dist.init_process_group("gloo", timeout=timedelta(minutes=20))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = 0
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    source = batches(workers)
    for step in range(first, steps):
        inputs, targets = next(source)
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        time.sleep(pace_s)  # what the forward and backward passes of a real model would take
        optimizer.step()
        tell("step", step=step, loss=loss.item())
        if RANK == 0 and step % 5 == 4:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, CHECKPOINT.with_suffix(".new"))
            CHECKPOINT.with_suffix(".new").replace(CHECKPOINT)
    dist.barrier()
    tell("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
