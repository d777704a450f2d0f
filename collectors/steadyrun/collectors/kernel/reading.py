"""What one message of the kernel says: a table of what to look for, and the two forms that need more than a row.

The order of the rows counts: the first that fits is it. Each has a needle, looked for before the expression is tried:
most messages of a kernel are nothing to a training job, and a search for a word costs a hundredth of an expression.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from steadyrun.collectors.kernel.xids import OFF_THE_BUS

__all__ = ["NEEDLES", "Value", "normal_pci", "read_message"]

Value = str | int | bool

MAX_TEXT: Final = 4096  # no message that is looked for is longer; bounds every expression
_MAX_NUMBER: Final = 1 << 63
_CODE_DIGITS: Final = 5

_ADDRESS: Final = r"[0-9a-fA-F]{1,8}:[0-9a-fA-F]{1,2}(?::[0-9a-fA-F]{1,2})?(?:\.[0-9a-fA-F])?"
_BDF: Final = r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]"
_COMM: Final = r".{1,64}?"  # 15 characters in the kernel, more for its own threads; may hold blanks, colons, brackets

_ROWS: Final[tuple[tuple[str, str, str], ...]] = (
    # -- memory: both lines of one kill; kernels before 5.0 write only the second
    (
        "oom_kill",
        "oom-kill:",
        r"^oom-kill:constraint=(?P<constraint>\w+),(?:.*?,oom_memcg=(?P<memcg>[^,]*),)?.*?task_memcg=(?P<task_memcg>[^,]*),"
        r"task=(?P<comm>.*),pid=(?P<pid>\d+),uid=(?P<uid>\d+)",
    ),
    (
        "oom_killed",
        "Killed process",
        r"^(?:(?P<scope>Memory cgroup out of memory|Out of memory)(?: \(oom_kill_allocating_task\))?: )?"
        r"Killed process (?P<pid>\d+),? \((?P<comm>.*?)\),?(?: total-vm:\d+kB, anon-rss:(?P<anon_kb>\d+)kB"
        r"| UID|\s*$)",
    ),
    # -- the kernel itself
    ("mce_fatal", "achine check", r"Kernel panic - (?P<why>not syncing: .*?[Mm]achine check.*)"),
    ("panic", "Kernel ", r"^Kernel [Pp]anic - (?P<why>.*)"),
    ("kernel_bug", "BUG at ", r"^kernel BUG at (?P<why>\S+)"),
    ("kernel_bug", "BUG: ", r"^BUG: (?P<why>unable to handle .{0,200}|kernel NULL pointer.{0,200})"),
    ("kernel_bug", "Oops", r"^(?P<why>Oops: .{0,200})"),
    (
        "hung_task",
        "blocked for more than",
        rf"^INFO: task (?P<comm>{_COMM}):(?P<pid>\d+) blocked for more than (?P<seconds>\d+) seconds",
    ),
    (
        "soft_lockup",
        "soft lockup",
        rf"soft lockup - CPU#(?P<cpu>\d+) stuck for (?P<seconds>\d+)s! \[(?P<comm>{_COMM}):(?P<pid>\d+)\]",
    ),
    ("hard_lockup", "LOCKUP on cpu", r"hard LOCKUP on cpu (?P<cpu>\d+)"),
    ("rcu_stall", "stall", r"^(?:rcu: )?(?:INFO: )?rcu\w* (?:self-)?detected (?:expedited )?stalls? on CPU"),
    # -- machine checks and the firmware's reports
    ("edac_uncorrected", "EDAC", r"^EDAC \S*MC(?P<mc>\d+): (?P<n>\d+) UE (?P<what>.*)"),
    ("edac_corrected", "EDAC", r"^EDAC \S*MC(?P<mc>\d+): (?P<n>\d+) CE (?P<what>.*)"),
    (
        "mce_bank",
        "Machine Check",
        r"^mce: \[Hardware Error\]: CPU (?P<cpu>\d+): Machine Check(?: Exception)?: \w+ Bank (?P<bank>\d+)",
    ),
    ("mce", "Machine check", r"^mce: \[Hardware Error\]: Machine check(?P<logged> events logged)?"),
    ("memory_failure", "Memory failure:", r"^Memory failure: 0x(?P<page>[0-9a-f]+): recovery action for (?P<what>.*)"),
    (
        "hardware_error",
        "event severity: ",
        r"\[Hardware Error\]: event severity: (?P<severity>recoverable|fatal|uncorrected)",
    ),
    ("cpu_throttled", "temperature", r"^(?:mce: )?CPU(?P<cpu>\d+): (?P<what>\w+) temperature (?:is )?above threshold"),
    # -- buses
    (
        "pcie_aer",
        "AER: ",
        rf"(?P<dev>{_BDF}): AER: (?:Multiple )?(?P<sev>Corrected|Correctable|Uncorrectable \(Fatal\)"
        r"|Uncorrectable \(Non-Fatal\)|Uncorrected \(Fatal\)|Uncorrected \(Non-Fatal\)|Uncorrected)"
        r"(?: \S+)? error (?:message )?received",
    ),
    ("pcie_dpc", "DPC: containment", rf"(?P<dev>{_BDF}): DPC: containment event"),
    ("pcie_slot", "pciehp: Slot", r"pciehp: Slot\((?P<slot>[^)]{1,40})\): (?P<what>Link Down|Card not present)"),
    # -- GPUs, beside Xid
    ("gpu_init_failed", "RmInitAdapter failed", rf"^NVRM: GPU (?P<pci>{_ADDRESS}): RmInitAdapter failed"),
    ("driver_mismatch", "API mismatch", r"^NVRM: API mismatch: (?P<what>[^\n]*)"),
    ("peermem", "nvidia-peermem", r"^nvidia-peermem \S+ ERROR detected invalid context"),
    # -- network
    (
        "nic_health",
        "health",
        r"^mlx5_core (?P<dev>\S+): (?:poll_health|print_health_info|mlx5_health_try_recover)\S*?:\d+:\(pid \d+\): "
        r"(?P<why>device's health compromised.*|health recovery flow aborted.*)",
    ),
    (
        "nic_power",
        "insufficient power",
        r"^mlx5_core (?P<dev>\S+): .*Detected insufficient power on the PCIe slot \((?P<watts>\d+)W\)",
    ),
    ("nic_hot", "High Temperature", r"Port module event\[error\]: module (?P<module>\d+), .*High Temperature"),
    (
        "nic_register_denied",
        "ACCESS_REG(0x805)",
        r"^(?:mlx5_core (?P<dev>\S+): )?mlx5_cmd_out_err:\d+:\(pid \d+\): ACCESS_REG\(0x805\).*failed",
    ),
    (
        "nic_pcie_limited",
        "available PCIe bandwidth",
        r"^mlx5_core (?P<dev>\S+): (?P<gbps>[\d.]+) Gb/s available PCIe bandwidth, limited by (?P<link>.*? link) at",
    ),
    ("nic_ib_port", "Port: ", r"^mlx5_core (?P<dev>\S+) (?P<ib>\w+): Port: (?P<port>\d+) Link (?P<state>\w+)"),
    (
        "nic_link_down",
        "own",
        rf"(?P<dev>{_BDF}) (?P<ifname>\S+): (?:\w+: \S+ )?(?:NIC )?Link (?:is )?[Dd]own",
    ),
    (
        "nic_link_up",
        "ink ",
        rf"(?P<dev>{_BDF}) (?P<ifname>\S+): (?:\w+: \S+ )?(?:NIC )?Link (?:is )?[Uu]p",
    ),
    ("nic_link_down", "link status", r"^(?P<bond>\S+): \(slave (?P<ifname>\S+)\): link status definitely down"),
    ("nic_link_up", "link status", r"^(?P<bond>\S+): \(slave (?P<ifname>\S+)\): link status definitely up"),
    (
        "nic_tx_timeout",
        "NETDEV WATCHDOG",
        r"NETDEV WATCHDOG: (?P<ifname>\S+) \((?P<driver>[^)]*)\):(?: CPU: \d+:)? "
        r"transmit queue (?P<queue>\d+) timed out",
    ),
    # -- storage
    ("fs_readonly", "read-only", r"^(?P<fs>EXT[234]-fs|XFS|BTRFS)\b.*(?:Remounting filesystem|forced) read-?only"),
    ("fs_readonly", "forced readonly", r"^(?P<fs>BTRFS)\b.*forced readonly"),
    (
        "fs_error",
        "",
        r"^(?P<fs>EXT[234]-fs error|EXT[234]-fs \(\S+\): I/O error while writing superblock"
        r"|XFS \(\S+\): .{0,200}(?:Shutting down filesystem|Corruption of in-memory data|metadata I/O error)"
        r"|BTRFS (?:error|critical) \(device [^)]*\)|Aborting journal on device|F2FS-fs error)",
    ),
    ("io_error", "Buffer I/O error", r"Buffer I/O error on dev(?:ice)? (?P<dev>[^\s,]+), logical block (?P<block>\d+)"),
    ("io_error", "no available path", r"^block (?P<dev>nvme\S+): no available path - failing I/O"),
    (
        "io_error",
        " error, dev ",
        r"(?P<what>I/O|critical \w+|device offline|protection|timeout|recovered) error, dev (?P<dev>[^\s,]+), "
        r"sector (?P<block>\d+)",
    ),
    ("raid_failed", "Disk failure on", r"^md/raid\S*: Disk failure on (?P<dev>[^\s,]+)"),
    ("nvme_timeout", "timeout", r"^nvme (?P<dev>nvme\d+): I/O .*timeout, (?:reset controller|aborting|completion)"),
    ("nvme_disabled", "after reset failure", r"^nvme (?P<dev>nvme\d+): Disabling device after reset failure"),
    ("nvme_disabled", "controller is down", r"^nvme (?P<dev>nvme\d+): controller is down; will reset"),
    ("nfs_timeout", "not responding", r"^nfs: server (?P<server>\S+) not responding"),
    ("nfs_ok", "nfs: server", r"^nfs: server (?P<server>\S+) OK"),
    ("lustre_lost", "was lost", r"^Lustre(?:Error)?: .*?Connection to (?P<target>\S+) .*was lost"),
    ("lustre_evicted", "evicted", r"^Lustre(?:Error)?: .*This client was evicted by (?P<target>[^\s;]+)"),
    ("lustre_ok", "onnection restored", r"^Lustre(?:Error)?: .*?Connection restored to (?P<target>\S+)"),
    ("lustre_error", "LustreError", r"^LustreError: .*?operation (?P<what>\w+)(?: to node \S+)? failed: ?rc = -\d+"),
    ("lustre_error", "LustreError", r"^LustreError: .*?(?P<target>[\w-]+-(?:OST|MDT)[0-9a-f]{4}\S*?):? .*failed"),
    ("ceph_lost", "libceph", r"^libceph: (?P<server>(?:mon|osd|mds)\d+)\b.*(?:session lost|socket closed|down)"),
    ("ceph_lost", "ceph", r"^ceph: .*?(?P<server>mds\d+) (?:hung|caps stale)"),
    ("ceph_ok", "libceph", r"^libceph: (?P<server>(?:mon|osd|mds)\d+)\b.*(?:session established|\bup$)"),
    ("cifs_timeout", "has not responded", r"^CIFS: (?:VFS: )?(?:\\+(?P<server>[^\s\\]+) )?.*has not responded in"),
    # -- processes
    (
        "nccl_segfault",
        "libnccl",
        rf"^(?P<comm>{_COMM})\[(?P<pid>\d+)\]: segfault at .{{0,200}} in (?P<library>libnccl[^\[\s]*)",
    ),
    (
        "segfault",
        "segfault at",
        rf"^(?P<comm>{_COMM})\[(?P<pid>\d+)\]: segfault at [0-9a-f]+ ip .{{0,200}}?"
        r"(?: in (?P<library>[^\[\n]{1,200})\[.*)?$",
    ),
    (
        "trap",
        "traps: ",
        rf"^traps: (?P<comm>{_COMM})\[(?P<pid>\d+)\] (?P<what>general protection|trap [\w ]{{1,40}}?)(?: fault)? ip:"
        r".{0,200}?(?: in (?P<library>[^\[\n]{1,200})\[.*)?$",
    ),
)

_TABLE: Final = tuple((event, needle, re.compile(pattern)) for event, needle, pattern in _ROWS)
_NUMBERS: Final = frozenset(
    {"pid", "uid", "cpu", "seconds", "n", "mc", "watts", "module", "port", "block", "anon_kb", "bank", "queue"}
)
_PAGES: Final = frozenset({"comm", "why", "what", "memcg", "task_memcg", "library", "fs"})  # cut to a length

# What a line must hold to be worth taking apart: for files of millions of lines.
NEEDLES: Final[tuple[str, ...]] = tuple(
    dict.fromkeys(("NVRM:", "SXid", "-fs", "XFS (", "BTRFS", "Aborting journal", *(n for _, n, _ in _ROWS if n)))
)


def read_message(text: str) -> tuple[str, dict[str, Value]] | None:
    """The kind of event and its fields, or None when the message is nothing to a training job. Never raises."""
    text = text[:MAX_TEXT]
    if text.startswith("NVRM:"):
        found = _read_xid(text) or _read_off_the_bus(text)
        if found is not None:
            return found
    elif text.startswith("nvidia-nvswitch"):
        return _read_sxid(text)
    for event, needle, pattern in _TABLE:
        if needle in text and (m := pattern.search(text)):
            fields = _fields(m.groupdict())
            if fields is not None:
                return event, fields
    return None


def _fields(groups: Mapping[str, str | None]) -> dict[str, Value] | None:
    """Numbers as numbers; None where one cannot be: then it is not what it looked like."""
    fields: dict[str, Value] = {}
    for name, value in groups.items():
        if not value:
            continue
        if name in _NUMBERS:
            number = _number(value)
            if number is None:
                return None
            fields[name] = number
        elif name == "pci":
            fields[name] = normal_pci(value)
        else:
            fields[name] = value[:200] if name in _PAGES else value[:100]
    return fields


def _number(text: str, base: int = 10) -> int | None:
    number = int(text, base) if len(text) <= 20 else _MAX_NUMBER
    return number if number < _MAX_NUMBER else None


def normal_pci(address: str) -> str:
    """``dddd:bb:dd`` in lower case, so that the kernel's, NVML's and sysfs's spellings of one device are equal.

    >>> normal_pci("00000000:CB:00.0")
    '0000:cb:00'
    """
    parts = address.strip().lower().removeprefix("pci:").partition(".")[0].split(":")
    if len(parts) == 2:
        parts = ["0", *parts]
    try:
        domain, bus, device = (int(p, 16) for p in parts)
    except ValueError:
        return address
    return f"{domain:04x}:{bus:02x}:{device:02x}"


# -- Xid ---------------------------------------------------------------------------------------------------------------
# The driver's own form: "NVRM: Xid (PCI:%04x:%02x:%02x[ GPU-I:%02u[ GPU-CI:%02u]]): %d, [pid=%s, name=%s, ]%s
# [ caused by previous Xid %d]"; drivers of ten years ago wrote bus and device only.
_XID = re.compile(
    rf"NVRM: Xid \((?:PCI:)?(?P<pci>{_ADDRESS})(?: GPU-I:(?P<gi>\d{{1,3}}))?(?: GPU-CI:(?P<ci>\d{{1,3}}))?\): "
    rf"(?P<code>\d{{1,{_CODE_DIGITS}}})(?!\d)(?:, ?(?P<rest>.*))?",
    re.DOTALL,
)
_WHO = re.compile(
    r"pid=(?P<pid>'?<?[^,\n]{0,32}?>?'?)(?:, name=(?P<comm>[^\n]{0,64}?))?(?:, (?P<rest>.*)|$)", re.DOTALL
)
_CAUSE = re.compile(rf"caused by previous Xid (\d{{1,{_CODE_DIGITS}}})(?!\d)")
_LINK_UNIT = re.compile(
    r"(?P<unit>[A-Z0-9_/]{1,40})\s+(?P<severity>Nonfatal|Fatal)\s+XC[01]\s+i\d+\s+Link\s+(?P<link>-?\d{1,4})\s+"
    r"\((?P<intrinfo>0x[0-9a-fA-F]{1,8}) (?P<error_status>0x[0-9a-fA-F]{1,8})"
)
_RECOVERY = re.compile(
    r"recovery action changed from 0x[0-9a-fA-F]+ \([^)]{0,60}\) to 0x([0-9a-fA-F]{1,4}) \(([^)]{0,60})\)"
)
_RESET = re.compile(r"\bRST: (Yes|No)")
_ON_LINK = re.compile(r"\bon link (\d{1,3})\b")


def _read_xid(text: str) -> tuple[str, dict[str, Value]] | None:
    m = _XID.match(text)
    if m is None:
        return None
    fields: dict[str, Value] = {"xid": int(m["code"]), "pci": normal_pci(m["pci"])}
    fields |= {name: int(m[name]) for name in ("gi", "ci") if m[name]}
    rest = m["rest"] or ""
    if who := _WHO.match(rest):
        pid = who["pid"].strip("'<>")
        if pid.isascii() and pid.isdecimal() and len(pid) <= 10:
            fields["pid"] = int(pid)
        comm = who["comm"] or ""
        if comm and "<unknown>" not in comm:
            fields["comm"] = comm
        rest = who["rest"] or ""
    if cause := _CAUSE.search(rest):
        fields["cause_xid"] = int(cause[1])
    if link := _LINK_UNIT.match(rest):
        fields |= {"unit": link["unit"], "fatal": link["severity"] == "Fatal", "link": int(link["link"])}
        fields |= {name: int(link[name], 16) for name in ("intrinfo", "error_status")}
    elif on := _ON_LINK.search(rest):
        fields["link"] = int(on[1])
    if recovery := _RECOVERY.search(rest):
        fields |= {"action": int(recovery[1], 16), "action_name": recovery[2]}
    if reset := _RESET.search(rest):
        fields["reset_required"] = reset[1] == "Yes"
    return "xid", fields


# New drivers may print a lost GPU without any Xid; what then stands there is read as the code it would have had.
_OFF_BUS = re.compile(
    rf"NVRM: GPU (?P<one>{_ADDRESS}): GPU has fallen off the bus"
    rf"|NVRM: The NVIDIA GPU (?P<two>{_ADDRESS})\b.{{0,400}}?fallen off the bus and is not responding",
    re.DOTALL,
)


def _read_off_the_bus(text: str) -> tuple[str, dict[str, Value]] | None:
    m = _OFF_BUS.match(text)
    if m is None:
        return None
    return "xid", {"xid": OFF_THE_BUS, "pci": normal_pci(m["one"] or m["two"]), "inferred": True}


# -- SXid --------------------------------------------------------------------------------------------------------------
# Lines "…: 22013, Severity 0 Engine instance 60 …" and "…: 22013, Data {0x…}" follow each error: not new ones.
_SXID = re.compile(
    rf"nvidia-(?P<switch>nvswitch\d{{1,4}}): SXid \((?:PCI:)?(?P<pci>{_ADDRESS})\): "
    rf"(?P<code>\d{{1,{_CODE_DIGITS}}})(?!\d), (?!Severity \d|Data \{{)(?P<rest>.*)"
)
_SXID_LINK = re.compile(r"\bLink (\d{1,4})\b")


def _read_sxid(text: str) -> tuple[str, dict[str, Value]] | None:
    m = _SXID.match(text)
    if m is None:
        return None
    rest = m["rest"]
    fields: dict[str, Value] = {"sxid": int(m["code"]), "switch": m["switch"], "pci": normal_pci(m["pci"])}
    if rest.startswith(("Fatal", "Non-fatal")):
        fields["fatal"] = rest.startswith("Fatal")
    if link := _SXID_LINK.search(rest):
        fields["link"] = int(link[1])
    return "sxid", fields
