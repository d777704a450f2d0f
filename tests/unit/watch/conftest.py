from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import cast

import pytest

from steadyrun.core import layout
from steadyrun.core.board import Board, SlotView
from steadyrun.watch.marks import Marks, make_marks


class Slot:
    """A board in plain memory, the marks of one rank on it, and what a reader sees."""

    def __init__(self) -> None:
        buffer = bytearray((layout.HEADER_WORDS + 2 * layout.SLOT_WORDS) * 8)
        header = memoryview(buffer).cast("Q")
        header[layout.H_SLOTS] = 2
        header[layout.H_BASE_NS] = time.monotonic_ns() - 1_000_000
        self.board = Board(Path("no file"), cast(mmap, buffer))  # all that is asked of a mapping is that it is a buffer
        self.base = self.board.slot_base(1)
        self.marks: Marks = make_marks(self.board.words, self.base, self.board.base_ns, os.getpid(), 7, 3)

    def view(self) -> SlotView:
        view = self.board.view(1)
        assert view is not None
        return view

    def names(self, lane: int = 0) -> list[str]:
        return [s.name for s in self.view().sections if s.lane == lane]

    def durations(self) -> list[str]:
        return [d.name for d in self.board.durations(1, 0)[0]]


@pytest.fixture
def slot() -> Slot:
    return Slot()


@pytest.fixture
def in_thread() -> Callable[[Callable[[], None]], None]:
    """Runs a call in a thread of its own, to its end; an exception in it fails the test."""

    def run(call: Callable[[], None]) -> None:
        failures: list[BaseException] = []

        def guarded() -> None:
            try:
                call()
            except BaseException as e:
                failures.append(e)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join(30)
        assert not thread.is_alive()
        if failures:
            raise failures[0]

    return run
