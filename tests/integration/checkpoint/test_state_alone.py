"""State of one process: names, structure, optimizers, loaders, and what is said about gaps."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, IterableDataset

from steadyrun.checkpoint.layout import ALIGN_BYTES
from steadyrun.checkpoint.optimizerstate import predicted_state
from steadyrun.checkpoint.state import Captured, PerRank, Saved, State, StateError

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw amsgrad fused": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True, fused=True),
    "adam capturable": lambda p: torch.optim.Adam(p, torch.tensor(1e-2), capturable=False, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2),
    "sgd momentum": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, dampening=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def make_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.Linear(12, 8), nn.Linear(8, 8))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, scheduler: Any = None) -> list[float]:
    losses = []
    for _ in range(steps):
        x = torch.randn(4, 8)

        def loss_of(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(x).square().mean()
            loss.backward()
            return loss

        loss = optimizer.step(loss_of)
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss))
    return losses


def kept(captured: Captured) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Copies of all, the objects by way of their bytes, as a checkpoint has them."""
    blob = io.BytesIO()
    torch.save({o.key: v for o, v in zip(captured.layout.objects, captured.objects, strict=True)}, blob)
    blob.seek(0)
    return [t.clone() for t in captured.tensors], torch.load(blob, weights_only=True)


def put_back(state: State, captured: Captured, tensors: list[torch.Tensor], objects: dict[str, Any]) -> list[str]:
    notes = state.prepare_to_load(Saved.from_layout(captured.layout))
    for target, tensor in zip(state.targets(), tensors, strict=True):
        assert target.shape == tensor.shape
        target.copy_(tensor)
    return notes + state.apply(objects, captured.layout.world_size, 0)


def keys(state: State) -> set[str]:
    return {e.key for e in state.capture().layout.entries}


