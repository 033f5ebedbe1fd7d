"""A writer and a reader over several shards: all rows of a key go to one shard, in order, each append once.

An append goes to the shards of its rows, one commit each, conditional on three attributes: the gate of the shard (its
epoch of routes), the instance of the writer, and the number of its last append there. So a retry lands once, an earlier
instance lands nothing, and nothing lands in an epoch that has ended. An append is not atomic over shards: temporarily,
or after a crash, only some of them have their rows. Then it is retried, and completes the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from persist.client.arguments import checked, checked_wait
from persist.client.listen import Listen
from persist.client.schema_lineage import NamedColumns, ShardSchema, check_alike, has_same_columns, known_schema
from persist.client.unique_insert import CheckedWriter
from persist.client.write import PinnedRows, Updates
from persist.core.attribute import AttributeUpdate
from persist.core.errors import (
    AttributeMismatch,
    Conflict,
    Indeterminate,
    InvalidUsage,
    PersistError,
    Unavailable,
    UnknownShard,
    UpperMismatch,
    shown,
)
from persist.core.frontier import TIME_MAX, Antichain
from persist.sources.internal_shards import Closeable, whole_events
from persist.sources.partition_map import Epoch, Routes
from persist.sources.sequenced_writer import Fingerprint, SequencedWriter, checked_writer_name, rereadable, table_by

PARALLEL_SHARDS = 16  # that an append is sent to in parallel
EPOCHS_TRIED_MAX = 100  # of one append; a try fails if the routes were changed meanwhile
ROWS_MAX = 10_000_000  # that `read_routed` returns
EPOCH_COLUMN, TIME_COLUMN = "__epoch", "__time"


class _Lane:
    """The writer of one shard in one epoch."""

    def __init__(self, routes: Routes, sequence: SequencedWriter, writer: CheckedWriter, epoch: int) -> None:
        self._shard = sequence.shard
        self.sequence = sequence
        self._writer = writer
        self._gate = AttributeUpdate.replace_if_equals(routes.gate, epoch, epoch)

    def check(self, rows: pa.Table, number: int, columns: ShardSchema) -> None:
        """Raise InvalidUsage if the shard would reject the rows now. Nothing is written."""
        pinned = self._pin(rows, columns)
        try:
            self._writer.check(pinned)
        except InvalidUsage:
            if self.sequence.last() < number:
                raise  # else their keys exist because an earlier try has landed

    def send(self, rows: pa.Table, number: int, columns: ShardSchema, whole: Fingerprint) -> bool:
        """Append the rows, which have `columns`, once. False if the epoch has ended: they may have landed before.

        Raises AttributeMismatch (another instance was opened), and as an insert.
        """
        pinned = self._pin(rows, columns)
        try:
            self._writer.insert(pinned, attributes=(self._gate, *self.sequence.conditions(number, whole)))
        except AttributeMismatch as error:
            if self._gate.key in error.details.get("actual", {}):
                return False
            if not self.sequence.landed(error, number):
                raise
        except UpperMismatch as error:
            if error.details.get("actual") != []:
                raise
            if self.sequence.last() < number:  # the shard is closed, and the routes may have changed
                if (self._shard.attributes.get(self._gate.key) or 0) > (self._gate.expected or 0):
                    return False
                raise Conflict(f"{error.message}; change the routes to shards that are open") from error
        except (Indeterminate, InvalidUsage) as error:  # perhaps rejected because an earlier try has landed
            if not self._has_landed(number, error):
                raise
        return True

    def _has_landed(self, number: int, error: PersistError) -> bool:
        """Whether a try is known to have landed. Raises Indeterminate if that cannot be read after this error."""
        try:
            return self.sequence.last() >= number
        except PersistError as failed:
            raise Indeterminate(f"{error.message}; whether an earlier try has landed is unknown: {failed}") from failed

    def _pin(self, rows: pa.Table, columns: ShardSchema) -> PinnedRows:
        """The rows with the columns of the shard. Raises InvalidUsage if these are not `columns`."""
        number, known = known_schema(self._shard)
        if not has_same_columns(known, columns):
            raise InvalidUsage(
                f"shard {self._shard.name!r} has other columns than this routed writer knows; change those of all its "
                "shards alike, reopen the writer, and append the same rows again with the new names"
            )
        return PinnedRows(rows, number, known)


class RoutedWriter(Closeable):
    """The writer called `name` of these routes; numbers its appends from 1 on. Thread-safe: appends are serialized.

    Opening a writer of the same name, anywhere, ends the previous one. It follows changes of the routes.
    """

    def __init__(self, routes: Routes, name: str) -> None:
        """Take over from the previous writer of this name, of up to 128 characters.

        Raises: InvalidUsage (an argument is not valid, or the shards have different columns), UnknownShard (one of the
            current shards was dropped), Unavailable (many are opened at the same time; retry).
        """
        checked("routes", routes, Routes)
        self.routes = routes
        self.name = checked_writer_name(name)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(PARALLEL_SHARDS, thread_name_prefix=f"persist-routed-{name}")
        self._writers: dict[str, CheckedWriter] = {}
        self._home = SequencedWriter(routes.shard, f"routed {name}")
        self._incomplete: pa.Table | None = None  # the rows of an append that may not have landed completely
        self._is_unsure = False  # whether some of them may have landed without an acknowledgement
        self._ended: dict[int, list[int]] = {}  # the last number by slot, for each ended epoch
        self._numbers: list[int] = []  # the last number by slot, in the current epoch
        self._epochs, self._lanes = self._read_routes()  # up to the current epoch, and its lanes
        self._columns = self._common_columns()
        self._home.take_over()  # the previous writer continues if the routes cannot be read
        self._adopt_routes()
        self.acknowledged = max(0, max(max(numbers) for numbers in (*self._ended.values(), self._numbers)) - 1)
        self._started = self._stored_fingerprint(self.acknowledged + 1)  # of an append that an instance before started

    def __repr__(self) -> str:
        return f"RoutedWriter({self.routes.shard.name!r}, {self.name!r}, acknowledged={self.acknowledged})"

    def append(self, updates: Updates) -> int:
        """Append rows, each to the shard of its key, at a time that the service chooses there.

        It is not atomic over shards. After an error, or a crash, append the same rows again: each row lands once.

        Args:
            updates: as for `Shard.insert`, without `__time`.
        Returns: the number of this append: it has landed completely, and so have the previous ones. `acknowledged` is
            the last of them, also after opening. The one after it may have landed in part, or completely; append it
            again in any case.
        Raises: InvalidUsage and ConstraintViolated (a shard rejects rows: nothing was written, or the error says that
            the append is not complete; or the previous append must be repeated first), Conflict (a shard is closed:
            change the routes, and append the same rows again), AttributeMismatch (it was opened elsewhere),
            Unavailable, Overloaded or Indeterminate (some of it may have happened: append the same rows again).
        """
        with self._lock:
            rows = self._to_table(rereadable(updates))
            number, whole = self.acknowledged + 1, Fingerprint.of(rows, self._columns)
            if self._incomplete is not None and Fingerprint.of(self._incomplete, self._columns) != whole:
                raise InvalidUsage(
                    f"append {number} of routed writer {self.name!r} is not complete; append its rows again first"
                )
            if self._started is not None and not self._started.can_be(whole):
                raise InvalidUsage(
                    f"append {number} of routed writer {self.name!r} has landed with other rows, perhaps in part, "
                    "before the writer was opened; append those rows again first"
                )
            is_retry, self._incomplete = self._incomplete is not None, rows
            try:
                if is_retry:  # commits in flight may have landed meanwhile
                    self._adopt_routes()
                self._land(rows, number, whole)
            except PersistError as error:
                numbers = (*self._ended.values(), self._numbers)
                if not self._is_unsure and all(max(landed) < number for landed in numbers):  # nothing has landed
                    self._incomplete = None
                elif isinstance(error, InvalidUsage):
                    raise self._rejected_in_part(error, number) from error
                raise
            self._incomplete, self._started, self._is_unsure = None, None, False
            self.acknowledged = number
            return number

    def close(self) -> None:
        self._pool.shutdown()
        for writer in self._writers.values():
            writer.close()

    def _to_table(self, updates: Updates) -> pa.Table:
        """The rows with the common columns of the shards, as known or, if they do not fit, refreshed."""
        try:
            return table_by(self._columns, updates, "a routed writer")
        except InvalidUsage:
            known = self._columns
            for name in self._epochs[-1].shards:
                self.routes.of(name).refresh_schema()
            self._columns = self._common_columns()
            if has_same_columns(known, self._columns):
                raise
        return table_by(self._columns, updates, "a routed writer")

    def _common_columns(self) -> ShardSchema:
        """The columns of all shards. Raises InvalidUsage if they differ."""
        shards = {name: self.routes.of(name) for name in self._epochs[-1].shards}
        schemas = {name: shard.schema for name, shard in shards.items()}
        if not all(has_same_columns(schema, next(iter(schemas.values()))) for schema in schemas.values()):
            schemas = {name: shard.refresh_schema() for name, shard in shards.items()}
        check_alike(f"routes {self.routes.shard.name!r} take no rows", schemas)
        return next(iter(schemas.values()))

    def _rejected_in_part(self, error: InvalidUsage, number: int) -> InvalidUsage:
        reason = error.message.split("; nothing was written")[0]
        return type(error)(
            f"append {number} of routed writer {self.name!r} is not complete, and may have landed in part: {reason}; "
            "fix the cause, such as a constraint, and append the same rows again",
            **error.details,
        )

    def _stored_fingerprint(self, number: int) -> Fingerprint | None:
        """The fingerprint of an append that has landed in some shard, or None."""
        for epoch in self._epochs:
            numbers = self._numbers if epoch is self._epochs[-1] else self._ended[epoch.number]
            for shard, last in zip(epoch.shards, numbers, strict=True):
                if last == number and (fingerprint := self._sequence(shard, epoch).last_fingerprint()) is not None:
                    return fingerprint
        return None

    def _land(self, rows: pa.Table, number: int, whole: Fingerprint) -> None:
        checked_epochs: set[int] = set()
        for _ in range(EPOCHS_TRIED_MAX):
            for epoch in self._epochs[:-1]:  # remove the rows that have landed in ended epochs
                landed = np.array(self._ended[epoch.number]) >= number
                if epoch.number not in checked_epochs and landed.any():
                    rows = rows.filter(pa.array(~landed[epoch.slots(rows, self.routes.by_of(self._columns))]))
                checked_epochs.add(epoch.number)
            try:
                if self._send(rows, number, whole):
                    return
            except UnknownShard:
                if self.routes.current() is self._epochs[-1]:
                    raise
            self._adopt_routes()
        raise Unavailable(f"routes {self.routes.shard.name!r} are changed repeatedly; append the same rows again")

    def _send(self, rows: pa.Table, number: int, whole: Fingerprint) -> bool:
        """Send the rows by the current routes if all shards accept them; False if the routes have changed."""
        slots = self._epochs[-1].slots(rows, self.routes.by_of(self._columns))
        pending = [int(slot) for slot in np.unique(slots) if self._numbers[slot] < number]
        pieces = {slot: rows.take(np.flatnonzero(slots == slot)) for slot in pending}
        if len(pieces) > 1:  # a single commit is atomic
            self._check(pieces, number)

        was_unsure, self._is_unsure = self._is_unsure, True  # in case the caller is interrupted
        outcomes = self._outcomes(
            pieces, lambda slot: self._lanes[slot].send(pieces[slot], number, self._columns, whole)
        )
        errors = [outcome for outcome in outcomes.values() if isinstance(outcome, PersistError)]
        self._is_unsure = was_unsure or not all(isinstance(error, InvalidUsage) for error in errors)
        for slot, outcome in outcomes.items():
            if outcome is True:
                self._numbers[slot] = number
        if errors:  # another instance is the most important error, then errors that a retry does not fix
            raise min(
                errors, key=lambda e: 0 if isinstance(e, AttributeMismatch) else 1 + (not isinstance(e, InvalidUsage))
            )
        return all(outcomes.values())

    def _check(self, pieces: dict[int, pa.Table], number: int) -> None:
        """Raise the error of a shard that would reject its rows, before any shard is written."""
        checked_pieces = self._outcomes(
            pieces, lambda slot: self._lanes[slot].check(pieces[slot], number, self._columns)
        )
        for outcome in checked_pieces.values():
            if isinstance(outcome, PersistError):
                raise outcome

    def _outcomes(
        self, slots: Iterable[int], action: Callable[[int], bool | None]
    ) -> dict[int, bool | PersistError | None]:
        """The result of the action, or its error, for each slot; several at once."""

        def attempt(slot: int) -> bool | PersistError | None:
            try:
                return action(slot)
            except PersistError as error:
                return error

        numbers = list(slots)
        attempted = map(attempt, numbers) if len(numbers) == 1 else self._pool.map(attempt, numbers)
        return dict(zip(numbers, attempted, strict=True))

    def _adopt_routes(self) -> None:
        """Read the current routes, become the only instance in their shards, and learn what has landed.

        `check` is last, so that an instance that is opened meanwhile is detected.
        """
        epochs, lanes = self._read_routes()
        for lane in lanes:
            lane.sequence.follow(self._home.instance)
        self._home.check()
        self._epochs, self._lanes = epochs, lanes
        self._numbers = [lane.sequence.last() for lane in lanes]

    def _read_routes(self) -> tuple[list[Epoch], list[_Lane]]:
        """The current epochs, and the lanes of the last one; learns the last numbers of those that have ended.

        Raises UnknownShard (a shard of the last epoch was dropped).
        """
        epochs = self.routes.epochs()
        for epoch in epochs[:-1]:
            if epoch.number not in self._ended:
                self._ended[epoch.number] = [self._last_number(shard, epoch) for shard in epoch.shards]
        lanes = []
        for name in epochs[-1].shards:
            if name not in self._writers:
                self._writers[name] = self.routes.of(name).open_writer(purpose=f"routed writer {self.name}")
            sequence = self._sequence(name, epochs[-1])
            lanes.append(_Lane(self.routes, sequence, self._writers[name], epochs[-1].number))
        return epochs, lanes

    def _last_number(self, shard: str, epoch: Epoch) -> int:
        """The number of the last append that landed in the shard in the epoch; 0 if it was dropped with its rows."""
        try:
            return self._sequence(shard, epoch).last()
        except UnknownShard:
            return 0

    def _sequence(self, shard: str, epoch: Epoch) -> SequencedWriter:
        """The numbers of this writer in the shard in the epoch."""
        return SequencedWriter(self.routes.of(shard), f"routed {self.routes.shard.name} {self.name}", str(epoch.number))


@dataclass(frozen=True, slots=True)
class RoutedEvent:
    """Updates of one shard in one epoch, complete before `upper`, by time. `updates` has `__time` and `__diff`.

    `schema` is that of the read: the schemas of shards differ while their columns are changed one after the other.
    """

    epoch: int
    shard: str
    upper: int
    updates: pa.Table
    schema: ShardSchema


@dataclass(frozen=True, slots=True)
class RoutedPosition:
    """The position of a reader: an epoch, and the upper in each of its shards (missing: the beginning)."""

    epoch: int = 0
    uppers: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "uppers": dict(self.uppers)}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> RoutedPosition:
        """The position that `to_json` returned. Raises InvalidUsage."""
        epoch, uppers = given.get("epoch"), given.get("uppers")
        is_valid = isinstance(uppers, Mapping) and all(type(upper) is int and upper >= 0 for upper in uppers.values())
        if type(epoch) is not int or epoch < 0 or not isinstance(uppers, Mapping) or not is_valid:
            raise InvalidUsage(
                f"a position of routes is {shown(dict(given))}; pass the result of RoutedPosition.to_json"
            )
        return cls(epoch, dict(uppers))


class RoutedReader(Closeable):
    """Follows all shards of some routes, epoch by epoch. Not thread-safe.

    Every shard of an epoch is read to its end before the next epoch begins. So the updates of a key are read in the
    order of their appends, even if its shard changed. Shards of one epoch are read round-robin. Their history must
    reach back to the position. `position` lets another reader continue; it does not hold history.
    """

    def __init__(self, routes: Routes, position: RoutedPosition | None = None, **selected: Any) -> None:
        """Begin at `position` of a previous reader (None: at the first epoch).

        Args:
            selected: as for `Shard.listen`: `where`, `columns`, `start_key`, `end_key`, `key_prefix`. Names of columns
                are the current ones, in every epoch.
        Raises: InvalidUsage (an argument is not valid; the first step rejects unknown columns), and as every call.
        """
        checked("routes", routes, Routes)
        checked("position", position, RoutedPosition, type(None))
        self.routes = routes
        self.position = position or RoutedPosition()
        self._listens: dict[str, Listen] = {}
        self._known: dict[str, int | None] = {}  # the schema of the first listener of each shard
        self._named: NamedColumns | None = None
        if selected:
            name = routes.opened()[-1].shards[0]
            self._named = NamedColumns(routes.of(name), f"this reader of routes {routes.shard.name!r}", **selected)
            self._known[name] = self._named.schema_id
        self._epochs = 0  # the number of epochs when these listeners were opened

    def next_events(self, wait_s: float = 0.0) -> Iterator[RoutedEvent]:
        """The new events; waits at most `wait_s` for the first. `position` advances as events are consumed.

        After any error, including Expired (no call for minutes), the next call continues from `position`.
        Raises: NotReadable (a shard has forgotten the next updates), and as `Shard.listen` and its events.
        """
        checked_wait("wait_s", wait_s)
        is_empty = True
        try:
            for event in self._steps(0.0):
                is_empty = False
                yield event
            if is_empty and wait_s > 0:
                yield from self._steps(wait_s)
        except BaseException:
            self.close()
            raise

    @property
    def knows_all_epochs(self) -> bool:
        """Whether no epoch was opened since the last step, which would have ended it early."""
        return len(self.routes.opened()) == self._epochs

    def close(self) -> None:
        """Close the listeners. Raises nothing."""
        for listen in self._listens.values():
            listen.close()
        self._listens = {}

    def _steps(self, wait_s: float) -> Iterator[RoutedEvent]:
        """One step of each shard of the last epoch, after the previous epochs were read to their ends."""
        epochs = self.routes.opened()
        if self._epochs != len(epochs):  # an epoch has ended, so its listeners must end there
            self.close()
            self._epochs = len(epochs)
        while self.position.epoch < len(epochs) - 1:
            yield from self._rest_of(epochs[self.position.epoch], epochs[self.position.epoch + 1])
            self.close()
            self.position = RoutedPosition(self.position.epoch + 1)
        last = epochs[-1]
        for name in last.shards:
            yield from self._step(last, name, wait_s / len(last.shards))

    def _rest_of(self, epoch: Epoch, following: Epoch) -> Iterator[RoutedEvent]:
        """The rest of an ended epoch. Each shard is complete up to its end, so there is no wait."""
        for name in epoch.shards:
            end = (following.began or {})[name]
            if self._upper(epoch, name) < end:
                with self._listen(epoch, name, end) as listen:
                    while not listen.done:
                        for updates, frontier in whole_events(listen, 0.0):
                            yield from self._event(epoch, name, updates, frontier, listen)

    def _step(self, epoch: Epoch, name: str, wait_s: float) -> Iterator[RoutedEvent]:
        if name not in self._listens:
            self._listens[name] = self._listen(epoch, name, None)
        listen = self._listens[name]
        for number, (updates, frontier) in enumerate(whole_events(listen, wait_s)):
            # If the next epoch was opened meanwhile, the updates may belong to it, and other shards are read first.
            if number == 0 and not self.knows_all_epochs:
                self.close()
                return
            yield from self._event(epoch, name, updates, frontier, listen)

    def _listen(self, epoch: Epoch, name: str, end: int | None) -> Listen:
        start, purpose = self._upper(epoch, name), f"routes {self.routes.shard.name}"
        shard = self.routes.of(name)
        if self._named is None:
            listen = shard.listen(start - 1, until=end, purpose=purpose)
        else:
            listen = self._named.listen(shard, start - 1, end, purpose)
        if name not in self._known and self._named is not None and listen.known is not None:
            try:
                self._named.check(shard, listen.known)
            except BaseException:
                listen.close()
                raise
        listen.known = self._known.setdefault(name, listen.known)
        return listen

    def _upper(self, epoch: Epoch, name: str) -> int:
        return self.position.uppers.get(name, (epoch.began or {})[name])

    def _event(
        self, epoch: Epoch, name: str, updates: pa.Table, frontier: Antichain, listen: Listen
    ) -> Iterator[RoutedEvent]:
        schema = listen.schema or self.routes.of(name).schema
        upper = TIME_MAX if frontier.element is None else frontier.element
        if len(updates):
            yield RoutedEvent(epoch.number, name, upper, updates, schema)
        self.position = RoutedPosition(epoch.number, {**self.position.uppers, name: upper})


def read_routed(routes: Routes, *, rows_max: int = ROWS_MAX, **selected: Any) -> pa.Table:
    """All routed updates up to now, ordered by key, and those of a key in the order of their appends.

    Args:
        selected: as for `Shard.listen`: `where`, `columns` (with the key), `start_key`, `end_key`, `key_prefix`.
    Returns: the columns, `__time` (in the shard of that epoch), `__diff` and `__epoch`. Sum `__diff` for the contents.
    Raises: InvalidUsage (there are more than `rows_max` updates, or the columns of shards differ: change them alike,
        then read again), NotReadable (a shard has forgotten its first updates).
    """
    checked("rows_max", rows_max, int)
    if rows_max <= 0:
        raise InvalidUsage(f"rows_max is {shown(rows_max)}; it must be a positive number of updates")
    tables: list[pa.Table] = []
    schemas: dict[str, ShardSchema] = {}
    rows = 0
    with RoutedReader(routes, **selected) as reader:
        for event in _all_events(reader):
            schemas.setdefault(event.shard, event.schema)
            check_alike(f"routes {routes.shard.name!r} are not read", {**schemas, event.shard: event.schema})
            rows += len(event.updates)
            if rows > rows_max:
                raise InvalidUsage(
                    f"routes {routes.shard.name!r} have more than {rows_max} updates; read ranges of keys, or use "
                    "RoutedReader"
                )
            epochs = pa.repeat(pa.scalar(event.epoch, pa.int64()), len(event.updates))
            tables.append(event.updates.append_column(EPOCH_COLUMN, epochs))
    if not tables:
        empty = routes.of(routes.current().shards[0]).refresh_schema().updates_schema.empty_table()
        return empty.append_column(EPOCH_COLUMN, pa.array([], pa.int64()))
    order = [(name, "ascending") for name in (*event.schema.key, EPOCH_COLUMN, TIME_COLUMN)]
    return pa.concat_tables(tables, promote_options="default").sort_by(order)


def _all_events(reader: RoutedReader) -> Iterator[RoutedEvent]:
    """The events up to now, also if an epoch is opened meanwhile, which ends a step early."""
    yield from reader.next_events()
    while not reader.knows_all_epochs:
        yield from reader.next_events()
