"""What real jobs' verdicts say about faults at collectives: class, culprit, operation, place and victims.

A tour is one job in which each attempt plays the next scenario of scripts/flight_scenarios.py, so that restarts run on
warm standbys. The sample runs always; the others need --full.
"""

from __future__ import annotations

import json
import re
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jobs import SCRIPTS, Incident, JobStarter, command

SCRIPT = "flight_scenarios.py"
STEP_LIMIT_S = 3.0
LATE_S = 2.0  # how much later than its limit a fault may be noticed on a machine that is busy with other things
INNOCENT = 0.7  # no finding that is this sure may name a rank that has done nothing wrong
DEADLINE_S = 900.0  # of the test that is first to ask for a tour
TRAINED = 3  # steps, and with them collectives of the default group, before a scenario begins

HANG = "hang"
DEATH = "death"


@dataclass(frozen=True)
class Expected:
    """What the main finding of one scenario must say.

    Attributes:
        classes: any of these is right: the first is the best one, the others say less and nothing wrong.
        groups: descriptions of groups, any of which may be named; ``seqs`` likewise. Empty: there is none to name.
        has_site: the culprit's place can be known; a place that is named is one of the script's marked lines anyhow.
        notices: a hang by its limit, or a death at once.
        blind: ranks that no flight record can come from.
    """

    scenario: str
    classes: tuple[str, ...]
    ranks: tuple[int, ...]
    victims: tuple[int, ...]
    groups: tuple[str, ...] = ("default_pg",)
    seqs: tuple[int, ...] = (TRAINED + 1,)
    ops: tuple[str, ...] = ("all_reduce",)
    has_site: bool = True
    notices: str = HANG
    blind: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.scenario

    @property
    def sites(self) -> set[str]:
        lines = (SCRIPTS / SCRIPT).read_text().splitlines()
        marked = [n for n, line in enumerate(lines, 1) if re.search(rf"# site: {self.scenario}$", line)]
        assert marked, f"no line of {SCRIPT} is marked for {self.scenario}"
        return {f"{SCRIPT}:{n}" for n in marked}


STALL = ("host_stall",)
CYCLE = ("deadlock_cycle",)
EITHER = ("all_reduce", "broadcast")


@dataclass(frozen=True)
class Plan:
    """A job of so many ranks and the scenarios that its attempts play."""

    name: str
    ranks: int
    legs: tuple[Expected, ...]
    env: Mapping[str, str] = field(default_factory=dict)


SAMPLE = Plan(
    "sample",
    3,
    (
        Expected("op_mismatch", ("op_mismatch",), (1,), (0, 2), ops=EITHER),
        Expected("async_missing", STALL, (1,), (0, 2), seqs=(TRAINED + 3,)),
        Expected("extra_collective", ("extra_collective",), (0,), ()),
    ),
)
TRIOS = Plan(
    "trios",
    3,
    (
        Expected("op_mismatch_rank0", ("op_mismatch",), (0,), (1, 2), ops=EITHER),
        Expected("size_mismatch", ("size_mismatch",), (2,), (0, 1), notices=DEATH, blind=(2,)),
        Expected("size_mismatch_rank0", ("size_mismatch",), (0,), (1, 2), notices=DEATH, blind=(0,)),
        Expected("dtype_mismatch", ("dtype_mismatch",), (2,), (0, 1), notices=DEATH, blind=(0, 1)),
        Expected("missing_rank", STALL, (1,), (0, 2)),
        Expected("missing_rank0", STALL, (0,), (1, 2)),
        Expected("never_joined", STALL, (2,), (0, 1), seqs=(1,)),
        # one call site in a loop: that rank 1 left out the tenth call cannot be seen in what was recorded
        Expected("skipped_one", ("skipped_collective", "host_stall"), (1,), (0, 2), seqs=(TRAINED + 21,)),
        Expected("skipped_branch", ("skipped_collective",), (1,), (0, 2), seqs=tuple(range(32, 48))),
        Expected("holds_gil", STALL, (1,), (0, 2)),
        Expected("sigstop", ("stopped_process",), (1,), (0, 2), has_site=False, blind=(1,)),
        Expected("sigkill", ("dead_process",), (1,), (0, 2), has_site=False, notices=DEATH, blind=(1,)),
    ),
)
PAIRS = Plan(
    "pairs",
    2,
    (
        Expected("two_groups_order", CYCLE, (0, 1), (), ("A", "B"), (1,)),
        Expected("two_backends", CYCLE, (0, 1), (), ("A", "B"), (1,)),
        Expected("unrecorded_backend", CYCLE, (0, 1), (), ("A", "B"), (1,)),
        Expected("p2p_deadlock", ("p2p_unmatched",), (0, 1), (), (), (), ("recv",)),
    ),
)
# The user has set a ring of 20 entries: enough for the first two; it wraps in the third.
SMALL_RING = Plan(
    "small-ring",
    4,
    (
        Expected("chain", STALL, (3,), (0, 1, 2), ("G23",), (1,)),
        Expected("grid", STALL, (3,), (0, 1, 2), ("dp1", "tp1"), (3, 4)),  # one rank waits for it in each
        Expected("ring_skew", STALL, (0,), (1, 2, 3), seqs=(TRAINED + 2,)),
    ),
    {"TORCH_FR_BUFFER_SIZE": "20"},
)
PLANS = (SAMPLE, TRIOS, PAIRS, SMALL_RING)


