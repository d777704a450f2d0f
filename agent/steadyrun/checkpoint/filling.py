"""Brings stored shards into tensors: reads a file piece by piece, checksums each piece, puts it where it belongs.

Where the wanted part of a shard is one run of bytes and the tensor takes it as it is, the bytes are read straight into
the tensor; else through a buffer that stays in the cache. No copy of a whole shard is made, except for what torch alone
can read (compressed or transposed entries, subclasses of tensors).
"""

from __future__ import annotations

import ctypes
import functools
import io
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Final

import torch

from steadyrun.checkpoint.checksums import Xxh3, crc32
from steadyrun.checkpoint.contents import Place
from steadyrun.checkpoint.damage import DamagedShardError
from steadyrun.checkpoint.manifest import ShardRecord
from steadyrun.checkpoint.pickles import PickleError
from steadyrun.checkpoint.torchzip import DamagedArchiveError, Record, StoredValue, read_records, stored_value

__all__ = ["Filler", "Job", "StoppedError", "Want", "bad_record"]

# Larger pieces have left the second-level cache when their checksum is computed.
_PIECE_BYTES: Final = 512 << 10
_UNVERIFIED_PIECE_BYTES: Final = 8 << 20
_AHEAD_BYTES: Final = 16 << 20
_SMALL_BYTES: Final = 64 << 10  # archives up to this size are read at once
_EDGE_BYTES: Final = 2048  # of larger ones, at both ends: holds all but the tensor


class StoppedError(Exception):
    """Another thread has found damage; this one need not go on."""


@dataclass(frozen=True, slots=True)
class Want:
    """A box of a stored shard, and the tensor that it goes into (of the box's shape, on any device, any strides)."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class Job:
    """One stored shard and all that is wanted of it.

    Attributes:
        transform: gives the archive's bytes from the stored ones, for entries that were stored compressed, say.
        record: what our manifest says of it; None: only the archive itself tells.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place
    wants: tuple[Want, ...]
    transform: Callable[[bytes], bytes] | None = None
    record: ShardRecord | None = None


@dataclass(frozen=True, slots=True)
class _Payload:
    """A tensor's own bytes: *size_bytes* at *at_bytes* of the archive; its record goes on to *end_bytes*."""

    dtype: torch.dtype
    at_bytes: int
    size_bytes: int
    end_bytes: int


