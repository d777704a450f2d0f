"""Files that a rank leaves for its agent: whole or not at all, and readable by their owner only.

They need not survive a power cut, so nothing is synced: a rank must not wait for a disk.
"""

from __future__ import annotations

import os
from _thread import get_ident

__all__ = ["write_whole"]


def write_whole(path: str, data: bytes) -> None:
    """Replace the content of *path*; a reader sees the old or the new one. Any thread.

    Raises OSError; the old content is then still there.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.{get_ident()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