class Tour:
    """A finished job that played the scenarios of *plan* one after the other."""

    def __init__(self, start: JobStarter, plan: Plan) -> None:
        self.plan = plan
        legs = plan.legs
        options = ["--standalone", f"--nproc-per-node={plan.ranks}", f"--max-restarts={len(legs)}"]
        options += [f"--ft-step-timeout={STEP_LIMIT_S}", f"--ft-section-timeouts=joining:{STEP_LIMIT_S}"]
        options += ["--ft-restart-grace=2"]
        self.job = start(SCRIPT, options, [leg.scenario for leg in legs], env=plan.env, name=plan.name)
        self.exit_code = self.job.wait(DEADLINE_S - 30)

    def incident(self, leg: Expected) -> Incident:
        attempt = self.plan.legs.index(leg)
        found = [i for i in self.job.incidents() if i.verdict["attempt"] == attempt]
        assert len(found) == 1, f"{len(found)} incidents in attempt {attempt}\n{self.job.story()}"
        return found[0]

    def finding(self, leg: Expected) -> Mapping[str, Any]:
        incident = self.incident(leg)
        assert incident.verdict["findings"], incident.line()
        finding: Mapping[str, Any] = incident.verdict["findings"][0]
        return finding


@dataclass
class Tours:
    """Tours by plan, each started when it is first asked for."""

    start: JobStarter
    done: dict[str, Tour] = field(default_factory=dict)

    def of(self, plan: Plan) -> Tour:
        if plan.name not in self.done:
            self.done[plan.name] = Tour(self.start, plan)
        return self.done[plan.name]


@pytest.fixture(scope="module")
def tours(start_for_module: JobStarter) -> Tours:
    return Tours(start_for_module)


def marks_of(plan: Plan) -> list[pytest.MarkDecorator]:
    return [] if plan is SAMPLE else [pytest.mark.slow]


each_leg = pytest.mark.parametrize(
    ("plan", "leg"), [pytest.param(p, leg, id=str(leg), marks=marks_of(p)) for p in PLANS for leg in p.legs]
)
each_plan = pytest.mark.parametrize("plan", [pytest.param(p, id=p.name, marks=marks_of(p)) for p in PLANS])
pytestmark = pytest.mark.deadline(DEADLINE_S)


def test_every_scenario_is_on_a_tour() -> None:
    source = (SCRIPTS / SCRIPT).read_text()
    there = set(re.findall(r"^@scenario\(.*\)\ndef (\w+)\(", source, re.MULTILINE))
    assert {leg.scenario for plan in PLANS for leg in plan.legs} | {"ok"} == there


