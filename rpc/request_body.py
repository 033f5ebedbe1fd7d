"""Request bodies: counted while they arrive, on disk when large, bounded in MessagePack items."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from persist.codecs.allowance import Allowance, BodyTooLarge
from persist.core.errors import Unavailable

if TYPE_CHECKING:
    from rpc.concurrency_limits import Work


# Bodies of requests: counted while they come in, on disk when they are large, in memory in turn.
#
# A body is in memory as a whole only once all of it is there. So a client that stops half way holds a small piece of
# memory, and some room in a temporary file (`TMPDIR` says where these are).


BODY_MEMORY_BYTES = 256 * 1024  # a body with more is in a temporary file until it is whole


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


# How many items a record in MessagePack has. They are counted before it is decoded, since each becomes an object.
#
# A command of 16 MiB may consist of eight million empty runs, which take half a gigabyte.


T = TypeVar("T")
ITEMS_MAX = 500_000  # of one record: about 20,000 parts
ITEM_BYTES = 64  # of what an item becomes at most, besides its own bytes
ITEMS_AT_ONCE_MAX = 500  # of a record that is decoded on the event loop
BYTES_AT_ONCE_MAX = 128 * 1024  # of such a record
BYTES_FEW = 16 * 1024  # of a record that is decoded without a count


async def decoded(work: Work, data: bytes, decode: Callable[[bytes], T], allowed: Allowance) -> T:
    """The record that `decode` makes of a body: on another thread where it may have many items, counted in `allowed`.

    Raises BodyTooLarge, Overloaded, and as `decode` does.
    """
    if len(data) <= BYTES_FEW or (len(data) <= BYTES_AT_ONCE_MAX and count(data, ITEMS_AT_ONCE_MAX) is not None):
        return decode(data)
    return await work.run(_counted, data, decode, allowed)


def _counted(data: bytes, decode: Callable[[bytes], T], allowed: Allowance) -> T:
    items = count(data, ITEMS_MAX)
    if items is None:
        raise BodyTooLarge(f"the record has more than {ITEMS_MAX} items; send fewer at once", bytes_max=len(data))
    allowed.spend(items * ITEM_BYTES)
    return decode(data)


def count(data: bytes, most: int) -> int | None:
    """The items of the first MessagePack value of `data` at every depth; None: they are more than `most`.

    Of data that is cut short it is the number up to the end. See https://github.com/msgpack/msgpack/blob/master/spec.md
    """
    found, awaited, at, end = 0, 1, 0, len(data)
    while awaited and at < end:
        if found + awaited > most:
            return None
        kind = data[at]
        head, length_bytes, fixed, children = _KINDS[kind]
        length = int.from_bytes(data[at + 1 : at + 1 + length_bytes], "big") if length_bytes else fixed
        at += head
        found, awaited = found + 1, awaited - 1
        if children:
            awaited += children * length
        else:
            at += length
    return found


def _kind(first: int) -> tuple[int, int, int, int]:
    """Of a value that begins with this byte: the bytes before its contents, of which so many tell the length; else the
    length; and how many items one of its elements is, where these are items and not bytes.
    """
    if first < 0x80 or first >= 0xE0 or first in (0xC0, 0xC1, 0xC2, 0xC3):  # small numbers, nil, booleans
        return 1, 0, 0, 0
    if first < 0x90:
        return 1, 0, first & 15, 2  # map
    if first < 0xA0:
        return 1, 0, first & 15, 1  # array
    if first < 0xC0:
        return 1, 0, first & 31, 0  # text
    numbers = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
    if first in numbers:
        return 1, 0, numbers[first], 0
    if 0xD4 <= first <= 0xD8:  # extensions of a fixed length
        return 2, 0, 1 << (first - 0xD4), 0
    told = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
    if first in told:  # bytes, extensions, texts
        return 1 + told[first] + (0xC7 <= first <= 0xC9), told[first], 0, 0
    wide = 2 if first in (0xDC, 0xDE) else 4
    return 1 + wide, wide, 0, 1 if first <= 0xDD else 2  # arrays, maps


_KINDS = tuple(map(_kind, range(256)))
