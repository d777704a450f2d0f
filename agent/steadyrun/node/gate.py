"""The check of a node before an attempt: what its collectors say now, and, when asked for, how fast its devices are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from steadyrun.collectors.host.memory import MemoryCollector
from steadyrun.collectors.host.space import Folder, SpaceCollector
from steadyrun.collectors.nic.collector import NicCollector
from steadyrun.collectors.nvml.collector import NvmlCollector
from steadyrun.collectors.nvml.reading import GpuReading
from steadyrun.collectors.protocol import CheckResult, Collector, Health, Trouble
from steadyrun.collectors.registry import Registry
from steadyrun.node.devicetest import DeviceSpeed, DeviceTestError, measure_devices
from steadyrun.node.gatejudge import NodeReport

__all__ = ["LEVELS", "NodeGate", "memory_in_use"]

LEVELS: Final = ("off", "quick", "full")
QUICK_LIMIT_S: Final = 15.0  # a healthy node takes a fraction of a second; nvmlInit without persistence takes seconds
START_LIMIT_S: Final = 8.0  # so that a driver that hangs is told as that, within the above
FULL_LIMIT_S: Final = 120.0
FREED_WITHIN_S: Final = 2.0  # memory of ranks that were just ended
FRESH_S: Final = 3.0  # when ranks fail, everything is looked at while their evidence is collected
LOOK_AGAIN_S: Final = 0.25
IN_USE_RATIO: Final = 0.05
IN_USE_BYTES: Final = 2 << 30


@dataclass(frozen=True, slots=True)
class _GpusNow:
    """The GPUs as they are when the check begins, whoever else reads them now and then."""

    nvml: NvmlCollector
    name: str = NvmlCollector.name
    every_s: float = NvmlCollector.every_s
    limit_s: float = QUICK_LIMIT_S

    def check(self) -> CheckResult:
        return self.nvml.look_now(START_LIMIT_S, FRESH_S)

    def close(self) -> None:
        """Others go on reading."""


class NodeGate:
    """Checks this node. ``check`` blocks and is for worker threads, one at a time.

    Args:
        level: one of ``LEVELS``.
        ranks: how many are to run here.
        folders: that the job writes to.
        root: of the machine's files.
        nvml: what reads the GPUs, shared with others; None where there are none.
        speeds: tests the devices; raises DeviceTestError.
    """

    def __init__(
        self,
        node: str,
        level: str,
        ranks: int,
        folders: Sequence[Folder] = (),
        root: Path = Path("/"),
        nvml: Callable[[], NvmlCollector | None] = lambda: None,
        speeds: Callable[[float], list[DeviceSpeed]] = measure_devices,
    ) -> None:
        if level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
        self._node, self.level, self._ranks, self._root = node, level, ranks, root
        self._speeds, self._get_nvml = speeds, nvml
        self._nvml: NvmlCollector | None = None
        self._nic = NicCollector(root)
        self._others: tuple[Collector, ...] = (
            self._nic,
            SpaceCollector(folders, root / "dev/shm"),
            MemoryCollector(root),
        )
        self._lock = threading.Lock()

    def check(self, own: Collection[int] = (), with_speeds: bool = True) -> NodeReport:
        """Look now.

        Args:
            own: processes that may be on GPUs.
            with_speeds: at level ``full``, test the devices too.
        """
        with self._lock:
            begun_s = time.monotonic()
            self._nvml = self._get_nvml()
            report = self._check(own, with_speeds)
            return replace(report, took_s=time.monotonic() - begun_s)

    def _check(self, own: Collection[int], with_speeds: bool) -> NodeReport:
        collectors = self._others if self._nvml is None else (_GpusNow(self._nvml), *self._others)
        results = Registry(collectors).check_all(QUICK_LIMIT_S)
        troubles = _troubles(results)
        gpus = self._gpus(results)
        if gpus:
            troubles += self._enough(gpus)
            troubles += self._unused(gpus, own)
        speeds: tuple[tuple[str, float, float], ...] = ()
        if self.level == "full" and with_speeds and not any(t.health is Health.UNHEALTHY for t in troubles):
            speeds, found = self._test(gpus)
            troubles += found
        troubles.sort(key=lambda t: -t.health.weight)
        health = troubles[0].health if troubles else Health.HEALTHY
        return NodeReport(self._node, health, tuple(troubles), self._facts(gpus), speeds)

    # -- GPUs ----------------------------------------------------------------------------------------------------------
    def _gpus(self, results: Mapping[str, CheckResult]) -> tuple[GpuReading, ...]:
        """Those that answered; none where the driver did not answer as a whole."""
        if self._nvml is None or results[self._nvml.name].facts.get("gpus") is None:
            return ()
        return tuple(g for g in self._nvml.readings()[0] if g.error is None)

    def _enough(self, gpus: Sequence[GpuReading]) -> list[Trouble]:
        if len(gpus) >= self._ranks or any(g.mig == 1 for g in gpus):
            return []
        text = f"{self._ranks} ranks are to run here, but {len(gpus)} GPUs answer"
        return [Trouble(Health.UNHEALTHY, text, ("look at nvidia-smi and the kernel log for those that are missing",))]

    def _unused(self, gpus: Sequence[GpuReading], own: Collection[int]) -> list[Trouble]:
        """Ranks that were ended give their memory back at once or nearly so: who is late is asked again."""
        assert self._nvml is not None
        until_s = time.monotonic() + FREED_WITHIN_S
        while troubles := memory_in_use(gpus, own, self._root):
            if time.monotonic() >= until_s:
                break
            time.sleep(LOOK_AGAIN_S)
            self._nvml.look_now(START_LIMIT_S)
            gpus = [g for g in self._nvml.readings()[0] if g.error is None]
        return troubles

    def _test(self, gpus: Sequence[GpuReading]) -> tuple[tuple[tuple[str, float, float], ...], list[Trouble]]:
        try:
            found = self._speeds(FULL_LIMIT_S)
        except DeviceTestError as e:
            health = Health.UNHEALTHY if gpus or e.hung else Health.UNKNOWN
            return (), [Trouble(health, str(e), ("run python -m steadyrun.node.devicetest by hand",))]
        labels = {g.uuid: g.label for g in gpus if g.uuid}
        troubles = [
            Trouble(
                Health.UNHEALTHY,
                f"{labels.get(d.uuid, d.name)} gave two different results for the same product",
                ("leave out the node and have the device replaced",),
            )
            for d in found
            if not d.is_exact
        ]
        return tuple((labels.get(d.uuid, d.name), d.tflops, d.copy_gbps) for d in found), troubles

    # -- for the other nodes -------------------------------------------------------------------------------------------
    def _facts(self, gpus: Sequence[GpuReading]) -> dict[str, float | str]:
        facts: dict[str, float | str] = {}
        if gpus:
            facts["model"] = gpus[0].name
            facts["gpus"] = len(gpus)
            widths = [g.pcie_width for g in gpus if g.pcie_width is not None]
            links = [g.links_up for g in gpus if g.links_up is not None]
            if widths:
                facts["pcie_width"] = min(widths)
            if links:
                facts["nvlinks"] = min(links)
        fabric = [p for p in self._nic.readings() if p.port > 0]
        if fabric:
            facts["fabric_ports_up"] = sum(p.is_up for p in fabric)
            rates = [p.rate_gbps for p in fabric if p.is_up and p.rate_gbps is not None]
            if rates:
                facts["fabric_rate_gbps"] = min(rates)
        return facts


def _troubles(results: Mapping[str, CheckResult]) -> list[Trouble]:
    """What the collectors found."""
    out: list[Trouble] = []
    for name, result in results.items():
        for trouble in result.troubles:
            words = trouble.reason if result.health is not Health.UNKNOWN else f"{name}: {trouble.reason}"
            out.append(replace(trouble, reason=words))
    return out


def memory_in_use(gpus: Sequence[GpuReading], own: Collection[int], root: Path = Path("/")) -> list[Trouble]:
    """GPUs that others hold memory of although no rank runs; *own* processes are none of the others."""
    out = []
    for gpu in gpus:
        strangers = [(pid, used) for pid, used in gpu.processes or () if pid not in own]
        total = gpu.memory_total_bytes or 0
        used = gpu.memory_used_bytes or 0
        allowed = max(IN_USE_RATIO * total, IN_USE_BYTES) + sum(b for pid, b in gpu.processes or () if pid in own)
        if not total or used <= allowed:
            continue
        who = ", ".join(f"{pid}{_command(pid, root)}" for pid, _ in sorted(strangers, key=lambda s: -s[1])[:3])
        by = f" by {'process' if len(strangers) == 1 else 'processes'} {who}" if who else ""
        text = f"{gpu.label} has {used / (1 << 30):.1f} of {total / (1 << 30):.0f} GiB in use{by}, though no rank runs"
        advice = ("steadyctl doctor finds what is left of earlier runs; else find out whose it is",)
        out.append(Trouble(Health.UNHEALTHY, text, advice, f"gpu {gpu.pci or gpu.index}"))
    return out


def _command(pid: int, root: Path) -> str:
    try:
        return f" ({(root / 'proc' / str(pid) / 'comm').read_text(errors='replace').strip()[:20]})"
    except OSError:
        return ""  # in a container the driver may tell the host's numbers
