"""Which steps' states are known to be right, and to which checkpoint training goes back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

__all__ = ["SafeSteps"]

MOST_STEPS: Final = 20_000


@dataclass(slots=True)
class SafeSteps:
    """Over all attempts of a run.

    A saved state is verified where all replicas agreed after its step; where nothing has a replica, where it was still
    the same before the next update.
    """

    _agreed: dict[int, None] = field(default_factory=dict)
    _still: dict[int, None] = field(default_factory=dict)
    _saved: dict[int, str] = field(default_factory=dict)  # step -> folder, empty while it is only in memory
    _told: set[int] = field(default_factory=set)
    has_replicas: bool = False

    @property
    def last_good(self) -> int | None:
        """The newest step after which all compared."""
        return max(self._agreed if self.has_replicas else self._still, default=None)

    def agreed(self, step: int) -> None:
        """All replicas of everything agreed after *step*."""
        self.has_replicas = True
        _note(self._agreed, step)

    def still(self, step: int) -> None:
        """What *step* has left was found unchanged before the next update, on all ranks."""
        _note(self._still, step)

    def saved(self, step: int, folder: str = "") -> None:
        """A checkpoint can be loaded; *folder*: it is durable there."""
        self._saved[step] = folder or self._saved.get(step, "")
        while len(self._saved) > MOST_STEPS:
            del self._saved[next(iter(self._saved))]

    def removed(self, folder: str) -> None:
        """What was durable in *folder* is there no more."""
        for step in [s for s, known in self._saved.items() if known == folder]:
            del self._saved[step]

    def has_saved_before(self, step: int) -> bool:
        """Whether anything older than the state after *step* can be loaded."""
        return any(s < step for s in self._saved)

    def is_verified(self, step: int) -> bool:
        return step in (self._agreed if self.has_replicas else self._still)

    def verified_saved(self) -> list[int]:
        """Steps of checkpoints that can be loaded and are known to be right."""
        return [s for s in self._saved if self.is_verified(s)]

    def folder_of(self, step: int) -> str:
        """Of the checkpoint of *step*; empty while it is only in memory, or when there is none."""
        return self._saved.get(step, "")

    def newest_folder(self) -> str:
        """Of the newest verified checkpoint; empty: there is none."""
        known = [s for s, folder in self._saved.items() if folder and self.is_verified(s)]
        return self._saved[max(known)] if known else ""

    def take_verified(self) -> Mapping[int, str]:
        """Durable checkpoints that are known to be verified since the last call."""
        new = {s: f for s, f in self._saved.items() if f and s not in self._told and self.is_verified(s)}
        self._told.update(new)
        return new

    def target(self, first_bad: int) -> int:
        """The step to go back to, when the state after *first_bad* is wrong: the newest verified one before it.

        Where no saved one is verified, the newest step that compared: what was saved before that is as good.
        """
        before = [s for s in self._saved if s < first_bad and self.is_verified(s)]
        if before:
            return max(before)
        good = [s for s in (*self._agreed, *self._still) if s < first_bad]
        return max(good, default=first_bad - 1)

    def is_target_verified(self, step: int) -> bool:
        return step in self._saved and self.is_verified(step)

    def went_back(self, to: int) -> None:
        """Training goes on from there: what came after counts no more."""
        for known in (self._agreed, self._still):
            for step in [s for s in known if s > to]:
                del known[step]
        for step in [s for s in self._saved if s > to]:
            del self._saved[step]
        self._told = {s for s in self._told if s <= to}


def _note(steps: dict[int, None], step: int) -> None:
    steps[step] = None
    while len(steps) > MOST_STEPS:
        del steps[next(iter(steps))]
