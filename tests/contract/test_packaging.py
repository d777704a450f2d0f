"""What is built and installed: the wheel, the source archive, the entry points and the metadata."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest

from steadyrun.checkpoint.copying import streaming

ROOTS = ("agent", "launcher", "collectors")
NATIVE = "steadyrun/checkpoint/_stream.so"
can_compile = shutil.which(os.environ.get("CC", "cc")) is not None and os.uname().machine == "x86_64"


def build(checkout: Path, target: str, out: Path, **environment: str) -> Path:
    """The archive that hatchling makes of *checkout*; needs no network."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    env = os.environ | environment
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (archive,) = out.iterdir()
    return archive


def sources(checkout: Path) -> set[str]:
    """Every source file as its path in the installed tree, but for those in C."""
    return {
        str(file.relative_to(checkout / root))
        for root in ROOTS
        for file in (checkout / root).rglob("*")
        if file.is_file() and file.suffix not in (".pyc", ".c", ".so", ".tmp")
    }


def code_in(wheel: zipfile.ZipFile) -> set[str]:
    return {n for n in wheel.namelist() if ".dist-info/" not in n and ".data/" not in n}


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(build(checkout, "wheel", tmp_path_factory.mktemp("wheel"))) as archive:
        yield archive


def test_wheel_holds_the_sources_and_nothing_else(wheel: zipfile.ZipFile, checkout: Path) -> None:
    assert code_in(wheel) - {NATIVE} == sources(checkout)


@pytest.mark.skipif(not can_compile, reason="needs a C compiler and an x86-64 processor")
def test_what_is_compiled_is_in_the_wheel_and_its_name_says_for_which_machine(wheel: zipfile.ZipFile) -> None:
    assert NATIVE in code_in(wheel)
    assert str(wheel.filename).endswith("-py3-none-linux_x86_64.whl")
    assert wheel.read(NATIVE)[:4] == b"\x7fELF"


def test_without_a_compiler_the_wheel_is_built_all_the_same(checkout: Path, tmp_path: Path) -> None:
    built = build(checkout, "wheel", tmp_path, CC="/nowhere/cc")
    assert built.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(built) as archive:
        assert code_in(archive) == sources(checkout)


def test_wheel_is_typed_licensed_and_has_both_commands(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    (info,) = {n.partition("/")[0] for n in names if ".dist-info/" in n}
    assert "steadyrun/watch/py.typed" in names
    assert "Apache License" in wheel.read(f"{info}/licenses/LICENSE").decode()
    entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert "steadyrun = steadyrun.launcher.main:console_main" in entry_points
    assert "steadyctl = steadyrun.ctl.main:console_main" in entry_points
    text = wheel.read(f"{info}/METADATA").decode()
    for line in (
        "Name: steadyrun",
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.10",
        "Classifier: Typing :: Typed",
    ):
        assert line in text


def test_wheel_from_the_source_archive_is_the_same(wheel: zipfile.ZipFile, checkout: Path, tmp_path: Path) -> None:
    archive = build(checkout, "sdist", tmp_path / "sdist")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    (root,) = (tmp_path / "unpacked").iterdir()
    again = zipfile.ZipFile(build(root, "wheel", tmp_path / "again"))
    with again:
        assert sorted(again.namelist()) == sorted(wheel.namelist())
    for name in ("README.md", "LICENSE", "tests/conftest.py", "examples"):
        assert (root / name).exists(), f"{name} is missing from the source archive"


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    (name,) = [n for n in wheel.namelist() if n.endswith(".dist-info/METADATA")]
    return message_from_bytes(wheel.read(name))


def test_extras_are_what_is_optional(wheel: zipfile.ZipFile) -> None:
    meta = metadata_of(wheel)
    assert {"stacks", "yaml", "remote", "frameworks", "dashboards", "dev"} == set(meta.get_all("Provides-Extra") or ())


def test_every_needed_package_is_used(wheel: zipfile.ZipFile, checkout: Path) -> None:
    requires = metadata_of(wheel).get_all("Requires-Dist") or ()
    needed = {re.split(r"[^\w-]", r)[0] for r in requires if "extra ==" not in r}
    sources = "\n".join(f.read_text() for root in ROOTS for f in (checkout / root).rglob("*.py"))
    assert "torch" in needed
    for package in needed:
        module = {"nvidia-ml-py": "pynvml"}.get(package, package.replace("-", "_"))
        assert re.search(rf"(import|from) {module}\b|\"{module}\"", sources), f"nothing imports {module}"


@pytest.mark.parametrize("command", ["steadyrun", "steadyctl"])
def test_commands_are_installed_and_load(command: str) -> None:
    (point,) = [e for e in metadata.entry_points(group="console_scripts") if e.name == command]
    assert callable(point.load())


@pytest.mark.skipif(not can_compile, reason="needs a C compiler and an x86-64 processor")
def test_package_under_test_copies_past_the_caches() -> None:
    assert streaming() is not None


def test_package_under_test_is_the_installed_one(checkout: Path) -> None:
    import steadyrun.core

    where = Path(steadyrun.core.__file__)
    if os.environ.get("STEADYRUN_EXPECT_INSTALLED") == "wheel":
        assert checkout not in where.parents, f"the tests import {where}, not the installed wheel"
    else:
        assert where.is_file()
