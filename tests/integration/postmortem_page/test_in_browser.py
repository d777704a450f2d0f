"""The page in headless Chromium: it fits the window at both widths and opens fast, also for thousands of ranks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import postmortem_reports as reports
import pytest

from steadyrun.postmortem.case import Report
from steadyrun.postmortem.page import render_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
LIMIT_S = 90.0

# Runs when the page has loaded, with the layout forced by what it measures; read from the document's title.
PROBE = """<script>
addEventListener("load",()=>{const d=document.documentElement, w=innerWidth;
const wide=[...document.querySelectorAll("main *")].filter(e=>{
 if(e.closest(".scroll,pre,svg")||!e.getClientRects().length)return false;
 return e.getBoundingClientRect().right>w+1}).length;
document.title=`width=${w} scroll=${d.scrollWidth} wide=${wide} ms=${Math.round(performance.now())}`});
</script>"""


def opened(page: str, width: int, folder: Path) -> dict[str, int]:
    """What the page says of itself once it is shown; milliseconds count from the navigation's start."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on the path")
    # A frame gives the exact width: the window itself cannot be made narrower than some 500 pixels.
    (folder / "page.html").write_text(page.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(
        f'<body style="margin:0"><iframe src="page.html" style="border:0;width:{width}px;height:2000px"></iframe>'
        "<script>addEventListener('load',()=>{const t=document.querySelector('iframe').contentDocument.title;"
        "document.body.innerHTML='<p id=out>'+t+'</p>'})</script>",
        encoding="utf-8",
    )
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--allow-file-access-from-files", f"--user-data-dir={folder / 'profile'}",
        "--window-size=1400,2100", "--dump-dom", frame.as_uri(),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = re.search(r'id="?out"?>width=(\d+) scroll=(\d+) wide=(\d+) ms=(\d+)<', out)
    assert found is not None, f"the page did not open: {out[-500:]} {err[-2000:]}"
    return dict(zip(("width", "scroll", "wide", "ms"), map(int, found.groups()), strict=True))


def many() -> Report:
    return reports.stall_of(8, 128, 37)


@pytest.mark.deadline(200)
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("make", [reports.ring_of_three, many])
def test_page_fits_the_window_and_opens_fast(make: Callable[[], Report], width: int, tmp_path: Path) -> None:
    seen = opened(render_page(make()), width, tmp_path)
    assert seen["width"] == width
    assert seen["scroll"] <= width
    assert seen["wide"] == 0
    assert seen["ms"] < 3000


def test_thousands_of_ranks_stay_a_small_page() -> None:
    page = render_page(reports.stall_of(8, 512, 37, has_stacks=False))
    assert len(page) < 500_000
    assert page.count('class="lane ') < 40
