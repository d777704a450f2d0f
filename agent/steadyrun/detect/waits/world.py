"""All ranks' flight records brought together: groups matched over ranks, calls found by what they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from steadyrun.core.flight import FlightGroup, FlightOp, FlowCount, OpState, RankFlight
from steadyrun.detect.waits.records import RankState

__all__ = ["MAIN", "Call", "Group", "Standing", "World", "ends_of", "main_threads", "read_world"]

MAIN: Final = ""  # the stream of the main thread and of what it starts on the device
MAX_RANKS: Final = 1 << 20  # what is beyond comes from a damaged record
DEFAULT_DESC: Final = "default_pg"
_MAIN_THREADS: Final = ("python", "pt_autograd", "pt_main", "mainthread")
_SAYS_NOTHING: Final = ("", "undefined")


class Standing(Enum):
    """How a member stands to an operation."""

    OPEN = "open"
    DONE = "done"
    ABSENT = "absent"  # has not called it
    FAILED = "failed"  # ended with an error here
    UNKNOWN = "unknown"


@dataclass(slots=True, eq=False)
class Call:
    """One rank's open or failed operation; *place* is its position among the open ones of this rank."""

    rank: int
    op: FlightOp
    group: Group
    place: int
    at_ns: int | None  # on the clock of this node
    stream: str = MAIN

    @property
    def is_host(self) -> bool:
        """The thread itself waits in it (gloo, mpi); otherwise it was only queued to the device."""
        return self.group.is_host


@dataclass(slots=True, eq=False)
class Group:
    """A process group over all ranks.

    Attributes:
        is_inferred: no dump says who is in it; *members* are those that recorded something.
        issued: newest collective that a rank is known to have called; absent where the dump does not tell.
        kept: newest open collective in the record of a rank that had to leave some out.
        sends: ranks send and receive in it, so that torch's counters count those.
    """

    index: int
    name: str
    desc: str
    members: tuple[int, ...]
    is_inferred: bool = False
    backend: str = ""
    records: dict[int, FlightGroup] = field(default_factory=dict)
    issued: dict[int, int] = field(default_factory=dict)
    kept: dict[int, int] = field(default_factory=dict)
    sends: bool = False
    places: dict[int, int] = field(default_factory=dict)

    @property
    def is_host(self) -> bool:
        return self.backend in ("gloo", "mpi")

    def place_of(self, rank: int | None) -> int | None:
        """The rank's number in the group, which torch calls the group rank."""
        if not self.places:
            self.places.update((r, i) for i, r in enumerate(self.members))
        return self.places.get(rank) if rank is not None else None

    @property
    def kind(self) -> tuple[str, int]:
        """Equal for groups of one dimension of a mesh, which do the same in step."""
        return (self.desc if self.desc not in _SAYS_NOTHING else f"#{self.name}", len(self.members))


@dataclass(slots=True)
class World:
    """Everything that the flight records say.

    Attributes:
        flights: usable ones only.
        unknown: ranks without a usable record, with the reason.
        open: per rank its open calls, oldest first; ``failed`` alike.
        at: (group, seq) of a collective to the ranks that have it open; ``failed_at`` alike.
        flows: (group, src, dst) to the open sends and the open receives.
    """

    size: int
    flights: dict[int, RankFlight]
    states: Mapping[int, RankState]
    unknown: dict[int, str] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    groups_of: dict[int, list[Group]] = field(default_factory=dict)
    open: dict[int, list[Call]] = field(default_factory=dict)
    failed: dict[int, list[Call]] = field(default_factory=dict)
    at: dict[tuple[int, int], dict[int, Call]] = field(default_factory=dict)
    failed_at: dict[tuple[int, int], dict[int, Call]] = field(default_factory=dict)
    flows: dict[tuple[int, int, int], tuple[list[Call], list[Call]]] = field(default_factory=dict)
    alike: Counter[str] = field(default_factory=Counter)  # groups per description

    @property
    def only_logs(self) -> bool:
        """What is known came from watchdog lines: a rank that is silent there need not be dead."""
        return bool(self.flights) and all(f.recorders == ("log",) for f in self.flights.values())

    def state(self, rank: int) -> RankState:
        return self.states.get(rank, RankState.UNKNOWN)

    def is_gone(self, rank: int) -> bool:
        """Dead or stopped for certain."""
        return self.state(rank) in (RankState.DEAD, RankState.STOPPED)

    def label(self, group: Group) -> str:
        """``mesh_tp (7)``; the name is left out where the description alone identifies it."""
        if group.desc in _SAYS_NOTHING:
            return group.name or "a group"
        if not self.alike:
            self.alike.update(g.desc for g in self.groups)
        return f"{group.desc} ({group.name})" if self.alike[group.desc] > 1 and group.name else group.desc

    def standing(self, rank: int, group: Group, seq: int) -> Standing:
        """Of a rank to the collective *seq*; ``OPEN`` also where the record had to leave the call out."""
        key = (group.index, seq)
        if rank in self.at.get(key, ()):
            return Standing.OPEN
        if rank in self.failed_at.get(key, ()):
            return Standing.FAILED
        flight = self.flights.get(rank)
        if flight is None:
            return Standing.UNKNOWN
        record = group.records.get(rank)
        not_there = Standing.UNKNOWN if flight.is_cut else Standing.ABSENT
        if record is None:
            return not_there
        if record.done_seq is not None and seq <= record.done_seq:
            return Standing.DONE
        issued = group.issued.get(rank)
        if issued is None or issued < seq:
            return not_there
        if flight.is_cut and (record.issued_seq is None or seq > record.issued_seq):
            return Standing.UNKNOWN  # counted, but its entry is lost
        if flight.more_ops and seq > group.kept.get(rank, -1):
            return Standing.OPEN
        return Standing.FAILED if record.has_failed else Standing.DONE

    def flow(self, rank: int, group: Group, src: int, dst: int) -> FlowCount | None:
        """What the rank counted in this direction."""
        record = group.records.get(rank)
        if record is None:
            return None
        return next((f for f in record.flows if f.src == src and f.dst == dst), None)


