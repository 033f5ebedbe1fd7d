"""Inserts and appends into shards with unique keys: look the keys up, and commit the rows if none of them exists.

An insert is committed only if these keys were not written since the look-up. So it is exact whatever others do at the
same time. The caller of a `compare_and_append` chooses the upper itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.dml_plans import NONE, BoundVerb, Contents, RowSet, VerbBinding, check_uncrowded, with_keys
from persist.client.optimistic_edit import EditOperation, unless_landed
from persist.client.read_leases import HandleSettings, ReadSettings
from persist.client.shared_lease_reads import hold_for_block
from persist.client.write import PinnedRows, Updates, WriteHandle, as_updates, gather_dicts, to_rereadable
from persist.core import commands as c
from persist.core.attribute import AttributeUpdate
from persist.core.audit_log import Caller
from persist.core.batch import Run
from persist.core.errors import InvalidUsage, NotReadable, SchemaMismatch, TokenReused, Unavailable, UpperMismatch
from persist.core.frontier import Antichain
from persist.core.ids import Token
from persist.core.record import replace
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.truncations_and_drops import pending_drop
from persist.parts import DIFF, TIME, ShardSchema
from persist.parts.consolidate import join
from persist.parts.constraint_checks import check_rows
from persist.parts.key_encoding import distinct_keys, key_schema
from persist.parts.row_stats import digest_of_rows
from persist.parts.schema_evolution import Migration, current_schema, newest, valid_schemas
from persist.parts.writer import UNASSIGNED_TIME, iter_pieces

SCHEMAS_MAX = 10  # by which one write is staged, if the constraints of the shard change each time
LOOKS_MAX = 10  # key look-ups, each overtaken by a pending erasure that became effective
_T = TypeVar("_T")


@dataclass(frozen=True)
class InsertVerb:
    """Insert rows if no key has more than one row then."""

    rows: pa.Table | pa.RecordBatch | list[pa.RecordBatch]

    verb: ClassVar[str] = "insert"

    def bound(self, schema: ShardSchema) -> BoundVerb:
        rows = conform_rows(self.rows, schema, None)
        keyed = key_schema(schema)
        row_set = _with_added_keys(rows, keyed, schema) if schema.details.unique else NONE
        cuts = [0]

        def updates(contents: Contents) -> Iterator[pa.Table]:
            next_contents, cuts[0] = contents.for_next_commit(retracts=_retract(rows))
            check_keys(rows, row_set, next_contents)
            yield rows.drop_columns([TIME])

        # It checks its keys itself: a row that it retracts may be absent.
        return BoundVerb(schema, row_set, [str(digest_of_rows(rows))], updates, may_crowd=False, cuts=cuts)


def check_keys(rows: pa.Table, row_set: RowSet, contents: Contents) -> None:
    """Raise ConstraintViolated if a key that gains one of the rows has more than one row at some time then.

    `rows` are in `updates_schema`, at times after that of the contents; `row_set` are the rows of the keys that gain.
    """
    schema = contents.schema
    if row_set is NONE:
        return
    existing = [schema.conform(table, 0) for table in row_set.rows(contents)]
    check_uncrowded(join([row_set.pick(rows), *existing]), schema)


def _with_added_keys(rows: pa.Table, keyed: ShardSchema, schema: ShardSchema) -> RowSet:
    return with_keys(distinct_keys(rows.filter(pc.greater(rows.column(DIFF), 0)), keyed), keyed, schema)


def conform_rows(rows: Updates, schema: ShardSchema, default_time: int | None) -> pa.Table:
    """The rows in `updates_schema`; without `default_time` they must have no time column. Raises InvalidUsage."""
    tables = []
    for piece in iter_pieces(as_updates(rows, schema)):
        if default_time is None and TIME in piece.schema.names:
            raise InvalidUsage(
                f"the rows have a column {TIME}, but the service chooses the time of an insert; leave it out, or use "
                "compare_and_append"
            )
        tables.append(schema.conform(piece, default_time or UNASSIGNED_TIME))
    return join(tables) if tables else schema.updates_schema.empty_table()


@dataclass(frozen=True, kw_only=True)
class InsertOperation(EditOperation):
    """One insert, by an existing writer."""

    writer: WriteHandle
    caller: Caller

    def _commit(self, runs: tuple[Run, ...], view: ShardView, token: Token | None) -> c.Appended:
        return self.writer.commit_rewrite(runs, view.upper, token=token, **self._parts(view))

    def _writer(self, view: ShardView | None) -> WriteHandle:
        handle = super()._writer(view)
        handle.caller = self.caller
        return handle


class CheckedWriter(WriteHandle):
    """A writer whose rows obey every constraint of the shard, also if its schema has changed since it was opened."""

    def check(self, updates: Updates) -> None:
        """Check whether rows could be inserted into the shard as it is now, by its constraints and its keys.

        Nothing is written. `updates` are a table or a list of dicts. Raises InvalidUsage, and ConstraintViolated.
        """
        view = self._transport.view(self._name, ViewRequest(with_batches=False))
        if _requirements(current_schema(view.schemas)[1]) != _requirements(self.schema_of(updates)[1]):
            updates = self._as_of_now(updates)
        schema_id, schema = self.schema_of(updates)
        rows = conform_rows(updates, schema, None)
        check_rows(rows, schema)
        if schema.details.unique:
            retracts = _retract(rows)
            self._look_until(lambda view: self._check_unique(rows, schema_id, schema, view, retracts=retracts))

    def judged(self, updates: Updates, act: Callable[[Updates], _T]) -> _T:
        """The result of `act` on rows; if it refuses them by the known schema, by the current schema of the shard.

        Raises what `act` does, and InvalidUsage: a name means another column by now.
        """
        updates = gather_dicts(updates)
        try:
            return act(updates)
        except InvalidUsage:
            later = self._later(updates)
            if later is None:
                raise
        return act(later)

    def _later(self, updates: Updates) -> Updates | None:
        """The rows for a newer schema of the shard, which this writer uses from here on.

        None: there is no newer one, or the rows cannot be read again.
        """
        if isinstance(updates, PinnedRows) and not isinstance(updates.rows, (pa.Table, pa.RecordBatch)):
            return None
        known = self.schema_of(updates)[0]
        updates = self._as_of_now(updates)
        return updates if self.schema_of(updates)[0] != known and self._can_convert(updates) else None

    def _by_schema(self, updates: Updates, write: Callable[[Updates, bool], _T], token: Token | None) -> _T:
        """Write by the current schema of the shard, again each time that its constraints change meanwhile.

        It also retries if a pending truncation, which the key look-up took into account, was withdrawn. Raises
        TokenReused if rows are refused, and a write with the token has landed.
        """
        with unless_landed(self, token):
            updates = gather_dicts(updates)
            for tries in range(1, SCHEMAS_MAX + 1):
                schema = updates.schema if isinstance(updates, PinnedRows) else self._newest()[1]
                if schema.details.unique:
                    updates = to_rereadable(updates)
                try:
                    return write(updates, schema.details.unique)
                except SchemaMismatch:
                    if tries == SCHEMAS_MAX or not self._can_convert(updates):
                        raise
                    updates = self._as_of_now(updates)
                except UpperMismatch as error:
                    if tries == SCHEMAS_MAX or "withdrawn" not in error.details:
                        raise
        raise AssertionError("the last try returns or raises")

    def _can_convert(self, updates: Updates) -> bool:
        """Whether the rows can be written by a later schema than the one by which they were refused."""
        return _can_be_read_again(updates)

    def _as_of_now(self, updates: Updates) -> Updates:
        """The rows, after the schema has changed. Raises InvalidUsage: a name means another column by now."""
        if not isinstance(updates, PinnedRows):
            self._learn()
            return updates
        return updates.as_of_now(self._transport, self._name)

    def _inserted(
        self, rows: Updates, attributes: tuple[AttributeUpdate, ...], token: Token | None, info: bytes, *, unique: bool
    ) -> c.Appended:
        """As `WriteHandle._inserted`. The token may have landed while the keys were not unique, or while they were."""
        try:
            return self._inserted_as(rows, attributes, token, info, unique=unique)
        except TokenReused:
            if not _can_be_read_again(rows):
                raise
            return self._inserted_as(rows, attributes, token, info, unique=not unique)  # it is known, so nothing lands

    def _inserted_as(
        self, rows: Updates, attributes: tuple[AttributeUpdate, ...], token: Token | None, info: bytes, *, unique: bool
    ) -> c.Appended:
        if not unique:
            return super()._inserted(rows, attributes, token, info, unique=False)
        known = rows.schema_id if isinstance(rows, PinnedRows) else self._newest()[0]
        insert = InsertOperation.of(
            self._transport,
            self._name,
            HandleSettings(write=self._settings),
            info=info,
            plan=VerbBinding(InsertVerb(rows), known),
            attributes=attributes,
            writer=self,
            caller=replace(self.caller, info=info) if info else self.caller,
        )
        done = insert.run(token)
        return c.Appended(done.lower, done.upper)

    def _look_up(self, rows: Updates, lower: Antichain, until: Antichain) -> int:
        """Raise ConstraintViolated if keys of the rows would have more than one row when the rows land now.

        Returns the cut of the pending truncation that this takes into account, as `CompareAndAppend` says. The rows
        land if the shard's upper is `lower`, or between it and `until`. Otherwise the commit decides: they have landed
        already, or never will.
        """

        def read(rows: Updates) -> tuple[int, ShardSchema, pa.Table]:
            schema_id, schema = self.schema_of(rows)
            return schema_id, schema, conform_rows(rows, schema, lower.element or 0)

        def look(view: ShardView) -> int | None:
            start = view.upper.element
            if start is None or not lower <= view.upper or (view.upper != lower and not view.upper < until):
                return 0
            if not current_schema(view.schemas)[1].details.unique:  # the constraint was dropped
                return 0
            schema_id, schema, times = self.judged(rows, read)
            to_come = times.filter(pc.greater_equal(times.column(TIME), start))
            return self._check_unique(to_come, schema_id, schema, view, retracts=_retract(times))

        return self._look_until(look)

    def _look_until(self, look: Callable[[ShardView], int | None]) -> int:
        """Look keys up in views of the shard until one is not overtaken (None). Raises Unavailable: all were.

        A dropped shard has no time left, and its commit answers tokens.
        """
        for _ in range(LOOKS_MAX):
            cut = look(self._transport.last_view(self._name, ViewRequest(with_batches=False)))
            if cut is not None:
                return cut
        raise Unavailable(
            f"pending changes of shard {self._name!r} became effective during each of {LOOKS_MAX} look-ups of its "
            "unique keys; nothing was written: retry"
        )

    def _check_unique(
        self, given: pa.Table, schema_id: int, schema: ShardSchema, view: ShardView, *, retracts: bool
    ) -> int | None:
        """Raise ConstraintViolated if keys of the rows, which land at the upper of the view, would have another row.

        The rows are by a schema that the shard may have had before; the contents are read by the current one.
        `retracts` and the result are as in `Contents.for_next_commit`. None: a pending change has become effective
        since the view, so look again.
        """
        start = view.upper.element
        if start is None:
            return 0
        if start == 0:
            check_keys(given, _with_added_keys(given, key_schema(schema), schema), Contents(schema, None, -1))
            return 0
        try:
            with hold_for_block(self._transport, self._name, start - 1, "unique keys", ReadSettings()) as held:
                waits = view.erasing or pending_drop(view.drops, view.upper) is not None
                if waits and held.view.upper != view.upper:
                    return None
                schemas = valid_schemas(held.view.schemas)
                current = newest(schemas)[1]
                rows = Migration(schemas.get(schema_id, schema), current).rows(given)
                row_set = _with_added_keys(rows, key_schema(current), current)
                next_contents, cut = Contents(current, held, start - 1).for_next_commit(retracts=retracts)
                check_keys(rows, row_set, next_contents)
                return cut
        except NotReadable:  # an erasure forgets history when it becomes effective
            if self._transport.view(self._name, ViewRequest(with_batches=False)).upper == view.upper:
                raise
            return None


def _retract(rows: pa.Table) -> bool:
    """Whether one of the rows is a retraction, which withdraws a pending truncation."""
    return pc.any(pc.less(rows.column(DIFF), 0)).as_py() is True


def _requirements(schema: ShardSchema) -> object:
    """The requirements of a schema on rows, independent of column names."""
    columns = {(schema.id_of[field.name], str(field.type), field.nullable) for field in schema.arrow}
    return schema.details.unique, schema.details.not_null, schema.details.checks, columns


def _can_be_read_again(updates: Updates) -> bool:
    updates = updates.rows if isinstance(updates, PinnedRows) else updates
    is_frame = hasattr(updates, "iloc") or type(updates).__module__.partition(".")[0] == "polars"
    return isinstance(updates, (pa.Table, pa.RecordBatch, list)) or is_frame
