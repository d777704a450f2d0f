"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: Path, data: str | bytes, mode: int | None = None) -> None:
    """So that nobody ever reads half of it; nothing is left behind where it fails.

    It need not survive a power cut. One thread of a process at a time may write a *path*.

    Args:
        mode: permissions; None: those of new files.

    Raises:
        OSError: the old content is still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666 if mode is None else mode)
        with open(fd, "wb") as file:
            if mode is not None:
                os.fchmod(fd, mode)
            file.write(data.encode() if isinstance(data, str) else data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
