"""NVIDIA GPUs as a collector."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from steadyrun.collectors.nvml.asking import FAST, RARE, SLOW
from steadyrun.collectors.nvml.judging import gpu_troubles
from steadyrun.collectors.nvml.prober import (
    DRIVER_NOT_LOADED,
    LIBRARY_NOT_FOUND,
    VERSION_MISMATCH,
    NvmlProber,
    ProbeError,
)
from steadyrun.collectors.nvml.reading import GpuReading, merged
from steadyrun.collectors.protocol import CheckResult, Fact, Health, Trouble, combine, unknown

__all__ = ["NvmlCollector", "has_driver", "has_library"]

EVERY_S: Final = 1.0  # the power that NVML gives is a mean over a second: faster tells nothing more
SLOW_EVERY_S: Final = 10.0
RARE_EVERY_S: Final = 60.0
ANSWER_LIMIT_S: Final = 5.0
_LEAST_START_S: Final = 1.0
_EVERYTHING: Final = frozenset({FAST, SLOW, RARE})
_LIBRARY: Final = "libnvidia-ml.so.1"


def has_driver(root: Path = Path("/")) -> bool:
    """The kernel module is loaded, or a container was given its devices."""
    return (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidiactl").exists()


def has_library(environ: Mapping[str, str]) -> bool:
    """A container may be given the driver's library in a folder of its own."""
    folders = environ.get("LD_LIBRARY_PATH", "").split(":")
    with contextlib.suppress(OSError):
        return any((Path(folder) / _LIBRARY).exists() for folder in folders if folder)
    return False


