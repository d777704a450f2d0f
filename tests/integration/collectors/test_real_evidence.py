"""Evidence of real processes, all ranks at once, in files."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from steadyrun.collectors.evidence import Contribution, EvidenceCollector, Target, ask
from steadyrun.collectors.process import ProcessReader
from steadyrun.core.records import ExitRecord, RankEvidence

STACK_SIGNAL = int(signal.SIGRTMAX) - 3


def target(rank: int, worker: Any, exit_: ExitRecord | None = None) -> Target:
    return Target(rank, rank, worker.pid, 0, None, exit_, worker.folder, (worker.folder / "stderr.log",))


def collect(tmp_path: Path, *targets: Target, limit_s: float = 20.0, **more: Any) -> list[RankEvidence]:
    collector = EvidenceCollector("node", **more)
    collector.begin_attempt()
    try:
        return list(collector.collect(targets, tmp_path / "incidents/0001", STACK_SIGNAL, limit_s))
    finally:
        collector.close()


def test_all_ranks_are_read_at_once(start_worker, tmp_path: Path, wait_until) -> None:  # type: ignore[no-untyped-def]
    workers = [start_worker(body) for body in ("sleeps", "holds_lock", "sleeps", "sleeps")]
    os.kill(workers[2].pid, signal.SIGSTOP)
    wait_until(lambda: ProcessReader().state(workers[2].pid) == "T", 10.0, "state T")
    (workers[0].folder / "stderr.log").write_text("last words\n")
    found = collect(tmp_path, *[target(r, w) for r, w in enumerate(workers)])
    assert [e.rank for e in found] == [0, 1, 2, 3]
    for rank in (0, 1, 3):
        (main,) = found[rank].stacks
        assert [f.function for f in main.frames][-2:] == ["work", "<module>"]
    assert found[2].stacks == ()
    assert found[2].process is not None
    assert found[2].process.state == "T"
    assert any("stopped (state T)" in text for text in found[2].missing)
    assert ProcessReader().state(workers[2].pid) == "T"  # left as it was
    assert found[0].log_tail == ("last words",)
    folder = tmp_path / "incidents/0001"
    assert found[0].files == tuple(f"incidents/0001/rank_0.{k}" for k in ("stacks.txt", "proc.json", "log_tail.txt"))
    for name in found[0].files:
        path = tmp_path / name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "main thread" in (folder / "rank_1.stacks.txt").read_text()
    assert json.loads((folder / "rank_0.proc.json").read_text())["state"] == "S"


def test_movement_is_looked_for_in_a_hang(start_worker, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    workers = [start_worker(body) for body in ("sleeps", "computes")]
    found = collect(tmp_path, *[target(r, w) for r, w in enumerate(workers)])
    assert found[0].cpu_share is not None
    assert found[1].cpu_share is not None
    assert found[0].cpu_share < 0.3 < 0.5 < found[1].cpu_share
    assert found[0].stack_unchanged is None


def test_process_without_handler_is_read_by_py_spy_or_said(start_worker, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    worker = start_worker("sleeps", handler=False)
    (without,) = collect(tmp_path, target(0, worker), py_spy=None)
    assert without.stacks == ()
    assert any("pip install 'steadyrun[stacks]'" in text for text in without.missing)
    assert worker.process.poll() is None  # the stack signal would have ended it
    (with_it,) = collect(tmp_path, target(0, worker))
    assert with_it.stacks or any(text.startswith("stacks: ") for text in with_it.missing)


def test_crashed_rank_leaves_the_stack_it_crashed_in(start_worker, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    worker = start_worker("crashes")
    worker.go_on()
    assert worker.process.wait(30) == -signal.SIGSEGV
    (found,) = collect(tmp_path, target(0, worker, ExitRecord(None, signal.SIGSEGV, 1.0)))
    assert "current" in found.stacks[0].thread
    assert [f.function for f in found.stacks[0].frames] == ["work", "<module>"]
    text = (tmp_path / "incidents/0001/rank_0.stacks.txt").read_text()
    assert text.startswith("Fatal Python error: Segmentation fault")


def test_rank_that_dies_meanwhile_is_read_again(start_worker, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    worker = start_worker("raises")

    def exit_of(rank: int) -> ExitRecord:
        worker.go_on()
        return ExitRecord(worker.process.wait(30), None, 2.0)

    collector = EvidenceCollector("node")
    folder = tmp_path / "incidents/0001"
    (found,) = collector.collect([target(0, worker)], folder, STACK_SIGNAL, 20.0, exit_of)
    assert found.exit == ExitRecord(1, None, 2.0)
    assert found.exception is not None
    assert found.exception.message == "late"
    assert found.stacks
    assert "incidents/0001/rank_0.exception.json" in found.files


def test_end_of_a_rank_that_nobody_has_reaped_yet_is_waited_for(start_worker, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    worker = start_worker("raises")
    worker.go_on()
    os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
    told: list[ExitRecord | None] = [None, None, ExitRecord(1, None, 2.0)]
    collector = EvidenceCollector("node")
    (found,) = collector.collect(
        [target(0, worker)], tmp_path / "incidents/0001", STACK_SIGNAL, 20.0, lambda rank: told.pop(0)
    )
    assert found.exit == ExitRecord(1, None, 2.0)
    assert told == []


def test_end_of_a_rank_that_lives_is_not_waited_for(start_worker, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    worker = start_worker("sleeps")
    asked: list[int] = []
    collector = EvidenceCollector("node")
    (found,) = collector.collect([target(0, worker)], tmp_path / "incidents/0001", STACK_SIGNAL, 20.0, asked.append)
    assert found.exit is None
    assert asked == [0]


def test_slow_source_takes_no_time_from_the_whole(start_worker, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    release = threading.Event()

    class Slow:
        limit_s = 1000.0

        def collect(self, target: Target, folder: Path, deadline_s: float) -> Contribution:
            if target.rank == 0:
                release.wait(60.0)
            return Contribution(missing=("slow: nothing",))

    workers = [start_worker("sleeps"), start_worker("sleeps")]
    began_s = time.monotonic()
    try:
        found = collect(tmp_path, *[target(r, w) for r, w in enumerate(workers)], limit_s=1.5, sources=(Slow(),))
        assert time.monotonic() - began_s < 10.0
    finally:
        release.set()
    assert any("not finished in 1.5 s" in text for text in found[0].missing)
    assert found[1].stacks
    assert "slow: nothing" in found[1].missing


def test_broken_source_and_full_disk_are_said(start_worker, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    class Broken:
        limit_s = 1.0

        def collect(self, target: Target, folder: Path, deadline_s: float) -> Contribution:
            raise RuntimeError("odd")

    (tmp_path / "incidents").write_text("a file is in the way")
    (found,) = collect(tmp_path, target(0, start_worker("sleeps")), sources=(Broken(),))
    assert found.stacks
    assert found.files == ()
    assert "Broken: RuntimeError: odd" in found.missing
    assert any("cannot create" in text for text in found.missing)


def test_start_reports_from_its_thread(start_worker, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    got: list[tuple[RankEvidence, ...]] = []
    is_done = threading.Event()

    def done(evidence: tuple[RankEvidence, ...]) -> None:
        got.append(evidence)
        is_done.set()

    collector = EvidenceCollector("node")
    collector.start([target(0, start_worker("sleeps"))], tmp_path / "incidents/0001", STACK_SIGNAL, 20.0, done)
    assert is_done.wait(30.0)
    assert got[0][0].stacks


# -- the evidence socket -----------------------------------------------------------------------------------------------
class Answerer:
    """A socket that gives one answer."""

    def __init__(self, path: Path, answer: bytes | None) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        here = os.open(path.parent, os.O_PATH)
        self._socket.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)
        self._socket.listen()
        self._answer = answer
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.request = b""

    def _run(self) -> None:
        client, _ = self._socket.accept()
        with client:
            self.request = client.recv(1000)
            if self._answer is not None:
                client.sendall(self._answer)
            else:
                client.recv(1)  # until the other side gives up

    def __enter__(self) -> Answerer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.join(10)
        self._socket.close()


def test_socket_answers_in_one_line(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    with Answerer(deep / "evidence.sock", b'{"sections": []}\n') as server:
        assert ask(deep / "evidence.sock", {"cmd": "sections"}, 10.0) == ({"sections": []}, "")
    assert json.loads(server.request) == {"cmd": "sections"}


@pytest.mark.parametrize(
    ("answer", "why"), [(b"no json\n", "not JSON"), (b"[1]\n", "not an object"), (b"", "not JSON")]
)
def test_wrong_answers_are_said(tmp_path: Path, answer: bytes, why: str) -> None:
    with Answerer(tmp_path / "evidence.sock", answer):
        found, text = ask(tmp_path / "evidence.sock", {"cmd": "sections"}, 10.0)
    assert found is None
    assert why in text


def test_silent_and_absent_sockets_are_said(tmp_path: Path) -> None:
    with Answerer(tmp_path / "evidence.sock", None):
        found, text = ask(tmp_path / "evidence.sock", {"cmd": "sections"}, 0.2)
    assert found is None
    assert "no answer in 0.2 s" in text
    assert "not there" in ask(tmp_path / "absent.sock", {"cmd": "sections"}, 0.2)[1]
