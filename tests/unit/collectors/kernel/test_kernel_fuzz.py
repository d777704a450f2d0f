"""Logs are written by whoever can: nothing in them may raise, cost without bound, or make up a code."""

from __future__ import annotations

import json
import time

from hypothesis import example, given, settings
from hypothesis import strategies as st

from steadyrun.collectors.kernel.events import Folding, read_text
from steadyrun.collectors.kernel.ledger import Ledger
from steadyrun.collectors.kernel.lines import read_kmsg, read_line
from steadyrun.collectors.kernel.reading import read_message

PIECES = [
    "NVRM: Xid (PCI:0000:cb:00): ", "NVRM: The NVIDIA GPU 0000:b3:00.0",
    "fallen off the bus and is not responding",
    "79", "pid=", "name=", "'<unknown>'", ", ", "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): ", "Fatal, Link ",
    "oom-kill:constraint=CONSTRAINT_MEMCG,", "oom_memcg=", "task_memcg=", "task=",
    "pid=1", "uid=0", "global_oom,",
    "Killed process 7 (", ") total-vm:1kB, anon-rss:2kB", "INFO: task ",
    ":7 blocked for more than ", " seconds",
    "soft lockup - CPU#0 stuck for 1s! [", "EDAC MC0: 1 UE ", "0000:00:03.0: AER: ",
    "mlx5_core 0000:0d:00.0 ",
    "Link down", "nfs: server a not responding", "Lustre: ", "Connection to ",
    " was lost", "segfault at 0 ip 7f ",
    " in libnccl.so[", "[12.5] ", "[Fri Aug 30 11:43:09 2024] ",
    "May 19 07:08:57 host kernel: ", "3,5,12,-;", "3,5,12,c;",
    "<3>", "<11>1 2024-08-30T11:43:09Z h kernel - - - ", "\\x0a", "\\xff", "#012", " ",
    "\t", "\n", "\0", "\x1e", "\x1b[0m",
    '{"MESSAGE": ', '"}', "[", "]", "(", ")", "9" * 30, "a" * 50,
]  # fmt: skip
soup = st.lists(st.sampled_from(PIECES) | st.text(max_size=20), max_size=25).map("".join)


@settings(max_examples=400, deadline=None)
@given(soup | st.text(max_size=300))
@example("{" * 5000)
@example('{"MESSAGE": [1, "a", -5, 99999]}')
@example('{"MESSAGE": {"a": 1}, "PRIORITY": "x", "__REALTIME_TIMESTAMP": "-1"}')
@example("3,99999999999999999999,1,-;x")
def test_any_text_gives_events_that_can_be_written_down(text: str) -> None:
    folding, ledger = Folding(), Ledger()
    for event in read_text(text.split("\n")):
        value = json.loads(json.dumps(event.to_json()))
        assert value["event"]
        assert event.title
        assert event.key
        if event.event == "xid":
            assert 0 <= value["xid"] <= 99999
        if (fresh := folding.take(event, 0.0)) is not None:
            ledger.add(fresh, 0.0)
    ledger.troubles(1.0)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_record(record: bytes) -> None:
    line = read_kmsg(record)
    line.at_unix_s()
    read_message(line.text)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(PIECES), st.sampled_from(PIECES), st.sampled_from(PIECES), st.integers(50, 2000))
def test_long_repetitions_cost_little(head: str, a: str, b: str, times: int) -> None:
    """No expression may take more than linear time by much: 4,096 characters are the longest text that is read."""
    text = head + (a + b) * times
    begun_s = time.thread_time()
    for line in text.split("\n")[:3]:
        read_message(read_line(line).text)
    assert time.thread_time() - begun_s < 0.25, text[:200]


@given(
    code=st.integers(0, 99999),
    domain=st.integers(0, 0xFFFF),
    bus=st.integers(0, 255),
    device=st.integers(0, 31),
    pid=st.integers(1, 1 << 22),
    comm=st.text(
        st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=",'<>"), min_size=1, max_size=15
    ),
)
def test_what_the_driver_prints_is_read_back(
    code: int, domain: int, bus: int, device: int, pid: int, comm: str
) -> None:
    text = f"NVRM: Xid (PCI:{domain:04x}:{bus:02x}:{device:02x}): {code}, pid={pid}, name={comm}, Ch 00000008"
    found = read_message(text)
    assert found is not None
    expected = {"xid": code, "pci": f"{domain:04x}:{bus:02x}:{device:02x}", "pid": pid, "comm": comm}
    assert found == ("xid", expected)
