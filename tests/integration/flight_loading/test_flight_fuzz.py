"""Mutated real dumps: no crash, no hang, nothing executed; each ends as a record or as a statement about the file."""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from flight_dumps import mutated

from steadyrun.collectors.flight.folder import load_folder
from steadyrun.collectors.flight.summarise import summarise
from steadyrun.collectors.flight.unpickle import DumpError, load_dump
from steadyrun.core.flight import flight_from_json, flight_to_json

SLOWEST_S = 5.0  # of processor time for one small file, on a busy machine
STATUSES = {"empty", "refused", "unreadable", "ignored"}
WATCHED = ("os.system", "subprocess.Popen", "exec", "os.exec", "import", "shutil.rmtree", "os.remove", "socket.connect")

_seen: list[str] = []
_watching = [False]


def _audit(event: str, arguments: Any) -> None:
    if _watching[0] and event in WATCHED:
        _seen.append(f"{event} {arguments!r}"[:200])


def real_dumps(cases: Path) -> list[bytes]:
    files = sorted(p for p in (cases / "flight_recorder").rglob("*") if p.is_file())
    return [p.read_bytes() for p in files if p.suffix != ".log" and p.name != "meta.json" and p.stat().st_size]


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.deadline(1800)])])
def test_mutated_real_dumps(shared_cases: Path, count: int) -> None:
    seed = 20_260_413 + count
    rng = random.Random(seed)
    files = real_dumps(shared_cases)
    sys.addaudithook(_audit)  # cannot be taken away; silent unless watching
    for data in (b'{"entries": []}', files[0], files[0][:-1]):
        read_as_far_as_it_goes(data)  # imports what is imported at first use
    outcomes: Counter[str] = Counter()
    _watching[0] = True
    try:
        for number in range(count):
            data = mutated(rng.choice(files), files, rng)
            began_s = time.process_time()
            outcome = read_as_far_as_it_goes(data)
            took_s = time.process_time() - began_s
            assert took_s < SLOWEST_S, f"seed {seed}, input {number}: {took_s:.1f} s"
            assert not _seen, f"seed {seed}, input {number}: {_seen}"
            outcomes[outcome] += 1
    finally:
        _watching[0] = False
    assert set(outcomes) <= STATUSES | {"whole", "cut"}
    assert outcomes["cut"] > count / 10
    assert outcomes["whole"] > count / 50
    assert outcomes["refused"] > count / 200


def read_as_far_as_it_goes(data: bytes) -> str:
    try:
        dump = load_dump(data)
    except DumpError as e:
        return e.status if str(e) else "without a text"
    flight = summarise([(dump, None)], 3, None)
    assert flight_from_json(json.loads(json.dumps(flight_to_json(flight)))) == flight
    return "cut" if dump.is_cut else "whole"


def test_a_folder_of_mutated_dumps_says_something_of_each(shared_cases: Path, tmp_path: Path) -> None:
    rng = random.Random(7)
    files = real_dumps(shared_cases)
    for rank in range(60):
        (tmp_path / f"fr_rank_{rank}").write_bytes(mutated(rng.choice(files), files, rng))
    loaded = load_folder([tmp_path], workers=2)
    assert len(loaded.inputs) == 60
    assert all(i.status in STATUSES | {"used", "cut", "recorder_off"} for i in loaded.inputs)
    assert all(i.detail for i in loaded.inputs if i.status != "used")
    assert len(loaded.flights) > 20
