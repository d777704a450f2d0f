"""Messages about ranks' bytes between agents."""

from __future__ import annotations

import pytest

from steadyrun.node.rootswire import (
    BLOCKS,
    MOST_RECORDS,
    RankIntegrity,
    RootsFacts,
    RootsInbox,
    RootsOutbox,
    Told,
    pack_names,
    pack_ranks,
    pack_roots,
    unpack_names,
    unpack_ranks,
    unpack_roots,
)

FACTS = RootsFacts(
    "n1",
    (RankIntegrity(4, 0, 77, "on", 50, "GPU-1", (9, 2**64 - 1)), RankIntegrity(5, 1, 78)),
    {9: (0, 1, 2, 4, 5), 2**64 - 1: (4,)},
    {(4, 30): ("a.weight", "b")},
    ("left out: x",),
)


def told(step: int, rank: int = 4) -> Told:
    return Told(rank, step, "after_step", 9, 2**64 - step - 2)


def test_facts_survive_the_way() -> None:
    assert RootsFacts.from_bytes(FACTS.to_bytes()) == FACTS


@pytest.mark.parametrize(
    "data", [b"{}", b"[1]", b"null", b'{"node":1,"ranks":[[1]],"groups":[],"changed":[],"notes":[]}']
)
def test_other_facts_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        RootsFacts.from_bytes(data)


def test_records_come_once_and_in_order() -> None:
    outbox, inbox = RootsOutbox(), RootsInbox()
    outbox.put([told(-1), told(0)])
    records, facts = inbox.take(1, outbox.message(FACTS.to_bytes()))
    assert (records, facts) == ([told(-1), told(0)], FACTS)
    outbox.put([told(1)])
    records, facts = inbox.take(1, outbox.message(FACTS.to_bytes()))
    assert (records, facts) == ([told(1)], None)


def test_a_message_that_was_missed_comes_with_the_next() -> None:
    message = b""
    outbox, inbox = RootsOutbox(), RootsInbox()
    for step in range(BLOCKS):
        outbox.put([told(step)])
        message = outbox.message(FACTS.to_bytes())
    records, _ = inbox.take(1, message)
    assert records == [told(s) for s in range(BLOCKS)]


def test_a_message_has_a_largest_size_and_the_newest_stay() -> None:
    outbox, inbox = RootsOutbox(), RootsInbox()
    outbox.put(told(s) for s in range(MOST_RECORDS + 10))
    records, _ = inbox.take(1, outbox.message(FACTS.to_bytes()))
    assert len(records) == MOST_RECORDS
    assert records[-1] == told(MOST_RECORDS + 9)


def test_foreign_bytes_are_refused_and_leave_nothing() -> None:
    outbox, inbox = RootsOutbox(), RootsInbox()
    outbox.put([told(0)])
    message = outbox.message(FACTS.to_bytes())
    for bad in (b"", b"SRI1", message[:-1], message + b"x", b"XXXX" + message[4:]):
        with pytest.raises(ValueError, match="cannot read"):
            inbox.take(1, bad)
    assert inbox.take(1, message)[0] == [told(0)]


@pytest.mark.parametrize("ranks", [(), (3,), (0, 1, 2), (0, 2, 4, 5, 6, 9), tuple(range(4096))])
def test_ranks_as_ranges(ranks: tuple[int, ...]) -> None:
    assert unpack_ranks(pack_ranks(ranks)) == ranks


@pytest.mark.parametrize("text", ["x", "0-99999999", "1-2-3", ",".join(["1"] * 20000)])
def test_other_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack_ranks(text)


def test_names_and_roots_survive_the_way() -> None:
    names = tuple(f"layers.{i}.weight" for i in range(100))
    assert unpack_names(pack_names(names)) == names
    assert unpack_roots(pack_roots((0, 2**64 - 1))) == (0, 2**64 - 1)
    with pytest.raises(ValueError, match=r"."):
        unpack_names("AAAA")
