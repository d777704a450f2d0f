"""Flight recorders of real gloo ranks, with the in-rank side as the launcher starts it: one that waits in a collective,
one whose C code holds the interpreter's lock, one that is stopped, and one that dies of an exception.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import steadyrun.core.board
from steadyrun.collectors.evidence import EvidenceCollector, Target
from steadyrun.collectors.flight.details import IncidentDetails
from steadyrun.collectors.flight.sidecar import Sidecar, sidecar_from_json
from steadyrun.collectors.flight.source import FlightSource
from steadyrun.collectors.flight.unpickle import load_dump
from steadyrun.collectors.process import ProcessReader
from steadyrun.core.board import Board
from steadyrun.core.flight import flight_from_json, flight_to_json
from steadyrun.core.records import ExitRecord, RankEvidence, rank_evidence_from_json, to_json

SITE = Path(steadyrun.core.board.__file__).parents[1] / "watch" / "site"
STACK_SIGNAL = int(signal.SIGRTMAX) - 3
DEADLINE_S = 120.0
ROUNDS = 30

SCRIPT = f"""
import ctypes, os, sys, time
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
pair = dist.new_group([0, 2], group_desc="pair")
ones = torch.ones(4)
def exchange():
    dist.all_reduce(ones)
for _ in range({ROUNDS}):
    exchange()
def wait_for_all():
    dist.all_reduce(torch.ones(8))
def hold_lock():
    while True:
        ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the interpreter's lock; a signal ends the call
def ready():
    open(os.environ["READY"] + str(rank), "w").close()
ready()
if rank == 1:
    hold_lock()
wait_for_all()
"""


@dataclass
class Rank:
    process: subprocess.Popen[bytes]
    folder: Path
    board: Board
    exit: ExitRecord | None = None

    def target(self, rank: int) -> Target:
        return Target(rank, rank, self.process.pid, 0, self.board.view(0), self.exit, self.folder)


@pytest.fixture
def ranks(tmp_path: Path, wait_until: Callable[..., Any]) -> Iterator[list[Rank]]:
    """Three ranks that have got stuck: 0 and 2 wait in an all_reduce for 1, which holds its interpreter's lock."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    started: list[Rank] = []
    try:
        for rank in range(3):
            folder = tmp_path / f"attempts/0/rank_{rank}"
            folder.mkdir(parents=True, mode=0o700)
            board = Board.create_anonymous(1)
            setup = {
                "board": str(board.path), "slot": 0, "rank": rank, "attempt": 0, "rank_dir": str(folder), "faults": "",
                "deadman_s": 600.0, "run_id": "r", "loaded_report": None, "stack_signal": STACK_SIGNAL, "flight": {},
            }  # fmt: skip
            env = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "READY": f"{tmp_path}/ready_",
                "PYTHONPATH": str(SITE), "STEADYRUN_RUN": "r:n", "STEADYRUN_SETUP": json.dumps(setup),
                "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/watchdog_trace_rank_",
            }  # fmt: skip
            with (folder / "stderr.log").open("wb") as log:
                process = subprocess.Popen([sys.executable, str(script)], env=env, stdout=log, stderr=log)
            started.append(Rank(process, folder, board))
        story = lambda: "\n".join((r.folder / "stderr.log").read_text() for r in started)  # noqa: E731
        wait_until(lambda: all((tmp_path / f"ready_{r}").exists() for r in range(3)), DEADLINE_S, story)
        for rank in (0, 2):  # the call is under way: its stack says so
            wait_until(lambda rank=rank: is_waiting(started[rank]), DEADLINE_S, story)
        yield started
    finally:
        for one in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.process.pid, signal.SIGKILL)
            one.process.wait(30)
            one.board.close()


def is_waiting(rank: Rank) -> bool:
    os.kill(rank.process.pid, STACK_SIGNAL)
    path = rank.folder / "stacks.txt"
    return path.exists() and "wait_for_all" in path.read_text() and (rank.folder / "flight.json").exists()


def collect(tmp_path: Path, ranks: list[Rank], number: int) -> tuple[list[RankEvidence], float]:
    collector = EvidenceCollector("node", py_spy=None, sources=(FlightSource("r"),))
    began_s = time.monotonic()
    try:
        found = collector.collect(
            [r.target(i) for i, r in enumerate(ranks)], tmp_path / f"incidents/{number:04d}", STACK_SIGNAL, 20.0
        )
    finally:
        collector.close()
    return list(found), time.monotonic() - began_s


def sidecar(tmp_path: Path, number: int, rank: int) -> Sidecar:
    return sidecar_from_json(json.loads((tmp_path / f"incidents/{number:04d}/rank_{rank}.flight.json").read_text()))


