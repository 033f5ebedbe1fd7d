"""One log line for a storm of retries, not one for each, and no flood of such lines. And one for what is damaged.

A storm is: one command, or one commit, was tried again more than `STORM_TRIES` times in a row. The same trouble of the
same shard is told once in `TOLD_EVERY_S` seconds, however many callers have it; the next line says how many storms it
stands for.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable

from persist.core.errors import Corruption, PersistError

STORM_TRIES = 5
TOLD_EVERY_S = 60.0
TROUBLES_MAX = 1_000  # shards and kinds of which it is remembered when they were told; the oldest go first
REASON_MAX = 2_000  # characters of an error's sentence in the log
_log = logging.getLogger("persist.retries")
_corrupt = logging.getLogger("persist.corruption")


class Storms:
    """Tells of storms, and of what is damaged. Thread-safe. `now_s` is a monotonic clock.

    `storms` and `corruptions` count them, `retries` every try after the first.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.storms = 0
        self.corruptions = 0
        self._now_s = now_s
        self._lock = threading.Lock()
        self._retries: dict[str, int] = {}
        self._told: OrderedDict[tuple[str, str, str], tuple[float, int]] = OrderedDict()

    @property
    def retries(self) -> dict[str, int]:
        """How often each of `who` tried again."""
        with self._lock:
            return dict(self._retries)

    def again(self, who: str, shard: str, tries: int, error: BaseException, request_id: str = "") -> None:
        """`who` (`client`, `committer`) has failed `tries` times in a row, last with `error`, and tries again."""
        kind = error.kind if isinstance(error, PersistError) else type(error).__name__
        key = (who, shard, kind)
        with self._lock:
            self._retries[who] = self._retries.get(who, 0) + 1
            if tries != STORM_TRIES + 1:
                return
            self.storms += 1
            now_s = self._now_s()
            told_s, left_out = self._told.get(key, (now_s - TOLD_EVERY_S, 0))
            if now_s - told_s < TOLD_EVERY_S:
                self._told[key] = (told_s, left_out + 1)
                return
            self._told[key] = (now_s, 0)
            self._told.move_to_end(key)
            if len(self._told) > TROUBLES_MAX:
                self._told.popitem(last=False)
        reason = str(error)[:REASON_MAX]
        fields = {"who": who, "shard": shard or None, "kind": kind, "tries": tries, "reason": reason}
        more = {"request_id": request_id or None, "left_out": left_out}
        about = f" of shard {shard!r}" if shard else ""
        _log.warning("retry storm: try %d of the %s%s: %s", tries, who, about, reason, extra={**fields, **more})

    def corrupted(self, shard: str, error: BaseException, doing: str) -> None:
        """Count, and log, that a shard or a part of it is damaged, where no answer tells of it. `doing`: what met it.

        Other errors are not told.
        """
        if isinstance(error, Corruption):
            self.count_corruption()
            reason = str(error)[:REASON_MAX]
            fields = {"shard": shard, "kind": error.kind, "reason": reason, "doing": doing}
            _corrupt.error("corruption, met by %s: %s", doing, reason, extra=fields)

    def count_corruption(self) -> None:
        """Count one that is told elsewhere."""
        with self._lock:
            self.corruptions += 1
