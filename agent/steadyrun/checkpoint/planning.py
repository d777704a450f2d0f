"""Who writes what: the plan for one checkpoint from the layouts of all ranks. Pure.

Shards that several ranks hold (replicas) are written once, by the holder that has the least to write; which ranks hold
the same ones is kept, so that their bytes can be compared before a commit.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from steadyrun.checkpoint.contents import DTYPE_BITS
from steadyrun.checkpoint.envelope import is_storable
from steadyrun.checkpoint.layout import ALIGN_BYTES, RANK_PREFIX, Entry, Layout, PathItem
from steadyrun.checkpoint.saves import rank_words
from steadyrun.core.errors import SteadyrunError

__all__ = ["Box", "Part", "Plan", "PlanError", "PlannedTensor", "plan", "unequal_replicas"]

# offsets and sizes of a shard, in elements
Box = tuple[tuple[int, ...], tuple[int, ...]]

_OVERHEAD_BYTES: Final = ALIGN_BYTES  # what a tensor costs in a file beside its own bytes


class PlanError(SteadyrunError):
    """The layouts of the ranks do not make one checkpoint; the text names the key and the ranks."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes, as indices into its layout.

    Attributes:
        entries, objects: to write, ascending.
        replicas: per group that the rank is in: its number, and the entries that all ranks of the group hold, in the
            same order on all of them (by key and offsets).
    """

    entries: tuple[int, ...] = ()
    objects: tuple[int, ...] = ()
    replicas: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def to_json(self) -> str:
        return json.dumps(_part_data(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Part:
        """Raises PlanError when the text is no part."""
        return _part(_parsed(text))


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor of the checkpoint; *chunks* are its shards, each written by exactly one rank."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    path: tuple[PathItem, ...]
    requires_grad: bool
    chunks: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Attributes:
    parts: by rank.
    groups: the ranks of each group of replicas, by its number.
    tensors: all tensors, in the order in which ranks name them first.
    """

    parts: tuple[Part, ...]
    groups: tuple[tuple[int, ...], ...]
    tensors: tuple[PlannedTensor, ...]

    def to_json(self) -> str:
        data = {
            "parts": [_part_data(part) for part in self.parts],
            "groups": self.groups,
            "tensors": [[t.key, t.dtype, t.shape, t.path, int(t.requires_grad), t.chunks] for t in self.tensors],
        }
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Raises PlanError when the text is no plan."""
        return _plan(_parsed(text))


def _part_data(part: Part) -> list[Any]:
    return [part.entries, part.objects, part.replicas]


def _part(data: Any) -> Part:
    try:
        entries, objects, replicas = data
        return Part(_ints(entries), _ints(objects), tuple((int(group), _ints(held)) for group, held in replicas))
    except (ValueError, TypeError) as e:
        raise _unreadable(e) from e


def _plan(data: Any) -> Plan:
    try:
        tensors = tuple(
            PlannedTensor(str(k), str(d), _ints(s), tuple(p), bool(g), tuple((_ints(o), _ints(n)) for o, n in chunks))
            for k, d, s, p, g, chunks in data["tensors"]
        )
        return Plan(tuple(_part(p) for p in data["parts"]), tuple(_ints(g) for g in data["groups"]), tensors)
    except (ValueError, TypeError, KeyError) as e:
        raise _unreadable(e) from e


def _ints(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(int(v) for v in values)


def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError) as e:
        raise _unreadable(e) from e


def _unreadable(e: Exception) -> PlanError:
    return PlanError(f"cannot read the plan of a checkpoint: {type(e).__name__}: {e}")


# -- planning --------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Tensor:
    """A tensor while it is gathered: *boxes* by offsets, each with (rank, index) of its holders."""

    first: Entry
    first_rank: int
    requires_grad: bool
    is_empty: bool
    boxes: dict[tuple[int, ...], _Held] = field(default_factory=dict)


@dataclass(slots=True)
class _Held:
    """A shard and who holds it."""

    entry: Entry
    ranks: list[int] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)


def plan(layouts: Sequence[Layout]) -> Plan:
    """The plan for a checkpoint of ranks with these layouts, by rank; the same for the same layouts.

    Raises:
        PlanError: layouts are missing, or contradict each other: another shape or dtype for one key, a part of a
            tensor that no rank holds or that two ranks hold in different cuts, one key for two things.
    """
    for rank, layout in enumerate(layouts):
        if layout.rank != rank or layout.world_size != len(layouts):
            raise PlanError(
                f"cannot plan the checkpoint: {len(layouts)} layouts are here, and number {rank} is that of rank "
                f"{layout.rank} of {layout.world_size}; all ranks of one attempt must take part"
            )
    tensors = _gather(layouts)
    for tensor in tensors.values():
        _check_cover(tensor)
    writes: list[list[int]] = [[] for _ in layouts]
    shared: list[_Held] = []
    bytes_of = [0] * len(layouts)
    for tensor in tensors.values():
        for held in tensor.boxes.values():
            if len(held.ranks) > 1:
                shared.append(held)
            else:
                writes[held.ranks[0]].append(held.indices[0])
                bytes_of[held.ranks[0]] += held.entry.size_bytes + _OVERHEAD_BYTES
    # The largest first: what comes last is small and levels the rest.
    shared.sort(key=lambda h: (-h.entry.size_bytes, h.entry.key, h.entry.offsets))
    for held in shared:
        loads = [bytes_of[rank] for rank in held.ranks]
        least = loads.index(min(loads))
        rank = held.ranks[least]
        writes[rank].append(held.indices[least])
        bytes_of[rank] += held.entry.size_bytes + _OVERHEAD_BYTES
    groups, replicas = _groups(shared, len(layouts))
    objects = _objects(layouts, tensors)
    parts = tuple(
        Part(tuple(sorted(writes[rank])), tuple(objects[rank]), tuple(replicas[rank])) for rank in range(len(layouts))
    )
    planned = tuple(
        PlannedTensor(
            key,
            t.first.dtype,
            t.first.shape,
            t.first.path,
            t.requires_grad,
            tuple((held.entry.offsets, held.entry.sizes) for _, held in sorted(t.boxes.items())),
        )
        for key, t in tensors.items()
    )
    return Plan(parts, groups, planned)


def _gather(layouts: Sequence[Layout]) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    for rank, layout in enumerate(layouts):
        for index, entry in enumerate(layout.entries):
            tensor = tensors.get(entry.key)
            if tensor is None:
                _check_entry(entry, rank)
                is_empty = math.prod(entry.shape) == 0
                tensor = tensors[entry.key] = _Tensor(entry, rank, entry.requires_grad, is_empty)
            elif entry.dtype != tensor.first.dtype or entry.shape != tensor.first.shape:
                raise PlanError(
                    f"cannot plan the checkpoint: {entry.key!r} is {_what(tensor.first)} on rank {tensor.first_rank} "
                    f"and {_what(entry)} on rank {rank}; give what differs per rank names of its own"
                )
            else:
                held = tensor.boxes.get(entry.offsets)
                if held is not None and _is_alike(held.entry, entry) and held.ranks[-1] != rank:
                    held.ranks.append(rank)  # a replica of what was checked already: nearly all, in most jobs
                    held.indices.append(index)
                    continue
                _check_entry(entry, rank)
            _hold(tensor, entry, rank, index)
    return tensors


def _is_alike(a: Entry, b: Entry) -> bool:
    return a.sizes == b.sizes and a.size_bytes == b.size_bytes


def _hold(tensor: _Tensor, entry: Entry, rank: int, index: int) -> None:
    held = tensor.boxes.get(entry.offsets)
    # The empty end of an uneven division is written by nobody; of a tensor that is empty as a whole, one shard is.
    if 0 in entry.sizes and (not tensor.is_empty or (held is None and tensor.boxes)):
        return
    if held is None:
        held = tensor.boxes[entry.offsets] = _Held(entry)
    elif held.ranks[-1] == rank:
        raise PlanError(
            f"cannot plan the checkpoint: rank {rank} has two shards of {entry.key!r} at {list(entry.offsets)}"
        )
    elif not _is_alike(held.entry, entry):
        raise PlanError(
            f"cannot plan the checkpoint: the shard of {entry.key!r} at {list(entry.offsets)} has sizes "
            f"{list(held.entry.sizes)} on rank {held.ranks[0]} and {list(entry.sizes)} on rank {rank} "
            f"({held.entry.size_bytes:,} and {entry.size_bytes:,} bytes)"
        )
    held.ranks.append(rank)
    held.indices.append(index)


def _check_entry(entry: Entry, rank: int) -> None:
    dimensions = len(entry.shape)
    bits = DTYPE_BITS.get(entry.dtype)
    if not is_storable(entry.dtype):
        problem = f"has dtype {entry.dtype}, which cannot be stored as plain bytes"
    elif len(entry.offsets) != dimensions or len(entry.sizes) != dimensions:
        problem = f"has offsets {list(entry.offsets)} and sizes {list(entry.sizes)} in a shape {list(entry.shape)}"
    elif any(
        o < 0 or n < 0 or o + n > most for o, n, most in zip(entry.offsets, entry.sizes, entry.shape, strict=True)
    ):
        problem = f"reaches from {list(entry.offsets)} over {list(entry.sizes)} beyond the shape {list(entry.shape)}"
    elif bits is not None and math.prod(entry.sizes) * bits != entry.size_bytes * 8:
        problem = f"has {entry.size_bytes:,} bytes for sizes {list(entry.sizes)} of {entry.dtype}"
    else:
        return
    raise PlanError(f"cannot plan the checkpoint: {entry.key!r} on rank {rank} {problem}")


def _what(entry: Entry) -> str:
    return f"{entry.dtype} of shape {list(entry.shape)}"


def _groups(shared: Sequence[_Held], world_size: int) -> tuple[tuple[tuple[int, ...], ...], list[list[Any]]]:
    members: dict[tuple[int, ...], list[_Held]] = defaultdict(list)
    for held in shared:
        members[tuple(held.ranks)].append(held)
    groups = tuple(sorted(members))
    replicas: list[list[Any]] = [[] for _ in range(world_size)]
    for number, ranks in enumerate(groups):
        ordered = sorted(members[ranks], key=lambda h: (h.entry.key, h.entry.offsets))
        for position, rank in enumerate(ranks):
            replicas[rank].append((number, tuple(held.indices[position] for held in ordered)))
    return groups, replicas


def _objects(layouts: Sequence[Layout], tensors: dict[str, _Tensor]) -> list[list[int]]:
    """Indices of the objects to write by rank: an object that is not of one rank alone is written by the lowest."""
    writer: dict[str, int] = {}
    out: list[list[int]] = [[] for _ in layouts]
    for rank, layout in enumerate(layouts):
        for index, entry in enumerate(layout.objects):
            key = entry.key
            first = writer.setdefault(key, rank)
            if key in tensors:
                raise PlanError(
                    f"cannot plan the checkpoint: {key!r} is an object on rank {rank} and a tensor on rank "
                    f"{tensors[key].first_rank}"
                )
            if first == rank:
                out[rank].append(index)
            elif key.startswith(f"{RANK_PREFIX}."):
                raise PlanError(
                    f"cannot plan the checkpoint: {key!r} is of one rank alone, but ranks {first} and {rank} have it"
                )
        if len({o.key for o in layout.objects}) != len(layout.objects):
            keys = [o.key for o in layout.objects]
            twice = next(k for k in keys if keys.count(k) > 1)
            raise PlanError(f"cannot plan the checkpoint: rank {rank} has two objects {twice!r}")
    return out


# -- does it add up? -------------------------------------------------------------------------------------------------
def _check_cover(tensor: _Tensor) -> None:
    boxes: list[Box] = [(held.entry.offsets, held.entry.sizes) for held in tensor.boxes.values()]
    first = tensor.first
    if len(boxes) == 1 and boxes[0][1] == first.shape:
        return
    pair = _overlap(boxes)
    if pair is not None:
        ranks = [tensor.boxes[offsets].ranks for offsets, _ in pair]
        raise PlanError(
            f"cannot plan the checkpoint: two shards of {first.key!r} overlap: {_box(pair[0])} on ranks {ranks[0]} and "
            f"{_box(pair[1])} on ranks {ranks[1]}; they must be cut alike on all ranks"
        )
    total = math.prod(first.shape)
    covered = sum(math.prod(sizes) for _, sizes in boxes)
    if covered != total:
        holders = sorted({rank for held in tensor.boxes.values() for rank in held.ranks})
        raise PlanError(
            f"cannot plan the checkpoint: {total - covered:,} of the {total:,} elements of {first.key!r} are on no "
            f"rank; ranks {holders} hold {len(boxes)} shards of it"
        )


def _box(box: Box) -> str:
    return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(*box, strict=True))}]"


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or None.

    Boxes are parted along gaps that no box crosses, one dimension after the other; a grid falls apart into single
    boxes that way, in n log n steps. What cannot be parted (a pinwheel, or a real overlap) is swept.
    """
    todo: list[Sequence[Box]] = [boxes]
    while todo:
        group = todo.pop()
        if len(group) < 2:
            continue
        for dimension in range(len(group[0][0])):
            runs = _runs(group, dimension)
            if len(runs) > 1:
                todo.extend(runs)
                break
        else:
            pair = _swept(group)
            if pair is not None:
                return pair
    return None


