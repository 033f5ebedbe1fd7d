"""A change of columns by which days become moments in microseconds, which far days do not: these are looked for first.

What the shard holds is looked at, at all times, and what nobody can read any more too: merges still do. The change
lands only if nobody has written since. It also ends what was staged by the columns of before, as stricter constraints
do: rows that are staged anew are looked at as they are cast.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from persist.client.looked_first import RACES_MAX, LookedFirst
from persist.client.rewriting import check_readable
from persist.client.snapshot import holding, leased_blobs, part_reader
from persist.core import commands as c
from persist.core.antichain import MINIMUM, Antichain
from persist.core.errors import InvalidUsage
from persist.core.view import ShardView, ViewRequest
from persist.parts import ShardSchema
from persist.parts.evolution import of_days


@dataclass(frozen=True)
class Evolving(LookedFirst):
    """One change of the columns of one shard, whose newest schema has the id `expected_id`."""

    def run(self, before: ShardSchema, after: ShardSchema) -> int:
        """The id of the schema that comes of it.

        Raises InvalidUsage (a day has no room), SchemaMismatch, UpperMismatch (others write all the time), and what
        reading may. Nothing was changed then.
        """
        columns = of_days(before, after)
        if not columns:
            return self._send(after, None)
        view = self.transport.view(self.name, ViewRequest(with_batches=False))
        if view.upper == MINIMUM and (number := self._landed(after, view.upper)) is not None:
            return number  # nothing was there
        check_readable(self.name, view)
        with holding(self.transport, self.name, None, "widen columns", 0.0, self.read) as held:
            try:
                seen: frozenset[str] = frozenset()
                for _ in range(RACES_MAX):
                    view = self.transport.view(self.name, ViewRequest())
                    with leased_blobs(held.lease):
                        seen = self._look(view, columns, after, seen)
                    if (number := self._landed(after, view.upper)) is not None:
                        return number
                    held.lease.keep()
            finally:
                held.lease.close()
        raise self._lost("widen its columns", view.upper)

    def _look(
        self, view: ShardView, columns: dict[str, str], after: ShardSchema, seen: frozenset[str]
    ) -> frozenset[str]:
        """Look at the parts that were not `seen`, by their ids; those that are seen then. Raises InvalidUsage."""
        _, reader = part_reader(self.transport, view, self.read)
        parts = [part for run in reader.expanded(run for b in view.batches for run in b.runs) for part in run.parts]
        for part in parts:
            if part.id in seen:
                continue
            for name, widened in columns.items():
                kind = after.arrow.field(widened).type
                for values in reader.as_written(part, name):
                    _check_room(values, name, kind, self.name)
        return frozenset(part.id for part in parts)

    def _command(self, after: ShardSchema, upper: Antichain | None) -> c.Command:
        return c.EvolveSchema(self.expected_id, after.to_record(), upper)


def _check_room(days: pa.ChunkedArray, column: str, kind: pa.DataType, shard: str) -> None:
    try:
        days.cast(kind)
    except pa.ArrowInvalid as error:
        raise InvalidUsage(
            f"column {column!r} of shard {shard!r} has, or had, a day for which {kind} has no room ({error}); nothing "
            "was changed: widen it to timestamp[ms]"
        ) from error
