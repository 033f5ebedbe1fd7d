"""The audit: who did what, as rows of a shard of the location itself. Written in the background, in batches.

Requests only leave an entry in a queue. It has a bound, and no token may have more than half of it. Once it is full,
the token with the most entries loses its newest one to a token with fewer. What finds no room is counted, and an entry
tells how many others are missing. While the stores refuse writes, what is queued waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from persist.client.embedded import EmbeddedTransport
from persist.client.transport import OneShard
from persist.client.write import WriteHandle, WriteSettings
from persist.commit.system import Clock
from persist.core import commands as c
from persist.core.errors import PersistError, UnknownShard
from persist.core.ids import AUDIT_SHARD, IdSource, Token, mint
from persist.core.recorded import Caller
from persist.core.shard_settings import ShardSettings, history_ms
from persist.formats.exposition import COUNTER, GAUGE, Family, one
from persist.parts import ShardSchema, current_schema
from rpc.audited import OFTEN, detail_of
from rpc.settings import policy_of

QUEUED_MAX = 10_000  # entries that wait to be written
BATCH_MAX = 1_000  # entries of one commit
EVERY_S = 1.0  # between commits, at least
CLOSE_S = 5.0  # for so long the end of a server waits until all is written
WRITE_RETRY_S = 2.0
PAUSE_S_MAX = 60.0  # between tries, while it cannot be written
HISTORY_MS = 24 * 3600 * 1000  # for so long every time of the audit's shard stays readable
TOKENS_MAX = 10_000  # of which it is known when they were used
USE_EVERY_S = 3_600.0
USE, LOST = "token use", "lost"
_log = logging.getLogger("persist.rpc")

SCHEMA = ShardSchema(
    pa.schema(
        [
            pa.field("at", pa.timestamp("ms", "UTC"), nullable=False),
            pa.field("id", pa.string(), nullable=False),
            pa.field("token", pa.string(), nullable=False),
            pa.field("what", pa.string(), nullable=False),
            pa.field("shard", pa.string()),
            pa.field("status", pa.int32()),
            pa.field("count", pa.int64(), nullable=False),
            pa.field("address", pa.string()),
            pa.field("request_id", pa.string()),
            pa.field("detail", pa.string(), nullable=False),
        ]
    ),
    ("at", "id"),
)


@dataclass(slots=True)
class Entry:
    """What one request did. `count`: how many such there were, of which this is the last."""

    token: str
    what: str
    shard: str | None = None
    status: int | None = None
    address: str | None = None
    request_id: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    count: int = 1
    at_ms: int = 0

    @property
    def same(self) -> tuple[str, str, str | None, int | None] | None:
        """What it has in common with those that become one entry with it; None: it stays alone.

        Frontiers may move often, and who is refused may ask again as often.
        """
        is_refused = self.status is not None and self.status >= 400
        return (self.token, self.what, self.shard, self.status) if is_refused or self.what in OFTEN else None


class Audit:
    """The entries of one server process. `note` and `use` belong to the event loop's thread, and never wait.

    `kept`: for how long, as a text such as `90d` or `forever`; None: there is no audit.
    """

    def __init__(
        self, transport: EmbeddedTransport, kept: str | None, *, queued_max: int = QUEUED_MAX, every_s: float = EVERY_S
    ) -> None:
        self._shard = _AuditShard(transport, history_ms(kept, "audit", takes_none=False)) if kept else None
        self._clock: Clock = transport.clock
        self._queued_max = queued_max
        self._every_s = every_s
        self._changed = threading.Condition()
        self._queue: dict[object, Entry] = {}  # in the order in which they came
        self._of_token: dict[str, dict[object, None]] = {}  # the keys of each token's entries, oldest first
        self._writing = 0  # entries that were taken out of the queue to be written
        self._used: dict[str, tuple[float, int]] = {}  # by token: when it was last told, and requests since
        self._lost_untold = 0
        self._lost = self._written = self._failed = 0
        self._thread: threading.Thread | None = None
        self._closing = False

    @property
    def is_on(self) -> bool:
        return self._shard is not None

    def note(self, entry: Entry) -> None:
        """Have an entry written soon."""
        if self._shard is None:
            return
        entry.at_ms = self._clock.now_ms()
        key = entry.same or object()
        with self._changed:
            known = self._queue.get(key)
            if known is not None:
                entry.count += known.count
                self._queue[key] = entry
                return
            if self._closing or not self._has_room(entry.token):
                self._lose()
                return
            self._queue[key] = entry
            self._of_token.setdefault(entry.token, {})[key] = None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="persist-audit", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _has_room(self, token: str) -> bool:
        """Whether the queue takes one more of this token's, also by taking one of another token out."""
        mine, tokens = len(self._of_token.get(token, ())), max(1, len(self._of_token))
        if mine * 2 >= self._queued_max:
            return False
        if len(self._queue) < self._queued_max:
            return True
        if mine >= self._queued_max // tokens:  # it has its share
            return False
        largest = max(self._of_token, key=lambda one: len(self._of_token[one]))
        if len(self._of_token[largest]) <= mine + 1:
            return False
        newest = next(reversed(self._of_token[largest]))
        self._forget(newest, self._queue.pop(newest))
        self._lose()
        return True

    def _lose(self) -> None:
        """One more entry found no room."""
        self._lost += 1
        self._lost_untold += 1

    def _forget(self, key: object, entry: Entry) -> None:
        """An entry has left the queue."""
        keys = self._of_token[entry.token]
        del keys[key]
        if not keys:
            del self._of_token[entry.token]

    def use(self, token: str, address: str | None) -> None:
        """Count a request by its token: the first one is told, and then once an hour how many there were."""
        if self._shard is None:
            return
        now_s = self._clock.monotonic()
        told_s, requests = self._used.get(token, (None, 0))
        if told_s is None and len(self._used) >= TOKENS_MAX:
            return
        if told_s is not None and now_s - told_s < USE_EVERY_S:
            self._used[token] = (told_s, requests + 1)
            return
        self._used[token] = (now_s, 0)
        self.note(Entry(token, USE, address=address, count=requests + 1))

    def families(self) -> Iterator[Family]:
        yield one("persist_audit_entries_total", COUNTER, "Entries of the audit that were written", self._written)
        yield one("persist_audit_lost_total", COUNTER, "Entries of the audit that found no room", self._lost)
        yield one("persist_audit_failures_total", COUNTER, "Tries to write the audit that failed", self._failed)
        yield one("persist_audit_queued", GAUGE, "Entries of the audit to be written", len(self._queue) + self._writing)

    def close(self) -> None:
        """Write what is queued, unless that takes longer than CLOSE_S."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        assert self._shard is not None
        while batch := self._next():
            pause_s, write, is_last = self._every_s, self._shard.writing(batch), False
            while not self._written_by(write):
                with self._changed:
                    if is_last:
                        self._lost += len(batch) + len(self._queue)
                        return
                    self._changed.wait_for(lambda: self._closing, pause_s)
                    is_last = self._closing
                pause_s = min(2 * pause_s, PAUSE_S_MAX)
            with self._changed:
                self._written += len(batch)
                self._writing = 0
                self._changed.wait_for(lambda: self._closing, self._every_s)

    def _next(self) -> list[Entry]:
        """Entries to be written, the oldest ones first, as soon as there are any. None: it was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            keys = [key for key, _ in zip(self._queue, range(BATCH_MAX), strict=False)]
            batch = [self._queue.pop(key) for key in keys]
            for key, entry in zip(keys, batch, strict=True):
                self._forget(key, entry)
            if batch and self._lost_untold:
                batch.append(Entry("", LOST, count=self._lost_untold, at_ms=self._clock.now_ms()))
                self._lost_untold = 0
            self._writing = len(batch)
            return batch

    def _written_by(self, write: Callable[[], None]) -> bool:
        """Whether it was written."""
        try:
            write()
        except PersistError as error:
            self._failed += 1
            _log.error("the audit cannot be written; it is tried again", extra={"why": str(error)[:500]})
            return False
        return True


