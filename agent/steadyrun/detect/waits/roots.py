"""Root causes in the waits-for graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from steadyrun.core.classes import FaultClass
from steadyrun.core.flight import FlightDetails, FlightOp, OpState
from steadyrun.detect.waits.divergence import SURE_MATCHES, Shift, find_shift, window_strays
from steadyrun.detect.waits.graph import Graph, Stop, first_stop
from steadyrun.detect.waits.order import disordered, hosts_behind
from steadyrun.detect.waits.programs import Departure, Departures, Way, departures
from steadyrun.detect.waits.records import RankState, WaitReason
from steadyrun.detect.waits.root import Root
from steadyrun.detect.waits.signature import Difference, differences, signature, uneven_sums
from steadyrun.detect.waits.world import MAIN, Call, Group, World

__all__ = ["find_roots"]

IN_FLIGHT: Final = FaultClass.IN_FLIGHT_NETWORK
MAX_SHIFT_GROUPS: Final = 12
MAX_LONELY_GROUPS: Final = 8
MAX_WITNESSES: Final = 64
SURE: Final = 0.7
_CALLS_OTHERWISE: Final = frozenset(
    {
        FaultClass.SKIPPED_COLLECTIVE,
        FaultClass.EXTRA_COLLECTIVE,
        FaultClass.DEADLOCK_CYCLE,
        FaultClass.P2P_UNMATCHED,
    }
)


def find_roots(graph: Graph, details: FlightDetails | None) -> list[Root]:
    """All causes, unordered; what another one explains is left out."""
    mismatches = _mismatches(graph, details)
    rings = _rings(graph)
    absent, unsure = _absent_roots(graph)
    disorders = disordered(graph)
    programs = departures(graph, details)
    shifts = _shifts(graph, details, mismatches, [*disorders, *rings], absent)
    if programs.found or mismatches:
        shifts = [s for s in shifts if not set(s.ranks) <= programs.read]
    roots: list[Root] = list(shifts)
    blamed = {r for s in shifts for r in s.ranks}
    roots += [m for m in mismatches if not _is_shifted(graph, m, shifts)]
    told = {r for m in roots for r in (*m.ranks, *_sides(m))}
    roots += [r for r in disorders if not told & set(r.members)]
    told = {r for m in roots for r in (*m.ranks, *_sides(m))}
    roots += [r for r in rings if not told & set(r.members)]
    roots += [r for r in absent if not set(r.ranks) <= blamed and not _is_awaited_by(r, shifts)]
    differing = {m.stop for m in mismatches}
    roots += _device_stalls(graph)
    roots += [r for r in _arrived(graph) if r.stop not in differing]
    roots += _unseen(graph, unsure, roots)
    roots += hosts_behind(graph, {r for root in roots for r in root.ranks if root.cls is not IN_FLIGHT})
    roots = _with_departures(graph, roots, programs)
    return _failures(graph, roots, details)


def _sides(root: Root) -> set[int]:
    return {r for ranks, _ in root.difference.sides for r in ranks} if root.difference is not None else set()


def _is_shifted(graph: Graph, mismatch: Root, shifts: Sequence[Root]) -> bool:
    """Without the ranks whose calls are shifted there, all agree."""
    stop = mismatch.stop
    assert stop is not None
    shifted = {
        r
        for s in shifts
        if (s.shift is not None and s.shift.group is stop.group and s.shift.seq <= stop.seq)
        or (s.window is not None and s.window[0] is stop.group)
        for r in s.ranks
    }
    if not shifted:
        return False
    rest = {r: c.op for r, c in stop.calls.items() if r not in shifted}
    return not any(set(d.odd) & set(mismatch.ranks) for d in differences(rest))


def _is_awaited_by(root: Root, shifts: Sequence[Root]) -> bool:
    """Who called one too many waits there for the others, who are not to blame."""
    stop = root.stop
    return stop is not None and any(
        s.cls is FaultClass.EXTRA_COLLECTIVE and s.shift is not None and s.shift.group is stop.group
        and not set(root.ranks) & set(s.ranks) and set(stop.calls) <= set(s.ranks)
        for s in shifts
    )  # fmt: skip


# -- members that are not there ----------------------------------------------------------------------------------------
def _absent_roots(graph: Graph) -> tuple[list[Root], dict[int, list[Stop]]]:
    """Ranks that stand in nothing while others wait for them; and ranks of which nothing is known, with where."""
    world = graph.world
    waited: dict[int, list[Stop]] = {}
    for stop in graph.stops:
        for rank, lack in stop.lacks.items():
            if lack.reason in (WaitReason.NOT_ISSUED, WaitReason.NO_DUMP) or world.is_gone(rank) or (
                stop.first.stream == MAIN and graph.heads.get((rank, MAIN)) is None
            ):  # fmt: skip
                waited.setdefault(rank, []).append(stop)
    sure: dict[int, Root] = {}
    unsure: dict[int, list[Stop]] = {}
    for rank, stops in waited.items():
        hard = [s for s in stops if s.lacks[rank].is_hard]
        if world.is_gone(rank):
            sure[rank] = _gone(graph, rank, stops)
        elif rank not in world.flights or world.flights[rank].is_cut:
            unsure[rank] = stops
        elif rank not in world.failed:
            sure[rank] = _stalled(graph, rank, hard or stops, bool(hard))
    return _merged(graph, list(sure.values())), unsure


def _merged(graph: Graph, roots: Sequence[Root]) -> list[Root]:
    found: dict[tuple[FaultClass, int, bool], list[Root]] = {}
    for root in roots:
        assert root.stop is not None
        found.setdefault((root.cls, root.stop.node, root.is_hard), []).append(root)
    return [merged for same in found.values() for merged in _merge(graph, same)]


def _gone(graph: Graph, rank: int, stops: Sequence[Stop]) -> Root:
    is_dead = graph.world.state(rank) is RankState.DEAD
    cls = FaultClass.DEAD_PROCESS if is_dead else FaultClass.STOPPED_PROCESS
    return Root(cls, (rank,), 0.9 if is_dead else 0.95, first_stop(stops), tuple(graph.rank_nodes(rank)))


def _stalled(graph: Graph, rank: int, stops: Sequence[Stop], is_hard: bool) -> Root:
    world = graph.world
    stop = first_stop(stops)
    confidence = 0.9 if is_hard else 0.55
    note = ""
    if stop.group.is_host and is_hard:
        confidence, note = 0.8, "gloo does not record send and recv: it may stand in one"
    if stop.group.is_inferred:
        confidence = min(confidence, 0.6)
    if world.state(rank) is RankState.FINISHED:
        return Root(FaultClass.SKIPPED_COLLECTIVE, (rank,), 0.65, stop, (graph.node_of[(rank, MAIN)],), is_hard,
                    note="it has ended with 0: it made fewer calls than the others")  # fmt: skip
    return Root(FaultClass.HOST_STALL, (rank,), confidence, stop, (graph.node_of[(rank, MAIN)],), is_hard, note=note)


def _unseen(graph: Graph, unsure: dict[int, list[Stop]], known: Sequence[Root]) -> list[Root]:
    """Ranks without a dump are suspects only where nothing else explains the operation that first missed them.

    Such a rank may stand, unseen, in any operation that lacks somebody else as well.
    """
    world = graph.world
    explained = _behind(graph, [n for root in known for n in root.nodes])
    roots: list[Root] = []
    for rank, stops in unsure.items():
        earliest = min(stops, key=lambda s: (s.since_ns if s.since_ns is not None else 1 << 63, len(s.lacks)))
        if earliest.node in explained:
            continue
        stop = first_stop(stops)
        if rank in world.flights:
            roots.append(Root(FaultClass.HOST_STALL, (rank,), 0.4, stop, tuple(graph.rank_nodes(rank)), False,
                              note="its dump is cut, so that what it called last is not known"))  # fmt: skip
            continue
        alive = world.state(rank) is RankState.ALIVE
        if alive or world.only_logs:
            cls, note = FaultClass.HOST_STALL, "it lives" if alive else "it is silent in the logs"
        else:
            cls, note = FaultClass.DEAD_PROCESS, f"{world.unknown.get(rank, 'it left no dump')}: dead, stopped or lost"
        many = len(unsure) > max(2, world.size // 8)
        roots.append(Root(cls, (rank,), 0.4 if many else 0.6, stop, tuple(graph.rank_nodes(rank)), False, note=note))
    return _merged(graph, roots)


def _behind(graph: Graph, nodes: Iterable[int]) -> set[int]:
    """The nodes, and all that wait for them."""
    seen = set(nodes)
    todo = list(seen)
    while todo:
        for before in graph.reverse.get(todo.pop(), ()):
            if before not in seen:
                seen.add(before)
                todo.append(before)
    return seen


def _merge(graph: Graph, same: Sequence[Root]) -> list[Root]:
    """Ranks that are missing in the same operation make one finding; more of them than came suggest one call too many
    on the other side."""
    first = same[0]
    stop = first.stop
    assert stop is not None
    ranks = tuple(sorted({r for root in same for r in root.ranks}))
    nodes = tuple(n for root in same for n in root.nodes)
    confidence = min(root.confidence for root in same)
    if stop.group.is_host and len(ranks) > 1:
        confidence = min(confidence, 0.65)  # one of them may wait for the other in a send or recv
    root = Root(first.cls, ranks, confidence, stop, nodes, first.is_hard, note=first.note)
    came = tuple(sorted(stop.calls))
    group = stop.group
    has_run = any(rec.done_seq or 0 for rec in group.records.values())
    if first.cls is FaultClass.HOST_STALL and len(came) < len(ranks) and has_run and not stop.is_p2p and first.is_hard:
        idle = all(r not in graph.world.open for r in ranks)
        if idle and len(came) + len(ranks) >= len(group.members) - len(stop.lacks) + len(ranks):
            extra = Root(FaultClass.EXTRA_COLLECTIVE, came, 0.55, stop, (stop.node,), False,
                         note="most members are outside of all operations and have not called it")  # fmt: skip
            root.confidence = min(root.confidence, 0.45)
            return [extra, root]
    return [root]


# -- operations that all have reached ----------------------------------------------------------------------------------
def _device_stalls(graph: Graph) -> list[Root]:
    """Done on peers and open here; and, where starts are recorded, started on peers and not here."""
    roots: dict[tuple[object, ...], Root] = {}
    for rank, stop in graph.lagging.items():
        late = [r for r in stop.calls if graph.lagging.get(r) is stop]
        confidence = 0.85 if len(late) <= len(stop.done_on) else 0.55
        if not stop.waiters:
            confidence = min(confidence, 0.65)  # its device may only wait for what is ahead in another queue
        if stop.group.is_host:
            confidence = min(confidence, 0.5)
        key = (stop.group.kind, stop.seq, stop.first.op.name)
        nodes = tuple(graph.rank_nodes(rank))
        old = roots.get(key)
        if old is None:
            roots[key] = Root(FaultClass.DEVICE_STALL, (rank,), confidence, stop, nodes, note="done")
        else:
            old.ranks = tuple(sorted((*old.ranks, rank)))
            old.nodes, old.confidence = old.nodes + nodes, min(old.confidence, confidence)
    out = list(roots.values())
    for stop in graph.stops:
        behind = _not_started(graph, stop)
        if behind:
            few = len(behind) <= len(stop.calls) - len(behind)
            nodes = (stop.node, *(n for r in behind for n in graph.rank_nodes(r)))
            out.append(Root(FaultClass.DEVICE_STALL, behind, 0.85 if few else 0.6, stop, nodes, note="started"))
    return out


def _not_started(graph: Graph, stop: Stop) -> tuple[int, ...]:
    if not any(c.op.state is OpState.STARTED for c in stop.calls.values()):
        return ()
    return tuple(
        r
        for r in sorted(stop.waiters)
        if stop.calls[r].op.state is OpState.ISSUED and r not in graph.lagging and not stop.calls[r].is_host
    )


def _arrived(graph: Graph) -> list[Root]:
    """Everybody stands in it and it does not end."""
    roots: dict[tuple[object, ...], Root] = {}
    for stop in graph.stops:
        if (
            not stop.waiters
            or stop.is_left_out
            or stop.lacks
            or stop.done_on
            or stop.failed_on
            or _not_started(graph, stop)
        ):
            continue
        if stop.is_p2p and stop.src is None:
            continue
        ops = {r: c.op for r, c in stop.calls.items()}
        if not stop.is_p2p and differences(ops):
            continue
        is_first = not stop.is_p2p and _is_first(stop)
        cls = FaultClass.START_UP if is_first else FaultClass.IN_FLIGHT_NETWORK
        confidence = 0.6
        if stop.is_p2p and not stop.is_paired:
            confidence = 0.45
        if stop.group.is_inferred:
            confidence = 0.4
        members = tuple(sorted(stop.calls)) if stop.is_p2p or stop.group.is_inferred else stop.group.members
        sums = uneven_sums(ops, stop.group.members) if not stop.is_p2p else None
        note = f"members send {sums[0]} elements and expect {sums[1]}" if sums else ""
        roots[(stop.node,)] = Root(cls, members, confidence, stop, (stop.node,),
                                   note=note)  # fmt: skip
    return list(roots.values())


def _is_first(stop: Stop) -> bool:
    records = [stop.group.records[r] for r in stop.calls if r in stop.group.records]
    return stop.seq <= 1 and all(not (rec.done_seq or 0) for rec in records)


def _mismatches(graph: Graph, details: FlightDetails | None) -> list[Root]:
    roots = []
    for stop in graph.stops:
        if stop.is_p2p or not stop.calls:
            continue
        ops = {r: c.op for r, c in stop.calls.items()}
        ops |= {r: c.op for r, c in graph.world.failed_at.get((stop.group.index, stop.seq), {}).items()}
        if details is not None and (stop.done_on or stop.failed_on) and (stop.is_rooted or stop.group.is_host):
            ops |= _recorded(stop.group, stop.seq, [r for r in stop.done_on + stop.failed_on if r not in ops], details)
        roots += [_mismatch(graph, stop, found, ops, details) for found in differences(ops)]
    return roots


def _recorded(group: Group, seq: int, ranks: Sequence[int], details: FlightDetails) -> dict[int, FlightOp]:
    found: dict[int, FlightOp] = {}
    for rank in ranks[:MAX_WITNESSES]:
        op = next((o for o in details.ops(rank, group.name, seq, seq) if o.seq == seq and not o.is_p2p), None)
        if op is not None:
            found[rank] = op
    return found


def _mismatch(
    graph: Graph, stop: Stop, found: Difference, ops: dict[int, FlightOp], details: FlightDetails | None
) -> Root:
    nodes = (stop.node, *(n for r in stop.calls for n in graph.rank_nodes(r)))
    ranks: tuple[int, ...] = found.odd
    confidence, note = 0.9 if len(found.sides[0][0]) >= 2 * len(found.odd) else 0.75, ""
    if found.is_tie:
        confidence = 0.6
        odd = _odd_by_habit(graph.world, stop.group, found, ops, details)
        if odd:
            ranks, confidence, note = odd, 0.75, "the other side calls what it and others called before"
    return Root(found.cls, ranks, confidence, stop, nodes, difference=found, note=note,
                members=tuple(sorted(ops)))  # fmt: skip


def _odd_by_habit(
    world: World, group: Group, found: Difference, ops: dict[int, FlightOp], details: FlightDetails | None
) -> tuple[int, ...]:
    """Of two even sides the one whose call no rank of a group of the same kind makes, or that no longer calls at this
    place what it called there before; empty: nothing tells."""
    sides = [ranks for ranks, _ in found.sides[:2]]
    seq = next(iter(ops.values())).seq
    peers: list[FlightOp] = []
    for sibling in world.groups:
        if sibling is group or sibling.kind != group.kind or len(peers) >= 8:
            continue
        calls = world.at.get((sibling.index, seq), {})
        peers += [c.op for c in list(calls.values())[:1]]
        if not calls and details is not None:
            peers += list(_recorded(sibling, seq, list(sibling.records)[:1], details).values())
    alike = [sum(signature(p) == signature(ops[ranks[0]]) for p in peers) for ranks in sides]
    if (alike[0] > 0) != (alike[1] > 0):
        return sides[0] if alike[0] == 0 else sides[1]
    if details is None:
        return ()
    steady = []
    for ranks in sides:
        op = ops[ranks[0]]
        before = details.ops(ranks[0], group.name, max(0, op.seq - 160), op.seq - 1)
        same = [o for o in before if o.site == op.site and not o.is_p2p and op.site is not None]
        steady.append(None if not same else signature(same[-1]) == signature(op))
    if steady[0] is not None and steady[1] is not None and steady[0] != steady[1]:
        return sides[0] if not steady[0] else sides[1]
    return ()


# -- rings of waits ----------------------------------------------------------------------------------------------------
def _rings(graph: Graph) -> list[Root]:
    roots = []
    for part in graph.components():
        inside = set(part)
        ranks = tuple(sorted({r for n in part if (r := graph.rank_of(n)) is not None}))
        stops = tuple(graph.stop_at[n] for n in sorted(part) if n in graph.stop_at)
        if len(ranks) < 2:
            continue
        is_closed = all(t in inside for n in part for t in graph.edges.get(n, ()))
        roots += _ring(graph, ranks, stops, tuple(part), is_closed)
    return roots


@dataclass(frozen=True, slots=True)
class _Core:
    """Two operations that lack each other's ranks: the heart of a deadlock, whatever else hangs on it.

    Attributes:
        early: ranks that stand in *one* and are missing in *other*; ``late`` the reverse.
    """

    one: Stop
    other: Stop
    early: tuple[int, ...]
    late: tuple[int, ...]


def _ring(
    graph: Graph, ranks: tuple[int, ...], stops: tuple[Stop, ...], part: tuple[int, ...], is_closed: bool
) -> list[Root]:
    cores = _cores(graph, stops)
    collective = [c for c in cores if not c.one.is_p2p and not c.other.is_p2p]
    base = 0.65 if is_closed else 0.6 if collective else 0.4
    if any(s.group.is_inferred for s in stops):
        base = min(base, 0.5)
    found: dict[tuple[int, ...], _Core] = {}
    for core in collective:
        odd = _odd_in_ring(graph, {*core.early, *core.late}, (core.one, core.other)) or _fewer(core)
        if odd:
            found.setdefault(odd, core)
    roots = []
    for odd, core in found.items():
        stop = next(s for s in (core.one, core.other) if set(odd) & set(s.waiters))
        confidence = base + 0.1 if base >= 0.6 and len(odd) == 1 else base
        roots.append(Root(FaultClass.DEADLOCK_CYCLE, odd, confidence, stop, part, is_closed,
                          ring=(core.one, core.other), members=ranks,
                          note="it calls them in another order than the others"))  # fmt: skip
    if roots:
        return roots
    shown = _ring_order(graph, ranks, stops)
    pairs = [s for s in stops if s.src is not None and s.lacks]
    unmatched = [(s, p) for s in pairs if (p := _did_not_come(graph, s)) is not None]
    if unmatched and not collective:
        for stop, peer in unmatched:
            roots.append(Root(FaultClass.P2P_UNMATCHED, (peer,), base + 0.1, stop, part, is_closed, ring=shown,
                              members=ranks))  # fmt: skip
        return roots
    if cores and not collective:
        core = min(cores, key=lambda c: (c.one.since_ns or 0, c.one.node))
        stop = core.one if core.one.is_p2p else core.other
        ends = tuple(sorted((stop.src or 0, stop.dst or 0)))
        both = core.one.is_p2p and core.other.is_p2p and all(len(s.calls) == 2 for s in (core.one, core.other))
        cls = FaultClass.DEADLOCK_CYCLE if both else FaultClass.P2P_UNMATCHED
        return [Root(cls, ends, base, stop, part, is_closed, ring=(core.one, core.other), members=ranks)]
    odd = _odd_in_ring(graph, set(ranks), stops)
    if odd:
        stop = next((graph.heads[(r, MAIN)] for r in odd if (r, MAIN) in graph.heads), stops[0])
        return [Root(FaultClass.DEADLOCK_CYCLE, odd, base, stop, part, is_closed, ring=shown, members=ranks)]
    return [Root(FaultClass.DEADLOCK_CYCLE, ranks, base, stops[0], part, is_closed, ring=shown, members=ranks)]


def _cores(graph: Graph, stops: Sequence[Stop]) -> list[_Core]:
    found: list[_Core] = []
    inside = set(stops)
    for stop in stops:
        lacked: dict[Stop, list[int]] = {}
        for rank in stop.lacks:
            head = graph.heads.get((rank, stop.first.stream)) or graph.head(rank)
            if head is not None and head in inside and head.node > stop.node:
                lacked.setdefault(head, []).append(rank)
        for other, late in lacked.items():
            early = tuple(sorted(r for r in stop.waiters if r in other.lacks))
            if early:
                found.append(_Core(stop, other, early, tuple(sorted(late))))
    return found


def _fewer(core: _Core) -> tuple[int, ...]:
    if len(core.early) == len(core.late):
        return ()
    return min(core.early, core.late, key=len)


def _did_not_come(graph: Graph, stop: Stop) -> int | None:
    """The side of a send or receive that went on without it: it stands where ranks in its place in groups of the same
    kind stand that have had theirs."""
    world, group = graph.world, stop.group
    (peer,) = stop.lacks if len(stop.lacks) == 1 else (None,)
    if peer is None or peer in stop.calls or stop.src is None or stop.dst is None:
        return None
    head = graph.heads.get((peer, MAIN))
    if head is None or head.is_p2p:
        return None
    src, dst, own = (group.place_of(r) for r in (stop.src, stop.dst, peer))
    if src is None or dst is None or own is None:
        return None
    had = had_not = 0
    for sibling in world.groups:
        if sibling is group or sibling.kind != group.kind:
            continue
        like = graph.heads.get((sibling.members[own], MAIN))
        if like is None or like.is_p2p or like.seq != head.seq or like.group.kind != head.group.kind:
            continue
        flow = world.flows.get((sibling.index, sibling.members[src], sibling.members[dst]), ((), ()))
        if flow[0] or flow[1]:
            had_not += 1
        else:
            had += 1
    return peer if had > had_not else None


def _ring_order(graph: Graph, ranks: Sequence[int], stops: Sequence[Stop]) -> tuple[Stop, ...]:
    """One shortest way around, for the words and the drawing."""
    inside = set(stops)
    start = stops[0]
    came: dict[Stop, Stop | None] = {start: None}
    todo = [start]
    for stop in todo:
        for rank in stop.lacks:
            after = graph.head(rank)
            if after is None or after not in inside:
                continue
            if after is start:
                path: list[Stop] = []
                at: Stop | None = stop
                while at is not None:
                    path.append(at)
                    at = came[at]
                return tuple(reversed(path))
            if after not in came:
                came[after] = stop
                todo.append(after)
    return tuple(stops)


def _odd_in_ring(graph: Graph, inside: set[int], stops: Sequence[Stop]) -> tuple[int, ...]:
    """Who does not do what ranks in the same place do.

    Everybody who stands in an operation has made the same calls before it, in groups of one kind, except for who left
    the others' order. Ranks outside of the ring count as witnesses.
    """
    collectives = [s for s in stops if not s.is_p2p]
    guilty: set[int] = set()
    cleared: set[int] = set()
    for stop in collectives:
        standing = _standing_like(graph, stop)
        for other in collectives:
            if other.group is stop.group:
                continue
            before = {r: n for r in standing if (n := _called_before(graph, r, other.group)) is not None}
            counts = Counter(before.values())
            if not counts:
                continue
            (usual, n), *rest = counts.most_common(2)
            if n < 2 or (rest and rest[0][1] * 2 > n):
                continue
            guilty |= {r for r, k in before.items() if k != usual and r in inside}
            cleared |= {r for r, k in before.items() if k == usual and r in inside}
    guilty -= cleared if guilty - cleared else set()
    if guilty:
        return tuple(sorted(guilty))
    left = inside - cleared
    return tuple(sorted(left)) if cleared and left and len(left) < len(inside) else ()


def _standing_like(graph: Graph, stop: Stop) -> list[int]:
    """Ranks that stand in this operation, or in the one of the same number of a group of the same kind."""
    found: list[int] = []
    for other in graph.stops:
        if other.seq == stop.seq and not other.is_p2p and other.group.kind == stop.group.kind:
            found += other.waiters
    return found


def _called_before(graph: Graph, rank: int, group: Group) -> int | None:
    """How many collectives of the rank's group of this kind it had called before the one it stands in."""
    mine = next((g for g in graph.world.groups_of.get(rank, ()) if g is group or g.kind == group.kind), None)
    head = graph.heads.get((rank, MAIN))
    if mine is None or head is None:
        return None
    issued = mine.issued.get(rank)
    if issued is None:
        return None
    place = head.calls[rank].place
    later = sum(1 for c in graph.world.open[rank] if c.group is mine and not c.op.is_p2p and c.place > place)
    return issued - later


