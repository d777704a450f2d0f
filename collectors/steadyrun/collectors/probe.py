"""The second, independent signal about a rank that is late: does its process move?

A few samples of the main stack and of /proc over a window.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from steadyrun.collectors.process import ProcessReader, ProcessSample
from steadyrun.collectors.stacks import StackRequest
from steadyrun.core.frames import Doing, activity_of, callsite, main_stack, same_place, user_frame
from steadyrun.core.records import ThreadStack

__all__ = ["ProbeReading", "ProbeRunner", "RankSample", "read_samples"]

IDLE_CPU_SHARE: Final = 0.3
DUMP_LIMIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class RankSample:
    """One look. The process is read before the dump and after it, so that the dump's own work is not counted.

    ``children_cpu_s``: CPU seconds so far of each living descendant, by pid.
    """

    before_at_s: float
    before: ProcessSample | None
    after_at_s: float
    after: ProcessSample | None
    stacks: tuple[ThreadStack, ...] = ()
    children_cpu_s: Mapping[int, float] = field(default_factory=dict)


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
    children_cpu_share: float = 0.0
    stacks: tuple[ThreadStack, ...] = ()
    doing: str = ""
    place: str = ""


def read_samples(rank: int, samples: Sequence[RankSample]) -> ProbeReading:
    """The reading from samples in order of time; state ``X`` when the process was gone at the end."""
    cpu_s = between_s = children_cpu_s = 0.0
    io_moved = False
    for earlier, later in pairwise(samples):
        if earlier.after is None or later.before is None:
            continue
        cpu_s += max(later.before.cpu_s - earlier.after.cpu_s, 0.0)
        children_cpu_s += sum(
            max(now_s - earlier.children_cpu_s[pid], 0.0)
            for pid, now_s in later.children_cpu_s.items()
            if pid in earlier.children_cpu_s
        )
        between_s += later.before_at_s - earlier.after_at_s
        if earlier.after.io_bytes is not None and later.before.io_bytes is not None:
            io_moved = io_moved or later.before.io_bytes != earlier.after.io_bytes
    share = cpu_s / between_s if between_s > 0 else 0.0
    mains = [m.frames for s in samples if (m := main_stack(s.stacks)) is not None]
    every_sample = len(mains) == len(samples)
    activity = activity_of(mains[-1]) if mains else None
    doing = activity.doing if activity is not None else Doing.UNKNOWN
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
        children_cpu_share=round(children_cpu_s / between_s, 4) if between_s > 0 else 0.0,
        stacks=samples[-1].stacks if samples else (),
        doing=doing.value if mains else "",
        place=f"{activity.op} at {callsite(user_frame(mains[-1]))}" if activity is not None else "",
    )


def _is_doubtful(samples: Sequence[RankSample]) -> bool:
    """So far this rank looks stuck, or it is too early to tell."""
    if not samples or not samples[-1].stacks:
        return False
    reading = read_samples(0, samples)
    return reading.stack_unchanged is not False and not reading.in_collective and not reading.compiling


@dataclass(slots=True)
class ProbeRunner:
    """One probe of some ranks. ``run`` blocks for the window: call it in a thread; ``stop`` from any other ends it.

    Attributes:
        pids: rank -> pid.
        paths: rank -> where its faulthandler writes.
        stack_signal: makes it write.
        samples: looks at all ranks in the window, at least 2.
        closer: further looks between two of those, at ranks that seem to stand still outside of a collective. Few looks
            show one place by chance where most of a loop's time goes to one call.
    """

    pids: Mapping[int, int]
    paths: Mapping[int, Path]
    stack_signal: int
    window_s: float
    samples: int = 4
    closer: int = 7
    process: ProcessReader = field(default_factory=ProcessReader)
    _stopped: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        if self.samples < 2:
            raise ValueError(f"samples must be at least 2, got {self.samples}")

    def stop(self) -> None:
        """Make ``run`` return soon, with what it has."""
        self._stopped.set()

    def run(self) -> tuple[ProbeReading, ...]:
        """A reading per rank, in rank order; raises nothing."""
        taken: dict[int, list[RankSample]] = {rank: [] for rank in sorted(self.pids)}
        limit_s = min(DUMP_LIMIT_S, self.window_s / self.samples)
        every = self.closer + 1
        looks = (self.samples - 1) * every
        began_s = time.monotonic()
        for i in range(looks + 1):
            at_all = i % every == 0
            ranks = [r for r, samples in taken.items() if at_all or _is_doubtful(samples)]
            due_s = began_s + self.window_s * i / looks
            if self._stopped.wait(max(due_s - time.monotonic(), 0.0)):
                break
            for rank, sample in self._look(ranks, limit_s):
                if at_all or sample.stacks:
                    taken[rank].append(sample)
        return tuple(read_samples(rank, samples) for rank, samples in taken.items())

    def _look(self, ranks: Sequence[int], limit_s: float) -> list[tuple[int, RankSample]]:
        asked: list[tuple[int, float, ProcessSample | None, StackRequest | None]] = []
        for rank in ranks:
            pid = self.pids[rank]
            before = self.process.sample(pid)
            at_s = time.monotonic()
            request = None
            # A stopped process can write nothing; without a handler the signal would end the process.
            can_answer = before is not None and before.state not in "TtZX"
            if can_answer and self.process.catches(pid, self.stack_signal):
                request = StackRequest(pid, self.stack_signal, self.paths[rank])
                request = request if request.send() else None
            asked.append((rank, at_s, before, request))
        deadline_s = time.monotonic() + limit_s
        looked = []
        for rank, at_s, before, request in asked:
            dump = request.wait(deadline_s) if request is not None else None
            after = self.process.sample(self.pids[rank])
            stacks = dump.stacks if dump is not None else ()
            children = self._children_cpu_s(self.pids[rank])
            looked.append((rank, RankSample(at_s, before, time.monotonic(), after, stacks, children)))
        return looked

    def _children_cpu_s(self, pid: int) -> dict[int, float]:
        samples = ((child, self.process.sample(child)) for child, _, _ in self.process.descendants(pid))
        return {child: sample.cpu_s for child, sample in samples if sample is not None}
