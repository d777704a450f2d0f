"""What the coordinator hears beside the nodes' messages, and what it orders. Plain data, as in ``events``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from steadyrun.checkpoint.choose import FolderOffer, Quarantined
from steadyrun.checkpoint.layout import Layout
from steadyrun.checkpoint.planning import Plan
from steadyrun.checkpoint.quarantine import Loaded
from steadyrun.checkpoint.rollback import Request
from steadyrun.checkpoint.saver import messages as m
from steadyrun.checkpoint.saver.messages import SaveKey
from steadyrun.checkpoint.saves import CheckpointOptions
from steadyrun.checkpoint.schedule import Experience
from steadyrun.checkpoint.shardfile import Written

__all__ = [
    "AbandonFolder",
    "AskRestart",
    "Began",
    "CommitFolder",
    "CommitRefused",
    "CoordinatorCommand",
    "CoordinatorEvent",
    "CopyRemote",
    "ExchangeBack",
    "FetchRemote",
    "FolderCommitted",
    "FolderOpened",
    "FolderRefused",
    "FoldersListed",
    "ListFolders",
    "ListRemote",
    "LookForRollback",
    "MakePlan",
    "NoteFailure",
    "NoteLoaded",
    "OpenFolder",
    "PlanMade",
    "Prune",
    "Record",
    "RemoteFetched",
    "RollbackLooked",
    "Say",
    "Tell",
    "Tick",
]


# -- events ------------------------------------------------------------------------------------------------------------
class Began(NamedTuple):
    """Ranks of an attempt are being started on *nodes* nodes. *rollback*: what ``--ft-rollback`` asks for."""

    attempt: int
    world_size: int
    nodes: int
    rollback: Mapping[str, Any] | None = None


class ExchangeBack(NamedTuple):
    """Messages of other nodes come through (again); some may be lost."""


class PlanMade(NamedTuple):
    """*plan* is None when the layouts make no checkpoint, for the reason in *why*."""

    plan_id: str
    plan: Plan | None
    why: str = ""


class FolderOpened(NamedTuple):
    """*committed* is the path of a checkpoint that is this very save already, else empty."""

    key: SaveKey
    folder: str
    committed: str = ""


class FolderRefused(NamedTuple):
    key: SaveKey
    reason: str
    why: str


class FolderCommitted(NamedTuple):
    key: SaveKey
    path: str
    size_bytes: int


class CommitRefused(NamedTuple):
    key: SaveKey
    reason: str
    why: str


class FoldersListed(NamedTuple):
    """What is in the folders, and what is known beside them.

    Attributes:
        rollback_to: of a rollback that was carried out just now, or could not be.
        rollbacks: all that were carried out.
        skipped_by_path: batches that checkpoints leave out by their manifests.
        experience: None when none was kept.
        why: what could not be looked at; empty when all was.
        has_remote: the remote tier is among the folders, or could not be listed.
    """

    attempt: int
    round: int
    folders: tuple[FolderOffer, ...]
    quarantined: tuple[Quarantined, ...] = ()
    rollback_to: int | None = None
    rollbacks: tuple[Request, ...] = ()
    skipped_by_path: Mapping[str, tuple[tuple[int, int], ...]] = MappingProxyType({})
    experience: Experience | None = None
    why: str = ""
    has_remote: bool = False


class RemoteFetched(NamedTuple):
    """A checkpoint of the remote tier is at *path* in the root now; empty: it is not, for the reason in *why*."""

    attempt: int
    round: int
    path: str
    why: str = ""


class RollbackLooked(NamedTuple):
    """Whether a request for a rollback waits in the root: its id, else empty."""

    id: str
    to: int = -1


class Tick(NamedTuple):
    """Look at the clock."""


CoordinatorEvent = (
    m.FromNode
    | Began
    | ExchangeBack
    | PlanMade
    | FolderOpened
    | FolderRefused
    | FolderCommitted
    | CommitRefused
    | FoldersListed
    | RemoteFetched
    | RollbackLooked
    | Tick
)


# -- commands ----------------------------------------------------------------------------------------------------------
class Tell(NamedTuple):
    """To the savers of all nodes, this one included."""

    message: m.ToAll


class MakePlan(NamedTuple):
    plan_id: str
    layouts: tuple[Layout, ...]


class OpenFolder(NamedTuple):
    """Make the folder that all nodes write to.

    Attributes:
        has_saved: this run has saved there, so that the root must exist: a mount may have vanished, and below the mount
            point is another disk.
    """

    key: SaveKey
    options: CheckpointOptions
    run_id: str
    has_saved: bool = False


class CommitFolder(NamedTuple):
    """*written* by rank."""

    key: SaveKey
    folder: str
    plan: Plan
    layouts: tuple[Layout, ...]
    written: tuple[Written, ...]
    options: CheckpointOptions
    run_id: str
    created_unix_s: float


class AbandonFolder(NamedTuple):
    folder: str


class ListFolders(NamedTuple):
    """Look what there is, and carry out a rollback that waits, or that *rollback* asks for."""

    attempt: int
    round: int
    options: CheckpointOptions
    rollback: Mapping[str, Any] | None = None


class ListRemote(NamedTuple):
    """Look what the remote tier holds; answered with another ``FoldersListed``, in addition to *listed*."""

    listed: FoldersListed
    options: CheckpointOptions


class FetchRemote(NamedTuple):
    """Bring a checkpoint of the remote tier into the root."""

    attempt: int
    round: int
    path: str
    options: CheckpointOptions


class CopyRemote(NamedTuple):
    """Bring a committed checkpoint to the remote tier."""

    path: str
    options: CheckpointOptions


class NoteLoaded(NamedTuple):
    """For the quarantine: what this attempt goes on from."""

    options: CheckpointOptions
    loaded: Loaded


class NoteFailure(NamedTuple):
    """For the quarantine, and for the next run's interval."""

    options: CheckpointOptions
    attempt: int
    step: int | None
    signature: str
    falls_back: bool
    experience: Experience | None


class LookForRollback(NamedTuple):
    options: CheckpointOptions


class AskRestart(NamedTuple):
    """Of the agents: the ranks have to begin again from another checkpoint."""

    why: str


class Prune(NamedTuple):
    """Retention, after a commit. *in_use*: paths that stay in any case."""

    options: CheckpointOptions
    in_use: tuple[str, ...]
    experience: Experience | None


class Record(NamedTuple):
    """A journal record."""

    type: str
    fields: Mapping[str, Any]


class Say(NamedTuple):
    """To the user."""

    text: str


CoordinatorCommand = (
    Tell
    | MakePlan
    | OpenFolder
    | CommitFolder
    | AbandonFolder
    | ListFolders
    | ListRemote
    | FetchRemote
    | CopyRemote
    | LookForRollback
    | AskRestart
    | NoteLoaded
    | NoteFailure
    | Prune
    | Record
    | Say
)
