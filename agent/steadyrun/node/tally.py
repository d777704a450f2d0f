"""What the journal's records add up to: counters and newest values for the metrics. Pure; the same from a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import structlog

from steadyrun.collectors.metrics.spec import JOB_STATES, OUT_OF_LINE, TRIGGERS
from steadyrun.collectors.metrics.values import Values
from steadyrun.core.classes import EXIT_OF_CLASS, Action, ExitClass, FaultClass
from steadyrun.core.guards import WHAT
from steadyrun.node.goodput import Goodput

__all__ = ["Tally"]

log = structlog.get_logger()

HANGS: Final = frozenset({"hang", "stopped"})  # triggers
_SAVES: Final[Mapping[str, str]] = {
    "checkpoint_committed": "ok",
    "checkpoint_failed": "failed",
    "checkpoint_skipped": "skipped",
}
_HANG_CLASSES: Final = frozenset(
    {c.value for c, code in EXIT_OF_CLASS.items() if code is ExitClass.HANG and c is not FaultClass.STRAGGLER}
)
_MOST_SAVES: Final = 1000
_OUT_OF_LINE: Final[Mapping[str, str]] = dict(zip(WHAT, OUT_OF_LINE, strict=True))


class Tally:
    """Fed with each record of one agent's journal, in order. Records are plain JSON values.

    Attributes:
        hung: ranks that are taken for hung, and since when they had made no progress (CLOCK_MONOTONIC).
    """

    def __init__(self, values: Values, begun_s: float, begun_unix_s: float) -> None:
        self._values = values
        self.goodput = Goodput(begun_s)
        self.hung: dict[int, float] = {}
        self._attempt = -1
        self._attempt_s = begun_s
        self._has_first_step = False
        self._trigger = ""
        self._stopped_s: float | None = None  # when the stop came that a restart follows
        self._marks: dict[str, float] = {}
        self._restore_s: float | None = None
        self._durable_s: float | None = None  # when the newest durable checkpoint was taken
        self._saves: dict[tuple[int, int], float] = {}
        self._alarms: dict[tuple[str, tuple[int, ...]], Mapping[str, Any]] = {}
        self._lost_s: dict[tuple[str, tuple[int, ...]], float] = {}
        self._readers: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
            "phase": self._phase,
            "rank_started": self._rank_started,
            "rank_attached": self._rank_attached,
            "rank_first_step": self._rank_first_step,
            "rank_exited": self._rank_exited,
            "suspicion": self._suspicion,
            "alarm": self._alarm,
            "limits": self._limits,
            "stop": self._stop,
            "decision": self._decision,
            "incident": self._incident,
            "straggler": self._straggler,
            "checkpoint_started": self._save_began,
            "checkpoint_committed": self._save_ended,
            "checkpoint_failed": self._save_ended,
            "checkpoint_skipped": self._save_ended,
            "checkpoint_in_memory": self._in_memory,
            "checkpoint_restored": self._restored,
            "checkpoint_loaded": self._loaded,
            "integrity": self._integrity,
            "run_ended": self._ended,
        }
        for name in ("last_incident_timestamp_seconds", "last_restart_timestamp_seconds", "job_nodes_excluded"):
            values.set(name, 0.0)
        values.set("sdc_last_check_timestamp_seconds", 0.0)
        values.set("job_start_timestamp_seconds", begun_unix_s)
        # a job that never saves must not be silent about it
        values.set("checkpoint_last_durable_timestamp_seconds", begun_unix_s)
        values.set("checkpoint_in_flight", 0.0)
        self._tell_alarms()  # none yet

    def read(self, record: Mapping[str, Any]) -> None:
        """One record."""
        reader = self._readers.get(str(record.get("type")))
        if reader is not None:
            try:
                reader(record)
            except (KeyError, TypeError, ValueError, AttributeError) as e:
                log.warning("record_not_counted", type=record["type"], error=repr(e))

    # -- attempts ------------------------------------------------------------------------------------------------------
    def _phase(self, record: Mapping[str, Any]) -> None:
        now = str(record["phase"])
        for state in JOB_STATES:
            self._values.set("job_state", float(state == now), state)
        if now == "cooling" and self._stopped_s is not None:
            self._marks.setdefault("gone", record["at_s"])

    def _rank_started(self, record: Mapping[str, Any]) -> None:
        if record["attempt"] != self._attempt:
            self._attempt, self._has_first_step = record["attempt"], False
            self._marks.setdefault("started", record["at_s"])
            self.hung.clear()
            self._durable_s = None  # the time until ranks were back is no interval between saves
            self.goodput.attempt_started(record["at_s"])
        self._values.set("job_attempt", float(record["attempt"]))

    def _rank_attached(self, record: Mapping[str, Any]) -> None:
        self._marks["attached"] = record["at_s"]

    def _rank_first_step(self, record: Mapping[str, Any]) -> None:
        if self._has_first_step:
            return
        self._has_first_step = True
        self.goodput.first_step(record["at_s"], int(record["step"]), bool(record.get("is_global")))
        if self._stopped_s is not None:
            self._tell_restart(self._stopped_s, record["at_s"])
        self._stopped_s, self._marks = None, {}

    def _tell_restart(self, stopped_s: float, first_step_s: float) -> None:
        bounds = [stopped_s, *(self._marks.get(m) for m in ("gone", "started", "attached")), first_step_s]
        before_s = stopped_s
        for phase, at_s in zip(("stop", "rendezvous", "start", "first_step"), bounds[1:], strict=True):
            at_s = max(at_s if at_s is not None else before_s, before_s)
            self._values.set("restart_last_duration_seconds", at_s - before_s, phase)
            before_s = at_s
        self._values.observe("restart_duration_seconds", max(first_step_s - stopped_s, 0.0))

    def _rank_exited(self, record: Mapping[str, Any]) -> None:
        code = record["code"]
        reason = "ok" if code == 0 else "stopped_by_agent" if record["by_us"] else "error" if code > 0 else "signal"
        self._values.add("rank_exits_total", 1, reason)

    def _stop(self, record: Mapping[str, Any]) -> None:
        self._trigger = str(record.get("trigger") or "exit")
        self._stopped_s, self._marks = record["at_s"], {}
        self.goodput.attempt_over(record["at_s"], self._trigger in HANGS)
        self._restore_s = None
        self._alarms.clear()
        self._tell_alarms()

    def _decision(self, record: Mapping[str, Any]) -> None:
        self._values.add("job_nodes_excluded", len(record.get("excluded") or ()))
        if record["action"] not in (Action.RESTART.value, Action.RESTART_WITHOUT_NODE.value, Action.ROLL_BACK.value):
            return
        self._values.add("restarts_total", 1, self._trigger if self._trigger in TRIGGERS else "other")
        self._values.set("last_restart_timestamp_seconds", record["at_unix_s"])

    def _ended(self, record: Mapping[str, Any]) -> None:
        self.goodput.ended(record["at_s"])

    # -- faults --------------------------------------------------------------------------------------------------------
    def _suspicion(self, record: Mapping[str, Any]) -> None:
        if not record.get("acts"):
            return
        suspicion = record["suspicion"]
        rank, waited_s = int(suspicion["rank"]), max(record["at_s"] - suspicion["since_s"], 0.0)
        self.hung[rank] = record["at_s"]
        self._values.add("hangs_total", 1, str(suspicion["kind"]))
        self._values.observe("hang_detection_seconds", waited_s)
        self._values.set("hang_last_detection_seconds", waited_s)
        self.goodput.hang_found(record["at_s"])

    def _alarm(self, record: Mapping[str, Any]) -> None:
        section, stage = str(record["key"]), str(record["stage"])
        self._values.prepare("section_limits_passed_total", section=section)
        self._values.add("section_limits_passed_total", 1, section, stage)

    def _limits(self, record: Mapping[str, Any]) -> None:
        self._values.set("limits_calibrated_timestamp_seconds", record["at_unix_s"])

    def _incident(self, record: Mapping[str, Any]) -> None:
        findings = record["verdict"]["findings"]
        cls = str(findings[0]["class"]) if findings else "insufficient_data"
        if cls != "healthy":
            self._values.add("incidents_total", 1, cls)
        self._values.set("last_incident_timestamp_seconds", record["at_unix_s"])
        # Those that a limit passed for may only wait for another: who hangs is for the verdict to say.
        was_stopped_so = self._stopped_s is not None and self._trigger in HANGS
        for finding in findings:
            if was_stopped_so or finding["class"] in _HANG_CLASSES:
                for rank in finding.get("ranks") or ():
                    self._values.set("rank_hung_last_timestamp_seconds", record["at_unix_s"], str(int(rank)))

    def _straggler(self, record: Mapping[str, Any]) -> None:
        alarm = record["alarm"]
        key = (str(alarm["kind"]), tuple(int(r) for r in alarm["ranks"]))
        if record["event"] == "ended":
            self._alarms.pop(key, None)
        elif record["event"] in ("began", "lasts", "now"):
            self._alarms[key] = alarm
        if record["event"] != "act":
            lost_s = float(alarm["lost_s"])
            self._values.add("straggler_lost_seconds_total", lost_s - self._lost_s.get(key, 0.0))
            self._lost_s[key] = 0.0 if record["event"] == "ended" else max(lost_s, self._lost_s.get(key, 0.0))
        self._tell_alarms()

    def _tell_alarms(self) -> None:
        kinds = [kind for kind, _ in self._alarms]
        for kind in ("rank", "node", "parallel_group", "stage_imbalance", "data_imbalance", "transient"):
            self._values.set("straggler_alarms", float(kinds.count(kind)), kind)
        slow: dict[tuple[str, ...], float] = {}
        for (kind, ranks), alarm in self._alarms.items():
            if kind in ("rank", "node", "parallel_group"):
                for rank in ranks:
                    slow[str(rank),] = max(float(alarm["slowdown"]), slow.get((str(rank),), 0.0))
        self._values.replace("straggler_flagged", dict.fromkeys(slow, 1.0))
        self._values.replace("straggler_slowdown_ratio", slow)

    def _integrity(self, record: Mapping[str, Any]) -> None:
        """Comparisons of replicas: what agreed is told in sums, what differed one by one."""
        event = record["event"]
        if event == "compared":
            self._values.add("sdc_checks_total", float(record["agreed"]), "match")
        elif event in ("differing", "at_rest", "replay_differed"):
            self._values.add("sdc_checks_total", 1, "mismatch")
        elif event == "in_vain":
            self._values.add("sdc_checks_total", 1, "error")
        elif event == "out_of_line":
            self._values.add("loss_out_of_line_total", 1, _OUT_OF_LINE[record["what"]])
            return
        elif event == "spike":
            self._values.add("loss_spikes_total", 1)
            return
        elif event == "found":
            self._values.replace("sdc_suspect", {(str(int(rank)),): 1.0 for rank in record["ranks"]})
        else:
            if event == "checks":
                costs = [float(r["cost_s"]) / float(r["checks"]) for r in record["ranks"].values() if r["checks"]]
                self._values.set("sdc_last_check_duration_seconds", max(costs, default=0.0))
            return
        self._values.set("sdc_last_check_timestamp_seconds", record["at_unix_s"])

    # -- checkpoints ---------------------------------------------------------------------------------------------------
    @staticmethod
    def _save_of(record: Mapping[str, Any]) -> tuple[int, int]:
        return int(record["step"]), int(record.get("save_attempt", record["attempt"]))

    def _save_began(self, record: Mapping[str, Any]) -> None:
        if len(self._saves) < _MOST_SAVES:
            self._saves[self._save_of(record)] = record["at_s"]
        self._values.set("checkpoint_in_flight", float(len(self._saves)))

    def _in_memory(self, record: Mapping[str, Any]) -> None:
        stall_s = float(record["stall_s"])
        self._values.observe("checkpoint_stall_seconds", stall_s)
        self._values.set("checkpoint_last_stall_seconds", stall_s)

    def _save_ended(self, record: Mapping[str, Any]) -> None:
        self._saves.pop(self._save_of(record), None)
        self._values.set("checkpoint_in_flight", float(len(self._saves)))
        result = _SAVES[record["type"]]
        self._values.add("checkpoint_saves_total", 1, result)
        if result != "ok":
            return
        seconds = float(record["seconds"])
        self._values.observe("checkpoint_persist_seconds", seconds)
        self._values.set("checkpoint_last_persist_seconds", seconds)
        self._values.add("checkpoint_written_bytes_total", float(record["bytes"]))
        taken_s = record["at_s"] - seconds
        self._values.set("checkpoint_last_durable_timestamp_seconds", record["at_unix_s"] - seconds)
        self._values.set("checkpoint_last_durable_step", float(record["step"]))
        interval_s = record.get("interval_s")
        if not isinstance(interval_s, (int, float)) and self._durable_s is not None:
            interval_s = taken_s - self._durable_s  # by number of steps: what it has come to
        if interval_s:
            self._values.set("checkpoint_interval_seconds", float(interval_s))
        self._durable_s = taken_s

    def _restored(self, record: Mapping[str, Any]) -> None:
        self._values.add("checkpoint_rejected_total", len(record.get("refused") or ()))
        if record.get("step") is not None:
            self._restore_s = record["at_s"]
            self.goodput.restore_began(record["at_s"])

    def _loaded(self, record: Mapping[str, Any]) -> None:
        self.goodput.restore_ended(record["at_s"])
        if self._restore_s is not None:
            seconds = max(record["at_s"] - self._restore_s, 0.0)
            self._values.observe("checkpoint_restore_seconds", seconds)
            self._values.set("checkpoint_last_restore_seconds", seconds)
        self._restore_s = None
