"""The journal: one JSON object a line, typed and versioned; appended by one agent, read by calibration and ctl."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from steadyrun.core.records import to_json

__all__ = ["Journal", "read_journal"]

VERSION = 1


class Journal:
    """Appends records; a full or vanished disk loses records (counted), never the job.

    Every record has ``v`` (version), ``type``, ``at_unix_s``, ``at_s`` (CLOCK_MONOTONIC), ``node``, ``attempt``.
    Types written by the agent: run_started, attempt_started, rank_started, rank_attached, steps (per rank: newest step,
    times of steps and sections since the last record; of very many the newest, the longest and a sum), rank_exited,
    suspicion, incident, attempt_ended, standby, signal, sweep, run_ended; integrity (event: checks, compared,
    differing, at_rest, rewritten, found, in_vain, verified, rolled_back, note); metrics (where they are served),
    device_sources (what is watched below the ranks), device_event (of the kernel or a GPU), device_health (a
    collector's, when it changes), checkpoint_loaded.

    Args:
        listener: hears each record as it is written, or would be were there space on the disk.
    """

    def __init__(self, path: Path, node: str, listener: Callable[[Mapping[str, Any]], None] | None = None) -> None:
        self._node, self._listener = node, listener
        self.lost = 0
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            self.lost += 1

    def write(self, type_: str, at_unix_s: float, at_s: float, attempt: int, **fields: Any) -> None:
        """Append one record; one write call, so that a reader sees whole lines."""
        record: dict[str, Any] = {"v": VERSION, "type": type_, "at_unix_s": round(at_unix_s, 6), "at_s": round(at_s, 6)}
        record.update(node=self._node, attempt=attempt, **{k: to_json(v) for k, v in fields.items()})
        if self._listener is not None:
            self._listener(record)
        line = json.dumps(record, separators=(",", ":")) + "\n"
        if self._fd is None:
            self.lost += 1
            return
        try:
            os.write(self._fd, line.encode())
        except OSError:
            self.lost += 1

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def read_journal(path: Path) -> Iterator[Mapping[str, Any]]:
    """Records of one journal in order; a cut or foreign line is skipped."""
    with path.open(encoding="utf-8", errors="replace") as f:
        for line in f:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "type" in record:
                yield record
