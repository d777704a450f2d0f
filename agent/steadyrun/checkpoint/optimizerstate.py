"""Optimizers: their state under the names of the parameters, made ready for a load without a step being taken."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from steadyrun.checkpoint.layout import PathItem, rank_key
from steadyrun.checkpoint.modelstate import ParameterName
from steadyrun.checkpoint.parts import (
    Leaf,
    Path,
    Saved,
    SavedTensor,
    Shard,
    StateError,
    Watches,
    chunk_of,
    flat_key,
    shards_of,
)

__all__ = ["OptimizerPart", "predicted_state", "unwrapped"]

# What torch's optimizers and schedulers keep on the instance beside plain numbers: nothing that a step would change.
_KNOWN: Final = {"defaults", "state", "param_groups", "step", "zero_grad"}


def unwrapped(optimizer: Any) -> Optimizer | None:
    """The optimizer that holds the state: what accelerate or ZeroRedundancyOptimizer wrap; None: none of torch."""
    inner = optimizer
    for _ in range(4):
        if isinstance(inner, Optimizer) and type(inner).state_dict is Optimizer.state_dict:
            return inner
        below = getattr(inner, "optimizer", None) or getattr(inner, "optim", None)
        if not isinstance(below, Optimizer):
            break
        inner = below
    return inner if isinstance(inner, Optimizer) else None


class OptimizerPart:
    """One optimizer, or several that share one name (their groups follow each other, as torch's functions have it)."""

    def __init__(
        self,
        path: Path,
        optimizers: Sequence[Optimizer],
        names: Callable[[], Mapping[int, list[ParameterName]]],
        rank: int,
        world_size: int,
    ) -> None:
        self._path = path
        self._outer = list(optimizers)
        self._names = names
        self._rank = rank
        self._world_size = world_size
        self._watches: Watches | None = None
        self._before: list[tuple[Optimizer, dict[Any, Any]]] = []
        self.shards: list[Shard] = []
        self.leaves: list[Leaf] = []
        self.not_covered: list[str] = []

    # -- finding -------------------------------------------------------------------------------------------------------
    def refresh(self) -> bool:
        if self._watches is not None and self._watches.holds():
            return False
        self._find()
        return True

    def _find(self) -> None:
        self._watches = Watches()
        self.shards, self.leaves = [], []
        names = self._names()
        seen: set[str] = set()
        number = 0
        for outer in self._outer:
            inner = unwrapped(outer) or outer
            self._watches.container(inner.state)
            for group in outer.param_groups:
                self._find_group(number, group, names)
                number += 1
            for group in inner.param_groups:
                for i, parameter in enumerate(group["params"]):
                    self._find_state(inner.state, parameter, self._named(parameter, names, number, i), seen)
        for i, optimizer in enumerate(self._own_kinds()):
            key = self._more_key(i)
            self.leaves.append(Leaf(key, (key,), partial(_more_of, optimizer)))

    def _own_kinds(self) -> list[Optimizer]:
        """Optimizers that keep more than torch's do: what their ``state_dict`` has beside."""
        return [o for o in self._inner() if type(o).state_dict is not Optimizer.state_dict and _more_of(o)]

    def _more_key(self, number: int) -> str:
        return f"steadyrun.{flat_key(self._path)}.more" + (f".{number}" if number else "")

    def _find_group(self, number: int, group: dict[str, Any], names: Mapping[int, list[ParameterName]]) -> None:
        assert self._watches is not None
        self._watches.container(group)
        self._watches.container(group["params"])
        path = (*self._path, "param_groups", number)
        for key, value in group.items():
            at = (*path, key)
            if key == "params":
                own = [n.name for i, p in enumerate(value) for n in self._named(p, names, number, i)]
                self.leaves.append(Leaf(flat_key(at), at, partial(_same, own)))
            elif isinstance(value, torch.Tensor):
                self._watches.item(group, key, value)
                self.shards.extend(shards_of(flat_key(at), at, value) or ())
            else:
                self.leaves.append(Leaf(flat_key(at), at, partial(group.__getitem__, key)))

    def _named(
        self, parameter: Any, names: Mapping[int, list[ParameterName]], group: int, index: int
    ) -> list[ParameterName]:
        return names.get(id(parameter)) or [ParameterName(f"{group}.{index}")]

    def _find_state(self, state: Any, parameter: Any, names: list[ParameterName], seen: set[str]) -> None:
        assert self._watches is not None
        if parameter not in state:
            return
        own = state[parameter]
        for name in names:
            if name.name in seen:
                raise StateError(
                    f"cannot save the optimizers: two of them hold {name.name!r}; give them as a mapping with names"
                )
            seen.add(name.name)
        self._watches.container(own)
        for container, key, value, rest in _values(own, ()):
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor:
                if isinstance(container, Mapping):
                    self._watches.item(container, key, value)
                else:
                    self._watches.item(_Indexed(container), key, value)
            elif isinstance(container, Sequence):
                self._watches.container(container)
            for name in names:
                path = (*self._path, "state", name.name, *rest)
                shards = self._state_shards(path, parameter, name, value) if is_tensor else None
                if shards is None:
                    self.leaves.append(Leaf(flat_key(path), path, partial(_read, container, key)))
                else:
                    self.shards.extend(shards)

    def _state_shards(
        self, path: Path, parameter: torch.Tensor, name: ParameterName, value: torch.Tensor
    ) -> list[Shard] | None:
        key = flat_key(path)
        if name.piece is not None and value.dim() > 0:
            piece = name.piece
            if name.is_whole_shard and value.numel() == parameter.numel():
                return piece.shards(key, path, value.detach().view(-1)[piece.at : piece.at + piece.numel])
            if not name.is_whole_shard and value.numel() == piece.numel:
                return piece.shards(key, path, value.detach().reshape(-1)) if value.is_contiguous() else None
            own = rank_key(self._rank, key)  # of another shape: nobody could tell where in the whole it belongs
            return shards_of(own, (own,), value)
        if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.dim() > 0:
            sizes, offsets = chunk_of(parameter)
            if tuple(value.shape) == sizes != tuple(parameter.shape):  # an optimizer that works on local shards
                found = shards_of(key, path, value)
                for shard in found or ():
                    shard.shape, shard.offsets, shard.live = tuple(parameter.shape), offsets, None
                return found
        return shards_of(key, path, value)

    # -- loading -------------------------------------------------------------------------------------------------------
    def prepare(self, saved: Saved | None) -> list[str]:
        """Make the optimizers' state as the checkpoint has it; None: as after a step. No step is taken for it."""
        notes: list[str] = []
        self.forget()
        self._before = [(o, {p: dict(s) for p, s in o.state.items()}) for o in self._inner()]
        names = self._names()
        wanted = self._saved_states(saved) if saved is not None else {}
        for outer in self._outer:
            inner = unwrapped(outer) or outer
            templates = predicted_state(inner)
            if templates is None and saved is None and not inner.state:
                notes.append(f"memory for the state of {type(inner).__name__} is made when it has taken its first step")
            for number, group in enumerate(inner.param_groups):
                for i, parameter in enumerate(group["params"]):
                    template = (templates or {}).get(id(parameter), {})
                    if saved is None:
                        if template and not inner.state.get(parameter):
                            inner.state[parameter] = {k: _made(t, parameter, group, k) for k, t in template.items()}
                        continue
                    for name in self._named(parameter, names, number, i):
                        self._make(inner, parameter, group, name, wanted.get(name.name, {}), template)
        self._watches = None
        return notes

    def _inner(self) -> list[Optimizer]:
        return [unwrapped(outer) or outer for outer in self._outer]

    def forget(self) -> None:
        """Take back what ``prepare`` has made, when nothing was loaded."""
        for optimizer, states in self._before:
            for parameter in [p for p in optimizer.state if p not in states]:
                del optimizer.state[parameter]
            for parameter, state in states.items():
                own = optimizer.state[parameter]
                for key in [k for k in own if k not in state]:
                    del own[key]
        self._before = []
        self._watches = None

    def _saved_states(self, saved: Saved) -> dict[str, dict[Path, SavedTensor | None]]:
        """By parameter: what the checkpoint holds, by the way to it; None for objects."""
        out: dict[str, dict[Path, SavedTensor | None]] = {}
        head = (*self._path, "state")
        paths: list[tuple[Path, SavedTensor | None]] = [(t.path, t) for t in saved.tensors.values()]
        paths += [(path, None) for path in saved.objects.values()]
        for path, tensor in paths:
            if path[: len(head)] == head and len(path) > len(head) + 1:
                out.setdefault(str(path[len(head)]), {})[path[len(head) + 1 :]] = tensor
        return out

    def _make(
        self,
        optimizer: Optimizer,
        parameter: torch.Tensor,
        group: Mapping[str, Any],
        name: ParameterName,
        wanted: Mapping[Path, SavedTensor | None],
        template: Mapping[str, Any],
    ) -> None:
        if name.piece is not None and name.piece.numel == 0:
            return
        for rest, tensor in wanted.items():
            state = optimizer.state[parameter]
            if tensor is None:
                if rest[0] not in state:
                    _set(state, rest, None)  # until it is put back
                continue
            if isinstance(_get(state, rest), torch.Tensor):
                continue
            like = template.get(str(rest[0])) if len(rest) == 1 else None
            if isinstance(like, torch.Tensor) and like.dtype == tensor.dtype:
                value = _made(like, parameter, group, str(rest[0]))
            else:
                value = self._inferred(parameter, group, name, rest, tensor)
            _set(state, rest, value)

    def _inferred(
        self, parameter: torch.Tensor, group: Mapping[str, Any], name: ParameterName, rest: Path, tensor: SavedTensor
    ) -> torch.Tensor:
        whole = name.piece.shape if name.piece is not None else tuple(parameter.shape)
        if tensor.shape == whole and tensor.shape:
            return torch.zeros_like(parameter, dtype=tensor.dtype, requires_grad=False)
        is_host = rest[-1] == "step" and not (group.get("capturable") or group.get("fused"))
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu" if is_host else parameter.device)

    def wanted_objects(self, saved: Saved) -> Iterable[str]:
        own = {n.name for names in self._all_names() for n in names}
        head = (*self._path, "state")
        yield from (k for i in range(len(self._outer)) if (k := self._more_key(i)) in saved)
        for key, path in saved.objects.items():
            if path[: len(self._path)] != self._path:
                continue
            if path[: len(head)] == head and len(path) > len(head) and str(path[len(head)]) not in own:
                continue  # of a parameter that is elsewhere
            yield key

    def _all_names(self) -> Iterator[list[ParameterName]]:
        names = self._names()
        for outer in self._outer:
            for number, group in enumerate((unwrapped(outer) or outer).param_groups):
                for i, parameter in enumerate(group["params"]):
                    yield self._named(parameter, names, number, i)

    def apply(self, objects: Mapping[str, Any], saved: Saved, step: int) -> list[str]:
        notes = self._apply_groups(objects, saved)
        states: dict[str, list[tuple[Path, Any]]] = {}
        head = (*self._path, "state")
        for key, path in saved.objects.items():
            if path[: len(head)] == head and len(path) > len(head) + 1 and key in objects:
                states.setdefault(str(path[len(head)]), []).append((path[len(head) + 1 :], objects[key]))
        names = self._names()
        for outer in self._outer:
            inner = unwrapped(outer) or outer
            for number, group in enumerate(inner.param_groups):
                for i, parameter in enumerate(group["params"]):
                    for name in self._named(parameter, names, number, i):
                        for rest, value in states.get(name.name, ()):
                            _set(inner.state[parameter], rest, value)
        for i, optimizer in enumerate(self._own_kinds()):
            if self._more_key(i) in objects:
                _load_more(optimizer, objects[self._more_key(i)])
        self._watches = None
        self._before = []
        return notes

    def _apply_groups(self, objects: Mapping[str, Any], saved: Saved) -> list[str]:
        groups = [group for outer in self._outer for group in outer.param_groups]
        head = (*self._path, "param_groups")
        found: dict[int, dict[str, Any]] = {}
        for key, path in saved.objects.items():
            if path[: len(head)] == head and len(path) == len(head) + 2 and key in objects:
                found.setdefault(int(path[-2]), {})[str(path[-1])] = objects[key]
        if found and len(found) != len(groups):
            return [
                f"{flat_key(self._path)}: the checkpoint has {len(found)} groups of parameters, this run has "
                f"{len(groups)}: learning rates and other settings stay as the script made them"
            ]
        notes = []
        for number, values in found.items():
            own = self._group_names(number)
            if set(values.get("params", own)) != set(own) and not self._is_divided():
                notes.append(
                    f"{flat_key(self._path)}: group {number} has other parameters than in the checkpoint; its settings "
                    "are taken from there all the same"
                )
            for key, value in values.items():
                if key != "params":
                    groups[number][key] = value
        return notes

    def _group_names(self, number: int) -> list[str]:
        groups = [group for outer in self._outer for group in outer.param_groups]
        names = self._names()
        return [n.name for i, p in enumerate(groups[number]["params"]) for n in self._named(p, names, number, i)]

    def _is_divided(self) -> bool:
        """FSDP1's names depend on the rank."""
        return any(n.is_whole_shard for names in self._all_names() for n in names)


# -- what a step would make --------------------------------------------------------------------------------------------
def predicted_state(optimizer: Optimizer) -> dict[int, dict[str, Any]] | None:
    """The state that a first step would make, by ``id`` of the parameter, found without touching anything.

    A twin of the optimizer takes a step on parameters that have no memory ("meta"), so that no value, no state, no
    random number, no hook and no count of steps of the real one is involved; torch's own function for it
    (``_init_optim_state``) steps the real optimizer with a rate of zero, which leaves AdamW one step ahead.

    Returns:
        Tensors on the meta device where they lie with the parameter; None for optimizers that cannot be copied safely
        or whose step fails.
    """
    if any(not _is_harmless(k, v) for k, v in vars(optimizer).items()):
        return None
    twin = object.__new__(type(optimizer))
    twin.__dict__.update({k: v for k, v in vars(optimizer).items() if k not in ("step", "zero_grad")})
    for name in [n for n in vars(optimizer) if n.endswith("_hooks")]:
        twin.__dict__[name] = type(vars(optimizer)[name])()
    kinds: dict[Any, torch.Tensor] = {}
    twin.state = type(optimizer.state)(dict)
    twin.param_groups = [_twin_group(number, group, kinds) for number, group in enumerate(optimizer.param_groups)]
    try:
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(twin)
    except Exception:  # whatever an optimizer's author needs for a step that is not here
        return None
    return {
        id(p): dict(twin.state[kinds[kind]])
        for number, group in enumerate(optimizer.param_groups)
        for p in group["params"]
        if kinds[kind := _kind_of(number, p)] in twin.state
    }


def _kind_of(number: int, parameter: torch.Tensor) -> tuple[Any, ...]:
    """Parameters of one group that are alike have state alike: one of them takes the step (2 ms each) for all."""
    cut = (tuple(parameter._local_tensor.shape), parameter.placements) if isinstance(parameter, DTensor) else ()
    return (number, tuple(parameter.shape), parameter.dtype, parameter.requires_grad, *cut)


def _is_harmless(name: str, value: Any) -> bool:
    return name in _KNOWN or name.endswith("_hooks") or isinstance(value, int | float | str | bytes | None | type)


def _twin_group(number: int, group: Mapping[str, Any], kinds: dict[Any, torch.Tensor]) -> dict[str, Any]:
    out = {k: (v.item() if isinstance(v, torch.Tensor) and v.device.type == "cpu" else v) for k, v in group.items()}
    for switch in ("fused", "foreach", "capturable"):
        if switch in out:
            out[switch] = False
    params: list[torch.Tensor] = []
    for parameter in group["params"]:
        kind = _kind_of(number, parameter)
        if kind in kinds:
            continue
        twin = torch.nn.Parameter(_meta(parameter), requires_grad=parameter.requires_grad)
        if parameter.requires_grad:
            twin.grad = _meta(parameter)
        kinds[kind] = twin
        params.append(twin)
    return {**out, "params": params}


def _meta(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, DTensor):
        return DTensor.from_local(
            torch.empty_like(value._local_tensor, device="meta"),
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=value.shape,
            stride=value.stride(),
        )
    return torch.empty_like(value.detach(), device="meta")


def _made(like: Any, parameter: torch.Tensor, group: Mapping[str, Any], name: str) -> Any:
    """A real value for what the twin's step has made."""
    if not isinstance(like, torch.Tensor):
        return like
    if like.device.type != "meta":
        on_device = name == "step" and (group.get("capturable") or group.get("fused"))
        return like.clone().to(parameter.device) if on_device else like.clone()
    if like.shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=like.dtype, requires_grad=False)
    return torch.zeros(like.shape, dtype=like.dtype, device=parameter.device)


