"""What lies in a folder of checkpoints: complete ones, damaged ones, unfinished ones, and what is being removed.

Reading only, apart from ``set_aside``. Anything may vanish or appear meanwhile: other nodes write, commit and remove in
the same folder, and a network file system shows that late.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from steadyrun.checkpoint.commit import LATEST_NAME, TRASH_PREFIX, open_manifest, read_manifest
from steadyrun.checkpoint.durable import write_whole
from steadyrun.checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, FolderName, Manifest, ManifestError
from steadyrun.core.errors import SteadyrunError

__all__ = [
    "LATEST_NAME",
    "SUPERSEDED_NAME",
    "TRASH_PREFIX",
    "BusyError",
    "Catalog",
    "CatalogError",
    "Listed",
    "hold",
    "list_checkpoints",
    "look",
    "set_aside",
]

T = TypeVar("T")

SUPERSEDED_NAME: Final = ".superseded"
_GONE: Final = (errno.ENOENT, errno.ENOTDIR)
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL, errno.EBADF)


class CatalogError(SteadyrunError):
    """A folder of checkpoints that cannot be listed; whether it holds any is not known."""


class BusyError(SteadyrunError):
    """A checkpoint that cannot be held: it is being removed, or somebody reads it."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One checkpoint folder.

    Attributes:
        manifest: None when it is missing or unreadable.
        problem: why it is not complete; None when it is.
        is_unsure: it could not be looked at properly, or another program has written it: it may be a good checkpoint,
            and is neither loaded without being named nor removed.
        is_superseded: set aside by a rollback.
    """

    path: Path
    name: FolderName
    manifest: Manifest | None
    problem: str | None = None
    is_unsure: bool = False
    is_superseded: bool = False

    @property
    def step(self) -> int:
        return self.name.step

    @property
    def attempt(self) -> int:
        if self.manifest is not None:
            return self.manifest.attempt
        return self.name.attempt or 0

    @property
    def is_complete(self) -> bool:
        return self.problem is None and self.manifest is not None and not self.name.is_partial

    @property
    def is_verified(self) -> bool:
        return self.is_complete and self.manifest is not None and self.manifest.verified is not None

    @property
    def order(self) -> tuple[int, int, float]:
        """Greater for what was saved later."""
        return (self.step, self.attempt, 0.0 if self.manifest is None else self.manifest.created_unix_s)


@dataclass(frozen=True, slots=True)
class Catalog:
    """Newest first, each.

    Attributes:
        checkpoints: folders with a final name, complete or not.
        partials: saves that are being written, or were when their writer died.
        trash: what is being removed, or was when the remover died.
    """

    root: Path
    checkpoints: tuple[Listed, ...] = ()
    partials: tuple[Listed, ...] = ()
    trash: tuple[Path, ...] = ()

    @property
    def complete(self) -> tuple[Listed, ...]:
        return tuple(c for c in self.checkpoints if c.is_complete)


def list_checkpoints(root: Path) -> tuple[Listed, ...]:
    """Checkpoints in *root*, complete or damaged, newest first. Raises CatalogError."""
    return look(root).checkpoints


def look(root: Path) -> Catalog:
    """All that is in *root*; empty when it does not exist.

    Names and sizes of the files are compared with the manifest, and the bytes of ``.metadata``; tensors are not read.

    Raises:
        CatalogError: *root* is there and cannot be listed.
    """
    try:
        names = _retry_stale(lambda: os.listdir(root))
    except OSError as e:
        if e.errno == errno.ENOENT:
            return Catalog(root)
        raise CatalogError(
            f"cannot list the checkpoints in {root}: {e.strerror or e}; "
            "check that it is a folder, that it is mounted and that this user may read it"
        ) from e
    known = set(names)
    # A folder that another node has just renamed may be missing in a cached listing: the pointer was written after it.
    pointed = _pointed(root) if LATEST_NAME in known else None
    if pointed is not None and pointed not in known and (root / pointed).is_dir():
        names.append(pointed)
    checkpoints: list[Listed] = []
    partials: list[Listed] = []
    for name in names:
        parsed = FolderName.parse(name)
        listed = None if parsed is None else _listed(root / name, parsed)
        if listed is not None:
            (partials if listed.name.is_partial else checkpoints).append(listed)
    return Catalog(
        root,
        _newest_first(checkpoints),
        _newest_first(partials),
        tuple(sorted((root / n for n in names if n.startswith(TRASH_PREFIX)), reverse=True)),
    )


def _newest_first(listed: list[Listed]) -> tuple[Listed, ...]:
    return tuple(sorted(listed, key=lambda c: (*c.order, c.path.name), reverse=True))


def _pointed(root: Path) -> str | None:
    try:
        name = json.loads((root / LATEST_NAME).read_bytes())["folder"]
    except (OSError, ValueError, TypeError, KeyError):
        return None  # advisory only
    return name if isinstance(name, str) and FolderName.parse(name) is not None else None


def _listed(path: Path, name: FolderName) -> Listed | None:
    """None when it has vanished or is no folder."""
    try:
        present = set(_retry_stale(lambda: os.listdir(path)))
    except OSError as e:
        if e.errno in _GONE:
            return None
        return Listed(path, name, None, f"cannot be listed: {e.strerror or e}", is_unsure=True)
    is_superseded = SUPERSEDED_NAME in present
    if name.is_partial:
        return Listed(path, name, None, "not committed", is_superseded=is_superseded)
    problem, is_unsure = _problem(path)
    if problem is not None and MANIFEST_NAME not in present:
        # Ours are given their final name after the manifest, so that one without it is another program's.
        problem, is_unsure = f"{MANIFEST_NAME} is missing", True
    if problem is not None and not path.is_dir():
        return None
    manifest = _manifest(path)
    if problem is None and (manifest is None or not manifest.complete):
        problem = "its manifest says that it is not complete"
    return Listed(path, name, manifest, problem, is_unsure, is_superseded)


def _problem(folder: Path) -> tuple[str | None, bool]:
    """What does not fit the manifest, and whether that may be untrue."""
    try:
        read_manifest(folder)
    except ManifestError:
        _look_anew(folder)
    else:
        return None, False
    try:
        read_manifest(folder)
    except ManifestError as e:
        is_unsure = isinstance(e.__cause__, OSError) and e.__cause__.errno not in _GONE
        return str(e), is_unsure
    return None, False


def _look_anew(folder: Path) -> None:
    """Make a network file system forget what it has cached: it asks the server on listing and on opening."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                os.close(os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))


