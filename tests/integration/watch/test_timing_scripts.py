"""What unmodified scripts of many kinds tell of the time of their steps, and that none of them is disturbed.

Scripts burn CPU time, so that a busy machine makes their steps longer and not their own work, apart from what caches
cost. Of that, shares and lower bounds are compared; a phase that is told with another one's work has a wrong share.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from steadyrun.core.timing import (
    TAG_CHECKPOINT,
    TAG_EVALUATION,
    TAG_FIRST,
    TAG_FORWARD_SEEN,
    StepTiming,
)

pytest.importorskip("torch")
pytestmark = pytest.mark.deadline(600)

HEAD = """
import copy, io, json, pickle, sys, time
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
from steadyrun import watch
def net(n=2):
    return torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(n)])
def burn(s):
    end = time.thread_time() + s
    while time.thread_time() < end:
        pass
class Slow(torch.nn.Module):
    def __init__(self, inner, s=0.0):
        super().__init__()
        self.inner, self.s = inner, s
    def forward(self, x):
        burn(self.s)
        return self.inner(x)
x = torch.randn(8, 64)
"""


def timings_of(start: Any, text: str, setup: dict[str, Any] | None = None) -> list[StepTiming]:
    rank = start.cold(start.script(HEAD + text), deadman_s=0, **(setup or {}))
    outcome = rank.finish()
    assert outcome.code == 0, outcome
    ours = [line for line in outcome.stderr.splitlines() if "Profiler record function" not in line]  # torch's compiler
    assert ours == [], outcome.stderr
    assert outcome.stdout.endswith("fine\n"), outcome
    timings, _, lost = rank.board.timings(0, 0)
    assert lost == 0
    return list(timings)


def seen(timings: Sequence[StepTiming]) -> list[bool]:
    return [bool(t.flags & TAG_FORWARD_SEEN) for t in timings]


def check_sums(timings: Sequence[StepTiming]) -> None:
    for t in timings:
        if t.flags & TAG_FORWARD_SEEN:
            phases_s = t.forward_s + t.backward_s + t.optimizer_s + t.data_s
            assert t.busy_s == pytest.approx(phases_s)
            apart_s = t.starved_s + t.wait_s + t.checkpoint_s + (t.probe_s or 0.0)
            assert 0 < t.busy_s + apart_s <= t.wall_s * 1.001, "nothing is told twice"
            assert 0 < t.cpu_s <= t.busy_s * 1.001 + t.wait_s + 0.0005 or t.flags & TAG_EVALUATION
        else:
            assert t.busy_s == t.forward_s == t.backward_s == t.optimizer_s == t.data_s == 0


def middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def test_a_plain_loop_tells_each_phase(start: Any) -> None:
    timings = timings_of(
        start,
        """
class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        burn(0.02)
        return g
model = Slow(net(), 0.01)
class Stepping(torch.optim.Optimizer):
    def step(self, closure=None):
        burn(0.03)
opt = Stepping(model.parameters(), {"lr": 0.01})
for i in range(12):
    burn(0.04)
    watch.work(100 + i)
    watch.work(1)
    model(Late.apply(x.clone().requires_grad_())).square().mean().backward()
    opt.step()
    opt.zero_grad()
print("fine")
""",
    )
    assert [t.step for t in timings] == list(range(1, 12))
    assert all(seen(timings))
    check_sums(timings)
    assert [t.work for t in timings] == [101.0 + t.step for t in timings]
    assert [bool(t.flags & TAG_FIRST) for t in timings] == [True] * 5 + [False] * 6
    expected = {"forward_s": 0.01, "backward_s": 0.02, "optimizer_s": 0.03, "data_s": 0.04}
    for name, own_s in expected.items():
        assert middle([getattr(t, name) for t in timings]) >= own_s, name
        share = middle([getattr(t, name) / t.busy_s for t in timings])
        assert share == pytest.approx(own_s / 0.1, abs=0.04), name
    for before, after in itertools.pairwise(timings):
        assert after.at_s - before.at_s == pytest.approx(after.wall_s, abs=1e-6)


def test_a_sleeping_loader_works_and_a_section_for_saving_does_not(start: Any) -> None:
    timings = timings_of(
        start,
        """
model, = [net()]
opt = torch.optim.AdamW(model.parameters())
for i in range(12):
    time.sleep(0.02)
    model(x).mean().backward()
    opt.step()
    if i == 8:
        with watch.section("checkpointing"):
            time.sleep(0.05)
    if i == 10:
        with watch.section("validation"):
            with torch.no_grad():
                model(x)
            time.sleep(0.05)
