"""``steadyctl sdc``: whether the ranks of a run held the bytes that they should, who did not, and what checks cost."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from steadyrun.ctl.console import Column, Console, clock_time, duration, plain, size
from steadyrun.ctl.runs import RunLog, open_run

__all__ = ["register"]

SDC_SCHEMA: Final = "steadyrun.sdc/1"
WRONG: Final = 10  # exit codes, as those of postmortem and stragglers
UNDECIDED: Final = 11
MOST_ROWS: Final = 16

EPILOG: Final = """\
RUN is a run folder (or a folder of them: its latest); the journals of all nodes
that are in it are read, live or finished.

Replicas of a tensor must hold the same bytes, and no tensor may change between
the updates. Both is seen of parameters and optimizer state. A gradient that one
rank computes wrongly is not: all replicas take it over. Replays see it: now and
then a rank computes a microbatch of another one of its node again.

exit codes:
   0  all that was compared agreed
  10  somebody held wrong bytes
  11  undecided: nothing was compared
   1  no run
   2  the command line cannot be used

examples:
  steadyctl sdc
  steadyctl sdc steadyrun/latest --json | jq '.found[].sentence'
"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "sdc",
        help="say whether ranks held wrong bytes (silent data corruption), which, and what the checks cost",
        description="Shows the checks of the ranks' bytes: what agreed, who held wrong bytes, and the cost.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("where", nargs="?", metavar="RUN", help="run folder (default: the latest in ./steadyrun)")
    parser.add_argument("--json", action="store_true", help=f"print {SDC_SCHEMA}")
    parser.set_defaults(run=run_sdc)


@dataclass(slots=True)
class _Rank:
    """The newest that a rank's node has told of its checks."""

    rank: int
    node: str
    attempt: int
    told: Mapping[str, Any]

    def number(self, name: str) -> float:
        value = self.told.get(name)
        return float(value) if isinstance(value, (int, float)) else 0.0

    @property
    def share(self) -> float | None:
        """Of the time of training in the attempt that checks took; None: not known."""
        trained_s = self.number("trained_s")
        return self.number("cost_s") / trained_s if trained_s > 0 else None


@dataclass(slots=True)
class _Checks:
    """What the journals of a run say."""

    ranks: dict[int, _Rank] = field(default_factory=dict)
    compared: int = 0
    agreed: int = 0
    newest: int | None = None
    last_good: int | None = None
    found: list[dict[str, Any]] = field(default_factory=list)
    verified: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    out_of_line: list[dict[str, Any]] = field(default_factory=list)
    spikes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_wrong(self) -> bool:
        return bool(self.found)


def run_sdc(args: argparse.Namespace, console: Console) -> int:
    """The exit code says whether somebody held wrong bytes."""
    run = open_run(args.where)
    checks = _read(RunLog.read(run))
    if args.json:
        console.json(_to_json(checks, str(run.root)))
    else:
        for line in _tell(checks, console):
            console.print(line)
    if checks.is_wrong:
        return WRONG
    return 0 if checks.compared or any(r.number("checks") > 1 for r in checks.ranks.values()) else UNDECIDED


def _read(log: RunLog) -> _Checks:
    out = _Checks()
    for record in log.of_type("integrity"):
        match record.get("event"):
            case "checks":
                _take_ranks(out, record)
            case "compared":
                out.compared += int(record.get("checks", 0))
                out.agreed += int(record.get("agreed", 0))
                out.newest, out.last_good = record.get("newest_step"), record.get("last_good")
            case "found":
                own = {k: v for k, v in record.items() if k not in ("v", "type", "event", "at_s")}
                out.found.append({**own, "incident": None, "back_to_done": None})
            case "rolled_back" if out.found:
                out.found[-1].update(incident=record.get("incident"), back_to_done=record.get("to"))
            case "verified":
                out.verified.append({"step": record.get("step"), "path": record.get("path")})
            case "out_of_line":
                names = ("rank", "step", "what", "value", "usual", "z", "attempt")
                out.out_of_line.append({k: record.get(k) for k in names})
            case "spike":
                fields = ("first", "last", "text", "attempt")
                out.spikes.append({**{k: record.get(k) for k in fields}, "back_to": None})
            case "cured" if out.spikes:
                batches = [record.get("first_batch"), record.get("end_batch")]
                if all(isinstance(b, int) for b in batches):
                    out.spikes[-1].update(back_to=record.get("to"), left_out=batches)
            case "note" | "in_vain":
                text = str(record.get("text", ""))
                if text and text not in out.notes:
                    out.notes.append(text)
            case _:
                pass  # of a newer agent
    for record in log.of_type("incident"):
        details = (record.get("verdict") or {}).get("details") or {}
        sentence = (details.get("sdc") or {}).get("sentence")
        for found in out.found:
            if found["incident"] is None and sentence is not None and found.get("sentence") == sentence:
                found["incident"] = record.get("number")
    return out


