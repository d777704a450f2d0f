"""Alerts about hangs, restarts and goodput of a job, and the series that are computed from its metrics."""

from __future__ import annotations

from typing import Final

from steadyrun.collectors.alerts.records import Alert, Recording, Severity

__all__ = ["JOB_ALERTS", "RECORDINGS"]

_HANG: Final = "hang"
_RESTART: Final = "restart"
_GOODPUT: Final = "goodput"


def _goodput(window: str) -> str:
    return (
        "clamp_max("
        f'sum by (run_id) (rate(steadyrun_time_seconds_total{{phase="productive"}}[{window}])) '
        f"/ sum by (run_id) (rate(steadyrun_job_wall_seconds_total[{window}])), 1)"
    )


RECORDINGS: Final[tuple[Recording, ...]] = (
    Recording("run:steadyrun_step:max", "max by (run_id) (steadyrun_rank_step)", "The step that the job is at"),
    Recording(
        "run:steadyrun_step_time_seconds:median",
        "quantile by (run_id) (0.5, steadyrun_rank_step_time_seconds)",
        "Median over the ranks of their step times",
    ),
    Recording("run:steadyrun_goodput:ratio_rate1h", _goodput("1h"), "Productive share of the last hour"),
    Recording("run:steadyrun_goodput:ratio_rate6h", _goodput("6h"), "Productive share of the last six hours"),
    Recording(
        "run:steadyrun_restarts:increase1d",
        "sum by (run_id) (increase(steadyrun_restarts_total[1d]))",
        "Restarts of the last day",
    ),
)

_IS_OLD: Final = "on (run_id) (time() - max by (run_id) (steadyrun_job_start_timestamp_seconds) > 3600)"

_NAMED: Final = "max by (run_id, rank) (steadyrun_rank_hung_last_timestamp_seconds)"

