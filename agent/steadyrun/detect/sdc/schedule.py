"""How often to check, so that it costs next to nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Schedule"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Attributes:
    every: steps between checks at least.
    share: of the time of training that checks may take.
    """

    every: int = 50
    share: float = 0.001

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is {self.every}: must be at least 1 step")
        if not 0 < self.share < 1:
            raise ValueError(f"share is {self.share}: must be between 0 and 1")

    def interval(self, check_s: float, step_s: float) -> int:
        """Steps between checks, when one check takes *check_s* and a step *step_s* seconds."""
        if step_s <= 0 or check_s <= 0:
            return self.every
        return max(self.every, math.ceil(check_s / (self.share * step_s)))

    def is_due(self, step: int, last_checked: int | None, interval: int) -> bool:
        """Whether to check after *step*: at step 1, then every *interval* steps."""
        return step == 1 or last_checked is None or step - last_checked >= interval
