"""Letters: who waits for its turn leaves what it wants done, and who has the turn does it with its own, and answers.

They lie in slots of the file of turns. A process has the slots that it uses until it ends, by locks on bytes far beyond
the file. So the slots and what they hold are bounded. A slot has two heads: one that only its owner writes, with the
number of its letter, and one that only who has the turn writes, with the number that was taken and the one that was
answered. What is half written has no good checksum, and counts as not there. Who left a letter is woken through a
socket of the system's without a file; only that there may be news is told by it, and who misses it looks by itself.

A letter may be done although nobody answers it: who took it ended, or was stopped, and goes on later. So only what
may come twice is left as one. Rows do not stay behind: a letter is overwritten once it was answered or withdrawn, and
that of a process which ended by whoever has its slot next, or by `wipe`.

Only processes of the user who owns the file leave and take them, and only where nobody else may open it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass

SLOTS = 64  # letters that wait at one time, of all processes; who finds none waits for its turn
OWN_MAX = 16  # slots that one store has: threads that wait, each for another key
LETTER_BYTES_MAX = 96 * 1024
ANSWER_BYTES_MAX = 16 * 1024

_HEAD = struct.Struct("<16s16sQQI")  # number, socket, seen, place, length; then its checksum
_REPLY = struct.Struct("<16s16sBI")  # number that was taken, that was answered, whether again, length; checksum
_SUM = struct.Struct("<I")
_KEY = struct.Struct("<H")
_HEAD_BYTES = 64
_TABLE_BYTES = SLOTS * _HEAD_BYTES
_BODIES_AT = 2 * _TABLE_BYTES
_BODY_BYTES = LETTER_BYTES_MAX + 1024  # a key, and checksums
_SLOT_BYTES = 128 * 1024
_NOTHING = bytes(16)
_EMPTY = bytes(_HEAD_BYTES)
_EMPTY_TABLE = bytes(_TABLE_BYTES)
_LOCKS_AT = 1 << 40  # bytes that are locked by who has a slot; turns lock those below 2**32
_FLOCK = struct.Struct("hh4xqqi4x")  # as Linux has it where words have 64 bits
_WAKE = "\0persist-turn-"
_SET_LOCK: int | None = getattr(fcntl, "F_OFD_SETLK", None)  # locks of an open file, not of a process


@dataclass(frozen=True, slots=True)
class Head:
    """What is left in a slot: `seen` is the larger the more its owner knows of the key; `place` is that of the turn."""

    slot: int
    number: bytes
    wake: bytes
    seen: int
    place: int
    length: int


def are_possible(file: int) -> bool:
    """Whether this system has what letters need, and the file is this user's alone."""
    if sys.platform != "linux" or _SET_LOCK is None or sys.maxsize < 2**32:
        return False
    found = os.fstat(file)
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


class Slot:
    """A slot that this process has, for one thread at a time. Every call may raise OSError."""

    def __init__(self, file: int, index: int, name: bytes) -> None:
        self._file = file
        self._index = index
        self._name = name
        self._letters = 0
        self._written = 0  # bytes of the letter that lies there
        self._number = _NOTHING
        self._head = _EMPTY  # as it was left
        self._before = b""  # what was told of letters when this one was left
        self._news = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            self._news.bind(_WAKE + name.hex())
            _wiped(file, index)
        except OSError:
            self._news.close()
            raise

    def leave(self, place: int, key: str, seen: int, data: bytes) -> None:
        """Leave a letter: whoever has the turn of this place from now on finds it."""
        self._news.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while self._news.recv(1):
                pass
        name = key.encode()
        body = _KEY.pack(len(name)) + name + data
        self._letters += 1
        self._number = self._name[:8] + self._letters.to_bytes(8, "little")
        body = _checked(body, self._number)
        _write(self._file, body, _body_at(self._index))
        self._written = len(body)
        self._before = _told(self._file, self._index)
        self._head = _checked(_HEAD.pack(self._number, self._name, seen, place, len(body)), b"")
        _write(self._file, self._head, self._index * _HEAD_BYTES)

    def wait(self, seconds: float) -> None:
        """Wait for news for at most so many seconds."""
        self._news.settimeout(max(seconds, 0.001))
        with contextlib.suppress(TimeoutError):
            self._news.recv(1)

    def answer(self) -> tuple[bytes, bool] | None:
        """What the letter was answered, and whether it was taken twice. None: it is not answered yet."""
        found = _reply(_told(self._file, self._index))
        if found is None or found[1] != self._number:
            return None
        body = os.pread(self._file, found[3], _answer_at(self._index))
        data = _unchecked(body, self._number)
        return None if data is None else (data, bool(found[2]))

    def withdraw(self) -> bool:
        """Take the letter away. Whether somebody took it before, and may still do what it says.

        Where the file was cut or overwritten meanwhile, nothing in it tells that nobody has.
        """
        if self._number == _NOTHING:
            return False
        is_spoilt = os.pread(self._file, len(self._head), self._index * _HEAD_BYTES) != self._head
        _write(self._file, _EMPTY, self._index * _HEAD_BYTES)
        _write(self._file, bytes(self._written), _body_at(self._index))
        self._number = _NOTHING
        # Not only its own number tells: who was stopped as it answered an earlier letter may have written over it.
        return is_spoilt or _told(self._file, self._index) != self._before

    def close(self) -> None:
        self._news.close()


