"""A writer of a server, for clients that post rows: few rows become a command without a call of a store.

Such clients name columns without knowing a schema: the names refer to the schema at the time of the commit. So the
server reads the rows by a schema first, and the commit refuses them with SchemaMismatch if the shard has another one by
then; the server then reads the posted bytes anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from persist.client.embedded import EmbeddedTransport
from persist.client.idempotency import send
from persist.client.transport import OneShard
from persist.client.unique_insert import CheckedWriter
from persist.client.write import Updates, WriteSettings, by_token
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.batch import Run
from persist.core.errors import PersistError
from persist.core.frontier import Antichain
from persist.core.ids import ShardId, Token, WriterId, mint
from persist.core.record import replace
from persist.parts import ShardSchema, stage_inline, stage_inserts

Append: TypeAlias = c.Insert | c.CompareAndAppend | c.Append
Making: TypeAlias = Callable[[WriterId, Token, tuple[Run, ...]], Append]


class Names(NamedTuple):
    """The columns that names refer to in one incarnation of a shard: a schema, its id, and the newest id.

    The newest one is another schema if an older version registered a schema that cannot be read.
    """

    shard: ShardId
    id: int
    schema: ShardSchema
    newest: int


class OneShardByNames(OneShard):
    """A transport for one shard, for rows whose names refer to the columns at the time of the commit."""

    def __init__(self, inner: EmbeddedTransport, shard: ShardId) -> None:
        super().__init__(inner, shard)
        self._embedded = inner

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        if not isinstance(command, c.WriterCommand):
            return super().apply(name, command, caller)
        return self._embedded.apply(name, replace(command, shard=self.shard), caller, by_names=True)


class ThinWriter(CheckedWriter):
    """As a write handle; in addition its caller may send the command for few rows itself.

    `names` are those by which the rows of its next write were read.
    """

    def __init__(self, inner: EmbeddedTransport, name: str, names: Names, settings: WriteSettings) -> None:
        super().__init__(OneShardByNames(inner, names.shard), name, lambda: self.schema_of(()), settings)
        self.names = names

    def schema_of(self, updates: Updates) -> tuple[int, ShardSchema]:
        """The schema by which the rows were read, whatever schema the shard has by now."""
        return self.names.id, self.names.schema

    def write(self, rows: pa.Table, default_time: int | None, command: Making, token: Token | None) -> c.Appended:
        """Commit the `command` for rows, those without a time at `default_time`. Raises what `insert` does.

        Raises SchemaMismatch if the shard has other columns than the `names`.
        """
        sample = command(self.writer_id, mint(Token, self._transport.ids), ())

        def append(rows: pa.Table, unique: bool) -> c.Appended:
            if unique and isinstance(sample, c.Insert):
                return self._inserted(rows, sample.attributes, token, b"", unique=True)
            cut = self._look_up(rows, *_interval(sample)) if unique else 0
            runs = self._parts(rows, default_time, self._inline_bytes_max, digests=token is not None)
            return self._appended(lambda w, t: _with_cut(command(w, t, runs), cut), token)

        return self._by_schema(rows, append, token)

    def _can_convert(self, updates: Updates) -> bool:
        """No: the server reads the posted bytes anew."""
        return False

    def _later(self, updates: Updates) -> Updates | None:
        """None: the server reads the posted bytes anew."""
        return None

    def at_once(self, rows: pa.Table, default_time: int | None, command: Making, token: Token | None) -> Append | None:
        """The `command` for few rows, to be sent by the caller; no call of a store is made.

        The caller must have exclusive use of this handle meanwhile. None: a call is needed, since the rows are many,
        have an unknown column, or the shard has unique keys. Raises InvalidUsage (the rows do not fit).
        """
        _, schema_id, schema, _ = self.names
        if not set(rows.schema.names).issubset(schema.updates_schema.names) or schema.details.unique:
            return None
        sink = self._sink(schema_id, schema, digests=token is not None)
        runs = stage_inline(rows, sink, default_time=default_time, inline_bytes_max=self._inline_bytes_max)
        return None if runs is None else self.build_command(runs, command, token)

    def build_command(self, runs: tuple[Run, ...], command: Making, token: Token | None = None) -> Append:
        """The `command` for staged rows, to be sent by the caller."""
        if token is None:
            built = self._by_writer(lambda w, t: command(w, t, runs), mint(Token, self._transport.ids))
        else:
            built = by_token(lambda w, t: command(w, t, runs), token)
        return replace(built, shard=self.names.shard)

    def staged_each(self, rows: pa.Table, counts: Sequence[int]) -> list[tuple[Run, ...] | None]:
        """The rows of inserts of so many rows each, staged for any writer of the shard; no call of a store is made.

        None: an insert that has to be staged separately. Raises InvalidUsage (the rows of one of them do not fit).
        """
        _, schema_id, schema, _ = self.names
        return stage_inserts(rows, counts, self._sink(schema_id, schema, digests=False), self._inline_bytes_max)

    def resumed(self, command: c.Command, caller: Caller, before: PersistError) -> c.Result:
        """Retry a command whose first try failed with `before`. Raises what `settled` raises."""
        return send(self._transport, self._name, command, self._settings.retry_s, caller, before)


def _interval(append: Append) -> tuple[Antichain, Antichain]:
    """The uppers at which it may land, both inclusive, as `WriteHandle` looks keys up for it."""
    assert not isinstance(append, c.Insert)
    return (append.lower, append.upper) if isinstance(append, c.Append) else (append.expected_upper,) * 2


def _with_cut(append: Append, cut: int) -> Append:
    return append if isinstance(append, c.Insert) else replace(append, cut=cut)
