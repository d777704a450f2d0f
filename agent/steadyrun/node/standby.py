"""Warm standbys: one interpreter per local rank that has imported torch already and waits to become a rank."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL
from typing import Any, Final

from steadyrun.core.clock import Clock, SystemClock
from steadyrun.node.ports import ProcessTable, SpawnSpec
from steadyrun.node.processes import STANDBY_ATTEMPT

__all__ = ["StandbyPool", "can_restore_nice", "memory_of"]

STANDBY_NAME: Final = "STEADYRUN_STANDBY"
NICE: Final = 5  # a third of the share of a process at 0
OOM_SCORE: Final = 500  # under memory pressure the kernel ends a standby before any rank
BACK_OFF_S: Final = (2.0, 10.0, 60.0)  # after the first, second, third death; the fourth switches standbys off
_PIPE_BYTES: Final = 65_536  # the kernel's default
_MAX_ORDER_BYTES: Final = 1 << 20  # an unprivileged pipe grows no further (fs.pipe-max-size)
_CAP_SYS_NICE: Final = 23


@dataclass(slots=True)
class _Standby:
    local_rank: int
    pid: int
    order_fd: int
    ready_fd: int
    started_s: float
    is_ready: bool = False
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Plan:
    preload: tuple[str, ...]
    preset_env: Mapping[int, Mapping[str, str | None]]
    spec_for: Callable[[int, Mapping[str, Any]], SpawnSpec]


class StandbyPool:
    """At most one standby per local rank. Used from the loop's thread.

    A standby gets its orders through a pipe as one line of JSON; end-of-file makes it leave. It runs at a lower
    priority where that can be taken back (which takes a capability or a resource limit), and the kernel's out-of-memory
    killer prefers it to any rank; both are restored when it becomes a rank.

    Args:
        processes: starts them; they die with the agent like ranks.
    """

    def __init__(self, processes: ProcessTable, clock: Clock | None = None, proc: Path = Path("/proc")) -> None:
        self._processes = processes
        self._clock = clock or SystemClock()
        self._proc = proc
        self._nice = NICE if can_restore_nice(proc) else 0
        self._plan: _Plan | None = None
        self._standbys: dict[int, _Standby] = {}
        self._due_s: dict[int, float] = {}  # when to start one again, by local rank
        self._deaths = 0
        self._notes: list[str] = []

    def prepare(
        self,
        local_ranks: Iterable[int],
        preload: Sequence[str],
        preset_env: Mapping[int, Mapping[str, str | None]],
        spec_for: Callable[[int, Mapping[str, Any]], SpawnSpec],
    ) -> list[int]:
        """Start a standby for each of *local_ranks* that has none.

        Args:
            preload: modules to import.
            preset_env: per local rank, variables that the script sets (None: removes) before it imports torch.
            spec_for: (local rank, STEADYRUN_STANDBY without descriptors) -> how to start it.

        Returns:
            The new pids, to be watched by the caller.
        """
        self._plan = _Plan(tuple(preload), dict(preset_env), spec_for)
        now_s = self._clock.now_s()
        for local_rank in local_ranks:
            if local_rank not in self._standbys:
                self._due_s.setdefault(local_rank, now_s)
        return self.poll()

    def poll(self) -> list[int]:
        """Start what is due again after a death; the new pids, to be watched by the caller. Cheap."""
        now_s = self._clock.now_s()
        self._see_ready()
        started: list[int] = []
        for local_rank in [r for r, due_s in self._due_s.items() if due_s <= now_s]:
            del self._due_s[local_rank]
            try:
                started.append(self._start(local_rank))
            except OSError as e:
                self._count_death(local_rank, f"cannot be started: {e}")
        return started

    @property
    def is_settled(self) -> bool:
        """None is to be started, and none on its way."""
        return not self._due_s and all(s.is_ready for s in self._standbys.values())

    def ready(self) -> set[int]:
        """Local ranks whose standby has imported everything."""
        self._see_ready()
        return {s.local_rank for s in self._standbys.values() if s.is_ready}

    def activate(self, local_rank: int, orders: Mapping[str, Any]) -> int | None:
        """Make the standby a rank and return its pid; None when there is none, and the caller starts a fresh process.

        One that has not imported everything yet is used as well: it is ahead of a fresh one. Never blocks.

        Args:
            orders: env, setup, stdout, stderr, cwd, as the in-rank side reads them; ``setup`` names rank and attempt.
        """
        self._due_s.pop(local_rank, None)
        standby = self._standbys.pop(local_rank, None)
        if standby is None:
            return None
        self._restore_priority(standby.pid)
        line = json.dumps(orders, separators=(",", ":")).encode() + b"\n"
        handed_over = _write_at_once(standby.order_fd, line)
        _close(standby)
        if not handed_over:
            self._processes.signal_group(standby.pid, SIGKILL)  # half an order must not run
            return None
        self._deaths = 0
        setup = orders["setup"]
        self._processes.assign(standby.pid, int(setup["rank"]), int(setup["attempt"]))
        return standby.pid

    def on_exit(self, pid: int, code: int) -> bool:
        """A process ended; True if it was a standby. It is replaced by a later ``poll``, three times at most."""
        standby = next((s for s in self._standbys.values() if s.pid == pid), None)
        if standby is None:
            return False
        del self._standbys[standby.local_rank]
        _close(standby)
        how = f"ended with status {code}" if code >= 0 else f"was ended by signal {-code}"
        self._count_death(standby.local_rank, how)
        return True

    def drop(self) -> None:
        """End all standbys now; their exits are seen by the process table."""
        self._plan = None
        self._due_s.clear()
        for standby in self._standbys.values():
            _close(standby)
            self._processes.signal_group(standby.pid, SIGKILL)
        self._standbys.clear()

    def memory_bytes(self) -> int:
        """What the ready standbys cost: memory that nobody else shares, measured when each became ready."""
        self._see_ready()
        return sum(s.memory_bytes for s in self._standbys.values())

    def status(self) -> list[dict[str, Any]]:
        """For the status file: local rank, pid, readiness, age and memory of each."""
        self._see_ready()
        now_s = self._clock.now_s()
        return [
            {
                "local_rank": s.local_rank,
                "pid": s.pid,
                "ready": s.is_ready,
                "age_s": round(now_s - s.started_s, 3),
                "memory_bytes": s.memory_bytes,
            }
            for s in sorted(self._standbys.values(), key=lambda s: s.local_rank)
        ]

    def take_notes(self) -> list[str]:
        """Messages for the user since the last call."""
        notes, self._notes = self._notes, []
        return notes

    # -- inside --------------------------------------------------------------------------------------------------------
    def _start(self, local_rank: int) -> int:
        plan = self._plan
        assert plan is not None, "a start is due only with a plan"
        told: dict[str, Any] = {
            "preload": list(plan.preload),
            "preset_env": dict(plan.preset_env.get(local_rank, {})),
        }
        spec = plan.spec_for(local_rank, told)
        order_read, order_write = os.pipe2(os.O_CLOEXEC)
        ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
        try:
            told.update(fd=order_read, ready_fd=ready_write)
            pid = self._processes.spawn(
                replace(
                    spec,
                    attempt=STANDBY_ATTEMPT,
                    env={**spec.env, STANDBY_NAME: json.dumps(told)},
                    nice=self._nice,
                    pass_fds=(*spec.pass_fds, order_read, ready_write),
                )
            )
        except OSError:
            os.close(order_write)
            os.close(ready_read)
            raise
        finally:
            os.close(order_read)
            os.close(ready_write)
        for fd in (order_write, ready_read):
            os.set_blocking(fd, False)
        _write_quietly(self._proc / str(pid) / "oom_score_adj", str(OOM_SCORE))
        self._standbys[local_rank] = _Standby(local_rank, pid, order_write, ready_read, self._clock.now_s())
        return pid

    def _see_ready(self) -> None:
        for standby in self._standbys.values():
            if standby.is_ready:
                continue
            with contextlib.suppress(BlockingIOError):
                if os.read(standby.ready_fd, 1):
                    standby.is_ready = True
                    standby.memory_bytes = memory_of(standby.pid, self._proc)

    def _count_death(self, local_rank: int, how: str) -> None:
        if self._plan is None:
            return
        if self._deaths < len(BACK_OFF_S):
            self._due_s[local_rank] = self._clock.now_s() + BACK_OFF_S[self._deaths]
        else:
            self._notes.append(
                f"standbys are off: the one of local rank {local_rank} {how}, after {self._deaths} others; restarts "
                "will start fresh processes (see the messages above, or run with --ft-standby off)"
            )
            self.drop()
        self._deaths += 1

    def _restore_priority(self, pid: int) -> None:
        _write_quietly(self._proc / str(pid) / "oom_score_adj", _read_quietly(self._proc / "self" / "oom_score_adj"))
        if not self._nice:
            return
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        for _ in range(2):  # a thread started during the first pass has its maker's value
            with contextlib.suppress(OSError):
                for tid in os.listdir(self._proc / str(pid) / "task"):
                    with contextlib.suppress(OSError):
                        os.setpriority(os.PRIO_PROCESS, int(tid), nice)


def can_restore_nice(proc: Path = Path("/proc")) -> bool:
    """This process may raise the priority of its children again after lowering it: by CAP_SYS_NICE or RLIMIT_NICE."""
    wanted = 20 - os.getpriority(os.PRIO_PROCESS, 0)
    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    if limit in (-1, resource.RLIM_INFINITY) or limit >= wanted:
        return True
    for line in _read_quietly(proc / "self" / "status").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_NICE & 1)
    return False


def memory_of(pid: int, proc: Path = Path("/proc")) -> int:
    """Bytes that would be free without this process (private pages); 0 where the kernel does not tell."""
    total_kib = 0
    for line in _read_quietly(proc / str(pid) / "smaps_rollup").splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:", "Private_Hugetlb:")):
            total_kib += int(line.split()[1])
    return total_kib * 1024


def _write_at_once(fd: int, line: bytes) -> bool:
    """Put the whole line into the pipe without waiting for its reader; False when it does not fit or nobody reads."""
    try:
        if len(line) > _PIPE_BYTES:
            if len(line) > _MAX_ORDER_BYTES:
                return False
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, len(line))
        return os.write(fd, line) == len(line)
    except OSError:
        return False


def _close(standby: _Standby) -> None:
    os.close(standby.order_fd)
    os.close(standby.ready_fd)


def _write_quietly(path: Path, text: str) -> None:
    with contextlib.suppress(OSError):
        path.write_text(text)


def _read_quietly(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
