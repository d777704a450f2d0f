"""``steadyctl inject``: a fault for one rank of a live run, over the rank's own socket."""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from steadyrun.collectors.evidence import connect_unix
from steadyrun.core.errors import ConfigError
from steadyrun.core.runfolder import RunFolder
from steadyrun.ctl.console import Console, plain
from steadyrun.ctl.runs import NotFoundError, is_agent_alive, live_nodes, open_run
from steadyrun.testing.faults import KINDS, parse_faults

__all__ = ["ask_rank", "register"]

SCHEMA: Final = "steadyrun.inject/1"
ANSWER_S: Final = 5.0


def register(commands: Any) -> None:
    """Add the command to the parser."""
    kinds = "\n".join(f"  {name:<14}{_first_words(kind.help)}" for name, kind in KINDS.items())
    parser = commands.add_parser(
        "inject",
        help="inject a fault into a rank of a live run",
        description=(
            "Injects a fault into one rank of a live run; the same text as in\n"
            "STEADYRUN_FAULTS. Without step= it strikes after the rank's next step;\n"
            "step=now strikes at once where the fault allows it.\n\n"
            f"faults:\n{kinds}"
        ),
        epilog=(
            "examples:\n  steadyctl inject kill --rank 1\n"
            "  steadyctl inject 'hang where=collective step=400' --rank 0\n"
            "  steadyctl inject 'stop step=now seconds=20' --rank 3 --run /data/runs"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("fault", metavar="FAULT", nargs="+", help="kind and key=value pairs")
    parser.add_argument("--rank", type=int, required=True, metavar="R", help="global rank")
    parser.add_argument(
        "--run", dest="where", metavar="RUN", help="run folder, or a folder of runs (default: ./steadyrun)"
    )
    parser.add_argument("--json", action="store_true", help=f"print {SCHEMA}")
    parser.set_defaults(run=run_inject)


def _first_words(text: str, width: int = 62) -> str:
    return text if len(text) <= width else text[: width - 1].rpartition(" ")[0] + " …"


def run_inject(args: argparse.Namespace, console: Console) -> int:
    text = " ".join(args.fault)
    faults = parse_faults(text, injected=True)  # a typo is answered here, also for a rank that cannot be reached
    if not faults:
        raise ConfigError("cannot inject: no fault given (example: steadyctl inject kill --rank 1)")
    for fault in faults:
        if fault.rank not in (None, args.rank) or fault.random_seed is not None:
            raise ConfigError(f"cannot inject {fault.text!r}: leave rank= out, or give the same as --rank {args.rank}")
    run = open_run(args.where)
    attempt = _live_attempt(run, args.rank)
    reply = ask_rank(run.socket(attempt, args.rank), {"cmd": "inject", "fault": text}, args.rank)
    problem = reply.get("error")
    answers = [str(a) for a in reply.get("answers", ())]
    if args.json:
        console.json(
            {
                "schema": SCHEMA,
                "run": str(run.root),
                "rank": args.rank,
                "attempt": attempt,
                "fault": text,
                "answers": answers,
                "error": problem,
            }
        )
    elif problem:
        raise ConfigError(plain(problem))
    else:
        for answer in answers:
            console.print(plain(answer))
        console.print(console.styled(f"attempt {attempt} of {run.root}; watch it with: steadyctl status", "dim"))
    return 2 if problem else 0


def _live_attempt(run: RunFolder, rank: int) -> int:
    """The attempt in which *rank* runs on this machine.

    Raises:
        NotFoundError: the run is over, or the rank is not in it or not here.
    """
    alive = [live for live in live_nodes(run) if is_agent_alive(live)]
    if not alive:
        raise NotFoundError(f"cannot inject: no agent of {run.root} lives on this machine; is the run over?")
    known = {int(r["rank"]): live.attempt for live in alive for r in live.ranks if "rank" in r}
    if rank not in known:
        there = ", ".join(map(str, sorted(known))) or "none yet"
        raise NotFoundError(f"cannot inject: rank {rank} does not run on this machine (ranks here: {there})")
    return known[rank]


def ask_rank(path: Path, request: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """One request to the rank's evidence socket, and its answer.

    Raises:
        NotFoundError: nobody answers; the text says why and what to do.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(ANSWER_S)
        try:
            connect_unix(channel, path)
            channel.sendall(json.dumps(request).encode() + b"\n")
            line = _read_line(channel)
        except FileNotFoundError:
            raise NotFoundError(
                f"cannot reach rank {rank}: {path} is not there; a rank opens it at its first step "
                "(for earlier faults set STEADYRUN_FAULTS)"
            ) from None
        except ConnectionError:
            raise NotFoundError(f"cannot reach rank {rank}: the process behind {path} has ended") from None
        except TimeoutError:
            raise NotFoundError(
                f"rank {rank} did not answer within {ANSWER_S:g} s: it is stopped or holds the GIL; "
                "steadyctl status shows its state"
            ) from None
        except OSError as e:
            raise NotFoundError(f"cannot reach rank {rank} through {path}: {e.strerror or e}") from None
    try:
        reply = json.loads(line)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise NotFoundError(f"rank {rank} answered with something else than JSON: {line[:80]!r}")
    return reply


def _read_line(channel: socket.socket, limit_bytes: int = 1 << 20) -> bytes:
    received = b""
    while not received.endswith(b"\n") and len(received) < limit_bytes:
        chunk = channel.recv(65536)
        if not chunk:
            break
        received += chunk
    if not received:
        raise ConnectionResetError("closed without an answer")
    return received
