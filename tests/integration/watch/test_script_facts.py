"""A script cannot tell how it was started: plainly, as a cold rank or as a warm one."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("facts_script.py")


def differences(expected: Any, got: Any, where: str = "") -> list[str]:
    """Where two JSON values differ, one line each."""
    if isinstance(expected, dict) and isinstance(got, dict):
        keys = sorted({*expected, *got})
        return [d for k in keys for d in differences(expected.get(k, "absent"), got.get(k, "absent"), f"{where}.{k}")]
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        return [
            d for i, (e, g) in enumerate(zip(expected, got, strict=True)) for d in differences(e, g, f"{where}[{i}]")
        ]
    return [] if expected == got else [f"{where}: {expected!r} became {got!r}"]


def page(outcome: Any) -> dict[str, Any]:
    assert outcome.code == 0, outcome
    page = json.loads(outcome.stdout)
    page["at_import"]["modules"] = []
    return {**page, "stderr_text": outcome.stderr}


CASES: dict[str, tuple[list[str], list[str], Mapping[str, str], str | None]] = {
    # flags, script and arguments, variables, working folder below the script's
    "a path": (["-u"], ["{folder}/facts_script.py", "--lr", "3", "-m", "x y"], {}, None),
    "a relative path": (["-u"], ["facts_script.py"], {}, ""),
    "from below": (["-u"], ["../facts_script.py"], {"PYTHONPATH": "../lib:/nowhere:"}, "below"),
    "a module": (["-u"], ["-m", "facts_script", "arg"], {}, ""),
    "a module in a package": (["-u"], ["-m", "pack.facts_script"], {"PYTHONPATH": "{folder}"}, "below"),
    "a package": (["-u"], ["-m", "pack"], {}, ""),
    "a folder": (["-u"], ["{folder}/pack", "a"], {}, None),
    "optimised": (["-u", "-O"], ["{folder}/facts_script.py"], {"PYTHONPATH": ""}, None),
    "development mode": (["-u", "-X", "dev", "-W", "ignore"], ["{folder}/facts_script.py"], {}, None),
    "variables": (
        ["-u"],
        ["{folder}/facts_script.py"],
        {"PYTHONOPTIMIZE": "2", "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "latin-1",
         "PYTHONHASHSEED": "5", "LC_ALL": "C", "PYTHONUTF8": "0", "ODD": "\udcff é", "PYTHONPATH": "/nowhere"},
        None,
    ),
    "its own sitecustomize": (["-u"], ["{folder}/facts_script.py"], {"PYTHONPATH": "{folder}/custom"}, None),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's project: the script, the same as a package, a sitecustomize."""
    made = tmp_path / "project"
    for sub in ("", "below", "lib", "pack", "custom"):
        (made / sub).mkdir(exist_ok=True, parents=True)
    shutil.copy(SCRIPT, made)
    shutil.copy(SCRIPT, made / "pack")
    shutil.copy(SCRIPT, made / "pack" / "__main__.py")
    (made / "pack" / "__init__.py").write_text("")
    (made / "custom" / "sitecustomize.py").write_text(
        "import os, sys\n"
        "os.environ['CUSTOM'] = repr([os.environ.get('RANK'), os.getcwd(), sys.path, sorted(os.environ)])\n"
    )
    return made


@pytest.mark.parametrize("case", CASES)
def test_the_page_of_facts_is_the_same_plain_cold_and_warm(start: Any, folder: Path, case: str) -> None:
    flags, arguments, variables, below = CASES[case]

    def filled(text: str) -> str:
        return text.format(folder=folder)

    argv = [sys.executable, *flags, *map(filled, arguments)]
    env = start.environment({k: filled(v) for k, v in variables.items()})
    cwd = None if below is None else folder / below
    plain = page(start.plain(argv, env, cwd))
    cold = page(start.cold(argv, env, cwd).finish())
    warm = page(start.warm(argv, env, cwd, preload=["decimal", "xml.dom.minidom"]).finish())
    assert differences(plain, cold) == []
    warm["path_cache"] = plain["path_cache"]  # it remembers where the preloaded modules were looked for
    assert differences(plain, warm) == []


