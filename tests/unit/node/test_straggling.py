"""Who is slow in a job of several nodes: what their agents do, over a store in memory and on a clock of the test."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from steadyrun.core.classes import Action, Mode
from steadyrun.core.records import Finding, RankEvidence, Verdict
from steadyrun.core.timing import TAG_FORWARD_SEEN, Role, StepTiming
from steadyrun.node import straggling
from steadyrun.node.control import ControlChannel, PaceTold
from steadyrun.node.incident import Incident
from steadyrun.node.straggling import ACTIONS, Replacement, Straggling, read_role
from steadyrun.testing.store import FakeAsyncStore, ManualClock, StoreNetwork

TICK_S = 0.5  # how often an agent looks at its board
STEPS = 5  # per tick
STEP_S = TICK_S / STEPS
LEARNED = 90  # steps after which it is known what is normal
Slowness = Callable[[int, int], float]


@dataclass
class Place:
    rank: int
    local_rank: int
    folder: Path

    @property
    def pid(self) -> int:
        return 1000 + self.rank


@dataclass
class Desk:
    """Numbers and files incidents as the real one does, without files."""

    clock: ManualClock
    filed: list[tuple[Incident, list[Finding], list[RankEvidence], Mapping[str, Any]]] = field(default_factory=list)
    problem: str = ""

    def next_number(self) -> int:
        return len(self.filed) + 1

    def open(self, number: int, attempt: int, payload: Mapping[str, Any]) -> Incident:
        at_unix_s, delay_s = payload["detected_at_unix_s"], payload["delay_s"]
        return Incident(number, attempt, Path("i"), payload["trigger"], payload["reason"], at_unix_s, delay_s)

    def report(
        self,
        incident: Incident,
        findings: Sequence[Finding],
        ranks: Sequence[RankEvidence],
        world_size: int,
        details: Mapping[str, Any],
        missing: Sequence[str] = (),
    ) -> tuple[Verdict, str]:
        self.filed.append((incident, list(findings), list(ranks), details))
        verdict = Verdict(
            "r",
            incident.number,
            incident.attempt,
            incident.detected_at_unix_s,
            incident.delay_s,
            Mode.ACT,
            Action.REPORT,
            tuple(findings),
            details={"notes": [f"note {incident.number}"]},
        )
        return verdict, self.problem


class Node:
    """One agent's part, its ranks and what it wrote and said."""

    def __init__(self, job: Job, name: str, group_rank: int, ranks: Sequence[int], action: str) -> None:
        self.job, self.name, self.group_rank = job, name, group_rank
        self.desk = Desk(job.clock)
        self.records: list[tuple[str, dict[str, Any]]] = []
        self.said: list[str] = []
        self.wanted: list[Replacement] = []
        self.is_muted = False
        self.saved = 0
        self.places = [Place(r, i, job.folder / f"rank_{r}") for i, r in enumerate(ranks)]
        for place in self.places:
            place.folder.mkdir()
        self.store: FakeAsyncStore | None = None
        self.channel: ControlChannel | None = None
        self.pace = Straggling(name, job.clock, self.desk, self.record, self.said.append, action, self.wanted.append)

    def record(self, type_: str, **fields: Any) -> None:
        self.records.append((type_, fields))

    def begin(self, attempt: int, nodes: int) -> None:
        if nodes > 1 and self.channel is None:
            self.store = self.job.network.connect(self.name)
            self.channel = ControlChannel(self.store, self.group_rank, nodes)
        self.pace.begin_attempt(attempt, self.job.ranks, self.channel, hosts_store=self.group_rank == 0)

    def tick(self, rows: Mapping[int, list[StepTiming]]) -> None:
        if self.is_muted:
            return
        for message in self.channel.drain() if self.channel is not None else ():
            if isinstance(message, PaceTold):
                self.pace.hear(message)
        self.pace.sample(self.job.clock.now_s(), rows, self.places, self.saved)

    def told(self, event: str | None = None) -> list[dict[str, Any]]:
        """What it wrote of slow ranks."""
        return [f for t, f in self.records if t == "straggler" and event in (None, f["event"])]


