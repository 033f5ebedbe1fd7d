"""The Python examples of the pages, each run as it stands there."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from tests.support import tutorial
from tests.support.pages import blocks, run_python

ROWS = pa.table({"id": range(3_000)})


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples that name a directory make it in a place of their own."""
    monkeypatch.chdir(tmp_path)


def test_the_ten_lines_of_the_readme_print_what_it_says_and_may_be_run_again() -> None:
    [example] = [block for block in blocks("README.md") if block.heading == "Ten lines" and block.prints is not None]
    assert len([line for line in example.text.splitlines() if line]) <= 12
    for _ in range(2):
        run_python("README.md", [example], {})
    assert os.listdir() == []


def test_the_tutorial_without_its_spark_part(tmp_path: Path) -> None:
    tutorial.run(tmp_path, spark=False)


def test_the_examples_of_tables_print_what_the_page_says() -> None:
    run_python("docs/tables.md", [block for block in blocks("docs/tables.md") if block.language == "python"], {})


def test_the_examples_of_attributes_print_what_the_page_says(tmp_path: Path) -> None:
    with persist.connect(f"persist://{tmp_path}") as client:
        shard = client.create_shard("events", pa.schema([("id", pa.int64())]), key=["id"])
        found = [block for block in blocks("docs/attributes.md") if block.language == "python"]
        run_python("docs/attributes.md", found, {"shard": shard, "rows": [{"id": 0}, {"id": 1}]})
