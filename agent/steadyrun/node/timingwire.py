"""What agents tell the leading one of their ranks' paces: bytes that are set anew in one key of the control store.

A message holds the rows of the last few seconds, as many blocks as were made, newest first, each with a number that
goes up by one: a leader that misses a message finds its rows in the next one, and takes no block twice. Behind them
comes what seldom changes (the node's name, who its ranks are), as JSON that is only read where its version is another.
All is in pieces of the size of a row.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from steadyrun.core.timing import Role, StepTiming
from steadyrun.detect.straggler import TimingBlock
from steadyrun.detect.straggler.align import RECORD_BYTES

__all__ = ["NodeFacts", "PacesTold", "RankFacts", "TimingInbox", "TimingOutbox"]

BLOCKS: Final = 3
# magic, number of the newest block, blocks, version of the facts, their bytes, rows of each block; then nothing
HEAD: Final = struct.Struct(f"<4sIHHI{BLOCKS}I{RECORD_BYTES - 16 - 4 * BLOCKS}x")
KNOWN: Final = struct.Struct("<4sIHHI")  # the part of a head that is known before it comes, as a rule
WORD: Final = np.dtype("<u4")
ROW_BYTES: Final = np.full(BLOCKS, RECORD_BYTES, np.int64)
NUMBER: Final = 1  # which word of a head it is
ROWS: Final = slice(4, 4 + BLOCKS)
MAGIC: Final = b"SRP2"
VERSIONS: Final = 1 << 16
MOST_NUMBER: Final = (1 << 32) - 1
MOST_BLOCK_BYTES: Final = 96 << 10  # three of them fit into a value of the store
MOST_NAME: Final = 200


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank, where it runs, and with whom it can be compared (None: not known yet, or with everybody).

    *replica* names its place among the data-parallel replicas (``dp=1``): ranks of one replica work on the same data.
    """

    rank: int
    local_rank: int
    pid: int
    role: Role | None = None
    replica: str = ""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node and its ranks; *hosts_store*: the job ends with this node's agent."""

    node: str
    ranks: tuple[RankFacts, ...] = ()
    hosts_store: bool = False

    def to_bytes(self) -> bytes:
        ranks = [
            [f.rank, f.local_rank, f.pid, None if f.role is None else [f.role.name, list(f.role.key)], f.replica]
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
                RankFacts(
                    int(rank),
                    int(local_rank),
                    int(pid),
                    None if role is None else role_of(role[0], role[1]),
                    str(replica)[:MOST_NAME],
                )
                for rank, local_rank, pid, role, replica in told["ranks"]
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
    _facts: bytes | None = None
    _version: int = 0

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
        if facts != self._facts:
            self._facts, self._version = facts, (self._version + 1) % VERSIONS
        rows = [*(len(b) // RECORD_BYTES for b in self._blocks), *[0] * (BLOCKS - len(self._blocks))]
        head = HEAD.pack(MAGIC, self._number, len(self._blocks), self._version, len(facts), *rows)
        return b"".join((head, *self._blocks, facts, bytes(-len(facts) % RECORD_BYTES)))


@dataclass(frozen=True, slots=True)
class PacesTold:
    """What messages had that is new.

    Attributes:
        rows: of all of them, as ``TimingBlock.of_bytes`` reads them.
        facts: by group rank, of nodes that say something else of themselves than before.
        refused: by group rank, why nothing of a message was taken.
    """

    rows: bytes
    facts: Mapping[int, NodeFacts] = field(default_factory=dict)
    refused: Mapping[int, str] = field(default_factory=dict)


class TimingInbox:
    """The leader's side: messages in, rows that are new and facts that have changed out."""

    def __init__(self, nodes: int) -> None:
        """*nodes*: how many there are; group ranks are below it."""
        # What the head of each node's next message should begin with; all zero where it has sent none.
        self._expected = np.zeros((nodes, KNOWN.size // WORD.itemsize), WORD)
        self._others_bytes = np.zeros(nodes, np.int64)  # of that message without its rows

    def take(self, messages: Mapping[int, bytes]) -> PacesTold:
        """*messages* by group rank, one of each node at most.

        As a rule each has one new block and facts that are known. All that are so are read at once: a leader with
        hundreds of nodes has a microsecond for each. What lies behind the new block is not touched.
        """
        facts: dict[int, NodeFacts] = {}
        refused: dict[int, str] = {}
        order = self._readable(messages, refused)
        if not order:
            return PacesTold(b"", facts, refused)
        values = [messages[group_rank] for group_rank in order]
        groups = np.array(order, np.intp)
        heads = np.frombuffer(b"".join([v[: HEAD.size] for v in values]), WORD).reshape(len(values), -1)
        begins, expected = heads.view(np.uint64), self._expected[groups].view(np.uint64)
        is_usual = (begins[:, 0] == expected[:, 0]) & (begins[:, 1] == expected[:, 1])
        rows_each = heads[:, ROWS].astype(np.int64)
        whole_bytes = rows_each @ ROW_BYTES + self._others_bytes[groups]
        is_usual &= whole_bytes == np.fromiter(map(len, values), np.int64, len(values))
        newest = rows_each[:, 0]
        rows: list[bytes] = []
        if not is_usual.all():
            for at in np.nonzero(~is_usual)[0].tolist():
                rows += self._take_one(order[at], values[at], facts, refused)
            groups, newest = groups[is_usual], newest[is_usual]
            values = [values[at] for at in np.nonzero(is_usual)[0].tolist()]
        self._expected[groups, NUMBER] += 1
        ends = (newest * RECORD_BYTES + HEAD.size).tolist()
        rows += [v[HEAD.size : end] for v, end in zip(values, ends, strict=True)]
        return PacesTold(b"".join(rows), facts, refused)

    def _readable(self, messages: Mapping[int, bytes], refused: dict[int, str]) -> list[int]:
        """Group ranks of messages that have a head and are somebody's; in order, as whole steps in order are joined
        with less work."""
        nodes = len(self._expected)
        order = sorted(messages)
        if order and order[0] >= 0 and order[-1] < nodes and min(map(len, messages.values())) >= HEAD.size:
            return order
        for group_rank, message in messages.items():
            if not 0 <= group_rank < nodes:
                refused[group_rank] = f"there are {nodes} nodes"
            elif len(message) < HEAD.size:
                refused[group_rank] = f"{len(message)} bytes are no message"
        return [group_rank for group_rank in order if group_rank not in refused]

    def _take_one(
        self, group_rank: int, message: bytes, facts: dict[int, NodeFacts], refused: dict[int, str]
    ) -> list[bytes]:
        """New blocks of *message*, which may be any, the oldest first."""
        magic, number, count, version, size, *rows = HEAD.unpack_from(message)
        pieces = 1 + sum(rows) + -(-size // RECORD_BYTES)
        if magic != MAGIC or count > BLOCKS or number >= MOST_NUMBER or len(message) != pieces * RECORD_BYTES:
            refused[group_rank] = f"{len(message)} bytes that begin with {magic!r} are not what their head says"
            return []
        was_told, following, _, known_version, known_size = KNOWN.unpack(self._expected[group_rank].tobytes())
        if was_told != MAGIC or (version, size) != (known_version, known_size):
            at = RECORD_BYTES * (1 + sum(rows))
            try:
                facts[group_rank] = NodeFacts.from_bytes(message[at : at + size])
            except ValueError as e:
                refused[group_rank] = str(e)
                return []
        expected = KNOWN.pack(MAGIC, number + 1, min(count + 1, BLOCKS), version, size)
        self._expected[group_rank] = np.frombuffer(expected, WORD)
        self._others_bytes[group_rank] = len(message) - sum(rows) * RECORD_BYTES
        new = number + 1 - following if was_told == MAGIC else number
        return _blocks(message, rows[: min(max(new, 0), count)])


def _blocks(message: bytes, rows_each: Sequence[int]) -> list[bytes]:
    """The first blocks of *message*, of so many rows each, the last and oldest one first."""
    out: list[bytes] = []
    at = HEAD.size
    for rows in rows_each:
        out.append(message[at : at + rows * RECORD_BYTES])
        at += rows * RECORD_BYTES
    return out[::-1]
