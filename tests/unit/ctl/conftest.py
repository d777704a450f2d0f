"""Run folders as the agent writes them, made by the same code, and a board with ranks on it."""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from steadyctl_calls import Told, steadyctl

from steadyrun.core import layout
from steadyrun.core.board import Board
from steadyrun.core.classes import Action, FaultClass, Mode
from steadyrun.core.journal import Journal
from steadyrun.core.records import (
    Evidence,
    Finding,
    Frame,
    OpenSection,
    RankEvidence,
    ThreadStack,
    Verdict,
    to_json,
)
from steadyrun.core.runfolder import RunFolder

T0 = 1_700_000_000.0
TORCH = "/venv/lib/python3.11/site-packages/torch"


@pytest.fixture
def ctl() -> Callable[..., Told]:
    return steadyctl


def rank_evidence(rank: int, where: str, attempt: int = 0, log: tuple[str, ...] = ()) -> RankEvidence:
    """A rank that waits in ``all_reduce``, or sleeps in its own code, called from /job/train.py."""
    waits = where == "all_reduce"
    own = Frame("/job/train.py", 88 if waits else 31, "train_step" if waits else "read_batch")
    inner = [Frame(f"{TORCH}/distributed/distributed_c10d.py", 2810, "all_reduce")] if waits else []
    frames = (*inner, own, Frame("/job/train.py", 120, "<module>"))
    return RankEvidence(
        rank=rank,
        local_rank=rank,
        node="n0",
        pid=1000 + rank,
        attempt=attempt,
        step=20,
        attached=True,
        sections=(OpenSection("step", 1.0),),
        stacks=(ThreadStack("MainThread", frames, True),),
        log_tail=log,
    )


