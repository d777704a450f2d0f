"""Start, watch and restart a training job: what ``torch.distributed.run`` is to ``torchrun``, this is to ``steadyrun``.

``main(args)``, ``run(namespace)`` and ``get_args_parser()`` are used as torch's; they are loaded when first asked for,
because they import torch.
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
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
