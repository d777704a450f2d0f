"""safetensors files: their header, read and made, and whether it fits the file. The format stores no checksum.

A file is 8 bytes with the header's length, the header (JSON: of each tensor its dtype, shape and range of bytes), and
the tensors' bytes one after the other.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steadyrun.checkpoint.contents import DTYPE_BITS, Place, Shard, Tensor
from steadyrun.core.errors import SteadyrunError

__all__ = ["CANNOT_HOLD", "DamagedHeaderError", "Described", "Header", "make_header", "read_header"]

MOST_HEADER_BYTES: Final = 100_000_000  # the limit that the format itself sets
_DTYPES: Final[Mapping[str, str]] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}
_NAMES: Final[Mapping[str, str]] = {torch_name: name for name, torch_name in _DTYPES.items()}
_HEADER_ALIGN_BYTES: Final = 8
CANNOT_HOLD: Final = f"safetensors has only the dtypes {', '.join(sorted(_NAMES))}"


class DamagedHeaderError(SteadyrunError):
    """The header is broken, or does not fit the file."""


def read_header(file: Path, name: str) -> tuple[Tensor, ...]:
    """The tensors of *file*, by place; *name* is what the places call it.

    Raises:
        DamagedHeaderError: the header is broken, or its ranges leave gaps, overlap, or do not end with the file.
        OSError: the file cannot be read.
    """
    size_bytes = os.stat(file).st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size_bytes < 8 or length > min(MOST_HEADER_BYTES, size_bytes - 8):
            raise DamagedHeaderError(f"its header of {length:,} bytes does not fit a file of {size_bytes:,} bytes")
        try:
            header = json.loads(f.read(length))
        except (ValueError, RecursionError) as e:
            raise DamagedHeaderError("its header is no JSON") from e
    if not isinstance(header, dict):
        raise DamagedHeaderError("its header is no JSON object")
    data_at = 8 + length
    entries = [(k, *_range(k, v), v) for k, v in header.items() if k != "__metadata__"]
    entries.sort(key=lambda entry: entry[1:3])
    end, tensors = 0, []
    for key, start, stop, entry in entries:
        if start != end:
            raise DamagedHeaderError(
                f"{key!r} begins at byte {start:,} of the data, where the one before ends at {end:,}"
            )
        end = stop
        tensors.append(_tensor(key, entry, Place(name, data_at + start, stop - start)))
    if data_at + end != size_bytes:
        what = "are lost" if data_at + end > size_bytes else "are too many"
        raise DamagedHeaderError(
            f"{abs(data_at + end - size_bytes):,} bytes {what}: the header ends at {data_at + end:,}"
        )
    return tuple(tensors)


def _range(key: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not (isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(o, int) for o in offsets)):
        raise DamagedHeaderError(f"{key!r} has no data_offsets")
    start, stop = offsets
    if not 0 <= start <= stop:
        raise DamagedHeaderError(f"{key!r} has impossible data_offsets {offsets}")
    return start, stop


def _tensor(key: str, entry: Mapping[str, Any], place: Place) -> Tensor:
    shape = entry.get("shape")
    if not (isinstance(shape, list) and all(isinstance(n, int) and n >= 0 for n in shape)):
        raise DamagedHeaderError(f"{key!r} has no shape")
    stored_dtype = str(entry.get("dtype"))
    dtype = _DTYPES.get(stored_dtype, stored_dtype)
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits // 8 != place.length_bytes:
        raise DamagedHeaderError(f"{key!r} has {place.length_bytes:,} bytes, which is not {dtype} of shape {shape}")
    return Tensor(key, dtype, tuple(shape), (Shard((0,) * len(shape), tuple(shape), place),))


# -- making one ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Described:
    """A tensor that a file shall hold; *dtype* as torch names it, without ``torch.``."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Raises KeyError for a dtype that is not known here."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Header:
    """How a file begins, and where in it each tensor's bytes belong.

    Attributes:
        data: the file's first bytes.
        places: by name, in the order in which they lie in the file: offset in the file, number of bytes.
        file_bytes: size of the whole file.
    """

    data: bytes
    places: Mapping[str, tuple[int, int]]
    file_bytes: int


def make_header(tensors: Sequence[Described], metadata: Mapping[str, str]) -> Header:
    """The header for *tensors*: wide dtypes first, then by name, so that every tensor is aligned to its elements.

    Raises:
        ValueError: the format has no name for a dtype.
    """
    for tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise ValueError(f"cannot put {tensor.key!r} of dtype {tensor.dtype} into safetensors: {CANNOT_HOLD}")
    ordered = sorted(tensors, key=lambda t: (-DTYPE_BITS[t.dtype], t.key))
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    places: dict[str, tuple[int, int]] = {}
    at = 0
    for tensor in ordered:
        end = at + tensor.size_bytes
        table[tensor.key] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        places[tensor.key] = (at, end - at)
        at = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _HEADER_ALIGN_BYTES)
    begin = 8 + len(text)
    moved = {key: (begin + start, size) for key, (start, size) in places.items()}
    return Header(len(text).to_bytes(8, "little") + text, moved, begin + at)
