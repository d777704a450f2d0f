"""Writes the Grafana dashboards: ``python dashboards/tools/build.py [FOLDER]`` makes job.json and node.json.

Needs grafana-foundation-sdk, pinned (see GRAFANA_SDK): its types are those of Grafana 11.5, and what they describe
imports into 10.4 and newer. The files are checked in; a test compares them with what this makes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, units
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

GRAFANA_SDK: Final = "grafana-foundation-sdk==1769699452!11.5.0"
WIDTH: Final = 24

_SOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_RUN: Final = 'job=~"$job",run_id=~"$run_id"'
_NODE: Final = f'{_RUN},instance=~"$instance"'

# Phases of time look the same on every screen: work is green, what is lost is red.
_PHASES: Final[Mapping[str, str]] = {
    "productive": "green", "evaluation": "semi-dark-green", "data_loading": "yellow", "checkpoint_save": "blue",
    "checkpoint_restore": "light-blue", "initialization": "purple", "startup": "light-purple", "rework": "orange",
    "hang": "red", "recovery": "dark-orange", "other": "text",
}  # fmt: skip

Steps = Sequence[tuple[float | None, str]]
_GREEN: Final[Steps] = ((None, "green"),)
_BAD_FROM_1: Final[Steps] = ((None, "green"), (1, "red"))
_OK_OR_BAD: Final[Mapping[str, tuple[str, str]]] = {"0": ("no", "red"), "1": ("yes", "green")}
_BAD_OR_OK: Final[Mapping[str, tuple[str, str]]] = {"0": ("no", "green"), "1": ("yes", "red")}


# -- parts -------------------------------------------------------------------------------------------------------------
def query(expr: str, legend: str = "", instant: bool = False, form: PromQueryFormat | None = None) -> Any:
    """One query; ``RUN`` and ``NODE`` in braces stand for the matchers of the variables."""
    full = expr.replace("{RUN", "{" + _RUN).replace("{NODE", "{" + _NODE)
    built = prometheus.Dataquery().expr(full).datasource(_SOURCE)
    if legend:
        built = built.legend_format(legend)
    if instant:
        built = built.instant()
    return built.format(form) if form is not None else built


def newest(expr: str, by: str) -> str:
    """One series of each: labels of a target come and go (an agent has its ``node_rank`` from the rendezvous on)."""
    return f"max by ({by}) ({expr})"


def events(total: str, by: str, legend: str) -> Any:
    """What has happened, as whole numbers; only series in which something has, and one at 0 where nothing has."""
    last = by.rpartition(" ")[2]
    grown = f"increase({total}[$__rate_interval])"
    nothing = f'label_replace(0 * sum({grown}), "{last}", "nothing", "", "")'
    return query(f"(round(sum by ({by}) ({grown})) > 0) or on () {nothing}", legend)


def _with_queries(panel: Any, queries: Iterable[Any]) -> Any:
    for i, one in enumerate(queries):
        panel = panel.with_target(one.ref_id(chr(ord("A") + i)))
    return panel


def _thresholds(steps: Steps) -> Any:
    marks = [models.Threshold(value=value, color=color) for value, color in steps]
    return dashboards.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(marks)


def _mappings(words: Mapping[str, tuple[str, str]]) -> list[Any]:
    options = {
        value: models.ValueMappingResult(text=text, color=color, index=i)
        for i, (value, (text, color)) in enumerate(words.items())
    }
    return [models.ValueMap(options=options)]


def number(title: str, description: str, unit: str, expr: Any, steps: Steps = _GREEN, **more: Any) -> Any:
    """A single value; *more*: ``words`` for values, ``decimals``, ``none`` (text without data)."""
    panel = stat.Panel().title(title).description(description).unit(unit).datasource(_SOURCE).span(3).height(4)
    panel = panel.thresholds(_thresholds(steps)).graph_mode(common.BigValueGraphMode.NONE)
    panel = panel.reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    if "words" in more:
        panel = panel.mappings(_mappings(more["words"]))
    if "decimals" in more:
        panel = panel.decimals(more["decimals"])
    return _with_queries(panel, [expr])


def lines(title: str, description: str, unit: str, *queries: Any, **more: Any) -> Any:
    """Values over time; *more*: ``width``, ``low``, ``high``, ``stacked``, ``colors`` by series."""
    panel = timeseries.Panel().title(title).description(description).unit(unit).datasource(_SOURCE)
    panel = panel.span(more.get("width", 12)).height(8).line_width(1)
    panel = panel.legend(common_builders.VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM))
    panel = panel.tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    if "low" in more:
        panel = panel.min(more["low"])
    if "high" in more:
        panel = panel.max(more["high"])
    if more.get("stacked"):
        panel = panel.stacking(common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
        panel = panel.fill_opacity(60)
    for name, color in more.get("colors", {}).items():
        fixed = models.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": color})
        panel = panel.override_by_name(name, [fixed])
    return _with_queries(panel, queries)


def states(title: str, description: str, words: Mapping[str, tuple[str, str]], *queries: Any, **more: Any) -> Any:
    """A row per series, coloured by its value."""
    panel = statetimeline.Panel().title(title).description(description).unit("none").datasource(_SOURCE)
    panel = panel.span(more.get("width", 12)).height(more.get("height", 8)).mappings(_mappings(words))
    panel = panel.show_value(common.VisibilityMode.NEVER).merge_values(True)
    return _with_queries(panel, queries)


def rows_of(title: str, description: str, columns: Mapping[str, Any], hide: Iterable[str], **more: Any) -> Any:
    """A table: one instant query a column, joined by the labels they share. *hide*: labels that are not shown."""
    panel = table.Panel().title(title).description(description).unit("none").datasource(_SOURCE)
    panel = panel.span(more.get("width", WIDTH)).height(more.get("height", 9)).filterable(True)
    names = {f"Value #{chr(ord('A') + i)}": name for i, name in enumerate(columns)}
    panel = panel.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    shown = {"excludeByName": dict.fromkeys(["Time", "__name__", *hide], True), "renameByName": names}
    panel = panel.with_transformation(models.DataTransformerConfig(id_val="organize", options=shown))
    for name, unit in more.get("units", {}).items():
        panel = panel.override_by_name(name, [models.DynamicConfigValue(id_val="unit", value=unit)])
    return _with_queries(panel, columns.values())


def heat(title: str, description: str, unit: str, expr: Any) -> Any:
    """Counts of a histogram's buckets over time."""
    panel = heatmap.Panel().title(title).description(description).unit(unit).datasource(_SOURCE).span(12).height(8)
    return _with_queries(panel.calculate(False), [expr])


