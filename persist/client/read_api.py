"""The methods of `Shard` that read: snapshots, listeners, and contents followed by changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.arguments import SPLITS_MAX, check_int, checked, checked_time, checked_wait, key_values, names
from persist.client.listen import Listen, Subscription
from persist.client.row_reader import expand_rows, first_negative, multiplicities
from persist.client.shard_base import ShardBase
from persist.client.shared_lease_reads import hold_shared, read_unleased
from persist.client.snapshot import LATEST_TRIES_MAX, Held, ReadLease, Snapshot, Tagged, hold_time, open_before_all
from persist.client.timestamps import BEFORE_ALL, NothingWritten, as_of_at, resolve_time, to_datetime
from persist.client.write import Time
from persist.core import commands as c
from persist.core.errors import InvalidUsage, NotReadable, shown
from persist.core.frontier import Antichain, frontier
from persist.core.named_holds import check_tag_name
from persist.parts import DIFF, EVERYTHING, Selection, newest, valid_schemas
from persist.parts.schema_evolution import current_for_names

if TYPE_CHECKING:
    from persist.client.scan import Scan


LIMIT_MAX = 2**31 - 1
KEY_ROWS_MAX = 100_000  # rows of one key that `get` returns
HEAD_ROWS = 20
NOW, THEN = "now", "then"  # the columns of a read: the current ones, or those of the time
WAIT_S = 60.0
Key = Any  # a value of the first key column, or a tuple of values of the first ones


Holding: TypeAlias = Callable[..., AbstractContextManager[Held]]  # as `holding`


class ReadMethods(ShardBase):
    """The methods of `Shard` that read."""

    def snapshot(
        self,
        as_of: int | datetime | None = None,
        *,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        limit: int | None = None,
        start_key: Key | None = None,
        end_key: Key | None = None,
        key_prefix: Key | None = None,
        num_splits: int = 1,
        wait_s: float = WAIT_S,
        purpose: str = "snapshot",
        tag: str | None = None,
        schema: str = NOW,
    ) -> Snapshot:
        """The exact contents as of a time, held until the snapshot is closed or read to its end.

        Args:
            as_of: the time; None is the latest complete one, or -1 if nothing was written yet: as of -1 every shard is
                empty. A datetime with its zone is a wall clock: the contents by then, rounded down to the shard's grid
                (a second), which never change.
            where: a predicate, such as `"amount > 10 AND country = 'PT'"`: only rows for which it is true. Its columns
                need not be among `columns`. Parts of the shard that cannot have such rows are not read.
            columns: those to read; None is all.
            limit: at most so many rows, the first ones in key order, counted with their multiplicity. Reading ends
                there.
            start_key: only keys from this one on: a value of the first key column, or a tuple of the first ones.
            end_key: only keys before this one.
            key_prefix: only keys with these first values. If the last value is text, a prefix of it is enough.
            num_splits: the number of splits with disjoint keys, which can be read in parallel. If only some keys are
                wanted, there may be fewer. Each of them gives up to `limit` rows.
            wait_s: seconds to wait until `as_of` is complete.
            purpose: what lists of readers show for it.
            tag: the name of a tag, instead of a time.
            schema: "now" shows the current columns. "then" shows the columns at the time when the contents were
                written, with their names, order and types; `where` and `columns` use these names. Columns that were
                dropped since are left out anyway.
        Raises: InvalidUsage (no such time, column, key or limit, or a predicate that cannot be evaluated exactly),
            NotReadable (`as_of` is before since and has no tag, or there is no such tag), Unavailable (`as_of` was
            not complete within `wait_s`, or no clock can be trusted for a wall clock).
        """
        check_int("num_splits", num_splits, 1, SPLITS_MAX)
        if limit is not None:
            check_int("limit", limit, 0, LIMIT_MAX, ", or None for all rows")
        selection = self._selection(where, columns, start_key=start_key, end_key=end_key, key_prefix=key_prefix)
        selection = replace(selection, then=is_then("schema", schema))
        return snapshot_of(self, _named(as_of, tag), selection, limit, wait_s, purpose, num_splits)

    def scan(
        self,
        as_of: int | datetime | None = None,
        *,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        start_key: Key | None = None,
        end_key: Key | None = None,
        key_prefix: Key | None = None,
        wait_s: float = WAIT_S,
        purpose: str = "scan",
        tag: str | None = None,
    ) -> Scan:
        """The contents as of a time for DuckDB, Polars or any other reader of Arrow, held until the scan is closed.

        Such an engine reads only the columns that a query needs, and only row groups that may have matching rows.

        Args:
            as_of: as `snapshot` says. It is fixed now: the scan always shows that time.
            where: as `snapshot` says. An engine's own filter excludes further rows.
            columns: those that the engine sees, at least one; None is all.
            start_key, end_key, key_prefix: as `snapshot` says.
            wait_s: seconds to wait until `as_of` is complete.
            purpose: what lists of readers show for it.
            tag: the name of a tag, instead of a time.
        Raises: InvalidUsage (no columns), and what `snapshot` raises.
        """

        from persist.client.scan import open_scan  # Arrow's datasets are slow to import, and few programs need them

        selection = self._selection(where, columns, start_key=start_key, end_key=end_key, key_prefix=key_prefix)
        with self._held(_named(as_of, tag), purpose, wait_s) as (held, timestamp):
            return open_scan(held, selection, timestamp)

    def get(
        self, key: Key, *, as_of: int | datetime | None = None, columns: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """The rows of one key, repeated by their multiplicity; an empty list if the key does not exist.

        It reads the few row groups that may have this key, and writes nothing: it takes no hold, unless maintenance
        deletes what it reads meanwhile.

        Args:
            key: its value, or a tuple with one for each key column, in key order. `None` in it means null.
            as_of: as `snapshot` says. If it is not complete yet, the call waits for up to 60 s.
            columns: those to return; None is all.
        Returns: a dict for each row, by column names.
        Raises: InvalidUsage (it is no key of the shard, or has more than 100,000 rows), NegativeMultiplicity (a row was
            retracted more often than added), and what `snapshot` raises.
        """
        selection = replace(self._selection(None, columns), key=key_values(key))
        rows = self._rows(as_of, selection, KEY_ROWS_MAX + 1, "get")
        if len(rows) > KEY_ROWS_MAX:
            raise InvalidUsage(
                f"the key has more than {KEY_ROWS_MAX} rows in shard {self.name!r}; read them with snapshot(), by "
                "key_prefix or where"
            )
        return rows

    def head(
        self,
        n: int = HEAD_ROWS,
        *,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        as_of: int | datetime | None = None,
    ) -> list[dict[str, Any]]:
        """The first `n` rows, in [0, 100,000], in key order, repeated by their multiplicity. No further rows are read.

        `where` and `columns` are as `snapshot` says, `as_of` as `get` says. Returns a dict for each row, by column
        names. Raises InvalidUsage (no such number), and what `get` raises.
        """
        check_int("n", n, 0, KEY_ROWS_MAX, ": read more with snapshot(limit=)")
        return self._rows(as_of, self._selection(where, columns), n, "head")

    def count(self, where: str | None = None, as_of: int | datetime | None = None) -> int:
        """The number of rows, counted with their multiplicity: the sum of `__diff`.

        `where` (None: all rows) is as `snapshot` says, `as_of` as `get` says. Raises what `snapshot` raises.
        """
        return counted(self, as_of, self._selection(where, ()))[1]

    def listen(
        self,
        as_of: int | datetime | None,
        *,
        until: Time = None,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        start_key: Key | None = None,
        end_key: Key | None = None,
        key_prefix: Key | None = None,
        purpose: str = "listen",
    ) -> Listen:
        """Every update after a time, once and in order. After `snapshot(as_of)` there is no gap and no overlap.

        Args:
            as_of: the time; None, or -1, is from the beginning. A datetime with its zone is a wall clock, as for
                `snapshot`.
            until: the frontier at which it ends; None never ends, unless the shard is closed.
            where: as `snapshot` says: only updates of such rows. Progress is reported even without any.
            columns: those to return, beside `__time` and `__diff`; None is all.
            start_key, end_key, key_prefix: as `snapshot` says.
            purpose: what lists of readers show for it.
        Raises: InvalidUsage (no such time, column or key, or a predicate that cannot be evaluated exactly), NotReadable
            (what follows `as_of` was forgotten), Unavailable (no clock can be trusted for a wall clock, or it is in the
            future).
        """
        checked("purpose", purpose, str)
        if isinstance(as_of, datetime):
            resolution = self._resolved(as_of, 0.0)
            as_of = None if resolution.upper.element == 0 else as_of_at(self.name, resolution)
        checked_time("as_of", as_of, BEFORE_ALL)
        selection = self._selection(where, columns, start_key=start_key, end_key=end_key, key_prefix=key_prefix)
        return self._listen(as_of, frontier(until), selection, purpose)

    def subscribe(
        self,
        as_of: int | datetime | None = None,
        *,
        until: Time = None,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        start_key: Key | None = None,
        end_key: Key | None = None,
        key_prefix: Key | None = None,
        wait_s: float = WAIT_S,
        purpose: str = "subscribe",
    ) -> Subscription:
        """The contents as of a time, and then every change after it, in one iterator without gap or overlap.

        The contents come first, as updates at the time `as_of`. One hold covers both, from this call on.

        Args:
            as_of: as `snapshot` says.
            until: as `listen` says; later than `as_of`.
            where, columns: as `listen` says.
            start_key, end_key, key_prefix: as `snapshot` says.
            wait_s: seconds to wait until `as_of` is complete.
            purpose: what lists of readers show for it.
        Raises: what `snapshot` raises.
        """
        selection = self._selection(where, columns, start_key=start_key, end_key=end_key, key_prefix=key_prefix)
        end, known = frontier(until), self._schema_of(selection)
        with self._held(as_of, purpose, wait_s) as (held, _):
            return Subscription(held, end, selection, known)

    # --- implementation

    def _listen(self, as_of: int | None, end: Antichain, selection: Selection, purpose: str) -> Listen:
        known = self._schema_of(selection)
        transport, name, settings = self._transport, self.name, self._settings.read
        if as_of == BEFORE_ALL:
            lease = open_before_all(transport, name, purpose, settings)
        else:
            lease = ReadLease.open(transport, name, Antichain(as_of or 0), purpose, settings)
        try:
            listener = Listen(transport, name, lease, (as_of, end), settings, selection)
        except BaseException:
            lease.close()
            raise
        listener.known = known
        return listener

    def _rows(self, as_of: int | datetime | None, wanted: Selection, limit: int, purpose: str) -> list[dict[str, Any]]:
        """The first rows as dicts, repeated by their multiplicity; read without a hold if possible."""
        if isinstance(as_of, datetime):
            as_of = as_of_at(self.name, self._resolved(as_of, WAIT_S))
        checked_time("as_of", as_of, BEFORE_ALL)
        table = read_unleased(self._transport, self.name, as_of, wanted, limit, self._settings.read)
        if table is None:
            with snapshot_of(self, as_of, wanted, limit, WAIT_S, purpose) as snapshot:
                table = snapshot.to_arrow()
        if table.schema.names == [DIFF] and first_negative(table) is None:  # Arrow tables without columns have no rows
            return [{} for _ in range(sum(multiplicities(table)))]
        try:
            rows: list[dict[str, Any]] = pa.concat_tables(expand_rows(table)).to_pylist()
        except (OverflowError, ValueError) as error:
            raise InvalidUsage(
                f"Python has no value for one in these rows of shard {self.name!r} ({error}); take a snapshot, whose "
                "`to_arrow` has all values"
            ) from error
        return rows

    @contextmanager
    def _held(
        self, at: int | datetime | Tagged | None, purpose: str, wait_s: float, hold: Holding = hold_time
    ) -> Iterator[tuple[Held, datetime | None]]:
        """A complete time, held, and the wall clock that named it. The lease outlives the block, unless it raises."""
        timestamp = None
        if isinstance(at, datetime):
            resolution = self._resolved(at, wait_s)
            at, timestamp = as_of_at(self.name, resolution), to_datetime(resolution.at_ms)
        with ExitStack() as stack:
            yield self._entered(stack, at, (purpose, wait_s), hold), timestamp

    def _entered(self, stack: ExitStack, at: int | Tagged | None, options: tuple[str, float], hold: Holding) -> Held:
        """As `hold`, on a stack; the latest time of an empty shard is BEFORE_ALL. `options`: purpose, seconds."""
        transport, name, read = self._transport, self.name, (*options, self._settings.read)
        for left in range(LATEST_TRIES_MAX, 0, -1):
            try:
                return stack.enter_context(hold(transport, name, at, *read))
            except NothingWritten:
                try:
                    return stack.enter_context(hold_time(transport, name, BEFORE_ALL, *read))
                except NotReadable:  # by now something was written, and the beginning forgotten
                    if left == 1:
                        raise
        raise AssertionError("the last try returns or raises")

    def _schema_of(self, selection: Selection) -> int | None:
        """The id of the schema that names the selected columns; None: none is named.

        Raises InvalidUsage if the shard has no such columns or keys now, and if a name means another column than by the
        schema `selection.known`.
        """
        if selection == EVERYTHING:
            return None
        schemas = valid_schemas(self.view().schemas)
        number, schema = newest(schemas)
        current_for_names(schemas, selection.known, selection.on(schema).names)
        return number

    def _selection(self, where: str | None, columns: Sequence[str] | None, **keys: Key | None) -> Selection:
        """The selection of a caller, by the names that this handle knows. Raises as `selection_of`."""
        return replace(selection_of(where, columns, **keys), known=self._current_schema()[0])

    def _resolved(self, when: datetime, wait_s: float) -> c.TimeResolved:
        checked("when", when, datetime)
        checked_wait("wait_s", wait_s)
        return resolve_time(self._transport, self.name, when, wait_s, self._settings.read.retry_s)


def snapshot_of(
    shard: ReadMethods,
    at: int | datetime | Tagged | None,
    selection: Selection,
    limit: int | None = None,
    wait_s: float = WAIT_S,
    purpose: str = "snapshot",
    num_splits: int = 1,
) -> Snapshot:
    """A snapshot of a selection, at most `limit` rows. Raises what `Shard.snapshot` does."""
    hold = hold_shared if num_splits == 1 else hold_time  # several splits are meant for other processes
    with shard._held(at, purpose, wait_s, hold) as (held, timestamp):
        return replace(held.snapshot(num_splits, selection, limit), timestamp=timestamp)


def counted(
    shard: ReadMethods, at: int | datetime | Tagged | None, selection: Selection, wait_s: float = WAIT_S
) -> tuple[Snapshot, int]:
    """The number of selected rows, and the snapshot from which they were counted. Raises as `snapshot_of`."""
    with snapshot_of(shard, at, replace(selection, columns=()), None, wait_s, "count") as snapshot:
        return snapshot, sum(pc.sum(table.column(DIFF)).as_py() for table in snapshot.batches())


def selection_of(
    where: str | None,
    columns: Sequence[str] | None,
    *,
    start_key: Key | None = None,
    end_key: Key | None = None,
    key_prefix: Key | None = None,
) -> Selection:
    """The selection of a caller. Raises InvalidUsage if an argument is invalid."""
    checked("where", where, str, type(None))
    if where is not None and not where.strip():
        raise InvalidUsage('where is empty; it must be a predicate, such as "amount > 10", or None for all rows')
    start, end, prefix = (None if key is None else key_values(key) for key in (start_key, end_key, key_prefix))
    return Selection(where, start, end, prefix, columns=None if columns is None else names("columns", columns))


def _named(as_of: int | datetime | None, tag: str | None) -> int | datetime | Tagged | None:
    """The time that a caller names. Raises InvalidUsage if both are given."""
    if tag is not None and as_of is not None:
        raise InvalidUsage("as_of and tag are both given; give one of them")
    return as_of if tag is None else Tagged(check_tag_name(tag))


def is_then(what: str, schema: object) -> bool:
    """Whether the columns of the time are selected. Raises InvalidUsage, naming the argument `what`."""
    if schema not in (NOW, THEN):
        raise InvalidUsage(f"{what} is {shown(schema)}; it is {NOW!r}, for the columns of today, or {THEN!r}")
    return schema == THEN
