"""Many faults drawn at random on the demonstration: does it end with the losses of a run that nothing disturbed?

``examples/train_gpt.py`` trains on two ranks (DDP, gloo) twice: under torchrun without any fault, and under steadyrun
with one fault per attempt, of a kind, on a rank and after a step drawn with ``--seed``. Then the losses of every step
are compared bitwise, also of those that were done again after a restart; each fault must have its incident, with the
class and the culprit that the injector tells; nothing of the job may be left; and both launchers must end with exit
code 0. The exit code of this program is 1 if any of that does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from job import HERE, STEADYRUN, TORCHRUN, DeadlineError, Job, json_lines, state_of
from report import add_common_arguments, effort_of, finish, print_table, spread_text

from steadyrun.core.classes import FaultClass
from steadyrun.testing.faults import clean_up, expected_class, parse_faults

SCRIPT = HERE.parent / "examples" / "train_gpt.py"
SMALL = ("--layers=2", "--width=64", "--heads=2", "--length=32", "--batch=2", "--corpus-bytes=500000")
SLOW_S = 3.0  # a restart that takes longer, its limit not counted, is pointed out
TAIL_STEPS = 12  # after the last fault
HARMLESS_SHARE = 0.3  # of attempts in which something harmless happens first

# What strikes; the last fault of an entry decides, those before it only set the scene. Not here: what needs rights that
# not every machine gives (oom), what never harms (sleep, finite pauses: see HARMLESS), and what strikes at the end of
# the script (teardown, hang where=teardown). tests/fault/test_injected_faults.py has those.
CRASHES = (
    ("kill",),
    ("kill signal=BUS",),
    ("exit code=3",),
    ("sysexit code=4",),
    ("raise",),
    ("raise exception=torch.OutOfMemoryError",),
    ("segfault",),
    ("abort",),
    ("grandchildren", "kill"),
    ("shm", "abort"),
    ("ignore_term", "exit"),
)
HANGS = (
    ("hang",),
    ("hang where=collective",),
    ("busy",),
    ("busy_c",),
    ("stop",),
    ("dataloader",),
    ("ignore_term", "hang"),
    ("grandchildren", "stop"),
    ("shm", "hang where=collective"),
)
HARMLESS = ("sleep seconds=0.7", "stop seconds=0.5", "ignore_term", "busy seconds=0.5")


# -- the plan ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Planned:
    """What strikes in one attempt. ``texts``: without rank, step and attempt; the last one decides."""

    attempt: int
    rank: int
    step: int
    texts: tuple[str, ...]
    harmless: str = ""  # a whole entry of the plan

    @property
    def name(self) -> str:
        return " + ".join(self.texts)

    @property
    def expected(self) -> FaultClass:
        cls = expected_class(parse_faults(self.texts[-1])[0])
        assert cls is not None
        return cls

    @property
    def is_hang(self) -> bool:
        return self.texts in HANGS

    @property
    def plan(self) -> str:
        entries = [f"{t} rank={self.rank} step={self.step} attempt={self.attempt}" for t in self.texts]
        return "; ".join([self.harmless, *entries] if self.harmless else entries)


def draw(count: int, seed: int, apart: tuple[int, int], ranks: int) -> list[Planned]:
    """*count* faults, every kind once before one comes twice; ``apart``: fewest and most steps from one to the next.

    A step is above all earlier ones: an attempt that begins anew at the newest checkpoint always gets further than the
    one before, so that neither the budget nor the rule of the same error twice ends the job.
    """
    chance = random.Random(seed)
    deck: list[tuple[str, ...]] = []
    planned, step = [], 0
    for attempt in range(count):
        if not deck:
            deck = chance.sample((*CRASHES, *HANGS), len(CRASHES) + len(HANGS))
        gap = chance.randint(*apart)
        harmless = ""
        if chance.random() < HARMLESS_SHARE:
            at = step + gap - chance.randint(1, apart[0] - 1)
            harmless = f"{chance.choice(HARMLESS)} rank={chance.randrange(ranks)} step={at} attempt={attempt}"
        step += gap
        planned.append(Planned(attempt, chance.randrange(ranks), step, deck.pop(), harmless))
    return planned


# -- what happened -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Outcome:
    """One fault and what came of it. Times in seconds after it struck; None: did not happen.

    Attributes:
        found: class of the main finding; ``ranks`` its culprits.
        noticed_s, decided_s, started_s: until the order to stop, the decision, the start of the last new rank.
        back_s: until all ranks had done a step in the next attempt; for a hang, its limit is part of it.
        restart_s: the same without the limit.
        standbys: what the new ranks ran on: ``ready`` ones, ``early`` ones that had not loaded everything yet, none.
        again_steps: steps that were done again.
    """

    attempt: int
    fault: str
    rank: int
    step: int
    is_hang: bool
    expected: str
    found: str = ""
    ranks: tuple[int, ...] = ()
    summary: str = ""
    noticed_s: float | None = None
    decided_s: float | None = None
    started_s: float | None = None
    back_s: float | None = None
    restart_s: float | None = None
    confidence: float = 0.0
    standbys: str = "none"
    again_steps: int | None = None
    incidents: int = 0

    @property
    def is_right(self) -> bool:
        return self.incidents == 1 and self.found == self.expected and self.ranks == (self.rank,)

    @property
    def is_even(self) -> bool:
        """The class is right, and the verdict says that it had to guess who of two ranks skipped a collective."""
        return (
            not self.is_right
            and self.incidents == 1
            and self.found == self.expected == FaultClass.SKIPPED_COLLECTIVE.value
            and self.confidence < 0.5
        )


def outcome_of(
    planned: Planned, run: Path, journal: Sequence[Mapping[str, Any]], ranks: int, limit_s: float
) -> Outcome:
    facts: dict[str, Any] = {}
    verdicts = [json.loads(f.read_text()) for f in sorted(run.glob("incidents/*/verdict.json"))]
    verdicts = [v for v in verdicts if v["attempt"] == planned.attempt]
    facts["incidents"] = len(verdicts)
    if verdicts and verdicts[0]["findings"]:
        first = verdicts[0]["findings"][0]
        facts |= {"found": first["class"], "ranks": tuple(first["ranks"]), "summary": first["summary"]}
        facts["confidence"] = first["confidence"]
    struck = [r for r in struck_in(run, planned.attempt) if r["text"].startswith(planned.texts[-1])]
    if struck:
        struck_s = float(struck[-1]["at_s"])
        this = [r for r in journal if r["attempt"] == planned.attempt and float(r["at_s"]) >= struck_s]
        following = [r for r in journal if r["attempt"] == planned.attempt + 1]
        started = [r for r in following if r["type"] == "rank_started"]
        first_steps = [r for r in following if r["type"] == "rank_first_step"]
        facts["noticed_s"] = after(struck_s, [r for r in this if r["type"] == "stop"][:1])
        facts["decided_s"] = after(struck_s, [r for r in this if r["type"] == "decision"][:1])
        facts["started_s"] = after(struck_s, started)
        if len(first_steps) == ranks:
            back_s = after(struck_s, first_steps)
            assert back_s is not None
            facts |= {"back_s": back_s, "restart_s": round(back_s - (limit_s if planned.is_hang else 0.0), 3)}
            facts["again_steps"] = planned.step + 1 - min(int(r["step"]) for r in first_steps)
        facts["standbys"] = standbys_of(started, [r for r in journal if r["type"] == "standby"])
    return Outcome(
        planned.attempt,
        planned.name,
        planned.rank,
        planned.step,
        planned.is_hang,
        planned.expected.value,
        **facts,
    )


def standbys_of(started: Sequence[Mapping[str, Any]], standbys: Sequence[Mapping[str, Any]]) -> str:
    if not started or not all(r["warm"] for r in started):
        return "none"
    before = [r for r in standbys if r["attempt"] < started[0]["attempt"]]
    is_ready = bool(before) and before[-1]["event"] == "ready" and before[-1]["ready"] == len(started)
    return "ready" if is_ready else "early"


def after(struck_s: float, records: Sequence[Mapping[str, Any]]) -> float | None:
    return round(max(float(r["at_s"]) for r in records) - struck_s, 3) if records else None


def struck_in(run: Path, attempt: int) -> list[dict[str, Any]]:
    """What the injector noted in one attempt, all ranks."""
    return [r for f in run.glob(f"attempts/{attempt}/rank_*/faults.jsonl") for r in json_lines(f)]


def losses_of(path: Path) -> dict[int, list[float]]:
    """By step: every loss that was logged, in order."""
    found: dict[int, list[float]] = {}
    for line in json_lines(path):
        found.setdefault(line["step"], []).append(line["loss"])
    return found


# -- what is left ------------------------------------------------------------------------------------------------------
def sockets_of(pids: Sequence[int]) -> set[str]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(fd.path)
                    if target.startswith("socket:["):
                        found.add(target[8:-1])
    return found


def listeners() -> Iterator[tuple[int, str]]:
    """All TCP ports that are listened on, with the socket's inode."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                parts = line.split()
                if parts[3] == "0A":
                    yield int(parts[1].rpartition(":")[2], 16), parts[9]


