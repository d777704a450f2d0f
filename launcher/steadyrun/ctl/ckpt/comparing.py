"""``steadyctl ckpt diff``: what differs between two checkpoints, whoever wrote them."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from steadyrun.core.errors import ConfigError
from steadyrun.ctl.ckpt.progress import progress_bar
from steadyrun.ctl.console import Column, Console, plain, size

if TYPE_CHECKING:  # torch takes seconds to import: only the commands that read tensors do
    from steadyrun.checkpoint.diffing import Difference, TensorDifference
    from steadyrun.checkpoint.sources import Source

__all__ = ["register"]

DIFF_SCHEMA: Final = "steadyrun.ckpt_diff/1"
SHOWN: Final = 20

DESCRIPTION: Final = """\
Compares two checkpoints tensor by tensor: names, shapes, dtypes, and values
(elements that differ, the largest absolute and relative difference), the worst
first. Reads folders of torch.distributed.checkpoint (also steadyrun's and
Megatron's), safetensors and files of torch.save, each against each; bytes that
have checksums are verified. Objects are compared as bytes, never unpickled."""
EPILOG: Final = """\
examples:
  steadyctl ckpt diff checkpoints/step-000000100 checkpoints/step-000000200
  steadyctl ckpt diff step-100 export/model.safetensors --key model --rtol 0.01
  steadyctl ckpt diff step-100 step-100-copy --json

exit codes:
  0  nothing differs
  1  something differs, or cannot be read
  2  no checkpoint, or none of a known kind
"""


def register(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "diff",
        help="compare two checkpoints",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", type=Path, metavar="A", help="a checkpoint (folder or file)")
    parser.add_argument("second", type=Path, metavar="B", help="another one")
    parser.add_argument(
        "--key",
        metavar="KEY",
        help="only what is below this name (model, say), which a side without it may lack, as exports do",
    )
    parser.add_argument("--atol", type=float, default=0.0, metavar="X", help="differences up to this are none")
    parser.add_argument("--rtol", type=float, default=0.0, metavar="X", help="the same, times the larger of the two")
    parser.add_argument("--all", action="store_true", help=f"show all tensors that differ, not the {SHOWN} worst")
    parser.add_argument("--json", action="store_true", help=f"print {DIFF_SCHEMA}")
    parser.set_defaults(run=run_diff)


def run_diff(args: argparse.Namespace, console: Console) -> int:
    """0 when nothing differs, 1 when something does."""
    for name, value in (("--atol", args.atol), ("--rtol", args.rtol)):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"cannot compare with {name} {value}; give a number of 0 or more")
    from steadyrun.checkpoint.contents import UnusableCheckpointError
    from steadyrun.checkpoint.diffing import Below, Tolerance, diff
    from steadyrun.checkpoint.sources import open_source

    try:
        first, second = open_source(args.first), open_source(args.second)
        if args.key:
            first, second = Below.of(first, second, args.key)
    except UnusableCheckpointError as e:
        raise ConfigError(str(e)) from e
    with progress_bar(console, "comparing", args.json) as update:
        found = diff(first, second, Tolerance(args.atol, args.rtol), update)
    if args.json:
        console.json(_json(first, second, found))
    else:
        _print(first, second, found, console, None if args.all else SHOWN)
    return int(not found.is_equal)


def _json(first: Source, second: Source, found: Difference) -> dict[str, Any]:
    return {
        "schema": DIFF_SCHEMA,
        "first": {"path": str(first.path), "kind": first.kind, "step": first.step},
        "second": {"path": str(second.path), "kind": second.kind, "step": second.step},
        "is_equal": found.is_equal,
        "compared_tensor_count": found.compared,
        "compared_bytes": found.compared_bytes,
        "structure": [{"key": s.key, "text": s.text} for s in found.structure],
        "tensors": [
            {
                "key": t.key,
                "element_count": t.elements,
                "differing_count": t.differing,
                "max_abs_difference": t.max_abs,
                "max_relative_difference": t.max_relative,
                "nonfinite_count": t.nonfinite,
                "worst_at": t.worst_at,
            }
            for t in found.tensors
        ],
        "objects": found.objects,
        "notes": _notes(first, second),
    }


def _notes(first: Source, second: Source) -> list[str]:
    return [f"{source.path}: {note}" for source in (first, second) for note in source.notes]


def _print(first: Source, second: Source, found: Difference, console: Console, most: int | None) -> None:
    for source, which in ((first, "first "), (second, "second")):
        step = "" if source.step is None else f" (step {source.step})"
        console.print(f"{which}  {console.styled(plain(source.path), 'bold')}{step}")
    equal = found.compared - len(found.tensors)
    console.print(
        f"{found.compared} tensors compared ({size(found.compared_bytes)}): "
        f"{equal} equal, {len(found.tensors)} with other values"
    )
    for item in found.structure[:most]:
        for line in console.wrapped(f"{plain(item.key)} {item.text}", 4, "  "):
            console.print(console.styled(line, "red"))
    _print_more(len(found.structure), most, console)
    if found.tensors:
        console.print()
        titles = ("tensor", "differ", "of", "max abs", "max rel", "worst at")
        columns = [Column(t, right=t not in ("tensor", "worst at"), grows=t == "tensor") for t in titles]
        for line in console.table(columns, [_row(t, console) for t in found.tensors[:most]]):
            console.print(line)
        _print_more(len(found.tensors), most, console)
    for key in found.objects[:most]:
        console.print(f"  {plain(key)} (object) has other bytes")
    _print_more(len(found.objects), most, console)
    for note in _notes(first, second):
        for line in console.wrapped(f"note: {plain(note)}", 4, "  "):
            console.print(console.styled(line, "yellow"))
    if found.is_equal:
        console.print(console.styled("nothing differs", "green"))


def _row(tensor: TensorDifference, console: Console) -> list[str]:
    largest = f"{tensor.max_abs:.3g}"
    if tensor.nonfinite:
        largest = console.styled(f"{tensor.nonfinite} NaN/inf", "red")
    at = "[" + ",".join(map(str, tensor.worst_at)) + "]"
    counts = [f"{tensor.differing:,}", f"{tensor.elements:,}"]
    return [plain(tensor.key), *counts, largest, f"{tensor.max_relative:.2g}", at]


def _print_more(count: int, most: int | None, console: Console) -> None:
    if most is not None and count > most:
        console.print(f"  and {count - most} more; --all shows them, --json too")
