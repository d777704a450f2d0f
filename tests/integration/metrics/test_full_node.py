"""The exposition of a whole node: its size, and what it costs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from steadyrun.collectors.metrics.exposition import registry_of
from steadyrun.collectors.metrics.values import Values
from steadyrun.collectors.nic.ports import PortReading
from steadyrun.collectors.nvml.reading import GpuReading
from steadyrun.collectors.process import ProcessReader
from steadyrun.collectors.protocol import CheckResult, Health
from steadyrun.collectors.registry import CollectorState
from steadyrun.core import layout
from steadyrun.core.board import Board
from steadyrun.node.devicevalues import fill_collectors, fill_gpus, fill_ports
from steadyrun.node.metrics import NodeFacts, NodeMetrics, RankLook

RANKS = 8
SECTIONS = ("setup", "step", "forward", "checkpointing")  # those of a usual script
_OPEN = ("index", "uuid", "pci", "name", "error", "nvlinks", "processes")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeMetrics]:
    board = Board.create_anonymous(RANKS)
    metrics = NodeMetrics(
        NodeFacts("run", "n0", "1.0", RANKS, 0, 1, RANKS),
        time.monotonic(),
        time.time(),
        process=ProcessReader(tmp_path),
    )
    looks = []
    for r in range(RANKS):
        base = board.slot_base(r)
        board.words[base + layout.S_OWNER_PID] = 1000 + r
        board.words[base + layout.S_STEP] = 5
        board.words[base + layout.S_STEP_AT] = 1_000_000
        looks.append(RankLook(r, r, 1000 + r, "S", board.view(r)))
    metrics.take_ranks(time.monotonic(), looks, {})
    numbers = {f.name: 3 for f in dataclasses.fields(GpuReading) if f.name not in _OPEN}
    gpus = [GpuReading(i, f"GPU-{i}", f"0000:{i:02x}:00", "H100", nvlinks=(1,) * 18, **numbers) for i in range(8)]
    ports = [PortReading(f"mlx5_{i}", 1, "InfiniBand", "ACTIVE", counters={"link_downed": 0}) for i in range(8)]
    names = ("kernel_log", "nvml", "nic", "memory", "pressure", "space", "processes")
    states = {n: CollectorState(CheckResult(n, Health.HEALTHY, ""), 1.0, 1.0, 0.1) for n in names}

    def fill(values: Values) -> None:
        fill_gpus(values, gpus)
        fill_ports(values, ports)
        fill_collectors(values, states, 0.0)

    metrics.also(fill)

    def sections(values: Values) -> None:
        for name in SECTIONS:
            values.observe("section_duration_seconds", 1.0, name)
            values.prepare("section_limits_passed_total", section=name)
            values.set("section_limit_seconds", 1.0, name, "hard")
            values.set("section_limit_seconds", 1.0, name, "soft")
        for rank in range(RANKS):
            values.set("rank_resident_memory_bytes", 1.0, str(rank))
            values.set("rank_cpu_seconds_total", 1.0, str(rank))

    metrics.with_values(sections)
    yield metrics
    board.close()


def test_a_node_of_eight_ranks_and_gpus_has_under_800_series(node: NodeMetrics) -> None:
    text = generate_latest(registry_of(node.series)).decode()
    assert 500 < sum(not line.startswith("#") for line in text.splitlines()) < 800


def test_a_scrape_takes_under_100_ms(node: NodeMetrics) -> None:
    registry = registry_of(node.series)
    generate_latest(registry)
    costs = []
    for _ in range(5):
        begun_s = time.thread_time()
        generate_latest(registry)
        costs.append(time.thread_time() - begun_s)
    assert min(costs) < 0.1, costs
