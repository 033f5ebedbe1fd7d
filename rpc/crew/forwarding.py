"""A request as another worker process of the server answers it: over a pair of sockets made for this request alone.

For what cannot be handed over as a connection: requests over TLS, and those that came behind others. The worker that
answers is told who asks in the letter that brings it its end of the pair, which no client can write.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send

from persist.core.errors import Indeterminate, Unavailable
from rpc.crew.letters import Identity
from rpc.crew.member import FORWARDS_MAX, Crew

PIECE_BYTES = 64 * 1024
CONTINUE = 100
_NOT_SENT = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade"})  # of this hop alone
_NOT_ANSWERED = frozenset({b"connection", b"transfer-encoding", b"date"})  # which the client's own connection says
_SAFE = ("GET", "HEAD")


async def forward(crew: Crew, worker: int, identity: Identity, scope: Scope, receive: Receive, send: Send) -> bool:
    """Have another worker answer. False: it takes nothing now, and nobody has been told anything.

    Raises Unavailable, or Indeterminate where it may have done what was asked: it ended meanwhile.
    """
    if crew.under_way >= FORWARDS_MAX:
        return False
    try:
        ours, theirs = socket.socketpair()
    except OSError:  # this process can open no more files
        return False
    ours.setblocking(False)
    try:
        out = ours.dup()  # to send by: a body that is refused does not end reading the answer
    except OSError:
        ours.close()
        theirs.close()
        return False
    with theirs:
        if not crew.give(worker, theirs.fileno(), b"", identity):
            ours.close()
            out.close()
            return False
    reader, writer = await asyncio.open_connection(sock=ours, limit=PIECE_BYTES)
    answer = _Answer(has_body=scope["method"] != "HEAD")
    sending = asyncio.create_task(_send(scope, receive, out, writer.transport, answer))
    crew.under_way += 1
    try:
        await _answered(reader, answer, send)
    except _Ended as error:
        if sending.done() and not sending.cancelled() and sending.exception() is None:
            return True  # the client is gone, and so we were for the other worker
        if answer.is_begun or scope["method"] not in _SAFE:
            raise Indeterminate("the process that has this shard ended meanwhile; it may be done") from error
        raise Unavailable("the process that has this shard ended meanwhile; try again") from error
    finally:
        crew.under_way -= 1
        writer.transport.abort()
        sending.cancel()
        with out, contextlib.suppress(asyncio.CancelledError, OSError):
            await sending
    return True


async def asked(
    crew: Crew, worker: int, identity: Identity, scope: Scope, timeout_s: float
) -> tuple[int, bytes] | None:
    """The status and body of what another worker answers to a request without a body. None: it does not, in time."""
    status, pieces = 0, []

    async def receive() -> Message:
        if asked_once.is_set():
            await asyncio.Event().wait()  # the asker stays
        asked_once.set()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))

    asked_once = asyncio.Event()
    try:
        async with asyncio.timeout(timeout_s):
            if not await forward(crew, worker, identity, scope, receive, send):
                return None
    except (TimeoutError, Unavailable, Indeterminate):
        return None
    return status, b"".join(pieces)


class _Ended(Exception):
    """The other worker closed its end before all of the answer was there."""


class _Answer:
    """What a parser of answers calls."""

    def __init__(self, *, has_body: bool) -> None:
        self.parser: Any = httptools.HttpResponseParser(self)
        self.may_send = asyncio.Event()  # the body: it was asked for, or there is an answer without
        self.is_begun = self.is_whole = False
        self.messages: list[Message] = []
        self._has_body = has_body
        self._headers: list[tuple[bytes, bytes]] = []

    def on_message_begin(self) -> None:
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() not in _NOT_ANSWERED:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.may_send.set()
        status = self.parser.get_status_code()
        if status == CONTINUE:
            return
        self.is_begun = True
        self.messages.append({"type": "http.response.start", "status": status, "headers": self._headers})
        if not self._has_body:
            self._end()

    def on_body(self, body: bytes) -> None:
        self.messages.append({"type": "http.response.body", "body": body, "more_body": True})

    def on_message_complete(self) -> None:
        if self.is_begun and not self.is_whole:
            self._end()

    def _end(self) -> None:
        self.is_whole = True
        self.messages.append({"type": "http.response.body", "body": b"", "more_body": False})


async def _answered(reader: asyncio.StreamReader, answer: _Answer, send: Send) -> None:
    """Pass the answer on as it comes. Raises _Ended."""
    while not answer.is_whole:
        data = await reader.read(PIECE_BYTES)
        if not data:
            raise _Ended
        try:
            answer.parser.feed_data(data)
        except httptools.HttpParserError as error:
            if not answer.is_whole:
                raise _Ended from error
        messages, answer.messages = answer.messages, []
        for message in messages:
            await send(message)


async def _send(
    scope: Scope, receive: Receive, out: socket.socket, transport: asyncio.WriteTransport, answer: _Answer
) -> None:
    """Send the request, with its body as it comes; then wait until the client is gone, and be gone, too."""
    send = partial(asyncio.get_running_loop().sock_sendall, out)
    names = {name for name, _ in scope["headers"]}
    is_chunked = b"transfer-encoding" in names
    await send(_head(scope))
    if b"expect" in names:
        await answer.may_send.wait()
    frame = _chunk if is_chunked else _plain
    while True:
        message = await receive()
        if message["type"] != "http.request":
            transport.abort()
            return
        body: bytes = message.get("body", b"")
        if body:
            await send(frame(body))
        if not message.get("more_body", False):
            break
    if is_chunked:
        await send(b"0\r\n\r\n")
    await receive()
    transport.abort()


_Frame = Callable[[bytes], bytes]


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def _plain(body: bytes) -> bytes:
    return body


def _head(scope: Scope) -> bytes:
    """The head of a request as it came, which is the only one on its connection."""
    target: bytes = scope["raw_path"]
    if scope["query_string"]:
        target += b"?" + scope["query_string"]
    lines = [b"%b %b HTTP/1.1" % (scope["method"].encode(), target)]
    lines += [b"%b: %b" % (name, value) for name, value in scope["headers"] if name not in _NOT_SENT]
    return b"\r\n".join((*lines, b"connection: close", b"", b""))
