"""The second signal: who may be acted on."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from steadyrun.core.records import Suspicion
from steadyrun.node.machine.events import Limits, ProbeResult
from steadyrun.node.machine.watchdog import Judgement, Watched, judge, quiet_s

L = Limits()


def late(rank: int, accepted: bool = False, ask: bool = False, kind: str = "no_progress") -> Watched:
    return Watched(Suspicion(rank, kind, None, 0.0, 300.0, accepted), 300.0, 1800.0, ask)


def probe(rank: int, **facts: Any) -> ProbeResult:
    return ProbeResult(
        **{"rank": rank, "window_s": 6.0, "state": "S", "cpu_share": 0.0, "stack_unchanged": True, **facts}
    )


def judged(
    suspects: list[Watched],
    probes: list[ProbeResult],
    alive: tuple[int, ...] = (0, 1),
    nodes: int = 1,
    now_s: float = 306.0,
) -> Judgement:
    return judge(suspects, {p.rank: p for p in probes}, alive, nodes > 1, L, now_s)


def guilty(j: Judgement) -> list[int]:
    return [s.rank for s in j.guilty]


WAITING = {"in_collective": True}
MOVING = {"stack_unchanged": False, "cpu_share": 0.9, "state": "R"}


def test_an_unchanged_stack_outside_collectives_is_guilty_and_waiting_victims_are_not() -> None:
    j = judged([late(0), late(1)], [probe(0, **WAITING), probe(1)])
    assert guilty(j) == [1]
    assert "waits" in j.spared[0]


@pytest.mark.parametrize("state", ["T", "Z", "X", "D"])
def test_a_stopped_dead_or_blocked_process_is_guilty(state: str) -> None:
    unknown = None if state != "D" else True
    assert guilty(judged([late(1)], [probe(0), probe(1, state=state, stack_unchanged=unknown)])) == [1]


def test_a_moving_rank_is_never_guilty_by_a_default_limit() -> None:
    for facts in (MOVING, {**MOVING, "state": "D"}, {"io_moved": True}, {"children_cpu_share": 2.0}):
        j = judged([late(1)], [probe(0, **WAITING), probe(1, **facts)])
        assert guilty(j) == []
        assert 1 in j.spared


@pytest.mark.parametrize("facts", [{"io_moved": True}, {"children_cpu_share": 1.0}, {"cpu_share": 0.9, "state": "R"}])
def test_one_long_call_that_works_is_allowed_as_long_as_a_checkpoint(facts: dict[str, object]) -> None:
    working = [probe(0, **WAITING), probe(1, **facts)]
    assert guilty(judged([late(1)], working, now_s=L.checkpointing_s - 1)) == []
    assert guilty(judged([late(1)], working, now_s=L.checkpointing_s + 1)) == [1]


def test_a_rank_held_by_a_debugger_is_left_alone() -> None:
    assert guilty(judged([late(1)], [probe(0, **WAITING), probe(1, state="t")])) == []


def test_all_waiting_on_one_node_is_a_deadlock() -> None:
    assert sorted(guilty(judged([late(0), late(1)], [probe(0, **WAITING), probe(1, **WAITING)]))) == [0, 1]


def test_waiting_for_a_rank_that_is_not_late_itself_is_no_reason_to_act() -> None:
    """Rank 0 evaluates within its own limit; even a stack that does not change for a moment does not make it guilty."""
    j = judged([late(1)], [probe(0), probe(1, **WAITING)])
    assert guilty(j) == []
    assert "rank 0 is at work" in j.spared[1]


def test_waiting_for_a_rank_that_could_not_be_examined_is_no_reason_to_act() -> None:
    assert guilty(judged([late(1)], [probe(1, **WAITING)])) == []


def test_a_late_rank_that_is_not_late_any_more_counts_as_waiting_like_others() -> None:
    assert guilty(judged([late(1)], [probe(0, **WAITING), probe(1, **WAITING)])) == [1]


def test_on_several_nodes_waiting_alone_is_acted_on_only_after_every_other_limit_has_passed() -> None:
    both = [probe(0, **WAITING), probe(1, **WAITING)]
    j = judged([late(0), late(1)], both, nodes=2)
    assert guilty(j) == []
    assert j.wait_until_s == {0: 300.0 + quiet_s(L), 1: 300.0 + quiet_s(L)}
    assert sorted(guilty(judged([late(0), late(1)], both, nodes=2, now_s=300.0 + quiet_s(L)))) == [0, 1]


def test_waiting_alone_outlasts_the_longest_finite_limit_of_any_rank() -> None:
    assert quiet_s(L) >= max(L.evaluation_s, L.checkpointing_s, L.setup_s, L.first_step_s)
    longer = dataclasses.replace(L, sections={"evaluation": 9000.0, "x": None}, first={"step": float("inf")})
    assert quiet_s(longer) == 9000.0


def test_an_accepted_limit_acts_alone() -> None:
    assert guilty(judged([late(1, accepted=True)], [])) == [1]
    assert guilty(judged([late(1, accepted=True)], [probe(1, **MOVING)])) == [1]


def test_compilation_on_a_first_pass_is_waited_for_until_the_first_pass_limit() -> None:
    first = late(1, accepted=True, ask=True)
    compiling = [probe(1, compiling=True, **MOVING)]
    j = judged([first], compiling)
    assert guilty(j) == []
    assert j.wait_until_s[1] == 1800.0
    assert guilty(judged([first], compiling, now_s=1801.0)) == [1]
    assert guilty(judged([first], [probe(1)])) == [1]


def test_a_compiling_rank_is_not_hung_by_default_limits_even_where_its_stack_rests() -> None:
    """A child compiler runs for it: the main stack waits and does not change."""
    compiling = [probe(0, **WAITING), probe(1, compiling=True)]
    assert guilty(judged([late(1)], compiling)) == []
    assert guilty(judged([late(1)], compiling, now_s=1801.0)) == [1]


def test_without_a_stack_an_idle_rank_counts_as_waiting_and_a_busy_one_as_moving() -> None:
    blind = {"stack_unchanged": None}
    assert guilty(judged([late(1)], [probe(0), probe(1, **blind)])) == []
    assert guilty(judged([late(0), late(1)], [probe(0, **blind), probe(1, **blind)])) == [0, 1]
    assert guilty(judged([late(1)], [probe(0, **WAITING), probe(1, cpu_share=1.0, **blind)])) == []


def test_a_rank_that_never_reported_and_does_nothing_is_guilty_without_a_stack() -> None:
    j = judged([late(1, kind="never_reported")], [probe(0), probe(1, stack_unchanged=None)])
    assert guilty(j) == [1]


def test_a_rank_that_could_not_be_examined_is_not_acted_on_by_a_default_limit() -> None:
    j = judged([late(1)], [])
    assert guilty(j) == []
    assert "could not be examined" in j.spared[1]
