"""Copies a rank's tensors into its snapshot memory and back: the only thing that training waits for.

Large tensors of the host are copied past the caches by ``_stream.c``, without the interpreter's lock, on several
threads where that was asked for: 0.10 CPU seconds per GB where torch's ``copy_`` takes 0.16 to 0.22. Where that was not
compiled, ``memmove`` takes its place. glibc does the same from 3/4 of the last-level cache on; so large tensors are
split into parts that stay above what processors have. Small ones, and those whose bytes lie in another order, go
through ``copy_``, the small ones with one call for all.

Tensors of a CUDA device go over a stream of their own into memory that the driver has pinned.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeAlias

import torch

from steadyrun.checkpoint.arena import Arena, ArenaError, Slot, SlotState
from steadyrun.checkpoint.layout import Entry
from steadyrun.checkpoint.libc import libc_function
from steadyrun.core.errors import SteadyrunError

__all__ = ["Copier", "CopyMismatchError", "Copying", "map_ahead", "streaming"]

_MADV_POPULATE_READ: Final = 22  # Linux 5.14; not in Python's mmap module
_PART_BYTES: Final = 64 << 20
_THREADED_BYTES: Final = 32 << 20  # starting a thread takes 0.1 ms, in which 1 MB is copied
_SMALL: Final = 32768  # elements; torch's copy_ uses its own threads from here on, which wait for each other
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)  # other classes say themselves what a copy of them is


class CopyMismatchError(SteadyrunError):
    """Tensors that are not those of the layout; nothing was copied. A new layout has to be made."""


class Copying:
    """A copy that may still be under way on a device; of a finished one the methods return at once."""

    def __init__(self, events: Sequence[tuple[Any, torch.device]] = (), cuda: ModuleType | Any = torch.cuda) -> None:
        self._events = events
        self._cuda = cuda

    def wait(self) -> None:
        """Return once every byte is in the slot; only then may the slot be sealed."""
        for event, _ in self._events:
            event.synchronize()

    def hold_back_changes(self) -> None:
        """Let what the calling thread puts on its current streams from now on run after the copy.

        With it the tensors may be changed by the device while this process goes on. Tensors of the host are copied by
        then anyway.
        """
        for event, device in self._events:
            self._cuda.current_stream(device).wait_event(event)


@dataclass(frozen=True, slots=True)
class _Expected:
    """What the tensor of an entry has to be."""

    key: str
    dtype: torch.dtype
    shape: torch.Size
    at_bytes: int
    size_bytes: int
    is_small: bool


_Move: TypeAlias = tuple[int, int, int]  # to, from, bytes
_Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class Copier:
    """Copies between the tensors of one layout and the slots of its arena. For one thread at a time.

    With a CUDA device the constructor pins the slots, which takes a while: call it in the background, after
    ``Arena.prefault``.

    Attributes:
        note: why copies will be slow, or None.
    """

    def __init__(self, arena: Arena, device_type: str = "cpu", threads: int | None = None) -> None:
        """
        Args:
            arena: the Copier has to be closed before it.
            device_type: where most of the tensors are.
            threads: for tensors of the host; None: as many as torch computes with.

        Raises:
            ArenaError: the layout has a type that this torch does not know, or sizes that do not fit it.
        """
        self.note: str | None = None
        self._threads = max(1, torch.get_num_threads() if threads is None else threads)
        self._expected = tuple(_expected(e) for e in arena.layout.entries)
        self._slots = {slot.number: _Mapped(slot, self._expected, device_type != "cpu") for slot in arena.slots}
        self._side: _SideStreams | None = None
        if device_type == "cuda":
            self._side = _SideStreams(torch.cuda)
            self.note = self._side.pin([m.address_and_size for m in self._slots.values()])

    def copy_in(self, slot: Slot, tensors: Sequence[torch.Tensor], *, blocking: bool = True) -> Copying:
        """Copy the tensors, in the layout's order, into a slot that was begun.

        Args:
            blocking: return after the last byte; otherwise copies from a device may go on, see ``Copying``.

        Raises:
            CopyMismatchError: number, type or shape of the tensors is not that of the layout.
            ArenaError: the slot was not begun.
        """
        mapped = self._mapped(slot, SlotState.WRITING)
        found = self._sort(tensors, mapped)
        side = self._side
        on_device = [pair for pair in found.others if pair[1].is_cuda] if side is not None else []
        copying = side.copy(on_device) if side is not None and on_device else Copying()
        moves = [(mapped.address + e.at_bytes, tensor.data_ptr(), e.size_bytes) for tensor, e in found.plain]
        with _moving(moves, self._threads), torch.no_grad():
            if found.small:
                torch._foreach_copy_(found.small_views, found.small)
            for view, tensor in found.others:
                if side is None or not tensor.is_cuda:
                    view.copy_(tensor)
        if blocking:
            copying.wait()
        return copying

    def copy_out(self, slot: Slot, tensors: Sequence[torch.Tensor]) -> None:
        """Copy what is in a sealed slot into the tensors, in the layout's order. Returns after the last byte.

        Raises:
            CopyMismatchError: number, type or shape of the tensors is not that of the layout.
            ArenaError: the slot is not sealed.
        """
        mapped = self._mapped(slot, SlotState.SEALED)
        found = self._sort(tensors, mapped)
        moves = [(tensor.data_ptr(), mapped.address + e.at_bytes, e.size_bytes) for tensor, e in found.plain]
        with _moving(moves, self._threads, map_ahead), torch.no_grad():
            if found.small:
                torch._foreach_copy_(found.small, found.small_views)
            for view, tensor in found.others:
                tensor.copy_(view, non_blocking=tensor.is_cuda)
        for tensor, _ in found.plain:
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        for device in {tensor.device for _, tensor in found.others if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def close(self) -> None:
        """Let go of the arena. Copies must not be under way."""
        if self._side is not None:
            self._side.unpin()
        for mapped in self._slots.values():
            mapped.close()
        self._slots.clear()

    def __enter__(self) -> Copier:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _mapped(self, slot: Slot, state: SlotState) -> _Mapped:
        found = slot.view().state
        if found is not state:
            raise ArenaError(f"cannot copy: slot {slot.number} is {found.value}, it has to be {state.value}")
        return self._slots[slot.number]

    def _sort(self, tensors: Sequence[torch.Tensor], mapped: _Mapped) -> _Sorted:
        """The tensors by the way they are copied, without those that have no bytes.

        About a microsecond per tensor: nothing is remembered from one save to the next, as ``tensor.data = ...`` keeps
        the object and changes everything else.
        """
        if len(tensors) != len(self._expected):
            raise CopyMismatchError(
                f"cannot copy {len(tensors)} tensors: the layout has {len(self._expected)}; a new layout is needed"
            )
        out = _Sorted([], [], [], [])
        for i, (tensor, e) in enumerate(zip(tensors, self._expected, strict=True)):
            if tensor.dtype is not e.dtype or tensor.shape != e.shape:
                raise CopyMismatchError(
                    f"cannot copy {e.key}: it is {tensor.dtype} {list(tensor.shape)}, in the layout {e.dtype} "
                    f"{list(e.shape)}; a new layout is needed"
                )
            if not e.size_bytes:
                continue
            is_as_it_reads = type(tensor) in _PLAIN and tensor.is_cpu and not _is_negated(tensor, e.dtype)
            if is_as_it_reads and e.is_small:
                out.small.append(tensor)
                out.small_views.append(mapped.tensor(i))
            elif is_as_it_reads and tensor.layout is torch.strided and tensor.is_contiguous():
                out.plain.append((tensor, e))
            else:
                out.others.append((mapped.tensor(i), tensor))
        return out


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Tensors of the host that are copied with one call, with their places; those that are moved as bytes; others."""

    small: list[torch.Tensor]
    small_views: list[torch.Tensor]
    plain: list[tuple[torch.Tensor, _Expected]]
    others: list[_Pair]  # (its place, the tensor)