print("fine")
""",
    )
    assert all(seen(timings))
    check_sums(timings)
    by_step = {t.step: t for t in timings}
    assert all(t.data_s >= 0.02 for t in timings)
    assert [t.step for t in timings if t.flags & TAG_CHECKPOINT] == [9]
    assert [t.step for t in timings if t.flags & TAG_EVALUATION] == [11]
    assert 0.05 <= by_step[9].checkpoint_s <= by_step[9].wall_s - 0.02, "the loader's sleep is no part of it"
    assert by_step[11].data_s >= 0.02
    assert by_step[11].busy_s <= by_step[11].wall_s - 0.05, "the section for validation is no own work"
    assert by_step[5].checkpoint_s == 0


def test_accumulation_two_models_and_a_teacher(start: Any) -> None:
    timings = timings_of(
        start,
        """
gan = torch.nn.ModuleDict({"g": Slow(net(), 0.005), "d": Slow(net(), 0.01)})
teacher = copy.deepcopy(gan["g"])
og = torch.optim.Adam(gan["g"].parameters())
od = torch.optim.Adam(gan["d"].parameters())
for i in range(12):
    with torch.no_grad():
        gan["g"](x)          # in every step: part of it
        teacher(x)
    fake = gan["g"](x)
    loss = gan["d"](fake.detach()).mean() - gan["d"](x).mean()
    loss.backward()
    od.step(); od.zero_grad()
    for micro in range(3):
        gan["d"](gan["g"](x)).mean().backward()
    og.step(); og.zero_grad()
print("fine")
""",
    )
    assert seen(timings)[1:] == [True] * 10
    check_sums(timings)
    late = timings[5:]
    assert not any(t.flags & TAG_EVALUATION for t in late)
    assert 0.075 <= middle([t.forward_s for t in late]) < 0.15, "g 5 times, d 5 times, and each once"


def test_all_steps_before_a_save_are_told_when_it_begins_and_quick_ones_together(start: Any, tmp_path: Path) -> None:
    text = """
from pathlib import Path
from steadyrun.watch.timing import _TOLD_S
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    model(x).sum().backward()
    opt.step()
for i in range(40):
    train()
with watch.section("checkpointing"):
    while not (Path(sys.argv[1]) / "saved").exists():
        time.sleep(0.01)
train()
time.sleep(1.2 * _TOLD_S)  # what is tested is that so much time passes: a step that ends after it is told alone
train()
while not (Path(sys.argv[1]) / "seen").exists():
    time.sleep(0.01)
"""
    rank = start.cold([*start.script(HEAD + text), str(tmp_path)], deadman_s=0)
    rank.wait_until(lambda: len(rank.board.timings(0, 0)[0]) == 39, "all steps before the save")
    (tmp_path / "saved").touch()
    rank.wait_until(lambda: len(rank.board.timings(0, 0)[0]) == 41, "a step that ends late")
    (tmp_path / "seen").touch()
    assert rank.finish().code == 0


def test_evaluation_between_steps_is_told(start: Any) -> None:
    timings = timings_of(
        start,
        """
model = Slow(net(), 0.002)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(14):
    model.train()
    model(x).mean().backward()
    opt.step()
    if i in (8, 12):
        model.eval()
        with torch.no_grad() if i == 8 else torch.enable_grad():
            for _ in range(50):
                model(x)
print("fine")
""",
    )
    assert all(seen(timings))
    check_sums(timings)
    assert [t.step for t in timings if t.flags & TAG_EVALUATION] == [9, 13]
    assert timings[8].step == 9
    assert timings[8].wall_s > 0.1 > 2 * timings[8].forward_s, "forwards without gradients are not the step's work"


def test_what_was_not_seen_whole_is_not_told(start: Any) -> None:
    timings = timings_of(
        start,
        """
class Odd(Slow):
    fails = False
    def forward(self, x):
        if self.fails:
            raise ValueError("on purpose")
        return super().forward(x)
class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        raise KeyError("on purpose")
model = Odd(net())
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(14):
    model.fails = i == 7
    try:
        y = model(x)
    except ValueError as e:
        assert str(e) == "on purpose"
        model.fails = False
        y = model(x)
    if i == 9:
        try:
            Raising.apply(x.clone().requires_grad_()).mean().backward()
            model(Raising.apply(x.clone().requires_grad_())).mean().backward()
        except KeyError:
            pass
        try:
            model(Raising.apply(x.clone().requires_grad_())).mean().backward()
        except KeyError:
            pass
        y = model(x)
    if i == 11:
        y = model.forward(x)  # nobody sees this
    y.mean().backward()
    opt.step()
