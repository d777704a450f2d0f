"""What happens to a node's saver, and what it does about it. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steadyrun.checkpoint.choose import FolderOffer, Rejected
from steadyrun.checkpoint.layout import Layout
from steadyrun.checkpoint.planning import Part
from steadyrun.checkpoint.saver import messages as m
from steadyrun.checkpoint.saver.messages import SaveKey
from steadyrun.checkpoint.saves import CheckpointOptions, TierName
from steadyrun.checkpoint.shardfile import Written

__all__ = [
    "AgentLost",
    "AnswerAgent",
    "ArenaInfo",
    "ArenaOpened",
    "ArenaRefused",
    "ArenaRestored",
    "AttemptBegan",
    "AttemptFailed",
    "Bind",
    "Binding",
    "CancelWrites",
    "CopyLocal",
    "DigestSlot",
    "DropArena",
    "End",
    "ExchangeBound",
    "ExchangeLost",
    "FetchPeer",
    "FlushAsked",
    "Found",
    "Inspect",
    "Inspected",
    "LeaveAsked",
    "LetGo",
    "ListLocal",
    "LocalListed",
    "MemoryShort",
    "NodeCommand",
    "NodeEvent",
    "OpenArena",
    "OrderPlaced",
    "PeerFetched",
    "PeerServing",
    "PieceFailed",
    "PieceWritten",
    "Post",
    "PushPiece",
    "RankAgree",
    "RankBye",
    "RankFlush",
    "RankHello",
    "RankLayout",
    "RankLost",
    "RankRestore",
    "RankSkipped",
    "RankStaged",
    "RankStarted",
    "ReleaseSlot",
    "Report",
    "SendRank",
    "ServePeers",
    "SetWanted",
    "StepsRead",
    "Tick",
    "WritePiece",
]


@dataclass(frozen=True, slots=True)
class Binding:
    """An attempt as the agent tells it. *ranks*: global ranks by local rank."""

    attempt: int
    world_size: int
    group_rank: int
    group_world_size: int
    ranks: tuple[int, ...]
    host: str = ""
    port: int = 0
    rollback: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ArenaInfo:
    """One rank's snapshot memory."""

    id: int
    rank: int
    world_size: int
    digest: str
    slots: int
    size_bytes: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Found:
    """A sealed slot."""

    slot: int
    key: SaveKey
    created_unix_s: float


# -- events: ranks -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class RankHello:
    connection: int
    rank: int
    attempt: int
    run_id: str
    options: CheckpointOptions


@dataclass(frozen=True, slots=True)
class RankLayout:
    """*text*: the layout as it came; read by whoever opens the memory."""

    attempt: int
    rank: int
    text: str
    blob_bytes: int


@dataclass(frozen=True, slots=True)
class RankStaged:
    """A sealed slot. *is_held*: it was found as the rank says, and is kept from being overwritten."""

    key: SaveKey
    rank: int
    arena: int
    slot: int
    tiers: frozenset[TierName]
    stall_s: float
    is_held: bool
    created_unix_s: float


@dataclass(frozen=True, slots=True)
class RankSkipped:
    key: SaveKey
    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class RankRestore:
    """*digest* None: the rank does not know its layout yet; *number* None: not told."""

    attempt: int
    rank: int
    digest: str | None
    may_use_memory: bool
    rejected: tuple[Rejected, ...]
    number: int | None


@dataclass(frozen=True, slots=True)
class RankAgree:
    attempt: int
    rank: int
    key: str
    value: Any


@dataclass(frozen=True, slots=True)
class RankStarted:
    attempt: int
    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class RankFlush:
    attempt: int
    rank: int
    limit_s: float


@dataclass(frozen=True, slots=True)
class RankBye:
    attempt: int
    rank: int


@dataclass(frozen=True, slots=True)
class RankLost:
    attempt: int
    rank: int
    connection: int


# -- events: agent -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class AttemptBegan:
    binding: Binding


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    attempt: int
    step: int | None
    signature: str


@dataclass(frozen=True, slots=True)
class FlushAsked:
    limit_s: float


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    limit_s: float


@dataclass(frozen=True, slots=True)
class AgentLost:
    pass


# -- events: what was done ---------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ArenaOpened:
    """Memory for a rank: new, or that which it had before."""

    attempt: int
    info: ArenaInfo
    note: str


@dataclass(frozen=True, slots=True)
class ArenaRefused:
    """*layout* None: what the rank sent is no layout."""

    attempt: int
    rank: int
    layout: Layout | None
    why: str


@dataclass(frozen=True, slots=True)
class ArenaRestored:
    """Memory that the agent has kept over the death of another saver; its sealed slots are held."""

    info: ArenaInfo
    found: tuple[Found, ...]


@dataclass(frozen=True, slots=True)
class Inspected:
    """Every sealed slot of an arena was compared with its checksums: *damaged* are left out of *good*."""

    arena: int
    good: tuple[Found, ...]
    damaged: tuple[tuple[SaveKey, str], ...]


@dataclass(frozen=True, slots=True)
class PeerServing:
    """Other nodes can bring their snapshots here, and this is what they have brought so far."""

    address: m.Address
    held: tuple[m.Away, ...]


