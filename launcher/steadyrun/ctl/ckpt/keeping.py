"""``steadyctl ckpt rollback``, ``prune`` and ``quarantine``: which checkpoints a run goes on from, and which stay."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from steadyrun.checkpoint import commit, quarantine, rollback
from steadyrun.checkpoint.catalog import Listed, look
from steadyrun.checkpoint.foreign import committed_in, pointed_in
from steadyrun.checkpoint.retention import LEAST_KEPT, apply, to_remove
from steadyrun.core.errors import ConfigError
from steadyrun.core.runfolder import RunFolder, find_run
from steadyrun.ctl.console import Column, Console, ago, plain, size
from steadyrun.ctl.runs import RunLog, is_agent_alive, live_nodes

__all__ = ["register"]

ROLLBACK_SCHEMA: Final = "steadyrun.ckpt_rollback/1"
PRUNE_SCHEMA: Final = "steadyrun.ckpt_prune/1"
QUARANTINE_SCHEMA: Final = "steadyrun.ckpt_quarantine/1"
FRESH_S: Final = 3600.0  # what was not touched for longer is of a save that was cut off


def register(commands: Any) -> None:
    """Add the three commands to the parser."""
    _register_rollback(commands)
    _register_prune(commands)
    _register_quarantine(commands)


def _register_rollback(commands: Any) -> None:
    parser = commands.add_parser(
        "rollback",
        help="go back to an older checkpoint, and skip batches",
        description=(
            "Asks a run to go back to the newest checkpoint up to a step, and to leave out\n"
            "batches from there on: the usual cure of a loss spike. It is carried out once,\n"
            "by the next attempt of the job, which a live run begins by itself. Newer\n"
            "checkpoints are set aside, not deleted."
        ),
        epilog=(
            "examples:\n"
            "  steadyctl ckpt rollback checkpoints --to 12000\n"
            "  steadyctl ckpt rollback steadyrun/latest --to 12000 --skip-batches 12001:12300\n"
            "  steadyctl ckpt rollback checkpoints --cancel\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("where", type=Path, metavar="RUN_OR_ROOT", help="a run folder, or a folder of checkpoints")
    parser.add_argument("--to", type=int, metavar="STEP", help="the newest checkpoint up to this step is used")
    parser.add_argument(
        "--skip-batches",
        action="append",
        default=[],
        metavar="A:B",
        help="leave out batches A to B-1; may be given several times",
    )
    parser.add_argument("--cancel", action="store_true", help="withdraw a request that was not carried out yet")
    parser.add_argument("--json", action="store_true", help=f"print {ROLLBACK_SCHEMA}")
    parser.set_defaults(run=run_rollback)


def _register_prune(commands: Any) -> None:
    parser = commands.add_parser(
        "prune",
        help="remove old checkpoints",
        description=(
            "Removes checkpoints of steadyrun (and those of other programs that watch.commit\n"
            "has committed) from a folder, oldest first. What a job has set up is removed by\n"
            "the job itself; this is for folders that none looks after. The newest verified\n"
            "one always stays, and never fewer than two complete ones. What is being read\n"
            "stays."
        ),
        epilog=(
            "examples:\n"
            "  steadyctl ckpt prune checkpoints --keep 3 --dry-run\n"
            "  steadyctl ckpt prune checkpoints --keep 3 --keep-every 10000\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", type=Path, metavar="ROOT", help="a folder of checkpoints")
    parser.add_argument("--keep", type=int, required=True, metavar="N", help="newest complete ones, 2 at least")
    parser.add_argument("--keep-every", type=int, metavar="M", help="keep steps that are multiples of this for ever")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    parser.add_argument("--json", action="store_true", help=f"print {PRUNE_SCHEMA}")
    parser.set_defaults(run=run_prune)


def _register_quarantine(commands: Any) -> None:
    parser = commands.add_parser(
        "quarantine",
        help="checkpoints that bring the same fault back",
        description=(
            "Shows the checkpoints that are not resumed from any more, because the same\n"
            "fault came back soon after they were loaded; lifts a quarantine with --lift."
        ),
        epilog=(
            "examples:\n  steadyctl ckpt quarantine checkpoints\n  steadyctl ckpt quarantine checkpoints --lift 12000\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("root", type=Path, metavar="ROOT", help="a folder of checkpoints")
    parser.add_argument("--lift", type=int, metavar="STEP", help="let this step be used again")
    parser.add_argument("--json", action="store_true", help=f"print {QUARANTINE_SCHEMA}")
    parser.set_defaults(run=run_quarantine)


# -- rollback --------------------------------------------------------------------------------------------------------
def run_rollback(args: argparse.Namespace, console: Console) -> int:
    """0; raises when the request cannot be made."""
    if args.cancel == (args.to is not None):
        raise ConfigError("cannot roll back: give either --to STEP or --cancel")
    try:
        ranges = [rollback.parse_range(text) for text in args.skip_batches]
    except ValueError as e:
        raise ConfigError(f"cannot roll back: {e}") from None
    root, run = _root_of(args.where)
    if args.cancel:
        withdrawn = rollback.cancel(root)
        if args.json:
            console.json(
                {"schema": ROLLBACK_SCHEMA, "root": str(root), "cancelled": withdrawn and _request_json(withdrawn)}
            )
        else:
            console.print("no rollback was waiting" if withdrawn is None else f"withdrawn: {_words(withdrawn)}")
        return int(withdrawn is None)
    asked = rollback.request(root, args.to, ranges, time.time())
    chosen = next(c for c in look(root).complete if c.step <= args.to and not c.is_superseded)
    is_live = run is not None and any(is_agent_alive(node) for node in live_nodes(run))
    newer = [c for c in look(root).complete if c.step > args.to and not c.is_superseded]
    if args.json:
        console.json(
            {
                "schema": ROLLBACK_SCHEMA,
                "root": str(root),
                "run": None if run is None else str(run.root),
                "is_live": is_live,
                "request": _request_json(asked),
                "checkpoint": {"path": str(chosen.path), "step": chosen.step, "is_verified": chosen.is_verified},
                "set_aside_count": len(newer),
            }
        )
        return 0
    console.print(f"{console.styled('asked for', 'green', 'bold')}: {_words(asked)}")
    verified = "verified" if chosen.is_verified else "not verified yet: steadyctl ckpt verify reads all of it"
    console.print(f"  goes on after step {chosen.step}, from {plain(chosen.path)} ({verified})")
    if newer:
        console.print(f"  {len(newer)} newer checkpoints will be set aside, not deleted")
    when = "the run is live: its saver restarts the ranks" if is_live else "the next start of the job carries it out"
    console.print(console.styled(f"  {when}; withdraw it with: steadyctl ckpt rollback {root} --cancel", "dim"))
    return 0


def _request_json(asked: rollback.Request) -> dict[str, Any]:
    return {
        "id": asked.id,
        "to": asked.to,
        "skip_batches": asked.skip_batches,
        "requested_at_unix_s": asked.requested_at_unix_s,
    }


def _words(asked: rollback.Request) -> str:
    ranges = ", ".join(f"{first} to {end - 1}" for first, end in asked.skip_batches)
    return f"back to step {asked.to}" + (f", without batches {ranges}" if ranges else "")


def _root_of(where: Path) -> tuple[Path, RunFolder | None]:
    """The folder of checkpoints that *where* is, or that its run has written to last.

    Raises:
        ConfigError: it is neither.
    """
    if where.is_dir() and look(where).checkpoints:
        return where, None
    try:
        run = find_run(where)
    except FileNotFoundError:
        raise ConfigError(
            f"cannot find checkpoints in {where}: it is neither a folder of steadyrun's checkpoints nor a run folder"
        ) from None
    paths = [str(r["path"]) for r in RunLog.read(run).of_type("checkpoint_committed") if r.get("path")]
    if not paths:
        raise ConfigError(
            f"cannot tell where {run.root} keeps its checkpoints: it has committed none; give their folder"
        )
    return Path(paths[-1]).parent, run


# -- prune -----------------------------------------------------------------------------------------------------------
def run_prune(args: argparse.Namespace, console: Console) -> int:
    """0; 1 when something could not be removed."""
    if args.keep < LEAST_KEPT:
        raise ConfigError(f"cannot keep {args.keep}: give --keep {LEAST_KEPT} or more; one alone may be damaged")
    if args.keep_every is not None and args.keep_every < 1:
        raise ConfigError(f"cannot keep every {args.keep_every} steps: give --keep-every 1 or more")
    if not args.root.is_dir():
        raise ConfigError(f"cannot prune {args.root}: it is no folder")
    catalog = look(args.root)
    listed = [*catalog.checkpoints, *catalog.partials]
    known = {c.path for c in listed}
    listed += [c for c in committed_in(args.root) if c.path not in known]
    listed.sort(key=lambda c: (*c.order, c.path.name), reverse=True)
    ledger = quarantine.read(args.root)
    removals = to_remove(
        listed,
        args.keep,
        args.keep_every,
        in_use=[c.path for c in catalog.partials if _is_fresh(c.path)],
        pinned=pointed_in(args.root) if any(c.path not in known for c in listed) else (),
        quarantined=ledger.among(listed),
    )
    pruned = None if args.dry_run else apply(removals, commit.remove)
    failed = {} if pruned is None else dict(pruned.failed)
    freed_bytes = sum(c.manifest.size_bytes for c in removals if c.manifest is not None and c.path not in failed)
    if args.json:
        console.json(
            {
                "schema": PRUNE_SCHEMA,
                "root": str(args.root),
                "is_dry_run": args.dry_run,
                "removed": [_listed_json(c) for c in removals if c.path not in failed],
                "kept": [_listed_json(c) for c in listed if c not in removals or c.path in failed],
                "failed": [{"path": str(path), "why": why} for path, why in failed.items()],
                "freed_bytes": freed_bytes,
            }
        )
        return int(bool(failed))
    _print_prune(listed, {c.path for c in removals}, failed, args.dry_run, console)
    verb = "would free" if args.dry_run else "freed"
    count = len(removals) - len(failed)
    console.print(f"{count} of {len(listed)} {'would go' if args.dry_run else 'removed'}, {verb} {size(freed_bytes)}")
    for why in failed.values():
        for line in console.wrapped(plain(why), 2):
            console.print(console.styled(line, "red"))
    return int(bool(failed))


def _is_fresh(partial: Path) -> bool:
    """Whether something was written into it a short time ago: a save may be going on."""
    newest_unix_s = 0.0
    with contextlib.suppress(OSError):
        newest_unix_s = max(p.stat().st_mtime for p in (partial, *partial.iterdir()))
    return time.time() - newest_unix_s < FRESH_S


def _print_prune(
    listed: Collection[Listed], going: Collection[Path], failed: Collection[Path], is_dry: bool, console: Console
) -> None:
    rows = []
    now = time.time()
    for c in reversed(list(listed)):
        goes = c.path in going and c.path not in failed
        verdict = console.styled("goes" if is_dry else "removed", "yellow") if goes else "stays"
        manifest = c.manifest
        state = c.problem or ("verified" if c.is_verified else "complete")
        rows.append(
            [
                plain(c.path.name),
                str(c.step),
                "-" if manifest is None else size(manifest.size_bytes),
                ago(None if manifest is None else manifest.created_unix_s, now),
                plain(state),
                verdict,
            ]
        )
    columns = [
        Column("checkpoint"),
        Column("step", right=True),
        Column("size", right=True),
        Column("written", right=True),
        Column("state", grows=True),
        Column(""),
    ]
    for line in console.table(columns, rows):
        console.print(line)


def _listed_json(c: Listed) -> dict[str, Any]:
    return {
        "path": str(c.path),
        "step": c.step,
        "is_complete": c.is_complete,
        "is_verified": c.is_verified,
        "problem": c.problem,
        "size_bytes": None if c.manifest is None else c.manifest.size_bytes,
    }


# -- quarantine ------------------------------------------------------------------------------------------------------
def run_quarantine(args: argparse.Namespace, console: Console) -> int:
    """0; 1 when there was nothing to lift."""
    if not args.root.is_dir():
        raise ConfigError(f"cannot look into {args.root}: it is no folder")
    before = quarantine.read(args.root)
    ledger = before
    if args.lift is not None:
        ledger = quarantine.update(args.root, lambda found: quarantine.lift(found, args.lift))
    lifted = [e for e in before.entries if e not in ledger.entries]
    if args.json:
        console.json(
            {
                "schema": QUARANTINE_SCHEMA,
                "root": str(args.root),
                "entries": [_entry_json(e) for e in ledger.entries],
                "lifted": [_entry_json(e) for e in lifted],
            }
        )
        return int(args.lift is not None and not lifted)
    if args.lift is not None:
        words = f"step {args.lift} may be used again" if lifted else f"step {args.lift} is not in quarantine"
        console.print(words)
    if not ledger.entries:
        console.print("no checkpoint is in quarantine")
    now = time.time()
    for e in ledger.entries:
        text = f"step {e.step} (attempt {e.attempt}, {e.tier.value}), {ago(e.at_unix_s, now)}: {e.why}"
        for line in console.wrapped(plain(text), 2):
            console.print(line)
    return int(args.lift is not None and not lifted)


def _entry_json(e: quarantine.Entry) -> dict[str, Any]:
    return {
        "step": e.step,
        "attempt": e.attempt,
        "tier": e.tier,
        "failures": e.failures,
        "signature": e.signature,
        "why": e.why,
        "at_unix_s": e.at_unix_s,
    }
