"""Reading a fault plan, and when each fault of it strikes. Nothing strikes here but exceptions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadyrun.core.classes import FaultClass
from steadyrun.core.errors import ConfigError
from steadyrun.testing.faults import EXPECTED, KINDS, MARKER, FaultPlan, When, clean_up, expected_class, parse_faults


def strikes(plan: FaultPlan, step: int) -> bool:
    try:
        plan.on_step(step)
    except RuntimeError:
        return True
    return False


def struck_at(plan: FaultPlan, steps: range | list[int]) -> list[int]:
    """The steps after which a ``raise`` struck."""
    return [step for step in steps if strikes(plan, step)]


def test_a_plan_is_read_in_order_with_defaults() -> None:
    kill, hang = parse_faults("kill rank=1 step=20; hang rank=0 step=40 where=collective")
    assert (kill.kind, kill.rank, kill.step, kill.attempt, kill.when) == ("kill", 1, 20, 0, When.STEP)
    assert kill.options == {"signal": "KILL"}
    assert (hang.name, hang.rank, hang.step) == ("hang where=collective", 0, 40)


def test_lines_and_semicolons_separate_but_not_inside_quotes() -> None:
    faults = parse_faults("raise message='a; b' step=1\n\n kill ;; exit code=3")
    assert [f.kind for f in faults] == ["raise", "kill", "exit"]
    assert faults[0].options["message"] == "a; b"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kil rank=1", "did you mean kill?"),
        ("kill stepp=1", "did you mean step?"),
        ("hang where=colective", "did you mean collective?"),
        ("kill signal=TREM", "did you mean TERM?"),
        ("kill rank=one", "allowed: N, any, random:SEED"),
        ("kill rank=random:x", "allowed: N, any, random:SEED"),
        ("kill step=soon", "allowed: N, start"),
        ("kill step=now", "allowed: N, start"),
        ("kill step=-1", "allowed: N, start"),
        ("kill every=0", "from 1 on"),
        ("kill every=5 step=start", "every= needs step=N"),
        ("kill step=1 step=2", "given twice"),
        ("kill step", "is not key=value"),
        ("kill step=", "is not key=value"),
        ("exit code=300", "0 to 255"),
        ("exit code=x", "whole number"),
        ("sleep seconds=long", "number of seconds"),
        ("sleep seconds=nan", "number of seconds"),
        ("oom bytes=0", "is not a size"),
        ("oom bytes=1T", "is not a size"),
        ("raise step=start", "cannot strike before the script"),
        ("hang step=start", "cannot strike before the script"),
        ("hang where=collective seconds=3", "seconds= has no meaning"),
        ("kill 'rank=1", "quote"),
        ("kill attempt=-1", "whole number"),
    ],
)
def test_what_cannot_be_used_is_refused_with_what_can(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_faults(f"sleep step=1; {text}")
    assert says in str(caught.value)
    assert repr(text)[1:-1] in str(caught.value)


def test_every_kind_parses_by_its_name_alone_and_has_an_expectation() -> None:
    for kind, spec in KINDS.items():
        (fault,) = parse_faults(kind)
        assert fault.name in EXPECTED
        for where in spec.wheres:
            (fault,) = parse_faults(f"{kind} where={where}")
            assert expected_class(fault) is spec.wheres[where]


def test_options_change_what_the_verdict_must_say() -> None:
    def expected(text: str) -> FaultClass | None:
        return expected_class(parse_faults(text)[0])

    assert expected("exit") is FaultClass.PROGRAM_ERROR
    assert expected("exit code=0") is None
    assert expected("raise exception=torch.OutOfMemoryError") is FaultClass.OUT_OF_MEMORY
    assert expected("stop") is FaultClass.STOPPED_PROCESS
    assert expected("stop seconds=5") is None
    assert expected("sleep") is None


def test_a_fault_strikes_once_after_its_step() -> None:
    plan = FaultPlan.parse("raise rank=0 step=3", rank=0, attempt=0, world_size=2)
    assert struck_at(plan, range(6)) == [3]
    assert plan.pending == ()


def test_without_a_step_it_strikes_after_the_first_reported_one() -> None:
    assert struck_at(FaultPlan.parse("raise", 0, 0, 1), [17, 18]) == [17]


def test_a_step_that_is_never_reported_itself_is_made_up_for() -> None:
    """Explicit steps may come in tens."""
    assert struck_at(FaultPlan.parse("raise step=15", 0, 0, 1), [10, 20, 30]) == [20]


def test_other_ranks_go_free() -> None:
    plan = FaultPlan.parse("raise rank=1 step=3", rank=0, attempt=0, world_size=2)
    assert plan.pending == ()
    assert struck_at(plan, range(6)) == []


def test_a_restarted_attempt_that_passes_the_step_again_goes_free() -> None:
    assert struck_at(FaultPlan.parse("raise step=3", 0, attempt=1, world_size=1), range(6)) == []
    assert struck_at(FaultPlan.parse("raise step=3 attempt=1", 0, attempt=1, world_size=1), range(6)) == [3]


def test_in_any_attempt_it_strikes_only_those_that_pass_the_step() -> None:
    assert struck_at(FaultPlan.parse("raise step=3 attempt=any", 0, attempt=2, world_size=1), range(6)) == [3]
    assert struck_at(FaultPlan.parse("raise step=3 attempt=any", 0, attempt=2, world_size=1), range(4, 9)) == []


def test_every_repeats_from_the_step_on() -> None:
    assert struck_at(FaultPlan.parse("raise step=2 every=3", 0, 0, 1), range(12)) == [2, 5, 8, 11]
    assert struck_at(FaultPlan.parse("raise every=4", 0, 0, 1), range(9)) == [0, 4, 8]


def test_every_in_a_resumed_attempt_waits_for_the_next_occurrence() -> None:
    plan = FaultPlan.parse("raise step=0 every=10 attempt=any", 0, attempt=1, world_size=1)
    assert struck_at(plan, range(13, 32)) == [20, 30]


@given(seed=st.integers(0, 1000), attempt=st.integers(0, 5), world=st.integers(1, 64))
def test_random_draws_one_and_the_same_rank_everywhere(seed: int, attempt: int, world: int) -> None:
    text = f"raise rank=random:{seed} step=2 attempt=any"
    hit = [r for r in range(world) if struck_at(FaultPlan.parse(text, r, attempt, world), range(5)) == [2]]
    assert len(hit) == 1


def test_random_draws_anew_at_each_occurrence() -> None:
    text = "raise rank=random:7 step=0 every=1"
    by_rank = [struck_at(FaultPlan.parse(text, r, 0, 4), range(40)) for r in range(4)]
    assert sorted(step for steps in by_rank for step in steps) == list(range(40))
    assert all(by_rank)


def test_a_strike_is_noted_before_it_happens(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = FaultPlan.parse("raise step=1", 3, 2, 4, tmp_path)
    assert plan.pending == ()  # attempt 0 only
    plan = FaultPlan.parse("raise step=1 attempt=2 exception=ValueError message=no", 3, 2, 4, tmp_path)
    plan.on_step(0)
    with pytest.raises(ValueError, match="no"):
        plan.on_step(1)
    (line,) = (tmp_path / MARKER).read_text().splitlines()
    record = json.loads(line)
    assert record["schema"] == "steadyrun.fault/1"
    assert (record["kind"], record["rank"], record["attempt"], record["step"]) == ("raise", 3, 2, 1)
    assert "rank 3, attempt 2, after step 1: injected fault: raise" in capfd.readouterr().err


def test_a_fault_that_is_not_possible_says_so_and_training_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = FaultPlan.parse("raise exception=no.such.Error; raise exception=json.loads", 0, 0, 1, tmp_path)
    plan.on_step(0)
    said = capfd.readouterr().err
    assert said.count("NOT injected") == 2
    assert [json.loads(line).get("refused") is not None for line in (tmp_path / MARKER).open()] == [
        False,
        True,
        False,
        True,
    ]


def test_added_faults_strike_after_the_next_step_in_any_attempt() -> None:
    plan = FaultPlan.parse("", rank=1, attempt=3, world_size=2)
    plan.on_step(41)
    assert plan.add("raise") == ("rank 1: raise strikes after step 42, the next one",)
    assert struck_at(plan, [42, 43]) == [42]


def test_added_faults_say_when_they_strike() -> None:
    plan = FaultPlan.parse("", rank=1, attempt=3, world_size=2)
    assert plan.add("raise") == ("rank 1: raise strikes after the next step",)
    assert plan.add("raise step=50", step=44) == ("rank 1: raise strikes after step 50 (now at step 44)",)
    assert "then every 10 steps" in plan.add("raise step=50 every=10")[0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill rank=0", "this is rank 1"),
        ("kill attempt=2", "this is attempt 3"),
        ("kill step=20", "has passed: rank 1 has done step 41"),
        ("kill step=start", "has passed in a running rank"),
        ("raise step=now", "main thread"),
        ("  ", "no fault given"),
    ],
)
def test_added_faults_that_cannot_strike_are_refused(text: str, says: str) -> None:
    plan = FaultPlan.parse("", rank=1, attempt=3, world_size=2)
    plan.on_step(41)
    with pytest.raises(ConfigError, match=says):
        plan.add(text)
    assert plan.pending == ()


def test_clean_up_removes_only_what_a_fault_could_have_made(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    group = tmp_path / "cg" / "steadyrun-fault-77"
    group.mkdir(parents=True)
    records = [
        {"pid": 77, "cgroup": str(group)},
        {"pid": 77, "cgroup": str(precious)},
        {"pid": 77, "files": [str(tmp_path / "torch_77_1_0"), "/dev/shm/../torch_77_1_0", "/dev/shm/other"]},
    ]
    (tmp_path / "torch_77_1_0").touch()
    rank_dir = tmp_path / "attempts" / "0" / "rank_0"
    rank_dir.mkdir(parents=True)
    (rank_dir / MARKER).write_text("".join(json.dumps(r) + "\n" for r in records) + "{cut")
    assert clean_up(tmp_path) == [str(group)]
    assert precious.is_dir()
    assert (tmp_path / "torch_77_1_0").exists()
