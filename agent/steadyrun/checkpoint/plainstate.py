"""State of what is neither module nor optimizer: anything with ``state_dict``, data loaders, random numbers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from steadyrun.checkpoint.layout import rank_key
from steadyrun.checkpoint.parts import Leaf, Path, Saved, SavedTensor, Shard, flat_key, shards_of
from steadyrun.checkpoint.position import LoaderPosition, Samples, moved_state, read_position, set_epoch
from steadyrun.checkpoint.rng import capture_rng, preserved_rng, reseed, restore_rng

__all__ = ["LoaderPart", "PerRank", "PlainPart", "RngPart"]

_TENSOR: Final = "steadyrun.tensor"  # stands for a tensor in the stored structure; the value is its key


class PerRank:
    """Marks what is another thing on each rank, tensors too: ``watch.checkpointer(..., replay=PerRank(buffer))``."""

    def __init__(self, value: Any) -> None:
        self.value = value


class PlainPart:
    """Something with ``state_dict`` and ``load_state_dict``.

    Its structure is kept as one object with the tensors left out; they are stored as tensors. What is no tensor is
    stored once more under DCP's names, so that other tools find it.
    """

    def __init__(self, name: str, value: Any, rank: int, world_size: int, is_shared: bool) -> None:
        """*is_shared*: equal on all ranks for sure (a scheduler), so that one copy of the objects is enough."""
        self._name = name
        self._value = value.value if isinstance(value, PerRank) else value
        self._is_own = isinstance(value, PerRank)
        self._rank = rank
        self._world_size = world_size
        self._key = f"steadyrun.{name}" if is_shared else rank_key(rank, name)
        self._first_key = f"steadyrun.{name}" if is_shared else rank_key(0, name)
        self._structure: Any = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._fresh: dict[str, torch.Tensor] = {}
        self._saved: Saved | None = None
        self.shards: list[Shard] = []
        self.leaves: list[Leaf] = []
        self.not_covered: list[str] = []

    @property
    def title(self) -> str:
        return f"{self._name} ({type(self._value).__name__})"

    def refresh(self) -> bool:
        before = [s.structure for s in self.shards], [leaf.key for leaf in self.leaves]
        self.shards, self.leaves, self._tensors = [], [], {}
        self._structure = self._taken(self._value.state_dict(), (self._name,))
        self.leaves.append(Leaf(self._key, (self._key,), lambda: self._structure))
        for key, tensor in self._fresh.items():
            if key not in self._tensors:
                self._tensors[key] = tensor
                self.shards += shards_of(key, self._path_of(key), tensor) or ()
        if self._saved is not None:  # what the checkpoint lacks cannot be filled
            saved = self._saved
            self.shards = [s for s in self.shards if s.key in saved.tensors and self._owns(s.key, saved.tensors[s.key])]
        return before != ([s.structure for s in self.shards], [leaf.key for leaf in self.leaves])

    def _path_of(self, key: str) -> Path:
        return self._saved.tensors[key].path if self._saved is not None else (key,)

    def _taken(self, value: Any, path: Path) -> Any:
        """The structure of *value* without its tensors, which become shards on the way."""
        if isinstance(value, torch.Tensor):
            plain = flat_key(path)
            key = rank_key(self._rank, plain) if self._is_own else plain
            found = None if key in self._tensors else shards_of(key, (key,) if self._is_own else path, value)
            if found is None:
                return value
            self._tensors[key] = value
            self.shards += found
            return {_TENSOR: key}
        if type(value) in (dict, OrderedDict):
            out = {k: self._taken(v, (*path, k if isinstance(k, int) else str(k))) for k, v in value.items()}
            return OrderedDict(out) if isinstance(value, OrderedDict) else out
        if type(value) in (list, tuple) and any(isinstance(x, torch.Tensor | Mapping | list | tuple) for x in value):
            return type(value)(self._taken(v, (*path, i)) for i, v in enumerate(value))
        if not self._is_own and len(path) > 1:
            self.leaves.append(Leaf(flat_key(path), path, partial(_same, value)))
        return value

    def prepare(self, saved: Saved | None) -> list[str]:
        self._saved = saved
        self._fresh = {}
        if saved is not None:
            self.refresh()
            for key, tensor in saved.tensors.items():
                if self._owns(key, tensor) and key not in self._tensors:
                    self._fresh[key] = torch.zeros(tensor.shape, dtype=tensor.dtype)
        return []

    def forget(self) -> None:
        """Take back what ``prepare`` has made, when nothing was loaded."""
        self._saved, self._fresh = None, {}

    def _owns(self, key: str, tensor: SavedTensor) -> bool:
        if self._is_own:
            is_same = self._saved is not None and self._saved.world_size == self._world_size
            return is_same and key.startswith(f"{rank_key(self._rank, self._name)}.")
        return len(tensor.path) > 1 and tensor.path[0] == self._name

    def wanted_objects(self, saved: Saved) -> Iterable[str]:
        if self._key in saved and saved.world_size == self._world_size:
            yield self._key
        elif self._first_key in saved and not self._is_own:
            yield self._first_key

    def apply(self, objects: Mapping[str, Any], saved: Saved, step: int) -> list[str]:
        notes: list[str] = []
        key = next(iter(self.wanted_objects(saved)), None)
        if self._is_own and saved.world_size != self._world_size:
            self.forget()
            return [f"{self._name!r} is another thing on each of {saved.world_size} ranks: here it begins anew"]
        if key is None or key not in objects:
            self.forget()
            return [f"{self._name!r} is not in the checkpoint: it begins as the script made it"]
        if key != self._key:
            notes.append(f"{self._name!r} is rank 0's: the checkpoint is of {saved.world_size} ranks")
        self._value.load_state_dict(self._filled(objects[key]))
        self.forget()
        return notes

    def _filled(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            if set(value) == {_TENSOR}:
                return self._tensors[value[_TENSOR]]
            out = {k: self._filled(v) for k, v in value.items()}
            return OrderedDict(out) if isinstance(value, OrderedDict) else out
        if type(value) in (list, tuple):
            return type(value)(self._filled(v) for v in value)
        return value


class LoaderPart:
    """The place in the data, of one loader."""

    def __init__(self, name: str, loader: Any, rank: int, world_size: int, replica: int, replicas: int) -> None:
        self._name = name
        self._loader = loader
        self._rank = rank
        self._world_size = world_size
        self._replica = replica
        self._replicas = replicas
        self.shards: Sequence[Shard] = ()
        self.not_covered: list[str] = []
        self.leaves: list[Leaf] = []
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            state, position = self._key(rank, ""), self._key(rank, ".position")
            self.leaves = [Leaf(state, (state,), self._state), Leaf(position, (position,), self._position)]
        else:
            self.not_covered.append(
                f"the data position: {type(loader).__name__} has no state_dict (use torchdata's StatefulDataLoader, or "
                "anything with state_dict and load_state_dict)"
            )

    @property
    def title(self) -> str:
        return f"data position ({type(self._loader).__name__})"

    def _key(self, rank: int, what: str) -> str:
        return rank_key(rank, self._name + what)

    def _state(self) -> Any:
        loader = self._loader
        if _is_stateful_loader(loader) and loader._iterator is None:
            # Asking would start the workers and draw a random number before the script does.
            return loader.next_iter_state or {}
        return loader.state_dict()

    def _position(self) -> Any:
        state = self._state()
        if not isinstance(state, Mapping):
            return None
        position = read_position(self._loader, state, self._replica, self._replicas)
        if position is None:
            return None
        generator = getattr(self._loader, "generator", None)
        out = position.to_plain()
        if isinstance(generator, torch.Generator):
            out["generator"] = generator.get_state()
        return out

    def refresh(self) -> bool:
        return False

    def prepare(self, saved: Saved | None) -> list[str]:
        return []

    def wanted_objects(self, saved: Saved) -> Iterable[str]:
        if not self.leaves:
            return
        if saved.world_size == self._world_size:
            yield from (k for k in (self._key(self._rank, ""), self._key(self._rank, ".position")) if k in saved)
        else:
            yield from (k for r in range(saved.world_size) if (k := self._key(r, ".position")) in saved)

    def apply(self, objects: Mapping[str, Any], saved: Saved, step: int) -> list[str]:
        if not self.leaves:
            return []
        if saved.world_size != self._world_size:
            return self._move(objects, saved)
        state = objects.get(self._key(self._rank, ""))
        if state is None:
            return [f"the data position of {self._name!r} is not in the checkpoint: it begins anew"]
        position = objects.get(self._key(self._rank, ".position")) or {}
        self._load(state, position.get("epoch"), position.get("generator"))
        return []

    def _load(self, state: Any, epoch: int | None, generator: torch.Tensor | None) -> None:
        if epoch is not None:
            set_epoch(self._loader, epoch)
        self._loader.load_state_dict(state)
        if _is_stateful_loader(self._loader) and self._loader.next_iter_state is not None:
            _begin_quietly(self._loader, generator)

    def _move(self, objects: Mapping[str, Any], saved: Saved) -> list[str]:
        found = [objects.get(self._key(r, ".position")) for r in range(saved.world_size)]
        known = [LoaderPosition.from_plain(p) for p in found if p]
        if not known:
            return [
                f"the data position cannot be carried over from {saved.world_size} to {self._world_size} ranks: "
                f"{type(self._loader).__name__} does not tell how many samples it has given; it begins anew"
            ]
        samples = Samples.of(known)
        own = read_position(self._loader, {}, self._replica, self._replicas)
        assert own is not None
        moved = samples.move(own.replicas, own.batch_size)
        notes = list(moved.notes)
        if samples.epoch is not None:
            set_epoch(self._loader, samples.epoch)
        if hasattr(self._loader, "skip_samples"):
            self._loader.skip_samples(samples.seen)
        elif moved.batches and not self._skip(moved.batches, moved.samples or 0):
            notes.append(
                "the data position cannot be set: only the dataset could find it; data begin anew "
                "(give the loader a method skip_samples(count) that leaves out the first samples of all ranks together)"
            )
        return notes

    def _skip(self, batches: int, samples: int) -> bool:
        loader = self._loader
        if not _is_stateful_loader(loader):
            return False
        loader.load_state_dict({})
        with preserved_rng():
            iterator = loader._get_iterator()
            fresh = iterator.state_dict()
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
        state = moved_state(fresh, batches, samples)
        if state is None:
            return False
        self._load(state, None, None)
        return True


class RngPart:
    """Random numbers of this rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self.shards: Sequence[Shard] = ()
        key = rank_key(rank, "rng")
        self.leaves = [Leaf(key, (key,), capture_rng)]
        self.not_covered: list[str] = []

    def refresh(self) -> bool:
        return False

    def prepare(self, saved: Saved | None) -> list[str]:
        return []

    def wanted_objects(self, saved: Saved) -> Iterable[str]:
        rank = self._rank if saved.world_size == self._world_size else 0
        if (key := rank_key(rank, "rng")) in saved:
            yield key

    def apply(self, objects: Mapping[str, Any], saved: Saved, step: int) -> list[str]:
        state = next((objects[k] for k in self.wanted_objects(saved) if k in objects), None)
        if state is not None and saved.world_size == self._world_size:
            return restore_rng(state)
        seed = int(state["seed"]) if state is not None else torch.initial_seed()
        reseed(seed, step, self._rank)
        why = "are not in the checkpoint" if state is None else f"are of {saved.world_size} ranks"
        return [f"random numbers {why}: seeded anew from seed {seed}, step {step} and the rank"]


def _is_stateful_loader(loader: Any) -> bool:
    return all(hasattr(loader, name) for name in ("_iterator", "next_iter_state", "_get_iterator"))


def _begin_quietly(loader: Any, generator: torch.Tensor | None) -> None:
    """The iterator that continues draws no random number.

    Without this a resumed run parts from the undisturbed one: torchdata makes the iterator anew, which draws a seed
    from torch's generator that had been drawn before the checkpoint was made.
    """
    make = loader._get_iterator

    def get_iterator() -> Any:
        del loader._get_iterator
        with preserved_rng():
            iterator = make()
        own = getattr(loader, "generator", None)
        if generator is not None and isinstance(own, torch.Generator):
            own.set_state(generator)
        return iterator

    loader._get_iterator = get_iterator


def _same(value: Any) -> Any:
    return value
