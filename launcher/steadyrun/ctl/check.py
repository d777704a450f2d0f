"""``steadyctl check``: how this machine is, or how a node of a run last found itself."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from typing_extensions import assert_never

from steadyrun.collectors.host.memory import MemoryCollector
from steadyrun.collectors.host.pressure import PressureCollector
from steadyrun.collectors.host.processes import ProcessCollector
from steadyrun.collectors.host.space import Folder, SpaceCollector
from steadyrun.collectors.kernel.collector import KernelCollector
from steadyrun.collectors.kernel.live import KernelWatch
from steadyrun.collectors.nic.collector import NicCollector
from steadyrun.collectors.nvml.collector import NvmlCollector
from steadyrun.collectors.nvml.prober import NvmlProber
from steadyrun.collectors.protocol import CheckResult, Collector, Health, Trouble, combine, unknown
from steadyrun.collectors.registry import Registry
from steadyrun.core.errors import ConfigError
from steadyrun.core.records import to_json
from steadyrun.ctl.console import Column, Console, ago, plain
from steadyrun.ctl.runs import DEFAULT_RUN_DIR, NotFoundError, is_agent_alive, live_nodes, open_run
from steadyrun.node.devicetest import DeviceTestError, measure_devices
from steadyrun.node.gatejudge import NodeReport, slower_devices

__all__ = ["register"]

SCHEMA: Final = "steadyrun.check/1"
LIMIT_S: Final = 20.0
FULL_LIMIT_S: Final = 120.0
MOST_TROUBLES: Final = 8  # of a collector in the table
ALL_WELL, DEGRADED, UNHEALTHY, UNKNOWN = 0, 10, 11, 12  # exit codes
_COLOURS: Final[Mapping[str, str]] = {"healthy": "green", "degraded": "yellow", "unhealthy": "red", "unknown": "dim"}

EPILOG: Final = """\
Without NODE every collector looks at this machine now, as an agent's do: GPUs, network
ports, kernel log, memory and its pressure, room for files, processes in the way.
With NODE it shows what the agent of that node of a run last found (every 5 s), and
its check before the newest attempt.

exit codes:
   0  all is well (what cannot be looked at does not count)
  10  something works with less, or not for long
  11  something is unhealthy
  12  nothing could be looked at
   1  no such node, or no run
   2  the command line cannot be used

examples:
  steadyctl check
  steadyctl check --full
  steadyctl check gpu-17 --run /data/runs
  steadyctl check --json | jq '.results[] | select(.health != "healthy")'
"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "check",
        help="check the health of this machine, or of a node of a run",
        description="Checks GPUs, network ports, kernel log, memory, disks and processes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("node", nargs="?", metavar="NODE", help="a node of the run (default: this machine, now)")
    parser.add_argument(
        "--run", dest="where", metavar="RUN", help="run folder, or a folder of runs (default: ./steadyrun)"
    )
    parser.add_argument("--json", action="store_true", help=f"print {SCHEMA}")
    parser.add_argument("--full", action="store_true", help="also measure each device: takes seconds, uses the GPUs")
    parser.add_argument("--root", type=Path, default=Path("/"), help=argparse.SUPPRESS)
    parser.set_defaults(run=run_check)


def run_check(args: argparse.Namespace, console: Console) -> int:
    """The exit code says how it is."""
    if args.node is None:
        found = _look_here(args.root, args.full)
    elif args.full:
        raise ConfigError("--full measures this machine's devices; leave out NODE, and call it on that node")
    else:
        found = _look_back(args.where, args.node)
    if args.json:
        console.json(found.to_json())
    else:
        for line in _told(found, console):
            console.print(line)
    return _code(found)


