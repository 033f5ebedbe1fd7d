"""Shards whose rows are persist's own, such as bindings and routes: what their columns are, whatever they are called.

Their columns can be changed like those of any shard. Rows are written by the schema with which the shard was made, so
they are read right by every later one. Who reads them by names is told where a name is another column's by now.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from persist.client.columns import ShardSchema, current_schema, first_schema
from persist.client.connect import Client
from persist.client.pinned import Pinned
from persist.client.shard import Shard
from persist.core.errors import InvalidUsage, ShardExists


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
