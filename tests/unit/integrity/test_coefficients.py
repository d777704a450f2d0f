"""What the proof of the fingerprint needs of its weights holds for every one of them."""

from __future__ import annotations

from steadyrun.integrity.coefficients import LEAF_WORDS, MASK, mix64, small_factors, weights


def _twos(number: int) -> int:
    return (number & -number).bit_length() - 1 if number else 64


def test_all_weights_are_odd_and_far_apart_modulo_2_to_33() -> None:
    all_weights = weights()
    assert len(all_weights) == LEAF_WORDS
    assert all(w & 1 for w in all_weights)
    modulus = 1 << 33
    classes = {min(w % modulus, -w % modulus) for w in all_weights}
    assert len(classes) == LEAF_WORDS  # so neither differences nor sums of two are divisible by 2^33


def test_sums_of_first_weights_are_never_divisible_by_2_to_33() -> None:
    sums = [0, 0]
    for number, weight in enumerate(weights()):
        sums[number % 2] = (sums[number % 2] + weight) & MASK
        assert _twos(sums[0] + sums[1] & MASK) <= 32
        assert _twos(sums[number % 2]) <= 32


def test_small_factors_keep_float64_exact() -> None:
    assert all(0 < f < 1 << 17 for f in small_factors())
    assert (1 << 31) * sum(small_factors()) <= 1 << 53


def test_mix64_can_be_undone() -> None:
    def undo(value: int) -> int:
        value ^= (value >> 31) ^ (value >> 62)
        value = value * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK
        value ^= (value >> 27) ^ (value >> 54)
        value = value * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK
        return value ^ (value >> 30) ^ (value >> 60)

    for value in (0, 1, MASK, 1 << 63, 0x0123456789ABCDEF, *(1 << b for b in range(64))):
        assert undo(mix64(value)) == value
