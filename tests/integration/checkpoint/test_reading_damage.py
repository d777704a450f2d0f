"""Damage to checkpoint folders is found when they are loaded and when they are verified, and named; or it is harmless.

Both kinds of folder: what plain ``dcp.save`` wrote, which has a CRC32 per tensor, and ours, which has a manifest.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import saved_folders as saved
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steadyrun.checkpoint.contents import Piece, ProblemKind
from steadyrun.checkpoint.kinds import find_checkpoints, read_contents
from steadyrun.checkpoint.reading import (
    NO_MANIFEST,
    DamagedFolderError,
    DamagedShardError,
    Loaded,
    Reader,
    UnloadableError,
    UntrustedObjectError,
    load_folder,
    load_objects,
)
from steadyrun.checkpoint.torchzip import read_records
from steadyrun.checkpoint.verify import Report, verify

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
KINDS = ["foreign", "ours"]


def state_of(seed: int) -> dict[str, Any]:
    return {
        "weight": saved.random_bits((300, 41), torch.float32, seed),
        "moment": saved.random_bits((64, 128), torch.bfloat16, seed),
        "small": saved.random_bits((3,), torch.int64, seed),
        "scalar": torch.tensor(float(seed)),
        "note": {"lr": 0.1 * seed},
    }


def blank() -> dict[str, Any]:
    state = {k: torch.full_like(v, 1) for k, v in state_of(1).items() if isinstance(v, torch.Tensor)}
    return {**state, "note": None}


def is_right(state: dict[str, Any], seed: int = 1) -> bool:
    want = state_of(seed)
    tensors = [k for k in want if k != "note"]
    return state["note"] == want["note"] and all(
        torch.equal(state[k].reshape(-1).view(torch.uint8), want[k].reshape(-1).view(torch.uint8)) for k in tensors
    )


def write(root: Path, kind: str, seed: int) -> Path:
    state = state_of(seed)
    if kind == "ours":
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        return saved.write_ours(root, seed, tensors, {"note": state["note"]})
    folder = root / f"step-{seed}"
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=2), no_dist=True)
    return folder


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``ours/`` and ``foreign/``, with the steps 1 and 2 in each."""
    root = tmp_path_factory.mktemp("pristine")
    for kind in KINDS:
        for seed in (1, 2):
            write(root / kind, kind, seed).rename(root / f"{kind}-{seed}")
    return root


@dataclass(frozen=True)
class Copy:
    """A folder to be damaged."""

    kind: str
    path: Path
    other: Path

    @property
    def pieces(self) -> dict[tuple[str, tuple[int, ...] | None], Piece]:
        (found,) = find_checkpoints(self.path).checkpoints
        return {(p.key, p.shard_offsets): p for p in read_contents(found).pieces if p.key is not None}

    def piece(self, key: str) -> Piece:
        """The last shard of it."""
        return [p for (k, _), p in self.pieces.items() if k == key][-1]

    def load(self, **options: Any) -> tuple[dict[str, Any], Loaded]:
        state = blank()
        if self.kind == "foreign":
            state["note"] = {"lr": None}
        return state, load_folder(self.path, state, **options)

    def verify(self) -> Report:
        (found,) = find_checkpoints(self.path).checkpoints
        return verify(read_contents(found), threads=2)


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, pristine: Path, tmp_path: Path) -> Copy:
    return copy_of(pristine, tmp_path, request.param)


def copy_of(pristine: Path, to: Path, kind: str) -> Copy:
    path = to / kind
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(pristine / f"{kind}-1", path)
    return Copy(kind, path, pristine / f"{kind}-2")


def change(file: Path, at: int, make: Callable[[bytes], bytes], size: int = 1) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        data = f.read(size)
        f.seek(at)
        f.write(make(data))


def flip(file: Path, at: int) -> None:
    change(file, at, lambda b: bytes([b[0] ^ 0x40]))


def inside(piece: Piece) -> int:
    """A byte of the tensor itself."""
    if piece.record is not None:
        return piece.record.payload_at_bytes + piece.record.payload_bytes // 2
    return piece.place.offset_bytes + piece.place.length_bytes // 2


# -- the rows of the table of faults -----------------------------------------------------------------------------------
def test_intact(folder: Copy) -> None:
    state, loaded = folder.load()
    assert is_right(state)
    assert (loaded.manifest is None) == (folder.kind == "foreign")
    assert loaded.notes == ((NO_MANIFEST,) if folder.kind == "foreign" else ())
    report = folder.verify()
    assert (report.problems, report.unverified) == ((), ())
    assert report.is_by_manifest == (folder.kind == "ours")


