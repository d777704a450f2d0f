"""Passes as they become certain while a run goes on, alarms that agents told of, and what a look has spared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from steadyrun.core.sections import CHECKPOINTING, OUT_OF_SECTION, STEP
from steadyrun.detect.calibrate.passes import InForce, Pass, PassReader

T0 = 1_700_000_000.0


class Told:
    """Writes records as agents do; their clocks since the start are the same, 0 at T0."""

    def __init__(self) -> None:
        self.reader = PassReader()
        self.attempt = 0
        self.steps_done = 0
        self.write("run_started", 0.0, configuration="c")

    def write(self, type_: str, at_s: float, node: str = "n0", **fields: Any) -> None:
        record = {"type": type_, "at_unix_s": T0 + at_s, "at_s": at_s, "node": node, "attempt": self.attempt, **fields}
        self.reader.read(record)

    def begin(self, at_s: float, attempt: int, ranks: Sequence[int] = (0, 1)) -> None:
        self.attempt = attempt
        for rank in ranks:
            self.write("rank_started", at_s, rank=rank)
            self.write("rank_first_step", at_s + 1, rank=rank, step=self.steps_done)

    def steps(
        self,
        at_s: float,
        times_s: Mapping[int, Sequence[float]],
        sections: Mapping[int, Mapping[str, Sequence[float]]] | None = None,
        node: str = "n0",
        **more: Any,
    ) -> None:
        self.steps_done += max((len(t) for t in times_s.values()), default=0)
        ranks = {}
        for rank, t in times_s.items():
            own = {
                n: {"n": len(d), "max_s": max(d), "durations_s": list(d)}
                for n, d in (sections or {}).get(rank, {}).items()
            }
            told = {
                "step": self.steps_done,
                "step_times_s": list(t),
                "steps": len(t),
                "sections": own,
                "lost": 0,
                **more,
            }
            ranks[str(rank)] = told
        self.write("steps", at_s, node, ranks=ranks)

    def alarm(
        self, at_s: float, stage: str, key: str, since_s: float, section: str | None = None, node: str = "n0"
    ) -> None:
        suspicion = {"rank": 0, "section": section, "since_s": since_s, "limit_s": 1.0, "is_soft": stage != "hard"}
        self.write("alarm", at_s, node, stage=stage, key=key, suspicion=suspicion)

    def limits(self, at_s: float, node: str = "n0", **soft: float) -> None:
        self.write("limits", at_s, node, soft=soft, hard=dict.fromkeys(soft, 30.0), first={"load": 100.0})

    def take(self, section: str = STEP, is_over: bool = False) -> list[Pass]:
        return [p for p in self.reader.take(is_over) if p.section == section]


# -- taking ------------------------------------------------------------------------------------------------------------
def test_a_pass_is_taken_once_when_every_rank_has_gone_on() -> None:
    told = Told()
    told.steps(5.0, {0: [1.0, 2.0], 1: [1.5]})
    assert [(p.index, p.seconds, p.rank) for p in told.take()] == [(0, 1.5, 1)]  # rank 1 is still in the second
    told.steps(10.0, {0: [1.0], 1: [9.0, 1.0]})
    assert [(p.index, p.seconds, p.rank) for p in told.take()] == [(1, 9.0, 1), (2, 1.0, 0)]
    assert told.take() == []
    assert told.take(is_over=True) == []


def test_the_newest_pass_of_a_section_is_held_until_it_is_certain() -> None:
    told = Told()
    told.steps(5.0, {r: [1.0] * 4 for r in (0, 1)}, {r: {"load": [0.1, 0.2]} for r in (0, 1)})
    assert [p.seconds for p in told.take("load")] == [0.1]
    assert [p.seconds for p in told.take("load", is_over=True)] == [0.2]


def test_first_passes_are_told_apart() -> None:
    told = Told()
    told.steps(5.0, {0: [1.0] * 4}, {0: {"load": [5.0, 0.1, 0.1]}})
    assert [p.is_first for p in told.take("load")] == [True, False]


def test_the_pass_in_which_an_attempt_was_stopped_is_left_out() -> None:
    told = Told()
    told.steps(5.0, {0: [1.0] * 2}, {0: {"load": [0.1, 60.0]}})
    told.write("stop", 6.0, trigger="hang", delay_s=1.0)
    told.attempt = 1
    told.steps(15.0, {0: [1.0] * 2}, {0: {"load": [0.3, 0.4]}})
    assert [(p.attempt, p.seconds) for p in told.take("load")] == [(0, 0.1), (1, 0.3)]


def test_a_rank_that_passes_a_section_no_more_does_not_hold_it_up_for_ever() -> None:
    told = Told()
    told.steps(5.0, {0: [1.0], 1: [1.0]}, {0: {"save": [0.1]}, 1: {"save": [0.1]}})
    taken = 0
    for i in range(40):
        told.steps(10.0 + 5 * i, {0: [0.4] * 10, 1: [0.4] * 10}, {0: {"save": [0.1] * 10}})
        taken += len(told.take("save"))
    assert taken == 400 - 256
    assert len(told.take("save", is_over=True)) == 401 - taken


def test_sections_around_steps_are_left_out_once_they_are_known() -> None:
    told = Told()
    for i in range(3):
        told.steps(5.0 * (i + 1), {0: [1.0] * 5})
    told.steps(20.0, {0: [1.0] * 5}, {0: {"epoch": [16.0]}})
    assert told.reader.loops == {"epoch"}
    assert told.take("epoch", is_over=True) == []


def test_what_a_restart_cost_is_told_once() -> None:
    told = Told()
    told.begin(0.0, 0)
    told.steps(10.0, {0: [1.0] * 8, 1: [1.0] * 8})
    told.take()
    assert told.reader.take_restart_s() == []
    told.write("stop", 20.0, trigger="exit")
    assert told.reader.take_restart_s() == []
    told.steps_done = 4  # from a checkpoint
    told.begin(29.0, 1)
    (seconds,) = told.reader.take_restart_s()
    assert seconds == pytest.approx(10.0 + 5 * 1.0)  # back after 10 s, steps 4 to 8 again
    assert told.reader.take_restart_s() == []


def test_the_longest_of_what_the_journal_left_out_is_kept() -> None:
    told = Told()
    told.steps(5.0, {0: [1.0] * 3})
    own = {"load": {"n": 50, "max_s": 7.0, "durations_s": [0.1, 0.1]}}
    told.write("steps", 10.0, ranks={"0": {"step": 6, "steps": 3, "step_times_s": [1.0] * 3, "sections": own}})
    assert [p.seconds for p in told.take("load", is_over=True)] == [7.0, 0.1, 0.1]


# -- alarms ------------------------------------------------------------------------------------------------------------
def test_alarms_count_as_the_node_that_told_most() -> None:
    told = Told()
    told.alarm(5.0, "soft", STEP, 1.0)
    for at_s in (5.0, 9.0):
        told.alarm(at_s, "soft", STEP, at_s - 4, node="n1")
    told.alarm(7.0, "soft", "load", 1.0, "load")
    told.alarm(8.0, "hard", STEP, 1.0)
    told.alarm(9.0, "spared", STEP, 1.0)
    told.alarm(9.0, "unheard of", STEP, 1.0)
    alarms = told.reader.result("r").alarms
    assert dict(alarms.soft) == {STEP: 2, "load": 1}
    assert dict(alarms.hard) == {STEP: 1}
    assert dict(alarms.in_hangs) == {}


@pytest.mark.parametrize(("trigger", "in_hangs"), [("hang", 1), ("exit", 1), ("membership", 0)])
def test_an_alarm_belongs_to_the_hang_that_ended_the_attempt(trigger: str, in_hangs: int) -> None:
    told = Told()
    told.alarm(5.0, "soft", STEP, 1.0)  # that pass ended well
    told.alarm(24.0, "soft", STEP, 20.0)
    told.write("stop", 25.0, trigger=trigger, delay_s=5.0)
    alarms = told.reader.result("r").alarms
    assert alarms.soft[STEP] == 2
    assert alarms.in_hangs[STEP] == in_hangs


# -- what was in force, and what a look spared -------------------------------------------------------------------------
def test_a_pass_has_the_limits_that_its_node_went_by() -> None:
    told = Told()
    told.steps(5.0, {0: [1.0]})
    told.limits(5.0, step=4.0)
    told.limits(5.0, node="n1", step=8.0)
    told.steps(10.0, {0: [5.0]})
    told.steps(10.0, {1: [1.0, 6.0]}, node="n1")
    first, second = told.take(is_over=True)
    assert first.in_force is None
    assert second.rank == 1
    assert second.in_force is not None
    assert second.in_force.soft == {STEP: 8.0}


@pytest.mark.parametrize(
    ("seconds", "how", "stage"),
    [
        (3.9, {}, ""),
        (4.0, {}, "soft"),
        (30.0, {}, "hard"),
        (30.0, {"is_gap": True, "index": 2}, ""),  # warm-up
        (30.0, {"is_gap": True, "index": 9}, "hard"),
        (30.0, {"is_first": True}, ""),
        (100.0, {"is_first": True}, "hard"),
        (3.9, {"was_spared": True}, "soft"),  # the limit became longer while it went on
        (3.9, {"section": "save", "was_spared": True}, ""),  # has no soft limit
    ],
)
def test_the_stage_that_a_pass_came_to(seconds: float, how: dict[str, Any], stage: str) -> None:
    in_force = InForce({"load": 4.0}, {"load": 30.0}, {"load": 100.0})
    p = Pass(
        **{"attempt": 0, "section": "load", "index": 9, "seconds": seconds, "rank": 0, "in_force": in_force, **how}
    )
    assert in_force.stage(p) == stage


def spared(told: Told, section: str = STEP) -> list[float]:
    return [p.seconds for p in told.take(section, is_over=True) if p.was_spared]


def test_a_pass_is_spared_when_a_look_left_its_ranks_alone() -> None:
    told = Told()
    told.steps(5.0, {0: [1.0] * 5, 1: [1.0] * 5})
    told.limits(5.0, step=4.0)
    told.alarm(9.0, "soft", STEP, 5.0)
    told.alarm(9.4, "spared", STEP, 5.0)
    told.steps(10.0, {0: [], 1: []})
    told.steps(15.0, {0: [7.0, 1.0, 1.0], 1: [7.1, 1.0, 1.0]})
    assert spared(told) == [7.1]


def test_a_pass_that_ended_before_its_look_was_judged_is_not_spared() -> None:
    told = Told()
    told.limits(5.0, step=4.0)
    told.alarm(9.0, "soft", STEP, 5.0)
    told.steps(10.0, {0: [4.2, 0.5]})
    assert spared(told) == []


def test_a_look_spares_the_passes_of_its_section_alone() -> None:
    told = Told()
    told.limits(5.0, step=4.0, load=4.0)
    told.alarm(9.4, "spared", "load", 5.0, "load")
    told.steps(10.0, {0: [4.6]}, {0: {"load": [0.1, 4.5], CHECKPOINTING: [4.5]}})
    taken = told.reader.take(is_over=True)
    assert {(p.section, p.seconds) for p in taken if p.was_spared} == {("load", 4.5)}


@pytest.mark.parametrize(("record_at_s", "is_spared"), [(10.0, True), (40.0, False)])
def test_a_look_is_nothing_to_passes_long_after_it(record_at_s: float, is_spared: bool) -> None:
    told = Told()
    told.limits(5.0, step=4.0)
    told.alarm(9.4, "spared", STEP, 5.0)
    told.steps(record_at_s - 1.0, {0: [0.1]})
    told.steps(record_at_s, {0: [4.8, 1.0]})
    assert spared(told) == ([4.8] if is_spared else [])


def test_a_look_of_another_node_spares_nothing_here() -> None:
    told = Told()
    for node in ("n0", "n1"):
        told.limits(5.0, node=node, step=4.0)
    told.alarm(9.4, "spared", STEP, 5.0, node="n1")
    told.steps(10.0, {0: [4.8]})
    assert spared(told) == []


def test_the_time_outside_of_sections_is_spared_under_its_own_name() -> None:
    told = Told()
    told.limits(5.0, out_of_section=4.0, step=4.0)
    told.alarm(9.4, "spared", OUT_OF_SECTION, 5.0)
    told.steps(10.0, {0: [4.8]}, {0: {STEP: [0.2]}})
    assert spared(told, OUT_OF_SECTION) == [pytest.approx(4.6)]


@pytest.mark.parametrize("suspicion", [None, "text", {}, {"since_s": "soon", "section": 3}, {"since_s": -1.0}])
def test_a_broken_alarm_spares_nothing_and_harms_nobody(suspicion: Any) -> None:
    told = Told()
    told.limits(5.0, step=4.0)
    told.write("alarm", 9.4, stage="spared", key=STEP, suspicion=suspicion)
    told.steps(10.0, {0: [4.8]})
    assert spared(told) == []


# -- more passes than a record lists -----------------------------------------------------------------------------------
def many(n: int, listed_s: Sequence[float], longest: Any, left_out_s: float) -> dict[str, Any]:
    return {
        "step": n, "steps": n, "step_times_s": list(listed_s), "longest": longest, "left_out_s": left_out_s,
        "sections": {}, "lost": 0,
    }  # fmt: skip


def test_the_long_ones_of_many_steps_keep_their_places() -> None:
    """Also beside another rank's, so that one stall in which all waited is one pass."""
    told = Told()
    ranks = {
        "0": many(500, [0.01] * 200, [[40, 5.0], [90, 3.0]], 2.98),
        "1": many(500, [0.01] * 200, [[40, 5.1]], 2.99),
    }
    told.write("steps", 5.0, ranks=ranks)
    run = told.reader.result("r")
    assert [(p.index, p.seconds, p.rank, p.step) for p in run.passes if p.seconds > 1] == [
        (40, 5.1, 1, 41),
        (90, 3.0, 0, 91),
    ]
    assert (run.unread, run.summed) == (0, 298 + 299)
    assert len(list(run.passes)) == 202


def test_a_long_section_is_taken_off_the_step_it_was_in_when_both_are_among_many() -> None:
    told = Told()
    own = {"n": 100, "max_s": 4.0, "durations_s": [0.002] * 20, "longest": [[7, 4.0]], "left_out_s": 0.1}
    told.write("steps", 5.0, ranks={"0": many(900, [0.01] * 200, [[70, 4.01]], 6.99) | {"sections": {"save": own}}})
    found = {(p.section, round(p.seconds, 3)) for p in told.reader.result("r").passes}
    assert ("save", 4.0) in found
    assert (OUT_OF_SECTION, 0.01) in found
    assert max(s for name, s in found if name == OUT_OF_SECTION) < 0.02


@pytest.mark.parametrize("longest", ["much", [[1]], [[-1, 2.0]], [[400, 2.0]], [[1.5, 2.0]], [None], 3, [["a", "b"]]])
def test_places_that_are_none_are_passed_over(longest: Any) -> None:
    told = Told()
    told.write("steps", 5.0, ranks={"0": many(500, [0.01] * 200, longest, 3.0)})
    run = told.reader.result("r")
    assert len(list(run.passes)) == 200
    assert run.summed == 300
