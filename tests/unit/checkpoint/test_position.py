"""The place in the data: from the loaders' states of one number of ranks to another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrun.checkpoint.position import LoaderPosition, Samples, batches_in, moved_state, read_position


def at(batches: int, replica: int = 0, replicas: int = 4, size: int | None = 3, **more: Any) -> LoaderPosition:
    return LoaderPosition(batches, size, replica, replicas, **more)


def test_samples_of_all_replicas_are_summed() -> None:
    samples = Samples.of([at(5, r) for r in range(4)])
    assert (samples.seen, samples.global_batch, samples.missing) == (60, 12, 0)


def test_ranks_that_read_the_same_stream_count_once() -> None:
    tensor_parallel = [at(5, r // 2, 2, 6) for r in range(4)]
    assert Samples.of(tensor_parallel).seen == 60


def test_a_replica_that_is_missing_is_taken_for_the_others_and_said() -> None:
    samples = Samples.of([at(5, r) for r in (0, 1, 3)])
    assert (samples.seen, samples.missing) == (60, 1)
    assert "1 of 4 data-parallel ranks is not in the checkpoint" in samples.move(2, 6).notes[0]


def test_global_batch_that_stays_is_said() -> None:
    moved = Samples.of([at(5, r) for r in range(4)]).move(2, 6)
    assert (moved.batches, moved.samples) == (5, 30)
    assert moved.notes == ("data position: 60 samples of the epoch seen; the global batch stays 12 samples",)


def test_global_batch_that_changes_is_said_with_what_would_keep_it() -> None:
    moved = Samples.of([at(5, r) for r in range(4)]).move(3, 3)
    assert moved.batches == 6
    (change, again) = moved.notes
    assert "changes from 12 to 9 samples (a batch size of 4 would keep it)" in change
    assert again == "6 samples are seen a second time: 60 is no multiple of 9"


def test_unknown_batch_size_moves_batches_and_says_so() -> None:
    moved = Samples.of([at(5, r, size=None) for r in range(4)]).move(2, None)
    assert (moved.batches, moved.samples) == (5, None)
    assert "does not tell its batch size" in moved.notes[0]


def test_positions_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"do not agree on the number of data streams: \[2, 4\]"):
        Samples.of([at(1, 0, 2), at(1, 1, 4)])
    with pytest.raises(ValueError, match="no position"):
        Samples.of([])


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 8), st.integers(1, 8), st.integers(0, 50))
def test_no_sample_is_left_out_and_less_than_a_batch_is_repeated(
    old: int, new: int, old_size: int, new_size: int, batches: int
) -> None:
    samples = Samples.of([LoaderPosition(batches, old_size, r, old) for r in range(old)])
    moved = samples.move(new, new_size)
    assert samples.seen == batches * old * old_size
    assert 0 <= samples.seen - moved.batches * new * new_size < new * new_size


def test_a_position_comes_back_from_plain_values() -> None:
    position = at(3, samples=9, epoch=2)
    assert LoaderPosition.from_plain({**position.to_plain(), "generator": b""}) == position


# -- loaders ---------------------------------------------------------------------------------------------------------
def test_sampler_tells_the_replica() -> None:
    sampler = SimpleNamespace(num_replicas=2, rank=1, epoch=7)
    loader = SimpleNamespace(sampler=sampler, batch_size=8)
    position = read_position(loader, {"_num_yielded": 4}, 3, 4)
    assert position == LoaderPosition(4, 8, 1, 2, None, 7)


def test_sampler_inside_a_batch_sampler_tells_the_replica() -> None:
    inner = SimpleNamespace(num_replicas=2, rank=1, epoch=0)
    batches = SimpleNamespace(sampler=inner, batch_size=5)
    loader = SimpleNamespace(sampler=object(), batch_sampler=batches, batch_size=None)
    position = read_position(loader, {"_num_yielded": 4}, 0, 1)
    assert position == LoaderPosition(4, 5, 1, 2, None, 0)


def test_a_loader_may_count_its_samples_itself() -> None:
    position = read_position(SimpleNamespace(samples_seen=17, batch_size=4), {"mine": 1}, 1, 2)
    assert position is not None
    assert (position.samples_here, position.replica, position.replicas) == (17, 1, 2)


def test_a_loader_that_tells_nothing_has_no_position() -> None:
    assert read_position(SimpleNamespace(), {"mine": 1}, 0, 1) is None


def test_batches_are_counted_with_and_without_workers() -> None:
    assert batches_in({}) == 0
    assert batches_in({"_num_yielded": 5}) == 5
    assert batches_in({"_snapshot": {"_snapshot_step": 4}, "_steps_since_snapshot": 3}) == 7
    assert batches_in({"other": 1}) is None


def test_a_fresh_state_is_sent_forward() -> None:
    fresh = {
        "_num_yielded": 0,
        "_sampler_iter_yielded": 0,
        "_index_sampler_state": None,
        "_sampler_iter_state": {"samples_yielded": 0, "sampler_state": {"yielded": 0}, "generator": "g"},
        "fetcher_state": None,
    }
    moved = moved_state(fresh, 5, 30)
    assert moved == {
        **fresh,
        "_num_yielded": 5,
        "_sampler_iter_yielded": 5,
        "_sampler_iter_state": {"samples_yielded": 30, "sampler_state": {"yielded": 30}, "generator": "g"},
    }


def test_streams_that_only_the_dataset_could_position_are_left_alone() -> None:
    assert moved_state({"_num_yielded": 0, "fetcher_state": {"dataset_iter_state": None}}, 5, 30) is None
    assert moved_state({"mine": 0}, 5, 30) is None
