"""What an attempt can leave behind, and how it is recognised: processes and files in /dev/shm.

Reading /proc is apart from judging what was read, so that the judgement is tested on fixture folders.
"""

from __future__ import annotations

import os
import re
import resource
import stat
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "MARKER_NAME",
    "RLIMIT_LOCKS",
    "ProcessEntry",
    "ShmFile",
    "ShmSnapshot",
    "Tag",
    "descendants_of",
    "has_marker",
    "inherit",
    "is_tagged",
    "list_shm",
    "parse_stat",
    "read_process",
    "remove_shared_memory",
    "run_marker",
    "scan_processes",
    "stale_shm",
]

MARKER_NAME: Final = "STEADYRUN_RUN"
RLIMIT_LOCKS: Final = 10  # on all of Linux; Python's resource module does not name it
_ATTEMPT_BITS: Final = 16
_ATTEMPT_MASK: Final = (1 << _ATTEMPT_BITS) - 1

# Files whose name holds the pid of the process that made them. torch: file_system sharing strategy; pym: the heap of
# multiprocessing; KMP: the OpenMP runtime's registration; cuda.shm: the CUDA driver (pid in hexadecimal).
_NAMED_BY_PID: Final = (
    (re.compile(r"torch_(\d+)_\d+_\d+"), 10),
    (re.compile(r"pym-(\d+)-\w+"), 10),
    (re.compile(r"__KMP_REGISTERED_LIB_(\d+)_\d+"), 10),
    (re.compile(r"cuda\.shm\.[0-9a-f]+\.([0-9a-f]+)\.\d+"), 16),
)
# Files whose name says what made them, but not who: NCCL segments, multiprocessing's shared memory and semaphores,
# joblib's. NCCL and multiprocessing unlink theirs in a normal end.
_NAMED_BY_KIND: Final = re.compile(r"nccl-\w+|psm_[0-9a-f]+|wnsm_[0-9a-f]+|sem\.(mp|loky)-[\w-]+|pymp-\w+|gloo[\w.-]*")


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """One process as /proc/<pid>/stat shows it; pid and start_ticks together name an incarnation for ever."""

    pid: int
    ppid: int
    pgrp: int
    session: int
    state: str
    start_ticks: int
    command: str

    @property
    def incarnation(self) -> tuple[int, int]:
        return self.pid, self.start_ticks

    @property
    def is_dead(self) -> bool:
        return self.state in "ZX"


def parse_stat(text: bytes) -> ProcessEntry:
    """One /proc/<pid>/stat line.

    Raises:
        ValueError: it is none.
    """
    opening, closing = text.find(b"("), text.rfind(b")")  # the name may hold spaces and parentheses
    fields = text[closing + 2 :].split(None, 20)
    if opening < 0 or closing < opening or len(fields) < 20:
        raise ValueError(f"not a line of /proc/<pid>/stat: {text[:80]!r}")
    return ProcessEntry(
        pid=int(text[:opening]),
        ppid=int(fields[1]),
        pgrp=int(fields[2]),
        session=int(fields[3]),
        state=fields[0].decode("ascii", "replace"),
        start_ticks=int(fields[19]),
        command=text[opening + 1 : closing].decode(errors="replace"),
    )


def read_process(pid: int, proc: Path = Path("/proc")) -> ProcessEntry | None:
    """The process *pid* now, or None when there is none."""
    return _read_stat(f"{proc}/{pid}/stat")


def _read_stat(path: str) -> ProcessEntry | None:
    # Plain descriptors: with file objects a scan takes twice the time.
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return parse_stat(os.read(fd, 4096))
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)


def scan_processes(proc: Path = Path("/proc")) -> dict[int, ProcessEntry]:
    """All processes, zombies included; those that end during the scan may be missing."""
    found: dict[int, ProcessEntry] = {}
    for name in os.listdir(proc):
        if name.isdigit():
            entry = _read_stat(f"{proc}/{name}/stat")
            if entry is not None:
                found[entry.pid] = entry
    return found


