"""Real processes that do what badly behaved ranks do."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from steadyrun.node.ports import SpawnSpec
from steadyrun.node.processes import LinuxProcessTable
from steadyrun.node.sweep import Tag, list_shm, read_process

DEADLINE_S = 30.0
MARKER = f"integration-{os.getpid()}:node"


class Ranks:
    """A table, and scripts that report their state on descriptor ``told``."""

    def __init__(self) -> None:
        self.table = LinuxProcessTable(MARKER)
        self.env = {**os.environ, "STEADYRUN_RUN": MARKER}

    def start(self, script: str, attempt: int = 0, words: int = 1, env: dict[str, str] | None = None) -> list[str]:
        """Run *script*; returns [pid, and the first *words* words that it wrote]."""
        read_fd, write_fd = os.pipe()
        code = f"told = {write_fd}\n" + textwrap.dedent(PRELUDE) + textwrap.dedent(script)
        spec = SpawnSpec(0, 0, attempt, (sys.executable, "-c", code), env or self.env, pass_fds=(write_fd,))
        pid = self.table.spawn(spec)
        os.close(write_fd)
        with os.fdopen(read_fd, "rb", buffering=0) as told:
            got = b""
            while len(got.split(b"\n")) <= words:
                assert select.select([told], [], [], DEADLINE_S)[0], f"only {got!r}"
                chunk = told.read(4096)
                assert chunk, f"the script ended after {got!r}"
                got += chunk
        return [str(pid), *got.decode().split("\n")[:words]]

    def end(self, pid: int, signum: int = signal.SIGKILL) -> int:
        self.table.signal(pid, signum)
        return self.wait_exit(pid)

    def wait_exit(self, pid: int) -> int:
        assert select.select([self.table.fileno_of(pid)], [], [], DEADLINE_S)[0], f"{pid} did not end"
        codes = {seen.pid: seen.code for seen in self.table.poll_exits()}
        return codes[pid]


PRELUDE = """
import os, signal, subprocess, sys, time
def tell(*words): os.write(told, ("\\n".join(map(str, words)) + "\\n").encode())
SLEEPER = (
    "import os, signal, sys, time; signal.signal(15, signal.SIG_IGN); "
    f"os.write({told}, b'%d\\\\n' % os.getpid()); {{}}time.sleep(600)"
)
def sleeper(first="", **how):
    return subprocess.Popen([sys.executable, "-c", SLEEPER.format(first)], pass_fds=[told], **how)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.set_inheritable(told, True)
"""


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.table.sweep(99)
    ranks.table.poll_exits()
    ranks.table.close()


def is_alive(pid: int) -> bool:
    entry = read_process(pid)
    return entry is not None and not entry.is_dead


# -- spawning ----------------------------------------------------------------------------------------------------------
def test_rank_leads_a_session_and_gets_its_environment_only(ranks: Ranks) -> None:
    pid, session, value, home, blocked = ranks.start(
        """
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, []) - {signal.SIGUSR1}
        tell(os.getsid(0), os.environ["X"], os.environ.get("HOME", "unset"), len(mask))
        time.sleep(600)
        """,
        words=4,
        env={"X": "y", "PATH": os.environ["PATH"]},
    )
    assert (session, value, home, blocked) == (pid, "y", "unset", "0")
    ranks.end(int(pid))


def test_output_is_appended_to_private_files(ranks: Ranks, tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    out.write_text("before\n")
    out.chmod(0o600)
    code = "import sys; print('hello'); print('oops', file=sys.stderr)"
    pid = ranks.table.spawn(SpawnSpec(0, 0, 0, (sys.executable, "-c", code), ranks.env, stdout=out, stderr=err))
    assert ranks.wait_exit(pid) == 0
    assert out.read_text() == "before\nhello\n"
    assert err.read_text() == "oops\n"
    assert err.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("argv", [("/no/such/program",), ("no-such-program-either",)])
def test_missing_program_is_an_error_of_the_caller(ranks: Ranks, argv: tuple[str, ...]) -> None:
    with pytest.raises(OSError, match="No such file"):
        ranks.table.spawn(SpawnSpec(0, 0, 0, argv, ranks.env))


def test_ignored_hangup_stays_ignored(ranks: Ranks) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        pid, how = ranks.start("tell(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN); time.sleep(600)")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert how == "True"
    ranks.end(int(pid))


def test_descriptors_are_not_used_again_before_the_selector_can_forget_them(ranks: Ranks) -> None:
    pid = int(ranks.start("tell('up')")[0])
    fd = ranks.table.fileno_of(pid)
    ranks.wait_exit(pid)
    os.fstat(fd)  # still open
    ranks.table.poll_exits()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# -- what ranks leave --------------------------------------------------------------------------------------------------
LEAVERS = {
    "child": "sleeper()",
    "child in a session of its own": "sleeper(start_new_session=True)",
    "child in a group of its own": "sleeper(preexec_fn=os.setpgrp)",
    "child without our environment": "sleeper(start_new_session=True, env={})",
    "stopped child": "sleeper('os.kill(os.getpid(), 19);')",
    "forked child": "os.fork() or (tell(os.getpid()), signal.pause())",
    "daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, '-c', SLEEPER.format('')])
    os._exit(0)
os.wait()
""",
    "daemon without our environment": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, '-c', SLEEPER.format('')], {})
    os._exit(0)
