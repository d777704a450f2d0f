"""A rank of benchmarks/checkpoint.py: trains, saves in the way it is told, checks what was saved and reads it back."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from peers.base import Saver, Setting
from peers.state import Sharded
from torch import Tensor
from usage import cpu_s, memory_bytes, processes_with

STEP_S = 0.02
WINDOW_BYTES = 256 << 20  # larger than any cache: a copy into it costs what a copy of the whole state does
MEASURED_STEPS = 15
RESTART_CODE = 17
TOUCH = """
import mmap, sys
pages = mmap.mmap(-1, int(sys.argv[1]))
for at in range(0, len(pages), mmap.PAGESIZE):
    pages[at] = 1
"""


def maker(name: str) -> Callable[[Setting], Saver]:
    """Imports only what that way of saving needs."""
    if name.startswith("steadyrun"):
        from peers.ours import Ours

        return lambda setting: Ours(setting, memory=name == "steadyrun")
    if name.startswith("floor"):
        from peers.floors import Floor

        return lambda setting: Floor(setting, direct="direct" in name)
    if name.startswith("NVRx"):
        from peers.others import Nvrx

        return Nvrx
    if name.startswith("torch_checkpointing"):
        from peers.others import TorchCheckpointing

        return TorchCheckpointing
    from peers import of_torch

    if name == "torch.save":
        return of_torch.TorchSave
    if name == "dcp.save":
        return of_torch.DcpSave
    return lambda s: of_torch.DcpAsync(s, in_process="process" in name, reuse="reused" in name)


class Rank:
    """The training loop around a saver."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        dist.init_process_group("gloo")
        self.arguments = arguments
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        self.state = Sharded(arguments.gib)
        self.setting = Setting(self.state, arguments.folder, dist.new_group(backend="gloo"))
        self.step = -1
        self._one = torch.ones(1)
        self._x = torch.randn(384, 384)
        self._window = torch.empty(min(WINDOW_BYTES, self.state.local_bytes) // 4)
        self._repeats = 1
        started_s = time.perf_counter()
        for _ in range(10):
            self._compute()
        self._repeats = max(1, round(STEP_S / ((time.perf_counter() - started_s) / 10)))

    # -- training ------------------------------------------------------------------------------------------------------
    def _compute(self) -> None:
        y = self._x
        for _ in range(self._repeats):
            y = torch.mm(self._x, y) * 0.01

    def train(self, saver: Saver | None) -> float:
        """One step; seconds."""
        started_s = time.perf_counter()
        self._compute()
        dist.all_reduce(self._one)
        self.step += 1
        if saver is not None:
            saver.stepped(self.step)
        return time.perf_counter() - started_s

    def all_of(self, value: bool) -> bool:
        flag = torch.tensor(float(value))
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def largest(self, value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return float(found)

    def total(self, value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found)
        return float(found)

    # -- measuring -----------------------------------------------------------------------------------------------------
    def tell(self, kind: str, **fields: Any) -> None:
        if self.rank == 0:
            with Path(os.environ["BENCH_EVENTS"]).open("a") as f:
                f.write(json.dumps({"kind": kind, "at_s": time.monotonic(), **fields}) + "\n")

    def job_cpu_s(self) -> float:
        """Of all processes of the job, on rank 0; the others wait."""
        found = cpu_s(processes_with(os.environ["BENCH_MARK"])) if self.rank == 0 else 0.0
        dist.barrier()
        return found

    def memcpy_s(self) -> float:
        """One copy of the whole state into memory that is there already: the least stall of a rank."""
        window: Tensor = self._window
        started_s = time.perf_counter()
        for local in self.state.locals:
            flat = local.view(-1)
            for at in range(0, flat.numel(), window.numel()):
                piece = flat[at : at + window.numel()]
                window[: piece.numel()].copy_(piece)
        return time.perf_counter() - started_s

    def _give_pages(self) -> None:
        """Have as much memory as a save may need touched and freed, by a process that is no part of the job.

        On a virtual machine memory that was never used, or is free for seconds, is the host's: the first to touch it
        waits for up to 2.5 s per GiB, which would tell more of who came first than of ways of saving.
        """
        if self.rank == 0:
            size_bytes = min(2 * self.world_size * self.state.local_bytes, psutil.virtual_memory().available // 2)
            env = {k: v for k, v in os.environ.items() if not k.startswith("STEADYRUN_")}
            subprocess.run([sys.executable, "-S", "-c", TOUCH, str(size_bytes)], check=True, env=env)
        dist.barrier()

    def one_save(self, saver: Saver, number: int, with_steps: bool) -> int:
        """Save *number*; afterwards train on (*with_steps*), or wait for it without using the processor.

        Returns:
            The step of the save.
        """
        self.state.set_to(number)
        if self.rank == 0:
            for old in sorted(self.setting.folder.glob("step-*"))[:-1]:
                shutil.rmtree(old, ignore_errors=True)
            os.sync()
        self._give_pages()
        base_s = [self.train(saver) for _ in range(MEASURED_STEPS)]
        memcpy_s = self.memcpy_s()
        before_s, step = self.job_cpu_s(), self.step
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
        saver.save(step)
        stall_s = time.perf_counter() - started_s
        saved_cpu_s = time.thread_time()
        durable_s = time.perf_counter() - started_s if saver.is_done() else None
        self.state.overwrite()
        during_s: list[float] = []
        while not self.all_of(durable_s is not None):
            if saver.is_done() and durable_s is None:
                durable_s = time.perf_counter() - started_s
            if with_steps:
                during_s.append(self.train(saver))
            else:
                time.sleep(0.005)
        own_cpu_s = time.thread_time() - saved_cpu_s
        assert durable_s is not None
        stall_cpu_s = self.total(saved_cpu_s - started_cpu_s)
        own_cpu_s = self.total(own_cpu_s)
        self.tell(
            "save",
            number=number,
            step=step,
            with_steps=with_steps,
            stall_s=self.largest(stall_s),
            memcpy_s=self.largest(memcpy_s),
            durable_s=self.largest(durable_s),
            stall_cpu_s=stall_cpu_s,
            cpu_s=self.job_cpu_s() - before_s - own_cpu_s,
            inflation=statistics.median(during_s) / statistics.median(base_s) if len(during_s) >= 5 else None,
        )
        return step

    # -- the whole -----------------------------------------------------------------------------------------------------
    def first_attempt(self) -> None:
        arguments = self.arguments
        self.state.set_to(0)
        self.memcpy_s()
        dist.barrier()
        memory = memory_bytes(processes_with(os.environ["BENCH_MARK"])) if self.rank == 0 else 0
        self.tell("baseline", memory_bytes=memory, state_bytes=self.state.local_bytes * self.world_size)
        dist.barrier()
        saver = maker(arguments.method)(self.setting)
        warm_s = time.monotonic() + arguments.warm_up
        while not self.all_of(time.monotonic() >= warm_s):
            self.train(saver)
        for number in range(1, arguments.saves):
            self.one_save(saver, number, with_steps=number % 3 == 0)
        saved_at = self.one_save(saver, arguments.saves, with_steps=False)
        self.tell("saved")
        self.read_back(saver, saved_at, arguments.saves)
        if arguments.method == "steadyrun":
            # The newest save is in memory as well: the launcher starts the ranks again, and they find it there.
            (self.setting.folder / f"saved.{self.rank}").write_text(f"{saved_at} {arguments.saves}")
            dist.barrier()
            os._exit(RESTART_CODE)
        saver.close()

    def read_back(self, saver: Saver, step: int, number: int) -> None:
        for temperature in ("cold", "warm"):
            if temperature == "cold":
                for file in saver.files(step):
                    with contextlib.suppress(OSError):
                        fd = os.open(file, os.O_RDONLY)
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                        os.close(fd)
            self.state.clear()
            dist.barrier()
            started_s = time.perf_counter()
            saver.load(step)
            seconds = self.largest(time.perf_counter() - started_s)
            wrong = self.total(self.state.wrong_elements(number))
            self.tell("loaded", source=temperature, seconds=seconds, wrong=int(wrong))

    def second_attempt(self) -> None:
        """Only steadyrun: what a restarted rank waits for its state."""
        from peers.ours import Ours

        step, number = (int(t) for t in (self.setting.folder / f"saved.{self.rank}").read_text().split())
        self.state.clear()
        dist.barrier()
        started_s = time.perf_counter()
        saver = Ours(self.setting)
        seconds = self.largest(time.perf_counter() - started_s)
        wrong = self.total(self.state.wrong_elements(number))
        if saver.first_step != step + 1:
            raise SystemExit(f"resumed at step {saver.first_step} instead of {step + 1}: {saver.resumed_from}")
        self.tell("loaded", source="memory", seconds=seconds, wrong=int(wrong), place=saver.resumed_from)
        saver.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gib", type=float, required=True)
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--warm-up", type=float, required=True)
    rank = Rank(parser.parse_args())
    if rank.attempt == 0:
        rank.first_attempt()
    else:
        rank.second_attempt()
    rank.tell("end")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # some peers leave threads and processes that an ordinary end would wait for


if __name__ == "__main__":
    main()
