"""The live kernel log: /dev/kmsg, else the journal. Nothing blocks; the descriptor belongs into a selector.

A read of /dev/kmsg gives one record. Its numbers grow by one, so that a gap shows what was overwritten before it was
read, and a restarted agent goes on where it was as long as the machine has not started anew.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from steadyrun.collectors.kernel.events import Assembler, Folding, KernelEvent
from steadyrun.collectors.kernel.lines import KernelLine, device_of, is_continuation, read_kmsg, read_line
from steadyrun.core.boot import boot_id as this_boot
from steadyrun.core.files import write_atomically

__all__ = ["KernelWatch", "Position", "read_position", "write_position"]

POSITION_SCHEMA: Final = "steadyrun.kernel-log/1"
KMSG: Final = Path("/dev/kmsg")
_RECORD_BYTES: Final = 16384  # a read with less room than the record needs fails with EINVAL
_KMSG_DEVICE: Final = os.makedev(1, 11)
_PENDING_BYTES: Final = 1 << 16
_JOURNAL_LIMIT_S: Final = 5.0
ENABLE: Final = "run as root, grant CAP_SYSLOG, or add the user to the group systemd-journal"


@dataclass(frozen=True, slots=True)
class Position:
    """How far the log was read: the record's number in /dev/kmsg, or the journal's cursor, of one boot."""

    boot_id: str
    sequence: int | None = None
    cursor: str = ""


def read_position(path: Path) -> Position | None:
    """What :func:`write_position` wrote; None where there is none that can be used."""
    try:
        data = json.loads(path.read_text())
        if data["schema"] != POSITION_SCHEMA:
            return None
        sequence = data["sequence"]
        return Position(str(data["boot_id"]), int(sequence) if sequence is not None else None, str(data["cursor"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_position(path: Path, position: Position) -> None:
    """Replace the file in one go; raises OSError."""
    data = {"schema": POSITION_SCHEMA, "boot_id": position.boot_id}
    data |= {"sequence": position.sequence, "cursor": position.cursor}  # type: ignore[dict-item]
    write_atomically(path, json.dumps(data))


class _Source(Protocol):
    """Where messages come from."""

    name: str
    lost: int

    def fileno(self) -> int | None: ...

    def drain(self, limit: int) -> list[KernelLine]: ...

    def position(self, boot_id: str) -> Position: ...

    def close(self) -> None: ...


class _UnusableError(Exception):
    """Why a source cannot be read."""


class _Kmsg:
    """/dev/kmsg; in tests a FIFO, or a file that grows, with records or lines of text."""

    name = "kmsg"

    def __init__(self, path: Path, after: int | None, from_boot: bool) -> None:
        self.lost = 0
        self._after = after
        self._expected: int | None = after + 1 if after is not None else None
        self._pending = b""
        try:
            mode = path.stat()
            self._is_device = stat.S_ISCHR(mode.st_mode)
            self._is_fifo = stat.S_ISFIFO(mode.st_mode)
            is_other = stat.S_ISDIR(mode.st_mode) or stat.S_ISSOCK(mode.st_mode) or stat.S_ISBLK(mode.st_mode)
            # In some containers it is a link to the console.
            if is_other or (self._is_device and mode.st_rdev != _KMSG_DEVICE):
                raise _UnusableError(f"{path} is not the kernel's log")
            # A FIFO opened for both has a writer at all times: else poll would return at once for ever.
            access = os.O_RDWR if self._is_fifo else os.O_RDONLY
            self._fd: int | None = os.open(path, access | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as e:
            raise _UnusableError(f"cannot read {path}: {(e.strerror or str(e)).lower()}") from None
        try:
            if self._is_device:
                os.lseek(self._fd, 0, os.SEEK_SET)
                self._try_read()
                if after is None and not from_boot:
                    self._skip_backlog()
            elif not self._is_fifo and not from_boot:
                os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as e:
            self.close()
            raise _UnusableError(f"cannot read {path}: {(e.strerror or str(e)).lower()}") from None

    def _try_read(self) -> None:
        """Some sandboxes let it be opened but not read."""
        assert self._fd is not None
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            self._pending = os.read(self._fd, _RECORD_BYTES)

    def _skip_backlog(self) -> None:
        """Up to the newest record, whose number tells a later agent where to go on. 3 µs a record."""
        record: bytes | None = self._pending
        while record is not None:
            number = record.split(b",", 2)[1:2]
            if number and number[0].isdigit():
                self._after, self._expected = int(number[0]), int(number[0]) + 1
            record = self._read()
        self._pending = b""

    def fileno(self) -> int | None:
        return self._fd if self._is_device or self._is_fifo else None

    def drain(self, limit: int) -> list[KernelLine]:
        return self._drain_records(limit) if self._is_device else self._drain_text(limit)

    def _drain_records(self, limit: int) -> list[KernelLine]:
        out: list[KernelLine] = []
        first, self._pending = self._pending, b""
        for _ in range(limit):
            record, first = first or self._read(), b""
            if record is None:
                break
            if not record:
                continue
            line = read_kmsg(record)
            sequence = line.sequence
            if sequence is not None:
                if self._after is not None and sequence <= self._after:
                    continue
                if self._expected is not None and sequence > self._expected:
                    self.lost += sequence - self._expected
                self._after, self._expected = sequence, sequence + 1
            out.append(line)
        return out

    def _read(self) -> bytes | None:
        """One record; empty for one that cannot be had, None when there are no more."""
        if self._fd is None:
            return None
        try:
            return os.read(self._fd, _RECORD_BYTES) or None
        except BlockingIOError:
            return None
        except BrokenPipeError:  # records were overwritten before we read them; the next read goes on after the gap
            return b""
        except OSError as e:
            if e.errno == errno.EINVAL and self._is_device:  # larger than any the kernel writes; it is passed over
                return b""
            self.close()
            raise _UnusableError(f"cannot read the kernel's log any more: {(e.strerror or str(e)).lower()}") from None

    def _drain_text(self, limit: int) -> list[KernelLine]:
        out: list[KernelLine] = []
        while len(out) < limit and self._fd is not None:
            head, newline, rest = self._pending.partition(b"\n")
            if not newline:
                chunk = self._read()
                if not chunk:
                    break
                self._pending = (self._pending + chunk)[-_PENDING_BYTES:]
                continue
            self._pending = rest
            out.append(_line_of_text(head))
        return out

    def position(self, boot_id: str) -> Position:
        return Position(boot_id, self._after)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _line_of_text(raw: bytes) -> KernelLine:
    text = raw.decode("utf-8", errors="replace")
    if is_continuation(text):
        return KernelLine(text, is_fragment=True, device=device_of(text))
    return read_line(text)


class _Journal:
    """``journalctl --follow`` as a child process."""

    name = "journal"

    def __init__(self, program: str, cursor: str) -> None:
        self.lost = 0
        self._cursor = cursor
        self._pending = b""
        path = shutil.which(program)
        if path is None:
            raise _UnusableError(f"{program} is not there")
        if not _journal_has_kernel(path):
            raise _UnusableError(f"{program} shows no kernel messages to this user")
        where = ["--after-cursor", cursor] if cursor else ["--lines", "0"]
        command = [path, "--dmesg", "--follow", "--output", "json", "--no-pager", *where]
        try:
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
        except OSError as e:
            raise _UnusableError(f"cannot start {program}: {(e.strerror or str(e)).lower()}") from None
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)

    def fileno(self) -> int | None:
        out = self._child.stdout
        return out.fileno() if out is not None and not out.closed else None

    def drain(self, limit: int) -> list[KernelLine]:
        out: list[KernelLine] = []
        fd = self.fileno()
        while len(out) < limit and fd is not None:
            head, newline, rest = self._pending.partition(b"\n")
            if newline:
                self._pending = rest
                text = head.decode("utf-8", errors="replace")
                out.append(read_line(text))
                self._cursor = _cursor_of(text) or self._cursor
                continue
            try:
                chunk = os.read(fd, 65536)
            except BlockingIOError:
                break
            if not chunk:
                raise _UnusableError(f"journalctl has ended with exit status {self._child.wait()}")
            self._pending += chunk
            if len(self._pending) > 16 * _PENDING_BYTES and b"\n" not in self._pending:
                self._pending = b""
                self.lost += 1
        return out

    def position(self, boot_id: str) -> Position:
        return Position(boot_id, cursor=self._cursor)

    def close(self) -> None:
        if self._child.stdout is not None and not self._child.stdout.closed:
            self._child.stdout.close()
            self._child.kill()
            self._child.wait()


def _journal_has_kernel(path: str) -> bool:
    """Whether this user sees any: without the right journalctl shows nothing and ends well."""
    command = [path, "--dmesg", "--lines", "1", "--output", "json", "--no-pager"]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_JOURNAL_LIMIT_S, stdin=subprocess.DEVNULL, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.lstrip().startswith(b"{")


def _cursor_of(text: str) -> str:
    try:
        return str(json.loads(text).get("__CURSOR", ""))
    except (ValueError, AttributeError):
        return ""


class KernelWatch:
    """Events of the live kernel log. One thread at a time.

    Args:
        path: the kernel's log; a FIFO or a file that grows in tests.
        position: where an earlier reader was; counts only when it is of this boot.
        from_boot: begin with the oldest record that the kernel still has, not with the next one.
        journalctl: the program to fall back on, or None for no fallback.
        any_facility: believe lines that programs wrote into the log; for tests.
    """

    def __init__(
        self,
        path: Path = KMSG,
        position: Position | None = None,
        from_boot: bool = False,
        journalctl: str | None = "journalctl",
        any_facility: bool = False,
        boot_id: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.boot_id = this_boot() if boot_id is None else boot_id
        self._clock, self._wall = clock, wall
        self._assembler = Assembler(any_facility)
        self._folding = Folding()
        self._source: _Source | None = None
        self.problem = ""
        same_boot = position is not None and position.boot_id == self.boot_id != ""
        self._open(position if same_boot else None, from_boot, journalctl)

    def _open(self, position: Position | None, from_boot: bool, journalctl: str | None) -> None:
        problems = []
        try:
            self._source = _Kmsg(self.path, position.sequence if position else None, from_boot)
            return
        except _UnusableError as e:
            problems.append(str(e))
        if journalctl is not None:
            try:
                self._source = _Journal(journalctl, position.cursor if position else "")
                return
            except _UnusableError as e:
                problems.append(str(e))
        self.problem = f"{'; '.join(problems)} ({ENABLE})"

    @property
    def source(self) -> str:
        """``kmsg``, ``journal``, or ``none``."""
        return self._source.name if self._source is not None else "none"

    @property
    def lost(self) -> int:
        """Records that were overwritten before they were read."""
        return self._source.lost if self._source is not None else 0

    @property
    def foreign(self) -> int:
        """Events that were left out because a program, not the kernel, had written them."""
        return self._assembler.foreign

    def fileno(self) -> int | None:
        """Readable when there are messages; None where there is nothing to wait for."""
        return self._source.fileno() if self._source is not None else None

    def position(self) -> Position | None:
        """How far the log was read."""
        return self._source.position(self.boot_id) if self._source is not None else None

    def drain(self, limit: int = 500) -> list[KernelEvent]:
        """Events in at most *limit* messages that have come since, repeats folded; never blocks.

        The descriptor stays readable while there are more, so that a flood takes no more than a few milliseconds of
        the caller's loop at a time.
        """
        if self._source is None:
            return []
        try:
            lines = self._source.drain(limit)
        except _UnusableError as e:
            self._source.close()
            self._source, self.problem = None, f"{e} ({ENABLE})"
            return []
        if not lines:
            return []
        now_s = self._clock()
        unix_less_monotonic_s = self._wall() - now_s
        events = []
        for line in lines:
            for event in self._feed(line):
                fresh = self._folding.take(event, now_s)
                if fresh is not None:
                    events.append(_timed(fresh, now_s, unix_less_monotonic_s))
        return events

    def drain_all(self, assembler: Assembler) -> Iterator[KernelEvent]:
        """Every event up to now by another reader's rules, repeats and all; for a command."""
        while self._source is not None and (lines := self._source.drain(1000)):
            now_s = self._clock()
            for line in lines:
                for event in assembler.feed(line):
                    yield _timed(event, now_s, self._wall() - now_s)

    def _feed(self, line: KernelLine) -> list[KernelEvent]:
        if line.is_fragment and line.sequence is None:
            return self._assembler.feed_more(line.text, 0)
        return self._assembler.feed(line)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None
            self.problem = self.problem or "closed"


def _timed(event: KernelEvent, now_s: float, unix_less_monotonic_s: float) -> KernelEvent:
    """With both times, whichever the form told: they differ by a constant as long as the machine is up."""
    at_s, at_unix_s = event.at_s, event.at_unix_s
    if at_s is None:
        at_s = at_unix_s - unix_less_monotonic_s if at_unix_s is not None else now_s
    if at_unix_s is None:
        at_unix_s = at_s + unix_less_monotonic_s
    return event.timed(at_s, at_unix_s)
