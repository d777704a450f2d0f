"""What happens to a node's saver, and what it does about it. Plain data.

Named tuples, here and in ``messages``: a hundred frozen dataclasses take 0.1 s to make, while a rank waits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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
    "ForgetPeers",
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
    "SaveAsked",
    "SendRank",
    "ServePeers",
    "SetWanted",
    "StepsRead",
    "Tick",
    "WritePiece",
]


class Binding(NamedTuple):
    """An attempt as the agent tells it. *ranks*: global ranks by local rank."""

    attempt: int
    world_size: int
    group_rank: int
    group_world_size: int
    ranks: tuple[int, ...]
    host: str = ""
    port: int = 0
    rollback: Mapping[str, Any] | None = None


class ArenaInfo(NamedTuple):
    """One rank's snapshot memory."""

    id: int
    rank: int
    world_size: int
    digest: str
    slots: int
    size_bytes: int
    layout: Layout


class Found(NamedTuple):
    """A sealed slot."""

    slot: int
    key: SaveKey
    created_unix_s: float


# -- events: ranks -----------------------------------------------------------------------------------------------------
class RankHello(NamedTuple):
    connection: int
    rank: int
    attempt: int
    run_id: str
    options: CheckpointOptions


class RankLayout(NamedTuple):
    """*text*: the layout as it came; read by whoever opens the memory."""

    attempt: int
    rank: int
    text: str
    blob_bytes: int


class RankStaged(NamedTuple):
    """A sealed slot. *is_held*: it was found as the rank says, and is kept from being overwritten."""

    key: SaveKey
    rank: int
    arena: int
    slot: int
    tiers: frozenset[TierName]
    stall_s: float
    is_held: bool
    created_unix_s: float


class RankSkipped(NamedTuple):
    key: SaveKey
    rank: int
    why: str


class RankRestore(NamedTuple):
    """*digest* None: the rank does not know its layout yet; *number* None: not told."""

    attempt: int
    rank: int
    digest: str | None
    may_use_memory: bool
    rejected: tuple[Rejected, ...]
    number: int | None


class RankAgree(NamedTuple):
    attempt: int
    rank: int
    key: str
    value: Any


class RankStarted(NamedTuple):
    attempt: int
    rank: int
    step: int


class RankFlush(NamedTuple):
    attempt: int
    rank: int
    limit_s: float


class RankBye(NamedTuple):
    attempt: int
    rank: int


class RankLost(NamedTuple):
    attempt: int
    rank: int
    connection: int


# -- events: agent -----------------------------------------------------------------------------------------------------
class AttemptBegan(NamedTuple):
    binding: Binding


class AttemptFailed(NamedTuple):
    attempt: int
    step: int | None
    signature: str
    falls_back: bool = False


class FlushAsked(NamedTuple):
    limit_s: float


class SaveAsked(NamedTuple):
    """Have all ranks save as soon as they can hear of it."""

    limit_s: float


class LeaveAsked(NamedTuple):
    limit_s: float


class AgentLost(NamedTuple):
    """Its end of the connection is closed."""


# -- events: what was done ---------------------------------------------------------------------------------------------
class ArenaOpened(NamedTuple):
    """Memory for a rank: new, or that which it had before."""

    attempt: int
    info: ArenaInfo
    note: str


class ArenaRefused(NamedTuple):
    """*layout* None: what the rank sent is no layout."""

    attempt: int
    rank: int
    layout: Layout | None
    why: str


class ArenaRestored(NamedTuple):
    """Memory that the agent has kept over the death of another saver; its sealed slots are held."""

    info: ArenaInfo
    found: tuple[Found, ...]


class Inspected(NamedTuple):
    """Sealed slots of an arena were compared with their checksums.

    Attributes:
        damaged: what is left out of *good*, and why.
        unchecked: sealed as well, and not compared yet.
        slot: None: the newest was asked for.
    """

    arena: int
    good: tuple[Found, ...]
    damaged: tuple[tuple[SaveKey, str], ...]
    unchecked: tuple[Found, ...] = ()
    slot: int | None = None


class PeerServing(NamedTuple):
    """Other nodes can bring their snapshots here, and this is what they have brought so far."""

    address: m.Address
    held: tuple[m.Away, ...]


class PeerFetched(NamedTuple):
    """A rank's snapshot is back from another node; *found* is None when it is not, for the reason in *why*."""

    attempt: int
    rank: int
    info: ArenaInfo | None
    found: Found | None
    why: str = ""


