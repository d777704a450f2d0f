"""The waits-for graph: ranks stand in operations, operations lack members.

An operation is one node however many stand in it, so that the graph stays as small as the groups are large. Waits are
joint: an operation needs all its members, so that every rank that blocks one is in the way, and every ring of waits is
a deadlock whatever else its operations lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from steadyrun.core.flight import OpState
from steadyrun.detect.waits.records import WaitReason
from steadyrun.detect.waits.signature import ROOTED, op_family
from steadyrun.detect.waits.world import MAIN, Call, Group, Standing, World, ends_of

__all__ = ["Graph", "Lack", "Stop", "build_graph"]

MAX_STOPS = 128
MAX_GUESSED = 64  # ranks among which members of a group that nobody describes are looked for


@dataclass(frozen=True, slots=True)
class Lack:
    """Why a member is missing; *is_hard*: that it has not called the operation follows from its record."""

    reason: WaitReason
    is_hard: bool


@dataclass(slots=True, eq=False)
class Stop:
    """An operation in which somebody stands and which is not done.

    Attributes:
        calls: open calls of it, by rank.
        waiters: ranks whose oldest open call it is, so that they stand in it.
        lacks: members that are not there.
        done_on, failed_on: members on which it ended.
        is_paired: for sends and receives: the two sides were counted from the group's first.
        is_left_out: one of too many different ones in a group to look for its members.
    """

    node: int
    group: Group
    seq: int
    calls: dict[int, Call]
    src: int | None = None
    dst: int | None = None
    waiters: list[int] = field(default_factory=list)
    lacks: dict[int, Lack] = field(default_factory=dict)
    done_on: list[int] = field(default_factory=list)
    failed_on: list[int] = field(default_factory=list)
    is_paired: bool = True
    is_left_out: bool = False
    cached: Call | None = None

    @property
    def is_p2p(self) -> bool:
        return self.src is not None or self.first.op.is_p2p

    @property
    def first(self) -> Call:
        """The call of the lowest rank that waits in it, else of the lowest that has called it."""
        if self.cached is None:
            self.cached = self.calls[min(self.waiters or self.calls)]
        return self.cached

    @property
    def since_ns(self) -> int | None:
        waiting = set(self.waiters) or self.calls
        return min((c.at_ns for r, c in self.calls.items() if c.at_ns is not None and r in waiting), default=None)

    @property
    def members(self) -> tuple[int, ...]:
        if self.src is not None and self.dst is not None:
            return (self.src, self.dst)
        return self.group.members

    @property
    def is_rooted(self) -> bool:
        return op_family(self.first.op.name) in ROOTED


@dataclass(slots=True)
class Graph:
    """Nodes are numbers: ranks' streams first, then stops.

    Attributes:
        heads: (rank, stream) to the stop it stands in.
        edges: node to the nodes that it waits for.
        lagging: ranks whose operation is done on other members: their devices stand, whomever they seem to wait for.
    """

    world: World
    stops: list[Stop] = field(default_factory=list)
    streams: list[tuple[int, str]] = field(default_factory=list)
    node_of: dict[tuple[int, str], int] = field(default_factory=dict)
    stop_at: dict[int, Stop] = field(default_factory=dict)
    heads: dict[tuple[int, str], Stop] = field(default_factory=dict)
    edges: dict[int, list[int]] = field(default_factory=dict)
    lagging: dict[int, Stop] = field(default_factory=dict)
    reverse: dict[int, list[int]] = field(default_factory=dict)

    def rank_of(self, node: int) -> int | None:
        return self.streams[node][0] if node < len(self.streams) else None

    def rank_nodes(self, rank: int) -> list[int]:
        return [n for s in self.streams_of(rank) if (n := self.node_of.get((rank, s))) is not None]

    def streams_of(self, rank: int) -> list[str]:
        found = dict.fromkeys(c.stream for c in self.world.open.get(rank, ()))
        return [MAIN, *(s for s in found if s != MAIN)]

    def head(self, rank: int) -> Stop | None:
        """What the rank's main thread stands in, else one of its other threads."""
        found = (self.heads.get((rank, s)) for s in self.streams_of(rank))
        return next((h for h in found if h is not None), None)

    def waiting_for(self, nodes: Iterable[int]) -> set[int]:
        """Ranks that wait for any of the nodes, directly or not."""
        seen = set(nodes)
        todo = list(seen)
        ranks: set[int] = set()
        while todo:
            for before in self.reverse.get(todo.pop(), ()):
                if before not in seen:
                    seen.add(before)
                    todo.append(before)
                    rank = self.rank_of(before)
                    if rank is not None:
                        ranks.add(rank)
        return ranks

    def components(self) -> list[list[int]]:
        """Strongly connected components of more than one node; Tarjan's algorithm without recursion."""
        index: dict[int, int] = {}
        low: dict[int, int] = {}
        on_stack: set[int] = set()
        stack: list[int] = []
        found: list[list[int]] = []
        for start in self.edges:
            if start in index:
                continue
            index[start] = low[start] = len(index)
            stack.append(start)
            on_stack.add(start)
            work: list[tuple[int, Iterator[int]]] = [(start, iter(self.edges.get(start, ())))]
            while work:
                node, following = work[-1]
                after = next(following, None)
                if after is None:
                    work.pop()
                    if work:
                        low[work[-1][0]] = min(low[work[-1][0]], low[node])
                    if low[node] == index[node]:
                        cut = stack.index(node) if stack[-1] != node else len(stack) - 1
                        part = stack[cut:]
                        del stack[cut:]
                        on_stack.difference_update(part)
                        if len(part) > 1:
                            found.append(part)
                elif after not in index:
                    index[after] = low[after] = len(index)
                    stack.append(after)
                    on_stack.add(after)
                    work.append((after, iter(self.edges.get(after, ()))))
                elif after in on_stack:
                    low[node] = min(low[node], index[after])
        return found


