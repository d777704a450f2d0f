"""Export and average hold a few tensors, not the checkpoint."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TENSORS, MIB = 32, 2
# The peak of resident memory during the work, over what was resident before; in a process of its own.
MEASURED = """
import pathlib, sys
import torch
from steadyrun.checkpoint import averaging, exporting
from steadyrun.checkpoint.sources import open_source

def resident(name):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024

root = pathlib.Path(sys.argv[2])
sources = [open_source(root / f"step-{i}") for i in (1, 2)]
[next(source.read(["model.w0"])) for source in sources]  # what is imported and started once
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
if sys.argv[1] == "export":
    exporting.export(
        sources[0], exporting.choose(sources[0], None, "bfloat16"), root / "out", exporting.Format.SAFETENSORS, 20 << 20
    )
else:
    averaging.average(root / "out", sources)
print(resident("VmHWM") - before)
"""


def peak_mib(what: str, root: Path) -> int:
    told = subprocess.run(
        [sys.executable, "-c", MEASURED, what, root], capture_output=True, text=True, timeout=200, check=True
    )
    return int(told.stdout)


def test_peak_memory_does_not_grow_with_the_checkpoint(dcp_folder: Callable[..., Path], tmp_path: Path) -> None:
    for seed in (1, 2):
        tensors: dict[str, Any] = {f"w{i}": torch.full((MIB << 18,), float(seed)) for i in range(TENSORS)}
        dcp_folder(seed, {"model": tensors})
    del tensors
    # each of 64 MiB; a handful of tensors, their wider sums and the pieces that are being written are allowed
    assert peak_mib("export", tmp_path) < 16 * MIB
    (tmp_path / "out").rename(tmp_path / "export")
    assert peak_mib("average", tmp_path) < 22 * MIB
    assert sum(f.stat().st_size for f in (tmp_path / "export").glob("*.safetensors")) > TENSORS * MIB // 2 << 20