@dataclass
class FakeRun:
    """A run folder with two incidents and journals; ``board`` once ``go_live`` was called."""

    folder: RunFolder
    board: Board | None = None
    live: dict[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.folder.root

    def add_incident(self, number: int, **changes: Any) -> Path:
        finding = Finding(
            FaultClass.HOST_STALL,
            (1,),
            "3 of 4 ranks wait in all_reduce called at train.py:88; rank 1 is stuck at train.py:31 (section step)",
            0.9,
            nodes=("n0",),
            section="step",
            callsite="train.py:31",
            since_unix_s=T0 + 90,
            evidence=("rank_1.stacks.txt",),
        )
        values: dict[str, Any] = {
            "run_id": "demo",
            "incident": number,
            "attempt": number - 1,
            "detected_at_unix_s": T0 + 100 * number,
            "detection_delay_s": 4.25,
            "mode": Mode.ACT,
            "action": Action.RESTART,
            "findings": (finding,),
            "victims": (0, 2, 3),
            "missing": ("py-spy is not installed",),
            "reason": "restart 1 of 3 without progress",
        }
        verdict = Verdict(**{**values, **changes})
        folder = self.folder.incident(number)
        folder.mkdir(parents=True)
        ranks = tuple(
            rank_evidence(r, "own" if r == 1 else "all_reduce", number - 1, ("step 20", "reading \x1b[31mbatch"))
            for r in range(4)
        )
        evidence = Evidence("demo", number - 1, 4, "hang", 10.0, ranks, "/job/train.py")
        (folder / "evidence.json").write_text(json.dumps(to_json(evidence)))
        (folder / "rank_1.stacks.txt").write_text("Thread 0x1 (most recent call first):\n")
        (folder / "verdict.json").write_text(json.dumps(verdict.to_json()))
        return folder

    def write_journal(self, ended: bool, exit_class: int = 0) -> None:
        journal = Journal(self.folder.journal("n0"), "n0")

        def write(type_: str, at: float, attempt: int, **fields: Any) -> None:
            journal.write(type_, T0 + at, at, attempt, **fields)

        write("run_started", 0, 0, script="/job/train.py")
        for rank in range(4):
            write("rank_started", 1, 0, rank=rank, local_rank=rank, pid=900 + rank, warm=False)
            write("rank_first_step", 5, 0, rank=rank, step=0)
        write("steps", 50, 0, ranks={str(r): {"step": 19, "steps": 20} for r in range(4)})
        write("stop", 100, 0, reason="rank 1 hangs", trigger="hang")
        for rank in range(4):
            write("rank_started", 100.5, 1, rank=rank, local_rank=rank, pid=1000 + rank, warm=rank > 0)
            write("rank_first_step", 101.0 + rank / 10, 1, rank=rank, step=16)
        write("steps", 150, 1, ranks={str(r): {"step": 40, "steps": 25} for r in range(4)})
        if ended:
            write("run_ended", 300, 1, exit_class=exit_class, reason="all ranks ended with exit code 0")
        journal.close()

    def go_live(self, pids: list[int], **changes: Any) -> None:
        """This process plays the agent; *pids* the ranks."""
        board = self.board = Board.create_anonymous(len(pids))
        board.base_ns = 1  # so that ages back to the machine's start can be written
        board.words[layout.H_BASE_NS] = board.base_ns
        self.board.words[layout.H_AGENT_BEAT] = self.word(0.1)
        self.live = {
            "schema": "steadyrun.live/1",
            "run_id": "demo",
            "node": "n0",
            "agent_pid": os.getpid(),
            "board": str(self.board.path),
            "attempt": 1,
            "phase": "running",
            "world_size": len(pids),
            "ranks": [{"rank": i, "local_rank": i, "pid": p, "phase": "running"} for i, p in enumerate(pids)],
            "restarts": 1,
            "command": "/job/train.py --steps 100",
            "started_at_unix_s": time.time() - 192,
            "updated_at_unix_s": time.time(),
            "standbys": [{"local_rank": 0, "pid": 77, "ready": True, "memory_bytes": 300 << 20}],
            "limits": {"step_s": 60.0, "setup_s": 600.0, "sections": {"checkpointing": 120.0}},
            **changes,
        }
        self.write_live()

    def write_live(self) -> None:
        self.folder.state.mkdir(exist_ok=True)
        (self.folder.state / "n0.json").write_text(json.dumps(self.live))
        saver = {"schema": "steadyrun.saver/1", "node": "n0", "pid": 1}  # savers have their files beside it
        (self.folder.state / "n0.saver.json").write_text(json.dumps(saver))

    def word(self, age_s: float) -> int:
        assert self.board is not None
        return max(time.monotonic_ns() - int(age_s * 1e9) - self.board.base_ns, 1)

    def attach(
        self, slot: int, pid: int, step: int, age_s: float, sections: Mapping[str, float], beats: int = 0
    ) -> None:
        """The rank's own words; *sections* are names and ages, outermost first."""
        board = self.board
        assert board is not None
        base, words = board.slot_base(slot), board.words

        for i, name in enumerate(sections, start=1):
            at = base + layout.S_NAME_TABLE + i * layout.NAME_BYTES // 8
            raw = name.encode().ljust(layout.NAME_BYTES, b"\0")
            words[at : at + layout.NAME_BYTES // 8] = memoryview(raw).cast("Q")
            words[base + layout.S_NAME_COUNTS + i] = 1
        words[base + layout.S_NAMES] = 1 + len(sections)
        lane = base + layout.S_LANES
        for i, age in enumerate(sections.values(), start=1):
            entry = (i + 1) * layout.TAG_S + self.word(age) / 1e9
            words[lane + i] = struct.unpack("Q", struct.pack("d", entry))[0]
        values = {
            layout.S_ATTEMPT: 1,
            layout.S_RANK: slot,
            layout.S_ATTACHED: 1,
            layout.S_STEP: step + 1,
            layout.S_STEP_AT: self.word(age_s),
            layout.S_STEPS_DONE: 5,
            layout.S_STEP_RING_COUNT: 4,
        }
        if beats:
            values |= {layout.S_BEATS: beats, layout.S_BEAT_AT: self.word(0.5)}
        for index, value in values.items():
            words[base + index] = value
        for i in range(4):
            words[base + layout.S_STEP_RING + i] = 50_000_000
        words[base + layout.S_OWNER_PID] = pid


@pytest.fixture
def fake_run(tmp_path: Path) -> Iterator[FakeRun]:
    folder, message = RunFolder.create(tmp_path / "runs", "demo", T0)
    assert message == ""
    run = FakeRun(folder)
    yield run
    if run.board is not None:
        run.board.close()


@pytest.fixture
def ended_run(fake_run: FakeRun) -> FakeRun:
    """Two incidents, a restart that worked, a good end."""
    fake_run.write_journal(ended=True)
    fake_run.add_incident(1)
    fake_run.add_incident(2, action=Action.STOP, mode=Mode.OBSERVE, victims=())
    return fake_run


@pytest.fixture
def rank_socket(fake_run: FakeRun) -> Iterator[Callable[..., list[Any]]]:
    """``rank_socket(rank, reply)``: an evidence socket as a rank opens it; returns the list of requests it hears."""
    import socket

    servers: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def open_socket(rank: int, reply: bytes | None, folder: Path | None = None) -> list[Any]:
        rank_dir = folder or fake_run.folder.rank_dir(1, rank)
        rank_dir.mkdir(parents=True, exist_ok=True)
        heard: list[Any] = []
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fd = os.open(rank_dir, os.O_PATH)
        try:
            server.bind(f"/proc/self/fd/{fd}/evidence.sock")
        finally:
            os.close(fd)
        server.listen(1)
        servers.append(server)

        def serve() -> None:
            client, _ = server.accept()
            with client:
                heard.append(json.loads(client.makefile().readline()))
                if reply is not None:
                    client.sendall(reply + b"\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        threads.append(thread)
        return heard

    yield open_socket
    for server in servers:
        server.close()
    for thread in threads:
        thread.join(5)
