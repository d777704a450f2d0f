"""What /proc says about a process: read without rights beyond the owner's, never blocking, safe against its end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from steadyrun.core.records import ProcessFacts

__all__ = ["ProcessReader", "ProcessRow", "ProcessSample", "TreeUsage"]

_MAX_DESCENDANTS = 256
_COMMAND_CHARS = 120
_STAT_BYTES = 1024  # of a line of 52 numbers and a name of 15 bytes


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """The cheap facts, for comparing two moments.

    Attributes:
        cpu_s: CPU seconds that all threads used, or could have used and waited for while others had the CPU: on a
            crowded machine a busy process gets little, and only this tells it from one that sleeps.
        io_bytes: read and written together, None without the right.
    """

    state: str
    cpu_s: float
    io_bytes: int | None


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """What a process and those that descend from it use; CPU time of its children that have ended is counted in."""

    cpu_s: float
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class _Stat:
    pid: int
    comm: str
    state: str
    ppid: int
    cpu_ticks: int
    reaped_ticks: int
    threads: int
    start_ticks: int
    rss_pages: int


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One line of a list of all processes. ``command`` is the kernel's name of it, 15 characters at most."""

    pid: int
    ppid: int
    state: str
    command: str
    start_ticks: int

    @property
    def kernel_thread(self) -> bool:
        return self.ppid == 2 or self.pid == 2


