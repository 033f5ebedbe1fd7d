"""A write that comes again by its token after the columns were changed: it is known by the columns of then.

What is recorded with a token is a digest of its rows, with the names and types that columns had. So the same rows are
read by each schema that the shard has had, and the shard is asked whether the token came with these. Asking writes
nothing: it is by an edit that never lands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

from persist.client.digests import digest_of
from persist.client.editing import NEVER
from persist.core import commands as c
from persist.core.antichain import MINIMUM
from persist.core.errors import Indeterminate, InvalidUsage, TokenReused, UpperMismatch
from persist.core.ids import Token, writer_of
from persist.core.record import replace
from persist.parts import ShardSchema
from persist.parts.digest import digest_of_rows
from persist.parts.evolution import called_by

SCHEMAS_ASKED_MAX = 16  # the newest ones of a shard, by which the rows of one write are read
Append: TypeAlias = c.Insert | c.CompareAndAppend | c.Append
Readings: TypeAlias = Callable[[ShardSchema], Iterable[pa.Table]]


@dataclass(frozen=True)
class Repeating:
    """Who asks: `send` commits a command."""

    send: Callable[[c.Command], c.Result]

    def answer(
        self, made: Append, token: Token, schemas: Mapping[int, ShardSchema], readings: Readings
    ) -> c.Appended | None:
        """What the write was answered the first time; None: it is not known to be the same.

        Args:
            made: the command without its rows.
            schemas: those of the shard, by id.
            readings: the rows in `updates_schema` of one of them, in each way in which they may have been meant. Raises
                InvalidUsage where they do not fit it.
        """
        asked: set[bytes] = set()
        for number in sorted(schemas, reverse=True)[:SCHEMAS_ASKED_MAX]:
            try:
                for rows in readings(schemas[number]):
                    digest = digest_of(made, digest_of_rows(rows))
                    if digest not in asked and (found := self._asked(token, digest)) is not None:
                        return found
                    asked.add(digest)
            except InvalidUsage:  # they were not of these columns
                continue
        return None

    def _asked(self, token: Token, digest: bytes) -> c.Appended | None:
        asking = c.Edit(writer_of(token), token, MINIMUM, NEVER, (), verb="insert")
        try:
            found = self.send(replace(asking, digest=digest))
        except (TokenReused, UpperMismatch):
            return None
        except Indeterminate as error:  # of a try that was not answered, which changes nothing either
            if error.details.get("refused") not in (TokenReused.kind, UpperMismatch.kind):
                raise
            return None
        assert isinstance(found, c.Appended)
        return found


def by_names_of(rows: pa.Table, known: ShardSchema, then: ShardSchema, given: Iterable[str]) -> pa.Table | None:
    """Rows by the names of one schema as another one named the columns; None: they have a column that it lacks.

    Columns that nobody has `given`, or that are null, need not be there.
    """
    called = called_by(known, then)
    names = set(given)
    kept = [name for name in rows.schema.names if called.get(name) is not None]
    for name in rows.schema.names:
        if name not in kept and name in names and rows.column(name).null_count < len(rows):
            return None
    return rows.select(kept).rename_columns([called[name] or name for name in kept])
