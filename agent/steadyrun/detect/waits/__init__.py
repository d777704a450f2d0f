"""Who waits for whom: flight records of all ranks in, root causes out. Pure."""

from steadyrun.detect.waits.judge import judge_flights

__all__ = ["judge_flights"]
