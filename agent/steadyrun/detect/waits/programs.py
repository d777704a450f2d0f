"""Ranks that left the program which others in their place run, whatever holds all of them up now.

Ranks with the same places in groups of the same kinds make the same calls in the same order. Their newest calls are
laid side by side, and where one calls something else than most it has skipped a call, made one more, or changed the
order. That needs no waits: a fault is seen even if another one holds its rank and all around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from steadyrun.core.flight import FlightDetails, FlightOp
from steadyrun.detect.waits.graph import Graph
from steadyrun.detect.waits.signature import ROOTED, op_family
from steadyrun.detect.waits.world import MAIN, Group, World, main_threads

__all__ = ["Departure", "Way", "departures"]

LOOK_BACK: Final = 400  # calls of a rank that are compared
MAX_COURSES: Final = 48  # ranks whose calls are read, the rarest states first
MIN_COURSES: Final = 3  # of one role
MAX_APART: Final = 8  # ranks of one state that are looked at one by one
MIN_ALIKE: Final = 3  # calls that have to agree before ranks count as laid side by side
CONTEXT: Final = 8  # calls before one that say where in the program it is made
LOOK_AHEAD: Final = 24  # calls within which one that comes later is looked for
SUBSTITUTED: Final = 2  # calls that agree again after one that does not: it depends on the rank
UNSTEADY: Final = 3  # ranks that make a call after different ones: it comes from another thread

_Kind = tuple[str, int]
_Label = tuple[object, ...]


class Way(Enum):
    """How a rank left the program."""

    SKIPPED = "skipped"
    EXTRA = "extra"
    OTHER_ORDER = "other_order"


@dataclass(frozen=True, slots=True)
class Departure:
    """A rank that left the program.

    Attributes:
        own, theirs: what it called, and what the others called there.
        group: of the call that was skipped, made in addition or made later.
        matches: calls after it that fit.
        witnesses: ranks that went on as before there; 0: only what was called before tells.
    """

    rank: int
    way: Way
    group: Group
    own: FlightOp
    theirs: FlightOp
    matches: int
    witnesses: int


@dataclass(slots=True)
class Departures:
    """What the comparison says.

    Attributes:
        steady: ranks that did as the others did: they were compared, or are where such a rank is.
        read: those of them that were compared.
    """

    found: dict[int, Departure] = field(default_factory=dict)
    steady: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Step:
    op: FlightOp
    group: Group
    label: _Label


@dataclass(slots=True, eq=False)
class _Course:
    """One rank's newest calls; *start*: where the first one lies beside the others'; *weight*: ranks in this state."""

    rank: int
    alike: tuple[int, ...]
    steps: list[_Step]
    start: int = 0

    @property
    def weight(self) -> int:
        return len(self.alike)

    def at(self, position: int) -> _Step | None:
        i = position - self.start
        return self.steps[i] if 0 <= i < len(self.steps) else None

    def labels(self, first: int, last: int) -> list[_Label]:
        i, j = max(0, first - self.start), max(0, last - self.start)
        return [s.label for s in self.steps[i:j]]


def departures(graph: Graph, details: FlightDetails | None) -> Departures:
    """Of all roles; empty without single entries."""
    out = Departures()
    if details is None or not graph.stops:
        return out
    main = main_threads(graph.world)
    roles = _roles(graph.world)
    left = MAX_COURSES
    for ranks in sorted(roles.values(), key=len, reverse=True):
        if left < MIN_COURSES:
            break
        courses = _courses(graph.world, _chosen(graph, ranks)[:left], main, details)
        left -= len(courses)
        found = _compared(courses)
        several = [c for c in courses if c.rank in found.found and c.weight > 1]
        if several:  # in one state by all that is known of them, and not all need have got there on one way
            apart = [(rank, (rank,)) for c in several for rank in c.alike[: MAX_APART + 1]]
            left -= len(apart)
            courses = [c for c in courses if c not in several] + _courses(graph.world, apart, main, details)
            found = _compared(courses)
        out.found |= found.found
        out.steady |= found.steady
        out.read |= found.read
    return out


def _courses(
    world: World, chosen: Sequence[tuple[int, tuple[int, ...]]], main: frozenset[str], details: FlightDetails
) -> list[_Course]:
    return [_Course(rank, alike, _steps(world, rank, main, details)) for rank, alike in chosen]


def _compared(courses: Sequence[_Course]) -> Departures:
    found = Departures()
    known = [c for c in courses if len(c.steps) >= MIN_ALIKE]
    _drop_unsteady(known)
    _vote(_beside(known), found)
    return found


# -- who is compared with whom -----------------------------------------------------------------------------------------
def _roles(world: World) -> dict[tuple[object, ...], list[int]]:
    """Ranks by what they have to do: in a pipeline that depends on the place."""
    found: dict[tuple[object, ...], list[int]] = {}
    for rank, flight in world.flights.items():
        groups = world.groups_of.get(rank, ())
        if flight.is_cut or flight.is_active_only or not flight.has_frames:
            continue
        role = tuple(sorted((*g.kind, (g.place_of(rank) or 0) if g.sends else 0) for g in groups if rank in g.records))
        found.setdefault(role, []).append(rank)
    return {role: ranks for role, ranks in found.items() if len(ranks) >= MIN_COURSES}


def _chosen(graph: Graph, ranks: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """One rank of each state with all that are in it, the rarest first; several where there are few states."""
    states: dict[tuple[object, ...], list[int]] = {}
    for rank in ranks:
        states.setdefault(_state(graph, rank), []).append(rank)
    ordered = sorted(states.values(), key=lambda s: (len(s), s[0]))
    usual = ordered.pop()
    parts = min(len(usual), max(1, MIN_COURSES - len(ordered)), MIN_COURSES)
    found = [(part[0], tuple(part)) for part in (usual[i::parts] for i in range(parts))]
    return found + [(s[0], tuple(s)) for s in ordered]


def _state(graph: Graph, rank: int) -> tuple[object, ...]:
    """Where a rank stands and what it has called until there."""
    world = graph.world
    head = graph.heads.get((rank, MAIN))
    where = (head.group.kind, head.seq, head.calls[rank].op.site) if head is not None else None
    groups = [g for g in world.groups_of.get(rank, ()) if rank in g.records]
    counts = sorted((g.kind, g.issued.get(rank, -1), g.records[rank].windows[-4:]) for g in groups)
    flows = sorted(
        (g.kind, g.place_of(f.src) or 0, g.place_of(f.dst) or 0, f.issued)
        for g in groups
        for f in g.records[rank].flows
    )
    index = dict(world.flights[rank].pg_ids)
    counters = sorted((index.get(s.pg_id, -1), s.enqueued) for s in world.flights[rank].status)
    return (where, tuple(counts), tuple(flows), tuple(counters))


def _steps(world: World, rank: int, main: frozenset[str], details: FlightDetails) -> list[_Step]:
    groups = world.groups_of.get(rank, [])
    steps = []
    for op in details.course(rank, LOOK_BACK):
        if op.thread not in main or not 0 <= op.group < len(groups):
            continue
        group, family = groups[op.group], op_family(op.name)
        # of operations with a root the place in the program may depend on who that is
        site = None if family in ROOTED else op.site
        ends = (group.place_of(op.src), group.place_of(op.dst)) if op.is_p2p else ()
        steps.append(_Step(op, group, (group.kind, family, site, ends)))
    return steps


def _drop_unsteady(courses: Sequence[_Course]) -> None:
    """Leaves out groups whose calls come from a thread of their own that is not recorded as such: they lie between
    other calls each time."""
    before: dict[tuple[_Kind, int], dict[int, tuple[object, ...]]] = {}
    for course in courses:
        for earlier, step in zip(course.steps, course.steps[1:], strict=False):
            if not step.op.is_p2p and not step.op.thread:
                at = before.setdefault((step.group.kind, step.op.seq), {})
                at[course.rank] = earlier.label
    unsteady: dict[_Kind, set[int]] = {}
    for (kind, _), found in before.items():
        usual = Counter(found.values()).most_common(1)[0][0]
        unsteady.setdefault(kind, set()).update(r for r, label in found.items() if label != usual)
    dropped = {kind for kind, ranks in unsteady.items() if len(ranks) >= UNSTEADY}
    for course in courses:
        course.steps = [s for s in course.steps if s.group.kind not in dropped]


# -- side by side ------------------------------------------------------------------------------------------------------
def _beside(courses: list[_Course]) -> list[_Course]:
    """Those that can be laid beside the longest of those that most ranks run, so that equal calls lie side by side."""
    if len(courses) < 2:
        return []
    reference = max(courses, key=lambda c: (c.weight, len(c.steps)))
    reference.start = 0
    places = _places(reference)
    found = [reference]
    for course in courses:
        if course is reference:
            continue
        start = _start_beside(course, reference, places)
        if start is not None:
            course.start = start
            found.append(course)
    return found


def _places(course: _Course) -> dict[tuple[_Kind, int], int]:
    out: dict[tuple[_Kind, int], int] = {}
    for i, step in enumerate(course.steps):
        if not step.op.is_p2p:
            out.setdefault((step.group.kind, step.op.seq), i)
    return out


def _start_beside(course: _Course, reference: _Course, places: Mapping[tuple[_Kind, int], int]) -> int | None:
    """Numbers of collectives say where; a call that was skipped or made in addition moves those after it."""
    starts: dict[int, int] = {}
    seen: set[_Kind] = set()
    for i, step in enumerate(course.steps):
        if step.op.is_p2p or step.group.kind in seen:
            continue
        place = places.get((step.group.kind, step.op.seq))
        if place is not None:
            seen.add(step.group.kind)
            starts.setdefault(place - i, i)
    best: tuple[int, int] | None = None
    for start in starts:
        first, run = max(0, -start), 0
        for step, other in zip(course.steps[first:], reference.steps[max(0, start) :], strict=False):
            if step.label != other.label:
                break
            run += 1
        if run >= MIN_ALIKE and (best is None or run > best[0]):
            best = (run, start)
    return best[1] if best is not None else None


def _vote(courses: list[_Course], out: Departures) -> None:
    """From the oldest call on: who calls something else than most has left, and is not asked any more."""
    asked = list(courses)
    if sum(c.weight for c in asked) < MIN_COURSES:
        return
    first = min(c.start for c in asked)
    last = max(c.start + len(c.steps) for c in asked)
    unsure: list[_Course] = []
    for position in range(first, last):
        here: dict[_Label, list[_Course]] = {}
        for course in asked:
            step = course.at(position)
            if step is not None:
                here.setdefault(step.label, []).append(course)
        if len(here) < 2:
            continue
        usual = _usual(here, courses, position)
        if usual is None:
            unsure += [c for side in here.values() for c in side]
            asked = [c for c in asked if c not in unsure]
            continue
        going_on = max(here[usual], key=lambda c: c.start + len(c.steps))
        for label, side in here.items():
            if label == usual:
                continue
            for course in side:
                if _comes_back(course, going_on, position):
                    continue
                asked.remove(course)
                if _has_habit(course, position) or 2 * course.weight > max(sum(c.weight for c in here[usual]), 2):
                    unsure.append(course)
                    continue
                witnesses = sum(c.weight for c in here[usual])
                found = _departure(course, position, _ahead(going_on, courses, position), going_on, witnesses)
                if found is None:
                    unsure.append(course)
                    continue
                out.found[course.rank] = found
    out.steady.update(r for c in asked for r in c.alike)
    out.read.update(c.rank for c in asked)


def _usual(
    here: Mapping[_Label, Sequence[_Course]], courses: Sequence[_Course], position: int
) -> _Label | None:  # fmt: skip
    """What most call here; of two even sides the one that was called after the same calls before."""
    weights = sorted(((sum(c.weight for c in side), label) for label, side in here.items()), key=lambda w: -w[0])
    (most, usual), (second, _) = weights[:2]
    if most > second and most > 1:
        return usual
    some = next(iter(here.values()))[0]
    context = some.labels(position - CONTEXT, position)
    if len(context) < CONTEXT:
        return None
    before: Counter[_Label] = Counter()
    for course in courses:
        for i in _occurrences(course, context):
            if i + len(context) < min(position - course.start, len(course.steps)):
                before[course.steps[i + len(context)].label] += course.weight
    known = [label for label in here if before[label] >= 2]
    return known[0] if len(known) == 1 and sum(before[label] > 0 for label in here) == 1 else None


def _occurrences(course: _Course, labels: Sequence[_Label]) -> list[int]:
    n, steps = len(labels), course.steps
    return [
        i for i in range(len(steps) - n + 1)
        if steps[i].label == labels[0] and all(steps[i + k].label == labels[k] for k in range(1, n))
    ]  # fmt: skip


def _has_habit(course: _Course, position: int) -> bool:
    """The rank makes this call after those before it in other rounds as well."""
    labels = course.labels(position - CONTEXT, position + 1)
    return len(labels) > CONTEXT and len(_occurrences(course, labels)) > 1


def _comes_back(course: _Course, other: _Course, position: int) -> bool:
    mine = course.labels(position + 1, position + 1 + SUBSTITUTED)
    return len(mine) == SUBSTITUTED and mine == other.labels(position + 1, position + 1 + SUBSTITUTED)


def _ahead(course: _Course, courses: Sequence[_Course], position: int) -> list[_Label]:
    """What it calls from here on, and where it has come no further what came next in earlier rounds."""
    labels = course.labels(position, position + LOOK_AHEAD + 1)
    context = course.labels(position - CONTEXT, position + LOOK_AHEAD + 1)[-CONTEXT:]
    if len(labels) > LOOK_AHEAD or len(context) < CONTEXT:
        return labels
    known = [c.steps[i + CONTEXT : i + CONTEXT + LOOK_AHEAD] for c in courses for i in _occurrences(c, context)]
    return labels + [s.label for s in max(known, key=len, default=[])][: LOOK_AHEAD + 1 - len(labels)]


def _departure(
    course: _Course, position: int, next_: Sequence[_Label], other: _Course, witnesses: int
) -> Departure | None:
    own, theirs = course.at(position), other.at(position)
    assert own is not None
    assert theirs is not None
    mine = course.labels(position, position + LOOK_AHEAD)
    same_kind = own.group.kind == theirs.group.kind
    skipped = _fits(mine, next_[1:])
    extra = _fits(mine[1:], next_)
    later = next((k for k, label in enumerate(next_) if k and label == mine[0]), None)
    if skipped and skipped >= extra:
        way = Way.SKIPPED
    elif extra or (mine[0] not in next_ and not (same_kind and own.op.site == theirs.op.site)):
        way = Way.EXTRA
    elif later is not None and not same_kind:
        way = Way.OTHER_ORDER
    elif course.labels(position - 1, position) == mine[:1]:
        way = Way.EXTRA
    else:
        return None
    group = own.group if way is Way.EXTRA else _like(course, theirs.group)
    matches = max(skipped, extra)
    return Departure(course.rank, way, group, own.op, theirs.op, matches, witnesses) if group is not None else None


def _fits(mine: Sequence[_Label], theirs: Sequence[_Label]) -> int:
    """How many calls agree, if all do as far as both go."""
    n = min(len(mine), len(theirs))
    fits = 0
    while fits < n and mine[fits] == theirs[fits]:
        fits += 1
    return fits if fits and (fits == n or fits >= 4) else 0


def _like(course: _Course, group: Group) -> Group | None:
    """The rank's own group of this kind."""
    return next((s.group for s in course.steps if s.group.kind == group.kind), None)
