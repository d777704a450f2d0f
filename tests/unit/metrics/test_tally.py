"""Journal records in, metric values out."""

from __future__ import annotations

from typing import Any

import pytest

from steadyrun.collectors.metrics.values import Values
from steadyrun.node.tally import Tally


class Run:
    """A job that began at 1000 s on the monotonic clock and 5000 s of wall time."""

    def __init__(self) -> None:
        self.values = Values()
        self.tally = Tally(self.values, 1000.0, 5000.0)

    def tell(self, type_: str, at_s: float, attempt: int = 0, **fields: Any) -> None:
        record = {"type": type_, "at_s": at_s, "at_unix_s": at_s + 4000.0, "attempt": attempt, "node": "n", **fields}
        self.tally.read(record)

    def get(self, name: str, *labels: str) -> float | None:
        return self.values.get(name, *labels)


@pytest.fixture
def run() -> Run:
    return Run()


def start(run: Run, at_s: float, attempt: int, step: int) -> None:
    run.tell("rank_started", at_s, attempt, rank=0)
    run.tell("rank_attached", at_s + 1.0, attempt, rank=0)
    run.tell("rank_first_step", at_s + 3.0, attempt, rank=0, step=step, is_global=True)


def test_counters_are_there_before_anything_happens(run: Run) -> None:
    assert run.get("restarts_total", "hang") == 0.0
    assert run.get("hangs_total", "section") == 0.0
    assert run.get("incidents_total", "device_stall") == 0.0
    assert run.get("time_seconds_total", "productive") == 0.0


def test_a_job_that_never_saves_has_the_age_of_its_start(run: Run) -> None:
    assert run.get("checkpoint_last_durable_timestamp_seconds") == 5000.0


def test_a_hang_is_counted_once_and_its_restart_timed(run: Run) -> None:
    start(run, 1005.0, 0, 0)
    suspicion = {"rank": 3, "kind": "section", "section": "forward", "since_s": 1020.0, "limit_s": 10.0}
    run.tell("suspicion", 1030.0, suspicion=suspicion, note="left alone", acts=False)
    assert run.get("hangs_total", "section") == 0.0
    run.tell("suspicion", 1032.0, suspicion=suspicion, note="hung", acts=True)
    assert run.tally.hung.keys() == {3}
    assert run.get("hang_last_detection_seconds") == 12.0
    run.tell("stop", 1032.1, reason="hung", trigger="hang")
    run.tell("phase", 1033.0, phase="cooling")
    run.tell("incident", 1033.0, number=1, verdict={"findings": [{"class": "host_stall", "ranks": [2]}]})
    assert run.values.numbers["rank_hung_last_timestamp_seconds"] == {("2",): 5033.0}  # not 3, which waited for it
    run.tell("decision", 1033.1, action="restart", next_attempt=1, reason="", excluded=[])
    start(run, 1034.0, 1, 0)
    assert run.get("hangs_total", "section") == 1.0
    assert run.get("restarts_total", "hang") == 1.0
    assert run.get("incidents_total", "host_stall") == 1.0
    assert run.tally.hung == {}
    phases = [run.get("restart_last_duration_seconds", p) for p in ("stop", "rendezvous", "start", "first_step")]
    assert phases == pytest.approx([0.9, 1.0, 1.0, 2.0])
    assert run.values.histograms["restart_duration_seconds"][()].total == pytest.approx(4.9)


def test_a_decision_to_go_on_is_no_restart(run: Run) -> None:
    run.tell("stop", 1032.1, reason="x", trigger="exit")
    run.tell("decision", 1033.1, action="stop", next_attempt=1, reason="")
    assert all(v == 0.0 for v in run.values.numbers["restarts_total"].values())


def test_the_state_is_one_of_all(run: Run) -> None:
    run.tell("phase", 1001.0, phase="joining")
    run.tell("phase", 1002.0, phase="running")
    assert run.get("job_state", "running") == 1.0
    assert sum(run.values.numbers["job_state"].values()) == 1.0


@pytest.mark.parametrize(
    ("code", "by_us", "reason"),
    [(0, False, "ok"), (1, False, "error"), (-9, False, "signal"), (-9, True, "stopped_by_agent")],
)
def test_exits_by_reason(run: Run, code: int, by_us: bool, reason: str) -> None:
    run.tell("rank_exited", 1001.0, rank=0, code=code, by_us=by_us)
    assert run.get("rank_exits_total", reason) == 1.0


