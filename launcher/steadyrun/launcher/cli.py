"""The command line: torch's own parser with our options added, so that every torchrun option means what it means there.

All our options are in the namespace ``--ft-*``, which no option of torch reaches by an abbreviation, and ours cannot be
abbreviated themselves. What the parser stores for them is the text as written; ``resolve_args`` turns it, the
environment and the files into settings.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from steadyrun.core.errors import ConfigError, nearest_name
from steadyrun.core.options import (
    ALIASES,
    OPTIONS,
    REPLACED,
    Option,
    Resolved,
    Source,
    command_line_source,
    environment_source,
    nvrx_source,
    resolve,
    toml_source,
)

__all__ = ["NotGiven", "format_config", "get_args_parser", "resolve_args"]

GIVEN: Final = "ft_given"
"""Attribute of the namespace: field or alias -> (flag as written, raw value)."""

_YAML_FLAGS: Final = ("--ft-cfg-path", "--ft-cfg_path", "--fault-tol-cfg-path", "--fault_tol_cfg_path")
_MISSING_OK_FLAGS: Final = (
    "--ft-ignore-missing-cfg",
    "--ft-ignore_missing_cfg",
    "--ignore-missing-fault-tol-cfg",
    "--ignore_missing_fault_tol_cfg",
)
_YAML: Final = "cfg_path"
_MISSING_OK: Final = "ignore_missing_cfg"

EPILOG: Final = """\
examples:
  steadyrun --standalone --nproc-per-node=8 train.py --epochs 3
      one node, as torchrun does it: restarts, hang detection and reports need no further option
  steadyrun --nnodes=4 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500 --rdzv-id=$JOB train.py
      four nodes; start the same command on each
  steadyrun --ft-mode=observe --standalone --nproc-per-node=8 train.py
      report what is wrong, never stop a rank
  steadyrun --ft-section-timeouts=setup:600,step:180,checkpointing:420 --standalone train.py
      limits of your own; they act without a second signal
  steadyrun --ft-print-config
      every option, its value, and where it came from

Each --ft-x-y is also PET_FT_X_Y in the environment and x-y in the TOML file of --ft-config; the command line wins over
the environment, the environment over the file. What happened is in ./steadyrun/latest: see steadyctl incidents.
"""


class NotGiven(int):
    """The default of ``--max-restarts``: the number torch sees, and the mark that the user gave none."""


class _Ours(argparse.Action):
    """Stores what was written, under which flag, for ``resolve_args``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = dict(getattr(namespace, GIVEN, None) or {})
        flag, separator, rest = (option_string or "").partition("=")
        value = (rest if separator else self.const) if self.nargs == 0 else values
        given[self.dest.removeprefix("ft_")] = (flag, value)
        setattr(namespace, GIVEN, given)


