"""Who is wrong, of ranks that have computed one microbatch again."""

from __future__ import annotations

import pytest

from steadyrun.core.replay import AGAIN, NEXT, OWN, THIRD, ReplayPlace, ReplayReport
from steadyrun.detect.sdc.records import Cause
from steadyrun.detect.sdc.replays import Replayed, Replays, judge_replays

RIGHT, WRONG, OTHER = 100, 200, 300
PLACE = ReplayPlace("first.weight", "float32", 4, 281_600, 1, ((70_000, (20,)),), True)


def report(
    by: int,
    of: int,
    kind: str,
    told: int,
    found: int,
    repeated: int | None = None,
    ring: int = 4,
    last_clean: int | None = 19,
) -> ReplayReport:
    same = found if repeated is None and told != found else repeated
    return ReplayReport(24, of, by, kind, tuple(range(ring)), told, found, same, last_clean, 1, (PLACE,))


def judged(*reports: ReplayReport) -> Replayed:
    found = judge_replays(24, reports)
    assert found is not None
    return found


def test_who_stands_alone_against_two_is_wrong() -> None:
    found = judged(report(1, 2, NEXT, WRONG, RIGHT), report(3, 2, THIRD, WRONG, RIGHT))
    j = found.judgement
    assert (j.cause, j.ranks, j.names, j.witness) == (Cause.DEVICE, (2,), ("first.weight",), 1)
    assert (j.first_bad_step, j.last_good_step, found.since) == (24, 19, 20)
    assert j.sentence == (
        "rank 2: wrong gradient in first.weight at step 24: its own differs from what ranks 1 and 3 compute from the "
        "same microbatch"
    )
    assert found.places == ((2, 1, PLACE),)


def test_who_replays_wrongly_is_wrong_itself() -> None:
    found = judged(report(1, 2, NEXT, RIGHT, WRONG), report(3, 2, THIRD, RIGHT, RIGHT))
    assert (found.judgement.cause, found.judgement.ranks) == (Cause.DEVICE, (1,))
    assert "rank 3 finds what rank 2 had" in found.judgement.sentence


def test_a_rank_that_is_always_wrong_is_one_rank_in_two_pairs() -> None:
    found = judged(
        report(1, 2, NEXT, WRONG, RIGHT),
        report(3, 2, THIRD, WRONG, RIGHT),
        report(2, 3, NEXT, RIGHT, WRONG),
        report(0, 3, THIRD, RIGHT, RIGHT),
    )
    assert (found.judgement.cause, found.judgement.ranks) == (Cause.DEVICE, (2,))
    assert "its own differs" in found.judgement.sentence, "the gradient that training took comes first"


def test_a_replay_that_is_right_the_second_time_was_wrong_the_first() -> None:
    found = judged(report(1, 2, NEXT, RIGHT, WRONG, RIGHT))
    assert (found.judgement.cause, found.judgement.ranks) == (Cause.DEVICE, (1,))


def test_of_two_the_one_that_does_not_repeat_its_own_is_wrong() -> None:
    found = judged(report(0, 1, NEXT, WRONG, RIGHT, ring=2), report(1, 1, AGAIN, WRONG, RIGHT, ring=2))
    assert (found.judgement.cause, found.judgement.ranks) == (Cause.DEVICE, (1,))


def test_two_that_both_repeat_theirs_are_undecided() -> None:
    found = judged(report(0, 1, NEXT, WRONG, RIGHT, ring=2), report(1, 1, AGAIN, WRONG, WRONG, ring=2))
    assert (found.judgement.cause, found.judgement.ranks) == (Cause.UNDECIDED, (0, 1))


def test_without_a_third_nobody_is_named() -> None:
    found = judged(report(1, 2, NEXT, WRONG, RIGHT))
    assert (found.judgement.cause, found.judgement.ranks) == (Cause.UNDECIDED, (1, 2))


def test_three_results_are_software() -> None:
    found = judged(report(1, 2, NEXT, WRONG, RIGHT), report(3, 2, THIRD, WRONG, OTHER))
    assert found.judgement.cause is Cause.SOFTWARE


def test_most_of_the_ring_at_once_is_software() -> None:
    pairs = [(by, (by + 1) % 4, (by + 2) % 4) for by in range(3)]
    reports = [r for by, of, third in pairs for r in (report(by, of, NEXT, 1, 2), report(third, of, THIRD, 1, 2))]
    found = judged(*reports)
    assert found.judgement.cause is Cause.SOFTWARE


@pytest.mark.parametrize(("repeated", "cause"), [(RIGHT, "device"), (WRONG, "device"), (OTHER, "software")])
def test_a_rank_alone_is_wrong_unless_it_never_repeats_itself(repeated: int, cause: str) -> None:
    found = judged(report(5, 5, OWN, WRONG, RIGHT, repeated, ring=1))
    assert (found.judgement.cause.value, found.judgement.ranks) == (cause, (5,))


def test_a_pair_that_never_agreed_accuses_nobody_by_itself() -> None:
    assert judge_replays(24, [report(0, 1, NEXT, WRONG, RIGHT, ring=2, last_clean=None)]) is None
    two = [
        report(0, 1, NEXT, WRONG, RIGHT, ring=2, last_clean=None),
        report(1, 1, AGAIN, WRONG, WRONG, ring=2),
    ]
    assert judge_replays(24, two) is None


def test_with_a_third_it_does_but_nothing_vouches_for_any_step() -> None:
    found = judged(report(1, 2, NEXT, WRONG, RIGHT, last_clean=None), report(3, 2, THIRD, WRONG, RIGHT))
    assert (found.judgement.ranks, found.judgement.last_good_step, found.since) == ((2,), None, 24)


def test_clean_replays_say_nothing() -> None:
    assert judge_replays(24, [report(3, 2, THIRD, RIGHT, RIGHT)]) is None


def test_a_step_is_judged_once_the_third_has_spoken_or_has_had_its_time() -> None:
    replays = Replays(patience_s=8)
    replays.add(report(1, 2, NEXT, WRONG, RIGHT), 100.0)
    assert replays.ready(107.9) == []
    replays.add(report(3, 2, THIRD, WRONG, RIGHT), 107.9)
    assert [r.judgement.ranks for r in replays.ready(107.9)] == [(2,)]
    replays.add(report(0, 2, THIRD, WRONG, RIGHT), 108.0)
    assert replays.ready(200.0) == [], "a step is judged once"

    late = Replays(patience_s=8)
    late.add(report(1, 2, NEXT, WRONG, RIGHT), 100.0)
    assert [r.judgement.cause for r in late.ready(108.0)] == [Cause.UNDECIDED]


def test_a_report_survives_its_text() -> None:
    told = report(1, 2, NEXT, WRONG, RIGHT)
    assert ReplayReport.parse(told.to_json()) == told
