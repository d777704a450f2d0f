"""Real processes that write, read and check one snapshot memory, ended by SIGKILL at random moments."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from steadyrun.checkpoint.arena import Arena, SlotState
from steadyrun.checkpoint.layout import Entry, Layout, ObjectEntry, place

WRITES = 100
WAIT_S = 60.0

# Imports torch once and then makes a process per line of its input: a kill costs milliseconds, not seconds.
NURSERY = """
import os, sys
from steadyrun.checkpoint.arena import Arena, SlotState, choose_slot

fd, kind = int(sys.argv[1]), sys.argv[2]
if kind.startswith("write"):
    import torch
    from steadyrun.checkpoint.copying import Copier
    torch.set_num_threads(1)


def write(threads):
    arena = Arena.attach(os.dup(fd))
    copier = Copier(arena, threads=threads)
    tensors = [torch.empty(e.sizes, dtype=getattr(torch, e.dtype)) for e in arena.layout.entries]
    tensors[1] = tensors[1].t().contiguous().t()  # not in the order of its elements
    generation = max((s.view().generation for s in arena.slots if s.view().state is SlotState.SEALED), default=0)
    while True:
        generation += 1
        for tensor in tensors:
            tensor.fill_(generation % 100)
        slot = arena.slots[choose_slot([s.view() for s in arena.slots], arena.control.busy())]
        slot.begin(generation, 0, generation)
        copier.copy_in(slot, tensors)
        slot.write_blobs([b"%d" % generation * 1000])
        slot.seal()
        arena.control.rank_step = generation


def check():
    arena = Arena.attach(os.dup(fd))
    slot = arena.slots[0]
    arena.control.clear_busy()
    assert slot.hold()
    while True:
        slot.compute_digests(range(len(arena.layout.entries) + 1))
        arena.control.saver_beat += 1


