"""Paces of jobs that never ran: own-work times of ranks with the noise of real ones, and faults in them.

Noise regimes are anchored in three public traces of large jobs (ByteDance's StragglerAnalysis): against its peers a
dense job's rank scatters by 0.33-0.41 % with kurtosis 3-4.4 and lag-1 autocorrelation 0-0.19, ranks differ by
0.15-0.38 %, all move together by 0.7-2.5 %; a job with sequences of unequal length scatters by 9-14 %. Spikes, bursts,
checkpoint steps and the swing of a day are assumptions on top. The same seed gives the same paces.

    stream = PaceStream(jobs=4, ranks=64, regime=REGIMES["dense"], seed=1)
    logs = stream.chunk(1000)          # [steps, jobs * ranks], natural logarithm of own-work time

The rules that other tools use, in our words, are here as well: ``RULES``. Each is given the same logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["REGIMES", "RULES", "WINDOW", "PaceFault", "PaceStream", "Regime", "Rule", "fault_profile"]

Logs: TypeAlias = NDArray[np.float32]

WINDOW: Final = 10  # steps of a rank-window, the unit of false alarms
SWING, SWING_STEPS = 0.015, 8640  # a day at 10 s per step
PAUSE_SHARE, PAUSE = 1 / 300, math.log(2.0)  # a step in which everybody takes twice as long
HEAVY: Final = 0.25  # spread of the scale itself: kurtosis 3.85
LONGEST_BURST: Final = 60


@dataclass(frozen=True, slots=True)
class Regime:
    """Noise of own-work times, as shares.

    Attributes:
        scatter: standard deviation of a rank against its peers, ``correlation`` its lag-1 autocorrelation.
        bias: how much ranks differ by nature (standard deviation).
        common: step by step, all ranks together.
        spike_share, spike: share of rank-steps that take longer, and by how much on average.
        burst_share, burst: share of rank-steps in which something longer begins (three steps on average), how much.
    """

    scatter: float
    bias: float
    correlation: float
    common: float
    spike_share: float = 1 / 500
    spike: float = 0.15
    burst_share: float = 1 / 20_000
    burst: float = 0.30
    burst_steps: float = 3.0


REGIMES: Final[Mapping[str, Regime]] = {
    "dense": Regime(scatter=0.004, bias=0.003, correlation=0.15, common=0.015),
    "hetero": Regime(scatter=0.006, bias=0.015, correlation=0.15, common=0.015),
    "noisy": Regime(
        scatter=0.030, bias=0.010, correlation=0.20, common=0.020, spike_share=1 / 200, spike=0.20, burst_share=1e-4
    ),
    "seqlen": Regime(scatter=0.120, bias=0.003, correlation=0.0, common=0.030),
}


class PaceStream:
    """Fault-free paces of *jobs* independent jobs of *ranks* comparable ranks each, rank after rank within its job."""

    def __init__(self, jobs: int, ranks: int, regime: Regime, seed: int, warm_steps: int = 10) -> None:
        self.jobs, self.ranks, self.regime = jobs, ranks, regime
        self.size = jobs * ranks
        self._rng = np.random.default_rng(seed)
        self.bias = self._rng.normal(0.0, regime.bias, self.size).astype(np.float32)
        self._phase = self._rng.random(jobs) * 2 * math.pi
        self._last = np.zeros(self.size, np.float32)
        self._step = 0
        self._warm_steps = warm_steps

    @property
    def healthy(self) -> NDArray[np.bool_]:
        """Ranks that are not slower by nature than the effect the detector looks for (3 %)."""
        return self.bias < 0.03

    def chunk(self, steps: int) -> Logs:
        """The next *steps* steps, [steps, jobs * ranks]."""
        out = self._scatter(steps)
        out += self.bias
        self._add_spikes(out)
        self._add_bursts(out)
        if self._step < self._warm_steps:
            first = min(self._warm_steps - self._step, steps)
            out[:first] += self._rng.exponential(0.2, (first, self.size)).astype(np.float32)
        common = self._common(steps)
        out.reshape(steps, self.jobs, self.ranks)[:] += common[:, :, None]
        self._step += steps
        return out

    def _scatter(self, steps: int) -> Logs:
        regime, rng = self.regime, self._rng
        noise = rng.standard_normal((steps, self.size), np.float32)
        noise *= np.exp(rng.standard_normal((steps, self.size), np.float32) * np.float32(HEAVY))
        innovation = regime.scatter * math.sqrt(1 - regime.correlation**2) / math.exp(HEAVY**2)
        noise *= np.float32(innovation)
        if regime.correlation:
            last, share = self._last, np.float32(regime.correlation)
            for row in noise:
                row += share * last
                last = row
            self._last = last.copy()
        return noise

    def _add_spikes(self, out: Logs) -> None:
        regime, rng = self.regime, self._rng
        number = int(rng.poisson(out.size * regime.spike_share))
        at = rng.integers(0, len(out), number), rng.integers(0, self.size, number)
        np.add.at(out, at, np.log1p(rng.exponential(regime.spike, number)).astype(np.float32))

    def _add_bursts(self, out: Logs) -> None:
        regime, rng = self.regime, self._rng
        number = int(rng.poisson(out.size * regime.burst_share))
        firsts, ranks = rng.integers(0, len(out), number), rng.integers(0, self.size, number)
        lengths = np.minimum(rng.geometric(1 / regime.burst_steps, number), LONGEST_BURST)
        heights = np.log1p(rng.exponential(regime.burst, number))
        for first, rank, length, height in zip(firsts, ranks, lengths, heights, strict=True):
            out[first : first + length, rank] += np.float32(height)

    def _common(self, steps: int) -> Logs:
        at = np.arange(self._step, self._step + steps)[:, None]
        out = self._rng.normal(0.0, self.regime.common, (steps, self.jobs))
        out += SWING * np.sin(2 * math.pi * at / SWING_STEPS + self._phase)
        out += PAUSE * (self._rng.random((steps, self.jobs)) < PAUSE_SHARE)
        out += np.maximum(0.0, math.log(4.0) * (1 - at / max(self._warm_steps, 1)))
        return out.astype(np.float32)


class PaceFault(str, Enum):
    """How a rank becomes slow."""

    BY_5 = "+5 %"
    BY_10 = "+10 %"
    BY_20 = "+20 %"
    BY_50 = "+50 %"
    INTERMITTENT = "10 of 30 steps +30 %"
    RARE = "5 of 50 steps +30 %"
    RAMP = "ramp to +20 % in 300"


_CONSTANT: Final = {PaceFault.BY_5: 0.05, PaceFault.BY_10: 0.10, PaceFault.BY_20: 0.20, PaceFault.BY_50: 0.50}


def fault_profile(fault: PaceFault, steps: int, rng: np.random.Generator) -> Logs:
    """What *fault* adds to the logarithms from its first step on."""
    at = np.arange(steps)
    if fault in _CONSTANT:
        out = np.full(steps, math.log1p(_CONSTANT[fault]))
    elif fault is PaceFault.INTERMITTENT:
        out = np.where((at + rng.integers(0, 30)) % 30 < 10, math.log(1.3), 0.0)
    elif fault is PaceFault.RARE:
        out = np.where((at + rng.integers(0, 50)) % 50 < 5, math.log(1.3), 0.0)
    else:
        out = np.log1p(0.2 * np.minimum(at / 300, 1.0))
    return out.astype(np.float32)


# -- rules of others ---------------------------------------------------------------------------------------------------
Scores: TypeAlias = NDArray[np.floating[Any]]
Judge: TypeAlias = Callable[[Logs], Scores]


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to tell who is slow.

    Attributes:
        shipped: score above which it accuses as its makers ship it, or None where they leave it to the reader.
        start: makes a judge: fed chunk by chunk with [steps, jobs, ranks] (a multiple of WINDOW steps), it gives
            scores of the same shape, -inf where it does not decide.
    """

    name: str
    shipped: float | None
    start: Callable[[], Judge]


