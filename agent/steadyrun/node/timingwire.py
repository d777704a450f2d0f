"""What agents tell the leading one of their ranks' paces: bytes that are set anew in one key of the control store.

A message holds the rows of the last few seconds, as many blocks as were made, newest first, each with a number that
goes up by one: a leader that misses a message finds its rows in the next one, and takes no block twice. Behind them
comes what seldom changes (the node's name, who its ranks are), as JSON that is only read where it differs.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from steadyrun.core.timing import Role, StepTiming
from steadyrun.detect.straggler import TimingBlock
from steadyrun.detect.straggler.align import RECORD_BYTES

__all__ = ["NodeFacts", "RankFacts", "TimingInbox", "TimingOutbox"]

HEAD: Final = struct.Struct("<4sIHHI")  # magic, number of the newest block, blocks, unused, bytes of the facts
MAGIC: Final = b"SRP1"
BLOCKS: Final = 3
SIZES: Final = tuple(struct.Struct(f"<{count}I") for count in range(BLOCKS + 1))
MOST_BLOCK_BYTES: Final = 96 << 10  # three of them fit into a value of the store
MOST_NAME: Final = 200
NOTHING: Final = (0, b"")


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank, where it runs, and with whom it can be compared (None: not known yet, or with everybody)."""

    rank: int
    local_rank: int
    pid: int
    role: Role | None = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node and its ranks; *hosts_store*: the job ends with this node's agent."""

    node: str
    ranks: tuple[RankFacts, ...] = ()
    hosts_store: bool = False

    def to_bytes(self) -> bytes:
        ranks = [
            [f.rank, f.local_rank, f.pid, None if f.role is None else [f.role.name, list(f.role.key)]]
            for f in self.ranks
        ]
        told = {"node": self.node, "hosts_store": self.hosts_store, "ranks": ranks}
        return json.dumps(told, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> NodeFacts:
        """The reverse.

        Raises:
            ValueError: it is not what ``to_bytes`` gives.
        """
        try:
            told = json.loads(data)
            ranks = tuple(
                RankFacts(int(rank), int(local_rank), int(pid), None if role is None else role_of(role[0], role[1]))
                for rank, local_rank, pid, role in told["ranks"]
            )
            return cls(str(told["node"])[:MOST_NAME], ranks, bool(told["hosts_store"]))
        except (TypeError, KeyError, IndexError, RecursionError) as e:
            raise ValueError(f"cannot read what a node says of itself: {type(e).__name__}: {e}") from e


def role_of(name: Any, key: Any) -> Role:
    """A role from JSON; of the key only plain values count."""
    if not isinstance(key, Sequence) or isinstance(key, str):
        raise ValueError(f"the key of a role must be a list, got {key!r:.40}")
    return Role(str(name)[:MOST_NAME], tuple(v if isinstance(v, (int, str)) else str(v)[:MOST_NAME] for v in key))


@dataclass(slots=True)
class TimingOutbox:
    """A node's side: rows in, the message that holds the newest of them out."""

    thinned: int = 0  # rows left out since the last message, as they were too many
    _number: int = 0
    _blocks: deque[bytes] = field(default_factory=lambda: deque(maxlen=BLOCKS))

    def put(self, rows: Mapping[int, Sequence[StepTiming]]) -> bytes:
        """One more block, of rows that no block held before; returns it.

        Where there are too many rows, only steps divisible by 2, 4, ... are kept: those that other nodes keep as well.
        """
        wanted = MOST_BLOCK_BYTES // RECORD_BYTES
        total = sum(map(len, rows.values()))
        kept, stride = rows, 1
        while sum(map(len, kept.values())) > wanted:
            stride *= 2
            kept = {rank: [t for t in timings if t.step % stride == 0] for rank, timings in rows.items()}
        self.thinned += total - sum(map(len, kept.values()))
        block = TimingBlock.of_rows(kept).to_bytes()
        self._number += 1
        self._blocks.appendleft(block)
        return block

    def message(self, facts: bytes) -> bytes:
        """The newest blocks and *facts* (``NodeFacts.to_bytes``)."""
        sizes = SIZES[len(self._blocks)].pack(*map(len, self._blocks))
        head = HEAD.pack(MAGIC, self._number, len(self._blocks), 0, len(facts))
        return b"".join((head, sizes, *self._blocks, facts))


class TimingInbox:
    """The leader's side: messages in, rows that are new and facts that have changed out."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, bytes]] = {}  # group rank -> number of the newest block, the facts

    def take(self, group_rank: int, message: bytes) -> tuple[bytes, NodeFacts | None]:
        """Rows (to be joined with those of other nodes) and the node's facts where they are others than before.

        Raises:
            ValueError: *message* is not what an outbox makes; nothing of it was taken.
        """
        if len(message) < HEAD.size:
            raise ValueError(f"cannot read timings of node {group_rank}: {len(message)} bytes are too few")
        magic, number, count, _, facts_bytes = HEAD.unpack_from(message)
        if magic != MAGIC or count > BLOCKS or len(message) < HEAD.size + 4 * count:
            raise ValueError(f"cannot read timings of node {group_rank}: {count} blocks after {magic!r}")
        sizes = SIZES[count].unpack_from(message, HEAD.size)
        at = HEAD.size + 4 * count
        end = at + sum(sizes)
        if len(message) != end + facts_bytes:
            raise ValueError(
                f"cannot read timings of node {group_rank}: {len(message)} bytes, expected {end + facts_bytes}"
            )
        before, told = self._known.get(group_rank, NOTHING)
        facts = None
        if not told or facts_bytes != len(told) or not message.endswith(told):
            told = message[end:]
            facts = NodeFacts.from_bytes(told)
        if count and number == before + 1:  # as a rule: a leader with hundreds of nodes has no time for more
            rows = message[at : at + sizes[0]]
        else:
            parts = []
            for size in sizes[: max(number - before, 0)]:
                parts.append(message[at : at + size])
                at += size
            rows = b"".join(reversed(parts))  # the oldest first
        if len(rows) % RECORD_BYTES:
            raise ValueError(f"cannot read timings of node {group_rank}: {len(rows)} bytes of rows")
        self._known[group_rank] = number, told
        return rows, facts
