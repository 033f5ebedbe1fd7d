"""What a blob store is: immutable bytes under keys, and nothing else.

Six operations (put, get, get_range, stat, delete, list) suffice, because fencing belongs to consensus: a
zombie writer can at most leave blobs that nobody names. See `docs/internals.md`.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from blob.errors import BlobMisconfigured

KEY_LENGTH_MAX = 512
"""Longest key in characters (all ASCII, so also bytes). S3 takes 1,024; a prefix of the URL comes on top."""

SEGMENT_LENGTH_MAX = 200
"""Longest part between two slashes; file systems stop at 255 bytes and need room for nothing else."""

_KEY = re.compile(r"[A-Za-z0-9._/-]+\Z")
_PREFIX = re.compile(r"[A-Za-z0-9._/-]*\Z")
_OLD_ASIDE = re.compile(r"[0-9a-f]{24}\Z|[0-9a-f]{16}-[0-9]+-[0-9]+\Z")  # by earlier builds, of any key


@dataclass(frozen=True, slots=True)
class BlobStat:
    """One blob: its key, its size in bytes, and when it was written (milliseconds since 1970, the store's clock)."""

    key: str
    size: int
    modified_ms: int


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What a put has written that has not ended, and may never end: `size` bytes under no key, since `begun_ms`.

    `where` is for people, `token` for the store. A size of -1 is not known.
    """

    where: str
    size: int
    begun_ms: int
    token: str = ""


@dataclass(frozen=True, slots=True)
class SignedPut:
    """A URL for one PUT, and the headers that it must carry: the signature covers them."""

    url: str
    headers: Mapping[str, str]


def aside_name(key: str, unique: str) -> str:
    """How a store that writes a blob aside first names that: by the first segment of its key."""
    return f"{key.partition('/')[0]}-{unique}"


def is_aside(name: str, prefix: str) -> bool:
    """Whether what was written aside under this name may be for a key that starts with `prefix`."""
    first, slash, _ = prefix.partition("/")
    return name.startswith(first + "-" if slash else first) or _OLD_ASIDE.match(name) is not None


def check_key(key: str) -> str:
    """Return `key` unchanged, or raise BlobMisconfigured if no store may be asked for it."""
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
    """Return `prefix` unchanged, or raise BlobMisconfigured. Any start of a valid key is a valid prefix."""
    if not _PREFIX.match(prefix) or len(prefix) > KEY_LENGTH_MAX:
        raise BlobMisconfigured(f"blob prefix {prefix[:60]!r} must be at most {KEY_LENGTH_MAX} of A-Z a-z 0-9 . _ / -")
    for segment in prefix.split("/")[:-1]:
        if segment in ("", ".", ".."):
            raise BlobMisconfigured(f"blob prefix {prefix!r} must not hold an empty, '.' or '..' segment")
    return prefix


def check_process(opened_by: int, url: str) -> None:
    """Raise BlobMisconfigured in a fork of the process `opened_by`, whose connections it must not use."""
    if os.getpid() != opened_by:
        raise BlobMisconfigured(f"{url} was opened by process {opened_by}, of which this is a fork; open it anew here")


def check_range(start: int, length: int) -> None:
    """Raise BlobMisconfigured unless `[start, start + length)` is a range a store may be asked for."""
    if start < 0 or length < 0:
        raise BlobMisconfigured(f"a range needs start >= 0 and length >= 0, not start={start} length={length}")


class Blob(ABC):
    """A store of immutable blobs. Thread-safe; open one per process.

    After a fork, open it anew: stores that have connections raise BlobMisconfigured there.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """Canonical location, without secrets; `open_blob(url)` opens the same store."""

    @abstractmethod
    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write a blob, all or nothing; durable and visible to every reader on return.

        Writing the same bytes again is fine (a retry). BlobExists if the key holds other bytes.
        Never use one key as the directory of another (`a` and `a/b`): file systems refuse it.
        """

    @abstractmethod
    def get(self, key: str) -> bytes:
        """All bytes of a blob. BlobNotFound if there is none."""

    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly the bytes `[start, start + length)`.

        BlobNotFound if there is no such blob, or if it ends before the range does (never a short answer).
        """

    @abstractmethod
    def stat(self, key: str) -> BlobStat | None:
        """Size and time of a blob, or None if there is none."""

    def put_here(self, key: str) -> int | None:
        """The size of a blob that this process put within the last minute and has not deleted. Asks nobody.

        None: it is not known here; ask `stat`. For who would ask only whether what was just put is there: a far store
        that answered the put takes a round trip to say so again. Another process may have deleted it meanwhile.
        """
        return None

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Delete any number of blobs; missing ones are fine. After an error some may be gone: repeat it."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[BlobStat]:
        """Every blob whose key starts with `prefix`, ascending by key; fetched page by page.

        Blobs written or deleted while it runs may or may not appear; all others appear exactly once.
        """

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """What puts of keys that start with `prefix` have written and not ended, in any order; `list` shows none of it.

        Who wrote it may go on, or was killed. A store that keeps nothing of such a put, or cannot tell, gives none.
        """
        check_prefix(prefix)
        return iter(())

    def abandon(self, found: Sequence[Unfinished]) -> None:  # noqa: B027 - a store that tells of none has none to end
        """Delete what these puts have written, of whoever was killed; a put that still goes on fails, and may retry."""

    @abstractmethod
    def check(self) -> None:
        """Probe the store with one small write, read and delete, at start-up.

        BlobMisconfigured names the setting that is wrong; BlobUnavailable if the store does not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Release connections and files. Using the store afterwards is a bug. Closing twice is fine."""

    def presign_get(self, key: str, expires_s: int) -> str | None:
        """A URL by which anybody may GET this blob for `expires_s` seconds, or None if the store has none."""
        return None

    def presign_put(self, key: str, expires_s: int) -> SignedPut | None:
        """By which anybody may PUT this key for `expires_s` seconds, if nothing lies there; None if there is none.

        A store gives one only where it itself refuses to overwrite (412): such a URL may leak. May ask the store.
        """
        return None

    def local_path(self, key: str) -> str | None:
        """The path of this blob's file on this machine, or None if the store has no files. May not exist."""
        return None
