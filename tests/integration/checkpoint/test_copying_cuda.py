"""The same with tensors of a CUDA device."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import pytest
import torch

from steadyrun.checkpoint.arena import Arena
from steadyrun.checkpoint.copying import Copier
from steadyrun.checkpoint.layout import Entry, Layout, place

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")]


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    return [
        normal(1024, 1024),
        normal(2048, 512).bfloat16(),
        normal(300, 200).t(),
        normal(()),
        normal(0, 4),
        torch.tensor(3.0),  # the optimizer's step counts stay on the host
        normal(64, 64) > 0,
    ]


@pytest.fixture
def arena(tensors: list[torch.Tensor]) -> Iterator[Arena]:
    sizes_bytes = [t.nbytes for t in tensors]
    places = place(sizes_bytes)
    entries = tuple(
        Entry(
            f"w{i}",
            (f"w{i}",),
            str(t.dtype).removeprefix("torch."),
            tuple(t.shape),
            (0,) * t.dim(),
            tuple(t.shape),
            places[i],
            sizes_bytes[i],
        )
        for i, t in enumerate(tensors)
    )
    with Arena.create(Layout(0, 1, entries, ()), 0, 2) as made:
        made.prefault()
        yield made


def contents(arena: Arena, number: int) -> list[bytes]:
    return [bytes(arena.slots[number].payload(e)) for e in arena.layout.entries]


def raw(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    host = [t.detach().cpu().contiguous() for t in tensors]
    return [ctypes.string_at(t.data_ptr(), t.nbytes) for t in host]


def test_values_at_the_call_are_saved(arena: Arena, tensors: list[torch.Tensor]) -> None:
    meant = raw(tensors)
    with Copier(arena, "cuda") as copier:
        assert copier.note is None
        slot = arena.slots[0]
        slot.begin(1, 0, 1)
        copier.copy_in(slot, tensors)
        for t in tensors:
            t.zero_()
        slot.seal()
        assert contents(arena, 0) == meant
        copier.copy_out(slot, tensors)
        assert raw(tensors) == meant


def test_changes_by_the_device_wait_for_a_copy_under_way(arena: Arena, tensors: list[torch.Tensor]) -> None:
    with Copier(arena, "cuda") as copier:
        for generation in range(20):
            slot = arena.slots[generation % 2]
            meant = raw(tensors)
            slot.begin(1, 0, generation)
            copying = copier.copy_in(slot, tensors, blocking=False)
            copying.hold_back_changes()
            for t in tensors:
                t.logical_not_() if t.dtype is torch.bool else t.add_(1)
            copying.wait()
            slot.seal()
            assert contents(arena, slot.number) == meant


def test_a_copy_waits_for_what_the_device_still_computes(arena: Arena, tensors: list[torch.Tensor]) -> None:
    with Copier(arena, "cuda") as copier:
        large = torch.randn(4096, 4096, device="cuda")
        slot = arena.slots[0]
        slot.begin(1, 0, 1)
        for _ in range(20):
            large = large @ large / 4096
        tensors[0].copy_(large[:1024, :1024])
        copier.copy_in(slot, tensors)
        slot.seal()
        assert contents(arena, 0) == raw(tensors)
