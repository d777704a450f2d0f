"""A line of progress for commands that read or write whole checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from steadyrun.ctl.console import Console, duration, plain, size

__all__ = ["Update", "progress_bar"]

Update = Callable[[int, int], None]  # bytes done, bytes in all
_REDRAW_S: Final = 0.1
_CELLS: Final = 24


@contextmanager
def progress_bar(console: Console, name: str, is_quiet: bool = False) -> Iterator[Update | None]:
    """What to call with the bytes done and in all; None, and no bar, where nobody looks at a terminal."""
    if is_quiet or not console.is_terminal:
        yield None
        return
    bar = _Bar(console, plain(name))
    try:
        yield bar.update
    finally:
        bar.clear()


class _Bar:
    """A line that is drawn over itself, at most 10 times a second."""

    def __init__(self, console: Console, name: str) -> None:
        self.console = console
        self.name = name
        self.started_s = time.monotonic()
        self.next_s = 0.0

    def update(self, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s < self.next_s:
            return
        self.next_s = now_s + _REDRAW_S
        ratio = done_bytes / total_bytes if total_bytes else 1.0
        rate = done_bytes / max(now_s - self.started_s, 1e-3)
        left = f", {duration((total_bytes - done_bytes) / rate)} left" if rate and ratio < 1 else ""
        filled = round(_CELLS * ratio)
        text = f"{self.name} [{'#' * filled}{'.' * (_CELLS - filled)}] {100 * ratio:3.0f} % {size(rate)}/s{left}"
        self.console.out.write(f"\r\x1b[K{self.console.cut(text)}")
        self.console.out.flush()

    def clear(self) -> None:
        self.console.out.write("\r\x1b[K")
        self.console.out.flush()
