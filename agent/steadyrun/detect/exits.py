"""How a process ended, in words."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Final

from steadyrun.core.records import ExitRecord, OomRecord

__all__ = ["CRASH_SIGNALS", "describe_exit", "signal_name"]

# Raised by what the process itself did; everything else came from outside.
CRASH_SIGNALS: Final[Mapping[int, str]] = {
    signal.SIGSEGV: "a segmentation fault",
    signal.SIGABRT: "an abort",
    signal.SIGBUS: "a bus error (often a full /dev/shm or a truncated mapped file)",
    signal.SIGFPE: "an arithmetic error",
    signal.SIGILL: "an illegal instruction",
    signal.SIGSYS: "a forbidden system call",
    signal.SIGTRAP: "a trap",
}

# What shells and Python make of common causes; 128+n is a shell's word for signal n.
_EXIT_CODES: Final[Mapping[int, str]] = {
    126: "the command cannot be executed",
    127: "the command was not found",
}


def signal_name(signum: int) -> str:
    """``SIGKILL``, ``SIGRTMIN+3`` or ``signal 99``."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        if signal.SIGRTMIN < signum < signal.SIGRTMAX:
            return f"SIGRTMIN+{signum - signal.SIGRTMIN}"
        return f"signal {signum}"


def describe_exit(exit_: ExitRecord, oom: OomRecord | None = None) -> str:
    """What goes after "rank 1": ``was killed by SIGKILL, not by steadyrun; out-of-memory counter unchanged``."""
    if exit_.signal is None:
        return _describe_code(exit_.code if exit_.code is not None else 0)
    name = signal_name(exit_.signal)
    if exit_.by_us:
        return f"was ended by steadyrun with {name}"
    if exit_.signal in CRASH_SIGNALS:
        return f"died of {CRASH_SIGNALS[exit_.signal]} ({name})"
    if exit_.signal == signal.SIGKILL:
        return _describe_kill(oom)
    return f"was ended by {name}, not by steadyrun"


def _describe_code(code: int) -> str:
    if code == 0:
        return "ended with exit code 0"
    if code in _EXIT_CODES:
        return f"ended with exit code {code} ({_EXIT_CODES[code]})"
    if 128 < code < 128 + 65:
        return f"ended with exit code {code} (a shell's word for {signal_name(code - 128)})"
    return f"ended with exit code {code}"


def _describe_kill(oom: OomRecord | None) -> str:
    if oom is None or oom.killed is None:
        why = oom.detail if oom is not None else "no out-of-memory counter was read"
        return f"was killed by SIGKILL, not by steadyrun; whether for lack of memory is unknown ({why})"
    if oom.killed:
        return f"was killed by the kernel's out-of-memory killer ({oom.source}: {oom.detail})"
    return "was killed by SIGKILL, not by steadyrun; out-of-memory counter unchanged"
