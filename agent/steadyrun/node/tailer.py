"""Follows the ranks' log files onto the agent's own console, as if the ranks wrote there themselves.

Ranks write to files, so that a console which nobody reads can never block training. Reading is done by the loop, in
bounded portions, and only while the console keeps up: the files are the buffer. Writing is done by a thread per console
stream, because a write to a full pipe or a stopped terminal takes as long as it takes.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from steadyrun.node.filewatch import FileWatch

__all__ = ["LogTailer", "split_whole_lines"]

STDOUT: Final = 1
STDERR: Final = 2
READ_BYTES: Final = 256 * 1024  # per file and pump
PARTIAL_AFTER_S: Final = 0.25
PUMP_S: Final = 0.1  # between two pumps while something is written
QUIET_AFTER_S: Final = 1.0  # since the last of it, files are watched instead
WATCHED_PUMP_S: Final = 2.0  # for files that cannot be watched, or whose writer is on another host
UNWATCHED_PUMP_S: Final = 0.5  # where nothing can be watched
QUEUE_BYTES: Final = 1024 * 1024  # with more than this waiting for the console, files are not read on
_WRITE_BYTES: Final = 4096  # PIPE_BUF: when a pipe polls writable, this much does not block
_POLL_S: Final = 0.1


def split_whole_lines(data: bytes) -> tuple[bytes, bytes]:
    """(what ends with its last line end, the unfinished rest); a carriage return counts, for progress bars."""
    cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    return data[:cut], data[cut:]


@dataclass(slots=True)
class _Followed:
    path: Path
    sink: int
    prefix: bytes
    fd: int | None = None
    held: bytes = b""
    held_since_s: float = 0.0
    at_line_start: bool = True
    is_retired: bool = False


class LogTailer:
    """Copies growing files to file descriptors 1 and 2 (or those given). Used from the loop's thread.

    Args:
        stdout_fd, stderr_fd: the console; not closed here.
        note: called with a line for the journal when the console is closed, or could not take everything in the end.
    """

    def __init__(
        self, stdout_fd: int = STDOUT, stderr_fd: int = STDERR, note: Callable[[str], None] | None = None
    ) -> None:
        self._note = note
        self._followed: dict[Path, _Followed] = {}
        self._consoles: dict[int, _Console] = {STDOUT: _Console(stdout_fd)}
        is_same = _identity(stdout_fd) == _identity(stderr_fd)  # then one thread, so that lines do not mix
        self._consoles[STDERR] = self._consoles[STDOUT] if is_same else _Console(stderr_fd)
        self._has_told = False
        self._due_s = self._quiet_from_s = -inf
        self._is_armed = False
        self._watch: FileWatch | None = None
        with contextlib.suppress(OSError):
            self._watch = FileWatch()

    def fileno(self) -> int | None:
        """Readable when a quiet file grows: call ``wake`` then. None: ``due_s`` has to do."""
        return self._watch.fileno() if self._watch is not None else None

    @property
    def due_s(self) -> float:
        """When to pump next, unless woken before."""
        return self._due_s

    def wake(self) -> None:
        """Some file has grown."""
        if self._watch is not None:
            self._watch.drain()
        self._expect_more()

    def _expect_more(self) -> None:
        self._due_s = self._quiet_from_s = -inf
        self._is_armed = False

    def _next_pump_s(self, now_s: float) -> float:
        if now_s < self._quiet_from_s:
            return now_s + PUMP_S
        if self._watch is None:
            return now_s + UNWATCHED_PUMP_S
        if self._is_armed:
            return now_s + WATCHED_PUMP_S
        self._is_armed = True
        self._watch.arm(self._followed)
        return now_s  # for what came between this pump and that

    def follow(self, path: Path, sink: int, prefix: str = "") -> None:
        """Copy *path*, which need not exist yet, from its start to the console's stdout (1) or stderr (2)."""
        if path not in self._followed:
            self._followed[path] = _Followed(path, sink, prefix.encode())
            self._expect_more()

    def retire(self, path: Path) -> None:
        """Its writer has ended: forget the file once it is copied to its end."""
        followed = self._followed.get(path)
        if followed is not None:
            followed.is_retired = True
            self._expect_more()

    def pump(self, now_s: float) -> bool:
        """Read what the files have gained, at most 256 KiB each, and hand it to the console; never blocks.

        Returns:
            Some file has more than was read: call again soon.
        """
        has_more = is_busy = False
        for followed in list(self._followed.values()):
            if not self._consoles[followed.sink].has_room():
                is_busy = True
                continue
            data = self._read(followed)
            if data:
                self._take(followed, data, now_s)
                has_more = has_more or len(data) == READ_BYTES
            elif followed.held and (followed.is_retired or now_s - followed.held_since_s >= PARTIAL_AFTER_S):
                self._emit(followed, followed.held)
                followed.held = b""
            is_busy = is_busy or bool(data or followed.held)
            if not data and followed.is_retired:
                self._forget(followed)
        if is_busy or self._quiet_from_s == -inf:
            self._quiet_from_s, self._is_armed = now_s + QUIET_AFTER_S, False
        self._due_s = self._next_pump_s(now_s)
        self._tell_troubles()
        return has_more

    def close(self, timeout_s: float = 5.0) -> None:
        """Copy the rest, unfinished lines too, and stop; what the console does not take in time is left out."""
        deadline_s = time.monotonic() + timeout_s
        for followed in self._followed.values():
            followed.is_retired = True
        while self._followed and time.monotonic() < deadline_s:
            self.pump(inf)
            for console in set(self._consoles.values()):
                console.wait_until_below(QUEUE_BYTES // 2, deadline_s)
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        unread_bytes = sum(_unread_bytes(f) for f in self._followed.values())
        for followed in list(self._followed.values()):
            self._forget(followed)
        for console in set(self._consoles.values()):
            unread_bytes += console.close(deadline_s)
        if unread_bytes and self._note is not None:
            self._note(f"the console did not take the last {unread_bytes} bytes of the ranks' output in time")

    # -- inside --------------------------------------------------------------------------------------------------------
    def _read(self, followed: _Followed) -> bytes:
        if followed.fd is None:
            try:
                followed.fd = os.open(followed.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                return b""
        try:
            return os.read(followed.fd, READ_BYTES)
        except OSError:
            return b""

    def _take(self, followed: _Followed, data: bytes, now_s: float) -> None:
        whole, rest = split_whole_lines(followed.held + data)
        if len(rest) > READ_BYTES:  # no line end in sight
            whole, rest = whole + rest, b""
        if whole:
            self._emit(followed, whole)
        followed.held, followed.held_since_s = rest, now_s

    def _emit(self, followed: _Followed, data: bytes) -> None:
        if followed.prefix:
            starts, followed.at_line_start = followed.at_line_start, data.endswith(b"\n")
            body = data[:-1] if followed.at_line_start else data
            data = body.replace(b"\n", b"\n" + followed.prefix) + (b"\n" if followed.at_line_start else b"")
            data = followed.prefix + data if starts else data
        self._consoles[followed.sink].put(data)

    def _forget(self, followed: _Followed) -> None:
        if followed.fd is not None:
            os.close(followed.fd)
        del self._followed[followed.path]

    def _tell_troubles(self) -> None:
        broken = next((b for c in self._consoles.values() if (b := c.broken)), "")
        if broken and not self._has_told and self._note is not None:
            self._has_told = True
            self._note(f"the console is closed ({broken}); the ranks' output goes to their log files only")


class _Console:
    """One stream of the console, written by a thread that starts with the first data."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._chunks: deque[bytes] = deque()
        self._queued_bytes = 0
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.broken = ""  # why nobody can be reached any more

    def has_room(self) -> bool:
        """More may be put. A closed console always has room: files are then read to be forgotten."""
        return self._queued_bytes <= QUEUE_BYTES

    def put(self, data: bytes) -> None:
        with self._changed:
            if self.broken:
                return
            self._chunks.append(data)
            self._queued_bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="steadyrun-console", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait_until_below(self, size_bytes: int, deadline_s: float) -> None:
        with self._changed:
            while self._queued_bytes > size_bytes and not self.broken:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return

    def close(self, deadline_s: float) -> int:
        """Stop the thread; the number of bytes that were not written by then."""
        self.wait_until_below(0, deadline_s)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(1.0)  # it looks up every 0.1 s, but for a terminal stopped with Ctrl-S
        return self._queued_bytes

    def _run(self) -> None:
        while (chunk := self._next()) is not None:
            view = memoryview(chunk)
            while view:
                if not self._wait_writable():
                    return
                try:
                    written = os.write(self._fd, view[:_WRITE_BYTES])
                except BlockingIOError:
                    continue
                except OSError as e:
                    self._break(e.strerror or str(e))
                    return
                view = view[written:]
            with self._changed:
                self._queued_bytes -= len(chunk)
                self._changed.notify_all()

    def _next(self) -> bytes | None:
        with self._changed:
            while not self._chunks:
                if self._is_closing:
                    return None
                self._changed.wait()
            return self._chunks.popleft()

    def _wait_writable(self) -> bool:
        """False when closing: nobody waits for the console any more."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while not poll.poll(_POLL_S * 1000):
            if self._is_closing:
                return False
        return True

    def _break(self, reason: str) -> None:
        with self._changed:
            self.broken = reason
            self._chunks.clear()
            self._queued_bytes = 0
            self._changed.notify_all()


def _unread_bytes(followed: _Followed) -> int:
    if followed.fd is None:
        return len(followed.held)
    return len(followed.held) + max(os.fstat(followed.fd).st_size - os.lseek(followed.fd, 0, os.SEEK_CUR), 0)


def _identity(fd: int) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        status = os.fstat(fd)
        return status.st_dev, status.st_ino
    return -1, fd
