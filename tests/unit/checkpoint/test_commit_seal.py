"""The checksum that a manifest carries of itself."""

from __future__ import annotations

import json
import random

import pytest

from steadyrun.checkpoint.commit import open_manifest, seal_manifest
from steadyrun.checkpoint.manifest import FileRecord, Manifest, ManifestError, Verified


def manifest() -> Manifest:
    files = (FileRecord("__0_0.distcp", 4096), FileRecord(".metadata", 17, "ab" * 16))
    verified = Verified(2.5, "save")
    return Manifest(7, 2, "run", 1, 1.5, "2.13.0", "0.1", files, ("model",), verified=verified, skipped=((3, 5),))


def test_what_was_sealed_is_opened() -> None:
    data = seal_manifest(manifest())
    assert open_manifest(data) == manifest()
    assert json.loads(data)["xxh3"]


def test_every_flipped_bit_is_found() -> None:
    data = seal_manifest(manifest())
    random_ = random.Random(5)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << random_.randrange(8)
        with pytest.raises(ManifestError, match="is damaged"):
            open_manifest(bytes(damaged))


def test_every_cut_is_found() -> None:
    data = seal_manifest(manifest())
    for end in range(len(data)):
        with pytest.raises(ManifestError, match="is damaged"):
            open_manifest(data[:end])


def test_a_manifest_without_its_checksum_is_not_taken() -> None:
    with pytest.raises(ManifestError, match="its checksum is not at its end"):
        open_manifest(manifest().to_json().encode())
