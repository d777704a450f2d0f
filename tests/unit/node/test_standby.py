"""The pool's bookkeeping, with processes that exist only in the test."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from steadyrun.node.ports import SpawnSpec
from steadyrun.node.standby import StandbyPool, can_restore_nice, memory_of
from steadyrun.testing.processes import FakeProcessTable, Life
from steadyrun.testing.store import ManualClock


class World:
    """A pool over a fake table that keeps the standbys' ends of the pipes, as real children would."""

    def __init__(self, tmp_path: Path) -> None:
        self.clock = ManualClock()
        self.table = FakeProcessTable(self.clock)
        self.kept: list[int] = []
        spawn = self.table.spawn

        def keep_pipes(spec: SpawnSpec) -> int:
            pid = spawn(spec)
            self.kept += [os.dup(fd) for fd in spec.pass_fds]
            return pid

        self.table.spawn = keep_pipes  # type: ignore[method-assign]
        self.pool = StandbyPool(self.table, self.clock, proc=tmp_path)

    def spec_for(self, local_rank: int, told: Mapping[str, Any]) -> SpawnSpec:
        return SpawnSpec(-1, local_rank, 0, ("python", "train.py"), {"PATH": "/bin"})

    def prepare(self, *local_ranks: int) -> list[int]:
        return self.pool.prepare(local_ranks, ["torch"], {0: {"OMP_NUM_THREADS": "4"}}, self.spec_for)

    def order_end(self, number: int) -> int:
        return self.kept[2 * number]

    def ready_end(self, number: int) -> int:
        return self.kept[2 * number + 1]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.pool.drop()
    world.table.close()
    for fd in world.kept:
        os.close(fd)


def orders(attempt: int = 1, **env: str) -> dict[str, Any]:
    return {"env": env, "setup": {"rank": 4, "attempt": attempt}, "stdout": None, "stderr": None, "cwd": "/"}


def test_standby_is_told_what_to_preload_and_where_its_pipes_are(world: World) -> None:
    (pid,) = world.prepare(0)
    (spec,) = world.table.spawned
    told = json.loads(spec.env["STEADYRUN_STANDBY"])
    assert told["preload"] == ["torch"]
    assert told["preset_env"] == {"OMP_NUM_THREADS": "4"}
    assert spec.pass_fds == (told["fd"], told["ready_fd"])
    assert (spec.attempt, spec.env["PATH"], spec.argv) == (-1, "/bin", ("python", "train.py"))
    assert world.pool.status()[0]["pid"] == pid


def test_prepare_starts_only_what_is_missing(world: World) -> None:
    assert len(world.prepare(0, 1)) == 2
    assert world.prepare(0, 1) == []
    world.pool.activate(0, orders())
    assert len(world.prepare(0, 1)) == 1


def test_readiness_comes_through_the_pipe(world: World) -> None:
    world.prepare(0, 1)
    assert world.pool.ready() == set()
    os.write(world.ready_end(1), b"1")
    assert world.pool.ready() == {1}


@pytest.mark.parametrize("size", [10, 70_000, 200_000, 900_000])
def test_activation_hands_over_an_environment_of_any_usual_size(world: World, size: int) -> None:
    (pid,) = world.prepare(2)
    sent = orders(attempt=7, BIG="x" * size)
    assert world.pool.activate(2, sent) == pid
    got = b""
    while chunk := os.read(world.order_end(0), 1 << 20):
        got += chunk
    assert got.endswith(b"\n")
    assert json.loads(got) == sent
    assert world.table.attempt_of(pid) == (4, 7)


def test_orders_that_no_pipe_can_hold_end_the_standby(world: World) -> None:
    (pid,) = world.prepare(0)
    assert world.pool.activate(0, orders(BIG="x" * 2_000_000)) is None
    assert world.table.signals == [(pid, signal.SIGKILL)]


def test_without_a_standby_the_caller_starts_cold(world: World) -> None:
    assert world.pool.activate(0, orders()) is None
    world.prepare(0)
    world.pool.activate(0, orders())
    assert world.pool.activate(0, orders()) is None


def test_dead_standby_is_not_used(world: World) -> None:
    world.prepare(0)
    os.close(world.kept.pop(0))  # a dead process reads nothing
    assert world.pool.activate(0, orders()) is None


def test_death_is_made_good_three_times_with_growing_pauses_and_then_told(world: World) -> None:
    (pid,) = world.prepare(0)
    for pause_s in (2.0, 10.0, 60.0):
        assert world.pool.on_exit(pid, -9)
        assert world.pool.poll() == []
        world.clock.advance(pause_s - 0.1)
        assert world.pool.poll() == []
        world.clock.advance(0.1)
        (pid,) = world.pool.poll()
    assert world.pool.take_notes() == []
    assert world.pool.on_exit(pid, -9)
    (note,) = world.pool.take_notes()
    assert "was ended by signal 9, after 3 others" in note
    world.clock.advance(1000.0)
    assert world.pool.poll() == []
    assert world.pool.take_notes() == []


def test_use_forgives_earlier_deaths(world: World) -> None:
    (pid,) = world.prepare(0)
    for _ in range(3):
        world.pool.on_exit(pid, 1)
        world.clock.advance(60.0)
        (pid,) = world.pool.poll()
    world.pool.activate(0, orders())
    (pid,) = world.prepare(0)
    world.pool.on_exit(pid, 1)
    assert world.pool.take_notes() == []


def test_standby_that_cannot_be_started_is_tried_again(world: World) -> None:
    world.table.script(-1, -1, Life(fails_to_start="no memory"))
    assert world.prepare(0) == []
    world.table.script(-1, -1, Life())
    world.clock.advance(2.0)
    assert len(world.pool.poll()) == 1


def test_exit_of_a_rank_is_nobody_elses_business(world: World) -> None:
    world.prepare(0)
    assert not world.pool.on_exit(12345, 0)


def test_drop_ends_all_and_starts_none(world: World) -> None:
    pids = world.prepare(0, 1)
    world.pool.drop()
    assert sorted(world.table.signals) == sorted((p, signal.SIGKILL) for p in pids)
    assert select.select([world.order_end(0)], [], [], 0)[0], "end-of-file must reach a standby"
    assert world.pool.status() == []
    world.clock.advance(1000.0)
    assert world.pool.poll() == []


def test_memory_is_what_nobody_shares(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "smaps_rollup").write_text(
        "0000-ffff ---p 0 00:00 0 [rollup]\nRss: 900 kB\nPss: 500 kB\nShared_Clean: 400 kB\n"
        "Private_Clean: 100 kB\nPrivate_Dirty: 300 kB\nPrivate_Hugetlb: 0 kB\n"
    )
    assert memory_of(7, tmp_path) == 400 * 1024
    assert memory_of(8, tmp_path) == 0


@pytest.mark.parametrize(("mask", "expected"), [("0000000000800000", True), ("0000000000400000", False), ("", False)])
def test_priority_is_lowered_only_where_it_can_be_restored(
    tmp_path: Path, mask: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (0, 0))
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text(f"Name:\tpython\nCapEff:\t{mask}\n" if mask else "Name:\tpython\n")
    assert can_restore_nice(tmp_path) is expected


def test_nice_limit_allows_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (40, 40))
    assert can_restore_nice(tmp_path)
