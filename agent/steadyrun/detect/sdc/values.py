"""Numbers out of an element's bytes, and how far a copy of one lies from where it can be. Pure, no torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Final

__all__ = ["farthest", "largest", "value_of"]

_FORMATS: Final = {"float64": "<d", "float32": "<f", "float16": "<e"}


def value_of(bits: int, dtype: str) -> float | None:
    """The float that an element's bytes (as a little-endian number) stand for; None for other types."""
    if dtype == "bfloat16":
        bits, dtype = bits << 16, "float32"
    form = _FORMATS.get(dtype)
    if form is None:
        return None
    size = struct.calcsize(form)
    value: float = struct.unpack(form, (bits & ((1 << 8 * size) - 1)).to_bytes(size, "little"))[0]
    return value


def largest(data: bytes, dtype: str, without: Sequence[int] = ()) -> float | None:
    """The largest magnitude of the finite elements of *data*; None: there is none.

    Args:
        without: places of elements to leave out.
    """
    values, left_out = _values(data, dtype), set(without)
    return max((abs(v) for i, v in enumerate(values) if i not in left_out and math.isfinite(v)), default=None)


def farthest(data: bytes, before: bytes, dtype: str, without: Sequence[int] = ()) -> float | None:
    """How far the element that moved most has moved from *before* to *data*; as ``largest`` otherwise."""
    now, then, left_out = _values(data, dtype), _values(before, dtype), set(without)
    moved = (abs(a - b) for i, (a, b) in enumerate(zip(now, then, strict=False)) if i not in left_out)
    return max((m for m in moved if math.isfinite(m)), default=None)


def _values(data: bytes, dtype: str) -> Sequence[float]:
    if dtype == "bfloat16":
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        data, dtype = bytes(wide), "float32"
    form = _FORMATS.get(dtype)
    if form is None:
        return ()
    return struct.unpack(f"<{len(data) // struct.calcsize(form)}{form[1]}", data)
