"""Room for files: bytes and inodes of the folders that a job writes to, /dev/shm, and whether they answer at all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from steadyrun.collectors.protocol import CheckResult, Fact, Health, Trouble, combine

__all__ = ["Folder", "Room", "SpaceCollector", "read_room"]

EVERY_S: Final = 30.0
ANSWER_LIMIT_S: Final = 5.0
LOW_RATIO: Final = 0.05
VERY_LOW_RATIO: Final = 0.01
PLENTY_BYTES: Final = 100 << 30  # a small share of a large file system is still enough
SMALL_SHM_BYTES: Final = 1 << 30
SHM_FULL_RATIO: Final = 0.90


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of the job.

    Attributes:
        label: what it is for: ``checkpoints``, ``logs``.
        needed_bytes: of the next thing that is written there, e.g. one checkpoint; 0 where not known.
        is_shm: shared memory, which has limits of its own.
    """

    label: str
    path: Path
    needed_bytes: int = 0
    is_shm: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """Of one file system, for this user."""

    total_bytes: int
    free_bytes: int
    total_inodes: int
    free_inodes: int
    is_readonly: bool
    is_writable: bool


def read_room(path: Path) -> Room:
    """Of the folder, or of the nearest one above it that exists. Blocks as long as its server; raises OSError."""
    while not path.exists() and path != path.parent:
        path = path.parent
    status = os.statvfs(path)
    return Room(
        total_bytes=status.f_blocks * status.f_frsize,
        free_bytes=status.f_bavail * status.f_frsize,
        total_inodes=status.f_files,
        free_inodes=status.f_favail,
        is_readonly=bool(status.f_flag & os.ST_RDONLY),
        is_writable=os.access(path, os.W_OK | os.X_OK),
    )


@dataclass(slots=True)
class _Question:
    """One look at a folder, in a thread of its own: a dead file server blocks it for good, even against SIGKILL."""

    folder: Folder
    begun_s: float
    room: Room | None = None
    error: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def ask(self, read: Callable[[Path], Room]) -> None:
        try:
            self.room = read(self.folder.path)
        except OSError as e:
            self.error = (e.strerror or str(e)).lower()
        finally:
            self.done.set()


class SpaceCollector:
    """A full disk shows as a failed save, a full /dev/shm as a data loader's bus error, a dead server as a hang."""

    name = "space"
    every_s = EVERY_S

    def __init__(
        self,
        folders: Iterable[Folder],
        shm: Path | None = Path("/dev/shm"),
        answer_limit_s: float = ANSWER_LIMIT_S,
        read: Callable[[Path], Room] = read_room,
    ) -> None:
        self.limit_s = 2 * answer_limit_s + EVERY_S
        self._answer_limit_s = answer_limit_s
        self._read = read
        self._folders = [*folders]
        if shm is not None:
            self._folders.append(Folder("shm", shm, is_shm=True))
        self._waiting: dict[str, _Question] = {}

    def watch(self, folder: Folder) -> None:
        """From the next check on, in place of the folder of that label; any thread."""
        self._folders = [*(f for f in self._folders if f.label != folder.label), folder]

    def check(self) -> CheckResult:
        """Look now; waits for the slowest folder, no longer than its limit."""
        questions = [self._question(folder) for folder in self._folders]
        deadline_s = time.monotonic() + self._answer_limit_s
        troubles: list[Trouble] = []
        facts: dict[str, Fact] = {}
        words = []
        for question in questions:
            folder = question.folder
            if not question.done.wait(max(deadline_s - time.monotonic(), 0.0)):
                facts[f"{folder.label}_answers"] = False
                troubles.append(_silent(folder, time.monotonic() - question.begun_s))
                continue
            self._waiting.pop(folder.label, None)
            facts[f"{folder.label}_answers"] = question.room is not None
            if question.room is None:
                advice = ("create it, or choose another folder",)
                troubles.append(Trouble(Health.UNHEALTHY, _text(folder, question.error), advice, str(folder.path)))
                continue
            facts |= _facts(folder, question.room)
            troubles += _troubles(folder, question.room)
            words.append(f"{folder.label} {_size(question.room.free_bytes)}")
        return combine(self.name, troubles, f"free: {', '.join(words) or 'nothing to look at'}", facts)

    def _question(self, folder: Folder) -> _Question:
        """The one still open, else a new one: never two threads at one dead server."""
        if (old := self._waiting.get(folder.label)) is not None and not old.done.is_set():
            return old
        question = self._waiting[folder.label] = _Question(folder, time.monotonic())
        threading.Thread(target=question.ask, args=(self._read,), name=f"room-{folder.label}", daemon=True).start()
        return question

    def close(self) -> None:
        """Threads at dead servers are left behind; they are daemons."""


