"""``steadyctl ckpt ls``, ``show`` and ``verify``: checkpoints that are there, whoever wrote them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from steadyrun.checkpoint import quarantine
from steadyrun.checkpoint.catalog import SUPERSEDED_NAME
from steadyrun.checkpoint.commit import mark_verified
from steadyrun.checkpoint.contents import (
    Contents,
    Kind,
    Problem,
    ProblemKind,
    Tensor,
    UnusableCheckpointError,
    shard_words,
)
from steadyrun.checkpoint.foreign import missing_ranks
from steadyrun.checkpoint.kinds import Found, Listing, find_checkpoints, read_contents
from steadyrun.checkpoint.manifest import Manifest, ManifestError, Verified
from steadyrun.checkpoint.verify import Report, cannot_see, verify
from steadyrun.core.errors import ConfigError
from steadyrun.ctl.ckpt.progress import progress_bar
from steadyrun.ctl.console import Column, Console, ago, clock_time, duration, plain, size

__all__ = ["register"]

LS_SCHEMA: Final = "steadyrun.ckpt_ls/1"
SHOW_SCHEMA: Final = "steadyrun.ckpt_show/1"
VERIFY_SCHEMA: Final = "steadyrun.ckpt_verify/1"

WRITERS: Final = {
    Kind.DCP: "torch DCP",
    Kind.MEGATRON_DCP: "Megatron DCP",
    Kind.MEGATRON: "Megatron",
    Kind.DEEPSPEED: "DeepSpeed",
    Kind.HF_SHARDED: "HF sharded",
    Kind.SAFETENSORS: "safetensors",
    Kind.TORCH_SAVE: "torch.save",
    Kind.FILES: "folder of files",
}
PROBLEMS_SHOWN: Final = 12

EPILOG: Final = """\
exit codes:
  0  nothing is wrong
  1  damaged or incomplete
  2  no checkpoint, or none of a known kind