def _by_window(score: Callable[[Logs], Scores]) -> Callable[[], Judge]:
    """A rule that speaks at the end of each window; *score* is given [WINDOW, jobs, ranks] and gives [jobs, ranks]."""

    def judge(logs: Logs) -> Scores:
        out = np.full(logs.shape, -np.inf, np.float32)
        for first in range(0, len(logs), WINDOW):
            out[first + WINDOW - 1] = score(logs[first : first + WINDOW])
        return out

    return lambda: judge


def _stateful(make: Callable[[], Callable[[Logs], Scores]]) -> Callable[[], Judge]:
    return lambda: _by_window(make())()


def _median_of_peers(values: Scores) -> Scores:
    return np.median(values, axis=-1, keepdims=True)


def _lower_median(logs: Logs) -> Logs:
    """Median over ranks, [..., 1]; of an even number the lower one."""
    middle = (logs.shape[-1] - 1) // 2
    return np.partition(logs, middle, axis=-1)[..., middle : middle + 1]


def _against_fastest(window: Logs) -> Scores:
    typical = np.exp(np.median(window, axis=0))
    out: Scores = typical / typical.min(axis=-1, keepdims=True)
    return out


def _against_own_best() -> Callable[[Logs], Scores]:
    best: list[Scores] = []

    def score(window: Logs) -> Scores:
        typical = np.exp(np.median(window, axis=0))
        best[:] = [np.minimum(best[0], typical) if best else typical]
        out: Scores = typical / best[0]
        return out

    return score


