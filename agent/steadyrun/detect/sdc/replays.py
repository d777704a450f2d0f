"""Microbatches that other ranks have computed again: who of those who disagree is wrong. Pure; ``now_s`` is passed in.

The ranks of a node form a ring, and each computes what the next one has computed. Where the two differ, a third does
so, too; where there are only two, each repeats its own. What two have found, each by itself, is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from steadyrun.core.replay import AGAIN, NEXT, OWN, THIRD, ReplayPlace, ReplayReport
from steadyrun.detect.sdc.records import Cause, Judgement

__all__ = ["Replayed", "Replays", "judge_replays"]

PATIENCE_S: Final = 8.0  # until a microbatch is judged without a third: longer than ranks wait for each other
KEPT_STEPS: Final = 64


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the replays of one step of one node say.

    Attributes:
        since: the first step whose gradients may have been wrong.
        places: where they were, with the rank that has them.
    """

    step: int
    judgement: Judgement
    since: int
    places: tuple[tuple[int, int, ReplayPlace], ...]  # rank, witness, place


@dataclass(frozen=True, slots=True)
class _Pair:
    """What became of one microbatch.

    Attributes:
        wrong: the rank that is; None: nobody can tell which of *ranks*.
        is_gradient: the wrong one is the gradient that training took.
        others: who has found the same, each by itself.
    """

    ranks: tuple[int, int]
    wrong: int | None
    is_gradient: bool
    others: tuple[int, ...]
    why: str
    confidence: float
    is_scattered: bool = False


