"""Was it the out-of-memory killer? The kernel's own counters and log decide.

The kernel counts every process its OOM killer ends in the memory cgroup of the victim (``oom_kill``), in a lack of
memory of the group as of the whole machine, and writes a line to its log with the pid as the machine's own namespace
has it. Both are written before the signal is sent: whoever has reaped the process can rely on them.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from steadyrun.core.records import OomRecord

__all__ = ["OomKill", "OomWatch", "parse_oom_line", "read_oom_kills"]

V2_SOURCE: Final = "cgroup memory.events"
V1_SOURCE: Final = "cgroup v1 memory.oom_control"
LOG_SOURCE: Final = "kernel log"
_MAX_GROUPS: Final = 512
_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"  # PROC_PID_INIT_INO: only there are the log's pids ours

_KILLED = re.compile(r"Killed process (?P<pid>\d+),? \((?P<comm>.*?)\)(?P<rest>,? total-vm.*|,? UID.*|\s*)$")
_TASK = re.compile(r"oom-kill:constraint=(?P<constraint>\w+).*?task=(?P<comm>.*),pid=(?P<pid>\d+),uid=\d+")
_RSS = re.compile(r"(anon|file|shmem)-rss:(\d+)kB")


@dataclass(frozen=True, slots=True)
class OomKill:
    """One kill in the kernel log. ``pid`` as the machine's first pid namespace numbers it."""

    pid: int
    command: str
    of_group: bool
    rss_bytes: int | None = None


def parse_oom_line(line: str) -> OomKill | None:
    """The kill that a line of the kernel log tells of (a record of /dev/kmsg or a line of dmesg), or None."""
    if m := _KILLED.search(line):
        sizes = [int(kb) * 1024 for _, kb in _RSS.findall(m["rest"])]
        of_group = "Memory cgroup out of memory" in line
        return OomKill(int(m["pid"]), m["comm"], of_group, sum(sizes) if sizes else None)
    if m := _TASK.search(line):
        return OomKill(int(m["pid"]), m["comm"], m["constraint"] == "CONSTRAINT_MEMCG")
    return None


