"""Inserts of rows that wait for one shard are prepared together: read, checked, encoded and described at once.

What is prepared is one part for each post, as if it had come alone, so each is committed, counted, remembered and
answered by itself. Posts that come while those before them are committed form the next group; none waits for more of
them. A post that cannot be prepared so is left to its own try, which says what is wrong with it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from persist.client.server_writer import Names, ThinWriter
from persist.codecs import rows
from persist.codecs.allowance import Allowance
from persist.core.batch import Run
from persist.core.ids import ShardId
from rpc.concurrency_limits import CALLER

GROUP_POSTS_MAX = 128
GROUP_BYTES_MAX = 256 * 1024  # of bodies
GROUP_ROWS_BYTES_MAX = 1024 * 1024  # that their rows take in memory: nothing else runs meanwhile

_Key: TypeAlias = tuple[str, ShardId, int, int]


@dataclass(slots=True)
class PreparedPost:
    """The staged rows of a post, and how many it brought."""

    runs: tuple[Run, ...]
    rows: int
    _ended: Callable[[], None] | None = None

    def end(self) -> None:
        """It is committed, or will not be at once: the next group is prepared once all of this one have ended."""
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()


@dataclass(slots=True)
class _Waiting:
    data: bytes
    rows_bytes: int
    prepared: asyncio.Future[PreparedPost | None]


class Writers(Protocol):
    """Writers that nobody else uses meanwhile; `rpc.app_state.ThinWriters` are such."""

    def take(self, name: str, names: Names) -> ThinWriter: ...

    def give_back(self, handle: ThinWriter) -> None: ...


class PostGroups:
    """The posts that wait in one server. For one event loop. `rows_max` is for each of them."""

    def __init__(self, writers: Writers, allowance: Callable[[], Allowance], rows_max: int) -> None:
        self._writers = writers
        self._allowance = allowance
        self._rows_max = rows_max
        self._waiting: dict[_Key, deque[_Waiting]] = {}  # of each shard with posts that wait or are committed
        self._under_way: dict[_Key, int] = {}

    async def prepared(self, name: str, names: Names, data: bytes, rows_bytes: int) -> PreparedPost | None:
        """The rows of a body for an insert without a token, staged; None: it takes a try of its own.

        `rows_bytes` is what they take in memory. Who is given rows calls `PreparedPost.end`.
        """
        loop = asyncio.get_running_loop()
        key = (name, names.shard, names.id, names.newest)
        one = _Waiting(data, rows_bytes, loop.create_future())
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = deque()
            loop.call_soon(self._prepare, key, names)
        waiting.append(one)
        try:
            return await one.prepared
        except asyncio.CancelledError:
            given = one.prepared.result() if one.prepared.done() and not one.prepared.cancelled() else None
            if given is not None:
                given.end()
            raise

    def _end(self, key: _Key, names: Names) -> None:
        self._under_way[key] -= 1
        if not self._under_way[key]:
            del self._under_way[key]
            self._go_on(key, names)

    def _go_on(self, key: _Key, names: Names) -> None:
        if self._waiting[key]:
            asyncio.get_running_loop().call_soon(self._prepare, key, names)
        else:
            del self._waiting[key]

    def _prepare(self, key: _Key, names: Names) -> None:
        CALLER.set("")  # this is for all of the group, not for the one who came first
        group: list[_Waiting] = []
        waiting, size, rows_bytes = self._waiting[key], 0, 0
        while waiting and len(group) < GROUP_POSTS_MAX:
            one = waiting[0]
            if not one.prepared.done():  # else nobody waits for it any more
                size, rows_bytes = size + len(one.data), rows_bytes + one.rows_bytes
                if group and (size > GROUP_BYTES_MAX or rows_bytes > GROUP_ROWS_BYTES_MAX):
                    break
                group.append(one)
            waiting.popleft()
        found = self._found(key[0], names, [one.data for one in group])
        under_way = [prepared for prepared in found if prepared is not None]
        for prepared in under_way:
            prepared._ended = partial(self._end, key, names)
        if under_way:
            self._under_way[key] = len(under_way)
        else:
            self._go_on(key, names)
        for one, given in zip(group, found, strict=True):
            one.prepared.set_result(given)

    def _found(self, name: str, names: Names, bodies: list[bytes]) -> list[PreparedPost | None]:
        try:
            return self._together(name, names, bodies)
        except Exception:  # of one of them, which is told of it by its own try, as it would be of a bug
            return [None] if len(bodies) == 1 else [self._found(name, names, [body])[0] for body in bodies]

    def _together(self, name: str, names: Names, bodies: list[bytes]) -> list[PreparedPost | None]:
        """Raises the error of a post, and tells not of which; and Overloaded."""
        handle = self._writers.take(name, names)
        try:
            with self._allowance() as allowed:
                table, counts = rows.read_each(bodies, names.schema, self._rows_max, allowed)
                runs = handle.staged_each(table, [count or 0 for count in counts])
        finally:
            self._writers.give_back(handle)
        return [
            None if count is None or staged is None else PreparedPost(staged, count)
            for count, staged in zip(counts, runs, strict=True)
        ]
