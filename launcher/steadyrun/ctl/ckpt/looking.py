"""``steadyctl ckpt ls``, ``show`` and ``verify``: checkpoints that are there, whoever wrote them."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from steadyrun.checkpoint.contents import (
    Contents,
    Kind,
    Problem,
    ProblemKind,
    Tensor,
    UnusableCheckpointError,
    shard_words,
)
from steadyrun.checkpoint.kinds import Found, Listing, find_checkpoints, read_contents, step_of
from steadyrun.checkpoint.verify import CANNOT_SEE, Report, verify
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


SHOW_LS: Final = "Lists the checkpoints at PATH and below, by step, with their kind and size."
SHOW_SHOW: Final = """\
Shows what the lists of contents of a checkpoint say, and whether they add up:
every shard has its bytes, no gaps, no overlaps, no file missing or too short.
The data are not read. Nothing is unpickled, so nothing in it can run."""
SHOW_VERIFY: Final = """\
Reads the whole of each checkpoint and compares it with what was stored with it:
the CRC32 of each record that torch stores at a save and never checks at a load,
the structure of files, dtypes and shapes. Says what has no checksum at all.
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
    code = int(listing.pointer_problem is not None or not all(f.is_complete for f in listing.checkpoints))
    if args.json:
        console.json(
            {
                "schema": LS_SCHEMA,
                "path": str(args.path),
                "checkpoints": [_found_json(f) for f in listing.checkpoints],
                "pointer_problem": listing.pointer_problem,
            }
        )
        return code
    now = time.time()
    rows = []
    for found in listing.checkpoints:
        step = step_of(found.path)
        notes = ["latest"] if found.is_latest else []
        notes += [] if found.is_complete else [console.styled("incomplete: no .metadata", "red")]
        rows.append(
            [
                plain(_name(found.path, args.path)),
                "-" if step is None else str(step),
                WRITERS[found.kind],
                str(len(found.files)),
                size(found.size_bytes),
                ago(found.written_unix_s, now),
                ", ".join(notes),
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


def _found_json(found: Found) -> dict[str, Any]:
    return {
        "path": str(found.path),
        "kind": found.kind,
        "step": step_of(found.path),
        "files": len(found.files),
        "size_bytes": found.size_bytes,
        "written_at_unix_s": found.written_unix_s,
        "is_latest": found.is_latest,
        "is_complete": found.is_complete,
    }


# -- show ------------------------------------------------------------------------------------------------------------
def run_show(args: argparse.Namespace, console: Console) -> int:
    """0; 1 when the lists of contents do not add up. Of several checkpoints, the newest (or the one pointed to)."""
    listing = _find(args.path)
    if not listing.checkpoints:
        raise ConfigError(f"cannot find a checkpoint in {args.path}: {_problem_words(listing.pointer_problem)}")
    chosen = next((f for f in listing.checkpoints if f.is_latest), listing.checkpoints[-1])
    contents = _contents(chosen)
    if args.json:
        console.json(_contents_json(contents, args.tensors))
        return int(bool(contents.problems))
    console.print(console.styled(plain(contents.path), "bold"))
    others = len(listing.checkpoints) - 1
    if others:
        console.print(console.styled(f"(of {others + 1} checkpoints in {plain(args.path)})", "dim"))
    step = step_of(contents.path)
    written = clock_time(chosen.written_unix_s, with_date=True)
    facts = {"kind": WRITERS[contents.kind], **({} if step is None else {"step": str(step)}), "written": written}
    facts["files"] = f"{len(contents.files)}, {size(contents.size_bytes)}"
    if contents.tensors or contents.objects:
        shards = sum(len(t.shards) for t in contents.tensors)
        facts["tensors"] = f"{len(contents.tensors)} in {shards} shards, {size(_bytes_of(contents.tensors))}"
        facts["dtypes"] = _dtypes(contents.tensors) or "-"
        facts["objects"] = f"{len(contents.objects)} that are no tensors"
    facts |= contents.details
    for name, text in facts.items():
        for line in console.wrapped(plain(text), 18, f"  {name:<16}"):
            console.print(line)
    for note in contents.notes:
        _print_note(note, console)
    if args.tensors:
        _print_tensors(contents, console)
    _print_problems(contents.problems, console)
    return int(bool(contents.problems))


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
        "step": step_of(contents.path),
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
    reports: list[Report] = []
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
            try:
                with progress_bar(console, found.path.name, args.json) as update:
                    reports.append(verify(_contents(found), args.threads, update))
            except ConfigError as e:
                unusable.append(str(e))
                continue
            if not args.json:
                _print_report(reports[-1], console)
    is_damaged = bool(pointers) or any(r.is_damaged for r in reports)
    if args.json:
        told = [_report_json(r) for r in reports]
        console.json(
            {
                "schema": VERIFY_SCHEMA,
                "is_damaged": is_damaged,
                "checkpoints": told,
                "pointer_problems": pointers,
                "unusable": unusable,
                "cannot_see": CANNOT_SEE,
            }
        )
    else:
        for problem in pointers:
            _print_problem(problem, console)
        for text in unusable:
            for line in console.wrapped(plain(text)):
                console.print(console.styled(line, "red"))
        if reports:
            for line in console.wrapped(CANNOT_SEE):
                console.print(console.styled(line, "dim"))
    return 1 if is_damaged else 2 if unusable else 0


def _print_report(report: Report, console: Console) -> None:
    word, colour = ("damaged", "red") if report.is_damaged else ("fine", "green")
    if not report.is_damaged and not report.checked_bytes:
        word, colour = "readable, but cannot be verified", "yellow"
    elif not report.is_damaged and report.unverified:
        word = "fine as far as it can be verified"
    console.print(f"{console.styled(plain(report.path), 'bold')}: {console.styled(word, colour, 'bold')}")
    rate = size(report.read_bytes / report.elapsed_s) if report.elapsed_s > 0 else "-"
    facts = f"{WRITERS[report.kind]}, {report.tensors} tensors in {report.files} files; {report.records} checksums "
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
        "step": step_of(report.path),
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
