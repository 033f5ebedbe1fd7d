"""docs/phases.md shows the table that `step` checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from persist.core.commands import Command, kinds
from persist.core.phases import Phase, phases_of

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "phases.md"
HEAD = f"| command | {' | '.join(phase.value for phase in Phase)} |"


def table() -> str:
    rows = [HEAD, "| --- |" + " --- |" * len(Phase)]
    for command in kinds(Command):
        cells = ["yes" if phase in phases_of(command) else "**no**" for phase in Phase]
        rows.append(f"| `{command.__name__}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def test_the_document_shows_the_table(pytestconfig: pytest.Config) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    start = text.index("| command |")
    end = text.index("\n\n", start)
    if pytestconfig.getoption("--rewrite"):
        DOCUMENT.write_text(text[:start] + table() + text[end:], encoding="utf-8")
        return
    assert text[start:end] == table(), "run this test with --rewrite"