def column(expr: str) -> Any:
    """A query for a column of a table."""
    return query(expr, instant=True, form=PromQueryFormat.TABLE)


def _variable(name: str, label: str, values: str, several: bool) -> Any:
    built = dashboards.QueryVariable(name).label(label).datasource(_SOURCE).query({"query": values, "refId": name})
    built = built.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    built = built.sort(models.VariableSort.ALPHABETICAL_DESC if not several else models.VariableSort.ALPHABETICAL_ASC)
    return built.multi(True).include_all(True).all_value(".*") if several else built


def _mark(name: str, color: str, expr: str) -> Any:
    built = dashboards.AnnotationQuery().name(name).datasource(_SOURCE).enable(True).icon_color(color)
    return built.expr(expr.replace("{RUN", "{" + _RUN))


def _dashboard(uid: str, title: str, description: str) -> Any:
    built = dashboards.Dashboard(title).uid(uid).description(description).tags(["steadyrun"]).refresh("30s")
    built = built.time("now-3h", "now").timezone("browser").tooltip(models.DashboardCursorSync.CROSSHAIR).editable()
    built = built.with_variable(dashboards.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    built = built.with_variable(_variable("job", "Scrape job", "label_values(steadyrun_build_info, job)", several=True))
    runs = 'label_values(steadyrun_build_info{job=~"$job"}, run_id)'
    built = built.with_variable(_variable("run_id", "Run", runs, several=False))
    incidents = "sum(changes(steadyrun_last_incident_timestamp_seconds{RUN}[$__rate_interval])) > 0"
    restarts = "sum(changes(steadyrun_last_restart_timestamp_seconds{RUN}[$__rate_interval])) > 0"
    marks = (_mark("Incidents", "red", incidents), _mark("Restarts", "blue", restarts))
    return built.annotations(list(marks))


def _filled(dashboard: Any, rows: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    for title, panels in rows.items():
        dashboard = dashboard.with_row(dashboards.Row(title))
        for panel in panels:
            dashboard = dashboard.with_panel(panel)
    made: dict[str, Any] = json.loads(JSONEncoder(sort_keys=True).encode(dashboard.build()))
    return made


# -- the job -----------------------------------------------------------------------------------------------------------
def job() -> dict[str, Any]:
    """How a job does: progress, where its time goes, hangs, restarts, slow ranks, checkpoints."""
    share = "clamp_max(sum({what}) / sum(increase(steadyrun_job_wall_seconds_total{RUN}[{window}])), 1)"
    productive = 'increase(steadyrun_time_seconds_total{RUN,phase="productive"}[{window}])'
    goodput = share.replace("{what}", productive)
    now = (
        number(
            "Goodput", "Productive share of the wall time in the time range.", "percentunit",
            query(goodput.replace("{window}", "$__range")), ((None, "red"), (0.5, "orange"), (0.85, "green")),
            decimals=1,
        ),
        number("Step", "The step that the job is at.", "none", query("max(steadyrun_rank_step{RUN})")),
        number(
            "Ranks alive", "Ranks whose process lives.", "none", query("sum(steadyrun_rank_alive{RUN})"),
        ),
        number(
            "Hung ranks", "Ranks beyond their limit: hung, or waiting for one that is.", "none",
            query("sum(steadyrun_rank_hung{RUN})"),
            _BAD_FROM_1,
        ),
        number(
            "Slow ranks", "Ranks that a straggler alarm names now.", "none",
            query('sum(steadyrun_straggler_alarms{RUN,kind=~"rank|node"})'), ((None, "green"), (1, "orange")),
        ),
        number(
            "Work at risk", "Time since the newest durable checkpoint was taken: what a failure would cost now.", "s",
            query("time() - max(steadyrun_checkpoint_last_durable_timestamp_seconds{RUN})"),
            ((None, "green"), (1800, "orange"), (7200, "red")),
        ),
        number(
            "Restarts", "Restarts in the time range.", "none",
            query("round(sum(increase(steadyrun_restarts_total{RUN}[$__range])))"),
            ((None, "green"), (1, "orange"), (3, "red")),
        ),
        number(
            "Since the last incident", "Time since the newest incident; the age of the job when there was none.", "s",
            query(
                "time() - max(steadyrun_last_incident_timestamp_seconds{RUN} > 0 "
                "or steadyrun_job_start_timestamp_seconds{RUN})"
            ),
        ),
    )  # fmt: skip
    progress = (
        lines(
            "Step time by rank", "Median time of the newest steps of each rank.", "s",
            query("steadyrun_rank_step_time_seconds{RUN}", "rank {{rank}}"), low=0,
        ),
        lines(
            "Own work by rank", "Median own work in the newest steps, without waiting for others.",
            "s", query("steadyrun_rank_own_work_seconds{RUN}", "rank {{rank}}"), low=0,
        ),
        lines(
            "Silence by rank", "Time since the last sign of progress of each rank that lives.", "s",
            query(
                "(time() - steadyrun_rank_progress_timestamp_seconds{RUN}) "
                "* on (job, instance, run_id, rank) steadyrun_rank_alive{RUN}", "rank {{rank}}",
            ), low=0,
        ),
        heat(
            "Duration of steps", "How many steps took how long, over all ranks.", "s",
            query(
                "sum by (le) (increase("
                'steadyrun_section_duration_seconds_bucket{RUN,section="step"}[$__rate_interval]))',
                "{{le}}", form=PromQueryFormat.HEATMAP,
            ),
        ),
    )  # fmt: skip
    time = (
        lines(
            "Where the time goes", "Share of the wall time by phase; what lacks to 100 % is not certain yet.",
            "percentunit",
            query(
                "sum by (phase) (rate(steadyrun_time_seconds_total{RUN}[$__rate_interval])) / on () group_left () "
                "sum(rate(steadyrun_job_wall_seconds_total{RUN}[$__rate_interval]))", "{{phase}}",
            ), low=0, high=1, stacked=True, colors=_PHASES,
        ),
        lines(
            "Goodput", "Productive share of the wall time: lately, and since the job began.", "percentunit",
            query(goodput.replace("{window}", "$__rate_interval"), "lately"),
            query("max(steadyrun_goodput_ratio{RUN})", "since the job began"), low=0, high=1,
        ),
    )  # fmt: skip
    trouble = (
        states(
            "Hung ranks", "Red while the rank is beyond its limit: it hangs, or waits for one that does.", _BAD_OR_OK,
            query("max by (rank) (steadyrun_rank_hung{RUN})", "rank {{rank}}"),
        ),
        states(
            "State of the job", "Green while the job is in the state.",
            {"0": (" ", "transparent"), "1": ("now", "green")},
            query("max by (state) (steadyrun_job_state{RUN})", "{{state}}"),
        ),
        lines(
            "Incidents", "Incidents by the class of their first finding.", "none",
            events("steadyrun_incidents_total{RUN}", "class", "{{class}}"), low=0,
        ),
        lines(
            "Ends of ranks and restarts", "Ends of ranks by reason, and restarts by what made them necessary.", "none",
            events("steadyrun_rank_exits_total{RUN}", "reason", "exit: {{reason}}"),
            events("steadyrun_restarts_total{RUN}", "trigger", "restart: {{trigger}}"), low=0,
        ),
        lines(
            "Detection and restart", "The newest time to find a hang, and the newest restart by phase.", "s",
            query("max(steadyrun_hang_last_detection_seconds{RUN})", "found after"),
            query("max by (phase) (steadyrun_restart_last_duration_seconds{RUN})", "restart: {{phase}}"), low=0,
        ),
        lines(
            "Limits of sections", "Limits in force, and what calibration would set.", "s",
            query("max by (section, stage) (steadyrun_section_limit_seconds{RUN})", "{{section}} {{stage}}"),
            query("max by (section) (steadyrun_section_limit_proposed_seconds{RUN})", "{{section}} proposed"), low=0,
        ),
    )  # fmt: skip
    slow = (
        lines(
            "Straggler alarms", "Alarms that stand, by what is slow.", "none",
            query("sum by (kind) (steadyrun_straggler_alarms{RUN})", "{{kind}}"), low=0,
        ),
        lines(
            "Slowdown of flagged ranks", "By how much own work takes longer than that of peers; only flagged ranks.",
            "percentunit",
            query(
                "steadyrun_straggler_slowdown_ratio{RUN} or on () (0 * sum(steadyrun_straggler_alarms{RUN}))",
                "rank {{rank}}",
            ), low=0,
        ),
        lines(
            "Time lost to slow ranks", "Share of the wall time.", "percentunit",
            query("sum(rate(steadyrun_straggler_lost_seconds_total{RUN}[$__rate_interval]))", "lost"), low=0,
            width=8,
        ),
        lines(
            "Comparisons of replicas", "Checks for silent corruption by outcome.", "none",
            query("sum by (result) (increase(steadyrun_sdc_checks_total{RUN}[$__rate_interval]))", "{{result}}"), low=0,
            width=8,
        ),
        lines(
            "Losses out of line", "Values far above what was usual, or not finite, and times that losses stayed so.",
            "none",
            query("sum by (what) (increase(steadyrun_loss_out_of_line_total{RUN}[$__rate_interval]))", "{{what}}"),
            query("sum(increase(steadyrun_loss_spikes_total{RUN}[$__rate_interval]))", "spikes"), low=0, width=8,
        ),
    )  # fmt: skip
    checkpoints = (
        lines(
            "Saving", "The newest times: training blocked, until durable, and to load.", "s",
            query("max(steadyrun_checkpoint_last_stall_seconds{RUN})", "training blocked"),
            query("max(steadyrun_checkpoint_last_persist_seconds{RUN})", "until durable"),
            query("max(steadyrun_checkpoint_last_restore_seconds{RUN})", "to load"), low=0,
        ),
        lines(
            "Age of the newest durable checkpoint", "Against the interval in force.", "s",
            query("time() - max(steadyrun_checkpoint_last_durable_timestamp_seconds{RUN})", "age"),
            query("max(steadyrun_checkpoint_interval_seconds{RUN})", "interval"), low=0,
        ),
        lines(
            "Saves", "Saves by outcome, and those not yet durable.", "none",
            query("sum by (result) (increase(steadyrun_checkpoint_saves_total{RUN}[$__rate_interval]))", "{{result}}"),
            query("max(steadyrun_checkpoint_in_flight{RUN})", "in flight"), low=0,
        ),
        lines(
            "Written", "Bytes of checkpoints that became durable.", "Bps",
            query("sum(rate(steadyrun_checkpoint_written_bytes_total{RUN}[$__rate_interval]))", "written"), low=0,
        ),
    )  # fmt: skip
    rows = {
        "Now": now,
        "Progress": progress,
        "Time": time,
        "Hangs and restarts": trouble,
        "Slow and wrong": slow,
        "Checkpoints": checkpoints,
    }
    about = "A training job under steadyrun: progress, goodput, hangs, restarts, slow ranks and checkpoints."
    return _filled(_dashboard("steadyrun-job", "Steadyrun / Job", about), rows)


# -- nodes and GPUs ----------------------------------------------------------------------------------------------------
def node() -> dict[str, Any]:
    """How the machines do: agents, hosts, GPUs, network."""
    every = "{{instance}}"
    gpu = "{{instance}} gpu {{gpu}}"
    now = (
        number("Agents", "Agents that answer.", "none", query('sum(up{NODE})')),
        number(
            "Collectors that fail", "Collectors that could not look at their part.", "none",
            query("count(steadyrun_collector_up{NODE} == 0) or on () (0 * count(steadyrun_collector_up{NODE}))"),
            _BAD_FROM_1,
        ),
        number(
            "Complaints", "Collectors that found their part degraded or unhealthy.", "none",
            query("count(steadyrun_collector_healthy{NODE} == 0) or on () (0 * count(steadyrun_collector_up{NODE}))"),
            ((None, "green"), (1, "orange")),
        ),
        number(
            "OOM kills", "Processes that the kernel ended for want of memory, in the time range.", "none",
            query("round(sum(increase(steadyrun_host_oom_kills_total{NODE}[$__range])))"), _BAD_FROM_1,
        ),
        number(
            "GPUs that answer", "GPUs whose driver answers.", "none", query("sum(steadyrun_gpu_up{NODE})"),
        ),
        number(
            "Xids", "Xid events in the time range, without those of the application.", "none",
            query('round(sum(increase(steadyrun_gpu_xid_errors_total{NODE,class!="app"}[$__range])))'), _BAD_FROM_1,
        ),
        number(
            "Hottest GPU", "The highest temperature.", units.Celsius,
            query('max(steadyrun_gpu_temperature_celsius{NODE,sensor="gpu"})'),
            ((None, "green"), (83, "orange"), (90, "red")),
        ),
        number("Power", "Power draw of all GPUs.", units.Watt, query("sum(steadyrun_gpu_power_watts{NODE})")),
    )  # fmt: skip
    hosts = (
        states(
            "Health by collector", "Red where a collector found its part degraded or unhealthy.", _OK_OR_BAD,
            query("min by (instance, collector) (steadyrun_collector_healthy{NODE})", "{{instance}} {{collector}}"),
        ),
        lines(
            "Kernel events", "Events in the kernel log that are trouble, by kind.", "none",
            events("steadyrun_host_kernel_events_total{NODE}", "instance, event", "{{instance}} {{event}}"), low=0,
        ),
        lines(
            "Memory of ranks", "Resident memory of each rank with its children.", "bytes",
            query(newest("steadyrun_rank_resident_memory_bytes{NODE}", "rank"), "rank {{rank}}"), low=0,
        ),
        lines(
            "CPU of ranks", "Cores that each rank uses with its children.", "none",
            query(newest("rate(steadyrun_rank_cpu_seconds_total{NODE}[$__rate_interval])", "rank"), "rank {{rank}}"),
            low=0,
        ),
        lines(
            "Memory and space left", "Available memory of the host, and space in the folders that the job writes to.",
            "bytes", query(newest("steadyrun_host_memory_available_bytes{NODE}", "instance"), "{{instance}} memory"),
            query(newest("steadyrun_host_space_available_bytes{NODE}", "instance, folder"), "{{instance}} {{folder}}"),
            low=0,
        ),
        lines(
            "Agent", "How late the agent's loop was, and what of a core the agent takes.", "none",
            query(newest("steadyrun_agent_loop_lag_seconds{NODE}", "instance"), "{{instance}} late (s)"),
            query(
                newest("rate(steadyrun_agent_cpu_seconds_total{NODE}[$__rate_interval])", "instance"),
                "{{instance}} cores",
            ), low=0,
        ),
    )  # fmt: skip
    join = "* on (job, instance, run_id, gpu) group_left (uuid, name, pci_bus_id) steadyrun_gpu_info{NODE}"
    in_use = "steadyrun_gpu_memory_used_bytes{NODE}"
    gpus = (
        rows_of(
            "GPUs", "State of every GPU.",
            {
                "answers": column(f"steadyrun_gpu_up{{NODE}} {join}"),
                "recovery action": column(f"steadyrun_gpu_recovery_action{{NODE}} {join}"),
                "uncorrected errors": column(
                    f'sum by (job, instance, run_id, node_rank, gpu) (increase(steadyrun_gpu_ecc_errors_total{{NODE,'
                    f'error="uncorrected"}}[$__range])) {join}'
                ),
                "remap pending": column(f"steadyrun_gpu_row_remap_pending{{NODE}} {join}"),
                "NVLinks": column(f"steadyrun_gpu_nvlink_active_links{{NODE}} {join}"),
                "PCIe lanes": column(f"steadyrun_gpu_pcie_link_width{{NODE}} {join}"),
            },
            ("job", "run_id", "node_rank"),
        ),
        lines(
            "Temperature", "Of the GPU and of its memory.", units.Celsius,
            query(newest("steadyrun_gpu_temperature_celsius{NODE}", "instance, gpu, sensor"), f"{gpu} {{{{sensor}}}}"),
        ),
        lines(
            "Clock", "Of the multiprocessors.", units.Hertz,
            query(newest("steadyrun_gpu_sm_clock_hertz{NODE}", "instance, gpu"), gpu), low=0,
        ),
        lines(
            "Power", "Power draw.", units.Watt,
            query(newest("steadyrun_gpu_power_watts{NODE}", "instance, gpu"), gpu), low=0,
        ),
        lines(
            "Utilization", "Share of time in which a kernel ran. It stays at 100 % in a hang of a collective.",
            "percentunit", query(newest("steadyrun_gpu_utilization_ratio{NODE}", "instance, gpu"), gpu), low=0, high=1,
        ),
        lines(
            "Memory", "Share in use.", "percentunit",
            query(newest(f"{in_use} / steadyrun_gpu_memory_total_bytes{{NODE}}", "instance, gpu"), gpu), low=0, high=1,
        ),
        lines(
            "Held back", "Share of time in which heat or power held the clock down.", "percentunit",
            query(
                "sum by (instance, gpu, reason) (rate(steadyrun_gpu_throttled_seconds_total{NODE}[$__rate_interval]))",
                f"{gpu} {{{{reason}}}}",
            ), low=0,
        ),
        lines(
            "Xid events", "By what they ask for.", "none",
            events("steadyrun_gpu_xid_errors_total{NODE}", "instance, gpu, class", f"{gpu} {{{{class}}}}"), low=0,
        ),
        lines(
            "Memory errors", "Corrected and uncorrected ECC errors.", "none",
            events("steadyrun_gpu_ecc_errors_total{NODE}", "instance, gpu, error", f"{gpu} {{{{error}}}}"), low=0,
        ),
        lines(
            "Link errors", "NVLink errors by kind, and packets that PCIe sent again.", "none",
            events("steadyrun_gpu_nvlink_errors_total{NODE}", "instance, gpu, type", f"{gpu} NVLink {{{{type}}}}"),
            events("steadyrun_gpu_pcie_replays_total{NODE}", "instance, gpu", f"{gpu} PCIe"), low=0,
        ),
    )  # fmt: skip
    network = (
        lines(
            "Ports up", "Ports of the fabric that are active.", "none",
            query("sum by (instance) (steadyrun_nic_link_up{NODE})", every), low=0,
        ),
        lines(
            "Port errors", "Errors, and how often a link went down.", "none",
            events("steadyrun_nic_errors_total{NODE}", "instance, device", "{{instance}} {{device}} errors"),
            events("steadyrun_nic_link_downed_total{NODE}", "instance, device", "{{instance}} {{device}} downs"), low=0,
        ),
    )  # fmt: skip
    built = _dashboard("steadyrun-node", "Steadyrun / Node and GPU", "Agents, hosts, GPUs and network of a job.")
    nodes = 'label_values(steadyrun_build_info{job=~"$job",run_id=~"$run_id"}, instance)'
    built = built.with_variable(_variable("instance", "Node", nodes, several=True))
    return _filled(built, {"Now": now, "Hosts": hosts, "GPUs": gpus, "Network": network})


def write(folder: Path) -> None:
    """Both dashboards, one file each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in (("job", job()), ("node", node())):
        (folder / f"{name}.json").write_text(json.dumps(made, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "grafana")
