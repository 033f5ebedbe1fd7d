"""Handles: a shard as its users see it, and critical readers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from persist.attributes import Attributes
from persist.client.listen import Listen
from persist.client.pipelined import PipelinedWriter, PipelineSettings
from persist.client.retry import send
from persist.client.snapshot import ReadLease, ReadSettings, Snapshot, open_snapshot
from persist.client.transport import Transport
from persist.client.write import AttributeUpdates, Time, Updates, WriteHandle, WriteSettings
from persist.core import commands as c
from persist.core.antichain import Antichain, frontier
from persist.core.ids import CriticalReaderId, Token, critical_reader_id_of
from persist.core.view import ShardView, ViewRequest
from persist.parts import ShardSchema

IDLE_WRITERS_MAX = 64  # writers kept for reuse by one Shard object


@dataclass(frozen=True, slots=True)
class HandleSettings:
    write: WriteSettings = field(default_factory=WriteSettings)
    read: ReadSettings = field(default_factory=ReadSettings)


class Shard:
    """A shard by its name. Thread-safe. Errors: see `persist.core.errors`; nothing is lost by a bad argument."""

    def __init__(self, transport: Transport, name: str, view: ShardView, settings: HandleSettings) -> None:
        self._transport = transport
        self._settings = settings
        self._lock = threading.Lock()
        self._idle_writers: list[WriteHandle] = []
        self._schema_id = view.schema_id
        self._schema = ShardSchema.from_record(view.schemas[view.schema_id])
        self.name = name

    # --- what it is

    @property
    def schema(self) -> ShardSchema:
        """The schema as this handle knows it; `refresh_schema` learns of later ones."""
        return self._schema

    def refresh_schema(self) -> ShardSchema:
        view = self.view()
        with self._lock:
            self._schema_id = view.schema_id
            self._schema = ShardSchema.from_record(view.schemas[view.schema_id])
        return self._schema

    def evolve_schema(self, schema: ShardSchema) -> ShardSchema:
        """Make `schema` current: the same key, value columns added that may be null. InvalidUsage if it is not that."""
        current, known = self._current_schema()
        known.check_evolution(schema)
        self._send(c.EvolveSchema(current, schema.to_record()))
        return self.refresh_schema()

    def view(self) -> ShardView:
        """Frontiers and schemas as of now."""
        return self._transport.view(self.name, ViewRequest(with_batches=False))

    def upper(self) -> Antichain:
        """Every time before it is complete."""
        return self.view().upper

    def since(self) -> Antichain:
        """Reads at or beyond it are exact."""
        return self.view().since

    # --- writing

    def open_writer(self) -> WriteHandle:
        """A writer of its own. One per thread that writes much; close it when done."""
        return WriteHandle(self._transport, self.name, self._current_schema, self._settings.write)

    def insert(self, updates: Updates, *, token: Token | None = None, attributes: AttributeUpdates = ()) -> c.Appended:
        """As `WriteHandle.insert`."""
        with self._writer() as writer:
            return writer.insert(updates, token=token, attributes=attributes)

    def compare_and_append(
        self, updates: Updates, expected_upper: Time, new_upper: Time, *, attributes: AttributeUpdates = ()
    ) -> c.Appended:
        """As `WriteHandle.compare_and_append`."""
        with self._writer() as writer:
            return writer.compare_and_append(updates, expected_upper, new_upper, attributes=attributes)

    def append(self, updates: Updates, lower: Time, upper: Time, *, attributes: AttributeUpdates = ()) -> c.Appended:
        """As `WriteHandle.append`."""
        with self._writer() as writer:
            return writer.append(updates, lower, upper, attributes=attributes)

    def pipelined_writer(self, name: str, settings: PipelineSettings | None = None) -> PipelinedWriter:
        """The writer of that id, which sends small appends without waiting; it goes on where the last one ended."""
        return PipelinedWriter(
            name,
            self.open_writer(),
            self.attributes,
            lambda: self.schema,
            self._transport.clock,
            settings or PipelineSettings(),
        )

    @property
    def attributes(self) -> Attributes:
        """The shard's attributes: read them, or change them without rows."""
        return Attributes(self._send, self._update_attributes)

    def _update_attributes(self, updates: AttributeUpdates, *, token: Token | None = None) -> None:
        with self._writer() as writer:
            writer.update_attributes(updates, token=token)

    def advance_upper(self, upper: Time) -> c.Appended:
        """As `WriteHandle.advance_upper`."""
        with self._writer() as writer:
            return writer.advance_upper(upper)

    # --- reading

    def snapshot(
        self,
        as_of: int | None = None,
        *,
        num_splits: int = 1,
        columns: Sequence[str] | None = None,
        wait_s: float = 60.0,
        purpose: str = "snapshot",
    ) -> Snapshot:
        """The exact contents as of `as_of` (None: the latest complete time), in `num_splits` disjoint splits.

        Waits up to `wait_s` until `as_of` is complete (then Unavailable). NotReadable when it lies before since.
        """
        return open_snapshot(
            self._transport, self.name, as_of, num_splits, columns, wait_s, purpose, self._settings.read
        )

    def listen(self, as_of: int | None, *, until: Time = None, purpose: str = "listen") -> Listen:
        """Every update after `as_of` (None: from the beginning, time 0), once and in order, until `until`."""
        since = frontier(0 if as_of is None else as_of)
        lease = ReadLease.open(self._transport, self.name, since, purpose, self._settings.read)
        return Listen(self._transport, self.name, lease, as_of, frontier(until), self._settings.read)

    def open_reader(self, since: int | None = None, *, purpose: str = "reader") -> ReadLease:
        """A hold on `since` (None: the shard's) that lasts as long as it is kept."""
        held = None if since is None else frontier(since)
        return ReadLease.open(self._transport, self.name, held, purpose, self._settings.read)

    def critical_reader(self, cursor: str, opaque: str = "") -> CriticalReaderHandle:
        """The hold called `cursor`, which never expires; taken at the shard's since when it is new."""
        reader = critical_reader_id_of(cursor)
        found = self._send(c.RegisterCriticalReader(reader, opaque, cursor))
        assert isinstance(found, c.CriticalReaderState)
        return CriticalReaderHandle(self, cursor, reader, found)

    def downgrade_since(self, since: Time, cursor: str = "default") -> Antichain:
        """Let history before `since` be forgotten, as far as other readers allow; the shard's since afterwards."""
        return self.critical_reader(cursor).downgrade_since(since)

    # --- its end

    def drop(self, *, force: bool = False) -> None:
        """Close the shard to writes and reads; maintenance then deletes its data. Its name is not used again."""
        self._send(c.Drop(force))

    def close(self) -> None:
        """Retire the writers that this handle opened for itself."""
        with self._lock:
            idle, self._idle_writers = self._idle_writers, []
        for writer in idle:
            writer.close()

    def _current_schema(self) -> tuple[int, ShardSchema]:
        with self._lock:
            return self._schema_id, self._schema

    def _send(self, command: c.Command) -> c.Result:
        return send(self._transport, self.name, command, self._settings.write.retry_s)

    @contextmanager
    def _writer(self) -> Iterator[WriteHandle]:
        """A writer that nobody else uses meanwhile: one writer's calls are serialised."""
        with self._lock:
            writer = self._idle_writers.pop() if self._idle_writers else None
        writer = writer or self.open_writer()
        yield writer
        with self._lock:  # after an error it is left to expire: its last outcome may be unknown
            if len(self._idle_writers) < IDLE_WRITERS_MAX:
                self._idle_writers.append(writer)


class CriticalReaderHandle:
    """A hold on since that never expires, fenced by an opaque token: who changes the token fences all others."""

    def __init__(self, shard: Shard, cursor: str, reader: CriticalReaderId, found: c.CriticalReaderState) -> None:
        self._shard = shard
        self._reader = reader
        self.cursor = cursor
        self.opaque = found.opaque
        self.since = found.since

    def downgrade_since(self, since: Time, *, expected: str | None = None, opaque: str | None = None) -> Antichain:
        """Move the hold to `since`, and the token from `expected` to `opaque`; the shard's since afterwards.

        Both default to the token as this handle knows it. OpaqueMismatch: another holder has changed it.
        """
        before = self.opaque if expected is None else expected
        after = before if opaque is None else opaque
        command = c.CompareAndDowngradeSince(self._reader, before, after, frontier(since))
        result = self._shard._send(command)
        assert isinstance(result, c.CriticalReaderState)
        self.opaque, self.since = result.opaque, result.since
        return result.shard_since

    def expire(self) -> None:
        """Give the hold up for good."""
        self._shard._send(c.ExpireCriticalReader(self._reader, self.opaque))
