"""Files and directories that are their owner's alone and survive a power cut; locks; whether others may read some."""

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
LOCK_S = 10.0  # for so long a change of a file waits for another one, which takes milliseconds
LOCK_POLL_S = 0.02


def make_directories(path: str | Path, mode: int = DIRECTORY_MODE, top: str = "") -> None:
    """Make a directory, and those above it that are missing, none above `top`. What is there stays as it is.

    Unless `mode` says otherwise they are their owner's alone. Without `top` their names are durable after that.
    """
    missing = [os.fspath(path)]
    while missing[-1] != top and (above := os.path.dirname(missing[-1])) and not os.path.isdir(missing[-1]):
        missing.append(above)
    for each in reversed(missing):
        try:
            os.mkdir(each, mode)
        except FileExistsError:
            if not os.path.isdir(each):
                raise
        else:
            if not top:
                sync_directory(os.path.dirname(each) or os.curdir)


def sync_directory(path: str | Path) -> None:
    """Make durable which names a directory has. One that this process may not list is left to the file system."""
    try:
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def replace_file(fresh: str | Path, path: str | Path) -> None:
    """Put a file, whose bytes are synced, in the place of another one in its directory. Durable once it returns."""
    os.replace(fresh, path)
    sync_directory(os.path.dirname(path) or os.curdir)


def make_file(path: str) -> None:
    """Make an empty file, for its owner alone, where there is none. That it cannot be made is not told.

    It is made under another name and linked: to open it by its own name, and close it, would take from this process the
    locks that SQLite may hold on it by now.
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
    """Hold a lock, for which a file is made that stays: one that is deleted could be locked twice.

    It stands beside the file that is to be changed: that one gets replaced. Raises OSError: the lock cannot be had;
    TimeoutError: another process has held it for LOCK_S.
    """
    try:
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    except PermissionError:  # another user has made it; to read it is enough, but on NFS
        held = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        until_s = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    raise TimeoutError from None
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(held)  # which lets it go


def is_open(path: str | Path) -> bool:
    """Whether every user of this machine may read that file or directory, by its rights and those above it."""
    try:
        there = Path(os.path.realpath(path))
        mode = os.stat(there).st_mode
        read = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
        return mode & read == read and all(os.stat(above).st_mode & stat.S_IXOTH for above in there.parents)
    except OSError:
        return False
