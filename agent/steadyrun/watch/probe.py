"""A fixed piece of work, the same on every rank and in every step: what makes ranks of all stages comparable."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["EVERY", "FixedWork", "Rhythm"]

EVERY = 100  # steps between two probes, at least
_SHARE = 0.001  # of the time of all steps that probes may take
_EXPECTED_S = 0.005
_SIDE = {"cpu": 256, "cuda": 2048}
_PRODUCTS = {"cpu": 6, "cuda": 100}
_COPIED = 1 << 20  # floats
_ROUNDS = 20_000


class FixedWork:
    """Products of two matrices and a copy on the rank's device, and a loop in Python: about 5 ms.

    Reads no random numbers, needs no gradients, and keeps about 10 MB.
    """

    __slots__ = ("_a", "_b", "_from", "_kind", "_out", "_to", "_torch")

    def __init__(self, device: Any) -> None:
        """Raises what torch raises when the device has no room."""
        torch = self._torch = sys.modules["torch"]
        self._kind = "cuda" if device.type == "cuda" else "cpu"
        side = _SIDE[self._kind]
        kind = {"device": device, "dtype": torch.float32}
        with torch.no_grad():
            self._a = torch.full((side, side), 0.5, **kind)
            self._b = torch.full((side, side), 0.25, **kind)
            self._out = torch.empty((side, side), **kind)
            self._from = torch.full((_COPIED,), 1.0, **kind)
            self._to = torch.empty((_COPIED,), **kind)

    def run(self) -> None:
        """On a device: only begins it there."""
        mm = self._torch.mm
        with self._torch.no_grad():
            for _ in range(_PRODUCTS[self._kind]):
                mm(self._a, self._b, out=self._out)
            self._to.copy_(self._from)
        count = 0
        for i in range(_ROUNDS):
            count += i & 3


class Rhythm:
    """In which steps to probe: every 100th, or more seldom, so that probes take less than a thousandth of the time."""

    __slots__ = ("cost_s", "every")

    def __init__(self) -> None:
        self.every = EVERY
        self.cost_s = _EXPECTED_S

    def is_due(self, step: int, step_s: float) -> bool:
        """Whether to probe after *step*, when steps take *step_s*; numbers of steps agree on all ranks."""
        if step % EVERY:
            return False
        while self.every * step_s * _SHARE < self.cost_s and self.every < EVERY << 16:
            self.every *= 2
        while self.every > EVERY and self.every * step_s * _SHARE > 4 * self.cost_s:
            self.every //= 2
        return step % self.every == 0 and step > 0

    def took(self, duration_s: float) -> None:
        self.cost_s += 0.25 * (duration_s - self.cost_s)
