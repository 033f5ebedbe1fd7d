"""Blobs in the memory of this process, for tests and examples. They are lost when the process ends."""

from __future__ import annotations

import re
import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Generic, TypeVar

from blob.errors import BlobExists, BlobNotFound, without_secrets
from blob.interface import Blob, BlobStat, check_key, check_prefix, check_range, slice_range

T = TypeVar("T")


class NamedStores(Generic[T]):
    """The stores of this process at `mem:name`; `mem:` is a new store each time. `new` creates a store with a name."""

    def __init__(self, new: Callable[[str], T], what: str, error: type[Exception]) -> None:
        self._new = new
        self._what = what
        self._error = error
        self._stores: dict[str, T] = {}
        self._lock = threading.Lock()

    def open(self, url: str) -> T:
        """Raises the error class if the name is not valid."""
        name = url[len("mem:") :]
        if not re.fullmatch(r"[A-Za-z0-9._-]*", name):
            location = f"{self._what} location {without_secrets(url)!r}"
            raise self._error(f"{location}: the name after mem: must be of A-Z a-z 0-9 . _ -")
        if not name:
            return self._new("")
        with self._lock:
            return self._stores.setdefault(name, self._new(name))


class MemoryBlob(Blob):
    """A dictionary of blobs. `now_ms` gives their times of writing; a simulation passes its own clock."""

    def __init__(self, name: str = "", *, now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._name = name
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._blobs: dict[str, tuple[bytes, int]] = {}
        self._keys: list[str] = []  # ascending, so that the cost of a listing follows its length

    @property
    def url(self) -> str:
        return f"mem:{self._name}"

    def put(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)
        body = bytes(data)
        with self._lock:
            stored = self._blobs.get(key)
            if stored is None:
                stored = self._blobs[key] = (body, self._now_ms())
                insort(self._keys, key)
        if stored[0] != body:
            raise BlobExists(f"blob {key} exists with other bytes; keys are single-use")

    def get(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            stored = self._blobs.get(key)
        if stored is None:
            raise BlobNotFound(f"no blob {key} in {self.url}")
        return stored[0]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        return slice_range(key, self.get(key), start, length)

    def stat(self, key: str) -> BlobStat | None:
        check_key(key)
        with self._lock:
            stored = self._blobs.get(key)
        return None if stored is None else BlobStat(key, len(stored[0]), stored[1])

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        with self._lock:
            for key in keys:
                if self._blobs.pop(key, None) is not None:
                    del self._keys[bisect_left(self._keys, key)]

    def list(self, prefix: str) -> Iterator[BlobStat]:
        check_prefix(prefix)
        with self._lock:
            beyond = map(self._keys.__getitem__, range(bisect_left(self._keys, prefix), len(self._keys)))
            keys = list(takewhile(lambda key: key.startswith(prefix), beyond))
            return iter([BlobStat(key, len(self._blobs[key][0]), self._blobs[key][1]) for key in keys])

    def check(self) -> None:
        """Always succeeds, and writes nothing."""

    def close(self) -> None:
        """Keeps the blobs: another user of the same `mem:name` may still need them."""
