"""Digests of many ranks, as they come in, brought together moment by moment. Pure; ``now_s`` is passed in.

Nobody is waited for longer than a few seconds: a moment is judged once all ranks of its groups have told, or when it
has waited long enough, by those that have. A rank that is late counts no more for that moment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from steadyrun.core.integrity import MOMENTS

__all__ = ["Compared", "Comparison", "Resting"]

PATIENCE_S: Final = 5.0
MOST_WAITING: Final = 4096  # moments; the oldest is judged as it is when there are more
KEPT_DONE: Final = 8192


@dataclass(frozen=True, slots=True)
class Compared:
    """A moment whose groups were compared.

    Attributes:
        differing: by group, what each rank told; only of groups whose ranks differ.
        ranks: how many ranks were compared with at least one other.
        is_whole: all ranks of all groups with replicas have told.
    """

    step: int
    moment: str
    differing: Mapping[int, Mapping[int, int]]
    ranks: int
    is_whole: bool

    @property
    def agreed(self) -> bool:
        return self.ranks > 0 and not self.differing


@dataclass(frozen=True, slots=True)
class Resting:
    """What was found just before the update of *step*.

    Attributes:
        changed: ranks on which something had changed since the update before.
        still: ranks on which nothing had.
        is_whole: all ranks have told.
    """

    step: int
    changed: tuple[int, ...]
    still: tuple[int, ...]
    is_whole: bool


@dataclass(slots=True)
class _Moment:
    since_s: float
    digests: dict[int, dict[int, int]] = field(default_factory=dict)  # key -> rank -> digest


class Comparison:
    """One attempt. Not thread-safe.

    Args:
        at_rest: the key under which ranks tell whether anything changed at rest.
    """

    def __init__(self, at_rest: int = 0, patience_s: float = PATIENCE_S) -> None:
        self._at_rest, self._patience_s = at_rest, patience_s
        self._groups: dict[int, tuple[int, ...]] = {}
        self._ranks: frozenset[int] = frozenset()
        self._moments: dict[tuple[int, int], _Moment] = {}
        self._done: dict[tuple[int, int], None] = {}
        self._muted: set[int] = set()

    def introduce(self, groups: Mapping[int, tuple[int, ...]], ranks: Collection[int]) -> None:
        """Groups that are compared, and ranks that take part; what was known stays known."""
        self._groups.update(groups)
        self._ranks |= frozenset(ranks)

    def ranks_of(self, key: int) -> tuple[int, ...]:
        return self._groups.get(key, ())

    def mute(self, keys: Iterable[int]) -> None:
        """These groups' ranks differ and are known to: they are compared no more."""
        self._muted.update(keys)

    def add(self, rank: int, step: int, moment: str, key: int, digest: int, now_s: float) -> None:
        """What a rank told. Said twice, it counts once."""
        at = (step, MOMENTS.index(moment))
        if at in self._done or key in self._muted:
            return
        self._moments.setdefault(at, _Moment(now_s)).digests.setdefault(key, {})[rank] = digest

    def ready(self, now_s: float) -> list[Compared | Resting]:
        """The moments that can be judged now, in order."""
        out: list[Compared | Resting] = []
        for at in sorted(self._moments):
            waiting = self._moments[at]
            is_whole = self._is_whole(waiting)
            if is_whole or now_s >= waiting.since_s + self._patience_s or len(self._moments) > MOST_WAITING:
                out += self._judge(at, waiting, is_whole)
                del self._moments[at]
                self._done[at] = None
        while len(self._done) > KEPT_DONE:
            del self._done[next(iter(self._done))]
        return out

    def _is_whole(self, waiting: _Moment) -> bool:
        if self._at_rest in waiting.digests:
            return waiting.digests[self._at_rest].keys() >= self._ranks
        groups = {k: ranks for k, ranks in self._groups.items() if len(ranks) > 1 and k not in self._muted}
        return bool(groups) and all(waiting.digests.get(k, {}).keys() >= set(ranks) for k, ranks in groups.items())

    def _judge(self, at: tuple[int, int], waiting: _Moment, is_whole: bool) -> list[Compared | Resting]:
        step, moment = at[0], MOMENTS[at[1]]
        out: list[Compared | Resting] = []
        rest = waiting.digests.pop(self._at_rest, None)
        if rest is not None:
            changed = tuple(sorted(r for r, d in rest.items() if d))
            out.append(Resting(step, changed, tuple(sorted(rest.keys() - set(changed))), is_whole))
        compared: set[int] = set()
        differing: dict[int, Mapping[int, int]] = {}
        for key, told in waiting.digests.items():
            if len(told) < 2 or key in self._muted:
                continue
            compared.update(told)
            if len(set(told.values())) > 1:
                differing[key] = dict(sorted(told.items()))
        if compared:
            out.append(Compared(step, moment, differing, len(compared), is_whole))
        return out
