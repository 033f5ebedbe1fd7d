"""From URLs to stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from blob import BlobMisconfigured, BlobUnavailable, open_blob, without_secrets
from blob.arrow_fs import ArrowFsBlob
from blob.cache import CachedBlob
from consensus import ConsensusMisconfigured, open_consensus


def test_mem_is_private_and_mem_with_a_name_is_shared() -> None:
    open_blob("mem:").put("k", b"x")
    assert open_blob("mem:").stat("k") is None
    open_blob("mem:shared-by-this-test").put("k", b"x")
    assert open_blob("mem:shared-by-this-test").get("k") == b"x"
    assert open_consensus("mem:").compare_and_set("k", 1, b"x")
    assert open_consensus("mem:").head("k") is None
    assert open_consensus("mem:shared-by-this-test").compare_and_set("k", 1, b"x")
    assert open_consensus("mem:shared-by-this-test").head("k") is not None


def test_a_file_url_names_the_directory_that_it_was_opened_with(tmp_path: Path) -> None:
    blob = open_blob(f"file://{tmp_path}/with%20space")
    assert (tmp_path / "with space").is_dir()
    blob.put("a/b", b"x")
    assert open_blob(blob.url).get("a/b") == b"x"
    assert blob.local_path("a/b") == f"{tmp_path}/with space/a/b"


@pytest.mark.parametrize("url", [
    "", "ftp://host/dir", "blobs", "mem:a b", "/var/blobs", "S4://user:secret@b/x?k=secret",
    "S4://user:p@ss-secret@b", "S4://u:a?b=/secret@b",
])  # fmt: skip
def test_an_unknown_blob_location_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(BlobMisconfigured) as refused:
        open_blob(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("options", ["?cache_mb=1", "?cache_mb=1&", "?cache_mb=7&cache_mb=1"])
def test_any_blob_location_may_ask_for_a_cache(tmp_path: Path, options: str) -> None:
    blob = open_blob(f"file://{tmp_path}/x{options}")
    assert isinstance(blob, CachedBlob)
    assert blob.url == f"file://{tmp_path}/x"
    blob.put("k", b"once")
    assert blob.get("k") == b"once"
    (tmp_path / "x" / "k").unlink()
    assert blob.get("k") == b"once"
    assert (blob.hits, blob.misses) == (1, 1)


def test_a_cache_leaves_the_other_options_to_the_store() -> None:
    blob = open_blob("s3://bucket/p?region=eu-west-1&cache_mb=4&endpoint=http://127.0.0.1:9000")
    assert isinstance(blob, CachedBlob)
    assert blob.url == "s3://bucket/p?endpoint=http://127.0.0.1:9000&region=eu-west-1"


@pytest.mark.parametrize(
    "options", ["cache_mb=", "cache_mb=0", "cache_mb=-1", "cache_mb=1.5", "cache_mb=x", "cache_mb"]
)
def test_a_cache_of_no_size_is_refused(options: str) -> None:
    with pytest.raises(BlobMisconfigured, match="cache_mb must be 1 to"):
        open_blob(f"mem:?{options}")


@pytest.mark.parametrize(
    "url",
    ["", "mysql://user:secret@h/d", "postgresql+pg8000://u:secret@h/d", "mysql://u:p@ss-secret@h", "mem:a b", "sqlite"],
)
def test_an_unknown_consensus_location_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(ConsensusMisconfigured) as refused:
        open_consensus(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", [
    "gs://",
    "gs://bucket/x?no_such_option=1",
    "abfs://container/x",
    "abfss://account.dfs.core.windows.net/x",
    "hdfs://",
    "hdfs://user:secret@no-such-host.invalid:1/x",
])  # fmt: skip
def test_an_arrow_location_that_cannot_be_meant(url: str) -> None:
    with pytest.raises(BlobMisconfigured, match="blob location") as refused:
        open_blob(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(("url", "is_told"), [("/var/backups", True), ("backups", True), ("ftp://host/x", False)])
def test_a_path_without_a_scheme_is_refused_with_the_url_of_a_directory(url: str, is_told: bool) -> None:
    with pytest.raises(BlobMisconfigured) as refused:
        open_blob(url)
    assert ("file:///" in str(refused.value)) == is_told


def test_an_arrow_location_opens_without_being_contacted() -> None:
    blob = open_blob("abfs://container@account.dfs.core.windows.net/some/prefix/")
    assert isinstance(blob, ArrowFsBlob)
    assert blob.url == "abfs://container@account.dfs.core.windows.net/some/prefix"
    blob.close()


class _FailsHalfway:
    """A stream of a file system that breaks while it is written."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def write(self, data: bytes) -> None:
        self._inner.write(data[: len(data) // 2])  # type: ignore[attr-defined]
        raise OSError("connection reset")

    def close(self) -> None:
        raise AssertionError("closing would publish half a blob")


def test_a_write_that_breaks_off_is_not_published(tmp_path: Path) -> None:
    from pyarrow import fs

    local = fs.LocalFileSystem()

    class Breaking:
        type_name = "local"

        def __getattr__(self, name: str) -> object:
            return getattr(local, name)

        def open_output_stream(self, path: str) -> _FailsHalfway:
            return _FailsHalfway(local.open_output_stream(path))

    blob = ArrowFsBlob(Breaking(), str(tmp_path), "broken:")
    with pytest.raises(BlobUnavailable, match="connection reset"):
        blob.put("a/k", b"0123456789")
    assert blob.stat("a/k") is None
    assert list(blob.list("")) == []


@pytest.mark.parametrize(("url", "shown"), [
    ("s3://bucket/prefix", "s3://bucket/prefix"),
    ("/var/blobs", "/var/blobs"),
    ("ftp://user:hidden@host/x", "ftp://…@host/x"),
    ("ftp://user:h@i-d@host/x", "ftp://…@host/x"),
    ("ftp://user:h/i/d@host/x", "ftp://…@host/x"),
    ("ftp://user:h?i@host/x", "ftp://…"),
    ("ftp://user:h#i@host/x", "ftp://…"),
    ("ftp://host/x?key=hidden", "ftp://host/x"),
    ("ftp://host/x?key=hid@den", "ftp://…"),
    ("ftp://user:hidden@host/x?key=hidden#hidden", "ftp://…@host/x"),
    ("ftp:user:hidden@host", "ftp://…@host"),
    ("hidden@host", "…@host"),
    ("http://a:1,http://user:hidden@b:2", "http://…@b:2"),
])  # fmt: skip
def test_a_location_in_a_message_has_no_user_password_or_options(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


SECRETS = ["{0}://user:secret@host/x", "{0}://user:p@s-secret@host/x", "{0}://user:p/secret@host/x"]
SECRETS += ["{0}://user:p?secret@host/x", "{0}://user:p#secret@host/x", "{0}://user:secret/@host:x/y"]
