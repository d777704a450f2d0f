"""Prints, as one JSON object, all that a script can find out about how it was started.

Run under plain Python, as a cold rank and as a warm one it must print the same.
"""

import gc
import io
import json
import locale
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
import types

AT_IMPORT = {
    "modules": sorted(m for m in sys.modules if m.partition(".")[0] not in ("steadyrun", "sitecustomize")),
    "name": __name__,
}

OURS = ("STEADYRUN_RUN", "STEADYRUN_FAULTS")  # the variables that stay


class Thing:
    """A class of the main module, for pickle."""

    def __init__(self, value):
        self.value = value


def square(value):
    return value * value


def in_child(connection):
    """What a child process of multiprocessing sees."""
    connection.send(
        {
            "main": sys.modules["__main__"].__name__,
            "main_file": getattr(sys.modules["__main__"], "__file__", None),
            "argv": sys.argv,
            "path": sys.path,
            "env": variables(),
            "meta_path": finders(),
            "square": square(7),
            "function_module": square.__module__,
        }
    )
    connection.close()


def variables():
    return {k: v for k, v in os.environ.items() if k not in OURS}


def first_variables():
    first = {os.fsdecode(k): os.fsdecode(v) for k, v in sys.modules["posix"].environ.items()}
    return sorted((k, v) for k, v in first.items() if k not in OURS)


def c_variables():
    """The environment as C code has it, read by a child that is told nothing else."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 1)
        os.execv("/usr/bin/env", ["env", "-0"])
    os.close(write)
    with os.fdopen(read, errors="surrogateescape", encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return [e for e in text.split("\0") if e and not e.startswith(OURS)]


def finders():
    kept = [f for f in sys.meta_path if not type(f).__module__.startswith("steadyrun.")]
    return [f"{getattr(f, '__module__', '')}.{getattr(f, '__name__', type(f).__name__)}" for f in kept]


def descriptors():
    """Open files by number, without those that only the watchdog knows: they have high numbers, so no other moves."""
    found = {}
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the one that lists
        if "stacks.txt" in target or "steadyrun-board" in target:
            assert int(name) >= 200, (name, target)
            assert not os.get_inheritable(int(name))
            continue
        found[name] = target.partition(":")[0]  # pipes have numbers of their own
    return found


def first_free_descriptors():
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
    for fd in opened:
        os.close(fd)
    return opened


def handlers():
    return {s: repr(signal.getsignal(s)) for s in sorted(signal.valid_signals())}


def mask():
    return sorted(int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, []))


def status():
    wanted = ("Umask", "SigBlk", "SigIgn", "NoNewPrivs", "Threads", "Cpus_allowed_list")
    with open("/proc/self/status") as file:
        return {k: v.strip() for k, v in (line.split(":", 1) for line in file) if k in wanted}


def shown_error():
    """What the excepthook prints for an error with a cause."""
    before, sys.stderr = sys.stderr, io.StringIO()
    try:
        try:
            try:
                square("x")
            except TypeError as e:
                raise ValueError("outer") from e
        except ValueError:
            sys.excepthook(*sys.exc_info())
        return sys.stderr.getvalue()
    finally:
        sys.stderr = before


def children(method):
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=in_child, args=(there,))
    process.start()
    there.close()
    try:
        seen = here.recv()
    except EOFError:  # spawn cannot find the functions of a package's __main__ again, in any Python program
        seen = {}
    process.join()
    seen["exit"] = process.exitcode
    return seen


def pickled():
    data = pickle.dumps([square, Thing(5)])
    function, thing = pickle.loads(data)
    return [function(3), thing.value, type(thing) is Thing, data.hex()]


def main_module():
    module = sys.modules["__main__"]
    spec = module.__spec__
    return {
        "keys": sorted(vars(module)),
        "file": getattr(module, "__file__", None),
        "cached": getattr(module, "__cached__", None),
        "package": module.__package__,
        "loader": type(module.__loader__).__name__,
        "spec": None if spec is None else [spec.name, spec.origin],
        "builtins": isinstance(module.__builtins__, types.ModuleType),
        "is_this": module.square is square,
    }


def facts():
    sys.stdout.flush()
    return {
        "at_import": AT_IMPORT,
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "executable": sys.executable,
        "path": sys.path,
        "path_hooks": [repr(h).partition(" at ")[0] for h in sys.path_hooks],
        "path_cache": sorted(sys.path_importer_cache),
        "meta_path": finders(),
        "flags": {
            k: getattr(sys.flags, k)
            for k in dir(sys.flags)
            if not k.startswith(("_", "n_")) and k.islower() and not callable(getattr(sys.flags, k))
        },
        "warnoptions": sys.warnoptions,
        "xoptions": {k: str(v) for k, v in sys._xoptions.items()},
        "dont_write_bytecode": sys.dont_write_bytecode,
        "pycache_prefix": sys.pycache_prefix,
        "main": main_module(),
        "sitecustomize": "sitecustomize" in sys.modules,
        "cwd": os.getcwd(),
        "env": list(variables().items()),
        "env_bytes": sorted(
            (os.fsdecode(k), os.fsdecode(v))
            for k, v in sys.modules["posix"].environ.items()
            if os.fsdecode(k) not in OURS
        ),
        "c_env": c_variables(),
        "descriptors": descriptors(),
        "first_free": first_free_descriptors(),
        "handlers": handlers(),
        "mask": mask(),
        "threads": [t.name for t in threading.enumerate()],
        "thread_count": len(sys._current_frames()),
        "status": status(),
        "umask": os.umask(os.umask(0)),
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduler": os.sched_getscheduler(0),
        "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
        "session": os.getsid(0) == os.getpid() == os.getpgrp(),
        "command_line": open("/proc/self/cmdline").read().split("\0"),
        "comm": open("/proc/self/comm").read(),
        "stdin": [sys.stdin.encoding, sys.stdin.read()],
        "stdout": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stdout.write_through],
        "stderr": [sys.stderr.encoding, sys.stderr.errors, sys.stderr.line_buffering, sys.stderr.write_through],
        "locale": locale.setlocale(locale.LC_ALL),
        "gc": [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count(), gc.get_debug()],
        "recursion": sys.getrecursionlimit(),
        "switch": sys.getswitchinterval(),
        "trace": [sys.gettrace(), sys.getprofile()],
        "excepthook": shown_error(),
        "frames": [f.name for f in traceback.extract_stack()],
        "last": [hasattr(sys, n) for n in ("last_value", "last_type", "last_traceback")],
        "pickle": pickled(),
        "asserts": __debug__,
        "fork": children("fork"),
        "spawn": children("spawn"),
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
