"""Public traces of large jobs: own-work time per worker and step (ByteDance-Seed/StragglerAnalysis, Apache-2.0).

A small reader of the Parquet that those files are: one file, flat optional columns, data pages of version 1, plain or
dictionary encoding, Snappy or nothing. pyarrow reads everything else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from steadyrun.core.timing import Role
from steadyrun.detect.straggler.records import StepDetails, StepFrame

__all__ = ["Trace", "read_columns", "read_trace"]

MAGIC: Final = b"PAR1"
INT32, INT64, DOUBLE, BYTES = 1, 2, 5, 6
_TYPES: Final[Mapping[int, str]] = {INT32: "<i4", INT64: "<i8", 4: "<f4", DOUBLE: "<f8"}
PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY = 0, 2, 8
UNCOMPRESSED, SNAPPY = 0, 1
DATA_PAGE, DICTIONARY_PAGE = 0, 2


# -- Thrift's compact protocol -----------------------------------------------------------------------------------------
class _Thrift:
    """Reads structures as {field number: value}."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data = data
        self.at = at

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def integer(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)

    def struct(self) -> dict[int, Any]:
        out: dict[int, Any] = {}
        number = 0
        while True:
            head = self._data[self.at]
            self.at += 1
            if head == 0:
                return out
            number = number + (head >> 4) if head >> 4 else self.integer()
            out[number] = self._value(head & 0x0F)

    def _value(self, kind: int) -> Any:
        if kind in (1, 2):
            return kind == 1
        if kind == 3:
            self.at += 1
            return self._data[self.at - 1]
        if kind in (4, 5, 6):
            return self.integer()
        if kind == 7:
            self.at += 8
            return struct.unpack_from("<d", self._data, self.at - 8)[0]
        if kind == 8:
            size = self.varint()
            self.at += size
            return self._data[self.at - size : self.at]
        if kind in (9, 10):
            head = self._data[self.at]
            self.at += 1
            size = head >> 4 if head >> 4 != 15 else self.varint()
            return [self._value(head & 0x0F) for _ in range(size)]
        if kind == 12:
            return self.struct()
        raise ValueError(f"cannot read the file: Thrift type {kind} at byte {self.at}")


