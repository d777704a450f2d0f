"""Folders that ``torch.distributed.checkpoint`` writes: what their ``.metadata`` says, and whether it adds up.

``.metadata`` is a pickle, and torch loads it with everything that a pickle may do. Here it is read as data; names that
do not belong into it are refused, so that such a folder is never passed on to torch unnoticed.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeGuard

from steadyrun.checkpoint.contents import (
    DTYPE_BITS,
    Encoding,
    Expected,
    FileInfo,
    Piece,
    Place,
    Problem,
    ProblemKind,
    Shard,
    Tensor,
    shard_words,
)
from steadyrun.checkpoint.pickles import Call, Global, PickleError, RefusedPickleError, read_pickle
from steadyrun.core.errors import SteadyrunError

__all__ = [
    "ALLOWED_PREFIX",
    "MOST_METADATA_BYTES",
    "DamagedMetadataError",
    "DcpMetadata",
    "Stored",
    "coverage_problems",
    "is_allowed",
    "is_outside",
    "pieces_of",
    "problems_of",
    "read_metadata",
]

MOST_METADATA_BYTES: Final = 1 << 30
_METADATA: Final = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO: Final = "torch.distributed.checkpoint.filesystem._StorageInfo"
_CLASSES: Final = (
    "Metadata",
    "MetadataIndex",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
_ALLOWED: Final = frozenset(
    [
        *(_METADATA + name for name in _CLASSES),
        _STORAGE_INFO,
        "torch.distributed.checkpoint.filesystem._StoragePrefix",
        "torch.Size",
        "torch.serialization._get_layout",
        "collections.OrderedDict",
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
        *(f"torch.{name}" for name in DTYPE_BITS),
        *(f"torch.{name}" for name in ("quint4x2", "quint2x4", "bits8", "bits16", "float4_e2m1fn_x2")),
    ]
)
# Data classes that Megatron adds to the metadata: how tensors were reshaped before the save.
ALLOWED_PREFIX: Final = "megatron.core.dist_checkpointing."


class DamagedMetadataError(SteadyrunError):
    """``.metadata`` cannot be read, or is refused: without it nothing in the folder can be loaded."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where one entry lies; *transforms* (compression, for instance) were applied to its bytes."""

    place: Place
    transforms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """What ``.metadata`` says.

    Attributes:
        objects: keys of what is no tensor.
        stored: by key and offsets of the shard; the offsets are None for objects.
        paths: the way to each key in the nested state dict, where the planner has noted it.
    """

    tensors: tuple[Tensor, ...]
    objects: tuple[str, ...]
    stored: Mapping[tuple[str, tuple[int, ...] | None], Stored]
    details: Mapping[str, str]
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)


def read_metadata(file: Path) -> DcpMetadata:
    """The metadata in *file*; nothing of torch is needed for it, and nothing in it is executed.

    Raises:
        DamagedMetadataError: it is too large, no pickle, incomplete, or names what does not belong there.
        OSError: it cannot be read.
    """
    size_bytes = os.stat(file).st_size
    if size_bytes > MOST_METADATA_BYTES:
        raise DamagedMetadataError(
            f"{file.name} has {size_bytes:,} bytes; more than {MOST_METADATA_BYTES:,} are not read"
        )
    try:
        return _metadata(read_pickle(file.read_bytes(), is_allowed))
    except RefusedPickleError as e:
        raise DamagedMetadataError(
            f"{file.name} is refused: it {e}; torch would run what it names, so do not load this folder"
        ) from e
    except PickleError as e:
        raise DamagedMetadataError(f"{file.name} is damaged: {e}") from e
    except _UnexpectedError as e:
        raise DamagedMetadataError(f"{file.name} does not have the structure that torch writes: {e}") from e


def is_allowed(name: str) -> bool:
    """Whether a name belongs into ``.metadata``."""
    return name in _ALLOWED or name.startswith(ALLOWED_PREFIX)


class _UnexpectedError(Exception):
    pass


# -- from the pickle to records --------------------------------------------------------------------------------------
def _metadata(value: Any) -> DcpMetadata:
    root = _fields(value, _METADATA + "Metadata")
    stored = {}
    for index, info in _dict(root.get("storage_data") or {}, "storage_data").items():
        at = _fields(index, _METADATA + "MetadataIndex")
        offsets = at.get("offset")
        stored[_text(at.get("fqn")), None if offsets is None else _sizes(offsets)] = _stored(info)
    tensors, objects = [], []
    for key, entry in _dict(root.get("state_dict_metadata"), "state_dict_metadata").items():
        if isinstance(entry, Call) and entry.name == _METADATA + "BytesStorageMetadata":
            objects.append(_text(key))
        else:
            tensors.append(_tensor(_text(key), entry, stored))
    details = {"format version": root.get("version")}
    if root.get("storage_meta") is not None:
        details["save id"] = _fields(root["storage_meta"], _METADATA + "StorageMeta").get("save_id")
    words = {name: text for name, text in details.items() if isinstance(text, str)}
    return DcpMetadata(tuple(tensors), tuple(objects), stored, words, _paths(root.get("planner_data")))


