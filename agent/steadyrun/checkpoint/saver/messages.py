"""What the savers of a job tell each other: every node tells the coordinator, and the coordinator tells all.

The coordinator is the saver of group rank 0 of the newest attempt. On one node the messages are handed over as they
are; between nodes they travel through the attempt's store as JSON, packed by ``encode``. Every message may come twice:
a saver that was started again, or that has changed to the store of the next attempt, repeats what is not resolved.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

from steadyrun.checkpoint.choose import Choice, FolderOffer, Quarantined, Refused, Rejected, Snapshot, Source
from steadyrun.checkpoint.layout import Layout
from steadyrun.checkpoint.manifest import FileRecord, Fragment
from steadyrun.checkpoint.planning import Part
from steadyrun.checkpoint.saves import CheckpointOptions, Every, SaveState, TierName
from steadyrun.checkpoint.shardfile import Written
from steadyrun.core.errors import SteadyrunError

__all__ = [
    "Address",
    "AgreeTold",
    "Agreed",
    "Away",
    "BeatTold",
    "Chosen",
    "FailedTold",
    "FlushTold",
    "Flushed",
    "FromNode",
    "Granted",
    "InMemory",
    "LateTold",
    "LayoutTold",
    "MessageError",
    "PeerTold",
    "PeersTold",
    "PlanAskedTold",
    "PlanTold",
    "RankGoneTold",
    "Remembered",
    "RepublishedTold",
    "Resolved",
    "ResolvedTold",
    "RestoreTold",
    "SaveKey",
    "SaveOrdered",
    "SkippedTold",
    "StagedTold",
    "StartedTold",
    "SteppedTold",
    "ToAll",
    "VoteTold",
    "WhoIsThere",
    "WriteOrdered",
    "decode",
    "encode",
]


_NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


class MessageError(SteadyrunError):
    """Bytes that are no message of this version."""


class SaveKey(NamedTuple):
    """Which save. *generation* counts the saves of an attempt and is equal on all ranks, so it orders them."""

    attempt: int
    generation: int
    step: int

    def __str__(self) -> str:
        return f"step {self.step} (save {self.generation} of attempt {self.attempt})"


# -- from a node to the coordinator ------------------------------------------------------------------------------------
class LayoutTold(NamedTuple):
    """A rank's layout. *slots* 0: there is no memory for its snapshots, for the reason in *why*."""

    attempt: int
    rank: int
    layout: Layout
    slots: int
    why: str
    run_id: str
    options: CheckpointOptions


class StagedTold(NamedTuple):
    """A rank's part is sealed in memory."""

    key: SaveKey
    rank: int
    world_size: int
    digest: str
    tiers: frozenset[TierName]
    stall_s: float
    created_unix_s: float


class SkippedTold(NamedTuple):
    """A rank did not take part."""

    key: SaveKey
    rank: int
    why: str


class VoteTold(NamedTuple):
    """A rank's files are durable (*written*), or could not be written (*reason*, a value of WriteReason, and *why*).

    *ticket*: of the order that it answers.
    """

    key: SaveKey
    rank: int
    ticket: str
    written: Written | None
    reason: str = ""
    why: str = ""


class PlanAskedTold(NamedTuple):
    """A node was told to write, and has missed the plan."""

    plan_id: str


class RankGoneTold(NamedTuple):
    """A rank's connection ended without a word."""

    attempt: int
    rank: int


class RestoreTold(NamedTuple):
    """A rank asks where to resume; its node tells with it what it holds for that rank."""

    attempt: int
    round: int
    rank: int
    digest: str
    snapshots: tuple[Snapshot, ...]
    folders: tuple[FolderOffer, ...]
    rejected: tuple[Rejected, ...]
    run_id: str
    options: CheckpointOptions


class Address(NamedTuple):
    """Where a saver takes and gives back snapshots of other nodes' ranks."""

    host: str
    port: int
    token: str


class Away(NamedTuple):
    """A snapshot of a rank in the memory of a node that is not its own."""

    rank: int
    snapshot: Snapshot
    layout: Layout
    blob_bytes: int


class PeerTold(NamedTuple):
    """What a node holds for others, and where to get it and to bring more."""

    attempt: int
    node: int
    address: Address
    held: tuple[Away, ...]


