"""For every alert: series that make it fire, the minute from which they do, and series that stay just below.

Values are in promtool's notation, one a minute: ``0x5 1x60`` is 0 for minutes 0 to 5, then 1; ``0+60x120`` grows by 60.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RUN: Final = 'run_id="r"'
NODE: Final = 'run_id="r",instance="n0"'
RANK: Final = 'run_id="r",instance="n0",rank="3"'
GPU: Final = 'run_id="r",instance="n0",gpu="5"'
OTHER_GPU: Final = 'run_id="r",instance="n1",gpu="2"'


@dataclass(frozen=True)
class Case:
    """``true_at``: the first minute at which the expression holds for *fires*; ``ended_at``: the first at which the
    alert has gone again, where the case has that. ``says``: the description of the alert that fires."""

    alert: str
    fires: dict[str, str]
    silent: dict[str, str]
    says: str
    labels: dict[str, str]
    true_at: int = 0
    ended_at: int | None = None


def _counter(alert: str, series: str, says: str, labels: dict[str, str], least: int = 1) -> Case:
    """A counter that fires when it has grown by *least*."""
    below = "0x5 " + f"{least - 1}x60" if least > 1 else "0x65"
    return Case(alert, {series: f"0x5 {least}x60"}, {series: below}, says, labels, true_at=6)


def _gauge(alert: str, series: str, bad: str, good: str, says: str, labels: dict[str, str]) -> Case:
    """A gauge that is bad from the start."""
    return Case(alert, {series: f"{bad}x120"}, {series: f"{good}x120"}, says, labels)


_R: Final = {"run_id": "r"}
_N: Final = {"run_id": "r", "instance": "n0"}
_K: Final = {"run_id": "r", "instance": "n0", "rank": "3"}
_G: Final = {"run_id": "r", "instance": "n0", "gpu": "5"}
_OLD: Final = {f"steadyrun_job_start_timestamp_seconds{{{RUN}}}": "0x500"}

CASES: Final[tuple[Case, ...]] = (
    # agent
    _gauge(
        "AgentDown",
        f'up{{job="steadyrun",{NODE}}}',
        "0",
        "1",
        "The agent at n0 of run r has not answered for 2 minutes.",
        {"job": "steadyrun", **_N},
    ),
    _gauge(
        "AgentLoopLag",
        f"steadyrun_agent_loop_lag_seconds{{{NODE}}}",
        "1.5",
        "1",
        "The loop of the agent at n0 is 1.5s late; faults are found that much later.",
        _N,
    ),
    _counter(
        "JournalLosesRecords",
        f"steadyrun_journal_records_lost_total{{{NODE}}}",
        "The agent at n0 of run r has lost records of its journal.",
        _N,
    ),
    _gauge(
        "CollectorFailing",
        f'steadyrun_collector_up{{{NODE},collector="space"}}',
        "0",
        "1",
        "Collector space at n0 cannot look at its part of the node.",
        {"collector": "space", **_N},
    ),
    Case(
        "CollectorStuck",
        {f'steadyrun_collector_last_success_timestamp_seconds{{{NODE},collector="nvml"}}': "0x30"},
        {f'steadyrun_collector_last_success_timestamp_seconds{{{NODE},collector="nvml"}}': "-120+60x30"},
        "Collector nvml at n0 last came back 4m 0s ago.",
        {"collector": "nvml", **_N},
        true_at=3,
    ),
    _gauge(
        "NodeUnhealthy",
        f'steadyrun_collector_healthy{{{NODE},collector="space"}}',
        "0",
        "1",
        "Collector space at n0 finds something wrong.",
        {"collector": "space", **_N},
    ),
    # hang
    Case(
        "RankHung",
        {
            f'steadyrun_rank_hung_last_timestamp_seconds{{{RUN},rank="3"}}': "_x10 600x60",
            f"steadyrun_last_incident_timestamp_seconds{{{RUN}}}": "0x9 600x60",
            f"steadyrun_rank_hung{{{RANK}}}": "0x9 1x8 0x60",
        },
        {
            f'steadyrun_rank_hung_last_timestamp_seconds{{{RUN},rank="3"}}': "-300+0x60",
            f"steadyrun_last_incident_timestamp_seconds{{{RUN}}}": "-200+0x60",
            f"steadyrun_rank_hung{{{RANK}}}": "1x60",
        },
        "Rank 3 of run r hangs, says the verdict.",
        {"run_id": "r", "rank": "3"},
        true_at=10,
        ended_at=19,
    ),
    Case(
        "RankSilent",
        {f"steadyrun_rank_progress_timestamp_seconds{{{RANK}}}": "0x60", f"steadyrun_rank_alive{{{RANK}}}": "1x60"},
        {
            f"steadyrun_rank_progress_timestamp_seconds{{{RANK}}}": "-600+60x60",
            f"steadyrun_rank_alive{{{RANK}}}": "1x60",
        },
        "Rank 3 of run r at n0 has been silent for 12m 0s.",
        _K,
        true_at=11,
    ),
    Case(
        "SectionNearLimit",
        {
            f'steadyrun_rank_section_opened_timestamp_seconds{{{RANK},section="step"}}': "0x30",
            f'steadyrun_section_limit_seconds{{{NODE},section="step",stage="hard"}}': "600x30",
            f'steadyrun_section_limit_seconds{{{NODE},section="step",stage="soft"}}': "60x30",
        },
        {
            f'steadyrun_rank_section_opened_timestamp_seconds{{{RANK},section="step"}}': "-480+60x30",
            f'steadyrun_section_limit_seconds{{{NODE},section="step",stage="hard"}}': "600x30",
        },
        "Section step of rank 3 in run r has used 90% of its limit.",
        {**_K, "section": "step"},
        true_at=9,
    ),
    Case(
        "NoProgress",
        {
            f'steadyrun_rank_step{{{RUN},rank="0"}}': "0+100x5 500x30",
            f'steadyrun_job_state{{{RUN},state="running"}}': "1x40",
        },
        {
            f'steadyrun_rank_step{{{RUN},rank="0"}}': "0 0 1x8 2x9 3x9 4x9",
            f'steadyrun_job_state{{{RUN},state="running"}}': "1x40",
        },
        "Run r has been at the same step for ten minutes, and nothing has acted.",
        _R,
        true_at=15,
    ),
    _counter(
        "HangsRepeated",
        f'steadyrun_incidents_total{{{RUN},class="host_stall"}}',
        "3 hangs of run r in 6 hours.",
        _R,
        least=3,
    ),
    _counter(
        "DumpMissing",
        f'steadyrun_dumps_total{{{NODE},type="flight",result="missing"}}',
        "flight of a rank at n0 of run r is missing.",
        {**_N, "type": "flight"},
    ),
    Case(
        "LimitLoose",
        {
            f'steadyrun_section_limit_seconds{{{NODE},section="step",stage="hard"}}': "600x120",
            f'steadyrun_section_limit_proposed_seconds{{{RUN},section="step"}}': "100x120",
        },
        {
            f'steadyrun_section_limit_seconds{{{NODE},section="step",stage="hard"}}': "500x120",
            f'steadyrun_section_limit_proposed_seconds{{{RUN},section="step"}}': "100x120",
        },
        "The limit of section step in run r is 6 times the proposal.",
        {**_N, "section": "step", "stage": "hard"},
    ),
    _counter(
        "LimitTight",
        f'steadyrun_section_limits_passed_total{{{NODE},section="step",stage="spared"}}',
        "The limit of section step in r passed 10 times in an hour, and each time the ranks turned out to work.",
        {**_R, "section": "step"},
        least=10,
    ),
    # restart
    _counter(
        "Incident",
        f'steadyrun_incidents_total{{{NODE},class="dead_process"}}',
        "Run r had an incident of class dead_process.",
        {**_R, "class": "dead_process"},
    ),
    _counter(
        "Restarted",
        f'steadyrun_restarts_total{{{NODE},trigger="exit"}}',
        "Run r was restarted; trigger: exit.",
        {**_R, "trigger": "exit"},
    ),
    _counter(
        "RestartLoop",
        f'steadyrun_restarts_total{{{NODE},trigger="exit"}}',
        "Run r restarted 3 times in 30 minutes.",
        _R,
        least=3,
    ),
    Case(
        "RestartBudgetLow",
        {f"steadyrun_restarts_remaining{{{RUN}}}": "1x30", f'steadyrun_restarts_total{{{RUN},trigger="exit"}}': "2x30"},
        {f"steadyrun_restarts_remaining{{{RUN}}}": "1x30", f'steadyrun_restarts_total{{{RUN},trigger="exit"}}': "0x30"},
        "Run r has 1 restarts left.",
        _R,
    ),
    _gauge(
        "RecoveryStuck",
        f'steadyrun_job_state{{{RUN},state="joining"}}',
        "1",
        "0",
        "Run r does not start, or does not come back.",
        _R,
    ),
    Case(
        "WorldShrunk",
        {f"steadyrun_job_world_size{{{RUN}}}": "16x5 8x60"},
        {f"steadyrun_job_world_size{{{RUN}}}": "16x65"},
        "Run r is down to 8 ranks.",
        _R,
        true_at=6,
    ),
    _gauge("NodeLeftOut", f"steadyrun_job_nodes_excluded{{{RUN}}}", "1", "0", "Run r has left out 1 of its nodes.", _R),
    # goodput
    Case(
        "GoodputLow",
        {
            f'steadyrun_time_seconds_total{{{RUN},phase="productive"}}': "0+48x500",
            f"steadyrun_job_wall_seconds_total{{{RUN}}}": "0+60x500",
            **_OLD,
        },
        {
            f'steadyrun_time_seconds_total{{{RUN},phase="productive"}}': "0+52x500",
            f"steadyrun_job_wall_seconds_total{{{RUN}}}": "0+60x500",
            **_OLD,
        },
        "Goodput of run r is 80%.",
        _R,
        true_at=61,
    ),
    Case(
        "GoodputCollapsed",
        {
            f'steadyrun_time_seconds_total{{{RUN},phase="productive"}}': "0+24x500",
            f"steadyrun_job_wall_seconds_total{{{RUN}}}": "0+60x500",
            **_OLD,
        },
        {
            f'steadyrun_time_seconds_total{{{RUN},phase="productive"}}': "0+31x500",
            f"steadyrun_job_wall_seconds_total{{{RUN}}}": "0+60x500",
            **_OLD,
        },
        "Goodput of run r is 40%.",
        _R,
        true_at=61,
    ),
    # stragglers
    _gauge(
        "Straggler",
        f'steadyrun_straggler_flagged{{{RUN},rank="6"}}',
        "1",
        "0",
        "Rank 6 slows run r down.",
        {**_R, "rank": "6"},
    ),
    _gauge(
        "StragglerSevere",
        f'steadyrun_straggler_slowdown_ratio{{{RUN},rank="6"}}',
        "1.5",
        "1",
        "Own work of rank 6 in run r takes 150% longer than that of its peers.",
        {**_R, "rank": "6"},
    ),
    Case(
        "StragglersCostly",
        {f"steadyrun_straggler_lost_seconds_total{{{RUN}}}": "0+6x200"},
        {f"steadyrun_straggler_lost_seconds_total{{{RUN}}}": "0+3x200"},
        "Run r loses 7.667% of its time to slow ranks.",
        _R,
        true_at=31,
    ),
    Case(
        "StepTimeRegressed",
        {f"steadyrun_rank_step_time_seconds{{{RANK}}}": "0.5x100 1.5x100"},
        {f"steadyrun_rank_step_time_seconds{{{RANK}}}": "0.5x100 0.6x100"},
        "The median step time of run r is 1.5s.",
        _R,
        true_at=101,
    ),
    # silent corruption
    _counter(
        "SdcMismatch",
        f'steadyrun_sdc_checks_total{{{RUN},result="mismatch"}}',
        "Fingerprints of data-parallel replicas of run r differ; checkpoints since the last good check are in doubt.",
        _R,
    ),
    Case(
        "SdcSuspect",
        {f'steadyrun_sdc_suspect{{{RUN},rank="5"}}': "0x3 1x5 0x100"},
        {f'steadyrun_sdc_suspect{{{RUN},rank="5"}}': "0x110"},
        "Rank 5 of run r held something else than its replicas.",
        {**_R, "rank": "5"},
        true_at=4,
        ended_at=70,
    ),
    Case(
        "SdcChecksStale",
        {f"steadyrun_sdc_last_check_timestamp_seconds{{{RUN}}}": "60x500"},
        {f"steadyrun_sdc_last_check_timestamp_seconds{{{RUN}}}": "0x500"},
        "Replicas of run r are not compared any more.",
        _R,
        true_at=362,
    ),
    _counter(
        "LossSpike",
        f"steadyrun_loss_spikes_total{{{RUN}}}",
        "Losses of run r stay far above what was usual, or they are not finite.",
        _R,
    ),
    # checkpoints
    Case(
        "CheckpointStale",
        {
            f"steadyrun_checkpoint_last_durable_timestamp_seconds{{{RUN}}}": "0x60",
            f"steadyrun_checkpoint_interval_seconds{{{RUN}}}": "300x60",
        },
        {
            f"steadyrun_checkpoint_last_durable_timestamp_seconds{{{RUN}}}": "-900+60x60",
            f"steadyrun_checkpoint_interval_seconds{{{RUN}}}": "300x60",
        },
        "A failure of run r would now cost 17m 0s of work.",
        _R,
        true_at=16,
    ),
    _counter(
        "CheckpointFailing",
        f'steadyrun_checkpoint_saves_total{{{RUN},result="failed"}}',
        "1 saves of run r failed in 15 minutes.",
        _R,
    ),
    _counter(
        "CheckpointRejected",
        f"steadyrun_checkpoint_rejected_total{{{RUN}}}",
        "Run r had to load an older checkpoint.",
        _R,
    ),
    Case(
        "CheckpointStallHigh",
        {
            f'steadyrun_time_seconds_total{{{RUN},phase="checkpoint_save"}}': "0+6x100",
            f"steadyrun_job_wall_seconds_total{{{RUN}}}": "0+60x100",
        },
        {
            f'steadyrun_time_seconds_total{{{RUN},phase="checkpoint_save"}}': "0+2.9x100",
            f"steadyrun_job_wall_seconds_total{{{RUN}}}": "0+60x100",
        },
        "Saves block run r for 10% of the time.",
        _R,
        true_at=1,
    ),
    _gauge(
        "CheckpointBacklog",
        f"steadyrun_checkpoint_in_flight{{{RUN}}}",
        "3",
        "2",
        "3 saves of run r are not durable yet.",
        _R,
    ),
    Case(
        "CheckpointPersistSlow",
        {
            f"steadyrun_checkpoint_last_persist_seconds{{{RUN}}}": "400x60",
            f"steadyrun_checkpoint_interval_seconds{{{RUN}}}": "300x60",
        },
        {
            f"steadyrun_checkpoint_last_persist_seconds{{{RUN}}}": "300x60",
            f"steadyrun_checkpoint_interval_seconds{{{RUN}}}": "300x60",
        },
        "The newest save of run r took 6m 40s.",
        _R,
    ),
    # GPUs
    _gauge("GpuLost", f"steadyrun_gpu_up{{{GPU}}}", "0", "1", "The driver does not answer for GPU 5 at n0.", _G),
    _gauge(
        "GpuRecoveryActionNeeded",
        f"steadyrun_gpu_recovery_action{{{GPU}}}",
        "2",
        "0",
        "GPU 5 at n0: recovery action 2.",
        _G,
    ),
    Case(
        "GpuXidHardware",
        {f'steadyrun_gpu_xid_errors_total{{{GPU},class="reboot"}}': "0x5 1x60"},
        {
            f'steadyrun_gpu_xid_errors_total{{{GPU},class="reboot"}}': "0x65",
            f'steadyrun_gpu_xid_errors_total{{{GPU},class="app"}}': "0x5 1x60",
        },
        "GPU 5 at n0: Xid of class reboot.",
        {**_G, "class": "reboot"},
        true_at=6,
        ended_at=21,
    ),
    _counter(
        "GpuXidApplication",
        f'steadyrun_gpu_xid_errors_total{{{GPU},class="app"}}',
        "GPU 5 at n0: Xid of the application's class.",
        _G,
    ),
    _counter("GpuEccUncorrected", f'steadyrun_gpu_ecc_errors_total{{{GPU},error="uncorrected"}}', "GPU 5 at n0.", _G),
    Case(
        "GpuEccCorrectedBurst",
        {f'steadyrun_gpu_ecc_errors_total{{{GPU},error="corrected"}}': "0+120x60"},
        {f'steadyrun_gpu_ecc_errors_total{{{GPU},error="corrected"}}': "0+59x60"},
        "GPU 5 at n0 corrects 2 errors a second.",
        _G,
        true_at=8,
    ),
    _gauge(
        "GpuRowRemapPending",
        f"steadyrun_gpu_row_remap_pending{{{GPU}}}",
        "1",
        "0",
        "GPU 5 at n0: reset it at the next restart.",
        _G,
    ),
    _gauge(
        "GpuRowRemapFailed",
        f"steadyrun_gpu_row_remap_failed{{{GPU}}}",
        "1",
        "0",
        "GPU 5 at n0 meets the rule for replacement.",
        _G,
    ),
    _gauge(
        "GpuThermalThrottle",
        f'steadyrun_gpu_clock_event_active{{{GPU},reason="hw_thermal"}}',
        "1",
        "0",
        "GPU 5 at n0: hw_thermal.",
        {**_G, "reason": "hw_thermal"},
    ),
    _gauge(
        "GpuHot",
        f'steadyrun_gpu_temperature_celsius{{{GPU},sensor="gpu"}}',
        "91",
        "90",
        "GPU 5 at n0 is at 91 °C.",
        {**_G, "sensor": "gpu"},
    ),
    Case(
        "GpuClockLow",
        {
            f"steadyrun_gpu_sm_clock_hertz{{{GPU}}}": "1.0e9x60",
            f"steadyrun_gpu_sm_clock_hertz{{{OTHER_GPU}}}": "2.0e9x60",
            f'steadyrun_gpu_sm_clock_hertz{{{RUN},instance="n2",gpu="0"}}': "2.0e9x60",
            f"steadyrun_gpu_utilization_ratio{{{GPU}}}": "0.9x60",
        },
        {
            f"steadyrun_gpu_sm_clock_hertz{{{GPU}}}": "1.0e9x60",
            f"steadyrun_gpu_sm_clock_hertz{{{OTHER_GPU}}}": "2.0e9x60",
            f'steadyrun_gpu_sm_clock_hertz{{{RUN},instance="n2",gpu="0"}}': "2.0e9x60",
            f"steadyrun_gpu_utilization_ratio{{{GPU}}}": "0.1x60",
        },
        "GPU 5 at n0 is at 50% of the median clock.",
        _G,
    ),
    Case(
        "GpuNvlinkDown",
        {
            f"steadyrun_gpu_nvlink_active_links{{{GPU}}}": "17x60",
            f"steadyrun_gpu_nvlink_active_links{{{OTHER_GPU}}}": "18x60",
        },
        {
            f"steadyrun_gpu_nvlink_active_links{{{GPU}}}": "18x60",
            f"steadyrun_gpu_nvlink_active_links{{{OTHER_GPU}}}": "18x60",
        },
        "GPU 5 at n0 has 17 links.",
        _G,
    ),
    Case(
        "GpuNvlinkErrors",
        {f'steadyrun_gpu_nvlink_errors_total{{{GPU},type="replay"}}': "0+1x60"},
        {f'steadyrun_gpu_nvlink_errors_total{{{GPU},type="replay"}}': "0x5 1x60"},
        "GPU 5 at n0: replay.",
        {**_G, "type": "replay"},
        true_at=1,
    ),
    Case(
        "GpuPcieDegraded",
        {f"steadyrun_gpu_pcie_link_width{{{GPU}}}": "8x60", f"steadyrun_gpu_pcie_link_width_max{{{GPU}}}": "16x60"},
        {f"steadyrun_gpu_pcie_link_width{{{GPU}}}": "16x60", f"steadyrun_gpu_pcie_link_width_max{{{GPU}}}": "16x60"},
        "GPU 5 at n0 uses 8 lanes.",
        _G,
    ),
    Case(
        "GpuPcieReplays",
        {f"steadyrun_gpu_pcie_replays_total{{{GPU}}}": "0+20x60"},
        {f"steadyrun_gpu_pcie_replays_total{{{GPU}}}": "0+15x60"},
        "GPU 5 at n0: 20 replays a minute.",
        _G,
        true_at=9,
    ),
    # the host
    _counter(
        "OomKill",
        f'steadyrun_host_oom_kills_total{{{NODE},scope="cgroup"}}',
        "Out of memory at n0: of the cgroup.",
        {**_N, "scope": "cgroup"},
    ),
    Case(
        "HostMemoryError",
        {f'steadyrun_host_kernel_events_total{{{NODE},event="edac_uncorrected"}}': "0x5 1x60"},
        {f'steadyrun_host_kernel_events_total{{{NODE},event="edac_corrected"}}': "0x5 1x60"},
        "edac_uncorrected at n0.",
        {**_N, "event": "edac_uncorrected"},
        true_at=6,
    ),
    *(
        Case(
            alert,
            {f'steadyrun_host_kernel_events_total{{{NODE},event="{event}"}}': "0x5 1x60"},
            {f'steadyrun_host_kernel_events_total{{{NODE},event="{event}"}}': "1x65"},
            f"{event} at n0.",
            {**_N, "event": event},
            true_at=6,
        )
        for alert, event in (
            ("KernelHungTask", "hung_task"),
            ("StorageError", "nfs_timeout"),
            ("DeviceError", "pcie_dpc"),
        )
    ),
    _counter(
        "SwitchError",
        f'steadyrun_host_kernel_events_total{{{NODE},event="sxid"}}',
        "SXid at n0.",
        {**_N, "event": "sxid"},
    ),
    Case(
        "SpaceFillsUp",
        {f'steadyrun_host_space_available_bytes{{{NODE},folder="checkpoints"}}': "1000000-6000x60"},
        {f'steadyrun_host_space_available_bytes{{{NODE},folder="checkpoints"}}': "1000000-2000x60"},
        "checkpoints at n0 of run r fills up.",
        {**_N, "folder": "checkpoints"},
        true_at=1,
    ),
    _gauge(
        "NicDown",
        f'steadyrun_nic_link_up{{{NODE},device="mlx5_3",port="1"}}',
        "0",
        "1",
        "mlx5_3 port 1 at n0.",
        {**_N, "device": "mlx5_3", "port": "1"},
    ),
    _counter(
        "NicFlapping",
        f'steadyrun_nic_link_downed_total{{{NODE},device="mlx5_3",port="1"}}',
        "mlx5_3 at n0 went down 5 times in a day.",
        {**_N, "device": "mlx5_3"},
        least=5,
    ),
    _gauge(
        "RankUninterruptible",
        f"steadyrun_rank_uninterruptible_seconds{{{RANK}}}",
        "130",
        "120",
        "Rank 3 at n0 has been in state D for 2m 10s; it cannot be killed.",
        _K,
    ),
)
