"""``steadyctl`` called within the test's process."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import Any

from steadyrun.ctl.main import main


@dataclass(frozen=True)
class Told:
    """What one call of steadyctl did; *text* and *error* are its two streams with single spaces."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def text(self) -> str:
        return " ".join(self.out.split())

    @property
    def error(self) -> str:
        return " ".join(self.err.split())


def steadyctl(*argv: object, width: int = 80) -> Told:
    """``steadyctl("show", "last", "--run", folder)``; no terminal, no environment."""
    out, err = io.StringIO(), io.StringIO()
    code = main([str(a) for a in argv], out, err, {}, width)
    return Told(code, out.getvalue(), err.getvalue())


def ckpt(*argv: object) -> Told:
    """``ckpt("diff", a, b)``; 100 columns."""
    return steadyctl("ckpt", *argv, width=100)
