"""Which boot of which machine this is: clocks and kernel sequence numbers are comparable within one only."""

from __future__ import annotations

__all__ = ["boot_id"]


def boot_id() -> str:
    """The kernel's random id of the present boot, empty where /proc does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""
