"""Fingerprints of tensors: speed on one core, peak memory, and errors that are missed; other checksums beside.

*speed*: CPU time of one thread over the same bytes, methods in turn, the best of all rounds; "x floor" is the time of
reading the bytes once (their float32 sum), round by round; "ours is" how many times faster the fingerprint is.
Megatron's way is what its check of replicas does: to the CPU, ``.float()``, SHA-1. It makes 2 GiB of 1 GiB of bfloat16.

*memory*: how much the peak of a fresh process grows while it works on tensors of 64 MiB.

*misses*: of random errors in 98,000 float32 elements, those after which a method says the same as before.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from report import add_common_arguments, effort_of, finish, print_table, spread_of

from steadyrun.integrity.fingerprint import Hasher

MIB = 1 << 20
OURS = "fingerprint"
FLOOR = "float32 sum (read floor)"
MEGATRON_FLOAT32 = "Megatron: float32, SHA-1"
MEGATRON = "Megatron: bfloat16, float, SHA-1"


def sha1_of_floats(tensor: torch.Tensor) -> bytes:
    return hashlib.sha1(tensor.to("cpu").float().numpy()).digest()


def methods(hasher: Hasher) -> dict[str, Callable[[torch.Tensor], Any]]:
    """On float32 tensors; those named for bfloat16 take the same bytes as such."""
    found: dict[str, Callable[[torch.Tensor], Any]] = {
        FLOOR: lambda t: t.sum(),
        "int64 sum": lambda t: t.view(torch.int64).sum(),
        OURS: lambda t: hasher.fingerprint(t),
        "fingerprint, bfloat16": lambda t: hasher.fingerprint(t.view(torch.bfloat16)),
        "xxh3-64": lambda t: xxhash.xxh3_64_intdigest(t.numpy()),
        "xxh3-128": lambda t: xxhash.xxh3_128_intdigest(t.numpy()),
        "SHA-1": lambda t: hashlib.sha1(t.numpy()).digest(),
        MEGATRON_FLOAT32: sha1_of_floats,
        MEGATRON: lambda t: sha1_of_floats(t.view(torch.bfloat16)),
    }
    if hasattr(torch, "hash_tensor"):
        found["torch.hash_tensor, float32"] = lambda t: torch.hash_tensor(t)
        found["torch.hash_tensor, bfloat16"] = lambda t: torch.hash_tensor(t.view(torch.bfloat16))
    return found


# -- speed -------------------------------------------------------------------------------------------------------------
def speed(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    tensor = torch.empty(arguments.mib * MIB // 4)
    tensor.copy_(torch.randn(1 << 20).repeat(-(-len(tensor) >> 20))[: len(tensor)])
    table = methods(Hasher())
    taken: dict[str, list[float]] = {name: [] for name in table}
    for method in table.values():
        method(tensor[: 16 * MIB])
    for _ in range(effort_of(arguments, 2, 4, 9)):
        for name, method in table.items():
            started = time.thread_time()
            method(tensor)
            taken[name].append(time.thread_time() - started)
    best = {name: min(values) for name, values in taken.items()}
    rows = []
    for name, values in taken.items():
        floors = spread_of([v / f for v, f in zip(values, taken[FLOOR], strict=True)])
        assert floors is not None
        gib_s = arguments.mib / 1024 / best[name]
        rows.append(
            [name, f"{gib_s:.2f}", f"{best[name] / best[FLOOR]:.2f}", floors.text(), f"{best[name] / best[OURS]:.1f}"]
        )
    print(f"\nspeed, {arguments.mib} MiB, one thread")
    print_table(["", "GiB/s", "x floor (best)", "x floor (median, extremes)", "ours is x"], rows)
    ratio = best[MEGATRON] / best[OURS]
    print(
        f"{ratio:.1f} x faster than Megatron's way (wanted: 8); {best[OURS] / best[FLOOR]:.2f} x the floor (at most 4)"
    )
    plain = best[MEGATRON_FLOAT32]
    print(
        f"of float32, which that way neither converts nor copies: {plain / best[OURS]:.1f} x; "
        f"reading alone would be {plain / best[FLOOR]:.1f} x"
    )
    results["speed_s"] = taken


# -- memory ------------------------------------------------------------------------------------------------------------
def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("cannot read the peak of memory: no VmHWM in /proc/self/status (use Linux)")


def measure_memory(name: str, mib: int) -> None:
    """In a process of its own: prints the bytes by which its peak grows."""
    torch.set_num_threads(1)
    tensors = [torch.randn(16 * MIB) for _ in range(mib // 64)]
    method = methods(Hasher())[name]
    method(torch.ones(1000))
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before = peak_bytes()
    for tensor in tensors:
        method(tensor)
    print(json.dumps(peak_bytes() - before))


def memory(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    rows, mib = [], min(arguments.mib, 512)
    for name in (OURS, "fingerprint, bfloat16", MEGATRON_FLOAT32, MEGATRON):
        command = [sys.executable, "-W", "ignore", __file__, "--memory-of", name, "--mib", str(mib)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        grown = json.loads(done.stdout)
        results.setdefault("peak_bytes", {})[name] = grown
        rows.append([name, f"{grown / MIB:.1f}"])
    print(f"\nmemory, {mib} MiB in tensors of 64 MiB")
    print_table(["", "peak, MiB more"], rows)


# -- misses ------------------------------------------------------------------------------------------------------------
def flip(words: torch.Tensor, at: int, bit: int) -> None:
    words[at] ^= (1 << bit) - ((1 << 32) if bit == 31 else 0)


def flips(count: int, bits: Callable[[random.Random], int], is_same: bool = False) -> Callable[..., None]:
    def inject(words: torch.Tensor, r: random.Random) -> None:
        bit = bits(r)
        for at in r.sample(range(len(words)), count):
            flip(words, at, bit if is_same else bits(r))

    return inject


def stuck(words: torch.Tensor, r: random.Random) -> None:
    first = r.randrange(len(words) - 64 * 32)
    words[first : first + 64 * 32 : 32] &= ~(1 << r.randrange(23))


def swap(words: torch.Tensor, r: random.Random) -> None:
    at = r.sample(range(len(words)), 2)
    words[at] = words[at[::-1]]


def swap_rows(words: torch.Tensor, r: random.Random) -> None:
    swap(words[: 64 * 1024].view(64, 1024), r)


def shift(words: torch.Tensor, _: random.Random) -> None:
    words.copy_(words.roll(1))


def refill(words: torch.Tensor, r: random.Random) -> None:
    """A block of ones where there were zeros: an initialised weight that lost its values."""
    first = r.randrange(len(words) - 1024)
    words[first : first + 1024] = 0x3F800000


ERRORS: dict[str, Callable[..., None]] = {
    "one bit": flips(1, lambda r: r.randrange(32)),
    "low mantissa bit": flips(1, lambda r: r.randrange(4)),
    "two bits": flips(2, lambda r: r.randrange(32)),
    "same bit twice": flips(2, lambda r: r.randrange(32), is_same=True),
    "two signs": flips(2, lambda _: 31),
    "four signs": flips(4, lambda _: 31),
    "stuck bit": stuck,
    "two elements swapped": swap,
    "two rows swapped": swap_rows,
    "shift by one": shift,
    "block of ones for zeros": refill,
}


def misses(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    hasher = Hasher()
    table: dict[str, Callable[[torch.Tensor], Any]] = {
        OURS: lambda t: hasher.fingerprint(t).root,
        "int32 sum": lambda t: int(t.view(torch.int32).sum()),
        "float32 sum": lambda t: float(t.sum()),
        "L2 norm": lambda t: float(t.norm()),
        "SHA-1": lambda t: hashlib.sha1(t.numpy()).digest(),
    }
    if hasattr(torch, "hash_tensor"):
        table["hash_tensor"] = lambda t: torch.hash_tensor(t).item()
    r, wanted = random.Random(arguments.seed), effort_of(arguments, 50, 200, 2000)
    rows = []
    for error, inject in ERRORS.items():
        missed = dict.fromkeys(table, 0)
        base = torch.randn(98_427, generator=torch.Generator().manual_seed(arguments.seed))
        if inject is refill:
            base.zero_()
        before = {name: method(base) for name, method in table.items()}
        injected = 0
        while injected < wanted:
            bad = base.clone()
            inject(bad.view(torch.int32), r)
            if torch.equal(bad.view(torch.int32), base.view(torch.int32)):
                continue
            injected += 1
            for name, method in table.items():
                missed[name] += method(bad) == before[name]
        results.setdefault("missed", {})[error] = missed
        rows.append([error, *(str(n) for n in missed.values())])
    print(f"\nmisses, of {wanted} each (seed {arguments.seed})")
    print_table(["", *table], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_arguments(parser)
    parser.add_argument("--mib", type=int, default=1024, help="how much to hash")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=["speed", "memory", "misses"])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        measure_memory(arguments.memory_of, arguments.mib)
        return
    results: dict[str, Any] = {}
    for name, part in (("speed", speed), ("memory", memory), ("misses", misses)):
        if name in arguments.parts:
            part(arguments, results)
    finish(arguments, "fingerprint", results)


if __name__ == "__main__":
    main()