def left_behind(job: Job, run: Path, ports: set[int]) -> list[str]:
    """Processes, files in /dev/shm and ports of the ended job."""
    left = job.leftovers(patience_s=10.0)
    told = [r for f in run.glob("attempts/*/rank_*/faults.jsonl") for r in json_lines(f)]
    left += [f"process {p} of {r['name']}" for r in told for p in r.get("pids", ()) if state_of(int(p)) not in "ZX"]
    left += [f"file {f}" for r in told for f in r.get("files", ()) if Path(f).exists()]
    owners = {str(r["pid"]) for r in job.journal("rank_started")} | {str(p.pid) for p in job.launchers}
    names = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    left += [f"file /dev/shm/{n}" for n in names if any(f"_{o}_" in n or f"-{o}-" in n for o in owners)]
    left += [f"port {port}" for port in ports & {p for p, _ in listeners()}]
    return left


# -- the two runs ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Soak:
    """Both runs, judged.

    Attributes:
        exit_codes: of the undisturbed run, and of the one with faults.
        done_again: steps that were done more than once.
        problems: whatever is not as it should be, one line each; slow restarts are not among them.
    """

    seed: int
    plan: str
    steps: int
    limit_s: float
    exit_codes: tuple[int, int]
    took_s: tuple[float, float]
    equal_steps: int
    done_again: int
    outcomes: tuple[Outcome, ...]
    leftovers: tuple[str, ...]
    problems: tuple[str, ...]


