"""Rings of the board over their ends: what is read is what was written, however the looks fall."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.core import layout
from steadyrun.core.board import Board


@pytest.fixture(scope="module")
def board() -> Iterator[Board]:
    made = Board.create_anonymous(1)
    yield made
    made.close()


def write(board: Board, count: int, step_ns: int) -> None:
    base = board.slot_base(0)
    board.words[base + layout.S_STEP_RING + (count & layout.STEP_RING - 1)] = step_ns
    board.words[base + layout.S_STEP_RING_COUNT] = count + 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 2 * layout.STEP_RING), min_size=1, max_size=6))
def test_each_step_is_read_once_or_counted_as_lost(board: Board, portions: list[int]) -> None:
    board.clear_slot(0)
    written = seen = 0
    for portion in portions:
        for _ in range(portion):
            write(board, written, (written + 1) * 1000)
            written += 1
        times_s, count, lost = board.step_times_s(0, seen)
        assert count == written
        assert lost == max(portion - layout.STEP_RING, 0)
        assert times_s == [(i + 1) / 1e6 for i in range(seen + lost, written)]
        seen = count


def test_names_of_another_owner_are_read_anew(board: Board) -> None:
    base = board.slot_base(0)

    def own(pid: int, name: bytes) -> None:
        board.words[base + layout.S_OWNER_PID] = pid
        raw = memoryview(name.ljust(layout.NAME_BYTES, b"\0")).cast("Q")
        start = base + layout.S_NAME_TABLE + layout.NAME_BYTES // 8
        board.words[start : start + len(raw)] = raw
        board.words[base + layout.S_NAMES] = 2
        board.words[base + layout.S_RING] = 1 << layout.RING_SHIFT | 5_000_000
        board.words[base + layout.S_RING_COUNT] = 1

    for pid, name in ((7, b"data"), (8, b"loss")):
        own(pid, name)
        assert [(d.name, d.duration_s) for d in board.durations(0, 0)[0]] == [(name.decode(), 0.005)]
