"""Folding: places in the chain of waits, ranks in lanes, time on the axis."""

from __future__ import annotations

import postmortem_reports as reports
import pytest

from steadyrun.core.classes import FaultClass
from steadyrun.core.records import Finding
from steadyrun.detect.waits.records import FlightFinding, FlightJudgement, Wait, WaitReason
from steadyrun.postmortem.case import Case, Report
from steadyrun.postmortem.chain import chain_of_waits
from steadyrun.postmortem.lanes import Axis, chart_lanes
from steadyrun.postmortem.words import age_words, clock_words, rank_words


def report_of(waits: tuple[Wait, ...], finding: Finding, heads: dict[int, int] | None = None) -> Report:
    judgement = FlightJudgement((FlightFinding(finding),), waits, heads=heads or {})
    return Report(Case(reports.evidence_of((), 8), ()), (finding,), (), (), judgement)


def wait(waiters: tuple[int, ...], on: tuple[int, ...], desc: str = "pg", seq: int = 1) -> Wait:
    return Wait(waiters, on, WaitReason.NOT_ISSUED, desc, desc, seq, "all_reduce")


def test_every_rank_has_one_place_and_a_depth() -> None:
    chain = chain_of_waits(reports.stall_of(4, 4, 2))
    seen = [rank for place in chain.places for rank in place.ranks]
    assert sorted(seen) == list(range(16))
    assert [p.depth for p in chain.places] == [0, 1, 1, 2]
    behind = chain.places[3]
    assert behind.parent is not None
    assert chain.places[behind.parent].desc == "mesh_tp"
    assert behind.groups == 3


def test_line_of_sixteen_stages_keeps_its_order() -> None:
    waits = tuple(wait((r,), (r + 1,), f"pair{r}") for r in range(15))
    chain = chain_of_waits(report_of(waits, Finding(FaultClass.HOST_STALL, (15,), "", 0.9)))
    assert [p.ranks for p in chain.places] == [(r,) for r in range(15, -1, -1)]
    assert [p.parent for p in chain.places] == [None, *range(15)]


def test_ring_of_two_halves_folds_each_half() -> None:
    waits = (wait((0, 1), (2, 3), "A"), wait((2, 3), (0, 1), "B"), wait((4,), (0,), "C"))
    finding = Finding(FaultClass.DEADLOCK_CYCLE, (0, 1, 2, 3), "", 0.9)
    chain = chain_of_waits(report_of(waits, finding, {0: 0, 1: 0, 2: 1, 3: 1, 4: 2}))
    assert [p.ranks for p in chain.places] == [(0, 1), (2, 3), (4,)]
    assert chain.rings == ((0, (0, 1)),)


def test_hang_in_flight_without_a_culprit_is_its_own_root() -> None:
    stuck = Wait((0, 1, 2, 3), (), WaitReason.IN_FLIGHT, "g", "dp", 7, "all_gather")
    finding = Finding(FaultClass.IN_FLIGHT_NETWORK, (), "", 0.7, group="dp", seq=7, op="all_gather")
    chain = chain_of_waits(report_of((stuck, wait((4,), (0,))), finding, dict.fromkeys(range(4), 0)))
    assert [(p.ranks, p.depth) for p in chain.places] == [((0, 1, 2, 3), 0), ((4,), 1)]


def test_waits_that_lead_to_nobody_blamed_are_kept_apart() -> None:
    finding = Finding(FaultClass.INSUFFICIENT_DATA, (), "", 0.3)
    chain = chain_of_waits(report_of((wait((0, 1), (2,)),), finding))
    assert chain.of_finding(None) == (0, 1)
    assert chain.places[1].ranks == (0, 1)


def test_ring_that_nobody_is_blamed_for_ends() -> None:
    finding = Finding(FaultClass.INSUFFICIENT_DATA, (), "", 0.3)
    waits = (wait((0,), (1,), "A"), wait((1,), (0,), "B"), wait((5,), (6,), "C"), wait((6,), (5,), "D"))
    chain = chain_of_waits(report_of(waits, finding))
    assert sorted(r for p in chain.places for r in p.ranks) == [0, 1, 5, 6]


def test_layer_of_many_places_folds_those_that_wait_for_different_ones() -> None:
    below = tuple(wait((20 + r,), (r,), "dp", 3) for r in range(1, 7))
    ends = tuple(wait((r,), (0,), f"tp{r}") for r in range(1, 7))
    chain = chain_of_waits(report_of((*ends, *below), Finding(FaultClass.HOST_STALL, (0,), "", 0.9)))
    last = chain.places[-1]
    assert (last.depth, last.ranks, last.op) == (2, tuple(range(21, 27)), "all_reduce")
    assert sorted([last.parent or 0, *last.also]) == [1, 2, 3, 4, 5, 6]


def test_lanes_fold_equal_ranks_and_put_the_culprit_first() -> None:
    report = reports.stall_of(8, 16, 37)
    chart = chart_lanes(report, chain_of_waits(report))
    assert [(lane.role, len(lane.ranks)) for lane in chart.lanes] == [
        ("culprit", 1), ("victim", 7), ("victim", 120),
    ]  # fmt: skip
    silence = chart.lanes[0].bars[0]
    assert silence.kind == "silence"
    assert silence.start_s == pytest.approx(reports.START_S - 0.1)
    assert [b.kind for b in chart.lanes[2].bars] == ["head", "open", "section"]
    assert len(chart.lanes[2].starts_s) == 120


def test_long_wait_is_drawn_shorter_than_what_led_to_it() -> None:
    report = reports.stall_of()
    axis = chart_lanes(report, chain_of_waits(report)).axis
    assert axis is not None
    assert axis.knee_s is not None
    assert axis.right_s - axis.knee_s > 600
    assert axis.at(reports.START_S) - axis.at(reports.START_S - 1) > 10
    assert axis.at(axis.right_s) == 100


def test_axis_never_leaves_the_track() -> None:
    axis = Axis(10, 20, 12, 40)
    assert [axis.at(t) for t in (-1e300, 10, 12, 16, 20, 1e300)] == [0, 0, 40, 70, 100, 100]


def test_words() -> None:
    assert age_words(0.0042) == "4.2 ms"
    assert age_words(612) == "10 min"
    assert clock_words(reports.START_S + 59.9996, 3) == "16:00:59.999"
    assert clock_words(float("nan")) == ""
    assert rank_words(range(0, 1024, 8)) == "128 ranks: 0, 8, 16 … 1016, every 8th"
    assert rank_words(range(8), 8) == "all 8 ranks"
