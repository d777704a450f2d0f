"""What is in a checkpoint: tensors, shards, files, and the pieces of files that can be checked one by one."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from steadyrun.checkpoint.manifest import ShardRecord
from steadyrun.core.errors import SteadyrunError

__all__ = [
    "DTYPE_BITS",
    "Contents",
    "Encoding",
    "Expected",
    "FileInfo",
    "Kind",
    "Piece",
    "Place",
    "Problem",
    "ProblemKind",
    "Shard",
    "Tensor",
    "UnusableCheckpointError",
    "shard_words",
]

# Names as torch prints them, without "torch.".
DTYPE_BITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("bool", "uint8", "int8", "quint8", "qint8"), 8),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 8),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 16),
    **dict.fromkeys(("float32", "int32", "uint32", "qint32", "complex32"), 32),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 64),
    "complex128": 128,
}


class UnusableCheckpointError(SteadyrunError):
    """There is no checkpoint at the path, or none that is recognised."""


class Kind(enum.Enum):
    """Who writes such a checkpoint."""

    DCP = "dcp"
    MEGATRON_DCP = "megatron_dcp"
    MEGATRON = "megatron"
    DEEPSPEED = "deepspeed"
    HF_SHARDED = "hf_sharded"
    SAFETENSORS = "safetensors"
    TORCH_SAVE = "torch_save"
    FILES = "files"


class Encoding(enum.Enum):
    """How the bytes of a piece are laid out, and so what of them can be checked."""

    TORCH_ZIP = "torch_zip"
    SAFETENSORS = "safetensors"
    OPAQUE = "opaque"


class ProblemKind(enum.Enum):
    """What is wrong."""

    METADATA = "metadata"
    MISSING = "missing"
    TRUNCATED = "truncated"
    UNREADABLE = "unreadable"
    STRUCTURE = "structure"
    CHECKSUM = "checksum"
    MISMATCH = "mismatch"
    OVERLAP = "overlap"
    COVERAGE = "coverage"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, and where.

    Attributes:
        text: what, for a person.
        file: relative to the checkpoint.
        keys: the tensors or objects that are hit, as far as known.
        shard_offsets: where in the global tensor the shard begins.
        at_byte: in *file*, where the damaged part begins; of *size_bytes*.
    """

    kind: ProblemKind
    text: str
    file: str | None = None
    keys: tuple[str, ...] = ()
    shard_offsets: tuple[int, ...] | None = None
    at_byte: int | None = None
    size_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """A range of bytes of a file; *file* is relative to the checkpoint."""

    file: str
    offset_bytes: int
    length_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.length_bytes


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a tensor, in elements, and where its bytes are (None: nowhere)."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place | None

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the checkpoint; *dtype* as torch names it, without ``torch.``."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    @property
    def size_bytes(self) -> int | None:
        """None for a dtype whose size is not known here."""
        bits = DTYPE_BITS.get(self.dtype)
        return None if bits is None else math.prod(self.shape) * bits // 8


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file below the checkpoint; *name* is relative to it."""

    name: str
    size_bytes: int
    written_unix_s: float


@dataclass(frozen=True, slots=True)
class Expected:
    """The tensor that must be in a piece."""

    dtype: str
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a file that is checked by itself.

    Attributes:
        key: the tensor or object in it; None where the piece itself has to say.
        no_checksum: why its bytes cannot be compared with anything, None where they can or where that shows later.
        xxh3: what the xxh3-128 of the whole piece must be, by a manifest; then nothing else of it is looked at.
        record: what our manifest says of the shard in it; then this is compared, and not the CRC32 of torch.
    """

    place: Place
    encoding: Encoding
    key: str | None = None
    shard_offsets: tuple[int, ...] | None = None
    expected: Expected | None = None
    no_checksum: str | None = None
    xxh3: str | None = None
    record: ShardRecord | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint as its own lists of contents describe it; its data are not read for this.

    Attributes:
        objects: keys of what is no tensor.
        files: all files, checked or not, by name.
        problems: what is wrong already in the lists: gaps, overlaps, files that are missing or too short.
        notes: what is no damage but worth knowing.
        details: what else the lists say, by name.
    """

    path: Path
    kind: Kind
    files: tuple[FileInfo, ...]
    tensors: tuple[Tensor, ...] = ()
    objects: tuple[str, ...] = ()
    pieces: tuple[Piece, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    details: Mapping[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(f.size_bytes for f in self.files)


def shard_words(offsets: tuple[int, ...] | None) -> str:
    """``shard at [8, 0]``, or nothing."""
    return "" if not offsets else f"shard at [{', '.join(map(str, offsets))}]"
