"""What ``torch.save`` puts around a tensor, made without torch and around a payload that somebody else writes.

``torch.load`` reads the result like a file of its own. It is a zip archive of ``data.pkl`` (dtype, shape, strides),
``byteorder``, ``version`` and, last, ``data/0`` with the tensor's bytes; the padding before these lets them begin on a
page boundary of the file, which direct I/O wants. The CRC32 of the payload stands behind it, so that one pass from
front to back writes the archive.
"""

from __future__ import annotations

import functools
import re
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from steadyrun.checkpoint.layout import ALIGN_BYTES
from steadyrun.checkpoint.opcodes import PickleWriter

__all__ = ["Envelope", "envelope", "is_storable"]

# dtypes that torch.save stores by the class of their storage; all others go with their name and untyped bytes.
_STORAGES: Final[Mapping[str, tuple[str, int]]] = {
    "float32": ("FloatStorage", 4),
    "float64": ("DoubleStorage", 8),
    "float16": ("HalfStorage", 2),
    "bfloat16": ("BFloat16Storage", 2),
    "int64": ("LongStorage", 8),
    "int32": ("IntStorage", 4),
    "int16": ("ShortStorage", 2),
    "int8": ("CharStorage", 1),
    "uint8": ("ByteStorage", 1),
    "bool": ("BoolStorage", 1),
    "complex64": ("ComplexFloatStorage", 8),
    "complex128": ("ComplexDoubleStorage", 16),
}
_STORABLE: Final = re.compile(r"bool|u?int\d+|b?float\d+(_\w+)?|complex\d+")

_LOCAL: Final = struct.Struct("<4s5H3I2H")
_CENTRAL: Final = struct.Struct("<4s6H3I5H2I")
_DESCRIPTOR: Final = struct.Struct("<4s3I")
_DESCRIPTOR_64: Final = struct.Struct("<4sI2Q")
_END: Final = struct.Struct("<4s4H2IH")
_END_64: Final = struct.Struct("<4sQ2H2I4Q")
_END_64_PLACE: Final = struct.Struct("<4sIQI")
_SIZES_64: Final = struct.Struct("<2H2Q")
_PADDING: Final = struct.Struct("<2H")
_MOST_32: Final = 0xFFFFFFFF
_UTF8: Final = 0x0800
_SIZES_FOLLOW: Final = 0x0008
_PADDING_ID: Final = 0x4246  # "FB", as torch's own padding
_DATA: Final = b"archive/data/0"


def is_storable(dtype: str) -> bool:
    """Whether a plain tensor of that dtype can be stored; quantized ones cannot."""
    return _STORABLE.fullmatch(dtype) is not None


@dataclass(frozen=True, slots=True)
class Envelope:
    """What stands before and behind a payload; small itself, the bytes are made when they are asked for."""

    payload_bytes: int
    padding_bytes: int
    _records: bytes
    _directory: bytes

    @property
    def prefix(self) -> bytes:
        """The archive up to the payload."""
        size_bytes = self.payload_bytes
        extra = b""
        if size_bytes >= _MOST_32:
            extra = _SIZES_64.pack(1, 16, size_bytes, size_bytes)
        if size_bytes:
            extra += _PADDING.pack(_PADDING_ID, self.padding_bytes) + bytes(self.padding_bytes)
        shown = _MOST_32 if size_bytes >= _MOST_32 else 0
        return self._records + _local(_DATA, self._flags, 0, shown, extra)

    @property
    def prefix_bytes(self) -> int:
        """The length of ``prefix``."""
        return len(self._records) + _header_bytes(self.payload_bytes) + self.padding_bytes

    def suffix(self, crc32: int) -> bytes:
        """The archive behind the payload, whose CRC32 this is."""
        size_bytes = self.payload_bytes
        is_large = size_bytes >= _MOST_32
        shown, extra = size_bytes, b""
        if is_large:
            shown, extra = _MOST_32, _SIZES_64.pack(1, 16, size_bytes, size_bytes)
        follow = b""
        if size_bytes:
            follow = (_DESCRIPTOR_64 if is_large else _DESCRIPTOR).pack(b"PK\x07\x08", crc32, size_bytes, size_bytes)
        entry = _central(_DATA, self._flags, crc32, shown, len(self._records), extra)
        directory_at = self.prefix_bytes + size_bytes + len(follow)
        return follow + self._directory + entry + _end(directory_at, len(self._directory) + len(entry))

    @property
    def suffix_bytes(self) -> int:
        """The length of what ``suffix`` returns."""
        size_bytes = len(self._directory) + _CENTRAL.size + len(_DATA) + _END.size
        far_bytes = _END_64.size + _END_64_PLACE.size
        if self.payload_bytes >= _MOST_32:
            return size_bytes + _SIZES_64.size + _DESCRIPTOR_64.size + far_bytes
        size_bytes += _DESCRIPTOR.size if self.payload_bytes else 0
        # Just below 4 GiB the directory alone lies beyond them.
        is_far = self.prefix_bytes + self.payload_bytes + _DESCRIPTOR.size >= _MOST_32
        return size_bytes + (far_bytes if is_far else 0)

    @property
    def length_bytes(self) -> int:
        return self.prefix_bytes + self.payload_bytes + self.suffix_bytes

    @property
    def _flags(self) -> int:
        return _UTF8 | (_SIZES_FOLLOW if self.payload_bytes else 0)


