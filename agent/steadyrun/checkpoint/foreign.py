"""Commits a checkpoint that a framework has written by itself: synced, checksummed, complete or not, and retained.

``torch.save`` by each rank, Megatron, DeepSpeed, Hugging Face and others leave a folder of files of which nobody can
tell whether all of it is there, on the device, and still as it was. ``commit`` makes every file durable, notes its size
and xxh3-128 in a ``manifest.json``, written last, and removes older ones by the usual rules. No collective is needed:
each rank leaves a note that its files are written, and whoever finds all notes writes the manifest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steadyrun.checkpoint.catalog import TRASH_PREFIX, Listed
from steadyrun.checkpoint.checksums import Xxh3
from steadyrun.checkpoint.commit import open_manifest, remove, seal_manifest
from steadyrun.checkpoint.contents import UnusableCheckpointError
from steadyrun.checkpoint.durable import sync_folder, write_whole
from steadyrun.checkpoint.kinds import Found, find_checkpoints, step_of
from steadyrun.checkpoint.manifest import (
    FOREIGN,
    MANIFEST_NAME,
    FileRecord,
    FolderName,
    Manifest,
    ManifestError,
)
from steadyrun.checkpoint.retention import apply, to_remove
from steadyrun.core.errors import ConfigError, SteadyrunError
from steadyrun.core.versions import installed_version

__all__ = ["Committed", "commit", "committed_in", "missing_ranks", "pointed_in"]

NOTE_SCHEMA: Final = "steadyrun.checkpoint.files/1"
LOCK_NAME: Final = ".steadyrun-commit.lock"
_NOTE: Final = re.compile(r"__(\d+)\.files\.json")
_TEMPORARY: Final = re.compile(r"\..*\.\d+\.\d+\.tmp")
_PIECE_BYTES: Final = 8 << 20
_MOST_THREADS: Final = 4


class _CannotCommitError(SteadyrunError):
    """Why this folder could not be committed; becomes ``Committed.problem``."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What a call of ``commit`` did.

    Attributes:
        manifest: what is now beside the files; None while it is not complete.
        waits_for: ranks whose calls are still missing; the last of them completes it.
        removed: older checkpoints that went by *keep* and *keep_every*.
        problem: why it could not be committed; the files are as the framework left them.
    """

    path: Path
    step: int
    manifest: Manifest | None = None
    waits_for: tuple[int, ...] = ()
    removed: tuple[Path, ...] = ()
    problem: str | None = None
    elapsed_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        return self.manifest is not None


@dataclass(frozen=True, slots=True)
class _Save:
    """Which save a note belongs to: one of another attempt or step does not count."""

    run_id: str
    attempt: int
    step: int
    world_size: int


def commit(
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    files: Iterable[str | os.PathLike[str]] | None = None,
    alone: bool = False,
    keep: int | None = None,
    keep_every: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Committed:
    """Make the checkpoint in *folder* durable and checkable, once the framework's own save has returned.

    Call it on all ranks, or with *alone* on one of them after all others are done with their files (behind the barrier
    at the end of the framework's save). Nothing is waited for: the call that is the last to come completes it.

    Args:
        folder: the checkpoint itself, or the folder above it where a pointer file (``latest``,
            ``latest_checkpointed_iteration.txt``) names it.
        step: of the checkpoint; default: the last number in the folder's name.
        files: those that this rank has written, relative to *folder* or absolute; it checksums them. Default: none
            in particular; whoever completes the checkpoint checksums what no rank has named.
        alone: this call speaks for all ranks.
        keep: complete checkpoints to keep beside it, 2 at least; None: remove nothing.
        keep_every: steps of which checkpoints are kept for ever.
        env: where the rank and the run are found; default: the environment.

    Returns:
        What was done. A disk that is full or fails is a *problem* in it and a line on standard error, not an
        exception: training goes on.

    Raises:
        ConfigError: *folder* is no folder, or *step* is needed.
    """
    started_s = time.monotonic()
    target = _target(Path(folder))
    environment = os.environ if env is None else env
    save, rank = _save(target, step, alone, environment), int(environment.get("RANK") or 0)
    own = None if files is None else [_relative(target, file) for file in files]
    try:
        manifest, waits_for = _commit(target, save, rank, own, alone)
        removed = _retain(target, keep, keep_every) if manifest is not None and keep is not None else ()
    except (_CannotCommitError, ManifestError) as e:
        problem = f"cannot commit {target}: {e}"
    except OSError as e:
        at = f"{e.filename}: " if e.filename else ""
        problem = f"cannot commit {target}: {at}{e.strerror or e}; its files are as they were written"
    else:
        return Committed(target, save.step, manifest, waits_for, removed, None, time.monotonic() - started_s)
    sys.stderr.write(f"steadyrun: {problem}\n")
    return Committed(target, save.step, problem=problem, elapsed_s=time.monotonic() - started_s)


# -- which folder, which save ----------------------------------------------------------------------------------------
def _target(folder: Path) -> Path:
    """The folder itself, or the one that a pointer in it names where it is no checkpoint itself."""
    folder = Path(os.path.abspath(folder))
    if not folder.is_dir():
        raise ConfigError(f"cannot commit {folder}: it is no folder; give the one that the framework has saved into")
    try:
        found = find_checkpoints(folder).checkpoints
    except UnusableCheckpointError:
        return folder  # of no known kind; its files can be committed all the same
    if any(f.path == folder for f in found):
        return folder
    pointed = [f for f in found if f.is_latest]
    if len(pointed) == 1:
        return pointed[0].path
    names = ", ".join(f.path.name for f in found[-3:])
    raise ConfigError(f"cannot commit {folder}: it holds {len(found)} checkpoints ({names}); give one of them")


def _save(target: Path, step: int | None, alone: bool, env: Mapping[str, str]) -> _Save:
    known = step if step is not None else step_of(target)
    if known is None:
        raise ConfigError(f"cannot commit {target}: its name has no number to take the step from; give step=")
    world_size = int(env.get("WORLD_SIZE") or 1)
    attempt = int(env.get("TORCHELASTIC_RESTART_COUNT") or 0)
    return _Save(env.get("TORCHELASTIC_RUN_ID") or "", attempt, known, world_size)


def _relative(target: Path, file: str | os.PathLike[str]) -> str:
    path = Path(os.path.abspath(target / file))
    if not path.is_relative_to(target):
        raise ConfigError(f"cannot commit {path}: it is not in {target}")
    return str(path.relative_to(target))


# -- committing ------------------------------------------------------------------------------------------------------
def _commit(
    target: Path, save: _Save, rank: int, own: Sequence[str] | None, alone: bool
) -> tuple[Manifest | None, tuple[int, ...]]:
    there = _own_manifest(target)
    if there is not None:
        if _is_of(there, save, target):
            return there, ()
        (target / MANIFEST_NAME).unlink(missing_ok=True)  # of what was in the folder before this save
    if alone or save.world_size == 1:
        return _complete(target, save, {}), ()
    _write_note(target, save, rank, _records(target, own or ()))
    notes = _notes(target, save)
    missing = tuple(r for r in range(save.world_size) if r not in notes)
    if missing:
        # whoever completes it removes the notes, perhaps just now
        there = _own_manifest(target)
        return (None, missing) if there is None else (there, ())
    with _lock(target) as is_mine:
        if not is_mine:  # another rank has found all notes too, and completes it
            return None, ()
        return _own_manifest(target) or _complete(target, save, notes), ()


def _complete(target: Path, save: _Save, notes: Mapping[int, Mapping[str, _Record]]) -> Manifest:
    """Write the manifest over all files: those in the notes as noted, the others read here."""
    records: dict[str, _Record] = {}
    for rank, noted in notes.items():
        for name, record in noted.items():
            if records.setdefault(name, record) != record:
                raise _CannotCommitError(f"rank {rank} and another rank have both written {name}, and not the same")
    names = list(_names(target))
    records.update((r.name, r) for r in _records(target, [n for n in names if n not in records]))
    if not records:
        raise _CannotCommitError("there is no file in it")
    _sync_folders(target, records)
    manifest = Manifest(
        step=save.step,
        attempt=save.attempt,
        run_id=save.run_id,
        world_size=save.world_size,
        created_unix_s=time.time(),
        torch=installed_version("torch"),
        steadyrun=installed_version("steadyrun"),
        files=tuple(FileRecord(r.name, r.size_bytes, r.xxh3) for _, r in sorted(records.items())),
        details={FOREIGN: _kind(target), "written_ns": max(r.written_ns for r in records.values())},
    )
    write_whole(target / MANIFEST_NAME, seal_manifest(manifest))
    for name in os.listdir(target):
        if _NOTE.fullmatch(name):
            (target / name).unlink(missing_ok=True)
    return manifest


def _own_manifest(target: Path) -> Manifest | None:
    """Raises _CannotCommitError when the name is taken by something else."""
    try:
        manifest = open_manifest((target / MANIFEST_NAME).read_bytes())
    except FileNotFoundError:
        return None
    except ManifestError as e:
        raise _CannotCommitError(
            f"there is a {MANIFEST_NAME} that steadyrun has not written ({e}); move it away"
        ) from None
    if not manifest.is_foreign:
        raise _CannotCommitError("steadyrun itself has written this checkpoint; it is complete as it is")
    return manifest


def _is_of(manifest: Manifest, save: _Save, target: Path) -> bool:
    """Whether the manifest is of this save, and no file was written since."""
    if (manifest.run_id, manifest.attempt, manifest.step) != (save.run_id, save.attempt, save.step):
        return False
    names = list(_names(target))
    if sorted(names) != sorted(f.name for f in manifest.files):
        return False
    newest_ns = max((os.stat(target / name).st_mtime_ns for name in names), default=0)
    return newest_ns == manifest.details.get("written_ns")


def _kind(target: Path) -> str:
    try:
        found = find_checkpoints(target).checkpoints
    except UnusableCheckpointError:
        return "files"
    return next((f.kind.value for f in found if f.path == target), "files")


def _names(target: Path) -> Iterator[str]:
    """All regular files, relative; links are not followed, and what we keep there ourselves is left out."""
    for folder, below, files in os.walk(target, onerror=_raise):
        below[:] = sorted(name for name in below if not name.startswith(TRASH_PREFIX))
        base = Path(folder)
        for name in sorted(files):
            is_ours = base == target and (name in (MANIFEST_NAME, LOCK_NAME) or _NOTE.fullmatch(name))
            if not is_ours and not _TEMPORARY.fullmatch(name) and not (base / name).is_symlink():
                yield str((base / name).relative_to(target))


def _raise(error: OSError) -> None:
    raise error


def _sync_folders(target: Path, names: Collection[str]) -> None:
    """Folders whose entries must be durable, and pointer files beside the checkpoint."""
    for folder in sorted({(target / name).parent for name in names} | {target}, reverse=True):
        sync_folder(folder)
    for pointer in ("latest", "latest_checkpointed_iteration.txt"):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            _sync_file(target.parent / pointer)
    sync_folder(target.parent)


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# -- files -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Record:
    name: str
    size_bytes: int
    xxh3: str
    written_ns: int


def _records(target: Path, names: Sequence[str]) -> list[_Record]:
    """Each file made durable and read; several at once, since both syncing and hashing wait outside of Python."""
    threads = min(len(names), len(os.sched_getaffinity(0)), _MOST_THREADS)
    if threads < 2:
        return [_record(target, name) for name in names]
    with ThreadPoolExecutor(threads, thread_name_prefix="commit") as pool:
        return list(pool.map(lambda name: _record(target, name), names))


def _record(target: Path, name: str) -> _Record:
    digest = Xxh3()
    fd = os.open(target / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
        before = os.fstat(fd)
        buffer = memoryview(bytearray(min(_PIECE_BYTES, max(before.st_size, 1))))
        at = 0
        while at < before.st_size and (count := os.preadv(fd, [buffer], at)):
            digest.update(buffer[:count])
            at += count
        after = os.fstat(fd)
    finally:
        os.close(fd)
    if (before.st_size, before.st_mtime_ns, at) != (after.st_size, after.st_mtime_ns, after.st_size):
        raise _CannotCommitError(f"{name} was written to while it was read; call commit when the save is done")
    return _Record(name, at, digest.digest(), after.st_mtime_ns)


# -- notes of ranks --------------------------------------------------------------------------------------------------
def _write_note(target: Path, save: _Save, rank: int, records: Sequence[_Record]) -> None:
    note = {
        "schema": NOTE_SCHEMA,
        "save": [save.run_id, save.attempt, save.step, save.world_size],
        "files": [[r.name, r.size_bytes, r.xxh3, r.written_ns] for r in records],
    }
    write_whole(target / f"__{rank}.files.json", json.dumps(note, separators=(",", ":")).encode())


def _notes(target: Path, save: _Save | None) -> dict[int, dict[str, _Record]]:
    """By rank; those of another save, and those whose files were written to since, do not count."""
    notes = {}
    for name in os.listdir(target):
        found = _NOTE.fullmatch(name)
        if found is None:
            continue
        with contextlib.suppress(FileNotFoundError, ValueError, TypeError, KeyError):
            note = json.loads((target / name).read_bytes())
            records = {str(n): _Record(str(n), int(s), str(x), int(w)) for n, s, x, w in note["files"]}
            if note["schema"] != NOTE_SCHEMA or (save is not None and _Save(*note["save"]) != save):
                continue
            if all(_is_as_noted(target, r) for r in records.values()):
                notes[int(found[1])] = records
    return notes


def _is_as_noted(target: Path, record: _Record) -> bool:
    stat = os.stat(target / record.name)
    return (stat.st_size, stat.st_mtime_ns) == (record.size_bytes, record.written_ns)


def missing_ranks(folder: Path) -> tuple[int, ...] | None:
    """Ranks whose call of ``commit`` for this folder is missing; None when nobody has called it, or it is complete."""
    try:
        names = [name for name in os.listdir(folder) if _NOTE.fullmatch(name)]
        if not names or (folder / MANIFEST_NAME).exists():
            return None
        notes = [json.loads((folder / name).read_bytes()) for name in names]
        save = _Save(*max(note["save"] for note in notes))
        there = _notes(folder, save)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return tuple(rank for rank in range(save.world_size) if rank not in there)


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[bool]:
    """Whether the lock of this folder is ours. The kernel's: it ends with its process."""
    path = target / LOCK_NAME
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        is_mine = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_mine = False
        except OSError as e:
            # without locks two ranks may do the same work at the same time, with the same result
            if e.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
                raise
        yield is_mine
        if is_mine:
            path.unlink(missing_ok=True)
    finally:
        os.close(fd)


# -- afterwards ------------------------------------------------------------------------------------------------------
def committed_in(root: Path) -> tuple[Listed, ...]:
    """The folders in *root* that ``commit`` has committed, newest first; other folders are not ours to judge."""
    listed = []
    try:
        names = os.listdir(root)
    except OSError:
        return ()
    for name in names:
        try:
            manifest = open_manifest((root / name / MANIFEST_NAME).read_bytes())
        except (OSError, ManifestError):
            continue
        if manifest.is_foreign and not name.startswith(TRASH_PREFIX):
            problem = _problem(root / name, manifest)
            listed.append(Listed(root / name, FolderName(manifest.step), manifest, problem))
    return tuple(sorted(listed, key=lambda c: (*c.order, c.path.name), reverse=True))


def _problem(folder: Path, manifest: Manifest) -> str | None:
    for file in manifest.files:
        try:
            size_bytes = os.stat(folder / file.name).st_size
        except OSError as e:
            return f"{file.name}: {e.strerror or e}"
        if size_bytes != file.size_bytes:
            return f"{file.name} has {size_bytes:,} bytes instead of {file.size_bytes:,}"
    return None


def pointed_in(root: Path) -> tuple[Path, ...]:
    """The checkpoint in *root* that its pointer file names, which the framework will resume from."""
    try:
        found: Sequence[Found] = find_checkpoints(root).checkpoints
    except UnusableCheckpointError:
        return ()
    return tuple(f.path for f in found if f.is_latest)


def _retain(target: Path, keep: int, keep_every: int | None) -> tuple[Path, ...]:
    root = target.parent
    pinned = pointed_in(root)
    removals = to_remove(committed_in(root), keep, keep_every, in_use=(target,), pinned=pinned)
    pruned = apply(removals, remove)
    for _, why in pruned.failed:
        sys.stderr.write(f"steadyrun: {why}\n")
    return pruned.removed
