"""Errors as HTTP: the status of each error class, and problem+json responses."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from persist.codecs.decode_limits import BodyTooLarge
from persist.core import errors as e
from persist.formats.http_messages import PROBLEM_JSON, BlobMissing, error_to_json
from rpc.csrf import FormRefused

CLIENT_GONE = 499  # for logs and counters only: the client has disconnected
RETRY_AFTER_DEFAULT_S = 1.0
ERROR_KEY = "persist.error"
"""The key of a request's scope that holds the error of its response, for the log and the counters."""


class TooSlow(e.Unavailable):
    """A request that did not arrive in time. Its kind is that of its parent, as for the two classes below."""


class RequestLineTooLong(e.InvalidUsage):
    """A URL beyond `REQUEST_LINE_BYTES_MAX`."""


class HeadersTooLarge(e.InvalidUsage):
    """Headers beyond `HEADERS_MAX` or `HEADERS_BYTES_MAX`."""


STATUS: Mapping[type[e.PersistError], int] = {
    e.PersistError: 500,
    e.InvalidUsage: 400,
    BodyTooLarge: 413,
    FormRefused: 415,
    TooSlow: 408,
    RequestLineTooLong: 414,
    HeadersTooLarge: 431,
    BlobMissing: 404,
    e.UnknownShard: 404,
    e.ShardExists: 422,
    e.TokenReused: 422,
    e.Unauthorized: 401,
    e.Forbidden: 403,
    e.Conflict: 409,
    e.UpperMismatch: 409,
    e.OpaqueMismatch: 409,
    e.AttributeMismatch: 409,
    e.SchemaMismatch: 409,
    e.Expired: 410,
    e.NotReadable: 410,
    e.Overloaded: 429,
    e.Unavailable: 503,
    e.NotComplete: 409,
    e.Indeterminate: 504,
    e.UpgradeNeeded: 501,
    e.Corruption: 500,
}


def status_of(error: e.PersistError) -> int:
    """The status of an error: that of its class or its nearest base class."""
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def headers_of(error: e.PersistError) -> dict[str, str]:
    """Retry-After (whole seconds, at least 1) if a retry may help, WWW-Authenticate if a token may."""
    if isinstance(error, (e.Overloaded, e.Unavailable)):
        retry_after_s = error.details.get("retry_after_s", RETRY_AFTER_DEFAULT_S)
        return {"retry-after": str(max(1, math.ceil(retry_after_s)))}
    if isinstance(error, e.Unauthorized):
        return {"www-authenticate": "Bearer"}
    return {}


def problem(error: e.PersistError, status: int | None = None) -> Response:
    status = status or status_of(error)
    body = json.dumps(error_to_json(error, status), ensure_ascii=False).encode("utf-8", "backslashreplace")
    return Response(body, status, headers_of(error), PROBLEM_JSON)


def from_bug() -> e.PersistError:
    """The error that a client sees for a bug in the server; only the log has the details."""
    return e.PersistError("the server failed unexpectedly; its log has the details under this request's id")


def from_http(error: HTTPException, method: str, path: str) -> e.PersistError:
    if error.status_code == 404:
        return e.InvalidUsage(f"there is nothing at {path}; see /openapi.json for the available paths")
    if error.status_code == 405:
        return e.InvalidUsage(f"{method} is not supported at {path}; see /openapi.json for the supported methods")
    return e.InvalidUsage(str(error.detail))


def from_validation(error: RequestValidationError) -> e.InvalidUsage:
    """The first invalid parameter of a request, as one sentence."""
    first: dict[str, Any] = dict(error.errors()[0])
    place = [str(part) for part in first.get("loc", ()) if part not in ("query", "body", "header", "path")]
    return e.InvalidUsage(f"parameter {'.'.join(place) or 'body'} is not valid: {first.get('msg', 'unreadable')}")


def _path(request: Request) -> str:
    """The path as requested; the path in the scope may be rewritten for the router."""
    raw: bytes = request.scope.get("raw_path") or request.url.path.encode()
    return raw.partition(b"?")[0].decode("latin-1")


def install(app: FastAPI) -> None:
    """Make every error of the app a problem+json response."""

    async def respond(request: Request, error: Exception) -> Response:
        known, status = error, None
        if isinstance(error, HTTPException):
            known, status = from_http(error, request.method, _path(request)), error.status_code
        elif isinstance(error, RequestValidationError):
            known, status = from_validation(error), 422
        assert isinstance(known, e.PersistError)
        request.scope[ERROR_KEY] = known
        return problem(known, status)

    async def on_bug(_request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            return Response(status_code=CLIENT_GONE)
        return problem(from_bug())

    app.add_exception_handler(Exception, on_bug)
    for kind in (e.PersistError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, respond)
