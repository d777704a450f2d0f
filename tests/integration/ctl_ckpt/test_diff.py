"""``steadyctl ckpt diff``: names, shapes, dtypes and values that differ, whoever wrote the checkpoints."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


def by_key(told: Any) -> dict[str, Any]:
    return {t["key"]: t for t in told.json["tensors"]}


def test_equal_checkpoints_differ_in_nothing(ckpt: Callable[..., Any], dcp_folder: Callable[..., Path]) -> None:
    first, second = dcp_folder(1), dcp_folder(1, name="again-1")
    told = ckpt("diff", first, second, "--json")
    assert told.code == 0
    assert told.json["schema"] == "steadyrun.ckpt_diff/1"
    assert told.json["is_equal"]
    assert told.json["compared_tensor_count"] == 13
    assert (told.json["structure"], told.json["tensors"], told.json["objects"]) == ([], [], [])
    assert "nothing differs" in ckpt("diff", first, second).text


def test_figures_are_those_of_the_tensors(
    ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], state: Callable[[int], dict[str, Any]]
) -> None:
    a = state(1)
    b = copy.deepcopy(a)
    b["model"]["layers.0.weight"][3, 7] += 0.5
    b["model"]["layers.0.weight"][40, 1] += 0.125
    b["model"]["e4m3"][9] = (-b["model"]["e4m3"][9].float()).to(torch.float8_e4m3fn)
    b["model"]["counts"][2] = 7
    b["model"]["mask"][0] = ~b["model"]["mask"][0]
    b["epoch"] = 9
    told = ckpt("diff", dcp_folder(1), dcp_folder(1, b, "other"), "--json")
    assert told.code == 1
    found = by_key(told)
    assert set(found) == {"model.layers.0.weight", "model.e4m3", "model.counts", "model.mask"}
    weight = found["model.layers.0.weight"]
    assert (weight["differing_count"], weight["element_count"], weight["worst_at"]) == (2, 48 * 32, [3, 7])
    assert weight["max_abs_difference"] == pytest.approx(0.5)
    values = [float(x["model"]["layers.0.weight"][i, j]) for x in (a, b) for i, j in ((3, 7), (40, 1))]
    relative = max(0.5 / max(abs(values[0]), abs(values[2])), 0.125 / max(abs(values[1]), abs(values[3])))
    assert weight["max_relative_difference"] == pytest.approx(relative, rel=1e-6)
    assert found["model.e4m3"]["max_relative_difference"] == 2.0
    assert found["model.counts"]["max_abs_difference"] == 7 - (2 + 1)
    assert told.json["objects"] == ["epoch"]
    # the worst first
    assert [t["max_abs_difference"] for t in told.json["tensors"]] == sorted(
        (t["max_abs_difference"] for t in told.json["tensors"]), reverse=True
    )


def test_values_that_are_not_finite_come_first_and_are_counted(
    ckpt: Callable[..., Any], dcp_folder: Callable[..., Path]
) -> None:
    a = {"x": torch.tensor([1.0, math.nan, math.inf, 4.0]), "y": torch.zeros(4)}
    b = {"x": torch.tensor([math.nan, math.nan, math.inf, 4.5]), "y": torch.full((4,), 1e30)}
    told = ckpt("diff", dcp_folder(1, a), dcp_folder(2, b), "--json")
    first, second = told.json["tensors"]
    assert (first["key"], first["nonfinite_count"], first["differing_count"], first["worst_at"]) == ("x", 1, 2, [0])
    assert first["max_abs_difference"] == 0.5
    assert (second["key"], second["nonfinite_count"]) == ("y", 0)
    assert "1 NaN/inf" in ckpt("diff", *(told.json[s]["path"] for s in ("first", "second"))).text


def test_structure_that_differs_is_named(ckpt: Callable[..., Any], dcp_folder: Callable[..., Path]) -> None:
    a = {"gone": torch.zeros(2), "shape": torch.zeros(2, 3), "dtype": torch.ones(4), "kind": torch.zeros(1), "o": 1}
    b = {"new": torch.zeros(2), "shape": torch.zeros(3, 2), "dtype": torch.ones(4).bfloat16(), "kind": 7, "p": 1}
    told = ckpt("diff", dcp_folder(1, a), dcp_folder(2, b), "--json")
    assert told.code == 1
    assert {s["key"]: s["text"] for s in told.json["structure"]} == {
        "gone": "is only in the first",
        "new": "is only in the second",
        "shape": "has shape [2, 3] in the first, [3, 2] in the second",
        "dtype": "is float32 in the first, bfloat16 in the second",
        "kind": "is an object in the second",
        "o": "is only in the first (object)",
        "p": "is only in the second (object)",
    }
    assert told.json["tensors"] == []  # 1.0 is 1.0 in both dtypes


def test_a_tolerance_forgives_what_is_within_it_and_nothing_else(
    ckpt: Callable[..., Any], dcp_folder: Callable[..., Path]
) -> None:
    a = {"x": torch.tensor([100.0, 1.0, 0.0])}
    b = {"x": torch.tensor([100.5, 1.5, 0.0])}
    first, second = dcp_folder(1, a), dcp_folder(2, b)
    assert ckpt("diff", first, second, "--rtol", 0.01, "--json").json["tensors"][0]["differing_count"] == 1
    assert ckpt("diff", first, second, "--atol", 0.5).code == 0
    assert ckpt("diff", first, second, "--atol", 0.49).code == 1
    assert ckpt("diff", first, second, "--atol", -1).code == 2


def test_each_kind_is_compared_with_each(
    ckpt: Callable[..., Any],
    dcp_folder: Callable[..., Path],
    state: Callable[[int], dict[str, Any]],
    tmp_path: Path,
) -> None:
    folder = dcp_folder(1)
    torch.save(state(1), tmp_path / "whole.pt")
    told = ckpt("diff", folder, tmp_path / "whole.pt", "--key", "model", "--json")
    assert told.code == 0, told.out
    assert told.json["compared_tensor_count"] == 11
    assert told.json["second"]["kind"] == "torch_save"
    assert ckpt("export", folder, tmp_path / "st", "--key", "model.layers.0").code == 0
    told = ckpt("diff", tmp_path / "st", tmp_path / "whole.pt", "--key", "model.layers.0", "--json")
    assert told.code == 0, told.out
    assert told.json["compared_tensor_count"] == 2
    assert any("cannot be verified" in note for note in told.json["notes"])


def test_odd_things_in_a_file_of_torch_save(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    values = torch.randn(4, 3, dtype=torch.complex64)
    for name, sparse in (("a.pt", [1.0, 0.0]), ("b.pt", [0.0, 1.0])):
        odd = {"sparse": torch.tensor(sparse).to_sparse(), "conjugated": values.conj(), "list": [values.t(), {"x": 1}]}
        torch.save(odd, tmp_path / name)
    told = ckpt("diff", tmp_path / "a.pt", tmp_path / "b.pt", "--json")
    assert (told.json["tensors"], told.json["objects"]) == ([], ["sparse"])
    assert told.json["compared_tensor_count"] == 2


def test_shards_of_two_ranks_compare_as_whole_tensors(
    ckpt: Callable[..., Any], own_folder: Callable[..., Path], dcp_folder: Callable[..., Path], tmp_path: Path
) -> None:
    own = own_folder(tmp_path / "root", 3)
    whole = {"model": {"weight": torch.full((1024, 64), 3.0), "bias": torch.full((64,), 3.0)}}
    whole["model"]["weight"][700, 5] = 4.0
    told = ckpt("diff", own, dcp_folder(3, whole), "--key", "model", "--json")
    assert by_key(told)["weight"]["worst_at"] == [700, 5]
    assert by_key(told)["weight"]["differing_count"] == 1
    assert len(told.json["tensors"]) == 1


def test_a_damaged_tensor_ends_the_comparison_and_is_named(
    ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], state: Callable[[int], dict[str, Any]]
) -> None:
    first, second = dcp_folder(1), dcp_folder(2)
    data = second / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    raw = state(2)["model"]["layers.0.weight"].numpy().tobytes()
    content[content.index(raw) + 100] ^= 1
    data.write_bytes(content)
    told = ckpt("diff", first, second)
    assert told.code == 1
    assert "model.layers.0.weight" in told.error
    assert "cannot load" in told.error
    assert "__0_0.distcp" in told.error


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("diff", "{a}", "{a}/nothing"), "cannot look at"),
        (("diff", "{a}", "{root}"), "cannot tell which checkpoint is meant"),
        (("diff", "{a}", "{a}", "--key", "modle"), "did you mean model?"),
    ],
)
def test_what_cannot_be_compared_is_said(
    ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], argv: tuple[str, ...], words: str
) -> None:
    a, _ = dcp_folder(1), dcp_folder(2)
    told = ckpt(*(x.format(a=a, root=a.parent) for x in argv))
    assert told.code == 2
    assert words in told.error
