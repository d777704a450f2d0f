"""``steadyctl verify-replicas``: whether copies of the same tensors hold the same bytes, and if not, where not."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from steadyrun.checkpoint.manifest import AGREED_ROOTS
from steadyrun.checkpoint.savedbytes import names_of
from steadyrun.core.errors import ConfigError
from steadyrun.core.records import to_json
from steadyrun.ctl.ckpt.progress import Update, progress_bar
from steadyrun.ctl.console import Console, plain, size
from steadyrun.detect.sdc import Outcome, vote
from steadyrun.integrity.location import Located, locate
from steadyrun.integrity.roots import root_of

if TYPE_CHECKING:  # torch takes seconds to import: only the commands that read tensors do
    import torch

    from steadyrun.checkpoint.sources import Source
    from steadyrun.integrity.fingerprint import Fingerprint, Hasher

__all__ = ["register"]

SCHEMA: Final = "steadyrun.verify_replicas/1"
DIFFER: Final = 10
NOTHING: Final = 11
SHOWN: Final = 20

EPILOG: Final = """\
Several checkpoints, or a folder that holds several (files of each rank, say), are
taken as copies: tensors of one name must be equal, byte for byte. Of three or more
copies the one that differs is named; of two only that they do.

One checkpoint of steadyrun is compared with the fingerprints that all ranks
agreed on when it was saved (its manifest has them if checks were on and the model
was replicated, as under DDP).

Elements and bits are those in the flattened tensor; bit 0 is the lowest.

exit codes:
   0  all that could be compared is equal
  10  something differs
  11  nothing could be compared
   1  a tensor cannot be read
   2  no checkpoint, or the command line cannot be used

examples:
  steadyctl verify-replicas checkpoints/step-000000100
  steadyctl verify-replicas node0/step-100 node1/step-100 node2/step-100
  steadyctl verify-replicas per_rank_files/ --ignore 'rng*'
"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "verify-replicas",
        help="compare copies of a checkpoint, or one with what all ranks had agreed on",
        description="Compares copies of the same tensors byte for byte, and names copy, tensor, element and bit.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="+", type=Path, metavar="CKPT", help="a checkpoint (folder or file), or copies")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="PATTERN", help="names to leave out (* and ?); may be repeated"
    )
    parser.add_argument("--json", action="store_true", help=f"print {SCHEMA}")
    parser.set_defaults(run=run_verify_replicas)


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that differs from the others, or from what was agreed on."""

    path: str
    where: Located | None
    element_bytes: int

    def words(self) -> str:
        if self.where is None:
            return f"{self.path}: differs"
        some = "; ".join(d.text(self.element_bytes) for d in self.where.differences[:3])
        more = self.where.elements - min(len(self.where.differences), 3)
        return f"{self.path}: {some}" + (f"; and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True)
class Differing:
    """One tensor. *outcome*: ``minority``: *copies* are the wrong ones; ``tie``: nobody can say which are."""

    key: str
    outcome: str
    copies: tuple[Copy, ...]


@dataclass(slots=True)
class Findings:
    paths: list[str]
    compared: int = 0
    size_bytes: int = 0
    differing: list[Differing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def run_verify_replicas(args: argparse.Namespace, console: Console) -> int:
    """The exit code says whether something differs."""
    from steadyrun.checkpoint.contents import UnusableCheckpointError

    try:
        sources = _open(args.paths)
    except UnusableCheckpointError as e:
        raise ConfigError(str(e)) from e
    with progress_bar(console, "comparing", args.json) as update:
        found = _compare(sources, args.ignore, update)
    if args.json:
        console.json({"schema": SCHEMA, **to_json(found)})
    else:
        for line in _tell(found, console):
            console.print(line)
    if found.differing:
        return DIFFER
    return 0 if found.compared else NOTHING


def _open(paths: Sequence[Path]) -> list[Source]:
    from steadyrun.checkpoint.contents import Kind
    from steadyrun.checkpoint.kinds import find_checkpoints
    from steadyrun.checkpoint.sources import open_source

    if len(paths) == 1:
        listed = find_checkpoints(paths[0]).checkpoints
        if len(listed) > 1 and not any(f.path == paths[0] for f in listed):
            return [open_source(f.path) for f in listed]
        if len(listed) == 1 and listed[0].kind is Kind.FILES:  # of torch.save: one of each rank, as a rule
            files = [listed[0].path / f.name for f in listed[0].files]
            if len(files) > 1 and not any(f.suffix == ".safetensors" for f in files):
                return [open_source(f) for f in files]
    return [open_source(p) for p in paths]


# -- comparing ---------------------------------------------------------------------------------------------------------
def _compare(sources: Sequence[Source], ignored: Sequence[str], update: Update | None) -> Findings:
    from steadyrun.integrity.fingerprint import Hasher

    found = Findings([str(s.path) for s in sources])
    hasher = Hasher()
    keys = [k for k in dict.fromkeys(k for s in sources for k in s.tensors) if not _is_ignored(k, ignored)]
    if len(sources) == 1:
        agreed = _agreed(sources[0], keys)
        if not agreed:
            found.notes.append("its manifest holds no fingerprints that ranks agreed on, and there is no other copy")
        keys = [k for k in keys if k in agreed]
    else:
        agreed = {}
        lonely = sum(1 for k in keys if sum(k in s.tensors for s in sources) == 1)
        if lonely:
            found.notes.append(f"{lonely} tensors are in one copy only and were compared with nothing")
    total = sum(s.tensors[k].size_bytes or 0 for s in sources for k in keys if k in s.tensors)
    for key in keys:
        if len(sources) == 1:
            _compare_agreed(found, sources[0], key, agreed[key], hasher)
        else:
            _compare_copies(found, [s for s in sources if key in s.tensors], key, hasher)
        if update is not None:
            update(found.size_bytes, total)
    return found


def _is_ignored(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, p) for p in patterns)


def _agreed(source: Source, keys: Sequence[str]) -> Mapping[str, int]:
    """What the ranks agreed on, by the checkpoint's own names."""
    manifest = getattr(source, "manifest", None)
    roots = manifest.details.get(AGREED_ROOTS) if manifest is not None else None
    if not isinstance(roots, Mapping):
        return {}
    out: dict[str, int] = {}
    for key in keys:
        for name in names_of(key):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                out[key] = int(roots[name], 16)
                break
    return out


