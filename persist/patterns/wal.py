"""Tables in WAL mode: a shard is the log, and replicas apply it to others.

A front end appends to the log by compare-and-append: that makes each update definite, once, at one time. Replicas read
the log and `append` what it says to a table, at the same times. So any number of them may apply one log to one table.
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
from persist.client.connect import Client
from persist.client.schema_lineage import (
    Life,
    ShardSchema,
    current_schema,
    evolve,
    known_by,
    own_handle,
    same,
    with_constraints_of,
    without_constraints,
)
from persist.client.shard import Shard
from persist.client.write import Pinned, Updates
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
from persist.patterns.internal_shards import BoundedClock, Closing, Stepping, WallClock, confirmed_by, whole_events
from persist.patterns.sequenced_append import TIME, FeedPosition, Numbered, checked_writer_name, one_table

SCHEMAS_TRIED_MAX = 100  # by which a table follows its log: each failed one is a rival's


TRIES_MAX = 1_000  # of a write: each failure is a write of another front end, or an answer that was lost


class FrontEnd(Closing):
    """One of those who write to a log, by its name; numbers its writes from 1 on. Thread-safe.

    Opening one of the same name, anywhere, ends the one that was open. After Indeterminate it is of no use: what became
    of the write, `acknowledged` of a new one of its name tells.
    """

    def __init__(self, log: Shard, name: str, *, clock: WallClock | None = None) -> None:
        """Take over from the one of this name before it.

        Args:
            log: the shard; `Replica` applies it. Whoever writes to it is a front end.
            name: who writes, up to 128 characters.
            clock: times are its milliseconds since 1970, as far as the stores confirm them; None: times count up.
        Raises: InvalidUsage (the arguments are others), Unavailable (many open it at once; retry).
        """
        checked("log", log, Shard)
        self.log = log
        self.name = checked_writer_name(name)
        self._lock = threading.Lock()
        self._writer = log.open_writer(purpose=f"front end {name}")
        self._numbered = Numbered(log, f"front end {name}")
        self._time_key = named_key(f"front end's last time {name}")
        self._followed = None
        if clock is not None:
            self._followed = BoundedClock(clock, confirmed_by(log))
        self._numbered.take_over()
        self.acknowledged = self._numbered.last()  # writes up to this number are in the log
        self._upper: int | None = None
        self._unknown: Indeterminate | None = None

    def __repr__(self) -> str:
        return f"FrontEnd({self.log.name!r}, {self.name!r}, acknowledged={self.acknowledged})"

    def write(self, updates: Updates) -> int:
        """Write rows to the log, at one time, once.

        Args:
            updates: as `Shard.insert` says, without `__time`.
        Returns: their time, which is later than all before it.
        Raises: InvalidUsage (the rows do not fit; nothing was written), AttributeMismatch (it was opened elsewhere),
            Conflict (the log is closed), Unavailable (it did not happen; repeat it), Indeterminate (it may have
            happened: open a front end of this name, and look at `acknowledged`).
        """
        rows = one_table(updates, self.log, "a front end")  # a rival may come first: then it is staged anew, later
        with self._lock:
            if self._unknown is not None:
                raise Indeterminate(f"{self._unknown.message}; open front end {self.name!r} anew to go on")
            number = self.acknowledged + 1
            try:
                time = self._written(rows, number)
            except Indeterminate as error:
                self._unknown = error
                raise
            except PersistError:  # it has not happened: another write may have its number
                raise
            except BaseException:  # the caller was interrupted, such as by a signal
                self._unknown = Indeterminate(f"write {number} to log {self.log.name!r} was interrupted")
                raise
            self.acknowledged = number
            return time

    def close(self) -> None:
        """Give back what it holds. Raises what every call may."""
        self._writer.close()

    def _written(self, rows: Pinned, number: int) -> int:
        lost: Indeterminate | None = None
        for _ in range(TRIES_MAX):
            try:
                return self._tried(rows, number)
            except UpperMismatch as error:
                self._upper = next(iter(error.details.get("actual") or []), None)
            except Indeterminate as error:
                self._upper, lost = None, error
            except AttributeMismatch as error:
                if not self._numbered.landed(error, number):
                    raise
                return self._landed_at(number)
            except PersistError as error:  # such as of a key that is there because an earlier try has landed
                if lost is None:
                    raise
                if self._has_landed(number):
                    return self._landed_at(number)
                raise lost from error
        raise lost or Unavailable(f"other front ends of shard {self.log.name!r} were quicker each time; retry")

    def _tried(self, rows: Pinned, number: int) -> int:
        lower = self._log_upper() if self._upper is None else self._upper
        time = lower if self._followed is None else self._followed.time(lower)
        times = pa.repeat(pa.scalar(time, pa.int64()), rows.rows.num_rows)
        timed = replace(rows, rows=rows.rows.append_column(TIME, times))
        changes = (*self._numbered.conditions(number), AttributeUpdate.replace(self._time_key, time))
        self._writer.compare_and_append(timed, lower, time + 1, attributes=changes)
        self._upper = time + 1
        return time

    def _has_landed(self, number: int) -> bool:
        """Whether a try is known to have landed: one whose answer was lost may also land later."""
        try:
            return self._numbered.last() >= number
        except PersistError:
            return False

    def _landed_at(self, number: int) -> int:
        """The time of a write that has landed. Raises Indeterminate: nobody tells it."""
        try:
            return self.log.attributes.get(self._time_key) or 0
        except PersistError as error:
            raise Indeterminate(
                f"write {number} to log {self.log.name!r} has landed, and its time is not known: {error.message}"
            ) from error

    def _log_upper(self) -> int:
        upper = self.log.upper().element
        if upper is None:
            raise Conflict(f"the log, shard {self.log.name!r}, is closed: nothing can be written any more")
        return upper


class Replica(Stepping):
    """One of those who apply a log to a table. Not thread-safe: rivals have one each.

    At each complete time the table has the contents of the log, by the columns that the log has: it follows every
    change of them. It is fed by replicas of this log alone; an attribute of it says how far they have come. A step
    applies what is new in the log, progress without rows too. Where an insert, an erasure or a recovery has taken a
    time of the table, the rows that the log has there come at the first time that is free, as the `info` of that commit
    tells, and the log goes on from there. A step raises Conflict (the table is closed, or others have appended to it:
    see `rebind`) and NotReadable (the log has forgotten what the table lacks: give the log more history, and make the
    table anew).
    """

    def __init__(self, log: Shard, table: Shard) -> None:
        """It goes on from where `table` stands, which `Replica.open` has made.

        It follows changes of columns by handles of its own: those that are given learn nothing.
        Raises: InvalidUsage (the table has another key, or columns that the log never had, or these are no shards).
        """
        checked("log", log, Shard)
        checked("table", table, Shard)
        self.log = own_handle(log)
        self.table = own_handle(table)
        self._place_in(Life.of(self.log), self.table.refresh_schema())
        self._writer = self.table.open_writer(purpose=f"replica of {log.name}"[:256])
        self._fed = FeedPosition(self.table)

    @classmethod
    def open(cls, client: Client, log: str, table: str, *, history: timedelta | str | None = None) -> Self:
        """A replica of the log called `log`. The table is made if it is not there; `history` as for `create_shard`.

        It is made with the numbers that the columns have in the log, by which it follows their changes. What the log
        asks of rows (constraints) was asked there.
        Raises: UnknownShard (there is no such log), InvalidUsage (the table has columns that the log never had).
        """
        source = client.shard(log)
        try:
            return cls(source, client.shard(table))
        except UnknownShard:
            pass
        try:
            made = client.create_shard(table, source.schema, list(source.schema.key), history=history)
        except ShardExists:  # a rival has made it, by columns of another moment
            made = client.shard(table)
        return cls(source, made)

    def __repr__(self) -> str:
        return f"Replica({self.log.name!r} -> {self.table.name!r}, upper={self.upper})"

    def _step(self, wait_s: float) -> bool:
        if self._listen is None:
            self._fed.load()
            self._let_go_on(self.log.upper())
            self._listen = self.log.listen(self.upper - 1, purpose=f"replica {self.table.name}")
        went_on = self._follow(self.log.refresh_schema())
        for updates, upper_of in whole_events(self._listen, wait_s):
            columns = self._listen.schema or self.log.schema
            self._follow(columns)
            self._fed.append(self._writer, upper_of.element, partial(self._new_rows, updates, columns))
            self._let_go_on(upper_of)
            went_on = True
        return went_on

    def _new_rows(self, updates: pa.Table, columns: ShardSchema) -> Pinned | None:
        placed = self._fed.placed(updates)
        return self._as_of_table(placed, columns) if placed.num_rows else None

    def _let_go_on(self, upper: Antichain) -> None:
        """Let the log go on at a time that is free in the table. Where it cannot be written here, times stay apart."""
        if upper < Antichain(self._fed.upper):
            with suppress(Forbidden, InvalidUsage, Conflict):
                self.log.advance_upper(self._fed.upper)

    def _follow(self, columns: ShardSchema) -> bool:
        """Bring the table to these columns, which the log has or had, or to later ones. Whether they changed.

        A rival may do it as well. What it did is seen, and not done again.
        """
        begin = without_constraints(self.table.schema)
        if same(columns, begin):
            return False
        for _ in range(SCHEMAS_TRIED_MAX):
            view = self.table.view()  # before the log: so the log has what a rival brought here
            known = current_schema(view.schemas)[1]
            life = Life.of(self.log)
            here, target = self._place_in(life, known), life.place(columns)
            if target is None or here >= target:
                self.table.refresh_schema()
                return not same(known, begin)
            try:
                evolve(self.table, view, with_constraints_of(life.following(here, target), known))
            except SchemaMismatch:  # a rival was quicker
                continue
        raise Unavailable(f"the columns of table {self.table.name!r} are changed all the time; retry")

    def _place_in(self, life: Life, known: ShardSchema) -> int:
        """Where these columns of a table stand among those that the log has had. Raises InvalidUsage (they did not)."""
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
            f"table {self.table.name!r} has columns, or numbers of columns, that its log {self.log.name!r} never had: "
            "somebody else made or changed it; apply the log to a table of another name"
        )

    def _as_of_table(self, updates: pa.Table, columns: ShardSchema) -> Pinned:
        """The updates by the columns that the table has, which are those of the log, or later ones that it has by now.

        A plain schema says nothing of what its columns became. So the life of the log tells it.
        """
        number, known = known_by(self.table)
        if same(columns, known):
            return Pinned(updates, number, known)
        life = Life.of(self.log)
        begin, end = life.place(columns), self._place_in(life, known)
        if begin is None or begin > end:
            raise Unavailable(f"the columns of log {self.log.name!r} have changed meanwhile; retry")
        return Pinned(life.moved(updates, begin, end), number, known)
