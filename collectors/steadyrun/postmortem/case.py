"""A post mortem's material and its result, as every renderer takes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from steadyrun.core.flight import FlightDetails
from steadyrun.core.records import Evidence, Finding
from steadyrun.detect.waits.records import FlightJudgement

__all__ = ["Case", "Input", "InputStatus", "Moment", "Report"]


class InputStatus(str, Enum):
    """What became of an input file; the values stand in ``--json``."""

    USED = "used"
    CUT = "cut"  # used up to where it was cut
    RECORDER_OFF = "recorder_off"
    EMPTY = "empty"
    UNREADABLE = "unreadable"
    REFUSED = "refused"  # it would have run code, or is larger than allowed
    IGNORED = "ignored"  # not an input of ours


@dataclass(frozen=True, slots=True)
class Input:
    """One file; *rank* None where it belongs to none or could not be told; *detail* says what is wrong or special."""

    path: Path
    rank: int | None
    status: InputStatus
    detail: str = ""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened, for the timeline.

    Attributes:
        kind: ``step``, ``section``, ``issued`` (a collective), ``exception``, ``exit``, ``log``, ``device``, ``agent``.
        rank: None for a node's or the job's.
        until_unix_s: end of something that lasted.
    """

    at_unix_s: float
    kind: str
    text: str
    rank: int | None = None
    node: str = ""
    until_unix_s: float | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that was found at the given paths.

    Attributes:
        evidence: one ``RankEvidence`` per rank of which anything is known, flight records inside.
        details: single entries on request; None where only summaries are there.
        unix_minus_mono_s: per node name, for the times in the evidence; 0 where they are wall times already.
        title: where it came from, for the head of the report.
    """

    evidence: Evidence
    inputs: tuple[Input, ...]
    details: FlightDetails | None = None
    moments: tuple[Moment, ...] = ()
    unix_minus_mono_s: dict[str, float] = field(default_factory=dict)
    title: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """The judged case.

    Attributes:
        findings, victims, missing: as in verdict.json.
        flight: the judgement over collectives alone, for the drawing of the waits; None without flight records.
        head: lines for the page's head (``key: value``): run, attempt, detected, action.
        decision: what was or will be done about it; empty for a post mortem of loose files.
    """

    case: Case
    findings: tuple[Finding, ...]
    victims: tuple[int, ...]
    missing: tuple[str, ...]
    flight: FlightJudgement | None = None
    sentence: str = ""
    head: tuple[tuple[str, str], ...] = ()
    decision: str = ""