def train(job: Job, command: Sequence[str], out: Path, steps: int, every: int, plan: str) -> None:
    script = [str(SCRIPT), f"--out={out}", f"--steps={steps}", f"--every={every}", "--log-every=50", *SMALL]
    job.start([*command, *script], {"STEADYRUN_FAULTS": plan} if plan else None)


def wait_for_end(job: Job, deadline_s: float) -> tuple[int, set[int]]:
    """The newest launcher's exit code, and the ports that it was seen to listen on; restarts are told as they come.

    Raises:
        DeadlineError: it has not ended.
    """
    launcher = job.launchers[-1]
    limit_s = time.monotonic() + deadline_s
    ports: set[int] = set()
    told = 0
    while launcher.poll() is None:
        if time.monotonic() > limit_s:
            raise DeadlineError(f"the job had not ended after {deadline_s:g} s")
        own = sockets_of([launcher.pid])
        ports |= {port for port, inode in listeners() if inode in own}
        incidents = job.journal("incident")
        for record in incidents[told:]:
            first = record["verdict"]["findings"][0]
            print(f"   attempt {record['attempt']}: {first['class']} {first['ranks']} {first['summary']}", flush=True)
        told = len(incidents)
        select.select([], [], [], 0.25)
    return int(launcher.returncode), ports


