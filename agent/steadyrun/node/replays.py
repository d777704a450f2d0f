"""What the ranks of this node say of microbatches that they compute again, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from steadyrun.core.integrity import IntegrityError
from steadyrun.core.replay import STATES, ReplayPlace, ReplayReport, ReplayWords, optional_int, why_off_path
from steadyrun.detect.sdc.records import Cause, Judgement
from steadyrun.detect.sdc.replays import Replayed, Replays
from steadyrun.node.inquiry import Element, Found, Spot

__all__ = ["GRADIENT", "NodeReplays", "found_of", "pack", "unpack"]

GRADIENT: Final = "gradient"  # the moment of what is found by replays
OFF: Final = STATES[-1]
MOST_TEXT: Final = 400


class NodeReplays:
    """One attempt; for the loop's thread.

    Attributes:
        notes: why replays are off, once each.
        words: the newest by rank.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.words: dict[int, ReplayWords] = {}
        self._replays = Replays()
        self._seen: dict[int, tuple[int, int]] = {}  # rank -> pid, reports read

    def look(self, rank: int, pid: int, folder: Path, words: ReplayWords, now_s: float) -> None:
        """Read what a rank has written since the last call."""
        before = self.words.get(rank)
        self.words[rank] = words
        if words.state == OFF and (before is None or before.state != OFF):
            self._note_off(folder)
        known_pid, seen = self._seen.get(rank, (pid, 0))
        if known_pid != pid:
            seen = 0
        for number in range(seen + 1, words.reports + 1):
            self._take(folder, number, now_s)
        self._seen[rank] = pid, max(words.reports, seen)

    def ready(self, now_s: float) -> list[Replayed]:
        return self._replays.ready(now_s)

    def to_record(self, rank: int) -> dict[str, Any] | None:
        """For the journal; None: this rank has had nothing to do with replays."""
        words = self.words.get(rank)
        if words is None or words.state == STATES[0]:
            return None
        return {
            "state": words.state,
            "of": words.of,
            "clean": words.clean,
            "newest_step": words.clean_step,
            "differed": words.reports,
            "interval": words.interval,
            "cost_s": round(words.cost_s, 6),
        }

    def cost_words(self, rank: int, trained_s: float) -> str:
        """What replays took of that, as the end of a sentence; empty where there were none."""
        words = self.words.get(rank)
        if words is None or not words.clean + words.reports or trained_s <= 0:
            return ""
        share = 100 * words.cost_s / trained_s
        return f"; {share:.3f} % of it for {words.clean + words.reports} replays (--ft-sdc-replay)"

    def _take(self, folder: Path, number: int, now_s: float) -> None:
        try:
            self._replays.add(ReplayReport.load(folder, number), now_s)
        except IntegrityError as e:
            self._note(str(e))

    def _note_off(self, folder: Path) -> None:
        try:
            why = why_off_path(folder).read_text("utf-8", "replace")[:MOST_TEXT]
        except OSError:  # it has none: nobody would expect replays there
            return
        self._note(f"no microbatches are replayed (--ft-sdc-replay): {why}")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def found_of(replayed: Replayed) -> Found:
    """As the end of an inquiry."""
    spots = tuple(
        Spot(
            rank,
            place.tensor,
            witness,
            place.dtype,
            place.element_bytes,
            place.size_bytes,
            tuple(Element(e, bits) for e, bits in place.elements),
            place.leaves,
            place.is_all,
            "" if place.elements else _why_not(place.leaves),
        )
        for rank, witness, place in replayed.places
    )
    return Found(replayed.judgement, GRADIENT, spots, since=replayed.since)


def _why_not(leaves: int | None) -> str:
    if leaves is None:
        return "only one of the two has a gradient"
    return f"{leaves} pieces of 256 KiB differ in more than one word"


# -- for the leader ----------------------------------------------------------------------------------------------------
def pack(replayed: Replayed) -> dict[str, Any]:
    j = replayed.judgement
    return {
        "step": replayed.step,
        "since": replayed.since,
        "cause": j.cause.value,
        "ranks": list(j.ranks),
        "names": list(j.names),
        "witness": j.witness,
        "last_good": j.last_good_step,
        "confidence": j.confidence,
        "sentence": j.sentence,
        "places": [[rank, witness, *place.to_list()] for rank, witness, place in replayed.places],
    }


def unpack(told: Mapping[str, Any]) -> Replayed:
    """Raises ValueError, TypeError or KeyError."""
    step = int(told["step"])
    judgement = Judgement(
        Cause(told["cause"]),
        tuple(map(int, told["ranks"])),
        tuple(map(str, told["names"])),
        optional_int(told["witness"]),
        step,
        optional_int(told["last_good"]),
        float(told["confidence"]),
        str(told["sentence"]),
    )
    places = tuple((int(rank), int(witness), ReplayPlace.from_list(place)) for rank, witness, *place in told["places"])
    return Replayed(step, judgement, int(told["since"]), places)
