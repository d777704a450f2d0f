"""Checkpoints written without torch, read by torch and its tools, by zipfile, and by our own verification."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from snapshots import (
    distributed,
    fake_rank,
    is_same,
    manifest_of,
    raw_bytes,
    take,
    take_all,
    write_checkpoint,
    write_files,
)
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from steadyrun.checkpoint.commit import begin, commit, is_complete, read_manifest
from steadyrun.checkpoint.contents import DTYPE_BITS
from steadyrun.checkpoint.envelope import envelope, is_storable
from steadyrun.checkpoint.layout import rank_key
from steadyrun.checkpoint.manifest import Fragment, Manifest
from steadyrun.checkpoint.shardfile import WriteOptions
from steadyrun.checkpoint.verify import Report

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:FutureWarning")

DTYPES = sorted(name for name in DTYPE_BITS if is_storable(name) and hasattr(torch, name))


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Any bits that the dtype can have, NaNs and all."""
    generator = torch.Generator().manual_seed(seed)
    count = dtype.itemsize
    for n in shape:
        count *= n
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def every_dtype() -> dict[str, Any]:
    tensors: dict[str, torch.Tensor] = {}
    for seed, name in enumerate(DTYPES):
        dtype = getattr(torch, name)
        tensors[name] = random_tensor(dtype, 37, 11, seed=seed)
        tensors[f"{name}_scalar"] = random_tensor(dtype, 1, seed=seed).reshape(())
        tensors[f"{name}_empty"] = torch.empty((0, 3), dtype=dtype)
        tensors[f"{name}_large"] = random_tensor(dtype, 300, 1001, seed=seed)  # written from where it lies
    return {
        "model": tensors,
        "optim": {"groups": [{"lr": 0.5, "betas": (0.9, 0.95)}, {"lr": 0.1}], "names": ["a", "b"]},
        "step": 7,
    }


@pytest.fixture(scope="module")
def all_dtypes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    state = every_dtype()
    options = WriteOptions(read_back=True, piece_bytes=64 << 10)
    return write_checkpoint(tmp_path_factory.mktemp("all"), 7, [take(state)], options=options), state


def zeros_like(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: zeros_like(value) for key, value in state.items()}
    return [zeros_like(v) for v in state] if isinstance(state, list) else None


