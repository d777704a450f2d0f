"""How many snapshots the memory of the node allows, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["SHARE", "affordable_slots", "available_bytes"]

SHARE: Final = 0.4  # of the memory that is free: the rest is for what the training still allocates
_GIB: Final = 1 << 30
_KIB: Final = 1 << 10
_UNLIMITED_BYTES: Final = 1 << 60  # version 1 writes the largest multiple of a page for "no limit"


def affordable_slots(
    needed_per_slot_bytes: int,
    available_bytes: int,
    wanted: int = 2,
    limited_by: str = "",
) -> tuple[int, str]:
    """How many snapshots to keep in memory, and a sentence that says why.

    Args:
        needed_per_slot_bytes: one snapshot of every rank of this node, together.
        available_bytes: see the function of that name.
        wanted: at most so many.
        limited_by: what sets *available_bytes*, for the sentence.
    """
    limit_bytes = int(available_bytes * SHARE)
    slots = min(wanted, limit_bytes // needed_per_slot_bytes if needed_per_slot_bytes > 0 else wanted)
    one = f"a snapshot of this node's ranks takes {_size(needed_per_slot_bytes)}"
    free = f"{_size(available_bytes)} are free" + (f" ({limited_by})" if limited_by else "")
    if wanted <= 0:
        return 0, "no snapshots in memory were asked for: saves are written directly"
    if slots >= wanted:
        return wanted, f"{wanted} snapshots are kept in memory: {one}, {free}"
    why = f"{one}, {free}, and snapshots take at most {SHARE:.0%} of that"
    if slots >= 1:
        consequence = "; a rank that dies while it copies leaves none" if slots == 1 else ""
        return slots, f"{slots} instead of {wanted} snapshots are kept in memory: {why}{consequence}"
    return 0, (
        f"no snapshots in memory: {why}; saves are written directly and block the training until they are written "
        f"(give the job more memory, or shard the state over more ranks)"
    )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _GIB:.2f} GiB" if size_bytes >= _GIB // 10 else f"{size_bytes / (1 << 20):.1f} MiB"


def available_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Memory that this process and its siblings can still take, and what sets that limit.

    The smallest of the machine's MemAvailable and what each memory cgroup above this process has left (version 1 or 2,
    also as a container sees them). Page cache counts as free where the kernel could drop it.

    Args:
        root: with ``proc`` and ``sys`` in it.

    Returns:
        0 with the reason when /proc/meminfo cannot be read.
    """
    try:
        meminfo = _table(root / "proc/meminfo")
        limits = [_Limit(meminfo["MemAvailable"] * _KIB, "MemAvailable of the machine")]
    except (OSError, KeyError, ValueError) as e:
        return 0, f"MemAvailable cannot be read: {type(e).__name__}: {e}"
    limits += _group_limits(root)
    least = min(limits, key=lambda limit: limit.left_bytes)
    return max(least.left_bytes, 0), least.name


@dataclass(frozen=True, slots=True)
class _Limit:
    left_bytes: int
    name: str


def _table(path: Path) -> dict[str, int]:
    """``name: number`` or ``name number`` lines."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {r[0]: int(r[1]) for r in rows if len(r) >= 2 and r[1].isdigit()}


def _group_limits(root: Path) -> Iterator[_Limit]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            yield from _limits_above(root / "sys/fs/cgroup", path, _left_v2)
        elif "memory" in controllers.split(","):
            yield from _limits_above(root / "sys/fs/cgroup/memory", path, _left_v1)


def _limits_above(mount: Path, path: str, left: Callable[[Path], int | None]) -> Iterator[_Limit]:
    """What the group at *path* and each one above it has left.

    In a container the path may be the host's while the mount shows the container's own group: then only the mount
    itself is there, and that is the right one.
    """
    parts = [p for p in path.split("/") if p]
    if ".." in parts:  # a group outside of what our namespace shows
        parts = []
    for depth in range(len(parts), -1, -1):
        folder = mount.joinpath(*parts[:depth])
        try:
            left_bytes = left(folder)
        except (OSError, ValueError, KeyError):
            continue
        if left_bytes is not None:
            yield _Limit(left_bytes, f"memory limit of the cgroup /{'/'.join(parts[:depth])}")


def _left_v2(folder: Path) -> int | None:
    limits = [(folder / name).read_text().strip() for name in ("memory.max", "memory.high")]
    limits_bytes = [int(limit) for limit in limits if limit != "max"]
    if not limits_bytes:
        return None
    used_bytes = int((folder / "memory.current").read_text())
    return min(limits_bytes) - used_bytes + _droppable_bytes(_table(folder / "memory.stat"), "")


def _left_v1(folder: Path) -> int | None:
    limit_bytes = int((folder / "memory.limit_in_bytes").read_text())
    if limit_bytes >= _UNLIMITED_BYTES:
        return None
    used_bytes = int((folder / "memory.usage_in_bytes").read_text())
    return limit_bytes - used_bytes + _droppable_bytes(_table(folder / "memory.stat"), "total_")


def _droppable_bytes(stat: dict[str, int], prefix: str) -> int:
    """Page cache that can go: all that was used once, half of what is used often (as the kernel counts MemAvailable).

    Shared memory, ours included, is not in these figures.
    """
    return stat[f"{prefix}inactive_file"] + stat[f"{prefix}active_file"] // 2
