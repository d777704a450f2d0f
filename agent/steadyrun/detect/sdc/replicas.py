"""Replicas against each other: a vote per tensor, the first step at which they part, and what that means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from steadyrun.detect.sdc.records import Cause, Check, Group, Judgement, Moment, Outcome, Vote

__all__ = ["Divergence", "first_divergence", "judge", "vote"]


def vote(roots: Mapping[int, int]) -> Vote:
    """Who of the ranks that hold one tensor holds something else than more than half of them."""
    if len(roots) < 2:
        return Vote(Outcome.UNKNOWN, None, ())
    root, held = Counter(roots.values()).most_common(1)[0]
    if held == len(roots):
        return Vote(Outcome.AGREED, root, ())
    if 2 * held <= len(roots):
        return Vote(Outcome.TIE, None, tuple(sorted(roots)))
    return Vote(Outcome.MINORITY, root, tuple(sorted(r for r, v in roots.items() if v != root)))


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first check at which replicas of something differ.

    Attributes:
        last_good: the latest check before it that all compared tensors passed.
        votes: of the tensors that differ.
        compared: how many tensors were compared at this check, by rank.
    """

    check: Check
    last_good: Check | None
    votes: tuple[tuple[Group, Vote], ...]
    compared: Mapping[int, int]


def first_divergence(groups: Sequence[Group], checks: Iterable[Check]) -> Divergence | None:
    """The earliest of *checks* (any order, as rings of several nodes give them) that not all replicas pass.

    A check counts as passed once some tensor was compared; ranks that are missing are not waited for.
    """
    last_good: Check | None = None
    for check in sorted(checks, key=_order):
        differing: list[tuple[Group, Vote]] = []
        compared: Counter[int] = Counter()
        for group in groups:
            held = {r: check.roots[r][group.name] for r in group.ranks if group.name in check.roots.get(r, ())}
            outcome = vote(held)
            if outcome.outcome is Outcome.UNKNOWN:
                continue
            compared.update(held.keys())
            if outcome.outcome is not Outcome.AGREED:
                differing.append((group, outcome))
        if differing:
            return Divergence(check, last_good, tuple(differing), dict(compared))
        if compared:
            last_good = check
    return None


def judge(divergence: Divergence | None, at_rest: Mapping[int, Collection[str]] | None = None) -> Judgement:
    """What a divergence means.

    - A minority whose bytes changed at rest: its GPU (or host memory), for sure.
    - A minority that differs in no more than half of its tensors: its GPU.
    - More than half differ, of the replicas (no value that most hold, among three or more) or of a rank's tensors: a
      missed synchronisation, a bad load or different code. One wrong scalar on one GPU (a clipping factor) looks the
      same; a replay tells.
    - Two sides: undecided, see ``two.settle``. A tensor with an owner: the receiver that differs from owner and others
      was sent wrong bytes or holds them wrong; the owner, when all receivers agree against it.

    Args:
        at_rest: what changed at rest, by rank (``changed_at_rest`` of any steps up to the divergence).
    """
    if divergence is None:
        return Judgement(Cause.NONE, (), (), None, None, None, 1.0, "all replicas agree")
    rested = {r: set(names) for r, names in (at_rest or {}).items()}
    by_rank: dict[int, list[str]] = {}
    tied: dict[int, list[str]] = {}
    scattered: set[int] = set()
    for group, outcome in divergence.votes:
        told = {r: divergence.check.roots[r].get(group.name) for r in outcome.minority}
        if outcome.outcome is Outcome.MINORITY:
            for rank in outcome.minority:
                by_rank.setdefault(rank, []).append(group.name)
            continue
        for rank in outcome.minority:
            tied.setdefault(rank, []).append(group.name)
        if len(set(told.values())) > 2:
            scattered.update(told)
    if scattered and not scattered <= set(rested):
        return _software(divergence, scattered, tied, "no two halves of the replicas agree" if not by_rank else "")
    if by_rank:
        return _minority(divergence, by_rank, rested)
    return _two_sides(divergence, tied, rested)


