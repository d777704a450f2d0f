"""Copies the files of a checkpoint from one place to another, and compares every byte with its checksums on the way.

What is compared are the checksums of the save itself, so that damage of the source is not carried on: each shard and
object against the rank's fragment, small files against the manifest. With *read_back* the copy is read again, too.
"""

from __future__ import annotations

import errno
import io
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from steadyrun.checkpoint.checksums import Bytes, Xxh3
from steadyrun.checkpoint.manifest import (
    FileRecord,
    Fragment,
    Manifest,
    ManifestError,
    fragment_name,
    objects_name,
    tensors_name,
)
from steadyrun.checkpoint.shardfile import RateLimit
from steadyrun.core.errors import SteadyrunError

__all__ = [
    "DamagedSourceError",
    "LocalFolder",
    "NotAgainError",
    "Place",
    "Progress",
    "StreamCheck",
    "TransferError",
    "TransferOptions",
    "Tries",
    "copy_files",
    "retried",
]

# Bytes done, bytes in all; called by one thread at a time. What it raises ends the copy.
Progress = Callable[[int, int], None]

_PIECE_BYTES: Final = 8 << 20
_MOST_FRAGMENT_BYTES: Final = 1 << 30
# Trying again does not help, and costs time in which somebody could.
_NOT_AGAIN: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG})


class TransferError(SteadyrunError):
    """A copy that could not be made."""


class NotAgainError(SteadyrunError):
    """For a call of ``retried``: what no further try would change."""


class DamagedSourceError(TransferError):
    """What is to be copied is not what was saved; *file* is where."""

    def __init__(self, text: str, file: str) -> None:
        super().__init__(text)
        self.file = file


# -- trying again ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Tries:
    """How often, and how long to wait in between.

    Attributes:
        pause: waits so many seconds; may raise to end it all. None: by the clock, and no longer than the copy goes on.
    """

    most: int = 5
    first_s: float = 1.0
    factor: float = 4.0
    longest_s: float = 60.0
    pause: Callable[[float], None] | None = None

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"most={self.most}: must be at least 1")

    def waits_s(self) -> Iterator[float]:
        """Before the second try, the third, and so on."""
        wait_s = self.first_s
        for _ in range(self.most - 1):
            yield min(wait_s, self.longest_s)
            wait_s *= self.factor


def retried(what: str, call: Callable[[], None], tries: Tries, stop: threading.Event | None = None) -> int:
    """Do it until it works; returns how many tries it took. *stop* ends the waiting in between.

    Raises:
        TransferError: every try failed, or the reason will not go away by itself; the text begins with *what*.
    """
    waits_s = tries.waits_s()
    count = 0
    while True:
        count += 1
        try:
            call()
        except DamagedSourceError:
            if count > 1:
                raise
            _pause(0.0, tries, stop)  # read it once more: it may have been damaged on the way
        except Exception as e:  # stores raise what their client libraries raise
            wait_s = None if _is_final(e) else next(waits_s, None)
            if wait_s is None:
                times = "" if count == 1 else f", tried {count} times"
                raise TransferError(f"{what}: {_reason(e)}{times}") from e
            _pause(wait_s, tries, stop)
        else:
            return count


def _pause(seconds: float, tries: Tries, stop: threading.Event | None) -> None:
    if tries.pause is not None:
        tries.pause(seconds)
    elif stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise _StoppedError


def _is_final(e: Exception) -> bool:
    if isinstance(e, OSError) and e.errno in _NOT_AGAIN:
        return True
    return isinstance(
        e, NotAgainError | FileNotFoundError | PermissionError | NotImplementedError | ImportError | ManifestError
    )


def _reason(e: Exception) -> str:
    if isinstance(e, SteadyrunError):
        return str(e)
    if isinstance(e, OSError) and e.strerror:
        return e.strerror
    return f"{type(e).__name__}: {e}" if str(e) else type(e).__name__


# -- comparing what streams by -----------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Part:
    """Several ranges of a file with one checksum."""

    what: str
    at_bytes: int
    expected: str
    left_bytes: int
    state: Xxh3 = field(default_factory=Xxh3)


