"""Bodies of requests: counted while they come in, on disk when they are large, in memory in turn.

A body is in memory as a whole only once all of it is there. So a client that stops half way holds a small piece of
memory, and some room in a temporary file (`TMPDIR` says where these are).
"""

from __future__ import annotations

import tempfile
from typing import IO, TYPE_CHECKING

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from persist.codecs.allowance import BodyTooLarge
from persist.core.errors import Unavailable

BODY_MEMORY_BYTES = 256 * 1024  # a body with more is in a temporary file until it is whole

if TYPE_CHECKING:
    from rpc.work import Work


def check_declared(declared: str | bytes, bytes_max: int) -> None:
    """Raises BodyTooLarge where the header Content-Length says so already."""
    if declared.isdigit() and int(declared[:20]) > bytes_max:
        said = declared.decode("latin-1") if isinstance(declared, bytes) else declared
        raise BodyTooLarge(f"the body has {said[:20]} bytes; send at most {bytes_max}", bytes_max=bytes_max)


class Body:
    """A request's body, counted against all bodies, and against those of its caller, until it is released."""

    __slots__ = ("_file", "_held", "_memory_max", "_spooled", "_work", "_worked")

    def __init__(self, work: Work) -> None:
        self._work = work
        self._memory_max = BODY_MEMORY_BYTES
        self._held = 0  # bytes in memory
        self._spooled = 0  # bytes in the file
        self._worked = 0  # bytes of the file that were read to be worked on
        self._file: IO[bytes] | None = None

    async def read(self, receive: Receive, bytes_max: int) -> bytes:
        """All of it. Raises BodyTooLarge, Overloaded, ClientDisconnect, and Unavailable: the disk takes no more."""
        work = self._work
        chunks: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientDisconnect()
            chunk: bytes = message.get("body", b"")
            work.body_bytes.take(len(chunk))
            self._held += len(chunk)
            if self._spooled + self._held > bytes_max:
                raise BodyTooLarge(f"the body is longer than {bytes_max} bytes; send less", bytes_max=bytes_max)
            chunks.append(chunk)
            is_whole = not message.get("more_body", False)
            if is_whole and self._file is None:
                return b"".join(chunks) if len(chunks) > 1 else chunk
            if is_whole or self._held > self._memory_max:
                await self._spool(b"".join(chunks))
                chunks = []
            if is_whole:
                return await self._unspooled()

    def release(self) -> None:
        """Give back what is held. Does nothing the second time."""
        work, file = self._work, self._file
        work.body_bytes.give_back(self._held)
        self._held = 0
        if file is not None:
            self._file = None
            file.close()
            work.spooled.give_back(self._spooled)
            self._spooled = 0
            if self._worked:
                work.worked.give_back(self._worked)
                self._worked = 0

    async def _spool(self, data: bytes) -> None:
        """Write what is in memory to the file, so that memory is free for others."""
        self._work.spooled.take(len(data))
        self._spooled += len(data)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="persist-body-", buffering=0)  # noqa: SIM115 - see release
            await self._work.run(_write, self._file, data)
        except OSError as error:
            where = tempfile.gettempdir()
            raise Unavailable(f"the server has no room for the body in {where}: {error.strerror}") from error
        self._work.body_bytes.give_back(self._held)
        self._held = 0

    async def _unspooled(self) -> bytes:
        assert self._file is not None
        await self._work.worked.take(self._spooled)
        self._worked = self._spooled
        return await self._work.run(_read, self._file)


def _write(file: IO[bytes], data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _read(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()
