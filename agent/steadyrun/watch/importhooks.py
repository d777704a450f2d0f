"""Calls before and after a module is imported by whoever imports it, without importing anything ourselves."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

__all__ = ["ImportHooks"]


class ImportHooks:
    """A finder in front of ``sys.meta_path`` that finds nothing itself.

    For a module it has a call for it asks the other finders and lets the loader of the answer, the very object they
    returned, make the call after the module's code has run. When no call is left it takes itself out.
    """

    def __init__(self) -> None:
        self._before: dict[str, Callable[[], None]] = {}
        self._after: dict[str, Callable[[Any], None]] = {}

    def before(self, name: str, call: Callable[[], None]) -> None:
        """Call just before the code of module *name* runs; not at all if it is imported already."""
        if name not in sys.modules:
            self._before[name] = call

    def after(self, name: str, call: Callable[[Any], None]) -> None:
        """Call with module *name* once it is imported; at once if it is already."""
        module = sys.modules.get(name)
        if module is None:
            self._after[name] = call
        else:
            call(module)

    def install(self) -> None:
        if self._before or self._after:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._before and name not in self._after:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None else None
            if spec is not None:
                self._watch(name, spec)
                return spec
        return None

    def _watch(self, name: str, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            self._call(self._before, name)
            execute(module)
            loader.__dict__.pop("exec_module", None)
            self._call(self._after, name, module)
            if not self._before and not self._after and self in sys.meta_path:
                sys.meta_path.remove(self)

        try:
            loader.exec_module = exec_module  # on this one loader; its class and all others stay as they are
        except AttributeError:
            return

    def _call(self, calls: dict[str, Callable[..., None]], name: str, *args: object) -> None:
        call = calls.pop(name, None)
        if call is None:
            return
        try:
            call(*args)
        except Exception as e:
            sys.stderr.write(f"steadyrun: cannot watch {name}: {type(e).__name__}: {e}\n")
