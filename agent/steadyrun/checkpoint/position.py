"""Where a run is in its data: from the states of the data loaders of all ranks to the same place for other ranks.

Ranks that load different data are *replicas* (of data parallelism); ranks of one tensor- or pipeline-parallel group
load the same and count once. A place is the number of samples that all replicas together have been given in this epoch:
a ``DistributedSampler`` deals samples out in turn, so that the first n of an epoch are the same set for any number of
replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["LoaderPosition", "Moved", "Samples", "moved_state", "read_position"]


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """Where one rank's data loader is.

    Attributes:
        batches: given out in this epoch, on this rank.
        batch_size: samples in one of them; None where the loader does not say.
        replica, replicas: which of how many different streams of data this rank reads.
        samples: given out on this rank, where the loader counts them itself (``samples_seen``).
        epoch: of the sampler; None where it has none.
    """

    batches: int
    batch_size: int | None
    replica: int
    replicas: int
    samples: int | None = None
    epoch: int | None = None

    @property
    def samples_here(self) -> int | None:
        """Samples this rank has been given; None when only batches are known."""
        if self.samples is not None:
            return self.samples
        return None if self.batch_size is None else self.batches * self.batch_size

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> LoaderPosition:
        """Raises KeyError or TypeError when *data* did not come from ``to_plain``."""
        return cls(**{name: data[name] for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class Samples:
    """What all replicas together have been given.

    Attributes:
        seen: samples of this epoch; None when a loader does not tell its batch size.
        batches: the most batches that a replica has been given.
        global_batch: samples of one batch of all replicas together; None when unknown.
        missing: replicas of which nothing is known: taken for as far as the others.
    """

    seen: int | None
    batches: int
    global_batch: int | None
    replicas: int
    missing: int = 0
    epoch: int | None = None

    @classmethod
    def of(cls, positions: Sequence[LoaderPosition]) -> Samples:
        """From the positions of all ranks, any order; of ranks that read the same stream one counts.

        Raises:
            ValueError: no position, or positions of a different number of replicas.
        """
        by_replica = {p.replica: p for p in positions}
        if not by_replica:
            raise ValueError("there is no position of any rank")
        replicas = {p.replicas for p in positions}
        if len(replicas) != 1:
            raise ValueError(f"the ranks do not agree on the number of data streams: {sorted(replicas)}")
        count = replicas.pop()
        known = list(by_replica.values())
        missing = max(0, count - len(known))
        seen = [p.samples_here for p in known]
        sizes = [p.batch_size for p in known]
        total = sum(s for s in seen if s is not None)
        of_all = None if None in seen else total + missing * (total // len(known))
        size = sum(s for s in sizes if s is not None)
        batch = None if None in sizes else size + missing * (size // len(known))
        epochs = {p.epoch for p in known}
        epoch = epochs.pop() if len(epochs) == 1 else None
        return cls(of_all, max(p.batches for p in known), batch, count, missing, epoch)

    def move(self, replicas: int, batch_size: int | None) -> Moved:
        """The same place for *replicas* streams of batches of *batch_size* each."""
        notes = []
        if self.missing:
            notes.append(
                f"the data position of {self.missing} of {self.replicas} data-parallel ranks is not in the checkpoint; "
                "taken for the same as the others'"
            )
        if self.seen is None or batch_size is None:
            if replicas != self.replicas:
                notes.append(
                    f"data position: {self.batches} batches on each of {replicas} data-parallel ranks (before: "
                    f"{self.replicas}); the loader does not tell its batch size, so samples may be seen twice or never"
                )
            return Moved(self.batches, None, tuple(notes))
        batch = replicas * batch_size
        batches, again = divmod(self.seen, batch)
        if batch == self.global_batch:
            notes.append(
                f"data position: {self.seen} samples of the epoch seen; the global batch stays {batch} samples"
            )
        else:
            notes.append(
                f"data position: {self.seen} samples of the epoch seen; the global batch changes from "
                f"{self.global_batch or 'unknown'} to {batch} samples" + self._advice(replicas)
            )
        if again:
            notes.append(f"{again} samples are seen a second time: {self.seen} is no multiple of {batch}")
        return Moved(batches, batches * batch_size, tuple(notes))

    def _advice(self, replicas: int) -> str:
        if self.global_batch is None or self.global_batch % replicas:
            return ""
        return f" (a batch size of {self.global_batch // replicas} would keep it)"


@dataclass(frozen=True, slots=True)
class Moved:
    """The place for one of the new ranks.

    Attributes:
        batches: to leave out.
        samples: of this rank in these; None when unknown.
        notes: sentences for the user.
    """

    batches: int
    samples: int | None
    notes: tuple[str, ...]


def read_position(
    loader: Any, state: Mapping[str, Any], default_replica: int, default_replicas: int
) -> LoaderPosition | None:
    """Where *loader* is; None when neither it nor its *state* tells.

    Args:
        loader: one with ``samples_seen`` (samples of this epoch that this rank has been given), or torchdata's.
        state: what its ``state_dict`` gave.
        default_replica, default_replicas: for a loader whose sampler does not say which part of the data it deals out.
    """
    sampler = _sampler(loader)
    replicas = getattr(sampler, "num_replicas", None)
    replica = getattr(sampler, "rank", None)
    if not isinstance(replicas, int) or not isinstance(replica, int):
        replica, replicas = default_replica, default_replicas
    epoch = getattr(sampler, "epoch", None)
    batch_size = _batch_size(loader)
    samples = getattr(loader, "samples_seen", None)
    samples = samples if isinstance(samples, int) else None
    batches = batches_in(state)
    if batches is None:
        if samples is None:
            return None
        batches = samples // batch_size if batch_size else 0
    return LoaderPosition(batches, batch_size, replica, replicas, samples, epoch if isinstance(epoch, int) else None)


def batches_in(state: Mapping[str, Any]) -> int | None:
    """Batches given out, from the state of a StatefulDataLoader without or with workers; None for another's."""
    if not state:
        return 0  # nothing has been asked of the loader yet
    one = state.get("_num_yielded")
    if isinstance(one, int):
        return one
    snapshot, since = state.get("_snapshot"), state.get("_steps_since_snapshot")
    if isinstance(snapshot, Mapping) and isinstance(since, int) and isinstance(snapshot.get("_snapshot_step"), int):
        return int(snapshot["_snapshot_step"]) + since
    return None


