"""Every fault, for real, in an interpreter of its own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from steadyrun.testing.faults import CGROUP_PREFIX, MARKER, clean_up

RANK = """
import sys
from pathlib import Path
from steadyrun.testing.faults import FaultPlan
plan = FaultPlan.parse(sys.argv[1], 0, 0, 1, Path(sys.argv[2]))
plan.on_start()
print("script", flush=True)
plan.on_step(0)
print("after", flush=True)
if "--wait" in sys.argv:
    sys.stdin.read()
"""


class Rank:
    """The process that a fault strikes."""

    def __init__(self, fault: str, folder: Path, *args: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, fault, str(folder), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def end(self, limit_s: float = 30.0) -> tuple[int, str]:
        """Exit code and output."""
        out, _ = self.process.communicate(timeout=limit_s)
        return self.process.returncode, out.decode()

    def state(self) -> str:
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def notes(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / MARKER).read_text().splitlines()]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def begin(fault: str, *args: str) -> Rank:
        ranks.append(Rank(fault, tmp_path, *args))
        return ranks[-1]

    yield begin
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            rank.process.kill()
        rank.process.communicate()
    clean_up(tmp_path)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("kill", -signal.SIGKILL),
        ("kill signal=term", -signal.SIGTERM),
        ("exit", 1),
        ("exit code=17", 17),
        ("sysexit code=3", 3),
        ("raise", 1),
        ("segfault", -signal.SIGSEGV),
        ("abort", -signal.SIGABRT),
    ],
)
def test_it_ends_as_its_name_says(start: Callable[..., Rank], fault: str, code: int) -> None:
    assert start(fault).end() == (code, "script\n")


@pytest.mark.parametrize("fault", ["kill", "exit", "segfault"])
def test_before_the_script(start: Callable[..., Rank], fault: str) -> None:
    code, out = start(f"{fault} step=start").end()
    assert code != 0
    assert out == ""


@pytest.mark.parametrize(
    "fault",
    [
        "sleep",
        "busy",
        "busy_c",
        "stop",
        "hang",
        "hang where=teardown",
        "dataloader",
        "teardown",
        "teardown where=thread",
    ],
)
def test_one_with_seconds_ends_by_itself(start: Callable[..., Rank], fault: str) -> None:
    begun_s = time.monotonic()
    assert start(f"{fault} seconds=0.4").end() == (0, "script\nafter\n")
    assert time.monotonic() - begun_s >= 0.4


@pytest.mark.parametrize(
    ("fault", "state"), [("stop", "T"), ("busy", "R"), ("busy_c", "R"), ("hang", "S"), ("dataloader", "S")]
)
def test_one_without_seconds_stays(
    start: Callable[..., Rank], wait_until: Callable[..., object], fault: str, state: str
) -> None:
    rank = start(fault)
    wait_until(lambda: (rank.folder / MARKER).exists(), 30, "the fault did not strike")
    wait_until(lambda: rank.state() == state, 10, lambda: f"state {rank.state()} instead of {state}")
    if state == "R":
        before_s = rank.cpu_s()
        wait_until(lambda: rank.cpu_s() > before_s + 0.3, 30, "it does not use its CPU")
    assert rank.process.poll() is None


def test_busy_c_holds_the_gil(start: Callable[..., Rank], wait_until: Callable[..., object]) -> None:
    """A Python signal handler cannot run: SIGINT does nothing, while it ends the loop in Python."""
    for fault, ends in (("busy", True), ("busy_c", False)):
        rank = start(fault)
        wait_until(lambda r=rank: len(r.notes()) == 1 if (r.folder / MARKER).exists() else False, 30)
        (rank.folder / MARKER).unlink()
        before_s = rank.cpu_s()
        wait_until(lambda r=rank, b=before_s: r.cpu_s() > b + 0.2, 30, "not in its loop yet")
        rank.process.send_signal(signal.SIGINT)
        if ends:
            assert rank.end()[0] == -signal.SIGINT
        else:
            before_s = rank.cpu_s()
            wait_until(lambda r=rank, b=before_s: r.cpu_s() > b + 0.3, 30)
            assert rank.process.poll() is None


@pytest.mark.parametrize("where", ["atexit", "thread"])
def test_teardown_hangs_after_the_script(
    start: Callable[..., Rank], wait_until: Callable[..., object], where: str
) -> None:
    rank = start(f"teardown where={where}")
    assert rank.process.stdout is not None
    assert rank.process.stdout.readline() + rank.process.stdout.readline() == b"script\nafter\n"
    wait_until(lambda: rank.state() == "S", 10)
    assert rank.process.poll() is None


def test_ignore_term_is_ended_by_sigkill_only(start: Callable[..., Rank]) -> None:
    rank = start("ignore_term", "--wait")
    assert rank.process.stdout is not None
    assert rank.process.stdout.readline() + rank.process.stdout.readline() == b"script\nafter\n"
    status = Path(f"/proc/{rank.process.pid}/status").read_text()
    ignored = int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)
    assert ignored >> (signal.SIGTERM - 1) & 1
    rank.process.terminate()
    assert rank.process.stdin is not None
    assert rank.end() == (0, "")


def test_grandchildren_outlive_it_each_in_its_way(
    start: Callable[..., Rank], wait_until: Callable[..., object]
) -> None:
    rank = start("grandchildren seconds=60")
    assert rank.end()[0] == 0
    pids = rank.notes()[-1]["pids"]
    try:
        group, session, orphan = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
        assert int(group[2]) == os.getpgrp()
        assert int(session[3]) == pids[1]
        assert int(orphan[3]) == pids[2]
        assert Path(f"/proc/{pids[2]}/environ").read_bytes() == b""
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10, f"still there: {pids}")


def test_shm_leaves_a_file_that_clean_up_removes(start: Callable[..., Rank]) -> None:
    rank = start("shm bytes=64K")
    assert rank.end()[0] == 0
    (file,) = map(Path, rank.notes()[-1]["files"])
    assert file.stat().st_size == 65536
    assert file.name.startswith(f"torch_{rank.process.pid}_")
    assert clean_up(rank.folder) == [str(file)]
    assert not file.exists()


def test_oom_is_killed_by_the_kernel_inside_its_cgroup(start: Callable[..., Rank]) -> None:
    rank = start("oom bytes=48M")
    code, out = rank.end(60)
    last = rank.notes()[-1]
    if "refused" in last:
        assert code == 0
        assert out == "script\nafter\n"
        assert "cgroup" in last["refused"]
        pytest.skip(last["refused"])
    assert (code, out) == (-signal.SIGKILL, "script\n")
    group = Path(last["cgroup"])
    assert group.name == f"{CGROUP_PREFIX}{rank.process.pid}"
    assert clean_up(rank.folder) == [str(group)]
    assert not group.exists()


def test_collective_needs_a_process_group(start: Callable[..., Rank]) -> None:
    rank = start("hang where=collective")
    assert rank.end() == (0, "script\nafter\n")
    assert "torch.distributed is not initialised" in rank.notes()[-1]["refused"]


def test_step_now_strikes_without_a_further_step(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom steadyrun.testing.faults import FaultPlan\n"
        "plan = FaultPlan.parse('', 0, 0, 1)\nprint(*plan.add('exit code=9 step=now'), flush=True)\nsys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.wait(30) == 9
        assert process.stdout is not None
        assert process.stdout.read() == b"rank 0: exit strikes now\n"
    finally:
        process.kill()
        process.communicate()


LOADER = """
import sys
from pathlib import Path
import torch.utils.data as data
from steadyrun.testing.faults import FaultPlan

