"""Which losses and norms of gradients are out of line, and how a rank's slot of the board tells them."""

from __future__ import annotations

import random

import pytest

from steadyrun.core import layout
from steadyrun.core.guards import LEAST, LOSS, NORM, RING, Outlier, Signal, Window, read_signals, write_signal

INF, NAN = float("inf"), float("nan")


def filled(what: int, values: list[float]) -> Window:
    window = Window(what)
    assert [v for v in values if window.add(v) is not None] == []
    return window


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_falls_with_noise_is_never_out_of_line(seed: int) -> None:
    r = random.Random(seed)
    losses = [2 + 8 * 0.99**step + r.gauss(0, 0.1) for step in range(2000)]
    window = Window(LOSS)
    assert [v for v in losses if window.add(v) is not None] == []


@pytest.mark.parametrize("seed", range(5))
def test_norms_with_heavy_tails_are_not_out_of_line(seed: int) -> None:
    r = random.Random(seed)
    window = Window(NORM)
    norms = [0.5 * 2.718 ** r.gauss(0, 0.25) for _ in range(2000)]
    assert [v for v in norms if window.add(v) is not None] == []


@pytest.mark.parametrize(("what", "factor"), [(LOSS, 1.3), (NORM, 3.5)])
def test_a_spike_is_told_with_what_is_usual(what: int, factor: float) -> None:
    window = filled(what, [1.0] * LEAST)
    found = window.add(factor)
    assert found is not None
    assert found.usual == 1.0
    assert found.z > 10


def test_too_few_values_judge_nothing() -> None:
    window = filled(LOSS, [1.0] * (LEAST - 1))
    assert window.add(1e9) is None


@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_what_is_not_finite_is_told_at_once_and_spoils_nothing(value: float) -> None:
    window = Window(LOSS)
    found = window.add(value)
    assert found is not None
    assert found.z == INF
    for _ in range(LEAST):
        assert window.add(1.0) is None
    assert window.usual == 1.0


def test_a_new_level_is_usual_once_most_values_have_it() -> None:
    window = filled(LOSS, [1.0] * 128)
    told = sum(window.add(5.0) is not None for _ in range(128))
    assert 40 <= told <= 80
    assert window.usual == 5.0


def board() -> list[int]:
    return [0] * (layout.HEADER_WORDS + layout.SLOT_WORDS)


def test_signals_are_read_as_they_were_written() -> None:
    words = memoryview(bytearray(8 * (layout.HEADER_WORDS + layout.SLOT_WORDS))).cast("Q")
    base = layout.HEADER_WORDS
    assert read_signals(words, base) == ()
    write_signal(words, base, -1, NORM, INF, Outlier(NAN, INF))
    write_signal(words, base, 41, LOSS, 7.5, Outlier(2.5, 12.0))
    assert read_signals(words, base) == (
        Signal(0, -1, NORM, None, None, None),
        Signal(1, 41, LOSS, 7.5, 2.5, 12.0),
    )
    assert read_signals(words, base)[1].words() == "loss 7.5 (usually 2.5)"


def test_the_newest_signals_are_kept_and_half_written_ones_left_out() -> None:
    words, base = board(), layout.HEADER_WORDS
    for step in range(RING + 5):
        write_signal(words, base, step, LOSS, 1.0, Outlier(0.5, 20.0))
    read = read_signals(words, base)
    assert [s.number for s in read] == list(range(5, RING + 5))
    assert [s.step for s in read] == [s.number for s in read]
    words[base + layout.S_GUARD_RING] = 0
    assert RING not in {s.number for s in read_signals(words, base)}, "the first place holds number RING"


def test_signals_travel_as_lists() -> None:
    signal = Signal(3, 9, NORM, None, 1.5, None)
    assert Signal.from_list(signal.as_list()) == signal
    for nonsense in ([1, 2], [0, 0, 7, None, None, None], ["x", 0, 0, None, None, None]):
        with pytest.raises((ValueError, TypeError)):
            Signal.from_list(nonsense)
