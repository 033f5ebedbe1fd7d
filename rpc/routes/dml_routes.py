"""Verbs that read before they write: upsert, delete, update, replace-where, overwrite and merge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from fastapi import Query, Request
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from persist.client.dml_plans import check_alike
from persist.client.merge import Merge, own_values, source, target
from persist.client.optimistic_edit import Edited, unless_landed
from persist.client.shard import Shard
from persist.client.write import Updates
from persist.codecs import rows
from persist.codecs.decode_limits import Allowance
from persist.codecs.json_rows import Absence, Spend, decode_body, rows_of_json
from persist.core.commands import WRITE
from persist.core.errors import InvalidUsage
from persist.core.frontier import TIME_MAX
from persist.parts import DIFF, ShardSchema
from persist.parts.memory_size import row_bytes
from persist.parts.predicate import PREDICATE_CHARS_MAX
from persist.parts.python_values import decode_json_keys
from rpc.app_state import principal_of, service_of
from rpc.route import Router
from rpc.routes.parameters import (
    CALLER_PARAMETERS,
    Format,
    IdempotencyToken,
    JsonBody,
    body_reader,
    json_body,
    rows_body,
    run_with_body,
    token_of,
)

router = Router(prefix="/v1/shards", tags=["verbs"])

ReadTime = Annotated[
    int | None,
    Query(ge=-1, le=TIME_MAX, description="Fail if there was a write after this time; -1: if there was any write."),
]
Where = Annotated[str, Query(description="Predicate of the rows to replace.", max_length=PREDICATE_CHARS_MAX)]
_ROWS = rows_body("Rows without duplicates.")
B = TypeVar("B", bound=JsonBody)


class _Delete(JsonBody):
    where: str | None = None
    keys: Any = None


class _Update(JsonBody):
    set: dict[str, Any]
    where: str | None = None


class _Value(JsonBody):
    """The new value of a column: one of these."""

    value: Any = UNSET
    source: str | UnsetType = UNSET
    target: str | UnsetType = UNSET


class _Clause(JsonBody):
    when: str
    then: str
    condition: str | None = msgspec.field(name="if", default=None)
    set: dict[str, _Value] | None = None


class _Merge(JsonBody):
    rows: list[Any]
    clauses: list[_Clause]
    on: list[str] | None = None


@router.write("upsert", "Insert or replace rows by their keys", openapi_extra=_ROWS)
async def upsert(
    request: Request,
    columns: Annotated[str | None, Query(description="The columns in the rows, comma-separated; default: all.")] = None,
    delete_column: Annotated[
        str | None, Query(description="A boolean column: rows with true delete their key.", max_length=256)
    ] = None,
    read_time: ReadTime = None,
    form: Format = None,
    token: IdempotencyToken = None,
) -> Response:
    """Afterwards each key in the body has exactly the given row. 409: there was a write after `read_time`."""
    given_columns = None if columns is None else columns.split(",")

    def write(shard: Shard, table: pa.Table, options: dict[str, Any]) -> Edited:
        return shard.upsert(table, delete_column=delete_column, **options)

    def schema(known: ShardSchema, data: bytes, format_name: str, allowed: Allowance) -> ShardSchema:
        names = given_columns or rows.read_names(data, format_name, delete_column, allowed) or known.arrow.names
        fields = [known.arrow.field(name) for name in known.columns(names)]
        extra = [] if delete_column is None else [pa.field(delete_column, pa.bool_())]
        key = [field.name for field in fields if field.name in known.key] or [field.name for field in fields[:1]]
        return ShardSchema(pa.schema([*fields, *extra]), tuple(key))

    return await _with_rows(request, form, (read_time, token), write, schema)


@router.write("overwrite", "Replace all rows", openapi_extra=_ROWS)
async def overwrite(
    request: Request, read_time: ReadTime = None, form: Format = None, token: IdempotencyToken = None
) -> Response:
    """Old rows are deleted in metadata alone if possible; `removed` is null then."""
    return await _with_rows(request, form, (read_time, token), lambda s, table, o: s.overwrite(table, **o))


@router.write("replace-where", "Replace the rows that match a predicate", openapi_extra=_ROWS)
async def replace_where(
    request: Request,
    where: Where,
    read_time: ReadTime = None,
    form: Format = None,
    token: IdempotencyToken = None,
) -> Response:
    """`where` must be true for all of the new rows."""
    return await _with_rows(request, form, (read_time, token), lambda s, table, o: s.replace_where(where, table, **o))


@router.on(
    "POST /{name}/delete",
    (WRITE,),
    "Delete rows",
    audit="delete",
    frees=True,
    openapi_extra=json_body(_Delete, CALLER_PARAMETERS, example={"where": "amount < 0"}),
)
async def delete(request: Request, read_time: ReadTime = None, token: IdempotencyToken = None) -> Response:
    """Deletes the rows that match `where` or `keys`. They stay in the history; use `erasures` to erase them."""

    def write(shard: Shard, body: _Delete, options: dict[str, Any], allowed: Allowance) -> Edited:
        if isinstance(body.keys, list):
            allowed.spend(len(body.keys) * row_bytes(shard.schema.arrow))
        keys = decode_json_keys(shard.schema, body.keys)
        return shard.delete(body.where, keys=keys, **options)

    return await _with_json(request, _Delete, (read_time, token), write, is_exact=True)


@router.write(
    "update",
    "Set columns of rows",
    openapi_extra=json_body(_Update, CALLER_PARAMETERS, example={"set": {"state": "paid"}, "where": "id = 7"}),
)
async def update(request: Request, read_time: ReadTime = None, token: IdempotencyToken = None) -> Response:
    """`set` has a value for each column to set. Without `where` all rows are updated."""

    def write(shard: Shard, body: _Update, options: dict[str, Any], _allowed: Allowance) -> Edited:
        return shard.update(_values(body.set, shard.schema), body.where, **options)

    return await _with_json(request, _Update, (read_time, token), write)


_MERGE = {
    "rows": [{"id": 7, "amount": 5}],
    "clauses": [
        {"when": "matched", "if": "source.amount = 0", "then": "delete"},
        {"when": "matched", "then": "update", "set": {"amount": {"source": "amount"}}},
        {"when": "not matched", "then": "insert"},
    ],
}


@router.write(
    "merge", "Merge rows by conditional clauses", openapi_extra=json_body(_Merge, CALLER_PARAMETERS, example=_MERGE)
)
async def merge(request: Request, read_time: ReadTime = None, token: IdempotencyToken = None) -> Response:
    """Rows match by the columns in `on`, else by the key. For each row the first clause that applies is used.

    `when` is `matched`, `not matched` or `not matched by source`; `then` is `update`, `delete` or `insert`. `set` has
    for each column a value, `{"value": 1}`, `{"source": "amount"}` or `{"target": "amount"}`.
    """

    service, principal = service_of(request), principal_of(request)

    def write(shard: Shard, body: _Merge, options: dict[str, Any], allowed: Allowance) -> Edited:
        service.quotas.count_rows(principal, len(body.rows))
        builder = shard.merge(_source(body, shard.schema, allowed), body.on)
        for clause in body.clauses:
            builder = _with_clause(builder, clause, shard.schema)
        return builder.execute(**options)

    return await _with_json(request, _Merge, (read_time, token), write)


async def _with_rows(
    request: Request,
    form: str | None,
    how: tuple[int | None, str | None],
    work: Callable[[Shard, pa.Table, dict[str, Any]], Edited],
    schema_of: Callable[[ShardSchema, bytes, str, Allowance], ShardSchema] | None = None,
) -> Response:
    service, options, principal = service_of(request), _options(request, how), principal_of(request)
    format_name = rows.format_of(request.headers.get("content-type"), form)

    def read(shard: Shard, data: bytes) -> Edited:
        with service.allowance() as allowed, unless_landed(shard.open_writer(), options["token"]):
            schema = shard.schema if schema_of is None else schema_of(shard.schema, data, format_name, allowed)
            table = rows.read(data, format_name, schema, service.limits.rows_max, allowed)
            if DIFF in table.schema.names:
                is_one = pc.equal(table.column(DIFF), 1)
                if not len(table) or pc.all(is_one, skip_nulls=False).as_py() is True:
                    table = table.drop_columns([DIFF])
            service.quotas.count_rows(principal, table.num_rows)
            return work(shard, table, options)

    return await run_with_body(request, service.limits.rows_bytes_max, read)


async def _with_json(
    request: Request,
    kind: type[B],
    how: tuple[int | None, str | None],
    work: Callable[[Shard, B, dict[str, Any], Allowance], Edited],
    *,
    is_exact: bool = False,
) -> Response:
    service, options = service_of(request), _options(request, how)

    def read(shard: Shard, data: bytes) -> Edited:
        with service.allowance() as allowed, unless_landed(shard.open_writer(), options["token"]):
            body = body_reader(kind)(decode_body(data, allowed.spend, is_exact=is_exact))
            return work(shard, body, options, allowed)

    return await run_with_body(request, service.limits.rows_bytes_max, read)


def _options(request: Request, how: tuple[int | None, str | None]) -> dict[str, Any]:
    read_time, token = how
    return {"read_time": read_time, "token": token_of(request, token)}


def _values(sets: dict[str, Any], schema: ShardSchema) -> dict[str, Any]:
    """A value for each of these columns, from the JSON of a row. Raises InvalidUsage."""
    if not sets:
        raise InvalidUsage('set must have values by column names, such as {"state": "paid"}')
    fields = pa.schema([schema.arrow.field(name).with_nullable(True) for name in schema.columns(sets)])
    table = _read("set has a value that does not fit its column", [sets], fields)
    return {name: table.column(name)[0] for name in fields.names}


def _source(body: _Merge, schema: ShardSchema, allowed: Allowance) -> Updates:
    """The source rows of a merge, with the shard's columns converted to their types. Raises InvalidUsage.

    They stay Arrow's: Python's types have no nanoseconds, and fewer years.
    """
    if not all(isinstance(row, dict) for row in body.rows):
        raise InvalidUsage('rows must be a list of rows, such as [{"id": 7, "amount": 5}]')
    if not body.rows:
        return body.rows
    if any(clause.then == "update" and clause.when != "not matched" and clause.set is None for clause in body.clauses):
        check_alike(body.rows, "a merge that updates rows without `set`")
    names = dict.fromkeys(name for row in body.rows for name in row)
    fields = pa.schema([schema.arrow.field(name).with_nullable(True) for name in names if name in schema.arrow.names])
    known_values = [{name: row[name] for name in fields.names if name in row} for row in body.rows]
    columns: dict[str, Any] = {}
    if fields.names:
        known = _read("a row is invalid", known_values, fields, allowed.spend, Absence(schema.defaults))
        columns |= dict(zip(fields.names, known.columns, strict=False))
    others = [name for name in names if name not in columns]
    columns |= {name: own_values(name, [row.get(name) for row in body.rows]) for name in others}
    return pa.table(columns)


def _read(
    problem: str,
    json_rows: list[Any],
    fields: pa.Schema,
    spend: Spend | None = None,
    absence: Absence = Absence(),  # noqa: B008
) -> pa.Table:
    try:
        return rows_of_json(json_rows, fields, spend, absence)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise InvalidUsage(f"{problem}: {str(error).splitlines()[0]}") from error


def _with_clause(merge: Merge, clause: _Clause, schema: ShardSchema) -> Merge:
    """The merge with another clause. Raises InvalidUsage."""
    condition = clause.condition
    sets = None if clause.set is None else _expressions(clause.set, schema)
    kinds: dict[tuple[str, str], Callable[[], Merge]] = {
        ("matched", "update"): lambda: merge.when_matched_update(sets, condition),
        ("matched", "delete"): lambda: merge.when_matched_delete(condition),
        ("not matched", "insert"): lambda: merge.when_not_matched_insert(sets, condition),
        ("not matched by source", "update"): lambda: merge.when_not_matched_by_source_update(sets or {}, condition),
        ("not matched by source", "delete"): lambda: merge.when_not_matched_by_source_delete(condition),
    }
    add_clause = kinds.get((clause.when, clause.then))
    if add_clause is None or (sets is not None and clause.then == "delete"):
        raise InvalidUsage(
            "a clause is one of: matched, update or delete; not matched, insert; not matched by source, update or "
            "delete"
        )
    return add_clause()


def _expressions(sets: dict[str, _Value], schema: ShardSchema) -> dict[str, Any]:
    if not sets:
        raise InvalidUsage('set must have the new value of each column, such as {"amount": {"source": "amount"}}')
    schema.columns(sets)
    expressions: dict[str, Any] = {}
    for name, value in sets.items():
        if sum(part is not UNSET for part in (value.value, value.source, value.target)) != 1:
            raise InvalidUsage(f"set of column {name!r} must be one of {{value}}, {{source}} or {{target}}")
        if isinstance(value.source, str):
            expressions[name] = source(value.source)
        elif isinstance(value.target, str):
            expressions[name] = target(value.target)
        else:
            expressions[name] = _values({name: value.value}, schema)[name]
    return expressions
