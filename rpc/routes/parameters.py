"""Query parameters and bodies that several routes read, and the scope check of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
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
from persist.core import frontier as antichain
from persist.core.audit_log import Caller
from persist.core.errors import Forbidden, InvalidUsage
from persist.core.frontier import EMPTY, Antichain
from persist.core.ids import SeqNo, Token, check_shard_name, parse, token_of_key
from persist.core.named_holds import check_tag_name
from persist.core.shard_view import SeenVersion, ViewRequest
from persist.formats.http_messages import named_once
from persist.parts import EVERYTHING, Selection, ShardSchema
from persist.parts.column_types import EXACT_NUMBERS
from persist.parts.predicate import PREDICATE_CHARS_MAX
from persist.parts.python_values import decode_json_keys
from persist.parts.scan_spec import KEY_CHARS_MAX, Values, read_values
from rpc.app_state import principal_of, service_of, shard_of
from rpc.http_protocol import peer_in
from rpc.listen_frames import INFO, PURPOSE, said
from rpc.quotas import WithinQuotas
from rpc.route_table import BY_COMMAND, ROUTE, Route, route_of

# Query parameters that several routes read, the check that a request has no others, and bodies in JSON.


B = TypeVar("B", bound="JsonBody")
T = TypeVar("T")
KEY_LENGTH_MAX = 200
SEEN = "Persist-Seen"
_CLOSED = ("[]", "closed")

Frontier = Annotated[
    str, Query(description="A time (`7` or `[7]`), or `[]` for closed: no more.", examples=["7"], max_length=32)
]
Timestamp = Annotated[
    str | None,
    Query(
        description="A wall clock with its zone (RFC 3339), in the place of a time.",
        examples=["2030-01-01T12:00:00Z"],
        max_length=64,
    ),
]
Format = Annotated[
    str | None,
    Query(alias="format", description="arrow, parquet, ndjson or csv; else by the header.", examples=["ndjson"]),
]
IdempotencyToken = Annotated[
    str | None,
    Query(
        description="Makes a retry safe: repeat the request with the same token to learn or complete its outcome. "
        f"1 to {KEY_LENGTH_MAX} characters; or the header Idempotency-Key.",
        examples=["load-2030-01-01"],
    ),
]


SAID_PARAMETERS = [
    {
        "name": INFO,
        "in": "header",
        "schema": {"type": "string"},
        "example": '{"ticket": 4711}',
        "description": "What the history is to tell of this write: a JSON object of at most 4 KiB.",
    },
    {
        "name": PURPOSE,
        "in": "header",
        "schema": {"type": "string"},
        "example": "nightly load",
        "description": "What the history is to tell of the writer, percent-encoded.",
    },
]


class JsonBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a body in JSON may have."""


def read_as(kind: type[B]) -> Callable[[Any], B]:
    """What reads a value of JSON as a body of this kind. It raises InvalidUsage, which names the field."""

    def read(value: Any) -> B:
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            known = ", ".join(kind.__struct_fields__)
            raise InvalidUsage(f"the body must be a JSON object with {known}, as its types are: {error}") from error

    return read


