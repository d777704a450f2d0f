"""Decides from where all ranks resume: the newest state that every one of them can get, from the nearest place.

Pure: the saver of group rank 0 gathers what each rank's node holds and what the folders list, and calls ``choose``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from steadyrun.checkpoint.saves import TierName, rank_words

__all__ = [
    "ANY_FOLDER",
    "Choice",
    "FolderOffer",
    "Offer",
    "Quarantined",
    "Refused",
    "Rejected",
    "Snapshot",
    "Source",
    "choose",
]

ANY_FOLDER: Final = "folder"  # as the source of a rejection: that step in every folder
_SET_ASIDE: Final = "set aside by a rollback"
_NEAREST: Final = {tier: i for i, tier in enumerate(TierName)}
_IN_MEMORY: Final = (TierName.MEMORY, TierName.PEER)


class Source(enum.Enum):
    """What a rank has to do; the values are those of the message ``choice``."""

    NONE = "none"
    MEMORY = "memory"
    PEER = "peer"
    FOLDER = "folder"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sealed snapshot of one rank.

    Attributes:
        generation: of the save, equal on all ranks that took part in the same one.
        digest: of the layout that it was made with, see ``Layout.digest``.
        tier: MEMORY in the node's own memory, PEER in that of its partner.
        saved_unix_s: 0 when not known.
        superseded: a rollback has gone back behind it, see ``rollback.is_superseded``.
    """

    step: int
    attempt: int
    generation: int
    digest: str
    tier: TierName = TierName.MEMORY
    saved_unix_s: float = 0.0
    superseded: bool = False


@dataclass(frozen=True, slots=True)
class Offer:
    """What one rank could load from memory; *digest* is that of the layout which the rank has now."""

    digest: str
    snapshots: tuple[Snapshot, ...] = ()