def test_a_cold_rank_has_loaded_almost_nothing_for_us(start: Any, folder: Path) -> None:
    argv = [sys.executable, "-u", str(folder / "facts_script.py")]
    plain = json.loads(start.plain(argv, start.environment()).stdout)["at_import"]["modules"]
    cold = json.loads(start.cold(argv).finish().stdout)["at_import"]["modules"]
    more = set(cold) - set(plain)
    assert more <= {
        "__future__",
        "_json",
        "_socket",
        "_weakref",
        "fcntl",
        "mmap",
        "select",
        "faulthandler",
        "atexit",
    }, more
    assert set(plain) <= set(cold)


def test_python_runs_without_the_in_rank_side_when_it_is_told_nothing(start: Any, folder: Path) -> None:
    """The folder got onto PYTHONPATH by some other way: it takes itself out all the same."""
    argv = [sys.executable, "-u", str(folder / "facts_script.py")]
    env = start.environment({"PYTHONPATH": "/nowhere"})
    plain = page(start.plain(argv, env))
    leaked = start.with_site(env)
    del leaked["STEADYRUN_PYTHONPATH"]
    got = page(start.plain(argv, leaked))
    assert differences(plain, got) == []


def test_a_rank_whose_setup_cannot_be_read_runs_the_script(start: Any, folder: Path) -> None:
    argv = [sys.executable, "-u", str(folder / "facts_script.py")]
    env = start.environment()
    plain = page(start.plain(argv, env))
    for told in ("", "{", "{}", '{"board": "/nowhere/board", "slot": 0, "rank": 0, "attempt": 0, "rank_dir": "/x"}'):
        got = page(start.plain(argv, {**start.with_site(env), "STEADYRUN_SETUP": told}))
        line = got.pop("stderr_text")
        assert line.count("\n") == 1, line
        assert line.startswith("steadyrun: cannot watch this rank: "), line
        assert differences({**plain, "stderr_text": "absent"}, got) == []


def test_the_same_works_where_steadyrun_is_not_installed(start: Any, tmp_path: Path, folder: Path) -> None:
    """Another interpreter (PYTHON_EXEC) finds our package through the folder of sitecustomize."""
    import venv

    venv.create(tmp_path / "other", symlinks=True, with_pip=False)
    argv = [str(tmp_path / "other" / "bin" / "python"), "-u", str(folder / "facts_script.py")]
    without = start.script("import steadyrun.core", folder=tmp_path / "probe")[1:]
    assert start.plain([argv[0], *without], start.environment()).code == 1
    rank = start.cold(argv)
    plain = page(start.plain(argv, start.environment()))
    assert differences(plain, page(rank.finish())) == []
    view = rank.view()
    assert view is not None
    assert view.finished_s is not None
    use = start.script("from steadyrun import watch\nprint(watch.is_active())", folder=tmp_path / "use")[1:]
    assert start.cold([argv[0], *use]).finish().stdout == "True\n"


def test_a_variable_that_a_standby_did_not_have_and_one_that_is_gone(start: Any) -> None:
    argv = start.script("import os, json, subprocess; print(json.dumps([dict(os.environ), "
                        "subprocess.run(['env'], capture_output=True, text=True).stdout]))")  # fmt: skip
    rank = start.standby(argv, {**os.environ, "GONE": "1", "KEPT": "1"})
    rank.wait_ready()
    rank.order(start.orders(rank, {"KEPT": "2", "NEW": "a=b", "PATH": os.environ["PATH"]}))
    env, listed = json.loads(rank.finish().stdout)
    assert {k: v for k, v in env.items() if k != "LC_CTYPE"} == {"KEPT": "2", "NEW": "a=b", "PATH": os.environ["PATH"]}
    assert "GONE" not in listed
    assert "NEW=a=b\n" in listed
