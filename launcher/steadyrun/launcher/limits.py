"""The watchdog's limits out of the options, and out of a file of calibrated ones."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from steadyrun.core.errors import ConfigError, nearest_name
from steadyrun.core.options import Resolved, Seconds
from steadyrun.core.sections import OUT_OF_SECTION, STEP
from steadyrun.node.calibration import Timeouts
from steadyrun.node.machine.events import Limits

__all__ = ["TIMEOUTS_SCHEMA", "limits_of", "timeouts_of"]

TIMEOUTS_SCHEMA: Final = "steadyrun.timeouts/1"

# Option -> field of Limits, and the name by which ``accepted`` knows it.
_TIMEOUTS: Final[Mapping[str, tuple[str, str]]] = {
    "start_timeout": ("start_s", "start"),
    "setup_timeout": ("setup_s", "setup"),
    "step_timeout": ("step_s", "step"),
    "checkpointing_timeout": ("checkpointing_s", "checkpointing"),
    "evaluation_timeout": ("evaluation_s", "evaluation"),
    "other_section_timeout": ("default_section_s", "default_section"),
    "out_of_section_timeout": ("out_of_section_s", "out_of_section"),
    "teardown_timeout": ("teardown_s", "teardown"),
}
_FIELDS: Final[Mapping[str, str]] = {name: field for field, name in _TIMEOUTS.values()}
_BETWEEN_STEPS: Final = frozenset({STEP, OUT_OF_SECTION})
_WITHOUT_SECTION: Final = frozenset({"start", "default_section", "teardown"})
_EVALUATION: Final = ("evaluation", "eval", "evaluate", "validation", "validate", "test")


def timeouts_of(resolved: Resolved) -> Timeouts:
    """What ``--ft-timeouts`` asks for."""
    asked = resolved.settings.timeouts.lower()
    return Timeouts(asked) if asked in ("auto", "off") else Timeouts.FILE


def limits_of(resolved: Resolved, shutdown_timeout_s: float) -> Limits:
    """Every limit of this run. Those that the user or a file of calibrated limits gave are ``accepted``.

    Raises:
        ConfigError: the file of ``--ft-timeouts`` cannot be used.
    """
    s = resolved.settings
    values: dict[str, Any] = {field: getattr(s, option) for option, (field, _) in _TIMEOUTS.items()}
    sections: dict[str, float] = {}
    first: dict[str, float] = {}
    soft: dict[str, float] = {}
    calibrated: frozenset[str] = frozenset()
    accepted: set[str] = set()
    given = {name for option, (_, name) in _TIMEOUTS.items() if resolved.is_given(option)} | s.section_timeouts.keys()
    if timeouts_of(resolved) is Timeouts.FILE:
        told = _read_timeouts(Path(s.timeouts))
        first = {name: limit_s for name, limit_s in told.first.items() if name not in given}
        soft = {name: limit_s for name, limit_s in told.soft.items() if name not in given}
        accepted.update(told.sections, told.first, told.own)
        sections = dict(told.sections)
        for name, limit_s in told.own.items():
            if name in given:
                continue
            if name in _BETWEEN_STEPS:
                sections[name] = limit_s  # so that the usual limit is known, for the first steps
            else:
                values[_FIELDS[name]] = limit_s
        calibrated = frozenset(sections.keys() | (told.own.keys() - _WITHOUT_SECTION)) - given
    accepted.update(given)
    sections.update(s.section_timeouts)
    first.update(s.first_pass_timeouts)
    accepted.update(s.section_timeouts, s.first_pass_timeouts)
    # A section that has an option of its own may be named in the list too; the list is the more particular one.
    for name in ("setup", "step", "checkpointing", "evaluation"):
        if name in s.section_timeouts:
            values[_FIELDS[name]] = sections[name]
    if "evaluation" in accepted:
        accepted.update(_EVALUATION)
    first_step_s = first.get("step", max(Limits().first_step_s, values["step_s"]))
    limits = Limits(
        **values,
        first_step_s=first_step_s,
        sections=sections,
        first=first,
        accepted=frozenset(accepted),
        soft=soft,
        calibrated=calibrated,
        confirm_s=s.confirm_window,
        gather_s=s.gather_limit,
        restart_grace_s=s.restart_grace,
        final_grace_s=shutdown_timeout_s if s.final_grace is None else s.final_grace,
        checkpoint_grace_s=s.checkpoint_grace,
    )
    return _switched_off(limits) if s.timeouts.lower() == "off" else limits


def _switched_off(limits: Limits) -> Limits:
    """No limit of time; exits, signals and stopped processes are still seen."""
    endless: dict[str, Any] = dict.fromkeys(_FIELDS.values(), math.inf)
    return replace(
        limits,
        first_step_s=math.inf,
        sections={},
        first={},
        soft={},
        accepted=frozenset(),
        calibrated=frozenset(),
        **endless,
    )


@dataclass(frozen=True, slots=True)
class _Told:
    """A timeouts.json: limits of sections, of first passes, soft ones, and those with an option of their own."""

    sections: dict[str, float]
    first: dict[str, float]
    soft: dict[str, float]
    own: dict[str, float]


def _read_timeouts(path: Path) -> _Told:
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"--ft-timeouts: cannot read {path}: {e.strerror}; allowed: auto, off or a file") from e
    except ValueError as e:
        raise ConfigError(f"--ft-timeouts: {path} is not JSON: {e}") from e
    if not isinstance(data, dict) or data.get("schema") != TIMEOUTS_SCHEMA:
        raise ConfigError(f"--ft-timeouts: {path} is not a file of limits: its schema is not {TIMEOUTS_SCHEMA!r}")
    known = ["schema", "sections", "first", "soft", *_FIELDS]
    for key in data:
        if key not in known and not key.startswith("_"):
            raise ConfigError(f"--ft-timeouts: {path} has an unknown key {key!r}{nearest_name(key, known)}")
    own = {name: data[name] for name in _FIELDS if name in data}
    return _Told(*(_seconds(path, part) for part in (*(data.get(n, {}) for n in ("sections", "first", "soft")), own)))


def _seconds(path: Path, part: Any) -> dict[str, float]:
    kind = Seconds()
    out: dict[str, float] = {}
    try:
        for name, value in part.items():
            out[str(name)] = kind.parse(value)
    except (AttributeError, ValueError):
        raise ConfigError(f"--ft-timeouts: {path} holds {part!r}; allowed: a mapping to {kind.allowed}") from None
    return out