class _AuditShard:
    """The shard of the entries, which is made where there is none. Used from one thread."""

    def __init__(self, transport: EmbeddedTransport, kept_ms: int | None) -> None:
        self._transport = transport
        self._ids: IdSource = transport.ids
        self._policy = policy_of(kept_ms)
        self._writer: WriteHandle | None = None

    def writing(self, batch: list[Entry]) -> Callable[[], None]:
        """What writes these entries once, however often it is called. It may raise any PersistError."""
        rows = pa.Table.from_pylist([self._row(entry) for entry in batch], schema=SCHEMA.arrow)
        token = mint(Token, self._ids)

        def write() -> None:
            writer = self._writer or self._opened()
            self._writer = None
            writer.insert(rows, token=token)
            self._writer = writer

        return write

    def _row(self, entry: Entry) -> dict[str, Any]:
        at = datetime.fromtimestamp(entry.at_ms / 1000, UTC)
        return {
            "at": at,
            "id": self._ids.uuid7(),
            "token": entry.token,
            "what": entry.what,
            "shard": entry.shard,
            "status": entry.status,
            "count": entry.count,
            "address": entry.address,
            "request_id": entry.request_id,
            "detail": detail_of(entry.detail),
        }

    def _opened(self) -> WriteHandle:
        settings = ShardSettings(HISTORY_MS, version=1, rows=self._policy)
        view = self._transport.create(AUDIT_SHARD, SCHEMA.to_record(), None, settings)
        if view.is_dropped:
            raise UnknownShard(f"shard {AUDIT_SHARD!r} was dropped")
        shard = OneShard(self._transport, view.shard_id)
        found = shard.apply(AUDIT_SHARD, c.ReadShardSettings())
        assert isinstance(found, c.SettingsAre)
        if found.settings.rows != self._policy:
            known = found.settings
            shard.apply(AUDIT_SHARD, c.SetSettings(known.version, known.history_ms, known.mark_every_ms, self._policy))
        schema = current_schema(view.schemas)
        how = WriteSettings(retry_s=WRITE_RETRY_S)
        return WriteHandle(shard, AUDIT_SHARD, lambda: schema, how, caller=Caller("_audit", "audit"))
