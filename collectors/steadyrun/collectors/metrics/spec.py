"""Every metric family that steadyrun exports: one typed table, which exporter, alerts, dashboards and docs share.

How to use it. ``SPEC["rank_alive"]`` is a :class:`Family`; keys are names without ``steadyrun_``. An exporter makes its
``prometheus_client`` family from ``family.base_name``, ``family.help`` and ``family.label_names`` (the client appends
``_total`` and ``_info`` itself; a custom collector must not give ``created``), and for a closed set of label values it
sends each of ``family.label_sets()`` from the start: a counter that is born at 1 is not seen by ``increase()``. A rule
or a panel may only ask for ``SAMPLES``, which maps every name that Prometheus stores (``_bucket``, ``_sum`` and
``_count`` too) to its family. Whoever exports something new adds a row here first; a test compares what is exported
with this table, and others compare rules and dashboards with it.

Conventions. Base units; times of day as unix seconds, never ages; ratios from 0 to 1; states as one series a state that
is 0 or 1. No label ``job``, ``instance`` or ``run_id``: these belong to the scrape target, where service discovery puts
them, and cost nothing there. No pid, step, host name or text as a label outside of ``*_info``. Histograms are never by
rank. What happens rarely has a gauge of its newest value beside its histogram, as a rate over it is mostly empty.

What only the agent of group rank 0 knows, or would be counted once per node otherwise, is exported by it alone
(``Source.LEADER``): sums over nodes are then right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Final

from steadyrun.collectors.kernel.kinds import KINDS
from steadyrun.collectors.nvml.reading import THROTTLE_REASONS
from steadyrun.collectors.protocol import Health
from steadyrun.core.classes import FaultClass

__all__ = ["NAMESPACE", "SAMPLES", "SPEC", "TARGET_LABELS", "Family", "Label", "MetricType", "Source", "Unit"]

NAMESPACE: Final = "steadyrun_"
TARGET_LABELS: Final = ("job", "instance", "run_id", "node_rank")  # of the scrape target, not of the series


class MetricType(str, Enum):
    """The type that the exposition declares; an info metric is a gauge that is always 1 in the plain text format."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    INFO = "info"


class Source(str, Enum):
    """Who exports a family: each node once, the leader alone, each node for its ranks, or each node for its GPUs."""

    NODE = "node"
    LEADER = "leader"
    RANK = "rank"
    GPU = "gpu"


class Unit(str, Enum):
    NONE = ""
    SECONDS = "seconds"
    TIMESTAMP = "unix seconds"
    BYTES = "bytes"
    RATIO = "ratio"
    BOOL = "0 or 1"
    CELSIUS = "celsius"
    WATTS = "watts"
    JOULES = "joules"
    HERTZ = "hertz"


@dataclass(frozen=True, slots=True)
class Label:
    """A label; *values* is all it can be, or empty where that is not known beforehand."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family.

    Attributes:
        name: as it is asked for, with ``_total`` or ``_info``; a histogram's without ``_bucket``.
        help: one sentence without its full stop; goes into the exposition.
        buckets: upper bounds of a histogram, without infinity.
    """

    name: str
    type: MetricType
    source: Source
    help: str
    unit: Unit = Unit.NONE
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(label.name for label in self.labels)

    @property
    def base_name(self) -> str:
        """Without the ending that its type adds: the name of the family in OpenMetrics, and for prometheus_client."""
        return self.name.removesuffix({MetricType.COUNTER: "_total", MetricType.INFO: "_info"}.get(self.type, ""))

    @property
    def samples(self) -> tuple[str, ...]:
        """The names under which Prometheus keeps it."""
        if self.type is MetricType.HISTOGRAM:
            return (f"{self.name}_bucket", f"{self.name}_sum", f"{self.name}_count")
        return (self.name,)

    def label_sets(self, **known: str) -> Iterator[tuple[str, ...]]:
        """Every combination of label values, in the order of ``label_names``; *known* gives those of open labels.

        Raises:
            ValueError: the values of a label are neither listed nor given.
        """
        values: list[tuple[str, ...]] = []
        for label in self.labels:
            if label.name in known:
                values.append((known[label.name],))
            elif label.values:
                values.append(label.values)
            else:
                raise ValueError(f"{self.name}: no values are listed for label {label.name!r}; give {label.name}=...")
        return itertools.product(*values)


