"""One rank's snapshot without torch: bytes whose values tell where they belong. For tests of files and faults."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

from steadyrun.checkpoint.layout import Entry, Layout, ObjectEntry, place
from steadyrun.checkpoint.planning import plan
from steadyrun.checkpoint.shardfile import Progress, WriteOptions, Written, write_rank_files

MIB = 1 << 20


class PlainRank:
    """Tensors ``t0``, ``t1``, ... of the given lengths in bytes, and an object ``o``."""

    def __init__(self, sizes_bytes: Sequence[int], blob: bytes = b"an object") -> None:
        at = place(sizes_bytes)
        entries = tuple(
            Entry(f"t{i}", (f"t{i}",), "uint8", (size,), (0,), (size,), begin, size)
            for i, (size, begin) in enumerate(zip(sizes_bytes, at, strict=True))
        )
        self.layout = Layout(0, 1, entries, (ObjectEntry("o", ("o",)),))
        self.blob = blob
        self.payload = memoryview(mmap.mmap(-1, max(self.layout.payload_bytes, 4096)))
        for number in range(len(self.payload) // 4096):
            self.payload[number * 4096 : number * 4096 + 8] = number.to_bytes(8, "little")

    def bytes_of(self, entry: Entry) -> memoryview:
        return self.payload[entry.at_bytes : entry.at_bytes + entry.size_bytes]

    def write(
        self,
        folder: Path,
        options: WriteOptions = WriteOptions(),  # noqa: B008 - frozen
        progress: Progress | None = None,
    ) -> Written:
        (part,) = plan([self.layout]).parts
        return write_rank_files(folder, self.layout, part, self.bytes_of, [self.blob], options, progress)

    def is_in(self, folder: Path, written: Written) -> bool:
        """Whether every tensor and the object can be found in the files where *written* says."""
        tensors = (folder / "__0_0.distcp").read_bytes()
        own = {entry.key: self.bytes_of(entry) for entry in self.layout.entries}
        shards = all(
            tensors[s.payload_at_bytes : s.payload_at_bytes + s.payload_bytes] == own[s.key]
            for s in written.fragment.shards
        )
        return shards and (folder / "__0_1.distcp").read_bytes() == self.blob
