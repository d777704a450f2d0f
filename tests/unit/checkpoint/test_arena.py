"""The snapshot memory: what is in it after every single step of a writer, and after every flipped bit."""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrun.checkpoint import arena as arena_module
from steadyrun.checkpoint.arena import (
    MOST_SLOTS,
    Arena,
    ArenaError,
    BlobsTooLargeError,
    Damaged,
    Slot,
    SlotBusyError,
    SlotState,
    SlotView,
    Wanted,
    choose_slot,
    memory_needed_bytes,
)
from steadyrun.checkpoint.layout import ALIGN_BYTES, Entry, Layout, ObjectEntry, place
from steadyrun.checkpoint.saves import TierName

PAGE = ALIGN_BYTES
WORD_BITS = 64


def layout_of(*sizes_bytes: int, objects: int = 2) -> Layout:
    places = place(sizes_bytes)
    entries = tuple(
        Entry(f"model.w{i}", ("model", f"w{i}"), "uint8", (size,), (0,), (size,), places[i], size)
        for i, size in enumerate(sizes_bytes)
    )
    names = tuple(ObjectEntry(f"extra.o{i}", ("extra", f"o{i}")) for i in range(objects))
    return Layout(3, 8, entries, names, {"mesh": [8]})


LAYOUT = layout_of(40, 0, 5000, 1)
BLOBS = [b"first", b""]


@pytest.fixture
def arena() -> Iterator[Arena]:
    with Arena.create(LAYOUT, 3000, 2) as made:
        yield made


@pytest.fixture
def other(arena: Arena) -> Iterator[Arena]:
    """The same memory as another process sees it."""
    with attached(arena) as seen:
        yield seen


def attached(arena: Arena) -> Arena:
    fd = os.dup(arena.fd)
    try:
        return Arena.attach(fd)
    except ArenaError:
        os.close(fd)
        raise


