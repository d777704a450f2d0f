"""``watch.checkpointer`` in a plain process: the same files, written by the process itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from steadyrun import watch
from steadyrun.checkpoint import rollback
from steadyrun.checkpoint.catalog import look
from steadyrun.checkpoint.checkpointer import Checkpointer, NoUsableCheckpointError
from steadyrun.checkpoint.saves import SaveState
from steadyrun.core.errors import SteadyrunError


class Run:
    """A small model in training, in a folder of checkpoints."""

    def __init__(self, root: Path, **options: Any) -> None:
        torch.manual_seed(1)
        self.said: list[str] = []
        self.model = nn.Linear(6, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        options.setdefault("every", 2)
        self.ckpt: Checkpointer = watch.checkpointer(
            root, model=self.model, optimizer=self.optimizer, say=self.said.append, **options
        )
        self.losses: dict[int, float] = {}

    def train(self, steps: int) -> list[Any]:
        """Resume and do steps up to *steps*; the saves that were made."""
        saves = []
        for step in range(self.ckpt.resume(), steps):
            loss = self.model(torch.randn(4, 6)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses[step] = float(loss.detach())
            saves.append(self.ckpt.step(step))
        return [s for s in saves if s is not None]


def train(root: Path, steps: int, **options: Any) -> Run:
    run = Run(root, **options)
    run.train(steps)
    run.ckpt.close()
    return run


def damage(folder: Path) -> None:
    """One flipped bit in the middle of the tensors."""
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_resumed_run_has_the_losses_of_an_undisturbed_one(tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", 9)
    train(tmp_path / "twice", 6)
    again = train(tmp_path / "twice", 9)
    assert "step 5" in again.ckpt.resumed_from
    assert again.losses == {step: alone.losses[step] for step in (6, 7, 8)}


def test_saves_are_durable_when_they_return(tmp_path: Path) -> None:
    run = Run(tmp_path)
    saves = run.train(4)
    assert [(s.step, s.state) for s in saves] == [(1, SaveState.DURABLE), (3, SaveState.DURABLE)]
    handle = run.ckpt.save(3)
    assert (handle.accepted, handle.durable, handle.in_memory, handle.skipped, handle.failed) == (
        *(True, True, True),
        *(False, False),
    )
    assert handle.wait(0) is SaveState.DURABLE
    run.ckpt.close()
    run.ckpt.close()
    with pytest.raises(SteadyrunError, match="closed"):
        run.ckpt.save(4)


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(1)
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    run.ckpt.save(0)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(-1)
    run.ckpt.close()
    again = Run(tmp_path)
    assert again.ckpt.resume() == 1
    assert all(torch.equal(v, before[k]) for k, v in again.model.state_dict().items())


def test_a_damaged_newest_one_is_named_and_the_next_older_one_used(tmp_path: Path) -> None:
    train(tmp_path, 6)
    damage(tmp_path / "step-000000005")
    run = Run(tmp_path)
    assert run.ckpt.resume() == 4
    told = "\n".join(run.said)
    assert "step-000000005" in told
    assert "model" in told or "optimizer" in told, "which tensor"
    assert "resumed after step 3" in told


def test_nothing_usable_is_an_error_and_not_a_new_beginning(tmp_path: Path) -> None:
    train(tmp_path, 4)
    for step in (1, 3):
        damage(tmp_path / f"step-{step:09d}")
    with pytest.raises(NoUsableCheckpointError, match=r"step-000000003(.|\n)*step-000000001"):
        Run(tmp_path).ckpt.resume()


def test_a_folder_that_cannot_be_looked_at_is_an_error_and_not_a_new_beginning(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.write_text("in the way")
    with pytest.raises(NoUsableCheckpointError, match="Not a directory"):
        Run(root).ckpt.resume()


def test_an_unfinished_save_alone_is_a_new_beginning(tmp_path: Path) -> None:
    (tmp_path / "step-000000003.a0.partial").mkdir()
    assert Run(tmp_path).ckpt.resume() == 0


def test_a_folder_that_cannot_be_written_costs_saves_and_not_the_training(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    run = Run(root)
    assert run.train(1) == []
    root.write_text("in the way")
    saves = [run.ckpt.save(step) for step in (1, 3, 5)]
    assert [s.state for s in saves] == [SaveState.FAILED] * 3
    assert all(str(root) in s.why for s in saves)
    assert len([t for t in run.said if "not saved" in t]) == 1, "said once"
    root.unlink()
    assert run.ckpt.save(5).durable
    assert any("works again" in t for t in run.said)
    run.ckpt.close()


def test_old_checkpoints_go(tmp_path: Path) -> None:
    train(tmp_path, 20, keep=2, keep_every=10)
    assert [c.step for c in look(tmp_path).complete] == [19, 17, 9]


def test_a_rollback_goes_back_and_leaves_batches_out(tmp_path: Path) -> None:
    train(tmp_path, 8, keep=10)
    rollback.request(tmp_path, 3, [(5, 7)], 1.0)
    run = Run(tmp_path, keep=10)
    assert run.ckpt.resume() == 4
    assert run.ckpt.skipped == ((5, 7),)
    assert [run.ckpt.data_step(step) for step in (4, 5, 6)] == [4, 7, 8]
    assert list(run.ckpt.batches(range(4, 10), start=4)) == [4, 7, 8, 9]
    assert run.ckpt.save(4).durable
    run.ckpt.close()
    later = Run(tmp_path, keep=10)
    assert later.ckpt.resume() == 5, "the newer ones from before are set aside"
    assert later.ckpt.skipped == ((5, 7),)


def test_times_and_auto_work_without_a_saver(tmp_path: Path) -> None:
    run = Run(tmp_path, every="0.001s")
    assert [s.step for s in run.train(40)] == [19, 39], "agreed on every 20 steps"
    run.ckpt.close()
    assert Run(tmp_path / "auto", every="auto").train(40) == [], "no save pays within a minute"


def test_any_number_of_things_with_state_join(tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.value = 0

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]

    mine = Counter()
    run = Run(tmp_path, counter=mine)
    mine.value = 17
    run.train(2)
    run.ckpt.close()
    loaded = Counter()
    Run(tmp_path, counter=loaded).ckpt.resume()
    assert loaded.value == 17


def test_it_says_what_is_not_covered(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.ckpt.resume()
    assert any("loader" in t for t in run.said)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"every": 0}, "every=0"),
        ({"every": "soon"}, "every='soon'"),
        ({"every": True}, "every=True"),
        ({"keep": 1}, "keep=1"),
        ({"keep_every": -1}, "keep_every=-1"),
        ({"memory": 3}, "memory=3"),
        ({"every_local": 5}, "local="),
        ({"every_remote": 5}, "remote="),
        ({"model_": 5}, "model_"),
    ],
)
def test_an_option_that_cannot_be_is_named(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises((ValueError, SteadyrunError), match=named.replace("(", r"\(")):
        Run(tmp_path, **options)


def test_a_url_as_root_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="remote="):
        watch.checkpointer("s3://bucket/x")


def test_steps_that_save_nothing_make_no_system_call_and_capture_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, every=1000)
    run.train(3)
    captures: list[int] = []
    real: Callable[[], Any] = run.ckpt._state.capture
    monkeypatch.setattr(run.ckpt._state, "capture", lambda: captures.append(1) or real())
    for step in range(3, 900):
        assert run.ckpt.step(step) is None
    assert captures == []
    run.ckpt.close()


def test_files_are_readable_by_torch_alone(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    run = train(tmp_path, 2)
    state = {f"model.{k}": torch.zeros_like(v) for k, v in run.model.state_dict().items()}
    dcp.load(state, checkpoint_id=os.fspath(tmp_path / "step-000000001"), no_dist=True)
    assert all(torch.equal(state[f"model.{k}"], v) for k, v in run.model.state_dict().items())
