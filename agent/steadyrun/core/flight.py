"""What one rank's flight recorders say, in a form small enough to send: bounds per group, what is not done, hashes.

A dump of 2,000 entries becomes 2 to 8 KB. Every judgement over collectives starts from these records, on a live job and
post mortem alike; single entries of a dump are asked for only where a difference has to be found (``FlightDetails``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Final, Protocol

__all__ = [
    "MAX_OPS",
    "WINDOW",
    "FlightDetails",
    "FlightGroup",
    "FlightOp",
    "FlowCount",
    "GroupStatus",
    "OpState",
    "RankFlight",
    "flight_from_json",
    "flight_to_json",
    "ranks_from_text",
    "ranks_to_text",
    "window_hash",
]

WINDOW: Final = 16  # collectives of one group under one hash; window w holds the sequence numbers w*16 .. w*16+15
MAX_OPS: Final = 64  # incomplete operations kept per rank, the oldest of each group first
MAX_FRAMES: Final = 12


class OpState(str, Enum):
    """``issued``: the host has called it; ``started``: known to run on the device (needs timing); ``failed``: it ended
    with an error, so that nothing follows from its end."""

    ISSUED = "issued"
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class FlightOp:
    """One operation of one rank.

    Attributes:
        group: index into ``RankFlight.groups``.
        seq: the group's collective number, or the number of the send or recv in its direction (0-based count).
        name: torch's name without the backend: ``all_reduce``, ``_allgather_base``, ``send``.
        src, dst: global ranks of a send or recv, None where unknown and for collectives.
        created_ns, started_ns: wall clock of that node, ns; None when unknown.
        site: ``train.py:88 in step``: the innermost frame of the user's, else of whoever called torch; None without
            frames. Comparable between ranks.
        frames: newest call first, each as ``site`` is written; torch's own left out.
        timeout_s: the group's limit for it.
    """

    group: int
    seq: int
    name: str
    state: OpState = OpState.ISSUED
    is_p2p: bool = False
    in_sizes: tuple[tuple[int, ...], ...] = ()
    out_sizes: tuple[tuple[int, ...], ...] = ()
    in_dtypes: tuple[str, ...] = ()
    out_dtypes: tuple[str, ...] = ()
    src: int | None = None
    dst: int | None = None
    created_ns: int | None = None
    started_ns: int | None = None
    thread: str = ""
    site: str | None = None
    frames: tuple[str, ...] = ()
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class FlowCount:
    """Sends or receives of this rank in one direction of a group, counted over its life where the ring allows it.

    Attributes:
        issued, done: numbers of operations, counted from the group's first; equal when nothing is open.
        is_exact: the counts began at the group's first operation (no ring wrap), so that both sides' can be compared.
    """

    src: int
    dst: int
    issued: int
    done: int
    is_exact: bool = True


@dataclass(frozen=True, slots=True)
class FlightGroup:
    """One process group of one rank.

    Attributes:
        name: torch's name of the group; with ``ranks`` it identifies the group over ranks.
        desc: ``default_pg``, ``mesh_tp`` or what the user said.
        ranks: its global ranks, sorted; empty when the dump does not tell (gloo without a sidecar).
        backend: ``nccl``, ``gloo``, ``nccl2``; empty when unknown.
        first_seq: oldest collective still in the recorder's ring.
        issued_seq, done_seq: newest collective issued, and newest of which all up to it are done (failed ones are not).
        last_done_ns, last_issued_ns: wall time of those, ns.
        windows: (window, hash) of the complete windows in the ring, see ``window_hash``.
        flows: what it sent and received.
        has_failed: an operation ended with an error here.
    """

    name: str
    desc: str = ""
    ranks: tuple[int, ...] = ()
    backend: str = ""
    first_seq: int | None = None
    issued_seq: int | None = None
    done_seq: int | None = None
    last_issued_ns: int | None = None
    last_done_ns: int | None = None
    windows: tuple[tuple[int, int], ...] = ()
    flows: tuple[FlowCount, ...] = ()
    has_failed: bool = False


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """torch's own counters of one group, which it writes under a number that only this rank knows.

    With point-to-point operations in the group they count those too; they lag one behind the entries now and then.
    """

    pg_id: int
    enqueued: int
    started: int
    completed: int


@dataclass(frozen=True, slots=True)
class RankFlight:
    """One rank's recorders, merged and summarised.

    Attributes:
        ops: what is not done (also failed ones), oldest first by time and then by the recorder's order.
        more_ops: how many incomplete operations were left out of ``ops``.
        status: torch's counters (``pg_status``), only needed where the dump holds nothing but active entries.
        pg_ids: (pg_id, index into groups) where entries tell.
        recorders: where entries came from: ``nccl``, ``gloo``, ``log`` (a watchdog's lines) and the like.
        entries: how many entries were read.
        is_active_only: the dump leaves out what is done; an operation not in it is done if it was issued.
        is_off: the recorder was switched off; nothing can be said.
        is_cut: read up to a cut: what came last is missing, so that "not issued" cannot be told.
        has_frames, has_timing: call sites, and device starts, are recorded.
        exception: text of an error that this rank's collectives met, or empty.
        taken_at_unix_s: when the dump was made; None when unknown.
        node_minus_here_s: the node's wall clock minus this one's, where known; 0 otherwise.
    """

    rank: int
    groups: tuple[FlightGroup, ...] = ()
    ops: tuple[FlightOp, ...] = ()
    more_ops: int = 0
    status: tuple[GroupStatus, ...] = ()
    pg_ids: tuple[tuple[int, int], ...] = ()
    recorders: tuple[str, ...] = ()
    entries: int = 0
    version: str = ""
    is_active_only: bool = False
    is_off: bool = False
    is_cut: bool = False
    has_frames: bool = False
    has_timing: bool = False
    exception: str = ""
    taken_at_unix_s: float | None = None
    node_minus_here_s: float = 0.0
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """See ``flight_to_json``."""
        return flight_to_json(self)


class FlightDetails(Protocol):
    """Single entries of a rank's dump, where the summary is not enough; slow."""

    def ops(self, rank: int, group: str, first_seq: int, last_seq: int) -> Sequence[FlightOp]:
        """The rank's collectives of the group *name* with these numbers, in order; empty when they cannot be had."""
        ...

    def course(self, rank: int, last: int) -> Sequence[FlightOp]:
        """The *last* calls of a rank in all its groups, sends and receives too, in the order in which it made them.

        Empty when they cannot be had, and where the dump has left out what was done.
        """
        ...


def window_hash(ops: Sequence[tuple[str, str]]) -> int:
    """48 bits over (operation, call site) of a window's collectives in order; equal on ranks that did the same.

    Sizes are left out: uneven shards differ between healthy ranks.
    """
    text = "\n".join(f"{name}\t{site}" for name, site in ops)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=6).digest(), "big")


