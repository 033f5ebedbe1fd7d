"""HTTP/1.1 over pooled sockets, and the parser of responses."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpResponseParser

from persist.client.arguments import ClientTls
from persist.core.errors import InvalidUsage

# One response from its bytes, without a socket.
#
# httptools (llhttp) reads the grammar. This class adds what a client must reject: a response without a length, a
# truncated one, one with bytes after its end, and an endless one. All raise Broken: the request may have happened.

HEADER_BYTES_MAX = 64 * 1024  # of a header, including interim responses before it; and of trailers
PARSED_BYTES = 4 * 1024  # at a time, so that the length of a trailer is bounded as well
INTERIM_MAX = 16  # interim responses (100 to 199) before the final one


class Broken(Exception):
    """The connection ended, nothing came in time, or the response was not HTTP, after the request was partly sent."""


class TimedOut(Broken):
    """The response, or the rest of it, did not come in time."""


@dataclass(slots=True)
class Reply:
    """Status, headers (lower-case names) and body."""

    status: int
    headers: dict[str, str]
    data: bytes


class Answer:
    """A response that is fed with received bytes until `is_whole`. The outcome does not depend on how they are split,
    except that trailers may exceed their limit by PARSED_BYTES.

    `reply` is None until the header is complete; `take` returns the body as it arrives.
    """

    def __init__(self, is_head: bool = False) -> None:
        self.reply: Reply | None = None
        self.is_whole = False
        self.keeps_alive = False
        self._is_head = is_head
        self._parser: HttpResponseParser | None = HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._interim = 0
        self._left = 0  # missing bytes of a body of known length
        self._idle_bytes = 0  # received since the header was complete or a piece of the body arrived

    @property
    def content_length(self) -> int:
        """The Content-Length of the body; 0: unknown."""
        return 0 if self._is_head else int(self._headers.get("content-length", 0))

    def feed(self, data: bytes) -> None:
        """Process received bytes; no bytes mean that the connection has ended. Raises Broken."""
        if not data and not self.is_whole:
            raise Broken("the server closed the connection")
        start = 0
        while start < len(data) and not self._left and not self.is_whole:
            room = PARSED_BYTES if self.reply else min(PARSED_BYTES, HEADER_BYTES_MAX - self._idle_bytes)
            self._parse(data[start : start + room])
            start += room
        data = data[start:]
        if self._left and data:  # only body follows, which the parser would copy
            piece, data = data[: self._left], data[self._left :]
            self._left -= len(piece)
            self._pieces.append(piece)
            self.is_whole = not self._left
        if data:
            self._check_end(data)

    def take(self) -> bytes:
        """The part of the body that arrived since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _parse(self, data: bytes) -> None:
        assert self._parser is not None
        try:
            self._idle_bytes += len(data)
            self._parser.feed_data(data)
            if self._idle_bytes >= HEADER_BYTES_MAX:
                raise Broken(f"the response's header or trailer is longer than {HEADER_BYTES_MAX} bytes")
        except HttpParserCallbackError as error:
            raise Broken(str(error.__context__)) from error
        except (HttpParserError, HttpParserUpgrade) as error:
            raise Broken(f"the response is not HTTP: {error}") from error
        if self.reply is not None and not self.is_whole and "content-length" in self._headers:
            self._left = int(self._headers["content-length"]) - sum(map(len, self._pieces))  # validated by the parser
        if self.is_whole or self._left:
            self._parser = None  # breaks the reference cycle, so that both are freed at once

    def _check_end(self, data: bytes) -> None:
        """Rejects bytes after the end except line breaks, which the parser accepts, too."""
        if data.strip(b"\r\n"):
            raise Broken("the response continues after its end")

    # Called by the parser, which wraps exceptions in an HttpParserCallbackError.

    def on_message_begin(self) -> None:
        if self.is_whole:
            raise Broken("another response follows after its end")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.reply is None:
            key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
            self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if not self._parser.get_http_version().startswith("1."):
            raise Broken("the response is not HTTP/1")
        if 100 <= status < 200:
            self._interim += 1
            self._headers.clear()
            if status == 101 or self._interim > INTERIM_MAX:
                raise Broken(f"the server sends {status} instead of a response")
            return
        if not 200 <= status < 600:
            raise Broken(f"the response's status is {status}")
        is_empty = self._is_head or status in (204, 304)
        if not is_empty and "content-length" not in self._headers:
            coding = self._headers.get("transfer-encoding")
            if coding is None or coding.lower() != "chunked":
                raise Broken("the response has no length")
        self.reply = Reply(status, self._headers, b"")
        # The parser expects chunks even after HEAD, and would swallow what looks like the beginning of one.
        is_framed = not self._is_head or "transfer-encoding" not in self._headers
        self.keeps_alive = is_framed and self._parser.should_keep_alive()
        self.is_whole = is_empty
        self._idle_bytes = 0

    def on_body(self, data: bytes) -> None:
        if self.is_whole:
            self._check_end(data)
            return
        self._pieces.append(data)
        self._idle_bytes = 0

    def on_message_complete(self) -> None:
        self.is_whole = self.reply is not None