class StartedTold(NamedTuple):
    """A rank has loaded, and trains."""

    attempt: int
    rank: int
    step: int


class AgreeTold(NamedTuple):
    attempt: int
    rank: int
    key: str
    value: Any


class FlushTold(NamedTuple):
    """Somebody waits for the newest complete snapshot to be durable.

    Attributes:
        waits: also for saves that are not yet in memory on all ranks.
        saves: have all ranks save first; answered once that is in memory on all of them, durable or not.
    """

    id: str
    attempt: int
    waits: bool
    limit_s: float
    saves: bool = False


class SteppedTold(NamedTuple):
    """The newest step of the ranks of a node."""

    attempt: int
    node: int
    step: int


class LateTold(NamedTuple):
    """A rank had passed *step* when it was told to save there."""

    attempt: int
    step: int


class FailedTold(NamedTuple):
    """An attempt has failed; told by every node. *falls_back*: what it had loaded is not to be loaded again."""

    attempt: int
    step: int | None
    signature: str
    falls_back: bool = False


class ResolvedTold(NamedTuple):
    """A save that this node saw resolved, when it was its coordinator."""

    resolved: Resolved


class RepublishedTold(NamedTuple):
    """A node has told everything that is not resolved, and which ranks it runs; see ``WhoIsThere``."""

    attempt: int
    node: int
    ranks: tuple[int, ...]
    call: str


class BeatTold(NamedTuple):
    """A node's saver is there; said every few seconds while something is not resolved."""

    attempt: int
    node: int


# -- from the coordinator to all ---------------------------------------------------------------------------------------
class WhoIsThere(NamedTuple):
    """The coordinator has started, or may have missed something: tell it what is not resolved.

    Attributes:
        call: another word for every such question; ``RepublishedTold`` repeats it, so that the coordinator knows that
            it has heard all of an answer.
        node: whom it asks; None: all.
        is_beat: only a sign of life; nothing is asked.
    """

    call: str = ""
    node: int | None = None
    is_beat: bool = False


class Granted(NamedTuple):
    """All ranks of the attempt may use snapshot memory, or (*why* is not empty) none: they write directly."""

    attempt: int
    why: str = ""


class PlanTold(NamedTuple):
    """Which rank writes what of a save with these layouts."""

    plan_id: str
    parts: tuple[Part, ...]


class InMemory(NamedTuple):
    """All ranks have staged it."""

    key: SaveKey


class WriteOrdered(NamedTuple):
    """*ticket*: another one for every new folder; what was written for an older one is of no use."""

    key: SaveKey
    ticket: str
    plan_id: str
    folder: str
    options: CheckpointOptions


class Resolved(NamedTuple):
    """How a save has ended.

    Attributes:
        reason: for a failed one, a word that tells classes of failures apart.
        seconds: from its last rank being in memory until durable.
        tiers: to which it was to go; with *path*, other tiers are filled from there.
    """

    key: SaveKey
    state: SaveState
    why: str = ""
    reason: str = ""
    path: str = ""
    seconds: float = 0.0
    size_bytes: int = 0
    at_unix_s: float = 0.0
    tiers: frozenset[TierName] = frozenset()


class Chosen(NamedTuple):
    """The answer to ``RestoreTold`` of all ranks. *away*: where ranks get theirs that is not in their node's memory."""

    attempt: int
    round: int
    choice: Choice
    skip_batches: tuple[tuple[int, int], ...] = ()
    away: Mapping[int, tuple[Address, Away]] = _NOTHING


class PeersTold(NamedTuple):
    """To whom each node brings copies of its ranks' snapshots, and whose it gets, by group rank."""

    attempt: int
    partners: Mapping[int, Address]
    holds: Mapping[int, tuple[int, ...]]


class Agreed(NamedTuple):
    attempt: int
    key: str
    values: tuple[Any, ...]


class SaveOrdered(NamedTuple):
    """All ranks save once *step* is done."""

    attempt: int
    serial: int
    step: int
    tiers: frozenset[TierName]


class Flushed(NamedTuple):
    """The answer to ``FlushTold``; *step*: the newest durable one, None when there is none."""

    id: str
    step: int | None
    why: str


