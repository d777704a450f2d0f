"""Tensors hashed together have the roots that each has by itself, whatever they are and however they change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steadyrun.integrity.batch import Batch
from steadyrun.integrity.coefficients import LARGE, LEAF_BYTES
from steadyrun.integrity.fingerprint import Hasher

ROW = 4 * LARGE
HASHERS = (Hasher(), Hasher(exactly=False))  # as on a CPU, as on a device
SIZES = (0, 1, 2, 3, 4, 7, 255, 256, 257, 1000, ROW - 1, ROW, ROW + 1, 5 * ROW + 13, 8 * ROW, 8 * ROW + 1, LEAF_BYTES)
DTYPES = (torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.float64, torch.complex64)


def noise(size_bytes: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    size_bytes -= size_bytes % dtype.itemsize
    high = 2 if dtype is torch.bool else 256
    return torch.randint(0, high, (size_bytes,), dtype=torch.uint8, generator=generator).view(dtype)


def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def batch_of(tensors: list[torch.Tensor], hasher: Hasher) -> Batch:
    return Batch(hasher, [size_of(t) for t in tensors])


def agrees(tensors: list[Any], batch: Batch, hasher: Hasher) -> bool:
    leaves = batch.leaves(tensors)
    assert leaves is not None
    alone = [hasher.fingerprint(t) for t in tensors]
    unsigned = [v % 2**64 for v in leaves.tolist()]
    assert [tuple(unsigned[a:b]) for a, b in zip(batch.offsets, batch.offsets[1:], strict=False)] == [
        f.leaves for f in alone
    ]
    return [v % 2**64 for v in batch.roots(leaves).tolist()] == [f.root for f in alone]


@pytest.fixture(params=HASHERS, ids=["exactly", "plainly"])
def hasher(request: pytest.FixtureRequest) -> Hasher:
    assert isinstance(request.param, Hasher)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_every_size_as_by_itself(hasher: Hasher, dtype: torch.dtype) -> None:
    tensors = [noise(size, dtype, seed) for seed, size in enumerate(SIZES)]
    assert agrees(tensors, batch_of(tensors, hasher), hasher)


def mixed_ones(draw: random.Random, count: int) -> Iterator[torch.Tensor]:
    for seed in range(count):
        tensor = noise(
            draw.randrange(12 * ROW) if draw.random() < 0.3 else draw.randrange(600), draw.choice(DTYPES), seed
        )
        form = draw.randrange(5)
        if form == 1 and tensor.numel() > 1:
            tensor = tensor[: tensor.numel() // 2 * 2].view(2, -1).t()
        elif form == 2:
            tensor = tensor[1::3]
        elif form == 3 and tensor.numel():
            tensor = tensor[:1].view(())
        elif form == 4 and tensor.dtype is torch.complex64:
            tensor = tensor.conj()
        yield tensor


@pytest.mark.parametrize("seed", range(6))
def test_of_a_mix_of_forms_and_types(hasher: Hasher, seed: int) -> None:
    tensors = list(mixed_ones(random.Random(seed), 150))
    batch = batch_of(tensors, hasher)
    assert agrees(tensors, batch, hasher)
    random.Random(seed).choice([t for t in tensors if t.dtype is torch.float32 and t.numel()]).add_(1)
    assert agrees(tensors, batch, hasher)


def test_parameters_that_are_replaced_and_change_their_form(hasher: Hasher) -> None:
    parameters = [torch.nn.Parameter(torch.randn(8, 16)) for _ in range(3)]
    batch = batch_of(list(parameters), hasher)
    assert agrees(parameters, batch, hasher)
    parameters[1].data = torch.randn(16, 8)
    parameters[2].data = torch.randn(8, 32).bfloat16()
    assert agrees(parameters, batch, hasher)


@pytest.mark.parametrize("size", [0, 3, 1000, 100_000])
def test_another_size_is_told(hasher: Hasher, size: int) -> None:
    tensors: list[torch.Tensor | None] = [torch.zeros(size), torch.zeros(50)]
    batch = Batch(hasher, [4 * size, 200])
    assert batch.leaves(tensors) is not None
    for other in (torch.zeros(size + 1), None):
        assert batch.leaves([other, tensors[1]]) is None
    assert batch.leaves(tensors) is not None


def test_a_tensor_without_bytes_is_refused(hasher: Hasher) -> None:
    batch = Batch(hasher, [40])
    assert batch.leaves([torch.zeros(10)]) is not None
    for other in (torch.zeros(10, device="meta"), torch.eye(10)[0].to_sparse()):
        with pytest.raises(TypeError, match="cannot hash"):
            batch.leaves([other])


def test_a_flip_of_any_bit_of_a_small_tensor_changes_its_root_only(hasher: Hasher) -> None:
    tensors = [torch.zeros(5), torch.zeros(700), torch.zeros(9000), torch.zeros(1)]
    batch = batch_of(tensors, hasher)

    def roots() -> list[int]:
        leaves = batch.leaves(tensors)
        assert leaves is not None
        return list(batch.roots(leaves).tolist())

    before = roots()
    draw = random.Random(1)
    for _ in range(200):
        which = draw.randrange(len(tensors))
        words = tensors[which].view(torch.int32)
        at, bit = draw.randrange(len(words)), 1 << draw.randrange(31)
        words[at] ^= bit
        assert [a == b for a, b in zip(before, roots(), strict=True)] == [n != which for n in range(len(tensors))]
        words[at] ^= bit
    assert roots() == before


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_many_small_tensors_take_few_calls_of_torch(hasher: Hasher) -> None:
    def calls(count: int) -> int:
        tensors = [torch.randn(n) for n in (1, 30, 768, 2000) for _ in range(count)]
        batch = batch_of(tensors, hasher)
        batch.leaves(tensors)
        with Calls() as counted:
            batch.leaves(tensors)
        return counted.count

    assert calls(100) - calls(20) <= 4 * 80  # at most one for each; alone each takes more than ten