def _minority(divergence: Divergence, by_rank: dict[int, list[str]], rested: dict[int, set[str]]) -> Judgement:
    whole = {r for r, names in by_rank.items() if 2 * len(names) > divergence.compared[r] > 2 and r not in rested}
    if whole:
        return _software(divergence, whole, by_rank, "more than half of the tensors differ at once")
    ranks = tuple(sorted(by_rank))
    names = tuple(sorted({n for own in by_rank.values() for n in own}))
    group = next(g for g, v in divergence.votes if v.outcome is Outcome.MINORITY)
    witness = next(r for r in group.ranks if r not in by_rank)
    resting = [r for r in ranks if r in rested]
    when = _when(divergence)
    told = " and ".join(f"rank {r}" for r in ranks)
    if len(resting) == len(ranks):
        why, confidence = "its bytes changed while nothing was to change them", 0.99
    elif group.owner is not None and group.owner in ranks:
        why, confidence = "it computes and sends them, and all that received them agree against it", 0.9
    elif group.owner is not None:
        why, confidence = f"rank {group.owner} sent the others what it holds itself", 0.9
    else:
        others = len(group.ranks) - len(ranks)
        why, confidence = f"{others} replicas agree against it", 0.95 if others > 2 else 0.9
    sentence = f"{told} holds wrong bytes in {_few(names)} {when}: {why}"
    return Judgement(Cause.DEVICE, ranks, names, witness, *_steps(divergence), confidence, sentence)


def _two_sides(divergence: Divergence, tied: dict[int, list[str]], rested: dict[int, set[str]]) -> Judgement:
    sides = tuple(sorted(tied))
    names = tuple(sorted({n for own in tied.values() for n in own}))
    when = _when(divergence)
    resting = tuple(r for r in sides if r in rested)
    others = [r for r in sides if r not in rested]
    if resting and others:
        sentence = f"rank {resting[0]} holds wrong bytes in {_few(names)} {when}: they changed while nothing was to"
        return Judgement(Cause.DEVICE, resting, names, others[0], *_steps(divergence), 0.97, sentence)
    whole = [r for r in sides if 2 * len(tied[r]) > divergence.compared[r] > 2]
    if whole and not resting:
        return _software(divergence, set(sides), tied, "more than half of the tensors differ at once")
    told = " and ".join(f"rank {r}" for r in sides)
    sentence = f"{told} hold different bytes in {_few(names)} {when}, and nothing yet tells which is wrong"
    return Judgement(Cause.UNDECIDED, sides, names, None, *_steps(divergence), 0.5, sentence)


def _software(divergence: Divergence, ranks: set[int], by_rank: Mapping[int, Sequence[str]], why: str) -> Judgement:
    names = tuple(sorted({n for r in ranks for n in by_rank.get(r, ())}))
    loaded = divergence.check.moment is Moment.LOADED
    what = "they were loaded differently" if loaded else "a missed synchronisation, a bad load or different code"
    told = ", ".join(map(str, sorted(ranks)))
    reason = f": {why}" if why else ""
    sentence = f"replicas part {_when(divergence)} (ranks {told}){reason}; software rather than a GPU: {what}"
    return Judgement(Cause.SOFTWARE, tuple(sorted(ranks)), names, None, *_steps(divergence), 0.8, sentence)


def _order(check: Check) -> tuple[int, int]:
    return check.step, list(Moment).index(check.moment)


def _steps(divergence: Divergence) -> tuple[int, int | None]:
    good = divergence.last_good
    return divergence.check.step, None if good is None else good.step


def _when(divergence: Divergence) -> str:
    good = divergence.last_good
    since = f"since step {divergence.check.step}"
    return since if good is None else f"{since} (step {good.step} agreed)"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
