"""A microbatch computed again gives the same gradients, bit by bit, and leaves no trace; models of several kinds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from steadyrun.integrity.fingerprint import Hasher, fingerprint
from steadyrun.integrity.microbatch import CannotReplayError, Capture, Gradients, place_of, recompute

MOST_BYTES = 64 << 20


@pytest.fixture(scope="module")
def hasher() -> Hasher:
    return Hasher()


class Block(nn.Module):
    """Causal attention and two layers, with dropout in both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.layers = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        out: torch.Tensor = x + self.layers(self.norm2(x))
        return out


class Gpt(nn.Module):
    """Its head is its embedding; returns several tensors in a dict, and takes keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.Sequential(Block(32), Block(32))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.blocks(self.embed(tokens))
        return {"logits": self.head(hidden) * scale, "more": [hidden.mean(), "text"], "count": tokens.sum()}


class Drawing(nn.Module):
    """Draws from Python's generator and one of its own as well as from torch's; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.own = torch.Generator().manual_seed(3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        layer = self.one if random.random() < 0.5 else self.two
        noise = torch.rand(8, generator=self.own) * self.calls
        out: torch.Tensor = nn.functional.dropout(layer(x) * noise, 0.5)
        return out


@dataclass
class Answer:
    logits: torch.Tensor
    state: tuple[torch.Tensor, torch.Tensor]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRUCell(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Answer:
        state = torch.zeros(x.shape[0], 8)
        for at in range(x.shape[1]):
            state = self.cells(x[:, at], state)
        return Answer(self.head(state), (state, state * 2))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.3), nn.Linear(40, 5))


def convolutions() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(288, 4))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)  # type: ignore[operator, index]
    return model


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]]] = {
    "mlp": (mlp, lambda: ((torch.randn(6, 12),), {})),
    "gpt": (Gpt, lambda: ((torch.randint(0, 50, (3, 9)),), {"scale": 0.5})),
    "convolutions": (
        convolutions,
        lambda: ((torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last),), {}),
    ),
    "drawing": (Drawing, lambda: ((torch.randn(4, 8),), {})),
    "recurrent": (Recurrent, lambda: ((torch.randn(2, 5, 6),), {})),
    "frozen": (frozen, lambda: ((torch.randn(6, 12),), {})),
    "a view of its input": (mlp, lambda: ((torch.randn(50, 24)[3:9, ::2],), {})),
    "input with gradients": (mlp, lambda: ((torch.randn(6, 12).requires_grad_() * 2,), {})),
}


def loss_of(output: Any) -> torch.Tensor:
    match output:
        case dict():
            return output["logits"].square().mean() + output["more"][0]  # type: ignore[no-any-return]
        case Answer():
            return output.logits.square().mean() + output.state[1].sum()
        case _:
            return output.square().mean()  # type: ignore[no-any-return]


def take(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], hasher: Hasher, most_bytes: int = MOST_BYTES
) -> Capture:
    """One step of a script, as far as the model is concerned; it overwrites its input while that is used no more."""
    capture = Capture(model, hasher, most_bytes)
    capture.begins(args, kwargs)
    output = model(*args, **kwargs)
    capture.ends(output)
    loss_of(output).backward()
    with torch.no_grad():
        for thing in args:
            thing.zero_()
    return capture


