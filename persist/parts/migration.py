"""How rows that were written by one schema of a shard are read by a later one.

Columns are told by their ids, so that a new name or another place changes nothing. What rows lack is the default of the
column, or null. Where a later schema lacks a value column, rows of the older one `coarsen`: some that differed are the
same now, and they do not lie in the order of the later schema but by their keys.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import pyarrow as pa

from persist.core.errors import Corruption
from persist.parts.column_types import as_type
from persist.parts.schema import DIFF, TIME, ShardSchema


class Migration:
    """From rows of `old` to rows of `new`, which follows it in the life of one shard."""

    def __init__(self, old: ShardSchema, new: ShardSchema) -> None:
        self.old = old
        self.new = new

    @cached_property
    def sources(self) -> dict[str, str]:
        """The columns of `new` that `old` has, and what these are called there, `__time` and `__diff` with them."""
        if self.old.is_plain or self.new.is_plain:
            found = {name: name for name in self.new.arrow.names if name in self.old.id_of}
        else:
            before = self.old.name_of
            found = {name: before[number] for name, number in self.new.id_of.items() if number in before}
        return {**found, TIME: TIME, DIFF: DIFF}

    @cached_property
    def coarsens(self) -> bool:
        """Whether rows may become the same that were not."""
        return len(self.sources) - 2 < len(self.old.arrow)

    def names(self, columns: Iterable[str]) -> list[str]:
        """What these columns of `new` are called in `old`, those that it has."""
        return [self.sources[name] for name in columns if name in self.sources]

    def column(self, rows: pa.Table, field: pa.Field) -> Any:
        """A column of `new`, of rows of `old` that have at least what `names` says of it."""
        source = self.sources.get(field.name)
        if source is not None:
            try:
                return as_type(rows.column(source), field.type)
            except KeyError as error:
                raise Corruption(f"a part has no column {source!r}, which its schema has") from error
        return self.new.defaulted(field.name, len(rows))

    def rows(self, table: pa.Table) -> pa.Table:
        """Rows of `old` with all its columns, as rows of `new`."""
        target = self.new.updates_schema
        if self._keeps_names and table.schema.equals(target, check_metadata=True):
            return table
        return pa.Table.from_arrays([self.column(table, field) for field in target], schema=target)

    @cached_property
    def is_by_name(self) -> bool:
        """Whether any tool reads the columns of `new` by their names: what is not there is null."""
        if self.coarsens or not all(name == source for name, source in self.sources.items()):
            return False
        absent = [name for name in self.new.arrow.names if name not in self.sources]
        if any(name in self.old.id_of or name in self.new.defaults for name in absent):
            return False
        return all(
            self.old.arrow.field(name).type == self.new.arrow.field(name).type
            for name in self.sources
            if name in self.new.id_of
        )

    @cached_property
    def _keeps_names(self) -> bool:
        """Whether each column of `new` is that of the same name in `old`."""
        is_whole = len(self.sources) == len(self.new.updates_schema)
        return is_whole and all(name == source for name, source in self.sources.items())
