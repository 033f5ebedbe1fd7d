"""Opening a file that somebody named: a pipe, a device or a directory in its place is refused, and holds nobody up."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from persist.core.errors import InvalidUsage

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def opens_regular(path: str, flags: int) -> int:
    """An opener for `open`. Raises OSError where there is no regular file. No pipe is waited for."""
    found = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(found).st_mode):
        return found
    os.close(found)
    raise OSError(errno.EINVAL, "it is no regular file", path)


def read_with_mode(path: str | Path, bytes_max: int) -> tuple[bytes, int]:
    """At most so many bytes of a regular file, and its permissions. Raises OSError."""
    with open(path, "rb", opener=opens_regular) as file:
        return file.read(bytes_max), stat.S_IMODE(os.fstat(file.fileno()).st_mode)


def read_bounded(what: str, path: str | Path, bytes_max: int, *, own: bool = False) -> bytes:
    """The bytes of a file; `what` says which, as in `the quotas file q.json`.

    Raises InvalidUsage: it cannot be read, has more bytes than that, or, where it is to be `own`, others may write it.
    """
    try:
        data, mode = read_with_mode(path, bytes_max + 1)
    except OSError as error:
        raise InvalidUsage(f"{what} cannot be read: {error.strerror}") from error
    if len(data) > bytes_max:
        raise InvalidUsage(f"there are more than {bytes_max} bytes in {what}")
    if own and mode & OTHERS_WRITE:
        raise InvalidUsage(f"{what} has the mode {mode:04o}, so others may write it: run chmod go-w {path}")
    return data
