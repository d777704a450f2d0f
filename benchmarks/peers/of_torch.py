"""torch.save, and torch.distributed.checkpoint in its synchronous and asynchronous forms."""

from __future__ import annotations

import os
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from peers.base import Plain, Setting


class TorchSave(Plain):
    """A file per rank, synced."""

    def save(self, step: int) -> None:
        folder = self.setting.path(step)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"rank{dist.get_rank()}.pt").open("wb") as f:
            torch.save(self.setting.state.locals, f)
            f.flush()
            os.fsync(f.fileno())
        dist.barrier()

    def load(self, step: int) -> None:
        found = torch.load(self.setting.path(step) / f"rank{dist.get_rank()}.pt", weights_only=True)
        for mine, loaded in zip(self.setting.state.locals, found, strict=True):
            mine.copy_(loaded)


class DcpSave(Plain):
    def save(self, step: int) -> None:
        dcp.save(self.setting.state_dict(), checkpoint_id=self.setting.path(step), process_group=self.setting.group)

    def load(self, step: int) -> None:
        dcp.load(self.setting.state_dict(), checkpoint_id=self.setting.path(step), process_group=self.setting.group)


class DcpAsync(DcpSave):
    """``dcp.async_save`` in a thread or a process; with a stager made anew for each save, or one that stays."""

    def __init__(self, setting: Setting, in_process: bool = False, reuse: bool = True) -> None:
        super().__init__(setting)
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self._options: dict[str, Any] = {}
        if in_process:
            self._options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        if reuse:
            # No pinned memory, no staging thread, no CUDA stream; shared memory only for the process.
            self._options["async_stager"] = DefaultStager(StagingOptions(False, in_process, False, False))
        self._newest: Future[Any] | None = None

    def save(self, step: int) -> None:
        response = dcp.async_save(
            self.setting.state_dict(),
            checkpoint_id=self.setting.path(step),
            process_group=self.setting.group,
            **self._options,
        )
        self._newest = getattr(response, "upload_completion", response)

    def is_done(self) -> bool:
        assert self._newest is not None
        if not self._newest.done():
            return False
        self._newest.result()
        return True
