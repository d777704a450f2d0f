"""Packages that join where they are installed: nvidia-resiliency-ext (0.4.1 was used) and torch_checkpointing (0.1.1).

Neither does what the others are held to, and the table says so: NVRx takes no snapshot of CPU tensors, so that what is
changed after the call is in the file; torch_checkpointing syncs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from peers.base import Plain, Setting
from peers.of_torch import DcpSave


def _without_cuda() -> None:
    """NVRx waits for CUDA, and votes on it, without asking whether there is any."""
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]


def _preload(preload: Callable[[], Any]) -> Any:
    """In NVRx's worker process."""
    _without_cuda()
    return preload()


class Nvrx(DcpSave):
    """Its asynchronous writer of DCP folders, with the worker process that stays."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        _without_cuda()
        self._queue = AsyncCallsQueue(persistent=True)

    def save(self, step: int) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync
        from nvidia_resiliency_ext.checkpointing.async_ckpt.state_dict_saver import (
            save_state_dict_async_finalize,
            save_state_dict_async_plan,
        )

        folder = self.setting.path(step)
        folder.mkdir(parents=True, exist_ok=True)
        writer = FileSystemWriterAsync(folder, thread_count=1)
        planned = save_state_dict_async_plan(
            self.setting.state_dict(), writer, self.setting.group, 0, planner=dcp.DefaultSavePlanner()
        )
        function, preload, arguments = writer.get_save_function_and_args()
        finish = [lambda: save_state_dict_async_finalize(*planned)]
        self._queue.schedule_async_request(
            AsyncRequest(function, arguments, finish, async_fn_kwargs={}, preload_fn=partial(_preload, preload))
        )

    def is_done(self) -> bool:
        return bool(self._queue.maybe_finalize_async_calls(blocking=False, no_dist=False))

    def close(self) -> None:
        self._queue.close()


class TorchCheckpointing(Plain):
    """Its manager with a writer process; direct I/O off, which fails on ext4 in 0.1.1."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.barriers import TCPStoreBarrierConfig
        from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        barrier = TCPStoreBarrierConfig(
            master_address="127.0.0.1",
            tcpstore_port=int(os.environ["BENCH_PORT"]),
            timeout_barrier_init_sec=60,
            use_checkpoint_barrier_tcpstore_libuv=True,
        )
        save = AsyncCheckpointSaverConfig(
            staging_config=CheckpointStagerConfig(
                use_pinned_memory=False, use_non_blocking_copy=False, use_async_staging=False
            ),
            writer_config=CheckpointWriterConfig(barrier_config=barrier),
        )
        self._manager = CheckpointManager(
            CheckpointManager.Config(storage_config=LocalFileSystemStorageConfig(use_direct_io=False), save=save)
        )
        self._newest: Any = None

    def save(self, step: int) -> None:
        local = {f"weight{i}": t for i, t in enumerate(self.setting.state.locals)}
        self._newest = self._manager.save(str(self.setting.path(step)), {"model": local})

    def is_done(self) -> bool:
        if not self._newest.done():
            return False
        self._newest.result()
        return True

    def load(self, step: int) -> None:
        """The rank's own file, with torch.load: what is compared is the content."""
        found = torch.load(self._own_file(step), weights_only=True)
        for i, mine in enumerate(self.setting.state.locals):
            mine.copy_(found[f"weight{i}"])

    def _own_file(self, step: int) -> Path:
        return self.setting.path(step) / f"model_{dist.get_rank()}.pt"

    def close(self) -> None:
        self._manager.close()
