"""Sequenced appends: a shard takes each numbered append once; fingerprints, row input, and the feed's position."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.arguments import checked
from persist.client.idempotency import MODULUS, digest_of_rows
from persist.client.schema_lineage import ShardSchema, known_by, learnt
from persist.client.shard import Shard
from persist.client.write import Pinned, Updates, WriteHandle, as_updates, gathered, reusable
from persist.core.attribute import AttributeUpdate, named_key
from persist.core.errors import AttributeMismatch, Conflict, Indeterminate, InvalidUsage, Unavailable, UpperMismatch
from persist.core.frontier import TIME_MAX

# Appends with numbers, by which a shard takes each of them once, also from a writer that starts again.
#
# The shard keeps two attributes of a writer: its instance, which counts how often it was opened, and the number of its
# last append. Each append is conditional on the first and moves the second, with its rows or not at all. So an append
# that is sent again lands once, and what an earlier instance still has under way does not land.


NAME_CHARS_MAX = 128  # of a writer
OPEN_TRIES_MAX = 100  # each failed try means that another instance has been opened meanwhile


def checked_writer_name(name: object) -> str:
    """The name of a numbered writer. Raises InvalidUsage."""
    checked("name", name, str)
    assert isinstance(name, str)
    if not 0 < len(name) <= NAME_CHARS_MAX:
        raise InvalidUsage(f"name is {name!r:.100}; it must have 1 to {NAME_CHARS_MAX} characters")
    return name


class Numbered:
    """One writer of one shard, by its name. `stage`: its numbers begin anew in each (an epoch of routes)."""

    def __init__(self, shard: Shard, name: str, stage: str = "") -> None:
        self.shard = shard
        self._name = name
        self._number = named_key(f"numbered writer {name}\0{stage}")
        self._instance = named_key(f"numbered writer's instance {name}")
        self.instance = 0

    def take_over(self) -> None:
        """Become the one instance. Raises Unavailable (many open it at once; retry)."""
        for _ in range(OPEN_TRIES_MAX):
            before = self.shard.attributes.get(self._instance)
            if self._moved(before, (before or 0) + 1):
                return
        raise Unavailable(f"writer {self._name!r} of shard {self.shard.name!r} is being opened by many at once; retry")

    def follow(self, instance: int) -> None:
        """Be that instance here as well. Raises AttributeMismatch (a later one was here already)."""
        for _ in range(OPEN_TRIES_MAX):
            before = self.shard.attributes.get(self._instance)
            if before is not None and before > instance:
                raise self._fenced(before)
            if before == instance or self._moved(before, instance):
                self.instance = instance
                return
        raise Unavailable(f"writer {self._name!r} of shard {self.shard.name!r} is being opened by many at once; retry")

    def check(self) -> None:
        """Raises AttributeMismatch (another instance was opened)."""
        found = self.shard.attributes.get(self._instance)
        if found != self.instance:
            raise self._fenced(found)

    def last(self) -> int:
        """The number of the last append that landed; 0 before the first."""
        return self.shard.attributes.get(self._number) or 0

    def conditions(self, number: int) -> tuple[AttributeUpdate, ...]:
        """What an append of this number takes with it."""
        return (
            AttributeUpdate.replace_if_equals(self._instance, self.instance, self.instance),
            AttributeUpdate.replace_if_greater(self._number, number),
        )

    def landed(self, error: AttributeMismatch, number: int) -> bool:
        """Whether the append was refused because it is there already. Raises AttributeMismatch: of another instance."""
        actual = error.details.get("actual", {})
        if self._instance in actual:
            raise self._fenced(actual[self._instance]) from error
        found = actual.get(self._number)
        return found is not None and found >= number

    def _moved(self, before: int | None, after: int) -> bool:
        """Make the instance `after`, if it is `before`."""
        try:
            self.shard.attributes.update(AttributeUpdate.replace_if_equals(self._instance, after, before))
        except AttributeMismatch:
            return False
        except Indeterminate as error:  # what comes late is fenced by the next number, as another instance is
            if error.details.get("refused") != AttributeMismatch.kind:
                raise
            return False
        self.instance = after
        return True

    def _fenced(self, found: int | None) -> AttributeMismatch:
        return AttributeMismatch(
            f"writer {self._name!r} of shard {self.shard.name!r} was opened elsewhere, which ends this instance; open "
            "it anew to go on",
            actual={self._instance: found},
        )


# What a shard keeps of the rows of a numbered append, so that other rows are not taken for them after a restart.


DIFF = "__diff"


@dataclass(frozen=True)
class Fingerprint:
    """Of all rows of an append, as numbers that fit int64: their keys, their columns, and they themselves."""

    keys: int
    columns: int
    rows: int

    @classmethod
    def of(cls, rows: pa.Table, schema: ShardSchema) -> Self:
        """Of rows with the columns of a schema and `__diff`. Columns go by their numbers, whatever they are called."""
        names = [name for name in rows.schema.names if name != DIFF]
        keyed = rows.select([*schema.key, DIFF]).rename_columns([*map(str, range(len(schema.key))), DIFF])
        whole = rows.select([*names, DIFF]).rename_columns([*(str(schema.id_of[name]) for name in names), DIFF])
        columns = sorted((schema.id_of[name], str(schema.arrow.field(name).type)) for name in names)
        said = hashlib.blake2b(json.dumps(columns).encode(), digest_size=8).digest()
        return cls(_signed(digest_of_rows(keyed)), _signed(int.from_bytes(said)), _signed(digest_of_rows(whole)))

    def can_be(self, other: Self) -> bool:
        """Whether the rows may be the same. Where the columns were changed since, only the keys can be compared."""
        return self.keys == other.keys and (self.columns != other.columns or self.rows == other.rows)


class KeptFingerprint:
    """The fingerprint of a writer's last append to one shard, which changes with its rows. Arguments: as `Numbered`."""

    def __init__(self, numbered: Numbered, name: str, stage: str) -> None:
        self._shard = numbered.shard
        self._keys = [named_key(f"numbered writer's {what} {name}\0{stage}") for what in ("keys", "columns", "rows")]

    def updates(self, found: Fingerprint) -> tuple[AttributeUpdate, ...]:
        """What an append takes with it."""
        values = (found.keys, found.columns, found.rows)
        return tuple(AttributeUpdate.replace(key, value) for key, value in zip(self._keys, values, strict=True))

    def last(self) -> Fingerprint | None:
        """Of the last append that landed. Raises what every call may."""
        keys, columns, rows = (self._shard.attributes.get(key) for key in self._keys)
        return None if keys is None or columns is None or rows is None else Fingerprint(keys, columns, rows)


