"""A month of training on 1,024 and 16,384 GPUs: effective training time ratio (ETTR) with each way of saving.

ETTR is productive time by wall time. A month is simulated many times with the same seeds for every method: failures
come at random, each costs its detection, the restart and the work since the last usable save; saves cost their stall
and what steps lose while one is written. Intervals are the ones that steadyrun.checkpoint finds best for the method, so
that none suffers from somebody else's interval.

Stall, persist and load time per GiB are measured: by default on the machine named in the table's last line, or with
--figures FILE from ``benchmarks/checkpoint.py --json FILE``. Persisting is never faster than the shared storage is
(--storage; the default is 2 TB/s for 16,384 GPUs). The failure rate is the published one of 16,384 H100: 419 in 54
days. What coordination costs a peer at this scale (planning collectives of minutes are reported) is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from report import add_common_arguments, effort_of, finish, print_table

from steadyrun.checkpoint.interval import Costs, complete_ettr_ratio, interval_words, recommend
from steadyrun.checkpoint.schedule import snapshot_intervals_s

GPU_HOURS_PER_FAILURE = 54 * 24 * 16_384 / 419
MONTH_S = 30 * 86_400.0
# GiB of state per GPU: 70 billion parameters on 1,024 and 405 billion on 16,384, at 14 bytes each.
STATE_GIB = {1_024: 70.6e9 * 14 / 1_024 / 2**30, 16_384: 405e9 * 14 / 16_384 / 2**30}
LEAST_STALL_S = 1e-3


@dataclass(frozen=True, slots=True)
class Method:
    """What one way of saving costs, seconds per GiB of a rank's state.

    Attributes:
        persist_s: after the stall until durable; 0 when the stall is the whole save.
        slowdown_ratio: how much longer steps take while a save is written.
        load_s: reading it back in a restart; *memory_load_s* from a snapshot in memory.
        memory_share: failures after which that snapshot is still there; None: there is none.
    """

    name: str
    stall_s: float
    persist_s: float
    load_s: float
    slowdown_ratio: float = 0.0
    memory_share: float | None = None
    memory_load_s: float = 0.0

    def for_job(self, gib: float, storage_s: float) -> Method:
        """Seconds for *gib* per GPU where all GPUs together need *storage_s* to write or read them."""
        is_synchronous = self.persist_s == 0
        stall_s = max(self.stall_s * gib, storage_s) if is_synchronous else self.stall_s * gib
        return replace(
            self,
            stall_s=max(stall_s, LEAST_STALL_S),
            persist_s=0.0 if is_synchronous else max(self.persist_s * gib, storage_s),
            load_s=max(self.load_s * gib, storage_s),
            memory_load_s=self.memory_load_s * gib,
        )


# Medians of benchmarks/checkpoint.py, 1 GiB, one rank. How much slower steps are is left out: it is within the noise.
MEASURED_ON = "two cores of an AMD EPYC, virtual disk of 0.4 GB/s, 1 GiB, one rank, torch 2.13"
MEASURED = (
    Method("torch.save and fsync", 3.19, 0.0, 0.86),
    Method("dcp.save", 3.15, 0.0, 0.91),
    Method("dcp.async_save thread", 1.98, 4.85, 0.91),
    Method("dcp.async_save thread, stager reused", 0.26, 5.38, 0.91),
    Method("dcp.async_save process, stager reused", 0.24, 3.62, 0.91),
    Method("steadyrun, folder only", 0.18, 2.23, 0.34),
    Method("steadyrun", 0.18, 2.23, 0.34, memory_share=0.75, memory_load_s=0.23),
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How often a method saves in a job.

    Attributes:
        interval_s: training time between two snapshots (the memory tier's, where there is one).
        per_durable: every so many of them one is written.
    """

    method: Method
    mtbf_s: float
    restart_s: float
    detect_s: float
    interval_s: float
    per_durable: int
    first_order_ratio: float
    complete_ratio: float | None

    @property
    def durable_interval_s(self) -> float:
        return self.interval_s * self.per_durable


