"""HTTP calls: pooled connections, choice of a server by rendezvous hashing, fail-over, and errors of the tree."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TypeVar

import msgspec

from persist.client import deadlines
from persist.client.connect import Connection
from persist.client.server_address import Trust
from persist.client.server_address import normal as normal
from persist.commit.system import Clock, OwnProcess, SystemIds
from persist.core.errors import (
    Corruption,
    Indeterminate,
    InvalidUsage,
    NotComplete,
    Overloaded,
    PersistError,
    Unavailable,
)
from persist.formats.http_messages import PROBLEM_JSON, error_from_json
from persist.http_client.http_connection import ANSWER_BYTES_MAX, Broken, ConnectionPool, NotSent, Reply, tls_of
from persist.telemetry.metrics import Durations, Storms
from persist.telemetry.tracing import TRACEPARENT, Requesting, Tracer, open_tracer

# Which server to ask: rendezvous hashing over those that answer.
#
# Every client with the same list sends a shard to the same server, so that its commits meet in one queue. A server that
# does not answer is passed over, and tried again by one request at a time until it answers; then its shards come back.


RETRY_DOWN_S = 0.5
TRY_S = 30.0  # a try that has told nothing for so long is given up, and another one begins
ORDERS_KEPT_MAX = 20_000
SERVERS_MAX = 256


class Servers:
    """The servers of one client, by their base URLs. Thread-safe."""

    def __init__(self, urls: Sequence[str], clock: Clock) -> None:
        self.urls = tuple(dict.fromkeys(normal(url) for url in urls))
        if not 0 < len(self.urls) <= SERVERS_MAX:
            raise InvalidUsage(f"give 1 to {SERVERS_MAX} servers, not {len(self.urls)}")
        self._clock = clock
        self._lock = threading.Lock()
        self._down: dict[str, float] = {}  # server -> when to try it again
        self._ordered = lru_cache(ORDERS_KEPT_MAX)(self._rendezvous)

    def order(self, name: str) -> tuple[str, ...]:
        """The servers to ask about a shard, best first; those that are down come last."""
        ordered = self._ordered(name)
        if not self._down:
            return ordered
        up: list[str] = []
        down: list[str] = []
        now = self._clock.monotonic()
        with self._lock:
            for server in ordered:
                until = self._down.get(server)
                if until is None:
                    up.append(server)
                elif now >= until and not up:
                    self._down[server] = now + TRY_S  # this request tries it, others pass it over
                    up.append(server)
                else:
                    down.append(server)
        return (*up, *down)

    def failed(self, server: str) -> None:
        """It did not answer."""
        with self._lock:
            self._down[server] = self._clock.monotonic() + RETRY_DOWN_S

    def worked(self, server: str) -> None:
        """It answered."""
        if server in self._down:
            with self._lock:
                self._down.pop(server, None)

    def _rendezvous(self, name: str) -> tuple[str, ...]:
        return rendezvous(self.urls, name)


def rendezvous(urls: Sequence[str], name: str) -> tuple[str, ...]:
    """The servers by descending weight for `name`: taking one away moves only its own shards."""
    return tuple(sorted(urls, key=lambda url: hashlib.sha256(f"{url}\0{name}".encode()).digest(), reverse=True))


# HTTP calls of a client: pooled connections, fail-over, and errors of the tree.


T = TypeVar("T")
REQUEST_ID_HEADER = "x-request-id"
CONNECT_S = 0.8
BACKOFF_FIRST_S = 0.02
LEAST_S = 0.01  # with less time left no other server is asked
BACKOFF_MAX_S = 0.5


@dataclass(frozen=True, slots=True)
class Call:
    """One request. It goes to the server of `shard` first.

    `safe` calls may happen twice: they are repeated until a server answers or the connection's timeout has passed. It
    bounds all tries at all servers together. An answer may take `wait_s` longer, because it waits for something. No
    call takes longer than the deadline of the call of the handle that it is made for (`persist.client.deadlines`). An
    answer of more than `bytes_max` bytes is not taken.
    """

    method: str
    path: str
    shard: str = ""
    body: bytes | memoryview | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    safe: bool = True
    wait_s: float = 0.0
    bytes_max: int = ANSWER_BYTES_MAX


class HttpCalls:
    """Calls to the servers of one client. Thread-safe; open one per process."""

    def __init__(
        self,
        servers: Servers,
        clock: Clock,
        *,
        token: str | None,
        trust: Trust | None = None,
        timeout_s: float,
        connect_s: float | None = None,
    ) -> None:
        """`connect_s` bounds a call as long as no server has ever answered; None: `timeout_s` does."""
        self.servers = servers
        self._connect_s = timeout_s if connect_s is None else min(connect_s, timeout_s)
        self._was_answered = False
        self._process = OwnProcess("this client")
        self._clock = clock
        self._ids = SystemIds()  # of requests
        self.storms = Storms(clock.monotonic)
        self.durations = Durations()  # by method and what came of it, with the bytes that were sent
        self.received = 0  # bytes of answers
        self.tracer: Tracer | None = None
        self._timeout_s = timeout_s
        self._tls = tls_of(servers.urls, trust)
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._pools = {url: ConnectionPool(url, connect_s=CONNECT_S, tls=self._tls) for url in servers.urls}

    @property
    def timeout_s(self) -> float:
        """What bounds one call."""
        return self._timeout_s

    @property
    def has_token(self) -> bool:
        return bool(self._headers)

    def call(self, call: Call) -> Reply:
        """Ask the shard's server, then the others.

        A call that is not safe raises Unavailable (it did not happen) or Indeterminate at once.
        """
        self._process.check()
        with Requesting() as request:
            asked = request.named(self._ids)
            return self._call(call, asked) if self.tracer is None else self._traced(call, asked, self.tracer)

    def _traced(self, call: Call, request_id: str, tracer: Tracer) -> Reply:
        """As `_call`, below a span of which the server is told."""
        told = {"persist.request_id": request_id, "persist.shard": call.shard}
        with tracer.span(f"persist.client {call.method}", told, kind="client") as span:
            headers = {**call.headers, TRACEPARENT: tracer.traceparent()}
            try:
                reply = self._call(replace(call, headers=headers), request_id)
            except PersistError as error:
                span.failed(error.kind, error.message)
                raise
            span.tell("http.response.status_code", reply.status)
            return reply

    def _call(self, call: Call, request_id: str) -> Reply:
        deadlines.check(f"the request to {self.servers.urls[0]}")
        begun = self._clock.monotonic()
        ends = begun + deadlines.at_most(math.inf)  # whatever it waits for
        tries = 0
        while True:
            deadline = min(begun + (self._timeout_s if self._was_answered else self._connect_s), ends)
            late = min(deadline + call.wait_s, ends)
            for server in self.servers.order(call.shard):
                try:
                    return self._ask(server, call, late - self._clock.monotonic(), request_id)
                except NotComplete:  # the server has waited for it
                    raise
                except (Unavailable, Overloaded) as error:
                    last: PersistError = error
                    # Where one is overloaded, the others are as busy, and would only fight over the shard.
                    if isinstance(error, Overloaded) or self._clock.monotonic() > late - LEAST_S:
                        break
            if not call.safe:
                raise last
            tries += 1
            pause = min(BACKOFF_FIRST_S * 2**tries, BACKOFF_MAX_S)
            if self._clock.monotonic() + pause > deadline:
                raise last if self._was_answered else self._nobody(last)
            self.storms.again("client", call.shard, tries, last, request_id)
            self._clock.sleep(pause)

    def _nobody(self, last: PersistError) -> Unavailable:
        urls = ", ".join(self.servers.urls)
        return Unavailable(
            f"no server has answered at {urls} within {self._connect_s:g} s, and nothing happened: is it started, and "
            f"is this its URL? ({last.message})"
        )

    def stream(
        self, server: str, path: str, headers: Mapping[str, str], silence_s: float
    ) -> AbstractContextManager[tuple[Reply, Iterator[bytes]]]:
        """A GET from one server whose body is read as it comes. Raises NotSent, Broken, InvalidUsage."""
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

    def _ask(self, server: str, call: Call, timeout_s: float, request_id: str) -> Reply:
        headers = {**self._headers, **call.headers, REQUEST_ID_HEADER: request_id}
        if call.body is not None:
            headers.setdefault("content-type", "application/octet-stream")  # servers refuse a body without a type
        begun, outcome = self._clock.monotonic(), "broken"
        try:
            reply = self._pools[server].request(call.method, call.path, headers, call.body, timeout_s, call.bytes_max)
            outcome = f"{reply.status // 100}xx"
        except NotSent as error:
            outcome = "not_sent"
            self.servers.failed(server)
            raise Unavailable(f"the server {server} cannot be reached: {error}") from error
        except Broken as error:
            self.servers.failed(server)
            said = f"the server {server} went away during the request: {error}"
            if call.safe:
                raise Unavailable(said) from error
            raise Indeterminate(f"{said}; it may have happened, retry with the same token") from error
        finally:
            sent = 0 if call.body is None else len(call.body)
            self.durations.observe((call.method, outcome), self._clock.monotonic() - begun, sent)
        self.received += len(reply.data)
        self.servers.worked(server)
        self._was_answered = True
        if reply.status < 400 or (call.method == "HEAD" and reply.status == 404):
            return reply
        raise error_of(server, reply, safe=call.safe)


def calls_of(connection: Connection, clock: Clock) -> HttpCalls:
    """Calls to the servers of a connection that has a `url`, by its token and deadlines. Asks nobody."""
    calls = HttpCalls(
        Servers((connection.url or "").split(","), clock),
        clock,
        token=connection.token,
        trust=connection.trust,
        timeout_s=connection.request_s,
        connect_s=connection.connect_s,
    )
    calls.tracer = open_tracer() if connection.traces else None
    return calls


def decoded_json(reply: Reply, kind: type[T]) -> T:
    """What an answer says. Raises Corruption on anything that is no JSON of this kind."""
    try:
        return msgspec.json.decode(reply.data, type=kind)
    except (ValueError, RecursionError) as error:
        raise Corruption(f"the server's answer is not what was asked for: {error}; is it a persist server?") from error


def error_of(server: str, reply: Reply, *, safe: bool) -> PersistError:
    """The error that an answer of 400 or more tells of. `safe`: the request changes nothing, or may happen twice.

    Only a persist server knows whether something happened. A proxy may answer any 5xx after it has forwarded a request.
    """
    if reply.headers.get("content-type", "").partition(";")[0].strip() == PROBLEM_JSON:
        with contextlib.suppress(ValueError, RecursionError):
            told = json.loads(reply.data)
            if isinstance(told, dict) and isinstance(told.get("kind"), str):
                return error_from_json(told)
    said = f"{server} answered {reply.status}, which is no answer of persist: {reply.data[:100]!r}"
    if reply.status < 500:
        return PersistError(f"{said}; is it a persist server?")
    if safe:
        return Unavailable(said)
    return Indeterminate(f"{said}; it may have happened, retry with the same token")
