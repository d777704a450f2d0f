"""A rank that left the others' course: skipped a collective, or called one more, maybe long before anybody stopped.

As long as operations and sizes happen to fit nobody notices; the calls are shifted by one from there on. Their call
sites tell: hashes over windows of calls say roughly where, single entries exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from steadyrun.core.flight import WINDOW, FlightDetails, FlightOp
from steadyrun.detect.waits.signature import signature
from steadyrun.detect.waits.world import Group, World

__all__ = ["Course", "Shift", "find_shift", "window_strays"]

LOOK_BACK: Final = 160  # collectives of a group before the newest that are compared one by one
LOOK_AHEAD: Final = 40
MAX_MEMBERS: Final = 12  # of a group that are compared one by one
MIN_MATCHES: Final = 1
MIN_AGREED: Final = 2
SURE_MATCHES: Final = 4

Label = tuple[object, ...]
Course = Mapping[int, Label]  # sequence number to what was called


@dataclass(frozen=True, slots=True)
class Shift:
    """From *seq* on, *rank* calls what the others call one later (+1: it skipped one) or one earlier (-1: one more).

    Attributes:
        ranks: who left the course; both where two differ and nobody else shows which is right.
        own, theirs: what was called at *seq*.
        matches: calls that fit the shift.
    """

    group: Group
    ranks: tuple[int, ...]
    seq: int
    by: int
    own: FlightOp | None
    theirs: FlightOp | None
    matches: int
    is_tie: bool = False


def window_strays(world: World) -> dict[int, dict[int, int]]:
    """Group to the ranks whose windows leave the majority's for good after having agreed, with the first window.

    Two alone are compared with groups of the same kind, which do the same in step.
    """
    found: dict[int, dict[int, int]] = {}
    kinds: dict[tuple[str, int], list[Group]] = {}
    for group in world.groups:
        if any(r.windows for r in group.records.values()):
            kinds.setdefault(group.kind, []).append(group)
    for groups in kinds.values():
        support: dict[int, Counter[int]] | None = None
        for group in groups:
            rows = {r: dict(rec.windows) for r, rec in group.records.items() if rec.windows}
            strays = _strays(rows, None)
            if strays is None:
                if support is None:
                    support = {}
                    for g in groups:
                        for record in g.records.values():
                            for window, value in record.windows:
                                support.setdefault(window, Counter())[value] += 1
                strays = _strays(rows, support)
            if strays:
                found[group.index] = strays
    return found


def _strays(rows: Mapping[int, Mapping[int, int]], support: Mapping[int, Counter[int]] | None) -> dict[int, int] | None:
    """None: there are differences that the members cannot settle among themselves."""
    if len(rows) < 2:
        return {}
    first: dict[int, int] = {}
    agreed: set[int] = set()
    back: set[int] = set()
    for window in sorted({w for row in rows.values() for w in row}):
        here = {r: row[window] for r, row in rows.items() if window in row}
        if len(here) < 2:
            continue
        counts = Counter(here.values())
        if len(counts) == 1:
            agreed.update(here)
            back.update(r for r in here if r in first)
            continue
        if support is not None and len(rows) == 2:
            counts = Counter({value: support[window][value] for value in counts})
        (value, n), (_, second) = counts.most_common(2)
        if n == second or (support is None and 2 * n <= len(here)):
            if support is None and agreed:
                return None
            continue
        for rank, own in here.items():
            if own == value:
                (back if rank in first else agreed).add(rank)
            elif rank in agreed or window == 0:
                first.setdefault(rank, window)
    return {r: w for r, w in first.items() if r not in back}


def find_shift(
    world: World,
    group: Group,
    suspects: Iterable[int],
    hints: Mapping[int, int],
    details: FlightDetails | None,
    window: int | None = None,
) -> Shift | None:
    """Compare the members' calls one by one.

    Args:
        suspects: members that have to be among those compared.
        hints: per rank the shift that its place among the waits suggests; decides where calls alternate so that both
            fit.
        window: where hashes say that it began; None: near the newest calls.
    """
    wanted = [r for r in dict.fromkeys(suspects) if r in group.records]
    others = [r for r in group.records if r not in set(wanted)]
    members = (wanted + others)[:MAX_MEMBERS]
    if len(members) < 2:
        return None
    ops = {r: _calls(world, group, r, details, window) for r in members}
    courses = {r: {s: _label(op) for s, op in found.items()} for r, found in ops.items() if found}
    if len(courses) < 2:
        return None
    found = _shift_of(courses, hints)
    if found is None:
        return None
    rank, seq, by, matches = found
    is_tie = False
    ranks: tuple[int, ...] = (rank,)
    if len(courses) == 2:
        (other,) = set(courses) - {rank}
        judged = _by_siblings(world, group, courses, rank, other, seq, details, window)
        if judged == other:
            rank, other, by = other, rank, -by
            ranks = (rank,)
        elif judged is None:
            is_tie, ranks = True, tuple(sorted(courses))
        reference = ops[other]
    else:
        reference = next(ops[r] for r in courses if r != rank and courses[r].get(seq) != courses[rank].get(seq))
    return Shift(group, ranks, seq, by, ops[rank].get(seq), reference.get(seq), matches, is_tie)


def _calls(
    world: World, group: Group, rank: int, details: FlightDetails | None, window: int | None
) -> dict[int, FlightOp]:
    """The rank's calls of the group that can be had, by number."""
    found = {c.op.seq: c.op for c in world.open.get(rank, ()) if c.group is group and not c.op.is_p2p}
    newest = group.issued.get(rank)
    if details is None or newest is None:
        return found
    first, last = newest - LOOK_BACK, newest
    if window is not None:
        first, last = (window - 1) * WINDOW, min(newest, (window + 1) * WINDOW + LOOK_AHEAD)
    for op in details.ops(rank, group.name, max(0, first), last):
        if not op.is_p2p:
            found.setdefault(op.seq, op)
    return found


