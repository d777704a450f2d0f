"""Soft limits: what is watched, who shows a hang, and what the machine does before, at and after one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from steadyrun.core.board import OpenSection, SlotView
from steadyrun.core.classes import Mode
from steadyrun.core.records import Suspicion
from steadyrun.node.machine import events as ev
from steadyrun.node.machine.events import Limits, ProbeResult
from steadyrun.node.machine.watchdog import Incarnation, Judgement, Watched, judge_soft, overdue, watched

View = Callable[..., SlotView]
WHO = Incarnation(rank=0, attempt=0, pid=100, spawned_s=0.0)
CALIBRATED = Limits(
    sections={"step": 30.0, "evaluation": 60.0},
    accepted=frozenset({"step", "evaluation"}),
    calibrated=frozenset({"step", "evaluation"}),
    soft={"step": 4.0, "evaluation": 10.0},
    standby_after_steps=10**9,
    standby_after_s=inf,
)
WARM = 20  # a step after the warm-up


# -- what is watched ---------------------------------------------------------------------------------------------------
def due(view: SlotView | None, limits: Limits = CALIBRATED, who: Incarnation = WHO) -> dict[str, float]:
    return {"soft" if w.is_soft else "hard": w.due_s for w in watched(who, view, limits)}


def test_between_steps_both_stages_are_watched(view: View) -> None:
    v = view(step=WARM, step_at_s=100.0)
    assert due(v) == {"hard": 130.0, "soft": 104.0}
    (soft,) = [w for w in watched(WHO, v, CALIBRATED) if w.is_soft]
    assert (soft.key, soft.suspicion.limit_s, soft.suspicion.accepted) == ("step", 4.0, False)
    assert soft.looks_from_s == 102.4  # so that two seconds of looking end a moment after the limit


def test_a_soft_limit_alone_is_watched_where_no_other_is(view: View) -> None:
    limits = Limits(step_s=inf, soft={"step": 4.0})
    assert due(view(step=WARM, step_at_s=100.0), limits) == {"soft": 104.0}


def test_a_soft_limit_accuses_nobody(view: View) -> None:
    v = view(step=WARM, step_at_s=100.0)
    assert overdue(WHO, v, CALIBRATED, 129.0) == []
    assert [s.is_soft for s in overdue(WHO, v, CALIBRATED, 130.0)] == [False]


@pytest.mark.parametrize(("steps_done", "expected"), [(5, {"hard": 400.0}), (6, {"hard": 130.0, "soft": 104.0})])
def test_between_the_first_steps_after_a_start_the_usual_limit_holds(
    view: View, steps_done: int, expected: dict[str, float]
) -> None:
    assert due(view(step=steps_done - 1, step_at_s=100.0)) == expected


def test_a_first_pass_keeps_its_own_limit_and_later_ones_have_two(view: View) -> None:
    limits = replace(CALIBRATED, first={"evaluation": 900.0})
    for is_first, expected in ((True, {"hard": 1000.0}), (False, {"hard": 160.0, "soft": 110.0})):
        v = view(step=WARM, step_at_s=50.0, sections=(OpenSection("evaluation", 100.0, is_first),))
        assert due(v, limits) == expected


def test_a_section_never_seen_keeps_the_usual_limit(view: View) -> None:
    v = view(step=WARM, step_at_s=50.0, sections=(OpenSection("audit", 100.0),))
    assert due(v) == {"hard": 100.0 + Limits().default_section_s}


def test_a_calibrated_limit_asks_for_compilation_before_it_acts(view: View) -> None:
    hard = [w for w in watched(WHO, view(step=WARM, step_at_s=100.0), CALIBRATED) if not w.is_soft]
    assert [(w.ask_compiling, w.compile_until_s) for w in hard] == [(True, 100.0 + Limits().first_step_s)]


# -- who shows a hang --------------------------------------------------------------------------------------------------
def late(rank: int, section: str | None = None) -> Watched:
    kind = "no_progress" if section is None else "section"
    return Watched(Suspicion(rank, kind, section, 0.0, 4.0, False, True), 4.0, 30.0, False, section or "step", 2.4)


def probe(rank: int, **facts: Any) -> ProbeResult:
    base = {"rank": rank, "window_s": 2.0, "state": "S", "cpu_share": 0.0, "stack_unchanged": True, "doing": "own_work"}
    return ProbeResult(**{**base, **facts})


def waits(rank: int, place: str = "all_reduce at train.py:8") -> ProbeResult:
    return probe(rank, in_collective=True, doing="collective", place=place)


def judged(
    probes: list[ProbeResult],
    suspects: tuple[int, ...] = (0, 1),
    world_size: int = 2,
    advanced: tuple[int, ...] = (),
    section: str | None = None,
) -> Judgement:
    alive = [p.rank for p in probes]
    return judge_soft([late(r, section) for r in suspects], {p.rank: p for p in probes}, alive, world_size, advanced)


def guilty(j: Judgement) -> list[int]:
    return sorted(s.rank for s in j.guilty)


def test_a_rank_that_stands_still_while_the_others_wait_shows_a_hang() -> None:
    j = judged([waits(0), probe(1, cpu_share=0.03)])  # of threads that look after the process
    assert guilty(j) == [1]
    assert j.spared == {0: "waits for other ranks"}


@pytest.mark.parametrize("state", ["T", "Z", "X"])
def test_a_dead_or_stopped_rank_shows_a_hang_whatever_the_others_do(state: str) -> None:
    assert guilty(judged([probe(0, stack_unchanged=False), probe(1, state=state, stack_unchanged=None)])) == [1]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"stack_unchanged": False}, "moves"),
        ({"stack_unchanged": None}, "examined"),
        ({"compiling": True}, "compiling"),
        ({"doing": "input"}, "training data"),
        ({"doing": "storage"}, "storage"),
        ({"state": "D"}, "storage"),
        ({"state": "t"}, "debugger"),
        ({"io_moved": True}, "reads or writes"),
        ({"children_cpu_share": 0.15}, "child processes"),
        ({"cpu_share": 0.15}, "computes"),
    ],
)
def test_what_a_healthy_rank_may_do_shows_nothing(facts: dict[str, object], why: str) -> None:
    j = judged([waits(0), probe(1, **facts)])
    assert guilty(j) == []
    assert why in j.spared[1]
    assert "at work" in j.spared[0]


def test_standing_still_while_saving_is_a_matter_of_the_hard_limit() -> None:
    assert guilty(judged([waits(0), probe(1)], suspects=(1,), section="checkpointing")) == []


def test_nobody_is_accused_when_a_rank_has_advanced() -> None:
    j = judged([waits(0), probe(1)], advanced=(0,))
    assert guilty(j) == []
    assert j.spared == {0: "has advanced", 1: "rank 0 is at work"}


def test_without_a_rank_that_waits_for_it_nothing_is_known_of_one_that_stands_still() -> None:
    assert guilty(judged([probe(0), probe(1)])) == []
    assert guilty(judged([probe(0)], suspects=(0,), world_size=1)) == []
    assert guilty(judged([probe(0)], suspects=(0,), world_size=4)) == []


def test_a_rank_that_is_within_its_own_limit_may_be_what_the_others_wait_for() -> None:
    assert guilty(judged([waits(0), probe(1)], suspects=(0,))) == []


def test_all_ranks_in_different_collectives_show_a_hang() -> None:
    assert guilty(judged([waits(0), waits(1, "barrier at train.py:9")])) == [0, 1]


def test_all_ranks_in_one_collective_may_only_be_slow() -> None:
    j = judged([waits(0), waits(1)])
    assert guilty(j) == []
    assert "same place" in j.spared[0]


def test_different_collectives_prove_nothing_while_other_nodes_are_not_seen() -> None:
    assert guilty(judged([waits(0), waits(1, "barrier at train.py:9")], world_size=4)) == []


def test_a_wait_for_gradients_or_the_device_is_no_other_collective() -> None:
    backward = probe(1, in_collective=True, doing="backward", place="backward at train.py:9")
    assert guilty(judged([waits(0), backward])) == []


# -- the machine -------------------------------------------------------------------------------------------------------
def late_job(driver: Callable[..., Any], limits: Limits = CALIBRATED, **how: Any) -> Any:
    """Two ranks whose newest step was at 100 s; the look has begun."""
    d = driver(limits, **how).joined()
    d.read(100.0, both(100.0))
    assert d.machine.next_deadline_s() == pytest.approx(102.4)
    d.read(102.4)
    return d


def both(step_at_s: float, step: int = WARM) -> dict[int, SlotView | None]:
    return {r: view_of(r, step_at_s, step) for r in (0, 1)}


def view_of(rank: int, step_at_s: float, step: int = WARM) -> SlotView:
    return SlotView(
        pid=100 + rank,
        attempt=0,
        rank=rank,
        attached_s=1.0,
        finished_s=None,
        step=step,
        step_at_s=step_at_s,
        steps_done=step + 1,
        step_is_global=True,
        first_step_s=10.0,
        beats=0,
        beat_at_s=None,
        last_change_s=None,
        stop_calls=0,
        uses_should_stop=False,
        checkpoints_done=0,
        has_exception=False,
        dropped=0,
    )


def of(commands: list[ev.Command], kind: type) -> list[Any]:
    return [c for c in commands if isinstance(c, kind)]


def test_the_look_begins_before_the_limit_and_ends_soon_after_it(driver: Callable[..., Any]) -> None:
    d = late_job(driver)
    (asked,) = of(d.out, ev.Probe)
    assert (asked.ranks, asked.window_s) == ((0, 1), pytest.approx(2.0))
    assert d.machine.next_deadline_s() == pytest.approx(104.0)


def test_a_hang_is_acted_on_within_a_second_of_the_soft_limit(driver: Callable[..., Any]) -> None:
    d = late_job(driver)
    (alarm,) = of(d.read(104.0), ev.Alarm)
    assert (alarm.stage, alarm.key) == ("soft", "step")
    d.read(104.41)
    d.at(104.41, ev.ProbesDone((waits(0), probe(1))))
    (stop,) = of(d.out, ev.PublishStop)
    assert (stop.trigger, stop.since_s, stop.due_s) == ("hang", 100.0, 104.0)
    assert of(d.out, ev.Suspect)[0].suspicion.rank == 1
    assert "a look at the ranks shows a hang" in of(d.out, ev.Suspect)[0].note


def test_a_slow_pass_is_told_once_left_alone_and_looked_at_again(driver: Callable[..., Any]) -> None:
    d = late_job(driver)
    d.read(104.0)
    d.at(104.41, ev.ProbesDone((waits(0), probe(1, doing="input"))))
    assert not of(d.out, ev.PublishStop)
    spared = of(d.out, ev.Alarm)
    assert {a.stage for a in spared} == {"spared"}
    assert "training data" in next(a.note for a in spared if a.suspicion.rank == 1)
    assert d.machine.next_deadline_s() == pytest.approx(106.41)  # half the limit later
    assert not of(d.read(105.0), ev.Alarm)
    assert len(of(d.read(106.41), ev.Probe)) == 1
    d.read(106.6, both(106.5, WARM + 1))
    d.at(106.7, ev.ProbesDone((waits(0), probe(1))))
    assert not of(d.out, ev.PublishStop)  # they have gone on


def test_a_pass_that_ends_before_the_limit_is_no_alarm(driver: Callable[..., Any]) -> None:
    d = late_job(driver)
    d.read(103.9, both(103.9, WARM + 1))
    d.at(104.41, ev.ProbesDone((waits(0), probe(1))))
    assert d.out == []
    d.read(104.5)
    assert not of(d.out, ev.Alarm)
    assert d.machine.next_deadline_s() == pytest.approx(106.3)


def test_the_next_slow_pass_is_another_alarm(driver: Callable[..., Any]) -> None:
    d = late_job(driver)
    assert len(of(d.read(104.0), ev.Alarm)) == 1
    d.at(104.41, ev.ProbesDone((probe(0), probe(1))))
    d.read(110.0, both(110.0, WARM + 1))
    d.read(112.4)
    assert len(of(d.read(114.0), ev.Alarm)) == 1


def test_a_rank_that_is_late_a_moment_after_another_is_in_the_same_pass(driver: Callable[..., Any]) -> None:
    d = driver(CALIBRATED).joined()
    d.read(100.0, {0: view_of(0, 100.0), 1: view_of(1, 100.2)})
    d.read(102.4)
    assert len(of(d.read(104.0), ev.Alarm)) == 1
    assert not of(d.read(104.2), ev.Alarm)


def test_at_the_hard_limit_time_alone_acts_unless_a_rank_compiles(driver: Callable[..., Any]) -> None:
    for compiling in (False, True):
        d = late_job(driver)
        d.at(102.5, ev.ProbesDone((probe(0), probe(1))))  # cut short
        d.read(104.0)
        d.read(104.1)
        while of(d.out, ev.Probe) or d.now_s < 130.0:
            if of(d.out, ev.Probe):
                d.at(d.now_s + 0.5, ev.ProbesDone((probe(0, stack_unchanged=False), probe(1, stack_unchanged=False))))
            else:
                d.read(min(max(d.machine.next_deadline_s(), d.now_s), 130.0))
        assert not of(d.out, ev.PublishStop)
        d.read(130.0)
        asked = of(d.out, ev.Probe)
        if not asked:
            d.read(d.machine.next_deadline_s())
            asked = of(d.out, ev.Probe)
        assert asked[0].window_s <= 0.1
        moving = {"stack_unchanged": False, "compiling": compiling}
        d.at(d.now_s + 0.1, ev.ProbesDone((probe(0, **moving), probe(1, **moving))))
        assert bool(of(d.out, ev.PublishStop)) is not compiling
        assert [a.stage for a in of(d.out, ev.Alarm)] == ([] if compiling else ["hard"])


def test_a_lost_look_is_taken_again(driver: Callable[..., Any]) -> None:
    d = late_job(driver)
    d.read(104.0)
    d.read(115.0)  # the probe never answered
    assert {a.stage for a in of(d.out, ev.Alarm)} == {"spared"}
    d.read(d.machine.next_deadline_s())
    assert of(d.out, ev.Probe)


def test_observe_mode_reports_and_touches_nobody(driver: Callable[..., Any]) -> None:
    d = late_job(driver, mode=Mode.OBSERVE)
    d.read(104.0)
    d.at(104.41, ev.ProbesDone((waits(0), probe(1))))
    assert not of(d.out, ev.PublishStop)
    assert [g.only_report for g in of(d.out, ev.Gather)] == [True]


# -- limits that follow ------------------------------------------------------------------------------------------------
def test_new_limits_hold_at_once(driver: Callable[..., Any]) -> None:
    d = driver(replace(CALIBRATED, soft={}, sections={}, accepted=frozenset(), calibrated=frozenset())).joined()
    d.read(100.0, both(100.0))
    assert d.machine.next_deadline_s() == 400.0
    d.at(101.0, ev.LimitsMade(CALIBRATED))
    assert d.machine.next_deadline_s() == pytest.approx(102.4)


def test_a_shorter_limit_waits_for_the_pass_that_has_outlived_it(driver: Callable[..., Any]) -> None:
    longer = replace(CALIBRATED, soft={"step": 100.0}, sections={"step": 200.0})
    d = driver(longer).joined()
    d.read(100.0, both(100.0))
    assert d.at(150.0, ev.LimitsMade(CALIBRATED)) == []
    assert d.machine.limits == longer
    assert d.read(160.0) == []
    d.read(170.0, both(170.0, WARM + 1))
    assert d.machine.limits == CALIBRATED


def test_observe_mode_waits_for_failed_processes_under_new_limits_too(driver: Callable[..., Any]) -> None:
    d = driver(CALIBRATED, mode=Mode.OBSERVE).joined()
    d.at(1.0, ev.LimitsMade(replace(CALIBRATED, soft={})))
    assert d.machine.limits == replace(CALIBRATED, soft={}, raised_s=inf)


def test_a_pass_that_was_looked_at_is_no_new_one_when_limits_change(driver: Callable[..., Any]) -> None:
    d = late_job(driver)
    d.read(104.0)
    d.at(104.41, ev.ProbesDone((waits(0), probe(1, doing="input"))))
    shorter = replace(CALIBRATED, soft={**CALIBRATED.soft, "step": 3.9})
    d.at(104.5, ev.LimitsMade(shorter))
    assert d.machine.limits == shorter
    d.read(104.6)
    assert d.out == []
    assert d.machine.next_deadline_s() == pytest.approx(106.41)