class SteadyrunParser(argparse.ArgumentParser):
    """torch's parser, with errors that say what to do and without abbreviations for our options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"steadyrun: error: {message} (see steadyrun --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, extra = super().parse_known_args(args, namespace)
        for token in extra:
            if token.startswith(("--ft-", "--ft_")):
                self._unknown(token.partition("=")[0])
        if parsed.training_script is None and not _prints_config(parsed):
            self.error("the training script is missing")
        return parsed, extra

    def _unknown(self, flag: str) -> NoReturn:
        known = [o.flag for o in OPTIONS]
        self.error(f"{flag} is not an option of steadyrun{nearest_name(flag.replace('_', '-'), known)}")

    def _get_option_tuples(self, option_string: str) -> Any:
        # argparse asks here what an abbreviation may stand for; torchrun's keep working.
        return [t for t in super()._get_option_tuples(option_string) if not isinstance(t[0], _Ours)]


def _prints_config(parsed: argparse.Namespace) -> bool:
    given: Mapping[str, Any] = getattr(parsed, GIVEN, None) or {}
    return "print_config" in given


def get_args_parser() -> argparse.ArgumentParser:
    """The parser of ``steadyrun``: what it returns for torchrun's options is what torchrun's returns.

    Reads PET_* at this moment, as torch's does.
    """
    from torch.distributed.run import get_args_parser as torch_args_parser

    parser = SteadyrunParser(
        prog="steadyrun",
        description="Start PyTorch training as torchrun does, watch it, and restart it when something breaks.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[torch_args_parser()],
        add_help=False,
    )
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=NotGiven(0))
    for action in parser._actions:
        if action.dest in ("training_script", "training_script_args"):
            action.required = False  # not for --ft-print-config; checked after parsing
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in OPTIONS:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(f"steadyrun: {option.group}")
        _add(groups[option.group], option)
    _add_others(parser)
    return parser


# Options that may stand alone: what that means, and the values that may follow "=".
_WITHOUT_VALUE: Final = {"print_config": ("text", ("json", "text")), "quiet": ("on", ("on", "off"))}


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    shown = option.kind.show(option.default)
    text = f"{option.help} Default: {shown}." if shown else option.help
    text = text.replace("%", "%%")
    dest = f"ft_{option.field}"
    if option.field in _WITHOUT_VALUE:
        # argparse looks for the whole text among its flags before it splits at "=", so these take no further word
        alone, values = _WITHOUT_VALUE[option.field]
        for flag in option.flags:
            spelled = [f"{flag}={value}" for value in values]
            group.add_argument(flag, *spelled, action=_Ours, dest=dest, nargs=0, const=alone, help=text)
            text = argparse.SUPPRESS
        return
    group.add_argument(*option.flags, action=_Ours, dest=dest, metavar=option.kind.metavar, help=text)


def _add_others(parser: argparse.ArgumentParser) -> None:
    """What the launcher of the NVIDIA resiliency extension takes; left out of the help."""
    hidden: dict[str, Any] = {"action": _Ours, "help": argparse.SUPPRESS}
    for name in (*ALIASES, *REPLACED):
        dashed = name.replace("_", "-")
        flags = dict.fromkeys(f"--ft-{middle}{n}" for middle in ("", "param-") for n in (dashed, name))
        parser.add_argument(*flags, dest=f"ft_{name}", **hidden)
    parser.add_argument("--ft-param-log_level", "--ft-param-log-level", dest="ft_log_level", **hidden)
    parser.add_argument(*_YAML_FLAGS, dest=f"ft_{_YAML}", **hidden)
    parser.add_argument(*_MISSING_OK_FLAGS, dest=f"ft_{_MISSING_OK}", nargs=0, const="on", **hidden)


# -- settings out of a parsed command line ---------------------------------------------------------------------------
def resolve_args(args: argparse.Namespace, environ: Mapping[str, str]) -> Resolved:
    """The settings that count for *args*, which may also come from torch's own parser.

    Raises:
        ConfigError: a value, a name or a file that cannot be used.
    """
    given: dict[str, tuple[str, Any]] = dict(getattr(args, GIVEN, None) or {})
    yaml_flag, yaml_file = given.pop(_YAML, ("", ""))
    missing_ok = given.pop(_MISSING_OK, None) is not None
    sources = [command_line_source(given), environment_source(environ)]
    config = _config_file(sources)
    if config is not None:
        sources.append(toml_source(_read_toml(config), config))
    if yaml_file:
        data = _read_yaml(yaml_flag, Path(yaml_file), missing_ok)
        if data is not None:
            sources.append(nvrx_source(data, yaml_file))
    return resolve(sources)


def _config_file(sources: Sequence[Source]) -> str | None:
    for source in sources:
        if "config" in source.values:
            return str(source.values["config"]) or None
    return None


def _read_toml(file: str) -> Mapping[str, object]:
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        data: Mapping[str, object] = toml.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"--ft-config: cannot read {file}: {e.strerror}") from e
    except (toml.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"--ft-config: {file} is not TOML: {e}") from e
    return data


def _read_yaml(flag: str, file: Path, missing_ok: bool) -> object | None:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as e:
        if missing_ok and isinstance(e, FileNotFoundError):
            return None
        raise ConfigError(f"{flag}: cannot read {file}: {e.strerror}") from e
    try:
        import yaml
    except ModuleNotFoundError:
        raise ConfigError(
            f"{flag}: reading {file} needs PyYAML, which is not installed; "
            f"install it with `pip install pyyaml`, or write the options as TOML for --ft-config"
        ) from None
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as e:
        raise ConfigError(f"{flag}: {file} is not YAML: {e}") from e


def format_config(resolved: Resolved) -> str:
    """The answer to ``--ft-print-config``: a table, or JSON."""
    rows = resolved.as_rows()
    if resolved.settings.print_config == "json":
        options = {flag: {"value": value, "origin": origin} for flag, value, origin in rows}
        return json.dumps({"schema": "steadyrun.config/1", "options": options}, indent=2)
    rows = [(flag, value or '""', origin) for flag, value, origin in rows]
    widths = [max(len(r[i]) for r in rows) for i in range(2)]
    lines = [f"{flag:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for flag, value, origin in rows]
    notes = [textwrap.fill(n, 118, subsequent_indent="  ") for n in resolved.notes]
    return "\n".join((*lines, *notes))
