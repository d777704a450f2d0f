"""When saves are due: intervals, orders ahead of time, and what failures and late orders change."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.checkpoint.interval import Costs, two_tiers
from steadyrun.checkpoint.saves import CheckpointOptions, Every, SaveState, TierName
from steadyrun.checkpoint.schedule import Experience, Order, Schedule, snapshot_intervals_s, tiers_at

MEMORY, PEER, LOCAL, SHARED, REMOTE = (
    TierName.MEMORY,
    TierName.PEER,
    TierName.LOCAL,
    TierName.SHARED,
    TierName.REMOTE,
)
AUTO = Every()
OPTIONS = CheckpointOptions("/root")
LLAMA3 = Experience(16_384 * 54 * 86_400.0, 419, 314)


@dataclass
class Training:
    """Steps of a fixed length, ranks that hear an order *hear_s* later, saves of a fixed cost."""

    schedule: Schedule
    step_s: float = 1.0
    stall_s: float = 0.1
    persist_s: float = 5.0
    hear_s: float = 0.0
    now_s: float = 0.0
    step: int = -1
    saves: list[tuple[int, float, frozenset[TierName]]] = field(default_factory=list)
    late: int = 0
    _order: tuple[Order, float] | None = None
    _ends: list[tuple[float, int]] = field(default_factory=list)

    def run(self, seconds: float) -> Training:
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.one_step()
        return self

    def one_step(self) -> None:
        self.now_s += self.step_s
        self.step += 1
        for at_s, step in [e for e in self._ends if e[0] <= self.now_s]:
            self._ends.remove((at_s, step))
            self.schedule.ended(step, SaveState.DURABLE, at_s, self.persist_s)
        self.schedule.stepped(self.step, self.now_s)
        if self._order is not None and self._order[0].step <= self.step:
            order, told_s = self._order
            self._order = None
            if told_s + self.hear_s > self.now_s or order.step < self.step:
                self.late += 1
                self.schedule.late(order.step)
            else:
                self._save(order)
        order_now = self.schedule.order(self.now_s)
        if order_now is not None:
            assert order_now.step > self.step
            self._order = (order_now, self.now_s)

    def _save(self, order: Order) -> None:
        self.saves.append((order.step, self.now_s, order.tiers))
        self.now_s += self.stall_s
        self.schedule.began(order.step, order.tiers, self.now_s)
        self.schedule.stalled(self.stall_s)
        if SHARED in order.tiers:
            self._ends.append((self.now_s + self.persist_s, order.step))

    def times_s(self, tier: TierName) -> list[float]:
        return [at_s for _, at_s, tiers in self.saves if tier in tiers]


# -- steps -----------------------------------------------------------------------------------------------------------
def test_a_period_in_steps_means_after_so_many_steps() -> None:
    options = replace(OPTIONS, every=Every(steps=100))
    assert [s for s in range(401) if tiers_at(options, s)] == [99, 199, 299, 399]
    assert tiers_at(options, 99) == {MEMORY, SHARED}
    assert tiers_at(replace(OPTIONS, every=Every(steps=1)), 0) == {MEMORY, SHARED}


def test_each_tier_has_its_own_period() -> None:
    options = CheckpointOptions(
        "/r", "/l", "s3://b", Every(steps=100), every_memory=10, every_local=50, every_remote=400, peer=True
    )
    assert tiers_at(options, 4) == frozenset()
    assert tiers_at(options, 9) == {MEMORY, PEER}
    assert tiers_at(options, 49) == {MEMORY, PEER, LOCAL}
    assert tiers_at(options, 99) == {MEMORY, PEER, LOCAL, SHARED}
    assert tiers_at(options, 399) == {MEMORY, PEER, LOCAL, SHARED, REMOTE}


def test_tiers_without_a_period_go_with_the_folder_and_without_a_place_nowhere() -> None:
    options = CheckpointOptions("/r", "/l", "s3://b", Every(steps=100))
    assert tiers_at(options, 99) == {MEMORY, LOCAL, SHARED, REMOTE}
    assert tiers_at(replace(options, local=None, remote=None, every_remote=None), 99) == {MEMORY, SHARED}
    assert tiers_at(replace(options, slots=0), 99) == {LOCAL, SHARED, REMOTE}


def test_remote_alone_brings_the_folder_that_it_is_filled_from() -> None:
    options = CheckpointOptions("/r", None, "s3://b", AUTO, every_remote=7)
    assert tiers_at(options, 6) == {MEMORY, SHARED, REMOTE}


def test_milestones_are_saved_whatever_decides_otherwise() -> None:
    assert tiers_at(replace(OPTIONS, keep_every=1000), 1999) == {MEMORY, SHARED}
    schedule = Schedule(AUTO, replace(OPTIONS, keep_every=1000), 0.0)
    assert SHARED in schedule.due(999, 0.5)
    assert schedule.due(1000, 0.5) == frozenset()


def test_a_period_in_steps_needs_no_order() -> None:
    training = Training(Schedule(Every(steps=10), replace(OPTIONS, every=Every(steps=10)), 0.0)).run(500)
    assert training.saves == []
    assert training.schedule.next_step(9) == 19
    assert training.schedule.next_step(13) == 19


# -- seconds and auto --------------------------------------------------------------------------------------------------
def test_seconds_come_at_that_time_and_are_ordered_ahead() -> None:
    training = Training(Schedule(Every(seconds=60), OPTIONS, 0.0)).run(1000)
    gaps = [b - a for a, b in itertools.pairwise(training.times_s(SHARED))]
    assert training.times_s(SHARED)[0] == pytest.approx(60, abs=3)
    assert all(g == pytest.approx(60, abs=2) for g in gaps)
    assert len(gaps) >= 14


def test_seconds_shorter_than_the_persist_time_become_that_time_and_it_is_said() -> None:
    training = Training(Schedule(Every(seconds=10), OPTIONS, 0.0), persist_s=40).run(2000)
    gaps = [b - a for a, b in itertools.pairwise(training.times_s(SHARED)[1:])]
    assert gaps
    assert min(gaps) >= 40
    assert "40 s to be durable and 10 s was asked for" in training.schedule.reasoning()


def test_auto_uses_the_optimum_of_what_was_measured() -> None:
    schedule = Schedule(AUTO, OPTIONS, 0.0, gpus=16_384, experience=LLAMA3)
    training = Training(schedule, step_s=5.0, stall_s=0.5, persist_s=60.0).run(40_000)
    f = schedule.figures()
    assert f.stall_s == pytest.approx(0.5)
    assert f.persist_s == pytest.approx(60)
    costs = Costs(f.stall_s, f.mtbf_s, f.persist_s, slowdown_ratio=f.slowdown_ratio)
    memory_s, durable_s = snapshot_intervals_s(costs, f.memory_share, 66.0)
    assert f.durable_interval_s == pytest.approx(durable_s, rel=0.2)
    assert f.memory_interval_s == pytest.approx(memory_s, rel=0.2)
    gaps = [b - a for a, b in itertools.pairwise(training.times_s(SHARED)[3:])]
    assert all(g == pytest.approx(f.durable_interval_s, abs=11) for g in gaps[-5:])


def test_slow_storage_leaves_the_frequent_saves_to_memory() -> None:
    schedule = Schedule(AUTO, OPTIONS, 0.0, gpus=16_384, experience=LLAMA3)
    training = Training(schedule, step_s=5.0, stall_s=0.5, persist_s=400.0).run(40_000)
    f = schedule.figures()
    assert f.durable_interval_s == pytest.approx(440)
    assert f.memory_interval_s == pytest.approx(122, rel=0.2)
    assert len(training.times_s(MEMORY)) > 1.8 * len(training.times_s(SHARED)), "one more while a slot is written"


def test_the_first_saves_come_early_so_that_there_are_figures() -> None:
    training = Training(Schedule(AUTO, OPTIONS, 0.0, gpus=2)).run(100)
    assert training.times_s(MEMORY)[0] == pytest.approx(10, abs=3)
    assert training.times_s(SHARED)[0] == pytest.approx(60, abs=3)


def test_a_job_that_never_fails_still_saves_every_half_hour() -> None:
    schedule = Schedule(AUTO, OPTIONS, 0.0, gpus=1)
    Training(schedule).run(500)
    f = schedule.figures()
    assert f.durable_interval_s == 1800
    assert f.memory_interval_s == 300
    assert "more often costs next to nothing" in schedule.reasoning()


def test_a_long_stall_is_not_forced_into_the_half_hour() -> None:
    schedule = Schedule(AUTO, OPTIONS, 0.0, gpus=8)
    schedule.stalled(60.0)
    assert schedule.figures().durable_interval_s == pytest.approx(51_962, rel=0.01), "sqrt(2 x 60 s x 6,250 h)"


def test_without_snapshot_memory_there_is_one_tier() -> None:
    schedule = Schedule(AUTO, replace(OPTIONS, slots=0), 0.0, gpus=16_384, experience=LLAMA3)
    for _ in range(8):
        schedule.stalled(60.0)
    assert schedule.figures().memory_interval_s is None
    assert schedule.figures().durable_interval_s == pytest.approx(1156, rel=0.01)
    assert Training(schedule, step_s=30, stall_s=60, persist_s=0).run(9000).times_s(MEMORY) == []


def test_a_period_for_memory_in_steps_leaves_it_to_the_steps() -> None:
    schedule = Schedule(AUTO, replace(OPTIONS, every_memory=5), 0.0, gpus=16_384, experience=LLAMA3)
    assert schedule.figures().memory_interval_s is None
    training = Training(schedule).run(2000)
    assert training.times_s(MEMORY) == training.times_s(SHARED)
    assert tiers_at(replace(OPTIONS, every_memory=5), 9) == {MEMORY}


# -- failures ----------------------------------------------------------------------------------------------------------
def test_failures_shorten_the_interval_and_a_quiet_run_lengthens_it() -> None:
    schedule = Schedule(AUTO, OPTIONS, 0.0, gpus=10_000)
    for _ in range(8):
        schedule.stalled(5.0)
    before = schedule.figures().durable_interval_s
    for _ in range(10):
        schedule.failed(memory_survived=False)
    after = schedule.figures().durable_interval_s
    assert before is not None
    assert after is not None
    assert after < before / 2
    quiet = Schedule(AUTO, OPTIONS, 0.0, gpus=10_000, experience=Experience(1e9, 0, 0))
    quiet.stalled(5.0)
    assert quiet.figures().durable_interval_s > before  # type: ignore[operator]


def test_what_survives_in_memory_moves_the_two_tiers_apart() -> None:
    costs = Costs(0.5, 11_000, 60, slowdown_ratio=0.2)
    memory_s, durable_s = snapshot_intervals_s(costs, 0.9, 0.0)
    less_memory_s, less_durable_s = snapshot_intervals_s(costs, 0.6, 0.0)
    assert memory_s < less_memory_s < less_durable_s < durable_s
    shares = [
        Schedule(AUTO, OPTIONS, 0.0, experience=Experience(1e9, 20, survived)).memory_share for survived in (0, 10, 20)
    ]
    assert shares == [pytest.approx(3 / 24), pytest.approx(13 / 24), pytest.approx(23 / 24, abs=0.01)]


@given(
    stall_s=st.floats(0.01, 100),
    persist_s=st.floats(0, 1000),
    slowdown=st.floats(0, 1),
    mtbf_s=st.floats(1e3, 1e6),
    share=st.floats(0.05, 0.95),
    factors=st.tuples(st.floats(0.3, 3), st.floats(0.3, 3)),
)
@settings(deadline=None)
def test_no_other_intervals_cost_less(
    stall_s: float, persist_s: float, slowdown: float, mtbf_s: float, share: float, factors: tuple[float, float]
) -> None:
    costs = Costs(stall_s, mtbf_s, persist_s, slowdown_ratio=slowdown)
    least_s = 1.1 * persist_s

    def overhead(memory_s: float, durable_s: float) -> float:
        writing_s = costs.whole_stall_s - stall_s
        redone_s = share * memory_s / 2 + (1 - share) * durable_s / 2
        return stall_s / memory_s + writing_s / durable_s + redone_s / mtbf_s

    best = snapshot_intervals_s(costs, share, least_s)
    assert least_s <= best[1]
    assert best[0] <= best[1]
    durable_s = max(best[1] * factors[1], least_s)
    memory_s = min(best[0] * factors[0], durable_s)
    assert overhead(*best) <= overhead(memory_s, durable_s) * (1 + 1e-9)


def test_sharing_the_stalls_is_never_worse_than_two_tiers_apart() -> None:
    costs = Costs(0.5, 11_000, 60, slowdown_ratio=0.05)
    memory_s, durable_s = snapshot_intervals_s(costs, 0.75, 66)
    apart = two_tiers(costs, 0.5, 0.75)
    assert 0.5 / memory_s + 3.0 / durable_s < apart.overhead.saving_ratio + 1e-3
    assert durable_s <= apart.durable_interval_s


def test_a_failed_save_is_tried_again_soon_and_then_less_often() -> None:
    schedule = Schedule(Every(seconds=600), OPTIONS, 0.0)
    now_s, waits = 600.0, []
    for step in range(6):
        assert SHARED in schedule.due(step, now_s)
        schedule.began(step, {MEMORY, SHARED}, now_s)
        schedule.ended(step, SaveState.FAILED, now_s)
        wait = next(s for s in range(1, 2000) if SHARED in schedule.due(step, now_s + s))
        waits.append(wait)
        now_s += wait
    assert waits == [30, 60, 120, 240, 480, 600]
    schedule.began(9, {MEMORY, SHARED}, now_s)
    schedule.ended(9, SaveState.DURABLE, now_s + 1, 1.0)
    assert schedule.due(9, now_s + 599) == frozenset()
    assert SHARED in schedule.due(9, now_s + 600)


def test_a_skipped_save_is_due_again_at_once() -> None:
    schedule = Schedule(Every(seconds=60), OPTIONS, 0.0)
    schedule.ended(3, SaveState.SKIPPED, 60.0)
    assert schedule.due(4, 60.5) == frozenset()
    assert SHARED in schedule.due(4, 61.0)


def test_nothing_is_ordered_to_the_folder_while_it_is_being_written() -> None:
    schedule = Schedule(Every(seconds=10), OPTIONS, 0.0)
    schedule.began(0, {MEMORY, SHARED}, 10.0)
    assert schedule.due(5, 1000.0) == frozenset()
    schedule.ended(0, SaveState.DURABLE, 1001.0, 0.5)
    assert SHARED in schedule.due(6, 1001.0)


def test_memory_takes_one_snapshot_while_the_other_slot_is_written() -> None:
    schedule = Schedule(AUTO, OPTIONS, 0.0, gpus=16_384, experience=LLAMA3)
    schedule.began(0, {MEMORY, SHARED}, 10.0)
    assert schedule.due(5, 1000.0) == {MEMORY}
    schedule.began(5, {MEMORY}, 1000.0)
    assert schedule.due(6, 5000.0) == frozenset()
    schedule.ended(0, SaveState.DURABLE, 5000.0, 4990.0)
    assert schedule.due(6, 5001.0) >= {MEMORY}


def test_time_without_training_brings_no_save_forward() -> None:
    schedule = Schedule(Every(seconds=100), OPTIONS, 0.0)
    schedule.stepped(0, 1.0)
    schedule.stepped(50, 51.0)
    schedule.failed(memory_survived=True)
    schedule.attempt_started(1051.0)
    assert schedule.order(1060.0) is None, "no step of the new ranks is known"
    schedule.stepped(50, 1061.0)
    assert schedule.due(50, 1090.0) == frozenset()
    assert SHARED in schedule.due(60, 1100.0)


# -- orders ------------------------------------------------------------------------------------------------------------
def test_one_order_at_a_time() -> None:
    schedule = Schedule(Every(seconds=10), OPTIONS, 0.0)
    schedule.stepped(0, 1.0)
    schedule.stepped(1, 2.0)
    order = schedule.order(11.0)
    assert order == Order(3, frozenset({MEMORY, SHARED}))
    assert schedule.order(20.0) is None
    schedule.began(3, order.tiers, 21.0)
    schedule.ended(3, SaveState.DURABLE, 22.0, 1.0)
    assert schedule.order(31.0) is not None


def test_a_save_that_is_demanded_is_ordered_at_once_whatever_the_period_until_one_began() -> None:
    schedule = Schedule(Every(steps=1000), replace(OPTIONS, every=Every(steps=1000)), 0.0)
    schedule.stepped(0, 1.0)
    schedule.stepped(1, 2.0)
    assert schedule.order(2.0) is None
    schedule.demand()
    order = schedule.order(2.0)
    assert order == Order(3, frozenset({MEMORY, SHARED}))
    schedule.late(3)
    schedule.stepped(4, 5.0)
    again = schedule.order(5.0)
    assert again is not None
    assert again.step > 4
    schedule.began(again.step, again.tiers, 9.0)
    schedule.stepped(20, 21.0)
    assert schedule.order(21.0) is None


def test_a_save_that_is_demanded_goes_to_memory_while_another_is_written_and_waits_without_room() -> None:
    schedule = Schedule(Every(steps=10), replace(OPTIONS, every=Every(steps=10)), 0.0)
    schedule.stepped(0, 1.0)
    schedule.stepped(9, 10.0)
    schedule.began(9, {MEMORY, SHARED}, 10.0)
    schedule.demand()
    order = schedule.order(10.5)
    assert order is not None
    assert order.tiers == {MEMORY}
    schedule.began(order.step, order.tiers, 12.0)
    schedule.demand()
    assert schedule.order(12.5) is None
    schedule.ended(9, SaveState.DURABLE, 13.0, 1.0)
    assert schedule.order(13.5) is not None
    assert schedule.demand_limit_s < 30.0


def test_fast_steps_get_as_many_of_them_as_hearing_takes() -> None:
    schedule = Schedule(Every(seconds=10), OPTIONS, 0.0)
    schedule.stepped(0, 1.0)
    schedule.stepped(1000, 2.0)
    assert schedule.margin_steps == pytest.approx(201, abs=1)


def test_a_late_order_widens_the_margin_until_all_hear_in_time() -> None:
    training = Training(Schedule(Every(seconds=20), OPTIONS, 0.0), step_s=0.1, hear_s=3.0, persist_s=1.0).run(600)
    assert 3 <= training.late <= 6
    assert len(training.saves) >= 20
    assert training.schedule.margin_steps >= 30


def test_the_margin_narrows_again_after_many_orders_in_time() -> None:
    schedule = Schedule(Every(seconds=5), OPTIONS, 0.0)
    for _ in range(4):
        schedule.late(0)
    wide = Training(schedule, step_s=0.1, persist_s=0.5).run(60).schedule.margin_steps
    assert Training(schedule, step_s=0.1, persist_s=0.5, now_s=60, step=600).run(1200).schedule.margin_steps < wide / 2


def test_an_order_that_nobody_answers_is_given_up_and_given_again() -> None:
    schedule = Schedule(Every(seconds=10), OPTIONS, 0.0)
    for step in range(12):
        schedule.stepped(step, float(step))
    order = schedule.order(11.0)
    assert order is not None
    for step in range(12, 30):
        schedule.stepped(step, float(step))
    again = schedule.order(29.0)
    assert again is not None
    assert again.step > order.step


def test_next_step_for_ranks_that_agree_only_while_they_save() -> None:
    schedule = Schedule(Every(seconds=60), replace(OPTIONS, keep_every=100), 0.0)
    assert schedule.next_step(0) == 16
    schedule.stepped(0, 0.0)
    schedule.stepped(10, 10.0)
    assert schedule.next_step(10) == 70
    assert schedule.next_step(70) == 99


# -- words and records -------------------------------------------------------------------------------------------------
def test_the_reasoning_is_one_sentence_with_the_figures() -> None:
    schedule = Schedule(AUTO, OPTIONS, 0.0, gpus=1024, experience=Experience(0, 3, 2))
    for _ in range(3):
        schedule.stalled(0.5)
        schedule.ended(0, SaveState.DURABLE, 1.0, 20.0)
    text = schedule.reasoning()
    assert "\n" not in text
    for part in ("saving durably every", "0.5 s of stall (median of 3 saves)", "20 s until durable",
                 "1,024 GPUs", "3 failures", "50,000 GPU-hours", "71 % of failures"):  # fmt: skip
        assert part in text, text


def test_what_the_script_asked_for_is_compared_with_the_optimum() -> None:
    assert "every 500 steps, as the script asks; the optimum is" in Schedule(Every(steps=500), OPTIONS, 0.0).reasoning()


def test_experience_travels_as_json_and_counts_time_by_gpus() -> None:
    schedule = Schedule(AUTO, OPTIONS, 0.0, gpus=100, experience=Experience(5.0, 2, 1))
    schedule.stepped(0, 1.0)
    schedule.stepped(1, 11.0)
    schedule.failed(memory_survived=True)
    assert schedule.experience() == Experience(1005.0, 3, 2)
    assert Experience.from_json(schedule.experience().to_json()) == schedule.experience()


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"gpu_s": 1, "failures": 1, "survived": 2},
        {"gpu_s": -1, "failures": 0, "survived": 0},
        {"gpu_s": None, "failures": 0, "survived": 0},
    ],
)
def test_damaged_experience_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"experience|learned"):
        Experience.from_json(data)


# -- always ------------------------------------------------------------------------------------------------------------
positive = st.floats(1e-4, 1e4)


@given(
    stalls=st.lists(positive, max_size=10),
    persists=st.lists(positive, max_size=10),
    gpus=st.integers(1, 200_000),
    failures=st.integers(0, 1000),
    slots=st.integers(0, 2),
    every=st.sampled_from([AUTO, Every(seconds=30), Every(steps=10)]),
)
@settings(deadline=None)
def test_intervals_are_never_below_the_persist_time_and_memory_is_the_more_frequent_tier(
    stalls: list[float], persists: list[float], gpus: int, failures: int, slots: int, every: Every
) -> None:
    schedule = Schedule(
        every, replace(OPTIONS, slots=slots), 0.0, gpus=gpus, experience=Experience(1e6, failures, failures // 2)
    )
    for stall_s in stalls:
        schedule.stalled(stall_s)
    for persist_s in persists:
        schedule.ended(0, SaveState.DURABLE, 1.0, persist_s)
        f = schedule.figures()
        if f.durable_interval_s is not None:
            assert f.durable_interval_s >= 1.1 * f.persist_s * (1 - 1e-9)
            assert f.memory_interval_s is None or f.memory_interval_s <= f.durable_interval_s
    f = schedule.figures()
    assert 0.0 <= f.overhead_ratio <= 1.0
    assert math.isfinite(f.durable_optimum_s)
    assert schedule.reasoning()


@given(st.lists(st.floats(0.8, 1.25), min_size=1, max_size=30))
@settings(deadline=None)
def test_the_interval_stays_while_the_optimum_is_within_a_fifth(wobble: list[float]) -> None:
    schedule = Schedule(AUTO, OPTIONS, 0.0, gpus=16_384, experience=LLAMA3)
    for _ in range(8):
        schedule.stalled(5.0)
    before = schedule.figures().durable_interval_s
    for factor in wobble:  # a stall a quarter off moves the optimum by 12 %
        schedule.stalled(5.0 * factor)
        assert schedule.figures().durable_interval_s == before


@given(
    step_s=st.floats(0.01, 5.0),
    hear_s=st.floats(0.0, 2.0),
    stall_s=st.floats(0.001, 2.0),
    persist_s=st.floats(0.01, 30.0),
    seconds=st.one_of(st.none(), st.floats(1.0, 100.0)),
)
@settings(deadline=None, max_examples=20)
def test_saves_to_the_folder_never_overlap_and_never_stop(
    step_s: float, hear_s: float, stall_s: float, persist_s: float, seconds: float | None
) -> None:
    every = Every(seconds=seconds)
    schedule = Schedule(every, OPTIONS, 0.0, gpus=16_384, experience=LLAMA3)
    training = Training(schedule, step_s=step_s, hear_s=hear_s, stall_s=stall_s, persist_s=persist_s)
    for _ in range(2000):
        training.one_step()
    times = training.times_s(SHARED)
    assert all(b - a >= persist_s for a, b in itertools.pairwise(times))
    longest = (schedule.figures().durable_interval_s or 0.0) * 1.5 + 60 + 10 * (hear_s + step_s)
    if training.now_s > 2 * longest:
        assert times, "some were due"
        assert training.now_s - times[-1] <= longest