def _read(source: Source, key: str) -> torch.Tensor:
    return next(iter(source.read([key])))


def _compare_agreed(found: Findings, source: Source, key: str, root: int, hasher: Hasher) -> None:
    tensor = _read(source, key)
    fingerprint = hasher.fingerprint(tensor)
    found.compared += 1
    found.size_bytes += fingerprint.size_bytes
    if fingerprint.root != root:
        copy = Copy(str(source.path), None, tensor.element_size())
        found.differing.append(Differing(key, Outcome.MINORITY.value, (copy,)))


def _compare_copies(found: Findings, sources: Sequence[Source], key: str, hasher: Hasher) -> None:
    """One copy after the other is read; where they differ, two at a time."""
    if len(sources) < 2:
        return
    prints: dict[int, Fingerprint] = {}
    for number, source in enumerate(sources):
        prints[number] = hasher.fingerprint(_read(source, key))
    found.compared += 1
    found.size_bytes += sum(p.size_bytes for p in prints.values())
    outcome = vote({n: root_of(p.leaves, p.size_bytes) for n, p in prints.items()})
    if outcome.outcome is Outcome.AGREED:
        return
    witness = next((n for n, p in prints.items() if p.root == outcome.root), 0)
    wrong = [n for n in outcome.minority if n != witness]
    held = _read(sources[witness], key)
    copies = []
    for number in wrong:
        own = _read(sources[number], key)
        where = None
        if prints[number].size_bytes == prints[witness].size_bytes and own.dtype == held.dtype:
            where = locate(
                prints[number].leaves,
                prints[witness].leaves,
                prints[number].size_bytes,
                own.element_size(),
                lambda leaf, own=own: hasher.leaf_bytes(own, leaf),  # type: ignore[misc]
                lambda leaf: hasher.leaf_bytes(held, leaf),
            )
        copies.append(Copy(str(sources[number].path), where, own.element_size()))
    found.differing.append(Differing(key, outcome.outcome.value, tuple(copies)))


# -- telling -----------------------------------------------------------------------------------------------------------
def _tell(found: Findings, console: Console) -> list[str]:
    what = f"{found.compared} tensors ({size(found.size_bytes)})"
    if not found.differing:
        if not found.compared:
            lines = [console.styled("nothing could be compared", "yellow")]
        else:
            against = "as all ranks had agreed" if len(found.paths) == 1 else f"equal in {len(found.paths)} copies"
            lines = [console.styled(f"{what}: {against}", "green")]
    else:
        lines = [console.styled(f"{len(found.differing)} of {what} differ", "red", "bold")]
    for one in found.differing[:SHOWN]:
        told = "" if one.outcome == Outcome.MINORITY.value else " (no majority: nobody can say which is right)"
        lines.append(f"  {plain(one.key)}{told}")
        for copy in one.copies[:4]:
            lines += console.wrapped(plain(copy.words()), 6, "    ")
    if len(found.differing) > SHOWN:
        lines.append(f"  and {len(found.differing) - SHOWN} more (--json)")
    for note in found.notes:
        lines += console.wrapped(plain(note), 2, "note: ")
    return lines
