"""What steadyrun writes beside the DCP files of a checkpoint: what is in it, checksums, and that it is complete.

Files of a checkpoint folder::

    .metadata             DCP's own; with it any DCP tool reads the folder
    __{rank}_0.distcp     that rank's tensors, each a torch.save archive whose payload begins on a page boundary
    __{rank}_1.distcp     that rank's objects, one after the other
    __{rank}.shards.json  a ``Fragment``: every byte range of these two files with its xxh3-128
    manifest.json         a ``Manifest``: written last; a folder without it is not complete

A folder is written as ``step-000000012.a3.partial`` (attempt 3) and renamed to ``step-000000012`` once its manifest is
durable, or to ``step-000000012.a3`` where that exists. The rename is what a reader sees; on an object store, which
cannot rename, the manifest is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from steadyrun.core.errors import SteadyrunError

__all__ = [
    "AGREED_ROOTS",
    "FOREIGN",
    "FRAGMENT_SCHEMA",
    "MANIFEST_NAME",
    "MANIFEST_SCHEMA",
    "METADATA_NAME",
    "PARTIAL_SUFFIX",
    "FileRecord",
    "FolderName",
    "Fragment",
    "Manifest",
    "ManifestError",
    "ObjectRecord",
    "ShardRecord",
    "Verified",
    "fragment_name",
    "objects_name",
    "tensors_name",
]

MANIFEST_SCHEMA: Final = "steadyrun.checkpoint/1"
FRAGMENT_SCHEMA: Final = "steadyrun.checkpoint.shards/1"
MANIFEST_NAME: Final = "manifest.json"
METADATA_NAME: Final = ".metadata"
PARTIAL_SUFFIX: Final = ".partial"
AGREED_ROOTS: Final = "agreed_roots"  # in the details: fingerprints (hex) of tensors that all ranks agreed on, by name
FOREIGN: Final = "foreign"  # in the details of a manifest that ``watch.commit`` made: the kind of folder
_FOLDER: Final = re.compile(r"step-(\d{9,})(?:\.a(\d+))?(\.partial)?")


class ManifestError(SteadyrunError):
    """A manifest or fragment that cannot be read; the text says which file and why."""


def tensors_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def objects_name(rank: int) -> str:
    return f"__{rank}_1.distcp"


def fragment_name(rank: int) -> str:
    return f"__{rank}.shards.json"


@dataclass(frozen=True, slots=True)
class FolderName:
    """The name of a checkpoint's folder. *attempt* is None in the plain name of a committed one."""

    step: int
    attempt: int | None = None
    is_partial: bool = False

    def __str__(self) -> str:
        attempt = "" if self.attempt is None else f".a{self.attempt}"
        return f"step-{self.step:09d}{attempt}{PARTIAL_SUFFIX if self.is_partial else ''}"

    @classmethod
    def parse(cls, name: str) -> FolderName | None:
        """None for every other name."""
        found = _FOLDER.fullmatch(name)
        if found is None:
            return None
        attempt = None if found[2] is None else int(found[2])
        return cls(int(found[1]), attempt, found[3] is not None)


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One tensor shard in a file.

    Attributes:
        at_bytes, length_bytes: of the whole torch.save archive in the file (DCP's offset and length).
        payload_at_bytes: where the tensor's own bytes begin in the file; *payload_bytes* of them.
        xxh3: xxh3-128 of the payload, 32 hexadecimal digits.
        archive_xxh3: of the archive's bytes before and after the payload together.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    at_bytes: int
    length_bytes: int
    payload_at_bytes: int
    payload_bytes: int
    xxh3: str
    archive_xxh3: str


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """One object in a rank's objects file."""

    key: str
    at_bytes: int
    length_bytes: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class Fragment:
    """One rank's part of the checksums.

    Attributes:
        replicas: xxh3 of the payload of every entry that this rank *holds* and another rank holds too, written by it
            or not, as ``key@offsets``: what is looked at when replicas do not agree.
    """

    rank: int
    shards: tuple[ShardRecord, ...]
    objects: tuple[ObjectRecord, ...]
    replicas: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        data = {
            "schema": FRAGMENT_SCHEMA,
            "rank": self.rank,
            "shards": [
                [
                    s.key,
                    list(s.offsets),
                    list(s.sizes),
                    s.dtype,
                    s.at_bytes,
                    s.length_bytes,
                    s.payload_at_bytes,
                    s.payload_bytes,
                    s.xxh3,
                    s.archive_xxh3,
                ]
                for s in self.shards
            ],
            "objects": [[o.key, o.at_bytes, o.length_bytes, o.xxh3] for o in self.objects],
            "replicas": dict(self.replicas),
        }
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes, name: str = "fragment") -> Fragment:
        """Raises ManifestError."""
        try:
            data = json.loads(text)
            if data["schema"] != FRAGMENT_SCHEMA:
                raise ManifestError(f"{name} is of schema {data['schema']!r}, not {FRAGMENT_SCHEMA!r}")
            shards = tuple(
                ShardRecord(str(k), tuple(o), tuple(s), str(d), int(a), int(n), int(pa), int(pn), str(x), str(ax))
                for k, o, s, d, a, n, pa, pn, x, ax in data["shards"]
            )
            objects = tuple(ObjectRecord(str(k), int(a), int(n), str(x)) for k, a, n, x in data["objects"])
            replicas = {str(k): str(v) for k, v in data["replicas"].items()}
            return cls(int(data["rank"]), shards, objects, replicas)
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise ManifestError(f"{name} is damaged: {type(e).__name__}: {e}") from e


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of the folder; *xxh3* of its whole content for small files (metadata, fragments), else empty."""

    name: str
    size_bytes: int
    xxh3: str = ""


@dataclass(frozen=True, slots=True)
class Verified:
    """That the bytes are right: read back and compared (*by* ``save``, ``load`` or ``verify``), or by ``replicas``: all
    ranks that hold copies of the state agreed on it when it was saved.
    """

    at_unix_s: float
    by: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is. Any JSON value may be in *details*.

    Attributes:
        step: the last step done, as given to ``save``; a resumed script goes on with the next one.
        attempt: restarts before it, in *run_id*.
        covered: names of the state that it holds (model, optimizer, scheduler, rng, ...).
        not_covered: what the script was told is missing.
        complete: always True in what we write; a manifest of a folder adopted from elsewhere may say False.
        skipped: ranges of batches left out by a rollback, ``(first, end)``.
    """

    step: int
    attempt: int
    run_id: str
    world_size: int
    created_unix_s: float
    torch: str
    steadyrun: str
    files: tuple[FileRecord, ...]
    covered: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    mesh: Any = None
    samples: int | None = None
    complete: bool = True
    verified: Verified | None = None
    replicas_compared: int = 0
    skipped: tuple[tuple[int, int], ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_details(
        cls,
        told: Mapping[str, Any],
        *,
        step: int,
        attempt: int,
        run_id: str,
        world_size: int,
        created_unix_s: float,
        files: tuple[FileRecord, ...],
        replicas_compared: int,
        notes: Mapping[str, Any],
        verified: Verified | None = None,
    ) -> Manifest:
        """Of a save; *told* is what rank 0 said of its state, *notes* becomes ``details``.

        Raises:
            TypeError, ValueError: *told* holds something of the wrong kind.
        """
        return cls(
            step=step,
            attempt=attempt,
            run_id=run_id,
            world_size=world_size,
            created_unix_s=created_unix_s,
            torch=str(told.get("torch", "")),
            steadyrun=str(told.get("steadyrun", "")),
            files=files,
            covered=_texts(told.get("covered", ())),
            not_covered=_texts(told.get("not_covered", ())),
            mesh=told.get("mesh"),
            samples=told.get("samples"),
            verified=verified,
            replicas_compared=replicas_compared,
            skipped=tuple((int(a), int(b)) for a, b in told.get("skipped", ())),
            details=notes,
        )

    @property
    def size_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files)

    @property
    def is_foreign(self) -> bool:
        """Whether another program has written the files, and ``watch.commit`` only this manifest over them."""
        return FOREIGN in self.details

    def to_json(self) -> str:
        data = {
            "schema": MANIFEST_SCHEMA,
            "step": self.step,
            "attempt": self.attempt,
            "run_id": self.run_id,
            "world_size": self.world_size,
            "created_unix_s": self.created_unix_s,
            "torch": self.torch,
            "steadyrun": self.steadyrun,
            "covered": list(self.covered),
            "not_covered": list(self.not_covered),
            "mesh": self.mesh,
            "samples": self.samples,
            "complete": self.complete,
            "verified": None if self.verified is None else [self.verified.at_unix_s, self.verified.by],
            "replicas_compared": self.replicas_compared,
            "skipped": [list(s) for s in self.skipped],
            "details": self.details,
            "files": [[f.name, f.size_bytes, f.xxh3] for f in self.files],
        }
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, name: str = MANIFEST_NAME) -> Manifest:
        """Raises ManifestError."""
        try:
            data = json.loads(text)
            if data["schema"] != MANIFEST_SCHEMA:
                raise ManifestError(f"{name} is of schema {data['schema']!r}, not {MANIFEST_SCHEMA!r}")
            verified = data["verified"]
            return cls(
                step=int(data["step"]),
                attempt=int(data["attempt"]),
                run_id=str(data["run_id"]),
                world_size=int(data["world_size"]),
                created_unix_s=float(data["created_unix_s"]),
                torch=str(data["torch"]),
                steadyrun=str(data["steadyrun"]),
                files=tuple(FileRecord(str(n), int(s), str(x)) for n, s, x in data["files"]),
                covered=_texts(data["covered"]),
                not_covered=_texts(data["not_covered"]),
                mesh=data["mesh"],
                samples=None if data["samples"] is None else int(data["samples"]),
                complete=bool(data["complete"]),
                verified=None if verified is None else Verified(float(verified[0]), str(verified[1])),
                replicas_compared=int(data["replicas_compared"]),
                skipped=tuple((int(a), int(b)) for a, b in data["skipped"]),
                details=dict(data["details"]),
            )
        except (ValueError, TypeError, KeyError, IndexError) as e:
            raise ManifestError(f"{name} is damaged: {type(e).__name__}: {e}") from e


def _texts(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(v) for v in values)
