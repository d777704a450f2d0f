"""Alerts about the agent itself: without it nobody watches the ranks of its node."""

from __future__ import annotations

from typing import Final

from steadyrun.collectors.alerts.records import Alert, Severity

__all__ = ["AGENT_ALERTS"]

_GROUP: Final = "agent"

AGENT_ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        name="AgentDown",
        group=_GROUP,
        severity=Severity.CRITICAL,
        hold_s=120,
        expr='up{job="steadyrun"} == 0',
        summary="A node's agent cannot be scraped.",
        description="The agent at {{ $labels.instance }} of run {{ $labels.run_id }} has not answered for 2 minutes.",
        meaning=(
            "Prometheus still has the agent in its list of targets, but cannot reach it: the node is down or cut off, "
            "the agent was killed, or its port is blocked. A job that ends takes its target off the list, so this is "
            "no finished job. When the agent died alone, its guardian ends the node's ranks."
        ),
        confirm=(
            "`steadyctl status RUN --once` says whether the other agents see the node.",
            "Log in on the node: `ps -C steadyrun`, and `curl http://INSTANCE/metrics` from the Prometheus host.",
        ),
        act=(
            "If the node is down or was rebooted, take it out of the pool; the job goes on with a spare when it has "
            "one.",
            "If only the port is blocked, open it, or choose another with `--ft-metrics-addr`.",
        ),
    ),
    Alert(
        name="AgentLoopLag",
        group=_GROUP,
        severity=Severity.WARNING,
        hold_s=300,
        expr="steadyrun_agent_loop_lag_seconds > 1",
        summary="The agent's loop is late.",
        description=(
            "The loop of the agent at {{ $labels.instance }} is {{ $value | humanizeDuration }} late; faults are found "
            "that much later."
        ),
        meaning=(
            "The agent does not get to run in time. Usually data loaders or other jobs take all cores of the node, or "
            "it swaps."
        ),
        confirm=(
            "`steadyctl top RUN` shows load and memory of the node.",
            "`cat /proc/pressure/cpu /proc/pressure/memory` on the node.",
        ),
        act=("Leave a core for the system: fewer data loader workers, or a CPU set for the ranks.",),
    ),
    Alert(
        name="JournalLosesRecords",
        group=_GROUP,
        severity=Severity.WARNING,
        expr="sum by (run_id, instance) (increase(steadyrun_journal_records_lost_total[15m])) > 0",
        summary="The agent cannot write its journal.",
        description=(
            "The agent at {{ $labels.instance }} of run {{ $labels.run_id }} has lost records of its journal."
        ),
        meaning=(
            "The disk of the run folder is full, read-only or gone. The job goes on; post-mortems and the calibration "
            "of limits will lack these records, and files of incidents may be missing too."
        ),
        confirm=("`steadyctl check NODE`, and `df -h RUN; df -i RUN` on the node.",),
        act=("Free space, or start the next job with another `--ft-run-dir`.",),
    ),
    Alert(
        name="CollectorFailing",
        group=_GROUP,
        severity=Severity.WARNING,
        hold_s=300,
        expr="steadyrun_collector_up == 0",
        summary="A collector of the agent keeps failing.",
        description="Collector {{ $labels.collector }} at {{ $labels.instance }} cannot look at its part of the node.",
        meaning=(
            "What this collector watches is not known: neither healthy nor unhealthy. A source that the node does not "
            "have at all (no GPU, no InfiniBand) is no failure and does not end here."
        ),
        confirm=("`steadyctl check NODE` runs the same check once and prints the reason.",),
        act=("Do what its reason says: mostly a missing right (CAP_SYSLOG for the kernel log) or a broken driver.",),
    ),
    Alert(
        name="CollectorStuck",
        group=_GROUP,
        severity=Severity.CRITICAL,
        hold_s=60,
        expr="time() - steadyrun_collector_last_success_timestamp_seconds > 120",
        summary="A collector has not finished for two minutes.",
        description=(
            "Collector {{ $labels.collector }} at {{ $labels.instance }} last came back {{ $value | humanizeDuration "
            "}} ago."
        ),
        meaning=(
            "What it asks does not answer. For `nvml` a driver call hangs, which most often precedes or follows a lost "
            "GPU; for `space` a file server does not answer. The agent itself goes on."
        ),
        confirm=(
            "`steadyctl check NODE`.",
            "On the node: `timeout 10 nvidia-smi`; `ps -eo pid,stat,wchan:30,comm | grep ' D'`; "
            "`dmesg | steadyctl read-kernel-log -`.",
        ),
        act=(
            "For `nvml`: leave out the node and reboot it when `nvidia-smi` hangs too.",
            "For `space`: look at the file server.",
        ),
    ),
    Alert(
        name="NodeUnhealthy",
        group=_GROUP,
        severity=Severity.WARNING,
        hold_s=300,
        expr="steadyrun_collector_healthy == 0",
        summary="A collector finds its part of the node degraded.",
        description="Collector {{ $labels.collector }} at {{ $labels.instance }} finds something wrong.",
        meaning=(
            "One of the checks that also guard the start of a job has a complaint: little memory or disk space, a "
            "throttled GPU, a link that is down, an error in the kernel log. More specific alerts may fire beside it."
        ),
        confirm=("`steadyctl check NODE` prints every complaint with what to do about it.",),
        act=("Do what it says, or leave the node out of the next job.",),
    ),
)
