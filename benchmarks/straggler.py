"""Who is slow: false alarms, delays, group sizes, public traces and cost of the shipped detector; others' rules beside.

Paces come from steadyrun.testing.pacesim: own-work times of jobs with the noise of real ones, in four regimes. The
detector is steadyrun's own at its one default, each job being a role of its own; other rules see the same paces.

*false alarms*: new accusations of healthy ranks per rank and ten steps, each rule at the threshold it is shipped with.
*delay*: steps from the fault to the accusation, median/90 %; the other rules' thresholds are set per regime so that one
window in a million is a false alarm, ours is not touched. "miss" is more than half of the faults not found in 1,200
steps. Above the highest score seen the threshold is extrapolated, so small samples favour the others.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import add_common_arguments, effort_of, finish, print_table

from steadyrun.core.timing import Role, StepTiming
from steadyrun.detect.straggler import AlarmKind, Detector, StepDetails, StragglerConfig, analyse
from steadyrun.node.pacejudge import PaceJudge
from steadyrun.node.timingwire import NodeFacts, RankFacts, TimingInbox, TimingOutbox
from steadyrun.testing.pacesim import REGIMES, RULES, WINDOW, PaceFault, PaceStream, Rule, fault_profile
from steadyrun.testing.pacetraces import Trace, read_trace

HERE = Path(__file__).resolve().parent
TRACES = HERE.parent.parent / "shared" / "cases" / "straggler_traces"
CHUNK = 500
BURN = 400  # steps in which rules and we learn
PRE, POST = 600, 1200
OURS = "steadyrun"
WANTED = 1e-6
STEP_S = 10.0  # a pace of 1 is a step of this length
KEPT = 4000  # highest scores kept for a threshold
HEAVY = tuple(r.name for r in RULES if r.name.startswith("change points"))
HEAVY_JOBS = 8  # of the delays, for those
ACCUSES = (AlarmKind.RANK, AlarmKind.NODE, AlarmKind.GROUP)


def detector_of(jobs: int, ranks: int) -> Detector:
    """One detector for all jobs, each a role."""
    roles = {r: Role(f"job {r // ranks}", (r // ranks,)) for r in range(jobs * ranks)}
    return Detector(StragglerConfig(), roles, jobs * ranks)


def accused(detector: Detector, step: int, logs: np.ndarray) -> list[int]:
    alarms = detector.feed(step, STEP_S * np.exp(logs.astype(np.float64)))
    return [rank for alarm in alarms if alarm.kind in ACCUSES for rank in alarm.ranks]


# -- false alarms ------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Quiet:
    """What a rule did on healthy ranks: new accusations, windows, its highest window scores."""

    accusations: int = 0
    windows: int = 0
    highest: np.ndarray | None = None

    @property
    def share(self) -> float:
        return self.accusations / max(self.windows, 1)

    def keep(self, scores: np.ndarray) -> None:
        flat = scores.ravel() if self.highest is None else np.concatenate([self.highest, scores.ravel()])
        self.highest = np.partition(flat, len(flat) - KEPT)[-KEPT:] if len(flat) > KEPT else flat

    def threshold(self, wanted: float) -> float:
        """Above which *wanted* of the windows lie; beyond what was seen by an exponential tail."""
        assert self.highest is not None
        top = np.sort(self.highest)[::-1]
        expected = wanted * self.windows
        if expected >= 1:
            return float(top[min(int(expected), len(top) - 1)])
        tail = top[:60]
        return float(tail[-1] + max(float((tail - tail[-1]).mean()), 1e-6) * math.log(len(tail) / max(expected, 1e-9)))


def quiet_ours(regime: str, ranks: int, size: int, windows: float, seed: int) -> Quiet:
    jobs = max(1, size // ranks)
    stream = PaceStream(jobs, ranks, REGIMES[regime], seed)
    detector, out = detector_of(jobs, ranks), Quiet()
    healthy, step = stream.healthy, 0
    while out.windows < windows:
        for logs in stream.chunk(CHUNK):
            out.accusations += sum(bool(healthy[r]) for r in accused(detector, step, logs))
            step += 1
        out.windows += int(healthy.sum()) * (CHUNK if step > CHUNK else CHUNK - BURN) // WINDOW
    return out


def quiet_others(
    rules: Sequence[Rule], regime: str, ranks: int, size: int, windows: float, seed: int
) -> dict[str, Quiet]:
    jobs = max(1, size // ranks)
    stream = PaceStream(jobs, ranks, REGIMES[regime], seed)
    judges = {rule.name: rule.start() for rule in rules}
    out = {rule.name: Quiet() for rule in rules}
    before: dict[str, np.ndarray] = {rule.name: np.zeros((jobs, ranks), bool) for rule in rules}
    healthy = stream.healthy.reshape(jobs, ranks)
    done = 0
    while done * healthy.sum() / WINDOW < windows:
        logs = stream.chunk(CHUNK).reshape(CHUNK, jobs, ranks)
        skip = BURN // WINDOW if done == 0 else 0
        for rule in rules:
            scores = judges[rule.name](logs).reshape(-1, WINDOW, jobs, ranks).max(axis=1)[skip:]
            found = out[rule.name]
            if rule.shipped is not None:
                high = (scores > rule.shipped) & healthy
                found.accusations += int((high & ~np.concatenate([before[rule.name][None], high[:-1]])).sum())
                before[rule.name] = high[-1]
            found.keep(scores[:, healthy])
            found.windows += len(scores) * int(healthy.sum())
        done += CHUNK
    return out


# -- delays ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Delay:
    """Steps to the accusation of the slow; share not found; healthy ranks accused after the fault."""

    median: float
    late: float
    missed: float
    innocent: int

    @classmethod
    def of(cls, first: np.ndarray, slow: np.ndarray) -> Delay:
        """*first*: step after the fault of each rank's first accusation, inf without."""
        mine = np.sort(first[slow])
        at = len(mine) - 1
        return cls(
            float(mine[int(0.5 * at)]), float(mine[int(0.9 * at)]), float(np.isinf(mine).mean()),
            int(np.isfinite(first[~slow]).sum()),
        )  # fmt: skip

    def text(self) -> str:
        if self.missed > 0.5:
            return "miss"
        late = f"{self.late:.0f}" if math.isfinite(self.late) else "-"
        extra = f" ({100 * self.missed:.0f} % missed)" if self.missed else ""
        return f"{self.median:.0f}/{late}{extra}" + (f" +{self.innocent} innocent" if self.innocent else "")


