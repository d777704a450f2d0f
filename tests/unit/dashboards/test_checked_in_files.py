"""What is checked in below dashboards/ is what the tables say; this file run with ``--update-docs`` writes it anew."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from steadyrun.ctl.main import main
from steadyrun.ctl.monitoring.files import DASHBOARDS, find_files, made_files
from steadyrun.ctl.monitoring.linting import lint


@pytest.fixture
def folder(checkout: Path) -> Path:
    return checkout / "dashboards"


def test_rules_runbooks_and_metrics_are_up_to_date(folder: Path, request: pytest.FixtureRequest) -> None:
    made = made_files()
    if request.config.getoption("--update-docs"):
        for old in (folder / "runbooks").glob("*.md"):
            old.unlink()
        for relative, text in made.items():
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            (folder / relative).write_text(text, encoding="utf-8")
    for relative, text in made.items():
        assert (folder / relative).is_file(), f"{relative} is missing: run this test with --update-docs"
        assert (folder / relative).read_text(encoding="utf-8") == text, f"{relative} is behind: run with --update-docs"
    pages = {p.relative_to(folder) for p in (folder / "runbooks").iterdir()}
    assert pages == {p for p in made if p.parts[0] == "runbooks"}


@pytest.mark.parametrize("name", DASHBOARDS)
def test_dashboards_have_no_faults(name: str, folder: Path) -> None:
    assert lint(json.loads((folder / f"grafana/{name}.json").read_text())) == []


def test_export_writes_everything_with_the_chosen_links(tmp_path: Path) -> None:
    out = io.StringIO()
    command = ["dashboards", "export", str(tmp_path / "deep/monitoring"), "--runbooks", "https://w/", "--job", "train"]
    assert main(command, out) == 0
    made = tmp_path / "deep/monitoring"
    files = {p.relative_to(made) for p in made.rglob("*") if p.is_file()}
    assert set(made_files()) < files
    for name in ("grafana/job.json", "preview/index.html", "preview/LICENSE.uPlot", "kubernetes/podmonitor.yaml"):
        assert (made / name).read_bytes() == (find_files() / name).read_bytes()
    rules = (made / "prometheus/alerts.yaml").read_text()
    assert 'up{job="train"}' in rules
    assert '"https://w/SteadyrunGpuLost.md"' in rules
    assert not (made / "tools").exists()
    assert f"{len(files)} files written" in out.getvalue()


def test_export_says_when_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    err = io.StringIO()
    assert main(["dashboards", "export", str(tmp_path / "file/below")], io.StringIO(), err) == 1
    assert "choose another folder" in err.getvalue()


def test_check_refuses_what_is_no_address_and_what_is_no_dashboard(tmp_path: Path) -> None:
    err = io.StringIO()
    assert main(["dashboards", "check", "--prometheus", "localhost"], io.StringIO(), err) == 2
    (tmp_path / "x.json").write_text("[1]")
    assert main(["dashboards", "check", str(tmp_path / "x.json")], io.StringIO(), err) == 1
    assert "no address of a Prometheus" in err.getvalue()
    assert "is no dashboard" in err.getvalue()