def _mean_against_fastest(window: Logs) -> Scores:
    mean = np.exp(window).mean(axis=0)
    out: Scores = mean / mean.min(axis=-1, keepdims=True)
    return out


def _one_deviation(window: Logs) -> Scores:
    mean = np.exp(window).mean(axis=0)
    center = mean.mean(axis=-1, keepdims=True)
    over = mean - center
    return np.where(over > 0.1 * center, over / np.maximum(mean.std(axis=-1, keepdims=True), 1e-9), 0.0)


def _tenth_off_median(window: Logs) -> Scores:
    mean = np.exp(window).mean(axis=0)
    center = _median_of_peers(mean)
    over = mean - center
    out: Scores = over / np.maximum(_median_of_peers(np.abs(over)), 0.1 * center)
    return out


def _against_median(window: Logs) -> Scores:
    mean = np.exp(window).mean(axis=0)
    out: Scores = mean / _median_of_peers(mean)
    return out


def _robust_z(window: Logs) -> Scores:
    typical = np.median(window, axis=0)
    over = typical - _median_of_peers(typical)
    out: Scores = over / np.maximum(1.4826 * _median_of_peers(np.abs(over)), 1e-5)
    return out


def _deviations_over_median(window: Logs) -> Scores:
    mean = np.exp(window).mean(axis=0)
    over = mean - _median_of_peers(mean)
    out: Scores = over / np.maximum(_median_of_peers(np.abs(over)), 1e-6)
    return out


def _lasting_z() -> Callable[[Logs], Scores]:
    recent: list[Scores] = []

    def score(window: Logs) -> Scores:
        recent.append(_robust_z(window))
        del recent[:-3]
        return np.min(recent, axis=0) if len(recent) == 3 else np.full(window.shape[1:], -np.inf)

    return score