@dataclass(frozen=True, slots=True)
class FolderOffer:
    """A checkpoint in a folder.

    Attributes:
        problem: why it is not complete; empty when it is.
        superseded: newer than the step of a rollback that has been carried out.
        ranks: those that can read it; None: all. Offers that differ only in this are taken together, so that each
            node may tell what it sees on its own disk.
    """

    tier: TierName
    step: int
    attempt: int
    path: str
    world_size: int
    verified: bool = False
    problem: str = ""
    superseded: bool = False
    ranks: frozenset[int] | None = None
    saved_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rejected:
    """What a rank could not load, or what somebody found to be damaged.

    Attributes:
        source: the value of a ``TierName``, the path of a folder, or ``"folder"`` for every folder of that step.
        attempt: None: of any attempt.
        rank: in whose memory; None: nobody may use it. A folder that one rank rejects is used by none.
    """

    source: str
    step: int
    why: str
    attempt: int | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A state after whose load the same fault came back. All copies hold the same bytes, so all of them are meant.

    Attributes:
        at_unix_s: when that was found. What was saved later is another state, also with the same step and attempt: a
            new run counts its attempts from 0 again.
    """

    step: int
    attempt: int
    why: str
    at_unix_s: float = math.inf

    def is_of(self, step: int, attempt: int, saved_unix_s: float) -> bool:
        return (self.step, self.attempt) == (step, attempt) and saved_unix_s <= self.at_unix_s


@dataclass(frozen=True, slots=True)
class Refused:
    """A place that was not used although it is newer than what was chosen, or nearer and as new."""

    tier: TierName
    step: int
    attempt: int
    why: str
    path: str = ""

    def __str__(self) -> str:
        place = self.path or f"{self.tier.value} of attempt {self.attempt}"
        return f"step {self.step} ({place}): {self.why}"


@dataclass(frozen=True, slots=True)
class Choice:
    """From where to resume.

    Attributes:
        source: what most ranks do: PEER when at least one of them needs its partner's copy; see *tiers*.
        step, attempt, generation: -1 with source NONE, *generation* also with FOLDER.
        path, tier: of the folder, else empty and the farther of the tiers in use; None with source NONE.
        tiers: where each rank gets its part, by rank.
        refused: newest first.
        why: one sentence for people.
    """

    source: Source
    step: int = -1
    attempt: int = -1
    generation: int = -1
    path: str = ""
    tier: TierName | None = None
    tiers: Mapping[int, TierName] = field(default_factory=dict)
    refused: tuple[Refused, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """*why_not* is empty when it can be used."""

    tier: TierName
    step: int
    attempt: int
    why_not: str
    generation: int = -1
    path: str = ""
    verified: bool = False
    tiers: Mapping[int, TierName] = field(default_factory=dict)
    saved_unix_s: float = 0.0

    @property
    def order(self) -> tuple[int, int, int, bool, int, str]:
        return (self.step, self.attempt, -_NEAREST[self.tier], self.verified, self.generation, self.path)


def choose(
    offers: Mapping[int, Offer],
    folders: Iterable[FolderOffer],
    rejected: Sequence[Rejected] = (),
    quarantined: Sequence[Quarantined] = (),
    rollback_to: int | None = None,
) -> Choice:
    """The newest usable state by step, then by attempt; among equals the nearest tier.

    From memory only when every rank has the same save of the same attempt with the layout that it has now; a folder
    fits any number of ranks.

    Args:
        offers: of every rank of the attempt, also of those that hold nothing.
        folders: as listed, of any tier and in any order.
        rollback_to: nothing newer than this step.
    """
    candidates = [*_from_memory(offers, rejected), *_from_folders(offers.keys(), folders, rejected)]
    refused: list[Refused] = []
    for candidate in sorted(candidates, key=lambda c: c.order, reverse=True):
        why_not = candidate.why_not
        if rollback_to is not None and candidate.step > rollback_to:
            why_not = f"newer than step {rollback_to}, to which training goes back"
        for q in quarantined:
            if q.is_of(candidate.step, candidate.attempt, candidate.saved_unix_s):
                why_not = f"quarantined: {q.why}"
        if not why_not:
            return _chosen(candidate, refused, rollback_to)
        refused.append(Refused(candidate.tier, candidate.step, candidate.attempt, why_not, candidate.path))
    why = "there is no checkpoint" if not refused else f"none of {len(refused)} checkpoints can be used"
    return Choice(Source.NONE, refused=tuple(refused), why=why)


def _chosen(best: _Candidate, refused: Sequence[Refused], rollback_to: int | None) -> Choice:
    if best.tier is TierName.MEMORY:
        source, where = Source.MEMORY, "from memory"
    elif best.tier is TierName.PEER:
        source = Source.PEER
        ranks = [rank for rank, tier in best.tiers.items() if tier is TierName.PEER]
        where = f"from memory, {rank_words(ranks)} from the memory of the partner node"
    else:
        source, where = Source.FOLDER, f"from {best.path}"
    newest = "the newest that all ranks can get"
    if rollback_to is not None:
        newest = f"the newest up to step {rollback_to}"
    elif refused:
        newest = f"the newest that can be used; {len(refused)} newer or nearer could not"
    return Choice(
        source,
        best.step,
        best.attempt,
        best.generation,
        best.path,
        best.tier,
        best.tiers,
        tuple(refused),
        f"step {best.step} {where}: {newest}",
    )


def _from_memory(offers: Mapping[int, Offer], rejected: Sequence[Rejected]) -> list[_Candidate]:
    saves = {(s.step, s.attempt, s.generation) for offer in offers.values() for s in offer.snapshots}
    out = []
    for step, attempt, generation in saves:
        saved_unix_s = 0.0
        tiers: dict[int, TierName] = {}
        lacking: dict[str, list[int]] = {}  # reason -> ranks
        for rank, offer in sorted(offers.items()):
            held = [s for s in offer.snapshots if (s.step, s.attempt, s.generation) == (step, attempt, generation)]
            saved_unix_s = max(saved_unix_s, *(s.saved_unix_s for s in held), 0.0)
            tier, why_not = _usable(rank, offer.digest, held, rejected)
            if tier is not None:
                tiers[rank] = tier
            else:
                lacking.setdefault(why_not, []).append(rank)
        farthest = max(tiers.values(), key=_NEAREST.__getitem__, default=TierName.MEMORY)
        why_not = "; ".join(f"{rank_words(ranks)}: {reason}" for reason, ranks in lacking.items())
        out.append(_Candidate(farthest, step, attempt, why_not, generation, tiers=tiers, saved_unix_s=saved_unix_s))
    return out


def _usable(
    rank: int, digest: str, held: Sequence[Snapshot], rejected: Sequence[Rejected]
) -> tuple[TierName | None, str]:
    """The nearest tier from which *rank* can load, or why there is none."""
    why_not = "not held"
    for snapshot in sorted(held, key=lambda s: (_NEAREST[s.tier], s.superseded, s.digest)):
        if snapshot.tier not in _IN_MEMORY:
            continue
        if snapshot.superseded:
            why_not = _SET_ASIDE
            continue
        if snapshot.digest != digest:
            why_not = "the state is laid out differently now (another number of ranks, or another model)"
            continue
        refusal = next(
            (
                r
                for r in rejected
                if r.source == snapshot.tier.value
                and r.step == snapshot.step
                and r.attempt in (None, snapshot.attempt)
                and r.rank in (None, rank)
            ),
            None,
        )
        if refusal is None:
            return snapshot.tier, ""
        why_not = f"rejected: {refusal.why}"
    return None, why_not


def _from_folders(
    ranks: Iterable[int], folders: Iterable[FolderOffer], rejected: Sequence[Rejected]
) -> list[_Candidate]:
    everybody = frozenset(ranks)
    seen: dict[tuple[TierName, int, int, str], list[FolderOffer]] = {}
    for folder in folders:
        seen.setdefault((folder.tier, folder.step, folder.attempt, folder.path), []).append(folder)
    return [
        _Candidate(
            tier,
            step,
            attempt,
            _folder_refusal(everybody, same, rejected),
            path=path,
            verified=any(f.verified for f in same),
            tiers=dict.fromkeys(sorted(everybody), tier),
            saved_unix_s=max(f.saved_unix_s for f in same),
        )
        for (tier, step, attempt, path), same in seen.items()
    ]


def _folder_refusal(everybody: frozenset[int], same: Sequence[FolderOffer], rejected: Sequence[Rejected]) -> str:
    """Why a folder, as seen by one or more nodes, cannot be used; empty when it can."""
    folder = same[0]
    if folder.tier in _IN_MEMORY:
        return "a folder cannot be in memory"
    problem = min((f.problem for f in same if f.problem), default="")
    if problem:
        return f"not complete: {problem}"
    if any(f.superseded for f in same):
        return _SET_ASIDE
    for r in rejected:
        # Paths are compared as paths: a trailing slash must not bring a damaged checkpoint back.
        is_meant = r.source in (ANY_FOLDER, folder.tier.value) or Path(r.source) == Path(folder.path)
        if is_meant and r.step == folder.step and r.attempt in (None, folder.attempt):
            by = "" if r.rank is None else f" by rank {r.rank}"
            return f"rejected{by}: {r.why}"
    readers: set[int] = set()
    for f in same:
        readers |= everybody if f.ranks is None else f.ranks
    missing = sorted(everybody - readers)
    return f"{rank_words(missing)}: cannot be read there" if missing else ""
