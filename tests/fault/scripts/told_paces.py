"""Ranks without torch that tell given step timings through the board, as the in-rank side does for a training script.

Arguments: steps, seconds per step. ``SLOW``: ``rank:share:first step:last step`` of a rank whose forward takes longer
by *share*, or ``node=N:...`` of all ranks of a node (by group rank). ``MUTE=rank:step``: this rank tells nothing from
that step on. Steps begin at 0 in each attempt; each pace is told as if a step took 0.1 s, whatever it takes here.
"""

import json
import mmap
import os
import random
import sys
import time
from pathlib import Path

from steadyrun import watch
from steadyrun.core import layout
from steadyrun.core.timing import TAG_FORWARD_SEEN
from steadyrun.watch.slot import timing_writer

RANK = int(os.environ["RANK"])
LOCAL_RANK = int(os.environ["LOCAL_RANK"])
GROUP_RANK = int(os.environ["GROUP_RANK"])
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
EVENTS = Path(os.environ["EVENTS"])
STEP_S = 0.1
steps, pace_s = int(sys.argv[1]), float(sys.argv[2])


def board_slot():
    """This rank's slot of the board that its agent made; the agent's state file names it."""
    limit_s = time.monotonic() + 30
    while time.monotonic() < limit_s:
        for path in Path(os.environ["RUN_DIR"]).glob("*/live/*.json"):
            live = json.loads(path.read_text() or "{}")
            if any(r["pid"] == os.getpid() for r in live.get("ranks", ())):
                fd = os.open(live["board"], os.O_RDWR)
                mapped = mmap.mmap(fd, os.fstat(fd).st_size)
                os.close(fd)
                return memoryview(mapped).cast("Q"), layout.HEADER_WORDS + LOCAL_RANK * layout.SLOT_WORDS
        time.sleep(0.05)
    raise SystemExit("no agent of mine has a board")


def tell(kind, **fields):
    record = {"kind": kind, "rank": RANK, "attempt": ATTEMPT, "pid": os.getpid(), "at_s": time.monotonic(), **fields}
    fd = os.open(EVENTS / f"rank_{RANK}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (json.dumps(record) + "\n").encode())
    os.close(fd)


def slowness(step):
    told = os.environ.get("SLOW")
    if not told:
        return 0.0
    who, share, first, last = told.split(":")
    mine = int(who.removeprefix("node=")) == GROUP_RANK if who.startswith("node=") else int(who) == RANK
    return float(share) if mine and int(first) <= step <= int(last) else 0.0


put_timing = timing_writer(*board_slot())
noise = random.Random(RANK)
mute_rank, mute_step = map(int, os.environ.get("MUTE", "-1:0").split(":"))
tell("start", first=0)
for step in range(steps):
    began_s = time.monotonic()
    watch.step(step)
    forward_s = 0.03 * (1 + slowness(step)) * noise.gauss(1, 0.01)
    backward_s, optimizer_s, data_s = (s * noise.gauss(1, 0.01) for s in (0.05, 0.01, 0.001))
    busy_s = forward_s + backward_s + optimizer_s + data_s
    nan = float("nan")
    if mute_rank != RANK or step < mute_step:
        put_timing(
            step, time.monotonic(), STEP_S, busy_s, forward_s, backward_s, optimizer_s, data_s,
            0.0, STEP_S - busy_s, busy_s, nan, nan, TAG_FORWARD_SEEN, 0.0,
        )  # fmt: skip
    if step % 50 == 0:
        tell("step", step=step)
    time.sleep(max(pace_s - (time.monotonic() - began_s), 0.0))
tell("done")