"""


def register(commands: Any) -> None:
    """Add the three commands to the parser."""
    _add(commands, "ls", "which checkpoints are in a folder", SHOW_LS, run_ls, LS_SCHEMA, nargs=None)
    show = _add(commands, "show", "what is in a checkpoint", SHOW_SHOW, run_show, SHOW_SCHEMA, nargs=None)
    show.add_argument("--tensors", action="store_true", help="list each tensor: dtype, shape, shards, size")
    check = _add(commands, "verify", "read all of it and check it", SHOW_VERIFY, run_verify, VERIFY_SCHEMA, nargs="+")
    check.add_argument("--threads", type=int, metavar="N", help="that read and check (default: CPUs, 4 at most)")
    check.add_argument("--no-mark", action="store_true", help="do not note in a manifest that all of it was verified")


SHOW_LS: Final = """\
Lists the checkpoints at PATH and below, by step, with their kind and size; of
those with a manifest of steadyrun also whether they are complete and verified."""
SHOW_SHOW: Final = """\
Shows what the lists of contents of a checkpoint say, and whether they add up:
every shard has its bytes, no gaps, no overlaps, no file missing or too short.
The data are not read. Nothing is unpickled, so nothing in it can run."""
SHOW_VERIFY: Final = """\
Reads the whole of each checkpoint and compares it with what was stored with it:
the CRC32 of each record that torch stores at a save and never checks at a load,
the xxh3-128 of steadyrun's manifest, the structure of files, dtypes and shapes.
Says what has no checksum at all. A checkpoint with a manifest of which all was
compared and nothing is wrong is marked as verified: it is kept longer then.
Nothing is unpickled, so nothing in a checkpoint can run."""


def _add(
    commands: Any, name: str, summary: str, description: str, run: Any, schema: str, nargs: str | None
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = "a checkpoint (folder or file), or a folder of them"
    parser.add_argument("path", type=Path, nargs=nargs, metavar="PATH", help=words)
    parser.add_argument("--json", action="store_true", help=f"print {schema}")
    parser.set_defaults(run=run)
    return parser


def _find(path: Path) -> Listing:
    try:
        return find_checkpoints(path)
    except UnusableCheckpointError as e:
        raise ConfigError(str(e)) from e


# -- ls --------------------------------------------------------------------------------------------------------------
def run_ls(args: argparse.Namespace, console: Console) -> int:
    """0; 1 when one is incomplete or the pointer to the newest leads nowhere."""
    listing = _find(args.path)
    is_well = all(f.is_complete or f.is_partial for f in listing.checkpoints)
    quarantined = _quarantined(listing.checkpoints)
    code = int(listing.pointer_problem is not None or not is_well)
    if args.json:
        console.json(
            {
                "schema": LS_SCHEMA,
                "path": str(args.path),
                "checkpoints": [_found_json(f, f.path in quarantined) for f in listing.checkpoints],
                "pointer_problem": listing.pointer_problem,
            }
        )
        return code
    now = time.time()
    rows = []
    for found in listing.checkpoints:
        step = found.step
        rows.append(
            [
                plain(_name(found.path, args.path)),
                "-" if step is None else str(step),
                _writer(found),
                str(len(found.files)),
                size(found.size_bytes),
                ago(found.written_unix_s, now),
                ", ".join(_states(found, found.path in quarantined, console)),
            ]
        )
    columns = [
        Column("checkpoint", grows=True),
        Column("step", right=True),
        Column("kind"),
        Column("files", right=True),
        Column("size", right=True),
        Column("written", right=True),
        Column(""),
    ]
    for line in console.table(columns, rows):
        console.print(line)
    if listing.pointer_problem is not None:
        _print_problem(listing.pointer_problem, console)
    return code


def _name(path: Path, root: Path) -> str:
    return path.name or str(path) if path == root else str(path.relative_to(root))


def _writer(found: Found) -> str:
    return "steadyrun" if found.is_ours else WRITERS[found.kind]


def _quarantined(checkpoints: Iterable[Found]) -> set[Path]:
    """Those that are not resumed from any more; a list that cannot be read is left to the command that is for it."""
    found = set()
    for root, group in groupby(checkpoints, key=lambda f: f.path.parent):
        try:
            entries = quarantine.read(root).quarantined()
        except quarantine.QuarantineError:
            continue
        for f in group:
            manifest = f.manifest
            if manifest and any(e.is_of(manifest.step, manifest.attempt, manifest.created_unix_s) for e in entries):
                found.add(f.path)
    return found


def _states(found: Found, is_quarantined: bool, console: Console) -> list[str]:
    """What is worth saying about a checkpoint in a list."""
    words = ["latest"] if found.is_latest else []
    if found.manifest is not None:
        words.append(console.styled("verified", "green") if found.manifest.verified is not None else "complete")
    if found.is_partial:
        words.append("being written, or cut off")
    elif found.manifest_problem is not None:
        words.append(console.styled(plain(found.manifest_problem), "red"))
    elif not found.is_complete:
        words.append(console.styled("incomplete: no .metadata", "red"))
    if (found.path / SUPERSEDED_NAME).exists():
        words.append(console.styled("set aside by a rollback", "yellow"))
    if is_quarantined:
        words.append(console.styled("quarantined", "yellow"))
    missing = missing_ranks(found.path)
    if missing:
        some = ", ".join(map(str, missing[:4])) + (" ..." if len(missing) > 4 else "")
        words.append(console.styled(f"not committed: waits for ranks {some}", "yellow"))
    return words


def _found_json(found: Found, is_quarantined: bool) -> dict[str, Any]:
    return {
        "path": str(found.path),
        "kind": found.kind,
        "step": found.step,
        "files": len(found.files),
        "size_bytes": found.size_bytes,
        "written_at_unix_s": found.written_unix_s,
        "is_latest": found.is_latest,
        "is_complete": found.is_complete,
        "is_partial": found.is_partial,
        "is_set_aside": (found.path / SUPERSEDED_NAME).exists(),
        "is_quarantined": is_quarantined,
        "waits_for_ranks": missing_ranks(found.path) or (),
        "manifest": None if found.manifest is None else _manifest_json(found.manifest),
        "manifest_problem": found.manifest_problem,
    }


def _manifest_json(manifest: Manifest) -> dict[str, Any]:
    verified = manifest.verified
    return {
        "step": manifest.step,
        "attempt": manifest.attempt,
        "run_id": manifest.run_id,
        "world_size": manifest.world_size,
        "created_at_unix_s": manifest.created_unix_s,
        "torch": manifest.torch,
        "steadyrun": manifest.steadyrun,
        "is_complete": manifest.complete,
        "is_foreign": manifest.is_foreign,
        "verified_at_unix_s": None if verified is None else verified.at_unix_s,
        "verified_by": None if verified is None else verified.by,
        "covered": manifest.covered,
        "not_covered": manifest.not_covered,
        "samples": manifest.samples,
        "replicas_compared": manifest.replicas_compared,
        "skipped_batches": manifest.skipped,
        "details": manifest.details,
    }


# -- show ------------------------------------------------------------------------------------------------------------
def run_show(args: argparse.Namespace, console: Console) -> int:
    """0; 1 when the lists of contents do not add up. Of several, the one at the path itself, pointed to, or newest."""
    listing = _find(args.path)
    if not listing.checkpoints:
        raise ConfigError(f"cannot find a checkpoint in {args.path}: {_problem_words(listing.pointer_problem)}")
    given = [f for f in listing.checkpoints if f.path == args.path]
    best = given or [f for f in listing.checkpoints if f.is_latest] or [f for f in listing.checkpoints if f.is_complete]
    chosen = best[-1] if best else listing.checkpoints[-1]
    contents = _contents(chosen)
    if args.json:
        told = None if chosen.manifest is None else _manifest_json(chosen.manifest)
        console.json({**_contents_json(contents, args.tensors), "step": chosen.step, "manifest": told})
        return int(bool(contents.problems))
    console.print(console.styled(plain(contents.path), "bold"))
    others = len(listing.checkpoints) - 1
    if others:
        console.print(console.styled(f"(of {others + 1} checkpoints in {plain(args.path)})", "dim"))
    step = chosen.step
    written = clock_time(chosen.written_unix_s, with_date=True)
    facts = {"kind": _writer(chosen), **({} if step is None else {"step": str(step)}), "written": written}
    facts["files"] = f"{len(contents.files)}, {size(contents.size_bytes)}"
    if contents.tensors or contents.objects:
        shards = sum(len(t.shards) for t in contents.tensors)
        facts["tensors"] = f"{len(contents.tensors)} in {shards} shards, {size(_bytes_of(contents.tensors))}"
        facts["dtypes"] = _dtypes(contents.tensors) or "-"
        facts["objects"] = f"{len(contents.objects)} that are no tensors"
    facts |= contents.details
    if chosen.manifest is not None:
        facts |= _manifest_facts(chosen.manifest)
    for name, text in facts.items():
        for line in console.wrapped(plain(text), 18, f"  {name:<16}"):
            console.print(line)
    for note in contents.notes:
        _print_note(note, console)
    if args.tensors:
        _print_tensors(contents, console)
    _print_problems(contents.problems, console)
    return int(bool(contents.problems))


def _manifest_facts(manifest: Manifest) -> dict[str, str]:
    verified = manifest.verified
    when = "not yet" if verified is None else f"{clock_time(verified.at_unix_s, with_date=True)}, by {verified.by}"
    attempt = f", attempt {manifest.attempt}" if manifest.run_id or manifest.attempt else ""
    facts = {
        "committed": f"{clock_time(manifest.created_unix_s, with_date=True)}, by steadyrun {manifest.steadyrun}",
        "verified": when,
        "run": f"{manifest.run_id or '-'}{attempt}, {manifest.world_size} ranks, torch {manifest.torch or '-'}",
        "covered": ", ".join(manifest.covered),
        "not covered": "; ".join(manifest.not_covered),
        "mesh": "" if manifest.mesh is None else json.dumps(manifest.mesh),
        "samples": "" if manifest.samples is None else f"{manifest.samples:,}",
        "replicas": f"{manifest.replicas_compared} compared before the commit" if manifest.replicas_compared else "",
        "left out": ", ".join(f"batches {first} to {end - 1}" for first, end in manifest.skipped),
    }
    return {name: text for name, text in facts.items() if text}


def _contents(found: Found) -> Contents:
    try:
        return read_contents(found)
    except OSError as e:
        raise ConfigError(f"cannot read {e.filename or found.path}: {e.strerror or e}") from e


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(t.size_bytes or 0 for t in tensors)


def _dtypes(tensors: Sequence[Tensor]) -> str:
    counts = Counter(t.dtype for t in tensors)
    return ", ".join(f"{name} ({count})" for name, count in counts.most_common(8))


def _print_tensors(contents: Contents, console: Console) -> None:
    rows = []
    for t in contents.tensors:
        places = sorted({s.place.file for s in t.shards if s.place is not None})
        where = places[0] + (f" +{len(places) - 1}" if len(places) > 1 else "") if places else "-"
        known = "-" if t.size_bytes is None else size(t.size_bytes)
        shape = str(list(t.shape)).replace(" ", "")
        rows.append([plain(t.key), plain(t.dtype), shape, str(len(t.shards)), known, plain(where)])
    right = ("shards", "size")
    titles = ("tensor", "dtype", "shape", "shards", "size", "file")
    console.print()
    for line in console.table([Column(t, right=t in right, grows=t == "tensor") for t in titles], rows):
        console.print(line)
    for key in contents.objects:
        console.print(f"{plain(key)}  (object)")
    if not rows and not contents.objects:
        console.print("no list of tensors: it is inside the files, which `verify` reads")


def _contents_json(contents: Contents, with_tensors: bool) -> dict[str, Any]:
    return {
        "schema": SHOW_SCHEMA,
        "path": str(contents.path),
        "kind": contents.kind,
        "is_damaged": bool(contents.problems),
        "size_bytes": contents.size_bytes,
        "tensor_count": len(contents.tensors),
        "tensor_bytes": _bytes_of(contents.tensors),
        "object_count": len(contents.objects),
        "details": contents.details,
        "notes": contents.notes,
        "problems": contents.problems,
        "files": contents.files,
        **({"tensors": contents.tensors, "objects": contents.objects} if with_tensors else {}),
    }


# -- verify ----------------------------------------------------------------------------------------------------------
def run_verify(args: argparse.Namespace, console: Console) -> int:
    """0; 1 when anything is damaged; 2 when a path holds no checkpoint and nothing else is damaged."""
    if args.threads is not None and not 1 <= args.threads <= 256:
        raise ConfigError(f"cannot verify with {args.threads} threads; give --threads a number from 1 to 256")
    reports: list[tuple[Found, Report]] = []
    pointers: list[Problem] = []
    unusable: list[str] = []
    for path in args.path:
        try:
            listing = find_checkpoints(path)
        except UnusableCheckpointError as e:
            unusable.append(str(e))
            continue
        pointers += [] if listing.pointer_problem is None else [listing.pointer_problem]
        for found in listing.checkpoints:
            if found.is_partial and len(listing.checkpoints) > 1:
                continue  # of a save that goes on, or was cut off: nothing says what it should hold
            try:
                with progress_bar(console, found.path.name, args.json) as update:
                    report = _mark(found, verify(_contents(found), args.threads, update), not args.no_mark)
            except ConfigError as e:
                unusable.append(str(e))
                continue
            reports.append((found, report))
            if not args.json:
                _print_report(report, _writer(found), console)
    is_damaged = bool(pointers) or any(r.is_damaged for _, r in reports)
    if args.json:
        told = [_report_json(r) | {"step": f.step} for f, r in reports]
        console.json(
            {
                "schema": VERIFY_SCHEMA,
                "is_damaged": is_damaged,
                "checkpoints": told,
                "pointer_problems": pointers,
                "unusable": unusable,
                "cannot_see": cannot_see([r for _, r in reports]),
            }
        )
    else:
        for problem in pointers:
            _print_problem(problem, console)
        for text in unusable:
            for line in console.wrapped(plain(text)):
                console.print(console.styled(line, "red"))
        if reports:
            for line in console.wrapped(cannot_see([r for _, r in reports])):
                console.print(console.styled(line, "dim"))
    return 1 if is_damaged else 2 if unusable else 0


def _mark(found: Found, report: Report, is_wanted: bool) -> Report:
    """Note in the manifest that everything was compared and is right."""
    if not is_wanted or found.manifest is None or report.problems or report.unverified:
        return report
    try:
        mark_verified(found.path, Verified(time.time(), "verify"))
    except (OSError, ManifestError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        return dataclasses.replace(report, notes=(*report.notes, f"cannot be marked as verified: {why}"))
    return report


def _print_report(report: Report, writer: str, console: Console) -> None:
    word, colour = ("damaged", "red") if report.is_damaged else ("fine", "green")
    if not report.is_damaged and not report.checked_bytes:
        word, colour = "readable, but cannot be verified", "yellow"
    elif not report.is_damaged and report.unverified:
        word = "fine as far as it can be verified"
    console.print(f"{console.styled(plain(report.path), 'bold')}: {console.styled(word, colour, 'bold')}")
    rate = size(report.read_bytes / report.elapsed_s) if report.elapsed_s > 0 else "-"
    facts = f"{writer}, {report.tensors} tensors in {report.files} files; {report.records} checksums "
    facts += f"over {size(report.checked_bytes)}; read {size(report.read_bytes)} in {duration(report.elapsed_s)}"
    for line in console.wrapped(f"{facts} ({rate}/s)", 2, "  "):
        console.print(console.styled(line, "dim"))
    for left in report.unverified:
        names = ", ".join(left.files[:3]) + (f" and {len(left.files) - 3} more" if len(left.files) > 3 else "")
        text = f"cannot be verified: {size(left.size_bytes)} in {plain(names)}: {plain(left.reason)}"
        for line in console.wrapped(text, 4, "  "):
            console.print(console.styled(line, "yellow"))
    for note in report.notes:
        _print_note(note, console)
    _print_problems(report.problems, console)


def _print_note(note: str, console: Console) -> None:
    for line in console.wrapped(f"note: {plain(note)}", 4, "  "):
        console.print(console.styled(line, "yellow"))


def _print_problems(problems: Sequence[Problem], console: Console) -> None:
    for problem in problems[:PROBLEMS_SHOWN]:
        _print_problem(problem, console)
    if len(problems) > PROBLEMS_SHOWN:
        console.print(f"  and {len(problems) - PROBLEMS_SHOWN} more problems; --json has them all")


def _print_problem(problem: Problem, console: Console) -> None:
    for line in console.wrapped(_problem_words(problem), 4, "  "):
        console.print(console.styled(line, "red"))


def _problem_words(problem: Problem | None) -> str:
    if problem is None:
        return "nothing is there"
    where = list(problem.keys[:3]) + ([f"{len(problem.keys) - 3} more"] if len(problem.keys) > 3 else [])
    parts = [", ".join(where), shard_words(problem.shard_offsets)]
    if problem.file is not None:
        in_file = problem.file
        if problem.at_byte is not None and problem.size_bytes is not None and problem.kind is ProblemKind.CHECKSUM:
            in_file += f", bytes {problem.at_byte:,} to {problem.at_byte + problem.size_bytes - 1:,}"
        parts.append(in_file)
    return plain(f"{', '.join(p for p in parts if p)}: {problem.text}")


def _report_json(report: Report) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "kind": report.kind,
        "is_damaged": report.is_damaged,
        "is_fully_verified": not report.problems and not report.unverified,
        "problems": report.problems,
        "unverified": report.unverified,
        "notes": report.notes,
        "tensor_count": report.tensors,
        "file_count": report.files,
        "read_bytes": report.read_bytes,
        "checked_bytes": report.checked_bytes,
        "checksum_count": report.records,
        "elapsed_s": report.elapsed_s,
    }
