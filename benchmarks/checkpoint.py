"""Saving side by side: stall, time to durable, CPU, memory, slower steps, and reading back; ours, DCP's ways, floors.

Every try is a job of its own (torchrun for the peers, steadyrun for ours): it trains for a while, saves four times,
overwrites its whole state right after each save, and reads the last one back, comparing every element. Methods take
turns in every round, so that ratios compare tries made within minutes of each other.

*first* is the first save of the job; the other figures are medians of the later ones. CPU is that of all processes of
the job during a save, checksums included, without the training. Extra memory is anonymous and shared memory of all of
them at its highest, over what they had before the saver was made. *step x* is how much longer a step takes while a save
is written. Memory copies (*copy*) are measured in each job right before each save.

Besides the peers in torch, NVRx's asynchronous writer and torch_checkpointing join where they are installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from job import HERE, STEADYRUN, TORCHRUN, DeadlineError, Job, free_port
from report import add_common_arguments, effort_of, finish, print_table, ratio_spread, spread_text
from usage import memory_bytes, processes_with

SAMPLE_S = 0.25


@dataclass(frozen=True, slots=True)
class Method:
    """One way of saving. *syncs*: what it calls done would survive a power cut."""

    name: str
    package: str = "torch"
    syncs: bool = True
    is_ours: bool = False
    is_floor: bool = False


OURS = "steadyrun"
METHODS = (
    Method(OURS, is_ours=True),
    Method("torch.save"),
    Method("dcp.save"),
    Method("dcp.async_save thread"),
    Method("dcp.async_save thread, stager reused"),
    Method("dcp.async_save process, stager reused"),
    Method("NVRx async writer", "nvidia_resiliency_ext"),
    Method("torch_checkpointing", "torch_checkpointing", syncs=False),
    Method("floor: copy, buffered write", is_floor=True),
    Method("floor: copy, direct write", is_floor=True),
    Method("steadyrun without memory", is_ours=True),
)
DEFAULT = METHODS[:-1]


@dataclass(frozen=True, slots=True)
class Try:
    """One job. Seconds are of the slowest rank; None: not reached, or not offered.

    Attributes:
        sound: every element that was read back was that of the save.
        persist_s: from the end of the stall until durable; 0 for a save that waits.
        cpu_s: of a whole save, all processes.
    """

    method: str
    filesystem: str
    gib: float
    ranks: int
    round: int
    problem: str = ""
    sound: bool = False
    syncs: bool = True
    wrong: int | None = None
    stall_first_s: float | None = None
    stall_s: float | None = None
    copy_first_s: float | None = None
    copy_s: float | None = None
    durable_first_s: float | None = None
    durable_s: float | None = None
    persist_s: float | None = None
    stall_cpu_s: float | None = None
    cpu_first_s: float | None = None
    cpu_s: float | None = None
    extra_bytes: int | None = None
    state_bytes: int | None = None
    inflation: float | None = None
    restore_cold_s: float | None = None
    restore_disk_s: float | None = None
    restore_memory_s: float | None = None
    restored_from: str = ""

    @property
    def first_by_copy(self) -> float | None:
        return _by(self.stall_first_s, self.copy_first_s)

    @property
    def steady_by_copy(self) -> float | None:
        return _by(self.stall_s, self.copy_s)

    @property
    def extra_by_state(self) -> float | None:
        return _by(self.extra_bytes, self.state_bytes)

    @property
    def extra_by_state_alone(self) -> float | None:
        """Without what interpreters and their modules take, whatever is saved."""
        return None if self.extra_bytes is None else _by(max(self.extra_bytes - (64 << 20), 0), self.state_bytes)

    @property
    def cpu_by_gib(self) -> float | None:
        return _by(self.cpu_s, self.gib)


def _by(value: float | None, other: float | None) -> float | None:
    return None if value is None or not other else value / other


def command(method: Method, folder: Path, gib: float, ranks: int, arguments: argparse.Namespace) -> list[str]:
    where = ["--standalone", f"--nproc-per-node={ranks}"]
    script = [str(HERE / "checkpoint_rank.py"), f"--method={method.name}", f"--folder={folder}", f"--gib={gib}"]
    script += [f"--saves={arguments.saves}", f"--warm-up={arguments.warm_up + 4 * gib}"]
    if method.is_ours:
        # No standby: its start would use the processor during the first save, and torchrun has nothing like it.
        return [*STEADYRUN, *where, "--ft-run-dir={run_dir}", "--ft-standby=off", "--max-restarts=1", *script]
    return [*TORCHRUN, *where, "--max-restarts=0", *script]


def one_try(method: Method, kind: str, gib: float, ranks: int, number: int, arguments: argparse.Namespace) -> Try:
    base = Path(arguments.disk if kind == "disk" else arguments.tmpfs)
    folder = Path(tempfile.mkdtemp(prefix="steadyrun-bench-checkpoints-", dir=base))
    name = f"{method.name}-{kind}-{gib:g}-{ranks}".replace(" ", "_").replace(":", "").replace(",", "")
    found: dict[str, Any] = {"syncs": method.syncs}
    samples: list[tuple[float, int]] = []
    try:
        with Job({"BENCH_PORT": str(free_port())}, arguments.keep, name) as job:
            try:
                job.start(command(method, folder, gib, ranks, arguments), {"BENCH_MARK": job.mark})
                limit_s = time.monotonic() + arguments.patience
                while not job.events("end"):
                    if job.launchers[0].poll() is not None and not job.events("end"):
                        raise DeadlineError("the job ended early")
                    if time.monotonic() > limit_s:
                        raise DeadlineError(f"the job was not done after {arguments.patience:g} s")
                    if job.events("baseline") and not job.events("saved"):
                        samples.append((time.monotonic(), memory_bytes(processes_with(job.mark))))
                    time.sleep(SAMPLE_S)
                job.wait(60)
            except DeadlineError as e:
                found["problem"] = f"{e}: {_first_error(job.output_tail(60))}"
                if arguments.verbose:
                    print(job.output_tail(60), file=sys.stderr)
            found |= _summed_up(job, samples)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Try(method.name, kind, gib, ranks, number, **found)


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "Error" in line or "cannot" in line]
    return lines[0][:200] if lines else "no error in its output"


def _summed_up(job: Job, samples: Sequence[tuple[float, int]]) -> dict[str, Any]:
    saves = job.events("save")
    found: dict[str, Any] = {}
    if saves:
        first, later = saves[0], saves[1:] or saves
        quiet = [s for s in later if not s["with_steps"]] or later
        slower = [s["inflation"] for s in saves if s["inflation"] is not None]
        found |= {
            "stall_first_s": first["stall_s"],
            "copy_first_s": first["memcpy_s"],
            "durable_first_s": first["durable_s"],
            "cpu_first_s": first["cpu_s"],
            "stall_s": statistics.median(s["stall_s"] for s in later),
            "copy_s": statistics.median(s["memcpy_s"] for s in later),
            "stall_cpu_s": statistics.median(s["stall_cpu_s"] for s in later),
            "durable_s": statistics.median(s["durable_s"] for s in quiet),
            "persist_s": max(0.0, statistics.median(s["durable_s"] - s["stall_s"] for s in quiet)),
            "cpu_s": statistics.median(s["cpu_s"] for s in quiet),
            "inflation": statistics.median(slower) if slower else None,
        }
    for baseline in job.events("baseline"):
        peak = max((b for at_s, b in samples if at_s >= baseline["at_s"]), default=baseline["memory_bytes"])
        found["extra_bytes"] = max(peak - baseline["memory_bytes"], 0)
        found["state_bytes"] = baseline["state_bytes"]
    loaded = {e["source"]: e for e in job.events("loaded")}
    for source, field in (("cold", "restore_cold_s"), ("warm", "restore_disk_s"), ("memory", "restore_memory_s")):
        if source in loaded:
            found[field] = loaded[source]["seconds"]
    if loaded:
        found["wrong"] = max(e["wrong"] for e in loaded.values())
        found["sound"] = found["wrong"] == 0
        found["restored_from"] = loaded.get("memory", {}).get("place", "")
    return found


# -- tables ------------------------------------------------------------------------------------------------------------
def values(tries: Sequence[Try], field: Callable[[Try], float | None]) -> list[float]:
    return [v for t in tries if (v := field(t)) is not None]


def cell(tries: Sequence[Try], field: Callable[[Try], float | None], digits: int = 2) -> str:
    return spread_text(values(tries, field), digits)


def content_words(tries: Sequence[Try]) -> str:
    if not any(t.wrong is not None for t in tries):
        return "not read"
    words = "right" if all(t.sound for t in tries if t.wrong is not None) else "TORN"
    return words if tries[0].syncs else f"{words}, not synced"


def show(tries: Sequence[Try], methods: Sequence[Method]) -> None:
    cells = dict.fromkeys((t.filesystem, t.gib, t.ranks) for t in tries)
    for kind, gib, ranks in cells:
        mine = [t for t in tries if (t.filesystem, t.gib, t.ranks) == (kind, gib, ranks)]
        ours = [t for t in mine if t.method == OURS]
        print(f"\n{kind}, {gib:g} GiB over {ranks} rank{'s' * (ranks > 1)}")
        rows, ratios = [], []
        for method in methods:
            its = [t for t in mine if t.method == method.name]
            if not its:
                continue
            rows.append(
                [
                    method.name,
                    cell(its, lambda t: t.stall_first_s, 3),
                    cell(its, lambda t: t.stall_s, 3),
                    cell(its, lambda t: t.first_by_copy),
                    cell(its, lambda t: t.steady_by_copy),
                    cell(its, lambda t: t.durable_s),
                    cell(its, lambda t: t.cpu_by_gib),
                    cell(its, lambda t: t.extra_by_state),
                    cell(its, lambda t: t.inflation),
                    cell(its, lambda t: t.restore_memory_s),
                    cell(its, lambda t: t.restore_disk_s),
                    cell(its, lambda t: t.restore_cold_s),
                    content_words(its),
                ]
            )
            if len(its) == len(ours) and method.name != OURS:
                ratios.append([method.name, *(_ratio(ours, its, f) for f in RATIOS.values()), content_words(its)])
        head = ["method", "stall first, s", "later, s", "first/copy", "later/copy", "durable, s", "CPU s/GiB"]
        head += ["extra/state", "step x", "load: memory, s", "warm, s", "cold, s", "content"]
        print_table(head, rows)
        if ratios:
            print("\nby steadyrun, paired by round:")
            print_table(["method", *RATIOS, "content"], ratios)


RATIOS: dict[str, Callable[[Try], float | None]] = {
    "stall first": lambda t: t.stall_first_s,
    "stall later": lambda t: t.stall_s,
    "durable": lambda t: t.durable_s,
    "CPU": lambda t: t.cpu_s,
    "load warm": lambda t: t.restore_disk_s,
}


def _ratio(ours: Sequence[Try], theirs: Sequence[Try], field: Callable[[Try], float | None]) -> str:
    found = ratio_spread([field(t) for t in ours], [field(t) for t in theirs])
    return found.text(2) if found is not None else "-"


@dataclass(frozen=True, slots=True)
class Claim:
    """What is promised of one cell: *value* must not be above *limit*."""

    text: str
    cell: str
    value: float | None
    limit: float

    @property
    def verdict(self) -> str:
        return "not measured" if self.value is None else "holds" if self.value <= self.limit else "MISSED"


def claims(tries: Sequence[Try], methods: Sequence[Method]) -> list[Claim]:
    """Medians over the rounds of ratios within a round."""
    sound_peers = [m.name for m in methods if not m.is_floor and not m.is_ours and m.syncs]
    found = []
    for kind, gib, ranks in dict.fromkeys((t.filesystem, t.gib, t.ranks) for t in tries):
        here = [t for t in tries if (t.filesystem, t.gib, t.ranks) == (kind, gib, ranks)]
        rounds = sorted({t.round for t in here})
        by = {(t.method, t.round): t for t in here}
        place = f"{kind}, {gib:g} GiB, {ranks} rank{'s' * (ranks > 1)}"

        def against(
            names: Sequence[str],
            ours: Callable[[Try], float | None],
            theirs: Callable[[Try], float | None],
            by: dict[tuple[str, int], Try] = by,
            rounds: Sequence[int] = rounds,
        ) -> float | None:
            """Ours by the best of *names* in the same round."""
            ratios = []
            for number in rounds:
                mine = by.get((OURS, number))
                others = [by[n, number] for n in names if (n, number) in by]
                best = [v for t in others if t.sound and (v := theirs(t)) is not None]
                if mine is not None and best and (value := ours(mine)) is not None:
                    ratios.append(value / min(best))
            return statistics.median(ratios) if ratios else None

        def own(field: Callable[[Try], float | None], here: Sequence[Try] = here) -> float | None:
            found = values([t for t in here if t.method == OURS], field)
            return statistics.median(found) if found else None

        process = ["dcp.async_save process, stager reused"]
        found += [
            Claim("first stall / one copy", place, own(lambda t: t.first_by_copy), 1.25),
            Claim("later stalls / one copy", place, own(lambda t: t.steady_by_copy), 1.25),
            Claim("first stall / best sound peer", place, against(
                sound_peers, lambda t: t.stall_first_s, lambda t: t.stall_first_s), 1.0),
            Claim("later stalls / best sound peer", place, against(
                sound_peers, lambda t: t.stall_s, lambda t: t.stall_s), 1.0),
            Claim("CPU / DCP process mode", place, against(process, lambda t: t.cpu_s, lambda t: t.cpu_s), 0.5),
            Claim("durable / best peer that syncs", place, against(
                sound_peers, lambda t: t.durable_s, lambda t: t.durable_s), 1.1),
            Claim("(extra memory - 64 MiB of processes) / state", place, own(lambda t: t.extra_by_state_alone), 2.0),
            Claim("load from memory / dcp.load warm", place, against(
                ["dcp.save"], lambda t: t.restore_memory_s, lambda t: t.restore_disk_s), 0.4),
        ]  # fmt: skip
    return found


def show_claims(found: Sequence[Claim]) -> None:
    print("\nwhat is promised:")
    rows = [
        [c.text, c.cell, "-" if c.value is None else f"{c.value:.2f}", f"{c.limit:g}", c.verdict]
        for c in sorted(found, key=lambda c: c.text)
    ]
    print_table(["ratio", "where", "measured", "at most", ""], rows)


# -- main --------------------------------------------------------------------------------------------------------------
def wanted(arguments: argparse.Namespace) -> list[Method]:
    if arguments.only:
        return [METHODS[int(i)] for i in arguments.only.split(",")]
    return [m for m in DEFAULT if importlib.util.find_spec(m.package)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--rounds", type=int, help="tries per method and cell")
    parser.add_argument("--gib", default="", help="sizes of the whole state (default 1,4; with --quick 0.25)")
    parser.add_argument("--ranks", default="", help="default 1,2; with --quick 1")
    parser.add_argument("--filesystems", default="", help="disk, tmpfs or both (default both; with --quick disk)")
    parser.add_argument("--disk", default=tempfile.gettempdir(), metavar="DIR", help="a folder on a disk")
    parser.add_argument("--tmpfs", default="/dev/shm", metavar="DIR", help="a folder in memory")
    parser.add_argument("--only", default="", help="methods to run, by number: " + ", ".join(
        f"{i} {m.name}" for i, m in enumerate(METHODS)))  # fmt: skip
    parser.add_argument("--saves", type=int, default=4, help="saves per job (4)")
    parser.add_argument("--warm-up", type=float, default=4.0, help="seconds of training before the first save, and 4 more for each GiB (4)")  # fmt: skip  # noqa: E501
    parser.add_argument("--patience", type=float, default=420.0, help="seconds that a job may take (420)")
    parser.add_argument("--verbose", action="store_true", help="print the end of the output of tries that failed")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    rounds = arguments.rounds or effort_of(arguments, quick=1, normal=1, full=5)
    sizes = [float(g) for g in (arguments.gib or ("0.25" if arguments.quick else "1,4")).split(",")]
    ranks = [int(r) for r in (arguments.ranks or ("1" if arguments.quick else "1,2")).split(",")]
    kinds = (arguments.filesystems or ("disk" if arguments.quick else "disk,tmpfs")).split(",")
    methods = wanted(arguments)
    tries: list[Try] = []
    for number in range(rounds):
        for kind in kinds:
            for gib in sizes:
                for count in ranks:
                    for i in range(len(methods)):
                        method = methods[(i + number) % len(methods)]  # nobody always comes first
                        tries.append(one_try(method, kind, gib, count, number, arguments))
                        print(_line(tries[-1]), flush=True)
    show(tries, methods)
    show_claims(claims(tries, methods))
    print("median (lowest-highest) over the rounds")
    finish(arguments, "checkpoint", [asdict(t) for t in tries])


def _line(t: Try) -> str:
    head = f"round {t.round + 1}: {t.filesystem}, {t.gib:g} GiB, {t.ranks} rank(s), {t.method}: "
    if t.problem:
        return head + t.problem
    return head + (
        f"stall {t.stall_first_s:.3f} s, then {t.stall_s:.3f} s, durable {t.durable_s:.2f} s, CPU {t.cpu_s:.2f} s, "
        f"content {'right' if t.sound else 'TORN' if t.wrong else 'not read'}"
    )


if __name__ == "__main__":
    main()
