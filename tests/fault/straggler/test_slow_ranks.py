"""Slow ranks of real jobs: who is named, how soon, why, and that nobody else is. gloo, four ranks, plain scripts.

A plan is one job in which several ranks are slow one after the other (see steadyrun.testing.faults), each for sixty
steps. A sample runs always; the others need --full. Four ranks share the cores of a small machine with whatever else
runs on it, which is why own work is compared without the time for which a core was waited for.
"""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from jobs import JobStarter
from slowruns import NOTICED, RANKS, Leg, Plan, SlowRun, cpu_cgroup

from steadyrun.ctl.main import main as steadyctl

DEADLINE_S = 1500.0  # of the test that is first to ask for a plan
EARLY, LATE = 25, 25  # steps by which the beginning that is told may be off
WIDTH = 512  # a step then takes about 65 ms on two cores: as long as a small one does
TOO_NOISY = 0.5  # of what a rank is slower by: with 20 busy processes on two cores equal ranks differ by 6 %

WORKING = ("working",)
STARVED = ("cpu_starved",)

SAMPLE = Plan("sample", "pace_ddp.py", (Leg("slow where=backward percent=30", 2, "backward", WORKING, 30),), (WIDTH,))
DDP = Plan(
    "ddp",
    "pace_ddp.py",
    (
        Leg("slow where=forward percent=10", 1, "forward", WORKING, 10),
        Leg("slow where=backward percent=10", 3, "backward", WORKING, 10),
        Leg("slow where=data percent=30", 0, "data", WORKING, 30),
        Leg("slow where=forward percent=30", 2, "forward", WORKING, 30),
        Leg("slow where=data percent=10", 1, "data", WORKING, 10),
        Leg("slow where=data percent=30 how=sleep", 3, "data", ("waiting",), 30),
    ),
    (WIDTH,),
)
FSDP = Plan(
    "fsdp",
    "pace_fsdp.py",
    (
        Leg("slow where=forward percent=30", 2, "forward", WORKING, 30),
        Leg("slow where=backward percent=30", 0, "backward", WORKING, 30),
        Leg("slow where=forward percent=10", 3, "forward", WORKING, 10),
        Leg("slow where=backward percent=10", 1, "backward", WORKING, 10),
        Leg("slow where=data percent=30", 2, "data", WORKING, 30),
    ),
    (WIDTH,),
)
# Each rank has a slow core for itself: with four ranks on two cores, those beside a slow one would only become faster.
STARVING = Plan(
    "starving",
    "pace_ddp.py",
    (Leg("throttle percent=50", 1, None, STARVED), Leg("neighbour tasks=1", 3, None, STARVED)),
    (128,),
    cores=0.15,
)
PLANS = (SAMPLE, DDP, FSDP, STARVING)

HEALTHY = (Plan("healthy-ddp", "pace_ddp.py", (), (256,)), Plan("healthy-fsdp", "pace_fsdp.py", (), (256,)))
HEALTHY_STEPS = {"healthy-ddp": 2000, "healthy-fsdp": 600}


@dataclass
class Runs:
    """Runs by plan, each started when it is first asked for."""

    start: JobStarter
    done: dict[str, SlowRun] = field(default_factory=dict)

    def of(self, plan: Plan, steps: int | None = None) -> SlowRun:
        if plan.name not in self.done:
            if plan.cores is not None:
                cpu_cgroup()  # skips where there is none
            self.done[plan.name] = SlowRun.of(self.start, plan, DEADLINE_S - 60, steps)
        return self.done[plan.name]


@pytest.fixture(scope="module")
def runs(start_for_module: JobStarter) -> Runs:
    return Runs(start_for_module)


def marks_of(plan: Plan) -> list[pytest.MarkDecorator]:
    return [] if plan is SAMPLE else [pytest.mark.slow]


each_leg = pytest.mark.parametrize(
    ("plan", "leg"), [pytest.param(p, leg, id=f"{p.name}-{leg}", marks=marks_of(p)) for p in PLANS for leg in p.legs]
)
each_plan = pytest.mark.parametrize("plan", [pytest.param(p, id=p.name, marks=marks_of(p)) for p in PLANS])
each_healthy = pytest.mark.parametrize("plan", [pytest.param(p, id=p.name, marks=pytest.mark.slow) for p in HEALTHY])
pytestmark = pytest.mark.deadline(DEADLINE_S)


def accusation(runs: Runs, plan: Plan, leg: Leg) -> dict[str, Any]:
    """What was said of *leg*; fails when there is nothing, or more than one thing."""
    run = runs.of(plan)
    if refusal := run.refusal(leg):
        pytest.skip(f"cannot be injected here: {refusal}")
    found = run.of_leg(leg)
    if not found and leg.percent is not None and (noise := run.noise(leg)) > TOO_NOISY * leg.percent / 100:
        pytest.skip(f"the machine was too busy: ranks with equal work differed by {noise:.0%} from step to step")
    assert len(found) == 1, f"{len(found)} accusations\n{run.story()}"
    return found[0]


