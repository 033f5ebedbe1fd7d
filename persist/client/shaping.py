"""What a shard handle has for changing the columns of its shard."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import pyarrow as pa

from persist.client.past import HandleSettings
from persist.client.transport import OneShard
from persist.client.widening import Evolving
from persist.core.errors import SchemaMismatch
from persist.parts import ShardSchema
from persist.parts.altering import (
    AddColumn,
    Change,
    DropColumn,
    MoveColumn,
    RelaxColumn,
    RenameColumn,
    WidenColumn,
    altered,
)
from persist.parts.evolution import by_names

ALTER_TRIES = 16  # while others change the columns meanwhile


class Shaping:
    """The base of shard handles that change columns. Every verb gives the schema as of then."""

    name: str
    _transport: OneShard
    _settings: HandleSettings

    def evolve_schema(self, schema: ShardSchema | pa.Schema) -> ShardSchema:
        """Add columns to the shard, all columns given by their names. Repeating it is safe.

        Args:
            schema: all columns: those that there are, unchanged and in their order, and new ones that may be null.
        Returns: the schema afterwards.
        Raises: InvalidUsage (the shard cannot evolve so), SchemaMismatch (somebody else evolved it: refresh, retry).
        """
        newest, known = self._newest_schema()
        new = by_names(known, schema if isinstance(schema, ShardSchema) else ShardSchema(schema, known.key))
        return self._evolve(newest, known, new)

    def alter(self, *changes: Change) -> ShardSchema:
        """Change columns, all in one commit or not at all. `persist.parts.altering` has the changes.

        Readers see old rows by the new columns at once; no row is rewritten. Writers that know the columns as they were
        go on: their rows are read by the new ones too. Where others change columns meanwhile, the changes are made on
        top of theirs, unless a name that this handle knows means another column by now.

        Args:
            changes: made one after the other.
        Returns: the schema afterwards, which this handle uses from here on.
        Raises: InvalidUsage (a change cannot be made, or a name that this handle knows means another column by now:
            nothing was changed), SchemaMismatch (others changed columns all the time).
        """
        for left in range(ALTER_TRIES, 0, -1):
            newest, found = self._changing()
            new = altered(found[1], changes)
            if new == found[1]:
                return self._changed(newest, found)
            try:
                return self._evolve(newest, found[1], new)
            except SchemaMismatch:
                if left == 1:
                    raise
        raise AssertionError("unreachable")

    def add_column(
        self, name: str, kind: pa.DataType, *, nullable: bool = True, default: Any = None, after: str | None = None
    ) -> ShardSchema:
        """Add a value column. Rows that are there have its default, or null; so have rows that are written without it.

        Args:
            name: of the column.
            kind: the type of its values.
            nullable: whether it may hold nulls. Where it may not, it needs a default.
            default: a value, which is fixed from here on.
            after: the column that it stands after (None: it is the last one).
        Returns: the schema afterwards.
        Raises: InvalidUsage (there is such a column, or it cannot be kept, or the default does not fit).
        """
        return self.alter(AddColumn(name, kind, nullable, default, after))

    def rename_column(self, name: str, to: str) -> ShardSchema:
        """Call a column, also one of the key, by another name.

        Args:
            name: of the column.
            to: its name from here on.
        Returns: the schema afterwards.
        Raises: InvalidUsage (there is no column `name`, or there is one called `to`).
        """
        return self.alter(RenameColumn(name, to))

    def drop_column(self, name: str) -> ShardSchema:
        """Drop a value column with all its values: no read at any time shows them again.

        Rows that differed in nothing else are one row then, as often as they were together. Compaction takes the bytes
        away.

        Args:
            name: of the column.
        Returns: the schema afterwards.
        Raises: InvalidUsage (there is no such column, or it is one of the key).
        """
        return self.alter(DropColumn(name))

    def move_column(self, name: str, *, after: str | None = None) -> ShardSchema:
        """Show a column in another place. Nothing else changes.

        Args:
            name: of the column.
            after: the column that it stands after (None: it is the first one).
        Returns: the schema afterwards.
        Raises: InvalidUsage (there is no such column).
        """
        return self.alter(MoveColumn(name, after))

    def widen_column(self, name: str, kind: pa.DataType) -> ShardSchema:
        """Give a column a type that holds every value that it could hold before.

        Args:
            name: of the column.
            kind: a wider whole number, float or decimal; timestamp("ms") or ("us") of date32, which is midnight; a
                struct with more fields that may be null, at any depth.
        Returns: the schema afterwards.
        Raises: InvalidUsage (the type does not hold every value, or keys would be encoded in another way; of
            microseconds: the column has or had a day for which they have no room), UpperMismatch (others write all the
            time while its days are looked at).
        """
        return self.alter(WidenColumn(name, kind))

    def allow_nulls(self, name: str) -> ShardSchema:
        """Let a column hold nulls from here on.

        Args:
            name: of the column.
        Returns: the schema afterwards.
        Raises: InvalidUsage (there is no such column).
        """
        return self.alter(RelaxColumn(name))

    # --- what a handle gives

    @abstractmethod
    def _changing(self) -> tuple[int, tuple[int, ShardSchema]]:
        """The id of the newest schema as of now, and the current one. Raises InvalidUsage."""

    @abstractmethod
    def _changed(self, newest_id: int, found: tuple[int, ShardSchema]) -> ShardSchema:
        """The schema that came of a change by this handle, which it uses from here on."""

    @abstractmethod
    def _newest_schema(self) -> tuple[int, ShardSchema]:
        """The id of the newest schema, and the one in use, as the handle knows them."""

    def _evolve(self, newest: int, known: ShardSchema, new: ShardSchema) -> ShardSchema:
        read, retry_s = self._settings.read, self._settings.write.retry_s
        number = Evolving(self._transport, self.name, newest, read, retry_s).run(known, new)
        return self._changed(number, (number, new))
