"""Out-of-memory proof from fixture cgroups of both versions and a kernel log that is a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steadyrun.collectors.oom import OomWatch, parse_oom_line

LINE = (
    "Memory cgroup out of memory: Killed process {pid} (python3) total-vm:3149468kB, anon-rss:1048576kB, "
    "file-rss:0kB, shmem-rss:1048576kB, UID:0 pgtables:1372kB oom_score_adj:0"
)
FIRST_NAMESPACE = "pid:[4026531836]"


class Machine:
    """A root folder with /proc of the agent (pid 1), of ranks, memory groups and a log."""

    def __init__(self, root: Path, version: int, namespace: str = FIRST_NAMESPACE, inside: str = "/") -> None:
        self.root, self.version = root, version
        self.mount = root / ("sys/fs/cgroup/memory" if version == 1 else "sys/fs/cgroup")
        self.mount.mkdir(parents=True)
        kind = "cgroup cgroup rw,memory" if version == 1 else "cgroup2 cgroup2 rw"
        mounted = "/sys/fs/cgroup/memory" if version == 1 else "/sys/fs/cgroup"
        agent = self.process("self", "/job")
        (agent / "mountinfo").write_text(f"30 23 0:26 {inside} {mounted} rw,nosuid shared:9 - {kind}\nshort line\n")
        (agent / "ns").mkdir()
        (agent / "ns/pid").symlink_to(namespace)
        (root / "dev").mkdir()
        self.log = root / "dev/kmsg"
        self.log.write_text("6,1,1,-;Out of memory: Killed process 5 (old) total-vm:1kB, anon-rss:1kB\n")

    def process(self, pid: str, group: str) -> Path:
        folder = self.root / "proc" / pid
        folder.mkdir(parents=True)
        lines = f"4:memory:{group}\n3:cpu:/\n0::/\n" if self.version == 1 else f"0::{group}\n"
        (folder / "cgroup").write_text(lines)
        return folder

    def group(self, name: str, kills: int) -> None:
        folder = self.mount / name
        folder.mkdir(parents=True, exist_ok=True)
        if self.version == 1:
            (folder / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        else:
            (folder / "memory.events").write_text(f"low 0\nhigh 0\nmax 3\noom 1\noom_kill {kills}\noom_group_kill 0\n")

    def write_log(self, pid: int) -> None:
        with self.log.open("a") as f:
            f.write(f"3,900,123,-;oom-kill:constraint=CONSTRAINT_MEMCG,task=python3,pid={pid},uid=0\n")
            f.write(f"3,901,123,-;{LINE.format(pid=pid)}\n")

    def watch(self) -> OomWatch:
        watch = OomWatch(self.root)
        watch.rebase()
        return watch


@pytest.mark.parametrize("version", [1, 2])
def test_counter_that_grew_is_proof(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, version, namespace="pid:[4026532999]")
    machine.group("job", 2)
    watch = machine.watch()
    machine.group("job", 3)
    record = watch.check(42)
    watch.close()
    assert record.killed is True
    assert record.source == ("cgroup memory.events" if version == 2 else "cgroup v1 memory.oom_control")
    assert "memory cgroup /job grew by 1" in record.detail


@pytest.mark.parametrize("version", [1, 2])
def test_unchanged_counter_is_proof_of_the_contrary(tmp_path: Path, version: int) -> None:
    machine = Machine(tmp_path, version)
    machine.group("job", 2)
    watch = machine.watch()
    record = watch.check(42)
    watch.close()
    assert record.killed is False


def test_group_made_after_the_start_counts_from_zero(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1, namespace="pid:[4026532999]")
    machine.group("job", 0)
    watch = machine.watch()
    machine.group("job/rank", 1)
    record = watch.check(42)
    watch.close()
    assert record.killed is True
    assert "/job/rank" in record.detail


def test_ranks_own_group_elsewhere_is_remembered(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2, namespace="pid:[4026532999]")
    machine.group("job", 0)
    machine.group("slices/rank1", 4)
    watch = machine.watch()
    machine.process("42", "/slices/rank1")
    watch.observe([42, 43])
    assert watch.check(42).killed is False
    machine.group("slices/rank1", 5)
    record = watch.check(42)
    watch.close()
    assert record.killed is True
    assert "/slices/rank1" in record.detail


def test_container_sees_its_group_as_the_mount(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1, namespace="pid:[4026532999]", inside="/job")
    (machine.mount / "memory.oom_control").write_text("oom_kill 0\n")
    watch = machine.watch()
    (machine.mount / "memory.oom_control").write_text("oom_kill 1\n")
    record = watch.check(42)
    watch.close()
    assert record.killed is True
    assert "the container's memory cgroup" in record.detail


def test_log_names_the_process_and_its_size(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1)
    machine.group("job", 0)
    watch = machine.watch()
    machine.write_log(42)
    record = watch.check(42)
    watch.close()
    assert (record.killed, record.source) == (True, "kernel log")
    assert "python3 (pid 42) with 2.00 GiB resident, its memory cgroup is full" in record.detail


def test_log_that_names_another_process_clears_this_one(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1)
    machine.group("job", 0)
    watch = machine.watch()
    machine.write_log(41)
    machine.group("job", 1)
    assert watch.check(41).killed is True
    record = watch.check(42)
    watch.close()
    assert record.killed is False
    assert "others only" in record.detail


def test_foreign_pids_in_the_log_do_not_clear(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1, namespace="pid:[4026532999]")
    machine.group("job", 0)
    watch = machine.watch()
    machine.write_log(90041)
    machine.group("job", 1)
    record = watch.check(42)
    watch.close()
    assert record.killed is True
    assert "pid 90041" in record.detail


def test_what_was_logged_before_is_not_ours(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1)
    machine.group("job", 0)
    watch = machine.watch()
    assert watch.check(5).killed is False
    machine.write_log(42)
    watch.rebase()
    assert watch.check(42).killed is False
    watch.close()


def test_neither_source_says_unknown_and_why(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1)
    machine.log.unlink()
    (machine.root / "proc/self/mountinfo").write_text("")
    watch = machine.watch()
    record = watch.check(42)
    watch.close()
    assert record.killed is None
    assert "no memory cgroup counter" in record.detail
    assert "grant CAP_SYSLOG" in record.detail


def test_log_alone_decides_where_its_pids_are_ours(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1)
    (machine.root / "proc/self/mountinfo").write_text("")
    watch = machine.watch()
    assert watch.check(42).killed is False
    machine.write_log(42)
    assert watch.check(42).killed is True
    watch.close()


def test_strangers_of_the_machines_root_group_prove_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1, namespace="pid:[4026532999]")
    (machine.root / "proc/self/cgroup").write_text("4:memory:/\n")
    (machine.mount / "memory.oom_control").write_text("oom_kill 0\n")
    machine.group("somebody", 0)
    watch = machine.watch()
    machine.group("somebody", 1)
    record = watch.check(42)
    watch.close()
    assert record.killed is None
    assert "unknown" in record.detail


@pytest.mark.parametrize(
    ("line", "pid", "of_group"),
    [
        ("3,901,1,-;" + LINE.format(pid=63214), 63214, True),
        ("[ 7063.2] Out of memory: Killed process 12 (a (b) c) total-vm:1kB, anon-rss:4kB, file-rss:0kB", 12, False),
        ("kernel: [152.7] Killed process 4254 (python3) total-vm:11968kB, anon-rss:4288kB", 4254, False),
        ("Out of memory (oom_kill_allocating_task): Killed process 7 (x)", 7, False),
        ("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task_memcg=/x,task=my, task,pid=63,uid=0", 63, True),
    ],
)
def test_lines_of_the_kernel_log(line: str, pid: int, of_group: bool) -> None:
    kill = parse_oom_line(line)
    assert kill is not None
    assert (kill.pid, kill.of_group) == (pid, of_group)


def test_recorded_lines_of_the_kernel_log(shared_cases: Path) -> None:
    checked = 0
    for text in (shared_cases / "kmsg_cases.jsonl").read_text().splitlines():
        case = json.loads(text)
        expected = case["expect"] or {}
        kill = parse_oom_line(case["line"])
        if expected.get("event") in ("oom_kill", "oom_killed"):
            assert kill is not None, case["line"]
            assert (kill.pid, kill.command) == (expected["pid"], expected["comm"])
            checked += 1
        else:
            assert kill is None, case["line"]
    assert checked >= 4


@pytest.mark.parametrize("line", ["", "usb 1-1: new device", "oom_reaper: reaped process 7 (x)", "Killed process"])
def test_other_lines_are_no_kill(line: str) -> None:
    assert parse_oom_line(line) is None
