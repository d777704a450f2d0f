"""The replay of passes agrees with the shipped watchdog, for any limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrun.core.board import OpenSection, SlotView
from steadyrun.ctl.calibration.replay import fired, fired_as_it_grew, limit_s
from steadyrun.detect.calibrate import OUT_OF_SECTION, SectionStatistics
from steadyrun.detect.calibrate.passes import Attempt, Pass, RunPasses
from steadyrun.node.machine.events import Limits
from steadyrun.node.machine.watchdog import Incarnation, overdue

SINCE_S = 1000.0
NAMES = ("setup", "step", "checkpointing", "evaluation", "Eval", "data", OUT_OF_SECTION)
limit = st.sampled_from([0.5, 1.0, 7.0, 60.0, 900.0])
limits_of_any_kind = st.builds(
    Limits,
    setup_s=limit,
    step_s=limit,
    checkpointing_s=limit,
    evaluation_s=limit,
    default_section_s=limit,
    out_of_section_s=limit,
    first_step_s=limit,
    sections=st.dictionaries(st.sampled_from(NAMES), st.one_of(limit, st.none())),
    first=st.dictionaries(st.sampled_from(NAMES[:-1]), limit),
    accepted=st.frozensets(st.sampled_from(NAMES)),
)
passes = st.builds(
    Pass,
    attempt=st.just(0),
    section=st.sampled_from(NAMES),
    index=st.just(3),
    seconds=st.sampled_from([0.4, 0.5, 3.0, 7.0, 30.0, 60.0, 899.0, 900.0, 5000.0]),
    rank=st.just(0),
    is_first=st.booleans(),
)


def view_of(p: Pass) -> SlotView:
    """The board in the last instant of the pass: the section is open, or nothing is and the newest step is long ago."""
    sections: tuple[OpenSection, ...] = ()
    step_at_s: float | None = SINCE_S - 1.0
    if p.section == OUT_OF_SECTION:
        step_at_s = SINCE_S
    else:
        step_at_s = None if p.section == "setup" else step_at_s
        sections = (OpenSection(p.section, SINCE_S, first=p.is_first),)
    return SlotView(
        pid=1,
        attempt=0,
        rank=0,
        attached_s=SINCE_S - 50,
        finished_s=None,
        step=None if step_at_s is None else 3,
        step_at_s=step_at_s,
        steps_done=0 if step_at_s is None else 4,
        step_is_global=False,
        first_step_s=step_at_s,
        beats=0,
        beat_at_s=None,
        last_change_s=None,
        stop_calls=0,
        uses_should_stop=False,
        checkpoints_done=0,
        has_exception=False,
        dropped=0,
        sections=sections,
    )


def is_late(p: Pass, limits: Limits) -> bool:
    """Says the watchdog."""
    who = Incarnation(0, 0, 1, 0.0, own_step=True, own_sections=True)
    return bool(overdue(who, view_of(p), limits, SINCE_S + p.seconds))


@given(p=passes, limits=limits_of_any_kind)
def test_a_pass_is_late_exactly_when_the_watchdog_says_so(p: Pass, limits: Limits) -> None:
    run = RunPasses("r", attempts=[Attempt(0, 1, [p])], has_own_step=True)
    assert bool(fired([run], limits)[p.section]) == is_late(p, limits)


@given(seconds=st.sampled_from([0.4, 0.5, 7.0, 60.0]), limits=limits_of_any_kind)
def test_a_step_without_a_section_is_late_exactly_when_the_watchdog_says_so(seconds: float, limits: Limits) -> None:
    limits = replace(limits, accepted=limits.accepted - {OUT_OF_SECTION})  # else both limits are on the same time
    who = Incarnation(0, 0, 1, 0.0, own_sections=True)
    expected = bool(overdue(who, view_of(Pass(0, OUT_OF_SECTION, 3, seconds, 0)), limits, SINCE_S + seconds))
    run = RunPasses(
        "r", attempts=[Attempt(0, 1, [Pass(0, "step", 3, seconds, 0), Pass(0, OUT_OF_SECTION, 3, seconds, 0)])]
    )
    assert dict(fired([run], limits)) == ({"step": 1} if expected else {})


def test_each_pass_fires_once() -> None:
    durations_s = [1.0] * 10 + [9.0, 3.0]
    run = RunPasses("r", attempts=[Attempt(0, 4, [Pass(0, "step", i, s, 0) for i, s in enumerate(durations_s)])])
    limits = Limits(step_s=3.0)
    assert fired([run, run], limits)["step"] == 4
    assert limit_s(limits, "step") == 3.0


@pytest.mark.parametrize(("factor", "expected"), [(5.0, 0), (1.5, 1)])
def test_limits_that_follow_are_judged_by_what_had_been_seen_before(factor: float, expected: int) -> None:
    """10 passes of 1 s, then one of 2 s twice: the second is no surprise any more."""
    durations_s = [1.0] * 10 + [2.0, 2.0]

    def rule(seen: SectionStatistics) -> tuple[float, float]:
        return (factor * seen.durations.max_s if seen.durations.events >= 4 else 100.0), 100.0

    attempt = Attempt(0, 4, [Pass(0, "step", i, s, 0) for i, s in enumerate(durations_s)], observed_s=14.0)
    assert fired_as_it_grew([RunPasses("r", attempts=[attempt])], rule)["step"] == expected
