"""Makes a written folder a checkpoint, in one step that a crash cannot halve; and takes it away again in one.

Order of a commit: all files of all ranks are durable already; ``.metadata``, then the manifest (each written beside,
synced, renamed), the folder synced, the folder renamed to its final name, the root synced. ``latest.json`` follows and
is only a hint for people: what counts is the newest folder with a manifest.

The manifest carries a checksum of its own as its last member, ``xxh3``; ``read_manifest`` refuses it when that is not
right.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from steadyrun.checkpoint.checksums import xxh3
from steadyrun.checkpoint.durable import sync_folder, write_whole
from steadyrun.checkpoint.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    FileRecord,
    FolderName,
    Manifest,
    ManifestError,
    Verified,
)
from steadyrun.core.errors import SteadyrunError

__all__ = [
    "LATEST_NAME",
    "TRASH_PREFIX",
    "CommitError",
    "abandon",
    "begin",
    "commit",
    "is_complete",
    "mark_verified",
    "open_manifest",
    "read_manifest",
    "remove",
    "seal_manifest",
    "sweep_trash",
]

LATEST_NAME: Final = "latest.json"
TRASH_PREFIX: Final = ".trash-"
_SEAL: Final = re.compile(rb',\n "xxh3": "([0-9a-f]{32})"\n\}\n')
_MOST_MANIFEST_BYTES: Final = 256 << 20


class CommitError(SteadyrunError):
    """A folder could not become a checkpoint; it is as it was before."""


# -- the manifest as a file ------------------------------------------------------------------------------------------
def seal_manifest(manifest: Manifest) -> bytes:
    """The content of ``manifest.json``, with a checksum over all that stands before it."""
    body = manifest.to_json().encode().rstrip()
    assert body.endswith(b"}")
    body = body[:-1].rstrip()
    return body + f',\n "xxh3": "{xxh3(body)}"\n}}\n'.encode()


def open_manifest(data: bytes, name: str = MANIFEST_NAME) -> Manifest:
    """The manifest in *data*.

    Raises:
        ManifestError: it is cut off or damaged; the text begins with *name*.
    """
    found = None
    at = data.rfind(b',\n "xxh3"')
    if at >= 0:
        found = _SEAL.fullmatch(data, at)
    if found is None:
        raise ManifestError(f"{name} is damaged: its checksum is not at its end")
    if xxh3(data[:at]) != found[1].decode():
        raise ManifestError(f"{name} is damaged: its bytes do not have the checksum that stands at its end")
    return Manifest.from_json(data, name)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, after a look at the folder: every file is there in full length, and ``.metadata``
    has the content that was committed. Tensors, objects and their checksums are not read.

    Raises:
        ManifestError: there is none, or something of this is not so; the text names the file.
    """
    file = folder / MANIFEST_NAME
    try:
        if file.stat().st_size > _MOST_MANIFEST_BYTES:
            raise ManifestError(f"{file} has more than {_MOST_MANIFEST_BYTES:,} bytes; it is not read")
        data = file.read_bytes()
    except FileNotFoundError as e:
        raise ManifestError(f"{folder} is not a complete checkpoint of ours: it has no {MANIFEST_NAME}") from e
    except OSError as e:
        raise ManifestError(f"cannot read {file}: {e.strerror or e}") from e
    manifest = open_manifest(data, str(file))
    named = FolderName.parse(folder.name)
    if named is not None and named.step != manifest.step:
        raise ManifestError(f"{file} is that of step {manifest.step}, in the folder of step {named.step}")
    for record in manifest.files:
        _check_file(folder, record)
    return manifest


def _check_file(folder: Path, record: FileRecord) -> None:
    if record.name != os.path.basename(record.name) or record.name in ("", ".", ".."):
        raise ManifestError(f"{folder / MANIFEST_NAME} names a file outside of its folder: {record.name!r}")
    file = folder / record.name
    try:
        size_bytes = file.stat().st_size
        if size_bytes != record.size_bytes:
            raise ManifestError(f"{file} has {size_bytes:,} bytes; {record.size_bytes:,} were committed")
        if record.name == METADATA_NAME and record.xxh3 and xxh3(file.read_bytes()) != record.xxh3:
            raise ManifestError(f"{file} is damaged: its bytes do not have the checksum in the manifest")
    except FileNotFoundError as e:
        raise ManifestError(f"{file} is missing") from e
    except OSError as e:
        raise ManifestError(f"cannot look at {file}: {e.strerror or e}") from e


def is_complete(folder: Path) -> bool:
    """Whether *folder* has its final name, a valid manifest that says so, and all files in full length."""
    named = FolderName.parse(folder.name)
    if named is not None and named.is_partial:
        return False
    try:
        return read_manifest(folder).complete
    except ManifestError:
        return False


