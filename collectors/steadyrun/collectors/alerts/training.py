"""Alerts about slow ranks, wrong results and checkpoints."""

from __future__ import annotations

from typing import Final

from steadyrun.collectors.alerts.records import Alert, Severity

__all__ = ["TRAINING_ALERTS"]

_STRAGGLER: Final = "straggler"
_SDC: Final = "sdc"
_CHECKPOINT: Final = "checkpoint"

_STRAGGLER_ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        name="Straggler",
        group=_STRAGGLER,
        severity=Severity.WARNING,
        hold_s=120,
        expr="max by (run_id, rank) (steadyrun_straggler_flagged) == 1",
        summary="A rank is slow.",
        description="Rank {{ $labels.rank }} slows run {{ $labels.run_id }} down.",
        meaning=(
            "The rank's own work, without waiting for others, takes longer than that of its peers, by more than "
            "chance explains. All others wait for it in every step."
        ),
        confirm=("`steadyctl stragglers RUN`: since when, by how much, in which phase, and why as far as times tell.",),
        act=("Throttled GPU or starved CPU: treat that. No cause to be seen: leave the node out at the next restart.",),
    ),
    Alert(
        name="StragglerSevere",
        group=_STRAGGLER,
        severity=Severity.CRITICAL,
        hold_s=300,
        expr="max by (run_id, rank) (steadyrun_straggler_slowdown_ratio) > 1",
        summary="A rank takes more than twice as long as its peers.",
        description=(
            "Own work of rank {{ $labels.rank }} in run {{ $labels.run_id }} takes {{ $value | humanizePercentage }} "
            "longer than that of its peers."
        ),
        meaning="The whole job runs at less than half its speed for one rank.",
        confirm=("`steadyctl stragglers RUN`.", "`steadyctl check NODE` on its node."),
        act=("Restart the job without that node.",),
    ),
    Alert(
        name="StragglersCostly",
        group=_STRAGGLER,
        severity=Severity.WARNING,
        hold_s=900,
        expr="sum by (run_id) (rate(steadyrun_straggler_lost_seconds_total[1h])) > 0.05",
        summary="Slow ranks cost more than a twentieth of the time.",
        description="Run {{ $labels.run_id }} loses {{ $value | humanizePercentage }} of its time to slow ranks.",
        meaning="Summed over all that were named slow in the last hour.",
        confirm=("`steadyctl stragglers RUN`.",),
        act=("Leave out the slow nodes when this costs more than a restart does.",),
    ),
    Alert(
        name="StepTimeRegressed",
        group=_STRAGGLER,
        severity=Severity.WARNING,
        hold_s=1800,
        expr=(
            "run:steadyrun_step_time_seconds:median "
            "> 1.2 * avg_over_time(run:steadyrun_step_time_seconds:median[1d] offset 1h)"
        ),
        summary="Steps take a fifth longer than in the day before.",
        description="The median step time of run {{ $labels.run_id }} is {{ $value | humanizeDuration }}.",
        meaning=(
            "All ranks have become slower together, which comparing ranks cannot show: the network, the data source, "
            "a change of the program, or longer sequences."
        ),
        confirm=("`steadyctl stragglers RUN`: paces over time.", "The Job dashboard, step time by rank."),
        act=("Look at what changed at that time; fabric errors are on the Node and GPU dashboard.",),
    ),
)

_SDC_ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        name="SdcMismatch",
        group=_SDC,
        severity=Severity.CRITICAL,
        expr='sum by (run_id) (increase(steadyrun_sdc_checks_total{result="mismatch"}[1h])) > 0',
        summary="Replicas of the model differ.",
        description=(
            "Fingerprints of data-parallel replicas of run {{ $labels.run_id }} differ; checkpoints since the last "
            "good check are in doubt."
        ),
        meaning=(
            "Ranks that must hold the same bytes do not. Either hardware computed or kept something wrong, or the "
            "program lets replicas drift (an unsynchronised buffer, a seed)."
        ),
        confirm=("`steadyctl show last --run RUN`: which rank, tensor, elements and bits, and since which step.",),
        act=(
            "One rank in the minority: take its GPU out of service and go back to a checkpoint before the first bad "
            "step.",
            "More than half differ: a bug of the program; fix it before going on.",
        ),
    ),
    Alert(
        name="SdcSuspect",
        group=_SDC,
        severity=Severity.CRITICAL,
        keep_s=3600,
        expr="max by (run_id, rank) (steadyrun_sdc_suspect) == 1",
        summary="A rank is suspected of silent data corruption.",
        description="Rank {{ $labels.rank }} of run {{ $labels.run_id }} held something else than its replicas.",
        meaning="The majority of replicas agrees, and this rank does not.",
        confirm=("`steadyctl show last --run RUN`.", "`steadyctl check NODE` and memory tests of that GPU."),
        act=("Leave out the node; have the GPU tested before it computes for anybody again.",),
    ),
    Alert(
        name="SdcChecksStale",
        group=_SDC,
        severity=Severity.WARNING,
        hold_s=600,
        expr=(
            "(steadyrun_sdc_last_check_timestamp_seconds > 0) "
            "and (time() - steadyrun_sdc_last_check_timestamp_seconds > 6 * 3600)"
        ),
        summary="Replicas have not been compared for six hours.",
        description="Replicas of run {{ $labels.run_id }} are not compared any more.",
        meaning="Checks are made every so many steps; none has been completed for long. Corruption would go unseen.",
        confirm=("`steadyctl status RUN`: does it train?",),
        act=("Look into the agents' logs for why checks fail.",),
    ),
    Alert(
        name="LossSpike",
        group=_SDC,
        severity=Severity.WARNING,
        keep_s=900,
        expr="sum by (run_id) (increase(steadyrun_loss_spikes_total[15m])) > 0",
        summary="Losses stay far above what was usual.",
        description="Losses of run {{ $labels.run_id }} stay far above what was usual, or they are not finite.",
        meaning=(
            "Several steps' losses lie ten deviations or more above those before, or two are not finite. Batches that "
            "are bad, an unstable optimizer, or wrong numbers: all ranks compare their bytes at once, so the last "
            "shows as `SteadyrunSdcMismatch`."
        ),
        confirm=(
            "`steadyctl sdc RUN`: which values on which ranks and steps, and whether the bytes agreed.",
            "One rank alone out of line points to its data or its GPU; all of them to the batch or the optimizer.",
        ),
        act=(
            "Losses that come down by themselves need nothing.",
            "`steadyctl ckpt rollback RUN --to STEP --skip-batches A:B` goes back and leaves the bad batches out; "
            "`--ft-loss-spike rollback` does so by itself.",
        ),
    ),
)