def descendants_of(roots: Iterable[int], processes: Mapping[int, ProcessEntry]) -> set[int]:
    """Pids below *roots* by parentage, the roots left out."""
    top = dict.fromkeys(roots, 0)
    return set(inherit(top, processes)).difference(top)


def inherit(owner_of: Mapping[int, int], processes: Mapping[int, ProcessEntry]) -> dict[int, int]:
    """*owner_of* (pid -> owner) with all descendants added: a child without an owner has that of its parent."""
    children: dict[int, list[int]] = {}
    for entry in processes.values():
        children.setdefault(entry.ppid, []).append(entry.pid)
    found = dict(owner_of)
    todo = list(found)
    while todo:
        parent = todo.pop()
        for child in children.get(parent, ()):
            if child not in found:
                found[child] = found[parent]
                todo.append(child)
    return found


def run_marker(run_id: str, node: str) -> str:
    """The value of ``MARKER_NAME`` in the environment of a node's ranks and all that they start."""
    return f"{run_id}:{node}"


def has_marker(entry: ProcessEntry, marker: str, proc: Path = Path("/proc")) -> bool:
    """The process was started with ``STEADYRUN_RUN=<marker>``; False where its environment cannot be read.

    Of a process in state D nothing is read: its memory may be locked, and the reader would hang with it.
    """
    if entry.state in "DZX":
        return False
    try:
        environ = (proc / str(entry.pid) / "environ").read_bytes()
    except OSError:
        return False
    return f"{MARKER_NAME}={marker}".encode() in environ.split(b"\0")


@dataclass(frozen=True, slots=True)
class Tag:
    """A mark that every descendant of a rank has, and cannot lose: the soft limit on file locks.

    ``RLIMIT_LOCKS`` has had no effect since Linux 2.4.25; it survives fork, exec, setsid and an emptied environment,
    and one system call reads it from any process of the user, also from one in state D. The value names one agent (pid
    and start time) and the attempt, so that jobs with the same run id are not taken for one another.
    """

    base: int

    @classmethod
    def of_agent(cls, pid: int, proc: Path = Path("/proc")) -> Tag:
        """The tag of the agent *pid*, as the agent itself and its guardian compute it."""
        entry = read_process(pid, proc)
        ticks = entry.start_ticks if entry is not None else 0
        return cls(((ticks & 0xFFFFFF) << 22 | pid) << _ATTEMPT_BITS)

    def value(self, attempt: int) -> int:
        """What a process of *attempt* (-1: a standby) gets as its limit."""
        return self.base | (attempt + 1) & _ATTEMPT_MASK

    def attempt_of(self, pid: int) -> int | None:
        """The attempt that *pid* descends from; None: it is not ours, gone, or of another user."""
        try:
            soft = resource.prlimit(pid, RLIMIT_LOCKS)[0]
        except (OSError, ValueError):
            return None
        return (soft & _ATTEMPT_MASK) - 1 if soft > 0 and soft & ~_ATTEMPT_MASK == self.base else None

    def pids(self, proc: Path = Path("/proc")) -> list[int]:
        """All processes that have it, zombies included."""
        return [int(n) for n in os.listdir(proc) if n.isdigit() and self.attempt_of(int(n)) is not None]


def is_tagged(pid: int) -> bool:
    """*pid* descends from a rank of some agent on this machine."""
    try:
        soft = resource.prlimit(pid, RLIMIT_LOCKS)[0]
    except (OSError, ValueError):
        return False
    return soft != resource.RLIM_INFINITY and soft >= 1 << _ATTEMPT_BITS


@dataclass(frozen=True, slots=True)
class ShmFile:
    """A file in /dev/shm. ``changed_unix_s``: when its inode changed last, which is not before it was made."""

    name: str
    inode: int
    uid: int
    changed_unix_s: float


ShmSnapshot = frozenset[tuple[str, int]]
"""Names and inodes that were there before an attempt, and so are not its leftovers."""


