"""A place for shards, which what Spark calls and plain Python see alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import persist
from persist.client.client import Client


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"persist://{tmp_path}/shards"


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with persist.connect(url) as client:
        yield client
