"""Views, limits and a small driver for one machine; simulated jobs have ``steadyrun.testing.world``."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import pytest

from steadyrun.core.board import OpenSection, SlotView
from steadyrun.core.classes import Action, ExitClass, Mode
from steadyrun.node.machine import events as ev
from steadyrun.node.machine.events import Limits
from steadyrun.node.machine.node import NodeMachine


def make_view(
    rank: int = 0,
    attached_s: float | None = 1.0,
    step: int | None = None,
    step_at_s: float | None = None,
    sections: tuple[OpenSection, ...] = (),
    *,
    attempt: int = 0,
    pid: int | None = None,
    beat_at_s: float | None = None,
    last_change_s: float | None = None,
    finished_s: float | None = None,
    uses_should_stop: bool = False,
) -> SlotView:
    return SlotView(
        pid=100 + rank if pid is None else pid,
        attempt=attempt,
        rank=rank,
        attached_s=attached_s,
        finished_s=finished_s,
        step=step,
        step_at_s=step_at_s,
        steps_done=0 if step is None else step + 1,
        step_is_global=True,
        first_step_s=step_at_s,
        beats=0 if beat_at_s is None else 1,
        beat_at_s=beat_at_s,
        last_change_s=last_change_s,
        stop_calls=int(uses_should_stop),
        uses_should_stop=uses_should_stop,
        checkpoints_done=0,
        has_exception=False,
        dropped=0,
        sections=sections,
    )


QUIET = Limits(standby_after_steps=10**9, standby_after_s=inf)  # no standbys among the commands


class Driver:
    """A machine whose ranks run, fed by hand; ``out`` holds the commands of the last call."""

    def __init__(
        self,
        limits: Limits | None = None,
        mode: Mode = Mode.ACT,
        local_ranks: int = 2,
        nodes: int = 1,
        observed: bool = True,
    ) -> None:
        self.machine = NodeMachine(local_ranks, limits or QUIET, mode, observed)
        self.local_ranks, self.nodes = local_ranks, nodes
        self.now_s = 0.0
        self.out = self.machine.start(0.0)
        self.views: dict[int, SlotView | None] = {}

    def at(self, now_s: float, event: ev.Event) -> list[ev.Command]:
        assert now_s >= self.now_s
        self.now_s = now_s
        self.out = self.machine.handle(event, now_s)
        return self.out

    def joined(self, now_s: float = 0.0, attempt: int = 0) -> Driver:
        slots = tuple(ev.RankSlot(i, i) for i in range(self.local_ranks))
        self.at(now_s, ev.Joined(attempt, 0, self.nodes, self.nodes * self.local_ranks, slots))
        for i in range(self.local_ranks):
            self.at(now_s, ev.RankSpawned(i, 100 + i))
        return self

    def running(self, step_at_s: float = 10.0, **view: object) -> Driver:
        """Joined, spawned, attached, and one step done at *step_at_s*."""
        self.joined()
        self.read(step_at_s, {i: make_view(i, step=0, step_at_s=step_at_s, **view) for i in range(self.local_ranks)})  # type: ignore[arg-type]
        assert self.machine.phase is ev.NodePhase.RUNNING
        return self

    def read(self, now_s: float, views: dict[int, SlotView | None] | None = None) -> list[ev.Command]:
        self.views.update(views or {})
        return self.at(now_s, ev.BoardRead(dict(self.views)))

    def stopped(self, now_s: float, trigger: str = "exit") -> Driver:
        """The stop is agreed, the evidence is there, the ranks are being ended."""
        self.at(now_s, ev.PeerStop(self.machine.attempt, "test", 0, trigger))
        if trigger != "membership":
            self.at(now_s, ev.EvidenceDone(self.machine.attempt))
        return self

    def cooled(self, now_s: float) -> Driver:
        """All ranks are gone and swept."""
        self.stopped(now_s)
        for r, rank in list(self.machine.ranks.items()):
            if rank.is_alive:
                self.at(now_s, ev.RankExited(r, -15))
        self.at(now_s, ev.SweepDone(self.machine.attempt))
        return self

    def kinds(self) -> list[str]:
        return [type(c).__name__ for c in self.out]

    def restart(self, rejoin: bool = False, delay_s: float = 0.0, excluded: tuple[int, ...] = ()) -> ev.Decided:
        n = self.machine.attempt
        return ev.Decided(
            ev.Decision(n, Action.RESTART, n + 1, "test", rejoin=rejoin, delay_s=delay_s, excluded_nodes=excluded)
        )

    def stop(self, exit_class: ExitClass = ExitClass.PROGRAM_ERROR) -> ev.Decided:
        n = self.machine.attempt
        return ev.Decided(ev.Decision(n, Action.STOP, n, "enough", exit_class=exit_class))


@pytest.fixture
def view() -> Callable[..., SlotView]:
    return make_view


@pytest.fixture
def driver() -> Callable[..., Driver]:
    return Driver
