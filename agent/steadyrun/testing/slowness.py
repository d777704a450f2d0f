"""A rank that becomes slow on order: extra work in one phase of its steps, less of a core, a neighbour on its core.

The extra is real work (small matrix products) measured by the thread's CPU time, so that it is as long on a busy
machine as on an idle one in the rank's own work. How much CPU time a step takes without it is watched all the time, and
the extra follows.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["PHASES", "CannotSlowError", "Neighbour", "Pace", "SlowPhase", "Throttle", "start_neighbour"]

PHASES: Final = ("forward", "backward", "optimizer", "data")
WATCHED: Final = 20  # newest steps that say how long a step is
ENOUGH: Final = 3
CHUNK: Final = 48  # edge of the matrices: a product takes some microseconds, so that any time can be met
PERIOD_US: Final = 20_000  # of a quota: short, so that a step of 50 ms meets it more than once
LEAST_QUOTA_US: Final = 1_000  # the kernel allows no less
DEEPEST: Final = 4  # levels of containers in which a module's outputs are looked for

# Ends with its parent, also when that is killed; nothing else may end it but a signal.
NEIGHBOUR: Final = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(20000))"


class CannotSlowError(Exception):
    """This rank cannot be slowed that way; the message says why."""


@dataclass(frozen=True, slots=True)
class _Objects:
    """Of this process: models that are trained, and whether a DataLoader is in use."""

    models: tuple[Any, ...]
    has_loader: bool

    @classmethod
    def found(cls) -> _Objects:
        torch = sys.modules.get("torch")
        if torch is None:
            return cls((), False)
        module = sys.modules.get("torch.utils.data.dataloader")
        base = getattr(module, "_BaseDataLoaderIter", ())
        modules, has_loader = [], False
        for found in gc.get_objects():  # type(), not isinstance: that would run __class__ of lazy proxies
            if issubclass(type(found), torch.nn.Module):
                modules.append(found)
            elif issubclass(type(found), base):
                has_loader = True
        return cls(tuple(_models(modules)), has_loader)


class Pace:
    """CPU time and wall time of the newest steps of this process's main thread, without what was added on purpose."""

    def __init__(self) -> None:
        self._own_s: deque[float] = deque(maxlen=WATCHED)
        self._cores: deque[float] = deque(maxlen=WATCHED)
        self._last: tuple[float, float, float] | None = None
        self._added_s = 0.0
        self._objects: _Objects | None = None

    def objects(self) -> _Objects:
        """What the script trains with. Found once, which takes a tenth of a second or more: ask in an early step."""
        if self._objects is None:
            self._objects = _Objects.found()
        return self._objects

    def on_step(self) -> None:
        """A step is done; in the main thread."""
        now = (time.thread_time(), time.process_time(), time.monotonic())
        last, self._last = self._last, now
        added_s, self._added_s = self._added_s, 0.0
        if last is not None and now[2] > last[2]:
            self._own_s.append(max(0.0, now[0] - last[0] - added_s))
            self._cores.append((now[1] - last[1]) / (now[2] - last[2]))

    def add(self, cpu_s: float) -> None:
        """So much of the present step's CPU time was extra."""
        self._added_s += cpu_s

    @property
    def step_s(self) -> float | None:
        """CPU time of a typical step, or None before there were enough."""
        return statistics.median(self._own_s) if len(self._own_s) >= ENOUGH else None

    @property
    def cores(self) -> float | None:
        """CPU time of all threads per second, or None before there were enough steps."""
        return statistics.median(self._cores) if len(self._cores) >= ENOUGH else None


