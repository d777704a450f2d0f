"""Jobs for fault tests; a job that ended by itself must have left nothing, and one that did not is ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import JobStarter


@pytest.fixture
def start(tmp_path: Path) -> Iterator[JobStarter]:
    """Starts jobs of one test."""
    yield from run_jobs(tmp_path)


@pytest.fixture(scope="module")
def start_for_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobStarter]:
    """Starts jobs that several tests of a module look at."""
    yield from run_jobs(tmp_path_factory.mktemp("jobs"))


def run_jobs(base: Path) -> Iterator[JobStarter]:
    starter = JobStarter(base)
    try:
        yield starter
        ended = [j for j in starter.jobs if j.process.poll() is not None]
        left = {j.output_path.parent.name: found for j in ended if (found := j.left_behind())}
        assert not left, left
    finally:
        starter.close()
