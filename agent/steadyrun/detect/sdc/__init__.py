"""Silent data corruption, judged from fingerprints alone: who differs, since when, and whether a GPU did it. Pure."""

from steadyrun.detect.sdc.records import Cause, Check, Group, Judgement, Moment, Outcome, Vote
from steadyrun.detect.sdc.replicas import first_divergence, judge, vote
from steadyrun.detect.sdc.rest import changed_at_rest
from steadyrun.detect.sdc.schedule import Schedule
from steadyrun.detect.sdc.two import Distances, Replay, settle

__all__ = [
    "Cause",
    "Check",
    "Distances",
    "Group",
    "Judgement",
    "Moment",
    "Outcome",
    "Replay",
    "Schedule",
    "Vote",
    "changed_at_rest",
    "first_divergence",
    "judge",
    "settle",
    "vote",
]