os.wait()
""",
    "orphan that leads a session, without our environment": """
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        os.execve(sys.executable, [sys.executable, '-c', SLEEPER.format('')], {})
    os._exit(0)
os.wait()
""",
    "grandchild of a dead child": """
if os.fork() == 0:
    sleeper()
    os._exit(0)
os.wait()
""",
}


@pytest.mark.parametrize("how", LEAVERS, ids=[k.replace(" ", "_").replace(",", "") for k in LEAVERS])
@pytest.mark.parametrize("end", ["killed", "by itself"])
def test_nothing_that_a_rank_started_outlives_the_sweep(ranks: Ranks, how: str, end: str) -> None:
    pid, child = map(int, ranks.start(LEAVERS[how] + "\nsignal.sigwait([signal.SIGUSR1])"))
    assert is_alive(child)
    if end == "killed":
        assert ranks.end(pid) == -signal.SIGKILL
    else:
        assert ranks.end(pid, signal.SIGUSR1) == 0
    begun_s = time.monotonic()
    report = ranks.table.sweep(0)
    assert time.monotonic() - begun_s < 2.0
    assert [p for p, _ in report.ended] == [child]
    assert report.stuck == ()
    assert not is_alive(child)


def test_sweep_spares_ranks_of_later_attempts_and_what_they_started(ranks: Ranks) -> None:
    old = int(ranks.start("sleeper(); time.sleep(600)")[0])
    new, loader = map(int, ranks.start("sleeper(start_new_session=True); time.sleep(600)", attempt=1))
    ranks.table.record_descendants()
    ranks.end(old)
    assert len(ranks.table.sweep(0).ended) == 1
    assert is_alive(new)
    assert is_alive(loader)
    ranks.end(new)
    assert [pid for pid, _ in ranks.table.sweep(1).ended] == [loader]


def test_without_the_tag_recorded_descendants_are_found_all_the_same(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tag, "attempt_of", lambda self, pid: None)  # as where the hard limit is too low
    script = LEAVERS["orphan that leads a session, without our environment"] + "\nsignal.pause()"
    script = script.replace("    os._exit(0)\nos.wait()", "    signal.pause()")  # the parent lives at first
    pid, child = map(int, ranks.start(script))
    ranks.table.record_descendants()
    ranks.end(pid)
    assert child in [p for p, _ in ranks.table.sweep(0).ended]
    assert not is_alive(child)


def test_tag_names_the_attempt_and_follows_a_standby(ranks: Ranks) -> None:
    tag = Tag.of_agent(os.getpid())
    rank, child = map(int, ranks.start("sleeper(env={}, start_new_session=True); signal.pause()", attempt=4))
    standby = int(ranks.start("tell('up'); signal.pause()", attempt=-1)[0])
    assert [tag.attempt_of(p) for p in (rank, child, standby, os.getpid(), 1)] == [4, 4, -1, None, None]
    assert Tag.of_agent(1).attempt_of(rank) is None
    assert {rank, child, standby} <= set(tag.pids())
    ranks.table.assign(standby, 0, 5)
    assert tag.attempt_of(standby) == 5
    ranks.end(rank)
    ranks.end(standby)


def test_sweep_leaves_the_agents_other_children_alone(ranks: Ranks) -> None:
    with subprocess.Popen(["sleep", "600"]) as plain, subprocess.Popen(["sleep", "600"], start_new_session=True) as own:
        ranks.end(int(ranks.start("tell('up'); time.sleep(600)")[0]))
        assert ranks.table.sweep(0).ended == ()
        for helper in (plain, own):
            assert helper.poll() is None
            helper.kill()
            assert helper.wait(DEADLINE_S) == -signal.SIGKILL  # its exit code was not taken from us either


def test_marker_of_another_job_with_the_same_name_is_no_licence_to_kill() -> None:
    """Static jobs often share the run id "none": a process that is not our descendant is not ours."""
    code = (
        "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n"
        "  os.write(1, b'%d\\n' % os.getpid()); os.close(1); time.sleep(600)"
    )
    env = {**os.environ, "STEADYRUN_RUN": MARKER}
    told = subprocess.run([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, timeout=DEADLINE_S, check=True)
    stranger = int(told.stdout)
    ranks = Ranks()
    try:
        ranks.end(int(ranks.start("tell('up'); time.sleep(600)")[0]))
        assert ranks.table.sweep(0).ended == ()
        assert is_alive(stranger)
    finally:
        os.kill(stranger, signal.SIGKILL)
        ranks.table.poll_exits()
        ranks.table.close()


def test_group_with_a_recycled_number_is_not_hit(ranks: Ranks) -> None:
    """The leader is dead and reaped, and another process has its number: it must not get the signal."""
    pid = int(ranks.start("tell('up')")[0])
    ranks.wait_exit(pid)
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        child = ranks.table._children.pop(pid)
        child.pid = other.pid  # what a recycled number looks like: same pid, other start time
        child.start_ticks -= 1
        ranks.table._children[other.pid] = child
        assert ranks.table.signal_group(other.pid, signal.SIGKILL) is False
        assert ranks.table.sweep(0).ended == ()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait(DEADLINE_S)


def test_many_leftovers_end_within_the_bound(ranks: Ranks) -> None:
    words = ranks.start("[sleeper(start_new_session=n % 2 == 0) for n in range(16)]; time.sleep(600)", words=16)
    ranks.end(int(words[0]))
    begun_s = time.monotonic()
    report = ranks.table.sweep(0)
    took_s = time.monotonic() - begun_s
    assert len(report.ended) == 16
    assert took_s < 2.0
    assert not any(is_alive(int(w)) for w in words[1:])


def test_dead_orphans_do_not_stay_as_zombies(ranks: Ranks, wait_until: Callable[..., object]) -> None:
    pid, orphan = map(
        int,
        ranks.start(
            """
            if os.fork() == 0:
                if os.fork() == 0:
                    os.setsid(); tell(os.getpid()); os._exit(0)
                os._exit(0)
            time.sleep(600)
            """
        ),
    )
    wait_until(lambda: (ranks.table.record_descendants(), read_process(orphan) is None)[1], 5.0, "zombie was kept")
    ranks.end(pid)


# -- shared memory -----------------------------------------------------------------------------------------------------
def test_shared_memory_of_dead_ranks_is_removed_and_nothing_else(ranks: Ranks) -> None:
    tag = f"{os.getpid():x}"
    foreign = Path(f"/dev/shm/psm_{tag}aa")  # there before the attempt
    foreign.write_bytes(b"x")
    kept = Path(f"/dev/shm/user_{tag}")
    held = Path(f"/dev/shm/psm_{tag}bb")
    try:
        pid, _ = ranks.start(
            f"""
            open("/dev/shm/torch_%d_77_0" % os.getpid(), "w").close()
            open("/dev/shm/psm_{tag}cc", "w").close()
            open("{kept}", "w").close()
            tell("up")
            time.sleep(600)
            """
        )
        with held.open("w"):
            ranks.end(int(pid))
            report = ranks.table.sweep(0)
        assert sorted(report.removed) == [f"psm_{tag}cc", f"torch_{pid}_77_0"]
        left = {f.name for f in list_shm()}
        assert {foreign.name, kept.name, held.name} <= left
    finally:
        for path in (foreign, kept, held):
            path.unlink(missing_ok=True)


# -- the agent's own death ---------------------------------------------------------------------------------------------
AGENT = """
import os, sys, time
from steadyrun.node.ports import SpawnSpec
from steadyrun.node.processes import LinuxProcessTable
table = LinuxProcessTable("dies:node")
code = "import os, sys, time; os.write(int(sys.argv[1]), b'x'); time.sleep(600)"
argv = (sys.executable, "-c", code, sys.argv[1])
specs = [SpawnSpec(r, r, 0, argv, dict(os.environ), pass_fds=(int(sys.argv[1]),)) for r in range(3)]
pids = [table.spawn(spec) for spec in specs]
os.write(int(sys.argv[1]), ("\\n".join(map(str, pids)) + "\\n").encode())
time.sleep(600)
"""


def test_ranks_die_with_a_killed_agent_at_once() -> None:
    read_fd, write_fd = os.pipe()
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(write_fd)], pass_fds=[write_fd])
    os.close(write_fd)
    got = b""
    while got.count(b"\n") < 3 or got.count(b"x") < 3:
        assert select.select([read_fd], [], [], DEADLINE_S)[0]
        got += os.read(read_fd, 4096)
    pids = [int(p) for p in got.replace(b"x", b"").split()]
    pidfds = [os.pidfd_open(p) for p in pids]
    begun_s = time.monotonic()
    agent.kill()
    for fd in pidfds:
        assert select.select([fd], [], [], 5.0)[0], "a rank outlived its agent"
    took_s = time.monotonic() - begun_s
    agent.wait(DEADLINE_S)
    for fd in (*pidfds, read_fd):
        os.close(fd)
    assert took_s < 1.0


# -- adopted children --------------------------------------------------------------------------------------------------
def test_adopted_child_is_watched_and_reaped_by_its_owner_only(ranks: Ranks) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(5)"], stdin=subprocess.PIPE)
    ranks.table.adopt(owner.pid, 0, 0, 0, owner.poll)
    assert ranks.table.poll_exits() == ()
    assert owner.stdin is not None
    owner.stdin.close()
    assert ranks.wait_exit(owner.pid) == 5
    assert owner.returncode == 5


def test_exit_of_an_adopted_child_is_read_without_reaping(ranks: Ranks) -> None:
    owner = subprocess.Popen([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    ranks.table.adopt(owner.pid, 0, 0, 0)
    assert ranks.wait_exit(owner.pid) == -signal.SIGKILL
    assert owner.wait(DEADLINE_S) == -signal.SIGKILL


def test_kill_of_an_adopted_child_spares_the_agents_group(ranks: Ranks) -> None:
    with subprocess.Popen(["sleep", "600"]) as owner, subprocess.Popen(["sleep", "600"]) as bystander:
        ranks.table.adopt(owner.pid, 0, 0, 0, owner.poll)
        assert ranks.table.signal_group(owner.pid, signal.SIGKILL)
        assert ranks.wait_exit(owner.pid) == -signal.SIGKILL
        assert bystander.poll() is None
        bystander.kill()


def test_adopting_nobody_is_refused(ranks: Ranks) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(DEADLINE_S)
    with pytest.raises(ProcessLookupError, match=str(gone.pid)):
        ranks.table.adopt(gone.pid, 0, 0, 0)


# -- old kernels -------------------------------------------------------------------------------------------------------
def test_without_pidfds_exits_are_noticed_all_the_same(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pidfd(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", no_pidfd)
    pid, child = map(int, ranks.start("sleeper(start_new_session=True); time.sleep(600)"))
    ranks.table.record_descendants()
    assert ranks.end(pid) == -signal.SIGKILL
    report = ranks.table.sweep(0)
    assert [p for p, _ in report.ended] == [child]
    assert not is_alive(child)