class StreamCheck:
    """Takes a file from front to back and compares it with what was saved.

    Args:
        record: of the manifest.
        fragment: of the rank whose file it is; None: only the size and, where the manifest has it, the whole content.
    """

    def __init__(self, record: FileRecord, fragment: Fragment | None) -> None:
        self._record = record
        self._whole = Xxh3()
        self._at_bytes = 0
        self._ranges = _ranges(record.name, fragment)  # in the order of the file
        self._next = 0

    def update(self, data: Bytes) -> None:
        """Raises DamagedSourceError as soon as a part is complete and wrong."""
        view = memoryview(data)
        self._whole.update(view)
        while view and self._next < len(self._ranges):
            begin, end, part = self._ranges[self._next]
            if end <= self._at_bytes:
                raise self._damaged("its list of checksums contradicts itself")
            if self._at_bytes < begin:  # a gap belongs to nothing
                step = min(begin - self._at_bytes, len(view))
            else:
                step = min(end - self._at_bytes, len(view))
                part.state.update(view[:step])
                part.left_bytes -= step
                if part.left_bytes == 0 and part.state.digest() != part.expected:
                    raise self._damaged(f"{part.what} at byte {part.at_bytes:,} is not what was saved")
            self._at_bytes += step
            view = view[step:]
            if self._at_bytes >= end:
                self._next += 1
        self._at_bytes += len(view)

    def finish(self) -> str:
        """The xxh3 of all. Raises DamagedSourceError when the file is too short or long, or not what was saved."""
        size_bytes, digest = self._at_bytes, self._whole.digest()
        if size_bytes != self._record.size_bytes:
            raise self._damaged(f"it has {size_bytes:,} bytes instead of {self._record.size_bytes:,}")
        if self._next < len(self._ranges):
            raise self._damaged("it ends before what is listed as its content")
        if self._record.xxh3 and digest != self._record.xxh3:
            raise self._damaged("its bytes do not have the checksum in the manifest")
        return digest

    def _damaged(self, why: str) -> DamagedSourceError:
        return DamagedSourceError(f"{self._record.name} is damaged: {why}", self._record.name)


def _ranges(name: str, fragment: Fragment | None) -> list[tuple[int, int, _Part]]:
    out: list[tuple[int, int, _Part]] = []
    if fragment is None:
        return out
    if name == tensors_name(fragment.rank):
        for s in fragment.shards:
            what = f"tensor {s.key!r} (shard at {list(s.offsets)})"
            behind = s.payload_at_bytes + s.payload_bytes
            end = s.at_bytes + s.length_bytes
            around = _Part(f"the archive of {what}", s.at_bytes, s.archive_xxh3, s.length_bytes - s.payload_bytes)
            own = _Part(what, s.payload_at_bytes, s.xxh3, s.payload_bytes)
            out += [(s.at_bytes, s.payload_at_bytes, around), (s.payload_at_bytes, behind, own), (behind, end, around)]
    elif name == objects_name(fragment.rank):
        for o in fragment.objects:
            own = _Part(f"object {o.key!r}", o.at_bytes, o.xxh3, o.length_bytes)
            out.append((o.at_bytes, o.at_bytes + o.length_bytes, own))
    return sorted((r for r in out if r[0] < r[1]), key=lambda r: r[0])


# -- places ------------------------------------------------------------------------------------------------------------
class Place(Protocol):
    """The files of one checkpoint, somewhere. May be used by several threads."""

    def reader(self, name: str) -> AbstractContextManager[io.RawIOBase]:
        """Of the bytes of that file. Raises what its storage raises."""
        ...

    def writer(self, name: str, size_bytes: int) -> AbstractContextManager[Callable[[memoryview], object]]:
        """Takes exactly *size_bytes*, piece by piece; the file is durable once the context has ended without error."""
        ...

    def size_bytes(self, name: str) -> int:
        """As the storage says it now, not as it was cached."""
        ...


class LocalFolder:
    """A ``Place`` in the file system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def reader(self, name: str) -> Iterator[io.RawIOBase]:
        with open(self._folder / name, "rb", buffering=0) as file:
            yield file

    @contextmanager
    def writer(self, name: str, size_bytes: int) -> Iterator[Callable[[memoryview], object]]:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(self._folder / name, flags, 0o666)
        try:
            if size_bytes:
                _reserve(fd, size_bytes)

            def write(data: memoryview) -> None:
                while data:
                    data = data[os.write(fd, data) :]

            yield write
            os.fsync(fd)
            # The copy must not push training data out of the page cache, and reading back must ask the device.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def size_bytes(self, name: str) -> int:
        return (self._folder / name).stat().st_size


def _reserve(fd: int, size_bytes: int) -> None:
    """So that a full disk is noticed before the copy and not in its middle."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise


# -- copying -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class TransferOptions:
    """How files are copied.

    Attributes:
        read_back: read every file of the copy again and compare it.
        threads: files at a time.
        rate: shared with other writers of the node; None: no limit.
    """

    tries: Tries = Tries()
    read_back: bool = True
    threads: int = 4
    rate: RateLimit | None = None


