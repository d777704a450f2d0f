from __future__ import annotations

from pathlib import Path

import pytest

from steadyrun.collectors.logs import tail_lines, tail_of_files


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "stderr.log"


def test_last_lines_in_order(log: Path) -> None:
    log.write_text("".join(f"line {i}\n" for i in range(1000)))
    assert tail_lines(log, 3) == ["line 997", "line 998", "line 999"]


def test_missing_and_empty_files_have_no_lines(log: Path) -> None:
    assert tail_lines(log) == []
    log.write_text("")
    assert tail_lines(log) == []


def test_only_the_end_of_a_large_file_is_read_and_its_cut_line_dropped(log: Path) -> None:
    log.write_bytes(b"x" * 100_000 + b"\nabc\nlast without newline")
    assert tail_lines(log, 5, read_bytes=30) == ["abc", "last without newline"]


def test_progress_bars_leave_their_last_state(log: Path) -> None:
    log.write_bytes(b"a\n 10%|#\r 50%|##\r100%|###\nwindows line\r\n")
    assert tail_lines(log) == ["a", "100%|###", "windows line"]


def test_unfinished_progress_bar_is_shown(log: Path) -> None:
    log.write_bytes(b" 10%|#\r 50%|##\r")
    assert tail_lines(log) == [" 50%|##"]


def test_binary_and_colours_are_made_harmless(log: Path) -> None:
    log.write_bytes(b"\x1b[31mred\x1b[0m\n\xff\xfe\x00ok\n\x1b[2J\n")
    assert tail_lines(log) == ["red", "\ufffd\ufffdok"]


def test_long_lines_are_cut(log: Path) -> None:
    log.write_text("y" * 10_000 + "\n")
    assert [len(line) for line in tail_lines(log)] == [2000]


def test_files_share_the_lines_and_the_last_file_ends_the_list(tmp_path: Path) -> None:
    out, err = tmp_path / "stdout.log", tmp_path / "stderr.log"
    out.write_text("".join(f"o{i}\n" for i in range(50)))
    err.write_text("e0\ne1\n")
    lines, errors = tail_of_files([out, err, tmp_path / "absent"], 10)
    assert lines == [f"o{i}" for i in range(42, 50)] + ["e0", "e1"]
    assert errors == []


def test_one_file_by_two_names_is_read_once(tmp_path: Path) -> None:
    out = tmp_path / "out.log"
    out.write_text("x\n")
    (tmp_path / "err.log").symlink_to(out)
    assert tail_of_files([out, tmp_path / "err.log"])[0] == ["x"]


def test_unreadable_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").mkdir()
    lines, errors = tail_of_files([tmp_path / "stdout.log"])
    assert lines == []
    assert errors == ["cannot read stdout.log: Is a directory"]
