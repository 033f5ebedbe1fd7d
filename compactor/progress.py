"""One line in a terminal that says how far the merges are."""

from __future__ import annotations

import threading
from typing import TextIO

WIDTH = 24
MIB = 1024 * 1024
LINE_MAX = 100


class ProgressBar:
    """Shows the latest merge that moved; several threads may report. Clears its line when a merge is done."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()

    def __call__(self, shard: str, done: int, total: int) -> None:
        """`done` of `total` input bytes of a merge of the shard."""
        share = 1.0 if total <= 0 else min(1.0, done / total)
        filled = round(share * WIDTH)
        line = f"{shard[-40:]} [{'#' * filled}{'.' * (WIDTH - filled)}] {done / MIB:,.1f} of {total / MIB:,.1f} MiB"
        with self._lock:
            self._out.write("\r" + (line[:LINE_MAX].ljust(LINE_MAX) if share < 1 else " " * LINE_MAX + "\r"))
            self._out.flush()
