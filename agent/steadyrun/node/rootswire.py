"""What agents tell each other about the bytes of their ranks: digests of groups to the leader, questions back, answers.

A node's message holds its newest digests, those of the messages before among them, so that a leader that misses one
finds them in the next. Behind them comes what seldom changes, as JSON that is only read where it differs: who is
compared with whom, and which tensors changed at rest.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from steadyrun.core.guards import Signal
from steadyrun.core.integrity import MOMENTS

__all__ = [
    "AT_REST",
    "RankIntegrity",
    "RootsFacts",
    "RootsInbox",
    "RootsOutbox",
    "Told",
    "pack_names",
    "pack_ranks",
    "pack_roots",
    "unpack_names",
    "unpack_ranks",
    "unpack_roots",
]

HEAD: Final = struct.Struct("<4sQII")  # magic, records told so far, records here, bytes of the facts
MAGIC: Final = b"SRI1"
RECORD: Final = struct.Struct("<IB3xqQQ")
BLOCKS: Final = 3  # newest records of so many messages are in each
MOST_RECORDS: Final = 8192  # of a message: 256 KiB
MOST_RANGES: Final = 1 << 14
MOST_RANKS: Final = 1 << 20
MOST_NAMES_BYTES: Final = 64 << 20
AT_REST: Final = 0  # as the key of a record: its digest is 0 where nothing changed at rest


class Told(NamedTuple):
    """One rank's digest of one group at one moment; of the key ``AT_REST``: whether anything changed."""

    rank: int
    step: int
    moment: str
    key: int
    digest: int


