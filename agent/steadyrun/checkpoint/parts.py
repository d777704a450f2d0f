"""The pieces that a run's state is collected in: shards of tensors, objects, and what a checkpoint holds of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from steadyrun.checkpoint.envelope import is_storable
from steadyrun.checkpoint.layout import Layout, PathItem
from steadyrun.core.errors import SteadyrunError

__all__ = [
    "BoxedTensor",
    "Leaf",
    "Part",
    "Path",
    "Saved",
    "SavedTensor",
    "Shard",
    "StateError",
    "dtype_name",
    "flat_key",
    "local_of",
    "shards_of",
    "storage_mark",
]

Path = tuple[PathItem, ...]


class StateError(SteadyrunError):
    """State that cannot be saved or put back as it is; the text says which and what to try."""


def flat_key(path: Path) -> str:
    """DCP's name for what is at *path* of the nested state dict."""
    return ".".join(map(str, path))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(slots=True)
class Shard:
    """This rank's part of one tensor.

    Attributes:
        tensor: an alias of the live memory, detached, of the shard's sizes.
        shape: of the whole tensor.
        live: what a DCP load planner takes as the target: a DTensor, say; by default the alias.
        fallback: the key to load instead where *key* is one rank's own and the checkpoint has other ranks.
    """

    key: str
    path: Path
    tensor: torch.Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    requires_grad: bool = False
    live: Any = None
    fallback: str | None = None

    @property
    def structure(self) -> tuple[Any, ...]:
        """Equal as long as the shard fits into the same place of a layout."""
        return (self.key, self.tensor.dtype, self.shape, self.offsets, self.sizes, self.requires_grad)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Something that is no tensor: ``read`` gives what it is now."""

    key: str
    path: Path
    read: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint or a snapshot holds, by key; of objects only the way to them."""

    world_size: int
    tensors: Mapping[str, SavedTensor]
    objects: Mapping[str, Path]

    @classmethod
    def from_layout(cls, layout: Layout) -> Saved:
        """Of a snapshot of this rank's own."""
        tensors = {e.key: SavedTensor(e.path, getattr(torch, e.dtype), e.shape) for e in layout.entries}
        return cls(layout.world_size, tensors, {o.key: o.path for o in layout.objects})

    @classmethod
    def from_metadata(cls, metadata: Metadata, world_size: int) -> Saved:
        """Of a folder of ``torch.distributed.checkpoint``, written by *world_size* ranks."""
        paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
        tensors: dict[str, SavedTensor] = {}
        objects: dict[str, Path] = {}
        for key, entry in metadata.state_dict_metadata.items():
            path = tuple(paths.get(key, (key,)))
            if isinstance(entry, TensorStorageMetadata):
                tensors[key] = SavedTensor(path, entry.properties.dtype, tuple(entry.size))
            else:
                objects[key] = path
        return cls(world_size, tensors, objects)

    def __contains__(self, key: object) -> bool:
        return key in self.tensors or key in self.objects


class Part(Protocol):
    """One thing that the script gave us.

    Attributes:
        shards, leaves: as of the last ``refresh``, in a fixed order.
        not_covered: sentences on what of it cannot be saved.
    """

    not_covered: list[str]

    @property
    def shards(self) -> Sequence[Shard]: ...

    @property
    def leaves(self) -> Sequence[Leaf]: ...

    def refresh(self) -> bool:
        """Bring *shards* and *leaves* up to date; True when another tensor or another structure was found."""
        ...

    def prepare(self, saved: Saved | None) -> list[str]:
        """Make the memory that a load will fill, where it is not there yet; None: as after a step of training.

        Returns sentences to say.
        """
        ...

    def apply(self, objects: Mapping[str, Any], saved: Saved, step: int) -> list[str]:
        """Put back what is no tensor, once the tensors have been filled. Returns sentences to say."""
        ...

    def wanted_objects(self, saved: Saved) -> Iterable[str]:
        """Keys of *saved* that ``apply`` needs."""
        ...


