"""Starting a process that must end with this one, from whatever thread it is wanted.

PR_SET_PDEATHSIG follows the thread that forked, not its process: the child of a thread that ends is killed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["StartingThread"]

T = TypeVar("T")


class StartingThread:
    """A thread that starts processes for others, and stays until ``close``."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, start: Callable[[], T]) -> T:
        """What *start* returns or raises, called in that thread."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="nvml-starter", daemon=True)
                self._thread.start()
        done: Future[T] = Future()

        def order() -> None:
            try:
                done.set_result(start())
            except BaseException as e:  # it is the asker's
                done.set_exception(e)

        self._orders.put(order)
        return done.result()

    def close(self) -> None:
        """End the thread, and with it what it has started; ``run`` would start another one."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._orders.put(None)

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            order()
