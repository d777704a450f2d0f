"""What ranks of a node put out for each other to compute again."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from steadyrun.core import layout
from steadyrun.watch.replaybox import AGREES, DIFFERS, NOTHING, Box, Peer, Wait, peers_of


@pytest.fixture
def box() -> Iterator[Box]:
    made = Box()
    yield made
    made.close()


@pytest.fixture
def peer(box: Box) -> Iterator[Peer]:
    made = Peer(3, os.getpid(), box.fd)
    yield made
    made.close()


def test_what_is_put_out_is_read_whole(box: Box, peer: Peer) -> None:
    box.arm(7)
    box.post(7, b"fingerprints", b"microbatch" * 1000)
    assert peer.posted(7, Wait(0.0)) == (b"fingerprints", b"microbatch" * 1000)
    box.post(7, b"f", b"m")
    assert peer.posted(7, Wait(0.0)) == (b"f", b"m")


def test_a_rank_that_takes_no_part_is_not_waited_for(box: Box, peer: Peer) -> None:
    wait = Wait(1000.0)
    assert peer.posted(7, wait) is None, "never armed"
    box.arm(6)
    assert peer.posted(7, wait) is None, "for another step"
    box.arm(7)
    box.arm(None)
    assert (peer.posted(7, wait), peer.found(7, wait)) == (None, NOTHING)
    assert wait.waited_s < 1.0


def test_a_rank_that_is_late_is_waited_for_only_so_long(box: Box, peer: Peer) -> None:
    box.arm(7)
    wait = Wait(0.0)
    assert peer.posted(7, wait) is None
    assert peer.found(7, wait) == NOTHING


def test_what_was_found_is_told_apart_by_step(box: Box, peer: Peer) -> None:
    box.arm(7)
    box.tell(7, DIFFERS)
    assert peer.found(7, Wait(0.0)) == DIFFERS
    box.arm(12)
    assert peer.found(12, Wait(0.0)) == NOTHING
    box.tell(12, AGREES)
    assert peer.found(12, Wait(0.0)) == AGREES


def test_what_was_put_out_stays_readable_after_the_next_was_announced(box: Box, peer: Peer) -> None:
    box.arm(7)
    box.post(7, b"f", b"m")
    box.tell(7, DIFFERS)
    box.arm(8)
    assert peer.posted(7, Wait(0.0)) == (b"f", b"m")
    assert peer.found(7, Wait(0.0)) == DIFFERS


def test_memory_is_given_back(box: Box, peer: Peer) -> None:
    box.arm(7)
    box.post(7, b"f", bytes(1 << 20))
    assert os.fstat(box.fd).st_size > 1 << 20
    box.clear()
    assert os.fstat(box.fd).st_size == 4096
    assert peer.posted(7, Wait(0.0)) is None


def test_a_rank_that_is_gone_takes_no_part() -> None:
    gone = Peer(1, 1 << 22, 250)  # beyond the largest process number
    assert gone.posted(7, Wait(1000.0)) is None


def test_ranks_of_the_group_on_this_node_are_found_in_order() -> None:
    words = memoryview(bytearray(8 * (layout.HEADER_WORDS + 5 * layout.SLOT_WORDS))).cast("Q")
    words[layout.H_SLOTS] = 5
    # rank, attempt, descriptor of the box + 1
    for slot, (rank, attempt, fd) in enumerate([(6, 2, 9), (4, 2, 8), (5, 2, 0), (7, 1, 9), (8, 2, 9)]):
        base = layout.HEADER_WORDS + slot * layout.SLOT_WORDS
        words[base + layout.S_OWNER_PID] = 100 + slot
        words[base + layout.S_RANK] = rank
        words[base + layout.S_ATTEMPT] = attempt
        words[base + layout.S_REPLAY_BOX] = fd
    assert [(p.rank, p.pid) for p in peers_of(words, (4, 5, 6, 7), 2)] == [(4, 101), (6, 100)]


def test_a_wait_ends_once_something_is_there() -> None:
    answers = iter([False, False, True])
    wait = Wait(1000.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steadyrun.watch.replaybox.sleep", lambda _: None)
        began_s = time.monotonic()
        assert wait.until(lambda: next(answers))
        assert wait.waited_s <= time.monotonic() - began_s
