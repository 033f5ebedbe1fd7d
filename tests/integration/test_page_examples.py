"""The Python examples of the pages, each run as it stands there."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from persist.core.errors import Corruption
from tests.support import tutorial
from tests.support.pages import blocks, run_python
from tests.support.waiting import WAIT_S

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


def test_the_examples_of_attributes_print_what_the_page_says(tmp_path: Path) -> None:
    with persist.connect(f"persist://{tmp_path}") as client:
        shard = client.create_shard("events", pa.schema([("id", pa.int64())]), key=["id"])
        found = [block for block in blocks("docs/attributes.md") if block.language == "python"]
        run_python("docs/attributes.md", found, {"shard": shard, "rows": [{"id": 0}, {"id": 1}]})


HOLDS = 'holds.callback(client.shard(name).open_reader(purpose="backup").close)'


@pytest.mark.parametrize("held", [True, False])
def test_the_backup_recipe_needs_its_holds_and_then_the_copy_is_exact(
    held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the copy of the log and that of the blobs, others write, and everything is merged and collected."""
    [recipe] = [block for block in blocks("docs/deployment.md") if block.heading == "Backups"]
    assert HOLDS in recipe.text
    recipe = replace(recipe, text=recipe.text if held else recipe.text.replace(HOLDS, "pass"))
    names: dict[str, Any] = {}
    run_python("docs/deployment.md", [recipe], names)
    source, target = tmp_path / "source", tmp_path / "target"
    walk = os.walk

    with persist.connect(f"persist://{source}") as client:
        shard = client.create_shard("orders", pa.schema([("id", pa.int64())]), key=["id"])
        for _ in range(10):
            shard.insert(ROWS)

        def after_maintenance(top: Path) -> Any:
            for _ in range(30):
                shard.insert(ROWS)
            maintain = [sys.executable, "-m", "persist.cli", "compactor", "--gc", "--once", "--dir", str(source)]
            for _ in range(2):
                subprocess.run(maintain, check=True, capture_output=True, timeout=WAIT_S)
            return walk(top)

        monkeypatch.setattr(os, "walk", after_maintenance)
        names["backup"](source, target)
    with persist.connect(f"persist://{target}") as copied:
        if held:
            found = copied.shard("orders")
            assert found.snapshot().to_arrow(expand=True).num_rows == 10 * ROWS.num_rows
            found.insert(ROWS)
        else:
            with pytest.raises(Corruption):
                copied.shard("orders").snapshot().to_arrow()
