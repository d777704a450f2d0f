"""Folders that plain ``dcp.save`` wrote on 4 ranks: on any number of ranks the result is that of ``dcp.load``."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import saved_folders as saved
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from steadyrun.checkpoint.contents import Place
from steadyrun.checkpoint.filling import Filler, Job, Want
from steadyrun.checkpoint.reading import (
    NO_MANIFEST,
    NOT_VERIFIED,
    MissingKeysError,
    Reader,
    iter_tensors,
    load_folder,
    load_objects,
    read_tensor,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("foreign")
    saved.write_foreign(root)
    return root


@pytest.fixture
def as_rank() -> Iterator[Callable[[int, int], None]]:
    """``as_rank(1, 3)``: this process is rank 1 of 3 from now on; nothing is ever sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def become(rank: int, world_size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def blank(value: Any) -> Any:
    """The same structure with other values: what nobody writes to is found."""
    if isinstance(value, DTensor):
        local = torch.full_like(value.to_local(), 77)
        return DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    if isinstance(value, torch.Tensor):
        return torch.empty_like(value.detach()).fill_(1)
    if isinstance(value, dict):
        return {k: blank(v) for k, v in value.items()}
    if isinstance(value, list):
        return [blank(v) for v in value]
    return None


def same(a: Any, b: Any, path: str = "") -> None:
    """Bit for bit, dtype for dtype."""
    assert type(a) is type(b), path
    if isinstance(a, DTensor):
        same(a.to_local(), b.to_local(), path)
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), path
        bits = [t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        assert torch.equal(*bits), path
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, f"{path}.{i}")
    else:
        assert a == b, path


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


# -- equal to dcp.load -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", ["dtypes-1", "threads-1"])
def test_every_dtype_shape_and_object(foreign: Path, name: str, verify: bool) -> None:
    want = saved.every_dtype(1)
    theirs, ours = blank(want), blank(want)
    dcp.load(theirs, checkpoint_id=foreign / name, no_dist=True)
    loaded = load_folder(foreign / name, ours, verify=verify)
    same(ours, theirs)
    same(ours["odd"]["large"], want["odd"]["large"])
    same(ours["objects"], want["objects"])
    assert loaded.notes == ((NO_MANIFEST,) if verify else (NOT_VERIFIED,))
    assert (loaded.checked_bytes > loaded.size_bytes) if verify else loaded.checked_bytes == 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("verify", [True, False])
def test_any_number_of_ranks_gets_its_shards(
    foreign: Path, as_rank: Callable[[int, int], None], world_size: int, verify: bool
) -> None:
    for rank in range(world_size):
        as_rank(rank, world_size)
        want = saved.sharded_state(1, world_size, rank)
        theirs, ours = blank(want), blank(want)
        dcp.load(theirs, checkpoint_id=foreign / "sharded-1", no_dist=True)
        load_folder(foreign / "sharded-1", ours, verify=verify)
        same(ours, theirs)
        same(ours, want)


