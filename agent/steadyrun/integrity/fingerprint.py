"""A 64-bit fingerprint of a tensor's bytes that depends on where each byte is; the same on every device.

**What it is.** The bytes of the tensor's elements in logical (C) order are words: little-endian int32, the last one
filled up with zero bytes. 2^16 words (256 KiB) are a leaf::

    leaf_i = sum over j of C[j] * word[i, j]                              mod 2^64
    root   = sum over i of mix64(leaf_i + (i + 1) * GOLDEN) + bytes * PER_BYTE    mod 2^64

Integer sums have no order, so the value depends neither on threads nor on the device. Strides, views and shapes do not
matter, dtypes only by their bytes: NaN payloads, -0, float8, complex and bool are exact.

**What always changes it** (C: odd; C[i] +- C[j] never divisible by 2^33; see ``coefficients``; v2(x) is the number of
times that 2 divides x; a change of word j by d, 0 < |d| < 2^32, adds C[j] * d, and v2(d) <= 31):

- *one changed word*, whatever is changed in it; so one flipped bit, one wrong element of up to 4 bytes that does not
  cross a word: v2(C[j] * d) = v2(d) <= 31 < 64;
- *two flipped bits in a leaf*. Bits a < b: 2^a * (odd +- even * odd) is no multiple of 2^(a + 1). The same bit of words
  i and j: 2^a * (+-C[i] +- C[j]), and v2 <= 31 + 32 < 64. Likewise any set of flips whose lowest bit is flipped in an
  odd number of words of the leaf;
- *two words exchanged in a leaf*, and two elements of 1, 2 or 4 bytes: (u - v) * (2^s * C[i] - 2^t * C[j]) with bit
  places s and t inside the words: for s = t, v2 <= 31 + 32 < 64 (u - v is below 2^(32 - s)); for s != t the second
  factor is 2^min(s, t) times an odd number;
- *a fill by a constant* of another one: the same d in the first n words of a leaf adds d * (C[0] + ... + C[n - 1]), and
  no such sum is divisible by 2^33. True for any pattern that repeats with the word, and for 8-byte elements of which
  only the lower or only the upper half differs;
- *another length*, all else (the leaves) being equal.

In all these the leaf changes for sure. If it is the only one, so does the root, because mix64 is a bijection. Where
several leaves change (two flips in two leaves, a fill), each leaf shows it for sure, and the roots are equal only if
mixed values cancel: a chance of 2^-64.

**What is missed, and how rarely.** Everything else: more flips than two, exchanged blocks, exchanged 8-byte elements,
anything across leaves. A change of three or more words in ways unrelated to C cancels with a probability between 2^-64
and, where only the highest bits of words change, 2^-33 (all terms are then multiples of 2^31). No protection against
somebody who makes collisions on purpose.

**What it costs.** On a CPU each chunk of words becomes float64, in which a BLAS multiplies it with the small factors,
exactly (``|sum| <= 2^31 * 2^22``); other devices multiply by the full weights in int64. Both read the tensor once;
scratch is bounded (``Hasher.scratch_bytes``), and nothing waits for a device until a number is asked for.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from steadyrun.integrity.coefficients import (
    GOLDEN,
    LARGE,
    LEAF_BYTES,
    LEAF_WORDS,
    MASK,
    PER_BYTE,
    SMALL,
    large_factors,
    signed,
    small_factors,
)
from steadyrun.integrity.roots import merge, root_of

__all__ = [
    "Fingerprint",
    "Hasher",
    "Running",
    "fingerprint",
    "leaves_in",
    "merge",
    "mixed",
    "owners_and_places",
    "plain",
    "root_of",
]

# On a CPU a leaf at a time becomes float64: 512 KiB stay in the caches, and two calls of torch (3 us each) are small
# beside the work on it. The partial sums of so many leaves meet the large factors at once.
_CPU_BATCH_LEAVES: Final = 64
# On a device: 64 MiB of int64 at a time, so that launches (5 us) are small beside the reading of 32 MiB.
_DEVICE_BATCH_LEAVES: Final = 128
# What is not in one piece, or not at a multiple of 4 bytes, is copied through this much.
_STAGE_BYTES: Final = 8 * LEAF_BYTES
_RUN_BYTES: Final = 4 * LEAF_BYTES  # of strided ones: many rows at once, so that each cache line is read once
_COLUMNS: Final = 128


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of one tensor, or of any bytes.

    Attributes:
        root: 64 bits.
        leaves: the sum of each 256 KiB, by place; 64 bits each.
        size_bytes: of what it is.
    """

    root: int
    leaves: tuple[int, ...]
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.root:016x}"


