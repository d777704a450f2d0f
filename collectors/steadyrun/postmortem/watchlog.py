"""Flight records out of a log, so that one judgement serves dumps and logs alike.

A watchdog's lines say less than a dump: per rank and group the newest operation enqueued and the newest completed, and
the name and size of the one that timed out. That is enough to see who never entered, and who called something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from steadyrun.core.flight import FlightGroup, FlightOp, OpState, RankFlight
from steadyrun.core.frames import user_frame
from steadyrun.core.records import Frame
from steadyrun.postmortem.loglines import (
    Counters,
    DesyncState,
    Fingerprint,
    FingerprintMismatch,
    GroupRef,
    LogClock,
    LogReading,
    NoteKind,
    RankLog,
    RasCommunicator,
    TimedOut,
    merged,
    read_log,
)

__all__ = ["LogClock", "LogReading", "flights_from_log", "merged", "read_log"]

DEFAULT: Final = "0"  # torch's name of the default group
DEFAULT_DESC: Final = "default_pg"
UNKNOWN_OP: Final = "collective"
FRAMES: Final = 12

# torch's OpType -> the name its recorders use.
_NAMES: Final[Mapping[str, str]] = {
    "ALLREDUCE": "all_reduce",
    "ALLREDUCE_COALESCED": "allreduce_coalesced",
    "ALLGATHER": "all_gather",
    "_ALLGATHER_BASE": "_all_gather_base",
    "ALLGATHER_COALESCED": "all_gather_into_tensor_coalesced",
    "REDUCE_SCATTER": "reduce_scatter",
    "_REDUCE_SCATTER_BASE": "_reduce_scatter_base",
    "ALLTOALL": "all_to_all",
    "ALLTOALL_BASE": "all_to_all",
    "BARRIER": "barrier",
    "RECVANYSOURCE": "recv",
}
_P2P: Final = frozenset({"send", "recv"})


def flights_from_log(reading: LogReading, world_size: int | None = None) -> dict[int, RankFlight]:
    """Per rank that said something about its collectives, or of which others did, its flight record.

    Ranks that are silent have none. Members of a group are told by no line: the default group has all ranks (up to the
    highest one mentioned, without *world_size*); of others they are inferred where two members' places in the group
    fit a regular layout, and left empty elsewhere.
    """
    table = _Table(world_size if world_size is not None else reading.highest_rank() + 1)
    for log in reading.ranks.values():
        _own_words(table, log)
    _hearsay(table, reading)
    table.name_unknown_operations()
    table.infer_members()
    return {r: f for r in sorted(table.ranks) if (f := _flight(table.ranks[r], reading.ranks.get(r))) is not None}


# -- what is known per rank and group ----------------------------------------------------------------------------------
@dataclass(slots=True)
class _Known:
    """One rank in one group."""

    name: str
    desc: str = ""
    group_rank: int | None = None
    enqueued: int | None = None
    completed: int | None = None
    ops: dict[int, FlightOp] = field(default_factory=dict)
    members: tuple[int, ...] = ()
    at_unix_s: float | None = None
    has_failed: bool = False

    def pending(self) -> FlightOp | None:
        """The operation that counters tell of where no line names it."""
        if self.enqueued is None or self.ops or self.enqueued <= (self.completed or 0):
            return None
        return FlightOp(0, (self.completed or 0) + 1, UNKNOWN_OP)


@dataclass(slots=True)
class _Rank:
    rank: int
    groups: dict[str, _Known] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def group(self, name: str, desc: str = "", group_rank: int | None = None) -> _Known:
        known = self.groups.setdefault(name, _Known(name))
        known.desc = known.desc or desc
        known.group_rank = known.group_rank if known.group_rank is not None else group_rank
        return known


@dataclass(slots=True)
class _Table:
    world_size: int
    ranks: dict[int, _Rank] = field(default_factory=dict)

    def of(self, rank: int) -> _Rank:
        return self.ranks.setdefault(rank, _Rank(rank))

    def default_of(self, rank: int) -> _Known:
        return self.of(rank).group(DEFAULT, DEFAULT_DESC, rank)

    def all(self) -> Iterable[tuple[_Rank, _Known]]:
        for rank in self.ranks.values():
            for known in rank.groups.values():
                yield rank, known

    def name_unknown_operations(self) -> None:
        """A rank of which only counters are known waits in what its peers name, where they agree."""
        told: dict[tuple[str, int], set[str]] = {}
        for _, known in self.all():
            for op in known.ops.values():
                told.setdefault((known.name, op.seq), set()).add(op.name)
        for _, known in self.all():
            pending = known.pending()
            if pending is None:
                continue
            names = told.get((known.name, pending.seq), set())
            if len(names) < 2:  # else it may be either: naming one would invent a side
                known.ops[pending.seq] = replace(pending, name=next(iter(names), UNKNOWN_OP))

    def infer_members(self) -> None:
        everyone = tuple(range(self.world_size))
        places: dict[str, list[tuple[int, int]]] = {}
        for rank, known in self.all():
            if known.name == DEFAULT:
                known.members = everyone
            elif known.group_rank is not None:
                places.setdefault(known.name, []).append((rank.rank, known.group_rank))
        for name, told in places.items():
            for members in _layouts(told):
                for rank_number, group_rank in told:
                    if group_rank < len(members) and members[group_rank] == rank_number:
                        self.ranks[rank_number].groups[name].members = members


def _layouts(places: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """Member lists of the groups that share a name, from (rank, rank in the group) of those that spoke.

    Meshes lay groups out regularly: member k is rank ``base + k * stride``. The stride that explains the places with
    the fewest groups is taken; a group of which only one member spoke stays unknown.
    """
    steps = {
        (b[0] - a[0]) // (b[1] - a[1])
        for a in places
        for b in places[:64]
        if b[1] > a[1] and b[0] > a[0] and (b[0] - a[0]) % (b[1] - a[1]) == 0
    }
    best: dict[int, list[int]] = {}
    stride = 1
    for step in sorted(steps):
        by_base: dict[int, list[int]] = {}
        for rank, place in places:
            by_base.setdefault(rank - step * place, []).append(place)
        if all(base >= 0 for base in by_base) and (not best or len(by_base) < len(best)):
            best, stride = by_base, step
    return [
        tuple(base + stride * k for k in range(max(taken) + 1)) for base, taken in best.items() if len(set(taken)) > 1
    ]


# -- what a rank says of itself ----------------------------------------------------------------------------------------
def _own_words(table: _Table, log: RankLog) -> None:
    if not (log.timeouts or log.counters):
        if log.notes and not log.is_silent:
            table.of(log.rank).problems += _problems(log)
        return
    rank = table.of(log.rank)
    for counters in log.counters:
        _count(rank, counters)
    for timeout in log.timeouts:
        known = _group_of_timeout(table, rank, timeout)
        _time_out(known, timeout)
    rank.problems += _problems(log)


def _count(rank: _Rank, counters: Counters) -> None:
    ref = counters.group
    known = _known(rank, ref)
    completed = counters.completed
    if counters.failed_seq is not None:
        before = counters.failed_seq - 1
        completed = before if completed is None else min(completed, before)
    known.enqueued = _highest(known.enqueued, counters.enqueued)
    known.completed = completed if known.completed is None else known.completed
    known.at_unix_s = known.at_unix_s if known.at_unix_s is not None else counters.at_unix_s


def _known(rank: _Rank, ref: GroupRef) -> _Known:
    if ref.is_default:
        return rank.group(DEFAULT, DEFAULT_DESC, ref.rank)
    return rank.group(ref.name, ref.desc, ref.rank)


def _group_of_timeout(table: _Table, rank: _Rank, timeout: TimedOut) -> _Known:
    if timeout.group is not None:
        return _known(rank, timeout.group)
    default = rank.groups.get(DEFAULT)
    has_done_it = default is not None and default.completed is not None and default.completed >= timeout.seq
    if timeout.group_rank in (None, rank.rank) and not has_done_it:
        return table.default_of(rank.rank)
    # A sub-group that no line names. Neighbours whose places fit a contiguous layout are taken as one group.
    base = rank.rank - (timeout.group_rank or 0)
    return rank.group(f"?{base}", "unnamed sub-group", timeout.group_rank)


def _time_out(known: _Known, timeout: TimedOut) -> None:
    name = _NAMES.get(timeout.op, timeout.op.lower())
    created = None
    if timeout.at_unix_s is not None and not timeout.was_suspended:
        created = int((timeout.at_unix_s - timeout.ran_for_s) * 1e9)
    has_sizes = timeout.numel_in is not None and name != "coalesced"
    site = user_frame(timeout.frames)
    op = FlightOp(
        0,
        timeout.seq,
        name,
        is_p2p=name in _P2P,
        in_sizes=((timeout.numel_in,),) if has_sizes and timeout.numel_in is not None else (),
        out_sizes=((timeout.numel_out,),) if has_sizes and timeout.numel_out is not None else (),
        created_ns=created,
        site=_site(site) if site is not None else None,
        frames=tuple(_site(f) for f in timeout.frames[:FRAMES]),
        timeout_s=timeout.timeout_s,
    )
    known.ops.setdefault(op.seq, op)
    known.at_unix_s = known.at_unix_s if known.at_unix_s is not None else timeout.at_unix_s
    if op.is_p2p:
        return
    known.enqueued = _highest(known.enqueued, timeout.seq)
    known.completed = timeout.seq - 1 if known.completed is None else min(known.completed, timeout.seq - 1)


def _site(frame: Frame) -> str:
    return f"{frame.file.rpartition('/')[2]}:{frame.line} in {frame.function}"


def _highest(a: int | None, b: int | None) -> int | None:
    return max((n for n in (a, b) if n is not None), default=None)


def _problems(log: RankLog) -> list[str]:
    suspended = [
        f"{_NAMES.get(t.op, t.op.lower())} #{t.seq} ran {t.ran_for_s:.0f} s against a limit of {t.timeout_s:.0f} s:"
        " the process or its machine stood still in between"
        for t in log.timeouts
        if t.was_suspended
    ]
    texts = {
        NoteKind.WATCHDOG_STUCK: "its NCCL watchdog was stuck: a call into NCCL or CUDA did not return",
        NoteKind.GIL_HELD: "the interpreter lock could not be had: some thread holds it in C code",
        NoteKind.RECORDER_OFF: "its flight recorder was off (set TORCH_FR_BUFFER_SIZE=2000)",
        NoteKind.DUMP_TIMED_OUT: "its flight recorder could not be written in time",
        NoteKind.DESTROYING: "it had begun to destroy its process groups",
    }
    return suspended + [text for kind, text in texts.items() if log.has(kind)]


# -- what is said of a rank by others ----------------------------------------------------------------------------------
def _hearsay(table: _Table, reading: LogReading) -> None:
    """Reports that speak of several ranks; what a rank has said itself stays."""
    own = {(r.rank, k.name) for r, k in table.all() if k.enqueued is not None or k.ops}
    for state in reading.desync:
        _desync(table, state, own)
    for mismatch in reading.fingerprints:
        _compare(table, mismatch)
    for communicator in reading.communicators:
        _ras(table, communicator)
    for late in reading.barriers:
        name = "monitored barrier"
        members = tuple(sorted({0, *late.ranks}))
        waiting = table.of(0).group(name)
        waiting.ops[1] = FlightOp(0, 1, "monitored_barrier", timeout_s=late.limit_s)
        waiting.enqueued = 1
        for rank in members:
            table.of(rank).group(name).members = members


def _desync(table: _Table, state: DesyncState, own: set[tuple[int, str]]) -> None:
    """Ranks are those of the group: taken as global ones in the default group, left alone elsewhere."""
    if state.group is not None and not state.group.is_default:
        return
    for rank in state.ranks:
        if (rank, DEFAULT) in own or rank >= table.world_size + len(state.ranks):
            continue
        known = table.default_of(rank)
        table.world_size = max(table.world_size, rank + 1)
        if state.seq is None:
            continue
        done = state.seq if state.is_finished else state.seq - 1
        known.enqueued = _highest(known.enqueued, state.seq)
        known.completed = _highest(known.completed, done)
        if not state.is_finished and state.op:
            known.ops[state.seq] = FlightOp(0, state.seq, _NAMES.get(state.op, state.op.lower()))


def _compare(table: _Table, mismatch: FingerprintMismatch) -> None:
    """Both sides stand at the same point of the program, whatever their own counts say, if what they call differs."""
    own, other = mismatch.own, mismatch.other
    same_call = (own.op, own.shape, own.dtypes) == (other.op, other.shape, other.dtypes)
    told = [(own, own.seq), (other, other.seq if same_call else own.seq)]
    told += [(replace(own, rank=r), own.seq) for r in range(other.rank) if r != own.rank]
    for fingerprint, seq in told:
        if fingerprint.rank > 1 << 16:
            continue
        table.world_size = max(table.world_size, fingerprint.rank + 1)
        known = table.default_of(fingerprint.rank)
        if known.ops:
            continue
        op = _fingerprint_op(fingerprint, seq or 0)
        known.ops[op.seq] = op
        known.enqueued, known.completed = op.seq, op.seq - 1


def _fingerprint_op(fingerprint: Fingerprint, seq: int) -> FlightOp:
    return FlightOp(
        0,
        seq,
        _NAMES.get(fingerprint.op, fingerprint.op.lower()),
        in_sizes=(fingerprint.shape,) if fingerprint.shape is not None else (),
        in_dtypes=fingerprint.dtypes,
    )


def _ras(table: _Table, communicator: RasCommunicator) -> None:
    """RAS names the ranks of the smaller sides; the rest of the communicator is the largest."""
    size = sum(many for _, many, _ in communicator.counts)
    named = {r for _, _, ranks in communicator.counts for r in ranks}
    unnamed = [c for c in communicator.counts if not c[2]]
    if not 1 < size <= 1 << 16 or len(unnamed) > 1 or any(r >= size for r in named):
        return
    newest = max(launched for launched, _, _ in communicator.counts)
    members = tuple(range(size))
    for launched, _, ranks in communicator.counts:
        for rank in ranks or [r for r in members if r not in named]:
            known = table.of(rank).group(f"RAS {communicator.name}")
            known.members = members
            known.enqueued = launched
            known.completed = launched if launched < newest else newest - 1
            if launched == newest:
                known.ops[newest] = FlightOp(0, newest, UNKNOWN_OP)
    table.world_size = max(table.world_size, size)


# -- putting together --------------------------------------------------------------------------------------------------
def _flight(rank: _Rank, log: RankLog | None) -> RankFlight | None:
    error = next((n.text for n in log.notes if n.kind is NoteKind.COMM_ERROR), "") if log is not None else ""
    if not (rank.groups or rank.problems or error):
        return None
    groups: list[FlightGroup] = []
    ops: list[FlightOp] = []
    times = [k.at_unix_s for k in rank.groups.values() if k.at_unix_s is not None]
    for known in rank.groups.values():
        pending = [replace(op, group=len(groups)) for _, op in sorted(known.ops.items())]
        if error:
            pending = [replace(op, state=OpState.FAILED) for op in pending]
        done = known.completed
        groups.append(
            FlightGroup(
                name=known.name,
                desc=known.desc,
                ranks=known.members,
                backend="nccl",
                issued_seq=known.enqueued,
                done_seq=done if done is None or done > 0 else None,
                has_failed=bool(error and pending),
            )
        )
        ops += pending
    ops.sort(key=lambda op: (op.created_ns is None, op.created_ns or 0, op.group, op.seq))
    return RankFlight(
        rank=rank.rank,
        groups=tuple(groups),
        ops=tuple(ops),
        recorders=("log",),
        entries=len(ops),
        has_frames=any(op.site for op in ops),
        exception=error,
        taken_at_unix_s=max(times, default=None),
        problems=tuple(dict.fromkeys(rank.problems)),
    )
