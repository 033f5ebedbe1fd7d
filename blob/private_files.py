"""Files and directories that are their owner's alone and survive a power cut; whether others may read some."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

DIRECTORY_MODE, FILE_MODE = 0o700, 0o600


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


def is_open(path: str | Path) -> bool:
    """Whether every user of this machine may read that file or directory, by its rights and those above it."""
    try:
        there = Path(os.path.realpath(path))
        mode = os.stat(there).st_mode
        read = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
        return mode & read == read and all(os.stat(above).st_mode & stat.S_IXOTH for above in there.parents)
    except OSError:
        return False
