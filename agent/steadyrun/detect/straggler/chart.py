"""One control chart per rank, in groups of comparable ranks: who has become slower than its peers, and by how much.

Works on logarithms, so that differences are ratios. A step's median over the group takes away what all have in common,
a rank's learned and bounded bias what it has by nature. What is left, in units of a scale estimated from the group with
its autocorrelation, goes into a cumulative sum whose reference is an effect size (half of what is looked for), whose
steps are bounded upwards (one spike adds as much as one slow step) and downwards (an intermittent fault does not lose
all evidence in its pauses), and whose threshold follows from an allowed rate of false alarms.

Bibliography: Page (1954) for the sum, Siegmund (1985) for the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from steadyrun.detect.straggler.config import StragglerConfig
from steadyrun.detect.straggler.records import Floats
from steadyrun.detect.straggler.threshold import ThresholdTable

__all__ = ["WORTH", "Chart", "medians"]

REFRESH: Final = 10  # steps between new thresholds: scales change slowly
NORMAL: Final = 1.4826  # standard deviation by median absolute deviation
TRIMMED: Final = 1.28  # standard deviation by mean deviation, winsorised at two
CAREFUL: Final = 1.1  # scales are taken larger by this: residuals have heavier tails than the normal
WORTH: Final = 2 / 3  # of the effect looked for must be there on average
CAP: Final = 1.5  # of the threshold: evidence beyond it would only delay the end of an alarm
CLIP: Final = 1.5  # of one residual, in the mean: a step of fifty times its length is still one step
SPIKE_AT_REST: Final = 1.5  # what one step adds at most: this and the reference, where noise is large
MOST: Final = 3.0  # and this where it is small
EXTRA: Final = 0.1  # more of the least steps where noise is large: noise helps a burst over the threshold
LESS_LEAK: Final = 1.12  # by each unit of the reference: where that is large, noise alone seldom adds anything
LEAST_LEAK: Final = 0.9  # of evidence per step without an effect: a fault in 10 of 30 steps still adds up
STRONGEST: Final = 0.8  # autocorrelation that is believed
PENDING: Final = 0.3  # of the threshold: somebody may be slow
LEVEL: Final = 0.05  # weight of one step in the running level of a rank

_STATE: Final = ("bias", "evidence", "excess", "steps", "first_step", "first_s", "level", "_signs")
_GROUP_STATE: Final = ("scale", "reference", "height", "spike", "leak", "_log_scale", "_correlation", "_unsure")


def medians(rows: Floats, counts: NDArray[np.intp] | None) -> Floats:
    """The median of each row; with *counts* NaN are left out and rows hold that many numbers, else rows hold none."""
    width = rows.shape[1]
    middle = (width - 1) // 2
    if counts is None:
        if width == 1:
            return rows[:, 0]
        if width % 2:
            return np.partition(rows, middle, axis=1)[:, middle]
        parts = np.partition(rows, middle, axis=1)
        out: Floats = (parts[:, middle] + parts[:, middle + 1 :].min(axis=1)) / 2
        return out
    ordered = np.sort(rows, axis=1)  # NaN last
    at = np.arange(len(rows))
    low = ordered[at, np.maximum(counts - 1, 0) // 2]
    middles: Floats = (low + ordered[at, np.minimum(counts // 2, width - 1)]) / 2
    return middles


class Chart:
    """Charts of some groups of ranks.

    Attributes, all [groups, widest group]:
        evidence: the cumulative sums; an alarm is due above ``height`` ([groups, 1]) if the mean is worth it.
        excess: sum of residuals since evidence was last zero, ``steps`` their number.
        first_step, first_s: where evidence was last zero, step and elapsed time.
        bias: what a rank has by nature; ``level`` the running mean of its difference from the group's median.
    """

    def __init__(
        self,
        config: StragglerConfig,
        groups: Sequence[Sequence[int]],
        *,
        is_alone: bool = False,
        warm_steps: int | None = None,
        learn_steps: int | None = None,
        least_steps: int | None = None,
    ) -> None:
        """*groups* are of about one size: rows are padded to the widest.

        Args:
            is_alone: ranks that nobody is comparable with: each has only its own past, whatever bias that shows. A
                group of several of these still shares what all have in common.
            warm_steps, learn_steps, least_steps: instead of the configured.
        """
        width = max(len(g) for g in groups)
        self.config = config
        self.is_alone = is_alone
        self.members = np.full((len(groups), width), -1, dtype=np.intp)
        for row, group in zip(self.members, groups, strict=True):
            row[: len(group)] = group
        self.sizes = np.array([len(g) for g in groups])
        self._warm = config.warm_steps if warm_steps is None else warm_steps
        self._learn = config.learn_steps if learn_steps is None else learn_steps
        self._least = config.least_steps if least_steps is None else least_steps
        self._is_few = width < config.few_peers
        self._is_pair = width == 2 and not is_alone
        self._heights = ThresholdTable(config.false_alarm_steps)
        self._needed = np.where(self.sizes > 2, 3, np.minimum(self.sizes, 1 if is_alone else 2))
        shape, groups_shape = self.members.shape, (len(groups), 1)
        self.bias: Floats = np.zeros(shape)
        self._anchor: Floats = np.zeros(shape)  # middle of the range a bias may have
        self.evidence: Floats = np.zeros(shape)
        self.excess: Floats = np.zeros(shape)
        self.steps: Floats = np.zeros(shape)
        self.first_step = np.zeros(shape, dtype=np.int64)
        self.first_s: Floats = np.zeros(shape)
        self.level: Floats = np.zeros(shape)
        self.residual: Floats = np.full(shape, np.nan)
        self.center: Floats = np.zeros(len(groups))  # medians of the last step
        self._signs: Floats = np.zeros(shape)
        self.scale: Floats = np.full(groups_shape, np.nan)
        self.reference: Floats = np.ones(groups_shape)
        self.height: Floats = np.full(groups_shape, math.inf)
        self.spike: Floats = np.full(groups_shape, 3.0)
        self.leak: Floats = np.ones(groups_shape)
        self._unsure: Floats = np.zeros(groups_shape)  # standard deviation of what is not known of a bias
        self._log_scale: Floats = np.zeros(groups_shape)
        self._correlation: Floats = np.zeros(groups_shape)
        self._learned: list[Floats] = []
        self._common_work = self._work_square = 0.0  # running mean products: work by time, work by work
        self.is_ready = False
        self.fed = 0
        self._set_bounds()

    def _set_bounds(self) -> None:
        self._least_bias = self._anchor - self.config.own_bias
        self._most_bias = self._anchor + self.config.own_bias

    # -- a step --------------------------------------------------------------------------------------------------------
    def feed(self, values: Floats, step: int, elapsed_s: float, work: Floats | None = None) -> None:
        """Logarithms of all ranks, and NaN as one more element at the end; NaN where a rank has none.

        Args:
            work: logarithms of the work of each rank, of the same form. Times grow with it by a power that is learned,
                as part of a step does not depend on it.
        """
        logs = values[self.members]
        if work is not None:
            logs = logs - self._explained(logs, work[self.members])
        known = ~np.isnan(logs)
        counts = None
        if not known.all():
            counts = known.sum(axis=1)
            enough = counts >= self._needed
            if not enough.any():
                return
            known &= enough[:, None]
            logs = np.where(known, logs, np.nan)
            counts = np.where(enough, counts, 0)
        self.fed += 1
        self.center = medians(logs, counts) if not self._is_lone else np.zeros(len(logs))
        offset = logs - self.center[:, None]
        if self._is_pair:
            offset *= 2  # against the other one, not against the mean of both
        if self.fed <= self._warm:
            return
        if not self.is_ready:
            self._learned.append(offset)
            if len(self._learned) >= self._learn:
                self._end_learning()
            return
        self._weigh(offset, known, counts, step, elapsed_s)

    def _explained(self, logs: Floats, work: Floats) -> Floats:
        """What *work* explains of *logs*."""
        both = ~(np.isnan(logs) | np.isnan(work))
        counts = both.sum(axis=1)
        amount = work - medians(np.where(both, work, np.nan), counts)[:, None]
        time = logs - medians(np.where(both, logs, np.nan), counts)[:, None]
        if both.any():
            limit = 4 * max(float(np.nanmean(np.abs(time[both]))), self.config.scale_floor)
            amounts, times = amount[both], np.clip(time[both], -limit, limit)
            self._common_work += self.config.forgetting * (float((amounts * times).mean()) - self._common_work)
            self._work_square += self.config.forgetting * (float((amounts * amounts).mean()) - self._work_square)
        power = min(1.0, max(0.0, self._common_work / self._work_square)) if self._work_square > 0 else 1.0
        explained: Floats = power * work
        return explained

    @property
    def _is_lone(self) -> bool:
        """One rank, without anybody to share a pace with."""
        return self.is_alone and self.members.shape[1] == 1

    def _end_learning(self) -> None:
        config = self.config
        seen = np.stack(self._learned)
        self._learned = []
        has_any: NDArray[np.bool_] = np.asarray(~np.isnan(seen).all(axis=0))
        seen = np.where(has_any, seen, 0.0)
        middle = np.nanmedian(seen, axis=0)
        spread = np.where(has_any, np.nanmedian(np.abs(seen - middle), axis=0), np.nan)
        spread = np.where(np.any(has_any, axis=1)[:, None], spread, 0.0)
        typical = CAREFUL * NORMAL * np.nanmedian(spread, axis=1, keepdims=True)
        scale = np.maximum(typical, config.scale_floor)
        if self.is_alone:
            self.bias = middle
            self._anchor = middle.copy()
        else:
            natural = config.bias_spread**2 * (2 if self._is_pair else 1)
            weight = natural / (natural + 1.57 * scale**2 / len(seen))  # 1.57: variance of a median by that of a mean
            self.bias = np.clip(middle * weight, -config.own_bias, config.own_bias)
            if self._is_few:
                self._unsure = np.sqrt(natural * (1 - weight))
        self._set_bounds()
        self.level = middle.copy()
        self._log_scale = np.log(scale)
        self.scale = scale
        self.is_ready = True
        self._refresh()

    def _refresh(self) -> None:
        config = self.config
        # Among few, what is not known of the biases of one or two others shifts a rank for as long as the run lasts.
        reference = np.maximum(config.least_reference, config.effect / 2 / self.scale)
        self.reference = reference + self._unsure / self.scale
        self.spike = np.minimum(SPIKE_AT_REST + self.reference, MOST)
        self.leak = np.maximum(MOST - LESS_LEAK * self.reference, LEAST_LEAK)
        self.height = np.maximum(
            self._heights(self.reference), self._least * self.spike * (1 + EXTRA * (MOST - self.spike))
        )

    def _weigh(
        self, offset: Floats, known: NDArray[np.bool_], counts: NDArray[np.intp] | None, step: int, elapsed_s: float
    ) -> None:
        residual = offset - self.bias
        self.residual = residual
        if self.fed % REFRESH == 0:
            self._refresh()
        self._rescale(residual, known, counts)
        scale = self.scale
        if counts is None:
            whole = residual
        else:
            whole = np.where(known, residual, 0.0)
            offset = np.where(known, offset, self.level)
        # In place from here on: with thousands of ranks, fresh memory costs more than the sums.
        gain = whole / scale
        gain -= self.reference
        np.minimum(np.maximum(gain, -self.leak, out=gain), self.spike, out=gain)
        if counts is not None:
            gain[~known] = 0.0
        was_zero = self.evidence == 0
        evidence = self.evidence
        evidence += gain
        np.minimum(np.maximum(evidence, 0.0, out=evidence), CAP * self.height, out=evidence)
        on = evidence > 0
        begins = np.logical_and(on, was_zero, out=was_zero)
        if begins.any():
            self.first_step[begins] = step
            self.first_s[begins] = elapsed_s
        bounded = np.minimum(np.maximum(whole, -CLIP, out=gain), CLIP, out=gain)
        self.excess += bounded
        self.excess *= on
        self.steps += 1.0 if counts is None else known
        self.steps *= on
        bounded = np.minimum(np.maximum(offset, -CLIP, out=gain), CLIP, out=gain)
        bounded -= self.level
        bounded *= LEVEL
        self.level += bounded
        limit = 3 * scale
        drift = np.minimum(np.maximum(whole, -limit, out=gain), limit, out=gain)
        drift *= self.config.bias_step
        if self._is_few:  # a slow one moves the middle of few
            drift *= np.max(evidence / self.height, axis=1, keepdims=True) < 0.5
        else:
            drift *= evidence < self.height / 2
        self.bias += drift
        np.minimum(np.maximum(self.bias, self._least_bias, out=self.bias), self._most_bias, out=self.bias)

    def _rescale(self, residual: Floats, known: NDArray[np.bool_], counts: NDArray[np.intp] | None) -> None:
        config = self.config
        forgetting: Floats | float = config.forgetting
        sizes = np.abs(residual)
        if self._is_few:
            # With few peers a slow one would enter the scale; nothing is learned while it may be there.
            limited = np.minimum(sizes, 2 * self.scale)
            mean = _means(limited, known)
            now = np.maximum(CAREFUL * TRIMMED * mean, config.scale_floor)
            pending: NDArray[np.bool_] = np.max(self.evidence / self.height, axis=1, keepdims=True) > PENDING
            if counts is not None:
                pending |= counts[:, None] == 0
            forgetting = np.where(pending, 0.0, config.forgetting)
            self._log_scale = np.log((1 - forgetting) * np.exp(self._log_scale) + forgetting * now)
        else:
            now = np.maximum(CAREFUL * NORMAL * medians(sizes, counts)[:, None], config.scale_floor)
            if counts is not None:
                now = np.where(counts[:, None] > 0, now, np.exp(self._log_scale))
            self._log_scale += forgetting * (np.log(now) - self._log_scale)
        signs = np.sign(residual) if counts is None else np.where(known, np.sign(residual), 0.0)
        same = (signs * self._signs).sum(axis=1, keepdims=True) / signs.shape[1]
        self._correlation = self._correlation + forgetting * (same - self._correlation)
        self._signs = signs
        # The arcsine law: of two normal values with correlation c the signs agree on average by 2/pi asin(c).
        strength = _between(np.sin(np.pi / 2 * self._correlation), 0.0, STRONGEST)
        self.scale = np.exp(self._log_scale) * np.sqrt((1 + strength) / (1 - strength))

    # -- what it has found ---------------------------------------------------------------------------------------------
    @property
    def mean_excess(self) -> Floats:
        """Mean residual since evidence was last zero."""
        return self.excess / np.maximum(self.steps, 1)

    def over(self, elapsed_s: float) -> NDArray[np.bool_]:
        """Whose evidence is complete."""
        high = self.evidence > self.height
        if not high.any():
            return high
        worth = self.mean_excess >= WORTH * self.config.effect
        lasts = (elapsed_s - self.first_s >= self.config.least_s) | (self.steps >= self.config.enough_steps)
        return high & worth & lasts

    def forget(self, row: int, column: int) -> None:
        """The evidence of one: it counts from nothing again."""
        self.evidence[row, column] = self.excess[row, column] = self.steps[row, column] = 0.0

    # -- keeping it ----------------------------------------------------------------------------------------------------
    def state(self) -> dict[str, Any]:
        """Plain lists and numbers; unfinished learning is not kept."""
        arrays = {name: getattr(self, name).tolist() for name in (*_STATE, *_GROUP_STATE, "_anchor")}
        work = {"common_work": self._common_work, "work_square": self._work_square}
        return {"fed": self.fed, "is_ready": self.is_ready, "members": self.members.tolist(), **work, **arrays}

    def restore(self, state: Mapping[str, Any]) -> None:
        """What ``state`` gave.

        Raises:
            ValueError: it is of other groups.
        """
        if state["members"] != self.members.tolist():
            raise ValueError("the state is of other groups of ranks than this chart's")
        if not state["is_ready"]:
            return
        for name in (*_STATE, *_GROUP_STATE, "_anchor"):
            current = getattr(self, name)
            setattr(self, name, np.array(state[name], dtype=current.dtype).reshape(current.shape))
        self._common_work, self._work_square = float(state["common_work"]), float(state["work_square"])
        self._set_bounds()
        self.fed = int(state["fed"])
        self.is_ready = True


def _between(values: Floats, low: Floats | float, high: Floats | float) -> Floats:
    """np.clip without its wrappers, which cost more than the work on a few ranks."""
    out: Floats = np.minimum(np.maximum(values, low), high)
    return out


def _means(rows: Floats, known: NDArray[np.bool_]) -> Floats:
    counts = known.sum(axis=1, keepdims=True)
    out: Floats = np.where(known, rows, 0.0).sum(axis=1, keepdims=True) / np.maximum(counts, 1)
    return out
