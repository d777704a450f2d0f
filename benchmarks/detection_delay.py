"""How long after a limit has passed the hang is found and acted on.

One job; each attempt one of two light ranks hangs, in turns by sleeping, by a busy loop, by SIGSTOP, and outside
every section; steadyrun restarts the job and the next attempt hangs in another way. The rank itself writes down when
the time of the limit began to run; the agent's journal says when it asked for the stop. Both are CLOCK_MONOTONIC.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from job import HERE, STEADYRUN, Job
from report import add_common_arguments, effort_of, finish, print_table, spread_text

KINDS = ("sleep", "busy", "stop", "gap")
LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Delay:
    """One hang. ``delay_s``: from the passing of the limit to the order to stop; ``verdict_s``: to the verdict."""

    how: str
    rank: int
    attempt: int
    delay_s: float | None
    verdict_s: float | None
    cls: str
    named: tuple[int, ...]


def run_job(hangs: int, seed: int, keep: Path | None) -> tuple[list[Delay], str]:
    env = {"BENCH_KINDS": ",".join(KINDS), "BENCH_HANGS": str(hangs), "BENCH_SEED": str(seed)}
    options = ["--ft-run-dir={run_dir}", "--ft-standby=off", f"--max-restarts={hangs}", "--ft-restart-grace=0.5"]
    options += [f"--ft-section-timeouts=work:{LIMIT_S:g}", f"--ft-step-timeout={LIMIT_S:g}"]
    with Job(env, keep, "detection") as job:
        job.start([*STEADYRUN, *options, "--standalone", "--nproc-per-node=2", str(HERE / "hang_rank.py")])
        codes = job.wait(60 + 15 * hangs)
        problem = f"steadyrun ended with {codes}\n{job.output_tail(30)}" if any(codes) else ""
        stops = {r["attempt"]: r for r in reversed(job.journal("stop"))}
        incidents = {r["attempt"]: r for r in reversed(job.journal("incident"))}
        return [_delay(e, stops.get(e["attempt"]), incidents.get(e["attempt"])) for e in job.events("hang")], problem


def _delay(hang: dict[str, Any], stop: dict[str, Any] | None, incident: dict[str, Any] | None) -> Delay:
    due_s = hang["at_s"] + LIMIT_S
    findings = incident["verdict"]["findings"] if incident is not None else []
    return Delay(
        how=hang["how"],
        rank=hang["rank"],
        attempt=hang["attempt"],
        delay_s=None if stop is None else round(stop["at_s"] - due_s, 4),
        verdict_s=None if incident is None else round(incident["at_s"] - due_s, 4),
        cls=findings[0]["class"] if findings else "",
        named=tuple(findings[0]["ranks"]) if findings else (),
    )


def nvrx_delays(n: int, interval_s: float) -> list[float]:
    """Seconds past the limit until NVRx's rank monitor, alone, has ended a hung rank."""
    with tempfile.TemporaryDirectory(prefix="steadyrun-bench-") as folder:
        argv = [sys.executable, str(HERE / "detection_nvrx.py"), str(n), str(interval_s), str(LIMIT_S)]
        done = subprocess.run(argv, capture_output=True, text=True, cwd=folder, timeout=60 + 20 * n, check=False)
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("delay_s ")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--hangs", type=int, help="hangs in all (quick 4, 16, full 60)")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(2), "big"))
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    hangs = arguments.hangs or effort_of(arguments, quick=4, normal=16, full=60)
    print(f"{hangs} hangs, limit {LIMIT_S:g} s, seed {arguments.seed}", flush=True)
    delays, problem = run_job(hangs, arguments.seed, arguments.keep)
    rows = []
    for how in (*KINDS, "all"):
        its = [d for d in delays if how in (d.how, "all")]
        found = [d.delay_s for d in its if d.delay_s is not None]
        verdicts = [d.verdict_s for d in its if d.verdict_s is not None]
        rows.append(
            [
                how,
                f"{len(found)}/{len(its)}",
                spread_text(found, 3),
                spread_text(verdicts, 3),
                f"{sum(d.named == (d.rank,) for d in its)}/{len(its)}",
                ", ".join(sorted({d.cls for d in its})),
            ]
        )
    print_table(["hang", "found", "past the limit, s", "verdict, s", "right rank", "class"], rows)
    print("median (lowest-highest)")
    peer: dict[float, list[float]] = {}
    if importlib.util.find_spec("nvidia_resiliency_ext"):
        for interval_s in (5.0, 0.5):
            peer[interval_s] = nvrx_delays(max(hangs // 4, 3), interval_s)
            text = spread_text(peer[interval_s], 3)
            print(
                f"NVRx's rank monitor, checking each {interval_s:g} s, until the rank is dead: {text} s past its limit"
            )
    finish(arguments, "detection_delay", {"hangs": [asdict(d) for d in delays], "nvrx": peer, "seed": arguments.seed})
    if problem or len(delays) < hangs:
        print(problem or f"only {len(delays)} of {hangs} hangs took place", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
