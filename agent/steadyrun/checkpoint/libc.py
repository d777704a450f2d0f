"""System calls that Python does not offer, or makes while it holds the interpreter's lock."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from typing import Any

__all__ = ["libc_function"]


@functools.cache
def libc_function(name: str, *types: Any) -> Any:
    """That function of the C library, taking *types*; None where the library has none of that name.

    It gives an int, runs without the interpreter's lock, and leaves its error number to ``ctypes.get_errno``.
    """
    with contextlib.suppress(OSError, AttributeError):
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
        function.argtypes = types
        function.restype = ctypes.c_int
        return function
    return None
