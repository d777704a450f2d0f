"""Flipped bits in real jobs: who is named, with tensor, element and bit, and training goes on as if all was well.

A plan is one job in which bits flip one after the other, each in an attempt of its own: each is found at the next
check, and the job goes back to the newest checkpoint that all ranks agreed on. Its losses must be those of a job to
which nothing happened.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jobs import Incident, Job, JobStarter

from steadyrun.checkpoint.catalog import look
from steadyrun.ctl.main import main as steadyctl

SAVE_EVERY, CHECK_EVERY = 10, 5
PACE_S = 0.1
DEADLINE_S = 900.0


@dataclass(frozen=True)
class Flip:
    """One bit.

    Attributes:
        step: within whose update it flips, or after which.
        seen: at which step it is found; the next check, or the next update where it is found at rest.
        back_to: the newest checkpoint that is right.
        between: the two ranks between which it lies, where nothing tells which is wrong.
    """

    rank: int
    step: int
    at: str
    target: str
    tensor: str
    element: int
    bit: int
    seen: int
    back_to: int
    between: tuple[int, ...] = ()

    @property
    def named(self) -> list[int]:
        return list(self.between) or [self.rank]

    def text(self, attempt: int) -> str:
        where = f"target={self.target} tensor={self.tensor} element={self.element} bit={self.bit} at={self.at}"
        return f"flip rank={self.rank} step={self.step} attempt={attempt} {where}"

    @property
    def is_updated(self) -> bool:
        """Updates were made with it before it was seen: of the element other bits differ, too."""
        return self.step + (self.at == "rest") < self.seen


@dataclass(frozen=True)
class Plan:
    name: str
    form: str
    ranks: int
    steps: int
    flips: tuple[Flip, ...]


EXP_AVG = "optimizer.second.weight.exp_avg"
SAMPLE = Plan(
    "ddp3",
    "ddp",
    3,
    52,
    (
        Flip(1, 24, "update", "param", "first.weight", 70_000, 12, 24, 19),
        Flip(2, 31, "rest", "optim", EXP_AVG, 5, 20, 34, 29),
    ),
)
AT_REST = Plan("ddp3-rest", "ddp", 3, 42, (Flip(0, 24, "rest", "param", "head.bias", 0, 3, 25, 19),))
TWO = Plan("ddp2", "ddp", 2, 42, (Flip(1, 24, "rest", "param", "second.bias", 7, 2, 25, 19),))
SHARDED = Plan("fsdp4", "fsdp2", 4, 42, (Flip(2, 24, "rest", "param", "first.weight", 900, 17, 25, 19),))
HYBRID = Plan(
    "hsdp4",
    "hsdp",
    4,
    72,
    (
        Flip(3, 24, "rest", "param", "first.weight", 900, 17, 25, 19),
        Flip(3, 31, "rest", "param", "first.weight", 900, 17, 34, 29, between=(1, 3)),
    ),
)
PLANS = (SAMPLE, AT_REST, TWO, SHARDED, HYBRID)
pytestmark = pytest.mark.deadline(DEADLINE_S)


@dataclass
class Runs:
    """Jobs, each started when it is first asked for."""

    start: JobStarter
    folder: Path
    done: dict[str, Job] = field(default_factory=dict)

    def job(self, name: str, form: str, ranks: int, steps: int, faults: str = "", **env: str) -> Job:
        if name not in self.done:
            options = ["--standalone", f"--nproc-per-node={ranks}", f"--ft-sdc={CHECK_EVERY}"]
            args = [form, steps, SAVE_EVERY, self.checkpoints(name)]
            given = {"OMP_NUM_THREADS": "1", "PACE_S": str(PACE_S), **env}
            job = self.done[name] = self.start("replicas.py", options, args, faults=faults, env=given, name=name)
            assert job.wait(DEADLINE_S - 60) == 0, job.story()
        return self.done[name]

    def checkpoints(self, name: str) -> Path:
        return self.folder / name

    def disturbed(self, plan: Plan) -> Job:
        faults = "; ".join(flip.text(attempt) for attempt, flip in enumerate(plan.flips))
        return self.job(plan.name, plan.form, plan.ranks, plan.steps, faults)

    def undisturbed(self, plan: Plan) -> Job:
        return self.job(f"calm-{plan.form}-{plan.ranks}-{plan.steps}", plan.form, plan.ranks, plan.steps)


@pytest.fixture(scope="module")
def runs(start_for_module: JobStarter, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(start_for_module, tmp_path_factory.mktemp("checkpoints"))


def saved_in(plan: Plan) -> list[int]:
    return list(range(SAVE_EVERY - 1, plan.steps, SAVE_EVERY))


def sdc(job: Job) -> tuple[int, dict[str, Any]]:
    """What ``steadyctl sdc --json`` says."""
    out = io.StringIO()
    code = steadyctl(["sdc", str(job.folder), "--json"], out, io.StringIO(), {})
    return code, json.loads(out.getvalue())


def losses(job: Job) -> dict[tuple[int, int], float]:
    """By rank and step; of a step that was made again the last."""
    return {(e["rank"], e["step"]): e["own"] for e in job.events("step")}


each_plan = pytest.mark.parametrize(
    "plan", [pytest.param(p, id=p.name, marks=[] if p is SAMPLE else [pytest.mark.slow]) for p in PLANS]
)
each_flip = pytest.mark.parametrize(
    ("plan", "number"),
    [
        pytest.param(p, n, id=f"{p.name}-{f.target}-{n}", marks=[] if p is SAMPLE else [pytest.mark.slow])
        for p in PLANS
        for n, f in enumerate(p.flips)
    ],
)


def incident_of(job: Job, number: int) -> Incident:
    found = job.incidents()
    assert len(found) > number, job.story()
    return found[number]


@each_flip
def test_rank_tensor_element_and_bit_are_named(runs: Runs, plan: Plan, number: int) -> None:
    job, flip = runs.disturbed(plan), plan.flips[number]
    incident = incident_of(job, number)
    told = incident.verdict["details"]["sdc"]
    assert (incident.cls, incident.ranks) == ("silent_corruption", flip.named), job.story()
    assert (told["cause"], told["first_bad_step"]) == ("undecided" if flip.between else "device", flip.seen), told
    assert flip.tensor in told["tensors"], told
    (place,) = [p for p in told["places"] if p["tensor"] == flip.tensor]
    assert (place["rank"], place["leaves"]) == (flip.named[0], 1), place
    assert [e[0] for e in place["elements"]] == [flip.element], place
    if not flip.is_updated:
        assert place["elements"][0][1] == [flip.bit], place


@each_flip
def test_the_job_goes_back_to_the_newest_verified_checkpoint(runs: Runs, plan: Plan, number: int) -> None:
    job, flip = runs.disturbed(plan), plan.flips[number]
    told = incident_of(job, number).verdict["details"]["sdc"]
    assert (told["back_to"], told["back_to_is_verified"]) == (flip.back_to, True), told
    starts = [e["start"] for e in job.events("resumed") if e["attempt"] == number + 1]
    assert starts == [flip.back_to + 1] * plan.ranks, job.story()


@each_plan
def test_losses_are_bitwise_those_of_an_undisturbed_job(runs: Runs, plan: Plan) -> None:
    expected, found = losses(runs.undisturbed(plan)), losses(runs.disturbed(plan))
    assert len(expected) == plan.ranks * plan.steps
    assert found == expected


@each_plan
def test_an_undisturbed_job_has_no_alarm_and_verified_checkpoints(runs: Runs, plan: Plan) -> None:
    job = runs.undisturbed(plan)
    code, told = sdc(job)
    assert code == 0, told
    assert not job.incidents()
    assert told["compared"] == told["agreed"]
    saved = set(saved_in(plan))
    assert {v["step"] for v in told["verified_checkpoints"]} == saved
    marked = look(runs.checkpoints(f"calm-{plan.form}-{plan.ranks}-{plan.steps}"))
    assert {c.step for c in marked.complete if c.is_verified} >= saved


@each_plan
def test_steadyctl_tells_the_same(runs: Runs, plan: Plan) -> None:
    code, told = sdc(runs.disturbed(plan))
    assert code == 10
    assert [f["ranks"] for f in told["found"]] == [f.named for f in plan.flips]
    assert [f["back_to_done"] for f in told["found"]] == [f.back_to for f in plan.flips]


def test_the_node_is_marked_in_the_ledger(runs: Runs) -> None:
    job = runs.disturbed(SAMPLE)
    assert job.folder is not None
    scores = json.loads((job.folder / "state" / "node_scores.json").read_text())
    assert [m["kind"] for m in scores["marks"]] == ["corruption"] * len(SAMPLE.flips)
    assert "should be left out (corruption), but no spare is there" in job.output


def test_what_comes_after_the_wrong_step_is_set_aside(runs: Runs) -> None:
    """The step of a checkpoint that was saved while bytes were wrong is saved again, and both are told apart."""
    runs.disturbed(SAMPLE)
    catalog = look(runs.checkpoints(SAMPLE.name))
    usable = [c.step for c in catalog.complete if not c.is_superseded]
    assert sorted(usable) == saved_in(SAMPLE)


@pytest.mark.slow
def test_all_ranks_but_one_perturbed_is_called_software_and_nobody_is_stopped(runs: Runs) -> None:
    job = runs.job("software", "ddp", 3, 22, PERTURB_STEP="12")
    (incident,) = job.incidents()
    assert incident.verdict["action"] == "report"
    assert incident.verdict["details"]["sdc"]["cause"] == "software"
    assert "software" in incident.verdict["findings"][0]["summary"]
    assert {e["attempt"] for e in job.events("step")} == {0}
