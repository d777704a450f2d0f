"""Events in any order: whatever a confused store or a late thread delivers, the machine stays legal and ends."""

from __future__ import annotations

import random
import signal

import pytest

from steadyrun.core.board import OpenSection, SlotView
from steadyrun.core.classes import Action, ExitClass, Mode
from steadyrun.node.machine import events as ev
from steadyrun.node.machine.events import Limits, NodePhase, ProbeResult, RankPhase
from steadyrun.node.machine.node import NodeMachine

RANKS = (0, 1)
LIMITS = Limits(sections={"checkpointing": 30.0}, accepted=frozenset({"checkpointing"}))
OVER = (NodePhase.LEFT, NodePhase.EXCLUDED)


def views_of(machine: NodeMachine, now_s: float, rng: random.Random) -> ev.BoardRead:
    views: dict[int, SlotView | None] = {}
    for r, rank in machine.ranks.items():
        kind = rng.choice(["none", "young", "late", "saving", "done"])
        at_s = max(now_s - {"late": 1000.0, "saving": 25.0}.get(kind, 0.1), 0.0)
        views[r] = None if kind == "none" or rank.pid is None else SlotView(
            pid=rank.pid, attempt=machine.attempt, rank=r, attached_s=0.5, finished_s=now_s if kind == "done" else None,
            step=1, step_at_s=at_s, steps_done=2, step_is_global=True, first_step_s=0.6, beats=0, beat_at_s=None,
            last_change_s=None, stop_calls=0, uses_should_stop=rng.random() < 0.5, checkpoints_done=0,
            has_exception=False, dropped=0,
            sections=(OpenSection("checkpointing", at_s),) if kind == "saving" else (),
        )  # fmt: skip
    return ev.BoardRead(views)


def draw_event(machine: NodeMachine, now_s: float, rng: random.Random) -> ev.Event:
    attempt = rng.choice([machine.attempt - 1, machine.attempt, machine.attempt, machine.attempt + 1])
    alive = [r for r, rank in machine.ranks.items() if rank.is_alive]
    choices: list[ev.Event] = [
        ev.Tick(),
        ev.StatesRead({r: rng.choice("RSDT") for r in RANKS}),
        ev.ProbesDone(
            tuple(ProbeResult(r, 6.0, rng.choice("RSDTtZ"), 0.0, rng.choice([True, False, None])) for r in RANKS)
        ),
        ev.EvidenceDone(attempt),
        ev.PeerStop(attempt, "x", 1, rng.choice(["exit", "hang", "membership", "preempted"])),
        ev.Decided(
            ev.Decision(
                attempt,
                rng.choice(list(Action)),
                attempt + 1,
                "x",
                rejoin=rng.random() < 0.5,
                excluded_nodes=rng.choice([(), (), (1,), (0,)]),
                exit_class=ExitClass.HANG,
            )
        ),
        ev.AllArrived(attempt),
        ev.StoreReady(attempt),
        ev.NodesWaiting(1),
        ev.SweepDone(attempt, rng.choice([(), (), (), (77,)])),
        views_of(machine, now_s, rng),
    ]
    if machine.phase is NodePhase.JOINING:
        slots = tuple(ev.RankSlot(r, r) for r in RANKS)
        choices += [ev.Joined(machine.attempt + 1, 0, rng.randint(1, 2), 4, slots)] * 8
    for r in alive:
        choices.append(ev.RankExited(r, rng.choice([0, 0, 1, -9])))
        choices.append(ev.RankIdle(r))
        if machine.ranks[r].pid is None:
            choices += [ev.RankSpawned(r, 100 + r)] * 3
    if rng.random() < 0.03:
        choices = [ev.ChannelLost("gone"), ev.StopAsked(signal.SIGTERM), ev.StopAsked(signal.SIGINT)]
    return rng.choice(choices)


@pytest.mark.parametrize("batch", range(8))
def test_any_order_of_events_is_legal_and_a_signal_always_ends_it(batch: int) -> None:
    for seed in range(batch * 50, (batch + 1) * 50):
        run(seed)


def run(seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    mode = rng.choice(list(Mode))
    machine = NodeMachine(len(RANKS), LIMITS, mode)
    machine.start(0.0)
    now_s = 0.0
    for _ in range(rng.randint(1, 80)):
        if machine.phase in OVER:
            break
        event = draw_event(machine, now_s, rng)
        now_s += rng.choice([0.0, 0.1, 1.0, 20.0])
        if isinstance(event, ev.Tick):
            now_s = max(now_s, min(machine.next_deadline_s(), now_s + 400.0))
        machine.handle(event, now_s)
    # From wherever that led: told to stop, with processes that obey SIGKILL, it ends in bounded time.
    machine.handle(ev.StopAsked(signal.SIGTERM), now_s)
    began_s = now_s
    for _ in range(100):
        if machine.phase in OVER:
            break
        now_s = max(now_s, machine.next_deadline_s())
        assert now_s < began_s + 2_000.0
        for command in machine.handle(ev.Tick(), now_s):
            if isinstance(command, ev.Kill):
                machine.handle(ev.RankExited(command.rank, -9), now_s)
    assert machine.phase in OVER, "\n".join(machine.story.lines())
    assert all(r.phase in (RankPhase.EXITED, RankPhase.STUCK) for r in machine.ranks.values())
