"""A process that the kernel really kills for lack of memory, in a memory cgroup of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from steadyrun.collectors.oom import OomWatch

LIMIT_BYTES = 64 << 20
EATER = """
import os, sys
os.write(1, b"ready\\n"); sys.stdin.readline()
blocks = []
while True:
    blocks.append(b"\\1" * (4 << 20))
"""


def memory_parent() -> Path | None:
    """A folder where a group with a memory limit may be made, or None."""
    for mount in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if ("memory" in controllers.split(",")) == mount.endswith("memory"):
                folder = Path(mount) / path.lstrip("/")
                if (folder / "cgroup.procs").exists():
                    return folder
    return None


@pytest.fixture
def small_group() -> Iterator[Path]:
    parent = memory_parent()
    if parent is None:
        pytest.skip("no memory cgroup of this process is visible")
    group = parent / f"steadyrun-test-{os.getpid()}"
    try:
        group.mkdir()
        limit = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
        (group / limit).write_text(str(LIMIT_BYTES))
        swap = group / ("memory.swappiness" if limit != "memory.max" else "memory.swap.max")
        with contextlib.suppress(OSError):
            swap.write_text("0")
    except OSError as e:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no right to make a memory cgroup: {e}")
    yield group
    limit_s = time.monotonic() + 10.0
    while group.exists() and time.monotonic() < limit_s:
        with contextlib.suppress(OSError):  # busy until the kernel has let go of the dead
            group.rmdir()


def eat(group: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", EATER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    (group / "cgroup.procs").write_text(str(process.pid))
    return process


def test_killed_for_memory_is_proved_and_a_plain_kill_is_not(small_group: Path) -> None:
    watch = OomWatch()
    watch.rebase()
    eater = eat(small_group)
    bystander = eat(small_group)
    watch.observe([eater.pid, bystander.pid])
    try:
        os.kill(bystander.pid, signal.SIGKILL)
        bystander.communicate(timeout=30)
        before = watch.check(bystander.pid)
        eater.communicate(b"\n", timeout=60)
        record = watch.check(eater.pid)
    finally:
        for process in (eater, bystander):
            process.kill()
            process.communicate(timeout=10)
        watch.close()
    assert before.killed is False
    assert eater.returncode == -signal.SIGKILL
    assert record.killed is True, record
    if record.source == "kernel log":
        assert f"pid {eater.pid}" in record.detail
        assert "memory cgroup is full" in record.detail


def test_counter_alone_proves_it(small_group: Path, tmp_path: Path) -> None:
    watch = OomWatch(kmsg=tmp_path / "no-log")
    watch.rebase()
    eater = eat(small_group)
    watch.observe([eater.pid])
    try:
        eater.communicate(b"\n", timeout=60)
        record = watch.check(eater.pid)
    finally:
        eater.kill()
        watch.close()
    assert record.killed is True, record
    assert record.source.startswith("cgroup")
    assert small_group.name in record.detail