def test_checkpoints(run: Run) -> None:
    save = {"step": 10, "save_attempt": 0}
    run.tell("checkpoint_in_memory", 1100.0, **save, stall_s=0.02)
    run.tell("checkpoint_started", 1100.0, **save)
    assert run.get("checkpoint_in_flight") == 1.0
    run.tell("checkpoint_committed", 1104.0, **save, seconds=4.0, bytes=1000, interval_s=60.0)
    assert run.get("checkpoint_in_flight") == 0.0
    assert run.get("checkpoint_saves_total", "ok") == 1.0
    assert run.get("checkpoint_last_durable_timestamp_seconds") == 5100.0
    assert run.get("checkpoint_interval_seconds") == 60.0
    assert run.get("checkpoint_written_bytes_total") == 1000.0
    run.tell("checkpoint_failed", 1200.0, step=20, save_attempt=0, why="disk full")
    assert run.get("checkpoint_saves_total", "failed") == 1.0
    assert run.get("checkpoint_last_durable_step") == 10.0


def test_an_interval_in_steps_is_what_it_came_to(run: Run) -> None:
    for at_s in (1100.0, 1130.0):
        run.tell("checkpoint_committed", at_s, step=1, seconds=2.0, bytes=1, interval_s=None)
    assert run.get("checkpoint_interval_seconds") == 30.0


def test_a_restart_between_two_saves_is_no_interval(run: Run) -> None:
    run.tell("rank_started", 1050.0, rank=0, attempt=0)
    for at_s in (1100.0, 1130.0):
        run.tell("checkpoint_committed", at_s, step=1, seconds=2.0, bytes=1, interval_s=None)
    run.tell("rank_started", 1500.0, rank=0, attempt=1)
    run.tell("checkpoint_committed", 1600.0, step=2, seconds=2.0, bytes=1, interval_s=None)
    assert run.get("checkpoint_interval_seconds") == 30.0
    run.tell("checkpoint_committed", 1640.0, step=3, seconds=2.0, bytes=1, interval_s=None)
    assert run.get("checkpoint_interval_seconds") == 40.0


def test_loading_is_timed_and_rejected_checkpoints_are_counted(run: Run) -> None:
    run.tell("rank_started", 1001.0, rank=0)
    run.tell("checkpoint_restored", 1002.0, step=5, refused=["a", "b"], source="shared")
    run.tell("checkpoint_loaded", 1005.0, step=5)
    assert run.get("checkpoint_last_restore_seconds") == 3.0
    assert run.get("checkpoint_rejected_total") == 2.0
    assert run.tally.goodput.seconds["checkpoint_restore"] == 3.0


def test_stragglers_come_and_go_and_what_they_cost_only_grows(run: Run) -> None:
    assert run.get("straggler_alarms", "rank") == 0.0, "told before there is any"
    alarm = {"kind": "rank", "ranks": [3], "slowdown": 0.3, "lost_s": 2.0}
    run.tell("straggler", 1100.0, event="began", alarm=alarm)
    run.tell("straggler", 1101.0, event="act", alarm=alarm)
    run.tell("straggler", 1160.0, event="lasts", alarm={**alarm, "lost_s": 5.0})
    assert run.get("straggler_flagged", "3") == 1.0
    assert run.get("straggler_slowdown_ratio", "3") == 0.3
    assert run.get("straggler_alarms", "rank") == 1.0
    run.tell("straggler", 1200.0, event="ended", alarm={**alarm, "lost_s": 6.0})
    assert run.get("straggler_flagged", "3") is None
    assert run.get("straggler_alarms", "rank") == 0.0
    assert run.get("straggler_lost_seconds_total") == 6.0


def test_a_strange_record_is_passed_over(run: Run) -> None:
    run.tell("suspicion", 1001.0, acts=True)
    run.tell("no_such_type", 1001.0)
    run.tell("phase", 1002.0, phase="running")
    assert run.get("job_state", "running") == 1.0


def test_comparisons_of_replicas(run: Run) -> None:
    run.tell("integrity", 1100.0, event="compared", checks=5, agreed=5)
    run.tell("integrity", 1101.0, event="note", text="")
    run.tell("integrity", 1102.0, event="differing", step=9)
    run.tell("integrity", 1103.0, event="found", ranks=[2])
    run.tell("integrity", 1104.0, event="checks", ranks={"0": {"cost_s": 0.2, "checks": 10}, "1": {"checks": 0}})
    assert run.get("sdc_last_check_duration_seconds") == 0.02
    assert run.get("sdc_checks_total", "match") == 5.0
    assert run.get("sdc_checks_total", "mismatch") == 1.0
    assert run.get("sdc_suspect", "2") == 1.0
    assert run.get("sdc_last_check_timestamp_seconds") == 5103.0


def test_losses_out_of_line(run: Run) -> None:
    run.tell("integrity", 1100.0, event="out_of_line", what="loss", rank=1)
    run.tell("integrity", 1101.0, event="out_of_line", what="loss", rank=0)
    run.tell("integrity", 1102.0, event="out_of_line", what="norm of gradients", rank=0)
    run.tell("integrity", 1103.0, event="spike", first=9)
    assert run.get("loss_out_of_line_total", "loss") == 2.0
    assert run.get("loss_out_of_line_total", "gradient_norm") == 1.0
    assert run.get("loss_spikes_total") == 1.0
    assert run.get("sdc_last_check_timestamp_seconds") == 0.0