class SlowPhase:
    """Makes one phase of every step longer by a share of the whole step's CPU time, until ``stop``."""

    def __init__(self, pace: Pace, phase: str, share: float, *, asleep: bool = False) -> None:
        """
        Args:
            phase: of ``PHASES``.
            asleep: wait instead of working.

        Raises:
            CannotSlowError: the script has nothing to hook into: no model, optimizer or DataLoader in use.
        """
        self._pace = pace
        self._share = share
        self._asleep = asleep
        self._removers: list[Callable[[], None]] = []
        self._torch = sys.modules.get("torch")
        if self._torch is None:
            raise CannotSlowError("the script does not use torch, so its steps have no phases")
        self._matrix = self._torch.ones(CHUNK, CHUNK)
        match phase:
            case "data":
                self._slow_loaders()
            case "optimizer":
                optimizers = sys.modules["torch.optim.optimizer"]
                self._hold(optimizers.register_optimizer_step_pre_hook(lambda *_: self._extra()))
            case _:
                self._slow_models(backward=phase == "backward")

    def stop(self) -> None:
        while self._removers:
            self._removers.pop()()

    def _hold(self, handle: Any) -> None:
        self._removers.append(handle.remove)

    def _extra(self) -> None:
        step_s = self._pace.step_s
        if step_s is None:
            return
        extra_s = self._share * step_s
        if self._asleep:
            time.sleep(extra_s)
            return
        begin_s = time.thread_time()
        self._work(begin_s + extra_s)
        self._pace.add(time.thread_time() - begin_s)

    def _work(self, until_s: float) -> None:
        matrix, torch = self._matrix, self._torch
        assert torch is not None
        with torch.no_grad():
            while time.thread_time() < until_s:
                torch.mm(matrix, matrix)

    # -- places --------------------------------------------------------------------------------------------------------
    def _slow_models(self, *, backward: bool) -> None:
        models = self._pace.objects().models
        if not models:
            raise CannotSlowError("the script has no model with parameters to train")
        if any(p.device.type != "cpu" for m in models for p in m.parameters()):
            raise CannotSlowError("the model is on an accelerator; work is only added to models on the CPU")
        for model in models:
            if backward:
                self._hold(_first_layer(model).register_forward_hook(self._within_backward))
            else:
                self._hold(
                    model.register_forward_pre_hook(lambda module, _: self._extra() if module.training else None)
                )

    def _within_backward(self, module: Any, args: Any, output: Any) -> None:
        """When the backward pass has come down to this layer."""
        tensor = next((t for t in _tensors(output) if t.requires_grad), None)
        if tensor is not None and module.training:
            tensor.register_hook(lambda _: self._extra())

    def _slow_loaders(self) -> None:
        if not self._pace.objects().has_loader:
            raise CannotSlowError("no DataLoader is in use")
        base: Any = sys.modules["torch.utils.data.dataloader"]._BaseDataLoaderIter
        original = base.__next__

        def slow_next(iterator: Any) -> Any:
            self._extra()
            return original(iterator)

        # The class, not the iterators: each epoch has a new one.
        base.__next__ = slow_next
        self._removers.append(lambda: setattr(base, "__next__", original))


def _models(modules: list[Any]) -> list[Any]:
    """Those that are no part of another one and have parameters to train; of wrappers (DDP) what they wrap.

    Hooks on the inner module run after those of the wrapper, and within what anybody measures of the wrapper.
    """
    inner = {id(child) for m in modules for child in m.children()}
    outer = [m for m in modules if id(m) not in inner and any(p.requires_grad for p in m.parameters())]
    wrapper = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", ())
    return [m.module if isinstance(m, wrapper) else m for m in outer]


def _first_layer(model: Any) -> Any:
    """The first module with parameters of its own: its outputs need gradients, and not as the first of all."""
    return next((m for m in model.modules() if m._parameters and any(p.requires_grad for p in m.parameters())), model)


def _tensors(value: Any, depth: int = DEEPEST) -> Iterator[Any]:
    if hasattr(value, "requires_grad"):
        yield value
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, depth - 1)


class Throttle:
    """A CPU quota for this process, in a cgroup of its own, such that its steps take longer by a share."""

    def __init__(self, pace: Pace, share: float, group: Path, version: int) -> None:
        """
        Args:
            group: the cgroup to make; its parent gets the process back.

        Raises:
            CannotSlowError: no steps to measure yet.
            OSError: the cgroup cannot be made or used.
        """
        cores = pace.cores
        if cores is None:
            raise CannotSlowError(f"{ENOUGH} steps must be done before it is known what a quota must be")
        self.group = group
        self.quota_us = max(LEAST_QUOTA_US, int(PERIOD_US * cores / (1 + share)))
        group.mkdir()
        try:
            if version == 1:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(self.quota_us))
            else:
                (group / "cpu.max").write_text(f"{self.quota_us} {PERIOD_US}")
            (group / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            with contextlib.suppress(OSError):
                group.rmdir()
            raise

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            (self.group.parent / "cgroup.procs").write_text(str(os.getpid()))
            self.group.rmdir()


class Neighbour:
    """Busy processes that are pinned to one core, with this process, until ``stop``."""

    def __init__(self, tasks: int) -> None:
        self._before = os.sched_getaffinity(0)
        core = min(self._before)
        self._pin({core})
        self.pids = [start_neighbour(core) for _ in range(tasks)]

    def stop(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        self._pin(self._before)

    @staticmethod
    def _pin(cores: set[int]) -> None:
        for entry in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
                os.sched_setaffinity(int(entry), cores)


def start_neighbour(core: int) -> int:
    """A process that is busy on *core* until it is killed or its parent ends; its pid."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", NEIGHBOUR],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    process.returncode = 0  # nobody waits for it: keeps Popen's destructor from warning
    os.sched_setaffinity(process.pid, {core})
    return process.pid
