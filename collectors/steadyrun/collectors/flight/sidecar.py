"""What the agent writes beside a rank's dumps: what the recorder itself does not know. ``rank_R.flight.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from steadyrun.core.records import to_json

__all__ = ["SIDECAR_SCHEMA", "DumpFile", "LiveGroup", "Sidecar", "sidecar_from_json"]

SIDECAR_SCHEMA: Final = "steadyrun.flight/1"


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """A process group as the rank itself knows it; *ranks* are global, sorted."""

    name: str
    desc: str
    ranks: tuple[int, ...]
    backend: str


@dataclass(frozen=True, slots=True)
class DumpFile:
    """One dump of one recorder.

    Attributes:
        file: name in the sidecar's folder.
        recorder: ``nccl`` (the legacy one), ``gloo``, ``nccl2`` and the like; empty when unknown.
        kind: ``full``, ``active`` (what is done left out), ``exception`` (made by the failing rank), ``watchdog`` (left
            by torch's own).
    """

    file: str
    recorder: str
    kind: str
    taken_at_unix_s: float


@dataclass(frozen=True, slots=True)
class Sidecar:
    """One rank's, at the time of its dumps.

    Attributes:
        recorder_state: ``on``, ``off`` or ``unknown``; with ``buffer_size`` as torch reads it.
        unix_minus_mono_s: of the node, for section times.
        process_state: one of R S D T t Z X, or empty.
        exit_code, exit_signal: how it ended; None while it lives.
        exception: ``Type: message`` of its uncaught exception, or empty.
    """

    rank: int
    local_rank: int | None = None
    world_size: int | None = None
    host: str = ""
    boot_id: str = ""
    pid: int | None = None
    attempt: int | None = None
    run_id: str = ""
    step: int | None = None
    section: str | None = None
    section_age_s: float | None = None
    groups: tuple[LiveGroup, ...] = ()
    recorder_state: str = "unknown"
    buffer_size: int | None = None
    torch: str = ""
    gpu: str | None = None
    clock_offset_s: float | None = None
    unix_minus_mono_s: float | None = None
    process_state: str = ""
    exit_code: int | None = None
    exit_signal: int | None = None
    exception: str = ""
    dumps: tuple[DumpFile, ...] = ()
    missing: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The file's content."""
        fields = {name: to_json(getattr(self, name)) for name in self.__slots__}
        return {"schema": SIDECAR_SCHEMA, **fields}


def sidecar_from_json(data: Mapping[str, Any]) -> Sidecar:
    """The inverse of ``Sidecar.to_json``; unknown fields are left out.

    Raises:
        ValueError: it is none, or a field has a wrong type.
    """
    if data.get("schema") != SIDECAR_SCHEMA:
        raise ValueError(f"cannot read a sidecar: schema {data.get('schema')!r} is not {SIDECAR_SCHEMA!r}")

    def maybe(convert: Any, name: str) -> Any:
        return None if data.get(name) is None else convert(data[name])

    try:
        return Sidecar(
            rank=int(data["rank"]),
            local_rank=maybe(int, "local_rank"),
            world_size=maybe(int, "world_size"),
            host=str(data.get("host") or ""),
            boot_id=str(data.get("boot_id") or ""),
            pid=maybe(int, "pid"),
            attempt=maybe(int, "attempt"),
            run_id=str(data.get("run_id") or ""),
            step=maybe(int, "step"),
            section=maybe(str, "section"),
            section_age_s=maybe(float, "section_age_s"),
            groups=tuple(
                LiveGroup(str(g["name"]), str(g["desc"]), tuple(map(int, g["ranks"])), str(g["backend"]))
                for g in data.get("groups", ())
            ),
            recorder_state=str(data.get("recorder_state") or "unknown"),
            buffer_size=maybe(int, "buffer_size"),
            torch=str(data.get("torch") or ""),
            gpu=maybe(str, "gpu"),
            clock_offset_s=maybe(float, "clock_offset_s"),
            unix_minus_mono_s=maybe(float, "unix_minus_mono_s"),
            process_state=str(data.get("process_state") or ""),
            exit_code=maybe(int, "exit_code"),
            exit_signal=maybe(int, "exit_signal"),
            exception=str(data.get("exception") or ""),
            dumps=tuple(
                DumpFile(str(d["file"]), str(d["recorder"]), str(d["kind"]), float(d["taken_at_unix_s"]))
                for d in data.get("dumps", ())
            ),
            missing=tuple(map(str, data.get("missing", ()))),
        )
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as e:
        raise ValueError(f"cannot read a sidecar: {e!r}") from e