class ProcessReader:
    """Reads below *root* (``/proc``; a folder of fixtures in tests). Methods answer None once the process is gone."""

    def __init__(self, root: Path = Path("/proc")) -> None:
        self._root = root
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def facts(self, pid: int) -> ProcessFacts | None:
        """State, kernel wait, threads, CPU, memory and descendants."""
        stat = self._stat(pid)
        if stat is None:
            return None
        others = [self._state_of(pid, tid) for tid in self._tasks(pid) if tid != pid]
        return ProcessFacts(
            state=stat.state,
            wchan=self.wchan(pid) or "",
            threads=stat.threads,
            cpu_s=stat.cpu_ticks / self._ticks_per_s,
            rss_bytes=stat.rss_pages * self._page_bytes,
            dead_main=stat.state == "Z" and any(s not in ("", "Z", "X") for s in others),
            children=tuple(self.descendants(pid)),
        )

    def sample(self, pid: int) -> ProcessSample | None:
        """State, CPU seconds wanted and bytes moved so far."""
        stat = self._stat(pid)
        if stat is None:
            return None
        wanted_s = self._wanted_cpu_s(pid)
        cpu_s = wanted_s if wanted_s is not None else stat.cpu_ticks / self._ticks_per_s
        return ProcessSample(stat.state, cpu_s, self.io_bytes(pid))

    def state(self, pid: int) -> str | None:
        """The state letter of the main thread; the cheapest question: it is asked of every rank at each look."""
        try:
            fd = os.open(f"{self._root}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            stat = os.read(fd, _STAT_BYTES)
        except OSError:
            return None
        finally:
            os.close(fd)
        _, end, rest = stat.rpartition(b")")
        return chr(rest[1]) if end and len(rest) > 1 else None

    def usage(self, pids: Iterable[int]) -> dict[int, TreeUsage]:
        """Of each process with its descendants; those that are gone are left out."""
        out: dict[int, TreeUsage] = {}
        scan: _Scan | None = None
        for pid in pids:
            if self._has_children_files(pid):
                children: Callable[[int], Iterator[int]] = self._children_from_tasks
            else:
                children = scan = scan or self._children_by_scan()
            ticks = pages = 0
            frontier, seen = [pid], {pid}
            while frontier and len(seen) <= _MAX_DESCENDANTS:
                stat = self._stat(frontier.pop())
                if stat is not None:
                    ticks += stat.cpu_ticks + stat.reaped_ticks
                    pages += stat.rss_pages
                    below = {c for c in children(stat.pid) if c not in seen}
                    seen |= below
                    frontier += below
            if ticks or pages:
                out[pid] = TreeUsage(ticks / self._ticks_per_s, pages * self._page_bytes)
        return out

    def rows(self) -> list[ProcessRow]:
        """All processes that are visible, in the order of their pids; one small file is read for each."""
        try:
            pids = sorted(int(name) for name in os.listdir(self._root) if name.isdigit())
        except OSError:
            return []
        stats = ((pid, self._stat(pid)) for pid in pids)
        return [ProcessRow(pid, s.ppid, s.state, s.comm, s.start_ticks) for pid, s in stats if s is not None]

    def start_ticks(self, pid: int) -> int | None:
        """Start time in clock ticks since boot: together with the pid it names one incarnation."""
        stat = self._stat(pid)
        return stat.start_ticks if stat is not None else None

    def wchan(self, pid: int) -> str | None:
        """The kernel function the main thread sleeps in; empty when it runs or the kernel does not tell."""
        text = self._read(f"{pid}/wchan")
        if text is None:
            return None
        name = text.strip()
        return "" if name in ("0", "") else name

    def io_bytes(self, pid: int) -> int | None:
        """Bytes that went through read and write calls so far; None without the right to see it."""
        text = self._read(f"{pid}/io")
        if text is None:
            return None
        values = [line.split() for line in text.splitlines()]
        return sum(int(v[1]) for v in values if len(v) == 2 and v[0] in ("rchar:", "wchar:") and v[1].isdigit())

    def catches(self, pid: int, signum: int) -> bool | None:
        """The process has a handler for *signum*: sending it cannot kill it."""
        text = self._read(f"{pid}/status")
        if text is None:
            return None
        for line in text.splitlines():
            if line.startswith("SigCgt:"):
                try:
                    return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
                except (IndexError, ValueError):
                    return None
        return None

    def descendants(self, pid: int) -> list[tuple[int, str, str]]:
        """(pid, state, command line) of every child, grandchild and so on; at most 256."""
        found: list[tuple[int, str, str]] = []
        seen = {pid}
        frontier = [pid]
        children = self._children_from_tasks if self._has_children_files(pid) else self._children_by_scan()
        while frontier and len(found) < _MAX_DESCENDANTS:
            parent = frontier.pop(0)
            for child in children(parent):
                if child in seen:
                    continue
                seen.add(child)
                frontier.append(child)
                stat = self._stat(child)
                if stat is not None:
                    found.append((child, stat.state, self.command(child) or f"[{stat.comm}]"))
        return found[:_MAX_DESCENDANTS]

    def command(self, pid: int) -> str:
        """The command line, cut; empty for zombies and kernel threads."""
        text = self._read(f"{pid}/cmdline") or ""
        return " ".join(text.rstrip("\0").split("\0"))[:_COMMAND_CHARS]

    # -- raw -----------------------------------------------------------------------------------------------------------
    def _read(self, name: str) -> str | None:
        try:
            with open(self._root / name, encoding="utf-8", errors="replace") as f:
                return f.read()
        except OSError:  # gone (ENOENT, ESRCH while reading), or no right
            return None

    def _stat(self, pid: int) -> _Stat | None:
        return _parse_stat(self._read(f"{pid}/stat"))

    def _wanted_cpu_s(self, pid: int) -> float | None:
        """Time on a CPU and in its queue, over the living threads; None where the kernel does not count it."""
        total_ns, found = 0, False
        for tid in self._tasks(pid):
            words = (self._read(f"{pid}/task/{tid}/schedstat") or "").split()
            if len(words) >= 2 and words[0].isdigit() and words[1].isdigit():
                total_ns += int(words[0]) + int(words[1])
                found = True
        return total_ns / 1e9 if found else None

    def _state_of(self, pid: int, tid: int) -> str:
        stat = _parse_stat(self._read(f"{pid}/task/{tid}/stat"))
        return stat.state if stat is not None else ""

    def _tasks(self, pid: int) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self._root / str(pid) / "task") if name.isdigit()]
        except OSError:
            return []

    def _has_children_files(self, pid: int) -> bool:
        # Only kernels with CONFIG_PROC_CHILDREN have them.
        return (self._root / str(pid) / "task" / str(pid) / "children").exists()

    def _children_from_tasks(self, pid: int) -> Iterator[int]:
        for tid in self._tasks(pid):
            text = self._read(f"{pid}/task/{tid}/children") or ""
            yield from (int(word) for word in text.split() if word.isdigit())

    def _children_by_scan(self) -> _Scan:
        parents: dict[int, list[int]] = {}
        try:
            names = os.listdir(self._root)
        except OSError:
            names = []
        for name in names:
            stat = self._stat(int(name)) if name.isdigit() else None
            if stat is not None:
                parents.setdefault(stat.ppid, []).append(int(name))
        return _Scan(parents)


@dataclass(frozen=True, slots=True)
class _Scan:
    parents: dict[int, list[int]]

    def __call__(self, pid: int) -> Iterator[int]:
        return iter(self.parents.get(pid, ()))


def _parse_stat(text: str | None) -> _Stat | None:
    """Fields of a stat line; the command may hold blanks and parentheses, so the last ``)`` ends it."""
    if text is None:
        return None
    start, end = text.find("("), text.rfind(")")
    fields = text[end + 1 :].split()
    if start < 0 or end < start or len(fields) < 22:
        return None
    try:
        return _Stat(
            pid=int(text[:start]),
            comm=text[start + 1 : end],
            state=fields[0],
            ppid=int(fields[1]),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            reaped_ticks=int(fields[13]) + int(fields[14]),
            threads=int(fields[17]),
            start_ticks=int(fields[19]),
            rss_pages=int(fields[21]),
        )
    except ValueError:
        return None
