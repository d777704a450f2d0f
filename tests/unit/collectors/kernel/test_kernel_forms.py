"""One Xid, written down in every form a kernel log is found in."""

from __future__ import annotations

import json

import pytest

from steadyrun.collectors.kernel.events import Assembler, KernelEvent, read_text
from steadyrun.collectors.kernel.lines import read_kmsg, read_line

XID = "NVRM: Xid (PCI:0000:cb:00): 79, pid=1234, name=python3, GPU has fallen off the bus."
OFF_THE_BUS = (
    "NVRM: The NVIDIA GPU 0000:b3:00.0",
    "NVRM: (PCI ID: 10de:26b5) installed in this system has",
    "NVRM: fallen off the bus and is not responding to commands.",
)


def events_of(text: str, **options: bool) -> list[KernelEvent]:
    return list(read_text(text.split("\n"), Assembler(**options)))


def journal(**fields: object) -> str:
    entry = {"MESSAGE": XID, "_TRANSPORT": "kernel", "PRIORITY": "3", "SYSLOG_FACILITY": "0", **fields}
    return json.dumps({k: v for k, v in entry.items() if v is not None})


FORMS = {
    "bare": XID,
    "kmsg": f"3,812,680111646286,-;{XID}",
    "kmsg with its caller": f"3,812,680111646286,-,caller=T1234;{XID}",
    "dmesg": f"[680111.646286] {XID}",
    "dmesg, padded": f"[  111.646286] {XID}",
    "dmesg -T": f"[Fri Aug 30 11:43:09 2024] {XID}",
    "dmesg -d": f"[680111.646286 <    0.000316>] {XID}",
    "dmesg -e": f"[  +0.000316] {XID}",
    "dmesg --time-format iso": f"2024-08-30T11:43:09,050705+00:00 {XID}",
    "dmesg -x": f"kern  :err   : [680111.646286] {XID}",
    "dmesg -r": f"<3>[680111.646286] {XID}",
    "dmesg, coloured": f"\x1b[32m[680111.646286] \x1b[0m\x1b[33mNVRM: \x1b[0m{XID[6:]}",
    "dmesg --json": json.dumps({"pri": 3, "time": 680111.646286, "msg": XID}),
    "printk with its caller": f"[680111.646286] [ T1234] {XID}",
    "syslog": f"May 19 07:08:57 ip-26-0-146-100 kernel: [680111.646286] {XID}",
    "syslog, day padded": f"May  9 07:08:57 host kernel: {XID}",
    "syslog with microseconds": f"Aug 30 06:58:55.050705 host kernel: {XID}",
    "syslog without a host": f"Feb 23 03:28:16  kernel: {XID}",
    "RFC 5424": f"<3>1 2024-08-30T11:43:09.003Z host kernel - - - {XID}",
    "journalctl": f"Aug 30 11:43:09 host kernel: {XID}",
    "journalctl -o short-iso": f"2024-08-30T11:43:09+0000 host kernel: {XID}",
    "journalctl -o short-full": f"Fri 2024-08-30 11:43:09 UTC host kernel: {XID}",
    "journalctl -o short-monotonic": f"[680111.646286] host kernel: {XID}",
    "journalctl -o short-unix": f"1725018189.050705 host kernel: {XID}",
    "journalctl -o json": journal(__REALTIME_TIMESTAMP="1725018189050705", __MONOTONIC_TIMESTAMP="680111646286"),
    "journalctl -o json, bytes": journal(MESSAGE=list(XID.encode())),
    "journalctl -o json-seq": "\x1e" + journal(),
    "journal without a facility": journal(SYSLOG_FACILITY=None),
    "pasted, indented": f"    {XID}",
    "Windows line end": f"[680111.646286] {XID}\r",
}


@pytest.mark.parametrize("line", FORMS.values(), ids=FORMS.keys())
def test_an_xid_is_read_in_every_form(line: str) -> None:
    (event,) = events_of(line)
    assert event.event == "xid"
    assert dict(event.fields) == {"xid": 79, "pci": "0000:cb:00", "pid": 1234, "comm": "python3"}
    assert event.text == XID
    assert event.line_number == 1


FOREIGN = {
    "kmsg, written by a user": f"11,812,680111646286,-;{XID}",
    "dmesg -x, written by a user": f"user  :err   : [680111.646286] {XID}",
    "dmesg -r, written by a user": f"<11>[680111.646286] {XID}",
    "syslog of a program": f"May 19 07:08:57 host python3[77]: {XID}",
    "syslog of a program that calls itself so": f"May 19 07:08:57 host my-kernel: {XID}",
    "journal of a program": journal(_TRANSPORT="stdout", SYSLOG_FACILITY="3"),
    "journal, written into /dev/kmsg": journal(SYSLOG_FACILITY="1"),
    "journal of a program, no facility": journal(_TRANSPORT="stdout", SYSLOG_FACILITY=None),
    "RFC 5424 of a program": f"<11>1 2024-08-30T11:43:09.003Z host python3 77 - - {XID}",
}


