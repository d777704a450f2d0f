"""Checkpoints after whose load the same fault came back: they are left out, so that a job does not die of one for ever.

Two failures with the same signature within ``WITHIN_STEPS`` steps after the same state was loaded put it into
quarantine, and the next older one is used. That is bounded: when the fault follows back through ``MOST_IN_A_ROW``
states it is not theirs, and no still older one is given up for it.

The ledger lies in the root of the checkpoints, so that it outlives the job. Decisions are pure functions from one
``Ledger`` to the next; ``update`` carries them out on the file, against other writers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steadyrun.checkpoint.catalog import Listed
from steadyrun.checkpoint.choose import Quarantined
from steadyrun.checkpoint.durable import write_whole
from steadyrun.checkpoint.saves import TierName
from steadyrun.core.errors import SteadyrunError

__all__ = [
    "MOST_IN_A_ROW",
    "QUARANTINE_NAME",
    "WITHIN_STEPS",
    "Entry",
    "Failure",
    "Judged",
    "Ledger",
    "Loaded",
    "QuarantineError",
    "after_failure",
    "after_load",
    "lift",
    "read",
    "update",
]

QUARANTINE_NAME: Final = "quarantine.json"
QUARANTINE_SCHEMA: Final = "steadyrun.quarantine/1"
WITHIN_STEPS: Final = 10
FAILURES_NEEDED: Final = 2
MOST_IN_A_ROW: Final = 3
_LOCK_NAME: Final = ".quarantine.lock"
_MOST_FAILURES: Final = 64
_MOST_ENTRIES: Final = 256


class QuarantineError(SteadyrunError):
    """The ledger cannot be read or written."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The state that an attempt went on from.

    Attributes:
        step, attempt: of the state.
        in_attempt: the attempt that loaded it.
    """

    step: int
    attempt: int
    tier: TierName
    in_attempt: int
    at_unix_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure soon after a load; *steps_survived* were done in between."""

    step: int
    attempt: int
    tier: TierName
    steps_survived: int
    signature: str
    at_unix_s: float


@dataclass(frozen=True, slots=True)
class Entry:
    """A state in quarantine; *tier*: from where it was loaded last."""

    step: int
    attempt: int
    tier: TierName
    signature: str
    failures: int
    at_unix_s: float

    @property
    def why(self) -> str:
        fault = self.signature or "not told which"
        if self.failures < FAILURES_NEEDED:
            return f"training failed after it was loaded: {fault}"
        return f"the same fault came {self.failures} times within {WITHIN_STEPS} steps after it was loaded: {fault}"

    def as_quarantined(self) -> Quarantined:
        """What ``choose`` wants to know."""
        return Quarantined(self.step, self.attempt, self.why, self.at_unix_s)


@dataclass(frozen=True, slots=True)
class Ledger:
    """Oldest first, each; the oldest are dropped when there are too many."""

    entries: tuple[Entry, ...] = ()
    failures: tuple[Failure, ...] = ()
    loaded: Loaded | None = None

    def quarantined(self) -> tuple[Quarantined, ...]:
        return tuple(e.as_quarantined() for e in self.entries)

    def among(self, listed: Iterable[Listed]) -> tuple[Path, ...]:
        """Folders that hold a state in quarantine."""
        all_quarantined = self.quarantined()
        return tuple(
            c.path
            for c in listed
            if c.manifest is not None
            and any(q.is_of(c.step, c.attempt, c.manifest.created_unix_s) for q in all_quarantined)
        )

    def to_json(self) -> str:
        data = {"schema": QUARANTINE_SCHEMA, **dataclasses.asdict(self)}
        return json.dumps(data, indent=1, default=lambda tier: tier.value)

    @classmethod
    def from_json(cls, text: str | bytes, name: str = QUARANTINE_NAME) -> Ledger:
        """Raises QuarantineError."""
        try:
            data = json.loads(text)
            if data["schema"] != QUARANTINE_SCHEMA:
                raise QuarantineError(f"{name} is of schema {data['schema']!r}, not {QUARANTINE_SCHEMA!r}")
            loaded = data["loaded"]
            return cls(
                tuple(
                    Entry(
                        int(e["step"]),
                        int(e["attempt"]),
                        TierName(e["tier"]),
                        str(e["signature"]),
                        int(e["failures"]),
                        float(e["at_unix_s"]),
                    )
                    for e in data["entries"]
                ),
                tuple(
                    Failure(
                        int(f["step"]),
                        int(f["attempt"]),
                        TierName(f["tier"]),
                        int(f["steps_survived"]),
                        str(f["signature"]),
                        float(f["at_unix_s"]),
                    )
                    for f in data["failures"]
                ),
                None if loaded is None else _loaded(loaded),
            )
        except (ValueError, TypeError, KeyError) as e:
            raise QuarantineError(
                f"{name} is damaged: {type(e).__name__}: {e}; remove it to begin without quarantines"
            ) from e


