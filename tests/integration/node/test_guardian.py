"""The agent is killed: its ranks go by themselves, the guardian ends the rest, and only that."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from steadyrun.core.journal import read_journal
from steadyrun.node.sweep import read_process

DEADLINE_S = 30.0

AGENT = """
import os, sys, time
from pathlib import Path
from steadyrun.node.guardian import Guardian
from steadyrun.node.ports import SpawnSpec
from steadyrun.node.processes import LinuxProcessTable
told, folder, how = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
guardian = Guardian("none:host", folder, "node0")
table = LinuxProcessTable("none:host")
rank = '''
import os, signal, subprocess, sys
told = int(sys.argv[1])
os.set_inheritable(told, True)
sleep = "import os, sys, time; os.write(int(sys.argv[1]), b'%d ' % os.getpid()); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", sleep, str(told)], pass_fds=[told], start_new_session=True)
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        os.execve(sys.executable, [sys.executable, "-c", sleep, str(told)], {})
    os._exit(0)
os.write(told, b'%d ' % os.getpid())
signal.pause()
'''
env = {**os.environ, "STEADYRUN_RUN": "none:host"}
table.spawn(SpawnSpec(0, 0, 0, (sys.executable, "-c", rank, str(told)), env, pass_fds=(told,)))
os.write(told, b"%d " % guardian.pid)
if how == "dismiss":
    sys.stdin.readline()
    guardian.dismiss()
    table.signal_group(next(iter(table._children)), 9)
    table.sweep(0)
    os._exit(0)
time.sleep(600)
"""


def start_agent(folder: Path, how: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """The agent, and the pids of guardian, rank, and two descendants in no particular order."""
    (folder / "journal").mkdir(parents=True)
    read_fd, write_fd = os.pipe()
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(write_fd), str(folder), how], pass_fds=[write_fd], stdin=subprocess.PIPE
    )
    os.close(write_fd)
    got = b""
    while got.count(b" ") < 4:
        assert select.select([read_fd], [], [], DEADLINE_S)[0], f"only {got!r}"
        chunk = os.read(read_fd, 4096)
        assert chunk, f"everybody ended after {got!r}"
        got += chunk
    os.close(read_fd)
    return agent, [int(p) for p in got.split()]


def is_alive(pid: int) -> bool:
    entry = read_process(pid)
    return entry is not None and not entry.is_dead


def ignores(pid: int, signum: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (signum - 1) & 1)


def test_killed_agent_leaves_nothing_and_another_job_of_the_same_name_goes_on(
    tmp_path: Path, wait_until: Callable[..., object]
) -> None:
    other, others = start_agent(tmp_path / "other", "dismiss")
    agent, pids = start_agent(tmp_path / "killed", "be killed")
    agent.kill()
    agent.communicate(timeout=DEADLINE_S)
    wait_until(lambda: not any(map(is_alive, pids)), DEADLINE_S, lambda: f"left: {[p for p in pids if is_alive(p)]}")
    (record,) = read_journal(tmp_path / "killed" / "journal" / "node0.jsonl")
    assert record["type"] == "agent_gone"
    assert len(record["ended"]) >= 2
    assert record["stuck"] == []
    assert all(map(is_alive, others))
    other.communicate(b"\n", timeout=DEADLINE_S)
    wait_until(lambda: not any(map(is_alive, others)), DEADLINE_S, "the other job did not end")


def test_guardian_survives_signals_for_the_agent_and_leaves_when_dismissed(
    tmp_path: Path, wait_until: Callable[..., object]
) -> None:
    agent, pids = start_agent(tmp_path / "run", "dismiss")
    guardian = next(p for p in pids if b"steadyrun.node.guardian" in Path(f"/proc/{p}/cmdline").read_bytes())
    wait_until(lambda: ignores(guardian, signal.SIGTERM), DEADLINE_S, "the guardian did not get ready")
    fd = os.pidfd_open(guardian)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(guardian, signum)
    assert not select.select([fd], [], [], 0.3)[0]
    agent.communicate(b"\n", timeout=DEADLINE_S)
    assert select.select([fd], [], [], DEADLINE_S)[0]
    os.close(fd)
    assert list(read_journal_if_any(tmp_path / "run" / "journal" / "node0.jsonl")) == []


def read_journal_if_any(path: Path) -> list[object]:
    return list(read_journal(path)) if path.exists() else []
