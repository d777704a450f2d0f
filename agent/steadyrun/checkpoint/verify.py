"""Reads a whole checkpoint and compares it with the checksums and the structure that were stored with it.

Memory use does not grow with the checkpoint: files are read in pieces of 8 MiB, by several threads (reading and CRC32
release the interpreter's lock). Nothing is unpickled.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Final

from steadyrun.checkpoint.checksums import Xxh3, crc32
from steadyrun.checkpoint.contents import Contents, Encoding, Expected, Kind, Piece, Problem, ProblemKind
from steadyrun.checkpoint.manifest import MANIFEST_NAME, ShardRecord
from steadyrun.checkpoint.pickles import PickleError
from steadyrun.checkpoint.torchzip import (
    DamagedArchiveError,
    Record,
    StoredTensor,
    StoredValue,
    read_records,
    stored_value,
)

__all__ = ["Progress", "Report", "Unverified", "cannot_see", "default_threads", "verify"]

# Called by any thread, one at a time: bytes done, bytes in all.
Progress = Callable[[int, int], None]

CANNOT_SEE: Final = (
    "Checksums show damaged bytes, not wrong ones: a file of another step with the same layout, "
    "or values that were wrong when they were saved, pass."
)
CANNOT_SEE_OURS: Final = (
    "Each byte is what was saved, as the manifest has it; values that were wrong when they were saved pass."
)
NO_CHECKSUM_SWITCHED_OFF: Final = "torch.save was told to store no CRC32"
NO_CHECKSUM_COMPRESSED: Final = "compressed records (code of TorchScript) are not checked"
_CHUNK_BYTES: Final = 8 << 20
_TASK_BYTES: Final = 256 << 20
_MOST_DATA_PKL_BYTES: Final = 64 << 20
_PAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Unverified:
    """Bytes that were read, or not even that, and could be compared with nothing."""

    reason: str
    files: tuple[str, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a verification found.

    Attributes:
        read_bytes: read in all.
        checked_bytes: of them, compared with a checksum.
        records: checksums that were compared.
        elapsed_s: seconds that it took.
        is_by_manifest: all of it was compared with a manifest of steadyrun, which also tells steps apart.
    """

    path: Path
    kind: Kind
    problems: tuple[Problem, ...]
    unverified: tuple[Unverified, ...]
    notes: tuple[str, ...]
    tensors: int
    files: int
    read_bytes: int
    checked_bytes: int
    records: int
    elapsed_s: float
    is_by_manifest: bool = False

    @property
    def is_damaged(self) -> bool:
        return bool(self.problems)


def default_threads() -> int:
    """As many as the CPUs that this process may use, 4 at most: more seldom read faster."""
    return min(len(os.sched_getaffinity(0)), 4)


def cannot_see(reports: Sequence[Report]) -> str:
    """What may be wrong although nothing was found; one sentence for all of them."""
    return CANNOT_SEE_OURS if reports and all(r.is_by_manifest for r in reports) else CANNOT_SEE


def verify(contents: Contents, threads: int | None = None, progress: Progress | None = None) -> Report:
    """Check every piece; what cannot be read is a problem in the report, never an exception."""
    started_s = time.monotonic()
    total_bytes = sum(piece.place.length_bytes for piece in contents.pieces)
    tally = _Tally(total_bytes, progress)
    base = contents.path if contents.path.is_dir() else contents.path.parent
    with ThreadPoolExecutor(threads or default_threads(), thread_name_prefix="verify") as pool:
        try:
            futures = [pool.submit(_check_task, base, task, tally) for task in _tasks(contents.pieces)]
            results = [future.result() for future in futures]
        except BaseException:  # an interrupt, too: threads in the middle of a large file must not hold it up
            tally.is_stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    problems = [*contents.problems, *(p for r in results for p in r.problems)]
    unverified: dict[str, list[tuple[str, int]]] = {}
    for result in results:
        for reason, file, size_bytes in result.unverified:
            unverified.setdefault(reason, []).append((file, size_bytes))
    tensors = len(contents.tensors) or sum(r.tensors for r in results)
    return Report(
        contents.path,
        contents.kind,
        tuple(problems),
        tuple(
            Unverified(reason, tuple(dict.fromkeys(f for f, _ in seen)), sum(n for _, n in seen))
            for reason, seen in unverified.items()
        ),
        contents.notes,
        tensors,
        len(contents.files),
        tally.done_bytes,
        sum(r.checked_bytes for r in results),
        sum(r.records for r in results),
        time.monotonic() - started_s,
        _is_by_manifest(contents.pieces),
    )


