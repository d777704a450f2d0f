"""The file of limits: what the launcher reads, and in it the statistics that the next calibration goes on from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steadyrun.core.errors import ConfigError
from steadyrun.core.files import write_atomically
from steadyrun.core.sections import CHECKPOINTING, SETUP, STEP
from steadyrun.ctl.calibration.replay import limit_s
from steadyrun.ctl.calibration.weighing import Section
from steadyrun.detect.calibrate import OUT_OF_SECTION, Costs, History
from steadyrun.detect.calibrate.following import ONCE_A_START
from steadyrun.detect.calibrate.statistics import STATISTICS_SCHEMA
from steadyrun.launcher.limits import TIMEOUTS_SCHEMA
from steadyrun.node.machine.events import Limits

__all__ = ["OPTION_OF", "Earlier", "earlier_in", "flags_of", "is_written", "timeouts_json", "write_timeouts"]

# Section -> its own option. The launcher's file has the same names as keys, and a flag wins over such a key.
OPTION_OF: Final[Mapping[str, str]] = {
    SETUP: "--ft-setup-timeout",
    STEP: "--ft-step-timeout",
    CHECKPOINTING: "--ft-checkpointing-timeout",
    "evaluation": "--ft-evaluation-timeout",
    OUT_OF_SECTION: "--ft-out-of-section-timeout",
}
_RESTARTS: Final = "_restarts"
_STATISTICS: Final = "_statistics"  # the launcher passes over keys that begin with an underscore


def is_written(section: Section) -> bool:
    """Whether its limit goes into the file.

    A limit from the file acts alone. What is passed once a start gets one only when that was seen often enough, or took
    so long that the launcher's own limit, which needs evidence beside, is in danger of being passed.
    """
    own_s = limit_s(Limits(), section.name)
    return not (section.has_too_few and section.name in ONCE_A_START and section.limit.hard_s <= own_s)


@dataclass(frozen=True, slots=True)
class Earlier:
    """What earlier calibrations left. ``restart_s``: the mean of ``restarts`` that were measured."""

    history: History
    restarts: int = 0
    restart_s: float = 0.0


def timeouts_json(sections: Sequence[Section], earlier: Earlier, costs: Costs, at_unix_s: float) -> dict[str, Any]:
    """Limits by the launcher's keys; the rest is for people and, *earlier* above all, for the next calibration."""
    key = sections[0].statistics.key
    sections = [s for s in sections if is_written(s)]
    out: dict[str, Any] = {"schema": TIMEOUTS_SCHEMA}
    out.update({s.name: _rounded(s.limit.hard_s) for s in sections if s.name in OPTION_OF})
    out["sections"] = {s.name: _rounded(s.limit.hard_s) for s in sections if s.name not in OPTION_OF}
    out["first"] = {s.name: _rounded(s.limit.first_s) for s in sections if s.statistics.first.n}
    out["soft"] = {s.name: _rounded(s.limit.soft_s) for s in sections if s.limit.soft_s < s.limit.hard_s}
    out["_made"] = {
        "by": "steadyctl calibrate-timeouts",
        "at_unix_s": round(at_unix_s, 3),
        "world_size": key.world_size,
        "configuration": key.configuration,
        "restart_cost_s": _rounded(costs.restart_s),
        "hangs_per_day": costs.hangs_per_day,
        "passes": {s.name: s.statistics.durations.events + s.statistics.first.events for s in sections},
    }
    out[_RESTARTS] = {"n": earlier.restarts, "mean_s": round(earlier.restart_s, 3)}
    out[_STATISTICS] = earlier.history.to_json()
    return out


def flags_of(sections: Sequence[Section]) -> list[str]:
    """The same limits as options of steadyrun."""
    sections = [s for s in sections if is_written(s)]
    out = [f"{OPTION_OF[s.name]} {_rounded(s.limit.hard_s):g}" for s in sections if s.name in OPTION_OF]
    others = [s for s in sections if s.name not in OPTION_OF]
    if others:
        out.append(f"--ft-section-timeouts {_pairs({s.name: s.limit.hard_s for s in others})}")
    first = {s.name: s.limit.first_s for s in sections if s.statistics.first.n}
    if first:
        out.append(f"--ft-first-pass-timeouts {_pairs(first)}")
    return out


def _pairs(limits: Mapping[str, float]) -> str:
    text = ",".join(f"{name}:{_rounded(seconds):g}" for name, seconds in limits.items())
    is_plain = all(c.isalnum() or c in "_.,:-/" for c in text)
    return text if is_plain else "'" + text.replace("'", "'\\''") + "'"


def _rounded(seconds: float) -> float:
    """Three figures are more than is known; never below the value."""
    if seconds >= 1000:
        return float(-(-seconds // 1))
    digits = 1 if seconds >= 10 else 2
    return float(round(seconds + 0.5 * 10**-digits, digits))


def earlier_in(path: Path, is_strict: bool) -> Earlier | None:
    """The statistics in a file of limits or of statistics; None: there is none, or no such file.

    Raises:
        ConfigError: the file is something else. Without *is_strict* a missing one is fine.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if is_strict:
            raise ConfigError(f"cannot read {path}: there is no such file") from None
        return None
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from e
    except ValueError as e:
        raise ConfigError(f"{path} is not JSON: {e}; name another file with -o") from e
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema not in (TIMEOUTS_SCHEMA, STATISTICS_SCHEMA):
        raise ConfigError(f"{path} has schema {schema!r}, neither {TIMEOUTS_SCHEMA} nor {STATISTICS_SCHEMA}")
    told = data.get(_STATISTICS) if schema == TIMEOUTS_SCHEMA else data
    if told is None:
        return None
    restarts = data.get(_RESTARTS)
    restarts = restarts if isinstance(restarts, dict) else {}
    try:
        return Earlier(History.from_json(told), int(restarts.get("n", 0)), float(restarts.get("mean_s", 0.0)))
    except (TypeError, ValueError) as e:
        raise ConfigError(f"{path} holds statistics that cannot be read: {e}") from e


def write_timeouts(path: Path, data: Mapping[str, Any]) -> None:
    """Atomically, as a launcher may read it at any time.

    Raises:
        ConfigError: it cannot be written.
    """
    # One key a line: the limits can be read and edited, the statistics stay out of the way.
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items()]
    try:
        write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}; name a file in a folder that exists with -o") from e
