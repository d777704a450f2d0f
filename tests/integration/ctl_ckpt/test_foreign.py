"""``watch.commit`` around the saves of other programs: complete when all ranks have called, and checkable then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from steadyrun import watch
from steadyrun.checkpoint import foreign
from steadyrun.checkpoint.commit import open_manifest
from steadyrun.checkpoint.manifest import Manifest
from steadyrun.core.errors import ConfigError


def env(rank: int, world_size: int, attempt: int = 0) -> dict[str, str]:
    """What a rank under torchrun or steadyrun finds in its environment."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "TORCHELASTIC_RUN_ID": "demo",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }


def manifest_of(folder: Path) -> Manifest:
    return open_manifest((folder / "manifest.json").read_bytes())


def torch_save(folder: Path, ranks: int = 2, value: float = 1.0) -> Path:
    """Each rank's own torch.save."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        torch.save({"weight": torch.full((64, 64), value + rank)}, folder / f"rank_{rank}.pt")
    return folder


def deepspeed(root: Path, step: int = 100) -> Path:
    folder = root / f"global_step{step}"
    folder.mkdir(parents=True)
    for rank in (0, 1):
        torch.save({"p": torch.ones(64)}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    torch.save({"module": {"w": torch.ones(8, 8)}}, folder / "mp_rank_00_model_states.pt")
    (root / "latest").write_text(folder.name)
    (root / "zero_to_fp32.py").write_text("# a helper that DeepSpeed puts there\n")
    return folder


def megatron(root: Path, step: int = 100) -> Path:
    folder = root / f"iter_{step:07d}"
    for rank in ("mp_rank_00_000", "mp_rank_01_000"):
        (folder / rank).mkdir(parents=True)
        torch.save({"model": {"w": torch.ones(16)}}, folder / rank / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


def megatron_dcp(dcp_folder: Callable[..., Path]) -> Path:
    folder = dcp_folder(100, name="iter_0000100")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"args": {"lr": 0.1}}, folder / "common.pt")
    return folder


def hugging_face(ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint-100"
    assert ckpt("export", dcp_folder(1), folder, "--max-shard-size", "4KB").code == 0
    (folder / "config.json").write_text('{"hidden_size": 8}')
    torch.save({"lr": 0.1}, folder / "optimizer.pt")
    (folder / "global_step100").mkdir()
    torch.save({"p": torch.ones(4)}, folder / "global_step100" / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("global_step100")
    return folder


@pytest.fixture
def written(ckpt: Callable[..., Any], dcp_folder: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """A folder as the named program writes it; at step 100."""

    def call(name: str) -> Path:
        match name:
            case "torch":
                return torch_save(tmp_path / "step-100")
            case "deepspeed":
                return deepspeed(tmp_path / "ds")
            case "megatron":
                return megatron(tmp_path / "mg")
            case "megatron_dcp":
                return megatron_dcp(dcp_folder)
            case "hugging_face":
                return hugging_face(ckpt, dcp_folder, tmp_path)
        raise ValueError(name)

    return call


KINDS = {
    "torch": "files",
    "deepspeed": "deepspeed",
    "megatron": "megatron",
    "megatron_dcp": "megatron_dcp",
    "hugging_face": "hf_sharded",
}


# -- what programs write ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", KINDS)
def test_what_a_program_wrote_is_committed_recognised_and_verified(
    ckpt: Callable[..., Any], written: Callable[[str], Path], name: str
) -> None:
    folder = written(name)
    files = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    done = watch.commit(folder, env=env(0, 1))
    assert (done.problem, done.waits_for, done.step) == (None, (), 100)
    manifest = manifest_of(folder)
    assert {f.name: f.size_bytes for f in manifest.files} == files
    assert all(len(f.xxh3) == 32 for f in manifest.files)
    assert (manifest.step, manifest.run_id, manifest.details["foreign"]) == (100, "demo", KINDS[name])
    listed = ckpt("ls", folder, "--json").json["checkpoints"]
    assert [(c["kind"], c["is_complete"], c["manifest"]["is_foreign"]) for c in listed] == [(KINDS[name], True, True)]
    told = ckpt("verify", folder, "--json")
    assert told.code == 0, told.out
    (report,) = told.json["checkpoints"]
    assert report["is_fully_verified"]
    assert report["checksum_count"] >= len(files)
    assert manifest_of(folder).verified is not None
    shown = ckpt("show", folder).text
    assert "step 100" in shown
    assert "by steadyrun" in shown


@pytest.mark.parametrize("name", KINDS)
def test_one_flipped_bit_in_any_file_is_found_and_the_file_named(
    ckpt: Callable[..., Any], written: Callable[[str], Path], name: str
) -> None:
    folder = written(name)
    watch.commit(folder, env=env(0, 1))
    for record in manifest_of(folder).files:
        file = folder / record.name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0x10
        file.write_bytes(content)
        told = ckpt("verify", folder, "--json")
        assert told.code == 1, record.name
        report = next(r for r in told.json["checkpoints"] if r["path"] == str(folder))
        assert record.name in {p["file"] for p in report["problems"]}
        content[len(content) // 2] ^= 0x10
        file.write_bytes(content)
    assert ckpt("verify", folder).code == 0


def test_a_file_that_is_gone_or_cut_is_found_without_reading_any(
    ckpt: Callable[..., Any], written: Callable[[str], Path]
) -> None:
    folder = written("megatron")
    watch.commit(folder, env=env(0, 1))
    (folder / "mp_rank_00_000" / "model_optim_rng.pt").unlink()
    os.truncate(folder / "mp_rank_01_000" / "model_optim_rng.pt", 100)
    told = ckpt("show", folder, "--json")
    assert told.code == 1
    assert {(p["file"], p["kind"]) for p in told.json["problems"]} == {
        ("mp_rank_00_000/model_optim_rng.pt", "missing"),
        ("mp_rank_01_000/model_optim_rng.pt", "truncated"),
    }


def test_a_pointer_above_the_checkpoint_is_followed(tmp_path: Path) -> None:
    folder = deepspeed(tmp_path / "ds", 40)
    done = foreign.commit(tmp_path / "ds", env=env(0, 1))
    assert (done.path, done.step) == (folder, 40)
    assert not (tmp_path / "ds" / "manifest.json").exists()


# -- ranks -----------------------------------------------------------------------------------------------------------
def test_complete_only_when_all_ranks_have_called(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    folder = torch_save(tmp_path / "step-100", ranks=3)
    first = foreign.commit(folder, files=["rank_2.pt"], env=env(2, 3))
    assert (first.is_complete, first.waits_for) == (False, (0, 1))
    assert not (folder / "manifest.json").exists()
    assert "waits for ranks 0, 1" in ckpt("ls", folder).text
    second = foreign.commit(folder, files=[folder / "rank_0.pt"], env=env(0, 3))
    assert second.waits_for == (1,)
    last = foreign.commit(folder, env=env(1, 3))
    assert last.is_complete
    # also what no rank has named is in it, and notes and lock are gone
    assert [f.name for f in manifest_of(folder).files] == ["rank_0.pt", "rank_1.pt", "rank_2.pt"]
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "rank_0.pt", "rank_1.pt", "rank_2.pt"]
    assert ckpt("verify", folder).code == 0
    # a second call of a rank changes nothing
    before = (folder / "manifest.json").read_bytes()
    assert foreign.commit(folder, env=env(0, 3)).is_complete
    assert (folder / "manifest.json").read_bytes() == before


def test_one_rank_can_speak_for_all(tmp_path: Path) -> None:
    folder = torch_save(tmp_path / "step-100", ranks=4)
    done = foreign.commit(folder, alone=True, env=env(0, 4))
    assert done.manifest is not None
    assert (done.manifest.world_size, len(done.manifest.files)) == (4, 4)


def test_ranks_that_call_at_the_same_time_complete_it_once(tmp_path: Path) -> None:
    folder = torch_save(tmp_path / "step-100", ranks=8)
    go = threading.Barrier(8)
    results: list[foreign.Committed] = []

    def call(rank: int) -> None:
        go.wait()
        results.append(foreign.commit(folder, files=[f"rank_{rank}.pt"], env=env(rank, 8)))

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [r.problem for r in results] == [None] * 8
    assert any(r.is_complete for r in results)
    assert len(manifest_of(folder).files) == 8
    assert not list(folder.glob("__*.files.json"))


def test_notes_of_an_earlier_attempt_or_of_rewritten_files_do_not_count(tmp_path: Path) -> None:
    folder = torch_save(tmp_path / "step-100")
    foreign.commit(folder, files=["rank_0.pt"], env=env(0, 2, attempt=0))
    # the other rank died; the next attempt saves the same step
    torch_save(tmp_path / "step-100", value=5.0)
    done = foreign.commit(folder, files=["rank_1.pt"], env=env(1, 2, attempt=1))
    assert done.waits_for == (0,)
    foreign.commit(folder, files=["rank_0.pt"], env=env(0, 2, attempt=1))
    assert manifest_of(folder).attempt == 1
    # and within one attempt: rank 0 has written its file anew since its note
    torch_save(tmp_path / "step-100", value=7.0)
    assert foreign.commit(folder, files=["rank_0.pt"], env=env(0, 2, attempt=1)).waits_for == (1,)
    torch.save({"weight": torch.zeros(3)}, folder / "rank_0.pt")
    assert foreign.commit(folder, files=["rank_1.pt"], env=env(1, 2, attempt=1)).waits_for == (0,)


def test_a_folder_that_is_saved_into_again_loses_its_old_manifest_first(
    ckpt: Callable[..., Any], tmp_path: Path
) -> None:
    folder = torch_save(tmp_path / "last-1")
    foreign.commit(folder, step=10, env=env(0, 1))
    torch_save(folder, value=3.0)
    assert ckpt("verify", folder).code == 1  # the manifest is of other bytes, and says so
    done = foreign.commit(folder, step=20, env=env(0, 1))
    assert done.manifest is not None
    assert done.manifest.step == 20
    assert ckpt("verify", folder).code == 0


# -- retention -------------------------------------------------------------------------------------------------------
def test_older_ones_go_by_the_usual_rules_and_others_stay(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    root = tmp_path / "out"
    for step in (100, 200, 300, 400):
        foreign.commit(torch_save(root / f"checkpoint-{step}"), env=env(0, 1))
    torch_save(root / "checkpoint-50")  # never committed: not ours to judge
    assert ckpt("verify", root / "checkpoint-100").code == 0  # the newest verified one
    done = foreign.commit(torch_save(root / "checkpoint-500"), keep=2, keep_every=200, env=env(0, 1))
    assert [p.name for p in done.removed] == ["checkpoint-300"]
    assert sorted(p.name for p in root.iterdir()) == [f"checkpoint-{s}" for s in (100, 200, 400, 50, 500)]


def test_the_one_that_a_pointer_names_is_not_removed(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        deepspeed(tmp_path / "ds", step)
        foreign.commit(tmp_path / "ds" / f"global_step{step}", env=env(0, 1))
    (tmp_path / "ds" / "latest").write_text("global_step100")  # as after a rollback by hand
    deepspeed(tmp_path / "ds", 500)
    (tmp_path / "ds" / "latest").write_text("global_step100")
    done = foreign.commit(tmp_path / "ds" / "global_step500", keep=2, env=env(0, 1))
    assert [p.name for p in done.removed] == ["global_step200", "global_step300"]


# -- trouble ---------------------------------------------------------------------------------------------------------
def test_a_file_that_is_still_written_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = torch_save(tmp_path / "step-100")
    real = os.preadv

    def append_meanwhile(fd: int, buffers: Any, at: int) -> int:
        with (folder / "rank_1.pt").open("ab") as f:
            f.write(b"x")
        return real(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", append_meanwhile)
    done = foreign.commit(folder, env=env(0, 1))
    assert done.manifest is None
    assert "rank_1.pt was written to while it was read" in str(done.problem)
    assert not (folder / "manifest.json").exists()


def test_a_disk_that_fails_is_said_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = torch_save(tmp_path / "step-100")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    done = foreign.commit(folder, env=env(0, 1))
    assert "No space left on device" in str(done.problem)
    assert capsys.readouterr().err.count("cannot commit") == 1
    monkeypatch.undo()
    assert foreign.commit(folder, env=env(0, 1)).is_complete


def test_another_programs_manifest_is_left_alone(ckpt: Callable[..., Any], tmp_path: Path) -> None:
    folder = torch_save(tmp_path / "step-100")
    (folder / "manifest.json").write_text('{"version": 3}')
    assert "steadyrun has not written" in str(foreign.commit(folder, env=env(0, 1)).problem)
    assert json.loads((folder / "manifest.json").read_text()) == {"version": 3}
    (listed,) = ckpt("ls", folder, "--json").json["checkpoints"]
    assert (listed["manifest"], listed["manifest_problem"]) == (None, None)


def test_a_checkpoint_of_our_own_is_left_alone(own_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = own_folder(tmp_path / "root", 3)
    before = (folder / "manifest.json").read_bytes()
    assert "complete as it is" in str(foreign.commit(folder, env=env(0, 1)).problem)
    assert (folder / "manifest.json").read_bytes() == before


def test_what_cannot_be_meant_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is no folder"):
        foreign.commit(tmp_path / "nothing", env={})
    with pytest.raises(ConfigError, match="give step="):
        foreign.commit(torch_save(tmp_path / "newest"), env={})
    with pytest.raises(ConfigError, match="it is not in"):
        foreign.commit(torch_save(tmp_path / "step-1"), files=[tmp_path / "elsewhere.pt"], env={})


def test_committing_loads_no_torch(tmp_path: Path) -> None:
    folder = torch_save(tmp_path / "step-100")
    code = (
        "import sys; from steadyrun import watch; done = watch.commit(sys.argv[1]); "
        "print(done.is_complete, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout.split() == ["True", "False", "False"]
