"""Alerts about the host: memory, kernel, storage and network."""

from __future__ import annotations

from typing import Final

from steadyrun.collectors.alerts.records import Alert, Severity

__all__ = ["HOST_ALERTS"]

_GROUP: Final = "host"
_LOG: Final = "On the node: `dmesg | steadyctl read-kernel-log -`."
_EVENT: Final = "{{ $labels.event }} at {{ $labels.instance }}."


def _kernel_events(events: str, window: str = "15m") -> str:
    return (
        "sum by (run_id, instance, event) "
        f'(increase(steadyrun_host_kernel_events_total{{event=~"{events}"}}[{window}])) > 0'
    )


HOST_ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        name="OomKill",
        group=_GROUP,
        severity=Severity.WARNING,
        expr="sum by (run_id, instance, scope) (increase(steadyrun_host_oom_kills_total[15m])) > 0",
        summary="The kernel ended a process for want of memory.",
        description="Out of memory at {{ $labels.instance }}: of the {{ $labels.scope }}.",
        meaning="Of the control group: its limit is too low for the job. Of the host: all of its memory is used up.",
        confirm=("`steadyctl show last --run RUN`: was it a rank or a data loader?", _LOG),
        act=("Fewer data loader workers, smaller prefetch, less pinned memory, or a larger limit.",),
    ),
    Alert(
        name="HostMemoryError",
        group=_GROUP,
        severity=Severity.CRITICAL,
        expr=_kernel_events("mce_fatal|edac_uncorrected|memory_failure|panic|hard_lockup", "1h"),
        summary="A host reported an error of its memory or CPU that cannot be corrected.",
        description=_EVENT,
        meaning="What was in that memory is lost, and more may follow.",
        confirm=(_LOG, "`ras-mc-ctl --errors`, and the event log of the BMC."),
        act=("Leave out the node and have its memory modules inspected.",),
    ),
    Alert(
        name="KernelHungTask",
        group=_GROUP,
        severity=Severity.WARNING,
        expr=_kernel_events("hung_task|soft_lockup|rcu_stall"),
        summary="The kernel reports a task or a CPU that is stuck.",
        description=_EVENT,
        meaning="A process waits in the kernel for minutes: storage, a driver, or a kernel bug.",
        confirm=(_LOG, "On the node: `ps -eo pid,stat,wchan:30,comm | grep ' D'`."),
        act=("Look at what the stack in the log waits for; reboot the node when it does not end.",),
    ),
    Alert(
        name="StorageError",
        group=_GROUP,
        severity=Severity.WARNING,
        expr=_kernel_events(
            "fs_error|fs_readonly|io_error|raid_failed|nvme_timeout|nvme_disabled|nfs_timeout|lustre_lost"
            "|lustre_evicted|lustre_error|ceph_lost|cifs_timeout"
        ),
        summary="Storage makes errors.",
        description=_EVENT,
        meaning="A disk, a file system or a file server fails; checkpoints and data are at risk.",
        confirm=(_LOG, "`steadyctl check NODE`.", "`steadyctl ckpt verify` of the newest checkpoint."),
        act=("Move checkpoints to other storage; repair or replace the device.",),
    ),
    Alert(
        name="DeviceError",
        group=_GROUP,
        severity=Severity.WARNING,
        expr=_kernel_events("pcie_aer|pcie_dpc|pcie_slot|nic_health|nic_tx_timeout|gpu_init_failed|driver_mismatch"),
        summary="The kernel reports a device that fails.",
        description=_EVENT,
        meaning="A card, its slot or its driver does not work as it should.",
        confirm=(_LOG, "`steadyctl check NODE`."),
        act=("Reseat the card; reload the driver or reboot.",),
    ),
    Alert(
        name="SwitchError",
        group=_GROUP,
        severity=Severity.WARNING,
        expr=_kernel_events("sxid"),
        summary="An NVSwitch reported an error.",
        description="SXid at {{ $labels.instance }}.",
        meaning="A fatal one stops all GPUs behind the switch; the log says which link.",
        confirm=(_LOG, "`systemctl status nvidia-fabricmanager`, and its log."),
        act=("Fatal: leave out the node and reboot it. Others: watch whether they come again.",),
    ),
    Alert(
        name="SpaceFillsUp",
        group=_GROUP,
        severity=Severity.WARNING,
        hold_s=900,
        expr="predict_linear(steadyrun_host_space_available_bytes[1h], 4 * 3600) < 0",
        summary="A folder of the job will be full within four hours.",
        description="{{ $labels.folder }} at {{ $labels.instance }} of run {{ $labels.run_id }} fills up.",
        meaning="At the pace of the last hour. Saves then fail, or the data loader's shared memory does.",
        confirm=("`df -h` on the node, and `steadyctl ckpt ls FOLDER`.",),
        act=("`steadyctl ckpt prune FOLDER`, or keep fewer checkpoints.",),
    ),
    Alert(
        name="NicDown",
        group=_GROUP,
        severity=Severity.CRITICAL,
        hold_s=60,
        expr="steadyrun_nic_link_up == 0",
        summary="A port of the fabric is down.",
        description="{{ $labels.device }} port {{ $labels.port }} at {{ $labels.instance }}.",
        meaning="It was up when the job began. Collectives hang or go over fewer ports.",
        confirm=("`steadyctl check NODE`.", "`ibstat`, `ip link`.", _LOG),
        act=("Look at the cable, the port and the switch; leave out the node meanwhile.",),
    ),
    Alert(
        name="NicFlapping",
        group=_GROUP,
        severity=Severity.WARNING,
        expr="sum by (run_id, instance, device) (increase(steadyrun_nic_link_downed_total[1d])) > 4.5",
        summary="A port of the fabric goes down and up.",
        description=(
            '{{ $labels.device }} at {{ $labels.instance }} went down {{ $value | printf "%.0f" }} times in a day.'
        ),
        meaning="Each time, traffic stops for seconds; NCCL may give up.",
        confirm=("`ibdiagnet`, `mlxlink -d DEVICE`.",),
        act=("Replace the cable or the optical module.",),
    ),
    Alert(
        name="RankUninterruptible",
        group=_GROUP,
        severity=Severity.WARNING,
        expr="steadyrun_rank_uninterruptible_seconds > 120",
        summary="A rank is stuck in the kernel.",
        description=(
            "Rank {{ $labels.rank }} at {{ $labels.instance }} has been in state D for {{ $value | humanizeDuration "
            "}}; it cannot be killed."
        ),
        meaning="It waits for storage or a driver. Not even SIGKILL ends it before that answers.",
        confirm=("On the node: `cat /proc/PID/wchan /proc/PID/stack`.", _LOG),
        act=("Bring the file server back; for a driver, reboot the node.",),
    ),
)
