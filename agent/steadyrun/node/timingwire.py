"""What agents tell the leading one of their ranks' paces: bytes that are set anew in one key of the control store.

A message holds the rows of the last few seconds, as many blocks as were made, newest first, each with a number that
goes up by one: a leader that misses a message finds its rows in the next one, and takes no block twice. Behind them
comes what seldom changes (the node's name, who its ranks are), as JSON that is only read where its version is another.
All heads have one size, so that a leader reads those of hundreds of nodes as one array.
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
# magic, number of the newest block, blocks, version of the facts, their bytes, bytes of each block (0: there is none)
HEAD: Final = struct.Struct(f"<4sIHHI{BLOCKS}I")
HEADS: Final = np.dtype(
    [
        ("magic", "S4"),
        ("number", "<u4"),
        ("blocks", "<u2"),
        ("version", "<u2"),
        ("facts", "<u4"),
        ("sizes", "<u4", (BLOCKS,)),
    ]
)
MAGIC: Final = b"SRP2"
VERSIONS: Final = 1 << 16
MOST_BLOCK_BYTES: Final = 96 << 10  # three of them fit into a value of the store
MOST_NAME: Final = 200


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
        sizes = [*map(len, self._blocks), *[0] * (BLOCKS - len(self._blocks))]
        head = HEAD.pack(MAGIC, self._number, len(self._blocks), self._version, len(facts), *sizes)
        return b"".join((head, *self._blocks, facts))


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
        self._numbers = np.zeros(nodes, np.int64)  # of the newest block taken of each node
        self._versions = np.full(nodes, -1, np.int32)  # of its facts

    def take(self, messages: Mapping[int, bytes]) -> PacesTold:
        """*messages* by group rank, one of each node at most.

        As a rule each has one new block and facts that are known. All that are so are read at once: a leader with
        hundreds of nodes has half a microsecond for each.
        """
        facts: dict[int, NodeFacts] = {}
        refused = self._unfit(messages)
        if refused:
            messages = {g: m for g, m in messages.items() if g not in refused}
        values = list(messages.values())
        groups = np.fromiter(messages, np.intp, len(values))
        heads = np.frombuffer(b"".join([m[: HEAD.size] for m in values]), HEADS)
        numbers, sizes = heads["number"].astype(np.int64), heads["sizes"].astype(np.int64)
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        is_sound = (heads["magic"] == MAGIC) & (heads["blocks"] <= BLOCKS) & (sizes % RECORD_BYTES == 0).all(axis=1)
        is_sound &= HEAD.size + sizes.sum(axis=1) + heads["facts"] == lengths
        is_usual = is_sound & (heads["blocks"] > 0) & (numbers == self._numbers[groups] + 1)
        is_usual &= heads["version"] == self._versions[groups]
        rows: list[bytes] = []
        if not is_usual.all():
            for at in np.nonzero(~is_usual)[0].tolist():
                group_rank, message = int(groups[at]), values[at]
                try:
                    if not is_sound[at]:
                        raise ValueError(f"{len(message)} bytes that begin with {message[:4]!r} do not fit their head")
                    told = self._facts_of(group_rank, message, int(heads["version"][at]), int(heads["facts"][at]))
                except ValueError as e:
                    refused[group_rank] = str(e)
                    continue
                if told is not None:
                    facts[group_rank] = told
                new = min(int(numbers[at] - self._numbers[group_rank]), int(heads["blocks"][at]))
                rows += _blocks(message, sizes[at].tolist(), new)
                self._numbers[group_rank] = numbers[at]
            values = [values[at] for at in np.nonzero(is_usual)[0].tolist()]
            groups, numbers, sizes = groups[is_usual], numbers[is_usual], sizes[is_usual]
        ends = (HEAD.size + sizes[:, 0]).tolist()
        rows += [m[HEAD.size : end] for m, end in zip(values, ends, strict=True)]
        self._numbers[groups] = numbers
        return PacesTold(b"".join(rows), facts, refused)

    def _unfit(self, messages: Mapping[int, bytes]) -> dict[int, str]:
        """Why messages have no head, or belong to nobody."""
        known = len(self._numbers)
        if not messages or (
            min(map(len, messages.values())) >= HEAD.size and 0 <= min(messages) <= max(messages) < known
        ):
            return {}
        return {
            g: f"{len(m)} bytes are too few" if 0 <= g < known else f"it is none of {known} nodes"
            for g, m in messages.items()
            if len(m) < HEAD.size or not 0 <= g < known
        }

    def _facts_of(self, group_rank: int, message: bytes, version: int, size: int) -> NodeFacts | None:
        """Those of *message* where they are not known yet. Raises ValueError."""
        if version == self._versions[group_rank]:
            return None
        told = NodeFacts.from_bytes(message[len(message) - size :])
        self._versions[group_rank] = version
        return told


def _blocks(message: bytes, sizes: Sequence[int], count: int) -> list[bytes]:
    """The *count* newest blocks of *message*, the oldest of them first."""
    out: list[bytes] = []
    at = HEAD.size
    for size in sizes[: max(count, 0)]:
        out.append(message[at : at + size])
        at += size
    return out[::-1]
