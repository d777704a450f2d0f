"""Ranks that left the program which others in their place run, whatever else holds all of them up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steadyrun.core.flight import FlightGroup, FlightOp, RankFlight
from steadyrun.detect.waits import judge_flights

WORLD = 4
ROUND = ("load", "forward", "norm", "backward", "gather")
GROUPS = {"forward": 0, "backward": 0, "norm": 0, "load": 1, "gather": 1}
SECOND_AT_NS = 1_000_000_000


class Courses:
    """Details that hold whole courses alone."""

    def __init__(self, courses: Mapping[int, Sequence[FlightOp]]) -> None:
        self.courses = courses

    def ops(self, rank: int, group: str, first_seq: int, last_seq: int) -> Sequence[FlightOp]:
        return ()

    def course(self, rank: int, last: int) -> Sequence[FlightOp]:
        return self.courses.get(rank, ())[-last:]


def course_of(sites: Sequence[str], thread: str = "python") -> list[FlightOp]:
    seqs = [0, 0]
    out = []
    for i, site in enumerate(sites):
        group = GROUPS.get(site, 0)
        seqs[group] += 1
        at_ns = SECOND_AT_NS + i
        out.append(
            FlightOp(group, seqs[group], "all_reduce", created_ns=at_ns, thread=thread, site=f"train.py in {site}")
        )
    return out


def flight_of(rank: int, course: Sequence[FlightOp]) -> RankFlight:
    """Stands in the last call of its course."""
    issued = [max((op.seq for op in course if op.group == g), default=0) for g in (0, 1)]
    last = course[-1]
    done = [n - 1 if g == last.group else n for g, n in enumerate(issued)]
    groups = tuple(
        FlightGroup(str(g), ("mesh_tp", "mesh_dp")[g], tuple(range(WORLD)), "gloo", first_seq=1, issued_seq=issued[g],
                    done_seq=done[g])
        for g in (0, 1)
    )  # fmt: skip
    return RankFlight(rank, groups, (last,), recorders=("gloo",), entries=len(course), has_frames=True)


def judged(sites: Mapping[int, Sequence[str]], thread: str = "python") -> list[tuple[str, tuple[int, ...], float]]:
    courses = {rank: course_of(found, thread) for rank, found in sites.items()}
    flights = {rank: flight_of(rank, course) for rank, course in courses.items()}
    judgement = judge_flights(flights, WORLD, details=Courses(courses))
    return [(f.finding.cls.value, f.finding.ranks, f.finding.confidence) for f in judgement.findings]


def test_a_skip_is_named_while_another_rank_is_not_there_at_all() -> None:
    usual = [*ROUND, *ROUND, "load", "forward", "norm"]
    skipped = [*ROUND, *ROUND, "load", "norm", "backward"]
    found = judged({0: usual, 1: usual, 2: skipped, 3: usual})
    assert ("skipped_collective", (2,)) in [f[:2] for f in found]
    assert all(2 in ranks for _, ranks, confidence in found if confidence >= 0.7)


def test_one_call_more_of_a_kind_that_nobody_makes_is_named() -> None:
    usual = [*ROUND, *ROUND, "load", "forward", "norm"]
    found = judged({0: usual, 1: usual, 2: [*usual[:-1], "debug"], 3: usual})
    assert [f[:2] for f in found if "extra" in f[0]] == [("extra_collective", (2,))]


def test_a_call_site_that_depends_on_the_rank_is_no_departure() -> None:
    usual = [*ROUND, *ROUND, "load", "forward", "norm"]
    other = ["own" if site == "norm" else site for site in ROUND]
    found = judged({0: usual, 1: usual, 2: usual, 3: [*other, *other, *usual[-3:]]})
    assert not {"extra_collective", "skipped_collective"} & {cls for cls, _, _ in found}


def test_two_against_two_accuse_nobody() -> None:
    one, other = [*ROUND, "load", "forward"], [*ROUND, "load", "norm"]
    found = judged({0: one, 1: one, 2: other, 3: other})
    assert not [f for f in found if f[0] in ("extra_collective", "skipped_collective") and f[2] >= 0.7]


def test_calls_of_an_unrecorded_thread_are_left_out_where_they_lie_between_others() -> None:
    usual = [*ROUND, *ROUND, "load", "forward", "norm"]
    # The other group's calls come from a thread whose calls fall anywhere.
    moved = [[s for s in usual if GROUPS[s] == 0] for _ in range(WORLD)]
    for rank, course in enumerate(moved):
        for i in range(4):
            course.insert((rank + 1) * (i + 1) % (len(course) - 1), "load")
    found = judged(dict(enumerate(moved)), thread="")
    assert not {"extra_collective", "skipped_collective", "deadlock_cycle"} & {cls for cls, _, _ in found}
