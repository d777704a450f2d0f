"""Tables, spread and JSON of the benchmarks."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and extremes of *n* values."""

    median: float
    low: float
    high: float
    n: int

    def text(self, digits: int = 2) -> str:
        if self.n == 1:
            return f"{self.median:.{digits}f}"
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def spread_of(values: Sequence[float]) -> Spread | None:
    """None where there is nothing to sum up."""
    return Spread(statistics.median(values), min(values), max(values), len(values)) if values else None


def spread_text(values: Sequence[float], digits: int = 2) -> str:
    found = spread_of(values)
    return found.text(digits) if found is not None else "-"


def ratio_spread(ours: Sequence[float | None], theirs: Sequence[float | None]) -> Spread | None:
    """Theirs by ours, pairwise: value *i* of both comes from the same round."""
    return spread_of([t / o for o, t in zip(ours, theirs, strict=True) if o and t is not None])


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need; the first to the left, the others to the right."""
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip())


def machine_facts() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    return {
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "steadyrun", "nvidia-resiliency-ext")},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="as few repetitions as show anything at all")
    effort.add_argument("--full", action="store_true", help="as many as a claim needs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every single value to FILE")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the jobs' output and run folders in DIR")


def effort_of(arguments: argparse.Namespace, quick: int, normal: int, full: int) -> int:
    return quick if arguments.quick else full if arguments.full else normal


def finish(arguments: argparse.Namespace, name: str, results: Any) -> None:
    """The last line of each benchmark, and its JSON."""
    facts = machine_facts()
    print(f"\n{', '.join(f'{k} {v}' for k, v in facts.items() if v is not None)}")
    if arguments.json is not None:
        data = {"schema": f"steadyrun.benchmark.{name}/1", "machine": facts, "results": results}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")
