"""Going back to an older checkpoint on request, and leaving batches out from there on: the cure of a loss spike.

``steadyctl ckpt rollback`` leaves a request in the root of the checkpoints; the next attempt carries it out once, with
``take``. Checkpoints that are newer are set aside, not deleted, so that no later resume jumps back to them. Every step
can be interrupted and is repeated by the next attempt.

The batches to leave out live in the request that was carried out, and in the manifest of every checkpoint saved since;
``skipped`` puts both together, so that they are known as well when the first attempt dies before its first save.

Batches have numbers from 0 in the order in which the data set gives them; without a rollback step *n* uses batch *n*.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steadyrun.checkpoint.catalog import look, set_aside
from steadyrun.checkpoint.durable import sync_folder, write_whole
from steadyrun.core.errors import SteadyrunError

__all__ = [
    "REQUEST_NAME",
    "Ranges",
    "Request",
    "RollbackError",
    "cancel",
    "carried_out",
    "carry_out",
    "data_step",
    "is_superseded",
    "merged",
    "parse_range",
    "pending",
    "request",
    "skipped",
    "step_of_batch",
    "take",
]

Ranges = Sequence[tuple[int, int]]

REQUEST_NAME: Final = "rollback.json"
ROLLBACK_SCHEMA: Final = "steadyrun.rollback/1"
_DONE: Final = re.compile(r"rollback\.done-[A-Za-z0-9-]+\.json")
_SAFE_ID: Final = re.compile(r"[A-Za-z0-9-]{1,64}")


class RollbackError(SteadyrunError):
    """A rollback that cannot be asked for or carried out; the text says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """A rollback.

    Attributes:
        to: the step to go back to: the newest checkpoint up to it is used.
        skip_batches: first and end of each range of batches to leave out afterwards.
        applied_at_unix_s: None while it waits.
    """

    to: int
    skip_batches: tuple[tuple[int, int], ...]
    requested_at_unix_s: float
    id: str
    applied_at_unix_s: float | None = None

    @property
    def done_name(self) -> str:
        """Of the file that records it as carried out."""
        is_safe = _SAFE_ID.fullmatch(self.id) is not None
        name = self.id if is_safe else hashlib.blake2b(self.id.encode(), digest_size=12).hexdigest()
        return f"rollback.done-{name}.json"

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], at_unix_s: float) -> Request:
        """From *to*, *skip_batches* and *id*, as the agent sends them. Raises RollbackError."""
        try:
            ranges = merged((int(first), int(end)) for first, end in fields["skip_batches"])
            return cls(int(fields["to"]), tuple(ranges), at_unix_s, str(fields["id"]))
        except (ValueError, TypeError, KeyError) as e:
            raise RollbackError(f"cannot roll back: the request is malformed: {type(e).__name__}: {e}") from e

    def to_json(self) -> str:
        return json.dumps({"schema": ROLLBACK_SCHEMA, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, name: str = REQUEST_NAME) -> Request:
        """Raises RollbackError."""
        try:
            data = json.loads(text)
            if data["schema"] != ROLLBACK_SCHEMA:
                raise RollbackError(f"{name} is of schema {data['schema']!r}, not {ROLLBACK_SCHEMA!r}")
            applied = data.get("applied_at_unix_s")
            return cls(
                int(data["to"]),
                tuple((int(first), int(end)) for first, end in data["skip_batches"]),
                float(data["requested_at_unix_s"]),
                str(data["id"]),
                None if applied is None else float(applied),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            raise RollbackError(f"{name} is damaged: {type(e).__name__}: {e}; remove it and ask again") from e


# -- asking ------------------------------------------------------------------------------------------------------------
def parse_range(text: str) -> tuple[int, int]:
    """``"100:120"``: batches 100 to 119. Raises ValueError."""
    first, colon, end = text.partition(":")
    if colon and first.isdecimal() and end.isdecimal() and int(first) < int(end):
        return int(first), int(end)
    raise ValueError(f"{text!r} is no range of batches: give FIRST:END with FIRST < END; END itself is not left out")


def request(root: Path, to: int, skip_batches: Ranges, at_unix_s: float) -> Request:
    """Ask for a rollback; the next attempt carries it out. One that still waits is replaced.

    Raises:
        RollbackError: no complete checkpoint is old enough, a range begins with a batch that is used before *to* is
            reached, or the request cannot be written.
        CatalogError: *root* cannot be listed.
    """
    reachable = [c for c in look(root).complete if c.step <= to and not c.is_superseded]
    if not reachable:
        raise RollbackError(
            f"cannot go back to step {to}: {root} holds no complete checkpoint of that step or an earlier one; "
            "see what there is with steadyctl ckpt ls"
        )
    used = data_step(reachable[0].step, skipped(root, ()))
    for first, end in skip_batches:
        if not 0 <= first < end:
            raise RollbackError(f"cannot leave out batches {first}:{end}: it must be FIRST:END with 0 <= FIRST < END")
        if first <= used:
            raise RollbackError(
                f"cannot leave out batches {first}:{end}: batch {used} and those before are part of the checkpoint of "
                f"step {reachable[0].step}; go back to an older step or begin at {used + 1}"
            )
    asked = Request(to, tuple(merged(skip_batches)), at_unix_s, uuid.uuid4().hex[:12])
    _write(root / REQUEST_NAME, asked)
    return asked


def pending(root: Path) -> Request | None:
    """The request that waits. Raises RollbackError when it cannot be read."""
    return _read(root / REQUEST_NAME)


def cancel(root: Path) -> Request | None:
    """Withdraw the request that waits, and return it. Raises RollbackError."""
    asked = pending(root)
    if asked is not None:
        try:
            (root / REQUEST_NAME).unlink(missing_ok=True)
            sync_folder(root)
        except OSError as e:
            raise RollbackError(f"cannot remove {root / REQUEST_NAME}: {e.strerror or e}") from e
    return asked


# -- carrying out ------------------------------------------------------------------------------------------------------
def take(root: Path, now_unix_s: float | None = None) -> Request | None:
    """Carry out the request that waits in *root*, for the process that decides where to resume.

    Afterwards newer checkpoints of *root* are set aside, and the request is on record as carried out. For what lies
    elsewhere, also in memory, ask ``is_superseded``. Interrupted, it is carried out by the next call.

    Args:
        now_unix_s: None: now.

    Returns:
        The request, once; then None.

    Raises:
        RollbackError: it cannot be read or carried out; nothing may be loaded that is newer than its step.
        CatalogError: *root* cannot be listed.
    """
    asked = pending(root)
    if asked is None:
        return None
    # On record already: interrupted just there, before anything was loaded.
    taken = carry_out(root, asked, now_unix_s) or _read(root / asked.done_name) or asked
    try:
        (root / REQUEST_NAME).unlink(missing_ok=True)
        sync_folder(root)
    except OSError as e:
        raise RollbackError(f"cannot go back to step {asked.to}: {root / REQUEST_NAME}: {e.strerror or e}") from e
    return taken


def carry_out(root: Path, asked: Request, now_unix_s: float | None = None) -> Request | None:
    """``take`` for a request that came another way, such as an option; None when it was carried out before.

    Raises RollbackError and CatalogError as ``take`` does.
    """
    done = root / asked.done_name
    if _read(done) is not None:
        return None
    catalog = look(root)
    for c in (*catalog.checkpoints, *catalog.partials):
        if c.step > asked.to and not c.is_superseded:
            _set_aside(root, c.path, asked)
    taken = dataclasses.replace(asked, applied_at_unix_s=time.time() if now_unix_s is None else now_unix_s)
    _write(done, taken)
    return taken


def _set_aside(root: Path, folder: Path, asked: Request) -> None:
    try:
        set_aside(folder, f"rollback to step {asked.to}")
    except FileNotFoundError:
        pass  # removed meanwhile
    except OSError as e:
        raise RollbackError(
            f"cannot go back to step {asked.to}: cannot set {folder} aside: {e.strerror or e}; "
            f"make {root} writable, or withdraw the rollback (remove {root / REQUEST_NAME} or the option)"
        ) from e


def carried_out(root: Path) -> tuple[Request, ...]:
    """Rollbacks of the past, oldest first. Raises RollbackError when one cannot be read."""
    try:
        names = os.listdir(root)
    except FileNotFoundError:
        return ()
    except OSError as e:
        raise RollbackError(f"cannot list {root}: {e.strerror or e}; earlier rollbacks are not known") from e
    found = [_read(root / name) for name in names if _DONE.fullmatch(name)]
    return tuple(sorted((r for r in found if r is not None), key=lambda r: (r.applied_at_unix_s or 0.0, r.id)))


def is_superseded(rollbacks: Iterable[Request], step: int, saved_unix_s: float) -> bool:
    """Whether a rollback has gone back behind that state: for tiers whose folders were out of reach at that time."""
    return any(
        r.applied_at_unix_s is not None and step > r.to and saved_unix_s < r.applied_at_unix_s for r in rollbacks
    )


def skipped(root: Path, in_manifest: Ranges) -> tuple[tuple[int, int], ...]:
    """All batches that are left out after loading a checkpoint whose manifest says *in_manifest*.

    Raises RollbackError when the record of a rollback cannot be read.
    """
    # Of every one: checkpoints from before it begin where its batches are still to come, later ones have them already.
    return tuple(merged([*in_manifest, *(r for done in carried_out(root) for r in done.skip_batches)]))


# -- numbers -----------------------------------------------------------------------------------------------------------
def merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, without empty ones, and none touching another."""
    out: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if first >= end:
            continue
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((first, end))
    return out


def data_step(step: int, skipped: Ranges) -> int:
    """The number of the batch that training step *step* uses: of those that are not left out, the one at that place."""
    batch = step
    for first, end in merged(skipped):
        if first > batch:
            break
        batch += end - first
    return batch


def step_of_batch(batch: int, skipped: Ranges) -> int | None:
    """The training step that uses batch number *batch*; None when it is left out. The inverse of ``data_step``."""
    before = 0
    for first, end in merged(skipped):
        if first > batch:
            break
        if batch < end:
            return None
        before += end - first
    return batch - before


# -- files -------------------------------------------------------------------------------------------------------------
def _read(path: Path) -> Request | None:
    try:
        return Request.from_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
    except OSError as e:
        raise RollbackError(f"cannot read {path}: {e.strerror or e}") from e


def _write(path: Path, asked: Request) -> None:
    try:
        write_whole(path, asked.to_json().encode())
    except OSError as e:
        raise RollbackError(f"cannot write {path}: {e.strerror or e}; nothing is rolled back") from e
