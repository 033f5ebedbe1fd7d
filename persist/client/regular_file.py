"""Opening a file that somebody named: a pipe, a device or a directory in its place is refused, and holds nobody up."""

from __future__ import annotations

import errno
import os
import stat


def opens_regular(path: str, flags: int) -> int:
    """An opener for `open`. Raises OSError where there is no regular file. No pipe is waited for."""
    found = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(found).st_mode):
        return found
    os.close(found)
    raise OSError(errno.EINVAL, "it is no regular file", path)