def build_graph(world: World) -> Graph:
    """Heads, stops, and who lacks what."""
    graph = Graph(world)
    for rank in range(world.size):
        for stream in graph.streams_of(rank):
            graph.node_of[(rank, stream)] = len(graph.streams)
            graph.streams.append((rank, stream))
    stops: dict[tuple[int, ...], Stop] = {}
    for rank, calls in world.open.items():
        seen_groups: set[tuple[int, int, int]] = set()
        for call in calls:
            is_head = (rank, call.stream) not in graph.heads
            ends = (call.op.src or 0, call.op.dst or 0) if call.op.is_p2p else (-1, -1)
            place = (call.group.index, *ends)
            if not is_head and place in seen_groups:
                continue  # behind another of its own in the same group
            seen_groups.add(place)
            stop = _stop_of(graph, stops, call)
            if is_head:
                graph.heads[(rank, call.stream)] = stop
                stop.waiters.append(rank)
    _leave_out(graph)
    for stop in graph.stops:
        if stop.is_left_out:
            continue
        (_lacks_of_pair if stop.src is not None else _lacks)(graph, stop)
    _guess_members(graph)
    _find_lagging(graph)
    _connect(graph)
    return graph


def _stop_of(graph: Graph, stops: dict[tuple[int, ...], Stop], call: Call) -> Stop:
    world, group = graph.world, call.group
    src = dst = None
    is_paired = True
    seq = call.op.seq
    calls: dict[int, Call] = {}
    key: tuple[int, ...]
    if call.op.is_p2p:
        found = _pair_of(world, call)
        if found is None:
            key, calls = (group.index, -1, call.rank, call.place), {call.rank: call}
        else:
            src, dst, number, is_paired, calls = found
            key = (group.index, src, dst, number, int(is_paired))
    else:
        key, calls = (group.index, seq), world.at[(group.index, seq)]
    stop = stops.get(key)
    if stop is None:
        node = len(graph.streams) + len(graph.stops)
        stop = stops[key] = Stop(node, group, seq, calls, src, dst, is_paired=is_paired)
        graph.stops.append(stop)
        graph.stop_at[node] = stop
    return stop


