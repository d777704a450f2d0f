"""Python, torch and its seams, where steadyrun comes from, what sitecustomize there is, py-spy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

from steadyrun.ctl.checks.check import Check, Host, fail, ok, run_all, warn

__all__ = ["checks"]

OLDEST_TORCH: Final = (2, 6)
TORCH_LIMIT_S: Final = 180.0

# Runs in an interpreter of its own: a broken torch or driver then ends or hangs that one only.
_ASK_TORCH: Final = """
import json, time
t = time.monotonic()
import torch
import torch.distributed as dist
took_s = time.monotonic() - t
problems = []
try:
    import steadyrun.launcher.elastic as seams
    import torch.distributed.run as run
    names = ("run", "get_args_parser", "elastic_launch")
    problems = [f"torch.distributed.run has no {n}" for n in names if not hasattr(run, n)]
    if hasattr(seams, "check_seams"):
        problems += [str(p) for p in seams.check_seams()]
except (ImportError, AttributeError) as e:
    problems = [str(e)]
backends = [b for b in ("gloo", "nccl", "mpi") if dist.is_available() and getattr(dist, f"is_{b}_available")()]
print(json.dumps({"version": torch.__version__, "took_s": took_s, "distributed": dist.is_available(),
                  "backends": backends, "cuda": torch.version.cuda, "problems": problems}))
"""


def checks(host: Host) -> list[Check]:
    """The group's lines."""
    return [*run_all(host, (_python, _import_location)), *_torch(host), *run_all(host, (_sitecustomize, _py_spy))]


def _python(host: Host) -> Check:
    text = f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}"
    if platform.python_implementation() != "CPython":
        return fail("Python", text, "stack evidence needs CPython")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return warn("Python", f"{text}, free-threaded", "steadyrun is tested with the GIL; stacks may be incomplete")
    return ok("Python", text)


def _import_location(host: Host) -> Check:
    """All parts of steadyrun come from one installation, and nothing hides it from the user's script."""
    import steadyrun.core
    import steadyrun.ctl

    here = Path.cwd()
    for hiding in (here / "steadyrun.py", here / "steadyrun" / "__init__.py"):
        if hiding.exists() and not Path(steadyrun.core.__file__).is_relative_to(here / "steadyrun"):
            return fail(
                "steadyrun",
                f"{hiding} hides the installed package from scripts in this folder",
                "rename it: a script's own folder comes first on its import path",
            )
    try:
        version = importlib.metadata.version("steadyrun")
    except importlib.metadata.PackageNotFoundError:
        advice = "pip install steadyrun, so that the ranks' interpreter finds it too"
        return warn("steadyrun", f"imported from {Path(steadyrun.core.__file__).parents[2]}, but not installed", advice)
    places = sorted({str(Path(m.__file__ or "").parents[1]) for m in (steadyrun.core, steadyrun.ctl)})
    script = shutil.which("steadyrun", path=host.env.get("PATH"))
    text = f"{version}, {places[0]}" + ("" if len(places) == 1 else " and beside it")
    if script is None:
        advice = f"put {Path(sys.executable).parent} on PATH, or use python -m steadyrun.launcher"
        return warn("steadyrun", f"{text}; the command steadyrun is not on PATH", advice)
    if Path(script).parent != Path(sys.executable).parent:
        advice = f"PATH has another one first; this interpreter's is in {Path(sys.executable).parent}"
        return warn("steadyrun", f"{text}; but the command is {script}", advice)
    return ok("steadyrun", text)


def _torch(host: Host) -> list[Check]:
    try:
        installed = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return [
            fail(
                "torch",
                "not installed for this interpreter",
                f"pip install 'torch>={'.'.join(map(str, OLDEST_TORCH))}'",
            )
        ]
    answer = host.ask(_ASK_TORCH, TORCH_LIMIT_S)
    if answer.value is None:
        advice = "python -c 'import torch' shows the whole error"
        return [fail("torch", f"{installed} is installed, but its import failed: {answer.problem}", advice)]
    told = answer.value
    cuda = f"CUDA {told['cuda']}" if told["cuda"] else "CPU only"
    text = (
        f"{told['version']}, {cuda}, {', '.join(told['backends']) or 'no backend'}; import takes {told['took_s']:.1f} s"
    )
    oldest = ".".join(map(str, OLDEST_TORCH))
    if not told["distributed"]:
        out = [fail("torch", text, "this build has no torch.distributed: install another one")]
    elif _version(told["version"]) < OLDEST_TORCH:
        out = [fail("torch", text, f"steadyrun needs torch {oldest} or newer")]
    else:
        out = [ok("torch", text)]
    if told["problems"]:
        advice = "steadyrun is made for torch 2.6 to 2.14: use one of these, or torchrun until steadyrun knows yours"
        out.append(fail("torch seams", "; ".join(told["problems"]), advice))
    else:
        out.append(ok("torch seams", "what the launcher builds on is as expected"))
    return out


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text.partition("+")[0])[:2])


def _sitecustomize(host: Host) -> Check:
    """The user's own sitecustomize, which ours runs after itself; and whether Python runs any at all."""
    if sys.flags.no_site or host.env.get("PYTHONNOSITE"):
        return fail("sitecustomize", "site is switched off (-S)", "ranks need it: start Python without -S")
    spec = importlib.util.find_spec("sitecustomize")
    theirs = spec.origin if spec is not None and spec.origin else ""
    answer = host.ask("import json, sys; print(json.dumps('sitecustomize' in sys.modules))", 20.0)
    if answer.value is None:
        return fail("sitecustomize", f"a plain interpreter failed: {answer.problem}", "look at that error first")
    if theirs and not answer.value:
        return warn("sitecustomize", f"{theirs} fails when it is imported", "python -v -c '' shows why")
    return ok("sitecustomize", f"{theirs} is run after ours" if theirs else "none besides ours")


def _py_spy(host: Host) -> Check:
    beside = Path(sys.executable).parent / "py-spy"
    found = str(beside) if beside.exists() else shutil.which("py-spy", path=host.env.get("PATH"))
    if found is None:
        advice = "pip install 'steadyrun[stacks]' adds native frames; stacks come from faulthandler without it"
        return warn("py-spy", "not installed", advice)
    try:
        done = subprocess.run(
            [found, "--version"], capture_output=True, timeout=10, check=False, stdin=subprocess.DEVNULL
        )
        version = done.stdout.decode(errors="replace").strip()
    except (OSError, subprocess.TimeoutExpired) as e:
        return warn("py-spy", f"{found} does not run: {e}", "reinstall it: pip install --force-reinstall py-spy")
    return ok("py-spy", f"{version.removeprefix('py-spy ')}, {found}")
