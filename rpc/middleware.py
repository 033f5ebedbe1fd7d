"""The outermost layer of every request: its id, who asks, the shard in its path, its errors, counters and log line.

A plain ASGI layer. Plain requests for the hot routes (one command, a post of rows) go straight to their handlers,
without FastAPI's routing and validation.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from persist.core.errors import Corruption, Indeterminate, PersistError, Unauthorized
from persist.telemetry.metrics import REASON_MAX
from persist.telemetry.tracing import TRACEPARENT, TraceSpan, begin_request
from rpc import csrf
from rpc.app_state import Service
from rpc.audit import MANY, AuditEntry, did
from rpc.auth import ANYBODY, MAINTENANCE, STRANGER, Principal, has_token, label_of
from rpc.concurrency_limits import CALLER
from rpc.connection_limits import network_of
from rpc.errors import CLIENT_GONE, TOLD, from_bug, problem
from rpc.http_protocol import CONNECTION, REFUSED, peer_in
from rpc.quotas import CHARGED, QuotaFull
from rpc.route_table import ROUTE, SHARD, Route
from rpc.routes import server_routes, table
from rpc.routes.parameters import check_scopes
from rpc.routes.table import TABLE

OPEN_PATHS = server_routes.PATHS | {route.path for route in TABLE.routes if route.scopes is None}
REFUSAL_PAUSE_S = 1.0  # for so long a request beyond a quota a second waits for its refusal
REQUEST_ID_HEADER = b"x-request-id"
LAG_HEADER = b"persist-lag-seconds"  # of a copy: for how long what it shows may lack what home has
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")
_log = logging.getLogger("persist.rpc")
_access = logging.getLogger("persist.access")


class Edge:
    """Wraps the app; `service` is what `create_app` made."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._pausing = 0  # requests that are to be told that they are too many

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tracer = self._service.location.sight.tracer
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif tracer is None or not scope["path"].startswith("/v1/"):
            await self._answered(scope, receive, send)
        else:
            given = dict(scope["headers"]).get(TRACEPARENT.encode(), b"").decode("latin-1")
            below = tracer.place_of(given) if given else None
            with tracer.span("persist.server", {}, kind="server", below=below) as span:
                await self._answered(scope, receive, send, span)

    async def _answered(self, scope: Scope, receive: Receive, send: Send, span: TraceSpan | None = None) -> None:
        """Answer a request, whatever becomes of it, and tell of it."""
        started = time.perf_counter()
        headers = dict(scope["headers"])
        request_id = self._request_id(headers)
        begin_request(request_id)
        scope["persist.received"] = sent = 0
        scope["persist.service"] = self._service
        shard = table.resolve(scope)  # type: ignore[arg-type]
        scope[ROUTE] = route = TABLE.find(scope["method"], _pattern(scope, shard))
        verb = _verb(scope, shard)
        status, answered = 0, False

        async def answering(message: Message) -> None:
            nonlocal status, answered, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                self._audit(scope, shard, status, request_id)
                added = (REQUEST_ID_HEADER, request_id.encode())
                message["headers"] = [*message.get("headers", ()), added, *_safe_headers(scope["path"])]
                if shard is not None and (lag_s := self._service.location.behind_s(shard[0])) is not None:
                    asking = scope.get("persist.principal")
                    if asking is not None and asking.sees(shard[0]):
                        message["headers"].append((LAG_HEADER, f"{lag_s:.3f}".encode()))
                if REFUSED in scope:
                    message["headers"].append((b"connection", b"close"))
            await send(message)
            if message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
                answered = answered or not message.get("more_body", False)

        charged: list[Callable[[], None]] = []
        CHARGED.set(charged)
        try:
            if REFUSED in scope:
                raise scope[REFUSED]
            csrf.check_host(scope["http_version"], headers)
            scope["persist.principal"] = principal = self._principal(scope, headers)
            self._check_page(scope, headers, principal)
            CALLER.set(self._caller(scope, principal))
            await self._admit(scope, principal, writes=route is not None and route.writes)
            await self._respond(route, scope, _counting(scope, receive), answering)
        except ClientDisconnect:
            status = status or CLIENT_GONE
        except Exception as raised:
            scope[TOLD] = error = _cause(raised)
            if not status:
                known = error if isinstance(error, PersistError) else from_bug()
                await problem(known)(scope, receive, answering)
            # An answer that has begun is cut off, which is the only way to tell: who serves us closes the connection.
        finally:
            if status in (0, CLIENT_GONE):  # nobody was there to take the answer
                self._audit(scope, shard, None, request_id)
            refused = scope.get(TOLD)
            is_refused = status >= 400  # what was done counts, also where its answer was cut off
            if charged and is_refused and isinstance(refused, PersistError) and not isinstance(refused, Indeterminate):
                for give_back in charged:
                    give_back()
            fields = (scope, shard, verb, status, request_id)
            self._told(fields, time.perf_counter() - started, sent, is_whole=answered)
            if span is not None:
                _describe(span, self._fields(*fields), scope.get(TOLD))
            if TOLD in scope:  # its frames know the request, and its body, which would stay until garbage is collected
                scope.pop(TOLD).__traceback__ = None

    async def _respond(self, route: Route | None, scope: Scope, receive: Receive, send: Send) -> None:
        """By the handler of the route itself where the request is a plain one, else by FastAPI."""
        arguments = None if route is None else route.arguments(scope["query_string"])
        if route is None or arguments is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        check_scopes(route, request)
        response = await route.handler(request, **arguments)
        await response(scope, receive, send)

    def _told(
        self, asked: tuple[Scope, tuple[str, str] | None, str, int, str], seconds: float, sent: int, *, is_whole: bool
    ) -> None:
        """Count the request, and log what has to be."""
        scope, _, verb, status, _ = asked
        metrics, principal = self._service.metrics, scope.get("persist.principal")
        metrics.observe(verb, status, seconds)
        metrics.asked(principal, scope["persist.received"], sent)
        if TOLD in scope:
            metrics.failed(verb, _kind(scope[TOLD]), principal)
            if isinstance(scope[TOLD], Corruption):
                self._service.location.sight.storms.count_corruption()
        if status >= 500 or (TOLD in scope and not is_whole):
            _log_failure(scope.get(TOLD), self._fields(*asked))
        if self._service.settings.access_log:
            _access.info("request", extra={**self._fields(*asked), "ms": round(seconds * 1000, 3)})

    async def _admit(self, scope: Scope, principal: Principal, *, writes: bool) -> None:
        """Raises QuotaFull, Forbidden. Who asks or writes too much is told after a pause: what is next waits, too."""
        quotas, limits = self._service.quotas, self._service.limits
        if quotas.look():
            _log.info("another file of quotas was read")
        if scope["path"] not in OPEN_PATHS:
            try:
                quotas.request(principal, writes=writes)
            except QuotaFull:
                if self._pausing < limits.connections_max:  # as many as there are, and some that have been closed
                    self._pausing += 1
                    try:
                        await asyncio.sleep(REFUSAL_PAUSE_S)
                    finally:
                        self._pausing -= 1
                raise

    def _audit(self, scope: Scope, shard: tuple[str, str] | None, status: int | None, request_id: str) -> None:
        """Write the audit's line, if this is a request of a token that changes something."""
        audit, principal = self._service.audit, scope.get("persist.principal")
        if not audit.is_on or principal is None or principal is MAINTENANCE:
            return
        found = did(scope, shard)
        if found is None:
            return
        what, detail = found
        address = scope["client"][0] if scope.get("client") else None
        name = None if shard is None else shard[0]
        audit.note(
            AuditEntry(label_of(principal), what, name, status, address, request_id, detail, tuple(scope.get(MANY, ())))
        )

    def _principal(self, scope: Scope, headers: dict[bytes, bytes]) -> Principal:
        if self._service.tokens is not None:
            given, is_open = headers.get(b"authorization"), scope["path"] in OPEN_PATHS
            if is_open and given is None:
                return STRANGER
            peer = peer_in(scope)
            try:
                return self._service.tokens.principal(None if given is None else given.decode("latin-1"), peer)
            except Unauthorized:
                if is_open:
                    return STRANGER
                raise
        return ANYBODY

    def _check_page(self, scope: Scope, headers: dict[bytes, bytes], principal: Principal) -> None:
        """Raises Forbidden, FormRefused: it was sent by a web page, or could have been."""
        if len(headers) != len(scope["headers"]):
            csrf.check_once(scope["headers"])
        takes_tokens = self._service.tokens is not None
        if not takes_tokens and not self._service.settings.insecure:
            csrf.check_local(headers)
        is_of_page = b"origin" in headers or b"sec-fetch-site" in headers
        if is_of_page and not (takes_tokens and b"authorization" in headers):
            csrf.check_site(scope["method"], headers)
        if scope["method"] not in csrf.SAFE_METHODS:
            # A browser shows a client certificate for whatever page asks; it sends no token by itself.
            is_told = b"authorization" in headers and has_token(principal)
            csrf.check_type(scope["method"], headers, has_token=is_told)
            csrf.check_encoding(headers)

    def _caller(self, scope: Scope, principal: Principal) -> str:
        """Whose share of the server a request takes: its token's, or its address's where it needs none.

        Without tokens all processes of this machine are one: what listens on loopback has no strangers.
        """
        if has_token(principal):
            owner = label_of(principal)
            connection = scope.get(CONNECTION)
            if connection is not None:
                try:
                    connection.belong(owner)
                except PersistError as error:
                    scope[REFUSED] = error
                    raise
            return owner
        host = scope["client"][0] if scope.get("client") else ""
        if self._service.tokens is None and (host.startswith("127.") or host == "::1"):
            return ""
        return network_of(host)

    def _request_id(self, headers: dict[bytes, bytes]) -> str:
        given = headers.get(REQUEST_ID_HEADER, b"").decode("latin-1")
        return given if _REQUEST_ID.match(given) else self._service.location.ids.uuid7()

    def _fields(
        self, scope: Scope, shard: tuple[str, str] | None, verb: str, status: int, request_id: str
    ) -> dict[str, object]:
        return {
            "request_id": request_id,
            "method": scope["method"],
            "verb": verb,
            "shard": shard[0][:256] if shard else None,
            "principal": getattr(scope.get("persist.principal"), "name", None),
            "status": status,
        }


