"""Which deadlines a rank is under."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from math import inf

import pytest

from steadyrun.core.board import OpenSection, SlotView
from steadyrun.node.machine.events import Limits
from steadyrun.node.machine.watchdog import Incarnation, next_deadline_s, overdue, watched

L = Limits(
    start_s=300.0,
    setup_s=1800.0,
    step_s=300.0,
    first_step_s=1000.0,
    checkpointing_s=1200.0,
    evaluation_s=3600.0,
    default_section_s=1500.0,
    out_of_section_s=700.0,
    teardown_s=180.0,
)
WHO = Incarnation(rank=0, attempt=0, pid=100, spawned_s=0.0)
View = Callable[..., SlotView]


def test_a_rank_that_never_attaches_is_due_start_s_after_its_spawn() -> None:
    assert next_deadline_s(WHO, None, L, 0.0) == 300.0
    [s] = overdue(WHO, None, L, 300.0)
    assert (s.kind, s.since_s, s.limit_s, s.accepted) == ("never_reported", 0.0, 300.0, False)


def test_a_rank_that_may_never_attach_is_not_accused_of_it() -> None:
    assert watched(dataclasses.replace(WHO, observed=False), None, L) == []


@pytest.mark.parametrize("other", [{"pid": 99}, {"attempt": 1}])
def test_what_another_incarnation_left_counts_as_absent(view: View, other: dict[str, int]) -> None:
    stale = view(step=5, step_at_s=9000.0, **other)
    assert [w.suspicion.kind for w in watched(WHO, stale, L)] == ["never_reported"]


def test_a_hang_before_any_call_or_step_is_covered_by_setup(view: View) -> None:
    v = view(attached_s=2.0, sections=(OpenSection("setup", 2.0, True),))
    assert next_deadline_s(WHO, v, L, 10.0) == 1802.0
    [s] = overdue(WHO, v, L, 1802.0)
    assert (s.kind, s.section) == ("section", "setup")


def test_beats_are_progress_in_the_setup(view: View) -> None:
    v = view(attached_s=2.0, sections=(OpenSection("setup", 2.0, True),), beat_at_s=1000.0)
    assert next_deadline_s(WHO, v, L, 1000.0) == 2800.0


def test_a_setup_limit_that_was_given_counts_from_the_start_whatever_beats(view: View) -> None:
    limits = dataclasses.replace(L, sections={"setup": 600.0}, accepted=frozenset({"setup"}))
    v = view(attached_s=2.0, sections=(OpenSection("setup", 2.0, True),), beat_at_s=500.0)
    [w] = watched(WHO, v, limits)
    assert (w.due_s, w.suspicion.accepted, w.ask_compiling) == (602.0, True, True)
    assert w.compile_until_s == 1002.0


@pytest.mark.parametrize("newest", ["step", "beat", "section"])
def test_without_own_sections_the_time_between_steps_counts_from_the_newest_sign(view: View, newest: str) -> None:
    v = view(
        step=5,
        step_at_s=100.0 if newest != "step" else 200.0,
        beat_at_s=200.0 if newest == "beat" else None,
        last_change_s=200.0 if newest == "section" else 50.0,
    )
    [s] = overdue(WHO, v, L, 500.0)
    assert (s.kind, s.section, s.since_s) == ("no_progress", None, 200.0)
    assert overdue(WHO, v, L, 499.9) == []


def test_a_step_limit_that_was_given_is_the_time_between_steps_too(view: View) -> None:
    limits = dataclasses.replace(L, sections={"step": 30.0}, accepted=frozenset({"step"}))
    [s] = overdue(WHO, view(step=5, step_at_s=100.0), limits, 130.0)
    assert s.accepted
    assert s.limit_s == 30.0


def test_once_a_step_section_was_seen_the_gap_between_sections_has_its_own_limit(view: View) -> None:
    who = dataclasses.replace(WHO, own_step=True, own_sections=True)
    assert next_deadline_s(who, view(step=5, step_at_s=100.0, last_change_s=101.0), L, 101.0) == 801.0


def out_of_section_given(*others: str, **changes: float) -> Limits:
    sections = {"out_of_section": 50.0, **changes}
    return dataclasses.replace(L, sections=sections, accepted=frozenset({"out_of_section", *others}))


def test_a_given_limit_between_sections_holds_in_a_script_that_also_marks_steps(view: View) -> None:
    v = view(step=5, step_at_s=100.0, last_change_s=101.0)
    own = dataclasses.replace(WHO, own_sections=True)
    for who in (WHO, own):
        assert [(w.due_s, w.suspicion.accepted) for w in watched(who, v, out_of_section_given())] == [(151.0, True)]
    shorter = out_of_section_given("step", step=20.0)
    assert [w.due_s for w in watched(own, v, shorter)] == [121.0]


def test_a_script_without_sections_keeps_its_given_step_limit_beside_one_between_sections(view: View) -> None:
    limits = out_of_section_given("step", step=180.0)
    assert [w.due_s for w in watched(WHO, view(step=5, step_at_s=100.0), limits)] == [280.0]
    own = dataclasses.replace(WHO, own_sections=True)
    assert [w.due_s for w in watched(own, view(step=5, step_at_s=100.0), limits)] == [150.0]


@pytest.mark.parametrize(("name", "limit_s"), [("checkpointing", 1200.0), ("evaluation", 3600.0), ("Validate", 3600.0)])
def test_a_known_section_suspends_the_time_between_steps_and_is_judged_itself(
    view: View, name: str, limit_s: float
) -> None:
    v = view(step=5, step_at_s=100.0, sections=(OpenSection(name, 110.0),))
    assert [(w.suspicion.section, w.due_s) for w in watched(WHO, v, L)] == [(name, 110.0 + limit_s)]


def test_after_a_long_evaluation_the_rank_gets_a_whole_step_limit_again(view: View) -> None:
    v = view(step=5, step_at_s=100.0, last_change_s=2500.0)
    assert next_deadline_s(WHO, v, L, 2500.0) == 2800.0


def test_a_section_in_another_thread_suspends_nothing(view: View) -> None:
    v = view(step=5, step_at_s=100.0, sections=(OpenSection("checkpointing", 110.0, lane=1),))
    assert sorted(w.due_s for w in watched(WHO, v, L)) == [400.0, 1310.0]


def test_an_outer_section_is_judged_while_an_inner_one_is_young(view: View) -> None:
    v = view(step=5, step_at_s=50.0, sections=(OpenSection("step", 100.0), OpenSection("forward", 399.0)))
    assert [s.section for s in overdue(WHO, v, L, 400.0)] == ["step"]


def test_the_first_pass_of_a_section_has_the_larger_limit(view: View) -> None:
    v = view(sections=(OpenSection("step", 100.0, True),))
    [w] = watched(WHO, v, L)
    assert w.due_s == 1100.0
    longer = dataclasses.replace(L, first={"step": 2000.0})
    assert watched(WHO, v, longer)[0].due_s == 2100.0
    shorter = dataclasses.replace(L, first={"step": 10.0})
    assert watched(WHO, v, shorter)[0].due_s == 400.0


def test_a_limit_that_was_given_holds_on_the_first_pass_too_but_compilation_is_asked_for(view: View) -> None:
    limits = dataclasses.replace(L, sections={"step": 180.0}, accepted=frozenset({"step"}))
    [w] = watched(WHO, view(sections=(OpenSection("step", 100.0, True),)), limits)
    assert (w.due_s, w.ask_compiling, w.compile_until_s) == (280.0, True, 1100.0)
    [w] = watched(WHO, view(sections=(OpenSection("step", 100.0, False),)), limits)
    assert (w.due_s, w.ask_compiling) == (280.0, False)


def test_steps_inside_a_section_without_a_limit_are_its_progress(view: View) -> None:
    v = view(step=5, step_at_s=9000.0, sections=(OpenSection("epoch", 100.0),))
    due = {w.suspicion.section: w.due_s for w in watched(WHO, v, L)}
    assert due == {"epoch": 10500.0, None: 9300.0}


def test_a_section_left_open_by_mistake_does_not_switch_the_step_limit_off(view: View) -> None:
    v = view(step=50, step_at_s=900.0, sections=(OpenSection("checkpointing", 100.0),))
    assert 1200.0 in [w.due_s for w in watched(WHO, v, L) if w.suspicion.section is None]


def test_a_section_limit_by_name_wins_and_none_or_inf_switch_it_off(view: View) -> None:
    v = view(step=5, step_at_s=50.0, sections=(OpenSection("sampling", 100.0),))
    given = dataclasses.replace(L, sections={"sampling": 20.0}, accepted=frozenset({"sampling"}))
    assert [(w.due_s, w.suspicion.accepted) for w in watched(WHO, v, given)] == [(120.0, True)]
    for off in (None, inf):
        assert watched(WHO, v, dataclasses.replace(L, sections={"sampling": off})) == []


def test_out_of_section_can_be_switched_off(view: View) -> None:
    who = dataclasses.replace(WHO, own_step=True)
    v = view(step=5, step_at_s=50.0)
    assert watched(who, v, dataclasses.replace(L, sections={"out_of_section": None})) == []


def test_a_rank_that_raised_has_little_time_to_end(view: View) -> None:
    v = dataclasses.replace(view(step=5, step_at_s=50.0, finished_s=60.0), has_exception=True)
    [w] = watched(WHO, v, L)
    assert (w.suspicion.kind, w.due_s, w.suspicion.accepted) == ("raised", 70.0, True)
    assert [w.suspicion.kind for w in watched(WHO, v, dataclasses.replace(L, raised_s=inf))] == ["teardown"]


def test_a_finished_rank_is_under_the_teardown_limit_only(view: View) -> None:
    v = view(step=5, step_at_s=50.0, finished_s=60.0, sections=(OpenSection("step", 40.0),))
    assert [(w.suspicion.kind, w.due_s) for w in watched(WHO, v, L)] == [("teardown", 240.0)]


def test_when_another_rank_has_ended_well_this_one_must_end_too(view: View) -> None:
    who = dataclasses.replace(WHO, others_done_s=500.0)
    v = view(step=5, step_at_s=490.0)
    assert ("teardown", 680.0) in [(w.suspicion.kind, w.due_s) for w in watched(who, v, L)]


def test_a_rank_that_still_steps_or_saves_after_the_others_have_ended_is_given_its_time(view: View) -> None:
    who = dataclasses.replace(WHO, others_done_s=500.0)
    saving = view(step=5, step_at_s=490.0, sections=(OpenSection("checkpointing", 495.0),))
    assert [w.suspicion.section for w in watched(who, saving, L)] == ["checkpointing"]
    stepping = view(step=9, step_at_s=600.0)
    assert ("teardown", 780.0) in [(w.suspicion.kind, w.due_s) for w in watched(who, stepping, L)]


def test_next_deadline_leaves_out_what_has_passed(view: View) -> None:
    v = view(step=5, step_at_s=100.0, sections=(OpenSection("epoch", 90.0),))
    assert next_deadline_s(WHO, v, L, 500.0) == 1600.0
    assert next_deadline_s(WHO, v, L, 5000.0) == inf