_CHECKPOINT_ALERTS: Final[tuple[Alert, ...]] = (
    Alert(
        name="CheckpointStale",
        group=_CHECKPOINT,
        severity=Severity.CRITICAL,
        hold_s=60,
        expr=(
            "(time() - max by (run_id) (steadyrun_checkpoint_last_durable_timestamp_seconds)) "
            "> 3 * max by (run_id) (steadyrun_checkpoint_interval_seconds)"
        ),
        summary="No checkpoint has become durable for three intervals.",
        description="A failure of run {{ $labels.run_id }} would now cost {{ $value | humanizeDuration }} of work.",
        meaning="Saves fail, take too long, or are not made, and the work since the last one is at risk.",
        confirm=("`steadyctl ckpt ls FOLDER`.", "The row *Checkpoints* of the Job dashboard: failed, in flight, slow?"),
        act=(
            "Full or slow storage: free space or change the folder; the agents' logs have the reason of each failure.",
        ),
    ),
    Alert(
        name="CheckpointFailing",
        group=_CHECKPOINT,
        severity=Severity.WARNING,
        expr='sum by (run_id) (increase(steadyrun_checkpoint_saves_total{result="failed"}[15m])) > 0',
        summary="A checkpoint could not be saved.",
        description='{{ $value | printf "%.0f" }} saves of run {{ $labels.run_id }} failed in 15 minutes.',
        meaning="A rank could not write its part; training goes on, and older checkpoints are intact.",
        confirm=("The agents' logs: `grep checkpoint`.", "`steadyctl check NODE`: space of the folder."),
        act=("Free space, or repair the file system; the next save is tried as usual.",),
    ),
    Alert(
        name="CheckpointRejected",
        group=_CHECKPOINT,
        severity=Severity.WARNING,
        expr="sum by (run_id) (increase(steadyrun_checkpoint_rejected_total[1h])) > 0",
        summary="A checkpoint was not loaded as it did not verify.",
        description="Run {{ $labels.run_id }} had to load an older checkpoint.",
        meaning="Its files are damaged or incomplete, or it is under quarantine as it brought the same fault back.",
        confirm=("`steadyctl ckpt verify FOLDER/step-N`.", "`steadyctl ckpt quarantine FOLDER`."),
        act=("Damaged files: look at the storage. Remove the checkpoint with `steadyctl ckpt prune`.",),
    ),
    Alert(
        name="CheckpointStallHigh",
        group=_CHECKPOINT,
        severity=Severity.WARNING,
        hold_s=900,
        expr=(
            'sum by (run_id) (rate(steadyrun_time_seconds_total{phase="checkpoint_save"}[1h])) '
            "/ sum by (run_id) (rate(steadyrun_job_wall_seconds_total[1h])) > 0.05"
        ),
        summary="More than a twentieth of the time goes into saving.",
        description="Saves block run {{ $labels.run_id }} for {{ $value | humanizePercentage }} of the time.",
        meaning="Training waits for copies to memory or for storage more than it should.",
        confirm=("`steadyctl ckpt interval`: the interval that costs least.",),
        act=("Save less often, or give the saver memory enough for snapshots so that training need not wait.",),
    ),
    Alert(
        name="CheckpointBacklog",
        group=_CHECKPOINT,
        severity=Severity.WARNING,
        hold_s=900,
        expr="steadyrun_checkpoint_in_flight > 2",
        summary="Saves pile up faster than storage takes them.",
        description="{{ $value }} saves of run {{ $labels.run_id }} are not durable yet.",
        meaning="Each save waits in memory for the ones before it.",
        confirm=("The row *Checkpoints* of the Job dashboard.",),
        act=("Save less often, or to faster storage.",),
    ),
    Alert(
        name="CheckpointPersistSlow",
        group=_CHECKPOINT,
        severity=Severity.WARNING,
        hold_s=900,
        expr="steadyrun_checkpoint_last_persist_seconds > on (run_id) steadyrun_checkpoint_interval_seconds",
        summary="A checkpoint takes longer to become durable than the interval between two.",
        description="The newest save of run {{ $labels.run_id }} took {{ $value | humanizeDuration }}.",
        meaning="Storage is too slow for this interval; saves will be skipped.",
        confirm=("`steadyctl ckpt ls FOLDER`.",),
        act=("A longer interval (`steadyctl ckpt interval`), or faster storage.",),
    ),
)

TRAINING_ALERTS: Final[tuple[Alert, ...]] = (*_STRAGGLER_ALERTS, *_SDC_ALERTS, *_CHECKPOINT_ALERTS)
