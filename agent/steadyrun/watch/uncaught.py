"""The record of an uncaught exception, written by the rank itself before it dies."""

from __future__ import annotations

import os
import sys
from time import time

from steadyrun.core.layout import F_EXCEPTION
from steadyrun.watch.files import write_whole
from steadyrun.watch.jsontext import render

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

    from steadyrun.watch.marks import Marks

__all__ = ["ExceptionRecorder", "exception_record", "traceback_hash"]

_MESSAGE_CHARS = 4000
_FRAMES = 200  # a RecursionError has a thousand
_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3


def traceback_hash(type_name: str, frames: list[tuple[str, int, str]]) -> str:
    """Equal for the same error at the same place: FNV-1a (64 bits) over type and (file name, function, line).

    hashlib is not used: a dying process should not begin to import.
    """
    value = _FNV_OFFSET
    parts = [type_name, *(f"{os.path.basename(file)}:{function}:{line}" for file, line, function in frames)]
    for byte in "\n".join(parts).encode("utf-8", "replace"):
        value = (value ^ byte) * _FNV_PRIME & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def exception_record(
    kind: type[BaseException],
    value: BaseException | None,
    trace: TracebackType | None,
    step: int | None,
    at_unix_s: float,
) -> dict[str, Any]:
    """The fields of ``ExceptionRecord``, frames most recent first."""
    module = getattr(kind, "__module__", None)
    qualified = getattr(kind, "__qualname__", str(kind))
    type_name = qualified if module in (None, "builtins", "__main__") else f"{module}.{qualified}"
    try:
        message = str(value)[:_MESSAGE_CHARS]
    except Exception as e:
        message = f"(its text cannot be had: {type(e).__name__})"
    frames: list[tuple[str, int, str]] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno or 0, code.co_name))
        trace = trace.tb_next
    frames.reverse()
    if len(frames) > _FRAMES:
        frames = frames[: _FRAMES // 2] + frames[-_FRAMES // 2 :]
    return {
        "type": type_name,
        "message": message,
        "traceback_hash": traceback_hash(type_name, frames),
        "frames": [{"file": file, "line": line, "function": function} for file, line, function in frames],
        "step": step,
        "at_unix_s": at_unix_s,
    }


class ExceptionRecorder:
    """Writes exception.json for what ends the main thread, thread_exceptions.jsonl for what ends another.

    ``sys.excepthook`` is wrapped, so that the record is there before the traceback is printed; for a script that puts
    its own hook in place ``sys.last_value`` is looked at when the interpreter is torn down. SystemExit never comes this
    way: Python prints its text and leaves no trace of it.

    Args:
        recorded: called once the main thread's record is there, except for a KeyboardInterrupt.
    """

    def __init__(self, rank_dir: str, marks: Marks, recorded: Callable[[], None]) -> None:
        self._rank_dir = rank_dir
        self._marks = marks
        self._call_recorded = recorded
        self._recorded: BaseException | None = None
        self._chained = sys.excepthook

    def install(self) -> None:
        self._chained = sys.excepthook
        sys.excepthook = self._on_uncaught

    def install_for_threads(self, threading: Any) -> None:
        """Wrap ``threading.excepthook``; given the module once it is imported."""
        chained = threading.excepthook

        def on_thread_uncaught(args: Any) -> None:
            self._note_thread(args)
            chained(args)

        threading.excepthook = on_thread_uncaught

    def record_last(self) -> None:
        """Record what ended the script, unless that was done. When the interpreter is being torn down."""
        value = getattr(sys, "last_value", None)
        if isinstance(value, BaseException) and value is not self._recorded:
            self._record(type(value), value, getattr(sys, "last_traceback", None) or value.__traceback__)

    def _on_uncaught(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        self._record(kind, value, trace)
        self._chained(kind, value, trace)

    def _record(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not self._marks.is_active():
            return  # a forked child's exception is not the rank's
        self._recorded = value
        try:
            data = exception_record(kind, value, trace, self._marks.last_step(), time())
            write_whole(os.path.join(self._rank_dir, "exception.json"), render(data).encode())
            self._marks.set_flag(F_EXCEPTION)
            if not issubclass(kind, KeyboardInterrupt):
                self._call_recorded()
        except Exception:  # the script's own traceback is next; nothing of ours may come before it
            return

    def _note_thread(self, args: Any) -> None:
        if not self._marks.is_active() or args.exc_type is SystemExit:
            return
        try:
            data = exception_record(args.exc_type, args.exc_value, args.exc_traceback, self._marks.last_step(), time())
            data["thread"] = getattr(args.thread, "name", None)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            fd = os.open(os.path.join(self._rank_dir, "thread_exceptions.jsonl"), flags, 0o600)
            try:
                os.write(fd, render(data).encode() + b"\n")
            finally:
                os.close(fd)
        except Exception:
            return
