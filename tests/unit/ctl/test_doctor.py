"""The checks over a machine made of fixture files, and that the real machine can be looked at."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steadyrun.ctl import doctor
from steadyrun.ctl.checks import leftovers, machine, network, software
from steadyrun.ctl.checks.check import Answer, Check, Host, Level, ask_python, fail, ok, run_all, warn
from steadyrun.ctl.console import Console


def host_with(root: Path, answer: Answer | None = None, **files: str) -> Host:
    """A machine below *root*; keys are paths with ``__`` for ``/``."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("proc", "sys", "dev", "shm"):
        (root / name).mkdir(exist_ok=True)
    said = answer if answer is not None else Answer(None, "not asked")
    return Host({}, root / "proc", root / "sys", root / "dev", root / "shm", lambda *a, **k: said)


@pytest.mark.parametrize(
    ("own", "counter", "level", "says"),
    [
        ("4:memory:/box\n0::/", "sys__fs__cgroup__memory__box__memory.oom_control", Level.OK, "version 1"),
        ("0::/box", "sys__fs__cgroup__box__memory.events", Level.OK, "version 2"),
        ("0::/elsewhere", "sys__fs__cgroup__memory.events", Level.OK, "version 2"),
        ("0::/box", "nothing", Level.WARN, "cannot be read"),
        ("3:cpu:/box", "nothing", Level.WARN, "no memory controller"),
    ],
)
def test_memory_counters(tmp_path: Path, own: str, counter: str, level: Level, says: str) -> None:
    host = host_with(tmp_path, proc__self__cgroup=own, **{counter: "low 0\noom_kill 0\n"})
    check = machine._cgroup(host)
    assert check.level is level
    assert says in check.text


def test_memory_limit_is_told(tmp_path: Path) -> None:
    host = host_with(
        tmp_path,
        proc__self__cgroup="0::/box",
        **{"sys__fs__cgroup__box__memory.events": "oom_kill 0", "sys__fs__cgroup__box__memory.max": f"{8 << 30}\n"},
    )
    assert "limit 8.0 GiB" in machine._cgroup(host).text


@pytest.mark.parametrize(
    ("scope", "caps", "level"),
    [("0", 0, Level.OK), ("1", 0, Level.WARN), ("1", 1 << 19, Level.OK), ("3", 1 << 19, Level.WARN)],
)
def test_ptrace_rights(tmp_path: Path, scope: str, caps: int, level: Level) -> None:
    host = host_with(
        tmp_path, proc__sys__kernel__yama__ptrace_scope=scope, proc__self__status=f"CapEff:\t{caps:016x}\n"
    )
    assert machine._ptrace(host).level is level


def test_kernel_log_that_is_not_there(tmp_path: Path) -> None:
    check = machine._kmsg(host_with(tmp_path))
    assert check.level is Level.WARN
    assert "CAP_SYSLOG" in check.advice


def test_a_small_dev_shm_is_a_warning_and_a_missing_one_a_failure(tmp_path: Path) -> None:
    host = host_with(tmp_path)
    (tmp_path / "shm").rmdir()
    assert machine._shm(host).level is Level.FAIL


@pytest.mark.parametrize(
    ("answer", "driver", "level", "says"),
    [
        (Answer({"driver": "550.1", "names": ["H200", "H200"]}), True, Level.OK, "2 x H200"),
        (Answer(None, "no library"), False, Level.OK, "no NVIDIA driver"),
        (Answer(None, "no library (exit status 1)"), True, Level.FAIL, "no library"),
        (Answer(None, "no answer within 20 s", hung=True), True, Level.FAIL, "does not answer"),
    ],
)
def test_nvml(tmp_path: Path, answer: Answer, driver: bool, level: Level, says: str) -> None:
    host = host_with(tmp_path, answer, **({"proc__driver__nvidia__version": "x"} if driver else {}))
    check = machine._nvml(host)
    assert check.level is level
    assert says in check.text


