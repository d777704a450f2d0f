"""What the checks of a rank's bytes cost it: measured from outside, beside what the run itself says.

One rank trains under steadyrun, in turns with ``--ft-sdc off``, with checks after every second step and with ``auto``.
With checks so dense each step has one (after it, or before its update), so that the difference to a run without is well
above the noise: divided by the number of checks it must be what the run says a check took. On a CPU both are taken by
the clock of the training thread, which a busy machine disturbs least; on a GPU by the wall.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from job import HERE, STEADYRUN, Job
from report import add_common_arguments, effort_of, finish, print_table, spread_text

SIDES = ("off", "2", "auto")


def measure(side: str, mebibytes: float, steps: int, keep: Path | None) -> dict[str, Any]:
    env = {"BENCH_MIB": str(mebibytes), "BENCH_STEPS": str(steps)}
    with Job(env, keep, f"check-{side}") as job:
        options = ("--standalone", "--nproc-per-node=1", "--ft-run-dir={run_dir}", f"--ft-sdc={side}")
        job.start([*STEADYRUN, *options, str(HERE / "check_rank.py")])
        codes = job.wait(900)
        trained = job.events("trained")
        if codes != [0] or not trained:
            raise SystemExit(f"the job failed\n{job.output_tail()}")
        told = [r["ranks"]["0"] for r in job.journal("integrity") if r.get("event") == "checks" and "0" in r["ranks"]]
        return {**trained[0], "told": told[-1] if told else None, "side": side}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--mib", type=float, default=16.0, help="of parameters; with AdamW's state thrice as much")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    rounds = effort_of(arguments, quick=1, normal=3, full=7)
    steps = effort_of(arguments, quick=30, normal=150, full=300)
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES[number % len(SIDES) :] + SIDES[: number % len(SIDES)]:
            found[side].append(measure(side, arguments.mib, steps, arguments.keep))
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    clock = "wall_s" if found["off"][0]["device"] == "cuda" else "cpu_s"
    rows = []
    for side in SIDES:
        per_step = [1e3 * run[clock] / run["steps"] for run in found[side]]
        differences = [
            1e3 * (run[clock] - off[clock]) / run["steps"] for run, off in zip(found[side], found["off"], strict=True)
        ]
        told = [run["told"] for run in found[side] if run["told"] is not None]
        per_check = [1e3 * t["cost_s"] / t["checks"] for t in told if t["checks"]]
        rows.append(
            [
                f"--ft-sdc {side}",
                spread_text(per_step),
                spread_text(differences) if side != "off" else "-",
                spread_text(per_check) if per_check else "-",
                str(told[-1]["checks"]) if told else "-",
                str(told[-1]["interval"]) if told else "-",
            ]
        )
    size_bytes = found["off"][0]["bytes"]
    print(f"{size_bytes / 2**20:.0f} MiB are checked on {found['off'][0]['device']}, {steps} steps, {rounds} rounds")
    print_table(["ms", "step", "more than off", "told per check", "checks", "interval"], rows)
    dense = found["2"]
    if all(run["told"] for run in dense):
        ratios = [
            ((run[clock] - off[clock]) / run["steps"]) / (run["told"]["cost_s"] / run["told"]["checks"])
            for run, off in zip(dense, found["off"], strict=True)
        ]
        print(f"measured by told, of one check: {spread_text(ratios)}")
        check_s = statistics.median(run["told"]["cost_s"] / run["told"]["checks"] for run in dense)
        step_s = statistics.median(run[clock] / run["steps"] for run in found["off"])
        print(f"two checks at each interval of 0.1 % of the time: every {2 * check_s / (0.0005 * step_s):,.0f} steps")
        print(f"throughput of a check: {size_bytes / check_s / 2**30:.2f} GiB/s")
    finish(arguments, "check_cost", [run for side in SIDES for run in found[side]])


if __name__ == "__main__":
    main()