print("ready", flush=True)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        {"write": lambda: write(1), "write threads": lambda: write(3), "check": check}[kind]()
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("gone", flush=True)
"""

SHAPES = [("float32", (1024, 1100)), ("bfloat16", (512, 1024)), ("float32", ()), ("int64", (1000,)), ("uint8", (0,))]
SHAPES += [("float32", (96, 100, 1000))]  # large enough for several threads
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int64": 8, "uint8": 1}


def layout_of(shapes: list[tuple[str, tuple[int, ...]]]) -> Layout:
    sizes_bytes = []
    for dtype, shape in shapes:
        size = ITEM_BYTES[dtype]
        for n in shape:
            size *= n
        sizes_bytes.append(size)
    places = place(sizes_bytes)
    entries = tuple(
        Entry(f"w{i}", (f"w{i}",), dtype, shape, (0,) * len(shape), shape, places[i], sizes_bytes[i])
        for i, (dtype, shape) in enumerate(shapes)
    )
    return Layout(0, 1, entries, (ObjectEntry("o", ("o",)),))


def item(dtype: str, generation: int) -> bytes:
    import torch

    value = torch.full((1,), generation % 100, dtype=getattr(torch, dtype))
    return bytes(value.view(torch.uint8).tolist())


@dataclass
class Nursery:
    process: subprocess.Popen[str]

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def start(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return int(self.line())

    def kill(self, pid: int) -> None:
        """Returns when the process is gone."""
        os.kill(pid, signal.SIGKILL)
        assert self.line() == "gone"


@pytest.fixture
def nursery() -> Iterator[Callable[[Arena, str], Nursery]]:
    started: list[subprocess.Popen[str]] = []

    def start(arena: Arena, kind: str) -> Nursery:
        argv = [sys.executable, "-c", NURSERY, str(arena.fd), kind]
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[arena.fd], start_new_session=True
        )
        started.append(process)
        made = Nursery(process)
        assert made.line() == "ready"
        return made

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def spin_until(condition: Callable[[], bool], story: str) -> None:
    """Looks all the time: what is waited for lasts for microseconds."""
    limit_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < limit_s, f"waited {WAIT_S:g} s in vain: {story}"


def check_content(arena: Arena, number: int) -> None:
    slot = arena.slots[number]
    generation = slot.view().generation
    assert slot.view().step == generation
    for entry in arena.layout.entries:
        one = item(entry.dtype, generation)
        assert bytes(slot.payload(entry)) == one * (entry.size_bytes // len(one)), f"{entry.key} of {generation}"
    assert [bytes(b) for b in slot.blobs()] == [b"%d" % generation * 1000]
    slot.compute_digests()
    assert slot.verify() == []


@pytest.mark.parametrize(("kind", "shapes"), [("write", SHAPES[:-1]), ("write threads", SHAPES)])
def test_a_rank_killed_at_any_moment_costs_at_most_the_snapshot_it_was_writing(
    nursery: Callable[[Arena, str], Nursery], kind: str, shapes: list[tuple[str, tuple[int, ...]]]
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    torn = 0
    with Arena.create(layout_of(shapes), 8192, 2) as arena:
        arena.prefault()
        rank = nursery(arena, kind)
        trials = WRITES if kind == "write" else 20
        for trial in range(trials):
            before = arena.control.rank_step or 0
            pid = rank.start()
            spin_until(lambda before=before: (arena.control.rank_step or 0) > before, "the rank saves nothing")
            if trial % 2:
                spin_until(lambda: any(s.view().state is SlotState.WRITING for s in arena.slots), "no copy begins")
            until_s = time.monotonic() + rng.uniform(0, 0.004)
            spin_until(lambda until_s=until_s: time.monotonic() >= until_s, "the clock stands still")
            rank.kill(pid)

            told = arena.control.rank_step
            assert told is not None
            states = [s.view().state for s in arena.slots]
            sealed = {s.view().generation: s.number for s in arena.slots if s.view().state is SlotState.SEALED}
            assert max(sealed) in (told, told + 1), f"told {told}, in memory {sealed}, seed {seed}, trial {trial}"
            torn += SlotState.WRITING in states
            assert SlotState.DAMAGED not in states
            for number in sealed.values():
                check_content(arena, number)
    assert torn >= trials // 8, f"only {torn} of {trials} kills hit a copy"


def test_a_saver_killed_at_any_moment_leaves_right_digests_or_none(
    nursery: Callable[[Arena, str], Nursery],
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with Arena.create(layout_of([("uint8", (50,))] * 400), 8192, 2) as arena:
        slot = arena.slots[0]
        slot.begin(1, 0, 1)
        for i, entry in enumerate(arena.layout.entries):
            slot.payload(entry)[:] = bytes([i % 256]) * entry.size_bytes
        slot.write_blobs([b"x" * 100])
        slot.seal()
        slot.compute_digests()
        right = slot.digests()
        saver = nursery(arena, "check")
        for _ in range(WRITES // 2):
            before = arena.control.saver_beat
            pid = saver.start()
            spin_until(lambda before=before: arena.control.saver_beat > before, "the saver computes nothing")
            until_s = time.monotonic() + rng.uniform(0, 0.001)
            spin_until(lambda until_s=until_s: time.monotonic() >= until_s, "the clock stands still")
            saver.kill(pid)
            found = slot.digests()
            assert found in (right, [None] * len(right)), f"seed {seed}"
            assert arena.control.busy() == (1, 0)
            assert slot.view().state is SlotState.SEALED
            slot.compute_digests()
            assert slot.verify() == []


RIVAL = """
import os, sys
from steadyrun.checkpoint.arena import Arena, SlotBusyError, choose_slot

arena = Arena.attach(int(sys.argv[1]))
(entry,) = arena.layout.entries
refused = 0
print("ready", flush=True)
generation = 0
while not arena.control.wanted():
    generation += 1
    for slot in arena.slots:  # without looking at the holds first: the race is what is meant
        try:
            slot.begin(generation, 0, generation)
        except SlotBusyError:
            refused += 1
            continue
        slot.payload(entry)[:] = bytes([generation % 256]) * entry.size_bytes
        slot.write_blobs([b"o"])
        slot.seal()
    arena.control.rank_step = generation
print(refused, flush=True)
"""


def test_what_the_saver_holds_is_never_written_by_a_rank_that_races_for_it() -> None:
    with Arena.create(layout_of([("uint8", (5000,))]), 64, 2) as arena:
        argv = [sys.executable, "-c", RIVAL, str(arena.fd)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, pass_fds=[arena.fd]) as rank:
            assert rank.stdout is not None
            try:
                assert rank.stdout.readline() == "ready\n"
                (entry,) = arena.layout.entries
                held = 0
                limit_s = time.monotonic() + WAIT_S
                while held < 500 and time.monotonic() < limit_s:
                    slot = arena.slots[held % 2]
                    if not slot.hold():
                        continue
                    held += 1
                    generation = slot.view().generation
                    seen = {bytes(slot.payload(entry)) for _ in range(20)}
                    assert seen == {bytes([generation % 256]) * entry.size_bytes}
                    assert slot.view().generation == generation
                    slot.let_go()
                arena.control.want(0)
                refused = int(rank.stdout.readline())
            finally:
                rank.kill()
    assert held == 500
    assert refused > 0, "they never met"