def list_shm(shm: Path = Path("/dev/shm")) -> list[ShmFile]:
    """Regular files directly in the folder; empty when there is no such folder."""
    found: list[ShmFile] = []
    try:
        with os.scandir(shm) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    found.append(ShmFile(entry.name, status.st_ino, status.st_uid, status.st_ctime))
    except OSError:
        return []
    return sorted(found, key=lambda f: f.name)


def stale_shm(
    files: Iterable[ShmFile],
    before: Collection[tuple[str, int]],
    uid: int,
    live_pids: Collection[int],
    own_pids: Collection[int] | None,
    since_unix_s: float = 0.0,
) -> list[ShmFile]:
    """Those files that a dead process of ours left; whether somebody uses them is not known here.

    A name with a pid belongs to that process: it must be dead, and one of *own_pids* where these are known (another job
    of the same user on this machine has pids of its own). A name that only says the kind must be new.
    """
    out: list[ShmFile] = []
    for file in files:
        if file.uid != uid or (file.name, file.inode) in before or file.changed_unix_s < since_unix_s:
            continue
        maker = _maker_pid(file.name)
        if maker is None:
            if _NAMED_BY_KIND.fullmatch(file.name):
                out.append(file)
        elif maker not in live_pids and (own_pids is None or maker in own_pids):
            out.append(file)
    return out


def _maker_pid(name: str) -> int | None:
    for pattern, base in _NAMED_BY_PID:
        match = pattern.fullmatch(name)
        if match:
            return int(match.group(1), base)
    return None


def _used_inodes(wanted: Collection[int], shm: Path, proc: Path, uid: int) -> set[int]:
    """Which of these inodes a process of this user has open or mapped."""
    device = os.stat(shm).st_dev
    used: set[int] = set()
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        folder = proc / name
        try:
            if os.stat(folder).st_uid != uid:
                continue
            entry = read_process(int(name), proc)
            if entry is not None and entry.state not in "DZX":  # maps of a process in state D may hang the reader
                used |= _mapped(folder / "maps", wanted)
            used |= _open(folder / "fd", wanted, device)
        except OSError:
            continue  # it ended, or is not dumpable: then it is not a rank of ours
    return used


def _mapped(maps: Path, wanted: Collection[int]) -> set[int]:
    found: set[int] = set()
    with open(maps, encoding="utf-8", errors="replace") as f:
        for line in f:
            fields = line.split(None, 5)
            if len(fields) > 5 and fields[4].isdigit() and int(fields[4]) in wanted:
                found.add(int(fields[4]))  # inodes of other file systems may hit by chance: then a file stays
    return found


def _open(fds: Path, wanted: Collection[int], device: int) -> set[int]:
    found: set[int] = set()
    for fd in os.listdir(fds):
        try:
            status = os.stat(fds / fd)
        except OSError:
            continue
        if status.st_dev == device and status.st_ino in wanted:
            found.add(status.st_ino)
    return found


def remove_shared_memory(
    since_unix_s: float = 0.0,
    before: Collection[tuple[str, int]] = (),
    own_pids: Collection[int] | None = None,
    shm: Path = Path("/dev/shm"),
    proc: Path = Path("/proc"),
) -> tuple[str, ...]:
    """Remove what dead processes of this user left in /dev/shm, and say which names these were.

    Only files that nobody has open or mapped, with names that torch, NCCL, CUDA, OpenMP and multiprocessing make, not
    in *before* and not older than *since_unix_s*. Files of steadyrun have none of these names.
    """
    uid = os.getuid()
    files = list_shm(shm)
    if not files:
        return ()
    # A zombie has let go of everything; who should reap it may take its time.
    live = {entry.pid for entry in scan_processes(proc).values() if not entry.is_dead}
    candidates = stale_shm(files, before, uid, live, own_pids, since_unix_s)
    if not candidates:
        return ()
    used = _used_inodes({c.inode for c in candidates}, shm, proc, uid)
    removed: list[str] = []
    for file in candidates:
        if file.inode in used:
            continue
        try:
            os.unlink(shm / file.name)
        except OSError:
            continue
        removed.append(file.name)
    return tuple(removed)
