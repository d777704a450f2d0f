"""Which modules a script calls, and what is seen of the calls, with modules that have of torch's only what is used.

Real ones are in tests/integration/watch/test_timing_scripts.py.
"""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from steadyrun.watch.calls import (
    SLOT,
    WatchedCall,
    find_roots,
    grad_tensors,
    is_compiled,
    is_script,
    parameters_of,
    tree_of,
    unwatch,
    watch_calls,
)


class Parameter:
    def __init__(self) -> None:
        self.grad: object = None


class Module:
    """As torch.nn.Module calls, holds and pickles."""

    _compiled_call_impl: Any = None

    def __init__(self, *children: Module | None, parameters: int = 0) -> None:
        self._modules = {str(i): child for i, child in enumerate(children)}
        self._parameters: dict[str, Parameter | None] = {f"p{i}": Parameter() for i in range(parameters)}
        self.training = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._compiled_call_impl or self._call_impl)(*args, **kwargs)

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, value: Any = 0) -> Any:
        for child in self._modules.values():
            value = child(value) if child is not None else value
        return value

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != SLOT}


class DistributedDataParallel(Module):
    pass


class ScriptModule(Module):
    pass


class Caller:
    """Tells what it is told; *wants_ends*: what it answers to the beginning of a call."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.wants_ends = True

    def call_begins(self, call: WatchedCall) -> bool:
        self.told.append(("begins", call.module()))
        return self.wants_ends

    def call_ends(self, call: WatchedCall, output: Any) -> None:
        self.told.append(("ends", output))

    def call_failed(self) -> None:
        self.told.append("failed")


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    fake = SimpleNamespace(nn=SimpleNamespace(Module=Module), compiler=SimpleNamespace(is_compiling=lambda: False))
    monkeypatch.setitem(sys.modules, "torch", fake)
    yield fake
    gc.collect()  # so that no test finds the modules of another


def optimizer_of(*modules: Module) -> SimpleNamespace:
    return SimpleNamespace(param_groups=[{"params": [p for m in modules for p in parameters_of(m)]}])


# -- the modules -------------------------------------------------------------------------------------------------------
def test_the_outermost_modules_of_what_is_trained_are_found(torch: SimpleNamespace) -> None:
    model = Module(Module(parameters=1), Module(Module(parameters=2)))
    teacher = Module(Module(parameters=1))
    assert find_roots([optimizer_of(model)]) == [model]
    assert {id(m) for m in find_roots([optimizer_of(model), optimizer_of(teacher)])} == {id(model), id(teacher)}


def test_part_of_a_model_that_is_trained_stands_for_the_model(torch: SimpleNamespace) -> None:
    head = Module(parameters=1)
    model = Module(Module(parameters=1), head)
    assert find_roots([optimizer_of(head)]) == [model]


def test_where_no_optimizer_knows_the_parameters_gradients_tell(torch: SimpleNamespace) -> None:
    """FSDP's flat parameters, say, or an optimizer that holds copies."""
    model, other = Module(Module(parameters=1)), Module(parameters=1)
    next(parameters_of(model)).grad = object()
    assert find_roots([optimizer_of()]) == [model]
    assert other not in find_roots([])


def test_a_torch_without_the_place_is_left_alone(torch: SimpleNamespace) -> None:
    torch.nn.Module = type("Module", (), {})
    assert find_roots([optimizer_of(Module(parameters=1))]) == []


def test_modules_that_are_half_made_do_not_matter(torch: SimpleNamespace) -> None:
    half = Module.__new__(Module)
    model = Module(parameters=1)
    assert find_roots([optimizer_of(model)]) == [model]
    assert half.__dict__ == {}


def test_a_tree_ends_at_its_depth_and_shows_each_once(torch: SimpleNamespace) -> None:
    shared = Module()
    deep = Module(Module(Module()))
    model = Module(shared, None, Module(shared), deep)
    found = list(tree_of(model, 1))
    assert [id(m) for m in found] == [id(m) for m in (model, shared, model._modules["2"], deep)]
    assert len(list(tree_of(model, 9))) == 6


def test_nothing_inside_of_a_compiled_module_is_touched(torch: SimpleNamespace) -> None:
    inner = Module(Module())
    in_place, wrapped = Module(inner), Module()
    in_place._compiled_call_impl = lambda *args: 1
    wrapped._modules["_orig_mod"] = inner
    for compiled in (in_place, wrapped):
        assert is_compiled(compiled)
        assert list(tree_of(Module(compiled), 5))[1:] == [compiled]
    assert not is_compiled(inner)
    (call,) = watch_calls([inner._modules["0"]], Caller())
    assert not is_compiled(call.module()), "our own place is no compilation"


def test_parameters_of_shared_and_missing_parts_are_found(torch: SimpleNamespace) -> None:
    part = Module(parameters=2)
    model = Module(part, None, Module(part), parameters=1)
    model._parameters["none"] = None
    found = list(parameters_of(model))
    assert {id(p) for p in found} == {id(p) for m in (model, part) for p in m._parameters.values() if p is not None}


