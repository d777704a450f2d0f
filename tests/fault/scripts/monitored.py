"""A DDP loop that saves checkpoints, for jobs that are watched from outside.

Arguments: folder of the checkpoints, seconds per step, steps between saves. It goes on until it is stopped.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from steadyrun import watch

RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
EVENTS = Path(os.environ["EVENTS"])


def tell(kind, **fields):
    record = {"kind": kind, "rank": RANK, "attempt": ATTEMPT, "pid": os.getpid(), "at_s": time.monotonic(), **fields}
    with open(EVENTS / f"rank_{RANK}.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


class Batches(IterableDataset):
    def __init__(self, pace_s):
        self.pace_s = pace_s

    def __iter__(self):
        while True:
            time.sleep(self.pace_s)  # what reading takes
            yield torch.randn(16, 64)


def main():
    folder, pace_s, every = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    tell("start")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = watch.checkpointer(folder, model=model, optimizer=optimizer, every=every)
    step = checkpointer.resume()
    batches = iter(DataLoader(Batches(pace_s), batch_size=None))
    while not watch.should_stop():
        batch = next(batches)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        checkpointer.step(step)
        watch.step(step)
        tell("step", step=step)
        step += 1
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
