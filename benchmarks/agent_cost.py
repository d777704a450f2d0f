"""What the agent costs a node: CPU and memory with 8 simulated ranks at 20 steps a second.

The ranks are real processes under a real launcher, light ones without torch. Counted is the launcher and every
process of its tree that is not a rank, from /proc. torchrun and NVRx's ft_launcher (where installed) run the same
ranks in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from job import NVRX, TORCHRUN
from paced import AGENT, paced_job
from report import add_common_arguments, effort_of, finish, print_table, ratio_spread, spread_text

SIDES = {
    "steadyrun": AGENT,
    "torchrun": TORCHRUN,
    "NVRx ft_launcher": (*NVRX, "--ft-rank-section-timeouts=work:60"),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """One side in one round. ``cpu_share``: CPU seconds per second, all processes that are not ranks together."""

    side: str
    round: int
    window_s: float
    cpu_share: float
    wakeups_hz: float
    processes: int
    threads: int
    rss_bytes: int
    pss_bytes: int


def tree_of(launcher_pid: int, ranks: set[int]) -> list[psutil.Process]:
    """The launcher and its helpers; a rank's own children belong to the rank."""
    root = psutil.Process(launcher_pid)
    found = [root]
    for process in root.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid not in ranks and not ranks & {p.pid for p in process.parents()}:
                found.append(process)
    return found


def cpu_s(processes: list[psutil.Process]) -> float:
    total_s = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system + times.children_user + times.children_system
    return total_s


def wakeups(processes: list[psutil.Process]) -> int:
    count = 0
    for process in processes:
        for status in Path(f"/proc/{process.pid}/task").glob("*/status"):
            with contextlib.suppress(OSError):
                lines = status.read_text().splitlines()
                count += sum(int(x.split()[1]) for x in lines if x.startswith("voluntary_ctxt_switches"))
    return count


def measure(side: str, number: int, ranks: int, rate: float, window_s: float, keep: Path | None) -> Cost:
    with paced_job(SIDES[side], ranks, f"agent-{side}", keep, rate) as (job, launcher):
        time.sleep(5.0)  # starting up is not the steady state
        rank_pids = {int(e["pid"]) for e in job.events("start")}
        helpers = tree_of(launcher.pid, rank_pids)
        before_s, cpu_before_s, wakeups_before = time.monotonic(), cpu_s(helpers), wakeups(helpers)
        time.sleep(window_s)
        took_s = time.monotonic() - before_s
        used_s, woken = cpu_s(helpers) - cpu_before_s, wakeups(helpers) - wakeups_before
        memory = [p.memory_full_info() for p in helpers]
        return Cost(
            side=side,
            round=number,
            window_s=round(took_s, 3),
            cpu_share=used_s / took_s,
            wakeups_hz=woken / took_s,
            processes=len(helpers),
            threads=sum(p.num_threads() for p in helpers),
            rss_bytes=sum(m.rss for m in memory),
            pss_bytes=sum(m.pss for m in memory),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rate", type=float, default=20.0, help="steps per second of each rank")
    parser.add_argument("--window", type=float, help="seconds to measure (quick 10, 30, full 60)")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    window_s = arguments.window or effort_of(arguments, quick=10, normal=30, full=60)
    rounds = effort_of(arguments, quick=1, normal=2, full=4)
    sides = [s for s in SIDES if SIDES[s][:3] != NVRX or importlib.util.find_spec("nvidia_resiliency_ext")]
    costs = [
        measure(side, number, arguments.ranks, arguments.rate, window_s, arguments.keep)
        for number in range(rounds)
        for side in sides
    ]
    rows = []
    for side in sides:
        its = [c for c in costs if c.side == side]
        ratio = ratio_spread([c.cpu_share for c in costs if c.side == sides[0]], [c.cpu_share for c in its])
        rows.append(
            [
                side,
                spread_text([c.cpu_share * 100 for c in its]),
                ratio.text(1) if ratio is not None and side != sides[0] else "",
                spread_text([c.wakeups_hz for c in its], 0),
                str(its[-1].processes),
                str(its[-1].threads),
                spread_text([c.rss_bytes / 2**20 for c in its], 0),
                spread_text([c.pss_bytes / 2**20 for c in its], 0),
            ]
        )
    print(f"{arguments.ranks} simulated ranks at {arguments.rate:g} steps/s, {window_s:g} s, {rounds} round(s)")
    print_table(["", "% of a core", "ratio", "wake-ups/s", "processes", "threads", "RSS MiB", "PSS MiB"], rows)
    finish(arguments, "agent_cost", [asdict(c) for c in costs])


if __name__ == "__main__":
    main()
