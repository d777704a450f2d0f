"""The zip archives that ``torch.save`` writes: their records, and the tensors in them, without unpickling anything.

torch computes a CRC32 for each record when it saves, and compares it with nothing when it loads.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from steadyrun.checkpoint.contents import DTYPE_BITS
from steadyrun.checkpoint.pickles import Call, Global, Persistent, read_pickle
from steadyrun.core.errors import SteadyrunError

__all__ = ["DamagedArchiveError", "Record", "StoredTensor", "StoredValue", "read_records", "stored_value"]

LEAST_BYTES: Final = 22  # the end record of an empty archive
_LOCAL_HEADER: Final = struct.Struct("<4s5H3I2H")
_STORAGE_DTYPES: Final[Mapping[str, str]] = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_MOST_VALUES: Final = 20_000_000  # walked in one data.pkl; references make a small pickle mean a large tree


class DamagedArchiveError(SteadyrunError):
    """The archive's own structure is broken; its records cannot be found or trusted."""


@dataclass(frozen=True, slots=True)
class Record:
    """One record; *name* without the archive's folder, *offset_bytes* of its data from the archive's begin.

    *is_compressed*: only code in TorchScript files is; its CRC32 is that of the text, not of the bytes here.
    """

    name: str
    offset_bytes: int
    size_bytes: int
    crc32: int
    is_compressed: bool = False


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in ``data.pkl``.

    Attributes:
        record: holds its storage, of which it needs *needed_bytes* (None: not known).
        is_plain: its elements are the storage from the first byte on, in C order.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    record: str
    needed_bytes: int | None
    is_plain: bool


@dataclass(frozen=True, slots=True)
class StoredValue:
    """What is in ``data.pkl``; *is_made_by_torch*: one object of torch's, a tensor of some kind, and no plain value."""

    tensors: tuple[StoredTensor, ...]
    is_made_by_torch: bool