def test_whole_tensors_from_shards_and_other_ways_to_divide(foreign: Path, as_rank: Callable[[int, int], None]) -> None:
    """What was divided along one dimension is loaded divided along the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    full = saved.sharded_full(2)
    for rank in range(3):
        as_rank(rank, 3)
        mesh = init_device_mesh("cpu", (3,))
        want = {"model": {"shard0": saved.distributed(full["shard0"], mesh, [Shard(1)])}}
        want["model"]["shard1"] = saved.distributed(full["shard1"], mesh, [Shard(0)])
        want["model"]["grid"] = full["grid"]
        ours = blank(want)
        load_folder(foreign / "sharded-2", ours)
        same(ours, want)


def test_the_reader_serves_dcp_load_itself(foreign: Path) -> None:
    want = saved.every_dtype(1)
    theirs, ours = blank(want), blank(want)
    dcp.load(theirs, checkpoint_id=foreign / "dtypes-1", no_dist=True)
    dcp.load(ours, storage_reader=Reader(foreign / "dtypes-1"), no_dist=True)
    same(ours, theirs)


def test_other_dtypes_and_strides_of_the_target_are_converted_as_dcp_does(foreign: Path) -> None:
    def targets() -> dict[str, Any]:
        large = torch.empty(1003, 301, dtype=torch.float64).t()
        return {"odd": {"large": large}, "dtypes": {"int32": torch.zeros(7, 22, dtype=torch.int64)[:, ::2]}}

    theirs, ours = targets(), targets()
    dcp.load(theirs, checkpoint_id=foreign / "dtypes-1", no_dist=True)
    load_folder(foreign / "dtypes-1", ours)
    same(ours, theirs)


def test_saved_transforms_are_undone_and_damage_in_them_is_found(tmp_path: Path) -> None:
    import gzip

    extension = pytest.importorskip("torch.distributed.checkpoint._extension", reason="torch 2.6 has no extensions")

    class Gzip(extension.StreamTransformExtension):  # type: ignore[misc,name-defined]
        @staticmethod
        def registry_name() -> str:
            return "test.gzip"

        @staticmethod
        def from_descriptor(version: str) -> Any:
            return Gzip()

        def get_descriptor(self) -> str:
            return "test.gzip/1"

        def transform_to(self, output: Any) -> Any:
            return gzip.GzipFile(fileobj=output, mode="wb")

        def transform_from(self, input: Any) -> Any:
            return gzip.GzipFile(fileobj=input, mode="rb")

    registry = extension.ExtensionRegistry()
    registry.register(Gzip)
    state = {"w": torch.arange(5000.0), "o": {"a": [1, 2]}}
    writer = dcp.FileSystemWriter(tmp_path / "c", _extensions=[Gzip()])
    dcp.save(state, storage_writer=writer, no_dist=True)
    ours = blank(state)
    dcp.load(ours, storage_reader=Reader(tmp_path / "c", extensions=registry), no_dist=True)
    same(ours, state)
    place = FileSystemReader(tmp_path / "c").read_metadata().storage_data[MetadataIndex("w", torch.Size([0]))]
    flip(tmp_path / "c" / place.relative_path, place.offset + place.length // 2)
    with pytest.raises(BaseException, match=r"cannot load w, shard at \[0\], from"):
        dcp.load(ours, storage_reader=Reader(tmp_path / "c", extensions=registry), no_dist=True)


# -- one tensor, some objects ------------------------------------------------------------------------------------------
def test_single_tensors_and_objects_by_key(foreign: Path) -> None:
    full = saved.sharded_full(1)
    same(read_tensor(foreign / "sharded-1", "model.grid"), full["grid"])
    every = dict(iter_tensors(foreign / "sharded-1"))
    same(every, {f"model.{k}": full[k] for k in (k.partition(".")[2] for k in every)})
    assert set(every) == {f"model.{k}" for k in full}
    assert load_objects(foreign / "sharded-1") == {"step": 1}
    assert load_objects(foreign / "dtypes-1", ["objects.numbers.betas"]) == {"objects.numbers.betas": (0.9, 0.95)}
    with pytest.raises(MissingKeysError, match=r"does not hold model\.gird"):
        read_tensor(foreign / "sharded-1", "model.gird")


def test_all_missing_keys_are_named_and_nothing_is_touched(foreign: Path) -> None:
    state = {"model": {"whole": torch.zeros(saved.FULL_SHAPE), "more": torch.zeros(3), "other": {"x": torch.zeros(1)}}}
    with pytest.raises(MissingKeysError, match="strict=False") as caught:
        load_folder(foreign / "sharded-1", state)
    assert caught.value.keys == ("model.more", "model.other.x")
    assert not caught.value.has_written
    assert not state["model"]["whole"].any()
    loaded = load_folder(foreign / "sharded-1", state, strict=False)
    assert loaded.missing == ("model.more", "model.other.x")
    same(state["model"]["whole"], saved.sharded_full(1)["whole"])
    assert not state["model"]["more"].any()


def test_another_shape_is_refused_before_anything_is_read(foreign: Path) -> None:
    state = {"model": {"whole": torch.zeros(saved.FULL_SHAPE[::-1])}}
    with pytest.raises(ValueError, match=r"Size mismatch .* model\.whole"):
        load_folder(foreign / "sharded-1", state)


def test_state_of_modules_and_optimizers_goes_in_through_their_own_methods(tmp_path: Path) -> None:
    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    want, ours = make(1), make(2)
    dcp.save(copy.copy(want), checkpoint_id=tmp_path / "c", no_dist=True)
    load_folder(tmp_path / "c", ours)
    same(dict(ours["model"].state_dict()), dict(want["model"].state_dict()))
    same(ours["optimizer"].state_dict(), want["optimizer"].state_dict())


def test_autograd_knows_that_a_tensor_was_written_to(foreign: Path) -> None:
    weight = torch.zeros(saved.FULL_SHAPE, requires_grad=True)
    before = weight._version
    load_folder(foreign / "sharded-1", {"model": {"whole": weight}})
    assert weight._version > before


# -- any box of any shard ----------------------------------------------------------------------------------------------
@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...], str]]]:
    sizes = tuple(draw(st.lists(st.integers(1, 9), min_size=0, max_size=4)))
    wants = []
    for _ in range(draw(st.integers(1, 3))):
        offsets = tuple(draw(st.integers(0, n - 1)) for n in sizes)
        lengths = tuple(draw(st.integers(1, n - o)) for n, o in zip(sizes, offsets, strict=True))
        wants.append((offsets, lengths, draw(st.sampled_from(["plain", "strided", "wider"]))))
    return sizes, wants


@settings(max_examples=300, deadline=None)
@given(
    boxes(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.complex64]),
    st.booleans(),
    st.sampled_from([64, 1 << 19]),
    st.sampled_from([64, 1 << 19]),
    st.booleans(),
)
def test_any_box_of_a_shard_comes_into_any_tensor(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...], str]]],
    dtype: torch.dtype,
    verify: bool,
    piece_bytes: int,
    small_bytes: int,
    is_transposed: bool,
) -> None:
    """Also read in small pieces, and archives too large to be read at once."""
    sizes, asked = case
    full = saved.random_bits(sizes, torch.int8, 5).to(dtype)
    stored = full.mT.contiguous().mT if is_transposed and full.dim() > 1 else full
    folder = tmp_path_factory.getbasetemp() / "boxes"
    folder.mkdir(exist_ok=True)
    begin = b"x" * 100
    with (folder / "f").open("wb") as f:
        f.write(begin)
        torch.save(stored, f)
        length = f.tell() - len(begin)
    wants, parts = [], []
    for offsets, lengths, kind in asked:
        part = full
        for d, (offset, size) in enumerate(zip(offsets, lengths, strict=True)):
            part = part.narrow(d, offset, size)
        target = torch.zeros(lengths, dtype=torch.complex128 if kind == "wider" else dtype)
        if kind == "strided" and lengths:
            target = torch.zeros((*lengths, 2), dtype=dtype)[..., 0]
        wants.append(Want(offsets, lengths, target))
        parts.append(part)
    filler = Filler(folder, verify, threading.Event(), piece_bytes, small_bytes)
    filler.run("f", [Job("t", (0,) * len(sizes), sizes, Place("f", len(begin), length), tuple(wants))])
    for want, part in zip(wants, parts, strict=True):
        assert torch.equal(want.target, part.to(want.target.dtype))
    assert filler.checked_bytes == (length if verify else 0)
