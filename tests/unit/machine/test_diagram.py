"""The drawn state diagrams."""

from __future__ import annotations

from steadyrun.node.machine import node, rank
from steadyrun.node.machine.diagram import mermaid


def test_every_move_of_both_tables_is_drawn_once() -> None:
    lines = mermaid().splitlines()
    moves = [f"    {old.name} --> {new.name}" for t in (rank.ALLOWED, node.ALLOWED) for old in t for new in t[old]]
    arrows = [line for line in lines if " --> " in line and "[*]" not in line]
    assert sorted(arrows) == sorted(moves)


def test_each_diagram_begins_somewhere_and_ends_where_nothing_follows() -> None:
    text = mermaid()
    assert text.count("```mermaid") == 2
    for end in ("EXITED", "LEFT", "EXCLUDED"):
        assert f"    {end} --> [*]" in text
    assert "    [*] --> STANDBY" in text
    assert "    [*] --> JOINING" in text
