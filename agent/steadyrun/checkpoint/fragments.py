"""The checksums that a folder of ours carries: which xxh3 each stored shard and object must have.

A chain: ``manifest.json`` has the digests of ``.metadata`` and of each rank's fragment, the fragment those of every
shard and object in that rank's files. Only the fragments that are asked for are read.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Final

from steadyrun.checkpoint.checksums import xxh3
from steadyrun.checkpoint.commit import open_manifest
from steadyrun.checkpoint.manifest import (
    MANIFEST_NAME,
    MANIFEST_SCHEMA,
    FileRecord,
    Fragment,
    Manifest,
    ManifestError,
    ObjectRecord,
    ShardRecord,
    fragment_name,
    objects_name,
)

__all__ = ["Fragments", "is_meant_for_us", "open_fragments"]

_FRAGMENT: Final = re.compile(r"__\d+\.shards\.json")
_HEAD_BYTES: Final = 256
_DATA_FILE: Final = re.compile(r"__(\d+)_[01]\.distcp")


class Fragments:
    """The checksums of one folder. May be asked by several threads."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._files = {record.name: record for record in manifest.files}
        self._lock = threading.Lock()
        self._shards: dict[int, dict[tuple[str, tuple[int, ...]], ShardRecord]] = {}
        self._objects: dict[int, dict[str, ObjectRecord]] = {}

    def file(self, name: str) -> FileRecord | None:
        """What the manifest says of a file; None when it says nothing."""
        return self._files.get(name)

    def covers(self, file: str) -> bool:
        """Whether there is a fragment for this data file."""
        rank = _rank_of(file)
        return rank is not None and fragment_name(rank) in self._files

    def shard(self, file: str, key: str, offsets: tuple[int, ...]) -> ShardRecord | None:
        """None: *file* holds no such shard. Raises ManifestError when the fragment is missing or damaged."""
        rank = self._load(file)
        return None if rank is None else self._shards[rank].get((key, offsets))

    def object(self, file: str, key: str) -> ObjectRecord | None:
        """None: *file* holds no such object. Raises ManifestError when the fragment is missing or damaged."""
        rank = self._load(file)
        return None if rank is None else self._objects[rank].get(key)

    def objects(self, rank: int) -> tuple[str, tuple[ObjectRecord, ...]]:
        """The file with a rank's objects, and what is in it. Raises ManifestError."""
        name = objects_name(rank)
        return name, () if self._load(name) is None else tuple(self._objects[rank].values())

    def check_small_file(self, name: str, data: bytes) -> None:
        """Compare a file's whole content with what the manifest says of it.

        Raises:
            ManifestError: it is not in the manifest, or not the file that was written.
        """
        record = self._files.get(name)
        if record is None:
            raise ManifestError(f"{name} is not in {MANIFEST_NAME}")
        if len(data) != record.size_bytes:
            raise ManifestError(f"{name} has {len(data):,} bytes, by {MANIFEST_NAME} it has {record.size_bytes:,}")
        if record.xxh3 and (found := xxh3(data)) != record.xxh3:
            raise ManifestError(f"{name} is damaged: its xxh3 is {found}, by {MANIFEST_NAME} it is {record.xxh3}")

    def _load(self, file: str) -> int | None:
        rank = _rank_of(file)
        if rank is None:
            return None
        with self._lock:
            if rank not in self._shards:
                name = fragment_name(rank)
                try:
                    data = (self.folder / name).read_bytes()
                except OSError as e:
                    raise ManifestError(f"{name} cannot be read: {e.strerror or e}") from e
                self.check_small_file(name, data)
                fragment = Fragment.from_json(data, name)
                self._objects[rank] = {o.key: o for o in fragment.objects}
                self._shards[rank] = {(s.key, s.offsets): s for s in fragment.shards}
        return rank


def _rank_of(file: str) -> int | None:
    found = _DATA_FILE.fullmatch(file)
    return int(found[1]) if found else None


def open_fragments(folder: Path) -> Fragments | None:
    """The checksums of *folder*; None when it has no manifest of ours.

    Raises:
        ManifestError: it has one, and that cannot be read.
    """
    try:
        data = (folder / MANIFEST_NAME).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as e:
        raise ManifestError(f"{MANIFEST_NAME} cannot be read: {e.strerror or e}") from e
    try:
        return Fragments(folder, open_manifest(data))
    except ManifestError:
        if is_meant_for_us(data) or any(_FRAGMENT.fullmatch(name) for name in os.listdir(folder)):
            raise
        return None


def is_meant_for_us(data: bytes) -> bool:
    """Whether a ``manifest.json`` that cannot be read is a damaged one of ours; other programs use that name, too."""
    return MANIFEST_SCHEMA.encode() in data[:_HEAD_BYTES] or b'"xxh3": "' in data[-_HEAD_BYTES:]
