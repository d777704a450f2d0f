"""Numbers of the straggler detector, at one default for every job."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

__all__ = ["StragglerConfig"]

WEEK_S: Final = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class StragglerConfig:
    """What counts as slow, how sure to be, and how long to look.

    The defaults hold false alarms below 2e-6 per rank and ten steps on noise from 0.3 % to 12 %, with bursts, spikes
    and ranks that differ by nature (benchmarks/straggler.py).

    Attributes:
        least_slowdown: the effect looked for; a rank slower by much less is never named, however certain it is.
        least_group_slowdown: the same for a parallel group that the others wait for. Much larger: in a healthy public
            trace the replica that also writes the log is waited for by 5 % of the step.
        own_bias: largest difference between healthy ranks that is taken as a rank's own nature, as a share.
        bias_spread: how much healthy ranks differ by experience (standard deviation); weighs what was learned.
        false_alarm_steps: rank-steps between false alarms that noise alone may cause.
        least_steps: evidence is never complete with fewer slow steps: bursts pass.
        least_s: nor with less time between its first step and now,
        enough_steps: unless it goes on for so many steps: those of quick jobs take hundredths of a second.
        warm_steps: first steps, looked at by nobody.
        learn_steps: steps after these that teach what is normal.
        least_reference: smallest reference value, in standard deviations.
        forgetting: weight of one step in the estimates of scale and correlation.
        bias_step: share by which a rank's own bias follows its residual per step, while nothing is pending.
        scale_floor: no noise is taken to be smaller.
        few_peers: below this many comparable ranks, scales are estimated with more care.
        noisy_scale: above this scale the data differ more than machines do: a data imbalance.
        stage_imbalance: medians of roles that differ by this share, for long, are a stage imbalance.
        imbalance_steps: steps for which data must differ before it is said; four times that for stages.
        node_share: share of a node's ranks that makes it the node's fault.
    """

    least_slowdown: float = 0.03
    least_group_slowdown: float = 0.2
    own_bias: float = 0.03
    bias_spread: float = 0.01
    false_alarm_steps: float = 1e7
    least_steps: int = 17
    least_s: float = 2.0
    enough_steps: int = 45
    warm_steps: int = 20
    learn_steps: int = 60
    least_reference: float = 0.25
    forgetting: float = 0.02
    bias_step: float = 0.001
    scale_floor: float = 0.002
    few_peers: int = 16
    noisy_scale: float = 0.05
    stage_imbalance: float = 0.10
    imbalance_steps: int = 50
    node_share: float = 0.5

    def __post_init__(self) -> None:
        for name in (
            "least_slowdown",
            "least_group_slowdown",
            "bias_spread",
            "least_reference",
            "scale_floor",
            "noisy_scale",
        ):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be above 0 and below 1, got {getattr(self, name)}")
        for name in ("own_bias", "forgetting", "bias_step", "node_share", "stage_imbalance"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        for name, least in (
            ("least_steps", 1),
            ("learn_steps", 3),
            ("warm_steps", 0),
            ("imbalance_steps", 1),
            ("enough_steps", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, got {getattr(self, name)}")
        if self.false_alarm_steps < 100:
            raise ValueError(f"false_alarm_steps must be 100 or more, got {self.false_alarm_steps}")
        if self.least_s < 0:
            raise ValueError(f"least_s must be 0 or more, got {self.least_s}")

    @property
    def effect(self) -> float:
        """The effect looked for as a difference of logarithms."""
        return math.log1p(self.least_slowdown)

    def for_run(self, ranks: int, step_s: float, alarms_per_week: float = 1.0) -> StragglerConfig:
        """For a job of *ranks* with steps of *step_s*: noise alone raises at most *alarms_per_week* alarms in it.

        Never more lenient than the default of 1e7 rank-steps, which a small job does not reach in a week.
        """
        if ranks < 1 or step_s <= 0 or alarms_per_week <= 0:
            raise ValueError(f"need ranks, a step and alarms above 0, got {ranks}, {step_s}, {alarms_per_week}")
        wanted = ranks * WEEK_S / step_s / alarms_per_week
        return replace(self, false_alarm_steps=max(self.false_alarm_steps, wanted))
