"""Two pipeline stages of two data-parallel replicas each, by hand and with DDP; it knows nothing of steadyrun.

Arguments: number of steps, the step from which activations of the second replica travel longer, and by how much (s).
A thread sends them, as a network card would: no rank works longer for it.
"""

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, WIDTH = 64, 256
STAGES, REPLICAS = 2, 2
RANK = int(os.environ["RANK"])
STAGE, REPLICA = divmod(RANK, REPLICAS)
EVENTS = Path(os.environ["EVENTS"])


def tell(kind, **fields):
    record = {"kind": kind, "rank": RANK, "attempt": 0, "pid": os.getpid(), "at_s": time.monotonic(), **fields}
    with open(EVENTS / f"rank_{RANK}.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


def send(tensor, to, late_s):
    def travel():
        time.sleep(late_s)
        dist.send(tensor, to)

    thread = threading.Thread(target=travel)
    thread.start()
    return thread


def main():
    steps, slow_step, late_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    tell("start")
    dist.init_process_group("gloo", timeout=timedelta(minutes=20))
    groups = [dist.new_group(list(range(s * REPLICAS, (s + 1) * REPLICAS))) for s in range(STAGES)]
    torch.manual_seed(STAGE)
    layers = [part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    net = DistributedDataParallel(nn.Sequential(*layers), process_group=groups[STAGE])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    torch.manual_seed(RANK)
    for step in range(steps):
        optimizer.zero_grad()
        if STAGE == 0:
            out = net(torch.randn(BATCH, WIDTH))
            is_late = REPLICA == 1 and step >= slow_step
            sending = send(out.detach(), RANK + REPLICAS, late_s if is_late else 0.0)
            gradient = torch.empty_like(out)
            dist.irecv(gradient, RANK + REPLICAS).wait()
            sending.join()
            out.backward(gradient)
        else:
            given = torch.empty(BATCH, WIDTH)
            dist.irecv(given, RANK - REPLICAS).wait()
            given.requires_grad_(True)
            loss = net(given).square().mean()
            loss.backward()
            dist.send(given.grad, RANK - REPLICAS)
        optimizer.step()
        if step % 10 == 0:
            tell("step", step=step)
    dist.barrier()
    tell("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
