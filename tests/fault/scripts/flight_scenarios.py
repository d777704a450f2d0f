"""A small training job in which each attempt goes wrong in another way, all of them at its collectives.

Arguments: names of scenarios, attempt n plays the n-th; an attempt beyond them trains to its end. Each scenario begins
after STEPS steps of training with one all_reduce of the default group each, so that its first collective there is
number STEPS + 1. A line that a verdict should name as the place of the fault carries a comment ``# site: SCENARIO``; of
a process that cannot tell where it is, the place where the others wait for it is marked too.
"""

import ctypes
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
EVENTS = Path(os.environ["EVENTS"])
STEPS = 3
FOR_EVER_S = 3600
SCENARIOS = {}


def tell(kind, **fields):
    record = {"kind": kind, "rank": RANK, "attempt": ATTEMPT, "pid": os.getpid(), "at_s": time.monotonic(), **fields}
    with open(EVENTS / f"rank_{RANK}.jsonl", "a") as f:
        f.write(json.dumps(record) + "\n")


def scenario(steps=STEPS, **groups):
    """Registers a function of (rank, groups); *groups*: name -> ranks, or (backend, ranks)."""

    def register(function):
        SCENARIOS[function.__name__] = (function, steps, groups)
        return function

    return register


def ones(*size, dtype=torch.float32):
    return torch.ones(*size, dtype=dtype)


# -- nothing is wrong --------------------------------------------------------------------------------------------------
@scenario()
def ok(rank, groups):
    dist.all_reduce(ones(8))
    dist.barrier()


# -- ranks call different things ---------------------------------------------------------------------------------------
@scenario()
def op_mismatch(rank, groups):
    if rank == 1:
        dist.broadcast(ones(8), 0)  # site: op_mismatch
    else:
        dist.all_reduce(ones(8))
    time.sleep(FOR_EVER_S)


@scenario()
def op_mismatch_rank0(rank, groups):
    if rank == 0:
        dist.broadcast(ones(8), 0)  # site: op_mismatch_rank0
    else:
        dist.all_reduce(ones(8))
    time.sleep(FOR_EVER_S)


@scenario()
def size_mismatch(rank, groups):
    size = 1024 if rank == 2 else 4096
    dist.all_reduce(ones(size))  # site: size_mismatch
    time.sleep(FOR_EVER_S)


@scenario()
def size_mismatch_rank0(rank, groups):
    size = 1024 if rank == 0 else 4096
    dist.all_reduce(ones(size))  # site: size_mismatch_rank0
    time.sleep(FOR_EVER_S)


@scenario()
def dtype_mismatch(rank, groups):
    dtype = torch.float64 if rank == 2 else torch.float32
    dist.all_reduce(ones(4096, dtype=dtype))  # site: dtype_mismatch
    time.sleep(FOR_EVER_S)


# -- somebody does not come --------------------------------------------------------------------------------------------
@scenario()
def missing_rank(rank, groups):
    if rank == 1:
        time.sleep(FOR_EVER_S)  # site: missing_rank
    dist.all_reduce(ones(8))


@scenario()
def missing_rank0(rank, groups):
    if rank == 0:
        time.sleep(FOR_EVER_S)  # site: missing_rank0
    dist.all_reduce(ones(8))


@scenario(steps=0)
def never_joined(rank, groups):
    from steadyrun import watch

    with watch.section("joining"):
        if rank == 2:
            time.sleep(FOR_EVER_S)  # site: never_joined
        dist.all_reduce(ones(8))


@scenario()
def extra_collective(rank, groups):
    if rank == 0:
        dist.all_reduce(ones(8))  # site: extra_collective
    time.sleep(FOR_EVER_S)


@scenario()
def async_missing(rank, groups):
    works = [dist.all_reduce(ones(1 << 16), async_op=True) for _ in range(2 if rank == 1 else 4)]
    if rank == 1:
        time.sleep(FOR_EVER_S)  # site: async_missing
    for work in works:
        work.wait()


@scenario()
def skipped_one(rank, groups):
    for i in range(21):
        if rank == 1 and i == 10:
            continue
        dist.all_reduce(ones(8))
    time.sleep(FOR_EVER_S)  # site: skipped_one


@scenario()
def skipped_branch(rank, groups):
    for i in range(60):
        dist.all_reduce(ones(8))
        if i % 4 == 3 and not (rank == 1 and i == 31):
            dist.all_reduce(ones(8))  # site: skipped_branch
    time.sleep(FOR_EVER_S)  # site: skipped_branch


