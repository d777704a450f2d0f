"""Sections that mean something to us: what the watchdog has limits for, and what durations are counted under."""

from __future__ import annotations

from typing import Final

__all__ = ["CHECKPOINTING", "EVALUATION", "MAIN_LANE", "OUT_OF_SECTION", "SETUP", "STEP", "TEARDOWN", "WARM_UP_STEPS"]

SETUP: Final = "setup"
STEP: Final = "step"  # the script's own section, or the time between two steps outside of sections
OUT_OF_SECTION: Final = "out_of_section"  # the gaps between sections: a name for limits and statistics, no section
CHECKPOINTING: Final = "checkpointing"
TEARDOWN: Final = "teardown"
EVALUATION: Final = frozenset({"evaluation", "eval", "evaluate", "validation", "validate", "test"})
MAIN_LANE: Final = 0
WARM_UP_STEPS: Final = 5  # times between steps after a start that calibrated limits are not applied to
