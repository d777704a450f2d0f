"""What torchrun's users rely on, with real processes: log options, error files, exit codes, use from Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

SAYS_ITS_RANK = """
import os, sys
print("out of", os.environ["RANK"], flush=True)
print("err of", os.environ["RANK"], file=sys.stderr, flush=True)
"""


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Run the launcher to its end in a folder of its own."""

    def run(*argv: str, script: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
        if script:
            (tmp_path / "script.py").write_text(script)
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PET_FT_RUN_DIR": str(tmp_path / "runs"), **environ}
        return subprocess.run(
            [sys.executable, "-m", "steadyrun.launcher", *argv],
            cwd=tmp_path,
            env=env,
            text=True,
            capture_output=True,
            timeout=200,
            check=False,
        )

    return run


def test_output_of_the_ranks_is_the_output_of_the_launcher(launch: Launch, tmp_path: Path) -> None:
    done = launch("--standalone", "--nproc-per-node=2", "script.py", script=SAYS_ITS_RANK)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["out of 0", "out of 1"]
    assert sorted(line for line in done.stderr.splitlines() if line.startswith("err")) == ["err of 0", "err of 1"]
    logs = tmp_path / "runs" / "latest" / "attempts" / "0"
    assert (logs / "rank_1" / "stdout.log").read_text() == "out of 1\n"


def test_tee_and_redirect_write_torchs_log_tree(launch: Launch, tmp_path: Path) -> None:
    done = launch(
        "--standalone",
        "--nproc-per-node=2",
        "-r",
        "3",
        "-t",
        "0:1",
        "--log-dir=logs",
        "script.py",
        script=SAYS_ITS_RANK,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[default0]:out of 0\n"
    assert "err of" not in done.stderr
    [attempt] = (tmp_path / "logs").glob("*/attempt_0")
    written = {str(p.relative_to(attempt)): p.read_text() for p in attempt.rglob("*.log")}
    assert written == {
        "0/stdout.log": "out of 0\n",
        "0/stderr.log": "err of 0\n",
        "1/stdout.log": "out of 1\n",
        "1/stderr.log": "err of 1\n",
    }


def test_filtered_lines_are_duplicated(launch: Launch, tmp_path: Path) -> None:
    done = launch(
        *("--standalone", "--nproc-per-node=2", "-t", "3", "--log-dir=logs", "--duplicate-stdout-filters=of 1,nothing"),
        "script.py",
        script=SAYS_ITS_RANK,
    )
    assert done.returncode == 0, done.stderr
    [file] = (tmp_path / "logs").glob("*/attempt_0/filtered_stdout.log")
    assert file.read_text() == "[default1]:out of 1\n"


def test_ranks_that_are_filtered_out_are_kept_in_the_run_folder_only(launch: Launch, tmp_path: Path) -> None:
    done = launch("--standalone", "--nproc-per-node=2", "--local-ranks-filter=0", "script.py", script=SAYS_ITS_RANK)
    assert (done.returncode, done.stdout) == (0, "out of 0\n"), done.stderr
    assert (tmp_path / "runs/latest/attempts/0/rank_1/stdout.log").read_text() == "out of 1\n"


FAILS = """
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["RANK"] == "1":
        raise ValueError("no such data")

main()
"""


def test_the_recorded_error_becomes_that_of_the_launcher(launch: Launch, tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    done = launch(
        *("--standalone", "--nproc-per-node=2", "--max-restarts=0", "script.py"),
        script=FAILS,
        TORCHELASTIC_ERROR_FILE=str(error_file),
    )
    assert done.returncode == 80, done.stderr
    assert "no such data" in json.loads(error_file.read_text())["message"]["message"]
    assert "first: rank 1 (local rank 1" in done.stderr
    assert "torch/distributed/run.py" not in done.stderr  # no traceback of the launcher


def test_exit_codes_of_torchrun(launch: Launch) -> None:
    done = launch(
        *("--standalone", "--max-restarts=0", "--ft-exit-codes=torchrun", "script.py"), script="import sys; sys.exit(7)"
    )
    assert done.returncode == 1, done.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--nnodes=x", "script.py"], "torch cannot use the arguments"),
        (["--ft-mode=zap", "script.py"], "--ft-mode: 'zap' is not allowed; allowed: observe, act"),
        (["--ft-faults=kil rank=1", "script.py"], "did you mean kill"),
        (["--signals-to-handle=SIGTREM", "script.py"], "did you mean SIGTERM"),
        (["--no-python", "-m", "x"], "--module"),
    ],
)
def test_a_command_line_that_cannot_be_used_ends_with_2_and_one_line(
    launch: Launch, argv: list[str], said: str
) -> None:
    done = launch(*argv, script="")
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


EMBEDDING = """
import sys, threading
import steadyrun.launcher as launch
from steadyrun.launcher.elastic import SteadyLaunch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig

def double(x):
    import os
    rank = int(os.environ["RANK"])
    if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os._exit(3)
    return 2 * x + rank

def from_a_thread():
    launch.main(["--standalone", "--nproc-per-node=2", "--no-python", "true"])
    try:
        launch.main(["--standalone", "--max-restarts=0", "--no-python", "false"])
    except ChildFailedError as e:
        print("failed", e.get_first_failure()[1].exitcode)

if __name__ == "__main__":
    thread = threading.Thread(target=from_a_thread)
    thread.start()
    thread.join()
    config = LaunchConfig(1, 1, 2, run_id="f", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=1)
    print(dict(sorted(SteadyLaunch(config, double)(20).items())))
"""


def test_it_can_be_used_from_python(tmp_path: Path) -> None:
    """From another thread, for programs, and for functions with their return values and a restart."""
    script = tmp_path / "embedding.py"
    script.write_text(EMBEDDING)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "failed 1\n{0: 40, 1: 41}\n"


FACTS = """
import json, os, sys
facts = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path0": sys.path[0], "file": __file__, "name": __name__,
    "flags": str(sys.flags), "warnoptions": sys.warnoptions, "xoptions": dict(sys._xoptions), "cwd": os.getcwd(),
    "path": sys.path, "spec": repr(__spec__ and __spec__.name), "package": __package__,
    "session_leader": os.getsid(0) == os.getpid(), "main_keys": sorted(k for k in globals() if k != "facts"),
    "environ": {k: v for k, v in os.environ.items()}, "stdin": os.fstat(0).st_rdev,
}
with open(os.environ["FACTS"] + os.environ["RANK"], "w") as f:
    json.dump(facts, f)
"""

DIFFER = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "MASTER_PORT", "MASTER_ADDR", "FACTS", "STEADYRUN_RUN"),
    *("PET_FT_RUN_DIR", "_"),
    # The flight recorder's, which torchrun leaves alone: what they are is tested where they are made.
    *("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_FR_DUMP_ON_TIMEOUT"),
    *("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
)


@pytest.mark.parametrize("how", [["script.py", "--x", "1"], ["-m", "script", "--x"]], ids=["script", "module"])
@pytest.mark.parametrize("pythonpath", [None, "/nonexistent"])
def test_a_script_sees_what_it_sees_under_torchrun(
    launch: Launch, tmp_path: Path, how: list[str], pythonpath: str | None
) -> None:
    environ = {} if pythonpath is None else {"PYTHONPATH": pythonpath}
    argv = ["--standalone", "--nproc-per-node=2", *how]
    done = launch(*argv, script=FACTS, FACTS=str(tmp_path / "ours"), PYTHONOPTIMIZE="1", **environ)
    assert done.returncode == 0, done.stderr
    theirs = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *argv],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FACTS": str(tmp_path / "theirs"), "PYTHONOPTIMIZE": "1", **environ},
        text=True,
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert theirs.returncode == 0, theirs.stderr
    for rank in range(2):
        a, b = (_facts(tmp_path / f"{who}{rank}") for who in ("ours", "theirs"))
        assert a == b


def _facts(file: Path) -> Any:
    facts = json.loads(file.read_text())
    for name in DIFFER:
        facts["environ"].pop(name, None)
    return facts
