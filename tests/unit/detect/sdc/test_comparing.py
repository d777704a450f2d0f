"""Digests of ranks are brought together moment by moment."""

from __future__ import annotations

from steadyrun.detect.sdc.comparing import PATIENCE_S, Compared, Comparison, Resting
from steadyrun.detect.sdc.safe import SafeSteps

KEY = 7
AFTER = "after_step"


def comparison(ranks: int = 3) -> Comparison:
    out = Comparison()
    out.introduce({KEY: tuple(range(ranks))}, range(ranks))
    return out


def test_a_moment_is_judged_once_all_have_told() -> None:
    c = comparison()
    c.add(0, 49, AFTER, KEY, 1, 0.0)
    c.add(1, 49, AFTER, KEY, 1, 0.1)
    assert c.ready(0.2) == []
    c.add(2, 49, AFTER, KEY, 1, 0.3)
    (seen,) = c.ready(0.3)
    assert seen == Compared(49, AFTER, {}, 3, True)
    assert isinstance(seen, Compared)
    assert seen.agreed
    assert c.ready(100.0) == []


def test_who_differs_is_told_with_what() -> None:
    c = comparison()
    for rank, digest in enumerate((5, 6, 5)):
        c.add(rank, 49, AFTER, KEY, digest, 0.0)
    (seen,) = c.ready(0.0)
    assert seen == Compared(49, AFTER, {KEY: {0: 5, 1: 6, 2: 5}}, 3, True)


def test_a_silent_rank_is_waited_for_some_seconds_only() -> None:
    c = comparison()
    c.add(0, 49, AFTER, KEY, 1, 0.0)
    c.add(1, 49, AFTER, KEY, 2, 1.0)
    assert c.ready(PATIENCE_S - 0.1) == []
    (seen,) = c.ready(PATIENCE_S)
    assert isinstance(seen, Compared)
    assert (dict(seen.differing), seen.is_whole) == ({KEY: {0: 1, 1: 2}}, False)
    c.add(2, 49, AFTER, KEY, 1, PATIENCE_S + 1)
    assert c.ready(100.0) == []  # too late: that moment is over


def test_one_rank_alone_is_compared_with_nobody() -> None:
    c = comparison()
    c.add(0, 49, AFTER, KEY, 1, 0.0)
    assert c.ready(PATIENCE_S) == []


def test_moments_come_in_the_order_of_the_steps() -> None:
    c = comparison(2)
    for step, moment in ((99, AFTER), (49, AFTER), (50, "checkpoint"), (-1, "loaded")):
        for rank in (0, 1):
            c.add(rank, step, moment, KEY, 1, 0.0)
    assert [(s.step) for s in c.ready(0.0)] == [-1, 49, 50, 99]


def test_a_muted_group_is_compared_no_more() -> None:
    c = comparison(2)
    c.introduce({8: (0, 1)}, ())
    c.mute([KEY])
    for rank in (0, 1):
        c.add(rank, 49, AFTER, KEY, rank, 0.0)
        c.add(rank, 49, AFTER, 8, 1, 0.0)
    (seen,) = c.ready(0.0)
    assert isinstance(seen, Compared)
    assert seen.agreed


def test_what_changed_at_rest_and_what_did_not() -> None:
    c = comparison()
    for rank, changed in enumerate((0, 2, 0)):
        c.add(rank, 50, "before_step", 0, changed, 0.0)
    assert c.ready(0.0) == [Resting(50, (1,), (0, 2), True)]


# -- where to go back to -----------------------------------------------------------------------------------------------
def test_training_goes_back_to_the_newest_checkpoint_that_agreed() -> None:
    safe = SafeSteps()
    for step in (0, 9, 19, 29):
        safe.agreed(step)
    for step in (9, 14, 19, 31):
        safe.saved(step, f"step_{step}")
    assert safe.take_verified() == {9: "step_9", 19: "step_19"}
    assert safe.take_verified() == {}
    assert safe.target(30) == 19
    assert safe.target(19) == 9
    assert safe.is_target_verified(19)


def test_without_a_verified_checkpoint_it_goes_to_the_last_step_that_agreed() -> None:
    safe = SafeSteps()
    assert safe.target(30) == 29
    safe.agreed(24)
    safe.saved(12)
    assert safe.target(30) == 24
    assert safe.target(24) == 23
    assert not safe.is_target_verified(24)


def test_where_nothing_has_a_replica_a_step_is_verified_by_what_the_next_one_finds() -> None:
    safe = SafeSteps()
    safe.saved(10, "a")
    assert not safe.is_verified(10)
    safe.still(10)
    assert safe.take_verified() == {10: "a"}
    safe.has_replicas = True
    assert not safe.is_verified(10)


def test_what_came_after_the_step_to_go_back_to_counts_no_more() -> None:
    safe = SafeSteps()
    for step in (10, 20, 30):
        safe.agreed(step)
        safe.saved(step, str(step))
    assert set(safe.take_verified()) == {10, 20, 30}
    safe.went_back(10)
    assert safe.target(31) == 10
    safe.agreed(20)
    safe.saved(20, "again")
    assert safe.take_verified() == {20: "again"}


def test_a_checkpoint_that_is_gone_is_no_place_to_go_back_to() -> None:
    safe = SafeSteps()
    for step in (9, 19):
        safe.agreed(step)
        safe.saved(step, f"step_{step}")
    assert (safe.target(30), safe.target(19), safe.has_saved_before(10)) == (19, 9, True)
    safe.removed("step_9")
    assert (safe.target(30), safe.is_target_verified(9), safe.has_saved_before(10)) == (19, False, False)
    assert safe.has_saved_before(20)
