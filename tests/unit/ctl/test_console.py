"""Text for a person: lengths, tables, and nothing from outside that a terminal would obey."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrun.ctl.console import Column, Console, duration, plain, size


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.004, "0.00s"),
        (0.42, "0.42s"),
        (0.999, "1.0s"),
        (9.94, "9.9s"),
        (9.97, "10s"),
        (59.4, "59s"),
        (59.7, "1m00s"),
        (192, "3m12s"),
        (3600, "1h00m"),
        (183_600, "2d03h"),
        (-1, "0.00s"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (2048, "2 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (300 << 20, "300 MiB"),
        (2**41, "2.0 TiB"),
    ],
)
def test_sizes(size_bytes: float, text: str) -> None:
    assert size(size_bytes) == text


@given(st.text())
def test_nothing_from_outside_controls_the_terminal(text: str) -> None:
    assert not [c for c in plain(text) if ord(c) < 32 or 127 <= ord(c) < 160]


def test_colours_only_in_a_terminal_that_wants_them() -> None:
    assert Console(Terminal(), {"TERM": "xterm"}).styled("x", "red") == "\x1b[31mx\x1b[0m"
    for console in (
        Console(io.StringIO(), {}),
        Console(Terminal(), {"NO_COLOR": "1"}),
        Console(Terminal(), {"TERM": "dumb"}),
    ):
        assert console.styled("x", "red") == "x"


def test_a_line_is_cut_at_the_width_and_its_style_ends() -> None:
    console = Console(Terminal(), {}, 5)
    assert console.cut(f"ab{console.styled('cdef', 'red')}gh") == "ab\x1b[31mcd…\x1b[0m"
    assert console.cut("abcde") == "abcde"


def test_the_growing_column_wraps_and_styled_cells_keep_the_columns_straight() -> None:
    console = Console(Terminal(), {}, 40)
    columns = (Column("no", right=True), Column("class"), Column("text", grows=True))
    rows = [["7", console.styled("host_stall", "red"), "one two three four five six seven eight"], ["12", "ok", "x"]]
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in console.table(columns, rows)]
    assert all(len(line) <= 40 for line in lines)
    assert lines[0] == "no  class       text"
    assert lines[1].startswith(" 7  host_stall  one two")
    assert lines[2].startswith(" " * 16)
    assert lines[-1] == "12  ok          x"
