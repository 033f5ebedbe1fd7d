"""Private, durable files and directories; file locks; whether other users may read a file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

DIRECTORY_MODE, FILE_MODE = 0o700, 0o600
LOCK_S = 10.0  # how long a change of a file waits for another change, which takes milliseconds
LOCK_POLL_S = 0.02


def make_directories(path: str | Path, mode: int = DIRECTORY_MODE, top: str = "") -> None:
    """Create a directory and its missing parents, none above `top`. Existing directories stay as they are.

    By default they are private to their owner. Without `top` their names are durable on return.
    """
    missing = [os.fspath(path)]
    while missing[-1] != top and (above := os.path.dirname(missing[-1])) and not os.path.isdir(missing[-1]):
        missing.append(above)
    for directory in reversed(missing):
        try:
            os.mkdir(directory, mode)
        except FileExistsError:
            if not os.path.isdir(directory):
                raise
        else:
            if not top:
                sync_directory(os.path.dirname(directory) or os.curdir)


def sync_directory(path: str | Path) -> None:
    """Make the names in a directory durable. Does nothing if this process may not open the directory."""
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def replace_file(fresh: str | Path, path: str | Path) -> None:
    """Replace a file by another one in its directory whose bytes are synced. Durable on return."""
    os.replace(fresh, path)
    sync_directory(os.path.dirname(path) or os.curdir)


def make_file(path: str) -> None:
    """Create an empty private file if it does not exist. Failures are ignored.

    The file is created under another name and linked: opening and closing it by its own name would release the locks
    that SQLite may hold on it in this process by now.
    """
    path = os.path.realpath(path)
    if os.path.exists(path):
        return
    with contextlib.suppress(OSError):
        opened, fresh = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path))
        os.close(opened)
        try:
            os.link(fresh, path)
        finally:
            os.unlink(fresh)


@contextlib.contextmanager
def locked(lock: str | Path, mode: int = FILE_MODE) -> Iterator[None]:
    """Hold the lock file `lock`. It is created and never deleted: a deleted file could be locked twice.

    It is a separate file because the file that it protects is replaced. Raises OSError if it cannot be locked, and
    TimeoutError if another process has held it for LOCK_S.
    """
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    except PermissionError:  # another user created it; the right to read is enough, except on NFS
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        deadline_s = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    raise TimeoutError from None
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)  # releases the lock


def is_open(path: str | Path) -> bool:
    """Whether every user of this machine may read a file or directory, by its mode and those of its parents."""
    try:
        resolved = Path(os.path.realpath(path))
        mode = os.stat(resolved).st_mode
        read = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
        return mode & read == read and all(os.stat(above).st_mode & stat.S_IXOTH for above in resolved.parents)
    except OSError:
        return False