class Replays:
    """The reports of one node's ranks, as they come, in one attempt."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._steps: dict[int, tuple[float, list[ReplayReport]]] = {}
        self._done: dict[int, None] = {}

    def add(self, report: ReplayReport, now_s: float) -> None:
        if report.step not in self._done:
            self._steps.setdefault(report.step, (now_s, []))[1].append(report)

    def ready(self, now_s: float) -> list[Replayed]:
        """What can be judged now, in order."""
        out = []
        for step in sorted(self._steps):
            since_s, reports = self._steps[step]
            if not _is_whole(reports) and now_s < since_s + self._patience_s:
                continue
            del self._steps[step]
            self._done[step] = None
            found = judge_replays(step, reports)
            if found is not None:
                out.append(found)
        while len(self._done) > KEPT_STEPS:
            del self._done[next(iter(self._done))]
        return out


def _is_whole(reports: Sequence[ReplayReport]) -> bool:
    """Whether each difference has been looked into by whoever was to do so."""
    settled = {r.of for r in reports if r.kind in (THIRD, AGAIN)}
    return all(r.of in settled or r.kind == OWN for r in reports if r.kind in (NEXT, OWN))


def judge_replays(step: int, reports: Sequence[ReplayReport]) -> Replayed | None:
    """Who was wrong at *step*; None where nothing differed."""
    first = [r for r in reports if r.kind in (NEXT, OWN) and not r.agrees]
    if not first:
        return None
    pairs = [_judge_own(r) if r.kind == OWN else _judge_pair(r, reports) for r in first]
    culprits = sorted({p.wrong for p in pairs if p.wrong is not None})
    cleans = [r.last_clean for r in first]
    known = [c for c in cleans if c is not None]
    last_clean = min(known) if known and len(known) == len(cleans) else None
    size = len(first[0].ranks)
    if any(p.is_scattered for p in pairs) or (size > 2 and 2 * len(culprits) > size):
        ranks = tuple(sorted({r for p in pairs for r in p.ranks}))
        told = " and ".join(f"rank {r}" for r in ranks)
        sentence = (
            f"{told} do not compute the same gradients from the same microbatch at step {step}, nor does a third: "
            "kernels that are not deterministic, or other settings, rather than a GPU"
        )
        return Replayed(step, _judgement(Cause.SOFTWARE, ranks, (), None, step, last_clean, 0.6, sentence), step, ())
    certain = [p for p in pairs if p.wrong is not None]
    if not certain:
        pair, report = pairs[0], first[0]
        names = tuple(p.tensor for p in report.places)
        sentence = (
            f"rank {pair.ranks[0]} and rank {pair.ranks[1]} compute different gradients of {_few(names, report)} from "
            f"the same microbatch of rank {report.of} at step {step}, each the same each time, and nobody can tell "
            "which is wrong"
        )
        if last_clean is None:
            return None  # they never agreed: the rank has turned its replays off, and says why
        judgement = _judgement(Cause.UNDECIDED, tuple(sorted(pair.ranks)), names, None, step, last_clean, 0.5, sentence)
        return Replayed(step, judgement, last_clean + 1, _places(report, report.of, report.by))
    best = max(certain, key=lambda p: (p.is_gradient, p.confidence))
    report = first[pairs.index(best)]
    ranks = tuple(culprits)
    names = tuple(p.tensor for p in report.places)
    told = " and ".join(f"rank {r}" for r in ranks)
    sentence = f"{told}: wrong gradient in {_few(names, report)} at step {step}: {best.why}"
    witness = next(iter(best.others), None)
    judgement = _judgement(Cause.DEVICE, ranks, names, witness, step, last_clean, best.confidence, sentence)
    since = step if last_clean is None else last_clean + 1
    assert best.wrong is not None
    return Replayed(step, judgement, since, _places(report, best.wrong, report.by if witness is None else witness))


def _judge_pair(r: ReplayReport, reports: Sequence[ReplayReport]) -> _Pair:
    """*r.by* has found something else than *r.of* has told."""
    ranks = (r.by, r.of)
    if r.repeated == r.told:
        why = (
            f"rank {r.by} has found it in a microbatch of rank {r.of}, and when it repeated that, what rank {r.of} had"
        )
        return _Pair(ranks, r.by, False, (r.of,), why, 0.9)
    if r.repeated != r.found:
        return _Pair(ranks, r.by, False, (), f"rank {r.by} computes other bits each time", 0.7)
    other = next((o for o in reports if o.of == r.of and o.kind in (THIRD, AGAIN)), None)
    if other is None:
        return _Pair(ranks, None, False, (), "", 0.5)
    if other.kind == AGAIN:
        if other.found == r.found:
            why = (
                f"its own differs from what rank {r.by} computes from the same microbatch, and from its own repetition"
            )
            return _Pair(ranks, r.of, True, (r.by, r.of), why, 0.95)
        return _Pair(ranks, None, False, (), "", 0.5, is_scattered=other.found != r.told)
    both = tuple(sorted((r.by, other.by)))
    if other.found == r.found:
        why = f"its own differs from what ranks {both[0]} and {both[1]} compute from the same microbatch"
        return _Pair(ranks, r.of, True, both, why, 0.97)
    if other.found == r.told:
        why = f"it has found it in a microbatch of rank {r.of}, where rank {other.by} finds what rank {r.of} had"
        return _Pair(ranks, r.by, False, tuple(sorted((r.of, other.by))), why, 0.95)
    return _Pair(ranks, None, False, (), "", 0.5, is_scattered=True)


def _judge_own(r: ReplayReport) -> _Pair:
    """A rank alone on its node has found something else than before: it is wrong now and then."""
    ranks = (r.of, r.of)
    if r.repeated == r.found:
        return _Pair(ranks, r.of, True, (r.of,), "it has computed another one twice from the same microbatch", 0.8)
    if r.repeated == r.told:
        why = "it has computed another one from the same microbatch, and then the same again"
        return _Pair(ranks, r.of, False, (r.of,), why, 0.8)
    return _Pair(ranks, None, False, (), "", 0.5, is_scattered=True)


def _places(report: ReplayReport, rank: int, witness: int) -> tuple[tuple[int, int, ReplayPlace], ...]:
    return tuple((rank, witness, place) for place in report.places)


def _few(names: Sequence[str], report: ReplayReport) -> str:
    more = report.differing - len(names[:3])
    return ", ".join(names[:3]) + (f" and {more} more" if more > 0 else "")


def _judgement(
    cause: Cause,
    ranks: tuple[int, ...],
    names: tuple[str, ...],
    witness: int | None,
    step: int,
    last_clean: int | None,
    confidence: float,
    sentence: str,
) -> Judgement:
    return Judgement(cause, ranks, names, witness, step, last_clean, confidence, sentence)
