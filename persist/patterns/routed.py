"""One writer over several shards: all rows of a key go to one of them, in order, each append once.

An append goes to the shards of its rows, one commit each, conditional on three attributes: the gate of the shard (its
epoch of routes), the instance of the writer, and the number of its last append there. So what is sent again lands once,
an earlier instance lands nothing any more, and nothing lands in an epoch that has ended. The shards together are not
atomic: for a while, or after a crash, some have their rows of an append and others not. The append is then repeated,
and goes where its rows are not yet.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa

from persist.client.arguments import checked
from persist.client.columns import ShardSchema, alike, check_alike, known_by
from persist.client.inserting import CheckedWriter
from persist.client.pinned import Pinned
from persist.client.shard import Shard
from persist.client.write import Updates
from persist.core.attribute import AttributeUpdate
from persist.core.errors import (
    AttributeMismatch,
    Conflict,
    Indeterminate,
    InvalidUsage,
    PersistError,
    Unavailable,
    UpperMismatch,
)
from persist.patterns.fingerprints import Fingerprint, Kept
from persist.patterns.given import held, table_by
from persist.patterns.numbered import Numbered
from persist.patterns.routes import Epoch, Routes

NAME_CHARS_MAX = 128
SENT_AT_ONCE = 16  # shards
EPOCHS_TRIED_MAX = 100  # of one append: the routes were changed meanwhile


class _Lane:
    """The writer's way into one shard, in one epoch."""

    def __init__(self, routes: Routes, shard: Shard, writer: CheckedWriter, name: str, epoch: int) -> None:
        self._shard = shard
        known = f"routed {routes.shard.name} {name}"
        self.numbered = Numbered(shard, known, str(epoch))
        self.kept = Kept(self.numbered, known, str(epoch))
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


class RoutedWriter:
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
        checked("name", name, str)
        if not 0 < len(name) <= NAME_CHARS_MAX:
            raise InvalidUsage(f"name is {name!r:.100}; it must have 1 to {NAME_CHARS_MAX} characters")
        self.routes = routes
        self.name = name
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

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
