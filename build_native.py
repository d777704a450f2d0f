"""Compiles what is written in C when the package is built (hatchling calls it; see CONTRIBUTING.md, Native code).

Without a C compiler, or on another processor than x86-64, the package is built without it: everything works, snapshots
are copied by the C library's ``memmove``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = "agent/steadyrun/checkpoint/_stream.c"
LIBRARY = "steadyrun/checkpoint/_stream.so"


class NativeBuildHook(BuildHookInterface[Any]):
    """For wheels, and for editable installs, where the library comes to lie beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root, SOURCE)
        if version == "editable":
            self._compile(source, source.with_suffix(".so"))
            return
        self._folder = tempfile.mkdtemp(prefix="steadyrun-build-")
        library = Path(self._folder, source.with_suffix(".so").name)
        if self._compile(source, library):
            build_data["force_include"][str(library)] = LIBRARY
            build_data["pure_python"] = False
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"py3-none-{platform}"  # it knows nothing of Python

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self._folder, ignore_errors=True)

    def _compile(self, source: Path, library: Path) -> bool:
        if os.uname().machine != "x86_64":
            return False
        compiler = shlex.split(os.environ.get("CC", "cc"))
        made = library.with_suffix(".tmp")
        command = [*compiler, "-std=c11", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", str(source), "-o", str(made)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as e:
            why = e.stderr if isinstance(e, subprocess.CalledProcessError) else e
            self.app.display_warning(f"built without {LIBRARY}, snapshots take longer: {shlex.join(command)}: {why}")
            return False
        os.replace(made, library)  # a process may have the old one mapped
        return True