@pytest.mark.deadline(300)
def test_what_ranks_in_trouble_tell(ranks: list[Rank], tmp_path: Path, wait_until: Callable[..., Any]) -> None:
    os.kill(ranks[2].process.pid, signal.SIGSTOP)
    wait_until(lambda: ProcessReader().state(ranks[2].process.pid) == "T", 10.0, "state T")
    found, took_s = collect(tmp_path, ranks, 1)
    waits, holds, stopped = found
    assert took_s < 8.0

    # It waits: with call sites, and small enough to send.
    assert waits.flight is not None
    (op,) = waits.flight.ops
    assert (op.name, op.seq, op.in_sizes) == ("all_reduce", ROUNDS + 1, ((8,),))
    assert op.site is not None
    assert op.site.endswith("in wait_for_all")
    assert {(g.desc, g.ranks) for g in waits.flight.groups if g.ranks} == {("default_pg", (0, 1, 2)), ("pair", (0, 2))}
    assert len(json.dumps(flight_to_json(waits.flight))) < 8192
    assert rank_evidence_from_json(json.loads(json.dumps(to_json(waits)))).flight == waits.flight
    assert not [text for text in waits.missing if text.startswith("flight")]

    # Its lock is held: torch's server alone answers.
    assert holds.flight is not None
    assert holds.flight.ops == ()
    (group,) = [g for g in holds.flight.groups if g.desc == "default_pg"]
    assert (group.issued_seq, group.done_seq) == (ROUNDS, ROUNDS)
    (text,) = [text for text in holds.missing if text.startswith("flight")]
    assert "no call sites: evidence socket: no answer" in text

    # It is stopped: it must not look like a rank that has called nothing.
    assert stopped.flight is None
    assert any("flight recorder: the process is stopped (state T)" in text for text in stopped.missing)

    folder = tmp_path / "incidents/0001"
    names = {p.name for p in folder.glob("*.flight.*")}
    assert names == {
        "rank_0.flight.gloo.pickle", "rank_0.flight.json", "rank_1.flight.gloo.json", "rank_1.flight.json",
        "rank_2.flight.json",
    }  # fmt: skip
    assert all(stat.S_IMODE((folder / name).stat().st_mode) == 0o600 for name in names)
    assert {f for e in found for f in e.files if ".flight." in f} == {f"incidents/0001/{n}" for n in names}
    assert len(load_dump(folder / "rank_0.flight.gloo.pickle")["entries"]) == ROUNDS + 1
    told = [sidecar(tmp_path, 1, r) for r in range(3)]
    assert [(s.rank, s.process_state in "SR", s.world_size, s.recorder_state) for s in told] == [
        (0, True, 3, "on"), (1, True, 3, "on"), (2, False, 3, "on"),
    ]  # fmt: skip
    assert told[2].process_state == "T"
    assert all(s.boot_id and s.host and s.torch and s.pid == r.process.pid for s, r in zip(told, ranks, strict=True))

    details = IncidentDetails(folder)
    first, second = details.ops(0, "0", 1, 2)
    assert (first.seq, first.in_sizes, second.seq) == (1, ((4,),), 2)
    assert first.site is not None
    assert first.site.endswith("in exchange")
    assert [op.seq for op in details.ops(1, "0", ROUNDS, ROUNDS + 5)] == [ROUNDS]
    assert list(details.ops(2, "0", 1, 2)) == []  # it has left no dump
    assert list(details.ops(7, "0", 1, 2)) == []
    assert list(IncidentDetails(folder, limit_s=0.0).ops(0, "0", 1, 2)) == []

    # Rank 1 dies, so that rank 0 meets an error and dies of the exception.
    ranks[1].process.kill()
    ranks[1].process.wait(30)
    ranks[0].process.wait(60)
    ranks[1].exit = ExitRecord(None, 9, time.monotonic())
    ranks[0].exit = ExitRecord(1, None, time.monotonic())
    found, took_s = collect(tmp_path, ranks, 2)
    assert took_s < 3.0
    assert (tmp_path / "incidents/0002/rank_0.flight.gloo.exception.pickle").exists()
    assert found[0].flight is not None
    assert found[0].flight.entries == ROUNDS + 1
    assert sidecar(tmp_path, 2, 0).exception.startswith("RuntimeError: ")
    assert sidecar(tmp_path, 2, 0).exit_code == 1
    assert found[0].flight.ops[0].site is not None  # its own last dump counts
    assert found[1].flight is None  # killed: it has left nothing
    assert flight_from_json(flight_to_json(found[0].flight)) == found[0].flight
