"""A rank that trains a model of BENCH_MIB of parameters, so many steps at a time as BENCH_ORDERS (a FIFO) says, line by
line, and tells what each stretch took its thread."""

import json
import os
import time

import torch

WARM = 6

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.set_num_threads(1)
torch.manual_seed(0)
width = 512
layers = max(int(float(os.environ["BENCH_MIB"]) * (1 << 20) / (4 * width * width)), 1)
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers))).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
batch = torch.randn(int(os.environ.get("BENCH_ROWS", "64")), width, device=device)


def train(steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()


def tell(kind: str, **fields: object) -> None:
    os.write(fd, (json.dumps({"kind": kind, "at_s": time.monotonic(), **fields}) + "\n").encode())


fd = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
train(WARM)
tell("ready", device=device, bytes=3 * sum(p.numel() * p.element_size() for p in model.parameters()))
with open(os.environ["BENCH_ORDERS"]) as orders:
    for line in orders:
        steps = int(line)
        if not steps:
            break
        began_s, cpu_s = time.perf_counter(), time.thread_time()
        train(steps)
        tell("trained", steps=steps, cpu_s=time.thread_time() - cpu_s, wall_s=time.perf_counter() - began_s)
