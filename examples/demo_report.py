"""What the demonstration's run folder and loss log say; exit code 0 when everything ended as it should.

Checked: the launcher's exit code, one incident for each fault that struck, verdicts that name the ranks that were hit,
restarts from memory that lose at most one interval between saves, bitwise equal losses of all steps that were done
twice, complete checkpoints at the end, and a loss that went down.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadyrun.checkpoint.catalog import look


@dataclass(frozen=True, slots=True)
class Restart:
    """One fault and how the job came back from it; times in seconds of CLOCK_MONOTONIC."""

    fault: Mapping[str, Any]
    verdict: Mapping[str, Any] | None
    back_s: float | None
    steps_lost: int | None
    warm: bool
    resumed_from: str

    @property
    def seconds_lost(self) -> float | None:
        return None if self.back_s is None else self.back_s - float(self.fault["at_s"])


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of a file that a killed process may have left half written."""
    for line in path.read_text(errors="replace").splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def restarts_of(run: Path, losses: list[dict[str, Any]]) -> list[Restart]:
    journal = [r for file in sorted((run / "journal").glob("*.jsonl")) for r in json_lines(file)]
    noted = [f for file in run.glob("attempts/*/rank_*/faults.jsonl") for f in json_lines(file)]
    faults: dict[tuple[int, str], dict[str, Any]] = {}
    for note in noted:  # a fault may be noted again with what it left
        faults.setdefault((note["attempt"], note["text"]), note)
    verdicts = {v["attempt"]: v for v in (json.loads(f.read_text()) for f in run.glob("incidents/*/verdict.json"))}
    found = []
    for fault in sorted(faults.values(), key=lambda f: float(f["at_s"])):
        attempt = int(fault["attempt"])
        first_steps = [r for r in journal if r["type"] == "rank_first_step" and r["attempt"] == attempt + 1]
        started = [r for r in journal if r["type"] == "rank_started" and r["attempt"] == attempt + 1]
        restored = [r for r in journal if r["type"] == "checkpoint_restored" and r["attempt"] == attempt + 1]
        is_back = bool(started) and len(first_steps) == len(started)
        back_unix_s = min((float(r["at_unix_s"]) for r in first_steps), default=0.0)
        before = [line["step"] for line in losses if line["at_unix_s"] < back_unix_s]
        after = [line["step"] for line in losses if line["at_unix_s"] >= back_unix_s]
        found.append(
            Restart(
                fault=fault,
                verdict=verdicts.get(attempt),
                back_s=max(float(r["at_s"]) for r in first_steps) if is_back else None,
                steps_lost=before[-1] + 1 - after[0] if is_back and before and after else None,
                warm=all(r["warm"] for r in started),
                resumed_from=str(restored[-1]["source"]) if restored else "",
            )
        )
    return found


def describe(restart: Restart) -> Iterator[str]:
    fault, verdict = restart.fault, restart.verdict
    yield f"fault: {fault['name']} of rank {fault['rank']} after step {fault['step']}"
    if verdict is None or not verdict["findings"]:
        yield "  no verdict"
    else:
        first = verdict["findings"][0]
        yield f"  verdict       {first['class']}, rank {', '.join(map(str, first['ranks']))}: {first['summary']}"
        yield f"  victims       {verdict['victims']}; action: {verdict['action']}"
    if restart.seconds_lost is None:
        yield "  the job did not come back"
        return
    how = "warm standbys" if restart.warm else "new interpreters"
    yield f"  time lost     {restart.seconds_lost:.2f} s from the fault to the first new step of all ranks ({how})"
    yield f"  steps lost    {restart.steps_lost}, done again from the newest snapshot (source: {restart.resumed_from})"


def complaints(
    restarts: list[Restart], losses: Mapping[int, list[float]], exit_code: int, every: int, complete: list[int]
) -> Iterator[str]:
    if exit_code != 0:
        yield f"steadyrun ended with exit code {exit_code}"
    if len(restarts) != 2:
        yield f"{len(restarts)} faults struck, expected 2"
    for restart in restarts:
        named = [] if restart.verdict is None else [r for f in restart.verdict["findings"][:1] for r in f["ranks"]]
        if named != [restart.fault["rank"]]:
            yield f"the verdict on {restart.fault['name']} names {named}, expected [{restart.fault['rank']}]"
        if restart.back_s is None:
            yield f"no restart after {restart.fault['name']}"
        if restart.resumed_from != "memory":
            source = restart.resumed_from or "nowhere"
            yield f"the restart after {restart.fault['name']} resumed from {source}, not from memory"
        if restart.steps_lost is not None and restart.steps_lost > every:
            yield f"{restart.steps_lost} steps were lost, more than the {every} between two saves"
    if not complete:
        yield "no complete checkpoint is left"
    for step, seen in losses.items():
        if len(set(seen)) > 1:
            yield f"the loss of step {step} differs when it is done again: {seen}"
    if losses and not losses[max(losses)][-1] < losses[min(losses)][0]:
        yield "the loss did not go down"
    if sorted(losses) != list(range(len(losses))) or not losses:
        yield f"steps are missing: {len(losses)} in the log, newest {max(losses, default=None)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the folder given to train_gpt.py; the run folder is in its runs/")
    parser.add_argument("--every", type=int, default=20, help="steps between saves (default 20)")
    parser.add_argument("--exit-code", type=int, required=True, help="what steadyrun ended with")
    arguments = parser.parse_args()
    log = arguments.out / "loss.jsonl"
    lines = list(json_lines(log)) if log.exists() else []
    losses: dict[int, list[float]] = {}
    for line in lines:
        losses.setdefault(line["step"], []).append(line["loss"])
    restarts = restarts_of(arguments.out / "runs" / "latest", lines)
    if losses:
        first, last = min(losses), max(losses)
        print(f"loss: {losses[first][0]:.4f} at step {first}, {losses[last][-1]:.4f} at step {last}")
    twice = {step: seen for step, seen in losses.items() if len(seen) > 1}
    if twice:
        equal = sum(len(set(seen)) == 1 for seen in twice.values())
        print(f"      {len(twice)} steps were done again; {equal} of them with bitwise the same loss as before")
    for restart in restarts:
        print("\n".join(describe(restart)))
    complete = [c.step for c in look(arguments.out / "checkpoints").complete]
    print(f"complete checkpoints: after steps {', '.join(map(str, sorted(complete))) or 'none'}")
    print(f"steadyrun's exit code: {arguments.exit_code}")
    print(f"records: {(arguments.out / 'runs' / 'latest').resolve()}")
    problems = list(complaints(restarts, losses, arguments.exit_code, arguments.every, complete))
    for problem in problems:
        print(f"NOT AS EXPECTED: {problem}")
    if not problems:
        print("everything ended as it should")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
