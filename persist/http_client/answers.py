"""One HTTP/1.1 answer from its bytes, without a socket: bytes in, status, headers and body out.

httptools (llhttp) reads the grammar. This class adds what a client must not take for an answer: one without a length,
one that is cut, one with bytes after its end, and one that goes on without end. Every such answer is one error, Broken:
the request may have happened.
"""

from __future__ import annotations

from httptools import HttpParserCallbackError, HttpParserError, HttpParserUpgrade, HttpResponseParser

HEADER_BYTES_MAX = 64 * 1024  # of a header, interim answers before it included; and of trailers
PARSED_BYTES = 4 * 1024  # at a time, so that the length of a trailer is known about as well
INTERIM_MAX = 16  # interim answers (100 to 199) before the real one


class Broken(Exception):
    """The connection ended, nothing came in time, or no HTTP came, after the request had begun to go out."""


class TimedOut(Broken):
    """Nothing, or not all, came in time."""


class Reply:
    """Status, headers (lower-case names) and body."""

    __slots__ = ("data", "headers", "status")

    def __init__(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.status = status
        self.headers = headers
        self.data = data


class Answer:
    """Feed it what arrives until `is_whole`. However the bytes are cut, the outcome is the same, but for trailers that
    are at most PARSED_BYTES longer than they may be.

    `reply` is None until the header is complete; `take` gives the body as it comes.
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
        self._left = 0  # bytes of a body of known length that are to come
        self._idle_bytes = 0  # received since the header was complete or a piece of the body came

    @property
    def bytes_told(self) -> int:
        """How many bytes the body has, as its header tells; 0: it does not."""
        return 0 if self._is_head else int(self._headers.get("content-length", 0))

    def feed(self, data: bytes) -> None:
        """Take what has arrived; no bytes mean that the connection has ended. Raises Broken."""
        if not data and not self.is_whole:
            raise Broken("the server closed the connection")
        start = 0
        while start < len(data) and not self._left and not self.is_whole:
            room = PARSED_BYTES if self.reply else min(PARSED_BYTES, HEADER_BYTES_MAX - self._idle_bytes)
            self._parse(data[start : start + room])
            start += room
        data = data[start:]
        if self._left and data:  # nothing but body is to come: the parser would only copy it
            piece, data = data[: self._left], data[self._left :]
            self._left -= len(piece)
            self._pieces.append(piece)
            self.is_whole = not self._left
        if data:
            self._check_end(data)

    def take(self) -> bytes:
        """What has come of the body since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _parse(self, data: bytes) -> None:
        assert self._parser is not None
        try:
            self._idle_bytes += len(data)
            self._parser.feed_data(data)
            if self._idle_bytes >= HEADER_BYTES_MAX:
                raise Broken(f"the answer's header or trailer is longer than {HEADER_BYTES_MAX} bytes")
        except HttpParserCallbackError as error:
            raise Broken(str(error.__context__)) from error
        except (HttpParserError, HttpParserUpgrade) as error:
            raise Broken(f"the answer is not HTTP: {error}") from error
        if self.reply is not None and not self.is_whole and "content-length" in self._headers:
            self._left = int(self._headers["content-length"]) - sum(map(len, self._pieces))  # the parser checked it
        if self.is_whole or self._left:
            self._parser = None  # it refers back to this answer: without the circle both are freed at once

    def _check_end(self, data: bytes) -> None:
        """Whatever comes after the end is refused, but for line breaks: the parser lets them pass, too."""
        if data.strip(b"\r\n"):
            raise Broken("the answer goes on after its end")

    # What the parser calls. It turns whatever they raise into an HttpParserCallbackError.

    def on_message_begin(self) -> None:
        if self.is_whole:
            raise Broken("another answer follows after its end")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.reply is None:
            key, text = name.decode("latin-1").lower(), value.decode("latin-1").strip()
            self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if not self._parser.get_http_version().startswith("1."):
            raise Broken("the answer is not HTTP/1")
        if 100 <= status < 200:
            self._interim += 1
            self._headers.clear()
            if status == 101 or self._interim > INTERIM_MAX:
                raise Broken(f"the server sends {status} instead of an answer")
            return
        if not 200 <= status < 600:
            raise Broken(f"the answer's status is {status}")
        is_empty = self._is_head or status in (204, 304)
        if not is_empty and "content-length" not in self._headers:
            coding = self._headers.get("transfer-encoding")
            if coding is None or coding.lower() != "chunked":
                raise Broken("the answer does not say how long it is")
        self.reply = Reply(status, self._headers, b"")
        # The parser looks for chunks even after HEAD, and would swallow what looks like the beginning of one.
        is_sure = not self._is_head or "transfer-encoding" not in self._headers
        self.keeps_alive = is_sure and self._parser.should_keep_alive()
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
