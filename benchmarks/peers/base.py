"""What every way of saving offers to benchmarks/checkpoint_rank.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from peers.state import Sharded


class Saver(Protocol):
    """One way of saving, on one rank. Every method is called by all ranks, in the same order."""

    def stepped(self, step: int) -> None:
        """A training step is done."""

    def save(self, step: int) -> None:
        """Returns when training may go on."""

    def is_done(self) -> bool:
        """The newest save has arrived. Raises when it failed."""

    def load(self, step: int) -> None:
        """Read that save from the folder into the state."""

    def files(self, step: int) -> list[Path]:
        """What was written, so that its page cache can be dropped."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Setting:
    """What a saver is made from."""

    state: Sharded
    folder: Path
    group: Any  # a gloo group of its own

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}"

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.state.state_dict()}


class Plain:
    """What most savers have in common."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def stepped(self, step: int) -> None:
        pass

    def is_done(self) -> bool:
        return True

    def files(self, step: int) -> list[Path]:
        return [p for p in self.setting.path(step).rglob("*") if p.is_file()]

    def close(self) -> None:
        pass
