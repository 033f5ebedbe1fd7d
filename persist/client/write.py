"""Write handles: stage rows as parts, then commit them with a token that makes retries safe."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar, cast

import pyarrow as pa
import pyarrow.compute as pc

from persist.attributes.attribute_handle import AttributeUpdates
from persist.client.arguments import check_numbers, checked
from persist.client.commit_info import Info, info_bytes
from persist.client.deadlines import Timeable
from persist.client.idempotency import digest_of, send, send_for, with_id_digests
from persist.client.transport import OneShard
from persist.commit.clocks_and_ids import OwnProcess
from persist.core import commands as c
from persist.core.attribute import AttributeUpdate
from persist.core.attribute import as_updates as as_attribute_updates
from persist.core.audit_log import NOBODY, Caller
from persist.core.batch import Part, Run
from persist.core.errors import Corruption, Expired, InvalidUsage, shown
from persist.core.frontier import Antichain, frontier
from persist.core.ids import Token, WriterId, given_token, mint, parse, writer_of
from persist.core.record import replace
from persist.core.shard_view import ViewRequest
from persist.formats.store_errors import translated
from persist.parts import DIFF, PartSink, ShardSchema, stage
from persist.parts.python_values import column_of
from persist.parts.schema_evolution import current_for_names, newest, renames, valid_schemas


@dataclass(frozen=True)
class PinnedRows:
    """Rows in any form that a writer takes, and the schema, with its id, that their column names refer to.

    A handle that threads share may learn of a later schema between two uses of it. Such rows are read by this one.
    """

    rows: Any
    schema_id: int
    schema: ShardSchema

    def as_of_now(self, transport: OneShard, name: str) -> PinnedRows:
        """The same rows by the current schema of their shard, called `name`, without columns that were dropped since.

        Raises InvalidUsage unless they are a table or a batch, and what every call may.
        """
        if not isinstance(self.rows, (pa.Table, pa.RecordBatch)):
            raise InvalidUsage("only rows in a table can be converted to later columns")
        schemas = valid_schemas(transport.view(name, ViewRequest(with_batches=False)).schemas)
        number, current = newest(schemas)
        known = schemas.get(self.schema_id, self.schema)
        called = renames(known, current)
        kept = [name for name in self.rows.schema.names if called.get(name, name) is not None]
        rows = self.rows.select(kept).rename_columns([called.get(name) or name for name in kept])
        return PinnedRows(rows, number, current)


# A Table, RecordBatch, RecordBatchReader, pandas DataFrame, list of dicts, an iterator of batches, or an Arrow stream.
Updates = Any
_Append = c.Insert | c.CompareAndAppend | c.Append | c.Rewrite
_Write = _Append | c.UpdateAttributes
_T = TypeVar("_T", bound=_Write)
_R = TypeVar("_R")
Time = int | Antichain | None  # None and Antichain(None) mean closed: no more


@dataclass(frozen=True, slots=True)
class WriteSettings:
    """`retry_s` bounds one call; `lease_ms` must be longer, so that a writer is remembered while it retries."""

    lease_ms: int = 3_600_000
    retry_s: float = 120.0
    part_bytes_target: int = 64 * 1024 * 1024

    def __post_init__(self) -> None:
        check_numbers(self)


class WriteMethods(Timeable):
    """The methods of `Shard` and of a writer that append rows."""

    @abstractmethod
    def _writer(self) -> AbstractContextManager[WriteHandle]:
        """A writer that no other thread uses meanwhile."""

    def insert(
        self, updates: Updates, *, token: str | None = None, attributes: AttributeUpdates = (), info: Info | None = None
    ) -> c.Appended:
        """Append rows at the next time, which the service chooses. Inserts never conflict with one another.

        Args:
            updates: an Arrow table or batches, a pandas or Polars frame, a DuckDB relation, any other Arrow stream, or
                dicts in a list or another iterable. A column `__diff` is the multiplicity of each row (default 1; -1
                removes one). A table without rows takes no time.
            token: to repeat a call whose outcome is unknown, give the token of that call, on any handle, client or
                process: if it has landed, it is answered as then, or refused as TokenReused if the columns have changed
                since. It is text of your own (1 to 200 characters) that identifies this write, such as
                `load-2030-01-01`, or one of `Client.new_token`. Outcomes are remembered for at least seven days. None
                is a new token, for this call's own retries.
            attributes: updates of attributes, which are committed together with the rows or not at all.
            info: what `history` shows for this write: a JSON object of at most 4 KiB. After retries it is that of the
                try that landed.
        Returns: the interval `[lower, upper)` that the rows took: their time is `lower`.
        Raises: InvalidUsage (the rows do not fit; nothing was written), AttributeMismatch (a condition does not hold),
            TokenReused (the token stands for another command or other rows; if the columns have changed since, it may
            be for the same rows, which have landed then: look at the history before writing them again),
            OutcomeForgotten (the outcome of the token is no longer known, or it was minted in the future), Unavailable
            or Overloaded (it did not happen), Indeterminate (it may have happened: retry with its token).
        """
        own, changes, info_json = given_token(token), as_attribute_updates(attributes), info_bytes("info", info)
        with self._writer() as writer:
            return writer._by_schema(
                updates, lambda rows, unique: writer._inserted(rows, changes, own, info_json, unique=unique), own
            )

    def compare_and_append(
        self,
        updates: Updates,
        expected_upper: Time,
        new_upper: Time,
        *,
        token: str | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> c.Appended:
        """Append rows if the shard's upper is `expected_upper`, so that writers that read before they write take turns.

        Args:
            updates: as `insert` says. A column `__time` gives each row a time in `[expected_upper, new_upper)`;
                without it all have the time `expected_upper`.
            expected_upper: the upper that the shard must have now; after a snapshot, its `as_of + 1`.
            new_upper: the upper that it has afterwards; None closes it.
            token, attributes, info: as `insert` says.
        Returns: the interval `[expected_upper, new_upper)`.
        Raises: UpperMismatch (another writer was first; `details["actual"]` has the upper), and what `insert` raises.
        """
        interval = frontier(expected_upper), frontier(new_upper)
        with self._writer() as writer:
            return writer._append(c.CompareAndAppend, updates, interval, token, attributes, info)

    def append(
        self,
        updates: Updates,
        lower: Time,
        upper: Time,
        *,
        token: str | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> c.Appended:
        """Append rows, of which the shard may already have the first ones: for replicas that write identical data.

        Args:
            updates: as `compare_and_append` says, with times in `[lower, upper)`.
            lower: the time at which the rows begin. Rows before the shard's upper are dropped: they are there already.
            upper: every time before it is complete afterwards; None closes the shard.
            token: as `insert` says.
            attributes: as `insert` says; with them no row is dropped: the shard's upper must be `lower`.
            info: as `insert` says.
        Returns: the interval `[lower, upper)`.
        Raises: UpperMismatch (the shard's upper is before `lower`), and what `insert` raises.
        """
        with self._writer() as writer:
            return writer._append(c.Append, updates, (frontier(lower), frontier(upper)), token, attributes, info)

    def advance_upper(self, upper: Time, *, force: bool = False) -> c.Appended:
        """Declare every time before `upper` complete, without rows. None closes the shard to writes.

        Returns: the interval that was added; empty if the shard was that far. Repeating it is safe.
        Raises: InvalidUsage (`upper` is no time, beyond 2^62, which no clock reaches, without `force`, or None if the
            shard is closed to reads: only `drop` closes both).
        """
        checked("force", force, bool)
        command = c.AdvanceUpper(frontier(upper), force=force)
        with self._writer() as writer:
            retry_s, caller = writer._settings.retry_s, writer.caller
            return send_for(c.Appended, writer._transport, writer._name, command, retry_s, caller)


class WriteHandle(WriteMethods):
    """One writer of one shard. Its calls without a token are serialised: the shard remembers the last for retries.

    `Shard.open_writer` returns one. Its methods are those of `Shard`, with a `token` for every write: after
    Indeterminate, call again with the token of that call to learn its outcome, or to complete it. Every call may raise
    Unavailable and Overloaded (it did not happen), Unauthorized, Forbidden and UnknownShard; one with a token also
    TokenReused and OutcomeForgotten, as `Shard.insert` says.
    """

    def __init__(
        self,
        transport: OneShard,
        name: str,
        schema: Callable[[], tuple[int, ShardSchema]],
        settings: WriteSettings,
        writer_id: WriterId | None = None,
        caller: Caller = NOBODY,
    ) -> None:
        self.caller = caller  # for the commit history
        self._transport = transport
        self._name = name
        self._schema = schema
        self._learnt: tuple[int, ShardSchema] | None = None
        self._settings = settings
        self._process = OwnProcess("this writer")
        self._lock = threading.Lock()
        self._has_written = False
        self.writer_id = writer_id or mint(WriterId, transport.ids)

    @property
    def transport(self) -> OneShard:
        """The transport to its shard, for a second handle."""
        return self._transport

    def __repr__(self) -> str:
        return f"WriteHandle({self._name!r}, {self.writer_id})"

    def _writer(self) -> AbstractContextManager[WriteHandle]:
        return nullcontext(self)

    def _inserted(
        self, rows: Updates, attributes: tuple[AttributeUpdate, ...], token: Token | None, info: bytes, *, unique: bool
    ) -> c.Appended:
        """Insert rows. `unique`: the shard has unique keys, which are looked up first."""
        runs = self._parts(rows, None, self._inline_bytes_max, digests=token is not None)
        return self._appended(lambda w, t: c.Insert(w, t, runs, attributes), token, info)

    def _append(
        self,
        kind: type[c.CompareAndAppend] | type[c.Append],
        updates: Updates,
        interval: tuple[Antichain, Antichain],
        token: str | None,
        attributes: AttributeUpdates,
        info: Info | None,
    ) -> c.Appended:
        """An append of this kind. It may land at any upper in the interval; a compare-and-append only at its lower."""
        own, changes, info_json = given_token(token), as_attribute_updates(attributes), info_bytes("info", info)
        until = interval[1] if kind is c.Append else interval[0]

        def write(rows: Updates, unique: bool) -> c.Appended:
            cut = self._look_up(rows, interval[0], until) if unique else 0
            runs = self._parts(rows, interval[0].element, self._inline_bytes_max, digests=own is not None)
            return self._appended(lambda w, t: kind(w, t, *interval, runs, changes, cut=cut), own, info_json)

        return self._by_schema(updates, write, own)

    def _by_schema(self, updates: Updates, write: Callable[[Updates, bool], _R], token: Token | None) -> _R:
        """Write rows by the schema of the shard. `write` gets whether keys have to be looked up first."""
        return write(updates, False)

    def _look_up(self, rows: Updates, lower: Antichain, until: Antichain) -> int:
        """Look the keys of rows up, as `CheckedWriter` does; returns the cut of a pending truncation, or 0."""
        return 0

    def update_attributes(self, updates: AttributeUpdates, *, token: str | None = None) -> None:
        """Apply `updates` to attributes without rows, all or nothing.

        Raises: AttributeMismatch (a condition does not hold), Indeterminate (it may have happened: call again with
            this call's `token`).
        """
        changes = as_attribute_updates(updates)
        self._commit(lambda w, t: c.UpdateAttributes(w, t, changes), given_token(token))

    def stage(
        self, updates: Updates, default_time: int | None, on_part: Callable[[Part], None] | None = None
    ) -> tuple[Run, ...]:
        """Write rows as blobs that no State names yet; memory is bounded whatever the size of the input.

        `default_time` None leaves `updates` without times, which `commit_insert` sets. `on_part` is called for each
        written part. The result can be committed once, and to this shard only; a second commit is refused. Raises
        InvalidUsage (the rows do not fit).
        """
        return self._parts(updates, default_time, 0, on_part, digests=True)

    def stage_for_one_commit(
        self, updates: Updates, default_time: int | None, *, by_rows: bool = True
    ) -> tuple[Run, ...]:
        """As `stage`, but small `updates` stay inline: for a caller that commits them once, to this shard.

        The shard does not recognise inline rows in a second command: they would count twice. Without `by_rows` a token
        stands for these parts, not for their rows: for a caller that never stages the rows of a token anew.
        `default_time` as in `stage`. Raises InvalidUsage (the rows do not fit).
        """
        runs = self._parts(updates, default_time, self._inline_bytes_max, digests=by_rows)
        return runs if by_rows else with_id_digests(runs)

    @property
    def _inline_bytes_max(self) -> int:
        return self._transport.policy.inline_part_bytes_max

    def _parts(
        self,
        updates: Updates,
        default_time: int | None,
        inline_bytes_max: int,
        on_part: Callable[[Part], None] | None = None,
        *,
        digests: bool,
    ) -> tuple[Run, ...]:
        def stage_rows(rows: Updates) -> tuple[Run, ...]:
            schema_id, schema = self.schema_of(rows)
            with translated():
                return stage(
                    as_updates(rows, schema),
                    self._sink(schema_id, schema, digests=digests),
                    default_time=default_time,
                    inline_bytes_max=inline_bytes_max,
                    part_bytes_target=self._settings.part_bytes_target,
                    on_part=on_part,
                )

        return self._transport.vouched(self._transport.shard, self.judged(updates, stage_rows))

    def judged(self, updates: Updates, act: Callable[[Updates], _R]) -> _R:
        """The result of `act` on `updates`; `CheckedWriter` also tries the current schema. Raises what it does."""
        return act(updates)

    def _sink(self, schema_id: int, schema: ShardSchema, *, digests: bool) -> PartSink:
        transport = self._transport
        return PartSink(schema, schema_id, transport.blob, transport.shard, self.writer_id, transport.ids, digests)

    def schema_of(self, updates: Updates) -> tuple[int, ShardSchema]:
        """The schema, and its id, for writing `updates`: the current one, if they have a column not known here.

        The columns of an iterator are not known in advance. Raises what every call may.
        """
        if isinstance(updates, PinnedRows):
            return updates.schema_id, updates.schema
        schema_id, schema = self._newest()
        if set(names_of(updates) or ()).issubset(schema.updates_schema.names):
            return schema_id, schema
        return self._learn()

    def _newest(self) -> tuple[int, ShardSchema]:
        """The newest schema that is known here, and its id."""
        known = self._schema()
        return known if self._learnt is None or self._learnt[0] < known[0] else self._learnt

    def _learn(self) -> tuple[int, ShardSchema]:
        """The current schema, which this writer uses from then on. Raises what every call may.

        Raises InvalidUsage if a name that it knows means another column by now: rows that a caller names by the old
        schema would be stored in other columns.
        """
        schemas = valid_schemas(self._transport.view(self._name, ViewRequest(with_batches=False)).schemas)
        for number in {self._schema()[0], self._newest()[0]}:  # its caller may use the names of either
            current_for_names(schemas, number)
        self._learnt = current = newest(schemas)
        return current

    def receipted(self, runs: tuple[Run, ...]) -> tuple[Run, ...]:
        """The staged `runs` with receipts. Calls the server only if a blob has none yet; repeating it is safe.

        For callers that stage many parts in many places: their single commit need not validate each part then. Raises
        InvalidUsage and Expired (a part cannot be committed: stage its rows again).
        """
        if all(part.receipt or part.is_inline for run in runs for part in run.parts):
            return runs
        return self._transport.receipted(self._name, runs)

    def commit_insert(
        self,
        runs: Sequence[Run],
        *,
        token: Token | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> c.Appended:
        """Commit staged `runs` at the next time. `token`, `attributes`, `info` and what it raises: as `insert` says.

        Raises also InvalidUsage (they were committed before, or to another shard) and Expired (they were staged so long
        ago that they may be deleted: stage the rows again).
        """
        changes, info_json = as_attribute_updates(attributes), info_bytes("info", info)
        return self._appended(lambda w, t: c.Insert(w, t, tuple(runs), changes), token, info_json)

    def commit_compare_and_append(
        self,
        runs: Sequence[Run],
        expected_upper: Time,
        new_upper: Time,
        *,
        token: Token | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> c.Appended:
        """Commit staged `runs` as the batch `[expected_upper, new_upper)`, if the shard's upper is `expected_upper`.

        `token`, `attributes`, `info` and what it Raises: as `compare_and_append` and `commit_insert` say.
        """
        interval = frontier(expected_upper), frontier(new_upper)
        changes, info_json = as_attribute_updates(attributes), info_bytes("info", info)
        return self._appended(lambda w, t: c.CompareAndAppend(w, t, *interval, tuple(runs), changes), token, info_json)

    def commit_append(
        self,
        runs: Sequence[Run],
        lower: Time,
        upper: Time,
        *,
        token: Token | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> c.Appended:
        """Commit staged `runs` with times in `[lower, upper)`, of which the shard may already have the first ones.

        For replicated writers that write identical definite data: rows before the shard's upper are dropped, however
        they were cut into parts. `token`, `attributes`, `info` and what it Raises: as `append` and `commit_insert`
        say.
        """
        since, until = frontier(lower), frontier(upper)
        changes, info_json = as_attribute_updates(attributes), info_bytes("info", info)
        return self._appended(lambda w, t: c.Append(w, t, since, until, tuple(runs), changes), token, info_json)

    def commit_rewrite(
        self,
        runs: Sequence[Run],
        expected_upper: Time,
        as_of: int | None = None,
        *,
        operation: str,
        token: Token | None = None,
        **parts: Any,
    ) -> c.Appended:
        """Commit staged `runs`, which were computed from the contents of the shard, at the next time.

        Args:
            runs: the staged rows.
            expected_upper: the shard's upper, before which the contents were read. None, with a tombstone: any.
            as_of: the time that was read, if that is not the one before the upper.
            operation: its name in the commit history.
            token: as for `insert`. It stands for the operation, its target and its question, whatever its rows.
            parts: of the command `Rewrite`.

        Raises: what `commit_compare_and_append` says, and InvalidUsage if the parts do not match the operation.
        """
        expected = frontier(expected_upper)
        latest = (expected.element or 0) - 1 if as_of is None else as_of
        return self._appended(lambda w, t: c.Rewrite(w, t, expected, latest, operation, tuple(runs), **parts), token)

    def close(self) -> None:
        """Retire the writer, else its lease lapses; a later write is by a new one. Raises what every call may."""
        self._process.check()
        with self._lock:
            if self._has_written:
                send(self._transport, self._name, c.ExpireWriter(self.writer_id), self._settings.retry_s)
                self.writer_id = mint(WriterId, self._transport.ids)  # a retired one cannot be used again
                self._has_written = False

    def _appended(
        self, command: Callable[[WriterId, Token], _Append], token: Token | None, info: bytes = b""
    ) -> c.Appended:
        result = self._commit(command, token, info)
        assert isinstance(result, c.Appended)
        return result

    def _commit(self, command: Callable[[WriterId, Token], _Write], token: Token | None, info: bytes = b"") -> c.Result:
        self._process.check()
        caller = replace(self.caller, info=info) if info else self.caller
        if token is not None:  # the shard remembers it without a writer
            return self._send(by_token(command, token), caller)
        with self._lock:
            token = mint(Token, self._transport.ids)
            try:
                return self._send(self._by_writer(command, token), caller)
            except Expired:
                self.writer_id = mint(WriterId, self._transport.ids)  # the lease lapsed while idle: nothing happened
                return self._send(self._by_writer(command, token), caller)

    def _by_writer(self, command: Callable[[WriterId, Token], _T], token: Token) -> _T:
        """The command of this writer, which it registers with its first one."""
        self._has_written = True
        return replace(command(self.writer_id, token), lease_ms=self._settings.lease_ms)

    def _send(self, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        return send(self._transport, self._name, command, self._settings.retry_s, caller)


def by_token(command: Callable[[WriterId, Token], _T], token: Token) -> _T:
    """The command of a token, which stands for its question: every repetition gets the same answer."""
    tokened = command(writer_of(parse(Token, token)), token)
    return replace(tokened, digest=digest_of(tokened))


def names_of(updates: Updates) -> list[Any] | None:
    """The columns of rows in any form, in their order; None: they are not known without reading the rows."""
    if isinstance(updates, list):
        every = (row if isinstance(row, dict) else names_of(row) or () for row in updates)
        return list(dict.fromkeys(name for names in every for name in names))
    names = getattr(getattr(updates, "schema", None), "names", None)
    if isinstance(names, list):
        return names
    columns = _with_index(updates).columns if _is_pandas(updates) else getattr(updates, "columns", None)
    if columns is None and hasattr(updates, "__arrow_c_schema__"):
        return pa.schema(updates).names  # type: ignore[no-any-return]
    return None if columns is None else list(columns)


def as_updates(updates: Updates, schema: ShardSchema) -> Any:
    """Rows in any supported form as a table, a batch, or an iterator of tables and batches.

    Raises InvalidUsage, also while the result is iterated; errors of the caller's iterator pass through.
    """
    if isinstance(updates, PinnedRows):
        return as_updates(updates.rows, schema)
    if isinstance(updates, (pa.Table, pa.RecordBatch)):
        return updates
    if isinstance(updates, list) and all(isinstance(row, dict) for row in updates):
        return _whole(_from_rows(updates, schema), len(updates))
    if _is_pandas(updates):
        return _whole(_from_frame(updates), len(updates))
    if (reader := _reader_of(updates)) is not None:
        return _readable(reader)
    if isinstance(updates, Iterable) and not isinstance(updates, (str, bytes, Mapping)):
        rows = gather_dicts(updates)
        return rows if rows is updates or not isinstance(rows, list) else as_updates(rows, schema)
    raise _no_rows(updates)


def _is_pandas(rows: object) -> bool:
    """Whether this is a frame of pandas, which is not imported here."""
    return type(rows).__module__.split(".")[0] == "pandas" and hasattr(rows, "columns")


def _check_lazy(updates: object) -> None:
    """Raise InvalidUsage for a lazy frame of Polars, which warns or fails as soon as its columns are asked for."""
    if type(updates).__name__ == "LazyFrame":
        raise InvalidUsage("a LazyFrame has no rows yet; call collect() first")


def gather_dicts(updates: Updates) -> Updates:
    """The rows as they are, but dicts from a tuple, a generator or another iterable as a list."""
    _check_lazy(updates)
    if _is_pandas(updates):
        return cast("Updates", _with_index(updates))
    of_frames = ("columns", "__arrow_c_stream__", "__arrow_c_array__")
    is_frame = any(hasattr(updates, name) for name in of_frames)
    if is_frame or not isinstance(updates, Iterable) or isinstance(updates, (list, str, bytes, Mapping)):
        return updates
    rest = iter(updates)
    for first in rest:
        if isinstance(first, dict):
            return [first, *rest]
        return chain((first,), rest) if rest is updates else updates
    return updates


def to_rereadable(rows: Updates) -> Updates:
    """Rows that can be read repeatedly: one-time sources are read into memory. Raises as `as_updates`."""
    if isinstance(rows, PinnedRows):
        return PinnedRows(to_rereadable(rows.rows), rows.schema_id, rows.schema)
    if _is_pandas(rows):
        return cast("Updates", _with_index(rows))
    if isinstance(rows, (pa.Table, pa.RecordBatch, list)):
        return rows
    if (reader := _reader_of(rows)) is not None:
        return pa.Table.from_batches(_readable(reader), reader.schema)
    if isinstance(rows, Iterable) and not isinstance(rows, (str, bytes, Mapping)):
        return list(rows)
    raise _no_rows(rows)


def _whole(table: pa.Table, count: int) -> pa.Table:
    """The table. Raises Corruption unless it has all rows that were given."""
    if len(table) != count:
        raise Corruption(f"{count} rows became {len(table)} in Arrow; nothing was written: report it", given=count)
    return table


def _no_rows(rows: object) -> InvalidUsage:
    return InvalidUsage(
        "rows come as an Arrow table, batches, a pandas, Polars or DuckDB frame, or a list of dicts, "
        f"not as {type(rows).__name__}"
    )


def _reader_of(rows: Updates) -> pa.RecordBatchReader | None:
    """A reader for objects with Arrow's C interface, such as a Polars frame or a DuckDB relation; None for others."""
    _check_lazy(rows)
    try:
        if isinstance(rows, pa.RecordBatchReader):
            return rows
        if hasattr(rows, "__arrow_c_stream__"):
            _check_objects(rows)
            return pa.RecordBatchReader.from_stream(rows)
        if hasattr(rows, "__arrow_c_array__"):
            batch = pa.record_batch(rows)
            return pa.RecordBatchReader.from_batches(batch.schema, [batch])
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise _unreadable(error) from error
    return None


def _check_objects(rows: Any) -> None:
    """Raise InvalidUsage for a Polars frame with Python objects: it gives their addresses as values."""
    is_frame = type(rows).__module__.split(".")[0] == "polars" and hasattr(rows, "columns")
    if odd := next((name for name, kind in rows.schema.items() if kind.is_object()), None) if is_frame else None:
        raise InvalidUsage(f"column {odd!r} has Python objects, which a shard cannot store; convert them first")


def _readable(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    try:
        yield from reader
    except pa.ArrowException as error:
        raise _unreadable(error) from error


def _unreadable(error: Exception) -> InvalidUsage:
    """Arrow's reason in one line: of an error in a stream of Python's it has the traceback."""
    reason = str(error).partition(". Detail: Python exception")[0].splitlines()
    return InvalidUsage(f"the rows cannot be read as Arrow: {reason[0] if reason else type(error).__name__}")


def _with_index(frame: Any) -> Any:
    """A pandas frame with the named levels of its index as columns, as Arrow reads it by default."""
    levels = [name for name in frame.index.names if name is not None and name not in frame.columns]
    return frame.reset_index(level=levels) if levels else frame


def _from_frame(frame: Any) -> pa.Table:
    frame = _with_index(frame)
    if len(frame) and not len(frame.columns):
        raise InvalidUsage("the frame has rows but no columns")
    try:
        table = pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise InvalidUsage(f"the frame cannot be read as Arrow: {error}") from error
    for number, field in enumerate(table.schema):
        is_arrow = hasattr(frame.dtypes.iloc[number], "pyarrow_dtype")  # whose days may be beyond the years of Python
        if not is_arrow and (pa.types.is_date(field.type) or pa.types.is_time(field.type)):
            # datetimes among dates, and zones of times
            column_of(field.name, frame.iloc[:, number].dropna().tolist(), field.type)
    return table


def _from_rows(rows: list[dict[str, Any]], schema: ShardSchema) -> pa.Table:
    names = {name for row in rows for name in row}
    unknown = sorted(names - set(schema.updates_schema.names), key=shown)
    if unknown:
        raise schema.no_column(unknown[0])
    for name in schema.required:
        if lacking := [number for number, row in enumerate(rows) if name not in row]:
            raise InvalidUsage(f"row {lacking[0]} has no column {name!r}, which is of the key; every row names it")
    if DIFF in names:
        rows = [{DIFF: 1, **row} for row in rows]
    fields = [field for field in schema.updates_schema if field.name in names or field.name in schema.arrow.names]
    written = pa.schema(fields)
    return pa.Table.from_arrays([column_of_rows(name, rows, schema) for name in written.names], schema=written)


def column_of_rows(name: str, rows: list[dict[str, Any]], schema: ShardSchema) -> pa.Array:
    """The values of a column of the shard in dicts; those without it have its default, or null. Raises InvalidUsage."""
    column = column_of(name, [row.get(name) for row in rows], schema.updates_schema.field(name).type)
    default = schema.defaults.get(name)
    absent = [] if default is None else [name not in row for row in rows]
    return pc.if_else(pa.array(absent, pa.bool_()), default, column) if any(absent) else column
