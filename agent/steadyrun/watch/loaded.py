"""What a standby should import, as seen in a rank whose steps have begun."""

from __future__ import annotations

import sys

from steadyrun.watch.files import write_whole
from steadyrun.watch.jsontext import render

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["LoadedReport"]

_WORTH_PRELOADING = ("torch", "numpy", "xxhash", "isal")
_OURS = "steadyrun.checkpoint."  # of a script that uses the checkpointer: what its resume would import first


class LoadedReport:
    """Modules worth preloading that the rank has imported, and the variables that its script changed before torch.

    Args:
        path: where to write.
        env: the environment the script began with.
        preset: a warm rank's torch was imported before the script began: with these changes.
    """

    def __init__(self, path: str, env: Mapping[str, str], preset: Mapping[str, str | None]) -> None:
        self._path = path
        self._env = dict(env)
        self._changed: dict[str, str | None] = dict(preset)

    def note_env(self, env: Mapping[str, str]) -> None:
        """Torch is about to be imported: what has changed since the start? None stands for removed."""
        now = dict(env)
        self._changed = {k: v for k, v in now.items() if self._env.get(k) != v}
        self._changed.update({k: None for k in self._env if k not in now})

    def write(self) -> None:
        """Write the report (atomically). Takes milliseconds, more on a slow file system."""
        data = {"modules": preloadable(), "env_before_torch": self._changed}
        try:
            write_whole(self._path, render(data).encode())
        except OSError:
            return  # the next standby imports less


def preloadable() -> list[str]:
    """Imported modules of these packages that an import statement would find again, in the order of their import."""
    names = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if (
            (name.partition(".")[0] in _WORTH_PRELOADING or name.startswith(_OURS))
            and getattr(spec, "name", None) == name
            and getattr(spec, "has_location", False)
        ):
            names.append(name)
    return names
