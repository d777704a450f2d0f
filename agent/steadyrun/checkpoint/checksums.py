"""The two checksums that checkpoints use: CRC32, which torch stores with each record, and xxh3-128, which we store.

Both release the interpreter's lock while they look at more than a few kilobytes. CPU seconds per GB on one core of the
machine this was written on: xxh3 0.10, CRC32 by isal 0.06 to 0.15, CRC32 by zlib 0.41.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import xxhash

try:
    from isal.isal_zlib import crc32 as _crc32
except ImportError:  # no wheel for this machine: the same number from the standard library, three times slower
    from zlib import crc32 as _crc32

__all__ = ["XXH3_DIGITS", "Bytes", "Xxh3", "crc32", "xxh3"]

Bytes: TypeAlias = "bytes | bytearray | memoryview"
XXH3_DIGITS: Final = 32


def crc32(data: Bytes, start: int = 0) -> int:
    """The CRC32 of *data*, as ``zlib.crc32``; *start* is that of what came before it."""
    return int(_crc32(data, start))


def xxh3(data: Bytes) -> str:
    """The xxh3-128 of *data*: 32 hexadecimal digits. *data* has to be contiguous."""
    return xxhash.xxh3_128_hexdigest(data)


class Xxh3:
    """The xxh3-128 of what comes in pieces."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Bytes) -> None:
        self._state.update(data)

    def digest(self) -> str:
        """Of everything so far; more may follow."""
        return self._state.hexdigest()