class _OwnChart:
    """A chart per rank in units of what it learned of itself in steps 20 to 220."""

    FIRST, LAST = 20, 220

    def __init__(self, update: Callable[[Scores], Scores], is_peer: bool) -> None:
        self._update = update
        self._is_peer = is_peer
        self._step = 0
        self._seen: list[Logs] = []
        self._center: Scores | None = None
        self._scale: Scores | None = None

    def __call__(self, logs: Logs) -> Scores:
        if self._is_peer:
            logs = logs - _lower_median(logs)
        out = np.full(logs.shape, -np.inf, np.float32)
        for row, values in enumerate(logs):
            self._step += 1
            if self._center is not None and self._scale is not None:
                out[row] = self._update((values - self._center) / self._scale)
            elif self._step > self.FIRST:
                self._seen.append(values.copy())
                if self._step > self.LAST:
                    seen = np.stack(self._seen)
                    self._center = np.median(seen, axis=0)
                    self._scale = np.maximum(1.4826 * np.median(np.abs(seen - self._center), axis=0), 1e-4)
                    self._seen = []
        return out


def _cusum() -> Callable[[Scores], Scores]:
    total: list[Scores] = [np.zeros(())]

    def update(z: Scores) -> Scores:
        total[0] = np.maximum(0.0, total[0] + z - 0.5)
        return total[0]

    return update


def _page_hinkley() -> Callable[[Scores], Scores]:
    mean: list[Scores] = [np.zeros(())]
    total: list[Scores] = [np.zeros(())]
    lowest: list[Scores] = [np.zeros(())]
    steps = [0]

    def update(z: Scores) -> Scores:
        steps[0] += 1
        mean[0] = mean[0] + (z - mean[0]) / steps[0]
        total[0] = total[0] + z - mean[0] - 0.25
        lowest[0] = np.minimum(lowest[0], total[0])
        out: Scores = total[0] - lowest[0]
        return out

    return update


def _ewma() -> Callable[[Scores], Scores]:
    mean: list[Scores] = [np.zeros(())]

    def update(z: Scores) -> Scores:
        mean[0] = 0.9 * mean[0] + 0.1 * z
        out: Scores = mean[0] / math.sqrt(0.1 / 1.9)
        return out

    return update


