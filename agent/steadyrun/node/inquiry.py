"""From digests that differ to a rank, a tensor, elements and bits, by asking only those whom it takes. Pure.

An inquiry is a generator: it yields what it wants to know of which ranks and is sent their answers, by rank; who does
not answer in time is absent. What it returns is what was found. The ranks train on meanwhile, and nobody waits.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from steadyrun.core.integrity import BEFORE_STEP, MOMENTS
from steadyrun.detect.sdc import Cause, Check, Distances, Group, Judgement, Moment, first_divergence, judge, settle
from steadyrun.detect.sdc.records import Outcome
from steadyrun.detect.sdc.values import farthest, largest, value_of
from steadyrun.integrity.coefficients import LEAF_BYTES, LEAF_WORDS
from steadyrun.integrity.location import compare_leaf, differing_leaves, locate_word
from steadyrun.node.rootswire import unpack_names, unpack_roots

__all__ = ["SAVED", "Ask", "Diverged", "Element", "Found", "Inquiry", "Spot", "inquire", "inquire_at_rest"]

ANSWER_S: Final = 4.0  # over nodes: a question and its answer take a second each
MOST_SIDES: Final = 8  # different digests of one group that are looked into
MOST_SUSPECTS: Final = 4
MOST_TENSORS: Final = 4  # of each suspect
MOST_LEAVES: Final = 4  # of a tensor
MOST_ELEMENTS: Final = 16  # of a tensor
CAPTURE_AHEAD: Final = 3  # steps; those that are made while the order is on its way come on top
CAPTURE_S: Final = 60.0
BEFORE: Final = MOMENTS[BEFORE_STEP]
FAR_MOVED: Final = 4.0  # times as far as any element beside it has moved since a checkpoint
SAVED: Final = -1  # in place of a rank: the newest verified checkpoint
FAR_OUT: Final = 100.0  # times the largest magnitude beside it


class Ask(NamedTuple):
    """One question to *ranks*."""

    what: str
    ranks: tuple[int, ...]
    fields: Mapping[str, Any]
    limit_s: float = ANSWER_S


Answers = Mapping[int, Mapping[str, Any]]


class Element(NamedTuple):
    """A wrong element of a tensor (of this rank's shard); *own* and *other* are its bytes as numbers, where known."""

    element: int
    bits: tuple[int, ...]
    own: int | None = None
    other: int | None = None


@dataclass(frozen=True, slots=True)
class Spot:
    """What is wrong in one tensor of one rank.

    Attributes:
        witness: with whose copy it was compared; the rank itself: with what it held before.
        elements: those that were found, few at most.
        leaves: how many of its pieces of 256 KiB differ; None where that is not known.
        is_all: *elements* are all that differ.
        differing: numbers of those pieces, the first few.
        scale: the largest number among the others of the pieces, where bytes were compared.
    """

    rank: int
    tensor: str
    witness: int
    dtype: str = ""
    element_bytes: int = 0
    size_bytes: int = 0
    elements: tuple[Element, ...] = ()
    leaves: int | None = None
    is_all: bool = False
    why_not: str = ""
    differing: tuple[int, ...] = ()
    scale: float | None = None

    def words(self) -> str:
        if not self.elements:
            return f"{self.tensor}: {self.why_not or 'not located'}"
        some = "; ".join(self._of(e) for e in self.elements[:3])
        more = "" if self.is_all and len(self.elements) <= 3 else ", and more"
        return f"{self.tensor} ({self.dtype}): {some}{more}"

    def _of(self, e: Element) -> str:
        which = f"bit {e.bits[0]}" if len(e.bits) == 1 else f"bits {', '.join(map(str, e.bits[:8]))}"
        values = ""
        if e.own is not None and e.other is not None:
            width = 2 * self.element_bytes
            values = f" (0x{e.own:0{width}x}, should be 0x{e.other:0{width}x})"
        return f"element {e.element}, {which}{values}" if e.bits else f"element {e.element}{values}"


@dataclass(frozen=True, slots=True)
class Found:
    """The end of an inquiry. *notes*: what could not be done; *since*: the first step that may be wrong, where that is
    not the first that was seen to be."""

    judgement: Judgement
    moment: str
    spots: tuple[Spot, ...] = ()
    notes: tuple[str, ...] = ()
    since: int | None = None


@dataclass(frozen=True, slots=True)
class Diverged:
    """What an inquiry begins with.

    Attributes:
        differing: by group key, what each rank told.
        at_rest: what has changed at rest on which rank so far.
        order_s: an order takes no longer to reach all ranks.
    """

    step: int
    moment: str
    differing: Mapping[int, Mapping[int, int]]
    last_good: int | None
    at_rest: Mapping[int, Sequence[str]] = field(default_factory=dict)
    order_s: float = ANSWER_S


Steps = Generator[Ask, Answers, Found]


# -- replicas ----------------------------------------------------------------------------------------------------------
def inquire(case: Diverged) -> Steps:
    """Replicas of some group differ: who is wrong, and where."""
    roots, groups, counts, notes = yield from _roots_of(case)
    check = Check(case.step, Moment(case.moment), roots)
    divergence = first_divergence(groups, [check])
    if divergence is None:
        told = "; ".join(notes) or "the ranks hash different tensors, and all that they have in common agree"
        return Found(replace(judge(None), sentence=told), case.moment, notes=tuple(notes))
    compared = {r: max(n, counts.get(r, 0)) for r, n in divergence.compared.items()}
    last_good = None if case.last_good is None else Check(case.last_good, Moment.AFTER_STEP, {})
    judgement = judge(replace(divergence, compared=compared, last_good=last_good), case.at_rest)
    witnesses = {
        group.name: next((r for r, root in _held(check, group).items() if root == v.root), None)
        for group, v in divergence.votes
        if v.outcome is Outcome.MINORITY
    }
    spots: list[Spot] = []
    if judgement.cause is Cause.UNDECIDED and len(judgement.ranks) == 2:
        one, other = judgement.ranks
        spots = yield from _locate_all(case, [(one, name, other) for name in judgement.names[:MOST_TENSORS]])
        spots, distances = yield from _weighed(spots, case.order_s)
        judgement = settle(judgement, distances=distances)
        if judgement.cause is Cause.DEVICE and judgement.ranks == (other,):
            spots = [_reversed(s) for s in spots]
    elif judgement.cause is Cause.DEVICE:
        wanted = []
        for rank in judgement.ranks[:MOST_SUSPECTS]:
            own = [g.name for g, v in divergence.votes if rank in v.minority]
            for name in own[:MOST_TENSORS]:
                witness = witnesses.get(name, judgement.witness)
                if witness is not None and witness != rank:
                    wanted.append((rank, name, witness))
        spots = yield from _locate_all(case, wanted)
        spots = yield from _cleared(spots, case.order_s)
    return Found(judgement, case.moment, tuple(spots), tuple(notes))


def _held(check: Check, group: Group) -> dict[int, int]:
    return {r: check.roots[r][group.name] for r in group.ranks if group.name in check.roots.get(r, ())}


def _roots_of(
    case: Diverged,
) -> Generator[Ask, Answers, tuple[dict[int, dict[str, int]], list[Group], dict[int, int], list[str]]]:
    """Roots by rank and tensor, groups, how many tensors each rank compares in all, and what was not told.

    One rank of each side tells its roots; the others of that side hold the same.
    """
    roots: dict[int, dict[str, int]] = {}
    counts: dict[int, int] = {}
    groups: list[Group] = []
    notes: list[str] = []
    for key, told in case.differing.items():
        sides = [digest for digest, _ in Counter(told.values()).most_common(MOST_SIDES)]
        held_by = {digest: [r for r, d in told.items() if d == digest] for digest in sides}
        speakers = tuple(ranks[0] for ranks in held_by.values())
        answers = yield Ask("roots", speakers, {"step": case.step, "moment": case.moment, "key": key})
        names: dict[str, int | None] = {}
        members: list[int] = []
        for ranks in held_by.values():
            answer = answers.get(ranks[0], {})
            try:
                own = dict(zip(unpack_names(answer["names"]), unpack_roots(answer["roots"]), strict=True))
                owners = {str(n): int(r) for n, r in dict(answer.get("owners", {})).items()}
                counts.update(dict.fromkeys(ranks, int(answer.get("compared", len(own)))))
            except (KeyError, ValueError, TypeError) as e:
                notes.append(f"rank {ranks[0]} did not tell its roots: {answer.get('error', e)}")
                continue
            for rank in ranks:
                roots.setdefault(rank, {}).update(own)
            members += ranks
            names.update({n: owners.get(n) for n in own if names.get(n) is None})
        groups += [Group(name, tuple(sorted(members)), owner) for name, owner in sorted(names.items())]
    return roots, groups, counts, notes


# -- at rest -----------------------------------------------------------------------------------------------------------
def inquire_at_rest(step: int, changed: Mapping[int, Sequence[str]], still: int) -> Steps:
    """Tensors that changed before the update of *step* although nothing was to change them.

    Args:
        changed: their names, by rank.
        still: how many ranks have been looked at and hold what they held.
    """
    ranks = tuple(sorted(changed))
    names = tuple(sorted({n for own in changed.values() for n in own}))
    wanted = [(rank, name) for rank in ranks[:MOST_SUSPECTS] for name in list(changed[rank])[:MOST_TENSORS]]
    places = [
        [name, *when]
        for name in names
        for when in ((step, BEFORE), *((step - 1, moment) for moment in MOMENTS if moment != BEFORE))
    ]
    answers: Answers = {}
    if wanted:
        answers = yield Ask("leaves", tuple(sorted({r for r, _ in wanted})), {"places": places})
    spots = [
        _compare(rank, name, rank, _leaves(answers, rank, name, step, BEFORE), _leaves(answers, rank, name, step - 1))
        for rank, name in wanted
    ]
    told = " and ".join(f"rank {r}" for r in ranks)
    few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    beside = f"; {still} other rank{'s hold what they' if still != 1 else ' holds what it'} held" if still else ""
    sentence = (
        f"{told} holds wrong bytes in {few}: they changed between the updates of step {step - 1} and {step}{beside}"
    )
    judgement = Judgement(Cause.DEVICE, ranks, names, None, step, step - 1, 0.97 if still else 0.9, sentence)
    return Found(judgement, BEFORE, tuple(spots))


# -- places ------------------------------------------------------------------------------------------------------------
def _locate_all(case: Diverged, wanted: Sequence[tuple[int, str, int]]) -> Generator[Ask, Answers, list[Spot]]:
    """*wanted*: suspect, tensor, witness."""
    if not wanted:
        return []
    ranks = tuple(sorted({r for suspect, _, witness in wanted for r in (suspect, witness)}))
    places = [[name, case.step, case.moment] for name in sorted({name for _, name, _ in wanted})]
    answers = yield Ask("leaves", ranks, {"places": places})
    return [
        _compare(
            suspect,
            name,
            witness,
            _leaves(answers, suspect, name, case.step, case.moment),
            _leaves(answers, witness, name, case.step, case.moment),
        )
        for suspect, name, witness in wanted
    ]


class _Leaves(NamedTuple):
    leaves: tuple[int, ...]
    size_bytes: int
    element_bytes: int
    dtype: str


def _leaves(answers: Answers, rank: int, name: str, step: int, moment: str | None = None) -> _Leaves | str:
    """The leaves that a rank told, or why it did not; *moment* None: of whichever moment of the step they are."""
    answer = answers.get(rank)
    if answer is None:
        return f"rank {rank} did not answer"
    why = f"rank {rank} told nothing of it"
    for told in answer.get("places", ()):
        if told.get("tensor") != name or told.get("step") != step or moment not in (None, told.get("moment")):
            continue
        try:
            element_bytes = int(told["element_bytes"])
            if element_bytes not in (1, 2, 4, 8, 16):
                raise ValueError(f"elements of {element_bytes} bytes")
            return _Leaves(unpack_roots(told["leaves"]), int(told["size_bytes"]), element_bytes, str(told["dtype"]))
        except (KeyError, ValueError, TypeError) as e:
            why = f"rank {rank}: {told.get('error', e)}"
    return why


def _compare(rank: int, name: str, witness: int, own: _Leaves | str, other: _Leaves | str) -> Spot:
    if isinstance(own, str) or isinstance(other, str):
        return Spot(rank, name, witness, why_not=own if isinstance(own, str) else str(other))
    try:
        leaves = differing_leaves(own.leaves, other.leaves)
    except ValueError as e:
        return Spot(rank, name, witness, own.dtype, own.element_bytes, why_not=str(e))
    elements: list[Element] = []
    is_all = len(leaves) <= MOST_LEAVES
    for leaf in leaves[:MOST_LEAVES]:
        words = min(LEAF_WORDS, -(-(own.size_bytes - leaf * LEAF_BYTES) // 4))
        word = locate_word(own.leaves[leaf], other.leaves[leaf], words)
        if word is None:
            is_all = False
            continue
        bit = word.element_bit(own.element_bytes)
        elements += [Element(e, () if bit is None else (bit,)) for e in word.elements(leaf, own.element_bytes)]
    why_not = "" if elements else f"{len(leaves)} pieces of 256 KiB differ in more than one word"
    return Spot(
        rank,
        name,
        witness,
        own.dtype,
        own.element_bytes,
        own.size_bytes,
        tuple(elements),
        len(leaves),
        is_all and bool(elements),
        why_not,
        leaves[:MOST_LEAVES],
    )


def _reversed(spot: Spot) -> Spot:
    elements = tuple(e._replace(own=e.other, other=e.own) for e in spot.elements)
    return replace(spot, rank=spot.witness, witness=spot.rank, elements=elements)


# -- bytes -------------------------------------------------------------------------------------------------------------
def _cleared(spots: Sequence[Spot], order_s: float) -> Generator[Ask, Answers, list[Spot]]:
    """The spots; where sums have not shown the elements, from the bytes themselves, if they can be had."""
    out: list[Spot] = []
    for spot in spots:
        if spot.leaves and not spot.elements:
            spot, _ = yield from _capture(spot, order_s)
        out.append(spot)
    return out


def _weighed(spots: Sequence[Spot], order_s: float) -> Generator[Ask, Answers, tuple[list[Spot], Distances | None]]:
    """Two sides: the bytes of both, and how far the values of each lie from where they can be."""
    out: list[Spot] = []
    distances: Distances | None = None
    for spot in spots:
        if spot.leaves is not None:
            spot, copies = yield from _capture(spot, order_s)
            if spot.is_all and distances is None:
                distances = _far_out(spot)
            if spot.is_all and distances is None:
                distances = yield from _far_from_saved(spot, copies)
        out.append(spot)
    return out, distances


# The bytes of a piece, of suspect and witness.
Copies = Mapping[int, tuple[bytes, bytes]]


def _capture(spot: Spot, order_s: float) -> Generator[Ask, Answers, tuple[Spot, Copies]]:
    """The spot with the bytes themselves, taken by suspect and witness after one and the same step, where they can be.

    Replicas get the same gradients, so that what is wrong stays what is wrong.
    """
    pair = (spot.rank, spot.witness)
    told = yield Ask("newest", pair, {})
    try:
        newest = max(int(told[r]["step"]) for r in pair)
        step_s = max(float(told[r]["step_s"]) for r in pair)
    except (KeyError, ValueError, TypeError):
        return replace(spot, why_not=spot.why_not or "a rank has not told where it is"), {}
    step = newest + CAPTURE_AHEAD + math.ceil(order_s / max(step_s, 0.001))
    limit_s = ANSWER_S + min((step - newest) * step_s * 2, CAPTURE_S)
    leaves = sorted({e.element * spot.element_bytes // LEAF_BYTES for e in spot.elements})
    wanted = leaves[:MOST_LEAVES] or list(spot.differing[:MOST_LEAVES])
    answers = yield Ask("capture", pair, {"tensor": spot.tensor, "leaves": wanted, "step": step}, limit_s)
    own, other = (_copies(answers.get(r, {}), spot.tensor, step) for r in pair)
    copies = {k: (own[k], other[k]) for k in sorted(own.keys() & other.keys()) if len(own[k]) == len(other[k])}
    elements: list[Element] = []
    count = 0
    for leaf, (mine, theirs) in copies.items():
        found, number = compare_leaf(mine, theirs, leaf, spot.element_bytes, MOST_ELEMENTS - len(elements))
        count += number
        elements += [Element(d.element, d.bits, d.own, d.other) for d in found]
    if not elements:
        return replace(spot, why_not=spot.why_not or "the bytes could not be had"), copies
    is_all = count == len(elements) and spot.leaves == len(copies)
    beside = [largest(theirs, spot.dtype, _places(elements, leaf, spot)) for leaf, (_, theirs) in copies.items()]
    scale = max((b for b in beside if b is not None), default=None)
    return replace(spot, elements=tuple(elements), is_all=is_all, why_not="", scale=scale), copies


def _places(elements: Sequence[Element], leaf: int, spot: Spot) -> list[int]:
    """Places of elements in a piece."""
    first = leaf * LEAF_BYTES // spot.element_bytes
    return [e.element - first for e in elements]


def _copies(answer: Mapping[str, Any], tensor: str, step: int | None) -> dict[int, bytes]:
    try:
        return {
            int(told["leaf"]): base64.b64decode(told["bytes"])
            for told in answer.get("captures", ())
            if told["tensor"] == tensor and told.get("step") == step
        }
    except (KeyError, ValueError, TypeError):
        return {}


def _numbers(spot: Spot) -> list[tuple[Element, float, float]]:
    """The elements with both values, as far as they are floats."""
    out = []
    for e in spot.elements:
        own, other = (value_of(v, spot.dtype) if v is not None else None for v in (e.own, e.other))
        if own is not None and other is not None:
            out.append((e, own, other))
    return out


def _far_out(spot: Spot) -> Distances | None:
    """How large the values are where two sides differ, against all others of the same pieces.

    A flipped high bit of an exponent makes a number that no training comes to; a low bit says nothing.
    """
    bound = FAR_OUT * (spot.scale or math.inf)
    for _, own, other in _numbers(spot):
        if not (abs(own) <= bound and abs(other) <= bound):
            why = f"its value is {FAR_OUT:g} times as large as any other beside it"
            return Distances({spot.rank: abs(own), spot.witness: abs(other)}, bound, why)
    return None


def _far_from_saved(spot: Spot, copies: Copies) -> Generator[Ask, Answers, Distances | None]:
    """How far the values lie from the newest verified checkpoint, against how far all others beside them have moved."""
    numbers = _numbers(spot)
    if not numbers:
        return None
    fields = {"tensor": spot.tensor, "leaves": list(copies), "size_bytes": spot.size_bytes}
    told = yield Ask("saved", (SAVED,), fields)
    saved = _copies(told.get(SAVED, {}), spot.tensor, None)
    for element, own, other in numbers:
        leaf = element.element * spot.element_bytes // LEAF_BYTES
        if leaf not in copies or len(saved.get(leaf, b"")) != len(copies[leaf][1]):
            continue
        (place,) = _places([element], leaf, spot)
        moved = farthest(copies[leaf][1], saved[leaf], spot.dtype, _places(spot.elements, leaf, spot))
        size = spot.element_bytes
        was = value_of(int.from_bytes(saved[leaf][place * size : (place + 1) * size], "little"), spot.dtype)
        if not moved or was is None:
            continue
        return Distances({spot.rank: abs(own - was), spot.witness: abs(other - was)}, FAR_MOVED * moved)
    return None


# -- driving -----------------------------------------------------------------------------------------------------------
class Inquiry:
    """An inquiry under way: which question is open, and who has answered."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._answers: dict[int, Mapping[str, Any]] = {}
        self._until_s = math.inf
        self.ask: Ask | None = None
        self.found: Found | None = None

    def begin(self, now_s: float) -> None:
        self._go_on(None, now_s)

    def hear(self, rank: int, answer: Mapping[str, Any]) -> None:
        """An answer to the open question."""
        if self.ask is not None and rank in self.ask.ranks:
            self._answers[rank] = answer

    def look(self, now_s: float) -> bool:
        """Whether there is another question now, or the end: all have answered, or their time is over."""
        if self.ask is None or (now_s < self._until_s and not self._answers.keys() >= set(self.ask.ranks)):
            return False
        self._go_on(self._answers, now_s)
        return True

    def hurry(self, now_s: float) -> None:
        """To the end with what there is: nobody answers any more."""
        while self.found is None:
            self._go_on(self._answers, now_s)

    def _go_on(self, answers: Answers | None, now_s: float) -> None:
        try:
            self.ask = next(self._steps) if answers is None else self._steps.send(answers)
        except StopIteration as end:
            self.ask, self.found = None, end.value
            return
        self._answers = {}
        self._until_s = now_s + self.ask.limit_s
