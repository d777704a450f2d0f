"""``steadyctl ckpt``: help, sizes, progress bars, what is refused before anything is read; no torch at the start."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadyrun.core.errors import ConfigError
from steadyrun.ctl.ckpt.converting import parse_size
from steadyrun.ctl.ckpt.progress import progress_bar
from steadyrun.ctl.console import Console

COMMANDS = ("ls", "show", "verify", "diff", "rollback", "average", "export", "prune", "quarantine", "interval")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_fits(
    name: str, ctl: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl("ckpt", name, "--help").code == 0
    told = capsys.readouterr().out
    assert "--json" in told
    assert "examples:" in told or "exit codes:" in told
    assert max(map(len, told.splitlines())) <= 100


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("5GB", 5_000_000_000), ("500MiB", 500 << 20), ("1.5 kb", 1500), ("1000", 1000), ("2TiB", 2 << 40), ("1b", 1)],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "0", "5 apples", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_size(text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_over_itself_and_gone_at_the_end() -> None:
    out = Terminal()
    console = Console(out, {}, 80)
    with progress_bar(console, "step-1\x1b[2J") as update:
        assert update is not None
        update(1 << 20, 4 << 20)
        update(2 << 20, 4 << 20)  # too soon after the first to be drawn
    drawn = out.getvalue().split("\r\x1b[K")
    assert drawn[0] == ""
    assert drawn[-1] == ""
    (line,) = drawn[1:-1]
    assert line.startswith("step-1?[2J [######..................]  25 %")
    assert len(line) <= 80


def test_no_bar_where_nobody_looks() -> None:
    with progress_bar(Console(io.StringIO(), {}, 80), "x") as update:
        assert update is None
    with progress_bar(Console(Terminal(), {}, 80), "x", is_quiet=True) as update:
        assert update is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("prune", "{tmp}", "--keep", 1), "give --keep 2 or more"),
        (("prune", "{tmp}/nothing", "--keep", 2), "it is no folder"),
        (("quarantine", "{tmp}/nothing"), "it is no folder"),
        (("rollback", "{tmp}", "--to", 3, "--skip-batches", "9:3"), "is no range of batches"),
        (("export", "{tmp}", "{tmp}/out", "--max-shard-size", "big"), "is no size"),
        (("diff", "{tmp}", "{tmp}", "--rtol", "nan"), "give a number of 0 or more"),
        (("average", "{tmp}/out", "{tmp}", "--step", -1), "give --step a number of 0 or more"),
    ],
)
def test_what_cannot_be_used_is_refused_first(
    argv: tuple[object, ...], words: str, ctl: Callable[..., Any], tmp_path: Path
) -> None:
    told = ctl("ckpt", *(str(a).format(tmp=tmp_path) for a in argv))
    assert told.code == 2
    assert words in told.err


def test_torch_is_loaded_only_by_the_commands_that_read_tensors() -> None:
    code = "import sys, steadyrun.ctl.main as m; m.build_parser(); print({'torch', 'numpy'} & set(sys.modules))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "set()"
