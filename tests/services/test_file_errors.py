"""Every failure of this store in docs/troubleshooting.md, provoked."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from blob import Blob, BlobMisconfigured, BlobNotFound, BlobUnavailable, open_blob
from blob.arrow_fs import ArrowFsBlob
from blob.file import STALE_TEMP_S, FileBlob


def test_the_disk_is_full(tiny_disk: Path) -> None:
    blob = open_blob(f"file://{tiny_disk}")
    blob.put("small", b"fits")
    with pytest.raises(BlobUnavailable, match="ENOSPC"):
        blob.put("large", os.urandom(4 * 2**20))
    assert blob.stat("large") is None
    assert [found.key for found in blob.list("")] == ["ballast", "small"]
    assert list((tiny_disk / "~tmp").iterdir()) == [], "the failed write leaves no bytes behind"
    blob.delete(["ballast"])
    blob.put("small2", b"fits again")


class Recorder:
    """Keeps the order in which files and directories are synced and linked, by their names below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.calls: list[tuple[str, str]] = []
        self.blob = FileBlob(root, fsync=self._fsync, link=self._link)

    def put(self, key: str, data: bytes) -> list[tuple[str, str]]:
        """What a put does."""
        self.calls = []
        self.blob.put(key, data)
        return self.calls

    def _fsync(self, fd: int) -> None:
        self.calls.append(("fsync", self._name(os.readlink(f"/proc/self/fd/{fd}"))))
        os.fsync(fd)

    def _link(self, source: str, target: str) -> None:
        os.link(source, target)
        self.calls.append(("link", self._name(target)))

    def _name(self, path: str) -> str:
        name = os.path.relpath(path, self._root)
        return "temporary" if name.startswith("~tmp/") else name


def test_a_put_syncs_the_file_before_it_has_a_name_and_the_directory_after(tmp_path: Path) -> None:
    store = Recorder(tmp_path / "blobs")
    first = store.put("shard/writer/part", b"rows")
    assert first[0] == ("fsync", "temporary"), "a name without its bytes must not survive a crash"
    assert first[-2:] == [("link", "shard/writer/part"), ("fsync", "shard/writer")], "nor bytes without their name"
    assert set(first[1:-2]) == {("fsync", "shard"), ("fsync", ".")}, "new directories have durable names, too"
    again = store.put("shard/writer/other", b"rows")
    assert again == [("fsync", "temporary"), ("link", "shard/writer/other"), ("fsync", "shard/writer")]


def test_a_put_that_finds_its_bytes_syncs_them_since_whoever_wrote_them_may_have_crashed(tmp_path: Path) -> None:
    Recorder(tmp_path / "blobs").put("shard/part", b"rows")
    again = Recorder(tmp_path / "blobs").put("shard/part", b"rows")
    assert again[-2:] == [("fsync", "shard/part"), ("fsync", "shard")]
    assert ("link", "shard/part") not in again


def test_the_directory_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(BlobMisconfigured, match="cannot be made"):
        open_blob(f"file://{tmp_path}/file/blobs")


def test_a_key_needs_a_directory_where_a_file_is(tmp_path: Path) -> None:
    blob = open_blob(f"file://{tmp_path}/blobs")
    blob.put("a", b"x")
    with pytest.raises(BlobMisconfigured, match="a/b"):
        blob.put("a/b", b"x")
    blob.put("c/d", b"x")
    with pytest.raises(BlobMisconfigured, match="c"):
        blob.put("c", b"x")


@pytest.mark.parametrize("url", ["file:relative", "file://host/dir", "file:///", "file:///dir?x=1"])
def test_a_url_that_cannot_be_meant(url: str) -> None:
    with pytest.raises(BlobMisconfigured, match="file:"):
        open_blob(url)


def test_the_directory_vanishes(tmp_path: Path) -> None:
    blob = open_blob(f"file://{tmp_path}/blobs")
    blob.put("a/k", b"x")
    (tmp_path / "blobs").rename(tmp_path / "moved")
    with pytest.raises(BlobNotFound):
        blob.get("a/k")
    assert list(blob.list("")) == []
    with pytest.raises(BlobUnavailable, match="gone"):  # another store in its place would lack the blobs of before
        blob.put("a/k", b"made anew")
    (tmp_path / "moved").rename(tmp_path / "blobs")
    blob.put("a/l", b"y")
    assert (blob.get("a/k"), blob.get("a/l")) == (b"x", b"y")


def _put_for_ever(url: str) -> None:
    blob = open_blob(url)
    for number in range(1_000_000):
        blob.put(f"w/{number}", f"{number} ".encode() * 20_000)


def test_a_writer_is_killed_in_the_middle(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/blobs"
    context = multiprocessing.get_context("spawn")
    writer = context.Process(target=_put_for_ever, args=(url,))
    writer.start()
    blob = open_blob(url)
    while blob.stat("w/20") is None:
        assert writer.is_alive()
    assert writer.pid is not None
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    found = list(blob.list(""))
    assert len(found) >= 21
    for each in found:
        number = each.key.removeprefix("w/")
        assert blob.get(each.key) == f"{number} ".encode() * 20_000, "a blob is whole or not there"


@pytest.mark.parametrize("through", ["files", "arrow"])
def test_what_a_killed_put_has_written_is_told_by_its_key_and_can_be_abandoned(tmp_path: Path, through: str) -> None:
    root = tmp_path / "blobs"

    def opened() -> Blob:
        return FileBlob(root) if through == "files" else ArrowFsBlob(fs.LocalFileSystem(), str(root), "arrow-local:")

    def killed() -> None:
        store = opened()
        for name in ("_publish", "_fs"):
            if hasattr(store, name):
                setattr(store, name, _Dies(getattr(store, name)))
        store.put("s1/w1/a", b"half" * 100)

    writer = multiprocessing.get_context("fork").Process(target=killed)
    writer.start()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    store = opened()
    assert list(store.list("")) == []
    for prefix in ("", "s", "s1", "s1/", "s1/w1/"):
        [found] = store.unfinished(prefix)
        assert (found.size, found.where.startswith("~tmp/s1-")) == (400, True)
    assert list(store.unfinished("s2")) == list(store.unfinished("s11")) == list(store.unfinished("s/")) == []
    store.abandon([found, found])
    assert list(store.unfinished("")) == []
    store.put("s1/w1/a", b"whole")
    assert store.get("s1/w1/a") == b"whole"


class _Dies:
    """Kills the process where what was written aside would come to its key."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __call__(self, *_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def __getattr__(self, name: str) -> Any:
        return self if name == "move" else getattr(self._inner, name)


def test_leftovers_of_crashed_writers_are_swept_when_old(tmp_path: Path) -> None:
    root = tmp_path / "blobs"
    open_blob(f"file://{root}")
    leftover = root / "~tmp" / "crashed"
    leftover.write_bytes(b"half")
    blob = open_blob(f"file://{root}")
    assert leftover.exists(), "it may belong to a writer that still writes"
    assert list(blob.list("")) == []
    FileBlob(root, now_s=lambda: time.time() + STALE_TEMP_S + 60)
    assert not leftover.exists()