# -- nested values -----------------------------------------------------------------------------------------------------
class _Indexed:
    """A list as something that is looked up by index."""

    __slots__ = ("_items",)

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def get(self, index: int) -> Any:
        return self._items[index] if index < len(self._items) else None


def _values(value: Any, rest: Path) -> Iterator[tuple[Any, Any, Any, Path]]:
    """(container, key, value, path) of all leaves; lists and tuples are opened where they hold tensors or mappings."""
    items: Iterable[tuple[PathItem, Any]]
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        path = (*rest, key if isinstance(key, int) else str(key))
        if (isinstance(item, Mapping) and item) or (
            isinstance(item, list | tuple) and any(isinstance(x, torch.Tensor | Mapping) for x in item)
        ):
            yield from _values(item, path)
        else:
            yield value, key, item, path


def _get(container: Any, path: Path) -> Any:
    for item in path:
        if isinstance(container, Mapping):
            container = container.get(item)
        elif isinstance(container, list) and isinstance(item, int) and item < len(container):
            container = container[item]
        else:
            return None
    return container


def _set(container: Any, path: Path, value: Any) -> None:
    """Puts *value* there; what is missing on the way becomes a list where a number follows, else a dict."""
    for item, following in itertools.pairwise(path):
        below = _get(container, (item,))
        if below is None:
            below = [] if isinstance(following, int) else {}
            _put(container, item, below)
        container = below
    _put(container, path[-1], value)


def _put(container: Any, key: PathItem, value: Any) -> None:
    if isinstance(container, list):
        assert isinstance(key, int)
        container.extend([None] * (key + 1 - len(container)))
    container[key] = value


def _more_of(optimizer: Optimizer) -> dict[str, Any]:
    return {k: v for k, v in optimizer.state_dict().items() if k not in ("state", "param_groups")}


def _load_more(optimizer: Optimizer, more: Mapping[str, Any]) -> None:
    """Through the optimizer's own ``load_state_dict``, which copies and casts the rest: that is put back as it was."""
    states = {p: dict(s) for p, s in optimizer.state.items()}
    groups = optimizer.param_groups
    optimizer.load_state_dict({**optimizer.state_dict(), **more})
    optimizer.param_groups = groups
    for parameter, state in states.items():
        optimizer.state[parameter] = state


def _read(container: Any, key: Any) -> Any:
    return container[key]


def _same(value: Any) -> Any:
    return value
