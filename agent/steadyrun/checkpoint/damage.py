"""Why a checkpoint cannot be loaded, in terms that the choice of another one can act on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from steadyrun.checkpoint.contents import shard_words
from steadyrun.core.errors import SteadyrunError

__all__ = [
    "ADVICE",
    "DamagedFolderError",
    "DamagedShardError",
    "MissingKeysError",
    "UnloadableError",
    "UntrustedObjectError",
]

ADVICE: Final = "load an older checkpoint; `steadyctl ckpt verify` lists all that is wrong with this one"
_MOST_KEYS: Final = 8


class UnloadableError(SteadyrunError):
    """This checkpoint cannot be loaded; an older one may.

    Attributes:
        has_written: tensors of the state may already hold bytes of it. Going on with them is not an option: load
            another checkpoint, or make the state anew.
    """

    has_written = False


class DamagedFolderError(UnloadableError):
    """The folder's lists (``.metadata``, manifest) are missing or damaged, or do not add up; nothing was loaded."""

    def __init__(self, folder: Path, why: str) -> None:
        self.folder = folder
        super().__init__(f"cannot load {folder}: {why}; {ADVICE}")


class DamagedShardError(UnloadableError):
    """Bytes of a tensor or an object are damaged or missing.

    Attributes:
        key: the tensor or object; *offsets* of its shard in the global tensor, empty for an object.
        at_byte, size_bytes: the range of *file*, in *folder*, in which they are.
    """

    def __init__(
        self, folder: Path, file: str, key: str, offsets: tuple[int, ...], at_byte: int, size_bytes: int, why: str
    ) -> None:
        self.folder, self.file, self.key, self.offsets = folder, file, key, offsets
        self.at_byte, self.size_bytes = at_byte, size_bytes
        shard = shard_words(offsets)
        what = f"{key}, {shard}," if shard else key
        where = f"{folder / file}, bytes {at_byte:,} to {at_byte + max(size_bytes, 1) - 1:,}"
        super().__init__(f"cannot load {what} from {where}: {why}; {ADVICE}")


class MissingKeysError(UnloadableError):
    """The checkpoint lacks what the state needs; *keys* are all that it lacks. Nothing was loaded."""

    def __init__(self, folder: Path, keys: Sequence[str]) -> None:
        self.folder, self.keys = folder, tuple(keys)
        more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
        super().__init__(
            f"cannot load {folder}: it does not hold {', '.join(keys[:_MOST_KEYS])}{more}; load it into the model and "
            "optimizer that it was saved from, or pass strict=False to keep the values that these have now"
        )


class UntrustedObjectError(UnloadableError):
    """An object can only be unpickled by running what it names, and nothing vouches for it."""
