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

from persist.client.merge import Merge, source, target
from persist.client.optimistic_edit import Edited, unless_landed
from persist.client.shard import Shard
from persist.codecs import rows
from persist.codecs.allowance import Allowance
from persist.codecs.json_rows import Spend, decode_body, rows_of_json
from persist.core.commands import WRITE
from persist.core.errors import InvalidUsage
from persist.core.frontier import TIME_MAX
from persist.parts import DIFF, ShardSchema
from persist.parts.memory_size import row_bytes
from persist.parts.predicate import PREDICATE_CHARS_MAX
from persist.parts.python_values import decode_json_keys
from rpc.app_state import principal_of, service_of
from rpc.route_table import Router
from rpc.routes.parameters import (
    SAID_PARAMETERS,
    Format,
    IdempotencyToken,
    JsonBody,
    json_body,
    read_as,
    rows_body,
    token_of,
    worked_with_body,
)

router = Router(prefix="/v1/shards", tags=["verbs"])

ReadTime = Annotated[
    int | None,
    Query(ge=-1, le=TIME_MAX, description="It lands only if nobody wrote after this time; -1: nothing was there."),
]
Where = Annotated[str, Query(description="A predicate: which rows go.", max_length=PREDICATE_CHARS_MAX)]
_ROWS = rows_body("Rows, each there once.")
B = TypeVar("B", bound=JsonBody)


class _Delete(JsonBody):
    where: str | None = None
    keys: Any = None


class _Update(JsonBody):
    set: dict[str, Any]
    where: str | None = None


class _Value(JsonBody):
    """What a column becomes: one of these."""

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


@router.on(
    "POST",
    "/{name}/upsert",
    (WRITE,),
    audit="upsert",
    writes=True,
    summary="Put rows by their keys",
    openapi_extra=_ROWS,
)
async def upsert(
    request: Request,
    columns: Annotated[str | None, Query(description="Those that the rows give, with commas; else all.")] = None,
    delete_column: Annotated[
        str | None, Query(description="Where it is true the key only goes.", max_length=256)
    ] = None,
    read_time: ReadTime = None,
    form: Format = None,
    token: IdempotencyToken = None,
) -> Response:
    """Afterwards each key has the row that was given, and no other. 409: somebody wrote after `read_time`."""
    given = None if columns is None else columns.split(",")

    def done(shard: Shard, table: pa.Table, options: dict[str, Any]) -> Edited:
        return shard.upsert(table, delete_column=delete_column, **options)

    def schema(known: ShardSchema, data: bytes, chosen: str, allowed: Allowance) -> ShardSchema:
        names = given or rows.read_names(data, chosen, delete_column, allowed) or known.arrow.names
        fields = [known.arrow.field(name) for name in known.columns(names)]
        extra = [] if delete_column is None else [pa.field(delete_column, pa.bool_())]
        return ShardSchema(pa.schema([*fields, *extra]), tuple(field.name for field in fields[:1]))

    return await _with_rows(request, form, (read_time, token), done, schema)


@router.on(
    "POST",
    "/{name}/overwrite",
    (WRITE,),
    audit="overwrite",
    writes=True,
    summary="Put rows in the place of everything",
    openapi_extra=_ROWS,
)
async def overwrite(
    request: Request, read_time: ReadTime = None, form: Format = None, token: IdempotencyToken = None
) -> Response:
    """What was there goes by metadata alone where that is possible; then `removed` is null."""
    return await _with_rows(request, form, (read_time, token), lambda s, table, o: s.overwrite(table, **o))


