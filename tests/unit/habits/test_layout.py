"""Rules of the source tree: its layout, who may import what, and how light the in-rank side is."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOTS = ("agent", "launcher", "collectors")
HEAVY = ("torch", "numpy", "structlog", "psutil", "prometheus_client", "pynvml", "yaml", "asyncio", "multiprocessing")


def source_files(checkout: Path) -> Iterator[Path]:
    for root in ROOTS:
        yield from sorted((checkout / root).rglob("*.py"))


def imports_of(file: Path) -> Iterator[str]:
    """Every module that *file* imports, anywhere in it; ``from a import b`` counts as ``a`` and as ``a.b``."""
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes_of(file: Path) -> Iterator[str]:
    """Every dotted name that *file* reads, e.g. ``torch.distributed.elastic``."""
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


@pytest.mark.parametrize("root", ROOTS)
def test_source_root_holds_one_namespace_portion(root: str, checkout: Path) -> None:
    entries = [
        p.name for p in (checkout / root).iterdir() if p.name not in ("__pycache__", ".mypy_cache", ".ruff_cache")
    ]
    assert entries == ["steadyrun"]
    assert not (checkout / root / "steadyrun" / "__init__.py").exists(), "steadyrun is a PEP 420 namespace"


def test_every_package_is_typed_and_documented(checkout: Path) -> None:
    packages = [
        p for root in ROOTS for p in (checkout / root / "steadyrun").iterdir() if p.is_dir() and p.name != "__pycache__"
    ]
    assert packages
    for package in packages:
        assert (package / "__init__.py").is_file(), f"{package} has no __init__.py"
        assert (package / "py.typed").is_file(), f"{package} has no py.typed"
        assert ast.get_docstring(ast.parse((package / "__init__.py").read_text())), f"{package} says nothing of itself"


def test_every_package_is_in_an_import_layer(checkout: Path) -> None:
    import steadyrun.core  # noqa: F401  (makes the namespace known)

    settings = tomllib.loads((checkout / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c for c in settings["contracts"] if c["id"] == "layers")
    listed = {name.strip(" ()") for layer in layers["layers"] for name in layer.replace("|", ":").split(":")}
    listed |= set(layers["exhaustive_ignores"])
    found = {m.name for m in pkgutil.iter_modules(sys.modules["steadyrun"].__path__)}
    assert found <= listed
    assert {"core", "watch", "node", "detect", "checkpoint", "collectors", "launcher", "ctl", "testing"} <= found


def test_only_one_module_touches_torch_elastic(checkout: Path) -> None:
    allowed = checkout / "launcher" / "steadyrun" / "launcher" / "elastic.py"
    culprits = [
        str(file.relative_to(checkout))
        for file in source_files(checkout)
        if file != allowed
        for name in (*imports_of(file), *attributes_of(file))
        if name.startswith("torch.distributed.elastic")
    ]
    assert culprits == []
    assert any(n.startswith("torch.distributed.elastic") for n in imports_of(allowed))


def test_the_check_for_elastic_sees_all_spellings(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    for text in (
        "import torch.distributed.elastic.agent",
        "from torch.distributed import elastic",
        "def f():\n    from torch.distributed.elastic.rendezvous import api",
        "import torch\ntorch.distributed.elastic.agent",
    ):
        file.write_text(text)
        names = (*imports_of(file), *attributes_of(file))
        assert any(n.startswith("torch.distributed.elastic") for n in names), text


@pytest.mark.parametrize(
    "what", ["from steadyrun import watch", "import steadyrun.watch", "import steadyrun.core.board"]
)
def test_the_in_rank_side_imports_no_package_beyond_the_standard_library(what: str) -> None:
    program = f"import sys, json; old = set(sys.modules); {what}; print(json.dumps(sorted(set(sys.modules) - old)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert loaded.isdisjoint(HEAVY), sorted(loaded & set(HEAVY))
    assert loaded <= {*sys.stdlib_module_names, "steadyrun"}, sorted(loaded - set(sys.stdlib_module_names))


def test_no_regular_package_shadows_the_namespace() -> None:
    module = importlib.import_module("steadyrun")
    assert getattr(module, "__file__", None) is None
