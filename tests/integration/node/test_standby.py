"""Real interpreters that wait for orders, and become ranks."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from steadyrun.node.ports import SpawnSpec
from steadyrun.node.processes import LinuxProcessTable
from steadyrun.node.standby import OOM_SCORE, StandbyPool, can_restore_nice

DEADLINE_S = 30.0

# The protocol from the other side, in a few lines; the in-rank side has tests of its own.
STANDBY = """
import json, os, sys, threading
told = json.loads(os.environ["STEADYRUN_STANDBY"])
threading.Thread(target=threading.Event().wait, daemon=True).start()  # priorities belong to threads
try:
    os.write(told["ready_fd"], b"1")
except BrokenPipeError:
    pass  # the orders came first
with os.fdopen(told["fd"]) as orders_file:
    line = orders_file.readline()
if not line:
    os._exit(0)
orders = json.loads(line)
nices = sorted({os.getpriority(os.PRIO_PROCESS, int(t)) for t in os.listdir("/proc/self/task")})
facts = {"env_bytes": len(orders["env"]["BIG"]), "nices": nices, "pid": os.getpid(),
         "oom": int(open("/proc/self/oom_score_adj").read())}
with open(orders["stdout"], "w") as out:
    json.dump(facts, out)
sys.exit(9)
"""


class Pool:
    def __init__(self) -> None:
        self.table = LinuxProcessTable(f"standby-{os.getpid()}:node")
        self.pool = StandbyPool(self.table)
        self.script = STANDBY

    def prepare(self, *local_ranks: int) -> list[int]:
        def spec_for(local_rank: int, told: Mapping[str, Any]) -> SpawnSpec:
            return SpawnSpec(-1, local_rank, 0, (sys.executable, "-c", self.script), dict(os.environ))

        return self.pool.prepare(local_ranks, ["json"], {}, spec_for)

    def wait_exits(self, count: int) -> dict[int, int]:
        codes: dict[int, int] = {}
        while len(codes) < count:
            fds = [c.fd for c in self.table._children.values() if not c.ended]
            assert select.select(fds, [], [], DEADLINE_S)[0], f"only {codes}"
            codes.update({seen.pid: seen.code for seen in self.table.poll_exits()})
        return codes


@pytest.fixture
def standbys() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.pool.drop()
    pool.table.sweep(99)
    pool.wait_exits(sum(not child.ended for child in pool.table._children.values()))  # what was killed just now
    pool.table.close()


def orders(out: Path, size: int) -> dict[str, Any]:
    return {"env": {"BIG": "x" * size}, "setup": {"rank": 0, "attempt": 1}, "stdout": str(out), "stderr": None}


@pytest.mark.parametrize("size", [100, 200_000])
def test_ready_standby_becomes_a_rank_at_normal_priority(
    standbys: Pool, tmp_path: Path, wait_until: Callable[..., object], size: int
) -> None:
    (pid,) = standbys.prepare(0)
    wait_until(lambda: standbys.pool.ready() == {0}, DEADLINE_S, "the standby did not get ready")
    (status,) = standbys.pool.status()
    assert status["memory_bytes"] > 1_000_000
    if can_restore_nice():
        assert os.getpriority(os.PRIO_PROCESS, pid) > os.getpriority(os.PRIO_PROCESS, 0)
    assert int(Path(f"/proc/{pid}/oom_score_adj").read_text()) == OOM_SCORE
    assert standbys.pool.activate(0, orders(tmp_path / "facts", size)) == pid
    assert standbys.wait_exits(1) == {pid: 9}
    facts = json.loads((tmp_path / "facts").read_text())
    own_oom = int(Path("/proc/self/oom_score_adj").read_text())
    assert facts == {"env_bytes": size, "nices": [os.getpriority(os.PRIO_PROCESS, 0)], "pid": pid, "oom": own_oom}


def test_standby_that_is_still_importing_is_used_too(standbys: Pool, tmp_path: Path) -> None:
    (pid,) = standbys.prepare(0)
    assert standbys.pool.activate(0, orders(tmp_path / "facts", 200_000)) == pid
    assert standbys.wait_exits(1) == {pid: 9}


def test_killed_standby_is_not_used_although_nobody_has_noticed(
    standbys: Pool, tmp_path: Path, wait_until: Callable[..., object]
) -> None:
    (pid,) = standbys.prepare(0)
    wait_until(lambda: standbys.pool.ready() == {0}, DEADLINE_S, "the standby did not get ready")
    os.kill(pid, signal.SIGKILL)
    assert select.select([standbys.table.fileno_of(pid)], [], [], DEADLINE_S)[0]
    assert standbys.pool.activate(0, orders(tmp_path / "facts", 10)) is None


def test_drop_ends_standbys_that_are_busy_as_well(standbys: Pool) -> None:
    standbys.script = "import time; time.sleep(600)"
    pids = standbys.prepare(0, 1)
    standbys.pool.drop()
    assert standbys.wait_exits(2) == dict.fromkeys(pids, -signal.SIGKILL)


def test_sweep_does_not_touch_standbys(standbys: Pool, wait_until: Callable[..., object]) -> None:
    standbys.prepare(0)
    wait_until(lambda: standbys.pool.ready() == {0}, DEADLINE_S, "the standby did not get ready")
    assert standbys.table.sweep(5).ended == ()
    assert standbys.pool.ready() == {0}
    assert standbys.table.poll_exits() == ()
