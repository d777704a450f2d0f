"""The words for saves and for where checkpoints go; shared by ranks, the saver and steadyctl."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CheckpointOptions", "Every", "SaveState", "TierName", "parse_every", "rank_words"]


class SaveState(enum.Enum):
    """How far a save has come. The last three are final, except that memory can become durable."""

    ACCEPTED = "accepted"  # taken, not yet whole in memory on all ranks
    IN_MEMORY = "in_memory"  # every rank's part is sealed in snapshot memory
    DURABLE = "durable"  # committed: synced, with its manifest, renamed
    SKIPPED = "skipped"  # not taken, or given up because a rank did not take part; training is as before
    FAILED = "failed"  # could not be written; earlier checkpoints are as they were


class TierName(enum.Enum):
    """Where a save can be, nearest first."""

    MEMORY = "memory"
    PEER = "peer"
    LOCAL = "local"
    SHARED = "shared"
    REMOTE = "remote"


def rank_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 1, 2``, and no more than 8 of them."""
    shown = ", ".join(str(r) for r in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


@dataclass(frozen=True, slots=True)
class Every:
    """How often: by itself ("auto"), or every so many steps, or seconds."""

    steps: int | None = None
    seconds: float | None = None

    @property
    def is_auto(self) -> bool:
        return self.steps is None and self.seconds is None


def parse_every(value: object) -> Every:
    """``"auto"``, a number of steps, ``"500"``, ``"90s"``, ``"15m"``, ``"2h"``.

    Raises:
        ValueError: anything else; the text says what is allowed.
    """
    allowed = 'is none of: "auto", a number of steps of at least 1, or a time such as "90s", "15m", "2h"'
    if isinstance(value, Every):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return Every(steps=value)
    if isinstance(value, str):
        text = value.strip().lower()
        if text == "auto":
            return Every()
        unit = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}.get(text[-1:])
        try:
            if unit is None:
                return parse_every(int(text))
            if float(text[:-1]) > 0:
                return Every(seconds=float(text[:-1]) * unit)
        except ValueError:
            pass
    raise ValueError(f"every={value!r} {allowed}")


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """What the script asked for; equal on all ranks. Travels as JSON.

    Attributes:
        root: the shared folder, absolute; the tier that counts as durable.
        local: a folder on the node's own disk, or None.
        remote: an fsspec URL, or None.
        every: of the shared folder (and memory); see ``parse_every``.
        every_memory, every_local, every_remote: steps between saves of these tiers; None: with each save of ``every``.
        keep: newest complete checkpoints to keep in each folder, at least 2.
        keep_every: steps; checkpoints of its multiples are kept for ever.
        slots: snapshots in memory per rank, 1 or 2; 0: write directly from the training process.
        peer: copy snapshots to the memory of another node.
        peer_jump: how many nodes further the partner is.
        most_bytes_per_s: for writing on this node; None: no limit.
        read_back: read every file back from the device before the commit.
        refuse_unequal_replicas: no commit when bytes that should be equal on several ranks are not.
    """

    root: str
    local: str | None = None
    remote: str | None = None
    every: Every = Every()
    every_memory: int | None = None
    every_local: int | None = None
    every_remote: int | None = None
    keep: int = 3
    keep_every: int | None = None
    slots: int = 2
    peer: bool = False
    peer_jump: int = 1
    most_bytes_per_s: float | None = None
    read_back: bool = False
    refuse_unequal_replicas: bool = True

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckpointOptions:
        """Fields that this version does not know are ignored."""
        known = {f.name for f in dataclasses.fields(cls)}
        fields = {k: v for k, v in data.items() if k in known}
        if isinstance(fields.get("every"), Mapping):
            fields["every"] = Every(fields["every"].get("steps"), fields["every"].get("seconds"))
        return cls(**fields)