class LocalListed(NamedTuple):
    """What this node's own disk holds."""

    attempt: int
    folders: tuple[FolderOffer, ...]


class MemoryShort(NamedTuple):
    """The memory of an arena could not be taken in advance."""

    rank: int
    why: str


class PieceWritten(NamedTuple):
    key: SaveKey
    rank: int
    ticket: str
    written: Written


class PieceFailed(NamedTuple):
    key: SaveKey
    rank: int
    ticket: str
    reason: str
    why: str


class StepsRead(NamedTuple):
    """The ranks' newest steps, from the control pages."""

    steps: Mapping[int, int]


class OrderPlaced(NamedTuple):
    """An order is in the control pages; *steps* were read after it was written."""

    attempt: int
    step: int
    steps: Mapping[int, int]


class ExchangeBound(NamedTuple):
    """Messages to the coordinator get through from now on."""

    attempt: int


class ExchangeLost(NamedTuple):
    why: str


class Tick(NamedTuple):
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
    | SaveAsked
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
class SendRank(NamedTuple):
    """*arena*: hand out its descriptor with the message."""

    connection: int
    op: str
    fields: Mapping[str, Any]
    arena: int | None = None


class AnswerAgent(NamedTuple):
    op: str
    fields: Mapping[str, Any]


class Post(NamedTuple):
    """To the coordinator."""

    message: m.FromNode


class Bind(NamedTuple):
    """Talk to the savers of this attempt from now on."""

    binding: Binding


class OpenArena(NamedTuple):
    """*known*: arenas of this rank; *local_ranks*: how many share the memory of the node."""

    attempt: int
    rank: int
    text: str
    blob_bytes: int
    slots: int
    local_ranks: int
    known: tuple[int, ...]


class DropArena(NamedTuple):
    arena: int


class Inspect(NamedTuple):
    """Compare a slot with its checksums: the newest sealed one, or *slot*."""

    arena: int
    slot: int | None = None


class DigestSlot(NamedTuple):
    """Take the checksums of a slot that is not written."""

    arena: int
    slot: int
    generation: int


class WritePiece(NamedTuple):
    """*delay_s*: to wait before it, so that many nodes do not begin at once."""

    key: SaveKey
    ticket: str
    rank: int
    arena: int
    slot: int
    part: Part
    folder: str
    options: CheckpointOptions
    delay_s: float


class CancelWrites(NamedTuple):
    """Of all pieces with that ticket."""

    ticket: str


class LetGo(NamedTuple):
    """Of the hold that came with ``RankStaged`` or ``ArenaRestored``."""

    arena: int
    slot: int


class ReleaseSlot(NamedTuple):
    """Empty a slot of a save that will never be whole, if it still holds that."""

    arena: int
    slot: int
    key: SaveKey


class ServePeers(NamedTuple):
    """Take snapshots of other nodes' ranks from now on, where they reach this node."""

    binding: Binding


class PushPiece(NamedTuple):
    """Bring a copy of a snapshot to the partner node."""

    key: SaveKey
    arena: int
    slot: int
    address: m.Address
    options: CheckpointOptions


class ForgetPeers(NamedTuple):
    """Give up what is held of these ranks: other nodes hold newer snapshots of them."""

    ranks: tuple[int, ...]


class FetchPeer(NamedTuple):
    """Get a rank's snapshot back; *known*: arenas of this rank."""

    attempt: int
    rank: int
    key: SaveKey
    layout: Layout
    blob_bytes: int
    address: m.Address
    known: tuple[int, ...]


class ListLocal(NamedTuple):
    """Look what this node's own disk holds for *ranks*."""

    attempt: int
    options: CheckpointOptions
    ranks: frozenset[int]


class CopyLocal(NamedTuple):
    """Bring a committed checkpoint to this node's own disk."""

    path: str
    options: CheckpointOptions


class SetWanted(NamedTuple):
    attempt: int
    arenas: tuple[int, ...]
    step: int | None
    tiers: frozenset[TierName]


class Report(NamedTuple):
    """A journal record, and what to say to the user (may be empty)."""

    type: str
    fields: Mapping[str, Any]
    text: str = ""


class End(NamedTuple):
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
    | ForgetPeers
    | ListLocal
    | CopyLocal
    | SetWanted
    | Report
    | End
)