# -- optimizers ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_by_bit(name: str) -> None:
    net = make_net()
    optimizer = OPTIMIZERS[name](net.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    train(net, optimizer, 3, scheduler)
    captured = State(net, optimizer, scheduler).capture()
    tensors, objects = kept(captured)
    expected = train(net, optimizer, 3, scheduler)

    net = make_net(1)
    optimizer = OPTIMIZERS[name](net.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    state = State(net, optimizer, scheduler)
    assert put_back(state, captured, tensors, objects) == []
    assert train(net, optimizer, 3, scheduler) == expected


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_preparing_a_load_touches_nothing_but_the_state_of_the_optimizer(name: str) -> None:
    net = make_net()
    optimizer = OPTIMIZERS[name](net.parameters())
    before = copy.deepcopy(net.state_dict())
    groups = copy.deepcopy([{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups])
    drawn, steps = torch.get_rng_state(), []
    had = {p: set(s) for p, s in optimizer.state.items()}
    handle = register_optimizer_step_post_hook(lambda *_: steps.append(1))
    own = optimizer.register_step_post_hook(lambda *_: steps.append(2))
    try:
        state = State(net, optimizer)
        state.prepare_to_load()
        state.targets()
        state.load_plan_state_dict()
    finally:
        handle.remove()
        own.remove()
    assert steps == []
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups
    assert all(p.grad is None for p in net.parameters())
    state.cancel_load()
    assert {p: set(s) for p, s in optimizer.state.items()} == had


@pytest.mark.parametrize("name", ["adamw", "adamw amsgrad fused", "sgd momentum", "nadam", "radam", "rmsprop", "rprop"])
def test_state_is_foreseen_as_a_step_makes_it(name: str) -> None:
    net = make_net()
    optimizer = OPTIMIZERS[name](net.parameters())
    foreseen = State(net, optimizer)
    assert foreseen.prepare_to_load() == []
    layout = foreseen.capture().layout
    net = make_net()
    optimizer = OPTIMIZERS[name](net.parameters())
    train(net, optimizer, 1)
    made = State(net, optimizer).capture()
    assert layout.digest() == made.layout.digest()
    assert all(v.device == w.device for v, w in zip(foreseen.targets(), made.tensors, strict=True))


def test_an_optimizer_whose_step_could_do_anything_is_not_tried() -> None:
    class Hoarder(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, 0.1, momentum=0.9)
            self.seen: list[int] = []

        def step(self, closure: Any = None) -> Any:
            self.seen.append(1)
            return super().step(closure)

    optimizer = Hoarder(make_net().parameters())
    assert predicted_state(optimizer) is None
    assert optimizer.seen == []


def test_moments_in_another_precision_than_the_parameters_stay_so() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Linear(4, 4).bfloat16()
        return net, torch.optim.SGD(net.parameters(), 0.1)

    net, optimizer = make()
    for p in net.parameters():
        optimizer.state[p]["master"] = torch.randn(p.shape)
    captured = State(net, optimizer).capture()
    tensors, objects = kept(captured)
    net, optimizer = make()
    put_back(State(net, optimizer), captured, tensors, objects)
    masters = [optimizer.state[p]["master"] for p in net.parameters()]
    assert [m.dtype for m in masters] == [torch.float32] * 2
    assert all(any(torch.equal(m, t) for t in tensors if t.dtype == m.dtype) for m in masters)


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor() -> None:
    net = nn.Linear(2, 2)
    rate = torch.tensor(0.25)
    optimizer = torch.optim.Adam(net.parameters(), rate)
    captured = State(net, optimizer).capture()
    tensors, objects = kept(captured)
    rate.fill_(1.0)
    put_back(State(net, optimizer), captured, tensors, objects)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.25


def test_two_optimizers_of_one_parameter_need_names() -> None:
    net = nn.Linear(2, 2)
    both = [torch.optim.AdamW(net.parameters()) for _ in range(2)]
    for one in both:
        train(nn.Sequential(nn.Linear(8, 2), net), one, 1)
    with pytest.raises(StateError, match="give them as a mapping with names"):
        State(net, both).capture()
    assert "optimizer.b.state.weight.exp_avg" in keys(State(net, {"a": both[0], "b": both[1]}))


def test_other_groups_than_in_the_checkpoint_are_said() -> None:
    net = nn.Linear(2, 2)
    captured = State(net, torch.optim.SGD(net.parameters(), 0.1)).capture()
    tensors, objects = kept(captured)
    groups = [{"params": [net.weight]}, {"params": [net.bias]}]
    notes = put_back(State(net, torch.optim.SGD(groups, 0.2)), captured, tensors, objects)
    assert notes == [
        "optimizer: the checkpoint has 1 groups of parameters, this run has 2: learning rates and other settings stay "
        "as the script made them"
    ]


def test_settings_that_have_not_changed_are_not_pickled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net = make_net()
    optimizer = torch.optim.AdamW([{"params": [p], "lr": 0.1 * i} for i, p in enumerate(net.parameters())])
    state = State(net, optimizer)
    blobs = state.capture().blobs()
    saved: list[Any] = []
    real = torch.save

    def save(value: Any, file: Any) -> None:
        saved.append(value)
        real(value, file)

    monkeypatch.setattr(torch, "save", save)
    optimizer.param_groups[3]["lr"] = -0.0
    captured = state.capture()
    again = captured.blobs()
    assert [v for v in saved if not isinstance(v, dict)] == [0.0]  # and the random numbers, which are a dict
    changed = [o.key for o, a, b in zip(captured.layout.objects, blobs, again, strict=True) if a != b]
    assert changed == ["optimizer.param_groups.3.lr"]
    for blob, value in zip(again, captured.objects, strict=True):
        loaded = torch.load(io.BytesIO(blob), weights_only=True)
        assert repr(loaded) == repr(value)


# -- names and structure ---------------------------------------------------------------------------------------------
def test_names_are_those_of_torch() -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    layout = State(net, optimizer).capture().layout
    model, optim = get_state_dict(net, optimizer)
    flat, paths = flatten_state_dict({"model": model, "optimizer": optim})
    assert set(flat) <= {e.key for e in layout.entries} | {o.key for o in layout.objects}
    ours = {e.key: e.path for e in layout.entries} | {o.key: o.path for o in layout.objects}
    assert {k: ours[k] for k in paths} == paths


def test_wrappers_leave_no_trace_in_the_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = make_net()
    wrapped = make_net()
    wrapped[0] = checkpoint_wrapper(wrapped[0])
    assert keys(State(torch.compile(wrapped))) == keys(State(plain))


def test_layout_is_aligned_and_in_order() -> None:
    net = make_net()
    captured = State(net).capture()
    ends = 0
    for entry, tensor in zip(captured.layout.entries, captured.tensors, strict=True):
        assert entry.at_bytes % ALIGN_BYTES == 0
        assert entry.at_bytes >= ends
        assert entry.size_bytes == tensor.numel() * tensor.element_size()
        assert entry.sizes == tuple(tensor.shape)
        ends = entry.at_bytes + entry.size_bytes


def test_tensors_are_the_live_ones() -> None:
    net = make_net()
    captured = State(net).capture()
    by_key = dict(zip((e.key for e in captured.layout.entries), captured.tensors, strict=True))
    weight = by_key["model.0.weight"]
    assert weight.data_ptr() == net[0].weight.data_ptr()
    assert not weight.requires_grad
    with torch.no_grad():
        net[0].weight.fill_(3.0)
    assert bool((weight == 3.0).all())


def test_tied_parameters_have_both_names_and_one_state() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)
    net(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert keys(State(net, optimizer)) == {
        "model.0.weight",
        "model.1.weight",
        "optimizer.state.0.weight.momentum_buffer",
    }


def test_buffers_that_do_not_persist_are_left_out() -> None:
    net = nn.Module()
    net.register_buffer("kept", torch.ones(2))
    net.register_buffer("left", torch.ones(2), persistent=False)
    assert keys(State(net)) == {"model.kept"}


def test_layout_stays_the_same_object_until_the_structure_changes() -> None:
    net = make_net()
    optimizer = torch.optim.AdamW(net.parameters())
    state = State(net, optimizer)
    first = state.capture().layout
    train(net, optimizer, 1)
    second = state.capture().layout
    assert second is not first
    train(net, optimizer, 2)
    assert state.capture().layout is second


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net[0], "weight", nn.Parameter(torch.full((12, 8), 5.0))),
        lambda net: setattr(net[0].weight, "data", torch.full((12, 8), 5.0)),
        lambda net: net.__setitem__(0, nn.Linear(8, 12)),
        lambda net: net.to(torch.float64),
        lambda net: net.append(nn.Linear(8, 2)),
        lambda net: net[0].register_buffer("late", torch.ones(3)),
        lambda net: net[1].register_buffer("running_mean", torch.full((12,), 2.0)),
    ],
    ids=["parameter", "memory", "module", "dtype", "added module", "added buffer", "buffer"],
)
def test_every_change_of_the_structure_is_seen(change: Callable[[nn.Module], Any]) -> None:
    net = make_net()
    state = State(net)
    state.capture()
    change(net)
    captured = state.capture()
    live = {f"model.{k}": v for k, v in net.state_dict().items()}
    assert {e.key for e in captured.layout.entries} == set(live)
    for entry, tensor in zip(captured.layout.entries, captured.tensors, strict=True):
        assert tensor.data_ptr() == live[entry.key].data_ptr()
        assert entry.dtype == str(tensor.dtype).removeprefix("torch.")


