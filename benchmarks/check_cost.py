"""What the checks of a rank's bytes cost it: measured from outside, beside what the run itself says.

Three jobs of one rank each train the same model under steadyrun, two with ``--ft-sdc off``, one with checks after every
second step, in turns of a few steps: one trains while the others wait, so that all see the same machine. With checks
so dense each step has one (after it, or before its update), and the difference is well above the noise. How far apart
the two without checks are is the noise: where their memory happens to lie makes one slower than the other. Not told is
what a check evicts from the caches and training has to fetch again: up to a tenth of the check. A fourth job then
trains with ``auto``, to show what that chooses (not with ``--quick``).

On a CPU all is taken by the clock of the training thread, which a busy machine disturbs least; on a GPU by the wall.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from typing import Any

from job import HERE, STEADYRUN, Job
from report import add_common_arguments, effort_of, finish, print_table, ratio_spread, spread_of, spread_text

READY_S, STRETCH_S, END_S = 180.0, 120.0, 60.0
LINE = re.compile(r"checks of bytes took ([\d.]+) % of training")


class Side:
    """One job, which trains when it is told to."""

    def __init__(self, option: str, arguments: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self.option = option
        env = {"BENCH_MIB": str(arguments.mib)}
        self.job = stack.enter_context(Job(env, arguments.keep, f"check-{option}"))
        fifo = self.job.folder / "orders"
        os.mkfifo(fifo)
        self._orders = os.open(fifo, os.O_RDWR)  # for reading as well: it opens at once, and nobody waits for a writer
        stack.callback(os.close, self._orders)
        options = ("--standalone", "--nproc-per-node=1", "--ft-standby=off", "--ft-run-dir={run_dir}")
        argv = [*STEADYRUN, *options, f"--ft-sdc={option}", str(HERE / "check_rank.py")]
        self.job.start(argv, {"BENCH_ORDERS": str(fifo)})
        self.stretches: list[dict[str, Any]] = []

    def wait_ready(self) -> dict[str, Any]:
        return self.job.wait_for(lambda: self.job.events("ready"), READY_S, "the rank is ready")[0]

    def train(self, steps: int) -> None:
        os.write(self._orders, f"{steps}\n".encode())
        many = len(self.stretches) + 1
        told = self.job.wait_for(lambda: self.job.events("trained")[many - 1 :], STRETCH_S, f"{steps} steps")
        self.stretches.append(told[0])

    def end(self) -> None:
        os.write(self._orders, b"0\n")
        if self.job.wait(END_S) != [0]:
            raise SystemExit(f"the job failed\n{self.job.output_tail()}")

    def ms_per_step(self, clock: str) -> list[float]:
        return [1e3 * s[clock] / s["steps"] for s in self.stretches]

    def told(self) -> dict[str, Any]:
        """The run's last record of what checks cost."""
        records = self.job.journal("integrity")
        return [r["ranks"]["0"] for r in records if r.get("event") == "checks" and "0" in r["ranks"]][-1]

    def told_percent(self) -> float:
        """As the line that the run prints says."""
        found = LINE.search(self.job.output_tail(40))
        if found is None:
            raise SystemExit(f"the run has not said what checks took\n{self.job.output_tail()}")
        return float(found.group(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--mib", type=float, default=16.0, help="of parameters; with AdamW's state thrice as much")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    rounds = effort_of(arguments, quick=4, normal=15, full=60)
    steps = effort_of(arguments, quick=5, normal=10, full=20)
    with contextlib.ExitStack() as stack:
        off, dense, again = sides = [Side(option, arguments, stack) for option in ("off", "2", "off")]
        ready = [side.wait_ready() for side in sides].pop()
        for number in range(rounds):
            for side in sides[number % 3 :] + sides[: number % 3]:
                side.train(steps)
            print(".", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        for side in sides:
            side.end()
        auto = None if arguments.quick else Side("auto", arguments, stack)
        if auto is not None:
            auto.wait_ready()
            auto.train(rounds * steps)
            auto.end()
        clock = "wall_s" if ready["device"] == "cuda" else "cpu_s"
        print(f"{ready['bytes'] / 2**20:.0f} MiB are checked on {ready['device']}, {rounds} rounds of {steps} steps")
        results = report(off, again, dense, auto, ready["bytes"], clock)
    finish(arguments, "check_cost", results)


def report(off: Side, again: Side, dense: Side, auto: Side | None, size_bytes: int, clock: str) -> dict[str, Any]:
    rows = []
    sides = [side for side in (off, again, dense, auto) if side is not None]
    for side in sides:
        checks = side.told() if side not in (off, again) else None
        each = "-" if checks is None else f"{1e3 * checks['cost_s'] / checks['checks']:.2f}"
        counts = ["-", "-"] if checks is None else [str(checks["checks"]), str(checks["interval"])]
        rows.append([f"--ft-sdc {side.option}", spread_text(side.ms_per_step(clock)), each, *counts])
    print_table(["ms", "step", "a check, as told", "checks", "interval"], rows)
    told = dense.told()
    told_ms = 1e3 * told["cost_s"] / told["checks"]
    without, without_too, with_checks = (side.ms_per_step(clock) for side in (off, again, dense))
    without = [(a + b) / 2 for a, b in zip(without, without_too, strict=True)]
    noise_ms = [2 * (b - a) for a, b in zip(without, without_too, strict=True)]
    measured_ms = [b - a for a, b in zip(without, with_checks, strict=True)]
    ratios = ratio_spread([told_ms] * len(measured_ms), list(measured_ms))
    measured, noise, step = spread_of(measured_ms), spread_of(noise_ms), spread_of(without)
    assert measured is not None
    assert noise is not None
    assert step is not None
    print(f"a check, measured from outside: {measured.text()} ms; as told: {told_ms:.2f} ms")
    print(f"the two jobs without checks differ by {noise.text()} ms a step")
    print(f"measured by told: {'-' if ratios is None else ratios.text()}")
    percent = dense.told_percent()
    outside = 100 * told["checks"] * measured.median / 1e3 / told["trained_s"]
    print(f"the line that the run prints: {percent:.3f} % of training; measured from outside: {outside:.3f} %")
    print(f"two checks at each interval of 0.05 % of the time: every {2 * told_ms / (0.0005 * step.median):,.0f} steps")
    print(f"throughput of a check: {size_bytes / told_ms * 1e3 / 2**30:.2f} GiB/s")
    return {
        "clock": clock,
        "stretches": {side.option: side.stretches for side in sides if side is not again},
        "stretches_off_again": again.stretches,
        "told": {side.option: side.told() for side in sides if side not in (off, again)},
        "line_percent": percent,
        "measured_percent": outside,
    }


if __name__ == "__main__":
    main()
