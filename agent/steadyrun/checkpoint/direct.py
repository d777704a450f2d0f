"""Saving and choosing without a saver: the ranks write the same files themselves and agree by torch.distributed.

``save`` returns once the checkpoint is durable or has failed. All ranks call everything here together.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import torch
import torch.distributed as dist

from steadyrun.checkpoint import commit, rollback
from steadyrun.checkpoint.catalog import list_checkpoints
from steadyrun.checkpoint.choose import Offer, Rejected, choose
from steadyrun.checkpoint.dcpfile import metadata_bytes
from steadyrun.checkpoint.interval import prior_mtbf_s, young_interval_s
from steadyrun.checkpoint.layout import Entry, Layout
from steadyrun.checkpoint.manifest import Manifest
from steadyrun.checkpoint.offers import folder_offer
from steadyrun.checkpoint.planning import Part, Plan, plan, unequal_replicas
from steadyrun.checkpoint.retention import Keep, prune
from steadyrun.checkpoint.saves import CheckpointOptions, SaveState, TierName
from steadyrun.checkpoint.shardfile import RateLimit, WriteOptions, Written, write_rank_files
from steadyrun.core.errors import SteadyrunError

__all__ = ["DirectWriter", "Done", "Gather", "gather_alone", "gather_over", "local_world_size"]

T = TypeVar("T")

_LEAST_AUTO_S: Final = 60.0

# How long gathered tensors are kept after their collective. gloo's thread lets go of them a moment later; when it is
# the last to do so it needs the GIL, and a script that ends right here holds that while it destroys the group: a
# deadlock.
_LET_GO_S: Final = 0.005


class Gather(Protocol):
    """Every rank's value, by rank; all ranks call it."""

    def __call__(self, value: T, /) -> list[T]: ...


def gather_alone(value: T, /) -> list[T]:
    return [value]


def gather_over(group: Any) -> Gather:
    """Over a process group of torch (None: the default one), whatever its backend.

    torch's own ``all_gather_object`` needs NumPy, which torch does not require.
    """

    def gather(value: T, /) -> list[T]:
        device = _device_of(group)
        content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
        sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sizes, torch.tensor([content.numel()], device=device), group=group)
        lengths = [int(size) for size in sizes]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        padded[: content.numel()] = content
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded, group=group)
        time.sleep(_LET_GO_S)
        return [pickle.loads(bytes(_bytes_of(part[:length]))) for part, length in zip(parts, lengths, strict=True)]

    return gather


def _device_of(group: Any) -> torch.device:
    """Where the group's collectives want their tensors: on the CPU where it has a backend for that."""
    backends = str(dist.get_backend_config(group)) if hasattr(dist, "get_backend_config") else dist.get_backend(group)
    if "cpu:" in backends or backends == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def local_world_size() -> int:
    """How many ranks of the job share this node, as the launcher says; 1 where nobody does."""
    try:
        return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    except ValueError:
        return 1


@dataclass(frozen=True, slots=True)
class Done:
    """How a save ended; *why* is empty when it is durable."""

    state: SaveState
    why: str
    seconds: float


@dataclass(frozen=True, slots=True)
class _Vote:
    written: Written | None
    why: str = ""