def _take_ranks(out: _Checks, record: Mapping[str, Any]) -> None:
    ranks = record.get("ranks")
    for rank, told in ranks.items() if isinstance(ranks, Mapping) else ():
        if str(rank).isdecimal() and isinstance(told, Mapping):
            number = int(rank)
            out.ranks[number] = _Rank(number, str(record.get("node", "")), int(record.get("attempt", 0)), told)


def _to_json(checks: _Checks, root: str) -> dict[str, Any]:
    return {
        "schema": SDC_SCHEMA,
        "run": root,
        "compared": checks.compared,
        "agreed": checks.agreed,
        "newest_step": checks.newest,
        "last_good_step": checks.last_good,
        "found": checks.found,
        "verified_checkpoints": checks.verified,
        "ranks": [
            {"rank": r.rank, "node": r.node, "attempt": r.attempt, **r.told, "share": r.share}
            for r in sorted(checks.ranks.values(), key=lambda r: r.rank)
        ],
        "out_of_line": checks.out_of_line,
        "spikes": checks.spikes,
        "notes": checks.notes,
    }


def _tell(checks: _Checks, console: Console) -> list[str]:
    lines = [_headline(checks, console)]
    for found in checks.found:
        lines += ["", *_tell_found(found, console)]
    lines += _tell_values(checks, console)
    if checks.verified:
        steps = ", ".join(str(v["step"]) for v in checks.verified[-6:])
        lines.append(f"checkpoints that all ranks agreed on: {len(checks.verified)} (newest: steps {steps})")
    if checks.ranks:
        lines += ["", *_table(list(checks.ranks.values()), console)]
        lines += _tell_replays(list(checks.ranks.values()), console)
    for note in checks.notes[:8]:
        lines += console.wrapped(plain(note), 2, "  note: ")[:3]
    return lines


def _tell_values(checks: _Checks, console: Console) -> list[str]:
    """Losses and norms of gradients: they accuse nobody."""
    lines: list[str] = []
    if checks.out_of_line:
        by_what: dict[str, list[Any]] = {}
        for told in checks.out_of_line:
            by_what.setdefault(str(told["what"]), []).append(told["step"])
        for what, steps in by_what.items():
            known = sorted({s for s in steps if isinstance(s, int)})
            some = ", ".join(map(str, known[:6])) + (", ..." if len(known) > 6 else "")
            lines += console.wrapped(f"{plain(what)} not finite or far above the usual after steps {some}", 2, "")
    for spike in checks.spikes:
        done = ": training went on"
        if spike["back_to"] is not None:
            first, end = spike["left_out"]
            done = f": training went back to step {spike['back_to']} and left out batches {first} to {end - 1}"
        lines += console.wrapped(f"loss spike, steps {spike['first']} to {spike['last']}{done}", 2, "")
    return lines


def _headline(checks: _Checks, console: Console) -> str:
    if checks.found:
        many = len(checks.found)
        return console.styled(f"wrong bytes were found {'once' if many == 1 else f'{many} times'}", "red", "bold")
    if checks.compared:
        upto = "" if checks.last_good is None else f", the newest after step {checks.last_good}"
        return console.styled(f"all replicas agreed in {checks.agreed} of {checks.compared} checks{upto}", "green")
    if checks.ranks:
        return "nothing has a replica here; nothing changed between updates where that was looked at"
    return console.styled("nothing was compared: checks are off (--ft-sdc), or no model was found", "yellow")


def _tell_found(found: Mapping[str, Any], console: Console) -> list[str]:
    at = found.get("at_unix_s")
    when = clock_time(float(at), with_date=True) if isinstance(at, (int, float)) else "-"
    number = f"incident {found['incident']}, " if found.get("incident") is not None else ""
    lines = console.wrapped(
        f"{number}attempt {found.get('attempt')}, {when}: {plain(found.get('sentence', ''))}", 2, ""
    )
    for where in _sequence(found.get("places")):
        lines += console.wrapped(plain(_place(where)), 4, "  - ")
    gpus, nodes = _sequence(found.get("gpus")), _sequence(found.get("nodes"))
    if nodes or gpus:
        lines.append("  " + plain(", ".join([*(f"node {n}" for n in nodes), *(f"GPU {g}" for g in gpus)])))
    took = found.get("took_s")
    took_text = f"; found out within {duration(float(took))}" if isinstance(took, (int, float)) else ""
    if found.get("back_to_done") is not None:
        verified = " (verified)" if found.get("back_to_is_verified") else ""
        lines.append(f"  training went back to step {found['back_to_done']}{verified}{took_text}")
    else:
        lines.append(f"  training was not touched{took_text}")
    return lines


