"""One microbatch of a model, taken while it trains and computed again, by the same rank or one of equal parameters.

The loss is the script's own and unknown here. What is taken is what the wrapped module was called with and the gradient
that came back to what it returned; forward and backward between the two are computed again. Taken by value: a script
may overwrite its input.

Computing again leaves no trace. The module is called with aliases of its parameters, which have no hooks and gradients
of their own, and with copies of its buffers; random states are put back, and what modules hold in attributes (numbers,
generators, lists of losses); no gradient is kept longer than it takes to hash it. What it costs in memory is the
activations of one microbatch.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import pickle
import random
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import nn

from steadyrun.integrity.coefficients import LEAF_BYTES, LEAF_WORDS
from steadyrun.integrity.fingerprint import Hasher
from steadyrun.integrity.location import differing_leaves, locate_word

__all__ = ["CannotReplayError", "Capture", "Gradients", "Place", "collectives_begun", "place_of", "recompute"]

_DEPTH: Final = 4  # containers in what a module returns
_MOST_LEAVES: Final = 4
_ABSENT: Final = -1
_OWN_OF_MODULES: Final = frozenset(nn.Module().__dict__)  # parameters, buffers, hooks and the like
_PLAIN: Final = (bool, int, float, str, type(None))


class CannotReplayError(Exception):
    """This microbatch cannot be computed again; the text says why."""


# -- gradients ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Gradients:
    """Fingerprints of the gradients of one microbatch.

    Attributes:
        leaves: by parameter, in the order of ``named_parameters``; None: it got no gradient.
    """

    leaves: tuple[tuple[int, ...] | None, ...]

    def to_bytes(self) -> bytes:
        counts = [_ABSENT if own is None else len(own) for own in self.leaves]
        return array("q", [len(counts), *counts, *(leaf for own in self.leaves for leaf in own or ())]).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> Gradients:
        """Raises ValueError when *data* is not what ``to_bytes`` gives."""
        words = array("q")
        words.frombytes(data)
        if not words or not 0 <= words[0] < len(words):
            raise ValueError(f"{len(data)} bytes are no fingerprints of gradients")
        counts = words[1 : 1 + words[0]]
        at, out = 1 + words[0], []
        for count in counts:
            out.append(None if count == _ABSENT else tuple(words[at : at + count]))
            at += max(count, 0)
        if at != len(words):
            raise ValueError(f"{len(data)} bytes are no fingerprints of gradients")
        return cls(tuple(out))

    @property
    def digest(self) -> int:
        return int.from_bytes(blake2b(self.to_bytes(), digest_size=8).digest(), "little")

    def differing(self, other: Gradients) -> list[int]:
        """Places of the parameters whose gradients differ."""
        if len(self.leaves) != len(other.leaves):
            return list(range(max(len(self.leaves), len(other.leaves))))
        return [at for at, (a, b) in enumerate(zip(self.leaves, other.leaves, strict=True)) if a != b]


@dataclass(frozen=True, slots=True)
class Place:
    """Where two gradients of one parameter differ.

    Attributes:
        leaves: how many of their pieces of 256 KiB do; None: not comparable.
        elements: with the bits, wherever a single word of a piece differs.
        is_all: *elements* are all that differ.
    """

    leaves: int | None
    elements: tuple[tuple[int, tuple[int, ...]], ...] = ()
    is_all: bool = False


def place_of(own: Sequence[int] | None, other: Sequence[int] | None, size_bytes: int, element_bytes: int) -> Place:
    """Where *own* differs from *other*, both leaves of one parameter's gradient; from the sums alone."""
    if own is None or other is None or len(own) != len(other):
        return Place(None)
    leaves = differing_leaves([v & _MASK for v in own], [v & _MASK for v in other])
    elements: list[tuple[int, tuple[int, ...]]] = []
    is_all = 0 < len(leaves) <= _MOST_LEAVES
    for leaf in leaves[:_MOST_LEAVES]:
        words = min(LEAF_WORDS, -(-(size_bytes - leaf * LEAF_BYTES) // 4))
        word = locate_word(own[leaf] & _MASK, other[leaf] & _MASK, words)
        if word is None:
            is_all = False
            continue
        bit = word.element_bit(element_bytes)
        elements += [(e, () if bit is None else (bit,)) for e in word.elements(leaf, element_bytes)]
    return Place(len(leaves), tuple(elements), is_all and bool(elements))


_MASK: Final = (1 << 64) - 1


class _Collected:
    """Gradients as they come, hashed at once."""

    def __init__(self, hasher: Hasher, count: int) -> None:
        self._hasher = hasher
        self._parts: list[torch.Tensor | None] = [None] * count
        self.is_repeated = False

    def take(self, place: int, gradient: torch.Tensor) -> None:
        """Raises as ``Hasher.leaves``."""
        self.is_repeated |= self._parts[place] is not None
        self._parts[place] = self._hasher.leaves(gradient)

    def told(self) -> Gradients:
        """Waits for the device."""
        there = [p for p in self._parts if p is not None]
        flat = torch.cat(there).tolist() if there else []
        out: list[tuple[int, ...] | None] = []
        at = 0
        for part in self._parts:
            if part is None:
                out.append(None)
                continue
            out.append(tuple(flat[at : at + len(part)]))
            at += len(part)
        return Gradients(tuple(out))


# -- taking ------------------------------------------------------------------------------------------------------------
class Capture:
    """One microbatch of *module*, as the script computes it: from the call of the module to the end of its backward.

    To be told of the call by ``begins`` and ``ends``; the rest comes by hooks on what the module returned and on the
    nodes that accumulate the parameters' gradients: behind all hooks of the script, and before any reduction.

    Nothing here raises into the script. ``why``: what was in the way, empty while nothing is.

    Attributes:
        has_begun, is_done: the module was called; all its gradients are there.
        took_s: what this took of the training thread.
    """

    def __init__(self, module: nn.Module, hasher: Hasher, most_bytes: int) -> None:
        self._module = module
        self._parameters = [p for _, p in module.named_parameters()]
        self._collected = _Collected(hasher, len(self._parameters))
        self._most_bytes = most_bytes
        self._forward = b""
        self._outputs: dict[int, torch.Tensor] = {}
        self._handles: list[Any] = []
        self._nodes: list[Any] = []
        self._has_backward = False
        self.has_begun = self.is_done = False
        self.why = ""
        self.took_s = 0.0

    def begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The module is about to be called with gradients."""
        if self.why:
            return
        with self._guarded():
            if self.has_begun:
                if not self._has_backward:
                    raise CannotReplayError("the model is called several times before its backward")
                return
            self.has_begun = True
            state = {
                "args": args,
                "kwargs": dict(kwargs),
                "buffers": dict(self._module.named_buffers()),
                "random": _random_state(self._device),
                "autocast": _autocast_state(self._device),
                "attributes": _attributes(self._module),
            }
            self._forward = _pack(state, self._most_bytes)

    def ends(self, output: Any) -> None:
        """The module has returned *output*."""
        if self.why:
            return
        with self._guarded():
            if self._outputs or self._handles or self.is_done or not self.has_begun:
                return
            tensors = _tensors_in(output)
            wanted = [(i, t) for i, t in enumerate(tensors) if t.requires_grad and t.grad_fn is not None]
            if not wanted:
                raise CannotReplayError("nothing that the model returns needs a gradient")
            for place, parameter in enumerate(self._parameters):
                if parameter.requires_grad:
                    node = _accumulator(parameter)
                    self._nodes.append(node)
                    self._handles.append(node.register_prehook(partial(self._gradient_comes, place)))
            for number, tensor in wanted:
                self._handles.append(tensor.register_hook(partial(self._output_comes, number)))  # type: ignore[no-untyped-call]

    def fail(self, why: str) -> None:
        self.why = self.why or why
        self.close()

    def close(self) -> None:
        """Take the hooks away."""
        handles, self._handles, self._nodes = self._handles, [], []
        for handle in handles:
            handle.remove()

    def packed(self) -> bytes:
        """For ``recompute``. Raises CannotReplayError."""
        return pickle.dumps((self._forward, _pack(self._outputs, self._most_bytes)))

    def gradients(self) -> Gradients:
        """Of this microbatch, as the script has computed them. Waits for the device."""
        return self._collected.told()

    @property
    def _device(self) -> torch.device:
        return self._parameters[0].device

    def _output_comes(self, number: int, gradient: torch.Tensor) -> None:
        if self.why:
            return
        with self._guarded():
            if self.is_done or number in self._outputs:
                raise CannotReplayError("the model's backward is run more than once")
            if gradient.numel() * gradient.element_size() > self._most_bytes:
                raise CannotReplayError(f"what the model returns is larger than {self._most_bytes >> 20} MiB")
            self._outputs[number] = gradient.detach().clone()
            if not self._has_backward:
                self._has_backward = True
                torch.autograd.Variable._execution_engine.queue_callback(self._backward_is_over)

    def _gradient_comes(self, place: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        if self.why:
            return
        with self._guarded():
            if gradients[0] is not None and self._has_backward and not self.is_done:
                self._collected.take(place, gradients[0])

    def _backward_is_over(self) -> None:
        if self.why:
            return
        with self._guarded():
            if self._collected.is_repeated:
                raise CannotReplayError("a parameter gets more than one gradient in one backward")
            self.is_done = True
        self.close()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        except CannotReplayError as e:
            self.fail(str(e))
        except Exception as e:  # of what the script gave, or of a torch unlike all that we know
            self.fail(f"{type(e).__name__}: {e}")
        finally:
            self.took_s += time.perf_counter() - began_s


def _accumulator(parameter: torch.Tensor) -> Any:
    """The node that adds to the gradient of *parameter*: the same for all graphs for as long as somebody holds it."""
    with torch.enable_grad():
        node: Any = parameter.view_as(parameter).grad_fn
    return node.next_functions[0][0]


def _tensors_in(output: Any, depth: int = _DEPTH) -> list[torch.Tensor]:
    """Tensors in what a module returned, in an order of their own."""
    if isinstance(output, torch.Tensor):
        return [output]
    if depth == 0:
        return []
    if isinstance(output, Mapping):
        items: list[Any] = list(output.values())
    elif isinstance(output, (tuple, list)):
        items = list(output)
    elif hasattr(output, "__dataclass_fields__"):
        items = [getattr(output, name, None) for name in output.__dataclass_fields__]
    else:
        return []
    return [tensor for item in items for tensor in _tensors_in(item, depth - 1)]


# -- computing again ---------------------------------------------------------------------------------------------------
def recompute(
    module: nn.Module,
    packed: bytes,
    hasher: Hasher,
    around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> Gradients:
    """The gradients that *module* gives for a microbatch that was taken here or on a rank with equal parameters.

    Args:
        around: what to be inside of while the module is called.

    Raises:
        CannotReplayError: this rank's module is another one.
        Exception: whatever the module raises.
    """
    parameters = dict(module.named_parameters())
    device = next(iter(parameters.values())).device
    held = _random_state(device)
    attributes = _attributes(module)
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        # Unpickled from memory of another rank of this job, which runs the same script as the same user.
        forward, outputs = (pickle.loads(part) for part in pickle.loads(packed))
        stack.callback(_set_random_state, held, device)
        stack.callback(_set_attributes, module, attributes)
        _set_attributes(module, forward["attributes"])
        stack.enter_context(torch.enable_grad())
        aliases = {name: p.detach().requires_grad_(p.requires_grad) for name, p in parameters.items()}
        collected = _Collected(hasher, len(aliases))
        for place, alias in enumerate(aliases.values()):
            if alias.requires_grad:
                alias.register_post_accumulate_grad_hook(partial(_take, collected, place))  # type: ignore[no-untyped-call]
        _set_random_state(forward["random"], device)
        state = {**aliases, **forward["buffers"]}
        with around(), _attributes_kept(module), contextlib.ExitStack() as casting:
            for kind, (is_enabled, dtype, is_cached) in forward["autocast"].items():
                casting.enter_context(torch.autocast(kind, dtype, is_enabled, is_cached))
            output = torch.func.functional_call(module, state, forward["args"], forward["kwargs"])
        tensors = _tensors_in(output)
        if any(number >= len(tensors) for number in outputs):
            raise CannotReplayError("the model returns fewer tensors than before")
        del output
        wanted = [tensors[number] for number in outputs]
        del tensors
        for tensor, gradient in zip(wanted, outputs.values(), strict=True):
            # What came back to a tensor that the model also uses inside is all of it: nothing is to be added.
            tensor.register_hook(partial(_instead, gradient))
        torch.autograd.backward(wanted, list(outputs.values()))
    return collected.told()


@contextlib.contextmanager
def _attributes_kept(module: nn.Module) -> Iterator[None]:
    """A forward may count its calls, or collect losses: afterwards each module has the attributes that it had before.

    Containers directly in an attribute get their items back; what lies deeper is not looked at.
    """
    held = [(part.__dict__, dict(part.__dict__)) for part in module.modules()]
    inside = [
        (thing, thing.copy())
        for _, attributes in held
        for name, thing in attributes.items()
        if type(thing) in (list, dict, set, deque) and name not in _OWN_OF_MODULES
    ]
    try:
        yield
    finally:
        for live, before in held:
            if live.keys() != before.keys() or any(live[name] is not thing for name, thing in before.items()):
                live.clear()
                live.update(before)
        for thing, copy in inside:
            if not _holds_the_same(thing, copy):
                thing.clear()
                (thing.update if isinstance(thing, (dict, set)) else thing.extend)(copy)


def _holds_the_same(one: Any, other: Any) -> bool:
    """The very same things: tensors are not to be compared."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(key in other and other[key] is value for key, value in one.items())
    return all(a is b for a, b in zip(one, other, strict=True))


def _instead(gradient: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return gradient


def _take(collected: _Collected, place: int, alias: torch.Tensor) -> None:
    gradient, alias.grad = alias.grad, None
    assert gradient is not None
    collected.take(place, gradient)


def collectives_begun() -> int:
    """How many collectives this process has begun so far, as far as its process groups count them."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    total = 0
    for group in list(getattr(getattr(module, "_world", None), "pg_map", ())):
        with contextlib.suppress(Exception):  # a backend that does not count
            total += int(group._get_sequence_number_for_group())
    return total


# -- states ------------------------------------------------------------------------------------------------------------
def _random_state(device: torch.device) -> dict[str, Any]:
    """Of the generators that a forward may draw from."""
    out: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        out["numpy"] = numpy.random.get_state()
    if device.type == "cuda":
        out["cuda"] = torch.cuda.get_rng_state(device)
    return out


def _set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["cpu"])
    numpy: Any = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        numpy.random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _attributes(module: nn.Module) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """Of each part of *module*: numbers and texts (whether it trains, counts of calls), states of own generators."""
    out = []
    for part in module.modules():
        plain = {k: v for k, v in part.__dict__.items() if type(v) in _PLAIN}
        numbers = {k: v.get_state() for k, v in part.__dict__.items() if isinstance(v, torch.Generator)}
        out.append((plain, numbers))
    return out


def _set_attributes(module: nn.Module, told: list[tuple[dict[str, Any], dict[str, torch.Tensor]]]) -> None:
    parts = list(module.modules())
    if len(parts) != len(told):
        raise CannotReplayError("the model consists of other modules than on the rank that it was taken from")
    for part, (plain, numbers) in zip(parts, told, strict=True):
        for name, value in plain.items():
            if part.__dict__.get(name) != value and type(part.__dict__.get(name)) in _PLAIN:
                part.__dict__[name] = value
        for name, state in numbers.items():
            if isinstance(part.__dict__.get(name), torch.Generator):
                part.__dict__[name].set_state(state)


def _autocast_state(device: torch.device) -> dict[str, tuple[bool, torch.dtype, bool]]:
    kinds = {"cpu", device.type} & {"cpu", "cuda"}
    return {
        kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
        for kind in sorted(kinds)
    }


# -- by value ----------------------------------------------------------------------------------------------------------
class _Pickler(pickle.Pickler):
    """Tensors by their own bytes, not by those of the storage that they are a view into."""

    def __init__(self, file: io.BytesIO, most_bytes: int) -> None:
        super().__init__(file, protocol=5)
        self._left_bytes = most_bytes

    def reducer_override(self, thing: Any) -> Any:
        if not isinstance(thing, torch.Tensor):
            return NotImplemented
        if type(thing) not in (torch.Tensor, nn.Parameter, nn.Buffer) or thing.layout is not torch.strided:
            raise CannotReplayError(f"a {type(thing).__name__} of layout {thing.layout} is among the model's input")
        if thing.is_quantized or thing.device.type not in ("cpu", "cuda") or thing.is_conj() or thing.is_neg():
            raise CannotReplayError(f"a tensor of {thing.dtype} on {thing.device} is among the model's input")
        size_bytes = thing.numel() * thing.element_size()
        self._left_bytes -= size_bytes
        if self._left_bytes < 0:
            raise CannotReplayError("the model's input is too large to be kept")
        plain = thing.detach()
        copy = torch.empty_like(plain, device="cpu")  # of the same strides where the tensor fills its memory
        copy.copy_(plain)
        data = ctypes.string_at(copy.data_ptr(), size_bytes) if size_bytes else b""
        return _tensor, (data, thing.dtype, tuple(thing.shape), copy.stride(), thing.device.type, thing.requires_grad)


def _tensor(
    data: bytes, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], kind: str, has_grad: bool
) -> torch.Tensor:
    made = torch.empty_strided(shape, stride, dtype=dtype)
    if data:
        ctypes.memmove(made.data_ptr(), data, len(data))
    if kind != "cpu":
        made = made.to(torch.device(kind, torch.cuda.current_device()))
    return made.requires_grad_(has_grad)


def _pack(thing: Any, most_bytes: int) -> bytes:
    """Raises CannotReplayError."""
    file = io.BytesIO()
    try:
        _Pickler(file, most_bytes).dump(thing)
    except CannotReplayError:
        raise
    except Exception as e:
        raise CannotReplayError(f"the model's input cannot be kept: {type(e).__name__}: {e}") from e
    return file.getvalue()
