"""A script cannot tell steadyrun from torchrun: one page of facts under torchrun, as a cold rank and as a warm one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, JobStarter, command, free_port

# Until it is to print its facts the script steps, so that standbys are made, and then dies once.
PROLOGUE = """\
import os as _os, sys as _sys, time as _time
if _os.environ.get("BE_WARM") and _os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    from steadyrun import watch
    _step = 0
    while not _os.path.exists(_os.environ["BE_WARM"]):
        watch.step(_step)
        _step += 1
        _time.sleep(0.02)
    _os._exit(1)
"""
EPILOGUE = """\
if __name__ == "__main__":
    with open(os.environ["EVENTS"] + "/facts_" + os.environ["RANK"], "w") as out:
        json.dump(facts(), out)
"""
# What differs between any two runs: ports, identities, places of error files, the number of the attempt.
VARYING = (
    "MASTER_PORT",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RESTART_COUNT",
    "EVENTS",
    "STEADYRUN_TEST_JOB",
    "BE_WARM",
)
# steadyrun's own, stated in the README.
OURS = (
    "STEADYRUN_RUN",
    *("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_FR_DUMP_ON_TIMEOUT"),
    *("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
    "TORCH_NCCL_DEBUG_INFO_PIPE_FILE",
)


def without(value: Any, names: tuple[str, ...], words: dict[str, str]) -> Any:
    """*value* with variables of these names left out, wherever environments stand in it, and texts replaced."""
    if isinstance(value, dict):
        return {k: without(v, names, words) for k, v in value.items() if k not in names}
    if isinstance(value, list):
        kept = [v for v in value if not (isinstance(v, list) and len(v) == 2 and v[0] in names)]
        kept = [v for v in kept if not (isinstance(v, str) and v.partition("=")[0] in names)]
        return [without(v, names, words) for v in kept]
    if isinstance(value, str):
        for old, new in words.items():
            value = value.replace(old, new)
    return value


def differences(expected: Any, got: Any, where: str = "") -> list[str]:
    if isinstance(expected, dict) and isinstance(got, dict):
        return [
            line
            for key in sorted({*expected, *got})
            for line in differences(expected.get(key, "absent"), got.get(key, "absent"), f"{where}.{key}")
        ]
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        pairs = enumerate(zip(expected, got, strict=True))
        return [line for n, (e, g) in pairs for line in differences(e, g, f"{where}[{n}]")]
    return [] if expected == got else [f"{where}: {expected!r} became {got!r}"]


def pages(job: Job) -> list[dict[str, Any]]:
    files = sorted(job.events_dir.glob("facts_*"))
    found = [json.loads(f.read_text()) for f in files]
    assert len(found) == 2, job.story()
    for page in found:
        page["at_import"]["modules"] = []  # how the in-rank side came to be in place
        page["path_cache"] = []
        page["limits"].pop("RLIMIT_LOCKS", None)  # without effect since Linux 2.4.25; our mark on descendants
        page["c_env"] = sorted(page["c_env"])
        page["env"] = sorted(page["env"])
        for way in ("fork", "spawn"):
            page[way]["env"] = sorted(map(list, page[way].get("env", {}).items()))
        for stream in ("1", "2"):  # the launcher's own output file there, the rank's log here (--ft-capture)
            assert page["descriptors"][stream].startswith("/")
            page["descriptors"][stream] = "a file"
    return [without(page, VARYING + OURS, {str(job.output_path.parent): "JOB"}) for page in found]


@pytest.mark.deadline(300)
def test_the_page_of_facts_is_the_same_under_torchrun_cold_and_warm(
    start: JobStarter, tmp_path: Path, checkout: Path
) -> None:
    source = (checkout / "tests" / "integration" / "watch" / "facts_script.py").read_text()
    body, main, _ = source.partition('if __name__ == "__main__":\n')
    assert main
    script = tmp_path / "facts_script.py"
    script.write_text(PROLOGUE + body + EPILOGUE)

    def options() -> list[str]:
        where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=facts"]
        return ["--nnodes=1", "--nproc-per-node=2", *where, "--max-restarts=1"]

    arguments = ["--lr", "3", "-m", "x y"]
    torchrun = start(script, options(), arguments, program=[command("torchrun")], name="torchrun")
    assert torchrun.wait(90) == 0, torchrun.story()
    cold = start(script, options(), arguments, name="cold")
    assert cold.wait(90) == 0, cold.story()
    go = tmp_path / "go"
    warm = start(script, options(), arguments, env={"BE_WARM": str(go)}, name="warm")
    warm.wait_for(lambda: warm.journal("standby", event="ready"), 60, "standbys are ready")
    go.touch()
    assert warm.wait(90) == 0, warm.story()
    assert all(r["warm"] for r in warm.journal("rank_started", attempt=1)), warm.story()

    expected = pages(torchrun)
    for job in (cold, warm):
        for rank, (want, got) in enumerate(zip(expected, pages(job), strict=True)):
            found = differences(want, got)
            assert not found, "\n".join([f"rank {rank}, {job.output_path.parent.name}:", *found])
