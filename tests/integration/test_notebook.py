"""The notebook of the examples runs from its first cell to its last, and shows what it was saved with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.pages import ROOT
from tests.support.waiting import WAIT_S

NOTEBOOK = ROOT / "examples" / "timeline.ipynb"
VARIES = {"image/png", "text/html"}  # with the versions of the libraries that draw them


def test_the_notebook_shows_what_it_was_saved_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    saved = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.read(NOTEBOOK, as_version=4)
    for cell in run.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(
        run, timeout=WAIT_S, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert [shown(cell) for cell in run.cells] == [shown(cell) for cell in saved.cells]


def shown(cell: Any) -> list[dict[str, Any]]:
    """What a cell shows, by its MIME type; of what varies, only that it is there."""
    outputs = [output["data"] for output in cell.get("outputs", [])]
    return [{kind: kind in VARIES or json.dumps(data[kind]) for kind in data} for data in outputs]
