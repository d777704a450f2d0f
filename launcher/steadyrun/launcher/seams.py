"""Which parts of torch the launcher stands on, and whether the installed torch still has them where they were.

Nothing here imports torch.distributed.elastic by itself: ``check_seams`` is given the modules, by ``elastic``.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["SEAMS", "Seam", "problems_of"]

OUR_PREFIXES: Final = ("--ft", "--fa", "--ig")


@dataclass(frozen=True, slots=True)
class Seam:
    """One name of torch that is used.

    Attributes:
        module: where it is imported from.
        name: dotted below the module.
        parameters: the first parameters of a callable, in order, ``self`` left out; () when only the name counts.
        keywords: parameters that must exist anywhere.
        fields: fields of a dataclass, or annotated attributes.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


_E: Final = "torch.distributed.elastic"
_AGENT: Final = f"{_E}.agent.server.api"
_LOCAL: Final = f"{_E}.agent.server.local_elastic_agent"
_RDZV: Final = f"{_E}.rendezvous"

SEAMS: Final[Sequence[Seam]] = (
    Seam("torch.distributed.run", "run", ("args",)),
    Seam("torch.distributed.run", "get_args_parser"),
    Seam("torch.distributed.run", "elastic_launch", ("config", "entrypoint")),
    Seam(
        "torch.distributed.launcher.api",
        "LaunchConfig",
        fields=(
            *("min_nodes", "max_nodes", "nproc_per_node", "logs_specs", "run_id", "role", "rdzv_endpoint"),
            *("rdzv_backend", "rdzv_configs", "max_restarts", "monitor_interval", "start_method"),
            *("log_line_prefix_template", "metrics_cfg", "local_addr"),
        ),
    ),
    Seam(
        _AGENT,
        "WorkerSpec",
        fields=(
            *("role", "local_world_size", "rdzv_handler", "entrypoint", "args", "max_restarts"),
            *("monitor_interval", "master_port", "master_addr", "local_addr"),
        ),
    ),
    Seam(_AGENT, "RunResult", fields=("state", "return_values", "failures")),
    Seam(_AGENT, "WorkerState.SUCCEEDED"),
    Seam(_AGENT, "WorkerState.FAILED"),
    Seam(_AGENT, "SimpleElasticAgent.run", ("role",)),
    Seam(_AGENT, "SimpleElasticAgent.get_worker_group"),
    Seam(_AGENT, "SimpleElasticAgent._rendezvous", ("worker_group",)),
    Seam(_AGENT, "SimpleElasticAgent._assign_worker_ranks", ("store", "group_rank", "group_world_size", "spec")),
    Seam(_AGENT, "SimpleElasticAgent._record_metrics", ("group_results",)),
    Seam(_AGENT, "SimpleElasticAgent._record_worker_events", ("result",)),
    Seam(_AGENT, "SimpleElasticAgent.get_event_succeeded"),
    Seam(_AGENT, "SimpleElasticAgent.get_event_failed"),
    Seam(
        _LOCAL,
        "LocalElasticAgent.__init__",
        ("spec", "logs_specs", "start_method", "exit_barrier_timeout", "log_line_prefix_template"),
    ),
    Seam(f"{_E}.events", "record", ("event", "destination")),
    Seam(f"{_E}.metrics", "initialize_metrics", ("cfg",)),
    Seam(f"{_E}.metrics.api", "MetricsConfig", ("params",)),
    Seam(f"{_E}.multiprocessing", "LogsSpecs.reify", ("envs",)),
    Seam(
        f"{_E}.multiprocessing",
        "LogsDest",
        fields=("stdouts", "stderrs", "tee_stdouts", "tee_stderrs", "error_files"),
    ),
    Seam(f"{_E}.multiprocessing", "SignalException.__init__", ("msg", "sigval")),
    Seam(
        f"{_E}.multiprocessing.tail_log",
        "TailLog.__init__",
        ("name", "log_files", "dst", "log_line_prefixes"),
        # log_line_filter came in 2.10, together with the options that need it
    ),
    Seam(
        f"{_E}.multiprocessing.errors",
        "ProcessFailure",
        ("local_rank", "pid", "exitcode", "error_file"),
        fields=("message", "timestamp"),
    ),
    Seam(f"{_E}.multiprocessing.errors", "ChildFailedError.__init__", ("name", "failures")),
    Seam(f"{_E}.multiprocessing.errors", "ChildFailedError.get_first_failure"),
    Seam(f"{_E}.multiprocessing.errors", "record", ("fn",)),
    Seam(
        _RDZV,
        "RendezvousParameters",
        keywords=("backend", "endpoint", "run_id", "min_nodes", "max_nodes", "local_addr"),
    ),
    Seam(_RDZV, "RendezvousHandler.next_rendezvous"),
    Seam(_RDZV, "RendezvousHandler.num_nodes_waiting"),
    Seam(_RDZV, "RendezvousHandler.get_backend"),
    Seam(_RDZV, "RendezvousHandler.get_run_id"),
    Seam(_RDZV, "RendezvousHandler.shutdown"),
    Seam(_RDZV, "RendezvousHandler.use_agent_store"),
    Seam(_RDZV, "RendezvousClosedError"),
    Seam(_RDZV, "RendezvousConnectionError"),
    Seam(_RDZV, "RendezvousTimeoutError"),
    Seam(_RDZV, "RendezvousGracefulExitError"),
    Seam(f"{_RDZV}.registry", "get_rendezvous_handler", ("params",)),
    Seam(f"{_RDZV}.utils", "parse_rendezvous_endpoint", ("endpoint", "default_port")),
    # How a node learns that it is a spare; without these it does not say so, and gives up after join_timeout.
    Seam(f"{_RDZV}.dynamic_rendezvous", "DynamicRendezvousHandler", fields=("_state_holder", "_this_node")),
    Seam(f"{_RDZV}.dynamic_rendezvous", "_RendezvousState", fields=("complete", "participants")),
    # How many nodes could be left out, and how one that is makes room; else none is, or it takes 15 s.
    Seam(f"{_RDZV}.dynamic_rendezvous", "DynamicRendezvousHandler", fields=("_settings", "_op_executor")),
    Seam(f"{_RDZV}.dynamic_rendezvous", "DynamicRendezvousHandler._stop_heartbeats"),
    Seam(f"{_RDZV}.dynamic_rendezvous", "_RendezvousState", fields=("wait_list", "redundancy_list")),
    Seam(f"{_RDZV}.dynamic_rendezvous", "_RendezvousExitOp"),
)


