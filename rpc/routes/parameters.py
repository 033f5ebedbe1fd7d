"""Query parameters and bodies that several routes read, scope checks, and work on the shard of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from fastapi import Depends, Query, Request
from fastapi.dependencies.models import Dependant
from starlette.responses import Response

from persist.client.arguments import columns_of
from persist.client.read_api import LIMIT_MAX, NOW, is_then, selection_of
from persist.client.shard import Shard
from persist.client.timestamps import read_instant
from persist.client.transport import Transport
from persist.codecs import rows
from persist.core import commands as c
from persist.core import frontier as antichain
from persist.core.audit_log import Caller
from persist.core.errors import Forbidden, InvalidUsage
from persist.core.frontier import EMPTY, TIME_MAX, Antichain
from persist.core.ids import TOKEN_CHARS_MAX, SeqNo, Token, check_shard_name, given_token
from persist.core.named_holds import check_tag_name
from persist.core.shard_view import SeenVersion, ViewRequest
from persist.formats.http_messages import named_once, result_to_json
from persist.parts import EVERYTHING, Selection, ShardSchema
from persist.parts.exact_numbers import EXACT_NUMBERS
from persist.parts.predicate import PREDICATE_CHARS_MAX
from persist.parts.python_values import decode_json_keys
from persist.parts.scan_spec import KEY_CHARS_MAX, Values, read_values
from rpc.app_state import principal_of, service_of, shard_of
from rpc.http_protocol import peer_of_request
from rpc.listen_frames import INFO, PURPOSE, read_caller
from rpc.quotas import WithinQuotas
from rpc.route import BY_COMMAND, ROUTE, Route, route_of

# Query parameters and bodies.


B = TypeVar("B", bound="JsonBody")
T = TypeVar("T")
SEEN = "Persist-Seen"
_CLOSED = ("[]", "closed")

Frontier = Annotated[
    str, Query(description="A time (`7` or `[7]`), or `[]` for closed: no more writes.", examples=["7"], max_length=32)
]
Timestamp = Annotated[
    str | None,
    Query(
        description="A wall clock with a time zone (RFC 3339) instead of a time.",
        examples=["2030-01-01T12:00:00Z"],
        max_length=64,
    ),
]
Format = Annotated[
    str | None,
    Query(alias="format", description="arrow, parquet, ndjson or csv; default: by the header.", examples=["ndjson"]),
]
IdempotencyToken = Annotated[
    str | None,
    Query(
        description="Makes retries safe: repeat the request with the same token to learn or complete its outcome. "
        f"1 to {TOKEN_CHARS_MAX} characters; alternatively the header Idempotency-Key.",
        examples=["load-2030-01-01"],
    ),
]


def _header(name: str, example: str, description: str, **more: Any) -> dict[str, Any]:
    """The OpenAPI description of a header."""
    schema = {"type": "string"}
    return {"name": name, "in": "header", **more, "schema": schema, "example": example, "description": description}


CALLER_PARAMETERS = [
    _header(INFO, '{"ticket": 4711}', "Information for the commit history: a JSON object of at most 4 KiB."),
    _header(PURPOSE, "nightly load", "The purpose of the write for the commit history, percent-encoded."),
]


class JsonBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of a JSON body."""


def body_reader(kind: type[B]) -> Callable[[Any], B]:
    """Returns a function that converts a JSON value to this type. It raises InvalidUsage naming the field."""

    def read(value: Any) -> B:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            fields = ", ".join(kind.__struct_fields__)
            raise InvalidUsage(f"the body must be a JSON object with {fields} of the right types: {error}") from error

    return read


