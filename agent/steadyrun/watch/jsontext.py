"""JSON without the ``json`` module, which costs a starting rank 13 ms (regular expressions) and might, once the
script's folder is on ``sys.path``, be the script's own ``json.py``. The parser is the C one that ``json`` uses."""

from __future__ import annotations

from _json import encode_basestring_ascii, make_scanner

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["parse", "render"]


class _Rules:
    """What the C scanner asks of a decoder."""

    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = float
    array_hook = None  # from Python 3.15 on


def parse(text: str) -> Any:
    """The value *text* holds.

    Raises:
        ValueError: it is not one JSON value.
    """
    text = text.strip(" \t\r\n")
    try:
        value, end = make_scanner(_Rules)(text, 0)  # type: ignore[arg-type]
    except StopIteration as e:
        raise ValueError(f"cannot read JSON: no value at character {e.value}") from None
    if end != len(text):
        raise ValueError(f"cannot read JSON: more text at character {end}")
    return value


def render(value: Any) -> str:
    """*value* as JSON on one line; what JSON does not know becomes its text."""
    if value is None:
        return "null"
    if value is True or value is False:
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value) if value - value == 0 else "null"
    if isinstance(value, dict):
        return "{" + ",".join(f"{encode_basestring_ascii(str(k))}:{render(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(render, value)) + "]"
    return encode_basestring_ascii(str(value))
