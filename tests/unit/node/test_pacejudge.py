"""Paces of all nodes judged: what is told of whom and when, and what gaps, haste and news of roles do to it."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import pytest

from steadyrun.core.timing import TAG_FORWARD_SEEN, Role, StepTiming
from steadyrun.detect.straggler import AlarmKind, TimingBlock
from steadyrun.node.pacejudge import HELD_FRAMES, MOST_WAITING, PaceEvent, PaceJudge, PaceNews
from steadyrun.node.timingwire import NodeFacts, RankFacts

STEP_S = 0.5
UNIX_S = 1_700_000_000.0
LEARNED = 90  # steps after which it is known what is normal


def timing(step: int, busy_s: float = 0.3, starved_s: float = 0.0) -> StepTiming:
    shares = (0.4 * busy_s, 0.5 * busy_s, 0.08 * busy_s, 0.02 * busy_s)
    return StepTiming(
        step, 0.0, STEP_S, busy_s, *shares, 0.0, STEP_S - busy_s, busy_s, None, None, TAG_FORWARD_SEEN, starved_s
    )


def facts(node: str, ranks: Iterable[int], role: Role | None = None) -> NodeFacts:
    return NodeFacts(node, tuple(RankFacts(r, r, 100 + r, role) for r in ranks))


@dataclass
class Course:
    """A job of which one step after the other is told and judged; its clock goes on by a step's time each."""

    ranks: int
    slow: Callable[[int, int], float] = lambda rank, step: 1.0
    judge: PaceJudge = field(init=False)
    events: list[PaceEvent] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        self.judge = PaceJudge(self.ranks, cpu_s=lambda: 0.0)
        self.noise = random.Random(5)

    @property
    def now_s(self) -> float:
        return self.step * STEP_S

    def tell(self, silent: Collection[int] = ()) -> None:
        paces = {r: 0.3 * self.slow(r, self.step) * self.noise.gauss(1.0, 0.01) for r in range(self.ranks)}
        rows = {r: [timing(self.step, busy_s)] for r, busy_s in paces.items() if r not in silent}
        self.judge.add(TimingBlock.of_rows(rows).to_bytes(), self.now_s)
        self.step += 1

    def go(self, steps: int, silent: Collection[int] = ()) -> list[PaceEvent]:
        """What was said in so many steps."""
        new: list[PaceEvent] = []
        for _ in range(steps):
            self.tell(silent)
            new += self.judge.judge(self.now_s, UNIX_S + self.now_s)
        self.events += new
        return new

    def go_until(self, news: PaceNews, most: int = 700) -> list[PaceEvent]:
        """All that was said up to the first such news."""
        new: list[PaceEvent] = []
        while most and not any(e.news is news for e in new):
            new += self.go(1)
            most -= 1
        return new

    def finish(self) -> list[PaceEvent]:
        return self.judge.finish(self.now_s, UNIX_S + self.now_s)


def slow_from(rank: int, first: int, last: int = 1 << 60, by: float = 1.3) -> Callable[[int, int], float]:
    return lambda r, step: by if r == rank and first <= step <= last else 1.0


# -- what is told ------------------------------------------------------------------------------------------------------
def test_an_alarm_tells_since_when_by_the_wall_clock() -> None:
    course = Course(4, slow_from(2, LEARNED + 20))
    (began,) = course.go(LEARNED + 60)
    assert (began.news, began.alarm.kind, began.alarm.ranks) == (PaceNews.BEGAN, AlarmKind.RANK, (2,))
    assert abs(began.alarm.first_step - (LEARNED + 20)) <= 2
    assert began.since_unix_s == UNIX_S + (began.alarm.first_step + 1) * STEP_S
    assert began.alarm.impact > 0.05, "what the job loses is known at once"


def test_an_end_has_the_figures_of_the_beginning() -> None:
    course = Course(4, slow_from(2, LEARNED, LEARNED + 80))
    began, ended = course.go_until(PaceNews.ENDED)
    assert (began.news, ended.news) == (PaceNews.BEGAN, PaceNews.ENDED)
    assert ended.alarm.key == began.alarm.key
    assert (ended.alarm.slowdown, ended.alarm.impact) == (began.alarm.slowdown, began.alarm.impact)
    assert ended.alarm.over_step is not None
    assert ended.alarm.lost_s > began.alarm.lost_s
    assert course.finish() == []
    assert course.judge.open_alarms() == []


