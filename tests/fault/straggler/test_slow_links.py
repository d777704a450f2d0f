"""A replica whose ranks all work as fast as others, and for which the others wait: what lies between its ranks."""

from __future__ import annotations

import pytest
from jobs import JobStarter
from slowruns import LEARNED, NOTICED, RANKS, Plan, SlowRun

PLAN = Plan("links", "pace_pipeline.py", ())
SLOW_STEP = LEARNED + 20
LATE_S = 1.0  # many times what a step takes, also on a busy machine
STEPS = SLOW_STEP + NOTICED
DEADLINE_S = 900.0


@pytest.mark.slow
@pytest.mark.deadline(DEADLINE_S)
def test_the_replica_with_a_slow_link_is_named_and_none_of_its_ranks(start: JobStarter) -> None:
    options = ["--standalone", f"--nproc-per-node={RANKS}", "--ft-standby=off"]
    job = start(PLAN.script, options, [STEPS, SLOW_STEP, LATE_S], name=PLAN.name)
    run = SlowRun(PLAN, job, job.wait(DEADLINE_S - 60))
    assert run.exit_code == 0, run.story()
    assert len(run.accusations) == 1, run.story()
    found = run.accusations[0]
    assert (found["kind"], found["group"], found["ranks"]) == ("parallel_group", "dp=1", [1, 3]), run.story()
    assert SLOW_STEP <= found["step"] < SLOW_STEP + NOTICED
    assert "parallel group dp=1 (ranks 1,3)" in job.output
    waited = run.column("group_wait_s")
    late = [row for step, row in waited.items() if step > SLOW_STEP + 5]
    assert len(late) > 5
    # The first stage of the other replica waits for its last, and with that for nobody of another replica.
    assert all(row[2] > LATE_S / 2 > max(row[1], row[3]) for row in late), late