def json_body(kind: type[JsonBody] | None, parameters: Sequence[Any] = (), **shown: Any) -> dict[str, Any]:
    """The JSON body of a route for the OpenAPI document; None: an object that its handler checks, or null.

    `parameters`: those that FastAPI does not see, such as headers. `shown`: `example` or `examples`.
    """
    schema: Any = {"type": "object", "nullable": True}
    if kind is not None:
        [found], definitions = msgspec.json.schema_components((kind,))
        schema = _inlined(found, definitions)
    content = {"application/json": {"schema": schema, **shown}}
    return {"parameters": list(parameters), "requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """A JSON schema with what it refers to in its place."""
    if isinstance(schema, list):
        return [_inlined(one, definitions) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(one, definitions) for name, one in schema.items()}


def caller_of(request: Request) -> Caller:
    """Who sends the request, and what they say for the commit history. Raises InvalidUsage."""
    return said(request.scope["persist.principal"], request.headers)


def asking_for(request: Request) -> Transport:
    """By what a handle writes for who sends the request: in their name, and within their quotas."""
    service = service_of(request)
    return WithinQuotas(service.transport, caller_of(request), service.quotas, principal_of(request))


IF_MATCH = {
    "name": "If-Match",
    "in": "header",
    "required": True,
    "schema": {"type": "string"},
    "example": '"1"',
    "description": "The version that the settings have now, as the header ETag of the GET tells it.",
}


def version_of(request: Request) -> int:
    """The version of the settings that the caller knows: `If-Match: "1"`. Raises InvalidUsage."""
    found = re.fullmatch(r'"?([0-9]{1,18})"?', ", ".join(request.headers.getlist("if-match")))
    if found is None or found[0].count('"') == 1:
        raise InvalidUsage('the header If-Match must have the version of the settings, as If-Match: "1"')
    return int(found[1])


def seen_of(request: Request) -> SeenVersion | None:
    """What the caller says it has read before: `Persist-Seen: SEQNO.COMMIT_ID`. Raises InvalidUsage."""
    text = request.headers.get(SEEN)
    return None if text is None else read_seen(text, SEEN)


def read_seen(text: str, header: str) -> SeenVersion:
    """Read `SEQNO.COMMIT_ID`. Raises InvalidUsage naming the header."""
    found = re.fullmatch(r"([0-9]{1,18})\.([0-9a-f]{32})", text)
    if not found:
        raise InvalidUsage(f"the header {header} has {text!r:.100}, where the seqno and the commit_id of a view belong")
    return SeenVersion(SeqNo(int(found.group(1))), found.group(2))


async def only_known(request: Request) -> None:
    """Raises InvalidUsage at a query parameter that the route does not have, or that comes twice, and at a key.

    A misspelt one would mean its default, and of two only one would be heeded. A key that nothing remembers would
    promise what does not hold: that the same key with another request is refused.
    """
    known = list(_query_parameters(request.scope["route"].dependant))
    for name in request.query_params:
        if len(request.query_params.getlist(name)) > 1:
            raise InvalidUsage(f"parameter {name[:100]!r} is given more than once; give it once")
        if name not in known:
            raise InvalidUsage(f"there is no parameter {name[:100]!r} here; there is {', '.join(known) or 'none'}")
    if "token" not in known and request.method not in ("GET", "HEAD") and "idempotency-key" in request.headers:
        raise InvalidUsage("this request takes no Idempotency-Key; leave it out: repeating the request is safe")


def _query_parameters(dependant: Dependant) -> Iterator[str]:
    """Names of the query parameters of a route, also of those that it reads by a function."""
    yield from (parameter.alias for parameter in dependant.query_params)
    for inner in dependant.dependencies:
        yield from _query_parameters(inner)


def frontier(text: str, name: str) -> Antichain:
    """Read `7`, `[7]`, `[]` or `closed`. Raises InvalidUsage naming the parameter."""
    if text in _CLOSED:
        return EMPTY
    found = re.fullmatch(r"([0-9]{1,19})|\[([0-9]{1,19})\]", text)
    if not found:
        raise InvalidUsage(f"parameter {name} is {text!r}; it must be a time such as 7, or [] for closed")
    return antichain.frontier(int(found.group(1) or found.group(2)))


def json_response(value: Any, headers: dict[str, str] | None = None) -> Response:
    """An answer in compact JSON."""
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json", headers=headers)


def _as_of(
    as_of: Annotated[int | None, Query(ge=0, description="The time; else the latest complete one.")] = None,
    timestamp: Timestamp = None,
) -> int | datetime | None:
    return _time_or_instant("as_of", as_of, timestamp)


def _read_at(
    as_of: Annotated[
        int | None, Query(ge=-1, description="The time; else the latest complete one. As of -1 a shard is empty.")
    ] = None,
    timestamp: Timestamp = None,
) -> int | datetime | None:
    return _time_or_instant("as_of", as_of, timestamp)


def _as_of_or_tag(
    at: Annotated[int | datetime | None, Depends(_read_at)],
    tag: Annotated[str | None, Query(description="A tag, in the place of a time.", max_length=128)] = None,
) -> int | datetime | str | None:
    if tag is None:
        return at
    if at is not None:
        raise InvalidUsage("the parameters tag and as_of or timestamp are both given; give one of them")
    return check_tag_name(tag)


def _at(
    at: Annotated[int | None, Query(ge=0, description="The time; else the latest complete one.")] = None,
    timestamp: Timestamp = None,
) -> int | datetime | None:
    return _time_or_instant("at", at, timestamp)


def _after(
    after: Annotated[int | None, Query(ge=-1, description="Updates at later times; else all of them.")] = None,
    timestamp: Timestamp = None,
) -> int | datetime | None:
    return _time_or_instant("after", after, timestamp)


def _key(description: str) -> Any:
    return Query(description=description, max_length=KEY_CHARS_MAX)


def _selecting(
    where: Annotated[
        str | None,
        Query(description="Only rows for which this is true.", examples=["amount > 1"], max_length=PREDICATE_CHARS_MAX),
    ] = None,
    columns: Annotated[str | None, Query(description="Names with commas; else all.")] = None,
    start_key: Annotated[
        str | None, _key("Only keys from this one on: the value of the first key column, or a JSON list of values.")
    ] = None,
    end_key: Annotated[str | None, _key("Only keys before this one, written so too.")] = None,
    key_prefix: Annotated[str | None, _key("Only keys with these first values; a last text may be cut.")] = None,
    key: Annotated[str | None, _key("Only this key: a JSON list, or the value of an only key column.")] = None,
) -> Selection:
    names = columns_of(columns)
    if where is not None:
        selection_of(where, None)  # it is not empty
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
    return None if text is None else read_values(f"parameter {name}", text, _once)


def _once(text: str) -> Any:
    return json.loads(text, object_pairs_hook=named_once, **EXACT_NUMBERS)


def _limited(
    selection: Annotated[Selection, Depends(_selecting)],
    limit: Annotated[
        int | None, Query(ge=0, le=LIMIT_MAX, description="At most so many rows, the first ones in key order.")
    ] = None,
    schema: Annotated[
        str, Query(description="now: the columns of today; then: those that the shard had as of the time.")
    ] = NOW,
) -> tuple[Selection, int | None]:
    return replace(selection, then=is_then("parameter schema", schema)), limit


def rows_body(description: str) -> dict[str, Any]:
    """The body of a route that takes rows, for the OpenAPI document."""
    content = {
        rows.MEDIA_TYPES["arrow"]: {"schema": {"type": "string", "format": "binary"}},
        rows.PARQUET: {"schema": {"type": "string", "format": "binary"}},
        rows.NDJSON: {"schema": {"type": "string"}, "example": '{"id": "a", "amount": 1}\n'},
        rows.CSV: {"schema": {"type": "string"}, "example": "id,amount\na,1\n"},
    }
    body = {"required": True, "description": description, "content": content}
    return {"parameters": SAID_PARAMETERS, "requestBody": body}


def on_shard(selection: Selection, schema: ShardSchema) -> Selection:
    """The selection with key values that the shard's columns can hold: bytes come in base64. Raises InvalidUsage."""
    if selection == EVERYTHING:
        return selection

    def read(values: Values | None) -> Values | None:
        return None if values is None else tuple(decode_json_keys(schema, [list(values)])[0])

    found = replace(
        selection,
        start_key=read(selection.start_key),
        end_key=read(selection.end_key),
        key_prefix=read(selection.key_prefix),
        key=read(selection.key),
    )
    if not found.then:  # of other columns the read itself tells
        found.on(schema)
    return found


Selecting = Annotated[Selection, Depends(_selecting)]
Limited = Annotated[tuple[Selection, int | None], Depends(_limited)]
AsOf = Annotated[int | datetime | None, Depends(_as_of)]
AsOfOrTag = Annotated[int | datetime | str | None, Depends(_as_of_or_tag)]
At = Annotated[int | datetime | None, Depends(_at)]
After = Annotated[int | datetime | None, Depends(_after)]


def _time_or_instant(name: str, time: int | None, timestamp: str | None) -> int | datetime | None:
    """The time or the wall clock that is asked for, of which there may be one. Raises InvalidUsage."""
    if timestamp is None:
        return time
    if time is not None:
        raise InvalidUsage(f"the parameters {name} and timestamp are both given; give one of them")
    return read_instant("parameter timestamp", timestamp)


def token_of(request: Request, parameter: str | None) -> Token | None:
    """The token that a client means: one that persist minted, or a free-form key. Raises InvalidUsage."""
    given = {*request.headers.getlist("idempotency-key"), *(() if parameter is None else (parameter,))}
    if not given:
        return None
    if len(given) > 1:
        raise InvalidUsage("the parameter token and the header Idempotency-Key differ; give one of them")
    [text] = given
    if not 1 <= len(text) <= KEY_LENGTH_MAX:
        raise InvalidUsage(f"a token or Idempotency-Key has 1 to {KEY_LENGTH_MAX} characters, not {len(text)}")
    try:
        return parse(Token, text)
    except InvalidUsage:
        return token_of_key(text)


# Whether a caller may ask for a route: the check before each handler, and again while an answer goes on.
#
# Handlers that find names of shards in bodies check these themselves. What a command needs stands with its class
# (`persist.core.command`).


async def allowed(request: Request) -> None:
    """Raises Forbidden unless the caller has a scope of the route, and sees the shard that the path names."""
    route: Route | None = request.scope[ROUTE]
    if route is None or request.scope["route"].endpoint is not route.handler:
        raise Forbidden(f"{request.method} {request.url.path} is not in the table of routes, and so it is not open")
    check_scopes(route, request)


def check_scopes(route: Route, request: Request) -> None:
    """As `allowed`, for a handler that FastAPI does not call."""
    if route.scopes is not None and route.scopes != BY_COMMAND:
        name = request.scope.get("persist.shard")
        principal_of(request).require_any(route.scopes, None if name is None else check_shard_name(name))


def still_allowed(request: Request) -> Callable[[], None]:
    """What raises Unauthorized, Forbidden once the caller would not be let in any more, as a token is taken away."""
    tokens, name, scopes = service_of(request).tokens, request.scope.get("persist.shard"), route_of(request).scopes
    given, peer = request.headers.get("authorization"), peer_in(request.scope)

    def check() -> None:
        if tokens is not None and scopes is not None:
            tokens.principal(given, peer).require_any(scopes, name)

    return check


# Long work on one shard through a handle, and what it came to as JSON.


class Told(Protocol):
    def to_json(self) -> dict[str, Any]: ...


async def with_shard(request: Request, work: Callable[[Shard], T]) -> T:
    """What the work on the shard of the request comes to, in the name of who asks."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    asking = asking_for(request)

    def done() -> T:
        view = asking.view(name, ViewRequest(with_batches=False))  # of a dropped shard too: it knows its tokens
        return work(Shard(asking, name, view, service.handles))

    return await service.work.run(done)


async def worked(request: Request, work: Callable[[Shard], Told]) -> Response:
    """As `with_shard`, for long work; responds with its result."""
    with service_of(request).snapshots:  # it takes as much memory as one
        found = await with_shard(request, work)
    return json_response(found.to_json())


async def worked_with_body(request: Request, bytes_max: int, work: Callable[[Shard, bytes], Told]) -> Response:
    """The same with the body of the request, which is held meanwhile."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    async with service.body(request, bytes_max) as data:
        principal = principal_of(request)
        service.quotas.rows(principal, 0)
        if not route_of(request).frees:
            service.quotas.room_for(principal, name)
        return await worked(request, lambda shard: work(shard, data))