@pytest.mark.parametrize("count", [1, 64])
def test_flipped_bytes(folder: Copy, count: int) -> None:
    piece = folder.piece("weight")
    first = inside(piece) - 2000
    for i in range(count):
        flip(folder.path / piece.place.file, first + 61 * i)
    expect_damage(folder, piece)


def test_zeroed_page(folder: Copy) -> None:
    piece = folder.piece("weight")
    page = inside(piece) // 4096 * 4096
    change(folder.path / piece.place.file, page, lambda b: bytes(len(b)), 4096)
    expect_damage(folder, piece, "1 of its pages of 4 KiB are all zero" if folder.kind == "foreign" else "")


def expect_damage(folder: Copy, piece: Piece, words: str = "") -> None:
    with pytest.raises(DamagedShardError) as caught:
        folder.load()
    error = caught.value
    assert (error.key, error.file, error.offsets) == (piece.key, piece.place.file, piece.shard_offsets)
    assert error.has_written
    assert piece.place.offset_bytes <= error.at_byte
    assert error.at_byte + error.size_bytes <= piece.place.end_bytes
    assert f"cannot load weight, shard at {list(piece.shard_offsets or ())}, from {folder.path}" in str(error)
    (problem,) = folder.verify().problems
    assert (problem.kind, problem.keys) == (ProblemKind.CHECKSUM, (piece.key,))
    assert (problem.file, problem.shard_offsets) == (piece.place.file, piece.shard_offsets)
    assert words in problem.text
    folder.load(verify=False)  # what dcp.load does: it notices nothing


def test_file_of_another_step(folder: Copy) -> None:
    piece = folder.piece("weight")
    shutil.copy(folder.other / piece.place.file, folder.path / piece.place.file)
    expect_another_step(folder, piece.place.file)


def test_half_of_the_folder_overwritten_by_the_next_step(folder: Copy) -> None:
    """Also the lists of checksums, everything but the manifest."""
    file = folder.piece("weight").place.file
    for other in folder.other.iterdir():
        if other.name == file or (folder.kind == "ours" and other.name.startswith(file.rpartition("_")[0] + "_")):
            shutil.copy(other, folder.path / other.name)
    expect_another_step(folder, file)


def expect_another_step(folder: Copy, file: str) -> None:
    if folder.kind == "foreign":
        state, loaded = folder.load()
        assert not is_right(state)
        assert loaded.notes == (NO_MANIFEST,)
        assert "a file of another step with the same layout would pass" in NO_MANIFEST
        return
    with pytest.raises(UnloadableError, match=r"xxh3"):
        folder.load()
    assert any(p.kind is ProblemKind.CHECKSUM for p in folder.verify().problems)


