"""The header of a safetensors file as we make it: layout, order, alignment, and what it refuses."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadyrun.checkpoint.contents import DTYPE_BITS
from steadyrun.checkpoint.safetensors import Described, make_header, read_header

DTYPES = ["bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2", "int16", "float16", "bfloat16"]
DTYPES += ["int32", "uint32", "float32", "int64", "uint64", "float64", "complex64", "uint16"]
TENSORS = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
    max_size=8,
)


def test_the_bytes_are_as_the_format_says() -> None:
    header = make_header([Described("b", "bfloat16", (2, 3)), Described("a", "float32", (2,))], {"format": "pt"})
    length = int.from_bytes(header.data[:8], "little")
    assert len(header.data) == 8 + length
    assert json.loads(header.data[8:]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [8, 20]},
    }
    assert header.places == {"a": (8 + length, 8), "b": (16 + length, 12)}
    assert header.file_bytes == 8 + length + 20


@settings(max_examples=30)
@given(TENSORS)
def test_our_reader_reads_what_was_made(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, object]) -> None:
    described = [Described(k, d, tuple(shape)) for k, (d, shape) in tensors.items()]  # type: ignore[misc]
    header = make_header(described, {})
    file = tmp_path_factory.mktemp("st") / "model.safetensors"
    file.write_bytes(header.data + bytes(header.file_bytes - len(header.data)))
    found = {t.key: t for t in read_header(file, file.name)}
    assert {k: (t.dtype, t.shape) for k, t in found.items()} == {d.key: (d.dtype, d.shape) for d in described}
    for key, (at, size_bytes) in header.places.items():
        place = found[key].shards[0].place
        assert place is not None
        assert (place.offset_bytes, place.length_bytes) == (at, size_bytes)
        assert at % (DTYPE_BITS[found[key].dtype] // 8) == 0


@pytest.mark.parametrize("dtype", ["complex128", "float8_e4m3fnuz", "qint8"])
def test_a_dtype_that_the_format_lacks_is_named(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"'w' of dtype {dtype}.*only the dtypes bfloat16, bool"):
        make_header([Described("w", dtype, (1,))], {})