# -- shifted calls -----------------------------------------------------------------------------------------------------
def _shifts(
    graph: Graph, details: FlightDetails | None, mismatches: Sequence[Root], rings: Sequence[Root],
    absent: Sequence[Root],
) -> list[Root]:  # fmt: skip
    world = graph.world
    strays = window_strays(world)
    suspects: dict[int, list[int]] = {}
    windows: dict[int, int] = {}
    for index, found in strays.items():
        suspects.setdefault(index, []).extend(found)
        windows[index] = min(found.values())
    for root in (*mismatches, *rings, *absent):
        around = [graph.stop_at[n] for n in root.nodes if n in graph.stop_at] if root in rings else []
        for stop in (*root.ring, *((root.stop,) if root.stop is not None else ()), *around):
            if stop.is_p2p or (root in absent and (not root.is_hard or root.cls is not FaultClass.HOST_STALL)):
                continue
            suspects.setdefault(stop.group.index, []).extend((*root.ranks, *stop.waiters[:4], *stop.lacks))
    for stop in graph.stops:
        odd = _site_differs(stop)
        if odd:
            suspects.setdefault(stop.group.index, []).extend(odd)
    roots = []
    seen: set[tuple[int, ...]] = set()
    order = sorted(suspects, key=lambda g: (g not in windows, len(world.groups[g].members)))
    lonely = _lonely(graph)
    order = order[:MAX_SHIFT_GROUPS] + [g for g in lonely if g not in suspects][:MAX_LONELY_GROUPS]
    suspects = lonely | suspects
    for index in order:
        group = world.groups[index]
        shift = find_shift(world, group, suspects[index], _hints(graph, group), details, windows.get(index))
        if shift is None and index in windows:
            unexplained = {r: w for r, w in strays[index].items() if not any(r in m.ranks for m in mismatches)}
            roots += _by_windows(graph, group, unexplained, rings, absent)
        if shift is None or shift.ranks in seen:
            continue
        if set(shift.ranks) <= set(world.unknown):
            continue
        seen.add(shift.ranks)
        cls = FaultClass.SKIPPED_COLLECTIVE if shift.by > 0 else FaultClass.EXTRA_COLLECTIVE
        confidence = 0.6 if shift.is_tie else 0.85 if shift.matches >= SURE_MATCHES else 0.65
        where = _stop_in(graph, group)
        nodes = tuple(n for r in shift.ranks for n in graph.rank_nodes(r)) + ((where.node,) if where else ())
        roots.append(Root(cls, shift.ranks, confidence, where, nodes, shift=shift))
    return roots


