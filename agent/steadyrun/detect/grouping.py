"""Who stands where: ranks grouped by section and top user frame. The majority's place is the scene, not the cause."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steadyrun.core.frames import Activity, Doing, activity_of, callsite, main_stack, user_frame
from steadyrun.core.records import RankEvidence

__all__ = ["Group", "Place", "group_ranks", "join_words", "name_ranks", "place_of", "places_sentence"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank's main thread is: innermost open section, ``train.py:88``, and what it does there."""

    section: str | None
    site: str | None
    activity: Activity


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks at one place, in rank order."""

    place: Place
    ranks: tuple[int, ...]


def place_of(rank: RankEvidence, script: str = "") -> Place:
    """Where *rank* is, from its main stack and the innermost section of its main thread."""
    stack = main_stack(rank.stacks)
    frames = stack.frames if stack is not None else ()
    lane = [s for s in rank.sections if s.lane == 0]
    section = max(lane, key=lambda s: s.since_s).name if lane else None
    return Place(section, callsite(user_frame(frames, script), script), activity_of(frames, script))


def group_ranks(ranks: Iterable[RankEvidence], script: str = "") -> list[Group]:
    """Groups by (section, top user frame, operation), largest first; equal sizes by their first rank."""
    members: dict[tuple[str | None, str | None, str], list[int]] = {}
    places: dict[tuple[str | None, str | None, str], Place] = {}
    for rank in ranks:
        place = place_of(rank, script)
        key = (place.section, place.site, place.activity.op)
        members.setdefault(key, []).append(rank.rank)
        places.setdefault(key, place)
    groups = [Group(places[k], tuple(sorted(r))) for k, r in members.items()]
    return sorted(groups, key=lambda g: (-len(g.ranks), g.ranks[0]))


def name_ranks(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0, 2 and 3``, ``ranks 0-5 and 7``; at most six parts, the rest counted."""
    parts: list[str] = []
    ordered = sorted(set(ranks))
    i = 0
    while i < len(ordered):
        j = i
        while j + 1 < len(ordered) and ordered[j + 1] == ordered[j] + 1:
            j += 1
        parts += [f"{ordered[i]}-{ordered[j]}"] if j - i >= 2 else [str(r) for r in ordered[i : j + 1]]
        i = j + 1
    more = ""
    if len(parts) > 6:
        more = f" and {len(parts) - 6} more ranges"
        parts = parts[:6]
    return ("rank " if len(ordered) == 1 else "ranks ") + (", ".join(parts) + more if more else join_words(parts))


def join_words(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1] if parts else "none"


def places_sentence(groups: Sequence[Group], world_size: int) -> str:
    """``3 of 4 ranks wait in all_reduce called at train.py:88; rank 1 is in DataLoader at data.py:31``."""
    parts = []
    for i, group in enumerate(groups[:4]):
        many = i == 0 and len(group.ranks) > 1 and len(group.ranks) * 2 > world_size
        who = f"{len(group.ranks)} of {world_size} ranks" if many else name_ranks(group.ranks)
        parts.append(f"{who} {_does(group.place, plural=len(group.ranks) > 1)}")
    if len(groups) > 4:
        parts.append(f"{sum(len(g.ranks) for g in groups[4:])} ranks are in {len(groups) - 4} other places")
    return "; ".join(parts)


def _does(place: Place, plural: bool) -> str:
    is_, wait = ("are", "wait") if plural else ("is", "waits")
    op, site = place.activity.op, place.site
    at = f" at {site}" if site else ""
    called = f" called at {site}" if site else ""
    match place.activity.doing:
        case Doing.COLLECTIVE:
            text = f"{wait} in {op}{called}"
        case Doing.BACKWARD:
            text = f"{is_} in backward{called}"
        case Doing.JOINING:
            text = f"{wait} for the other ranks in {op}{called}"
        case Doing.COMPILING:
            text = f"{is_} compiling{called}"
        case Doing.INPUT:
            text = f"{is_} in the data loader ({op}){at}"
        case Doing.STORAGE:
            text = f"{is_} in a checkpoint ({op}){at}"
        case Doing.DEVICE:
            text = f"{wait} for the device in {op}{called}"
        case Doing.TEARDOWN:
            text = f"{is_} in teardown ({op}){at}"
        case Doing.OWN_WORK:
            text = f"{is_}{at}" if site else f"{is_} in its own code"
        case Doing.UNKNOWN:
            text = "gave no stack"
    return text + (f" (section {place.section})" if place.section else "")