def mark_verified(folder: Path, verified: Verified, details: Mapping[str, Any] | None = None) -> None:
    """Notes in the manifest that the bytes are right; the file is replaced at once, or stays as it was.

    Args:
        details: what is added to those of the manifest.

    Raises:
        ManifestError: the manifest is damaged.
        OSError: it cannot be replaced.
    """
    file = folder / MANIFEST_NAME
    manifest = open_manifest(file.read_bytes(), str(file))
    told = {**manifest.details, **(details or {})}
    write_whole(file, seal_manifest(dataclasses.replace(manifest, verified=verified, details=told)))


# -- the life of a folder --------------------------------------------------------------------------------------------
def begin(root: Path, step: int, attempt: int, must_exist: bool = False) -> Path:
    """A new, empty folder for the files of a save; one that an earlier try of the same save left is removed.

    Args:
        must_exist: *root* is not made: it was there before, and is gone when its file system is not mounted any more.

    Raises:
        OSError: it cannot be made.
    """
    if not must_exist:
        root.mkdir(parents=True, exist_ok=True)
    partial = root / str(FolderName(step, attempt, is_partial=True))
    try:
        partial.mkdir()
    except FileExistsError:
        remove(partial)
        partial.mkdir()
    sync_folder(root)
    return partial


def commit(root: Path, partial: Path, manifest: Manifest, metadata: bytes) -> Path:
    """Make *partial* a checkpoint; returns its final path.

    Args:
        manifest: its *files* are those of all ranks, already durable; ``.metadata`` is added here.

    Raises:
        CommitError: a file of the manifest is missing or has another length, or the disk refuses; the partial folder
            stays, and so does every earlier checkpoint.
    """
    try:
        for record in manifest.files:
            _check_file(partial, record)
        own = FileRecord(METADATA_NAME, len(metadata), xxh3(metadata))
        files = (*(f for f in manifest.files if f.name != METADATA_NAME), own)
        write_whole(partial / METADATA_NAME, metadata)
        write_whole(partial / MANIFEST_NAME, seal_manifest(dataclasses.replace(manifest, files=files)))
        folder = _rename_to_final(root, partial, manifest)
        sync_folder(root)
    except ManifestError as e:
        raise CommitError(f"cannot commit the checkpoint of step {manifest.step}: {e}") from e
    except OSError as e:
        raise CommitError(
            f"cannot commit the checkpoint of step {manifest.step} in {root}: {e.strerror or e}; "
            "earlier checkpoints are as they were, the next save tries again"
        ) from e
    with contextlib.suppress(OSError):  # only a hint: the checkpoint is durable without it
        latest = {"step": manifest.step, "folder": folder.name}
        write_whole(root / LATEST_NAME, json.dumps(latest).encode() + b"\n")
    return folder


def _rename_to_final(root: Path, partial: Path, manifest: Manifest) -> Path:
    plain = root / str(FolderName(manifest.step))
    if _rename(partial, plain):
        return plain
    # The step was saved before: by an earlier attempt, or before a rollback. Both stay.
    own = root / str(FolderName(manifest.step, manifest.attempt))
    if not _rename(partial, own):
        os.rename(own, _trash_path(own))  # the same step once more in the same attempt: the newer one stands for it
        os.rename(partial, own)
    return own


def _rename(source: Path, target: Path) -> bool:
    """False when something that is not empty has that name."""
    try:
        os.rename(source, target)
    except OSError as e:
        if e.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def abandon(partial: Path) -> None:
    """Take a folder away that will not become a checkpoint; never raises, what cannot be removed stays behind."""
    with contextlib.suppress(OSError):
        remove(partial)


def remove(folder: Path) -> None:
    """Take a folder away: renamed first, so that none is ever seen half deleted; an open file stays readable.

    Raises:
        OSError: it cannot be renamed. What cannot be deleted then is left to ``sweep_trash``.
    """
    trash = _trash_path(folder)
    try:
        os.rename(folder, trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash, ignore_errors=True)


def sweep_trash(root: Path) -> None:
    """Delete what ``remove`` left behind when it was interrupted."""
    with contextlib.suppress(OSError), os.scandir(root) as entries:
        found = [e.path for e in entries if e.name.startswith(TRASH_PREFIX)]
        for path in found:
            shutil.rmtree(path, ignore_errors=True)


def _trash_path(folder: Path) -> Path:
    return folder.with_name(f"{TRASH_PREFIX}{folder.name}-{uuid.uuid4().hex[:8]}")
