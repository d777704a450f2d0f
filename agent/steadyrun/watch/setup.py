"""What a rank or a standby is told by its agent, read from JSON."""

from __future__ import annotations

import os

from steadyrun.watch.jsontext import parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__all__ = ["Orders", "RankSetup", "StandbySetup"]


def local_path(text: object) -> str:
    """A path from the agent, which speaks UTF-8, in the encoding of this interpreter (ASCII under LC_ALL=C, say)."""
    return os.fsdecode(str(text).encode("utf-8", "surrogateescape"))


class RankSetup:
    """STEADYRUN_SETUP: which slot of which board is this rank's, and where its evidence goes.

    Attributes:
        board: path of the board's file.
        deadman_s: stacks are written when no step and no beat came for so long; 0 or less: never.
        faults: a fault plan, or empty.
        flight: the flight recorder's variables that the launcher has set itself; None: leave the recorder alone.
        loaded_report: file for ``LoadedReport``, or None.
        sdc: steps between checks of the bytes that the rank holds; 0: none; None: what their cost allows.
        sdc_replay: steps between replays of microbatches, as ``sdc``.
        saver: the socket of the node's saver, or None.
        stack_signal: number of the signal that makes the rank write its stacks.
        timing: tell how long each step's own work took.
    """

    __slots__ = (
        "attempt",
        "board",
        "deadman_s",
        "faults",
        "flight",
        "loaded_report",
        "rank",
        "rank_dir",
        "run_id",
        "saver",
        "sdc",
        "sdc_replay",
        "slot",
        "stack_signal",
        "timing",
    )

    def __init__(self, data: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError when a field is missing or of a wrong type."""
        self.board = local_path(data["board"])
        self.slot = int(data["slot"])
        self.rank = int(data["rank"])
        self.attempt = int(data["attempt"])
        self.rank_dir = local_path(data["rank_dir"])
        self.deadman_s = float(data.get("deadman_s") or 0)
        self.faults = str(data.get("faults") or "")
        flight = data.get("flight")
        self.flight = None if flight is None else {str(k): str(v) for k, v in flight.items()}
        self.run_id = str(data.get("run_id", ""))
        report = data.get("loaded_report")
        self.loaded_report = local_path(report) if report else None
        saver = data.get("saver")
        self.saver = local_path(saver) if saver else None
        sdc = data.get("sdc", 0)
        self.sdc = None if sdc is None else max(int(sdc), 0)
        replay = data.get("sdc_replay", 0)
        self.sdc_replay = None if replay is None else max(int(replay), 0)
        self.stack_signal = int(data.get("stack_signal") or 0)
        self.timing = bool(data.get("timing", True))

    @classmethod
    def parse(cls, text: str) -> RankSetup:
        return cls(parse(text))


class StandbySetup:
    """STEADYRUN_STANDBY: what to import, and where orders come from.

    Attributes:
        fd: orders are read here; end-of-file means: leave.
        ready_fd: a byte goes here once everything is imported; -1: nobody wants to know.
        preload: modules to import, in order.
        preset_env: variables to set during the imports; None: unset.
    """

    __slots__ = ("fd", "preload", "preset_env", "ready_fd")

    def __init__(self, data: dict[str, Any]) -> None:
        self.fd = int(data["fd"])
        self.ready_fd = int(data.get("ready_fd", -1))
        self.preload = [str(name) for name in data.get("preload") or ()]
        preset = data.get("preset_env") or {}
        self.preset_env = {str(k): None if v is None else str(v) for k, v in preset.items()}

    @classmethod
    def parse(cls, text: str) -> StandbySetup:
        return cls(parse(text))


class Orders:
    """One line that makes a standby a rank.

    Attributes:
        env: the whole environment the script is to see, as bytes.
        setup: as in STEADYRUN_SETUP.
        stdout, stderr: files to append to, or None to keep what the standby has.
        cwd: working folder, or None to keep it.
    """

    __slots__ = ("cwd", "env", "setup", "stderr", "stdout")

    def __init__(self, data: dict[str, Any]) -> None:
        escape = "surrogateescape"  # bytes that are no UTF-8 travel as lone surrogates
        self.env = {k.encode("utf-8", escape): v.encode("utf-8", escape) for k, v in data["env"].items()}
        self.setup = RankSetup(data["setup"])
        self.stdout, self.stderr, self.cwd = (
            None if data.get(key) is None else local_path(data[key]) for key in ("stdout", "stderr", "cwd")
        )

    @classmethod
    def parse(cls, text: str) -> Orders:
        return cls(parse(text))
