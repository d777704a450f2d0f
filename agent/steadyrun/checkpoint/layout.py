"""What one rank's snapshot consists of: which shard of which tensor lies where in the snapshot memory.

A layout is made once per structure of the state and stays valid until that changes. It is plain data without torch, so
that the saver can write checkpoints without it, and it travels as JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from steadyrun.core.errors import SteadyrunError

__all__ = [
    "ALIGN_BYTES",
    "RANK_PREFIX",
    "Entry",
    "Layout",
    "LayoutError",
    "ObjectEntry",
    "PathItem",
    "place",
    "rank_key",
]

ALIGN_BYTES: Final = 4096  # direct I/O wants pages, in memory and in the file
RANK_PREFIX: Final = "steadyrun.rank"  # keys of what differs per rank (RNG, data position) begin so

PathItem = str | int


class LayoutError(SteadyrunError):
    """A layout that cannot be: the text says what does not fit."""


def rank_key(rank: int, name: str) -> str:
    """The key of *name* of *rank* alone: never taken for a replica of another rank's."""
    return f"{RANK_PREFIX}.{rank}.{name}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One shard of one tensor.

    Attributes:
        key: DCP's flattened name, for instance ``model.layers.0.weight``.
        path: the way to it in the nested state dict; DCP's ``planner_data`` is made of these.
        dtype: as torch prints it, without ``torch.``.
        shape: of the global tensor.
        offsets, sizes: of the shard in it; both ``()`` for a scalar.
        at_bytes: where its bytes begin in a slot's payload; a multiple of ``ALIGN_BYTES``.
        size_bytes: of the shard, contiguous, in C order.
        requires_grad: kept in the DCP metadata.
    """

    key: str
    path: tuple[PathItem, ...]
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at_bytes: int
    size_bytes: int
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """Something that is no tensor: the bytes of ``torch.save`` of it, of another length with every save."""

    key: str
    path: tuple[PathItem, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """All of one rank's state.

    Attributes:
        entries: in the order of ``at_bytes``, without overlap.
        objects: in the order in which their blobs are stored in a slot.
        details: for the manifest: JSON values only (mesh, covered and not covered state, versions).
    """

    rank: int
    world_size: int
    entries: tuple[Entry, ...]
    objects: tuple[ObjectEntry, ...]
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> int:
        """Room that the entries need in a slot, a multiple of ``ALIGN_BYTES``."""
        end = max((e.at_bytes + e.size_bytes for e in self.entries), default=0)
        return -(-end // ALIGN_BYTES) * ALIGN_BYTES

    @property
    def state_bytes(self) -> int:
        """Bytes of the tensors themselves, without padding."""
        return sum(e.size_bytes for e in self.entries)

    def digest(self) -> str:
        """Equal for equal structure (*details* left out): 32 hexadecimal digits.

        A snapshot can be loaded straight from memory exactly by a rank with the same digest.
        """
        entries = [[e.key, e.dtype, e.shape, e.offsets, e.sizes, e.at_bytes] for e in self.entries]
        text = json.dumps([self.rank, self.world_size, entries, [o.key for o in self.objects]], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        entries = [
            [
                e.key,
                list(e.path),
                e.dtype,
                list(e.shape),
                list(e.offsets),
                list(e.sizes),
                e.at_bytes,
                e.size_bytes,
                int(e.requires_grad),
            ]
            for e in self.entries
        ]
        data = {
            "rank": self.rank,
            "world_size": self.world_size,
            "entries": entries,
            "objects": [[o.key, list(o.path)] for o in self.objects],
            "details": self.details,
        }
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Layout:
        """Raises LayoutError when the text is no layout."""
        try:
            data = json.loads(text)
            entries = tuple(
                Entry(str(k), tuple(p), str(d), tuple(g), tuple(o), tuple(s), int(at), int(size), bool(grad))
                for k, p, d, g, o, s, at, size, grad in data["entries"]
            )
            objects = tuple(ObjectEntry(str(k), tuple(p)) for k, p in data["objects"])
            return cls(int(data["rank"]), int(data["world_size"]), entries, objects, dict(data["details"]))
        except (ValueError, TypeError, KeyError) as e:
            raise LayoutError(f"cannot read the layout of a snapshot: {type(e).__name__}: {e}") from e


def place(sizes_bytes: Sequence[int]) -> list[int]:
    """Where shards of these sizes begin in a payload, one after the other on page boundaries."""
    out, at = [], 0
    for size_bytes in sizes_bytes:
        out.append(at)
        at += -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return out
