"""From a fault to the first new step of all ranks: steadyrun, torchrun, and NVRx's ft_launcher where it is installed.

Each try starts a job (of two ranks), lets it train, kills a rank (SIGKILL) or hangs it (it sleeps in a step), and waits
until all ranks have done a step in new processes. The launchers take turns in every round: ratios compare tries
made within a minute or two of each other.

A hang is found by the launcher's own watchdog where it has one, and by a process-group timeout of the same length where
it has none (torchrun); that time is part of the result.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from job import HERE, NVRX, STEADYRUN, TORCHRUN, DeadlineError, Job, free_port
from report import add_common_arguments, effort_of, finish, print_table, ratio_spread, spread_text


@dataclass(frozen=True, slots=True)
class Launcher:
    """One side of the comparison. ``own_options(limit_s)``: what it is given besides the options that all have."""

    name: str
    program: tuple[str, ...]
    own_options: Callable[[float], list[str]]
    env: Callable[[float], dict[str, str]] = lambda limit_s: {}
    warm: bool = False
    is_ours: bool = False


def _ours(limit_s: float) -> list[str]:
    return ["--ft-run-dir={run_dir}", f"--ft-step-timeout={limit_s:g}"]


def _pg_timeout(limit_s: float) -> dict[str, str]:
    return {"BENCH_PG_TIMEOUT_S": f"{limit_s:g}"}


def _fresh_store(limit_s: float) -> dict[str, str]:
    return {**_pg_timeout(limit_s), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


LAUNCHERS = (
    Launcher("steadyrun", STEADYRUN, _ours, warm=True, is_ours=True),
    Launcher("steadyrun, no standby", STEADYRUN, lambda s: [*_ours(s), "--ft-standby=off"], is_ours=True),
    Launcher("torchrun", TORCHRUN, lambda s: [], _pg_timeout),
    Launcher("torchrun, fresh store", TORCHRUN, lambda s: [], _fresh_store),
    Launcher(
        "NVRx ft_launcher",
        NVRX,
        lambda s: [f"--ft-rank-section-timeouts=step:{s:g}", "--ft-rank-out-of-section-timeout=60"],
        lambda s: {"BENCH_CLIENT": "nvrx"},
    ),
)


@dataclass(frozen=True, slots=True)
class Try:
    """One fault. Times in seconds after it; None: not reached."""

    launcher: str
    fault: str
    agents: int
    round: int
    came_back: bool
    new_process_s: float | None = None
    joined_s: float | None = None
    first_step_s: float | None = None
    cold_start_s: float | None = None  # launcher's start to the first step of all ranks
    exit_codes: tuple[int, ...] = ()
    ended_clean: bool = False
    leftovers: tuple[str, ...] = ()
    was_warm: bool | None = None
    problem: str = ""


def commands(launcher: Launcher, agents: int, arguments: argparse.Namespace) -> list[list[str]]:
    script = [str(HERE / "restart_train.py")]
    options = ["--max-restarts=3", *launcher.own_options(arguments.limit)]
    if agents == 1:
        where = ["--standalone", f"--nproc-per-node={arguments.ranks}"]
        return [[*launcher.program, *where, *options, *script]]
    port = free_port()
    out = []
    for node in range(agents):
        if arguments.rendezvous == "static":
            where = [f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        else:
            where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id=bench{port}"]
        where += [f"--nnodes={agents}", f"--nproc-per-node={arguments.ranks // agents}"]
        out.append([*launcher.program, *where, *options, *script])
    return out


def standbys_ready(job: Job, ranks: int) -> bool:
    found = [s for node in job.live() for s in node.get("standbys", ())]
    return len(found) == ranks and all(s.get("ready") for s in found)


def first_steps(job: Job, old: set[int]) -> dict[int, float]:
    """Per rank: when a process that is not one of *old* did its first step."""
    found: dict[int, float] = {}
    for e in job.events("step"):
        if e["pid"] not in old:
            found.setdefault(e["rank"], e["at_s"])
    return found


def one_try(launcher: Launcher, fault: str, agents: int, number: int, arguments: argparse.Namespace) -> Try:
    name = f"{launcher.name}-{fault}-{agents}".replace(" ", "_")
    ranks = arguments.ranks
    with Job(launcher.env(arguments.limit) | {"BENCH_DEVICE": arguments.device}, arguments.keep, name) as job:
        control = job.folder / "control"
        control.mkdir()
        result = Try(launcher.name, fault, agents, number, False)
        came_back: dict[str, object] = {}
        try:
            began_s = time.monotonic()
            for argv in commands(launcher, agents, arguments):
                job.start(argv, {"BENCH_CONTROL": str(control)})
            started = job.wait_for(lambda: len(first_steps(job, set())) == ranks, 120, "the first step of all ranks")
            assert started
            came_back["cold_start_s"] = round(max(first_steps(job, set()).values()) - began_s, 3)
            job.wait_for(lambda: all_at(job, 20, ranks), 60, "step 20")
            if launcher.warm:
                job.wait_for(lambda: standbys_ready(job, ranks), 120, "standbys that are ready", poll_s=0.1)
            time.sleep(random.uniform(0.0, 0.5))  # no phase of anybody's poll interval is preferred
            pids = {e["rank"]: e["pid"] for e in job.events("start")}
            old = set(pids.values())
            if fault == "kill":
                fault_s = time.monotonic()
                os.kill(pids[ranks - 1], signal.SIGKILL)
            else:
                (control / "hang.new").write_text(str(pids[ranks - 1]))
                (control / "hang.new").rename(control / "hang")
                fault_s = job.wait_for(lambda: job.events("fault"), 20, "the fault")[0]["at_s"]
            limit_s = arguments.patience + (arguments.limit if fault == "hang" else 0)
            job.wait_for(lambda: len(first_steps(job, old)) == ranks, limit_s, "the first new step of all ranks")
            fresh = [e for e in job.events() if e["pid"] not in old]
            came_back |= {
                "came_back": True,
                "new_process_s": round(max(e["at_s"] for e in fresh if e["kind"] == "start") - fault_s, 3),
                "joined_s": round(max(e["at_s"] for e in fresh if e["kind"] == "joined") - fault_s, 3),
                "first_step_s": round(max(first_steps(job, old).values()) - fault_s, 3),
            }
            if launcher.is_ours:
                restarted = [r for r in job.journal("rank_started") if r["attempt"] > 0]
                came_back["was_warm"] = bool(restarted) and all(r["warm"] for r in restarted)
            (control / "finish").touch()
            codes = job.wait(60)
            came_back |= {"exit_codes": tuple(codes), "ended_clean": codes == [0] * agents}
            came_back["leftovers"] = tuple(job.leftovers())
        except DeadlineError as e:
            came_back["problem"] = str(e)
            if arguments.verbose:
                print(f"   {e}\n{job.output_tail()}", file=sys.stderr)
        return Try(**{**asdict(result), **came_back})


def all_at(job: Job, step: int, ranks: int) -> bool:
    return len({e["rank"] for e in job.events("step") if e["step"] >= step}) == ranks


def show(tries: list[Try], launchers: list[Launcher]) -> None:
    rows = []
    for agents in sorted({t.agents for t in tries}):
        for fault in dict.fromkeys(t.fault for t in tries):
            mine = [t for t in tries if t.agents == agents and t.fault == fault]
            ours = [t.first_step_s for t in mine if t.launcher == launchers[0].name]
            for launcher in launchers:
                its = [t for t in mine if t.launcher == launcher.name]
                if not its:
                    continue
                ratio = ratio_spread(ours, [t.first_step_s for t in its]) if len(its) == len(ours) else None
                ended = sum(t.came_back and t.ended_clean and not t.leftovers for t in its)
                rows.append(
                    [
                        f"{fault}, {agents} agent{'s' * (agents > 1)}: {launcher.name}",
                        f"{sum(t.came_back for t in its)}/{len(its)}",
                        f"{ended}/{len(its)}",
                        spread_text([t.new_process_s for t in its if t.new_process_s is not None]),
                        spread_text([t.first_step_s for t in its if t.first_step_s is not None]),
                        ratio.text(1) if ratio is not None and launcher is not launchers[0] else "",
                    ]
                )
    print()
    head = ["fault", "came back", "ended clean", "new process, s", "first step of all, s", f"by {launchers[0].name}"]
    print_table(head, rows)
    print("median (lowest-highest); the last column is the ratio of first steps, paired by round")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--tries", type=int, help="tries per launcher, fault and number of agents")
    parser.add_argument("--agents", default="", help="1, 2 or 1,2 (default 1; with --full 1,2)")
    parser.add_argument("--faults", default="kill,hang")
    parser.add_argument("--only", default="", help="launchers to run, by number: " + ", ".join(
        f"{i} {s.name}" for i, s in enumerate(LAUNCHERS)))  # fmt: skip
    parser.add_argument("--ranks", type=int, default=2, help="ranks in all (2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: NCCL, a GPU per rank")
    parser.add_argument("--rendezvous", choices=("c10d", "static"), default="c10d", help="for two agents")
    parser.add_argument("--limit", type=float, default=3.0, help="seconds without a step that count as a hang (3)")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds until a job counts as not come back (90)")
    parser.add_argument("--verbose", action="store_true", help="print the end of the output of tries that failed")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    rounds = arguments.tries or effort_of(arguments, quick=1, normal=5, full=20)
    agent_counts = [int(a) for a in (arguments.agents or ("1,2" if arguments.full else "1")).split(",")]
    launchers = [s for s in LAUNCHERS if s.program is not NVRX or importlib.util.find_spec("nvidia_resiliency_ext")]
    if arguments.only:
        launchers = [LAUNCHERS[int(i)] for i in arguments.only.split(",")]
    elif arguments.quick:
        launchers = [s for s in launchers if s.name != "steadyrun, no standby"]
    tries: list[Try] = []
    for number in range(rounds):
        for agents in agent_counts:
            for fault in arguments.faults.split(","):
                for launcher in launchers:
                    tries.append(one_try(launcher, fault, agents, number, arguments))
                    t = tries[-1]
                    took = (
                        f"{t.first_step_s:.2f} s" if t.first_step_s is not None else f"did not come back: {t.problem}"
                    )
                    warm = "" if t.was_warm is None else ", warm" if t.was_warm else ", cold"
                    left = f", left: {', '.join(t.leftovers)}" if t.leftovers else ""
                    print(
                        f"round {number + 1}: {fault}, {agents} agent(s), {launcher.name}: {took}{warm}{left}",
                        flush=True,
                    )
    show(tries, launchers)
    finish(arguments, "restart", [asdict(t) for t in tries])


if __name__ == "__main__":
    main()
