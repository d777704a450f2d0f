"""What the saver does on storage. Each function is one job for a worker thread and gives the event that tells of it.

Storage may be slow, full or gone; a job then takes as long as it takes, and its event says what was wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from steadyrun.checkpoint import commit, quarantine, rollback
from steadyrun.checkpoint.arena import ArenaError
from steadyrun.checkpoint.catalog import CatalogError, Listed, list_checkpoints
from steadyrun.checkpoint.choose import Quarantined
from steadyrun.checkpoint.dcpfile import metadata_bytes
from steadyrun.checkpoint.durable import write_whole
from steadyrun.checkpoint.manifest import Fragment, Manifest, Verified
from steadyrun.checkpoint.offers import folder_offer
from steadyrun.checkpoint.planning import plan
from steadyrun.checkpoint.retention import Keep, Pruned, prune, to_remove
from steadyrun.checkpoint.saver.events import (
    CopyLocal,
    ListLocal,
    LocalListed,
    PieceFailed,
    PieceWritten,
    WritePiece,
)
from steadyrun.checkpoint.saver.memory import Box
from steadyrun.checkpoint.saver.orders import (
    AbandonFolder,
    CommitFolder,
    CommitRefused,
    CopyRemote,
    FetchRemote,
    FolderCommitted,
    FolderOpened,
    FolderRefused,
    FoldersListed,
    ListFolders,
    ListRemote,
    LookForRollback,
    MakePlan,
    NoteFailure,
    NoteLoaded,
    OpenFolder,
    PlanMade,
    Prune,
    RemoteFetched,
    RollbackLooked,
)
from steadyrun.checkpoint.saves import CheckpointOptions, TierName
from steadyrun.checkpoint.schedule import Experience
from steadyrun.checkpoint.shardfile import RateLimit, WriteError, WriteOptions, Written, write_rank_files
from steadyrun.core.errors import SteadyrunError

__all__ = [
    "EXPERIENCE_NAME",
    "PieceWriter",
    "Told",
    "abandon_folder",
    "commit_folder",
    "copy_local",
    "copy_remote",
    "fetch_remote",
    "list_folders",
    "list_local",
    "list_remote",
    "look_for_rollback",
    "lower_priority",
    "make_plan",
    "note_failure",
    "note_loaded",
    "open_folder",
    "prune_folder",
]

EXPERIENCE_NAME: Final = "experience.json"

_NICE: Final = 10
_KEPT_CANCELLED: Final = 64
_IOPRIO_SET: Final = {"x86_64": 251, "aarch64": 30}
_IOPRIO_WHO_PROCESS: Final = 1
_IOPRIO_IDLE: Final = 3 << 13


class _CancelledError(Exception):
    """The save was given up meanwhile."""


def lower_priority() -> None:
    """Let training go first, for the calling thread: processor and disk."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        with contextlib.suppress(OSError):
            ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)


class PieceWriter:
    """Writes pieces of saves; several threads may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled: set[str] = set()
        self._rates: dict[float, RateLimit] = {}
        self.done_bytes = 0
        self.total_bytes = 0

    def cancel(self, ticket: str) -> None:
        """Stop writing what was ordered with it, soon."""
        with self._lock:
            if len(self._cancelled) > _KEPT_CANCELLED:
                self._cancelled.clear()
            self._cancelled.add(ticket)

    def rate(self, most_bytes_per_s: float | None) -> RateLimit | None:
        """One for all writers of the node."""
        if most_bytes_per_s is None:
            return None
        with self._lock:
            if most_bytes_per_s not in self._rates:
                self._rates = {most_bytes_per_s: RateLimit(most_bytes_per_s)}
            return self._rates[most_bytes_per_s]

    def write(self, order: WritePiece, box: Box) -> PieceWritten | PieceFailed:
        """Write one rank's files from its slot, and note the checksums that were taken on the way."""

        def failed(reason: str, why: str) -> PieceFailed:
            return PieceFailed(order.key, order.rank, order.ticket, reason, why)

        time.sleep(order.delay_s)
        if order.ticket in self._cancelled:
            return failed("cancelled", "the save was given up")
        if not box.enter():
            return failed("lost", "its snapshot memory was given up")
        try:
            slot = box.arena.slots[order.slot]
            if not slot.hold(order.key.generation):
                return failed("lost", "its snapshot was overwritten before it was written")
            try:
                folder = Path(order.folder)

                def progress(done_bytes: int, total_bytes: int) -> None:
                    if order.ticket in self._cancelled:
                        raise _CancelledError
                    self.done_bytes, self.total_bytes = done_bytes, total_bytes

                options = WriteOptions(
                    read_back=order.options.read_back, rate=self.rate(order.options.most_bytes_per_s)
                )
                written = write_rank_files(
                    folder, box.arena.layout, order.part, slot.payload, slot.blobs(), options, progress
                )
                slot.record_digests(written.digests)
                slot.compute_digests()  # of what others have written, and of the objects
            finally:
                slot.let_go()
        except _CancelledError:
            return failed("cancelled", "the save was given up")
        except WriteError as e:
            return failed(e.reason.value, str(e))
        except ArenaError as e:
            return failed("memory", str(e))
        except (OSError, SteadyrunError, ValueError) as e:
            return failed("other", f"cannot write to {order.folder}: {type(e).__name__}: {e}")
        finally:
            box.leave()
        return PieceWritten(order.key, order.rank, order.ticket, _light(written))


