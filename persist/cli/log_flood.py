"""A bound on log lines, so that a flood of errors does not fill a disk."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 60.0
LINES_MAX = 100  # of one trouble (who says what, of which shard, and which kind of error) in a window
ALL_LINES_MAX = 5_000  # of all troubles together in a window; the first line of one that is damaged passes all the same
TROUBLES_MAX = 2_000  # that are remembered; the oldest go first
UNBOUNDED = ("persist.access", "persist.audit")  # a line for each request, of which none may be missing
DAMAGE = "corruption"


@dataclass(slots=True)
class _Trouble:
    began_s: float
    lines: int = 0
    left_out: int = 0


class FloodFilter(logging.Filter):
    """Drops lines beyond the bounds. The next line of the same trouble says how many were `left_out`.

    `now_s` is a monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        super().__init__()
        self._now_s = now_s
        self._lock = threading.Lock()
        self._all = _Trouble(now_s())
        self._troubles: OrderedDict[tuple[object, ...], _Trouble] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name in UNBOUNDED:
            return True
        kind = getattr(record, "kind", None)
        key = (record.name, record.msg if isinstance(record.msg, str) else None, getattr(record, "shard", None), kind)
        with self._lock:
            now_s = self._now_s()
            trouble = self._troubles.get(key)
            if trouble is None:
                trouble = self._troubles[key] = _Trouble(now_s)
                if len(self._troubles) > TROUBLES_MAX:
                    self._troubles.popitem(last=False)
            for one in (trouble, self._all):
                if now_s - one.began_s >= WINDOW_S:
                    one.began_s, one.lines = now_s, 0
            is_first = trouble.lines == 0 and kind == DAMAGE
            if trouble.lines >= LINES_MAX or (self._all.lines >= ALL_LINES_MAX and not is_first):
                trouble.left_out += 1 + int(getattr(record, "left_out", 0))
                return False
            trouble.lines += 1
            self._all.lines += 1
            if trouble.left_out:  # beside those for which the line itself stands, as one of a storm does
                record.left_out = int(getattr(record, "left_out", 0)) + trouble.left_out
                trouble.left_out = 0
        return True