def _place(where: Any) -> str:
    if not isinstance(where, Mapping):
        return "?"
    head = f"rank {where.get('rank')}, {where.get('tensor')}"
    elements = [e for e in _sequence(where.get("elements")) if isinstance(e, Sequence) and len(e) >= 2]
    if not elements:
        return f"{head}: {where.get('why_not') or 'not located'}"
    some = "; ".join(_element(e, int(where.get("element_bytes") or 0)) for e in elements[:3])
    return f"{head} ({where.get('dtype')}): {some}" + ("; ..." if len(elements) > 3 or not where.get("is_all") else "")


def _element(e: Sequence[Any], element_bytes: int) -> str:
    bits = ", ".join(map(str, _sequence(e[1])[:8]))
    text = f"element {e[0]}" + (f", bit {bits}" if bits else "")
    if len(e) >= 4 and isinstance(e[2], int) and isinstance(e[3], int):
        text += f" (0x{e[2]:0{2 * element_bytes}x}, should be 0x{e[3]:0{2 * element_bytes}x})"
    return text


def _sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _tell_replays(ranks: list[_Rank], console: Console) -> list[str]:
    """Of the newest attempt: who has computed whose microbatches again."""
    attempt = max(r.attempt for r in ranks)
    replays = [(r, t) for r in ranks if r.attempt == attempt and isinstance(t := r.told.get("replay"), Mapping)]
    if not replays:
        return []
    clean = sum(_number(t, "clean") for _, t in replays)
    newest = [int(t["newest_step"]) for _, t in replays if isinstance(t.get("newest_step"), int)]
    is_alone = all(t.get("of") == r.rank for r, t in replays)
    whose = "of their own (one rank per node)" if is_alone else "of each other"
    head = f"microbatches {whose} that ranks have computed again, with the same gradients: {clean:.0f}"
    lines = ["", head + (f", the newest at step {max(newest)}" if newest else "")]
    differed = [f"rank {r.rank} {_number(t, 'differed'):.0f}" for r, t in replays if _number(t, "differed")]
    if differed:
        lines.append(console.styled(f"  with others: {', '.join(differed[:8])}", "red"))
    costs = [(_number(t, "cost_s") / trained_s, r) for r, t in replays if (trained_s := r.number("trained_s")) > 0]
    if costs:
        share, r = max(costs, key=lambda pair: pair[0])
        every = max(_number(t, "interval") for _, t in replays)
        lines.append(f"  every {every:.0f} steps, {100 * share:.3f} % of the time on rank {r.rank}")
    off = [str(r.rank) for r, t in replays if t.get("state") == "off"]
    if off:
        lines.append(f"  off on rank {', '.join(off[:16])}")
    return lines


def _number(told: Mapping[str, Any], name: str) -> float:
    value = told.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _table(ranks: list[_Rank], console: Console) -> list[str]:
    columns = [
        Column("rank", right=True),
        Column("node", grows=True),
        Column("state"),
        Column("checks", right=True),
        Column("every", right=True),
        Column("tensors", right=True),
        Column("bytes", right=True),
        Column("cost", right=True),
        Column("share", right=True),
    ]
    rows = []
    for r in sorted(ranks, key=lambda r: (-r.attempt, r.rank))[:MOST_ROWS]:
        checks = r.number("checks")
        each = f"{1000 * r.number('cost_s') / checks:.2f} ms" if checks else "-"
        share = "-" if r.share is None else f"{100 * r.share:.3f} %"
        rows.append(
            [
                str(r.rank),
                plain(r.node),
                plain(r.told.get("state", "")),
                f"{checks:.0f}",
                f"{r.number('interval'):.0f}",
                f"{r.number('tensors'):.0f}",
                size(r.number("size_bytes")),
                each,
                share,
            ]
        )
    lines = console.table(columns, rows)
    if len(ranks) > MOST_ROWS:
        lines.append(console.styled(f"and {len(ranks) - MOST_ROWS} more ranks (--json)", "dim"))
    return lines
