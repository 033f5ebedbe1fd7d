"""A store around another one that does as it does: what decorators begin from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from blob.interface import Blob, BlobStat, SignedPut, Unfinished


class ForwardingBlob(Blob):
    """Every call goes to `inner`; a decorator overrides the calls that it changes."""

    def __init__(self, inner: Blob) -> None:
        self._inner = inner

    @property
    def inner(self) -> Blob:
        """The store that is asked."""
        return self._inner

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._inner.put(key, data)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._inner.get_range(key, start, length)

    def stat(self, key: str) -> BlobStat | None:
        return self._inner.stat(key)

    def put_here(self, key: str) -> int | None:
        return self._inner.put_here(key)

    def delete(self, keys: Sequence[str]) -> None:
        self._inner.delete(keys)

    def list(self, prefix: str) -> Iterator[BlobStat]:
        return self._inner.list(prefix)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        return self._inner.unfinished(prefix)

    def abandon(self, found: Sequence[Unfinished]) -> None:
        self._inner.abandon(found)

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()

    def presign_get(self, key: str, expires_s: int) -> str | None:
        return self._inner.presign_get(key, expires_s)

    def presign_put(self, key: str, expires_s: int) -> SignedPut | None:
        return self._inner.presign_put(key, expires_s)

    def local_path(self, key: str) -> str | None:
        return self._inner.local_path(key)
