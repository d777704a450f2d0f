"""When an unmodified script calls its model: the modules it calls itself are found once, and their calls are seen.

A module's ``__call__`` goes through the attribute ``_compiled_call_impl`` where that is set, which is where
``Module.compile`` puts its work. A watched module has an object of ours there, around what was there before. Unlike
hooks it is no part of the module's state: torch leaves it out when a module is pickled or copied, TorchScript does not
try to compile it, modules keep their fast way through ``__call__``, and it lies outside of what is compiled.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, Protocol

    class Caller(Protocol):
        """What is told of calls."""

        def call_begins(self, call: WatchedCall) -> bool:
            """Whether to tell of the end of this call, too."""
            ...

        def call_ends(self, call: WatchedCall, output: Any) -> None: ...
        def call_failed(self) -> None: ...


__all__ = ["SLOT", "WatchedCall", "call_at_backward", "find_roots", "grad_tensors", "tree_of", "unwatch", "watch_calls"]

SLOT = "_compiled_call_impl"
_DEPTH = 2  # levels below a root at which the script may call modules itself: the networks of a GAN held in one module
_MOST = 256  # modules watched while it is being learned which ones the script calls
_MOST_TENSORS = 3
_OURS = -1  # the numbers of hooks that torch gives begin with 0


class WatchedCall:
    """In the place of a module's call.

    Attributes:
        before: what was there.
        outer_calls: how often the script itself called the module, with gradients.
        has_prologue: the module is a wrapper (DDP) that may wait for others before it calls the module inside.
    """

    __slots__ = ("_caller", "_is_compiling", "before", "has_prologue", "module", "outer_calls")

    def __init__(self, module: Any, before: Any, caller: Caller, is_compiling: Callable[[], bool]) -> None:
        from _weakref import ref

        self.module = ref(module)  # weak: a model that is deleted must be gone at once
        self.before = before
        self._caller = caller
        self._is_compiling = is_compiling
        self.outer_calls = 0
        self.has_prologue = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.before
        if call is None:
            module: Any = self.module()
            call = module._call_impl
        if self._is_compiling() or not self._caller.call_begins(self):
            return call(*args, **kwargs)
        try:
            output = call(*args, **kwargs)
        except BaseException:
            self._caller.call_failed()
            raise
        self._caller.call_ends(self, output)
        return output

    def remove(self) -> None:
        """Put back what was there, unless somebody else has taken the place since."""
        module = self.module()
        if module is None or module.__dict__.get(SLOT) is not self:
            return
        if self.before is None:
            del module.__dict__[SLOT]
        else:
            module.__dict__[SLOT] = self.before

    def is_in_place(self) -> bool:
        module = self.module()
        return module is not None and module.__dict__.get(SLOT) is self

    def __reduce__(self) -> Any:
        return type(None), ()  # pickled by a module with a __getstate__ of its own: None, the attribute's default

    def __deepcopy__(self, memo: Any) -> None:
        return None


def find_roots(optimizers: Iterable[Any]) -> list[Any]:
    """The outermost living modules that hold parameters of *optimizers*, or a gradient where none does.

    Walks all objects that Python's garbage collector knows, which takes about 0.1 s; those frozen by ``gc.freeze`` are
    not found.
    """
    base = sys.modules["torch"].nn.Module
    if not hasattr(base, SLOT):
        return []
    wanted = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    kinds: dict[type, bool] = {}
    modules: list[Any] = []
    for thing in gc.get_objects():
        kind = type(thing)
        is_module = kinds.get(kind)
        if is_module is None:
            is_module = kinds[kind] = issubclass(kind, base)
        if is_module and isinstance(thing.__dict__.get("_modules"), dict):
            modules.append(thing)
    inner = {id(child) for m in modules for child in m.__dict__["_modules"].values()}
    roots = [m for m in modules if id(m) not in inner]
    held = [m for m in roots if any(id(p) in wanted for p in parameters_of(m))]
    return held or [m for m in roots if any(p.grad is not None for p in parameters_of(m))]


def tree_of(module: Any, depth: int) -> Iterator[Any]:
    """*module* and what is in it down to *depth* levels, outermost first; nothing inside of a compiled module.

    That must stay as it was, or torch would compile it again.
    """
    level, seen = [module], {id(module)}
    for _ in range(depth + 1):
        below = []
        for m in level:
            yield m
            if is_compiled(m):
                continue
            for child in m.__dict__.get("_modules", {}).values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    below.append(child)
        level = below


def parameters_of(module: Any) -> Iterator[Any]:
    """All parameters in the tree of *module*, some perhaps twice."""
    stack, seen = [module], {id(module)}
    while stack:
        m = stack.pop()
        yield from (p for p in m.__dict__.get("_parameters", {}).values() if p is not None)
        for child in m.__dict__.get("_modules", {}).values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append(child)


def watch_calls(roots: Iterable[Any], caller: Caller) -> list[WatchedCall]:
    """Watch the calls of *roots* and of the modules in them that a script might call itself."""
    is_compiling = sys.modules["torch"].compiler.is_compiling
    calls: list[WatchedCall] = []
    seen: set[int] = set()
    for root in roots:
        for module in tree_of(root, _DEPTH):
            if len(calls) >= _MOST or id(module) in seen or is_script(module):
                continue
            seen.add(id(module))
            before = module.__dict__.get(SLOT)
            if isinstance(before, WatchedCall):
                before.remove()
                before = module.__dict__.get(SLOT)
            call = WatchedCall(module, before, caller, is_compiling)
            call.has_prologue = type(module).__name__ == "DistributedDataParallel"
            module.__dict__[SLOT] = call
            calls.append(call)
    return calls


def unwatch(calls: Iterable[WatchedCall]) -> None:
    for call in calls:
        call.remove()


def is_compiled(module: Any) -> bool:
    """By ``torch.compile`` or in place."""
    place = module.__dict__.get(SLOT)
    while isinstance(place, WatchedCall):
        place = place.before
    return place is not None or "_orig_mod" in module.__dict__.get("_modules", {})


def is_script(module: Any) -> bool:
    """Compiled by TorchScript, which has attributes of its own kind."""
    return any(kind.__name__ == "ScriptModule" for kind in type(module).__mro__)


def grad_tensors(output: Any, most: int = _MOST_TENSORS, depth: int = 3) -> list[Any]:
    """The first few tensors in what a module returned that a backward can begin at."""
    if getattr(output, "grad_fn", None) is not None:
        return [output]
    if depth == 0 or hasattr(output, "shape"):
        return []
    if isinstance(output, dict):
        items: Iterable[Any] = list(output.values())[:8]
    elif isinstance(output, (tuple, list)):
        items = output[:8]
    elif hasattr(output, "__dataclass_fields__"):
        items = [getattr(output, name, None) for name in list(output.__dataclass_fields__)[:8]]
    else:
        return []
    tensors: list[Any] = []
    for item in items:
        tensors += grad_tensors(item, most - len(tensors), depth - 1)
        if len(tensors) >= most:
            break
    return tensors


def call_at_backward(tensor: Any, call: Callable[[Any], None]) -> None:
    """Have *call* called once the backward has come to *tensor*, before other hooks of it; it gets the gradient.

    As ``Tensor.register_hook`` does it, but without the object that removes the hook again: with cold caches that is
    half of the cost of a hook in a backward (15 us of 35). Hooks that the script adds later join it.
    """
    node = tensor.grad_fn
    register = getattr(node, "_register_hook_dict", None)
    if register is None or type(tensor) is not sys.modules["torch"].Tensor or tensor._backward_hooks is not None:
        node.register_prehook(call)
        return
    hooks: OrderedDict[int, Any] = OrderedDict()
    hooks[_OURS] = call
    tensor._backward_hooks = hooks
    register(tensor)
