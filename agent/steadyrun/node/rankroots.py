"""The roots that one rank of this node has put into its ring, as its agent reads them without the rank's help."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from steadyrun.core.integrity import (
    BEFORE_STEP,
    MOMENTS,
    GroupPlan,
    IntegrityError,
    IntegrityWords,
    RankPlan,
    RingReader,
    Roots,
)
from steadyrun.node.rootswire import AT_REST, Told, pack_names, pack_roots

__all__ = ["RankRoots"]

KEPT: Final = 24  # newest checks whose roots can be asked for
AGAIN_S: Final = 5.0  # until a ring that could not be opened is tried again
MOST_CHANGED: Final = 64  # names that are told of one rest
MOST_RESTS: Final = 4
BEFORE: Final = MOMENTS[BEFORE_STEP]


class RankRoots:
    """One incarnation of a rank.

    Attributes:
        changed: names of tensors that changed at rest, by the step before whose update that was found; the newest few.
        gpu: UUID of the device that holds its tensors.
        notes: for people.
        checks: checks read.
        lost: checks that were overwritten before they were read.
    """

    def __init__(self, rank: int, pid: int, folder: Path) -> None:
        self.rank, self.pid, self.folder = rank, pid, folder
        self.changed: dict[int, tuple[str, ...]] = {}
        self.notes: tuple[str, ...] = ()
        self.checks = self.lost = 0
        self._reader: RingReader | None = None
        self._ring = 0
        self._seen = 0
        self._try_again_s = 0.0
        self._plans: dict[int, RankPlan] = {}
        self._recent: deque[Roots] = deque(maxlen=KEPT)
        self._last: Roots | None = None
        self._rested: set[str] = set()  # names that were found unchanged at least once
        self._restless: set[str] = set()  # names that the script itself changes between updates

    # -- reading -------------------------------------------------------------------------------------------------------
    def look(self, words: IntegrityWords, now_s: float) -> list[Told]:
        """What the rank has told since the last call."""
        if words.ring_fd is not None and words.ring != self._ring and now_s >= self._try_again_s:
            self._open(words, now_s)
        if self._reader is None:
            return []
        found, self._seen, lost = self._reader.read(self._seen)
        self.lost += lost
        out: list[Told] = []
        for roots in found:
            self.checks += 1
            out += self._take(roots)
        return out

    def _open(self, words: IntegrityWords, now_s: float) -> None:
        assert words.ring_fd is not None
        out = self._reader
        try:
            self._reader = RingReader.open(self.pid, words.ring_fd)
        except IntegrityError as e:
            self._try_again_s = now_s + AGAIN_S
            self._note(str(e))
            return
        self._ring, self._seen = words.ring, 0
        if out is not None:
            out.close()

    def _take(self, roots: Roots) -> list[Told]:
        plan = self._plan(roots.generation)
        if plan is None or len(roots.roots) != len(plan.tensors):
            return []
        self._recent.append(roots)
        if roots.moment == BEFORE:
            return self._rest(roots, plan)
        self._last = roots
        return [
            Told(self.rank, roots.step, roots.moment, group.key, plan.digest(group, roots.roots))
            for group in plan.groups
            if group.has_replicas
        ]

    def _rest(self, now: Roots, plan: RankPlan) -> list[Told]:
        before = self._last
        if before is None or before.step != now.step - 1:
            return []
        known = self._plan(before.generation)
        if known is None:
            return []
        held = known.by_name(before.roots)
        resting = [(t.name, r) for t, r in zip(plan.tensors, now.roots, strict=True) if t.at_rest and t.name in held]
        moved = {name for name, root in resting if held[name] != root}
        # A tensor that has never been seen at rest is one that the script changes itself: clamped, averaged.
        self._restless |= moved - self._rested
        self._rested.update(name for name, _ in resting if name not in moved)
        changed = tuple(sorted(moved - self._restless))
        if changed:
            self.changed[now.step] = changed[:MOST_CHANGED]
            for old in sorted(self.changed)[:-MOST_RESTS]:
                del self.changed[old]
        if not resting:
            return []
        return [Told(self.rank, now.step, BEFORE, AT_REST, len(changed))]

    # -- plans ---------------------------------------------------------------------------------------------------------
    def _plan(self, generation: int) -> RankPlan | None:
        plan = self._plans.get(generation)
        if plan is None:
            try:
                plan = RankPlan.load(self.folder, generation)
            except IntegrityError as e:
                self._note(str(e))
                return None
            self._plans[generation] = plan
            for note in plan.notes:
                self._note(note)
        return plan

    def _newest_plan(self) -> RankPlan | None:
        return self._plans[max(self._plans)] if self._plans else None

    @property
    def gpu(self) -> str | None:
        plan = self._newest_plan()
        return plan.device_uuid if plan is not None else None

    @property
    def groups(self) -> Mapping[int, GroupPlan]:
        """Groups with replicas, by key."""
        plan = self._newest_plan()
        return {g.key: g for g in plan.groups if g.has_replicas} if plan is not None else {}

    @property
    def tensors(self) -> int:
        plan = self._newest_plan()
        return len(plan.tensors) if plan is not None else 0

    @property
    def size_bytes(self) -> int:
        plan = self._newest_plan()
        return sum(t.size_bytes for t in plan.tensors) if plan is not None else 0

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes = (*self.notes, text)[-8:]

    # -- answering -----------------------------------------------------------------------------------------------------
    def roots_of(self, step: int, moment: str, key: int) -> dict[str, Any]:
        """The roots of a group's tensors at a check, for a message; ``error`` where they are not kept."""
        found = next((r for r in reversed(self._recent) if (r.step, r.moment) == (step, moment)), None)
        plan = self._plan(found.generation) if found is not None else None
        group = next((g for g in plan.groups if g.key == key), None) if plan is not None else None
        if found is None or plan is None or group is None:
            return {"error": f"the roots after step {step} are not kept any more"}
        by_name = plan.by_name(found.roots, group)
        owners = {t.name: t.owner for t in plan.tensors if t.owner is not None and t.name in by_name}
        return {
            "names": pack_names(list(by_name)),
            "roots": pack_roots(list(by_name.values())),
            "owners": owners,
            "compared": sum(g.count for g in plan.groups if g.has_replicas),
        }

    def agreed_at(self, step: int, world_size: int) -> dict[str, str]:
        """Roots after *step* of what all ranks of the job hold whole, as text; empty where they are no longer kept."""
        found = next((r for r in reversed(self._recent) if r.step == step and r.moment != BEFORE), None)
        plan = self._plans.get(found.generation) if found is not None else None
        if found is None or plan is None:
            return {}
        whole = [g for g in plan.groups if len(g.ranks) == world_size]
        return {name: f"{root:016x}" for g in whole for name, root in plan.by_name(found.roots, g).items()}

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
