"""Stacks and probes of real processes: sleeping, computing, holding the interpreter lock, stopped, gone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from steadyrun.collectors.probe import ProbeRunner
from steadyrun.collectors.process import ProcessReader
from steadyrun.collectors.stacks import StackRequest, find_py_spy, py_spy_stacks, request_stacks

STACK_SIGNAL = int(signal.SIGRTMAX) - 3
Start = Callable[..., "object"]


@pytest.mark.parametrize("body", ["sleeps", "computes", "holds_lock", "threads"])
def test_dump_comes_whatever_the_process_does(start_worker, deadline_in, body: str) -> None:  # type: ignore[no-untyped-def]
    worker = start_worker(body)
    for _ in range(3):
        began_s = time.monotonic()
        dump = request_stacks(worker.pid, STACK_SIGNAL, worker.folder / "stacks.txt", deadline_in(10.0))
        took_s = time.monotonic() - began_s
        assert dump is not None
        assert dump.whole
        main = next(s for s in dump.stacks if s.is_main)
        assert [f.function for f in main.frames][-2:] == ["work", "<module>"]
        assert len(dump.stacks) == (21 if body == "threads" else 1)
        assert took_s < 5.0


def test_gone_process_is_not_waited_for(start_worker, deadline_in, wait_until) -> None:  # type: ignore[no-untyped-def]
    worker = start_worker("sleeps")
    os.kill(worker.pid, signal.SIGKILL)
    worker.process.wait(10)
    request = StackRequest(worker.pid, STACK_SIGNAL, worker.folder / "stacks.txt")
    assert not request.send()
    assert request.error == "the process is gone"


def test_no_answer_ends_at_the_deadline(start_worker, deadline_in, wait_until) -> None:  # type: ignore[no-untyped-def]
    worker = start_worker("sleeps")
    os.kill(worker.pid, signal.SIGSTOP)
    wait_until(lambda: ProcessReader().state(worker.pid) == "T", 10.0, "state T")
    request = StackRequest(worker.pid, STACK_SIGNAL, worker.folder / "stacks.txt")
    assert request.send()
    began_s = time.monotonic()
    assert request.wait(deadline_in(0.2)) is None
    assert time.monotonic() - began_s < 5.0
    assert request.error == "no answer to the stack signal"


def test_handler_is_visible_in_the_signal_mask(start_worker) -> None:  # type: ignore[no-untyped-def]
    reader = ProcessReader()
    assert reader.catches(start_worker("sleeps").pid, STACK_SIGNAL) is True
    assert reader.catches(start_worker("sleeps", handler=False).pid, STACK_SIGNAL) is False


def test_py_spy_reads_a_process_without_our_handler(start_worker) -> None:  # type: ignore[no-untyped-def]
    program = find_py_spy()
    if program is None:
        pytest.skip("py-spy is not installed")
    worker = start_worker("sleeps", handler=False)
    stacks, why = py_spy_stacks(program, worker.pid, 20.0)
    if "no right" in why:
        pytest.skip(why)
    assert why == ""
    main = next(s for s in stacks if s.is_main)
    assert [f.function for f in main.frames][-2:] == ["work", "<module>"]


def test_py_spy_failures_are_said(tmp_path: Path) -> None:
    assert py_spy_stacks(str(tmp_path / "absent"), 1, 1.0) == (
        (),
        "py-spy could not be started: No such file or directory",
    )
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 100\n")
    slow.chmod(0o700)
    assert py_spy_stacks(str(slow), 1, 0.2) == ((), "py-spy gave no answer in 0.2 s")
    for text, why in (
        ("echo nonsense", "something else than stacks"),
        ("echo Permission denied >&2; exit 1", "no right"),
    ):
        slow.write_text(f"#!/bin/sh\n{text}\n")
        assert why in py_spy_stacks(str(slow), 1, 10.0)[1]


def probe(workers: dict[int, object], window_s: float = 1.0):  # type: ignore[no-untyped-def]
    pids = {r: w.pid for r, w in workers.items()}  # type: ignore[attr-defined]
    paths = {r: w.folder / "stacks.txt" for r, w in workers.items()}  # type: ignore[attr-defined]
    return {reading.rank: reading for reading in ProbeRunner(pids, paths, STACK_SIGNAL, window_s).run()}


def test_probe_tells_stuck_from_moving(start_worker, wait_until) -> None:  # type: ignore[no-untyped-def]
    bodies = ("sleeps", "holds_lock", "wanders", "sleeps")
    workers = {rank: start_worker(body) for rank, body in enumerate(bodies)}
    os.kill(workers[3].pid, signal.SIGSTOP)
    wait_until(lambda: ProcessReader().state(workers[3].pid) == "T", 10.0, "state T")
    readings = probe(workers)
    assert (readings[0].state, readings[0].stack_unchanged) == ("S", True)
    assert readings[0].cpu_share < 0.1
    assert not readings[0].io_moved
    assert readings[1].stack_unchanged is True
    assert readings[1].cpu_share > 0.5
    assert readings[2].stack_unchanged is not None
    assert (readings[3].state, readings[3].stack_unchanged) == ("T", None)
    assert (workers[3].folder / "stacks.txt").read_text() == ""  # it was not even asked
    assert 0.9 < readings[0].window_s < 10.0


def test_probe_notices_a_stack_that_moves(start_worker) -> None:  # type: ignore[no-untyped-def]
    worker = start_worker("wanders")
    pids, paths = {0: worker.pid}, {0: worker.folder / "stacks.txt"}
    readings = ProbeRunner(pids, paths, STACK_SIGNAL, 1.5, samples=12).run()
    assert readings[0].stack_unchanged is False


def test_probe_looks_closer_at_a_rank_that_only_seems_to_stand_still(start_worker, wait_until) -> None:  # type: ignore[no-untyped-def]
    worker = start_worker("mostly_in_one_place")
    path = worker.folder / "stacks.txt"
    readings = ProbeRunner({0: worker.pid}, {0: path}, STACK_SIGNAL, 6.0, samples=4, closer=40).run()
    assert readings[0].stack_unchanged is False
    still = start_worker("sleeps")
    wait_until(lambda: ProcessReader().state(still.pid) == "S", 10.0, "asleep")  # it says "ready" before it sleeps
    readings = ProbeRunner(
        {0: still.pid}, {0: still.folder / "stacks.txt"}, STACK_SIGNAL, 1.0, samples=3, closer=4
    ).run()
    assert readings[0].stack_unchanged is True
    assert (still.folder / "stacks.txt").read_text().count("most recent call first") == 11


def test_probe_does_not_signal_a_process_without_handler(start_worker) -> None:  # type: ignore[no-untyped-def]
    worker = start_worker("sleeps", handler=False)
    reading = probe({0: worker}, 0.3)[0]
    assert (reading.state, reading.stack_unchanged) == ("S", None)
    assert worker.process.poll() is None


def test_probe_of_a_gone_process(start_worker) -> None:  # type: ignore[no-untyped-def]
    worker = start_worker("sleeps")
    os.kill(worker.pid, signal.SIGKILL)
    worker.process.wait(10)
    assert probe({0: worker}, 0.2)[0].state == "X"


def test_stopped_probe_returns_early() -> None:
    runner = ProbeRunner({}, {}, STACK_SIGNAL, 1000.0)
    runner.stop()
    assert runner.run() == ()
