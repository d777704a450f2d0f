"""Every claim of the fingerprint's docstring, on random tensors of every dtype, and against a plain reading of it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.integrity.coefficients import GOLDEN, LEAF_BYTES, LEAF_WORDS, MASK, PER_BYTE, mix64, weights
from steadyrun.integrity.fingerprint import Hasher, Running, fingerprint, merge, root_of

_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "complex32", "bool"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64"),
)
DTYPES = [getattr(torch, name) for name in _NAMES if hasattr(torch, name)]
WEIGHTS = weights()
HASHER = Hasher()
WORDS = 3 * LEAF_WORDS // 2 + 123


def noise(size_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


def read_plainly(data: bytes) -> int:
    total = len(data) * PER_BYTE
    for number, at in enumerate(range(0, len(data), LEAF_BYTES), start=1):
        leaf = data[at : at + LEAF_BYTES]
        leaf += bytes(-len(leaf) % 4)
        words = (int.from_bytes(leaf[i : i + 4], "little", signed=True) for i in range(0, len(leaf), 4))
        total += mix64(sum(c * w for c, w in zip(WEIGHTS, words, strict=False)) + number * GOLDEN)
    return total & MASK


# -- the value ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "size", [0, 1, 2, 3, 4, 5, 1023, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 2 * LEAF_BYTES + 6]
)
def test_the_value_is_what_the_docstring_says(size: int) -> None:
    data = noise(size)
    raw = bytes(data.tolist())
    expected = read_plainly(raw)
    assert fingerprint(data, HASHER).root == expected
    assert Hasher(exactly=False).fingerprint(data) == HASHER.fingerprint(data)
    assert [r & MASK for r in HASHER.roots([data, noise(7), data]).tolist()][::2] == [expected, expected]
    assert fingerprint(raw, HASHER) == HASHER.fingerprint(data)


def test_extreme_words_are_summed_exactly() -> None:
    for value in (-(1 << 31), (1 << 31) - 1, -1):
        words = torch.full((LEAF_WORDS,), value, dtype=torch.int32)
        assert HASHER.fingerprint(words).leaves == (value * sum(WEIGHTS) & MASK,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_bytes_count(dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    raw = noise(48 * 50 * 16)
    if dtype is torch.bool:
        raw &= 1
    tensor = raw.view(dtype)
    expected = fingerprint(raw, HASHER)
    shaped = tensor.view(50, -1)
    assert HASHER.fingerprint(shaped) == expected
    strided = torch.empty(shaped.shape[1], 50, dtype=dtype).t()
    strided.copy_(shaped)
    assert not strided.is_contiguous()
    assert HASHER.fingerprint(strided) == expected
    odd = torch.zeros(raw.numel() + size, dtype=torch.uint8)[size:].view(dtype)  # not at a multiple of 4 bytes
    odd.view(torch.uint8).copy_(raw)
    assert HASHER.fingerprint(odd) == expected


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 6), st.integers(1, 40), st.integers(1, 3000), st.integers(0, 3), st.randoms())
def test_views_are_hashed_as_their_copies(cut: int, rows: int, columns: int, kind: int, r: random.Random) -> None:
    base = noise(4 * (rows + cut) * (columns + cut)).view(torch.int32).view(rows + cut, columns + cut)
    view = base[cut:, cut:]
    if kind == 1:
        view = view.t()
    elif kind == 2:
        view = view[:: r.randint(1, 3), :: r.randint(1, 3)]
    elif kind == 3:
        view = view[:, :1].expand(rows, columns)
    assert HASHER.fingerprint(view) == HASHER.fingerprint(view.clone(memory_format=torch.contiguous_format))


def test_large_strided_tensors_pass_through_the_stage_in_order() -> None:
    base = noise(4 * 1500 * 2300).view(torch.int32).view(1500, 2300)
    for view in (base.t(), base[:, 1:], base.view(10, 150, 2300).permute(2, 0, 1)):
        assert HASHER.fingerprint(view) == HASHER.fingerprint(view.contiguous())
        last = len(HASHER.fingerprint(view).leaves) - 1
        for leaf in (0, 11, last):
            assert HASHER.leaf_bytes(view, leaf) == HASHER.leaf_bytes(view.contiguous(), leaf)
    with pytest.raises(IndexError, match="no leaf"):
        HASHER.leaf_bytes(base, last + 1)


def test_lazily_conjugated_and_negated_tensors_are_hashed_by_value() -> None:
    tensor = torch.randn(1000, dtype=torch.complex64)
    assert HASHER.fingerprint(tensor.conj()) == HASHER.fingerprint(tensor.conj().resolve_conj())
    assert HASHER.fingerprint(tensor.conj().imag) == HASHER.fingerprint(tensor.conj().imag.resolve_neg())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2 * LEAF_BYTES + 5), max_size=5))
def test_pieces_make_the_same_as_the_whole(sizes: list[int]) -> None:
    data = bytes(noise(sum(sizes)).tolist()) if sum(sizes) < 50000 else noise(sum(sizes)).numpy().tobytes()
    running = Running(HASHER)
    at = 0
    for size in sizes:
        running.update(memoryview(data)[at : at + size])
        at += size
    whole = fingerprint(data, HASHER)
    assert running.fingerprint() == whole
    assert root_of(whole.leaves, whole.size_bytes) == whole.root


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.quantize_per_tensor(torch.ones(3), 1, 0, torch.qint8),
    ],
)
def test_tensors_without_plain_bytes_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match="hash the tensors that it consists of"):
        HASHER.fingerprint(tensor)


def test_training_does_not_notice() -> None:
    weight = torch.nn.Parameter(torch.ones(70000))
    before = HASHER.fingerprint(weight)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert HASHER.fingerprint(weight) == before
    (weight * 2).sum().backward()
    assert HASHER.fingerprint(weight) == before
    assert weight.grad is not None


# -- what always changes it --------------------------------------------------------------------------------------------
BASE = noise(4 * WORDS).view(torch.int32)
REFERENCE = HASHER.fingerprint(BASE)


def changed(change: Callable[[torch.Tensor], None]) -> bool:
    tensor = BASE.clone()
    change(tensor)
    assert not torch.equal(tensor, BASE)
    found = HASHER.fingerprint(tensor)
    return found.root != REFERENCE.root and found.leaves != REFERENCE.leaves


def flip(tensor: torch.Tensor, word: int, bit: int) -> None:
    tensor[word] ^= (1 << bit) - ((1 << 32) if bit == 31 else 0)


def flip_all(tensor: torch.Tensor, flips: list[tuple[int, int]]) -> None:
    for word, bit in flips:
        flip(tensor, word, bit)


words = st.integers(0, WORDS - 1)
in_leaf = st.integers(0, LEAF_WORDS - 1)
bits = st.integers(0, 31)


@settings(max_examples=150, deadline=None)
@given(words, bits)
def test_every_single_flip_changes_it(word: int, bit: int) -> None:
    assert changed(lambda t: flip(t, word, bit))


@settings(max_examples=200, deadline=None)
@given(in_leaf, in_leaf, bits, bits, st.booleans())
def test_every_double_flip_in_a_leaf_changes_it(i: int, j: int, a: int, b: int, is_same_bit: bool) -> None:
    b = a if is_same_bit else b
    if (i, a) != (j, b):
        assert changed(lambda t: flip_all(t, [(i, a), (j, b)]))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(in_leaf, bits), min_size=1, max_size=15, unique=True))
def test_flips_whose_lowest_bit_is_hit_an_odd_number_of_times_change_it(flips: list[tuple[int, int]]) -> None:
    lowest = min(b for _, b in flips)
    if sum(b == lowest for _, b in flips) % 2:
        assert changed(lambda t: flip_all(t, flips))


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, LEAF_BYTES - 1),
    st.integers(0, LEAF_BYTES - 1),
    st.sampled_from([torch.uint8, torch.int16, torch.int32]),
)
def test_every_swap_of_elements_in_a_leaf_changes_it(i: int, j: int, dtype: torch.dtype) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    i, j = i // size, j // size
    elements = BASE.view(dtype)
    if elements[i] != elements[j]:

        def swap(t: torch.Tensor) -> None:
            t.view(dtype)[[i, j]] = t.view(dtype)[[j, i]]

        assert changed(swap)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, LEAF_WORDS), st.integers(-(1 << 31), (1 << 31) - 1), st.integers(-(1 << 31), (1 << 31) - 1))
def test_every_constant_fill_differs_from_every_other(count: int, one: int, other: int) -> None:
    if one != other:
        a = HASHER.fingerprint(torch.full((count,), one, dtype=torch.int32))
        b = HASHER.fingerprint(torch.full((count,), other, dtype=torch.int32))
        assert a.root != b.root


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 3000))
def test_lengths_differ(one: int, other: int) -> None:
    if one != other:
        zeros = torch.zeros(3000, dtype=torch.uint8)
        assert HASHER.fingerprint(zeros[:one]).root != HASHER.fingerprint(zeros[:other]).root


# -- 200 random injections of each kind, in every dtype ----------------------------------------------------------------
def _error_kinds() -> dict[str, Callable[[torch.Tensor, random.Random], None]]:
    """On elements as integers; each may also change nothing."""

    def mask(t: torch.Tensor, bit: int) -> torch.Tensor:
        width = 8 * t.element_size()
        value = 1 << bit
        is_signed = t.dtype is not torch.uint8
        return torch.tensor(value - (1 << width) if is_signed and bit == width - 1 else value, dtype=t.dtype)

    def flip_one(t: torch.Tensor, at: int, bit: int) -> None:
        t[at] ^= mask(t, bit)

    def width(t: torch.Tensor) -> int:
        return 8 * t.element_size()

    def single(t: torch.Tensor, r: random.Random) -> None:
        flip_one(t, r.randrange(len(t)), r.randrange(width(t)))

    def low(t: torch.Tensor, r: random.Random) -> None:
        flip_one(t, r.randrange(len(t)), r.randrange(4))

    def double(t: torch.Tensor, r: random.Random) -> None:
        for at in r.sample(range(len(t)), 2):
            flip_one(t, at, r.randrange(width(t)))

    def same_bit(t: torch.Tensor, r: random.Random) -> None:
        bit = r.randrange(width(t))
        for at in r.sample(range(len(t)), 2):
            flip_one(t, at, bit)

    def signs(t: torch.Tensor, r: random.Random) -> None:
        for at in r.sample(range(len(t)), 2):
            flip_one(t, at, width(t) - 1)

    def four_signs(t: torch.Tensor, r: random.Random) -> None:
        first = r.randrange(len(t) - 4)
        for at in range(first, first + 4):
            flip_one(t, at, width(t) - 1)

    def stuck(t: torch.Tensor, r: random.Random) -> None:
        first = r.randrange(len(t) - 64 * 32)
        t[first : first + 64 * 32 : 32] &= ~mask(t, r.randrange(width(t)))

    def swap(t: torch.Tensor, r: random.Random) -> None:
        at = r.sample(range(len(t)), 2)
        t[at] = t[at[::-1]]

    def swap_rows(t: torch.Tensor, r: random.Random) -> None:
        rows = t[: 64 * (len(t) // 64)].view(64, -1)
        at = r.sample(range(64), 2)
        rows[at] = rows[at[::-1]]

    def shift(t: torch.Tensor, r: random.Random) -> None:
        t.copy_(t.roll(r.choice([-1, 1])))

    def stale(t: torch.Tensor, r: random.Random) -> None:
        at = r.randrange(len(t) - 1)
        t[at] = t[at + 1]

    return {
        f.__name__: f for f in (single, low, double, same_bit, signs, four_signs, stuck, swap, swap_rows, shift, stale)
    }


KINDS = _error_kinds()
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@pytest.mark.parametrize("kind", KINDS)
def test_none_of_200_random_errors_is_missed(kind: str) -> None:
    r = random.Random(f"{kind} 1")
    injected = 0
    while injected < 200:
        dtype = DTYPES[injected % len(DTYPES)]
        size = torch.empty(0, dtype=dtype).element_size()
        count = r.choice([5000, 33333, 66000]) // max(1, size // 8) | 1
        base = noise(count * size, injected).view(dtype)
        bad = base.clone()
        KINDS[kind](bad.view(INTEGERS[size]), r)
        if torch.equal(bad.view(torch.uint8), base.view(torch.uint8)):
            continue
        injected += 1
        assert HASHER.fingerprint(bad).root != HASHER.fingerprint(base).root, f"{kind} in {dtype}, number {injected}"


def test_what_other_sums_miss_is_seen() -> None:
    for one, other in ((torch.zeros(4096), torch.ones(4096)), (torch.ones(4096), torch.full((4096,), 2.0))):
        assert HASHER.fingerprint(one).root != HASHER.fingerprint(other).root
    quiet = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    signalling = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)
    assert HASHER.fingerprint(quiet).root != HASHER.fingerprint(signalling).root
    assert HASHER.fingerprint(torch.tensor([0.0])).root != HASHER.fingerprint(torch.tensor([-0.0])).root


# -- one root for a model ----------------------------------------------------------------------------------------------
def test_a_models_root_depends_on_names_and_not_on_their_order() -> None:
    roots = {"a": 1, "b": 2, "c": 3}
    assert merge(roots) == merge(dict(reversed(roots.items())))
    assert merge(roots) != merge({"a": 2, "b": 1, "c": 3})
    assert merge(roots) != merge(roots | {"d": 0})
    assert len({merge(roots | {"b": 2 ^ 1 << bit}) for bit in range(64)} | {merge(roots)}) == 65


# -- memory ------------------------------------------------------------------------------------------------------------
def test_scratch_does_not_grow_with_the_tensor() -> None:
    hasher = Hasher()
    for size in (1 << 20, 1 << 26):
        hasher.fingerprint(torch.zeros(size, dtype=torch.uint8))
        hasher.fingerprint(torch.zeros(2, size // 2, dtype=torch.uint8).t())
        assert hasher.scratch_bytes <= 7 << 20
