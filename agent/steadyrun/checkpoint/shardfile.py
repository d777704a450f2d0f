"""Writes one rank's files of a checkpoint: its tensors, its objects, and the checksums of both.

One pass from front to back. Each tensor is looked at in pieces; a piece is hashed (xxh3-128 for us, CRC32 for torch)
and then written by a second thread while the next one is hashed. Large tensors go from where they lie straight to the
disk, by direct I/O where the file system has it: that costs a sixth of the CPU of a buffered write with fsync and
leaves the page cache to the training data. Small ones are gathered into larger writes.

In a file system that lies in memory, a write is a copy into new pages, one write to a file at a time. There the thread
that hashes a piece writes it, too, in pieces that the write finds in the core's own cache: a tenth less CPU than with a
second thread, which would have to fetch them again. No pages are asked for in advance, as that takes half as long as
the copy.

Every byte of the files belongs to an archive or an object and so to a checksum of the fragment; nothing lies between.

Nothing outside of the given folder is touched, and everything is opened relative to that very folder: a writer that is
late, and whose folder was replaced meanwhile, cannot write into the new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import fcntl
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steadyrun.checkpoint.checksums import Bytes, Xxh3, crc32, xxh3
from steadyrun.checkpoint.envelope import Envelope, envelope
from steadyrun.checkpoint.layout import ALIGN_BYTES, Entry, Layout
from steadyrun.checkpoint.libc import libc_function
from steadyrun.checkpoint.manifest import (
    FileRecord,
    Fragment,
    ObjectRecord,
    ShardRecord,
    fragment_name,
    objects_name,
    tensors_name,
)
from steadyrun.checkpoint.planning import Part
from steadyrun.core.errors import SteadyrunError

__all__ = [
    "Placed",
    "Progress",
    "RateLimit",
    "WriteError",
    "WriteOptions",
    "WriteReason",
    "Written",
    "placed",
    "write_rank_files",
]

# Bytes done, bytes in all; called by the thread that called write_rank_files. What it raises ends the write.
Progress = Callable[[int, int], None]

_PIECE_BYTES: Final = 8 << 20
_CACHED_BYTES: Final = 1 << 20  # about half of a core's own cache
_COPIED_BYTES: Final = 256 << 10  # smaller payloads are cheaper to copy together than to write alone
_SYNC_FILE_RANGE_WRITE: Final = 2  # linux/fs.h
_LOOK_AGAIN_S: Final = 0.1
_NO_DIRECT: Final = (errno.EINVAL, errno.ENOTSUP)
_IN_MEMORY: Final = (0x01021994, 0x858458F6)  # linux/magic.h: tmpfs, ramfs
_STATFS_BYTES: Final = 256  # the structure has 120 at most; it begins with the type, a word of the machine


class WriteReason(enum.Enum):
    """Why a file could not be written, for metrics and for what to advise."""

    FULL = "full"
    QUOTA = "quota"
    READ_ONLY = "read_only"
    PERMISSION = "permission"
    GONE = "gone"
    IO = "io"
    OTHER = "other"


_REASONS: Final[Mapping[int, WriteReason]] = {
    errno.ENOSPC: WriteReason.FULL,
    errno.EDQUOT: WriteReason.QUOTA,
    errno.EFBIG: WriteReason.QUOTA,
    errno.EROFS: WriteReason.READ_ONLY,
    errno.EACCES: WriteReason.PERMISSION,
    errno.EPERM: WriteReason.PERMISSION,
    errno.EIO: WriteReason.IO,
    **dict.fromkeys(
        (errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.EHOSTDOWN),
        WriteReason.GONE,
    ),
}
_ADVICE: Final[Mapping[WriteReason, str]] = {
    WriteReason.FULL: "free space there, keep fewer checkpoints, or write them elsewhere",
    WriteReason.QUOTA: "raise the limit (quota, or ulimit -f of the process), or keep fewer checkpoints",
    WriteReason.READ_ONLY: "mount it writable; a disk that has become read-only by itself has had an error (see dmesg)",
    WriteReason.PERMISSION: "give the user of the job write access to it",
    WriteReason.GONE: "look whether it is still mounted, and whether something removes it while it is written",
    WriteReason.IO: "look for disk or network storage errors in dmesg",
    WriteReason.OTHER: "see the error",
}


class WriteError(SteadyrunError):
    """A rank's files could not be written; none of them is left. Earlier checkpoints are as they were."""

    def __init__(self, text: str, reason: WriteReason) -> None:
        super().__init__(text)
        self.reason = reason

    @classmethod
    def of(cls, what: str, error: OSError) -> WriteError:
        reason = _REASONS.get(error.errno or 0, WriteReason.OTHER)
        return cls(f"cannot write {what}: {error.strerror or error}; {_ADVICE[reason]}", reason)


