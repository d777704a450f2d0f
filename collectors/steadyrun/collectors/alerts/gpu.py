"""Alerts about GPUs."""

from __future__ import annotations

from typing import Final

from steadyrun.collectors.alerts.records import Alert, Severity

__all__ = ["GPU_ALERTS"]

_GROUP: Final = "gpu"
_WHO: Final = "GPU {{ $labels.gpu }} at {{ $labels.instance }}"
_CHECK: Final = "`steadyctl check NODE`."
_LOG: Final = "On the node: `dmesg | steadyctl read-kernel-log -`."
_LEAVE_OUT: Final = "Leave out the node, then reboot it; have the GPU inspected when it comes again."


def _grown(by: str, which: str) -> str:
    """Xids of the last 15 minutes. Where the driver's library is missing, GPUs are not known before their first Xid:
    their counters are born with it, which ``increase`` does not see."""
    count = f"steadyrun_gpu_xid_errors_total{{{which}}}"
    born = f"sum by ({by}) ({count}) > 0 unless sum by ({by}) ({count} offset 15m)"
    return f"(sum by ({by}) (increase({count}[15m])) > 0) or ({born})"


GPU_ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        name="GpuLost",
        group=_GROUP,
        severity=Severity.CRITICAL,
        expr="steadyrun_gpu_up == 0",
        summary="A GPU is lost.",
        description=f"The driver does not answer for {_WHO}.",
        meaning="The GPU has fallen off its bus, or waits for a reset. Its rank dies or hangs.",
        confirm=(_CHECK, "On the node: `nvidia-smi`.", _LOG),
        act=(_LEAVE_OUT,),
    ),
    Alert(
        name="GpuRecoveryActionNeeded",
        group=_GROUP,
        severity=Severity.CRITICAL,
        hold_s=60,
        expr="steadyrun_gpu_recovery_action > 0",
        summary="The driver asks for a reset of a GPU, a drain or a reboot.",
        description=f"{_WHO}: recovery action {{{{ $value }}}}.",
        meaning="1 reset, 2 reboot of the node, 3 drain its peers, 4 drain and reset. The driver knows best.",
        confirm=(_CHECK, "On the node: `nvidia-smi -q | grep -i recovery`."),
        act=("End the ranks of the GPU, then `nvidia-smi --gpu-reset -i GPU`, or reboot the node for 2 and above.",),
    ),
    Alert(
        name="GpuXidHardware",
        group=_GROUP,
        severity=Severity.CRITICAL,
        expr=_grown("run_id, instance, gpu, class", 'class=~"reset|reboot|hardware|fabric|unknown"'),
        summary="A GPU reported an Xid that the program does not cause.",
        description=f"{_WHO}: Xid of class {{{{ $labels.class }}}}.",
        meaning=(
            "Classes: `reset`, `reboot`: what helps; `hardware`: replace; `fabric`: NVLink or its switches; `unknown`: "
            "newer than the catalogue. `steadyrun_gpu_xid_last_timestamp_seconds` has the code."
        ),
        confirm=(_LOG, "`steadyctl show last --run RUN`: the verdict names the Xid when it explains the incident."),
        act=("Do what the class says. The same GPU twice in a week: have it replaced.",),
    ),
    Alert(
        name="GpuXidApplication",
        group=_GROUP,
        severity=Severity.INFO,
        expr=_grown("run_id, instance, gpu", 'class="app"'),
        summary="The job made a GPU report an Xid.",
        description=f"{_WHO}: Xid of the application's class.",
        meaning="An illegal access or instruction of a kernel. Nearly always the program; rarely memory that fails.",
        confirm=(_LOG, "`CUDA_LAUNCH_BLOCKING=1` or `compute-sanitizer` finds the kernel."),
        act=("Fix the kernel. When it is always the same GPU and the program is well tested, suspect the GPU.",),
    ),
    Alert(
        name="GpuEccUncorrected",
        group=_GROUP,
        severity=Severity.CRITICAL,
        expr='sum by (run_id, instance, gpu) (increase(steadyrun_gpu_ecc_errors_total{error="uncorrected"}[1h])) > 0',
        summary="A GPU had a memory error that could not be corrected.",
        description=f"{_WHO}.",
        meaning="What the process held there is lost; the driver ends it, and replaces the row at the next reset.",
        confirm=(_CHECK, "On the node: `nvidia-smi -q -d ECC,ROW_REMAPPER`.", _LOG),
        act=("Reset the GPU before the next job. It comes again: have it replaced.",),
    ),
    Alert(
        name="GpuEccCorrectedBurst",
        group=_GROUP,
        severity=Severity.WARNING,
        hold_s=900,
        expr='sum by (run_id, instance, gpu) (rate(steadyrun_gpu_ecc_errors_total{error="corrected"}[15m])) > 1',
        summary="A GPU corrects memory errors all the time.",
        description=f"{_WHO} corrects {{{{ $value | humanize }}}} errors a second.",
        meaning="Nothing is wrong yet; errors that cannot be corrected become more likely.",
        confirm=("On the node: `nvidia-smi -q -d ECC,ROW_REMAPPER`.",),
        act=("Reset the GPU at the next restart, and watch whether it goes on.",),
    ),
    Alert(
        name="GpuRowRemapPending",
        group=_GROUP,
        severity=Severity.WARNING,
        hold_s=600,
        expr="steadyrun_gpu_row_remap_pending == 1",
        summary="A GPU waits for a reset to replace a memory row.",
        description=f"{_WHO}: reset it at the next restart.",
        meaning="A row is known to be bad and is in use until the GPU is reset.",
        confirm=("On the node: `nvidia-smi -q -d ROW_REMAPPER`.",),
        act=("`nvidia-smi --gpu-reset -i GPU` when no process uses it.",),
    ),
    Alert(
        name="GpuRowRemapFailed",
        group=_GROUP,
        severity=Severity.CRITICAL,
        expr="steadyrun_gpu_row_remap_failed == 1",
        summary="A GPU could not replace a memory row.",
        description=f"{_WHO} meets the rule for replacement.",
        meaning="It has no spare rows left where they are needed.",
        confirm=("On the node: `nvidia-smi -q -d ROW_REMAPPER`.",),
        act=("Leave out the node and have the GPU replaced.",),
    ),
    Alert(
        name="GpuThermalThrottle",
        group=_GROUP,
        severity=Severity.WARNING,
        hold_s=300,
        expr="max by (run_id, instance, gpu, reason) (steadyrun_gpu_clock_event_active) == 1",
        summary="A GPU is held back by heat or by its power supply.",
        description=f"{_WHO}: {{{{ $labels.reason }}}}.",
        meaning="Its clock is lowered against its will, and every other rank waits for it.",
        confirm=(_CHECK, "On the node: `nvidia-smi -q -d PERFORMANCE,TEMPERATURE`.", "`steadyctl stragglers RUN`."),
        act=("Look at fans, air flow, inlet temperature and the power supply.",),
    ),
    Alert(
        name="GpuHot",
        group=_GROUP,
        severity=Severity.WARNING,
        hold_s=120,
        expr='steadyrun_gpu_temperature_celsius{sensor="gpu"} > 90',
        summary="A GPU is hotter than 90 degrees.",
        description=f"{_WHO} is at {{{{ $value }}}} °C.",
        meaning="It will be slowed down, and shut off when it gets hotter.",
        confirm=("On the node: `nvidia-smi -q -d TEMPERATURE`.",),
        act=("Look at fans, air flow and inlet temperature.",),
    ),
    Alert(
        name="GpuClockLow",
        group=_GROUP,
        severity=Severity.WARNING,
        hold_s=600,
        expr=(
            "steadyrun_gpu_sm_clock_hertz / on (run_id) group_left () "
            "quantile by (run_id) (0.5, steadyrun_gpu_sm_clock_hertz) < 0.8 "
            "and on (run_id, instance, gpu) steadyrun_gpu_utilization_ratio > 0.5"
        ),
        summary="A busy GPU runs well below the clock of the others.",
        description=f"{_WHO} is at {{{{ $value | humanizePercentage }}}} of the median clock.",
        meaning="A power cap, heat, or application clocks that were set on this node only.",
        confirm=("On the node: `nvidia-smi -q -d CLOCK,POWER`.",),
        act=("`nvidia-smi -rac`, the same power limit everywhere (`nvidia-smi -pl`), or cooling.",),
    ),
    Alert(
        name="GpuNvlinkDown",
        group=_GROUP,
        severity=Severity.CRITICAL,
        hold_s=60,
        expr=(
            "steadyrun_gpu_nvlink_active_links < on (run_id) group_left () "
            "max by (run_id) (steadyrun_gpu_nvlink_active_links)"
        ),
        summary="A GPU has fewer NVLinks up than the others.",
        description=f"{_WHO} has {{{{ $value }}}} links.",
        meaning="Collectives inside the node are slower or fail.",
        confirm=(_CHECK, "On the node: `nvidia-smi nvlink -s`.", _LOG),
        act=("Reset the GPU; look at its peer, the switch and the fabric manager.",),
    ),
    Alert(
        name="GpuNvlinkErrors",
        group=_GROUP,
        severity=Severity.WARNING,
        hold_s=900,
        expr=(
            "sum by (run_id, instance, gpu, type) "
            '(increase(steadyrun_gpu_nvlink_errors_total{type=~"replay|recovery"}[15m])) > 0'
        ),
        summary="A GPU's NVLinks keep making errors.",
        description=f"{_WHO}: {{{{ $labels.type }}}}.",
        meaning="Packets are sent again, which costs bandwidth; often the first sign of a link that will go down.",
        confirm=("On the node: `nvidia-smi nvlink -e`.",),
        act=("Have the module reseated at the next service.",),
    ),
    Alert(
        name="GpuPcieDegraded",
        group=_GROUP,
        severity=Severity.WARNING,
        hold_s=600,
        expr="steadyrun_gpu_pcie_link_width < steadyrun_gpu_pcie_link_width_max",
        summary="A GPU uses fewer PCIe lanes than it could.",
        description=f"{_WHO} uses {{{{ $value }}}} lanes.",
        meaning="Copies to and from the host are slower than on the other GPUs.",
        confirm=("On the node: `nvidia-smi -q | grep -A8 'GPU Link Info'`, `lspci -vv`.",),
        act=("Reseat the card or its riser.",),
    ),
    Alert(
        name="GpuPcieReplays",
        group=_GROUP,
        severity=Severity.WARNING,
        hold_s=600,
        expr="sum by (run_id, instance, gpu) (rate(steadyrun_gpu_pcie_replays_total[10m])) * 60 > 16",
        summary="A GPU's PCIe link sends too much again.",
        description=f"{_WHO}: {{{{ $value | humanize }}}} replays a minute.",
        meaning="The signal on the bus is bad: card, riser or slot.",
        confirm=("On the node: `nvidia-smi -q | grep -i replay`.", _LOG),
        act=("Reseat the card or its riser; use another slot.",),
    ),
)
