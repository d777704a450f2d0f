"""Network ports as /sys shows them: states, rates and error counters. Reads only; the root folder is a parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

__all__ = ["COUNTERS", "Counter", "PortReader", "PortReading", "PortsUnreadableError"]

_MOST_BYTES: Final = 256
_MOST_PORTS: Final = 1024


@dataclass(frozen=True, slots=True)
class Counter:
    """One error counter of a port.

    Attributes:
        folder: where it is, below the port's folder.
        words: what it counts, as the end of "3 ...".
        most_per_hour: more than so many are not usual; None: it is counted, but says nothing by itself.
    """

    name: str
    folder: str
    words: str
    most_per_hour: float | None


_IB: Final = "counters"
_RDMA: Final = "hw_counters"
_NET: Final = "statistics"

# Public guidance: a cable within its specification (a bit error rate of 1e-12) has up to 120 symbol errors an hour.
COUNTERS: Final = (
    Counter("symbol_error", _IB, "symbol errors", 120.0),
    Counter("link_error_recovery", _IB, "recoveries of the link", 10.0),
    Counter("port_rcv_errors", _IB, "packets received with errors", 120.0),
    Counter("local_link_integrity_errors", _IB, "errors of the link's integrity", 10.0),
    Counter("excessive_buffer_overrun_errors", _IB, "overruns of its buffers", 10.0),
    Counter("port_xmit_discards", _IB, "packets discarded when sending", None),
    Counter("out_of_sequence", _RDMA, "packets out of sequence", None),
    Counter("packet_seq_err", _RDMA, "sequence errors told by peers", None),
    Counter("local_ack_timeout_err", _RDMA, "packets sent again for want of an answer", 600.0),
    Counter("rnr_nak_retry_err", _RDMA, "receivers that stayed not ready", 60.0),
    Counter("rx_errors", _NET, "frames received with errors", 120.0),
    Counter("tx_errors", _NET, "frames that could not be sent", 120.0),
)
LINK_DOWNED: Final = "link_downed"
WAITED: Final = "port_xmit_wait"  # congestion: no fault of the port


class PortsUnreadableError(Exception):
    """The folder of a kind of devices is there and cannot be listed."""


@dataclass(frozen=True, slots=True)
class PortReading:
    """One port now.

    Attributes:
        device: ``mlx5_0``, or the interface's name where it is no RDMA device.
        port: from 1; 0 for a plain interface.
        link: ``InfiniBand`` or ``Ethernet``.
        state: ``ACTIVE``, ``DOWN``, ``INIT``, ``ARMED``; of plain interfaces ``ACTIVE`` and ``DOWN`` only.
        physical: ``LinkUp``, ``Polling``, ``Disabled``; empty where it is not told.
        rate_gbps: None where it is not told.
        model: devices of one model can be compared.
        interfaces: names of the network interfaces on it.
        counters: those that could be read, by the names of ``COUNTERS``, and ``link_downed``.
    """

    device: str
    port: int
    link: str
    state: str
    physical: str = ""
    rate_gbps: float | None = None
    model: str = ""
    interfaces: tuple[str, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def key(self) -> tuple[str, int]:
        return self.device, self.port

    @property
    def link_downed(self) -> int | None:
        """How often the link went down; None where the port does not count it."""
        return self.counters.get(LINK_DOWNED)

    @property
    def errors(self) -> int:
        """The sum of the error counters; congestion and lost links are not among them."""
        return sum(self.counters.get(c.name, 0) for c in COUNTERS)

    @property
    def label(self) -> str:
        """``mlx5_0 port 1 (ib0)``."""
        if self.port == 0:
            return self.device
        return f"{self.device} port {self.port}" + (f" ({', '.join(self.interfaces)})" if self.interfaces else "")


class PortReader:
    """Reads all ports below *sys*.

    Some firmware refuses the counters of ports that belong to another host, and logs each attempt: a file that has
    given an error is not read again.

    Args:
        excluded: names or patterns (``mlx5_bond*``) of devices that are left alone.
    """

    def __init__(self, sys: Path = Path("/sys"), excluded: tuple[str, ...] = ()) -> None:
        self._sys = sys
        self._excluded = excluded
        self._refused: set[Path] = set()

    def read(self) -> tuple[PortReading, ...]:
        """All ports, in order of their names. Raises PortsUnreadableError."""
        rdma = list(self._rdma_ports())
        known = {name for p in rdma for name in p.interfaces}
        return (*rdma, *(p for p in self._interfaces() if p.device not in known))

    # -- RDMA devices --------------------------------------------------------------------------------------------------
    def _rdma_ports(self) -> Iterator[PortReading]:
        for device in self._devices("infiniband"):
            interfaces = tuple(sorted(p.name for p in _children(device / "device" / "net")))
            model = self._text(device / "board_id") or self._text(device / "hca_type")
            for folder in sorted(_children(device / "ports"), key=_by_number):
                if folder.name.isdecimal():
                    yield self._rdma_port(device, folder, model, interfaces)

    def _rdma_port(self, device: Path, folder: Path, model: str, interfaces: tuple[str, ...]) -> PortReading:
        counters = {c.name: v for c in COUNTERS if c.folder != _NET and (v := self._counter(folder, c)) is not None}
        for name in (LINK_DOWNED, WAITED):
            value = _number(self._text(folder / "counters" / name))
            if value is not None:
                counters[name] = value
        return PortReading(
            device=device.name,
            port=int(folder.name),
            link=self._text(folder / "link_layer") or "InfiniBand",
            state=_after_colon(self._text(folder / "state")),
            physical=_after_colon(self._text(folder / "phys_state")),
            rate_gbps=_rate(self._text(folder / "rate")),
            model=model,
            interfaces=interfaces,
            counters=counters,
        )

    def _counter(self, folder: Path, counter: Counter) -> int | None:
        return _number(self._text(folder / counter.folder / counter.name))

    # -- network interfaces --------------------------------------------------------------------------------------------
    def _interfaces(self) -> Iterator[PortReading]:
        """Those with hardware behind them; bridges, tunnels and the ends of containers have none."""
        for folder in self._devices("net"):
            if not (folder / "device").exists():
                continue
            counters = {c.name: v for c in COUNTERS if c.folder == _NET and (v := self._counter(folder, c)) is not None}
            downs = _number(self._text(folder / "carrier_down_count"))
            if downs is not None:
                counters[LINK_DOWNED] = downs
            speed_mbps = _number(self._text(folder / "speed", may_fail=True))
            is_up = self._text(folder / "carrier", may_fail=True) == "1"  # one that was switched off gives an error
            yield PortReading(
                device=folder.name,
                port=0,
                link="Ethernet",
                state="ACTIVE" if is_up else "DOWN",
                physical=self._text(folder / "operstate"),
                rate_gbps=speed_mbps / 1000 if speed_mbps else None,
                model=self._model(folder / "device"),
                interfaces=(folder.name,),
                counters=counters,
            )

    def _model(self, device: Path) -> str:
        vendor, model = self._text(device / "vendor"), self._text(device / "device")
        return f"{vendor}:{model}" if vendor or model else ""

    # -- files ---------------------------------------------------------------------------------------------------------
    def _devices(self, kind: str) -> list[Path]:
        folder = self._sys / "class" / kind
        try:
            found = sorted(folder.iterdir(), key=_by_number)
        except FileNotFoundError:
            return []
        except OSError as e:
            raise PortsUnreadableError(f"cannot list {folder}: {(e.strerror or str(e)).lower()}") from e
        return [p for p in found if not any(fnmatch(p.name, x) for x in self._excluded)][:_MOST_PORTS]

    def _text(self, path: Path, may_fail: bool = False) -> str:
        """A small file's text without its end of line; empty where it cannot be read."""
        if path in self._refused:
            return ""
        try:
            with path.open("rb") as f:
                return f.read(_MOST_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return ""  # it may come back with its device
        except OSError:
            if not may_fail:
                self._refused.add(path)
            return ""


def _children(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _by_number(path: Path) -> tuple[str, int]:
    """mlx5_10 after mlx5_9."""
    head = path.name.rstrip("0123456789")
    tail = path.name[len(head) :]
    return head, int(tail) if tail and len(tail) < 10 else 0


def _after_colon(text: str) -> str:
    """``ACTIVE`` of ``4: ACTIVE``."""
    return text.rpartition(":")[2].strip()


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else None


def _rate(text: str) -> float | None:
    """400.0 of ``400 Gb/sec (4X NDR)``."""
    try:
        value = float(text.split()[0])
    except (IndexError, ValueError):
        return None
    return value if 0 < value < 1e6 else None
