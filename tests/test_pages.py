"""What every page of the documentation keeps: short lines, small cells, true links, commands that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from urllib.parse import unquote

import pytest

from rpc.cli.program import parser_for
from tests.support.pages import ROOT, pages, persist_commands

LINE_CHARS = 110
CELL_WORDS = 25
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# --- the rules: each takes text and returns complaints


def long_lines(text: str) -> list[str]:
    """Lines beyond the limit; those of tables cannot be broken, those of Python are the formatter's business."""
    found = []
    in_python = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            in_python = line == "```python"
        if len(line) > LINE_CHARS and not in_python and not line.startswith("|"):
            found.append(f"line {number} has {len(line)} characters; at most {LINE_CHARS}")
    return found


def big_cells(text: str) -> list[str]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("|"):
            words = max(len(cell.split()) for cell in line.strip("|").split("|"))
            if words > CELL_WORDS:
                found.append(f"line {number} has a cell of {words} words; at most {CELL_WORDS}")
    return found


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path, text: str) -> list[str]:
    """Links to files or headings that are not there; addresses elsewhere are not looked up."""
    found = []
    for link in _LINK.findall(_CODE.sub("", text)):
        target, _, anchor = unquote(link).partition("#")
        if "://" in target:
            continue
        there = (path.parent / target).resolve() if target else path
        if not there.exists():
            found.append(f"{link} is not there")
        elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text(encoding="utf-8")):
            found.append(f"{link}: no such heading")
    return found


# --- the pages keep them


@pytest.mark.parametrize("path", pages(), ids=name_of)
def test_a_page_is_easy_to_read_and_its_links_hold(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert long_lines(text) + big_cells(text) + broken_links(path, text) == []


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / link.partition("#")[0]).resolve() for link in _LINK.findall(index)}
    docs = {path for path in pages() if path.is_relative_to(ROOT / "docs")} - {ROOT / "docs" / "README.md"}
    assert sorted(map(name_of, docs - linked)) == []


@pytest.mark.parametrize(("page", "line"), list(persist_commands()))
def test_every_command_line_that_a_page_shows_can_be_typed(page: str, line: str) -> None:
    words = [word for word in shlex.split(line, comments=True) if word != "&"]
    parser_for(words[1]).parse_args(words[1:])


@pytest.mark.parametrize("name", ["architecture", "timeline"])
def test_a_picture_has_words_for_those_who_do_not_see_it_and_colours_for_dark_pages(name: str) -> None:
    picture = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    assert "<title" in picture
    assert "<desc" in picture
    assert "prefers-color-scheme: dark" in picture
