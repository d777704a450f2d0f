"""Is this pickle built exactly as torch, or Python's own pickler, builds a dump?

A scanner for the few opcodes of honest dumps, as a grammar and with most of the work in regular expressions, so that it
costs about half of what loading does. What it accepts cannot make the C unpickler import or call anything, hang, or
take more memory than a small multiple of the file:

* every key of a mapping is a text or comes from the memo, where numbers are never put: no keys chosen to collide;
* no tuple holds a tuple: the hash of nested ones doubles with every level, or overflows the stack;
* a memo index is below a million: the unpickler allocates an array up to the largest one;
* the numbers of lists, mappings and opcodes are bounded.

It may refuse an honest file; ``salvage`` reads those.
"""

from __future__ import annotations

import re
import sys
from typing import Final

from steadyrun.collectors.flight.salvage import MAX_CONTAINERS, MAX_STRUCTURE_BYTES

__all__ = ["is_plain_dump"]

_MAX_DEPTH: Final = 16
_FILLED: Final = 0x41  # a list of one, its element read: APPEND must follow

# Pieces of the grammar. One opcode each; alternatives begin with different bytes, so there is one way to match, and
# giving up a part of it never helps: possessive where Python knows that, a third faster.
_ALL: Final = b"+" if sys.version_info >= (3, 11) else b""
_INDEX: Final = rb"..[\x00-\x0f]\x00"  # of LONG_BINPUT and LONG_BINGET
_PUT: Final = rb"(?:q.|r" + _INDEX + rb")"
_MAYBE_PUT: Final = _PUT + b"?" + _ALL
_GET: Final = rb"(?:h.|j" + _INDEX + rb")"
_NUMBER: Final = rb"K.|[N\x88\x89]|M..|\x8a\x08.{8}|J.{4}|\x8a\x07.{7}|\x8a\x06.{6}|\x8a\x05.{5}|\x8a\x04.{4}|G.{8}"
_ATOM: Final = rb"h.|" + _NUMBER + rb"|j" + _INDEX
_FEW: Final = b"{0,64}" + _ALL

# Lists of atoms and of such lists. Python's pickler puts everything into the memo and builds a list of one by APPEND.
_FLAT_LIST: Final = rb"\]" + _MAYBE_PUT + rb"(?:\((?:" + _ATOM + rb")" + _FEW + rb"e|(?:" + _ATOM + rb")a)" + _MAYBE_PUT
_ELEMENT: Final = rb"(?:" + _ATOM + rb"|" + _FLAT_LIST + rb")"
_LIST: Final = rb"\]" + _MAYBE_PUT + rb"(?:\(" + _ELEMENT + _FEW + rb"e|" + _ELEMENT + rb"a)" + _MAYBE_PUT
# Taken for an empty one only where what follows cannot be its element.
_EMPTY_LIST: Final = rb"\]" + _PUT + rb"?(?![(}\]qrXKMJN\x88\x89\x8aG])(?!" + _GET + rb"a)"

# A pair of an entry or a frame: the key from the memo, the value flat. Tuples: of two indices below 256, stored, if
# at all, at or above it. So one may hold a tuple stored below, which are looked at one by one, but none like itself.
_HIGH_PUT: Final = rb"r(?:.[^\x00][\x00-\x0f]|.\x00[\x01-\x0f])\x00"
_TUPLE: Final = rb"h.\x86(?:(?![qr])|" + _HIGH_PUT + rb")"
_PAIR: Final = (
    rb"h.(?:h.(?:" + _TUPLE + rb"|(?!X|j.{4}\x86|h.\x86))|K.|[N\x88\x89]|M..|\x8a\x08.{8}|" + _LIST + rb"|J.{4}|G.{8}"
    rb"|j" + _INDEX + rb"(?!X|" + _GET + rb"\x86)|" + _EMPTY_LIST + rb")"
)
_PAIRS: Final = rb"(?:" + _PAIR + rb")" + _FEW
_TEXT_NEXT: Final = rb"(?:(h.)(?=X))?"  # a key whose value is a text
_STEP: Final = re.compile(_PAIRS + _TEXT_NEXT, re.DOTALL)
_STEP_IN_LIST: Final = re.compile(
    _PAIRS + rb"(?:u" + _MAYBE_PUT + rb"\}" + _MAYBE_PUT + rb"\(" + _PAIRS + rb")?" + _TEXT_NEXT, re.DOTALL
)
_MAPPINGS: Final = re.compile(rb"(?:\}" + _MAYBE_PUT + rb"\(" + _PAIRS + rb"u" + _MAYBE_PUT + rb"){1,500}", re.DOTALL)
_ITEMS: Final = re.compile(rb"(?:" + _ATOM + rb"|" + _LIST + rb"){1,500}", re.DOTALL)
_ONE_PUT: Final = re.compile(_PUT, re.DOTALL)
_ONE_GET: Final = re.compile(_GET + rb"(?![qr])", re.DOTALL)
_ONE_NUMBER: Final = re.compile(_NUMBER, re.DOTALL)
_ONE_LIST: Final = re.compile(_LIST, re.DOTALL)
_STORED_TUPLE: Final = re.compile(rb"\x86r(.{4})", re.DOTALL)