def json_body(kind: type[JsonBody] | None, parameters: Sequence[Any] = (), **shown: Any) -> dict[str, Any]:
    """The OpenAPI description of a JSON body; None: an object that the handler validates, or null.

    `parameters`: those that FastAPI does not know, such as headers. `shown`: `example` or `examples`.
    """
    schema: Any = {"type": "object", "nullable": True}
    if kind is not None:
        [outer], definitions = msgspec.json.schema_components((kind,))
        schema = _inlined(outer, definitions)
    content = {"application/json": {"schema": schema, **shown}}
    return {"parameters": list(parameters), "requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """A JSON schema with all references replaced by their definitions."""
    if isinstance(schema, list):
        return [_inlined(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(item, definitions) for name, item in schema.items()}


def caller_of(request: Request) -> Caller:
    """The sender of the request with its commit information. Raises InvalidUsage."""
    return read_caller(request.scope["persist.principal"], request.headers)


def transport_for(request: Request) -> Transport:
    """A transport that commits on behalf of the sender of the request, within its quotas."""
    service = service_of(request)
    return WithinQuotas(service.transport, caller_of(request), service.quotas, principal_of(request))


IF_MATCH = _header(
    "If-Match", '"1"', "The current version of the settings, from the header ETag of the GET.", required=True
)


def version_of(request: Request) -> int:
    """The expected version of the settings: `If-Match: "1"`. Raises InvalidUsage."""
    match = re.fullmatch(r'"?([0-9]{1,18})"?', ", ".join(request.headers.getlist("if-match")))
    if match is None or match[0].count('"') == 1:
        raise InvalidUsage('the header If-Match must have the version of the settings, as If-Match: "1"')
    return int(match[1])


def seen_of(request: Request) -> SeenVersion | None:
    """The version that the client has read before: `Persist-Seen: SEQNO.COMMIT_ID`. Raises InvalidUsage."""
    text = request.headers.get(SEEN)
    return None if text is None else read_seen(text, SEEN)


def read_seen(text: str, header: str) -> SeenVersion:
    """Read `SEQNO.COMMIT_ID`. Raises InvalidUsage naming the header."""
    match = re.fullmatch(r"([0-9]{1,18})\.([0-9a-f]{32})", text)
    if not match:
        raise InvalidUsage(f"the header {header} has {text!r:.100}; it must have the seqno and commit_id of a view")
    return SeenVersion(SeqNo(int(match[1])), match[2])


async def check_query(request: Request) -> None:
    """Raises InvalidUsage for a query parameter that is unknown or occurs twice, and for an unsupported key.

    Ignoring a misspelt parameter would apply its default. Ignoring an Idempotency-Key would promise that its reuse for
    another request is refused.
    """
    known = list(_query_parameters(request.scope["route"].dependant))
    for name in request.query_params:
        if len(request.query_params.getlist(name)) > 1:
            raise InvalidUsage(f"parameter {name[:100]!r} occurs more than once; give it once")
        if name not in known:
            raise InvalidUsage(f"unknown parameter {name[:100]!r}; this request takes {', '.join(known) or 'none'}")
    if "token" not in known and request.method not in ("GET", "HEAD") and "idempotency-key" in request.headers:
        raise InvalidUsage("this request takes no Idempotency-Key; omit it: repeating the request is safe")


def _query_parameters(dependant: Dependant) -> Iterator[str]:
    """Names of the query parameters of a route and its dependencies."""
    yield from (parameter.alias for parameter in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _query_parameters(inner)


def frontier(text: str, name: str) -> Antichain:
    """Read `7`, `[7]`, `[]` or `closed`. Raises InvalidUsage naming the parameter."""
    if text in _CLOSED:
        return EMPTY
    match = re.fullmatch(r"([0-9]{1,19})|\[([0-9]{1,19})\]", text)
    if not match:
        raise InvalidUsage(f"parameter {name} is {text!r}; it must be a time such as 7, or [] for closed")
    return antichain.frontier(int(match[1] or match[2]))


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    """A response in compact JSON."""
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json", headers=headers)


def _time_parameter(name: str, least: int, description: str) -> Any:
    """Reads a time from the query parameter `name`, or a wall clock from `timestamp`. Raises InvalidUsage."""

    def read(
        time: int | None = Query(None, alias=name, ge=least, le=TIME_MAX, description=description),
        timestamp: Timestamp = None,
    ) -> int | datetime | None:
        if timestamp is None:
            return time
        if time is not None:
            raise InvalidUsage(f"the parameters {name} and timestamp are both given; give one of them")
        return read_instant("parameter timestamp", timestamp)

    return Depends(read)


_READ_AT = _time_parameter("as_of", -1, "The time; default: the latest complete one. At -1 a shard is empty.")


def _as_of_or_tag(
    at: Annotated[int | datetime | None, _READ_AT],
    tag: Annotated[str | None, Query(description="A tag instead of a time.", max_length=128)] = None,
) -> int | datetime | str | None:
    if tag is None:
        return at
    if at is not None:
        raise InvalidUsage("the parameters tag and as_of or timestamp are both given; give one of them")
    return check_tag_name(tag)


def _key(description: str) -> Any:
    return Query(description=description, max_length=KEY_CHARS_MAX)


def _selecting(
    where: Annotated[
        str | None,
        Query(description="A predicate for rows.", examples=["amount > 1"], max_length=PREDICATE_CHARS_MAX),
    ] = None,
    columns: Annotated[str | None, Query(description="Names of columns, comma-separated; default: all.")] = None,
    start_key: Annotated[
        str | None, _key("The first key: the value of the first key column, or a JSON list of values.")
    ] = None,
    end_key: Annotated[str | None, _key("The end of the keys, exclusive, in the same form.")] = None,
    key_prefix: Annotated[
        str | None, _key("The first values of keys; the last one, if a text, may be a prefix.")
    ] = None,
    key: Annotated[str | None, _key("One key: a JSON list, or the value of the only key column.")] = None,
) -> Selection:
    names = columns_of(columns)
    if where is not None:
        selection_of(where, None)  # rejects an empty one
    return Selection(
        where,
        _values("start_key", start_key),
        _values("end_key", end_key),
        _values("key_prefix", key_prefix),
        _values("key", key),
        None if names is None else tuple(names),
        from_text=True,
    )


def _values(name: str, text: str | None) -> Values | None:
    decode = partial(json.loads, object_pairs_hook=named_once, **EXACT_NUMBERS)
    return None if text is None else read_values(f"parameter {name}", text, decode)


def _limited(
    selection: Annotated[Selection, Depends(_selecting)],
    limit: Annotated[
        int | None, Query(ge=0, le=LIMIT_MAX, description="Maximum number of rows, the first ones in key order.")
    ] = None,
    schema: Annotated[
        str, Query(description="now: the current columns; then: those of the shard as of the time.")
    ] = NOW,
) -> tuple[Selection, int | None]:
    return replace(selection, then=is_then("parameter schema", schema)), limit


def rows_body(description: str) -> dict[str, Any]:
    """The OpenAPI description of the body of a route that takes rows."""
    content = {
        rows.MEDIA_TYPES["arrow"]: {"schema": {"type": "string", "format": "binary"}},
        rows.PARQUET: {"schema": {"type": "string", "format": "binary"}},
        rows.NDJSON: {"schema": {"type": "string"}, "example": '{"id": "a", "amount": 1}\n'},
        rows.CSV: {"schema": {"type": "string"}, "example": "id,amount\na,1\n"},
    }
    body = {"required": True, "description": description, "content": content}
    return {"parameters": CALLER_PARAMETERS, "requestBody": body}


def resolve_selection(selection: Selection, schema: ShardSchema) -> Selection:
    """The selection with key values of the shard's types: bytes are in base64. Raises InvalidUsage."""
    if selection == EVERYTHING:
        return selection

    def read(values: Values | None) -> Values | None:
        return None if values is None else tuple(decode_json_keys(schema, [list(values)])[0])

    resolved = replace(
        selection,
        start_key=read(selection.start_key),
        end_key=read(selection.end_key),
        key_prefix=read(selection.key_prefix),
        key=read(selection.key),
    )
    if not resolved.then:  # columns of an earlier schema are checked by the read
        resolved.on(schema)
    return resolved


Selecting = Annotated[Selection, Depends(_selecting)]
Limited = Annotated[tuple[Selection, int | None], Depends(_limited)]
AsOf = Annotated[int | datetime | None, _time_parameter("as_of", 0, "The time; default: the latest complete one.")]
AsOfOrTag = Annotated[int | datetime | str | None, Depends(_as_of_or_tag)]
At = Annotated[int | datetime | None, _time_parameter("at", 0, "The time; default: the latest complete one.")]
After = Annotated[int | datetime | None, _time_parameter("after", -1, "Only later updates; default: all of them.")]


def token_of(request: Request, parameter: str | None) -> Token | None:
    """The idempotency token of a request: one that persist minted, or a free-form key. Raises InvalidUsage."""
    texts = {*request.headers.getlist("idempotency-key"), *(() if parameter is None else (parameter,))}
    if not texts:
        return None
    if len(texts) > 1:
        raise InvalidUsage("the parameter token and the header Idempotency-Key differ; give one of them")
    return given_token(texts.pop())


# Authorization, before each handler and while a stream is sent. Handlers of bodies with names of shards check these
# themselves. What a command needs is declared with its class (`persist.core.command`).


async def check_allowed(request: Request) -> None:
    """Raises Forbidden unless the caller has a scope of the route, on the shard in the path."""
    route: Route | None = request.scope[ROUTE]
    if route is None or request.scope["route"].endpoint is not route.handler:
        raise Forbidden(f"{request.method} {request.url.path} is not in the table of routes")
    check_scopes(route, request)


def check_scopes(route: Route, request: Request) -> None:
    """As `check_allowed`, for a handler that is called without FastAPI."""
    if route.scopes is not None and route.scopes != BY_COMMAND:
        name = request.scope.get("persist.shard")
        principal_of(request).require_any(route.scopes, None if name is None else check_shard_name(name))


def authorization_check(request: Request) -> Callable[[], None]:
    """Returns a function that raises Unauthorized or Forbidden once the request would be refused."""
    tokens, name, scopes = service_of(request).tokens, request.scope.get("persist.shard"), route_of(request).scopes
    authorization, peer = request.headers.get("authorization"), peer_of_request(request.scope)

    def check() -> None:
        if tokens is not None and scopes is not None:
            tokens.principal(authorization, peer).require_any(scopes, name)

    return check


# Work on the shard of a request.


class JsonResult(Protocol):
    def to_json(self) -> dict[str, Any]: ...


async def commit(request: Request, command: c.Command) -> Response:
    """Commit a command on behalf of the sender; responds with its result."""
    result = await service_of(request).apply(shard_of(request), command, caller_of(request))
    return json_response(result_to_json(result))


async def run_on_shard(request: Request, work: Callable[[Shard], T]) -> T:
    """The result of blocking work with a handle of the shard on behalf of the sender."""
    service, name = service_of(request), shard_of(request)
    transport = transport_for(request)

    def run() -> T:
        view = transport.view(name, ViewRequest(with_batches=False))  # also of a dropped shard: it knows its tokens
        return work(Shard(transport, name, view, service.handles))

    return await service.work.run(run)


async def run_long(request: Request, work: Callable[[Shard], JsonResult]) -> Response:
    """As `run_on_shard`, for work that takes as much memory as a snapshot; responds with its result."""
    with service_of(request).snapshots:
        result = await run_on_shard(request, work)
    return json_response(result.to_json())


async def run_with_body(request: Request, bytes_max: int, work: Callable[[Shard, bytes], JsonResult]) -> Response:
    """As `run_long`, with the body of the request."""
    service, name = service_of(request), shard_of(request)
    async with service.body(request, bytes_max) as data:
        principal = principal_of(request)
        service.quotas.count_rows(principal, 0)
        if not route_of(request).frees:
            service.quotas.check_room(principal, name)
        return await run_long(request, lambda shard: work(shard, data))
