"""Changes of the index in its file, one at a time: who changes it reads, decides and writes while no other one does."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from persist.core.errors import InvalidUsage, Unavailable
from persist.regions.index import Index, read_index, write_index

LOCK_S = 10.0  # for so long a change waits for another one, which takes milliseconds
LOOK_S = 0.02

Change = Callable[[Index], Index]


def change_index(path: str | Path, change: Change, *, makes: bool = False) -> Index:
    """Change the index in a file; as it is then. `makes`: where no file is yet, the change is of an empty index.

    `change` may be called twice. Raises what it raises, what `read_index` raises, InvalidUsage (the file cannot be
    written), Unavailable (another one changes the index, and does not end).
    """
    change(_read(path, makes)).check()  # what is refused leaves nothing behind, not even a lock
    with _locked(path):
        changed = change(_read(path, makes))
        write_index(path, changed)
    return changed


def _read(path: str | Path, makes: bool) -> Index:
    return Index() if makes and str(path) and not Path(path).exists() else read_index(path)


@contextmanager
def _locked(path: str | Path) -> Iterator[None]:
    """Hold the file beside the index, which stays: one that is deleted could be locked twice.

    The index itself does not do, since each change puts another file in its place.
    """
    lock = f"{path}.lock"
    try:
        held = _opened(lock)
    except OSError as error:
        raise InvalidUsage(f"the index {path} cannot be changed: {lock}: {error.strerror}") from error
    try:
        for _ in range(max(1, int(LOCK_S / LOOK_S))):
            if _taken(held, lock):
                break
            time.sleep(LOOK_S)
        else:
            raise Unavailable(f"another command has been changing the index {path} for {LOCK_S:g} s: retry")
        yield
    finally:
        os.close(held)  # which lets it go


def _opened(lock: str) -> int:
    try:
        return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:  # another user has made it; to read it is enough, but on NFS
        return os.open(lock, os.O_RDONLY | os.O_CLOEXEC)


def _taken(held: int, lock: str) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise InvalidUsage(f"{lock} cannot be locked: {error.strerror}") from error
    return True
