"""Opening a file that somebody named: a pipe, a device or a directory in its place is refused, and holds nobody up."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from persist.core.errors import InvalidUsage


def opens_regular(path: str, flags: int) -> int:
    """An opener for `open`. Raises OSError where there is no regular file. No pipe is waited for."""
    found = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(found).st_mode):
        return found
    os.close(found)
    raise OSError(errno.EINVAL, "it is no regular file", path)


def read_bounded(what: str, path: str | Path, bytes_max: int) -> bytes:
    """The bytes of a file; `what` says which, as in `the quotas file q.json`.

    Raises InvalidUsage: it cannot be read, or has more bytes than that.
    """
    try:
        with open(path, "rb", opener=opens_regular) as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise InvalidUsage(f"{what} cannot be read: {error.strerror}") from error
    if len(data) > bytes_max:
        raise InvalidUsage(f"there are more than {bytes_max} bytes in {what}")
    return data