def _light(written: Written) -> Written:
    """What the coordinator needs of it; the checksums are in the folder."""
    return Written(
        written.files,
        Fragment(written.fragment.rank, (), ()),
        written.replica_digests,
        {},
        written.objects,
        written.shards,
        written.cpu_s,
        written.elapsed_s,
    )


# -- the coordinator's -------------------------------------------------------------------------------------------------
def open_folder(order: OpenFolder) -> FolderOpened | FolderRefused:
    """A new folder for a save, unless that very save is committed already: this saver may have died right after."""
    root = Path(order.options.root)
    key = order.key
    try:
        for listed in list_checkpoints(root):
            manifest = listed.manifest
            if manifest is None or not listed.is_complete:
                continue
            same = (manifest.step, manifest.attempt, manifest.run_id) == (key.step, key.attempt, order.run_id)
            if same and manifest.details.get("generation") == key.generation:
                return FolderOpened(key, str(listed.path), str(listed.path))
        return FolderOpened(key, str(commit.begin(root, key.step, key.attempt, must_exist=order.has_saved)))
    except OSError as e:
        error = WriteError.of(f"a folder for step {key.step} in {root}", e)
        return FolderRefused(key, error.reason.value, str(error))
    except SteadyrunError as e:
        return FolderRefused(key, "gone" if isinstance(e, CatalogError) else "other", str(e))


def make_plan(order: MakePlan) -> PlanMade:
    try:
        return PlanMade(order.plan_id, plan(order.layouts))
    except SteadyrunError as e:
        return PlanMade(order.plan_id, None, str(e))


def abandon_folder(order: AbandonFolder) -> None:
    commit.abandon(Path(order.folder))


def commit_folder(order: CommitFolder) -> FolderCommitted | CommitRefused:
    key = order.key
    try:
        manifest = Manifest.of_details(
            order.layouts[0].details,
            step=key.step,
            attempt=key.attempt,
            run_id=order.run_id,
            world_size=len(order.layouts),
            created_unix_s=order.created_unix_s,
            files=tuple(f for w in order.written for f in w.files),
            verified=Verified(time.time(), "save") if order.options.read_back else None,
            replicas_compared=len(order.plan.groups),
            notes={"written_by": "saver", "generation": key.generation},
        )
        metadata = metadata_bytes(order.plan, order.layouts, order.written)
        path = commit.commit(Path(order.options.root), Path(order.folder), manifest, metadata)
    except commit.CommitError as e:
        cause = e.__cause__
        reason = WriteError.of("", cause).reason.value if isinstance(cause, OSError) else "commit"
        return CommitRefused(key, reason, str(e))
    except (SteadyrunError, OSError, ValueError, TypeError) as e:
        return CommitRefused(key, "commit", f"cannot commit step {key.step}: {type(e).__name__}: {e}")
    return FolderCommitted(key, str(path), manifest.size_bytes + len(metadata))


