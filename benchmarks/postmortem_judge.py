"""One post mortem in a process of its own, for benchmarks/postmortem.py, which measures it from outside.

    postmortem_judge.py raw FOLDER WORLD       # dumps, as ``steadyctl postmortem FOLDER`` reads them
    postmortem_judge.py summaries FILE WORLD   # one JSON text per line, as agents send them

Prints one line of JSON: the findings, and how long reading and judging took.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from steadyrun.core.flight import FlightDetails, RankFlight, flight_from_json
from steadyrun.detect.waits import judge_flights


def read(kind: str, path: Path) -> tuple[dict[int, RankFlight], FlightDetails | None]:
    if kind == "raw":
        from steadyrun.collectors.flight.folder import load_folder

        found = load_folder([path])
        return dict(found.flights), found.details
    with path.open() as lines:
        flights = (flight_from_json(json.loads(line)) for line in lines)
        return {flight.rank: flight for flight in flights}, None


def cpu_s() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def main() -> None:
    kind, path, world = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    began_s, began_cpu_s = time.monotonic(), cpu_s()
    flights, details = read(kind, path)
    read_s, read_cpu_s = time.monotonic(), cpu_s()
    judgement = judge_flights(flights, world, details=details)
    print(
        json.dumps(
            {
                "ranks": len(flights),
                "start_cpu_s": began_cpu_s,
                "read_s": read_s - began_s,
                "read_cpu_s": read_cpu_s - began_cpu_s,
                "judge_s": time.monotonic() - read_s,
                "judge_cpu_s": cpu_s() - read_cpu_s,
                "findings": [
                    [f.finding.cls.value, list(f.finding.ranks), f.finding.confidence] for f in judgement.findings
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
