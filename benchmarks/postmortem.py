"""Post mortems of simulated jobs with known faults: how often the culprit is named, what it costs; torchfrtrace beside.

Sets come from steadyrun.testing.flightsim: programs with tensor, pipeline, data, context and expert parallel groups,
one or two faults, clocks that differ, rings that have wrapped, all dump formats. Both tools read the same files; to
torchfrtrace the gloo recorder's are not shown, which it cannot read.

*exact*: the leading finding (with two faults: the leading two) names the culprit and nobody else. *class*: and says
what it did. *innocent*: a finding of high confidence (0.7) names somebody who is not to blame. torchfrtrace prints
blocks without order or confidence: its first one (two) count for *exact*, *any block* is the kindest reading, and
*innocent* is any block that names somebody else. *failed*: it ended with an error, or was ended at its limit.

Of a two-member group that differs, naming both without confidence is exact. Sets without a fault are right when nobody
is named. A device that stalls ahead of a collective leaves no trace unless TORCH_NCCL_ENABLE_TIMING is set; the row
without it shows what is said then, and counts nowhere.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from report import add_common_arguments, effort_of, finish, print_table

from steadyrun.detect.waits import judge_flights
from steadyrun.detect.waits.records import RankState
from steadyrun.testing.flightsim import (
    FaultKind,
    FlightSet,
    Layout,
    Named,
    Scenario,
    Score,
    Truth,
    drawn_set,
    score,
    simulate,
)

HERE = Path(__file__).resolve().parent
STATES = {"dead": RankState.DEAD, "stopped": RankState.STOPPED}
SAMPLE_S = 0.05
LARGEST_FOR_PEER = 256  # ranks up to which torchfrtrace takes part in the accuracy table
SINGLE = tuple(k for k in FaultKind if k not in (FaultKind.NONE, FaultKind.RUNNING))
PAIRED = tuple(k for k in SINGLE if k not in (FaultKind.GLOO_STALL, FaultKind.DEVICE_STALL))
ON_GLOO = (  # its other mismatches end the job with an error, and sends are not recorded
    FaultKind.HOST_STALL, FaultKind.STOPPED, FaultKind.OP_MISMATCH, FaultKind.SKIP, FaultKind.EXTRA,
    FaultKind.ORDER_SWAP, FaultKind.HANG_IN_FLIGHT,
)  # fmt: skip
WITHOUT_SITES = (FaultKind.SKIP, FaultKind.EXTRA)  # what active-only dumps cannot tell


# -- sets --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. *counts*: ``single``, ``double`` or nothing, for the totals."""

    name: str
    kinds: tuple[FaultKind, ...]  # one of these, or two, in each set
    faults: int = 1
    counts: str = ""
    is_degraded: bool = False
    is_active_only: bool = False
    has_timing: bool | None = None  # None: in a third of the sets
    backend: str = "nccl"


ROWS = (
    *(Row(k.value.replace("_", " "), (k,), counts="single", has_timing=True if k is FaultKind.DEVICE_STALL else None)
      for k in SINGLE),
    Row("two faults", PAIRED, faults=2, counts="double"),
    Row("one, on gloo", ON_GLOO, backend="gloo"),
    Row("two, on gloo", ON_GLOO, faults=2, backend="gloo"),
    Row("one, active entries only", tuple(k for k in PAIRED if k not in WITHOUT_SITES), is_active_only=True),
    Row("one, 5 % missing, 5 % cut", PAIRED, is_degraded=True),
    Row("device stall, no timing", (FaultKind.DEVICE_STALL,), has_timing=False),
    Row("none, at the end", (FaultKind.NONE,), faults=0),
    Row("none, in a step", (FaultKind.RUNNING,), faults=0),
)  # fmt: skip


def make_set(row: Row, world: int, seed: int) -> FlightSet:
    """The *seed*-th set of a row."""
    options: dict[str, Any] = {"active_only": row.is_active_only, "backend": row.backend}
    if row.has_timing is not None:
        options["with_timing"] = row.has_timing
    if row.is_degraded:
        options |= {"dropped": 0.05, "truncated": 0.05}
    return drawn_set(world, row.kinds, row.faults, f"{row.name} {world} {seed}", **options)