def plan_of(method: Method, mtbf_s: float, restart_s: float, detect_s: float) -> Plan:
    """*restart_s*: without reading the checkpoint."""
    costs = Costs(
        stall_s=method.stall_s,
        mtbf_s=mtbf_s,
        persist_s=method.persist_s,
        restart_s=restart_s + method.load_s,
        detect_s=detect_s,
        slowdown_ratio=method.slowdown_ratio,
    )
    if method.memory_share is None:
        best = recommend(costs)
        complete = complete_ettr_ratio(costs, best.interval_s)
        return Plan(method, mtbf_s, restart_s, detect_s, best.interval_s, 1, best.overhead.ettr_ratio, complete)
    share = method.memory_share
    memory_s, durable_s = snapshot_intervals_s(costs, share, 1.1 * method.persist_s)
    per_durable = max(1, round(durable_s / memory_s))
    memory_s = durable_s / per_durable
    saving = method.stall_s / memory_s + (costs.whole_stall_s - method.stall_s) / durable_s
    redone_s = share * memory_s / 2 + (1 - share) * (durable_s / 2 + method.persist_s)
    load_s = share * method.memory_load_s + (1 - share) * method.load_s
    first_order = 1.0 - saving - (redone_s + detect_s + restart_s + load_s) / mtbf_s
    return Plan(method, mtbf_s, restart_s, detect_s, memory_s, per_durable, first_order, None)


@dataclass(slots=True)
class Month:
    """Where the time of one simulated month went, seconds."""

    useful_s: float = 0.0
    saving_s: float = 0.0
    redone_s: float = 0.0
    restart_s: float = 0.0
    failures: int = 0