def read_oom_kills(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """(in this process's memory group and, in version 2, below it; on the whole machine) since these exist."""
    try:
        lines = (root / "proc/vmstat").read_text().splitlines()
    except OSError:
        lines = []
    words = (line.split() for line in lines)
    machine = next((int(w[1]) for w in words if len(w) == 2 and w[0] == "oom_kill" and w[1].isdecimal()), None)
    return OomWatch(root).own_kills(), machine


@dataclass(slots=True)
class _KernelLog:
    """/dev/kmsg from now on; a plain file serves in tests."""

    path: Path
    fd: int | None = None
    problem: str = ""
    kills: dict[int, OomKill] = field(default_factory=dict)  # by pid: the kernel writes two lines for one kill

    def open(self) -> None:
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self.fd, 0, os.SEEK_END)
        except OSError as e:
            self.problem = f"cannot read {self.path}: {e.strerror} (run as root or grant CAP_SYSLOG)"
            if self.fd is not None:
                os.close(self.fd)
                self.fd = None

    def drain(self) -> None:
        """Take what was written since; each read of /dev/kmsg gives one record."""
        for _ in range(100_000):
            if self.fd is None:
                return
            try:
                raw = os.read(self.fd, 8192)
            except BlockingIOError:
                return
            except BrokenPipeError:  # records were overwritten before we read them; the next read goes on after the gap
                continue
            except OSError as e:
                self.problem = f"cannot read {self.path}: {e.strerror}"
                return
            if not raw:
                return
            for line in raw.decode("utf-8", errors="replace").splitlines():
                kill = parse_oom_line(line)
                if kill is not None and (kill.rss_bytes is not None or kill.pid not in self.kills):
                    self.kills[kill.pid] = kill

    @property
    def last(self) -> OomKill:
        return next(reversed(self.kills.values()))

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class OomWatch:
    """Remembers the counters of a moment (``rebase``) and tells what has changed since. Safe to call from any thread.

    Args:
        proc: ``/proc``; cgroup: where the memory controller is mounted is read from ``proc/self/mountinfo`` and taken
            below *root*.
        kmsg: the kernel log.
    """

    def __init__(
        self, root: Path = Path("/"), proc: Path | None = None, kmsg: Path | None = None, pid: int | None = None
    ) -> None:
        self._root = root
        self._proc = proc if proc is not None else root / "proc"
        self._log = _KernelLog(kmsg if kmsg is not None else root / "dev/kmsg")
        self._own = str(pid) if pid is not None else "self"
        self._lock = threading.Lock()
        self._mounts = self._find_mounts()
        self._log_has_our_pids = self._in_first_namespace()
        self._baseline: dict[Path, int] = {}
        self._group_of: dict[int, Path] = {}

    def rebase(self) -> None:
        """Take the counters anew and forget the kernel log so far: an earlier kill must not explain a later one."""
        with self._lock:
            if self._log.fd is None and not self._log.problem:
                self._log.open()
            self._log.drain()
            self._log.kills.clear()
            self._group_of.clear()
            self._baseline = dict(self._counters())

    def observe(self, pids: Iterable[int]) -> None:
        """Remember the groups of living processes (their /proc entry is gone when the question comes)."""
        with self._lock:
            for pid in pids:
                group = self._memory_group(str(pid))
                if group is None:
                    continue
                self._group_of[pid] = group
                if group not in self._baseline:
                    self._baseline[group] = _read_counter(group) or 0

    def check(self, pid: int) -> OomRecord:
        """Whether *pid*, which has ended by SIGKILL, was ended by the OOM killer."""
        with self._lock:
            self._log.drain()
            named = self._log.kills.get(pid)
            if named is not None:
                return OomRecord(True, LOG_SOURCE, _log_words(named))
            return self._check_counters(pid)

    def _check_counters(self, pid: int) -> OomRecord:
        now = self._counters()
        log_is_read = self._log.fd is not None and not self._log.problem
        if not now:
            if log_is_read and self._log_has_our_pids:
                return OomRecord(False, LOG_SOURCE, "no kill of it in the kernel log")
            problem = self._log.problem or "the kernel log numbers processes differently here"
            return OomRecord(None, LOG_SOURCE, f"no memory cgroup counter; {problem}")
        grown = {g: by for g, value in now.items() if (by := value - self._baseline.get(g, 0)) > 0}
        source = V2_SOURCE if any((g / "memory.events").exists() for g in now) else V1_SOURCE
        if not grown:
            return OomRecord(False, source, "oom_kill has not changed")
        if log_is_read and self._log_has_our_pids and len(self._log.kills) >= max(grown.values()):
            return OomRecord(False, LOG_SOURCE, f"the kernel killed others only: {_log_words(self._log.last)}")
        own = self._group_of.get(pid) or self._memory_group(self._own)
        near = {g: by for g, by in grown.items() if g == own or (own is not None and own in g.parents)}
        if own is not None and own not in grown and self._is_machine_root(own):
            detail = f"oom_kill of {self._name(next(iter(grown)))} grew, whether by this process is unknown"
            return OomRecord(None, source, detail)
        group, by = next(iter((near or grown).items()))
        return OomRecord(True, source, f"oom_kill of {self._name(group)} grew by {by}{self._log_hint()}")

    def own_kills(self) -> int | None:
        """The counter of the agent's own group; None where there is none."""
        group = self._memory_group(self._own)
        return _read_counter(group) if group is not None else None

    def close(self) -> None:
        with self._lock:
            self._log.close()

    # -- cgroups -------------------------------------------------------------------------------------------------------
    def _counters(self) -> Mapping[Path, int]:
        """oom_kill per group: the agent's own group with those below it, and the remembered ones."""
        groups: list[Path] = []
        own = self._memory_group(self._own)
        if own is not None:
            groups.append(own)
            groups += _groups_below(own)
        groups += [g for g in self._group_of.values() if g not in groups]
        found: dict[Path, int] = {}
        for group in groups:
            value = _read_counter(group)
            if value is not None:
                found[group] = value
        return found

    def _find_mounts(self) -> dict[str, tuple[str, Path]]:
        """``{"memory" or "": (root inside the hierarchy, mount point)}``; "" is version 2."""
        mounts: dict[str, tuple[str, Path]] = {}
        try:
            lines = (self._proc / self._own / "mountinfo").read_text(errors="replace").splitlines()
        except OSError:
            return mounts
        for line in lines:
            before, _, after = line.partition(" - ")
            fields, rest = before.split(), after.split()
            if len(fields) < 5 or len(rest) < 3:
                continue
            where = (fields[3], self._root / fields[4].lstrip("/"))
            if rest[0] == "cgroup" and "memory" in rest[2].split(","):
                mounts.setdefault("memory", where)
            elif rest[0] == "cgroup2":
                mounts.setdefault("", where)
        return mounts

    def _memory_group(self, pid: str) -> Path | None:
        """Folder of the memory group that *pid* is in; version 1 wins where it has the memory controller."""
        try:
            lines = (self._proc / pid / "cgroup").read_text(errors="replace").splitlines()
        except OSError:
            return None
        paths: dict[str, str] = {}
        for line in lines:
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            paths.update(dict.fromkeys(controllers.split(","), path))
        key = "memory" if "memory" in self._mounts and "memory" in paths else ""
        if key not in self._mounts or key not in paths:
            return None
        inside, mount = self._mounts[key]
        path = paths[key]
        if inside != "/" and (path == inside or path.startswith(inside + "/")):
            path = path[len(inside) :]  # a container sees its own group as the mount's root
        group = mount / path.lstrip("/")
        return group if group.is_dir() else mount

    def _is_machine_root(self, group: Path) -> bool:
        """The group holds everything on the machine: its counters tell of strangers too."""
        inside, mount = self._mounts.get("memory") or self._mounts.get("", ("", self._root))
        return group == mount and inside == "/" and not (group / "memory.events").exists()

    def _in_first_namespace(self) -> bool:
        try:
            return os.readlink(self._proc / self._own / "ns/pid") == _FIRST_PID_NAMESPACE
        except OSError:
            return False

    def _name(self, group: Path) -> str:
        for _, mount in self._mounts.values():
            if group == mount:
                return "the container's memory cgroup"
            if mount in group.parents:
                return f"memory cgroup /{group.relative_to(mount)}"
        return str(group)

    def _log_hint(self) -> str:
        if not self._log.kills:
            return ""
        return f"; the kernel log's last kill: {_log_words(self._log.last)}"


def _log_words(kill: OomKill) -> str:
    size = f" with {kill.rss_bytes / (1 << 30):.2f} GiB resident" if kill.rss_bytes is not None else ""
    where = "its memory cgroup is full" if kill.of_group else "the machine is out of memory"
    return f"{kill.command} (pid {kill.pid}){size}, {where}"


def _groups_below(group: Path) -> list[Path]:
    found: list[Path] = []
    for folder, names, _ in os.walk(group):
        names.sort()
        found += [Path(folder) / name for name in names]
        if len(found) >= _MAX_GROUPS:
            break
    return found[:_MAX_GROUPS]


def _read_counter(group: Path) -> int | None:
    """``oom_kill`` of a group: kills in it (version 2: and below it)."""
    for name in ("memory.events", "memory.oom_control"):
        try:
            text = (group / name).read_text()
        except OSError:
            continue
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.strip().isdigit():
                return int(value)
    return None
