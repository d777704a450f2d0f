"""The least that a save can cost: one copy into memory that is there already, and one write with fsync by a helper.

Neither checks anything, says what it wrote, or survives anything.
"""

from __future__ import annotations

import mmap
import os
import select
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from peers.base import Plain, Setting

PAGE_BYTES = 4096


class Floor(Plain):
    """Copy, then a helper process writes the copy to one file. The memory is made before the first save."""

    def __init__(self, setting: Setting, direct: bool = False) -> None:
        super().__init__(setting)
        size_bytes = -(-setting.state.local_bytes // PAGE_BYTES) * PAGE_BYTES
        fd = os.memfd_create("floor")
        os.ftruncate(fd, size_bytes)
        self._memory = mmap.mmap(fd, size_bytes)
        for at in range(0, size_bytes, PAGE_BYTES):
            self._memory[at] = 0
        self._views: list[Tensor] = []
        at = 0
        for local in setting.state.locals:
            self._views.append(torch.frombuffer(self._memory, dtype=local.dtype, count=local.numel(), offset=at))
            at += local.nbytes
        self._helper = subprocess.Popen(
            [
                sys.executable,
                "-S",
                str(Path(__file__).with_name("floor_writer.py")),
                str(fd),
                str(size_bytes),
                str(int(direct)),
            ],
            pass_fds=(fd,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        os.close(fd)
        assert self._helper.stdout is not None
        self._helper.stdout.readline()  # it has mapped the memory
        self._is_done = True

    def save(self, step: int) -> None:
        for view, local in zip(self._views, self.setting.state.locals, strict=True):
            view.copy_(local.view(-1))
        assert self._helper.stdin is not None
        self._helper.stdin.write(f"{self.setting.path(step) / str(dist.get_rank())}\n".encode())
        self._helper.stdin.flush()
        self._is_done = False

    def is_done(self) -> bool:
        assert self._helper.stdout is not None
        if not self._is_done and select.select([self._helper.stdout], [], [], 0)[0]:
            answer = self._helper.stdout.readline()
            if answer != b"done\n":
                raise RuntimeError(f"the floor's helper ended: {answer!r}")
            self._is_done = True
        return self._is_done

    def load(self, step: int) -> None:
        with (self.setting.path(step) / str(dist.get_rank())).open("rb") as f:
            for local in self.setting.state.locals:
                f.readinto(memoryview(local.view(-1).numpy()).cast("B"))

    def close(self) -> None:
        assert self._helper.stdin is not None
        self._helper.stdin.close()
        self._helper.wait()
