"""A training loop whose state is spoilt once: from then on every run that goes on from it fails some steps later.

Arguments: folder for checkpoints, step after which the state is spoilt in attempt 0 (-1: never), step that fails with a
spoilt state, or always with -1 before.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from steadyrun import watch

RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
EVENTS = Path(os.environ["EVENTS"])


def tell(kind, **fields):
    record = {"kind": kind, "rank": RANK, "attempt": ATTEMPT, "pid": os.getpid(), "at_s": time.monotonic(), **fields}
    with open(EVENTS / f"rank_{RANK}.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


def main():
    folder, spoilt_at, fails_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    tell("start")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    ckpt = watch.checkpointer(folder, model=model, optimizer=optimizer, every=5, keep=10)
    start = ckpt.resume()
    tell("resumed", start=start)
    for step in range(start, 30):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        tell("step", step=step)
        time.sleep(0.05)
        if step == spoilt_at and ATTEMPT == 0:
            with torch.no_grad():
                model.bias.fill_(float("nan"))
        if step == fails_at and (spoilt_at < 0 or torch.isnan(model.bias).any()):
            raise FloatingPointError("the loss is not a number")
        saved = ckpt.step(step)
        if saved is not None:
            saved.wait()
    ckpt.close()


if __name__ == "__main__":
    main()
