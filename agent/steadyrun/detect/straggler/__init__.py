"""Who is slow: each rank's own work against that of comparable ranks and against its own habit.

    detector = Detector(StragglerConfig(), roles, world_size, nodes=nodes)
    for alarm in detector.feed(step, busy_s):      # [ranks] seconds, NaN where missing
        print(sentence(alarm))
    detector.open_alarms()                         # what is slow now, with present figures
    advise(detector.open_alarms(), costs)          # whether acting pays

Where hosts have fewer cores than busy threads, ``PaceWatch`` stands for the detector: it tells starvation from work.

From the nodes' timings to steps: ``TimingBlock.of_rows(...).pack()`` there, ``StepAlignment`` here. A recorded run:
``analyse``. Pure: no clock, no input or output. Needs numpy, which ranks must not: for agents and tools only.
"""

from steadyrun.detect.straggler.act import ActAdvice, ActCosts, Timing, advise
from steadyrun.detect.straggler.align import StepAlignment, TimingBlock
from steadyrun.detect.straggler.config import StragglerConfig
from steadyrun.detect.straggler.detector import Detector
from steadyrun.detect.straggler.findings import findings, sentence
from steadyrun.detect.straggler.paces import PaceWatch
from steadyrun.detect.straggler.records import Alarm, AlarmKind, Cause, StepDetails, StepFrame
from steadyrun.detect.straggler.report import HeatMap, PaceReport, RankPace, analyse

__all__ = [
    "ActAdvice",
    "ActCosts",
    "Alarm",
    "AlarmKind",
    "Cause",
    "Detector",
    "HeatMap",
    "PaceReport",
    "PaceWatch",
    "RankPace",
    "StepAlignment",
    "StepDetails",
    "StepFrame",
    "StragglerConfig",
    "Timing",
    "TimingBlock",
    "advise",
    "analyse",
    "findings",
    "sentence",
]
