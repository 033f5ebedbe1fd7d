"""Files that are read again when they change: how that is seen."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

LOOK_AGAIN_S = 0.5


class ChangedFiles:
    """Whether files were changed. Make it before they are read, so that no change is missed. Not thread-safe."""

    def __init__(self, paths: Iterable[str], now_s: Callable[[], float]) -> None:
        self._paths = tuple(paths)
        self._now_s = now_s
        self._looked_s = now_s()
        self._stamps = self._stamped()

    def is_due(self) -> bool:
        """Whether the last look is LOOK_AGAIN_S old."""
        return abs(self._now_s() - self._looked_s) >= LOOK_AGAIN_S

    def look(self) -> bool:
        """Whether one of them is another file than at the last look, or has other bytes or rights. False: not due."""
        if not self.is_due():
            return False
        self._looked_s = self._now_s()
        before, self._stamps = self._stamps, self._stamped()
        return self._stamps != before

    def again(self) -> None:
        """They could not be read for now: the next look tells that they have changed."""
        self._stamps = []

    def _stamped(self) -> list[tuple[int, int, int, int] | None]:
        return [_stamp(path) for path in self._paths]


def _stamp(path: str) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode
