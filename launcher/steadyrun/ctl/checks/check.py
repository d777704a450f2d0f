"""What a check is, and the machine it looks at."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

__all__ = ["Answer", "Check", "Host", "Level", "fail", "ok", "run_all", "warn"]


class Level(str, Enum):
    """``warn``: steadyrun works, with less; ``fail``: a run will not work, or not well."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, how it is, and what to do (empty when ok)."""

    name: str
    level: Level
    text: str
    advice: str = ""


def ok(name: str, text: str) -> Check:
    return Check(name, Level.OK, text)


def warn(name: str, text: str, advice: str) -> Check:
    return Check(name, Level.WARN, text, advice)


def fail(name: str, text: str, advice: str) -> Check:
    return Check(name, Level.FAIL, text, advice)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a child process said: ``value`` is its last line of output as JSON, or None and ``problem`` says why."""

    value: Any
    problem: str = ""
    hung: bool = False


def ask_python(code: str, limit_s: float, env: Mapping[str, str] | None = None, args: Sequence[str] = ()) -> Answer:
    """Run *code* in an interpreter of its own, which may crash or hang without harm; it prints one JSON line last."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, *args],
            capture_output=True,
            timeout=limit_s,
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(None, f"no answer within {limit_s:g} s", hung=True)
    except OSError as e:
        return Answer(None, f"cannot start {sys.executable}: {e.strerror}")
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    try:
        return Answer(json.loads(lines[-1]))
    except (IndexError, ValueError):
        said = done.stderr.decode(errors="replace").strip().splitlines()
        last = said[-1] if said else "no output"
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
        return Answer(None, f"{last} ({how})")


@dataclass(frozen=True, slots=True)
class Host:
    """The machine, with everything a test may want to replace."""

    env: Mapping[str, str] = field(default_factory=dict)
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    dev: Path = Path("/dev")
    shm: Path = Path("/dev/shm")
    ask: Callable[..., Answer] = ask_python

    def read(self, path: Path) -> str | None:
        """First 64 KiB of a small file, or None where it cannot be read."""
        try:
            with path.open(encoding="utf-8", errors="replace") as f:
                return f.read(65536)
        except OSError:
            return None


def run_all(host: Host, checks: Sequence[Callable[[Host], Check]]) -> list[Check]:
    """Every check's line; one that fails itself is a warning, never the end of the others."""
    return [_guarded(host, check) for check in checks]


def _guarded(host: Host, check: Callable[[Host], Check]) -> Check:
    try:
        return check(host)
    except Exception as e:  # a strange machine must not hide the other lines
        name = check.__name__.strip("_").replace("_", " ")
        return warn(name, f"could not be checked: {type(e).__name__}: {e}", "please report this")
