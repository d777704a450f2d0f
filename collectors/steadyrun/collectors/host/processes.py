"""Processes in the way: zombies that nobody reaps, processes stuck in the kernel, strangers that hold a GPU."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steadyrun.collectors.process import ProcessReader, ProcessRow
from steadyrun.collectors.protocol import CheckResult, Fact, Health, Trouble, combine

__all__ = ["GpuHolder", "ProcessCollector", "find_gpu_holders"]

EVERY_S: Final = 30.0
LIMIT_S: Final = 20.0
MANY_ZOMBIES: Final = 100
STUCK_S: Final = 120.0  # a save to a slow disk waits in state D as well; it moves in between
_GPU_DEVICE = re.compile(r"/dev/nvidia(\d+)$")
_MAX_FDS: Final = 4096


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """A process that has a GPU's device file open. ``gpus``: minor numbers. ``is_orphan``: init is its parent."""

    pid: int
    command: str
    gpus: tuple[int, ...]
    is_orphan: bool


def find_gpu_holders(
    rows: Iterable[ProcessRow],
    ours: Callable[[int], bool],
    proc: Path = Path("/proc"),
    reader: ProcessReader | None = None,
) -> list[GpuHolder]:
    """Holders that are not *ours*; those that this user may see (root: all)."""
    reader = reader or ProcessReader(proc)
    out = []
    for row in rows:
        if row.state in "ZXD" or row.kernel_thread or ours(row.pid):  # looking at one in state D may hang
            continue
        gpus = _gpus_of(proc / str(row.pid) / "fd")
        if gpus:
            command = reader.command(row.pid) or row.command
            out.append(GpuHolder(row.pid, command, tuple(sorted(gpus)), row.ppid == 1))
    return out


def _gpus_of(folder: Path) -> set[int]:
    found: set[int] = set()
    try:
        with os.scandir(folder) as entries:
            for i, entry in enumerate(entries):
                if i >= _MAX_FDS:
                    break
                try:
                    m = _GPU_DEVICE.match(os.readlink(entry.path))
                except OSError:  # closed meanwhile
                    continue
                if m:
                    found.add(int(m[1]))
    except OSError:  # gone, or another user's
        return found
    return found


class ProcessCollector:
    """Looks at all processes of the machine that are visible from here.

    Args:
        agent_pid: everything below it is the job's own.
        gpus: minor numbers of the GPUs that the job uses; None for all, empty for none.
    """

    name = "processes"
    every_s = EVERY_S
    limit_s = LIMIT_S

    def __init__(
        self,
        agent_pid: int | None = None,
        gpus: frozenset[int] | None = None,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent_pid = os.getpid() if agent_pid is None else agent_pid
        self._gpus = gpus
        self._proc = proc
        self._reader = ProcessReader(proc)
        self._clock = clock
        self._stuck_since_s: dict[tuple[int, int], float] = {}  # by pid and start: a pid may be used again

    def check(self) -> CheckResult:
        """Look now."""
        rows = self._reader.rows()
        by_pid = {row.pid: row for row in rows}
        zombies = [row for row in rows if row.state == "Z"]
        stuck = self._stuck(rows)
        has_gpus = self._gpus is None or bool(self._gpus)
        holders = self._holders(rows, by_pid) if has_gpus and (self._proc / "driver/nvidia").exists() else []
        facts: dict[str, Fact] = {
            "processes": len(rows),
            "zombies": len(zombies),
            "stuck_processes": len(stuck),
            "gpu_strangers": len(holders),
        }
        troubles = [*_zombie_troubles(zombies, by_pid), *(self._stuck_trouble(r, s) for r, s in stuck)]
        troubles += [_holder_trouble(holder) for holder in holders]
        return combine(self.name, troubles, f"{len(rows)} processes, {len(zombies)} of them zombies", facts)

    def _stuck(self, rows: Iterable[ProcessRow]) -> list[tuple[ProcessRow, float]]:
        """Those seen in state D at each look since *STUCK_S* ago, and for how long."""
        now_s = self._clock()
        in_kernel = {(row.pid, row.start_ticks): row for row in rows if row.state == "D"}
        self._stuck_since_s = {key: self._stuck_since_s.get(key, now_s) for key in in_kernel}
        long = ((key, now_s - since_s) for key, since_s in self._stuck_since_s.items())
        return [(in_kernel[key], for_s) for key, for_s in long if for_s >= STUCK_S]

    def _stuck_trouble(self, row: ProcessRow, for_s: float) -> Trouble:
        where = self._reader.wchan(row.pid)
        text = f"process {row.pid} ({row.command}) has been stuck in the kernel for {for_s:.0f} s" + (
            f", in {where}" if where else ""
        )
        if row.command.startswith(("nvidia", "nv_", "irq/")) and "nv" in row.command:
            return Trouble(Health.UNHEALTHY, text, ("the GPU driver hangs: leave out the node and reboot it",))
        return Trouble(Health.DEGRADED, text, ("look at its storage; SIGKILL does not end it",))

    def _holders(self, rows: Iterable[ProcessRow], by_pid: Mapping[int, ProcessRow]) -> list[GpuHolder]:
        def ours(pid: int) -> bool:
            for _ in range(64):
                if pid == self._agent_pid:
                    return True
                row = by_pid.get(pid)
                if row is None or row.ppid <= 1:
                    return False
                pid = row.ppid
            return False

        found = find_gpu_holders(rows, ours, self._proc, self._reader)
        return [h for h in found if self._gpus is None or self._gpus.intersection(h.gpus)]

    def close(self) -> None:
        """Nothing is held."""


def _zombie_troubles(zombies: Iterable[ProcessRow], by_pid: Mapping[int, ProcessRow]) -> list[Trouble]:
    parents: dict[int, int] = {}
    for row in zombies:
        parents[row.ppid] = parents.get(row.ppid, 0) + 1
    out = []
    for ppid, count in parents.items():
        if count >= MANY_ZOMBIES:
            name = by_pid[ppid].command if ppid in by_pid else "?"
            text = f"{count} zombies of process {ppid} ({name}), which does not reap its children"
            out.append(Trouble(Health.DEGRADED, text, ("docker run --init, or end that process",)))
    return out


def _holder_trouble(holder: GpuHolder) -> Trouble:
    gpus = ", ".join(str(g) for g in holder.gpus)
    kind = "an orphan" if holder.is_orphan else "not of this job"
    text = f"process {holder.pid} ({holder.command[:60]}), {kind}, has GPU {gpus} open"
    advice = f"look at it, then: kill -9 {holder.pid}" if holder.is_orphan else "find out whose it is"
    return Trouble(Health.DEGRADED, text, (advice,), f"gpu {gpus}")
