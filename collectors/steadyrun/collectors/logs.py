"""The last words of a rank: a bounded read from the end of its log files, and what they mean."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["tail_lines", "tail_of_files"]

READ_BYTES: Final = 256 << 10
LINE_CHARS: Final = 2000
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def tail_lines(path: Path, lines: int = 50, read_bytes: int = READ_BYTES) -> list[str]:
    """The last *lines* lines of a file, oldest first; empty when it is missing or empty.

    Reads *read_bytes* from the end at most. What a progress bar wrote over (``\\r``) is left out, control characters
    and colours are removed, undecodable bytes replaced, long lines cut.

    Raises:
        OSError: the file exists and cannot be read.
    """
    try:
        with path.open("rb") as f:
            size = f.seek(0, os.SEEK_END)
            start = max(size - read_bytes, 0)
            f.seek(start)
            raw = f.read(read_bytes)
    except FileNotFoundError:
        return []
    text = raw.decode("utf-8", errors="replace").replace("\r\n", "\n")
    parts = text.split("\n")
    if start > 0 and len(parts) > 1:
        parts = parts[1:]  # the first one is cut
    cleaned = (_clean(part) for part in parts)
    return [line for line in cleaned if line][-lines:]


def _clean(line: str) -> str:
    shown = line.rstrip("\r").rpartition("\r")[2] if "\r" in line else line
    return _CONTROL.sub("", shown).rstrip()[:LINE_CHARS]


def tail_of_files(paths: Sequence[Path], lines: int = 50) -> tuple[list[str], list[str]]:
    """(last lines, what could not be read) over a rank's files: standard error is given last and ends the list.

    A file repeated by another name (stderr sent to stdout's file) is read once. Each gets an even share of the lines,
    and what one does not use goes to the others.
    """
    errors: list[str] = []
    tails: list[list[str]] = []
    seen: set[tuple[int, int]] = set()
    for path in paths:
        try:
            status = path.stat()
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            tails.append(tail_lines(path, lines))
        except FileNotFoundError:
            continue
        except OSError as e:
            errors.append(f"cannot read {path.name}: {e.strerror}")
    spare = lines
    kept: list[list[str]] = []
    for left, tail in zip(range(len(tails), 0, -1), sorted(tails, key=len), strict=True):
        share = min(len(tail), spare // left)
        spare -= share
        kept.append(tail[len(tail) - share :])
    by_identity = {id(t): k for t, k in zip(sorted(tails, key=len), kept, strict=True)}
    return [line for tail in tails for line in by_identity[id(tail)]], errors
