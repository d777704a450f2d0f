"""``steadyctl ckpt average`` and ``export``: new files made from checkpoints, tensor by tensor."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from steadyrun.core.errors import ConfigError
from steadyrun.ctl.ckpt.progress import progress_bar
from steadyrun.ctl.console import Console, plain, size

__all__ = ["parse_size", "register"]

AVERAGE_SCHEMA: Final = "steadyrun.ckpt_average/1"
EXPORT_SCHEMA: Final = "steadyrun.ckpt_export/1"
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_EXPONENT: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}

EXIT_CODES: Final = """
exit codes:
  0  written
  1  a checkpoint is damaged, or the disk refuses; nothing was written
  2  checkpoints that do not match, or a command line that cannot be used
"""


def register(commands: Any) -> None:
    """Add the two commands to the parser."""
    _register_average(commands)
    _register_export(commands)


def _register_average(commands: Any) -> None:
    parser = commands.add_parser(
        "average",
        help="average several checkpoints into one",
        description=(
            "Writes the average of checkpoints to the new folder OUT, which any tool for\n"
            "torch.distributed.checkpoint reads. Sums are in float32 for 16 and 8 bit\n"
            "formats, in float64 for others. Integers, objects and an optimizer's count of\n"
            "steps come from the newest checkpoint. What is read is verified."
        ),
        epilog=(
            "examples:\n"
            "  steadyctl ckpt average averaged checkpoints/step-0000003*\n"
            "  steadyctl ckpt average averaged step-100 step-200 step-300 --key model\n" + EXIT_CODES
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="C", help="two checkpoints or more")
    parser.add_argument(
        "--key", metavar="KEY", help="average only what is below this name (model, say), take the rest from the newest"
    )
    parser.add_argument("--step", type=int, metavar="N", help="of the result (default: the newest checkpoint's)")
    parser.add_argument("--json", action="store_true", help=f"print {AVERAGE_SCHEMA}")
    parser.set_defaults(run=run_average)


def _register_export(commands: Any) -> None:
    parser = commands.add_parser(
        "export",
        help="write the weights as safetensors or with torch.save",
        description=(
            "Writes the tensors of a checkpoint to OUT: as safetensors, a new folder with\n"
            "model.safetensors or shards and model.safetensors.index.json, as Hugging Face\n"
            "reads them; or as one file of torch.save. safetensors are written tensor by\n"
            "tensor, torch.save needs memory for all of them. What is read is verified."
        ),
        epilog=(
            "examples:\n"
            "  steadyctl ckpt export checkpoints/step-000001000 weights\n"
            "  steadyctl ckpt export step-1000 weights --dtype bf16 --max-shard-size 2GB\n"
            "  steadyctl ckpt export step-1000 model.pt --format torch --key model\n" + EXIT_CODES
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint (folder or file)")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder, or a new file for --format torch")
    parser.add_argument(
        "--format",
        choices=("safetensors", "torch"),
        help="default: torch when OUT ends with .pt, .pth, .bin or .ckpt, else safetensors",
    )
    parser.add_argument(
        "--dtype", metavar="D", help="convert floating tensors: bf16, fp16, fp32, fp64, float8_e4m3fn, float8_e5m2"
    )
    parser.add_argument(
        "--key",
        metavar="KEY",
        help='what to export; left out of the names (default: "model" where there is one, else all; "": all)',
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="per file (default: 5GB)")
    parser.add_argument("--json", action="store_true", help=f"print {EXPORT_SCHEMA}")
    parser.set_defaults(run=run_export)


def parse_size(text: str) -> int:
    """Bytes: ``5GB``, ``500MiB``, ``1000``. Raises ConfigError."""
    found = _SIZE.fullmatch(text.strip())
    value = 0.0
    if found is not None:
        value = float(found[1]) * (1024 if found[3] else 1000) ** _EXPONENT[found[2].upper()]
    if value < 1:
        raise ConfigError(f"{text!r} is no size (examples: 5GB, 500MiB)")
    return int(value)


# -- average ---------------------------------------------------------------------------------------------------------
def run_average(args: argparse.Namespace, console: Console) -> int:
    if args.step is not None and args.step < 0:
        raise ConfigError(f"cannot average into step {args.step}; give --step a number of 0 or more")
    from steadyrun.checkpoint.averaging import average
    from steadyrun.checkpoint.contents import UnusableCheckpointError
    from steadyrun.checkpoint.sources import open_source

    try:
        sources = [open_source(path) for path in args.checkpoints]
    except UnusableCheckpointError as e:
        raise ConfigError(str(e)) from e
    with progress_bar(console, args.out.name, args.json) as update:
        done = average(args.out, sources, args.key, args.step, update)
    if args.json:
        console.json(
            {
                "schema": AVERAGE_SCHEMA,
                "path": str(done.path),
                "step": done.step,
                "checkpoints": [{"path": str(s.path), "step": s.step} for s in sources],
                "newest": str(done.newest),
                "averaged_tensor_count": done.averaged,
                "taken_from_newest": done.taken,
                "size_bytes": done.size_bytes,
                "notes": done.notes,
            }
        )
        return 0
    console.print(f"{console.styled(plain(done.path), 'bold')}: {console.styled('written', 'green', 'bold')}")
    console.print(
        f"  {done.averaged} tensors averaged over {len(sources)} checkpoints, step {done.step}, {size(done.size_bytes)}"
    )
    _print_notes(done.notes, console)
    return 0


# -- export ----------------------------------------------------------------------------------------------------------
def run_export(args: argparse.Namespace, console: Console) -> int:
    shard_bytes = parse_size(args.max_shard_size)
    from steadyrun.checkpoint.contents import UnusableCheckpointError
    from steadyrun.checkpoint.exporting import Format, choose, export, parse_dtype
    from steadyrun.checkpoint.sources import open_source

    try:
        dtype = None if args.dtype is None else parse_dtype(args.dtype)
        source = open_source(args.checkpoint)
    except (UnusableCheckpointError, ValueError) as e:
        raise ConfigError(str(e)) from e
    is_torch = args.format == "torch" or (args.format is None and args.out.suffix in (".pt", ".pth", ".bin", ".ckpt"))
    form = Format.TORCH if is_torch else Format.SAFETENSORS
    with progress_bar(console, args.out.name, args.json) as update:
        done = export(source, choose(source, args.key, dtype), args.out, form, shard_bytes, update)
    if args.json:
        console.json(
            {
                "schema": EXPORT_SCHEMA,
                "path": str(done.path),
                "format": form,
                "checkpoint": str(source.path),
                "step": source.step,
                "dtype": dtype,
                "tensor_count": done.tensors,
                "size_bytes": done.size_bytes,
                "files": [{"name": name, "size_bytes": size_bytes} for name, size_bytes in done.files],
                "notes": done.notes,
            }
        )
        return 0
    console.print(f"{console.styled(plain(done.path), 'bold')}: {console.styled('written', 'green', 'bold')}")
    console.print(f"  {done.tensors} tensors, {size(done.size_bytes)}, {form.value}")
    for name, size_bytes in done.files:
        console.print(f"  {plain(name)}  {size(size_bytes)}")
    _print_notes(done.notes, console)
    return 0


def _print_notes(notes: Sequence[str], console: Console) -> None:
    for note in notes:
        for line in console.wrapped(f"note: {plain(note)}", 4, "  "):
            console.print(console.styled(line, "yellow"))