@pytest.mark.parametrize("cut", ["1 byte", "4 KiB", "half"])
def test_truncated(folder: Copy, cut: str) -> None:
    piece = folder.piece("weight")
    file = folder.path / piece.place.file
    size = file.stat().st_size
    os.truncate(file, {"1 byte": size - 1, "4 KiB": size - 4096, "half": size // 2}[cut])
    expect_lost(folder, piece.place.file, "the file ends at byte")


def test_missing(folder: Copy) -> None:
    file = folder.piece("weight").place.file
    (folder.path / file).unlink()
    expect_lost(folder, file, "the file is not there")


def expect_lost(folder: Copy, file: str, words: str) -> None:
    state = blank()
    if folder.kind == "foreign":
        state["note"] = {"lr": None}
    with pytest.raises(DamagedShardError, match=words) as caught:
        load_folder(folder.path, state)
    assert caught.value.file == file
    assert not caught.value.has_written
    for key, value in blank().items():
        assert key == "note" or torch.equal(state[key], value), f"{key} was changed"
    assert any(p.file == file for p in folder.verify().problems)


def test_garbage_appended_is_harmless(folder: Copy) -> None:
    for file in folder.path.glob("*.distcp"):
        with file.open("ab") as f:
            f.write(b"x" * 100)
    assert is_right(folder.load()[0])


def test_no_metadata(folder: Copy) -> None:
    (folder.path / ".metadata").unlink()
    with pytest.raises(DamagedFolderError, match=r"it has no \.metadata, which is written last"):
        folder.load()


@pytest.mark.parametrize("where", [0.0, 0.3, 0.5, 0.9, 0.999])
def test_truncated_metadata(folder: Copy, where: float) -> None:
    file = folder.path / ".metadata"
    os.truncate(file, int(file.stat().st_size * where))
    with pytest.raises(DamagedFolderError, match=r"\.metadata (is damaged|has [\d,]+ bytes)"):
        folder.load()


# -- any byte of any file ----------------------------------------------------------------------------------------------
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255), name=st.integers(0, 100))
def test_any_flipped_byte_of_our_files_is_found(
    pristine: Path, tmp_path: Path, where: float, mask: int, name: int
) -> None:
    folder = copy_of(pristine, tmp_path, "ours")
    files = sorted(f for f in folder.path.iterdir() if f.stat().st_size)
    file = files[name % len(files)]
    at = int(where * file.stat().st_size)
    change(file, at, lambda b: bytes([b[0] ^ mask]))
    try:
        folder.load()
    except UnloadableError:
        pass
    else:
        pytest.fail(f"byte {at} of {file.name} was not found")
    (found,) = find_checkpoints(folder.path).checkpoints
    assert verify(read_contents(found), threads=1).problems, f"byte {at} of {file.name}"


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), mask=st.integers(1, 255), is_metadata=st.booleans())
def test_a_flipped_byte_of_foreign_files_never_becomes_a_wrong_value(
    pristine: Path, tmp_path: Path, where: float, mask: int, is_metadata: bool
) -> None:
    folder = copy_of(pristine, tmp_path, "foreign")
    file = folder.path / ".metadata" if is_metadata else random.choice(sorted(folder.path.glob("*.distcp")))
    at = int(where * file.stat().st_size)
    change(file, at, lambda b: bytes([b[0] ^ mask]))
    try:
        state, _ = folder.load()
    except UnloadableError:
        return
    except ValueError as error:
        text = str(error)
    else:
        assert is_right(state), f"byte {at} of {file.name}"
        return
    assert "Size mismatch" in text


# -- the manifest and its fragments ------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["manifest.json", "__1.shards.json"])
@pytest.mark.parametrize("damage", ["cut", "edited", "empty"])
def test_damaged_lists_of_checksums(pristine: Path, tmp_path: Path, name: str, damage: str) -> None:
    folder = copy_of(pristine, tmp_path, "ours")
    file = folder.path / name
    text = file.read_text()
    file.write_text({"cut": text[:-10], "edited": text.replace("1", "2", 1), "empty": ""}[damage])
    state = blank()
    with pytest.raises(DamagedFolderError, match=name):
        load_folder(folder.path, state)
    assert all(torch.equal(state[k], v) for k, v in blank().items() if k != "note")


def test_missing_list_of_checksums(pristine: Path, tmp_path: Path) -> None:
    folder = copy_of(pristine, tmp_path, "ours")
    (folder.path / "__0.shards.json").unlink()
    with pytest.raises(DamagedFolderError, match=r"__0\.shards\.json cannot be read: No such file"):
        folder.load()


def test_a_manifest_of_another_program_does_not_matter(pristine: Path, tmp_path: Path) -> None:
    folder = copy_of(pristine, tmp_path, "foreign")
    (folder.path / "manifest.json").write_text('{"name": "an extension of a browser"}')
    state, loaded = folder.load()
    assert is_right(state)
    assert loaded.manifest is None


def test_without_its_manifest_our_folder_is_read_like_any_other(pristine: Path, tmp_path: Path) -> None:
    folder = copy_of(pristine, tmp_path, "ours")
    (folder.path / "manifest.json").unlink()
    state, loaded = folder.load()
    assert is_right(state)
    assert loaded.notes == (NO_MANIFEST,)
    piece = folder.piece("weight")
    flip(folder.path / piece.place.file, inside(piece))
    with pytest.raises(DamagedShardError, match="CRC32"):
        folder.load()


