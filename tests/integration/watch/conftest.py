"""Ranks and standbys as the launcher starts them, without a launcher."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import steadyrun.core.board
from steadyrun.core.board import Board, SlotView

SITE = Path(steadyrun.core.board.__file__).parents[1] / "watch" / "site"
DEADLINE_S = 120.0
STACK_SIGNAL = signal.SIGRTMAX - 3


@dataclass
class Outcome:
    """How a rank ended."""

    code: int
    stdout: str
    stderr: str


@dataclass
class Rank:
    """A running rank or standby."""

    process: subprocess.Popen[str]
    rank_dir: Path
    board: Board
    orders_fd: int = -1
    ready_fd: int = -1
    _done: list[Outcome] = field(default_factory=list)

    def view(self) -> SlotView | None:
        return self.board.view(0)

    def wait_until(self, what: Callable[[], Any], text: str = "condition") -> Any:
        """The first true value of *what*; fails with the story when the deadline passes or the process ends."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            value = what()
            if value:
                return value
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                value = what()
                if value:
                    return value
                self.process.kill()
                out, err = self.process.communicate()
                pytest.fail(f"never: {text}\ncode {self.process.returncode}\n{out}\n{err}\n{self.view()}")
            time.sleep(0.002)

    def finish(self) -> Outcome:
        if not self._done:
            try:
                out, err = self.process.communicate(timeout=DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                out, err = self.process.communicate()
                pytest.fail(f"did not end\n{out}\n{err}\n{self.view()}")
            self._done.append(Outcome(self.process.returncode, out, err))
        return self._done[0]

    def wait_ready(self) -> None:
        readable, _, _ = select.select([self.ready_fd], [], [], DEADLINE_S)
        got = os.read(self.ready_fd, 16) if readable else b""
        if got != b"\1":
            self.process.kill()
            pytest.fail(f"standby not ready: {got!r} {self.process.communicate()}")

    def order(self, orders: Mapping[str, Any]) -> None:
        os.write(self.orders_fd, json.dumps(orders).encode() + b"\n")
        os.close(self.orders_fd)
        self.orders_fd = -1


class Starter:
    """Starts programs plainly, as a cold rank and as a warm one, all with the same command line and environment."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.ranks: list[Rank] = []
        self._number = 0

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("STEADYRUN", "PYTEST", "COV_"))}
        return {**env, "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1", "STEADYRUN_RUN": "r:n", **(more or {})}

    def new_rank_dir(self) -> Path:
        self._number += 1
        folder = self.tmp_path / f"rank_{self._number}"
        folder.mkdir(mode=0o700)
        return folder

    def setup(self, board: Board, rank_dir: Path, **more: Any) -> dict[str, Any]:
        return {
            "board": str(board.path),
            "slot": 0,
            "rank": 3,
            "attempt": 2,
            "rank_dir": str(rank_dir),
            "deadman_s": 60.0,
            "faults": "",
            "run_id": "r",
            "loaded_report": None,
            "stack_signal": STACK_SIGNAL,
            **more,
        }

    def with_site(self, env: Mapping[str, str]) -> dict[str, str]:
        original = env.get("PYTHONPATH")
        out = dict(env)
        if original is not None:
            out["STEADYRUN_PYTHONPATH"] = original
        out["PYTHONPATH"] = f"{SITE}{os.pathsep}{original}" if original else str(SITE)
        return out

    def _start(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path | None, fds: Sequence[int] = ()) -> Any:
        return subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            pass_fds=tuple(fds),
        )

    def plain(self, argv: Sequence[str], env: Mapping[str, str], cwd: Path | None = None) -> Outcome:
        process = self._start(argv, env, cwd)
        try:
            out, err = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
        return Outcome(process.returncode, out, err)

    def cold(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None, **setup: Any
    ) -> Rank:
        env = self.environment() if env is None else env
        rank_dir = self.new_rank_dir()
        board = Board.create_anonymous(1)
        told = json.dumps(self.setup(board, rank_dir, **setup))
        process = self._start(argv, {**self.with_site(env), "STEADYRUN_SETUP": told}, cwd)
        rank = Rank(process, rank_dir, board)
        self.ranks.append(rank)
        return rank

    def standby(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        preload: Sequence[str] = (),
        preset_env: Mapping[str, str | None] | None = None,
    ) -> Rank:
        env = self.environment() if env is None else env
        rank_dir = self.new_rank_dir()
        board = Board.create_anonymous(1)
        order_read, order_write = os.pipe()
        ready_read, ready_write = os.pipe()
        told = {"fd": order_read, "ready_fd": ready_write, "preload": list(preload), "preset_env": preset_env or {}}
        process = self._start(
            argv, {**self.with_site(env), "STEADYRUN_STANDBY": json.dumps(told)}, cwd, (order_read, ready_write)
        )
        os.close(order_read)
        os.close(ready_write)
        rank = Rank(process, rank_dir, board, order_write, ready_read)
        self.ranks.append(rank)
        return rank

    def orders(self, rank: Rank, env: Mapping[str, str], cwd: Path | None = None, **setup: Any) -> dict[str, Any]:
        return {
            "env": dict(env),
            "setup": self.setup(rank.board, rank.rank_dir, **setup),
            "stdout": None,
            "stderr": None,
            "cwd": str(cwd or Path.cwd()),
        }

    def warm(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        preload: Sequence[str] = (),
        preset_env: Mapping[str, str | None] | None = None,
        **setup: Any,
    ) -> Rank:
        """A standby that was ready when it got its orders. RANK is known only from these."""
        env = self.environment() if env is None else env
        before = {k: v for k, v in env.items() if k != "RANK"}
        rank = self.standby(argv, before, cwd, preload, preset_env)
        rank.wait_ready()
        rank.order(self.orders(rank, env, cwd, **setup))
        return rank

    def script(
        self, text: str, name: str = "script.py", folder: Path | None = None, arguments: Sequence[str] = ()
    ) -> list[str]:
        """A script in a folder of its own, as a command line."""
        where = folder or self.tmp_path / "scripts"
        where.mkdir(exist_ok=True)
        path = where / name
        path.write_text(text)
        return [sys.executable, "-u", str(path), *arguments]

    def close(self) -> None:
        for rank in self.ranks:
            rank.process.kill()
            rank.process.communicate()
            for fd in (rank.orders_fd, rank.ready_fd):
                if fd >= 0:
                    os.close(fd)
            rank.board.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    starter = Starter(tmp_path)
    yield starter
    starter.close()
