"""Jobs in which ranks become slow on order, what steadyrun says of them, and CPU cores made of cgroups."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, JobStarter

ACCUSING = ("rank", "node", "parallel_group")  # kinds of alarms that blame somebody; imbalances do not
RANKS = 4
LEARNED = 90  # steps after which it is known what is normal
NOTICED = 60  # steps within which a slow rank must be named
CALM = 130  # steps between two faults, so that what one leaves is forgotten
PERIOD_US = 10_000


@dataclass(frozen=True)
class Leg:
    """One slow rank of a tour.

    Attributes:
        fault: kind and keys, without rank, step and until.
        phase: what the verdict must name; None: no phase.
        causes: any of these is right.
        percent: by how much own work must be found longer, within a factor of two; None: not by a known amount.
    """

    fault: str
    rank: int
    phase: str | None
    causes: tuple[str, ...]
    percent: float | None = None

    def __str__(self) -> str:
        return self.fault.replace(" ", "_").replace("=", "-")


@dataclass(frozen=True)
class Plan:
    """A job and the faults that it suffers one after the other, each long enough to be found and then gone.

    Attributes:
        script_args: after the number of steps.
        cores: each rank gets so much of a core, as if it had a slow one for itself.
    """

    name: str
    script: str
    legs: tuple[Leg, ...]
    script_args: tuple[object, ...] = ()
    cores: float | None = None

    def begins(self, leg: Leg) -> int:
        """The last step before *leg* is slow."""
        return LEARNED + self.legs.index(leg) * (NOTICED + CALM)

    @property
    def steps(self) -> int:
        return self.begins(self.legs[-1]) + NOTICED + 12 if self.legs else 0

    @property
    def faults(self) -> str:
        return "; ".join(
            f"{leg.fault} rank={leg.rank} step={self.begins(leg)} until={self.begins(leg) + NOTICED}"
            for leg in self.legs
        )


@dataclass
class SlowRun:
    """A finished job of *plan*."""

    plan: Plan
    job: Job
    exit_code: int

    @classmethod
    def of(cls, start: JobStarter, plan: Plan, deadline_s: float, steps: int | None = None) -> SlowRun:
        options = ["--standalone", f"--nproc-per-node={RANKS}", "--ft-standby=off"]
        job = start(plan.script, options, [steps or plan.steps, *plan.script_args], faults=plan.faults, name=plan.name)
        with contextlib.ExitStack() as stack:
            if plan.cores is not None:
                give_cores(stack, job, plan.cores)
            exit_code = job.wait(deadline_s)
        assert job.folder is not None, job.story()
        return cls(plan, job, exit_code)

    @property
    def alarms(self) -> list[dict[str, Any]]:
        """All that the journal tells of paces: each alarm with its first sentence and its last figures."""
        found: dict[tuple[Any, ...], dict[str, Any]] = {}
        for record in self.job.journal("straggler"):
            alarm = record["alarm"]
            key = (alarm["kind"], tuple(alarm["ranks"]), alarm["step"])
            summary = found[key]["summary"] if key in found else record["summary"]
            found[key] = {**alarm, "summary": summary}
        return list(found.values())

    @property
    def accusations(self) -> list[dict[str, Any]]:
        """Alarms that blame somebody."""
        return [a for a in self.alarms if a["kind"] in ACCUSING]

    def column(self, name: str) -> dict[int, list[float]]:
        """One measure of the steps of which the journal keeps all ranks: step -> by rank."""
        rows: dict[int, dict[int, float]] = {}
        for record in self.job.journal("timings"):
            for rank, columns in record["ranks"].items():
                for step, value in zip(columns["step"], columns.get(name, [0.0] * len(columns["step"])), strict=True):
                    rows.setdefault(step, {})[int(rank)] = value
        return {s: [row[r] for r in range(RANKS)] for s, row in sorted(rows.items()) if len(row) == RANKS}

    def of_leg(self, leg: Leg) -> list[dict[str, Any]]:
        """Accusations that were made while *leg* lasted, or just after."""
        begin = self.plan.begins(leg)
        return [a for a in self.accusations if begin < a["step"] <= begin + NOTICED + CALM]

    def noise(self, leg: Leg) -> float:
        """By what share the own work of the ranks that are not slow differed from step to step while *leg* lasted."""
        begin = self.plan.begins(leg)
        rows = [own for step, own in self.column("busy_s").items() if begin < step <= begin + NOTICED and min(own) > 0]
        logs = [[math.log(s) for rank, s in enumerate(own) if rank != leg.rank] for own in rows]
        apart = [[value - statistics.median(row) for value in row] for row in logs]
        by_rank = [statistics.stdev(values) for values in zip(*apart, strict=True) if len(values) > 1]
        return statistics.mean(by_rank) if by_rank else math.inf

    def refusal(self, leg: Leg) -> str | None:
        """Why *leg* was not slow, if the fault cannot be injected here."""
        begin = self.plan.begins(leg)
        found = [r["refused"] for r in self.job.struck() if r["step"] == begin and "refused" in r]
        return found[0] if found else None

    def story(self) -> str:
        lines = [f"{a['step']}: {a['kind']} {a['ranks']} {a['summary']}" for a in self.alarms]
        return "\n".join([*lines, self.plan.faults, self.job.story()])


# -- cores made of cgroups ---------------------------------------------------------------------------------------------
def cpu_cgroup() -> tuple[int, Path]:
    """Version and folder in which a CPU cgroup can be made; skips the test where there is none."""
    legacy, unified = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    version, parent = (1, legacy) if (legacy / "cpu.cfs_quota_us").exists() or legacy.is_dir() else (2, unified)
    probe = parent / f"steadyrun-test-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError as e:
        pytest.skip(f"no right to make a CPU cgroup ({probe}: {e.strerror}); run as root")
    usable = (probe / ("cpu.cfs_quota_us" if version == 1 else "cpu.max")).exists()
    probe.rmdir()
    if not usable:
        pytest.skip(f"{parent} hands no CPU controller down to its children")
    return version, parent


def give_cores(stack: contextlib.ExitStack, job: Job, cores: float) -> None:
    """Each rank's process gets a cgroup with so much of a core; what it starts from now on shares that."""
    version, parent = cpu_cgroup()
    pids = job.wait_for(lambda: p if len(p := job.pids(0)) == RANKS else None, 120, "all ranks start")
    for rank, pid in pids.items():
        stack.enter_context(_core(version, parent / f"steadyrun-test-{os.getpid()}-{rank}", pid, cores))


@contextlib.contextmanager
def _core(version: int, group: Path, pid: int, cores: float) -> Iterator[None]:
    quota_us = int(PERIOD_US * cores)
    group.mkdir()
    try:
        if version == 1:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        _empty(group)


def _empty(group: Path) -> None:
    """Groups of faults within, then the group; what is still in them goes to the parent."""
    for inner in [g for g in group.iterdir() if g.is_dir()] if group.is_dir() else []:
        _empty(inner)
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (group.parent / "cgroup.procs").write_text(pid)
    group.rmdir()