print("fine")
""",
    )
    assert [t.step for t in timings if not t.flags & TAG_FORWARD_SEEN] == [7, 9, 11]
    check_sums(timings)


def test_hooks_of_the_script_at_an_output_do_what_they_did(start: Any) -> None:
    timings = timings_of(
        start,
        """
import warnings
warnings.simplefilter("error")
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.0)
for i in range(12):
    out = model(x)
    torch.save(out, io.BytesIO())  # would warn of hooks that are lost with it
    told = []
    first = out.register_hook(lambda g: told.append("first"))
    removed = out.register_hook(lambda g: told.append("removed"))
    out.register_hook(lambda g: g * 0)
    out.retain_grad()
    removed.remove()
    changed = model(x)
    changed.mul_(2)
    changed.register_hook(lambda g: told.append(float(g[0, 0])))
    (out.sum() + changed.sum()).backward()
    assert sorted(map(str, told)) == ["1.0", "first"], told
    assert not out.grad.any()
    assert model[0].weight.grad.any()
    assert len(out._backward_hooks) <= 4
    opt.step()
    opt.zero_grad()
    burn(0.002)
print("fine")
""",
    )
    assert all(seen(timings))
    check_sums(timings)


def test_models_are_copied_saved_scripted_and_freed_as_ever(start: Any) -> None:
    timings = timings_of(
        start,
        """
import gc, weakref
model = Slow(net())
del Slow.forward
Slow.forward = lambda self, x: self.inner(x)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def step(model, opt):
    model(x).mean().backward()
    opt.step()
    opt.zero_grad()
for i in range(2):
    step(model, opt)
plain = net()
keys = set(vars(copy.deepcopy(net())))
assert set(vars(copy.deepcopy(model.inner))) == set(vars(plain)) == keys
assert "_compiled_call_impl" not in vars(copy.copy(model))
for i in range(6):
    step(model, opt)
copied = copy.deepcopy(model)
buffer = io.BytesIO()
torch.save(model.inner, buffer)
assert b"steadyrun" not in buffer.getvalue()
buffer.seek(0)
again = torch.load(buffer, weights_only=False)
assert torch.equal(again(x), model.inner(x))
assert b"steadyrun" not in pickle.dumps(model)
assert torch.equal(copied(x), model(x))
assert model._forward_hooks == {} and model._forward_pre_hooks == {} and model.inner[0].weight._backward_hooks is None
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    scripted = torch.jit.script(model.inner)
    assert torch.allclose(scripted(x), model.inner(x))
    traced = torch.jit.trace(model, x)
    assert torch.allclose(traced(x), model(x))
exported = torch.export.export(model, (x,))
compiled = torch.compile(model, backend="eager")
step(compiled, opt)
assert b"steadyrun" not in pickle.dumps(compiled._modules["_orig_mod"])
gone = weakref.ref(model)
gc.disable()
del model, compiled, exported, traced, scripted
torch._dynamo.reset()
opt = None
gc.enable()
gc.collect()
print("fine")
""",
    )
    assert sum(seen(timings)) >= 7
    check_sums(timings)


def test_a_deleted_model_is_freed_at_once(start: Any) -> None:
    timings_of(
        start,
        """
import gc, weakref
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(8):
    model(x).mean().backward()
    opt.step()
gone = weakref.ref(model)
gc.disable()
del model
assert gone() is None
print("fine")
""",
    )


@pytest.mark.parametrize("how", ["wrapped", "in place", "function", "whole step"])
def test_compiled_models_are_timed_from_outside(start: Any, how: str) -> None:
    body = {
        "wrapped": "call = torch.compile(model, backend='eager', fullgraph=True)\n",
        "in place": "model.compile(backend='eager')\ncall = model\n",
        "function": "call = torch.compile(lambda x: model(x).square(), backend='eager', fullgraph=True)\n",
        "whole step": "call = torch.compile(lambda x: model(x).square(), backend='eager', fullgraph=True)\n"
        "step_ = torch.compile(opt.step, backend='eager')\n",
    }[how]
    timings = timings_of(
        start,
        f"""
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
step_ = opt.step
{body}
for i in range(30):
    call(x).mean().backward()
    step_()
    opt.zero_grad()
graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
assert graphs <= {2 if how == "whole step" else 1}, graphs
print("fine")
""",
    )
    assert [t.step for t in timings] == list(range(1, 30))
    check_sums(timings)
    if how in ("wrapped", "in place"):
        assert all(seen(timings))
    else:
        assert not any(seen(timings)), "the call of the model is inside of what was compiled"


def test_outputs_and_backwards_of_many_kinds(start: Any) -> None:
    timings = timings_of(
        start,
        """
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from torch.utils.checkpoint import checkpoint
@dataclass
class Out:
    loss: object
    logits: object
