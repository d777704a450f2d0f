"""The rank of inrank.py: does what it is told through a FIFO and writes the durations down.

Commands, one a line: ``measure N GAP_S`` times each operation N times, each after GAP_S of other work (0: one after the
other); ``pairs N GAP_S WORK`` times a training step N times as it is and N times with all of steadyrun that it goes
through taken out, in random turns, each after GAP_S of WORK; ``calls N`` does each operation N times between two marks
that strace can see; ``end``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import mmap
import os
import random
import struct
import time
from collections.abc import Callable
from typing import Any

EVENTS = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
SIDE = os.environ["BENCH_SIDE"]
Operation = Callable[[], object]
OTHER_WORK_BYTES = 32 << 20  # copied in some milliseconds; more than the caches hold
TRAINING_STEP = "step of a tiny model"


def tell(kind: str, **more: object) -> None:
    os.write(EVENTS, (json.dumps({"kind": kind, "at_s": time.monotonic(), "pid": os.getpid(), **more}) + "\n").encode())


def floor_operations() -> dict[str, Operation]:
    """What any way of reporting through shared memory costs at least."""
    page, record, count = mmap.mmap(-1, 4096), struct.Struct("<QQ"), 0

    def pack() -> None:
        nonlocal count
        count += 1
        record.pack_into(page, 0, time.monotonic_ns(), count)

    return {"nothing (the timer)": lambda: None, "bare pack_into": pack}


def training_step() -> Operation:
    import torch

    model, batch = torch.nn.Linear(8, 8), torch.ones(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(batch).mean().backward()
        optimizer.step()

    return step


def steadyrun_operations() -> dict[str, Operation]:
    import torch

    from steadyrun import watch

    def section() -> None:
        with watch.section("bench"):
            pass

    found: dict[str, Operation] = {"empty section": section, "beat": watch.beat, "should_stop": watch.should_stop}
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    parameter.grad = torch.zeros(1)
    optimizer.step()
    hooks = list(importlib.import_module("torch.optim.optimizer")._global_optimizer_post_hooks.values())
    if hooks:
        found["step hook"] = lambda: [hook(optimizer, (), {}) for hook in hooks]
    return found


class OursOut:
    """Takes what is called in a training step out of torch, and puts it back: this script has no such hooks itself."""

    def __init__(self) -> None:
        import gc

        import torch

        module = importlib.import_module("torch.optim.optimizer")
        tables = (module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks)
        self._hooks = [(table, dict(table)) for table in tables]
        slot = "_compiled_call_impl"
        modules = [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module) and slot in m.__dict__]
        self._calls = [(m.__dict__, slot, m.__dict__[slot]) for m in modules]
        if not any(hooks for _, hooks in self._hooks) or not self._calls:
            raise SystemExit("nothing of steadyrun is there to be taken out")

    def __enter__(self) -> None:
        for table, _ in self._hooks:
            table.clear()
        for place, name, _ in self._calls:
            del place[name]

    def __exit__(self, *_: object) -> None:
        for table, hooks in self._hooks:
            table.update(hooks)
        for place, name, call in self._calls:
            place[name] = call


def pairs_ns(watched: Operation, n: int, gap_s: float, work: str) -> tuple[list[int], list[int]]:
    """Durations of the step *watched* as it is, and of one without steadyrun.

    That is one of another model: parameters that change unseen are what steadyrun restarts a job for.
    """
    import torch

    clock = time.perf_counter_ns
    memory = memoryview(bytearray(2 * OTHER_WORK_BYTES))
    matrix, product = torch.rand(1024, 1024), torch.empty(1024, 1024)

    def copy() -> None:
        memory[:OTHER_WORK_BYTES] = memory[OTHER_WORK_BYTES:]

    def multiply() -> None:
        torch.mm(matrix, matrix, out=product)

    other = {"none": lambda: None, "copy": copy, "multiply": multiply}[work]
    ours_out, unwatched, found = OursOut(), training_step(), ([], [])
    for _ in range(n):
        for side in random.sample((0, 1), 2):
            step = unwatched if side else watched
            with ours_out if side else contextlib.nullcontext():
                for _ in range(3):
                    step()
                until = clock() + int(gap_s * 1e9)
                while gap_s and clock() < until:
                    other()
                before = clock()
                step()
                found[side].append(clock() - before)
    return found


def nvrx_operations() -> dict[str, Operation]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    client: Any = importlib.import_module("nvidia_resiliency_ext.fault_tolerance").RankMonitorClient()
    client.init_workload_monitoring()

    def section() -> None:
        client.start_section("bench")
        client.end_section("bench")

    return {"empty section": section, "beat": client.send_heartbeat}


def durations_ns(operation: Operation, n: int, gap_s: float) -> list[int]:
    clock = time.perf_counter_ns
    out = [0] * n
    other_work = memoryview(bytearray(2 * OTHER_WORK_BYTES if gap_s else 0))
    for i in range(n):
        until = clock() + int(gap_s * 1e9)
        while gap_s and clock() < until:
            other_work[:OTHER_WORK_BYTES] = other_work[OTHER_WORK_BYTES:]
        before = clock()
        operation()
        out[i] = clock() - before
    return out


def quantiles(values: list[int]) -> dict[str, int]:
    ordered = sorted(values)
    return {f"p{q}": ordered[min(len(ordered) * q // 100, len(ordered) - 1)] for q in (50, 99)} | {"max": ordered[-1]}


def counted(operation: Operation, n: int) -> dict[str, int]:
    """What /proc counts for this process: a poor man's strace, which sees reads, writes and sleeps only."""

    def numbers() -> dict[str, int]:
        found = {}
        for file in ("/proc/self/io", "/proc/self/status"):
            with contextlib.suppress(OSError), open(file) as f:
                pairs = [line.split(":") for line in f if line.startswith(("syscr", "syscw", "voluntary"))]
                found.update({k: int(v) for k, v in pairs})
        return found

    before = numbers()
    for _ in range(n):
        operation()
    after = numbers()
    return {k: after[k] - before[k] for k in after}


def main() -> None:
    if SIDE == "steps":  # nothing else: what steps without a forward teaches nobody where the forward is
        operations = {TRAINING_STEP: training_step()}
    else:
        operations = floor_operations() | (nvrx_operations() if SIDE == "nvrx" else steadyrun_operations())
    for operation in operations.values():
        durations_ns(operation, 2000, 0.0)  # warm
    tell("ready", operations=list(operations))
    with open(os.environ["BENCH_COMMANDS"]) as commands, open(os.devnull, "wb", buffering=0) as marks:
        for line in commands:
            command, *numbers = line.split()
            if command == "end":
                break
            n = int(numbers[0])
            if command == "pairs":
                with_ours, without = pairs_ns(operations[TRAINING_STEP], n, float(numbers[1]), numbers[2])
                tell("paired", work=numbers[2], ours=quantiles(with_ours), without=quantiles(without))
                tell("answered")
                continue
            for name, operation in operations.items():
                if command == "measure":
                    gap_s = float(numbers[1])
                    tell("measured", operation=name, gap_s=gap_s, **quantiles(durations_ns(operation, n, gap_s)))
                else:
                    found = counted(operation, n)
                    marks.write(f"BEGIN {name}\n".encode())
                    for _ in range(n):
                        operation()
                    marks.write(f"END {name}\n".encode())
                    tell("counted", operation=name, n=n, **found)
            tell("answered")


main()