_G, _C, _H, _I = MetricType.GAUGE, MetricType.COUNTER, MetricType.HISTOGRAM, MetricType.INFO
_NODE, _LEADER, _RANK, _GPU = Source.NODE, Source.LEADER, Source.RANK, Source.GPU
_S, _AT, _BOOL, _RATIO, _B = Unit.SECONDS, Unit.TIMESTAMP, Unit.BOOL, Unit.RATIO, Unit.BYTES

_SHORT: Final = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)
_SECTION: Final = (0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 100.0, 1000.0)
_LONG: Final = (0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 1200.0)

_RANK_LABEL: Final = Label("rank")
_GPU_LABEL: Final = Label("gpu")
_SECTION_LABEL: Final = Label("section")
# An Xid of any other class of the catalogue asks for nothing by itself and is counted as ``other``.
XID_CLASSES: Final = ("app", "reset", "fabric", "reboot", "hardware", "unknown", "other")
# Kinds of the kernel log that are trouble, SXid, and corrected memory errors as their rate tells.
KERNEL_EVENTS: Final = ("sxid", *(k.name for k in KINDS.values() if k.health is not Health.HEALTHY), "edac_corrected")
_PORT: Final = (Label("device"), Label("port"))

# As NodePhase of the node's machine, in its order.
JOB_STATES: Final = (
    "joining", "starting", "running", "gathering", "stopping", "cooling", "draining", "left", "excluded",
)  # fmt: skip
# Where wall time goes; after the taxonomy of public goodput libraries, whose names are in the comments.
TIME_PHASES: Final = (
    "productive",
    "initialization",  # INITIALIZATION: rendezvous, before a process of the attempt is there
    "startup",  # PROGRAM_STARTUP: processes are there, the first step is not done
    "data_loading",  # DATA_LOADING_SYNC
    "checkpoint_save",  # UNPRODUCTIVE_CHECKPOINT_SAVE_TIME
    "evaluation",  # CUSTOM_BADPUT_EVENTS
    "checkpoint_restore",  # UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME
    "rework",  # WASTED_PROGRESS_FROM_DISRUPTION: steps that were done before
    "hang",  # of WASTED_PROGRESS: from the last progress until the attempt is ended
    "recovery",  # INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION: from there until the next attempt's processes are there
    "other",  # OTHER
)
OUT_OF_LINE: Final = ("loss", "gradient_norm")  # in the order of core.guards.WHAT
TRIGGERS: Final = (
    "exit", "hang", "stopped", "node_lost", "start_up", "corruption", "straggler", "membership", "rollback",
    "node_check", "other",
)  # fmt: skip
RESTART_PHASES: Final = ("stop", "rendezvous", "start", "first_step")
EXIT_REASONS: Final = ("ok", "error", "signal", "stopped_by_agent")
SUSPICION_KINDS: Final = ("section", "no_progress", "never_reported", "teardown", "stopped", "raised")

