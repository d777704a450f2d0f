"""Trains a state that follows from the step alone, and saves it with watch.checkpointer.

Arguments: folder of the checkpoints, number of steps, seconds per step, steps between saves.
Environment: ROWS of the large tensors per rank, RATE the most bytes per second, KEEP checkpoints, ONE_AT_A_TIME=1 to
have a save durable before the next one, MEMORY=0 to write from the ranks, HOLD to wait for that file before resuming.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))
from exact_state import content, parts

from steadyrun import watch

RANK = int(os.environ.get("RANK", "0"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
EVENTS = Path(os.environ["EVENTS"])
ROWS = int(os.environ.get("ROWS", "64"))


def tell(kind, **fields):
    record = {"kind": kind, "rank": RANK, "attempt": ATTEMPT, "pid": os.getpid(), "at_s": time.monotonic(), **fields}
    with open(EVENTS / f"rank_{RANK}.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


class Exact(nn.Module):
    def __init__(self, saved_world_size):
        super().__init__()
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        self.known = parts(ROWS, saved_world_size)
        self.places = []
        for part in self.known:
            rows = part.rows // WORLD_SIZE if part.is_split else part.rows
            local = torch.zeros(rows, 256, dtype=part.dtype)
            tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False) if part.is_split else local
            self.register_buffer(part.name, tensor)
            self.places.append((local if not part.is_split else tensor.to_local(), rows * RANK * part.is_split))

    def wanted(self, step):
        for number, (part, (local, first_row)) in enumerate(zip(self.known, self.places, strict=True)):
            yield local, content(part, number, step, first_row, len(local))

    def fill(self, step):
        for local, wanted in self.wanted(step):
            local.copy_(wanted)

    def wrong(self, step):
        return sum(int((local != wanted).sum()) for local, wanted in self.wanted(step))


class Position:
    """A data position: another one on each rank."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"rank": RANK, "at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"] if state["rank"] == RANK else -1


class Counter:
    """Something that is no tensor, and the same on all ranks."""

    def __init__(self):
        self.done = 0

    def state_dict(self):
        return {"done": self.done, "note": f"after {self.done} steps"}

    def load_state_dict(self, state):
        self.done = state["done"] if state["note"] == f"after {state['done']} steps" else -1


def main():
    folder, steps, pace_s, every = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    tell("start")
    if WORLD_SIZE > 1:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(RANK)
    saved_world_size = int(os.environ.get("SAVED_WORLD_SIZE", WORLD_SIZE))
    model, position, counter = Exact(saved_world_size), Position(), Counter()
    rate = os.environ.get("RATE")
    checkpointer = watch.checkpointer(
        folder,
        model=model,
        loader=position,
        counter=counter,
        every=every,
        keep=int(os.environ.get("KEEP", "3")),
        memory=os.environ.get("MEMORY", "1") == "1",
        most_bytes_per_s=float(rate) if rate else None,
    )
    if os.environ.get("HOLD"):
        while not Path(os.environ["HOLD"]).exists():
            time.sleep(0.02)
    first = checkpointer.resume()
    wrong = model.wrong(first - 1) if first else 0
    wrong += counter.done != first
    if saved_world_size == WORLD_SIZE:
        wrong += position.at != first
    tell("resumed", first=first, wrong=wrong, place=checkpointer.resumed_from)
    one = torch.ones(1)
    handle = None
    for step in range(first, steps):
        model.fill(step)
        position.at = counter.done = step + 1
        time.sleep(pace_s)  # what the forward and backward passes of a real model would take
        dist.all_reduce(one.fill_(1.0))
        tell("step", step=step)
        is_due = (step + 1) % every == 0
        if is_due and handle is not None and os.environ.get("ONE_AT_A_TIME") == "1":
            handle.wait(120)
            tell("settled", step=handle.step, state=handle.state.value, why=handle.why)
            handle = None
        if is_due:
            tell("saving", step=step)
        taken = checkpointer.step(step)
        if taken is not None:
            handle = taken
            tell("saved", step=step, state=handle.state.value, why=handle.why)
        if handle is not None and handle.state.value in ("durable", "failed", "skipped"):
            tell("settled", step=handle.step, state=handle.state.value, why=handle.why)
            handle = None
    checkpointer.close()
    if handle is not None:
        tell("settled", step=handle.step, state=handle.state.value, why=handle.why)
    tell("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
