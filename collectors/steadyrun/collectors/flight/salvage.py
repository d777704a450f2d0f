"""Reading what a fast parser gives up on: dumps that were cut, damaged, or written in an unusual way.

torch writes a dump with a plain stream onto its final name. A rank that dies while it does, or a copy made meanwhile,
leaves the beginning of a dump: every entry up to the cut is whole. Pickles are replayed here by an interpreter of our
own, which knows only the opcodes that build plain values, and bounds what it builds; it can say where it stopped.
"""

from __future__ import annotations

import contextlib
import json
import struct
from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "MAX_CONTAINERS",
    "MAX_ENTRIES",
    "MAX_STRUCTURE_BYTES",
    "ForbiddenPickleError",
    "Replay",
    "TooMuchError",
    "replay_json",
    "replay_pickle",
]

# 60 times what the usual 2,000 entries have: 16,000 containers and 250 KB of opcodes.
MAX_CONTAINERS: Final = 1_000_000
MAX_STRUCTURE_BYTES: Final = 16 * 1024 * 1024  # all but texts
MAX_ENTRIES: Final = 200_000
_MAX_OPCODES: Final = 8_000_000
_MAX_DEPTH: Final = 64

_FORBIDDEN: Final = {
    ord("c"): "GLOBAL", ord("i"): "INST", ord("o"): "OBJ", ord("R"): "REDUCE", ord("b"): "BUILD", 0x81: "NEWOBJ",
    0x92: "NEWOBJ_EX", 0x93: "STACK_GLOBAL", ord("P"): "PERSID", ord("Q"): "BINPERSID", 0x82: "EXT1", 0x83: "EXT2",
    0x84: "EXT4",
}  # fmt: skip


class ForbiddenPickleError(ValueError):
    """The pickle asks for something to be imported or called; the text says what."""


class TooMuchError(ValueError):
    """The file would unfold into more than any dump holds."""


class _DamageError(ValueError):
    """The stream makes no sense from here on."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What could be read.

    Attributes:
        value: the whole, or what was complete before the stop.
        stop: why reading ended early, with the byte; empty when it did not.
    """

    value: Any
    stop: str = ""


# -- pickles -----------------------------------------------------------------------------------------------------------
_MARK: Final = object()
_INT2: Final = struct.Struct("<H").unpack_from
_INT4: Final = struct.Struct("<i").unpack_from
_UINT4: Final = struct.Struct("<I").unpack_from
_UINT8: Final = struct.Struct("<Q").unpack_from
_FLOAT: Final = struct.Struct(">d").unpack_from


def replay_pickle(data: bytes) -> Replay:
    """The value of a pickle of plain values, up to its end or to where it stops making sense.

    Keys become text and tuples of containers become lists, so that no hash costs more than its length.

    Raises:
        ForbiddenPickleError: it would import or call something.
        TooMuchError: more values than a dump can have.
    """
    machine = _Machine(data)
    try:
        return Replay(machine.run())
    except (IndexError, struct.error):
        return Replay(machine.unfinished(), f"cut at byte {len(data)}")
    except _DamageError as e:
        return Replay(machine.unfinished(), f"damaged at byte {machine.position}: {e}")


