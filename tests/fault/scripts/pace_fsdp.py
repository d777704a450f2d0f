"""A training loop with FSDP2, sharded layer by layer, as a user of torchrun writes it; it knows nothing of steadyrun.

Arguments: number of steps, width of the model. Each batch is computed from the example's number, by a DataLoader.
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
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH = 64
RANK = int(os.environ["RANK"])
EVENTS = Path(os.environ["EVENTS"])


def tell(kind, **fields):
    record = {"kind": kind, "rank": RANK, "attempt": 0, "pid": os.getpid(), "at_s": time.monotonic(), **fields}
    with open(EVENTS / f"rank_{RANK}.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


class Waves(Dataset):
    def __init__(self, size, width):
        self.size = size
        self.at = torch.linspace(0, 20, width)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return torch.sin(self.at + index)


def model(width):
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, width))


def main():
    steps, width = int(sys.argv[1]), int(sys.argv[2])
    tell("start")
    dist.init_process_group("gloo", timeout=timedelta(minutes=20))
    net = model(width)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    data = Waves(BATCH * dist.get_world_size() * 50, width)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    step = epoch = 0
    while step < steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for waves in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(waves), waves)
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                tell("step", step=step, loss=loss.item())
            step += 1
            if step == steps:
                break
    dist.barrier()
    tell("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
