"""The Python examples of the pages, each run as it stands there."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from tests.support import tutorial
from tests.support.pages import blocks, commands, run_python
from tests.support.shells import run_shell

ROWS = pa.table({"id": range(3_000)})


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples that name a directory make it in a place of their own."""
    monkeypatch.chdir(tmp_path)


def test_the_ten_lines_of_the_readme_print_what_it_says_and_may_be_run_again() -> None:
    [example] = [
        block for block in blocks("README.md") if block.heading == "Ten lines of Python" and block.prints is not None
    ]
    assert len([line for line in example.text.splitlines() if line]) <= 12
    for _ in range(2):
        run_python("README.md", [example], {})
    assert os.listdir() == []


def test_the_first_minute_of_the_readme_needs_no_python(tmp_path: Path) -> None:
    found = [block for block in blocks("README.md") if block.heading == "The first minute"]
    assert {block.language for block in found} == {"sh"}
    assert all(command.startswith(("persist", "printf")) for block in found for command in commands(block.text))
    for block in found:
        run_shell(block, tmp_path)


def test_the_examples_of_the_shell_print_what_the_page_says(tmp_path: Path) -> None:
    for block in blocks("docs/shell.md"):
        run_shell(block, tmp_path)


def test_the_tutorial_without_its_spark_part(tmp_path: Path) -> None:
    tutorial.run(tmp_path, spark=False)


def test_the_examples_of_tables_print_what_the_page_says() -> None:
    run_python("docs/tables.md", [block for block in blocks("docs/tables.md") if block.language == "python"], {})


def test_the_examples_of_scans_print_what_the_page_says() -> None:
    run_python("docs/scan.md", [block for block in blocks("docs/scan.md") if block.language == "python"], {})


def test_the_examples_of_attributes_print_what_the_page_says(tmp_path: Path) -> None:
    with persist.connect(f"persist://{tmp_path}") as client:
        shard = client.create_shard("events", pa.schema([("id", pa.int64())]), key=["id"])
        found = [block for block in blocks("docs/attributes.md") if block.language == "python"]
        run_python("docs/attributes.md", found, {"shard": shard, "rows": [{"id": 0}, {"id": 1}]})


def test_the_examples_of_patterns_print_what_the_page_says() -> None:
    run_python("docs/patterns.md", [block for block in blocks("docs/patterns.md") if block.language == "python"], {})