def read_world(flights: Mapping[int, RankFlight], world_size: int, states: Mapping[int, RankState]) -> World:
    """Match groups and calls of all ranks."""
    flights = {r: f for r, f in sorted(flights.items()) if 0 <= r < MAX_RANKS}
    usable = {r: f for r, f in flights.items() if not f.is_off}
    world = World(max([0, min(world_size, MAX_RANKS), *(r + 1 for r in flights)]), usable, states)
    local = _match_groups(world)
    world.size = max([world.size, *(g.members[-1] + 1 for g in world.groups if g.members)])
    for rank in range(world.size):
        if rank not in usable:
            world.unknown[rank] = "its recorder was off" if rank in flights else "it left no dump"
    _read_calls(world, local)
    _read_bounds(world, local)
    return world


# -- groups ------------------------------------------------------------------------------------------------------------
def _match_groups(world: World) -> dict[int, list[Group]]:
    """Per rank, the group of each of its own records."""
    by_key: dict[tuple[str, tuple[int, ...]], Group] = {}
    by_identity: dict[tuple[str, int], Group] = {}  # of the tuples of ranks, which all flights keep alive
    by_name: dict[str, list[Group]] = {}
    local: dict[int, list[Group | None]] = {}

    def add(name: str, desc: str, members: tuple[int, ...], is_inferred: bool) -> Group:
        group = Group(len(world.groups), name, desc, members, is_inferred)
        world.groups.append(group)
        return group

    for rank, flight in world.flights.items():
        row: list[Group | None] = []
        for record in flight.groups:
            group = None
            if record.ranks and record.ranks[0] >= 0 and record.ranks[-1] < MAX_RANKS:
                group = by_identity.get((record.name, id(record.ranks)))
                if group is None:
                    group = by_key.get((record.name, record.ranks))
                    if group is None:
                        group = by_key[(record.name, record.ranks)] = add(record.name, record.desc, record.ranks, False)
                        by_name.setdefault(record.name, []).append(group)
                    by_identity[(record.name, id(record.ranks))] = group
            row.append(group)
        local[rank] = row
    inferred: dict[tuple[str, str], Group] = {}
    found: dict[int, list[Group]] = {}
    for rank, flight in world.flights.items():
        groups: list[Group] = []
        for record, known in zip(flight.groups, local[rank], strict=True):
            group = known
            if group is None:
                alike = [g for g in by_name.get(record.name, ()) if rank in g.members]
                group = alike[0] if len(alike) == 1 else None
            if group is None:
                key = (record.name, record.desc)
                if key not in inferred:
                    is_world = record.desc == DEFAULT_DESC or record.name == DEFAULT_DESC
                    members = tuple(range(world.size)) if is_world else ()
                    inferred[key] = add(record.name, record.desc, members, not is_world)
                group = inferred[key]
            group.records.setdefault(rank, record)
            group.backend = group.backend or record.backend
            group.desc = group.desc or record.desc
            group.sends = group.sends or bool(record.flows)
            groups.append(group)
        found[rank] = groups
        world.groups_of[rank] = groups
    for group in inferred.values():
        if group.is_inferred:
            group.members = tuple(sorted(group.records))
    return found


