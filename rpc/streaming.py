"""Streamed answers, and what they hold while they are sent."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Generator
from contextlib import AsyncExitStack

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from rpc.work import Work

PIECE_BYTES = 256 * 1024  # what is given to a connection at a time


class HeldStream(StreamingResponse):
    """Gives back everything on `held` when it ends: whole, broken off, or never begun.

    It goes out in pieces of PIECE_BYTES. The connection waits for its client, and cuts off who takes too long.
    """

    def __init__(
        self,
        content: AsyncIterator[bytes],
        held: AsyncExitStack,
        *,
        media_type: str,
        headers: dict[str, str],
        status: int = 200,
    ) -> None:
        super().__init__(content, status, headers=headers, media_type=media_type)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def pieces(message: Message) -> None:
            body = message.get("body", b"")
            for start in range(0, len(body) - PIECE_BYTES, PIECE_BYTES):
                piece = body[start : start + PIECE_BYTES]
                await send({"type": message["type"], "body": piece, "more_body": True})
            if len(body) > PIECE_BYTES:
                message = {**message, "body": body[(len(body) - 1) // PIECE_BYTES * PIECE_BYTES :]}
            await send(message)

        async with self._held:
            await super().__call__(scope, receive, pieces)


class Stepped:
    """A generator of bytes that blocks, advanced on other threads. Closing it waits for the step under way."""

    def __init__(self, work: Work, pieces: Generator[bytes]) -> None:
        self._work = work
        self._pieces = pieces
        self._lock = threading.Lock()

    async def next(self) -> bytes | None:
        """The next piece; None at the end."""
        return await self._work.run(self._next)

    async def rest(self, piece: bytes | None) -> AsyncIterator[bytes]:
        """`piece`, and all that come after it."""
        while piece is not None:
            if piece:
                yield piece
            piece = await self.next()

    async def close(self) -> None:
        await self._work.run(self._close)

    def _next(self) -> bytes | None:
        with self._lock:
            return next(self._pieces, None)

    def _close(self) -> None:
        with self._lock:
            self._pieces.close()
