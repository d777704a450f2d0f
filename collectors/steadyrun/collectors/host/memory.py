"""Main memory: of the machine, of the cgroup that limits the job, and whether processes wait for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from steadyrun.collectors.host.pressure import read_pressure
from steadyrun.collectors.oom import read_oom_kills
from steadyrun.collectors.protocol import CheckResult, Fact, Health, Trouble, combine

__all__ = ["GroupMemory", "MachineMemory", "MemoryCollector", "read_group_memory", "read_machine_memory"]

EVERY_S: Final = 10.0
LIMIT_S: Final = 10.0
LOW_RATIO: Final = 0.05
VERY_LOW_RATIO: Final = 0.02
# Share of the last ten seconds in which all runnable processes waited for memory at once.
WAITING_RATIO: Final = 0.10
_NO_LIMIT_BYTES: Final = 1 << 60  # version 1 writes "no limit" as a number near 2**63

_FREE: Final = "give the job more memory, or fewer data loader workers, smaller prefetch, or fewer ranks"


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """``available_bytes``: what can be had without swapping, page cache that can be dropped counted in."""

    total_bytes: int
    available_bytes: int
    swap_used_bytes: int


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Of the nearest cgroup with a limit. ``used_bytes`` without page cache that can be dropped at once."""

    limit_bytes: int
    used_bytes: int


def read_machine_memory() -> MachineMemory:
    """What the kernel says now."""
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    return MachineMemory(int(memory.total), int(memory.available), int(swap.used))


def read_group_memory(root: Path = Path("/"), pid: str = "self") -> GroupMemory | None:
    """The tightest limit above *pid*; None where there is none or it cannot be seen."""
    found = []
    for folder, version in _groups(root, pid):
        limit, usage, cache = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit_bytes, used_bytes = _number(folder / limit), _number(folder / usage)
        if limit_bytes is None or used_bytes is None or limit_bytes >= _NO_LIMIT_BYTES:
            continue
        found.append(GroupMemory(limit_bytes, max(used_bytes - _stat(folder / "memory.stat", cache), 0)))
    return min(found, key=lambda g: g.limit_bytes - g.used_bytes, default=None)


def _groups(root: Path, pid: str) -> list[tuple[Path, int]]:
    """The group of *pid* and all above it. Inside a container its path may be the host's; then the mount is it."""
    try:
        lines = (root / "proc" / pid / "cgroup").read_text(errors="replace").splitlines()
    except OSError:
        return []
    out: list[tuple[Path, int]] = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            base, version = root / "sys/fs/cgroup/memory", 1
        elif not controllers:
            base, version = root / "sys/fs/cgroup", 2
        else:
            continue
        folder = base / path.lstrip("/")
        while folder != base and base in folder.parents:
            out.append((folder, version))
            folder = folder.parent
        out.append((base, version))
    return out


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdecimal() else None  # "max" is no limit


def _stat(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    values = (line.split() for line in lines)
    return next((int(v[1]) for v in values if len(v) == 2 and v[0] == name and v[1].isdecimal()), 0)


class MemoryCollector:
    """Little memory left kills ranks without a message; the pressure tells why a rank was slow before that."""

    name = "memory"
    every_s = EVERY_S
    limit_s = LIMIT_S

    def __init__(
        self,
        root: Path = Path("/"),
        machine: Callable[[], MachineMemory] = read_machine_memory,
        group: Callable[[Path], GroupMemory | None] = read_group_memory,
        kills: Callable[[Path], tuple[int | None, int | None]] = read_oom_kills,
    ) -> None:
        self._root = root
        self._kills = kills
        self._first_kills: tuple[int | None, int | None] | None = None
        self._machine = machine
        self._group = group

    def check(self) -> CheckResult:
        """Look now."""
        machine, group = self._machine(), self._group(self._root)
        pressure = read_pressure(self._root / "proc", "memory")
        kills = self._kills(self._root)
        self._first_kills = self._first_kills or kills
        facts: dict[str, Fact] = {
            "memory_total_bytes": machine.total_bytes,
            "memory_available_bytes": machine.available_bytes,
            "swap_used_bytes": machine.swap_used_bytes,
        }
        for scope, now, first in zip(("cgroup", "host"), kills, self._first_kills, strict=True):
            if now is not None and first is not None:
                facts[f"oom_kills_{scope}_total"] = max(now - first, 0)  # since the first look
        troubles = _low("the machine", machine.available_bytes, machine.total_bytes)
        if group is not None:
            facts |= {"cgroup_limit_bytes": group.limit_bytes, "cgroup_used_bytes": group.used_bytes}
            troubles += _low("the job's memory cgroup", group.limit_bytes - group.used_bytes, group.limit_bytes)
        if pressure is not None:
            facts |= pressure.facts("memory")
            if pressure.full_10s >= WAITING_RATIO:
                text = f"for {pressure.full_10s:.0%} of the last ten seconds every process waited for memory"
                troubles.append(Trouble(Health.DEGRADED, text, (_FREE,)))
        return combine(self.name, troubles, f"{_gib(machine.available_bytes)} available", facts)

    def close(self) -> None:
        """Nothing is held."""


def _low(whose: str, free_bytes: int, total_bytes: int) -> list[Trouble]:
    ratio = free_bytes / total_bytes if total_bytes > 0 else 1.0
    if ratio >= LOW_RATIO:
        return []
    health = Health.UNHEALTHY if ratio < VERY_LOW_RATIO else Health.DEGRADED
    text = f"{whose} has {_gib(free_bytes)} of {_gib(total_bytes)} left ({ratio:.1%})"
    return [Trouble(health, text, (_FREE,))]


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
