"""A module's parameters, buffers and extra state under the names that they have without wrappers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel

from steadyrun.checkpoint.boxes import Box, boxes_of_range
from steadyrun.checkpoint.layout import rank_key
from steadyrun.checkpoint.parts import Leaf, Path, Saved, Shard, StateError, Watches, flat_key, shards_of

__all__ = ["FlatPiece", "ModelPart", "ParameterName"]

# Children by which wrappers hold what they wrap: FSDP1, torch.compile, activation checkpointing.
_WRAPPED: Final = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """The part of one parameter that lies in this rank's shard of an FSDP1 flat parameter.

    Attributes:
        shape: of the whole parameter.
        at: where the part begins in the shard; *numel* elements of it.
        start: number of its first element in the flattened parameter.
    """

    shape: tuple[int, ...]
    at: int
    numel: int
    start: int

    def boxes(self) -> list[Box]:
        return boxes_of_range(self.shape, self.start, self.start + self.numel)

    def shards(self, key: str, path: Path, flat: torch.Tensor, requires_grad: bool = False) -> list[Shard]:
        """Shards of the part; *flat* has its elements, and nothing else, in one dimension."""
        out = []
        for box in self.boxes():
            tensor = flat[box.at : box.at + math.prod(box.sizes)].view(box.sizes)
            out.append(Shard(key, path, tensor, self.shape, box.offsets, box.sizes, requires_grad))
        return out


@dataclass(frozen=True, slots=True)
class ParameterName:
    """What a parameter that an optimizer holds is called; several names for one flat parameter of FSDP1.

    Attributes:
        piece: for FSDP1: which part of the parameter is here. None otherwise.
        is_whole_shard: the optimizer holds the whole flat parameter, of which the piece is a part.
    """

    name: str
    piece: FlatPiece | None = None
    is_whole_shard: bool = False


class ModelPart:
    """One module, with all that its ``state_dict`` has."""

    def __init__(self, path: Path, module: nn.Module, rank: int, world_size: int) -> None:
        self._path = path
        self._module = module
        self._rank = rank
        self._world_size = world_size
        self._watches: Watches | None = None
        self._extra: list[tuple[str, nn.Module]] = []
        self._resharded: list[Any] = []
        self.shards: list[Shard] = []
        self.leaves: list[Leaf] = []
        self.names: dict[int, list[ParameterName]] = {}
        self.not_covered: list[str] = []

    @property
    def _extra_key(self) -> str:
        return rank_key(self._rank, f"extra_state.{flat_key(self._path)}")

    # -- finding -------------------------------------------------------------------------------------------------------
    def refresh(self) -> bool:
        if self._watches is not None and self._watches.holds():
            return False
        for module in self._resharded:
            module.reshard()  # after an evaluation FSDP2 keeps the root's parameters whole; no rank is asked
        if self._resharded and self._watches is not None and self._watches.holds():
            return False
        self._find()
        return True

    def _find(self) -> None:
        self._watches = Watches()
        self._extra, self._resharded = [], []
        self.shards, self.leaves, self.names = [], [], {}
        flat_ids = self._find_flat()
        group: Any = None
        for name, module in _walk(self._module, ""):
            self._watches.container(module._modules)
            if hasattr(module, "unshard") and hasattr(module, "reshard"):
                self._resharded.append(module)
                module.reshard()  # type: ignore[operator] # FSDP2 mixes its methods in
            if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
                group = module.process_group
            for own, child in module._modules.items():
                if child is not None:
                    self._watches.item(module._modules, own, child)
            self._find_parameters(name, module, flat_ids)
            self._find_buffers(name, module, _lead(group))
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                self._extra.append((name, module))
        if self._extra:
            key = self._extra_key
            self.leaves.append(Leaf(key, (key,), self._read_extra))

    def _find_parameters(self, name: str, module: nn.Module, flat_ids: set[int]) -> None:
        assert self._watches is not None
        self._watches.container(module._parameters)
        for own, parameter in module._parameters.items():
            if parameter is None or id(parameter) in flat_ids:
                continue
            full = name + own
            self._watches.item(module._parameters, own, parameter)
            self._add(full, parameter, parameter.requires_grad)
            self.names.setdefault(id(parameter), [ParameterName(full)])

    def _find_buffers(self, name: str, module: nn.Module, lead: int) -> None:
        assert self._watches is not None
        self._watches.container(module._buffers)
        # Running statistics are of the rank's own batches: no replicas, whatever their names say.
        is_own = isinstance(module, _NormBase) and not isinstance(module, SyncBatchNorm) and self._world_size > 1
        for own, buffer in module._buffers.items():
            if buffer is None or own in module._non_persistent_buffers_set:
                continue
            self._watches.item(module._buffers, own, buffer)
            if is_own and self._rank != lead:
                plain = flat_key((*self._path, name + own))
                self._add_own(rank_key(self._rank, plain), plain, buffer)
            else:
                self._add(name + own, buffer, False)

    def _add(self, name: str, value: torch.Tensor, requires_grad: bool) -> None:
        path = (*self._path, name)
        key = flat_key(path)
        found = shards_of(key, path, value, requires_grad)
        if found is None:
            raise StateError(
                f"cannot save {key!r}: {type(value).__name__} on {value.device}, {value.layout}, has no plain bytes; "
                "keep such tensors out of the module's persistent state, or give them as an object with state_dict"
            )
        self.shards.extend(found)

    def _add_own(self, key: str, plain: str, value: torch.Tensor) -> None:
        found = shards_of(key, (key,), value) or []
        for shard in found:
            shard.fallback = plain
        self.shards.extend(found)

    # -- FSDP1 ---------------------------------------------------------------------------------------------------------
    def _find_flat(self) -> set[int]:
        """Shards of all flat parameters; returns the ids of the parameters that are views into them."""
        ids: set[int] = set()
        for name, module in _walk(self._module, ""):
            handle = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
            if handle is not None:
                ids |= self._find_in(name, handle)
        return ids

    def _find_in(self, prefix: str, handle: Any) -> set[int]:
        assert self._watches is not None
        flat = handle.flat_param
        if any(e is not None for e in flat._param_extensions):
            raise StateError(
                f"cannot save {prefix or 'the module'}: FSDP1 around tensor-parallel parameters is not supported; use "
                "torch.distributed.fsdp.fully_shard"
            )
        local = getattr(flat, "_local_shard", None)
        attributes = vars(flat)
        if local is None:  # before the first forward pass
            local = flat.data
            self._watches.container(attributes)
        else:
            self._watches.item(attributes, "_local_shard", local)
        local = local.detach().view(-1)
        ids = {id(flat)}
        params = flat._params or [None] * len(flat._fqns)
        pieces: dict[tuple[int, str], tuple[FlatPiece | None, bool]] = {}
        for fqn, shape, info, param, where in zip(
            flat._fqns, flat._shapes, flat._shard_param_infos, params, flat._param_infos, strict=True
        ):
            full = prefix + _without_wrappers(fqn)
            piece = None
            if info.in_shard:
                piece = FlatPiece(tuple(shape), info.offset_in_shard, info.numel_in_shard, info.intra_param_start_idx)
            requires_grad = bool(flat.requires_grad if param is None else param.requires_grad)
            pieces[id(where.module), where.param_name] = (piece, requires_grad)
            self._add_piece(full, piece, local, requires_grad)
            if param is not None:
                ids.add(id(param))
                self.names[id(param)] = [ParameterName(full, piece or _NOTHING)]
            elif piece is not None:
                self.names.setdefault(id(flat), []).append(ParameterName(full, piece, True))
        for shared in flat._shared_param_infos:
            piece, requires_grad = pieces[id(shared.prim_module), shared.prim_param_name]
            own = f"{shared.module_name}.{shared.param_name}" if shared.module_name else shared.param_name
            self._add_piece(prefix + _without_wrappers(own), piece, local, requires_grad)
        ids |= {id(p) for p in flat._shared_params or ()}
        return ids

    def _add_piece(self, name: str, piece: FlatPiece | None, local: torch.Tensor, requires_grad: bool) -> None:
        if piece is not None:
            path = (*self._path, name)
            own = local[piece.at : piece.at + piece.numel]
            self.shards.extend(piece.shards(flat_key(path), path, own, requires_grad))

    # -- extra state ---------------------------------------------------------------------------------------------------
    def _read_extra(self) -> dict[str, Any]:
        return {name: module.get_extra_state() for name, module in self._extra}

    # -- loading -------------------------------------------------------------------------------------------------------
    def prepare(self, saved: Saved | None) -> list[str]:
        return []

    def wanted_objects(self, saved: Saved) -> Iterable[str]:
        if self._extra:
            own = self._extra_key
            first = rank_key(0, f"extra_state.{flat_key(self._path)}")
            yield own if own in saved and saved.world_size == self._world_size else first

    def apply(self, objects: Mapping[str, Any], saved: Saved, step: int) -> list[str]:
        notes: list[str] = []
        values: Mapping[str, Any] = {}
        for key in self.wanted_objects(saved):
            values = objects.get(key) or {}
        for name, module in self._extra:
            if name in values:
                module.set_extra_state(values[name])
            else:
                notes.append(f"the extra state of {name.rstrip('.') or 'the model'} is not in the checkpoint")
        return notes


_NOTHING: Final = FlatPiece((0,), 0, 0, 0)


def _walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """All modules, a shared one once per name; with what the names of its own tensors begin with, "" or "a.b."."""
    yield name, module
    for own, child in module._modules.items():
        if child is None:
            continue
        is_wrapped = own in _WRAPPED or (own == "module" and isinstance(module, DistributedDataParallel | DataParallel))
        yield from _walk(child, name if is_wrapped else f"{name}{own}.")


def _without_wrappers(name: str) -> str:
    return ".".join(p for p in name.split(".") if p not in _WRAPPED)


def _lead(group: Any) -> int:
    """The rank whose buffers stand for all ranks' when the world changes."""
    if group is None or not dist.is_available() or not dist.is_initialized():
        return 0
    return min(dist.get_process_group_ranks(group))
