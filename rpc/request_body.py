"""Request bodies: counted while they arrive, spooled to disk when large, bounded in MessagePack items."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import IO, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from persist.codecs.decode_limits import Allowance, BodyTooLarge
from persist.core.errors import Unavailable
from rpc.concurrency_limits import Work

# A body is in memory as a whole only once it is complete. So a client that stops half way occupies little memory, and
# some space in a temporary file (in `TMPDIR`).

BODY_MEMORY_BYTES = 256 * 1024  # a larger body is in a temporary file until it is complete


def check_declared(declared: str, bytes_max: int) -> None:
    """Raises BodyTooLarge if the header Content-Length exceeds the limit."""
    if declared.isdigit() and int(declared[:20]) > bytes_max:
        raise BodyTooLarge(f"the body has {declared[:20]} bytes; send at most {bytes_max}", bytes_max=bytes_max)


class Body:
    """A request's body, counted in total and for its caller until it is released."""

    __slots__ = ("_file", "_held", "_spooled", "_work", "_worked")

    def __init__(self, work: Work) -> None:
        self._work = work
        self._held = 0  # bytes in memory
        self._spooled = 0  # bytes in the file
        self._worked = 0  # bytes of the file that are in memory again
        self._file: IO[bytes] | None = None

    async def read(self, receive: Receive, bytes_max: int) -> bytes:
        """The whole body. Raises BodyTooLarge, Overloaded, ClientDisconnect, and Unavailable if the disk is full."""
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
            is_complete = not message.get("more_body", False)
            if is_complete and self._file is None:
                return b"".join(chunks) if len(chunks) > 1 else chunk
            if is_complete or self._held > BODY_MEMORY_BYTES:
                await self._spool(b"".join(chunks))
                chunks = []
            if is_complete:
                return await self._unspooled()

    def release(self) -> None:
        """Release everything. Idempotent."""
        work = self._work
        work.body_bytes.give_back(self._held)
        if self._file is not None:
            self._file.close()
            work.spooled.give_back(self._spooled)
            if self._worked:
                work.worked.give_back(self._worked)
        self._file, self._held, self._spooled, self._worked = None, 0, 0, 0

    async def _spool(self, data: bytes) -> None:
        """Write what is in memory to the file."""
        self._work.spooled.take(len(data))
        self._spooled += len(data)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="persist-body-", buffering=0)  # noqa: SIM115 - see release
            await self._work.run(_write, self._file, data)
        except OSError as error:
            directory = tempfile.gettempdir()
            raise Unavailable(f"the server has no room for the body in {directory}: {error.strerror}") from error
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


# The number of items of a MessagePack record is checked before it is decoded, since each item becomes an object: a
# command of 16 MiB may consist of eight million empty runs, which take half a gigabyte.

T = TypeVar("T")
ITEMS_MAX = 500_000  # of one record: about 20,000 parts
ITEM_BYTES = 64  # of a decoded item at most, without its own bytes
ITEMS_AT_ONCE_MAX = 500  # of a record that is decoded on the event loop
BYTES_AT_ONCE_MAX = 128 * 1024  # of such a record
BYTES_FEW = 16 * 1024  # of a record that is decoded without counting


async def decode_record(work: Work, data: bytes, decode: Callable[[bytes], T], allowed: Allowance) -> T:
    """The record that `decode` reads from a body, on another thread if it may have many items, counted in `allowed`.

    Raises BodyTooLarge, Overloaded, and what `decode` raises.
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
    """The items at every depth of the first MessagePack value of `data`; None: more than `most`.

    Counts up to the end of truncated data. See https://github.com/msgpack/msgpack/blob/master/spec.md
    """
    items, open_items, position, end = 0, 1, 0, len(data)
    while open_items and position < end:
        if items + open_items > most:
            return None
        head, length_bytes, fixed, children = _KINDS[data[position]]
        length = int.from_bytes(data[position + 1 : position + 1 + length_bytes], "big") if length_bytes else fixed
        position += head
        items, open_items = items + 1, open_items - 1
        if children:
            open_items += children * length
        else:
            position += length
    return items


def _kind(first: int) -> tuple[int, int, int, int]:
    """For a value with this first byte: the bytes before its content, how many of these give the length or the fixed
    length, and the items per element (0: the length is in bytes).
    """
    if first < 0x80 or first >= 0xE0 or first in (0xC0, 0xC1, 0xC2, 0xC3):  # small integers, nil, booleans
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
    lengths = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
    if first in lengths:  # bytes, extensions, texts
        return 1 + lengths[first] + (0xC7 <= first <= 0xC9), lengths[first], 0, 0

    wide = 2 if first in (0xDC, 0xDE) else 4
    return 1 + wide, wide, 0, 1 if first <= 0xDD else 2  # arrays, maps


_KINDS = tuple(map(_kind, range(256)))
