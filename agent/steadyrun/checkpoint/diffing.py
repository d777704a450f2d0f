"""What differs between two checkpoints: names, shapes, dtypes, and values, tensor by tensor.

One tensor of each side is in memory at a time. Nothing is unpickled: objects are compared as the bytes they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from steadyrun.checkpoint.contents import Tensor
from steadyrun.checkpoint.layout import PathItem
from steadyrun.checkpoint.sources import Source, name_below
from steadyrun.core.errors import ConfigError, nearest_name

__all__ = ["Below", "Difference", "Progress", "Structure", "TensorDifference", "Tolerance", "compare_tensors", "diff"]

Progress = Callable[[int, int], None]
_CHUNK_ELEMENTS: Final = 1 << 16  # in float64 half a megabyte: what is made of it stays in the cache
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TINY: Final = 5e-324  # smaller than every difference, so that 0 / 0 becomes 0


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Elements count as equal when ``|a - b| <= absolute + relative * max(|a|, |b|)``; 0 and 0: when all bits are."""

    absolute: float = 0.0
    relative: float = 0.0

    @property
    def is_exact(self) -> bool:
        return self.absolute == 0.0 and self.relative == 0.0


@dataclass(frozen=True, slots=True)
class Structure:
    """A name that is not the same on both sides; *text* says how."""

    key: str
    text: str


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How the values of one tensor differ.

    Attributes:
        differing: elements that are not equal.
        max_abs: the largest ``|a - b|`` among elements that are finite on both sides.
        max_relative: the largest ``|a - b| / max(|a|, |b|)`` among them: 2 where the signs differ.
        nonfinite: elements that are NaN or infinite on one side and not the same on the other.
        worst_at: index of the element with *max_abs*, or of the first that *nonfinite* counts.
    """

    key: str
    elements: int
    differing: int
    max_abs: float
    max_relative: float
    nonfinite: int
    worst_at: tuple[int, ...]

    @property
    def badness(self) -> tuple[float, float, float]:
        """Larger is worse: values that became NaN or infinite first, then by the largest difference."""
        return (self.nonfinite, self.max_abs, self.differing)


@dataclass(frozen=True, slots=True)
class Difference:
    """Everything that differs, the worst tensors first.

    Attributes:
        objects: names of objects that both have, with other bytes.
        compared: tensors whose values were compared.
    """

    structure: tuple[Structure, ...]
    tensors: tuple[TensorDifference, ...]
    objects: tuple[str, ...]
    compared: int
    compared_bytes: int

    @property
    def is_equal(self) -> bool:
        return not (self.structure or self.tensors or self.objects)


def diff(
    a: Source,
    b: Source,
    tolerance: Tolerance | None = None,
    progress: Progress | None = None,
) -> Difference:
    """Compare *a* with *b*; *tolerance* None: bit for bit.

    Raises:
        SteadyrunError: a tensor is damaged or cannot be read.
    """
    common = [key for key, mine in a.tensors.items() if key in b.tensors and mine.shape == b.tensors[key].shape]
    total_bytes = sum(_bytes_of(a.tensors[key]) for key in common)
    done_bytes, found = 0, []
    for key, mine, theirs in zip(common, a.read(common), b.read(common), strict=True):
        difference = compare_tensors(key, mine, theirs, tolerance or Tolerance())
        if difference.differing:
            found.append(difference)
        done_bytes += _bytes_of(a.tensors[key])
        if progress is not None:
            progress(done_bytes, total_bytes)
    found.sort(key=lambda d: d.badness, reverse=True)
    return Difference(tuple(_structure(a, b)), tuple(found), _objects(a, b), len(common), total_bytes)


def _structure(a: Source, b: Source) -> Iterator[Structure]:
    for key, mine in a.tensors.items():
        theirs = b.tensors.get(key)
        if theirs is None:
            yield Structure(key, "is an object in the second" if key in b.objects else "is only in the first")
            continue
        if mine.shape != theirs.shape:
            yield Structure(key, f"has shape {list(mine.shape)} in the first, {list(theirs.shape)} in the second")
        if mine.dtype != theirs.dtype:
            yield Structure(key, f"is {mine.dtype} in the first, {theirs.dtype} in the second")
    for key in b.tensors:
        if key not in a.tensors:
            yield Structure(key, "is an object in the first" if key in a.objects else "is only in the second")
    for one, other, which in ((a, b, "first"), (b, a, "second")):
        for key in one.objects:
            if key not in other.objects and key not in other.tensors:
                yield Structure(key, f"is only in the {which} (object)")


def _objects(a: Source, b: Source) -> tuple[str, ...]:
    theirs = set(b.objects)
    return tuple(key for key in a.objects if key in theirs and a.object_bytes(key) != b.object_bytes(key))


def _bytes_of(tensor: Tensor) -> int:
    return tensor.size_bytes or math.prod(tensor.shape)


def compare_tensors(key: str, a: torch.Tensor, b: torch.Tensor, tolerance: Tolerance) -> TensorDifference:
    """How two tensors of one shape differ; their dtypes may be others, then values are compared and not bits."""
    elements = a.numel()
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    differing = nonfinite = 0
    max_abs = max_relative = 0.0
    worst = first_nonfinite = None
    for start in range(0, elements, _CHUNK_ELEMENTS):
        piece_a, piece_b = flat_a[start : start + _CHUNK_ELEMENTS], flat_b[start : start + _CHUNK_ELEMENTS]
        is_other = _unequal(piece_a, piece_b)
        if is_other is not None and not is_other.any():
            continue
        wide_a, wide_b = _wide(piece_a), _wide(piece_b)
        if is_other is None:
            is_other = (wide_a != wide_b) & ~(wide_a.isnan() & wide_b.isnan())
        distance = (wide_a - wide_b).abs()
        largest = torch.maximum(wide_a.abs(), wide_b.abs())
        is_finite = largest.isfinite()
        if not is_finite.all():
            distance = distance.where(is_finite, 0.0)
            largest = largest.where(is_finite, 0.0)
        if not tolerance.is_exact:
            is_other &= ~is_finite | (distance > tolerance.absolute + tolerance.relative * largest)
            is_other &= (wide_a != wide_b) & ~(wide_a.isnan() & wide_b.isnan())
        if not is_other.any():
            continue
        is_odd = is_other & ~is_finite
        differing += int(is_other.sum())
        nonfinite += int(is_odd.sum())
        distance = distance.where(is_other, 0.0)
        here = int(distance.argmax())
        if worst is None or float(distance[here]) > max_abs:
            worst, max_abs = start + here, float(distance[here])
        max_relative = max(max_relative, float((distance / largest.clamp_min(_TINY)).max()))
        if first_nonfinite is None and bool(is_odd.any()):
            first_nonfinite = start + int(is_odd.to(torch.uint8).argmax())
    at = first_nonfinite if first_nonfinite is not None else worst
    return TensorDifference(
        key, elements, differing, max_abs, max_relative, nonfinite, () if at is None else _index(at, tuple(a.shape))
    )


def _unequal(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor | None:
    """Per element whether its bits differ; None when the dtypes do."""
    if a.dtype != b.dtype:
        return None
    words = _WORDS.get(a.element_size())
    if words is not None:
        return a.view(words) != b.view(words)
    raw_a, raw_b = a.view(torch.int64).view(-1, 2), b.view(torch.int64).view(-1, 2)
    return (raw_a != raw_b).any(dim=1)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _index(at: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        at, rest = divmod(at, size)
        index.append(rest)
    return tuple(reversed(index))


class Below:
    """The part of a source below a name, which is left out of its names: ``model.weight`` becomes ``weight``."""

    def __init__(self, source: Source, keys: Mapping[str, str]) -> None:
        self.path, self.kind, self.step, self.notes = source.path, source.kind, source.step, source.notes
        self.tensors: Mapping[str, Tensor] = {
            name: source.tensors[key] for name, key in keys.items() if key in source.tensors
        }
        self.objects = tuple(name for name, key in keys.items() if key in source.objects)
        self._source, self._keys = source, keys

    @classmethod
    def of(cls, a: Source, b: Source, key: str) -> tuple[Source, Source]:
        """Both sources below *key*; one that has nothing there is taken as it is: an export, for instance.

        Raises:
            ConfigError: neither has anything there.
        """
        names = [{name_below(s, k, key): k for k in (*s.tensors, *s.objects)} for s in (a, b)]
        found = [{name: k for name, k in below.items() if name is not None} for below in names]
        if not any(found):
            tops = sorted({str(s.path_of(k)[0]) for s in (a, b) for k in (*s.tensors, *s.objects)})
            raise ConfigError(
                f"cannot compare below {key!r}: neither checkpoint has it{nearest_name(key, tops)} "
                f"(they have {', '.join(tops)})"
            )
        return cls(a, found[0]) if found[0] else a, cls(b, found[1]) if found[1] else b

    def path_of(self, key: str) -> tuple[PathItem, ...]:
        return (key,)

    def read(self, keys: Sequence[str]) -> Iterator[torch.Tensor]:
        return self._source.read([self._keys[key] for key in keys])

    def object_bytes(self, key: str) -> bytes:
        return self._source.object_bytes(self._keys[key])
