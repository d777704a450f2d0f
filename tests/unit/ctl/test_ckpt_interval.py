"""``steadyctl ckpt interval``: the published figures, its table, JSON and picture, and what it refuses."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SVG = "{http://www.w3.org/2000/svg}"
PUBLISHED = ("--failures", 419, "--over", "54d")


@pytest.fixture
def interval(ctl: Callable[..., Any]) -> Callable[..., Any]:
    def call(*argv: object, width: int = 80) -> Any:
        return ctl("ckpt", "interval", *argv, width=width)

    return call


def text_of(result: Any) -> str:
    assert result.code == 0, result.err
    return " ".join(result.out.split())


# -- published figures -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("stall", "words", "interval_s", "overhead"),
    [(60, "Save every 1,156 s (19 min): overhead 10.4 %", 1156, 0.104), (5, "Save every 334 s", 334, 0.030)],
)
@pytest.mark.parametrize("rate", [PUBLISHED, ("--mtbf", 11135), ("--gpus", 16384, *PUBLISHED)])
def test_the_published_run(
    interval: Callable[..., Any], stall: int, words: str, interval_s: int, overhead: float, rate: tuple[object, ...]
) -> None:
    text = text_of(interval("--stall", stall, *rate))
    assert "MTBF 3.09 h" in text
    assert words in text
    told = interval("--stall", stall, *rate, "--json").json
    assert told["schema"] == "steadyrun.ckpt_interval/1"
    assert round(told["interval_s"]) == interval_s
    assert round(told["overhead_ratio"], 3) == overhead


def test_mtbf_at_1024_gpus(interval: Callable[..., Any]) -> None:
    result = interval("--stall", 60, *PUBLISHED, "--gpus", 16384, 1024)
    row = next(line.split() for line in result.lines if line.lstrip().startswith("1,024 "))
    assert row[:5] == ["1,024", "49.5", "h", "4,624", "s"]
    told = interval("--stall", 60, *PUBLISHED, "--seen-gpus", 16384, "--gpus", 1024, "--json").json
    assert (told["gpus"], round(told["mtbf_s"] / 3600, 1)) == (1024, 49.5)
    assert "scaled from 16,384 to 1,024 GPUs" in told["mtbf_source"]


def test_effective_time_with_a_restart_of_ten_minutes(interval: Callable[..., Any]) -> None:
    assert "effective training time 91.6 %" in text_of(interval("--stall", 5, *PUBLISHED, "--restart", "10m"))
    told = interval("--stall", 5, "--mtbf", "3.09h", "--restart", 600, "--json").json
    assert round(told["effective_ratio"], 3) == 0.916
    assert told["effective_ratio"] == pytest.approx(1 - told["overhead_ratio"])


@pytest.mark.parametrize(("mtbf", "minutes"), [("24h", "117 min"), ("6h", "57 min"), ("15m", "9.1 min")])
def test_dalys_own_optima(interval: Callable[..., Any], mtbf: str, minutes: str) -> None:
    text = text_of(interval("--stall", "5m", "--mtbf", mtbf, "--restart", "10m", "--formula", "daly"))
    assert f"({minutes})" in text.partition(":")[2].partition(": overhead")[0]
    assert f"({minutes})" in text_of(interval("--stall", "5m", "--mtbf", mtbf))
    told = interval("--stall", "5m", "--mtbf", mtbf, "--json").json
    assert told["daly_interval_s"] / 60 == pytest.approx(float(minutes.split()[0]), abs=0.5)


def test_asynchronous_saves_are_bounded_by_the_persist_time(interval: Callable[..., Any]) -> None:
    text = text_of(interval("--stall", 5, *PUBLISHED, "--persist", "10m"))
    assert "Save every 600 s (10 min)" in text
    assert "600 s to become durable" in text
    assert "<- bound" in text
    slow = interval("--stall", 5, *PUBLISHED, "--persist", "10m", "--slowdown", 0.05, "--detect", 30, "--json").json
    assert (round(slow["interval_s"]), slow["bound_by_persist"]) == (883, False)
    assert slow["restart_ratio"] == pytest.approx(30 / slow["mtbf_s"])
    assert interval("--stall", 5, *PUBLISHED, "--persist", 600, "--json").json["bound_by_persist"] is True


def test_two_tiers(interval: Callable[..., Any]) -> None:
    text = text_of(interval("--stall", 60, *PUBLISHED, "--memory-stall", "500ms"))
    assert "one every 122 s (2.0 min), a durable save every 2,312 s (39 min)" in text
    assert "overhead 6.0 % instead of 10.4 %" in text
    told = interval("--stall", 5, *PUBLISHED, "--memory-stall", 0.5, "--memory-share", 0.75, "--json").json
    assert round(told["two_tiers"]["overhead_ratio"], 3) == 0.023
    assert round(told["overhead_ratio"], 3) == 0.030


# -- the failure rate ------------------------------------------------------------------------------------------------
def test_without_a_failure_rate_the_number_of_gpus_gives_the_prior(interval: Callable[..., Any]) -> None:
    told = interval("--stall", 5, "--gpus", 512, "--json").json
    assert told["mtbf_s"] == 50_000 * 3600 / 512
    assert "1 failure per 50,000 GPU-hours" in text_of(interval("--stall", 5, "--gpus", 512))


def test_no_failure_yet_needs_the_prior(interval: Callable[..., Any]) -> None:
    quiet = interval("--stall", 5, "--failures", 0, "--over", "3d", "--gpus", 512, "--json").json
    assert quiet["mtbf_s"] == 50_000 * 3600 / 512 + 3 * 86400
    assert interval("--stall", 5, "--failures", 0, "--over", "3d").code == 2


# -- output ----------------------------------------------------------------------------------------------------------
def test_the_table_shows_the_optimum_between_dearer_intervals(interval: Callable[..., Any]) -> None:
    result = interval("--stall", 60, *PUBLISHED)
    rows = [line for line in result.lines if "#" in line]
    assert next(line for line in rows if "<- Young" in line).split()[:2] == ["1,156", "s"]
    assert any(line.endswith("Daly") for line in rows)
    bars = [line.count("#") for line in rows]
    assert max(bars) == bars[0] == bars[-1]
    assert min(bars) < max(bars) / 1.5
    assert all(len(line) <= 80 for line in result.lines), result.out


def test_the_json_table_has_its_least_overhead_at_the_interval(interval: Callable[..., Any]) -> None:
    told = interval("--stall", 60, "--mtbf", "45m", "--formula", "young", "--json").json
    best = min(told["table"], key=lambda row: row["overhead_ratio"])
    assert best["interval_s"] == told["interval_s"]
    assert len(told["table"]) >= 7
    assert told["costs"]["mtbf_s"] == 2700


def test_the_picture_is_a_self_contained_svg(interval: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "interval.svg"
    result = interval("--stall", 60, *PUBLISHED, "--restart", "10m", "--plot", file)
    assert str(file) in result.out
    root = ET.fromstring(file.read_text())
    assert root.tag == f"{SVG}svg"
    assert {e.tag.removeprefix(SVG) for e in root.iter()} == {
        "svg",
        "title",
        "rect",
        "text",
        "line",
        "polyline",
        "circle",
    }
    assert not any(name.endswith("href") for e in root.iter() for name in e.attrib)
    words = [e.text for e in root.iter(f"{SVG}text")]
    for text in ("total", "saving", "work done again", "restarts", "Young 1,156 s (19 min)", "Daly 1,116 s (19 min)"):
        assert text in words
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for line in root.iter(f"{SVG}polyline"):
        for point in line.attrib["points"].split():
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


def test_the_lowest_point_of_the_picture_is_the_interval(interval: Callable[..., Any], tmp_path: Path) -> None:
    interval("--stall", 60, *PUBLISHED, "--plot", tmp_path / "a.svg", "--json")
    root = ET.parse(tmp_path / "a.svg").getroot()
    total = next(root.iter(f"{SVG}polyline")).attrib["points"].split()
    lowest = max((tuple(map(float, p.split(","))) for p in total), key=lambda p: p[1])
    dot = next(c for c in root.iter(f"{SVG}circle") if c.attrib["fill"] == "#000000")
    assert float(dot.attrib["cx"]) == pytest.approx(lowest[0], abs=12)
    assert float(dot.attrib["cy"]) == pytest.approx(lowest[1], abs=1)


def test_the_picture_of_a_bounded_interval_begins_at_the_bound(interval: Callable[..., Any], tmp_path: Path) -> None:
    interval("--stall", 5, *PUBLISHED, "--persist", "10m", "--plot", tmp_path / "a.svg")
    root = ET.parse(tmp_path / "a.svg").getroot()
    assert "lower bound: durable no sooner" in [e.text for e in root.iter(f"{SVG}text")]
    assert list(root.iter(f"{SVG}circle")) == []


@pytest.mark.parametrize("stall", ["1ms", "30", "1h"])
@pytest.mark.parametrize("mtbf", ["10", "3.09h", "2000d"])
def test_any_size_of_figures_has_a_table_and_a_picture(
    interval: Callable[..., Any], tmp_path: Path, stall: str, mtbf: str
) -> None:
    result = interval("--stall", stall, "--mtbf", mtbf, "--plot", tmp_path / "a.svg")
    assert result.code == 0
    assert all(len(line) <= 80 for line in result.lines if str(tmp_path) not in line), result.out
    words = [e.text or "" for e in ET.parse(tmp_path / "a.svg").getroot().iter(f"{SVG}text")]
    assert sum(w.endswith(("s", "min", "h", "d")) and w[0].isdigit() for w in words) >= 2, "ticks on the time axis"


# -- refusals --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("--stall", 5), "how often does the job fail? Give --mtbf"),
        (("--stall", 5, "--failures", 3), "--failures and --over belong together"),
        (("--stall", 5, "--mtbf", "3h", *PUBLISHED), "either --mtbf, or --failures"),
        (("--stall", 5, "--mtbf", "3h", "--seen-gpus", 8), "--seen-gpus needs --gpus"),
        (("--stall", 5, "--mtbf", "3h", "--memory-share", 0.5), "--memory-share needs --memory-stall"),
        (("--stall", 5, "--mtbf", "3h", "--memory-stall", 1, "--memory-share", 1), "above 0 and below 1, not 1"),
        (("--stall", 5, "--mtbf", "3h", "--gpus", 8, 0), "number of GPUs must be 1 or above, not 0"),
        (("--stall", 5, "--mtbf", "3h", "--slowdown", "nan"), "slowdown must be 0 or above"),
        (("--stall", 5, "--failures", -1, "--over", "3d"), "failures must be 0 or above, not -1"),
        (("--stall", 5, "--mtbf", "3h", "--plot", "a.png"), "give a name that ends with .svg"),
        (("--stall", 5, "--mtbf", "3h", "--plot", "/nonexistent/a.svg"), "No such file or directory"),
    ],
)
def test_figures_that_cannot_be_used_are_exit_2(
    interval: Callable[..., Any], argv: tuple[object, ...], says: str
) -> None:
    result = interval(*argv)
    assert (result.code, result.out) == (2, "")
    assert says in result.err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "--stall"),
        (("--stall", "5 parsecs", "--mtbf", "3h"), "'5 parsecs' is no time above 0"),
        (("--stall", 0, "--mtbf", "3h"), "'0' is no time above 0"),
        (("--stall", 5, "--mtbf", "inf"), "'inf' is no time above 0"),
        (("--stall", 5, "--mtbf", "3h", "--restart", "-1"), "'-1' is no time of 0 or more"),
        (("--stall", 5, "--mtbf", "3h", "--formula", "dally"), "dally"),
    ],
)
def test_words_that_are_no_figures_are_exit_2(
    interval: Callable[..., Any], capsys: pytest.CaptureFixture[str], argv: tuple[object, ...], says: str
) -> None:
    assert interval(*argv).code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("argv", [("ckpt", "--help"), ("ckpt", "interval", "--help")])
def test_help_has_examples(ctl: Callable[..., Any], capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
    assert ctl(*argv).code == 0
    assert "examples:" in capsys.readouterr().out


def test_a_mistyped_command_below_ckpt_is_named(ctl: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl("ckpt", "intervall").code == 2
    assert "interval" in capsys.readouterr().err
