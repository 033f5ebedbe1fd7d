"""Shards with persist's own columns, and stepwise progress over their events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import pyarrow as pa

from persist.client.arguments import checked_wait
from persist.client.connect import Client
from persist.client.listen import Listen
from persist.client.schema_lineage import ShardSchema, current_schema, first_schema
from persist.client.shard import Shard
from persist.client.write import Pinned, WriteHandle
from persist.core.errors import Expired, InvalidUsage, ShardExists
from persist.core.frontier import Antichain
from persist.patterns.sequenced_append import FeedPosition

# Shards whose rows are persist's own, such as bindings and routes: what their columns are, whatever they are called.
#
# Their columns can be changed like those of any shard. Rows are written by the schema with which the shard was made, so
# they are read right by every later one. Who reads them by names is told where a name is another column's by now.


class OwnColumns:
    """The columns with which a shard of `what`, such as "bindings", was made. Thread-safe."""

    def __init__(self, shard: Shard, what: str) -> None:
        """Raises what every call may."""
        self.shard = shard
        self._what = what
        self.first, self._made = first_schema(shard)

    @classmethod
    def open(cls, client: Client, name: str, what: str, schema: pa.Schema, key: tuple[str, ...]) -> OwnColumns:
        """The shard of that name, which is made with these columns, and keeps history for ever, if it is not there.

        Raises ShardExists where it was made with other columns; and as `check`.
        """
        try:
            found = cls(client.create_shard(name, schema, list(key), history="forever"), what)
        except ShardExists:  # or its columns were changed since
            found = cls(client.shard(name), what)
            wanted = ShardSchema(schema, key)
            if (found._made.arrow, found._made.key) != (wanted.arrow, wanted.key):
                raise
        found.check(found.shard.schema)
        return found

    def rows(self, table: pa.Table) -> Pinned:
        """Rows that name the columns as they were called at first, for a writer."""
        return Pinned(table, self.first, self._made)

    def check(self, schema: ShardSchema | None) -> None:
        """Raise InvalidUsage where one of the columns is not called so by a schema of the shard (None: not known)."""
        if schema is None or schema.is_plain:  # the columns of plain ones are added, and never renamed
            return
        if self._made.is_plain:  # its numbers follow from what came after it
            self.first, self._made = first_schema(self.shard)
        for name, number in self._made.id_of.items():
            now = schema.name_of.get(number)
            if now == name:
                continue
            became = "was dropped, which ends it: make another one" if now is None else f"is called {now!r}"
            remedy = "" if now is None else f"; let the columns have their first names again (Shard.alter): {name!r}"
            raise InvalidUsage(f"column {name!r} of shard {self.shard.name!r} of {self._what} {became}{remedy}")

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tell what was refused because of a name as `check` does, which says what to do."""
        try:
            yield
        except InvalidUsage:
            self.check(current_schema(self.shard.view().schemas)[1])
            raise


# What a listener gives, time by time: a commit that comes in pieces is put together.


def whole_events(listen: Listen, wait_s: float) -> Iterator[tuple[pa.Table, Antichain]]:
    """The updates before each frontier that is reached, and that frontier; waits at most so long for the first.

    The pieces of a large commit are held until the last one came, since what is appended is a whole interval of times.
    Raises what `Listen.next_events` does.
    """
    held: list[pa.Table] = []
    for event in listen.next_events(wait_s):
        held.append(event.updates)
        if event.lower != event.upper:
            yield pa.concat_tables(held), event.upper
            held = []


# Going on step by step after a listen, which is begun anew after whatever goes wrong.


class Stepping(ABC):
    """Follows a listen and writes what follows from it. `_listen` is None where it has to begin anew."""

    _writer: WriteHandle
    _fed: FeedPosition
    _listen: Listen | None = None

    def step(self, wait_s: float = 0.0) -> bool:
        """Write what is new; wait at most `wait_s` seconds for it. Whether anything was.

        Repeating it is safe, after any error. Raises: InvalidUsage (`wait_s` is no number), what the class says, and
        what every call may.
        """
        checked_wait("wait_s", wait_s)
        try:
            return self._step(wait_s)
        except Expired:  # it was not asked for so long that its lease has lapsed
            self._end()
            return self._step(wait_s)
        except BaseException:  # it begins anew from what the shards tell
            self._end()
            raise

    @property
    def upper(self) -> int:
        """Up to which time of its feed the shard has all, as far as this object knows. No I/O."""
        return self._fed.before

    def rebind(self) -> None:
        """Go on where others have written to the shard, which `step` refuses (Conflict).

        What the feed has at the times that they took is written at the first time that is free. Their rows stay. Of a
        shard that was fed by an older version, what that has left out at times that were taken stays left out.
        Raises: Conflict (the shard is closed), and what every call may.
        """
        self._end()
        self._fed.accept()

    def close(self) -> None:
        """Give back what it holds. Raises what every call may."""
        self._end()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @abstractmethod
    def _step(self, wait_s: float) -> bool:
        """A step; `_listen` is there afterwards."""

    def _end(self) -> None:
        if self._listen is not None:
            self._listen.close()
            self._listen = None