_HANG_ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        name="RankHung",
        group=_HANG,
        severity=Severity.CRITICAL,
        expr=(
            f"(time() - {_NAMED} < 300) or ("
            f"{_NAMED} >= on (run_id) group_left () max by (run_id) (steadyrun_last_incident_timestamp_seconds) "
            "and on (run_id) max by (run_id) (steadyrun_rank_hung) == 1)"
        ),
        summary="A rank hangs.",
        description="Rank {{ $labels.rank }} of run {{ $labels.run_id }} hangs, says the verdict.",
        meaning=(
            "The rank made no progress beyond its limit and a second signal agreed: its stack does not move, or it "
            "waits in a collective that others have not entered. In mode `act` the agent gathers evidence and "
            "restarts the job; the alert stays for five minutes so that nobody misses it. In mode `observe` nothing "
            "is done, and the alert stays as long as the hang."
        ),
        confirm=(
            "`steadyctl incidents RUN` and `steadyctl show last --run RUN`: who, where in the program, since when.",
            "`steadyctl postmortem RUN --html report.html` draws the chain of waits.",
        ),
        act=(
            "If the verdict names a rank, a GPU or a node, treat that; ranks that only wait are victims.",
            "If it names the program (a skipped or mismatched collective), give the report to its author: it will "
            "come again.",
            "In mode `observe`, end the job or restart it yourself.",
        ),
    ),
    Alert(
        name="RankSilent",
        group=_HANG,
        severity=Severity.WARNING,
        hold_s=60,
        expr=(
            "(time() - steadyrun_rank_progress_timestamp_seconds > 600) "
            "and on (run_id, instance, rank) steadyrun_rank_alive == 1"
        ),
        summary="A live rank has given no sign of progress for ten minutes and the agent has not acted.",
        description=(
            "Rank {{ $labels.rank }} of run {{ $labels.run_id }} at {{ $labels.instance }} has been silent for "
            "{{ $value | humanizeDuration }}."
        ),
        meaning=(
            "No step, section or beat for ten minutes. Either something takes that long by right (compilation, a "
            "long evaluation, loading data), or the limit is too high for this job to be caught by it."
        ),
        confirm=("`steadyctl status RUN`: in which section, with which limit.", "`steadyctl top RUN`: does it work?"),
        act=(
            "If it works by right, mark the phase as a section of its own, so that it gets a limit of its own.",
            "If not, lower the limit: `steadyctl calibrate-timeouts RUN` proposes one.",
        ),
    ),
    Alert(
        name="SectionNearLimit",
        group=_HANG,
        severity=Severity.WARNING,
        expr=(
            "(time() - steadyrun_rank_section_opened_timestamp_seconds) / on (run_id, instance, section) group_left () "
            'steadyrun_section_limit_seconds{stage="hard"} > 0.8'
        ),
        summary="A section is close to its limit.",
        description=(
            "Section {{ $labels.section }} of rank {{ $labels.rank }} in run {{ $labels.run_id }} has used "
            "{{ $value | humanizePercentage }} of its limit."
        ),
        meaning="The rank will be taken for hung when the limit passes, unless it moves before that.",
        confirm=("`steadyctl status RUN`.",),
        act=(
            "If sections end close to their limit often, the limit is too tight: `steadyctl calibrate-timeouts RUN`.",
        ),
    ),
    Alert(
        name="NoProgress",
        group=_HANG,
        severity=Severity.CRITICAL,
        expr=(
            "(changes(run:steadyrun_step:max[10m]) == 0) "
            "and on (run_id) (run:steadyrun_step:max offset 10m) "
            'and on (run_id) max by (run_id) (steadyrun_job_state{state="running"}) == 1'
        ),
        summary="A running job has made no step for ten minutes.",
        description="Run {{ $labels.run_id }} has been at the same step for ten minutes, and nothing has acted.",
        meaning=(
            "All ranks stand still and no limit has passed: limits are off, not calibrated yet, or longer than ten "
            "minutes. A long evaluation or checkpoint looks the same."
        ),
        confirm=("`steadyctl status RUN`: what every rank is in.", "`steadyctl top RUN`."),
        act=(
            "If it hangs, `steadyctl postmortem RUN` says who; then end or restart the job.",
            "Set limits, or let `steadyctl calibrate-timeouts RUN` make them.",
        ),
    ),
    Alert(
        name="HangsRepeated",
        group=_HANG,
        severity=Severity.WARNING,
        expr=(
            "sum by (run_id) (increase(steadyrun_incidents_total{"
            'class=~".*_stall|.*_collective|stopped_process|deadlock_cycle|p2p_unmatched|input_pipeline|in_flight_network"'
            "}[6h])) > 2.5"
        ),
        summary="Hangs keep coming back.",
        description='{{ $value | printf "%.0f" }} hangs of run {{ $labels.run_id }} in 6 hours.',
        meaning="Restarting does not remove the cause.",
        confirm=(
            "`steadyctl incidents RUN`: the same rank, node or line each time?",
            "`steadyctl status RUN` lists the nodes that faults were blamed on.",
        ),
        act=("Same node: leave it out. Same line of the program: fix that. Neither: look at the network.",),
    ),
    Alert(
        name="DumpMissing",
        group=_HANG,
        severity=Severity.WARNING,
        expr='sum by (run_id, instance, type) (increase(steadyrun_dumps_total{result="missing"}[15m])) > 0',
        summary="Evidence that a post-mortem needs did not come.",
        description="{{ $labels.type }} of a rank at {{ $labels.instance }} of run {{ $labels.run_id }} is missing.",
        meaning=(
            "A rank gave no stacks or no flight record for an incident: it was dead or stopped, it does not use "
            "torch.distributed, or its recorder is off. Verdicts get less certain without."
        ),
        confirm=("`steadyctl show last --run RUN` lists what is missing and why.",),
        act=("Leave the flight recorder on (`--ft-flight-recorder`), and the run folder writable.",),
    ),
    Alert(
        name="LimitLoose",
        group=_HANG,
        severity=Severity.INFO,
        hold_s=3600,
        expr=(
            'steadyrun_section_limit_seconds{stage="hard"} / on (run_id, section) group_left () '
            "max by (run_id, section) (steadyrun_section_limit_proposed_seconds) > 5"
        ),
        summary="A limit is far above what calibration proposes.",
        description=(
            "The limit of section {{ $labels.section }} in run {{ $labels.run_id }} is {{ $value | humanize }} times "
            "the proposal."
        ),
        meaning="Hangs in this section are found much later than they could be.",
        confirm=("`steadyctl calibrate-timeouts RUN --dry-run`.",),
        act=("Use the proposed limits, or let the job calibrate them itself.",),
    ),
    Alert(
        name="LimitTight",
        group=_HANG,
        severity=Severity.INFO,
        expr=('sum by (run_id, section) (increase(steadyrun_section_limits_passed_total{stage="spared"}[1h])) > 9.5'),
        summary="A soft limit passes often without a hang.",
        description=(
            'The limit of section {{ $labels.section }} in {{ $labels.run_id }} passed {{ $value | printf "%.0f" }} '
            "times in an hour, and each time the ranks turned out to work."
        ),
        meaning="Each look costs a little, and tells that durations have grown since limits were made.",
        confirm=("`steadyctl calibrate-timeouts RUN --dry-run`.", "`steadyctl stragglers RUN`: is somebody slow?"),
        act=("Mark what takes long as a section of its own, or calibrate anew.",),
    ),
)