def _text(folder: Folder, what: str) -> str:
    return f"{folder.path} ({folder.label}): {what}"


def _silent(folder: Folder, since_s: float) -> Trouble:
    advice = ("look at the file server, the network to it and the kernel log",)
    text = _text(folder, f"its file system has not answered for {since_s:.0f} s")
    return Trouble(Health.UNHEALTHY, text, advice, str(folder.path))


def _facts(folder: Folder, room: Room) -> dict[str, Fact]:
    return {
        f"{folder.label}_free_bytes": room.free_bytes,
        f"{folder.label}_total_bytes": room.total_bytes,
        f"{folder.label}_free_inodes": room.free_inodes,
    }


def _troubles(folder: Folder, room: Room) -> list[Trouble]:
    where = str(folder.path)
    if room.is_readonly:
        text = _text(folder, "its file system can only be read")
        return [Trouble(Health.UNHEALTHY, text, ("look at the kernel log for its errors",), where)]
    if not room.is_writable:
        text = _text(folder, "this user may not write there")
        return [Trouble(Health.UNHEALTHY, text, ("change its owner or mode, or choose another folder",), where)]
    out = _bytes_left(folder, room)
    # Some file systems have no fixed number of inodes and say 0.
    if room.total_inodes > 0 and (ratio := room.free_inodes / room.total_inodes) < LOW_RATIO:
        health = Health.UNHEALTHY if ratio < VERY_LOW_RATIO else Health.DEGRADED
        text = _text(folder, f"{room.free_inodes} of {room.total_inodes} inodes left")
        out.append(Trouble(health, text, ("remove small files: old logs, caches, dumps",), where))
    return out


def _bytes_left(folder: Folder, room: Room) -> list[Trouble]:
    where, free = str(folder.path), room.free_bytes
    ratio = free / room.total_bytes if room.total_bytes > 0 else 1.0
    if folder.is_shm:
        if room.total_bytes < SMALL_SHM_BYTES:
            advice = ("docker run --shm-size=8g, or an emptyDir with medium Memory",)
            text = _text(folder, f"only {_size(room.total_bytes)} in all")
            return [Trouble(Health.DEGRADED, text, advice, where)]
        if ratio < 1 - SHM_FULL_RATIO:
            advice = ("steadyctl doctor --fix removes files of dead processes",)
            health = Health.UNHEALTHY if ratio < VERY_LOW_RATIO else Health.DEGRADED
            return [Trouble(health, _text(folder, f"{_size(free)} left"), advice, where)]
        return []
    clean = ("remove old checkpoints or logs",)
    if free < folder.needed_bytes:
        text = _text(folder, f"{_size(free)} left, the next save needs {_size(folder.needed_bytes)}")
        return [Trouble(Health.UNHEALTHY, text, clean, where)]
    if ratio < VERY_LOW_RATIO and free < PLENTY_BYTES:
        return [Trouble(Health.UNHEALTHY, _text(folder, f"{_size(free)} left ({ratio:.1%})"), clean, where)]
    if free < 2 * folder.needed_bytes or (ratio < LOW_RATIO and free < PLENTY_BYTES):
        return [Trouble(Health.DEGRADED, _text(folder, f"{_size(free)} left ({ratio:.1%})"), clean, where)]
    return []


def _size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 30):.1f} GiB"
