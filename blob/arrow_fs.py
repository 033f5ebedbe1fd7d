"""Blobs through `pyarrow.fs`: Google Cloud Storage, Azure Data Lake and HDFS, in one class.

These file systems cannot refuse to overwrite through this interface, so a key is looked up before it is
written: write-once holds because keys are single-use, not because the store enforces it. On object stores a
blob appears when its stream is closed, whole; elsewhere it is written aside and moved to its key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pyarrow import ArrowException, fs

from blob.errors import (
    ESCAPES,
    BlobExists,
    BlobMisconfigured,
    BlobNotFound,
    BlobUnavailable,
    is_ambiguous,
    said_without,
    without_secrets,
)
from blob.interface import (
    Blob,
    BlobStat,
    Unfinished,
    aside_name,
    check_key,
    check_prefix,
    check_process,
    check_range,
    is_aside,
)

_TEMP_DIR = "~tmp"
_OBJECT_STORES = ("gcs", "abfs")
_URL_NEEDS = {
    "gs": "gs://bucket/prefix",
    "abfs": "abfs://container@account.dfs.core.windows.net/prefix",
    "abfss": "abfss://container@account.dfs.core.windows.net/prefix",
    "hdfs": "hdfs://host:port/prefix",
}

T = TypeVar("T")


class ArrowFsBlob(Blob):
    """`root` in `filesystem`, any pyarrow file system; `url` is what is shown for it."""

    def __init__(self, filesystem: Any, root: str, url: str, whole_url: str = "") -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._url = url
        self._whole_url = whole_url or url  # with its secrets, which no message may have
        self._pid = os.getpid()
        self._whole_on_close = filesystem.type_name in _OBJECT_STORES

    @classmethod
    def from_url(cls, url: str) -> ArrowFsBlob:
        """`gs:`, `abfs:`, `abfss:` or `hdfs:`; the query is pyarrow's own (see `FileSystem.from_uri`)."""
        if is_ambiguous(url):
            raise BlobMisconfigured(f"blob location {without_secrets(url)!r}: {ESCAPES}")
        parts = urlsplit(url)
        shown = f"{parts.scheme}://{_without_password(parts.netloc)}{parts.path.rstrip('/')}"
        form, said = _URL_NEEDS.get(parts.scheme, "gs://…"), without_secrets(url)
        if not parts.netloc or (parts.scheme.startswith("abfs") and "@" not in parts.netloc):
            raise BlobMisconfigured(f"blob location {said} must be of the form {form}")
        try:
            filesystem, root = fs.FileSystem.from_uri(url)
        except (ArrowException, OSError, ValueError, ImportError) as error:
            reason = said_without(url, str(error))
            raise BlobMisconfigured(f"blob location {said} cannot be opened: {reason}") from None
        return cls(filesystem, root, shown, url)

    @property
    def url(self) -> str:
        return self._url

    def put(self, key: str, data: bytes | memoryview) -> None:
        path = self._path(check_key(key))
        body = bytes(data)
        if self.stat(key) is not None:
            if self.get(key) != body:
                raise BlobExists(f"blob {key} exists with other bytes; keys are single-use")
            return
        if self._whole_on_close:
            self._calling(key, lambda: self._write(path, body))
        else:
            self._calling(key, lambda: self._write_aside(key, path, body))
        written = self.stat(key)
        if written is None or written.size != len(body):
            raise BlobUnavailable(f"blob {key} did not arrive whole in {self._url}; put it again")

    def get(self, key: str) -> bytes:
        path = self._path(check_key(key))
        return self._calling(key, lambda: self._read(path))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        path = self._path(check_key(key))
        data = self._calling(key, lambda: self._read_range(path, start, length))
        if data is None or len(data) != length:
            raise BlobNotFound(f"blob {key} ends before byte {start + length}")
        return data

    def stat(self, key: str) -> BlobStat | None:
        path = self._path(check_key(key))
        found = self._calling(key, lambda: self._fs.get_file_info(path))
        return _stat(key, found) if found.type == fs.FileType.File else None

    def delete(self, keys: Sequence[str]) -> None:
        for key in [check_key(key) for key in keys]:
            self._delete_one(key)

    def list(self, prefix: str) -> Iterator[BlobStat]:
        check_prefix(prefix)
        start = prefix.rpartition("/")[0]
        return self._walk(start + "/" if start else "", prefix)

    def check(self) -> None:
        key = f"check/{os.urandom(8).hex()}"
        self.put(key, b"check")
        if self.get_range(key, 1, 3) != b"hec":
            raise BlobMisconfigured(f"{self._url} does not return what was written to it")
        self.delete([key])

    def close(self) -> None:
        """Nothing to release: pyarrow does so with the object."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _delete_one(self, key: str) -> None:
        try:
            self._calling(key, lambda: self._fs.delete_file(self._path(key)))
        except BlobNotFound:
            return

    def _write(self, path: str, body: bytes) -> None:
        # Not a `with`: leaving it by an exception would close, and so publish, half a blob.
        stream = self._fs.open_output_stream(path)
        stream.write(body)
        stream.close()

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """What was written aside. Object stores tell of none: they delete by themselves what was never closed."""
        check_prefix(prefix)
        selector = fs.FileSelector(f"{self._root}/{_TEMP_DIR}", allow_not_found=True)
        for found in [] if self._whole_on_close else self._calling(_TEMP_DIR, lambda: self._fs.get_file_info(selector)):
            if found.type == fs.FileType.File and is_aside(found.base_name, prefix):
                stat = _stat(found.base_name, found)
                yield Unfinished(f"{_TEMP_DIR}/{found.base_name}", stat.size, stat.modified_ms, found.base_name)

    def abandon(self, found: Sequence[Unfinished]) -> None:
        for one in found:
            self._delete_one(f"{_TEMP_DIR}/{os.path.basename(one.token)}")

    def _write_aside(self, key: str, path: str, body: bytes) -> None:
        aside = f"{self._root}/{_TEMP_DIR}/{aside_name(key, os.urandom(12).hex())}"
        for each in (aside, path):
            self._fs.create_dir(each.rpartition("/")[0], recursive=True)
        self._write(aside, body)
        self._fs.move(aside, path)

    def _read(self, path: str) -> bytes:
        with self._fs.open_input_stream(path) as stream:
            data: bytes = stream.read()
            return data

    def _read_range(self, path: str, start: int, length: int) -> bytes | None:
        """None if the file ends before the range does."""
        with self._fs.open_input_file(path) as file:
            if start + length > file.size():
                return None
            data: bytes = file.read_at(length, start)
            return data

    def _walk(self, below: str, prefix: str) -> Iterator[BlobStat]:
        # A directory sorts as its name and a slash: then the walk is in the order of whole keys.
        selector = fs.FileSelector(f"{self._root}/{below}".rstrip("/"), allow_not_found=True)
        found = []
        try:
            infos = self._calling(below, lambda: self._fs.get_file_info(selector))
        except BlobNotFound:
            # A file where the prefix has a directory.
            return
        for info in infos:
            name = below + info.base_name + ("/" if info.type == fs.FileType.Directory else "")
            if "~" not in info.base_name and (name.startswith(prefix) or prefix.startswith(name)):
                found.append((name, info))
        for name, info in sorted(found, key=lambda pair: pair[0]):
            if name.endswith("/"):
                yield from self._walk(name, prefix)
            elif name.startswith(prefix):
                yield _stat(name, info)

    def _calling(self, key: str, call: Callable[[], T]) -> T:
        check_process(self._pid, self._url)
        try:
            return call()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise BlobNotFound(f"no blob {key} in {self._url}") from None  # what it says may have secrets, as below
        except PermissionError as error:
            said = said_without(self._whole_url, str(error))
            raise BlobMisconfigured(f"{self._url} refuses; check the credentials and their rights: {said}") from None
        except (ArrowException, OSError) as error:  # which a log would tell, too, if it came along
            said = said_without(self._whole_url, str(error))
            raise BlobUnavailable(f"{self._url} did not carry out the call for {key}: {said}") from None


def _stat(key: str, info: Any) -> BlobStat:
    return BlobStat(key, info.size, (info.mtime_ns or 0) // 1_000_000)


def _without_password(netloc: str) -> str:
    login, at, host = netloc.rpartition("@")
    return login.partition(":")[0] + at + host
