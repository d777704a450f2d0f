"""Every kind of fault that the injector knows, in a DDP job of two ranks: class, culprit, delay, evidence, clean-up.

A tour is one job in which each attempt suffers the next fault, so that torch is imported once and the restarts run on
warm standbys. The tours together cover every kind; a test below fails when the injector learns one that no tour has.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from jobs import Incident, JobStarter

from steadyrun.core.classes import FaultClass
from steadyrun.testing.faults import EXPECTED, expected_class, parse_faults

RANKS = 2
PACE_S = 0.1
APART = 35  # steps between two faults: enough for standbys to get ready
STEP_LIMIT_S = 3.0
TEARDOWN_LIMIT_S = 10.0  # the end of an interpreter with torch takes seconds on a busy machine
LATE_S = 1.5  # how much later than its limit a fault may be noticed on a machine that is busy with other things


@dataclass(frozen=True)
class Leg:
    """One attempt of a tour: what strikes (``step`` and ``attempt`` are added) and what is expected of the verdict.

    Attributes:
        faults: the last one decides; those before it only set the scene.
        rank: the culprit.
        at_end: it shows when the script is done.
    """

    faults: tuple[str, ...]
    rank: int
    at_end: bool = False

    @property
    def name(self) -> str:
        return self.faults[-1].replace(" ", "_")

    @property
    def expected(self) -> FaultClass:
        cls = expected_class(parse_faults(self.faults[-1])[0])
        assert cls is not None
        return cls


CRASHES = (
    Leg(("kill rank=1",), 1),
    Leg(("raise rank=0",), 0),
    Leg(("segfault rank=1",), 1),
    Leg(("grandchildren rank=1", "exit rank=1 code=3"), 1),
    Leg(("shm rank=0", "abort rank=0"), 0),
    Leg(("sysexit rank=1 code=4",), 1),
    Leg(("ignore_term rank=0", "kill rank=1 signal=BUS"), 1),
    Leg(("oom rank=0 bytes=128M",), 0),
)
HANGS = (
    Leg(("hang rank=0",), 0),
    Leg(("stop rank=1",), 1),
    Leg(("busy_c rank=0",), 0),
    Leg(("hang rank=1 where=collective",), 1),
    Leg(("dataloader rank=0",), 0),
    Leg(("hang rank=1 where=teardown",), 1, at_end=True),
)
MORE_HANGS = (
    Leg(("busy rank=0",), 0),
    Leg(("ignore_term rank=0", "hang rank=0 where=sleep"), 0),
    Leg(("hang rank=1 where=dataloader",), 1),
    Leg(("teardown rank=0",), 0, at_end=True),
)
# Nothing is wrong with the rank, or not for longer than the limit: no incident may come of it.
THREAD = "teardown rank=1 where=thread"
HARMLESS = ("sleep rank=0 seconds=1 step=5", "ignore_term rank=1 step=8", "stop rank=1 seconds=1 step=12")


def plan(legs: tuple[Leg, ...]) -> str:
    """The text of STEADYRUN_FAULTS in which leg number n strikes in attempt n."""
    texts: list[str] = []
    for attempt, leg in enumerate(legs):
        step = APART * (attempt + 1)
        texts += [f"{fault} step={step} attempt={attempt}" for fault in leg.faults]
    return "; ".join(texts)


class Tour:
    """A finished job that suffered *legs* one after the other."""

    def __init__(self, start: JobStarter, legs: tuple[Leg, ...], name: str) -> None:
        self.legs = legs
        steps = APART * len(legs) + 20
        self.steps = steps
        options = ["--standalone", f"--nproc-per-node={RANKS}", f"--ft-step-timeout={STEP_LIMIT_S}"]
        options += [f"--ft-teardown-timeout={TEARDOWN_LIMIT_S}", "--ft-restart-grace=2"]
        self.job = start(
            "train.py", options, [steps, PACE_S], faults=plan(legs), env={"LOADER_WORKERS": "1"}, name=name
        )
        self.exit_code = self.job.wait(480)

    @property
    def story(self) -> str:
        return self.job.story()

    def incident(self, leg: Leg) -> Incident:
        attempt = self.legs.index(leg)
        found = [i for i in self.job.incidents() if i.verdict["attempt"] == attempt]
        assert len(found) == 1, f"{len(found)} incidents in attempt {attempt}\n{self.story}"
        return found[0]

    def refusal(self, leg: Leg) -> str:
        """Why the injector could not do it on this machine, or an empty text."""
        text = leg.faults[-1]
        return next((str(r["refused"]) for r in self.job.struck() if r["text"].startswith(text) and "refused" in r), "")


def legs_of(*tours: tuple[Leg, ...]) -> list[object]:
    return [pytest.param(leg, id=leg.name) for tour in tours for leg in tour]


@pytest.fixture(scope="module")
def crashes(start_for_module: JobStarter) -> Tour:
    return Tour(start_for_module, CRASHES, "crashes")


@pytest.fixture(scope="module")
def hangs(start_for_module: JobStarter) -> Tour:
    return Tour(start_for_module, HANGS, "hangs")


@pytest.fixture(scope="module")
def more_hangs(start_for_module: JobStarter) -> Tour:
    return Tour(start_for_module, MORE_HANGS, "more-hangs")


def test_tours_cover_every_kind_of_fault() -> None:
    shown = {parse_faults(f)[0].name for tour in (CRASHES, HANGS, MORE_HANGS) for leg in tour for f in leg.faults}
    shown |= {parse_faults(f)[0].name for f in (*HARMLESS, THREAD)}
    bare = {name for name in EXPECTED if any(n.startswith(f"{name} where=") for n in EXPECTED)}
    slow = {name for name, cls in EXPECTED.items() if cls is FaultClass.STRAGGLER}  # in straggler/: they end no attempt
    wrong = {name for name, cls in EXPECTED.items() if cls is FaultClass.SILENT_CORRUPTION}  # in sdc/
    assert set(EXPECTED) - bare - slow - wrong <= shown


# -- what must be true of each leg -------------------------------------------------------------------------------------
def check_verdict(tour: Tour, leg: Leg) -> None:
    if refusal := tour.refusal(leg):
        pytest.skip(f"cannot be injected here: {refusal}")
    incident = tour.incident(leg)
    verdict = incident.verdict
    assert verdict["schema"] == "steadyrun.verdict/1"
    assert verdict["mode"] == "act"
    assert incident.cls == leg.expected.value, incident.line()
    assert incident.ranks == [leg.rank], incident.line()
    assert leg.rank not in verdict["victims"]
    assert verdict["action"] == "restart", incident.line()
    assert verdict["findings"][0]["summary"]


def check_training_came_back(tour: Tour, leg: Leg) -> None:
    attempt = tour.legs.index(leg) + (0 if tour.refusal(leg) else 1)
    if leg.at_end:
        for rank in range(RANKS):
            assert tour.job.events("done", rank=rank), tour.story
        return
    fault_step = APART * (tour.legs.index(leg) + 1)
    for rank in range(RANKS):
        reached = [e["step"] for e in tour.job.steps(rank=rank) if e["attempt"] >= attempt]
        assert reached, f"rank {rank} did no step after the restart\n{tour.story}"
        assert max(reached) > fault_step


def check_delay(tour: Tour, leg: Leg, limit_s: float) -> None:
    if refusal := tour.refusal(leg):
        pytest.skip(f"cannot be injected here: {refusal}")
    verdict = tour.incident(leg).verdict
    assert verdict["detection_delay_s"] < limit_s + LATE_S, verdict
    struck = [r for r in tour.job.struck() if r["attempt"] == tour.legs.index(leg) and r["rank"] == leg.rank][-1]
    noticed_s = float(verdict["detected_at_unix_s"]) - float(struck["at_unix_s"])
    assert noticed_s < limit_s + LATE_S, f"noticed {noticed_s:.2f} s after the fault; the limit was {limit_s} s"


def check_evidence_before_kill(tour: Tour, leg: Leg) -> None:
    """Stacks of every rank that lived were on disk before the agent signalled anybody."""
    attempt = tour.legs.index(leg)
    exits = [r for r in tour.job.journal("rank_exited", attempt=attempt) if r["by_us"]]
    assert exits, tour.story
    first_exit_unix_s = min(float(r["at_unix_s"]) for r in exits)
    folder = tour.job.folder
    assert folder is not None
    incident = tour.incident(leg)
    for record in exits:
        if leg.faults[-1].startswith("stop") and record["rank"] == leg.rank:
            assert incident.cls == "stopped_process"  # it runs no signal handler: its state is the evidence
            continue
        stacks = folder / "attempts" / str(attempt) / f"rank_{record['rank']}" / "stacks.txt"
        text = stacks.read_text()
        assert "most recent call first" in text, f"no stack of rank {record['rank']}"
        assert "train.py" in text or leg.at_end, text
    early = [f for f in incident.folder.rglob("*") if f.is_file() and f.stat().st_mtime <= first_exit_unix_s]
    assert early, f"no evidence in {incident.folder} before the first kill"
    named = [e for finding in incident.verdict["findings"] for e in finding["evidence"]]
    assert named
    for name in named:
        assert any((base / name).exists() for base in (folder, incident.folder)), f"{name} is named and not there"


def check_end(tour: Tour) -> None:
    assert tour.exit_code == 0, tour.story
    for rank in range(RANKS):
        assert tour.job.newest_step(rank) == tour.steps - 1
    assert tour.job.left_behind() == []


# -- the tours ---------------------------------------------------------------------------------------------------------
@pytest.mark.deadline(600)
class TestCrashes:
    @pytest.mark.parametrize("leg", legs_of(CRASHES))
    def test_verdict_names_class_and_culprit(self, crashes: Tour, leg: Leg) -> None:
        check_verdict(crashes, leg)

    @pytest.mark.parametrize("leg", legs_of(CRASHES))
    def test_training_comes_back(self, crashes: Tour, leg: Leg) -> None:
        check_training_came_back(crashes, leg)

    @pytest.mark.parametrize("leg", legs_of(CRASHES))
    def test_death_is_noticed_at_once(self, crashes: Tour, leg: Leg) -> None:
        # Python ends threads and modules before the process; memory has to be filled before the kernel kills
        takes_its_time = leg.faults[-1].startswith(("raise", "sysexit", "oom"))
        check_delay(crashes, leg, TEARDOWN_LIMIT_S if takes_its_time else 0.0)

    def test_job_ends_well_and_leaves_nothing(self, crashes: Tour) -> None:
        check_end(crashes)

    def test_restarts_ran_on_warm_standbys(self, crashes: Tour) -> None:
        started = crashes.job.journal("rank_started")
        warm = [r for r in started if r["warm"]]
        assert len(warm) >= len(CRASHES), crashes.story
        assert not any(r["warm"] for r in started if r["attempt"] == 0)

    def test_first_failing_rank_is_told_in_the_output(self, crashes: Tour) -> None:
        assert "injected by STEADYRUN_FAULTS" in crashes.job.output
        assert "Traceback" not in crashes.job.output.replace("Traceback (most recent call last)", "", RANKS * 2)


@pytest.mark.deadline(600)
class TestHangs:
    @pytest.mark.parametrize("leg", legs_of(HANGS))
    def test_verdict_names_class_and_culprit(self, hangs: Tour, leg: Leg) -> None:
        check_verdict(hangs, leg)

    @pytest.mark.parametrize("leg", legs_of(HANGS))
    def test_training_comes_back(self, hangs: Tour, leg: Leg) -> None:
        check_training_came_back(hangs, leg)

    @pytest.mark.parametrize("leg", [leg for leg in HANGS if not leg.at_end], ids=lambda leg: leg.name)
    def test_hang_is_noticed_soon_after_its_limit(self, hangs: Tour, leg: Leg) -> None:
        check_delay(hangs, leg, STEP_LIMIT_S)

    @pytest.mark.parametrize("leg", [leg for leg in HANGS if not leg.at_end], ids=lambda leg: leg.name)
    def test_evidence_is_on_disk_before_the_kill(self, hangs: Tour, leg: Leg) -> None:
        check_evidence_before_kill(hangs, leg)

    def test_job_ends_well_and_leaves_nothing(self, hangs: Tour) -> None:
        check_end(hangs)


@pytest.mark.slow
@pytest.mark.deadline(600)
class TestMoreHangs:
    @pytest.mark.parametrize("leg", legs_of(MORE_HANGS))
    def test_verdict_names_class_and_culprit(self, more_hangs: Tour, leg: Leg) -> None:
        check_verdict(more_hangs, leg)

    @pytest.mark.parametrize("leg", legs_of(MORE_HANGS))
    def test_training_comes_back(self, more_hangs: Tour, leg: Leg) -> None:
        check_training_came_back(more_hangs, leg)

    def test_job_ends_well_and_leaves_nothing(self, more_hangs: Tour) -> None:
        check_end(more_hangs)


def test_a_thread_that_keeps_the_process_from_ending_is_found(start: JobStarter) -> None:
    options = ["--standalone", f"--nproc-per-node={RANKS}", "--ft-teardown-timeout=2", "--ft-standby=off"]
    job = start("steps.py", options, [20, 0.02], faults=f"{THREAD} step=10")
    assert job.wait(60) == 0, job.story()
    (incident,) = job.incidents()
    assert (incident.cls, incident.ranks) == ("teardown_hang", [1]), incident.line()


def test_a_job_whose_scripts_are_done_twice_ends_well_though_a_process_hangs_again(start: JobStarter) -> None:
    options = ["--standalone", f"--nproc-per-node={RANKS}", "--ft-teardown-timeout=2", "--ft-standby=off"]
    job = start("steps.py", options, [22, 0.02], faults=f"{THREAD} attempt=any")
    assert job.wait(60) == 0, job.story()
    assert [(i.cls, i.ranks) for i in job.incidents()] == [("teardown_hang", [1])] * 2, job.story()
    assert [i.verdict["action"] for i in job.incidents()] == ["restart", "stop"]


def test_harmless_events_make_no_incident(start: JobStarter) -> None:
    options = ["--standalone", f"--nproc-per-node={RANKS}", f"--ft-step-timeout={STEP_LIMIT_S}", "--ft-standby=off"]
    job = start("steps.py", options, [40, 0.05], faults="; ".join(HARMLESS))
    assert job.wait(60) == 0, job.story()
    assert {r["name"] for r in job.struck()} == {parse_faults(f)[0].name for f in HARMLESS}
    assert job.incidents() == []
    assert job.journal("rank_exited", by_us=True) == []
