"""Prometheus, Alertmanager and their tools, for tests that run them; skipped with a reason where they are not there.

Looked for in ``PROMETHEUS_DIR``, then on PATH. Without root or a service:
``apt-get download prometheus prometheus-alertmanager``, ``dpkg -x`` each into a folder, and name its ``usr/bin``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = "PROMETHEUS_DIR"


def tool(*names: str) -> str:
    """The first of *names* that is there; skips the test otherwise."""
    where = os.environ.get(FOLDER)
    for name in names:
        found = shutil.which(name, path=where) if where else shutil.which(name)
        if found:
            return found
    pytest.skip(f"no {names[0]} (apt-get download, dpkg -x, then {FOLDER}=FOLDER/usr/bin)")


def check(*command: str | Path, limit_s: float = 60.0) -> str:
    """What it prints; fails the test with that when it fails."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=limit_s, check=False)
    text = done.stdout + done.stderr
    told = [line for line in text.splitlines() if line.strip() and not line.startswith(("Unit Testing", "  SUCCESS"))]
    assert done.returncode == 0, "\n".join(told)
    return text
