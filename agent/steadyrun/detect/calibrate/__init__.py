"""Limits that set themselves: statistics of durations, and the rule that makes limits of them."""

from steadyrun.detect.calibrate.rule import Basis, Costs, Limit, limits_of
from steadyrun.detect.calibrate.statistics import OUT_OF_SECTION, History, SectionKey, SectionStatistics

__all__ = [
    "OUT_OF_SECTION",
    "Basis",
    "Costs",
    "History",
    "Limit",
    "SectionKey",
    "SectionStatistics",
    "limits_of",
]
