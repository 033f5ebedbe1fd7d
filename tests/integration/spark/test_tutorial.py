"""The tutorial, its PySpark part included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import tutorial

pytestmark = pytest.mark.spark


@pytest.mark.smoke
@pytest.mark.proof
def test_the_tutorial_prints_what_it_says(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tutorial.run(tmp_path, spark=True)