def test_tensors_without_plain_memory_are_refused_by_name() -> None:
    net = nn.Module()
    net.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(StateError, match=r"cannot save 'model\.graph'"):
        State(net).capture()


def test_extra_state_of_modules_comes_back() -> None:
    class Scaled(nn.Linear):
        history: Any = None

        def get_extra_state(self) -> Any:
            return {"amax": self.history}

        def set_extra_state(self, state: Any) -> None:
            self.history = state["amax"]

    net = nn.Sequential(Scaled(2, 2), Scaled(2, 2))
    net[0].history, net[1].history = torch.tensor([1.0, 2.0]), torch.tensor([3.0])
    captured = State(net).capture()
    tensors, objects = kept(captured)
    net = nn.Sequential(Scaled(2, 2), Scaled(2, 2))
    assert put_back(State(net), captured, tensors, objects) == []
    assert [net[0].history.tolist(), net[1].history.tolist()] == [[1.0, 2.0], [3.0]]


# -- other things ----------------------------------------------------------------------------------------------------
class Memory:
    """Keeps its state in structures that only exist after some use."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize("wrap", [lambda x: x, PerRank], ids=["shared", "per rank"])
def test_structures_come_back_as_they_were(wrap: Callable[[Any], Any]) -> None:
    used = Memory()
    used.state = {
        "plain": {"a.b": 1, "empty": {}, "list": [], "none": None},
        "numbers": {0: torch.ones(2), 7: "seven"},
        "tuple": (torch.zeros(()), [torch.arange(3), 2.5], ("x",)),
        "names": ["p", "q"],
    }
    captured = State(extra={"memory": wrap(used)}).capture()
    tensors, objects = kept(captured)
    fresh = Memory()
    put_back(State(extra={"memory": wrap(fresh)}), captured, tensors, objects)
    assert repr(fresh.state) == repr(used.state)


def test_what_a_checkpoint_does_not_have_is_said() -> None:
    captured = State(nn.Linear(2, 2)).capture()
    tensors, objects = kept(captured)
    net = nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu")
    notes = put_back(State(net, scaler=scaler, extra={"m": Memory()}), captured, tensors, objects)
    assert notes == [
        "'scaler' is not in the checkpoint: it begins as the script made it",
        "'m' is not in the checkpoint: it begins as the script made it",
    ]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": object()}, "cannot save 'model': a object is no torch.nn.Module"),
        ({"optimizer": object()}, "cannot save 'optimizer': a object is no torch.optim.Optimizer"),
        ({"scheduler": object()}, "cannot save 'scheduler': a object has no method state_dict"),
        ({"extra": {"rng": Memory()}}, "cannot save something under the name 'rng'"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(given: dict[str, Any], text: str) -> None:
    with pytest.raises(StateError) as e:
        State(**given)
    assert text in str(e.value)


def test_gaps_are_named() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(torch.arange(4))  # type: ignore[arg-type]
    assert State(net, optimizer, loader=loader).not_covered == (
        "the optimizer has a learning-rate scheduler, which is not given",
        "the data position: DataLoader has no state_dict (use torchdata's StatefulDataLoader, or anything with "
        "state_dict and load_state_dict)",
    )
    assert State(net, optimizer).not_covered[0].startswith("no loader is given")
    assert not [t for t in State(net, optimizer, extra={"m": Memory()}).not_covered if "loader" in t]


# -- data ------------------------------------------------------------------------------------------------------------
class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> int:
        return i


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(40))


def loader_of(workers: int, generator: torch.Generator | None = None) -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers, generator=generator)


def run_epochs(loader: Any, steps: int, state: State | None = None, at: int = -1) -> tuple[list[Any], Any]:
    """What *steps* steps see, with a random number of the script's own in each; a capture after step *at*."""
    seen: list[Any] = []
    kept_state = None
    while len(seen) < steps:
        for batch in loader:
            seen.append((batch.tolist(), torch.rand(()).item()))
            if len(seen) - 1 == at and state is not None:
                captured = state.capture()
                kept_state = captured, *kept(captured)
            if len(seen) == steps:
                break
    if loader.num_workers:
        loader._iterator._shutdown_workers()
    return seen, kept_state