class NvmlCollector:
    """Reads all GPUs, the cheap facts each second, the dear ones seldom.

    ``check`` belongs into the registry's thread: it waits for the child, up to its limit; ``look_now`` is for another
    one beside it. ``readings`` and ``take_events`` are for any thread and never block for longer than a copy.
    """

    name = "nvml"
    every_s = EVERY_S

    def __init__(
        self,
        prober: NvmlProber | None = None,
        root: Path = Path("/"),
        answer_limit_s: float = ANSWER_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prober = prober if prober is not None else NvmlProber()
        self._root = root
        self._answer_limit_s = answer_limit_s
        self.limit_s = answer_limit_s + 40.0  # and the start of a child
        self._clock = clock
        self._due_s: dict[str, float] = {}
        self._asking = threading.Lock()  # held while the child is asked
        self._is_whole_wanted = False
        self._whole: tuple[float, CheckResult] | None = None  # the newest look at everything, and when it began
        self._lock = threading.Lock()  # held for moments
        self._readings: dict[int, GpuReading] = {}
        self._first: dict[int, GpuReading] = {}
        self._read_at_s: float | None = None
        self._events: list[Mapping[str, int]] = []

    def readings(self) -> tuple[tuple[GpuReading, ...], float | None]:
        """The newest of each GPU by index, and when they were read (CLOCK_MONOTONIC); they stay during a hang."""
        with self._lock:
            return tuple(self._readings[i] for i in sorted(self._readings)), self._read_at_s

    def pid(self) -> int | None:
        """The process that asks the driver, where there is one now."""
        return self._prober.pid()

    def take_events(self) -> list[Mapping[str, int]]:
        """NVML's events since the last call: ``type``, ``data`` (the Xid), ``index``."""
        with self._lock:
            events, self._events = self._events, []
            return events

    def check(self) -> CheckResult:
        """Look now."""
        with self._asking:
            return self._check(None)

    def look_wholly(self) -> None:
        """Let the next look be at everything, not only at what is due; any thread, never blocks."""
        self._is_whole_wanted = True

    def look_now(self, limit_s: float, fresh_s: float = 0.0) -> CheckResult:
        """Look at everything, not only at what is due; a look by ``check`` that began since serves as well.

        Args:
            limit_s: until a look that is under way must have ended, and a child have started.
            fresh_s: what seldom changes was looked at so long ago at most; then only the rest is.
        """
        asked_at_s, until_s = self._clock(), time.monotonic() + limit_s
        if not self._asking.acquire(timeout=limit_s):
            call = self._prober.call()
            return combine(self.name, [_hanging("the driver does not answer" + (f" ({call})" if call else ""))], "")
        try:
            if self._whole is not None and self._whole[0] > asked_at_s:
                return self._whole[1]
            if self._whole is None or asked_at_s - self._whole[0] > fresh_s:
                self.look_wholly()
            return self._check(max(until_s - time.monotonic(), _LEAST_START_S))
        finally:
            self._asking.release()

    def _check(self, start_limit_s: float | None) -> CheckResult:
        now_s = self._clock()
        groups = self._groups_due(now_s)
        try:
            answers = self._prober.ask(groups, self._answer_limit_s, start_limit_s)
        except ProbeError as e:
            self._due_s.clear()  # everything, as soon as it answers again
            return self._without_answer(e)
        events = self._prober.poll_events()
        with self._lock:
            for answer in answers:
                index = answer.get("index")
                reading = merged(self._readings.get(index) if isinstance(index, int) else None, answer)
                if reading is not None:
                    self._readings[reading.index] = reading
            self._read_at_s = now_s
            self._events += events
            readings = [self._readings[i] for i in sorted(self._readings)]
        if SLOW in groups:
            for gpu in readings:
                if gpu.error is None:
                    self._first.setdefault(gpu.index, gpu)
        troubles = gpu_troubles(readings, self._first)
        answering = sum(g.error is None for g in readings)
        well = f"{answering} GPUs, driver {self._prober.begun.get('driver', '?')}"
        result = combine(self.name, troubles, well, _facts(readings, answering))
        if groups == _EVERYTHING:
            self._whole = now_s, result
        return result

    def _groups_due(self, now_s: float) -> frozenset[str]:
        if self._is_whole_wanted:
            self._is_whole_wanted = False
            self._due_s.clear()
        due = {FAST}
        for group, every_s in ((SLOW, SLOW_EVERY_S), (RARE, RARE_EVERY_S)):
            if now_s >= self._due_s.get(group, now_s):
                self._due_s[group] = now_s + every_s
                due.add(group)
        return frozenset(due)

    def _without_answer(self, error: ProbeError) -> CheckResult:
        facts: dict[str, Fact] = {"hung": error.hung, "abandoned_processes": self._prober.abandoned}
        trouble: Trouble | None = None
        if error.hung:
            trouble = _hanging(str(error))
        elif error.code == VERSION_MISMATCH:
            text = "the driver was updated while it was in use: its library and its module differ"
            trouble = Trouble(Health.UNHEALTHY, text, ("restart the container, or reboot the node",))
        elif not has_driver(self._root) and not self._readings:
            return combine(self.name, [], "no NVIDIA driver: this machine trains on its CPUs", facts)
        elif error.code in (DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND):
            more = "nvidia-smi shows more; give the container the driver's library (NVIDIA_DRIVER_CAPABILITIES)"
            trouble = Trouble(Health.DEGRADED, f"there are GPUs, but {error}", (more,))
        if trouble is None:
            return unknown(self.name, str(error), "nvidia-smi shows more")
        return combine(self.name, [trouble], "", facts)

    def close(self) -> None:
        """End the child."""
        self._prober.close()


def _hanging(text: str) -> Trouble:
    advice = ("look at the kernel log for Xid 119, 120 and 79", "reset the GPU, or reboot the node")
    return Trouble(Health.UNHEALTHY, text, advice)


def _facts(readings: list[GpuReading], answering: int) -> dict[str, Fact]:
    persistence = [g.persistence for g in readings if g.persistence is not None]
    return {
        "gpus": len(readings),
        "gpus_answering": answering,
        "hung": False,
        # without it each process that comes or goes starts the GPU anew, which takes seconds
        "gpus_without_persistence": persistence.count(0),
        "gpus_in_mig_mode": sum(g.mig == 1 for g in readings),
    }
