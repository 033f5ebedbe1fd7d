"""Blobs through `pyarrow.fs`: Google Cloud Storage, Azure Data Lake and HDFS, in one class.

This interface cannot make a write conditional, so a put first checks whether the key exists: write-once holds because
keys are single-use, not because the store enforces it. On object stores a blob appears whole when its stream is closed;
elsewhere it is written to a temporary file and moved to its key.
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
    redact,
    without_secrets,
)
from blob.interface import (
    Blob,
    BlobStat,
    Unfinished,
    check_key,
    check_prefix,
    check_process,
    check_range,
    is_temp_of,
    temp_name,
    walk_directories,
)

_TEMP_DIR = "~tmp"
_OBJECT_STORES = ("gcs", "abfs")
_URL_FORMS = {
    "gs": "gs://bucket/prefix",
    "abfs": "abfs://container@account.dfs.core.windows.net/prefix",
    "abfss": "abfss://container@account.dfs.core.windows.net/prefix",
    "hdfs": "hdfs://host:port/prefix",
}

T = TypeVar("T")


class ArrowFsBlob(Blob):
    """`root` in `filesystem`, any pyarrow file system. `url` is shown; `secret_url` also contains the secrets."""

    def __init__(self, filesystem: Any, root: str, url: str, secret_url: str = "") -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")
        self._url = url
        self._secret_url = secret_url or url
        self._pid = os.getpid()
        self._atomic_close = filesystem.type_name in _OBJECT_STORES

    @classmethod
    def from_url(cls, url: str) -> ArrowFsBlob:
        """`gs:`, `abfs:`, `abfss:` or `hdfs:`; the query is pyarrow's own (see `FileSystem.from_uri`)."""
        if is_ambiguous(url):
            raise BlobMisconfigured(f"blob location {without_secrets(url)!r}: {ESCAPES}")
        parts = urlsplit(url)
        shown = f"{parts.scheme}://{_without_password(parts.netloc)}{parts.path.rstrip('/')}"
        form, redacted_url = _URL_FORMS.get(parts.scheme, "gs://…"), without_secrets(url)
        if not parts.netloc or (parts.scheme.startswith("abfs") and "@" not in parts.netloc):
            raise BlobMisconfigured(f"blob location {redacted_url} must be of the form {form}")
        try:
            filesystem, root = fs.FileSystem.from_uri(url)
        except (ArrowException, OSError, ValueError, ImportError) as error:
            reason = redact(url, str(error))
            raise BlobMisconfigured(f"blob location {redacted_url} cannot be opened: {reason}") from None
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
        if self._atomic_close:
            self._call(key, lambda: self._write(path, body))
        else:
            self._call(key, lambda: self._write_and_move(key, path, body))
        written = self.stat(key)
        if written is None or written.size != len(body):
            raise BlobUnavailable(f"blob {key} was not written completely in {self._url}; put it again")

    def get(self, key: str) -> bytes:
        path = self._path(check_key(key))
        return self._call(key, lambda: self._read(path))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        path = self._path(check_key(key))
        data = self._call(key, lambda: self._read_range(path, start, length))
        if data is None or len(data) != length:
            raise BlobNotFound(f"blob {key} ends before byte {start + length}")
        return data

    def stat(self, key: str) -> BlobStat | None:
        path = self._path(check_key(key))
        info = self._call(key, lambda: self._fs.get_file_info(path))
        return _stat(key, info) if info.type == fs.FileType.File else None

    def delete(self, keys: Sequence[str]) -> None:
        for key in [check_key(key) for key in keys]:
            self._delete_one(key)

    def list(self, prefix: str) -> Iterator[BlobStat]:
        return walk_directories(prefix, self._scan, _stat)

    def close(self) -> None:
        """Does nothing: pyarrow releases its resources with the object."""

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _delete_one(self, key: str) -> None:
        try:
            self._call(key, lambda: self._fs.delete_file(self._path(key)))
        except BlobNotFound:
            return

    def _write(self, path: str, body: bytes) -> None:
        # Not a `with`: an exception would close the stream, and so publish half a blob.
        stream = self._fs.open_output_stream(path)
        stream.write(body)
        stream.close()

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """The temporary files. Object stores have none: they delete unclosed streams themselves."""
        check_prefix(prefix)
        if self._atomic_close:
            return
        for info in self._infos(_TEMP_DIR):
            if info.type == fs.FileType.File and is_temp_of(info.base_name, prefix):
                stat = _stat(info.base_name, info)
                yield Unfinished(f"{_TEMP_DIR}/{info.base_name}", stat.size, stat.modified_ms, info.base_name)

    def abandon(self, unfinished: Sequence[Unfinished]) -> None:
        for put in unfinished:
            self._delete_one(f"{_TEMP_DIR}/{os.path.basename(put.token)}")

    def _write_and_move(self, key: str, path: str, body: bytes) -> None:
        temp = f"{self._root}/{_TEMP_DIR}/{temp_name(key, os.urandom(12).hex())}"
        for file in (temp, path):
            self._fs.create_dir(file.rpartition("/")[0], recursive=True)
        self._write(temp, body)
        self._fs.move(temp, path)

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

    def _infos(self, directory: str) -> Sequence[Any]:
        """The content of a directory below the root; empty if it does not exist."""
        selector = fs.FileSelector(f"{self._root}/{directory}".rstrip("/"), allow_not_found=True)
        infos: Sequence[Any] = self._call(directory, lambda: self._fs.get_file_info(selector))
        return infos

    def _scan(self, directory: str) -> Sequence[tuple[str, bool, Any]]:
        try:
            infos = self._infos(directory)
        except BlobNotFound:  # a file instead of the directory of the prefix
            return []
        names = ((info.base_name, info.type == fs.FileType.Directory, info) for info in infos)
        return [entry for entry in names if "~" not in entry[0]]

    def _call(self, key: str, call: Callable[[], T]) -> T:
        check_process(self._pid, self._url)
        try:
            return call()
        # None of these chains the original error, which may contain secrets and would be logged.
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise BlobNotFound(f"no blob {key} in {self._url}") from None
        except PermissionError as error:
            reason = redact(self._secret_url, str(error))
            raise BlobMisconfigured(f"{self._url} denies access; check the credentials and rights: {reason}") from None
        except (ArrowException, OSError) as error:
            reason = redact(self._secret_url, str(error))
            raise BlobUnavailable(f"{self._url} failed the call for {key}: {reason}") from None


def _stat(key: str, info: Any) -> BlobStat:
    return BlobStat(key, info.size, (info.mtime_ns or 0) // 1_000_000)


def _without_password(netloc: str) -> str:
    login, at, host = netloc.rpartition("@")
    return login.partition(":")[0] + at + host
