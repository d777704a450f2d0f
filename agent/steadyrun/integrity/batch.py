"""The roots of the same tensors again and again: what a rank asks for at each check.

A call of torch takes a few microseconds whatever it works on, and a model has hundreds of tensors of a few words to a
few thousand: biases, norms, the steps that an optimizer counts. Alone each would take ten calls. So those of up to
64 KiB are copied side by side into a scratch memory, all by one call, and their sums are taken together:

- *tiny* ones (up to 64 words) have a row of 64 words each. Word ``j`` of a leaf has the weight ``small[0] * large[j]``
  there, so all leaves are one sum along the rows;
- of *short* ones each row of 2048 words stands for one small factor. On a CPU the rows of a tensor become one by a
  product with these in float64, exactly (see ``fingerprint``); on a device each row is multiplied by the large factors
  in int64, summed, and added to its leaf with its small factor.

What a tensor leaves free of its last row is zero and adds nothing, so the sums are those of the tensor by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from steadyrun.integrity.coefficients import LARGE, PER_BYTE, SMALL, signed
from steadyrun.integrity.fingerprint import Hasher, leaves_in, mixed, owners_and_places, plain

__all__ = ["Batch"]

_TINY_WORDS: Final = 64
_TINY_BYTES: Final = 4 * _TINY_WORDS
_ROW_BYTES: Final = 4 * LARGE
_SHORT_BYTES: Final = 8 * _ROW_BYTES  # above it the sums cost more than the calls
# Rows that are filled at once: on a CPU 256 KiB, that stay in the caches; on a device 8 MiB, so that launches are few.
_EXACT_ROWS: Final = SMALL
_ROWS: Final = 1024


class Batch:
    """The roots of the same tensors again and again, without waiting for the device and without copies to it.

    Attributes:
        offsets: where each tensor's leaves begin in what ``leaves`` gives, and where the last one's end.
    """

    __slots__ = (
        "_empty_ones",
        "_hasher",
        "_large_ones",
        "_lengths",
        "_owners",
        "_packs",
        "_places",
        "_sizes",
        "offsets",
    )

    def __init__(self, hasher: Hasher, sizes_bytes: Sequence[int]) -> None:
        self._hasher = hasher
        self._sizes = tuple(sizes_bytes)
        counts = torch.tensor([leaves_in(size) for size in self._sizes], dtype=torch.int64)
        self.offsets: tuple[int, ...] = (0, *counts.cumsum(0).tolist())
        device = hasher.device
        self._owners, self._places = owners_and_places(counts, device)
        self._lengths = torch.tensor([signed(size * PER_BYTE) for size in self._sizes], dtype=torch.int64).to(device)
        self._empty_ones = [number for number, size in enumerate(self._sizes) if not size]
        self._large_ones = [number for number, size in enumerate(self._sizes) if size > _SHORT_BYTES]
        self._packs: list[_TinyPack | _ShortPack] = []
        tiny = [number for number, size in enumerate(self._sizes) if 0 < size <= _TINY_BYTES]
        if tiny:
            self._packs.append(_TinyPack(hasher, self._members(tiny, [_TINY_BYTES * k for k in range(len(tiny))])))
        short = [number for number, size in enumerate(self._sizes) if _TINY_BYTES < size <= _SHORT_BYTES]
        if short:
            rows = _EXACT_ROWS if hasher.exactly else _ROWS
            stage = torch.empty(rows * _ROW_BYTES, dtype=torch.uint8, device=device)  # of all: one after the other
            self._packs += [
                _ShortPack(hasher, stage, self._members(*held)) for held in _filled(short, self._sizes, rows)
            ]

    def _members(self, numbers: list[int], begins: list[int]) -> list[_Member]:
        return [_Member(n, self._sizes[n], at, self.offsets[n]) for n, at in zip(numbers, begins, strict=True)]

    def leaves(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The leaves of all *tensors*, one after the other; None where one of them has another size by now.

        Raises as ``Hasher.fingerprint``.
        """
        for number in self._empty_ones:
            tensor = tensors[number]
            if tensor is None or plain(tensor).numel():
                return None
        result = torch.zeros(self.offsets[-1], dtype=torch.int64, device=self._hasher.device)
        with torch.no_grad():
            for number in self._large_ones:
                tensor = tensors[number]
                if tensor is None:
                    return None
                local = plain(tensor)
                if local.numel() * local.element_size() != self._sizes[number]:
                    return None
                self._hasher.leaves_into(local, result[self.offsets[number] : self.offsets[number + 1]])
            for pack in self._packs:
                if not pack.leaves_into(tensors, result):
                    return None
        return result

    def roots(self, leaves: torch.Tensor) -> torch.Tensor:
        """What ``Hasher.roots`` gives for these tensors, from their leaves."""
        return self._lengths.index_add(0, self._owners, mixed(leaves + self._places))