@pytest.mark.parametrize("own_generator", [False, True], ids=["global", "own generator"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("at", [2, 9], ids=["within an epoch", "at its end"])
def test_data_and_random_numbers_go_on_across_epochs(workers: int, at: int, own_generator: bool) -> None:
    def make(seed: int) -> Any:
        torch.manual_seed(seed)
        return loader_of(workers, torch.Generator().manual_seed(seed) if own_generator else None)

    loader = make(1)
    undisturbed, _ = run_epochs(loader, 25)
    loader = make(1)
    seen, stored = run_epochs(loader, 25, State(loader=loader), at)
    assert seen == undisturbed, "the capture itself disturbs"
    loader = make(2)
    assert put_back(State(loader=loader), *stored) == []
    rest, _ = run_epochs(loader, 24 - at)
    assert rest == undisturbed[at + 1 :]


def test_a_capture_before_the_first_batch_starts_no_worker() -> None:
    loader = loader_of(2)
    drawn = torch.get_rng_state()
    state = State(loader=loader)
    captured = state.capture()
    assert loader._iterator is None
    assert torch.equal(drawn, torch.get_rng_state())
    tensors, objects = kept(captured)
    put_back(State(loader=loader), captured, tensors, objects)
    assert loader._iterator is None


@pytest.mark.parametrize("workers", [0, 2])
def test_position_moves_to_another_number_of_ranks(workers: int) -> None:
    pytest.importorskip("torchdata")
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    def make(rank: int, world: int) -> Any:
        sampler = DistributedSampler(Numbers(), world, rank, shuffle=True, seed=4)
        return StatefulDataLoader(Numbers(), batch_size=4 // world, sampler=sampler, num_workers=workers)

    whole = [sorted(b.tolist()) for b in make(0, 1)]
    objects: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for rank in range(4):
        loader = make(rank, 4)
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        captured = State(loader=loader, rank=rank, world_size=4).capture()
        objects |= {o.key: v for o, v in zip(captured.layout.objects, captured.objects, strict=True)}
        if workers:
            iterator._shutdown_workers()
    saved = Saved(4, tensors, {k: (k,) for k in objects})
    parts = []
    for rank in range(2):
        loader = make(rank, 2)
        state = State(loader=loader, rank=rank, world_size=2)
        state.prepare_to_load(saved)
        wanted = state.load_plan_state_dict()
        notes = state.apply_loaded({k: objects.get(k) for k in wanted}, 4, 2)
        assert notes[0] == "data position: 12 samples of the epoch seen; the global batch stays 4 samples"
        parts.append([b.tolist() for b in loader])
    assert [sorted(a + b) for a, b in zip(*parts, strict=True)] == whole[3:]


def test_a_stream_without_position_begins_anew_and_that_is_said() -> None:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    loader = module.StatefulDataLoader(Stream(), batch_size=4)
    next(iter(loader))
    captured = State(loader=loader, rank=0, world_size=2).capture()
    objects = {o.key: v for o, v in zip(captured.layout.objects, captured.objects, strict=True)}
    state = State(loader=module.StatefulDataLoader(Stream(), batch_size=4))
    state.prepare_to_load(Saved(2, {}, {k: (k,) for k in objects}))
    notes = state.apply(objects, 2, 0)
    assert any("only the dataset could find it; data begin anew" in n for n in notes)