def soak(arguments: argparse.Namespace, count: int) -> Soak:
    """Raises:
    DeadlineError: a run has not ended in time.
    """
    planned = draw(count, arguments.seed, tuple(arguments.apart), arguments.ranks)
    plan = "; ".join(p.plan for p in planned)
    steps = planned[-1].step + TAIL_STEPS
    limit_s = arguments.limit
    print(f"seed {arguments.seed}: {count} faults in {steps} steps", flush=True)
    with Job(keep=arguments.keep, name="soak") as job:
        alone, disturbed = job.folder / "alone", job.folder / "disturbed"
        where = ["--standalone", f"--nproc-per-node={arguments.ranks}"]
        began_s = time.monotonic()
        train(job, [*TORCHRUN, *where], alone, steps, arguments.every, "")
        alone_code, _ = wait_for_end(job, arguments.patience)
        between_s = time.monotonic()
        print(f"undisturbed, under torchrun: exit code {alone_code}, {between_s - began_s:.0f} s", flush=True)
        ours = ["--ft-run-dir={run_dir}", f"--ft-step-timeout={limit_s:g}", "--ft-restart-grace=1"]
        train(job, [*STEADYRUN, *where, *ours], disturbed, steps, arguments.every, plan)
        code, ports = wait_for_end(job, arguments.patience)
        took_s = (round(between_s - began_s, 1), round(time.monotonic() - between_s, 1))
        run = (job.run_dirs[-1] / "latest").resolve()
        journal = job.journal("rank_started", "rank_first_step", "stop", "decision", "standby")
        outcomes = tuple(outcome_of(p, run, journal, arguments.ranks, limit_s) for p in planned)
        leftovers = tuple(left_behind(job, run, ports))
        clean_up(run)
        expected, seen = losses_of(alone / "loss.jsonl"), losses_of(disturbed / "loss.jsonl")
        problems = [*differences(steps, expected, seen), *complaints(outcomes, run), *leftovers]
        problems += [f"{n} ended with exit code {c}" for n, c in (("torchrun", alone_code), ("steadyrun", code)) if c]
        if problems and arguments.verbose:
            print(job.output_tail(40), file=sys.stderr)
    return Soak(
        seed=arguments.seed,
        plan=plan,
        steps=steps,
        limit_s=limit_s,
        exit_codes=(alone_code, code),
        took_s=took_s,
        equal_steps=sum(set(seen.get(step, ())) == set(expected.get(step, ())) != set() for step in range(steps)),
        done_again=sum(len(losses) > 1 for losses in seen.values()),
        outcomes=outcomes,
        leftovers=leftovers,
        problems=tuple(problems),
    )


def differences(
    steps: int, expected: Mapping[int, Sequence[float]], seen: Mapping[int, Sequence[float]]
) -> Iterator[str]:
    """Steps whose losses are not bitwise those of the undisturbed run, each time they were done."""
    for step in sorted({*range(steps), *expected, *seen}):
        if len(expected.get(step, ())) != 1:
            yield f"step {step} was logged {len(expected.get(step, ()))} times by the undisturbed run"
        elif set(seen.get(step, ())) != set(expected[step]):
            yield f"loss of step {step}: {list(seen.get(step, ()))}, undisturbed {expected[step][0]}"


def complaints(outcomes: Sequence[Outcome], run: Path) -> Iterator[str]:
    for o in outcomes:
        who = f"attempt {o.attempt}, {o.fault} of rank {o.rank} after step {o.step}"
        if o.noticed_s is None:
            yield f"{who}: did not strike, or nobody noticed"
        elif not o.is_right and not o.is_even:
            yield (
                f"{who}: {o.incidents} incident(s), {o.found or 'nothing found'} of {list(o.ranks)}, expected "
                f"{o.expected} of [{o.rank}]: {o.summary}"
            )
        if o.noticed_s is not None and o.back_s is None:
            yield f"{who}: the job did not come back"
    known = {o.attempt for o in outcomes}
    for file in sorted(run.glob("incidents/*/verdict.json")):
        verdict = json.loads(file.read_text())
        if verdict["attempt"] not in known:
            yield f"attempt {verdict['attempt']} has an incident that no fault explains: {verdict['findings'][:1]}"