# -- options ---------------------------------------------------------------------------------------------------------
class RateLimit:
    """Lets writers of one node go on at no more than so many bytes per second together. For any threads.

    Args:
        most_bytes_per_s: > 0.
        clock: seconds, monotonic.
        pause: waits so many seconds.
    """

    def __init__(
        self,
        most_bytes_per_s: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        if not most_bytes_per_s > 0:
            raise ValueError(f"most_bytes_per_s={most_bytes_per_s!r} must be above 0")
        self._rate = most_bytes_per_s
        self._clock = clock
        self._pause = pause
        self._lock = threading.Lock()
        self._free_at_s = clock()

    def wait_for(self, size_bytes: int) -> None:
        """Waits until *size_bytes* may be written. What was not used before is lost: there are no bursts."""
        with self._lock:
            now_s = self._clock()
            begin_s = max(now_s, self._free_at_s)
            self._free_at_s = begin_s + size_bytes / self._rate
        if begin_s > now_s:
            self._pause(begin_s - now_s)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How files are written.

    Attributes:
        direct: use direct I/O where the file system has it.
        reserve: ask for all space first, so that a full disk is noticed before anything is written. Where files lie in
            memory, it is only looked whether there is enough.
        sync: fsync files; off only where the storage cannot (and then a checkpoint is not durable).
        read_back: read everything back from the device and compare it.
        rate: shared by all writers of a node; None: no limit.
        in_flight: pieces that are being written, or wait for it, at a time.
        piece_bytes: a multiple of 4096.
        appear_within_s: how long a folder that another node has made may take to be seen here; network file systems
            remember for up to a minute that a name was not there.
    """

    direct: bool = True
    reserve: bool = True
    sync: bool = True
    read_back: bool = False
    rate: RateLimit | None = None
    in_flight: int = 2
    piece_bytes: int = _PIECE_BYTES
    appear_within_s: float = 0.0

    def __post_init__(self) -> None:
        if self.piece_bytes <= 0 or self.piece_bytes % ALIGN_BYTES:
            raise ValueError(f"piece_bytes={self.piece_bytes} must be a multiple of {ALIGN_BYTES}")
        if self.in_flight < 1:
            raise ValueError(f"in_flight={self.in_flight} must be at least 1")


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a rank's pieces lie in its files; see ``dcpfile.Storage``."""

    shards: tuple[tuple[str, tuple[int, ...], int, int], ...]
    objects: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """What was written.

    Attributes:
        files: of the rank, durable.
        replica_digests: by group of replicas: one digest over the digests of all its entries that this rank holds;
            equal on all ranks of the group exactly when all their bytes are.
        digests: xxh3 of the payload by index of the entry, of all that were written or compared.
        objects, shards: as ``dcpfile`` wants them.
        cpu_s: of all threads that took part.
    """

    files: tuple[FileRecord, ...]
    fragment: Fragment
    replica_digests: dict[int, str]
    digests: dict[int, str]
    objects: tuple[tuple[str, int, int], ...]
    shards: tuple[tuple[str, tuple[int, ...], int, int], ...]
    cpu_s: float
    elapsed_s: float


# -- where everything goes -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Shard:
    index: int
    entry: Entry
    at_bytes: int
    envelope: Envelope


def _shards(layout: Layout, part: Part) -> list[_Shard]:
    out = []
    at_bytes = 0
    for index in part.entries:
        entry = layout.entries[index]
        around = envelope(entry.dtype, entry.sizes, entry.size_bytes, at_bytes)
        out.append(_Shard(index, entry, at_bytes, around))
        at_bytes += around.length_bytes
    return out


def placed(layout: Layout, part: Part, object_bytes: Sequence[int] = ()) -> Placed:
    """Where the pieces of that part lie, or will lie; known without writing them.

    Args:
        object_bytes: lengths of the objects of *part*, in its order.
    """
    shards = tuple((s.entry.key, s.entry.offsets, s.at_bytes, s.envelope.length_bytes) for s in _shards(layout, part))
    objects = []
    at_bytes = 0
    for index, length_bytes in zip(part.objects, object_bytes, strict=bool(object_bytes)):
        objects.append((layout.objects[index].key, at_bytes, length_bytes))
        at_bytes += length_bytes
    return Placed(shards, tuple(objects))


# -- writing ---------------------------------------------------------------------------------------------------------
def write_rank_files(
    folder: Path,
    layout: Layout,
    part: Part,
    payload: Callable[[Entry], memoryview],
    blobs: Sequence[Bytes],
    options: WriteOptions = WriteOptions(),
    progress: Progress | None = None,
) -> Written:
    """Write what *part* says of one rank's snapshot into *folder*, durably.

    Args:
        folder: exists; files of an earlier try in it are replaced.
        payload: the bytes of an entry, contiguous. They must not change before this returns, and the view itself must
            keep the memory alive: it is still being written when the next entry is asked for.
        blobs: of all objects of *layout*, in its order.

    Raises:
        WriteError: none of the files is left then.
        ValueError: *payload* or *blobs* do not fit the layout.
    """
    return _RankWriter(folder, layout, part, payload, blobs, options, progress).run()


class _RankWriter:
    """One call of write_rank_files."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        part: Part,
        payload: Callable[[Entry], memoryview],
        blobs: Sequence[Bytes],
        options: WriteOptions,
        progress: Progress | None,
    ) -> None:
        if len(blobs) != len(layout.objects):
            raise ValueError(f"{len(blobs)} blobs for {len(layout.objects)} objects of rank {layout.rank}")
        self._folder = folder
        self._layout = layout
        self._part = part
        self._payload = payload
        self._blobs = blobs
        self._options = options
        self._progress = progress
        self._shards = _shards(layout, part)
        written = set(part.entries)
        self._only_compared = [i for _, indices in part.replicas for i in indices if i not in written]
        self._total_bytes = sum(s.envelope.length_bytes for s in self._shards)
        self._total_bytes += sum(len(blobs[i]) for i in part.objects)
        self._total_bytes += sum(layout.entries[i].size_bytes for i in self._only_compared)
        self._done_bytes = 0
        self._digests: dict[int, str] = {}
        self._cpu = _Cpu()

    def run(self) -> Written:
        started_s, cpu_started_s = time.monotonic(), time.thread_time()
        rank = self._layout.rank
        what = f"the files of rank {rank} in {self._folder}"
        try:
            folder_fd = _open_folder(self._folder, started_s + self._options.appear_within_s)
        except OSError as e:
            raise WriteError.of(what, e) from e
        names = (tensors_name(rank), objects_name(rank), fragment_name(rank))
        try:
            shards = self._write_tensors(folder_fd, names[0])
            objects = self._write_objects(folder_fd, names[1])
            self._compare_only()
            combined, replicas = self._replicas()
            fragment = Fragment(rank, tuple(shards), tuple(objects), replicas)
            text = fragment.to_json().encode()
            self._write_all(folder_fd, names[2], [text], len(text))
            if self._options.read_back:
                _read_back(folder_fd, what, fragment, self._options.piece_bytes, self._cpu)
            files = self._files(folder_fd, names, xxh3(text))
        except BaseException as e:
            for name in names:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder_fd)
            if isinstance(e, OSError):
                raise WriteError.of(what, self._what_it_means(e)) from e
            raise
        finally:
            os.close(folder_fd)
        return Written(
            files,
            fragment,
            combined,
            self._digests,
            tuple((o.key, o.at_bytes, o.length_bytes) for o in objects),
            tuple((s.key, s.offsets, s.at_bytes, s.length_bytes) for s in shards),
            self._cpu.seconds + time.thread_time() - cpu_started_s,
            time.monotonic() - started_s,
        )

    def _what_it_means(self, e: OSError) -> OSError:
        """A mount that vanishes answers writes with EIO, and a look at the folder with what is really wrong."""
        if e.errno == errno.EIO:
            try:
                os.stat(self._folder)
            except OSError as why:
                return why
        return e

    # -- the three files -------------------------------------------------------------------------------------------
    def _write_tensors(self, folder_fd: int, name: str) -> list[ShardRecord]:
        if not self._shards:
            return []
        last = self._shards[-1]
        with _File(folder_fd, name, last.at_bytes + last.envelope.length_bytes, self._options, self._cpu) as out:
            records = [self._write_shard(out, shard) for shard in self._shards]
            out.finish()
        return records

    def _write_shard(self, out: _File, shard: _Shard) -> ShardRecord:
        entry, around = shard.entry, shard.envelope
        view = self._bytes_of(entry)
        prefix = around.prefix
        out.append(prefix)
        whole = Xxh3()
        crc = 0
        # Only whole pages can go straight to the disk; the rest of the last one goes along with what follows it.
        straight = len(view) - len(view) % ALIGN_BYTES if len(view) >= _COPIED_BYTES and _is_aligned(view) else 0
        for at in range(0, len(view), out.piece_bytes):
            piece = view[at : at + out.piece_bytes]
            whole.update(piece)
            crc = crc32(piece, crc)
            pages = min(max(straight - at, 0), len(piece))
            if pages:
                out.append_pages(piece[:pages])
            out.append(piece[pages:])
            self._advance(len(piece))
        suffix = around.suffix(crc)
        out.append(suffix)
        self._advance(len(prefix) + len(suffix))
        digest = self._digests[shard.index] = whole.digest()
        return ShardRecord(
            entry.key,
            entry.offsets,
            entry.sizes,
            entry.dtype,
            shard.at_bytes,
            around.length_bytes,
            shard.at_bytes + len(prefix),
            len(view),
            digest,
            xxh3(prefix + suffix),
        )

    def _write_objects(self, folder_fd: int, name: str) -> list[ObjectRecord]:
        records = []
        at_bytes = 0
        for index in self._part.objects:
            blob = self._blobs[index]
            key = self._layout.objects[index].key
            records.append(ObjectRecord(key, at_bytes, len(blob), xxh3(blob)))
            at_bytes += len(blob)
        if records:
            self._write_all(folder_fd, name, [self._blobs[i] for i in self._part.objects], at_bytes)
            self._advance(at_bytes)
        return records

    def _write_all(self, folder_fd: int, name: str, parts: Sequence[Bytes], size_bytes: int) -> None:
        with _File(folder_fd, name, size_bytes, self._options, self._cpu) as out:
            for part in parts:
                out.append(part)
            out.finish()

    def _files(self, folder_fd: int, names: tuple[str, str, str], fragment_xxh3: str) -> tuple[FileRecord, ...]:
        """The files as they are found by name, and the folder where it was."""
        if self._options.sync:
            _sync_folder(folder_fd)
        own, there = os.fstat(folder_fd), os.stat(self._folder)
        if (own.st_dev, own.st_ino) != (there.st_dev, there.st_ino):
            raise OSError(errno.ESTALE, "the folder was replaced while it was written")
        records = []
        for name, is_there in zip(names, (bool(self._shards), bool(self._part.objects), True), strict=True):
            if is_there:
                size_bytes = os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_size
                records.append(FileRecord(name, size_bytes, fragment_xxh3 if name == names[2] else ""))
        return tuple(records)

    # -- replicas --------------------------------------------------------------------------------------------------
    def _compare_only(self) -> None:
        for index in self._only_compared:
            view = self._bytes_of(self._layout.entries[index])
            whole = Xxh3()
            for at in range(0, len(view), self._options.piece_bytes):
                piece = view[at : at + self._options.piece_bytes]
                whole.update(piece)
                self._advance(len(piece))
            self._digests[index] = whole.digest()

    def _replicas(self) -> tuple[dict[int, str], dict[str, str]]:
        combined: dict[int, str] = {}
        each: dict[str, str] = {}
        for group, indices in self._part.replicas:
            total = Xxh3()
            for index in indices:
                digest = self._digests[index]
                entry = self._layout.entries[index]
                each[f"{entry.key}@{','.join(map(str, entry.offsets))}"] = digest
                total.update(bytes.fromhex(digest))
            combined[group] = total.digest()
        return combined, each

    # -- small things ----------------------------------------------------------------------------------------------
    def _bytes_of(self, entry: Entry) -> memoryview:
        view = self._payload(entry).cast("B")
        if len(view) != entry.size_bytes:
            raise ValueError(f"{len(view):,} bytes are given for {entry.key!r}, which has {entry.size_bytes:,}")
        return view

    def _advance(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


def _open_folder(folder: Path, until_s: float) -> int:
    while True:
        try:
            return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            if time.monotonic() >= until_s:
                raise
        with contextlib.suppress(OSError):
            os.listdir(folder.parent)  # lets the client of a network file system look anew
        time.sleep(_LOOK_AGAIN_S)


class _Cpu:
    """CPU seconds of helping threads."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        started_s = time.thread_time()
        try:
            yield
        finally:
            with self._lock:
                self.seconds += time.thread_time() - started_s


def _is_aligned(view: memoryview) -> bool:
    """Whether it begins on a page; of memory that cannot be written to, that is not asked."""
    if view.readonly:
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGN_BYTES == 0


class _File:
    """A file of known length, written from front to back: by helping threads, or by the caller if it lies in memory.

    All writes begin on a page boundary of the file and, but for the end, fill whole pages, from page-aligned memory.

    Attributes:
        piece_bytes: what to append at a time.
    """

    def __init__(self, folder_fd: int, name: str, size_bytes: int, options: WriteOptions, cpu: _Cpu) -> None:
        self._name = name
        self._folder_fd = folder_fd
        self._size_bytes = size_bytes
        self._options = options
        self._cpu = cpu
        self._at_bytes = 0  # where in the file the buffer begins
        self._used = 0  # bytes in the buffer
        self._buffer = mmap.mmap(-1, min(options.piece_bytes, max(_pages_of(size_bytes), ALIGN_BYTES)))
        self._spare: list[mmap.mmap] = []
        self._flying: deque[tuple[Future[None], mmap.mmap | None]] = deque()  # with the buffer that is being written
        self._is_direct = options.direct
        self._fd, is_in_memory = self._open()
        self.piece_bytes = options.piece_bytes
        self._pool: ThreadPoolExecutor | None = None
        if is_in_memory:
            self.piece_bytes = min(self.piece_bytes, _CACHED_BYTES)
        else:
            # Two buffered writes to one file wait for each other, and burn a processor by it: the inode's lock spins.
            threads = options.in_flight if self._is_direct else 1
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="checkpoint-write")

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        # Threads may still read the payload: nobody may free or overwrite it before they are done.
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._flying.clear()
        os.close(self._fd)

    # -- what the caller does --------------------------------------------------------------------------------------
    def append(self, data: Bytes) -> None:
        """Copies *data*."""
        view = memoryview(data).cast("B")
        while view:
            room = len(self._buffer) - self._used
            if not room:
                self._flush()
                continue
            taken = view[:room]
            self._buffer[self._used : self._used + len(taken)] = taken
            self._used += len(taken)
            view = view[len(taken) :]

    def append_pages(self, view: memoryview) -> None:
        """Writes from where *view* lies: whole aligned pages, at a page boundary of the file."""
        assert self._used % ALIGN_BYTES == 0
        assert len(view) % ALIGN_BYTES == 0
        self._flush(view)

    def finish(self) -> None:
        """Everything is in the file, and on the device, when this returns."""
        end_bytes = self._at_bytes + self._used
        assert end_bytes == self._size_bytes, (end_bytes, self._size_bytes)
        if self._used:
            padded = _pages_of(self._used)
            self._buffer[self._used : padded] = bytes(padded - self._used)
            self._used = padded
            self._flush()
        self._wait_for_writes(0)
        os.ftruncate(self._fd, self._size_bytes)
        if self._options.sync:
            os.fsync(self._fd)
        if not self._is_direct:
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    # -- opening ---------------------------------------------------------------------------------------------------
    def _open(self) -> tuple[int, bool]:
        """Its descriptor, and whether it lies in memory."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            if not self._is_direct:
                raise OSError(errno.EINVAL, "not wanted")
            fd = os.open(self._name, flags | os.O_DIRECT, 0o666, dir_fd=self._folder_fd)
        except OSError as e:
            if e.errno not in _NO_DIRECT:
                raise
            self._is_direct = False
            fd = os.open(self._name, flags, 0o666, dir_fd=self._folder_fd)
        try:
            is_in_memory = _is_in_memory(fd)
            if self._options.reserve and self._size_bytes:
                if is_in_memory:
                    os.ftruncate(fd, _pages_of(self._size_bytes))  # refused beyond the limit of the process
                    _look_for_space(fd, self._size_bytes)
                else:
                    _reserve(fd, _pages_of(self._size_bytes))
        except BaseException:
            os.close(fd)
            raise
        return fd, is_in_memory

    # -- writing ---------------------------------------------------------------------------------------------------
    def _flush(self, more: memoryview | None = None) -> None:
        """Hands the buffer, and *more* behind it, to a writing thread, or writes them."""
        parts = []
        if self._used:
            parts.append(memoryview(self._buffer)[: self._used])
        if more is not None:
            parts.append(more)
        size_bytes = sum(len(p) for p in parts)
        if not size_bytes:
            return
        self._wait_for_writes(self._options.in_flight - 1)
        if self._options.rate is not None:
            self._options.rate.wait_for(size_bytes)
        if self._pool is None:
            self._write(parts, self._at_bytes)
        else:
            lent = self._buffer if self._used else None
            self._flying.append((self._pool.submit(self._help, parts, self._at_bytes), lent))
            if lent is not None:
                self._buffer = self._spare.pop() if self._spare else mmap.mmap(-1, len(lent))
        self._used = 0
        self._at_bytes += size_bytes

    def _wait_for_writes(self, most: int) -> None:
        while len(self._flying) > most:
            future, lent = self._flying.popleft()
            future.result()
            if lent is not None:
                self._spare.append(lent)

    def _help(self, parts: Sequence[memoryview], at_bytes: int) -> None:
        with self._cpu.counted():
            self._write(parts, at_bytes)

    def _write(self, parts: Sequence[memoryview], at_bytes: int) -> None:
        done = 0
        total = sum(len(p) for p in parts)
        while done < total:
            was_direct = self._is_direct
            try:
                count = os.pwritev(self._fd, _behind(parts, done), at_bytes + done)
            except OSError as e:
                if e.errno not in _NO_DIRECT or not was_direct:
                    raise
                # Some file systems open a file so and refuse the first write; all refuse the rest of a page.
                self._stop_direct()
                continue
            if count == 0:
                raise OSError(errno.EIO, "the file system takes no more bytes and gives no reason")
            done += count
        if not self._is_direct:
            _start_writing_out(self._fd, at_bytes, total)

    def _stop_direct(self) -> None:
        """Goes on through the page cache."""
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self._is_direct = False  # last: a write that failed while this still said True is tried once more


def _pages_of(size_bytes: int) -> int:
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _behind(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of *parts* after *done* bytes."""
    out = []
    for part in parts:
        if done < len(part):
            out.append(part[done:])
        done = max(done - len(part), 0)
    return out