# -- JSON --------------------------------------------------------------------------------------------------------------
def ranks_to_text(ranks: Sequence[int]) -> str:
    """``0-7,16,24-120:8``: runs of a constant distance, so that a group of thousands stays short."""
    parts: list[str] = []
    i = 0
    while i < len(ranks):
        j = i + 1
        step = ranks[j] - ranks[i] if j < len(ranks) else 1
        while j + 1 < len(ranks) and ranks[j + 1] - ranks[j] == step:
            j += 1
        if j - i < 2 or step < 1:
            parts.append(str(ranks[i]))
            i += 1
            continue
        parts.append(f"{ranks[i]}-{ranks[j]}" + (f":{step}" if step != 1 else ""))
        i = j + 1
    return ",".join(parts)


@lru_cache(maxsize=256)  # thousands of ranks are in the same large groups: 0.6 GB for 4,096 of them without it
def ranks_from_text(text: str) -> tuple[int, ...]:
    """The inverse of ``ranks_to_text``. Raises ValueError, also for more than a million ranks."""
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        span, _, step = part.partition(":")
        first, dash, last = span.partition("-")
        if not dash:
            ranks.append(int(first))
            continue
        numbers = range(int(first), int(last) + 1, int(step or 1))
        if len(numbers) + len(ranks) > 1_000_000:
            raise ValueError(f"cannot be so many ranks: {text[:80]!r}")
        ranks.extend(numbers)
    return tuple(ranks)


def flight_to_json(flight: RankFlight) -> dict[str, Any]:
    """Short keys and no defaults: what agents send each other."""
    out: dict[str, Any] = {"rank": flight.rank, "groups": [_group_to_json(g) for g in flight.groups]}
    out["ops"] = [_op_to_json(op) for op in flight.ops]
    if flight.status:
        out["status"] = [[s.pg_id, s.enqueued, s.started, s.completed] for s in flight.status]
    for name in ("pg_ids", "recorders", "problems"):
        if getattr(flight, name):
            out[name] = [list(v) if isinstance(v, tuple) else v for v in getattr(flight, name)]
    for name in (
        "more_ops", "entries", "version", "is_active_only", "is_off", "is_cut", "has_frames", "has_timing", "exception",
        "node_minus_here_s",
    ):  # fmt: skip
        if getattr(flight, name):
            out[name] = getattr(flight, name)
    if flight.taken_at_unix_s is not None:
        out["taken_at_unix_s"] = flight.taken_at_unix_s
    return out


def _group_to_json(group: FlightGroup) -> dict[str, Any]:
    out: dict[str, Any] = {"name": group.name}
    if group.ranks:
        out["ranks"] = ranks_to_text(group.ranks)
    if group.windows:
        out["windows"] = [[w, f"{h:x}"] for w, h in group.windows]
    if group.flows:
        out["flows"] = [[f.src, f.dst, f.issued, f.done, int(f.is_exact)] for f in group.flows]
    for name in ("desc", "backend", "has_failed"):
        if getattr(group, name):
            out[name] = getattr(group, name)
    for name in ("first_seq", "issued_seq", "done_seq", "last_issued_ns", "last_done_ns"):
        if getattr(group, name) is not None:
            out[name] = getattr(group, name)
    return out


