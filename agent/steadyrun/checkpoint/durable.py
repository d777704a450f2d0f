"""Small files that are either the old or the new one, whole, whenever the machine stops."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from pathlib import Path
from typing import Final

__all__ = ["sync_folder", "write_whole"]

# Folders of some FUSE and object-store mounts cannot be synced; there is nothing else to do about it.
_NO_SYNC: Final = (errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.EROFS)


def write_whole(path: Path, data: bytes) -> None:
    """Replace the content of *path*; a reader sees the old or the new one, and after the return it is on the device.

    Raises OSError; the old content is then still there.
    """
    # Not the process id: on a shared file system another node may have the same.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(fd, left) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in *folder* durable. Raises OSError, except where folders cannot be synced at all."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in _NO_SYNC:
            raise
    finally:
        os.close(fd)
