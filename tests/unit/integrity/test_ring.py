"""What a rank tells of its roots, and what of that an agent reads."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from steadyrun.core.integrity import GroupPlan, IntegrityError, RankPlan, RingReader, RingWriter, Roots, TensorPlan

AFTER, BEFORE = 2, 1
PLAN = RankPlan(
    2,
    1,
    0,
    (GroupPlan((0, 1), 0, 2), GroupPlan((1,), 2, 1)),
    (
        TensorPlan("a", "parameter", "float32", 10, 4),
        TensorPlan("b", "optimizer", "bfloat16", 7, 2, "cuda:1", 0),
        TensorPlan("c", "buffer", "int64", 1, 8, at_rest=False),
    ),
    "GPU-1",
    ("a note",),
)


@pytest.fixture
def ring() -> Iterator[tuple[RingWriter, RingReader]]:
    writer = RingWriter(os.getpid(), 4)
    reader = RingReader.open(os.getpid(), writer.fd)
    yield writer, reader
    reader.close()
    writer.close()


def test_roots_are_read_as_they_were_written(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    writer.put(1, -1, 0, 100, 20, [-1, 5])
    assert reader.read(0) == ([Roots(1, -1, "loaded", 100, 20, ((1 << 64) - 1, 5))], 1, 0)
    writer.put(2, 49, AFTER, 200, 30, [7, 8, 9, 10])
    assert [r.step for r in reader.read(1)[0]] == [49]
    assert reader.read(2) == ([], 2, 0)


def test_what_was_overwritten_unread_is_counted(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    for step in range(200):
        writer.put(1, step, AFTER, 0, 0, [step])
    found, seen, lost = reader.read(10)
    assert (seen, lost) == (200, 190 - len(found))
    assert [r.step for r in found] == list(range(200 - len(found), 200))


def test_what_does_not_fit_is_refused(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    with pytest.raises(ValueError, match="do not fit"):
        writer.put(1, 0, AFTER, 0, 0, [1] * 5)
    assert reader.count == 0


def test_a_ring_can_be_read_when_its_rank_is_gone() -> None:
    writer = RingWriter(os.getpid(), 1)
    reader = RingReader.open(os.getpid(), writer.fd)
    writer.put(1, 3, BEFORE, 0, 0, [4])
    writer.close()
    assert [(r.step, r.roots) for r in reader.read(0)[0]] == [(3, (4,))]
    reader.close()


def test_other_files_are_no_rings() -> None:
    fd = os.memfd_create("other")
    try:
        os.ftruncate(fd, 4096)
        with pytest.raises(IntegrityError, match="not a ring"):
            RingReader.open(os.getpid(), fd)
        with pytest.raises(IntegrityError):
            RingReader.open(os.getpid(), 987_654)
    finally:
        os.close(fd)


def test_a_plan_survives_its_text() -> None:
    assert RankPlan.parse(PLAN.to_json()) == PLAN


@pytest.mark.parametrize("text", ["", "{}", "[]", PLAN.to_json().replace("[[0, 1], 0, 2]", "[[0, 1], 0, 1]")])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(IntegrityError):
        RankPlan.parse(text)


def test_a_digest_stands_for_names_sizes_and_roots_of_its_group() -> None:
    group, alone = PLAN.groups
    told = PLAN.digest(group, [1, 2, 3])
    assert told == PLAN.digest(group, [1, 2, 99]), "of another group"
    assert told != PLAN.digest(group, [2, 1, 3])
    assert PLAN.digest(alone, [1, 2, 3]) != PLAN.digest(alone, [1, 2, 4])
    assert PLAN.by_name([1, 2, 3], group) == {"a": 1, "b": 2}
    assert group.key == GroupPlan((0, 1), 5, 9).key != alone.key
