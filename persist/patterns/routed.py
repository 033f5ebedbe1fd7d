"""One writer and one reader over several shards; each update once, those of a key in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from persist.client.arguments import checked, checked_wait
from persist.client.listen import Listen
from persist.client.schema_lineage import NamedColumns, ShardSchema, alike, check_alike, known_by
from persist.client.shard import Shard
from persist.client.unique_insert import CheckedWriter
from persist.client.write import Pinned, Updates
from persist.core.attribute import AttributeUpdate
from persist.core.errors import (
    AttributeMismatch,
    Conflict,
    Indeterminate,
    InvalidUsage,
    PersistError,
    Unavailable,
    UpperMismatch,
    shown,
)
from persist.core.frontier import TIME_MAX, Antichain
from persist.patterns.internal_shards import Closing, whole_events
from persist.patterns.partition_map import Epoch, Routes
from persist.patterns.sequenced_append import (
    Fingerprint,
    KeptFingerprint,
    Numbered,
    checked_writer_name,
    held,
    table_by,
)

# One writer over several shards: all rows of a key go to one of them, in order, each append once.
#
# An append goes to the shards of its rows, one commit each, conditional on three attributes: the gate of the shard (its
# epoch of routes), the instance of the writer, and the number of its last append there. So what is sent again lands
# once, an earlier instance lands nothing any more, and nothing lands in an epoch that has ended. The shards together
# are not atomic: for a while, or after a crash, some have their rows of an append and others not. The append is then
# repeated, and goes where its rows are not yet.


SENT_AT_ONCE = 16  # shards
EPOCHS_TRIED_MAX = 100  # of one append: the routes were changed meanwhile


class _Lane:
    """The writer's way into one shard, in one epoch."""

    def __init__(self, routes: Routes, shard: Shard, writer: CheckedWriter, name: str, epoch: int) -> None:
        self._shard = shard
        known = f"routed {routes.shard.name} {name}"
        self.numbered = Numbered(shard, known, str(epoch))
        self.kept = KeptFingerprint(self.numbered, known, str(epoch))
        self._writer = writer
        self._gate = AttributeUpdate.replace_if_equals(routes.gate, epoch, epoch)

    def check(self, rows: pa.Table, number: int, columns: ShardSchema) -> None:
        """Raise InvalidUsage where the shard would refuse the rows, as it is now. Nothing is written."""
        pinned = self._pinned(rows, columns)
        try:
            self._writer.check(pinned)
        except InvalidUsage:
            if self.numbered.last() < number:
                raise  # else their keys are there because an earlier try has landed

    def send(self, rows: pa.Table, number: int, columns: ShardSchema, whole: Fingerprint) -> bool:
        """Land the rows, which are by `columns`, once. False where the epoch has ended: they may have landed before.

        Raises AttributeMismatch (another instance was opened), and what an insert may.
        """
        pinned = self._pinned(rows, columns)
        changes = (self._gate, *self.numbered.conditions(number), *self.kept.updates(whole))
        try:
            self._writer.insert(pinned, attributes=changes)
        except AttributeMismatch as error:
            if self._gate.key in error.details.get("actual", {}):
                return False
            if not self.numbered.landed(error, number):
                raise
        except UpperMismatch as error:
            if error.details.get("actual") != []:
                raise
            if self.numbered.last() < number:  # the shard is closed, and the routes may lead to another one by now
                if (self._shard.attributes.get(self._gate.key) or 0) > (self._gate.expected or 0):
                    return False
                raise Conflict(f"{error.message}; change the routes to shards that are open") from error
        except (Indeterminate, InvalidUsage):  # a later try may have been refused because an earlier one has landed
            if self.numbered.last() < number:
                raise
        return True

    def _pinned(self, rows: pa.Table, columns: ShardSchema) -> Pinned:
        """The rows by the columns that the shard has here. Raises InvalidUsage where those are others."""
        number, known = known_by(self._shard)
        if not alike(known, columns):
            raise InvalidUsage(
                f"shard {self._shard.name!r} has other columns than this routed writer knows; change those of all its "
                "shards alike, open the writer anew, and append the same rows again by their names of then"
            )
        return Pinned(rows, number, known)


