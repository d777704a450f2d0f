"""From where all ranks resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.checkpoint.choose import (
    ANY_FOLDER,
    Choice,
    FolderOffer,
    Offer,
    Quarantined,
    Rejected,
    Snapshot,
    Source,
    choose,
)
from steadyrun.checkpoint.saves import TierName

MEMORY, PEER, LOCAL, SHARED, REMOTE = TierName
NOW = "layout of now"


def snapshot(
    step: int, tier: TierName = MEMORY, *, attempt: int = 0, generation: int = -1, digest: str = NOW
) -> Snapshot:
    return Snapshot(step, attempt, step if generation < 0 else generation, digest, tier)


def offers(*by_rank: Sequence[Snapshot]) -> dict[int, Offer]:
    return {rank: Offer(NOW, tuple(held)) for rank, held in enumerate(by_rank)}


def folder(step: int, tier: TierName = SHARED, **more: object) -> FolderOffer:
    fields: dict[str, object] = {"attempt": 0, "path": f"/{tier.value}/step-{step:09d}", "world_size": 2, **more}
    return FolderOffer(tier, step, **fields)  # type: ignore[arg-type]


def test_without_anything_training_starts_at_the_beginning() -> None:
    choice = choose(offers([], []), [])
    assert (choice.source, choice.step, choice.tier, choice.refused) == (Source.NONE, -1, None, ())
    assert choice.why == "there is no checkpoint"


def test_newer_memory_wins_over_an_older_folder_and_the_other_way_round() -> None:
    held = offers([snapshot(8)], [snapshot(8)])
    assert choose(held, [folder(7)]).source is Source.MEMORY
    newer = choose(held, [folder(9)])
    assert (newer.source, newer.step, newer.path) == (Source.FOLDER, 9, "/shared/step-000000009")
    assert dict(newer.tiers) == {0: SHARED, 1: SHARED}


def test_on_equal_steps_the_nearest_tier_is_used() -> None:
    folders = [folder(8, REMOTE), folder(8, SHARED), folder(8, LOCAL)]
    assert choose(offers([snapshot(8)], [snapshot(8)]), folders).tier is MEMORY
    assert choose(offers([snapshot(8, PEER)], [snapshot(8)]), folders).tier is PEER
    assert choose(offers([], []), folders).tier is LOCAL
    assert choose(offers([], []), folders[:2]).tier is SHARED
    assert choose(offers([], []), folders[:1]).tier is REMOTE


def test_of_one_step_the_later_attempt_is_used_even_from_farther_away() -> None:
    choice = choose(offers([snapshot(8)], [snapshot(8)]), [folder(8, attempt=2)])
    assert (choice.source, choice.attempt) == (Source.FOLDER, 2)


def test_a_rank_whose_node_is_new_gets_its_part_from_the_partner() -> None:
    choice = choose(offers([snapshot(8), snapshot(8, PEER)], [snapshot(8, PEER)]), [folder(7)])
    assert (choice.source, choice.tier) == (Source.PEER, PEER)
    assert dict(choice.tiers) == {0: MEMORY, 1: PEER}
    assert "rank 1 from the memory of the partner node" in choice.why


def test_a_save_that_one_rank_lacks_is_refused_with_the_ranks_named() -> None:
    choice = choose(offers([snapshot(8), snapshot(7)], [snapshot(7)], [snapshot(7)]), [])
    assert choice.step == 7
    assert [str(r) for r in choice.refused] == ["step 8 (memory of attempt 0): ranks 1, 2: not held"]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (snapshot(8, attempt=1), "not held"),
        (snapshot(8, generation=99), "not held"),
        (snapshot(8, digest="layout of then"), "laid out differently"),
    ],
)
def test_parts_of_different_saves_are_never_put_together(other: Snapshot, reason: str) -> None:
    choice = choose(offers([snapshot(8)], [other]), [folder(3)])
    assert choice.step == 3
    assert any(reason in r.why for r in choice.refused)


def test_a_snapshot_that_one_rank_rejected_is_replaced_by_the_partners() -> None:
    held = offers([snapshot(8), snapshot(8, PEER)], [snapshot(8)])
    damaged = Rejected("memory", 8, "objects are damaged", rank=0)
    assert dict(choose(held, [], [damaged]).tiers) == {0: PEER, 1: MEMORY}
    both = choose(held, [folder(8)], [damaged, Rejected("peer", 8, "damaged as well", rank=0)])
    assert (both.source, both.tier) == (Source.FOLDER, SHARED)
    assert [r.why for r in both.refused] == ["rank 0: rejected: damaged as well"]


@pytest.mark.parametrize("source", ["shared", "/shared/step-000000008/", ANY_FOLDER])
def test_a_rejected_folder_is_left_out_however_it_is_named(source: str) -> None:
    choice = choose(offers([], []), [folder(8), folder(7)], [Rejected(source, 8, "wrong checksum", rank=1)])
    assert choice.step == 7
    assert str(choice.refused[0]) == "step 8 (/shared/step-000000008): rejected by rank 1: wrong checksum"


def test_a_rejection_in_one_tier_leaves_the_copy_in_another() -> None:
    choice = choose(offers([], []), [folder(8, LOCAL), folder(8, SHARED)], [Rejected("local", 8, "cut")])
    assert (choice.step, choice.tier) == (8, SHARED)


def test_a_quarantined_state_is_refused_in_every_tier() -> None:
    held = offers([snapshot(8), snapshot(6)], [snapshot(8), snapshot(6)])
    choice = choose(held, [folder(8), folder(5)], quarantined=[Quarantined(8, 0, "NaN came back twice")])
    assert (choice.source, choice.step) == (Source.MEMORY, 6)
    assert [r.tier for r in choice.refused] == [MEMORY, SHARED]
    assert all("quarantined: NaN came back twice" in r.why for r in choice.refused)
    # What a later attempt has saved at that step is another state.
    assert choose(held, [folder(8, attempt=1)], quarantined=[Quarantined(8, 0, "NaN")]).attempt == 1


def test_what_was_saved_after_the_quarantine_is_another_state() -> None:
    poisoned = [Quarantined(8, 0, "NaN", at_unix_s=1000.0)]
    again = folder(8, saved_unix_s=1001.0)
    assert choose(offers([], []), [folder(8, saved_unix_s=999.0)], quarantined=poisoned).source is Source.NONE
    assert choose(offers([], []), [again], quarantined=poisoned).step == 8
    held = [Snapshot(8, 0, 1, NOW, MEMORY, at) for at in (999.0, 1001.0)]
    assert choose(offers(held[:1]), [], quarantined=poisoned).source is Source.NONE
    assert choose(offers(held[1:]), [], quarantined=poisoned).source is Source.MEMORY


def test_a_snapshot_behind_which_a_rollback_went_is_refused() -> None:
    old, new = Snapshot(8, 0, 1, NOW, superseded=True), Snapshot(5, 1, 2, NOW)
    choice = choose(offers([old, new], [old, new]), [])
    assert choice.step == 5
    assert [r.why for r in choice.refused] == ["ranks 0, 1: set aside by a rollback"]


def test_incomplete_superseded_and_unreachable_folders_are_refused() -> None:
    folders = [
        folder(9, problem="manifest.json is missing"),
        folder(8, superseded=True),
        folder(7, LOCAL, ranks=frozenset([0])),
        folder(6),
    ]
    choice = choose(offers([], []), folders)
    assert choice.step == 6
    assert [r.why for r in choice.refused] == [
        "not complete: manifest.json is missing",
        "set aside by a rollback",
        "rank 1: cannot be read there",
    ]


def test_what_nodes_see_on_their_own_disks_is_taken_together() -> None:
    parts = [folder(7, LOCAL, ranks=frozenset([0])), folder(7, LOCAL, ranks=frozenset([1]))]
    assert choose(offers([], []), [*parts, folder(7)]).tier is LOCAL


def test_a_rollback_takes_nothing_newer_than_its_step() -> None:
    held = offers([snapshot(8)], [snapshot(8)])
    choice = choose(held, [folder(7), folder(5), folder(3)], rollback_to=6)
    assert (choice.source, choice.step) == (Source.FOLDER, 5)
    assert [r.step for r in choice.refused] == [8, 7]
    assert choose(held, [folder(7)], rollback_to=6).source is Source.NONE


def test_many_ranks_are_named_in_a_bounded_text() -> None:
    held = {rank: Offer(NOW, (snapshot(8),) if rank == 0 else ()) for rank in range(1000)}
    (refused,) = choose(held, []).refused
    assert refused.why == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 991 more: not held"


# -- whatever is offered -----------------------------------------------------------------------------------------------
tiers = st.sampled_from([MEMORY, PEER])
folder_tiers = st.sampled_from([LOCAL, SHARED, REMOTE])
small = st.integers(0, 3)
snapshots = st.builds(Snapshot, small, small, st.integers(0, 1), st.sampled_from([NOW, "other"]), tiers)
held_by_rank = st.lists(st.lists(snapshots, max_size=4), min_size=1, max_size=3).map(lambda held: offers(*held))
some_ranks = st.none() | st.frozensets(st.integers(0, 2))
folder_offers = st.lists(
    st.builds(
        lambda tier, step, attempt, verified, problem, superseded, ranks: FolderOffer(
            tier, step, attempt, f"/{tier.value}/{step}.{attempt}", 2, verified, problem, superseded, ranks
        ),
        folder_tiers,
        small,
        small,
        st.booleans(),
        st.sampled_from(["", "", "", "cut"]),
        st.sampled_from([False, False, True]),
        some_ranks,
    ),
    max_size=5,
)
sources = st.sampled_from([ANY_FOLDER, *(t.value for t in TierName), "/shared/1.1", "/local/2.0"])
rejections = st.lists(
    st.builds(Rejected, sources, small, st.just("why"), st.none() | small, st.none() | st.integers(0, 2)), max_size=4
)
quarantines = st.lists(st.builds(Quarantined, small, small, st.just("why")), max_size=3)


def usable(
    held: Mapping[int, Offer],
    folders: Sequence[FolderOffer],
    rejected: Sequence[Rejected],
    quarantined: Sequence[Quarantined],
    limit: int | None,
) -> set[tuple[int, int, TierName]]:
    """The same decision, said the other way round: everything that passes every rule, by brute force."""
    out = set()
    bad = {(q.step, q.attempt) for q in quarantined}
    for step in range(4):
        for attempt in range(4):
            if (step, attempt) in bad or (limit is not None and step > limit):
                continue

            def rejects(r: Rejected, source: str, rank: int | None, step: int = step, attempt: int = attempt) -> bool:
                return (
                    r.source == source
                    and r.step == step
                    and r.attempt in (None, attempt)
                    and (rank is None or r.rank in (None, rank))
                )

            for generation in range(2):
                per_rank = []
                for rank, offer in held.items():
                    per_rank.append(
                        {
                            tier
                            for tier in (MEMORY, PEER)
                            if Snapshot(step, attempt, generation, NOW, tier) in offer.snapshots
                            and not any(rejects(r, tier.value, rank) for r in rejected)
                        }
                    )
                if all(per_rank):
                    out.add((step, attempt, MEMORY if all(MEMORY in p for p in per_rank) else PEER))
            for tier in (LOCAL, SHARED, REMOTE):
                path = f"/{tier.value}/{step}.{attempt}"
                same = [f for f in folders if f.path == path]
                readers = {r for f in same for r in (held if f.ranks is None else f.ranks)}
                names = (path, tier.value, ANY_FOLDER)
                if (
                    same
                    and not any(f.problem or f.superseded for f in same)
                    and readers >= set(held)
                    and not any(rejects(r, name, None) for r in rejected for name in names)
                ):
                    out.add((step, attempt, tier))
    return out


@settings(max_examples=100, deadline=None)
@given(held_by_rank, folder_offers, rejections, quarantines, st.none() | small)
def test_the_choice_is_usable_by_every_rank_and_nothing_usable_is_better(
    held: dict[int, Offer],
    folders: list[FolderOffer],
    rejected: list[Rejected],
    quarantined: list[Quarantined],
    rollback_to: int | None,
) -> None:
    choice = choose(held, folders, rejected, quarantined, rollback_to)
    allowed = usable(held, folders, rejected, quarantined, rollback_to)
    if not allowed:
        assert choice.source is Source.NONE
        return
    best = max(allowed, key=lambda c: (c[0], c[1], -list(TierName).index(c[2])))
    assert (choice.step, choice.attempt, choice.tier) == best
    check_every_rank_has_its_part(choice, held)


def check_every_rank_has_its_part(choice: Choice, held: Mapping[int, Offer]) -> None:
    assert set(choice.tiers) == set(held)
    if choice.source is Source.FOLDER:
        assert choice.path.endswith(f"/{choice.step}.{choice.attempt}")
        return
    for rank, tier in choice.tiers.items():
        assert Snapshot(choice.step, choice.attempt, choice.generation, NOW, tier) in held[rank].snapshots


@settings(max_examples=50, deadline=None)
@given(held_by_rank, folder_offers, rejections, quarantines)
def test_the_order_of_the_offers_does_not_matter(
    held: dict[int, Offer],
    folders: list[FolderOffer],
    rejected: list[Rejected],
    quarantined: list[Quarantined],
) -> None:
    one = choose(held, folders, rejected, quarantined)
    other = choose(
        {r: Offer(held[r].digest, held[r].snapshots[::-1]) for r in reversed(held)},
        folders[::-1],
        rejected,
        quarantined[::-1],
    )
    assert (one.step, one.attempt, one.generation, one.path, one.tiers) == (
        other.step,
        other.attempt,
        other.generation,
        other.path,
        other.tiers,
    )
    assert sorted(map(str, one.refused)) == sorted(map(str, other.refused))