@dataclass(frozen=True, slots=True)
class PeerFetched:
    """A rank's snapshot is back from another node; *found* is None when it is not, for the reason in *why*."""

    attempt: int
    rank: int
    info: ArenaInfo | None
    found: Found | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class LocalListed:
    """What this node's own disk holds."""

    attempt: int
    folders: tuple[FolderOffer, ...]


@dataclass(frozen=True, slots=True)
class MemoryShort:
    """The memory of an arena could not be taken in advance."""

    rank: int
    why: str


@dataclass(frozen=True, slots=True)
class PieceWritten:
    key: SaveKey
    rank: int
    ticket: str
    written: Written


@dataclass(frozen=True, slots=True)
class PieceFailed:
    key: SaveKey
    rank: int
    ticket: str
    reason: str
    why: str


@dataclass(frozen=True, slots=True)
class StepsRead:
    """The ranks' newest steps, from the control pages."""

    steps: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class OrderPlaced:
    """An order is in the control pages; *steps* were read after it was written."""

    attempt: int
    step: int
    steps: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class ExchangeBound:
    """Messages to the coordinator get through from now on."""

    attempt: int


@dataclass(frozen=True, slots=True)
class ExchangeLost:
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """*is_coordinator_busy*: the coordinator in this process is writing something."""

    is_coordinator_busy: bool = False


NodeEvent = (
    RankHello
    | RankLayout
    | RankStaged
    | RankSkipped
    | RankRestore
    | RankAgree
    | RankStarted
    | RankFlush
    | RankBye
    | RankLost
    | AttemptBegan
    | AttemptFailed
    | FlushAsked
    | LeaveAsked
    | AgentLost
    | ArenaOpened
    | ArenaRefused
    | ArenaRestored
    | Inspected
    | LocalListed
    | PeerServing
    | PeerFetched
    | MemoryShort
    | PieceWritten
    | PieceFailed
    | StepsRead
    | OrderPlaced
    | ExchangeBound
    | ExchangeLost
    | Tick
    | m.ToAll
)


# -- commands ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SendRank:
    """*arena*: hand out its descriptor with the message."""

    connection: int
    op: str
    fields: Mapping[str, Any]
    arena: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerAgent:
    op: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Post:
    """To the coordinator."""

    message: m.FromNode


@dataclass(frozen=True, slots=True)
class Bind:
    """Talk to the savers of this attempt from now on."""

    binding: Binding


@dataclass(frozen=True, slots=True)
class OpenArena:
    """*known*: arenas of this rank; *local_ranks*: how many share the memory of the node."""

    attempt: int
    rank: int
    text: str
    blob_bytes: int
    slots: int
    local_ranks: int
    known: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropArena:
    arena: int


@dataclass(frozen=True, slots=True)
class Inspect:
    arena: int


@dataclass(frozen=True, slots=True)
class DigestSlot:
    """Take the checksums of a slot that is not written."""

    arena: int
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class WritePiece:
    key: SaveKey
    ticket: str
    rank: int
    arena: int
    slot: int
    part: Part
    folder: str
    options: CheckpointOptions


@dataclass(frozen=True, slots=True)
class CancelWrites:
    """Of all pieces with that ticket."""

    ticket: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """Of the hold that came with ``RankStaged`` or ``ArenaRestored``."""

    arena: int
    slot: int


@dataclass(frozen=True, slots=True)
class ReleaseSlot:
    """Empty a slot of a save that will never be whole, if it still holds that."""

    arena: int
    slot: int
    key: SaveKey


@dataclass(frozen=True, slots=True)
class ServePeers:
    """Take snapshots of other nodes' ranks from now on, where they reach this node."""

    binding: Binding


@dataclass(frozen=True, slots=True)
class PushPiece:
    """Bring a copy of a snapshot to the partner node."""

    key: SaveKey
    arena: int
    slot: int
    address: m.Address
    options: CheckpointOptions


@dataclass(frozen=True, slots=True)
class FetchPeer:
    """Get a rank's snapshot back; *known*: arenas of this rank."""

    attempt: int
    rank: int
    key: SaveKey
    layout: Layout
    blob_bytes: int
    address: m.Address
    known: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ListLocal:
    """Look what this node's own disk holds for *ranks*."""

    attempt: int
    options: CheckpointOptions
    ranks: frozenset[int]


@dataclass(frozen=True, slots=True)
class CopyLocal:
    """Bring a committed checkpoint to this node's own disk."""

    path: str
    options: CheckpointOptions


@dataclass(frozen=True, slots=True)
class SetWanted:
    attempt: int
    arenas: tuple[int, ...]
    step: int | None
    tiers: frozenset[TierName]


@dataclass(frozen=True, slots=True)
class Report:
    """A journal record, and what to say to the user (may be empty)."""

    type: str
    fields: Mapping[str, Any]
    text: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """The process has nothing more to do."""


NodeCommand = (
    SendRank
    | AnswerAgent
    | Post
    | Bind
    | OpenArena
    | DropArena
    | Inspect
    | DigestSlot
    | WritePiece
    | CancelWrites
    | LetGo
    | ReleaseSlot
    | ServePeers
    | PushPiece
    | FetchPeer
    | ListLocal
    | CopyLocal
    | SetWanted
    | Report
    | End
)