def _paths(value: Any) -> Mapping[str, tuple[str | int, ...]]:
    """``planner_data`` as DCP's default planner writes it; other planners may put there what they like."""
    if isinstance(value, Call) and value.name == "collections.OrderedDict":
        value = dict(value.items)
    if not isinstance(value, dict):
        return {}
    return {
        key: tuple(path)
        for key, path in value.items()
        if isinstance(key, str) and isinstance(path, (tuple, list)) and all(isinstance(p, (str, int)) for p in path)
    }


def _tensor(key: str, entry: Any, stored: Mapping[tuple[str, tuple[int, ...] | None], Stored]) -> Tensor:
    fields = _fields(entry, _METADATA + "TensorStorageMetadata")
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, Call) else None
    if not (isinstance(state, tuple) and state and isinstance(state[0], Global)):
        raise _UnexpectedError(f"no dtype for {key!r}")
    shape = _sizes(fields.get("size"))
    shards = []
    for chunk in _list(fields.get("chunks")):
        box = _fields(chunk, _METADATA + "ChunkStorageMetadata")
        offsets, sizes = _sizes(box.get("offsets")), _sizes(box.get("sizes"))
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise _UnexpectedError(f"a shard of {key!r} has another number of dimensions than the tensor")
        at = stored.get((key, offsets))
        shards.append(Shard(offsets, sizes, None if at is None else at.place))
    return Tensor(key, state[0].name.removeprefix("torch."), shape, tuple(shards))


def _stored(info: Any) -> Stored:
    fields = _fields(info, _STORAGE_INFO)
    file, offset, length = _text(fields.get("relative_path")), fields.get("offset"), fields.get("length")
    if not (_is_size(offset) and _is_size(length)):
        raise _UnexpectedError(f"no valid place in {file!r}")
    transforms = _list(fields.get("transform_descriptors"))
    return Stored(Place(file, offset, length), tuple(_text(t) for t in transforms))


def _fields(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Call) or value.name != name or not isinstance(value.state or {}, dict):
        raise _UnexpectedError(f"no {name.rpartition('.')[2]} where one must be")
    return value.state or {}


def _dict(value: Any, what: str) -> Mapping[Any, Any]:
    if isinstance(value, Call) and value.name == "collections.OrderedDict":
        return dict(value.items)
    if not isinstance(value, dict):
        raise _UnexpectedError(f"{what} is no dict")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _UnexpectedError("no name where one must be")
    return value


def _list(value: Any) -> Sequence[Any]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise _UnexpectedError("no list where one must be")
    return value


def _is_size(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and 0 <= value < 1 << 63


def _sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, Call) and value.name == "torch.Size" and len(value.args) <= 1:
        value = value.args[0] if value.args else ()
    if not isinstance(value, (tuple, list)) or not all(_is_size(v) for v in value):
        raise _UnexpectedError("no sizes where they must be")
    return tuple(value)


# -- does it add up? -------------------------------------------------------------------------------------------------
def pieces_of(metadata: DcpMetadata) -> tuple[Piece, ...]:
    """Every entry as a piece to check."""
    tensors = {tensor.key: tensor for tensor in metadata.tensors}
    expected = {
        (tensor.key, shard.offsets): Expected(tensor.dtype, shard.sizes)
        for tensor in metadata.tensors
        for shard in tensor.shards
    }
    pieces = []
    for (key, offsets), at in metadata.stored.items():
        is_tensor = key in tensors
        why = f"stored through {', '.join(at.transforms)}" if at.transforms else None
        encoding = Encoding.OPAQUE if at.transforms else Encoding.TORCH_ZIP
        want = expected.get((key, offsets or ())) if is_tensor else None
        pieces.append(Piece(at.place, encoding, key, offsets if is_tensor else None, want, why))
    return tuple(pieces)