# -- what must be true of each scenario --------------------------------------------------------------------------------
@each_leg
def test_class_and_culprit(tours: Tours, plan: Plan, leg: Expected) -> None:
    incident = tours.of(plan).incident(leg)
    assert incident.cls in leg.classes, incident.line()
    assert tuple(incident.ranks) == leg.ranks, incident.line()


@each_leg
def test_operation_in_which_the_others_wait(tours: Tours, plan: Plan, leg: Expected) -> None:
    finding = tours.of(plan).finding(leg)
    assert finding["op"] in leg.ops, finding
    if leg.groups:
        assert str(finding["group"]).split(" ")[0] in leg.groups, finding
    if leg.seqs:
        assert finding["seq"] in leg.seqs, finding


@each_leg
def test_place_of_the_fault(tours: Tours, plan: Plan, leg: Expected) -> None:
    finding = tours.of(plan).finding(leg)
    place = finding["callsite"].partition(" in ")[0] if finding["callsite"] else None
    assert place in leg.sites | (set() if leg.has_site else {None}), finding


@each_plan
def test_places_are_written_in_one_way(tours: Tours, plan: Plan) -> None:
    """``train.py:88``, wherever the finding comes from, so that readers of verdict.json can compare them."""
    findings = [f for i in tours.of(plan).job.incidents() for f in i.verdict["findings"]]
    odd = {f["callsite"] for f in findings if f["callsite"] and not re.fullmatch(r"\S+:\d+", f["callsite"])}
    assert odd == set()


@each_leg
def test_victims_and_innocents(tours: Tours, plan: Plan, leg: Expected) -> None:
    incident = tours.of(plan).incident(leg)
    assert tuple(incident.verdict["victims"]) == leg.victims, incident.line()
    innocent = set(range(plan.ranks)) - set(leg.ranks)
    for finding in incident.verdict["findings"]:
        assert finding["confidence"] < INNOCENT or not innocent & set(finding["ranks"]), finding


@each_leg
def test_is_noticed_in_time(tours: Tours, plan: Plan, leg: Expected) -> None:
    limit_s = STEP_LIMIT_S if leg.notices == HANG else 0.0
    verdict = tours.of(plan).incident(leg).verdict
    assert verdict["detection_delay_s"] < limit_s + LATE_S, verdict


@each_leg
def test_flight_records_are_kept(tours: Tours, plan: Plan, leg: Expected) -> None:
    """Of each rank that could give one: the dump as torch wrote it, and what is needed to read it alone."""
    folder = tours.of(plan).incident(leg).folder
    for rank in set(range(plan.ranks)) - set(leg.blind):
        names = sorted(f.name for f in folder.iterdir() if f.name.startswith(f"rank_{rank}.flight."))
        assert any(name.endswith((".pickle", ".json")) and name.count(".") > 2 for name in names), names
        sidecar = folder / f"rank_{rank}.flight.json"
        assert json.loads(sidecar.read_text())["rank"] == rank
        for name in names:
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600, name


@each_leg
def test_analysis_afterwards_agrees(tours: Tours, plan: Plan, leg: Expected) -> None:
    report = postmortem(tours.of(plan).incident(leg).folder)
    main = report["findings"][0]
    assert main["class"] in leg.classes, report
    assert tuple(main["ranks"]) == leg.ranks, report


def postmortem(path: Path) -> dict[str, Any]:
    """What ``steadyctl postmortem PATH --json`` prints; it must have found a cause."""
    argv = [command("steadyctl"), "postmortem", "--json", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 10, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["schema"] == "steadyrun.postmortem/1"
    return report


@each_plan
def test_attempt_without_a_fault_trains_to_its_end(tours: Tours, plan: Plan) -> None:
    job = tours.of(plan).job
    assert tours.of(plan).exit_code == 0, job.story()
    assert len(job.incidents()) == len(plan.legs), job.story()
    for rank in range(plan.ranks):
        assert job.events("done", rank=rank, attempt=len(plan.legs)), job.story()
    assert job.left_behind() == []
