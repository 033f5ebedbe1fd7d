"""Advisory locks that keep processes from racing on one key, and a watchdog that breaks hanging calls.

Only the compare-and-set decides who wins; a turn only avoids work that would be lost. So nothing depends on it: two
processes may have it at once, and a process that has waited too long proceeds without it.
"""

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

from blob.private_files import make_file

WAITERS_MAX = 16  # threads that wait for turns; further callers proceed without
DISTRUST_S = 3.0  # after a wait in vain, perhaps for a suspended process, no caller waits for so long
_BUSY = {errno.EACCES, errno.EAGAIN}


class Turn(enum.Enum):
    """How a turn was obtained."""

    AT_ONCE = 0  # or the store has no turns
    WAITED = 1  # after the turns of others
    NONE = 2  # another process still has it


class FileTurns:
    """Turns for the processes of one machine: locks on bytes of the file `path`, one byte for each key.

    The system releases the locks of a process that ends. Two threads of a process may have the same turn. Thread-safe.
    """

    def __init__(self, path: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._monotonic = monotonic
        self._lock = threading.Lock()  # guards the next three
        self._waiters = 0
        self._file: int | None = None
        self._is_closed = False
        self._distrusted_until = 0.0

    @contextlib.contextmanager
    def turn(self, key: str, wait_s: float) -> Iterator[Turn]:
        """Have the turn of a key during the `with`. Waits for at most `wait_s` seconds; raises nothing."""
        offset = zlib.crc32(key.encode())
        turn = self._acquire(offset, wait_s)
        try:
            yield turn
        finally:
            if turn is not Turn.NONE:
                self._unlock(offset)

    def _acquire(self, offset: int, wait_s: float) -> Turn:
        if self._try_lock(offset):
            return Turn.AT_ONCE
        if wait_s <= 0 or self._monotonic() < self._distrusted_until:
            return Turn.NONE
        waiter = self._start_waiter(offset)
        if waiter is not None and waiter.wait(wait_s):
            return Turn.WAITED
        self._distrusted_until = self._monotonic() + DISTRUST_S
        return Turn.NONE

    def _start_waiter(self, offset: int) -> _Waiter | None:
        """A thread that waits for the lock, because the system call has no timeout. None if there are too many."""
        file = self._open()
        with self._lock:
            if file is None or self._waiters == WAITERS_MAX:
                return None
            self._waiters += 1
        return _Waiter(file, offset, self._waiter_ended)

    def _waiter_ended(self) -> None:
        with self._lock:
            self._waiters -= 1

    def _try_lock(self, offset: int) -> bool:
        """Whether the turn is free. If the file cannot be opened or locked, every process has the turn."""
        try:
            file = self._open()
        except OSError:  # perhaps it belongs to another user
            return True
        try:
            if file is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
        except OSError as error:
            return error.errno not in _BUSY
        return True

    def _unlock(self, offset: int) -> None:
        with contextlib.suppress(OSError):
            file = self._open()
            if file is not None:
                fcntl.lockf(file, fcntl.LOCK_UN, 1, offset)

    def _open(self) -> int | None:
        """The file, created if it is missing; None after `close`."""
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
    """Waits for the lock on a byte, on a thread of its own. The longest-waiting process gets it first."""

    def __init__(self, file: int, offset: int, ended: Callable[[], None]) -> None:
        self._file = file
        self._offset = offset
        self._ended = ended
        self._lock = threading.Lock()  # guards the next two
        self._is_locked = False
        self._is_wanted = True
        self._finished = threading.Event()
        threading.Thread(target=self._run, name="consensus-turn", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether the lock was acquired in time. If not, it is released as soon as it is acquired."""
        self._finished.wait(seconds)
        with self._lock:
            self._is_wanted = self._is_locked
            return self._is_locked

    def _run(self) -> None:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._offset)
            with self._lock:
                self._is_locked = self._is_wanted
            if not self._is_locked:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._offset)
        except OSError:  # the file was closed, or the system has no more locks
            pass
        finally:
            self._ended()
            self._finished.set()


class Watchdog:
    """Breaks sockets that are watched for longer than `timeout_s`, so that a driver that would wait forever fails.

    libpq has no client-side limit on a query, and a frozen server still acknowledges packets.
    """

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
            # Under the lock, so that the descriptor cannot have been closed and reused.
            with self._lock:
                for deadline, descriptor in self._watched.values():
                    if now > deadline:
                        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
                            copy.shutdown(socket.SHUT_RDWR)
