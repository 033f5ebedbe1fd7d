"""Routes of shards: list, create, view, drop, commands, frontiers, settings, schemas, and maintenance on demand."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import Query, Request
from msgspec import UNSET
from starlette.responses import Response

from persist.client.embedded import OPTIMIZE, VACUUM, EmbeddedTransport
from persist.client.history_api import settings_json
from persist.client.many_shards import PAGE_MAX, check_dropped, drop_shards, summary_page
from persist.client.shard import Shard
from persist.client.transport import AsCaller
from persist.codecs.schema_json import EXAMPLE, read_changes, read_schema, write_schema
from persist.core import commands as c
from persist.core.commands import ADMIN, MAINTAIN, MANAGE, READ, WRITE
from persist.core.errors import InvalidUsage, UnknownShard
from persist.core.frontier import TIME_MAX
from persist.core.ids import ReaderId, ShardId, check_shard_name, critical_reader_id_of, parse
from persist.core.shard_phases import dropped
from persist.core.shard_settings import ShardSettings, history_ms
from persist.core.shard_view import ShardView, ViewRequest, view_of
from persist.core.state import SchemaRecord
from persist.formats.http_messages import RECORD, StagedRuns, decode_staged, encode_view, result_to_json, view_to_json
from persist.formats.records import encoded
from persist.parts import ShardSchema, current_schema
from persist.parts.constraint_checks import ConstraintChange, constraints_json
from persist.parts.schema_changes import Change
from rpc import command_endpoint
from rpc.app_state import WAIT_S_MAX, principal_of, service_of, shard_of
from rpc.audit import MOVE_CURSOR, MOVE_UPPER, SHARDS_KEY
from rpc.command_endpoint import bytes_max_of, commit_command
from rpc.prefix_usage import usage_of
from rpc.request_body import decode_record
from rpc.route import BY_COMMAND, Router
from rpc.routes.parameters import (
    IF_MATCH,
    Frontier,
    JsonBody,
    body_reader,
    caller_of,
    commit,
    frontier,
    json_body,
    json_response,
    run_on_shard,
    seen_of,
    version_of,
)
from rpc.shard_watcher import WAITS_MAX

router = Router(prefix="/v1", tags=["shards"])
NAMES_MAX = 1_000
SCHEMA_BYTES_MAX = 4 * 1024 * 1024
CLONE_BYTES_MAX = 4 * 1024
BATCHES_ON_THE_LOOP_MAX = 50  # a view with more is encoded on another thread


class _Create(JsonBody):
    """The columns as `fields`, or as `schema` and `key`."""

    fields: Any = UNSET
    schema: Any = UNSET
    key: Any = UNSET
    unique: Any = None
    checks: Any = None
    history: Any = UNSET


class _Drop(JsonBody):
    """The shards: `shards` or `prefix`; `confirm`: their number."""

    shards: tuple[str, ...] | None = None
    prefix: str | None = None
    confirm: int | None = None
    force: bool = False


class _Clone(JsonBody):
    """`source`: the shard to clone; `name`: the new shard; `keep_policies`: it keeps the retention policy."""

    source: str
    name: str
    keep_policies: bool = False


_CREATE_EXAMPLES = {
    "fields": {
        "summary": "A list of fields, for humans",
        "value": {
            "fields": [
                {"name": "id", "type": "string", "key": True, "nullable": False},
                {"name": "amount", "type": "int64"},
            ],
            "unique": True,
            "checks": {"positive": "amount > 0"},
        },
    },
    "schema": {
        "summary": "A serialized Arrow schema in base64, for programs",
        "value": {"schema": "/////…", "key": ["id"]},
    },
}
_COMMAND_BODY = {
    "requestBody": {"required": True, "content": {RECORD: {"schema": {"type": "string", "format": "binary"}}}}
}


@router.on("GET /shards", (READ,), "Names of shards, ascending, without dropped ones")
async def names(
    request: Request,
    prefix: Annotated[str, Query(max_length=260)] = "",
    after: Annotated[str, Query(max_length=260, description="The last name of the previous page.")] = "",
    limit: Annotated[int, Query(ge=1, le=NAMES_MAX)] = NAMES_MAX,
    details: Annotated[bool, Query(description="Include sizes and frontiers, with at most 100 a page.")] = False,
) -> dict[str, Any]:
    """With `details` each has its rows, bytes, since, upper, oldest instant and policy; `after`: of the next page."""
    service, principal = service_of(request), principal_of(request)
    principal.require_prefix(prefix)
    if details:
        query = (service.transport, service.handles, prefix, after, min(limit, PAGE_MAX))
        listed, following = await service.work.run(summary_page, *query)
        shards = [shard.to_json() for shard in listed]
        return {"shards": shards, "more": following is not None, **({"after": following} if following else {})}
    shard_names = await service.work.run(service.location.names, prefix, after, limit)
    return {"shards": shard_names, "more": len(shard_names) == limit}


@router.on(
    "POST /shards:delete",
    (ADMIN,),
    "Drop many shards, by a list or a prefix",
    audit="drop",
    audits_body=True,
    openapi_extra=json_body(_Drop, example={"prefix": "tmp/", "confirm": 12}),
)
async def delete_many(request: Request) -> Response:
    """Pass `shards`, or `prefix`, which only lists them without `confirm`, their number. An outcome for each."""
    service, principal = service_of(request), principal_of(request)
    body = await service.json(request, SCHEMA_BYTES_MAX, body_reader(_Drop))
    check_dropped(body.shards, body.prefix)
    for name in body.shards or ():
        principal.require(ADMIN, name)
    if body.prefix is not None:
        principal.require_prefix(body.prefix)
    transport, retry_s = AsCaller(service.transport, caller_of(request)), service.handles.write.retry_s
    dropping = await service.work.run(
        drop_shards, transport, retry_s, body.shards, body.prefix, body.confirm, body.force
    )
    request.scope[SHARDS_KEY] = [outcome.shard for outcome in dropping.outcomes] if dropping.done else []
    return json_response(dropping.to_json())


@router.on(
    "PUT /shards/{name}",
    (WRITE,),
    "Create a shard, unless it exists with this schema",
    audit="create",
    audits_body=True,
    openapi_extra=json_body(_Create, examples=_CREATE_EXAMPLES),
)
async def create(
    request: Request,
    follows: Annotated[
        str | None,
        Query(description="The id of the dropped shard that it replaces; empty: none. Default: any.", max_length=33),
    ] = None,
) -> Response:
    service, name = service_of(request), shard_of(request)
    service.check_home(name)
    schema, settings = await service.json(request, SCHEMA_BYTES_MAX, _new)
    if follows:
        parse(ShardId, follows)
    service.quotas.count_shard(principal_of(request), name)
    arguments = (service.transport, name, schema, follows, settings, caller_of(request))
    view = await service.work.run(EmbeddedTransport.create, *arguments)
    service.shard_ids.learn(name)
    return _view(request, view)


def _new(value: Any) -> tuple[SchemaRecord, ShardSettings | None]:
    """The schema, and the settings if given, of a new shard. Raises InvalidUsage."""
    body = body_reader(_Create)(value)
    columns = {"fields": body.fields, "schema": body.schema, "key": body.key}
    try:
        schema = read_schema({name: value for name, value in columns.items() if value is not UNSET})
        record = ConstraintChange.of(body.unique, None, body.checks).applied(schema).to_record()
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"the body is not a schema in JSON: {error}") from error
    return record, None if body.history is UNSET else ShardSettings(history_ms(body.history), version=1)


@router.on(
    "POST /clones",
    (WRITE,),
    "Clone a shard as of now, without copying rows",
    audit="clone",
    audits_body=True,
    openapi_extra=json_body(_Clone, example={"source": "orders", "name": "orders-test"}),
)
async def clone(request: Request) -> Response:
    service = service_of(request)
    body = await service.json(request, CLONE_BYTES_MAX, body_reader(_Clone))
    source, name = check_shard_name(body.source), check_shard_name(body.name)
    request.scope[SHARDS_KEY] = [source, name]
    for shard in (source, name):
        principal_of(request).require(WRITE, shard)
    service.check_home(name)
    service.quotas.count_shard(principal_of(request), name)
    if service.quotas.bounds_bytes(principal_of(request), name):
        size = await service.work.run(lambda: usage_of(service.location.machine(source).state())["bytes"])
        service.quotas.check_room(principal_of(request), name, size)
    arguments = (service.transport, source, name, body.keep_policies, caller_of(request))
    view = await service.work.run(EmbeddedTransport.clone, *arguments)
    service.shard_ids.learn(name)
    return _view(request, view)


@router.on("GET /shards/{name}", (READ,), "Frontiers and schemas; can wait until a time is complete")
async def view(  # noqa: PLR0913 - a query parameter each
    request: Request,
    past: Annotated[int | None, Query(ge=0, le=TIME_MAX, description="Wait until this time is complete.")] = None,
    timeout: Annotated[float, Query(ge=0, le=3600, description="Maximum seconds to wait.")] = 0.0,
    min_seqno: Annotated[int, Query(ge=0, description="A cached state from this seqno on suffices.")] = 0,
    lower: Annotated[str, Query(description="Omit batches that end at or before this time.")] = "0",
    batches: Annotated[bool, Query(description="Include batches in a record; JSON never does.")] = False,
    service_times: Annotated[bool, Query(description="Include the times that the service chose.")] = False,
    reader: Annotated[str | None, Query(description="Include the holds of this leased reader in a record.")] = None,
    tag: Annotated[str, Query(description="Include the time of this tag in a record.")] = "",
    details: Annotated[bool, Query(description="Include settings, tags and critical readers in a record.")] = False,
) -> Response:
    service, name = service_of(request), shard_of(request)
    from_time = frontier(lower, "lower")
    wait_s = min(timeout, WAIT_S_MAX)
    if service.watcher.waiting >= WAITS_MAX:
        wait_s = 0.0
    holder = parse(ReaderId, reader) if reader is not None else None
    wanted = ViewRequest(past, wait_s, min_seqno, from_time, batches, None, service_times, holder, tag, details)
    state = await service.watcher.state(name, wanted)
    if seen := seen_of(request):
        await service.work.run(service.location.machine(name).check_seen, state, seen)
    service.shard_ids.learn(name)
    if state.is_closed and request.headers.get("accept") != RECORD:  # a rich client reads it from the record
        raise UnknownShard(dropped(name))
    if batches and len(state.trace.batches) > BATCHES_ON_THE_LOOP_MAX:
        return await service.work.run(lambda: _view(request, view_of(state, wanted)))
    return _view(request, view_of(state, wanted))


def _view(request: Request, view: ShardView) -> Response:
    if request.headers.get("accept") == RECORD:
        return Response(encode_view(view), media_type=RECORD)
    return json_response({**view_to_json(view), "fields": write_schema(view.schemas)})


@router.on("DELETE /shards/{name}", (ADMIN,), "Drop a shard; maintenance then deletes its data", audit="drop")
async def drop(
    request: Request, force: Annotated[bool, Query(description="Even if readers hold it.")] = False
) -> Response:
    return await commit(request, c.Drop(force))


@router.on(
    "POST /shards/{name}/commands",
    BY_COMMAND,
    "Commit one command of the protocol",
    direct=True,
    openapi_extra=_COMMAND_BODY,
)
async def commands(request: Request) -> Response:
    service, name, principal = service_of(request), shard_of(request), principal_of(request)
    async with service.body(request, bytes_max_of(principal, name)) as data:
        result = await commit_command(service, name, principal, data, caller_of(request), request.scope)
        return Response(result, media_type=RECORD)


@router.on("POST /shards/{name}/receipts", (WRITE, MAINTAIN), "Validate staged parts", openapi_extra=_COMMAND_BODY)
async def receipts(request: Request) -> Response:
    """The parts with receipts, so that a later commit through this server skips validation. Changes nothing."""
    service, name = service_of(request), shard_of(request)
    async with service.body(request, command_endpoint.COMMAND_BYTES_MAX) as data:
        with service.allowance() as allowed:
            runs = await decode_record(service.work, data, partial(decode_staged, bad=InvalidUsage), allowed)
            receipted = await service.work.run(service.location.machine(name).receipted, runs)
        return Response(encoded(StagedRuns(receipted)), media_type=RECORD)


@router.on(
    "POST /shards/{name}/advance-upper",
    (MANAGE,),
    "Declare every time before `upper` complete, without rows",
    audit=MOVE_UPPER,
    closes_by="upper",
)
async def advance_upper(
    request: Request,
    upper: Frontier,
    force: Annotated[bool, Query(description="Even beyond 2^62, where clocks end.")] = False,
) -> Response:
    return await commit(request, c.AdvanceUpper(frontier(upper, "upper"), force=force))


@router.on(
    "POST /shards/{name}/downgrade-since", (MANAGE,), "Allow history before `since` to be forgotten", audit=MOVE_CURSOR
)
async def downgrade_since(
    request: Request,
    since: Frontier,
    cursor: Annotated[
        str, Query(min_length=1, max_length=256, description="The name of the hold to move.")
    ] = "default",
    force: Annotated[bool, Query(description="Even beyond the shard's upper, or `[]`.")] = False,
) -> Response:
    service, name = service_of(request), shard_of(request)
    target = frontier(since, "since")
    reader = critical_reader_id_of(cursor)
    # A new hold begins at the target, so that a refusal leaves none.
    hold = await service.apply(name, c.RegisterCriticalReader(reader, "", cursor, target, force))
    assert isinstance(hold, c.CriticalReaderState)
    command = c.CompareAndDowngradeSince(reader, hold.opaque, hold.opaque, target, force, hold.registered)
    return json_response(result_to_json(await service.apply(name, command)))


# Settings.

SETTINGS_BYTES_MAX = 64 * 1024


class _SettingsBody(JsonBody):
    history: str | None = None
    mark_every: str | None = None


@router.on("GET /shards/{name}/settings", (READ,), "The settings of a shard")
async def settings(request: Request) -> Response:
    return _settings_response((await service_of(request).state(shard_of(request))).settings)


@router.on(
    "PUT /shards/{name}/settings",
    (MANAGE,),
    "Change the settings of a shard",
    audit="settings",
    audits_body=True,
    openapi_extra=json_body(_SettingsBody, [IF_MATCH], example={"history": "30d", "mark_every": "1s"}),
)
async def configure(request: Request) -> Response:
    """Omitted settings are unchanged. 409 if the current version is not that of If-Match."""
    version = version_of(request)
    body = await service_of(request).json(request, SETTINGS_BYTES_MAX, body_reader(_SettingsBody))

    def work(shard: Shard) -> ShardSettings:
        return shard.configure(history=body.history, mark_every=body.mark_every, expected_version=version)

    return _settings_response(await run_on_shard(request, work))


def _settings_response(settings: ShardSettings) -> Response:
    return json_response(settings_json(settings), {"etag": f'"{settings.version}"'})


# Columns.

CHANGES_BYTES_MAX = 1024 * 1024


class _Columns(JsonBody):
    changes: list[Any]


@router.on(
    "POST /shards/{name}/schema",
    (MANAGE,),
    "Change the columns of a shard, by one commit",
    audit="evolve schema",
    audits_body=True,
    openapi_extra=json_body(_Columns, example={"changes": EXAMPLE}),
)
async def alter(request: Request) -> Response:
    """The changes are applied in order, all or none. `fields` are the resulting columns."""
    changes = await service_of(request).json(request, CHANGES_BYTES_MAX, _read_changes)

    def work(shard: Shard) -> dict[str, Any]:
        shard.alter(*changes)
        view = shard.view()
        return {"schema_id": view.schema_id, "fields": write_schema(view.schemas)}

    return json_response(await run_on_shard(request, work))


def _read_changes(body: Any) -> list[Change]:
    return read_changes(body_reader(_Columns)(body).changes)


# Constraints.


class _Constraints(JsonBody):
    """Omitted ones are unchanged."""

    unique: Any = UNSET
    not_null: Any = UNSET
    checks: Any = UNSET


_EXAMPLE = {"unique": True, "not_null": ["amount"], "checks": {"positive": "amount > 0"}}


@router.on("GET /shards/{name}/constraints", (READ,), "The constraints of a shard")
async def constraints(request: Request) -> Response:
    state = await service_of(request).state(shard_of(request))
    return _constraints_response(current_schema(state.schemas)[1])


@router.on(
    "PUT /shards/{name}/constraints",
    (MANAGE,),
    "Change the constraints of a shard",
    audit="set constraints",
    audits_body=True,
    openapi_extra=json_body(_Constraints, example=_EXAMPLE),
)
async def change(request: Request) -> Response:
    """Omitted constraints are unchanged. 400 if existing rows violate the new ones: nothing is changed then."""
    constraints = await service_of(request).json(request, CHANGES_BYTES_MAX, _read_constraints)
    return _constraints_response(await run_on_shard(request, lambda shard: shard.set_constraints(**constraints)))


def _read_constraints(body: Any) -> dict[str, Any]:
    """The constraints in a body. Raises InvalidUsage."""
    constraints: dict[str, Any] = msgspec.to_builtins(body_reader(_Constraints)(body))
    if not constraints:
        raise InvalidUsage('the body must be a JSON object such as {"unique": true}')
    return constraints


def _constraints_response(schema: ShardSchema) -> Response:
    return json_response(constraints_json(schema))


# Maintenance of one shard on demand. The server's own maintenance does the same regularly.

maintenance_router = Router(prefix="/v1/shards", tags=["maintenance"])


@maintenance_router.on("POST /{name}/optimize", (MAINTAIN,), "Merge batches now", audit="optimize")
async def optimize(request: Request) -> Response:
    """A few merges by this server; rows are unchanged. Repeat the request while `more` is true."""
    return await _maintain(request, OPTIMIZE)


@maintenance_router.on("POST /{name}/vacuum", (MAINTAIN,), "Delete garbage now", audit="vacuum")
async def vacuum(request: Request) -> Response:
    """Deletes blobs and log entries that neither history nor readers need. Repeat the request while `more` is true."""
    return await _maintain(request, VACUUM)


async def _maintain(request: Request, verb: str) -> Response:
    service, name = service_of(request), shard_of(request)
    with service.snapshots:  # a merge takes as much memory as one
        return json_response(await service.work.run(partial(service.transport.maintain, name, verb)))
