"""A listed folder, as the choice of what to resume from wants it."""

from __future__ import annotations

from collections.abc import Sequence

from steadyrun.checkpoint import rollback
from steadyrun.checkpoint.catalog import Listed
from steadyrun.checkpoint.choose import FolderOffer
from steadyrun.checkpoint.saves import TierName

__all__ = ["folder_offer"]


def folder_offer(
    listed: Listed,
    tier: TierName,
    path: str = "",
    ranks: frozenset[int] | None = None,
    rollbacks: Sequence[rollback.Request] = (),
) -> FolderOffer:
    """*rollbacks*: what is older than one of them, and newer than its step, was committed after it was carried out."""
    manifest = listed.manifest
    saved_unix_s = manifest.created_unix_s if manifest is not None else 0.0
    is_passed = manifest is not None and rollback.is_superseded(rollbacks, listed.step, saved_unix_s)
    return FolderOffer(
        tier=tier,
        step=listed.step,
        attempt=listed.attempt,
        path=path or str(listed.path),
        world_size=manifest.world_size if manifest is not None else 0,
        verified=listed.is_verified,
        problem=listed.problem or "",
        superseded=listed.is_superseded or is_passed,
        ranks=ranks,
        saved_unix_s=saved_unix_s,
    )