# -- calls -------------------------------------------------------------------------------------------------------------
def _read_calls(world: World, local: Mapping[int, list[Group]]) -> None:
    main = main_threads(world)
    for rank, flight in world.flights.items():
        open_calls: list[Call] = []
        failed: list[Call] = []
        shift_ns = int(flight.node_minus_here_s * 1e9)
        for op in flight.ops:
            group = local[rank][op.group]
            at_ns = op.created_ns - shift_ns if op.created_ns is not None else None
            if op.state is OpState.DONE:
                continue
            if op.state is OpState.FAILED:
                call = Call(rank, op, group, len(failed), at_ns)
                failed.append(call)
                if not op.is_p2p:
                    world.failed_at.setdefault((group.index, op.seq), {})[rank] = call
                continue
            stream = MAIN if op.thread in main else op.thread.rstrip("0123456789-_ ") or MAIN
            call = Call(rank, op, group, len(open_calls), at_ns, stream)
            open_calls.append(call)
            if not op.is_p2p:
                world.at.setdefault((group.index, op.seq), {})[rank] = call
                if flight.more_ops:
                    group.kept[rank] = max(group.kept.get(rank, -1), op.seq)
                continue
            group.sends = True
            src, dst = ends_of(call)
            if src is not None and dst is not None and max(src, dst) < world.size:
                sends, receives = world.flows.setdefault((group.index, src, dst), ([], []))
                (sends if src == rank else receives).append(call)
        if open_calls:
            world.open[rank] = open_calls
        if failed:
            world.failed[rank] = failed
    for sends, receives in world.flows.values():
        sends.sort(key=lambda c: c.op.seq)
        receives.sort(key=lambda c: c.op.seq)


def ends_of(call: Call) -> tuple[int | None, int | None]:
    """(src, dst); in a group of two the other one is known even if the record does not say."""
    src, dst, members = call.op.src, call.op.dst, call.group.members
    name = call.op.name.lower()
    if len(members) == 2 and call.rank in members and not call.group.is_inferred:
        other = members[0] if members[1] == call.rank else members[1]
        if "send" in name:
            src, dst = call.rank, other if dst is None else dst
        elif "recv" in name:
            src, dst = other if src is None else src, call.rank
    peer = dst if src == call.rank else src
    is_member = peer is not None and (peer >= 0 if call.group.is_inferred else call.group.place_of(peer) is not None)
    return (src, dst) if call.rank in (src, dst) and is_member else (None, None)


def main_threads(world: World) -> frozenset[str]:
    """Names that the main thread and autograd's have; the rest work beside them."""
    counts = Counter(op.thread for f in world.flights.values() for op in f.ops if op.thread)
    names = {t for t in counts if t.lower().startswith(_MAIN_THREADS) or t.strip("0123456789") == ""}
    if counts and not names:
        names.add(counts.most_common(1)[0][0])
    return frozenset({"", *names})


# -- bounds ------------------------------------------------------------------------------------------------------------
def _read_bounds(world: World, local: Mapping[int, list[Group]]) -> None:
    for group in world.groups:
        for rank, record in group.records.items():
            if record.issued_seq is not None:
                group.issued[rank] = record.issued_seq
    for key, calls in world.at.items():
        group = world.groups[key[0]]
        for rank in calls:
            group.issued[rank] = max(group.issued.get(rank, key[1]), key[1])
    counters = {r: dict(_counters(f, local[r])) for r, f in world.flights.items() if f.status and _wants_counters(f)}
    lying = _lying(world, counters)
    for rank, found in counters.items():
        for group_index, enqueued in found.items():
            group = world.groups[group_index]
            if group_index not in lying and not group.sends:
                group.issued[rank] = max(group.issued.get(rank, enqueued), enqueued)


def _wants_counters(flight: RankFlight) -> bool:
    return flight.is_active_only or any(g.issued_seq is None for g in flight.groups)


def _counters(flight: RankFlight, groups: list[Group]) -> Iterator[tuple[int, int]]:
    """(group, newest enqueued) from torch's counters, whose numbers only this rank knows.

    Where no entry tells which group a number means: both are given in the order of creation, so that as many numbers as
    groups can be laid side by side, if all entries agree with that.
    """
    known = dict(flight.pg_ids)
    numbered = sorted((int(g.name), i) for i, g in enumerate(flight.groups) if g.name.isdecimal())
    times = Counter(s.pg_id for s in flight.status)  # each recorder numbers its groups from 0
    ids = sorted(times)
    if len(numbered) == len(flight.groups) == len(flight.status) == len(ids):
        aligned = {pg_id: index for pg_id, (_, index) in zip(ids, numbered, strict=True)}
        if all(aligned.get(pg_id, index) == index for pg_id, index in known.items()):
            known = aligned
    for status in flight.status:
        if status.pg_id in known and status.enqueued >= 0 and times[status.pg_id] == 1:
            yield groups[known[status.pg_id]].index, status.enqueued


def _lying(world: World, counters: Mapping[int, Mapping[int, int]]) -> set[int]:
    """Groups in which a counter is far from what the same rank's entries say: it counts something else."""
    return {
        g
        for rank, found in counters.items()
        for g, enqueued in found.items()
        if rank in world.groups[g].issued and abs(world.groups[g].issued[rank] - enqueued) > 2
    }
