"""A job without torch: named sections and steps through ``watch``, so that it starts in a moment.

Arguments: steps, seconds per step. After a restart it goes on from a state file, written after every fifth step.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

from steadyrun import watch

RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
EVENTS = Path(os.environ["EVENTS"])
STATE = EVENTS / f"state_{RANK}"
steps, pace_s = int(sys.argv[1]), float(sys.argv[2])


def tell(kind, **fields):
    record = {"kind": kind, "rank": RANK, "attempt": ATTEMPT, "pid": os.getpid(), "at_s": time.monotonic(), **fields}
    fd = os.open(EVENTS / f"rank_{RANK}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (json.dumps(record) + "\n").encode())
    os.close(fd)


def on_signal(signum, frame):
    tell("signal", signal=signal.Signals(signum).name)
    if signum == signal.SIGTERM and os.environ.get("LEAVE_ON_TERM"):
        tell("saved")
        sys.exit(0)


for name in filter(None, os.environ.get("CATCH", "").split(",")):
    signal.signal(getattr(signal, name), on_signal)

first = 0
with contextlib.suppress(FileNotFoundError, ValueError):
    first = int(STATE.read_text()) + 1
tell("start", first=first)
for step in range(first, steps):
    if os.environ.get("ASK_TO_STOP") and watch.should_stop():
        tell("asked_to_stop", step=step)
        break
    if os.environ.get("RAISE_AT") == f"{RANK}:{step}":
        raise ValueError(f"bad batch at step {step}")
    with watch.section("work"):
        time.sleep(pace_s)
    if step % 5 == 4:
        STATE.write_text(str(step))
    watch.step(step)
    tell("step", step=step)
tell("done")
