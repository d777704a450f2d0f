"""The dashboards that are checked in are what the SDK makes, and survive its types."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed (extra: dashboards)")


def test_the_files_are_what_the_tool_makes(checkout: Path, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("build_dashboards", checkout / "dashboards/tools/build.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.write(tmp_path)
    for name in ("job.json", "node.json"):
        wanted = (tmp_path / name).read_text()
        found = (checkout / "dashboards/grafana" / name).read_text()
        assert found == wanted, f"{name} is behind: {Path(sys.executable).name} dashboards/tools/build.py"


@pytest.mark.parametrize("name", ["job", "node"])
def test_a_dashboard_survives_the_types_of_grafana(name: str, checkout: Path) -> None:
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    made = json.loads((checkout / f"dashboards/grafana/{name}.json").read_text())
    assert json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(made))) == made
