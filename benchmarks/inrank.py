"""What a section, a beat and the optimizer hook cost inside a rank, in nanoseconds and system calls.

Measured in a rank under a real steadyrun, in turns while its agent reads the board at its usual rate and while the
agent is stopped (SIGSTOP); outside steadyrun, where every call does nothing; and with NVRx's client under its own
launcher where it is installed. ``tight`` is one call after the other; ``cold`` one after each 5 ms of other work that
goes through 64 MiB, as in training. (Not after a sleep: a core that wakes up needs 8 us even for nothing.)

All that steadyrun does in a step of an unmodified script is measured in one process: steps as they are and steps with
all of ours taken out of torch, in random turns; one after the other, after products of matrices (as in a training step)
and after copies of 32 MiB (nothing is in the core's caches then). Two processes differ by as much, whoever starts them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from job import HERE, NVRX, STEADYRUN, DeadlineError, Job
from report import add_common_arguments, effort_of, finish, print_table

STEP_S, MOST_OF_STEP = 0.05, 0.002  # what all that we do in a step may cost
PACES = {  # a step after what, and how
    "one after the other": "0 none",
    "after products of matrices": "0.01 multiply",
    "after copies of 32 MiB": "0.01 copy",
}
ALONE, READ, OUTSIDE, PEER = "agent stopped", "agent reads", "outside", "NVRx client"


@dataclass(slots=True)
class Rank:
    """A rank that waits for commands."""

    job: Job
    commands: Any
    launcher_pid: int
    pid: int = 0
    answers_seen: int = 0
    values: dict[tuple[str, str, str], list[dict[str, Any]]] = field(default_factory=dict)

    def ask(self, command: str, label: str) -> None:
        """Carry out one command and keep what was measured under *label*."""
        before = len(self.job.events())
        self.commands.write(command + "\n")
        self.commands.flush()
        self.job.wait_for(lambda: len(self.job.events("answered")) > self.answers_seen, 300, "the rank's answer")
        self.answers_seen += 1
        for e in self.job.events()[before:]:
            if e["kind"] == "measured":
                key = (label, e["operation"], "cold" if e["gap_s"] else "tight")
                self.values.setdefault(key, []).append(e)


@contextlib.contextmanager
def rank_of(side: str, program: tuple[str, ...], keep: Path | None) -> Iterator[Rank]:
    with Job({"BENCH_SIDE": side}, keep, f"inrank-{side}") as job:
        fifo = job.folder / "commands"
        os.mkfifo(fifo, 0o600)
        launcher = job.start([*program, str(HERE / "inrank_rank.py")], {"BENCH_COMMANDS": str(fifo)})
        try:
            ready = job.wait_for(lambda: job.events("ready"), 120, f"the rank of {side}")
        except DeadlineError as e:
            raise SystemExit(f"{e}\n{job.output_tail()}") from None
        with fifo.open("w") as commands:
            yield Rank(job, commands, launcher.pid, ready[0]["pid"])
            commands.write("end\n")
        job.wait(60)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def system_calls(rank: Rank, n: int) -> tuple[str, dict[str, float]]:
    """Which tool counted, and system calls per operation of the main thread."""
    strace = shutil.which("strace")
    if strace is None:
        rank.ask(f"calls {n}", "")
        counts = rank.job.events("counted")[-20:]
        tool = "/proc counters of reads, writes and switches (strace is not installed: others are not seen)"
        return tool, {e["operation"]: sum(v for k, v in e.items() if k[0] in "sv") / n for e in counts}
    trace = rank.job.folder / "trace.txt"
    process = subprocess.Popen([strace, "-f", "-o", str(trace), "-p", str(rank.pid)], stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        line = process.stderr.readline().decode()
        if "attached" not in line:
            raise SystemExit(f"strace cannot attach to the rank: {line.strip()}")
        rank.ask(f"calls {n}", "")
    finally:
        process.send_signal(signal.SIGINT)  # detaches
        process.communicate()
    found: dict[str, float] = {}
    name, calls = "", 0
    for line in trace.read_text(errors="replace").splitlines():
        thread, _, call = line.partition(" ")
        if int(thread) != rank.pid:
            continue
        if "write(" in call and '"BEGIN ' in call:
            name, calls = call.split('"BEGIN ')[1].split("\\n")[0], 0
        elif "write(" in call and '"END ' in call:
            found[name], name = calls / n, ""
        elif name and not call.strip().startswith(("---", "+++")):
            calls += 1
    return "strace", found


def rows_of(ranks: list[Rank], labels: list[str], calls: dict[tuple[str, str], float]) -> list[list[str]]:
    values = {k: v for rank in ranks for k, v in rank.values.items()}
    operations = list(dict.fromkeys(k[1] for k in values))

    def median(label: str, operation: str, pace: str, quantile: str) -> float | None:
        found = [e[quantile] for e in values.get((label, operation, pace), [])]
        return statistics.median(found) if found else None

    rows = []
    for operation in operations:
        for label in labels:
            cells = [median(label, operation, pace, q) for pace in ("tight", "cold") for q in ("p50", "p99")]
            if cells[0] is None:
                continue
            floor = median(label, "nothing (the timer)", "tight", "p50") or 0.0
            ours = median(READ, operation, "tight", "p50")
            spread = [e["p50"] for e in values[label, operation, "tight"]]
            rows.append(
                [
                    f"{operation}: {label}",
                    *("-" if c is None else f"{c:,.0f}" for c in cells),
                    f"{min(spread):,}-{max(spread):,}",
                    f"{cells[0] - floor:,.0f}",
                    f"{cells[0] / ours:.2f}" if ours else "",
                    f"{calls[label, operation]:.3f}" if (label, operation) in calls else "",
                ]
            )
    return rows


def print_pairs(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each round's medians compared; the table's figures are medians over rounds. Returns what it is made of."""
    rows, found = [], []
    for pace, how in PACES.items():
        rounds = [(e["ours"]["p50"], e["without"]["p50"]) for e in events if e["work"] == how.split()[1]]
        costs_us = sorted((ours - without) / 1e3 for ours, without in rounds)
        cost_us = statistics.median(costs_us)
        share = cost_us / 1e6 / STEP_S
        rows.append(
            [
                f"a step {pace}",
                *(f"{statistics.median(side) / 1e3:.0f}" for side in zip(*rounds, strict=True)),
                f"{cost_us:.0f} ({costs_us[0]:.0f}-{costs_us[-1]:.0f})",
                f"{share:.2%}",
                "holds" if share <= MOST_OF_STEP else "DOES NOT HOLD",
            ]
        )
        found.append({"pace": pace, "rounds_ns": rounds, "cost_us": cost_us, "share": share})
    head = ["us", "with steadyrun", "without", "difference (rounds)", f"of {STEP_S * 1e3:.0f} ms"]
    print_table([*head, f"at most {MOST_OF_STEP:.1%}"], rows)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    rounds = effort_of(arguments, quick=2, normal=5, full=15)
    tight = effort_of(arguments, quick=5_000, normal=20_000, full=50_000)
    cold = effort_of(arguments, quick=60, normal=200, full=400)
    one = ("--standalone", "--nproc-per-node=1")
    # A rank of its own and by itself: while others are measured it would be taken for a hanging one.
    with rank_of("steps", (*STEADYRUN, "--ft-run-dir={run_dir}", *one), arguments.keep) as steps:
        for how in list(PACES.values()) * rounds:
            steps.ask(f"pairs {cold} {how}", READ)
        paired = steps.job.events("paired")
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(rank_of("steadyrun", (*STEADYRUN, "--ft-run-dir={run_dir}", *one), arguments.keep))
        outside = stack.enter_context(rank_of("outside", (sys.executable,), arguments.keep))
        ranks = [ours, outside]
        if importlib.util.find_spec("nvidia_resiliency_ext"):
            limits: tuple[str, ...] = ("--ft-rank-section-timeouts=bench:600", "--ft-rank-heartbeat-timeout=600")
            limits += ("--ft-initial-rank-heartbeat-timeout=600", "--ft-rank-out-of-section-timeout=600")
            ranks.append(stack.enter_context(rank_of("nvrx", (*NVRX, *one, *limits), arguments.keep)))
        for _ in range(rounds):
            for command in (f"measure {tight} 0", f"measure {cold} 0.005"):
                ours.ask(command, READ)
                with stopped(ours.launcher_pid):
                    ours.ask(command, ALONE)
                outside.ask(command, OUTSIDE)
                for rank in ranks[2:]:
                    rank.ask(command, PEER)
        calls: dict[tuple[str, str], float] = {}
        tool = ""
        for label, rank in ((READ, ours), (OUTSIDE, outside), *((PEER, r) for r in ranks[2:])):
            tool, found = system_calls(rank, 1000)
            calls |= {(label, operation): n for operation, n in found.items()}
        rows = rows_of(ranks, [READ, ALONE, OUTSIDE, PEER], calls)
        head = [
            "ns per call",
            "tight p50",
            "p99",
            "cold p50",
            "p99",
            "rounds' p50",
            "less timer",
            "ratio",
            "system calls",
        ]
        print_table(head, rows)
        print(f"medians over {rounds} rounds; less timer: tight p50 less that of timing nothing; ratio: to '{READ}'")
        print(f"system calls: per call, in the main thread, counted with {tool}")
        pairs = print_pairs(paired)
        results = [
            {"side": k[0], "operation": k[1], "pace": k[2], "rounds": v} for r in ranks for k, v in r.values.items()
        ]
        counts = [{"side": k[0], "operation": k[1], "per_call": n} for k, n in calls.items()]
    finish(arguments, "inrank", {"times": results, "steps": pairs, "system_calls": counts, "counted_with": tool})


if __name__ == "__main__":
    main()