def simulate(plan: Plan, rng: random.Random, length_s: float = MONTH_S) -> Month:
    """One month. Between two failures everything is regular, so that only failures are events.

    A snapshot in memory after a failure is written to the folder during the restart and counts as durable once its
    persist time has passed.
    """
    method, month = plan.method, Month()
    now_s = 0.0
    kept_s = 0.0  # progress of the state that training goes on from
    durable_s = 0.0  # progress of the newest durable checkpoint
    flushed: tuple[float, float] | None = None  # (durable at, progress) of a snapshot that outlived a failure
    pause_s = 0.0  # of the restart that precedes the training
    while True:
        fails_at_s = now_s + rng.expovariate(1.0 / plan.mtbf_s)
        survives = method.memory_share is not None and rng.random() < method.memory_share
        end_s = min(fails_at_s, length_s)
        run = _Stretch.of(plan, max(end_s - now_s - pause_s, 0.0))
        month.restart_s += min(pause_s, end_s - now_s)
        month.saving_s += run.saving_s
        if fails_at_s >= length_s:
            month.useful_s = kept_s + run.progress_s
            return month
        month.failures += 1
        if flushed is not None and flushed[0] <= fails_at_s:
            durable_s = max(durable_s, flushed[1])
            flushed = None
        if run.durable_s is not None:
            durable_s = max(durable_s, kept_s + run.durable_s)
        reached_s = kept_s + run.progress_s
        memory_s = kept_s + run.snapshot_s if run.snapshot_s is not None else kept_s
        if survives:
            kept_s = memory_s
            flushed = (fails_at_s + method.persist_s, memory_s)
            load_s = method.memory_load_s
        else:
            kept_s, flushed, load_s = durable_s, None, method.load_s
        month.redone_s += reached_s - kept_s
        pause_s = plan.detect_s + plan.restart_s + load_s
        now_s = fails_at_s


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Training for some time without a failure: progress, and that of the newest snapshot and durable save in it."""

    progress_s: float
    saving_s: float
    snapshot_s: float | None
    durable_s: float | None

    @classmethod
    def of(cls, plan: Plan, time_s: float) -> _Stretch:
        """A cycle is *per_durable* intervals, each ended by a stall, and what steps lose while a save is written."""
        method, n = plan.method, plan.per_durable
        slowed_s = method.slowdown_ratio * method.persist_s / (1.0 + method.slowdown_ratio)
        interval_s = plan.interval_s + method.stall_s
        cycle_s = n * interval_s + slowed_s
        cycles, rest_s = divmod(time_s, cycle_s)
        # In a cycle after a save steps are slower at first: what they lose is lost before anything else happens.
        lost_s = min(rest_s, slowed_s) if cycles else 0.0
        head_s = max(rest_s - lost_s, 0.0) if cycles else min(rest_s, n * interval_s)
        intervals = min(int(head_s // interval_s), n)
        within_s = min(head_s - intervals * interval_s, plan.interval_s)
        done = int(cycles) * n + intervals
        progress_s = done * plan.interval_s + within_s
        snapshots = done if within_s or intervals or cycles else 0
        saved = int(cycles) + (intervals == n)
        # The newest save is durable only if its persist time has passed since its stall.
        since_s = rest_s + slowed_s if intervals < n else head_s - n * interval_s
        durable = saved if since_s >= method.persist_s else saved - 1
        return cls(
            progress_s=progress_s,
            saving_s=time_s - progress_s,
            snapshot_s=snapshots * plan.interval_s if snapshots else None,
            durable_s=durable * n * plan.interval_s if durable > 0 else None,
        )


@dataclass(frozen=True, slots=True)
class Result:
    """A method in a job: means over the simulated months; *low*, *high* are the 5th and 95th percentile."""

    method: str
    gpus: int
    stall_s: float
    persist_s: float
    interval_s: float
    durable_interval_s: float
    first_order_ratio: float
    ettr_ratio: float
    low_ratio: float
    high_ratio: float
    saving_ratio: float
    redone_ratio: float
    restart_ratio: float
    failures: float


def result_of(plan: Plan, gpus: int, months: int, seed: int) -> Result:
    found = [simulate(plan, random.Random(seed * 1_000_003 + i)) for i in range(months)]
    ratios = sorted(m.useful_s / MONTH_S for m in found)
    return Result(
        method=plan.method.name,
        gpus=gpus,
        stall_s=plan.method.stall_s,
        persist_s=plan.method.persist_s,
        interval_s=plan.interval_s,
        durable_interval_s=plan.durable_interval_s,
        first_order_ratio=plan.first_order_ratio,
        ettr_ratio=statistics.fmean(ratios),
        low_ratio=ratios[int(0.05 * (months - 1))],
        high_ratio=ratios[math.ceil(0.95 * (months - 1))],
        saving_ratio=statistics.fmean(m.saving_s for m in found) / MONTH_S,
        redone_ratio=statistics.fmean(m.redone_s for m in found) / MONTH_S,
        restart_ratio=statistics.fmean(m.restart_s for m in found) / MONTH_S,
        failures=statistics.fmean(m.failures for m in found),
    )


# -- figures of benchmarks/checkpoint.py -----------------------------------------------------------------------------
def methods_from(path: Path, with_slowdown: bool) -> tuple[tuple[Method, ...], str]:
    """Medians per GiB of a rank's state over all tries on a disk of methods whose content was right and synced.

    How much slower steps were is taken over with *with_slowdown* alone: it needs a quiet machine and many rounds.
    """
    data = json.loads(path.read_text())
    tries = [t for t in data["results"] if t["filesystem"] == "disk" and not t["problem"] and t["sound"] and t["syncs"]]
    found = []
    for name in dict.fromkeys(t["method"] for t in tries):
        mine = [t for t in tries if t["method"] == name]
        gib = statistics.median(t["gib"] / t["ranks"] for t in mine)

        def per_gib(field: str, mine: Sequence[Mapping[str, Any]] = mine, gib: float = gib) -> float:
            values = [t[field] for t in mine if t.get(field) is not None]
            return statistics.median(values) / gib if values else 0.0

        persist_s = per_gib("persist_s")
        is_synchronous = persist_s < 0.01
        slower = [t["inflation"] - 1.0 for t in mine if t.get("inflation")] if with_slowdown else []
        method = Method(
            name=name,
            stall_s=per_gib("stall_s"),
            persist_s=0.0 if is_synchronous else persist_s,
            load_s=per_gib("restore_disk_s"),
            slowdown_ratio=0.0 if is_synchronous or not slower else max(0.0, statistics.median(slower)),
        )
        if per_gib("restore_memory_s"):
            found.append(replace(method, name=f"{name}, folder only"))
            method = replace(method, memory_share=0.75, memory_load_s=per_gib("restore_memory_s"))
        if "floor" not in name:
            found.append(method)
    if not found:
        raise SystemExit(f"{path} has no sound tries on a disk: run benchmarks/checkpoint.py --filesystems=disk --json")
    facts = data["machine"]
    return tuple(found), f"{facts['cores']} cores, kernel {facts['kernel']}, {len(tries)} tries"


# -- picture ---------------------------------------------------------------------------------------------------------
WIDTH, ROW, LEFT, RIGHT, TOP = 860, 24, 270, 120, 84
# Okabe and Ito's palette: distinct also with the common kinds of colour blindness.
PARTS = (("saving", "#0072b2"), ("work done again", "#d55e00"), ("detection and restart", "#009e73"))


def picture(results: Sequence[Result]) -> str:
    """Lost time per method as stacked bars: a whole SVG document without script, font or link."""
    groups = [(g, [r for r in results if r.gpus == g]) for g in dict.fromkeys(r.gpus for r in results)]
    height = TOP + sum(ROW * (len(rows) + 2) for _, rows in groups) + 20
    longest = max(1.0 - r.ettr_ratio for r in results) * 1.05
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="12" role="img">',
        "<title>Time lost in a month of training, by method of saving</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(16, 28, "Time lost in a month of training, by method of saving", size=16),
    ]
    x = 16.0
    for name, colour in PARTS:
        lines.append(f'<rect x="{x}" y="44" width="12" height="12" fill="{colour}"/>')
        lines.append(_text(x + 18, 54, name))
        x += 40 + 7 * len(name)
    y = float(TOP)
    for gpus, rows in groups:
        lines.append(_text(16, y + 14, f"{gpus:,} GPUs", size=14))
        y += ROW
        for r in rows:
            lines.append(_text(LEFT - 8, y + 15, r.method, anchor="end"))
            at = float(LEFT)
            for share, (_, colour) in zip((r.saving_ratio, r.redone_ratio, r.restart_ratio), PARTS, strict=True):
                width = share / longest * (WIDTH - LEFT - RIGHT)
                lines.append(
                    f'<rect x="{at:.1f}" y="{y + 3:.1f}" width="{width:.1f}" height="{ROW - 6}" fill="{colour}"/>'
                )
                at += width
            lines.append(_text(at + 6, y + 15, f"ETTR {100 * r.ettr_ratio:.2f} %"))
            y += ROW
        y += ROW
    return "\n".join([*lines, "</svg>", ""])


def _text(x: float, y: float, text: str, size: int = 12, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="#333333" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
    )


# -- main ------------------------------------------------------------------------------------------------------------
def show(results: Sequence[Result], gpus: int, mtbf_s: float, gib: float) -> None:
    mine = [r for r in results if r.gpus == gpus]
    print(f"\n{gpus:,} GPUs, {gib:.2f} GiB of state each, MTBF {mtbf_s / 3600:.1f} h, {mine[0].failures:.0f} failures")
    rows = []
    for r in mine:
        tiers = r.durable_interval_s > 1.5 * r.interval_s
        rows.append(
            [
                r.method,
                f"{r.stall_s:.3g}",
                f"{r.persist_s:.3g}",
                (f"{interval_words(r.interval_s)} / " if tiers else "") + interval_words(r.durable_interval_s),
                f"{100 * r.first_order_ratio:.2f}",
                f"{100 * r.ettr_ratio:.2f} ({100 * r.low_ratio:.2f}-{100 * r.high_ratio:.2f})",
                f"{100 * r.saving_ratio:.2f}",
                f"{100 * r.redone_ratio:.2f}",
                f"{100 * r.restart_ratio:.2f}",
            ]
        )
    head = ["method", "stall, s", "persist, s", "interval (memory / folder)", "first order, %", "ETTR, % (5th-95th)"]
    print_table([*head, "saving, %", "redone, %", "restart, %"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--figures", type=Path, metavar="FILE", help="what benchmarks/checkpoint.py --json wrote")
    parser.add_argument("--with-slowdown", action="store_true", help="with --figures: count slower steps as well")
    parser.add_argument("--gpus", default="1024,16384")
    parser.add_argument("--gib", type=float, help="GiB of state per GPU (default: 70 B and 405 B parameters)")
    parser.add_argument("--restart", type=float, default=60.0, help="seconds to start again, before loading (60)")
    parser.add_argument("--detect", type=float, default=10.0, help="seconds from a failure to its notice (10)")
    parser.add_argument("--storage", type=float, default=0.122, help="GB/s of shared storage per GPU (0.122)")
    parser.add_argument("--months", type=int, help="how many months are simulated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write an SVG")
    arguments = parser.parse_args()
    months = arguments.months or effort_of(arguments, quick=20, normal=200, full=2000)
    methods, measured_on = (
        (MEASURED, MEASURED_ON)
        if arguments.figures is None
        else methods_from(arguments.figures, arguments.with_slowdown)
    )
    results: list[Result] = []
    for gpus in (int(g) for g in arguments.gpus.split(",")):
        gib = arguments.gib or STATE_GIB.get(gpus, STATE_GIB[16_384])
        mtbf_s = GPU_HOURS_PER_FAILURE * 3600 / gpus
        storage_s = gib * 2**30 / (arguments.storage * 1e9)
        for method in methods:
            plan = plan_of(method.for_job(gib, storage_s), mtbf_s, arguments.restart, arguments.detect)
            results.append(result_of(plan, gpus, months, arguments.seed))
        show(results, gpus, mtbf_s, gib)
    print(f"\n{months} months, seed {arguments.seed}; seconds per GiB measured on: {measured_on}")
    if arguments.picture is not None:
        arguments.picture.write_text(picture(results))
        print(f"picture: {arguments.picture}")
    finish(arguments, "ettr", [asdict(r) for r in results])


if __name__ == "__main__":
    main()
