"""Alerts and recording rules for Prometheus: one typed table, from which rule files and runbooks are written."""

from __future__ import annotations

from typing import Final

from steadyrun.collectors.alerts.agent import AGENT_ALERTS
from steadyrun.collectors.alerts.gpu import GPU_ALERTS
from steadyrun.collectors.alerts.host import HOST_ALERTS
from steadyrun.collectors.alerts.job import JOB_ALERTS, RECORDINGS
from steadyrun.collectors.alerts.records import Alert, Recording, Severity
from steadyrun.collectors.alerts.training import TRAINING_ALERTS

__all__ = ["ALERTS", "RECORDINGS", "Alert", "Recording", "Severity"]

ALERTS: Final[tuple[Alert, ...]] = (*AGENT_ALERTS, *JOB_ALERTS, *TRAINING_ALERTS, *GPU_ALERTS, *HOST_ALERTS)
