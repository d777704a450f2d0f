"""From differing digests to rank, tensor, element and bit."""

from __future__ import annotations

import base64
from typing import Any

from steadyrun.detect.sdc import Cause
from steadyrun.integrity.coefficients import MASK, large_factors, small_factors
from steadyrun.node.inquiry import Ask, Diverged, Found, Inquiry, inquire, inquire_at_rest
from steadyrun.node.rootswire import pack_names, pack_roots

NAMES = ("a.weight", "b.weight", "c.weight", "d.weight")
KEY = 5
WEIGHT_100 = small_factors()[0] * large_factors()[100]
LEAF = 1234567


class Ranks:
    """Ranks that answer, of which some hold wrong bytes in some tensors."""

    def __init__(self, world: int, wrong: dict[int, dict[str, int]], values: dict[int, bytes] | None = None) -> None:
        self.world, self.wrong, self.values = world, wrong, values or {}
        self.asked: list[Ask] = []
        self.mute: set[int] = set()
        self.saved = b""

    def root(self, rank: int, name: str) -> int:
        return hash(name) & MASK ^ self.wrong.get(rank, {}).get(name, 0)

    def digests(self) -> dict[int, dict[int, int]]:
        return {KEY: {r: hash(tuple(self.root(r, n) for n in NAMES)) & MASK for r in range(self.world)}}

    def answer(self, rank: int, ask: Ask) -> dict[str, Any]:
        if ask.what == "roots":
            roots = pack_roots([self.root(rank, n) for n in NAMES])
            return {"names": pack_names(NAMES), "roots": roots, "owners": {}, "compared": len(NAMES)}
        if ask.what == "leaves":
            return {"places": [self.leaves(rank, *place) for place in ask.fields["places"]]}
        if ask.what == "newest":
            return {"step": 60, "step_s": 0.5}
        if ask.what == "saved":
            data = base64.b64encode(self.saved).decode()
            return {"captures": [{"tensor": ask.fields["tensor"], "leaf": 0, "bytes": data}]}
        assert ask.what == "capture"
        data = base64.b64encode(self.values[rank]).decode()
        capture = {"tensor": ask.fields["tensor"], "step": ask.fields["step"], "leaf": 0, "bytes": data}
        return {"captures": [capture]}

    def leaves(self, rank: int, name: str, step: int, moment: str) -> dict[str, Any]:
        moved = self.wrong.get(rank, {}).get(name, 0)
        leaf = LEAF + WEIGHT_100 * moved
        place = {"tensor": name, "step": step, "moment": moment}
        return {
            **place,
            "leaves": pack_roots([leaf & MASK]),
            "size_bytes": 4096,
            "element_bytes": 4,
            "dtype": "float32",
        }

    def run(self, inquiry: Inquiry) -> Found:
        inquiry.begin(0.0)
        while (ask := inquiry.ask) is not None:
            self.asked.append(ask)
            for rank in ask.ranks:
                if rank not in self.mute:
                    inquiry.hear(rank, self.answer(rank, ask))
            assert inquiry.look(100.0 if self.mute else 0.0)
        assert inquiry.found is not None
        return inquiry.found

    def inquire(self, last_good: int | None = 39, at_rest: dict[int, tuple[str, ...]] | None = None) -> Found:
        return self.run(Inquiry(inquire(Diverged(49, "after_step", self.digests(), last_good, at_rest or {}))))


def test_one_of_three_is_named_with_tensor_element_and_bit() -> None:
    ranks = Ranks(3, {1: {"b.weight": 1 << 9}})
    found = ranks.inquire()
    j = found.judgement
    assert (j.cause, j.ranks, j.names) == (Cause.DEVICE, (1,), ("b.weight",))
    assert (j.first_bad_step, j.last_good_step) == (49, 39)
    (spot,) = found.spots
    assert (spot.rank, spot.tensor, spot.witness, spot.leaves, spot.is_all) == (1, "b.weight", 0, 1, True)
    assert [(e.element, e.bits) for e in spot.elements] == [(100, (9,))]
    assert spot.words() == "b.weight (float32): element 100, bit 9"


def test_only_one_rank_of_each_side_is_asked() -> None:
    ranks = Ranks(64, {17: {"a.weight": 4}})
    ranks.inquire()
    assert [(a.what, a.ranks) for a in ranks.asked] == [("roots", (0, 17)), ("leaves", (0, 17))]


def test_all_tensors_of_all_ranks_but_one_are_software() -> None:
    ranks = Ranks(4, {r: {n: r << 8 | i + 1 for i, n in enumerate(NAMES)} for r in (1, 2, 3)})
    found = ranks.inquire()
    assert found.judgement.cause is Cause.SOFTWARE
    assert "software" in found.judgement.sentence


def test_two_replicas_are_settled_by_what_changed_at_rest() -> None:
    ranks = Ranks(2, {1: {"b.weight": 1}})
    found = ranks.inquire(at_rest={1: ("b.weight",)})
    assert (found.judgement.cause, found.judgement.ranks) == (Cause.DEVICE, (1,))
    assert found.spots[0].elements[0].element == 100


def bytes_of(value: bytes) -> bytes:
    data = bytearray(b"\x00\x00\x00\x3d" * 1024)
    data[400:404] = value
    return bytes(data)