def problems_of(metadata: DcpMetadata, files: Iterable[FileInfo], is_whole: bool = True) -> list[Problem]:
    """Gaps, overlaps, entries without bytes, files that are missing or too short; without reading any data.

    Args:
        is_whole: the metadata speak for all ranks; else a tensor may well have shards elsewhere.
    """
    problems = _places(metadata, {f.name: f.size_bytes for f in files})
    if not is_whole:
        return problems
    for tensor in metadata.tensors:
        problems += coverage_problems(tensor)
    for key in metadata.objects:
        if (key, None) not in metadata.stored and not any(k == key for k, _ in metadata.stored):
            problems.append(Problem(ProblemKind.MISSING, "no bytes are stored for it", keys=(key,)))
    return problems


def _places(metadata: DcpMetadata, sizes_bytes: Mapping[str, int]) -> list[Problem]:
    by_file: dict[str, list[tuple[Place, str, tuple[int, ...] | None]]] = defaultdict(list)
    for (key, offsets), at in metadata.stored.items():
        by_file[at.place.file].append((at.place, key, offsets))
    problems: list[Problem] = []
    for file, entries in sorted(by_file.items()):
        keys = tuple(dict.fromkeys(key for _, key, _ in entries))
        if is_outside(file):
            problems.append(Problem(ProblemKind.METADATA, "lies outside of the folder; not read", file, keys))
            continue
        if file not in sizes_bytes:
            problems.append(Problem(ProblemKind.MISSING, "the file is not there", file, keys))
            continue
        size = sizes_bytes[file]
        entries.sort(key=lambda entry: entry[0].offset_bytes)
        for i, (place, key, offsets) in enumerate(entries):
            if place.end_bytes > size:
                lost = place.end_bytes - max(size, place.offset_bytes)
                text = f"the file ends at byte {size:,}: {lost:,} of the entry's {place.length_bytes:,} bytes are lost"
                problems.append(Problem(ProblemKind.TRUNCATED, text, file, (key,), offsets, place.offset_bytes))
            if i and entries[i - 1][0].end_bytes > place.offset_bytes:
                text = f"two entries claim byte {place.offset_bytes:,}"
                problems.append(Problem(ProblemKind.OVERLAP, text, file, (entries[i - 1][1], key), offsets))
    return problems


def is_outside(file: str) -> bool:
    """Whether a name from a list of contents leads out of the folder that it is in."""
    return file.startswith("/") or ".." in file.split("/") or "\0" in file or not file


def coverage_problems(tensor: Tensor) -> list[Problem]:
    """Elements of *tensor* that are in no shard or in two, shards without bytes or beyond its shape."""
    keys = (tensor.key,)
    problems = []
    inside = []
    for shard in tensor.shards:
        if shard.elements and shard.place is None:
            text = f"no bytes are stored for its {shard_words(shard.offsets) or 'data'}"
            problems.append(Problem(ProblemKind.MISSING, text, keys=keys, shard_offsets=shard.offsets))
        ends = zip(shard.offsets, shard.sizes, tensor.shape, strict=True)
        if any(offset + size > most for offset, size, most in ends):
            text = f"its {shard_words(shard.offsets)} reaches beyond the shape {list(tensor.shape)}"
            problems.append(Problem(ProblemKind.COVERAGE, text, keys=keys, shard_offsets=shard.offsets))
        elif shard.elements or not tensor.shape:
            inside.append(shard)
    pair = _overlap(inside)
    if pair is not None:
        text = f"its {shard_words(pair[0].offsets)} and its {shard_words(pair[1].offsets)} overlap"
        problems.append(Problem(ProblemKind.OVERLAP, text, keys=keys, shard_offsets=pair[1].offsets))
    covered, total = sum(shard.elements for shard in inside), math.prod(tensor.shape)
    if covered < total:
        text = f"{total - covered:,} of its {total:,} elements are in no shard"
        problems.append(Problem(ProblemKind.COVERAGE, text, keys=keys))
    return problems


def _overlap(shards: Sequence[Shard]) -> tuple[Shard, Shard] | None:
    """The first two boxes that share an element. Swept along the dimension that separates most of them."""
    if len(shards) < 2:
        return None
    dimensions = range(len(shards[0].offsets))
    best = max(dimensions, key=lambda d: len({s.offsets[d] for s in shards}), default=None)
    if best is None:
        return shards[0], shards[1]
    active: list[Shard] = []
    for shard in sorted(shards, key=lambda s: s.offsets[best]):
        active = [s for s in active if s.offsets[best] + s.sizes[best] > shard.offsets[best]]
        for other in active:
            if all(
                shard.offsets[d] < other.offsets[d] + other.sizes[d]
                and other.offsets[d] < shard.offsets[d] + shard.sizes[d]
                for d in dimensions
            ):
                return other, shard
        active.append(shard)
    return None
