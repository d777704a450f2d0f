"""The files that come with steadyrun for Prometheus, Alertmanager and Grafana: where they are, what is made fresh."""

from __future__ import annotations

import site
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from steadyrun.collectors.alerts import ALERTS, RECORDINGS
from steadyrun.collectors.alerts.writing import alerts_yaml, metrics_page, overview, recordings_yaml, runbook
from steadyrun.collectors.metrics.spec import SPEC
from steadyrun.core.errors import SteadyrunError

__all__ = ["DASHBOARDS", "FilesError", "find_files", "made_files", "shipped_files"]

DASHBOARDS: Final = ("job", "node")
_SHIPPED: Final = ("grafana", "preview", "prometheus", "kubernetes")


class FilesError(SteadyrunError):
    """The files cannot be found or written."""


def find_files() -> Path:
    """The folder of dashboards: of the checkout that this code is in, or where the wheel put it.

    Raises:
        FilesError: it is in none of the places.
    """
    beside = Path(__file__).resolve().parents[4] / "dashboards"
    shared = "share/steadyrun/dashboards"
    places = (beside, Path(sysconfig.get_path("data")) / shared, Path(site.getuserbase()) / shared)
    for place in places:
        if (place / "grafana/job.json").is_file():
            return place
    looked = ", ".join(str(p) for p in places)
    raise FilesError(f"cannot find the dashboards (looked in {looked}); install steadyrun from its wheel again")


def made_files(runbooks: str = "runbooks/", job: str = "steadyrun") -> Mapping[Path, str]:
    """What is written from the tables, by relative path."""
    out = {
        Path("prometheus/alerts.yaml"): alerts_yaml(ALERTS, runbooks, job),
        Path("prometheus/rules.yaml"): recordings_yaml(RECORDINGS),
        Path("metrics.md"): metrics_page(SPEC.values()),
        Path("runbooks/README.md"): overview(ALERTS, RECORDINGS),
    }
    return out | {Path(f"runbooks/{a.full_name}.md"): runbook(a) for a in ALERTS}


def shipped_files(folder: Path) -> Iterator[Path]:
    """Relative paths of all other files in *folder*."""
    made = made_files()
    for part in _SHIPPED:
        for path in sorted((folder / part).rglob("*")):
            relative = path.relative_to(folder)
            if path.is_file() and relative not in made:
                yield relative
    yield from (p for p in (Path("README.md"),) if (folder / p).is_file())
