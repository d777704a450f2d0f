"""Losses and norms of gradients, looked at in passing: no pass over gradients but at checks, no wait for a device.

What an unmodified script lets us see: the norm that it computes itself to clip gradients
(``torch.nn.utils.clip_grad_norm_``), at each step; else, at the steps that are checked anyway, the norm of what its
first optimizer is about to apply. The loss only where the script tells it (``watch.loss``). What is on a device is
copied to pinned memory behind the work that makes it, and read at a later step, once it is there.
"""

from __future__ import annotations

import sys
from math import isfinite

from steadyrun.core.guards import LOSS, NORM, Window, write_signal
from steadyrun.watch.stopwatch import Stopwatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

__all__ = ["Guards"]

_MOST_PENDING = 64
_WATCHED_STEPS = 3  # after a value that is out of line gradients are measured at each
_MOST_ALERTS = 100  # values after which nothing more is asked for: by then it has been looked at
_MOST_NAMES = 8


class Guards:
    """Of one rank; for the thread that trains.

    Args:
        words, base: the board, and where the slot begins.
        found: called with the newest step when a value is out of line.

    Attributes:
        has_news: a norm was told for the next update, or numbers may have come from a device.
        alert_until: the last step of which gradients are measured although no check is due.
        cost_ns: of all norms that were computed for this; norms: so many.
    """

    def __init__(self, words: Any, base: int, say: Callable[[str], None], found: Callable[[int], None]) -> None:
        self._words = words
        self._base = base
        self._say = say
        self._found = found
        self._windows = (Window(LOSS), Window(NORM))
        self._pending: list[_Value] = []
        self._clipped: Any = None  # the norm that the script has told since the last update
        self._has_named = False
        self._alerts = 0
        self.has_news = False
        self.alert_until = -1
        self.cost_ns = 0
        self.norms = 0

    def loss(self, step: int, value: Any) -> None:
        """A number, or a tensor with one element."""
        if hasattr(value, "detach"):
            self._take(step, LOSS, value.detach())
        elif hasattr(value, "__float__"):
            self._judge(step, LOSS, float(value))

    def clipped(self, norm: Any) -> None:
        """The script has computed the norm of its gradients: it counts once an update is made with them."""
        self._clipped = norm.detach()
        self.has_news = True

    def update_begins(self, step: int, optimizer: Any, is_due: bool, names: Callable[[], dict[int, str]]) -> None:
        """*optimizer* is about to apply its gradients, perhaps with the norm that the script has told before.

        Args:
            is_due: else measure it.
            names: of parameters, by id.
        """
        clipped, self._clipped = self._clipped, None
        self.has_news = bool(self._pending)
        # With a GradScaler gradients overflow now and then: it leaves the update out, or has the optimizer do so.
        if getattr(optimizer, "grad_scale", None) is not None or getattr(optimizer, "found_inf", None) is not None:
            return
        if (clipped is None or not self._take(step, NORM, clipped)) and is_due:
            self._measure(step, optimizer, names)

    def _measure(self, step: int, optimizer: Any, names: Callable[[], dict[int, str]]) -> None:
        watch = Stopwatch()
        held = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [getattr(g, "_local_tensor", g) for _, g in held]
        device = gradients[0].device if gradients else None
        if any(g.device != device or g.is_sparse or not g.is_floating_point() for g in gradients) or device is None:
            return
        torch = sys.modules["torch"]
        with torch.no_grad():
            clock = _clock(torch, device)
            # Half precision overflows at norms that are usual; on a CPU another type would copy each tensor.
            wider = torch.float32 if any(g.dtype == torch.float16 for g in gradients) else None
            norms = torch.stack(torch._foreach_norm(gradients, 2.0, dtype=wider))
            value = _Value(step, NORM, torch.linalg.vector_norm(norms), clock)
        if clock is not None:
            clock[1].record(torch.cuda.current_stream(device))
        value.host_ns = watch.ns()
        value.parts = (norms, [id(p) for p, _ in held], names)
        self._put(value)

    def settle(self) -> None:
        """Judge what has come from a device meanwhile."""
        while self._pending and self._pending[0].is_there():
            self._judge_later(self._pending.pop(0))
        self.has_news = self._clipped is not None or bool(self._pending)

    def _take(self, step: int, what: int, value: Any) -> bool:
        if not all(p.is_replicate() for p in getattr(value, "placements", ())):
            return False  # each rank has a part, and to put them together is a collective
        value = getattr(value, "_local_tensor", value)
        if value.numel() != 1 or value.is_complex() or value.device.type == "meta":
            return False
        self._put(_Value(step, what, value, None))
        return True

    def _put(self, value: _Value) -> None:
        if len(self._pending) < _MOST_PENDING:
            self._pending.append(value)
        self.settle()

    def _judge_later(self, value: _Value) -> None:
        if value.parts is not None:
            self.cost_ns += value.cost_ns()
            self.norms += 1
        number = value.read()
        if value.parts is not None and not isfinite(number) and not self._has_named:
            self._has_named = True
            norms, ids, names = value.parts
            known = names()
            bad = [known.get(i, "?") for i, norm in zip(ids, norms.tolist()) if not isfinite(norm)]  # noqa: B905
            if bad:
                some = ", ".join(bad[:_MOST_NAMES]) + (", ..." if len(bad) > _MOST_NAMES else "")
                self._say(f"the gradient of {len(bad)} of {len(ids)} tensors is not finite: {some}")
        self._judge(value.step, value.what, number)

    def _judge(self, step: int, what: int, value: float) -> None:
        found = self._windows[what].add(value)
        if found is not None:
            write_signal(self._words, self._base, step, what, value, found)
            if self._alerts < _MOST_ALERTS:
                self._alerts += 1
                self.alert_until = step + _WATCHED_STEPS
                self._found(step)


class _Value:
    """One number, perhaps on its way from a device."""

    __slots__ = ("_clock", "_tensor", "host_ns", "parts", "step", "what")

    def __init__(self, step: int, what: int, tensor: Any, clock: Any) -> None:
        self.step = step
        self.what = what
        self.host_ns = 0
        self.parts: Any = None
        self._clock = clock
        self._tensor = tensor
        if tensor.device.type == "cuda":
            torch = sys.modules["torch"]
            self._tensor = torch.empty((), dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor.reshape(()), non_blocking=True)
            if clock is None:
                with torch.cuda.device(tensor.device):
                    self._clock = (None, torch.cuda.Event())
                    self._clock[1].record()

    def is_there(self) -> bool:
        return self._clock is None or bool(self._clock[1].query())

    def cost_ns(self) -> int:
        """Of the thread or of the stream, whatever is more."""
        if self._clock is None or self._clock[0] is None:
            return self.host_ns
        return max(self.host_ns, int(self._clock[0].elapsed_time(self._clock[1]) * 1e6))

    def read(self) -> float:
        return float(self._tensor.item())


def _clock(torch: Any, device: Any) -> Any:
    """Two events of the stream that works on *device*, the first one recorded; None on a CPU."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        events[0].record()
    return events
