"""Roots from leaves, and one root from those of many tensors. Pure, no torch: agents check what ranks send them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b

from steadyrun.integrity.coefficients import GOLDEN, MASK, PER_BYTE, mix64

__all__ = ["merge", "root_of"]


def root_of(leaves: Iterable[int], size_bytes: int) -> int:
    """The root over *leaves*, without torch: agents use it to check what ranks send them."""
    total = size_bytes * PER_BYTE
    for place, leaf in enumerate(leaves, start=1):
        total += mix64(leaf + place * GOLDEN)
    return total & MASK


def merge(roots: Mapping[str, int]) -> int:
    """One root for a whole model from those of its tensors by name; in whatever order they were registered.

    A change of one tensor's root always changes it. Names count: exchanged tensors are seen.
    """
    total = len(roots) * PER_BYTE
    for name, root in roots.items():
        own = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
        total += mix64(mix64(root) + own)
    return total & MASK