# -- resuming ----------------------------------------------------------------------------------------------------------
def list_folders(order: ListFolders) -> FoldersListed:
    """What can be resumed from, after a rollback that waits was carried out."""
    root = Path(order.options.root)
    problems: list[str] = []
    rollback_to = _roll_back(root, order.rollback, problems)
    listed: tuple[Listed, ...] = ()
    quarantined: tuple[Quarantined, ...] = ()
    rollbacks: tuple[rollback.Request, ...] = ()
    try:
        listed = list_checkpoints(root)
        rollbacks = rollback.carried_out(root)
        quarantined = quarantine.read(root).quarantined()
    except SteadyrunError as e:
        problems.append(str(e))
    offers = tuple(folder_offer(c, TierName.SHARED, rollbacks=rollbacks) for c in listed)
    skipped = {str(c.path): c.manifest.skipped for c in listed if c.manifest is not None and c.manifest.skipped}
    return FoldersListed(
        order.attempt,
        order.round,
        offers,
        quarantined,
        rollback_to,
        rollbacks,
        skipped,
        _read_experience(root),
        "; ".join(problems),
    )


def _roll_back(root: Path, asked: Mapping[str, Any] | None, problems: list[str]) -> int | None:
    """The step to which training goes back now; also when that could not be carried out properly."""
    to: int | None = None
    try:
        if asked is not None:
            request = rollback.Request.from_fields(asked, time.time())
            to = request.to
            if rollback.carry_out(root, request) is None:
                to = None  # by an earlier attempt
        waiting = rollback.pending(root)
        if waiting is not None:
            to = waiting.to if to is None else min(to, waiting.to)
            rollback.take(root)
    except SteadyrunError as e:
        problems.append(str(e))
    return to


def list_remote(order: ListRemote) -> FoldersListed:
    """Adds what the remote tier holds."""
    listed = order.listed._replace(has_remote=True)
    from steadyrun.checkpoint.tiers import TierError, open_tier  # not needed by most jobs, and 10 ms of every start

    try:
        tier = open_tier(str(order.options.remote))
        found = [
            folder_offer(c, TierName.REMOTE, tier.path_of(str(c.name)), rollbacks=listed.rollbacks) for c in tier.list()
        ]
    except TierError as e:
        return listed._replace(why=f"{listed.why}; {e}" if listed.why else str(e))
    return listed._replace(folders=(*listed.folders, *found))


def fetch_remote(order: FetchRemote) -> RemoteFetched:
    from steadyrun.checkpoint.tiers import TierError, open_tier  # not needed by most jobs, and 10 ms of every start

    try:
        tier = open_tier(str(order.options.remote))
        path = tier.get(PurePosixPath(order.path).name, Path(order.options.root))
    except (TierError, OSError) as e:
        return RemoteFetched(order.attempt, order.round, "", str(e))
    return RemoteFetched(order.attempt, order.round, str(path))


def list_local(order: ListLocal) -> LocalListed:
    """A disk of this node that cannot be listed holds nothing."""
    try:
        listed = list_checkpoints(Path(str(order.options.local)))
        rollbacks = rollback.carried_out(Path(order.options.root))
    except SteadyrunError:
        return LocalListed(order.attempt, ())
    return LocalListed(
        order.attempt,
        tuple(folder_offer(c, TierName.LOCAL, ranks=order.ranks, rollbacks=rollbacks) for c in listed),
    )


def look_for_rollback(order: LookForRollback) -> RollbackLooked:
    try:
        waiting = rollback.pending(Path(order.options.root))
    except SteadyrunError:
        return RollbackLooked("")  # said when the next attempt cannot carry it out
    return RollbackLooked("") if waiting is None else RollbackLooked(waiting.id, waiting.to)


# -- notes in the root -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Told:
    """What a job has to say: journal records, and sentences for the user.

    Attributes:
        complaint: about what, and what is wrong; empty when it is right again. Said once until it is.
        restored: for the agent: what the ranks go on from, and whether there is something older.
    """

    records: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    notes: tuple[str, ...] = ()
    complaint: tuple[str, str] | None = None
    restored: Mapping[str, Any] | None = None


