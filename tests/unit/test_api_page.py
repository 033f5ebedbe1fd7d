"""docs/python.md is what the docstrings say now, and the table of docs/shell.md what the parsers say."""

from __future__ import annotations

import persist
from tests.support import cli_page
from tests.support.api_page import PAGE, page


def test_the_page_of_the_python_api_is_made_from_the_code_as_it_is() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_the_page_has_every_public_name() -> None:
    text = page()
    public = [name for name in persist.__all__ if not name.startswith("__")]
    assert [name for name in public if f"## {name}\n" not in text and f"`{name}`" not in text] == []


def test_the_table_of_commands_is_made_from_the_parsers_as_they_are() -> None:
    text = cli_page.PAGE.read_text(encoding="utf-8")
    assert text == cli_page.page(text), "run `make docs`"
