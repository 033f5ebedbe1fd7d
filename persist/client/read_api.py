"""Reading a shard: snapshots, listeners, and contents followed by changes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.arguments import check_splits, checked, checked_time, checked_wait, names
from persist.client.history_api import HandleSettings
from persist.client.listen import Listen, ListenEvent
from persist.client.row_reader import expanded, first_negative, multiplicities
from persist.client.small_reads import holding_together, rows_at_once
from persist.client.snapshot import (
    LATEST_TRIES_MAX,
    Held,
    ReadLease,
    Snapshot,
    Tagged,
    holding,
)
from persist.client.timestamps import BEFORE_ALL, NothingWritten, as_of_at, resolved, shown_instant
from persist.client.transport import OneShard
from persist.client.write import Time
from persist.core import commands as c
from persist.core.errors import InvalidUsage, NotReadable, shown
from persist.core.frontier import Antichain, frontier
from persist.core.named_holds import check_tag_name
from persist.core.shard_view import ShardView
from persist.parts import DIFF, EVERYTHING, Selection, ShardSchema, at_time, newest, valid_schemas
from persist.parts.scan_spec import Values
from persist.parts.schema_evolution import current_for_names

if TYPE_CHECKING:
    from persist.client.scan import Scan


# Contents and then changes, as one stream.


class Subscription(Listen):
    """An iterator of events: the contents as of a time, then every change after it, without a gap.

    The contents come as updates at the time `as_of`, in one event or several, of which only the last moves the
    frontier: to `as_of + 1`. Where there are none (nothing was written yet: `as_of` is -1) no event tells of them.
    Whoever adds up `__diff` of all updates has the contents as of each frontier. `Shard.subscribe` gives one. All else
    is as `Listen` says: `frontier` is where another `listen` goes on, and a step that was cut begins anew.
    """

    def __init__(self, held: Held, until: Antichain, selection: Selection, known: int | None = None) -> None:
        name = held.view.name
        if held.lease.is_point:
            raise NotReadable(
                f"shard {name!r} keeps [{held.as_of}] alone, and has forgotten what came after it; subscribe as of a "
                f"time from {held.view.since} on",
                as_of=held.as_of,
                since=held.view.since.to_json(),
            )
        if until < Antichain(held.as_of + 1) and until.element is not None:
            raise InvalidUsage(f"until is {until}, where the contents as of {held.as_of} come first; it must be later")
        super().__init__(held.transport, name, held.lease, (None, until), held.settings, selection)
        self.known = known
        self._begins: Held | None = held
        self.as_of = held.as_of

    def __repr__(self) -> str:
        return f"Subscription({self._name!r}, as_of={self.as_of}, frontier={self.frontier}, until={self._until})"

    def next_events(self, timeout_s: float) -> Iterator[ListenEvent]:
        """The contents, when they were not given yet; then as `Listen.next_events`.

        Raises: what that does, and `timeout_s` is as there.
        """
        checked_wait("timeout_s", timeout_s)
        held, at = self._begins, self.as_of
        if held is None or at == BEFORE_ALL or self.frontier > Antichain(0):
            self._begins = None  # which it is not at once: the contents may be given again until they were whole
            yield from super().next_events(timeout_s)
            return
        if self._closed:
            raise InvalidUsage(f"this subscription to shard {self._name!r} was closed; subscribe again")
        wanted, reader = self._reader(held.view)
        rows = sum(part.rows for run in held.runs for part in run.parts)
        pieces = reader.read_range(held.runs, as_of=at, key_range=wanted.key_range, columns=wanted.read)
        self._lease.check()
        yield from self._events((at_time(table, at) for table in pieces), rows, Antichain(at + 1), wanted)


# Reading a shard: snapshots, listeners, both in one, and what takes one line.


LIMIT_MAX = 2**31 - 1
KEY_ROWS_MAX = 100_000  # rows of one key that `get` gives
HEAD_ROWS = 20
NOW, THEN = "now", "then"  # whose columns a read shows
WAIT_S = 60.0
Key = Any  # a value of the first key column, or a tuple of values of the first ones


Holding: TypeAlias = Callable[..., AbstractContextManager[Held]]  # as `holding`


class ReadMethods:
    """The reading methods of a shard. `persist.client.shard.Shard` is one, and says more."""

    name: str
    _transport: OneShard
    _settings: HandleSettings

    @abstractmethod
    def view(self) -> ShardView:
        """Frontiers and schemas as of now. Raises what every call may."""

    @abstractmethod
    def _current_schema(self) -> tuple[int, ShardSchema]:
        """The id of the schema that the handle knows, and the schema."""

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
            as_of: the time; None is the latest complete one, or -1 where nothing was written yet: as of -1 every shard
                is empty. A datetime with its zone is a wall clock: the contents by then, rounded down to the shard's
                grid (a second). They are the same whenever it is asked.
            where: a predicate, such as `"amount > 10 AND country = 'PT'"`: only rows for which it is true. Its columns
                need not be among `columns`. Parts of the shard that cannot have such rows are not read.
            columns: those to read; None is all.
            limit: at most so many rows, the first ones in key order, each counted as often as it is there. Reading
                ends there.
            start_key: only keys from this one on: a value of the first key column, or a tuple of the first ones.
            end_key: only keys before this one.
            key_prefix: only keys with these first values. Of a text that comes last, the beginning is enough.
            num_splits: into how many splits of disjoint keys it is cut, so that many can read it together. Where only
                some keys are wanted, they may be fewer. Each of them by itself gives up to `limit` rows.
            wait_s: seconds to wait until `as_of` is complete.
            purpose: what lists of readers show for it.
            tag: the name of a tag, in the place of a time.
            schema: "now" shows the columns of today. "then" shows those that the shard had when the time was written,
                with their names, order and types of then; `where` and `columns` name these. Columns that were dropped
                since are left out all the same.
        Raises: InvalidUsage (no such time, column, key or limit, or a predicate that cannot be told exactly),
            NotReadable (`as_of` lies before since and has no tag, or there is no such tag), Unavailable (`as_of` was
            not complete within `wait_s`, or no clock can be trusted for a wall clock).
        """
        check_splits(num_splits)
        _check_limit("limit", limit)
        selection = self._selection(where, columns, start_key=start_key, end_key=end_key, key_prefix=key_prefix)
        selection = replace(selection, then=is_then("schema", schema))
        return self._snapshot(_named(as_of, tag), selection, limit, (num_splits, wait_s, purpose))

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
        """The contents as of a time for DuckDB, Polars or whatever else reads Arrow, held until the scan is closed.

        Such an engine reads only the columns that a query needs, and only row groups that may have rows that match.

        Args:
            as_of: as `snapshot` says. It is fixed now: the scan shows that time, however often it is read.
            where: as `snapshot` says. An engine's own filter leaves out more rows.
            columns: those that the engine sees, at least one; None is all.
            start_key: as `snapshot` says.
            end_key: as `snapshot` says.
            key_prefix: as `snapshot` says.
            wait_s: seconds to wait until `as_of` is complete.
            purpose: what lists of readers show for it.
            tag: the name of a tag, in the place of a time.
        Raises: InvalidUsage (no columns), and what `snapshot` raises.
        """
        from persist.client.scan import scanned  # Arrow's datasets take their time to load, and few programs need them

        selection = self._selection(where, columns, start_key=start_key, end_key=end_key, key_prefix=key_prefix)
        with self._held(_named(as_of, tag), purpose, wait_s) as (held, timestamp):
            return scanned(held, selection, timestamp)

    def get(
        self, key: Key, *, as_of: int | datetime | None = None, columns: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """The rows of one key, each as often as it is there; an empty list where the key is not there.

        It reads the row groups that may have this key, which are few, and writes nothing: it takes no hold, unless
        maintenance deletes meanwhile what it reads.

        Args:
            key: its value, or a tuple with one for each key column, in key order. `None` in it means null.
            as_of: as `snapshot` says. One that is not complete yet is waited for, up to 60 s.
            columns: those to give; None is all.
        Returns: a dict for each row, by column names.
        Raises: InvalidUsage (it is no key of the shard, or has more than 100,000 rows), NegativeMultiplicity (a row was
            taken away more often than added), and what `snapshot` raises.
        """
        selection = replace(self._selection(None, columns), key=values_of(key))
        found = self._rows(as_of, selection, KEY_ROWS_MAX + 1, "get")
        if len(found) > KEY_ROWS_MAX:
            raise InvalidUsage(
                f"the key has more than {KEY_ROWS_MAX} rows in shard {self.name!r}; read them with snapshot(), by "
                "key_prefix or where"
            )
        return found

    def head(
        self,
        n: int = HEAD_ROWS,
        *,
        where: str | None = None,
        columns: Sequence[str] | None = None,
        as_of: int | datetime | None = None,
    ) -> list[dict[str, Any]]:
        """The first rows in key order, each as often as it is there. No more than these are read.

        Args:
            n: how many, in [0, 100,000].
            where: as `snapshot` says.
            columns: those to give; None is all.
            as_of: as `get` says.
        Returns: a dict for each row, by column names.
        Raises: InvalidUsage (no such number), and what `get` raises.
        """
        checked("n", n, int)
        if not 0 <= n <= KEY_ROWS_MAX:
            raise InvalidUsage(f"n is {shown(n)}; it must be in [0, {KEY_ROWS_MAX}]: read more with snapshot(limit=)")
        return self._rows(as_of, self._selection(where, columns), n, "head")

    def count(self, where: str | None = None, as_of: int | datetime | None = None) -> int:
        """How many rows there are, each counted as often as it is there: the sum of `__diff`.

        Args:
            where: as `snapshot` says. None: all rows.
            as_of: as `get` says.
        Raises: what `snapshot` raises.
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
        """Every update after a time, once and in order: it continues `snapshot(as_of)` without gap or overlap.

        Args:
            as_of: the time; None, or -1, is from the beginning. A datetime with its zone is a wall clock, as for
                `snapshot`.
            until: the frontier at which it ends; None never ends, unless the shard is closed.
            where: as `snapshot` says: only updates of such rows. Time that passes without one is told all the same.
            columns: those to give, beside `__time` and `__diff`; None is all.
            start_key: as `snapshot` says.
            end_key: as `snapshot` says.
            key_prefix: as `snapshot` says.
            purpose: what lists of readers show for it.
        Raises: InvalidUsage (no such time, column or key, or a predicate that cannot be told exactly), NotReadable
            (what follows `as_of` was forgotten), Unavailable (no clock can be trusted for a wall clock, or it is to
            come).
        """
        checked("purpose", purpose, str)
        if isinstance(as_of, datetime):
            found = self._resolved(as_of, 0.0)
            as_of = None if found.upper.element == 0 else as_of_at(self.name, found)
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
        """The contents as of a time, and then every change after it, in one iterator: no gap, no overlap.

        The contents come first, as updates at the time `as_of`. One hold covers both, from this call on.

        Args:
            as_of: as `snapshot` says.
            until: as `listen` says; later than `as_of`.
            where: as `listen` says.
            columns: as `listen` says.
            start_key: as `snapshot` says.
            end_key: as `snapshot` says.
            key_prefix: as `snapshot` says.
            wait_s: seconds to wait until `as_of` is complete.
            purpose: what lists of readers show for it.
        Raises: what `snapshot` raises.
        """
        selection = self._selection(where, columns, start_key=start_key, end_key=end_key, key_prefix=key_prefix)
        end, known = frontier(until), self._schema_of(selection)
        with self._held(as_of, purpose, wait_s) as (held, _):
            return Subscription(held, end, selection, known)

    # --- how

    def _listen(self, as_of: int | None, end: Antichain, selection: Selection, purpose: str) -> Listen:
        known = self._schema_of(selection)
        since = Antichain(max(as_of or 0, 0))
        lease = ReadLease.open(self._transport, self.name, since, purpose, self._settings.read)
        try:
            listener = Listen(self._transport, self.name, lease, (as_of, end), self._settings.read, selection)
        except BaseException:
            lease.close()
            raise
        listener.known = known
        return listener

    def _snapshot(
        self,
        at: int | datetime | Tagged | None,
        selection: Selection,
        limit: int | None,
        how: tuple[int, float, str],
    ) -> Snapshot:
        """`how`: the number of splits, the seconds to wait, and the purpose."""
        num_splits, wait_s, purpose = how
        hold = holding_together if num_splits == 1 else holding  # several are there to be read elsewhere
        with self._held(at, purpose, wait_s, hold) as (held, timestamp):
            return replace(held.snapshot(num_splits, selection, limit), timestamp=timestamp)

    def _rows(
        self, as_of: int | datetime | None, selection: Selection, limit: int, purpose: str
    ) -> list[dict[str, Any]]:
        """The first rows as dicts, each as often as it is there: read without a hold where that is possible."""
        if isinstance(as_of, datetime):
            as_of = as_of_at(self.name, self._resolved(as_of, WAIT_S))
        checked_time("as_of", as_of, BEFORE_ALL)
        table = rows_at_once(self._transport, self.name, as_of, selection, limit, self._settings.read)
        if table is None:
            with self._snapshot(as_of, selection, limit, (1, WAIT_S, purpose)) as found:
                table = found.to_arrow()
        if (
            table.schema.names == [DIFF] and first_negative(table) is None
        ):  # a table of Arrow without columns has no rows
            return [{} for _ in range(sum(multiplicities(table)))]
        rows: list[dict[str, Any]] = pa.concat_tables(expanded(table)).to_pylist()
        return rows

    @contextmanager
    def _held(
        self, at: int | datetime | Tagged | None, purpose: str, wait_s: float, hold: Holding = holding
    ) -> Iterator[tuple[Held, datetime | None]]:
        """A complete time, held, and the wall clock that named it. The lease outlives the block, unless an error ends

        that.
        """
        timestamp = None
        if isinstance(at, datetime):
            by = self._resolved(at, wait_s)
            at, timestamp = as_of_at(self.name, by), shown_instant(by.at_ms)
        with ExitStack() as stack:
            yield self._entered(stack, at, (purpose, wait_s), hold), timestamp

    def _entered(self, stack: ExitStack, at: int | Tagged | None, how: tuple[str, float], hold: Holding) -> Held:
        """As `hold`, on a stack; where nothing was written, the latest time is BEFORE_ALL. `how`: purpose, seconds."""
        purpose, wait_s = how
        checked_wait("wait_s", wait_s)
        checked("purpose", purpose, str)
        tries = 0
        while at != BEFORE_ALL:
            held = hold(self._transport, self.name, at, purpose, wait_s, self._settings.read)
            try:
                return stack.enter_context(held)
            except NothingWritten:
                try:
                    return stack.enter_context(self._before_all(purpose, wait_s))
                except NotReadable:  # by now something was written, and what came first forgotten
                    tries += 1
                    if tries == LATEST_TRIES_MAX:
                        raise
        return stack.enter_context(self._before_all(purpose, wait_s))

    def _before_all(self, purpose: str, wait_s: float) -> AbstractContextManager[Held]:
        return holding(self._transport, self.name, BEFORE_ALL, purpose, wait_s, self._settings.read)

    def _schema_of(self, selection: Selection) -> int | None:
        """The id of the schema by whose names the columns are selected; None: none is named.

        Raises InvalidUsage where the shard, as it is now, has no such columns or keys, and where one of the names means
        another column than by the schema `selection.known`.
        """
        if selection == EVERYTHING:
            return None
        schemas = valid_schemas(self.view().schemas)
        number, schema = newest(schemas)
        current_for_names(schemas, selection.known, selection.on(schema).names)
        return number

    def _selection(self, where: str | None, columns: Sequence[str] | None, **keys: Key | None) -> Selection:
        """What a caller selects, by the names that this handle knows. Raises as `selection_of`."""
        return replace(selection_of(where, columns, **keys), known=self._current_schema()[0])

    def _resolved(self, when: datetime, wait_s: float) -> c.TimeResolved:
        checked("when", when, datetime)
        checked_wait("wait_s", wait_s)
        return resolved(self._transport, self.name, when, wait_s, self._settings.read.retry_s)


def snapshot_of(
    shard: ReadMethods,
    at: int | datetime | Tagged | None,
    selection: Selection,
    limit: int | None = None,
    wait_s: float = WAIT_S,
    purpose: str = "snapshot",
) -> Snapshot:
    """A snapshot of what is selected, at most `limit` rows. Raises what `Shard.snapshot` does."""
    return shard._snapshot(at, selection, limit, (1, wait_s, purpose))


def listen_of(shard: ReadMethods, as_of: int | None, until: Time, selection: Selection, purpose: str) -> Listen:
    """A listener of what is selected. Raises what `Shard.listen` does."""
    return shard._listen(as_of, frontier(until), selection, purpose)


def counted(
    shard: ReadMethods, at: int | datetime | Tagged | None, selection: Selection, wait_s: float = WAIT_S
) -> tuple[Snapshot, int]:
    """How many rows of what is selected there are, and the snapshot of them, which is read. Raises as `snapshot_of`."""
    with snapshot_of(shard, at, replace(selection, columns=()), None, wait_s, "count") as found:
        return found, sum(pc.sum(table.column(DIFF)).as_py() for table in found.batches())


def selection_of(
    where: str | None,
    columns: Sequence[str] | None,
    *,
    start_key: Key | None = None,
    end_key: Key | None = None,
    key_prefix: Key | None = None,
) -> Selection:
    """What a caller selects. Raises InvalidUsage where an argument is not what it must be."""
    checked("where", where, str, type(None))
    if where is not None and not where.strip():
        raise InvalidUsage('where is empty; it must be a predicate, such as "amount > 10", or None for all rows')
    start, end, prefix = (None if key is None else values_of(key) for key in (start_key, end_key, key_prefix))
    return Selection(where, start, end, prefix, columns=None if columns is None else names("columns", columns))


def _named(as_of: int | datetime | None, tag: str | None) -> int | datetime | Tagged | None:
    """The time that a caller names. Raises InvalidUsage where both are given."""
    if tag is not None and as_of is not None:
        raise InvalidUsage("as_of and tag are both given; give one of them")
    return as_of if tag is None else Tagged(check_tag_name(tag))


def is_then(what: str, given: object) -> bool:
    """Whether columns of the time that is read are meant. Raises InvalidUsage, naming `what` was given."""
    if given not in (NOW, THEN):
        raise InvalidUsage(f"{what} is {shown(given)}; it is {NOW!r}, for the columns of today, or {THEN!r}")
    return given == THEN


def values_of(key: Key) -> Values:
    """The values of the first key columns: those of a tuple, or the one value that is given."""
    return tuple(key) if isinstance(key, (tuple, list)) else (key,)


def _check_limit(what: str, limit: object) -> None:
    checked(what, limit, int, type(None))
    if isinstance(limit, int) and not 0 <= limit <= LIMIT_MAX:
        raise InvalidUsage(f"{what} is {shown(limit)}; it must be in [0, {LIMIT_MAX}], or None for all rows")
