"""What a PromQL expression asks for: the series it selects and what is done with them; enough to check it by a table.

No parser: it does not say whether an expression is valid, which Prometheus itself says best (``promtool check rules``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["COUNTER_FUNCTIONS", "Selector", "grouping_labels", "selectors"]

COUNTER_FUNCTIONS: Final = frozenset({"rate", "irate", "increase", "resets"})
_AGGREGATORS: Final = frozenset({
    "sum", "min", "max", "avg", "group", "stddev", "stdvar", "count", "count_values", "bottomk", "topk", "quantile",
})  # fmt: skip
_GROUPING: Final = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_WORDS: Final = frozenset({"and", "or", "unless", "offset", "bool", "inf", "nan", "atan2"})
_TOKEN: Final = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<variable>\$\{\w+\}|\$\w+)
      | (?P<number>\d[\w.]*)
      | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*)
      | (?P<operator>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){}\[\],:@])
      | (?P<space>\s+)""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Selector:
    """One selection of series.

    Attributes:
        matchers: (label, operator, value).
        functions: those around it, outermost first; aggregations are left out.
        window: between its brackets, empty without.
    """

    name: str
    matchers: tuple[tuple[str, str, str], ...]
    functions: tuple[str, ...]
    window: str = ""

    @property
    def labels(self) -> frozenset[str]:
        return frozenset(label for label, _, _ in self.matchers)


def _tokens(expr: str) -> list[tuple[str, str]]:
    out, at = [], 0
    while at < len(expr):
        found = _TOKEN.match(expr, at)
        if found is None:
            raise ValueError(f"no PromQL at {expr[at : at + 20]!r} in {expr!r}")
        if found.lastgroup != "space":
            out.append((str(found.lastgroup), found.group()))
        at = found.end()
    return out


def selectors(expr: str) -> list[Selector]:
    """All selections of series in *expr*, in order.

    Raises:
        ValueError: a character that PromQL does not have, or brackets that do not match.
    """
    tokens, out = _tokens(expr), []
    around: list[str] = []  # one entry per open parenthesis
    i = 0
    while i < len(tokens):
        kind, text = tokens[i]
        if text == "(":
            before = tokens[i - 1] if i else ("", "")
            around.append(before[1] if before[0] == "name" and before[1].lower() not in _WORDS else "")
            i += 1
        elif text == ")":
            if not around:
                raise ValueError(f"a parenthesis too many in {expr!r}")
            around.pop()
            i = _after_grouping(tokens, i + 1)
        elif kind == "name" and text.lower() in _GROUPING:
            i = _after_grouping(tokens, i)
        elif kind == "name" and text.lower() not in _WORDS and not _is_call(tokens, i):
            selector, i = _selector(tokens, i, tuple(f for f in around if f and f not in _AGGREGATORS))
            out.append(selector)
        else:
            i += 1
    if around:
        raise ValueError(f"a parenthesis is not closed in {expr!r}")
    return out


def _is_call(tokens: list[tuple[str, str]], i: int) -> bool:
    following = tokens[i + 1][1] if i + 1 < len(tokens) else ""
    return following == "(" or (tokens[i][1] in _AGGREGATORS and following in _GROUPING)


def _after_grouping(tokens: list[tuple[str, str]], i: int) -> int:
    """Past ``by (a, b)`` and the like, when they stand at *i*."""
    while i < len(tokens) and tokens[i][0] == "name" and tokens[i][1].lower() in _GROUPING:
        i += 1
        if i < len(tokens) and tokens[i][1] == "(":
            while i < len(tokens) and tokens[i][1] != ")":
                i += 1
            i += 1
    return i


def _selector(tokens: list[tuple[str, str]], i: int, functions: tuple[str, ...]) -> tuple[Selector, int]:
    name, matchers, window = tokens[i][1], [], ""
    i += 1
    if i < len(tokens) and tokens[i][1] == "{":
        i += 1
        while i < len(tokens) and tokens[i][1] != "}":
            if tokens[i][1] == ",":
                i += 1
                continue
            if i + 2 >= len(tokens):
                raise ValueError(f"the selection of {name} does not end")
            matchers.append((tokens[i][1], tokens[i + 1][1], tokens[i + 2][1][1:-1]))
            i += 3
        i += 1
    if i < len(tokens) and tokens[i][1] == "[":
        start = i + 1
        while i < len(tokens) and tokens[i][1] != "]":
            i += 1
        window = "".join(text for _, text in tokens[start:i])
        i += 1
    return Selector(name, tuple(matchers), functions, window), i


def grouping_labels(expr: str) -> Iterator[str]:
    """Labels named in ``by``, ``on``, ``group_left`` and the like."""
    for words in re.findall(rf"\b(?:{'|'.join(sorted(_GROUPING))})\s*\(([^)]*)\)", expr):
        yield from (w.strip() for w in words.split(",") if w.strip())
