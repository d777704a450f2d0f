"""All that a training run is made of, as tensors and objects that can be saved, and put back.

Names follow ``torch.distributed.checkpoint.state_dict``: wrappers (DDP, FSDP, torch.compile, activation checkpointing)
leave no trace in them, optimizer state is filed under the name of its parameter. Nothing is copied and no other rank is
asked: a captured tensor is an alias of the live local shard, also for FSDP1, whose flattened shards are named as boxes.

To load::

    state.prepare_to_load(Saved.from_metadata(metadata, world_size))     # or from_layout, for a snapshot
    wanted = state.load_plan_state_dict()                                # fill it; or fill targets()
    notes = state.apply_loaded(wanted, world_size, step)
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from steadyrun.checkpoint.layout import Entry, Layout, ObjectEntry, place
from steadyrun.checkpoint.modelstate import ModelPart, ParameterName
from steadyrun.checkpoint.optimizerstate import OptimizerPart, unwrapped
from steadyrun.checkpoint.parts import BoxedTensor, Leaf, Part, Saved, Shard, StateError, dtype_name
from steadyrun.checkpoint.plainstate import LoaderPart, PerRank, PlainPart, RngPart

__all__ = ["Captured", "PerRank", "Saved", "State", "StateError"]

_RESERVED: Final = ("model", "optimizer", "scheduler", "scaler", "loader", "rng", "steadyrun")


@dataclass(frozen=True, slots=True)
class Captured:
    """The state of this rank at one moment.

    Attributes:
        tensors: aliases of the live local shards, in the order of the layout's entries: copy before they change.
        objects: in the order of the layout's objects; pickle before anything changes.
        layout: the same object as long as the structure stays.
    """

    tensors: list[torch.Tensor]
    objects: list[Any]
    layout: Layout
    _known: dict[Any, bytes] = field(default_factory=dict, repr=False)

    def blobs(self) -> list[bytes]:
        """What ``torch.save`` makes of each object; of numbers and texts that were saved before, the same bytes again.

        An optimizer with a group per layer has more than a thousand settings, which take 0.1 ms or more each.
        """
        out: list[bytes] = []
        used: dict[Any, bytes] = {}
        for value in self.objects:
            name = _name_of(value)
            blob = None if name is None else self._known.get(name) or used.get(name)
            if blob is None:
                buffer = io.BytesIO()
                torch.save(value, buffer)
                blob = buffer.getvalue()
            if name is not None:
                used[name] = blob
            out.append(blob)
        self._known.clear()
        self._known.update(used)  # what has not been seen this time is not likely to come again
        return out


class State:
    """What belongs to a run on this rank."""

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        scaler: Any = None,
        extra: Mapping[str, Any] | None = None,
        rank: int = 0,
        world_size: int = 1,
        process_group: Any = None,
    ) -> None:
        """Nothing is called on what is given here, and no memory is taken.

        Args:
            model, optimizer, loader: one, or a mapping or list of them.
            extra: anything more with ``state_dict`` and ``load_state_dict``, modules and optimizers included; what is
                another thing on each rank inside ``PerRank``.
            process_group: of the ranks that read different data, where neither a sampler nor a wrapper tells.

        Raises:
            StateError: something that has no state, or a name that is taken.
        """
        self._rank = rank
        self._world_size = world_size
        self._models: list[ModelPart] = []
        self._optimizers: list[OptimizerPart] = []
        self._named: dict[str, Any] = {}
        self._layout: Layout | None = None
        self._structure: tuple[Any, ...] = ()
        self._saved: Saved | None = None
        self._wanted_keys: tuple[str, ...] = ()
        self._known_blobs: dict[Any, bytes] = {}
        self._modules = _named("model", model)
        replica, replicas = _data_place(self._modules.values(), process_group, rank, world_size)
        self._loaders: list[LoaderPart] = []
        plain: list[PlainPart] = []
        for path, module in self._modules.items():
            self._add_model(path, module)
        self._add_optimizers(optimizer)
        for name, value in (("scheduler", scheduler), ("scaler", scaler)):
            for path, one in _named(name, value).items():
                plain.append(self._plain(".".join(path), one, True))
        for name, value in (extra or {}).items():
            if name in _RESERVED:
                raise StateError(f"cannot save something under the name {name!r}: it has a meaning already; rename it")
            if value is None:
                continue
            if isinstance(value, nn.Module):
                self._add_model((name,), value)
            elif isinstance(value, Optimizer):
                self._optimizers.append(self._optimizer((name,), [value]))
            else:
                plain.append(self._plain(name, value, False))
        for path, one in _named("loader", loader).items():
            self._loaders.append(LoaderPart(".".join(path), one, rank, world_size, replica, replicas))
        self._plain_parts = plain
        # Random numbers are put back last: what comes before may draw some.
        self._parts: list[Part] = [*self._models, *self._optimizers, *plain, *self._loaders, RngPart(rank, world_size)]
        self._not_covered = self._find_gaps(
            model, optimizer, scheduler, (plain or None) if loader is None else loader, scaler
        )

    def _add_model(self, path: tuple[str, ...], module: Any) -> None:
        if not isinstance(module, nn.Module):
            raise StateError(
                f"cannot save {'.'.join(path)!r}: a {type(module).__name__} is no torch.nn.Module; give what has "
                "state_dict and load_state_dict under a name of its own"
            )
        self._models.append(ModelPart(path, module, self._rank, self._world_size))

    def _add_optimizers(self, optimizer: Any) -> None:
        if isinstance(optimizer, list | tuple):
            self._optimizers.append(self._optimizer(("optimizer",), optimizer))
            return
        for path, one in _named("optimizer", optimizer).items():
            self._optimizers.append(self._optimizer(path, [one]))

    def _optimizer(self, path: tuple[str, ...], optimizers: Sequence[Any]) -> OptimizerPart:
        for one in optimizers:
            if unwrapped(one) is None:
                raise StateError(
                    f"cannot save {'.'.join(path)!r}: a {type(one).__name__} is no torch.optim.Optimizer; give what "
                    "has state_dict and load_state_dict under a name of its own"
                )
        return OptimizerPart(path, optimizers, self._parameter_names, self._rank, self._world_size)

    def _parameter_names(self) -> dict[int, list[ParameterName]]:
        out: dict[int, list[ParameterName]] = {}
        for part in self._models:
            for key, names in part.names.items():
                out.setdefault(key, names)
        return out

    def _plain(self, name: str, value: Any, is_shared: bool) -> PlainPart:
        inner = value.value if isinstance(value, PerRank) else value
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(inner, method, None)):
                raise StateError(f"cannot save {name!r}: a {type(inner).__name__} has no method {method}")
        return PlainPart(name, value, self._rank, self._world_size, is_shared)

    # -- saving --------------------------------------------------------------------------------------------------------
    def capture(self) -> Captured:
        """The state as it is now. No collective, no copy, nothing changed; for the training thread, between steps.

        Raises:
            StateError: something that cannot be saved as it is.
        """
        self._refresh()
        assert self._layout is not None
        tensors = [s.tensor for part in self._parts for s in part.shards]
        return Captured(tensors, [leaf.read() for leaf in self._leaves()], self._layout, self._known_blobs)

    def _refresh(self) -> None:
        is_changed = False
        for part in self._parts:
            is_changed = part.refresh() or is_changed
        if is_changed or self._layout is None:
            shards, leaves = self._shards(), self._leaves()
            structure = (*(s.structure for s in shards), None, *(leaf.key for leaf in leaves))
            if structure != self._structure or self._layout is None:
                self._structure = structure
                self._layout = self._laid_out(shards, leaves)

    def _shards(self) -> list[Shard]:
        return [s for part in self._parts for s in part.shards]

    def _leaves(self) -> list[Leaf]:
        return [leaf for part in self._parts for leaf in part.leaves]

    def _laid_out(self, shards: Sequence[Shard], leaves: Sequence[Leaf]) -> Layout:
        sizes = [s.tensor.numel() * s.tensor.element_size() for s in shards]
        entries = tuple(
            Entry(s.key, s.path, dtype_name(s.tensor.dtype), s.shape, s.offsets, s.sizes, at, size, s.requires_grad)
            for s, at, size in zip(shards, place(sizes), sizes, strict=True)
        )
        objects = tuple(ObjectEntry(leaf.key, leaf.path) for leaf in leaves)
        details = {"covered": list(self.covered), "not_covered": list(self.not_covered)}
        return Layout(self._rank, self._world_size, entries, objects, details)

    # -- loading -------------------------------------------------------------------------------------------------------
    def prepare_to_load(self, saved: Saved | None = None) -> list[str]:
        """Make the memory that will be filled: an optimizer that has not stepped has none for its state.

        Args:
            saved: what there is to load; None: the same structure as this rank's, after a step of training.

        Returns:
            Sentences to say.
        """
        self._saved = saved
        for model in self._models:
            model.refresh()  # the optimizers need its names
        return [note for part in self._parts for note in part.prepare(saved)]

    def targets(self) -> list[torch.Tensor]:
        """The live tensors to fill, in the order of the entries of ``capture().layout``."""
        self._refresh()
        return [s.tensor for s in self._shards()]

    def load_plan_state_dict(self) -> dict[str, Any]:
        """What a DCP load planner fills in place: live tensors by flat key; ``None`` where an object comes from."""
        self._refresh()
        saved = self._saved or self._same_as_here()
        out: dict[str, Any] = {}
        for shard in self._shards():
            key = self._key_in(saved, shard)
            if shard.live is not None:
                out[key] = shard.live
            elif shard.sizes == shard.shape:
                out[key] = shard.tensor
            else:
                if key not in out:
                    out[key] = BoxedTensor(shard.shape, shard.tensor.dtype)
                out[key].add_box(shard.offsets, shard.sizes, shard.tensor)
        self._wanted_keys = tuple(key for part in self._parts for key in part.wanted_objects(saved))
        out.update(dict.fromkeys(self._wanted_keys))
        return out

    def _key_in(self, saved: Saved, shard: Shard) -> str:
        if shard.fallback is not None and (saved.world_size != self._world_size or shard.key not in saved):
            return shard.fallback
        return shard.key

    def _same_as_here(self) -> Saved:
        assert self._layout is not None
        return Saved.from_layout(self._layout)

    def cancel_load(self) -> None:
        """Take back what ``prepare_to_load`` has made, when nothing could be loaded after all."""
        self._saved = None
        for part in self._optimizers:
            part.forget()
        for plain in self._plain_parts:
            plain.forget()

    def apply_loaded(self, loaded: Mapping[str, Any], from_world_size: int, step: int) -> list[str]:
        """``apply`` with the objects of a filled ``load_plan_state_dict``."""
        objects = {k: loaded[k] for k in self._wanted_keys if k in loaded}
        return self.apply(objects, from_world_size, step)

    def apply(self, objects: Mapping[str, Any], from_world_size: int, step: int) -> list[str]:
        """Put back all that is no tensor, after the tensors have been filled.

        Args:
            objects: by key.
            from_world_size: ranks of the run that saved.
            step: that the state is of.

        Returns:
            Sentences to say: what could not be continued exactly.
        """
        saved = self._saved
        if saved is None:
            self._refresh()
            saved = self._same_as_here()
            if from_world_size != self._world_size:
                saved = Saved(from_world_size, saved.tensors, {k: (k,) for k in objects})
        notes = [note for part in self._parts for note in part.apply(objects, saved, step)]
        self._saved = None
        return notes

    # -- what is covered -----------------------------------------------------------------------------------------------
    @property
    def covered(self) -> tuple[str, ...]:
        """What is saved, in words."""
        names = [".".join(path) for path in self._modules]
        out = []
        if names:
            out.append(f"parameters and buffers of {', '.join(names)}")
        if self._optimizers:
            out.append("optimizer state, step counts and settings")
        out += [p.title for p in self._plain_parts]
        out += [p.title for p in self._loaders if p.leaves]
        out.append("random numbers of Python, NumPy and torch")
        return tuple(out)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """What would begin anew after a resume, in sentences."""
        return (*self._not_covered, *(text for part in self._parts for text in part.not_covered))

    def _find_gaps(self, model: Any, optimizer: Any, scheduler: Any, loader: Any, scaler: Any) -> list[str]:
        out = []
        if model is None:
            out.append("no model is given: its parameters are not saved")
        if optimizer is None:
            out.append("no optimizer is given: its moments are not saved")
        if loader is None:
            out.append("no loader is given, nor anything else that could hold the data position")
        if scheduler is None and _is_scheduled(optimizer):
            out.append("the optimizer has a learning-rate scheduler, which is not given")
        if scaler is None and torch.is_autocast_enabled() and torch.get_autocast_gpu_dtype() is torch.float16:
            out.append("autocast to float16 is on and no gradient scaler is given")
        return out

    @property
    def device_type(self) -> str:
        """Of the parameters: ``cpu``, ``cuda``, ..."""
        for module in self._modules.values():
            for parameter in module.parameters():
                return str(parameter.device.type)
        return "cpu"


def _name_of(value: Any) -> Any:
    """Equal exactly for values that have the same bytes; None for all but numbers, texts and sequences of them."""
    kind = type(value)
    if kind is float:
        return kind, value.hex()  # tells 0.0 from -0.0, and nan equals nan
    if kind in (int, bool, str, bytes, type(None)):
        return kind, value
    if kind in (list, tuple):
        names = tuple(_name_of(v) for v in value)
        return None if None in names else (kind, names)
    return None


def _named(name: str, value: Any) -> dict[tuple[str, ...], Any]:
    """Path to each of one thing, a mapping, or a list of things."""
    if value is None:
        return {}
    if isinstance(value, nn.Module):  # ModuleDict and ModuleList are modules
        return {(name,): value}
    if isinstance(value, Mapping):
        return {(name, str(k)): v for k, v in value.items()}
    if isinstance(value, list | tuple):
        return {(name, str(i)): v for i, v in enumerate(value)}
    return {(name,): value}


def _data_place(modules: Any, process_group: Any, rank: int, world_size: int) -> tuple[int, int]:
    """(number, count) of this rank among those that read different data, as wrappers tell."""
    if not dist.is_available() or not dist.is_initialized():
        return rank, world_size
    if process_group is not None:
        return dist.get_rank(process_group), dist.get_world_size(process_group)
    for module in modules:
        for inner in module.modules():
            if isinstance(inner, DistributedDataParallel):
                return dist.get_rank(inner.process_group), dist.get_world_size(inner.process_group)
            if isinstance(inner, FullyShardedDataParallel):
                return rank, world_size  # with hybrid sharding the group is a part of those that read different data
    return rank, world_size


def _is_scheduled(optimizer: Any) -> bool:
    """torch's schedulers wrap ``step`` on the instance and mark it."""
    for one in _named("optimizer", optimizer).values():
        if hasattr(vars(one).get("step"), "_wrapped_by_lr_sched"):
            return True
    return False
