"""Kernel facilities, rights, memory, limits, clock and devices of this machine."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import shutil
import time
from pathlib import Path
from typing import Final

from steadyrun.ctl.checks.check import Check, Host, fail, ok, run_all, warn
from steadyrun.ctl.console import duration, size

__all__ = ["checks"]

GOOD_CLOCKS: Final = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter")
CAP_SYS_NICE: Final = 23
NVML_LIMIT_S: Final = 20.0
SMALL_SHM_BYTES: Final = 1 << 30

_ASK_NVML: Final = """
import json
import pynvml
pynvml.nvmlInit()
def text(v): return v.decode() if isinstance(v, bytes) else v
n = pynvml.nvmlDeviceGetCount()
names = [text(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i))) for i in range(n)]
print(json.dumps({"driver": text(pynvml.nvmlSystemGetDriverVersion()), "names": names}))
"""

# A grandchild whose parent ends at once: somebody (a subreaper or process 1) must take it over and reap it.
_ASK_REAPING: Final = """
import json, os, time
r, w = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.close(r); os.write(w, str(os.getpid()).encode()); os._exit(0)
    os._exit(0)
os.wait(); os.close(w)
pid = int(os.read(r, 20))
until = time.monotonic() + 2
while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
    time.sleep(0.02)
print(json.dumps(not os.path.exists(f"/proc/{pid}")))
"""


def checks(host: Host) -> list[Check]:
    """The group's lines."""
    return run_all(
        host,
        (
            _kernel,
            _run_folder,
            _shm,
            _cgroup,
            _kmsg,
            _ptrace,
            _nice,
            _open_files,
            _core_dumps,
            _locked_memory,
            _clock,
            _reaping,
            _nvml,
        ),
    )


def _kernel(host: Host) -> Check:
    """The calls that the agent cannot do without."""
    missing = []
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as e:
        missing.append(f"pidfd_open ({e})")
    try:
        os.close(os.memfd_create("steadyctl", os.MFD_CLOEXEC))
    except (AttributeError, OSError) as e:
        missing.append(f"memfd_create ({e})")
    reaper = ctypes.c_int(0)
    if ctypes.CDLL(None, use_errno=True).prctl(37, ctypes.byref(reaper), 0, 0, 0) != 0:  # PR_GET_CHILD_SUBREAPER
        missing.append(f"prctl ({os.strerror(ctypes.get_errno())})")
    name = f"Linux {os.uname().release}"
    if missing:
        return fail("kernel", f"{name}: no {', '.join(missing)}", "Linux 5.4 or newer, and no seccomp filter on these")
    return ok("kernel", f"{name}: pidfd, memfd and subreaper work")


def _run_folder(host: Host) -> Check:
    """Where the run folder goes by default."""
    folder = Path.cwd() / "steadyrun"
    at = folder if folder.is_dir() else folder.parent
    if not os.access(at, os.W_OK | os.X_OK):
        return warn("run folder", f"{at} cannot be written", "choose a place with --ft-run-dir; else it is temporary")
    free = shutil.disk_usage(at).free
    text = f"{folder}, {size(free)} free"
    if free < 1 << 30:
        return warn("run folder", text, "free space: logs, journals and evidence go there (--ft-run-dir)")
    return ok("run folder", text)


