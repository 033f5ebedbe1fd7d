"""Tables in WAL mode: a shard is the log, and replicas apply it to others.

A front end appends to the log by compare-and-append, which makes each update definite, once, at one time. Replicas read
the log and append its updates to a table, at the same times. So any number of them may apply one log to one table.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Self

import pyarrow as pa

from persist.client.arguments import checked
from persist.client.client import Client
from persist.client.schema_lineage import (
    SchemaHistory,
    ShardSchema,
    copy_handle,
    current_schema,
    evolve,
    is_same_schema,
    known_schema,
    with_constraints_of,
    without_constraints,
)
from persist.client.shard import Shard
from persist.client.write import PinnedRows, Updates
from persist.core.attribute import AttributeUpdate, named_key
from persist.core.errors import (
    AttributeMismatch,
    Conflict,
    Forbidden,
    Indeterminate,
    InvalidUsage,
    PersistError,
    SchemaMismatch,
    ShardExists,
    Unavailable,
    UnknownShard,
    UpperMismatch,
)
from persist.core.frontier import Antichain
from persist.sources.feed_position import FeedPosition
from persist.sources.internal_shards import Closeable, FeedFollower, WallClock, bounded_clock, whole_events
from persist.sources.sequenced_writer import TIME, SequencedWriter, checked_writer_name, pin_rows

SCHEMAS_TRIED_MAX = 100  # of a table that follows its log; a try fails if a rival was faster
WRITE_TRIES_MAX = 1_000  # a try fails by a write of another front end, or a lost response


class FrontEnd(Closeable):
    """A named writer of a log; numbers its writes from 1 on. Thread-safe.

    Opening a front end of the same name, anywhere, ends the previous one. After Indeterminate open a new one of this
    name: its `acknowledged` shows whether the write has landed.
    """

    def __init__(self, log: Shard, name: str, *, clock: WallClock | None = None) -> None:
        """Take over from the previous front end of this name.

        Args:
            log: the shard; only front ends may write to it, and `Replica` applies it.
            name: the name of the writer, up to 128 characters.
            clock: times are its milliseconds since 1970, as far as the stores confirm them; None: times count up.
        Raises: InvalidUsage (an argument is not valid), Unavailable (many are opened at the same time; retry).
        """
        checked("log", log, Shard)
        self.log = log
        self.name = checked_writer_name(name)
        self._lock = threading.Lock()
        self._writer = log.open_writer(purpose=f"front end {name}")
        self._sequence = SequencedWriter(log, f"front end {name}")
        self._time_key = named_key(f"front end's last time {name}")
        self._clock = bounded_clock(clock, log)
        self._sequence.take_over()
        self.acknowledged = self._sequence.last()  # writes up to this number are in the log
        self._upper: int | None = None
        self._unknown: Indeterminate | None = None

    def __repr__(self) -> str:
        return f"FrontEnd({self.log.name!r}, {self.name!r}, acknowledged={self.acknowledged})"

    def write(self, updates: Updates) -> int:
        """Write rows to the log, at one time, once.

        Args:
            updates: as for `Shard.insert`, without `__time`.
        Returns: their time, which is later than all previous ones.
        Raises: InvalidUsage (the rows do not fit; nothing was written), AttributeMismatch (it was opened elsewhere),
            Conflict (the log is closed), Unavailable (it did not happen; retry), Indeterminate (it may have
            happened: open a front end of this name, and read `acknowledged`).
        """
        rows = pin_rows(updates, self.log, "a front end")  # staged again if a rival is faster
        with self._lock:
            if self._unknown is not None:
                raise Indeterminate(f"{self._unknown.message}; reopen front end {self.name!r} to continue")
            number = self.acknowledged + 1
            try:
                time = self._write(rows, number)
            except BaseException as error:
                if isinstance(error, Indeterminate):
                    self._unknown = error
                elif not isinstance(error, PersistError):  # the caller was interrupted, such as by a signal
                    self._unknown = Indeterminate(f"write {number} to log {self.log.name!r} was interrupted")
                raise  # after other errors it did not happen, so the next write may use its number
            self.acknowledged = number
            return time

    def close(self) -> None:
        self._writer.close()

    def _write(self, rows: PinnedRows, number: int) -> int:
        lost: Indeterminate | None = None
        for _ in range(WRITE_TRIES_MAX):
            try:
                return self._try_write(rows, number)
            except UpperMismatch as error:
                self._upper = next(iter(error.details.get("actual") or []), None)
            except Indeterminate as error:
                self._upper, lost = None, error
            except AttributeMismatch as error:
                if not self._sequence.landed(error, number):
                    raise
                return self._landed_at(number)
            except PersistError as error:  # for example a duplicate key because an earlier try has landed
                if lost is None:
                    raise
                if self._has_landed(number):
                    return self._landed_at(number)
                raise lost from error
        raise lost or Unavailable(f"other front ends of shard {self.log.name!r} were faster each time; retry")

    def _try_write(self, rows: PinnedRows, number: int) -> int:
        lower = self.log.upper().element if self._upper is None else self._upper
        if lower is None:
            raise Conflict(f"the log, shard {self.log.name!r}, is closed, so nothing can be written")
        time = lower if self._clock is None else self._clock.time(lower)
        times = pa.repeat(pa.scalar(time, pa.int64()), rows.rows.num_rows)
        timed = replace(rows, rows=rows.rows.append_column(TIME, times))
        changes = (*self._sequence.conditions(number), AttributeUpdate.replace(self._time_key, time))
        self._writer.compare_and_append(timed, lower, time + 1, attributes=changes)
        self._upper = time + 1
        return time

    def _has_landed(self, number: int) -> bool:
        """Whether a try is known to have landed. One whose response was lost may also land later."""
        try:
            return self._sequence.last() >= number
        except PersistError:
            return False

    def _landed_at(self, number: int) -> int:
        """The time of a write that has landed. Raises Indeterminate (it cannot be read now)."""
        try:
            return self.log.attributes.get(self._time_key) or 0
        except PersistError as error:
            raise Indeterminate(
                f"write {number} to log {self.log.name!r} has landed, but its time is unknown: {error.message}"
            ) from error


class Replica(FeedFollower):
    """Applies a log to a table. Not thread-safe: rivals use one each.

    At each complete time the table has the contents of the log, with the columns of the log: it follows every change of
    them. Only replicas of this log may feed it; an attribute of it stores their progress. A step applies the new
    updates, and progress without updates. If an insert, an erasure or a recovery has taken a time of the table, the
    updates of the log at that time are written at the first free time, which the `info` of the commit reports, and the
    log advances to it. A step raises Conflict (the table is closed, or others have appended to it: see `rebind`) and
    NotReadable (the log has forgotten missing updates: increase its history, and recreate the table).
    """

    def __init__(self, log: Shard, table: Shard) -> None:
        """Continue from the position of `table`, which `Replica.open` has created.

        It uses handles of its own: those of the caller do not learn changes of columns.
        Raises: InvalidUsage (the table has another key, or columns that the log never had, or these are no shards).
        """
        checked("log", log, Shard)
        checked("table", table, Shard)
        self.log = copy_handle(log)
        self.table = copy_handle(table)
        self._place_in(SchemaHistory.of(self.log), self.table.refresh_schema())
        self._writer = self.table.open_writer(purpose=f"replica of {log.name}"[:256])
        self._fed = FeedPosition(self.table)

    @classmethod
    def open(cls, client: Client, log: str, table: str, *, history: timedelta | str | None = None) -> Self:
        """A replica of the log called `log`. A missing table is created, with `history` as for `create_shard`.

        It has the column numbers of the log, by which it follows changes of columns. Constraints are checked only in
        the log.
        Raises: UnknownShard (there is no such log), InvalidUsage (the table has columns that the log never had).
        """
        source = client.shard(log)
        try:
            target = client.shard(table)
        except UnknownShard:
            try:
                target = client.create_shard(table, source.schema, list(source.schema.key), history=history)
            except ShardExists:  # a rival has created it, perhaps with other columns
                target = client.shard(table)
        return cls(source, target)

    def __repr__(self) -> str:
        return f"Replica({self.log.name!r} -> {self.table.name!r}, upper={self.upper})"

    def _step(self, wait_s: float) -> bool:
        if self._listen is None:
            self._fed.load()
            self._advance_log(self.log.upper())
            self._listen = self.log.listen(self.upper - 1, purpose=f"replica {self.table.name}")
        is_new = self._evolve_table(self.log.refresh_schema())
        for updates, upper in whole_events(self._listen, wait_s):
            columns = self._listen.schema or self.log.schema
            self._evolve_table(columns)
            self._fed.append(self._writer, upper.element, partial(self._new_rows, updates, columns))
            self._advance_log(upper)
            is_new = True
        return is_new

    def _new_rows(self, updates: pa.Table, columns: ShardSchema) -> PinnedRows | None:
        placed = self._fed.place(updates)
        return self._as_of_table(placed, columns) if placed.num_rows else None

    def _advance_log(self, upper: Antichain) -> None:
        """Advance the log to a free time of the table. If that is not permitted, the times remain different."""
        if upper < Antichain(self._fed.upper):
            with suppress(Forbidden, InvalidUsage, Conflict):
                self.log.advance_upper(self._fed.upper)

    def _evolve_table(self, columns: ShardSchema) -> bool:
        """Change the table to these present or past columns of the log, or to later ones. Whether they changed.

        A rival may do the same; its changes are detected and not repeated.
        """
        before = without_constraints(self.table.schema)
        if is_same_schema(columns, before):
            return False
        for _ in range(SCHEMAS_TRIED_MAX):
            view = self.table.view()  # before the log, so that the log includes the changes of a rival
            known = current_schema(view.schemas)[1]
            life = SchemaHistory.of(self.log)
            place, target = self._place_in(life, known), life.place(columns)
            if target is None or place >= target:
                self.table.refresh_schema()
                return not is_same_schema(known, before)
            try:
                evolve(self.table, view, with_constraints_of(life.following(place, target), known))
            except SchemaMismatch:  # a rival was faster
                continue
        raise Unavailable(f"the columns of table {self.table.name!r} are changed repeatedly; retry")

    def _place_in(self, life: SchemaHistory, known: ShardSchema) -> int:
        """The place of these columns of the table in the schema history of the log. Raises InvalidUsage (not in it)."""
        place = life.place(known)
        if place is not None:
            return place
        key = life.written[-1].key
        if len(known.key) != len(key) or known.key not in {schema.key for schema in life.written}:
            raise InvalidUsage(
                f"table {self.table.name!r} has the key {list(known.key)}, and its log {self.log.name!r} the key "
                f"{list(key)}; they must be the same: apply the log to a table of another name"
            )
        raise InvalidUsage(
            f"table {self.table.name!r} has columns, or column numbers, that its log {self.log.name!r} never had, so "
            "it was created or changed otherwise; apply the log to a table of another name"
        )

    def _as_of_table(self, updates: pa.Table, columns: ShardSchema) -> PinnedRows:
        """The updates with the columns of the table, which are those of the log or later ones.

        The schema history of the log is needed because a plain schema does not record what its columns became.
        """
        number, known = known_schema(self.table)
        if is_same_schema(columns, known):
            return PinnedRows(updates, number, known)
        life = SchemaHistory.of(self.log)
        start, end = life.place(columns), self._place_in(life, known)
        if start is None or start > end:
            raise Unavailable(f"the columns of log {self.log.name!r} have changed meanwhile; retry")
        return PinnedRows(life.moved(updates, start, end), number, known)
