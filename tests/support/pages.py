"""The pages of the documentation: their code blocks, and running them as they stand there."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_NAMED = "serve|compactor|gc|shards|inspect|check|cat|token|upgrade|create|import|head|count|tail|diff|export|drop"
_PERSIST = re.compile(rf"(?: {{4,}}|ExecStart=\S*/|)(persist (?:{_NAMED})\b.*)$")
_COMMAND = re.compile(r"(curl|printf|persist|echo|pip|sleep) ")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, the heading above it, and what it prints (a `text` block after it)."""

    heading: str
    language: str
    text: str
    line: int
    prints: str | None = None


def pages() -> list[Path]:
    """Every page that users read."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def error_rows(name: str, *commands: str) -> dict[str, str]:
    """What a page has in tables of errors for commands: rows that begin with "`COMMAND", each with its kind."""
    rows = re.findall(r"^\| (`.+?) \| `(\w+)` \|", page(name), re.MULTILINE)
    return {row: kind for row, kind in rows if row[1:].startswith(commands)}


def exit_codes(name: str) -> dict[str, int]:
    """The kinds of errors in the table of a page that has a column for exit codes."""
    rows = re.findall(r"^\| .+? \| `(\w+)` \| (\d) \|", page(name).partition("## Errors")[2], re.MULTILINE)
    return {kind: int(code) for kind, code in rows}


def blocks(name: str) -> list[Block]:
    """The blocks of a page, in order. A `text` block belongs to the block before it."""
    text = page(name)
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        language, body = match.groups()
        above = text[: match.start()]
        line = above.count("\n") + 1
        heading = (["", *_HEADING.findall(re.sub(_FENCE, "", above))])[-1]
        if language == "text" and found and found[-1].prints is None:
            last = found.pop()
            found.append(Block(last.heading, last.language, last.text, last.line, body))
        else:
            found.append(Block(heading, language, body, line))
    return found


def run_python(name: str, found: Sequence[Block], names: dict[str, Any]) -> None:
    """Run Python blocks one after the other in one namespace, and compare what each prints with its `text` block."""
    for block in found:
        said = io.StringIO()
        source = "\n" * block.line + block.text  # a traceback shows the line of the page
        with contextlib.redirect_stdout(said):
            exec(compile(source, str(ROOT / name), "exec"), names)
        if block.prints is not None:
            assert said.getvalue() == block.prints, f"{name}, line {block.line}, prints something else"


def commands(example: str) -> list[str]:
    """The commands of one shell block: a line that is not a continuation begins a new one."""
    found: list[str] = []
    for line in example.splitlines():
        if _COMMAND.match(line):
            found.append(line)
        elif found:
            found[-1] += "\n" + line
    return found


def persist_commands() -> Iterator[tuple[str, str]]:
    """Every `persist …` command line that a page shows, with the page's name."""
    for path in pages():
        for line in path.read_text(encoding="utf-8").splitlines():
            match = _PERSIST.match(line)
            if match:
                yield path.relative_to(ROOT).as_posix(), match.group(1)
