"""More steps and sections than a record lists: nothing long vanishes, and the sums are right."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.core import layout
from steadyrun.core.board import Board
from steadyrun.core.journal import Journal, read_journal
from steadyrun.core.sections import STEP
from steadyrun.detect.calibrate.passes import PassReader
from steadyrun.node.gathered import KEEP, LONGEST, Gathered
from steadyrun.node.sampling import EVERY_S, Sampler
from steadyrun.testing.store import ManualClock
from steadyrun.watch.marks import make_marks


# -- what is kept ------------------------------------------------------------------------------------------------------
def gathered(values_s: list[float]) -> dict[str, Any]:
    g = Gathered(6)
    for seconds in values_s:
        g.add(seconds)
    assert g.n == len(values_s)
    assert g.max_s == max(values_s)
    return g.told()


def test_few_are_listed_as_they_are() -> None:
    values_s = [i / 100 for i in range(1, KEEP + 1)]
    assert gathered(values_s) == {"listed_s": values_s}


def test_of_many_the_long_ones_keep_their_places() -> None:
    values_s = [0.01] * 1000
    values_s[3], values_s[500], values_s[999] = 7.0, 0.5, 9.0
    told = gathered(values_s)
    assert told["listed_s"] == values_s[-KEEP:]
    assert told["longest"] == [[3, 7.0], [500, 0.5]]
    assert told["left_out_s"] == pytest.approx(0.01 * (1000 - KEEP - 2))


def test_the_longest_left_out_is_told_even_where_none_is_unusual() -> None:
    draw = random.Random(1)
    values_s = [0.01 * draw.uniform(0.9, 1.1) for _ in range(600)]
    (told,) = gathered(values_s)["longest"]
    assert told[1] == pytest.approx(max(values_s[:-KEEP]), abs=1e-6)
    assert values_s[told[0]] == pytest.approx(told[1], abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=700), st.integers(1, 50), st.integers(0, 700))
def test_nothing_is_lost_from_the_sum(values_s: list[float], unread: int, at: int) -> None:
    g = Gathered(9)
    for seconds in values_s[:at]:
        g.add(seconds)
    g.add_unread(unread, 3.0 + unread * 0.01, 0.01)
    for seconds in values_s[at:]:
        g.add(seconds)
    told = g.told()
    longest = told["longest"]
    assert g.n == len(values_s) + unread
    assert len(longest) <= LONGEST
    assert len({place for place, _ in longest}) == len(longest)
    assert all(0 <= place < g.n - len(told["listed_s"]) for place, _ in longest)
    total_s = sum(told["listed_s"]) + sum(s for _, s in longest) + told["left_out_s"]
    assert total_s == pytest.approx(sum(values_s) + 3.0 + unread * 0.01, rel=1e-6)


def test_of_unread_ones_the_longest_is_what_the_usual_leaves() -> None:
    g = Gathered(6)
    for _ in range(10):
        g.add(0.001)
    g.add_unread(100, 5.099, 0.001)
    for _ in range(10):
        g.add(0.001)
    told = g.told()
    assert told["longest"] == [[10, pytest.approx(5.0)]]
    assert told["left_out_s"] == pytest.approx(0.109)


# -- from the board to the passes --------------------------------------------------------------------------------------
class Rank:
    """Writes steps and sections of chosen lengths onto the board, as a rank's own code does, and looks at it."""

    def __init__(self, folder: Path) -> None:
        buffer = bytearray((layout.HEADER_WORDS + layout.SLOT_WORDS) * 8)
        header = memoryview(buffer).cast("Q")
        header[layout.H_SLOTS] = 1
        header[layout.H_BASE_NS] = time.monotonic_ns() - 10**9
        self.board = Board(folder / "none", cast(mmap, buffer))  # of a mapping only a buffer is asked for
        self.clock = ManualClock()
        self.path = folder / "journal.jsonl"
        self.journal = Journal(self.path, "n0")
        self.sampler = Sampler(self.board, self.journal, self.clock, "n0")
        self.words, self.base = self.board.words, self.board.slot_base(0)
        make_marks(self.words, self.base, self.board.base_ns, os.getpid(), 7, 0)
        self.words[self.base + layout.S_OWNER_PID] = os.getpid()
        self.ns = 10**9
        self.steps = self.passes = 0
        self.sampler.begin_attempt(0)

    def step(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)
        if self.steps:
            at = (self.steps - 1) & (layout.STEP_RING - 1)
            self.words[self.base + layout.S_STEP_RING + at] = round(seconds * 1e9)
            self.words[self.base + layout.S_STEP_RING_COUNT] = self.steps
        else:
            self.words[self.base + layout.S_FIRST_STEP_AT] = self.ns
        self.steps += 1
        self.words[self.base + layout.S_STEP] = self.steps
        self.words[self.base + layout.S_STEP_AT] = self.ns
        self.words[self.base + layout.S_STEPS_DONE] = self.steps

    def section(self, seconds: float) -> None:
        at = self.passes & (layout.RING - 1)
        self.words[self.base + layout.S_RING + at] = round(seconds * 1e9)
        self.passes += 1
        self.words[self.base + layout.S_RING_COUNT] = self.passes

    def look(self, after_s: float = 0.5) -> None:
        self.clock.advance(after_s)
        self.sampler.sample(self.clock.now_s(), {0: (0, self.board.view(0))})

    def records(self) -> list[dict[str, Any]]:
        self.sampler.flush()
        return [dict(r) for r in read_journal(self.path) if r["type"] == "steps"]


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.journal.close()


