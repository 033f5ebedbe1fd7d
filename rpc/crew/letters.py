"""Letters between worker processes: a connection as a file descriptor, with what was read of it so far.

Each worker has a letter box, a pair of datagram sockets that the supervisor keeps: what was sent to a worker that has
died it passes on. Only the workers of one server have these sockets, so what a letter says is so.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from dataclasses import dataclass
from typing import Any

import msgspec

INLINE_BYTES_MAX = 16 * 1024  # of what was read; more goes along as a file
LETTER_BYTES_MAX = 64 * 1024
ROOM_BYTES = 1024 * 1024  # in a letter box, as far as the system lets us
FILES_MAX = 2  # of one letter


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """Whose request comes on a socket that is not the client's own: the address, and the names of its certificate.

    `until_s`: the end of the certificate, in seconds since 1970; `names` are empty where none was shown.
    """

    host: str | None
    port: int
    scheme: str
    names: tuple[str, ...] = ()
    until_s: float = 0.0


class _Letter(msgspec.Struct, frozen=True, array_like=True):
    data: bytes
    identity: Identity | None = None


@dataclass(slots=True)
class Given:
    """A connection that another worker has begun. `identity`: None where the socket is the client's own."""

    connection: socket.socket
    data: bytes
    identity: Identity | None


_READ = msgspec.msgpack.Decoder(_Letter)


@dataclass(frozen=True, slots=True)
class Box:
    """A letter box: the ends by which letters are read and sent."""

    read: int
    send: int


def open_box() -> Box:
    """A new one, of file descriptors that children may inherit."""
    reading, sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for end, room in ((reading, socket.SO_RCVBUF), (sending, socket.SO_SNDBUF)):
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, room, ROOM_BYTES)
        end.setblocking(False)
    return Box(reading.detach(), sending.detach())


def socket_of(end: int) -> socket.socket:
    """An end of a letter box that was inherited."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM, fileno=end)
    found.setblocking(False)
    return found


def send(box: socket.socket, connection: int, data: bytes, identity: Identity | None = None) -> bool:
    """Send a connection and what was read of it; False: the box takes no letter now."""
    with contextlib.ExitStack() as opened:
        files = [connection]
        try:
            if len(data) > INLINE_BYTES_MAX:
                file: Any = opened.enter_context(tempfile.TemporaryFile(prefix="persist-read-", buffering=0))
                file.write(data)
                files.append(file.fileno())
                data = b""
            socket.send_fds(box, [msgspec.msgpack.encode(_Letter(data, identity))], files)
        except OSError:  # it is full, or too many files are on their way, or the disk is full
            return False
    return True


def pass_on(box: socket.socket, to: socket.socket) -> bool:
    """Move a letter to another box; False: there is none, or it finds no room there and is lost."""
    try:
        told, files, _, _ = socket.recv_fds(box, LETTER_BYTES_MAX, FILES_MAX)
    except OSError:
        return False
    try:
        socket.send_fds(to, [told], files)
    except OSError:
        return False
    finally:
        for file in files:
            os.close(file)
    return True


def receive(box: socket.socket) -> Given | None:
    """The next letter; None: there is none. Raises ValueError: it came without its connection."""
    try:
        told, files, _, _ = socket.recv_fds(box, LETTER_BYTES_MAX, FILES_MAX)
    except BlockingIOError:
        return None
    data, identity = b"", None
    try:
        letter = _READ.decode(told)
        data, identity = letter.data, letter.identity
        if len(files) == FILES_MAX:
            with open(files.pop(), "rb") as file:
                file.seek(0)
                data = file.read()
        if not files:  # this process can open no more files
            raise ValueError("a connection that was handed over has got lost")
        return Given(socket.socket(fileno=files.pop()), data, identity)
    finally:
        for left in files:
            os.close(left)
