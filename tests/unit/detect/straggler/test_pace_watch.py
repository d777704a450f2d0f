"""Own work and lost cores compared apart: who works more, and whose host keeps it from working."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from steadyrun.core.timing import Role
from steadyrun.detect.straggler import Alarm, AlarmKind, Cause, PaceWatch, StepDetails, StepFrame, StragglerConfig

STEP_S = 0.2
OWN_S = 0.1
BEGINS = 100  # what is normal is known by then
Amount = Callable[[int, int], float]


def nothing(rank: int, step: int) -> float:
    return 0.0


class Watched:
    """Ranks whose own work and withheld time (beyond what all have), both as shares of own work, are given."""

    def __init__(
        self,
        ranks: int = 6,
        more: Amount = nothing,
        withheld: Amount | None = nothing,
        roles: Mapping[int, Role] | None = None,
        nodes: Mapping[int, str] | None = None,
        phase: str | None = None,
        wall_s: Callable[[int], float] = lambda step: STEP_S,
    ) -> None:
        """*phase* is what takes longer; None: all phases alike. *wall_s* is how long each step takes."""
        self.phase, self.wall_s = phase, wall_s
        self.watch = PaceWatch(StragglerConfig(), roles, ranks, nodes=nodes)
        self.ranks, self.more, self.withheld = ranks, more, withheld
        self.random = np.random.default_rng(8)
        self.step = 0
        self.closed: list[Alarm] = []

    def go(self, steps: int) -> list[Alarm]:
        found: list[Alarm] = []
        for _ in range(steps):
            found += self.watch.take(self.frame())
            self.closed += self.watch.take_closed()
            self.step += 1
        return found

    def go_until_closed(self, most: int = 400) -> list[Alarm]:
        found: list[Alarm] = []
        while most and not self.closed:
            found += self.go(1)
            most -= 1
        return found

    def frame(self) -> StepFrame:
        more = np.array([self.more(r, self.step) for r in range(self.ranks)])
        noise = np.exp(self.random.normal(0.0, 0.01, self.ranks))
        own, plain = OWN_S * (1 + more) * noise, OWN_S * noise
        alike = plain if self.phase else own
        phases = {"forward_s": 0.4 * alike, "optimizer_s": 0.1 * alike, "data_s": 0.1 * alike}
        if self.phase:
            phases[f"{self.phase}_s"] = phases[f"{self.phase}_s"] + own - plain
        starved = None
        if self.withheld is not None:
            told = np.array([self.withheld(r, self.step) for r in range(self.ranks)])
            starved = OWN_S * (told + np.where(told >= 0, 0.03, 0.0) * self.random.uniform(0.8, 1.2, self.ranks))
        details = StepDetails(
            wall_s=np.full(self.ranks, self.wall_s(self.step)),
            backward_s=0.4 * alike,
            cpu_s=own.copy(),
            starved_s=starved,
            **phases,
        )
        return StepFrame(self.step, own, details=details)


def only(ranks: Sequence[int], share: float, last: int = 1 << 60) -> Amount:
    return lambda rank, step: share if rank in ranks and BEGINS <= step <= last else 0.0


def test_who_works_more_is_told_once_and_not_as_starving() -> None:
    run = Watched(more=only([2], 0.3))
    (alarm,) = run.go(BEGINS + 60)
    assert (alarm.kind, alarm.ranks) == (AlarmKind.RANK, (2,))
    assert alarm.cause is not Cause.CPU_STARVED
    assert [a.key for a in run.watch.open_alarms()] == [alarm.key]


def test_whose_cores_are_withheld_starves() -> None:
    run = Watched(withheld=only([2], 0.5))
    (alarm,) = run.go(BEGINS + 60)
    assert (alarm.kind, alarm.ranks, alarm.cause) == (AlarmKind.RANK, (2,), Cause.CPU_STARVED)
    assert alarm.phase is None, "it is the host's doing, whatever it was at"
    assert abs(alarm.first_step - BEGINS) <= 3
    (now,) = run.watch.open_alarms()
    assert (now.key, now.cause, now.phase) == (alarm.key, Cause.CPU_STARVED, None)
    assert now.lost_s > 0


def test_starvation_ends_as_starvation() -> None:
    run = Watched(withheld=only([2], 0.5, BEGINS + 60))
    (alarm,) = run.go_until_closed()
    (over,) = run.closed
    assert (over.key, over.cause, over.phase) == (alarm.key, Cause.CPU_STARVED, None)
    assert over.over_step is not None
    assert over.over_step > BEGINS + 60
    assert run.watch.open_alarms() == []


def test_all_that_lose_as_much_accuse_nobody() -> None:
    run = Watched(withheld=lambda rank, step: 0.6 if step >= BEGINS else 0.0)
    assert run.go(BEGINS + 80) == []


def test_a_node_without_cores_is_named_as_a_node() -> None:
    nodes = {r: "a" if r < 4 else "b" for r in range(8)}
    run = Watched(8, withheld=only([4, 5, 6, 7], 0.5, BEGINS + 60), nodes=nodes)
    (alarm,) = run.go_until_closed()
    assert (alarm.kind, alarm.node, alarm.cause) == (AlarmKind.NODE, "b", Cause.CPU_STARVED)
    assert [(a.kind, a.node) for a in run.closed] == [(AlarmKind.NODE, "b")], "its ranks had no alarms of their own"


def test_more_work_and_fewer_cores_of_one_rank_are_one_alarm() -> None:
    both = only([2], 0.3)
    run = Watched(more=both, withheld=both)
    found = run.go(BEGINS + 80)
    assert [(a.kind, a.ranks) for a in found] == [(AlarmKind.RANK, (2,))]


def test_two_ranks_may_be_slow_for_two_reasons() -> None:
    run = Watched(more=only([2], 0.3), withheld=only([4], 0.5))
    found = run.go(BEGINS + 80)
    assert {(a.ranks, a.cause is Cause.CPU_STARVED) for a in found} == {((2,), False), ((4,), True)}
    assert {a.ranks for a in run.watch.open_alarms()} == {(2,), (4,)}


def test_without_a_word_on_cores_nobody_starves() -> None:
    run = Watched(more=only([2], 0.3), withheld=None)
    (alarm,) = run.go(BEGINS + 60)
    assert alarm.cause is not Cause.CPU_STARVED
    assert run.watch.transients() == []


def test_who_starves_is_compared_with_its_own_role_only() -> None:
    """The other stage loses more, always: that is its nature."""
    roles = {r: Role(f"stage {r // 4}", (r // 4,)) for r in range(8)}
    run = Watched(8, withheld=lambda r, s: 0.8 if r >= 4 else 0.5 if r == 1 and s >= BEGINS else 0.0, roles=roles)
    found = [a for a in run.go(BEGINS + 80) if a.kind is AlarmKind.RANK]
    assert [(a.ranks, a.role, a.cause) for a in found] == [((1,), "stage 0", Cause.CPU_STARVED)]


def test_a_step_that_nobody_saw_whole_is_no_evidence() -> None:
    run = Watched(withheld=only([2], 0.5))
    run.go(BEGINS)
    frame = run.frame()
    unseen = StepFrame(frame.step, np.zeros(6), details=StepDetails(starved_s=np.full(6, np.nan)))
    for _ in range(60):
        assert run.watch.take(unseen) == []


def test_it_counts_steps_as_the_detector_does() -> None:
    run = Watched()
    run.go(5)
    assert (run.watch.steps, run.watch.last_step) == (5, 4)
    assert abs(run.watch.elapsed_s - 5 * STEP_S) < 1e-9


def test_own_work_that_grows_with_cold_caches_is_part_of_the_starvation() -> None:
    late = only([2], 1.5, last=400)
    run = Watched(more=lambda rank, step: 0.5 if rank == 2 and BEGINS + 25 <= step <= 400 else 0.0, withheld=late)
    found = run.go(400)
    assert [(a.ranks, a.cause) for a in found] == [((2,), Cause.CPU_STARVED)]
    assert len(run.watch.open_alarms()) == 1
    assert not run.go(400)
    assert [a.cause for a in run.closed] == [Cause.CPU_STARVED]
    assert not run.watch.open_alarms()


def test_who_works_more_when_a_starvation_ends_stays_named() -> None:
    late = only([2], 1.5, last=400)
    run = Watched(more=lambda rank, step: 0.5 if rank == 2 and step >= BEGINS + 25 else 0.0, withheld=late)
    assert [a.cause for a in run.go(400)] == [Cause.CPU_STARVED]
    run.go(400)
    assert [a.ranks for a in run.watch.open_alarms()] == [(2,)]


def test_what_is_next_to_nothing_in_a_step_of_waiting_is_told_once_it_counts() -> None:
    # For 300 steps, of 0.1 s of own work 0.03 s more: 0.3 % of the step.
    run = Watched(more=only([2], 0.3), wall_s=lambda step: 10.0 if BEGINS <= step < 400 else STEP_S)
    assert not run.go(400)
    assert not run.watch.open_alarms()
    (alarm,) = run.go(200)
    assert (alarm.ranks, alarm.phase) == ((2,), None)


def test_a_quick_job_need_not_be_slow_for_seconds() -> None:
    run = Watched(more=only([2], 0.3), wall_s=lambda step: 0.03)  # 45 steps take 1.4 s
    (alarm,) = run.go(BEGINS + 80)
    assert BEGINS + 44 <= alarm.step <= BEGINS + 55


def all_lose(share: float, last: int = 1 << 60) -> Amount:
    return lambda rank, step: share if step <= last else 0.0


@pytest.mark.parametrize(("phase", "slight", "least"), [("forward", 0.04, 0.06), (None, 0.10, 0.15)])
def test_on_shared_cores_a_slight_difference_is_not_told_unless_it_grows(
    phase: str | None, slight: float, least: float
) -> None:
    def more(rank: int, step: int) -> float:
        return 0.0 if rank != 2 or step < BEGINS else slight if step < 600 else 3 * slight

    run = Watched(more=more, withheld=all_lose(0.4), phase=phase)
    assert not run.go(600)
    assert not run.watch.open_alarms()
    (alarm,) = run.go(100)
    assert (alarm.ranks, alarm.phase) == ((2,), phase)
    assert alarm.slowdown >= least
    assert 595 <= alarm.first_step <= 605  # where it began to matter
    assert [a.key for a in run.watch.open_alarms()] == [alarm.key]
    assert not run.go(200)


def test_a_slight_difference_is_told_once_the_ranks_have_their_cores() -> None:
    run = Watched(more=only([2], 0.04), withheld=all_lose(0.4, last=600))
    assert not run.go(600)
    (alarm,) = run.go(400)
    assert (alarm.ranks, alarm.kind) == ((2,), AlarmKind.RANK)
    assert 0.02 < alarm.slowdown < 0.05  # the rest is taken for its nature by then


def test_a_slight_difference_that_goes_away_was_never_told() -> None:
    run = Watched(more=only([2], 0.04, last=500), withheld=all_lose(0.4), phase="forward")
    assert not run.go(1000)
    assert not run.closed
    assert not run.watch.open_alarms()
