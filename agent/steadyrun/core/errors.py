"""Errors a caller can act on, and the nearest-name helper their messages use."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["BoardError", "ConfigError", "SteadyrunError", "nearest_name"]


class SteadyrunError(Exception):
    """Base of every error that is meant for a person: the text says what failed, why, and what to try."""


class ConfigError(SteadyrunError):
    """An option, environment name or configuration key has a value that cannot be used."""


class BoardError(SteadyrunError):
    """The shared-memory page is missing, foreign or of another version."""


def nearest_name(name: str, known: Iterable[str]) -> str:
    """``"; did you mean X?"`` with the closest of *known*, or an empty string when nothing is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
