"""One route as a value: method, path, scopes, audit action, quotas and handler; and the OpenAPI document."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request

# Rows of the table of routes (`rpc.routes.table`), and the router by which a handler is declared beside its row.
#
# What paths mean, who is let in, what the audit says, what quotas count, the labels of metrics and the OpenAPI document
# follow from these rows.


Handler = Callable[..., Awaitable[Any]]
SHARD = "/v1/shards/{name}"
BY_COMMAND: tuple[str, ...] = ()
"""The scopes of a route where the command in the body says who may send it."""
ROUTE = "persist.route"
"""The key of a request's scope that holds its route; None: there is none."""
PLAIN_CHARS_MAX = 32  # of a parameter that FastAPI need not look at: no bound of one is lower
_PARAMETERS = {"form": "format"}  # arguments of handlers whose parameters have another name


@dataclass(frozen=True, slots=True)
class Route:
    """One kind of request.

    `scopes`: each of them is enough; BY_COMMAND; or None, open to everybody without a token. `label`: what metrics and
    logs call it. `audit`: what the audit calls it; None: it has no line there. `audits_body`: the line has its body,
    which has no rows. `closes_by`: the parameter by which it may close the shard. `writes`: it writes rows, so that its
    body is not read where the caller's quota of rows is used up. `frees`: it deletes rows, which is possible where no
    quota of bytes is left. `direct`: its parameters and the handler's arguments for them, of which the required ones
    are in `required`; None: FastAPI reads the parameters.
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
        """Method and path as documents show them."""
        return f"{self.method} {self.path.replace(':path}', '}')}"

    def arguments(self, query: bytes) -> dict[str, str] | None:
        """The handler's arguments for a plain query. None: FastAPI has to read it, and may refuse it."""
        if not self.direct:
            return None if self.direct is None else {}
        given = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        found = dict(given)
        if len(found) < len(given) or not self.required <= found.keys() <= self.direct.keys():
            return None
        if any(not 0 < len(text) <= PLAIN_CHARS_MAX for text in found.values()):
            return None
        return {self.direct[name]: text for name, text in found.items()}


class Router(APIRouter):
    """Declares handlers, and keeps a row for each."""

    def __init__(self, **declared: Any) -> None:
        super().__init__(**declared)
        self.table: list[Route] = []

    def on(  # noqa: PLR0913 - a column of the table each
        self,
        method: str,
        path: str,
        scopes: tuple[str, ...] | None,
        *,
        audit: str | None = None,
        audits_body: bool = False,
        closes_by: str | None = None,
        writes: bool = False,
        frees: bool = False,
        direct: bool = False,
        **declared: Any,
    ) -> Callable[[Handler], Handler]:
        """Declare a handler; `Route` says what the row has.

        `direct`: all its parameters are texts, and it answers with a Response: plain requests go straight to it.
        `declared`: what FastAPI takes, such as a summary.
        """

        def keep(handler: Handler) -> Handler:
            names, required = _arguments(handler) if direct else (None, frozenset[str]())
            whole = f"{self.prefix}{path}"
            label = _label(method, whole)
            marks = (audit, audits_body, closes_by, writes, frees)
            self.table.append(Route(method, whole, handler, scopes, label, *marks, names, required))
            return self.api_route(path, methods=[method], **declared)(handler)

        return keep


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
        """The route of a request; its path has `{name}` in the place of a shard's name."""
        found = self._exact.get((method, path))
        if found is not None:
            return found
        return next((route for has, start, route in self._below if has == method and path.startswith(start)), None)


def route_of(request: Request) -> Route:
    """The route of a request that a handler answers."""
    found: Any = request.scope[ROUTE]
    assert isinstance(found, Route)
    return found


def _arguments(handler: Handler) -> tuple[dict[str, str], frozenset[str]]:
    """The parameters of a handler, each with its argument, and those that a request must have."""
    found = [one for one in inspect.signature(handler).parameters.values() if one.name != "request"]
    names = {_PARAMETERS.get(one.name, one.name): one.name for one in found}
    return names, frozenset(name for name, one in zip(names, found, strict=True) if one.default is one.empty)


def _label(method: str, path: str) -> str:
    """One of few words: `insert`, `get-shard`, `put-blob`, `location`, `console`."""
    if path == SHARD:
        return f"{method.lower()}-shard"
    if path.startswith("/v1/blobs/"):
        return f"{method.lower()}-blob"
    if path.startswith(SHARD + "/"):
        return path[len(SHARD) + 1 :].partition("/")[0]
    return path.removeprefix("/v1").strip("/").partition("/")[0]


# What FastAPI cannot see for the OpenAPI document: path parameters that routes read from the request themselves.


_PARAMETER = re.compile(r"\{([a-z_]+)(?::[a-z]+)?\}")
_METHODS = ("get", "put", "post", "delete", "head", "patch", "options")
_KNOWN: dict[str, dict[str, Any]] = {
    "name": {
        "description": "The shard's name: `name` or `region/name`.",
        "schema": {"type": "string", "pattern": r"^[A-Za-z0-9._][A-Za-z0-9._-]{0,127}(/[A-Za-z0-9._-]{1,128})?$"},
        "example": "orders",
    },
    "tag": {
        "description": "The tag's name.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._][A-Za-z0-9._-]{0,127}$"},
        "example": "eom-2026-10",
    },
}


def declare_path_parameters(document: dict[str, Any]) -> dict[str, Any]:
    """The document with every `{parameter}` of its paths declared, as OpenAPI demands. Changes it; idempotent."""
    for path, operations in document.get("paths", {}).items():
        for method in _METHODS:
            operation = operations.get(method)
            if operation is None:
                continue
            declared = operation.setdefault("parameters", [])
            names = {parameter.get("name") for parameter in declared if parameter.get("in") == "path"}
            for name in _PARAMETER.findall(path):
                if name not in names:
                    known = _KNOWN.get(name, {"schema": {"type": "string"}})
                    declared.append({"name": name, "in": "path", "required": True, **known})
    return document
