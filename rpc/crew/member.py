"""A worker process as one of several: which shards are its own, and how others get what is not."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from persist.core.errors import InvalidUsage
from persist.core.ids import NAME_CHARS_MAX
from persist.formats.exposition import COUNTER, GAUGE, Family, Labelled, one
from rpc import paths
from rpc.crew import letters
from rpc.crew.board import Board
from rpc.crew.letters import Identity

OWNERS_KEPT_MAX = 20_000
SHARDS = paths.PREFIX.encode()
FORWARDS_MAX = 256  # requests that a worker has others answer at a time; it answers more by itself
GIVEN = ("connection", "request", "none")
NAME_MAX = 2 * NAME_CHARS_MAX + 1  # with its region


class Told(msgspec.Struct, frozen=True):
    """What the supervisor tells a worker: file descriptors that it inherits, and its number."""

    index: int
    listener: int
    board: int
    read: int
    send: tuple[int, ...]
    parent: int


class Crew:
    """What one worker knows of all."""

    def __init__(self, index: int, board: Board, box: socket.socket, others: Sequence[socket.socket]) -> None:
        self.index = index
        self.board = board
        self.box = box
        self.handed = self.forwarded = 0  # connections, and requests, that others were given
        self.under_way = 0  # requests that others answer now
        self.stayed = 0  # connections that they did not take
        self._boxes = others
        self._owner = lru_cache(OWNERS_KEPT_MAX)(self._hashed)

    @property
    def workers(self) -> int:
        return len(self._boxes)

    def owner(self, name: str) -> int:
        """The number of the worker in which a shard is, whichever are alive."""
        return self._owner(name) if len(name) <= NAME_MAX else self.index

    def elsewhere(self, name: str) -> int | None:
        """The worker to which requests for a shard are to go; None: this one has it, or takes its place."""
        owner = self.owner(name)
        return owner if owner != self.index and self.board.is_alive(owner) else None

    def elsewhere_by(self, url: bytes) -> int | None:
        """The same by a request's target; None also where that is no plain path of a shard."""
        if not url.startswith(SHARDS):
            return None
        found = paths.split(url.partition(b"?")[0].decode("latin-1"))
        return None if found is None else self.elsewhere(found[0])

    def others(self) -> list[int]:
        """The other workers that are alive."""
        return [other for other in range(self.workers) if other != self.index and self.board.is_alive(other)]

    def give(self, worker: int, connection: int, data: bytes, identity: Identity | None = None) -> bool:
        """Give a worker a connection, and what was read of it; False: it takes none now."""
        return letters.send(self._boxes[worker], connection, data, identity)

    def close(self) -> None:
        self.board.close()
        self.box.close()
        for box in self._boxes:
            box.close()

    def _hashed(self, name: str) -> int:
        told = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(told[:8]) % len(self._boxes)


def families(crew: Crew | None) -> Iterator[Family]:
    """That there is this worker, and what it has given others. None: it is the only one."""
    counts = (0, 0, 0) if crew is None else (crew.handed, crew.forwarded, crew.stayed)
    gone: list[Labelled] = [((what,), count) for what, count in zip(GIVEN, counts, strict=True)]
    text = "What went to the worker of its shard: connections, requests alone, or neither as it took none"
    yield Family("persist_workers_given_total", COUNTER, text, ("what",), gone)
    yield one("persist_workers", GAUGE, "Processes that answer requests", 1)


def join(text: str) -> tuple[Crew, Told]:
    """Be the worker that a supervisor has told so. Raises InvalidUsage: nobody has."""
    try:
        told = msgspec.json.decode(text, type=Told)
        board = Board(told.board, told.index, len(told.send))
        boxes = [letters.socket_of(end) for end in told.send]
        return Crew(told.index, board, letters.socket_of(told.read), boxes), told
    except (msgspec.DecodeError, OSError, ValueError) as error:
        raise InvalidUsage("this is no worker that a server has started: start it without PERSIST_WORKER") from error
