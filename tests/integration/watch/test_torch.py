"""An unmodified torch script: steps, checkpoints, the report for the next standby, cold and warm."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")

TRAIN = """
import os, sys
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["BEFORE_TORCH"] = "set"
os.environ.pop("DROPPED", None)
{imports}
import logging; logging.disable(logging.CRITICAL)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
other = torch.optim.SGD(model.parameters(), lr=0.1)
def step(opt):
    model(torch.ones(1, 2)).sum().backward()
    opt.step()
    opt.zero_grad()
if len(sys.argv) > 2:
    for state in [torch.load(sys.argv[2])]:
        optimizer.load_state_dict(state)
for i in range(4):
    step(optimizer)
    step(other)
{save}
torch.save(optimizer.state_dict(), sys.argv[1] + "/optimizer.pt")
print(save.__name__, save.__module__, save.__doc__ is not None, "done")
"""
SAVES = {
    "from": (
        "import torch\nfrom torch.distributed.checkpoint import save, async_save",
        "save({'m': model.state_dict()}, checkpoint_id=sys.argv[1] + '/c1', no_dist=True)",
    ),
    "module": (
        "import torch, torch.distributed.checkpoint as dcp",
        "save = dcp.save\nsave({'m': model.state_dict()}, checkpoint_id=sys.argv[1] + '/c1')\n"
        "dcp.async_save({'m': model.state_dict()}, checkpoint_id=sys.argv[1] + '/c2').result()",
    ),
}


@pytest.mark.deadline(600)
@pytest.mark.parametrize("how", [pytest.param("from", marks=pytest.mark.slow), "module"])
def test_steps_and_checkpoints_of_an_unmodified_script(start: Any, how: str) -> None:
    imports, save = SAVES[how]
    out = start.tmp_path / "out"
    out.mkdir()
    argv = [*start.script(TRAIN.format(imports=imports, save=save)), str(out)]
    env = start.environment({"DROPPED": "1"})
    report = start.tmp_path / "loaded.json"
    rank = start.cold(argv, env, loaded_report=str(report), deadman_s=0)
    outcome = rank.finish()
    assert outcome.code == 0, outcome
    assert outcome.stdout == "save torch.distributed.checkpoint.state_dict_saver True done\n"
    view = rank.view()
    assert (view.step, view.steps_done, view.beats, view.step_is_global) == (3, 4, 4, True)
    assert view.checkpoints_done == (1 if how == "from" else 3)  # async_save's caller, and its thread that saves
    assert "checkpointing" in [d.name for d in rank.board.durations(0, 0)[0]]
    assert [s.name for s in view.sections] == ["teardown"]
    loaded = json.loads(report.read_text())
    assert loaded["env_before_torch"] == {"BEFORE_TORCH": "set", "DROPPED": None}
    modules = loaded["modules"]
    assert {"torch", "torch.optim.optimizer", "torch.distributed.checkpoint"} <= set(modules)
    assert {m.partition(".")[0] for m in modules} <= {"torch", "numpy"}

    again = [*argv, str(out / "optimizer.pt")]
    warm = start.warm(again, env, preload=modules, preset_env=loaded["env_before_torch"], loaded_report=str(report))
    outcome = warm.finish()
    assert outcome.code == 0, outcome
    assert "cannot preload" not in outcome.stderr, outcome.stderr
    view = warm.view()
    assert (view.step, view.steps_done, view.step_is_global) == (7, 4, True)
    assert view.checkpoints_done == (1 if how == "from" else 3)
    again_loaded = json.loads(report.read_text())
    assert again_loaded["env_before_torch"] == loaded["env_before_torch"]
    assert set(modules) <= set(again_loaded["modules"])


def test_torch_is_not_imported_by_us_and_the_finder_goes_when_it_is_done(start: Any) -> None:
    rank = start.cold(
        start.script("""
import sys, importlib.util
assert not any(m.partition(".")[0] in ("torch", "numpy") for m in sys.modules)
def ours():
    return [f for f in sys.meta_path if type(f).__module__.startswith("steadyrun")]
spec = importlib.util.find_spec("torch")
assert type(spec.loader).__name__ == "SourceFileLoader" and "torch" not in sys.modules and len(ours()) == 1
import torch.distributed.checkpoint, threading
assert ours() == [], ours()
assert "exec_module" not in vars(torch.__spec__.loader)
assert torch.__loader__ is torch.__spec__.loader
print("fine")
""")
    )
    outcome = rank.finish()
    assert outcome.stdout == "fine\n", outcome


@pytest.mark.deadline(600)
def test_compiled_steps_and_sections_in_compiled_code_do_no_harm(start: Any) -> None:
    rank = start.cold(
        start.script("""
import torch
from steadyrun import watch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
@torch.compile(backend="eager")
def forward(x):
    with watch.section("forward"):
        y = model(x)
    return y.sum()
@torch.compile(backend="eager")
def apply():
    optimizer.step()
for _ in range(3):
    forward(torch.ones(1, 2)).backward()
    apply()
    optimizer.zero_grad()
print("fine")
"""),
        deadman_s=0,
    )
    outcome = rank.finish()
    assert outcome.stdout == "fine\n", outcome
    view = rank.view()
    assert view.step == 2
    assert [s.name for s in view.sections] == ["teardown"]