def _is_by_manifest(pieces: Sequence[Piece]) -> bool:
    whole = {piece.place.file for piece in pieces if piece.xxh3 is not None and piece.key is None}
    return bool(pieces) and all(p.record or p.xxh3 or p.place.file in whole for p in pieces)


def _tasks(pieces: Sequence[Piece]) -> Iterator[tuple[str, list[Piece]]]:
    """Neighbours in one file together, so that each thread reads forward through a stretch of a file."""
    ordered = sorted(pieces, key=lambda p: (p.place.file, p.place.offset_bytes))
    for file, group in groupby(ordered, key=lambda p: p.place.file):
        task: list[Piece] = []
        size_bytes = 0
        for piece in group:
            task.append(piece)
            size_bytes += piece.place.length_bytes
            if size_bytes >= _TASK_BYTES:
                yield file, task
                task, size_bytes = [], 0
        if task:
            yield file, task


class _StoppedError(Exception):
    pass


class _Tally:
    """What all threads add to."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self.is_stopped = threading.Event()
        self.done_bytes = 0
        self._total_bytes = total_bytes
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, size_bytes: int) -> None:
        if self.is_stopped.is_set():
            raise _StoppedError
        with self._lock:
            self.done_bytes += size_bytes
            if self._progress is not None:
                self._progress(self.done_bytes, self._total_bytes)


@dataclass(slots=True)
class _Result:
    """What one task found."""

    problems: list[Problem] = field(default_factory=list)
    unverified: list[tuple[str, str, int]] = field(default_factory=list)
    checked_bytes: int = 0
    records: int = 0
    tensors: int = 0


def _check_task(base: Path, task: tuple[str, Sequence[Piece]], tally: _Tally) -> _Result:
    file, pieces = task
    result = _Result()
    try:
        fd = os.open(base / file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        keys = tuple(dict.fromkeys(p.key for p in pieces if p.key is not None))
        result.problems.append(Problem(ProblemKind.UNREADABLE, f"cannot be opened: {e.strerror}", file, keys))
        return result
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(p.place.length_bytes for p in pieces))))
    try:
        for piece in pieces:
            _Check(fd, piece, buffer, tally, result).run()
    finally:
        os.close(fd)
    return result


class _Check:
    """The check of one piece."""

    def __init__(self, fd: int, piece: Piece, buffer: memoryview, tally: _Tally, result: _Result) -> None:
        self.fd = fd
        self.piece = piece
        self.place = piece.place
        self.buffer = buffer
        self.tally = tally
        self.result = result
        self.reached = 0  # of the piece, for the progress

    def run(self) -> None:
        try:
            if self.piece.record is not None:
                self._check_shard(self.piece.record)
            elif self.piece.xxh3 is not None:
                self._check_digest(self.piece.xxh3)
            elif self.piece.encoding is Encoding.TORCH_ZIP:
                self._check_archive()
            else:
                for _ in self._chunks(0, self.place.length_bytes):
                    pass
                self._unverified(self.piece.no_checksum or "no checksum stored", self.place.length_bytes)
        except DamagedArchiveError as e:
            self._problem(
                ProblemKind.STRUCTURE, f"not the archive that torch.save wrote: {e}", 0, self.place.length_bytes
            )
        except OSError as e:
            text = f"cannot be read: {e.strerror or e}"
            self._problem(ProblemKind.UNREADABLE, text, self.reached, self.place.length_bytes - self.reached)
        self._advance(self.place.length_bytes)

    # -- reading ---------------------------------------------------------------------------------------------------
    def _read(self, offset: int, size: int) -> bytes:
        parts = []
        while size:
            data = os.pread(self.fd, size, self.place.offset_bytes + offset)
            if not data:
                raise OSError(0, f"the file ends at byte {self.place.offset_bytes + offset:,}")
            parts.append(data)
            offset += len(data)
            size -= len(data)
        return b"".join(parts)

    def _chunks(self, offset: int, size: int) -> Iterator[memoryview]:
        while size:
            at = self.place.offset_bytes + offset
            count = os.preadv(self.fd, [self.buffer[: min(size, len(self.buffer))]], at)
            if not count:
                raise OSError(0, f"the file ends at byte {at:,}")
            yield self.buffer[:count]
            offset += count
            size -= count
            self._advance(offset)

    def _advance(self, offset: int) -> None:
        if offset > self.reached:
            self.tally.add(offset - self.reached)
            self.reached = offset

    # -- a piece that a manifest has the digest of -----------------------------------------------------------------
    def _check_digest(self, wanted: str) -> None:
        digest = Xxh3()
        for chunk in self._chunks(0, self.place.length_bytes):
            digest.update(chunk)
        self.result.records += 1
        self.result.checked_bytes += self.place.length_bytes
        if (found := digest.digest()) != wanted:
            what = "the file" if self.piece.key is None else "what"
            text = f"its xxh3 is {found}, by {MANIFEST_NAME} it is {wanted}: it is not {what} that was committed"
            self._problem(ProblemKind.CHECKSUM, text, 0, self.place.length_bytes)

    def _check_shard(self, record: ShardRecord) -> None:
        """The tensor's own bytes, and the archive around them."""
        self.result.tensors += 1
        at, size = record.payload_at_bytes - self.place.offset_bytes, record.payload_bytes
        expected = Expected(record.dtype, record.sizes)
        if not 0 <= at <= at + size <= self.place.length_bytes or self.piece.expected not in (None, expected):
            text = f"the list of checksums says {record.dtype} of shape {list(record.sizes)} at byte {at:,} of it"
            self._problem(ProblemKind.MISMATCH, text, 0, None)
            return
        around, payload = Xxh3(), Xxh3()
        for hasher, first, last in ((around, 0, at), (payload, at, at + size), (around, at + size, None)):
            end = self.place.length_bytes if last is None else last
            for chunk in self._chunks(first, end - first):
                hasher.update(chunk)
        self.result.records += 2
        self.result.checked_bytes += self.place.length_bytes
        for what, found, wanted, first, length in (
            ("the tensor's bytes", payload.digest(), record.xxh3, at, size),
            ("the archive around the tensor", around.digest(), record.archive_xxh3, 0, self.place.length_bytes),
        ):
            if found != wanted:
                zeros = self._zero_pages(first, length) if what.startswith("the tensor") else ""
                text = f"{what}: their xxh3 is {found}, by {MANIFEST_NAME} it is {wanted}{zeros}"
                self._problem(ProblemKind.CHECKSUM, text, first, length)

    # -- an archive of torch.save ----------------------------------------------------------------------------------
    def _check_archive(self) -> None:
        records = read_records(self._read, self.place.length_bytes)
        by_name = {record.name: record for record in records}
        if "data.pkl" not in by_name:
            raise DamagedArchiveError("it has no data.pkl")
        if all(record.crc32 == 0 for record in records):
            size_bytes = sum(record.size_bytes for record in records)
            for _ in self._chunks(0, self.place.length_bytes):
                pass
            self._unverified(NO_CHECKSUM_SWITCHED_OFF, size_bytes)
            bad = []
        else:
            plain = [record for record in records if not record.is_compressed]
            bad = [(record, crc) for record in plain if (crc := self._crc32(record)) != record.crc32]
            self.result.records += len(plain)
            self.result.checked_bytes += sum(record.size_bytes for record in plain)
            if len(plain) < len(records):
                left = sum(record.size_bytes for record in records if record.is_compressed)
                self._unverified(NO_CHECKSUM_COMPRESSED, left)
        value = None if any(r.name == "data.pkl" for r, _ in bad) else self._value(by_name["data.pkl"])
        tensors = () if value is None else value.tensors
        self.result.tensors += len(tensors)
        keys_of: dict[str, list[str]] = {}
        for tensor in tensors:
            keys_of.setdefault(tensor.record, []).append(tensor.key)
        for record, crc in bad:
            zeros = self._zero_pages(record.offset_bytes, record.size_bytes)
            text = (
                f"the bytes of record {record.name} have CRC32 {crc:08x}, stored with them is {record.crc32:08x}{zeros}"
            )
            self._problem(
                ProblemKind.CHECKSUM, text, record.offset_bytes, record.size_bytes, keys_of.get(record.name, ())
            )
        self._compare_storages(tensors, by_name)
        if value is not None:
            self._compare_metadata(value)

    def _crc32(self, record: Record) -> int:
        crc = 0
        for chunk in self._chunks(record.offset_bytes, record.size_bytes):
            crc = crc32(chunk, crc)
        return crc

    def _value(self, data_pkl: Record) -> StoredValue | None:
        if data_pkl.size_bytes > _MOST_DATA_PKL_BYTES:
            return None
        try:
            return stored_value(self._read(data_pkl.offset_bytes, data_pkl.size_bytes))
        except PickleError:
            return None  # its checksum is right: something that is not read here, and no damage

    def _compare_storages(self, tensors: Sequence[StoredTensor], records: Mapping[str, Record]) -> None:
        for tensor in tensors:
            record = records.get(tensor.record)
            have = -1 if record is None else record.size_bytes
            if have < (tensor.needed_bytes or 0):
                what = "is not there" if record is None else f"has {have:,} of the {tensor.needed_bytes:,} bytes needed"
                self._problem(ProblemKind.MISMATCH, f"record {tensor.record} {what}", 0, None, (tensor.key,))

    def _compare_metadata(self, value: StoredValue) -> None:
        """What is stored against what the list of contents says of it."""
        want = self.piece.expected
        if want is None or (value.is_made_by_torch and not value.tensors):
            return  # a kind of tensor that is not read here
        tensor = value.tensors[0] if value.is_made_by_torch else None
        if tensor is None or (tensor.dtype, tensor.shape) != (want.dtype, want.sizes):
            have = "no tensor" if tensor is None else f"{tensor.dtype} of shape {list(tensor.shape)}"
            text = f"holds {have}, by the metadata it is {want.dtype} of shape {list(want.sizes)}"
            self._problem(ProblemKind.MISMATCH, text, 0, None)

    def _zero_pages(self, offset_bytes: int, size_bytes: int) -> str:
        """Says how many whole pages of a damaged range are zero: lost writes look like that."""
        start = self.place.offset_bytes + offset_bytes
        first = -(-start // _PAGE_BYTES) * _PAGE_BYTES
        zero = bytes(_PAGE_BYTES)
        found, first_zero, at = 0, 0, first
        while at + _PAGE_BYTES <= start + size_bytes:
            if os.pread(self.fd, _PAGE_BYTES, at) == zero:
                first_zero = first_zero or at
                found += 1
            at += _PAGE_BYTES
        return f"; {found} of its pages of 4 KiB are all zero, the first at byte {first_zero:,}" if found else ""

    # -- results ---------------------------------------------------------------------------------------------------
    def _problem(
        self, kind: ProblemKind, text: str, offset: int, size_bytes: int | None, keys: Sequence[str] = ()
    ) -> None:
        own = () if self.piece.key is None else (self.piece.key,)
        named = own or tuple(k for k in keys if k)
        at = self.place.offset_bytes + offset
        offsets = self.piece.shard_offsets
        self.result.problems.append(Problem(kind, text, self.place.file, named, offsets, at, size_bytes))

    def _unverified(self, reason: str, size_bytes: int) -> None:
        self.result.unverified.append((reason, self.place.file, size_bytes))