if __name__ == "__main__":
    plan = FaultPlan.parse("dataloader step=1", 0, 0, 1, Path(sys.argv[1]))
    loader = data.DataLoader(list(range(10_000)), batch_size=1, num_workers=int(sys.argv[2]), prefetch_factor=2)
    for step, batch in enumerate(loader):
        print(step, flush=True)
        plan.on_step(step)
"""


def test_dataloader_stops_the_real_workers_and_the_next_batch_never_comes(
    tmp_path: Path, wait_until: Callable[..., object]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOADER)
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), "2"], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        marker = tmp_path / MARKER
        wait_until(lambda: marker.exists() and "stopped" in marker.read_text(), 90, "no worker was stopped")
        workers = json.loads(marker.read_text().splitlines()[-1])["stopped"]
        assert len(workers) == 2
        states = lambda: [Path(f"/proc/{w}/stat").read_text().rpartition(")")[2].split()[0] for w in workers]  # noqa: E731
        wait_until(lambda: states() == ["T", "T"], 10, "the workers are not stopped")
        assert process.stdout is not None
        out = b""
        while select.select([process.stdout], [], [], 1.5)[0] and out.count(b"\n") < 40:
            out += os.read(process.stdout.fileno(), 4096)
        steps = out.count(b"\n")
        assert 2 <= steps < 40  # what was prefetched, then nothing
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
