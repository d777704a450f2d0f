"""What diverging fingerprints mean."""

from __future__ import annotations

import pytest

from steadyrun.detect.sdc import (
    Cause,
    Check,
    Distances,
    Group,
    Judgement,
    Moment,
    Outcome,
    Replay,
    Schedule,
    changed_at_rest,
    first_divergence,
    judge,
    settle,
    vote,
)

NAMES = tuple(f"t{i}" for i in range(10))


def groups(world: int, owner: int | None = None) -> list[Group]:
    return [Group(name, tuple(range(world)), owner) for name in NAMES]


def check(step: int, world: int, wrong: dict[int, dict[str, int]] | None = None, moment=Moment.AFTER_STEP) -> Check:
    roots = {r: {n: hash((n, step)) for n in NAMES} for r in range(world)}
    for rank, own in (wrong or {}).items():
        roots[rank] |= own
    return Check(step, moment, roots)


def judged(world: int, wrong: dict[int, dict[str, int]], owner: int | None = None, **kwargs) -> Judgement:
    return judge(first_divergence(groups(world, owner), [check(50, world), check(100, world, wrong)]), **kwargs)


def test_votes() -> None:
    assert vote({0: 5}).outcome is Outcome.UNKNOWN
    assert vote({0: 5, 1: 5}).outcome is Outcome.AGREED
    assert vote({0: 5, 1: 6}).outcome is Outcome.TIE
    assert vote({0: 5, 1: 6, 2: 5}).minority == (1,)
    assert vote({0: 1, 1: 2, 2: 3}).outcome is Outcome.TIE
    assert vote({0: 1, 1: 1, 2: 3, 3: 4}).outcome is Outcome.TIE


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_minority_is_named_also_when_it_is_rank_0(bad: int) -> None:
    found = judged(3, {bad: {"t4": 1}})
    assert (found.cause, found.ranks, found.names) == (Cause.DEVICE, (bad,), ("t4",))
    assert found.witness not in found.ranks
    assert (found.first_bad_step, found.last_good_step) == (100, 50)
    assert f"rank {bad}" in found.sentence


def test_the_first_step_is_found_in_rings_that_come_in_any_order() -> None:
    checks = [check(s, 3, {1: {"t4": s}} if s >= 30 else None) for s in (50, 10, 30, 20, 40)]
    found = judge(first_divergence(groups(3), checks))
    assert (found.first_bad_step, found.last_good_step) == (30, 20)


def test_a_silent_rank_is_neither_waited_for_nor_accused() -> None:
    whole = check(1, 3)
    partial = Check(1, Moment.AFTER_STEP, {0: whole.roots[0], 2: whole.roots[2]})
    assert judge(first_divergence(groups(3), [partial])).cause is Cause.NONE


def test_agreement_is_no_alarm() -> None:
    assert judge(first_divergence(groups(4), [check(s, 4) for s in range(100)])).cause is Cause.NONE


def test_all_but_one_perturbed_is_software() -> None:
    each_differently = {r: {n: 1000 * r + i for i, n in enumerate(NAMES)} for r in (0, 1, 3)}
    assert judged(4, each_differently).cause is Cause.SOFTWARE
    all_alike = {r: dict.fromkeys(NAMES, 7) for r in (0, 1, 3)}
    assert judged(4, all_alike).cause is Cause.SOFTWARE
    found = judge(first_divergence(groups(4), [check(0, 4, each_differently, Moment.LOADED)]))
    assert found.cause is Cause.SOFTWARE
    assert "loaded differently" in found.sentence


def test_a_whole_replica_that_changed_at_rest_is_a_device() -> None:
    found = judged(3, {2: dict.fromkeys(NAMES, 7)}, at_rest={2: NAMES})
    assert (found.cause, found.ranks) == (Cause.DEVICE, (2,))


def test_two_replicas_are_undecided_until_something_tells() -> None:
    found = judged(2, {1: {"t4": 1}})
    assert (found.cause, found.ranks) == (Cause.UNDECIDED, (0, 1))
    assert settle(found, at_rest=[1]).ranks == (1,)
    assert settle(found, at_rest=[0, 1]).cause is Cause.UNDECIDED
    assert settle(found, distances=Distances({0: 0.001, 1: float("nan")}, 0.1)).ranks == (1,)
    assert settle(found, distances=Distances({0: 5.0, 1: 7.0}, 0.1)).cause is Cause.UNDECIDED
    assert settle(found, distances=Distances({1: 7.0}, 0.1)).cause is Cause.UNDECIDED
    assert settle(found, replay=Replay({0: False, 1: True})).ranks == (0,)
    both = settle(found, replay=Replay({0: True, 1: True}))
    assert both.cause is Cause.UNDECIDED
    assert "third" in both.sentence
    assert judged(2, {1: {"t4": 1}}, at_rest={1: ["t4"]}).ranks == (1,)


def test_an_even_split_is_undecided() -> None:
    found = judged(4, {1: {"t4": 1}, 2: {"t4": 1}})
    assert (found.cause, found.ranks) == (Cause.UNDECIDED, (0, 1, 2, 3))


def test_owner_and_receivers() -> None:
    receiver = judged(3, {2: {"t4": 1}}, owner=0)
    assert receiver.ranks == (2,)
    assert "rank 0 sent" in receiver.sentence
    owner = judged(3, {0: {"t4": 1}}, owner=0)
    assert owner.ranks == (0,)
    assert "computes and sends" in owner.sentence


def test_at_rest() -> None:
    after, before = check(7, 2), check(7, 2, {1: {"t3": 9}})
    found = changed_at_rest(after, Check(8, Moment.BEFORE_STEP, before.roots))
    assert found == {1: ("t3",)}
    with pytest.raises(ValueError, match="do not follow"):
        changed_at_rest(after, Check(9, Moment.BEFORE_STEP, before.roots))
    with pytest.raises(ValueError, match="nothing rests"):
        changed_at_rest(after, Check(8, Moment.AFTER_STEP, before.roots))


def test_checks_are_spread_until_they_cost_little() -> None:
    schedule = Schedule()
    assert schedule.interval(check_s=0.024, step_s=10) == 50
    assert schedule.interval(check_s=0.1, step_s=0.2) == 500
    assert schedule.is_due(1, None, 50)
    assert not schedule.is_due(50, 1, 50)
    assert schedule.is_due(51, 1, 50)
    with pytest.raises(ValueError, match="share"):
        Schedule(share=1.5)
