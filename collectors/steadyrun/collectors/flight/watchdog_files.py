"""Dump files that torch's own watchdog leaves, and the pipe that asks it for one.

torch writes straight onto the final name (an ``ofstream``, no rename), over the dump of the attempt before: a file is
taken only once it has been quiet for a moment, and before the restart.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steadyrun.core.errors import SteadyrunError

__all__ = ["MAX_DUMP_BYTES", "DumpFileError", "FileState", "file_state", "poke_pipe", "read_dump", "wait_until_quiet"]

MAX_DUMP_BYTES: Final = 64 << 20
QUIET_S: Final = 1.0  # since the last write
QUIET_WHOLE_S: Final = 0.1  # the same, where the file ends as a pickle ends: a cut inside one seldom looks like that
_LOOK_EVERY_S: Final = 0.02
_PICKLE_STOP: Final = b"."


class DumpFileError(SteadyrunError):
    """A dump file cannot be taken, or a pipe cannot be used."""


@dataclass(frozen=True, slots=True)
class FileState:
    """A file at one moment; *is_whole*: it ends as a pickle does."""

    size_bytes: int
    changed_ns: int
    is_whole: bool

    @property
    def changed_unix_s(self) -> float:
        return self.changed_ns / 1e9


def file_state(path: Path) -> FileState | None:
    """The state of a regular file of ours that is not empty; None where there is none.

    Links are not followed, and what belongs to others is left alone: the folder may be /tmp.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _state_of(fd)
    except OSError:
        return None
    finally:
        os.close(fd)


def _state_of(fd: int) -> FileState | None:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid not in (os.geteuid(), 0) or info.st_size == 0:
        return None
    last = os.pread(fd, 1, info.st_size - 1)
    return FileState(info.st_size, info.st_mtime_ns, last == _PICKLE_STOP)


def is_quiet(state: FileState, now_unix_s: float) -> bool:
    """Nobody has written for long enough; a time stamp of the future (a file server's clock) counts as just now."""
    age_s = now_unix_s - state.changed_unix_s
    return age_s >= (QUIET_WHOLE_S if state.is_whole else QUIET_S)


def wait_until_quiet(path: Path, deadline_s: float, newer_than_ns: int = 0) -> FileState | None:
    """The file once it is quiet, or as it is at *deadline_s* (CLOCK_MONOTONIC); None when none has come.

    Args:
        newer_than_ns: a file last written before this (wall clock) is not the one that is waited for.
    """
    seen: FileState | None = None
    seen_at_s = 0.0
    while True:
        now_s = time.monotonic()
        state = file_state(path)
        if state is not None and state.changed_ns >= newer_than_ns:
            if state != seen:
                seen, seen_at_s = state, now_s
            # The clock of a file server may be off: what did not change while it was watched is quiet too.
            watched_s = now_s - seen_at_s
            if is_quiet(state, time.time()) or watched_s >= (QUIET_WHOLE_S if state.is_whole else QUIET_S):
                return state
        left_s = deadline_s - now_s
        if left_s <= 0:
            return seen
        time.sleep(min(_LOOK_EVERY_S, left_s))


def read_dump(path: Path) -> tuple[bytes, bool]:
    """(what is in the file, whether it stayed as it was meanwhile).

    Raises:
        DumpFileError: it is no regular file of ours, is larger than 64 MiB, or cannot be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        raise DumpFileError(f"cannot read {path}: {e.strerror}") from e
    try:
        before = _state_of(fd)
        if before is None:
            raise DumpFileError(f"cannot take {path}: it is empty, no regular file, or another user's")
        if before.size_bytes > MAX_DUMP_BYTES:
            raise DumpFileError(f"cannot take {path}: {before.size_bytes} bytes; {MAX_DUMP_BYTES} are allowed")
        content = bytearray()
        while len(content) < before.size_bytes:
            part = os.pread(fd, before.size_bytes - len(content), len(content))
            if not part:
                break
            content += part
        return bytes(content), _state_of(fd) == before
    except OSError as e:
        raise DumpFileError(f"cannot read {path}: {e.strerror}") from e
    finally:
        os.close(fd)


def poke_pipe(path: Path) -> None:
    """Ask NCCL's heartbeat thread for a dump; training goes on. It looks into the pipe about once a second.

    Raises:
        DumpFileError: it is no pipe of ours, or nobody reads it.
    """
    try:
        # Without O_NONBLOCK this would wait for a reader.
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as e:
        raise DumpFileError(f"cannot ask through {path}: {e.strerror}") from e
    try:
        info = os.fstat(fd)
        if not stat.S_ISFIFO(info.st_mode) or info.st_uid != os.geteuid():
            raise DumpFileError(f"cannot ask through {path}: it is no pipe of this user")
        os.write(fd, b"1")
    except OSError as e:
        raise DumpFileError(f"cannot ask through {path}: {e.strerror}") from e
    finally:
        os.close(fd)