def _op_to_json(op: FlightOp) -> dict[str, Any]:
    out: dict[str, Any] = {"group": op.group, "seq": op.seq, "name": op.name, "state": op.state.value}
    for name in ("in_sizes", "out_sizes"):
        if getattr(op, name):
            out[name] = [list(size) for size in getattr(op, name)]
    for name in ("in_dtypes", "out_dtypes"):
        if getattr(op, name):
            out[name] = list(getattr(op, name))
    for name in ("is_p2p", "thread"):
        if getattr(op, name):
            out[name] = getattr(op, name)
    for name in ("src", "dst", "created_ns", "started_ns", "site", "timeout_s"):
        if getattr(op, name) is not None:
            out[name] = getattr(op, name)
    if op.frames:
        out["frames"] = list(op.frames[:MAX_FRAMES])
    return out


def flight_from_json(data: Mapping[str, Any]) -> RankFlight:
    """The inverse; from another node or a file, so every field is converted.

    Raises:
        ValueError: a field has a wrong type; the text names what.
    """
    try:
        groups = tuple(_group_from_json(g) for g in data.get("groups", ()))
        taken = data.get("taken_at_unix_s")
        flight = RankFlight(
            rank=int(data["rank"]),
            groups=groups,
            ops=tuple(_op_from_json(o) for o in data.get("ops", ())),
            more_ops=int(data.get("more_ops", 0)),
            status=tuple(GroupStatus(*map(int, s)) for s in data.get("status", ())),
            pg_ids=tuple((int(a), int(b)) for a, b in data.get("pg_ids", ())),
            recorders=tuple(map(str, data.get("recorders", ()))),
            entries=int(data.get("entries", 0)),
            version=str(data.get("version", "")),
            is_active_only=bool(data.get("is_active_only")),
            is_off=bool(data.get("is_off")),
            is_cut=bool(data.get("is_cut")),
            has_frames=bool(data.get("has_frames")),
            has_timing=bool(data.get("has_timing")),
            exception=str(data.get("exception", "")),
            taken_at_unix_s=None if taken is None else float(taken),
            node_minus_here_s=float(data.get("node_minus_here_s", 0.0)),
            problems=tuple(map(str, data.get("problems", ()))),
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as e:
        raise ValueError(f"cannot read a rank's flight record: {e!r}") from e
    if any(not 0 <= op.group < len(groups) for op in flight.ops) or any(
        not 0 <= g < len(groups) for _, g in flight.pg_ids
    ):
        raise ValueError("cannot read a rank's flight record: an operation of a group that is not there")
    return flight


def _group_from_json(data: Mapping[str, Any]) -> FlightGroup:
    def number(name: str) -> int | None:
        return None if data.get(name) is None else int(data[name])

    return FlightGroup(
        name=str(data["name"]),
        desc=str(data.get("desc", "")),
        ranks=ranks_from_text(str(data.get("ranks", ""))),
        backend=str(data.get("backend", "")),
        first_seq=number("first_seq"),
        issued_seq=number("issued_seq"),
        done_seq=number("done_seq"),
        last_issued_ns=number("last_issued_ns"),
        last_done_ns=number("last_done_ns"),
        windows=tuple((int(w), int(h, 16)) for w, h in data.get("windows", ())),
        flows=tuple(FlowCount(int(s), int(d), int(i), int(n), bool(e)) for s, d, i, n, e in data.get("flows", ())),
        has_failed=bool(data.get("has_failed")),
    )


def _op_from_json(data: Mapping[str, Any]) -> FlightOp:
    def number(name: str) -> int | None:
        return None if data.get(name) is None else int(data[name])

    return FlightOp(
        group=int(data["group"]),
        seq=int(data["seq"]),
        name=str(data["name"]),
        state=OpState(data.get("state", "issued")),
        is_p2p=bool(data.get("is_p2p")),
        in_sizes=tuple(tuple(map(int, size)) for size in data.get("in_sizes", ())),
        out_sizes=tuple(tuple(map(int, size)) for size in data.get("out_sizes", ())),
        in_dtypes=tuple(map(str, data.get("in_dtypes", ()))),
        out_dtypes=tuple(map(str, data.get("out_dtypes", ()))),
        src=number("src"),
        dst=number("dst"),
        created_ns=number("created_ns"),
        started_ns=number("started_ns"),
        thread=str(data.get("thread", "")),
        site=None if data.get("site") is None else str(data["site"]),
        frames=tuple(map(str, data.get("frames", ()))),
        timeout_s=None if data.get("timeout_s") is None else float(data["timeout_s"]),
    )
