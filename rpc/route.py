"""Routes as values: method, path, scopes, audit action, quotas and handler."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request

from persist.core.commands import WRITE

# The table of routes (`rpc.routes.table`) determines the meaning of paths, required scopes, audit lines, quotas, labels
# of metrics and the OpenAPI document. Handlers are declared together with their routes.


Handler = Callable[..., Awaitable[Any]]
SHARD = "/v1/shards/{name}"
BY_COMMAND: tuple[str, ...] = ()
"""The scopes of a route for which the command in the body determines the required scopes."""
ROUTE = "persist.route"
"""The key of a request's scope that holds its route; None: there is none."""
PLAIN_CHARS_MAX = 32  # of a parameter that bypasses FastAPI; no parameter has a lower limit
_PARAMETERS = {"form": "format"}  # arguments of handlers and the names of their parameters, if these differ
_NAME: dict[str, Any] = {  # of a shard; handlers read it from the request, so FastAPI does not document it
    "name": "name",
    "in": "path",
    "required": True,
    "description": "The shard's name: `name` or `region/name`.",
    "schema": {"type": "string", "pattern": r"^[A-Za-z0-9._][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9._-]{1,128})?$"},
    "example": "orders",
}


@dataclass(frozen=True, slots=True)
class Route:
    """One kind of request.

    `scopes`: one of them is required; BY_COMMAND; or None: public. `label`: its name in metrics and logs. `audit`: its
    name in the audit log; None: it is not audited. `audits_body`: the line contains its body, which has no rows.
    `closes_by`: the parameter that may close the shard. `writes`: it writes rows, so its body is not read if the
    caller's quota of rows is used up. `frees`: it deletes rows, which is allowed when the quota of bytes is used up.
    `direct`: its parameters and the handler's arguments for them, of which those in `required` are mandatory; None:
    FastAPI reads the parameters.
    """

    method: str
    path: str
    handler: Handler
    scopes: tuple[str, ...] | None
    label: str
    audit: str | None = None
    audits_body: bool = False
    closes_by: str | None = None
    writes: bool = False
    frees: bool = False
    direct: Mapping[str, str] | None = None
    required: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """Method and path as in the documentation."""
        return f"{self.method} {self.path.replace(':path}', '}')}"

    def arguments(self, query: bytes) -> dict[str, str] | None:
        """The handler's arguments for a simple query. None: FastAPI has to read it, and may refuse it."""
        if not self.direct:
            return None if self.direct is None else {}
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        values = dict(pairs)
        if len(values) < len(pairs) or not self.required <= values.keys() <= self.direct.keys():
            return None
        if any(not 0 < len(text) <= PLAIN_CHARS_MAX for text in values.values()):
            return None
        return {self.direct[name]: text for name, text in values.items()}


class Router(APIRouter):
    """Declares handlers, and collects their routes."""

    def __init__(self, **declared: Any) -> None:
        super().__init__(**declared)
        self.table: list[Route] = []

    def on(  # noqa: PLR0913 - a field of `Route` each
        self,
        request: str,
        scopes: tuple[str, ...] | None,
        summary: str,
        *,
        audit: str | None = None,
        audits_body: bool = False,
        closes_by: str | None = None,
        writes: bool = False,
        frees: bool = False,
        direct: bool = False,
        openapi_extra: Mapping[str, Any] | None = None,
        **declared: Any,
    ) -> Callable[[Handler], Handler]:
        """Declare a handler of a `request` such as `GET /{name}/tags`, with the fields of its `Route`.

        `direct`: all its parameters are strings, and it returns a Response: simple requests bypass FastAPI. `declared`:
        arguments for FastAPI.
        """
        method, path = request.split(" ")
        full_path = f"{self.prefix}{path}"
        extra = dict(openapi_extra or {})
        if full_path.startswith(SHARD):
            extra["parameters"] = [_NAME, *extra.get("parameters", ())]

        def declare(handler: Handler) -> Handler:
            names, required = _arguments(handler) if direct else (None, frozenset[str]())
            flags = (_label(method, full_path), audit, audits_body, closes_by, writes, frees)
            self.table.append(Route(method, full_path, handler, scopes, *flags, names, required))
            return self.api_route(path, methods=[method], summary=summary, openapi_extra=extra, **declared)(handler)

        return declare

    def write(self, verb: str, summary: str, **declared: Any) -> Callable[[Handler], Handler]:
        """Declare a handler of `POST /{name}/verb` that writes rows and is audited under its verb."""
        return self.on(f"POST /{{name}}/{verb}", (WRITE,), summary, audit=verb, writes=True, **declared)


class Table:
    """All routes, by method and path."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._exact = {(route.method, route.path): route for route in self.routes}
        self._below = [
            (route.method, route.path[: route.path.rindex("{")], route)
            for route in self.routes
            if route.path.endswith("}") and route.path != SHARD
        ]

    def find(self, method: str, path: str) -> Route | None:
        """The route of a request; its path has `{name}` instead of a shard's name."""
        exact = self._exact.get((method, path))
        if exact is not None:
            return exact
        return next((route for m, start, route in self._below if m == method and path.startswith(start)), None)


def route_of(request: Request) -> Route:
    route: Any = request.scope[ROUTE]
    assert isinstance(route, Route)
    return route


def _arguments(handler: Handler) -> tuple[dict[str, str], frozenset[str]]:
    """The query parameters of a handler with their arguments, and those that are mandatory."""
    arguments = [p for p in inspect.signature(handler).parameters.values() if p.name != "request"]
    names = {_PARAMETERS.get(p.name, p.name): p.name for p in arguments}
    return names, frozenset(name for name, p in zip(names, arguments, strict=True) if p.default is p.empty)


def _label(method: str, path: str) -> str:
    """A label from a small set: `insert`, `get-shard`, `put-blob`, `location`, `console`."""
    if path == SHARD:
        return f"{method.lower()}-shard"
    if path.startswith("/v1/blobs/"):
        return f"{method.lower()}-blob"
    if path.startswith(SHARD + "/"):
        return path[len(SHARD) + 1 :].partition("/")[0]
    return path.removeprefix("/v1").strip("/").partition("/")[0]
