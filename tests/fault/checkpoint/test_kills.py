"""SIGKILL of a rank, the saver, the agent, or all of them, at random moments of a save.

Afterwards a complete checkpoint is there every time, never older than one save, and not one bit of it is wrong. Jobs
follow each other on the same folder of checkpoints: some ranks and savers are killed while a job runs, then the agent
or everything at once, and the next job has to go on from what is left. Ranks compare what they resume from with what
the step must have left; the folders are read with plain torch.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from exact_state import wrong_elements
from jobs import Job, JobStarter, is_alive, processes_with

from steadyrun.checkpoint.catalog import list_checkpoints

RANKS = 2
ROWS = 2048  # 2 MiB in each of four tensors and 1 MiB in one, per rank
RATE = 96 << 20  # slow enough that most kills hit the writing
EVERY = 5
OPTIONS = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=50", "--ft-standby=off"]
ENV = {"ROWS": str(ROWS), "RATE": str(RATE), "ONE_AT_A_TIME": "1"}
SAMPLED, ALL = 3, 75  # jobs of four kills each


@dataclass
class Chain:
    """Jobs on one folder of checkpoints, and what has to be there."""

    start: JobStarter
    root: Path
    rng: random.Random
    took_s: list[float] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def launch(self, least: int) -> Job:
        """A job that must resume from *least* or newer (-1: may begin anew)."""
        job = self.start("checkpointed.py", OPTIONS, [self.root, 1_000_000, 0.01, EVERY], env=ENV)
        self.check_resumed(job, 0, least)
        return job

    def check_resumed(self, job: Job, attempt: int, least: int) -> int:
        """All ranks of *attempt* have resumed from the same step, *least* or newer, exactly; the step."""
        found = job.wait_for(
            lambda: [r for r in [job.events("resumed", attempt=attempt)] if len(r) == RANKS],
            90,
            f"ranks of attempt {attempt} resume",
        )[0]
        firsts = {e["first"] for e in found}
        assert len(firsts) == 1, (found, self.told, job.story())
        assert all(e["wrong"] == 0 for e in found), (found, self.told, job.story())
        step = int(firsts.pop()) - 1
        assert step >= least, f"resumed from step {step}, at least {least} must be there\n{self.told}\n{job.story()}"
        return step

    def in_a_save(self, job: Job) -> tuple[int, int]:
        """Wait for a random moment of a save: (its step, the step of the one before, which is durable)."""
        known = len(job.events("saving", rank=0))
        job.wait_for(lambda: len(job.events("saving", rank=0)) > known + 1, 60, "two more saves begin")
        typical_s = statistics.median(self.took_s[-20:]) if self.took_s else 0.3
        select.select([], [], [], self.rng.uniform(0.0, 1.2 * typical_s))
        begun = job.events("saving", rank=0)
        self.learn(job)
        return int(begun[-1]["step"]), int(begun[-2]["step"])

    def learn(self, job: Job) -> None:
        """How long saves take, so that moments can be drawn from all of it."""
        began = {(e["attempt"], e["step"]): e["at_s"] for e in job.events("saving", rank=0)}
        for e in job.events("settled", rank=0):
            if e["state"] == "durable" and (e["attempt"], e["step"]) in began:
                self.took_s.append(e["at_s"] - began[e["attempt"], e["step"]])

    # -- kills ---------------------------------------------------------------------------------------------------------
    def kill_rank(self, job: Job) -> None:
        step, durable = self.in_a_save(job)
        attempt = max(int(e["attempt"]) for e in job.events("start"))
        rank = self.rng.randrange(RANKS)
        self.told.append(f"rank {rank} at the save of step {step}")
        os.kill(job.pids(attempt)[rank], signal.SIGKILL)
        self.check_resumed(job, attempt + 1, durable)

    def kill_saver(self, job: Job) -> None:
        step, _ = self.in_a_save(job)
        attempt = max(int(e["attempt"]) for e in job.events("start"))
        started = job.journal("saver_started")
        self.told.append(f"saver at the save of step {step}")
        os.kill(int(started[-1]["pid"]), signal.SIGKILL)
        job.wait_for(lambda: len(job.journal("saver_started")) > len(started), 30, "the saver is started again")
        settled = job.wait_for(
            lambda: [e for e in job.events("settled", rank=0, attempt=attempt) if e["step"] == step],
            90,
            f"the save of step {step} ends",
        )
        assert settled[0]["state"] == "durable", (settled, self.told, job.story())
        assert max(int(e["attempt"]) for e in job.events("start")) == attempt, "training went on"

    def end(self, job: Job, everything: bool) -> int:
        """Kill the agent or all at once and check what is on disk; the newest step there."""
        step, durable = self.in_a_save(job)
        self.told.append(f"{'all' if everything else 'agent'} at the save of step {step}")
        if everything:
            pids = list(processes_with(job.tag))
            self.rng.shuffle(pids)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            job.send(signal.SIGKILL)
        job.process.wait()
        assert job.left_behind(20) == [], job.story()
        complete = [c for c in list_checkpoints(self.root) if c.problem is None]
        assert complete, (self.told, job.story())
        assert complete[0].name.step >= durable, f"{complete[0].path} is older than step {durable}\n{self.told}"
        for checkpoint in complete:
            assert wrong_elements(checkpoint.path, checkpoint.name.step, ROWS, RANKS) == {}, (checkpoint, self.told)
        return int(complete[0].name.step)


def run(start: JobStarter, root: Path, seed: int, jobs: int) -> None:
    print(f"seed {seed}")
    chain = Chain(start, root, random.Random(seed))
    newest = -1
    for number in range(jobs):
        job = chain.launch(newest)
        kills = [chain.kill_rank, chain.kill_saver, chain.rng.choice([chain.kill_rank, chain.kill_saver])]
        chain.rng.shuffle(kills)
        for kill in kills:
            kill(job)
        newest = max(chain.end(job, everything=(number + seed) % 2 == 0), newest)


@pytest.mark.deadline(600)
def test_kills_at_random_moments_of_a_save_cost_at_most_that_save(start: JobStarter, tmp_path: Path) -> None:
    run(start, tmp_path / "checkpoints", seed=int(time.time()), jobs=SAMPLED)


@pytest.mark.slow
@pytest.mark.deadline(600)
@pytest.mark.parametrize("seed", range(ALL // SAMPLED))
def test_300_kills_at_random_moments_of_a_save(start: JobStarter, tmp_path: Path, seed: int) -> None:
    run(start, tmp_path / "checkpoints", seed=seed, jobs=SAMPLED)


def test_a_rank_killed_during_training_goes_on_from_memory(start: JobStarter, tmp_path: Path) -> None:
    job = start("checkpointed.py", OPTIONS, [tmp_path / "checkpoints", 1_000_000, 0.02, EVERY], env=ENV)
    chain = Chain(start, tmp_path, random.Random(1))
    job.wait_for(lambda: [e for e in job.events("settled") if e["state"] == "durable"], 60, "a durable save")
    os.kill(job.pids(0)[1], signal.SIGKILL)
    chain.check_resumed(job, 1, EVERY - 1)
    assert all("from memory" in e["place"] for e in job.events("resumed", attempt=1)), job.story()
    saver = int(job.journal("saver_started")[-1]["pid"])
    assert is_alive(saver), "it outlives the ranks"
    job.send(signal.SIGTERM)
    job.wait(60)
