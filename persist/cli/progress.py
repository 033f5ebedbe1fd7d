"""One line in a terminal that says how far something is: a merge of a shard, a file that is imported."""

from __future__ import annotations

import threading
from typing import TextIO

WIDTH = 24
MIB = 1024 * 1024
LINE_MAX = 100


class ProgressBar:
    """Shows the latest thing that moved; several threads may report. Clears its line when one is done."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._is_shown = False

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes that are read, for a shard or a file called `what`."""
        share = 1.0 if total <= 0 else min(1.0, done / total)
        filled = round(share * WIDTH)
        line = f"{what[-40:]} [{'#' * filled}{'.' * (WIDTH - filled)}] {done / MIB:,.1f} of {total / MIB:,.1f} MiB"
        with self._lock:
            if share < 1:
                self._out.write("\r" + line[:LINE_MAX].ljust(LINE_MAX))
                self._out.flush()
                self._is_shown = True
            else:
                self._clear()

    def clear(self) -> None:
        """Take the line away, if one is there: something else is to be said."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self._is_shown:
            self._out.write("\r" + " " * LINE_MAX + "\r")
            self._out.flush()
            self._is_shown = False