def differences(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> list[str]:
    return [key for key in want if not is_same(have[key], want[key])]


def test_torch_loads_every_dtype_bit_by_bit(all_dtypes: tuple[Path, dict[str, Any]]) -> None:
    folder, state = all_dtypes
    loaded = zeros_like(state)
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert differences(loaded["model"], state["model"]) == []
    assert (loaded["optim"], loaded["step"]) == (state["optim"], 7)


def test_torch_converts_it_to_one_file(all_dtypes: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, state = all_dtypes
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    loaded = torch.load(tmp_path / "one.pt", weights_only=False)
    assert differences(loaded["model"], state["model"]) == []
    assert (loaded["optim"], loaded["step"]) == (state["optim"], 7)


def test_metadata_says_what_torchs_own_writer_says(all_dtypes: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, state = all_dtypes
    dcp.save(state, checkpoint_id=tmp_path / "torch", no_dist=True)
    ours = FileSystemReader(folder).read_metadata()
    theirs = FileSystemReader(tmp_path / "torch").read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert set(ours.storage_data) == set(theirs.storage_data)
    assert {i.fqn: i.index for i in ours.storage_data} == {i.fqn: i.index for i in theirs.storage_data}
    assert ours.version == theirs.version
    for index, place in ours.storage_data.items():
        assert vars(place).keys() == {"relative_path", "offset", "length"}, index


def test_each_archive_is_one_of_torch_save(all_dtypes: tuple[Path, dict[str, Any]]) -> None:
    folder, state = all_dtypes
    for index, place in FileSystemReader(folder).read_metadata().storage_data.items():
        with open(folder / place.relative_path, "rb") as file:
            file.seek(place.offset)
            data = file.read(place.length)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.testzip() is None, index
        if index.offset is None:
            continue
        ours = torch.load(io.BytesIO(data), weights_only=True)
        want = state["model"][index.fqn.removeprefix("model.")]
        same = io.BytesIO()
        torch.save(want, same)
        same.seek(0)
        theirs = torch.load(same, weights_only=True)
        assert is_same(ours, theirs), index
        assert (ours.stride(), ours.storage_offset()) == (theirs.stride(), 0), index
        assert ours.untyped_storage().nbytes() == theirs.untyped_storage().nbytes(), index
        assert (ours.requires_grad, type(ours)) == (False, torch.Tensor), index


def test_payloads_begin_on_pages_and_every_byte_has_a_checksum(all_dtypes: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = all_dtypes
    fragment = Fragment.from_json((folder / "__0.shards.json").read_bytes())
    at = 0
    for shard in fragment.shards:
        assert shard.at_bytes == at, shard.key
        assert shard.payload_at_bytes % 4096 == 0 or not shard.payload_bytes, shard.key
        at += shard.length_bytes
    assert at == (folder / "__0_0.distcp").stat().st_size
    at = 0
    for record in fragment.objects:
        assert record.at_bytes == at, record.key
        at += record.length_bytes
    assert at == (folder / "__0_1.distcp").stat().st_size


def test_our_own_verification_finds_nothing(
    all_dtypes: tuple[Path, dict[str, Any]], check: Callable[[Path], Report]
) -> None:
    folder, state = all_dtypes
    report = check(folder)
    assert report.problems == ()
    assert report.tensors == len(state["model"])
    assert is_complete(folder)


def test_a_page_of_zeros_is_found_by_the_checksum_that_torch_stores(
    tmp_path: Path, check: Callable[[Path], Report]
) -> None:
    folder = write_checkpoint(tmp_path, 1, [take({"model": {"w": torch.randn(300, 300)}})])
    with open(folder / "__0_0.distcp", "r+b") as file:
        file.seek(5 * 4096)
        file.write(bytes(4096))
    (problem,) = check(folder).problems
    assert (problem.keys, problem.file) == (("model.w",), "__0_0.distcp")
    assert "pages of 4 KiB are all zero" in problem.text


# -- shards ----------------------------------------------------------------------------------------------------------
FULL = {
    "even": torch.randn(24, 12, generator=torch.Generator().manual_seed(1)),
    "uneven": torch.randn(7, 5, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "few": torch.arange(2),
    "replicated": torch.randn(6, 6, generator=torch.Generator().manual_seed(3)),
}


def hybrid(rank: int) -> dict[str, Any]:
    """HSDP: two replicas of two shards, and what all ranks hold."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    placements = [Replicate(), Shard(0)]
    model: dict[str, Any] = {k: distributed(v, mesh, placements) for k, v in FULL.items() if k != "replicated"}
    model["replicated"] = FULL["replicated"]
    return {"model": model, "step": 3, rank_key(rank, "rng"): [rank]}


def test_shards_of_a_hybrid_job_load_into_another_layout(tmp_path: Path) -> None:
    snapshots = take_all(hybrid, 4)
    folder = write_checkpoint(tmp_path, 3, snapshots)
    for placement, world_size in ((Shard(1), 3), (Shard(0), 3), (Replicate(), 2)):
        for rank in range(world_size):
            with fake_rank(rank, world_size):
                mesh = init_device_mesh("cpu", (world_size,))
                loaded: dict[str, Any] = {"model": {}, rank_key(rank, "rng"): None}
                for key, full in FULL.items():
                    along = placement if full.dim() > 1 else Replicate()
                    loaded["model"][key] = distributed(torch.zeros_like(full), mesh, [along])
                dcp.load(loaded, checkpoint_id=folder, no_dist=True)
                for key, full in FULL.items():
                    tensor = loaded["model"][key]
                    want = distributed(full, mesh, tensor.placements)
                    assert isinstance(tensor, DTensor)
                    assert is_same(tensor.to_local(), want.to_local()), (key, placement, rank)
                assert loaded[rank_key(rank, "rng")] == [rank]
    whole = {"model": zeros_like(FULL)}
    dcp.load(whole, checkpoint_id=folder, no_dist=True)
    assert differences(whole["model"], FULL) == []


def test_metadata_of_shards_is_that_of_torchs_own_planner(tmp_path: Path) -> None:
    snapshots = take_all(hybrid, 4)
    folder = write_checkpoint(tmp_path, 3, snapshots)
    plans, planners = [], []
    for rank in range(4):
        with fake_rank(rank, 4):
            planner = DefaultSavePlanner()
            planner.set_up_planner(hybrid(rank), None, rank == 0)
            plans.append(planner.create_local_plan())
            planners.append(planner)
    _, theirs = planners[0].create_global_plan(plans)
    ours = FileSystemReader(folder).read_metadata()
    assert set(ours.state_dict_metadata) == set(theirs.state_dict_metadata)
    for key, want in theirs.state_dict_metadata.items():
        have = ours.state_dict_metadata[key]
        if not isinstance(want, TensorStorageMetadata):
            assert have == want
            continue
        assert (have.properties, have.size) == (want.properties, want.size), key
        # Torch also lists shards without elements, which no load needs.
        filled = sorted((tuple(c.offsets), tuple(c.sizes)) for c in want.chunks if 0 not in c.sizes)
        assert sorted((tuple(c.offsets), tuple(c.sizes)) for c in have.chunks) == filled, key
    assert ours.planner_data == theirs.planner_data
    for index in ours.storage_data:
        if index.offset is not None:
            assert index.index is not None
            assert ours.state_dict_metadata[index.fqn].chunks[index.index].offsets == index.offset
    assert {(i.fqn, i.offset) for i in ours.storage_data} == {
        (key, c.offsets) for key, t in ours.state_dict_metadata.items() for c in getattr(t, "chunks", ())
    } | {(key, None) for key, t in ours.state_dict_metadata.items() if not isinstance(t, TensorStorageMetadata)}


def test_replicas_that_differ_have_digests_that_differ(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        with torch.no_grad():
            w = torch.ones(1000)
            if rank == 2:
                w[500] += 1e-7 * 2
        return {"w": w, "v": torch.zeros(3)}

    written, _ = write_files(tmp_path, take_all(state, 3))
    digests = [w.replica_digests[0] for w in written]
    assert digests[0] == digests[1] != digests[2]
    # What each rank noted tells which tensor it is.
    noted = [w.fragment.replicas for w in written]
    assert noted[0] == noted[1]
    assert {k for k in noted[0] if noted[0][k] != noted[2][k]} == {"w@0"}


def test_empty_ranks_and_an_empty_checkpoint(tmp_path: Path) -> None:
    """Ranks with nothing to write have no data files; a checkpoint of objects alone is one."""
    folder = write_checkpoint(tmp_path, 1, take_all(lambda rank: {"a": {"b": 1}}, 3))
    names = {f.name for f in read_manifest(folder).files}
    assert names == {"__0_1.distcp", "__0.shards.json", "__1.shards.json", "__2.shards.json", ".metadata"}
    loaded = {"a": {"b": None}}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert loaded == {"a": {"b": 1}}


# -- sizes beyond 32 bits ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size_bytes", [(4 << 30) - 600, (4 << 30) - 1, (4 << 30) + 8])
def test_torch_opens_archives_beyond_4_gib(tmp_path: Path, size_bytes: int) -> None:
    file = tmp_path / "sparse.pt"
    around = envelope("uint8", (size_bytes,), size_bytes, 0)
    with open(file, "wb") as out:
        out.write(around.prefix)
        out.seek(size_bytes, os.SEEK_CUR)
        out.write(around.suffix(0))
    assert file.stat().st_size == around.length_bytes
    tensor = torch.load(file, weights_only=True, mmap=True)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.uint8, (size_bytes,))
    assert tensor[-1] == 0
    reader = torch._C.PyTorchFileReader(str(file))
    assert reader.get_record_offset("data/0") == len(around.prefix)


# -- without torch -----------------------------------------------------------------------------------------------------
def test_the_modules_that_write_load_neither_torch_nor_numpy() -> None:
    names = ("planning", "shardfile", "commit", "dcpfile", "envelope", "opcodes")
    code = "import sys\n" + "\n".join(f"import steadyrun.checkpoint.{n}" for n in names)
    code += "\nprint([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_metadata_needs_no_module_of_ours_to_be_loaded(all_dtypes: tuple[Path, dict[str, Any]]) -> None:
    data = (all_dtypes[0] / ".metadata").read_bytes()
    assert b"steadyrun" not in data
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(pickle.loads(data)).__module__ == "torch.distributed.checkpoint.metadata"


# -- one content, whatever the way -------------------------------------------------------------------------------------
def test_files_are_the_same_however_they_are_written(tmp_path: Path) -> None:
    snapshot = take({"a": torch.randn(700, 301), "b": torch.randn(5), "c": torch.arange(100_000), "d": torch.ones(())})
    unaligned = bytearray(len(snapshot.payload) + 1)
    unaligned[1:] = snapshot.payload

    def digest(name: str, payload: memoryview, options: WriteOptions) -> str:
        folder = tmp_path / name
        folder.mkdir()
        write_files(folder, [type(snapshot)(snapshot.layout, payload, snapshot.blobs)], options)
        return hashlib.sha256(b"".join(p.read_bytes() for p in sorted(folder.iterdir()))).hexdigest()

    ways = {
        "direct": (snapshot.payload, WriteOptions()),
        "buffered": (snapshot.payload, WriteOptions(direct=False)),
        "small pieces": (snapshot.payload, WriteOptions(piece_bytes=4096, in_flight=3)),
        "odd pieces": (snapshot.payload, WriteOptions(piece_bytes=3 * 4096, in_flight=1, direct=False)),
        "unaligned": (memoryview(unaligned)[1:], WriteOptions()),
        "not writable": (snapshot.payload.toreadonly(), WriteOptions()),
        "no reserve": (snapshot.payload, WriteOptions(reserve=False, sync=False)),
    }
    digests = {name: digest(name, payload, options) for name, (payload, options) in ways.items()}
    assert len(set(digests.values())) == 1, digests


def test_progress_tells_of_every_byte(tmp_path: Path) -> None:
    from steadyrun.checkpoint.planning import plan
    from steadyrun.checkpoint.shardfile import write_rank_files

    snapshots = take_all(lambda rank: {"a": torch.randn(300, 300), "b": torch.randn(3), "o": "text"}, 2)
    made = plan([s.layout for s in snapshots])
    for snapshot, part in zip(snapshots, made.parts, strict=True):
        seen: list[tuple[int, int]] = []
        write_rank_files(
            tmp_path,
            snapshot.layout,
            part,
            snapshot.bytes_of,
            snapshot.blobs,
            WriteOptions(piece_bytes=64 << 10),
            lambda done, total, seen=seen: seen.append((done, total)),
        )
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-1][0] == seen[-1][1] > 300 * 300 * 4


def test_the_partial_folder_is_what_becomes_the_checkpoint(tmp_path: Path) -> None:
    snapshot = take({"w": torch.ones(4)})
    partial = begin(tmp_path, 12, 3)
    assert partial.name == "step-000000012.a3.partial"
    written, metadata = write_files(partial, [snapshot])
    folder = commit(tmp_path, partial, manifest_of(written, 12, 3), metadata)
    assert folder.name == "step-000000012"
    assert not partial.exists()
    manifest = read_manifest(folder)
    assert isinstance(manifest, Manifest)
    assert (manifest.step, manifest.attempt, manifest.size_bytes) == (
        12,
        3,
        sum(p.stat().st_size for p in folder.iterdir() if p.name != "manifest.json"),
    )
    assert raw_bytes(torch.ones(4)) in (folder / "__0_0.distcp").read_bytes()