def _safe_headers(path: str) -> Sequence[tuple[bytes, bytes]]:
    """Those of an answer: a file of the console says by itself what a browser may do with it."""
    return csrf.SAFE_HEADERS_OF_PAGES if path in server_routes.PATHS else csrf.SAFE_HEADERS


def _cause(error: Exception) -> Exception:
    """What went wrong. Starlette wraps what a handler could have told, had the answer not begun already."""
    cause = error.__cause__
    return cause if isinstance(error, RuntimeError) and isinstance(cause, PersistError) else error


def _counting(scope: Scope, receive: Receive) -> Receive:
    """`receive`, which counts the bytes of the body."""

    async def receiving() -> Message:
        message = await receive()
        scope["persist.received"] += len(message.get("body", b""))
        return message

    return receiving


def _kind(error: Exception | None) -> str:
    return error.kind if isinstance(error, PersistError) else PersistError.kind


def _describe(span: TraceSpan, fields: dict[str, object], error: Exception | None) -> None:
    """Tell a span what became of the request. A refusal of 4xx is no failure of ours."""
    for name in ("verb", "shard", "request_id"):
        span.tell(f"persist.{name}", str(fields[name] or ""))
    status = int(str(fields["status"]))
    span.tell("http.response.status_code", status)
    if error is not None and status >= 500:
        span.failed(_kind(error), str(error))


def _log_failure(error: Exception | None, fields: dict[str, object]) -> None:
    """The line by which a 5xx, or an answer that was cut off, is found by its request id. With the place of a bug."""
    bug = None if error is None or isinstance(error, PersistError) else error
    reason = f"{type(error).__name__}: {error}" if bug else str(error or "the answer tells no error")
    _log.error("request failed", exc_info=bug, extra={**fields, "kind": _kind(error), "reason": reason[:REASON_MAX]})


def _pattern(scope: Scope, shard: tuple[str, str] | None) -> str:
    """The path of a request as the table of routes has it."""
    if shard is None:
        return str(scope["path"])
    return f"{SHARD}/{shard[1]}" if shard[1] else SHARD


def _verb(scope: Scope, shard: tuple[str, str] | None) -> str:
    """What a request is counted as; one of few, whatever is asked for."""
    route: Route | None = scope[ROUTE]
    if route is not None:
        return route.label
    if shard is None:
        return "other"
    method = scope["method"] if scope["method"] in METHODS else "OTHER"
    return shard[1].partition("/")[0] or f"{method.lower()}-shard"