@dataclass(frozen=True, slots=True)
class RankIntegrity:
    """One rank of a node.

    Attributes:
        state: one of ``core.integrity.STATES``.
        keys: of the groups that it is in.
    """

    rank: int
    local_rank: int
    pid: int
    state: str = "not begun"
    interval: int = 0
    gpu: str | None = None
    keys: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RootsFacts:
    """One node.

    Attributes:
        groups: the ranks of each group, by key.
        changed: tensors that changed at rest, by rank and the step before whose update that was found.
        notes: for people.
        signals: the newest losses and norms of gradients that were out of line, by rank.
        replayed: what replays of its ranks' microbatches have found (``replays.pack``).
    """

    node: str
    ranks: tuple[RankIntegrity, ...] = ()
    groups: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    changed: Mapping[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    signals: Mapping[int, tuple[Signal, ...]] = field(default_factory=dict)
    replayed: tuple[Mapping[str, Any], ...] = ()

    def to_bytes(self) -> bytes:
        told = {
            "node": self.node,
            "ranks": [[r.rank, r.local_rank, r.pid, r.state, r.interval, r.gpu, list(r.keys)] for r in self.ranks],
            "groups": [[key, pack_ranks(ranks)] for key, ranks in self.groups.items()],
            "changed": [[rank, step, list(names)] for (rank, step), names in self.changed.items()],
            "notes": list(self.notes),
            "signals": [[rank, [s.as_list() for s in signals]] for rank, signals in self.signals.items()],
            "replayed": list(self.replayed),
        }
        return json.dumps(told, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RootsFacts:
        """The reverse.

        Raises:
            ValueError: it is not what ``to_bytes`` gives.
        """
        try:
            told = json.loads(data)
            return cls(
                str(told["node"]),
                tuple(
                    RankIntegrity(
                        int(rank),
                        int(local),
                        int(pid),
                        str(state),
                        int(interval),
                        None if gpu is None else str(gpu),
                        tuple(map(int, keys)),
                    )
                    for rank, local, pid, state, interval, gpu, keys in told["ranks"]
                ),
                {int(key): unpack_ranks(text) for key, text in told["groups"]},
                {(int(rank), int(step)): tuple(map(str, names)) for rank, step, names in told["changed"]},
                tuple(map(str, told["notes"])),
                {int(rank): tuple(map(Signal.from_list, signals)) for rank, signals in told.get("signals", ())},
                tuple(dict(one) for one in told.get("replayed", ())),
            )
        except (TypeError, KeyError, IndexError, RecursionError, AttributeError) as e:
            raise ValueError(f"cannot read what a node says of its ranks' bytes: {type(e).__name__}: {e}") from e


@dataclass(slots=True)
class RootsOutbox:
    """A node's side."""

    _count: int = 0
    _blocks: deque[list[bytes]] = field(default_factory=lambda: deque([[]], maxlen=BLOCKS))

    def put(self, records: Iterable[Told]) -> None:
        for r in records:
            self._blocks[-1].append(RECORD.pack(r.rank, MOMENTS.index(r.moment), r.step, r.key, r.digest))
            self._count += 1

    def message(self, facts: bytes) -> bytes:
        """Everything since the message before the last one, as far as it fits."""
        records = [record for block in self._blocks for record in block][-MOST_RECORDS:]
        self._blocks.append([])
        head = HEAD.pack(MAGIC, self._count, len(records), len(facts))
        return b"".join((head, *records, facts))


class RootsInbox:
    """The leader's side: messages in, records that are new and facts that have changed out."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, bytes]] = {}  # group rank -> records heard of, facts

    def take(self, group_rank: int, message: bytes) -> tuple[list[Told], RootsFacts | None]:
        """Raises ValueError when *message* is not what an outbox makes; nothing of it was taken then."""
        if len(message) < HEAD.size:
            raise ValueError(f"cannot read the roots of node {group_rank}: {len(message)} bytes are too few")
        magic, count, here, facts_bytes = HEAD.unpack_from(message)
        end = HEAD.size + here * RECORD.size
        if magic != MAGIC or here > min(count, MOST_RECORDS) or len(message) != end + facts_bytes:
            raise ValueError(f"cannot read the roots of node {group_rank}: {len(message)} bytes after {magic!r}")
        before, told = self._known.get(group_rank, (0, b""))
        facts = None
        if not message.endswith(told) or len(told) != facts_bytes or not told:
            told = message[end:]
            facts = RootsFacts.from_bytes(told)
        first = here - min(max(count - before, 0), here)
        records = [
            Told(rank, step, MOMENTS[moment], key, digest)
            for rank, moment, step, key, digest in RECORD.iter_unpack(message[HEAD.size + first * RECORD.size : end])
            if moment < len(MOMENTS)
        ]
        self._known[group_rank] = count, told
        return records, facts


# -- parts of messages -------------------------------------------------------------------------------------------------
def pack_ranks(ranks: Sequence[int]) -> str:
    """``0-3,8``: ascending numbers as ranges."""
    out: list[str] = []
    begin = end = None
    for rank in (*ranks, None):
        if end is not None and rank == end + 1:
            end = rank
            continue
        if begin is not None:
            out.append(f"{begin}" if begin == end else f"{begin}-{end}")
        begin = end = rank
    return ",".join(out)


def unpack_ranks(text: str) -> tuple[int, ...]:
    """Raises ValueError."""
    out: list[int] = []
    parts = text.split(",") if text else []
    if len(parts) > MOST_RANGES:
        raise ValueError(f"a group of {len(parts)} ranges of ranks")
    for part in parts:
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if len(out) + len(numbers) > MOST_RANKS:
            raise ValueError(f"a group of more than {MOST_RANKS} ranks")
        out.extend(numbers)
    return tuple(out)


def pack_names(names: Sequence[str]) -> str:
    return base64.b64encode(zlib.compress(json.dumps(list(names)).encode(), 6)).decode()


def unpack_names(text: str) -> tuple[str, ...]:
    """Raises ValueError."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text), MOST_NAMES_BYTES)
        return tuple(map(str, json.loads(data)))
    except (zlib.error, TypeError, RecursionError) as e:
        raise ValueError(f"cannot read names of tensors: {e}") from e


def pack_roots(roots: Sequence[int]) -> str:
    return base64.b64encode(struct.pack(f"<{len(roots)}Q", *roots)).decode()


def unpack_roots(text: str) -> tuple[int, ...]:
    """Raises ValueError."""
    data = base64.b64decode(text)
    if len(data) % 8:
        raise ValueError(f"{len(data)} bytes are no roots")
    return struct.unpack(f"<{len(data) // 8}Q", data)