class _Window(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, read: Callable[[int, int], bytes], size_bytes: int) -> None:
        self._read = read
        self._size_bytes = size_bytes
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        if base + offset < 0:
            raise OSError("before the begin")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = max(min(len(buffer), self._size_bytes - self._at), 0)
        data = self._read(self._at, size) if size else b""
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def read_records(read: Callable[[int, int], bytes], size_bytes: int) -> tuple[Record, ...]:
    """The records of the archive of *size_bytes*, by place; ``read(offset, size)`` reads from its begin.

    Raises:
        DamagedArchiveError: it is no archive as torch writes them.
        OSError: from *read*.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(_Window(read, size_bytes), 1 << 16)) as archive:
            infos = sorted(archive.infolist(), key=lambda i: i.header_offset)
            directory_at = int(getattr(archive, "start_dir", size_bytes))
    except (zipfile.BadZipFile, NotImplementedError, UnicodeError, struct.error, ValueError, EOFError) as e:
        raise DamagedArchiveError(f"no list of records at its end ({e})") from e
    # zipfile finds an archive amid other bytes; torch fills the range from the first to the last byte.
    if not infos or infos[0].header_offset != 0 or read(size_bytes - LEAST_BYTES, 4) != b"PK\x05\x06":
        raise DamagedArchiveError("it does not fill the range of bytes that is said to hold it")
    records = []
    for i, info in enumerate(infos):
        limit = infos[i + 1].header_offset if i + 1 < len(infos) else directory_at
        records.append(_record(read, info, min(limit, size_bytes)))
    return tuple(records)


def _record(read: Callable[[int, int], bytes], info: zipfile.ZipInfo, limit_bytes: int) -> Record:
    name = info.orig_filename
    if info.header_offset < 0 or info.header_offset + _LOCAL_HEADER.size > limit_bytes:
        raise DamagedArchiveError(f"record {name!r} lies outside of its archive")
    header = read(info.header_offset, _LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
        raise DamagedArchiveError(f"record {name!r} has no header at byte {info.header_offset}")
    *_, compression, _time, _date, _crc, _packed, _size, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
    own_name = read(info.header_offset + _LOCAL_HEADER.size, name_bytes)
    if own_name != name.encode("utf-8" if info.flag_bits & 0x800 else "cp437"):
        raise DamagedArchiveError(f"the header at byte {info.header_offset} is not that of record {name!r}")
    start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    size_bytes, is_compressed = info.compress_size, info.compress_type != zipfile.ZIP_STORED
    if compression != info.compress_type or (info.file_size != size_bytes and not is_compressed):
        raise DamagedArchiveError(f"the header of record {name!r} is not that in the list of records")
    if start + size_bytes > limit_bytes:
        raise DamagedArchiveError(f"record {name!r} of {size_bytes:,} bytes does not fit where it lies")
    return Record(name.partition("/")[2] or name, start, size_bytes, info.CRC, is_compressed)


# -- data.pkl --------------------------------------------------------------------------------------------------------
def stored_value(data_pkl: bytes) -> StoredValue:
    """The tensors that ``data.pkl`` refers to, with the path to each as its key; empty for a lone tensor.

    Raises:
        PickleError: it is no valid pickle.
    """
    root = read_pickle(data_pkl)
    found: list[StoredTensor] = []
    todo: list[tuple[str, Any]] = [("", root)]
    seen: set[int] = set()
    walked = 0
    while todo and walked < _MOST_VALUES:
        key, value = todo.pop()
        walked += 1
        children: list[tuple[Any, Any]] = []
        if isinstance(value, Call):
            tensor = _tensor(key, value)
            if tensor is not None:
                found.append(tensor)
                continue
            children = [*value.items, *enumerate(value.elements)]
            children += value.state.items() if isinstance(value.state, dict) else ()
            if value.name == "torch._utils._rebuild_parameter" and value.args:
                todo.append((key, value.args[0]))
        elif isinstance(value, dict):
            children = list(value.items())
        elif isinstance(value, (list, tuple)):
            children = list(enumerate(value))
        if children and id(value) not in seen:
            seen.add(id(value))  # a second reference to the same list adds nothing, and a loop would never end
            dot = "." if key else ""
            todo.extend((f"{key}{dot}{_word(name)}", child) for name, child in reversed(children))
    return StoredValue(tuple(found), isinstance(root, Call) and root.name.startswith("torch."))


def _word(name: Any) -> str:
    return str(name) if isinstance(name, (str, int)) else "?"


def _tensor(key: str, call: Call) -> StoredTensor | None:
    args = call.args
    if call.name not in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3") or len(args) < 6:
        return None
    storage, first, shape, strides = args[:4]
    reference = storage.value if isinstance(storage, Persistent) else None
    if not (isinstance(reference, tuple) and len(reference) >= 5 and isinstance(reference[1], Global)):
        return None
    if not (_are_sizes(shape) and _are_sizes(strides) and len(shape) == len(strides) and _are_sizes((first,))):
        return None
    dtype = _STORAGE_DTYPES.get(reference[1].name.rpartition(".")[2])
    if call.name.endswith("v3") and len(args) > 6 and isinstance(args[6], Global):
        dtype = args[6].name.removeprefix("torch.")
    last = first + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    bits = DTYPE_BITS.get(dtype or "")
    needed = None if bits is None else (last + 1) * bits // 8 if math.prod(shape) else 0
    has_marks = any(args[7:] if call.name.endswith("v3") else args[6:])  # conjugated, for instance
    is_plain = first == 0 and not has_marks and _is_contiguous(shape, strides)
    return StoredTensor(key, dtype or "?", tuple(shape), f"data/{reference[2]}", needed, is_plain)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return math.prod(shape) == 0
        step *= size
    return True


def _are_sizes(values: Any) -> bool:
    return isinstance(values, tuple) and all(isinstance(v, int) and 0 <= v < 1 << 63 for v in values)