# -- telling -----------------------------------------------------------------------------------------------------------
def show(result: Soak) -> None:
    rows = [
        [
            f"{o.attempt}: {o.fault}, rank {o.rank}, step {o.step}",
            f"{o.found} {list(o.ranks)}",
            "yes" if o.is_right else "even" if o.is_even else "NO",
            *("-" if s is None else f"{s:.2f}" for s in (o.noticed_s, o.decided_s, o.started_s, o.restart_s)),
            o.standbys,
            "-" if o.again_steps is None else str(o.again_steps),
        ]
        for o in result.outcomes
    ]
    print()
    head = ["fault", "verdict", "right", "noticed, s", "decided", "new ranks", "restart", "standbys", "done again"]
    print_table(head, rows)
    print("seconds after the fault; restart: first step of all new ranks, without the limit of a hang\n")
    groups = []
    for is_hang in (False, True):
        for standbys in ("ready", "early", "none"):
            its = [o for o in result.outcomes if o.is_hang is is_hang and o.standbys == standbys]
            name = f"{'hang, past its limit' if is_hang else 'crash'}; standbys: {standbys}"
            restarts = [o.restart_s for o in its if o.restart_s is not None]
            if restarts:
                slow = sum(s > SLOW_S for s in restarts)
                groups.append([name, str(len(its)), spread_text(restarts), str(slow)])
    print_table(
        [f"restarts (limit {result.limit_s:g} s)", "n", "median (lowest-highest), s", f"> {SLOW_S:g} s"], groups
    )
    right = sum(o.is_right for o in result.outcomes)
    even = sum(o.is_even for o in result.outcomes)
    print(f"\nverdicts right: {right} of {len(result.outcomes)}", end="")
    print(f"; {even} guessed, and said so, which of two ranks skipped a collective" if even else "")
    print(f"losses bitwise those of the undisturbed run: {result.equal_steps} of {result.steps} steps", end="")
    print(f" ({result.done_again} of them done more than once)")
    print(f"exit codes: torchrun {result.exit_codes[0]}, steadyrun {result.exit_codes[1]}", end="")
    print(f"; {result.took_s[0]:.0f} s undisturbed, {result.took_s[1]:.0f} s with faults")
    print(f"left behind: {', '.join(result.leftovers) or 'nothing'}")
    for problem in result.problems:
        print(f"NOT AS EXPECTED: {problem}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--faults", type=int, help="how many (30; with --quick 4)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks, from 2 on (2)")
    parser.add_argument("--seed", type=int, help="what is drawn (a random one, which is printed)")
    parser.add_argument(
        "--apart", type=int, nargs=2, default=(20, 100), metavar=("MIN", "MAX"), help="steps between two (20 100)"
    )
    parser.add_argument("--every", type=int, default=8, help="a checkpoint each N steps (8)")
    parser.add_argument("--limit", type=float, default=3.0, help="seconds without a step that count as a hang (3)")
    parser.add_argument("--patience", type=float, default=1800.0, help="seconds until a run counts as stuck (1800)")
    parser.add_argument("--verbose", action="store_true", help="print the end of the output if something is wrong")
    arguments = parser.parse_args()
    if not 2 <= arguments.apart[0] <= arguments.apart[1]:
        parser.error(f"--apart needs 2 <= MIN <= MAX, got {arguments.apart[0]} {arguments.apart[1]}")
    if arguments.ranks < 2:
        parser.error("--ranks must be at least 2: one rank cannot be missed by another")
    if arguments.every < 1 or (arguments.faults is not None and arguments.faults < 1):
        parser.error("--every and --faults must be at least 1")
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(1_000_000)
    return arguments


def main() -> int:
    arguments = parse_arguments()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    try:
        result = soak(arguments, arguments.faults or effort_of(arguments, quick=4, normal=30, full=30))
    except DeadlineError as e:
        print(f"seed {arguments.seed}: {e}", file=sys.stderr)
        return 1
    show(result)
    finish(arguments, "soak", asdict(result))
    return 1 if result.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
