"""Names, ports and loopback, as rendezvous and process groups use them."""

from __future__ import annotations

import errno
import socket
import time
from typing import Final

from steadyrun.ctl.checks.check import Check, Host, fail, ok, run_all, warn

__all__ = ["checks"]

DEFAULT_PORT: Final = 29500
NAMES_LIMIT_S: Final = 10.0

# A resolver that does not answer blocks for as long as it likes: asked in a process of its own.
_ASK_NAMES: Final = """
import json, socket, time
t = time.monotonic()
fqdn = socket.getfqdn()
out = {"host": socket.gethostname(), "fqdn": fqdn, "addresses": [], "error": ""}
try:
    out["addresses"] = sorted({a[4][0] for a in socket.getaddrinfo(fqdn, 0, type=socket.SOCK_STREAM)})
except OSError as e:
    out["error"] = str(e)
out["took_s"] = time.monotonic() - t
print(json.dumps(out))
"""


def checks(host: Host) -> list[Check]:
    """The group's lines."""
    return run_all(host, (_hostname, _loopback, _ephemeral_ports, _default_port))


def _hostname(host: Host) -> Check:
    """torch takes the agent's full host name as MASTER_ADDR: all nodes must resolve it, this one must own it."""
    answer = host.ask(_ASK_NAMES, NAMES_LIMIT_S)
    if answer.value is None:
        text = f"the resolver gives no answer: {answer.problem}"
        return fail("host name", text, "repair /etc/resolv.conf or /etc/hosts, or give --local-addr")
    told = answer.value
    name = told["fqdn"]
    if told["error"] or not told["addresses"]:
        text = f"{name} cannot be resolved: {told['error'] or 'no address'}"
        return fail("host name", text, f"add it to /etc/hosts, or give --local-addr and --master-addr ({told['host']})")
    own = [a for a in told["addresses"] if _can_bind(a) == ""]
    shown = ", ".join(told["addresses"][:3])
    if not own:
        text = f"{name} is {shown}, which is no address of this machine"
        return fail("host name", text, "repair /etc/hosts or DNS, or give --local-addr")
    if told["took_s"] > 1.0:
        return warn("host name", f"{name} took {told['took_s']:.1f} s to resolve", "a slow resolver delays every start")
    if all(a.startswith("127.") or a == "::1" for a in told["addresses"]):
        text = f"{name} is {shown}: fine for one node"
        return warn("host name", text, "for several nodes it must be reachable from them (--local-addr, or /etc/hosts)")
    return ok("host name", f"{name}, {shown}")


def _can_bind(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as s:
            s.bind((address, 0))
    except OSError as e:
        return e.strerror or str(e)
    return ""


def _loopback(host: Host) -> Check:
    """A connection through ``localhost``, as standalone runs use it."""
    try:
        addresses = sorted({str(a[4][0]) for a in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)})
    except OSError as e:
        return fail("loopback", f"localhost cannot be resolved: {e}", "/etc/hosts needs the line: 127.0.0.1 localhost")
    problems = []
    begun_s = time.monotonic()
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with (
                socket.create_server((address, 0), family=family) as server,
                socket.create_connection(server.getsockname()[:2], timeout=3),
            ):
                pass
        except OSError as e:
            problems.append(f"{address}: {e.strerror or e}")
    took_ms = (time.monotonic() - begun_s) * 1e3
    if len(problems) == len(addresses):
        return fail("loopback", f"no connection through localhost ({'; '.join(problems)})", "ip link set lo up")
    if problems:
        advice = "remove that address from localhost in /etc/hosts: torch may try it first"
        return warn("loopback", f"{'; '.join(problems)} does not work", advice)
    return ok("loopback", f"{', '.join(addresses)} ({took_ms:.1f} ms)")


def _ephemeral_ports(host: Host) -> Check:
    text = (host.read(host.proc / "sys/net/ipv4/ip_local_port_range") or "").split()
    if len(text) != 2:
        return warn("free ports", "the range cannot be read", "mount /proc/sys, or go on: ports are taken as they come")
    low, high = int(text[0]), int(text[1])
    used = _used_ports(host)
    inside = sum(low <= p <= high for p in used)
    said = f"{low} to {high}, {inside} in use"
    if high - low - inside < 1000:
        return fail("free ports", said, "sysctl net.ipv4.ip_local_port_range='32768 60999'")
    if low <= DEFAULT_PORT <= high:
        advice = f"the range holds torch's default port {DEFAULT_PORT}: a client may take it first; start it at 32768"
        return warn("free ports", said, advice)
    return ok("free ports", said)


def _used_ports(host: Host) -> set[int]:
    """Local TCP ports in any state but TIME_WAIT."""
    used: set[int] = set()
    for name in ("tcp", "tcp6"):
        for line in (host.read(host.proc / "net" / name) or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 3 and fields[3] != "06" and ":" in fields[1]:
                used.add(int(fields[1].rpartition(":")[2], 16))
    return used


def _default_port(host: Host) -> Check:
    """torchrun's default for static rendezvous."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("", DEFAULT_PORT))
    except OSError as e:
        if e.errno != errno.EADDRINUSE:
            return warn("default port", f"{DEFAULT_PORT}: {e.strerror}", "give another one with --master-port")
        return warn("default port", f"{DEFAULT_PORT} is in use", "give --standalone, or another --master-port")
    return ok("default port", f"{DEFAULT_PORT} is free")