# -- torchfrtrace ------------------------------------------------------------------------------------------------------
class Peer:
    """torchfrtrace, with torch imported once; None instead where torch has none."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "postmortem_frtrace.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, folder: Path, limit_s: float, incomplete: bool) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(
            json.dumps({"folder": str(folder), "limit_s": limit_s, "incomplete": incomplete}) + "\n"
        )
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


MISSING = re.compile(r"^missing ranks: \{([\d, ]+)\}")
CULPRIT = re.compile(r"Culprit rank (\d+); Error type: (\w+)")
PEER_CLASSES = {
    "COLLECTIVE_TYPE_MISMATCH": ("op_mismatch",),
    "SIZE_OR_SYNTAX_MISMATCH": ("size_mismatch",),
    "COLLECTIVE_DTYPE_MISMATCH": ("dtype_mismatch",),
    "COLLECTIVE_STATE_MISMATCH": ("device_stall",),
}
PEER_MISSING = ("host_stall", "dead_process", "stopped_process", "skipped_collective", "p2p_unmatched")


def blocks_of(output: str) -> list[tuple[tuple[str, ...], frozenset[int]]]:
    """What each block says: classes that it could mean, and the ranks it names. Blocks that name none are left out."""
    found = []
    for line in output.splitlines():
        if missing := MISSING.match(line):
            found.append((PEER_MISSING, frozenset(int(r) for r in missing[1].split(","))))
        elif line.startswith("error msg:") and (culprits := CULPRIT.findall(line)):
            classes = {c for _, kind in culprits for c in PEER_CLASSES.get(kind, ())}
            found.append((tuple(classes), frozenset(int(r) for r, _ in culprits)))
    return found


@dataclass(frozen=True, slots=True)
class PeerScore:
    is_exact: bool
    is_in_any: bool
    is_class_right: bool
    blames_innocent: bool
    has_failed: bool
    cpu_s: float


def peer_score(truth: Truth, answer: dict[str, Any]) -> PeerScore:
    """By the same rules as ours; a block that names an even pair counts as not sure, which is to its advantage."""
    blocks = blocks_of(answer["output"])
    head: list[tuple[tuple[str, ...], frozenset[int]]] = []
    for block in blocks:
        if not any(ranks == block[1] for _, ranks in head):
            head.append(block)
    head = head[: max(1, len(truth.faults))]
    culprits = frozenset(f.rank for f in truth.faults)

    def named(blocks: Sequence[tuple[tuple[str, ...], frozenset[int]]]) -> bool:
        claims: list[Named] = [("", sorted(ranks), 0.0) for _, ranks in blocks]
        return all(any(f.is_named_by(c, culprits) for c in claims) for f in truth.faults)

    right = [
        any(
            f.is_named_by(("", sorted(ranks), 0.0), culprits) and set(f.classes) & set(classes)
            for classes, ranks in head
        )
        for f in truth.faults
    ]
    innocent = any(
        not ranks <= culprits and not any(f.involves(("", sorted(ranks), 1.0)) for f in truth.faults)
        for _, ranks in blocks
    )
    failed = answer["code"] != 0
    quiet = not blocks and not failed
    return PeerScore(
        is_exact=named(head) if truth.faults else quiet,
        is_in_any=named(blocks) if truth.faults else quiet,
        is_class_right=all(right) if truth.faults else quiet,
        blames_innocent=innocent,
        has_failed=failed,
        cpu_s=answer["cpu_s"],
    )


# -- accuracy ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Judged:
    """One set. *findings*: what we said, for looking into what went wrong."""

    row: str
    world: int
    seed: int
    truth: dict[str, Any]
    ours: Score
    peer: PeerScore | None
    findings: list[Named]
    judge_s: float


def judge_set(found: FlightSet, folder: Path) -> tuple[list[Named], float]:
    """Through the files, as a user's post mortem goes; the process states are what an agent adds."""
    from steadyrun.collectors.flight.folder import load_folder

    loaded = load_folder([folder], workers=1)
    states = {rank: STATES[state] for rank, state in found.truth.states.items()}
    began_s = time.monotonic()
    judgement = judge_flights(loaded.flights, found.truth.world, states, loaded.details)
    took_s = time.monotonic() - began_s
    return [(f.finding.cls.value, f.finding.ranks, f.finding.confidence) for f in judgement.findings], took_s


