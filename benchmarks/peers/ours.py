"""steadyrun's own checkpointer, as a script uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import steadyrun.checkpoint.checkpointer  # noqa: F401  # as DCP, it is imported before anything is measured
from peers.base import Plain, Setting
from steadyrun import watch
from steadyrun.checkpoint.reading import load_folder


class Ours(Plain):
    """``watch.checkpointer``; with *memory* off, the ranks write by themselves and each save waits for the disk."""

    def __init__(self, setting: Setting, memory: bool = True) -> None:
        super().__init__(setting)
        self._checkpointer = watch.checkpointer(setting.folder, model=setting.state, every="365d", memory=memory)
        self._first = self._checkpointer.resume()
        self._newest: Any = None

    @property
    def resumed_from(self) -> str:
        return self._checkpointer.resumed_from

    @property
    def first_step(self) -> int:
        return self._first

    def stepped(self, step: int) -> None:
        self._checkpointer.step(step)

    def save(self, step: int) -> None:
        self._newest = self._checkpointer.save(step)

    def is_done(self) -> bool:
        if self._newest.failed or self._newest.skipped:
            raise RuntimeError(
                f"the save of step {self._newest.step} is {self._newest.state.value}: {self._newest.why}"
            )
        return bool(self._newest.durable)

    def load(self, step: int) -> None:
        """From the folder, verified; what ``resume`` does where there is no snapshot in memory."""
        load_folder(self.setting.path(step), self.setting.state_dict(), verify=True)

    def files(self, step: int) -> list[Path]:
        return [p for p in super().files(step) if p.suffix == ".distcp"]

    def close(self) -> None:
        self._checkpointer.close()
