"""Writes DCP's ``.metadata`` without torch: the pickle of a ``Metadata`` as torch 2.6 to 2.14 read it.

Only classes and fields are named that all these versions have, or that older ones take without looking at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from steadyrun.checkpoint.layout import Layout
from steadyrun.checkpoint.manifest import objects_name, tensors_name
from steadyrun.checkpoint.opcodes import PickleWriter
from steadyrun.checkpoint.planning import Plan, PlannedTensor

__all__ = ["Storage", "metadata_bytes"]

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_FORMAT_VERSION: Final = "1.0.0"  # as torch's own writer puts it


class Storage(Protocol):
    """Where one rank's pieces lie in its two files; what ``shardfile.Written`` says of it.

    Attributes:
        shards: key, offsets, first byte and length of each archive in the tensors' file.
        objects: key, first byte and length of each in the objects' file.
    """

    @property
    def shards(self) -> Sequence[tuple[str, tuple[int, ...], int, int]]: ...

    @property
    def objects(self) -> Sequence[tuple[str, int, int]]: ...


def metadata_bytes(plan: Plan, layouts: Sequence[Layout], storage: Sequence[Storage]) -> bytes:
    """The content of ``.metadata``; *layouts* and *storage* by rank.

    Raises:
        ValueError: what was written is not what was planned.
    """
    _check(plan, layouts, storage)
    paths = {tensor.key: tensor.path for tensor in plan.tensors}
    objects: list[str] = []
    for layout, part in zip(layouts, plan.parts, strict=True):
        for index in part.objects:
            entry = layout.objects[index]
            objects.append(entry.key)
            paths[entry.key] = entry.path
    out = PickleWriter()
    out.new(_METADATA, "Metadata")
    out.empty_dict()
    out.mark()
    out.text("state_dict_metadata")
    out.empty_dict()
    out.mark()
    for tensor in plan.tensors:
        out.text(tensor.key)
        _tensor(out, tensor)
    for key in objects:
        out.text(key)
        out.new(_METADATA, "BytesStorageMetadata")
    out.set_items_to_mark()
    out.text("planner_data")
    out.empty_dict()
    out.mark()
    for key, path in paths.items():
        out.text(key)
        out.mark()
        for item in path:
            out.number(item) if isinstance(item, int) else out.text(item)
        out.tuple_to_mark()
    out.set_items_to_mark()
    out.text("storage_data")
    _storage(out, plan, storage)
    out.text("storage_meta")
    out.none()
    out.text("version")
    out.text(_FORMAT_VERSION)
    out.set_items_to_mark()
    out.build()
    return out.finish()


def _check(plan: Plan, layouts: Sequence[Layout], storage: Sequence[Storage]) -> None:
    if not len(layouts) == len(storage) == len(plan.parts):
        raise ValueError(
            f"the plan is for {len(plan.parts)} ranks; {len(layouts)} layouts and the files of {len(storage)} are here"
        )
    for rank, (layout, part, stored) in enumerate(zip(layouts, plan.parts, storage, strict=True)):
        want = {(layout.entries[i].key, layout.entries[i].offsets) for i in part.entries}
        have = {(key, tuple(offsets)) for key, offsets, _, _ in stored.shards}
        if want != have or {layout.objects[i].key for i in part.objects} != {key for key, _, _ in stored.objects}:
            raise ValueError(f"what rank {rank} wrote is not what it had to write by the plan")


def _tensor(out: PickleWriter, tensor: PlannedTensor) -> None:
    out.new(_METADATA, "TensorStorageMetadata")
    out.empty_dict()
    out.mark()
    out.text("properties")
    out.new(_METADATA, "TensorProperties")
    out.mark()
    out.name("torch", tensor.dtype)
    if not out.is_known("torch.strided as a layout"):
        out.name("torch.serialization", "_get_layout")
        out.mark()
        out.text("torch.strided")
        out.tuple_to_mark()
        out.call()
        out.remember("torch.strided as a layout")
    out.boolean(tensor.requires_grad)
    if not out.is_known("the contiguous memory format"):
        out.name(_METADATA, "_MEM_FORMAT_ENCODING")
        out.numbers((0,))
        out.call()
        out.remember("the contiguous memory format")
    out.boolean(False)  # pinned
    out.tuple_to_mark()
    out.build()
    out.text("size")
    _sizes(out, tensor.shape)
    out.text("chunks")
    out.empty_list()
    out.mark()
    for offsets, sizes in tensor.chunks:
        out.new(_METADATA, "ChunkStorageMetadata")
        out.empty_dict()
        out.mark()
        out.text("offsets")
        _sizes(out, offsets)
        out.text("sizes")
        _sizes(out, sizes)
        out.set_items_to_mark()
        out.build()
    out.append_to_mark()
    out.set_items_to_mark()
    out.build()


def _sizes(out: PickleWriter, values: tuple[int, ...]) -> None:
    if out.is_known(values):
        return
    out.name("torch", "Size")
    out.mark()
    out.numbers(values)
    out.tuple_to_mark()
    out.call()
    out.remember(values)


def _storage(out: PickleWriter, plan: Plan, storage: Sequence[Storage]) -> None:
    # The position of a shard among its tensor's chunks: a hint that spares torch a search.
    hints = {(t.key, offsets): i for t in plan.tensors for i, (offsets, _) in enumerate(t.chunks)}
    out.empty_dict()
    out.mark()
    for rank, stored in enumerate(storage):
        for key, offsets, at_bytes, length_bytes in stored.shards:
            _index(out, key, tuple(offsets), hints[key, tuple(offsets)])
            _place(out, tensors_name(rank), at_bytes, length_bytes)
        for key, at_bytes, length_bytes in stored.objects:
            _index(out, key, None, None)
            _place(out, objects_name(rank), at_bytes, length_bytes)
    out.set_items_to_mark()


def _index(out: PickleWriter, key: str, offsets: tuple[int, ...] | None, hint: int | None) -> None:
    out.new(_METADATA, "MetadataIndex")
    out.empty_dict()
    out.mark()
    out.text("fqn")
    out.text(key)
    if offsets is not None:
        out.text("offset")
        _sizes(out, offsets)
    out.text("index")
    if hint is None:
        out.none()
    else:
        out.number(hint)
    out.set_items_to_mark()
    out.build()


def _place(out: PickleWriter, file: str, at_bytes: int, length_bytes: int) -> None:
    out.new("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    out.empty_dict()
    out.mark()
    out.text("relative_path")
    out.text(file)
    out.text("offset")
    out.number(at_bytes)
    out.text("length")
    out.number(length_bytes)
    out.set_items_to_mark()
    out.build()