# -- pages -------------------------------------------------------------------------------------------------------------
def _snappy(data: bytes) -> bytes:
    """Decompressed *data*, in Snappy's raw format."""
    reader = _Thrift(data)
    size = reader.varint()
    at, out = reader.at, bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        if tag & 3 == 0:
            length = tag >> 2
            if length >= 60:
                extra = length - 59
                length = int.from_bytes(data[at : at + extra], "little")
                at += extra
            out += data[at : at + length + 1]
            at += length + 1
            continue
        if tag & 3 == 1:
            length, back = (tag >> 2 & 7) + 4, (tag >> 5) << 8 | data[at]
            at += 1
        else:
            width = 2 if tag & 3 == 2 else 4
            length, back = (tag >> 2) + 1, int.from_bytes(data[at : at + width], "little")
            at += width
        if not 0 < back <= len(out):
            raise ValueError("cannot read the file: a Snappy copy from before its beginning")
        piece = bytes(out[-back:][:length])
        out += (piece * (length // len(piece) + 1))[:length]
    if len(out) != size:
        raise ValueError(f"cannot read the file: a Snappy block of {len(out)} bytes that should have {size}")
    return bytes(out)


def _hybrid(data: bytes, width: int, count: int) -> NDArray[np.int64]:
    """*count* values of the run-length and bit-packed mixture."""
    if width == 0:
        return np.zeros(count, np.int64)
    reader = _Thrift(data)
    parts: list[NDArray[np.int64]] = []
    have = 0
    while have < count:
        head = reader.varint()
        if head & 1:
            size = (head >> 1) * width
            bits = np.unpackbits(np.frombuffer(data, np.uint8, size, reader.at), bitorder="little")
            part = bits.reshape(-1, width).astype(np.int64) @ (1 << np.arange(width, dtype=np.int64))
            reader.at += size
        else:
            size = (width + 7) // 8
            value = int.from_bytes(data[reader.at : reader.at + size], "little")
            part = np.full(head >> 1, value, np.int64)
            reader.at += size
        parts.append(part)
        have += len(part)
    return np.concatenate(parts)[:count]


def _plain(data: bytes, kind: int, count: int) -> NDArray[Any]:
    if kind == BYTES:
        out, at = [], 0
        for _ in range(count):
            size = int.from_bytes(data[at : at + 4], "little")
            out.append(data[at + 4 : at + 4 + size].decode())
            at += 4 + size
        return np.array(out, dtype=object)
    if kind not in _TYPES:
        raise ValueError(f"cannot read the file: a column of type {kind} (pyarrow can)")
    return np.frombuffer(data, _TYPES[kind], count)


def _column(data: bytes, meta: Mapping[int, Any], optional: bool) -> NDArray[Any]:
    """The values of one column chunk; rows without a value are not supported."""
    kind, codec, total = meta[1], meta[4], meta[5]
    at = meta.get(11, meta[9])
    dictionary: NDArray[Any] | None = None
    parts: list[NDArray[Any]] = []
    have = 0
    while have < total:
        reader = _Thrift(data, at)
        head = reader.struct()
        body = data[reader.at : reader.at + head[3]]
        at = reader.at + head[3]
        if codec == SNAPPY:
            body = _snappy(body)
        elif codec != UNCOMPRESSED:
            raise ValueError(f"cannot read the file: compression {codec} (pyarrow can)")
        if head[1] == DICTIONARY_PAGE:
            dictionary = _plain(body, kind, head[7][1])
            continue
        if head[1] != DATA_PAGE:
            raise ValueError(f"cannot read the file: a page of type {head[1]} (pyarrow can)")
        count, encoding = head[5][1], head[5][2]
        have += count
        if optional:
            size = int.from_bytes(body[:4], "little")
            if not (_hybrid(body[4 : 4 + size], 1, count) == 1).all():
                raise ValueError("cannot read the file: it has rows without a value (pyarrow can)")
            body = body[4 + size :]
        if encoding == PLAIN:
            parts.append(_plain(body, kind, count))
        elif encoding in (PLAIN_DICTIONARY, RLE_DICTIONARY) and dictionary is not None:
            parts.append(dictionary[_hybrid(body[1:], body[0], count)])
        else:
            raise ValueError(f"cannot read the file: encoding {encoding} (pyarrow can)")
    return np.concatenate(parts)


def read_columns(path: Path, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """The columns *names* of a Parquet file.

    Raises:
        ValueError: it is none, lacks a column, or uses what this reader does not know.
    """
    data = path.read_bytes()
    if data[:4] != MAGIC or data[-4:] != MAGIC:
        raise ValueError(f"cannot read {path}: not a Parquet file")
    footer = _Thrift(data, len(data) - 8 - int.from_bytes(data[-8:-4], "little")).struct()
    optional = {item[4].decode(): item.get(3, 0) == 1 for item in footer[2]}
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    for group in footer[4]:
        for chunk in group[1]:
            name = chunk[3][3][0].decode()
            if name in parts:
                parts[name].append(_column(data, chunk[3], optional[name]))
    missing = [name for name, found in parts.items() if not found]
    if missing:
        raise ValueError(f"cannot read {path}: no column {', '.join(missing)}; it has {', '.join(optional)}")
    return {name: np.concatenate(found) for name, found in parts.items()}


# -- traces ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Own work of each worker in each step.

    Attributes:
        workers: (pipeline stage, data-parallel index), in the order of *busy_s*'s columns.
        steps: their numbers; one in ten was recorded.
        busy_s: [steps, workers] seconds, the sum of forward and backward computation.
        reduce_s: [steps, workers] seconds in the reduction of gradients over data parallel, waiting included.
        wall_s: [steps] from the first start to the last end of anything.
    """

    workers: tuple[tuple[int, int], ...]
    steps: NDArray[np.int64]
    busy_s: NDArray[np.float64]
    reduce_s: NDArray[np.float64]
    wall_s: NDArray[np.float64]

    def roles(self) -> dict[int, Role]:
        """Workers of one stage are comparable."""
        return {rank: Role(f"stage {stage}", (stage,)) for rank, (stage, _) in enumerate(self.workers)}

    def replicas(self) -> dict[str, list[int]]:
        """All stages of one data-parallel index."""
        out: dict[str, list[int]] = {}
        for rank, (_, index) in enumerate(self.workers):
            out.setdefault(f"dp {index}", []).append(rank)
        return out

    def frames(self) -> Iterator[StepFrame]:
        for index, step in enumerate(self.steps.tolist()):
            wall_s = np.full(len(self.workers), self.wall_s[index])
            details = StepDetails(wall_s=wall_s, group_wait_s=self.reduce_s[index])
            yield StepFrame(step, self.busy_s[index], details=details)


def read_trace(path: Path) -> Trace:
    """A trace of StragglerAnalysis (``trace-AR.parquet`` and its like)."""
    columns = read_columns(path, ("dp_rank", "stage", "step", "optype", "start_ts", "duration"))
    kinds = columns["optype"].astype(str)
    steps, at_step = np.unique(columns["step"], return_inverse=True)
    pairs = np.stack([columns["stage"], columns["dp_rank"]], axis=1)
    workers, at_worker = np.unique(pairs, axis=0, return_inverse=True)
    at_worker = at_worker.reshape(-1)

    def summed(chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
        out = np.zeros((len(steps), len(workers)))
        np.add.at(out, (at_step[chosen], at_worker[chosen]), columns["duration"][chosen].astype(np.float64))
        return out

    start_s, end_s = columns["start_ts"], columns["start_ts"] + columns["duration"]
    first_s, last_s = np.full(len(steps), np.inf), np.full(len(steps), -np.inf)
    np.minimum.at(first_s, at_step, start_s)
    np.maximum.at(last_s, at_step, end_s)
    is_compute = np.char.find(kinds, "compute") >= 0
    is_reduce = np.char.find(kinds, "reduce") >= 0
    return Trace(
        workers=tuple((int(stage), int(index)) for stage, index in workers),
        steps=steps.astype(np.int64),
        busy_s=summed(is_compute),
        reduce_s=summed(is_reduce),
        wall_s=last_s - first_s,
    )