class Hasher:
    """Makes fingerprints of tensors on one device; holds the weights and the scratch memory for that.

    For one thread at a time. Nothing but this scratch is allocated, whatever the sizes of the tensors, except 8 bytes
    per leaf (0.003 % of the tensor).

    Args:
        exactly: sum in float64, by a BLAS; None: on a CPU. The values are the same.

    Attributes:
        exactly: see there.
        small, large: the factors of the weights on the device, int64; the small ones as float64, if it is so summed.
    """

    __slots__ = (
        *("_chunk", "_device", "_partial", "_partial64", "_products", "_stage", "_weights"),
        *("exactly", "large", "small"),
    )

    def __init__(self, device: torch.device | str = "cpu", exactly: bool | None = None) -> None:
        self._device = torch.device(device)
        self.exactly = self._device.type == "cpu" if exactly is None else exactly
        small = torch.tensor(small_factors(), dtype=torch.int64)
        large = torch.tensor([signed(v) for v in large_factors()], dtype=torch.int64)
        self._weights = torch.outer(small, large).view(-1).to(self._device)
        self.large = large.to(self._device)
        self.small = (small.to(torch.float64) if self.exactly else small).to(self._device)
        self._stage: torch.Tensor | None = None
        self._products: torch.Tensor | None = None
        self._chunk: torch.Tensor | None = None
        self._partial: torch.Tensor | None = None
        self._partial64: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def scratch_bytes(self) -> int:
        """Held at present; grows to at most 7 MiB on a CPU and 67 MiB on a device."""
        held = (self._weights, self._stage, self._products, self._chunk, self._partial, self._partial64)
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    # -- tensors -------------------------------------------------------------------------------------------------------
    def fingerprint(self, tensor: torch.Tensor) -> Fingerprint:
        """Of all elements of *tensor*; of the local shard, where it is a DTensor. Waits for the device.

        Raises:
            TypeError: the tensor has no plain bytes (sparse, quantized, meta); hash the tensors that it consists of.
            ValueError: it is on another device than this hasher.
        """
        local = plain(tensor)
        leaves = tuple(v & MASK for v in self.leaves(local).tolist())
        size_bytes = local.numel() * local.element_size()
        return Fingerprint(root_of(leaves, size_bytes), leaves, size_bytes)

    def roots(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The roots of *tensors*, as int64 on the device, without waiting for it; raises as ``fingerprint``."""
        locals_ = [plain(tensor) for tensor in tensors]
        lengths = [signed(local.numel() * local.element_size() * PER_BYTE) for local in locals_]
        roots = torch.tensor(lengths, dtype=torch.int64).to(self._device)
        parts = [self.leaves(local) for local in locals_]
        if parts:
            owners, places = owners_and_places(torch.tensor([len(part) for part in parts]), self._device)
            roots.index_add_(0, owners, mixed(torch.cat(parts).add_(places)))
        return roots

    def leaves(self, tensor: torch.Tensor) -> torch.Tensor:
        """The leaves of *tensor*, as int64 on the device, without waiting for it; raises as ``fingerprint``."""
        local = plain(tensor)
        size_bytes = local.numel() * local.element_size()
        result = torch.empty(leaves_in(size_bytes), dtype=torch.int64, device=self._device)
        with torch.no_grad():
            self.leaves_into(local, result)
        return result

    def leaves_into(self, local: torch.Tensor, out: torch.Tensor) -> None:
        """The same into *out*, one element per leaf; *local* is a plain tensor (``DTensor``: its local one)."""
        if local.device.type != self._device.type or (self._device.index or 0) != (local.device.index or 0):
            raise ValueError(f"cannot hash a tensor on {local.device} by a hasher for {self._device}; make one for it")
        at = 0
        for words in self._blocks(local):
            count = -(-words.numel() // LEAF_WORDS)
            self._sum_leaves(words, out[at : at + count])
            at += count

    def leaf_bytes(self, tensor: torch.Tensor, leaf: int) -> bytes:
        """The bytes of leaf number *leaf*; waits for the device; raises as ``fingerprint``, and IndexError."""
        local = plain(tensor)
        size_bytes = local.numel() * local.element_size()
        first = 0
        for words in self._blocks(local):
            count = leaves_in(4 * words.numel())
            if first <= leaf < first + count:
                at = (leaf - first) * LEAF_WORDS
                own = words[at : at + LEAF_WORDS].cpu()
                length = min(LEAF_BYTES, size_bytes - leaf * LEAF_BYTES)
                return ctypes.string_at(own.data_ptr(), length)
            first += count
        raise IndexError(f"no leaf {leaf} in a tensor of {size_bytes} bytes: it has {leaves_in(size_bytes)}")

    # -- words ---------------------------------------------------------------------------------------------------------
    def _blocks(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Words of *tensor* in order, each block but the last a whole number of leaves; valid until the next one."""
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            yield from self._staged(_runs(tensor, _RUN_BYTES // tensor.element_size()))
            return
        # Not reshape: one element may have any stride and still count as contiguous.
        data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        if data.storage_offset() % 4:
            yield from self._staged(_cut(data, _RUN_BYTES))
            return
        body = data.numel() if data.numel() % 4 == 0 else data.numel() // LEAF_BYTES * LEAF_BYTES
        if body:
            yield data[:body].view(torch.int32)
        if body < data.numel():
            yield from self._staged([data[body:]])

    def _staged(self, runs: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The words of *runs*, one after the other, each of at most ``_RUN_BYTES``."""
        if self._stage is None:
            self._stage = torch.empty(_STAGE_BYTES + _RUN_BYTES, dtype=torch.uint8, device=self._device)
        stage, filled = self._stage, 0
        for run in runs:
            size = run.numel() * run.element_size()
            _copy(stage[filled : filled + size].view(run.dtype).view(run.shape), run)
            filled += size
            if filled >= _STAGE_BYTES:
                yield stage[:_STAGE_BYTES].view(torch.int32)
                filled -= _STAGE_BYTES
                stage[:filled] = stage[_STAGE_BYTES : _STAGE_BYTES + filled]
        if filled:
            end = -(-filled // 4) * 4
            stage[filled:end] = 0
            yield stage[:end].view(torch.int32)

    # -- sums ----------------------------------------------------------------------------------------------------------
    def _sum_leaves(self, words: torch.Tensor, out: torch.Tensor) -> None:
        """The leaves of *words*, the last one perhaps short, into *out*."""
        whole = words.numel() // LEAF_WORDS
        if whole:
            body = words[: whole * LEAF_WORDS].view(-1, LEAF_WORDS)
            if self.exactly:
                self._sum_exactly(body, out)
            else:
                self._sum_plainly(body, out)
        count = words.numel() - whole * LEAF_WORDS
        if count and self.exactly:
            self._sum_short(words[whole * LEAF_WORDS :], out[whole:])
        elif count:
            products = words[whole * LEAF_WORDS :].to(torch.int64).mul_(self._weights[:count])
            torch.sum(products, 0, keepdim=True, out=out[whole:])

    def _sum_plainly(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        needed = min(len(rows), _DEVICE_BATCH_LEAVES)
        if self._products is None or len(self._products) < needed:
            self._products = torch.empty(needed, LEAF_WORDS, dtype=torch.int64, device=self._device)
        for at in range(0, len(rows), _DEVICE_BATCH_LEAVES):
            batch = rows[at : at + _DEVICE_BATCH_LEAVES]
            products = self._products[: len(batch)]
            torch.mul(batch, self._weights, out=products)
            torch.sum(products, 1, out=out[at : at + len(batch)])

    def _sum_exactly(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """As ``_sum_plainly``, 1.5 times faster on a CPU without vector instructions for int64 products."""
        chunk, partial, partial64 = self.scratch()
        columns, small = chunk.view(SMALL, LARGE).t(), self.small
        partials = partial.unbind(0)
        for at, batch in enumerate(_cut(rows, _CPU_BATCH_LEAVES)):
            for leaf, sums in zip(batch.unbind(0), partials):  # noqa: B905 - the last batch is shorter
                chunk.copy_(leaf)
                torch.mv(columns, small, out=sums)
            exact = partial64[: len(batch)]
            exact.copy_(partial[: len(batch)])
            begin = at * _CPU_BATCH_LEAVES
            torch.mv(exact, self.large, out=out[begin : begin + len(batch)])

    def _sum_short(self, words: torch.Tensor, out: torch.Tensor) -> None:
        """The one leaf of *words*, which do not fill it, on a CPU."""
        chunk, partial, partial64 = self.scratch()
        count = len(words)
        rows = -(-count // LARGE)
        chunk[:count].copy_(words)
        chunk[count : rows * LARGE].zero_()
        torch.mv(chunk[: rows * LARGE].view(rows, LARGE).t(), self.small[:rows], out=partial[0])
        exact = partial64[:1]
        exact.copy_(partial[:1])
        torch.mv(exact, self.large, out=out)

    def scratch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """To sum exactly: the words of a leaf, then the sums of many by large factors, all float64; those as int64."""
        if self._chunk is None or self._partial is None or self._partial64 is None:
            self._chunk = torch.empty(LEAF_WORDS, dtype=torch.float64)
            self._partial = torch.empty(_CPU_BATCH_LEAVES, LARGE, dtype=torch.float64)
            self._partial64 = torch.empty(_CPU_BATCH_LEAVES, LARGE, dtype=torch.int64)
        return self._chunk, self._partial, self._partial64


class Running:
    """The fingerprint of bytes that come in pieces, on a CPU: equal to that of a tensor with the same bytes."""

    __slots__ = ("_filled", "_hasher", "_leaves", "_pending", "_size_bytes")

    def __init__(self, hasher: Hasher | None = None) -> None:
        self._hasher = hasher or Hasher()
        self._pending = bytearray(LEAF_BYTES)
        self._filled = 0
        self._leaves: list[int] = []
        self._size_bytes = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """The next bytes; *data* has to be contiguous."""
        view = memoryview(data).cast("B")
        self._size_bytes += len(view)
        if self._filled:
            taken = min(LEAF_BYTES - self._filled, len(view))
            self._pending[self._filled : self._filled + taken] = view[:taken]
            self._filled += taken
            view = view[taken:]
            if self._filled < LEAF_BYTES:
                return
            self._add(memoryview(self._pending))
            self._filled = 0
        whole = len(view) // LEAF_BYTES * LEAF_BYTES
        if whole:
            self._add(view[:whole])
        self._filled = len(view) - whole
        self._pending[: self._filled] = view[whole:]

    def fingerprint(self) -> Fingerprint:
        """Of everything so far; more may follow."""
        leaves = list(self._leaves)
        if self._filled:
            leaves += self._sums(memoryview(self._pending)[: self._filled])
        return Fingerprint(root_of(leaves, self._size_bytes), tuple(leaves), self._size_bytes)

    def _add(self, whole: memoryview) -> None:
        self._leaves += self._sums(whole)

    def _sums(self, data: memoryview) -> list[int]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the buffer may be read-only: it is only read
            tensor = torch.frombuffer(data, dtype=torch.uint8)
        return [v & MASK for v in self._hasher.leaves(tensor).tolist()]


def fingerprint(data: torch.Tensor | bytes | bytearray | memoryview, hasher: Hasher | None = None) -> Fingerprint:
    """The fingerprint of a tensor or of bytes; see ``Hasher.fingerprint`` for what is raised.

    Args:
        hasher: to be given by who makes many: making one costs 3 ms.
    """
    if isinstance(data, torch.Tensor):
        return (hasher or Hasher(plain(data).device)).fingerprint(data)
    running = Running(hasher)
    running.update(data)
    return running.fingerprint()


def owners_and_places(counts: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the leaves of tensors that have *counts* of them: whose each is, and what its place there adds to it."""
    owners = torch.arange(len(counts)).repeat_interleave(counts)
    places = torch.arange(1, len(owners) + 1) - (counts.cumsum(0) - counts)[owners]
    return owners.to(device), places.mul_(signed(GOLDEN)).to(device)


def leaves_in(size_bytes: int) -> int:
    return -(-size_bytes // LEAF_BYTES)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank behind *tensor*, without its history."""
    local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's; to_local() would dispatch and may wait
    if type(local) not in (torch.Tensor, torch.nn.Parameter):
        if hasattr(local, "__tensor_flatten__"):
            raise TypeError(f"cannot hash a {type(local).__name__} as one; hash the tensors that it consists of")
        local = local.as_subclass(torch.Tensor)
    if local.layout is not torch.strided or local.is_quantized or local.device.type == "meta":
        raise TypeError(
            f"cannot hash a tensor of layout {local.layout}, dtype {local.dtype}, on {local.device}: it has no plain "
            "bytes; hash the tensors that it consists of (indices and values, int_repr)"
        )
    return local.detach()


def _copy(to: torch.Tensor, run: torch.Tensor) -> None:
    """As ``to.copy_(run)``; where each element of a row lies in another page, a few columns at a time: torch walks
    along the rows of the target, and comes back to a cache line only after the whole row (up to 3 times slower)."""
    if run.dim() > 1 and run.stride(-1) > 1 and run.shape[-1] > _COLUMNS and run.device.type == "cpu":
        for at in range(0, run.shape[-1], _COLUMNS):
            to[..., at : at + _COLUMNS].copy_(run[..., at : at + _COLUMNS])
    else:
        to.copy_(run)


def _cut(tensor: torch.Tensor, rows: int) -> Iterator[torch.Tensor]:
    for at in range(0, len(tensor), rows):
        yield tensor[at : at + rows]


def _runs(tensor: torch.Tensor, most: int) -> Iterator[torch.Tensor]:
    """Slices of *tensor* in logical order, of at most *most* elements."""
    if tensor.numel() <= most:
        if tensor.numel():
            yield tensor
        return
    rows = most // (tensor.numel() // len(tensor))
    if rows:
        yield from _cut(tensor, rows)
        return
    for number in range(len(tensor)):
        yield from _runs(tensor[number], most)


def mixed(values: torch.Tensor) -> torch.Tensor:
    """``mix64`` of each of *values*, in place where it can."""
    values = (values ^ _shifted(values, 30)).mul_(signed(0xBF58476D1CE4E5B9))
    values = (values ^ _shifted(values, 27)).mul_(signed(0x94D049BB133111EB))
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Without the copies of the sign that int64 shifts in."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
