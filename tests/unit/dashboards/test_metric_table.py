"""The table of metrics keeps its own conventions."""

from __future__ import annotations

import re

import pytest

from steadyrun.collectors.kernel.xids import XidClass
from steadyrun.collectors.metrics.spec import (
    JOB_STATES,
    SAMPLES,
    SPEC,
    SUSPICION_KINDS,
    TARGET_LABELS,
    TIME_PHASES,
    XID_CLASSES,
    Family,
    MetricType,
    Source,
    Unit,
)
from steadyrun.node.machine.events import NodePhase

ENDINGS = {
    Unit.SECONDS: "_seconds",
    Unit.TIMESTAMP: "_timestamp_seconds",
    Unit.BYTES: "_bytes",
    Unit.RATIO: "_ratio",
    Unit.CELSIUS: "_celsius",
    Unit.WATTS: "_watts",
    Unit.JOULES: "_joules",
    Unit.HERTZ: "_hertz",
}
HISTOGRAM_SERIES = 3  # beside the buckets: infinity, sum and count


def test_families_are_named_after_their_type_and_unit() -> None:
    for family in SPEC.values():
        _check(family)


def _check(family: Family) -> None:
    assert re.fullmatch(r"steadyrun_[a-z][a-z0-9_]*", family.name)
    assert family.name.endswith("_total") == (family.type is MetricType.COUNTER)
    assert family.name.endswith("_info") == (family.type is MetricType.INFO)
    ending = ENDINGS.get(family.unit, "")
    assert family.name.removesuffix("_total").endswith(ending)
    assert not set(family.label_names) & {*TARGET_LABELS, "le", "pid", "host", "step"}
    assert family.help[0].isupper() or family.help[0] in "01"
    assert not family.help.endswith(".")
    assert bool(family.buckets) == (family.type is MetricType.HISTOGRAM)
    assert list(family.buckets) == sorted(set(family.buckets))


def test_histograms_are_never_by_rank_or_gpu() -> None:
    for family in SPEC.values():
        if family.type is MetricType.HISTOGRAM:
            assert not {"rank", "gpu"} & set(family.label_names), family.name


def test_no_two_families_share_a_name_in_prometheus() -> None:
    assert len(SAMPLES) == sum(len(f.samples) for f in SPEC.values())


def test_label_values_are_the_programs_own() -> None:
    assert tuple(p.value for p in NodePhase) == JOB_STATES
    assert set(XID_CLASSES) - {"other"} < {c.value for c in XidClass}
    assert "productive" in TIME_PHASES
    assert "section" in SUSPICION_KINDS


def test_label_sets_are_all_combinations_and_open_labels_must_be_given() -> None:
    sets = list(SPEC["gpu_ecc_errors_total"].label_sets(gpu="3"))
    assert sets == [("3", "corrected"), ("3", "uncorrected")]
    with pytest.raises(ValueError, match="label 'gpu'"):
        list(SPEC["gpu_ecc_errors_total"].label_sets())


def test_a_leader_with_8_ranks_and_8_gpus_has_less_than_800_series() -> None:
    open_values = {"section": 4, "collector": 7, "device": 8, "folder": 3, "sensor": 2, "xid": 1}
    total = 0
    for family in SPEC.values():
        count = 8 if family.source in (Source.RANK, Source.GPU) else 1
        if family.type is not MetricType.INFO:
            for label in family.labels:
                if label.name == "section" and family.source is Source.RANK:
                    continue  # a rank is in one
                count *= len(label.values) or open_values.get(label.name, 1)
        if family.type is MetricType.HISTOGRAM:
            count *= len(family.buckets) + HISTOGRAM_SERIES
        total += count
    assert 500 < total < 800