# -- system calls that Python does not offer -------------------------------------------------------------------------
def _reserve(fd: int, size_bytes: int) -> None:
    """Space for the whole file, or OSError before a byte is written.

    Not posix_fallocate: the C library replaces it by a write to every block where the file system cannot do it.
    """
    fallocate = libc_function("fallocate64", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    code = errno.ENOSYS
    if fallocate is not None:
        while (code := 0 if fallocate(fd, 0, 0, size_bytes) == 0 else ctypes.get_errno()) == errno.EINTR:
            pass
    if code in (errno.ENOSYS, errno.ENOTSUP, errno.EINVAL):
        _look_for_space(fd, size_bytes)
    elif code:
        raise OSError(code, os.strerror(code))


def _look_for_space(fd: int, size_bytes: int) -> None:
    """OSError when the file system says that it has less than that left; some do not say."""
    there = os.fstatvfs(fd)
    if there.f_blocks and there.f_bavail * there.f_frsize < size_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _is_in_memory(fd: int) -> bool:
    """Whether the file lies in a tmpfs or ramfs. They take direct I/O as well (Linux 6.6), and ignore it."""
    statfs = libc_function("fstatfs", ctypes.c_int, ctypes.c_void_p)
    told = ctypes.create_string_buffer(_STATFS_BYTES)
    if statfs is None or statfs(fd, told) != 0:
        return False
    return ctypes.c_ulong.from_buffer(told).value & 0xFFFFFFFF in _IN_MEMORY


def _start_writing_out(fd: int, at_bytes: int, size_bytes: int) -> None:
    """Begins to write the range to the device, so that fsync finds little left and dirty memory stays small."""
    sync = libc_function("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if sync is not None:
        sync(fd, at_bytes, size_bytes, _SYNC_FILE_RANGE_WRITE)  # a hint: whether it worked, fsync says


def _sync_folder(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


# -- reading back ----------------------------------------------------------------------------------------------------
def _read_back(folder_fd: int, what: str, fragment: Fragment, piece_bytes: int, cpu: _Cpu) -> None:
    """Raises WriteError, naming shard, file and byte, when the device does not return what was written."""
    rank = fragment.rank
    if fragment.shards:
        with _Reading(folder_fd, tensors_name(rank), piece_bytes) as file:
            for shard in fragment.shards:
                around, own = Xxh3(), Xxh3()
                behind = shard.payload_at_bytes + shard.payload_bytes
                file.hash(around, shard.at_bytes, shard.payload_at_bytes - shard.at_bytes)
                file.hash(own, shard.payload_at_bytes, shard.payload_bytes)
                file.hash(around, behind, shard.at_bytes + shard.length_bytes - behind)
                if (own.digest(), around.digest()) != (shard.xxh3, shard.archive_xxh3):
                    raise _differs(what, f"{shard.key!r} at {list(shard.offsets)}", file.name, shard.payload_at_bytes)
    if fragment.objects:
        with _Reading(folder_fd, objects_name(rank), piece_bytes) as file:
            for record in fragment.objects:
                own = Xxh3()
                file.hash(own, record.at_bytes, record.length_bytes)
                if own.digest() != record.xxh3:
                    raise _differs(what, repr(record.key), file.name, record.at_bytes)


def _differs(what: str, which: str, name: str, at_bytes: int) -> WriteError:
    return WriteError(
        f"cannot trust {what}: {which} read back from {name} at byte {at_bytes:,} is not what was written; "
        f"{_ADVICE[WriteReason.IO]}",
        WriteReason.IO,
    )


class _Reading:
    """A file read from front to back past the page cache, through one window of whole pages."""

    def __init__(self, folder_fd: int, name: str, piece_bytes: int) -> None:
        self.name = name
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(name, flags | os.O_DIRECT, dir_fd=folder_fd)
        except OSError as e:
            if e.errno not in _NO_DIRECT:
                raise
            self._fd = os.open(name, flags, dir_fd=folder_fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._window = mmap.mmap(-1, piece_bytes)
        self._view = memoryview(self._window)
        self._begin = self._end = 0  # of the window, in the file

    def __enter__(self) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._view.release()
        self._window.close()
        os.close(self._fd)

    def hash(self, into: Xxh3, at_bytes: int, size_bytes: int) -> None:
        while size_bytes:
            if not self._begin <= at_bytes < self._end:
                self._begin = at_bytes - at_bytes % ALIGN_BYTES
                self._end = self._begin + os.preadv(self._fd, [self._view], self._begin)
                if at_bytes >= self._end:
                    raise OSError(errno.EIO, f"{self.name} ends at byte {self._end:,} when it is read back")
            count = min(size_bytes, self._end - at_bytes)
            into.update(self._view[at_bytes - self._begin : at_bytes - self._begin + count])
            at_bytes += count
            size_bytes -= count
