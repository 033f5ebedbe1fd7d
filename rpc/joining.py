"""uvicorn's protocol with two changes: answers in one piece, and an answer of our own beyond `connections_max`.

What is written to a connection in one turn of the event loop goes out in one send. uvicorn writes an answer's header
and its body one after the other, and uvloop sends each at once: two system calls here and two wake-ups of the client,
which is a good part of what a small call costs.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

FULL = "persist.full"
"""The key of a request's scope that says: there are more connections than the server takes."""


class JoiningProtocol(HttpToolsProtocol):
    """uvicorn's protocol on a transport that joins writes."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # uvicorn would answer 503 as plain text, by which no client can know that nothing happened.
        self._connections_max, self.limit_concurrency = self.limit_concurrency, None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_Joining(transport, self.loop))  # type: ignore[arg-type]

    def on_headers_complete(self) -> None:
        if self._connections_max is not None and len(self.connections) > self._connections_max:
            self.scope[FULL] = True  # type: ignore[literal-required]
        super().on_headers_complete()


class _Joining:
    """A transport whose writes are kept until the event loop's next turn."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._pieces: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._pieces:
            data, self._pieces = b"".join(self._pieces), []
            self._transport.write(data)
