"""Signals come as items of a queue; handlers of before come back."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Iterator

import pytest

from steadyrun.core.errors import ConfigError
from steadyrun.launcher.signals import SignalInbox, parse_signals


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    watched = (signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
    before = {s: signal.getsignal(s) for s in watched}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_signals_are_read_in_order_and_wake_a_selector() -> None:
    with SignalInbox((signal.SIGTERM, signal.SIGHUP)) as inbox:
        assert inbox.drain() == ()
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert select.select([inbox], [], [], 5)[0]
        assert inbox.drain() == [signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM]
        assert inbox.last_stop is signal.SIGTERM
        assert inbox.drain() == ()


def test_a_forwarded_signal_is_no_stop() -> None:
    with SignalInbox((signal.SIGUSR1,)) as inbox:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert inbox.drain() == [signal.SIGUSR1]
        assert inbox.last_stop is None


def test_handlers_of_before_come_back() -> None:
    def mine(*_: object) -> None: ...

    signal.signal(signal.SIGTERM, mine)
    with SignalInbox((signal.SIGTERM,)):
        assert signal.getsignal(signal.SIGTERM) is not mine
    assert signal.getsignal(signal.SIGTERM) is mine
    assert signal.set_wakeup_fd(-1) == -1


def test_an_ignored_hangup_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with SignalInbox((signal.SIGHUP,)) as inbox:
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert inbox.drain() == ()


def test_signals_of_others_are_left_out() -> None:
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with SignalInbox((signal.SIGTERM,)) as inbox:
        os.kill(os.getpid(), signal.SIGCHLD)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert inbox.drain() == [signal.SIGUSR2]


def test_outside_the_main_thread_nothing_is_installed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[tuple[bool, object]] = []

    def work() -> None:
        with SignalInbox((signal.SIGTERM,)) as inbox:
            seen.append((inbox.is_installed, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


def test_names_are_parsed() -> None:
    assert parse_signals("SIGTERM, SIGINT,,SIGTERM") == (signal.SIGTERM, signal.SIGINT)


@pytest.mark.parametrize("text", ["SIGKILL", "TERM", "SIGTREM"])
def test_a_name_that_cannot_be_handled_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--signals-to-handle"):
        parse_signals(text)
