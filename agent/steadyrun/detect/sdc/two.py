"""Two replicas, or two equal sides: what can still tell which one is wrong."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from steadyrun.detect.sdc.records import Cause, Judgement

__all__ = ["Distances", "Replay", "settle"]


@dataclass(frozen=True, slots=True)
class Distances:
    """How far each side's differing elements lie from the last verified checkpoint.

    Attributes:
        by_rank: the largest distance, same unit as the bound; NaN or infinite counts as impossible.
        bound: what an optimizer can have moved an element since: steps x learning rate x a factor (10 for Adam).
        why: what a distance beyond the bound says, for people.
    """

    by_rank: Mapping[int, float]
    bound: float
    why: str = "its values lie farther from the last verified checkpoint than any update"


@dataclass(frozen=True, slots=True)
class Replay:
    """Steps from the last verified checkpoint, made again deterministically.

    Attributes:
        reproduced: by rank, whether it came to its own recorded root again.
    """

    reproduced: Mapping[int, bool]


def settle(
    judgement: Judgement,
    at_rest: Collection[int] = (),
    distances: Distances | None = None,
    replay: Replay | None = None,
) -> Judgement:
    """*judgement* with its cause decided, where it was UNDECIDED and something decides it.

    In the order of what can be relied on: a side that changed at rest; a side that no optimizer can have reached; a
    side that does not reproduce itself. Evidence against all sides decides nothing: then it is no single GPU.
    """
    if judgement.cause is not Cause.UNDECIDED:
        return judgement
    sides = set(judgement.ranks)
    rested = sides & set(at_rest)
    if rested and rested != sides:
        return _decided(judgement, rested, 0.97, "its bytes changed while nothing was to change them")
    if distances is not None:
        far = {r for r in sides if r in distances.by_rank and not abs(distances.by_rank[r]) <= distances.bound}
        if far and far != sides and sides <= set(distances.by_rank):
            return _decided(judgement, far, 0.85, distances.why)
    if replay is not None and sides <= set(replay.reproduced):
        failed = {r for r in sides if not replay.reproduced[r]}
        if failed and failed != sides:
            return _decided(
                judgement, failed, 0.9, "made again from the verified checkpoint, it comes to other numbers"
            )
        if not failed:
            text = f"{judgement.sentence}; each comes to its own numbers again: exchange the ranks, or ask a third"
            return replace(judgement, sentence=text)
    return judgement


def _decided(judgement: Judgement, ranks: Collection[int], confidence: float, why: str) -> Judgement:
    culprits = tuple(sorted(ranks))
    others = [r for r in judgement.ranks if r not in ranks]
    told = ", ".join(f"rank {r}" for r in culprits)
    return replace(
        judgement,
        cause=Cause.DEVICE,
        ranks=culprits,
        witness=others[0],
        confidence=confidence,
        sentence=f"{told} holds wrong bytes in {_few(judgement.names)}: {why}",
    )


def _few(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