class Slots:
    """The slots of one open file: those of this process, and all of them for who has the turn. Thread-safe."""

    def __init__(self, file: int, random: Callable[[int], bytes]) -> None:
        self._file = file
        self._random = random
        self._lock = threading.Lock()  # guards the three below: slots that are free, and all that are had
        self._free: list[Slot] = []
        self._own: dict[int, Slot] = {}
        self._sender: socket.socket | None = None

    def borrow(self) -> Slot | None:
        """A slot, to be given back. None: there is none."""
        with self._lock, contextlib.suppress(OSError):
            if self._free:
                return self._free.pop()
            return self._claimed() if len(self._own) < OWN_MAX else None
        return None

    def give_back(self, slot: Slot) -> None:
        with self._lock:
            self._free.append(slot)

    def _claimed(self) -> Slot | None:
        first = self._random(1)[0]  # so that those who come at one time do not all try the same
        for step in range(SLOTS):
            index = (first + step) % SLOTS
            if index not in self._own and _locked(self._file, index, fcntl.F_WRLCK):
                slot = Slot(self._file, index, self._random(16))
                self._own[index] = slot
                return slot
        return None

    def left(self, place: int) -> list[Head]:
        """The letters that lie there for who has the turn of this place.

        Those of processes that have ended are not among them: where one was killed, and its rows are not there, they
        are not to land when somebody commits, hours later.
        """
        table = os.pread(self._file, _TABLE_BYTES, 0)
        if not table or table == _EMPTY_TABLE[: len(table)]:
            return []
        found = []
        for index in range(len(table) // _HEAD_BYTES):
            begin = index * _HEAD_BYTES
            if table.startswith(_NOTHING, begin):
                continue
            head = _head(index, table[begin : begin + _HEAD_BYTES])
            if head is not None and head.place == place and self._is_had(index):
                found.append(head)
        return found

    def take(self, head: Head, key: str) -> tuple[bytes, bool] | None:
        """The letter, which is then to be answered, and whether somebody took it before. None: it is there no more.

        None also where it is for another key than `key`.
        """
        name, at = key.encode(), head.slot * _HEAD_BYTES
        before = _reply(_told(self._file, head.slot))
        is_again = before is not None and before[0] == head.number
        if is_again and before is not None and before[1] == head.number:
            return None  # it was answered
        body = _unchecked(os.pread(self._file, head.length, _body_at(head.slot)), head.number)
        if body is None or body[: _KEY.size + len(name)] != _KEY.pack(len(name)) + name:
            return None
        self._tell(head, _NOTHING, is_again, 0)
        if _head(head.slot, os.pread(self._file, _HEAD_BYTES, at)) != head:  # withdrawn before it was taken
            return None
        return body[_KEY.size + len(name) :], is_again

    def _is_had(self, index: int) -> bool:
        """Whether somebody has the slot. An open file is not told of locks of its own."""
        with self._lock:
            return index in self._own or _had_by_others(self._file, index)

    def answer(self, head: Head, data: bytes, is_again: bool) -> None:
        """Answer a letter that was taken, of whom its sender hears at once. At most `ANSWER_BYTES_MAX` bytes."""
        now = _reply(_told(self._file, head.slot))
        if now is None or now[0] != head.number:  # others have taken a later letter: this process was stopped
            return
        is_again = is_again or bool(now[2])  # another has taken it since, and may still do what it says
        body = _checked(data, head.number)
        _write(self._file, body, _answer_at(head.slot))
        self._tell(head, head.number, is_again, len(body))
        # Its rows are in the shard now. Who left it may be stopped for long, and an erasure does not wipe what is had.
        _write(self._file, bytes(head.length), _body_at(head.slot))
        self.wake(head)

    def _tell(self, head: Head, answered: bytes, is_again: bool, length: int) -> None:
        told = _checked(_REPLY.pack(head.number, answered, is_again, length), b"")
        _write(self._file, told, _TABLE_BYTES + head.slot * _HEAD_BYTES)

    def is_answered(self, head: Head) -> bool:
        found = _reply(_told(self._file, head.slot))
        return found is not None and found[1] == head.number

    def wake(self, head: Head) -> None:
        """Tell who left the letter that there is news. It may have ended."""
        with self._lock:
            if self._sender is None:
                self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._sender.setblocking(False)
            with contextlib.suppress(OSError):
                self._sender.sendto(b"!", _WAKE + head.wake.hex())

    def wipe(self) -> None:
        """Overwrite what processes have left that ended. May raise OSError."""
        with self._lock:
            for index in range(SLOTS):
                if index not in self._own and _locked(self._file, index, fcntl.F_WRLCK):
                    try:
                        _wiped(self._file, index)
                    finally:
                        _locked(self._file, index, fcntl.F_UNLCK)

    def close(self) -> None:
        """Before the file is closed, by which the slots are given up."""
        with self._lock:
            for slot in self._own.values():
                slot.close()
            if self._sender is not None:
                self._sender.close()


def _told(file: int, index: int) -> bytes:
    """The head of a slot that only who has the turn writes."""
    return os.pread(file, _HEAD_BYTES, _TABLE_BYTES + index * _HEAD_BYTES)


def _body_at(index: int) -> int:
    return _BODIES_AT + index * _SLOT_BYTES


def _answer_at(index: int) -> int:
    return _body_at(index) + _BODY_BYTES


def _locked(file: int, index: int, kind: int) -> bool:
    """Whether this open file has the slot now (F_WRLCK), or gave it up (F_UNLCK)."""
    assert _SET_LOCK is not None
    try:
        fcntl.fcntl(file, _SET_LOCK, _FLOCK.pack(kind, os.SEEK_SET, _LOCKS_AT + index, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _had_by_others(file: int, index: int) -> bool:
    """Whether another open file has the slot."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _LOCKS_AT + index, 1, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_OFD_GETLK, asked))[0]
    return kind != fcntl.F_UNLCK


def _wiped(file: int, index: int) -> None:
    """Overwrite what lies in a slot of one's own, as far as the file goes."""
    end = os.fstat(file).st_size
    for start, length in ((index * _HEAD_BYTES, _HEAD_BYTES), (_body_at(index), _SLOT_BYTES)):
        held = os.pread(file, length, start) if start < end else b""
        if held.strip(b"\0"):
            _write(file, bytes(len(held)), start)


def _write(file: int, data: bytes, at: int) -> None:
    if os.pwrite(file, data, at) != len(data):
        raise OSError("a letter was written in part only")


def _checked(data: bytes, number: bytes) -> bytes:
    return data + _SUM.pack(zlib.crc32(number + data))


def _unchecked(body: bytes, number: bytes) -> bytes | None:
    data = body[: -_SUM.size]
    return data if len(body) >= _SUM.size and body[-_SUM.size :] == _SUM.pack(zlib.crc32(number + data)) else None


def _head(index: int, found: bytes) -> Head | None:
    data = _unchecked(found[: _HEAD.size + _SUM.size], b"")
    if data is None or len(data) != _HEAD.size or data[:16] == _NOTHING:
        return None
    number, wake, seen, place, length = _HEAD.unpack(data)
    return Head(index, number, wake, seen, place, length) if length <= _BODY_BYTES else None


def _reply(found: bytes) -> tuple[bytes, bytes, int, int] | None:
    """The number that was taken, the one that was answered, whether it was taken twice, and the bytes of the answer."""
    data = _unchecked(found[: _REPLY.size + _SUM.size], b"")
    return _REPLY.unpack(data) if data is not None and len(data) == _REPLY.size else None
