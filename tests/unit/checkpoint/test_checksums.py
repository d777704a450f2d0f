"""The checksums: equal to the reference implementations, in one piece or many."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from importlib import import_module, reload
from types import ModuleType

import pytest
import xxhash

DATA = bytes(range(256)) * 400 + b"tail"


@pytest.fixture(params=["isal", "zlib"])
def checksums(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module as it is where isal is installed, and where it is not."""
    module = import_module("steadyrun.checkpoint.checksums")
    if request.param == "isal":
        pytest.importorskip("isal")
        yield module
        return
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "isal", None)
        patch.setitem(sys.modules, "isal.isal_zlib", None)
        yield reload(module)
    reload(module)


@pytest.mark.parametrize("data", [b"", b"a", DATA, bytearray(DATA), memoryview(DATA)[3:70_001]])
def test_crc32_is_that_of_zlib(checksums: ModuleType, data: bytes) -> None:
    assert checksums.crc32(data) == zlib.crc32(data)


def test_crc32_goes_on_where_the_last_piece_ended(checksums: ModuleType) -> None:
    crc = 0
    for at in range(0, len(DATA), 1000):
        crc = checksums.crc32(memoryview(DATA)[at : at + 1000], crc)
    assert crc == zlib.crc32(DATA)


def test_xxh3_has_32_digits_and_is_the_same_in_pieces(checksums: ModuleType) -> None:
    whole = checksums.xxh3(DATA)
    hasher = checksums.Xxh3()
    for at in range(0, len(DATA), 777):
        hasher.update(memoryview(DATA)[at : at + 777])
    assert hasher.digest() == whole == xxhash.xxh3_128(DATA).hexdigest()
    assert len(whole) == checksums.XXH3_DIGITS


def test_xxh3_of_nothing_is_that_of_no_pieces(checksums: ModuleType) -> None:
    assert checksums.Xxh3().digest() == checksums.xxh3(b"")
