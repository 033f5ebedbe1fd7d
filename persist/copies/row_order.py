"""Whether the rows of a part lie in the order and within the bounds that every reader relies on.

`persist.parts.check` compares a part with its bytes before a commit believes it; what only a build of ours can get
wrong is not looked at there. Memory: a row group.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from persist.core.batch import Part
from persist.core.errors import Corruption
from persist.parts import ShardSchema
from persist.parts.consolidate import sort_groups
from persist.parts.files import BlobReads, Files
from persist.parts.keycodec import SortedKeys


class RowOrder:
    """Looks at parts of these schemas. Not thread-safe: one per thread."""

    def __init__(self, blob: BlobReads, schemas: Mapping[int, ShardSchema]) -> None:
        self._files = Files(blob, schemas)
        self.schemas = schemas

    def check(self, part: Part) -> None:
        """Raises Corruption: rows are not in order, come twice, or lie outside bounds; and what reading does."""
        if part.key is None:
            return  # unsorted, and its bounds are compared with its rows
        schema = self.schemas[part.schema_id]
        file, last = self._files.open(part), None
        for number, group in enumerate(file.groups):
            rows = file.read([number], schema.updates_schema.names)
            if not rows.num_rows:
                continue
            _check_bounds(rows, schema, part, group.key_lower, group.key_upper)
            joined = rows if last is None else pa.concat_tables([last, rows])
            order, firsts = sort_groups(joined, schema)
            if order is not None:
                raise Corruption(f"the rows of part {part.id} are not in order, in row group {number}")
            if not firsts.all():
                raise Corruption(f"part {part.id} has an update twice, in row group {number}")
            last = rows.slice(rows.num_rows - 1)


def _check_bounds(rows: pa.Table, schema: ShardSchema, part: Part, lower: bytes, upper: bytes | None) -> None:
    """The rows are in order, or are found not to be: so the first and the last one tell."""
    keys = SortedKeys(rows, schema.key)
    ends = keys[0], keys[len(keys) - 1]
    if min(ends) < lower or (upper is not None and max(ends) > upper):
        raise Corruption(f"part {part.id} has keys outside the bounds that it tells of them")
