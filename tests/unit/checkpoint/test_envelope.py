"""Envelopes: archives that the standard library's zipfile and our own reader take as torch's."""

from __future__ import annotations

import io
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.checkpoint.checksums import crc32
from steadyrun.checkpoint.envelope import Envelope, envelope, is_storable
from steadyrun.checkpoint.torchzip import read_records, stored_value

GIB = 1 << 30


def archive(around: Envelope, payload: bytes) -> bytes:
    return around.prefix + payload + around.suffix(crc32(payload))


class Hollow(io.RawIOBase):
    """An archive whose payload is zeros that are not there."""

    def __init__(self, around: Envelope, crc: int) -> None:
        self.around = around
        self.suffix = around.suffix(crc)
        self.at = 0

    def read_at(self, offset: int, size: int) -> bytes:
        size = min(size, self.around.length_bytes - offset)
        begin, behind = len(self.around.prefix), len(self.around.prefix) + self.around.payload_bytes
        out = b""
        while size > 0:
            if offset < begin:
                part = self.around.prefix[offset : offset + size]
            elif offset < behind:
                part = bytes(min(size, behind - offset))
            else:
                part = self.suffix[offset - behind : offset - behind + size]
            out += part
            offset += len(part)
            size -= len(part)
        return out

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.around.length_bytes)[whence]
        return self.at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read_at(self.at, len(buffer))
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 40), st.lists(st.integers(0, 6), max_size=4))
def test_payload_begins_on_a_page_of_the_file_wherever_the_archive_does(at_bytes: int, sizes: list[int]) -> None:
    size_bytes = 2
    for n in sizes:
        size_bytes *= n
    payload = bytes(i % 251 for i in range(size_bytes))
    around = envelope("bfloat16", sizes, size_bytes, at_bytes)
    data = archive(around, payload)
    assert len(data) == around.length_bytes
    assert len(around.prefix) == around.prefix_bytes
    assert len(around.suffix(0)) == around.suffix_bytes
    assert not payload or (at_bytes + around.prefix_bytes) % 4096 == 0
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert file.testzip() is None
        assert file.namelist() == ["archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/0"]
        assert file.read("archive/data/0") == payload
    tensor = stored_value(zipfile.ZipFile(io.BytesIO(data)).read("archive/data.pkl")).tensors[0]
    assert (tensor.dtype, tensor.shape, tensor.record) == ("bfloat16", tuple(sizes), "data/0")


def test_a_flipped_bit_is_what_the_stored_checksum_is_for() -> None:
    payload = bytes(range(256)) * 8
    data = bytearray(archive(envelope("uint8", (2048,), 2048, 0), payload))
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert file.testzip() is None
    data[4096 + 77] ^= 4
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert file.testzip() == "archive/data/0"


@pytest.mark.parametrize(
    "size_bytes", [4 * GIB - 5000, 4 * GIB - 400, 4 * GIB - 2, 4 * GIB - 1, 4 * GIB, 300 * GIB + 7]
)
def test_sizes_beyond_32_bits_are_read_back(size_bytes: int) -> None:
    around = envelope("uint8", (size_bytes,), size_bytes, 12345)
    assert len(around.suffix(0xDEADBEEF)) == around.suffix_bytes
    assert len(around.prefix) == around.prefix_bytes
    hollow = Hollow(around, 0xDEADBEEF)
    with zipfile.ZipFile(io.BufferedReader(hollow)) as file:
        info = file.getinfo("archive/data/0")
        assert (info.file_size, info.compress_size, info.CRC) == (size_bytes, size_bytes, 0xDEADBEEF)
    record = read_records(hollow.read_at, around.length_bytes)[-1]
    assert (record.offset_bytes, record.size_bytes) == (around.prefix_bytes, size_bytes)
    assert (12345 + record.offset_bytes) % 4096 == 0


@pytest.mark.parametrize("dtype", ["qint8", "quint4x2", "bits8", "str", "float32; import os", ""])
def test_what_plain_bytes_cannot_hold_is_refused(dtype: str) -> None:
    assert not is_storable(dtype)
    with pytest.raises(ValueError, match="cannot be stored as plain bytes"):
        envelope(dtype, (1,), 1, 0)
