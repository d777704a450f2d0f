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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jobs import SCRIPTS, Incident, JobStarter, command

SCRIPT = "flight_scenarios.py"
STEP_LIMIT_S = 3.0
LATE_S = 2.0  # how much later than its limit a fault may be noticed on a machine that is busy with other things
INNOCENT = 0.7  # no finding that is this sure may name a rank that has done nothing wrong
TRAINED = 3  # steps, and with them collectives of the default group, before a scenario begins

HANG = "hang"
DEATH = "death"


@dataclass(frozen=True)
class Expected:
    """What the main finding of one scenario must say.

    Attributes:
        classes: any of these is right: the first is the best one, the others say less and nothing wrong.
        groups: descriptions of groups, any of which may be named; ``seqs`` likewise. Empty: there is none to name.
        has_site: the place can be known, and must be one of the script's marked lines.
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

    @property
    def sites(self) -> set[str]:
        lines = (SCRIPTS / SCRIPT).read_text().splitlines()
        marked = [n for n, line in enumerate(lines, 1) if re.search(rf"# site: {self.scenario}$", line)]
        assert marked, f"no line of {SCRIPT} is marked for {self.scenario}"
        return {f"{SCRIPT}:{n}" for n in marked}


STALL = ("host_stall",)
CYCLE = ("deadlock_cycle",)
EITHER = ("all_reduce", "broadcast")

OP_MISMATCH = Expected("op_mismatch", ("op_mismatch",), (1,), (0, 2), ops=EITHER)
ASYNC = Expected("async_missing", STALL, (1,), (0, 2), seqs=(TRAINED + 3,))
EXTRA = Expected("extra_collective", ("extra_collective",), (0,), ())
TWO_BACKENDS = Expected("two_backends", CYCLE, (0, 1), (), ("A", "B"), (1,))

SAMPLE = (OP_MISMATCH, ASYNC, EXTRA)
TRIOS = (
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
)
PAIRS = (
    TWO_BACKENDS,
    Expected("two_groups_order", CYCLE, (0, 1), (), ("A", "B"), (1,)),
    Expected("unrecorded_backend", CYCLE, (0, 1), (), ("A", "B"), (1,)),
    Expected("p2p_deadlock", ("p2p_unmatched",), (0, 1), (), (), (), ("recv",)),
)
# With a ring of 20 entries, set by the user: enough for the first two, while it wraps in the third.
SMALL_RING = (
    Expected("chain", STALL, (3,), (0, 1, 2), ("G23",), (1,)),
    Expected("grid", STALL, (3,), (0, 1, 2), ("dp1",), (3,)),
    Expected("ring_skew", STALL, (0,), (1, 2, 3), seqs=(TRAINED + 2,)),
)


class Tour:
    """A finished job that played its scenarios one after the other."""

    def __init__(
        self,
        start: JobStarter,
        name: str,
        ranks: int,
        legs: tuple[Expected, ...],
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.legs = legs
        self.ranks = ranks
        options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={len(legs)}"]
        options += [f"--ft-step-timeout={STEP_LIMIT_S}", f"--ft-section-timeouts=joining:{STEP_LIMIT_S}"]
        options += ["--ft-restart-grace=2"]
        self.job = start(SCRIPT, options, [leg.scenario for leg in legs], env=env, name=name)
        self.exit_code = self.job.wait(60 + 60 * len(legs))

    def incident(self, leg: Expected) -> Incident:
        attempt = self.legs.index(leg)
        found = [i for i in self.job.incidents() if i.verdict["attempt"] == attempt]
        assert len(found) == 1, f"{len(found)} incidents in attempt {attempt}\n{self.job.story()}"
        return found[0]

    def finding(self, leg: Expected) -> Mapping[str, Any]:
        incident = self.incident(leg)
        assert incident.verdict["findings"], incident.line()
        finding: Mapping[str, Any] = incident.verdict["findings"][0]
        return finding


def legs_of(legs: tuple[Expected, ...]) -> list[Any]:
    return [pytest.param(leg, id=leg.scenario) for leg in legs]


# -- what must be true of each scenario --------------------------------------------------------------------------------
class Checks:
    """Every scenario gets these; a subclass has a fixture ``tour`` and the parameters ``leg``."""

    def test_class_and_culprit(self, tour: Tour, leg: Expected) -> None:
        incident = tour.incident(leg)
        assert incident.cls in leg.classes, incident.line()
        assert tuple(incident.ranks) == leg.ranks, incident.line()

    def test_operation_in_which_the_others_wait(self, tour: Tour, leg: Expected) -> None:
        finding = tour.finding(leg)
        assert finding["op"] in leg.ops, finding
        if leg.groups:
            assert str(finding["group"]).split(" ")[0] in leg.groups, finding
        if leg.seqs:
            assert finding["seq"] in leg.seqs, finding

    def test_place_of_the_fault(self, tour: Tour, leg: Expected) -> None:
        finding = tour.finding(leg)
        assert finding["callsite"] in leg.sites | (set() if leg.has_site else {None}), finding

    def test_victims_and_innocents(self, tour: Tour, leg: Expected) -> None:
        verdict = tour.incident(leg).verdict
        assert tuple(verdict["victims"]) == leg.victims, tour.incident(leg).line()
        innocent = set(range(tour.ranks)) - set(leg.ranks)
        for finding in verdict["findings"]:
            assert finding["confidence"] < INNOCENT or not innocent & set(finding["ranks"]), finding

    def test_is_noticed_in_time(self, tour: Tour, leg: Expected) -> None:
        limit_s = STEP_LIMIT_S if leg.notices == HANG else 0.0
        verdict = tour.incident(leg).verdict
        assert verdict["detection_delay_s"] < limit_s + LATE_S, verdict

    def test_flight_records_are_kept(self, tour: Tour, leg: Expected) -> None:
        """Of each rank that could give one: the dump as torch wrote it, and what is needed to read it alone."""
        folder = tour.incident(leg).folder
        for rank in set(range(tour.ranks)) - set(leg.blind):
            names = sorted(f.name for f in folder.iterdir() if f.name.startswith(f"rank_{rank}.flight."))
            assert any(name.endswith((".pickle", ".json")) and name.count(".") > 2 for name in names), names
            sidecar = folder / f"rank_{rank}.flight.json"
            assert json.loads(sidecar.read_text())["rank"] == rank
            for name in names:
                assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600, name

    def test_analysis_afterwards_agrees(self, tour: Tour, leg: Expected) -> None:
        report = postmortem(tour.incident(leg).folder)
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


def check_end(tour: Tour) -> None:
    """The attempt after the last fault found nothing wrong, and trained to its end."""
    assert tour.exit_code == 0, tour.job.story()
    assert len(tour.job.incidents()) == len(tour.legs), tour.job.story()
    for rank in range(tour.ranks):
        assert tour.job.events("done", rank=rank, attempt=len(tour.legs)), tour.job.story()
    assert tour.job.left_behind() == []


# -- the tours ---------------------------------------------------------------------------------------------------------
def test_every_scenario_is_on_a_tour() -> None:
    source = (SCRIPTS / SCRIPT).read_text()
    there = set(re.findall(r"^@scenario\(.*\)\ndef (\w+)\(", source, re.MULTILINE))
    assert {leg.scenario for legs in (SAMPLE, TRIOS, PAIRS, SMALL_RING) for leg in legs} | {"ok"} == there


@pytest.mark.deadline(400)
@pytest.mark.parametrize("leg", legs_of(SAMPLE))
class TestSample(Checks):
    @pytest.fixture(scope="class")
    def tour(self, sample: Tour) -> Tour:
        return sample


@pytest.fixture(scope="module")
def sample(start_for_module: JobStarter) -> Tour:
    return Tour(start_for_module, "sample", 3, SAMPLE)


@pytest.mark.deadline(400)
def test_sample_ends_well(sample: Tour) -> None:
    check_end(sample)


@pytest.fixture(scope="module")
def trios(start_for_module: JobStarter) -> Tour:
    return Tour(start_for_module, "trios", 3, TRIOS)


@pytest.mark.slow
@pytest.mark.deadline(900)
@pytest.mark.parametrize("leg", legs_of(TRIOS))
class TestThreeRanks(Checks):
    @pytest.fixture(scope="class")
    def tour(self, trios: Tour) -> Tour:
        return trios


@pytest.mark.slow
@pytest.mark.deadline(900)
def test_three_ranks_end_well(trios: Tour) -> None:
    check_end(trios)


@pytest.fixture(scope="module")
def pairs(start_for_module: JobStarter) -> Tour:
    return Tour(start_for_module, "pairs", 2, PAIRS)


@pytest.mark.slow
@pytest.mark.deadline(400)
@pytest.mark.parametrize("leg", legs_of(PAIRS))
class TestTwoRanks(Checks):
    @pytest.fixture(scope="class")
    def tour(self, pairs: Tour) -> Tour:
        return pairs


@pytest.mark.slow
@pytest.mark.deadline(400)
def test_two_ranks_end_well(pairs: Tour) -> None:
    check_end(pairs)


@pytest.fixture(scope="module")
def small_ring(start_for_module: JobStarter) -> Tour:
    return Tour(start_for_module, "small-ring", 4, SMALL_RING, env={"TORCH_FR_BUFFER_SIZE": "20"})


@pytest.mark.slow
@pytest.mark.deadline(400)
@pytest.mark.parametrize("leg", legs_of(SMALL_RING))
class TestSmallRing(Checks):
    @pytest.fixture(scope="class")
    def tour(self, small_ring: Tour) -> Tour:
        return small_ring


@pytest.mark.slow
@pytest.mark.deadline(400)
def test_small_ring_ends_well(small_ring: Tour) -> None:
    check_end(small_ring)
