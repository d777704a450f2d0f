"""Python stacks of a running process, by two ways that need nothing from its main thread.

faulthandler first: the in-rank side has registered it for a real-time signal, so one ``kill`` makes the process append
all its stacks to a file, with the interpreter lock held by C code too, and no right is needed. py-spy where that gives
nothing and the program is installed. A stopped process can do neither: it is left stopped, and /proc alone speaks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steadyrun.core.records import Frame, ThreadStack

__all__ = [
    "StackDump",
    "StackRequest",
    "find_py_spy",
    "last_dump",
    "parse_dumps",
    "parse_py_spy",
    "py_spy_stacks",
    "request_stacks",
]

MAX_DUMP_BYTES: Final = 4 << 20
_SETTLED_S: Final = 0.005  # the dump looks whole and has not grown for this long
_GONE_EVERY_S: Final = 0.02
_QUIET_S: Final = 0.15  # it does not look whole (a thread without a module frame, say) and has not grown for this long

_THREAD = re.compile(
    r"^(?P<current>Current thread|Thread) (?P<id>0x[0-9a-fA-F]+|\d+)?(?: \[(?P<name>.*)\])? ?\(most recent call first\)"
)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_FATAL = re.compile(r"^Fatal Python error: (?P<what>.*)$")
_DEAD_MAN = re.compile(r"^Timeout \((?P<after>[\d:.]+)\)!")


@dataclass(frozen=True, slots=True)
class StackDump:
    """One dump of all threads.

    Attributes:
        stacks: main thread marked where it is known; newest thread first, as written.
        fatal: text after ``Fatal Python error:``, empty for a requested dump.
        whole: it ended where a dump ends; False for one that was cut.
        native: the C frames below a fatal error (Python 3.14).
    """

    stacks: tuple[ThreadStack, ...]
    fatal: str = ""
    whole: bool = True
    native: tuple[str, ...] = ()


class _Builder:
    """Collects the lines of one dump."""

    def __init__(self, fatal: str = "") -> None:
        self.fatal = fatal
        self.threads: list[tuple[str, str, bool, list[Frame]]] = []  # id, name, current, frames
        self.native: list[str] = []
        self.many = False  # more threads than faulthandler writes: the main one is not among them
        self.is_bare = False  # the newest thread has no frames, as an interpreter that ends

    def holds(self, thread_id: str) -> bool:
        return any(t[0] == thread_id for t in self.threads)

    def dump(self) -> StackDump | None:
        if not self.threads and not self.fatal:
            return None
        last = len(self.threads) - 1
        stacks = tuple(
            ThreadStack(_thread_name(id_, name, current), tuple(frames), is_main=i == last and not self.many)
            for i, (id_, name, current, frames) in enumerate(self.threads)
        )
        frames = self.threads[-1][3] if self.threads else []
        whole = _is_bottom(frames[-1]) if frames else self.is_bare
        return StackDump(stacks, self.fatal, whole, tuple(self.native))


def _thread_name(id_: str, name: str, current: bool) -> str:
    text = f"{name} {id_}" if name else id_
    return f"{text} (current)" if current else text


def _is_bottom(frame: Frame) -> bool:
    """A frame below which a thread has no other."""
    return frame.function in ("<module>", "_bootstrap", "_run_module_as_main", "...") or frame.file == "<string>"


def parse_dumps(text: str) -> list[StackDump]:
    """All dumps in *text*, oldest first; lines of other writers are passed over, a cut last line is dropped.

    A new dump begins at ``Fatal Python error``, at ``Timeout``, and where a thread comes a second time. faulthandler
    walks the interpreter's list of threads, newest first: the last one is the main thread.
    """
    dumps: list[StackDump] = []
    builder = _Builder()
    in_native = False

    def finish(next_fatal: str = "") -> _Builder:
        done = builder.dump()
        if done is not None:
            dumps.append(done)
        return _Builder(next_fatal)

    for line in text.split("\n")[:-1]:
        if frame := _FRAME.match(line):
            if builder.threads and not in_native:
                number = int(frame["line"]) if frame["line"].isdigit() else 0
                builder.threads[-1][3].append(Frame(frame["file"], number, frame["function"]))
        elif thread := _THREAD.match(line):
            in_native = False
            id_ = thread["id"] or ""
            if builder.holds(id_):
                builder = finish()
            builder.threads.append((id_, thread["name"] or "", thread["current"] == "Current thread", []))
            builder.is_bare = False
        elif fatal := _FATAL.match(line):
            in_native = False
            builder = finish(fatal["what"])
        elif _DEAD_MAN.match(line):
            in_native = False
            builder = finish()
        elif line.startswith("Current thread's C stack trace"):
            in_native = True
        elif in_native and line.startswith("  "):
            builder.native.append(line.strip())
        elif line == "  <no Python frame>" and builder.threads:
            builder.is_bare = True
        elif line == "..." and builder.threads:
            builder.many = True
        elif line == "  ..." and builder.threads:
            builder.threads[-1][3].append(Frame("<cut>", 0, "..."))
    finish()
    return dumps


def last_dump(path: Path, offset: int = 0) -> StackDump | None:
    """The newest dump in the file from *offset* on: whole if there is a whole one; None when there is none at all."""
    text = _read_from(path, offset)
    if text is None:
        return None
    dumps = [d for d in parse_dumps(text) if d.stacks]
    return next((d for d in reversed(dumps) if d.whole), dumps[-1] if dumps else None)


def _read_from(path: Path, offset: int) -> str | None:
    try:
        with path.open("rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(offset, size - MAX_DUMP_BYTES, 0))
            return f.read(MAX_DUMP_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None


def file_size(path: Path) -> int:
    """Bytes in the file now; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


