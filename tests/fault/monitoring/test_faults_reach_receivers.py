"""Real faults of a real job, through a real Prometheus and Alertmanager, to the right receiver, once, and in time."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, JobStarter
from prometheus_servers import SCRAPE_S, Servers, wait_for
from prometheus_tools import tool

from steadyrun.collectors.alerts import ALERTS
from steadyrun.ctl.main import main as steadyctl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deadline(400),
    pytest.mark.leaves("processes", reason="the module's job goes on, with ranks that are started anew"),
    pytest.mark.leaves("fds", reason="the same"),
    pytest.mark.leaves("shm", reason="the same"),
]

RANKS = 3
STEP_LIMIT_S = 6
HELD_S = 4  # instead of minutes
HOLDS_S = {"Straggler": HELD_S, "CheckpointStale": HELD_S}
# From what the agent knows to the webhook: two scrapes, one evaluation, Alertmanager's own wait, and a busy machine.
ARRIVES_S = 2 * SCRAPE_S + SCRAPE_S + 1 + 5
XID = "3,9001,{usec},-;NVRM: Xid (PCI:0000:28:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"


@dataclass
class Watched:
    """A job under watch."""

    job: Job
    servers: Servers
    kernel_log: Path
    checkpoints: Path

    def inject(self, fault: str, rank: int) -> float:
        """Returns when."""
        self.wait_for_training()
        out, err = io.StringIO(), io.StringIO()
        code = steadyctl(["inject", fault, "--rank", str(rank), "--run", str(self.job.folder)], out, err)
        assert code == 0, out.getvalue() + err.getvalue()
        return time.time()

    def wait_for_training(self) -> None:
        """Every rank of the newest attempt does further steps."""

        since_s = time.monotonic()

        def trains() -> bool:
            steps = [self.job.steps(rank=r) for r in range(RANKS)]
            newest = max(e["attempt"] for e in self.job.events("start"))
            fresh = [[e for e in s if e["attempt"] == newest and e["at_s"] > since_s] for s in steps]
            return all(len(s) > 12 for s in fresh)

        self.job.wait_for(trains, 150, "the newest attempt trains")

    def record(self, type_: str, since_unix_s: float, **wanted: Any) -> dict[str, Any]:
        """The first record of that type since then."""

        def found() -> list[dict[str, Any]]:
            return [r for r in self.job.journal(type_, **wanted) if r["at_unix_s"] >= since_unix_s]

        return self.job.wait_for(found, 120, f"a record {type_}")[0]

    def arrives(self, alert: str, receiver: str, since_unix_s: float, known_unix_s: float, **labels: str) -> None:
        """The alert reaches its receiver, once, within the time that it may take from when the agent knew."""
        held_s = HOLDS_S.get(alert, next(a.hold_s for a in ALERTS if a.name == alert))
        notice = self.servers.wait_for_notice(alert, 60 + held_s, since_unix_s, **labels)
        assert notice.receiver == receiver
        assert notice.at_unix_s - known_unix_s <= ARRIVES_S + held_s, (
            f"{alert}: {notice.at_unix_s - known_unix_s:.1f} s"
        )
        same = [n for n in self.servers.receiver.firing(alert, since_unix_s) if n.labels == notice.labels]
        assert len(same) == 1, f"{alert} came {len(same)} times"


@pytest.fixture(scope="module")
def watched(
    start_for_module: JobStarter, tmp_path_factory: pytest.TempPathFactory, checkout: Path
) -> Iterator[Watched]:
    tool("prometheus")
    base = tmp_path_factory.mktemp("watched")
    servers = Servers(base / "servers", checkout / "dashboards/prometheus/alertmanager.yaml", HOLDS_S)
    try:
        kernel_log = base / "kmsg"
        os.mkfifo(kernel_log)
        options = (
            "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=9", f"--ft-step-timeout={STEP_LIMIT_S}",
            f"--ft-metrics-sd-dir={servers.targets}", f"--ft-kernel-log={kernel_log}", "--ft-sdc=10",
        )  # fmt: skip
        job = start_for_module("monitored.py", options, (base / "checkpoints", 0.1, 40))
        job.wait_for_step(60, range(RANKS), deadline_s=120)
        wait_for(lambda: servers.values('sum(up{job="steadyrun"})') == [1.0], 30, "the agent is scraped", servers.logs)
        yield Watched(job, servers, kernel_log, base / "checkpoints")
        job.end()
    finally:
        servers.close()


def test_xid(watched: Watched) -> None:
    at = time.time()
    with watched.kernel_log.open("w") as log:
        log.write(XID.format(usec=int(time.monotonic() * 1e6)))
    known = watched.record("device_event", at)
    watched.arrives("GpuXidHardware", "pager", at, known["at_unix_s"])


def test_kill(watched: Watched) -> None:
    at = watched.inject("kill step=now", 1)
    known = watched.record("incident", at)
    watched.arrives("Incident", "log", at, known["at_unix_s"], **{"class": "dead_process"})
    watched.arrives("Restarted", "log", at, known["at_unix_s"], trigger="exit")


def test_oom(watched: Watched) -> None:
    at = watched.inject("oom", 0)
    known = watched.record("rank_exited", at, rank=0)
    if not watched.job.struck()[-1].get("pids", True):
        pytest.skip("no control group can be made here")
    watched.arrives("OomKill", "tickets", at, known["at_unix_s"])


def test_hang(watched: Watched) -> None:
    before = watched.servers.values('sum(steadyrun_time_seconds_total{phase="productive"})')[0]
    at = watched.inject("hang where=sleep", 2)
    known = watched.record("incident", at)
    watched.arrives("RankHung", "pager", at, known["at_unix_s"], rank="2")
    watched.wait_for_training()
    # Goodput during the hang: nothing was credited as productive that was not.
    told = watched.servers.values('sum(steadyrun_time_seconds_total{phase="hang"})')[0]
    after = watched.servers.values('sum(steadyrun_time_seconds_total{phase="productive"})')[0]
    assert told >= STEP_LIMIT_S - SCRAPE_S
    assert after - before <= time.time() - at - STEP_LIMIT_S + SCRAPE_S


def test_stale_checkpoint(watched: Watched) -> None:
    aside = watched.checkpoints.with_name("aside")
    watched.wait_for_training()
    saves = watched.job.journal
    watched.job.wait_for(lambda: len(saves("checkpoint_committed")) > 2, 120, "an interval between saves is known")
    # The restarts before may have lasted longer than three of these short intervals.
    firing = 'ALERTS{alertname="SteadyrunCheckpointStale"}'
    wait_for(lambda: not watched.servers.values(firing), 90, "a save after the restarts", watched.servers.logs)
    watched.checkpoints.rename(aside)
    watched.checkpoints.write_text("in the way")
    at = time.time()
    try:
        watched.servers.wait_for_notice("CheckpointFailing", 90, at)
        age = "time() - max(steadyrun_checkpoint_last_durable_timestamp_seconds)"
        stale = f"{age} > 3 * max(steadyrun_checkpoint_interval_seconds)"
        wait_for(lambda: watched.servers.values(stale), 120, "the checkpoint is stale", watched.servers.logs)
        watched.arrives("CheckpointStale", "pager", at, time.time())
    finally:
        watched.checkpoints.unlink()
        aside.rename(watched.checkpoints)
    (failing,) = {n.receiver for n in watched.servers.receiver.firing("CheckpointFailing")}
    assert failing == "tickets"


def test_hash_mismatch(watched: Watched) -> None:
    at = watched.inject("flip target=param at=rest", 2)
    known = watched.record("integrity", at, event="found")
    assert known["ranks"] == [2]
    watched.arrives("SdcMismatch", "pager", at, known["at_unix_s"])
    watched.arrives("SdcSuspect", "pager", at, known["at_unix_s"], rank="2")
    watched.wait_for_training()


def test_straggler(watched: Watched) -> None:
    # in units of a step's CPU time, which is a twentieth of a step here
    at = watched.inject("slow where=data percent=1000 how=sleep", 1)
    known = watched.record("straggler", at)
    watched.arrives("Straggler", "tickets", at, known["at_unix_s"], rank="1")


def test_a_job_that_ends_takes_its_target_and_alerts_away(watched: Watched) -> None:
    watched.job.send(signal.SIGTERM)
    watched.job.wait(120)
    wait_for(lambda: not list(watched.servers.targets.glob("*.json")), 20, "the target's file is removed")
    wait_for(lambda: not watched.servers.values("up"), 60, "the target is gone", watched.servers.logs)
    assert not watched.servers.receiver.firing("AgentDown")
