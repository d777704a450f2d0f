"""Step timings from the board into the journal: what is kept, left out, thinned, counted and handed on."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator
from mmap import mmap
from pathlib import Path
from typing import Any, cast

import pytest

from steadyrun.core import layout
from steadyrun.core.board import Board
from steadyrun.core.journal import Journal, read_journal
from steadyrun.core.timing import StepTiming
from steadyrun.detect.straggler.align import FIELDS
from steadyrun.node import sampling
from steadyrun.node.sampling import COLUMNS, EVERY_S, KEEP_TIMINGS, Sampler, timing_columns
from steadyrun.testing.store import ManualClock
from steadyrun.watch.marks import make_marks
from steadyrun.watch.slot import timing_writer

NAN = math.nan


def timing(step: int, **values: Any) -> StepTiming:
    return dataclasses.replace(
        StepTiming(step, 5.0, 0.123456789, 0.1, 0.04, 0.05, 0.01, 0.0, 0.0, 0.02, 0.1, flags=16), **values
    )


# -- columns -----------------------------------------------------------------------------------------------------------
def test_a_journal_has_every_measure_that_is_compared() -> None:
    measures = {f.name for f in dataclasses.fields(StepTiming)} - {"step", "at_s"}
    assert set(FIELDS) <= set(COLUMNS) == measures


def test_columns_hold_what_the_steps_told() -> None:
    columns = timing_columns([timing(3), timing(4, probe_s=0.0051234567, work=4096.0, starved_s=0.001)])
    assert columns["step"] == [3, 4]
    assert columns["wall_s"] == [0.12346, 0.12346]
    assert columns["probe_s"] == [None, 0.00512]
    assert columns["work"] == [None, 4096.0]
    assert columns["starved_s"] == [0.0, 0.001]
    assert columns["flags"] == [16, 16]
    json.dumps(columns, allow_nan=False)


def test_columns_that_say_nothing_are_left_out() -> None:
    columns = timing_columns([timing(3), timing(4)])
    silent = {name for name in COLUMNS if not getattr(timing(3), name)}
    assert silent >= {"data_s", "checkpoint_s", "probe_s", "work", "starved_s"}
    assert set(columns) == {"step", *COLUMNS} - silent
    assert timing_columns([]) == {"step": []}


# -- the sampler -------------------------------------------------------------------------------------------------------
class Sampled:
    """One node with ranks of which timings are put on the board, and what its journal holds."""

    def __init__(self, folder: Path, ranks: int = 2) -> None:
        buffer = bytearray((layout.HEADER_WORDS + ranks * layout.SLOT_WORDS) * 8)
        header = memoryview(buffer).cast("Q")
        header[layout.H_SLOTS] = ranks
        header[layout.H_BASE_NS] = time.monotonic_ns() - 1_000_000
        self.board = Board(folder / "none", cast(mmap, buffer))  # of a mapping only a buffer is asked for
        self.clock = ManualClock()
        self.path = folder / "journal.jsonl"
        self.journal = Journal(self.path, "n0")
        self.sampler = Sampler(self.board, self.journal, self.clock, "n0")
        bases = [self.board.slot_base(slot) for slot in range(ranks)]
        self.marks = [make_marks(self.board.words, b, self.board.base_ns, os.getpid(), 7, 0) for b in bases]
        self.puts = [timing_writer(self.board.words, b) for b in bases]
        self.sampler.begin_attempt(0)

    def put(self, slot: int, *timings: StepTiming) -> None:
        for one in timings:
            self.puts[slot](*(NAN if v is None else v for v in dataclasses.astuple(one)))

    def look(self, after_s: float = 0.5) -> None:
        self.clock.advance(after_s)
        views = {slot: (10 + slot, self.board.view(slot)) for slot in range(len(self.puts))}
        self.sampler.sample(self.clock.now_s(), views)

    def records(self) -> list[dict[str, Any]]:
        return [dict(r) for r in read_journal(self.path) if r["type"] == "timings"]


@pytest.fixture
def sampled(tmp_path: Path) -> Iterator[Sampled]:
    made = Sampled(tmp_path)
    yield made
    made.journal.close()


def test_timings_are_handed_on_at_once_and_written_every_few_seconds(sampled: Sampled) -> None:
    sampled.look()
    sampled.put(0, timing(1), timing(2))
    sampled.put(1, timing(1))
    sampled.look()
    taken = sampled.sampler.take_timings()
    assert {rank: [t.step for t in timings] for rank, timings in taken.items()} == {10: [1, 2], 11: [1]}
    assert sampled.sampler.take_timings() == {}
    assert sampled.records() == []
    sampled.look(EVERY_S)
    (record,) = sampled.records()
    assert (record["every"], record["lost"], record["attempt"]) == (1, 0, 0)
    assert {rank: columns["step"] for rank, columns in record["ranks"].items()} == {"10": [1, 2], "11": [1]}
    sampled.look(EVERY_S)
    assert len(sampled.records()) == 1, "no steps, no record"


def test_of_many_steps_those_are_kept_that_every_node_keeps_and_those_with_a_probe(sampled: Sampled) -> None:
    sampled.look()
    sampled.put(0, *(timing(s, probe_s=0.005 if s == 7 else None) for s in range(KEEP_TIMINGS * 3 + 1)))
    sampled.put(1, timing(0), timing(3))
    sampled.look()
    sampled.sampler.flush()
    (record,) = sampled.records()
    assert record["every"] == 4
    assert record["ranks"]["10"]["step"] == sorted([*range(0, KEEP_TIMINGS * 3 + 1, 4), 7])
    assert record["ranks"]["11"]["step"] == [0], "of the others the same steps, so that they can be laid beside"
    assert len(sampled.sampler.take_timings()[10]) == KEEP_TIMINGS * 3 + 1, "who judges now gets all"


def test_what_was_overwritten_before_it_was_read_is_counted_once(sampled: Sampled) -> None:
    sampled.look()
    sampled.put(0, *(timing(s) for s in range(layout.TIMING_RING + 20)))
    sampled.look()
    sampled.sampler.flush()
    sampled.put(0, timing(500))
    sampled.look()
    sampled.sampler.flush()
    assert [r["lost"] for r in sampled.records()] == [21, 0]


def test_what_nobody_takes_does_not_pile_up(sampled: Sampled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_TIMINGS", 10)
    sampled.look()
    for begin in (0, 50, 100):
        sampled.put(0, *(timing(s) for s in range(begin, begin + 50)))
        sampled.look(EVERY_S)
    assert [t.step for t in sampled.sampler.take_timings()[10]] == list(range(140, 150))


def test_an_attempt_that_ends_leaves_its_steps_in_the_journal_and_hands_on_nothing(sampled: Sampled) -> None:
    sampled.look()
    sampled.put(0, timing(1))
    sampled.look()
    sampled.sampler.begin_attempt(1)
    assert [(r["attempt"], r["ranks"]["10"]["step"]) for r in sampled.records()] == [(0, [1])]
    assert sampled.sampler.take_timings() == {}


def test_a_rank_that_is_not_there_yet_is_no_row(sampled: Sampled) -> None:
    sampled.sampler.sample(sampled.clock.now_s(), {0: (10, None)})
    assert sampled.sampler.take_timings() == {}