class DirectWriter:
    """One rank's part of saves that the ranks make themselves."""

    def __init__(
        self,
        options: CheckpointOptions,
        rank: int,
        world_size: int,
        attempt: int,
        run_id: str,
        gather: Gather,
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._root = Path(options.root)
        self._rank = rank
        self._world_size = world_size
        self._attempt = attempt
        self._run_id = run_id
        self._gather = gather
        self._say = say
        self._layouts: list[Layout] = []
        self._plan: Plan | None = None
        self._digest = ""
        self._last_s = 0.0
        self._has_saved = False
        most = options.most_bytes_per_s
        # The limit is the node's; its ranks share it evenly here, without a process that knows of all of them.
        self._rate = None if most is None else RateLimit(most / local_world_size())

    @property
    def auto_interval_s(self) -> float:
        """Young's interval for what the last save took and the prior failure rate; a save blocks all ranks here."""
        mtbf_s = prior_mtbf_s(max(self._world_size, 1))
        return max(young_interval_s(self._last_s, mtbf_s) if self._last_s > 0 else 0.0, _LEAST_AUTO_S)

    # -- saving --------------------------------------------------------------------------------------------------------
    def save(self, step: int, layout: Layout, tensors: Sequence[torch.Tensor], blobs: Sequence[bytes]) -> Done:
        started_s = time.monotonic()
        why = ""
        try:
            part = self._plan_for(layout)
        except SteadyrunError as e:
            return Done(SaveState.FAILED, str(e), time.monotonic() - started_s)
        partial = self._begin(step)
        if isinstance(partial, Path):
            vote = self._write(partial, layout, part, tensors, blobs)
            votes = self._gather(vote)
            why = self._finish(step, partial, layout, votes)
        else:
            why = partial
        self._last_s = time.monotonic() - started_s
        self._has_saved = self._has_saved or not why
        return Done(SaveState.FAILED if why else SaveState.DURABLE, why, self._last_s)

    def _plan_for(self, layout: Layout) -> Part:
        """Ranks agree whether anybody's structure has changed, and only then exchange it."""
        if any(self._gather(layout.digest() != self._digest)):
            self._layouts = [Layout.from_json(text) for text in self._gather(layout.to_json())]
            self._plan = plan(self._layouts)
            self._digest = layout.digest()
        assert self._plan is not None
        return self._plan.parts[self._rank]

    def _begin(self, step: int) -> Path | str:
        """The folder to write into, or why there is none; rank 0 makes it."""
        answer: tuple[str, str] = ("", "")
        if self._rank == 0:
            try:
                answer = (str(commit.begin(self._root, step, self._attempt, must_exist=self._has_saved)), "")
            except (SteadyrunError, OSError) as e:
                answer = ("", str(e))
        path, why = self._gather(answer)[0]
        return Path(path) if path else why

    def _write(
        self, partial: Path, layout: Layout, part: Part, tensors: Sequence[torch.Tensor], blobs: Sequence[bytes]
    ) -> _Vote:
        payloads = {(e.key, e.offsets): t for e, t in zip(layout.entries, tensors, strict=True)}

        def payload(entry: Entry) -> memoryview:
            return _bytes_of(payloads[entry.key, entry.offsets])

        options = WriteOptions(read_back=self._options.read_back, rate=self._rate)
        try:
            return _Vote(write_rank_files(partial, layout, part, payload, blobs, options))
        except (SteadyrunError, OSError) as e:
            return _Vote(None, str(e))

    def _finish(self, step: int, partial: Path, layout: Layout, votes: Sequence[_Vote]) -> str:
        """Rank 0 commits or gives up; every rank learns which."""
        why = ""
        if self._rank == 0:
            why = self._why_not(votes)
            try:
                if why:
                    commit.abandon(partial)
                else:
                    self._commit(step, partial, layout, votes)
            except (SteadyrunError, OSError) as e:
                why = why or str(e)
        return self._gather(why)[0]

    def _why_not(self, votes: Sequence[_Vote]) -> str:
        for rank, vote in enumerate(votes):
            if vote.written is None:
                return f"rank {rank}: {vote.why}"
        assert self._plan is not None
        digests = {r: v.written.replica_digests for r, v in enumerate(votes) if v.written is not None}
        text = unequal_replicas(self._plan, digests)
        if text and not self._options.refuse_unequal_replicas:
            self._say(text)
            return ""
        return text

    def _commit(self, step: int, partial: Path, layout: Layout, votes: Sequence[_Vote]) -> None:
        assert self._plan is not None
        written = [v.written for v in votes if v.written is not None]
        manifest = Manifest.of_details(
            layout.details,
            step=step,
            attempt=self._attempt,
            run_id=self._run_id,
            world_size=self._world_size,
            created_unix_s=time.time(),
            files=tuple(f for w in written for f in w.files),
            replicas_compared=len(self._plan.groups),
            notes={"written_by": "ranks"},
        )
        metadata = metadata_bytes(self._plan, self._layouts, written)
        commit.commit(self._root, partial, manifest, metadata)
        keep = Keep(self._options.keep, self._options.keep_every)
        pruned = prune(self._root, keep, remove=commit.remove, sweep_trash=commit.sweep_trash)
        for _, why in pruned.failed:
            self._say(why)

    # -- choosing ------------------------------------------------------------------------------------------------------
    def choose(self, rejected: Sequence[Sequence[Any]]) -> Mapping[str, Any]:
        """Where to resume from, in the form of the saver's ``choice``; rank 0 looks."""
        answer: dict[str, Any] = {}
        if self._rank == 0:
            try:
                answer = self._look(rejected)
            except (SteadyrunError, OSError) as e:
                answer = {"source": "none", "step": -1, "path": "", "rejected": [[str(self._root), -1, str(e)]]}
        return self._gather(answer)[0]

    def _look(self, rejected: Sequence[Sequence[Any]]) -> dict[str, Any]:
        asked = rollback.take(self._root, time.time())
        folders = [folder_offer(c, TierName.SHARED) for c in list_checkpoints(self._root)]
        refusals = [Rejected(str(source), int(step), str(why)) for source, step, why in rejected]
        offers = {rank: Offer("") for rank in range(self._world_size)}
        choice = choose(offers, folders, refusals, rollback_to=None if asked is None else asked.to)
        return {
            "source": choice.source.value,
            "step": choice.step,
            "attempt": choice.attempt,
            "path": choice.path,
            "why": choice.why,
            "skip_batches": [list(r) for r in self._skipped(choice.path)],
            "rejected": [[r.path or r.tier.value, r.step, r.why] for r in choice.refused],
        }

    def _skipped(self, path: str) -> tuple[tuple[int, int], ...]:
        return rollback.skipped(self._root, commit.read_manifest(Path(path)).skipped if path else ())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in C order, not copied where it is contiguous and on the CPU; the view keeps them alive."""
    owner = tensor.detach()
    if owner.device.type != "cpu" or not owner.is_contiguous():
        owner = owner.cpu().contiguous()
    size_bytes = owner.numel() * owner.element_size()
    if size_bytes == 0:
        return memoryview(b"")
    raw: Any = (ctypes.c_ubyte * size_bytes).from_address(owner.data_ptr())
    raw.owner = owner  # pieces of it may still be written when the next tensor is asked for
    return memoryview(raw).cast("B")