# -- from a saver to the next one on its node --------------------------------------------------------------------------
class Remembered(NamedTuple):
    """What the next saver of this node must know that is not in the snapshot memory itself.

    Attributes:
        options: by attempt, with the run's id.
        ranks: of this node, by attempt.
        tiers: of saves that are not resolved.
        resolved: the last few saves that are.
    """

    options: Mapping[int, tuple[CheckpointOptions, str]] = _NOTHING
    ranks: Mapping[int, tuple[int, ...]] = _NOTHING
    tiers: Mapping[SaveKey, frozenset[TierName]] = _NOTHING
    resolved: tuple[Resolved, ...] = ()


FromNode = (
    LayoutTold
    | StagedTold
    | SkippedTold
    | VoteTold
    | PlanAskedTold
    | RankGoneTold
    | RestoreTold
    | PeerTold
    | StartedTold
    | AgreeTold
    | FlushTold
    | SteppedTold
    | LateTold
    | FailedTold
    | ResolvedTold
    | RepublishedTold
    | BeatTold
)
ToAll = (
    WhoIsThere
    | Granted
    | PlanTold
    | InMemory
    | WriteOrdered
    | Resolved
    | Chosen
    | PeersTold
    | Agreed
    | SaveOrdered
    | Flushed
)


# -- JSON --------------------------------------------------------------------------------------------------------------
_RECORDS: Final[Mapping[str, type]] = {
    c.__name__: c
    for c in (
        *FromNode.__args__,
        *ToAll.__args__,
        *(SaveKey, Snapshot, FolderOffer, Rejected, Quarantined, Choice, Refused, CheckpointOptions, Every),
        *(Written, Fragment, FileRecord, Part, Remembered, Address, Away),
    )
}
_ENUMS: Final[Mapping[str, type[enum.Enum]]] = {c.__name__: c for c in (TierName, SaveState, Source)}


def encode(message: FromNode | ToAll | Remembered) -> bytes:
    return zlib.compress(json.dumps(_pack(message), separators=(",", ":")).encode(), 1)


def decode(data: bytes) -> FromNode | ToAll | Remembered:
    """Raises MessageError."""
    try:
        message = _unpack(json.loads(zlib.decompress(data)))
    except (ValueError, TypeError, KeyError, AttributeError, SteadyrunError, zlib.error) as e:
        raise MessageError(f"cannot read a message of another saver: {type(e).__name__}: {e}") from e
    if not isinstance(message, (*FromNode.__args__, *ToAll.__args__, Remembered)):
        raise MessageError(f"a {type(message).__name__} is no message of a saver")
    return cast("FromNode | ToAll | Remembered", message)


def _pack(value: Any) -> Any:
    """Plain JSON stays; everything else becomes a list that begins with its kind."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case enum.Enum():
            return ["e", type(value).__name__, value.value]
        case Layout():
            return ["layout", value.to_json()]
        case _ if type(value).__name__ in _RECORDS:
            names = getattr(value, "_fields", None) or [f.name for f in dataclasses.fields(value)]
            return ["r", type(value).__name__, {name: _pack(getattr(value, name)) for name in names}]
        case list():
            return ["l", *map(_pack, value)]
        case tuple():
            return ["t", *map(_pack, value)]
        case frozenset() | set():
            return ["s", *map(_pack, value)]
        case Mapping():
            return ["d", *([_pack(k), _pack(v)] for k, v in value.items())]
    raise TypeError(f"a {type(value).__name__} cannot be told to another saver")


def _unpack(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    match value:
        case ["e", str(name), content]:
            return _ENUMS[name](content)
        case ["layout", str(text)]:
            return Layout.from_json(text)
        case ["l", *items]:
            return [_unpack(v) for v in items]
        case ["t", *items]:
            return tuple(_unpack(v) for v in items)
        case ["s", *items]:
            return frozenset(_unpack(v) for v in items)
        case ["d", *items]:
            return {_unpack(k): _unpack(v) for k, v in items}
        case ["r", str(name), dict(fields)]:
            record = _RECORDS[name]
            known = set(record.__annotations__)
            return record(**{k: _unpack(v) for k, v in fields.items() if k in known})
    raise ValueError(f"{str(value)[:80]} is of no known kind")