class Job:
    """Nodes with some ranks each; one call goes on by half a second of all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock()
        self.network = StoreNetwork(self.clock)
        self.nodes: list[Node] = []
        self.ranks = 0
        self.step = 0
        self.attempt = 0
        self.slowness: Slowness = lambda rank, step: 1.0
        self.noise = random.Random(3)

    def add(self, name: str, ranks: int, action: str = ACTIONS[0]) -> Node:
        mine = range(self.ranks, self.ranks + ranks)
        self.ranks += ranks
        self.nodes.append(Node(self, name, len(self.nodes), mine, action))
        return self.nodes[-1]

    def begin(self, attempt: int = 0, first_step: int = 0) -> None:
        self.attempt, self.step = attempt, first_step
        for node in self.nodes:
            node.begin(attempt, len(self.nodes))

    def timing(self, rank: int, step: int) -> StepTiming:
        busy_s = 0.06 * self.slowness(rank, step) * self.noise.gauss(1.0, 0.01)
        phases = (0.02, busy_s - 0.035, 0.01, 0.005)
        wait_s = max(STEP_S - busy_s, 0.0)
        return StepTiming(step, 0.0, STEP_S, busy_s, *phases, 0.0, wait_s, busy_s, flags=TAG_FORWARD_SEEN)

    def tick(self, ticks: int = 1) -> None:
        for _ in range(ticks):
            self.clock.advance(TICK_S)
            steps = range(self.step, self.step + STEPS)
            self.step += STEPS
            for node in reversed(self.nodes):  # the leader last: it hears what the others have told by then
                node.tick({p.rank: [self.timing(p.rank, s) for s in steps] for p in node.places})

    def tick_until(self, what: Callable[[], Any], most: int = 200) -> Any:
        for _ in range(most):
            if value := what():
                return value
            self.tick()
        raise AssertionError(f"not by step {self.step}: {[n.told() for n in self.nodes]}")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for node in job.nodes:
        node.pace.close()
        if node.channel is not None:
            node.channel.close()


def slow_from(ranks: Sequence[int], first: int, last: int = 1 << 60, by: float = 1.5) -> Slowness:
    return lambda rank, step: by if rank in ranks and first <= step <= last else 1.0


# -- who is named, and where -------------------------------------------------------------------------------------------
def test_a_slow_rank_of_another_node_is_named_with_its_node(job: Job) -> None:
    leader, other = job.add("a", 2), job.add("b", 2)
    job.slowness = slow_from([3], LEARNED + 20)
    job.begin()
    (began,) = job.tick_until(lambda: leader.told("began"))
    alarm = began["alarm"]
    assert (alarm.ranks, alarm.node, began["incident"]) == ((3,), "b", 1)
    assert began["summary"].startswith("rank 3 on b takes ")
    assert any(line.startswith("steadyrun: slow: rank 3 on b takes") for line in leader.said)
    assert leader.said[-1] == "steadyrun: note 1", "what the desk knows of the node is told as well"
    assert (other.told(), other.said) == ([], []), "only the leader judges"


def test_the_incident_says_who_since_when_and_that_training_goes_on(job: Job) -> None:
    leader, _ = job.add("a", 2), job.add("b", 2)
    job.slowness = slow_from([3], LEARNED + 20)
    job.begin()
    job.tick_until(lambda: leader.told("began"))
    ((incident, (finding,), (rank,), details),) = leader.desk.filed
    assert (incident.number, incident.trigger, incident.attempt) == (1, "straggler", 0)
    assert (finding.ranks, finding.nodes, finding.section) == ((3,), ("b",), "backward")
    assert finding.since_unix_s is not None
    assert incident.delay_s == pytest.approx(incident.detected_at_unix_s - finding.since_unix_s)
    assert 0 < incident.delay_s < 30
    assert (rank.rank, rank.local_rank, rank.node, rank.pid) == (3, 1, "b", 1003)
    assert details["straggler"]["ranks"] == [3]
    (record,) = [f for t, f in leader.records if t == "incident"]
    assert record["verdict"].action is Action.REPORT


def test_a_node_of_which_all_ranks_are_slow_is_named_as_a_node(job: Job) -> None:
    leader, _ = job.add("a", 3), job.add("b", 3)
    job.slowness = slow_from([3, 4, 5], LEARNED + 20)
    job.begin()
    (began,) = job.tick_until(lambda: leader.told("began"))
    assert began["summary"].startswith("node b (ranks 3-5) takes ")
    assert [r.rank for r in leader.desk.filed[0][2]] == list(began["alarm"].ranks)


def test_a_node_alone_judges_without_a_store(job: Job) -> None:
    alone = job.add("a", 4)
    job.slowness = slow_from([1], LEARNED + 20)
    job.begin()
    (began,) = job.tick_until(lambda: alone.told("began"))
    assert (began["alarm"].ranks, began["alarm"].node) == ((1,), "a")


def test_what_is_over_is_said_with_what_it_has_cost(job: Job) -> None:
    leader, _ = job.add("a", 2), job.add("b", 2)
    job.slowness = slow_from([3], LEARNED + 20, LEARNED + 120)
    job.begin()
    (ended,) = job.tick_until(lambda: leader.told("ended"), 400)
    alarm = ended["alarm"]
    assert (alarm.ranks, ended["incident"]) == ((3,), 1)
    assert (
        f"no longer slow: rank 3 on b, from step {alarm.first_step} to step {alarm.over_step}; the job"
        in (leader.said[-1])
    )


def test_ranks_that_differ_by_what_they_are_given_are_no_incident(job: Job) -> None:
    leader = job.add("a", 4)
    job.slowness = lambda rank, step: job.noise.uniform(0.7, 1.4)
    job.begin()
    (began,) = job.tick_until(lambda: leader.told("began"))
    assert (began["alarm"].kind.value, began["incident"]) == ("data_imbalance", None)
    assert leader.desk.filed == []
    assert "unequal batches" in leader.said[0]


# -- nodes that say nothing --------------------------------------------------------------------------------------------
def test_a_muted_agent_does_not_stop_the_judgement(job: Job) -> None:
    leader, other = job.add("a", 3), job.add("b", 2)
    job.slowness = slow_from([1], LEARNED + 60)
    job.begin()
    job.tick(LEARNED // STEPS)
    other.is_muted = True
    (began,) = job.tick_until(lambda: leader.told("began"))
    assert began["alarm"].ranks == (1,)
    other.is_muted = False
    job.tick(30)
    assert [t["alarm"].ranks for t in leader.told("began")] == [(1,)], "who was silent is not slow"


def test_a_cut_link_does_not_stop_the_judgement(job: Job) -> None:
    leader, _ = job.add("a", 3), job.add("b", 2)
    job.slowness = slow_from([1], LEARNED + 60)
    job.begin()
    job.tick(LEARNED // STEPS)
    job.network.cut("b", 1e9)
    (began,) = job.tick_until(lambda: leader.told("began"))
    assert began["alarm"].ranks == (1,)


def test_a_slow_link_delays_a_node_and_accuses_it_of_nothing(job: Job) -> None:
    leader, _ = job.add("a", 2), job.add("b", 2)
    job.network.slow("b", 1.5)
    job.slowness = slow_from([3], LEARNED + 60)
    job.begin()
    (began,) = job.tick_until(lambda: leader.told("began"))
    assert began["alarm"].ranks == (3,)
    assert abs(began["alarm"].first_step - (LEARNED + 60)) <= 3


def test_rubbish_from_a_node_is_left_out_and_the_rest_is_judged(job: Job) -> None:
    leader, _ = job.add("a", 3), job.add("b", 2)
    job.slowness = slow_from([1], LEARNED)
    job.begin()

    def tell_rubbish() -> list[dict[str, Any]]:
        for payload in (b"", b"SRP1", os.urandom(300)):
            leader.pace.hear(PaceTold(0, 1, payload))
        return leader.told("began")

    (began,) = job.tick_until(tell_rubbish)
    assert began["alarm"].ranks == (1,)


def test_what_is_told_of_another_attempt_counts_for_nothing(job: Job) -> None:
    leader, _ = job.add("a", 2), job.add("b", 2)
    job.begin()
    job.tick(LEARNED // STEPS)
    old = job.network.values["pace/0/1"]
    job.begin(attempt=1)
    job.slowness = slow_from([3], LEARNED)
    leader.pace.hear(PaceTold(0, 1, old))
    leader.pace.hear(PaceTold(2, 1, old))
    (began,) = job.tick_until(lambda: leader.told("began"))
    assert abs(began["alarm"].first_step - LEARNED) <= 3


def test_before_and_after_an_attempt_nothing_is_heard_or_told(job: Job) -> None:
    node = job.add("a", 2)
    node.tick({0: [job.timing(0, 1)]})
    job.begin()
    job.tick(3)
    node.pace.end_attempt()
    node.tick({0: [job.timing(0, 100)]})
    node.pace.hear(PaceTold(0, 1, b"x"))
    node.pace.close()
    assert node.records == []


# -- what a follower tells ---------------------------------------------------------------------------------------------
def test_a_follower_tells_once_a_second_and_only_what_is_new(job: Job) -> None:
    job.add("a", 2)
    job.add("b", 2)
    job.begin()
    told = []
    for _ in range(12):
        job.tick()
        told.append(job.network.values.get("pace/0/1"))
    assert len(set(told) - {None}) == 6
    assert "pace/0/0" not in job.network.values, "the leader tells nobody"


def test_roles_that_ranks_write_decide_who_is_compared(job: Job) -> None:
    leader, other = job.add("a", 2), job.add("b", 2)
    for node, stage in ((leader, 0), (other, 1)):
        for place in node.places:
            text = json.dumps({"mesh": {"dp": place.local_rank, "pp": stage}, "key": [["pp", stage]]})
            (place.folder / "role.json").write_text(text)
    job.slowness = lambda rank, step: 1.5 if rank >= 2 else 1.0
    job.begin()
    (began,) = job.tick_until(lambda: leader.told("began"))
    assert began["alarm"].kind.value == "stage_imbalance"
    assert "pp=1" in began["summary"]
    assert leader.desk.filed == []


def test_a_role_that_is_written_anew_is_read_anew(job: Job) -> None:
    alone = job.add("a", 4)
    job.begin()
    job.tick(10)
    path = alone.places[0].folder / "role.json"
    path.write_text(json.dumps({"key": [["pp", 0]]}))
    job.tick(10)
    path.write_text("{")
    os.utime(path, ns=(1, 1))
    job.tick(10)
    assert alone.told() == []
    assert read_role(path) is None


# -- restarts ----------------------------------------------------------------------------------------------------------
def test_a_restart_during_an_alarm_ends_it_and_begins_anew(job: Job) -> None:
    leader, _ = job.add("a", 2), job.add("b", 2)
    job.slowness = slow_from([3], LEARNED + 20)
    job.begin()
    job.tick_until(lambda: leader.told("began"))
    job.tick(10)
    job.begin(attempt=1, first_step=LEARNED)
    (lasts,) = leader.told("lasts")
    assert (lasts["alarm"].ranks, lasts["incident"]) == ((3,), 1)
    assert lasts["alarm"].lost_s > 0
    job.slowness = lambda rank, step: 1.0
    job.tick(30)
    assert [t["event"] for t in leader.told()] == ["began", "lasts"], "the new attempt is healthy"


def test_who_is_slow_again_soon_has_its_incident_already(job: Job) -> None:
    leader, _ = job.add("a", 2), job.add("b", 2)
    for attempt in range(2):
        job.slowness = slow_from([3], LEARNED)
        job.begin(attempt)
        job.tick_until(lambda: len(leader.told("began")) > job.attempt)
    assert [t["incident"] for t in leader.told("began")] == [1, 1]
    assert len(leader.desk.filed) == 1


def test_who_is_slow_again_much_later_has_another_incident(job: Job) -> None:
    leader, _ = job.add("a", 2), job.add("b", 2)
    for attempt in range(2):
        job.slowness = slow_from([3], LEARNED)
        job.begin(attempt)
        job.tick_until(lambda: len(leader.told("began")) > job.attempt)
        job.clock.advance(straggling.INCIDENT_AGAIN_S)
    assert [t["incident"] for t in leader.told("began")] == [1, 2]


def test_a_run_has_so_many_incidents_and_no_more(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straggling, "MOST_INCIDENTS", 1)
    leader = job.add("a", 5)
    job.slowness = lambda rank, step: 1.5 if step >= LEARNED + 40 * (5 - rank) and rank >= 3 else 1.0
    job.begin()
    job.tick_until(lambda: len(leader.told("began")) == 2)
    assert [(t["alarm"].ranks, t["incident"]) for t in leader.told("began")] == [((4,), 1), ((3,), None)]
    assert len(leader.desk.filed) == 1
    assert sum("slow: rank 3" in line for line in leader.said) == 1, "lines and records go on"


def test_an_incident_that_cannot_be_written_is_told_all_the_same(job: Job) -> None:
    leader = job.add("a", 4)
    leader.desk.problem = "No space left on device"
    job.slowness = slow_from([3], LEARNED)
    job.begin()
    job.tick_until(lambda: leader.told("began"))
    assert any("cannot be looked up later: i: No space left on device" in line for line in leader.said)


def test_what_is_slow_now_is_written_every_minute(job: Job) -> None:
    leader = job.add("a", 4)
    job.slowness = slow_from([3], LEARNED)
    job.begin()
    job.tick_until(lambda: leader.told("began"))
    counts = []
    for _ in range(3):
        job.clock.advance(straggling.FIGURES_S)
        for _ in range(2):
            job.tick()
            counts.append(len(leader.told("now")))
    assert counts == [1, 1, 2, 2, 3, 3]
    lost_s = [t["alarm"].lost_s for t in leader.told("now")]
    assert lost_s == sorted(lost_s)
    assert lost_s[0] < lost_s[2]


# -- acting ------------------------------------------------------------------------------------------------------------
def acting_job(job: Job) -> tuple[Node, Node]:
    leader, other = job.add("a", 2, ACTIONS[1]), job.add("b", 2, ACTIONS[1])
    job.slowness = slow_from([3], LEARNED, by=1.6)
    return leader, other


def save_often(job: Job, node: Node) -> Callable[[], list[Replacement]]:
    def look() -> list[Replacement]:
        node.saved = job.step // 50
        return node.wanted

    return look


def test_a_report_is_all_that_follows_by_default(job: Job) -> None:
    leader, _ = job.add("a", 2), job.add("b", 2)
    job.slowness = slow_from([3], LEARNED, by=1.6)
    job.begin()
    for _ in range(80):
        save_often(job, leader)()
        job.tick()
    assert leader.told("began")
    assert (leader.wanted, leader.told("act")) == ([], [])


def test_once_it_pays_the_slow_node_is_to_be_replaced(job: Job) -> None:
    leader, _ = acting_job(job)
    job.begin()
    (wanted,) = job.tick_until(save_often(job, leader))
    assert (wanted.attempt, wanted.group_rank, wanted.node, wanted.hosts_store) == (0, 1, "b", False)
    assert wanted.reason.startswith("rank 3 on b takes ")
    assert " lost, " in wanted.reason
    (act,) = leader.told("act")
    assert (act["alarm"].ranks, act["incident"]) == ((3,), 1)
    assert act["alarm"].lost_s >= 0.5, "the start took half a second"


def test_it_is_asked_for_once(job: Job) -> None:
    leader, _ = acting_job(job)
    job.begin()
    job.tick_until(save_often(job, leader))
    for _ in range(20):
        save_often(job, leader)()
        job.tick()
    assert len(leader.wanted) == len(leader.told("act")) == 1
    job.begin(attempt=1)
    for _ in range(60):
        save_often(job, leader)()
        job.tick()
    assert len(leader.told("began")) == 2, "it is slow again, in the restarted job"
    assert leader.told("began")[1]["alarm"].step < job.step - 20 * STEPS, "long enough to pay"
    assert len(leader.wanted) == 1, "a restart has not helped"


def test_without_checkpoints_acting_costs_the_whole_run(job: Job) -> None:
    """However much is lost: all that was trained would have to be trained again."""
    leader, _ = acting_job(job)
    job.begin()
    job.tick_until(lambda: leader.told("began"))
    job.tick(60)
    assert leader.wanted == []


def test_it_is_known_that_the_leaders_node_hosts_the_store(job: Job) -> None:
    leader, _ = acting_job(job)
    job.slowness = slow_from([0], LEARNED, by=1.6)
    job.begin()
    (wanted,) = job.tick_until(save_often(job, leader))
    assert (wanted.group_rank, wanted.node, wanted.hosts_store) == (0, "a", True)


def test_an_action_that_is_none_is_refused() -> None:
    clock = ManualClock()
    with pytest.raises(ValueError, match="action must be one of report, checkpoint-restart-exclude, got 'stop'"):
        Straggling("a", clock, Desk(clock), lambda type_, **fields: None, lambda line: None, "stop")


# -- role.json ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "role"),
    [
        ('{"mesh": {"dp": 1, "pp": 2}, "key": [["pp", 2]]}', Role("pp=2", ("['pp', 2]",))),
        ('{"mesh": {"dp": 1}, "key": []}', Role("all", ())),
        ('{"key": [1, "x"], "name": "mine"}', Role("mine", (1, "x"))),
        ('{"mesh": null, "key": []}', Role("all", ())),
        ("{", None),
        ("[]", None),
        ('{"mesh": {}}', None),
        ('{"key": "pp"}', None),
        ('{"key": 5}', None),
        ('{"key": [], "mesh": 7}', None),
        ("[" * 70_000, None),
        ('{"key": [' + "1," * 70_000 + "1]}", None),
    ],
)
def test_a_role_is_what_the_rank_wrote_or_nothing(tmp_path: Path, text: str, role: Role | None) -> None:
    (tmp_path / "role.json").write_text(text)
    assert read_role(tmp_path / "role.json") == role


def test_a_rank_without_a_role_has_none(tmp_path: Path) -> None:
    assert read_role(tmp_path / "role.json") is None
