"""What something has cost the thread that did it."""

from __future__ import annotations

import sys
from time import monotonic_ns, thread_time_ns

__all__ = ["Stopwatch"]


class Stopwatch:
    """How long this thread has worked since this was made.

    Waiting for a core is no cost of ours: of a thread alone its CPU time counts, with n threads of torch n times that,
    and never more than the wall's time.
    """

    __slots__ = ("_cpu_ns", "began_ns")

    def __init__(self) -> None:
        self.began_ns, self._cpu_ns = monotonic_ns(), thread_time_ns()

    def ns(self) -> int:
        most_ns = (thread_time_ns() - self._cpu_ns) * max(int(sys.modules["torch"].get_num_threads()), 1)
        return min(monotonic_ns() - self.began_ns, most_ns)
