"""Turns of writers on one key, and a watchdog that ends calls which hang."""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import itertools
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress

from blob.private_files import make_file

# Taking turns: whoever wants to commit on a key waits for who does so now, where the store can tell.
#
# Only the compare-and-set decides who wins; a turn only saves the work of those who would lose. So nothing depends on
# it: it may be had by two at once, and who has waited for long enough goes on without it.


WAITERS_MAX = 16  # threads that wait for turns; who finds none goes on without
DISTRUST_S = 3.0  # who has waited in vain, perhaps for a process that was stopped, does not wait again for so long
_BUSY = {errno.EACCES, errno.EAGAIN}


class Turn(enum.Enum):
    """How a turn was had."""

    AT_ONCE = 0  # or the store knows no turns
    WAITED = 1  # others have had theirs meanwhile
    NONE = 2  # somebody has it still


class FileTurns:
    """Turns of the processes of one machine: locks on bytes of the file `path`, one byte for each key.

    The system gives back what an ended process had. Two threads of a process may have the same turn. Thread-safe.
    """

    def __init__(
        self,
        path: str,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._monotonic = monotonic
        self._lock = threading.Lock()  # guards the three below
        self._waiters = 0
        self._file: int | None = None
        self._is_closed = False
        self._distrusted_until = 0.0

    @contextlib.contextmanager
    def turn(self, key: str, wait_s: float) -> Iterator[Turn]:
        """Have the turn of a key while the `with` lasts. Waits for at most `wait_s` seconds; raises nothing."""
        place = zlib.crc32(key.encode())
        found = self._take(place, wait_s)
        try:
            yield found
        finally:
            if found is not Turn.NONE:
                self._unlock(place)

    def _take(self, place: int, wait_s: float) -> Turn:
        if self._try(place):
            return Turn.AT_ONCE
        if wait_s <= 0 or self._monotonic() < self._distrusted_until:
            return Turn.NONE
        waiter = self._waiter(place)
        if waiter is not None and waiter.wait(wait_s):
            return Turn.WAITED
        self._distrusted_until = self._monotonic() + DISTRUST_S
        return Turn.NONE

    def _waiter(self, place: int) -> _Waiter | None:
        """A thread that waits for the turn: no call of the system that waits for a lock can be told to give up."""
        file = self._opened()
        with self._lock:
            if file is None or self._waiters == WAITERS_MAX:
                return None
            self._waiters += 1
        return _Waiter(file, place, self._ended)

    def _ended(self) -> None:
        with self._lock:
            self._waiters -= 1

    def _try(self, place: int) -> bool:
        """Whether nobody has it any more. Where the file cannot be opened or locked, all have it at once."""
        try:
            file = self._opened()
        except OSError:  # another user's, perhaps: that it may not be opened does not say that somebody has the turn
            return True
        try:
            if file is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError as error:
            return error.errno not in _BUSY
        return True

    def _unlock(self, place: int) -> None:
        with contextlib.suppress(OSError):
            file = self._opened()
            if file is not None:
                fcntl.lockf(file, fcntl.LOCK_UN, 1, place)

    def _opened(self) -> int | None:
        """The file, made where it is not there; None once this is closed."""
        if self._file is None:
            with self._lock:
                if self._file is None and not self._is_closed:
                    make_file(self._path)
                    self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        return self._file

    def close(self) -> None:
        with self._lock:
            file, self._file, self._is_closed = self._file, None, True
        if file is not None:
            os.close(file)


class _Waiter:
    """Waits for the lock on a byte, on a thread of its own. Whoever has waited longest gets it first."""

    def __init__(self, file: int, place: int, ended: Callable[[], None]) -> None:
        self._file = file
        self._place = place
        self._ended = ended
        self._lock = threading.Lock()  # guards the two below
        self._is_had = False
        self._is_wanted = True
        self._told = threading.Event()
        threading.Thread(target=self._run, name="consensus-turn", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether the lock was had in time. If not, it is given back at once where it comes later."""
        self._told.wait(seconds)
        with self._lock:
            self._is_wanted = self._is_had
            return self._is_had

    def _run(self) -> None:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._place)
            with self._lock:
                self._is_had = self._is_wanted
            if not self._is_had:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._place)
        except OSError:  # the file was closed, or the system knows no more locks
            pass
        finally:
            self._ended()
            self._told.set()


# Ends calls that hang: a driver that waits for ever is freed by shutting its socket down.
#
# libpq has no client-side limit on a query, and a frozen server still acknowledges packets. So each call is registered
# here, and one thread breaks the connection of whatever is overdue; the driver then fails at once.


class Watchdog:
    """Breaks sockets that are watched for longer than `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._watched: dict[int, tuple[float, int]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, descriptor: int) -> int:
        """Break the socket `descriptor` unless `release` is called in time with what this returns.

        The socket must stay open until then.
        """
        token = next(self._ids)
        with self._lock:
            self._watched[token] = (time.monotonic() + self._timeout_s, descriptor)
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="consensus-watchdog", daemon=True)
                self._thread.start()
        return token

    def release(self, token: int) -> None:
        with self._lock:
            del self._watched[token]

    def close(self) -> None:
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self._timeout_s / 4)):
            now = time.monotonic()
            # Under the lock, so that the descriptor cannot have been closed and given to something else.
            with self._lock:
                for deadline, descriptor in self._watched.values():
                    if now > deadline:
                        _break(descriptor)


def _break(descriptor: int) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        copy.shutdown(socket.SHUT_RDWR)
