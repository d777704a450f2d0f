"""How many snapshots a node can afford: the rule, and the limits of made-up machines and containers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrun.checkpoint.arena import affordable_slots, available_bytes

GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712


@pytest.mark.parametrize(
    ("needed", "available", "wanted", "slots"),
    [
        (2 * GIB, 10 * GIB, 2, 2),
        (2 * GIB, 10 * GIB - 5, 2, 1),
        (4 * GIB, 10 * GIB, 2, 1),
        (4 * GIB + 1, 10 * GIB, 2, 0),
        (1, 0, 2, 0),
        (1 * GIB, 100 * GIB, 1, 1),
        (0, 0, 2, 2),
        (1 * GIB, 100 * GIB, 0, 0),
    ],
)
def test_all_snapshots_together_take_at_most_two_fifths_of_what_is_free(
    needed: int, available: int, wanted: int, slots: int
) -> None:
    assert affordable_slots(needed, available, wanted)[0] == slots


def test_the_sentence_tells_need_and_limit() -> None:
    slots, why = affordable_slots(6 * GIB, 20 * GIB, 2, "memory limit of the cgroup /job")
    assert slots == 1
    assert "1 instead of 2" in why
    assert "takes 6.00 GiB, 20.00 GiB are free (memory limit of the cgroup /job)" in why
    assert "a rank that dies while it copies leaves none" in why


def test_without_memory_the_sentence_tells_the_consequence_and_what_to_try() -> None:
    slots, why = affordable_slots(60 * GIB, 20 * GIB)
    assert slots == 0
    assert "saves are written directly and block the training" in why
    assert "give the job more memory" in why


@given(st.integers(1, 1 << 40), st.integers(0, 1 << 45), st.integers(0, 4))
def test_what_is_afforded_fits_and_one_more_would_not(needed: int, available: int, wanted: int) -> None:
    slots, why = affordable_slots(needed, available, wanted)
    assert 0 <= slots <= wanted
    assert slots * needed <= available * 0.4
    assert slots == wanted or (slots + 1) * needed > int(available * 0.4)
    assert why


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Path]:
    """A made-up root: files by path, and MemAvailable in KiB."""

    def make(files: dict[str, str], available_kib: int = 64 << 20) -> Path:
        meminfo = (
            f"MemTotal:       {available_kib * 2} kB\nMemFree: 1 kB\nMemAvailable:   {available_kib} kB\nHugePages: 0\n"
        )
        for name, text in {"proc/meminfo": meminfo, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def v2(maximum: str, current: int, inactive: int = 0, active: int = 0, high: str = "max") -> dict[str, str]:
    stat = f"anon 5\nfile 7\ninactive_file {inactive}\nactive_file {active}\nshmem 3\n"
    return {"memory.max": maximum, "memory.high": high, "memory.current": f"{current}\n", "memory.stat": stat}


def v1(limit: int, usage: int, inactive: int = 0, active: int = 0) -> dict[str, str]:
    stat = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {inactive}\ntotal_active_file {active}\n"
    return {"memory.limit_in_bytes": f"{limit}\n", "memory.usage_in_bytes": f"{usage}\n", "memory.stat": stat}


def below(folder: str, files: dict[str, str]) -> dict[str, str]:
    return {f"{folder}/{name}": text for name, text in files.items()}


def test_without_a_limit_it_is_what_the_machine_has(machine: Callable[..., Path]) -> None:
    root = machine({"proc/self/cgroup": "0::/user.slice\n", **below("sys/fs/cgroup/user.slice", v2("max", 9))}, 1 << 20)
    assert available_bytes(root) == (GIB, "MemAvailable of the machine")


def test_without_cgroups_it_is_what_the_machine_has(machine: Callable[..., Path]) -> None:
    assert available_bytes(machine({}, 1 << 20)) == (GIB, "MemAvailable of the machine")


def test_the_limit_of_a_v2_group_counts_with_its_page_cache(machine: Callable[..., Path]) -> None:
    files = v2(str(8 * GIB), 6 * GIB, inactive=2 * GIB, active=1 * GIB)
    root = machine({"proc/self/cgroup": "0::/slurm/job_7\n", **below("sys/fs/cgroup/slurm/job_7", files)})
    assert available_bytes(root) == (4 * GIB + GIB // 2, "memory limit of the cgroup /slurm/job_7")


def test_the_tightest_group_above_counts(machine: Callable[..., Path]) -> None:
    root = machine(
        {
            "proc/self/cgroup": "0::/a/b/c\n",
            **below("sys/fs/cgroup/a/b/c", v2("max", GIB)),
            **below("sys/fs/cgroup/a/b", v2(str(20 * GIB), GIB)),
            **below("sys/fs/cgroup/a", v2(str(4 * GIB), GIB)),
        }
    )
    assert available_bytes(root) == (3 * GIB, "memory limit of the cgroup /a")


def test_memory_high_counts_like_a_limit(machine: Callable[..., Path]) -> None:
    files = v2("max", GIB, high=str(3 * GIB))
    root = machine({"proc/self/cgroup": "0::/g\n", **below("sys/fs/cgroup/g", files)})
    assert available_bytes(root) == (2 * GIB, "memory limit of the cgroup /g")


@pytest.mark.parametrize("path", ["/", "/docker/abc", "/../../kubepods/pod1"])
def test_in_a_container_the_mounted_group_counts(machine: Callable[..., Path], path: str) -> None:
    """Whatever path the container is told: its own group is what is mounted."""
    root = machine({"proc/self/cgroup": f"0::{path}\n", **below("sys/fs/cgroup", v2(str(5 * GIB), GIB))})
    assert available_bytes(root) == (4 * GIB, "memory limit of the cgroup /")


def test_a_group_outside_of_the_namespace_does_not_lead_out_of_the_mount(machine: Callable[..., Path]) -> None:
    root = machine({"proc/self/cgroup": "0::/../x\n", **below("sys/fs/x", v2(str(GIB), 0))}, 64 << 20)
    assert available_bytes(root) == (64 * GIB, "MemAvailable of the machine")


def test_the_limit_of_a_v1_group_counts(machine: Callable[..., Path]) -> None:
    root = machine(
        {
            "proc/self/cgroup": "9:name=systemd:/x\n4:cpu,memory:/jobs/j1\n0::/\n",
            **below("sys/fs/cgroup/memory/jobs/j1", v1(6 * GIB, 5 * GIB, inactive=GIB, active=2 * GIB)),
            **below("sys/fs/cgroup/memory/jobs", v1(UNLIMITED_V1, 5 * GIB)),
        }
    )
    assert available_bytes(root) == (3 * GIB, "memory limit of the cgroup /jobs/j1")


def test_an_unlimited_v1_group_is_no_limit(machine: Callable[..., Path]) -> None:
    files = below("sys/fs/cgroup/memory/a", v1(UNLIMITED_V1, GIB))
    root = machine({"proc/self/cgroup": "4:memory:/a\n", **files}, 1 << 20)
    assert available_bytes(root) == (GIB, "MemAvailable of the machine")


def test_a_group_that_is_over_its_limit_leaves_nothing(machine: Callable[..., Path]) -> None:
    root = machine({"proc/self/cgroup": "0::/g\n", **below("sys/fs/cgroup/g", v2(str(GIB), 2 * GIB))})
    assert available_bytes(root) == (0, "memory limit of the cgroup /g")


@pytest.mark.parametrize("broken", ["memory.current", "memory.stat"])
def test_a_group_that_cannot_be_read_is_left_out(machine: Callable[..., Path], broken: str) -> None:
    files = {**v2(str(GIB), 0), broken: "?\n"}
    root = machine({"proc/self/cgroup": "0::/g\n", **below("sys/fs/cgroup/g", files)}, 2 << 20)
    assert available_bytes(root) == (2 * GIB, "MemAvailable of the machine")


def test_a_machine_that_cannot_be_read_has_nothing_and_says_why(tmp_path: Path) -> None:
    left, why = available_bytes(tmp_path)
    assert left == 0
    assert "MemAvailable cannot be read: FileNotFoundError" in why


def test_this_machine_has_memory() -> None:
    left, limited_by = available_bytes()
    assert left > 1 << 20
    assert limited_by
