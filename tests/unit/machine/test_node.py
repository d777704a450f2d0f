"""One node's machine, event by event."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from typing import Any, get_args

import pytest

from steadyrun.core.board import OpenSection, SlotView
from steadyrun.core.classes import Action, ExitClass, Mode
from steadyrun.node.machine import events as ev
from steadyrun.node.machine.events import Limits, NodePhase, ProbeResult, RankPhase
from steadyrun.node.machine.node import ALLOWED, IGNORED, NodeMachine
from steadyrun.node.machine.rank import InvalidTransition

View = Callable[..., SlotView]
Make = Callable[..., Any]

ACCEPTED = Limits(
    sections={"step": 180.0, "setup": 600.0}, accepted=frozenset({"step", "setup"}), standby_after_s=float("inf")
)


def probe(rank: int, **facts: Any) -> ProbeResult:
    return ProbeResult(
        **{"rank": rank, "window_s": 6.0, "state": "S", "cpu_share": 0.0, "stack_unchanged": True, **facts}
    )


# -- starting ----------------------------------------------------------------------------------------------------------
def test_joining_starts_every_local_rank_and_running_needs_all_reports(driver: Make, view: View) -> None:
    d = driver()
    assert d.out == [ev.Join()]
    d.at(1.0, ev.Joined(3, 1, 2, 4, (ev.RankSlot(2, 0), ev.RankSlot(3, 1))))
    assert d.out == [ev.Spawn(2, 0, 3), ev.Spawn(3, 1, 3)]
    d.at(1.1, ev.RankSpawned(2, 102))
    d.at(1.1, ev.RankSpawned(3, 103))
    d.read(2.0, {2: view(2, attempt=3), 3: None})
    assert d.machine.phase is NodePhase.STARTING
    assert d.machine.rank_phase(2) is RankPhase.RUNNING
    d.read(3.0, {3: view(3, attempt=3)})
    assert d.machine.phase is NodePhase.RUNNING


def test_a_view_of_another_process_does_not_count_as_a_report(driver: Make, view: View) -> None:
    d = driver(local_ranks=1).joined()
    d.read(1.0, {0: view(0, pid=999)})
    d.read(2.0, {0: view(0, attempt=7)})
    assert d.machine.phase is NodePhase.STARTING


def test_a_failed_join_leaves_with_its_class(driver: Make) -> None:
    d = driver()
    d.at(5.0, ev.JoinFailed("no store", ExitClass.START_UP))
    assert d.out == [ev.Leave(ExitClass.START_UP, "no store")]


def test_a_wrong_number_of_ranks_is_refused(driver: Make) -> None:
    with pytest.raises(ValueError, match="2"):
        driver().at(1.0, ev.Joined(0, 0, 1, 1, (ev.RankSlot(0, 0),)))


def test_a_rank_that_cannot_be_started_ends_the_attempt_as_start_up(driver: Make) -> None:
    d = driver().joined()
    d.at(0.1, ev.SpawnFailed(1, "no such file"))
    [stop] = d.out
    assert (stop.trigger, stop.reason) == ("start_up", "rank 1 could not be started: no such file")


def test_ranks_that_may_never_attach_run_from_their_spawn_on_and_are_not_accused(driver: Make) -> None:
    d = driver(observed=False).joined()
    assert d.machine.phase is NodePhase.RUNNING
    d.read(50_000.0, {0: None, 1: None})
    assert d.out == []


# -- the end of training -----------------------------------------------------------------------------------------------
def test_when_all_ranks_ended_with_zero_the_node_finishes_once_and_leaves_when_all_have(driver: Make) -> None:
    d = driver().running()
    d.at(20.0, ev.RankExited(0, 0))
    assert d.out == []
    d.at(20.1, ev.RankExited(1, 0))
    assert d.out == [ev.Finish(0)]
    d.at(21.0, ev.Tick())
    assert d.out == []
    d.at(22.0, ev.AllFinished(0))
    assert d.out == [ev.Leave(ExitClass.OK, "all ranks ended with 0")]


def test_a_finished_node_does_not_wait_for_ever_for_a_lost_one(driver: Make) -> None:
    d = driver(nodes=2).running()
    d.at(20.0, ev.RankExited(0, 0))
    d.at(20.0, ev.RankExited(1, 0))
    due_s = d.machine.next_deadline_s()
    assert d.machine.limits.evaluation_s < due_s < 8_000.0
    d.at(due_s, ev.Tick())
    assert [c.exit_class for c in d.out] == [ExitClass.OK]


def test_a_finished_node_still_obeys_a_restart(driver: Make) -> None:
    d = driver(nodes=2).running()
    d.at(20.0, ev.RankExited(0, 0))
    d.at(20.0, ev.RankExited(1, 0))
    d.at(21.0, ev.PeerStop(0, "rank 3 exited with 1", 1, "exit"))
    assert d.kinds() == ["Gather"]
    d.at(21.5, ev.EvidenceDone(0))
    assert d.out == [ev.Sweep(0)]
    d.at(21.6, ev.SweepDone(0))
    d.at(21.7, d.restart())
    d.at(21.8, ev.AllArrived(0))
    d.at(21.9, ev.StoreReady(1))
    assert d.kinds() == ["Spawn", "Spawn"]


# -- exits -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", list(Mode))
def test_a_bad_exit_is_told_then_evidence_is_gathered_and_only_then_ranks_are_stopped(driver: Make, mode: Mode) -> None:
    d = driver(mode=mode).running()
    d.at(20.0, ev.RankExited(1, -9))
    assert d.out == [ev.PublishStop(0, "rank 1 was killed by signal 9", "exit", 20.0)]
    d.at(20.001, ev.PeerStop(0, "rank 1 was killed by signal 9", 0, "exit"))
    assert d.kinds() == ["Gather"]
    assert d.machine.rank_phase(0) is RankPhase.DUMPING
    d.at(20.2, ev.EvidenceDone(0))
    assert d.out == [ev.Terminate(0)]


def test_without_a_word_from_the_store_the_attempt_ends_all_the_same(driver: Make) -> None:
    d = driver().running()
    d.at(20.0, ev.RankExited(1, 1))
    due_s = d.machine.next_deadline_s()
    assert due_s <= 22.0
    d.at(due_s, ev.Tick())
    assert d.kinds() == ["Gather"]


def test_evidence_that_does_not_come_is_not_waited_for_longer_than_its_limit(driver: Make) -> None:
    d = driver().running()
    d.at(20.0, ev.PeerStop(0, "x", 1, "exit"))
    due_s = d.machine.next_deadline_s()
    assert due_s <= 20.0 + d.machine.limits.gather_s + 5.0
    d.at(due_s, ev.Tick())
    assert d.kinds() == ["Terminate", "Terminate"]


def test_a_second_exit_of_the_same_process_is_an_error_that_tells_the_story(driver: Make) -> None:
    d = driver().running()
    d.at(20.0, ev.RankExited(1, 1))
    with pytest.raises(InvalidTransition, match="story") as e:
        d.at(20.1, ev.RankExited(1, 1))
    assert any("RankExited(rank=1, code=1)" in line for line in e.value.story)


# -- hangs -------------------------------------------------------------------------------------------------------------
def test_a_default_limit_asks_for_a_second_signal_of_all_local_ranks(driver: Make) -> None:
    d = driver().running(10.0)
    assert d.machine.next_deadline_s() == 310.0
    d.read(310.0)
    assert d.out == [ev.Probe((0, 1), 6.0)]
    d.read(312.0)
    assert d.out == []


def test_the_guilty_is_named_and_the_late_are_handed_to_the_evidence(driver: Make) -> None:
    d = driver().running(10.0)
    d.read(310.0)
    d.read(316.0)
    d.at(316.0, ev.ProbesDone((probe(0, in_collective=True), probe(1))))
    assert d.kinds() == ["Suspect", "PublishStop"]
    assert (d.out[1].trigger, d.out[1].since_s, d.out[1].due_s) == ("hang", 10.0, 310.0)
    assert d.out[1].reason.startswith("rank 1 ")
    d.at(316.1, ev.PeerStop(0, d.out[1].reason, 0, "hang"))
    assert [s.rank for s in d.out[0].suspicions] == [1, 0]


def test_progress_during_the_probe_ends_the_suspicion(driver: Make, view: View) -> None:
    d = driver().running(10.0)
    d.read(310.0)
    d.read(316.0, {i: view(i, step=1, step_at_s=312.0) for i in (0, 1)})
    d.at(316.0, ev.ProbesDone((probe(0), probe(1))))
    assert d.out == []
    assert d.machine.next_deadline_s() == 612.0


def test_an_old_view_is_not_judged_with_a_fresh_probe(driver: Make, view: View) -> None:
    d = driver().running(10.0)
    d.read(310.0)
    d.at(316.0, ev.ProbesDone((probe(0), probe(1))))
    assert d.out == []
    assert d.machine.next_deadline_s() <= 316.0
    d.read(316.1, {i: view(i, step=1, step_at_s=315.0) for i in (0, 1)})
    assert d.out == []


def test_a_late_rank_that_moves_is_noted_and_looked_at_again_later_and_less_often(driver: Make) -> None:
    d = driver().running(10.0)
    moving = ev.ProbesDone((probe(0, in_collective=True), probe(1, stack_unchanged=False)))
    looked: list[float] = []
    for _ in range(4):
        due_s = d.machine.next_deadline_s()
        d.read(due_s)
        assert d.kinds() == ["Probe"]
        d.read(due_s + 6.0)
        d.at(due_s + 6.0, moving)
        assert set(d.kinds()) == {"Suspect"}
        looked.append(due_s)
    gaps = [b - a for a, b in itertools.pairwise(looked)]
    assert gaps == [66.0, 126.0, 246.0]
    assert d.machine.phase is NodePhase.RUNNING


def test_a_probe_that_never_comes_back_touches_nobody(driver: Make) -> None:
    d = driver().running(10.0)
    d.read(310.0)
    due_s = d.machine.next_deadline_s()
    assert due_s < 340.0
    d.read(due_s)
    assert set(d.kinds()) == {"Suspect"}
    assert "could not be examined" in d.out[0].note


@pytest.mark.parametrize("state", ["T", "D"])
def test_a_stopped_rank_is_told_once_and_acted_on_only_when_its_limit_passes(driver: Make, state: str) -> None:
    d = driver().running(10.0)
    d.at(20.0, ev.StatesRead({0: "S", 1: state}))
    assert d.machine.next_deadline_s() == 30.0
    d.at(29.0, ev.StatesRead({0: "S", 1: state}))
    assert d.out == []
    d.at(30.0, ev.StatesRead({0: "S", 1: state}))
    assert [(c.suspicion.kind, c.suspicion.rank) for c in d.out] == [("stopped", 1)]
    d.at(60.0, ev.StatesRead({0: "S", 1: state}))
    assert d.out == []
    d.read(310.0)
    d.read(316.0)
    d.at(316.0, ev.ProbesDone((probe(0, in_collective=True), probe(1, state=state))))
    assert d.out[-1].trigger == ("stopped" if state == "T" else "hang")


def test_an_accepted_limit_is_acted_on_at_once(driver: Make) -> None:
    d = driver(limits=ACCEPTED).running(10.0)
    d.read(190.0)
    assert d.kinds() == ["Suspect", "Suspect", "PublishStop"]
    assert d.out[-1].due_s == 190.0


def test_an_accepted_first_pass_is_only_asked_whether_it_compiles(driver: Make, view: View) -> None:
    d = driver(limits=ACCEPTED, local_ranks=1).joined()
    d.read(2.0, {0: view(0, attached_s=2.0, sections=(OpenSection("setup", 2.0, True),))})
    d.read(602.0)
    assert d.out == [ev.Probe((0,), 0.1)]
    d.read(602.1)
    d.at(602.1, ev.ProbesDone((probe(0, compiling=True, stack_unchanged=False),)))
    assert d.kinds() == ["Suspect"]
    again_s = d.machine.next_deadline_s()
    d.read(again_s)
    assert d.kinds() == ["Probe"]
    d.at(again_s + 0.1, ev.ProbesDone((probe(0),)))
    assert d.kinds() == ["Suspect", "PublishStop"]


def test_an_accepted_limit_does_not_wait_for_the_probe_of_another(driver: Make, view: View) -> None:
    limits = Limits(sections={"save_x": 350.0}, accepted=frozenset({"save_x"}), standby_after_s=float("inf"))
    d = driver(limits=limits).running(10.0)
    d.read(20.0, {1: view(1, step=0, step_at_s=10.0, sections=(OpenSection("save_x", 20.0),))})
    d.read(310.0)
    assert d.kinds() == ["Probe"]
    d.at(316.0, ev.ProbesDone((probe(0, in_collective=True), probe(1, stack_unchanged=False))))
    d.read(316.0)
    assert d.machine.next_deadline_s() == 370.0
    d.read(370.0)
    assert d.kinds() == ["Suspect", "PublishStop"]


def test_observe_mode_reports_once_until_that_rank_goes_on(driver: Make, view: View) -> None:
    d = driver(mode=Mode.OBSERVE).running(10.0)
    d.read(310.0)
    d.read(316.0)
    d.at(316.0, ev.ProbesDone((probe(0, in_collective=True), probe(1))))
    assert d.kinds() == ["Suspect", "Gather"]
    assert d.out[1].only_report
    d.at(317.0, ev.EvidenceDone(0))
    assert (d.out, d.machine.phase) == ([], NodePhase.RUNNING)
    d.read(5000.0)
    assert d.out == []
    d.read(5001.0, {i: view(i, step=1, step_at_s=5001.0) for i in (0, 1)})
    d.read(d.machine.next_deadline_s())
    assert d.kinds() == ["Probe"]


def test_an_agent_that_was_asleep_gives_ranks_a_moment_before_it_judges(driver: Make, view: View) -> None:
    d = driver(limits=ACCEPTED).running(10.0)
    d.read(400.0)
    assert d.out == []
    d.read(401.0, {i: view(i, step=1, step_at_s=400.5) for i in (0, 1)})
    assert d.machine.next_deadline_s() == 580.5
    d.read(580.5)
    assert "PublishStop" in d.kinds()


# -- stopping ----------------------------------------------------------------------------------------------------------
def test_the_grace_is_followed_by_sigkill_and_then_by_stuck(driver: Make) -> None:
    d = driver().running().stopped(20.0)
    assert d.kinds() == ["Terminate", "Terminate"]
    assert d.machine.next_deadline_s() == 25.0
    d.at(25.0, ev.Tick())
    assert d.kinds() == ["Kill", "Kill"]
    d.at(25.1, ev.RankExited(0, -9))
    assert d.machine.next_deadline_s() == 40.0
    d.at(40.0, ev.Tick())
    assert d.machine.rank_phase(1) is RankPhase.STUCK
    assert d.out == [ev.Sweep(0)]
    d.at(40.1, ev.SweepDone(0))
    assert d.kinds() == ["Leave"]
    assert d.out[0].exit_class is ExitClass.NODE_FAULT


def test_a_process_that_goes_after_all_does_not_make_the_node_leave(driver: Make) -> None:
    d = driver(local_ranks=1).running().stopped(20.0)
    d.at(25.0, ev.Tick())
    d.at(40.0, ev.Tick())
    assert d.machine.rank_phase(0) is RankPhase.STUCK
    d.at(40.05, ev.RankExited(0, -9))
    d.at(40.1, ev.SweepDone(0))
    assert d.out == [ev.Arrive(0)]


def test_a_leftover_that_survives_sigkill_makes_the_node_leave(driver: Make) -> None:
    d = driver().running().stopped(20.0)
    d.at(20.1, ev.RankExited(0, -15))
    d.at(20.1, ev.RankExited(1, -15))
    d.at(20.2, ev.SweepDone(0, stuck=(4711,)))
    assert d.kinds() == ["Leave"]
    assert "4711" in d.out[0].reason


@pytest.mark.parametrize(("trigger", "killed"), [("hang", True), ("exit", True), ("membership", False)])
def test_after_a_fault_a_rank_that_does_nothing_about_sigterm_loses_its_grace(
    driver: Make, trigger: str, killed: bool
) -> None:
    d = driver().running(10.0).stopped(20.0, trigger)
    d.at(21.0, ev.RankIdle(1))
    assert d.out == ([ev.Kill(1)] if killed else [])


def test_a_blocked_rank_that_saves_keeps_its_grace(driver: Make, view: View) -> None:
    saving = view(1, step=0, step_at_s=10.0, sections=(OpenSection("checkpointing", 12.0),))
    d = driver().running(10.0)
    d.read(15.0, {1: saving})
    d.stopped(20.0, "hang")
    assert d.at(21.0, ev.RankIdle(1)) == []


def test_the_grace_is_extended_while_a_rank_saves_and_short_again_after(driver: Make, view: View) -> None:
    d = driver().running()
    saving = view(0, step=0, step_at_s=10.0, sections=(OpenSection("checkpointing", 19.0),))
    d.read(19.0, {0: saving})
    d.stopped(20.0)
    d.at(20.1, ev.RankExited(1, -15))
    d.at(25.0, ev.Tick())
    assert d.out == []
    assert d.machine.next_deadline_s() == 620.0
    d.read(300.0, {0: view(0, step=0, step_at_s=10.0, last_change_s=299.0)})
    assert d.machine.next_deadline_s() == 305.0
    d.at(305.0, ev.Tick())
    assert d.kinds() == ["Kill"]


def test_a_membership_change_needs_no_evidence_but_a_rank_that_will_not_go_does(driver: Make) -> None:
    d = driver(nodes=2).running()
    d.at(20.0, ev.NodesWaiting(1))
    [stop] = d.out
    assert (stop.trigger, stop.reason.startswith("membership")) == ("membership", True)
    d.at(20.1, ev.PeerStop(0, stop.reason, 0, "membership"))
    assert d.kinds() == ["Terminate", "Terminate"]
    d.at(20.2, ev.RankExited(0, -15))
    d.at(25.1, ev.Tick())
    assert d.kinds() == ["Gather"]
    assert d.out[0].only_report
    d.at(25.6, ev.EvidenceDone(0))
    d.at(d.machine.next_deadline_s(), ev.Tick())
    assert d.kinds() == ["Kill"]


def test_nodes_that_wait_are_ignored_until_all_ranks_run(driver: Make, view: View) -> None:
    d = driver(nodes=2).joined()
    d.at(1.0, ev.NodesWaiting(1))
    assert d.out == []
    d.read(2.0, {0: view(0), 1: view(1)})
    assert d.kinds() == ["PublishStop"]


# -- cooling -----------------------------------------------------------------------------------------------------------
def test_the_next_attempt_waits_for_the_decision_all_nodes_the_store_and_the_delay(driver: Make) -> None:
    d = driver(nodes=2).running().cooled(20.0)
    assert d.out == [ev.Arrive(0)]
    d.at(20.5, d.restart(delay_s=10.0))
    assert d.out == []
    d.at(21.0, ev.AllArrived(0))
    assert d.out == [ev.OpenStore(1)]
    d.at(21.1, ev.StoreReady(1))
    assert d.out == []
    assert d.machine.next_deadline_s() == 31.0
    d.at(31.0, ev.Tick())
    assert d.out == [ev.Spawn(0, 0, 1), ev.Spawn(1, 1, 1)]
    assert d.machine.attempt == 1


@pytest.mark.parametrize(("nodes", "first"), [(1, "Leave"), (2, "Join")])
def test_a_decision_that_never_comes_is_not_waited_for(driver: Make, nodes: int, first: str) -> None:
    d = driver(nodes=nodes).running().cooled(20.0)
    d.at(20.0 + d.machine.limits.decide_s, ev.Tick())
    assert d.kinds() == [first]


def test_nodes_that_never_arrive_are_not_waited_for(driver: Make) -> None:
    d = driver(nodes=2).running().cooled(20.0)
    d.at(20.5, d.restart())
    assert d.machine.next_deadline_s() == 140.0
    d.at(140.0, ev.Tick())
    assert d.out == [ev.Join()]


def test_a_store_that_never_comes_up_is_not_waited_for(driver: Make) -> None:
    d = driver(nodes=2).running().cooled(20.0)
    d.at(20.5, d.restart())
    d.at(21.0, ev.AllArrived(0))
    d.at(d.machine.next_deadline_s(), ev.Tick())
    assert d.out == [ev.Join()]


def test_the_order_of_decision_and_arrival_does_not_matter(driver: Make) -> None:
    d = driver(nodes=2).running()
    d.at(20.0, ev.PeerStop(0, "x", 1, "exit"))
    d.at(20.1, d.restart())
    d.at(20.2, ev.EvidenceDone(0))
    d.at(20.3, ev.RankExited(0, -15))
    d.at(20.3, ev.RankExited(1, -15))
    d.at(20.4, ev.SweepDone(0))
    d.at(20.5, ev.AllArrived(0))
    assert d.out == [ev.OpenStore(1)]


def test_a_stop_decision_waits_for_the_others_then_leaves_with_its_class(driver: Make) -> None:
    d = driver(nodes=2).running().cooled(20.0)
    d.at(20.5, d.stop(ExitClass.HANG))
    assert d.out == []
    d.at(21.0, ev.AllArrived(0))
    assert d.out == [ev.Leave(ExitClass.HANG, "enough")]


def test_rejoin_goes_through_the_rendezvous(driver: Make) -> None:
    d = driver(nodes=2).running().cooled(20.0)
    d.at(20.5, d.restart(rejoin=True))
    d.at(21.0, ev.AllArrived(0))
    assert d.out == [ev.Join()]
    assert d.machine.phase is NodePhase.JOINING


def test_an_excluded_node_leaves_and_the_others_join_anew(driver: Make) -> None:
    d = driver(nodes=2).running().cooled(20.0)
    d.at(20.5, d.restart(excluded=(0,)))
    assert d.machine.phase is NodePhase.EXCLUDED
    assert [c.exit_class for c in d.out] == [ExitClass.NODE_FAULT]
    other = driver(nodes=2).running().cooled(20.0)
    other.at(20.5, other.restart(excluded=(1,)))
    other.at(21.0, ev.AllArrived(0))
    assert other.out == [ev.Join()]


def test_words_about_older_attempts_mean_nothing(driver: Make) -> None:
    d = driver(nodes=2).joined(attempt=4)
    for event in (
        ev.PeerStop(3, "x", 1, "exit"),
        ev.Decided(ev.Decision(3, Action.STOP, 3, "x")),
        ev.AllArrived(3),
        ev.EvidenceDone(3),
    ):
        d.at(1.0, event)
        assert d.out == []
    assert d.machine.phase is NodePhase.STARTING


def test_a_stop_of_the_next_attempt_that_comes_early_is_obeyed_as_soon_as_it_begins(driver: Make) -> None:
    d = driver(nodes=2).running().cooled(20.0)
    d.at(20.5, d.restart(delay_s=5.0))
    d.at(21.0, ev.AllArrived(0))
    d.at(21.1, ev.StoreReady(1))
    d.at(22.0, ev.PeerStop(1, "rank 3 exited with 1", 1, "exit"))
    assert d.out == []
    d.at(26.0, ev.Tick())
    assert d.kinds() == ["Spawn", "Spawn", "Gather"]
    d.at(26.1, ev.RankSpawned(0, 200))
    assert d.machine.phase is NodePhase.GATHERING


# -- losing the others -------------------------------------------------------------------------------------------------
def test_a_lost_channel_stops_the_ranks_after_evidence_and_leaves(driver: Make) -> None:
    d = driver(nodes=2).running()
    d.at(20.0, ev.ChannelLost("connection reset"))
    assert [(c.trigger, c.only_report) for c in d.out] == [("node_lost", True)]
    d.at(20.5, ev.EvidenceDone(0))
    d.at(20.6, ev.RankExited(0, -15))
    d.at(20.6, ev.RankExited(1, -15))
    d.at(20.7, ev.SweepDone(0))
    assert d.kinds() == ["Leave"]
    assert d.out[0].exit_class is ExitClass.NODE_FAULT
    assert "connection reset" in d.out[0].reason


@pytest.mark.parametrize(
    ("prepare", "exit_class"),
    [("nothing", ExitClass.START_UP), ("finished", ExitClass.OK), ("cooled", ExitClass.NODE_FAULT)],
)
def test_a_lost_channel_without_ranks_leaves_at_once(driver: Make, prepare: str, exit_class: ExitClass) -> None:
    d = driver(nodes=2)
    if prepare == "finished":
        d.running()
        d.at(20.0, ev.RankExited(0, 0))
        d.at(20.0, ev.RankExited(1, 0))
    elif prepare == "cooled":
        d.running().cooled(20.0)
    d.at(21.0, ev.ChannelLost("gone"))
    assert [c.exit_class for c in d.out if isinstance(c, ev.Leave)] == [exit_class]


def test_a_stop_decision_that_is_known_survives_the_loss_of_the_channel(driver: Make) -> None:
    d = driver(nodes=2).running().cooled(20.0)
    d.at(20.5, d.stop(ExitClass.OUT_OF_MEMORY))
    d.at(20.6, ev.ChannelLost("the host left first"))
    assert d.out[-1].exit_class is ExitClass.OUT_OF_MEMORY


# -- being told to leave -----------------------------------------------------------------------------------------------
def leave(d: Any, now_s: float) -> ev.Leave:
    for r, rank in list(d.machine.ranks.items()):
        if rank.is_alive:
            d.at(now_s, ev.RankExited(r, -15))
    d.at(now_s, ev.SweepDone(d.machine.attempt))
    [left] = [c for c in d.out if isinstance(c, ev.Leave)]
    return left


def test_a_signal_while_joining_leaves_at_once(driver: Make) -> None:
    d = driver()
    d.at(1.0, ev.StopAsked(signal.SIGTERM))
    assert d.out == [ev.Leave(ExitClass.PREEMPTED, "told to stop by SIGTERM")]


@pytest.mark.parametrize(
    ("signum", "exit_class"), [(signal.SIGTERM, ExitClass.PREEMPTED), (signal.SIGINT, ExitClass.INTERNAL)]
)
def test_sigterm_passes_on_and_leaves_with_its_class(driver: Make, signum: int, exit_class: ExitClass) -> None:
    d = driver().running()
    d.at(20.0, ev.StopAsked(signum))
    assert d.kinds() == ["DropStandbys", "AskToStop", "Terminate", "Terminate"]
    assert d.machine.next_deadline_s() == 50.0
    assert leave(d, 21.0).exit_class is exit_class


def test_ranks_that_ask_should_stop_get_the_grace_before_sigterm(driver: Make) -> None:
    d = driver().running(uses_should_stop=True)
    d.at(20.0, ev.StopAsked(signal.SIGTERM))
    assert d.kinds() == ["DropStandbys", "AskToStop"]
    assert d.machine.next_deadline_s() == 45.0
    d.at(45.0, ev.Tick())
    assert d.kinds() == ["Terminate", "Terminate"]
    assert d.machine.next_deadline_s() == 50.0


def test_ranks_that_leave_by_themselves_are_never_signalled(driver: Make) -> None:
    d = driver(nodes=2).running(uses_should_stop=True)
    d.at(20.0, ev.StopAsked(signal.SIGTERM))
    d.at(30.0, ev.RankExited(0, 0))
    d.at(30.0, ev.RankExited(1, 0))
    assert d.out == [ev.Sweep(0)]
    d.at(30.1, ev.SweepDone(0))
    assert d.kinds() == ["Finish", "Leave"]


def test_the_other_nodes_hear_of_a_preemption_before_the_ranks_go(driver: Make) -> None:
    d = driver(nodes=2).running()
    d.at(20.0, ev.StopAsked(signal.SIGTERM))
    kinds = d.kinds()
    assert kinds.index("PublishStop") < kinds.index("Terminate")
    assert next(c for c in d.out if isinstance(c, ev.PublishStop)).trigger == "preempted"


def test_a_preempted_member_makes_the_others_join_anew(driver: Make) -> None:
    d = driver(nodes=2).running()
    d.at(20.0, ev.PeerStop(0, "node 1 was told to stop by SIGTERM", 1, "preempted"))
    d.at(20.1, ev.EvidenceDone(0))
    d.at(20.2, ev.RankExited(0, -15))
    d.at(20.2, ev.RankExited(1, -15))
    d.at(20.3, ev.SweepDone(0))
    d.at(20.4, d.restart())
    d.at(20.5, ev.AllArrived(0))
    assert d.out == [ev.Join()]


def test_further_signals_change_nothing_but_a_second_ctrl_c_ends_the_grace(driver: Make) -> None:
    d = driver().running()
    d.at(20.0, ev.StopAsked(signal.SIGINT))
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
        d.at(21.0, ev.StopAsked(signum))
        assert d.out == []
    assert d.machine.next_deadline_s() == 50.0
    d.at(22.0, ev.StopAsked(signal.SIGINT))
    assert d.kinds() == ["Kill", "Kill"]


def test_a_save_outlasts_the_final_grace(driver: Make, view: View) -> None:
    d = driver(local_ranks=1).running()
    d.at(20.0, ev.StopAsked(signal.SIGTERM))
    d.read(21.0, {0: view(0, step=0, step_at_s=10.0, sections=(OpenSection("checkpointing", 20.5),))})
    d.at(60.0, ev.Tick())
    assert d.out == []
    assert d.machine.next_deadline_s() == 620.0
    d.at(61.0, ev.RankExited(0, 0))
    assert d.out == [ev.Sweep(0)]


def test_a_signal_during_an_incident_completes_the_evidence_and_then_leaves(driver: Make) -> None:
    d = driver().running()
    d.at(20.0, ev.RankExited(1, 1))
    d.at(20.001, ev.StopAsked(signal.SIGTERM))
    assert d.kinds() == ["Gather"]
    d.at(20.2, ev.EvidenceDone(0))
    assert "Terminate" in d.kinds()
    assert "AskToStop" not in d.kinds()
    assert leave(d, 21.0).exit_class is ExitClass.PREEMPTED


def test_a_signal_during_a_restart_leaves_instead(driver: Make) -> None:
    d = driver().running().stopped(20.0)
    d.at(20.1, ev.StopAsked(signal.SIGTERM))
    assert d.machine.phase is NodePhase.DRAINING
    assert leave(d, 21.0).exit_class is ExitClass.PREEMPTED
    cooled = driver().running().cooled(20.0)
    cooled.at(20.5, ev.StopAsked(signal.SIGTERM))
    assert [c.exit_class for c in cooled.out if isinstance(c, ev.Leave)] == [ExitClass.PREEMPTED]


# -- the table ---------------------------------------------------------------------------------------------------------
def test_whatever_comes_after_the_end_is_void(driver: Make) -> None:
    d = driver()
    d.at(1.0, ev.StopAsked(signal.SIGTERM))
    for event in (ev.Tick(), ev.RankExited(0, 0), ev.StoreReady(1), ev.NodesWaiting(2), ev.SweepDone(0)):
        assert d.at(2.0, event) == []


def test_an_event_that_makes_no_sense_is_an_error_and_not_silence(driver: Make) -> None:
    d = driver().running()
    for event in (
        ev.JoinFailed("x", ExitClass.INTERNAL),
        ev.AllFinished(0),
        ev.RankExited(99, 0),
        ev.RankSpawned(99, 1),
    ):
        with pytest.raises(InvalidTransition, match="story"):
            d.at(20.0, event)


def test_ignored_events_name_known_events_and_live_phases_and_give_a_reason() -> None:
    for (phase, event), reason in IGNORED.items():
        assert event in get_args(ev.Event)
        assert phase not in (NodePhase.LEFT, NodePhase.EXCLUDED)
        assert reason


def test_every_phase_can_be_reached_and_leads_to_an_end() -> None:
    reached, todo = {NodePhase.JOINING}, [NodePhase.JOINING]
    while todo:
        new = ALLOWED[todo.pop()] - reached
        reached |= new
        todo += new
    assert reached == set(NodePhase)


def test_standbys_wait_for_stable_steps_of_all_ranks_and_are_asked_for_once(driver: Make, view: View) -> None:
    d = driver(limits=Limits()).joined()
    d.read(10.0, {0: view(0, step=2, step_at_s=10.0), 1: view(1, step=0, step_at_s=9.0)})
    assert d.out == []
    d.read(11.5)
    assert d.out == [ev.StartStandbys()]
    d.read(12.0)
    assert d.out == []


def test_next_deadline_never_lies_in_the_past_after_it_was_served(driver: Make) -> None:
    d = driver().running(10.0)
    for _ in range(20):
        due_s = d.machine.next_deadline_s()
        d.read(due_s)
        d.at(due_s, ev.Tick())
        assert d.machine.next_deadline_s() > due_s


def test_a_machine_needs_no_limits_to_be_finite() -> None:
    """Every limit off: a hang is never judged, and the node still obeys."""
    inf = float("inf")
    limits = Limits(start_s=inf, setup_s=inf, step_s=inf, out_of_section_s=inf, teardown_s=inf)
    machine = NodeMachine(1, limits)
    machine.start(0.0)
    machine.handle(ev.Joined(0, 0, 1, 1, (ev.RankSlot(0, 0),)), 0.0)
    assert machine.next_deadline_s() == inf
    machine.handle(ev.RankExited(0, 1), 5.0)
    assert machine.next_deadline_s() < 10.0
