"""``steadyctl ckpt export``: safetensors parsed by hand and by our reader, and torch.save, against what was saved."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from steadyrun.checkpoint.safetensors import read_header
from steadyrun.checkpoint.sources import open_source

# Of the format's own description, apart from the table in the code.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


def parse(file: Path) -> dict[str, torch.Tensor]:
    """A safetensors file, read by nothing but its description; checks that there are no gaps and all is aligned."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert (8 + length) % 8 == 0
    out, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        assert begin == end
        assert begin % dtype.itemsize == 0
        raw = bytearray(data[8 + length + begin : 8 + length + stop])
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        out[name] = flat.reshape(entry["shape"])
        end = stop
    assert 8 + length + end == len(data)
    return out


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def test_every_dtype_arrives_bit_for_bit(
    ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], state: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    told = ckpt("export", dcp_folder(1), tmp_path / "out", "--json")
    assert told.code == 0, told.err
    assert told.json["schema"] == "steadyrun.ckpt_export/1"
    assert [f["name"] for f in told.json["files"]] == ["model.safetensors"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    found, model = parse(tmp_path / "out" / "model.safetensors"), state(1)["model"]
    assert set(found) == set(model)
    assert [name for name in model if not is_same(found[name], model[name])] == []
    file = tmp_path / "out" / "model.safetensors"
    assert {t.key: t.shape for t in read_header(file, file.name)} == {k: tuple(v.shape) for k, v in model.items()}
    assert any("objects" in note for note in told.json["notes"])


def test_shards_have_an_index_that_leads_to_every_tensor(
    ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], state: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    told = ckpt("export", dcp_folder(1), out, "--max-shard-size", "6KB", "--key", "", "--json")
    assert told.code == 0, told.err
    index = json.loads((out / "model.safetensors.index.json").read_text())
    names = sorted(p.name for p in out.glob("*.safetensors"))
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    assert len(names) == 4  # two tensors of 6,144 bytes are alone in theirs, although they do not fit
    tensors = {name: parse(out / name) for name in names}
    assert {key: name for name, keys in tensors.items() for key in keys} == index["weight_map"]
    whole = state(1)
    flat = {f"model.{k}": v for k, v in whole["model"].items()}
    flat |= {
        f"optimizer.state.layers.0.weight.{k}": v for k, v in whole["optimizer"]["state"]["layers.0.weight"].items()
    }
    assert set(index["weight_map"]) == set(flat)
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in flat.values())
    for key, name in index["weight_map"].items():
        assert is_same(tensors[name][key], flat[key]), key
    # and our own reader takes the folder
    assert ckpt("verify", out).code == 0
    source = open_source(out)
    keys = list(source.tensors)
    assert all(is_same(t, flat[k]) for k, t in zip(keys, source.read(keys), strict=True))


def test_dtype_converts_floating_tensors_only_and_says_what_did_not_fit(
    ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], tmp_path: Path
) -> None:
    weight = torch.tensor([1.0, 1e6, -2.0, float("inf")])
    saved = {"model": {"w": weight, "n": torch.tensor([70000]), "b": torch.ones(1)}}
    told = ckpt("export", dcp_folder(1, saved), tmp_path / "out", "--dtype", "fp16", "--json")
    assert told.code == 0, told.err
    found = parse(tmp_path / "out" / "model.safetensors")
    assert is_same(found["w"], weight.half())
    assert found["n"].dtype is torch.int64
    assert int(found["n"]) == 70000
    assert [n for n in told.json["notes"] if "became infinite" in n] == [
        "1 elements of w are too large for the new dtype and became infinite or NaN"
    ]


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64", "float8_e4m3fn", "float8_e5m2"])
def test_conversions_are_those_of_torch(
    ckpt: Callable[..., Any],
    dcp_folder: Callable[..., Path],
    state: Callable[[int], dict[str, Any]],
    tmp_path: Path,
    dtype: str,
) -> None:
    told = ckpt("export", dcp_folder(1), tmp_path / "out", "--dtype", dtype, "--json")
    assert told.code == 0, told.err
    wanted = getattr(torch, told.json["dtype"])
    found = parse(tmp_path / "out" / "model.safetensors")
    for name, tensor in state(1)["model"].items():
        assert is_same(found[name], tensor.to(wanted) if tensor.is_floating_point() else tensor), name


def test_torch_save_is_loaded_as_data_only(
    ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], state: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    told = ckpt("export", dcp_folder(1), tmp_path / "model.pt")
    assert told.code == 0, told.err
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    model = state(1)["model"]
    assert list(found) == list(model)
    assert all(is_same(found[k], model[k]) for k in model)
    assert ckpt("verify", tmp_path / "model.pt").code == 0


def test_shards_of_two_ranks_are_exported_whole(
    ckpt: Callable[..., Any], own_folder: Callable[..., Path], tmp_path: Path
) -> None:
    assert ckpt("export", own_folder(tmp_path / "root", 5), tmp_path / "out").code == 0
    found = parse(tmp_path / "out" / "model.safetensors")
    assert is_same(found["weight"], torch.full((1024, 64), 5.0))
    assert is_same(found["bias"], torch.full((64,), 5.0))


def test_a_damaged_checkpoint_leaves_nothing(
    ckpt: Callable[..., Any], own_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = own_folder(tmp_path / "root", 5)
    data = folder / "__1_0.distcp"
    content = bytearray(data.read_bytes())
    content[60_000] ^= 4
    data.write_bytes(content)
    told = ckpt("export", folder, tmp_path / "out", "--json")
    assert told.code == 1
    assert "model.weight" in told.json["error"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["root"]


def test_a_full_disk_is_said_before_anything_is_written(
    ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    folder = dcp_folder(1)
    told = ckpt("export", folder, tmp_path / "out")
    assert told.code == 1
    assert "are needed and 1,000 are free there" in told.error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--dtype", "bf61"), "did you mean bf16?"),
        (("--key", "modle"), "did you mean model?"),
        (("--max-shard-size", "many"), "is no size"),
    ],
)
def test_options_that_cannot_be_used_are_said(
    ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], tmp_path: Path, argv: tuple[str, ...], words: str
) -> None:
    told = ckpt("export", dcp_folder(1, {"model": {"w": torch.ones(2)}}), tmp_path / "out", *argv)
    assert told.code == 2
    assert words in told.error
    assert not (tmp_path / "out").exists()


def test_a_dtype_that_safetensors_lacks_and_a_name_that_is_taken_are_refused(
    ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = dcp_folder(1, {"model": {"w": torch.ones(2, dtype=torch.complex128)}})
    told = ckpt("export", folder, tmp_path / "out")
    assert told.code == 2
    assert "'w' of dtype complex128" in told.error
    assert "--format torch" in told.error
    assert ckpt("export", folder, tmp_path / "out.pt").code == 0
    told = ckpt("export", folder, tmp_path / "out.pt")
    assert told.code == 2
    assert "it exists" in told.error
