"""Start, watch and restart a training job: what ``torch.distributed.run`` is to ``torchrun``, this is to ``steadyrun``.

``main(args)``, ``run(namespace)``, ``get_args_parser()`` and ``parse_args()`` are used as torch's; they are loaded when
first asked for, because they import torch. Any other public name is that of ``torch.distributed.run``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steadyrun.launcher.cli import get_args_parser
    from steadyrun.launcher.main import main, parse_args, run

__all__ = ["get_args_parser", "main", "parse_args", "run"]


def __getattr__(name: str) -> Any:
    if name == "get_args_parser":
        return importlib.import_module("steadyrun.launcher.cli").get_args_parser
    if name in __all__:
        # The module of this name stays as the attribute once it is imported, so it can be called like its function.
        module = importlib.import_module("steadyrun.launcher.main")
        return module if name == "main" else getattr(module, name)
    if not name.startswith("_"):
        torchs = importlib.import_module("torch.distributed.run")
        if hasattr(torchs, name):
            return getattr(torchs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
