"""A stand-in for the driver's library."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvml_library import compile_library


@pytest.fixture(scope="session")
def nvml_library(shared_cases: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a libnvidia-ml.so.1 that answers from a file."""
    return compile_library(shared_cases, tmp_path_factory.mktemp("nvml"))