def _is_negated(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether it reads otherwise than what lies in memory (``conj()`` and ``.imag`` of it are not carried out)."""
    return tensor.is_neg() or (dtype.is_complex and tensor.is_conj())


@contextlib.contextmanager
def _moving(moves: Sequence[_Move], threads: int, prepare: Callable[[int, int], None] | None = None) -> Iterator[None]:
    """Moves all of this by the end of the ``with``: on this thread after its body, on others from the beginning.

    Args:
        prepare: called with address and bytes of each source before it is read.
    """
    total_bytes = sum(size_bytes for _, _, size_bytes in moves)
    helpers: list[threading.Thread] = []
    if threads > 1 and total_bytes >= _THREADED_BYTES:
        # Large ones first: the threads end at about the same time.
        jobs = deque(sorted(_parts(moves), key=lambda move: move[2], reverse=True))
        helpers = [
            threading.Thread(target=_work, args=(jobs, prepare), name=f"steadyrun-copy-{i}") for i in range(1, threads)
        ]
    else:
        jobs = deque(moves)
    started: list[threading.Thread] = []
    try:
        with contextlib.suppress(RuntimeError):  # no more threads allowed: it works with fewer
            for helper in helpers:
                helper.start()
                started.append(helper)
        yield
        _work(jobs, prepare)
    finally:
        jobs.clear()
        for helper in started:
            helper.join()


@functools.cache
def streaming() -> Callable[[int, int, int], object] | None:
    """Copies (to, from, bytes) past the caches, without the interpreter's lock; None: it was not compiled."""
    try:
        function = ctypes.CDLL(str(Path(__file__).with_name("_stream.so"))).steadyrun_stream
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = None
    return function


def map_ahead(address: int, size_bytes: int) -> None:
    """Map shared memory that is about to be read, all at once; otherwise each 64 KiB of it cost a fault.

    For 1 GiB that takes 0.03 s where the faults take 0.06. An older kernel refuses; the faults do it then.
    """
    begin = address - address % mmap.PAGESIZE
    madvise = libc_function("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(begin, address + size_bytes - begin, _MADV_POPULATE_READ)


def _work(jobs: deque[_Move], prepare: Callable[[int, int], None] | None) -> None:
    move = streaming() or ctypes.memmove
    with contextlib.suppress(IndexError):
        while True:
            to, source, size_bytes = jobs.popleft()
            if prepare is not None:
                prepare(source, size_bytes)
            move(to, source, size_bytes)


def _parts(moves: Sequence[_Move]) -> Iterator[_Move]:
    for to, source, size_bytes in moves:
        count = max(size_bytes // _PART_BYTES, 1)
        part_bytes = -(-size_bytes // count)
        for at in range(0, size_bytes, part_bytes):
            yield to + at, source + at, min(part_bytes, size_bytes - at)


def _expected(entry: Entry) -> _Expected:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ArenaError(f"cannot copy {entry.key}: torch {torch.__version__} has no type {entry.dtype!r}")
    shape = torch.Size(entry.sizes)
    if shape.numel() * dtype.itemsize != entry.size_bytes:
        raise ArenaError(
            f"cannot copy {entry.key}: {entry.dtype} {list(shape)} does not take the {entry.size_bytes:,} bytes that "
            f"the layout gives it"
        )
    is_small = shape.numel() < _SMALL
    return _Expected(entry.key, dtype, shape, entry.at_bytes, entry.size_bytes, is_small)


class _Mapped:
    """One slot's payload as tensors: of small ones at once, so that the first save need not, of others on demand."""

    def __init__(self, slot: Slot, expected: Sequence[_Expected], all_at_once: bool) -> None:
        payload = slot.payload_view
        self._expected = expected
        self._bytes = (
            torch.frombuffer(payload, dtype=torch.uint8) if len(payload) else torch.empty(0, dtype=torch.uint8)
        )
        self._tensors: dict[int, torch.Tensor] = {}
        self.address = self._bytes.data_ptr()
        for i, e in enumerate(expected):
            if e.is_small or all_at_once:
                self.tensor(i)

    @property
    def address_and_size(self) -> tuple[int, int]:
        return self.address, self._bytes.numel()

    def tensor(self, index: int) -> torch.Tensor:
        found = self._tensors.get(index)
        if found is None:
            e = self._expected[index]
            flat = self._bytes[e.at_bytes : e.at_bytes + e.size_bytes]
            found = self._tensors[index] = flat.view(e.dtype).view(e.shape)
        return found

    def close(self) -> None:
        self._tensors.clear()
        del self._bytes


class _SideStreams:
    """Copies from CUDA devices, each over a stream of its own.

    Args:
        cuda: ``torch.cuda``.
    """

    def __init__(self, cuda: ModuleType | Any) -> None:
        self._cuda = cuda
        self._streams: dict[torch.device, Any] = {}
        self._pinned: list[int] = []

    def pin(self, ranges: Sequence[tuple[int, int]]) -> str | None:
        """Pin these addresses; a text when the driver refuses, which makes copies slower, not wrong."""
        runtime = self._cuda.cudart()
        for address, size_bytes in ranges:
            if not size_bytes:
                continue
            code = int(runtime.cudaHostRegister(address, size_bytes, 0))
            if code != 0:
                self.unpin()
                return (
                    f"cannot pin {size_bytes:,} bytes of snapshot memory (CUDA error {code}): saves will hold up "
                    f"the training longer; look at ulimit -l"
                )
            self._pinned.append(address)
        return None

    def unpin(self) -> None:
        while self._pinned:
            self._cuda.cudart().cudaHostUnregister(self._pinned.pop())

    def copy(self, pairs: Sequence[_Pair]) -> Copying:
        """Start to copy (target, source) after what the current streams have to do until here."""
        events = []
        by_device: dict[torch.device, list[_Pair]] = {}
        for pair in pairs:
            by_device.setdefault(pair[1].device, []).append(pair)
        for device, group in by_device.items():
            stream = self._streams.get(device)
            if stream is None:
                stream = self._streams[device] = self._cuda.Stream(device)
            stream.wait_stream(self._cuda.current_stream(device))
            with self._cuda.stream(stream), torch.no_grad():
                for target, source in group:
                    target.copy_(source, non_blocking=True)
                    source.record_stream(stream)  # else its memory could be given to others before it is read
                event = self._cuda.Event(blocking=True)
                event.record(stream)
            events.append((event, device))
        return Copying(events, self._cuda)
