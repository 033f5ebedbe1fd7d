"""Rows that name columns as one schema of a shard does, whatever the handle that writes them learns meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from persist.core.errors import InvalidUsage
from persist.parts.evolution import called_by, newest
from persist.parts.schema import ShardSchema


@dataclass(frozen=True)
class Pinned:
    """Rows in a form that a writer takes, and the schema, with its id, by which they name columns.

    A handle that threads share may learn of a later schema between two looks at it. Such rows are read by this one.
    """

    rows: Any
    schema_id: int
    schema: ShardSchema

    def by(self, schemas: Mapping[int, ShardSchema]) -> Pinned:
        """The same rows by the last of these schemas of the shard. What was dropped since is left out.

        Raises InvalidUsage where they are no table.
        """
        if not isinstance(self.rows, (pa.Table, pa.RecordBatch)):
            raise InvalidUsage("rows are read by later columns where they come as a table")
        number, current = newest(schemas)
        known = schemas.get(self.schema_id, self.schema)
        called = called_by(known, current)
        kept = [name for name in self.rows.schema.names if called.get(name, name) is not None]
        rows = self.rows.select(kept).rename_columns([called.get(name) or name for name in kept])
        return Pinned(rows, number, current)
