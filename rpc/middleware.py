"""The outermost layer of every request: request id, authentication, shard name, errors, counters and log line.

A plain ASGI layer. Simple requests for the hot routes (one command, a post of rows) go directly to their handlers,
without FastAPI's routing and validation.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from persist.core.errors import Corruption, Indeterminate, PersistError, Unauthorized
from persist.telemetry.metrics import REASON_MAX
from persist.telemetry.tracing import TraceSpan, begin_request
from rpc import csrf
from rpc.app_state import Service
from rpc.audit import SHARDS_KEY, describe_request
from rpc.auth import ANONYMOUS, MAINTENANCE, UNAUTHENTICATED, Principal, has_token, label_of
from rpc.concurrency_limits import CALLER
from rpc.errors import CLIENT_GONE, ERROR_KEY, from_bug, problem
from rpc.http_protocol import CONNECTION, REFUSED, network_of, peer_of_request
from rpc.quotas import REFUNDS, QuotaFull
from rpc.route import ROUTE, SHARD, Route
from rpc.routes import server_routes, table
from rpc.routes.parameters import check_scopes
from rpc.routes.table import TABLE

OPEN_PATHS = server_routes.PATHS | {route.path for route in TABLE.routes if route.scopes is None}
REFUSAL_PAUSE_S = 1.0  # before a request beyond a rate quota is refused
REQUEST_ID_HEADER = b"x-request-id"
LAG_HEADER = b"persist-lag-seconds"  # of a copy: the replication lag
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
METHODS = ("GET", "HEAD", "PUT", "POST", "DELETE")
_log = logging.getLogger("persist.rpc")
_access = logging.getLogger("persist.access")


class RequestMiddleware:
    """Wraps the app; `service` is that of `create_app`."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._pausing = 0  # requests that wait for their refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tracer = self._service.location.sight.tracer
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif tracer is None or not scope["path"].startswith("/v1/"):
            await self._handle(scope, receive, send)
        else:
            traceparent = dict(scope["headers"]).get(b"traceparent", b"").decode("latin-1")
            parent = tracer.place_of(traceparent) if traceparent else None
            with tracer.span("persist.server", {}, kind="server", below=parent) as span:
                await self._handle(scope, receive, send, span)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, span: TraceSpan | None = None) -> None:
        """Respond to a request, and record its outcome."""
        started = time.perf_counter()
        headers = dict(scope["headers"])
        given_id = headers.get(REQUEST_ID_HEADER, b"").decode("latin-1")
        request_id = given_id if _REQUEST_ID.match(given_id) else self._service.location.ids.uuid7()
        begin_request(request_id)
        scope["persist.received"] = sent = 0
        scope["persist.service"] = self._service
        shard = table.resolve(scope)  # type: ignore[arg-type]
        scope[ROUTE] = route = TABLE.find(scope["method"], _pattern(scope, shard))
        status, is_complete = 0, False

        async def sending(message: Message) -> None:
            nonlocal status, is_complete, sent
            if message["type"] == "http.response.start":
                status = message["status"]
                self._audit(scope, shard, status, request_id)
                added, is_page = (REQUEST_ID_HEADER, request_id.encode()), scope["path"] in server_routes.PATHS
                safe = csrf.SAFE_HEADERS_OF_PAGES if is_page else csrf.SAFE_HEADERS
                message["headers"] = [*message.get("headers", ()), added, *safe]
                if shard is not None and (lag_s := self._service.location.behind_s(shard[0])) is not None:
                    principal = scope.get("persist.principal")
                    if principal is not None and principal.sees(shard[0]):
                        message["headers"].append((LAG_HEADER, f"{lag_s:.3f}".encode()))
                if REFUSED in scope:
                    message["headers"].append((b"connection", b"close"))
            await send(message)
            if message["type"] == "http.response.body":
                sent += len(message.get("body", b""))
                is_complete = is_complete or not message.get("more_body", False)

        refunds: list[Callable[[], None]] = []
        REFUNDS.set(refunds)
        try:
            if REFUSED in scope:
                raise scope[REFUSED]
            csrf.check_host(scope["http_version"], headers)
            scope["persist.principal"] = caller = self._authenticate(scope, headers)
            self._check_page(scope, headers, caller)
            CALLER.set(self._caller(scope, caller))
            await self._admit(scope, caller, writes=route is not None and route.writes)
            await self._respond(route, scope, _counting(scope, receive), sending)
        except ClientDisconnect:
            status = status or CLIENT_GONE
        except Exception as raised:
            scope[ERROR_KEY] = error = _cause(raised)
            if not status:
                known = error if isinstance(error, PersistError) else from_bug()
                await problem(known)(scope, receive, sending)
            # A response that has begun can only be cut off: uvicorn closes the connection.
        finally:
            if status in (0, CLIENT_GONE):  # the client disconnected before the response
                self._audit(scope, shard, None, request_id)
            if status >= 400:  # work that was done counts, even if its response was cut off
                _refund(refunds, scope.get(ERROR_KEY))
            fields: dict[str, Any] = {
                "request_id": request_id,
                "method": scope["method"],
                "verb": _verb(scope, shard),
                "shard": shard[0][:256] if shard else None,
                "principal": getattr(scope.get("persist.principal"), "name", None),
                "status": status,
            }
            self._record(scope, fields, time.perf_counter() - started, sent, is_complete=is_complete)
            if span is not None:
                _describe(span, fields, scope.get(ERROR_KEY))
            if ERROR_KEY in scope:  # its traceback would keep the request body until a garbage collection
                scope.pop(ERROR_KEY).__traceback__ = None

    async def _respond(self, route: Route | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the handler of the route directly for a simple request, else FastAPI."""
        arguments = None if route is None else route.arguments(scope["query_string"])
        if route is None or arguments is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        check_scopes(route, request)
        response = await route.handler(request, **arguments)
        await response(scope, receive, send)

    def _record(self, scope: Scope, fields: dict[str, Any], seconds: float, sent: int, *, is_complete: bool) -> None:
        """Count the request, and log failures and accesses."""
        verb, status = fields["verb"], fields["status"]
        metrics, principal = self._service.metrics, scope.get("persist.principal")
        metrics.observe(verb, status, seconds)
        metrics.tokens.observe(label_of(principal), scope["persist.received"], sent)
        if ERROR_KEY in scope:
            metrics.count_error(verb, _kind(scope[ERROR_KEY]), principal)
            if isinstance(scope[ERROR_KEY], Corruption):
                self._service.location.sight.storms.count_corruption()
        if status >= 500 or (ERROR_KEY in scope and not is_complete):
            _log_failure(scope.get(ERROR_KEY), fields)
        if self._service.settings.access_log:
            _access.info("request", extra={**fields, "ms": round(seconds * 1000, 3)})

    async def _admit(self, scope: Scope, principal: Principal, *, writes: bool) -> None:
        """Raises QuotaFull, Forbidden. Requests beyond a rate are refused after a pause, to slow the caller down."""
        quotas, limits = self._service.quotas, self._service.limits
        if quotas.reload():
            _log.info("the quotas file was reloaded")
        if scope["path"] not in OPEN_PATHS:
            try:
                quotas.count_request(principal, writes=writes)
            except QuotaFull:
                if self._pausing < limits.connections_max:
                    self._pausing += 1
                    try:
                        await asyncio.sleep(REFUSAL_PAUSE_S)
                    finally:
                        self._pausing -= 1
                raise

    def _audit(self, scope: Scope, shard: tuple[str, str] | None, status: int | None, request_id: str) -> None:
        """Write a line to the audit log if the request changes something and has a token."""
        audit, principal = self._service.audit, scope.get("persist.principal")
        if not audit.is_on or principal is None or principal is MAINTENANCE:
            return
        described = describe_request(scope, shard)
        if described is None:
            return
        what, detail = described
        audit.note(
            what,
            None if shard is None else shard[0],
            detail,
            scope.get(SHARDS_KEY, ()),
            token=label_of(principal),
            status=status,
            address=scope["client"][0] if scope.get("client") else None,
            request_id=request_id,
        )

    def _authenticate(self, scope: Scope, headers: dict[bytes, bytes]) -> Principal:
        if self._service.tokens is not None:
            header, is_open = headers.get(b"authorization"), scope["path"] in OPEN_PATHS
            if is_open and header is None:
                return UNAUTHENTICATED
            peer = peer_of_request(scope)
            try:
                return self._service.tokens.principal(None if header is None else header.decode("latin-1"), peer)
            except Unauthorized:
                if is_open:
                    return UNAUTHENTICATED
                raise
        return ANONYMOUS

    def _check_page(self, scope: Scope, headers: dict[bytes, bytes], principal: Principal) -> None:
        """Raises Forbidden, FormRefused if a web page sent the request, or could have sent it."""
        if len(headers) != len(scope["headers"]):
            csrf.check_once(scope["headers"])
        takes_tokens = self._service.tokens is not None
        if not takes_tokens and not self._service.settings.insecure:
            csrf.check_local(headers)
        is_of_page = b"origin" in headers or b"sec-fetch-site" in headers
        if is_of_page and not (takes_tokens and b"authorization" in headers):
            csrf.check_site(scope["method"], headers)
        if scope["method"] not in csrf.SAFE_METHODS:
            # A browser presents a client certificate for any page, but it never adds a token.
            has_header_token = b"authorization" in headers and has_token(principal)
            csrf.check_type(scope["method"], headers, has_token=has_header_token)
            csrf.check_encoding(headers)

    def _caller(self, scope: Scope, principal: Principal) -> str:
        """Whose share of the server a request uses: that of its token, or of its address if it needs none.

        Without tokens, all processes of this machine are unlimited: the server listens on loopback only.
        """
        if has_token(principal):
            owner = label_of(principal)
            connection = scope.get(CONNECTION)
            if connection is not None:
                try:
                    connection.assign_owner(owner)
                except PersistError as error:
                    scope[REFUSED] = error
                    raise
            return owner
        host = scope["client"][0] if scope.get("client") else ""
        if self._service.tokens is None and (host.startswith("127.") or host == "::1"):
            return ""
        return network_of(host)


def _refund(refunds: list[Callable[[], None]], error: Exception | None) -> None:
    """Refund a request, unless it may have happened."""
    if isinstance(error, PersistError) and not isinstance(error, Indeterminate):
        for refund in refunds:
            refund()


def _cause(error: Exception) -> Exception:
    """The original error. Starlette wraps an error for which a handler exists if the response has begun already."""
    cause = error.__cause__
    return cause if isinstance(error, RuntimeError) and isinstance(cause, PersistError) else error


def _counting(scope: Scope, receive: Receive) -> Receive:
    """`receive` that counts the bytes of the body."""

    async def receiving() -> Message:
        message = await receive()
        scope["persist.received"] += len(message.get("body", b""))
        return message

    return receiving


def _kind(error: Exception | None) -> str:
    return error.kind if isinstance(error, PersistError) else PersistError.kind


def _describe(span: TraceSpan, fields: dict[str, Any], error: Exception | None) -> None:
    """Record the outcome of a request in a span. A refusal (4xx) is not a failure of the server."""
    for name in ("verb", "shard", "request_id"):
        span.tell(f"persist.{name}", fields[name] or "")
    span.tell("http.response.status_code", fields["status"])
    if error is not None and fields["status"] >= 500:
        span.failed(_kind(error), str(error))


def _log_failure(error: Exception | None, fields: dict[str, Any]) -> None:
    """Log a 5xx or aborted response with its request id, and with the traceback of a bug."""
    bug = None if error is None or isinstance(error, PersistError) else error
    reason = f"{type(error).__name__}: {error}" if bug else str(error or "the response contains no error")
    _log.error("request failed", exc_info=bug, extra={**fields, "kind": _kind(error), "reason": reason[:REASON_MAX]})


def _pattern(scope: Scope, shard: tuple[str, str] | None) -> str:
    """The path of a request as in the table of routes."""
    if shard is None:
        return str(scope["path"])
    return f"{SHARD}/{shard[1]}" if shard[1] else SHARD


def _verb(scope: Scope, shard: tuple[str, str] | None) -> str:
    """The label of a request for metrics, from a fixed set."""
    route: Route | None = scope[ROUTE]
    if route is not None:
        return route.label
    if shard is None:
        return "other"
    method = scope["method"] if scope["method"] in METHODS else "OTHER"
    return shard[1].partition("/")[0] or f"{method.lower()}-shard"
