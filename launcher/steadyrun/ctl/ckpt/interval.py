"""``steadyctl ckpt interval``: how often to save, for given costs of saves and failures."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from steadyrun.checkpoint.interval import (
    PRIOR_GPU_HOURS,
    Costs,
    Formula,
    Overhead,
    Recommendation,
    TwoTiers,
    estimated_mtbf_s,
    explain,
    explain_tiers,
    interval_words,
    intervals_around_s,
    mtbf_words,
    overhead_at,
    prior_mtbf_s,
    recommend,
    scaled_mtbf_s,
    two_tiers,
)
from steadyrun.core.errors import ConfigError
from steadyrun.core.options import Seconds
from steadyrun.ctl.ckpt.plot import interval_svg
from steadyrun.ctl.console import Column, Console

__all__ = ["register"]

SCHEMA: Final = "steadyrun.ckpt_interval/1"
FACTORS: Final = (0.25, 0.5, 0.71, 1.41, 2.0, 4.0)
BAR_COLUMNS: Final = 24  # at most; less where the terminal is narrow
_CENTURY_S: Final = 100 * 365.25 * 86400.0


@dataclass(frozen=True, slots=True)
class FailureRate:
    """The MTBF to compute with, in words where it comes from, and the number of GPUs it is for (None: not said)."""

    mtbf_s: float
    source: str
    gpus: int | None


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "interval",
        help="how often to save",
        description=(
            "Computes how often to save: Young's and Daly's intervals for what a save and\n"
            "a failure cost, and the overhead at intervals around them. Times are seconds,\n"
            "or have a unit: 500ms, 30s, 45m, 3.09h, 54d."
        ),
        epilog=(
            "examples:\n"
            "  steadyctl ckpt interval --stall 60 --failures 419 --over 54d\n"
            "  steadyctl ckpt interval --stall 5 --mtbf 3.09h --restart 10m --plot interval.svg\n"
            "  steadyctl ckpt interval --stall 5 --mtbf 3.09h --gpus 16384 1024 100000\n"
            "  steadyctl ckpt interval --stall 5 --persist 5m --slowdown 0.05 --gpus 512 --json\n"
            "  steadyctl ckpt interval --stall 60 --mtbf 3.09h --memory-stall 0.5\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    above_zero, from_zero = _duration(1e-6), _duration(0.0)
    costs = parser.add_argument_group("what a save and a failure cost")
    costs.add_argument("--stall", type=above_zero, required=True, metavar="S", help="training stands still per save")
    costs.add_argument(
        "--persist", type=from_zero, default=0.0, metavar="S", help="from then until the save is durable (default: 0)"
    )
    costs.add_argument(
        "--slowdown", type=float, default=0.0, metavar="RATIO", help="of steps meanwhile; 0.05: 5%% longer (default: 0)"
    )
    costs.add_argument(
        "--restart", type=from_zero, default=0.0, metavar="S", help="from notice to training again (default: 0)"
    )
    costs.add_argument(
        "--detect", type=from_zero, default=0.0, metavar="S", help="from a failure until it is noticed (default: 0)"
    )
    rate = parser.add_argument_group("how often the job fails")
    rate.add_argument("--mtbf", type=above_zero, metavar="S", help="mean time between failures of the whole job")
    rate.add_argument("--failures", type=int, metavar="K", help="in place of --mtbf: failures seen")
    rate.add_argument("--over", type=above_zero, metavar="S", help="the running time over which they were seen")
    rate.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        metavar="N",
        help=(
            "GPUs of the job, and further numbers to compare; without a failure rate, "
            f"1 failure per {PRIOR_GPU_HOURS:,.0f} GPU-hours is assumed"
        ),
    )
    rate.add_argument(
        "--seen-gpus",
        type=int,
        metavar="N",
        help="GPUs that the failure rate was seen at (default: the first of --gpus)",
    )
    tiers = parser.add_argument_group("snapshots in memory beside durable saves")
    tiers.add_argument("--memory-stall", type=above_zero, metavar="S", help="training stands still per snapshot")
    tiers.add_argument(
        "--memory-share", type=float, metavar="P", help="failures that a snapshot survives (default: 0.75)"
    )
    parser.add_argument(
        "--formula",
        choices=[f.value for f in Formula],
        help="whose interval to recommend (default: Young's, unless Daly's is better by 0.1%% of the time)",
    )
    parser.add_argument("--plot", metavar="FILE.svg", help="write a picture")
    parser.add_argument("--json", action="store_true", help=f"print {SCHEMA}")
    parser.set_defaults(run=run_interval)


def _duration(minimum_s: float) -> Callable[[str], float]:
    kind = Seconds(minimum_s=minimum_s, maximum_s=_CENTURY_S, can_be_off=False)

    def parse(text: str) -> float:
        try:
            return kind.parse(text)
        except ValueError:
            least = "above 0" if minimum_s else "of 0 or more"
            raise argparse.ArgumentTypeError(f"{text!r} is no time {least} (examples: 30, 45m, 3.09h, 54d)") from None

    return parse


def run_interval(args: argparse.Namespace, console: Console) -> int:
    """0; raises ConfigError for figures that cannot be computed with."""
    try:
        rate = failure_rate(args)
        costs = Costs(args.stall, rate.mtbf_s, args.persist, args.restart, args.detect, args.slowdown)
        formula = None if args.formula is None else Formula(args.formula)
        best = recommend(costs, formula)
        tiers = _tiers(args, costs)
        sizes = [(n, recommend(_costs_at(costs, rate, n), formula)) for n in args.gpus or ()]
    except ValueError as e:
        raise ConfigError(f"cannot compute an interval: {e}") from e
    if args.plot is not None:
        _write_plot(Path(args.plot), interval_svg(best))
    if args.json:
        console.json(_json(args, rate, best, tiers, sizes))
        return 0
    for text in (f"MTBF {mtbf_words(rate.mtbf_s)}: {rate.source}.", *explain(best)):
        for line in console.wrapped(text):
            console.print(console.styled(line, "bold") if text.startswith("Save every") else line)
    _print_table(best, console)
    if tiers is not None:
        console.print()
        for text in explain_tiers(tiers):
            for line in console.wrapped(text):
                console.print(line)
    if len(sizes) > 1 or args.seen_gpus is not None:
        _print_sizes(sizes, console)
    if args.plot is not None:
        console.print(console.styled(f"\npicture: {args.plot}", "dim"))
    return 0


# -- the failure rate ------------------------------------------------------------------------------------------------
def failure_rate(args: argparse.Namespace) -> FailureRate:
    """What the options say of it, for the first of ``--gpus``.

    Raises:
        ConfigError: they say nothing, or contradict each other.
        ValueError: a number is out of its range.
    """
    if (args.failures is None) != (args.over is None):
        raise ConfigError("cannot compute an interval: --failures and --over belong together")
    if args.mtbf is not None and args.failures is not None:
        raise ConfigError("cannot compute an interval: give either --mtbf, or --failures with --over")
    if args.seen_gpus is not None and (not args.gpus or (args.mtbf is None and args.failures is None)):
        raise ConfigError("cannot compute an interval: --seen-gpus needs --gpus, and --mtbf or --failures with --over")
    gpus = args.gpus[0] if args.gpus else None
    at = gpus if args.seen_gpus is None else args.seen_gpus
    if args.mtbf is not None:
        seen_s, source = args.mtbf, "as given"
    elif args.failures is not None:
        prior_s = None if at is None else prior_mtbf_s(at)
        seen_s = estimated_mtbf_s(args.over, args.failures, prior_s)
        source = f"{args.failures} failures in {args.over / 86400:.3g} days"
        source += "" if at is None else f", with the prior of 1 per {PRIOR_GPU_HOURS:,.0f} GPU-hours as one more"
    elif gpus is not None:
        return FailureRate(prior_mtbf_s(gpus), f"1 failure per {PRIOR_GPU_HOURS:,.0f} GPU-hours, {gpus:,} GPUs", gpus)
    else:
        raise ConfigError(
            "cannot compute an interval: how often does the job fail? Give --mtbf, or --failures with --over, or "
            f"--gpus (then 1 failure per {PRIOR_GPU_HOURS:,.0f} GPU-hours is assumed)"
        )
    if gpus is None or at is None:
        return FailureRate(seen_s, source, None)
    if at != gpus:
        source += f", scaled from {at:,} to {gpus:,} GPUs"
    return FailureRate(scaled_mtbf_s(seen_s, at, gpus), source, gpus)


def _costs_at(costs: Costs, rate: FailureRate, gpus: int) -> Costs:
    assert rate.gpus is not None, "sizes are compared only where --gpus was given"
    return dataclasses.replace(costs, mtbf_s=scaled_mtbf_s(rate.mtbf_s, rate.gpus, gpus))


def _tiers(args: argparse.Namespace, costs: Costs) -> TwoTiers | None:
    if args.memory_stall is None:
        if args.memory_share is not None:
            raise ConfigError("cannot compute an interval: --memory-share needs --memory-stall")
        return None
    return two_tiers(costs, args.memory_stall, 0.75 if args.memory_share is None else args.memory_share)


# -- output ----------------------------------------------------------------------------------------------------------
def _write_plot(file: Path, svg: str) -> None:
    if file.suffix.lower() != ".svg":
        raise ConfigError(f"cannot write {file}: the picture is an SVG; give a name that ends with .svg")
    try:
        file.write_text(svg, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"cannot write {file}: {e.strerror}; give --plot a file in a folder you may write to") from e


def _print_table(best: Recommendation, console: Console) -> None:
    rows = [(value, overhead_at(best.costs, value)) for value in intervals_around_s(best, FACTORS)]
    highest = max(overhead.total_ratio for _, overhead in rows)
    titles = ("interval", "saving", "redone", "restart", "overhead", "effective")
    cells = [
        [f"{value:,.4g} s" if value < 100 else f"{value:,.0f} s", *_shares(overhead), _note(value, best)]
        for value, overhead in rows
    ]
    widths = [max(len(text) for text in column) for column in zip(titles, *(row[:-1] for row in cells), strict=True)]
    room = console.width - sum(widths) - 2 * len(widths) - 1 - max(len(row[-1]) for row in cells)
    for row, (_, overhead) in zip(cells, rows, strict=True):
        row[-1] = f"{_bar(overhead.total_ratio / highest, room)} {row[-1]}"
    columns = [Column(title, right=True) for title in titles]
    console.print()
    heads, *lines = console.table([*columns, Column("")], cells)
    console.print(heads)
    for (value, _), line in zip(rows, lines, strict=True):
        console.print(console.styled(line, "green") if value == best.interval_s else line)


def _shares(overhead: Overhead) -> list[str]:
    ratios = (overhead.saving_ratio, overhead.redone_ratio, overhead.restart_ratio)
    return [f"{100 * ratio:.1f} %" for ratio in (*ratios, overhead.total_ratio, overhead.ettr_ratio)]


def _bar(ratio: float, room: int) -> str:
    columns = min(max(room, 1), BAR_COLUMNS)
    return ("#" * max(1, round(ratio * columns))).ljust(columns)


def _note(value_s: float, best: Recommendation) -> str:
    names = [name for name, at_s in (("Young", best.young_s), ("Daly", best.daly_s)) if at_s == value_s]
    names += ["bound"] if best.is_bound and value_s == best.interval_s else []
    return ("<- " if value_s == best.interval_s else "") + ", ".join(names)


def _print_sizes(sizes: Sequence[tuple[int, Recommendation]], console: Console) -> None:
    columns = [Column(title, right=True) for title in ("GPUs", "MTBF", "interval", "overhead", "effective")]
    rows = [
        [
            f"{gpus:,}",
            mtbf_words(r.costs.mtbf_s),
            interval_words(r.interval_s),
            f"{100 * r.overhead.total_ratio:.1f} %",
            f"{100 * r.overhead.ettr_ratio:.1f} %",
        ]
        for gpus, r in sizes
    ]
    console.print()
    for line in console.table(columns, rows):
        console.print(line)


def _json(
    args: argparse.Namespace,
    rate: FailureRate,
    best: Recommendation,
    tiers: TwoTiers | None,
    sizes: Sequence[tuple[int, Recommendation]],
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "interval_s": best.interval_s,
        **_overhead_json(best.overhead),
        "complete_effective_ratio": best.complete_ettr_ratio,
        "formula": best.formula,
        "bound_by_persist": best.is_bound,
        "young_interval_s": best.young_s,
        "daly_interval_s": best.daly_s,
        "mtbf_s": rate.mtbf_s,
        "mtbf_source": rate.source,
        "gpus": rate.gpus,
        "costs": best.costs,
        "reasoning": [*explain(best), *(() if tiers is None else explain_tiers(tiers))],
        "table": [
            {"interval_s": value, **_overhead_json(overhead_at(best.costs, value))}
            for value in intervals_around_s(best, FACTORS)
        ],
        "two_tiers": None if tiers is None else _tiers_json(tiers),
        "by_gpus": [
            {"gpus": n, "mtbf_s": r.costs.mtbf_s, "interval_s": r.interval_s, **_overhead_json(r.overhead)}
            for n, r in sizes
        ],
        "plot": args.plot,
    }


def _overhead_json(overhead: Overhead) -> dict[str, float]:
    return {
        "overhead_ratio": overhead.total_ratio,
        "effective_ratio": overhead.ettr_ratio,
        "saving_ratio": overhead.saving_ratio,
        "redone_ratio": overhead.redone_ratio,
        "restart_ratio": overhead.restart_ratio,
    }


def _tiers_json(tiers: TwoTiers) -> dict[str, Any]:
    return {
        "memory_stall_s": tiers.memory_stall_s,
        "memory_share": tiers.memory_share,
        "memory_interval_s": tiers.memory_interval_s,
        "durable_interval_s": tiers.durable_interval_s,
        "bound_by_persist": tiers.is_bound,
        **_overhead_json(tiers.overhead),
    }
