"""Copies into snapshot memory hold the values at the call, whatever the tensors are and whatever becomes of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch

from steadyrun.checkpoint import copying
from steadyrun.checkpoint.arena import Arena, ArenaError, Slot
from steadyrun.checkpoint.copying import Copier, CopyMismatchError
from steadyrun.checkpoint.layout import Entry, Layout, place

needs_streaming = pytest.mark.skipif(copying.streaming() is None, reason="it was not compiled")
DTYPES = [
    name
    for name in (
        *("float64", "float32", "bfloat16", "float16", "complex32", "complex64", "complex128", "bool"),
        *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
]


def layout_of(tensors: Sequence[torch.Tensor]) -> Layout:
    sizes_bytes = [t.numel() * t.itemsize for t in tensors]
    places = place(sizes_bytes)
    entries = tuple(
        Entry(
            f"model.w{i}",
            ("model", f"w{i}"),
            str(t.dtype).removeprefix("torch."),
            tuple(t.shape),
            (0,) * t.dim(),
            tuple(t.shape),
            places[i],
            sizes_bytes[i],
        )
        for i, t in enumerate(tensors)
    )
    return Layout(0, 1, entries, ())


def raw(tensor: torch.Tensor) -> bytes:
    """Its values in C order."""
    plain = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return ctypes.string_at(plain.data_ptr(), plain.numel() * plain.itemsize)


def random_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    values = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return values.view(dtype).view(shape)


def overwrite(tensors: Sequence[torch.Tensor]) -> None:
    """What an optimizer does right after a save: other values in the same memory."""
    with torch.no_grad():
        for t in tensors:
            if t.numel():
                base = t if t._base is None else t._base
                base.untyped_storage().fill_(0x55)


MakeRoom = Callable[..., tuple[Copier, Slot]]


@pytest.fixture
def room() -> Iterator[MakeRoom]:
    """``room(tensors)``: a copier and a begun slot for them."""
    made: list[tuple[Arena, Copier]] = []

    def make(tensors: Sequence[torch.Tensor], threads: int = 1) -> tuple[Copier, Slot]:
        arena = Arena.create(layout_of(tensors), 0, 1)
        copier = Copier(arena, threads=threads)
        made.append((arena, copier))
        arena.slots[0].begin(1, 0, 1)
        return copier, arena.slots[0]

    yield make
    for arena, copier in made:
        copier.close()
        arena.close()


def contents(slot: Slot) -> list[bytes]:
    return [bytes(slot.payload(e)) for e in slot._layout.entries]


def check_copies(room: MakeRoom, tensors: Sequence[torch.Tensor], threads: int = 1) -> None:
    """In: the values at the call, also once they are overwritten. Out: the same, into the same tensors."""
    meant = [raw(t) for t in tensors]
    copier, slot = room(tensors, threads)
    copier.copy_in(slot, tensors)
    overwrite(tensors)
    assert contents(slot) == meant
    slot.seal()
    assert [raw(t) for t in tensors if t.numel()] != [m for m in meant if m]
    copier.copy_out(slot, tensors)
    assert [raw(t) for t in tensors] == meant
    assert contents(slot) == meant


@pytest.mark.parametrize("small", [0, 32768])
@pytest.mark.parametrize("name", DTYPES)
def test_values_at_the_call_are_saved_in_every_type(
    room: MakeRoom, monkeypatch: pytest.MonkeyPatch, name: str, small: int
) -> None:
    monkeypatch.setattr(copying, "_SMALL", small)
    dtype = getattr(torch, name)
    check_copies(
        room,
        [
            random_of(dtype, 33, 17),
            random_of(dtype),
            random_of(dtype, 0, 5),
            random_of(dtype, 40, 24).t(),
            random_of(dtype, 64, 8)[::2, 1:7],
            random_of(dtype, 5),
        ],
    )


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no such type")
@pytest.mark.parametrize("small", [0, 32768])
def test_types_of_less_than_a_byte_are_saved(room: MakeRoom, monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(copying, "_SMALL", small)
    check_copies(room, [random_of(torch.uint8, 16, 8).view(torch.float4_e2m1fn_x2)])


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_tensors_whose_bytes_lie_otherwise_are_saved_in_order(
    room: MakeRoom, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    z = torch.randn(30, 20, dtype=torch.complex64)
    tensors = [
        torch.randn(4, 8, 6, 6).to(memory_format=torch.channels_last),
        torch.randn(100)[3:90],  # begins within its storage
        z.conj(),
        z[:, 3].conj(),
        z.conj().imag,
        torch.randn(7, 1, 9).permute(2, 0, 1),
    ]
    monkeypatch.setattr(copying, "_SMALL", small)
    copier, slot = room(tensors)
    found = copier._sort(tensors, copier._slots[slot.number])
    assert len(found.plain) == (0 if small else 1)
    assert len(found.small) == (3 if small else 0)
    assert len(found.others) == (3 if small else 5)
    check_copies(room, tensors)


def test_a_tensor_that_repeats_its_memory_is_saved_as_it_reads(room: MakeRoom) -> None:
    tensor = torch.arange(6.0).expand(5, 6)
    copier, slot = room([tensor])
    copier.copy_in(slot, [tensor])
    assert contents(slot) == [raw(tensor)]


@pytest.mark.parametrize("small", [0, 32768])
def test_parameters_are_saved_and_loaded_without_a_graph(
    room: MakeRoom, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr(copying, "_SMALL", small)
    parameters = [torch.nn.Parameter(torch.randn(20, 30)), torch.nn.Parameter(torch.randn(30, 20).t())]
    before = [p._version for p in parameters]
    check_copies(room, parameters)
    assert all(p.grad_fn is None and p.is_leaf for p in parameters)
    assert all(p._version > b for p, b in zip(parameters, before, strict=True)), "autograd must notice the load"


def test_a_tensor_of_another_class_is_copied_the_way_it_says(room: MakeRoom) -> None:
    class Doubled(torch.Tensor):
        """Its values are twice what lies in its memory."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.copy_ and isinstance(args[1], cls):
                return args[0].copy_(args[1].as_subclass(torch.Tensor) * 2)
            return super().__torch_function__(func, types, args, kwargs or {})

    tensor = torch.ones(3, 4).as_subclass(Doubled)
    copier, slot = room([tensor])
    copier.copy_in(slot, [tensor])
    assert contents(slot) == [raw(torch.full((3, 4), 2.0))]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_large_tensors_are_copied_on_several_threads(
    room: MakeRoom, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_PART_BYTES", 1 << 20)
    monkeypatch.setattr(copying, "_THREADED_BYTES", 1 << 20)
    names: set[str] = set()
    real = copying._work

    def work(*arguments: Any) -> None:
        names.add(threading.current_thread().name)
        real(*arguments)

    monkeypatch.setattr(copying, "_work", work)
    tensors = [
        random_of(torch.uint8, (3 << 20) + 17),
        random_of(torch.float32, 500, 500).t(),
        random_of(torch.int16, 9),
    ]
    check_copies(room, tensors, threads)
    assert len(names) == threads


@pytest.mark.parametrize("threads", [1, 2])
def test_a_snapshot_is_mapped_before_it_is_read_and_only_then(
    room: MakeRoom, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    monkeypatch.setattr(copying, "_PART_BYTES", 1 << 20)
    monkeypatch.setattr(copying, "_THREADED_BYTES", 1 << 20)
    mapped: list[tuple[int, int]] = []
    monkeypatch.setattr(copying, "map_ahead", lambda address, size: mapped.append((address, size)))
    tensors = [random_of(torch.uint8, (3 << 20) + 17), random_of(torch.float32, 300, 300)]
    copier, slot = room(tensors, threads)
    copier.copy_in(slot, tensors)
    assert mapped == []
    slot.seal()
    copier.copy_out(slot, tensors)
    begin = copier._slots[slot.number].address
    covered = {at - begin for address, size in mapped for at in range(address, address + size, 4096)}
    assert all(
        any(at <= e.at_bytes + byte < at + 4096 for at in covered)
        for e in slot._layout.entries
        for byte in range(0, e.size_bytes, 4096)
    )


def test_a_kernel_that_cannot_map_ahead_is_no_harm() -> None:
    copying.map_ahead(1 << 20, 4096)  # nothing is there: it refuses


def test_without_what_is_compiled_large_tensors_are_moved_by_the_c_library(
    room: MakeRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "streaming", lambda: None)
    check_copies(room, [random_of(torch.uint8, (3 << 20) + 17), random_of(torch.int16, 9)])


@needs_streaming
@pytest.mark.parametrize("to", [0, 1, 63, 64, 4095])
@pytest.mark.parametrize("source", [0, 1, 17, 64, 4090])
def test_streaming_copies_every_byte_and_no_other(to: int, source: int) -> None:
    stream = copying.streaming()
    assert stream is not None
    page = mmap.PAGESIZE
    for size in (0, 1, 63, 64, 65, page - 1, page, 4 * page - 1, 4 * page, 4 * page + 65, 9 * page + 1, 250_007):
        values = random_of(torch.uint8, source + size + 1)
        target = mmap.mmap(-1, to + size + 2 * page)
        around = ctypes.c_char.from_buffer(target)
        before = os.urandom(len(target))
        target[:] = before
        stream(ctypes.addressof(around) + to, values.data_ptr() + source, size)
        assert target[:] == before[:to] + raw(values[source : source + size]) + before[to + size :]
        del around
        target.close()


@needs_streaming
def test_streaming_lets_other_threads_run_meanwhile() -> None:
    """As ctypes gives up the interpreter's lock for a library that is opened by CDLL."""
    stream = copying.streaming()
    assert stream is not None
    source, target = torch.ones(16 << 20, dtype=torch.uint8), torch.zeros(16 << 20, dtype=torch.uint8)
    is_over, seen = threading.Event(), []

    def copy() -> None:
        for _ in range(40):
            stream(target.data_ptr(), source.data_ptr(), len(source))
        is_over.set()

    thread = threading.Thread(target=copy)
    thread.start()
    while not is_over.is_set():
        seen.append(None)
    thread.join()
    assert len(seen) > 1000  # with the lock held: one round per switch interval at best
    assert torch.equal(source, target)


def test_parts_cover_a_tensor_without_gap_or_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_PART_BYTES", 100)
    for size_bytes in [1, 99, 100, 101, 199, 200, 350, 1000]:
        parts = list(copying._parts([(5000, 9000, size_bytes)]))
        assert [p[0] - 5000 for p in parts] == [p[1] - 9000 for p in parts]
        covered = sorted(at for to, _, n in parts for at in range(to - 5000, to - 5000 + n))
        assert covered == list(range(size_bytes))
        assert all(n >= min(size_bytes, 100) // 2 for _, _, n in parts)


def test_fewer_threads_than_asked_for_are_enough(room: MakeRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copying, "_THREADED_BYTES", 1)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    check_copies(room, [random_of(torch.uint8, 1000)], threads=4)


def test_both_slots_are_kept_apart() -> None:
    tensors = [random_of(torch.float32, 50, 60), random_of(torch.float32, 60, 50).t()]
    with Arena.create(layout_of(tensors), 0, 2) as arena, Copier(arena) as copier:
        meant = []
        for slot in arena.slots:
            slot.begin(1, 0, slot.number)
            copier.copy_in(slot, tensors)
            slot.seal()
            meant.append([raw(t) for t in tensors])
            overwrite(tensors)
        assert [contents(s) for s in arena.slots] == meant
        copier.copy_out(arena.slots[0], tensors)
        assert [raw(t) for t in tensors] == meant[0]


def test_a_state_without_tensors_is_copied(room: MakeRoom) -> None:
    copier, slot = room([])
    copier.copy_in(slot, []).wait()
    slot.seal()
    copier.copy_out(slot, [])


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "other",
    [torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(4, 3), torch.zeros(1, 4), torch.zeros(3, 4, 1)],
    ids=["type", "shape", "broadcast", "dimension"],
)
def test_a_tensor_that_is_not_the_layouts_is_refused_before_anything_is_copied(
    room: MakeRoom, other: torch.Tensor
) -> None:
    tensors = [torch.ones(5), torch.ones(3, 4)]
    copier, slot = room(tensors)
    before = contents(slot)
    with pytest.raises(CopyMismatchError, match=r"cannot copy model.w1: it is torch\..* a new layout is needed"):
        copier.copy_in(slot, [tensors[0], other])
    assert contents(slot) == before
    copier.copy_in(slot, tensors)
    slot.seal()
    with pytest.raises(CopyMismatchError, match=r"cannot copy model.w1"):
        copier.copy_out(slot, [tensors[0].zero_(), other])
    assert not tensors[0].any()


def test_a_tensor_that_was_exchanged_within_is_noticed(room: MakeRoom) -> None:
    tensor = torch.nn.Parameter(torch.ones(4))
    copier, slot = room([tensor])
    copier.copy_in(slot, [tensor])
    tensor.data = torch.full((4,), 3.0)
    copier.copy_in(slot, [tensor])
    assert contents(slot) == [raw(torch.full((4,), 3.0))]
    tensor.data = torch.full((6,), 3.0)
    with pytest.raises(CopyMismatchError, match=r"\[6\], in the layout torch.float32 \[4\]"):
        copier.copy_in(slot, [tensor])


def test_another_number_of_tensors_is_refused(room: MakeRoom) -> None:
    copier, slot = room([torch.ones(2)])
    with pytest.raises(CopyMismatchError, match="cannot copy 2 tensors: the layout has 1"):
        copier.copy_in(slot, [torch.ones(2), torch.ones(2)])


def test_a_slot_that_is_not_begun_is_not_written_and_a_torn_one_not_read(room: MakeRoom) -> None:
    tensors = [torch.ones(2)]
    copier, slot = room(tensors)
    with pytest.raises(ArenaError, match="slot 0 is writing, it has to be sealed"):
        copier.copy_out(slot, tensors)
    copier.copy_in(slot, tensors)
    slot.seal()
    with pytest.raises(ArenaError, match="slot 0 is sealed, it has to be writing"):
        copier.copy_in(slot, [torch.zeros(2)])
    assert contents(slot) == [raw(tensors[0])]


@pytest.mark.parametrize(
    ("dtype", "size_bytes", "text"),
    [("float33", 16, "no type 'float33'"), ("nn", 16, "no type 'nn'"), ("float64", 16, r"float64 \[4\] does not take")],
)
def test_a_layout_that_this_torch_cannot_copy_is_refused(dtype: str, size_bytes: int, text: str) -> None:
    layout = Layout(0, 1, (Entry("w", ("w",), dtype, (4,), (0,), (4,), 0, size_bytes),), ())
    with Arena.create(layout, 0, 1) as arena, pytest.raises(ArenaError, match=f"cannot copy w: .*{text}"):
        Copier(arena)


# -- cost --------------------------------------------------------------------------------------------------------------
def calls_of(work: Callable[[], object]) -> int:
    """Calls of functions, Python's and C's."""
    calls = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def test_calls_grow_with_the_number_of_tensors_and_not_with_their_size(room: MakeRoom) -> None:
    def calls(count: int, size: int) -> int:
        tensors = [torch.ones(size) for _ in range(count)]
        copier, slot = room(tensors)
        copier.copy_in(slot, tensors)
        return calls_of(lambda: copier.copy_in(slot, tensors))

    few, many, large = calls(10, 40_000), calls(110, 40_000), calls(10, 300_000)
    assert abs(few - large) < 10, "a few calls more or less: which thread found the last piece, a collection of garbage"
    assert (many - few) / 100 <= 12, "calls per large tensor"


def test_many_small_tensors_take_few_calls_each(room: MakeRoom) -> None:
    tensors = [torch.ones(10) for _ in range(200)]
    copier, slot = room(tensors)
    copier.copy_in(slot, tensors)
    assert calls_of(lambda: copier.copy_in(slot, tensors)) <= 200 * 6 + 60


def test_views_are_made_once(room: MakeRoom) -> None:
    tensors = [torch.randn(9, 5).t()]
    copier, slot = room(tensors)
    copier.copy_in(slot, tensors)
    made = dict(copier._slots[0]._tensors)
    copier.copy_in(slot, tensors)
    assert made
    assert all(copier._slots[0]._tensors[i] is t for i, t in made.items())


# -- CUDA, as far as it can be looked at without one -------------------------------------------------------------------
class FakeCuda:
    """Notes the order of calls; tensors of the host play those of the device."""

    def __init__(self, refuse: bool = False) -> None:
        self.story: list[str] = []
        self.refuse = refuse

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        self.story.append(f"register {size_bytes}")
        return 2 if self.refuse and len(self.story) > 1 else 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.story.append("unregister")
        return 0

    def current_stream(self, device: torch.device) -> FakeStream:
        return FakeStream(self, "current")

    def Stream(self, device: torch.device) -> FakeStream:  # noqa: N802
        self.story.append("new stream")
        return FakeStream(self, "side")

    def stream(self, stream: FakeStream) -> FakeStream:
        return stream

    def Event(self, blocking: bool) -> FakeEvent:  # noqa: N802
        assert blocking
        return FakeEvent(self)


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda = cuda
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.story.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.story.append(f"{self.name} waits for the event")

    def __enter__(self) -> None:
        self.cuda.story.append(f"on {self.name}")

    def __exit__(self, *exc: object) -> None:
        self.cuda.story.append(f"off {self.name}")


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def record(self, stream: FakeStream) -> None:
        self.cuda.story.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        self.cuda.story.append("host waits for the event")


class OnDevice(torch.Tensor):
    story: list[str]

    def record_stream(self, stream: Any) -> None:
        self.story.append(f"kept for {stream.name}")


def test_copies_from_a_device_come_after_its_work_and_before_its_next_changes() -> None:
    cuda = FakeCuda()
    source = torch.arange(5.0).as_subclass(OnDevice)
    source.story = cuda.story
    target = torch.zeros(5)
    side = copying._SideStreams(cuda)
    under_way = side.copy([(target, source)])
    assert cuda.story == [
        "new stream",
        "side waits for current",
        "on side",
        "kept for side",
        "event on side",
        "off side",
    ]
    assert target.tolist() == [0, 1, 2, 3, 4]
    del cuda.story[:]
    under_way.hold_back_changes()
    under_way.wait()
    side.copy([(target, source)])
    assert cuda.story[:3] == ["current waits for the event", "host waits for the event", "side waits for current"]


def test_memory_that_was_pinned_is_unpinned() -> None:
    cuda = FakeCuda()
    side = copying._SideStreams(cuda)
    assert side.pin([(4096, 100), (8192, 0), (12288, 200)]) is None
    side.unpin()
    side.unpin()
    assert cuda.story == ["register 100", "register 200", "unregister", "unregister"]


def test_memory_that_cannot_be_pinned_is_said_and_nothing_stays_pinned() -> None:
    cuda = FakeCuda(refuse=True)
    note = copying._SideStreams(cuda).pin([(4096, 100), (12288, 200)])
    assert note is not None
    assert "cannot pin 200 bytes of snapshot memory (CUDA error 2)" in note
    assert cuda.story == ["register 100", "register 200", "unregister"]
