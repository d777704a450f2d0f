"""Which checkpoints go. ``to_remove`` decides and touches nothing; ``prune`` looks, decides and removes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steadyrun.checkpoint import commit
from steadyrun.checkpoint.catalog import BusyError, Listed, hold, look

__all__ = ["LEAST_KEPT", "Keep", "Pruned", "apply", "prune", "to_remove"]

LEAST_KEPT: Final = 2
_YOUNG_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Keep:
    """What stays.

    Attributes:
        newest: complete checkpoints, at least ``LEAST_KEPT`` whatever it says.
        every_steps: those of its multiples stay for ever.
    """

    newest: int = 3
    every_steps: int | None = None

    def __post_init__(self) -> None:
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"every_steps={self.every_steps}: must be at least 1")


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was removed, and what could not be: path and reason, to be tried again the next time."""

    removed: tuple[Path, ...] = ()
    failed: tuple[tuple[Path, str], ...] = ()


def to_remove(
    listed: Sequence[Listed],
    keep: int,
    keep_every: int | None = None,
    in_use: Collection[Path] = (),
    pinned: Collection[Path] = (),
    quarantined: Collection[Path] = (),
) -> tuple[Listed, ...]:
    """Those of *listed* that can go, oldest first.

    Kept are: the *keep* newest complete ones (two at least), those after every *keep_every* steps, the newest verified
    one, whatever is pinned or in use, everything unsure, and every unfinished or damaged one that is newer than the
    newest complete one. Checkpoints that were set aside by a rollback or are quarantined do not count as kept ones, and
    go only when *keep* good ones newer than them are there.

    Args:
        listed: checkpoints and partials, in any order.
        in_use: being written, read or copied, by path.
        quarantined: by path, see ``quarantine.Ledger.among``.
    """
    newest_first = sorted(listed, key=lambda c: (*c.order, c.path.name), reverse=True)
    staying = {*in_use, *pinned}
    staying.update(c.path for c in newest_first if c.is_unsure)
    good = [c for c in newest_first if not _is_doubtful(c, quarantined)]
    for candidates in (good, newest_first):
        staying.update(c.path for c in [c for c in candidates if c.is_verified][:1])
    if keep_every is not None:
        # Scripts count steps from 0 and save after every N of them; frameworks name folders by the steps done.
        numbers = (0, keep_every - 1)
        staying.update(c.path for c in newest_first if c.step % keep_every in numbers and not c.name.is_partial)
    out = [
        c
        for i, c in enumerate(newest_first)
        if c.path not in staying and _is_passed(c, newest_first[:i], keep, quarantined)
    ]
    return tuple(reversed(out))


def _is_doubtful(c: Listed, quarantined: Collection[Path]) -> bool:
    return c.is_superseded or c.path in quarantined


def _is_passed(c: Listed, newer: Sequence[Listed], keep: int, quarantined: Collection[Path]) -> bool:
    """Whether enough good ones are newer than *c* for it not to be missed: with that, the newest stay by themselves."""
    count = sum(1 for n in newer if n.is_complete and not _is_doubtful(n, quarantined))
    return count >= (max(keep, LEAST_KEPT) if c.is_complete else 1)


def apply(removals: Sequence[Listed], remove: Callable[[Path], None] = commit.remove) -> Pruned:
    """Remove each, in the given order. What is being read stays; nothing is raised for what cannot be removed.

    *remove* first renames the folder, so that a crash or a reader in the middle finds it whole or not at all.
    """
    removed: list[Path] = []
    failed: list[tuple[Path, str]] = []
    for c in removals:
        why_not = _remove_one(c.path, remove)
        if why_not is None:
            removed.append(c.path)
        elif why_not:
            failed.append((c.path, why_not))
    return Pruned(tuple(removed), tuple(failed))


def _remove_one(folder: Path, remove: Callable[[Path], None]) -> str | None:
    """None when removed, an empty text when somebody else was faster, else why not."""
    try:
        with hold(folder, to_remove=True):
            remove(folder)
    except FileNotFoundError:
        return ""
    except BusyError as e:
        return str(e)
    except OSError as e:
        return f"cannot remove {folder}: {e.strerror or e}; remove it by hand to free the space"
    return None


def prune(
    root: Path,
    keep: Keep,
    in_use: Collection[Path] = (),
    pinned: Collection[Path] = (),
    quarantined: Collection[Path] = (),
    *,
    remove: Callable[[Path], None] = commit.remove,
    sweep_trash: Callable[[Path], object] = commit.sweep_trash,
) -> Pruned:
    """Look at *root* and remove what can go, also what an earlier removal has left in the trash.

    Raises CatalogError when *root* cannot be listed; then nothing was removed.
    """
    catalog = look(root)
    listed = (*catalog.checkpoints, *catalog.partials)
    live = {*in_use, *(p.path for p in catalog.partials if _is_young(p.path))}
    removals = to_remove(listed, keep.newest, keep.every_steps, live, pinned, quarantined)
    pruned = apply(removals, remove)
    if catalog.trash:
        try:
            sweep_trash(root)
        except OSError as e:
            why = f"cannot remove what an earlier removal left in {root}: {e.strerror or e}"
            return Pruned(pruned.removed, (*pruned.failed, (root, why)))
    return pruned


def _is_young(partial: Path) -> bool:
    """Somebody may be writing into it, of whom the caller does not know: its next save, or another job.

    After going back to an older step, a live save is older by its number than checkpoints that are there.
    """
    try:
        return time.time() - partial.stat().st_mtime < _YOUNG_S
    except OSError:
        return False
