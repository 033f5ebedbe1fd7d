"""Writers for posted rows, and groups of posts to one shard that are read, checked, encoded and described at once.

A group results in one part for each post, as if it had come alone, so each is committed, counted and answered
separately. Posts that arrive while a group is committed form the next group; no post waits for a group to fill up. A
post that cannot be prepared in a group is handled alone, which reports its error.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from persist.client.embedded import EmbeddedTransport
from persist.client.server_writer import Names, ThinWriter
from persist.client.write import WriteSettings
from persist.codecs import rows
from persist.codecs.decode_limits import Allowance
from persist.core.audit_log import NOBODY, Caller
from persist.core.batch import Run
from persist.core.errors import InvalidUsage, SchemaMismatch
from persist.core.ids import ShardId
from persist.core.state import State
from persist.parts import current_schema
from rpc.concurrency_limits import CALLER

WRITERS_IDLE_MAX = 1_000
GROUP_POSTS_MAX = 128
GROUP_BYTES_MAX = 256 * 1024  # of bodies
GROUP_ROWS_BYTES_MAX = 1024 * 1024  # of their rows in memory: preparing blocks the event loop

_Key: TypeAlias = tuple[str, ShardId, int, int]


@dataclass(slots=True)
class PreparedPost:
    """The staged rows of a post, and their number.

    Set `ended` when it is committed, or retried: the next group is prepared when all posts of this one have ended.
    """

    runs: tuple[Run, ...]
    rows: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Waiting:
    data: bytes
    rows_bytes: int
    prepared: asyncio.Future[PreparedPost | None]


class ThinWriters:
    """A bounded pool of idle writers for clients that post rows. Thread-safe."""

    def __init__(self, transport: EmbeddedTransport, settings: WriteSettings) -> None:
        self._transport = transport
        self._settings = settings
        self._lock = threading.Lock()
        self._idle: OrderedDict[ShardId, list[ThinWriter]] = OrderedDict()
        self._idle_count = 0

    def names(self, state: State) -> Names:
        """The column names of this State. Raises Corruption if none of its schemas can be read."""
        return Names(state.shard_id, *current_schema(state.schemas), state.schema_id)

    @contextmanager
    def writer(self, name: str, names: Names, caller: Caller = NOBODY) -> Iterator[ThinWriter]:
        """A writer for exclusive use on behalf of `caller`. After an unexpected error it is left to expire."""
        handle = self.take(name, names, caller)
        try:
            yield handle
        except (InvalidUsage, SchemaMismatch):  # nothing was written, so the writer can be reused
            self.give_back(handle)
            raise
        self.give_back(handle)

    def take(self, name: str, names: Names, caller: Caller = NOBODY) -> ThinWriter:
        """A writer for rows that were read by `names`. Return it with `give_back`, or let it expire."""
        with self._lock:
            handles = self._idle.get(names.shard)
            handle = handles.pop() if handles else None
            self._idle_count -= handle is not None
        handle = handle or ThinWriter(self._transport, name, names, self._settings)
        handle.caller, handle.names = caller, names
        return handle

    def give_back(self, handle: ThinWriter) -> None:
        """Return a writer that `take` gave, with no call in progress, to the pool."""
        shard = handle.names.shard
        with self._lock:
            self._idle.setdefault(shard, []).append(handle)
            self._idle.move_to_end(shard)
            self._idle_count += 1
            while self._idle_count > WRITERS_IDLE_MAX:
                oldest = next(iter(self._idle))
                self._idle[oldest].pop()
                self._idle_count -= 1
                if not self._idle[oldest]:
                    del self._idle[oldest]


class PostGroups:
    """The waiting posts of one server. For one event loop. `rows_max` limits each post."""

    def __init__(self, writers: ThinWriters, allowance: Callable[[], Allowance], rows_max: int) -> None:
        self._writers = writers
        self._allowance = allowance
        self._rows_max = rows_max
        # By shard: the posts that wait, and the task that prepares them.
        self._waiting: dict[_Key, tuple[deque[_Waiting], asyncio.Task[None]]] = {}

    async def prepared(self, name: str, names: Names, data: bytes, rows_bytes: int) -> PreparedPost | None:
        """The staged rows of a body for an insert without a token; None: handle the post alone.

        `rows_bytes` is their size in memory. The caller must set `PreparedPost.ended`.
        """
        loop = asyncio.get_running_loop()
        key = (name, names.shard, names.id, names.newest)
        post = _Waiting(data, rows_bytes, loop.create_future())
        if key not in self._waiting:
            waiting = deque[_Waiting]()
            self._waiting[key] = waiting, loop.create_task(self._prepare_all(key, names, waiting))
        self._waiting[key][0].append(post)
        try:
            return await post.prepared
        except asyncio.CancelledError:
            prepared = post.prepared.result() if post.prepared.done() and not post.prepared.cancelled() else None
            if prepared is not None:
                prepared.ended.set()
            raise

    async def _prepare_all(self, key: _Key, names: Names, waiting: deque[_Waiting]) -> None:
        """Prepare the posts that wait, group by group."""
        CALLER.set("")  # it works for the whole group, not for the first caller
        while waiting:
            group: list[_Waiting] = []
            size, rows_bytes = 0, 0
            while waiting and len(group) < GROUP_POSTS_MAX:
                post = waiting[0]
                if not post.prepared.done():  # else it was cancelled
                    size, rows_bytes = size + len(post.data), rows_bytes + post.rows_bytes
                    if group and (size > GROUP_BYTES_MAX or rows_bytes > GROUP_ROWS_BYTES_MAX):
                        break
                    group.append(post)
                waiting.popleft()
            results = self._stage_all(key[0], names, [post.data for post in group])
            for post, result in zip(group, results, strict=True):
                post.prepared.set_result(result)
            await asyncio.sleep(0)
            for result in results:
                if result is not None:
                    await result.ended.wait()
        del self._waiting[key]

    def _stage_all(self, name: str, names: Names, bodies: list[bytes]) -> list[PreparedPost | None]:
        try:
            return self._stage(name, names, bodies)
        except Exception:  # of one post, which then reports it when it is handled alone
            return [None] if len(bodies) == 1 else [self._stage_all(name, names, [body])[0] for body in bodies]

    def _stage(self, name: str, names: Names, bodies: list[bytes]) -> list[PreparedPost | None]:
        """Raises the error of any of the posts, and Overloaded."""
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
