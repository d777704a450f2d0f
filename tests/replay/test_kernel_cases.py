"""Every collected line of a kernel log reads as expected, alone, in one file, in every form, and by the command."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from steadyrun.collectors.kernel.events import KernelEvent, read_text
from steadyrun.collectors.kernel.lines import read_kmsg
from steadyrun.collectors.kernel.xids import XIDS
from steadyrun.ctl.main import main


@pytest.fixture(scope="module")
def cases(shared_cases: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (shared_cases / "kmsg_cases.jsonl").read_text().splitlines()]


def assert_reads(case: dict[str, Any], events: list[KernelEvent]) -> None:
    expected = case["expect"]
    if expected is None:
        assert events == [], case
        return
    assert len(events) == 1, case
    got = events[0].to_json()
    assert {k: got.get(k) for k in expected} == expected, case


def test_each_line_alone(cases: list[dict[str, Any]]) -> None:
    assert len(cases) >= 52
    for case in cases:
        assert_reads(case, list(read_text(case["line"].split("\n"))))


def test_all_lines_in_one_file(cases: list[dict[str, Any]]) -> None:
    text = "\n".join(case["line"] for case in cases)
    expected = [case["expect"] for case in cases if case["expect"] is not None]
    events = list(read_text(text.split("\n")))
    assert len(events) == len(expected)
    for event, wanted in zip(events, expected, strict=True):
        got = event.to_json()
        assert {k: got.get(k) for k in wanted} == wanted


def test_each_message_as_a_record_of_kmsg(cases: list[dict[str, Any]]) -> None:
    """The kernel escapes what is not printable, and gives each record a number and a time."""
    for number, case in enumerate(cases):
        message = case["line"]
        for prefix in ("kernel: ", "] "):  # what dmesg, syslog and the journal put before the message
            head, found, rest = message.partition(prefix)
            if found and len(head) < 60 and not head.startswith(("mce", "nvme", "NVRM", "nvidia", "XFS", "EXT4")):
                message = rest
        escaped = message.replace("\\", "\\x5c").replace("\n", "\\x0a")
        line = read_kmsg(f"3,{number},{number}000000,-;{escaped}\n".encode())
        assert line.sequence == number
        events = list(read_text([f"3,{number},{number}000000,-;{escaped}"]))
        assert_reads(case, events)


def test_the_command_prints_one_object_per_event(cases: list[dict[str, Any]], tmp_path: Path) -> None:
    file = tmp_path / "kern.log"
    numbers = []
    with file.open("w") as f:
        number = 1
        for case in cases:
            f.write(case["line"] + "\n")
            numbers.append(number)
            number += 1 + case["line"].count("\n")
    out = io.StringIO()
    assert main(["read-kernel-log", str(file), "--json"], out, io.StringIO(), {}, 80) == 0
    objects = [json.loads(line) for line in out.getvalue().splitlines()]
    wanted = [(n, case["expect"]) for n, case in zip(numbers, cases, strict=True) if case["expect"] is not None]
    assert [o["line_number"] for o in objects] == [n for n, _ in wanted]
    for got, (_, expected) in zip(objects, wanted, strict=True):
        assert {k: got.get(k) for k in expected} == expected


def test_the_catalogue_agrees_with_the_collected_table(shared_cases: Path) -> None:
    table = shared_cases.parent / "facts" / "xid_table.json"
    if not table.is_file():
        pytest.skip(f"the collected table of codes is not here: {table}")
    rows = json.loads(table.read_text())
    assert {r["xid"] for r in rows} == set(XIDS)
    for row in rows:
        entry = XIDS[row["xid"]]
        assert (entry.name, entry.cls.value, entry.vendor_action) == (
            row["name"],
            row["class"],
            row["nvidia_immediate"],
        )
