"""One wrong bit in what a rank holds, as a broken memory cell or arithmetic unit leaves it behind.

Needs torch, and a script that has made an optimizer.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from steadyrun.watch.calls import find_roots
from steadyrun.watch.integrity import named

if TYPE_CHECKING:
    from steadyrun.integrity.groups import Comparison

__all__ = ["TARGETS", "CannotFlipError", "Flipped", "flip", "flip_gradient"]

TARGETS: Final = ("param", "grad", "optim")


class CannotFlipError(Exception):
    """There is no such bit; the text says why."""


@dataclass(frozen=True, slots=True)
class Flipped:
    """Which bit it was.

    Attributes:
        element: of the flattened tensor, of this rank's shard.
        bit: 0 is the lowest of the element.
        before, after: the element's bytes as a number.
    """

    tensor: str
    element: int
    bit: int
    before: int
    after: int


def flip(
    target: str,
    name: str | None,
    element: int | None,
    bit: int | None,
    seed: str,
    watched: Sequence[Comparison] = (),
) -> Flipped:
    """Flip one bit of a parameter or of an optimizer's state; what is None is drawn from *seed*.

    Args:
        watched: what there is; without it the model is looked for.

    Raises:
        CannotFlipError: there is no such tensor, element or bit.
    """
    held = _held(target, watched)
    chosen = _chosen(held, name, target, seed)
    return _flip(held[chosen], chosen, element, bit, seed)


def flip_gradient(
    name: str | None,
    element: int | None,
    bit: int | None,
    seed: str,
    tell: Callable[[Flipped], None],
    watched: Sequence[Comparison] = (),
) -> str:
    """Flip one bit of the next gradient that this rank computes of a parameter, before it is reduced over ranks.

    Returns:
        The parameter's name.

    Raises:
        CannotFlipError: there is no such parameter, or its gradient is not the rank's own.
    """
    held = {n: p for n, p in _held("param", watched).items() if p.requires_grad and not hasattr(p, "placements")}
    if not held:
        raise CannotFlipError("no parameter whose gradient a hook sees before it is reduced (sharded ones are none)")
    chosen = _chosen(held, name, "param", seed)
    parameter = held[chosen]
    number, place = _place(parameter, element, bit, seed)
    handle: Any = None

    def hook(gradient: Any) -> Any:
        handle.remove()
        wrong = gradient.clone()
        tell(_flip(wrong, chosen, number, place, seed))
        return wrong

    handle = parameter.register_hook(hook)
    return chosen


def _held(target: str, watched: Sequence[Comparison]) -> dict[str, Any]:
    if "torch" not in sys.modules:
        raise CannotFlipError("the script has not imported torch")
    from steadyrun.integrity.groups import Kind

    kinds = (Kind.OPTIMIZER, Kind.MASTER) if target == "optim" else (Kind.PARAMETER,)
    read = [(c.name, c.read()) for c in watched or _found() if c.kind in kinds]
    return {name: tensor for name, tensor in read if tensor is not None}


def _found() -> Sequence[Comparison]:
    """What the optimizers of this process update, when nobody has looked for it yet."""
    from steadyrun.integrity.groups import World, plan

    torch = sys.modules["torch"]
    optimizers = [o for o in gc.get_objects() if issubclass(type(o), torch.optim.Optimizer) and o.param_groups]
    models = find_roots(optimizers)
    if not models:
        raise CannotFlipError("no model was found: no module that holds what an optimizer updates")
    is_alone = not torch.distributed.is_available() or not torch.distributed.is_initialized()
    return plan(named(models, optimizers), optimizers, World(0, 1) if is_alone else None)


def _chosen(held: dict[str, Any], name: str | None, target: str, seed: str) -> str:
    if name is not None:
        if name not in held:
            known = ", ".join(sorted(held)[:8]) or "none"
            raise CannotFlipError(f"no tensor {name!r} among those of target={target} (there are: {known}, ...)")
        return name
    wide = sorted(n for n, t in held.items() if t.numel() > 1) or sorted(held)
    if not wide:
        raise CannotFlipError(f"no tensor for target={target}: the optimizer has no state yet")
    return random.Random(f"{seed}/tensor").choice(wide)


def _place(tensor: Any, element: int | None, bit: int | None, seed: str) -> tuple[int, int]:
    local = getattr(tensor, "_local_tensor", tensor)
    count, bits = local.numel(), 8 * local.element_size()
    draw = random.Random(f"{seed}/place")
    number = draw.randrange(max(count, 1)) if element is None else element
    place = draw.randrange(bits) if bit is None else bit
    if not 0 <= number < count:
        raise CannotFlipError(f"no element {number}: there are {count}")
    if not 0 <= place < bits:
        raise CannotFlipError(f"no bit {place}: an element has {bits}")
    return number, place


def _flip(tensor: Any, name: str, element: int | None, bit: int | None, seed: str) -> Flipped:
    torch = sys.modules["torch"]
    number, place = _place(tensor, element, bit, seed)
    local = getattr(tensor, "_local_tensor", tensor).detach()
    at = local.storage_offset()
    rest = number
    for size, stride in zip(reversed(local.shape), reversed(local.stride()), strict=True):
        rest, index = divmod(rest, size)
        at += index * stride
    one = local.as_strided((1,), (1,), at).view(torch.uint8)
    with torch.no_grad():
        before = int.from_bytes(bytes(one.tolist()), "little")
        one[place // 8] ^= 1 << place % 8
        after = int.from_bytes(bytes(one.tolist()), "little")
    return Flipped(name, number, place, before, after)
