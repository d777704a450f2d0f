"""One set of expectations for every ProcessTable: the scripted fake and real processes."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from steadyrun.node.ports import ExitSeen, ProcessTable, SpawnSpec
from steadyrun.node.processes import LinuxProcessTable
from steadyrun.testing.processes import FakeProcessTable, Life
from steadyrun.testing.store import ManualClock

DEADLINE_S = 30.0


@dataclass
class World:
    """A table, how to start a process that leads this life, and how to let time pass until it ends, or is stopped."""

    table: ProcessTable
    start: Callable[[Life, int], int]
    wait_exit: Callable[[int], ExitSeen]
    wait_stopped: Callable[[int], object] = lambda pid: None


def _fake(_: Path) -> Iterator[World]:
    clock = ManualClock()
    table = FakeProcessTable(clock)

    def start(life: Life, attempt: int = 0) -> int:
        rank = len(table.spawned)
        table.script(rank, attempt, life)
        return table.spawn(SpawnSpec(rank, rank, attempt, ("fake",), {}))

    def wait_exit(pid: int) -> ExitSeen:
        if table.next_exit_s() != float("inf"):
            clock.advance(max(table.next_exit_s() - clock.now_s(), 0.0))
        (seen,) = table.poll_exits()
        return seen

    yield World(table, start, wait_exit)
    table.close()


# What a Life is in a real process; it says on descriptor 3 that it is set up.
REAL = """
import os, signal, subprocess, sys, time
exit_after_s, exit_code, ignores, leaves, fd = eval(sys.argv[1])
if ignores: signal.signal(signal.SIGTERM, signal.SIG_IGN)
for n in range(leaves):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
os.write(fd, b"ready")
os.close(fd)
if exit_after_s is None:
    time.sleep(600)
time.sleep(exit_after_s)
if exit_code < 0: os.kill(os.getpid(), -exit_code)
sys.exit(exit_code)
"""


def _real(_: Path) -> Iterator[World]:
    table = LinuxProcessTable(f"contract-{os.getpid()}:node")

    def start(life: Life, attempt: int = 0) -> int:
        read_fd, write_fd = os.pipe()
        told = (life.exit_after_s, life.exit_code, life.ignores_sigterm, len(life.leaves), write_fd)
        argv = (sys.executable, "-c", REAL, repr(told))
        pid = table.spawn(SpawnSpec(0, 0, attempt, argv, dict(os.environ), pass_fds=(write_fd,)))
        os.close(write_fd)
        assert select.select([read_fd], [], [], DEADLINE_S)[0], "the process did not get ready"
        os.close(read_fd)
        return pid

    def wait_exit(pid: int) -> ExitSeen:
        assert select.select([table.fileno_of(pid)], [], [], DEADLINE_S)[0], "the process did not end"
        (seen,) = table.poll_exits()
        return seen

    def wait_stopped(pid: int) -> object:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)  # until then it may take another signal before this

    yield World(table, start, wait_exit, wait_stopped)
    table.sweep(10)
    table.poll_exits()
    table.close()


@pytest.fixture(params=[_fake, _real], ids=lambda f: f.__name__.strip("_"))
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    yield from request.param(tmp_path)


@pytest.mark.parametrize("code", [0, 3, 255, -signal.SIGKILL, -signal.SIGSEGV])
def test_exit_is_reported_once_with_its_code(world: World, code: int) -> None:
    pid = world.start(Life(exit_after_s=0.05, exit_code=code), 0)
    seen = world.wait_exit(pid)
    assert (seen.pid, seen.code) == (pid, code)
    assert world.table.poll_exits() == ()


def test_running_process_is_not_reported(world: World) -> None:
    pid = world.start(Life(), 0)
    assert world.table.poll_exits() == ()
    assert world.table.signal(pid, signal.SIGKILL)
    assert world.wait_exit(pid).code == -signal.SIGKILL


def test_sigterm_ends_a_process_that_does_not_care(world: World) -> None:
    pid = world.start(Life(), 0)
    assert world.table.signal(pid, signal.SIGTERM)
    assert world.wait_exit(pid).code == -signal.SIGTERM


def test_ignored_sigterm_leaves_sigkill(world: World) -> None:
    pid = world.start(Life(ignores_sigterm=True), 0)
    assert world.table.signal(pid, signal.SIGTERM)
    assert world.table.poll_exits() == ()
    assert world.table.signal_group(pid, signal.SIGKILL)
    assert world.wait_exit(pid).code == -signal.SIGKILL


def test_stopped_process_keeps_sigterm_until_it_continues(world: World) -> None:
    pid = world.start(Life(), 0)
    world.table.signal(pid, signal.SIGSTOP)
    world.wait_stopped(pid)
    world.table.signal(pid, signal.SIGTERM)
    assert world.table.poll_exits() == ()
    world.table.signal(pid, signal.SIGCONT)
    assert world.wait_exit(pid).code == -signal.SIGTERM


def test_signal_to_an_ended_process_says_that_it_is_gone(world: World) -> None:
    pid = world.start(Life(exit_after_s=0.0), 0)
    world.wait_exit(pid)
    assert not world.table.signal(pid, signal.SIGTERM)
    assert not world.table.signal(999_999_999, signal.SIGTERM)


def test_group_of_a_dead_leader_is_still_reached(world: World) -> None:
    pid = world.start(Life(exit_after_s=0.05, exit_code=1, leaves=("loader", "loader")), 0)
    world.wait_exit(pid)
    assert world.table.signal_group(pid, signal.SIGKILL)
    limit_s = time.monotonic() + DEADLINE_S
    while world.table.signal_group(pid, signal.SIGKILL):
        assert time.monotonic() < limit_s, "the group did not become empty"


def test_empty_group_says_so(world: World) -> None:
    pid = world.start(Life(exit_after_s=0.05), 0)
    world.wait_exit(pid)
    assert not world.table.signal_group(pid, signal.SIGKILL)


def test_sweep_ends_what_a_finished_attempt_left_and_nothing_else(world: World) -> None:
    dead = world.start(Life(exit_after_s=0.05, leaves=("loader",)), 0)
    world.wait_exit(dead)
    later = world.start(Life(leaves=("loader",)), 1)
    standby = world.start(Life(), -1)
    report = world.table.sweep(0)
    assert len(report.ended) == 1
    assert report.stuck == ()
    assert world.table.sweep(0).ended == ()
    assert world.table.signal(later, 0)
    assert world.table.signal(standby, 0)
    assert world.table.signal(standby, signal.SIGKILL)
    assert world.wait_exit(standby).pid == standby
    assert world.table.signal_group(later, signal.SIGKILL)
    assert world.wait_exit(later).pid == later


def test_assigned_standby_belongs_to_its_attempt(world: World) -> None:
    standby = world.start(Life(), -1)
    world.table.assign(standby, 0, 2)
    assert world.table.sweep(1).ended == ()
    report = world.table.sweep(2)
    assert [pid for pid, _ in report.ended] == [standby]
    assert world.wait_exit(standby).code == -signal.SIGKILL
