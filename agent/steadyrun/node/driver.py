"""The one process of an agent that asks the GPUs' driver, for all who want to know."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

from steadyrun.collectors.nvml.collector import NvmlCollector, has_driver, has_library
from steadyrun.collectors.nvml.prober import NvmlProber
from steadyrun.node.sweep import MARKER_NAME

__all__ = ["DriverReader"]


class DriverReader:
    """For any thread; ``get`` may wait for a file system, and is for worker threads.

    Args:
        root: of the machine's files.
        make: what reads the GPUs, None where there are none; by default a process of its own, where there is a driver.
    """

    def __init__(self, root: Path = Path("/"), make: Callable[[], NvmlCollector | None] | None = None) -> None:
        self._root = root
        self._make = make if make is not None else self._ask_driver
        self._lock = threading.Lock()
        self._is_made = self._is_closed = False
        self._nvml: NvmlCollector | None = None

    def get(self) -> NvmlCollector | None:
        """What reads the GPUs, the same each time; None where there is no driver, or after ``close``."""
        with self._lock:
            if not self._is_made:
                self._is_made, self._nvml = True, None if self._is_closed else self._make()
            return self._nvml

    def pid(self) -> int | None:
        """The process that asks the driver, where there is one now."""
        nvml = self._nvml
        return nvml.pid() if nvml is not None else None

    def close(self) -> None:
        """End that process; nothing is asked any more."""
        self._is_closed = True  # without the lock: whoever holds it may wait for a file system
        nvml = self._nvml
        if nvml is not None:
            nvml.close()

    def _ask_driver(self) -> NvmlCollector | None:
        if not has_driver(self._root) and not has_library(os.environ):
            return None
        env = {k: v for k, v in os.environ.items() if k != MARKER_NAME}
        return NvmlCollector(NvmlProber(env=env), self._root)
