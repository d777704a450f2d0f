"""Small real processes that do one thing; each says when it is there."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

STACK_SIGNAL = int(signal.SIGRTMAX) - 3

PRELUDE = """
import collections, faulthandler, itertools, os, signal, sys, threading, time
folder = sys.argv[1]
if {handler}:
    out = open(folder + "/stacks.txt", "a")
    faulthandler.enable(file=out)
    faulthandler.register({signal}, file=out, all_threads=True, chain=False)
def ready():
    os.write(1, b"ready\\n")
"""
BODIES = {
    "sleeps": "def work():\n    ready()\n    time.sleep(1000)\nwork()",
    "computes": "def work():\n    ready()\n    x = 0\n    while True:\n        x += 1\nwork()",
    "wanders": (
        "def a():\n    time.sleep(0.05)\ndef b():\n    time.sleep(0.05)\ndef work():\n    ready()\n"
        "    while True:\n        a()\n        b()\nwork()"
    ),
    "mostly_in_one_place": (
        "def a():\n    time.sleep(0.9)\ndef b():\n    time.sleep(0.1)\ndef work():\n    ready()\n"
        "    while True:\n        a()\n        b()\nwork()"
    ),
    "holds_lock": "def work():\n    ready()\n    collections.deque(itertools.repeat(None), maxlen=0)\nwork()",
    "threads": (
        "def work():\n    for i in range(20):\n"
        "        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "    ready()\n    time.sleep(1000)\nwork()"
    ),
    "crashes": "def work():\n    ready()\n    sys.stdin.readline()\n    os.kill(os.getpid(), signal.SIGSEGV)\nwork()",
    "raises": (
        "import json\ndef work():\n    ready()\n    sys.stdin.readline()\n"
        "    json.dump({'type': 'ValueError', 'message': 'late', 'traceback_hash': 'h', 'frames': [], 'step': 3,"
        " 'at_unix_s': time.time()}, open(folder + '/exception.json', 'w'))\n    os._exit(1)\nwork()"
    ),
}


class Worker:
    """A running process and its rank folder."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process, self.folder = process, folder
        self.pid = process.pid

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def wait_ready(self, limit_s: float = 30.0) -> None:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], limit_s)
        assert readable, "the worker did not come up"
        assert self.process.stdout.readline() == b"ready\n"


@pytest.fixture
def start_worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """``start_worker("sleeps", handler=True)``: a ready Worker; all are killed at the end."""
    workers: list[Worker] = []

    def start(body: str, handler: bool = True) -> Worker:
        folder = tmp_path / f"rank_{len(workers)}"
        folder.mkdir()
        code = PRELUDE.format(handler=handler, signal=STACK_SIGNAL) + BODIES[body]
        script = folder / "train.py"
        script.write_text(code)
        argv = [sys.executable, str(script), str(folder)]
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(folder / "stderr.log").open("wb")
        )
        worker = Worker(process, folder)
        workers.append(worker)
        worker.wait_ready()
        return worker

    yield start
    for worker in workers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        worker.process.communicate(timeout=10)


@pytest.fixture
def deadline_in() -> Callable[[float], float]:
    return lambda seconds: time.monotonic() + seconds