def copy_files(
    source: Place,
    target: Place,
    manifest: Manifest,
    what: str,
    options: TransferOptions = TransferOptions(),
    progress: Progress | None = None,
) -> int:
    """Copy all files that *manifest* names; returns how many tries the worst one took.

    Args:
        what: begins the text of errors, such as "cannot copy A to B".

    Raises:
        DamagedSourceError: the source is damaged; the text names tensor and file.
        TransferError: a file cannot be read or written, or the copy is not equal to the source.
    """
    names = {record.name for record in manifest.files}
    for name in names:
        if name != os.path.basename(name) or name in ("", ".", ".."):
            raise TransferError(f"{what}: the manifest names a file outside of the folder: {name!r}")
    fragments = _fragments(source, manifest, what, options)
    job = _Job(source, target, what, options, progress, manifest.size_bytes)
    files = sorted(manifest.files, key=lambda record: -record.size_bytes)
    with ThreadPoolExecutor(max(1, options.threads), thread_name_prefix="transfer") as pool:
        futures = [pool.submit(job.copy, record, fragments.get(record.name)) for record in files]
        try:
            finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
            return max((future.result() for future in finished), default=0)
        except _StoppedError:
            if job.error is None:
                raise
            raise job.error from None
        finally:
            job.stop.set()
            pool.shutdown(cancel_futures=True)


def _fragments(source: Place, manifest: Manifest, what: str, options: TransferOptions) -> Mapping[str, Fragment]:
    """By the name of the data file that they are of."""
    out: dict[str, Fragment] = {}
    named = {record.name: record for record in manifest.files}
    for rank in range(manifest.world_size):
        record = named.get(fragment_name(rank))
        if record is None or record.size_bytes > _MOST_FRAGMENT_BYTES:
            continue
        fragment = _one_fragment(source, record, what, options.tries)
        if fragment.rank != rank:
            raise DamagedSourceError(f"{what}: {record.name} is that of rank {fragment.rank}", record.name)
        out[tensors_name(rank)] = out[objects_name(rank)] = fragment
    return out


def _one_fragment(source: Place, record: FileRecord, what: str, tries: Tries) -> Fragment:
    content = bytearray()

    def read() -> None:
        content.clear()
        check = StreamCheck(record, None)
        with source.reader(record.name) as file:
            for piece in _pieces(file):
                check.update(piece)
                content.extend(piece)
        check.finish()

    try:
        retried(f"{what}: cannot read {record.name}", read, tries)
        return Fragment.from_json(bytes(content), record.name)
    except ManifestError as e:
        raise DamagedSourceError(f"{what}: {e}", record.name) from e
    except DamagedSourceError as e:
        raise DamagedSourceError(f"{what}: {e}", e.file) from e


class _StoppedError(BaseException):
    """Another file could not be copied, or the caller wants no more; never tried again."""


class _Job:
    """What the threads of one copy share."""

    def __init__(
        self,
        source: Place,
        target: Place,
        what: str,
        options: TransferOptions,
        progress: Progress | None,
        total_bytes: int,
    ) -> None:
        self.stop = threading.Event()
        self.error: BaseException | None = None  # what the caller's progress raised
        self._source = source
        self._target = target
        self._what = what
        self._options = options
        self._progress = progress
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()

    def copy(self, record: FileRecord, fragment: Fragment | None) -> int:
        try:
            return retried(
                f"{self._what}: {record.name}",
                lambda: self._copy_once(record, fragment),
                self._options.tries,
                self.stop,
            )
        except DamagedSourceError as e:
            raise DamagedSourceError(f"{self._what}: {e}", e.file) from e

    def _copy_once(self, record: FileRecord, fragment: Fragment | None) -> None:
        check = StreamCheck(record, fragment)
        counted = 0
        try:
            with (
                self._source.reader(record.name) as file,
                self._target.writer(record.name, record.size_bytes) as write,
            ):
                for piece in _pieces(file):
                    if self.stop.is_set():
                        raise _StoppedError
                    if self._options.rate is not None:
                        self._options.rate.wait_for(len(piece))
                    check.update(piece)
                    write(piece)
                    self._advance(len(piece))
                    counted += len(piece)
                digest = check.finish()  # before the writer makes it durable
            self._compare(record, digest)
        except BaseException:
            self._advance(-counted)
            raise

    def _compare(self, record: FileRecord, digest: str) -> None:
        stored_bytes = self._target.size_bytes(record.name)
        if stored_bytes != record.size_bytes:
            raise TransferError(f"the copy has {stored_bytes:,} bytes instead of {record.size_bytes:,}")
        if not self._options.read_back:
            return
        whole = Xxh3()
        with self._target.reader(record.name) as file:
            for piece in _pieces(file):
                if self.stop.is_set():
                    raise _StoppedError
                whole.update(piece)
        if whole.digest() != digest:
            raise TransferError("the copy, read back, is not what was sent")

    def _advance(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes
            if self._progress is None or size_bytes <= 0:
                return
            try:
                self._progress(self._done_bytes, self._total_bytes)
            except BaseException as e:
                self.error = self.error or e
                raise _StoppedError from e


def _pieces(file: io.RawIOBase) -> Iterator[memoryview]:
    """What the file holds, through one buffer: use each piece before the next."""
    buffer = bytearray(_PIECE_BYTES)
    view = memoryview(buffer)
    while count := file.readinto(buffer):
        yield view[:count]