def _loaded(data: Any) -> Loaded:
    return Loaded(
        int(data["step"]),
        int(data["attempt"]),
        TierName(data["tier"]),
        int(data["in_attempt"]),
        float(data["at_unix_s"]),
    )


@dataclass(frozen=True, slots=True)
class Judged:
    """What a failure led to.

    Attributes:
        entry: the state that is now in quarantine; a snapshot in memory that holds it can be dropped.
        note: a sentence for people; empty when nothing changed.
    """

    ledger: Ledger
    entry: Entry | None = None
    note: str = ""


def after_load(ledger: Ledger, loaded: Loaded) -> Ledger:
    return dataclasses.replace(ledger, loaded=loaded)


def after_failure(
    ledger: Ledger, in_attempt: int, step: int | None, signature: str, at_unix_s: float, falls_back: bool = False
) -> Judged:
    """Judge the failure of attempt *in_attempt*.

    Args:
        step: the newest step that was done; None: none since the load.
        signature: equal for the same fault; empty when it says nothing about the state, as with a lost node.
        falls_back: it is decided already that the state is not to be loaded again.
    """
    loaded = ledger.loaded
    if loaded is None or loaded.in_attempt != in_attempt or not (signature or falls_back):
        return Judged(ledger)  # nothing was loaded in this attempt, or it is not known what happened
    survived = 0 if step is None else max(0, step - loaded.step)
    if survived > WITHIN_STEPS and not falls_back:
        return Judged(ledger)
    failure = Failure(loaded.step, loaded.attempt, loaded.tier, survived, signature, at_unix_s)
    ledger = dataclasses.replace(ledger, failures=(*ledger.failures, failure)[-_MOST_FAILURES:])
    same = [f for f in ledger.failures if _is_same(f, failure)]
    if len(same) < FAILURES_NEEDED and not falls_back:
        return Judged(ledger)
    # Older entries are of an earlier time: training came further since, so the row begins anew.
    blamed = {(e.step, e.attempt) for e in ledger.entries if e.signature == signature and e.step >= loaded.step}
    if (loaded.step, loaded.attempt) in blamed:
        return Judged(ledger)
    if len(blamed) >= MOST_IN_A_ROW and not falls_back:
        return Judged(
            ledger,
            note=f"the fault follows through {len(blamed)} checkpoints and is probably not theirs: {signature}; "
            "no further one is quarantined (lift them with steadyctl ckpt quarantine --lift, or skip the batches with "
            "steadyctl ckpt rollback --skip-batches)",
        )
    entry = Entry(loaded.step, loaded.attempt, loaded.tier, signature, len(same), at_unix_s)
    ledger = dataclasses.replace(ledger, entries=(*ledger.entries, entry)[-_MOST_ENTRIES:])
    return Judged(ledger, entry, f"checkpoint of step {entry.step} is quarantined, an older one is used: {entry.why}")


def _is_same(one: Failure, other: Failure) -> bool:
    return (one.step, one.attempt, one.signature) == (other.step, other.attempt, other.signature)


def lift(ledger: Ledger, step: int, attempt: int | None = None) -> Ledger:
    """Without the quarantines of *step* (of any attempt with None) and the failures that led to them."""

    def stays(item: Entry | Failure) -> bool:
        return item.step != step or attempt not in (None, item.attempt)

    return dataclasses.replace(
        ledger,
        entries=tuple(e for e in ledger.entries if stays(e)),
        failures=tuple(f for f in ledger.failures if stays(f)),
    )


def read(root: Path) -> Ledger:
    """The ledger of *root*, empty when there is none. Raises QuarantineError."""
    path = root / QUARANTINE_NAME
    try:
        return Ledger.from_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        return Ledger()
    except OSError as e:
        raise QuarantineError(f"cannot read {path}: {e.strerror or e}; quarantined checkpoints are not known") from e


def update(root: Path, change: Callable[[Ledger], Ledger]) -> Ledger:
    """Read, change and write the ledger, one writer at a time over all processes; waits for the others.

    Raises:
        QuarantineError: it cannot be read or written; what is in the file stays.
    """
    try:
        lock = os.open(root / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as e:
        raise _cannot_write(root, e) from e
    try:
        with contextlib.suppress(OSError):  # without locks in the file system the file is still replaced whole
            fcntl.flock(lock, fcntl.LOCK_EX)
        before = read(root)
        after = change(before)
        if after != before:
            write_whole(root / QUARANTINE_NAME, after.to_json().encode())
    except OSError as e:
        raise _cannot_write(root, e) from e
    finally:
        os.close(lock)
    return after


def _cannot_write(root: Path, e: OSError) -> QuarantineError:
    return QuarantineError(
        f"cannot write {root / QUARANTINE_NAME}: {e.strerror or e}; "
        "a checkpoint that brings the same fault back is known until this process ends only"
    )
