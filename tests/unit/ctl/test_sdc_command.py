"""``steadyctl sdc`` on run folders with journals made here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from steadyrun.core.journal import Journal
from steadyrun.core.runfolder import RunFolder

T0 = 1_700_000_000.0
Ctl = Callable[..., Any]
SENTENCE = "rank 2 holds wrong bytes in b.weight since step 49 (step 39 agreed): 2 replicas agree against it"
PLACE = {
    "rank": 2,
    "tensor": "b.weight",
    "witness": 0,
    "dtype": "float32",
    "element_bytes": 4,
    "elements": [[100, [9], None, None]],
    "leaves": 1,
    "is_all": True,
    "why_not": "",
}
FOUND = {
    "cause": "device",
    "ranks": [2],
    "nodes": ["n0"],
    "gpus": ["GPU-abc"],
    "tensors": ["b.weight"],
    "places": [PLACE],
    "moment": "after_step",
    "first_bad_step": 49,
    "last_good_step": 39,
    "sentence": SENTENCE,
    "back_to": 39,
    "back_to_is_verified": True,
    "took_s": 0.4,
}


class Run:
    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root)
        self.folder.journal_dir.mkdir(parents=True)
        self.journal = Journal(self.folder.journal("n0"), "n0")

    def write(self, event: str, at_s: float, **fields: Any) -> None:
        self.journal.write("integrity", T0 + at_s, at_s, 0, event=event, **fields)

    def checked(self) -> None:
        rank = {
            "state": "on",
            "checks": 10,
            "lost": 0,
            "interval": 50,
            "cost_s": 0.01,
            "step_s": 0.1,
            "trained_s": 25.0,
        }
        ranks = {str(r): {**rank, "tensors": 12, "size_bytes": 3 << 20} for r in range(3)}
        self.write("checks", 30.0, ranks=ranks)
        self.write("compared", 5.0, checks=4, agreed=4, newest_step=39, last_good=39, ranks=3)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "20260101T000000Z-a")
    yield made
    made.journal.close()


def test_a_healthy_run(run: Run, ctl: Ctl) -> None:
    run.checked()
    result = ctl("sdc", run.folder.root)
    assert result.code == 0, result.err
    assert result.lines[0] == "all replicas agreed in 4 of 4 checks, the newest after step 39"
    assert "1.00 ms" in result.out  # a check
    assert "0.040 %" in result.out


def test_wrong_bytes_are_told_with_place_device_and_what_was_done(run: Run, ctl: Ctl) -> None:
    run.checked()
    run.write("found", 6.0, **FOUND)
    run.write("rolled_back", 7.0, to=39, is_verified=True, incident=1)
    result = ctl("sdc", run.folder.root, width=120)
    assert result.code == 10
    for text in ("incident 1", "rank 2, b.weight (float32): element 100, bit 9", "GPU GPU-abc", "went back to step 39"):
        assert text in result.out, result.out
    told = ctl("sdc", run.folder.root, "--json").json
    assert told["schema"] == "steadyrun.sdc/1"
    assert [f["sentence"] for f in told["found"]] == [SENTENCE]


def test_what_was_only_reported_is_told_so(run: Run, ctl: Ctl) -> None:
    run.checked()
    run.write("found", 6.0, **{**FOUND, "cause": "software", "places": []})
    verdict = {"details": {"sdc": {"sentence": SENTENCE}}}
    run.journal.write("incident", T0 + 6.1, 6.1, 0, number=3, verdict=verdict)
    result = ctl("sdc", run.folder.root, width=120)
    assert result.code == 10
    assert "incident 3" in result.out
    assert "training was not touched" in result.out


def test_a_run_without_checks_is_undecided(run: Run, ctl: Ctl) -> None:
    result = ctl("sdc", run.folder.root)
    assert result.code == 11
    assert "nothing was compared" in result.out


def test_nonsense_in_a_journal_is_survived(run: Run, ctl: Ctl) -> None:
    run.checked()
    run.write("checks", 31.0, ranks={"x": 1, "1": {"checks": "many"}})
    run.write("found", 6.0, sentence=None, places=[1, {"elements": [5]}], gpus=7)
    run.write("verified", 6.0)
    run.write("out_of_line", 6.0, step="x")
    run.write("spike", 6.0)
    run.write("cured", 6.0, to=3)
    assert ctl("sdc", run.folder.root).code == 10


def test_losses_out_of_line_and_what_was_done_are_told(run: Run, ctl: Ctl) -> None:
    run.checked()
    for step in (140, 141, 142):
        run.write("out_of_line", 20.0, rank=0, step=step, what="loss", value=9.0, usual=1.0, z=30.0)
    run.write("spike", 21.0, first=140, last=142, text="loss 9")
    told = ctl("sdc", run.folder.root, width=120).out
    assert "loss not finite or far above the usual after steps 140, 141, 142" in told
    assert "loss spike, steps 140 to 142: training went on" in told
    run.write("cured", 22.0, to=39, first_batch=40, end_batch=144, text="loss 9")
    told = ctl("sdc", run.folder.root, width=120).out
    assert "training went back to step 39 and left out batches 40 to 143" in " ".join(told.split())


def replaying(rank: int, of: int, **told: Any) -> dict[str, Any]:
    replay = {"state": "on", "of": of, "clean": 4, "newest_step": 39, "differed": 0, "interval": 200, "cost_s": 0.02}
    return {"state": "on", "checks": 10, "cost_s": 0.01, "trained_s": 40.0, "replay": {**replay, **told}}


def test_replays_are_told_of(run: Run, ctl: Ctl) -> None:
    run.write("checks", 30.0, ranks={str(r): replaying(r, (r + 1) % 3, cost_s=0.02 * (1 + r)) for r in range(3)})
    result = ctl("sdc", run.folder.root)
    assert result.code == 0, result.err
    told = (
        "microbatches of each other that ranks have computed again, with the same gradients: 12, the newest at step 39"
    )
    assert told in result.lines
    assert "  every 200 steps, 0.150 % of the time on rank 2" in result.lines


def test_replays_that_differed_or_are_off_are_told_of(run: Run, ctl: Ctl) -> None:
    ranks = {"0": replaying(0, 0, differed=2), "1": replaying(1, 1, state="off", clean=0, newest_step=None)}
    run.write("checks", 30.0, ranks=ranks)
    lines = ctl("sdc", run.folder.root).lines
    assert any(line.startswith("microbatches of their own (one rank per node)") for line in lines)
    assert "  with others: rank 0 2" in lines
    assert "  off on rank 1" in lines
