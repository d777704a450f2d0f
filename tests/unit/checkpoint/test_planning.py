"""Plans: every shard written once, by a holder, evenly; and what contradicts itself is refused by name."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.checkpoint import planning
from steadyrun.checkpoint.layout import Entry, Layout, ObjectEntry, place, rank_key
from steadyrun.checkpoint.planning import Box, Part, Plan, PlanError, plan

Shards = Sequence[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]  # key, shape, offsets, sizes


def entries(shards: Shards, dtype: str = "float32") -> tuple[Entry, ...]:
    sizes_bytes = [math.prod(sizes) * 4 for *_, sizes in shards]
    return tuple(
        Entry(key, tuple(key.split(".")), dtype, shape, offsets, sizes, at, size_bytes)
        for (key, shape, offsets, sizes), at, size_bytes in zip(shards, place(sizes_bytes), sizes_bytes, strict=True)
    )


def layouts(by_rank: Sequence[Shards], objects: Sequence[Sequence[str]] | None = None) -> list[Layout]:
    objects = objects or [[] for _ in by_rank]
    return [
        Layout(rank, len(by_rank), entries(shards), tuple(ObjectEntry(k, (k,)) for k in keys))
        for rank, (shards, keys) in enumerate(zip(by_rank, objects, strict=True))
    ]


def whole(key: str, *shape: int) -> tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    return key, shape, (0,) * len(shape), shape


def written(made: Plan, ranks: Sequence[Layout]) -> list[tuple[int, str, tuple[int, ...]]]:
    return [
        (rank, ranks[rank].entries[i].key, ranks[rank].entries[i].offsets)
        for rank, part in enumerate(made.parts)
        for i in part.entries
    ]


def test_replicas_are_written_once_and_spread_by_bytes() -> None:
    ranks = layouts([[whole(f"w{i}", 1 + i % 7, 1000) for i in range(60)] for _ in range(4)])
    made = plan(ranks)
    done = written(made, ranks)
    assert sorted(key for _, key, _ in done) == sorted(f"w{i}" for i in range(60))
    loads = [sum(ranks[r].entries[i].size_bytes for i in part.entries) for r, part in enumerate(made.parts)]
    assert max(loads) - min(loads) <= 7 * 1000 * 4


def test_one_large_replica_is_weighed_against_all_the_small_ones() -> None:
    shards = [whole(f"small{i}", 10_000) for i in range(10)] + [whole("large", 100_000)]
    ranks = layouts([shards, shards])
    loads = [sum(ranks[r].entries[i].size_bytes for i in part.entries) for r, part in enumerate(plan(ranks).parts)]
    assert loads == [400_000, 400_000]


def test_many_scalars_do_not_all_go_to_one_rank() -> None:
    ranks = layouts([[(f"step{i}", (), (), ()) for i in range(40)] for _ in range(4)])
    assert [len(part.entries) for part in plan(ranks).parts] == [10, 10, 10, 10]


def test_shards_stay_with_their_only_holder_and_make_the_chunks() -> None:
    ranks = layouts([[("w", (5, 3), (2 * r, 0), (min(2, 5 - 2 * r), 3))] for r in range(3)])
    made = plan(ranks)
    assert [part.entries for part in made.parts] == [(0,), (0,), (0,)]
    assert made.tensors[0].chunks == (((0, 0), (2, 3)), ((2, 0), (2, 3)), ((4, 0), (1, 3)))
    assert made.groups == ()


def test_hybrid_sharding_compares_each_shard_with_its_replica_only() -> None:
    half = [[("w", (4,), (2 * (r % 2),), (2,)), ("v", (2,), (r % 2,), (1,))] for r in range(4)]
    made = plan(layouts(half))
    assert made.groups == ((0, 2), (1, 3))
    assert [part.replicas for part in made.parts] == [
        ((0, (1, 0)),),  # "v" stands before "w"
        ((1, (1, 0)),),
        ((0, (1, 0)),),
        ((1, (1, 0)),),
    ]
    assert len(written(made, layouts(half))) == 4


def test_replicas_are_compared_in_one_order_whatever_the_order_of_the_layouts() -> None:
    shards = [whole("a", 3), whole("b", 2), whole("c", 1)]
    ranks = layouts([shards, list(reversed(shards))])
    made = plan(ranks)
    keys = [[ranks[r].entries[i].key for i in part.replicas[0][1]] for r, part in enumerate(made.parts)]
    assert keys == [["a", "b", "c"], ["a", "b", "c"]]


def test_empty_ends_of_an_uneven_division_are_written_by_nobody() -> None:
    ranks = layouts(
        [
            [("w", (2,), (0,), (1,))],
            [("w", (2,), (1,), (1,))],
            [("w", (2,), (2,), (0,))],
            [("w", (2,), (0,), (0,))],  # some versions of torch put an empty shard at the begin
        ]
    )
    assert [part.entries for part in plan(ranks).parts] == [(0,), (0,), (), ()]


def test_a_tensor_without_elements_is_written_once() -> None:
    ranks = layouts([[("e", (0, 3), (0, 0), (0, 3))], [("e", (0, 3), (0, 0), (0, 3))]])
    made = plan(ranks)
    assert len(written(made, ranks)) == 1
    assert made.tensors[0].chunks == (((0, 0), (0, 3)),)
    apart = layouts([[("e", (0, 3), (0, 0), (0, 2))], [("e", (0, 3), (0, 2), (0, 1))]])
    assert len(written(plan(apart), apart)) == 1


def test_global_objects_are_written_by_the_lowest_rank_and_own_ones_by_each() -> None:
    keys = [[rank_key(0, "rng")], ["step", rank_key(1, "rng")], ["step", rank_key(2, "rng")]]
    made = plan(layouts([[], [], []], keys))
    assert [part.objects for part in made.parts] == [(0,), (0, 1), (1,)]


def test_a_plan_is_the_same_for_the_same_layouts_and_survives_json() -> None:
    ranks = layouts([[whole("a", 3), ("b", (4,), (2 * r,), (2,))] for r in range(2)], [["x"], ["x"]])
    made = plan(ranks)
    assert made == plan(ranks)
    assert Plan.from_json(made.to_json()) == made
    assert [Part.from_json(part.to_json()) for part in made.parts] == list(made.parts)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"parts": [1], "groups": [], "tensors": []}', "[[],[]]"])
def test_a_damaged_plan_is_said_to_be_one(text: str) -> None:
    with pytest.raises(PlanError, match="cannot read the plan"):
        Plan.from_json(text)
    with pytest.raises(PlanError, match="cannot read the plan"):
        Part.from_json(text)


@pytest.mark.parametrize(
    ("by_rank", "words"),
    [
        (
            [[whole("w", 2)], [whole("w", 3)]],
            ["'w'", "float32 of shape [2] on rank 0", "float32 of shape [3] on rank 1"],
        ),
        ([[("w", (4,), (0,), (2,))], [("w", (4,), (3,), (1,))]], ["'w'", "1 of the 4 elements", "ranks [0, 1]"]),
        ([[("w", (4,), (0,), (3,))], [("w", (4,), (2,), (2,))]], ["'w'", "overlap", "[0:3] on ranks [0]", "[2:4]"]),
        ([[("w", (4,), (0,), (4,))], [("w", (4,), (0,), (2,))]], ["'w'", "sizes [4] on rank 0 and [2] on rank 1"]),
        ([[whole("w", 2), whole("w", 2)]], ["rank 0 has two shards of 'w'"]),
        ([[("w", (4,), (3,), (2,))]], ["'w' on rank 0", "beyond the shape [4]"]),
        ([[("w", (4,), (0, 0), (2, 2))]], ["'w' on rank 0", "offsets [0, 0]"]),
    ],
)
def test_what_contradicts_itself_is_refused_with_key_and_ranks(by_rank: Sequence[Shards], words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        plan(layouts(by_rank))
    assert [w for w in words if w not in str(caught.value)] == []


def test_wrong_length_dtype_and_ranks_are_refused() -> None:
    good = layouts([[whole("w", 2)]])[0]
    entry = good.entries[0]

    def refused(*ranks: Layout) -> str:
        with pytest.raises(PlanError) as caught:
            plan(ranks)
        return str(caught.value)

    other = Entry("w", ("w",), "float64", (2,), (0,), (2,), 0, 16)
    two = [Layout(0, 2, (entry,), ()), Layout(1, 2, (other,), ())]
    assert "float64 of shape [2] on rank 1" in refused(*two)
    assert "7 bytes" in refused(Layout(0, 1, (Entry("w", ("w",), "float32", (2,), (0,), (2,), 0, 7),), ()))
    assert "qint8" in refused(Layout(0, 1, (Entry("w", ("w",), "qint8", (2,), (0,), (2,), 0, 2),), ()))
    assert "all ranks" in refused(Layout(0, 2, (entry,), ()))
    assert "all ranks" in refused(Layout(1, 2, (entry,), ()), Layout(0, 2, (entry,), ()))


def test_keys_of_two_kinds_or_of_another_rank_are_refused() -> None:
    for objects, words in (
        ([["w"], []], "'w' is an object on rank 0 and a tensor on rank 0"),
        ([["x", "x"], []], "rank 0 has two objects 'x'"),
        ([[rank_key(0, "rng")], [rank_key(0, "rng")]], "'steadyrun.rank.0.rng' is of one rank alone"),
    ):
        with pytest.raises(PlanError) as caught:
            plan(layouts([[whole("w", 1)], [whole("w", 1)]], objects))
        assert words in str(caught.value)


# -- every plan ------------------------------------------------------------------------------------------------------
@st.composite
def meshes(draw: st.DrawFn) -> list[Shards]:
    """A few tensors on replicas x shards ranks, each cut along some dimension or not at all."""
    replicas, cuts = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    by_rank: list[list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]] = [
        [] for _ in range(replicas * cuts)
    ]
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        dimension = draw(st.sampled_from([None, *range(len(shape))]))
        for rank, shards in enumerate(by_rank):
            offsets, sizes = [0] * len(shape), list(shape)
            if dimension is not None:
                each = -(-shape[dimension] // cuts)
                offsets[dimension] = min(each * (rank % cuts), shape[dimension])
                sizes[dimension] = min(each, shape[dimension] - offsets[dimension])
            shards.append((f"t{number}", shape, tuple(offsets), tuple(sizes)))
    return by_rank


@settings(max_examples=60, deadline=None)
@given(meshes())
def test_every_element_of_every_tensor_is_written_exactly_once(by_rank: list[Shards]) -> None:
    ranks = layouts(by_rank)
    made = plan(ranks)
    counts: dict[str, int] = {}
    for rank, part in enumerate(made.parts):
        assert list(part.entries) == sorted(set(part.entries))
        for i in part.entries:
            entry = ranks[rank].entries[i]
            counts[entry.key] = counts.get(entry.key, 0) + math.prod(entry.sizes)
    assert counts == {t.key: math.prod(t.shape) for t in made.tensors}
    for number, group in enumerate(made.groups):
        held = [dict(made.parts[rank].replicas)[number] for rank in group]
        boxes = [
            [(ranks[rank].entries[i].key, ranks[rank].entries[i].offsets) for i in indices]
            for rank, indices in zip(group, held, strict=True)
        ]
        assert all(b == boxes[0] for b in boxes)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.integers(0, 1 << 30))
def test_overlaps_are_found_exactly_where_a_look_at_all_pairs_finds_them(dimensions: int, seed: int) -> None:
    random_ = random.Random(seed)
    boxes: list[Box] = [
        (
            tuple(random_.randrange(12) for _ in range(dimensions)),
            tuple(random_.randrange(1, 5) for _ in range(dimensions)),
        )
        for _ in range(random_.randrange(1, 9))
    ]

    def meet(a: Box, b: Box) -> bool:
        return all(a[0][d] < b[0][d] + b[1][d] and b[0][d] < a[0][d] + a[1][d] for d in range(dimensions))

    found = planning._overlap(boxes)
    assert (found is not None) == any(meet(a, b) for a, b in itertools.combinations(boxes, 2)), f"seed {seed}"
    assert found is None or meet(*found)


def test_a_grid_is_checked_without_comparing_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    def swept(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
        raise AssertionError(f"{len(boxes)} boxes are compared with each other")

    monkeypatch.setattr(planning, "_swept", swept)
    assert planning._overlap([((i, j), (1, 1)) for i in range(60) for j in range(60)]) is None
