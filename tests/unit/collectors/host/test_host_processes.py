"""Zombies, processes stuck in the kernel and strangers on a GPU, from made-up /proc trees."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from steadyrun.collectors.host.processes import ProcessCollector
from steadyrun.collectors.protocol import CheckResult, Health

AGENT = 100


class Machine:
    """A /proc with a clock that the test moves."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        (self.proc / "driver/nvidia").mkdir(parents=True)
        self.now_s = 0.0
        self.add(1, 0, "init")
        self.add(AGENT, 1, "steadyrun")

    def add(
        self, pid: int, ppid: int, command: str, state: str = "S", start: int = 5, opens: tuple[str, ...] = ()
    ) -> None:
        folder = self.proc / str(pid)
        (folder / "fd").mkdir(parents=True, exist_ok=True)
        fields = [state, ppid, *[0] * 17, start, 0, 0]
        (folder / "stat").write_text(f"{pid} ({command}) {' '.join(map(str, fields))}\n")
        (folder / "cmdline").write_text(f"{command}\0--flag\0")
        (folder / "wchan").write_text("rpc_wait_bit_killable")
        for i, target in enumerate(opens):
            os.symlink(target, folder / "fd" / str(i))

    def collector(self, gpus: frozenset[int] | None = None) -> ProcessCollector:
        return ProcessCollector(AGENT, gpus, self.proc, lambda: self.now_s)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def check(machine: Machine) -> Callable[..., CheckResult]:
    return lambda gpus=None: machine.collector(gpus).check()


def test_a_few_zombies_are_counted_only(machine: Machine, check: Callable[..., CheckResult]) -> None:
    for pid in range(200, 203):
        machine.add(pid, AGENT, "python3", "Z")
    result = check()
    assert result.health is Health.HEALTHY
    assert result.facts["zombies"] == 3


def test_many_zombies_name_who_does_not_reap_them(machine: Machine, check: Callable[..., CheckResult]) -> None:
    for pid in range(200, 320):
        machine.add(pid, 1, "python3", "Z")
    result = check()
    assert result.health is Health.DEGRADED
    assert "120 zombies of process 1 (init)" in result.reason


def test_a_process_stuck_in_the_kernel_is_told_after_a_while(machine: Machine) -> None:
    machine.add(200, AGENT, "pt_main (x) y", "D")
    collector = machine.collector()
    assert collector.check().health is Health.HEALTHY
    machine.now_s = 130.0
    result = collector.check()
    assert result.health is Health.DEGRADED
    assert (
        "process 200 (pt_main (x) y) has been stuck in the kernel for 130 s, in rpc_wait_bit_killable" in result.reason
    )


def test_one_that_moved_in_between_is_not_stuck(machine: Machine) -> None:
    collector = machine.collector()
    for at_s, state, start in ((0.0, "D", 5), (60.0, "S", 5), (120.0, "D", 5), (180.0, "D", 5)):
        machine.now_s = at_s
        machine.add(200, AGENT, "python3", state, start)
        assert collector.check().health is Health.HEALTHY


def test_another_process_with_the_same_pid_starts_anew(machine: Machine) -> None:
    collector = machine.collector()
    machine.add(200, AGENT, "python3", "D", start=5)
    collector.check()
    machine.now_s = 130.0
    machine.add(200, AGENT, "python3", "D", start=9)
    assert collector.check().health is Health.HEALTHY


def test_a_stuck_thread_of_the_gpu_driver_is_worse(machine: Machine) -> None:
    machine.add(2, 0, "kthreadd")
    machine.add(200, 2, "nvidia-modeset", "D")
    collector = machine.collector()
    collector.check()
    machine.now_s = 130.0
    result = collector.check()
    assert result.health is Health.UNHEALTHY
    assert "reboot" in result.actions[0]


def test_an_orphan_on_a_gpu_is_named(machine: Machine, check: Callable[..., CheckResult]) -> None:
    machine.add(200, 1, "python3", opens=("/dev/null", "/dev/nvidiactl", "/dev/nvidia3", "/dev/nvidia12"))
    result = check()
    assert result.health is Health.DEGRADED
    assert "process 200 (python3 --flag), an orphan, has GPU 3, 12 open" in result.reason
    assert "kill -9 200" in result.actions[0]
    assert result.facts["gpu_strangers"] == 1


def test_the_jobs_own_processes_are_no_strangers(machine: Machine, check: Callable[..., CheckResult]) -> None:
    machine.add(200, AGENT, "python3", opens=("/dev/nvidia3",))
    machine.add(201, 200, "worker", opens=("/dev/nvidia3",))
    assert check().health is Health.HEALTHY


def test_a_stranger_on_another_gpu_is_none_of_our_business(machine: Machine, check: Callable[..., CheckResult]) -> None:
    machine.add(150, 1, "other agent")
    machine.add(200, 150, "python3", opens=("/dev/nvidia3",))
    assert check(frozenset({0, 1})).health is Health.HEALTHY
    assert check(frozenset({3})).health is Health.DEGRADED
    assert check(frozenset()).health is Health.HEALTHY
    assert "find out whose it is" in check().actions


def test_without_a_driver_nobody_looks_at_open_files(machine: Machine, check: Callable[..., CheckResult]) -> None:
    machine.add(200, 1, "python3", opens=("/dev/nvidia3",))
    (machine.proc / "driver/nvidia").rmdir()
    assert check().health is Health.HEALTHY


def test_an_empty_proc_is_no_error(tmp_path: Path) -> None:
    assert ProcessCollector(AGENT, None, tmp_path / "none").check().facts["processes"] == 0