Pair = namedtuple("Pair", "a b")
kinds = [lambda y: y, lambda y: (None, y), lambda y: {"a": 1, "y": y}, lambda y: Out(y.mean(), y),
         lambda y: Pair(3, [y]),
         lambda y: OrderedDict(loss=y.mean(), logits=y)]
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = net(), net()
        self.kind = kinds[0]
    def forward(self, x):
        return self.kind(checkpoint(self.b, self.a(x), use_reentrant=False))
def tensor(out):
    while not isinstance(out, torch.Tensor):
        out = list(out.values())[-1] if isinstance(out, dict) else out.logits if isinstance(out, Out) else out[-1]
    return out
model = Model()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def once(i):
    model.kind = kinds[i % len(kinds)]
    if i % 4 == 1:
        checkpoint(lambda v: tensor(model(v)), x, use_reentrant=False).mean().backward()
    elif i % 4 == 2:
        y = tensor(model(x))
        y.mean().backward(retain_graph=True)
        y.square().mean().backward()
    elif i % 4 == 3:
        v = x.clone().requires_grad_()
        y = tensor(model(v))
        grad, = torch.autograd.grad(y.sum(), v, create_graph=True)
        (y.mean() + grad.square().mean()).backward()
    else:
        tensor(model(x)).mean().backward()
for i in range(24):
    once(i)
    opt.step()
    opt.zero_grad()
lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=2)
def closure():
    lbfgs.zero_grad()
    loss = tensor(model(x)).square().mean()
    loss.backward()
    return loss
opt = None
for i in range(5):
    lbfgs.step(closure)
print("fine")
""",
    )
    check_sums(timings)
    assert sum(seen(timings)) >= 22, seen(timings)


def test_steps_that_the_script_marks_itself_are_timed(start: Any) -> None:
    timings = timings_of(
        start,
        """
model = Slow(net(), 0.005)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(100, 110):
    for _ in range(2):
        model(x).mean().backward()
        opt.step()
    watch.step(i)
print("fine")
""",
    )
    assert [t.step for t in timings if t.step > 100] == list(range(101, 110))
    assert all(seen([t for t in timings if t.step > 101]))
    assert 0.01 <= middle([t.forward_s for t in timings]) < 0.02, "both, each once"
    check_sums(timings)


def test_a_role_is_written_and_off_is_off(start: Any) -> None:
    text = """
watch.role(dp=3, tp=1, pp=0)
watch.role(dp="not a number")
watch.work("not a number")
watch.work(float("nan"))
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(6):
    model(x).mean().backward()
    opt.step()
print("fine")
"""
    assert timings_of(start, text)[-1].work is None
    told = json.loads((start.ranks[-1].rank_dir / "role.json").read_text())
    assert told == {
        "schema": "steadyrun.role/1",
        "mesh": {"dp": 3, "tp": 1, "pp": 0},
        "key": [["pp", 0], ["tp", 1]],
    }
    assert timings_of(start, text + "assert '_compiled_call_impl' not in vars(model)\n", {"timing": False}) == []
    assert not (start.ranks[-1].rank_dir / "role.json").exists()


def test_children_and_other_threads_leave_the_record_alone(start: Any) -> None:
    timings = timings_of(
        start,
        """
import os, threading
model = net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
def step():
    model(x).mean().backward()
    opt.step()
for i in range(6):
    step()
child = os.fork()
if child == 0:
    for i in range(3):
        step()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
def elsewhere():
    for _ in range(3):
        model(x).mean().backward()
thread = threading.Thread(target=elsewhere)
thread.start(); thread.join()
for i in range(6):
    step()
print("fine")
""",
    )
    assert [t.step for t in timings] == list(range(1, 12))
    check_sums(timings)
    assert sum(seen(timings)) >= 10


def test_the_probe_comes_every_hundred_steps_and_seldom_in_short_ones(start: Any) -> None:
    text = """
model = Slow(net(), {s})
opt = torch.optim.SGD(model.parameters(), lr=0.1)
state = torch.get_rng_state()
for i in range(118):
    model(x).mean().backward()
    opt.step()
assert torch.equal(state, torch.get_rng_state())
print("fine")
"""
    timings = timings_of(start, text.format(s=0.06))
    probed = [t for t in timings if t.probe_s is not None]
    assert [t.step for t in probed] == [101]
    assert 0.0005 < probed[0].probe_s < probed[0].wall_s
    check_sums(timings)  # the probe is not the step's own work
    assert all(t.probe_s is None for t in timings_of(start, text.format(s=0.0)))
