"""A writer of a server, for clients that post rows: a few rows become a command without a call of a store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pyarrow as pa

from persist.client.inserting import CheckedWriter
from persist.client.retry import send
from persist.client.write import by_token
from persist.core import commands as c
from persist.core.batch import Run
from persist.core.errors import PersistError
from persist.core.ids import Token, WriterId, mint
from persist.core.record import replace
from persist.core.recorded import Caller
from persist.parts import ShardSchema, stage_at_once

Append: TypeAlias = c.Insert | c.CompareAndAppend | c.Append
Making: TypeAlias = Callable[[WriterId, Token, tuple[Run, ...]], Append]


class ThinWriter(CheckedWriter):
    """As a write handle; and its caller may send what it makes of a few rows by itself."""

    def write(self, rows: pa.Table, default_time: int | None, command: Making, token: Token | None) -> c.Appended:
        """Commit what `command` makes of rows, those without a time at `default_time`. Raises what `insert` does."""
        return self._by_schema(rows, lambda _, schema: self._written(rows, default_time, command, token, schema))

    def _written(
        self, rows: pa.Table, default_time: int | None, command: Making, token: Token | None, schema: ShardSchema
    ) -> c.Appended:
        if schema.details.unique:
            made = command(self.writer_id, mint(Token, self._transport.ids), ())
            if isinstance(made, c.Insert):
                return self._inserted(rows, made.attributes, token, b"")
            lower, until = (
                (made.lower, made.upper) if isinstance(made, c.Append) else (made.expected_upper, made.expected_upper)
            )
            self._look_up(rows, lower, until)
        runs = self._parts(rows, default_time, self._inline_bytes_max, digests=token is not None)
        return self._appended(lambda w, t: command(w, t, runs), token)

    def at_once(self, rows: pa.Table, default_time: int | None, command: Making, token: Token | None) -> Append | None:
        """What `command` makes of a few rows, for a caller who sends it; no call of a store is made.

        For who is the only one to use this handle meanwhile. None: a call is needed, as the rows are many, or have a
        column that is not known yet, or keys that are unique, or the writer has to be registered. Raises InvalidUsage
        (the rows do not fit).
        """
        schema_id, schema = self._newest()
        if (token is None and not self._registered) or not set(rows.schema.names).issubset(schema.updates_schema.names):
            return None
        if schema.details.unique:
            return None
        sink = self._sink(schema_id, schema, digests=token is not None)
        runs = stage_at_once(rows, sink, default_time=default_time, inline_bytes_max=self._inline_bytes_max)
        if runs is None:
            return None
        if token is None:
            made = command(self.writer_id, mint(Token, self._transport.ids), runs)
        else:
            made = by_token(lambda w, t: command(w, t, runs), token)
        return replace(made, shard=self._transport.shard)

    def resumed(self, command: c.Command, caller: Caller, before: PersistError) -> c.Result:
        """Go on with a command that was sent once and met with `before`. Raises what `settled` raises."""
        return send(self._transport, self._name, command, self._settings.retry_s, caller, before)
