"""An inspection through a server: `GET /v1/inspect/…` and `GET /v1/shards/NAME/inspect/…`."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from persist.core.errors import InvalidUsage, PersistError, Unavailable
from persist.formats.http_messages import error_from_json
from persist.inspect.asking import OF_MANY, Asked

ANSWER_S = 60.0  # that a server may be silent
DOCUMENT_BYTES_MAX = 256 * 1024 * 1024  # that is shown as a table; JSON is passed on as it comes
METRICS_BYTES_MAX = 64 * 1024 * 1024
LINE_BYTES_MAX = 16 * 1024 * 1024
PROBLEM_BYTES_MAX = 1024 * 1024
PIECE_BYTES = 1024 * 1024
HEALTHY_END = b'"findings": []}\n'
_OPTIONS = {"first": "from", "last": "to"}  # how a question's options are called there


class Server:
    """A server, and the token by which it is asked (None: none)."""

    def __init__(self, url: str, token: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
            raise InvalidUsage(f"--url is {url!r:.100}; it must be the URL of one server, such as http://host:8787")
        self._url = url.rstrip("/")
        self._headers = {} if not token else {"authorization": f"Bearer {token}"}

    def ask(self, asked: Asked) -> Far:
        """Raises what the server refuses, and Unavailable: it does not answer, or not as a server of persist."""
        return Far(self._opened(path_of(asked), ANSWER_S), asked.what, self._url)

    def document(self, path: str, silent_s: float) -> Any:
        """The JSON at a path; the server may be silent for so long. Raises as `ask` does."""
        with self._opened(path, silent_s) as answer:
            try:
                data = answer.read(DOCUMENT_BYTES_MAX + 1)
                if len(data) > DOCUMENT_BYTES_MAX:
                    raise InvalidUsage(f"the answer has more than {DOCUMENT_BYTES_MAX} bytes; ask for fewer shards")
                return json.loads(data)
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise Unavailable(
                    f"{self._url} does not answer as a server of persist, or its answer was cut off"
                ) from error

    def metrics(self) -> str:
        """The text of `GET /metrics`, which maintenance answers too. Raises as `ask`."""
        with self._opened("/metrics", ANSWER_S) as answer:
            try:
                data: bytes = answer.read(METRICS_BYTES_MAX + 1)
            except (OSError, http.client.HTTPException) as error:
                raise Unavailable(f"the answer of {self._url} was cut off: {_said(error)}; ask again") from error
        if len(data) > METRICS_BYTES_MAX:
            raise Unavailable(f"{self._url} does not answer as a server of persist: it tells too much")
        return data.decode("utf-8", "replace")

    def _opened(self, path: str, silent_s: float) -> Any:
        request = urllib.request.Request(self._url + path, headers=self._headers)
        try:
            return urllib.request.urlopen(request, timeout=silent_s)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error, self._url) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise Unavailable(f"{self._url} does not answer: {_said(error)}") from error


def path_of(asked: Asked) -> str:
    """Where a server answers the question."""
    given: dict[str, str] = {}
    for name in ("at", "timestamp", "first", "last", "as_of", "lower", "upper"):
        if value := getattr(asked, name):
            given[_OPTIONS.get(name, name)] = value
    given |= {name: "true" for name in ("keys", "whole", "dropped") if getattr(asked, name)}
    given |= {"rows": str(asked.rows)} if asked.rows else {}
    if asked.what in OF_MANY:
        given |= {"pattern": asked.name} if asked.name else {}
        path = f"/v1/inspect/{asked.what}"
    elif asked.what == "part":
        given["key"] = asked.name
        path = "/v1/inspect/part"
    else:
        path = f"/v1/shards/{quote(asked.name, safe='')}/inspect/{asked.what}"
    return f"{path}?{urlencode(given)}" if given else path


class Far:
    """An answer of a server, read as it comes."""

    def __init__(self, answer: Any, what: str, url: str) -> None:
        self._answer = answer
        self._what = what
        self._url = url
        self._document: dict[str, Any] | None = None
        self._findings: list[dict[str, Any]] = []

    @property
    def seqno(self) -> int | None:
        found: int | None = self._read()["seqno"]
        return found

    @property
    def about(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._read()["about"]
        return found

    def rows(self) -> Iterator[dict[str, Any]]:
        return iter(self._read()["rows"])

    def findings(self) -> list[dict[str, Any]]:
        return self._findings if self._document is None else list(self._document["findings"])

    def json(self) -> Iterator[str]:
        """As it comes. Raises Unavailable: the answer was cut off."""
        if self._what == "log":
            yield from self._lines()
            return
        end = b""
        while piece := self._taken(self._answer.read, PIECE_BYTES):
            end = (end + piece)[-len(HEALTHY_END) :]
            yield piece.decode("utf-8", "replace")
        if not end.endswith(b"]}\n"):
            raise self._cut()
        if end != HEALTHY_END:
            self._findings = [{"shard": None, "what": "as the document says", "key": None}]

    def _lines(self) -> Iterator[str]:
        while line := self._taken(self._answer.readline, LINE_BYTES_MAX):
            if not line.endswith(b"\n"):
                raise self._cut()
            yield line.decode("utf-8", "replace")

    def _read(self) -> dict[str, Any]:
        if self._document is None:
            data = self._taken(self._answer.read, DOCUMENT_BYTES_MAX + 1)
            if len(data) > DOCUMENT_BYTES_MAX:
                raise InvalidUsage(f"the answer has more than {DOCUMENT_BYTES_MAX} bytes; take --json")
            try:
                found = json.loads(data)
            except ValueError as error:
                raise self._cut() from error
            if not isinstance(found, dict) or found.get("persist") != "inspect":
                raise Unavailable(f"{self._url} does not answer as a server of persist")
            self._document = found
        return self._document

    def _taken(self, read: Any, most: int) -> bytes:
        try:
            data: bytes = read(most)
            return data
        except (OSError, http.client.HTTPException) as error:
            raise self._cut() from error

    def _cut(self) -> Unavailable:
        return Unavailable(f"the answer of {self._url} was cut off; its log says why, ask again")


def _refusal(error: urllib.error.HTTPError, url: str) -> PersistError:
    """What the server says is wrong."""
    try:
        told = json.loads(error.read(PROBLEM_BYTES_MAX))
        if isinstance(told, dict) and "kind" in told:
            return error_from_json(told)
    except (OSError, ValueError):
        pass
    return Unavailable(f"{url} does not answer as a server of persist: {error}")


def _said(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    return " ".join(f"{cause}".split())[:200] or type(cause).__name__
