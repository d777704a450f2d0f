"""What the judgement of fingerprints takes and gives."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Cause", "Check", "Group", "Judgement", "Moment", "Outcome", "Vote"]


class Moment(enum.Enum):
    """When roots were taken; in the order in which they follow within a step."""

    LOADED = "loaded"
    BEFORE_STEP = "before_step"  # just before optimizer.step of this step
    AFTER_STEP = "after_step"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Group:
    """One tensor and the ranks that hold it; *owner* computes it and sends it to the others, if not None."""

    name: str
    ranks: tuple[int, ...]
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class Check:
    """The roots of one moment, by rank and name. What a rank did not send is absent: it is not judged."""

    step: int
    moment: Moment
    roots: Mapping[int, Mapping[str, int]]


class Outcome(enum.Enum):
    AGREED = "agreed"
    MINORITY = "minority"
    TIE = "tie"  # two halves, or no value that more than half hold
    UNKNOWN = "unknown"  # fewer than two ranks told


@dataclass(frozen=True, slots=True)
class Vote:
    """Attributes:
    root: what the majority holds; None without one.
    minority: who holds something else; without a majority: all.
    """

    outcome: Outcome
    root: int | None
    minority: tuple[int, ...]


class Cause(enum.Enum):
    NONE = "none"
    DEVICE = "device"
    SOFTWARE = "software"
    UNDECIDED = "undecided"  # two sides and nothing yet that tells them apart


@dataclass(frozen=True, slots=True)
class Judgement:
    """Attributes:
    ranks: the culprits for DEVICE; for UNDECIDED those between whom it lies; for SOFTWARE those that differ.
    names: tensors that differ, of those ranks.
    witness: a rank that holds the right bytes, to compare leaves with; None without one.
    first_bad_step, last_good_step: by the checks that there are; None: no check agreed before.
    confidence: 0 to 1.
    """

    cause: Cause
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    witness: int | None
    first_bad_step: int | None
    last_good_step: int | None
    confidence: float
    sentence: str