class RoutedWriter(Closing):
    """The writer called `name` of these routes; numbers its appends from 1 on. Thread-safe: appends take turns.

    Opening one of the same name, anywhere, ends the one that was open. Where the routes are changed it goes on by them.
    """

    def __init__(self, routes: Routes, name: str) -> None:
        """Take over from the one of this name before it.

        Args:
            routes: where rows go.
            name: who writes, up to 128 characters.
        Raises: InvalidUsage (the arguments are others), Unavailable (many open it at once; retry).
        """
        checked("routes", routes, Routes)
        self.routes = routes
        self.name = checked_writer_name(name)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(SENT_AT_ONCE, thread_name_prefix=f"persist-routed-{name}")
        self._writers: dict[str, CheckedWriter] = {}
        self._home = Numbered(routes.shard, f"routed {name}")
        self._home.take_over()
        self._incomplete: pa.Table | None = None  # the rows of an append of which not all is known to have landed
        self._is_unsure = False  # whether some of them may have landed, though no shard has told so
        self._ended: dict[int, list[int]] = {}  # of epochs that have ended: the last number by slot
        self._lanes: list[_Lane] = []
        self._numbers: list[int] = []  # the last number by slot, in the epoch of now
        self._epochs: list[Epoch] = []  # up to the one of now
        self._adopt()
        self._columns = self._common()
        self.acknowledged = max(0, max(max(numbers) for numbers in (*self._ended.values(), self._numbers)) - 1)
        self._begun = self._kept(self.acknowledged + 1)  # by an instance before: these rows, and no others

    def __repr__(self) -> str:
        return f"RoutedWriter({self.routes.shard.name!r}, {self.name!r}, acknowledged={self.acknowledged})"

    def append(self, updates: Updates) -> int:
        """Append rows: each goes to the shard of its key, at a time that the service chooses there.

        It is not atomic over shards. After an error, or a crash, append the same rows again: each row lands once.

        Args:
            updates: as `Shard.insert` says, without `__time`.
        Returns: the number of this append: all of it has landed, and so have those before it. `acknowledged` is the
            last of them. When just opened: where to go on. The one after it may have landed in part, or as a whole;
            append it again all the same.
        Raises: InvalidUsage and ConstraintViolated (a shard refuses rows: none was written, or the error says that the
            append is not complete; or an append before has to be repeated first), Conflict (a shard is closed: change
            the routes, and append the same rows again), AttributeMismatch (it was opened elsewhere), Unavailable,
            Overloaded or Indeterminate (some of it may have happened: append the same rows again).
        """
        with self._lock:
            rows = self._given(held(updates))
            if self._incomplete is not None and not self._incomplete.equals(rows):
                raise InvalidUsage(
                    f"append {self.acknowledged + 1} of routed writer {self.name!r} is not complete; append its rows "
                    "again first"
                )
            number, whole = self.acknowledged + 1, Fingerprint.of(rows, self._columns)
            if self._begun is not None and not self._begun.can_be(whole):
                raise InvalidUsage(
                    f"append {number} of routed writer {self.name!r} has landed with other rows, perhaps in part, "
                    "before the writer was opened; append those rows again first"
                )
            is_first, self._incomplete = self._incomplete is None, rows
            try:
                if not is_first:  # what was on its way may have landed meanwhile
                    self._adopt()
                self._land(rows, number, whole)
            except PersistError as error:
                if not self._may_be_there(number):
                    self._incomplete = None
                elif isinstance(error, InvalidUsage):
                    raise self._refused_in_part(error, number) from error
                raise
            self._incomplete, self._begun, self._is_unsure = None, None, False
            self.acknowledged = number
            return number

    def close(self) -> None:
        """Give back what it holds. Raises what every call may."""
        self._pool.shutdown()
        for writer in self._writers.values():
            writer.close()

    # --- how

    def _given(self, updates: Updates) -> pa.Table:
        """The rows by the columns that all shards have, as this writer knows them or, if they do not fit, as of now."""
        try:
            return table_by(self._columns, updates, "a routed writer")
        except InvalidUsage:
            known = self._columns
            for name in self._epochs[-1].shards:
                self._shard(name).refresh_schema()
            self._columns = self._common()
            if alike(known, self._columns):
                raise
        return table_by(self._columns, updates, "a routed writer")

    def _common(self) -> ShardSchema:
        """The columns of all shards. Raises InvalidUsage where they were not changed alike."""
        shards = {name: self._shard(name) for name in self._epochs[-1].shards}
        schemas = {name: shard.schema for name, shard in shards.items()}
        if not all(alike(schema, next(iter(schemas.values()))) for schema in schemas.values()):
            schemas = {name: shard.refresh_schema() for name, shard in shards.items()}
        check_alike(f"routes {self.routes.shard.name!r} take no rows", schemas)
        return next(iter(schemas.values()))

    def _may_be_there(self, number: int) -> bool:
        """Whether rows of this append may have landed."""
        return self._is_unsure or any(max(numbers) >= number for numbers in (*self._ended.values(), self._numbers))

    def _refused_in_part(self, error: InvalidUsage, number: int) -> InvalidUsage:
        why = error.message.split("; nothing was written")[0]
        return type(error)(
            f"append {number} of routed writer {self.name!r} is not complete, and may have landed in part: {why}; mend "
            "what refuses it, such as a constraint, and append the same rows again",
            **error.details,
        )

    def _kept(self, number: int) -> Fingerprint | None:
        """What is known of the rows of an append that has landed somewhere; None: of such a one nothing is."""
        for epoch in self._epochs:
            numbers = self._numbers if epoch is self._epochs[-1] else self._ended[epoch.number]
            for lane, last in zip(self._lanes_of(epoch), numbers, strict=True):
                if last == number and (found := lane.kept.last()) is not None:
                    return found
        return None

    def _land(self, rows: pa.Table, number: int, whole: Fingerprint) -> None:
        ended: set[int] = set()
        for _ in range(EPOCHS_TRIED_MAX):
            for epoch in self._epochs[:-1]:  # what has landed in epochs that have ended
                if epoch.number not in ended and max(self._ended[epoch.number]) >= number:
                    rows = self._left(rows, epoch, self._ended[epoch.number], number)
                ended.add(epoch.number)
            if self._sent(rows, number, whole):
                return
            self._adopt()
        raise Unavailable(f"routes {self.routes.shard.name!r} are changed all the time; append the same rows again")

    def _left(self, rows: pa.Table, epoch: Epoch, numbers: list[int], number: int) -> pa.Table:
        """The rows that have not landed by the routes of that epoch."""
        landed = np.array(numbers) >= number
        return rows.filter(pa.array(~landed[epoch.slots(rows, self.routes.by_of(self._columns))]))

    def _sent(self, rows: pa.Table, number: int, whole: Fingerprint) -> bool:
        """Send the rows by the routes of now, if all shards would take them; False where the routes have changed."""
        slots = self._epochs[-1].slots(rows, self.routes.by_of(self._columns))
        wanted = [int(slot) for slot in np.unique(slots) if self._numbers[slot] < number]
        pieces = {slot: rows.take(np.flatnonzero(slots == slot)) for slot in wanted}
        if len(pieces) > 1:  # one commit is whole by itself
            self._check(pieces, number)

        def send(slot: int) -> tuple[int, bool | PersistError]:
            try:
                return slot, self._lanes[slot].send(pieces[slot], number, self._columns, whole)
            except PersistError as error:
                return slot, error

        was_unsure, self._is_unsure = self._is_unsure, True  # also where the caller is interrupted
        outcomes = [send(slot) for slot in pieces] if len(pieces) == 1 else list(self._pool.map(send, pieces))
        refused = [outcome for _, outcome in outcomes if isinstance(outcome, PersistError)]
        self._is_unsure = was_unsure or not all(isinstance(error, InvalidUsage) for error in refused)
        return self._all_landed(outcomes, number)

    def _check(self, pieces: dict[int, pa.Table], number: int) -> None:
        """Raise what a shard would refuse its rows with, before any shard takes some."""

        def check(slot: int) -> PersistError | None:
            try:
                self._lanes[slot].check(pieces[slot], number, self._columns)
            except PersistError as error:
                return error
            return None

        for error in list(self._pool.map(check, pieces)):
            if error is not None:
                raise error

    def _all_landed(self, outcomes: list[tuple[int, bool | PersistError]], number: int) -> bool:
        landed, errors = True, []
        for slot, outcome in outcomes:
            if isinstance(outcome, PersistError):
                errors.append(outcome)
            elif outcome:
                self._numbers[slot] = number
            else:
                landed = False
        if errors:  # that another instance writes comes first, then what a retry does not mend
            raise min(
                errors, key=lambda e: 0 if isinstance(e, AttributeMismatch) else 1 + (not isinstance(e, InvalidUsage))
            )
        return landed

    def _adopt(self) -> None:
        """Go on by the routes of now: be the one instance there, and learn what has landed.

        Who reads the routes after this instance has begun sees it in the end, since `check` comes last.
        """
        epochs = self.routes.epochs()
        lanes = self._lanes_of(epochs[-1])
        for lane in lanes:
            lane.numbered.follow(self._home.instance)
        self._home.check()
        for epoch in epochs[:-1]:
            if epoch.number not in self._ended:
                self._ended[epoch.number] = [lane.numbered.last() for lane in self._lanes_of(epoch)]
        self._epochs, self._lanes = epochs, lanes
        self._numbers = [lane.numbered.last() for lane in lanes]

    def _lanes_of(self, epoch: Epoch) -> list[_Lane]:
        return [
            _Lane(self.routes, self._shard(name), self._writer(name), self.name, epoch.number) for name in epoch.shards
        ]

    def _shard(self, name: str) -> Shard:
        return self.routes.of(name)

    def _writer(self, name: str) -> CheckedWriter:
        if name not in self._writers:
            self._writers[name] = self._shard(name).open_writer(purpose=f"routed writer {self.name}")
        return self._writers[name]