class BoxedTensor(torch.Tensor):
    """Several boxes of one tensor, as a target for DCP's load planner; it has no elements of its own.

    DCP has no tensor for more than one local shard that can be made without a process group. Its planner takes any
    tensor that names its chunks; what is no tensor it drops silently.
    """

    _boxes: list[tuple[torch.Size, torch.Size, torch.Tensor]]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype) -> BoxedTensor:
        device = torch.device("cpu")  # DCP would make a tensor in place of one on the meta device
        made: BoxedTensor = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made._boxes = []
        return made

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{func} on boxes of a tensor: they are only filled")

    def add_box(self, offsets: Sequence[int], sizes: Sequence[int], tensor: torch.Tensor) -> None:
        self._boxes.append((torch.Size(offsets), torch.Size(sizes), tensor))

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, sizes) for offsets, sizes, _ in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for offsets, _, tensor in self._boxes:
            if index.offset is None or offsets == index.offset:
                return tensor
        raise KeyError(f"no box at {index.offset}")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"<{len(self._boxes)} boxes of a tensor of {tuple(self.shape)}>"


def local_of(value: torch.Tensor) -> torch.Tensor:
    """The memory of this rank behind a parameter, a DTensor or a plain tensor."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    return local.detach()


def storage_mark(value: Any) -> tuple[int, int]:
    """Changes when a tensor object is given other memory (``tensor.data = other``) or another local shard."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    try:
        return id(local), local.data_ptr()
    except (RuntimeError, AttributeError):  # subclasses without memory of their own
        return id(local), 0


def shards_of(key: str, path: Path, value: torch.Tensor, requires_grad: bool = False) -> list[Shard] | None:
    """This rank's shards of *value*: none where it holds no element of it.

    Returns:
        None for what has no plain memory: sparse, quantized, subclasses that are neither DTensor nor ShardedTensor.

    Raises:
        StateError: a DTensor with partial sums.
    """
    if isinstance(value, ShardedTensor):
        return [
            Shard(
                key,
                path,
                s.tensor.detach(),
                tuple(value.size()),
                tuple(s.metadata.shard_offsets),
                tuple(s.metadata.shard_sizes),
                requires_grad,
                value,
            )
            for s in value.local_shards()
        ]
    if isinstance(value, DTensor):
        return _of_dtensor(key, path, value, requires_grad)
    if not is_plain(value):
        return None
    shape = tuple(value.shape)
    return [Shard(key, path, value.detach(), shape, (0,) * len(shape), shape, requires_grad)]


def is_plain(value: torch.Tensor) -> bool:
    """Its elements are bytes in memory, and no subclass gives them another meaning."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
        and value.device.type != "meta"
        and is_storable(dtype_name(value.dtype))
    )


def _of_dtensor(key: str, path: Path, value: DTensor, requires_grad: bool) -> list[Shard] | None:
    if value.device_mesh.get_coordinate() is None:
        return []
    if any(p.is_partial() for p in value.placements):
        raise StateError(
            f"cannot save {key!r}: this DTensor holds partial sums ({value.placements}); redistribute it before, for "
            "instance to Replicate()"
        )
    local = value._local_tensor
    if not is_plain(local):
        return None
    sizes, offsets = chunk_of(value)
    if math.prod(sizes) == 0 and value.numel() > 0:
        return []
    return [Shard(key, path, local.detach(), tuple(value.shape), offsets, sizes, requires_grad, value)]


def chunk_of(value: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and offsets of the local shard of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return tuple(sizes), tuple(offsets)


class _Container(Protocol):
    def get(self, key: Any, /) -> Any: ...


@dataclass(slots=True)
class Watches:
    """Tells cheaply whether anything was added, removed, replaced or given other memory since ``add``."""

    _sizes: list[tuple[Any, int]] = field(default_factory=list)
    _items: list[tuple[_Container, Any, Any, int, int]] = field(default_factory=list)

    def container(self, container: Any) -> None:
        self._sizes.append((container, len(container)))

    def item(self, container: _Container, name: Any, value: Any) -> None:
        """A tensor under *name* in a container."""
        self._items.append((container, name, value, *storage_mark(value)))

    def holds(self) -> bool:
        for container, size in self._sizes:
            if len(container) != size:
                return False
        for container, name, value, local, pointer in self._items:
            if container.get(name) is not value or storage_mark(value) != (local, pointer):
                return False
        return True