def test_what_lasts_to_the_end_is_told_at_the_end() -> None:
    course = Course(4, slow_from(2, LEARNED))
    course.go(LEARNED + 100)
    (now,) = course.judge.open_alarms()
    (lasts,) = course.finish()
    assert (lasts.news, lasts.alarm) == (PaceNews.LASTS, now)
    assert now.lost_s > 1.0


def test_single_slow_steps_are_told_at_the_end_and_accuse_nobody() -> None:
    course = Course(4, lambda rank, step: 2.0 if rank == 1 and step > LEARNED and step % 25 == 0 else 1.0)
    assert course.go(LEARNED + 110) == []
    (bursts,) = course.finish()
    assert (bursts.news, bursts.alarm.kind, bursts.alarm.ranks) == (PaceNews.BURSTS, AlarmKind.TRANSIENT, (1,))
    assert bursts.since_unix_s is None
    assert not bursts.alarm.is_actionable


def test_a_node_of_which_half_is_slow_is_named_as_a_node() -> None:
    course = Course(8, lambda rank, step: 1.3 if rank >= 4 and step >= LEARNED else 1.0)
    course.judge.introduce(facts("a", range(4)))
    course.judge.introduce(facts("b", range(4, 8)))
    began = course.go(LEARNED + 60)
    assert [(e.alarm.kind, e.alarm.node) for e in began] == [(AlarmKind.NODE, "b")]
    assert [a.kind for a in course.judge.open_alarms()] == [AlarmKind.NODE], "it stands for its ranks"
    assert [(e.news, e.alarm.kind) for e in course.finish()] == [(PaceNews.LASTS, AlarmKind.NODE)]


def test_ranks_of_a_slow_node_do_not_end_one_by_one() -> None:
    """They had no alarms of their own; the node's ends with the last of them."""
    course = Course(8, lambda rank, step: 1.3 if rank >= 4 and LEARNED <= step < LEARNED + 30 + 10 * rank else 1.0)
    course.judge.introduce(facts("a", range(4)))
    course.judge.introduce(facts("b", range(4, 8)))
    events = course.go_until(PaceNews.ENDED)
    assert [(e.news, e.alarm.kind) for e in events] == [
        (PaceNews.BEGAN, AlarmKind.NODE),
        (PaceNews.ENDED, AlarmKind.NODE),
    ]


# -- gaps --------------------------------------------------------------------------------------------------------------
def test_a_silent_node_delays_judgement_by_its_patience_and_no_more() -> None:
    course = Course(5, slow_from(0, LEARNED + 40))
    course.go(LEARNED)
    assert course.judge.judged == LEARNED
    course.go(9, silent=(3, 4))
    assert course.judge.judged == LEARNED, "it may still come"
    began = course.go(91, silent=(3, 4))
    assert course.judge.judged == LEARNED + 100 - 9
    assert [(e.news, e.alarm.ranks) for e in began] == [(PaceNews.BEGAN, (0,))]


def test_two_of_many_accuse_nobody() -> None:
    """Which of them is slow and which is fast cannot be told by what was normal among more."""
    course = Course(4, slow_from(0, LEARNED))
    course.go(LEARNED)
    assert course.go(100, silent=(2, 3)) == []


def test_who_is_silent_is_not_accused_when_it_speaks_again() -> None:
    course = Course(4)
    course.go(LEARNED)
    course.go(60, silent=(3,))
    assert course.go(100) == []
    assert course.finish() == []


def test_steps_that_wait_for_somebody_are_judged_at_the_end() -> None:
    course = Course(4, slow_from(1, LEARNED))
    for _ in range(LEARNED + 60):
        course.tell(silent=(3,))
    began, lasts = course.finish()
    assert [(e.news, e.alarm.ranks) for e in (began, lasts)] == [(PaceNews.BEGAN, (1,)), (PaceNews.LASTS, (1,))]
    assert course.judge.judged == LEARNED + 60


