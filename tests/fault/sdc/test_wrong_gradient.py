"""A gradient that one rank computes wrongly, before it is reduced: all replicas take it over, and a replay finds it."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, JobStarter

from steadyrun.ctl.main import main as steadyctl

EVERY, SAVE_EVERY, STEPS = 5, 10, 72
WRONG, CLEAN = 24, 19  # the gradient of this step; the newest replay before it, and the newest checkpoint from then
ELEMENT, BIT = 70_000, 20
DEADLINE_S = 600.0
pytestmark = pytest.mark.deadline(DEADLINE_S)


@dataclass
class Runs:
    """Jobs, each started when it is first asked for."""

    start: JobStarter
    folder: Path
    done: dict[str, Job] = field(default_factory=dict)

    def job(
        self, name: str, ranks: int, replay: str, faults: str = "", steps: int = STEPS, save: int = SAVE_EVERY
    ) -> Job:
        if name not in self.done:
            options = ["--standalone", f"--nproc-per-node={ranks}", "--ft-sdc=5", f"--ft-sdc-replay={replay}"]
            options += [] if faults else ["--ft-standby=off"]  # not needed there, and half of what a start costs
            args = ["ddp", steps, save, self.folder / name]
            env = {"PACE_S": "0.06" if faults else "0"}  # what is found is acted on within two seconds
            job = self.done[name] = self.start("replicas.py", options, args, faults=faults, env=env, name=name)
            assert job.wait(DEADLINE_S - 60) == 0, job.story()
        return self.done[name]

    def disturbed(self, ranks: int) -> Job:
        """The last rank computes one bit of one gradient wrongly, once."""
        where = f"target=grad tensor=first.weight element={ELEMENT} bit={BIT}"
        fault = f"flip rank={ranks - 1} step={WRONG - 1} attempt=0 {where}"  # in the next gradient after that step
        return self.job(f"wrong-{ranks}", ranks, str(EVERY), fault)

    def undisturbed(self, ranks: int) -> Job:
        return self.job(f"calm-{ranks}", ranks, "off")


@pytest.fixture(scope="module")
def runs(start_for_module: JobStarter, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(start_for_module, tmp_path_factory.mktemp("checkpoints"))


def losses(job: Job) -> dict[tuple[int, int], float]:
    """By rank and step; of a step that was made again the last."""
    return {(e["rank"], e["step"]): e["own"] for e in job.events("step")}


def sdc(job: Job) -> tuple[int, dict[str, Any]]:
    """What ``steadyctl sdc --json`` says."""
    out = io.StringIO()
    code = steadyctl(["sdc", str(job.folder), "--json"], out, io.StringIO(), {})
    return code, json.loads(out.getvalue())


each_size = pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.slow)])


@each_size
def test_rank_tensor_element_and_bit_are_named(runs: Runs, ranks: int) -> None:
    job = runs.disturbed(ranks)
    (incident,) = job.incidents()
    told = incident.verdict["details"]["sdc"]
    assert (incident.cls, incident.ranks) == ("silent_corruption", [ranks - 1]), job.story()
    assert (told["cause"], told["moment"], told["first_bad_step"]) == ("device", "gradient", WRONG), told
    assert told["tensors"] == ["first.weight"]
    (place,) = told["places"]
    assert (place["rank"], place["elements"]) == (ranks - 1, [[ELEMENT, [BIT], None, None]]), place
    others = "what ranks 0 and 1 compute" if ranks == 3 else "what rank 0 computes"
    assert (
        f"rank {ranks - 1}: wrong gradient in first.weight at step {WRONG}: its own differs from {others}"
        in (told["sentence"])
    )


@each_size
def test_the_job_goes_back_to_before_the_first_step_that_no_replay_vouches_for(runs: Runs, ranks: int) -> None:
    job = runs.disturbed(ranks)
    (incident,) = job.incidents()
    told = incident.verdict["details"]["sdc"]
    assert (told["last_good_step"], told["back_to"], told["back_to_is_verified"]) == (CLEAN, CLEAN, True), told
    assert [e["start"] for e in job.events("resumed") if e["attempt"] == 1] == [CLEAN + 1] * ranks


@each_size
def test_losses_are_bitwise_those_of_an_undisturbed_job_without_replays(runs: Runs, ranks: int) -> None:
    expected, found = losses(runs.undisturbed(ranks)), losses(runs.disturbed(ranks))
    assert len(expected) == ranks * STEPS
    assert found == expected


@each_size
def test_replicas_alone_would_not_have_seen_it(runs: Runs, ranks: int) -> None:
    code, told = sdc(runs.disturbed(ranks))
    assert code == 10
    assert told["compared"] == told["agreed"] > 0
    assert [f["ranks"] for f in told["found"]] == [[ranks - 1]]
    replays = [r["replay"] for r in told["ranks"]]
    assert [r["of"] for r in replays] == [(rank + 1) % ranks for rank in range(ranks)]
    assert all(r["state"] == "on" and r["clean"] >= 2 for r in replays), replays


@pytest.mark.slow
def test_five_thousand_steps_without_a_fault_have_no_alarm(runs: Runs) -> None:
    job = runs.job("long", 3, str(EVERY), steps=5000, save=500)
    code, told = sdc(job)
    assert code == 0, told
    assert not job.incidents()
    for rank in told["ranks"]:
        replay = rank["replay"]
        assert (replay["state"], replay["differed"], replay["clean"]) == ("on", 0, 1001), replay
