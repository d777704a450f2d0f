"""Checkpoints are loaded straight into tensors on a GPU, through one page-locked buffer, and verified on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import saved_folders as saved
import torch
import torch.distributed.checkpoint as dcp

from steadyrun.checkpoint.reading import DamagedShardError, load_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def make() -> dict[str, torch.Tensor]:
    dtypes = {str(d): saved.random_bits((700, 33), d, 1) for d in saved.DTYPES}
    return {**dtypes, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "large": torch.randn(3000, 1000)}


@pytest.mark.parametrize("kind", ["foreign", "ours"])
def test_every_dtype_comes_onto_the_gpu(tmp_path: Path, kind: str) -> None:
    want = make()
    if kind == "ours":
        folder = saved.write_ours(tmp_path, 1, want, {})
    else:
        folder = tmp_path / "c"
        dcp.save(dict(want), checkpoint_id=folder, no_dist=True)
    state = {key: torch.empty_like(value, device="cuda") for key, value in want.items()}
    loaded = load_folder(folder, state)
    assert loaded.checked_bytes > loaded.size_bytes > 0
    for key, value in want.items():
        assert state[key].is_cuda
        ours, theirs = (t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (state[key], value))
        assert torch.equal(ours, theirs), key


def test_damage_is_found_before_the_load_returns(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(100_000.0)}, checkpoint_id=tmp_path / "c", no_dist=True)
    (file,) = (tmp_path / "c").glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[200_000] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedShardError, match="cannot load w"):
        load_folder(tmp_path / "c", {"w": torch.zeros(100_000, device="cuda")})