@pytest.mark.parametrize(
    ("told", "level", "says"),
    [
        ({"addresses": ["127.0.0.1"]}, Level.WARN, "for several nodes"),
        ({"addresses": []}, Level.FAIL, "cannot be resolved"),
        ({"addresses": ["192.0.2.77"]}, Level.FAIL, "no address of this machine"),
        ({"addresses": [], "error": "Name or service not known"}, Level.FAIL, "Name or service not known"),
        ({"addresses": ["127.0.0.1"], "took_s": 4.0}, Level.WARN, "4.0 s to resolve"),
    ],
)
def test_host_name(tmp_path: Path, told: dict[str, Any], level: Level, says: str) -> None:
    value = {"host": "box", "fqdn": "box.example", "error": "", "took_s": 0.0, **told}
    check = network._hostname(host_with(tmp_path, Answer(value)))
    assert check.level is level
    assert says in check.text + check.advice


def test_a_resolver_that_hangs_is_a_failure(tmp_path: Path) -> None:
    check = network._hostname(host_with(tmp_path, Answer(None, "no answer within 10 s", hung=True)))
    assert check.level is Level.FAIL


@pytest.mark.parametrize(
    ("text", "level"), [("32768 60999", Level.OK), ("1024 60999", Level.WARN), ("32768 33000", Level.FAIL)]
)
def test_ephemeral_ports(tmp_path: Path, text: str, level: Level) -> None:
    host = host_with(tmp_path, proc__sys__net__ipv4__ip_local_port_range=text)
    assert network._ephemeral_ports(host).level is level


def test_ports_in_use_are_counted_without_time_wait(tmp_path: Path) -> None:
    table = "  sl  local_address rem_address   st\n   0: 0100007F:8001 00000000:0000 0A\n   1: 0100007F:8002 0:0 06\n"
    assert network._used_ports(host_with(tmp_path, proc__net__tcp=table)) == {0x8001}


TORCH = {"version": "2.9.0", "took_s": 3.0, "distributed": True, "backends": ["gloo"], "cuda": None, "problems": []}


@pytest.mark.parametrize(
    ("change", "levels"),
    [
        ({}, [Level.OK, Level.OK]),
        ({"version": "2.5.1"}, [Level.FAIL, Level.OK]),
        ({"version": "2.10.0"}, [Level.OK, Level.OK]),
        ({"distributed": False}, [Level.FAIL, Level.OK]),
        ({"problems": ["torch.distributed.run has no run"]}, [Level.OK, Level.FAIL]),
    ],
)
def test_torch(tmp_path: Path, change: dict[str, Any], levels: list[Level]) -> None:
    found = software._torch(host_with(tmp_path, Answer({**TORCH, **change})))
    assert [c.level for c in found] == levels


def test_a_torch_that_cannot_be_imported_is_one_failure(tmp_path: Path) -> None:
    (check,) = software._torch(host_with(tmp_path, Answer(None, "libcudart.so.12: cannot open (exit status 1)")))
    assert check.level is Level.FAIL
    assert "libcudart" in check.text


def test_a_package_in_the_users_folder_that_hides_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "steadyrun").mkdir()
    assert software._import_location(host_with(tmp_path)).level is not Level.FAIL  # run folders, not a package
    (tmp_path / "steadyrun" / "__init__.py").touch()
    assert software._import_location(host_with(tmp_path)).level is Level.FAIL


def test_orphans_are_those_without_a_launcher_above_them(tmp_path: Path) -> None:
    def process(pid: int, ppid: int, command: str, environ: str) -> None:
        folder = tmp_path / "proc" / str(pid)
        folder.mkdir(parents=True)
        fields = ["S", str(ppid), str(pid), str(pid)] + ["0"] * 16
        (folder / "stat").write_text(f"{pid} (python) {' '.join(fields)}")
        (folder / "cmdline").write_text(command.replace(" ", "\0"))
        (folder / "environ").write_text(environ)

    process(1, 0, "/sbin/init", "")
    process(10, 1, "/venv/bin/python /venv/bin/steadyrun train.py", "")
    process(11, 10, "python -u train.py", "STEADYRUN_RUN=a:n0\0")
    process(12, 11, "python loader", "A=1\0STEADYRUN_RUN=a:n0\0")
    process(20, 1, "python -u train.py", "STEADYRUN_RUN=b:n0\0")
    check = leftovers._processes(host_with(tmp_path))
    assert check.level is Level.WARN
    assert check.text == "1 without their agent: 20 python of b:n0"
    assert check.advice.endswith("kill -9 20")