def envelope(dtype: str, sizes: Sequence[int], payload_bytes: int, at_bytes: int) -> Envelope:
    """The envelope of a contiguous tensor whose archive begins at *at_bytes* of its file.

    Args:
        dtype: as torch prints it, without ``torch.``.

    Raises:
        ValueError: a dtype that is not storable.
    """
    records, directory = _first_records(dtype, tuple(sizes), payload_bytes)
    padding = 0
    if payload_bytes:  # an empty payload needs no page of its own
        padding = -(at_bytes + len(records) + _header_bytes(payload_bytes)) % ALIGN_BYTES
    return Envelope(payload_bytes, padding, records, directory)


def _header_bytes(payload_bytes: int) -> int:
    """Length of the payload's own header, without padding."""
    size_bytes = _LOCAL.size + len(_DATA)
    if payload_bytes:
        size_bytes += _PADDING.size
    return size_bytes + (_SIZES_64.size if payload_bytes >= _MOST_32 else 0)


@functools.lru_cache(maxsize=1024)  # a model has thousands of tensors and a few dozen shapes
def _first_records(dtype: str, sizes: tuple[int, ...], payload_bytes: int) -> tuple[bytes, bytes]:
    """All records before the payload, and what the directory says of them."""
    if not is_storable(dtype):
        raise ValueError(f"a tensor of dtype {dtype!r} cannot be stored as plain bytes; it must be kept as an object")
    records, directory = bytearray(), bytearray()
    for name, data in (
        (b"archive/data.pkl", _data_pkl(dtype, sizes, payload_bytes)),
        (b"archive/byteorder", sys.byteorder.encode()),
        (b"archive/version", b"3\n"),
    ):
        crc32 = zlib.crc32(data)
        directory += _central(name, _UTF8, crc32, len(data), len(records), b"")
        records += _local(name, _UTF8, crc32, len(data), b"") + data
    return bytes(records), bytes(directory)


# -- the parts of a zip archive --------------------------------------------------------------------------------------
def _local(name: bytes, flags: int, crc32: int, size: int, extra: bytes) -> bytes:
    head = _LOCAL.pack(b"PK\x03\x04", _version(size), flags, 0, 0, 0, crc32, size, size, len(name), len(extra))
    return head + name + extra


def _central(name: bytes, flags: int, crc32: int, size: int, at_bytes: int, extra: bytes) -> bytes:
    version = _version(size)
    times = (0, 0)
    head = (b"PK\x01\x02", version, version, flags, 0, *times, crc32, size, size, len(name), len(extra))
    return _CENTRAL.pack(*head, 0, 0, 0, 0, at_bytes) + name + extra


def _version(size: int) -> int:
    """Of the zip specification, times ten: 4.5 knows sizes of 64 bits."""
    return 45 if size == _MOST_32 else 20


def _end(directory_at: int, directory_bytes: int) -> bytes:
    count = 4
    out = b""
    if directory_at >= _MOST_32:
        sizes = (count, count, directory_bytes, directory_at)
        out += _END_64.pack(b"PK\x06\x06", _END_64.size - 12, 45, 45, 0, 0, *sizes)
        out += _END_64_PLACE.pack(b"PK\x06\x07", 0, directory_at + directory_bytes, 1)
    return out + _END.pack(b"PK\x05\x06", 0, 0, count, count, directory_bytes, min(directory_at, _MOST_32), 0)


# -- data.pkl --------------------------------------------------------------------------------------------------------
def _data_pkl(dtype: str, sizes: Sequence[int], payload_bytes: int) -> bytes:
    """What ``torch.save`` writes for a contiguous tensor on the CPU."""
    typed = _STORAGES.get(dtype)
    out = PickleWriter()
    out.name("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
    out.mark()
    out.mark()
    out.text("storage")
    out.name(*(("torch", typed[0]) if typed else ("torch.storage", "UntypedStorage")))
    out.text("0")
    out.text("cpu")
    out.number(payload_bytes // typed[1] if typed else payload_bytes)
    out.tuple_to_mark()
    out.outside()
    out.number(0)
    out.numbers(sizes)
    out.numbers(_strides(sizes))
    out.boolean(False)  # requires_grad
    out.name("collections", "OrderedDict")  # backward hooks
    out.empty_tuple()
    out.call()
    if not typed:
        out.name("torch", dtype)
    out.tuple_to_mark()
    out.call()
    return out.finish()


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(sizes)
    for i in range(len(sizes) - 2, -1, -1):
        strides[i] = strides[i + 1] * max(sizes[i + 1], 1)
    return tuple(strides)
