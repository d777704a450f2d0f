"""Verdicts of the straggler detector: who, since when, in which phase, what it costs; and when nobody is to blame."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from steadyrun.core.timing import TAG_CHECKPOINT, TAG_DEVICE, TAG_FIRST, Role
from steadyrun.detect.straggler import Alarm, AlarmKind, Cause, Detector, StepDetails, StragglerConfig

QUICK = StragglerConfig(warm_steps=2, learn_steps=12, least_s=0.0, imbalance_steps=30)
ONSET = 60
SHARES = {"forward": 0.3, "backward": 0.6, "optimizer": 0.06, "data": 0.04}
ACCUSES = (AlarmKind.RANK, AlarmKind.NODE, AlarmKind.GROUP)

Floats = NDArray[np.float64]
Change = Callable[[int, dict[str, Floats], Floats], None]


@dataclass
class Job:
    """A synchronous job: phases of each rank in seconds, all wait for the slowest."""

    ranks: int = 4
    scatter: float = 0.005
    seed: int = 0
    cpu_share: float = 0.95
    tags: int = 0
    alarms: list[Alarm] = field(default_factory=list)

    def run(self, detector: Detector, steps: int, change: Change | None = None, first: int = 0) -> list[Alarm]:
        rng = np.random.default_rng(self.seed)
        for step in range(first, first + steps):
            scatter = np.exp(rng.normal(0.0, self.scatter, self.ranks))
            parts = {name: share * scatter for name, share in SHARES.items()}
            cpu = self.cpu_share * scatter
            if change is not None:
                change(step, parts, cpu)
            busy = sum(parts.values(), np.zeros(self.ranks))
            wall = np.full(self.ranks, busy.max() * 1.02)
            details = StepDetails(wall, *parts.values(), cpu, wall - busy)
            self.alarms += detector.feed(step, busy, tags=self.tags, details=details)
        return self.alarms


def accusations(alarms: Sequence[Alarm]) -> list[tuple[AlarmKind, tuple[int, ...]]]:
    return [(a.kind, a.ranks) for a in alarms if a.kind in ACCUSES]


def slower(rank: int, phases: Sequence[str], by: float, ran: bool = True, until: int = 10**9) -> Change:
    def change(step: int, parts: dict[str, Floats], cpu: Floats) -> None:
        if ONSET <= step < until:
            before = sum(p[rank] for p in parts.values())
            for name in phases:
                parts[name][rank] *= 1 + by
            if ran:
                cpu[rank] += sum(p[rank] for p in parts.values()) - before

    return change


@pytest.mark.parametrize(
    ("phases", "by", "ran", "expected"),
    [
        (["forward"], 0.4, True, ("forward", Cause.WORKING)),
        (["backward"], 0.2, True, ("backward", Cause.WORKING)),
        (["data"], 3.0, False, ("data", Cause.WAITING)),
        (["forward"], 0.4, False, ("forward", Cause.WAITING)),
        (list(SHARES), 0.12, True, (None, Cause.WHOLE)),
        (list(SHARES), 0.12, False, (None, Cause.CPU_STARVED)),
    ],
)
def test_the_phase_and_the_cause_are_told(
    phases: list[str], by: float, ran: bool, expected: tuple[str | None, Cause]
) -> None:
    alarms = Job().run(Detector(QUICK, None, 4), 110, slower(2, phases, by, ran))
    assert accusations(alarms) == [(AlarmKind.RANK, (2,))]
    alarm = alarms[0]
    assert (alarm.phase, alarm.cause) == expected
    assert alarm.first_step == pytest.approx(ONSET, abs=2)
    assert alarm.step < ONSET + 25
    assert alarm.slowdown == pytest.approx(by * sum(SHARES[p] for p in phases), abs=0.03)


def test_on_a_device_cpu_times_say_nothing() -> None:
    job = Job(cpu_share=0.95, tags=TAG_DEVICE)
    alarms = job.run(Detector(QUICK, None, 4), 110, slower(2, list(SHARES), 0.15, ran=False))
    assert [a.cause for a in alarms] == [Cause.WHOLE]


def test_nobody_is_accused_in_a_healthy_job_of_any_scatter() -> None:
    for scatter in (0.002, 0.12):
        alarms = Job(ranks=4, scatter=scatter, seed=4).run(Detector(QUICK, None, 4), 300)
        assert accusations(alarms) == []


def test_impact_is_what_the_job_would_win_and_losses_add_up() -> None:
    detector = Detector(QUICK, None, 8)
    Job(ranks=8).run(detector, 160, slower(3, ["backward"], 0.5))
    [alarm] = detector.open_alarms()
    assert alarm.impact == pytest.approx(0.3 / 1.3 / 1.02, abs=0.03)
    since = detector.elapsed_s - ONSET  # steps before took about a second
    assert 0.5 * alarm.impact * since < alarm.lost_s < alarm.impact * since


def test_with_two_slow_ranks_neither_is_compared_with_the_other() -> None:
    first, second = slower(3, ["backward"], 0.5), slower(6, ["backward"], 0.5)

    def both(step: int, parts: dict[str, Floats], cpu: Floats) -> None:
        first(step, parts, cpu)
        second(step, parts, cpu)

    detector = Detector(QUICK, None, 8)
    Job(ranks=8).run(detector, 160, both)
    assert [a.ranks for a in detector.open_alarms()] == [(3,), (6,)]
    assert all(a.impact > 0.15 for a in detector.open_alarms())


def test_an_alarm_ends_when_the_rank_recovers() -> None:
    detector = Detector(QUICK, None, 8)
    Job(ranks=8).run(detector, 260, slower(3, ["backward"], 0.3, until=120))
    assert detector.open_alarms() == []
    [closed] = detector.take_closed()
    assert closed.ranks == (3,)
    assert closed.over_step is not None
    assert 120 < closed.over_step < 240
    assert detector.take_closed() == []


def test_a_rank_that_relapses_is_named_again() -> None:
    def twice(step: int, parts: dict[str, Floats], cpu: Floats) -> None:
        if ONSET <= step < 120 or step >= 300:
            parts["backward"][3] *= 1.3

    alarms = Job(ranks=8).run(Detector(QUICK, None, 8), 380, twice)
    assert accusations(alarms) == [(AlarmKind.RANK, (3,))] * 2


def test_a_node_is_named_when_half_of_its_ranks_are_slow() -> None:
    def node(step: int, parts: dict[str, Floats], cpu: Floats) -> None:
        if step >= ONSET:
            for rank in (4, 5, 7):
                parts["backward"][rank] *= 1.2

    detector = Detector(QUICK, None, 16, nodes={r: f"host{r // 4}" for r in range(16)})
    alarms = Job(ranks=16).run(detector, 120, node)
    assert accusations(alarms) == [(AlarmKind.NODE, (4, 5, 7))]
    [alarm] = detector.open_alarms()
    assert (alarm.kind, alarm.node, alarm.is_actionable) == (AlarmKind.NODE, "host1", True)
    assert alarm.impact > 0.05


def test_a_further_rank_of_a_slow_node_joins_its_alarm() -> None:
    def node(step: int, parts: dict[str, Floats], cpu: Floats) -> None:
        for rank, first in ((4, ONSET), (5, ONSET), (6, ONSET + 40)):
            if step >= first:
                parts["backward"][rank] *= 1.2

    detector = Detector(QUICK, None, 16, nodes={r: f"host{r // 4}" for r in range(16)})
    alarms = Job(ranks=16).run(detector, 160, node)
    assert accusations(alarms) == [(AlarmKind.NODE, (4, 5))]
    [alarm] = detector.open_alarms()
    assert (alarm.ranks, alarm.key) == ((4, 5, 6), alarms[0].key)


def test_one_slow_rank_of_a_node_is_a_rank() -> None:
    detector = Detector(QUICK, None, 16, nodes={r: f"host{r // 4}" for r in range(16)})
    alarms = Job(ranks=16).run(detector, 120, slower(5, ["backward"], 0.2))
    assert accusations(alarms) == [(AlarmKind.RANK, (5,))]
    assert alarms[0].node == "host1"


def test_on_a_single_node_ranks_are_named() -> None:
    def two(step: int, parts: dict[str, Floats], cpu: Floats) -> None:
        if step >= ONSET:
            parts["backward"][[0, 1]] *= 1.2

    detector = Detector(QUICK, None, 6, nodes=dict.fromkeys(range(6), "host"))
    assert accusations(Job(ranks=6).run(detector, 120, two)) == [(AlarmKind.RANK, (0,)), (AlarmKind.RANK, (1,))]


def test_stages_are_compared_within_and_their_imbalance_is_nobodys_fault() -> None:
    roles = {r: Role(f"stage {r // 4}", (r // 4,)) for r in range(8)}

    def stages(step: int, parts: dict[str, Floats], cpu: Floats) -> None:
        for part in parts.values():
            part[4:] *= 1.5
        if step >= 200:
            parts["forward"][1] *= 1.4

    alarms = Job(ranks=8).run(Detector(QUICK, roles, 8), 260, stages)
    assert accusations(alarms) == [(AlarmKind.RANK, (1,))]
    [stage] = [a for a in alarms if a.kind is AlarmKind.STAGE_IMBALANCE]
    assert (stage.ranks, stage.role, stage.is_actionable) == ((4, 5, 6, 7), "stage 1", False)
    assert stage.slowdown == pytest.approx(0.2, abs=0.02)


def test_unequal_data_is_said_once_and_accuses_nobody() -> None:
    alarms = Job(ranks=16, scatter=0.12, cpu_share=0.0).run(Detector(QUICK, None, 16), 300)
    assert [(a.kind, a.is_actionable) for a in alarms] == [(AlarmKind.DATA_IMBALANCE, False)]


def test_scatter_without_scatter_of_cpu_time_is_a_shared_machine() -> None:
    rng = np.random.default_rng(0)

    def preempted(step: int, parts: dict[str, Floats], cpu: Floats) -> None:
        for part in parts.values():
            part *= np.exp(rng.normal(0.0, 0.12, 16))

    alarms = Job(ranks=16, scatter=0.001).run(Detector(QUICK, None, 16), 200, preempted)
    assert [(a.kind, a.cause) for a in alarms] == [(AlarmKind.DATA_IMBALANCE, Cause.CPU_STARVED)]


def test_work_given_makes_unequal_batches_comparable() -> None:
    rng = np.random.default_rng(1)
    detector, found = Detector(QUICK, None, 8), []
    for step in range(300):
        work = rng.uniform(100.0, 900.0, 8)
        busy = work / 500.0 * np.exp(rng.normal(0.0, 0.01, 8))
        if step >= 200:
            busy[5] *= 1.1
        found += detector.feed(step, busy, work=work)
    assert accusations(found) == [(AlarmKind.RANK, (5,))]


def test_without_own_work_nobody_is_accused() -> None:
    detector = Detector(QUICK, None, 4)
    for step in range(100):
        assert detector.feed(step, np.zeros(4), details=StepDetails(wall_s=np.full(4, 0.5))) == []
    assert detector.elapsed_s == pytest.approx(50.0)


def test_unusual_steps_are_compared_with_nothing() -> None:
    rng = np.random.default_rng(1)
    detector = Detector(QUICK, None, 4)
    for step in range(200):
        busy = np.exp(rng.normal(0.0, 0.01, 4))
        tags = np.zeros(4, np.int64)
        if step % 2:
            busy[0] *= 3.0  # rank 0 writes checkpoints
            tags[0] = TAG_CHECKPOINT
        if step < 10:
            busy[1] *= 4.0
            tags[1] = TAG_FIRST
        assert detector.feed(step, busy, tags=tags) == []


def test_a_missing_rank_does_not_stop_the_others() -> None:
    detector, rng, found = Detector(QUICK, None, 8), np.random.default_rng(1), []
    for step in range(150):
        busy = np.exp(rng.normal(0.0, 0.01, 8))
        busy[7] = np.nan
        if step >= ONSET:
            busy[3] *= 1.2
        found += detector.feed(step, busy)
    assert accusations(found) == [(AlarmKind.RANK, (3,))]


def test_the_fixed_probe_makes_ranks_of_all_roles_comparable() -> None:
    roles = {r: Role(f"stage {r}", (r,)) for r in range(4)}
    detector, rng, found = Detector(QUICK, roles, 4), np.random.default_rng(2), []
    for step in range(300):
        probe = None
        if step % 10 == 0:
            probe = 0.005 * np.exp(rng.normal(0.0, 0.01, 4))
            probe[2] *= 1.25 if step >= 150 else 1.0
        found += detector.feed(step, np.array([1.0, 2.0, 3.0, 4.0]) * np.exp(rng.normal(0.0, 0.01)), probe=probe)
    [alarm] = [a for a in found if a.kind is AlarmKind.RANK]
    assert (alarm.ranks, alarm.cause, alarm.is_actionable) == ((2,), Cause.WHOLE, True)
    assert alarm.probe == pytest.approx(0.25, abs=0.03)


def test_a_probe_beside_slow_work_is_reported_with_it() -> None:
    detector, rng, found = Detector(QUICK, None, 4), np.random.default_rng(2), []
    for step in range(200):
        slow = np.array([1.0, 1.0, 1.2 if step >= 100 else 1.0, 1.0])
        probe = 0.005 * slow * np.exp(rng.normal(0.0, 0.01, 4)) if step % 5 == 0 else None
        found += detector.feed(step, slow * np.exp(rng.normal(0.0, 0.01, 4)), probe=probe)
    [alarm] = found
    assert alarm.probe == pytest.approx(0.2, abs=0.03)


def test_the_only_rank_of_its_role_is_reported_not_acted_on() -> None:
    roles = {r: Role(f"stage {r}", (r,)) for r in range(4)}
    detector, rng, found = Detector(QUICK, roles, 4), np.random.default_rng(2), []
    for step in range(150):
        busy = np.array([1.0, 2.0, 3.0, 4.0]) * np.exp(rng.normal(0.0, 0.01, 4) + rng.normal(0.0, 0.05))
        if step >= ONSET:
            busy[1] *= 1.3
        found += detector.feed(step, busy)
    assert [(a.ranks, a.peers, a.is_actionable) for a in found if a.kind is AlarmKind.RANK] == [((1,), 0, False)]


def test_a_group_the_others_wait_for_is_named_when_none_of_its_ranks_is_slow() -> None:
    groups = {f"replica {i}": [i, i + 4] for i in range(4)}
    detector, rng, found = Detector(QUICK, None, 8, groups=groups), np.random.default_rng(2), []
    for step in range(150):
        busy = np.exp(rng.normal(0.0, 0.01, 8))
        link = np.where((np.arange(8) % 4 == 2) & (step >= ONSET), 0.5, 0.0)  # of replica 2, within it
        arrived = np.array([max(busy[i % 4], busy[i % 4 + 4]) for i in range(8)]) + link
        wall = np.full(8, arrived.max() + 0.05)
        found += detector.feed(step, busy, details=StepDetails(wall_s=wall, group_wait_s=wall - arrived))
    assert [(a.kind, a.group, a.ranks, a.is_actionable) for a in found] == [
        (AlarmKind.GROUP, "replica 2", (2, 6), False)
    ]


def test_bursts_are_counted_and_never_acted_on() -> None:
    def bursts(step: int, parts: dict[str, Floats], cpu: Floats) -> None:
        if step > ONSET and step % 20 < 2:
            parts["backward"][1] *= 2.0

    detector = Detector(QUICK, None, 8)
    assert accusations(Job(ranks=8).run(detector, 300, bursts)) == []
    [alarm] = detector.transients()
    assert (alarm.kind, alarm.ranks, alarm.is_actionable) == (AlarmKind.TRANSIENT, (1,), False)
    assert alarm.z == pytest.approx(12 * 3600 / detector.elapsed_s, rel=0.01)
    assert 0 < alarm.lost_s < 24


def test_the_state_survives_json_and_the_evidence_with_it() -> None:
    change = slower(2, ["backward"], 0.3)
    whole, first, second = (Detector(QUICK, None, 4) for _ in range(3))
    [expected] = Job().run(whole, 110, change)
    assert Job().run(first, 70, change) == []
    second.restore(json.loads(json.dumps(first.snapshot())))
    [alarm] = Job(seed=1).run(second, 40, change, first=70)
    assert (alarm.ranks, alarm.first_step) == (expected.ranks, expected.first_step)
    assert abs(alarm.step - expected.step) <= 1
    with pytest.raises(ValueError, match="4 ranks"):
        Detector(QUICK, None, 8).restore(first.snapshot())


def test_alarms_go_through_json() -> None:
    [alarm] = Job().run(Detector(QUICK, None, 4), 110, slower(2, ["backward"], 0.3))
    back = Alarm.from_json(json.loads(json.dumps(alarm.to_json())))
    assert (back.kind, back.ranks, back.phase, back.cause) == (alarm.kind, alarm.ranks, alarm.phase, alarm.cause)
    assert math.isclose(back.slowdown, alarm.slowdown, abs_tol=1e-5)


def test_the_wrong_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="4 times, one per rank"):
        Detector(QUICK, None, 4).feed(0, np.ones(5))
