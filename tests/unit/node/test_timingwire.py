"""Step timings on their way from a node to the leading agent."""

from __future__ import annotations

from steadyrun.core.timing import Role, StepTiming
from steadyrun.detect.straggler import TimingBlock
from steadyrun.node.pacejudge import PaceJudge, PaceNews
from steadyrun.node.timingwire import NodeFacts, RankFacts, TimingInbox, TimingOutbox

FACTS = NodeFacts("a", (RankFacts(0, 0, 10, Role("stage 0", (0,))), RankFacts(1, 1, 11)))


def timing(step: int, busy_s: float = 1.0) -> StepTiming:
    return StepTiming(step, 0.0, 1.5, busy_s, 0.4 * busy_s, 0.5 * busy_s, 0.1 * busy_s, 0.0, 0.0, 0.1, busy_s)


def steps_of(rows: bytes) -> list[int]:
    return [int(s) for s in TimingBlock.of_bytes(rows).steps]


def test_a_missed_message_loses_nothing_and_no_block_is_taken_twice() -> None:
    outbox, inbox = TimingOutbox(), TimingInbox(1)
    messages = []
    for step in range(6):
        outbox.put({0: [timing(step)]})
        messages.append(outbox.message(FACTS.to_bytes()))
    assert inbox.take({0: messages[0]}).facts == {0: FACTS}
    assert [steps_of(inbox.take({0: messages[i]}).rows) for i in (0, 2, 2, 3)] == [[], [1, 2], [], [3]]
    assert not inbox.take({0: messages[5]}).facts


def test_messages_of_many_nodes_are_read_at_once_whatever_each_of_them_is() -> None:
    outboxes, inbox = [TimingOutbox() for _ in range(5)], TimingInbox(5)
    facts = [NodeFacts(f"n{node}", (RankFacts(node, 0, 1),)) for node in range(5)]

    def told(step: int, *nodes: int) -> dict[int, bytes]:
        for node in nodes:
            outboxes[node].put({node: [timing(step), timing(step + 1)]})
        return {node: outboxes[node].message(facts[node].to_bytes()) for node in nodes}

    assert inbox.take(told(0, 0, 1, 2, 3)).facts == dict(enumerate(facts[:4]))  # 4 begins late
    told(2, 1)  # is missed
    facts[2] = NodeFacts("n2", (RankFacts(2, 0, 1, Role("stage 0", (0,))),))
    messages = told(4, 0, 1, 2, 3, 4)
    messages[3] = messages[3][:-1]
    found = inbox.take(messages)
    assert found.facts == {2: facts[2], 4: facts[4]}
    assert list(found.refused) == [3]
    block = TimingBlock.of_bytes(found.rows)
    steps: dict[int, list[int]] = {}
    for rank, step in zip(block.ranks.tolist(), block.steps.tolist(), strict=True):
        steps.setdefault(rank, []).append(step)
    assert steps == {0: [4, 5], 1: [2, 3, 4, 5], 2: [4, 5], 4: [4, 5]}
    again = inbox.take(told(6, 0, 1, 2, 3, 4))
    assert not again.facts
    assert sorted(steps_of(again.rows)) == [4, 5, *[6] * 5, *[7] * 5]  # what was refused came with the next one


def test_damaged_messages_are_refused() -> None:
    outbox = TimingOutbox()
    outbox.put({0: [timing(1)]})
    whole = outbox.message(FACTS.to_bytes())
    for bad in (b"", whole[:-1], b"XXXX" + whole[4:], whole + b" ", outbox.message(b"[]"), outbox.message(b"\xff")):
        found = TimingInbox(1).take({0: bad})
        assert list(found.refused) == [0]
        assert not found.rows
    assert list(TimingInbox(1).take({1: whole, -1: whole}).refused) == [1, -1]
    assert TimingInbox(1).take({}).rows == b""


def test_a_slow_rank_is_named_with_its_impact_although_another_says_nothing() -> None:
    judge = PaceJudge(4)
    judge.introduce(NodeFacts("a", tuple(RankFacts(r, r, 1) for r in range(4))))
    events = []
    for step in range(200):
        pace = {r: 1.0 + 0.002 * ((7 * step + 3 * r) % 5) for r in range(3)}
        pace[1] *= 1.3 if step >= 120 else 1.0
        judge.add(TimingBlock.of_rows({r: [timing(step, s)] for r, s in pace.items()}).to_bytes(), 1.5 * step)
        events += judge.judge(1.5 * step, 1000.0 + 1.5 * step)
    began = [e.alarm for e in events if e.news is PaceNews.BEGAN]
    assert [a.ranks for a in began] == [(1,)]
    assert began[0].first_step >= 118
    assert began[0].impact > 0.1
    assert next(e.news for e in judge.finish(400.0, 1400.0)) is PaceNews.LASTS