@router.on(
    "POST",
    "/{name}/replace-where",
    (WRITE,),
    audit="replace-where",
    writes=True,
    summary="Put rows in the place of some",
    openapi_extra=_ROWS,
)
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
    "POST",
    "/{name}/delete",
    (WRITE,),
    audit="delete",
    frees=True,
    summary="Take rows away",
    openapi_extra=json_body(_Delete, SAID_PARAMETERS, example={"where": "amount < 0"}),
)
async def delete(request: Request, read_time: ReadTime = None, token: IdempotencyToken = None) -> Response:
    """`where` or `keys` say which. History keeps them; `erasures` take rows away for good."""

    def done(shard: Shard, body: _Delete, options: dict[str, Any], allowed: Allowance) -> Edited:
        if isinstance(body.keys, list):
            allowed.spend(len(body.keys) * row_bytes(shard.schema.arrow))
        keys = decode_json_keys(shard.schema, body.keys)
        return shard.delete(body.where, keys=keys, **options)

    return await _with_json(request, _Delete, (read_time, token), done, is_exact=True)


@router.on(
    "POST",
    "/{name}/update",
    (WRITE,),
    audit="update",
    writes=True,
    summary="Give rows new values in some columns",
    openapi_extra=json_body(_Update, SAID_PARAMETERS, example={"set": {"state": "paid"}, "where": "id = 7"}),
)
async def update(request: Request, read_time: ReadTime = None, token: IdempotencyToken = None) -> Response:
    """`set` has a value for each of these columns. Without `where` all rows get them."""

    def done(shard: Shard, body: _Update, options: dict[str, Any], _allowed: Allowance) -> Edited:
        return shard.update(_values(body.set, shard.schema), body.where, **options)

    return await _with_json(request, _Update, (read_time, token), done)


_MERGE = {
    "rows": [{"id": 7, "amount": 5}],
    "clauses": [
        {"when": "matched", "if": "source.amount = 0", "then": "delete"},
        {"when": "matched", "then": "update", "set": {"amount": {"source": "amount"}}},
        {"when": "not matched", "then": "insert"},
    ],
}


@router.on(
    "POST",
    "/{name}/merge",
    (WRITE,),
    audit="merge",
    writes=True,
    summary="Match rows with those that are there",
    openapi_extra=json_body(_Merge, SAID_PARAMETERS, example=_MERGE),
)
async def merge(request: Request, read_time: ReadTime = None, token: IdempotencyToken = None) -> Response:
    """`on` names the columns by which rows match, else the key. Of each kind of rows the first clause that fits counts.

    `when` is `matched`, `not matched` or `not matched by source`; `then` is `update`, `delete` or `insert`. `set` gives
    a value, `{"value": 1}`, `{"source": "amount"}` or `{"target": "amount"}`, for each of these columns.
    """

    service, principal = service_of(request), principal_of(request)

    def done(shard: Shard, body: _Merge, options: dict[str, Any], allowed: Allowance) -> Edited:
        service.quotas.rows(principal, len(body.rows))
        found = shard.merge(_source(body.rows, shard.schema, allowed), body.on)
        for clause in body.clauses:
            found = _with_clause(found, clause, shard.schema)
        return found.execute(**options)

    return await _with_json(request, _Merge, (read_time, token), done)


async def _with_rows(
    request: Request,
    form: str | None,
    how: tuple[int | None, str | None],
    work: Callable[[Shard, pa.Table, dict[str, Any]], Edited],
    schema_of: Callable[[ShardSchema, bytes, str, Allowance], ShardSchema] | None = None,
) -> Response:
    service, options, principal = service_of(request), _options(request, how), principal_of(request)
    chosen = rows.format_of(request.headers.get("content-type"), form)

    def read(shard: Shard, data: bytes) -> Edited:
        with service.allowance() as allowed, unless_landed(shard.open_writer(), options["token"]):
            schema = shard.schema if schema_of is None else schema_of(shard.schema, data, chosen, allowed)
            table = rows.read(data, chosen, schema, service.limits.rows_max, allowed)
            if DIFF in table.schema.names and pc.all(pc.equal(table.column(DIFF), 1)).as_py() is not False:
                table = table.drop_columns([DIFF])  # no row has to give it
            service.quotas.rows(principal, table.num_rows)
            return work(shard, table, options)

    return await worked_with_body(request, service.limits.rows_bytes_max, read)


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
            body = read_as(kind)(decode_body(data, allowed.spend, is_exact=is_exact))
            return work(shard, body, options, allowed)

    return await worked_with_body(request, service.limits.rows_bytes_max, read)


