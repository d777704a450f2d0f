"""Agents that compare the bytes of their ranks: real rings in shared memory, real sockets, a store in memory."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from steadyrun.core.classes import Action, FaultClass, Mode
from steadyrun.core.guards import LOSS, Signal
from steadyrun.core.integrity import (
    AFTER_STEP,
    BEFORE_STEP,
    MOMENTS,
    GroupPlan,
    IntegrityWords,
    RankPlan,
    RingWriter,
    TensorPlan,
    plan_path,
)
from steadyrun.core.records import Finding, Verdict
from steadyrun.core.replay import NEXT, THIRD, ReplayPlace, ReplayReport, ReplayWords, report_path
from steadyrun.integrity.coefficients import MASK, large_factors, small_factors
from steadyrun.integrity.roots import root_of
from steadyrun.node.control import AnswerTold, AskTold, ControlChannel, RootsTold
from steadyrun.node.incident import Incident
from steadyrun.node.integrity import Case, Integrity
from steadyrun.testing.store import ManualClock, StoreNetwork

NAMES = ("a.weight", "b.weight", "optimizer.a.weight.exp_avg")
WORD, BYTES = 300, 8192
WEIGHT = small_factors()[0] * large_factors()[WORD]


class Rank:
    """What a rank does with ring, plan and socket, without training."""

    def __init__(self, rank: int, world: int, root: Path, has_replicas: bool = True) -> None:
        self.rank, self.local_rank, self.pid = rank, rank, os.getpid()
        self.folder = root / f"rank_{rank}"
        self.folder.mkdir()
        self.leaf = {n: 1000 + i for i, n in enumerate(NAMES)}
        self.kept: dict[tuple[str, int, str], int] = {}
        self.checks = self.reports = 0
        self.signals: tuple[Signal, ...] = ()
        self._ring = RingWriter(os.getpid(), len(NAMES))
        ranks = tuple(range(world)) if has_replicas else (rank,)
        tensors = tuple(TensorPlan(n, "parameter", "float32", BYTES // 4, 4) for n in NAMES)
        plan = RankPlan(1, rank, 0, (GroupPlan(ranks, 0, len(NAMES)),), tensors, device_uuid=f"GPU-{rank}")
        plan_path(self.folder, 1).write_text(plan.to_json())
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(self.folder / "evidence.sock"))
        self._listening.listen(8)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def restart(self) -> None:
        """Another incarnation, which has loaded what is right."""
        self._ring.close()
        self._ring = RingWriter(os.getpid(), len(NAMES))
        self.leaf = {n: 1000 + i for i, n in enumerate(NAMES)}
        self.checks = 0

    def flip(self, name: str, bit: int) -> None:
        self.leaf[name] += WEIGHT << bit

    def check(self, step: int, moment: int = AFTER_STEP) -> None:
        for name, leaf in self.leaf.items():
            self.kept[name, step, MOMENTS[moment]] = leaf + step & MASK
        roots = [root_of([self.leaf[n] + step & MASK], BYTES) for n in NAMES]
        self._put(step, moment, roots)

    def spike(self, *steps: int) -> None:
        """Losses after these steps were out of line."""
        first = len(self.signals)
        self.signals += tuple(Signal(first + n, step, LOSS, 9.0, 1.0, 30.0) for n, step in enumerate(steps))

    def rest(self, step: int) -> None:
        """Just before the update of *step*: what the one before has left."""
        for name, leaf in self.leaf.items():
            self.kept[name, step, MOMENTS[BEFORE_STEP]] = leaf + step - 1 & MASK
        self._put(step, BEFORE_STEP, [root_of([self.leaf[n] + step - 1 & MASK], BYTES) for n in NAMES])

    def _put(self, step: int, moment: int, roots: list[int]) -> None:
        self._ring.put(1, step, moment, 0, 1000, roots)
        self.checks += 1

    @property
    def words(self) -> IntegrityWords:
        replay = ReplayWords("on", 200, 0.01, 3, 19, self.reports, self.rank)
        return IntegrityWords("on", self._ring.fd, 1, 1, self.checks, 10, 0.001, 0.1, self.signals, replay)

    def replays(self, of: int, kind: str, step: int, told: int, found: int) -> None:
        """It has computed a microbatch of *of* again, and found something."""
        self.reports += 1
        place = ReplayPlace("a.weight", "float32", 4, BYTES, 1, ((WORD, (5,)),), True)
        report = ReplayReport(step, of, self.rank, kind, (0, 1, 2), told, found, found, 19, 1, (place,))
        report_path(self.folder, self.reports).write_text(report.to_json())

    def _serve(self) -> None:
        while True:
            client, _ = self._listening.accept()
            with client:
                line = client.makefile("rb").readline()
                if not line:
                    return
                asked = json.loads(line)
                leaf = self.kept.get((asked.get("tensor"), asked.get("step"), asked.get("moment")))
                answer: dict[str, Any] = {"error": "not kept"}
                if leaf is not None:
                    answer = {"leaves": [f"{leaf:x}"], "size_bytes": BYTES, "element_bytes": 4, "dtype": "float32"}
                client.sendall(json.dumps(answer).encode() + b"\n")

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.connect(str(self.folder / "evidence.sock"))
        self._thread.join(5.0)
        self._listening.close()
        self._ring.close()


@dataclass
class Desk:
    """Takes reports."""

    root: Path
    reports: list[tuple[Finding, ...]] = field(default_factory=list)

    def next_number(self) -> int:
        return len(self.reports) + 1

    def open(self, number: int, attempt: int, payload: Mapping[str, Any]) -> Incident:
        return Incident(number, attempt, self.root, str(payload["trigger"]), str(payload["reason"]), 0.0)

    def report(self, incident: Incident, findings: Any, ranks: Any, world_size: int, details: Any, missing: Any = ()):
        self.reports.append(tuple(findings))
        verdict = Verdict("r", incident.number, 0, 0.0, 0.0, Mode.ACT, Action.REPORT, tuple(findings), details=details)
        return verdict, ""


class Agent:
    """One node."""

    def __init__(self, job: Job, node: int, ranks: list[Rank], nodes: int, mode: Mode) -> None:
        self.ranks, self.clock = ranks, job.clock
        self.records: list[tuple[str, dict[str, Any]]] = []
        self.said: list[str] = []
        self.cases: list[Case] = []
        self.desk = Desk(job.root)
        self.accepts = True
        self.ordered: list[int] = []
        self.restarts: list[str] = []
        self.channel = ControlChannel(job.network.connect(f"n{node}"), node, nodes)
        self.integrity = Integrity(
            f"n{node}",
            job.clock,
            self.desk,
            lambda type_, **fields: self.records.append((type_, fields)),
            self.said.append,
            lambda name, work: work(),
            lambda then: then(),
            mode,
            self._act,
            self.ordered.append,
            self.restarts.append,
        )
        self.integrity.begin_attempt(0, job.world, self.channel)

    def _act(self, case: Case) -> bool:
        if self.accepts:
            self.cases.append(case)
        return self.accepts

    def look(self) -> None:
        for message in self.channel.drain():
            assert isinstance(message, RootsTold | AskTold | AnswerTold), message
            self.integrity.hear(message)
        self.integrity.sample(self.clock.now_s(), self.ranks, {r.rank: r.words for r in self.ranks}, {})

    def events(self, event: str) -> list[dict[str, Any]]:
        return [f for t, f in self.records if t == "integrity" and f["event"] == event]

    def close(self) -> None:
        self.integrity.close()
        self.channel.close()


class Job:
    """*nodes* agents with *per_node* ranks each."""

    def __init__(self, root: Path, nodes: int, per_node: int, has_replicas: bool, mode: Mode) -> None:
        self.root, self.world = root, nodes * per_node
        self.clock = ManualClock()
        self.network = StoreNetwork(self.clock)
        self.ranks = [Rank(r, self.world, root, has_replicas) for r in range(self.world)]
        self.agents = [Agent(self, n, self.ranks[n * per_node : (n + 1) * per_node], nodes, mode) for n in range(nodes)]

    @property
    def leader(self) -> Agent:
        return self.agents[0]

    def check(self, step: int) -> None:
        for rank in self.ranks:
            rank.check(step)

    def find_wrong_gradient(self, step: int) -> None:
        """Two ranks of the first node say that of rank 2."""
        self.ranks[1].replays(2, NEXT, step, told=1, found=2)
        self.ranks[0].replays(2, THIRD, step, told=1, found=2)

    def rest(self, step: int) -> None:
        for rank in self.ranks:
            rank.rest(step)

    def go_on(self, for_s: float = 6.0) -> None:
        for _ in range(round(for_s / 0.5)):
            self.clock.advance(0.5)
            for agent in self.agents:
                agent.look()

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Any]:
    made: list[Job] = []

    def make(nodes: int = 1, per_node: int = 3, has_replicas: bool = True, mode: Mode = Mode.ACT) -> Job:
        made.append(Job(tmp_path, nodes, per_node, has_replicas, mode))
        return made[-1]

    yield make
    for job in made:
        job.close()


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 3), (3, 1), (2, 2)])
def test_healthy_ranks_agree_and_nobody_is_asked_anything(jobs: Any, nodes: int, per_node: int) -> None:
    job = jobs(nodes, per_node)
    for step in (9, 19, 29):
        job.check(step)
        job.rest(step + 1)
        job.go_on()
    job.leader.integrity.end_attempt()
    assert not job.leader.cases
    assert not job.leader.desk.reports
    compared = job.leader.events("compared")
    assert (sum(c["checks"] for c in compared), sum(c["agreed"] for c in compared)) == (3, 3)
    assert compared[-1]["last_good"] == 29
    assert not [k for k in job.network.values if k.startswith("ask/")]


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 3), (3, 1), (2, 2)])
def test_a_flipped_bit_is_told_with_rank_gpu_tensor_element_and_bit(jobs: Any, nodes: int, per_node: int) -> None:
    job = jobs(nodes, per_node)
    job.check(9)
    job.go_on()
    job.ranks[2].flip("b.weight", 5)
    job.check(19)
    job.go_on()
    (case,) = job.leader.cases
    (finding,) = case.findings
    assert finding.cls is FaultClass.SILENT_CORRUPTION
    assert (finding.ranks, finding.gpus) == ((2,), ("GPU-2",))
    assert finding.nodes == (f"n{2 // per_node}",)
    sdc = case.details["sdc"]
    assert (sdc["cause"], sdc["first_bad_step"], sdc["last_good_step"], sdc["tensors"]) == (
        "device",
        19,
        9,
        ["b.weight"],
    )
    (place,) = sdc["places"]
    assert (place["rank"], place["elements"][0][:2]) == (2, [WORD, [5]])
    assert "element 300, bit 5" in case.reason
    assert case.to == 9


def test_it_goes_back_to_the_newest_checkpoint_that_all_agreed_on(jobs: Any) -> None:
    job = jobs()
    leader = job.leader.integrity
    for step in (9, 14, 19):
        job.check(step)
        job.go_on()
        leader.on_checkpoint("checkpoint_in_memory", step, "")
    leader.on_checkpoint("checkpoint_committed", 9, str(job.root / "step_9"))
    assert [e["step"] for e in job.leader.events("verified")] == [9]
    job.ranks[0].flip("a.weight", 31)
    job.check(24)
    leader.on_checkpoint("checkpoint_in_memory", 24, "")
    job.go_on()
    (case,) = job.leader.cases
    assert (case.to, case.details["sdc"]["back_to_is_verified"]) == (19, True)
    leader.go_back(case, 4, "run")
    assert leader.rollback == {"to": 19, "skip_batches": [], "id": "corruption-run-0-4"}
    other = job.agents[-1].integrity
    other.adopt(json.loads(json.dumps(leader.pack())))
    assert other.rollback == leader.rollback


def test_a_rollback_of_the_past_does_not_make_steps_forgotten(jobs: Any) -> None:
    job = jobs()
    leader = job.leader.integrity
    job.check(9)
    job.ranks[0].flip("a.weight", 31)
    job.check(14)
    job.go_on()
    (case,) = job.leader.cases
    leader.go_back(case, 1, "run")
    leader.begin_attempt(1, job.world, job.leader.channel)
    for rank in job.ranks:
        rank.restart()
    job.check(19)
    job.go_on()
    leader.on_checkpoint("checkpoint_in_memory", 19, "")
    leader.adopt(leader.pack())  # as with every decision
    job.ranks[0].flip("a.weight", 30)
    job.check(24)
    job.go_on()
    assert [c.to for c in job.leader.cases] == [9, 19]


def test_nonsense_from_other_nodes_is_survived(jobs: Any) -> None:
    job = jobs(2, 1)
    for message in (
        RootsTold(0, 1, b"x"),
        AnswerTold(0, 1, {"id": None}),
        AnswerTold(0, 1, {"id": 0, "answers": {"x": 1}}),
    ):
        job.leader.integrity.hear(message)
    for payload in ({"id": "x"}, {"id": 1, "ranks": ["x"]}, {"id": 2, "ranks": [1], "what": "roots"}):
        job.agents[1].integrity.hear(AskTold(0, payload))
    for told in (None, 3, {"rollback": {"to": "x"}}):
        job.leader.integrity.adopt(told)
    assert job.leader.integrity.rollback is None


def test_what_changes_at_rest_needs_no_replica(jobs: Any) -> None:
    job = jobs(2, 2, has_replicas=False)
    for step in (9, 19):
        job.check(step)
        job.rest(step + 1)
        job.go_on()
    job.check(29)
    job.ranks[3].flip("a.weight", 12)
    job.rest(30)
    job.go_on()
    (case,) = job.leader.cases
    sdc = case.details["sdc"]
    assert (sdc["cause"], sdc["ranks"], sdc["first_bad_step"]) == ("device", [3], 30)
    assert sdc["places"][0]["elements"][0][:2] == [WORD, [12]]
    assert case.to == 19  # the checkpoint of step 29 may have been copied after the bit flipped


def test_two_replicas_are_told_apart_by_what_changed_at_rest(jobs: Any) -> None:
    job = jobs(1, 2)
    job.check(9)
    job.rest(10)
    job.check(19)
    job.ranks[1].flip("a.weight", 3)
    job.rest(20)
    job.go_on()
    (case,) = job.leader.cases
    assert case.findings[0].ranks == (1,)


def test_a_script_that_rewrites_tensors_itself_is_left_alone(jobs: Any) -> None:
    job = jobs()
    for step in (9, 19, 29):
        job.check(step)
        for rank in job.ranks:
            rank.flip("b.weight", step)  # as clamping does, on all ranks alike
        job.rest(step + 1)
        job.go_on()
    assert not job.leader.cases
    assert not job.leader.desk.reports


def test_all_ranks_but_one_perturbed_is_software_and_touches_nobody(jobs: Any) -> None:
    job = jobs(1, 4)
    job.check(9)
    job.go_on()
    for rank in job.ranks[1:]:
        for name in NAMES:
            rank.flip(name, rank.rank)
    for step in (19, 29):
        job.check(step)
        job.go_on()
    assert not job.leader.cases
    (findings,) = job.leader.desk.reports
    assert "software" in findings[0].summary
    assert findings[0].nodes == ()


def test_replicas_that_never_agreed_are_worth_one_restart(jobs: Any) -> None:
    job = jobs()
    leader = job.leader.integrity
    for attempt in (0, 1, 2):
        if attempt:
            leader.begin_attempt(attempt, job.world, job.leader.channel)
        for rank in job.ranks:
            rank.restart()
        job.ranks[1].flip("b.weight", 4)  # a tensor of its own, say
        for step in (9, 19):
            job.check(step)
            job.go_on()
    assert [c.attempt for c in job.leader.cases] == [0]
    assert [f[0].ranks for f in job.leader.desk.reports] == [(1,), (1,)]


def test_two_replicas_that_never_agreed_are_left_alone(jobs: Any) -> None:
    job = jobs(1, 2)
    job.ranks[1].flip("b.weight", 4)
    for step in (9, 19):
        job.check(step)
        job.go_on(15.0)
    assert not job.leader.cases
    assert [f[0].ranks for f in job.leader.desk.reports] == [(0, 1)]


def test_observe_mode_reports_once(jobs: Any) -> None:
    job = jobs(mode=Mode.OBSERVE)
    job.check(9)
    job.ranks[1].flip("b.weight", 2)
    for step in (19, 29, 39):
        job.check(step)
        job.go_on()
    assert not job.leader.cases
    assert [f[0].ranks for f in job.leader.desk.reports] == [(1,)]


def test_a_job_that_ends_meanwhile_still_says_what_was_wrong(jobs: Any) -> None:
    job = jobs()
    job.leader.accepts = False
    job.check(9)
    job.ranks[1].flip("b.weight", 2)
    job.check(19)
    for rank in job.ranks:
        job.leader.integrity._look(rank, rank.words, job.clock.now_s())
    job.leader.look()
    job.leader.integrity.close()
    assert [f[0].ranks for f in job.leader.desk.reports] == [(1,)]


def test_a_fault_of_another_kind_is_judged_with_what_the_bytes_say(jobs: Any) -> None:
    job = jobs()
    job.check(9)
    job.go_on()
    job.ranks[1].flip("b.weight", 2)
    job.check(19)
    job.leader.accepts = False
    job.go_on(0.5)
    case = job.leader.integrity.case_of(0)
    assert case is not None
    assert case.findings[0].ranks == (1,)
    assert job.leader.integrity.case_of(1) is None
    job.leader.integrity.end_attempt()
    assert not job.leader.desk.reports


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 3), (3, 1)])
def test_a_loss_out_of_line_makes_all_ranks_check_after_the_same_step(jobs: Any, nodes: int, per_node: int) -> None:
    job = jobs(nodes, per_node)
    job.ranks[2].spike(12)
    job.go_on()
    (step,) = {step for agent in job.agents for step in agent.ordered}
    assert [len(agent.ordered) for agent in job.agents] == [1] * nodes, "one order, heard by all nodes"
    assert step > 12
    (told,) = job.leader.events("out_of_line")
    assert (told["rank"], told["step"], told["value"], told["usual"]) == (2, 12, 9.0, 1.0)
    assert "loss 9 (usually 1) on rank 2 after step 12" in job.leader.said[0]
    assert not job.leader.restarts, "a single value is no spike"
    job.ranks[1].spike(step + 5)
    job.go_on()
    assert len(job.leader.ordered) == 2
    assert len(job.leader.said) == 1, "told once"


def test_a_loss_spike_goes_back_100_steps_once_the_bytes_were_compared(jobs: Any) -> None:
    job = jobs(2, 1)
    leader = job.leader.integrity
    for step in (19, 39, 59, 139):
        job.check(step)
        job.go_on()
        leader.on_checkpoint("checkpoint_in_memory", step, "")
    job.ranks[1].spike(141, 142, 143)
    job.go_on(3.0)
    assert job.leader.events("spike")
    assert not job.leader.restarts, "nothing was compared since"
    job.check(144)
    job.go_on()
    (why,) = job.leader.restarts
    assert "back to step 39, batches 40 to 163 are left out" in why
    wanted = leader.rollback
    assert wanted is not None
    assert (wanted["to"], wanted["skip_batches"]) == (39, [[40, 164]])
    other = job.agents[1].integrity
    other.adopt(json.loads(json.dumps(leader.pack())))
    assert other.rollback == wanted
    assert not job.leader.cases
    assert not job.leader.desk.reports


def test_a_spike_of_a_rank_with_wrong_bytes_is_no_spike(jobs: Any) -> None:
    job = jobs()
    leader = job.leader.integrity
    for step in (19, 39):
        job.check(step)
        job.go_on()
        leader.on_checkpoint("checkpoint_in_memory", step, "")
    job.ranks[1].spike(41, 42, 43)
    job.ranks[1].flip("a.weight", 30)
    job.check(44)
    job.go_on(30.0)
    assert [c.findings[0].ranks for c in job.leader.cases] == [(1,)]
    assert not job.leader.restarts


def test_without_a_verified_checkpoint_a_spike_is_only_told(jobs: Any) -> None:
    job = jobs()
    job.ranks[0].spike(41, 42, 43)
    job.go_on(30.0)
    assert not job.leader.restarts
    assert "no verified checkpoint to go back to" in job.leader.said[-1]
    assert job.leader.integrity.rollback is None


def test_observe_mode_only_tells_of_a_spike(jobs: Any) -> None:
    job = jobs(mode=Mode.OBSERVE)
    job.check(19)
    job.go_on()
    job.leader.integrity.on_checkpoint("checkpoint_in_memory", 19, "")
    job.ranks[0].spike(41, 42, 43)
    job.go_on(30.0)
    assert not job.leader.restarts
    assert "mode observe" in job.leader.said[-1]


@pytest.mark.parametrize(("nodes", "per_node", "node"), [(1, 3, 0), (2, 3, 0), (2, 3, 1)])
def test_a_gradient_that_two_ranks_find_wrong_is_told_by_any_node_and_goes_back_to_before_it(
    jobs: Any, nodes: int, per_node: int, node: int
) -> None:
    job = jobs(nodes, per_node)
    leader = job.leader.integrity
    for step in (9, 19, 24):
        job.check(step)
        leader.on_checkpoint("checkpoint_in_memory", step, "")
        job.go_on()
    ranks = job.agents[node].ranks
    ranks[1].replays(ranks[2].rank, NEXT, 29, told=1, found=2)
    ranks[0].replays(ranks[2].rank, THIRD, 29, told=1, found=2)
    job.go_on()
    assert not job.leader.cases, "wrong parameters would explain it: a check is asked for first"
    (ordered,) = {order for agent in job.agents for order in agent.ordered}
    job.check(ordered)
    job.go_on()
    (case,) = job.leader.cases
    (finding,) = case.findings
    assert (finding.ranks, finding.gpus) == ((ranks[2].rank,), (f"GPU-{ranks[2].rank}",))
    assert "wrong gradient in a.weight at step 29" in case.reason
    assert "element 300, bit 5" in case.reason
    assert case.to == 19, "after the newest replay that agreed, although replicas agreed at step 24, too"
    assert len(job.leader.events("found")) == 1
    job.go_on()
    assert len(job.leader.cases) == 1


def test_where_nothing_from_before_is_left_it_goes_back_as_far_as_it_can_and_says_so(jobs: Any) -> None:
    job = jobs()
    leader = job.leader.integrity
    for step in (9, 24):
        job.check(step)
        leader.on_checkpoint("checkpoint_committed", step, str(job.root / f"step_{step}"))
        job.go_on()
    leader.on_checkpoint("checkpoint_removed", None, str(job.root / "step_9"))
    job.find_wrong_gradient(29)
    job.check(29)
    job.go_on()
    (case,) = job.leader.cases
    assert case.to == 24
    assert any("no checkpoint from before step 20 is left" in note for note in case.details["sdc"]["notes"])


def test_observed_only_nobody_is_stopped_and_the_same_rank_is_told_once(jobs: Any) -> None:
    job = jobs(mode=Mode.OBSERVE)
    job.check(9)
    for step in (29, 34):
        job.find_wrong_gradient(step)
        job.check(step)
        job.go_on()
    assert not job.leader.cases
    assert len(job.leader.desk.reports) == 1


def test_a_gradient_that_wrong_parameters_explain_is_put_down_to_them(jobs: Any) -> None:
    job = jobs()
    job.check(9)
    job.leader.integrity.on_checkpoint("checkpoint_in_memory", 9, "")
    job.go_on()
    job.ranks[2].flip("b.weight", 5)
    job.find_wrong_gradient(14)
    job.go_on(1.0)
    job.check(14)
    job.go_on()
    (case,) = job.leader.cases
    told = case.details["sdc"]
    assert (told["ranks"], told["tensors"], told["moment"], case.to) == ([2], ["b.weight"], "after_step", 9)


def with_wrong_gradient(jobs: Any) -> Any:
    job = jobs()
    job.check(9)
    job.go_on()
    job.find_wrong_gradient(14)
    return job


def test_without_a_check_a_wrong_gradient_is_told_after_a_while(jobs: Any) -> None:
    job = with_wrong_gradient(jobs)
    job.go_on(15.0)
    assert not job.leader.cases
    job.go_on(15.0)
    (case,) = job.leader.cases
    assert case.details["sdc"]["moment"] == "gradient"


def test_a_wrong_gradient_of_an_attempt_that_ends_is_told_at_its_end(jobs: Any) -> None:
    job = with_wrong_gradient(jobs)
    job.go_on(1.0)
    job.leader.integrity.end_attempt()
    (report,) = job.leader.desk.reports
    assert "wrong gradient in a.weight" in str(report)