def content(entry: Entry, generation: int) -> bytes:
    start = (generation * 31 + entry.at_bytes // PAGE) % 251
    return (bytes(range(251)) * (entry.size_bytes // 251 + 2))[start : start + entry.size_bytes]


def blobs_of(generation: int) -> list[bytes]:
    return [b"%d" % generation * 40, b"" if generation % 2 else b"even"]


def fill(slot: Slot, generation: int, layout: Layout = LAYOUT) -> None:
    slot.begin(generation + 100, 1, generation, 12.5)
    for entry in layout.entries:
        slot.payload(entry)[:] = content(entry, generation)
    slot.write_blobs(blobs_of(generation) if layout.objects else [])
    slot.seal()


def is_whole(slot: Slot, layout: Layout = LAYOUT) -> bool:
    generation = slot.view().generation
    entries = all(slot.payload(e) == content(e, generation) for e in layout.entries)
    return entries and [bytes(b) for b in slot.blobs()] == blobs_of(generation)


def flip(view: memoryview | mmap.mmap, bit: int) -> None:
    view[bit // 8] ^= 1 << bit % 8


# -- geometry ----------------------------------------------------------------------------------------------------------
def test_its_size_is_what_was_said_before(arena: Arena) -> None:
    assert memory_needed_bytes(LAYOUT, 3000, 2) == arena.size_bytes == os.fstat(arena.fd).st_size


def test_it_costs_little_more_than_the_state() -> None:
    layout = layout_of(*[1 << 20] * 64)
    assert memory_needed_bytes(layout, 1 << 16, 2) < 2 * layout.state_bytes * 1.01


def test_memory_is_taken_by_prefault_and_not_before(arena: Arena) -> None:
    before = os.fstat(arena.fd).st_blocks * 512
    assert before < arena.size_bytes
    assert arena.prefault()
    assert os.fstat(arena.fd).st_blocks * 512 == arena.size_bytes


def test_slots_and_parts_begin_on_pages_of_their_own(arena: Arena) -> None:
    for slot in arena.slots:
        fill(slot, 1)
    raw = os.pread(arena.fd, arena.size_bytes, 0)
    first = raw.find(content(LAYOUT.entries[2], 1))
    second = raw.find(content(LAYOUT.entries[2], 1), first + 1)
    assert first % PAGE == second % PAGE == 0
    assert second - first == (arena.size_bytes - PAGE - PAGE) // 2  # two slots behind the control page and the layout


@pytest.mark.parametrize("slots", [0, MOST_SLOTS + 1])
def test_a_number_of_slots_that_cannot_be_is_refused(slots: int) -> None:
    with pytest.raises(ValueError, match=f"slots={slots}"):
        Arena.create(LAYOUT, 0, slots)


def test_more_memory_than_there_is_address_space_is_refused_with_the_figure() -> None:
    layout = dataclasses.replace(
        LAYOUT, entries=(Entry("w", ("w",), "uint8", (1 << 62,), (0,), (1 << 62,), 0, 1 << 62),)
    )
    with pytest.raises(ArenaError, match=r"cannot get [\d,]+ bytes of snapshot memory for rank 3"):
        Arena.create(layout, 0, 1)


@pytest.mark.parametrize(
    "entry",
    [
        Entry("w", ("w",), "uint8", (9,), (0,), (9,), 17, 9),
        Entry("w", ("w",), "uint8", (9,), (0,), (9,), 4096, -1),
        Entry("w", ("w",), "uint8", (9,), (0,), (9,), 0, 9),
    ],
    ids=["not on a page", "negative", "over another"],
)
def test_a_layout_that_overlaps_itself_is_refused(entry: Entry) -> None:
    layout = dataclasses.replace(LAYOUT, entries=(*LAYOUT.entries[:1], entry))
    with pytest.raises(ArenaError, match="not in order on pages"):
        Arena.create(layout, 0, 1)


# -- writing and reading -----------------------------------------------------------------------------------------------
def test_another_process_sees_layout_slots_and_content(arena: Arena, other: Arena) -> None:
    fill(arena.slots[1], 7)
    assert other.layout == LAYOUT
    assert other.blob_bytes == 3000
    assert [s.view().state for s in other.slots] == [SlotState.EMPTY, SlotState.SEALED]
    used = 2 * 8 + sum(map(len, blobs_of(7)))
    assert other.slots[1].view() == SlotView(SlotState.SEALED, 107, 1, 7, 12.5, used)
    assert is_whole(other.slots[1])


def test_the_time_of_a_snapshot_is_when_it_was_begun(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1234.5)
    arena.slots[0].begin(1, 0, 1)
    assert arena.slots[0].view().created_unix_s == 1234.5


def test_step_0_and_generation_0_can_be_saved(arena: Arena, other: Arena) -> None:
    slot = arena.slots[0]
    slot.begin(0, 0, 0, 0.0)
    slot.write_blobs(BLOBS)
    slot.seal()
    other.slots[0].compute_digests()
    assert other.slots[0].view().state is SlotState.SEALED
    assert other.slots[0].verify() == []


def test_objects_of_any_buffer_are_stored_as_bytes(arena: Arena) -> None:
    slot = arena.slots[0]
    slot.begin(1, 0, 1)
    words = memoryview(bytearray(16)).cast("Q")
    slot.write_blobs([words, memoryview(b"abcdef")[::1]])
    assert [bytes(b) for b in slot.blobs()] == [bytes(16), b"abcdef"]


def test_objects_that_do_not_fit_say_how_much_they_need(arena: Arena) -> None:
    slot = arena.slots[0]
    slot.begin(1, 0, 1)
    with pytest.raises(BlobsTooLargeError, match="snapshot memory with more room") as caught:
        slot.write_blobs([bytes(4000), bytes(200)])
    assert caught.value.needed_bytes == 4216
    with Arena.create(LAYOUT, caught.value.needed_bytes, 1) as larger:
        larger.slots[0].begin(1, 0, 1)
        larger.slots[0].write_blobs([bytes(4000), bytes(200)])


def test_a_missing_object_is_an_error(arena: Arena) -> None:
    arena.slots[0].begin(1, 0, 1)
    with pytest.raises(ValueError, match="1 blobs for the 2 objects"):
        arena.slots[0].write_blobs([b"one"])


def test_nothing_is_sealed_without_begin_or_without_its_objects(arena: Arena) -> None:
    slot = arena.slots[0]
    with pytest.raises(ArenaError, match="nothing was begun"):
        slot.seal()
    slot.begin(1, 0, 1)
    with pytest.raises(ArenaError, match="2 objects are not written"):
        slot.seal()
    assert slot.view().state is SlotState.WRITING


def test_objects_of_the_snapshot_before_are_not_sealed_into_the_next(arena: Arena) -> None:
    fill(arena.slots[0], 1)
    arena.slots[0].begin(2, 0, 2)
    assert arena.slots[0].blobs() == []
    with pytest.raises(ArenaError, match="objects are not written"):
        arena.slots[0].seal()


def test_a_state_without_objects_and_one_without_tensors_can_be_saved() -> None:
    for layout in (layout_of(10, objects=0), layout_of(objects=1)):
        with Arena.create(layout, 100, 1) as arena:
            slot = arena.slots[0]
            slot.begin(1, 0, 1)
            slot.write_blobs([b"x"] * len(layout.objects))
            slot.seal()
            slot.compute_digests()
            assert slot.verify() == []
            assert arena.prefault()


def test_a_released_slot_is_empty(arena: Arena, other: Arena) -> None:
    fill(arena.slots[0], 1)
    arena.slots[0].release()
    assert other.slots[0].view().state is SlotState.EMPTY


# -- every step of a writer --------------------------------------------------------------------------------------------
def at_every_line(check: Callable[[], object], work: Callable[[], object]) -> int:
    """Runs *work* and calls *check* before each line of the module that it executes. Returns the number of lines."""
    lines = 0
    depth = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines, depth
        if frame.f_code.co_filename != arena_module.__file__ or depth:
            return None
        if event == "line":
            lines += 1
            depth += 1
            check()
            depth -= 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def test_at_no_line_of_a_save_is_a_snapshot_lost_or_a_torn_one_valid(arena: Arena, other: Arena) -> None:
    fill(arena.slots[0], 1)
    fill(arena.slots[1], 2)
    seen: set[tuple[SlotState, int]] = set()

    def check() -> None:
        assert is_whole(other.slots[1])
        view = other.slots[0].view()
        seen.add((view.state, view.generation))
        if view.state is SlotState.SEALED:
            assert is_whole(other.slots[0])

    lines = at_every_line(check, lambda: fill(arena.slots[0], 3))
    check()
    assert lines > 25
    assert seen == {
        (SlotState.SEALED, 1),
        (SlotState.WRITING, 1),
        (SlotState.WRITING, 3),
        (SlotState.SEALED, 3),
    }


def test_at_no_line_of_their_computation_are_digests_wrong(arena: Arena, other: Arena) -> None:
    slot = arena.slots[0]
    fill(slot, 1)
    slot.compute_digests()
    old = other.slots[0].digests()
    fill(slot, 2)
    found: list[list[str | None]] = []

    def check() -> None:
        found.append(other.slots[0].digests())

    lines = at_every_line(check, lambda: slot.compute_digests([0, 1]))
    lines += at_every_line(check, slot.compute_digests)
    check()
    new = other.slots[0].digests()
    assert lines > 30
    assert None not in new
    assert new[0] != old[0]
    none: list[str | None] = [None] * 5
    stages = [none, [*new[:2], *none[2:]], none, new]
    assert [f for i, f in enumerate(found) if i == 0 or f != found[i - 1]] == stages


def test_digests_of_a_snapshot_are_gone_once_the_next_is_begun(arena: Arena) -> None:
    slot = arena.slots[0]
    fill(slot, 1)
    slot.compute_digests()
    slot.begin(2, 0, 2)
    assert slot.digests() == [None] * 5


# -- digests -----------------------------------------------------------------------------------------------------------
def test_digests_are_those_of_the_files(arena: Arena) -> None:
    from steadyrun.checkpoint.checksums import xxh3

    fill(arena.slots[0], 9)
    arena.slots[0].compute_digests()
    *entries, objects = arena.slots[0].digests()
    assert entries == [xxh3(content(e, 9)) for e in LAYOUT.entries]
    assert entries[2] == arena.slots[0].digest(2)
    assert objects not in entries


def test_known_digests_are_taken_over_and_only_the_others_computed(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = arena.slots[0]
    fill(slot, 1)
    slot.compute_digests([2])
    known = slot.digest(2)
    assert known is not None
    fill(slot, 1)
    slot.record_digests({2: known})
    hashed: list[int] = []
    real = Slot._hash
    monkeypatch.setattr(Slot, "_hash", lambda self, i: (hashed.append(i), real(self, i))[1])
    slot.compute_digests()
    assert hashed == [0, 1, 3, 4]
    assert slot.verify() == []


def test_a_wrong_digest_that_was_taken_over_is_found(arena: Arena) -> None:
    slot = arena.slots[0]
    fill(slot, 1)
    slot.record_digests({0: "ab" * 16})
    slot.compute_digests()
    assert [d.part for d in slot.verify()] == ["model.w0"]


def test_what_has_no_digest_does_not_pass(arena: Arena) -> None:
    fill(arena.slots[0], 1)
    arena.slots[0].compute_digests([0, 1, 4])
    assert [(d.part, d.index) for d in arena.slots[0].verify()] == [("model.w2", 2), ("model.w3", 3)]
    assert "without a checksum" in arena.slots[0].verify()[0].why


def test_threads_that_take_digests_of_one_slot_keep_each_others(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = arena.slots[0]
    fill(slot, 1)
    second = threading.Thread(target=slot.compute_digests, args=([2, 3, 4],))
    real = Slot.digests

    def digests(self: Slot) -> list[str | None]:
        rows = real(self)
        if second.ident is None:  # the first thread has read the table and not yet written it
            second.start()
            second.join(0.1)
        return rows

    monkeypatch.setattr(Slot, "digests", digests)
    slot.compute_digests([0, 1])
    second.join()
    assert slot.verify() == []


# -- flipped bits ------------------------------------------------------------------------------------------------------
def verified(arena: Arena) -> Slot:
    slot = arena.slots[0]
    fill(slot, 5)
    slot.compute_digests()
    assert slot.verify() == []
    return slot


HEADER_WORDS = [0, *range(8, 15)]  # what lies between is not used


@pytest.mark.parametrize("word", HEADER_WORDS)
def test_every_flipped_bit_of_the_header_is_found(arena: Arena, word: int) -> None:
    slot = verified(arena)
    for bit in range(word * WORD_BITS, (word + 1) * WORD_BITS):
        flip(slot._words.cast("B"), bit)
        assert [d.part for d in slot.verify()] == ["header"]
        assert slot.view().state is not SlotState.SEALED
        flip(slot._words.cast("B"), bit)
    assert slot.verify() == []


def test_the_header_of_another_slot_is_found(arena: Arena) -> None:
    for slot in arena.slots:
        fill(slot, 5 + slot.number)
    arena.slots[0]._words[:] = arena.slots[1]._words
    assert arena.slots[0].view().state is SlotState.DAMAGED
    assert arena.slots[1].view().state is SlotState.SEALED


def test_a_look_at_a_slot_while_its_writer_goes_on_is_not_taken_for_damage(
    arena: Arena, other: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(arena.slots[0], 1)
    looks = 0
    real = arena_module._record_sum

    def record_sum(record: bytes) -> int:
        nonlocal looks
        looks += 1
        if looks == 1:  # between the loads of state and record the writer has sealed the next one
            fill(arena.slots[0], 2)
            record = b"half of one and half of the other".ljust(len(record))
        return real(record)

    monkeypatch.setattr(arena_module, "_record_sum", record_sum)
    view = other.slots[0].view()
    assert (view.state, view.generation) == (SlotState.SEALED, 2)


def test_every_flipped_bit_of_the_digests_is_found(arena: Arena) -> None:
    slot = verified(arena)
    for bit in range(len(slot._digests) * 8):
        flip(slot._digests, bit)
        assert [d.part for d in slot.verify()] == ["digests"]
        flip(slot._digests, bit)
    assert slot.verify() == []


def test_every_flipped_bit_of_the_objects_is_found(arena: Arena) -> None:
    slot = verified(arena)
    for bit in range(slot.view().blobs_bytes * 8):
        flip(slot._blobs, bit)
        assert [d.part for d in slot.verify()] == ["objects"]
        flip(slot._blobs, bit)
    assert slot.verify() == []


@pytest.mark.parametrize("index", [0, 2, 3])
def test_every_flipped_byte_of_a_tensor_is_found_and_named(arena: Arena, index: int) -> None:
    slot = verified(arena)
    entry = LAYOUT.entries[index]
    for byte in range(0, entry.size_bytes, 1 if entry.size_bytes < 100 else 97):
        flip(slot.payload(entry), byte * 8 + byte % 8)
        (damaged,) = slot.verify()
        assert damaged == Damaged(entry.key, (0,), damaged.why, index)
        assert f"{entry.key} at [0] in slot 0" in damaged.why
        flip(slot.payload(entry), byte * 8 + byte % 8)
    assert slot.verify() == []


def test_lengths_of_objects_that_lead_outside_are_an_error(arena: Arena) -> None:
    slot = verified(arena)
    slot._blobs[0:8] = (1 << 40).to_bytes(8, sys.byteorder)
    with pytest.raises(ArenaError, match="the objects in slot 0 are damaged"):
        slot.blobs()


def test_two_damaged_parts_are_both_named(arena: Arena) -> None:
    slot = verified(arena)
    flip(slot.payload(LAYOUT.entries[3]), 0)
    flip(slot.payload(LAYOUT.entries[0]), 0)
    assert [d.part for d in slot.verify()] == ["model.w0", "model.w3"]


def test_an_empty_or_torn_slot_does_not_verify(arena: Arena) -> None:
    assert "says empty" in arena.slots[0].verify()[0].why
    arena.slots[0].begin(1, 0, 1)
    assert "says writing" in arena.slots[0].verify()[0].why


@pytest.mark.parametrize("word", range(9))
def test_every_flipped_bit_of_the_geometry_is_refused(arena: Arena, word: int) -> None:
    for bit in range(word * WORD_BITS, (word + 1) * WORD_BITS):
        flip(arena._mapping, bit)
        with pytest.raises(ArenaError, match="cannot use this descriptor as snapshot memory"):
            attached(arena)
        flip(arena._mapping, bit)
    attached(arena).close()


def test_every_flipped_byte_of_the_layout_is_refused(arena: Arena) -> None:
    for byte in range(len(LAYOUT.to_json())):
        bit = (PAGE + byte) * 8 + byte % 8
        flip(arena._mapping, bit)
        with pytest.raises(ArenaError, match="the layout in it is damaged"):
            attached(arena)
        flip(arena._mapping, bit)
    attached(arena).close()


# -- what is attached --------------------------------------------------------------------------------------------------
def copy_of(arena: Arena, size_bytes: int, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> int:
    fd = os.memfd_create("copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.pwrite(fd, os.pread(arena.fd, size_bytes, 0), 0)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def refusal(fd: int) -> str:
    try:
        with pytest.raises(ArenaError) as caught:
            Arena.attach(fd)
    finally:
        os.close(fd)  # still ours
    return str(caught.value)


@pytest.mark.parametrize("cut_bytes", [1, PAGE, 5 * PAGE])
def test_a_cut_file_is_refused(arena: Arena, cut_bytes: int) -> None:
    text = refusal(copy_of(arena, arena.size_bytes - cut_bytes))
    assert f"it has {arena.size_bytes - cut_bytes:,} bytes and should have {arena.size_bytes:,}" in text


@pytest.mark.parametrize("size_bytes", [0, 1, PAGE - 1])
def test_a_file_shorter_than_a_page_is_refused(arena: Arena, size_bytes: int) -> None:
    assert f"it has {size_bytes:,} bytes" in refusal(copy_of(arena, size_bytes))


def test_a_longer_file_is_refused(arena: Arena) -> None:
    assert "should have" in refusal(copy_of(arena, arena.size_bytes + PAGE))


def test_a_file_that_others_could_still_cut_is_refused(arena: Arena) -> None:
    assert "not sealed" in refusal(copy_of(arena, arena.size_bytes, seals=0))


def test_a_sealed_copy_is_as_good_as_the_original(arena: Arena) -> None:
    fill(arena.slots[1], 4)
    with Arena.attach(copy_of(arena, arena.size_bytes)) as copy:
        assert is_whole(copy.slots[1])


def test_nobody_can_cut_what_was_created(arena: Arena) -> None:
    for size_bytes in (PAGE, arena.size_bytes + PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size_bytes)


def test_other_files_are_refused(arena: Arena) -> None:
    fd = os.memfd_create("foreign", os.MFD_CLOEXEC)
    os.pwrite(fd, os.urandom(4 * PAGE), 0)
    assert "it is something else" in refusal(fd)
    assert "0 bytes" in refusal(os.open("/dev/null", os.O_RDONLY))
    reader, writer = os.pipe()
    os.close(writer)
    assert "cannot use this descriptor" in refusal(reader)
    assert "cannot use this descriptor" in refusal(socket.socket().detach())
    with pytest.raises(ArenaError, match="Bad file descriptor"):
        Arena.attach(1 << 20)


def test_a_read_only_descriptor_is_refused(arena: Arena) -> None:
    fd = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDONLY)
    assert "cannot map" in refusal(fd)


def test_a_layout_that_does_not_fit_is_refused_though_its_checksum_is_right(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = (*LAYOUT.entries[:1], dataclasses.replace(LAYOUT.entries[2], at_bytes=0))
    with monkeypatch.context() as m:
        m.setattr(arena_module, "_layout_problem", lambda layout: None)
        bad = Arena.create(dataclasses.replace(LAYOUT, entries=entries), 0, 1)
    with bad, pytest.raises(ArenaError, match="not in order on pages"):
        attached(bad)


def test_another_version_is_named(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_VERSION", 2)
    with pytest.raises(ArenaError, match="it is of version 1, this is 2"):
        attached(arena)


# -- holds -------------------------------------------------------------------------------------------------------------
def test_a_held_slot_is_not_written_and_stays_as_it_is(arena: Arena, other: Arena) -> None:
    fill(arena.slots[0], 1)
    assert other.slots[0].hold(1)
    assert other.slots[0].hold()
    assert arena.control.busy() == (2, 0)
    before = os.pread(arena.fd, arena.size_bytes, 4 * PAGE)
    with pytest.raises(SlotBusyError, match="slot 0: it is being written to storage"):
        arena.slots[0].begin(2, 0, 2)
    assert os.pread(arena.fd, arena.size_bytes, 4 * PAGE) == before
    other.slots[0].let_go()
    other.slots[0].let_go()
    arena.slots[0].begin(2, 0, 2)


def test_only_the_sealed_snapshot_that_is_meant_is_held(arena: Arena, other: Arena) -> None:
    assert not other.slots[0].hold()
    arena.slots[0].begin(1, 0, 1)
    assert not other.slots[0].hold(1)
    arena.slots[0].write_blobs(BLOBS)
    arena.slots[0].seal()
    assert not other.slots[0].hold(2)
    assert arena.control.busy() == (0, 0)
    assert other.slots[0].hold(1)


def test_a_hold_that_comes_between_the_two_looks_of_begin_wins(
    arena: Arena, other: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(arena.slots[0], 1)
    monkeypatch.setattr(arena_module, "_fence", lambda lock: other.control.add_busy(0, 1))
    with pytest.raises(SlotBusyError):
        arena.slots[0].begin(2, 0, 2)
    assert other.slots[0].view().state is SlotState.SEALED
    assert is_whole(other.slots[0])


def test_a_begin_that_comes_between_the_steps_of_hold_wins(
    arena: Arena, other: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(arena.slots[0], 1)
    monkeypatch.setattr(
        arena_module, "_fence", lambda lock: arena.slots[0]._words.__setitem__(0, arena_module._WRITING)
    )
    assert not other.slots[0].hold(1)
    assert other.control.busy() == (0, 0)


def test_the_holds_of_a_dead_saver_are_cleared_by_the_next(arena: Arena, other: Arena) -> None:
    fill(arena.slots[0], 1)
    arena.slots[0].hold()
    other.control.clear_busy()
    other.slots[0].let_go()  # of one hold too many nothing remains
    assert arena.control.busy() == (0, 0)
    arena.slots[0].begin(2, 0, 2)


# -- the control page --------------------------------------------------------------------------------------------------
def test_an_order_to_save_is_seen_with_its_tiers(arena: Arena, other: Arena) -> None:
    assert other.control.wanted() is None
    arena.control.want(0, [TierName.MEMORY, TierName.REMOTE, TierName.MEMORY])
    assert other.control.wanted() == Wanted(0, frozenset({TierName.MEMORY, TierName.REMOTE}), 1)
    arena.control.want(0)
    assert other.control.wanted() == Wanted(0, frozenset(), 2)
    arena.control.want(None)
    assert other.control.wanted() is None


@given(st.integers(0, (1 << 40) - 2), st.sets(st.sampled_from(TierName)), st.integers(0, (1 << 16) - 1))
def test_every_order_survives_its_packing(step: int, tiers: set[TierName], serial: int) -> None:
    with Arena.create(layout_of(1, objects=0), 0, 1) as arena:
        arena.control._words[16] = serial << 48
        arena.control.want(step, tiers)
        assert arena.control.wanted() == Wanted(step, frozenset(tiers), (serial + 1) % (1 << 16))


@pytest.mark.parametrize("step", [-2, (1 << 40) - 1])
def test_a_step_that_does_not_fit_is_refused(arena: Arena, step: int) -> None:
    with pytest.raises(ValueError, match="is not between 0 and"):
        arena.control.want(step)


def test_the_rank_tells_its_step_and_the_saver_its_beat(arena: Arena, other: Arena) -> None:
    assert other.control.rank_step is None
    arena.control.rank_step = 0
    assert other.control.rank_step == 0
    other.control.saver_beat = (1 << 64) - 1
    assert arena.control.saver_beat == (1 << 64) - 1
    arena.control.rank_step = None
    assert other.control.rank_step is None


def test_words_told_to_others_do_not_make_the_memory_foreign(arena: Arena) -> None:
    arena.control.want(3, TierName)
    arena.control.rank_step = 7
    arena.control.saver_beat = 9
    arena.control.add_busy(1, 1)
    with attached(arena) as other:
        assert other.control.busy() == (0, 1)


# -- choosing ----------------------------------------------------------------------------------------------------------
def sealed(generation: int, attempt: int = 0) -> SlotView:
    return SlotView(SlotState.SEALED, generation, attempt, generation)


EMPTY = SlotView(SlotState.EMPTY)
TORN = SlotView(SlotState.WRITING, generation=9)
BROKEN = SlotView(SlotState.DAMAGED, generation=99)


@pytest.mark.parametrize(
    ("views", "busy", "chosen"),
    [
        ([EMPTY, EMPTY], [0, 0], 0),
        ([sealed(1), EMPTY], [0, 0], 1),
        ([sealed(1), sealed(2)], [0, 0], 0),
        ([sealed(3), sealed(2)], [0, 0], 1),
        ([sealed(1), sealed(2)], [1, 0], None),
        ([sealed(1), TORN], [0, 0], 1),
        ([TORN, sealed(1)], [0, 0], 0),
        ([BROKEN, sealed(1)], [0, 0], 0),
        ([sealed(1), sealed(5), sealed(3)], [0, 0, 0], 0),
        ([sealed(1), sealed(5), sealed(3)], [2, 0, 0], 2),
        ([sealed(9, attempt=1), sealed(2, attempt=2)], [0, 0], 0),
        ([sealed(1), EMPTY], [0, 1], None),
        ([sealed(1)], [0], 0),
        ([sealed(1)], [1], None),
        ([], [], None),
    ],
)
def test_a_slot_is_chosen(views: list[SlotView], busy: list[int], chosen: int | None) -> None:
    assert choose_slot(views, busy) == chosen


VIEWS = st.builds(SlotView, st.sampled_from(SlotState), st.just(0), st.integers(0, 3), st.integers(0, 5))


@given(st.lists(st.tuples(VIEWS, st.integers(0, 2)), min_size=2, max_size=5))
def test_the_newest_snapshot_and_busy_slots_are_never_chosen(slots: list[tuple[SlotView, int]]) -> None:
    views, busy = [v for v, _ in slots], [b for _, b in slots]
    chosen = choose_slot(views, busy)
    newest = max(((v.attempt, v.generation) for v in views if v.state is SlotState.SEALED), default=None)
    if chosen is None:
        kept = [v for v, b in slots if not b]
        assert len(kept) <= 1
        assert all(v.state is SlotState.SEALED and (v.attempt, v.generation) == newest for v in kept)
        return
    assert not busy[chosen]
    left = [v for i, v in enumerate(views) if i != chosen and v.state is SlotState.SEALED]
    assert newest is None or newest in [(v.attempt, v.generation) for v in left]


# -- taking the memory -------------------------------------------------------------------------------------------------
LARGE = layout_of(40 << 20, objects=0)


def taken_bytes(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_prefault_stops_when_it_is_told() -> None:
    with Arena.create(LARGE, 0, 1) as arena:
        asked = iter([False, False, True])
        assert not arena.prefault(lambda: next(asked))
        assert taken_bytes(arena) == 16 << 20


def mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum("steadyrun-snapshot" in line for line in maps)


@pytest.mark.parametrize("advice", [arena_module._MADV_POPULATE_WRITE, 9999], ids=["populate", "touch"])
def test_prefault_stops_when_the_arena_is_closed_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, advice: int
) -> None:
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", advice)
    before = os.listdir("/proc/self/fd"), mappings()
    arena = Arena.create(LARGE, 0, 1)
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        if calls == 2:
            arena.close()
        return False

    assert not arena.prefault(stop)
    assert calls == 2
    assert not arena.prefault()
    assert (os.listdir("/proc/self/fd"), mappings()) == before


@pytest.mark.parametrize("advice", [arena_module._MADV_POPULATE_WRITE, 9999], ids=["populate", "touch"])
def test_prefault_leaves_what_is_in_the_memory(monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", advice)  # 9999: as a kernel before 5.14 answers
    with Arena.create(layout_of(2 << 20, 5000), 5000, 2) as arena:
        layout = arena.layout
        fill(arena.slots[1], 3, layout)
        assert arena.prefault()
        assert taken_bytes(arena) == arena.size_bytes
        assert is_whole(arena.slots[1], layout)


def test_prefault_says_when_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 9999)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with Arena.create(LAYOUT, 0, 1) as arena, pytest.raises(ArenaError, match="Cannot allocate memory; ask for fewer"):
        arena.prefault()


# -- closing -----------------------------------------------------------------------------------------------------------
def test_after_close_its_views_fail_and_the_memory_of_others_stays(arena: Arena) -> None:
    other = attached(arena)
    fill(arena.slots[0], 1)
    held = other.slots[0].payload(LAYOUT.entries[0])
    other.close()
    other.close()
    with pytest.raises(ValueError, match="released"):
        other.slots[0].view()
    assert held == content(LAYOUT.entries[0], 1)
    assert mappings() == 2
    held.release()
    assert mappings() == 1
    assert is_whole(arena.slots[0])


def test_it_leaves_no_descriptor_and_no_mapping() -> None:
    before = len(os.listdir("/proc/self/fd")), mappings()
    arena = Arena.create(LAYOUT, 0, 1)
    assert mappings() == before[1] + 1
    arena.close()
    assert (len(os.listdir("/proc/self/fd")), mappings()) == before
