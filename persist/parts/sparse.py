"""A file of which only some bytes are here."""

from __future__ import annotations

import io
from collections.abc import Sequence

NOT_FETCHED = "these bytes were not fetched"


class Sparse(io.RawIOBase):
    """A file of `size` bytes of which only some segments are here; reading elsewhere is an error."""

    def __init__(self, segments: Sequence[tuple[int, bytes]], size: int) -> None:
        self._segments = segments
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> memoryview:
        """Arrow takes what is here as it is: nothing is copied."""
        for start, data in self._segments:
            if start <= self._position and self._position + size <= start + len(data):
                piece = memoryview(data)[self._position - start : self._position - start + size]
                self._position += len(piece)
                return piece
        raise OSError(NOT_FETCHED)
