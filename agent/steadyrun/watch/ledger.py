"""Where the time of a step went: every instant of the training thread is in exactly one account.

Two clocks are read at each change of account, wall and CPU time of the thread, and where they differ two more: how
often the thread gave its core away of its own accord, and for how long it could have run and did not (run delay). What
is known of waiting for other ranks comes from outside (``wait``). Per account

    wall = own work + waiting for others + starved

where own work is all that is left when known waiting and run delay are taken off the wall clock, but never less than
the CPU time: run delay is also counted while a thread that has waited for others gets back to a core, and that is no
work. Sleeping, reading a file and waiting for a worker process or for other threads of one's own are own work: that is
how a slow disk or a slow data loader shows. In accounts whose waits for others nobody can see (``BLIND``) only CPU time
is own work.

A thread that never gave its core away in an account was either running or kept from it, by other threads, a quota, an
interrupt or another virtual machine, all of which run delay does not count: there own work is the CPU time, and the
rest starved. That is so in all of DDP's own work on a CPU; own work of equal ranks on a loaded machine then differs by
4 % instead of 7 %.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "AFTER",
    "BACKWARD",
    "CHECKPOINT",
    "DATA",
    "EVALUATION",
    "FORWARD",
    "NO_GRAD",
    "OPTIMIZER",
    "PROBE",
    "PROLOGUE",
    "TAIL",
    "Ledger",
    "split",
    "wall_s",
]

DATA = 0
PROLOGUE = 1  # what DDP does before the forward of the module inside: it may wait for buffers of rank 0
FORWARD = 2  # and the loss
NO_GRAD = 3  # a forward without gradients: a teacher, an evaluation
BACKWARD = 4
TAIL = 5  # from the last accumulated gradient to the end of backward: what DDP has not hidden of its reduction
AFTER = 6  # from there on; what it was is known by what comes next
OPTIMIZER = 7  # and what lies between backward and it, such as clipping
CHECKPOINT = 8
EVALUATION = 9  # a section of that name
PROBE = 10
ACCOUNTS = 11
SLIGHT_S = 0.00005  # time off the core too short to ask why: each clock that is asked costs some microseconds
_WORDS = 5  # wall, CPU, run delay, known waits, rests


class Ledger:
    """The accounts of one thread. All times in seconds.

    Attributes:
        account: the one that time goes to now.
        at_s: when that began, by the wall clock given.
        waited_s: known waits since then; ``wait`` adds to it.
        blind: accounts whose waits for others are not all known.
    """

    __slots__ = (
        "_cpu",
        "_cpu_at_s",
        "_delay",
        "_delay_at_s",
        "_kept_s",
        "_now",
        "_rests",
        "_rests_at",
        "_totals",
        "account",
        "at_s",
        "blind",
        "waited_s",
    )

    def __init__(
        self,
        now: Callable[[], float],
        cpu: Callable[[], float],
        delay: Callable[[], float],
        rests: Callable[[], int] | None = None,
    ) -> None:
        """*rests* counts how often the thread gave its core away of its own accord; None: nobody can tell."""
        self._now, self._cpu, self._delay = now, cpu, delay
        self._rests = rests if rests is not None else _always_more()
        self._totals = [0.0] * (ACCOUNTS * _WORDS)
        self.account = DATA
        self.waited_s = 0.0
        self._kept_s = 0.0  # off the core without a rest, since run delay was read: most of it is run delay
        self.blind: frozenset[int] = frozenset((PROLOGUE, TAIL))
        self.at_s, self._cpu_at_s, self._delay_at_s, self._rests_at = now(), cpu(), delay(), self._rests()

    def turn_to(self, account: int) -> None:
        """From now on time goes to *account*."""
        now_s, cpu_s = self._now(), self._cpu()
        ending = self.account
        if ending == AFTER:
            ending = OPTIMIZER if account == OPTIMIZER else FORWARD if account == BACKWARD else DATA
        totals, at = self._totals, ending * _WORDS
        wall_s, used_s = now_s - self.at_s, cpu_s - self._cpu_at_s
        totals[at] += wall_s
        totals[at + 1] += used_s
        off_s = wall_s - used_s
        if off_s < SLIGHT_S:
            self._kept_s += off_s
        else:
            rests = self._rests()
            if rests == self._rests_at:
                self._kept_s += off_s
            else:
                delay_s = self._delay()
                totals[at + 2] += max(delay_s - self._delay_at_s - self._kept_s, 0.0)
                totals[at + 4] += rests - self._rests_at
                self._delay_at_s, self._kept_s, self._rests_at = delay_s, 0.0, rests
        if self.waited_s:
            totals[at + 3] += self.waited_s
            self.waited_s = 0.0
        self.account = account
        self.at_s, self._cpu_at_s = now_s, cpu_s

    def wait(self, duration_s: float) -> None:
        """The thread has waited for other ranks for so long, just now."""
        self.waited_s += duration_s

    def split(self, account: int) -> tuple[float, float, float, float]:
        """(own work, waiting for others, starved, CPU) of an account since the last ``clear``."""
        return split(self._totals, account, account in self.blind)

    def take(self) -> list[float]:
        """What the accounts hold, for ``split``; they begin anew, and the current one goes on."""
        totals, self._totals = self._totals, list(_NOTHING)
        return totals

    def clear(self) -> None:
        """Begin the accounts anew; the current one goes on."""
        self._totals[:] = _NOTHING


def split(totals: list[float], account: int, is_blind: bool) -> tuple[float, float, float, float]:
    """(own work, waiting for others, starved, CPU) of one of the accounts that ``Ledger.take`` returned."""
    at = account * _WORDS
    wall_s, cpu_s = totals[at], totals[at + 1]
    if not wall_s:
        return _NONE
    if not is_blind and not totals[at + 4]:  # no rests: what most accounts of most steps are
        own_s = min(wall_s, cpu_s)
        return own_s, 0.0, wall_s - own_s, cpu_s
    delay_s, waited_s = totals[at + 2], totals[at + 3]
    if is_blind:
        own_s = min(cpu_s, wall_s)
        starved_s = min(delay_s, wall_s - own_s)
        return own_s, wall_s - own_s - starved_s, starved_s, cpu_s
    own_s = min(max(wall_s - delay_s - waited_s, cpu_s), wall_s)
    waiting_s = min(waited_s, wall_s - own_s)
    return own_s, waiting_s, wall_s - own_s - waiting_s, cpu_s


def wall_s(totals: list[float], account: int) -> float:
    """The time of one of the accounts that ``Ledger.take`` returned."""
    return totals[account * _WORDS]


def _always_more() -> Callable[[], int]:
    """A count that no account finds unchanged."""
    from itertools import count

    return count().__next__


_NOTHING = (0.0,) * (ACCOUNTS * _WORDS)
_NONE = (0.0, 0.0, 0.0, 0.0)
