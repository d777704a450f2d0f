"""Whole jobs on a fake clock: single faults by name, then hundreds drawn by chance. Every failure prints its seed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from steadyrun.core.classes import ExitClass, Mode
from steadyrun.node.machine.events import Limits, NodePhase, StartStandbys
from steadyrun.testing.world import Doing, Fault, GatherMade, Script, SimRank, World, restart_while

L = Limits(
    start_s=20.0,
    setup_s=40.0,
    step_s=15.0,
    first_step_s=40.0,
    checkpointing_s=60.0,
    evaluation_s=120.0,
    default_section_s=60.0,
    out_of_section_s=30.0,
    teardown_s=15.0,
    recheck_s=10.0,
)
DIE = ("kill", "exit")
HANG = ("hang", "hang_section", "skip_collective", "busy", "stop", "uninterruptible", "never_report", "teardown_hang")
HARMLESS = ("slow_evaluation", "slow_checkpoint", "slow_compile", "ignore_sigterm", "agent_stopped")
END_S = 20_000.0


def run(seed: int = 0, until_s: float = END_S, **settings: Any) -> World:
    world = World(**{"nodes": 1, "ranks_per_node": 2, "limits": L, "seed": seed, **settings}).run(until_s)
    world.check_ended()
    world.check_evidence_before_kill()
    return world


def trigger_of(fault: Fault) -> str:
    return {"never_report": "start_up", "stop": "stopped", "kill": "exit", "exit": "exit"}.get(fault.kind, "hang")


def process_of(world: World, fault: Fault) -> SimRank:
    return next(p for p in world.processes if fault in p.faults)


def shows(made: GatherMade, p: SimRank, fault: Fault) -> bool:
    """The evidence holds the fault: the exit, or the rank as it hung."""
    if made.node != p.node or made.command.attempt != p.attempt:
        return False
    if fault.kind in DIE:
        return made.exits.get(p.rank) == (-9 if fault.kind == "kill" else 1)
    return p.rank in made.doing and (made.doing[p.rank] is not Doing.GONE or p.rank in made.exits)


# -- single faults -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("own_sections", [False, True])
def test_a_healthy_job_ends_well_and_nobody_is_suspected(nodes: int, own_sections: bool) -> None:
    world = run(nodes=nodes, script=Script(own_sections=own_sections))
    assert world.exit_classes() == [ExitClass.OK] * nodes
    assert (world.gathers, world.stops, world.suspects, world.kills) == ([], [], [], [])


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("kind", DIE + HANG)
def test_a_fault_is_named_and_the_job_goes_on(kind: str, nodes: int) -> None:
    fault = Fault(kind, rank=1, step=5)
    world = run(nodes=nodes, faults=[fault])
    assert [f for _, f in world.fired] == [fault]
    p = process_of(world, fault)
    made = next(g for g in world.gathers if g.node == p.node)
    assert made.command.trigger == trigger_of(fault)
    assert shows(made, p, fault)
    if kind in HANG and kind != "skip_collective":
        assert world.stops[0][2].reason.startswith("rank 1 ")
        assert made.command.suspicions[0].rank == 1
    ended = ExitClass.NODE_FAULT if kind == "uninterruptible" else ExitClass.OK
    assert world.exit_classes() == [ended] * nodes


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("kind", ["slow_evaluation", "slow_checkpoint", "slow_compile"])
def test_one_slow_but_legitimate_rank_makes_no_incident(kind: str, nodes: int) -> None:
    world = run(nodes=nodes, faults=[Fault(kind, rank=1, step=5, for_s=45.0)])
    assert len(world.fired) == 1
    assert world.exit_classes() == [ExitClass.OK] * nodes
    assert (world.gathers, world.stops, world.kills) == ([], [], [])


def test_detection_comes_right_after_an_accepted_limit() -> None:
    limits = Limits(sections={"step": 15.0}, accepted=frozenset({"step"}))
    for kind in ("hang", "busy", "stop", "skip_collective"):
        world = run(limits=limits, faults=[Fault(kind, rank=1, step=5)])
        at_s, _, stop = world.stops[0]
        assert stop.due_s is not None
        assert 0.0 <= at_s - stop.due_s < 0.3


def test_a_stopped_agent_accuses_nobody_when_it_comes_back() -> None:
    world = run(faults=[Fault("agent_stopped", node=0, at_s=4.0, for_s=60.0)], script=Script(steps=200))
    assert len(world.fired) == 1
    assert (world.stops, world.suspects, world.kills) == ([], [], [])
    assert world.exit_classes() == [ExitClass.OK]


def test_a_process_that_survives_sigkill_makes_its_node_leave_with_the_reason() -> None:
    world = run(faults=[Fault("uninterruptible", rank=1, step=5)])
    left = world.nodes[0].left
    assert left is not None
    assert left.exit_class is ExitClass.NODE_FAULT
    assert "[1] survived SIGKILL" in left.reason


def test_evidence_that_never_ends_does_not_keep_the_job_from_restarting() -> None:
    faults = [Fault("evidence_stuck", node=0, at_s=1.0), Fault("kill", rank=1, step=5)]
    world = run(faults=faults)
    assert world.exit_classes() == [ExitClass.OK]
    assert world.nodes[0].machine.attempt == 1


def test_a_spent_budget_stops_all_nodes_with_the_class_of_the_fault() -> None:
    faults = [Fault("kill", rank=1, step=s, attempt=a) for a, s in enumerate((1, 2, 3))]
    world = run(nodes=2, faults=faults, decide=restart_while(2))
    assert world.exit_classes() == [ExitClass.DEAD_PROCESS] * 2
    assert len(world.fired) == 3


def test_a_lost_agent_is_left_behind_and_the_others_join_anew() -> None:
    world = run(nodes=3, faults=[Fault("agent_lost", node=2, at_s=5.0)])
    assert world.exit_classes() == [ExitClass.OK, ExitClass.OK, None]
    assert world.nodes[0].machine.group_world_size == 2


def test_when_the_store_host_is_lost_the_others_stop_their_ranks_and_leave() -> None:
    world = run(nodes=3, faults=[Fault("agent_lost", node=0, at_s=5.0)], script=Script(victims_raise=False))
    assert world.exit_classes() == [None, ExitClass.NODE_FAULT, ExitClass.NODE_FAULT]
    assert world.now_s < 60.0


def test_a_node_cut_off_from_the_store_stops_its_ranks_and_leaves() -> None:
    world = run(nodes=2, faults=[Fault("channel_cut", node=1, at_s=5.0)])
    assert world.exit_classes() == [ExitClass.OK, ExitClass.NODE_FAULT]
    assert [g.command.trigger for g in world.gathers if g.node == 1] == ["node_lost"]


def test_sigterm_to_all_launchers_ends_all_with_preempted_and_no_incident() -> None:
    world = run(nodes=2, faults=[Fault("sigterm", at_s=5.0)])
    assert world.exit_classes() == [ExitClass.PREEMPTED] * 2
    assert world.now_s < 10.0


def test_sigterm_with_should_stop_lets_ranks_leave_at_the_same_call_by_themselves() -> None:
    world = run(nodes=2, faults=[Fault("sigterm", at_s=5.0)], script=Script(uses_should_stop=True))
    assert world.exit_classes() == [ExitClass.PREEMPTED] * 2
    assert world.kills == []
    assert len({p.next_step for p in world.processes}) == 1


def test_sigterm_waits_for_an_emergency_save_that_outlasts_the_grace() -> None:
    world = run(faults=[Fault("sigterm", at_s=5.0)], script=Script(saves_on_sigterm_s=200.0))
    assert [kill.is_hard for kill in world.kills] == [False, False]
    assert [p.code for p in world.processes] == [0, 0]
    assert 200.0 < world.now_s < 230.0


def test_sigterm_to_one_of_two_nodes_lets_the_other_go_on_without_it() -> None:
    world = run(nodes=2, faults=[Fault("sigterm", node=1, at_s=5.0)])
    assert world.exit_classes() == [ExitClass.OK, ExitClass.PREEMPTED]
    assert world.now_s < 60.0
    assert {g.command.trigger for g in world.gathers} == {"preempted"}


def test_a_rank_that_ignores_sigterm_is_killed_at_the_end_of_the_grace_after_its_evidence() -> None:
    faults = [Fault("ignore_sigterm", rank=0, step=0), Fault("sigterm", at_s=5.0)]
    world = run(faults=faults, script=Script(victims_raise=False))
    assert [(kill.rank, kill.is_hard) for kill in world.kills] == [(0, False), (1, False), (0, True)]
    assert [g.command.trigger for g in world.gathers] == ["preempted"]


def test_a_node_that_comes_late_is_let_in_by_a_membership_restart() -> None:
    world = run(nodes=2, late={1: 6.0}, script=Script(steps=40))
    assert world.exit_classes() == [ExitClass.OK] * 2
    assert [(s.trigger, n) for _, n, s in world.stops] == [("membership", 0)]
    assert world.gathers == []
    assert world.nodes[1].machine.group_world_size == 2


def test_observe_mode_reports_a_hang_once_and_touches_nobody() -> None:
    world = run(mode=Mode.OBSERVE, faults=[Fault("hang", rank=1, step=5), Fault("sigterm", at_s=600.0)])
    assert [(g.command.only_report, g.command.suspicions[0].rank) for g in world.gathers[:1]] == [(True, 1)]
    before = [g for g in world.gathers if g.at_s < 600.0]
    assert len(before) == 1
    assert all(kill.at_s >= 600.0 for kill in world.kills)


def test_observe_mode_restarts_a_dead_rank_as_usual() -> None:
    world = run(mode=Mode.OBSERVE, faults=[Fault("kill", rank=1, step=5)])
    assert world.exit_classes() == [ExitClass.OK]
    assert world.nodes[0].machine.attempt == 1


def test_standbys_are_asked_for_once_per_attempt_when_steps_are_stable() -> None:
    world = run(faults=[Fault("kill", rank=1, step=8)])
    asked = [at_s for at_s, _, c in world.commands if isinstance(c, StartStandbys)]
    assert len(asked) == 2


def test_the_same_seed_gives_the_same_run() -> None:
    draws = [drawn(17) for _ in range(2)]
    one, two = (World(**d).run(END_S) for d in draws)
    assert one.commands == two.commands


# -- drawn by chance ---------------------------------------------------------------------------------------------------
BATCHES, PER_BATCH = 24, 10


def drawn(seed: int) -> dict[str, Any]:
    """A job and what goes wrong in it."""
    rng = random.Random(f"steadyrun-{seed}")
    nodes, per_node = rng.randint(1, 4), rng.randint(1, 3)
    observe = rng.random() < 0.2
    kinds = rng.choices(
        [*DIE, *HANG, *HARMLESS, "agent_lost", "channel_cut", "channel_slow", "evidence_stuck", "sigterm", "sigint"],
        k=rng.choice((0, 1, 1, 1, 1, 2, 3)),
    )
    faults = [
        Fault(
            kind,
            rank=rng.randrange(nodes * per_node),
            step=rng.randint(0, 11),
            node=None if kind in ("sigterm", "sigint") and rng.random() < 0.5 else rng.randrange(nodes),
            at_s=rng.uniform(0.1, 20.0),
            for_s=rng.uniform(5.0, 50.0) if kind != "channel_slow" else rng.uniform(0.1, 2.0),
        )
        for kind in kinds
    ]
    if observe:  # nothing ends a hang in this mode but a person
        faults.append(Fault("sigterm", at_s=400.0))
    return {
        "nodes": nodes,
        "ranks_per_node": per_node,
        "limits": L,
        "script": Script(
            own_sections=rng.random() < 0.3,
            uses_should_stop=rng.random() < 0.3,
            victims_raise=rng.random() < 0.7,
            saves_on_sigterm_s=rng.choice((0.0, 0.0, 3.0)),
        ),
        "faults": faults,
        "seed": seed,
        "poll_s": rng.choice((1.0, 2.5)),
        "mode": Mode.OBSERVE if observe else Mode.ACT,
        "late": {nodes - 1: rng.uniform(1.0, 10.0)} if nodes > 1 and rng.random() < 0.15 else None,
    }


def is_explained(world: World, at_s: float, fault: Fault) -> bool:
    """Some evidence of its node and attempt shows it, or the attempt was being ended already when it happened."""
    p = process_of(world, fault)
    if any(shows(g, p, fault) for g in world.gathers):
        return True
    machine = world.nodes[p.node].machine
    if world.nodes[p.node].is_lost:
        return True  # its agent died before the fault was due
    ended_by_then = machine.attempt > p.attempt or machine.phase in (NodePhase.LEFT, NodePhase.EXCLUDED)
    others = [t for t, f in world.fired if f is not fault and f.kind not in HARMLESS]
    membership = any(s.trigger == "membership" and s.attempt == p.attempt for _, _, s in world.stops)
    return ended_by_then and (bool(others) or membership)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_drawn_faults_end_in_legal_states_with_every_incident_explained(batch: int) -> None:
    for seed in range(batch * PER_BATCH, (batch + 1) * PER_BATCH):
        run_drawn(seed)


def run_drawn(seed: int) -> None:
    try:
        check(World(**drawn(seed)).run(END_S))
    except Exception as e:
        raise AssertionError(f"seed {seed}: {drawn(seed)}") from e


def check(world: World) -> None:
    world.check_ended()
    world.check_evidence_before_kill()
    assert world.now_s < END_S, world.story()
    fired = [f for _, f in world.fired]
    for at_s, fault in world.fired:
        if fault.kind in DIE + HANG:
            assert is_explained(world, at_s, fault), f"{fault} is not explained\n{world.story()}"
    if all(f.kind in HARMLESS for f in fired):
        assert world.gathers == [], world.story()
        assert all(s.trigger == "membership" for _, _, s in world.stops), world.story()
        assert set(world.exit_classes()) == {ExitClass.OK}, world.story()
    if (
        len(fired) == 1
        and fired[0].kind in DIE + HANG
        and not any(s.trigger == "membership" for _, _, s in world.stops)
    ):
        p = process_of(world, fired[0])
        made = next(g for g in world.gathers if g.node == p.node and g.command.attempt == p.attempt)
        assert made.command.trigger == trigger_of(fired[0]), world.story()
        assert shows(made, p, fired[0]), world.story()
    if world.mode is Mode.OBSERVE:
        ended_s = min((t for t, f in world.fired if f.kind not in HANG + HARMLESS), default=END_S)
        admitted = {s.attempt for _, _, s in world.stops if s.trigger == "membership"}
        assert all(k.at_s >= ended_s for k in world.kills if k.attempt not in admitted), world.story()
