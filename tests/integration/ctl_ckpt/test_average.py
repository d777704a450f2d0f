"""``steadyctl ckpt average``: the result against the average computed here, read by plain ``dcp.load``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from steadyrun.checkpoint.commit import read_manifest

SEEDS = (1, 2, 3)


def mean(tensors: list[torch.Tensor]) -> torch.Tensor:
    """In the widest format there is, rounded once."""
    wide = torch.complex128 if tensors[0].is_complex() else torch.float64
    return torch.stack([t.to(wide) for t in tensors]).mean(0)


@pytest.fixture
def averaged(ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Any]:
    def call(*options: object) -> Any:
        folders = [dcp_folder(seed) for seed in SEEDS]
        return ckpt("average", tmp_path / "out", folders[1], folders[2], folders[0], *options, "--json")

    return call


def test_floats_are_averages_and_the_rest_is_of_the_newest(
    averaged: Callable[..., Any],
    state: Callable[[int], dict[str, Any]],
    load: Callable[[Path, dict[str, Any]], dict[str, Any]],
    tmp_path: Path,
) -> None:
    told = averaged()
    assert told.code == 0, told.err
    assert told.json["schema"] == "steadyrun.ckpt_average/1"
    assert (told.json["step"], Path(told.json["newest"]).name) == (3, "step-3")
    states = [state(seed) for seed in SEEDS]
    found = load(tmp_path / "out", state(0))
    for name, tensor in found["model"].items():
        of = [s["model"][name] for s in states]
        if tensor.is_floating_point() or tensor.is_complex():
            exact = mean(of)
            assert tensor.dtype is of[0].dtype
            if tensor.dtype is torch.float64:
                assert torch.allclose(tensor, exact, rtol=1e-15, atol=1e-15), name
            else:  # of a sum that was wider, rounded once
                assert torch.equal(tensor.to(exact.dtype), exact.to(tensor.dtype).to(exact.dtype)), name
        else:
            assert torch.equal(tensor, of[-1]), name
    moments = [s["optimizer"]["state"]["layers.0.weight"] for s in states]
    own = found["optimizer"]["state"]["layers.0.weight"]
    assert torch.equal(own["exp_avg"], mean([m["exp_avg"] for m in moments]).float())
    assert float(own["step"]) == 300.0
    assert (found["optimizer"]["lr"], found["epoch"]) == (pytest.approx(0.3), 3)
    assert set(told.json["taken_from_newest"]) == {
        "model.counts",
        "model.mask",
        "optimizer.state.layers.0.weight.step",
    }
    assert any("no averages but those of step-3, where they differ" in note for note in told.json["notes"])


def test_only_what_is_below_the_key_is_averaged(
    averaged: Callable[..., Any],
    state: Callable[[int], dict[str, Any]],
    load: Callable[[Path, dict[str, Any]], dict[str, Any]],
    tmp_path: Path,
) -> None:
    told = averaged("--key", "model.layers", "--step", 7)
    assert told.code == 0, told.err
    assert (told.json["averaged_tensor_count"], told.json["step"]) == (2, 7)
    found, newest = load(tmp_path / "out", state(0)), state(3)
    assert torch.equal(found["model"]["double"], newest["model"]["double"])
    name = "layers.0.weight"
    assert torch.equal(found["model"][name], mean([state(s)["model"][name] for s in SEEDS]).float())
    exp_avg = found["optimizer"]["state"][name]["exp_avg"]
    assert torch.equal(exp_avg, newest["optimizer"]["state"][name]["exp_avg"])


def test_the_result_is_a_checkpoint_with_a_manifest_that_verifies(
    averaged: Callable[..., Any], ckpt: Callable[..., Any], tmp_path: Path
) -> None:
    assert averaged().code == 0
    out = tmp_path / "out"
    manifest = read_manifest(out)
    assert manifest.step == 3
    assert [Path(c["path"]).name for c in manifest.details["averaged"]["of"]] == ["step-2", "step-3", "step-1"]
    told = ckpt("verify", out, "--json")
    assert told.code == 0
    assert told.json["checkpoints"][0]["is_fully_verified"]
    (listed,) = ckpt("ls", out, "--json").json["checkpoints"]
    assert listed["is_complete"]
    assert listed["manifest"]["verified_by"] == "verify"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "step-1", "step-2", "step-3"]


def test_checkpoints_of_two_ranks_average_as_whole_tensors(
    ckpt: Callable[..., Any],
    own_folder: Callable[..., Path],
    load: Callable[[Path, dict[str, Any]], dict[str, Any]],
    tmp_path: Path,
) -> None:
    folders = [own_folder(tmp_path / "root", step) for step in (10, 20)]
    out = tmp_path / "root" / "step-000000020.a7"
    assert ckpt("average", out, *folders).code == 0
    found = load(out, {"model": {"weight": torch.zeros(1024, 64)}, "epoch": None})
    assert torch.equal(found["model"]["weight"], torch.full((1024, 64), 15.0))
    assert found["epoch"] == {"step": 20}
    manifest = read_manifest(out)
    assert (manifest.run_id, manifest.world_size, manifest.covered) == ("demo", 2, ("model", "rng"))


def test_nothing_is_left_when_a_checkpoint_is_damaged(
    ckpt: Callable[..., Any], own_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folders = [own_folder(tmp_path / "root", step) for step in (10, 20)]
    data = folders[0] / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[50_000] ^= 1
    data.write_bytes(content)
    told = ckpt("average", tmp_path / "out", *folders)
    assert told.code == 1
    assert "model.weight" in told.error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["root"]


def test_values_that_are_not_finite_are_noted(
    ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], tmp_path: Path
) -> None:
    a = dcp_folder(1, {"good": torch.ones(3), "bad": torch.tensor([1.0, float("nan")])})
    b = dcp_folder(2, {"good": torch.ones(3), "bad": torch.tensor([1.0, 2.0])})
    told = ckpt("average", tmp_path / "out", a, b, "--json")
    assert [n for n in told.json["notes"] if "NaN" in n] == ["NaN or infinite values are in the average of bad"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"w": torch.ones(3)}, "w has shape [2] in the first and [3] in the second"),
        ({"v": torch.ones(2)}, "only one of them has w, v"),
    ],
)
def test_checkpoints_that_do_not_match_are_refused(
    ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], tmp_path: Path, other: dict[str, Any], words: str
) -> None:
    told = ckpt("average", tmp_path / "out", dcp_folder(1, {"w": torch.ones(2)}), dcp_folder(2, other))
    assert told.code == 2
    assert words in told.error
    assert not (tmp_path / "out").exists()


def test_one_checkpoint_is_no_average_and_a_taken_name_is_refused(
    ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], tmp_path: Path
) -> None:
    a, b = dcp_folder(1), dcp_folder(2)
    assert "two or more" in ckpt("average", tmp_path / "out", a).error
    assert "it exists" in ckpt("average", a, a, b).error
    told = ckpt("average", tmp_path / "step-000000009", a, b)
    assert told.code == 2
    assert "its name says step 9, the average is of step 2" in told.error
