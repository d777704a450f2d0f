"""How late the agent's loop is while a call of the driver never returns: 8 simulated ranks under a real agent.

A stand-in for libnvidia-ml.so.1 is compiled from SOURCE (one that answers from the file that NVML_STUB_STATE names).
First it answers, then one of its calls takes as long as --hang says. The lag is the agent's own gauge, the most of the
minute before; "in time" means what a scrape may show meanwhile: the newest values, and the collector's complaint.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

from paced import AGENT, metrics_address, paced_job
from report import add_common_arguments, finish, print_table

from steadyrun.node.metrics import LAG_WINDOW_S

MOST_LAG_S = 0.05
CALLS = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetMemoryInfo")
SETTLED_S = LAG_WINDOW_S + 15.0  # the gauge forgets by then how the ranks started, which is not what is asked about
SCRAPES_S = 2.0  # between two of them


@dataclass(frozen=True, slots=True)
class Lag:
    """What one scrape showed. ``after_s`` counts from the moment in which the call began to hang; None: before."""

    call: str
    after_s: float | None
    lag_s: float
    nvml_healthy: float | None
    took_s: float


def scraped(address: str, call: str, after_s: float | None) -> Lag:
    begun_s = time.monotonic()
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    took_s = time.monotonic() - begun_s
    values = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}
    health = values.get('steadyrun_collector_healthy{collector="nvml"}')
    return Lag(call, after_s, values["steadyrun_agent_loop_lag_seconds"], health, took_s)


def library(source: Path, folder: Path) -> Path:
    target = folder / "libnvidia-ml.so.1"
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(target), str(source), "-lpthread"]
    subprocess.run(command, check=True, timeout=60)
    return folder


def watch(call: str, arguments: argparse.Namespace) -> list[Lag]:
    with tempfile.TemporaryDirectory(prefix="steadyrun-bench-") as name:
        folder, state = Path(name), Path(name) / "nvml_state"
        state.write_text("count = 8\ngpu.*.util = 98\n")
        env = {"LD_LIBRARY_PATH": str(library(arguments.source, folder)), "NVML_STUB_STATE": str(state)}
        with paced_job(AGENT, 8, f"stuck-{call}", arguments.keep, env=env) as (job, _):
            address = metrics_address(job)
            time.sleep(SETTLED_S)
            lags = [scraped(address, call, None)]
            with state.open("a") as f:
                f.write(f"gpu.2.delay_ms.{call} = {arguments.hang * 1000:.0f}\n")
            begun_s = time.monotonic()
            while (after_s := time.monotonic() - begun_s) < arguments.hang:
                lags.append(scraped(address, call, after_s))
                time.sleep(SCRAPES_S)
    return lags


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("source", type=Path, metavar="SOURCE", help="C source of the stand-in")
    parser.add_argument("--hang", type=float, default=40.0, help="seconds (default: 40)")
    arguments = parser.parse_args()
    if not arguments.source.is_file():
        parser.error(f"no such file: {arguments.source}")
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    found = [lag for call in CALLS[: 1 if arguments.quick else None] for lag in watch(call, arguments)]
    rows = []
    for call in dict.fromkeys(lag.call for lag in found):
        its = [lag for lag in found if lag.call == call]
        before, during = [lag for lag in its if lag.after_s is None], [lag for lag in its if lag.after_s is not None]
        told = next((f"{lag.after_s:.0f}" for lag in during if lag.nvml_healthy == 0.0), "never")
        slowest_s = max(lag.took_s for lag in during)
        lags_ms = (1e3 * max(lag.lag_s for lag in part) for part in (before, during))
        rows.append([call, *(f"{ms:.1f}" for ms in lags_ms), told, f"{slowest_s * 1e3:.0f}"])
    heads = ["call that hangs", "lag before, ms", "meanwhile, ms", "told after, s", "slowest scrape, ms"]
    print_table(heads, rows)
    worst_s = max(lag.lag_s for lag in found if lag.after_s is not None)
    print(f"\nthe loop is late by at most {MOST_LAG_S * 1e3:.0f} ms: {'yes' if worst_s <= MOST_LAG_S else 'NO'}")
    finish(arguments, "stuck_driver", [asdict(lag) for lag in found])


if __name__ == "__main__":
    main()
