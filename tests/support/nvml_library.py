"""A stand-in for the NVIDIA driver's library, compiled from the recorded prototypes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


def compile_library(cases: Path, folder: Path) -> Path:
    """*folder*, with a libnvidia-ml.so.1 that answers from the file that NVML_STUB_STATE names; skips without it."""
    source = cases.parent / "prototypes/nvml_stub/nvmlstub.c"
    if not source.is_file():
        pytest.skip(f"the stand-in for the driver's library is not here: {source}")
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", folder / "libnvidia-ml.so.1", source]
    try:
        subprocess.run([*command, "-lpthread"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as e:
        pytest.skip(f"the stand-in for the driver's library cannot be compiled: {e}")
    return folder
