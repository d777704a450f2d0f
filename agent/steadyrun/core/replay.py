"""What a rank tells of replays: microbatches that it computes again, of another rank of its node.

Every so many steps each rank of a DDP group keeps one microbatch: what its model was called with, the random states
and buffers, the gradient that came back to what the model returned, and fingerprints of the gradients of the parameters
before any reduction. They lie in the rank's *box*, memory without a name that other ranks of the node open as
``/proc/<pid>/fd/<fd>``. Between backward and update, while all replicas hold the same parameters, each rank computes
the microbatch of the next rank of the ring again and compares fingerprints; where they differ, a third computes it,
too.

The agent sees what is counted in the slot (``Board.integrity``). Of everything that did not agree, and of what was
computed because of it, the rank writes a report, ``replay.<n>.json``, from 1 on: ``ReplayReport``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steadyrun.core.integrity import IntegrityError

__all__ = [
    "AGAIN",
    "BASE_INTERVAL",
    "NEXT",
    "OWN",
    "STATES",
    "THIRD",
    "ReplayPlace",
    "ReplayReport",
    "ReplayWords",
    "optional_int",
    "report_path",
    "why_off_path",
]

STATES: Final = ("not begun", "tested", "on", "off")  # tested: whether a repetition gives the same bits at all
NOT_BEGUN, TESTED, ON, OFF = range(4)
BASE_INTERVAL: Final = 200
# Who computed a microbatch again: the rank whose turn it was, one that settles what differed, the rank itself where
# there is no third, the rank itself where it is alone on its node.
NEXT, THIRD, AGAIN, OWN = "next", "third", "again", "own"
_KINDS: Final = (NEXT, THIRD, AGAIN, OWN)


@dataclass(frozen=True, slots=True)
class ReplayWords:
    """What a slot of the board says about replays (``IntegrityWords.replay``).

    Attributes:
        state: one of ``STATES``.
        interval: steps between replays at present.
        clean: replays that gave what the rank replayed had told.
        clean_step: newest step of those.
        of: the rank whose microbatches this one computes again.
    """

    state: str
    interval: int
    cost_s: float
    clean: int
    clean_step: int | None
    reports: int
    of: int | None

    @classmethod
    def read(cls, words: Sequence[int]) -> ReplayWords:
        """From those of a slot, from ``S_REPLAY`` on."""
        _, state, interval, cost_ns, clean, step, reports, of = words
        return cls(
            state=STATES[state] if state < len(STATES) else STATES[0],
            interval=interval,
            cost_s=cost_ns / 1e9,
            clean=clean,
            clean_step=step - 1 if step else None,
            reports=reports,
            of=of - 1 if of else None,
        )


@dataclass(frozen=True, slots=True)
class ReplayPlace:
    """A parameter whose gradients differ; as ``integrity.microbatch.Place``."""

    tensor: str
    dtype: str
    element_bytes: int
    size_bytes: int
    leaves: int | None
    elements: tuple[tuple[int, tuple[int, ...]], ...]
    is_all: bool

    def to_list(self) -> list[Any]:
        """For JSON."""
        return [
            self.tensor, self.dtype, self.element_bytes, self.size_bytes, self.leaves, self.elements, self.is_all,
        ]  # fmt: skip

    @classmethod
    def from_list(cls, told: Sequence[Any]) -> ReplayPlace:
        """Back from ``to_list``. Raises ValueError or TypeError."""
        tensor, dtype, element_bytes, size_bytes, leaves, elements, is_all = told
        return cls(
            str(tensor),
            str(dtype),
            int(element_bytes),
            int(size_bytes),
            optional_int(leaves),
            tuple((int(e), tuple(map(int, bits))) for e, bits in elements),
            bool(is_all),
        )


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """One rank's word on one microbatch of *of* at *step*.

    Attributes:
        kind: ``NEXT``, ``THIRD``, ``AGAIN`` or ``OWN``.
        ranks: of the ring, in its order.
        told, found, repeated: digests of what *of* told, of what *by* found, and of what it found when it computed the
            same once more (None: it did not).
        last_clean: newest step before at which *by* found what *of* had told; None: never in this attempt.
        differing: how many parameters differ from what was told.
        places: the first few of them.
    """

    step: int
    of: int
    by: int
    kind: str
    ranks: tuple[int, ...]
    told: int
    found: int
    repeated: int | None
    last_clean: int | None
    differing: int
    places: tuple[ReplayPlace, ...]

    @property
    def agrees(self) -> bool:
        return self.found == self.told

    def to_json(self) -> str:
        return json.dumps(
            {
                "schema": "steadyrun.replay/1",
                "step": self.step,
                "of": self.of,
                "by": self.by,
                "kind": self.kind,
                "ranks": self.ranks,
                "told": self.told,
                "found": self.found,
                "repeated": self.repeated,
                "last_clean": self.last_clean,
                "differing": self.differing,
                "places": [p.to_list() for p in self.places],
            }
        )

    @classmethod
    def parse(cls, text: str) -> ReplayReport:
        """Raises IntegrityError when *text* is no report."""
        try:
            data = json.loads(text)
            kind = str(data["kind"])
            if kind not in _KINDS:
                raise ValueError(f"kind {kind!r}")
            return cls(
                int(data["step"]),
                int(data["of"]),
                int(data["by"]),
                kind,
                tuple(map(int, data["ranks"])),
                int(data["told"]),
                int(data["found"]),
                optional_int(data["repeated"]),
                optional_int(data["last_clean"]),
                int(data["differing"]),
                tuple(map(ReplayPlace.from_list, data["places"])),
            )
        except (KeyError, TypeError, ValueError, RecursionError) as e:
            raise IntegrityError(f"cannot read a rank's report of a replay: {type(e).__name__}: {e}") from e

    @classmethod
    def load(cls, rank_dir: Path, number: int) -> ReplayReport:
        """Raises IntegrityError."""
        path = report_path(rank_dir, number)
        try:
            return cls.parse(path.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as e:
            raise IntegrityError(f"cannot read {path}: {e}") from e


def report_path(rank_dir: Path, number: int) -> Path:
    return rank_dir / f"replay.{number}.json"


def why_off_path(rank_dir: Path) -> Path:
    """Text: why a rank has turned its replays off."""
    return rank_dir / "replay.off.txt"


def optional_int(value: Any) -> int | None:
    """Of a value of JSON. Raises ValueError or TypeError."""
    return None if value is None else int(value)
