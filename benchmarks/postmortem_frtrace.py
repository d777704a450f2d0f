"""torchfrtrace on one folder after the other, for benchmarks/postmortem.py.

Reads a line of JSON per folder ({"folder", "limit_s", "incomplete"}) and answers each with one: the tool's whole output
and how it ended. Each run is a fork of this process, which has imported torch already; nothing is shared between runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

from torch.distributed.flight_recorder.fr_trace import main as fr_trace


def run(folder: str, limit_s: float, incomplete: bool) -> dict[str, Any]:
    """As ``torchfrtrace FOLDER --prefix nccl_trace_rank_`` would."""
    arguments = [folder, "--prefix", "nccl_trace_rank_", *(["--allow-incomplete-ranks"] if incomplete else [])]
    with tempfile.TemporaryFile("w+") as output:
        began_s = time.monotonic()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                fr_trace(arguments)
                code = 0
            except BaseException as e:  # how the tool ends is what is asked
                print(f"{type(e).__name__}: {e}", file=sys.stderr, flush=True)
            finally:
                with contextlib.suppress(Exception):
                    sys.stderr.flush()
                os._exit(code)
        is_late = False
        while True:
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() - began_s > limit_s and not is_late:
                is_late = True
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        output.seek(0)
        text = output.read(4 << 20)
    return {
        "output": text,
        "code": os.waitstatus_to_exitcode(status),
        "is_late": is_late,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "wall_s": time.monotonic() - began_s,
    }


def main() -> None:
    for line in sys.stdin:
        wanted = json.loads(line)
        print(json.dumps(run(wanted["folder"], wanted["limit_s"], wanted["incomplete"])), flush=True)


if __name__ == "__main__":
    main()
