"""The page: what it must show, that it is well formed and self-contained, and that no text of a rank gets through."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import postmortem_reports as reports
import pytest

from steadyrun.postmortem.page import render_page

ALL = [reports.ring_of_three, reports.stall_of, reports.mismatch, reports.program_error, reports.healthy]
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Collects the text, and checks that every tag is closed in order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


@pytest.mark.parametrize("make", ALL)
def test_page_is_well_formed_and_loads_nothing(make: object) -> None:
    assert callable(make)
    page = render_page(make())
    reader = read(page)
    for _, attributes in reader.tags:
        assert not {"src", "srcset", "action", "onclick", "onload", "onerror"} & set(attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page
    assert "@import" not in page


def test_links_lead_to_sections_that_exist() -> None:
    reader = read(render_page(reports.ring_of_three()))
    ids = {a["id"] for _, a in reader.tags if "id" in a}
    links = [a["href"] for tag, a in reader.tags if tag == "a" and a["href"]]
    assert links
    assert {link[1:] for link in links if link} <= ids


def test_ring_page_shows_all_that_was_collected() -> None:
    text = " ".join(read(render_page(reports.ring_of_three())).words)
    for part in (
        "ranks 0, 1 and 2 wait for each other in a ring",
        "restarting as attempt 1",
        "all_reduce #13",
        "pair_20",
        "train.py:41 in exchange",
        "node00, GPU 1",
        "16:00:00 UTC",
        "95%",
        "main thread",
        "step 116 loss 2.31",
        "rank 1 makes no progress: section step for 20 s, limit 20 s",
        "no native stacks: py-spy is not installed",
        "rank_2.flight.gloo.pickle",
        "420 entries from 3 ranks",
    ):
        assert part in text, part


def test_ring_is_drawn_closed_in_both_widths() -> None:
    page = render_page(reports.ring_of_three())
    drawings = re.findall(r'<svg class="chain".*?</svg>', page, re.DOTALL)
    assert len(drawings) == 2
    for svg in drawings:
        assert svg.count('class="box bad"') == 3
        assert svg.count('class="tip ring"') == 3


def test_page_without_flight_records_shows_what_the_old_one_did() -> None:
    text = " ".join(read(render_page(reports.program_error())).words)
    for part in (
        "rank 1 raised ValueError: loss is nan",
        "the job stops",
        "Traceback (most recent call last):",
        "uncaught exception",
        "/proj/job/train.py:61 in step",
        "rank 0 waits in all_reduce called at train.py:88",
        "culprit",
        "victim",
        "state S in futex",
        "no stack: the process had ended",
        "program error",
    ):
        assert part in text, part


def test_mismatch_table_marks_who_is_to_blame() -> None:
    page = render_page(reports.mismatch())
    table = page[page.index('id="differences"') :]
    marked = re.search(r'<tr class="bad">.*?</tr>', table)
    assert marked is not None
    assert "rank 1" in marked[0]
    assert "broadcast [1024] Float" in marked[0]
    assert "Another root cause" in page
    assert "no dump of rank 5" in page


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "\"'><img src=x onerror=alert(1)>",
        "</title></style></script><svg/onload=alert(1)>",
        "a\x00b\x1b[31m\ud800",
        "&lt;b&gt;" * 300,
    ],
)
def test_texts_of_ranks_and_files_stay_texts(text: str) -> None:
    page = render_page(reports.hostile(text))
    page.encode("utf-8")
    tags = {tag for tag, _ in read(page).tags}
    assert "img" not in tags
    assert sum(tag == "script" for tag, _ in read(page).tags) == 1
    names = {name for _, attributes in read(page).tags for name in attributes}
    assert not {n for n in names if n.startswith("on")}


def test_many_ranks_stay_a_small_page_with_few_lanes() -> None:
    report = reports.stall_of(8, 24, 37, has_stacks=False)
    page = render_page(report)
    assert len(page) < 150_000
    assert page.count('class="lane ') == 4
    assert "191 ranks" in page


def test_single_calls_are_asked_for_a_few_ranks_only() -> None:
    report = reports.stall_of(8, 16, 37)
    details = report.case.details
    assert isinstance(details, reports.CallsOfFlights)
    render_page(report)
    assert 0 < details.asked <= 40
