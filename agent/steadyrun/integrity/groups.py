"""What is compared with whom: found from the model and its optimizer, without a message to any other rank.

| tensor | compared |
|---|---|
| parameter under DDP | with the ranks of its process group |
| DTensor (FSDP2, HSDP, tensor parallel) | shard by shard, along the mesh dimensions that replicate it |
| FSDP1 | as its strategy says: replicas for NO_SHARD and HYBRID_SHARD |
| parameter under ZeroRedundancyOptimizer | with the ranks of its group; its owner, who sent it, is named |
| optimizer state | with whom the parameter is; ZeRO's only at rest, on its owner |
| master weights that only the optimizer knows | at rest |
| buffer | SyncBatchNorm's, and what the user names; all others may differ by design |
| anything else | at rest |

*At rest* needs no replica: what an optimizer step left must be what the next one finds. A rank works out its own plan;
two ranks compare a tensor only if both plans say so, and its size is equal.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

__all__ = ["Comparison", "Kind", "World", "plan"]

# Names that wrappers put into a parameter's path: the same tensor has one name with and without them.
_WRAPPERS: Final = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})


class Kind(enum.Enum):
    PARAMETER = "parameter"
    OPTIMIZER = "optimizer"
    MASTER = "master"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class World:
    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """One tensor of this rank.

    Attributes:
        name: equal on all ranks that hold a replica; ``layer.weight``, ``optimizer.layer.weight.exp_avg``.
        ranks: global ranks that hold the same bytes, this one among them, ascending; only this one: no replica.
        owner: the rank that computes the tensor and sends it to the others; None where each computes it.
        at_rest: nothing but an optimizer step may change it.
        read: the tensor at present, this rank's shard; None when it is gone.
    """

    name: str
    kind: Kind
    ranks: tuple[int, ...]
    owner: int | None = None
    at_rest: bool = True
    read: Callable[[], torch.Tensor | None] = field(compare=False, repr=False, kw_only=True)

    @property
    def has_replicas(self) -> bool:
        return len(self.ranks) > 1


@dataclass(frozen=True, slots=True)
class _Known:
    """A parameter that was found in a model."""

    name: str
    ranks: tuple[int, ...]


def plan(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    world: World | None = None,
    *,
    buffers: Sequence[str] = (),
    replicas: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Comparison, ...]:
    """What this rank hashes, and with whom each tensor is compared; sorted by name.

    Optimizer state exists after the first step: to be called again then.

    Args:
        model: one, or several by what their names shall begin with.
        optimizer: one or several.
        world: of the job; by default of torch.distributed.
        buffers: names of buffers to compare, with ``*`` and ``?``.
        replicas: ranks that hold the same bytes, by patterns of names: overrules what is found.
    """
    world = world or _present_world()
    models = {"": model} if isinstance(model, nn.Module) else model
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    finder = _Finder(world, tuple(buffers), dict(replicas or {}))
    for prefix, one in models.items():
        finder.find_in_model(one, f"{prefix}." if prefix else "")
    for number, one_optimizer in enumerate(optimizers):
        finder.find_in_optimizer(one_optimizer, "optimizer" if len(optimizers) == 1 else f"optimizer{number}")
    return tuple(sorted(finder.found.values(), key=lambda c: c.name))


def _present_world() -> World:
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    return World(0, 1)


class _Finder:
    def __init__(self, world: World, buffers: tuple[str, ...], replicas: dict[str, Sequence[int]]) -> None:
        self._world = world
        self._own = (world.rank,)
        self._buffers = buffers
        self._given = replicas
        self._known: dict[int, _Known] = {}
        self.found: dict[str, Comparison] = {}

    # -- models --------------------------------------------------------------------------------------------------------
    def find_in_model(self, model: nn.Module, prefix: str) -> None:
        for name, module, ranks, ignored in self._walk(model, prefix, self._own, frozenset()):
            self._find_flat(name, module)
            for own, parameter in module._parameters.items():
                if parameter is None or id(parameter) in self._known:
                    continue
                here = self._ranks_of(parameter, self._own if name + own in ignored else ranks)
                self._known[id(parameter)] = _Known(name + own, here)
                self._add(name + own, Kind.PARAMETER, here, _reader(module._parameters, own), parameter)
            for own, buffer in module._buffers.items():
                if buffer is not None and self._is_compared(module, name + own):
                    here = self._ranks_of(buffer, ranks)
                    read = _reader(module._buffers, own)
                    self._add(name + own, Kind.BUFFER, here, read, buffer, at_rest=False)

    def _walk(
        self, module: nn.Module, name: str, ranks: tuple[int, ...], ignored: frozenset[str]
    ) -> Iterator[tuple[str, nn.Module, tuple[int, ...], frozenset[str]]]:
        """All modules, with the ranks of the wrapper around them and the names that it leaves alone."""
        ddp = module if isinstance(module, DistributedDataParallel) else _replicated(module)
        if ddp is not None:
            ranks = _ranks_in(ddp.process_group)
            ignored = frozenset(name + n for n in ddp.parameters_to_ignore)
        yield name, module, ranks, ignored
        for own, child in module._modules.items():
            if child is None:
                continue
            is_wrapped = own in _WRAPPERS or (
                own == "module" and isinstance(module, DistributedDataParallel | DataParallel)
            )
            yield from self._walk(child, name if is_wrapped else f"{name}{own}.", ranks, ignored)

    def _is_compared(self, module: nn.Module, name: str) -> bool:
        if any(fnmatchcase(name, pattern) for pattern in self._buffers):
            return True
        return isinstance(module, nn.SyncBatchNorm)

    def _find_flat(self, name: str, module: nn.Module) -> None:
        """FSDP1's flat parameter, and the parameters that are views into it."""
        handle = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if flat is None or not hasattr(flat, "_fqns"):
            return
        strategy = str(getattr(getattr(module, "sharding_strategy", None), "name", ""))
        if strategy == "NO_SHARD":
            ranks = _ranks_in(module.process_group)
        elif strategy.lstrip("_").startswith("HYBRID_SHARD"):
            ranks = _ranks_in(module._inter_node_pg)
        else:
            ranks = self._own
        full = f"{name}_flat_param"
        self._known[id(flat)] = _Known(full, ranks)
        for own, parameter in zip(flat._fqns, flat._params or (), strict=False):
            if parameter is not None:
                self._known[id(parameter)] = _Known(name + _without_wrappers(own), ranks)
        self._add(full, Kind.PARAMETER, ranks, lambda: getattr(flat, "_local_shard", flat.data), flat)

    # -- optimizers ----------------------------------------------------------------------------------------------------
    def find_in_optimizer(self, optimizer: torch.optim.Optimizer, prefix: str) -> None:
        owners = _owners(optimizer)
        inner = getattr(optimizer, "optim", None) if owners is not None else optimizer
        if owners is not None:
            self._name_owners(owners)
        if not isinstance(inner, torch.optim.Optimizer):
            return
        for g, group in enumerate(inner.param_groups):
            for p, parameter in enumerate(group["params"]):
                known = self._known.get(id(parameter))
                if known is None:
                    known = _Known(f"{prefix}.group{g}.{p}", self._ranks_of(parameter, self._own))
                    self._add(known.name, Kind.MASTER, known.ranks, _holder(parameter), parameter)
                    name = known.name
                else:
                    name = f"{prefix}.{known.name}"
                ranks = self._own if owners is not None else known.ranks
                owner = None if owners is None else self._world.rank
                self._find_state(inner, parameter, name, ranks, owner)

    def _find_state(
        self,
        optimizer: torch.optim.Optimizer,
        parameter: torch.Tensor,
        name: str,
        ranks: tuple[int, ...],
        owner: int | None,
    ) -> None:
        for path, value in _tensors_in(optimizer.state.get(parameter, {}), ()):
            full = ".".join((name, *map(str, path)))
            here = self._ranks_of(value, ranks if _is_plain(parameter) or not value.dim() else self._own)
            self._add(full, Kind.OPTIMIZER, here, _state_reader(optimizer, parameter, path), value, owner=owner)

    def _name_owners(self, owners: Mapping[int, tuple[int, tuple[int, ...]]]) -> None:
        for identity, (owner, ranks) in owners.items():
            known = self._known.get(identity)
            if known is None or known.name not in self.found:
                continue
            before = self.found[known.name]
            here = before.ranks if before.has_replicas else ranks
            self.found[known.name] = Comparison(before.name, before.kind, here, owner, before.at_rest, read=before.read)

    # -- one tensor ----------------------------------------------------------------------------------------------------
    def _ranks_of(self, value: torch.Tensor, around: tuple[int, ...]) -> tuple[int, ...]:
        """Who holds the same bytes: by placements, else by what is *around* (the group of a wrapper)."""
        if _is_plain(value):
            return around
        if len(around) > 1:  # DDP over tensor parallelism: each shard has its own group
            return around
        mesh, placements = value.device_mesh, value.placements  # type: ignore[attr-defined]
        at = mesh.get_coordinate()
        if at is None or any(p.is_partial() for p in placements):
            return ()
        kept = tuple(slice(None) if p.is_replicate() else c for p, c in zip(placements, at, strict=True))
        return tuple(sorted(int(r) for r in mesh.mesh[kept].reshape(-1).tolist()))

    def _add(
        self,
        name: str,
        kind: Kind,
        ranks: tuple[int, ...],
        read: Callable[[], torch.Tensor | None],
        value: torch.Tensor,
        *,
        owner: int | None = None,
        at_rest: bool = True,
    ) -> None:
        for pattern, given in self._given.items():
            if fnmatchcase(name, pattern) and self._world.rank in given:
                ranks = tuple(sorted(given))
        if not ranks or not _has_bytes(value) or name in self.found:
            return
        self.found[name] = Comparison(name, kind, ranks, owner, at_rest, read=read)