def test_shards_that_do_not_cover_the_tensor_are_refused(pristine: Path, tmp_path: Path) -> None:
    """``dcp.load`` leaves what no shard holds as it was."""
    folder = copy_of(pristine, tmp_path, "ours")
    (folder.path / "manifest.json").unlink()
    metadata = pickle.loads((folder.path / ".metadata").read_bytes())
    del metadata.state_dict_metadata["weight"].chunks[1]
    (folder.path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(DamagedFolderError, match=r"weight is not whole: 6,150 of its 12,300 elements are in no shard"):
        folder.load()


def test_a_shard_that_lies_beside_the_tensor_is_refused(pristine: Path, tmp_path: Path) -> None:
    """``dcp.load`` finds nothing to read for it then, and says nothing."""
    folder = copy_of(pristine, tmp_path, "foreign")
    metadata = pickle.loads((folder.path / ".metadata").read_bytes())
    (chunk,) = metadata.state_dict_metadata["weight"].chunks
    metadata.state_dict_metadata["weight"].chunks[0] = dataclasses.replace(chunk, offsets=torch.Size([300, 0]))
    (folder.path / ".metadata").write_bytes(pickle.dumps(metadata))
    state = {k: torch.zeros_like(v) for k, v in state_of(1).items() if k != "note"}
    dcp.load(state, checkpoint_id=folder.path, no_dist=True)
    assert not state["weight"].any()
    with pytest.raises(DamagedFolderError, match=r"weight is not whole: its shard at \[300, 0\] reaches beyond"):
        folder.load()


def test_no_checksums_are_said(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save({"a": torch.ones(3), "b": torch.ones(70000)}, checkpoint_id=tmp_path / "c", no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    loaded = load_folder(tmp_path / "c", {"a": torch.zeros(3), "b": torch.zeros(70000)})
    assert loaded.notes == (NO_MANIFEST, "no checksum is stored for a, b")
    assert loaded.checked_bytes == 0


def test_several_threads_tell_the_damage_and_not_that_they_were_stopped(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadyrun.checkpoint.reading._TASK_BYTES", 1)
    folder = copy_of(pristine, tmp_path, "foreign")
    piece = folder.piece("small")
    flip(folder.path / piece.place.file, inside(piece))
    for _ in range(5):
        with pytest.raises(DamagedShardError, match=r"cannot load small"):
            folder.load(threads=4)


# -- objects -----------------------------------------------------------------------------------------------------------
class Thing:
    """Needs its class to be looked up when it is unpickled."""

    def __init__(self, value: int) -> None:
        self.value = value


class Evil:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_an_object_that_runs_code_is_refused_and_not_run(tmp_path: Path) -> None:
    proof = tmp_path / "it-ran"
    dcp.save({"w": torch.ones(3), "evil": [Evil(proof)]}, checkpoint_id=tmp_path / "c", no_dist=True)
    state = {"w": torch.zeros(3), "evil": [None]}
    with pytest.raises(
        UntrustedObjectError, match=r"cannot load evil from .*(os|posix)\.mkdir.*has no manifest.*trust=True"
    ):
        load_folder(tmp_path / "c", state)
    with pytest.raises(BaseException, match="cannot load"):
        dcp.load(state, storage_reader=Reader(tmp_path / "c"), no_dist=True)
    assert not proof.exists()


def test_metadata_that_run_code_are_refused_and_not_run(tmp_path: Path) -> None:
    proof = tmp_path / "it-ran"
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "c", no_dist=True)
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Evil(proof)))
    with pytest.raises(DamagedFolderError, match=r"refused: it names '(os|posix)\.mkdir'"):
        load_folder(tmp_path / "c", {"w": torch.zeros(3)})
    assert not proof.exists()


def test_objects_of_other_classes_need_trust_or_our_manifest(tmp_path: Path) -> None:
    things = {"thing": Thing(7)}
    dcp.save(dict(things), checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(UntrustedObjectError):
        load_objects(tmp_path / "c")
    assert load_objects(tmp_path / "c", trust=True)["thing"].value == 7
    ours = saved.write_ours(tmp_path / "ours", 3, {"w": torch.ones(4)}, things)
    assert load_objects(ours)["thing"].value == 7
    with pytest.raises(UntrustedObjectError, match="was not verified"):
        load_objects(ours, verify=False)


def test_a_flipped_byte_in_an_object(folder: Copy) -> None:
    key = next(k for k, offsets in folder.pieces if offsets is None)
    place = folder.pieces[key, None].place
    data = (folder.path / place.file).read_bytes()[place.offset_bytes : place.end_bytes]
    record = next(r for r in read_records(lambda at, size: data[at : at + size], len(data)) if r.name == "data.pkl")
    flip(folder.path / place.file, place.offset_bytes + record.offset_bytes + 3)
    with pytest.raises(DamagedShardError) as caught:
        folder.load()
    assert (caught.value.key, caught.value.file, caught.value.offsets) == (key, place.file, ())
    assert not caught.value.has_written
