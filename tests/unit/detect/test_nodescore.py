"""Scores of nodes: they add up, fade, need a comparison, and can be brought together in any order."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrun.core.classes import FaultClass
from steadyrun.core.records import Finding
from steadyrun.detect.faulttable import ROWS, FaultKind
from steadyrun.detect.nodescore import (
    EARLY_SHARE,
    HALF_LIFE_S,
    HORIZON_S,
    MOST_MARKS,
    SCHEMA,
    THRESHOLD,
    Machine,
    Mark,
    NodeScores,
    Why,
    mark_of_exclusion,
    marks_of,
    read_marks,
)

K = FaultKind
NOW_UNIX_S = 1_800_000_000.0
DAY_S = 86400.0
A, B, C = (Machine(n, f"host-{n}") for n in "abc")


def mark(
    incident: int,
    machine: Machine = A,
    age_s: float = 0.0,
    weight: float = 1.0,
    run: str = "run",
    kind: FaultKind = K.CRASH,
    why: Why = Why.BLAMED,
    is_hardware: bool = False,
) -> Mark:
    at_unix_s = NOW_UNIX_S - age_s
    return Mark(run, incident, machine.node, machine.host, why, kind, at_unix_s, weight, None, is_hardware)


def scores(*marks: Mark) -> NodeScores:
    return NodeScores("run").with_marks(marks, NOW_UNIX_S)


def offenders(marks: Iterable[Mark], machines: Iterable[Machine] = (A, B, C)) -> frozenset[str]:
    return scores(*marks).offenders(tuple(machines), NOW_UNIX_S)


def finding(*nodes: str, confidence: float = 1.0, gpus: tuple[str, ...] = ()) -> Finding:
    return Finding(FaultClass.DEAD_PROCESS, (1,), "made", confidence, nodes=nodes, gpus=gpus)


def left_by(found: Finding, kind: FaultKind = K.CRASH, *machines: Machine, is_early: bool = False) -> list[Mark]:
    return marks_of(
        [(found, kind)], machines or (A, B), run="run", incident=1, now_unix_s=NOW_UNIX_S, is_early=is_early
    )


# -- when a node is over the threshold ---------------------------------------------------------------------------------
def test_one_fault_is_no_pattern_and_two_within_a_week_are() -> None:
    assert offenders([mark(1)]) == frozenset()
    assert offenders([mark(1, age_s=6.9 * DAY_S), mark(2)]) == {"a"}
    assert offenders([mark(1, age_s=7.1 * DAY_S), mark(2)]) == frozenset()


def test_faults_on_all_nodes_are_the_programs() -> None:
    everywhere = [mark(i, m) for i, m in enumerate([A, B, C] * 3)]
    assert offenders(everywhere) == frozenset()
    assert offenders([*everywhere, *(mark(20 + i, B) for i in range(7))]) == {"b"}


def test_one_other_node_that_failed_as_often_is_enough_to_excuse_a_node_of_two() -> None:
    assert offenders([mark(1), mark(2)], (A, B)) == {"a"}
    assert offenders([mark(1), mark(2), mark(3, B)], (A, B)) == frozenset()


def test_the_only_node_of_a_job_is_judged_by_its_hardware_alone() -> None:
    assert offenders([mark(i) for i in range(9)], (A,)) == frozenset()
    assert offenders([mark(i, is_hardware=True, why=Why.DEVICE) for i in range(2)], (A,)) == {"a"}


def test_no_node_is_known() -> None:
    assert scores(mark(1), mark(2)).look((), NOW_UNIX_S) == ()


@pytest.mark.parametrize("kind", [K.DEVICE_LOST, K.ROW_REMAP_FAILED, K.CORRUPTION])
def test_some_faults_of_hardware_are_enough_at_once(kind: FaultKind) -> None:
    assert ROWS[kind].blames_node >= THRESHOLD
    assert offenders(left_by(finding("a"), kind)) == {"a"}


def test_an_excluded_node_is_under_suspicion_in_its_next_job() -> None:
    left = [*left_by(finding("a")), mark_of_exclusion(A, K.CRASH, run="run", incident=1, now_unix_s=NOW_UNIX_S)]
    again = NodeScores("next").with_marks(left, NOW_UNIX_S)
    machine = Machine("a-with-another-pid", A.host)
    assert again.offenders((machine, B), NOW_UNIX_S) == {machine.node}
    assert NodeScores("next").with_marks(left, NOW_UNIX_S).offenders((A, machine), NOW_UNIX_S) == frozenset()


# -- fading ------------------------------------------------------------------------------------------------------------
def test_a_mark_is_halved_each_half_life_and_gone_after_the_horizon() -> None:
    m = mark(1)
    for lives, left in ((0, 1.0), (1, 0.5), (2, 0.25), (3.99, 0.5**3.99)):
        assert m.left(NOW_UNIX_S + lives * HALF_LIFE_S) == pytest.approx(left)
    assert m.left(NOW_UNIX_S + HORIZON_S) == 0.0
    assert m.left(NOW_UNIX_S - 5.0) == 1.0  # another node's clock
    assert scores(mark(1, age_s=HORIZON_S)).marks == ()


@given(ages_d=st.lists(st.floats(0, 40), max_size=12), later_d=st.floats(0, 40))
def test_a_score_never_grows_by_waiting(ages_d: list[float], later_d: float) -> None:
    found = scores(*(mark(i, age_s=a * DAY_S) for i, a in enumerate(ages_d)))
    now, later = (found.look((A, B), NOW_UNIX_S + d * DAY_S)[0].score for d in (0.0, later_d))
    assert 0.0 <= later <= now <= len(ages_d)


# -- what leaves a mark ------------------------------------------------------------------------------------------------
def test_a_mark_weighs_what_its_row_says_shared_by_the_nodes_and_as_sure_as_the_finding() -> None:
    (alone,) = left_by(finding("a", confidence=0.8))
    assert (alone.node, alone.host) == ("a", "host-a")
    assert alone.weight == pytest.approx(0.8)
    assert [m.weight for m in left_by(finding("a", "b"))] == [0.5, 0.5]
    assert [m.weight for m in left_by(finding("a"), K.CRASH, is_early=True)] == [EARLY_SHARE]
    assert [m.weight for m in left_by(finding("a"), K.DEVICE_LOST, is_early=True)] == [2.0]


@pytest.mark.parametrize(
    ("found", "kind"),
    [
        (finding("a", confidence=0.4), K.CRASH),
        (finding(), K.CRASH),
        (finding("elsewhere"), K.CRASH),
        (finding("a"), K.PROGRAM_ERROR),
        (finding("a"), K.OUT_OF_MEMORY),
        (finding("a"), K.PREEMPTED),
    ],
)
def test_what_leaves_none(found: Finding, kind: FaultKind) -> None:
    assert left_by(found, kind) == []


def test_a_mark_says_why_and_on_which_device() -> None:
    (m,) = left_by(finding("a", gpus=("gpu-3",)), K.DEVICE_ERROR)
    assert (m.why, m.device, m.is_hardware) == (Why.BLAMED, "gpu-3", False)
    (m,) = left_by(finding("a", gpus=("gpu-3", "gpu-4")), K.DEVICE_LOST)
    assert (m.why, m.device, m.is_hardware) == (Why.DEVICE, None, True)
    (m,) = left_by(finding("a"), K.CRASH, A)
    assert m.why is Why.ALONE


# -- records -----------------------------------------------------------------------------------------------------------
@given(seed=st.integers(0, 1000), cut=st.integers(0, 8), again=st.integers(0, 8))
def test_records_can_be_brought_together_in_any_order_and_more_than_once(seed: int, cut: int, again: int) -> None:
    marks = [mark(i, random.Random(seed + i).choice((A, B, C)), age_s=i * DAY_S) for i in range(8)]
    random.Random(seed).shuffle(marks)
    whole = scores(*marks)
    parts = scores(*marks[:cut]).with_marks(marks[again:], NOW_UNIX_S).with_marks(marks, NOW_UNIX_S)
    assert parts == whole


def test_the_newest_marks_are_kept() -> None:
    many = scores(*(mark(i, age_s=float(MOST_MARKS + 10 - i)) for i in range(MOST_MARKS + 10)))
    assert len(many.marks) == MOST_MARKS
    assert many.marks[0].incident == 10


def test_the_file_is_for_people_and_for_the_next_reader() -> None:
    found = scores(mark(1), mark(2, kind=K.DEVICE_LOST, is_hardware=True, why=Why.DEVICE), mark(3, B, weight=0.2))
    told = json.loads(json.dumps(found.to_json((A, B), NOW_UNIX_S)))
    assert told["schema"] == SCHEMA
    assert [(n["node"], n["score"], n["is_over"]) for n in told["nodes"]] == [("a", 2.0, True), ("b", 0.2, False)]
    assert tuple(read_marks(told["marks"])) == found.marks


def test_a_sentence_names_node_reasons_and_what_to_do() -> None:
    first, second = scores(mark(1), mark(2), mark(3, B, weight=0.2)).look((A, B), NOW_UNIX_S)
    assert first.sentence() == (
        "node a (2 times crash) has score 2.0, above 1.5: a repeat offender, test it before it is used again"
    )
    assert second.sentence() == "node b (crash) has score 0.2 of 1.5"


GOOD: dict[str, Any] = {
    "run": "r", "incident": 1, "node": "a", "host": "h", "why": "blamed", "kind": "crash", "at_unix_s": 1.0, "weight": 1
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"why": "mood"},
        {"kind": 3},
        {"weight": "much"},
        {"weight": 1e9},
        {"weight": -1},
        {"at_unix_s": float("nan")},
        {"incident": None},
        {"incident": float("inf")},
    ],
)
def test_a_damaged_mark_is_left_out_and_the_others_are_read(wrong: dict[str, Any]) -> None:
    found = read_marks([GOOD, {**GOOD, **wrong}, 7, None, [], {"run": "r"}])
    assert [m.run for m in found] == ["r"]


@pytest.mark.parametrize("data", [None, 5, "marks", {}, {"marks": []}])
def test_what_is_no_list_of_marks_holds_none(data: Any) -> None:
    assert read_marks(data) == []