@scenario(pair=[0, 1])
def ring_skew(rank, groups):
    if rank < 2:
        for _ in range(100):
            dist.all_reduce(ones(8), group=groups["pair"])
    dist.all_reduce(ones(64))
    if rank == 0:
        time.sleep(FOR_EVER_S)  # site: ring_skew
    dist.all_reduce(ones(128))


@scenario()
def holds_gil(rank, groups):
    if rank == 1:
        ctypes.PyDLL(None).sleep(FOR_EVER_S)  # site: holds_gil
    dist.all_reduce(ones(8))


# -- groups wait for each other ----------------------------------------------------------------------------------------
@scenario(A=[0, 1], B=[0, 1])
def two_groups_order(rank, groups):
    for name in "AB" if rank == 0 else "BA":
        dist.all_reduce(ones(8), group=groups[name])  # site: two_groups_order


@scenario(G01=[0, 1], G12=[1, 2], G23=[2, 3])
def chain(rank, groups):
    if rank == 3:
        time.sleep(FOR_EVER_S)  # site: chain
    for name in ("G23", "G12", "G01"):
        if str(rank) in name:
            dist.all_reduce(ones(8), group=groups[name])


@scenario(tp0=[0, 1], tp1=[2, 3], dp0=[0, 2], dp1=[1, 3])
def grid(rank, groups):
    tp = groups["tp0" if rank < 2 else "tp1"]
    dp = groups["dp0" if rank % 2 == 0 else "dp1"]
    for i in range(4):
        dist.all_reduce(ones(16), group=tp)
        if i == 2 and rank == 3:
            time.sleep(FOR_EVER_S)  # site: grid
        dist.all_reduce(ones(32), group=dp)


@scenario(A=[0, 1], B=("second", [0, 1]))
def two_backends(rank, groups):
    for name in "AB" if rank == 0 else "BA":
        dist.all_reduce(ones(8), group=groups[name])  # site: two_backends


@scenario(A=[0, 1], B=("unrecorded", [0, 1]))
def unrecorded_backend(rank, groups):
    for name in "AB" if rank == 0 else "BA":
        dist.all_reduce(ones(8), group=groups[name])  # site: unrecorded_backend


@scenario()
def p2p_deadlock(rank, groups):
    dist.recv(ones(8), 1 - rank)  # site: p2p_deadlock


# -- processes that stop or end ----------------------------------------------------------------------------------------
@scenario()
def sigstop(rank, groups):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)  # site: sigstop
    dist.all_reduce(ones(8))  # site: sigstop


@scenario()
def sigkill(rank, groups):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)  # site: sigkill
    dist.all_reduce(ones(8))  # site: sigkill
    time.sleep(FOR_EVER_S)


# -- backends ----------------------------------------------------------------------------------------------------------
def second(store, rank, size, timeout):
    """Another backend to torch.distributed, and one that the recorder knows."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)


class Unrecorded(dist.ProcessGroup):
    """A backend in Python that no flight recorder knows; all_reduce ends when every rank has called it."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.store, self.me, self.members, self.timeout, self.calls = store, rank, size, timeout, 0

    def getBackendName(self):  # noqa: N802 - torch asks for this name
        return "unrecorded"

    def allreduce(self, tensors, options):
        self.calls += 1
        self.store.set(f"{self.calls}/{self.me}", "")
        self.store.wait([f"{self.calls}/{other}" for other in range(self.members)], self.timeout)
        for tensor in tensors:
            tensor.mul_(self.members)
        done = torch.futures.Future()
        done.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(done)


# -- the job -----------------------------------------------------------------------------------------------------------
def train(steps):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(gradients)
        optimizer.step()
        tell("step", step=ATTEMPT * STEPS + step)


def make_group(what, name, timeout):
    backend, ranks = what if isinstance(what, tuple) else ("gloo", what)
    return dist.new_group(ranks, backend=backend, group_desc=name, timeout=timeout)


def main():
    names = sys.argv[1:]
    name = dict(enumerate(names)).get(ATTEMPT, "ok")
    function, steps, wanted = SCENARIOS[name]
    tell("start", scenario=name)
    timeout = timedelta(minutes=20)
    dist.Backend.register_backend("second", second, devices=["cpu"])
    dist.Backend.register_backend("unrecorded", Unrecorded, devices=["cpu"])
    dist.init_process_group("gloo", timeout=timeout)
    groups = {group: make_group(what, group, timeout) for group, what in wanted.items()}
    train(steps)
    tell("fault", scenario=name)
    function(RANK, groups)
    dist.barrier()
    tell("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