def _pair_of(world: World, call: Call) -> tuple[int, int, int, bool, dict[int, Call]] | None:
    """(src, dst, number, whether both sides counted from the first, the calls of both sides) of a send or receive.

    Where the ring has lost the first ones, the k-th open send is taken to meet the k-th open receive: both sides of a
    pair end together.
    """
    group = call.group
    for (g, src, dst), (sends, receives) in _flows_of(world, call):
        mine, others = (sends, receives) if call.rank == src else (receives, sends)
        peer = dst if call.rank == src else src
        counts = world.flow(call.rank, group, src, dst), world.flow(peer, group, src, dst)
        is_exact = all(c is not None and c.is_exact for c in counts)
        k = call.op.seq if is_exact else mine.index(call)
        other = (
            next((c for c in others if c.op.seq == k), None) if is_exact else (others[k] if k < len(others) else None)
        )
        assert g == group.index
        return src, dst, k, is_exact, {c.rank: c for c in (call, other) if c is not None}
    return None


def _flows_of(world: World, call: Call) -> Iterator[tuple[tuple[int, int, int], tuple[list[Call], list[Call]]]]:
    src, dst = ends_of(call)
    if src is None or dst is None:
        return
    key = (call.group.index, src, dst)
    flow = world.flows.get(key)
    if flow is not None and any(c is call for side in flow for c in side):
        yield key, flow


def _leave_out(graph: Graph) -> None:
    """Keeps the work within bounds where a large group's members stand in very many different operations, which only
    damaged records show."""
    of_group: dict[int, list[Stop]] = {}
    for stop in graph.stops:
        if stop.src is None:
            of_group.setdefault(stop.group.index, []).append(stop)
    for stops in of_group.values():
        if len(stops) > MAX_STOPS and len(stops[0].group.members) > MAX_STOPS:
            stops.sort(key=lambda s: (-len(s.waiters), s.seq))
            for stop in stops[MAX_STOPS:]:
                stop.is_left_out = True


# -- who is not there --------------------------------------------------------------------------------------------------
def _lacks(graph: Graph, stop: Stop) -> None:
    world, group = graph.world, stop.group
    if stop.first.op.is_p2p:
        return  # a send or receive whose other side is not known
    for rank in group.members:
        call = stop.calls.get(rank)
        if call is not None:
            if not _has_arrived(graph, call, stop):
                stop.lacks[rank] = Lack(WaitReason.QUEUED_BEHIND, False)
            continue
        match world.standing(rank, group, stop.seq):
            case Standing.OPEN:
                stop.lacks[rank] = Lack(WaitReason.QUEUED_BEHIND, False)
            case Standing.DONE:
                stop.done_on.append(rank)
            case Standing.FAILED:
                stop.failed_on.append(rank)
            case Standing.UNKNOWN:
                stop.lacks[rank] = Lack(WaitReason.NO_DUMP, world.is_gone(rank))
            case Standing.ABSENT:
                stop.lacks[rank] = _absent(graph, rank, is_hard=True)


def _has_arrived(graph: Graph, call: Call, stop: Stop) -> bool:
    if call.is_host or call.op.state is OpState.STARTED:
        return True
    return graph.heads.get((call.rank, call.stream)) is stop


def _absent(graph: Graph, rank: int, *, is_hard: bool) -> Lack:
    stands = rank in graph.world.open
    return Lack(WaitReason.QUEUED_BEHIND if stands else WaitReason.NOT_ISSUED, is_hard)