class _ChangePoints:
    """Bayesian online change points (Adams and MacKay) on a rank's logarithms; a change counts by its size.

    Run lengths are cut at 60, the hazard is one in 250, observations are normal with unknown mean and variance. Its
    score is the relative size of a change that is at most 15 steps old with a probability above 0.9.
    """

    LONGEST, HAZARD, WARM, BEFORE = 60, 1 / 250, 20, 30

    def __init__(self, is_peer: bool) -> None:
        self._is_peer = is_peer
        length = np.arange(self.LONGEST)
        self._kappa = (1.0 + length).astype(np.float32)
        self._alpha = (2.0 + length / 2).astype(np.float32)
        self._norm = np.array([math.lgamma(a + 0.5) - math.lgamma(a) for a in self._alpha.tolist()], np.float32)
        self._step = 0
        self._weights: Logs | None = None  # logarithms of run-length probabilities, [jobs, ranks, lengths]
        self._mean: Logs = np.zeros(0, np.float32)
        self._beta: Logs = np.zeros(0, np.float32)
        self._prior: Logs = np.zeros(0, np.float32)
        self._recent: list[Logs] = []

    def __call__(self, logs: Logs) -> Scores:
        if self._is_peer:
            logs = logs - _lower_median(logs)
        out = np.full(logs.shape, -np.inf, np.float32)
        for row, values in enumerate(logs):
            self._step += 1
            if self._step > self.WARM:
                out[row] = self._update(values)
        return out

    def _update(self, values: Logs) -> Scores:
        if self._weights is None:
            shape = (*values.shape, self.LONGEST)
            self._weights = np.full(shape, -np.inf, np.float32)
            self._weights[..., 0] = 0
            self._prior = values.copy()
            self._mean = np.repeat(values[..., None], self.LONGEST, axis=-1)
            self._beta = np.full(shape, 1e-4, np.float32)
        self._recent.append(values.copy())
        del self._recent[: -(self.LONGEST + 40)]
        kappa, alpha = self._kappa, self._alpha
        off = values[..., None] - self._mean
        variance = self._beta * (kappa + 1) / (alpha * kappa)
        likely = self._norm - 0.5 * np.log(2 * math.pi * alpha * variance)
        likely -= (alpha + 0.5) * np.log1p(off * off / (2 * alpha * variance))
        joint = self._weights + likely
        joint = np.exp(joint - joint.max(axis=-1, keepdims=True))
        grown = joint * (1 - self.HAZARD)
        run = np.empty_like(joint)
        run[..., 1:] = grown[..., :-1]
        run[..., -1] += grown[..., -1]
        run[..., 0] = joint.sum(axis=-1) * self.HAZARD
        run /= run.sum(axis=-1, keepdims=True)
        self._weights = np.log(run + 1e-30)
        mean = (kappa * self._mean + values[..., None]) / (kappa + 1)
        beta = self._beta + kappa * off * off / (2 * (kappa + 1))
        self._mean = np.concatenate([self._prior[..., None], mean[..., :-1]], axis=-1)
        self._beta = np.concatenate([np.full_like(beta[..., :1], 2e-4), beta[..., :-1]], axis=-1)
        self._mean[..., -1] = (mean[..., -1] + mean[..., -2]) / 2
        self._beta[..., -1] = (beta[..., -1] * alpha[-1] / (alpha[-1] + 0.5) + beta[..., -2]) / 2
        return self._sizes(run)

    def _sizes(self, run: Logs) -> Scores:
        out = np.zeros(run.shape[:-1], np.float32)
        if len(self._recent) < 50:
            return out
        found = np.nonzero(run[..., 3:16].sum(axis=-1) > 0.9)
        if not len(found[0]):
            return out
        lengths = np.clip(run[found].argmax(axis=-1), 3, 15)
        sums = np.cumsum(np.stack(self._recent[::-1], axis=-1)[found], axis=-1)
        at = np.arange(len(lengths))
        since = sums[at, lengths - 1]
        before = (sums[at, lengths + self.BEFORE - 1] - since) / self.BEFORE
        out[found] = np.expm1(since / lengths - before)
        return out


RULES: Final[tuple[Rule, ...]] = (
    Rule("NVRx, relative", 1 / 0.75, _by_window(_against_fastest)),
    Rule("NVRx, individual", 1 / 0.75, _stateful(_against_own_best)),
    Rule("Megatron, slowest by fastest", None, _by_window(_mean_against_fastest)),
    Rule("Megatron sniff, documented", 1.0, _by_window(_one_deviation)),
    Rule("Megatron sniff, coded", 1.0, _by_window(_tenth_off_median)),
    Rule("Greyhound, 1.2 x median", 1.2, _by_window(_against_median)),
    Rule("DLRover, 2 x median", 2.0, _by_window(_against_median)),
    Rule("robust z", 3.5, _by_window(_robust_z)),
    Rule("median + 5 MAD", 5.0, _by_window(_deviations_over_median)),
    Rule("robust z, 3 windows", None, _stateful(_lasting_z)),
    Rule("CUSUM, own", None, lambda: _OwnChart(_cusum(), is_peer=False)),
    Rule("CUSUM, peers", None, lambda: _OwnChart(_cusum(), is_peer=True)),
    Rule("Page-Hinkley, own", None, lambda: _OwnChart(_page_hinkley(), is_peer=False)),
    Rule("Page-Hinkley, peers", None, lambda: _OwnChart(_page_hinkley(), is_peer=True)),
    Rule("EWMA, own", None, lambda: _OwnChart(_ewma(), is_peer=False)),
    Rule("EWMA, peers", None, lambda: _OwnChart(_ewma(), is_peer=True)),
    Rule("change points, own", 0.10, lambda: _ChangePoints(is_peer=False)),
    Rule("change points, peers", 0.10, lambda: _ChangePoints(is_peer=True)),
)
