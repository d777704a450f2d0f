"""What an alert and a recording rule are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

__all__ = ["PREFIX", "Alert", "Recording", "Severity"]

PREFIX: Final = "Steadyrun"


class Severity(str, Enum):
    """``critical`` is worth waking somebody, ``warning`` a ticket, ``info`` a line in a log."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Recording:
    """A series that Prometheus computes and stores, named ``level:metric:operation``."""

    record: str
    expr: str
    help: str


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert and its runbook.

    Attributes:
        name: without ``Steadyrun``; also the name of its runbook.
        group: of rules that are evaluated together.
        expr: PromQL; joined to one line. Counts from ``increase`` are compared with a half in between, as
            extrapolation makes 2.9 or 3.1 of three.
        hold_s: how long it must be true; 0 fires at once.
        keep_s: how long it goes on firing after it has become untrue.
        summary: a sentence without anything that differs between two alerts of the name.
        description: with the alert's labels and value, in Prometheus's templates.
        meaning, confirm, act: the runbook: what is the matter, how to be sure of it (commands first), what to do.
    """

    name: str
    group: str
    severity: Severity
    expr: str
    summary: str
    description: str
    meaning: str
    confirm: tuple[str, ...]
    act: tuple[str, ...]
    hold_s: int = 0
    keep_s: int = 0

    @property
    def full_name(self) -> str:
        return PREFIX + self.name
