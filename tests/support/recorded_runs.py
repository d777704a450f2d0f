"""Run folders whose journals tell of given durations, written by the journal's own code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steadyrun.core.journal import Journal
from steadyrun.core.records import Suspicion
from steadyrun.core.runfolder import RunFolder

T0 = 1_700_000_000.0
RECORD_S = 5.0


class RecordedRun:
    """A run of *ranks* ranks on one node each; times in seconds since its start."""

    def __init__(self, base: Path, ranks: int = 2, number: int = 0, nodes: int = 1) -> None:
        folder, message = RunFolder.create(base, f"job{number}", T0 + 3600 * number)
        assert message == ""
        self.folder = folder
        self.root = folder.root
        self.ranks = ranks
        self.start_unix_s = T0 + 3600 * number
        self.attempt = 0
        self._journals = [Journal(folder.journal(f"n{i}"), f"n{i}") for i in range(nodes)]
        for journal in self._journals:
            journal.write("run_started", self.start_unix_s, 0.0, 0, script="train.py", mode="act")

    def write(self, type_: str, at_s: float, node: int = 0, **fields: Any) -> None:
        self._journals[node].write(type_, self.start_unix_s + at_s, at_s, self.attempt, **fields)

    def begin(self, at_s: float, attempt: int = 0, first_step: int = 0, first_after_s: float = 2.0) -> None:
        """The ranks start, and do their first step *first_after_s* later."""
        self.attempt = attempt
        for rank in range(self.ranks):
            node = rank % len(self._journals)
            self.write("rank_started", at_s, node, rank=rank, local_rank=rank, pid=100 + rank, warm=False)
            self.write("rank_first_step", at_s + first_after_s, node, rank=rank, step=first_step)

    def steps(
        self,
        at_s: float,
        newest: int,
        times_s: Mapping[int, Sequence[float]],
        sections: Mapping[int, Mapping[str, Sequence[float]]] | None = None,
        lost: int = 0,
        left_out: int = 0,
    ) -> None:
        """One record per node; *left_out* of each section's durations are counted and not listed."""
        for node in range(len(self._journals)):
            told = {}
            for rank in (r for r in range(self.ranks) if r % len(self._journals) == node):
                own = dict((sections or {}).get(rank, {}))
                if not times_s.get(rank) and not own:
                    continue
                told[str(rank)] = {
                    "step": newest,
                    "step_times_s": list(times_s.get(rank, ())),
                    "steps": len(times_s.get(rank, ())),
                    "sections": {
                        n: {"n": len(d), "max_s": max(d), "durations_s": list(d)[left_out:]} for n, d in own.items()
                    },
                    "lost": lost,
                }
            if told:
                self.write("steps", at_s, node, ranks=told)

    def many_steps(
        self, from_s: float, times_s: Sequence[float], sections: Mapping[str, Sequence[float]] | None = None
    ) -> float:
        """All ranks take the same time, in records as the agent writes them; *sections* come in the last one."""
        at_s, spent_s, done = from_s, 0.0, 0
        batch: list[float] = []
        for i, time_s in enumerate(times_s):
            batch.append(time_s)
            spent_s += time_s
            is_last = i == len(times_s) - 1
            if spent_s >= RECORD_S or is_last:
                at_s, done, spent_s = at_s + spent_s, done + len(batch), 0.0
                own = {r: dict(sections or {}) for r in range(self.ranks)} if is_last else None
                self.steps(at_s, done, dict.fromkeys(range(self.ranks), batch), own)
                batch = []
        return at_s

    def hang(self, at_s: float, rank: int = 1, section: str | None = None, limit_s: float = 4.0) -> None:
        """A limit passes and the attempt is stopped."""
        kind = "section" if section else "no_progress"
        suspicion = Suspicion(rank, kind, section, at_s - limit_s, limit_s, True)
        self.write("suspicion", at_s, suspicion=suspicion, note="late")
        self.stop(at_s, "hang")

    def stop(self, at_s: float, trigger: str = "exit") -> None:
        self.write("stop", at_s, reason="a fault", trigger=trigger, origin=0, incident=1, delay_s=0.0)

    def live_limits(self, **limits: Any) -> None:
        """What the agent says of the limits it goes by."""
        self.folder.state.mkdir(exist_ok=True)
        (self.folder.state / "n0.json").write_text(
            json.dumps({"schema": "steadyrun.live/1", "node": "n0", "limits": limits})
        )

    def close(self) -> RecordedRun:
        for journal in self._journals:
            journal.close()
        return self