def _shm(host: Host) -> Check:
    try:
        status = os.statvfs(host.shm)
    except OSError as e:
        return fail("/dev/shm", f"not usable: {e.strerror}", "mount a tmpfs there: data loaders and NCCL need it")
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{size(free)} of {size(total)} free, {status.f_favail} inodes free"
    if not os.access(host.shm, os.W_OK):
        return fail("/dev/shm", f"{text}; not writable", "mode 1777 is usual")
    if total and (free < total // 20 or status.f_favail < 100):
        return fail(
            "/dev/shm", text, "look for files of dead processes there; steadyctl doctor --fix removes known ones"
        )
    if total < SMALL_SHM_BYTES:
        advice = "docker run --shm-size=8g, or an emptyDir with medium Memory: data loader workers need room"
        return warn("/dev/shm", text, advice)
    return ok("/dev/shm", text)


def _cgroup(host: Host) -> Check:
    """Whether a kill for lack of memory can be told from other SIGKILLs."""
    own = host.read(host.proc / "self" / "cgroup")
    if own is None:
        return warn("memory cgroup", "/proc/self/cgroup cannot be read", "out-of-memory kills are told by the log only")
    for line in own.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            base, counter, version = host.sys / "fs/cgroup/memory", "memory.oom_control", 1
        elif not controllers and len(own.splitlines()) == 1:
            base, counter, version = host.sys / "fs/cgroup", "memory.events", 2
        else:
            continue
        for folder in (base / path.lstrip("/"), base):
            text = host.read(folder / counter)
            if text is not None and "oom_kill " in text:
                return ok(
                    "memory cgroup", f"version {version}, {counter} can be read{_memory_limit(host, folder, version)}"
                )
        advice = "the kernel log then decides; mount cgroups into the container to have both"
        return warn("memory cgroup", f"version {version}, {counter} of {path} cannot be read", advice)
    return warn("memory cgroup", "no memory controller", "out-of-memory kills are told by the kernel log only")


def _memory_limit(host: Host, folder: Path, version: int) -> str:
    text = (host.read(folder / ("memory.limit_in_bytes" if version == 1 else "memory.max")) or "").strip()
    return f"; limit {size(int(text))}" if text.isdecimal() and int(text) < 1 << 60 else "; no limit"


def _kmsg(host: Host) -> Check:
    try:
        fd = os.open(host.dev / "kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        why = "no right" if e.errno in (errno.EPERM, errno.EACCES) else e.strerror
        advice = (
            "run as root, grant CAP_SYSLOG, or sysctl kernel.dmesg_restrict=0: Xid, OOM and disk messages are missing"
        )
        return warn("kernel log", f"/dev/kmsg cannot be read: {why}", advice)
    try:
        os.read(fd, 8192)
    except BlockingIOError:
        pass
    except BrokenPipeError:
        pass  # messages were overwritten while we looked: it can be read
    except OSError as e:
        return warn("kernel log", f"/dev/kmsg cannot be read: {e.strerror}", "run as root or grant CAP_SYSLOG")
    finally:
        os.close(fd)
    return ok("kernel log", "/dev/kmsg can be read")


def _capabilities(host: Host) -> int:
    for line in (host.read(host.proc / "self" / "status") or "").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _ptrace(host: Host) -> Check:
    scope = (host.read(host.proc / "sys/kernel/yama/ptrace_scope") or "0").strip()
    may = bool(_capabilities(host) >> 19 & 1)  # CAP_SYS_PTRACE
    if scope == "0" or (may and scope != "3"):
        return ok("ptrace", "py-spy may look at ranks" + (" (CAP_SYS_PTRACE)" if may and scope != "0" else ""))
    advice = "sysctl kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE; stacks come from faulthandler without it"
    return warn("ptrace", f"restricted (yama ptrace_scope {scope}): py-spy cannot look at ranks", advice)


def _nice(host: Host) -> Check:
    """Standbys start at low priority; raising it again needs a right."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NICE)
    if _capabilities(host) >> CAP_SYS_NICE & 1:
        return ok("priority", "standbys may start at low priority (CAP_SYS_NICE)")
    if soft == resource.RLIM_INFINITY or soft >= 20:
        return ok("priority", f"standbys may start at low priority (nice limit {soft})")
    advice = "grant CAP_SYS_NICE or ulimit -e 20; without it standbys start at normal priority"
    return warn("priority", "a lowered priority could not be raised again", advice)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _open_files(host: Host) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)} (hard limit {_limit(hard)})"
    if soft != resource.RLIM_INFINITY and soft < 4096:
        return warn("open files", text, "ulimit -n 65536: each pair of ranks and each data loader worker needs some")
    return ok("open files", text)


def _core_dumps(host: Host) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_CORE)
    pattern = (host.read(host.proc / "sys/kernel/core_pattern") or "").strip()
    if soft == 0:
        return ok("core dumps", "off; a crash leaves its Python stack only (ulimit -c unlimited for more)")
    return ok("core dumps", f"{_limit(soft)}, to {pattern or '?'}")


def _locked_memory(host: Host) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = "unlimited" if soft == resource.RLIM_INFINITY else size(soft)
    infiniband = host.sys / "class" / "infiniband"
    if soft != resource.RLIM_INFINITY and infiniband.is_dir() and any(infiniband.iterdir()):
        return warn(
            "locked memory", f"{text}, and there is InfiniBand", "ulimit -l unlimited: RDMA registers its buffers"
        )
    return ok("locked memory", text)


def _clock(host: Host) -> Check:
    name = (host.read(host.sys / "devices/system/clocksource/clocksource0/current_clocksource") or "unknown").strip()
    begun = time.perf_counter_ns()
    for _ in range(2000):
        time.monotonic_ns()
    cost_ns = (time.perf_counter_ns() - begun) / 2000
    text = f"{name}, {cost_ns:.0f} ns to read"
    if name not in GOOD_CLOCKS and cost_ns > 300:
        return warn("clock", text, "reading the time is a system call here: sections cost more (clocksource=tsc)")
    return ok("clock", text)


def _reaping(host: Host) -> Check:
    first = (host.read(host.proc / "1" / "comm") or "?").strip()
    answer = host.ask(_ASK_REAPING, 10.0)
    if answer.value is None:
        return warn("process 1", f"{first}; orphans could not be tested: {answer.problem}", "look at that error first")
    if not answer.value:
        advice = "docker run --init, or shareProcessNamespace: zombies pile up outside runs"
        return warn("process 1", f"{first} does not reap orphans", advice)
    return ok("process 1", f"{first} reaps orphans")


def _nvml(host: Host) -> Check:
    has_driver = (host.proc / "driver/nvidia/version").exists() or (host.dev / "nvidiactl").exists()
    answer = host.ask(_ASK_NVML, NVML_LIMIT_S)
    if answer.value is not None:
        names = answer.value["names"]
        kinds = ", ".join(f"{names.count(n)} x {n}" for n in sorted(set(names))) or "no device"
        return ok("NVML", f"driver {answer.value['driver']}, {kinds}")
    if not has_driver:
        return ok("NVML", "no NVIDIA driver: this machine trains on its CPUs")
    if answer.hung:
        return fail(
            "NVML",
            f"the driver does not answer within {duration(NVML_LIMIT_S)}",
            "look at dmesg for Xid; reset or reboot",
        )
    return fail(
        "NVML", f"there is a driver, but {answer.problem}", "nvidia-smi shows more; the library must match the driver"
    )
