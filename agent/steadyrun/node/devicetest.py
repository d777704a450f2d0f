"""A short test of each device: matrix products and copies, timed, and whether the same product comes out twice.

Runs as a program of its own (``python -m steadyrun.node.devicetest``): it needs torch, and a device that hangs must not
hold the agent. It prints one JSON object last: ``{"devices": [{"name", "uuid", "tflops", "copy_gbps", "is_exact"}]}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["DeviceSpeed", "DeviceTestError", "main", "measure_devices"]

BUDGET_S: Final = 0.4  # of each of the two measurements, after warming up
_CUDA_SIZE: Final = 8192
_CPU_SIZE: Final = 768
_CUDA_COPY_BYTES: Final = 1 << 30
_CPU_COPY_BYTES: Final = 64 << 20
_MOST_ROUNDS: Final = 200


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """What one device did.

    Attributes:
        name: ``cuda:0``, or ``cpu``.
        uuid: the GPU's, where torch tells it.
        copy_gbps: bytes read and written, in GB/s.
        is_exact: two equal products gave equal bits.
    """

    name: str
    uuid: str
    tflops: float
    copy_gbps: float
    is_exact: bool


class DeviceTestError(Exception):
    """The test gave no result; ``hung``: a device did not answer."""

    def __init__(self, text: str, hung: bool = False) -> None:
        super().__init__(text)
        self.hung = hung


def measure_devices(
    limit_s: float, env: Mapping[str, str] | None = None, command: Sequence[str] | None = None
) -> list[DeviceSpeed]:
    """Test all devices at once, in a process of its own; blocks. Raises DeviceTestError.

    Args:
        env: its environment; CUDA_VISIBLE_DEVICES chooses the devices.
        command: another program than this module, for tests.
    """
    arguments = [sys.executable, "-m", __name__] if command is None else list(command)
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=None if env is None else dict(env),
            start_new_session=True,
        )
    except OSError as e:
        raise DeviceTestError(f"cannot start the device test: {(e.strerror or str(e)).lower()}") from e
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        raise DeviceTestError(f"the device test did not end within {limit_s:g} s", hung=True) from None
    try:
        told = json.loads(out.decode(errors="replace").strip().splitlines()[-1])
        return [DeviceSpeed(**device) for device in told["devices"]]
    except (IndexError, ValueError, KeyError, TypeError):
        lines = err.decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"exit status {process.returncode}"
        raise DeviceTestError(f"the device test failed: {why[:200]}") from None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """One that hangs in the driver does not go; its pipes are closed and it is left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


def main() -> None:
    """Test every device that torch sees; the CPU where there is none."""
    import torch

    torch.manual_seed(0)
    if torch.cuda.is_available():
        found = [_Cuda(torch, i) for i in range(torch.cuda.device_count())]
        speeds = _at_once(found)
    else:
        torch.set_num_threads(1)
        speeds = [_cpu(torch)]
    sys.stdout.write(json.dumps({"devices": speeds}) + "\n")


def _cpu(torch: Any) -> dict[str, Any]:
    a = torch.randn(_CPU_SIZE, _CPU_SIZE)
    b = torch.randn(_CPU_SIZE, _CPU_SIZE)
    source, target = torch.ones(_CPU_COPY_BYTES, dtype=torch.uint8), torch.empty(_CPU_COPY_BYTES, dtype=torch.uint8)
    first = a @ b
    is_exact = bool(torch.equal(first, a @ b))
    flop_s = _rate(2.0 * _CPU_SIZE**3, lambda: torch.mm(a, b, out=first))
    byte_s = _rate(2.0 * _CPU_COPY_BYTES, lambda: target.copy_(source))
    return _told("cpu", "", flop_s, byte_s, is_exact)


def _rate(amount: float, work: Callable[[], object]) -> float:
    """Amount per second of the quickest round: others may share the machine."""
    best_s, until_s = float("inf"), time.perf_counter() + BUDGET_S
    for _ in range(_MOST_ROUNDS):
        begun_s = time.perf_counter()
        work()
        now_s = time.perf_counter()
        best_s = min(best_s, now_s - begun_s)
        if now_s >= until_s:
            break
    return amount / best_s


class _Cuda:
    """One GPU: work is queued on all of them before any is waited for, as in training."""

    def __init__(self, torch: Any, index: int) -> None:
        self._torch, self._index = torch, index
        self.name = f"cuda:{index}"
        properties = torch.cuda.get_device_properties(index)
        uuid = getattr(properties, "uuid", None)
        self.uuid = f"GPU-{uuid}" if uuid is not None else ""
        with torch.cuda.device(index):
            self._a = torch.randn(_CUDA_SIZE, _CUDA_SIZE, device=self.name, dtype=torch.bfloat16)
            self._b = torch.randn(_CUDA_SIZE, _CUDA_SIZE, device=self.name, dtype=torch.bfloat16)
            self._source = torch.ones(_CUDA_COPY_BYTES, device=self.name, dtype=torch.uint8)
            self._target = torch.empty_like(self._source)
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        self._rounds = self._copies = 0
        self._is_exact = None

    def warm_up(self) -> None:
        """Also finds how many rounds fill the time."""
        torch = self._torch
        with torch.cuda.device(self._index):
            first = self._a @ self._b
            self._is_exact = torch.equal(first, self._a @ self._b)
            self._target.copy_(self._source)
            torch.cuda.synchronize()
            begun_s = time.perf_counter()
            self._a @ self._b
            torch.cuda.synchronize()
            each_s = max(time.perf_counter() - begun_s, 1e-4)
            self._rounds = min(max(int(BUDGET_S / each_s), 3), _MOST_ROUNDS)
            self._copies = 50

    def queue(self) -> None:
        with self._torch.cuda.device(self._index):
            begun, between, ended = self._events
            begun.record()
            for _ in range(self._rounds):
                self._a @ self._b
            between.record()
            for _ in range(self._copies):
                self._target.copy_(self._source)
            ended.record()

    def told(self) -> dict[str, Any]:
        with self._torch.cuda.device(self._index):
            self._torch.cuda.synchronize()
        begun, between, ended = self._events
        flop_s = 2.0 * _CUDA_SIZE**3 * self._rounds / (begun.elapsed_time(between) / 1e3)
        byte_s = 2.0 * _CUDA_COPY_BYTES * self._copies / (between.elapsed_time(ended) / 1e3)
        return _told(self.name, self.uuid, flop_s, byte_s, bool(self._is_exact))


def _at_once(devices: Sequence[_Cuda]) -> list[dict[str, Any]]:
    for device in devices:
        device.warm_up()
    for device in devices:
        device.queue()
    return [device.told() for device in devices]


def _told(name: str, uuid: str, flop_s: float, byte_s: float, is_exact: bool) -> dict[str, Any]:
    return {
        "name": name,
        "uuid": uuid,
        "tflops": round(flop_s / 1e12, 4),
        "copy_gbps": round(byte_s / 1e9, 2),
        "is_exact": is_exact,
    }


if __name__ == "__main__":
    main()
