"""CPU time and memory of all processes of a job, found by a mark in their environment."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def processes_with(mark: str) -> list[int]:
    """Live processes that have ``NAME=value`` in their environment."""
    needle, found = mark.encode(), []
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if needle in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def cpu_s(pids: list[int]) -> float:
    """User and system time, of ended and awaited children too."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(int(f) for f in fields[11:15])
    return total / TICKS_PER_S


def memory_bytes(pids: list[int]) -> int:
    """Anonymous memory and each process's share of shared memory; no page cache and no mapped files."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1]) * 1024
    return total
