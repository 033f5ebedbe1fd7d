"""The interface of a blob store: immutable bytes under keys.

Six operations (put, get, get_range, stat, delete, list) suffice, because fencing belongs to consensus: a zombie
writer leaves at most orphan blobs. See `docs/internals.md`.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from blob.errors import BlobMisconfigured, BlobNotFound

KEY_LENGTH_MAX = 512  # of a key, in characters (all ASCII, so also bytes); S3 allows 1,024 with the URL's prefix
SEGMENT_LENGTH_MAX = 200  # longest part between two slashes; file systems allow 255 bytes

_KEY = re.compile(r"[A-Za-z0-9._/-]+\Z")
_PREFIX = re.compile(r"[A-Za-z0-9._/-]*\Z")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BlobStat:
    """One blob: its key, its size in bytes, and when it was written (milliseconds since 1970, the store's clock)."""

    key: str
    size: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The bytes of a put that has not completed and may never do so: `size` bytes under no key, since `begun_ms`.

    `where` is for display, `token` for the store. A size of -1 is unknown.
    """

    where: str
    size: int
    begun_ms: int
    token: str = ""


@dataclass(frozen=True, slots=True)
class SignedPut:
    """A URL for one PUT, and the headers that the request must carry, because the signature covers them."""

    url: str
    headers: Mapping[str, str]


def temp_name(key: str, unique: str) -> str:
    """The name of a temporary file for the blob `key`: the first segment of the key and a unique suffix."""
    return f"{key.partition('/')[0]}-{unique}"


def is_temp_of(name: str, prefix: str) -> bool:
    """Whether the temporary file `name` may be for a key that starts with `prefix`."""
    first, slash, _ = prefix.partition("/")
    return name.startswith(first + "-" if slash else first)


def slice_range(key: str, data: bytes, start: int, length: int) -> bytes:
    """The bytes `[start, start + length)` of the blob `data`. Raises BlobNotFound if it ends before."""
    if start + length > len(data):
        raise BlobNotFound(f"blob {key} ends at byte {len(data)}, before {start + length}")
    return data[start : start + length]


def walk_directories(
    prefix: str, scan: Callable[[str], Iterable[tuple[str, bool, T]]], stat: Callable[[str, T], BlobStat | None]
) -> Iterator[BlobStat]:
    """List the blobs whose key starts with `prefix`, ascending, in a store that has directories.

    `scan(directory)` returns (name, is a directory, entry) for the content of a directory, which is named by its path
    below the root and a trailing slash. `stat(key, entry)` describes a file, or returns None if it is not a blob.
    """
    check_prefix(prefix)

    def walk(directory: str) -> Iterator[BlobStat]:
        # A directory sorts as its name and a slash, so the walk is in the order of whole keys.
        paths = ((directory + name + "/" * is_directory, entry) for name, is_directory, entry in scan(directory))
        matching = [pair for pair in paths if pair[0].startswith(prefix) or prefix.startswith(pair[0])]
        for path, entry in sorted(matching, key=lambda pair: pair[0]):
            if path.endswith("/"):
                yield from walk(path)
            elif path.startswith(prefix) and (blob := stat(path, entry)) is not None:
                yield blob

    return walk(prefix[: prefix.rfind("/") + 1])


def check_key(key: str) -> str:
    """Return `key` unchanged, or raise BlobMisconfigured if it is not a valid key."""
    if not _KEY.match(key):
        raise BlobMisconfigured(f"blob key {key!r} must be one or more of A-Z a-z 0-9 . _ / -")
    if len(key) > KEY_LENGTH_MAX:
        raise BlobMisconfigured(f"blob key of {len(key)} characters is longer than {KEY_LENGTH_MAX}: {key[:60]!r}…")
    for segment in key.split("/"):
        if segment in ("", ".", ".."):
            raise BlobMisconfigured(f"blob key {key!r} must not hold an empty, '.' or '..' segment")
        if len(segment) > SEGMENT_LENGTH_MAX:
            raise BlobMisconfigured(f"blob key {key!r} holds a segment longer than {SEGMENT_LENGTH_MAX} characters")
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` unchanged, or raise BlobMisconfigured. Every prefix of a valid key is valid."""
    if not _PREFIX.match(prefix) or len(prefix) > KEY_LENGTH_MAX:
        raise BlobMisconfigured(f"blob prefix {prefix[:60]!r} must be at most {KEY_LENGTH_MAX} of A-Z a-z 0-9 . _ / -")
    for segment in prefix.split("/")[:-1]:
        if segment in ("", ".", ".."):
            raise BlobMisconfigured(f"blob prefix {prefix!r} must not hold an empty, '.' or '..' segment")
    return prefix


def check_process(opened_by: int, url: str, error: type[Exception] = BlobMisconfigured) -> None:
    """Raise `error` in a fork of the process `opened_by`, whose connections it must not use."""
    if os.getpid() != opened_by:
        raise error(f"{url} was opened by process {opened_by}, of which this is a fork; reopen it here")


def check_range(start: int, length: int) -> None:
    """Raise BlobMisconfigured unless `[start, start + length)` is a valid range."""
    if start < 0 or length < 0:
        raise BlobMisconfigured(f"a range needs start >= 0 and length >= 0, not start={start} length={length}")


class Blob(ABC):
    """A store of immutable blobs. Thread-safe; open one per process.

    Reopen it after a fork: stores that have connections raise BlobMisconfigured there.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """Canonical location, without secrets; `open_blob(url)` opens the same store."""

    @abstractmethod
    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write a blob, all or nothing; durable and visible to every reader on return.

        Writing the same bytes again succeeds (a retry). BlobExists if the key holds other bytes.
        Never use one key as the directory of another (`a` and `a/b`): file systems reject it.
        """

    @abstractmethod
    def get(self, key: str) -> bytes:
        """All bytes of a blob. BlobNotFound if there is none."""

    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly the bytes `[start, start + length)`.

        BlobNotFound if there is no such blob, or if it ends before the range does (never a short result).
        """

    @abstractmethod
    def stat(self, key: str) -> BlobStat | None:
        """Size and time of a blob, or None if there is none."""

    def put_here(self, key: str) -> int | None:
        """The size of a blob that this process put within the last minute and has not deleted, without a request.

        None if it is unknown; call `stat` then. It saves a round trip to check a blob whose put was just acknowledged.
        Another process may have deleted the blob meanwhile.
        """
        return None

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Delete any number of blobs; missing ones are ignored. After an error some may be deleted: repeat it."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[BlobStat]:
        """Every blob whose key starts with `prefix`, ascending by key; fetched page by page.

        Blobs written or deleted during the listing may or may not appear; all others appear exactly once.
        """

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """The puts of keys that start with `prefix` that have not completed, in any order; `list` omits them.

        Their writers may still be running, or were killed. Empty if the store keeps no bytes of such puts.
        """
        check_prefix(prefix)
        return iter(())

    def abandon(self, unfinished: Sequence[Unfinished]) -> None:  # noqa: B027 - optional, as `unfinished`
        """Delete the bytes of these puts. A put that is still running fails, and may be retried."""

    def check(self) -> None:
        """Probe the store with one small write, read and delete, at start-up.

        BlobMisconfigured names the setting that is wrong; BlobUnavailable if the store does not answer.
        """
        key = f"check/{os.urandom(8).hex()}"
        self.put(key, b"check")
        if self.get_range(key, 1, 3) != b"hec":
            raise BlobMisconfigured(f"{self.url} does not return what was written to it")
        self.delete([key])

    @abstractmethod
    def close(self) -> None:
        """Release connections and files. Do not use the store afterwards. Closing twice is allowed."""

    def presign_get(self, key: str, expires_s: int) -> str | None:
        """A URL that lets its holder GET this blob for `expires_s` seconds, or None if the store has no such URLs."""
        return None

    def presign_put(self, key: str, expires_s: int) -> SignedPut | None:
        """A URL that lets its holder PUT this key for `expires_s` seconds if it does not exist, or None.

        Only a store that refuses to overwrite (412) has them, because such a URL may leak. May send requests.
        """
        return None

    def local_path(self, key: str) -> str | None:
        """The path of this blob's file on this machine, or None if the store has no files. May not exist."""
        return None