def faulty(regime: str, fault: PaceFault, jobs: int, ranks: int, slow: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Paces [steps, jobs * ranks] with *slow* slow ranks per job from step PRE on, and who they are."""
    rng = np.random.default_rng([seed, ranks, slow])
    logs = PaceStream(jobs, ranks, REGIMES[regime], seed).chunk(PRE + POST)
    chosen = np.zeros((jobs, ranks), bool)
    for job in range(jobs):
        chosen[job, rng.choice(ranks, slow, replace=False)] = True
    for rank in np.nonzero(chosen.ravel())[0]:
        logs[PRE:, rank] += fault_profile(fault, POST, rng)
    return logs, chosen.ravel()


def delay_ours(logs: np.ndarray, slow: np.ndarray, jobs: int, ranks: int) -> Delay:
    detector = detector_of(jobs, ranks)
    first = np.full(jobs * ranks, np.inf)
    for step, row in enumerate(logs):
        for rank in accused(detector, step, row):
            if step >= PRE:
                first[rank] = min(first[rank], step - PRE + 1)
        if step > PRE + 60 and np.isfinite(first[slow]).all():
            break
    return Delay.of(first, slow)


def delay_other(rule: Rule, threshold: float, logs: np.ndarray, slow: np.ndarray, jobs: int, ranks: int) -> Delay:
    scores = rule.start()(logs.reshape(-1, jobs, ranks))[PRE:].reshape(-1, jobs * ranks)
    high = scores > threshold
    first = np.where(high.any(axis=0), high.argmax(axis=0) + 1.0, np.inf)
    return Delay.of(first, slow)


# -- the tables --------------------------------------------------------------------------------------------------------
def chosen_rules(arguments: argparse.Namespace) -> list[Rule]:
    return [] if arguments.alone else [r for r in RULES if arguments.heavy or r.name not in HEAVY]


def false_alarms(arguments: argparse.Namespace, results: dict[str, Any]) -> dict[str, dict[str, Quiet]]:
    windows = arguments.windows or effort_of(arguments, 20_000, 1_000_000, 12_000_000)
    others = effort_of(arguments, 20_000, 200_000, 2_000_000)
    print(
        f"\nfalse alarms per rank-window as shipped, 64 ranks; windows: {windows:.0e} of ours, {others:.0e} of others"
    )
    rules = chosen_rules(arguments)
    table: dict[str, dict[str, Quiet]] = {}
    for regime in arguments.regimes:
        started = time.process_time()
        table[regime] = {OURS: quiet_ours(regime, 64, 4096, windows, arguments.seed)}
        if not arguments.alone:
            light = [r for r in rules if r.name not in HEAVY]
            table[regime] |= quiet_others(light, regime, 64, 2048, others, arguments.seed + 1)
        if arguments.heavy and not arguments.alone:
            heavy = [r for r in rules if r.name in HEAVY]
            table[regime] |= quiet_others(heavy, regime, 64, 512, min(others, 100_000), arguments.seed + 2)
        print(f"  {regime}: {time.process_time() - started:.0f} s CPU", flush=True)
    head = ["rule", *arguments.regimes]
    shipped = {rule.name: rule.shipped for rule in rules}
    rows = [
        [name, *(f"{table[r][name].share:.1e} ({table[r][name].accusations})" for r in arguments.regimes)]
        for name in (OURS, *(n for n in shipped if shipped[n] is not None))
    ]
    print_table(head, rows)
    results["false_alarms"] = {
        regime: {name: {"accusations": q.accusations, "windows": q.windows} for name, q in found.items()}
        for regime, found in table.items()
    }
    return table


def delays(arguments: argparse.Namespace, quiet: dict[str, dict[str, Quiet]], results: dict[str, Any]) -> None:
    jobs = effort_of(arguments, 4, 32, 64)
    rules = chosen_rules(arguments)
    results["delays"] = {}
    for regime in arguments.regimes:
        print(f"\ndelay in steps, median/90 %, {jobs} jobs of 64 ranks, {regime}", flush=True)
        columns: dict[str, dict[str, Delay]] = {}
        for fault in PaceFault:
            logs, slow = faulty(regime, fault, jobs, 64, 1, arguments.seed + 7)
            found = {OURS: delay_ours(logs, slow, jobs, 64)}
            for rule in rules:
                threshold = quiet[regime][rule.name].threshold(WANTED)
                some = min(jobs, HEAVY_JOBS) if rule.name in HEAVY else jobs
                found[rule.name] = delay_other(rule, threshold, logs[:, : some * 64], slow[: some * 64], some, 64)
            columns[fault.value] = found
        print_table(
            ["rule", *columns],
            [[n, *(c[n].text() for c in columns.values())] for n in (OURS, *(r.name for r in rules))],
        )
        results["delays"][regime] = {
            fault: {n: [d.median, d.late, d.missed, d.innocent] for n, d in c.items()} for fault, c in columns.items()
        }


def sizes(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    windows = effort_of(arguments, 10_000, 400_000, 4_000_000)
    print(
        f"\ngroup sizes, ours: false alarms of {windows:.0e} windows each; delay of one slow rank, median/90 %",
        flush=True,
    )
    regimes = [r for r in ("dense", "noisy", "seqlen") if r in arguments.regimes]
    head = ["ranks"]
    for regime in regimes:
        head += [f"{regime} false", "+10 %", "+20 %"]
    rows, kept = [], {}
    for ranks in (2, 3, 4, 8, 16, 64, 1024, 4096):
        row = [str(ranks)]
        for regime in regimes:
            quiet = quiet_ours(regime, ranks, 4096, windows, arguments.seed + ranks)
            jobs = max(1, min(64, (4096 if arguments.full else 1024) // ranks, 4096 // ranks))
            found = []
            for fault in (PaceFault.BY_10, PaceFault.BY_20):
                logs, slow = faulty(regime, fault, jobs, ranks, 1, arguments.seed + 31)
                found.append(delay_ours(logs, slow, jobs, ranks))
            row += [f"{quiet.share:.1e} ({quiet.accusations})", *(d.text() for d in found)]
            kept[f"{ranks} {regime}"] = [quiet.accusations, quiet.windows, *(d.median for d in found)]
        rows.append(row)
    print_table(head, rows)
    results["sizes"] = kept


def many(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    jobs = effort_of(arguments, 2, 8, 16)
    print(f"\nmany slow of 64 at +10 %, dense, {jobs} jobs", flush=True)
    rows = []
    for slow_ranks in (1, 4, 8, 16, 28):
        logs, slow = faulty("dense", PaceFault.BY_10, jobs, 64, slow_ranks, arguments.seed + 3)
        found = delay_ours(logs, slow, jobs, 64)
        rows.append([str(slow_ranks), found.text(), str(found.innocent)])
        results.setdefault("many", {})[slow_ranks] = [found.median, found.missed, found.innocent]
    print_table(["slow", "delay", "innocent"], rows)


def traces(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Public traces; few steps, so that there is little to learn from and ten slow steps must do."""
    folder = arguments.traces
    if not folder.is_dir():
        print(f"\npublic traces: not here ({folder}; --traces DIR)")
        return
    config = StragglerConfig(warm_steps=1, learn_steps=8, least_steps=10, imbalance_steps=8)
    rows: list[list[str]] = []
    for path in sorted(folder.glob("trace-*.parquet")):
        trace = read_trace(path)
        report = analyse(trace.frames(), trace.roles(), len(trace.workers), config=config, groups=trace.replicas())
        names = [", ".join(str(trace.workers[r]) for r in a.ranks) + f" {100 * a.slowdown:+.0f} %" for a in report.slow]
        others = sorted({a.kind.value for a in report.alarms} - {k.value for k in ACCUSES})
        name = path.stem.removeprefix("trace-")
        mine = [[name, OURS, "; ".join(names) or "nobody", ", ".join(others)]]
        shipped = [r for r in RULES if r.shipped is not None and r.name not in HEAVY]
        mine += [[name, rule.name, accused_by(rule, trace), ""] for rule in shipped]
        rows += mine
        results.setdefault("traces", {})[name] = mine
    print("\npublic traces, whom each names (stage, data-parallel index); others' rules over all workers as shipped")
    print_table(["trace", "rule", "slow", "also said"], rows)


def accused_by(rule: Rule, trace: Trace) -> str:
    steps = len(trace.steps) // WINDOW * WINDOW
    logs = np.log(trace.busy_s[:steps]).astype(np.float32)[:, None, :]
    assert rule.shipped is not None
    high = (rule.start()(logs)[:, 0] > rule.shipped).any(axis=0)
    named = [str(w) for w, is_high in zip(trace.workers, high, strict=True) if is_high]
    return (
        f"{len(named)} of {len(high)}: {', '.join(named[:3])}{' ...' if len(named) > 3 else ''}" if named else "nobody"
    )


def cost(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    print("\ncost of one step with all details, milliseconds of CPU: median (least)", flush=True)
    rows = []
    for ranks in (8, 64, 1024, 4096, 16384):
        logs = PaceStream(1, ranks, REGIMES["dense"], arguments.seed).chunk(200)
        detector = Detector(StragglerConfig(), None, ranks, nodes={r: f"node{r // 8}" for r in range(ranks)})
        taken = []
        for step, row in enumerate(np.exp(logs.astype(np.float64))):
            details = StepDetails(row * 1.2, row * 0.3, row * 0.6, row * 0.05, row * 0.05, row, row * 0.2)
            started = time.thread_time()
            detector.feed(step, row, details=details)
            taken.append(time.thread_time() - started)
        late = np.array(taken[100:]) * 1e3
        rows.append([str(ranks), f"{np.median(late):.2f} ({late.min():.2f})"])
        results.setdefault("cost_ms", {})[ranks] = [float(np.median(late)), float(late.min())]
    print_table(["ranks", "ms"], rows)


def leader(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """The leading agent's whole way from the nodes' messages to judged steps; nodes tell once a second."""
    nodes, local = 512, 8
    rows = []
    for steps_told in (1, 4, 16):
        per_step = _leader_ms(nodes, local, steps_told, arguments.seed)
        rows.append([str(steps_told), f"{np.median(per_step):.2f} ({per_step.min():.2f})"])
        results.setdefault("leader_ms", {})[steps_told] = [float(np.median(per_step)), float(per_step.min())]
    print(f"\nleading agent, {nodes} nodes of {local} ranks, milliseconds of CPU per step: median (least)")
    print_table(["steps in a message", "ms"], rows)


def _leader_ms(nodes: int, local: int, steps_told: int, seed: int) -> NDArray[np.float64]:
    judge, inbox = PaceJudge(nodes * local), TimingInbox(nodes)
    outboxes = [TimingOutbox() for _ in range(nodes)]
    ranks = [range(local * n, local * (n + 1)) for n in range(nodes)]
    facts = [
        NodeFacts(f"node{n}", tuple(RankFacts(r, r % local, 1) for r in ranks[n])).to_bytes() for n in range(nodes)
    ]
    paces = np.exp(PaceStream(1, nodes * local, REGIMES["dense"], seed).chunk(160).astype(np.float64))
    taken = []
    for first in range(0, len(paces), steps_told):
        steps = list(enumerate(paces[first : first + steps_told].tolist(), first))
        messages = {}
        for n, outbox in enumerate(outboxes):
            told = {
                r: [StepTiming(at, 0.0, 1.2, row[r], 0.3, 0.6, 0.05, 0.05, 0.0, 0.2, 0.9) for at, row in steps]
                for r in ranks[n]
            }
            outbox.put(told)
            messages[n] = outbox.message(facts[n])
        started = time.thread_time()
        heard = inbox.take(messages)
        judge.introduce(*heard.facts.values())
        judge.add(heard.rows, float(first))
        judge.judge(float(first), float(first))
        taken.append((time.thread_time() - started) / steps_told)
    return np.array(taken[len(taken) * 5 // 8 :]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--regimes", type=lambda text: text.split(","), default=list(REGIMES))
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=["alarms", "delays", "sizes", "many", "traces", "cost", "leader"],
    )
    parser.add_argument("--alone", action="store_true", help="without other rules")
    parser.add_argument("--windows", type=float, metavar="N", help="of the first table, in each regime")
    parser.add_argument("--heavy", action="store_true", help="also change points, which are slow; always with --full")
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help="folder of trace-*.parquet")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.heavy = arguments.heavy or arguments.full
    results: dict[str, Any] = {}
    quiet = false_alarms(arguments, results) if {"alarms", "delays"} & set(arguments.parts) else {}
    if "delays" in arguments.parts:
        delays(arguments, quiet, results)
    for name, part in (("sizes", sizes), ("many", many), ("traces", traces), ("cost", cost), ("leader", leader)):
        if name in arguments.parts:
            part(arguments, results)
    finish(arguments, "straggler", results)


if __name__ == "__main__":
    main()