def accuracy(
    rows: Sequence[Row], worlds: Sequence[int], sets: int, peer: Peer | None, arguments: argparse.Namespace
) -> Iterator[Judged]:
    for world in worlds:
        for row in rows:
            for seed in range(arguments.seed, arguments.seed + (sets if world <= 64 else max(1, sets // 4))):
                folder = Path(tempfile.mkdtemp(prefix="flight-"))
                try:
                    found = make_set(row, world, seed)
                    found.write(folder)
                    findings, judge_s = judge_set(found, folder)
                    theirs = None
                    if peer is not None and world <= LARGEST_FOR_PEER and row.backend == "nccl":
                        incomplete = any(not found.dumps_of(r) for r in range(world))
                        theirs = peer_score(found.truth, peer.run(folder, arguments.limit, incomplete))
                    result = Judged(
                        row.name,
                        world,
                        seed,
                        found.truth.to_json(),
                        score(found.truth, findings),
                        theirs,
                        findings,
                        judge_s,
                    )
                    if arguments.keep is not None and not (result.ours.is_exact and result.ours.is_class_right):
                        name = f"{row.name.replace(' ', '_').replace('%', '')}-{world}-{seed}"
                        shutil.copytree(folder, arguments.keep / name, dirs_exist_ok=True)
                    yield result
                finally:
                    shutil.rmtree(folder, ignore_errors=True)


def share(values: Sequence[bool]) -> str:
    return f"{sum(values)}/{len(values)}" if values else "-"


def show_accuracy(judged: Sequence[Judged]) -> None:
    table = []
    for row in ROWS:
        for world in sorted({j.world for j in judged}):
            here = [j for j in judged if (j.row, j.world) == (row.name, world)]
            if here:
                table.append(_row_of(row.name, str(world), here))
    for counts, text in (("single", "all single faults"), ("double", "all double faults")):
        here = [j for j in judged if any(r.name == j.row and r.counts == counts for r in ROWS)]
        if here:
            table.append(_row_of(text, "", here))
    head = [
        "fault",
        "ranks",
        "exact",
        "class",
        "innocent",
        "torchfrtrace: exact",
        "any block",
        "class",
        "innocent",
        "failed",
    ]
    print_table(head, table)


def _row_of(name: str, world: str, here: Sequence[Judged]) -> list[str]:
    theirs = [j.peer for j in here if j.peer is not None]
    return [
        name,
        world,
        share([j.ours.is_exact for j in here]),
        share([j.ours.is_class_right for j in here]),
        share([j.ours.blames_innocent for j in here]),
        share([p.is_exact for p in theirs]),
        share([p.is_in_any for p in theirs]),
        share([p.is_class_right for p in theirs]),
        share([p.blames_innocent for p in theirs]),
        share([p.has_failed for p in theirs]),
    ]


# -- time and memory ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Cost:
    """One run of a command. *memory_bytes*: highest sum over its processes, each page counted once."""

    side: str
    ranks: int
    entries: int
    cpu_s: float
    wall_s: float
    memory_bytes: int
    is_late: bool
    detail: dict[str, Any]


def measure(command: Sequence[str], limit_s: float) -> tuple[float, float, int, bool, str]:
    """CPU (with ended children), wall, memory, whether it was ended, and its output."""
    with tempfile.TemporaryFile("w+") as output:
        began_s, memory, is_late = time.monotonic(), 0, False
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        while True:
            done, _, usage = os.wait4(process.pid, os.WNOHANG)
            if done:
                break
            memory = max(memory, sum(map(_pss_bytes, _tree(process.pid))))
            if time.monotonic() - began_s > limit_s and not is_late:
                is_late = True
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(SAMPLE_S)
        wall_s = time.monotonic() - began_s
        process.returncode = 0
        output.seek(0)
        return usage.ru_utime + usage.ru_stime, wall_s, memory, is_late, output.read(1 << 24)


def _tree(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{each}/task"):
                found += [int(c) for c in Path(f"/proc/{each}/task/{task}/children").read_text().split()]
    return found


def _pss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def costs(worlds: Sequence[int], entries: int, with_peer: bool, arguments: argparse.Namespace) -> Iterator[Cost]:
    """A host stall, which torchfrtrace handles best."""
    script = str(HERE / "postmortem_judge.py")
    for world in worlds:
        layout = Layout(tp=min(8, world), dp=max(1, world // 8))
        found = simulate(Scenario(layout, (FaultKind.HOST_STALL,), seed=1, entries=entries, gloo_entries=0))
        with tempfile.TemporaryDirectory(prefix="flight-") as name:
            folder = Path(name)
            found.write(folder, with_sidecars=False)
            for file in folder.glob("gloo_trace_rank_*"):
                file.unlink()
            yield _cost("steadyrun", world, entries, [sys.executable, script, "raw", name, str(world)], arguments.limit)
            if with_peer:
                command = [
                    sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", name,
                    "--prefix", "nccl_trace_rank_",
                ]  # fmt: skip
                yield _cost("torchfrtrace", world, entries, command, arguments.limit)


def summary_cost(world: int, arguments: argparse.Namespace) -> Cost:
    """The same from summaries, as a leading agent has them."""
    from steadyrun.collectors.flight.summarise import summarise

    layout = Layout(tp=8, dp=world // 16, pp=2)
    found = simulate(Scenario(layout, (FaultKind.HOST_STALL,), seed=1, entries=120))
    with tempfile.NamedTemporaryFile("w", prefix="flight-", suffix=".jsonl") as file:
        for rank in range(world):
            flight = summarise([(dump, None) for dump in found.dumps(rank).values()], rank, None)
            file.write(json.dumps(flight.to_json(), separators=(",", ":")) + "\n")
        file.flush()
        size = file.tell()
        script = str(HERE / "postmortem_judge.py")
        command = [sys.executable, script, "summaries", file.name, str(world)]
        cost = _cost("steadyrun, summaries", world, 120, command, arguments.limit)
    return replace(cost, detail={**cost.detail, "summary_bytes": size // world})


def _cost(side: str, world: int, entries: int, command: Sequence[str], limit_s: float) -> Cost:
    cpu_s, wall_s, memory, is_late, output = measure(command, limit_s)
    detail: dict[str, Any] = {}
    if side.startswith("steadyrun") and not is_late:
        detail = json.loads(output) if output.startswith("{") else {"problem": "ended with an error"}
    return Cost(side, world, entries, cpu_s, wall_s, memory, is_late, detail)


def show_costs(found: Sequence[Cost]) -> None:
    rows = []
    for c in found:
        stages = "-"
        if "read_cpu_s" in c.detail:
            stages = f"{c.detail['start_cpu_s']:.1f} + {c.detail['read_cpu_s']:.1f} + {c.detail['judge_cpu_s']:.2f}"
        note = "ended at the limit" if c.is_late else c.detail.get("problem", "")
        if "summary_bytes" in c.detail:
            note = f"{c.detail['summary_bytes'] / 1024:.1f} KiB per rank"
        rows.append([
            c.side, str(c.ranks), str(c.entries), f"{c.cpu_s:.1f}", stages, f"{c.wall_s:.1f}",
            f"{c.memory_bytes / 2**20:.0f}", note,
        ])  # fmt: skip
    print_table(["", "ranks", "entries", "CPU s", "start + read + judge", "wall s", "MiB in all", ""], rows)


# -- main --------------------------------------------------------------------------------------------------------------
def has_peer() -> bool:
    import importlib.util

    return bool(importlib.util.find_spec("torch")) and bool(
        importlib.util.find_spec("torch.distributed.flight_recorder")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--sets", type=int, help="sets per row and size up to 64 ranks; a quarter of it above")
    parser.add_argument("--ranks", default="", help="sizes of the accuracy table")
    parser.add_argument("--raw", default=None, help="sizes of the time table (empty: none)")
    parser.add_argument("--summaries", default=None, help="sizes judged from summaries (empty: none)")
    parser.add_argument("--entries", type=int, default=1000, help="per rank in the time table (1000)")
    parser.add_argument("--rows", default="", help="only rows whose name contains one of these, separated by commas")
    parser.add_argument("--seed", type=int, default=0, help="number of the first set")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that one run may take (300)")
    parser.add_argument("--no-peer", action="store_true", help="without torchfrtrace")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    sets = arguments.sets if arguments.sets is not None else effort_of(arguments, quick=1, normal=4, full=40)
    worlds = _sizes(arguments.ranks, arguments, quick="16", normal="16,64", full="16,64,256,1024,4096")
    raw = _sizes(arguments.raw, arguments, quick="16", normal="64,256", full="64,256,1024")
    summaries = _sizes(arguments.summaries, arguments, quick="64", normal="1024", full="4096")
    wanted = [w.strip() for w in arguments.rows.split(",") if w.strip()]
    rows = [r for r in ROWS if not wanted or any(w in r.name for w in wanted)]
    with_peer = has_peer() and not arguments.no_peer

    judged: list[Judged] = []
    if sets:
        peer = Peer() if with_peer else None
        try:
            for result in accuracy(rows, worlds, sets, peer, arguments):
                judged.append(result)
                if not result.ours.is_exact or result.ours.blames_innocent:
                    faults = ", ".join(f"{f['kind']} {f['rank']}" for f in result.truth["faults"]) or "none"
                    where = f"{result.row}, {result.world} ranks, seed {result.seed}"
                    print(f"{where}: {faults}; said {result.findings[:3]}", flush=True)
        finally:
            if peer is not None:
                peer.close()
        show_accuracy(judged)
    spent: list[Cost] = []
    for cost in itertools.chain(
        costs(raw, arguments.entries, with_peer, arguments), (summary_cost(world, arguments) for world in summaries)
    ):
        spent.append(cost)
        print(f"{cost.side}, {cost.ranks} ranks: {cost.cpu_s:.1f} s of CPU, {cost.wall_s:.1f} s", flush=True)
    if spent:
        print()
        show_costs(spent)
    results = {"accuracy": [asdict(j) for j in judged], "cost": [asdict(c) for c in spent]}
    finish(arguments, "postmortem", results)


def _sizes(text: str | None, arguments: argparse.Namespace, quick: str, normal: str, full: str) -> list[int]:
    chosen = text if text not in (None, "") else quick if arguments.quick else full if arguments.full else normal
    return [int(w) for w in chosen.split(",") if w and w != "none"]


if __name__ == "__main__":
    main()