def test_two_replicas_are_settled_by_a_value_that_no_training_comes_to() -> None:
    good, bad = bytes_of(b"\x00\x00\x00\x3d"), bytes_of(b"\x00\x00\x00\x7d")  # one bit of the exponent
    ranks = Ranks(2, {1: {"b.weight": 1 << 30}}, {0: bad, 1: good})
    found = ranks.inquire()
    assert (found.judgement.cause, found.judgement.ranks) == (Cause.DEVICE, (0,))
    (spot,) = found.spots
    assert (spot.rank, spot.witness) == (0, 1)
    assert [(e.element, e.bits, e.own, e.other) for e in spot.elements] == [(100, (30,), 0x7D000000, 0x3D000000)]


def test_two_replicas_are_settled_by_a_value_too_far_from_the_verified_checkpoint() -> None:
    moved = b"\x00\x04\x00\x3d" * 1024  # all have moved a little since
    bad = bytearray(moved)
    bad[400:404] = b"\x00\x04\x10\x3d"  # one much farther, and it is not large
    ranks = Ranks(2, {1: {"b.weight": 1 << 20}}, {0: moved, 1: bytes(bad)})
    assert ranks.inquire().judgement.cause is Cause.UNDECIDED
    ranks.saved = bytes_of(b"\x00\x00\x00\x3d")
    found = ranks.inquire()
    assert (found.judgement.cause, found.judgement.ranks) == (Cause.DEVICE, (1,))
    assert "verified checkpoint" in found.judgement.sentence


def test_two_replicas_with_a_small_difference_stay_undecided_and_are_both_located() -> None:
    ranks = Ranks(2, {1: {"b.weight": 2}}, {0: bytes_of(b"\x00\x00\x00\x3d"), 1: bytes_of(b"\x02\x00\x00\x3d")})
    found = ranks.inquire()
    assert (found.judgement.cause, found.judgement.ranks) == (Cause.UNDECIDED, (0, 1))
    assert found.spots[0].elements[0].bits == (1,)


def test_bytes_are_taken_at_one_step_that_both_ranks_have_still_before_them() -> None:
    same = bytes_of(b"\x00\x00\x00\x3d")
    ranks = Ranks(2, {1: {"b.weight": 2}}, {0: same, 1: same})
    ranks.inquire()
    capture = next(a for a in ranks.asked if a.what == "capture")
    assert capture.fields["step"] > 60 + 4 / 0.5
    assert capture.limit_s > (capture.fields["step"] - 60) * 0.5


def test_ranks_that_hash_different_tensors_and_agree_on_the_others_are_fine() -> None:
    ranks = Ranks(2, {})
    digests = {KEY: {0: 1, 1: 2}}
    found = ranks.run(Inquiry(inquire(Diverged(49, "after_step", digests, 39))))
    assert found.judgement.cause is Cause.NONE


def test_silent_ranks_cost_the_place_and_not_the_verdict() -> None:
    ranks = Ranks(3, {1: {"b.weight": 8}})
    inquiry = Inquiry(inquire(Diverged(49, "after_step", ranks.digests(), 39)))
    inquiry.begin(0.0)
    assert inquiry.ask is not None
    for rank in inquiry.ask.ranks:
        inquiry.hear(rank, ranks.answer(rank, inquiry.ask))
    assert inquiry.look(0.0)
    assert not inquiry.look(1.0)
    inquiry.hurry(1.0)
    assert inquiry.found is not None
    assert inquiry.found.judgement.ranks == (1,)
    assert inquiry.found.spots[0].why_not == "rank 1 did not answer"


def test_nonsense_in_answers_is_survived() -> None:
    nonsense: list[dict[str, Any]] = [
        {},
        {"names": 3, "roots": None},
        {"names": "AAAA", "roots": "AAAA"},
        {"names": pack_names(NAMES), "roots": pack_roots([1])},
        {"names": pack_names(NAMES), "roots": pack_roots([1] * 4), "owners": [1]},
    ]
    for answer in nonsense:
        inquiry = Inquiry(inquire(Diverged(49, "after_step", {KEY: {0: 1, 1: 2}}, 39)))
        inquiry.begin(0.0)
        inquiry.hear(0, answer)
        inquiry.hear(1, answer)
        inquiry.hurry(0.0)
        assert inquiry.found is not None
        assert inquiry.found.judgement.cause is Cause.NONE


# -- at rest -----------------------------------------------------------------------------------------------------------
class Resting(Ranks):
    def leaves(self, rank: int, name: str, step: int, moment: str) -> dict[str, Any]:
        if (step, moment) not in ((49, "after_step"), (50, "before_step")):
            return {"tensor": name, "step": step, "moment": moment, "error": "not kept"}
        before = self.wrong
        self.wrong = before if step == 50 else {}
        try:
            return super().leaves(rank, name, step, moment)
        finally:
            self.wrong = before


def test_what_changed_at_rest_is_compared_with_what_it_was() -> None:
    ranks = Resting(4, {3: {"c.weight": -(1 << 31)}})
    found = ranks.run(Inquiry(inquire_at_rest(50, {3: ("c.weight",)}, 3)))
    j = found.judgement
    assert (j.cause, j.ranks, j.first_bad_step, j.last_good_step) == (Cause.DEVICE, (3,), 50, 49)
    (spot,) = found.spots
    assert [(e.element, e.bits) for e in spot.elements] == [(100, (31,))]
    assert [a.ranks for a in ranks.asked] == [(3,)]