class _Machine:
    """Stack, memo and the marks; one run only."""

    def __init__(self, data: bytes) -> None:
        self.position = 0
        self._data = data
        self._stack: list[Any] = []
        self._marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._containers = 0

    def run(self) -> Any:
        """Interpret until STOP. IndexError or struct.error: the data ended."""
        data, memo = self._data, self._memo
        position = 0
        budget = _MAX_OPCODES
        stack = self._stack
        while True:
            self.position = position
            op = data[position]
            position += 1
            budget -= 1
            if budget < 0:
                raise TooMuchError(f"more than {_MAX_OPCODES} values")
            if op == 0x68:  # h BINGET
                stack.append(self._got(data[position]))
                position += 1
            elif op == 0x71:  # q BINPUT
                memo[data[position]] = self._top(stack)
                position += 1
            elif op == 0x4B:  # K BININT1
                stack.append(data[position])
                position += 1
            elif op == 0x4D:  # M BININT2
                stack.append(_INT2(data, position)[0])
                position += 2
            elif op == 0x28:  # ( MARK
                if len(self._marks) >= _MAX_DEPTH:
                    raise _DamageError("containers in containers beyond what a dump has")
                self._marks.append(stack)
                self._stack = stack = []
                self._count()
            elif op == 0x5D:  # ] EMPTY_LIST
                stack.append([])
                self._count()
            elif op == 0x7D:  # } EMPTY_DICT
                stack.append({})
                self._count()
            elif op == 0x65:  # e APPENDS
                items = stack
                stack = self._pop_mark()
                _extend(self._top(stack), items)
            elif op == 0x75:  # u SETITEMS
                items = stack
                stack = self._pop_mark()
                _set_items(self._top(stack), items)
            elif op == 0x58:  # X BINUNICODE
                position = self._text(position + 4, _UINT4(data, position)[0], stack)
            elif op == 0x4E:  # N NONE
                stack.append(None)
            elif op == 0x88 or op == 0x89:  # NEWTRUE, NEWFALSE
                stack.append(op == 0x88)
            elif op == 0x8A:  # LONG1
                size = data[position]
                if len(data) < position + 1 + size:
                    raise IndexError
                if size > 16:
                    raise _DamageError(f"a number of {size} bytes")
                stack.append(int.from_bytes(data[position + 1 : position + 1 + size], "little", signed=True))
                position += 1 + size
            elif op == 0x4A:  # J BININT
                stack.append(_INT4(data, position)[0])
                position += 4
            elif op == 0x86:  # TUPLE2
                self._tuple(stack, 2)
            elif op == 0x47:  # G BINFLOAT
                stack.append(_FLOAT(data, position)[0])
                position += 8
            elif op == 0x6A:  # j LONG_BINGET
                stack.append(self._got(_UINT4(data, position)[0]))
                position += 4
            elif op == 0x72:  # r LONG_BINPUT
                memo[_UINT4(data, position)[0]] = self._top(stack)
                position += 4
            elif op == 0x94:  # MEMOIZE
                memo[len(memo)] = self._top(stack)
            elif op == 0x8C:  # SHORT_BINUNICODE
                position = self._text(position + 1, data[position], stack)
            elif op == 0x61:  # a APPEND
                item = self._pop(stack)
                _extend(self._top(stack), (item,))
            elif op == 0x73:  # s SETITEM
                value, key = self._pop(stack), self._pop(stack)
                _set_items(self._top(stack), [key, value])
            elif op == 0x2E:  # . STOP
                return self._pop(stack)
            elif op == 0x80:  # PROTO
                position += 1
            elif op == 0x95:  # FRAME: only tells a size
                position += 8
            elif op == 0x85 or op == 0x87:  # TUPLE1, TUPLE3
                self._tuple(stack, 1 if op == 0x85 else 3)
            elif op == 0x29:  # ) EMPTY_TUPLE
                stack.append(())
            elif op == 0x74:  # t TUPLE
                items = stack
                stack = self._pop_mark()
                stack.append(_as_tuple(items))
                self._count()
            elif op == 0x8D:  # BINUNICODE8
                position = self._text(position + 8, _UINT8(data, position)[0], stack)
            elif op in _FORBIDDEN:
                raise ForbiddenPickleError(f"{_FORBIDDEN[op]}{_global_name(data, position, op)} at byte {position - 1}")
            else:
                raise _DamageError(f"opcode {op:#04x}")

    def _text(self, start: int, size: int, stack: list[Any]) -> int:
        if len(self._data) < start + size:
            raise IndexError
        stack.append(self._data[start : start + size].decode("utf-8", "replace"))
        return start + size

    def _count(self) -> None:
        self._containers += 1
        if self._containers > MAX_CONTAINERS:
            raise TooMuchError(f"more than {MAX_CONTAINERS} lists and mappings")

    def _got(self, index: int) -> Any:
        try:
            return self._memo[index]
        except KeyError:
            raise _DamageError(f"it uses memo {index}, which was never set") from None

    @staticmethod
    def _top(stack: list[Any]) -> Any:
        if not stack:
            raise _DamageError("a value is missing")
        return stack[-1]

    @staticmethod
    def _pop(stack: list[Any]) -> Any:
        if not stack:
            raise _DamageError("a value is missing")
        return stack.pop()

    def _pop_mark(self) -> list[Any]:
        if not self._marks:
            raise _DamageError("an end without its beginning")
        self._stack = self._marks.pop()
        return self._stack

    def _tuple(self, stack: list[Any], size: int) -> None:
        if len(stack) < size:
            raise _DamageError("a value is missing")
        stack[-size:] = [_as_tuple(stack[-size:])]
        self._count()

    def unfinished(self) -> Any:
        """The outermost value with all that was complete in it: half a mapping is dropped from a list, for half an
        entry is none; as a mapping's value it is kept, and so is half a list."""
        items = self._stack
        half = items[-1] if items and items[-1] == {} else None  # opened, and nothing in it yet
        while self._marks:
            outer = self._marks.pop()
            container = outer[-1] if outer else None
            if isinstance(container, list):
                if isinstance(half, dict) and items and items[-1] is half:
                    items = items[:-1]
                container.extend(items)
            elif isinstance(container, dict):
                with contextlib.suppress(_DamageError):
                    _set_items(container, items[: len(items) // 2 * 2])
            items, half = outer, container
        return items[0] if items else None


def _extend(target: Any, items: Any) -> None:
    if not isinstance(target, list):
        raise _DamageError("elements for what is no list")
    target.extend(items)


def _set_items(target: Any, items: list[Any]) -> None:
    if not isinstance(target, dict):
        raise _DamageError("items for what is no mapping")
    if len(items) % 2:
        raise _DamageError("a key without a value")
    for i in range(0, len(items), 2):
        key = items[i]
        if key.__class__ is not str:
            if key.__class__ is not int:
                raise _DamageError(f"a key of type {type(key).__name__}")
            key = str(key)
        target[key] = items[i + 1]


def _as_tuple(items: list[Any]) -> tuple[Any, ...] | list[Any]:
    return list(items) if any(isinstance(x, tuple | list | dict) for x in items) else tuple(items)


def _global_name(data: bytes, position: int, op: int) -> str:
    if op not in (ord("c"), ord("i")):
        return ""
    lines = data[position : position + 200].split(b"\n")[:2]
    return " " + ".".join(line.decode("ascii", "replace") for line in lines)


# -- JSON --------------------------------------------------------------------------------------------------------------
_SPACE: Final = " \t\r\n"


def replay_json(text: str) -> Replay:
    """The mapping a JSON text begins: every complete pair, and of a list that is cut every complete element."""
    decoder = json.JSONDecoder()
    out: dict[str, Any] = {}
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        return Replay(None, "it is no JSON object")
    at = _skip(text, at + 1)
    while at < len(text) and text[at] != "}":
        try:
            key, at = decoder.raw_decode(text, at)
            at = _skip(text, at)
            if not isinstance(key, str) or text[at : at + 1] != ":":
                return Replay(out, f"damaged at character {at}")
            at = _skip(text, at + 1)
        except (ValueError, RecursionError):
            return Replay(out, _json_stop(text, at))
        try:
            out[key], at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            if text[at : at + 1] == "[":
                out[key], at = _elements(text, at + 1, decoder)
            return Replay(out, _json_stop(text, at))
        at = _skip(text, at)
        if text[at : at + 1] == ",":
            at = _skip(text, at + 1)
    return Replay(out, "" if at < len(text) else _json_stop(text, at))


def _elements(text: str, at: int, decoder: json.JSONDecoder) -> tuple[list[Any], int]:
    out: list[Any] = []
    while True:
        at = _skip(text, at)
        try:
            item, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return out, at
        out.append(item)
        at = _skip(text, at)
        if text[at : at + 1] != ",":
            return out, at
        at += 1


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in _SPACE:
        at += 1
    return at


def _json_stop(text: str, at: int) -> str:
    return f"cut or damaged after character {min(at, len(text))} of {len(text)}"