def everything(model: nn.Module) -> list[Any]:
    """All that a step leaves behind, and what hooks there are."""
    parameters = list(model.parameters())
    return [
        [p.detach().clone() for p in parameters],
        [None if p.grad is None else p.grad.clone() for p in parameters],
        [b.clone() for b in model.buffers()],
        [len(p._backward_hooks or ()) for p in parameters],
        [m.own.get_state() for m in model.modules() if isinstance(m, Drawing)],
        [m.calls for m in model.modules() if isinstance(m, Drawing)],
        torch.get_rng_state(),
        random.getstate(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
    ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.equal(b)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_microbatch_computed_again_gives_the_same_bits_and_leaves_no_trace(kind: str, hasher: Hasher) -> None:
    make, batch = KINDS[kind]
    torch.manual_seed(5)
    model = make()
    args, kwargs = batch()
    capture = take(model, args, kwargs, hasher)
    assert (capture.why, capture.is_done) == ("", True)
    told = capture.gradients()
    for p, leaves in zip(model.parameters(), told.leaves, strict=True):
        assert (leaves is None) == (p.grad is None)
        if p.grad is not None:
            assert tuple(v & (1 << 64) - 1 for v in leaves or ()) == fingerprint(p.grad, hasher).leaves
    torch.rand(3)  # the script goes on
    before = everything(model)
    packed = capture.packed()
    with torch.no_grad():  # as inside of a script's own optimizer
        found = [recompute(model, packed, hasher) for _ in range(2)]
    assert found == [told, told]
    assert same(everything(model), before)


def test_autocast_is_as_it_was(hasher: Hasher) -> None:
    torch.manual_seed(6)
    model = mlp()
    with torch.autocast("cpu", torch.bfloat16):
        capture = take(model, (torch.randn(6, 12),), {}, hasher)
    assert recompute(model, capture.packed(), hasher) == capture.gradients()
    assert not torch.is_autocast_enabled("cpu")


def test_another_copy_of_the_model_gives_the_same(hasher: Hasher) -> None:
    """As on another rank: equal parameters, other running statistics, another place in its random numbers."""
    torch.manual_seed(7)
    model, other = mlp(), mlp()
    capture = take(model, (torch.randn(6, 12),), {}, hasher)
    packed, told = capture.packed(), capture.gradients()
    assert recompute(other, packed, hasher) != told
    with torch.no_grad():
        for a, b in zip(other.parameters(), model.parameters(), strict=True):
            a.copy_(b)
    other(torch.randn(9, 12))
    assert recompute(other, packed, hasher) == told


def test_hooks_of_the_script_that_change_gradients_are_seen(hasher: Hasher) -> None:
    """A gradient is taken behind all hooks, also of those that came later: so does a fault that is injected there."""
    torch.manual_seed(8)
    model = mlp()
    capture = Capture(model, hasher, MOST_BYTES)
    x = torch.randn(6, 12)
    capture.begins((x,), {})
    output = model(x)
    capture.ends(output)
    model[4].weight.register_hook(lambda g: g * 2)  # type: ignore[index, operator, union-attr]
    output.sum().backward()
    told = capture.gradients()
    found = recompute(model, capture.packed(), hasher)
    assert told.differing(found) == [n for n, (name, _) in enumerate(model.named_parameters()) if name == "4.weight"]


def test_accumulated_gradients_are_those_of_the_microbatch_alone(hasher: Hasher) -> None:
    torch.manual_seed(9)
    model = mlp()
    model(torch.randn(6, 12)).sum().backward()
    capture = take(model, (torch.randn(6, 12),), {}, hasher)
    assert recompute(model, capture.packed(), hasher) == capture.gradients()


class Unknown:
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


class Ignoring(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = nn.Embedding(9, 4, sparse=True)

    def forward(self, x: torch.Tensor, other: Any = None, is_sparse: bool = False) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out + self.table(torch.tensor([1])) if is_sparse else out


@pytest.mark.parametrize(
    ("kwargs", "most_bytes", "why"),
    [
        ({"other": Unknown()}, MOST_BYTES, "cannot be pickled"),
        ({"other": torch.eye(3).to_sparse()}, MOST_BYTES, "sparse"),
        ({"is_sparse": True}, MOST_BYTES, "no plain bytes"),
        ({}, 100, "too large"),
    ],
)
def test_what_cannot_be_kept_is_said_and_the_script_goes_on(
    kwargs: dict[str, Any], most_bytes: int, why: str, hasher: Hasher
) -> None:
    model = Ignoring()
    capture = take(model, (torch.randn(8, 4),), kwargs, hasher, most_bytes)
    assert why in capture.why
    assert model.layer.weight.grad is not None


def test_a_model_called_twice_before_its_backward_is_not_taken(hasher: Hasher) -> None:
    model, x = mlp(), torch.randn(6, 12)
    capture = Capture(model, hasher, MOST_BYTES)
    outputs = []
    for _ in range(2):
        capture.begins((x,), {})
        outputs.append(model(x))
        capture.ends(outputs[-1])
    (outputs[0] + outputs[1]).sum().backward()
    assert "several times" in capture.why


def test_a_model_in_another_mode_is_computed_as_it_was_taken(hasher: Hasher) -> None:
    model = mlp()
    capture = take(model, (torch.randn(6, 12),), {}, hasher)
    assert recompute(model.eval(), capture.packed(), hasher) == capture.gradients()
    assert not any(m.training for m in model.modules())


def test_another_model_is_not_computed(hasher: Hasher) -> None:
    packed = take(mlp(), (torch.randn(6, 12),), {}, hasher).packed()
    with pytest.raises(CannotReplayError, match="other modules"):
        recompute(nn.Linear(12, 5), packed, hasher)


def test_fingerprints_travel_and_show_where_gradients_differ(hasher: Hasher) -> None:
    model = nn.Linear(300, 300)
    told = take(model, (torch.randn(4, 300),), {}, hasher).gradients()
    assert Gradients.from_bytes(told.to_bytes()) == told
    assert model.weight.grad is not None
    wrong = model.weight.grad.clone()
    wrong.view(torch.int32)[250, 7] ^= 1 << 9
    mine = tuple(hasher.leaves(wrong).tolist())
    place = place_of(mine, told.leaves[0], wrong.nbytes, 4)
    assert (place.leaves, place.elements, place.is_all) == (1, ((250 * 300 + 7, (9,)),), True)
    assert place_of(None, told.leaves[0], wrong.nbytes, 4).leaves is None
    for cut in (b"", told.to_bytes()[:-8], told.to_bytes() + bytes(8)):
        with pytest.raises(ValueError, match="fingerprints of gradients"):
            Gradients.from_bytes(cut)


class Collecting(nn.Module):
    """Keeps what its forward came by."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.losses: list[torch.Tensor] = []
        self.cache: dict[str, torch.Tensor] = {}
        self.newest: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.losses.append(y.detach().sum())
        self.cache[str(len(self.cache))] = self.newest = y.detach()
        return y


def test_what_a_forward_collects_is_not_collected_twice(hasher: Hasher) -> None:
    model = Collecting()
    capture = take(model, (torch.randn(2, 4),), {}, hasher)
    packed, gradients = capture.packed(), capture.gradients()
    before = (list(model.losses), dict(model.cache), model.newest)
    assert recompute(model, packed, hasher) == gradients
    after = (list(model.losses), dict(model.cache), model.newest)
    assert len(before[0]) == len(after[0]) == 1
    assert all(a is b for a, b in zip(before[0], after[0], strict=True))
    assert before[1].keys() == after[1].keys()
    assert before[2] is after[2]
