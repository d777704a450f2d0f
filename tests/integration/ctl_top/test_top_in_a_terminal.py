"""``steadyctl top`` as a person sees it: in a terminal of 80 columns, with keys."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from steadyrun.core.board import Board
from steadyrun.core.runfolder import RunFolder

RANKS = 40
LINES = 16


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """Forty ranks that have not reported yet; this process plays their agent."""
    folder, message = RunFolder.create(tmp_path / "runs", "demo", time.time())
    assert message == ""
    board = Board.create_anonymous(RANKS)
    folder.state.mkdir(exist_ok=True)
    told = {
        "schema": "steadyrun.live/1",
        "run_id": "demo",
        "node": "n0",
        "agent_pid": os.getpid(),
        "board": str(board.path),
        "attempt": 0,
        "phase": "running",
        "world_size": RANKS,
        "ranks": [{"rank": i, "local_rank": i, "pid": os.getpid(), "phase": "starting"} for i in range(RANKS)],
        "restarts": 0,
        "started_at_unix_s": time.time(),
        "updated_at_unix_s": time.time(),
    }
    (folder.state / "n0.json").write_text(json.dumps(told))
    yield folder
    board.close()


class Screen:
    """A terminal with a program in it."""

    def __init__(self, *argv: str) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            argv, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm"}, start_new_session=True
        )
        self.slave = slave
        self.text = ""

    def read_until(self, is_there: Callable[[str], bool], what: str, limit_s: float = 40.0) -> None:
        """Until the newest picture is like that."""
        until_s = time.monotonic() + limit_s
        while not is_there(self.picture):
            left_s = until_s - time.monotonic()
            assert left_s > 0, f"not within {limit_s:g} s: {what}\n{self.picture}"
            if select.select([self.master], [], [], min(left_s, 0.5))[0]:
                self.text += os.read(self.master, 65536).decode(errors="replace")

    @property
    def picture(self) -> str:
        """What was drawn last, without what moves the cursor."""
        last = self.text.rpartition("\x1b[H")[2]
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", last).replace("\r", "")

    def press(self, key: str) -> None:
        os.write(self.master, key.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.slave)
        os.close(self.master)


@pytest.fixture
def top(run: RunFolder) -> Iterator[Screen]:
    screen = Screen(sys.executable, "-m", "steadyrun.ctl", "top", str(run.root))
    yield screen
    screen.close()


@pytest.mark.deadline(120)
def test_a_person_looks_sorts_unfolds_pages_and_leaves(top: Screen) -> None:
    top.read_until(lambda p: "q leaves" in p, "the first picture")
    drawn = top.picture.rstrip("\n").split("\n")
    assert len(drawn) <= LINES, drawn
    assert all(len(line) <= 80 for line in drawn), drawn
    assert drawn[0].startswith("demo  live for")
    assert "40 ranks on 1 node" in drawn[0]
    assert re.search(r"^ *0-39 ", top.picture, re.MULTILINE), "forty ranks are folded"
    top.press("f")
    top.read_until(lambda p: "unfolded" in p and "more rows" in p, "a row for each rank")
    assert re.search(r"^ *0 ", top.picture, re.MULTILINE)
    top.press(" ")
    top.read_until(lambda p: re.search(r"^ *12 ", p, re.MULTILINE) is not None, "the next page")
    assert not re.search(r"^ *0 ", top.picture, re.MULTILINE)
    top.press("s")
    top.read_until(lambda p: "sorted by late" in p, "another order")
    top.press("b")
    top.read_until(lambda p: "bad only" in p and "every rank is as usual" in p, "only bad ranks")
    top.press("q")
    assert top.process.wait(30) == 0
    assert termios.tcgetattr(top.slave) == top.before, "the terminal is as it was"
