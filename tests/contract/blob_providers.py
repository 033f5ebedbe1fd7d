"""One fixture per blob provider. A new provider joins the contract suite by adding its own here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs

from blob import Blob, open_blob
from blob.arrow_fs import ArrowFsBlob
from blob.cache import CachedBlob
from blob.metrics import MeteredBlob
from tests.contract.table_blob import TableBlob

PROVIDERS = [
    "memory",
    "file",
    pytest.param("s3", marks=pytest.mark.services),
    "arrow_local",
    "arrow_mock",
    "decorated",
    "table",
]


@pytest.fixture
def memory_blob() -> Blob:
    return open_blob("mem:")


@pytest.fixture
def file_blob(tmp_path: Path) -> Blob:
    return open_blob(f"file://{tmp_path}/blobs")


@pytest.fixture
def s3_blob(s3_url: str) -> Blob:
    return open_blob(s3_url)


@pytest.fixture
def arrow_local_blob(tmp_path: Path) -> Blob:
    """pyarrow's local file system: writes aside and moves, as with HDFS."""
    return ArrowFsBlob(fs.LocalFileSystem(), str(tmp_path / "arrow"), "arrow-local:")


@pytest.fixture
def arrow_mock_blob() -> Blob:
    """pyarrow's in-memory file system."""
    return ArrowFsBlob(fs._MockFileSystem(), "bucket/prefix", "arrow-mock:")


@pytest.fixture
def decorated_blob() -> Blob:
    """The decorators must keep every promise of what they wrap."""
    return CachedBlob(MeteredBlob(open_blob("mem:"), lambda *_: None), bytes_max=100_000)


@pytest.fixture
def table_blob(tmp_path: Path) -> Blob:
    """The example that docs/internals.md refers to."""
    return TableBlob(str(tmp_path / "blobs.db"))


@pytest.fixture(params=PROVIDERS)
def blob(request: pytest.FixtureRequest) -> Iterator[Blob]:
    """Every provider in turn, empty."""
    store: Blob = request.getfixturevalue(f"{request.param}_blob")
    yield store
    store.close()