def is_plain_dump(data: bytes) -> bool:
    """The unpickler may have it. False: it may be anything, also an honest dump written in another way."""
    if data[:2] != b"\x80\x02" or data[-1:] != b"." or data.count(b"]") + data.count(b"}") > MAX_CONTAINERS:
        return False
    try:
        return _Scanner(data).accepts()
    except (_OtherShapeError, IndexError):
        return False


class _OtherShapeError(Exception):
    """The file is read in another way."""


class _Scanner:
    """The position, and what encloses it: ``}`` a mapping, ``]`` a list, ``a`` one element for a list."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 2
        self._texts = 0  # bytes of texts
        self._low_tuples: set[int] = set()  # memo indices below 256
        self._high_tuples: set[int] | None = None  # at or above: all that there may be; looked for when needed

    def accepts(self) -> bool:
        data = self._data
        end = len(data) - 1
        stack: list[int] = []
        if data[self._at] != 0x7D:
            return False
        self._open(stack)
        while stack:
            if len(stack) > _MAX_DEPTH:
                return False
            kind = stack[-1]
            if kind == 0x7D:
                self._pairs(stack)
            elif kind == 0x5D:
                self._items(stack)
            else:
                self._one_item(stack)
        return self._at == end and end - self._texts < MAX_STRUCTURE_BYTES

    # -- containers ----------------------------------------------------------------------------------------------------
    def _open(self, stack: list[int]) -> None:
        """At ``}`` or ``]``: past it; on the stack if elements follow."""
        data = self._data
        kind = data[self._at]
        self._at += 1
        self._put()
        if data[self._at] == 0x28:
            self._at += 1
            stack.append(kind)
        elif kind == 0x5D and self._is_single_item():
            stack.append(0x61)
        # Else empty, or a mapping whose single pair follows as if it were one of the mapping around it.

    def _close(self, stack: list[int]) -> None:
        """Past the closing opcode. Another batch of elements may follow."""
        kind = stack.pop()
        self._at += 1
        self._put()
        if self._data[self._at] == 0x28:
            self._at += 1
            stack.append(kind)

    def _is_single_item(self) -> bool:
        """After an opened list without a mark: does one element and APPEND follow? Keys are told by what follows."""
        data, at = self._data, self._at
        if data[at] in b"}]":
            return True
        if data[at] == 0x58:
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
            if m := _ONE_PUT.match(data, at):
                at = m.end()
            return data[at] == 0x61
        if m := _ONE_GET.match(data, at):
            return data[m.end()] == 0x61
        return _ONE_NUMBER.match(data, at) is not None

    def _one_item(self, stack: list[int]) -> None:
        op = self._data[self._at]
        if stack[-1] == _FILLED:
            if op != 0x61:
                raise _OtherShapeError
            stack.pop()
            self._at += 1
            self._put()
            return
        stack[-1] = _FILLED
        if op in b"}]":
            self._open(stack)
        elif op == 0x58:
            self._text()
        elif m := _ONE_GET.match(self._data, self._at) or _ONE_NUMBER.match(self._data, self._at):
            self._at = m.end()
        else:
            raise _OtherShapeError

    def _items(self, stack: list[int]) -> None:
        data = self._data
        m = _MAPPINGS.match(data, self._at) or _ITEMS.match(data, self._at)
        if m:
            self._at = m.end()
        op = data[self._at]
        if op == 0x65:
            self._close(stack)
        elif op in b"}]":
            self._open(stack)
        elif op == 0x58:
            self._text()
        elif m is None:
            raise _OtherShapeError

    # -- pairs ---------------------------------------------------------------------------------------------------------
    def _pairs(self, stack: list[int]) -> None:
        """Pairs, until one whose value is a container, or to the end of the mapping; in a list, also of the next."""
        data = self._data
        step = (_STEP_IN_LIST if len(stack) > 1 and stack[-2] == 0x5D else _STEP).match
        while True:
            m = step(data, self._at)
            assert m is not None  # it can be empty
            empty = m.end() == self._at
            self._at = m.end()
            op = data[self._at]
            if op == 0x58:
                self._text()
                if m.lastindex:  # the value; the first of a tuple?
                    op = data[self._at]
                    if (op != 0x68 or data[self._at + 2] == 0x86) and op != 0x75 and self._next_is_pair():
                        self._second(None)
                    continue
            elif op == 0x75:
                self._close(stack)
                return
            elif op == 0x73:  # SETITEM: the pair before it belongs to the mapping before it
                self._at += 1
                continue
            elif get := _ONE_GET.match(data, self._at):
                self._at = get.end()
            elif empty:
                raise _OtherShapeError
            else:
                continue
            if self._value(stack):
                return

    def _value(self, stack: list[int]) -> bool:
        """The value after a key; True when a container was opened."""
        data = self._data
        op = data[self._at]
        if op == 0x58:
            self._text()
            if self._next_is_pair():
                self._second(None)
        elif op == 0x5D and (m := _ONE_LIST.match(data, self._at)):
            self._at = m.end()
        elif op == 0x7D or op == 0x5D:
            depth = len(stack)
            self._open(stack)
            return len(stack) > depth
        elif m := _ONE_GET.match(data, self._at):
            self._at = m.end()
            if self._next_is_pair():
                self._second(m)
        elif m := _ONE_NUMBER.match(data, self._at):
            self._at = m.end()
        else:
            raise _OtherShapeError
        return False

    def _next_is_pair(self) -> bool:
        """One more text or value from the memo, and TUPLE2."""
        data, at = self._data, self._at
        if data[at] == 0x58:
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
            if m := _ONE_PUT.match(data, at):
                at = m.end()
        elif m := _ONE_GET.match(data, at):
            at = m.end()
        else:
            return False
        return data[at] == 0x86

    def _second(self, first: re.Match[bytes] | None) -> None:
        """The second element of a tuple, TUPLE2 and its memo index; *first*: where the first is from, if not a text."""
        data = self._data
        second = None
        if data[self._at] == 0x58:
            self._text()
        else:
            second = _ONE_GET.match(data, self._at)
            if second is None:
                raise _OtherShapeError
            self._at = second.end()
        if any(get and self._is_tuple(get) for get in (first, second)):
            raise _OtherShapeError
        self._at += 1
        if m := _ONE_PUT.match(data, self._at):
            index = int.from_bytes(data[self._at + 1 : m.end()], "little")
            if index < 256:
                self._low_tuples.add(index)
            self._at = m.end()
            if _ONE_PUT.match(data, self._at):
                raise _OtherShapeError

    def _is_tuple(self, get: re.Match[bytes]) -> bool:
        index = int.from_bytes(self._data[get.start() + 1 : get.end()], "little")
        if index < 256:
            return index in self._low_tuples
        if self._high_tuples is None:
            self._high_tuples = {int.from_bytes(i, "little") for i in _STORED_TUPLE.findall(self._data)}
        return index in self._high_tuples

    def _text(self) -> None:
        start = self._at
        self._at += 5 + int.from_bytes(self._data[start + 1 : start + 5], "little")
        self._texts += self._at - start
        self._put()

    def _put(self) -> None:
        data, at = self._data, self._at
        op = data[at]
        if op == 0x71:
            self._at = at + 2
        elif op == 0x72:
            if data[at + 3] > 0x0F or data[at + 4]:
                raise _OtherShapeError
            self._at = at + 5
