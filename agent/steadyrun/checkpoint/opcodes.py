"""Writes pickles without the classes that are in them, so that a process without torch can write what torch reads.

``pickle`` imports every name that it writes. Here a name is only text; the counterpart of ``pickles.read_pickle``. The
opcodes are those of protocol 2, which torch's own unpickler (``weights_only=True``) knows too.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

__all__ = ["PickleWriter"]

_MOST_BININT = 1 << 31


class PickleWriter:
    """Collects opcodes in the order in which their values go onto the reader's stack.

    Names, texts and sizes are written once and referred to afterwards.
    """

    def __init__(self) -> None:
        self._out = bytearray(b"\x80\x02")
        self._memo: dict[object, bytes] = {}

    def finish(self) -> bytes:
        """The pickle; the one value on the stack is its result."""
        return bytes(self._out + b".")

    # -- plain values ----------------------------------------------------------------------------------------------
    def text(self, value: str) -> None:
        known = self._memo.get(value)
        if known is not None:
            self._out += known
            return
        data = value.encode("utf-8", "surrogatepass")
        self._out += b"X" + struct.pack("<I", len(data)) + data
        self._put(value)

    def number(self, value: int) -> None:
        if 0 <= value < 256:
            self._out += b"K" + bytes((value,))
        elif 0 <= value < 65536:
            self._out += b"M" + struct.pack("<H", value)
        elif -_MOST_BININT <= value < _MOST_BININT:
            self._out += b"J" + struct.pack("<i", value)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self._out += b"\x8a" + bytes((len(data),)) + data

    def boolean(self, value: bool) -> None:
        self._out += b"\x88" if value else b"\x89"

    def none(self) -> None:
        self._out += b"N"

    # -- what is made of others ------------------------------------------------------------------------------------
    def mark(self) -> None:
        self._out += b"("

    def tuple_to_mark(self) -> None:
        self._out += b"t"

    def empty_tuple(self) -> None:
        self._out += b")"

    def numbers(self, values: Sequence[int]) -> None:
        """A tuple of them."""
        if not values:
            self.empty_tuple()
            return
        if len(values) > 3:
            self.mark()
        for value in values:
            self.number(value)
        self._out += b"t" if len(values) > 3 else (b"\x85", b"\x86", b"\x87")[len(values) - 1]

    def empty_list(self) -> None:
        self._out += b"]"

    def append_to_mark(self) -> None:
        self._out += b"e"

    def empty_dict(self) -> None:
        self._out += b"}"

    def set_items_to_mark(self) -> None:
        self._out += b"u"

    # -- names and calls -------------------------------------------------------------------------------------------
    def name(self, module: str, name: str) -> None:
        known = self._memo.get((module, name))
        if known is not None:
            self._out += known
            return
        self._out += f"c{module}\n{name}\n".encode()
        self._put((module, name))

    def call(self) -> None:
        """Calls the name below the tuple of arguments on the stack."""
        self._out += b"R"

    def new(self, module: str, name: str) -> None:
        """An object of that class, made without its ``__init__``."""
        self.name(module, name)
        self._out += b")\x81"

    def build(self) -> None:
        """Puts the state on the stack into the object below it."""
        self._out += b"b"

    def outside(self) -> None:
        """Makes the tuple on the stack a reference to something outside of the pickle."""
        self._out += b"Q"

    def is_known(self, value: object) -> bool:
        """Pushes what ``remember`` noted under *value*; False when there is none."""
        known = self._memo.get(value)
        if known is not None:
            self._out += known
        return known is not None

    def remember(self, value: object) -> None:
        """Notes the value on the stack, for ``is_known``."""
        self._put(value)

    def _put(self, value: object) -> None:
        number = len(self._memo)
        small = number < 256
        index = bytes((number,)) if small else struct.pack("<I", number)
        self._out += (b"q" if small else b"r") + index
        self._memo[value] = (b"h" if small else b"j") + index