def _lonely(graph: Graph) -> dict[int, list[int]]:
    """Groups in which a few stand elsewhere while the rest wait for them, or one waits alone: the fewer may have
    skipped a call or made one more, and another fault hides the ring that this leads to. The most lopsided first."""
    found: list[tuple[float, int, list[int]]] = []
    for stop in graph.stops:
        if stop.is_p2p or not stop.waiters:
            continue
        away = [r for r, k in stop.lacks.items() if k.is_hard and k.reason is WaitReason.QUEUED_BEHIND]
        fewer, more = sorted((away, stop.waiters), key=len)
        if away and len(fewer) <= max(1, len(more) // 2):
            found.append((len(fewer) / len(more), stop.group.index, [*fewer, *more[:4]]))
    out: dict[int, list[int]] = {}
    for _, index, ranks in sorted(found, key=lambda f: f[:2]):
        out.setdefault(index, ranks)
    return out


def _site_differs(stop: Stop) -> list[int]:
    """Ranks that called it from another place than most."""
    if stop.is_p2p or len(stop.calls) < 2 or stop.is_rooted:
        return []
    sites = Counter(c.op.site for c in stop.calls.values() if c.op.site)
    if len(sites) < 2:
        return []
    usual = sites.most_common(1)[0][0]
    odd = [r for r, c in stop.calls.items() if c.op.site and c.op.site != usual]
    return odd if len(odd) <= 4 else []


def _hints(graph: Graph, group: Group) -> dict[int, int]:
    """Per rank which shift its place in this group suggests: others wait there for it, or it waits for the others."""
    out: dict[int, int] = {}
    for stop in graph.stops:
        if stop.group is group and not stop.is_p2p and stop.waiters:
            out.update({r: 1 for r in stop.lacks if r not in stop.calls})
            if len(stop.waiters) < len(stop.lacks):
                out.update(dict.fromkeys(stop.waiters, -1))
    return out


def _stop_in(graph: Graph, group: Group) -> Stop | None:
    return next((s for s in graph.stops if s.group is group and not s.is_p2p and s.waiters), None)


def _by_windows(
    graph: Graph, group: Group, found: dict[int, int], rings: Sequence[Root], absent: Sequence[Root]
) -> list[Root]:
    """Without single entries only the window is known; who waits for whom hints at which of both it is."""
    roots = []
    for rank, window in found.items():
        in_ring = any(rank in r.members for r in rings)
        in_absent = any(rank in r.ranks for r in absent)
        if not (in_ring or in_absent) or len(found) > 2:
            continue
        awaited = any(s.group is group and rank in s.lacks and rank not in s.calls for s in graph.stops)
        cls = FaultClass.SKIPPED_COLLECTIVE if awaited else FaultClass.EXTRA_COLLECTIVE
        stop = _stop_in(graph, group)
        roots.append(Root(cls, (rank,), 0.6, stop, tuple(graph.rank_nodes(rank)), False, window=(group, window)))
    return roots


# -- ranks that left their program -------------------------------------------------------------------------------------
def _with_departures(graph: Graph, roots: Sequence[Root], programs: Departures) -> list[Root]:
    """Who left the program is named; who is said to call otherwise and does as others in its place do is not."""
    out: list[Root] = []
    explained = bool(programs.found) or any(r.confidence >= SURE and r.cls not in _CALLS_OTHERWISE for r in roots)
    for root in roots:
        if root.cls in _CALLS_OTHERWISE:
            left = tuple(r for r in root.ranks if r not in programs.steady)
            if not left and (programs.found or set(root.ranks) <= programs.read):
                if explained:
                    continue
                root.confidence = min(root.confidence, 0.6)
            if left and len(left) < len(root.ranks) and set(left) <= set(programs.found):
                root.ranks = left
                root.shift = replace(root.shift, ranks=left, is_tie=False) if root.shift is not None else None
        out.append(root)
    named = {r for root in out if root.cls in _CALLS_OTHERWISE or root.difference is not None for r in root.ranks}
    return out + [_departed(graph, d) for r, d in sorted(programs.found.items()) if r not in named]


def _departed(graph: Graph, departure: Departure) -> Root:
    rank, group, theirs = departure.rank, departure.group, departure.theirs
    head = graph.heads.get((rank, MAIN))
    without = next((s for s in graph.stops if s.group is group and rank in s.lacks and rank not in s.calls), None)
    sure = departure.matches >= 2 and departure.witnesses >= 3
    confidence = 0.8 if sure else 0.65
    nodes = (*graph.rank_nodes(rank), *((without.node,) if without is not None else ()))
    if departure.way is Way.OTHER_ORDER or theirs.is_p2p:
        cls = FaultClass.P2P_UNMATCHED if theirs.is_p2p and departure.way is Way.SKIPPED else FaultClass.DEADLOCK_CYCLE
        ring = tuple(dict.fromkeys(s for s in (without, head) if s is not None))
        note = "it calls them in another order than the others" if cls is FaultClass.DEADLOCK_CYCLE else ""
        return Root(cls, (rank,), confidence, head or without, nodes, False, ring=ring, note=note, members=(rank,))
    is_skip = departure.way is Way.SKIPPED
    seq = theirs.seq if is_skip else departure.own.seq
    shift = Shift(group, (rank,), seq, 1 if is_skip else -1, departure.own, theirs, departure.matches)
    cls = FaultClass.SKIPPED_COLLECTIVE if is_skip else FaultClass.EXTRA_COLLECTIVE
    return Root(cls, (rank,), confidence, without or head, nodes, False, shift=shift)


# -- operations that ended with an error -------------------------------------------------------------------------------
def _failures(graph: Graph, roots: list[Root], details: FlightDetails | None) -> list[Root]:
    """Ranks whose operations failed have lost a peer: what differs there, and who is not there to tell."""
    world = graph.world
    named = {r for root in roots for r in root.ranks}
    out = list(roots)
    for (index, seq), calls in world.failed_at.items():
        group = world.groups[index]
        ops = {r: c.op for r, c in calls.items()} | {r: c.op for r, c in world.at.get((index, seq), {}).items()}
        if details is not None:
            ops |= _recorded(group, seq, [r for r in group.records if r not in ops], details)
        failed = Stop(-1, group, seq, dict(calls), waiters=sorted(calls))
        found = [d for d in differences(ops) if not named & set(d.odd)]
        for difference in found:
            confidence = 0.6 if difference.is_tie else 0.8
            out.append(Root(difference.cls, difference.odd, confidence, failed, (), difference=difference,
                            members=tuple(sorted(ops))))  # fmt: skip
            named |= set(difference.odd)
        gone = tuple(r for r in group.members if r in world.unknown and r not in named)
        if gone and len(gone) <= len(calls):
            out += _gone_at(world, gone, failed, has_difference=bool(found))
            named |= set(gone)
    if not world.open:
        out += _gone_unawaited(world, named, details)
    return out


def _gone_at(world: World, gone: tuple[int, ...], stop: Stop, *, has_difference: bool) -> list[Root]:
    is_sure = all(world.is_gone(r) for r in gone)
    stopped = all(world.state(r) is RankState.STOPPED for r in gone)
    cls = FaultClass.STOPPED_PROCESS if stopped else FaultClass.DEAD_PROCESS
    # gloo ends the rank that gets more than it has room for, not the one that sends it
    confidence = 0.5 if has_difference else 0.85 if is_sure else 0.6
    return [Root(cls, gone, confidence, stop, (), is_sure, note="the others' operations with it failed")]


def _gone_unawaited(world: World, named: set[int], details: FlightDetails | None) -> list[Root]:
    """Nobody stands in anything, and some left no dump: gloo's operations end at once when a peer dies, and read as
    done. What the others called last is compared as well, since gloo ends a rank that is sent too much."""
    gone = tuple(r for r in world.unknown if r not in named and world.is_gone(r))
    lost = gone or tuple(r for r in world.unknown if r not in named)
    if not lost or not world.flights or len(lost) > max(1, world.size // 3):
        return []
    if world.only_logs or not any(g.is_host for g in world.groups):
        return []
    groups = [g for g in world.groups if set(lost) & set(g.members) and g.records and g.issued]
    roots: list[Root] = []
    for group in groups if details is not None else ():
        newest = max(group.issued.values())
        assert details is not None
        ops = _recorded(group, newest, sorted(group.records), details)
        calls = {r: Call(r, op, group, 0, op.created_ns) for r, op in ops.items()}
        stop = Stop(-1, group, newest, calls, waiters=sorted(calls))
        members = tuple(sorted(ops))
        roots += [Root(d.cls, d.odd, 0.6 if d.is_tie else 0.75, stop, (), difference=d, members=members)
                  for d in differences(ops)]  # fmt: skip
    stopped = all(world.state(r) is RankState.STOPPED for r in lost)
    cls = FaultClass.STOPPED_PROCESS if stopped else FaultClass.DEAD_PROCESS
    confidence = 0.45 if roots or not gone else 0.8
    note = "nobody waits in a recorded operation; gloo ends them when a peer dies"
    return [*roots, Root(cls, lost, confidence, None, (), bool(gone), note=note)]
