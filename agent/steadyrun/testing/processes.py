"""Processes that exist only in the test: scripted per (rank, attempt), on a clock the test moves."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from steadyrun.core.clock import Clock
from steadyrun.node.ports import ExitSeen, SpawnSpec, SweepReport

__all__ = ["FakeProcessTable", "Life"]


@dataclass(frozen=True, slots=True)
class Life:
    """What one process does with itself.

    Attributes:
        exit_after_s: it ends by itself so long after its start; None: never.
        exit_code: the code it then ends with; negative for a signal.
        ignores_sigterm: SIGTERM has no effect.
        term_takes_s: from SIGTERM to its end (an emergency save).
        term_code: the code it then ends with.
        unkillable: in state D; not even SIGKILL ends it.
        leaves: commands of children that outlive it.
        leaves_shm: names in /dev/shm that outlive it.
        fails_to_start: spawn raises OSError with this text.
    """

    exit_after_s: float | None = None
    exit_code: int = 0
    ignores_sigterm: bool = False
    term_takes_s: float = 0.0
    term_code: int = -signal.SIGTERM
    unkillable: bool = False
    leaves: tuple[str, ...] = ()
    leaves_shm: tuple[str, ...] = ()
    fails_to_start: str = ""


@dataclass(slots=True)
class _FakeProcess:
    pid: int
    rank: int
    attempt: int
    life: Life
    fd: int
    ends_at_s: float
    code: int
    is_stopped: bool = False
    remaining_s: float = 0.0  # while stopped: what was left until its end
    pending: list[int] = field(default_factory=list)
    is_reported: bool = False
    children: dict[int, str] = field(default_factory=dict)


class FakeProcessTable:
    """``ProcessTable`` without processes.

    Args:
        lives: by (rank, attempt); a process without an entry runs until it is told to end.
    """

    def __init__(self, clock: Clock, lives: Mapping[tuple[int, int], Life] | None = None) -> None:
        self._clock = clock
        self._lives = dict(lives or {})
        self._pids = itertools.count(100_000)
        self._processes: dict[int, _FakeProcess] = {}
        self.signals: list[tuple[int, int]] = []  # (pid, signal) in order, for assertions
        self.spawned: list[SpawnSpec] = []

    def script(self, rank: int, attempt: int, life: Life) -> None:
        """Set what the next process of this rank and attempt does."""
        self._lives[rank, attempt] = life

    def attempt_of(self, pid: int) -> tuple[int, int]:
        """(rank, attempt) that *pid* belongs to now."""
        process = self._processes[pid]
        return process.rank, process.attempt

    def spawn(self, spec: SpawnSpec) -> int:
        life = self._lives.get((spec.rank, spec.attempt), Life())
        if life.fails_to_start:
            raise OSError(life.fails_to_start)
        self.spawned.append(spec)
        return self._begin(spec.rank, spec.attempt, life)

    def adopt(
        self, pid: int, rank: int, local_rank: int, attempt: int, exit_code: Callable[[], int | None] | None = None
    ) -> None:
        self._begin(rank, attempt, self._lives.get((rank, attempt), Life()), pid)

    def assign(self, pid: int, rank: int, attempt: int) -> None:
        process = self._processes[pid]
        process.rank, process.attempt = rank, attempt
        process.life = self._lives.get((rank, attempt), Life())
        self._schedule_natural_end(process)

    def fileno_of(self, pid: int) -> int:
        return self._processes[pid].fd

    def poll_exits(self) -> Sequence[ExitSeen]:
        now_s = self._clock.now_s()
        seen: list[ExitSeen] = []
        for process in self._processes.values():
            if not process.is_reported and process.ends_at_s <= now_s:
                process.is_reported = True
                os.eventfd_write(process.fd, 1)
                seen.append(ExitSeen(process.pid, process.code, process.ends_at_s))
        return tuple(seen)

    def signal(self, pid: int, signum: int) -> bool:
        process = self._processes.get(pid)
        if process is None or self._is_gone(process):
            return False
        self.signals.append((pid, signum))
        self._receive(process, signum)
        return True

    def signal_group(self, pid: int, signum: int) -> bool:
        process = self._processes.get(pid)
        if process is None:
            return False
        is_hit = self.signal(pid, signum)
        if process.children and not is_hit:
            self.signals.append((pid, signum))
        is_hit = is_hit or bool(process.children)
        if signum == signal.SIGKILL:
            process.children.clear()
        return is_hit

    def record_descendants(self) -> None:
        """Nothing to do: children are known from the script."""

    def sweep(self, attempt: int) -> SweepReport:
        ended: list[tuple[int, str]] = []
        removed: list[str] = []
        stuck: list[int] = []
        for process in self._processes.values():
            if not 0 <= process.attempt <= attempt:
                continue
            if not self._is_gone(process):
                self._receive(process, signal.SIGKILL)
                if self._is_gone(process):
                    ended.append((process.pid, f"rank {process.rank}"))
                else:
                    stuck.append(process.pid)
                    continue
            ended.extend(process.children.items())
            process.children.clear()
            removed.extend(process.life.leaves_shm)
            process.life = Life()
        return SweepReport(tuple(ended), tuple(removed), tuple(stuck))

    def next_exit_s(self) -> float:
        """When the next process ends by itself; ``inf`` if none does."""
        return min((p.ends_at_s for p in self._processes.values() if not p.is_reported), default=float("inf"))

    def close(self) -> None:
        for process in self._processes.values():
            os.close(process.fd)
        self._processes.clear()

    # -- inside --------------------------------------------------------------------------------------------------------
    def _begin(self, rank: int, attempt: int, life: Life, pid: int | None = None) -> int:
        number = pid if pid is not None else next(self._pids)
        fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        process = _FakeProcess(number, rank, attempt, life, fd, float("inf"), life.exit_code)
        self._processes[number] = process
        self._schedule_natural_end(process)
        return number

    def _schedule_natural_end(self, process: _FakeProcess) -> None:
        process.children = {next(self._pids): command for command in process.life.leaves}
        if process.life.exit_after_s is not None:
            process.ends_at_s = self._clock.now_s() + process.life.exit_after_s
            process.code = process.life.exit_code

    def _is_gone(self, process: _FakeProcess) -> bool:
        return process.ends_at_s <= self._clock.now_s()

    def _receive(self, process: _FakeProcess, signum: int) -> None:
        now_s = self._clock.now_s()
        if signum == signal.SIGKILL:
            if not process.life.unkillable:
                process.ends_at_s, process.code = now_s, -signal.SIGKILL
        elif signum == signal.SIGSTOP:
            process.is_stopped, process.remaining_s = True, process.ends_at_s - now_s
            process.ends_at_s = float("inf")
        elif signum == signal.SIGCONT and process.is_stopped:
            process.is_stopped, process.ends_at_s = False, now_s + process.remaining_s
            while process.pending:
                self._receive(process, process.pending.pop(0))
        elif process.is_stopped and signum:
            process.pending.append(signum)  # as the kernel does
        elif signum == signal.SIGTERM and not process.life.ignores_sigterm and not process.life.unkillable:
            ends_at_s = now_s + process.life.term_takes_s
            if ends_at_s < process.ends_at_s:
                process.ends_at_s, process.code = ends_at_s, process.life.term_code
