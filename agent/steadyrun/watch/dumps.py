"""Stacks on disk through faulthandler: at a fatal signal, on the agent's signal, and when nothing moves any more.

All three work while C code holds the interpreter's lock, and none needs the agent.
"""

from __future__ import annotations

import faulthandler
import os

from steadyrun.watch.marks import NEVER_NS
from steadyrun.watch.slot import move_high

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Deadman", "open_stacks", "register_dumps"]


def open_stacks(rank_dir: str) -> int:
    """A descriptor that appends to the rank's stacks.txt. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    return move_high(os.open(os.path.join(rank_dir, "stacks.txt"), flags, 0o600))


def register_dumps(fd: int, stack_signal: int) -> None:
    """Write all stacks to *fd* on a fatal signal and on *stack_signal* (0: none).

    A faulthandler that is on already (-X dev, PYTHONFAULTHANDLER) keeps writing where the user wants it; one that the
    script enables later takes over.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(file=fd, all_threads=True)
    if stack_signal > 0:
        faulthandler.register(stack_signal, file=fd, all_threads=True, chain=False)


class Deadman:
    """Writes all stacks when neither a step nor a beat came for a while.

    It begins with the first step or beat (until then a script that counts its threads finds one). A thread of C code
    waits for the time to pass; a step or beat later than a third of it starts it afresh, which costs about 0.1 ms. A
    process has one such timer: when the script uses ``faulthandler.dump_traceback_later`` itself, the timer is the
    script's from then on.

    Args:
        fd: stacks go there.
        deadman_s: 0 or less switches it off.
    """

    def __init__(self, fd: int, deadman_s: float) -> None:
        self._fd = fd
        self._deadman_s = min(deadman_s, 1e6)  # faulthandler refuses more than a PY_TIMEOUT_MAX
        self._is_ours = deadman_s > 0
        self._start = faulthandler.dump_traceback_later
        self._cancel = faulthandler.cancel_dump_traceback_later
        self._is_pending = False
        self._was_pending = False  # when the fork began

    def install(self) -> None:
        """From now on notice when the script wants the timer, and keep it away from forks."""
        if not self._is_ours:
            return
        faulthandler.dump_traceback_later = self._hand_over
        faulthandler.cancel_dump_traceback_later = self._hand_over_cancelled
        # A forked child would wait at its exit for a timer thread that only its parent has (CPython 3.11: for ever).
        os.register_at_fork(before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._give_up)

    def rearm(self, now: int) -> int:
        """Start (afresh); the answer is the time from which on it may be done again.

        Args:
            now: the time, ns of any clock.
        """
        if not self._is_ours:
            return NEVER_NS
        self._restart()
        return now + int(self._deadman_s / 3 * 1e9)

    def end(self) -> None:
        """Stop the timer, if it is still ours."""
        if self._is_ours and self._is_pending:
            self._cancel()
        self._give_up()

    def _restart(self) -> None:
        try:
            self._start(self._deadman_s, repeat=False, file=self._fd, exit=False)
            self._is_pending = True
        except (RuntimeError, OSError, ValueError):  # no thread to be had
            self._give_up()

    def _give_up(self) -> None:
        self._is_ours = False
        self._is_pending = False
        if faulthandler.dump_traceback_later == self._hand_over:
            faulthandler.dump_traceback_later = self._start
        if faulthandler.cancel_dump_traceback_later == self._hand_over_cancelled:
            faulthandler.cancel_dump_traceback_later = self._cancel

    def _hand_over(self, *args: Any, **kwargs: Any) -> None:
        self._give_up()
        return self._start(*args, **kwargs)

    def _hand_over_cancelled(self) -> None:
        """The script stops a timer it has not started: ours goes on, as it would have seen nothing happen."""

    def _before_fork(self) -> None:
        if self._is_ours and self._is_pending:
            self._cancel()
            self._was_pending = True

    def _after_fork(self) -> None:
        if self._is_ours and self._was_pending:
            self._was_pending = False
            self._restart()