def _is_plain(value: torch.Tensor) -> bool:
    return not (hasattr(value, "placements") and hasattr(value, "device_mesh"))


def _has_bytes(value: torch.Tensor) -> bool:
    """Whether there is something to hash: an uneven shard may be empty, a lazy parameter may not exist yet."""
    local = getattr(value, "_local_tensor", value)
    if is_lazy(local) or hasattr(local, "__tensor_flatten__"):
        return False
    return (
        local.layout is torch.strided and not local.is_quantized and local.device.type != "meta" and local.numel() > 0
    )


def _ranks_in(group: Any) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _replicated(module: nn.Module) -> Any:
    """The DDP behind a module that torch.distributed._composable.replicate took in; None for others."""
    try:
        from torch.distributed._composable.replicate import replicate
    except ImportError:
        return None
    try:
        state = replicate.state(module)
    except AssertionError:
        return None
    reference = getattr(state, "_ddp_weakref", None)
    return reference() if reference is not None else None


def _owners(optimizer: torch.optim.Optimizer) -> dict[int, tuple[int, tuple[int, ...]]] | None:
    """By parameter (id): the rank that updates it, and all that receive it; None for what is not ZeRO-1 of torch."""
    if type(optimizer).__name__ != "ZeroRedundancyOptimizer":
        return None
    group: Any = getattr(optimizer, "process_group", None)
    by_parameter: Mapping[torch.Tensor, int] = getattr(optimizer, "_param_to_rank", {})
    ranks = _ranks_in(group)
    return {id(p): (dist.get_global_rank(group, r), ranks) for p, r in by_parameter.items()}


def _tensors_in(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors_in(one, (*path, key))
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _tensors_in(one, (*path, number))


def _reader(where: Mapping[str, torch.Tensor | None], own: str) -> Callable[[], torch.Tensor | None]:
    return lambda: where.get(own)


def _holder(value: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    return lambda: value


def _state_reader(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, path: tuple[Any, ...]
) -> Callable[[], torch.Tensor | None]:
    def read() -> torch.Tensor | None:
        value: Any = optimizer.state.get(parameter, {})
        try:
            for key in path:
                value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
        return value if isinstance(value, torch.Tensor) else None

    return read


def _without_wrappers(name: str) -> str:
    return ".".join(p for p in name.split(".") if p not in _WRAPPERS)
