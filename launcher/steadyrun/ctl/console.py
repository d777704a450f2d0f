"""How ``steadyctl`` writes: colours only in a terminal, tables that fit its width, times and sizes for a person."""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TextIO

from steadyrun.core.records import to_json

__all__ = ["Column", "Console", "ago", "clock_time", "duration", "size"]

_STYLES: Final[Mapping[str, str]] = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "cyan": "36",
}
_ESCAPE_OR_TEXT: Final = re.compile(r"\x1b\[[0-9;]*m|[^\x1b]+")
_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*m")
# Text from ranks (log lines, names, messages) is shown, never obeyed: no terminal control characters but the tab.
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: ``right`` aligns numbers; the one with ``grows`` takes what is left and wraps there."""

    title: str
    right: bool = False
    grows: bool = False


class Console:
    """One output stream and what is known of it."""

    def __init__(self, out: TextIO, env: Mapping[str, str] | None = None, width: int | None = None) -> None:
        self.out = out
        self.is_terminal = out.isatty()
        environment = os.environ if env is None else env
        self.has_colour = self.is_terminal and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"
        self._width = width

    @property
    def width(self) -> int:
        """Columns; 80 where the stream is not a terminal, 100 at most for text that must be read."""
        if self._width is not None:
            return self._width
        return min(max(shutil.get_terminal_size((80, 24)).columns, 60), 140) if self.is_terminal else 80

    @property
    def height(self) -> int:
        return shutil.get_terminal_size((80, 24)).lines if self.is_terminal else 10_000

    def styled(self, text: str, *styles: str) -> str:
        if not self.has_colour or not styles:
            return text
        return f"\x1b[{';'.join(_STYLES[s] for s in styles)}m{text}\x1b[0m"

    def print(self, text: str = "") -> None:
        self.out.write(text + "\n")

    def json(self, value: Any) -> None:
        """The answer to ``--json``: one document, sorted by nothing, with its schema first."""
        self.out.write(json.dumps(to_json(value), indent=2, ensure_ascii=False) + "\n")

    def wrapped(self, text: str, indent: int = 0, first: str | None = None, *styles: str) -> list[str]:
        """*text* in lines that fit; the first one begins with *first*, the others are indented."""
        pad = " " * indent
        lines = textwrap.wrap(
            text,
            max(self.width, indent + 20),
            initial_indent=pad if first is None else first,
            subsequent_indent=pad,
            break_on_hyphens=False,
        ) or [first or ""]
        return [self.styled(line, *styles) for line in lines]

    def cut(self, text: str) -> str:
        """*text* without what is beyond the width, and then with ``…``; styles do not count, and end with it."""
        if _length(text) <= self.width:
            return text
        out, room = [], self.width - 1
        for part in _ESCAPE_OR_TEXT.findall(text):
            keep = part if part.startswith("\x1b") else part[:room]
            if not part.startswith("\x1b"):
                if room > 0 and len(part) >= room:
                    keep += "…"
                room -= len(part[:room])
            out.append(keep)
        return "".join(out)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[str]], gap: int = 2) -> list[str]:
        """Lines of a table; cells may be styled. The growing column is wrapped to what the others leave."""
        widths = [max([len(c.title), *(_length(r[i]) for r in rows)]) for i, c in enumerate(columns)]
        grow = next((i for i, c in enumerate(columns) if c.grows), None)
        if grow is not None:
            others = sum(w for i, w in enumerate(widths) if i != grow) + gap * (len(columns) - 1)
            widths[grow] = min(widths[grow], max(self.width - others, 16))
        lines = [self._line(columns, widths, [self.styled(c.title, "dim") for c in columns], gap)]
        for row in rows:
            cells = list(row)
            more: list[str] = []
            if grow is not None and _length(cells[grow]) > widths[grow]:
                first, *more = textwrap.wrap(_ESCAPE.sub("", cells[grow]), widths[grow], break_on_hyphens=False) or [""]
                cells[grow] = first
            lines.append(self._line(columns, widths, cells, gap))
            for text in more:
                blank = ["" if i != grow else text for i in range(len(columns))]
                lines.append(self._line(columns, widths, blank, gap))
        return lines

    @staticmethod
    def _line(columns: Sequence[Column], widths: Sequence[int], cells: Sequence[str], gap: int) -> str:
        out = []
        for column, width, cell in zip(columns, widths, cells, strict=True):
            pad = " " * max(width - _length(cell), 0)
            out.append(pad + cell if column.right else cell + pad)
        return (" " * gap).join(out).rstrip()


def _length(text: str) -> int:
    return len(_ESCAPE.sub("", text))


def plain(text: object) -> str:
    """Text from outside, without what could control a terminal."""
    return _CONTROL.sub("?", str(text).replace("\n", " ").replace("\t", "    "))


def duration(seconds: float | None) -> str:
    """As short as a person wants it: 0.42s, 3.1s, 42s, 3m12s, 5h07m, 2d03h."""
    if seconds is None:
        return "-"
    seconds = max(seconds, 0.0)
    if seconds < 9.95:
        return f"{seconds:.2f}s" if seconds < 0.995 else f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def ago(unix_s: float | None, now_unix_s: float) -> str:
    return "-" if unix_s is None else f"{duration(now_unix_s - unix_s)} ago"


def clock_time(unix_s: float | None, with_date: bool = False) -> str:
    """Local time of day."""
    if unix_s is None:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S", time.localtime(unix_s))


def size(size_bytes: float) -> str:
    """A size with a binary unit: 512 KiB, 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return (
                f"{size_bytes:.0f} {unit}"
                if unit in ("bytes", "KiB") or size_bytes >= 100
                else f"{size_bytes:.1f} {unit}"
            )
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
