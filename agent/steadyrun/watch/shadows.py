"""Which modules the script's own folder would give it in place of installed ones.

Python puts that folder in front of ``sys.path`` after ``site``: a ``numpy.py`` or ``queue.py`` beside the script wins
over the real one, in the script and in all that it imports. A module that was imported before the script began would
win over both, so it must not be.
"""

from __future__ import annotations

import os
import sys
from _imp import extension_suffixes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["drop_shadowed", "names_in", "script_folder"]


def script_folder(argv0: str, is_safe_path: bool) -> str | None:
    """What Python will put in front of ``sys.path``, or None.

    Args:
        argv0: ``sys.argv[0]`` as it is during ``site``: ``-m`` and ``-c`` stand for themselves.
        is_safe_path: ``sys.flags.safe_path``.
    """
    if is_safe_path:
        return None
    try:
        if argv0 in ("", "-", "-m", "-c"):
            return os.getcwd()
        return argv0 if os.path.isdir(argv0) else os.path.dirname(os.path.realpath(argv0))
    except OSError:  # the working folder is gone
        return None


def names_in(folder: str | None) -> frozenset[str]:
    """Top-level modules and packages in *folder*. A folder without ``__init__`` is none: it wins over nothing."""
    if folder is None:
        return frozenset()
    suffixes = (*extension_suffixes(), ".py", ".pyc")
    found = set()
    try:
        entries = os.listdir(folder)
    except OSError:
        return frozenset()
    for entry in entries:
        stem, dot, _ = entry.partition(".")
        if dot and entry[len(stem) :] in suffixes:
            found.add(stem)
        elif not dot and any(os.path.isfile(os.path.join(folder, entry, f"__init__{s}")) for s in suffixes):
            found.add(entry)
    return frozenset(found)


def own_names() -> frozenset[str]:
    """``names_in`` of the script of this process."""
    argv: Sequence[str] = getattr(sys, "argv", None) or [""]
    return names_in(script_folder(argv[0], bool(getattr(sys.flags, "safe_path", False))))


def drop_shadowed(modules: frozenset[str]) -> None:
    """Forget modules that we imported and that the script must find in its own folder.

    Args:
        modules: names of those that were there before us.
    """
    ours = [name for name in sys.modules if name not in modules and name.partition(".")[0] != "steadyrun"]
    if not ours:
        return
    shadowing = own_names()
    for name in ours:
        if name.partition(".")[0] in shadowing and getattr(sys.modules[name], "__file__", None):
            del sys.modules[name]
