"""Wakes the loop when a file that has been quiet for a while is written to again: inotify, where there is one."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

__all__ = ["FileWatch"]

_IN_MODIFY: Final = 0x2
_IN_ONESHOT: Final = 0x80000000
_EVENTS_BYTES: Final = 64 * 1024


class FileWatch:
    """Readable through ``fileno`` once one of the armed files has grown. Not for files that other hosts write.

    Each file is told of once, and then only after ``arm`` was called again: a file that grows all the time costs
    nothing here.

    Raises:
        OSError: the kernel has no inotify, or this user no instance left.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]
        self._fd = int(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        if self._fd < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def fileno(self) -> int:
        return self._fd

    def arm(self, paths: Iterable[Path]) -> None:
        """Forget what was told, and tell of the next write to each; one that cannot be watched is left out."""
        self.drain()
        for path in paths:
            self._libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_MODIFY | _IN_ONESHOT)

    def close(self) -> None:
        os.close(self._fd)

    def drain(self) -> None:
        """Forget what was told."""
        try:
            while len(os.read(self._fd, _EVENTS_BYTES)) == _EVENTS_BYTES:
                pass
        except BlockingIOError:
            pass