@dataclass(frozen=True, slots=True)
class Found:
    """What was found.

    Attributes:
        at_unix_s: when the agent wrote it; None for now.
        speeds: of devices that were measured: name, TFLOP/s, GB/s.
    """

    node: str
    results: tuple[CheckResult, ...]
    at_unix_s: float | None = None
    notes: tuple[str, ...] = ()
    speeds: tuple[tuple[str, float, float], ...] = ()

    @property
    def health(self) -> Health:
        """The worst; unknown only where nothing could be looked at."""
        known = [r.health for r in self.results if r.health is not Health.UNKNOWN]
        return max(known, key=lambda h: h.weight, default=Health.UNKNOWN)

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` prints."""
        return {
            "schema": SCHEMA,
            "node": self.node,
            "health": self.health.value,
            "at_unix_s": self.at_unix_s,
            "results": to_json(self.results),
            "speeds": [{"device": n, "tflops": t, "copy_gbps": g} for n, t, g in self.speeds],
            "notes": list(self.notes),
        }


# -- this machine ------------------------------------------------------------------------------------------------------
def _look_here(root: Path, is_full: bool) -> Found:
    collectors = _collectors(root)
    registry = Registry(collectors)
    try:
        results = list(registry.check_all(LIMIT_S).values())
    finally:
        registry.close()
    speeds: tuple[tuple[str, float, float], ...] = ()
    if is_full:
        result, speeds = _measure()
        results.append(result)
    return Found(socket.gethostname(), tuple(results), speeds=speeds)


def _collectors(root: Path) -> list[Collector]:
    """Those of an agent; the kernel log from the machine's start, as what stands may be hours old."""
    run_dir = Path.cwd() / DEFAULT_RUN_DIR
    folders = [Folder("run", run_dir if run_dir.is_dir() else Path.cwd())]
    return [
        KernelCollector(KernelWatch(root / "dev/kmsg", from_boot=True)),
        NvmlCollector(NvmlProber(with_events=False, start_limit_s=LIMIT_S / 2), root),
        NicCollector(root),
        MemoryCollector(root),
        PressureCollector(root),
        SpaceCollector(folders, root / "dev/shm"),
        ProcessCollector(os.getpid(), proc=root / "proc"),
    ]


def _measure() -> tuple[CheckResult, tuple[tuple[str, float, float], ...]]:
    """Devices of this machine against each other; see ``node.gatejudge`` for against other nodes."""
    name = "devices"
    try:
        found = measure_devices(FULL_LIMIT_S)
    except DeviceTestError as e:
        advice = "run python -m steadyrun.node.devicetest by hand"
        if e.hung:
            return combine(name, [Trouble(Health.UNHEALTHY, str(e), (advice,))], ""), ()
        return unknown(name, str(e), advice), ()
    speeds = tuple((d.name, d.tflops, d.copy_gbps) for d in found)
    troubles = [
        Trouble(Health.UNHEALTHY, f"{d.name} gave two different results for the same product", (), d.name)
        for d in found
        if not d.is_exact
    ]
    troubles += slower_devices(speeds)
    well = ", ".join(f"{n} {t:.3g} TFLOP/s {g:.0f} GB/s" for n, t, g in speeds)
    return combine(name, troubles, well), speeds


# -- a node of a run ---------------------------------------------------------------------------------------------------
def _look_back(where: str | None, name: str) -> Found:
    """Raises NotFoundError."""
    run = open_run(where)
    known = live_nodes(run)
    found = [n for n in known if n.node == name] or [n for n in known if n.node.startswith(name)]
    if len(found) != 1:
        names = ", ".join(sorted(n.node for n in known)) or "none"
        what = "no node" if not found else f"{len(found)} nodes are"
        raise NotFoundError(f"{what} called {name} in {run.root}; there are: {names}")
    (live,) = found
    devices = live.data.get("devices")
    told = devices.get("collectors") if isinstance(devices, Mapping) else None
    results = [_result_of(n, v) for n, v in told.items()] if isinstance(told, Mapping) else []
    gate = live.data.get("node_check")
    notes = []
    if isinstance(gate, Mapping):
        results.append(_gate_result(gate))
    if not results:
        notes.append("its agent has not told anything of its machine: it runs without --ft-node-check and devices")
    written = live.data.get("updated_at_unix_s")
    if not is_agent_alive(live):
        notes.append("its agent is gone, or not on this machine: this is what it found last")
    return Found(live.node, tuple(results), written if isinstance(written, (int, float)) else None, tuple(notes))


def _result_of(name: str, told: Any) -> CheckResult:
    data = told if isinstance(told, Mapping) else {}
    troubles = data.get("troubles")
    return CheckResult(
        name,
        _health(data.get("health")),
        str(data.get("reason", "")),
        _texts(data.get("actions")),
        tuple(
            Trouble(
                _health(t.get("health")), str(t.get("reason", "")), _texts(t.get("actions")), str(t.get("subject", ""))
            )
            for t in (troubles if isinstance(troubles, list) else ())
            if isinstance(t, Mapping)
        ),
        data["facts"] if isinstance(data.get("facts"), Mapping) else {},
    )


def _gate_result(gate: Mapping[str, Any]) -> CheckResult:
    report = NodeReport.from_wire(gate)
    name = "before_attempt"
    if report is None:
        return unknown(name, "what the node check found cannot be read")
    return combine(name, report.troubles, f"fit when checked before an attempt, in {report.took_s:.1f} s", report.facts)


def _health(value: Any) -> Health:
    try:
        return Health(value)
    except ValueError:
        return Health.UNKNOWN


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(str(v) for v in value) if isinstance(value, list) else ()


# -- telling -----------------------------------------------------------------------------------------------------------
def _told(found: Found, console: Console) -> list[str]:
    health = found.health.value
    when = f", as its agent found it {ago(found.at_unix_s, time.time())}" if found.at_unix_s is not None else ""
    lines = [
        console.styled(plain(found.node), "bold") + ": " + console.styled(health, _COLOURS[health]) + when,
        "",
    ]
    columns = (Column("collector"), Column("health"), Column("why", grows=True))
    rows = []
    ordered = sorted(found.results, key=lambda r: -r.health.weight)
    for result in ordered:
        reasons = [t.reason for t in result.troubles[:MOST_TROUBLES]] or [result.reason]
        for i, reason in enumerate(reasons):
            word = console.styled(result.health.value, _COLOURS[result.health.value])
            rows.append(["" if i else result.collector, "" if i else word, plain(reason)])
        if len(result.troubles) > MOST_TROUBLES:
            rows.append(["", "", f"and {len(result.troubles) - MOST_TROUBLES} more (--json has all)"])
    if rows:
        lines += console.table(columns, rows)
    advice = dict.fromkeys(a for r in ordered if r.health is not Health.HEALTHY for a in r.actions)
    if advice:
        lines += ["", "what to do:"]
        for action in advice:
            lines += console.wrapped(plain(action), 4, "  - ")
    for note in found.notes:
        lines += ["", *console.wrapped(plain(note))]
    return lines


def _code(found: Found) -> int:
    match found.health:
        case Health.HEALTHY:
            return ALL_WELL
        case Health.DEGRADED:
            return DEGRADED
        case Health.UNHEALTHY:
            return UNHEALTHY
        case Health.UNKNOWN:
            return UNKNOWN
        case _:
            assert_never(found.health)
