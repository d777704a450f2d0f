"""``steadyctl read-kernel-log``."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LOST = "[12.500000] NVRM: Xid (PCI:0000:cb:00): 79, pid=7, name=python3, GPU has fallen off the bus."
BURST = [f"[13.{i:06d}] NVRM: Xid (PCI:0000:18:00): 31, pid=9, name=a, MMU Fault {i}" for i in range(5)]
FOREIGN = "May 19 07:08:57 host python3[77]: NVRM: Xid (PCI:0000:07:00): 79, x"
TEXT = "\n".join(["[1.0] usb 1-1: new device", LOST, *BURST, FOREIGN, "[14.0] nfs: server nas OK"]) + "\n"


class Pipe(io.TextIOWrapper):
    """Standard input that is no terminal."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "kern.log"
    file.write_text(TEXT)
    return file


def test_json_is_one_object_per_event(ctl: Callable[..., Any], log: Path) -> None:
    result = ctl("read-kernel-log", log, "--json")
    objects = [json.loads(line) for line in result.lines]
    assert result.code == 0
    assert [o["line_number"] for o in objects] == [2, 3, 4, 5, 6, 7, 9]
    assert [o["event"] for o in objects] == ["xid"] * 6 + ["nfs_ok"]
    first = objects[0]
    assert (first["xid"], first["pci"], first["pid"], first["comm"], first["class"]) == (
        79,
        "0000:cb:00",
        7,
        "python3",
        "reboot",
    )
    assert first["schema"] == "steadyrun.kernel-event/1"


def test_repeats_may_be_folded_and_kinds_chosen(ctl: Callable[..., Any], log: Path) -> None:
    folded = [json.loads(x) for x in ctl("read-kernel-log", log, "--json", "--fold").lines]
    assert [o["line_number"] for o in folded] == [2, 3, 9]
    chosen = [json.loads(x) for x in ctl("read-kernel-log", log, "--json", "--only", "nfs_ok").lines]
    assert [o["event"] for o in chosen] == ["nfs_ok"]


def test_a_person_sees_what_happened_and_what_to_do(ctl: Callable[..., Any], log: Path) -> None:
    result = ctl("read-kernel-log", log)
    assert result.code == 0
    assert "Xid 79 0000:cb:00 [reboot], pid 7 (python3)" in result.out
    assert "Xid 31 0000:18:00 [app], pid 9 (a) (5 times)" in result.out
    assert "to do:   leave out the node and reboot it" in result.out
    assert "1 message was left out: a program wrote it" in result.out
    assert all(len(line) <= 80 for line in result.lines)


def test_other_writers_are_believed_when_asked(ctl: Callable[..., Any], log: Path) -> None:
    result = ctl("read-kernel-log", log, "--any-writer", "--json")
    assert "0000:07:00" in [json.loads(line).get("pci") for line in result.lines]


@pytest.mark.parametrize("arguments", [("-",), ()])
def test_what_is_piped_in_is_read(
    ctl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "stdin", Pipe(TEXT.encode()))
    assert len(ctl("read-kernel-log", *arguments, "--json").lines) == 7


def test_compressed_logs_are_read_and_damaged_ones_told(ctl: Callable[..., Any], tmp_path: Path) -> None:
    whole, cut = tmp_path / "kern.log.gz", tmp_path / "cut.gz"
    whole.write_bytes(gzip.compress(TEXT.encode()))
    cut.write_bytes(whole.read_bytes()[:-20])
    assert len(ctl("read-kernel-log", whole, "--json").lines) == 7
    result = ctl("read-kernel-log", cut, "--json")
    assert result.code == 2
    assert "damaged" in result.err


def test_dmesg_json_is_read(ctl: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "dmesg.json"
    entries = [{"pri": 3, "time": 12.5, "msg": LOST.partition("] ")[2]}, {"pri": 11, "time": 13.0, "msg": BURST[0]}]
    file.write_text(json.dumps({"dmesg": entries}, indent=3))
    (line,) = ctl("read-kernel-log", file, "--json").lines
    assert json.loads(line)["at_s"] == 12.5


def test_a_log_without_events_is_well(ctl: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "empty"
    file.write_bytes(b"")
    assert ctl("read-kernel-log", file, "--json").lines == []
    result = ctl("read-kernel-log", file)
    assert (result.code, result.lines) == (0, ["no event that concerns a training job"])


def test_hostile_text_cannot_control_the_terminal(ctl: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(
        b"[1.0] NVRM: Xid (PCI:0000:cb:00): 13, pid=7, name=a\\x1b[31m\\x07b, x\n\xff\xfe\x00\n" + b"x" * 200_000
    )
    result = ctl("read-kernel-log", file)
    assert result.code == 0
    assert "\x1b" not in result.out
    assert "\x07" not in result.out


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_file_that_cannot_be_read_is_told(ctl: Callable[..., Any], tmp_path: Path, name: str) -> None:
    result = ctl("read-kernel-log", tmp_path / name)
    assert result.code == 2
    assert "cannot read" in result.err
    assert "or - for stdin" in result.err