def _signed(number: int) -> int:
    return number - MODULUS if number >= MODULUS // 2 else number


# Rows as callers give them, as one table: for those who may have to send them again.


TIME = "__time"


def one_table(updates: Updates, shard: Shard, who: str) -> Pinned:
    """The rows with the columns of the shard, as the handle knows them, and `__diff`, without times.

    Where they do not fit, and the shard has other columns by now, the handle learns of them. Raises InvalidUsage (an
    iterator, rows with `__time`, rows that do not fit, a name that means another column by now).
    """
    rows, (number, known) = held(updates), known_by(shard)
    try:
        return Pinned(table_by(known, rows, who), number, known)
    except InvalidUsage:
        found = learnt(shard, number, known)
        if found is None:
            raise
        return Pinned(table_by(found[1], rows, who), *found)


def held(updates: Updates) -> Updates:
    """Rows that can be looked at twice: a stream of Arrow is read into memory, which can be done once."""
    is_arrow = hasattr(updates, "__arrow_c_stream__") or hasattr(updates, "__arrow_c_array__")
    return reusable(updates) if is_arrow else gathered(updates)


def table_by(schema: ShardSchema, updates: Updates, who: str) -> pa.Table:
    """The rows with the columns of a schema and `__diff`, without times. Raises as `one_table`."""
    found: Any = as_updates(updates, schema)
    if not isinstance(found, (pa.Table, pa.RecordBatch)):
        raise InvalidUsage(f"{who} takes the rows of a write as one table, not as an iterator")
    if TIME in found.schema.names:
        raise InvalidUsage(f"{who} takes no {TIME}: the time is chosen for it")
    return schema.conform(found, 0).drop_columns([TIME])


# How far a shard has been fed: the time before which it has all that its feed says. A feed is bindings, or a log.
#
# The shard keeps the position as an attribute, which moves in the commit that writes the rows. The upper of the shard
# says less: inserts, erasures and recoveries take times of the shard too. The rows that the feed has at times that were
# taken are written at the first time that is free.


POSITION = named_key("fed before the time")
REACHED = named_key("fed up to the upper")  # where that is beyond the position: times before it are the feed's too
TRIES_MAX = 100  # of an append; each failed one means that a rival was quicker, or that somebody took a time