def _label(op: FlightOp) -> Label:
    return (*signature(op), op.site)


def _site_of(label: Label) -> object:
    return label[-1]


def _shift_of(courses: Mapping[int, Course], hints: Mapping[int, int]) -> tuple[int, int, int, int] | None:
    """(rank, number, by, matches) of whoever is shifted first against the majority, or of two against the other."""
    best: tuple[int, int, int, int] | None = None
    majority = _majority(courses)
    for rank, course in courses.items():
        against = majority
        if len(courses) == 2:
            against = next(c for r, c in courses.items() if r != rank)
        found = _shift_against(course, against, hints.get(rank, 0))
        if found is not None and (best is None or found[0] < best[1]):
            best = (rank, *found)
    return best


def _majority(courses: Mapping[int, Course]) -> Course:
    at: dict[int, Counter[Label]] = {}
    for course in courses.values():
        for seq, label in course.items():
            at.setdefault(seq, Counter())[label] += 1
    out: dict[int, Label] = {}
    for seq, counts in at.items():
        (label, n), *rest = counts.most_common(2)
        if not rest or n > rest[0][1]:
            out[seq] = label
    return out


def _shift_against(course: Course, against: Course, hint: int) -> tuple[int, int, int] | None:
    """(number, by, matches): where *course* leaves *against*, if what follows fits when moved by one."""
    start = next((s for s in sorted(set(course) & set(against)) if course[s] != against[s]), None)
    if start is None:
        return None
    tail = [s for s in sorted(course) if s >= start]
    scores = []
    for by in (1, -1):
        here = [s for s in tail if s + by in against and s + by >= start]
        fits = sum(course[s] == against[s + by] for s in here)
        stays = sum(course[s] == against[s] for s in here if s in against)
        if not any(_site_of(course[s]) for s in here) and (fits < SURE_MATCHES or len({course[s] for s in here}) < 2):
            continue  # without call sites equal calls prove little
        if fits >= MIN_MATCHES and fits >= 0.9 * len(here) and fits > stays:
            scores.append((fits - stays, fits, by))
    if not scores:
        return None
    scores.sort(reverse=True)
    if len(scores) == 2 and abs(scores[0][1] - scores[1][1]) <= 1:
        scores = [s for s in scores if s[2] == hint]
    return (start, scores[0][2], scores[0][1]) if scores else None


def _by_siblings(
    world: World, group: Group, courses: Mapping[int, Course], one: int, other: int, seq: int,
    details: FlightDetails | None, window: int | None,
) -> int | None:  # fmt: skip
    """Which of two left the course, by members of groups that do the same in step; None: they do not tell."""
    votes: Counter[int] = Counter()
    looked_at = 0
    for sibling in world.groups:
        if sibling is group or sibling.kind != group.kind:
            continue
        for rank in list(sibling.records)[:1]:
            course = {s: _label(op) for s, op in _calls(world, sibling, rank, details, window).items()}
            before = [s for s in course if s < seq and s in courses[one] and s in courses[other]]
            if len(before) < MIN_AGREED or any(course[s] != courses[one][s] for s in before[-8:]):
                continue
            looked_at += 1
            for candidate in (one, other):
                after = [s for s in course if s >= seq and s in courses[candidate]]
                if after and sum(course[s] != courses[candidate][s] for s in after) > 0.2 * len(after):
                    votes[candidate] += 1
        if looked_at >= 4:
            break
    guilty = [r for r in (one, other) if looked_at and votes[r] == looked_at]
    innocent = [r for r in (one, other) if looked_at and votes[r] == 0]
    return guilty[0] if len(guilty) == 1 and len(innocent) == 1 else None


def strays_in(strays: Mapping[int, Mapping[int, int]], group: Group, ranks: Sequence[int]) -> dict[int, int]:
    """Those of *ranks* whose windows in *group* leave the others', with the first window."""
    found = strays.get(group.index, {})
    return {r: found[r] for r in ranks if r in found}
