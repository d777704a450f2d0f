"""The check that needs no replica: what an optimizer step left must be what the next one finds."""

from __future__ import annotations

from collections.abc import Collection

from steadyrun.detect.sdc.records import Check, Moment

__all__ = ["changed_at_rest"]


def changed_at_rest(after: Check, before: Check, names: Collection[str] | None = None) -> dict[int, tuple[str, ...]]:
    """By rank, the tensors that changed while nothing was to change them.

    Args:
        after: of AFTER_STEP (or LOADED) of a step.
        before: of BEFORE_STEP of the next step.
        names: those that rest; all by default.

    Raises:
        ValueError: the two checks do not follow each other.
    """
    if after.moment not in (Moment.AFTER_STEP, Moment.LOADED) or before.moment is not Moment.BEFORE_STEP:
        raise ValueError(f"nothing rests from {after.moment.value} to {before.moment.value}")
    if before.step != after.step + 1:
        raise ValueError(f"steps {after.step} and {before.step} do not follow each other: an update lies between them")
    changed: dict[int, tuple[str, ...]] = {}
    for rank, roots in before.roots.items():
        held = after.roots.get(rank, {})
        own = tuple(
            sorted(n for n, root in roots.items() if (names is None or n in names) and held.get(n, root) != root)
        )
        if own:
            changed[rank] = own
    return changed