Intervals = tuple[tuple[int, int], ...]  # half-open, ascending


class FeedPosition:
    """The position of the feed of one shard, as this process knows it. Not thread-safe.

    The shard has what the feed says of every time before `before`. `upper` is the first time of the shard that is free.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._stored: int | None = None
        self._accepted = 0
        self.before = 0
        self.upper = 0

    def load(self) -> None:
        """Learn the position from the shard. Raises Conflict (it is closed, or others have written to it)."""
        view = self._shard.view(with_service_times=True)  # first: so the position is not older than the upper
        known = self._shard.attributes.get_many([POSITION, REACHED])
        self._stored = known[POSITION]
        self.upper = self._open(view.upper.element)
        taken = tuple((start, min(end, self.upper)) for start, end in view.service_times if start < self.upper)
        self.before = self._stored or 0
        others = tuple(_gaps(taken, max(self.before, known[REACHED] or 0), self.upper))
        is_old = self._stored is None and not taken  # without a position nothing tells who wrote, nor that any is lost
        if others and others[-1][1] > self._accepted and not is_old:
            raise Conflict(
                f"times {_shown(others)} of shard {self._shard.name!r} were written by others than its feed, or by an "
                "older version of it; stop who writes there, then call rebind() to go on"
            )
        if self._stored is None and others:  # it was fed before there were positions, or begins at a time
            self.before = self.upper

    def accept(self) -> None:
        """Let what others have written up to now be. Raises Conflict (the shard is closed)."""
        self._accepted = self._open(self._shard.upper().element)

    def refresh(self) -> None:
        """Learn whether a rival has gone on; costs one request where none has. Raises as `load`."""
        if self._shard.attributes.get(POSITION) != self._stored:
            self.load()

    def append(self, writer: WriteHandle, end: int | None, rows: Callable[[], Updates | None]) -> None:
        """Let the shard have what the feed says of the times before `end`; None: of all, and close the shard.

        Args:
            writer: a writer of the shard.
            end: beyond it nothing is written.
            rows: gives what is there from the time `before` on, as `placed` changes it; None: nothing. It is asked
                again after a rival was quicker, or somebody took a time.
        Raises: Unavailable (that happened each of many times; retry), Conflict as `load`, and what the writer raises.
        """
        for _ in range(TRIES_MAX):
            if end is not None and self.before >= end:
                return
            found = rows()
            if found is None and end is not None and end <= self.upper:  # nothing to write at times that were taken
                self.before = end
                return
            upper = None if end is None else max(end, self.upper + (found is not None))
            moved = [AttributeUpdate.replace_if_equals(POSITION, TIME_MAX if end is None else end, self._stored)]
            if upper is not None and upper != end:
                moved.append(AttributeUpdate.replace(REACHED, upper))
            info = {"feed_times": [self.before, self.upper]} if self.before < self.upper else None
            try:
                writer.append(() if found is None else found, self.upper, upper, attributes=moved, info=info)
            except (UpperMismatch, AttributeMismatch):
                self.load()
                continue
            self.before = self._stored = TIME_MAX if end is None else end
            self.upper = self.upper if upper is None else upper
            return
        raise Unavailable(f"the times of shard {self._shard.name!r} are taken by others all the time; retry")

    def placed(self, rows: pa.Table) -> pa.Table:
        """Updates with their times in the feed, as the shard takes them: at times that are free, and what is new."""
        rows = rows.filter(pc.greater_equal(rows.column(TIME), self.before))
        times = pc.max_element_wise(rows.column(TIME), pa.scalar(self.upper, pa.int64()))
        return rows.set_column(rows.schema.get_field_index(TIME), TIME, times)

    def _open(self, upper: int | None) -> int:
        if upper is None:
            raise Conflict(f"shard {self._shard.name!r} is closed: nothing can be written any more")
        return upper


def _gaps(taken: Intervals, lower: int, upper: int) -> Iterator[tuple[int, int]]:
    """What `taken` leaves of `[lower, upper)`."""
    for start, end in taken:
        if lower < min(start, upper):
            yield lower, min(start, upper)
        lower = max(lower, end)
    if lower < upper:
        yield lower, upper


def _shown(found: Intervals) -> str:
    return ", ".join(f"[{start}, {end})" for start, end in found[:10]) + (", …" if len(found) > 10 else "")
