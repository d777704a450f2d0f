"""Memory of the machine and of the job's cgroup, and the kernel's pressure figures, from made-up files."""

from __future__ import annotations

from pathlib import Path

import pytest

from steadyrun.collectors.host.memory import GroupMemory, MachineMemory, MemoryCollector, read_group_memory
from steadyrun.collectors.host.pressure import PressureCollector, read_pressure
from steadyrun.collectors.protocol import CheckResult, Health

GIB = 1 << 30
CALM = "some avg10=0.00 avg60=0.00 avg300=0.00 total=8652280\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=2213073\n"
STALLED = "some avg10=61.20 avg60=40.00 avg300=9.00 total=9\nfull avg10=34.50 avg60=20.25 avg300=4.00 total=7000000\n"


def write(root: Path, name: str, text: str) -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def check(root: Path, available: int, group: GroupMemory | None = None) -> CheckResult:
    return MemoryCollector(root, lambda: MachineMemory(100 * GIB, available, 0), lambda _: group).check()


@pytest.mark.parametrize(
    ("available", "health"), [(50, Health.HEALTHY), (5, Health.HEALTHY), (4, Health.DEGRADED), (1, Health.UNHEALTHY)]
)
def test_little_memory_left_is_told(tmp_path: Path, available: int, health: Health) -> None:
    result = check(tmp_path, available * GIB)
    assert result.health is health
    assert result.facts["memory_available_bytes"] == available * GIB
    if health is not Health.HEALTHY:
        assert f"{available}.0 GiB of 100.0 GiB" in result.reason
        assert result.actions


def test_the_jobs_own_limit_counts_though_the_machine_has_plenty(tmp_path: Path) -> None:
    result = check(tmp_path, 50 * GIB, GroupMemory(10 * GIB, 10 * GIB - 1))
    assert result.health is Health.UNHEALTHY
    assert "memory cgroup" in result.reason


def test_processes_that_all_wait_for_memory_are_told(tmp_path: Path) -> None:
    write(tmp_path, "proc/pressure/memory", STALLED)
    result = check(tmp_path, 50 * GIB)
    assert result.health is Health.DEGRADED
    assert "34%" in result.reason or "35%" in result.reason
    write(tmp_path, "proc/pressure/memory", CALM)
    assert check(tmp_path, 50 * GIB).health is Health.HEALTHY


def test_pressure_is_read_as_shares_and_seconds(tmp_path: Path) -> None:
    write(tmp_path, "proc/pressure/io", STALLED)
    pressure = read_pressure(tmp_path / "proc", "io")
    assert pressure is not None
    assert (pressure.some_10s, pressure.full_60s, pressure.full_total_s) == (0.612, 0.2025, 7.0)
    result = PressureCollector(tmp_path).check()
    assert result.health is Health.HEALTHY
    assert "io 61%" in result.reason


def test_a_cpu_without_full_is_read(tmp_path: Path) -> None:
    write(tmp_path, "proc/pressure/cpu", STALLED.splitlines()[0] + "\n")
    pressure = read_pressure(tmp_path / "proc", "cpu")
    assert pressure is not None
    assert (pressure.some_10s, pressure.full_10s) == (0.612, 0.0)


def test_a_kernel_without_pressure_figures_says_how_to_get_them(tmp_path: Path) -> None:
    assert read_pressure(tmp_path / "proc", "cpu") is None
    assert "psi=1" in PressureCollector(tmp_path).check().reason
    write(tmp_path, "proc/pressure/cpu", "garbled")
    assert read_pressure(tmp_path / "proc", "cpu") is None


def test_the_tightest_limit_of_version_2_is_found(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/job/rank0\n")
    write(tmp_path, "sys/fs/cgroup/job/rank0/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/job/rank0/memory.current", "5\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.max", "1000\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.current", "900\n")
    write(tmp_path, "sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 300\n")
    assert read_group_memory(tmp_path) == GroupMemory(1000, 600)


def test_version_1_is_read_and_its_huge_number_is_no_limit(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/\n")
    base = "sys/fs/cgroup/memory"  # inside a container the path is the host's: the mount itself is the group
    write(tmp_path, f"{base}/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path, f"{base}/memory.usage_in_bytes", "400\n")
    assert read_group_memory(tmp_path) is None
    write(tmp_path, f"{base}/memory.limit_in_bytes", "500\n")
    write(tmp_path, f"{base}/memory.stat", "total_inactive_file 150\n")
    assert read_group_memory(tmp_path) == GroupMemory(500, 250)


def test_no_cgroup_is_no_limit(tmp_path: Path) -> None:
    assert read_group_memory(tmp_path) is None
    write(tmp_path, "proc/self/cgroup", "0::/../../x\nnonsense\n")
    assert read_group_memory(tmp_path) is None