def note_loaded(order: NoteLoaded) -> Told:
    loaded = dataclasses.replace(order.loaded, at_unix_s=time.time())
    try:
        root = Path(order.options.root)
        quarantine.update(root, lambda ledger: quarantine.after_load(ledger, loaded))
        older = [c for c in list_checkpoints(root) if c.is_complete and not c.is_superseded and c.step < loaded.step]
    except SteadyrunError as e:
        return Told(notes=(str(e),))
    return Told(restored={"attempt": loaded.in_attempt, "step": loaded.step, "older": len(older)})


def note_failure(order: NoteFailure) -> Told:
    """The same fault soon after the same state was loaded puts that into quarantine."""
    root = Path(order.options.root)
    judged: list[quarantine.Judged] = []
    _write_experience(root, order.experience)

    def judge(ledger: quarantine.Ledger) -> quarantine.Ledger:
        judged[:] = [
            quarantine.after_failure(
                ledger, order.attempt, order.step, order.signature, time.time(), falls_back=order.falls_back
            )
        ]
        return judged[0].ledger

    try:
        quarantine.update(root, judge)
    except SteadyrunError as e:
        return Told(notes=(str(e),))
    entry = judged[0].entry
    records: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    if entry is not None:
        fields = {"step": entry.step, "attempt": entry.attempt, "signature": entry.signature, "why": entry.why}
        records = (("checkpoint_quarantined", fields),)
    return Told(records, (judged[0].note,) if judged[0].note else ())


def copy_local(order: CopyLocal) -> Told:
    return _copy(order.path, str(order.options.local), TierName.LOCAL, order.options)


def copy_remote(order: CopyRemote) -> Told:
    return _copy(order.path, str(order.options.remote), TierName.REMOTE, order.options)


def _copy(path: str, place: str, name: TierName, options: CheckpointOptions) -> Told:
    """Bring a checkpoint to another tier, and keep to the retention there."""
    from steadyrun.checkpoint.tiers import open_tier  # not needed by most jobs, and 10 ms of every start

    common = {"tier": name.value, "place": place}
    try:
        tier = open_tier(place)
        moved = tier.put(Path(path))
        records: list[tuple[str, Mapping[str, Any]]] = []
        if not moved.was_there:
            fields = {**common, "path": moved.path, "bytes": moved.size_bytes, "seconds": round(moved.elapsed_s, 3)}
            records.append(("checkpoint_copied", fields))
        for old in to_remove(tier.list(), options.keep, options.keep_every):
            tier.remove(str(old.name))
            records.append(("checkpoint_removed", {**common, "path": tier.path_of(str(old.name))}))
    except (SteadyrunError, OSError) as e:
        why = str(e)
        return Told((("checkpoint_not_copied", {**common, "path": path, "why": why}),), complaint=(name.value, why))
    return Told(tuple(records), complaint=(name.value, ""))


def prune_folder(order: Prune) -> Told:
    """Retention; what cannot be removed is tried again after the next save."""
    root = Path(order.options.root)
    _write_experience(root, order.experience)
    try:
        poisoned: tuple[Path, ...] = ()
        with contextlib.suppress(quarantine.QuarantineError):
            poisoned = quarantine.read(root).among(list_checkpoints(root))
        keep = Keep(order.options.keep, order.options.keep_every)
        in_use = [Path(p) for p in order.in_use]
        return _pruned(prune(root, keep, in_use, quarantined=poisoned))
    except (SteadyrunError, OSError) as e:
        return _pruned(Pruned(failed=((root, str(e)),)))


def _pruned(pruned: Pruned) -> Told:
    removed = tuple(("checkpoint_removed", {"path": str(path)}) for path in pruned.removed)
    failed = tuple(("checkpoint_not_removed", {"path": str(path), "why": why}) for path, why in pruned.failed)
    return Told((*removed, *failed))


def _read_experience(root: Path) -> Experience | None:
    try:
        return Experience.from_json(json.loads((root / EXPERIENCE_NAME).read_bytes()))
    except (OSError, ValueError):
        return None  # the next run begins with the prior


def _write_experience(root: Path, experience: Experience | None) -> None:
    if experience is not None:
        with contextlib.suppress(OSError):  # it is only missed by the next run
            write_whole(root / EXPERIENCE_NAME, json.dumps(experience.to_json()).encode())