def problems_of(modules: Mapping[str, Any]) -> list[str]:
    """What moved, one line each; empty when everything is where it was.

    Args:
        modules: by name, the modules that ``SEAMS`` names.
    """
    out = [problem for seam in SEAMS for problem in _check(seam, modules.get(seam.module))]
    run = modules.get("torch.distributed.run")
    return [*out, *_check_call_site(run), *_check_options(run)]


def _check(seam: Seam, module: Any) -> Iterable[str]:
    label = f"{seam.module}.{seam.name}"
    found = module
    for part in seam.name.split("."):
        found = getattr(found, part, None)
        if found is None:
            yield f"{label} is gone"
            return
    if seam.parameters or seam.keywords:
        names = [n for n in inspect.signature(found).parameters if n != "self"]
        if tuple(names[: len(seam.parameters)]) != seam.parameters:
            yield f"{label} takes ({', '.join(names)}), expected ({', '.join(seam.parameters)}, ...)"
        missing = [k for k in seam.keywords if k not in names]
        if missing:
            yield f"{label} does not take {', '.join(missing)}"
    if seam.fields:
        known = _fields(found)
        missing = [f for f in seam.fields if f not in known]
        if missing:
            yield f"{label} has no field {', '.join(missing)}"


def _fields(cls: Any) -> set[str]:
    own = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    return own | {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}


def _check_call_site(run: Any) -> Iterable[str]:
    """``elastic_launch`` must still be looked up in the module, and called the way our replacement expects."""
    try:
        source = inspect.getsource(run.run)
    except (OSError, TypeError, AttributeError):
        return
    flat = re.sub(r"\s+", "", source)
    if "elastic_launch(config=config,entrypoint=cmd,)(*cmd_args)" not in flat:
        yield "torch.distributed.run.run does not call elastic_launch(config=config, entrypoint=cmd)(*cmd_args)"


def _check_options(run: Any) -> Iterable[str]:
    parser = getattr(run, "get_args_parser", None)
    if parser is None:
        return
    for action in parser()._actions:
        for option in action.option_strings:
            if option.startswith(OUR_PREFIXES):
                yield f"torchrun's option {option} is in the namespace of ours"