# -- slow ranks --------------------------------------------------------------------------------------------------------
@each_leg
def test_the_slow_rank_is_named_in_time_and_nobody_else(runs: Runs, plan: Plan, leg: Leg) -> None:
    found = accusation(runs, plan, leg)
    begin = plan.begins(leg)
    assert (found["kind"], found["ranks"]) == ("rank", [leg.rank]), found
    assert begin < found["step"] <= begin + NOTICED, found
    assert begin - EARLY <= found["first_step"] <= begin + LATE, found


@each_leg
def test_the_cause_is_right(runs: Runs, plan: Plan, leg: Leg) -> None:
    found = accusation(runs, plan, leg)
    assert found["phase"] == leg.phase, found
    assert found["cause"] in leg.causes, found
    if leg.percent is not None:
        said = 100 * math.log1p(found["slowdown"])
        told = 100 * math.log1p(leg.percent / 100)
        assert told / 3 < said < told * 2, found  # other work on the cores makes the others slower, too


@each_leg
def test_it_is_over_when_it_is_over(runs: Runs, plan: Plan, leg: Leg) -> None:
    """Where the job still runs long enough afterwards to see it."""
    found = accusation(runs, plan, leg)
    if leg is plan.legs[-1]:
        assert found["over_step"] is None or found["over_step"] > plan.begins(leg) + NOTICED, found
    else:
        assert found["over_step"] is not None, found
        assert found["over_step"] > plan.begins(leg) + NOTICED, found


@each_leg
def test_an_incident_reports_it_and_touches_nothing(runs: Runs, plan: Plan, leg: Leg) -> None:
    found = accusation(runs, plan, leg)
    run = runs.of(plan)
    incidents = [i for i in run.job.incidents() if i.cls == "straggler" and i.ranks == [leg.rank]]
    assert incidents, run.story()
    assert {i.verdict["action"] for i in incidents} == {"report"}, [i.line() for i in incidents]
    assert any(f"rank {leg.rank}" in i.verdict["findings"][0]["summary"] for i in incidents)
    assert found["summary"].partition(",")[0] in run.job.output, "the launcher tells it while the job runs"


@each_plan
def test_nobody_is_accused_at_other_times(runs: Runs, plan: Plan) -> None:
    run = runs.of(plan)
    of_legs = [a for leg in plan.legs for a in run.of_leg(leg)]
    assert [a for a in run.accusations if a not in of_legs] == [], run.story()


@each_plan
def test_the_job_goes_on(runs: Runs, plan: Plan) -> None:
    run = runs.of(plan)
    assert run.exit_code == 0, run.story()
    assert len(run.job.events("start")) == len(run.job.events("done")) == RANKS, run.story()


@each_plan
def test_the_command_says_what_the_journal_says(runs: Runs, plan: Plan) -> None:
    run = runs.of(plan)
    assert run.job.folder is not None
    out = io.StringIO()
    code = steadyctl(["stragglers", str(run.job.folder), "--json"], out)
    shown = json.loads(out.getvalue())
    kinds = Counter((a["kind"], tuple(a["ranks"]), a["step"], a["phase"]) for a in shown["alarms"])
    assert kinds == Counter((a["kind"], tuple(a["ranks"]), a["step"], a["phase"]) for a in run.alarms), run.story()
    assert sorted(f["ranks"] for f in shown["findings"]) == sorted(a["ranks"] for a in run.accusations), run.story()
    assert code == (10 if run.accusations else 0)
    (attempt,) = shown["attempts"]
    assert [r["rank"] for r in attempt["ranks"]] == list(range(RANKS))
    assert all(r["steps"] > 0 and r["busy_s"] > 0 for r in attempt["ranks"]), attempt["ranks"]


@pytest.mark.slow
def test_peers_wait_longer_while_one_is_slow(runs: Runs) -> None:
    """What makes their backward passes look longer, and would accuse them: it must be there, or nothing is shown.

    Seen where each rank has a core for itself: elsewhere who waits is also a matter of who gets a core when.
    """
    run = runs.of(STARVING)
    waited = run.column("wait_s")
    for leg in STARVING.legs:
        begin = STARVING.begins(leg)
        rows = [waits for step, waits in waited.items() if begin < step <= begin + NOTICED]
        waits = [sum(row[rank] for row in rows) for rank in range(RANKS)]
        assert len(rows) >= 5, "the journal may keep every eighth step"
        assert min(w for r, w in enumerate(waits) if r != leg.rank) > 1.3 * waits[leg.rank], waits


# -- healthy jobs ------------------------------------------------------------------------------------------------------
@each_healthy
def test_a_healthy_job_accuses_nobody(runs: Runs, plan: Plan) -> None:
    run = runs.of(plan, HEALTHY_STEPS[plan.name])
    assert run.exit_code == 0, run.story()
    steps = run.column("busy_s")
    assert max(steps) > 0.99 * HEALTHY_STEPS[plan.name] - 5
    assert all(min(own) > 0 for own in list(steps.values())[5:]), "own work was known, so steps were compared"
    assert run.accusations == [], run.story()
    assert [i.line() for i in run.job.incidents()] == []
