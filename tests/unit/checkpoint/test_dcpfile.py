"""The metadata of a checkpoint, written without torch and read as data."""

from __future__ import annotations

from pathlib import Path

import pytest

from steadyrun.checkpoint.contents import FileInfo
from steadyrun.checkpoint.dcp import pieces_of, problems_of, read_metadata
from steadyrun.checkpoint.dcpfile import metadata_bytes
from steadyrun.checkpoint.layout import Entry, Layout, ObjectEntry, place, rank_key
from steadyrun.checkpoint.planning import plan
from steadyrun.checkpoint.shardfile import Placed, placed


def two_ranks() -> list[Layout]:
    out = []
    for rank in range(2):
        at = place([24, 4, 0])
        entries = (
            Entry("m.w", ("m", "w"), "float32", (4, 3), (2 * rank, 0), (2, 3), at[0], 24),
            Entry("m.s", ("m", "s"), "int32", (), (), (), at[1], 4),
            Entry("m.e", ("m", 0, "e"), "float8_e5m2", (0, 2), (0, 0), (0, 2), at[2], 0),
        )
        own = rank_key(rank, "rng")
        out.append(Layout(rank, 2, entries, (ObjectEntry("step", ("step",)), ObjectEntry(own, (own,)))))
    return out


def test_our_own_reader_finds_everything_where_it_was_put(tmp_path: Path) -> None:
    layouts = two_ranks()
    made = plan(layouts)
    storage = [placed(layouts[r], made.parts[r], [100] * len(made.parts[r].objects)) for r in range(2)]
    file = tmp_path / ".metadata"
    file.write_bytes(metadata_bytes(made, layouts, storage))
    found = read_metadata(file)
    shapes = {t.key: (t.dtype, t.shape, [(s.offsets, s.sizes) for s in t.shards]) for t in found.tensors}
    assert shapes == {
        "m.w": ("float32", (4, 3), [((0, 0), (2, 3)), ((2, 0), (2, 3))]),
        "m.s": ("int32", (), [((), ())]),
        "m.e": ("float8_e5m2", (0, 2), [((0, 0), (0, 2))]),
    }
    assert set(found.objects) == {"step", rank_key(0, "rng"), rank_key(1, "rng")}
    ends: dict[str, int] = {}
    for stored in found.stored.values():
        ends[stored.place.file] = max(ends.get(stored.place.file, 0), stored.place.end_bytes)
    files = [FileInfo(name, size, 0.0) for name, size in ends.items()]
    assert problems_of(found, files) == []
    assert len(pieces_of(found)) == 4 + 3
    # One after the other without a gap: the lengths of a file's pieces add up to the file.
    for name, end in ends.items():
        assert sum(s.place.length_bytes for s in found.stored.values() if s.place.file == name) == end


def test_what_was_not_planned_is_refused() -> None:
    layouts = two_ranks()
    made = plan(layouts)
    storage = [placed(layouts[r], made.parts[r], [1] * len(made.parts[r].objects)) for r in range(2)]
    with pytest.raises(ValueError, match="rank 1 wrote is not what it had to write"):
        metadata_bytes(made, layouts, [storage[0], Placed(storage[1].shards[1:], storage[1].objects)])
    with pytest.raises(ValueError, match="rank 0 wrote is not what it had to write"):
        metadata_bytes(made, layouts, [Placed(storage[0].shards), storage[1]])
    with pytest.raises(ValueError, match="the plan is for 2 ranks"):
        metadata_bytes(made, layouts, storage[:1])