def moved_state(fresh: Mapping[str, Any], batches: int, samples: int) -> dict[str, Any] | None:
    """The state of a StatefulDataLoader at *batches*, from that of one at the beginning of an epoch.

    Args:
        fresh: of a loader over a dataset with numbered samples; its sampler is sent forward, no sample is read.
        batches, samples: to leave out on this rank.

    Returns:
        None when the loader is of another kind, or its data are a stream that only the dataset could position.
    """
    if "_num_yielded" in fresh:
        if fresh.get("fetcher_state") is not None:
            return None  # an iterable dataset
        return {**_at(fresh, batches, samples), "_num_yielded": batches}
    snapshot = fresh.get("_snapshot")
    if not isinstance(snapshot, Mapping) or not isinstance(snapshot.get("_main_snapshot"), Mapping):
        return None
    workers = snapshot.get("_worker_snapshots") or {}
    if any(w.get("fetcher_state") is not None for w in workers.values()):
        return None
    main = _at(snapshot["_main_snapshot"], batches, samples)
    return {**fresh, "_snapshot": {**snapshot, "_main_snapshot": main, "_snapshot_step": batches}}


def _at(state: Mapping[str, Any], batches: int, samples: int) -> dict[str, Any]:
    out = {**state, "_sampler_iter_yielded": batches}
    for key in ("_sampler_iter_state", "_index_sampler_state"):
        if isinstance(state.get(key), Mapping):
            out[key] = _counted(state[key], batches, samples)
    return out


def _counted(state: Mapping[str, Any], batches: int, samples: int) -> dict[str, Any]:
    """torchdata's samplers count what they have given: a batch sampler around one that counts samples."""
    out: dict[str, Any] = {}
    for key, value in state.items():
        if key in ("samples_yielded", "yielded") and isinstance(value, int):
            out[key] = samples
        elif isinstance(value, Mapping):
            out[key] = _counted(value, batches, samples)
        else:
            out[key] = value
    return out


def set_epoch(loader: Any, epoch: int) -> bool:
    """Tell the loader's sampler its epoch; False where it has none."""
    call: Callable[[int], object] | None = getattr(_sampler(loader), "set_epoch", None)
    if call is None:
        return False
    call(epoch)
    return True


def _sampler(loader: Any) -> Any:
    """What deals out the numbers of the samples: the loader's sampler, or that inside its batch sampler."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for candidate in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler):
        if hasattr(candidate, "num_replicas") or hasattr(candidate, "set_epoch"):
            return candidate
    return getattr(loader, "sampler", None)


def _batch_size(loader: Any) -> int | None:
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int):
            return size
    return None