@dataclass(slots=True)
class StackRequest:
    """One requested dump, in two halves so that many ranks can be asked at once: ``send``, then ``wait``."""

    pid: int
    signum: int
    path: Path
    offset: int = 0
    error: str = ""

    def send(self) -> bool:
        """Ask; never blocks. False (with ``error``) when the process cannot be asked.

        Whoever calls has made sure that the process has a handler: the signal's default action would end it.
        """
        self.offset = file_size(self.path)
        try:
            os.kill(self.pid, self.signum)
        except ProcessLookupError:
            self.error = "the process is gone"
        except PermissionError:
            self.error = "no right to signal the process"
        return not self.error

    def wait(
        self,
        deadline_s: float,
        now_s: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> StackDump | None:
        """The dump once it is whole, or what there is at *deadline_s* (CLOCK_MONOTONIC); None if nothing came.

        Args:
            is_gone: asked now and then; once true, nothing more is waited for.
        """
        size, changed_s = self.offset, now_s()
        asked_s = changed_s
        while True:
            now = now_s()
            new_size = file_size(self.path)
            if new_size != size:
                size, changed_s = new_size, now
            elif size > self.offset and now - changed_s >= _SETTLED_S:
                dump = last_dump(self.path, self.offset)
                if dump is not None and (dump.whole or now - changed_s >= _QUIET_S):
                    return dump
            if now - asked_s >= _GONE_EVERY_S:
                asked_s = now
                if is_gone():
                    self.error = "the process ended before it answered"
                    return last_dump(self.path, self.offset)
            if now >= deadline_s:
                self.error = "" if size > self.offset else "no answer to the stack signal"
                return last_dump(self.path, self.offset)
            pause(min(0.002 if size == self.offset or now - changed_s < 0.02 else 0.02, max(deadline_s - now, 0.0)))


def request_stacks(pid: int, signum: int, path: Path, deadline_s: float) -> StackDump | None:
    """Stacks of *pid* by its faulthandler, or None; waits until *deadline_s* at the longest."""
    request = StackRequest(pid, signum, path)
    return request.wait(deadline_s) if request.send() else None


# -- py-spy ----------------------------------------------------------------------------------------------------------
def find_py_spy() -> str | None:
    """The program, beside this interpreter or on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    if os.access(beside, os.X_OK):
        return str(beside)
    return shutil.which("py-spy")


def py_spy_stacks(program: str, pid: int, limit_s: float) -> tuple[tuple[ThreadStack, ...], str]:
    """(stacks, why there are none). Waits at most *limit_s*; never for a stopped or uninterruptible process.

    Only call it for a process in state R or S: even with --nonblocking it reads memory of a process in state D in vain.
    """
    argv = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(argv, capture_output=True, timeout=limit_s, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        return (), f"py-spy gave no answer in {limit_s:g} s"
    except OSError as e:
        return (), f"py-spy could not be started: {e.strerror}"
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        text = said[0].removeprefix("Error: ") if said else f"exit code {done.returncode}"  # a Rust backtrace follows
        if any("permission" in line.lower() for line in said):
            text = "no right to read the process (ptrace): run as root, or set kernel.yama.ptrace_scope=0"
        return (), f"py-spy: {text}"
    try:
        return parse_py_spy(json.loads(done.stdout)), ""
    except (ValueError, KeyError, TypeError) as e:
        return (), f"py-spy answered something else than stacks: {e!r}"


def parse_py_spy(threads: Iterable[Any]) -> tuple[ThreadStack, ...]:
    """Stacks from ``py-spy dump --json``.

    Raises:
        KeyError, TypeError: it is not that.
    """
    stacks = []
    for thread in threads:
        frames = tuple(Frame(str(f["filename"]), int(f["line"]), str(f["name"])) for f in thread["frames"])
        name = str(thread["thread_name"] or thread["os_thread_id"])
        if thread.get("owns_gil"):
            name += " (holds the interpreter lock)"
        is_main = thread["os_thread_id"] == thread["pid"] or thread["thread_name"] == "MainThread"
        stacks.append(ThreadStack(name, frames, is_main))
    return tuple(stacks)