# Connections. A small HTTP client of our own, because the client dominates the cost of small calls.
#
# A call of 11 kB takes 0.04 ms of CPU, compared with 0.24 by `urllib3` and 0.16 by `http.client`. It supports what our
# server uses: keep-alive, bodies by Content-Length or chunks, TLS. No redirects, cookies or encodings.

IDLE_MAX = 256  # idle connections kept to one server
RECEIVE_BYTES = 256 * 1024
ANSWER_BYTES_MAX = 256 * 1024**2  # of a body that is read as a whole, by default
ERROR_BYTES_MAX = 1024**2  # of the body of a response of 400 or more
JOINED_BYTES_MAX = 64 * 1024  # a body up to this size is sent together with its header
PROBE_AFTER_S = 1.0  # without a response for so long, the server is probed; then after twice that, and so on
PROBE_S = 2.0  # for the response to a probe
PROBES_PER_WAIT = 4  # a probe begins, and ends, within this fraction of the request's time
LEAST_WAIT_S = 0.001  # a socket accepts no negative timeout, and zero means non-blocking
PROBE_PATH = "/healthz"


class NotSent(Exception):
    """The server was not reached, so the request was not sent."""


def tls_of(urls: Iterable[str], trust: ClientTls | None) -> ssl.SSLContext | None:
    """The TLS context for these URLs; None: none of them uses TLS. Raises InvalidUsage if a PEM file is invalid."""
    is_secure = any(url.lower().startswith("https:") for url in urls)
    return (trust or ClientTls()).context() if is_secure else None


class ConnectionPool:
    """Connections to one server. Thread-safe; a connection serves one request at a time.

    `probes`: a slow server is probed at PROBE_PATH, which servers of persist have.
    """

    def __init__(self, url: str, *, connect_s: float, tls: ssl.SSLContext | None, probes: bool = True) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls if parts.scheme == "https" else None
        self._connect_s = connect_s
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._waiting: set[_Connection] = set()
        self._closed = False
        self._probes = probes
        self._host_line = f"host: {parts.netloc}\r\n"

    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | memoryview | None,
        timeout_s: float,
        bytes_max: int = ANSWER_BYTES_MAX,
    ) -> Reply:
        """One request and its whole response within `timeout_s`, with a body of at most `bytes_max` bytes.

        Raises NotSent, InvalidUsage, TimedOut, and Broken, also for a longer response, and for a GET, which may wait
        for a time to come, if the pool is closed.
        """
        head = self._head(method, path, headers, body)
        connection = self._take(timeout_s)
        try:
            connection.send(head, body, timeout_s)
            with self._interruptible(connection) if method == "GET" else contextlib.nullcontext():
                connection.wait(self._is_there if self._probes else None)
            reply = connection.answer(method == "HEAD", bytes_max)
        except BaseException:
            connection.close()
            raise
        self._give(connection)
        return reply

    @contextlib.contextmanager
    def _interruptible(self, connection: _Connection) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise Broken("the client was closed")
            self._waiting.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._waiting.discard(connection)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._waiting:
                connection.interrupt()
        for connection in idle:
            connection.close()

    def _is_there(self, timeout_s: float) -> bool:
        """Whether the server responds to a probe: one that hangs keeps its connections open."""
        try:
            connection = self._connect()
        except (NotSent, InvalidUsage):
            return False
        try:
            connection.send(self._head("GET", PROBE_PATH, {}, None), None, timeout_s)
            connection.answer(False, ERROR_BYTES_MAX)
        except Broken:
            return False
        finally:
            connection.close()
        return True

    def _head(self, method: str, path: str, headers: Mapping[str, str], body: bytes | memoryview | None) -> bytes:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        length = f"content-length: {len(body)}\r\n" if body is not None else ""
        head = f"{method} {path} HTTP/1.1\r\n{self._host_line}{lines}{length}\r\n"
        breaks = 3 + len(headers) + (body is not None)
        if head.count("\r") != breaks or head.count("\n") != breaks:
            raise ValueError("a header contains a line break")
        return head.encode("latin-1")

    def _take(self, timeout_s: float) -> _Connection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect(timeout_s)
            if connection.is_quiet():
                return connection
            connection.close()  # the server has closed it

    def _give(self, connection: _Connection) -> None:
        with self._lock:
            if connection.reusable and not self._closed and len(self._idle) < IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self, timeout_s: float | None = None) -> _Connection:
        """A new connection, within `timeout_s` seconds but at most `connect_s`. Raises NotSent."""
        connect_s = self._connect_s if timeout_s is None else max(min(self._connect_s, timeout_s), LEAST_WAIT_S)
        try:
            plain = socket.create_connection((self._host, self._port), connect_s)
        except OSError as error:
            raise NotSent(str(error) or type(error).__name__) from error
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                return _Connection(plain)
            return _Connection(self._tls.wrap_socket(plain, server_hostname=self._host))
        except ssl.SSLCertVerificationError as error:
            plain.close()
            reason = f"the certificate of {self._host}:{self._port} is not trusted: {error.verify_message}"
            raise InvalidUsage(f"{reason}; give ca_file") from error
        except OSError as error:
            plain.close()
            raise NotSent(str(error) or type(error).__name__) from error


