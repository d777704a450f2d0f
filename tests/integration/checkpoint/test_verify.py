"""Checkpoints of torch, intact and damaged: each damage is found and named, and what cannot be seen is said."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from steadyrun.checkpoint.contents import Piece, ProblemKind
from steadyrun.checkpoint.kinds import find_checkpoints, read_contents
from steadyrun.checkpoint.torchzip import Record, read_records
from steadyrun.checkpoint.verify import verify
from steadyrun.ctl.main import main

DATA = "__0_0.distcp"


def piece_of(folder: Path, key: str) -> Piece:
    (found,) = find_checkpoints(folder).checkpoints
    return next(p for p in read_contents(found).pieces if p.key == key)


def records_of(folder: Path, piece: Piece) -> tuple[Record, ...]:
    data = (folder / piece.place.file).read_bytes()[piece.place.offset_bytes : piece.place.end_bytes]
    return read_records(lambda offset, size: data[offset : offset + size], len(data))


def data_at(folder: Path, key: str) -> int:
    """Where the tensor's own bytes begin in its file."""
    piece = piece_of(folder, key)
    record = next(r for r in records_of(folder, piece) if r.name == "data/0")
    return piece.place.offset_bytes + record.offset_bytes


def overwrite(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        f.write(data)


def flip(file: Path, at: int, mask: int = 1) -> None:
    overwrite(file, at, bytes([file.read_bytes()[at] ^ mask]))


# -- intact ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["step-1", "step-2", "sharded-1", "sharded-2", "plain.pt"])
def test_what_torch_wrote_is_fine_and_fully_verified(written: Path, ckpt: Callable[..., Any], name: str) -> None:
    told = ckpt("verify", written / name, "--json")
    assert told.code == 0, told.out
    assert told.json["schema"] == "steadyrun.ckpt_verify/1"
    (report,) = told.json["checkpoints"]
    assert report["is_fully_verified"]
    assert report["checksum_count"] > 5
    assert (report["problems"], report["notes"], report["unverified"]) == ([], [], [])


def test_contents_are_those_that_torch_reads(written: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    for name in ("step-1", "sharded-1"):
        (found,) = find_checkpoints(written / name).checkpoints
        contents = read_contents(found)
        theirs = FileSystemReader(written / name).read_metadata()
        ours = {t.key: t for t in contents.tensors}
        for key, entry in theirs.state_dict_metadata.items():
            if not hasattr(entry, "chunks"):
                assert key in contents.objects
                continue
            assert f"torch.{ours[key].dtype}" == str(entry.properties.dtype)
            assert ours[key].shape == tuple(entry.size)
            boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
            assert [(s.offsets, s.sizes) for s in ours[key].shards] == boxes
        places = {(i.relative_path, i.offset, i.length) for i in theirs.storage_data.values()}
        assert {(p.place.file, p.place.offset_bytes, p.place.length_bytes) for p in contents.pieces} == places


@pytest.mark.parametrize(("name", "reason"), [("unsummed.pt", "no CRC32"), ("legacy.pt", "old torch.save format")])
def test_without_checksums_it_says_so(written: Path, ckpt: Callable[..., Any], name: str, reason: str) -> None:
    told = ckpt("verify", written / name)
    assert told.code == 0
    assert "cannot be verified" in told.text
    assert reason in told.text
    assert ": fine" not in told.text


# -- damaged data ----------------------------------------------------------------------------------------------------
def test_flipped_bit_names_tensor_file_and_bytes(copy: Callable[..., Path], ckpt: Callable[..., Any]) -> None:
    folder = copy("step-1")
    at = data_at(folder, "model.weight")
    flip(folder / DATA, at + 1001)
    told = ckpt("verify", folder)
    assert told.code == 1
    assert f"model.weight, shard at [0, 0], {DATA}, bytes {at:,} to {at + 64 * 96 * 4 - 1:,}: " in told.text
    (problem,) = ckpt("verify", folder, "--json").json["checkpoints"][0]["problems"]
    assert (problem["kind"], problem["keys"], problem["file"]) == ("checksum", ["model.weight"], DATA)


def test_flipped_bit_in_one_shard_of_a_sharded_tensor(copy: Callable[..., Path], check: Callable[..., Any]) -> None:
    folder = copy("sharded-1")
    piece = next(
        p
        for p in read_contents(find_checkpoints(folder).checkpoints[0]).pieces
        if p.key == "weight" and p.shard_offsets == (32, 0)
    )
    record = next(r for r in records_of(folder, piece) if r.name == "data/0")
    flip(folder / piece.place.file, piece.place.offset_bytes + record.offset_bytes)
    (problem,) = check(folder).problems
    assert (problem.keys, problem.shard_offsets, problem.file) == (("weight",), (32, 0), "__1_0.distcp")


def test_zeroed_page(copy: Callable[..., Path], ckpt: Callable[..., Any]) -> None:
    folder = copy("step-1")
    page = -(-data_at(folder, "optim.exp_avg") // 4096) * 4096
    overwrite(folder / DATA, page, bytes(4096))
    told = ckpt("verify", folder)
    assert told.code == 1
    assert "optim.exp_avg" in told.text
    assert f"1 of its pages of 4 KiB are all zero, the first at byte {page:,}" in told.text


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_byte_in_a_record_is_found_and_named(
    written: Path, tmp_path: Path, check: Callable[..., Any], data: st.DataObject
) -> None:
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(written / data.draw(st.sampled_from(["step-1", "sharded-1"]), "checkpoint"), folder)
    (found,) = find_checkpoints(folder).checkpoints
    piece = data.draw(st.sampled_from(read_contents(found).pieces), "piece")
    record = data.draw(st.sampled_from(records_of(folder, piece)), "record")
    at = data.draw(st.integers(0, record.size_bytes - 1), "byte")
    flip(folder / piece.place.file, piece.place.offset_bytes + record.offset_bytes + at, data.draw(st.integers(1, 255)))
    problems = check(folder).problems
    assert [(p.kind, p.keys, p.file) for p in problems] == [(ProblemKind.CHECKSUM, (piece.key,), piece.place.file)]


def test_flipped_byte_in_a_file_of_torch_save(copy: Callable[..., Path], check: Callable[..., Any]) -> None:
    file = copy("plain.pt")
    raw = file.read_bytes()
    records = read_records(lambda offset, size: raw[offset : offset + size], len(raw))
    flip(file, next(r for r in records if r.size_bytes == 64 * 96 * 4).offset_bytes + 77)
    (problem,) = check(file).problems
    assert (problem.kind, problem.keys) == (ProblemKind.CHECKSUM, ("model.weight",))


# -- files that are missing, cut off, or of another save -------------------------------------------------------------
@pytest.mark.parametrize("lost", [1, 4096, 30_000])
def test_truncated_file(copy: Callable[..., Path], check: Callable[..., Any], lost: int) -> None:
    folder = copy("step-1")
    os.truncate(folder / DATA, (folder / DATA).stat().st_size - lost)
    report = check(folder)
    assert {p.kind for p in report.problems} == {ProblemKind.TRUNCATED}
    assert all(p.file == DATA and p.keys for p in report.problems)


def test_truncated_file_of_torch_save(copy: Callable[..., Path], check: Callable[..., Any]) -> None:
    file = copy("plain.pt")
    os.truncate(file, file.stat().st_size - 1)
    assert [p.kind for p in check(file).problems] == [ProblemKind.STRUCTURE]
    os.truncate(file, 0)
    assert [p.kind for p in check(file).problems] == [ProblemKind.TRUNCATED]


def test_missing_file(copy: Callable[..., Path], ckpt: Callable[..., Any]) -> None:
    folder = copy("sharded-1")
    (folder / "__1_0.distcp").unlink()
    for command in ("show", "verify"):
        told = ckpt(command, folder)
        assert told.code == 1
        assert "__1_0.distcp: the file is not there" in told.text


def test_half_overwritten_folder_is_noted(copy: Callable[..., Path], ckpt: Callable[..., Any]) -> None:
    """A save was cut off after rank 0 wrote: checksums are right, only the time of writing tells."""
    folder, newer = copy("sharded-1"), copy("sharded-2")
    shutil.copyfile(newer / DATA, folder / DATA)
    os.utime(folder / DATA, (later := (folder / ".metadata").stat().st_mtime + 3600, later))
    told = ckpt("verify", folder)
    assert told.code == 0
    assert f"written after .metadata, which a save writes last: {DATA}" in told.text


def test_a_shard_of_another_step_passes_and_that_is_said(copy: Callable[..., Path], ckpt: Callable[..., Any]) -> None:
    folder, other = copy("sharded-1"), copy("sharded-2")
    assert (folder / DATA).read_bytes() != (other / DATA).read_bytes()
    shutil.copy2(other / DATA, folder / DATA)
    told = ckpt("verify", folder)
    assert told.code == 0
    assert "a file of another step with the same layout" in told.text


def test_a_file_of_another_layout_does_not_pass(copy: Callable[..., Path], check: Callable[..., Any]) -> None:
    """Other archives lie, whole, amid the ranges that the metadata name; they are not taken for what was meant."""
    folder = copy("sharded-1")
    shutil.copy2(copy("step-1") / DATA, folder / DATA)
    assert ProblemKind.STRUCTURE in {p.kind for p in check(folder).problems}


def test_a_tensor_of_another_shape_than_the_metadata_say(copy: Callable[..., Path], check: Callable[..., Any]) -> None:
    """Same number of bytes, right checksums, metadata that add up: only the stored tensor itself tells."""
    folder = copy("step-1")
    raw = (folder / ".metadata").read_bytes()
    assert raw.count(b"K\x40K\x60\x86") == 4, "the sizes (64, 96), of two tensors and their shards"
    (folder / ".metadata").write_bytes(raw.replace(b"K\x40K\x60\x86", b"K\x60K\x40\x86"))
    problems = check(folder).problems
    assert {(p.kind, p.keys) for p in problems} == {
        (ProblemKind.MISMATCH, ("model.weight",)),
        (ProblemKind.MISMATCH, ("optim.exp_avg",)),
    }
    assert "holds float32 of shape [64, 96], by the metadata it is float32 of shape [96, 64]" in problems[0].text


# -- .metadata -------------------------------------------------------------------------------------------------------
def test_folder_without_metadata(copy: Callable[..., Path], ckpt: Callable[..., Any]) -> None:
    folder = copy("step-1")
    (folder / ".metadata").unlink()
    assert "the save did not finish" in (told := ckpt("verify", folder)).text
    assert told.code == 1
    assert "incomplete: no .metadata" in (told := ckpt("ls", folder)).text
    assert told.code == 1


def test_truncated_metadata(copy: Callable[..., Path], ckpt: Callable[..., Any]) -> None:
    folder = copy("step-1")
    whole = (folder / ".metadata").read_bytes()
    for length in range(0, len(whole), 37):
        (folder / ".metadata").write_bytes(whole[:length])
        told = ckpt("verify", folder)
        assert told.code == 1
        assert ".metadata is damaged" in told.text


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 10_000), mask=st.integers(1, 255))
def test_damaged_metadata_never_crash(
    written: Path, tmp_path: Path, check: Callable[..., Any], at: int, mask: int
) -> None:
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(written / "sharded-1", folder)
    flip(folder / ".metadata", at % (folder / ".metadata").stat().st_size, mask)
    check(folder)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_malicious_metadata_run_nothing(
    copy: Callable[..., Path], tmp_path: Path, ckpt: Callable[..., Any], protocol: int
) -> None:
    folder = copy("step-1")
    marker = tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker), protocol))
    for command in ("ls", "show", "verify"):
        told = ckpt(command, folder)
        assert told.code == (0 if command == "ls" else 1)
        assert command == "ls" or ".metadata is refused: it names 'posix.system'" in told.text
    assert not marker.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert marker.exists(), "the pickle was a harmless one, the test shows nothing"