class Filler:
    """Does jobs of one file, in one thread."""

    def __init__(
        self,
        folder: Path,
        is_verifying: bool,
        stop: Event,
        piece_bytes: int | None = None,
        small_bytes: int = _SMALL_BYTES,
    ) -> None:
        self.folder = folder
        self.is_verifying = is_verifying
        self.checked_bytes = 0
        self.unchecked: list[str] = []  # keys of shards without checksum
        self.stop = stop
        self.piece_bytes = piece_bytes or (_PIECE_BYTES if is_verifying else _UNVERIFIED_PIECE_BYTES)
        self.small_bytes = small_bytes
        self._asked_to = 0  # of the file, in bytes
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def run(self, file: str, jobs: Sequence[Job]) -> None:
        """Fill all targets of *jobs*, which lie in *file* in this order.

        Raises:
            DamagedShardError: the first damage found; targets are in no defined state then.
            StoppedError: the event was set.
        """
        try:
            fd = os.open(self.folder / file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as e:
            raise _damage(self.folder, jobs[0], f"the file cannot be opened: {e.strerror}") from e
        self._asked_to = 0
        try:
            for job in jobs:
                if self.stop.is_set():
                    raise StoppedError
                _Filling(self, fd, job).run()
        finally:
            os.close(fd)

    def look_ahead(self, fd: int, at: int) -> None:
        """Have the disk read what comes next: the kernel's own read-ahead, 128 KiB, does not keep a fast one busy.

        Raises StoppedError.
        """
        if at + _AHEAD_BYTES <= self._asked_to:
            return
        if self.stop.is_set():
            raise StoppedError
        begin = max(at, self._asked_to)
        self._asked_to = at + 2 * _AHEAD_BYTES
        os.posix_fadvise(fd, begin, self._asked_to - begin, os.POSIX_FADV_WILLNEED)

    def buffer(self, size_bytes: int) -> torch.Tensor:
        """At least so many bytes, page-locked as soon as a GPU is in use; the same ones every time."""
        if len(self._buffer) < size_bytes:
            is_pinned = bool(torch.cuda.is_available() and torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
            self._buffer = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        return self._buffer


def _damage(folder: Path, job: Job, why: str, at_bytes: int = 0, size_bytes: int | None = None) -> DamagedShardError:
    at_byte = job.place.offset_bytes + at_bytes
    size = job.place.length_bytes - at_bytes if size_bytes is None else size_bytes
    return DamagedShardError(folder, job.place.file, job.key, job.offsets, at_byte, size, why)


class _Filling:
    """One job at work. Offsets are from the begin of the archive unless they say otherwise."""

    def __init__(self, filler: Filler, fd: int, job: Job) -> None:
        self.filler = filler
        self.fd = fd
        self.job = job
        self.length_bytes = job.place.length_bytes
        self.is_verifying = filler.is_verifying
        self._start = job.place.offset_bytes
        self._known: list[tuple[int, bytes]] = []  # parts that have been read already

    def run(self) -> None:
        try:
            if self.job.transform is not None:
                self._fill_transformed(self.job.transform)
            elif self.job.record is not None:
                self._fill_ours(self.job.record)
            else:
                self._fill_archive()
        except (DamagedArchiveError, PickleError) as e:
            raise self._damage(f"it is not the archive that torch.save wrote: {e}") from e
        except OSError as e:
            raise self._damage(f"the file cannot be read: {e.strerror or e}") from e

    def _damage(self, why: str, at_bytes: int = 0, size_bytes: int | None = None) -> DamagedShardError:
        return _damage(self.filler.folder, self.job, why, at_bytes, size_bytes)

    # -- what is stored ----------------------------------------------------------------------------------------------
    def _fill_ours(self, record: ShardRecord) -> None:
        dtype = getattr(torch, record.dtype, None)
        at = record.payload_at_bytes - self._start
        place = (record.at_bytes, record.length_bytes)
        is_inside = at >= 0 and at + record.payload_bytes <= self.length_bytes
        if place != (self._start, self.length_bytes) or record.sizes != self.job.sizes or not is_inside:
            raise self._damage("the metadata and the list of checksums do not say the same of it")
        if not isinstance(dtype, torch.dtype) or math.prod(record.sizes) * dtype.itemsize != record.payload_bytes:
            raise self._damage(f"the list of checksums says {record.payload_bytes:,} bytes of {record.dtype}")
        if self.length_bytes <= self.filler.small_bytes:
            self._know(0, self.length_bytes)
        payload = _Payload(dtype, at, record.payload_bytes, at + record.payload_bytes)
        if not self.is_verifying:
            self._fill(payload, None)
            return
        hasher = Xxh3()
        self._fill(payload, hasher.update)
        self._compare("xxh3", hasher.digest(), record.xxh3, at, record.payload_bytes)
        envelope = Xxh3()
        envelope.update(self.read(0, at))
        envelope.update(self.read(payload.end_bytes, self.length_bytes - payload.end_bytes))
        self._compare("xxh3 around its data", envelope.digest(), record.archive_xxh3, 0, self.length_bytes)
        self.filler.checked_bytes += self.length_bytes

    def _compare(self, what: str, found: str, wanted: str, at: int, size: int) -> None:
        if found != wanted:
            raise self._damage(f"its bytes have the {what} {found}, stored for them is {wanted}", at, size)

    def _fill_archive(self) -> None:
        if self.length_bytes <= self.filler.small_bytes:
            self._know(0, self.length_bytes)
        else:
            self._know(0, _EDGE_BYTES)
            self._know(max(self.length_bytes - _EDGE_BYTES, 0), _EDGE_BYTES)
        records = read_records(self.read, self.length_bytes)
        by_name = {record.name: record for record in records}
        payload, data = self._payload(by_name)
        has_sums = any(record.crc32 for record in records)
        checking = self.is_verifying and has_sums
        if self.is_verifying and not has_sums:
            self.filler.unchecked.append(self.job.key)
        if payload is None or data is None:
            content = self.read(0, self.length_bytes)
            bad = bad_record(content, records) if checking else None
            if bad is not None:
                raise self._damage(*bad)
            self._fill_by_torch(content)
        else:
            crc = 0

            def update(piece: memoryview) -> None:
                nonlocal crc
                crc = crc32(piece, crc)

            self._fill(payload, update if checking else None)
            if checking:
                self._compare("CRC32", f"{crc:08x}", f"{data.crc32:08x}", data.offset_bytes, data.size_bytes)
                for record in records:
                    found = crc if record is data else crc32(self.read(record.offset_bytes, record.size_bytes))
                    if found != record.crc32:
                        raise self._damage(*_bad(record, found))
        if checking:
            self.filler.checked_bytes += self.length_bytes

    def _payload(self, records: dict[str, Record]) -> tuple[_Payload | None, Record | None]:
        """Where the tensor's bytes are; None when only torch can make the tensor."""
        pkl = records.get("data.pkl")
        if pkl is None:
            raise DamagedArchiveError("it has no data.pkl")
        value = _value_of(self.read(pkl.offset_bytes, pkl.size_bytes))
        if value is None or len(value.tensors) != 1 or value.tensors[0].key:
            return None, None
        tensor = value.tensors[0]
        if tensor.shape != self.job.sizes:
            raise self._damage(f"it holds shape {list(tensor.shape)}, by the metadata it is {list(self.job.sizes)}")
        dtype, data, order = getattr(torch, tensor.dtype, None), records.get(tensor.record), records.get("byteorder")
        if not isinstance(dtype, torch.dtype) or data is None or data.is_compressed or not tensor.is_plain:
            return None, None
        if order is None or self.read(order.offset_bytes, order.size_bytes) != _BYTEORDER:
            return None, None
        size = math.prod(tensor.shape) * dtype.itemsize
        if data.size_bytes < size:
            raise self._damage(f"it holds {data.size_bytes:,} of the {size:,} bytes that its shape needs")
        return _Payload(dtype, data.offset_bytes, size, data.offset_bytes + data.size_bytes), data

    def _fill_transformed(self, transform: Callable[[bytes], bytes]) -> None:
        try:
            content = transform(self.read(0, self.length_bytes))
        except OSError:
            raise
        except Exception as e:  # a decompressor raises what it likes
            raise self._damage(f"the transform that it was stored with cannot be undone: {e}") from e
        if self.is_verifying:
            bad = bad_record(content)
            if bad is not None:
                raise self._damage(bad[0])
            self.filler.checked_bytes += self.length_bytes
        self._fill_by_torch(content)

    def _fill_by_torch(self, content: bytes) -> None:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != self.job.sizes:
            have = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise self._damage(f"it holds {have}, by the metadata it is of shape {list(self.job.sizes)}")
        for want in self.job.wants:
            part = tensor
            for d, (offset, length) in enumerate(zip(want.offsets, want.lengths, strict=True)):
                part = part.narrow(d, offset, length)
            want.target.copy_(part)

    # -- into the tensors ----------------------------------------------------------------------------------------------
    def _fill(self, payload: _Payload, check: Callable[[memoryview], Any] | None) -> None:
        """Read the payload, give each piece to *check*, and fill the targets."""
        wants, dtype = self.job.wants, payload.dtype
        run = _run_of(wants[0], self.job.sizes, dtype.itemsize) if len(wants) == 1 else None
        if run is not None and _takes_bytes(wants[0].target, dtype):
            first, size = run
            if check is not None:
                self._skim(payload.at_bytes, first, check)
            target = wants[0].target
            self._read_into(payload.at_bytes + first, _bytes_of(target), check)
            rest = payload.at_bytes + first + size
        else:
            self._fill_rows(payload, check)
            rest = payload.at_bytes + payload.size_bytes
        if check is not None:
            self._skim(rest, payload.end_bytes - rest, check)

    def _fill_rows(self, payload: _Payload, check: Callable[[memoryview], Any] | None) -> None:
        """By way of a buffer: some slices along the first dimension that has more than one, at a time."""
        sizes, wants = self.job.sizes, self.job.wants
        along = next((d for d, n in enumerate(sizes) if n != 1), None)
        if along is None:  # one element
            along, rows = 0, 1
        else:
            rows = sizes[along]
        row_bytes = payload.size_bytes // rows if rows else 0
        if row_bytes == 0:
            return
        at_once = max(min(self.filler.piece_bytes // row_bytes, rows), 1)
        buffer = self.filler.buffer(at_once * row_bytes)
        view = _bytes_of(buffer)
        first, last = 0, rows
        if check is None and sizes:
            first = min(w.offsets[along] for w in wants)
            last = max(w.offsets[along] + w.lengths[along] for w in wants)
        for row in range(first, last, at_once):
            count = min(at_once, last - row)
            part = view[: count * row_bytes]
            self._read_into(payload.at_bytes + row * row_bytes, part, check)
            box = buffer[: len(part)].view(payload.dtype).view(_with(sizes, along, count))
            for want in wants:
                _copy_rows(want, box, along, row, count)

    # -- reading -------------------------------------------------------------------------------------------------------
    def _know(self, offset: int, size: int) -> None:
        self._known.append((offset, self.read(offset, min(size, self.length_bytes - offset))))

    def read(self, offset: int, size: int) -> bytes:
        """These bytes; from what is known already where possible."""
        for at, known in self._known:
            if at <= offset and offset + size <= at + len(known):
                return known[offset - at : offset - at + size]
        parts = []
        while size > 0:
            data = os.pread(self.fd, size, self._start + offset)
            if not data:
                raise OSError(0, f"the file ends at byte {self._start + offset:,}")
            parts.append(data)
            offset += len(data)
            size -= len(data)
        return b"".join(parts)

    def _read_into(self, offset: int, view: memoryview, check: Callable[[memoryview], Any] | None) -> None:
        for at, known in self._known:
            if at <= offset and offset + len(view) <= at + len(known):
                view[:] = known[offset - at : offset - at + len(view)]
                if check is not None:
                    check(view)
                return
        done, size, step = 0, len(view), self.filler.piece_bytes
        while done < size:
            self.filler.look_ahead(self.fd, self._start + offset + done)
            piece = view[done : done + step]
            count = os.preadv(self.fd, [piece], self._start + offset + done)
            if count == 0:
                raise OSError(0, f"the file ends at byte {self._start + offset + done:,}")
            if check is not None:
                check(piece[:count])
            done += count

    def _skim(self, offset: int, size: int, check: Callable[[memoryview], Any]) -> None:
        """Read for the checksum only."""
        if size <= 0:
            return
        view = _bytes_of(self.filler.buffer(min(size, self.filler.piece_bytes)))
        while size > 0:
            part = view[: min(size, len(view))]
            self._read_into(offset, part, check)
            offset += len(part)
            size -= len(part)


_BYTEORDER: Final = sys.byteorder.encode()


@functools.lru_cache(maxsize=4096)
def _value_of(data_pkl: bytes) -> StoredValue | None:
    """Equal for all tensors of one dtype and shape, and a model has many of each."""
    if len(data_pkl) > _SMALL_BYTES:
        return None
    try:
        return stored_value(data_pkl)
    except PickleError:
        return None


def bad_record(content: bytes, records: Sequence[Record] | None = None) -> tuple[str, int, int] | None:
    """The first record of an archive whose CRC32 is wrong: what to say, where it begins, how long it is."""
    if records is None:
        records = read_records(lambda offset, size: content[offset : offset + size], len(content))
    for record in records:
        end = record.offset_bytes + record.size_bytes
        if (
            not record.is_compressed
            and (found := crc32(memoryview(content)[record.offset_bytes : end])) != record.crc32
        ):
            return _bad(record, found)
    return None


def _bad(record: Record, found: int) -> tuple[str, int, int]:
    why = f"the bytes of record {record.name} have the CRC32 {found:08x}, stored with them is {record.crc32:08x}"
    return why, record.offset_bytes, record.size_bytes


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of the CPU; valid as long as the tensor is."""
    size_bytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size_bytes).from_address(tensor.data_ptr())).cast("B")


def _takes_bytes(target: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        type(target) is torch.Tensor
        and target.device.type == "cpu"
        and target.dtype == dtype
        and target.layout is torch.strided
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def _run_of(want: Want, sizes: Sequence[int], itemsize: int) -> tuple[int, int] | None:
    """Where the wanted box begins in the shard and how long it is, in bytes, if it is one run of bytes."""
    is_partial_below = False
    first, stride = 0, itemsize
    for offset, length, size in zip(reversed(want.offsets), reversed(want.lengths), reversed(sizes), strict=True):
        if is_partial_below and length != 1:
            return None
        is_partial_below = is_partial_below or length != size
        first += offset * stride
        stride *= size
    return first, math.prod(want.lengths) * itemsize


def _with(sizes: Sequence[int], along: int, count: int) -> tuple[int, ...]:
    return tuple(count if d == along else n for d, n in enumerate(sizes))


def _copy_rows(want: Want, box: torch.Tensor, along: int, row: int, count: int) -> None:
    """Copy what *want* takes of the slices from *row* on."""
    target = want.target
    for d, (offset, length) in enumerate(zip(want.offsets, want.lengths, strict=True)):
        if d == along:
            first, last = max(offset, row), min(offset + length, row + count)
            if first >= last:
                return
            box = box.narrow(d, first - row, last - first)
            target = target.narrow(d, first - offset, last - first)
        elif length != box.shape[d]:
            box = box.narrow(d, offset, length)
    target.copy_(box)
