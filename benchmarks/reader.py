"""Loading a checkpoint folder: ``dcp.load`` against our reader, verified and not, page cache warm and cold.

The folder is one that plain ``dcp.save`` wrote. All sides load it into the same tensors in every round, in turns, and
what they loaded is compared with what was saved. Shown are seconds per GiB and ratios within a round: dcp.load by ours.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from report import machine_facts, print_table, ratio_spread, spread_text

from steadyrun.checkpoint.reading import load_folder

GIB = 1 << 30
SIDES = ("dcp.load", "ours, verified", "ours, not verified", "ours, verified, 1 thread")


@dataclass(frozen=True)
class Case:
    """A state: *count* tensors of *size_bytes*."""

    name: str
    count: int
    size_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.count * self.size_bytes


@dataclass(frozen=True)
class Sample:
    """One load."""

    case: str
    is_warm: bool
    round: int
    side: str
    wall_s: float
    cpu_s: float


def cases(total_bytes: int) -> list[Case]:
    """Large tensors, medium ones, and so small ones that only what is done per tensor counts."""
    return [
        Case("64 MiB each", max(total_bytes >> 26, 1), 64 << 20),
        Case("8 MiB each", max(total_bytes >> 23, 1), 8 << 20),
        Case("16 KiB each", 2000, 16 << 10),
    ]


def load(side: str, folder: Path, state: dict[str, torch.Tensor]) -> None:
    if side == "dcp.load":
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    else:
        load_folder(folder, state, verify="not" not in side, threads=1 if "1 thread" in side else None)


def drop_cache(folder: Path) -> None:
    """The folder's pages leave the page cache; they are clean, so this takes away all of them."""
    for file in folder.iterdir():
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def measure(
    case: Case, root: Path, rounds: int, say: Callable[[str], None], are_warm: tuple[bool, ...]
) -> Iterator[Sample]:
    torch.manual_seed(1)
    saved = {f"layers.{i}.weight": torch.randn(case.size_bytes // 4) for i in range(case.count)}
    folder = root / case.name.replace(" ", "-")
    dcp.save(saved, checkpoint_id=folder, no_dist=True)
    state = {key: torch.zeros_like(value) for key, value in saved.items()}
    for is_warm in are_warm:
        for number in range(-1, rounds):
            # Round -1 warms up; then each side is first once in a while.
            turn = number % len(SIDES)
            for side in SIDES[turn:] + SIDES[:turn]:
                for value in state.values():
                    value.fill_(float("nan"))
                if not is_warm:
                    drop_cache(folder)
                wall_s, cpu_s = time.perf_counter(), time.process_time()
                load(side, folder, state)
                wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
                wrong = [key for key, value in saved.items() if not torch.equal(state[key], value)]
                if wrong:
                    raise SystemExit(f"{side} loaded {len(wrong)} wrong tensors, the first is {wrong[0]}")
                if number >= 0:
                    yield Sample(case.name, is_warm, number, side, wall_s, cpu_s)
            say(f"{case.name}, {'warm' if is_warm else 'cold'}: round {number + 2} of {rounds + 1}")
    shutil.rmtree(folder)


def table(found: list[Sample], case: Case) -> None:
    gib = case.total_bytes / GIB
    for is_warm in (True, False):
        own = [s for s in found if s.case == case.name and s.is_warm == is_warm]
        if not own:
            continue
        rows = []
        theirs = [s for s in own if s.side == SIDES[0]]
        for side in SIDES:
            samples = [s for s in own if s.side == side]
            wall = ratio_spread([s.wall_s for s in samples], [s.wall_s for s in theirs])
            cpu = ratio_spread([s.cpu_s for s in samples], [s.cpu_s for s in theirs])
            assert wall is not None
            assert cpu is not None
            rows.append(
                [
                    side,
                    spread_text([s.wall_s / gib for s in samples]),
                    spread_text([s.cpu_s / gib for s in samples]),
                    wall.text(),
                    cpu.text(),
                ]
            )
        print(f"\n{case.count} tensors of {case.name}, {'warm' if is_warm else 'cold'}, in all {gib:.2f} GiB")
        print_table(("side", "s/GiB", "CPU s/GiB", "times as fast", "times less CPU"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="as few repetitions as show anything at all")
    effort.add_argument("--full", action="store_true", help="as many as a claim needs")
    parser.add_argument("--gib", type=float, help="size of the state; default 1, with --quick 0.125")
    parser.add_argument("--dir", type=Path, help="where the folder is written; default: the temporary directory")
    parser.add_argument("--warm", action="store_true", help="leave out the cold rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every single value to FILE")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of torch.distributed not being initialised, which is meant
    torch.set_num_threads(1)
    rounds = 2 if args.quick else 15 if args.full else 5
    total_bytes = int((args.gib or (0.125 if args.quick else 1)) * GIB)
    facts = machine_facts()
    print("  ".join(f"{name}: {value}" for name, value in facts.items() if value is not None))
    found: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="steadyrun-reader-", dir=args.dir) as root:
        for case in cases(total_bytes):
            are_warm = (True,) if args.warm else (True, False)
            found += measure(case, Path(root), rounds, lambda text: print(text, end="   \r", flush=True), are_warm)
            table(found, case)
    if args.json is not None:
        data = {"schema": "steadyrun.bench_reader/1", "machine": facts, "samples": [asdict(s) for s in found]}
        args.json.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