@dataclass(frozen=True, slots=True)
class _Member:
    """A tensor in a pack.

    Attributes:
        number: its place among the tensors of the batch.
        begin: where its bytes are in the stage.
        leaf: where its leaf is among those of all.
    """

    number: int
    size_bytes: int
    begin: int
    leaf: int

    @property
    def rows(self) -> int:
        return -(-self.size_bytes // _ROW_BYTES)


class _Stage:
    """Copies of small tensors, byte for byte, in logical (C) order, each at its own place."""

    __slots__ = ("_bytes", "_device", "_members", "_views")

    def __init__(self, memory: torch.Tensor, members: list[_Member]) -> None:
        self._bytes = memory
        self._device = memory.device
        self._members = members
        self._views: list[torch.Tensor] = []  # of the stage, each like its tensor

    def fill(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether all are there and have the sizes that they should have."""
        views = self._views or [self._bytes] * len(self._members)
        found = []
        for at, member in enumerate(self._members):
            tensor = tensors[member.number]
            if tensor is None:
                return False
            local = tensor if type(tensor) in (torch.Tensor, torch.nn.Parameter) else plain(tensor)
            view = views[at]
            if not (
                local.dtype is view.dtype
                and local.shape == view.shape
                and local.layout is torch.strided
                and local.device == self._device
            ):
                local = plain(local)
                if local.device != self._device:
                    raise ValueError(f"cannot hash a tensor on {local.device} among those on {self._device}")
                if local.numel() * local.element_size() != member.size_bytes:
                    return False
                own = self._bytes[member.begin : member.begin + member.size_bytes]
                views[at] = own.view(local.dtype).view(local.shape)
            found.append(local)
        self._views = views
        torch._foreach_copy_(views, found)
        return True


class _TinyPack:
    __slots__ = ("_factors", "_leaves", "_stage", "_words")

    def __init__(self, hasher: Hasher, members: list[_Member]) -> None:
        memory = torch.zeros(len(members) * _TINY_BYTES, dtype=torch.uint8, device=hasher.device)
        self._stage = _Stage(memory, members)
        self._words = memory.view(torch.int32).view(-1, _TINY_WORDS)
        self._factors = hasher.large[:_TINY_WORDS] * hasher.small[0].to(torch.int64)
        self._leaves = torch.tensor([m.leaf for m in members], device=hasher.device)

    def leaves_into(self, tensors: Sequence[torch.Tensor | None], out: torch.Tensor) -> bool:
        if not self._stage.fill(tensors):
            return False
        out.index_copy_(0, self._leaves, torch.mul(self._words, self._factors).sum(1))
        return True


class _ShortPack:
    """Args: *members* by their rows, the fewest first."""

    __slots__ = ("_factors", "_hasher", "_leaves", "_members", "_memory", "_rows", "_single", "_stage", "_words")

    def __init__(self, hasher: Hasher, memory: torch.Tensor, members: list[_Member]) -> None:
        self._hasher = hasher
        self._members = members
        self._rows = sum(m.rows for m in members)
        self._memory = memory[: self._rows * _ROW_BYTES]
        self._stage = _Stage(self._memory, members)
        self._words = self._memory.view(torch.int32).view(-1, LARGE)
        self._single = sum(1 for m in members if m.rows == 1)
        if hasher.exactly:
            self._leaves = torch.tensor([m.leaf for m in members])
        else:
            self._leaves = torch.tensor([m.leaf for m in members for _ in range(m.rows)], device=hasher.device)
            self._factors = torch.cat([hasher.small[: m.rows] for m in members])

    def leaves_into(self, tensors: Sequence[torch.Tensor | None], out: torch.Tensor) -> bool:
        self._memory.zero_()
        if not self._stage.fill(tensors):
            return False
        if self._hasher.exactly:
            out.index_copy_(0, self._leaves, self._sums_exactly())
        else:
            sums = torch.mul(self._words, self._hasher.large).sum(1)
            out.index_add_(0, self._leaves, sums.mul_(self._factors))
        return True

    def _sums_exactly(self) -> torch.Tensor:
        hasher, single = self._hasher, self._single
        chunk, partial, partial64 = hasher.scratch()
        rows = chunk.view(-1, LARGE)[: self._rows]
        rows.copy_(self._words)
        torch.mul(rows[:single], hasher.small[0], out=partial[:single])
        at = single
        for place in range(single, len(self._members)):
            count = self._members[place].rows
            torch.mv(rows[at : at + count].t(), hasher.small[:count], out=partial[place])
            at += count
        exact = partial64[: len(self._members)]
        exact.copy_(partial[: len(self._members)])
        return torch.mv(exact, hasher.large)


def _filled(numbers: list[int], sizes: Sequence[int], rows: int) -> list[tuple[list[int], list[int]]]:
    """Which tensors fill the stage together, by their rows, and where each begins in it."""
    packs: list[tuple[list[int], list[int]]] = []
    left = 0
    for number in sorted(numbers, key=lambda n: -(-sizes[n] // _ROW_BYTES)):
        own = -(-sizes[number] // _ROW_BYTES)
        if own > left:
            packs.append(([], []))
            left = rows
        packs[-1][0].append(number)
        packs[-1][1].append((rows - left) * _ROW_BYTES)
        left -= own
    return packs