# Reading what was routed over several shards: each update once, those of a key in the order of their appends.


ROWS_MAX = 10_000_000  # that `read_routed` gives at once
EPOCH_COLUMN, TIME_COLUMN = "__epoch", "__time"


@dataclass(frozen=True, slots=True)
class RoutedEvent:
    """Updates of one shard in one epoch, complete before `upper`, by time. `updates` has `__time` and `__diff`.

    `schema` is that by which they were read: shards whose columns are changed one after the other differ for a while.
    """

    epoch: int
    shard: str
    upper: int
    updates: pa.Table
    schema: ShardSchema


@dataclass(frozen=True, slots=True)
class RoutedPosition:
    """How far a reader has come: in an epoch, before which time in each of its shards (left out: where it began)."""

    epoch: int = 0
    uppers: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The same for JSON."""
        return {"epoch": self.epoch, "uppers": dict(self.uppers)}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> RoutedPosition:
        """The position that `to_json` gave. Raises InvalidUsage."""
        epoch, uppers = given.get("epoch"), given.get("uppers")
        known = isinstance(uppers, Mapping) and all(type(upper) is int and upper >= 0 for upper in uppers.values())
        if type(epoch) is not int or epoch < 0 or not isinstance(uppers, Mapping) or not known:
            raise InvalidUsage(
                f"a position of routes is {shown(dict(given))}; take one that RoutedPosition.to_json gave"
            )
        return cls(epoch, dict(uppers))


class RoutedReader(Closing):
    """Follows all shards of some routes, epoch by epoch. Not thread-safe.

    An epoch is read to its end in every shard before the next one begins. So the updates of a key come in the order of
    their appends, whichever shards it was routed to. Shards of one epoch are read in turns. Their history has to reach
    back to what is read. `position` is where another reader goes on; it holds nothing by itself.
    """

    def __init__(self, routes: Routes, position: RoutedPosition | None = None, **selected: Any) -> None:
        """Begin at `position` (None: at the first epoch).

        Args:
            routes: which shards.
            position: of a reader before it.
            selected: as `Shard.listen` says: `where`, `columns`, `start_key`, `end_key`, `key_prefix`. Names of columns
                mean those so called now, in every epoch.
        Raises: InvalidUsage (the arguments are others; unknown columns are refused by the first step), and what every
            call may.
        """
        checked("routes", routes, Routes)
        checked("position", position, RoutedPosition, type(None))
        self.routes = routes
        self.position = position or RoutedPosition()
        self._listens: dict[str, Listen] = {}
        self._known: dict[str, int | None] = {}  # by which schemas of the shards it selects, as its first listeners did
        self._named: NamedColumns | None = None
        if selected:
            name = routes.opened()[-1].shards[0]
            self._named = NamedColumns(routes.of(name), f"this reader of routes {routes.shard.name!r}", **selected)
            self._known[name] = self._named.schema_id
        self._epochs = 0  # that were open when these began

    def next_events(self, wait_s: float = 0.0) -> Iterator[RoutedEvent]:
        """What is there now; waits at most `wait_s` for the first of it. `position` moves as events are taken.

        After any error another call goes on from `position`; so it does after Expired (nobody asked for minutes).
        Raises: NotReadable (a shard has forgotten what comes next), and what `Shard.listen` and its steps may.
        """
        checked_wait("wait_s", wait_s)
        came = False
        try:
            for event in self._steps(0.0):
                came = True
                yield event
            if not came and wait_s > 0:
                yield from self._steps(wait_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give back what it holds. Raises nothing."""
        for listen in self._listens.values():
            listen.close()
        self._listens = {}

    # --- how

    def _steps(self, wait_s: float) -> Iterator[RoutedEvent]:
        """One step of each shard of the last epoch, once those before it were read to their ends."""
        epochs = self.routes.opened()
        if self._epochs != len(epochs):  # an epoch has ended, and its listeners are to end there
            self.close()
            self._epochs = len(epochs)
        while self.position.epoch < len(epochs) - 1:
            yield from self._to_the_end(epochs[self.position.epoch], epochs[self.position.epoch + 1])
            self.close()
            self.position = RoutedPosition(self.position.epoch + 1)
        last = epochs[-1]
        for name in last.shards:
            yield from self._step(last, name, wait_s / len(last.shards))

    def _to_the_end(self, epoch: Epoch, following: Epoch) -> Iterator[RoutedEvent]:
        """All that is left of an epoch that has ended. Each shard is complete there, and need not be waited for."""
        for name in epoch.shards:
            end = (following.began or {})[name]
            if self._upper(epoch, name) < end:
                with self._listen(epoch, name, end) as listen:
                    while not listen.done:
                        for updates, frontier in whole_events(listen, 0.0):
                            yield from self._told(epoch, name, updates, frontier, listen)

    def _step(self, epoch: Epoch, name: str, wait_s: float) -> Iterator[RoutedEvent]:
        if name not in self._listens:
            self._listens[name] = self._listen(epoch, name, None)
        listen = self._listens[name]
        for number, (updates, frontier) in enumerate(whole_events(listen, wait_s)):
            # What was seen may be of the next epoch, if that was open by then. Other shards come first in that case.
            if number == 0 and len(self.routes.opened()) != self._epochs:
                self.close()
                return
            yield from self._told(epoch, name, updates, frontier, listen)

    def _listen(self, epoch: Epoch, name: str, end: int | None) -> Listen:
        begin, purpose = self._upper(epoch, name), f"routes {self.routes.shard.name}"
        shard = self.routes.of(name)
        if self._named is None:
            listen = shard.listen(begin - 1, until=end, purpose=purpose)
        else:
            listen = self._named.listen(shard, begin - 1, end, purpose)
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

    def _told(
        self, epoch: Epoch, name: str, updates: pa.Table, frontier: Antichain, listen: Listen
    ) -> Iterator[RoutedEvent]:
        schema = listen.schema or self.routes.of(name).schema
        upper = TIME_MAX if frontier.element is None else frontier.element
        if len(updates):
            yield RoutedEvent(epoch.number, name, upper, updates, schema)
        self.position = RoutedPosition(epoch.number, {**self.position.uppers, name: upper})