def test_fix_removes_files_and_cgroups_of_the_dead_only(tmp_path: Path) -> None:
    stat = f"{os.getpid()} (python) S 1 1 1 {'0 ' * 20}"
    host = host_with(tmp_path, proc__self__cgroup="4:memory:/box\n", **{f"proc__{os.getpid()}__stat": stat})
    live, dead = f"torch_{os.getpid()}_1_0", "torch_4194400_1_0"
    for name in (live, dead, "psm_12ab", "precious"):
        (tmp_path / "shm" / name).write_text("x")
    for pid in (os.getpid(), 4194400):
        (tmp_path / "sys/fs/cgroup/memory/box" / f"steadyrun-fault-{pid}").mkdir(parents=True)
    assert leftovers._shm_files(host).text.startswith("1 file(s)")
    assert leftovers._cgroups(host).level is Level.WARN
    removed = leftovers.fix(host)
    assert len(removed) == 2
    assert sorted(p.name for p in (tmp_path / "shm").iterdir()) == sorted([live, "psm_12ab", "precious"])
    assert [p.name for p in (tmp_path / "sys/fs/cgroup/memory/box").iterdir()] == [f"steadyrun-fault-{os.getpid()}"]
    assert leftovers._shm_files(host).level is Level.OK


def test_a_check_that_breaks_does_not_hide_the_others() -> None:
    def breaks(host: Host) -> Check:
        raise RuntimeError("odd machine")

    first, second = run_all(Host(), (breaks, lambda host: ok("next", "fine")))
    assert first.level is Level.WARN
    assert "odd machine" in first.text
    assert second.level is Level.OK


def test_an_interpreter_that_crashes_or_hangs_is_an_answer_too() -> None:
    assert ask_python("print('noise'); print('[1]')", 20).value == [1]
    assert "signal 9" in ask_python("import os; os.kill(os.getpid(), 9)", 20).problem
    assert "ValueError: x" in ask_python("raise ValueError('x')", 20).problem
    begun_s = time.monotonic()
    assert ask_python("import signal; signal.pause()", 0.3).hung
    assert time.monotonic() - begun_s < 10


@pytest.mark.parametrize(("worst", "code"), [(ok, 0), (warn, 0), (fail, 1)])
def test_exit_code_and_json(
    ctl: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, worst: Callable[..., Check], code: int
) -> None:
    bad = worst("thing", "text") if worst is ok else worst("thing", "text", "do it")
    monkeypatch.setattr(doctor, "GROUPS", (("one", lambda host: [ok("fine", "yes"), bad]),))
    result = ctl("doctor", "--json")
    assert result.code == code
    assert (result.json["schema"], result.json["ok"]) == ("steadyrun.doctor/1", code == 0)
    assert result.json["checks"][1] == {
        "group": "one",
        "name": "thing",
        "level": bad.level.value,
        "text": "text",
        "advice": bad.advice or None,
    }


def test_lines_fit_and_carry_their_advice() -> None:
    console = Console(io.StringIO(), {}, 80)
    lines = doctor.render(warn("/dev/shm", "64.0 MiB of 64.0 MiB free " * 4, "docker run --shm-size=8g " * 5), console)
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("  warn  /dev/shm       64.0 MiB")
    assert any(line.strip().startswith("-> docker") for line in lines)


def test_this_machine_can_be_looked_at() -> None:
    """Every check but the one that imports torch, on the real thing: an answer each, none of them broken."""
    host = Host(env=dict(os.environ))
    found = [*machine.checks(host), *network.checks(host), *leftovers.checks(host)]
    assert len(found) >= 20
    assert not [c for c in found if "could not be checked" in c.text]
    assert all(c.advice for c in found if c.level is not Level.OK)
