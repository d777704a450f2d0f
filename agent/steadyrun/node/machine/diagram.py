"""The state diagrams of a rank and of a node as Mermaid text, drawn from the very tables the machines obey.

``python -m steadyrun.node.machine.diagram`` prints them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from steadyrun.node.machine import node, rank
from steadyrun.node.machine.events import NodePhase, RankPhase

__all__ = ["mermaid"]

E = TypeVar("E", bound=Enum)


def mermaid() -> str:
    """Two fenced Mermaid state diagrams with their headings, ending in a newline."""
    ranks = _diagram(rank.ALLOWED, RankPhase.STANDBY)
    nodes = _diagram(node.ALLOWED, NodePhase.JOINING)
    return f"**A rank, as its node sees it**\n\n{ranks}\n**A node**\n\n{nodes}"


def _diagram(allowed: Mapping[E, frozenset[E]], first: E) -> str:
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first.name}"]
    for phase, followers in allowed.items():
        order = list(type(phase))
        lines += [f"    {phase.name} --> {f.name}" for f in sorted(followers, key=order.index)]
        if not followers:
            lines.append(f"    {phase.name} --> [*]")
    return "\n".join([*lines, "```", ""])


if __name__ == "__main__":
    print(mermaid(), end="")