def read(records: list[dict[str, Any]]) -> PassReader:
    reader = PassReader()
    for record in records:
        reader.read(record)
    return reader


def test_a_stall_among_steps_of_milliseconds_reaches_the_journal_and_its_reader(rank: Rank) -> None:
    rank.look()
    for i in range(4000):
        rank.step(6.5 if i == 700 else 0.002)
        if i % 200 == 199:
            rank.look(0.4)
    records = rank.records()
    assert len(records) >= 2
    assert sum(r["ranks"]["0"]["steps"] for r in records) == 3999
    assert sum(r["ranks"]["0"]["lost"] for r in records) == 0
    reader = read(records)
    run = reader.result("r")
    (stall,) = [p for p in run.passes if p.seconds > 0.1]
    assert (stall.section, stall.index, stall.step) == (STEP, 699, 700)
    assert run.unread == 0
    assert run.summed > 3000
    assert len(list(run.passes)) + run.summed == 3999


def test_a_stall_whose_place_on_the_board_was_overwritten_is_told_by_the_time_it_took(rank: Rank) -> None:
    rank.look()
    for _ in range(100):
        rank.step(0.001)
    rank.look()
    rank.step(4.0)
    for _ in range(layout.STEP_RING + 300):
        rank.step(0.0005)
    rank.look()
    (record,) = rank.records()
    told = record["ranks"]["0"]
    assert told["steps"] == 99 + 1 + layout.STEP_RING + 300
    assert told["lost"] == 301
    assert max(s for _, s in told["longest"]) == pytest.approx(4.0, abs=0.01)
    total_s = sum(told["step_times_s"]) + sum(s for _, s in told["longest"]) + told["left_out_s"]
    assert total_s == pytest.approx(99 * 0.001 + 4.0 + (layout.STEP_RING + 300) * 0.0005, rel=0.01)


def test_sections_that_come_faster_than_they_are_listed_keep_their_long_ones(rank: Rank) -> None:
    rank.look()
    for k in range(6):
        for i in range(300):
            rank.section(1.5 if (k, i) == (1, 7) else 0.0002)
        rank.look(0.4)
    (record,) = rank.records()
    ((_, told),) = record["ranks"]["0"]["sections"].items()
    assert (told["n"], told["max_s"]) == (1800, 1.5)
    assert told["longest"] == [[307, 1.5]]
    assert told["left_out_s"] == pytest.approx((1800 - KEEP - 1) * 0.0002)
    run = read([record]).result("r")
    assert [p.index for p in run.passes if p.seconds == 1.5] == [307]


def test_records_are_written_every_few_seconds(rank: Rank) -> None:
    rank.look()
    rank.step(1.0)
    rank.step(1.0)
    rank.look(EVERY_S)
    assert [r["ranks"]["0"]["step_times_s"] for r in read_journal(rank.path) if r["type"] == "steps"] == [[1.0]]