def _manifest(folder: Path) -> Manifest | None:
    """Of a damaged checkpoint, too, when the manifest itself is not."""
    try:
        return open_manifest((folder / MANIFEST_NAME).read_bytes())
    except (OSError, ManifestError):
        return None


def _retry_stale(call: Callable[[], T]) -> T:
    """The second call looks the name up again: NFS says ESTALE for a handle of what has been replaced."""
    try:
        return call()
    except OSError as e:
        if e.errno != errno.ESTALE:
            raise
        return call()


def set_aside(folder: Path, why: str) -> None:
    """Mark a checkpoint as superseded: it stays, but is not resumed from. Raises OSError."""
    write_whole(folder / SUPERSEDED_NAME, json.dumps({"why": why}).encode())


@contextlib.contextmanager
def hold(folder: Path, *, to_remove: bool = False) -> Iterator[None]:
    """Keep a checkpoint from being removed while it is read, or, with *to_remove*, from being read while it goes.

    The lock is the kernel's, on ``.metadata``: it ends with the process and leaves nothing behind. Where the file
    system has no locks, the checkpoint is not protected, and a reader falls back to an older one.

    Raises:
        BusyError: somebody holds it in the other way, or it has gone.
    """
    path = folder / METADATA_NAME
    try:
        fd = _open_to_lock(path, to_remove)
    except OSError as e:
        if not to_remove:
            raise BusyError(f"cannot hold {folder}: {e.strerror or e}; it may have been removed") from e
        fd = -1  # a folder without it is no checkpoint that anybody could be reading
    try:
        if fd >= 0:
            _lock(fd, folder, to_remove)
            if not _is_same(fd, path):
                raise BusyError(f"cannot hold {folder}: it was removed meanwhile")
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _open_to_lock(path: Path, to_remove: bool) -> int:
    if to_remove:
        with contextlib.suppress(PermissionError):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)  # NFS wants one that can write for an exclusive lock
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _lock(fd: int, folder: Path, to_remove: bool) -> None:
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if to_remove else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError as e:
        why = "somebody reads it; try again later" if to_remove else "it is being removed; use another one"
        raise BusyError(f"cannot hold {folder}: {why}") from e
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            raise BusyError(f"cannot hold {folder}: {e.strerror or e}") from e


def _is_same(fd: int, path: Path) -> bool:
    mine = os.fstat(fd)
    try:
        there = path.stat()
    except OSError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)
