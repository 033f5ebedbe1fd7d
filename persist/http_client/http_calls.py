"""HTTP calls: choice of a server by rendezvous hashing, fail-over, retries, and errors by their kinds."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TypeVar

import msgspec

from persist.client import deadlines
from persist.client.arguments import ClientTls
from persist.client.arguments import normalize_url as normalize_url
from persist.client.client import Connection
from persist.commit.clocks_and_ids import Clock, OwnProcess, SystemIds
from persist.core import errors
from persist.core.errors import Indeterminate, InvalidUsage, Overloaded, PersistError, Unavailable
from persist.formats.http_messages import PROBLEM_JSON, error_from_json
from persist.http_client.http_connection import ANSWER_BYTES_MAX, Broken, ConnectionPool, NotSent, Reply, tls_of
from persist.telemetry.metrics import Durations, Storms
from persist.telemetry.tracing import Requesting, Tracer, open_tracer

# Every client with the same list of servers sends a shard to the same server, so that its commits meet in one queue. A
# server that does not answer is passed over, and probed by one request at a time until it answers again.

RETRY_DOWN_S = 0.5
TRY_S = 30.0  # after so long without an outcome, another request probes the server
ORDERS_KEPT_MAX = 20_000
SERVERS_MAX = 256


class Servers:
    """The servers of one client by their base URLs. Thread-safe."""

    def __init__(self, urls: Sequence[str], clock: Clock) -> None:
        self.urls = tuple(dict.fromkeys(normalize_url(url) for url in urls))
        if not 0 < len(self.urls) <= SERVERS_MAX:
            raise InvalidUsage(f"give 1 to {SERVERS_MAX} servers, not {len(self.urls)}")
        self._clock = clock
        self._lock = threading.Lock()
        self._down: dict[str, float] = {}  # by server: when to probe it again
        self._ordered = lru_cache(ORDERS_KEPT_MAX)(partial(rendezvous, self.urls))

    def order(self, name: str) -> tuple[str, ...]:
        """The servers for a shard, best first; those that are down come last."""
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
                    self._down[server] = now + TRY_S  # this request probes it, others pass it over
                    up.append(server)
                else:
                    down.append(server)
        return (*up, *down)

    def failed(self, server: str) -> None:
        """Mark a server that did not answer."""
        with self._lock:
            self._down[server] = self._clock.monotonic() + RETRY_DOWN_S

    def worked(self, server: str) -> None:
        """Mark a server that answered."""
        if server in self._down:
            with self._lock:
                self._down.pop(server, None)


def rendezvous(urls: Sequence[str], name: str) -> tuple[str, ...]:
    """The servers by descending weight for `name`: removing one moves only its own shards."""
    return tuple(sorted(urls, key=lambda url: hashlib.sha256(f"{url}\0{name}".encode()).digest(), reverse=True))


# Calls.

T = TypeVar("T")
REQUEST_ID_HEADER = "x-request-id"
CONNECT_S = 0.8
BACKOFF_FIRST_S = 0.02
LEAST_S = 0.01  # with less time left no other server is tried
BACKOFF_MAX_S = 0.5


@dataclass(frozen=True, slots=True)
class Call:
    """One request. It goes to the server of `shard` first.

    `safe` calls may be repeated: they are retried until a server answers or the connection's timeout has passed, which
    bounds all attempts together. An answer may take `wait_s` longer, because the server waits. The deadline of the
    handle's call (`persist.client.deadlines`) always applies. An answer of more than `bytes_max` bytes is rejected.
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
        trust: ClientTls | None = None,
        timeout_s: float,
        connect_s: float | None = None,
    ) -> None:
        """`connect_s` bounds a call while no server has ever answered; None: `timeout_s` does."""
        self.servers = servers
        self._connect_s = timeout_s if connect_s is None else min(connect_s, timeout_s)
        self._was_answered = False
        self._process = OwnProcess("this client")
        self._clock = clock
        self._ids = SystemIds()  # of requests
        self.storms = Storms(clock.monotonic)
        self.durations = Durations()  # by method and outcome, with the bytes sent
        self.received = 0  # bytes of answers
        self.tracer: Tracer | None = None
        self.timeout_s = timeout_s  # of one call
        self._tls = tls_of(servers.urls, trust)
        self._headers = {"authorization": f"Bearer {token}"} if token else {}
        self._pools = {url: ConnectionPool(url, connect_s=CONNECT_S, tls=self._tls) for url in servers.urls}

    @property
    def has_token(self) -> bool:
        return bool(self._headers)

    def call(self, call: Call) -> Reply:
        """Send a request to the shard's server, and if that fails to the others.

        A call that is not safe raises Unavailable (it did not happen) or Indeterminate without a retry.
        """
        with Requesting() as request:
            request_id = request.named(self._ids)
            return self._call(call, request_id) if self.tracer is None else self._traced(call, request_id, self.tracer)

    def _traced(self, call: Call, request_id: str, tracer: Tracer) -> Reply:
        """As `_call`, in a span that is the parent of the server's."""
        attributes = {"persist.request_id": request_id, "persist.shard": call.shard}
        with tracer.span(f"persist.client {call.method}", attributes, kind="client") as span:
            headers = {**call.headers, **tracer.headers()}
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
        ends = begun + deadlines.at_most(math.inf)
        tries = 0
        while True:
            self._process.check()
            deadline = min(begun + (self.timeout_s if self._was_answered else self._connect_s), ends)
            late = min(deadline + call.wait_s, ends)
            for server in self.servers.order(call.shard):
                try:
                    return self._ask(server, call, late - self._clock.monotonic(), request_id)
                except errors.NotComplete:  # the server has waited already
                    raise
                except (Unavailable, Overloaded) as error:
                    if call.method == "GET":  # the end of the client has ended the wait; no other try can have landed
                        self._process.check()
                    last: PersistError = error
                    # If one is overloaded, so are the others, and they would only compete for the shard.
                    if isinstance(error, Overloaded) or self._clock.monotonic() > late - LEAST_S:
                        break
            if not call.safe:
                raise last
            tries += 1
            pause = min(BACKOFF_FIRST_S * 2**tries, BACKOFF_MAX_S)
            if self._clock.monotonic() + pause > deadline:
                raise last if self._was_answered else self._unreachable(last)
            self.storms.again("client", call.shard, tries, last, request_id)
            self._clock.sleep(pause)

    def _unreachable(self, last: PersistError) -> Unavailable:
        urls = ", ".join(self.servers.urls)
        return Unavailable(
            f"no server answered at {urls} within {self._connect_s:g} s, and nothing happened: check that it is "
            f"running at this URL ({last.message})"
        )

    def close(self) -> None:
        self._process.close()
        for pool in self._pools.values():
            pool.close()

    def _ask(self, server: str, call: Call, timeout_s: float, request_id: str) -> Reply:
        headers = {**self._headers, **call.headers, REQUEST_ID_HEADER: request_id}
        if call.body is not None:
            headers.setdefault("content-type", "application/octet-stream")  # servers reject a body without a type
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
            reason = f"the server {server} disconnected during the request: {error}"
            if call.safe:
                raise Unavailable(reason) from error
            raise Indeterminate(f"{reason}; it may have happened, retry with the same token") from error
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
    """Calls to the servers of a connection that has a `url`. Sends nothing."""
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
    """The content of an answer. Raises Corruption if it is not JSON of this type."""
    try:
        return msgspec.json.decode(reply.data, type=kind)
    except (ValueError, RecursionError) as error:
        raise errors.Corruption(f"the server's answer is malformed: {error}; is it a persist server?") from error


def error_of(server: str, reply: Reply, *, safe: bool) -> PersistError:
    """The error in an answer of 400 or more. `safe`: the request changes nothing, or may be repeated.

    Only a persist server knows whether something happened. A proxy may answer 5xx after it has forwarded the request.
    """
    if reply.headers.get("content-type", "").partition(";")[0].strip() == PROBLEM_JSON:
        with contextlib.suppress(ValueError, RecursionError):
            document = json.loads(reply.data)
            if isinstance(document, dict) and isinstance(document.get("kind"), str):
                return error_from_json(document)
    text = f"{server} answered {reply.status} without an error of persist: {reply.data[:100]!r}"
    if reply.status < 500:
        return PersistError(f"{text}; is it a persist server?")
    return Unavailable(text) if safe else Indeterminate(f"{text}; it may have happened, retry with the same token")
