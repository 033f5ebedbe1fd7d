"""Counts in memory that all worker processes of a server see: each writes its own cells, and adds up those of all.

No lock is needed: a cell has one writer. Who takes something counts it first, and looks at the sum then. So two that
take the last one at the same moment may both be refused.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
from functools import lru_cache

CELL = 8  # bytes
SECRET = 16  # bytes
BUCKETS = 4096  # callers of the same bucket have one share together
POOLS = (
    "body_bytes",
    "spool_bytes",
    "worked_bytes",
    "decoded_bytes",
    "download_bytes",
    "snapshots",
    "listeners",
    "waits",
    "decodes",
    "decoders",
    "connections",
    "token_connections",
    "token_leases",
)
_ALIVE, _WANTED, _FIRST = 0, 1, 2  # cells of a worker, before those of its pools
_OF_POOL = 1 + BUCKETS
_OF_WORKER = _FIRST + len(POOLS) * _OF_POOL
CALLERS_KEPT_MAX = 10_000


def bytes_of(workers: int) -> int:
    """How large the memory is. Of most of it no page is ever touched."""
    return SECRET + workers * _OF_WORKER * CELL


def open_memory(workers: int) -> int:
    """A file descriptor of memory for so many workers, which children may inherit."""
    if hasattr(os, "memfd_create"):
        found = os.memfd_create("persist-board")
    else:
        with tempfile.TemporaryFile() as file:
            found = os.dup(file.fileno())
    os.ftruncate(found, bytes_of(workers))
    os.pwrite(found, os.urandom(SECRET), 0)
    return found


class Board:
    """The memory as one of `workers` sees it; `index` in [0, workers) is its own number."""

    def __init__(self, memory: int, index: int, workers: int) -> None:
        self._memory = mmap.mmap(memory, bytes_of(workers))
        self._cells = memoryview(self._memory)[SECRET:].cast("q")
        secret = self._memory[:SECRET]
        self.index = index
        self.workers = workers
        self._own = index * _OF_WORKER
        self._others = [worker * _OF_WORKER for worker in range(workers) if worker != index]

        def bucket_of(caller: str) -> int:
            told = hashlib.blake2b(caller.encode("utf-8", "replace"), digest_size=8, key=secret).digest()
            return int.from_bytes(told) % BUCKETS

        self.bucket_of = lru_cache(CALLERS_KEPT_MAX)(bucket_of)

    def pool(self, name: str) -> Pool:
        """One of POOLS, as this worker takes from it."""
        return Pool(self, _FIRST + POOLS.index(name) * _OF_POOL)

    def is_alive(self, worker: int) -> bool:
        """Whether a worker takes connections over."""
        return self._cells[worker * _OF_WORKER + _ALIVE] > 0

    def begins(self) -> None:
        """From now on this worker takes connections over."""
        self._cells[self._own + _ALIVE] = 1

    def ends(self) -> None:
        """It does not any more."""
        self._cells[self._own + _ALIVE] = 0

    def died(self, worker: int) -> None:
        """A worker is gone, with all that it had taken."""
        start, length = SECRET + worker * _OF_WORKER * CELL, _OF_WORKER * CELL
        self._memory[start : start + length] = bytes(length)

    def want_room(self) -> None:
        """This worker has refused a connection, and has none that could make room."""
        self._cells[self._own + _WANTED] += 1

    def wanted_elsewhere(self) -> int:
        """How many connections the others have refused so, ever since they began."""
        return self.elsewhere(_WANTED)

    def elsewhere(self, cell: int) -> int:
        """The sum of one cell over all other workers."""
        cells, found = self._cells, 0
        for other in self._others:
            found += cells[other + cell]
        return found

    def add(self, cell: int, count: int) -> None:
        """This worker's cell has so much more, or less."""
        self._cells[self._own + cell] += count

    def close(self) -> None:
        self._cells.release()
        self._memory.close()


class Pool:
    """What workers have taken of one thing, in all and each caller. Used from one thread of a worker at a time."""

    __slots__ = ("_board", "_first")

    def __init__(self, board: Board, first: int) -> None:
        self._board = board
        self._first = first

    def add(self, count: int) -> None:
        """This worker has so much more, or less."""
        self._board.add(self._first, count)

    def elsewhere(self) -> int:
        """What the other workers have."""
        return self._board.elsewhere(self._first)

    def add_of(self, caller: str, count: int) -> None:
        """A caller has so much more, or less, from this worker."""
        self._board.add(self._first + 1 + self._board.bucket_of(caller), count)

    def tell(self, caller: str, count: int) -> None:
        """This worker has so much more, or less, and so has the caller, if there is one."""
        self.add(count)
        if caller:
            self.add_of(caller, count)

    def of_elsewhere(self, caller: str) -> int:
        """What a caller has from the other workers."""
        return self._board.elsewhere(self._first + 1 + self._board.bucket_of(caller))
