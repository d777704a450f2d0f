"""``steadyctl verify-replicas`` on checkpoints of several kinds."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from steadyrun.checkpoint.commit import mark_verified, read_manifest
from steadyrun.checkpoint.manifest import AGREED_ROOTS, Verified
from steadyrun.ctl.main import main
from steadyrun.integrity.fingerprint import fingerprint


@dataclass(frozen=True)
class Result:
    code: int
    out: str

    @property
    def text(self) -> str:
        return " ".join(self.out.split())


def verify(*argv: object) -> Result:
    out, err = io.StringIO(), io.StringIO()
    code = main(["verify-replicas", *map(str, argv)], out, err, {}, 200)
    return Result(code, out.getvalue() + err.getvalue())


def flip(tensor: torch.Tensor, element: int, bit: int) -> None:
    tensor.view(torch.int32).view(-1)[element] ^= 1 << bit


def rank_files(folder: Path, count: int, wrong: int | None = None) -> list[Path]:
    """A file of each rank, as many a script writes; one holds a flipped bit."""
    folder.mkdir()
    paths = []
    for rank in range(count):
        torch.manual_seed(0)
        state = {"model": {"a": torch.randn(300, 500), "b": torch.randn(7).bfloat16()}, "own": torch.tensor(rank)}
        if rank == wrong:
            flip(state["model"]["a"], 140_000, 9)
        paths.append(folder / f"rank_{rank}.pt")
        torch.save(state, paths[-1])
    return paths


def test_equal_copies_are_equal(dcp_folder: Callable[..., Path]) -> None:
    copies = [dcp_folder(1, name=f"copy-{i}") for i in range(3)]
    result = verify(*copies)
    assert result.code == 0, result.out
    assert "equal in 3 copies" in result.text


def test_of_three_copies_the_wrong_one_is_named_with_element_and_bit(tmp_path: Path) -> None:
    paths = rank_files(tmp_path / "ranks", 3, wrong=1)
    result = verify(*paths, "--ignore", "own")
    assert result.code == 10, result.out
    assert "rank_1.pt: element 140000" in result.text
    assert "(bits 9)" in result.text
    assert "rank_0.pt" not in result.text
    told = json.loads(verify(*paths, "--ignore", "own", "--json").out)
    assert [d["key"] for d in told["differing"]] == ["model.a"]


def test_a_folder_of_files_is_taken_as_copies(tmp_path: Path) -> None:
    rank_files(tmp_path / "ranks", 3, wrong=2)
    result = verify(tmp_path / "ranks", "--ignore", "own")
    assert result.code == 10, result.out
    assert "rank_2.pt" in result.text


def test_of_two_copies_nobody_can_say_which_is_right(tmp_path: Path) -> None:
    result = verify(*rank_files(tmp_path / "ranks", 2, wrong=1), "--ignore", "own")
    assert result.code == 10, result.out
    assert "no majority" in result.text


def test_one_checkpoint_is_compared_with_what_ranks_agreed_on(tmp_path: Path, own_folder: Callable[..., Path]) -> None:
    folder = own_folder(tmp_path, 12)
    held = {"weight": torch.full((1024, 64), 12.0), "bias": torch.full((64,), 12.0)}
    roots = {name: f"{fingerprint(t).root:016x}" for name, t in held.items()}
    mark_verified(folder, Verified(1.0, "replicas"), {AGREED_ROOTS: roots})
    result = verify(folder)
    assert result.code == 0, result.out
    assert "2 tensors" in result.text
    assert "as all ranks had agreed" in result.text
    flip(held["bias"], 3, 0)
    roots["bias"] = f"{fingerprint(held['bias']).root:016x}"
    mark_verified(folder, Verified(1.0, "replicas"), {AGREED_ROOTS: roots})
    result = verify(folder)
    assert result.code == 10, result.out
    assert "model.bias" in result.text
    assert read_manifest(folder).verified == Verified(1.0, "replicas")


def test_one_checkpoint_without_that_is_compared_with_nothing(dcp_folder: Callable[..., Path]) -> None:
    result = verify(dcp_folder(1))
    assert result.code == 11, result.out
    assert "no fingerprints" in result.text


def test_no_checkpoint_is_an_error_of_usage(tmp_path: Path) -> None:
    assert verify(tmp_path).code == 2


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"{}"])
def test_damaged_files_are_an_error(tmp_path: Path, content: bytes) -> None:
    good = rank_files(tmp_path / "ranks", 1)[0]
    bad = tmp_path / "bad.pt"
    bad.write_bytes(content)
    assert verify(good, bad).code in (1, 2)
