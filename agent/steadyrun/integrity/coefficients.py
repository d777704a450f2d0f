"""The weights of a fingerprint: one odd 64-bit number per word of a leaf. Pure, no torch.

A leaf is 2^16 words of 4 bytes. Word ``j`` has the weight ``C[j] = small[j // 2048] * large[j % 2048] mod 2^64``:
32 small odd factors (below 2^17) and 2048 large ones (64 bits, odd), drawn by splitmix64 from a fixed seed. The product
form is for speed: the sum over the small factors is below 2^53, so that float64 computes it exactly, in any order, with
any BLAS; the large factors then meet only one number in 32.

What the proof in ``fingerprint`` needs of them; the seed was chosen so, and a test checks all 2^16 weights:

1. every ``C[j]`` is odd;
2. ``C[i] - C[j]`` and ``C[i] + C[j]`` are not divisible by 2^33 for ``i != j``;
3. ``sum(small) <= 2^22``;
4. the sum of any first ``n`` weights is not divisible by 2^33, and neither is that of the even or of the odd ones
   among them.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "GOLDEN",
    "LARGE",
    "LEAF_BYTES",
    "LEAF_WORDS",
    "MASK",
    "PER_BYTE",
    "SEED",
    "SMALL",
    "large_factors",
    "mix64",
    "signed",
    "small_factors",
    "weights",
]

SEED: Final = 1
SMALL: Final = 32
LARGE: Final = 2048
LEAF_WORDS: Final = SMALL * LARGE
LEAF_BYTES: Final = 4 * LEAF_WORDS
MASK: Final = (1 << 64) - 1
GOLDEN: Final = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: keeps equal leaves at different places apart
PER_BYTE: Final = 0xD6E8FEB86659FD93  # what each byte of length adds to a root: odd, so lengths below 2^64 differ


def mix64(value: int) -> int:
    """The last step of splitmix64: a bijection of the 64-bit numbers (xor-shifts and odd factors have inverses)."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def signed(value: int) -> int:
    """The 64-bit number as torch's int64 holds it."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


def _drawn(count: int, first: int) -> list[int]:
    return [mix64((SEED << 32) + (first + i) * GOLDEN) for i in range(1, count + 1)]


def small_factors() -> list[int]:
    return [number >> 47 | 1 for number in _drawn(SMALL, 0)]


def large_factors() -> list[int]:
    return [number | 1 for number in _drawn(LARGE, SMALL)]


def weights() -> list[int]:
    """All weights of a leaf, below 2^64, by word: 30 ms; for tests and tools (torch multiplies the factors faster)."""
    large = large_factors()
    return [s * b & MASK for s in small_factors() for b in large]