class _Connection:
    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._poll = select.poll()
        self._poll.register(connected, select.POLLIN)
        self.reusable = False
        self.ends = 0.0  # the deadline of the response

    def is_quiet(self) -> bool:
        """Whether nothing has arrived since the last response, not even the end of the connection."""
        return not self._poll.poll(0)

    def close(self) -> None:
        self._socket.close()

    def interrupt(self) -> None:
        """End a wait by another thread, which finds the connection broken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self, is_there: Callable[[float], bool] | None) -> None:
        """Wait for the response to begin, probing the server (by `is_there`) less and less often. Raises Broken."""
        # Short waits are probed early enough to leave time for another server.
        pause = self._left() if is_there is None else min(PROBE_AFTER_S, self._left() / PROBES_PER_WAIT)
        while not self._poll.poll(max(min(pause, self._left()), 0) * 1000):
            left = self._left()
            if left <= 0:
                raise TimedOut("no response came in time")
            if is_there is not None and not is_there(min(PROBE_S, left / PROBES_PER_WAIT)):
                raise Broken("the server hangs")
            pause *= 2

    def answer(self, is_head: bool, bytes_max: int) -> Reply:
        """The whole response. Raises Broken."""
        answer, reply = self.begin(is_head)
        reply.data = self.body(answer, bytes_max if reply.status < 400 else ERROR_BYTES_MAX)
        self.reusable = answer.keeps_alive
        return reply

    def send(self, head: bytes, body: bytes | memoryview | None, timeout_s: float) -> None:
        self.reusable = False
        self.ends = time.monotonic() + timeout_s
        try:
            self._socket.settimeout(max(timeout_s, LEAST_WAIT_S))
            if body is None:
                self._socket.sendall(head)
            elif len(body) <= JOINED_BYTES_MAX:
                self._socket.sendall(head + body)
            else:
                self._socket.sendall(head)
                self._socket.sendall(body)
        except ConnectionError as error:
            # The server may have responded (that the body is too large, say) before it read everything.
            if not self._poll.poll(0):
                raise Broken(type(error).__name__) from error
        except OSError as error:
            raise Broken(type(error).__name__) from error

    def begin(self, is_head: bool) -> tuple[Answer, Reply]:
        """The response up to its header. Raises Broken."""
        answer = Answer(is_head)
        while answer.reply is None:
            answer.feed(self._receive())
        return answer, answer.reply

    def body(self, answer: Answer, bytes_max: int) -> bytes:
        """The rest of a response. Raises Broken if it is truncated or longer than `bytes_max`."""
        if answer.content_length > bytes_max:
            raise Broken(f"the response has {answer.content_length} bytes; at most {bytes_max} are accepted")
        pieces, size = [], 0
        for piece in self.pieces(answer):
            pieces.append(piece)
            size += len(piece)
            if size > bytes_max:
                raise Broken(f"the response is longer than {bytes_max} bytes, the most that is accepted")
        return b"".join(pieces)

    def pieces(self, answer: Answer) -> Iterator[bytes]:
        """The body as it arrives. Raises Broken if it is truncated."""
        while True:
            if piece := answer.take():
                yield piece
            if answer.is_whole:
                return
            answer.feed(self._receive())

    def _receive(self) -> bytes:
        """Received bytes; empty if the server has closed the connection."""
        try:
            self._socket.settimeout(max(self._left(), LEAST_WAIT_S))
            return self._socket.recv(RECEIVE_BYTES)
        except TimeoutError as error:
            raise TimedOut("nothing came in time") from error
        except OSError as error:
            raise Broken(type(error).__name__) from error

    def _left(self) -> float:
        return self.ends - time.monotonic()
