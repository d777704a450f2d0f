"""The helper of the floor: writes memory to the file that each line names, syncs it, and answers."""

from __future__ import annotations

import mmap
import os
import sys

PIECE_BYTES = 8 << 20


def write(path: str, memory: mmap.mmap, direct: bool) -> None:
    view = memoryview(memory)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
    except OSError:  # tmpfs refuses direct I/O on older kernels
        fd = os.open(path, flags, 0o600)
    try:
        for at in range(0, len(view), PIECE_BYTES):
            piece = view[at : at + PIECE_BYTES]
            while piece:
                written = os.pwrite(fd, piece, at)
                piece, at = piece[written:], at + written
        os.fsync(fd)
    finally:
        os.close(fd)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def main() -> None:
    fd, size_bytes, direct = (int(a) for a in sys.argv[1:4])
    memory = mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        write(line.rstrip("\n"), memory, bool(direct))
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
