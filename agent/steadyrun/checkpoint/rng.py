"""The state of the random number generators of one rank: Python's, NumPy's, torch's on the CPU and on every device."""

from __future__ import annotations

import array
import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["capture_rng", "derived_seed", "preserved_rng", "reseed", "restore_rng"]


def capture_rng() -> dict[str, Any]:
    """All generators that are in use in this process; small, of plain types, without waiting for a device.

    A NumPy or a device that this process has not begun to use is left out: asking would start it.
    """
    version, words, gauss = random.getstate()
    out: dict[str, Any] = {
        "seed": torch.initial_seed(),
        "python": (version, array.array("I", words).tobytes(), gauss),
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        name, key, position, has_gauss, cached = numpy.random.get_state()
        out["numpy"] = (str(name), key.tobytes(), int(position), int(has_gauss), float(cached))
    for kind, module in _devices():
        out[kind] = [module.get_rng_state(i) for i in range(module.device_count())]
    tracker = _megatron_tracker()
    if tracker is not None:
        out["megatron"] = dict(tracker.get_states())
    return out


def restore_rng(state: Mapping[str, Any]) -> list[str]:
    """Set every generator to what ``capture_rng`` gave.

    Returns:
        Sentences on what could not be set, to be told to the user; empty when all is as it was.
    """
    notes = []
    version, words, gauss = state["python"]
    random.setstate((version, tuple(array.array("I", words)), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        name, key, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(key, dtype=numpy.uint32), position, has_gauss, cached))
    present = dict(_devices())
    for kind in ("cuda", "xpu", "mps", "npu"):
        if kind not in state:
            continue
        if kind not in present:
            present.update(_started(kind))
        if kind not in present:
            notes.append(f"random numbers of {kind} cannot be continued: there is no such device in this process")
            continue
        module, saved = present[kind], state[kind]
        for i in range(min(module.device_count(), len(saved))):
            module.set_rng_state(saved[i], i)
        if module.device_count() < len(saved):
            notes.append(
                f"random numbers of {len(saved)} {kind} devices were saved, {module.device_count()} are visible: "
                "the others' are left out"
            )
    tracker = _megatron_tracker()
    if "megatron" in state:
        if tracker is None:
            notes.append("the random states of Megatron's tracker were saved, but Megatron is not loaded here")
        else:
            tracker.set_states(dict(state["megatron"]))
    return notes


def derived_seed(seed: int, step: int, rank: int) -> int:
    """A seed of 63 bits that another seed, step or rank does not share."""
    digest = hashlib.blake2b(f"{seed}:{step}:{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def reseed(seed: int, step: int, rank: int) -> None:
    """Seed every generator anew, for a rank that did not exist in the run so far."""
    value = derived_seed(seed, step, rank)
    random.seed(value)
    torch.manual_seed(value)  # of all devices too
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        numpy.random.seed(value & 0xFFFFFFFF)
    tracker = _megatron_tracker()
    if tracker is not None:
        states = {}
        for name, state in tracker.get_states().items():
            generator = torch.Generator(device="cuda")
            generator.manual_seed(derived_seed(value, step, int.from_bytes(str(name).encode(), "little")))
            states[name] = generator.get_state().to(state.device)
        tracker.set_states(states)


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """What happens inside draws no number from torch's CPU generator, Python's or NumPy's, seen from outside."""
    python, cpu = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    legacy = numpy.random.get_state() if numpy is not None and hasattr(numpy, "random") else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpy is not None and legacy is not None:
            numpy.random.set_state(legacy)


def _devices() -> Iterator[tuple[str, Any]]:
    """Kinds of devices that this process uses already, with torch's module for them."""
    for kind in ("cuda", "xpu", "npu"):
        module = getattr(torch, kind, None)
        is_initialized = getattr(module, "is_initialized", None)
        if module is not None and callable(is_initialized) and is_initialized():
            yield kind, module


def _started(kind: str) -> Iterator[tuple[str, Any]]:
    module = getattr(torch, kind, None)
    if module is not None and callable(getattr(module, "is_available", None)) and module.is_available():
        module.init()
        yield kind, module


def _megatron_tracker() -> Any:
    """Megatron's tracker of the states for tensor-parallel dropout; None unless Megatron is loaded."""
    module = sys.modules.get("megatron.core.tensor_parallel.random")
    get = getattr(module, "get_cuda_rng_tracker", None)
    if get is None:
        return None
    tracker = get()
    return tracker if hasattr(tracker, "get_states") and hasattr(tracker, "set_states") else None