def _runs(boxes: Sequence[Box], dimension: int) -> list[list[Box]]:
    """The boxes in groups that do not touch each other along *dimension*."""
    runs: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda b: b[0][dimension]):
        start = box[0][dimension]
        if start >= end:
            runs.append([])
        runs[-1].append(box)
        end = max(end, start + box[1][dimension])
    return runs


def _swept(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    dimensions = range(len(boxes[0][0]))
    if not dimensions:
        return boxes[0], boxes[1]
    best = max(dimensions, key=lambda d: len({b[0][d] for b in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b[0][best]):
        active = [other for other in active if other[0][best] + other[1][best] > box[0][best]]
        for other in active:
            if all(box[0][d] < other[0][d] + other[1][d] and other[0][d] < box[0][d] + box[1][d] for d in dimensions):
                return other, box
        active.append(box)
    return None


def unequal_replicas(plan: Plan, digests: Mapping[int, Mapping[int, str]]) -> str:
    """What differs that should be equal, and on which ranks; empty when nothing does.

    Args:
        digests: by rank, then by group of the plan.
    """
    for group, ranks in enumerate(plan.groups):
        sides: dict[str, list[int]] = {}
        for rank in ranks:
            sides.setdefault(digests[rank].get(group, ""), []).append(rank)
        if len(sides) < 2:
            continue
        by_size = sorted(sides.values(), key=len)
        everybody = rank_words(ranks)
        if len(by_size[-1]) > len(by_size[-2]) and len(ranks) >= 3:
            odd = sorted(r for side in by_size[:-1] for r in side)
            return f"the replicas on {everybody} are not equal: {rank_words(odd)} differs from the others"
        return f"the replicas on {everybody} are not equal: {' and '.join(rank_words(side) for side in by_size)} differ"
    return ""
