"""One rank process as its node sees it: phases, which may follow which, and the story that led there."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from math import inf
from typing import Final

from steadyrun.node.machine.events import RankPhase

__all__ = ["ALLOWED", "InvalidTransition", "RankMachine", "Story"]

STORY_LENGTH: Final = 200

ALLOWED: Final[Mapping[RankPhase, frozenset[RankPhase]]] = {
    RankPhase.STANDBY: frozenset({RankPhase.STARTING}),
    RankPhase.STARTING: frozenset({RankPhase.RUNNING, RankPhase.DUMPING, RankPhase.TERMINATING, RankPhase.EXITED}),
    RankPhase.RUNNING: frozenset({RankPhase.DUMPING, RankPhase.TERMINATING, RankPhase.EXITED}),
    RankPhase.DUMPING: frozenset({RankPhase.TERMINATING, RankPhase.EXITED}),
    RankPhase.TERMINATING: frozenset({RankPhase.KILLING, RankPhase.EXITED}),
    RankPhase.KILLING: frozenset({RankPhase.STUCK, RankPhase.EXITED}),
    # A process in state D may still go once its device or file server answers.
    RankPhase.STUCK: frozenset({RankPhase.EXITED}),
    RankPhase.EXITED: frozenset(),
}

MAY_HAVE_DEADLINE: Final = frozenset({RankPhase.TERMINATING, RankPhase.KILLING})


class Story:
    """The newest events and moves, in order; kept short so that it can go into every error and incident."""

    def __init__(self, length: int = STORY_LENGTH) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=length)

    def add(self, now_s: float, what: str) -> None:
        self._lines.append((now_s, what))

    def lines(self) -> tuple[str, ...]:
        """Oldest first, each with its time."""
        return tuple(f"{at_s:.3f} {what}" for at_s, what in self._lines)


class InvalidTransition(Exception):  # noqa: N818  (the established name of this error in state machines)
    """A bug in a machine or its loop: something came that cannot come here. Carries the story that led to it."""

    def __init__(self, who: str, phase: str, what: str, story: Sequence[str]) -> None:
        super().__init__(who, phase, what, tuple(story))
        self.who, self.phase, self.what, self.story = who, phase, what, tuple(story)

    def __str__(self) -> str:
        lines = "\n    ".join(self.story)
        return f"{self.who} cannot go from {self.phase} to {self.what}\n  story:\n    {lines}"


class RankMachine:
    """The life of one incarnation. ``move`` is the only place where the phase changes.

    Attributes:
        pid: None until it is known.
        deadline_s: when the phase has lasted too long; ``inf`` in phases without a deadline of their own (what a
            starting or running rank is allowed is the watchdog's business: it depends on what the rank reports).
        code: exit status, or minus the signal's number; None while it lives.
        terminated: SIGTERM was sent to it.
    """

    def __init__(self, rank: int, local_rank: int, attempt: int, story: Story) -> None:
        self.rank, self.local_rank, self.attempt = rank, local_rank, attempt
        self.phase = RankPhase.STANDBY
        self.deadline_s = inf
        self.pid: int | None = None
        self.spawned_s = inf
        self.exited_s = inf
        self.code: int | None = None
        self.terminated = False
        self._story = story

    @property
    def is_alive(self) -> bool:
        """A process exists that can be asked, signalled or waited for; False once it exited or is given up."""
        return self.phase not in (RankPhase.STANDBY, RankPhase.EXITED, RankPhase.STUCK)

    @property
    def ended_well(self) -> bool:
        return self.phase is RankPhase.EXITED and self.code == 0

    def move(self, phase: RankPhase, now_s: float, deadline_s: float = inf) -> None:
        """Go to *phase*.

        Raises:
            InvalidTransition: the table does not know this move.
        """
        if phase not in ALLOWED[self.phase]:
            raise InvalidTransition(f"rank {self.rank}", self.phase.value, phase.value, self._story.lines())
        assert deadline_s == inf or phase in MAY_HAVE_DEADLINE, f"{phase} has no deadline of its own"
        self._story.add(now_s, f"rank {self.rank}: {self.phase.value} -> {phase.value}")
        self.phase, self.deadline_s = phase, deadline_s
        if phase is RankPhase.STARTING:
            self.spawned_s = now_s
        elif phase is RankPhase.EXITED:
            self.exited_s = now_s

    def postpone(self, deadline_s: float) -> None:
        """Give the phase another deadline."""
        assert self.phase in MAY_HAVE_DEADLINE, f"{self.phase} has no deadline of its own"
        self.deadline_s = deadline_s
