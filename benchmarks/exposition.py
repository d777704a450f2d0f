"""What a scrape of a node costs, and how large it is: 8 simulated ranks under a real agent.

Series and time are those of an HTTP request on loopback, the CPU is the agent's own meanwhile. GPUs count where there
are any: on a machine without, put the folder of a stand-in for libnvidia-ml.so.1 into LD_LIBRARY_PATH.
"""

from __future__ import annotations

import argparse
import time
import urllib.request
from dataclasses import asdict, dataclass

import psutil
from paced import AGENT, metrics_address, paced_job
from report import add_common_arguments, effort_of, finish, print_table, spread_text

FORMS = {"text": "text/plain", "OpenMetrics": "application/openmetrics-text; version=1.0.0"}
MOST_SERIES, MOST_S = 800, 0.1


@dataclass(frozen=True, slots=True)
class Scrape:
    """One request."""

    form: str
    took_s: float
    cpu_s: float
    series: int
    size_bytes: int


def scrape(address: str, form: str, agent: psutil.Process) -> Scrape:
    request = urllib.request.Request(f"http://{address}/metrics", headers={"Accept": FORMS[form]})
    before = agent.cpu_times()
    begun_s = time.monotonic()
    with urllib.request.urlopen(request, timeout=30) as answer:
        text = answer.read()
    took_s = time.monotonic() - begun_s
    after = agent.cpu_times()
    series = sum(not line.startswith(b"#") for line in text.splitlines() if line)
    cpu_s = after.user + after.system - before.user - before.system
    return Scrape(form, took_s, cpu_s, series, len(text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--ranks", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    scrapes: list[Scrape] = []
    with paced_job(AGENT, arguments.ranks, "exposition", arguments.keep) as (job, launcher):
        address = metrics_address(job)
        time.sleep(15.0)  # until every part of the machine has been looked at, and steps have been timed
        gpus = max((len((n.get("devices") or {}).get("gpus", ())) for n in job.live()), default=0)
        for _ in range(effort_of(arguments, quick=3, normal=20, full=100)):
            for form in FORMS:
                time.sleep(0.2)
                scrapes.append(scrape(address, form, psutil.Process(launcher.pid)))
    rows = []
    for form in FORMS:
        its = [s for s in scrapes if s.form == form]
        rows.append(
            [
                form,
                str(max(s.series for s in its)),
                f"{max(s.size_bytes for s in its) / 1024:.0f}",
                spread_text([s.took_s * 1e3 for s in its], 1),
                f"{sum(s.cpu_s for s in its) / len(its) * 1e3:.1f}",
            ]
        )
    print(f"{arguments.ranks} ranks, {gpus} GPUs\n")
    print_table(["form", "series", "KiB", "ms", "agent's CPU ms, mean"], rows)
    series, best_s = max(s.series for s in scrapes), min(s.took_s for s in scrapes)
    print(f"\nunder {MOST_SERIES} series: {'yes' if series < MOST_SERIES else 'NO'}; ", end="")
    print(f"under {MOST_S * 1e3:.0f} ms: {'yes' if best_s < MOST_S else 'NO'} (the quickest; a busy machine adds)")
    finish(arguments, "exposition", [asdict(s) for s in scrapes])


if __name__ == "__main__":
    main()
