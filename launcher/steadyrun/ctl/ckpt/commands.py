"""The commands below ``steadyctl ckpt``."""

from __future__ import annotations

import argparse
from typing import Any, Final

from steadyrun.ctl.ckpt import comparing, converting, interval, keeping, looking

__all__ = ["register"]

COMMANDS: Final = (looking, comparing, converting, keeping, interval)


def register(commands: Any) -> None:
    """Add ``ckpt`` and what is below it to the parser."""
    parser = commands.add_parser(
        "ckpt",
        help="checkpoints: list, verify, compare, convert, roll back; how often to save",
        description="Commands about checkpoints.",
        epilog=(
            "examples:\n"
            "  steadyctl ckpt ls checkpoints\n"
            "  steadyctl ckpt show checkpoints/step-100 --tensors\n"
            "  steadyctl ckpt verify checkpoints/step-100\n"
            "  steadyctl ckpt diff checkpoints/step-100 checkpoints/step-200\n"
            "  steadyctl ckpt export checkpoints/step-100 weights --dtype bf16\n"
            "  steadyctl ckpt rollback checkpoints --to 100 --skip-batches 101:120\n"
            "  steadyctl ckpt interval --stall 5 --mtbf 3.09h\n"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    below = parser.add_subparsers(title="commands", metavar="COMMAND", dest="ckpt_command", required=True)
    for command in COMMANDS:
        command.register(below)
