"""uvicorn's protocol with two changes: each response is sent in one piece, and clients' use of resources is bounded.

All writes to a connection in one turn of the event loop become one send. uvicorn writes the header and the body of a
response separately, and uvloop sends each at once: two system calls and two wake-ups of the client, which is a large
part of the cost of a small call.

uvicorn bounds neither the length of request lines and headers nor how long it waits.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from persist.core.errors import InvalidUsage, Overloaded, PersistError, Unavailable
from persist.formats.exposition import COUNTER, Family, Labelled
from rpc.concurrency_limits import decrease
from rpc.errors import ERROR_KEY, HeadersTooLarge, RequestLineTooLong, TooSlow, problem
from rpc.settings import Limits
from rpc.tls import Peer, peer_of

REFUSED = "persist.refused"
"""The key of a request's scope that holds the error with which a connection beyond the limits is refused."""
CONNECTION = "persist.connection"
"""The key of a request's scope that holds its connection."""
LINGER_S = 1.0  # after a refusal: closing at once could discard the response before the client reads it
DISCARDED_BYTES_MAX = 1024 * 1024  # of what a client still sends then
JOINED_BYTES_MAX = 64 * 1024
IDLE_S = 120.0  # of a connection without a request
REQUEST_LINE_BYTES_MAX = 32 * 1024
HEADERS_BYTES_MAX = 64 * 1024  # of one request, including its request line
HEADERS_MAX = 128  # of one request
HEADS_BYTES_MAX = 32 * 1024 * 1024  # of all requests whose headers are not complete
PIPELINED_MAX = 64  # requests of one connection that wait for earlier responses
BODY_BYTES_PER_S_MIN = 8 * 1024
BODY_GRACE_S = 20.0  # how long a body may be slower than that
ANSWER_BYTES_PER_S_MIN = 8 * 1024  # a client may read a response slower for `slow_reader_s`
NOTHING, HEAD, BODY = range(3)  # the part of a request that is being received


def peer_of_request(scope: Mapping[str, Any]) -> Peer | None:
    """The client's identity by the certificate of the connection. None: it has shown none, or has disconnected."""
    connection = scope.get(CONNECTION)
    peer: Peer | None = None if connection is None else connection.peer
    return peer


