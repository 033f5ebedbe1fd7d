"""Other processes that have a turn."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def holding(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs this program, and has said on its first line that it has its turn at once."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "AT_ONCE\n"
        try:
            yield holder
        finally:
            holder.kill()
