"""Signals to the launcher as items in a queue: handlers only set a flag, the loop acts.

torchrun raises an exception inside whatever the main thread does; its third SIGTERM escapes every wait and leaves the
workers behind (measured, torch 2.13). Here the interpreter writes the number into a socket (``signal.set_wakeup_fd``),
and the selector of the loop wakes up.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, Final

from steadyrun.core.errors import ConfigError, nearest_name

__all__ = ["FORWARDED", "SignalInbox", "parse_signals"]

FORWARDED: Final = (signal.SIGUSR1, signal.SIGUSR2)
"""Always taken and passed on to the ranks: a scheduler's warning ends nothing."""

_NOT_CATCHABLE: Final = (signal.SIGKILL, signal.SIGSTOP)


def parse_signals(text: str) -> tuple[signal.Signals, ...]:
    """The value of ``--signals-to-handle``: names separated by commas.

    Raises:
        ConfigError: a name that is no signal, or cannot be caught.
    """
    known = [s.name for s in signal.Signals if s not in _NOT_CATCHABLE]
    out: list[signal.Signals] = []
    for item in text.split(","):
        name = item.strip()
        if not name:
            continue
        if name not in known:
            raise ConfigError(
                f"--signals-to-handle: {name!r} is not a signal that can be handled{nearest_name(name, known)}"
            )
        out.append(signal.Signals[name])
    return tuple(dict.fromkeys(out))


class SignalInbox:
    """Takes signals between ``__enter__`` and ``__exit__``; the handlers from before come back afterwards.

    Outside the main thread Python allows no handlers: then nothing is installed and ``is_installed`` is False.
    SIGHUP stays ignored where it was (nohup).
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self._signals = tuple(dict.fromkeys((*signals, *FORWARDED)))
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self.is_installed = False
        self.last_stop: signal.Signals | None = None

    def __enter__(self) -> SignalInbox:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in self._signals:
            if signum is signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue
            self._before[signum] = signal.signal(signum, _noted)
        self.is_installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_installed:
            self.is_installed = False
            for signum, handler in self._before.items():
                # None: the handler was not installed from Python and cannot be put back
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)
            signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Readable when a signal came."""
        return self._reader.fileno()

    def drain(self) -> Sequence[int]:
        """Signal numbers since the last call, in order; never blocks. Signals of others (SIGCHLD) are left out."""
        try:
            raw = self._reader.recv(4096)
        except BlockingIOError:
            return ()
        wanted = [n for n in raw if n in self._before]
        for number in wanted:
            if number not in FORWARDED:
                self.last_stop = signal.Signals(number)
        return wanted


def _noted(signum: int, frame: FrameType | None) -> None:
    """A handler has to exist for the interpreter to write into the wake-up descriptor."""