class JoiningProtocol(HttpToolsProtocol):
    """uvicorn's protocol on a transport that joins writes. All connections of a server share `bounds`."""

    transport: Any

    def __init__(self, *arguments: Any, bounds: ConnectionBounds | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.limit_concurrency = None  # uvicorn would answer 503 as plain text, which clients cannot interpret
        self.owner: str | None = None
        self.peer: Peer | None = None
        self._bounds = bounds or ConnectionBounds(Limits())
        self._limits = self._bounds.limits
        self._refused: PersistError | None = None  # the response to all requests of this connection
        self._refusal: PersistError | None = None  # raised in a callback of the parser
        self._part = NOTHING
        self._since = 0.0  # when this part, or the idle time, began
        self._url: list[bytes] = []
        self._head_left = 0  # bytes that the head of this request may still have
        self._held = 0  # bytes of an incomplete head, as counted for the whole server
        self._unframed = 0  # bytes since the head was complete, or a piece of the body arrived
        self._received = 0  # bytes of bodies since the last check
        self._taken = 0  # bytes of responses that the client had read at the last check
        self._coming: Pace | None = None  # of the body that is received
        self._going: Pace | None = None  # of responses that the client has not read
        self._over = False  # refused, or answered before the request was complete; it only closes
        self._discarded = 0  # bytes since then

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_JoinedTransport(transport, self.loop))  # type: ignore[arg-type]
        self.peer = peer_of(transport)
        self._refused = self._bounds.enter(self, self.client[0] if self.client else None, self.loop)
        self._since = self._bounds.now

    def connection_lost(self, exc: Exception | None) -> None:
        self._bounds.leave(self)
        self._release_head()
        self._url = []
        if self.scope is not None:
            self.scope.pop(CONNECTION, None)  # type: ignore[misc]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._over:
            self._discarded += len(data)
            if self._discarded > DISCARDED_BYTES_MAX:
                self.flow.pause_reading()
            return
        self._unframed += len(data)
        super().data_received(data)
        if self._part != NOTHING and not self._over:
            self._check_unframed(len(data))

    # Called by the parser. An exception ends the parsing, and uvicorn calls `send_400_response`.

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED_MAX:
            self._refuse(Overloaded("too many requests wait on this connection: read the responses first"))
        super().on_message_begin()
        self._part, self._since = HEAD, self._bounds.now
        self._head_left = HEADERS_BYTES_MAX
        self._url = []

    def on_url(self, url: bytes) -> None:
        self._url.append(url)
        self._head_left -= len(url)
        if HEADERS_BYTES_MAX - self._head_left > REQUEST_LINE_BYTES_MAX:
            self._refuse(RequestLineTooLong(f"the URL is longer than {REQUEST_LINE_BYTES_MAX} bytes; use a body"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_left -= len(name) + len(value) + 4
        if self._head_left < 0 or len(self.headers) >= HEADERS_MAX:
            self._refuse(self._headers_too_large())
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        url = self._url
        self.url = url[0] if len(url) == 1 else b"".join(url)
        self._part, self._since, self._unframed = BODY, self._bounds.now, 0
        if self._held:
            self._release_head()
        self.scope[CONNECTION] = self  # type: ignore[literal-required]
        if self._refused is not None:
            self.scope[REFUSED] = self._refused  # type: ignore[literal-required]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unframed = 0
        self._received += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._part, self._since, self._unframed = NOTHING, self._bounds.now, 0
        self._coming = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """As in uvicorn, but without a timer for each request: the sweep closes idle connections."""
        self._since = self._bounds.now
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self._part == BODY and not self.pipeline:  # the rest of the body is not needed, and reading it costs time
            self._linger()
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())

    def send_400_response(self, msg: str) -> None:
        self._answer(self._refusal or InvalidUsage("this is not an HTTP/1.1 request: is it meant for another port?"))

    # Called by `ConnectionBounds` and the middleware.

    def assign_owner(self, owner: str) -> None:
        """Assign this connection to a token. Raises Overloaded if the token has too many."""
        if owner != self.owner:
            self._bounds.assign_owner(self, owner)

    def quiet_since(self) -> float | None:
        """When the last request was answered; None: a request or a body is in progress."""
        return None if self._is_answering or self._part == BODY else self._since

    def end(self) -> None:
        """Close it without a response."""
        self._over = True
        self.transport.abort()

    def check(self, now: float, passed_s: float) -> int:
        """Close it if it is too slow; else return the bytes of responses that its client has not read."""
        pending: int = self.transport.pending()
        if pending:
            moved, self._taken = self.transport.written - pending - self._taken, self.transport.written - pending
            self._going = self._going or Pace()
            limits = self._limits
            if self._going.is_too_slow(moved, passed_s, ANSWER_BYTES_PER_S_MIN, limits.slow_reader_s):
                self._cut("answer")
                return 0
        elif self._going is not None or self.transport.written != self._taken:
            self._going, self._taken = None, self.transport.written
        late = self._late(now, passed_s)
        if late is not None:
            self._cut(late)
        return pending

    def _late(self, now: float, passed_s: float) -> str | None:
        """Which limit the client exceeds now, if any."""
        limits, since_s = self._limits, now - self._since
        received, self._received = self._received, 0
        if self._over or self._refused is not None:
            return "refused" if since_s > (LINGER_S if self._over else limits.headers_s) else None
        if self._is_answering:
            if self._part != BODY or self.flow.read_paused:  # else the server is the slow one
                return None
            self._coming = self._coming or Pace()
            slow = self._coming.is_too_slow(received, passed_s, BODY_BYTES_PER_S_MIN, BODY_GRACE_S)
            return "body" if slow else None
        if self._part == HEAD:
            return "head" if since_s > limits.headers_s else None
        return "idle" if since_s > IDLE_S else None

    def _cut(self, why: str) -> None:
        self._bounds.cut[why] += 1
        if why == "head":
            self._answer(TooSlow(f"the headers took longer than {self._limits.headers_s:g} s; send them at once"))
        elif why == "body" and self._is_answering:
            least, grace_s = BODY_BYTES_PER_S_MIN, BODY_GRACE_S
            self._answer(TooSlow(f"the body was slower than {least} bytes a second for {grace_s:g} s; send it faster"))
        else:
            if why == "answer" and self._is_answering:
                least, grace_s = ANSWER_BYTES_PER_S_MIN, self._limits.slow_reader_s
                text = f"the client read the response slower than {least} bytes/s for {grace_s:g} s; it can resume"
                self.cycle.scope[ERROR_KEY] = Unavailable(text)  # type: ignore[literal-required]  # logged, not sent
            self.end()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _check_unframed(self, received: int) -> None:
        """After a read: bound the bytes that the parser buffers without calling back."""
        if self._part == HEAD:
            self._held += received
            self._bounds.head_bytes += received
            if self._bounds.head_bytes > HEADS_BYTES_MAX:
                self._bounds.cut["heads"] += 1
                self._answer(Overloaded("the server has too many incomplete requests; send the headers at once"))
                return
        if self._unframed > HEADERS_BYTES_MAX:
            self._bounds.cut["long"] += 1
            self._answer(self._headers_too_large())

    def _release_head(self) -> None:
        self._bounds.head_bytes -= self._held
        self._held = 0

    def _refuse(self, error: PersistError) -> None:
        self._bounds.cut["long"] += 1
        self._refusal = error
        raise _Refused  # not the error: its traceback would keep what was read alive with this connection

    def _headers_too_large(self) -> PersistError:
        count, nbytes = HEADERS_MAX, HEADERS_BYTES_MAX
        return HeadersTooLarge(f"there are more than {count} headers, or more than {nbytes} bytes of them; send fewer")

    def _answer(self, error: PersistError) -> None:
        """Refuse the current request, and close. A client that is still sending reads the response first."""
        self._over = True
        self._since = self._bounds.now
        self._release_head()
        if self._is_answering:
            is_begun = self.cycle.response_started or bool(self.pipeline)
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if is_begun:  # another response is in progress, so this one cannot be sent
                self._hold()
                return
        self.transport.write(_raw(error))
        self._linger()

    def _hold(self) -> None:
        """Neither send nor read until the sweep closes it: a client that is closed at once reconnects at once."""
        self.pipeline.clear()
        self.cycle.body = bytearray()
        self.transport.pause_reading()

    def _linger(self) -> None:
        """Send no more, and discard input for as long as the client may need to read its response."""
        self._over = True
        if self.cycle is not None:
            self.cycle.body = bytearray()
        if self.transport.can_write_eof():
            self.transport.write_eof()  # if the client does not close, the sweep does
        else:
            self.transport.close()


class _Refused(Exception):
    """Ends the parsing of a request."""


def _raw(error: PersistError) -> bytes:
    """The last response of a connection: an error."""
    answer = problem(error)
    headers = b"".join(b"%s: %s\r\n" % header for header in answer.raw_headers)
    phrase = HTTPStatus(answer.status_code).phrase.encode()
    head = b"HTTP/1.1 %d %s\r\n%sconnection: close\r\n\r\n" % (answer.status_code, phrase, headers)
    return head + bytes(answer.body)


class _JoinedTransport:
    """A transport that collects writes until the event loop's next turn."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []
        self._joined = 0  # bytes in them
        self.written = 0  # bytes in total, of which `pending()` are still here

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self.written += len(data)
        self._joined += len(data)
        self._pieces.append(data)
        if self._joined > JOINED_BYTES_MAX:  # backpressure depends on what is passed to the transport
            self._flush()

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def pending(self) -> int:
        """Bytes that the client has not read and the system has not accepted."""
        return self._transport.get_write_buffer_size() + self._joined

    def _flush(self) -> None:
        if self._pieces:
            data, self._pieces, self._joined = b"".join(self._pieces), [], 0
            if not self._transport.is_closing():
                self._transport.write(data)


# Limits of connections: their number in total, per address and per token, their speed, and their idle time.
#
# One sweep over all connections every `SWEEP_S` checks all times, instead of a timer for each request. A request body
# or a response has a minimum speed and a grace period: slower seconds use it up, faster ones restore it.
#
# A process may be suspended for long, and does not see what clients sent and read meanwhile. So time that passes
# between two late sweeps is not counted against clients.

REFUSED_MAX = 256  # excess connections that receive an error response; further ones are closed at once
ADDRESS_PERCENT = 75  # of the connections, for one address (IPv6: one /64 network)
TOKEN_PERCENT = 75  # of the connections, for one token
ANSWERS_BYTES_MAX = 128 * 1024 * 1024  # of all responses that clients have not read yet
SWEEP_S = 1.0
QUIET_S = 1.0  # a connection that is idle for this long is closed if a new one needs room
CROWDED = 0.9  # of the limit: from here on the sweep looks for idle connections
LOOKED_AT_MAX = 2_000  # connections checked in one turn of the event loop
SWEEPS_PASSED_MAX = 2  # sweeps' worth of time counted between two readings of the clock at most
RETRY_AFTER_S = 1.0


class Pace:
    """Enforces a minimum speed: `grace_s` seconds of standstill fail it, and every `per_s` bytes restore one."""

    __slots__ = ("behind_s",)

    def __init__(self) -> None:
        self.behind_s = 0.0

    def is_too_slow(self, moved: int, passed_s: float, per_s: int, grace_s: float) -> bool:
        """Count the bytes that moved in the last `passed_s` seconds."""
        self.behind_s = max(0.0, self.behind_s + passed_s - moved / per_s)
        return self.behind_s > grace_s


class ConnectionBounds:
    """All connections of a server. Used from the event loop's thread."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.connections_max = limits.connections_max
        self.address_max = max(1, limits.connections_max * ADDRESS_PERCENT // 100)
        self._token_max = max(1, limits.connections_max * TOKEN_PERCENT // 100)
        self.now = 0.0  # counted seconds, as of the last sweep or new connection
        self.head_bytes = 0  # of requests whose headers are not complete
        self.cut: Counter[str] = Counter()  # connections closed or refused, by reason
        self._open: dict[JoiningProtocol, str] = {}  # with their addresses
        self._addresses: Counter[str] = Counter()
        self._owners: Counter[str] = Counter()
        self._refused: set[JoiningProtocol] = set()
        self._quiet: list[JoiningProtocol] = []  # idle ones, the first to close last
        self._is_sweeping = False
        self._swept = 0.0  # `now` of the last sweep
        self._clock_s = 0.0  # of the loop's clock

    @property
    def connections(self) -> int:
        return len(self._open)

    def limit_to(self, files_max: int) -> None:
        """Lower the limit to `files_max`, the number of connections that this process can open."""
        if files_max < self.connections_max:
            self.address_max = max(1, self.address_max * files_max // self.connections_max)
            self.connections_max = files_max

    def enter(
        self, connection: JoiningProtocol, host: str | None, loop: asyncio.AbstractEventLoop
    ) -> PersistError | None:
        """Register a new connection; returns the error for its requests if it is refused. May close an idle one."""
        self._pass(loop)
        if not self._is_sweeping:
            self._is_sweeping, self._swept = True, self.now
            loop.call_later(SWEEP_S, self._sweep, loop, [])
        address = network_of(host)
        error: PersistError | None = None
        if self._addresses[address] >= self.address_max:
            error = Overloaded(
                f"the address {address} has {self.address_max} connections, which is the limit; close some",
                retry_after_s=RETRY_AFTER_S,
            )
            self.cut["address"] += 1
        elif self._is_full() and not self._make_room():
            error = Unavailable("the server has too many connections; retry, or use another server")
            self.cut["full"] += 1
        self._open[connection] = address
        self._addresses[address] += 1
        if error is not None:
            self._refused.add(connection)
            if len(self._refused) > REFUSED_MAX:
                connection.end()
        return error

    def leave(self, connection: JoiningProtocol) -> None:
        """Unregister a closed connection. Idempotent."""
        address = self._open.pop(connection, None)
        if address is None:
            return
        self._refused.discard(connection)
        decrease(self._addresses, address)
        if connection.owner is not None:
            decrease(self._owners, connection.owner)

    def assign_owner(self, connection: JoiningProtocol, owner: str) -> None:
        """Assign the connection to a token. Raises Overloaded if the token has too many."""
        if connection.owner == owner or connection not in self._open:
            return
        if self._owners[owner] >= self._token_max:
            self.cut["token"] += 1
            raise Overloaded(
                f"the token {owner!r} has {self._token_max} connections, which is the limit; close some",
                retry_after_s=RETRY_AFTER_S,
            )
        if connection.owner is not None:
            decrease(self._owners, connection.owner)
        connection.owner = owner
        self._owners[owner] += 1

    def _is_full(self) -> bool:
        return len(self._open) - len(self._refused) >= self.connections_max

    def families(self) -> Iterator[Family]:
        cut: list[Labelled] = [((why,), count) for why, count in list(self.cut.items())]
        yield Family("persist_connections_cut_total", COUNTER, "Connections closed or refused by us", ("why",), cut)

    def _make_room(self) -> bool:
        """Close an idle connection; returns whether there was one."""
        while self._quiet:
            connection = self._quiet.pop()
            since = connection.quiet_since()
            if connection in self._open and since is not None and self.now - since >= QUIET_S:
                self.cut["quiet"] += 1
                connection.end()
                self.leave(connection)
                return True
        return False

    def _pass(self, loop: asyncio.AbstractEventLoop) -> None:
        """Advance `now`, except by time during which this process was suspended."""
        clock_s = loop.time()
        self.now += min(clock_s - self._clock_s, SWEEP_S * SWEEPS_PASSED_MAX)
        self._clock_s = clock_s

    def _sweep(
        self, loop: asyncio.AbstractEventLoop, rest: list[JoiningProtocol], passed_s: float = 0.0, held: int = 0
    ) -> None:
        """Check all connections, some in each turn of the loop: `rest` remains, `held` bytes were found so far."""
        self._pass(loop)
        if not rest:
            if not self._open:
                self._is_sweeping = False  # the next connection restarts it
                self._quiet.clear()
                return
            passed_s, self._swept = self.now - self._swept, self.now
            rest = list(self._open)
        for connection in rest[-LOOKED_AT_MAX:]:
            if connection in self._open:
                held += connection.check(self.now, passed_s)
                if held > ANSWERS_BYTES_MAX:
                    self.cut["answers"] += 1
                    held -= connection.check(self.now, 0.0)
                    connection.end()
        del rest[-LOOKED_AT_MAX:]
        if rest:
            loop.call_soon(self._sweep, loop, rest, passed_s, held)
            return
        self._find_quiet()
        loop.call_later(SWEEP_S, self._sweep, loop, [])

    def _find_quiet(self) -> None:
        """Find idle connections to close if there is no room: those without a token first, then the longest idle."""
        self._quiet = []
        if len(self._open) < self.connections_max * CROWDED:
            return
        quiet = [(c.owner is not None, since, c) for c in self._open if (since := c.quiet_since()) is not None]
        quiet.sort(key=lambda entry: entry[:2], reverse=True)
        self._quiet = [connection for _, _, connection in quiet]


def network_of(host: str | None) -> str:
    """What counts as one address: for IPv6 the /64 network, which belongs to one customer."""
    if host is None:
        return "unknown"
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))
