"""Which part of the model a rank holds, by the process groups of its DDP modules."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from steadyrun.watch.roles import coordinates_among, key_of


class DistributedDataParallel:
    """Has what torch's has."""

    def __init__(self, group: object) -> None:
        self.process_group = group


@pytest.fixture
def in_group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives what a rank of a job of eight finds of a module whose group has the ranks given."""

    def found(rank: int, ranks: list[int], *before: object) -> dict[str, int]:
        distributed = SimpleNamespace(
            get_process_group_ranks=lambda group: list(group), get_world_size=lambda: 8, get_rank=lambda: rank
        )
        monkeypatch.setitem(sys.modules, "torch.distributed", distributed)
        return coordinates_among([*before, DistributedDataParallel(ranks)])

    return found


def test_ranks_of_one_group_hold_the_same_part_and_are_compared(in_group: Any) -> None:
    places = {rank: in_group(rank, [4, 5, 6, 7]) for rank in (4, 7)}
    assert places == {4: {"dp": 0, "part": 4}, 7: {"dp": 3, "part": 4}}
    assert key_of(places[4]) == key_of(places[7])
    assert key_of(in_group(0, [0, 1, 2, 3])) != key_of(places[4])


def test_a_group_of_all_ranks_or_of_one_says_nothing(in_group: Any) -> None:
    assert in_group(3, list(range(8))) == {}
    assert in_group(3, [3]) == {}


def test_other_modules_and_groups_of_other_kinds_are_passed_over(in_group: Any) -> None:
    other = SimpleNamespace(process_group=[0, 1])
    assert in_group(5, [4, 5], other, DistributedDataParallel(None), DistributedDataParallel(7)) == {
        "dp": 1,
        "part": 4,
    }