_RESTART_ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        name="Incident",
        group=_RESTART,
        severity=Severity.INFO,
        expr="sum by (run_id, class) (increase(steadyrun_incidents_total[10m])) > 0",
        summary="An incident was found and judged.",
        description="Run {{ $labels.run_id }} had an incident of class {{ $labels.class }}.",
        meaning="Something went wrong, evidence was gathered, and a verdict was written.",
        confirm=("`steadyctl show last --run RUN`.",),
        act=("Nothing, when the job goes on; the verdict says whose fault it was.",),
    ),
    Alert(
        name="Restarted",
        group=_RESTART,
        severity=Severity.INFO,
        expr="sum by (run_id, trigger) (increase(steadyrun_restarts_total[10m])) > 0",
        summary="The job was restarted.",
        description="Run {{ $labels.run_id }} was restarted; trigger: {{ $labels.trigger }}.",
        meaning="The agents ended an attempt and began the next one.",
        confirm=("`steadyctl incidents RUN`.",),
        act=("Nothing, when it trains again: look at the Job dashboard.",),
    ),
    Alert(
        name="RestartLoop",
        group=_RESTART,
        severity=Severity.CRITICAL,
        expr="sum by (run_id) (increase(steadyrun_restarts_total[30m])) > 2.5",
        summary="The job restarts again and again.",
        description='Run {{ $labels.run_id }} restarted {{ $value | printf "%.0f" }} times in 30 minutes.',
        meaning="Whatever ends it is still there: the program, the data, a checkpoint, or a node that is not left out.",
        confirm=("`steadyctl incidents RUN`: the same class, rank and line?",),
        act=(
            "Same exception at the same step: the program or its data; `steadyctl ckpt rollback` can skip batches.",
            "Same node: leave it out.",
        ),
    ),
    Alert(
        name="RestartBudgetLow",
        group=_RESTART,
        severity=Severity.WARNING,
        expr="(steadyrun_restarts_remaining <= 1) and on (run_id) sum by (run_id) (steadyrun_restarts_total) > 0",
        summary="The restart budget is nearly used up.",
        description="Run {{ $labels.run_id }} has {{ $value }} restarts left.",
        meaning="When it is used up, the next fault ends the job.",
        confirm=("`steadyctl incidents RUN`.",),
        act=("Remove the cause, or start the job with a larger `--max-restarts`.",),
    ),
    Alert(
        name="RecoveryStuck",
        group=_RESTART,
        severity=Severity.CRITICAL,
        hold_s=900,
        expr=('sum by (run_id) (steadyrun_job_state{state=~"joining|starting|gathering|stopping|cooling"}) > 0'),
        summary="A job has not been running for a quarter of an hour.",
        description="Run {{ $labels.run_id }} does not start, or does not come back.",
        meaning=(
            "Rendezvous waits for a node that does not come, ranks do not get to their first report, or a process "
            "cannot be killed."
        ),
        confirm=("`steadyctl status RUN` names the phase and the ranks.", "`steadyctl check NODE` on each node."),
        act=(
            "Missing node: bring it back, or allow fewer nodes (`--nnodes MIN:MAX`).",
            "Process in state D: only a reboot of that node helps.",
        ),
    ),
    Alert(
        name="WorldShrunk",
        group=_RESTART,
        severity=Severity.WARNING,
        hold_s=600,
        expr="steadyrun_job_world_size < on (run_id) max by (run_id) (max_over_time(steadyrun_job_world_size[1d]))",
        summary="The job runs with fewer ranks than before.",
        description="Run {{ $labels.run_id }} is down to {{ $value }} ranks.",
        meaning="A node left or was left out, and no spare took its place.",
        confirm=("`steadyctl status RUN` lists the nodes that faults were blamed on.",),
        act=("Bring the node back when it is repaired; it is taken in at the next restart.",),
    ),
    Alert(
        name="NodeLeftOut",
        group=_RESTART,
        severity=Severity.WARNING,
        expr="max by (run_id) (steadyrun_job_nodes_excluded) > 0",
        summary="A node was left out as faults were blamed on it.",
        description="Run {{ $labels.run_id }} has left out {{ $value }} of its nodes.",
        meaning="Verdicts named the node as the cause, and the job goes on without it.",
        confirm=("`steadyctl status RUN`: which node, and for which incidents.",),
        act=("Have the node inspected before it gets the next job.",),
    ),
)

_GOODPUT_ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        name="GoodputLow",
        group=_GOODPUT,
        severity=Severity.WARNING,
        hold_s=3600,
        expr=f"run:steadyrun_goodput:ratio_rate6h < 0.85 and {_IS_OLD}",
        summary="Less than 85 % of the last six hours was productive.",
        description="Goodput of run {{ $labels.run_id }} is {{ $value | humanizePercentage }}.",
        meaning="More than a seventh of the time goes into restarts, lost work, saving, waiting for data or hangs.",
        confirm=("The panel *Where the time goes* of the Job dashboard, or `steadyrun_time_seconds_total` by phase.",),
        act=(
            "Saving: `steadyctl ckpt interval`. Rework: save more often. Recovery: look at start-up. Data: more "
            "loader workers or a faster source.",
        ),
    ),
    Alert(
        name="GoodputCollapsed",
        group=_GOODPUT,
        severity=Severity.CRITICAL,
        hold_s=900,
        expr=f"run:steadyrun_goodput:ratio_rate1h < 0.5 and {_IS_OLD}",
        summary="Less than half of the last hour was productive.",
        description="Goodput of run {{ $labels.run_id }} is {{ $value | humanizePercentage }}.",
        meaning="The job burns its machines without getting on.",
        confirm=("`steadyctl status RUN` and `steadyctl incidents RUN`.",),
        act=("Find what takes the time as for GoodputLow; consider to stop the job until it is repaired.",),
    ),
)

JOB_ALERTS: Final[tuple[Alert, ...]] = (*_HANG_ALERTS, *_RESTART_ALERTS, *_GOODPUT_ALERTS)