def _options(request: Request, how: tuple[int | None, str | None]) -> dict[str, Any]:
    read_time, token = how
    return {"read_time": read_time, "token": token_of(request, token)}


def _values(given: dict[str, Any], schema: ShardSchema) -> dict[str, Any]:
    """A value for each of these columns, as rows in JSON give them. Raises InvalidUsage."""
    if not given:
        raise InvalidUsage('set must give values by the names of columns, such as {"state": "paid"}')
    fields = pa.schema([schema.arrow.field(name).with_nullable(True) for name in schema.columns(given)])
    found = _read("set has a value that does not fit its column", [given], fields)
    return {name: found.column(name)[0] for name in fields.names}


def _source(given: list[Any], schema: ShardSchema, allowed: Allowance) -> list[dict[str, Any]]:
    """Rows of a merge, with those of the shard's columns as it has them, and any others. Raises InvalidUsage."""
    if not all(isinstance(row, dict) for row in given):
        raise InvalidUsage('rows must be a list of rows, such as [{"id": 7, "amount": 5}]')
    known = [name for name in dict.fromkeys(name for row in given for name in row) if name in schema.arrow.names]
    fields = pa.schema([schema.arrow.field(name).with_nullable(True) for name in known])
    ours = [{name: row[name] for name in known if name in row} for row in given]
    read = _read("a row cannot be read", ours, fields, allowed.spend).to_pylist() if known else ours
    pairs = zip(given, read, strict=True)
    return [{name: mine[name] if name in known else row[name] for name in row} for row, mine in pairs]


def _read(what: str, given: list[Any], fields: pa.Schema, spend: Spend | None = None) -> pa.Table:
    try:
        return rows_of_json(given, fields, spend)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise InvalidUsage(f"{what}: {str(error).splitlines()[0]}") from error


def _with_clause(merge: Merge, clause: _Clause, schema: ShardSchema) -> Merge:
    """The merge with one more clause. Raises InvalidUsage."""
    condition = clause.condition
    given = None if clause.set is None else _expressions(clause.set, schema)
    kinds: dict[tuple[str, str], Callable[[], Merge]] = {
        ("matched", "update"): lambda: merge.when_matched_update(given, condition),
        ("matched", "delete"): lambda: merge.when_matched_delete(condition),
        ("not matched", "insert"): lambda: merge.when_not_matched_insert(given, condition),
        ("not matched by source", "update"): lambda: merge.when_not_matched_by_source_update(given or {}, condition),
        ("not matched by source", "delete"): lambda: merge.when_not_matched_by_source_delete(condition),
    }
    made = kinds.get((clause.when, clause.then))
    if made is None or (given is not None and clause.then == "delete"):
        raise InvalidUsage(
            "a clause is one of: matched, update or delete; not matched, insert; not matched by source, update or "
            "delete"
        )
    return made()


def _expressions(sets: dict[str, _Value], schema: ShardSchema) -> dict[str, Any]:
    if not sets:
        raise InvalidUsage('set must give what each column becomes, such as {"amount": {"source": "amount"}}')
    schema.columns(sets)
    found: dict[str, Any] = {}
    for name, said in sets.items():
        if sum(one is not UNSET for one in (said.value, said.source, said.target)) != 1:
            raise InvalidUsage(f"column {name!r} becomes one of {{value}}, {{source}} or {{target}}")
        if isinstance(said.source, str):
            found[name] = source(said.source)
        elif isinstance(said.target, str):
            found[name] = target(said.target)
        else:
            found[name] = _values({name: said.value}, schema)[name]
    return found