def _lacks_of_pair(graph: Graph, stop: Stop) -> None:
    world = graph.world
    assert stop.src is not None
    assert stop.dst is not None
    for rank in (stop.src, stop.dst):
        call = stop.calls.get(rank)
        if call is not None:
            if not _has_arrived(graph, call, stop):
                stop.lacks[rank] = Lack(WaitReason.QUEUED_BEHIND, False)
        elif rank not in world.flights:
            stop.lacks[rank] = Lack(WaitReason.NO_DUMP, world.is_gone(rank))
        else:
            count = world.flow(rank, stop.group, stop.src, stop.dst)
            if stop.is_paired and count is not None and count.issued > stop.seq:
                stop.done_on.append(rank)
            elif world.flights[rank].is_cut:
                stop.lacks[rank] = Lack(WaitReason.NO_DUMP, False)
            else:
                stop.lacks[rank] = _absent(graph, rank, is_hard=stop.is_paired)


def _guess_members(graph: Graph) -> None:
    """In a group of which nobody says who is in it, all who ever called it have come: somebody else is missing.

    Who is in no operation at all is the first guess, else everybody who stands elsewhere.
    """
    world = graph.world
    if world.size > MAX_GUESSED:
        return
    idle = [r for r in world.flights if r not in world.open]
    for stop in graph.stops:
        if not stop.group.is_inferred or stop.is_left_out or stop.lacks or stop.done_on or stop.failed_on:
            continue
        outside = [r for r in idle if r not in stop.group.records]
        others = outside or [r for r in world.flights if r not in stop.group.records]
        if world.only_logs:
            others = []  # a log says nothing of groups in which all is well
        for rank in others:
            stop.lacks[rank] = _absent(graph, rank, is_hard=False)


def _find_lagging(graph: Graph) -> None:
    """Done on a peer, open here, and nothing older open: all have come, and this rank's device has not seen the end.

    Nothing older of this group is enough on devices, where each group has a queue of its own.
    The ends of gloo's operations say less: one that failed because a peer died reads as done.
    """
    for stop in graph.stops:
        waiters = stop.waiters or (_first_of_group(graph, stop) if not stop.group.is_host and not stop.is_p2p else [])
        if not stop.done_on or stop.is_rooted or not waiters or (stop.is_p2p and not stop.is_paired):
            continue
        if any(k.is_hard and k.reason is not WaitReason.NO_DUMP for k in stop.lacks.values()):
            continue  # it cannot be done anywhere: what says so is an error that was not recorded as one
        if stop.failed_on or (stop.group.is_host and any(k.reason is WaitReason.NO_DUMP for k in stop.lacks.values())):
            continue
        for rank in waiters:
            if stop.waiters or rank not in graph.lagging:
                graph.lagging[rank] = stop


def _first_of_group(graph: Graph, stop: Stop) -> list[int]:
    """Ranks that have nothing older open in its group."""
    calls = graph.world.open
    return [
        rank for rank, own in stop.calls.items()
        if all(c is own or c.group is not stop.group or c.op.is_p2p or c.op.seq > stop.seq for c in calls[rank])
    ]  # fmt: skip


def _connect(graph: Graph) -> None:
    for (rank, stream), stop in graph.heads.items():
        if graph.lagging.get(rank) is not stop:
            graph.edges[graph.node_of[(rank, stream)]] = [stop.node]
    for stop in graph.stops:
        stream = stop.first.stream
        targets = [_target(graph, rank, stream) for rank in stop.lacks]
        if targets:
            graph.edges[stop.node] = targets
    for node, after in graph.edges.items():
        for target in after:
            graph.reverse.setdefault(target, []).append(node)


def _target(graph: Graph, rank: int, stream: str) -> int:
    """The thread of *rank* that would have to come: of the same kind where it stands somewhere, else the main one."""
    if stream != MAIN and (rank, stream) in graph.heads:
        return graph.node_of[(rank, stream)]
    return graph.node_of[(rank, MAIN)]


def first_stop(stops: Sequence[Stop]) -> Stop:
    """The one that lacks the fewest members, then the oldest."""
    return min(stops, key=lambda s: (len(s.lacks), s.since_ns if s.since_ns is not None else 1 << 63, s.node))
