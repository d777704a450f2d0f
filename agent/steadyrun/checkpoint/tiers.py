"""Places where committed checkpoints are kept besides the folder that they were written to.

A tier is a folder (of the node's own disk, or shared) or an object store behind an fsspec URL. Checkpoints arrive whole
or not at all: in a folder by the rename of a commit; in a store, which cannot rename, by the manifest, which is sent
last and taken away first. A file ``.unfinished`` beside it says that what has no manifest is ours, and can go.

All calls wait for storage, and may take long; call them in a thread of their own.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlsplit

from steadyrun.checkpoint import commit
from steadyrun.checkpoint.catalog import BusyError, CatalogError, Listed, hold, look
from steadyrun.checkpoint.manifest import MANIFEST_NAME, METADATA_NAME, FolderName, Manifest, ManifestError
from steadyrun.checkpoint.transfer import (
    DamagedSourceError,
    LocalFolder,
    Place,
    Progress,
    TransferError,
    TransferOptions,
    copy_files,
    retried,
)
from steadyrun.core.errors import SteadyrunError

__all__ = ["UNFINISHED_NAME", "FolderTier", "Moved", "StoreTier", "Tier", "TierError", "is_url", "open_tier"]

UNFINISHED_NAME: Final = ".unfinished"
_SUPERSEDED_NAME: Final = ".superseded"
_MOST_MANIFEST_BYTES: Final = 256 << 20
_ADVICE: Final = "look whether the place can be reached, has space, and lets this user write; the next save tries again"


class TierError(SteadyrunError):
    """A tier could not do what was asked; what it holds is as it was, or is listed as not complete.

    Attributes:
        is_damage: the checkpoint that was to be copied is damaged; *file* is where.
    """

    def __init__(self, text: str, is_damage: bool = False, file: str = "") -> None:
        super().__init__(text)
        self.is_damage = is_damage
        self.file = file


@dataclass(frozen=True, slots=True)
class Moved:
    """A checkpoint that has arrived.

    Attributes:
        name: of its folder in the tier; another than in the source when that name was taken by another checkpoint.
        path: for people and for ``choose``.
        was_there: it was there already, whole; nothing was sent.
        tries: of the file that took the most.
    """

    name: str
    path: str
    size_bytes: int
    elapsed_s: float
    was_there: bool = False
    tries: int = 1


class Tier(Protocol):
    """One place. All methods raise TierError, for a reason that its text tells."""

    @property
    def place(self) -> str:
        """The folder or URL, for people."""
        ...

    def path_of(self, name: str) -> str:
        """Of the checkpoint of that name, for people and for ``choose``."""
        ...

    def list(self) -> tuple[Listed, ...]:
        """Checkpoints and unfinished ones, newest first, in the form that ``retention.to_remove`` takes.

        Their *path* identifies them within the tier and can be opened only where the tier is a folder.
        """
        ...

    def is_complete(self, name: str) -> bool: ...

    def put(self, folder: Path, progress: Progress | None = None) -> Moved:
        """Copy a complete checkpoint into the tier; every byte is compared with its checksums."""
        ...

    def get(self, name: str, into: Path, progress: Progress | None = None) -> Path:
        """Copy a checkpoint out of the tier into the root *into*, committed there; returns its folder."""
        ...

    def remove(self, name: str) -> None:
        """Take a checkpoint away; interrupted, it is either whole or not a checkpoint any more."""
        ...


def is_url(place: str) -> bool:
    """Rather than a path."""
    return "://" in place


def open_tier(place: str, options: TransferOptions | None = None, storage: Mapping[str, Any] | None = None) -> Tier:
    """The tier at a folder or an fsspec URL.

    Args:
        storage: further arguments of the URL's file system; credentials come from its own environment as usual.

    Raises:
        TierError: the URL needs a package that is not installed, or names no known kind of storage.
    """
    options = options or TransferOptions()
    if not is_url(place):
        return FolderTier(Path(place), options)
    parts = urlsplit(place)
    if parts.scheme in ("file", "local"):  # ours syncs, and commits by a rename
        return FolderTier(Path(unquote(f"{parts.netloc}{parts.path}")), options)
    try:
        import fsspec  # takes a third of a second, and is needed here only
    except ImportError as e:
        raise TierError(
            f"cannot use {place}: the package fsspec is not installed; pip install 'steadyrun[remote]'"
        ) from e
    try:
        system, base = fsspec.core.url_to_fs(place, **dict(storage or {}))
    except ImportError as e:
        raise TierError(f"cannot use {place}: {e}, in the environment that steadyrun runs in") from e
    except ValueError as e:
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise TierError(f"cannot use {place}: {e}; known are {known}") from e
    except Exception as e:
        raise TierError(f"cannot use {place}: {type(e).__name__}: {e}; {_ADVICE}") from e
    return StoreTier(place, system, str(base), options)


# -- what both do ------------------------------------------------------------------------------------------------------
def _manifest_of(folder: Path) -> Manifest:
    try:
        manifest = commit.read_manifest(folder)
    except ManifestError as e:
        raise TierError(f"cannot copy {folder}: {e}", is_damage=True) from e
    if not manifest.complete:
        raise TierError(f"cannot copy {folder}: its manifest says that it is not complete")
    return manifest


def _is_same(one: Manifest, other: Manifest) -> bool:
    """The same checkpoint, whether somebody has verified it meanwhile or not."""
    return (one.step, one.attempt, one.run_id, one.created_unix_s, one.files) == (
        other.step,
        other.attempt,
        other.run_id,
        other.created_unix_s,
        other.files,
    )


def _copy(
    source: Place, target: Place, manifest: Manifest, what: str, options: TransferOptions, progress: Progress | None
) -> int:
    try:
        return copy_files(source, target, manifest, what, options, progress)
    except DamagedSourceError as e:
        raise TierError(f"{e}; it is not copied, use another checkpoint", is_damage=True, file=e.file) from e
    except TransferError as e:
        raise TierError(f"{e}; {_ADVICE}") from e


def _receive(
    source: Place, manifest: Manifest, root: Path, what: str, options: TransferOptions, progress: Progress | None
) -> tuple[Path, int, bool]:
    """Copy a checkpoint to *root* and commit it: its folder, tries, and whether it was there before."""
    for name in (FolderName(manifest.step), FolderName(manifest.step, manifest.attempt)):
        with contextlib.suppress(ManifestError):
            if _is_same(commit.read_manifest(root / str(name)), manifest):
                return root / str(name), 1, True
    try:
        partial = commit.begin(root, manifest.step, manifest.attempt)
    except OSError as e:
        raise TierError(f"{what}: {e.strerror or e}; {_ADVICE}") from e
    try:
        tries = _copy(source, LocalFolder(partial), manifest, what, options, progress)
        folder = commit.commit(root, partial, manifest, (partial / METADATA_NAME).read_bytes())
    except commit.CommitError as e:
        commit.abandon(partial)
        raise TierError(f"{what}: {e}") from e
    except OSError as e:
        commit.abandon(partial)
        raise TierError(f"{what}: {e.strerror or e}; {_ADVICE}") from e
    except BaseException:
        commit.abandon(partial)
        raise
    return folder, tries, False


# -- folders -----------------------------------------------------------------------------------------------------------
class FolderTier:
    """A folder of checkpoints in a file system."""

    def __init__(self, root: Path, options: TransferOptions | None = None) -> None:
        self._root = root
        self._options = options or TransferOptions()

    @property
    def place(self) -> str:
        return str(self._root)

    def path_of(self, name: str) -> str:
        return str(self._root / name)

    def list(self) -> tuple[Listed, ...]:
        try:
            catalog = look(self._root)
        except CatalogError as e:
            raise TierError(str(e)) from e
        return tuple(sorted((*catalog.checkpoints, *catalog.partials), key=lambda c: c.order, reverse=True))

    def is_complete(self, name: str) -> bool:
        return commit.is_complete(self._root / name)

    def put(self, folder: Path, progress: Progress | None = None) -> Moved:
        started_s = time.monotonic()
        what = f"cannot copy {folder} to {self._root}"
        with _held(folder, what):
            manifest = _manifest_of(folder)
            source = LocalFolder(folder)
            copied, tries, was_there = _receive(source, manifest, self._root, what, self._options, progress)
        elapsed_s = time.monotonic() - started_s
        return Moved(copied.name, str(copied), manifest.size_bytes, elapsed_s, was_there, tries)

    def get(self, name: str, into: Path, progress: Progress | None = None) -> Path:
        return Path(FolderTier(into, self._options).put(self._root / name, progress).path)

    def remove(self, name: str) -> None:
        folder = self._root / name
        try:
            with hold(folder, to_remove=True):
                commit.remove(folder)
        except BusyError as e:
            raise TierError(str(e)) from e
        except OSError as e:
            raise TierError(f"cannot remove {folder}: {e.strerror or e}; remove it by hand to free the space") from e


@contextmanager
def _held(folder: Path, what: str) -> Iterator[None]:
    try:
        with hold(folder):
            yield
    except BusyError as e:
        raise TierError(f"{what}: {e}") from e


# -- object stores -----------------------------------------------------------------------------------------------------
class _StoreFolder:
    """A ``Place`` in an fsspec file system."""

    def __init__(self, system: Any, folder: str) -> None:
        self._system = system  # untyped: fsspec.AbstractFileSystem
        self._folder = folder

    def path(self, name: str) -> str:
        return f"{self._folder}/{name}"

    @contextmanager
    def reader(self, name: str) -> Iterator[io.RawIOBase]:
        with self._system.open(self.path(name), "rb", cache_type="readahead") as file:
            yield file

    @contextmanager
    def writer(self, name: str, size_bytes: int) -> Iterator[Callable[[memoryview], object]]:
        file = self._system.open(self.path(name), "wb")
        try:
            # Some stores keep what they are given until it is sent, and the buffer is used again for the next piece.
            yield lambda data: file.write(bytes(data))
        except BaseException:
            self._give_up(file, name)
            raise
        file.close()

    def _give_up(self, file: Any, name: str) -> None:
        """Not ``close``, where that would make a whole object of half of it."""
        with contextlib.suppress(Exception):
            if hasattr(file, "buffer") and hasattr(file, "offset"):  # fsspec's AbstractBufferedFile
                file.discard()
                file.closed = True
            else:
                file.close()
        with contextlib.suppress(Exception):
            self._system.rm_file(self.path(name))

    def size_bytes(self, name: str) -> int:
        self._system.invalidate_cache(self._folder)
        return int(self._system.info(self.path(name))["size"])


class StoreTier:
    """Checkpoints in an object store, or whatever else fsspec reaches; made by ``open_tier``."""

    def __init__(self, url: str, system: Any, base: str, options: TransferOptions) -> None:
        self._url = url.rstrip("/")
        self._system = system
        self._base = base.rstrip("/")
        self._options = options

    @property
    def place(self) -> str:
        return self._url

    def path_of(self, name: str) -> str:
        return f"{self._url}/{name}"

    # -- looking -------------------------------------------------------------------------------------------------------
    def list(self) -> tuple[Listed, ...]:
        found: list[Listed] = []

        def read() -> None:
            found.clear()
            for name in self._entries(self._base):
                parsed = FolderName.parse(name)
                listed = None if parsed is None or parsed.is_partial else self._listed(name, parsed)
                if listed is not None:
                    found.append(listed)

        self._retried(f"cannot list the checkpoints in {self._url}", read)
        return tuple(sorted(found, key=lambda c: c.order, reverse=True))

    def is_complete(self, name: str) -> bool:
        parsed = FolderName.parse(name)
        if parsed is None:
            return False
        listed: Listed | None = None

        def read() -> None:
            nonlocal listed
            listed = self._listed(name, parsed)

        self._retried(f"cannot look at {self.path_of(name)}", read)
        return listed is not None and listed.is_complete

    def _entries(self, folder: str) -> dict[str, int]:
        """Names and sizes; none when there is no such folder."""
        self._system.invalidate_cache(folder)
        try:
            entries = self._system.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {PurePosixPath(str(e["name"])).name: int(e.get("size") or 0) for e in entries}

    def _listed(self, name: str, parsed: FolderName) -> Listed | None:
        """None when there is no such folder, or nothing in it."""
        sizes = self._entries(self._folder(name))
        if not sizes:
            return None
        path = Path(self._folder(name))
        is_superseded = _SUPERSEDED_NAME in sizes
        if MANIFEST_NAME not in sizes:
            if UNFINISHED_NAME in sizes:
                partial = FolderName(parsed.step, parsed.attempt or 0, is_partial=True)
                return Listed(path, partial, None, "not all of it has arrived", is_superseded=is_superseded)
            # Ours always has one of the two.
            return Listed(path, parsed, None, f"{MANIFEST_NAME} is missing", True, is_superseded)
        try:
            manifest = self._manifest(name)
        except FileNotFoundError:
            return None  # removed meanwhile
        except ManifestError as e:
            return Listed(path, parsed, None, str(e), is_superseded=is_superseded)
        problem = _compare(manifest, parsed, sizes)
        return Listed(path, parsed, manifest, problem, is_superseded=is_superseded)

    def _manifest(self, name: str) -> Manifest:
        path = f"{self._folder(name)}/{MANIFEST_NAME}"
        if int(self._system.info(path)["size"]) > _MOST_MANIFEST_BYTES:
            raise ManifestError(f"{path} has more than {_MOST_MANIFEST_BYTES:,} bytes; it is not read")
        return commit.open_manifest(bytes(self._system.cat_file(path)), f"{self.path_of(name)}/{MANIFEST_NAME}")

    def _folder(self, name: str) -> str:
        return f"{self._base}/{name}"

    # -- moving --------------------------------------------------------------------------------------------------------
    def put(self, folder: Path, progress: Progress | None = None) -> Moved:
        started_s = time.monotonic()
        what = f"cannot copy {folder} to {self._url}"
        with _held(folder, what):
            manifest = _manifest_of(folder)
            name, was_there = self._free_name(manifest, what)
            tries = 1
            if not was_there:
                self._retried(what, lambda: self._begin(name))
                target = _StoreFolder(self._system, self._folder(name))
                tries = _copy(LocalFolder(folder), target, manifest, what, self._options, progress)
                content = commit.seal_manifest(manifest)
                self._retried(what, lambda: self._finish(name, content))
        elapsed_s = time.monotonic() - started_s
        return Moved(name, self.path_of(name), manifest.size_bytes, elapsed_s, was_there, tries)

    def _free_name(self, manifest: Manifest, what: str) -> tuple[str, bool]:
        """Under which name, and whether the same checkpoint is there already under it."""
        plain, own = str(FolderName(manifest.step)), str(FolderName(manifest.step, manifest.attempt))
        seen: dict[str, Listed | None] = {}

        def read() -> None:
            for name in (plain, own):
                parsed = FolderName.parse(name)
                assert parsed is not None
                seen[name] = self._listed(name, parsed)

        self._retried(what, read)
        for name, listed in seen.items():
            there = None if listed is None else listed.manifest
            if listed is not None and listed.is_complete and there is not None and _is_same(there, manifest):
                return name, True
        for name in (plain, own):
            there_now = seen[name]
            if there_now is None or there_now.name.is_partial:
                return name, False
        taken = seen[own]
        if taken is not None and taken.is_unsure:
            raise TierError(f"{what}: {self.path_of(own)} is there already, and another program's; move it away")
        return own, False  # the same step once more in the same attempt: the newer one stands for it

    def _begin(self, name: str) -> None:
        """Empties the name, which interrupted leaves no checkpoint of old and new files."""
        self._empty(name)
        with contextlib.suppress(FileExistsError):
            self._system.makedirs(self._folder(name), exist_ok=True)
        self._mark(name)

    def _mark(self, name: str) -> None:
        self._system.pipe_file(f"{self._folder(name)}/{UNFINISHED_NAME}", json.dumps({"by": "steadyrun"}).encode())

    def _finish(self, name: str, content: bytes) -> None:
        path = f"{self._folder(name)}/{MANIFEST_NAME}"
        self._system.pipe_file(path, content)
        self._system.invalidate_cache(self._folder(name))
        if bytes(self._system.cat_file(path)) != content:
            raise TransferError(f"{MANIFEST_NAME}, read back, is not what was sent")
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._folder(name)}/{UNFINISHED_NAME}")

    def get(self, name: str, into: Path, progress: Progress | None = None) -> Path:
        what = f"cannot copy {self.path_of(name)} to {into}"
        manifests: list[Manifest] = []
        try:
            self._retried(what, lambda: manifests.append(self._manifest(name)))
        except TierError as e:
            if isinstance(e.__cause__, TransferError) and isinstance(e.__cause__.__cause__, ManifestError):
                raise TierError(str(e), is_damage=True, file=MANIFEST_NAME) from e
            raise
        manifest = manifests[-1]
        parsed = FolderName.parse(name)
        if parsed is not None and parsed.step != manifest.step:
            raise TierError(f"{what}: its manifest is of step {manifest.step}", is_damage=True, file=MANIFEST_NAME)
        source = _StoreFolder(self._system, self._folder(name))
        folder, _, _ = _receive(source, manifest, into, what, self._options, progress)
        return folder

    def remove(self, name: str) -> None:
        if FolderName.parse(name) is None:
            raise TierError(f"cannot remove {self.path_of(name)}: that is no name of a checkpoint")
        self._retried(f"cannot remove {self.path_of(name)}", lambda: self._empty(name))

    def _empty(self, name: str) -> None:
        """The manifest goes first, and the mark that this is ours last."""
        folder = self._folder(name)
        names = self._entries(folder)
        if not names:
            return
        self._mark(name)
        first = [n for n in (MANIFEST_NAME,) if n in names]
        rest = [n for n in names if n not in (MANIFEST_NAME, UNFINISHED_NAME)]
        for group in (first, rest):
            for each in group:
                with contextlib.suppress(FileNotFoundError):
                    self._system.rm_file(f"{folder}/{each}")
        with contextlib.suppress(FileNotFoundError):
            self._system.rm(folder, recursive=True)
        self._system.invalidate_cache(folder)

    def _retried(self, what: str, call: Callable[[], None]) -> None:
        try:
            retried(what, call, self._options.tries)
        except TransferError as e:
            raise TierError(f"{e}; {_ADVICE}") from e


def _compare(manifest: Manifest, name: FolderName, sizes: Mapping[str, int]) -> str | None:
    if manifest.step != name.step:
        return f"its manifest is of step {manifest.step}"
    if not manifest.complete:
        return "its manifest says that it is not complete"
    for record in manifest.files:
        if record.name not in sizes:
            return f"{record.name} is missing"
        if sizes[record.name] != record.size_bytes:
            return f"{record.name} has {sizes[record.name]:,} bytes; {record.size_bytes:,} were committed"
    return None