# -- calls -------------------------------------------------------------------------------------------------------------
def test_calls_are_told_from_the_outside_in(torch: SimpleNamespace) -> None:
    inner = Module()
    model = Module(inner)
    caller = Caller()
    watch_calls([model], caller)
    assert model(7) == 7
    assert caller.told == [("begins", model), ("begins", inner), ("ends", 7), ("ends", 7)]


def test_who_does_not_care_for_the_end_is_not_told(torch: SimpleNamespace) -> None:
    caller = Caller()
    caller.wants_ends = False
    model = Module()
    watch_calls([model], caller)
    assert model(7) == 7
    assert caller.told == [("begins", model)]


def test_a_failed_call_is_told_and_fails_as_ever(torch: SimpleNamespace) -> None:
    class Failing(Module):
        def forward(self, value: Any = 0) -> Any:
            raise KeyError(value)

    caller = Caller()
    model = Failing()
    watch_calls([model], caller)
    with pytest.raises(KeyError):
        model(7)
    assert caller.told == [("begins", model), "failed"]


def test_what_was_in_the_place_is_called_and_comes_back(torch: SimpleNamespace) -> None:
    model = Module()
    compiled = model._compiled_call_impl = lambda *args: "compiled"
    caller = Caller()
    calls = watch_calls([model], caller)
    assert model(1) == "compiled"
    assert calls[0].is_in_place()
    unwatch(calls)
    assert model.__dict__[SLOT] is compiled
    assert not calls[0].is_in_place()
    assert model(1) == "compiled"
    assert len(caller.told) == 2


def test_a_place_that_was_empty_is_empty_again(torch: SimpleNamespace) -> None:
    model = Module(Module())
    unwatch(watch_calls([model], Caller()))
    assert all(SLOT not in m.__dict__ for m in tree_of(model, 1))


def test_a_place_that_somebody_else_took_is_theirs(torch: SimpleNamespace) -> None:
    model = Module()
    calls = watch_calls([model], Caller())
    model._compiled_call_impl = later = object()
    unwatch(calls)
    assert model.__dict__[SLOT] is later


def test_watching_again_does_not_pile_up(torch: SimpleNamespace) -> None:
    model, first, second = Module(), Caller(), Caller()
    watch_calls([model], first)
    (call,) = watch_calls([model], second)
    model(1)
    assert call.before is None
    assert (first.told, len(second.told)) == ([], 2)


def test_while_torch_compiles_nothing_is_told(torch: SimpleNamespace) -> None:
    torch.compiler.is_compiling = lambda: True
    caller, model = Caller(), Module()
    watch_calls([model], caller)
    assert model(3) == 3
    assert caller.told == []


def test_only_two_levels_and_so_many_modules_are_watched(torch: SimpleNamespace) -> None:
    deep = Module(Module(Module(Module())))
    assert len(watch_calls([deep], Caller())) == 3
    wide = Module(*(Module() for _ in range(400)))
    assert len(watch_calls([wide, deep], Caller())) == 256


def test_a_wrapper_that_may_wait_first_is_known_and_scripts_are_left_out(torch: SimpleNamespace) -> None:
    script = ScriptModule()
    model = DistributedDataParallel(Module(script))
    calls = watch_calls([model], Caller())
    assert [c.has_prologue for c in calls] == [True, False]
    assert is_script(script)
    assert SLOT not in script.__dict__


def test_a_model_is_copied_pickled_and_freed_as_ever(torch: SimpleNamespace) -> None:
    model = Module(Module())
    (call, _) = watch_calls([model], Caller())
    assert copy.deepcopy(call) is None
    assert pickle.loads(pickle.dumps(call)) is None
    assert SLOT not in copy.deepcopy(model).__dict__
    gone = weakref.ref(model)
    del model
    assert gone() is None
    call.remove()
    assert not call.is_in_place()


# -- outputs -----------------------------------------------------------------------------------------------------------
class Tensor:
    shape = (2, 2)

    def __init__(self, grad_fn: object = None) -> None:
        self.grad_fn = grad_fn


@dataclass
class Output:
    loss: Any = None
    logits: Any = None


def test_the_tensors_of_what_a_model_returned_are_found() -> None:
    a, b = Tensor("a"), Tensor("b")
    assert grad_tensors(a) == [a]
    assert grad_tensors((a, [b])) == [a, b]
    assert grad_tensors({"x": {"y": a}, "z": b}) == [a, b]
    assert grad_tensors(Output(a, b)) == [a, b]


def test_what_has_no_gradient_is_left_out() -> None:
    assert grad_tensors(Tensor()) == []
    assert grad_tensors(("text", 5, None, Tensor(), {"a": Tensor()})) == []


def test_only_the_first_few_tensors_are_asked_for() -> None:
    many = [Tensor(i + 1) for i in range(8)]
    assert grad_tensors(many) == many[:3]
    assert grad_tensors([Tensor(None)] * 8 + [Tensor("late")]) == []
    nested: Any = Tensor("deep")
    for _ in range(4):
        nested = [nested]
    assert grad_tensors(nested) == []
