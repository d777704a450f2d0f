"""The zip archives that ``torch.save`` writes: their records, and the tensors in them, without unpickling anything.

torch computes a CRC32 for each record when it saves, and compares it with nothing when it loads.
"""

from __future__ import annotations

import functools
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from steadyrun.checkpoint.contents import DTYPE_BITS
from steadyrun.checkpoint.pickles import Call, Global, Persistent, read_pickle
from steadyrun.core.errors import SteadyrunError

__all__ = ["DamagedArchiveError", "Record", "StoredTensor", "StoredValue", "read_records", "stored_value"]

_LOCAL_HEADER: Final = struct.Struct("<8xH16x2H")
_CENTRAL_HEADER: Final = struct.Struct("<4s6xH4x2I3H8xI")  # without its CRC32
_CRC_FIELD: Final = re.compile(rb"(?<=PK\x01\x02.{12}).{4}", re.DOTALL)
_END: Final = struct.Struct("<4s4H2IH")
_LOCATOR: Final = struct.Struct("<4sIQI")  # of _END64, which stands before it
_END64: Final = struct.Struct("<4sQ2H2I4Q")
_LARGE: Final = 0xFFFFFFFF  # stands for a number that does not fit
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


def read_records(read: Callable[[int, int], bytes], size_bytes: int) -> tuple[Record, ...]:
    """The records of the archive of *size_bytes*, by place; ``read(offset, size)`` reads from its begin.

    Five times as fast as ``zipfile``, which takes longer than the tensor when that is small; and stricter: torch fills
    the range from the first to the last byte, while ``zipfile`` finds an archive amid other bytes.

    Raises:
        DamagedArchiveError: it is no archive as torch writes them.
        OSError: from *read*.
    """
    at, count, length = _directory(read, size_bytes)
    directory = read(at, length)
    crcs = _CRC_FIELD.findall(directory)
    if len(crcs) != count:
        raise DamagedArchiveError("its list of records is not what its end says")
    return tuple(
        _record(read, entry, int.from_bytes(crcs[entry.index], "little"))
        for entry in _entries(_CRC_FIELD.sub(b"", directory), at)
    )


@functools.lru_cache(maxsize=1024)
def _entries(directory: bytes, directory_at: int) -> tuple[_Entry, ...]:
    """The records in a list without its CRC32s, by place; the list is equal for all tensors of one dtype and shape."""
    found: list[_Entry] = []
    offset = 0
    while offset < len(directory):
        entry, offset = _entry(directory, offset, len(found))
        found.append(entry)
    found.sort(key=lambda e: e.header_at)
    if not found or found[0].header_at != 0:
        raise DamagedArchiveError("its list of records does not begin with its first byte")
    limits = [*(e.header_at for e in found[1:]), directory_at]
    return tuple(replace(entry, limit_bytes=limit) for entry, limit in zip(found, limits, strict=True))


@dataclass(frozen=True, slots=True)
class _Entry:
    """One record as the list of records describes it, at *index* there; it ends before *limit_bytes*."""

    index: int
    raw_name: bytes
    name: str
    header_at: int
    packed_bytes: int
    size_bytes: int
    compression: int
    limit_bytes: int = 0


def _directory(read: Callable[[int, int], bytes], size_bytes: int) -> tuple[int, int, int]:
    """Where the list of records is, how many they are, and its length."""
    end_at = size_bytes - _END.size
    end = read(end_at, _END.size) if end_at >= 0 else b""
    if len(end) < _END.size or end[:4] != b"PK\x05\x06":
        raise DamagedArchiveError("no list of records at its end: it does not fill the bytes that are said to hold it")
    _, disk, first_disk, on_disk, count, length, at, comment_bytes = _END.unpack(end)
    locator_at = end_at - _LOCATOR.size
    locator = read(locator_at, _LOCATOR.size) if locator_at >= 0 else b""
    if locator[:4] == b"PK\x06\x07":
        _, _, end64_at, _ = _LOCATOR.unpack(locator)
        end64 = read(end64_at, _END64.size) if end64_at + _END64.size <= locator_at else b""
        if end64[:4] != b"PK\x06\x06":
            raise DamagedArchiveError("its end points nowhere")
        _, _, _, _, disk, first_disk, on_disk, count, length, at = _END64.unpack(end64)
        end_at = end64_at
    if disk or first_disk or on_disk != count or comment_bytes or at + length != end_at:
        raise DamagedArchiveError("its end does not describe an archive that fills the bytes that are said to hold it")
    if count > length // _CENTRAL_HEADER.size:
        raise DamagedArchiveError(f"its end speaks of {count:,} records in {length:,} bytes")
    return at, count, length


def _entry(directory: bytes, offset: int, index: int) -> tuple[_Entry, int]:
    """The entry at *offset* of the list of records, and where the next one begins."""
    name_at = offset + _CENTRAL_HEADER.size
    if name_at > len(directory):
        raise DamagedArchiveError("its list of records is cut off")
    fields = _CENTRAL_HEADER.unpack_from(directory, offset)
    signature, compression, packed, size, name_bytes, extra_bytes, comment_bytes, header_at = fields
    extra_at = name_at + name_bytes
    end = extra_at + extra_bytes + comment_bytes
    if signature != b"PK\x01\x02" or end > len(directory):
        raise DamagedArchiveError(f"its list of records is broken at byte {offset}")
    if _LARGE in (packed, size, header_at):
        large = _large_values(directory[extra_at : extra_at + extra_bytes])
        try:
            size = next(large) if size == _LARGE else size
            packed = next(large) if packed == _LARGE else packed
            header_at = next(large) if header_at == _LARGE else header_at
        except StopIteration:
            raise DamagedArchiveError("a record of more than 4 GiB has no size in its list of records") from None
    raw_name = directory[name_at:extra_at]
    name = raw_name.decode("utf-8", "backslashreplace")
    name = name.partition("/")[2] or name
    return _Entry(index, raw_name, name, header_at, packed, size, compression), end


def _large_values(extra: bytes) -> Iterator[int]:
    """The 64-bit numbers that stand for those that do not fit into 32 bits, in their fixed order."""
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            field = extra[at + 4 : at + 4 + length]
            yield from struct.unpack_from(f"<{len(field) // 8}Q", field)
            return
        at += 4 + length


def _record(read: Callable[[int, int], bytes], entry: _Entry, crc: int) -> Record:
    name, at = entry.name, entry.header_at
    if at + _LOCAL_HEADER.size > entry.limit_bytes:
        raise DamagedArchiveError(f"record {name!r} lies outside of its archive")
    header = read(at, _LOCAL_HEADER.size + len(entry.raw_name))
    if len(header) < _LOCAL_HEADER.size or header[:4] != b"PK\x03\x04":
        raise DamagedArchiveError(f"record {name!r} has no header at byte {at}")
    compression, name_bytes, extra_bytes = _LOCAL_HEADER.unpack_from(header)
    if name_bytes != len(entry.raw_name) or header[_LOCAL_HEADER.size :] != entry.raw_name:
        raise DamagedArchiveError(f"the header at byte {at} is not that of record {name!r}")
    start = at + _LOCAL_HEADER.size + name_bytes + extra_bytes
    is_compressed = compression != 0
    if compression != entry.compression or (entry.size_bytes != entry.packed_bytes and not is_compressed):
        raise DamagedArchiveError(f"the header of record {name!r} is not that in the list of records")
    if start + entry.packed_bytes > entry.limit_bytes:
        raise DamagedArchiveError(f"record {name!r} of {entry.packed_bytes:,} bytes does not fit where it lies")
    return Record(name, start, entry.packed_bytes, crc, is_compressed)


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
