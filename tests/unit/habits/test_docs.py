"""The documents say what the code says; this file run with ``--update-docs`` writes their generated parts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from steadyrun.core.classes import EXIT_OF_CLASS, ExitClass
from steadyrun.core.options import OPTIONS, markdown_table
from steadyrun.node.machine.diagram import mermaid

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
# What a document may name although a fresh checkout does not have it.
MADE_LATER = ("steadyrun/", ".venv")


def part(document: Path, name: str) -> str:
    """What stands between ``<!-- name:begin -->`` and ``<!-- name:end -->``."""
    found = re.findall(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", document.read_text(), re.DOTALL)
    assert len(found) == 1, f"{document.name} has {len(found)} parts named {name}"
    return str(found[0])


def check_generated(document: Path, name: str, text: str, request: pytest.FixtureRequest) -> None:
    wanted = text.strip() + "\n"
    if request.config.getoption("--update-docs") and part(document, name) != wanted:
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        head, _, rest = document.read_text().partition(begin)
        document.write_text(head + begin + wanted + end + rest.partition(end)[2])
    assert part(document, name) == wanted, f"{document.name} is behind the code: run this test with --update-docs"


def rows(table: str) -> list[list[str]]:
    """Cells of a Markdown table's body."""
    lines = [line for line in table.strip().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_readme_lists_every_option(checkout: Path, request: pytest.FixtureRequest) -> None:
    check_generated(checkout / "README.md", "options", markdown_table(), request)


def test_options_named_in_the_documents_exist(checkout: Path) -> None:
    known = {flag for option in OPTIONS for flag in option.flags}
    for name in DOCUMENTS:
        for flag in re.findall(r"--ft-[a-z][\w-]*", (checkout / name).read_text()):
            assert flag in known or flag.startswith("--ft-param-"), f"{name} names {flag}, which does not exist"


def test_architecture_shows_the_state_diagram_of_the_machines(checkout: Path, request: pytest.FixtureRequest) -> None:
    check_generated(checkout / "ARCHITECTURE.md", "diagram", mermaid(), request)


def test_readme_has_every_exit_code_and_its_classes(checkout: Path) -> None:
    table = rows(part(checkout / "README.md", "exit-codes"))
    assert {int(row[0]): row[1].strip("`") for row in table} == {int(e): e.name.lower() for e in ExitClass}
    for code, _, _, classes in table:
        named = {c.strip(" `") for c in classes.split(",") if c.strip()}
        assert named == {c.value for c, e in EXIT_OF_CLASS.items() if e == int(code)}, f"exit code {code}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_and_folders_named_in_the_documents_exist(name: str, checkout: Path) -> None:
    text = (checkout / name).read_text()
    tops = {p.name for p in checkout.iterdir()} - {".git", "steadyrun"}
    paths = {p.rstrip("/.,:)") for p in re.findall(r"(?<![\w/.-])((?:\.ci|[a-z]+)/[\w./-]+|[A-Z]+\.md)", text)}
    paths = {p for p in paths if p.partition("/")[0] in tops or p.endswith(".md")}
    missing = sorted(p for p in paths if not (checkout / p).exists() and not p.startswith(MADE_LATER))
    assert missing == []
    for folder in re.findall(r"^ {0,4}([a-z]+/steadyrun/[\w/]+)", text, re.MULTILINE):
        assert (checkout / folder).is_dir(), folder


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_between_documents_lead_somewhere(name: str, checkout: Path) -> None:
    text = (checkout / name).read_text()
    for target in re.findall(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", text):
        assert (checkout / target).exists(), f"{name} links to {target}"
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    own = {re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in headings}
    for anchor in re.findall(r"\]\(#([^)]+)\)", text):
        assert anchor in own, f"{name} has no heading for #{anchor}"
