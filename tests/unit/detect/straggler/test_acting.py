"""When acting pays, what is said of alarms, and timings on their way to the detector."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from steadyrun.core.classes import FaultClass
from steadyrun.core.timing import TAG_FORWARD_SEEN, StepTiming
from steadyrun.detect.straggler import (
    ActCosts,
    Alarm,
    AlarmKind,
    Cause,
    StepAlignment,
    StepFrame,
    StragglerConfig,
    Timing,
    TimingBlock,
    advise,
    analyse,
    findings,
    sentence,
)

SLOW = Alarm(
    AlarmKind.RANK, (3,), step=117, first_step=100, slowdown=0.2, z=30.0, impact=0.1, lost_s=0.0, node="host1", peers=7,
    phase="backward", phases={"backward": 0.9, "forward": 0.1}, cause=Cause.WORKING,
)  # fmt: skip
COSTS = ActCosts(restart_s=60.0, since_checkpoint_s=240.0)


def test_acting_waits_until_the_loss_has_reached_the_cost() -> None:
    cases = [(0.0, Timing.WAIT), (149.0, Timing.WAIT), (151.0, Timing.AT_CHECKPOINT), (300.0, Timing.NOW)]
    for lost_s, expected in cases:
        [advice] = advise([replace(SLOW, lost_s=lost_s)], COSTS)
        assert advice.timing is expected, lost_s
        assert advice.in_s == pytest.approx((300.0 - lost_s) / 0.1)


def test_ten_percent_and_half_pay_after_fifty_and_ten_minutes() -> None:
    costs = ActCosts(restart_s=300.0)
    assert advise([SLOW], costs)[0].in_s == pytest.approx(50 * 60)
    assert advise([replace(SLOW, impact=0.5)], costs)[0].in_s == pytest.approx(10 * 60)


def test_ski_rental_loses_at_most_twice_the_best() -> None:
    for lasts_s in (10.0, 2_900.0, 3_100.0, 100_000.0):
        known_best = min(0.1 * lasts_s, COSTS.now_s)
        loss, now_s, acted = 0.0, 0.0, False
        while now_s < lasts_s and not acted:
            now_s += 10.0
            loss += 1.0
            [advice] = advise([replace(SLOW, lost_s=loss)], COSTS)
            acted = advice.timing is Timing.NOW
        assert loss + (COSTS.now_s if acted else 0.0) <= 2 * known_best + 1.0


def test_nothing_is_advised_on_what_is_no_fault_or_over() -> None:
    alarms = [
        replace(SLOW, lost_s=1e6, is_actionable=False),
        replace(SLOW, lost_s=1e6, over_step=200),
        replace(SLOW, lost_s=1e6, kind=AlarmKind.DATA_IMBALANCE),
    ]
    assert advise(alarms, COSTS) == []


def test_the_costliest_comes_first() -> None:
    alarms = [replace(SLOW, ranks=(1,), lost_s=5.0), replace(SLOW, ranks=(2,), lost_s=50.0)]
    assert [a.alarm.ranks for a in advise(alarms, COSTS)] == [(2,), (1,)]


def test_a_finding_says_who_where_since_when_and_what_for() -> None:
    [found] = findings(
        [SLOW, replace(SLOW, kind=AlarmKind.DATA_IMBALANCE)],
        nodes={3: "host1"},
        gpus={3: "GPU-7"},
        causes={3: ["power brake", "power brake"]},
        at_unix_s=lambda step: 1000.0 + step,
    )
    assert (found.cls, found.ranks, found.nodes, found.gpus) == (FaultClass.STRAGGLER, (3,), ("host1",), ("GPU-7",))
    assert (found.section, found.since_unix_s) == ("backward", 1100.0)
    assert found.summary == (
        "rank 3 on host1 takes 20 % longer for its own work since step 100, in backward (90 % of it), by more work; "
        "the job would win 10.0 % of its step time; device: power brake"
    )


def test_confidence_grows_with_what_supports_it() -> None:
    alone = replace(SLOW, peers=0, is_actionable=False)
    pair = replace(SLOW, peers=1)
    probed = replace(SLOW, probe=0.18)
    group = replace(SLOW, kind=AlarmKind.GROUP, group="dp 1", is_actionable=False)
    values = [findings([a])[0].confidence for a in (alone, group, pair, SLOW, probed)]
    assert values == sorted(values)
    assert values[2] >= 0.7
    assert values[0] < 0.7


def test_ranks_are_written_as_ranges() -> None:
    node = replace(SLOW, kind=AlarmKind.NODE, ranks=(4, 5, 6, 9), node="host2")
    assert sentence(node).startswith("node host2 (ranks 4-6,9) takes 20 % longer")


def timing(step: int, busy_s: float = 1.0, probe_s: float | None = None) -> StepTiming:
    return StepTiming(
        step=step, at_s=float(step), wall_s=1.5, busy_s=busy_s, forward_s=0.3, backward_s=0.6, optimizer_s=0.05,
        data_s=0.05, checkpoint_s=0.0, wait_s=0.5, cpu_s=0.9, probe_s=probe_s, work=None, flags=TAG_FORWARD_SEEN,
    )  # fmt: skip


def test_timings_of_two_nodes_become_whole_steps() -> None:
    alignment = StepAlignment(4)
    first = TimingBlock.of_rows({0: [timing(5), timing(6)], 1: [timing(5, 2.0), timing(6)]})
    alignment.add(TimingBlock.unpack(first.pack()), now_s=0.0)
    assert alignment.ready(1.0) == []
    second = TimingBlock.of_rows({2: [timing(5)], 3: [timing(5, probe_s=0.005)]})
    alignment.add(TimingBlock.unpack(second.pack()), now_s=1.0)
    [frame] = alignment.ready(1.0)
    assert (frame.step, frame.busy_s.tolist()) == (5, [1.0, 2.0, 1.0, 1.0])
    assert frame.probe_s is not None
    assert np.isnan(frame.probe_s[:3]).all()
    assert frame.probe_s[3] == pytest.approx(0.005)
    assert frame.work is None
    assert frame.details.backward_s is not None
    assert frame.details.backward_s == pytest.approx([0.6] * 4)
    assert np.asarray(frame.flags).tolist() == [TAG_FORWARD_SEEN] * 4


def test_a_missing_node_delays_by_no_more_than_the_patience() -> None:
    alignment = StepAlignment(2, patience_s=5.0)
    alignment.add(TimingBlock.of_rows({0: [timing(1), timing(2)]}), now_s=10.0)
    assert alignment.ready(14.9) == []
    frames = alignment.ready(15.0)
    assert [f.step for f in frames] == [1, 2]
    assert np.isnan(frames[0].busy_s).tolist() == [False, True]
    alignment.add(TimingBlock.of_rows({1: [timing(1), timing(2), timing(3)]}), now_s=16.0)
    assert alignment.late == 2
    assert [f.step for f in alignment.ready(30.0)] == [3]


def test_too_many_steps_do_not_pile_up() -> None:
    alignment = StepAlignment(2, patience_s=1e9, most_steps=10)
    alignment.add(TimingBlock.of_rows({0: [timing(step) for step in range(15)]}), now_s=0.0)
    assert [f.step for f in alignment.ready(0.0)] == [0, 1, 2, 3, 4]


def test_damaged_timings_are_refused() -> None:
    data = TimingBlock.of_rows({0: [timing(1)]}).pack()
    for bad in (b"", data[:-1], b"XXXX" + data[4:], data + b"\0"):
        with pytest.raises(ValueError, match="cannot read timings"):
            TimingBlock.unpack(bad)


def test_a_recorded_run_becomes_a_report() -> None:
    rng = np.random.default_rng(0)

    def frames(steps: int) -> list[StepFrame]:
        out = []
        for step in range(steps):
            busy = np.exp(rng.normal(0.0, 0.01, 6))
            if step >= 120:
                busy[4] *= 1.3
            out.append(StepFrame(step, busy))
        return out

    report = analyse(frames(300), None, 6, nodes={r: f"host{r // 3}" for r in range(6)})
    assert [(a.kind, a.ranks) for a in report.slow] == [(AlarmKind.RANK, (4,))]
    assert report.slow[0].impact > 0.15
    assert report.ranks[4].against_peers == pytest.approx(0.18, abs=0.02)
    assert report.ranks[4].node == "host1"
    assert len(report.heat.first_steps) <= 240
    assert report.heat.busy[-1, 4] == pytest.approx(0.3, abs=0.03)
    assert report.heat.busy[0, 4] == pytest.approx(0.0, abs=0.03)
    data = report.to_json()
    assert data["schema"] == "steadyrun.stragglers/1"
    assert data["alarms"][0]["summary"].startswith("rank 4 on host1 takes")
    assert data["heat"]["wait_s"][0][0] is None


def test_a_run_of_wall_times_says_that_they_name_nobody() -> None:
    report = analyse([StepFrame(step, np.zeros(2)) for step in range(5)], None, 2, config=StragglerConfig())
    assert report.slow == ()
    assert "name nobody" in report.notes[0]


def test_the_order_begins_anew_where_most_ranks_count_from_a_lower_step() -> None:
    alignment = StepAlignment(3)
    alignment.add(TimingBlock.of_rows({r: [timing(s) for s in range(10, 20)] for r in range(3)}), now_s=0.0)
    assert len(alignment.ready(0.0)) == 10
    alignment.add(TimingBlock.of_rows({0: [timing(5), timing(6)]}), now_s=1.0)  # one alone: late, or mistaken
    assert alignment.ready(10.0) == []
    for rank in (1, 2):
        alignment.add(TimingBlock.of_rows({rank: [timing(5), timing(6)]}), now_s=11.0)
    alignment.add(TimingBlock.of_rows({r: [timing(7)] for r in range(3)}), now_s=12.0)
    assert [f.step for f in alignment.ready(20.0)][-1] == 7


def test_nodes_that_are_cut_off_do_not_look_like_a_return() -> None:
    alignment = StepAlignment(3, patience_s=1.0)
    alignment.add(TimingBlock.of_rows({r: [timing(1)] for r in range(3)}), now_s=0.0)
    given = [f.step for f in alignment.ready(0.0)]
    for step in range(2, 30):
        alignment.add(TimingBlock.of_rows({0: [timing(step)]}), now_s=float(step))
        given += [f.step for f in alignment.ready(float(step))]
    assert given == list(range(1, 29))


def test_steps_that_cannot_be_are_left_out() -> None:
    rows = {0: [timing(-1), timing(1 << 63), replace(timing(2), wall_s=1e300), timing(3)], 9: [timing(3)]}
    alignment = StepAlignment(2)
    alignment.add(TimingBlock.of_rows(rows), now_s=0.0)
    frames = alignment.ready(9.0)
    assert [f.step for f in frames] == [3]
    assert np.isnan(frames[0].busy_s).tolist() == [False, True]
