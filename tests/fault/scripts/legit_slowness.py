"""A DDP job of two ranks that is slow now and then for good reasons, and at last hangs.

Arguments: the least number of steps before the first trial, the trials' kinds with commas between them, and ``hang`` or
``end`` for what comes after them. Each waits until all sections have a soft limit and the agent has taken in what went
before. In a trial one thing takes ten times as long as a step; with ``+`` after its kind, longer than the soft limits
that the agent has told by then: its own, and that of the step, in which the other rank waits for it; with ``-``, nearly
as long as the shortest soft limit, so that nobody looks.
"""

import itertools
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from steadyrun import watch

RANK = int(os.environ["RANK"])
EVENTS = Path(os.environ["EVENTS"])
RUNS = Path(os.environ["RUNS"])
BEYOND_S = 1.5  # in which the look at the ranks comes to its end
APART = 12  # steps between two trials at least
SETTLES_S = 6.0  # in which the agent writes down what ranks have done, and limits follow
PACE_S = 0.02
NEARLY = 0.7  # of a soft limit: whoever waits for the stall has done something before
SECTIONS = ("step", "checkpointing", "evaluation")


def tell(kind, **fields):
    record = {"kind": kind, "rank": RANK, "attempt": 0, "pid": os.getpid(), "at_s": time.monotonic(), **fields}
    with open(EVENTS / f"rank_{RANK}.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


def soft_limit_s(section):
    """What the agent says of it now."""
    told = [json.loads(p.read_text()) for p in (RUNS / "latest" / "live").glob("*.json")]
    return max((t["limits"]["soft"].get(section, 0.0) for t in told if "limits" in t), default=0.0)


class Batches(Dataset):
    stall_s = 0.0

    def __len__(self):
        return 1 << 30

    def __getitem__(self, index):
        stall_s, self.stall_s = self.stall_s, 0.0
        time.sleep(stall_s)
        return torch.randn(8)


class SlowDisk:
    """A file whose writes take their time."""

    def __init__(self, stall_s):
        self.stall_s = stall_s

    def write(self, data):
        stall_s, self.stall_s = self.stall_s, 0.0
        time.sleep(stall_s)
        return len(data)

    def flush(self):
        pass


def slow_compiler(stall_s):
    def compiler(graph, inputs):
        time.sleep(stall_s)
        return graph.forward

    return compiler


def evaluate(model, seconds):
    end_s = time.monotonic() + seconds
    with torch.no_grad():
        while time.monotonic() < end_s:
            model(torch.randn(16, 8)).sum().item()


def is_settled(since_s):
    """Whether limits stand and will not move soon, as rank 0 sees it."""
    least_s = min(soft_limit_s(name) for name in SECTIONS)
    told = torch.tensor([float(least_s > 0 and time.monotonic() > since_s + SETTLES_S)])
    dist.broadcast(told, 0)
    return told.item() > 0


def main():
    before, trials = int(sys.argv[1]), list(filter(None, sys.argv[2].split(",")))
    left = [*trials, "hang"] if sys.argv[3] == "hang" else list(trials)
    tell("start")
    dist.init_process_group("gloo")
    net = nn.Linear(8, 8)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if any(kind.startswith("recompilation") for kind in trials):
        torch.compile(lambda x: x + 1, backend=slow_compiler(0.0))(torch.ones(1))  # the import takes seconds
    data = Batches()
    source = iter(DataLoader(data, batch_size=4, num_workers=0))
    times_s = []
    began_s = time.monotonic()
    settles_from_s = began_s
    for step in itertools.count():
        kind = ""
        if step >= before and step % APART == 0 and is_settled(settles_from_s):
            if not left:
                break
            kind = left.pop(0)
        kind, suffix = kind.rstrip("+-"), kind[-1:] if kind.endswith(("+", "-")) else ""
        culprit = len(left) % 2 == RANK
        stall_s = 0.0
        if kind and kind != "hang":
            section = {"checkpoint": "checkpointing", "evaluation": "evaluation"}.get(kind, "step")
            soft_s = soft_limit_s(section)
            beyond_s = max(soft_s, soft_limit_s("step")) + BEYOND_S
            below_s = NEARLY * min(soft_limit_s(name) for name in SECTIONS)
            stall_s = max(10 * statistics.median(times_s), {"+": beyond_s, "-": below_s}.get(suffix, 0.0))
            tell("trial", what=kind, seconds=stall_s, culprit=culprit, soft_s=soft_s, suffix=suffix)
        stall_s *= culprit
        if kind == "loader":
            data.stall_s = stall_s
        batch = next(source)
        if kind == "recompilation" and culprit:
            torch.compile(lambda x, k=float(step): x * k, backend=slow_compiler(stall_s))(batch)
        time.sleep(PACE_S)
        if kind == "hang" and RANK == 1:
            tell("hangs", soft_s=soft_limit_s("step"))
            threading.Event().wait()
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3 or kind == "checkpoint":
            with watch.section("checkpointing"):
                torch.save(net.state_dict(), SlowDisk(stall_s if kind == "checkpoint" else 0.002))
        if step % 4 == 1 or kind == "evaluation":
            with watch.section("evaluation"):
                evaluate(net, stall_s if kind == "evaluation" and culprit else 0.004)
        now_s = time.monotonic()
        times_s.append(now_s - began_s)
        began_s = now_s
        if kind or times_s[-1] > 1.0:  # the other rank's save is in the step after the trial's
            settles_from_s = now_s
        tell("step", step=step)
    tell("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
