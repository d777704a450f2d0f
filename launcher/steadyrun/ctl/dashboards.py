"""``steadyctl dashboards``: give out the dashboards, alerts and runbooks; look at them without Grafana; check them."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from steadyrun.core.errors import ConfigError
from steadyrun.ctl.console import Console
from steadyrun.ctl.monitoring.files import DASHBOARDS, FilesError, find_files, made_files, shipped_files
from steadyrun.ctl.monitoring.linting import Fault, lint
from steadyrun.ctl.monitoring.preview import PreviewServer
from steadyrun.ctl.monitoring.querying import Answer, Prometheus, answers

__all__ = ["register"]

SCHEMA: Final = "steadyrun.dashboards-check/1"
PROMETHEUS: Final = "http://127.0.0.1:9090"


def register(commands: Any) -> None:
    """Add the command to the parser."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = commands.add_parser(
        "dashboards",
        help="dashboards, alerts and runbooks for Prometheus and Grafana",
        description="Dashboards, alerts and runbooks for Prometheus, Alertmanager and Grafana.",
        formatter_class=formatter,
    )
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", dest="part", required=True)
    export = parts.add_parser(
        "export",
        help="write all of it into a folder",
        description=(
            "Writes Grafana dashboards, Prometheus rules with a scrape example, an\n"
            "Alertmanager example, a PodMonitor, and a runbook for each alert."
        ),
        epilog="example:\n  steadyctl dashboards export monitoring --runbooks https://wiki.example/steadyrun/",
        formatter_class=formatter,
    )
    export.add_argument("folder", metavar="DIR", type=Path, help="made when it is not there; files are overwritten")
    export.add_argument(
        "--runbooks", metavar="URL", default="runbooks/", help="what alerts link to (default: the files beside them)"
    )
    export.add_argument(
        "--job",
        metavar="NAME",
        default="steadyrun",
        help="job in Prometheus's scrape configuration (default: %(default)s)",
    )
    export.set_defaults(run=run_export)
    check = parts.add_parser(
        "check",
        help="check the dashboards, and ask a Prometheus all their queries",
        description="Finds faults in dashboards, and with --prometheus executes every query and names empty ones.",
        formatter_class=formatter,
    )
    check.add_argument("files", nargs="*", metavar="FILE", type=Path, help="dashboards (default: those of steadyrun)")
    check.add_argument("--prometheus", metavar="URL", help=f"a live server, e.g. {PROMETHEUS}")
    check.add_argument("--run-id", metavar="ID", help="ask for this run only")
    check.add_argument("--json", action="store_true", help=f"print {SCHEMA}")
    check.set_defaults(run=run_check)
    preview = parts.add_parser(
        "preview",
        help="show the dashboards in a browser, without Grafana",
        description="Serves a page that draws the dashboards from a live Prometheus. Ctrl-C ends it.",
        formatter_class=formatter,
    )
    preview.add_argument("--prometheus", metavar="URL", default=PROMETHEUS, help="default: %(default)s")
    preview.add_argument("--port", type=int, default=0, help="default: a free one")
    preview.set_defaults(run=run_preview)


def run_export(args: argparse.Namespace, console: Console) -> int:
    """0: all files are written."""
    source, folder = find_files(), args.folder
    made = made_files(args.runbooks, args.job)
    shipped = list(shipped_files(source))
    try:
        for relative in shipped:
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / relative, folder / relative)
        for relative, text in made.items():
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            (folder / relative).write_text(text, encoding="utf-8")
    except OSError as e:
        raise FilesError(f"cannot write to {folder}: {e.strerror or e}; choose another folder") from None
    console.print(f"{len(made) + len(shipped)} files written to {folder}")
    for name, what in (
        ("grafana/*.json", "import these into Grafana 10.4 or newer"),
        ("prometheus/", "rules, with examples for prometheus.yaml and alertmanager.yaml"),
        ("kubernetes/", "for the Prometheus operator"),
        ("runbooks/", "a page for each alert"),
        ("preview/", "what `steadyctl dashboards preview` serves"),
        ("metrics.md", "all metrics"),
    ):
        console.print(f"  {name:15} {what}")
    return 0


def run_check(args: argparse.Namespace, console: Console) -> int:
    """0: no fault, and no query is empty or fails; 1 otherwise."""
    folder = find_files()
    server = Prometheus(_address(args.prometheus)) if args.prometheus else None
    values = {"run_id": args.run_id} if args.run_id else {}
    told = []
    for file in args.files or [folder / f"grafana/{name}.json" for name in DASHBOARDS]:
        dashboard = _read(file)
        found = list(answers(dashboard, server, values)) if server is not None else []
        told.append((file, lint(dashboard), found))
    if args.json:
        console.json({"schema": SCHEMA, "dashboards": [_to_json(*one) for one in told]})
    else:
        for one in told:
            _print(*one, server is not None, console)
    is_well = all(not faults and not any(a.error or a.is_empty for a in found) for _, faults, found in told)
    return 0 if is_well else 1


def _read(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise FilesError(f"cannot read {file}: {e.strerror or e}") from None
    except ValueError as e:
        raise FilesError(f"{file} is no dashboard: {e}") from None
    if not isinstance(read, dict) or not isinstance(read.get("panels"), list):
        raise FilesError(f"{file} is no dashboard: it has no panels")
    return read


def _to_json(file: Path, faults: list[Fault], found: list[Answer]) -> dict[str, Any]:
    return {
        "file": str(file),
        "faults": [{"panel": f.panel, "text": f.text} for f in faults],
        "queries": [
            {"panel": a.panel, "expr": a.expr, "series": a.series, "points": a.points, "error": a.error} for a in found
        ],
    }


def _print(file: Path, faults: list[Fault], found: list[Answer], was_asked: bool, console: Console) -> None:
    failed, empty = [a for a in found if a.error], [a for a in found if a.is_empty]
    asked = f", {len(found)} queries, {len(failed)} failed, {len(empty)} empty" if was_asked else ""
    console.print(f"{file.name}: {len(faults)} faults{asked}")
    for fault in faults:
        console.print(f"  fault  {fault.panel or 'dashboard'}: {fault.text}")
    for answer in failed:
        console.print(f"  failed {answer.panel}: {answer.error}")
    for answer in empty:
        console.print(f"  empty  {answer.panel}: {answer.expr}")


def run_preview(args: argparse.Namespace, console: Console) -> int:
    """Until Ctrl-C; 1 when Prometheus does not answer at the start."""
    address = _address(args.prometheus)
    Prometheus(address).ask("query", query="vector(1)")
    try:
        server = PreviewServer(find_files(), address, ("127.0.0.1", args.port))
    except OSError as e:
        raise FilesError(f"cannot listen on port {args.port}: {e.strerror or e}; give another --port") from None
    with server:
        console.print(f"http://127.0.0.1:{server.server_port}/  (Ctrl-C ends it)")
        console.out.flush()
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return 0
    return 0


def _address(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{url} is no address of a Prometheus; give one like {PROMETHEUS}")
    return url