def test_malicious_file_of_torch_save_runs_nothing(tmp_path: Path, ckpt: Callable[..., Any]) -> None:
    import torch

    marker = tmp_path / "ran"
    torch.save({"a": torch.ones(3), "b": Evil(marker)}, tmp_path / "evil.pt")
    assert ckpt("verify", tmp_path / "evil.pt").code == 0
    assert not marker.exists()


def test_metadata_that_leads_out_of_the_folder(copy: Callable[..., Path], check: Callable[..., Any]) -> None:
    folder = copy("step-1")
    raw = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(raw.replace(DATA.encode(), b"../secrets12"))
    (problem,) = check(folder).problems
    assert (problem.kind, problem.file) == (ProblemKind.METADATA, "../secrets12")


# -- other kinds -----------------------------------------------------------------------------------------------------
def write_safetensors(file: Path, tensors: dict[str, int], lost: int = 0) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, count in tensors.items():
        header[key] = {"dtype": "F32", "shape": [count], "data_offsets": [end, end + 4 * count]}
        end += 4 * count
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end - lost))


def test_sharded_safetensors(tmp_path: Path, ckpt: Callable[..., Any]) -> None:
    files = {"model-1-of-2.safetensors": {"a": 4, "b": 2}, "model-2-of-2.safetensors": {"c": 8}}
    for name, tensors in files.items():
        write_safetensors(tmp_path / name, tensors)
    weight_map = {key: name for name, tensors in files.items() for key in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    told = ckpt("verify", tmp_path)
    assert told.code == 0
    assert "safetensors stores no checksum" in told.text
    write_safetensors(tmp_path / "model-1-of-2.safetensors", {"a": 4})
    assert "b, model-1-of-2.safetensors: the index promises what is not in it" in ckpt("verify", tmp_path).text
    write_safetensors(tmp_path / "model-1-of-2.safetensors", {"a": 4, "b": 2}, lost=3)
    assert "3 bytes are lost" in ckpt("verify", tmp_path).text
    (tmp_path / "model-1-of-2.safetensors").unlink()
    told = ckpt("verify", tmp_path)
    assert told.code == 1
    assert "a, b, model-1-of-2.safetensors: model.safetensors.index.json names it, and it is not there" in told.text


def test_deepspeed_folder_and_its_latest(written: Path, tmp_path: Path, ckpt: Callable[..., Any]) -> None:
    for step in (100, 200):
        (tmp_path / f"global_step{step}").mkdir()
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
            shutil.copy2(written / "plain.pt", tmp_path / f"global_step{step}" / name)
    (tmp_path / "latest").write_text("global_step200\n")
    listed = ckpt("ls", tmp_path, "--json").json["checkpoints"]
    assert [(c["kind"], c["step"], c["is_latest"]) for c in listed] == [
        ("deepspeed", 100, False),
        ("deepspeed", 200, True),
    ]
    assert ckpt("verify", tmp_path).code == 0
    (tmp_path / "latest").write_text("global_step300\n")
    told = ckpt("verify", tmp_path)
    assert told.code == 1
    assert "latest: it names 'global_step300', which is not there" in told.text


def test_megatron_folder(written: Path, tmp_path: Path, ckpt: Callable[..., Any]) -> None:
    for rank in ("mp_rank_00", "mp_rank_01"):
        (tmp_path / "iter_0000050" / rank).mkdir(parents=True)
        shutil.copy2(written / "plain.pt", tmp_path / "iter_0000050" / rank / "model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("50")
    (listed,) = ckpt("ls", tmp_path, "--json").json["checkpoints"]
    assert (listed["kind"], listed["step"], listed["files"], listed["is_latest"]) == ("megatron", 50, 2, True)
    flip(file := tmp_path / "iter_0000050" / "mp_rank_01" / "model_optim_rng.pt", file.stat().st_size // 2)
    told = ckpt("verify", tmp_path)
    assert told.code == 1
    assert "model.weight, mp_rank_01/model_optim_rng.pt" in told.text


# -- the commands ----------------------------------------------------------------------------------------------------
def test_ls_sorts_by_step(copy: Callable[..., Path], tmp_path: Path, ckpt: Callable[..., Any]) -> None:
    for step in (10, 9, 100):
        copy("step-1", to=f"step-{step}")
    told = ckpt("ls", tmp_path, "--json")
    assert told.code == 0
    assert [c["step"] for c in told.json["checkpoints"]] == [9, 10, 100]
    assert ckpt("show", tmp_path, "--json").json["step"] == 100


def test_show_lists_tensors(written: Path, ckpt: Callable[..., Any]) -> None:
    told = ckpt("show", written / "sharded-1", "--tensors")
    assert told.code == 0
    assert "weight float32 [64,32] 2 8 KiB __0_0.distcp +1" in told.text
    assert "step (object)" in told.text
    shown = ckpt("show", written / "sharded-1", "--tensors", "--json").json
    assert (shown["schema"], shown["tensors"][0]["shape"]) == ("steadyrun.ckpt_show/1", [64, 32])


def test_progress_is_drawn_in_a_terminal_only(written: Path, ckpt: Callable[..., Any]) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    assert main(["ckpt", "verify", str(written / "step-1")], terminal, io.StringIO(), {}, 100) == 0
    assert "\r\x1b[Kstep-1 [" in terminal.getvalue()
    assert "\x1b" not in ckpt("verify", written / "step-1").out


def test_progress_reaches_the_end(written: Path) -> None:
    (found,) = find_checkpoints(written / "sharded-1").checkpoints
    seen: list[tuple[int, int]] = []
    report = verify(read_contents(found), threads=2, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == report.read_bytes
    assert seen == sorted(seen)


def test_what_is_no_checkpoint(tmp_path: Path, ckpt: Callable[..., Any]) -> None:
    (tmp_path / "notes.txt").write_text("no checkpoint")
    for path in (tmp_path, tmp_path / "notes.txt", tmp_path / "nowhere"):
        for command in ("ls", "show", "verify"):
            told = ckpt(command, path)
            assert told.code == 2
            assert "cannot " in told.out + told.err


def test_damage_outweighs_what_is_no_checkpoint(
    copy: Callable[..., Path], tmp_path: Path, ckpt: Callable[..., Any]
) -> None:
    folder = copy("step-1")
    (folder / DATA).unlink()
    assert ckpt("verify", folder, tmp_path / "nowhere").code == 1
