"""Pickles read as data: nothing is imported, called or looked up, whatever the bytes say.

``pickle.load`` runs what a file names. Here a name stays a :class:`Global`, a call stays a :class:`Call` with its
arguments, an outside reference stays a :class:`Persistent`; only plain values (numbers, text, lists, dicts) become
themselves. That is enough to read a checkpoint's ``.metadata`` and the ``data.pkl`` of a ``torch.save`` file, and no
byte sequence can make it do more. Only the opcodes of the protocols 2 to 5 are known.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from steadyrun.core.errors import SteadyrunError

__all__ = ["Call", "Global", "Persistent", "PickleError", "RefusedPickleError", "check_lengths", "read_pickle"]


class PickleError(SteadyrunError):
    """The bytes are no complete pickle, or use what is not read here."""


class RefusedPickleError(PickleError):
    """The pickle names something that has no business in it. Loading it with ``pickle`` might run that."""


@dataclass(frozen=True, slots=True)
class Global:
    """A name: ``torch.float32``."""

    name: str


@dataclass(frozen=True, slots=True)
class Persistent:
    """A reference to something outside of the pickle; a storage, in a ``torch.save`` file."""

    value: Any


@dataclass(slots=True, eq=False)
class Call:
    """What would be made by calling *name*, and what would be put into it then. Compared by identity."""

    name: str
    args: tuple[Any, ...]
    state: Any = None
    items: list[tuple[Any, Any]] = field(default_factory=list)  # obj[key] = value, in order
    elements: list[Any] = field(default_factory=list)  # obj.append(value), in order


_MARK: Final = object()
# Hashing these costs nothing; a tuple in a tuple in a tuple can be made to cost for ever.
_SCALAR_KEYS: Final = (str, int, float, bytes, type(None), Global, Call)


def read_pickle(data: bytes | memoryview, is_allowed: Callable[[str], bool] | None = None) -> Any:
    """The value in *data*, with names and calls as records.

    Args:
        data: the pickle; what follows its end is ignored.
        is_allowed: asked once for each dotted name in it; None allows all (they are only noted, never used).

    Raises:
        RefusedPickleError: *is_allowed* said no.
        PickleError: the bytes are damaged, or an opcode is not known.
    """
    machine = _Machine(bytes(data), is_allowed)
    try:
        return machine.run()
    except PickleError:
        raise
    except (IndexError, KeyError, ValueError, TypeError, struct.error, AttributeError, OverflowError) as e:
        raise PickleError(f"no valid pickle: {type(e).__name__} at byte {machine.at}") from e


def check_lengths(data: bytes) -> None:
    """Walk the opcodes of a pickle, six times as fast as ``read_pickle``, before ``pickle`` itself reads it.

    ``pickle`` believes every number: one flipped bit makes it ask for 30 GB of memory, for a list of what it has seen.

    Raises:
        PickleError: something is longer than the data, an opcode is not known, or the end mark is missing.
    """
    at, end, sizes = 0, len(data), _ARGUMENT_SIZES
    while at < end:
        code = data[at]
        size = sizes[code]
        at += 1
        if size >= 0:
            at += size
        elif size == _COUNTED:
            width = _COUNT_WIDTHS[code]
            at += width + int.from_bytes(data[at : at + width], "little")
        elif size == _PUT:
            if int.from_bytes(data[at : at + 4], "little") > at:
                raise PickleError(f"no valid pickle: a reference to nothing at byte {at}")
            at += 4
        elif size == _TWO_LINES:
            at = data.find(b"\n", data.find(b"\n", at) + 1) + 1
            if at == 0:
                break
        elif size == _STOP:
            return
        else:
            raise PickleError(f"no valid pickle: opcode {code:#04x} at byte {at - 1}")
    raise PickleError(f"no valid pickle: it ends after {end} bytes without its end mark")


class _Machine:
    """The stack machine of one pickle."""

    def __init__(self, data: bytes, is_allowed: Callable[[str], bool] | None) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.is_allowed = is_allowed
        self.names: dict[str, Global] = {}

    def run(self) -> Any:
        data, end = self.data, len(self.data)
        operations = _OPERATIONS
        while self.at < end:
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                return self.stack.pop()
            operation = operations.get(code)
            if operation is None:
                raise PickleError(f"no valid pickle: opcode {code:#04x} at byte {self.at - 1}")
            operation(self)
        raise PickleError(f"no valid pickle: it ends after {end} bytes without its end mark")

    # -- reading ---------------------------------------------------------------------------------------------------
    def take(self, size: int) -> bytes:
        start, stop = self.at, self.at + size
        if stop > len(self.data):
            raise PickleError(f"no valid pickle: cut off at byte {len(self.data)}")
        self.at = stop
        return self.data[start:stop]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def line(self) -> str:
        stop = self.data.index(b"\n", self.at)
        text = self.data[self.at : stop].decode()
        self.at = stop + 1
        return text

    def pop_to_mark(self) -> list[Any]:
        for i in range(len(self.stack) - 1, -1, -1):
            if self.stack[i] is _MARK:
                values = self.stack[i + 1 :]
                del self.stack[i:]
                return values
        raise PickleError(f"no valid pickle: no mark before byte {self.at}")

    # -- names, calls ----------------------------------------------------------------------------------------------
    def push_global(self, module: str, name: str) -> None:
        dotted = f"{module}.{name}"
        known = self.names.get(dotted)
        if known is None:
            if self.is_allowed is not None and not self.is_allowed(dotted):
                raise RefusedPickleError(f"names {dotted!r}, which does not belong there")
            known = self.names[dotted] = Global(dotted)
        self.stack.append(known)

    def call(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or not isinstance(args, tuple):
            raise PickleError(f"no valid pickle: a call of no name before byte {self.at}")
        self.stack.append(Call(function.name, args))

    def call_with_keywords(self) -> None:
        keywords = self.stack.pop()
        self.call()
        self.stack[-1].items.extend(keywords.items())

    def build(self) -> None:
        state = self.stack.pop()
        self.stack[-1].state = state  # of a Call; anything else has no such attribute, or is frozen

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if isinstance(target, Call):
                target.items.append((key, value))
            else:
                target[_key(key)] = value

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        (target.elements if isinstance(target, Call) else target).extend(values)

    def tuple_of(self, size: int) -> None:
        if size > len(self.stack):
            raise PickleError(f"no valid pickle: nothing to take before byte {self.at}")
        values = tuple(self.stack[-size:])
        del self.stack[-size:]
        self.stack.append(values)


def _key(key: Any) -> Any:
    if isinstance(key, _SCALAR_KEYS):
        return key
    if isinstance(key, tuple) and all(isinstance(k, _SCALAR_KEYS) for k in key):
        return key
    raise PickleError(f"a dict has a key of the kind {type(key).__name__}, which is not read here")


def _push(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    def operation(m: _Machine) -> None:
        m.stack.append(value(m))

    return operation


def _put(index: Callable[[_Machine], int]) -> Callable[[_Machine], None]:
    def operation(m: _Machine) -> None:
        m.memo[index(m)] = m.stack[-1]

    return operation


def _text(size: int) -> Callable[[_Machine], None]:
    return _push(lambda m: m.take(m.number(size)).decode("utf-8", "backslashreplace"))


def _bytes(size: int) -> Callable[[_Machine], None]:
    return _push(lambda m: m.take(m.number(size)))


def _long(size: int) -> Callable[[_Machine], None]:
    return _push(lambda m: int.from_bytes(m.take(m.number(size)), "little", signed=True))


def _stack_global(m: _Machine) -> None:
    name, module = m.stack.pop(), m.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise PickleError(f"no valid pickle: a name that is no text before byte {m.at}")
    m.push_global(module, name)


def _skip(size: int) -> Callable[[_Machine], None]:
    def operation(m: _Machine) -> None:
        m.take(size)

    return operation


def _pop(m: _Machine) -> None:
    m.stack.pop()


def _pop_mark(m: _Machine) -> None:
    m.pop_to_mark()


def _tuple(m: _Machine) -> None:
    m.stack.append(tuple(m.pop_to_mark()))


def _pair(m: _Machine) -> None:
    value, key = m.stack.pop(), m.stack.pop()
    m.set_items([key, value])


# Sets become lists and tuples: what is in them need not be hashed to be looked at.
_OPERATIONS: Final[dict[int, Callable[[_Machine], None]]] = {
    0x80: _skip(1),  # PROTO
    0x95: _skip(8),  # FRAME
    0x28: _push(lambda m: _MARK),
    0x30: _pop,
    0x31: _pop_mark,
    0x32: _push(lambda m: m.stack[-1]),  # DUP
    0x4E: _push(lambda m: None),
    0x88: _push(lambda m: True),
    0x89: _push(lambda m: False),
    0x4A: _push(lambda m: struct.unpack("<i", m.take(4))[0]),  # BININT
    0x4B: _push(lambda m: m.number(1)),
    0x4D: _push(lambda m: m.number(2)),
    0x8A: _long(1),
    0x8B: _long(4),
    0x47: _push(lambda m: struct.unpack(">d", m.take(8))[0]),  # BINFLOAT
    0x8C: _text(1),
    0x58: _text(4),
    0x8D: _text(8),
    0x55: _push(lambda m: m.take(m.number(1)).decode("latin-1")),  # SHORT_BINSTRING
    0x54: _push(lambda m: m.take(m.number(4)).decode("latin-1")),  # BINSTRING
    0x43: _bytes(1),
    0x42: _bytes(4),
    0x8E: _bytes(8),
    0x96: _bytes(8),  # BYTEARRAY8
    0x5D: _push(lambda m: []),
    0x7D: _push(lambda m: {}),
    0x8F: _push(lambda m: []),  # EMPTY_SET
    0x29: _push(lambda m: ()),
    0x74: _tuple,
    0x91: _tuple,  # FROZENSET
    0x85: lambda m: m.tuple_of(1),
    0x86: lambda m: m.tuple_of(2),
    0x87: lambda m: m.tuple_of(3),
    0x61: lambda m: m.append([m.stack.pop()]),
    0x65: lambda m: m.append(m.pop_to_mark()),
    0x90: lambda m: m.append(m.pop_to_mark()),  # ADDITEMS
    0x73: _pair,
    0x75: lambda m: m.set_items(m.pop_to_mark()),
    0x94: _put(lambda m: len(m.memo)),  # MEMOIZE
    0x71: _put(lambda m: m.number(1)),
    0x72: _put(lambda m: m.number(4)),
    0x68: _push(lambda m: m.memo[m.number(1)]),
    0x6A: _push(lambda m: m.memo[m.number(4)]),
    0x63: lambda m: m.push_global(m.line(), m.line()),
    0x93: _stack_global,
    0x52: _Machine.call,  # REDUCE
    0x81: _Machine.call,  # NEWOBJ
    0x92: _Machine.call_with_keywords,  # NEWOBJ_EX
    0x62: _Machine.build,
    0x51: _push(lambda m: Persistent(m.stack.pop())),  # BINPERSID
}

# For check_lengths: bytes after each opcode, or what else decides.
_COUNTED: Final = -1
_PUT: Final = -2
_TWO_LINES: Final = -3
_STOP: Final = -4
_UNKNOWN: Final = -5
_COUNT_WIDTHS: Final = {
    **dict.fromkeys((0x8A, 0x8C, 0x55, 0x43), 1),
    **dict.fromkeys((0x8B, 0x58, 0x54, 0x42), 4),
    **dict.fromkeys((0x8D, 0x8E, 0x96), 8),
}
_FIXED_SIZES: Final = {0x80: 1, 0x95: 8, 0x4A: 4, 0x4B: 1, 0x4D: 2, 0x47: 8, 0x71: 1, 0x68: 1, 0x6A: 4}
_ARGUMENT_SIZES: Final = tuple(
    _COUNTED
    if code in _COUNT_WIDTHS
    else {0x72: _PUT, 0x63: _TWO_LINES, 0x2E: _STOP}.get(
        code, _FIXED_SIZES.get(code, 0 if code in _OPERATIONS else _UNKNOWN)
    )
    for code in range(256)
)
