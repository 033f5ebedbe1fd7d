"""HTTP calls of a client: pooled connections, fail-over, and errors of the tree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import urllib3
from urllib3.connectionpool import HTTPConnectionPool
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NameResolutionError, NewConnectionError, SSLError

from persist.errors import Indeterminate, InvalidUsage, Overloaded, PersistError, Unavailable
from persist.system import Clock
from persist.wire import error_from_json
from rpc.servers import Servers

CONNECT_S = 0.8
CONNECTIONS_MAX = 256  # kept open to one server; more are opened and closed again
BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 0.5


class Answer:
    """Status, headers and body of a response below 400, or of a 404 to a HEAD."""

    __slots__ = ("data", "headers", "status")

    def __init__(self, status: int, headers: Mapping[str, str], data: bytes) -> None:
        self.status = status
        self.headers = headers
        self.data = data

    def json(self) -> Any:
        return json.loads(self.data)


class HttpCalls:
    """Calls to the servers of one client. Thread-safe; open one per process."""

    def __init__(self, servers: Servers, clock: Clock, *, token: str | None, ca_file: str | None, timeout_s: float):
        self.servers = servers
        self._clock = clock
        self._timeout_s = timeout_s
        self._ca_file = ca_file
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._pools = {url: self._pool(url) for url in servers.urls}

    def add(self, servers: Servers) -> None:
        """Use these servers from now on."""
        for url in servers.urls:
            if url not in self._pools:
                self._pools[url] = self._pool(url)
        self.servers = servers

    def call(
        self,
        method: str,
        path: str,
        *,
        shard: str,
        body: bytes | memoryview | None = None,
        headers: Mapping[str, str] | None = None,
        safe: bool = True,
        wait_s: float = 0.0,
    ) -> Answer:
        """Ask the shard's server, then the others.

        `safe` calls may happen twice: they are repeated until somebody answers or the connection's timeout has passed.
        Others raise Unavailable (did not happen) or Indeterminate at once. `wait_s`: how long the answer may take
        beyond the timeout, because it waits for something.
        """
        deadline = self._clock.monotonic() + self._timeout_s
        given = {**self._headers, **headers} if headers else self._headers
        tries = 0
        while True:
            for server in self.servers.order(shard):
                try:
                    return self._ask(server, method, path, body, given, safe, wait_s)
                except (Unavailable, Overloaded) as error:
                    last: PersistError = error
                    if isinstance(error, Overloaded):
                        break  # the others are as busy, and would only fight over the shard
            if not safe:
                raise last
            tries += 1
            pause = min(BACKOFF_FIRST_S * 2**tries, BACKOFF_MAX_S)
            if self._clock.monotonic() + pause > deadline:
                raise last
            self._clock.sleep(pause)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def _ask(
        self,
        server: str,
        method: str,
        path: str,
        body: bytes | memoryview | None,
        headers: Mapping[str, str],
        safe: bool,
        wait_s: float,
    ) -> Answer:
        timeout = urllib3.Timeout(connect=CONNECT_S, read=self._timeout_s + wait_s)
        try:
            response = self._pools[server].urlopen(
                method, path, body=cast(bytes, body), headers=headers, retries=False, redirect=False, timeout=timeout
            )
        except (NewConnectionError, ConnectTimeoutError, NameResolutionError) as error:
            self.servers.failed(server)
            raise Unavailable(f"the server {server} cannot be reached: {error.__class__.__name__}") from error
        except SSLError as error:
            raise InvalidUsage(f"the server {server} has no certificate that is trusted here: {error}") from error
        except (HTTPError, OSError) as error:
            self.servers.failed(server)
            said = f"the server {server} went away during the request ({error.__class__.__name__})"
            if safe:
                raise Unavailable(said) from error
            raise Indeterminate(f"{said}: it may have happened; retry with the same token") from error
        self.servers.worked(server)
        if response.status < 400 or (method == "HEAD" and response.status == 404):
            return Answer(response.status, response.headers, response.data)
        raise _error(server, response.status, response.data)

    def _pool(self, url: str) -> HTTPConnectionPool:
        options: dict[str, Any] = {"maxsize": CONNECTIONS_MAX, "block": False}
        if url.startswith("https") and self._ca_file is not None:
            options["ca_certs"] = self._ca_file
        return urllib3.connection_from_url(url, **options)


def _error(server: str, status: int, data: bytes) -> PersistError:
    try:
        return error_from_json(json.loads(data))
    except ValueError:
        said = f"{server} answered {status} without saying why: {data[:100]!r}; is it a persist server?"
    if status in (502, 503, 504):  # a proxy, or a server with too many connections
        return Unavailable(said) if status == 503 else Indeterminate(said)
    return PersistError(said)


__all__ = ["Answer", "HttpCalls"]
