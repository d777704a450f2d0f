"""The second, independent signal about a rank that is late: does its process move?

A few samples of the main stack and of /proc over a window. Taken in a thread, so that the agent's loop goes on; it is
woken when the readings are there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from steadyrun.collectors.process import ProcessReader, ProcessSample
from steadyrun.collectors.stacks import StackDump, StackRequest
from steadyrun.core.frames import Doing, activity_of, main_stack, same_place
from steadyrun.core.records import ThreadStack

__all__ = ["ProbeReading", "ProbeRunner", "ProbeTarget", "RankSample", "read_samples"]

IDLE_CPU_SHARE: Final = 0.3
DUMP_LIMIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class ProbeTarget:
    """A rank to look at: where its faulthandler writes, and the signal that makes it write."""

    rank: int
    pid: int
    stacks: Path
    stack_signal: int


@dataclass(frozen=True, slots=True)
class RankSample:
    """One look. The process is read before the dump and after it, so that the dump's own work is not counted."""

    before_at_s: float
    before: ProcessSample | None
    after_at_s: float
    after: ProcessSample | None
    stacks: tuple[ThreadStack, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeReading:
    """What the samples of one rank say; the fields of the node machine's ProbeResult, and the newest stacks."""

    rank: int
    window_s: float
    state: str
    cpu_share: float
    stack_unchanged: bool | None
    in_collective: bool = False
    compiling: bool = False
    io_moved: bool = False
    stacks: tuple[ThreadStack, ...] = ()


def read_samples(rank: int, samples: Sequence[RankSample]) -> ProbeReading:
    """The reading from samples in order of time; state ``X`` when the process was gone at the end."""
    cpu_s = between_s = 0.0
    io_moved = False
    for earlier, later in pairwise(samples):
        if earlier.after is None or later.before is None:
            continue
        cpu_s += max(later.before.cpu_s - earlier.after.cpu_s, 0.0)
        between_s += later.before_at_s - earlier.after_at_s
        if earlier.after.io_bytes is not None and later.before.io_bytes is not None:
            io_moved = io_moved or later.before.io_bytes != earlier.after.io_bytes
    share = cpu_s / between_s if between_s > 0 else 0.0
    mains = [m.frames for s in samples if (m := main_stack(s.stacks)) is not None]
    every_sample = len(mains) == len(samples)
    doing = activity_of(mains[-1]).doing if mains else Doing.UNKNOWN
    idle = share < IDLE_CPU_SHARE
    last = samples[-1].after if samples else None
    return ProbeReading(
        rank=rank,
        window_s=samples[-1].after_at_s - samples[0].before_at_s if samples else 0.0,
        state=last.state if last is not None else "X",
        cpu_share=round(share, 4),
        stack_unchanged=same_place(mains) if every_sample else None,
        in_collective=doing in (Doing.COLLECTIVE, Doing.JOINING) or (doing in (Doing.BACKWARD, Doing.DEVICE) and idle),
        compiling=doing is Doing.COMPILING,
        io_moved=io_moved,
        stacks=samples[-1].stacks if samples else (),
    )


@dataclass(slots=True)
class ProbeRunner:
    """Takes probes, one at a time. ``start`` and ``poll`` never block; *wake* is called from the probe's thread.

    Attributes:
        wake: makes the loop call ``poll`` (writes to its wake-up pipe).
        samples: looks per window, at least 2.
    """

    wake: Callable[[], None]
    process: ProcessReader = field(default_factory=ProcessReader)
    samples: int = 4
    now_s: Callable[[], float] = time.monotonic
    _thread: threading.Thread | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _result: tuple[ProbeReading, ...] | None = None

    def start(self, targets: Sequence[ProbeTarget], window_s: float) -> bool:
        """Begin a probe; False while one is under way (its readings have not been taken by ``poll``)."""
        if self._thread is not None:
            return False
        self._result = None
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._run, args=(tuple(targets), window_s), name="steadyrun-probe", daemon=True
        )
        self._thread.start()
        return True

    def poll(self) -> tuple[ProbeReading, ...] | None:
        """The readings, once; None while there are none."""
        if self._thread is None or self._result is None:
            return None
        result, self._result, self._thread = self._result, None, None
        return result

    def stop(self, limit_s: float = 2.0) -> None:
        """End a probe under way; waits at most *limit_s* for its thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(limit_s)
            self._thread = None

    def _run(self, targets: Sequence[ProbeTarget], window_s: float) -> None:
        taken: dict[int, list[RankSample]] = {t.rank: [] for t in targets}
        try:
            began_s = self.now_s()
            for i in range(self.samples):
                due_s = began_s + window_s * i / (self.samples - 1)
                if self._stop.wait(max(due_s - self.now_s(), 0.0)):
                    break
                for rank, sample in self._look(targets, min(DUMP_LIMIT_S, window_s / self.samples)):
                    taken[rank].append(sample)
        finally:
            self._result = tuple(read_samples(rank, samples) for rank, samples in taken.items())
            self.wake()

    def _look(self, targets: Sequence[ProbeTarget], limit_s: float) -> list[tuple[int, RankSample]]:
        asked: list[tuple[ProbeTarget, float, ProcessSample | None, StackRequest | None]] = []
        for target in targets:
            before = self.process.sample(target.pid)
            at_s = self.now_s()
            can_answer = before is not None and before.state not in "TtZX"
            request = None
            # Without a handler the signal would end the process.
            if can_answer and self.process.catches(target.pid, target.stack_signal):
                request = StackRequest(target.pid, target.stack_signal, target.stacks)
                request = request if request.send() else None
            asked.append((target, at_s, before, request))
        deadline_s = self.now_s() + limit_s
        looked = []
        for target, at_s, before, request in asked:
            dump: StackDump | None = request.wait(deadline_s) if request is not None else None
            after = self.process.sample(target.pid)
            sample = RankSample(at_s, before, self.now_s(), after, dump.stacks if dump is not None else ())
            looked.append((target.rank, sample))
        return looked