@pytest.mark.parametrize("line", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_a_program_wrote_is_not_the_kernels_word(line: str) -> None:
    assembler = Assembler()
    assert list(read_text([line], assembler)) == []
    assert assembler.foreign == 1
    assert len(events_of(line, any_facility=True)) == 1


def test_a_message_that_merely_quotes_an_xid_is_no_event() -> None:
    assert events_of(f"systemd[1]: unit said: {XID}") == []
    assert events_of(f"[1.0] audit: {XID}") == []


@pytest.mark.parametrize(
    "text",
    [
        "\n               ".join(OFF_THE_BUS),
        "\n".join(OFF_THE_BUS),
        "\n".join(f"[ 1843.43966{i}] {line}" for i, line in enumerate(OFF_THE_BUS)),
        "\n".join(f"May 19 07:08:57 host kernel: {line}" for line in OFF_THE_BUS),
        "3,5,12,-;" + "\\x0a".join(OFF_THE_BUS),
        "May 19 07:08:57 host kernel: " + "#012".join(OFF_THE_BUS),
        "[ 1843.439660] " + "\n                ".join(OFF_THE_BUS) + "\n[ 1843.5] usb 1-1: new device",
        f"3,5,12,-;{OFF_THE_BUS[0]}\n" + "\n".join(f"3,{6 + i},12,+;{t}" for i, t in enumerate(OFF_THE_BUS[1:])),
    ],
    ids=["indented", "bare", "each stamped", "each tagged", "escaped", "rsyslog", "then another", "fragments"],
)
def test_a_message_of_three_lines_is_one_event(text: str) -> None:
    (event,) = events_of(text)
    assert dict(event.fields) == {"xid": 79, "pci": "0000:b3:00", "inferred": True}
    assert event.line_number == 1


def test_a_message_that_does_not_go_on_is_not_joined_with_others() -> None:
    text = f"[1.0] {OFF_THE_BUS[0]}\n[1.1] usb 1-1: new device\n[1.2] {OFF_THE_BUS[2]}"
    assert events_of(text) == []


def test_an_indented_log_has_an_event_for_each_of_its_lines() -> None:
    lines = [f"  NVRM: Xid (PCI:0000:0{i}:00): 13, pid=1, name=a, x" for i in range(4)]
    events = events_of("\n".join(lines))
    assert [e.fields["pci"] for e in events] == [f"0000:0{i}:00" for i in range(4)]
    assert [e.line_number for e in events] == [1, 2, 3, 4]


def test_properties_of_a_record_are_no_part_of_its_message() -> None:
    text = f"3,5,12,-;{XID}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:cb:00.0\n6,6,13,-;usb 1-1: new device"
    (event,) = events_of(text)
    assert event.text == XID
    line = read_kmsg(f"3,5,12,-;{XID}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:cb:00.0\n".encode())
    assert line.text == XID
    assert line.device == "+pci:0000:cb:00.0"


def test_a_record_tells_level_facility_time_and_number() -> None:
    line = read_kmsg(b"11,812,680111646286,c;hello\\x09you\\x0athere \\xc3\\xa9\n")
    assert (line.level, line.facility, line.sequence, line.is_fragment) == (3, 1, 812, True)
    assert line.at_s == pytest.approx(680111.646286)
    assert line.text == "hello\tyou\nthere é"


@pytest.mark.parametrize(
    ("line", "unix_s"),
    [
        ("2024-08-30T11:43:09,050705+00:00 x", 1725018189.050705),
        ("2024-08-30T13:43:09+0200 host kernel: x", 1725018189.0),
        ("2024-08-30T06:13:09-05:30 host kernel: x", 1725018189.0),
        ("Fri 2024-08-30 11:43:09 UTC host kernel: x", 1725018189.0),
        ("1725018189.050705 host kernel: x", 1725018189.050705),
        ("<3>1 2024-08-30T11:43:09.25Z host kernel - - - x", 1725018189.25),
    ],
)
def test_written_times_become_wall_time(line: str, unix_s: float) -> None:
    read = read_line(line)
    assert read.text == "x"
    assert read.at_unix_s() == pytest.approx(unix_s)


def test_local_times_are_this_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    def local_s(text: str) -> float:
        return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M:%S"))

    assert read_line("[Fri Aug 30 11:43:09 2024] x").at_unix_s() == local_s("2024-08-30 11:43:09")
    now_s = local_s("2026-03-01 12:00:00")
    monkeypatch.setattr(time, "time", lambda: now_s)
    assert read_line("Feb 28 23:00:00 host kernel: x").at_unix_s() == local_s("2026-02-28 23:00:00")
    assert read_line("Dec 31 23:00:00 host kernel: x").at_unix_s() == local_s("2025-12-31 23:00:00")
    assert read_line("Feb 31 23:00:00 host kernel: x").at_unix_s() is not None  # mktime takes it for March


@pytest.mark.parametrize("stamp", ["[Fri Foo 30 11:43:09 2024]", "[99]", "[...]", "[ T12]"])
def test_what_is_no_time_is_no_time(stamp: str) -> None:
    read = read_line(f"{stamp} x")
    assert read.text == "x"
    assert read.at_unix_s() is None


def test_brackets_of_the_message_stay() -> None:
    assert read_line("[12.5] [drm] ready").text == "[drm] ready"
    assert read_line("[12.5] mce: [Hardware Error]: x").text == "mce: [Hardware Error]: x"
