"""HTTP calls of a client: pooled connections, fail-over, and errors of the tree."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager

from persist.commit.system import Clock, OwnProcess
from persist.core.errors import Indeterminate, InvalidUsage, Overloaded, PersistError, Unavailable
from persist.formats.http_messages import PROBLEM_JSON, error_from_json
from rpc.client.answers import Broken, Reply
from rpc.client.connections import NotSent, Pool, Untrusted
from rpc.client.servers import Servers

CONNECT_S = 0.8
BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 0.5


class HttpCalls:
    """Calls to the servers of one client. Thread-safe; open one per process."""

    def __init__(self, servers: Servers, clock: Clock, *, token: str | None, ca_file: str | None, timeout_s: float):
        self.servers = servers
        self._process = OwnProcess("this client")
        self._clock = clock
        self._timeout_s = timeout_s
        self._tls = ssl.create_default_context(cafile=ca_file) if _is_secure(servers) else None
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._pools = {url: Pool(url, connect_s=CONNECT_S, tls=self._tls) for url in servers.urls}

    def add(self, servers: Servers) -> None:
        """Use these servers from now on."""
        for url in servers.urls:
            if url not in self._pools:
                self._pools[url] = Pool(url, connect_s=CONNECT_S, tls=self._tls)
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
    ) -> Reply:
        """Ask the shard's server, then the others.

        `safe` calls may happen twice: they are repeated until somebody answers or the connection's timeout has passed.
        Others raise Unavailable (did not happen) or Indeterminate at once. `wait_s`: how long the answer may take
        beyond the timeout, because it waits for something.
        """
        self._process.check()
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

    def stream(
        self, server: str, path: str, headers: Mapping[str, str], silence_s: float
    ) -> AbstractContextManager[tuple[Reply, Iterator[bytes]]]:
        """A GET from one server whose body is read as it comes. Raises NotSent, Broken."""
        self._process.check()
        return self._pools[server].stream(path, {**self._headers, **headers}, silence_s)

    def still(self, deadline: float | None, name: str) -> float:
        """Pause before the servers are asked again. Unavailable once the timeout has passed since the first pause."""
        now = self._clock.monotonic()
        if deadline is not None and now > deadline:
            raise Unavailable(f"no server answers for shard {name!r}; resume later")
        self._clock.sleep(BACKOFF_MAX_S / 2)
        return now + self._timeout_s if deadline is None else deadline

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
    ) -> Reply:
        try:
            reply = self._pools[server].request(method, path, headers, body, self._timeout_s + wait_s)
        except NotSent as error:
            self.servers.failed(server)
            raise Unavailable(f"the server {server} cannot be reached: {error}") from error
        except Untrusted as error:
            raise InvalidUsage(f"the certificate of {server} is not trusted here: {error}; give ca_file") from error
        except Broken as error:
            self.servers.failed(server)
            said = f"the server {server} went away during the request: {error}"
            if safe:
                raise Unavailable(said) from error
            raise Indeterminate(f"{said}; it may have happened, retry with the same token") from error
        self.servers.worked(server)
        if reply.status < 400 or (method == "HEAD" and reply.status == 404):
            return reply
        raise error_of(server, reply, safe=safe)


def _is_secure(servers: Servers) -> bool:
    return any(url.startswith("https") for url in servers.urls)


def error_of(server: str, reply: Reply, *, safe: bool) -> PersistError:
    """The error that an answer of 400 or more tells of. `safe`: the request changes nothing, or may happen twice.

    Only a persist server knows whether something happened. A proxy may answer any 5xx after it has forwarded a request.
    """
    if reply.headers.get("content-type", "").partition(";")[0].strip() == PROBLEM_JSON:
        with contextlib.suppress(ValueError):
            told = json.loads(reply.data)
            if isinstance(told, dict) and isinstance(told.get("kind"), str):
                return error_from_json(told)
    said = f"{server} answered {reply.status}, which is no answer of persist: {reply.data[:100]!r}"
    if reply.status < 500:
        return PersistError(f"{said}; is it a persist server?")
    if safe:
        return Unavailable(said)
    return Indeterminate(f"{said}; it may have happened, retry with the same token")