def read_routed(routes: Routes, *, rows_max: int = ROWS_MAX, **selected: Any) -> pa.Table:
    """All updates that were routed up to now, by key, and those of a key in the order of their appends.

    Args:
        routes: which shards.
        rows_max: more than so many updates are refused; take a part of them, by keys.
        selected: as `Shard.listen` says: `where`, `columns` (with the key), `start_key`, `end_key`, `key_prefix`.
    Returns: the columns, `__time` (of the shard of then), `__diff` and `__epoch`. Sum up `__diff` for the contents.
    Raises: InvalidUsage (there are more updates, or shards have different columns: change them alike, then read
        again), NotReadable (a shard has forgotten what was there in the beginning).
    """
    checked("rows_max", rows_max, int)
    if rows_max <= 0:
        raise InvalidUsage(f"rows_max is {shown(rows_max)}; it must be a positive number of updates")
    found: list[pa.Table] = []
    schemas: dict[str, ShardSchema] = {}
    rows = 0
    with RoutedReader(routes, **selected) as reader:
        for event in reader.next_events():
            schemas.setdefault(event.shard, event.schema)
            check_alike(f"routes {routes.shard.name!r} are not read", {**schemas, event.shard: event.schema})
            rows += len(event.updates)
            if rows > rows_max:
                raise InvalidUsage(
                    f"routes {routes.shard.name!r} have more than {rows_max} updates; read them by ranges of keys, or "
                    "with RoutedReader"
                )
            epochs = pa.repeat(pa.scalar(event.epoch, pa.int64()), len(event.updates))
            found.append(event.updates.append_column(EPOCH_COLUMN, epochs))
    if not found:
        empty = routes.of(routes.current().shards[0]).refresh_schema().updates_schema.empty_table()
        return empty.append_column(EPOCH_COLUMN, pa.array([], pa.int64()))
    order = [(name, "ascending") for name in (*event.schema.key, EPOCH_COLUMN, TIME_COLUMN)]
    return pa.concat_tables(found, promote_options="default").sort_by(order)