_ROWS: Final[tuple[Family, ...]] = (
    # -- the agent ------------------------------------------------------------------------------------------------
    Family("build_info", _I, _NODE, "Versions of the agent and of what it runs", labels=(
        Label("version"), Label("torch"), Label("python"))),
    Family("node_info", _I, _NODE, "Name and place of the node in the job", labels=(
        Label("node"), Label("group_rank"))),
    Family("agent_loop_lag_seconds", _G, _NODE,
           "The latest that the agent's loop was in the last minute", _S),
    Family("agent_cpu_seconds_total", _C, _NODE, "CPU time of the agent and of what it started beside ranks", _S),
    Family("torchelastic_metric", _G, _NODE,
           "Newest value that torch's elastic package put under a name in the launcher (put_metric)",
           labels=(Label("name"),)),
    Family("journal_records_lost_total", _C, _NODE, "Records that could not be written to the journal"),
    Family("collector_up", _G, _NODE, "1 when the collector could look the last time, 0 when it could not or is stuck",
           _BOOL, (Label("collector"),)),
    Family("collector_healthy", _G, _NODE,
           "1 when the collector found all well, 0 when degraded or unhealthy; absent when unknown",
           _BOOL, (Label("collector"),)),
    Family("collector_duration_seconds", _G, _NODE, "Time of the collector's last look", _S, (Label("collector"),)),
    Family("collector_last_success_timestamp_seconds", _G, _NODE, "When the collector last could look",
           _AT, (Label("collector"),)),
    # -- the job --------------------------------------------------------------------------------------------------
    Family("job_info", _I, _NODE, "The launch that this agent belongs to", labels=(
        Label("id"), Label("nnodes"), Label("nproc_per_node"))),
    Family("job_start_timestamp_seconds", _G, _LEADER, "When the job began", _AT),
    Family("job_state", _G, _LEADER, "1 for the state that the job is in", _BOOL, (Label("state", JOB_STATES),)),
    Family("job_attempt", _G, _LEADER, "Number of the attempt that runs, from 0"),
    Family("job_world_size", _G, _LEADER, "Ranks in the attempt that runs"),
    Family("job_nodes_excluded", _G, _LEADER, "Nodes that were left out as faults were blamed on them"),
    # -- ranks ----------------------------------------------------------------------------------------------------
    Family("rank_info", _I, _RANK, "Where a rank runs", labels=(_RANK_LABEL, Label("local_rank"), _GPU_LABEL)),
    Family("rank_alive", _G, _RANK, "1 while the rank's process lives and is no zombie", _BOOL, (_RANK_LABEL,)),
    Family("rank_progress_timestamp_seconds", _G, _RANK,
           "When the rank last gave a sign of progress: a step, a section, a beat", _AT, (_RANK_LABEL,)),
    Family("rank_step", _G, _RANK, "Step that the rank is at; falls when an earlier checkpoint is loaded",
           labels=(_RANK_LABEL,)),
    Family("rank_section_opened_timestamp_seconds", _G, _RANK,
           "When the section that the rank is in was opened; absent outside of sections",
           _AT, (_RANK_LABEL, _SECTION_LABEL)),
    Family("rank_step_time_seconds", _G, _RANK, "Median time of the rank's newest steps", _S, (_RANK_LABEL,)),
    Family("rank_own_work_seconds", _G, _RANK,
           "Median own work in the rank's newest steps: without waiting for others", _S, (_RANK_LABEL,)),
    Family("rank_hung", _G, _RANK,
           "1 while the rank is beyond its limit and is taken for hung, or waits for one that is", _BOOL,
           (_RANK_LABEL,)),
    Family("rank_resident_memory_bytes", _G, _RANK, "Resident memory of the rank and its children", _B,
           (_RANK_LABEL,)),
    Family("rank_cpu_seconds_total", _C, _RANK, "CPU time of the rank's processes, over all attempts", _S,
           (_RANK_LABEL,)),
    Family("rank_uninterruptible_seconds", _G, _RANK,
           "How long the rank's main thread has been in state D in each look", _S, (_RANK_LABEL,)),
    # -- sections and limits --------------------------------------------------------------------------------------
    Family("section_duration_seconds", _H, _NODE, "Duration of a section, over the node's ranks", _S,
           (_SECTION_LABEL,), _SECTION),
    Family("section_limit_seconds", _G, _NODE, "Limit in force: soft asks for a look, hard acts", _S,
           (_SECTION_LABEL, Label("stage", ("soft", "hard")))),
    Family("section_limit_proposed_seconds", _G, _LEADER, "Limit that calibration would set now", _S,
           (_SECTION_LABEL,)),
    Family("section_limits_passed_total", _C, _NODE, "Passes beyond a limit, and what was found when looking",
           labels=(_SECTION_LABEL, Label("stage", ("soft", "hard", "spared")))),
    Family("limits_calibrated_timestamp_seconds", _G, _LEADER, "When limits were last calibrated", _AT),
    # -- hangs and incidents --------------------------------------------------------------------------------------
    Family("hangs_total", _C, _NODE,
           "Ranks beyond their limit in a hang, by what gave them away; several for one hang",
           labels=(Label("kind", SUSPICION_KINDS),)),
    Family("rank_hung_last_timestamp_seconds", _G, _LEADER,
           "When a verdict last named the rank as the one that hangs; absent until then. An alert on it sees a hang "
           "that is over before the next scrape", _AT, (_RANK_LABEL,)),
    Family("hang_detection_seconds", _H, _NODE, "From a hung rank's last progress until it was found", _S,
           buckets=_LONG),
    Family("hang_last_detection_seconds", _G, _NODE, "The newest of hang_detection_seconds", _S),
    Family("incidents_total", _C, _LEADER, "Incidents by the class of their first finding",
           labels=(Label("class", tuple(c.value for c in FaultClass if c is not FaultClass.HEALTHY)),)),
    Family("last_incident_timestamp_seconds", _G, _LEADER, "When the newest incident was found; 0 for never", _AT),
    Family("dumps_total", _C, _NODE, "What was asked of ranks for an incident, and whether it came",
           labels=(Label("type", ("stacks", "flight")), Label("result", ("ok", "missing")))),
    # -- restarts -------------------------------------------------------------------------------------------------
    Family("restarts_total", _C, _LEADER, "Restarts begun, by what made them necessary",
           labels=(Label("trigger", TRIGGERS),)),
    Family("restarts_remaining", _G, _LEADER, "Restarts left in the budget"),
    Family("restart_duration_seconds", _H, _LEADER, "From the decision to restart until the first step", _S,
           buckets=_LONG),
    Family("restart_last_duration_seconds", _G, _LEADER, "The newest of restart_duration_seconds, by phase", _S,
           (Label("phase", RESTART_PHASES),)),
    Family("last_restart_timestamp_seconds", _G, _LEADER, "When the newest restart began; 0 for never", _AT),
    Family("rank_exits_total", _C, _NODE, "Ends of ranks by reason", labels=(Label("reason", EXIT_REASONS),)),
    # -- stragglers -----------------------------------------------------------------------------------------------
    Family("straggler_alarms", _G, _LEADER, "Straggler alarms that stand now", labels=(
        Label("kind", ("rank", "node", "parallel_group", "stage_imbalance", "data_imbalance", "transient")),)),
    Family("straggler_flagged", _G, _LEADER, "1 for a rank that a standing alarm names; absent for others", _BOOL,
           (_RANK_LABEL,)),
    Family("straggler_slowdown_ratio", _G, _LEADER,
           "By how much the own work of a flagged rank takes longer than that of its peers: 0.1 is 10 %", _RATIO,
           (_RANK_LABEL,)),
    Family("straggler_lost_seconds_total", _C, _LEADER, "Time that the job lost by ranks that were named slow", _S),
    # -- silent corruption ----------------------------------------------------------------------------------------
    Family("sdc_checks_total", _C, _LEADER, "Comparisons of replicas by outcome",
           labels=(Label("result", ("match", "mismatch", "error")),)),
    Family("sdc_last_check_timestamp_seconds", _G, _LEADER, "When replicas were last compared; 0 for never", _AT),
    Family("sdc_last_check_duration_seconds", _G, _LEADER,
           "Time that a comparison takes from training, in the mean of the attempt", _S),
    Family("sdc_suspect", _G, _LEADER, "1 for a rank whose replica was wrong; absent for others", _BOOL,
           (_RANK_LABEL,)),
    Family("loss_out_of_line_total", _C, _LEADER,
           "Losses and norms of gradients of a rank far above what was usual, or not finite; at most 200 an attempt",
           labels=(Label("what", OUT_OF_LINE),)),
    Family("loss_spikes_total", _C, _LEADER, "Times that losses stayed far above what was usual, or not finite"),
    # -- checkpoints ----------------------------------------------------------------------------------------------
    Family("checkpoint_saves_total", _C, _LEADER, "Checkpoints by outcome",
           labels=(Label("result", ("ok", "failed", "skipped")),)),
    Family("checkpoint_stall_seconds", _H, _LEADER, "Time that a save blocked training", _S, buckets=_SHORT),
    Family("checkpoint_last_stall_seconds", _G, _LEADER, "The newest of checkpoint_stall_seconds", _S),
    Family("checkpoint_persist_seconds", _H, _LEADER, "From the call until the checkpoint was durable", _S,
           buckets=_LONG),
    Family("checkpoint_last_persist_seconds", _G, _LEADER, "The newest of checkpoint_persist_seconds", _S),
    Family("checkpoint_written_bytes_total", _C, _LEADER, "Bytes of checkpoints that became durable", _B),
    Family("checkpoint_rejected_total", _C, _LEADER,
           "Checkpoints that were not loaded as they did not verify or are under quarantine"),
    Family("checkpoint_last_durable_timestamp_seconds", _G, _LEADER,
           "When the newest durable checkpoint was taken; the start of the job until there is one", _AT),
    Family("checkpoint_last_durable_step", _G, _LEADER, "Step of the newest durable checkpoint"),
    Family("checkpoint_interval_seconds", _G, _LEADER, "Interval in force between durable checkpoints", _S),
    Family("checkpoint_in_flight", _G, _LEADER, "Saves that are not durable yet"),
    Family("checkpoint_restore_seconds", _H, _LEADER, "Time to load a checkpoint", _S, buckets=_LONG),
    Family("checkpoint_last_restore_seconds", _G, _LEADER, "The newest of checkpoint_restore_seconds", _S),
    # -- goodput --------------------------------------------------------------------------------------------------
    Family("job_wall_seconds_total", _C, _LEADER, "Wall time since the job began", _S),
    Family("time_seconds_total", _C, _LEADER,
           "Wall time of the job by phase, credited when a phase is certain; with time_open_seconds it adds up to "
           "job_wall_seconds_total", _S, (Label("phase", TIME_PHASES),)),
    Family("time_open_seconds", _G, _LEADER, "Time since the newest moment that is credited to a phase", _S),
    Family("goodput_ratio", _G, _LEADER, "Productive share of the wall time since the job began", _RATIO),
    Family("steps_lost_total", _C, _LEADER, "Steps to be done again after restarts"),
    # -- GPUs -----------------------------------------------------------------------------------------------------
    Family("gpu_info", _I, _GPU, "What the GPU is", labels=(
        _GPU_LABEL, Label("uuid"), Label("pci_bus_id"), Label("name"))),
    Family("gpu_up", _G, _GPU, "1 while the driver answers for the GPU, 0 when it is lost", _BOOL, (_GPU_LABEL,)),
    Family("gpu_recovery_action", _G, _GPU,
           "What the driver asks for: 0 nothing, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset",
           labels=(_GPU_LABEL,)),
    Family("gpu_temperature_celsius", _G, _GPU, "Temperature", Unit.CELSIUS, (_GPU_LABEL, Label("sensor"))),
    Family("gpu_power_watts", _G, _GPU, "Power draw", Unit.WATTS, (_GPU_LABEL,)),
    Family("gpu_power_limit_watts", _G, _GPU, "Power limit in force", Unit.WATTS, (_GPU_LABEL,)),
    Family("gpu_energy_joules_total", _C, _GPU, "Energy since the driver was loaded", Unit.JOULES, (_GPU_LABEL,)),
    Family("gpu_sm_clock_hertz", _G, _GPU, "Clock of the multiprocessors", Unit.HERTZ, (_GPU_LABEL,)),
    Family("gpu_clock_event_active", _G, _GPU, "1 while the driver names the reason for a lowered clock", _BOOL,
           (_GPU_LABEL, Label("reason", tuple(THROTTLE_REASONS.values())))),
    Family("gpu_throttled_seconds_total", _C, _GPU, "Time held back, from the driver's counters", _S,
           (_GPU_LABEL, Label("reason", ("power", "thermal")))),
    Family("gpu_utilization_ratio", _G, _GPU, "Share of time in which a kernel ran", _RATIO, (_GPU_LABEL,)),
    Family("gpu_memory_used_bytes", _G, _GPU, "Memory in use", _B, (_GPU_LABEL,)),
    Family("gpu_memory_total_bytes", _G, _GPU, "Memory", _B, (_GPU_LABEL,)),
    Family("gpu_ecc_errors_total", _C, _GPU, "Memory errors since the driver was loaded",
           labels=(_GPU_LABEL, Label("error", ("corrected", "uncorrected")))),
    Family("gpu_remapped_rows", _G, _GPU, "Memory rows replaced, by the errors that made it necessary",
           labels=(_GPU_LABEL, Label("cause", ("corrected", "uncorrected")))),
    Family("gpu_row_remap_pending", _G, _GPU, "1 when a row waits for a reset to be replaced", _BOOL, (_GPU_LABEL,)),
    Family("gpu_row_remap_failed", _G, _GPU, "1 when a row could not be replaced", _BOOL, (_GPU_LABEL,)),
    Family("gpu_xid_errors_total", _C, _GPU, "Xid events by what they ask for",
           labels=(_GPU_LABEL, Label("class", XID_CLASSES))),
    Family("gpu_xid_last_timestamp_seconds", _G, _GPU, "When the Xid was last seen; absent until then", _AT,
           (_GPU_LABEL, Label("xid"))),
    Family("gpu_nvlink_active_links", _G, _GPU, "NVLinks up", labels=(_GPU_LABEL,)),
    Family("gpu_nvlink_errors_total", _C, _GPU, "NVLink errors over all links",
           labels=(_GPU_LABEL, Label("type", ("replay", "recovery", "crc")))),
    Family("gpu_pcie_replays_total", _C, _GPU, "Packets that PCIe had to send again", labels=(_GPU_LABEL,)),
    Family("gpu_pcie_link_width", _G, _GPU, "PCIe lanes in use", labels=(_GPU_LABEL,)),
    Family("gpu_pcie_link_width_max", _G, _GPU, "PCIe lanes that card and slot could use", labels=(_GPU_LABEL,)),
    # -- the host -------------------------------------------------------------------------------------------------
    Family("host_kernel_events_total", _C, _NODE, "Events in the kernel log by kind, since the agent began",
           labels=(Label("event", KERNEL_EVENTS),)),
    Family("host_kernel_messages_lost_total", _C, _NODE, "Kernel messages overwritten before they could be read"),
    Family("host_memory_available_bytes", _G, _NODE, "Memory that can be had, of host and control group", _B),
    Family("host_oom_kills_total", _C, _NODE, "Processes ended for want of memory: of the agent's control group, or of "
           "the host", labels=(Label("scope", ("cgroup", "host")),)),
    Family("host_space_available_bytes", _G, _NODE, "Space left in a folder that the job writes to", _B,
           (Label("folder"),)),
    Family("nic_link_up", _G, _NODE, "1 when the port is active", _BOOL, _PORT),
    Family("nic_link_downed_total", _C, _NODE, "How often the port's link went down", labels=_PORT),
    Family("nic_errors_total", _C, _NODE, "Sum of the port's error counters", labels=_PORT),
)  # fmt: skip


def _named(row: Family) -> Family:
    return Family(NAMESPACE + row.name, row.type, row.source, row.help, row.unit, row.labels, row.buckets)


SPEC: Final[Mapping[str, Family]] = MappingProxyType({row.name: _named(row) for row in _ROWS})
SAMPLES: Final[Mapping[str, Family]] = MappingProxyType({s: f for f in SPEC.values() for s in f.samples})
