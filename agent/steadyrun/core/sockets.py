"""Paths of unix sockets. Ranks import this at their start: it needs nothing but ``os``."""

from __future__ import annotations

import os

__all__ = ["reachable"]

_SUN_PATH = 107  # bytes of a unix socket's address, without the closing 0


def reachable(folder: str, name: str) -> tuple[str, int]:
    """A path for a unix socket *name* in *folder*, and a descriptor to close after use (-1: none).

    The kernel's limit of 107 bytes is on the text, not on what it leads to.

    Raises:
        OSError: the folder cannot be opened.
    """
    path = os.path.join(folder, name)
    if len(os.fsencode(path)) <= _SUN_PATH:
        return path, -1
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{opened}/{name}", opened