def test_an_attempt_of_which_nobody_told_anything_ends_silently() -> None:
    judge = PaceJudge(4)
    assert judge.judge(0.0, UNIX_S) == []
    assert judge.finish(1.0, UNIX_S) == []
    assert judge.open_alarms() == []


def test_rows_that_end_within_a_row_are_refused() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        PaceJudge(2).add(b"x" * 63, 0.0)


# -- haste -------------------------------------------------------------------------------------------------------------
def test_the_first_steps_wait_until_it_is_known_how_long_a_step_is() -> None:
    course = Course(2)
    course.go(HELD_FRAMES - 1)
    assert course.judge.judged == 0
    course.go(1)
    assert course.judge.judged == HELD_FRAMES


def test_one_call_takes_no_more_of_the_loop_than_its_budget() -> None:
    """Each look at the clock costs 8 ms here: after three steps the loop is let go, and comes back for the rest."""
    spent = iter(range(10_000))
    judge = PaceJudge(2, cpu_s=lambda: 0.008 * next(spent))
    judge.add(TimingBlock.of_rows({r: [timing(s) for s in range(30)] for r in range(2)}).to_bytes(), 0.0)
    judged = []
    while judge.judged < 30:
        judge.judge(0.0, UNIX_S)
        judged.append(judge.judged)
    assert judged == list(range(3, 31, 3))
    assert judge.skipped == 0


def test_steps_that_come_too_fast_are_thinned_out_and_counted() -> None:
    spent = iter(range(10_000))
    judge = PaceJudge(2, cpu_s=lambda: 1.0 * next(spent))
    steps = 2 * MOST_WAITING
    judge.add(TimingBlock.of_rows({r: [timing(s) for s in range(steps)] for r in range(2)}).to_bytes(), 0.0)
    judge.judge(0.0, UNIX_S)
    assert judge.judged == 1
    assert judge.skipped == (steps - 1) // 2
    judge.finish(0.0, UNIX_S)
    assert judge.judged + judge.skipped == steps


# -- who is who --------------------------------------------------------------------------------------------------------
def test_without_roles_all_are_compared() -> None:
    judge = PaceJudge(4)
    judge.introduce(facts("a", range(4)))
    assert judge.roles is None


def test_ranks_that_do_another_kind_of_work_are_not_slow() -> None:
    course = Course(4, lambda rank, step: 1.5 if rank >= 2 else 1.0)
    course.judge.introduce(facts("a", (0, 1), Role("stage 0", (0,))))
    course.judge.introduce(facts("b", (2, 3), Role("stage 1", (1,))))
    assert course.judge.roles == {r: Role(f"stage {r // 2}", (r // 2,)) for r in range(4)}
    events = course.go(400)
    assert [e.alarm.kind for e in events] == [AlarmKind.STAGE_IMBALANCE]


def test_ranks_that_cannot_be_are_left_out() -> None:
    judge = PaceJudge(2)
    judge.introduce(facts("a", (-1, 0, 2)))
    assert judge.nodes == {0: "a"}
    found = judge.facts_of(0)
    assert found is not None
    assert found.pid == 100
    assert judge.facts_of(2) is None


def test_roles_that_come_late_make_it_learn_anew() -> None:
    course = Course(4, slow_from(2, LEARNED))
    course.go(LEARNED - 10)
    course.judge.introduce(facts("a", range(4), Role("all", ())))
    assert course.go(LEARNED - 10) == [], "what is normal is not known yet, so nobody is slow"
    course.judge.introduce(facts("a", range(4), Role("all", ())))
    assert course.judge.judged == 2 * (LEARNED - 10), "the same told again changes nothing"


def test_a_new_comparison_tells_what_the_old_one_leaves_open() -> None:
    course = Course(4, slow_from(2, LEARNED))
    (began,) = course.go(LEARNED + 60)
    (before,) = course.judge.open_alarms()
    course.judge.introduce(facts("a", range(4), Role("all", ())))
    assert course.judge.open_alarms() == []
    (left,) = course.go(LEARNED - 20)
    assert (left.news, left.alarm) == (PaceNews.LASTS, before)
    assert left.alarm.key == began.alarm.key
